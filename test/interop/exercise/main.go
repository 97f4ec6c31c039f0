// Exercise is the other side of test/sctp-peer/peer, in its RDMAP mode: it tells the
// peer by Sends what to do, and verifies every byte that comes of it.
//
//	exercise -socket /run/iwarpd/iwarpd.sock -transport sctp -connect 10.97.3.2:7175 data
//	exercise -socket /run/iwarpd/iwarpd.sock -transport sctp -listen 10.97.3.1:7174 data
//
// What it does is named by the last argument; see cases. One line tells the outcome, and
// the exit status is 1 if it is another than asked for.
package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// The peer's memory: see rdmap.h there.
const (
	memSize = 4 << 20
	memSTag = 0x00a1b2c3
	memBase = 0x100000
)

const (
	depth   = 256   // of our receives
	maxSend = 70000 // bytes of a message to us
)

var be = binary.BigEndian

type run struct {
	d       *iwarp.Device
	cfg     *iwarp.Config
	listen  *iwarp.Listener
	connect string
	mtu     int
	idle    time.Duration
	size    int // of the largest transfer
	rng     *rand.Rand
}

func main() {
	socket := flag.String("socket", "", "the daemon's")
	transport := flag.String("transport", "sctp", "sctp, sctp-udp or sctp-draft")
	listen := flag.String("listen", "", "address to serve the peer at")
	connect := flag.String("connect", "", "address of the peer")
	from := flag.String("from", "", "local address to connect from")
	plain := flag.Bool("plain", false, "no enhanced set-up")
	mtu := flag.Int("mtu", 1500, "of the path, for the sizes")
	size := flag.Int("size", 1<<20, "of the largest transfer, in bytes")
	idle := flag.Duration("idle", 40*time.Second, "how long to be silent")
	timeout := flag.Duration("timeout", 2*time.Minute, "of it all")
	flag.Parse()
	f := cases[flag.Arg(0)]
	if f == nil {
		fmt.Fprintf(os.Stderr, "exercise: there is no %q\n", flag.Arg(0))
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	r := &run{connect: *connect, mtu: *mtu, idle: *idle, size: *size, rng: rand.New(rand.NewPCG(1, 7))}
	r.cfg = &iwarp.Config{PrivateData: []byte("hello"), RecvDepth: depth, RecvSize: maxSend, SendDepth: depth, Timeout: 30 * time.Second}
	if *listen != "" {
		r.cfg.PrivateData = []byte("welcome to you")
	}
	r.cfg.Startup.Transport = iwarp.SCTP
	switch *transport {
	case "sctp-udp":
		r.cfg.Startup.UDP = true
	case "sctp-draft":
		r.cfg.Startup.Transport = iwarp.SCTPDraft
	}
	if *plain {
		r.cfg.Startup.Revision = 1
	}
	if *from != "" {
		r.cfg.LocalAddr = netip.MustParseAddrPort(*from)
	}
	out, err := func() (string, error) {
		var err error
		if r.d, err = iwarp.Open(ctx, *socket); err != nil {
			return "", err
		}
		defer r.d.Close()
		if *listen != "" {
			if r.listen, err = r.d.Listen(ctx, *listen, r.cfg); err != nil {
				return "", err
			}
			defer r.listen.Close()
			fmt.Println("listening")
		}
		return f(ctx, r)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "exercise:", err)
		os.Exit(1)
	}
	fmt.Println(out)
}
