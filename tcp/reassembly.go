package tcp

import (
	"slices"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// heldSeg is a range of out-of-order bytes. Buf is NoBuf once the owner has placed them.
type heldSeg struct {
	seq serial.Num
	len int32
	off int32
	buf Buf
}

func (h *heldSeg) end() serial.Num { return h.seq + serial.Num(h.len) }

// reassembly holds out-of-order segments, sorted by sequence number. They may overlap, but none lies within another, so that their ends are
// sorted too.
type reassembly struct {
	s      []heldSeg
	recent [2]heldSpan // the range that grew last, and the one before it (RFC 2018 section 4)
	turn   serial.Num  // start of the block that was last reported in rotation
	out    ring[Held]
}

// heldSpan is a contiguous range received in pieces; at is the start of the last piece.
type heldSpan struct {
	SACKBlock
	at serial.Num
}

// note records n as the range received last.
func (r *reassembly) note(n *heldSeg) {
	if l := &r.recent[0]; n.seq.LessEq(l.End) && l.Start.LessEq(n.end()) {
		l.Start, l.End, l.at = serial.Min(l.Start, n.seq), serial.Max(l.End, n.end()), n.seq
		return
	}
	r.recent[1] = r.recent[0]
	r.recent[0] = heldSpan{SACKBlock{n.seq, n.end()}, n.seq}
}

// insert adds the range n, or only a part of it, and returns what it added. It reports false if nothing of n is new or max ranges are
// already held.
func (r *reassembly) insert(n heldSeg, max int) (heldSeg, bool) {
	i := len(r.s) // insertion point: after the last range that starts before n
	for i > 0 && n.seq.Less(r.s[i-1].seq) {
		i--
	}
	// Ranges that start at or before n may cover it, alone or together with the ranges after them.
	if i > 0 {
		covered := r.s[i-1].end()
		for j := i; j < len(r.s) && covered.Less(n.end()) && r.s[j].seq.LessEq(covered); j++ {
			covered = serial.Max(covered, r.s[j].end())
		}
		if n.end().LessEq(covered) {
			return n, false
		}
		if r.s[i-1].seq == n.seq {
			i--
		}
	}
	// Ranges within n are replaced by it. A placed range is kept: n ends before it or starts after it.
	j := i
	for j < len(r.s) && r.s[j].end().LessEq(n.end()) {
		if h := r.s[j]; h.buf == NoBuf {
			if n.seq.Less(h.seq) {
				before := n
				before.len = int32(h.seq.Sub(n.seq))
				if before, ok := r.insert(before, max); ok {
					return before, true
				}
			}
			d := int32(h.end().Sub(n.seq))
			n.seq, n.off, n.len = h.end(), n.off+d, n.len-d
			if n.len == 0 {
				return n, false
			}
			return r.insert(n, max)
		}
		j++
	}
	if j == i && len(r.s) >= max {
		return n, false
	}
	r.giveBack(r.s[i:j])
	if j > i {
		r.s[i] = n
		r.s = append(r.s[:i+1], r.s[j:]...)
	} else {
		r.s = append(r.s, heldSeg{})
		copy(r.s[i+1:], r.s[i:])
		r.s[i] = n
	}
	r.note(&n)
	return n, true
}

// has reports whether the range [seq,seq+n) is held.
func (r *reassembly) has(seq serial.Num, n int) bool {
	end := seq.Add(n)
	for i := range r.s {
		if end.LessEq(seq) || seq.Less(r.s[i].seq) {
			break
		}
		seq = serial.Max(seq, r.s[i].end())
	}
	return end.LessEq(seq)
}

// placed records that the bytes of buf need not be kept.
func (r *reassembly) placed(buf Buf) {
	for i := len(r.s) - 1; i >= 0; i-- {
		if r.s[i].buf != buf {
			continue
		}
		r.s[i].buf, r.s[i].off = NoBuf, 0
		// Merge adjacent placed ranges.
		if i+1 < len(r.s) && r.s[i+1].buf == NoBuf && r.s[i+1].seq.LessEq(r.s[i].end()) {
			r.s[i].len = int32(r.s[i+1].end().Sub(r.s[i].seq))
			r.s = append(r.s[:i+1], r.s[i+2:]...)
		}
		if i > 0 && r.s[i-1].buf == NoBuf && r.s[i].seq.LessEq(r.s[i-1].end()) {
			r.s[i-1].len = int32(r.s[i].end().Sub(r.s[i-1].seq))
			r.s = append(r.s[:i], r.s[i+1:]...)
		}
		return
	}
}

// advance moves every range that is contiguous with next, the in-order point, to the output and returns the new in-order point.
func (r *reassembly) advance(next serial.Num) serial.Num {
	n := 0
	for n < len(r.s) && r.s[n].seq.LessEq(next) {
		h := &r.s[n]
		n++
		skip := next.Sub(h.seq)
		if skip >= int(h.len) {
			r.giveBack(r.s[n-1 : n])
			continue
		}
		r.out.push(Held{Buf: h.buf, Seq: next, Off: int(h.off) + skip, Len: int(h.len) - skip, Deliver: true})
		next = h.end()
	}
	if n > 0 {
		r.s = r.s[:copy(r.s, r.s[n:])]
	}
	return next
}

// reclaim returns up to n held segments that are not placed to the owner, starting with the highest sequence number.
func (r *reassembly) reclaim(n int) {
	i := len(r.s)
	for i > 0 && n > 0 {
		i--
		if r.s[i].buf != NoBuf {
			n--
		}
	}
	r.giveBack(r.s[i:])
	placed := slices.DeleteFunc(r.s[i:], func(h heldSeg) bool { return h.buf != NoBuf })
	r.s = r.s[:i+len(placed)]
}

// drop returns every held segment to the owner, undelivered.
func (r *reassembly) drop() {
	r.giveBack(r.s)
	r.s = r.s[:0]
}

// giveBack returns to the owner, undelivered, those of the ranges hs that it has not placed.
func (r *reassembly) giveBack(hs []heldSeg) {
	for _, h := range hs {
		if h.buf != NoBuf {
			r.out.push(Held{Buf: h.buf, Seq: h.seq, Off: int(h.off)})
		}
	}
}

// blocks fills b with SACK blocks and returns their number: first those that grew most recently (RFC 2018 section 4), then the others in
// rotation from one ACK to the next, so that all are reported however many there are.
func (r *reassembly) blocks(b []SACKBlock) int {
	if len(r.s) == 0 || len(b) == 0 {
		return 0
	}
	var recent [len(r.recent)]SACKBlock
	var first, next [maxSACK + len(recent)]SACKBlock // the first blocks of all, and the first after turn
	nf, nn := 0, 0
	for i := 0; i < len(r.s); {
		blk := SACKBlock{r.s[i].seq, r.s[i].end()}
		for i++; i < len(r.s) && r.s[i].seq.LessEq(blk.End); i++ {
			blk.End = serial.Max(blk.End, r.s[i].end())
		}
		for k := range recent {
			if r.recent[k].at.In(blk.Start, uint32(blk.End-blk.Start)) {
				recent[k] = blk
			}
		}
		if nf < len(first) {
			first[nf] = blk
			nf++
		}
		if nn < len(next) && r.turn.Less(blk.Start) {
			next[nn] = blk
			nn++
		}
	}
	n := 0
	add := func(blk SACKBlock) bool {
		if n == len(b) || blk.Start == blk.End || slices.Contains(b[:n], blk) {
			return false
		}
		b[n] = blk
		n++
		return true
	}
	for _, blk := range recent {
		add(blk)
	}
	for _, blk := range next[:nn] {
		if add(blk) {
			r.turn = blk.Start
		}
	}
	for _, blk := range first[:nf] {
		if add(blk) {
			r.turn = blk.Start
		}
	}
	return n
}
