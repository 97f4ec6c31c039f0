package dataplane

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// tiny is a connection over which host 0 sends many FPDUs of 24 bytes: Writes of four bytes, each of its number to its place.
type tiny struct {
	*sim
	a, b   *stream
	qa, qb *simQP
	most   int // FPDUs of a turn of host 1
}

// tinyLen is the size of such an FPDU.
const tinyLen = 24

// tinyWrites is the number of Writes.
const tinyWrites = 8000

func newTiny(t *testing.T, cfg link.PipeConfig) *tiny {
	y := &tiny{sim: newSim(t, cfg)}
	y.a, y.b = y.open()
	y.qa, y.qb = newSimQP(t, y.hosts[0], 4*tinyWrites), newSimQP(t, y.hosts[1], 4*tinyWrites)
	qc := y.qa.QP.Config()
	qc.SQDepth = 8192
	y.qa.QP = verbs.NewQP(qc)
	return y
}

func (y *tiny) post() {
	for i := range tinyWrites {
		binary.BigEndian.PutUint32(y.qa.mem[4*i:], uint32(i)+1)
		y.qa.sends = append(y.qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: y.qa.sge(4*i, 4), RKey: y.qb.reg.STag(), Remote: 0x10000 + uint64(4*i)})
	}
	y.hosts[0].w.mark(y.a.lane)
}

// grow opens the congestion window for all that will be posted.
func (y *tiny) grow() {
	for range 3 {
		for range 16 {
			y.qa.sends = append(y.qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: y.qa.sge(0, 4*tinyWrites), RKey: y.qb.reg.STag(), Remote: 0x10000})
		}
		done := len(y.qa.wcs) + 16
		y.hosts[0].w.mark(y.a.lane)
		y.until("the window is open", func() bool { return len(y.qa.wcs) >= done })
	}
	for settled := y.now.Add(10 * time.Millisecond); y.now < settled && y.step(); { // less than closes the window again
	}
	y.qa.wcs = nil
}

// sendAll makes host 0 send all while host 1 stands still.
func (y *tiny) sendAll() {
	w := y.hosts[0].w
	for range 200 {
		w.turn()
	}
	if len(y.qa.wcs) != tinyWrites {
		y.t.Fatalf("%d of %d Writes are sent: the window is too small for this test", len(y.qa.wcs), tinyWrites)
	}
}

// turn is one of host 1.
func (y *tiny) turn() {
	w := y.hosts[1].w
	before := w.stats.RxFPDUs
	w.turn()
	y.most = max(y.most, int(w.stats.RxFPDUs-before))
}

// arrive turns both until everything is in place, and checks what a turn processed. piece is the most bytes between two looks at the
// budget.
func (y *tiny) arrive(piece int) {
	y.t.Helper()
	last := y.qb.mem[4*(tinyWrites-1):]
	for n := 0; binary.BigEndian.Uint32(last) != uint32(tinyWrites); n++ {
		if n == 20000 {
			y.t.Fatal("not all arrives")
		}
		y.turn()
		y.hosts[0].w.turn()
		y.now = y.now.Add(time.Millisecond)
	}
	for i := range tinyWrites {
		if got := binary.BigEndian.Uint32(y.qb.mem[4*i:]); got != uint32(i)+1 {
			y.t.Fatalf("Write %d placed %d", i, got)
		}
	}
	if limit := fpduBudget + piece/tinyLen; y.most > limit {
		y.t.Errorf("%d FPDUs in a turn, more than %d", y.most, limit)
	}
	if y.most < fpduBudget {
		y.t.Errorf("at most %d FPDUs in a turn: this tests nothing", y.most)
	}
	if w := y.hosts[1].w; len(w.late) != 0 || y.b.conn().late || y.b.closed() {
		y.t.Errorf("%d connections are late at the end", len(w.late))
	}
	y.closeAll(y.a)
}

// A turn processes a bounded number of FPDUs, however many the frames of a burst hold.
func TestFPDUsAreBounded(t *testing.T) {
	for _, super := range []link.SuperMode{link.NoSuper, link.SuperWhole} {
		y := newTiny(t, link.PipeConfig{MTU: 9000, Super: super})
		y.attach(y.a, y.b, y.qa, y.qb, mpa.Params{CRC: true})
		y.grow()
		y.post()
		y.sendAll()
		y.arrive(1 << 16)
	}
}

// losing returns a filter that loses the next long frame to b when drop is set, and clears drop.
func losing(drop *bool) func(toB bool, f []byte) bool {
	return func(toB bool, f []byte) bool {
		if !toB || !*drop || len(f) < 1000 {
			return true
		}
		*drop = false
		return false
	}
}

// The same holds for frames that were held out of order, all of which are in order at once, and that are taken in order.
func TestHeldFPDUsAreBounded(t *testing.T) {
	for _, markers := range []bool{false, true} {
		drop := false
		y := newTiny(t, link.PipeConfig{MTU: 9000, Filter: losing(&drop)})
		y.attachEach(y.a, y.b, y.qa, y.qb, mpa.Params{CRC: true, SendMarkers: markers})
		y.grow()
		y.post()
		drop = true
		y.sendAll()
		for range 20 {
			y.turn()
		}
		if n := y.b.conn().holds; n < 10 && !markers || drop {
			t.Fatalf("%d frames are held: this tests nothing", n)
		}
		y.most = 0
		y.arrive(9000)
	}
}

// The same holds for FPDUs that have arrived before full operation begins.
func TestFPDUsAheadAreBounded(t *testing.T) {
	y := newTiny(t, link.PipeConfig{MTU: 9000})
	y.b.conn().wide = true // a whole window may wait
	params := mpa.Params{CRC: true, Initiator: true}
	y.hosts[0].w.attach(y.a.id, y.a, Attachment{QP: &y.qa.QPBinding, Params: params})
	y.post()
	y.until("all has arrived", func() bool { return y.b.conn().pre.unread() == tinyWrites*tinyLen })
	if n := y.hosts[1].w.stats.RxFPDUs; n != 0 {
		t.Fatalf("%d FPDUs before full operation", n)
	}
	params.Initiator = false
	y.hosts[1].w.attach(y.b.id, y.b, Attachment{QP: &y.qb.QPBinding, Params: params})
	y.arrive(aheadPiece)
}

// A connection that ends while it is late ends once, and gives back what it holds.
func TestLateConnectionEnds(t *testing.T) {
	for _, end := range []string{"reset", "close", "detach", "unplug"} {
		drop := false
		y := newTiny(t, link.PipeConfig{MTU: 9000, Filter: losing(&drop)})
		y.attach(y.a, y.b, y.qa, y.qb, mpa.Params{CRC: true})
		y.grow()
		y.post()
		drop = true
		y.sendAll()
		w := y.hosts[1].w
		for n := 0; !y.b.conn().late; n++ {
			if n == 1000 {
				t.Fatal("the connection is never late")
			}
			y.turn()
			if !y.b.conn().late {
				y.hosts[0].w.turn()
			}
			y.now = y.now.Add(time.Millisecond)
		}
		switch end {
		case "reset":
			y.hosts[0].w.disconnect(y.a, true)
		case "close":
			y.hosts[0].w.disconnect(y.a, false)
		case "detach":
			w.post(func(w *worker) { y.b.detach(w) })
		case "unplug":
			w.post(func(w *worker) { replaceLink(w, Queue{Link: link.NewNone(9000)}, errUnplugged) })
			y.hosts[0].w.disconnect(y.a, true)
		}
		y.closed(1)
		y.until("connections gone", func() bool { return w.stats.Conns == 0 && y.hosts[0].w.stats.Conns == 0 })
		if n := len(w.held.frames) - len(w.held.free); n != 0 || len(w.late) != 0 {
			t.Errorf("%s: %d frames are held, %d connections late", end, n, len(w.late))
		}
		if end == "close" && binary.BigEndian.Uint32(y.qb.mem[4*(tinyWrites-1):]) != uint32(tinyWrites) {
			t.Errorf("%s: not all that came before the end is in place", end)
		}
	}
}
