package verbs

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
)

// mover is a FarQueue over the heap that moves data when the test calls step.
type mover struct {
	ops          []func()
	done, failed uint64
	fail         bool // further operations fail
	room         int  // Fetches that may be outstanding; negative: no limit
	fetching     int
}

// step does the oldest operation and reports whether there was one.
func (m *mover) step() bool {
	if len(m.ops) == 0 {
		return false
	}
	m.ops[0]()
	m.ops = m.ops[1:]
	return true
}

func (m *mover) Store(mem FarMemory, addr uint64, n uint32, p marked.Bytes) {
	b := make([]byte, n)
	p.CopyTo(b)
	m.ops = append(m.ops, func() {
		m.done++
		if m.fail {
			if m.failed == 0 {
				m.failed = m.done
			}
			return
		}
		copy(mem.([]byte)[addr:], b)
	})
}

func (m *mover) Barrier() bool {
	if len(m.ops) == 0 {
		return false
	}
	m.ops = append(m.ops, func() { m.done++ })
	return true
}

func (m *mover) Stored() (uint64, uint64) { return m.done, m.failed }

func (m *mover) Fetch(mem FarMemory, addr uint64, n uint32) Fetch {
	if m.fetching == m.room {
		return nil
	}
	m.fetching++
	f := &heapFetch{m: m, n: int(n)}
	m.ops = append(m.ops, func() {
		f.failed = m.fail
		f.b = bytes.Clone(mem.([]byte)[addr : addr+uint64(n)])
	})
	return f
}

type heapFetch struct {
	m        *mover
	n        int
	b        []byte
	failed   bool
	released bool
}

func (f *heapFetch) Len() int { return f.n }

func (f *heapFetch) Bytes() ([]byte, bool) {
	if f.released {
		panic("used after its release")
	}
	if f.failed {
		return nil, false
	}
	return f.b, true
}

func (f *heapFetch) Release() {
	if f.released {
		panic("released twice")
	}
	f.released = true
	f.m.fetching--
}

// farSide is a side that also has far memory.
type farSide struct {
	*side
	m   *mover
	far []byte
	fmr *Region
}

const (
	farLen  = 1 << 20
	farBase = 0x6000_0000_0000
)

func newFarPair(t *testing.T) (a, b *farSide) {
	t.Helper()
	one := func(num uint32) *farSide {
		s := &farSide{m: &mover{room: -1}, far: make([]byte, farLen)}
		s.side = newSide(t, num, farLen, QPConfig{Far: s.m})
		r, err := s.table.RegisterFar(pdA, s.far, 0, farLen, farBase, accessRW&^RemoteAtomic)
		if err != nil {
			t.Fatal(err)
		}
		s.fmr = r
		s.Start(rdmap.Config{IRD: 4, ORD: 4})
		return s
	}
	return one(1), one(2)
}

func (s *farSide) fsge(off, n int) SGE {
	return SGE{Addr: farBase + uint64(off), Len: uint32(n), LKey: s.fmr.STag()}
}

// exchange lets both sides send and receive, without a step of the mover, until neither has more to do.
func exchange(t *testing.T, a, b *farSide) {
	t.Helper()
	for busy := true; busy; {
		busy = a.farTurn(b)
		busy = b.farTurn(a) || busy
		busy = a.poll() || busy
		busy = b.poll() || busy
	}
}

// settle calls exchange and moves everything, until nothing is left to do.
func settle(t *testing.T, a, b *farSide) {
	t.Helper()
	for exchange(t, a, b); a.m.step() || b.m.step(); exchange(t, a, b) {
	}
}

// farTurn is side.turn for a segment that may have to wait for its payload.
func (s *farSide) farTurn(p *farSide) bool {
	busy := s.HandleSends(64) > 0
	for s.pend.Len > 0 || s.Stream().PollFilling(1400, 1400, &s.pend) {
		var ok bool
		if s.parts, ok = s.Gather(&s.pend.Src, s.pend.Len, s.parts[:0]); !ok {
			if s.Awaits() {
				return busy
			}
			s.fails++
			s.pend = rdmap.Segment{}
			return true
		}
		busy = true
		s.ulpdu = append(s.ulpdu[:0], s.pend.Hdr[:s.pend.HdrLen]...)
		for _, b := range s.parts {
			s.ulpdu = append(s.ulpdu, b...)
		}
		s.pend.Len = 0
		p.Stream().HandleULPDU(s.ulpdu)
	}
	return busy
}

func random(r *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// TestFarTransfers sends messages of all kinds out of far memory and into it, mixed with near memory.
func TestFarTransfers(t *testing.T) {
	r := rand.New(rand.NewPCG(1, testenv.Seed(t)))
	a, b := newFarPair(t)
	random(r, a.far)
	random(r, b.far)
	random(r, a.mem)
	const n = 300_000
	recv := make([]byte, 3000)

	b.postRecv(RecvWR{ID: 1, SGEs: []SGE{b.fsge(10, 1000), b.sge(0, 1000), b.fsge(5000, 1000)}})
	a.post(SendWR{ID: 1, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.fsge(7, 1500), a.sge(3, 10), a.fsge(90_000, 1490)}})
	a.post(SendWR{ID: 2, Op: rdmap.OpWrite, Flags: Signaled, SGEs: []SGE{a.fsge(100, n)}, RKey: b.fmr.STag(), Remote: farBase + 400_000})
	a.post(SendWR{ID: 3, Op: rdmap.OpWrite, Flags: Signaled, SGEs: []SGE{a.fsge(200, 5)}, RKey: b.mr.STag(), Remote: sideBase + 500_000})
	want := append(append(bytes.Clone(a.far[7:1507]), a.mem[3:13]...), a.far[90_000:91_490]...)
	source := bytes.Clone(b.far[200_000 : 200_000+100_000])
	a.post(SendWR{ID: 4, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.fsge(600_000, 100_000)}, RKey: b.fmr.STag(), Remote: farBase + 200_000})
	sent := bytes.Clone(a.far[100 : 100+n])
	settle(t, a, b)
	if got := outcomes(a.take()); len(got) != 4 || got[3] != (outcome{4, WCSuccess}) {
		t.Fatalf("completions %v", got)
	}
	copy(recv, b.far[10:1010])
	copy(recv[1000:], b.mem[:1000])
	copy(recv[2000:], b.far[5000:6000])
	if !bytes.Equal(recv, want) {
		t.Error("the receive has other bytes")
	}
	if !bytes.Equal(b.far[400_000:400_000+n], sent) || !bytes.Equal(b.mem[500_000:500_005], a.far[200:205]) {
		t.Error("a Write placed other bytes")
	}
	if !bytes.Equal(a.far[600_000:700_000], source) {
		t.Error("the Read brought other bytes")
	}
	if a.m.fetching+b.m.fetching != 0 {
		t.Errorf("%d and %d fetches are left", a.m.fetching, b.m.fetching)
	}
}

// A completion comes after the data was moved.
func TestFarCompletes(t *testing.T) {
	a, b := newFarPair(t)
	copy(a.mem, "hello")
	b.postRecv(RecvWR{ID: 1, SGEs: []SGE{b.sge(0, 16)}})
	a.post(SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 5)}, RKey: b.fmr.STag(), Remote: farBase})
	a.post(SendWR{ID: 2, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.sge(0, 5)}})
	exchange(t, a, b)
	if got := b.take(); len(got) != 0 || b.Settled() {
		t.Fatalf("the Send completed before the Write ahead of it was stored: %v", got)
	}
	settle(t, a, b)
	if got := outcomes(b.take()); len(got) != 1 || got[0] != (outcome{1, WCSuccess}) || string(b.far[:5]) != "hello" {
		t.Errorf("completions %v, memory %q", got, b.far[:5])
	}

	a.take()
	a.post(SendWR{ID: 3, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.fsge(0, 5)}, RKey: b.mr.STag(), Remote: sideBase})
	exchange(t, a, b)
	if got := a.take(); len(got) != 0 {
		t.Fatalf("the Read completed before its bytes were stored: %v", got)
	}
	settle(t, a, b)
	if got := outcomes(a.take()); len(got) != 1 || got[0].st != WCSuccess || string(a.far[:5]) != "hello" {
		t.Errorf("completions %v, memory %q", got, a.far[:5])
	}
	a.post(SendWR{ID: 4, Op: rdmap.OpFetchAdd, Flags: Signaled, SGEs: []SGE{a.fsge(8, 8)}, CompareAdd: 1, RKey: b.mr.STag(), Remote: sideBase + 64})
	settle(t, a, b)
	if got := outcomes(a.take()); len(got) != 1 || got[0].st != WCSuccess {
		t.Errorf("an atomic with its result in far memory: %v", got)
	}
}

// The invalidation of a window completes after what the peer has written through it was stored.
func TestFarInvalidate(t *testing.T) {
	a, b := newFarPair(t)
	w := allocWindow(t, b.table, pdA)
	b.post(SendWR{ID: 1, Op: OpBindMW, RKey: w.STag(), SGEs: []SGE{b.fsge(0, 16)}, Access: RemoteWrite})
	settle(t, a, b)
	copy(a.mem, "hello")
	a.post(SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 5)}, RKey: w.STag(), Remote: farBase})
	exchange(t, a, b)
	b.post(SendWR{ID: 2, Op: OpLocalInv, Flags: Signaled, Inv: w.STag()})
	exchange(t, a, b)
	if got := b.take(); len(got) != 0 {
		t.Fatalf("the window was invalidated before the Write through it was stored: %v", got)
	}
	settle(t, a, b)
	if got := outcomes(b.take()); len(got) != 1 || got[0] != (outcome{2, WCSuccess}) || string(b.far[:5]) != "hello" {
		t.Errorf("completions %v, memory %q", got, b.far[:5])
	}
}

// A response that goes on after its window was bound to other memory has nothing that was fetched through the old binding.
func TestFarRebound(t *testing.T) {
	const n = 2 * fetchAhead
	for steps := range 6 {
		a, b := newFarPair(t)
		w := allocWindow(t, b.table, pdA)
		bind := func(off int) SendWR {
			return SendWR{Op: OpBindMW, RKey: w.STag(), SGEs: []SGE{b.fsge(off, n)}, Access: RemoteRead | ZeroBased}
		}
		for i := range n {
			b.far[i], b.far[n+i] = 1, 2
		}
		b.post(bind(0))
		settle(t, a, b)
		a.post(SendWR{Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(0, n)}, RKey: w.STag()})
		exchange(t, a, b)
		for range steps {
			b.m.step()
		}
		sent := bytes.LastIndexByte(a.mem, 1) + 1
		b.post(SendWR{Op: OpLocalInv, Inv: w.STag()}, bind(n))
		b.HandleSends(64)
		if k := b.Gatherable(&b.pend.Src, n); k != 0 {
			t.Errorf("after %d steps: %d bytes can be gathered at once", steps, k)
		}
		settle(t, a, b)
		if got := outcomes(a.take()); len(got) != 1 || got[0].st != WCSuccess {
			t.Fatalf("after %d steps: completions %v", steps, got)
		}
		if stale := bytes.LastIndexByte(a.mem[:n], 1) + 1; stale != sent {
			t.Errorf("after %d steps: %d bytes of the memory that the window had before", steps, stale-sent)
		}
	}
}

// A response whose memory goes between the check and the fetch ends with an error: nothing would end the wait for bytes that nobody fetches.
func TestFarResponseGone(t *testing.T) {
	_, b := newFarPair(t)
	src := rdmap.Source{Kind: rdmap.SourceTagged, STag: b.fmr.STag(), Off: farBase}
	m, _ := b.check(src.STag, src.Off, 8, useReadSource)
	if m.far == nil {
		t.Fatal("the check fails")
	}
	deregister(t, b.table, b.fmr)
	if _, ok := b.gatherResponse(&src, m.state, 8, 0, nil); ok || b.Awaits() {
		t.Errorf("gathered: %v, awaits: %v", ok, b.Awaits())
	}
}

// A fenced Send from the memory that a Read has filled sends what the Read brought.
func TestFarFence(t *testing.T) {
	a, b := newFarPair(t)
	copy(b.far, "fresh")
	copy(a.far, "stale")
	b.postRecv(RecvWR{ID: 1, SGEs: []SGE{b.sge(0, 16)}})
	a.post(SendWR{ID: 1, Op: rdmap.OpRead, SGEs: []SGE{a.fsge(0, 5)}, RKey: b.fmr.STag(), Remote: farBase})
	a.post(SendWR{ID: 2, Op: rdmap.OpSend, Flags: Signaled | Fence, SGEs: []SGE{a.fsge(0, 5)}})
	settle(t, a, b)
	if string(b.mem[:5]) != "fresh" {
		t.Errorf("sent %q", b.mem[:5])
	}
}

// TestFarGatherable checks how much of a message from far memory Gather can return at once.
func TestFarGatherable(t *testing.T) {
	for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpRead} {
		a, b := newFarPair(t)
		if op == rdmap.OpWrite {
			a.post(SendWR{Op: op, SGEs: []SGE{a.fsge(0, 200_000)}, RKey: b.mr.STag(), Remote: sideBase})
		} else {
			b.post(SendWR{Op: op, SGEs: []SGE{b.sge(0, 200_000)}, RKey: a.fmr.STag(), Remote: farBase})
		}
		exchange(t, a, b)
		for _, want := range []int{0, MaxFetch, 2 * MaxFetch, 150_000} {
			if n := a.Gatherable(&a.pend.Src, 150_000); n != want {
				t.Errorf("operation %d: %d bytes, want %d", op, n, want)
			}
			a.m.step()
		}
	}
}

// Memory that no longer exists is an error of the connection that uses it.
func TestFarGone(t *testing.T) {
	t.Run("store", func(t *testing.T) {
		a, b := newFarPair(t)
		b.postRecv(RecvWR{ID: 1, SGEs: []SGE{b.fsge(0, 16)}}, RecvWR{ID: 2, SGEs: []SGE{b.fsge(16, 16)}})
		a.post(SendWR{ID: 1, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.sge(0, 5)}})
		exchange(t, a, b)
		a.post(SendWR{ID: 2, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.sge(0, 5)}})
		exchange(t, a, b)
		b.m.step()
		b.m.fail = true
		settle(t, a, b)
		if got := outcomes(b.take()); len(got) != 2 || got[0] != (outcome{1, WCSuccess}) || got[1] != (outcome{2, WCLocProtErr}) {
			t.Errorf("completions %v", got)
		}
		if b.Err() == nil || remoteErr(a.QP) == nil {
			t.Error("the stream goes on")
		}
	})
	t.Run("fetch", func(t *testing.T) {
		a, b := newFarPair(t)
		a.m.fail = true
		a.post(SendWR{ID: 1, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.fsge(0, 5)}})
		settle(t, a, b)
		if got := outcomes(a.take()); len(got) != 1 || got[0] != (outcome{1, WCLocProtErr}) {
			t.Errorf("completions %v", got)
		}
	})
	t.Run("response", func(t *testing.T) {
		a, b := newFarPair(t)
		b.m.fail = true
		a.post(SendWR{ID: 1, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(0, 5)}, RKey: b.fmr.STag(), Remote: farBase})
		settle(t, a, b)
		if b.Err() == nil || remoteErr(a.QP) == nil {
			t.Error("the stream goes on")
		}
	})
}

// A flushed work request also waits, since its memory belongs to the daemon until nothing more is stored there.
func TestFarFlush(t *testing.T) {
	a, b := newFarPair(t)
	b.postRecv(RecvWR{ID: 1, SGEs: []SGE{b.fsge(0, 16)}}, RecvWR{ID: 2, SGEs: []SGE{b.fsge(0, 16)}})
	a.post(SendWR{ID: 1, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.sge(0, 5)}}, SendWR{ID: 2, Op: rdmap.OpSend, SGEs: []SGE{a.fsge(0, 5)}})
	exchange(t, a, b)
	a.Error()
	b.Error()
	b.poll()
	if got := b.take(); len(got) != 0 {
		t.Errorf("completions before the memory is free: %v", got)
	}
	for b.m.step() || a.m.step() {
	}
	b.poll()
	if got := outcomes(b.take()); len(got) != 2 || got[0] != (outcome{1, WCSuccess}) || got[1] != (outcome{2, WCFlushErr}) {
		t.Errorf("completions %v", got)
	}
	if a.m.fetching != 0 {
		t.Errorf("%d fetches are left", a.m.fetching)
	}
}

// With memory for one Fetch at a time everything is sent, one Fetch after the other.
func TestFarLittleMemory(t *testing.T) {
	a, b := newFarPair(t)
	random(rand.New(rand.NewPCG(1, 2)), a.far)
	a.m.room, b.m.room = 1, 1
	for i := range 3 {
		a.post(SendWR{ID: uint64(i), Op: rdmap.OpWrite, Flags: Signaled, SGEs: []SGE{a.fsge(i*200_000, 200_000)}, RKey: b.fmr.STag(), Remote: farBase + uint64(i)*200_000})
	}
	settle(t, a, b)
	if got := a.take(); len(got) != 3 || !bytes.Equal(a.far[:600_000], b.far[:600_000]) {
		t.Errorf("%d completions", len(got))
	}
}

// A Read whose response takes long comes before Writes that find little memory: they go on where they were.
func TestFarLittleMemoryAfterRead(t *testing.T) {
	a, b := newFarPair(t)
	random(rand.New(rand.NewPCG(1, 2)), a.far)
	a.m.room = 1
	a.post(SendWR{Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(0, 8)}, RKey: b.fmr.STag(), Remote: farBase + 900_000})
	for i := range 3 {
		a.post(SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.fsge(i*200_000, 200_000)}, RKey: b.mr.STag(), Remote: sideBase + uint64(i)*200_000})
	}
	for exchange(t, a, b); a.m.step(); exchange(t, a, b) {
	}
	if got := a.take(); len(got) != 0 {
		t.Fatalf("the response came before it was fetched: %v", got)
	}
	if !bytes.Equal(a.far[:600_000], b.mem[:600_000]) {
		t.Error("the Writes placed other bytes")
	}
	settle(t, a, b)
	if got := a.take(); len(got) != 1 || got[0].Status != WCSuccess {
		t.Errorf("completions %v", got)
	}
}

// TestFarSourceFaults checks that a QP does not wait for a Store that faulted in its source, the memory of another client.
func TestFarSourceFaults(t *testing.T) {
	_, b := newFarPair(t)
	none := testenv.Mmap(t, 4096, unix.PROT_NONE)
	func() {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() {
			if recover() == nil {
				t.Error("this tests nothing")
			}
		}()
		b.Place(&rdmap.Placement{Kind: rdmap.PlaceTagged, STag: b.fmr.STag(), TO: farBase, Op: rdmap.OpWrite}, marked.Bytes{B: none})
	}()
	if !b.Settled() {
		t.Error("it waits")
	}
}

// Atomics on far memory are refused, also through a window.
func TestFarAtomics(t *testing.T) {
	a, b := newFarPair(t)
	if _, err := b.table.RegisterFar(pdA, b.far, 0, 8, 0, accessRW); !errors.Is(err, ErrFarAtomic) {
		t.Errorf("RegisterFar: %v", err)
	}
	r, err := b.table.RegisterFar(pdA, b.far, 0, 64, farBase, LocalWrite|MWBind)
	if err != nil {
		t.Fatal(err)
	}
	w := allocWindow(t, b.table, pdA)
	b.post(SendWR{ID: 1, Op: OpBindMW, RKey: w.STag(), SGEs: []SGE{{Addr: farBase, Len: 64, LKey: r.STag()}}, Access: RemoteAtomic | RemoteWrite})
	a.post(SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: []SGE{a.fsge(0, 8)}, RKey: w.STag(), Remote: farBase})
	copy(a.far, "window")
	exchange(t, b, a)
	settle(t, a, b)
	if string(b.far[:6]) != "window" {
		t.Errorf("a Write by a window: %q", b.far[:6])
	}
	a.post(SendWR{ID: 3, Op: rdmap.OpFetchAdd, Flags: Signaled, SGEs: []SGE{a.sge(0, 8)}, CompareAdd: 1, RKey: w.STag(), Remote: farBase})
	settle(t, a, b)
	got, terminate := outcomes(a.take()), remoteErr(a.QP)
	if len(got) != 1 || got[0].st != WCRemAccessErr || terminate != term.ErrReadAccess {
		t.Errorf("completions %v, Terminate %v", got, terminate)
	}
}
