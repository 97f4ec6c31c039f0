package tcp

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestReassemblyOracle compares the reassembly queue with a map of bytes, over random segments, some placed early, at
// random sequence numbers.
func TestReassemblyOracle(t *testing.T) {
	from, only := firstSeed(t)
	n := uint64(400)
	if only {
		n = 1
	}
	for seed := from; seed < from+n; seed++ {
		r := rand.New(rand.NewPCG(seed, 1))
		var q reassembly
		base := serial.Num(r.Uint32())
		next := base
		held := map[Buf]bool{}
		have := map[serial.Num]bool{} // out-of-order bytes
		delivered := 0
		buf := Buf(0)
		drain := func() {
			for {
				h, ok := q.out.pop()
				if !ok {
					return
				}
				if h.Buf != NoBuf {
					if !held[h.Buf] {
						t.Fatalf("seed %d: buffer %d was not held", seed, h.Buf)
					}
					delete(held, h.Buf)
				}
				if h.Deliver {
					if h.Seq != base.Add(delivered) || h.Len <= 0 {
						t.Fatalf("seed %d: delivery at %d of %d, want %d", seed, h.Seq-base, h.Len, delivered)
					}
					delivered += h.Len
				}
			}
		}
		for range 300 {
			seq := next.Add(1 + r.IntN(60))
			ln := 1 + r.IntN(30)
			switch r.IntN(8) {
			case 0:
				// In order: bytes up to seq arrive.
				k := 1 + r.IntN(20)
				delivered += k
				for i := range k {
					delete(have, next.Add(i))
				}
				next = next.Add(k)
				before := next
				next = q.advance(next)
				for i := before; i != next; i++ {
					if !have[i] {
						t.Fatalf("seed %d: byte %d came from nowhere", seed, i-base)
					}
					delete(have, i)
				}
				if have[next] {
					t.Fatalf("seed %d: byte %d is held but not delivered", seed, next-base)
				}
			case 1:
				for b := range held {
					q.placed(b)
					delete(held, b)
					break
				}
			case 2:
				// Some of the held segments are reclaimed; the rest must stay unchanged.
				var want []heldSeg
				k, n := r.IntN(6), len(held)
				for _, h := range q.s {
					if h.buf != NoBuf {
						if n <= k {
							continue
						}
						n--
					}
					want = append(want, h)
				}
				q.reclaim(k)
				if !slices.Equal(q.s, want) {
					t.Fatalf("seed %d: %d reclaimed: %+v; want %+v", seed, k, q.s, want)
				}
				clear(have)
				for _, h := range q.s {
					for i := range int(h.len) {
						have[h.seq.Add(i)] = true
					}
				}
			default:
				buf++
				h, ok := q.insert(heldSeg{seq: seq, len: int32(ln), buf: buf}, 12)
				if !ok {
					if len(q.s) >= 12 {
						break
					}
					for i := range ln {
						if !have[seq.Add(i)] {
							t.Fatalf("seed %d: %d+%d refused, but byte %d is new", seed, seq-base, ln, i)
						}
					}
					break
				}
				held[buf] = true
				if !h.seq.In(seq, uint32(ln)) || h.end().Sub(seq) > ln || int(h.off) != h.seq.Sub(seq) {
					t.Fatalf("seed %d: took %+v of %d+%d", seed, h, seq, ln)
				}
				for i := range int(h.len) {
					have[h.seq.Add(i)] = true
				}
			}
			drain()
			for i := 1; i < len(q.s); i++ {
				if !q.s[i-1].seq.Less(q.s[i].seq) || !q.s[i-1].end().Less(q.s[i].end()) {
					t.Fatalf("seed %d: out of order: %+v", seed, q.s)
				}
			}
			got := map[serial.Num]bool{}
			for _, h := range q.s {
				for i := range int(h.len) {
					got[h.seq.Add(i)] = true
				}
			}
			if len(got) != len(have) {
				t.Fatalf("seed %d: %d bytes held, want %d", seed, len(got), len(have))
			}
			checkBlocks(t, &q, have)
		}
		q.drop()
		drain()
		if len(held) != 0 {
			t.Fatalf("seed %d: %d buffers missing", seed, len(held))
		}
	}
}

// checkBlocks verifies SACK blocks against the bytes held (RFC 2018 section 4).
func checkBlocks(t *testing.T, q *reassembly, have map[serial.Num]bool) {
	t.Helper()
	var b [4]SACKBlock
	n := q.blocks(b[:])
	if len(have) > 0 && n == 0 {
		t.Fatal("no SACK block")
	}
	for i, x := range b[:n] {
		if have[x.Start-1] || have[x.End] || !x.Start.Less(x.End) {
			t.Fatalf("block %v is not whole", x)
		}
		for s := x.Start; s != x.End; s++ {
			if !have[s] {
				t.Fatalf("byte %d of block %v is not held", s, x)
			}
		}
		if slices.Contains(b[:i], x) {
			t.Fatalf("block %v twice", x)
		}
	}
	if len(have) > 0 && have[q.recent[0].at] && !q.recent[0].at.In(b[0].Start, uint32(b[0].End-b[0].Start)) {
		t.Fatalf("first block %v does not hold the latest segment", b[0])
	}
}

// TestEveryBlockIsReported checks that many ranges that arrived in one burst are all reported in the fewest ACKs that
// can hold them.
func TestEveryBlockIsReported(t *testing.T) {
	var q reassembly
	const blocks, room = 20, 3
	for i := range blocks {
		q.insert(heldSeg{seq: serial.Num(1000 + 200*i), len: 100, buf: Buf(i)}, blocks)
	}
	told := map[SACKBlock]bool{}
	for range (blocks - 2 + room - 3) / (room - 2) {
		var b [room]SACKBlock
		if n := q.blocks(b[:]); n != room {
			t.Fatalf("%d blocks; want %d", n, room)
		}
		if b[0].Start != 1000+200*(blocks-1) || b[1].Start != b[0].Start-200 {
			t.Errorf("%v; want the latest two first", b)
		}
		for _, x := range b {
			told[x] = true
		}
	}
	if len(told) != blocks {
		t.Errorf("%d blocks of %d reported", len(told), blocks)
	}
}

// TestSendqDivide checks that dividing runs keeps bytes, states and the order of transmission.
func TestSendqDivide(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		var q sendq
		q.init()
		first := serial.Num(r.Uint32())
		seq, order := first, r.Uint32()
		var want []seg
		for i := range 40 {
			unit, n := 1+r.IntN(3000), 1+r.IntN(3)*r.IntN(20)
			q.push(seg{seq: seq, buf: Buf(i), len: int32(n * unit), unit: int32(unit), last: true})
			q.runs = q.runs || n > 1
			for k := range n {
				want = append(want, seg{seq: seq.Add(k * unit), buf: Buf(i), off: int32(k * unit), len: int32(unit), unit: int32(unit), last: k == n-1})
			}
			seq = seq.Add(n * unit)
		}
		for i := range 30 { // sent, each of one segment perhaps twice or selectively acknowledged
			p := q.head + uint64(i)
			s := q.at(p)
			order += uint32(s.segs())
			s.state, s.order = inFlight, order
			if q.link(p); !s.run() && r.IntN(3) == 0 {
				q.unlink(p)
				s.state = sacked
			}
		}
		for i := range 30 {
			if s := q.at(q.head + uint64(i)); s.state == inFlight && !s.run() && r.IntN(3) == 0 {
				q.unlink(q.head + uint64(i))
				order++
				s.order = order
				q.link(q.head + uint64(i))
			}
		}
		q.next = q.head + 30
		edge := q.at(q.next).seq
		q.divide()
		if int(q.tail-q.head) != len(want) || q.runs {
			t.Fatalf("seed %d: %d segments, want %d", seed, q.tail-q.head, len(want))
		}
		listed := 0
		for i, w := range want {
			s := *q.at(q.head + uint64(i))
			if s.seq != w.seq || s.buf != w.buf || s.off != w.off || s.len != w.len || s.last != w.last {
				t.Fatalf("seed %d: segment %+v, want %+v", seed, s, w)
			}
			if (s.state == unsent) != (q.head+uint64(i) >= q.next) {
				t.Fatalf("seed %d: segment %d has state %d", seed, i, s.state)
			}
			if s.state == inFlight {
				listed++
			}
		}
		if q.at(q.next).seq != edge {
			t.Fatalf("seed %d: next is %d, want %d", seed, q.at(q.next).seq, edge)
		}
		prev := uint64(noPos)
		for p := q.oldest; p != noPos; p = q.at(p).next {
			if s := q.at(p); s.prev != prev || prev != noPos && int32(s.order-q.at(prev).order) <= 0 {
				t.Fatalf("seed %d: order %d follows %d", seed, s.order, q.at(prev).order)
			}
			prev = p
			listed--
		}
		if listed != 0 || prev != q.newest {
			t.Fatalf("seed %d: %d segments in flight are not in the list", seed, listed)
		}
	}
}

// TestSendqRecut checks that recutting keeps bytes, states and the order of transmission.
func TestSendqRecut(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 2))
		var q sendq
		q.init()
		seq := serial.Num(r.Uint32())
		first := seq
		for i := range 40 {
			n := 1 + r.IntN(3000)
			q.push(seg{seq: seq, buf: Buf(i), len: int32(n), unit: int32(n), last: true})
			seq = seq.Add(n)
		}
		var order []serial.Num
		for _, i := range r.Perm(30) {
			s := q.at(q.head + uint64(i))
			s.state = sacked
			if r.IntN(2) == 0 {
				s.state = inFlight
				q.link(q.head + uint64(i))
				order = append(order, s.seq)
			}
		}
		q.next = q.head + 30
		q.recut(1000)
		at := first
		nextBuf := Buf(0)
		for p := q.head; p != q.tail; p++ {
			s := q.at(p)
			if s.seq != at || s.len < 1 || s.len > 1000 || s.buf != nextBuf {
				t.Fatalf("seed %d: segment %+v, want %d", seed, s, at)
			}
			if (s.state == unsent) != (p >= q.next) {
				t.Fatalf("seed %d: state %d at %d of %d", seed, s.state, p, q.next)
			}
			at = s.end()
			if s.last {
				nextBuf++
			}
		}
		if at != seq || nextBuf != 40 {
			t.Fatalf("seed %d: ends at %d, want %d", seed, at, seq)
		}
		i := 0
		for p := q.oldest; p != noPos; p = q.at(p).next {
			if s := q.at(p); s.off == 0 {
				if s.seq != order[i] {
					t.Fatalf("seed %d: order of transmission is lost", seed)
				}
				i++
			}
		}
		if i != len(order) {
			t.Fatalf("seed %d: %d segments in order of transmission, want %d", seed, i, len(order))
		}
	}
}
