package verbs

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// This file implements rdmap.Memory, the client memory as the stream sees it. The stream calls it from within its own methods.

var _ rdmap.Memory = (*QP)(nil)

// Recv implements rdmap.Memory. Receives are used in the order of message numbers, whatever the
// order of arrival: Recv takes all up to msn. Another call with the same msn returns the same
// receive.
func (q *QP) Recv(msn serial.Num) (id, size uint32, ok bool) {
	if q.state != StateRTS {
		return 0, 0, false
	}
	if q.stats.Recvs == 0 && msn == firstMSN+1 {
		// The first message was an RTR, which uses no receive (RFC 6581 section 9.2).
		q.rqHead, q.rqTail = msn, msn
	}
	if n := msn.Sub(q.rqHead); n < 0 || n >= len(q.rq) {
		return 0, 0, false
	}
	for q.rqTail.LessEq(msn) {
		if !q.takeRecv() {
			return 0, 0, false
		}
	}
	return uint32(msn) & uint32(len(q.rq)-1), q.recvSlot(msn).size, true
}

// takeRecv stores the next posted receive in the slot of rqTail.
func (q *QP) takeRecv() bool {
	if !q.nextRecv(&q.rwr) {
		return false
	}
	q.stats.Recvs++
	wr := &q.rwr
	i := uint32(q.rqTail) & uint32(len(q.rq)-1)
	s := &q.rq[i]
	*s = recvSlot{slot: slot{id: wr.ID}}
	q.rqTail++
	if wr.Bad || len(wr.SGEs) > q.cfg.MaxSGE {
		s.status = WCLocQPOpErr
		return true
	}
	s.nsge = copy(q.rsges[int(i)*q.cfg.MaxSGE:], wr.SGEs)
	total := uint64(0)
	for k := range wr.SGEs {
		total += uint64(wr.SGEs[k].Len)
	}
	// A receive may be larger than any message.
	s.size = uint32(min(total, 1<<32-1))
	return true
}

func (q *QP) nextRecv(wr *RecvWR) bool {
	wr.Bad = false
	return q.cfg.Recvs != nil && q.cfg.Recvs.NextRecv(wr)
}

// Place implements rdmap.Memory.
func (q *QP) Place(p *rdmap.Placement, payload marked.Bytes) *term.Error {
	n := uint32(payload.Len())
	if n == 0 {
		return nil
	}
	q.stats.BytesPlaced += uint64(n)
	switch p.Kind {
	case rdmap.PlaceTagged:
		use := useWriteSink
		if p.Op != rdmap.OpWrite {
			use = useReadSink
		}
		m, f := q.check(p.STag, p.TO, n, use)
		if !m.granted() {
			q.stats.ProtectionErrors++
			return taggedFaults[f]
		}
		q.put(&m, n, payload)
	case rdmap.PlaceRecv:
		return q.placeRecv(p.Recv, p.Off, payload, n)
	}
	return nil
}

// placeRecv places a payload of n bytes.
func (q *QP) placeRecv(slot, off uint32, payload marked.Bytes, n uint32) *term.Error {
	slot &= uint32(len(q.rq) - 1)
	s := &q.rq[slot]
	if s.status != WCSuccess {
		return term.ErrDDPLocal
	}
	sges := q.rsges[int(slot)*q.cfg.MaxSGE:][:s.nsge]
	for k := range sges {
		g := &sges[k]
		if off >= g.Len {
			off -= g.Len
			continue
		}
		piece := min(n, g.Len-off)
		m, _ := q.check(g.LKey, g.Addr+uint64(off), piece, useLocalWrite)
		if !m.granted() {
			s.status = WCLocProtErr
			return term.ErrDDPLocal
		}
		q.put(&m, piece, payload)
		if n -= piece; n == 0 {
			return nil
		}
		payload, off = payload.After(int(piece)), 0
	}
	s.status = WCLocLenErr
	return term.ErrTooLong
}

// CheckRead implements rdmap.Memory: a zero-length Read is not checked (RFC
// 5040 section 5.2.1).
func (q *QP) CheckRead(stag uint32, to uint64, n uint32) *term.Error {
	if n == 0 {
		return nil
	}
	if m, f := q.check(stag, to, n, useReadSource); !m.granted() {
		q.stats.ProtectionErrors++
		return remoteFaults[f]
	}
	return nil
}

// Atomic implements rdmap.Memory. Operations of all workers are atomic with respect to each other, not to the client's own instructions
// (IBV_ATOMIC_HCA). The word has the machine's byte order (RFC 7306 section 5.1).
func (q *QP) Atomic(stag uint32, to uint64, a *rdmap.AtomicOp) (old uint64, err *term.Error) {
	t := q.cfg.Table
	m, f := q.check(stag, to, atomicLen, useAtomic)
	if m.far != nil {
		f = faultAccess // by a window
	}
	if m.b == nil {
		q.stats.ProtectionErrors++
		return 0, remoteFaults[f]
	}
	if !t.aligned(stag, to) {
		return 0, term.ErrStream // RFC 7306 section 8.2
	}
	return t.apply(m.b, a), nil
}

// apply performs a on the word b. Touching b may fault, which the worker recovers from as a panic; the lock is released in that case too.
func (t *Table) apply(b []byte, a *rdmap.AtomicOp) (old uint64) {
	t.atomics.Lock()
	defer t.atomics.Unlock()
	old = binary.NativeEndian.Uint64(b)
	binary.NativeEndian.PutUint64(b, a.Apply(old))
	return old
}

// aligned reports whether the byte at to has an address that is a multiple of eight. Both sides map memory at page boundaries, so the
// offset decides.
func (t *Table) aligned(stag uint32, to uint64) bool {
	r := t.at(stag)
	if r == nil {
		return false
	}
	var v view
	return r.read(stag, &v) && (v.off+(to-v.base))%atomicLen == 0
}

// Invalidate implements rdmap.Memory (RFC 5040 section 5.3).
func (q *QP) Invalidate(stag uint32) *term.Error {
	if q.ignoreInv.Load() {
		return nil
	}
	if !q.cfg.Table.remoteInv(q.cfg.PD, q.cfg.Num, stag) {
		q.stats.ProtectionErrors++
		return term.ErrOpInvalidate
	}
	if m := q.mark(stag); m != 0 {
		q.turnsMark = m
	}
	return nil
}

// mark returns the mark for the accesses of other QPs by stag, which was invalidated, or 0.
func (q *QP) mark(stag uint32) uint64 {
	if q.turns == nil || !q.cfg.Table.others(q.cfg.Num, stag) {
		return 0
	}
	return q.turns.Mark()
}

// AtomicResult implements rdmap.Memory: the old value goes to the SGE of the
// work request.
func (q *QP) AtomicResult(wr uint32, old uint64) {
	i := wr & uint32(len(q.sq)-1)
	s := &q.sq[i]
	if s.nsge != 1 {
		return
	}
	g := &q.sges[int(i)*q.cfg.MaxSGE]
	m, _ := q.check(g.LKey, g.Addr, atomicLen, useLocalWrite)
	if !m.granted() {
		s.status = WCLocProtErr
		return
	}
	binary.NativeEndian.PutUint64(q.word[:], old)
	q.put(&m, atomicLen, marked.Bytes{B: q.word[:]})
}
