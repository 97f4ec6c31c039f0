// Bytestream speaks plain TCP as a byte stream, over the data plane's own TCP on
// AF_XDP or, to compare, over the kernel's. It prints one line of JSON about what
// it did.
//
//	bytestream -stack ours -i veth0 -listen 10.0.0.1:7000 -do receive
//	bytestream -stack kernel -connect 10.0.0.1:7000 -do send -for 5s -conns 4
//
// A listener prints "ready" once it accepts connections, and serves -conns of them, -cycles times; with -cycles 0 until
// its standard input ends.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/iwarpd/iwarpd/tcp"
)

// options are the flags.
type options struct {
	stack           string
	ifname          string
	queues          int
	listen, connect string
	do              string
	bytes           int64
	time            time.Duration
	size            int
	conns, cycles   int
	backlog         int
	queue           int
	cc              string
	rcvWindow       int
	timeWait        time.Duration
	drain           time.Duration
	timeout         time.Duration
	noSACK, noTS    bool
	noWScale, ecn   bool
	seed            uint64

	partial bool // see dataplane.Queue
}

func main() {
	var o options
	fl := flag.CommandLine
	fl.StringVar(&o.stack, "stack", "ours", "whose TCP: ours or kernel")
	fl.StringVar(&o.ifname, "i", "veth0", "interface for AF_XDP")
	fl.IntVar(&o.queues, "queues", 1, "receive queues of the interface, each of which gets a worker")
	fl.StringVar(&o.listen, "listen", "", "address and port to accept connections on")
	fl.StringVar(&o.connect, "connect", "", "address and port to connect to")
	fl.StringVar(&o.do, "do", "receive", "receive, send, both, echo, request, or hold: open all connections, say one byte on each, close")
	fl.Int64Var(&o.bytes, "bytes", 0, "how much to send on each connection, or how many requests; 0: see -for")
	fl.DurationVar(&o.time, "for", 2*time.Second, "how long to send")
	fl.IntVar(&o.size, "size", 64, "bytes of a request and of its answer")
	fl.IntVar(&o.conns, "conns", 1, "connections at once")
	fl.IntVar(&o.cycles, "cycles", 1, "how many times all connections are opened and closed")
	fl.IntVar(&o.backlog, "backlog", 1024, "half-open connections of the listener")
	fl.IntVar(&o.queue, "queue", 1<<20, "bytes that may wait to be sent")
	fl.StringVar(&o.cc, "cc", "cubic", "congestion control, whatever the host's default is")
	fl.IntVar(&o.rcvWindow, "rcvwindow", 4<<20, "largest receive window of our TCP, bytes")
	fl.DurationVar(&o.timeWait, "timewait", time.Second, "length of our TIME-WAIT; the program stays until it is over")
	fl.DurationVar(&o.drain, "drain", 15*time.Second, "longest stay at the end for half-open connections; for TIME-WAIT and frames not given back it is a minute")
	fl.DurationVar(&o.timeout, "timeout", time.Minute, "to give up an active open after")
	fl.BoolVar(&o.noSACK, "no-sack", false, "ours: no SACK")
	fl.BoolVar(&o.noTS, "no-timestamps", false, "ours: no timestamps")
	fl.BoolVar(&o.noWScale, "no-wscale", false, "ours: no window scale")
	fl.BoolVar(&o.ecn, "ecn", false, "ours: request ECN")
	fl.Uint64Var(&o.seed, "seed", 1, "seed of the bytes sent")
	fl.Parse(os.Args[1:])
	if err := run(&o); err != nil {
		fmt.Fprintln(os.Stderr, "bytestream:", err)
		os.Exit(1)
	}
}

// few is the number of goroutines that the runtime and the stack may have at the end.
const few = 64

// stream is a connection of either stack. One goroutine may call Read and one Write.
type stream interface {
	io.ReadWriter
	CloseWrite() error
	// Close closes what is still open and returns when the connection has ended, with an error if its end was not orderly.
	Close() error
	Stats() (tcp.Stats, bool)
}

// stack opens streams.
type stack interface {
	Listen(local netip.AddrPort, backlog int) error
	Accept() (stream, error)
	Dial(remote netip.AddrPort) (stream, error)
	// Close waits until nothing is left of a closed connection, as far as the stack reports it.
	Close(*report) error
}

var errNoWay = errors.New("needs -listen or -connect")

func run(o *options) error {
	var (
		st  stack
		err error
	)
	switch o.stack {
	case "ours":
		st, err = newNode(o)
	case "kernel":
		st, err = &kernel{o: o}, nil
	default:
		err = fmt.Errorf("no stack %q", o.stack)
	}
	if err != nil {
		return err
	}
	r := &report{Stack: o.stack, Do: o.do, Conns: o.conns}
	switch {
	case o.listen != "":
		err = serve(o, st, r)
	case o.connect != "":
		err = call(o, st, r)
	default:
		err = errNoWay
	}
	if cerr := st.Close(r); err == nil {
		err = cerr
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	r.HeapMiB = float64(m.HeapSys) / (1 << 20)
	r.Goroutines = runtime.NumGoroutine()
	for began := time.Now(); r.Goroutines > few && time.Since(began) < time.Minute; time.Sleep(time.Millisecond) {
		r.Goroutines = runtime.NumGoroutine() // a goroutine that is done still needs a moment to end
	}
	r.finish()
	if jerr := json.NewEncoder(os.Stdout).Encode(r); err == nil {
		err = jerr
	}
	return err
}
