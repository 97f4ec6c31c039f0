package session

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// absurd makes a call with arbitrary chunk lists chosen by src.
func absurd(src func(n int) int) (wire.Header, []byte) {
	lengths := []uint32{0, 1, 3, 4, 8, 100, 4096, 9999, 10_000, 1 << 20, 1<<31 - 1, 1 << 31, 1<<32 - 1}
	positions := []uint32{0, 4, 8, 40, 41, 44, 48, 4096, 1<<31 + 4, 1<<32 - 4}
	counts := []int{0, 0, 0, 1, 1, 2, 3, 4, 20}
	seg := func() wire.Segment {
		return wire.Segment{Handle: uint32(src(3)), Length: lengths[src(len(lengths))], Offset: uint64(src(4)) << 62}
	}
	reads := func(pos func() uint32) (l []wire.ReadSegment) {
		for range counts[src(len(counts))] {
			l = append(l, wire.ReadSegment{Position: pos(), Segment: seg()})
		}
		return l
	}
	chunk := func() wire.Chunk {
		c := wire.Chunk{}
		for range counts[src(len(counts))] {
			c = append(c, seg())
		}
		return c
	}
	at := uint32(0)
	position := func() uint32 {
		if src(8) == 0 {
			at = positions[src(len(positions))]
		} else {
			at += uint32(src(3)) * 4
		}
		return at
	}
	h := wire.Header{XID: 9, Vers: uint32(1 + src(2)), Credit: uint32(src(2)) * 1000, InvHandle: uint32(src(3))}
	if h.Vers == 2 {
		h.Type = []wire.Type{wire.CallInline, wire.CallExternal, wire.CallMiddle}[src(3)]
		h.Remaining = lengths[src(len(lengths))]
		h.Call = reads(func() uint32 { return uint32(src(9) / 8 * 4) })
	} else {
		h.Type = []wire.Type{wire.Msg1, wire.NoMsg1}[src(2)]
	}
	h.Reads = reads(position)
	for range counts[src(len(counts))] {
		h.Writes = append(h.Writes, chunk())
	}
	if src(2) == 1 {
		h.Reply = chunk()
	}
	return h, callBody(9, []int{0, 8, 40, 1000}[src(4)])
}

// holdChunks passes such calls to a responder and checks what it accepts, reads, writes and allocates against the
// limits.
func holdChunks(t *testing.T, src func(n int) int) (accepted int) {
	limits := Limits{Message: 4096, ReadChunks: 2, WriteChunks: 2, Segments: 3, Chunk: 10_000}
	cfg := DefaultConfig(true)
	cfg.Limits = limits
	s := New(cfg)
	var out Out
	var before, after runtime.MemStats
	size, calls := 0, 0
	var messages [][]byte
	for range 1 + src(8) {
		h, body := absurd(src)
		if b := append(h.Append(nil), body...); len(b) <= 4096 { // a Receive has room for no more
			messages = append(messages, b)
		}
	}
	runtime.ReadMemStats(&before)
	for _, b := range messages {
		size += len(b)
		s.HandleMessage(b)
		for s.PollTransmit(&out) {
			size += len(out.B)
		}
		for e, ok := s.PollEvent(); ok; e, ok = s.PollEvent() {
			if e.Kind != EventCall {
				continue
			}
			c := e.Call
			calls++
			var ext, total uint64
			for _, r := range c.Ext {
				ext += uint64(r.Length)
			}
			for i, n := 0, uint64(0); i < len(c.Reads); i++ {
				if i > 0 && c.Reads[i].Position != c.Reads[i-1].Position {
					n = 0
				}
				if n += uint64(c.Reads[i].Length); n > limits.Chunk {
					t.Fatalf("a Read chunk of %d bytes is taken", n)
				}
				total += uint64(c.Reads[i].Length)
			}
			if ext > uint64(limits.Message) || total > uint64(limits.ReadChunks)*limits.Chunk || len(c.Writes) > limits.WriteChunks || len(c.Ext) > limits.Segments {
				t.Fatalf("it takes %d and %d bytes in %d segments, %d Write chunks", ext, total, len(c.Ext), len(c.Writes))
			}
			const result, rest = 5000, 300
			p, f, ok := s.PlanReply(c, rest, []int{result})
			if !ok {
				s.Fail(c, f)
				continue
			}
			var n uint64
			for _, x := range p.Copies {
				n += uint64(x.To.Length)
			}
			if n > result+rest {
				t.Fatalf("%d bytes are written of %d", n, result+rest)
			}
			left := rest
			if !p.Reduce[0] {
				left += result
			}
			s.Reply(c, p, make([]byte, left))
			size += left
		}
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > uint64(64*size+(calls+8)*limits.Message+64<<10) {
		t.Fatalf("%d bytes were allocated for messages of %d bytes and %d calls", n, size, calls)
	}
	return calls
}

// FuzzChunks checks that a responder stays within its limits for any chunk lists.
func FuzzChunks(f *testing.F) {
	rnd := rand.New(rand.NewPCG(1, testenv.Seed(f)))
	for range 50 {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		holdChunks(t, func(n int) int { // the bytes in turn, then zeros
			if len(b) < 2 {
				return 0
			}
			v := int(binary.BigEndian.Uint16(b))
			b = b[2:]
			return v % n
		})
	})
}

// TestChunks runs the same check on many random lists.
func TestChunks(t *testing.T) {
	rnd := rand.New(rand.NewPCG(2, testenv.Seed(t)))
	accepted := 0
	for range 1500 {
		accepted += holdChunks(t, rnd.IntN)
	}
	if accepted < 20 {
		t.Errorf("only %d calls were accepted", accepted)
	}
}
