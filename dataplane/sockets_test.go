package dataplane

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
)

// TestSocketReadsAreBounded checks that a turn reads a bounded amount from the connections that
// have data, and that the next turn begins with those that were not read.
func TestSocketReadsAreBounded(t *testing.T) {
	const conns, each = 32, 48 << 10
	got := make(map[ConnID]int)
	w, at := socketListener(t, conns)
	for range conns {
		c := dialTCP(t, at.String())
		if _, err := c.Write(make([]byte, each)); err != nil {
			t.Fatal(err)
		}
	}
	drain := func() (n int) {
		for _, f := range w.e.events.q {
			f(func(ev Event) {
				if ev.Kind == EventData {
					got[ev.Conn] += len(ev.Data)
					n += len(ev.Data)
				}
			})
		}
		w.e.events.q = nil
		return n
	}
	first := 0 // turns until each connection was read
	for late := time.Now().Add(time.Minute); ; first++ {
		w.turn()
		if n := drain(); n > socketTurn+socketRead {
			t.Fatalf("%d bytes in a turn", n)
		}
		all := len(w.streams) == conns
		for id := range w.streams {
			all = all && got[id] == each
		}
		if all {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("within a minute: %v", got)
		}
	}
}

// TestSCTPOverSockets checks that a connection over SCTP is refused, also to a listener of the same host.
func TestSCTPOverSockets(t *testing.T) {
	w, at := socketListener(t, 1)
	r := request(pkt.NewFlow(netip.AddrPortFrom(at.Addr(), 40000), at), 0)
	r.SCTP = &SCTP{}
	done := make(chan error, 1)
	r.connect(w, w.newID(), &Hop{Local: true}, done)
	if err := <-done; !errors.Is(err, errSocketSCTP) {
		t.Errorf("%v; want %v", err, errSocketSCTP)
	}
}

// TestFrameOfSocket checks that a frame with the addresses and ports of a kernel socket is no segment of it, even if it was
// received before the socket was made.
func TestFrameOfSocket(t *testing.T) {
	a, b := newPipe(t, link.PipeConfig{})
	socks, err := NewSockets(0)
	if err != nil {
		t.Fatal(err)
	}
	defer socks.Close()
	e := newEngine(t, Config{}, []Queue{{Link: a, Device: "eth", CPU: -1}, {Link: socks, CPU: -1}}, nil)
	peer := newEngine(t, Config{}, []Queue{{Link: b, CPU: -1}}, nil)
	for _, w := range append(e.workers, peer.workers...) {
		defer w.closeFDs()
	}
	l := testenv.Listen(t)
	if all := e.listening(""); len(all) != 1 || all[0] != e.workers[0] { // only if it is asked for
		t.Errorf("%d workers listen on all devices", len(all))
	}
	w, done := e.workers[1], make(chan error, 1)
	r := &ConnectRequest{Local: freeEndpoint(t, "127.0.0.1"), Remote: l.Addr().(*net.TCPAddr).AddrPort(), Timeout: time.Minute}
	r.connect(w, w.newID(), &Hop{}, done)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	tuple := tupleOf(pkt.NewFlow(r.Remote, r.Local), &Hop{SrcMAC: macB, DstMAC: macA}, IPOptions{})
	s, _ := peer.workers[0].spareSlot()
	peer.workers[0].postSegment(&tuple, &tcp.Header{SrcPort: r.Remote.Port(), DstPort: r.Local.Port(), Seq: 1, Ack: 1, Flags: tcp.ACK}, s, 0, 0, 0)
	peer.workers[0].link.Flush()
	for e.workers[0].stats.RxFrames == 0 {
		e.workers[0].turn()
	}
	w.turn()
	if n := e.workers[0].stats.RxWrongQueue; n != 0 {
		t.Errorf("%d frames were passed to the worker of the sockets", n)
	}
}

// TestNoDescriptors checks that a listener whose connections cannot be accepted, because the process has no descriptors
// left, does not keep its worker busy, and that it accepts them when there are descriptors again.
func TestNoDescriptors(t *testing.T) {
	w, at := socketListener(t, 4)
	for range 4 {
		dialTCP(t, at.String())
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Fatal(err)
		}
	}
	defer restore()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil { // ppoll takes two
		t.Fatal(err)
	}
	turns := 0
	for ; w.turn() > 0; turns++ {
		if turns == 1000 {
			t.Fatal("the listener keeps the worker busy")
		}
	}
	if w.stats.RxNoConn == 0 {
		t.Fatal("no connection was refused: the limit has no effect")
	}
	restore()
	for late := time.Now().Add(time.Minute); len(w.streams) == 0; w.turn() {
		if time.Now().After(late) {
			t.Fatal("no connection is accepted when there are descriptors again")
		}
		w.socks.Wait(-1, w.cmds.alarm.FD())
	}
	if w.socks.spare < 0 {
		t.Error("there is no spare descriptor again")
	}
}

// TestSocketMaxConns checks that a connection beyond the limit is reset.
func TestSocketMaxConns(t *testing.T) {
	w, at := socketListener(t, 4)
	w.e.cfg.MaxConns = 2
	var last net.Conn
	for range 3 {
		last = dialTCP(t, at.String())
	}
	for late := time.Now().Add(time.Minute); w.stats.RxNoConn == 0; w.turn() {
		if time.Now().After(late) {
			t.Fatal("all are accepted")
		}
	}
	if len(w.streams) != 2 || len(w.socks.conns) != 2 {
		t.Errorf("%d connections of %d sockets", len(w.streams), len(w.socks.conns))
	}
	if _, err := last.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the last one reads %v", err)
	}
}

// TestSocketErrors checks the errors that stand for those of the kernel's TCP, and that one whose reason is a route or a filter
// names it.
func TestSocketErrors(t *testing.T) {
	for errno, want := range map[unix.Errno]error{
		unix.ECONNRESET: tcp.ErrReset, unix.EPIPE: tcp.ErrReset, unix.ETIMEDOUT: tcp.ErrTimeout,
		unix.ECONNREFUSED: tcp.ErrRefused, unix.ENOPROTOOPT: tcp.ErrRefused,
		unix.EHOSTUNREACH: tcp.ErrUnreachable, unix.ENETUNREACH: tcp.ErrUnreachable, unix.EHOSTDOWN: tcp.ErrUnreachable,
	} {
		if err := socketError(errno); err != want {
			t.Errorf("%v: %v; want %v", errno, err, want)
		}
	}
	for _, errno := range []unix.Errno{unix.EACCES, unix.EPERM, unix.EINVAL, unix.ENETDOWN} {
		if err := socketError(errno); !errors.Is(err, tcp.ErrUnreachable) || !errors.Is(err, errno) {
			t.Errorf("%v: %v", errno, err)
		}
	}
}
