package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
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

func (y *waiting) receive(i int) { y.qb.recv(i, waitingLen) }

// received waits for the first n Sends.
func (y *waiting) received(n int) {
	y.t.Helper()
	y.until("received", func() bool { return len(y.qb.wcs) >= n || y.b.closed() })
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
	none := testenv.Mmap(t, waitingLen, unix.PROT_NONE)
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
	hb.w.surviveTurn()
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

// Short segments cost more memory than their bytes.
func TestShortSegmentsWait(t *testing.T) {
	y := newWaiting(t)
	y.send(0)
	c := y.b.conn()
	y.until("waiting", c.waits.waiting)
	empty := make([]byte, 4, 8) // an FPDU without ULPDU
	empty = binary.LittleEndian.AppendUint32(empty, crc32c.Update(0, empty))
	n := len(c.waits.segs)
	for ; !c.waits.full() && n < ReceiveWaitBytes; n++ {
		c.receive(y.hosts[1].w, empty)
	}
	if size := n * int(unsafe.Sizeof(waitingSegment{})); size > ReceiveWaitBytes {
		t.Errorf("%d segments wait, of %d bytes and their ULPDUs", n, size)
	}
	y.hosts[0].w.disconnect(y.a, true)
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
	waits := 0
	for _, s := range y.b.conn().waits.segs {
		waits += len(s.ulpdu)
	}
	first := waits/waitingLen + 1 // the rest of this one is held
	for i := range waitingSends - 1 {
		if y.receive(i); i >= first {
			y.received(i + 1)
		}
	}
	y.until("connections gone", func() bool { return y.hosts[0].w.stats.Conns == 0 && y.hosts[1].w.stats.Conns == 0 })
}

// A connection that ends while Sends wait gives back the frames that it holds.
func TestEndWhileWaiting(t *testing.T) {
	for _, end := range []string{"reset", "abort", "detach"} {
		y := newWaiting(t)
		y.fill()
		w := y.hosts[1].w
		switch end {
		case "reset":
			y.hosts[0].w.disconnect(y.a, true)
		case "abort":
			w.disconnect(y.b, true)
		case "detach":
			w.post(func(w *worker) { y.b.detach(w) })
		}
		y.until("connections gone", func() bool { return w.stats.Conns == 0 && y.hosts[0].w.stats.Conns == 0 })
		for y.step() {
		}
		if n := len(w.held.frames) - len(w.held.free); n != 0 || w.held.used != 0 {
			t.Errorf("%s: %d frames are held, counted as %d", end, n, w.held.used)
		}
	}
}

// Sends get the receives that are posted for them late, in order, over a bad wire, and the last ones after the peer
// has closed.
func TestReceiveWaitOverBadWire(t *testing.T) {
	seed := testenv.Seed(t)
	for i := range uint64(testenv.Count(t, "SEEDS", 8)) {
		rng := rand.New(rand.NewPCG(seed, i))
		wire := impair.Config{Seed: seed + i, Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Delay: time.Millisecond, Jitter: time.Millisecond}
		back := wire
		back.Seed += 1000
		const n, most = 60, 20_000
		s := newSim(t, link.PipeConfig{MTU: 1500 + rng.IntN(7500), AtoB: wire, BtoA: back})
		a, b := s.open()
		qa, qb := newSimQP(t, s.hosts[0], n*most), newSimQP(t, s.hosts[1], n*most)
		qb.ReceiveWait = time.Hour
		markers := i%2 == 0
		s.attachEach(a, b, qa, qb, mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers})
		for k := range qa.mem {
			qa.mem[k] = byte(rng.Uint32())
		}
		var lens [n]int
		for k := range lens {
			if lens[k] = rng.IntN(most); rng.IntN(4) == 0 {
				lens[k] = rng.IntN(50)
			}
			qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(k), Op: rdmap.OpSend, SGEs: qa.sge(k*most, lens[k])})
		}
		s.hosts[0].w.mark(a.lane)
		posted := 0
		s.until("sent", func() bool {
			if rng.IntN(50) == 0 && posted < n {
				qb.recv(posted, most)
				posted++
			}
			return len(qa.wcs) == n
		})
		s.hosts[0].w.disconnect(a, false)
		s.until("received", func() bool {
			if posted < n && rng.IntN(20) == 0 {
				for range 1 + rng.IntN(20) {
					if posted < n {
						qb.recv(posted, most)
						posted++
					}
				}
			}
			return len(qb.wcs) >= n || b.closed()
		})
		for k, wc := range qb.wcs {
			if k >= n || wc.ID != uint64(k) || wc.Status != verbs.WCSuccess || int(wc.Len) != lens[k] {
				t.Fatalf("run %d: receive %d of %d: id %d, %v, %d bytes", i, k, len(qb.wcs), wc.ID, wc.Status, wc.Len)
			}
			if !bytes.Equal(qb.mem[k*most:][:lens[k]], qa.mem[k*most:][:lens[k]]) {
				t.Fatalf("run %d: receive %d: bytes differ", i, k)
			}
		}
		if len(qb.wcs) != n {
			t.Fatalf("run %d: %d receives", i, len(qb.wcs))
		}
		s.closeAll(a)
	}
}

// A connection looks for receives no longer when no Send waits, even if the turn's budget ends with the last one that
// did. The end of the stream still comes after those held.
func TestBudgetEndsWait(t *testing.T) {
	for _, closes := range []bool{false, true} {
		y := newWaiting(t)
		y.fill()
		c, w := y.b.conn(), y.hosts[1].w
		if closes {
			y.hosts[0].w.disconnect(y.a, false)
			y.until("the peer's FIN", func() bool { return c.waits.closed })
		}
		for i := range waitingSends {
			y.receive(i)
		}
		w.segments = fpduBudget - len(c.waits.segs) // as if the turn had received others
		c.resume(w)
		if c.waits.waiting() || !c.late {
			t.Fatalf("%d segments wait, late %v: this tests nothing", len(c.waits.segs), c.late)
		}
		if c.end == endHalf {
			t.Error("the stream has ended before the Sends that are held")
		}
		if closes {
			y.received(waitingSends - 1)
		} else {
			y.send(waitingSends - 1)
			y.received(waitingSends)
		}
		if c.waits.look != 0 {
			t.Errorf("at %v it looks again at %v", y.now, c.waits.look)
		}
		y.closeAll(y.a)
	}
}

// Each Send waits for a receive for as long as ReceiveWait from when it is the first; then it ends the stream, as
// without ReceiveWait.
func TestReceiveWaitEnds(t *testing.T) {
	y := newWaiting(t)
	const limit = 100 * time.Millisecond
	y.qb.ReceiveWait = limit
	for i := range 3 {
		y.send(i)
	}
	c := y.b.conn()
	y.until("waiting", c.waits.waiting)
	for i := range 2 { // together they wait for longer
		late := y.now.Add(limit * 2 / 3)
		y.until("almost over", func() bool { return y.now >= late })
		y.receive(i)
		y.received(i + 1)
	}
	from := y.now
	if ev := y.event(1, EventFailed); !errors.Is(ev.Err, term.ErrNoBuffer) {
		t.Errorf("failed by %v; want %v", ev.Err, term.ErrNoBuffer)
	}
	if d := y.now.Sub(from); d < limit-2*waitLook || d > limit+10*time.Millisecond {
		t.Errorf("the last Send has waited %v; want %v", d, limit)
	}
}

// recv posts the receive k, of n bytes, as a client does that does not ring for it.
func (q *simQP) recv(k, n int) {
	q.recvs = append(q.recvs, verbs.RecvWR{ID: uint64(k), SGEs: q.sge(k*n, n)})
}
