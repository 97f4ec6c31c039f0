package verbs

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// drain moves the stream's completions to their slots.
func (q *QP) drain() {
	if !q.inited {
		return
	}
	if q.cfg.Far != nil {
		q.farSends.release()
		q.farResponse.release()
		if !q.storeFailed && q.state != StateError && !q.storedOK(q.stores) {
			q.storeFailed = true
			q.stream.Fail(term.ErrRDMAPLocal)
		}
	}
	for q.stream.PollCompletion(&q.comp) {
		c := &q.comp
		st := wcStatus(c.Status)
		if c.Kind == rdmap.CompSend {
			s := &q.sq[c.ID&uint32(len(q.sq)-1)]
			s.finish(st)
			st = s.status
			if c.Op.HasResponse() || st == WCFlushErr {
				s.stores = q.stores
			}
		} else {
			s := &q.rq[c.ID&uint32(len(q.rq)-1)]
			s.finish(st)
			st = s.status
			s.stores = q.stores
			s.length, s.solicited = c.Len, c.Solicited
			switch c.Op {
			case rdmap.OpImm, rdmap.OpImmSE:
				s.withImm = true
				s.imm = binary.BigEndian.Uint64(c.Imm[:])
			case rdmap.OpSendInv, rdmap.OpSendSEInv:
				s.withInv = true
				s.turns = q.turnsMark
				s.inv = c.InvSTag
			}
		}
		// An error that did not end the stream ends it now: a wrong receive that placed no bytes, or an atomic whose result could not be
		// stored.
		if st != WCSuccess && (c.Status == rdmap.StatusOK || c.Status == rdmap.StatusBadWR) {
			q.stream.Fail(term.ErrRDMAPLocal)
		}
	}
}

func wcStatus(s rdmap.Status) WCStatus {
	switch s {
	case rdmap.StatusOK:
		return WCSuccess
	case rdmap.StatusFlushed:
		return WCFlushErr
	case rdmap.StatusBadWR:
		return WCLocQPOpErr
	case rdmap.StatusLocalProtection:
		return WCLocProtErr
	case rdmap.StatusRemoteAccess:
		return WCRemAccessErr
	case rdmap.StatusRemoteOp:
		return WCRemOpErr
	case rdmap.StatusTooLong:
		return WCLocLenErr
	}
	return WCGeneralErr
}

// PollWC returns the next completion of either queue; WC.IsRecv tells which CQ it belongs to. Send completions are in the order posted;
// unsignalled requests produce none unless they fail. In ERROR, PollWC also takes and flushes what is still posted, so call it after each
// doorbell then too.
//
// One drain loop returns at most a queue's worth of flushed requests, so a client that keeps posting cannot stall the worker. After PollWC
// has returned false the next loop starts again.
func (q *QP) PollWC(wc *WC) bool {
	if q.pollWC(wc) {
		return true
	}
	q.flushes = 0
	return false
}

func (q *QP) pollWC(wc *WC) bool {
	q.invalidates = false
	q.drain()
	if q.state != StateError {
		q.releaseHeld()
	}
	if q.rqHead != q.rqTail {
		if s := q.recvSlot(q.rqHead); s.done && q.settles(&s.slot) {
			q.rqHead++
			q.recvWC(wc, s)
			return true
		}
	}
	for q.sqHead != q.sqTail {
		s := q.sendSlot(q.sqHead)
		if !s.complete() || !q.settles(&s.slot) {
			break
		}
		q.sqHead++
		if s.signal || s.status != WCSuccess {
			q.sendWC(wc, s)
			return true
		}
	}
	if q.flushes == len(q.sq)+len(q.rq) {
		return false
	}
	q.flushes++
	return q.state == StateError && (q.flushSend(wc) || q.flushRecv(wc))
}

// settles reports whether no other worker makes accesses any more that began before the mark of s, and what s has
// waited for in far memory is there. It fails s if that could not be stored.
func (q *QP) settles(s *slot) bool {
	if s.turns != 0 {
		if !q.turns.Passed(s.turns) {
			q.invalidates = true
			return false
		}
		s.turns = 0
		if q.cfg.Far != nil && q.cfg.Far.Barrier() {
			q.stores++
			s.stores = q.stores
		}
	}
	if !q.stored(s.stores) {
		return false
	}
	if !q.storedOK(s.stores) {
		s.finish(WCLocProtErr)
	}
	return true
}

func (q *QP) sendWC(wc *WC, s *sendSlot) {
	*wc = WC{ID: s.id, Status: s.status, Op: s.op, QP: q.cfg.Num}
	if s.status == WCSuccess && (s.op == WCRead || s.op == WCCmpSwap || s.op == WCFetchAdd) {
		wc.Len = s.length
	}
	q.count(wc)
}

func (q *QP) recvWC(wc *WC, s *recvSlot) {
	*wc = WC{ID: s.id, Status: s.status, Op: WCRecv, QP: q.cfg.Num, Len: s.length, Imm: s.imm, InvKey: s.inv}
	if s.solicited {
		wc.Flags |= WCSolicited
	}
	if s.withImm {
		wc.Flags |= WCWithImm
	}
	if s.withInv {
		wc.Flags |= WCWithInv
	}
	q.count(wc)
}

func (q *QP) count(wc *WC) {
	q.stats.Completions++
	switch wc.Status {
	case WCSuccess:
	case WCFlushErr:
		q.stats.Flushed++
	default:
		q.stats.LocalErrors++
	}
	if wc.Status == WCSuccess {
		return
	}
	if e := q.stream.Err(); e != nil {
		wc.Vendor = vendor(e, false)
	} else {
		wc.Vendor = vendor(q.stream.Remote(), true)
	}
}

// flushSend takes and flushes another posted work request.
func (q *QP) flushSend(wc *WC) bool {
	if q.sqHead != q.sqTail || q.cfg.Sends == nil || !q.cfg.Sends.NextSend(&q.wr) {
		return false
	}
	op, _ := sendOp(q.wr.Op)
	*wc = WC{ID: q.wr.ID, Status: WCFlushErr, Op: op, QP: q.cfg.Num}
	q.count(wc)
	return true
}

// flushRecv takes and flushes another receive of the QP's own queue. Those of a shared one are
// left for other QPs.
func (q *QP) flushRecv(wc *WC) bool {
	if q.rqHead != q.rqTail || q.cfg.Shared || !q.nextRecv(&q.rwr) {
		return false
	}
	*wc = WC{ID: q.rwr.ID, Status: WCFlushErr, Op: WCRecv, QP: q.cfg.Num}
	q.count(wc)
	return true
}
