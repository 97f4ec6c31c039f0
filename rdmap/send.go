package rdmap

import (
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// maxBalance limits, in bytes, how long one side may send to compensate for a large message of the other side.
const maxBalance = 16 << 20

// PollFilling builds the next segment, of at most mulpdu bytes, and returns false when there is nothing to send now. mulpdu must be at
// least ddp.MinMULPDU and may change from call to call. A message that does not fit in a segment of mulpdu bytes begins with one of at most
// room bytes, between ddp.MinMULPDU and mulpdu. Other messages are not cut, and may be longer than room.
//
// Responses and the send queue alternate message by message, balanced by bytes while both have something to send. Messages are never
// interleaved: DDP transmits them one after the other (RFC 5041 section 5.3), and some peers end the stream otherwise.
func (s *Stream) PollFilling(room, mulpdu int, seg *Segment) bool {
	if s.state != stateOpen || s.flushed {
		return s.state == stateFailing && s.pollTerminate(seg)
	}
	if mulpdu < ddp.MinMULPDU {
		return false
	}
	if s.rtr != 0 {
		s.pollRTR(seg)
		return s.sent(seg)
	}
	if !s.seg.Active() {
		if s.sending = s.pick(); s.sending == turnNone {
			return false
		}
		var whole bool
		if s.sending == turnSend {
			whole = s.startSend(seg)
		} else {
			if whole = s.startResponse(seg); s.state != stateOpen {
				return s.pollTerminate(seg)
			}
		}
		if whole {
			return s.sent(seg)
		}
	}
	if s.Left() > mulpdu {
		mulpdu = room
	}
	s.nextSegment(mulpdu, seg)
	return s.sent(seg)
}

// Extend returns how many segments follow seg, the last segment built, in its message, with as much payload, up to most. The final segment
// is not one of them. They count as built; ddp.Advance makes their headers, and their payload follows that of seg.
func (s *Stream) Extend(seg *Segment, most int) int {
	if s.state != stateOpen || s.flushed || seg.Len == 0 || !s.seg.Active() {
		return 0
	}
	n := s.seg.More(seg.Len, most)
	s.seg.Skip(n * seg.Len)
	s.count(n, n*(seg.HdrLen+seg.Len))
	return n
}

// Left returns how many bytes of the current message are not yet in a segment.
func (s *Stream) Left() int {
	if !s.seg.Active() {
		return 0
	}
	return int(s.seg.Left())
}

// sent counts a segment.
func (s *Stream) sent(seg *Segment) bool {
	s.count(1, seg.HdrLen+seg.Len)
	return true
}

// count counts segments of the current message, of n bytes together.
func (s *Stream) count(segments, n int) {
	s.stats.TxSegments += uint64(segments)
	s.stats.TxBytes += uint64(n)
	if s.contended {
		if s.sending == turnResponse {
			s.balance += n
		} else {
			s.balance -= n
		}
		s.balance = min(max(s.balance, -maxBalance), maxBalance)
	}
}

// pick chooses the side whose message is next. Only bytes sent while the other side waits count.
func (s *Stream) pick() turn {
	send, resp := s.sendReady(), s.respHead != s.respTail
	if s.contended = send && resp; !s.contended {
		s.balance = 0
	}
	switch {
	case resp && (!send || s.balance <= 0):
		return turnResponse
	case send:
		return turnSend
	}
	return turnNone
}

// sendReady advances next past work requests that completed when they were posted and reports whether the one there may be sent now.
func (s *Stream) sendReady() bool {
	for ; s.next != s.tail; s.next++ {
		slot := s.slot(s.next)
		if slot.state == wrDone {
			continue
		}
		out := int(s.pendTail - s.pendHead)
		if slot.wr.Fence && out > 0 {
			return false
		}
		return !slot.wr.Op.HasResponse() || out < s.ord
	}
	return false
}

// startSend starts the message of the work request at next. It returns true if the whole message is already in seg.
func (s *Stream) startSend(seg *Segment) bool {
	slot := s.slot(s.next)
	wr := &slot.wr
	switch {
	case wr.Op == OpWrite:
		s.stats.TxWrites++
		s.seg.StartTagged(control(opcodeWrite), wr.STag, wr.TO, wr.Len)
		return false
	case wr.Op.isSend():
		s.stats.TxSends++
		var inv uint32
		if wr.Op == OpSendInv || wr.Op == OpSendSEInv {
			inv = wr.Inv
		}
		s.seg.StartUntagged(control(sendOpcodes[wr.Op]), inv, ddp.QNSend, s.nextMSN(ddp.QNSend), wr.Len)
		return false
	case wr.Op == OpRead:
		s.stats.TxReadRequests++
		p := pending{slot: s.next, stag: wr.SinkSTag, to: wr.SinkTO, length: wr.Len}
		s.composeRead(seg, &p, wr.STag, wr.TO)
		slot.state = wrWaiting
	case wr.Op.IsAtomic():
		s.stats.TxAtomics++
		s.composeAtomic(seg, wr)
		slot.state = wrWaiting
	default:
		s.stats.TxImms++
		hdr := s.untagged(seg, sendOpcodes[wr.Op], ddp.QNSend)
		seg.finish(append(hdr, wr.Imm[:]...))
		s.finish(slot, StatusOK)
	}
	s.next++
	return true
}

// startResponse starts the oldest response. It returns true if the whole message is already in seg. An atomic is performed now, so that
// Reads and atomics take effect in the order of the peer's requests; it may fail the stream.
func (s *Stream) startResponse(seg *Segment) bool {
	r := s.resp(s.respHead)
	if !r.atomic {
		s.stats.TxReadResponses++
		s.seg.StartTagged(control(opcodeReadResponse), r.read.sinkSTag, r.read.sinkTO, r.read.size)
		return false
	}
	s.atomic = AtomicOp{Op: OpFetchAdd, Data: r.req.data, Mask: r.req.mask, Cmp: r.req.cmp, CmpMask: r.req.cmpMask}
	if r.req.code == atomicCmpSwap {
		s.atomic.Op = OpCmpSwap
	}
	old, err := s.mem.Atomic(r.req.stag, r.req.to, &s.atomic)
	if err != nil {
		s.fail(err, r.hdr[:], r.segLen, nil)
		return false
	}
	s.stats.TxAtomicResponses++
	hdr := s.untagged(seg, opcodeAtomicResponse, ddp.QNAtomicResponse)
	seg.finish((&atomicResponse{id: r.req.id, old: old}).append(hdr))
	s.respHead++
	return true
}

// nextSegment builds the next segment of the current message.
func (s *Stream) nextSegment(mulpdu int, seg *Segment) {
	hdr, off, n, last := s.seg.Next(seg.Hdr[:0], mulpdu)
	seg.finish(hdr)
	seg.Len = n
	if s.sending == turnResponse {
		if n > 0 {
			r := s.resp(s.respHead)
			seg.Src = Source{Kind: SourceTagged, STag: r.read.srcSTag, Off: r.read.srcTO + uint64(off)}
		}
		if last {
			s.respHead++
		}
		return
	}
	slot := s.slot(s.next)
	if n > 0 {
		seg.Src = Source{Kind: SourceWR, WR: slot.wr.ID, Off: uint64(off)}
	}
	if last {
		s.finish(slot, StatusOK)
		s.next++
	}
}

// finish completes a segment that consists of headers only.
func (seg *Segment) finish(hdr []byte) {
	seg.HdrLen, seg.Src, seg.Len = len(hdr), Source{}, 0
}

// untagged writes the DDP header of a message of one segment into seg.
func (s *Stream) untagged(seg *Segment, opcode uint8, qn uint32) []byte {
	h := ddp.Untagged{Last: true, ULP: control(opcode), QN: qn, MSN: s.nextMSN(qn)}
	return h.Append(seg.Hdr[:0])
}

func (s *Stream) nextMSN(qn uint32) serial.Num {
	n := s.msn[qn]
	s.msn[qn]++
	return n
}

// composeRead writes a Read Request for p into seg and records p as outstanding.
func (s *Stream) composeRead(seg *Segment, p *pending, srcSTag uint32, srcTO uint64) {
	p.msn = s.msn[ddp.QNReadRequest]
	hdr := s.untagged(seg, opcodeReadRequest, ddp.QNReadRequest)
	req := readRequest{sinkSTag: p.stag, sinkTO: p.to, size: p.length, srcSTag: srcSTag, srcTO: srcTO}
	seg.finish(req.append(hdr))
	s.push(p)
}

func (s *Stream) composeAtomic(seg *Segment, wr *WR) {
	p := pending{slot: s.next, atomic: true, id: s.next, msn: s.msn[ddp.QNReadRequest]}
	req := atomicRequest{code: atomicFetchAdd, id: p.id, stag: wr.STag, to: wr.TO,
		data: wr.Add, mask: wr.AddMask, cmpMask: ^uint64(0)}
	if wr.Op == OpCmpSwap {
		req.code = atomicCmpSwap
		req.data, req.mask, req.cmp, req.cmpMask = wr.Swap, wr.SwapMask, wr.Cmp, wr.CmpMask
	}
	seg.finish(req.append(s.untagged(seg, opcodeAtomicRequest, ddp.QNReadRequest)))
	s.push(&p)
}

func (s *Stream) push(p *pending) {
	*s.pending(s.pendTail) = *p
	s.pendTail++
}

// pollTerminate builds the Terminate, once.
func (s *Stream) pollTerminate(seg *Segment) bool {
	s.state = stateFailed
	hdr := s.untagged(seg, opcodeTerminate, ddp.QNTerminate)
	seg.finish(append(hdr, s.termBuf[:s.termLen]...))
	s.stats.TxTerminates++
	s.sending = turnNone
	return s.sent(seg)
}

// rtrSTag is the STag in an RTR. It is not checked, but some RNICs refuse 0.
const rtrSTag = 1

// SendRTR queues a ready-to-receive message before everything else: the empty message with which the initiator of a peer-to-peer connection
// opens the stream (RFC 6581 section 9.2). kind is OpSend, OpWrite or OpRead. It must be called before the first PollFilling. It uses no
// work request; a Send consumes the first MSN of queue 0, a Read that of queue 1.
func (s *Stream) SendRTR(kind Op) { s.rtr = kind }

// SendKeepAlive sends an empty RDMA Write as a keep-alive (RFC 5040 section 5.1), unless something else can be sent. It uses no work request. It
// reports whether PollFilling will return it.
func (s *Stream) SendKeepAlive() bool {
	if s.state != stateOpen || s.Sendable() {
		return false
	}
	s.rtr = OpWrite
	return true
}

func (s *Stream) pollRTR(seg *Segment) {
	kind := s.rtr
	s.rtr, s.sending = 0, turnNone
	switch kind {
	case OpSend:
		s.stats.TxSends++
		seg.finish(s.untagged(seg, opcodeSend, ddp.QNSend))
	case OpRead:
		s.stats.TxReadRequests++
		s.composeRead(seg, &pending{rtr: true, stag: rtrSTag}, rtrSTag, 0)
	default:
		s.stats.TxWrites++
		h := ddp.Tagged{Last: true, ULP: control(opcodeWrite), STag: rtrSTag}
		seg.finish(h.Append(seg.Hdr[:0]))
	}
}

// Sendable reports whether PollFilling would return a segment now.
func (s *Stream) Sendable() bool {
	switch {
	case s.state == stateFailing:
		return true
	case s.state != stateOpen || s.flushed:
		return false
	}
	return s.rtr != 0 || s.seg.Active() || s.respHead != s.respTail || s.sendReady()
}

// errShort is the error for a segment shorter than its headers, or a message whose length does not match its opcode: RFC 5040 and 5041 have
// no specific code.
var errShort = term.ErrOperation
