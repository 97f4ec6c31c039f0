package dataplane

import (
	"bytes"
	"net/netip"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// waiting is a connection on which Sends wait for receives.
type waiting struct {
	*sim
	a, b   *stream
	qa, qb *simQP
	drop   bool // lose the next long frame
}

const (
	waitingLen   = 8000 // bytes of a Send
	waitingSends = 40
)

func newWaiting(t *testing.T) *waiting {
	y := &waiting{}
	y.sim = newSim(t, link.PipeConfig{AtoB: impair.Config{Delay: time.Millisecond}, Filter: losing(&y.drop)})
	y.a, y.b = y.open()
	size := waitingSends * waitingLen
	y.qa, y.qb = newSimQP(t, y.hosts[0], size), newSimQP(t, y.hosts[1], size)
	y.qb.ReceiveWait = time.Hour
	y.attach(y.a, y.b, y.qa, y.qb, mpa.Params{CRC: true})
	for i := range y.qa.mem {
		y.qa.mem[i] = byte(i*7 + i/waitingLen)
	}
	return y
}

// fill sends all but one of the Sends, and loses the first segment. When the gap is filled, some wait and others
// are still held.
func (y *waiting) fill() {
	// Writes make the sender's window large enough.
	for range 4 {
		y.post(y.a, y.qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: y.qa.sge(0, len(y.qa.mem)), RKey: y.qb.reg.STag(), Remote: 0x10000})
		y.until("written", func() bool { return len(y.qa.wcs) > 0 && bytes.Equal(y.qa.mem, y.qb.mem) })
		y.qa.wcs = nil
		clear(y.qb.mem)
	}
	y.drop = true
	for i := range waitingSends - 1 {
		y.send(i)
	}
	c := y.b.conn()
	y.until("the gap is filled, but not all can be processed", func() bool { return c.waits.full() && c.holds > 0 })
}

func (y *waiting) send(i int) {
	y.post(y.a, y.qa, verbs.SendWR{ID: uint64(i), Op: rdmap.OpSend, SGEs: y.qa.sge(i*waitingLen, waitingLen)})
}

// receive posts a receive, as a client does that does not ring for it.
func (y *waiting) receive(i int) {
	y.qb.recvs = append(y.qb.recvs, verbs.RecvWR{ID: uint64(i), SGEs: y.qb.sge(i*waitingLen, waitingLen)})
}

// received waits for the first n Sends.
func (y *waiting) received(n int) {
	y.t.Helper()
	y.until("received", func() bool { return len(y.qb.wcs) >= n || y.b.closed })
	if len(y.qb.wcs) < n {
		y.t.Fatalf("%d receives, then closed", len(y.qb.wcs))
	}
	for i, wc := range y.qb.wcs[:n] {
		if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
			y.t.Fatalf("receive %d: %v", wc.ID, wc.Status)
		}
	}
	if !bytes.Equal(y.qa.mem[:n*waitingLen], y.qb.mem[:n*waitingLen]) {
		y.t.Error("received bytes differ")
	}
}

// Segments that arrive after a fault in the memory of another client do not come before those held, even if
// receives for the waiting Sends were found in the turn that faulted.
func TestFaultWhileWaiting(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	y := newWaiting(t)
	none, err := unix.Mmap(-1, 0, waitingLen, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(none)
	ha, hb := y.hosts[0], y.hosts[1]
	c, d := y.openFrom(netip.AddrPortFrom(addrA, 40001), addrB)
	qc, qd := newSimQP(t, ha, waitingLen), newSimQP(t, hb, waitingLen)
	y.sim.attach(c, d, qc, qd, mpa.Params{CRC: true})
	y.write(c, qc, qd, 1000) // a responder sends nothing before
	qd.reg = qd.register(none)
	y.fill()
	y.receive(0)
	qd.sends = append(qd.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qd.sge(0, waitingLen), RKey: qc.reg.STag(), Remote: 0x10000})
	hb.w.mark(d.lane) // the first to be served
	hb.w.mark(y.b.lane)
	func() { // as loop
		defer hb.w.survive()
		hb.w.turn()
	}()
	if hb.w.stats.Faults != 1 {
		t.Fatalf("%d faults", hb.w.stats.Faults)
	}
	y.send(waitingSends - 1)
	ha.w.turn()
	y.now = y.now.Add(2 * time.Millisecond) // it arrives before the next turn
	for i := 1; i < waitingSends; i++ {
		y.receive(i)
	}
	y.received(waitingSends)
	y.closeAll(y.a)
}

// The end of the stream comes after all Sends, including those held.
func TestCloseWhileWaiting(t *testing.T) {
	y := newWaiting(t)
	y.fill()
	y.hosts[0].w.disconnect(y.a, false)
	y.until("the peer's FIN", func() bool { return y.b.conn().waits.closed })
	if y.b.conn().holds == 0 {
		t.Fatal("none is held: this tests nothing")
	}
	first := y.b.conn().waits.bytes/waitingLen + 1 // the rest of this one is held
	for i := range waitingSends - 1 {
		if y.receive(i); i >= first {
			y.received(i + 1)
		}
	}
	y.until("connections gone", func() bool { return y.hosts[0].w.stats.Conns == 0 && y.hosts[1].w.stats.Conns == 0 })
}
