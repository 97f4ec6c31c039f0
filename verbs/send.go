package verbs

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// HandleSends takes up to max work requests from Sends while there is room, checks each, and passes it to the stream. An invalid one becomes
// an error completion, in order, and ends the stream. It returns the number taken.
func (q *QP) HandleSends(max int) int {
	if q.cfg.Sends == nil {
		return 0
	}
	n := 0
	q.drain()
	for n < max && q.State() == StateRTS && q.releaseHeld() && int(q.sqTail-q.sqHead) < len(q.sq) {
		if !q.cfg.Sends.NextSend(&q.wr) {
			break
		}
		n++
		q.post(&q.wr)
	}
	if n > 0 && q.taken != nil {
		q.taken.Taken()
	}
	q.fetchSends(noSlot)
	return n
}

// post puts wr in the next slot. Local operations and invalid work requests take effect when all earlier ones are complete; the slot is
// held until then.
func (q *QP) post(wr *SendWR) {
	q.stats.Sends++
	i := q.sqTail & uint32(len(q.sq)-1)
	s := &q.sq[i]
	*s = sendSlot{slot: slot{id: wr.ID}, signal: q.cfg.SigAll || wr.Flags&Signaled != 0, inline: -1}
	q.sqTail++

	var w rdmap.WR
	w.ID = i
	s.status = q.compile(wr, i, s, &w)
	if s.status != WCSuccess || wr.Op >= OpLocalInv {
		q.held, q.heldFor = true, q.sqHead
		q.releaseHeld()
		return
	}
	if !q.stream.PostSend(&w) {
		// The stream has ended, so its flush will not include this request.
		s.finish(WCFlushErr)
	}
}

// releaseHeld executes the held local operation, or fails the stream for the held invalid work request, once it is the oldest. It reports
// whether nothing is held.
func (q *QP) releaseHeld() bool {
	if !q.held {
		return true
	}
	for ; q.heldFor != q.sqTail-1; q.heldFor++ {
		if !q.sendSlot(q.heldFor).complete() {
			return false
		}
	}
	q.held = false
	s := q.sendSlot(q.sqTail - 1)
	if s.status == WCSuccess {
		s.status = q.local(&q.wr)
	}
	if q.wr.Op == OpLocalInv {
		s.stores = q.stores // until then the memory may still be written
		s.turns = q.mark(q.wr.Inv)
	}
	s.done = true
	if s.status != WCSuccess {
		q.stream.Fail(term.ErrRDMAPLocal)
		return false
	}
	return true
}

// local executes a local operation. q.wr is still the held one, because nothing is pulled while a request is held.
func (q *QP) local(wr *SendWR) WCStatus {
	t, pd := q.cfg.Table, q.cfg.PD
	switch wr.Op {
	case OpLocalInv:
		if !t.localInv(pd, wr.Inv) {
			return WCLocAccessErr
		}
	case OpReg:
		if !t.fastReg(pd, wr.RKey, wr.Remote, wr.SGEs[0].Addr, wr.SGEs[0].Len, wr.Access) {
			return WCMWBindErr
		}
	case OpBindMW:
		g := &wr.SGEs[0]
		if !t.bind(pd, q.cfg.Num, wr.RKey, g.LKey, g.Addr, g.Len, wr.Access) {
			return WCMWBindErr
		}
	}
	return WCSuccess
}

// compile checks wr, copies what the slot needs and builds the stream's work request.
func (q *QP) compile(wr *SendWR, i uint32, s *sendSlot, w *rdmap.WR) WCStatus {
	op := wr.Op
	if wr.Flags&Solicited != 0 {
		switch op {
		case rdmap.OpSend:
			op = rdmap.OpSendSE
		case rdmap.OpSendInv:
			op = rdmap.OpSendSEInv
		case rdmap.OpImm:
			op = rdmap.OpImmSE
		}
	}
	w.Op = op
	w.Fence = wr.Flags&Fence != 0
	w.STag, w.TO = wr.RKey, wr.Remote

	var known bool
	if s.op, known = sendOp(op); !known {
		return WCLocQPOpErr
	}
	if len(wr.SGEs) > q.cfg.MaxSGE || len(wr.Inline) > q.cfg.MaxInline {
		return WCLocQPOpErr
	}
	inline := wr.Flags&Inline != 0
	use := useLocalRead
	outgoing := true // the payload goes out
	switch op {
	case rdmap.OpWrite, rdmap.OpSend, rdmap.OpSendSE:
	case rdmap.OpSendInv, rdmap.OpSendSEInv:
		w.Inv = wr.Inv
	case rdmap.OpRead:
		if inline || len(wr.SGEs) > 1 {
			return WCLocQPOpErr
		}
		use, outgoing = useReadSink, false
	case rdmap.OpFetchAdd, rdmap.OpCmpSwap:
		if inline || len(wr.SGEs) != 1 {
			return WCLocQPOpErr
		}
		if wr.SGEs[0].Len != atomicLen {
			return WCLocLenErr
		}
		use, outgoing = useLocalWrite, false
		w.Add, w.Cmp = wr.CompareAdd, wr.CompareAdd
		w.Swap, w.CmpMask, w.SwapMask = wr.Swap, wr.CompareMask, wr.SwapMask
		w.AddMask = wr.SwapMask
	case rdmap.OpImm, rdmap.OpImmSE:
		if inline || len(wr.SGEs) != 0 {
			return WCLocQPOpErr
		}
		binary.BigEndian.PutUint64(w.Imm[:], wr.Imm)
	case OpReg, OpBindMW:
		if inline || len(wr.SGEs) != 1 {
			return WCLocQPOpErr
		}
		return WCSuccess // the SGE is checked when the bind is executed
	case OpLocalInv:
		if inline || len(wr.SGEs) != 0 {
			return WCLocQPOpErr
		}
		return WCSuccess
	}

	if inline {
		return q.keepInline(wr, i, s, w)
	}
	return q.keepSGEs(wr, i, s, w, use, outgoing)
}

// keepInline finishes compile for a payload in the work request.
func (q *QP) keepInline(wr *SendWR, i uint32, s *sendSlot, w *rdmap.WR) WCStatus {
	if len(wr.SGEs) != 0 {
		return WCLocQPOpErr
	}
	s.inline = copy(q.inline[int(i)*q.cfg.MaxInline:], wr.Inline)
	s.length, s.need = uint32(s.inline), uint32(s.inline)
	w.Len = s.length
	if w.Op == rdmap.OpWrite && wr.Remote+uint64(w.Len) < wr.Remote {
		return WCLocQPOpErr
	}
	return WCSuccess
}

// keepSGEs finishes compile for a payload in client memory. outgoing reports whether the payload is sent.
func (q *QP) keepSGEs(wr *SendWR, i uint32, s *sendSlot, w *rdmap.WR, use purpose, outgoing bool) WCStatus {
	op := w.Op
	s.nsge = copy(q.sges[int(i)*q.cfg.MaxSGE:], wr.SGEs)
	total := uint64(0)
	for k := range wr.SGEs {
		g := &wr.SGEs[k]
		total += uint64(g.Len)
		if g.Len == 0 {
			continue
		}
		m, _ := q.check(g.LKey, g.Addr, g.Len, use)
		if !m.granted() {
			return WCLocProtErr
		}
		s.far = s.far || m.far != nil && outgoing
	}
	if total > MaxMsg {
		return WCLocLenErr
	}
	s.length = uint32(total)
	if outgoing {
		s.need = s.length
	}
	s.fence = wr.Flags&Fence != 0
	if s.far && !q.farSends.any {
		q.farSends.any, q.farSends.at = true, q.sqTail-1
	}
	w.Len = s.length
	if op == rdmap.OpRead && s.nsge == 1 {
		w.SinkSTag, w.SinkTO = wr.SGEs[0].LKey, wr.SGEs[0].Addr
	}
	// Reject what the stream would reject, so that it fails like any other invalid request: a remote tagged offset that wraps, or a request
	// that needs a response on a stream with ORD 0.
	if (op == rdmap.OpWrite || op.HasResponse()) && wr.Remote+total < wr.Remote {
		return WCLocQPOpErr
	}
	if op.HasResponse() && q.ord == 0 {
		return WCLocQPOpErr
	}
	return WCSuccess
}

// sendOp returns the completion opcode of an operation, or false if it does not belong to the send queue.
func sendOp(op rdmap.Op) (WCOp, bool) {
	switch op {
	case rdmap.OpSend, rdmap.OpSendSE, rdmap.OpSendInv, rdmap.OpSendSEInv:
		return WCSend, true
	case rdmap.OpWrite:
		return WCWrite, true
	case rdmap.OpRead:
		return WCRead, true
	case rdmap.OpFetchAdd:
		return WCFetchAdd, true
	case rdmap.OpCmpSwap:
		return WCCmpSwap, true
	case rdmap.OpImm, rdmap.OpImmSE:
		return WCImm, true
	case OpLocalInv:
		return WCLocalInv, true
	case OpReg:
		return WCReg, true
	case OpBindMW:
		return WCBindMW, true
	}
	return WCSend, false
}

// Gather appends to dst the slices of memory that hold the n bytes of a segment's payload. It returns false if the memory is gone or may no
// longer be read: it has then failed the stream, and the segment must not be sent. It also returns false if Awaits; the caller gathers the
// same segment again when the FarQueue has moved something.
func (q *QP) Gather(src *rdmap.Source, n int, dst [][]byte) ([][]byte, bool) {
	q.awaits = false
	if n == 0 {
		return dst, true
	}
	e := term.ErrRDMAPLocal
	switch src.Kind {
	case rdmap.SourceWR:
		if b, ok := q.gatherWR(src.WR, src.Off, n, dst); ok {
			s := q.sendSlot(src.WR)
			s.gathered = max(s.gathered, uint32(src.Off)+uint32(n))
			return b, true
		}
		if q.awaits {
			return dst, false
		}
		// The stream has already completed a work request whose last segment this is.
		if s := q.sendSlot(src.WR); !s.complete() {
			s.finish(WCLocProtErr)
		}
	case rdmap.SourceTagged:
		m, f := q.check(src.STag, src.Off, uint32(n), useReadSource)
		switch {
		case m.b != nil:
			return append(dst, m.b), true
		case m.far != nil:
			if b, ok := q.gatherResponse(src, m.state, n, q.stream.Left(), dst); ok || q.awaits {
				return b, ok
			}
		default:
			q.stats.ProtectionErrors++
			e = remoteFaults[f]
		}
	}
	q.stream.SourceError(&rdmap.Segment{Src: *src, Len: n}, e)
	return dst, false
}

// Gatherable returns how many of n bytes from src on Gather can return at once: all of them, unless they come from far memory.
func (q *QP) Gatherable(src *rdmap.Source, n int) int {
	if src.Kind == rdmap.SourceWR {
		if q.sendSlot(src.WR).far {
			return q.farSends.arrived(n)
		}
	} else if r := q.cfg.Table.at(src.STag); r != nil && r.inFar() {
		if !q.farResponse.follows(src, r.state.Load()) {
			return 0
		}
		return q.farResponse.arrived(n)
	}
	return n
}

// Awaits reports whether the last Gather returned nothing because far memory is being fetched.
func (q *QP) Awaits() bool { return q.awaits }

func (q *QP) gatherWR(slot uint32, off uint64, n int, dst [][]byte) ([][]byte, bool) {
	slot &= uint32(len(q.sq) - 1)
	s := &q.sq[slot]
	if off+uint64(n) > uint64(s.length) {
		return nil, false
	}
	if s.inline >= 0 {
		b := q.inline[int(slot)*q.cfg.MaxInline:]
		return append(dst, b[off:off+uint64(n)]), true
	}
	sges := q.sges[int(slot)*q.cfg.MaxSGE:][:s.nsge]
	ok := true
	if s.far {
		q.farSends.release()
		q.fetchSends(slot)
		if !q.ready(&q.farSends.fetches, q.farBytes(sges, off, n)) {
			return nil, false
		}
	}
	for k := range sges {
		g := &sges[k]
		if off >= uint64(g.Len) {
			off -= uint64(g.Len)
			continue
		}
		piece := min(uint32(n), g.Len-uint32(off))
		m, _ := q.check(g.LKey, g.Addr+off, piece, useLocalRead)
		switch {
		case m.far != nil:
			if dst, ok = q.farSends.take(int(piece), dst); !ok {
				return nil, false
			}
		case m.b != nil:
			dst = append(dst, m.b)
		default:
			return nil, false
		}
		if n -= int(piece); n == 0 {
			break
		}
		off = 0
	}
	return dst, true
}
