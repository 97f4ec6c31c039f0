package rdmap

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const (
	simSTag   = 0x5000 // the region that the peer works on
	simSink   = 0x6000 // the sink of local Reads
	simBase   = 0xfffff000
	simSize   = 8192
	simSinkSz = 1 << 17
)

// simulation joins two Streams by a wire that delivers ULPDUs in order or, with early, also out of order, and
// compares them with a model in plain memory.
type simulation struct {
	t     *testing.T
	r     *rand.Rand
	ends  [2]*simEnd
	early bool
}

// span is a range of bytes of the peer's region.
type span struct{ off, n int }

func (a span) overlaps(b span) bool { return a.off < b.off+b.n && b.off < a.off+a.n }

// simEnd is one end, with its expected state and behavior.
type simEnd struct {
	*end
	peer *simEnd
	wire []*inFlight // to this end
	key  serial.Num  // of the next ULPDU to this end

	region []byte // expected content of region simSTag: only the peer's work changes it
	sink   []byte // expected content of the sink
	sinkAt int
	invs   uint32 // STags given to the peer to invalidate
	recvs  [][]byte
	writes []span // of this round, by this end
	busy   []span // Reads and atomics since the last fence
	sends  []Completion
	wantR  []Completion
	old    map[uint32]uint64
	id     uint32
}

// inFlight is a ULPDU on the wire.
type inFlight struct {
	key    serial.Num
	b      []byte
	placed bool
}

func newSimulation(t *testing.T, r *rand.Rand, early bool) *simulation {
	s := &simulation{t: t, r: r, early: early}
	ird := [2]int{r.IntN(6) + 1, r.IntN(6) + 1}
	for i := range s.ends {
		cfg := Config{IRD: ird[i], ORD: r.IntN(ird[1-i]) + 1, MaxWR: 1 << r.IntN(6), Early: r.IntN(40) + 1}
		e := &simEnd{end: newEnd(cfg), key: serial.Num(r.Uint32()), old: map[uint32]uint64{}}
		buf := make([]byte, simSize)
		for j := range buf {
			buf[j] = byte(r.Uint32())
		}
		e.region = bytes.Clone(buf)
		e.sink = make([]byte, simSinkSz)
		e.mem.regions[simSTag] = &region{base: simBase, buf: buf, write: true, read: true}
		e.mem.regions[simSink] = &region{buf: make([]byte, simSinkSz)}
		s.ends[i] = e
	}
	s.ends[0].peer, s.ends[1].peer = s.ends[1], s.ends[0]
	return s
}

// post chooses a work request for e, computes its expected effect, and posts it.
func (s *simulation) post(e *simEnd) bool {
	r := s.r
	wr := WR{ID: e.id, Fence: r.IntN(8) == 0}
	n := r.IntN(600)
	if r.IntN(10) == 0 {
		n = []int{0, 1, ddp.MinMULPDU - ddp.TaggedLen, ddp.MinMULPDU - ddp.UntaggedLen, 3000}[r.IntN(5)]
	}
	at := span{r.IntN(simSize - n + 1), n}
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	want := Completion{Kind: CompSend, ID: wr.ID, Status: StatusOK}
	var recv *Completion
	var apply func()
	switch op := Op(r.IntN(int(OpCmpSwap)) + 1); op {
	case OpWrite:
		for _, w := range e.writes {
			// Overlapping Writes have no defined order when they are placed early (RFC 5040 section 5.5, rule 3).
			if s.early && w.overlaps(at) {
				return true
			}
		}
		for _, b := range e.busy {
			wr.Fence = wr.Fence || b.overlaps(at)
		}
		wr.Op, wr.STag, wr.TO = OpWrite, simSTag, simBase+uint64(at.off)
		apply = func() {
			copy(e.peer.region[at.off:], data)
			e.writes = append(e.writes, at)
		}
	case OpRead:
		if e.sinkAt+n > simSinkSz {
			return true
		}
		wr.Op, wr.STag, wr.TO = OpRead, simSTag, simBase+uint64(at.off)
		wr.SinkSTag, wr.SinkTO = simSink, uint64(e.sinkAt)
		apply = func() {
			copy(e.sink[e.sinkAt:], e.peer.region[at.off:][:n])
			e.sinkAt += n
			e.busy = append(e.busy, at)
		}
	case OpFetchAdd, OpCmpSwap:
		at = span{at.off &^ 7, 8}
		if at.off+8 > simSize {
			return true
		}
		a := AtomicOp{Op: op, Data: r.Uint64(), Mask: r.Uint64(), CmpMask: ^uint64(0)}
		wr.Op, wr.STag, wr.TO = op, simSTag, simBase+uint64(at.off)
		b := e.peer.region[at.off:][:8]
		if op == OpFetchAdd {
			wr.Add, wr.AddMask = a.Data, a.Mask
		} else {
			if a.Cmp = r.Uint64(); r.IntN(2) == 0 {
				a.Cmp = be.Uint64(b)
			}
			wr.Swap, wr.SwapMask, wr.Cmp, wr.CmpMask = a.Data, a.Mask, a.Cmp, a.CmpMask
		}
		n = 8
		apply = func() {
			e.old[wr.ID] = be.Uint64(b)
			be.PutUint64(b, a.Apply(be.Uint64(b)))
			e.busy = append(e.busy, at)
		}
	default:
		wr.Op = op
		recv = &Completion{Kind: CompRecv, ID: uint32(len(e.peer.mem.recvs)), Op: op, Len: uint32(n),
			Solicited: op == OpSendSE || op == OpSendSEInv || op == OpImmSE}
		if op == OpImm || op == OpImmSE {
			be.PutUint64(wr.Imm[:], r.Uint64())
			recv.Len, recv.Imm, n, data = 0, wr.Imm, immLen, nil
		}
		if op == OpSendInv || op == OpSendSEInv {
			wr.Inv = 0x10000 + e.peer.invs
			recv.InvSTag = wr.Inv
		}
		apply = func() {
			if wr.Inv != 0 {
				e.peer.mem.regions[wr.Inv] = &region{}
				e.peer.invs++
			}
			e.peer.mem.recvs = append(e.peer.mem.recvs, make([]byte, len(data)+r.IntN(3)))
			e.peer.recvs = append(e.peer.recvs, data)
			e.peer.wantR = append(e.peer.wantR, *recv)
		}
	}
	wr.Len = uint32(n)
	e.mem.sources[wr.ID] = data
	if !e.PostSend(&wr) {
		return false
	}
	apply()
	want.Op, want.Len = wr.Op, uint32(n)
	e.sends = append(e.sends, want)
	if wr.Fence {
		e.busy = e.busy[:0]
		if wr.Op == OpRead || wr.Op.IsAtomic() {
			e.busy = append(e.busy, at)
		}
	}
	e.id++
	return true
}

// send puts up to a few segments of e on the wire.
func (s *simulation) send(e *simEnd) bool {
	any := false
	for range s.r.IntN(6) + 1 {
		sendable := e.Sendable()
		b := e.poll(ddp.MinMULPDU + s.r.IntN(1400))
		if sendable != (b != nil) {
			s.t.Fatalf("Sendable said %v; PollFilling gave %x", sendable, b)
		}
		if b == nil {
			break
		}
		any = true
		e.peer.wire = append(e.peer.wire, &inFlight{key: e.peer.key, b: b})
		e.peer.key = e.peer.key.Add(len(b) + 6)
	}
	return any
}

// receive delivers one of the next ULPDUs on e's wire.
func (s *simulation) receive(e *simEnd) bool {
	if len(e.wire) == 0 {
		return false
	}
	if s.early && len(e.wire) > 1 && s.r.IntN(3) > 0 {
		f := e.wire[1+s.r.IntN(len(e.wire)-1)]
		if !f.placed || s.r.IntN(4) == 0 { // again, sometimes
			b := bytes.Clone(f.b)
			if ok := e.HandleEarly(f.key, b); ok {
				f.placed = true
			} else if f.placed {
				s.t.Fatalf("%x: placed, and then refused", f.b)
			}
			clear(b) // the frame has been reused
			return true
		}
	}
	f := e.wire[0]
	e.wire = e.wire[1:]
	var err error
	if f.placed {
		if terr := e.DeliverEarly(f.key); terr != nil {
			err = terr
		}
	} else if terr := e.HandleULPDU(f.b); terr != nil {
		err = terr
	}
	if err != nil {
		s.t.Fatalf("%x: %v", f.b, err)
	}
	return true
}

func (s *simulation) collect(e *simEnd) {
	for _, c := range e.completions() {
		if c.Kind == CompSend {
			if len(e.sends) == 0 || e.sends[0] != c {
				s.t.Fatalf("completion %+v; want %+v", c, e.sends)
			}
			e.sends = e.sends[1:]
			if want, ok := e.old[c.ID]; ok && e.mem.results[c.ID] != want {
				s.t.Fatalf("atomic %d returned %#x; want %#x", c.ID, e.mem.results[c.ID], want)
			}
			continue
		}
		if len(e.wantR) == 0 || e.wantR[0] != c {
			s.t.Fatalf("completion %+v; want %+v", c, e.wantR)
		}
		e.wantR = e.wantR[1:]
		if b := e.mem.recvs[c.ID]; !bytes.Equal(b[:c.Len], e.recvs[c.ID]) {
			s.t.Fatalf("receive %d has other bytes than were sent", c.ID)
		}
	}
}

// round runs some work on both ends until all is done, and checks the memory.
func (s *simulation) round(posts int) {
	left := [2]int{posts, posts}
	for steps := 0; ; steps++ {
		if steps > 1<<20 {
			s.t.Fatal("no end")
		}
		progress := false
		for i, e := range s.ends {
			if left[i] > 0 && s.r.IntN(2) == 0 {
				if s.post(e) {
					left[i]--
				}
				progress = true
			}
			if s.r.IntN(3) > 0 {
				progress = s.send(e) || progress
			} else {
				progress = true
			}
			for range s.r.IntN(8) {
				progress = s.receive(e) || progress
			}
			progress = progress || len(e.wire) > 0 || e.Sendable() || left[i] > 0
			if s.r.IntN(3) == 0 || !progress {
				s.collect(e)
			}
		}
		if !progress {
			break
		}
	}
	for i, e := range s.ends {
		s.collect(e)
		if len(e.sends) != 0 || len(e.wantR) != 0 {
			s.t.Fatalf("end %d: not completed: %+v, %+v", i, e.sends, e.wantR)
		}
		if !bytes.Equal(e.mem.regions[simSTag].buf, e.region) {
			s.t.Fatalf("end %d: the region differs from the model", i)
		}
		if !bytes.Equal(e.mem.regions[simSink].buf, e.sink) {
			s.t.Fatalf("end %d: what was read differs from the model", i)
		}
		for stag := range e.invs {
			if !e.mem.regions[0x10000+stag].gone {
				s.t.Fatalf("end %d: STag %#x is still valid", i, 0x10000+stag)
			}
		}
		if e.early.n != 0 {
			s.t.Fatalf("end %d: %d headers of early segments are left", i, e.early.n)
		}
		e.writes, e.busy = e.writes[:0], e.busy[:0]
	}
	tx, rx := s.ends[0].Stats(), s.ends[1].Stats()
	if d := cmp.Diff([]uint64{tx.TxSegments, tx.TxBytes, tx.TxWrites, tx.TxReadRequests, tx.TxReadResponses, tx.TxSends, tx.TxImms, tx.TxAtomics, tx.TxAtomicResponses},
		[]uint64{rx.RxSegments, rx.RxBytes, rx.RxWrites, rx.RxReadRequests, rx.RxReadResponses, rx.RxSends, rx.RxImms, rx.RxAtomics, rx.RxAtomicResponses}); d != "" {
		s.t.Fatalf("one end's counters of sending, the other's of receiving:\n%s", d)
	}
}

// TestSimulation runs random programs of every verb on both ends at once and compares them with a model in plain
// memory: every byte, and every completion, exactly once and in order.
func TestSimulation(t *testing.T) {
	seed := testenv.Seed(t)
	seeds := 600
	if testing.Short() {
		seeds = 100
	}
	var placed, refused uint64
	for i := range seeds {
		early := i%3 != 0
		ok := t.Run(fmt.Sprintf("%d/early=%v", i, early), func(t *testing.T) {
			s := newSimulation(t, rand.New(rand.NewPCG(seed, uint64(i))), early)
			for range 3 {
				s.round(30)
			}
			for _, e := range s.ends {
				placed += e.Stats().RxEarlyPlaced
				refused += e.Stats().RxEarlyRefused
			}
		})
		if !ok {
			t.Fatalf("TEST_SEED=%d, run %d", seed, i)
		}
	}
	if placed == 0 || refused == 0 {
		t.Errorf("%d segments placed early, %d refused: the simulation did not do its work", placed, refused)
	}
	t.Logf("%d segments placed early, %d refused", placed, refused)
}

// TestSimulationCorrupted runs random programs on a wire that flips bits in headers, as a broken peer might. Each
// work request and each receive must complete once and in order, and an end that fails must tell the other why.
func TestSimulationCorrupted(t *testing.T) {
	seed := testenv.Seed(t)
	seeds := 800
	if testing.Short() {
		seeds = 300
	}
	reasons := map[string]int{}
	for i := range seeds {
		ok := t.Run(fmt.Sprint(i), func(t *testing.T) {
			s := newSimulation(t, rand.New(rand.NewPCG(seed, uint64(i))), i%2 == 0)
			corruptedRun(s, reasons)
		})
		if !ok {
			t.Fatalf("TEST_SEED=%d, run %d", seed, i)
		}
	}
	if len(reasons) < 10 {
		t.Errorf("only %d kinds of error: %v", len(reasons), reasons)
	}
	t.Log(reasons)
}

func corruptedRun(s *simulation, reasons map[string]int) {
	t, r := s.t, s.r
	posted := [2][]uint32{}
	var done, received [2][]uint32
	collect := func(i int) {
		for _, c := range s.ends[i].completions() {
			if c.Kind == CompSend {
				done[i] = append(done[i], c.ID)
			} else {
				received[i] = append(received[i], c.ID)
			}
		}
	}
	for range 400 {
		for i, e := range s.ends {
			if id := e.id; len(posted[i]) < 60 && r.IntN(2) == 0 && s.post(e) && e.id != id {
				posted[i] = append(posted[i], id)
			}
			for range r.IntN(4) {
				b := e.poll(ddp.MinMULPDU + r.IntN(1400))
				if b == nil {
					break
				}
				if r.IntN(60) == 0 && b[1]&ctrlOpcode != opcodeTerminate {
					bit := r.IntN(8 * min(len(b), ddp.UntaggedLen+readRequestLen))
					b[bit/8] ^= 1 << (bit % 8)
				}
				e.peer.wire = append(e.peer.wire, &inFlight{key: e.peer.key, b: b})
				e.peer.key = e.peer.key.Add(len(b) + 6)
			}
			for range r.IntN(4) {
				s.receiveAny(e)
			}
			if r.IntN(3) == 0 {
				collect(i)
			}
		}
	}
	// All ULPDUs in flight arrive; an error that they cause at one end reaches the other in the second round.
	for i := range 2 * len(s.ends) {
		e := s.ends[i%len(s.ends)]
		for b := e.poll(1400); b != nil && e.Terminating(); b = e.poll(1400) {
			e.peer.wire = append(e.peer.wire, &inFlight{b: b})
		}
		for len(e.peer.wire) > 0 {
			s.receiveAny(e.peer)
		}
	}
	for i, e := range s.ends {
		if err := e.Err(); err != nil {
			reasons[err.Error()]++
			if !e.TerminateSent() {
				t.Fatalf("end %d: %v, and no Terminate", i, err)
			}
			// A peer that had also failed was no longer reading.
			if got := e.peer.Remote(); got != err && e.peer.Err() == nil {
				t.Fatalf("end %d: %v; the peer got %v", i, err, got)
			}
		}
		e.Flush()
		collect(i)
		if !cmp.Equal(done[i], posted[i]) {
			t.Fatalf("end %d: completions of %v; posted were %v", i, done[i], posted[i])
		}
		for j, id := range received[i] {
			if id != uint32(j) {
				t.Fatalf("end %d: receives completed: %v", i, received[i])
			}
		}
		if len(received[i]) != e.mem.taken {
			t.Fatalf("end %d: %d receives taken, %d completed", i, e.mem.taken, len(received[i]))
		}
	}
}

// receiveAny is receive where errors are expected.
func (s *simulation) receiveAny(e *simEnd) {
	if len(e.wire) == 0 {
		return
	}
	if s.early && len(e.wire) > 1 && s.r.IntN(3) > 0 {
		f := e.wire[1+s.r.IntN(len(e.wire)-1)]
		f.placed = f.placed || e.HandleEarly(f.key, f.b)
		return
	}
	f := e.wire[0]
	e.wire = e.wire[1:]
	if f.placed {
		e.DeliverEarly(f.key)
	} else {
		e.HandleULPDU(f.b)
	}
}
