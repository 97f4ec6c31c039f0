package rdmap

import (
	"testing"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// nullMemory takes everything and keeps nothing.
type nullMemory struct{ recv uint32 }

func (m *nullMemory) Recv(serial.Num) (uint32, uint32, bool) {
	m.recv++
	return m.recv, 1 << 20, true
}
func (*nullMemory) Place(*Placement, marked.Bytes) *term.Error             { return nil }
func (*nullMemory) CheckRead(uint32, uint64, uint32) *term.Error           { return nil }
func (*nullMemory) Atomic(uint32, uint64, *AtomicOp) (uint64, *term.Error) { return 7, nil }
func (*nullMemory) Invalidate(uint32) *term.Error                          { return nil }
func (*nullMemory) AtomicResult(uint32, uint64)                            {}

// bench is two Streams over nullMemory; payload bytes are never touched.
type bench struct {
	a, b Stream
	seg  Segment
	buf  [64 << 10]byte
	c    Completion
	key  serial.Num
}

func newBench() *bench {
	p := new(bench)
	p.a.Init(Config{IRD: 16, ORD: 16}, new(nullMemory))
	p.b.Init(Config{IRD: 16, ORD: 16}, new(nullMemory))
	return p
}

// carry moves all segments from one end to the other and counts them.
func (p *bench) carry(from, to *Stream, mulpdu int, early bool) (n int) {
	for from.PollFilling(mulpdu, mulpdu, &p.seg) {
		copy(p.buf[:], p.seg.Hdr[:p.seg.HdrLen])
		u := p.buf[:p.seg.HdrLen+p.seg.Len]
		p.key += 1460
		if early && to.HandleEarly(p.key, u) {
			if err := to.DeliverEarly(p.key); err != nil {
				panic(err)
			}
		} else if err := to.HandleULPDU(u); err != nil {
			panic(err)
		}
		n++
	}
	return n
}

func (p *bench) run(wr *WR, mulpdu int, early bool) (segments int) {
	if !p.a.PostSend(wr) {
		panic("queue full")
	}
	segments = p.carry(&p.a, &p.b, mulpdu, early) + p.carry(&p.b, &p.a, mulpdu, early)
	for p.a.PollCompletion(&p.c) {
	}
	for p.b.PollCompletion(&p.c) {
	}
	return segments
}

var benchOps = []WR{
	{Op: OpWrite, Len: 64}, {Op: OpWrite, Len: 1 << 20}, {Op: OpRead, Len: 64}, {Op: OpRead, Len: 1 << 20},
	{Op: OpSend, Len: 64}, {Op: OpSendSEInv, Len: 1 << 20}, {Op: OpImm}, {Op: OpFetchAdd}, {Op: OpCmpSwap}, {Op: 99},
}

func TestNoAllocs(t *testing.T) {
	for _, early := range []bool{false, true} {
		p := newBench()
		for _, wr := range benchOps {
			if n := testing.AllocsPerRun(20, func() { p.run(&wr, 1440, early) }); n != 0 {
				t.Errorf("%v of %d bytes, early %v: %v allocations; want none", wr.Op, wr.Len, early, n)
			}
		}
	}
	// An error and its Terminate, from the first byte to the flush.
	streams := make([]Stream, 30)
	for i := range streams {
		streams[i].Init(Config{}, new(nullMemory))
	}
	bad := make([]byte, ddp.UntaggedLen)
	var seg Segment
	var c Completion
	wr := WR{Op: OpSend}
	i := 0
	if n := testing.AllocsPerRun(20, func() {
		s := &streams[i]
		i++
		s.PostSend(&wr)
		if s.HandleULPDU(bad) != term.ErrUntaggedVersion || !s.PollFilling(1440, 1440, &seg) {
			t.Fatal("no Terminate")
		}
		s.Flush()
		if !s.PollCompletion(&c) {
			t.Fatal("not flushed")
		}
	}); n != 0 {
		t.Errorf("an error: %v allocations; want none", n)
	}
}

func benchmarkOp(b *testing.B, wr WR, early bool) {
	p := newBench()
	segments := 0
	b.ReportAllocs()
	for b.Loop() {
		segments += p.run(&wr, 1440, early)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(segments), "ns/segment")
	b.ReportMetric(float64(segments)/b.Elapsed().Seconds(), "segments/s")
}

// Both ends compose, decode and deliver; copying is not included.
func BenchmarkWrite64(b *testing.B)      { benchmarkOp(b, WR{Op: OpWrite, Len: 64}, false) }
func BenchmarkWrite1M(b *testing.B)      { benchmarkOp(b, WR{Op: OpWrite, Len: 1 << 20}, false) }
func BenchmarkWrite1MEarly(b *testing.B) { benchmarkOp(b, WR{Op: OpWrite, Len: 1 << 20}, true) }
func BenchmarkRead1M(b *testing.B)       { benchmarkOp(b, WR{Op: OpRead, Len: 1 << 20}, false) }
func BenchmarkSend64(b *testing.B)       { benchmarkOp(b, WR{Op: OpSend, Len: 64}, false) }
func BenchmarkFetchAdd(b *testing.B)     { benchmarkOp(b, WR{Op: OpFetchAdd}, false) }
