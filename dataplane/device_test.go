package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestDialers checks that connections from ports that bind(2) has chosen, which are all odd, are opened by all workers of a device.
func TestDialers(t *testing.T) {
	for workers := 2; workers <= 64; workers++ {
		d := &device{workers: make([]*worker, workers)}
		opened := map[*worker]int{}
		for i := range d.workers {
			d.workers[i] = new(worker)
		}
		const ports = 14000
		for i := range ports {
			opened[d.dialer(netip.AddrPortFrom(addrA, uint16(32769+2*i)))]++
		}
		for i, w := range d.workers {
			if share := ports / workers; opened[w] < share/2 || opened[w] > 2*share {
				t.Errorf("worker %d of %d opens %d connections, want about %d", i, workers, opened[w], share)
			}
		}
	}
}

// TestDevices checks that a connection stays with the device that dialed it, even if the
// peer's answers arrive on another one, as when both are on one network. When the
// interface of a device is removed, its connections end and no others. The device can be
// used again when the interface is back.
func TestDevices(t *testing.T) {
	for _, over := range []string{"TCP", "SCTP", "SCTP in UDP"} {
		t.Run(over, func(t *testing.T) {
			q := newTwoQueuesOf(t, 1, link.PipeConfig{}, "x", "y")
			e, x, y := q.hosts[0].e, q.workers[0], q.workers[1]
			if e.device("x").workers[0] != x || e.device("y").workers[0] != y || e.device("").name != "x" || e.WorkerDevice(1) != "y" {
				t.Fatal("the workers are of other devices")
			}
			if id := e.NewID(netip.AddrPortFrom(addrA, 40000), "y"); id.Worker() != 1 || e.Device(id) != "y" {
				t.Errorf("a connection by y is of worker %d", id.Worker())
			}
			qa, qb := newSimQP(t, q.hosts[0], 65536), newSimQP(t, q.hosts[1], 65536)
			s := q.openQueues(over, qa, qb)
			if x.streams[s.id] != s {
				t.Fatal("another device has adopted the connection")
			}
			ya, yb := newSimQP(t, q.hosts[0], 65536), newSimQP(t, q.hosts[1], 65536)
			other := q.openBy(y, 40001, ya, yb)

			write := func(w *worker, s *stream, qa, qb *simQP) {
				t.Helper()
				const size = 20000
				for i := range qa.mem {
					qa.mem[i] = byte(i * 7)
				}
				clear(qb.mem)
				done := len(qa.wcs) + 1
				qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000},
					verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(size, size), RKey: qb.reg.STag(), Remote: 0x10000})
				before := w.stats.TxFrames
				w.mark(s.lane)
				q.until("both done", func() bool { return len(qa.wcs) == done+1 })
				if !bytes.Equal(qb.mem[:size], qa.mem[:size]) || !bytes.Equal(qa.mem[size:2*size], qa.mem[:size]) {
					t.Error("memory differs")
				}
				if w.stats.TxFrames == before {
					t.Error("sent by another device")
				}
			}
			write(x, s, qa, qb)
			if x.stats.RxFrames != 0 || y.stats.RxWrongQueue == 0 {
				t.Errorf("x received %d frames; y passed on %d", x.stats.RxFrames, y.stats.RxWrongQueue)
			}
			write(y, other, ya, yb)

			gone := errors.New("gone")
			qa.sends = append(qa.sends, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qa.sge(0, 100)})
			done := len(qa.wcs)
			replaceLink(x, Queue{Link: link.NewNone(1500)}, gone)
			y.turn()
			if ev := q.event(0, EventClosed); ev.Conn != s.id || !errors.Is(ev.Err, gone) {
				t.Errorf("closed: %+v", ev)
			}
			if len(qa.wcs) != done+1 || qa.wcs[done].Status != verbs.WCFlushErr {
				t.Errorf("completions %+v", qa.wcs[done:])
			}
			if len(x.lanes)+len(x.streams)+x.timers.Len()+x.held.used != 0 || x.stats.Conns != 0 || !unplugged(x.link) {
				t.Errorf("left: %d lanes, %d streams, %d timers, %d frames", len(x.lanes), len(x.streams), x.timers.Len(), x.held.used)
			}
			write(y, other, ya, yb)

			replaceLink(x, Queue{Link: &crossed{q.links[0], q.links[1], &q.cross}}, nil)
			qa, qb = newSimQP(t, q.hosts[0], 65536), newSimQP(t, q.hosts[1], 65536)
			write(x, q.openBy(x, 40002, qa, qb), qa, qb)
		})
	}
}

// TestForwardedPartialChecksums checks that segments whose checksum was left to the device reach a connection of
// a device that accepts no such checksums, if the device by which they arrive does.
func TestForwardedPartialChecksums(t *testing.T) {
	q := newTwoQueuesOf(t, 1, link.PipeConfig{Filter: func(toB bool, b []byte) bool {
		var p pkt.Packet
		if !toB && p.Parse(b, len(b)) == nil {
			binary.BigEndian.PutUint16(b[p.L4Off+16:], pkt.Fold(p.PseudoSum))
		}
		return true
	}}, "x", "y")
	x, y := q.workers[0], q.workers[1]
	y.partial = true
	s := q.openQueues("TCP", newSimQP(t, q.hosts[0], 65536), newSimQP(t, q.hosts[1], 65536))
	if x.streams[s.id] != s || x.stats.RxChecksum+y.stats.RxChecksum != 0 || y.stats.RxPartial == 0 {
		t.Errorf("x drops %d frames, and y %d of %d", x.stats.RxChecksum, y.stats.RxChecksum, y.stats.RxPartial)
	}
	q.closeQueues(s.id)
}

// openBy opens a TCP connection from a port by worker w of host 0.
func (q *twoQueues) openBy(w *worker, port uint16, qa, qb *simQP) *stream {
	q.t.Helper()
	local, remote := netip.AddrPortFrom(addrA, port), netip.AddrPortFrom(addrB, port)
	p := mpa.Params{CRC: true, IRD: 8, ORD: 8}
	b := q.workers[2]
	b.turn()
	listen(q.t, b, ListenerID(port), &ListenRequest{Local: remote, Backlog: 8})
	id := w.newID()
	if err := w.connect(id, pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, time.Minute); err != nil {
		q.t.Fatal(err)
	}
	q.event(0, EventConnected)
	acc := q.event(1, EventAccepted)
	q.hosts[1].e.Attach(acc.Conn, Attachment{QP: &qb.QPBinding, Params: p})
	p.Initiator = true
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding, Params: p})
	q.event(0, EventEstablished)
	q.event(1, EventEstablished)
	return w.streams[id]
}

// TestNewLink checks that what depends on the link follows that of Plug: the scheduler's quantum, which is the cost of a frame
// at least, and the window of a listener, which its frames limit.
func TestNewLink(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{Super: link.SuperCut, RxFrames: 64})
	cfg := tcp.DefaultConfig()
	cfg.MaxHeld = 0
	e := newEngine(t, Config{TCP: &cfg}, []Queue{{Link: link.NewNone(1500), CPU: -1}}, nil)
	w := e.workers[0]
	defer w.closeFDs()
	local := netip.AddrPortFrom(addrB, 7174)
	listen(t, w, 1, &ListenRequest{Local: local, Backlog: 8})
	replaceLink(w, Queue{Link: a}, nil)
	if got, want := w.sched.Quantum(), w.frameCost(); got != want || want < a.SuperBytes() {
		t.Errorf("a quantum of %d bytes, want %d", got, want)
	}
	flow := pkt.NewFlow(local, netip.AddrPortFrom(addrA, 40000))
	syn := tcp.Segment{Header: tcp.Header{Flags: tcp.SYN, Window: 65535}, Buf: tcp.NoBuf}
	c, _, _ := w.listeners.find(&flow, pkt.ProtoTCP).tcp.HandleSegment(w.now, flow, &syn)
	var o tcp.Out
	if want := 32 * 1460; !c.PollTransmit(w.now, &o) || int(o.Window) != want {
		t.Errorf("a window of %d bytes, want %d", o.Window, want)
	}
}

// TestUnpluggedEngine checks Unplug and Plug of a running engine, and what it refuses in
// between.
func TestUnpluggedEngine(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	e := newEngine(t, Config{}, []Queue{{Link: a, Device: "x", CPU: -1}, {Link: link.NewNone(1500), Device: "y", CPU: -1}}, fixed{})
	e.Start()
	defer e.Stop()
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	connect := func(device string) error {
		return e.Connect(e.NewID(local, device), ConnectRequest{Local: local, Remote: remote, Timeout: time.Minute})
	}
	if err := connect("y"); !errors.Is(err, errUnplugged) {
		t.Errorf("by a device without a link: %v", err)
	}
	if _, err := e.Listen(ListenRequest{Local: remote, Device: "x"}); err != nil {
		t.Error(err)
	}
	if n := len(e.workers[1].listeners); n != 0 { // it sleeps
		t.Errorf("%d listeners on another device", n)
	}
	e.Unplug("x", errors.New("gone"))
	if err := connect("x"); !errors.Is(err, errUnplugged) {
		t.Errorf("by a device whose interface is gone: %v", err)
	}
	if err := e.Plug("x", nil); err == nil {
		t.Error("plugged without a queue")
	}
	if err := e.Plug("x", []Queue{{Link: a, Device: "x"}}); err != nil {
		t.Error(err)
	}
	if err := connect("x"); err != nil {
		t.Error(err)
	}
}

// fixed is a resolver that knows one hop.
type fixed struct{}

func (fixed) Resolve(netip.Addr, netip.Addr, string) (Hop, error) {
	return Hop{SrcMAC: macA, DstMAC: macB}, nil
}
func (fixed) Watch(func()) {}
