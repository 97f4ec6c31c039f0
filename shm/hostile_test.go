package shm

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// checkSend checks what must hold for any decoded WQE, whatever bytes the client wrote.
func checkSend(t testing.TB, wr *verbs.SendWR, maxSGE, maxInline int) {
	t.Helper()
	switch {
	case len(wr.SGEs) > maxSGE || len(wr.Inline) > maxInline || len(wr.SGEs) != 0 && len(wr.Inline) != 0:
		t.Fatalf("%d SGEs, %d bytes inline", len(wr.SGEs), len(wr.Inline))
	case wr.Op == 0 || wr.Op == rdmap.OpTerminate:
		t.Fatalf("operation %v came through", wr.Op)
	case wr.Op == verbs.OpInvalid && (len(wr.SGEs) != 0 || len(wr.Inline) != 0):
		t.Fatal("an invalid work request has content")
	case len(wr.Inline) != 0 && wr.Flags&verbs.Inline == 0:
		t.Fatal("inline data without the flag")
	}
}

// TestHostileIndices writes impossible and random producer indices. It checks that the worker never takes more
// entries than a ring can hold, and that the fault is reported.
func TestHostileIndices(t *testing.T) {
	rng := testenv.Rand(t)
	const entries = 8
	q, p := newSQ(t, entries, 2, 0)
	prod := word32(q.file.mem, HeaderSize+RingProducer)
	cons := word32(q.file.mem, HeaderSize+RingConsumer)
	got := newSendWR()
	drain := func() int {
		n := 0
		for n < 10*entries && q.NextSend(got) {
			checkSend(t, got, 2, 0)
			n++
		}
		return n
	}
	for range 1000 {
		base := q.first + q.used
		prod.Store(base + entries + 1 + rng.Uint32N(1<<31))
		if n := drain(); n != 0 {
			t.Fatalf("%d work requests from an impossible index", n)
		}
		if !q.reader.ring.Bad() {
			t.Fatal("the fault was not seen")
		}
		cons.Store(rng.Uint32()) // the consumer index is ours: a client that writes it harms only itself
		want := rng.IntN(entries + 1)
		prod.Store(base + uint32(want))
		if n := drain(); n != want {
			t.Fatalf("%d work requests; want %d", n, want)
		}
	}
	_ = p
}

// TestIndexMovesBack checks that a client that moves its producer index back, when the daemon has seen more receives, is
// reported. The receives seen are taken.
func TestIndexMovesBack(t *testing.T) {
	const posted = 4
	q, p := newRQ(t, 8, 1)
	faults := 0
	q.OnFault = func() { faults++ }
	for i := range uint64(posted) {
		if err := p.Post(&verbs.RecvWR{ID: i}); err != nil {
			t.Fatal(err)
		}
	}
	wr := newRecvWR()
	for i := range uint64(posted) {
		if !q.NextRecv(wr) || wr.ID != i {
			t.Fatalf("receive %d: ID %d", i, wr.ID)
		}
		word32(p.mem, HeaderSize+RingProducer).Store(1)
		if n := q.Posted(); n != posted-1-int(i) {
			t.Errorf("%d posted after %d were taken", n, i+1)
		}
	}
	if q.NextRecv(wr) || faults != 1 {
		t.Errorf("ID %d; %d faults", wr.ID, faults)
	}
}

// TestHostileCQ writes random consumer indices and checks that Push never writes outside the ring, and never more
// entries than the ring holds.
func TestHostileCQ(t *testing.T) {
	rng := testenv.Rand(t)
	const entries = 8
	q, _ := newCQ(t, 2, entries)
	size := ringSize(entries, CQESize)
	cons := word32(q.gen.Load().file.mem, HeaderSize+RingConsumer)
	other := q.gen.Load().mem[HeaderSize+size:]
	header := append([]byte(nil), q.gen.Load().mem[:HdrArm]...)
	pushed := uint32(0)
	for range 1000 {
		cons.Store(pushed + 1 + rng.Uint32N(1<<31))
		if q.Push(0, &verbs.WC{ID: ^uint64(0)}) {
			// An index that was read before may still leave room, but never more than that.
			if pushed++; pushed > entries {
				t.Fatal("a full ring took a completion")
			}
		}
		q.Flush(0, 0)
	}
	if !q.rings[0].ring.Bad() || q.rings[1].ring.Bad() {
		t.Error("faults")
	}
	for i, v := range other {
		if v != 0 {
			t.Fatalf("byte %d of the other worker's ring is %#x", i, v)
		}
	}
	if string(header) != string(q.gen.Load().mem[:HdrArm]) {
		t.Error("the header has changed")
	}
}

// TestMutatingPeer writes random bytes over the whole ring from another goroutine, through its own mapping, while
// the worker takes work requests from the ring and posts them to real queue pairs.
func TestMutatingPeer(t *testing.T) {
	rng := testenv.Rand(t)
	const entries, maxSGE, maxInline = 16, 4, 100
	sq, sp := newSQ(t, entries, maxSGE, maxInline)
	rq, rp := newRQ(t, entries, maxSGE)
	cq, cc := newCQ(t, 1, entries)
	table := verbs.NewTable(rand.NewChaCha8([32]byte{1}))
	region, err := table.Register(1, make([]byte, 4096), 0, verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}

	var stop atomic.Bool
	var wg sync.WaitGroup
	var pos [2]atomic.Uint32 // positions of the worker in the two rings, so that some indices are right
	seed := rng.Uint64()
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 0))
		for !stop.Load() {
			for i, m := range [][]byte{sp.mem, rp.mem, cc.mem} {
				// Most values are small, so that opcodes and counts are often valid.
				v := rng.Uint64() >> (8 * rng.IntN(8))
				if rng.IntN(8) == 0 {
					v = uint64(region.STag()) << 32
				}
				binary.LittleEndian.PutUint64(m[HeaderSize+8*rng.IntN((len(m)-HeaderSize)/8):], v)
				if i < len(pos) && rng.IntN(4) == 0 {
					word32(m, HeaderSize+RingProducer).Store(pos[i].Load() + rng.Uint32N(entries+1))
				}
			}
		}
	})
	got, recv := newSendWR(), newRecvWR()
	sends, recvs, errs := 0, 0, 0
	for began := time.Now(); sends == 0 || recvs == 0 || sends+recvs < 10000 && time.Since(began) < 5*time.Second; {
		if time.Since(began) > time.Minute {
			break
		}
		qp := verbs.NewQP(verbs.QPConfig{
			Num: 1, PD: 1, Table: table, SQDepth: 4, RQDepth: 4, MaxSGE: maxSGE, MaxInline: maxInline, Sends: sq, Recvs: rq,
		})
		qp.Start(rdmap.Config{IRD: 1, ORD: 1})
		for range 20 {
			for range entries {
				if sq.NextSend(got) {
					checkSend(t, got, maxSGE, maxInline)
					sends++
				}
				if rq.NextRecv(recv) {
					if len(recv.SGEs) > maxSGE || recv.Bad && len(recv.SGEs) != 0 {
						t.Fatalf("%d SGEs, bad %v", len(recv.SGEs), recv.Bad)
					}
					recvs++
				}
			}
			pos[0].Store(sq.first + sq.used)
			pos[1].Store(rq.first + rq.used)
			qp.HandleSends(entries)
			var seg rdmap.Segment
			for range 4 {
				if qp.Stream().PollFilling(1000, 1000, &seg) {
					qp.Gather(&seg.Src, seg.Len, nil)
				}
			}
			var wc verbs.WC
			for range entries {
				if !qp.PollWC(&wc) {
					break
				}
				if wc.Status != verbs.WCSuccess {
					errs++
				}
				cq.Push(0, &wc)
			}
			cq.Flush(0, 0)
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d sends, %d receives, %d error completions", sends, recvs, errs)
	if sends == 0 || recvs == 0 {
		t.Error("the scribbler posted nothing: the test shows nothing")
	}
}

// FuzzSendWQE decodes arbitrary WQEs and posts them to a queue pair.
func FuzzSendWQE(f *testing.F) {
	wqe := make([]byte, sqStride(4, 100))
	for _, wr := range []verbs.SendWR{
		{Op: rdmap.OpSend, SGEs: sges(4)},
		{Op: rdmap.OpWrite, Flags: verbs.Inline, Inline: make([]byte, 100)},
		{Op: rdmap.OpCmpSwap, SGEs: sges(1)},
		{Op: verbs.OpBindMW, SGEs: sges(1), Access: verbs.RemoteRead},
	} {
		clear(wqe)
		encodeSend(wqe, &wr)
		f.Add(append([]byte(nil), wqe...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		sq, sp := newSQ(t, 1, 4, 100)
		copy(sp.slots[:sp.stride], b)
		word32(sp.mem, HeaderSize+RingProducer).Store(1)
		wr := newSendWR()
		if !sq.NextSend(wr) || sq.NextSend(new(verbs.SendWR)) {
			t.Fatal("one WQE was posted")
		}
		checkSend(t, wr, 4, 100)
		// Encoding and decoding the result again must change nothing.
		if wr.Op != verbs.OpInvalid {
			if !fitsSend(wr, 4, 100) {
				t.Fatalf("%+v does not fit", wr)
			}
			again, back := make([]byte, sp.stride), newSendWR()
			encodeSend(again, wr)
			decodeSend(again, back, 4, 100)
			mask(wr, wr.Op)
			mask(back, wr.Op)
			if len(back.SGEs) != len(wr.SGEs) || len(back.Inline) != len(wr.Inline) || back.Op != wr.Op || back.Flags != wr.Flags || back.Imm != wr.Imm || back.SwapMask != wr.SwapMask {
				t.Fatalf("%+v became %+v", wr, back)
			}
		}
		word32(sp.mem, HeaderSize+RingProducer).Store(2)
		table := verbs.NewTable(rand.NewChaCha8([32]byte{}))
		if _, err := table.Register(1, make([]byte, 4096), 0, verbs.LocalWrite); err != nil {
			t.Fatal(err)
		}
		qp := verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: table, SQDepth: 1, MaxSGE: 4, MaxInline: 100, Sends: sq})
		qp.Start(rdmap.Config{IRD: 1, ORD: 1})
		qp.HandleSends(4)
		var seg rdmap.Segment
		for range 100 {
			if !qp.Stream().PollFilling(1000, 1000, &seg) {
				break
			}
			qp.Gather(&seg.Src, seg.Len, nil)
		}
		qp.Error()
		var wc verbs.WC
		qp.PollWC(&wc)
	})
}

// FuzzRing runs random steps of both sides over a receive ring, in which the client may write any index.
func FuzzRing(f *testing.F) {
	f.Add([]byte{0, 1, 0, 1, 2, 0xff, 1, 3, 9, 1})
	f.Add([]byte{2, 8, 1, 1, 1, 2, 0, 1})
	f.Fuzz(func(t *testing.T, script []byte) {
		const entries = 4
		q, p := newRQ(t, entries, 1)
		prod := word32(p.mem, HeaderSize+RingProducer)
		wr := newRecvWR()
		for i := 0; i+1 < len(script) && i < 400; i += 2 {
			switch arg := script[i+1]; script[i] % 5 {
			case 0:
				p.Post(&verbs.RecvWR{ID: uint64(arg)})
			case 1:
				if q.NextRecv(wr) && len(wr.SGEs) > 1 {
					t.Fatal("too many SGEs")
				}
			case 2:
				prod.Store(prod.Load() + uint32(int8(arg)))
			case 3:
				p.slots[int(arg)%len(p.slots)] = arg
			case 4:
				if n := q.Posted(); n < 0 || n > entries {
					t.Fatalf("%d posted", n)
				}
			}
			if q.n > entries || q.used > q.n {
				t.Fatalf("batch of %d, %d used", q.n, q.used)
			}
		}
	})
}

// TestBadWQE breaks each rule of the layout and checks that the work request is passed on as invalid, with its ID.
func TestBadWQE(t *testing.T) {
	const maxSGE, maxInline = 2, 20
	tests := []struct {
		name string
		bend func(e []byte)
		ok   bool
	}{
		{"nothing", func(e []byte) {}, true},
		{"opcode", func(e []byte) { e[SQEOpcode] = 1 }, false},
		{"opcode 255", func(e []byte) { e[SQEOpcode] = 255 }, false},
		{"flag", func(e []byte) { e[SQEFlags] |= 0x10 }, false},
		{"all SGEs", func(e []byte) { le.PutUint16(e[SQENumSGE:], maxSGE) }, true},
		{"too many SGEs", func(e []byte) { le.PutUint16(e[SQENumSGE:], maxSGE+1) }, false},
		{"65535 SGEs", func(e []byte) { le.PutUint16(e[SQENumSGE:], 65535) }, false},
		{"length without inline", func(e []byte) { e[SQEInlineLen] = 1 }, false},
		{"inline", func(e []byte) {
			e[SQEFlags], e[SQEInlineLen] = byte(verbs.Inline), maxInline
			le.PutUint16(e[SQENumSGE:], 0)
		}, true},
		{"inline and SGEs", func(e []byte) { e[SQEFlags] = byte(verbs.Inline) }, false},
		{"inline too long", func(e []byte) {
			e[SQEFlags], e[SQEInlineLen] = byte(verbs.Inline), maxInline+1
			le.PutUint16(e[SQENumSGE:], 0)
		}, false},
		{"inline of 2^32-1", func(e []byte) {
			e[SQEFlags] = byte(verbs.Inline)
			le.PutUint16(e[SQENumSGE:], 0)
			le.PutUint32(e[SQEInlineLen:], 1<<32-1)
		}, false},
	}
	q, p := newSQ(t, 1, maxSGE, maxInline)
	wr := newSendWR()
	for _, tt := range tests {
		if err := p.Post(&verbs.SendWR{ID: 77, Op: rdmap.OpSend, SGEs: sges(1)}); err != nil {
			t.Fatal(err)
		}
		tt.bend(p.slots)
		if !q.NextSend(wr) || wr.ID != 77 || tt.ok != (wr.Op == rdmap.OpSend) || !tt.ok && wr.Op != verbs.OpInvalid {
			t.Errorf("%s: %+v", tt.name, wr)
		}
		checkSend(t, wr, maxSGE, maxInline)
		q.NextSend(wr) // returns the entry to the ring
	}
	rq, rp := newRQ(t, 1, maxSGE)
	recv := newRecvWR()
	for n := range uint16(5) {
		if err := rp.Post(&verbs.RecvWR{ID: 5}); err != nil {
			t.Fatal(err)
		}
		le.PutUint16(rp.slots[RQENumSGE:], n)
		if !rq.NextRecv(recv) || recv.ID != 5 || recv.Bad != (n > maxSGE) || !recv.Bad && len(recv.SGEs) != int(n) {
			t.Errorf("receive of %d SGEs: %+v", n, recv)
		}
		rq.NextRecv(recv)
	}
}
