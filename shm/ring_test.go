package shm

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

func closeAll(fds ...int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func sges(n int) []verbs.SGE {
	var s []verbs.SGE
	for i := range n {
		s = append(s, verbs.SGE{Addr: 0x0102030405060708 + uint64(i), Len: uint32(100 + i), LKey: 0xa0000000 + uint32(i)})
	}
	return s
}

// TestSendRoundTrip passes every operation through the ring.
func TestSendRoundTrip(t *testing.T) {
	q, p := newSQ(t, 4, 3, 80)
	all := verbs.SendWR{
		ID: 0x1122334455667788, RKey: 0xdeadbeef, Remote: math.MaxUint64 - 1, Inv: 0x31415926, Imm: 0x0807060504030201,
		CompareAdd: 1 << 63, Swap: 2, CompareMask: math.MaxUint64, SwapMask: 0xf0f0, Access: verbs.RemoteRead,
	}
	keep := func(keep func(*verbs.SendWR)) verbs.SendWR {
		w := verbs.SendWR{ID: all.ID, RKey: all.RKey, Remote: all.Remote, Inv: all.Inv}
		keep(&w)
		return w
	}
	imm := keep(func(w *verbs.SendWR) { w.Imm = all.Imm })
	atomic := keep(func(w *verbs.SendWR) {
		w.CompareAdd, w.Swap, w.CompareMask, w.SwapMask = all.CompareAdd, all.Swap, all.CompareMask, all.SwapMask
	})
	access := keep(func(w *verbs.SendWR) { w.Access = all.Access })
	tests := []struct {
		op   rdmap.Op
		wr   verbs.SendWR
		back rdmap.Op // with Solicited, where it is not op
	}{
		{rdmap.OpWrite, imm, 0}, {rdmap.OpRead, imm, 0},
		{rdmap.OpSend, imm, 0}, {rdmap.OpSendInv, imm, 0},
		{rdmap.OpSendSE, imm, rdmap.OpSend}, {rdmap.OpSendSEInv, imm, rdmap.OpSendInv},
		{rdmap.OpImm, imm, 0}, {rdmap.OpImmSE, imm, rdmap.OpImm},
		{rdmap.OpFetchAdd, atomic, 0}, {rdmap.OpCmpSwap, atomic, 0},
		{verbs.OpLocalInv, imm, 0}, {verbs.OpReg, access, 0}, {verbs.OpBindMW, access, 0},
	}
	got := newSendWR()
	for _, tt := range tests {
		for n := range 4 {
			wr := tt.wr
			wr.Op, wr.Flags, wr.SGEs = tt.op, verbs.Signaled|verbs.Fence, sges(n)
			if err := p.Post(&wr); err != nil {
				t.Fatalf("op %v: %v", tt.op, err)
			}
			if !q.NextSend(got) {
				t.Fatalf("op %v: nothing came", tt.op)
			}
			want := wr
			if tt.back != 0 {
				want.Op, want.Flags = tt.back, want.Flags|verbs.Solicited
			}
			// Fields that share bytes are decoded in each meaning.
			g := *got
			mask(&g, tt.op)
			if diff := cmp.Diff(want, g, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("op %v, %d SGEs (-want +got):\n%s", tt.op, n, diff)
			}
		}
	}
	for n := range 81 {
		wr := verbs.SendWR{ID: uint64(n), Op: rdmap.OpSend, Flags: verbs.Inline, Inline: bytes.Repeat([]byte{byte(n)}, n)}
		if err := p.Post(&wr); err != nil || !q.NextSend(got) {
			t.Fatalf("inline of %d: %v", n, err)
		}
		if got.ID != uint64(n) || !bytes.Equal(got.Inline, wr.Inline) || len(got.SGEs) != 0 {
			t.Errorf("inline of %d: %+v", n, got)
		}
	}
	if q.NextSend(got) || q.reader.ring.Bad() {
		t.Error("the ring is not empty, or faulty")
	}
}

// mask clears the fields that the operation does not use.
func mask(w *verbs.SendWR, op rdmap.Op) {
	switch op {
	case rdmap.OpFetchAdd, rdmap.OpCmpSwap:
		w.Imm, w.Access = 0, 0
	case verbs.OpReg, verbs.OpBindMW:
		w.Imm, w.CompareAdd, w.Swap, w.CompareMask, w.SwapMask = 0, 0, 0, 0, 0
	default:
		w.CompareAdd, w.Swap, w.CompareMask, w.SwapMask, w.Access = 0, 0, 0, 0, 0
	}
}

func TestPostRefuses(t *testing.T) {
	_, p := newSQ(t, 2, 2, 10)
	for _, wr := range []verbs.SendWR{
		{Op: 0}, {Op: rdmap.OpTerminate}, {Op: verbs.OpInvalid}, {Op: verbs.OpInvalid, Flags: verbs.Inline},
		{Op: rdmap.OpSend, SGEs: sges(3)},
		{Op: rdmap.OpSend, Flags: verbs.Inline, SGEs: sges(1)},
		{Op: rdmap.OpSend, Flags: verbs.Inline, Inline: make([]byte, 11)},
		{Op: rdmap.OpSend, Inline: make([]byte, 1)},
	} {
		if err := p.Post(&wr); !errors.Is(err, ErrWR) {
			t.Errorf("%+v: %v; want ErrWR", wr, err)
		}
	}
	if p.Space() != 2 {
		t.Errorf("space %d after refusals", p.Space())
	}
	_, r := newRQ(t, 2, 2)
	if err := r.Post(&verbs.RecvWR{SGEs: sges(3)}); !errors.Is(err, ErrWR) {
		t.Errorf("receive with 3 SGEs: %v", err)
	}
}

func TestRecvRoundTrip(t *testing.T) {
	q, p := newRQ(t, 8, 16)
	got := newRecvWR()
	for n := range 17 {
		want := verbs.RecvWR{ID: uint64(n) << 40, SGEs: sges(n)}
		if err := p.Post(&want); err != nil || !q.NextRecv(got) {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, *got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%d SGEs (-want +got):\n%s", n, diff)
		}
	}
}

func TestCQERoundTrip(t *testing.T) {
	q, c := newCQ(t, 1, 4)
	want := verbs.WC{
		ID: 1 << 63, Status: verbs.WCRemAccessErr, Op: verbs.WCRecv, Flags: verbs.WCSolicited | verbs.WCWithInv,
		Len: math.MaxUint32, QP: 77, Imm: 0x0102030405060708, InvKey: 0xcafe, Vendor: 0xc0010203,
	}
	if !q.Push(0, &want) {
		t.Fatal("Push")
	}
	got := make([]verbs.WC, 4)
	if n := c.Poll(got); n != 0 {
		t.Errorf("%d completions before Flush", n)
	}
	q.Flush(0, 0)
	if n := c.Poll(got); n != 1 || got[0] != want {
		t.Errorf("%d completions, %+v", n, got[0])
	}
}

// TestRingModel compares random posts and takes with a FIFO, in rings that start anywhere in the index space.
func TestRingModel(t *testing.T) {
	rng := testenv.Rand(t)
	for range 60 {
		entries := 1 << rng.IntN(9)
		f, err := CreateRQ(entries, 2)
		if err != nil {
			t.Fatal(err)
		}
		start := math.MaxUint32 - rng.Uint32N(600)
		word32(f.mem, HeaderSize+RingProducer).Store(start)
		word32(f.mem, HeaderSize+RingConsumer).Store(start)
		q := &RQ{reader: newReader(f.mem, entries, rqStride(2)), maxSGE: 2}
		p, err := MapRQ(f.FD())
		if err != nil {
			t.Fatal(err)
		}
		modelRing(t, rng, entries, q, p)
		p.Close()
		f.Close()
	}
}

func modelRing(t *testing.T, rng *rand.Rand, entries int, q *RQ, p *RQProducer) {
	t.Helper()
	got := newRecvWR()
	var posted, taken uint64
	for range 500 {
		for range rng.IntN(entries + 2) {
			err := p.Post(&verbs.RecvWR{ID: posted})
			if err == nil {
				posted++
				continue
			}
			// The ring is full: at most one batch may be taken and not yet returned.
			if held := int(posted - taken); !errors.Is(err, ErrFull) || held+int(q.batch) < entries {
				t.Fatalf("%d of %d in the ring: %v", held, entries, err)
			}
		}
		if got := q.Posted(); uint64(got) != posted-taken {
			t.Fatalf("Posted %d; want %d", got, posted-taken)
		}
		for range rng.IntN(entries + 2) {
			ok := q.NextRecv(got)
			if ok != (taken < posted) {
				t.Fatalf("NextRecv %v with %d in the ring", ok, posted-taken)
			}
			if !ok {
				break
			}
			if got.ID != taken {
				t.Fatalf("took %d; want %d", got.ID, taken)
			}
			taken++
		}
	}
	for q.NextRecv(got) {
		taken++
	}
	if taken != posted || p.Space() != entries || q.reader.ring.Bad() {
		t.Fatalf("taken %d of %d, space %d of %d", taken, posted, p.Space(), entries)
	}
}

// room returns how many completions fit in worker's ring now.
func room(q *CQ, worker int) int {
	r := q.at(worker)
	return int(r.ring.Free(uint32(r.gen.entries)))
}

// TestCQOverrun checks that a full completion ring drops completions, reports it, and goes on.
func TestCQOverrun(t *testing.T) {
	q, c := newCQ(t, 2, 4)
	q.OnFault = func() { t.Error("the client is cut off, with connections that do not use the queue") }
	for i := range uint64(6) {
		if got := q.Push(1, &verbs.WC{ID: i}); got != (i < 4) {
			t.Errorf("Push %d: %v", i, got)
		}
	}
	q.Flush(1, 0)
	if room, other := room(q, 1), room(q, 0); room != 0 || other != 4 || q.Stats().Overruns != 2 || c.Overruns() != 2 {
		t.Errorf("room %d, %d; overruns %d, %d", room, other, q.Stats().Overruns, c.Overruns())
	}
	wcs := make([]verbs.WC, 3)
	if n := c.Poll(wcs); n != 3 || wcs[2].ID != 2 {
		t.Errorf("%d completions, last %d", n, wcs[2].ID)
	}
	if !q.Push(1, &verbs.WC{ID: 9}) {
		t.Error("no room after Poll")
	}
	q.Flush(1, 0)
	if n := c.Poll(wcs); n != 2 || wcs[0].ID != 3 || wcs[1].ID != 9 {
		t.Errorf("%d completions: %v", n, wcs[:n])
	}
}

// TestCQWorkers checks that a consumer with one ring for each worker starves none of them.
func TestCQWorkers(t *testing.T) {
	const workers = 3
	q, c := newCQ(t, workers, 8)
	for w := range workers {
		for i := range uint64(8) {
			q.Push(w, &verbs.WC{ID: i, QP: uint32(w)})
		}
		q.Flush(w, 0)
	}
	var next [workers]uint64
	wcs := make([]verbs.WC, 5)
	total := 0
	for {
		n := c.Poll(wcs)
		if n == 0 {
			break
		}
		total += n
		for _, w := range wcs[:n] {
			if w.ID != next[w.QP] {
				t.Errorf("worker %d: %d; want %d", w.QP, w.ID, next[w.QP])
			}
			next[w.QP]++
		}
	}
	if total != 8*workers {
		t.Errorf("%d completions", total)
	}
}

func readable(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// TestArm checks which events wake an armed client, and that they wake it once.
func TestArm(t *testing.T) {
	plain, solicited, failed := verbs.WC{}, verbs.WC{Flags: verbs.WCSolicited}, verbs.WC{Status: verbs.WCFlushErr}
	type step func(q *CQ, c *CQConsumer)
	push := func(wc verbs.WC) step { return func(q *CQ, c *CQConsumer) { q.Push(0, &wc); q.Flush(0, 0) } }
	arm := func(sol bool) step { return func(q *CQ, c *CQConsumer) { c.Arm(sol) } }
	tests := []struct {
		name  string
		steps []step
		wake  bool
	}{
		{"not armed", []step{push(plain)}, false},
		{"armed, nothing", []step{arm(false)}, false},
		{"armed after", []step{push(plain), arm(false)}, false},
		{"next", []step{arm(false), push(plain)}, true},
		{"solicited, plain", []step{arm(true), push(plain)}, false},
		{"solicited, plain then solicited", []step{arm(true), push(plain), push(solicited)}, true},
		{"solicited, error", []step{arm(true), push(failed)}, true},
		{"next is not weakened", []step{arm(false), arm(true), push(plain)}, true},
		{"solicited made next", []step{arm(true), arm(false), push(plain)}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			q, c := newCQ(t, 1, 8)
			for _, s := range tt.steps {
				s(q, c)
			}
			if got := readable(q.EventFD()); got != tt.wake {
				t.Fatalf("woken %v; want %v", got, tt.wake)
			}
			Drain(q.EventFD())
			if tt.wake {
				push(failed)(q, c)
				if readable(q.EventFD()) || q.Stats().WakeUps != 1 {
					t.Errorf("woken %d times by one Arm", q.Stats().WakeUps)
				}
			}
		})
	}
}

// rung reports whether any bell was rung.
func rung(d *Doorbells) bool {
	for i := range d.words {
		if d.words[i].Load() != 0 {
			return true
		}
	}
	return false
}

// TestDoorbells checks that each bell is seen once, and that only a sleeping worker is woken.
func TestDoorbells(t *testing.T) {
	d, r, alarm := newBells(t, 130)
	if d.Bits() != 192 || len(r.words) != 3 || rung(d) {
		t.Fatalf("bits %d, words %d", d.Bits(), len(r.words))
	}
	for _, bit := range []int{0, 63, 64, 191, 64} {
		r.Ring(bit)
	}
	if readable(alarm.FD()) {
		t.Error("a worker that is awake was woken")
	}
	for i, want := range []uint64{1 | 1<<63, 1, 1 << 63} {
		if got := d.Take(i); got != want {
			t.Errorf("word %d: %#x; want %#x", i, got, want)
		}
	}
	if rung(d) || d.Take(0) != 0 {
		t.Error("a bell is left")
	}
	d.SetSleeping(true)
	r.Ring(5)
	r.Ring(6)
	if !readable(alarm.FD()) || !rung(d) {
		t.Error("a sleeper was not woken")
	}
	var b [64]byte
	if n, err := unix.Read(d.WakeFD(), b[:]); n != 8 || err != nil || b[0] != 2 { // the counter starts at 1
		t.Errorf("%d bytes, %d, of the eventfd: %v; want one wake-up", n, b[0], err)
	}
	alarm.Clear()
	d.SetSleeping(true)
	d.SetSleeping(false)
	r.Ring(7)
	if readable(alarm.FD()) {
		t.Error("woken after SetSleeping(false)")
	}
	alarm.Ring()
	if !readable(alarm.FD()) {
		t.Error("not woken by Ring")
	}
	alarm.Clear()
	alarm.Unwatch(d.WakeFD())
	Wake(d.WakeFD())
	if readable(alarm.FD()) {
		t.Error("woken after Unwatch")
	}
	before := r.Received()
	if d.Received(); r.Received() == before {
		t.Error("Received is not seen")
	}
}

func TestCreateRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func() (interface{ Close() error }, error)
	}{
		{"SQ of 0", func() (interface{ Close() error }, error) { return CreateSQ(0, 1, 0) }},
		{"SQ too large", func() (interface{ Close() error }, error) { return CreateSQ(MaxEntries+1, 1, 0) }},
		{"SQ without SGE", func() (interface{ Close() error }, error) { return CreateSQ(1, 0, 0) }},
		{"SQ with too many SGEs", func() (interface{ Close() error }, error) { return CreateSQ(1, verbs.MaxSGE+1, 0) }},
		{"SQ inline", func() (interface{ Close() error }, error) { return CreateSQ(1, 1, verbs.MaxInline+1) }},
		{"SQ inline negative", func() (interface{ Close() error }, error) { return CreateSQ(1, 1, -1) }},
		{"RQ of -1", func() (interface{ Close() error }, error) { return CreateRQ(-1, 1) }},
		{"CQ without worker", func() (interface{ Close() error }, error) { return CreateCQ(0, 1) }},
		{"CQ of 0", func() (interface{ Close() error }, error) { return CreateCQ(1, 0) }},
		{"no bells", func() (interface{ Close() error }, error) { return CreateDoorbells(0) }},
		{"too many bells", func() (interface{ Close() error }, error) { return CreateDoorbells(MaxBells + 1) }},
	} {
		if x, err := tt.make(); err == nil {
			t.Errorf("%s was made", tt.name)
			x.Close()
		}
	}
}

// TestNoAllocs checks that no step of a work request allocates.
func TestNoAllocs(t *testing.T) {
	sq, sp := newSQ(t, 64, 16, 256)
	rq, rp := newRQ(t, 64, 16)
	cq, cc := newCQ(t, 2, 64)
	bells, ringer, _ := newBells(t, 64)
	swr, rwr, wcs := newSendWR(), newRecvWR(), make([]verbs.WC, 8)
	post := verbs.SendWR{Op: rdmap.OpSend, SGEs: sges(16)}
	inline := verbs.SendWR{Op: rdmap.OpSend, Flags: verbs.Inline, Inline: make([]byte, 256)}
	recv := verbs.RecvWR{SGEs: sges(16)}
	for name, f := range map[string]func(){
		"send":   func() { sp.Post(&post); sp.Post(&inline); sq.NextSend(swr); sq.NextSend(swr) },
		"recv":   func() { rp.Post(&recv); rq.NextRecv(rwr) },
		"wc":     func() { cq.Push(1, &wcs[0]); cq.Flush(1, 0); cc.Poll(wcs); cc.Arm(true) },
		"bell":   func() { ringer.Ring(3); bells.Take(0); bells.SetSleeping(true) },
		"wakeup": func() { cc.Arm(false); cq.Push(0, &wcs[0]); cq.Flush(0, 0); cc.Poll(wcs) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// BenchmarkRings measures what the API adds to a work request: post, doorbell, decode, completion and poll, all on
// one core.
func BenchmarkRings(b *testing.B) {
	for _, kind := range []string{"sge", "inline64"} {
		b.Run(kind, func(b *testing.B) {
			sq, sp := newSQ(b, 256, 16, 64)
			cq, cc := newCQ(b, 1, 256)
			bells, ringer, _ := newBells(b, 64)
			wr, got, wcs := verbs.SendWR{Op: rdmap.OpWrite, SGEs: sges(1)}, newSendWR(), make([]verbs.WC, 1)
			if kind != "sge" {
				wr = verbs.SendWR{Op: rdmap.OpWrite, Flags: verbs.Inline, Inline: make([]byte, 64)}
			}
			b.ReportAllocs()
			for b.Loop() {
				if err := sp.Post(&wr); err != nil {
					b.Fatal(err)
				}
				ringer.Ring(3)
				if bells.Take(0) == 0 || !sq.NextSend(got) {
					b.Fatal("nothing posted")
				}
				cq.Push(0, &verbs.WC{ID: got.ID})
				cq.Flush(0, 0)
				if cc.Poll(wcs) != 1 {
					b.Fatal("no completion")
				}
				sq.NextSend(got) // ends the worker's batch
			}
		})
	}
	b.Run("batch16", func(b *testing.B) {
		sq, sp := newSQ(b, 256, 16, 64)
		cq, cc := newCQ(b, 1, 256)
		wr, got, wcs := verbs.SendWR{Op: rdmap.OpWrite, SGEs: sges(1)}, newSendWR(), make([]verbs.WC, 16)
		b.ReportAllocs()
		for b.Loop() {
			for range 16 {
				sp.Post(&wr)
			}
			for sq.NextSend(got) {
				cq.Push(0, &verbs.WC{ID: got.ID})
			}
			cq.Flush(0, 0)
			if n := cc.Poll(wcs); n != 16 {
				b.Fatal(fmt.Sprint(n, " completions"))
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/16, "ns/wr")
	})
}

// TestReceiveRingStaysFull checks that a client that keeps the ring full of receives can post the next one as soon
// as the worker has taken one.
func TestReceiveRingStaysFull(t *testing.T) {
	q, p := newRQ(t, 8, 1)
	wr := verbs.RecvWR{SGEs: []verbs.SGE{{Addr: 1, Len: 2, LKey: 3}}}
	for range p.Depth() {
		if err := p.Post(&wr); err != nil {
			t.Fatal(err)
		}
	}
	var got verbs.RecvWR
	for i := range 100 {
		if !q.NextRecv(&got) {
			t.Fatalf("receive %d is not there", i)
		}
		if err := p.Post(&wr); err != nil {
			t.Fatalf("post behind receive %d: %v", i, err)
		}
	}
}

// TestSendRingGivesBack checks that an entry that a queue pair has taken is free in the ring at once, also in the
// middle of a batch and before its operation completes.
func TestSendRingGivesBack(t *testing.T) {
	const entries = 16
	q, p := newSQ(t, entries, 1, 0)
	qp := verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: verbs.NewTable(rand.NewChaCha8([32]byte{})), SQDepth: entries, MaxSGE: 1, Sends: q})
	qp.Start(rdmap.Config{IRD: 1, ORD: 1})
	for i := range 4 {
		_ = p.Post(&verbs.SendWR{ID: uint64(i), Op: rdmap.OpSend})
	}
	for i, wr := 0, newSendWR(); q.NextSend(wr); i++ {
		if wr.ID != uint64(i) {
			t.Errorf("took work request %d; want %d", wr.ID, i)
		}
		q.Taken()
	}
	posted, taken := 0, 0
	for _, n := range []int{1, 3, 5, 2, 1} {
		for p.Post(&verbs.SendWR{ID: uint64(posted), Op: rdmap.OpSend}) == nil {
			posted++
		}
		if got := qp.HandleSends(n); got != n {
			t.Fatalf("took %d work requests; want %d", got, n)
		}
		taken += n
		if got := p.Space(); got != entries-(posted-taken) {
			t.Errorf("space for %d with %d posted and %d taken", got, posted, taken)
		}
		if got := q.Posted(); got != posted-taken {
			t.Errorf("%d wait; want %d", got, posted-taken)
		}
	}
}
