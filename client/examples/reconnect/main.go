// Command reconnect shows how a program survives restarts of the daemons that it depends
// on, its own and the peer's. The server offers memory; the client writes random bytes
// there, reads them back and compares.
//
//	reconnect -listen 10.0.0.1:7190     on one host
//	reconnect -dial 10.0.0.1:7190       on another
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// size is the length of the server's memory, in bytes.
const size = 256 << 10

func main() {
	log.SetFlags(0)
	listen := flag.String("listen", "", "be the server at this `address`")
	dial := flag.String("dial", "", "be the client of the server at this `address`")
	socket := flag.String("socket", "", "of the daemon; empty: $IWARPD_SOCKET, or the default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	work := func(dev *iwarp.Device) error { return serve(ctx, dev, *listen) }
	if *dial != "" {
		work = (&client{addr: *dial}).run(ctx)
	}
	if err := withDevice(ctx, *socket, work); ctx.Err() == nil {
		log.Fatal("reconnect: ", err)
	}
}

// withDevice opens a device and calls work with it. Each time the daemon ends, it does so
// again.
func withDevice(ctx context.Context, socket string, work func(*iwarp.Device) error) error {
	for {
		dev, err := iwarp.OpenWait(ctx, socket)
		if err != nil {
			return err
		}
		err = work(dev)
		gone := errors.Is(err, iwarp.ErrDaemonGone) || dev.Err() != nil
		dev.Close()
		if !gone {
			return err
		}
		log.Printf("%v: opening the device again", err)
	}
}

// serve gives each client memory of its own, as far as the quota allows. Accept returns ErrDraining
// when the daemon is about to stop; connected clients may then finish.
func serve(ctx context.Context, dev *iwarp.Device, addr string) error {
	l, err := dev.Listen(ctx, addr, nil)
	if err != nil {
		return err
	}
	log.Printf("listening on %v", l.Addr())
	for {
		conn, err := l.Accept(ctx)
		switch {
		case err == nil:
			go offer(ctx, conn)
		case errors.Is(err, iwarp.ErrQuota):
			log.Print(err)
		default:
			select { // until the clients have left, or the daemon ends
			case <-dev.Done():
			case <-ctx.Done():
			}
			return err
		}
	}
}

// offer sends the client the address of its memory, and keeps the memory until the client
// disconnects.
func offer(ctx context.Context, conn *iwarp.Conn) {
	defer conn.Close()
	mr, err := conn.Alloc(ctx, size, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
	if err != nil {
		log.Print(err)
		return
	}
	far := mr.RemoteAt(0, size)
	m := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, far.Addr), far.RKey)
	if conn.Send(ctx, m) == nil {
		_, _ = conn.Recv(ctx, nil) // returns when the connection ends
	}
}

type client struct {
	addr   string
	rounds int
}

// errWrong is an error that reconnecting does not fix.
var errWrong = errors.New("the bytes that came back are not those that were written")

// run returns a function that transfers data with a device until its daemon ends. It dials
// again when the peer disconnects.
func (c *client) run(ctx context.Context) func(*iwarp.Device) error {
	return func(dev *iwarp.Device) error {
		for before := -1; ; {
			err := c.session(ctx, dev)
			if ctx.Err() != nil || errors.Is(err, errWrong) || errors.Is(err, iwarp.ErrDaemonGone) || dev.Err() != nil {
				return err
			}
			if c.rounds != before { // log each failure once, not each attempt
				log.Printf("%v: dialing again", err)
			}
			before = c.rounds
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
}

// session transfers data over one connection until the connection or the daemon ends.
func (c *client) session(ctx context.Context, dev *iwarp.Device) error {
	conn, err := dev.Dial(ctx, c.addr, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	m := make([]byte, 12)
	if n, err := conn.Recv(ctx, m); err != nil || n != len(m) {
		return fmt.Errorf("greeting of %d bytes: %w", n, err)
	}
	far := iwarp.Remote{Addr: binary.BigEndian.Uint64(m), RKey: binary.BigEndian.Uint32(m[8:]), Len: size}
	random := rand.NewChaCha8([32]byte{})
	out, in := make([]byte, size), make([]byte, size)
	for first := c.rounds; ; c.rounds++ {
		select {
		case <-dev.Draining():
			return iwarp.ErrDraining
		default:
		}
		_, _ = random.Read(out)
		if err := conn.Write(ctx, far, out); err != nil {
			return err
		}
		if err := conn.Read(ctx, far, in); err != nil {
			return err
		}
		if !bytes.Equal(in, out) {
			return errWrong
		}
		if c.rounds == first {
			log.Printf("connected to %s, round %d", c.addr, c.rounds)
		}
	}
}
