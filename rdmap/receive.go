package rdmap

import (
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/term"
)

// HandleULPDU is HandleMarked for bytes without markers.
func (s *Stream) HandleULPDU(b []byte) *term.Error { return s.HandleMarked(marked.Bytes{B: b}) }

// HandleMarked processes the next ULPDU in order. It places the payload and, with the last segment of a message, delivers the message.
// Before it returns a violation it has passed it to Fail. After the end of the stream ULPDUs are dropped (RFC 5041 section 7.1) and nil is
// returned.
func (s *Stream) HandleMarked(u marked.Bytes) *term.Error {
	if !s.receiving() {
		s.stats.RxDropped++
		return nil
	}
	n := u.Len()
	b := s.frontOf(u, n)
	hdr := ddp.UntaggedLen
	if ddp.IsTagged(b) {
		hdr = ddp.TaggedLen
	}
	return s.handle(b, u.After(min(hdr, n)), n)
}

// AwaitsReceive reports whether u, which is the next ULPDU in order or its start, belongs to a
// Send for which Memory has no buffer yet: HandleMarked would fail with term.ErrNoBuffer. If there
// is a buffer, the Send has it from then on.
func (s *Stream) AwaitsReceive(u marked.Bytes) bool {
	if !s.receiving() || s.expect != 0 {
		return false
	}
	b := s.gather(u, min(u.Len(), ddp.UntaggedLen))
	var h ddp.Untagged
	if ddp.IsTagged(b) {
		return false
	}
	if _, err := h.Decode(b); err != nil {
		return false
	}
	return h.QN == ddp.QNSend && s.checkUntagged(&h) == nil && h.MSN == s.recvq.Head() && !s.supply(&h)
}

// HandleSegment is HandleMarked for a segment that the stream of a peer in this process has built: hdr is its Hdr, payload the Len bytes of
// its source. The payload is read once, when it is placed.
func (s *Stream) HandleSegment(hdr, payload []byte) *term.Error {
	if !s.receiving() {
		s.stats.RxDropped++
		return nil
	}
	b := hdr
	if s.expect != 0 { // an RTR has no payload
		b = append(append(s.front[:0], hdr...), payload[:min(len(payload), front-len(hdr))]...)
	}
	return s.handle(b, marked.Bytes{B: payload}, len(hdr)+len(payload))
}

// handle processes a segment of n bytes that begins with b: its DDP header and, of a control message, the rest too. payload is what follows
// the DDP header of another message.
func (s *Stream) handle(b []byte, payload marked.Bytes, n int) *term.Error {
	s.stats.RxSegments++
	s.stats.RxBytes += uint64(n)
	if s.expect != 0 && s.takeRTR(b) {
		return nil
	}
	if ddp.IsTagged(b) {
		var h ddp.Tagged
		if _, err := h.Decode(b); err != nil {
			return s.failSegment(headerError(err), b, n)
		}
		if err := s.handleTagged(&h, payload, n-ddp.TaggedLen, false); err != nil {
			return s.failSegment(err, b, n)
		}
		return nil
	}
	var h ddp.Untagged
	control, err := h.Decode(b)
	if err != nil {
		return s.failSegment(headerError(err), b, n)
	}
	return s.handleUntagged(&h, payload, control, b, n)
}

// front is how many bytes of a ULPDU are inspected, apart from placing the payload: more than a header and the largest control message.
const front = 128

// frontOf returns the first bytes of u, which has n: front bytes, or all if there are fewer. The result may contain markers after the
// header if it is front bytes long.
func (s *Stream) frontOf(u marked.Bytes, n int) []byte {
	if n >= front && u.Plain(ddp.UntaggedLen) {
		return u.B[:front]
	}
	return s.gather(u, min(n, front))
}

// gather returns the first n bytes of u, front at most.
func (s *Stream) gather(u marked.Bytes, n int) []byte {
	if u.Plain(n) {
		return u.B[:n]
	}
	u.CopyTo(s.front[:n])
	return s.front[:n]
}

func (s *Stream) receiving() bool { return s.state == stateOpen && !s.flushed }

// headerError turns the error of a DDP header into the stream's.
func headerError(err error) *term.Error {
	if e, ok := err.(*term.Error); ok {
		return e
	}
	return errShort
}

// handleTagged processes a tagged segment in order, of an RDMA Write or a Read Response, with n bytes of payload. If placed is true the
// payload is already in place, and the argument is ignored. The caller must fail the stream for an error.
func (s *Stream) handleTagged(h *ddp.Tagged, payload marked.Bytes, n int, placed bool) *term.Error {
	if h.ULP&ctrlVersion != version {
		return term.ErrRDMAPVersion
	}
	s.rxData = true
	switch h.ULP & ctrlOpcode {
	case opcodeWrite:
		// A zero-length segment's STag and TO are not looked at (RFC 5041
		// section 5.2).
		if n > 0 && !placed {
			if err := s.placeTagged(h, OpWrite, payload, n); err != nil {
				return err
			}
		}
		if h.Last {
			s.stats.RxWrites++
		}
		return nil
	case opcodeReadResponse:
		return s.handleReadResponse(h, payload, n, placed)
	}
	return term.ErrOpcode
}

// failSegment fails the stream because of a segment of segLen bytes that begins with seg.
func (s *Stream) failSegment(err *term.Error, seg []byte, segLen int) *term.Error {
	var rdma []byte
	if len(seg) >= ddp.UntaggedLen+readRequestLen && !ddp.IsTagged(seg) && seg[1]&ctrlOpcode == opcodeReadRequest {
		rdma = seg[ddp.UntaggedLen:]
	}
	s.fail(err, seg, segLen, rdma)
	return err
}

// placeTagged places the n bytes of payload of a tagged segment. It rejects an offset that wraps, so that Memory need not check for it
// (RFC 5041 section 7.1, tagged check 5).
func (s *Stream) placeTagged(h *ddp.Tagged, op Op, payload marked.Bytes, n int) *term.Error {
	if h.TO+uint64(n) < h.TO {
		return term.ErrTOWrap
	}
	s.placement = Placement{Kind: PlaceTagged, STag: h.STag, TO: h.TO, Op: op}
	return s.mem.Place(&s.placement, payload)
}

// placeRecv places the payload of a Send's segment in its receive buffer.
func (s *Stream) placeRecv(h *ddp.Untagged, op Op, id uint32, payload marked.Bytes) *term.Error {
	s.placement = Placement{Kind: PlaceRecv, Recv: id, Off: h.MO, Op: op}
	return s.mem.Place(&s.placement, payload)
}

// handleReadResponse checks a segment of n bytes of payload against the oldest outstanding request, because responses arrive in the order
// of the requests (RFC 5040 section 5.5, rule 20; RFC 7306 section 7).
func (s *Stream) handleReadResponse(h *ddp.Tagged, payload marked.Bytes, n int, placed bool) *term.Error {
	if s.pendHead == s.pendTail {
		return term.ErrOpcode
	}
	r := s.pending(s.pendHead)
	if r.atomic {
		return term.ErrOpcode
	}
	if n > 0 {
		switch {
		case h.STag != r.stag:
			return term.ErrInvalidSTag
		case h.TO != r.to+uint64(r.got) || uint64(n) > uint64(r.length-r.got):
			return term.ErrBounds
		}
		if !placed {
			if err := s.placeTagged(h, OpRead, payload, n); err != nil {
				s.finishPending(r, StatusLocalProtection)
				return err
			}
		}
		r.got += uint32(n)
	}
	if !h.Last {
		return nil
	}
	if r.got != r.length {
		return term.ErrBounds
	}
	s.stats.RxReadResponses++
	s.finishPending(r, StatusOK)
	s.pendHead++
	return nil
}

func (s *Stream) finishPending(p *pending, st Status) {
	if !p.rtr {
		s.finish(s.slot(p.slot), st)
	}
}

// handleUntagged processes an untagged segment in order. control is the payload, or enough of it to show that it is too long for a control
// message.
func (s *Stream) handleUntagged(h *ddp.Untagged, payload marked.Bytes, control, seg []byte, segLen int) *term.Error {
	err := s.checkUntagged(h)
	if err != nil {
		return s.failSegment(err, seg, segLen)
	}
	if h.QN == ddp.QNSend {
		s.rxData = true
		return s.handleSend(h, payload, seg, segLen, false)
	}
	msg, done, err := s.ctl[h.QN-1].Accept(h, control)
	if err != nil {
		if err == term.ErrMSNRange && h.QN == ddp.QNAtomicResponse && s.pendHead == s.pendTail {
			err = term.ErrNoBuffer
		}
		return s.failSegment(err, seg, segLen)
	}
	if h.QN != ddp.QNTerminate {
		s.rxData = true
	}
	if !done {
		return nil
	}
	switch h.ULP & ctrlOpcode {
	case opcodeReadRequest:
		return s.handleReadRequest(msg, seg)
	case opcodeAtomicRequest:
		err = s.handleAtomicRequest(msg, seg)
	case opcodeAtomicResponse:
		err = s.handleAtomicResponse(msg)
	default:
		err = s.handleTerminate(msg)
	}
	if err != nil {
		return s.failSegment(err, seg, segLen)
	}
	return nil
}

// checkUntagged checks the header alone: the queue, the version and whether the opcode belongs to the queue.
func (s *Stream) checkUntagged(h *ddp.Untagged) *term.Error {
	op := h.ULP & ctrlOpcode
	switch {
	case h.QN > ddp.QNAtomicResponse:
		return term.ErrInvalidQN
	case h.ULP&ctrlVersion != version:
		return term.ErrRDMAPVersion
	case uint32(opcodeQueue[op]) != h.QN:
		return term.ErrOpcode
	}
	return nil
}

// handleSend processes a segment of queue 0 whose header has passed checkUntagged. If placed is true the payload is already in place, and
// payload is empty; seg is the start of the segment and segLen its length.
func (s *Stream) handleSend(h *ddp.Untagged, payload marked.Bytes, seg []byte, segLen int, placed bool) *term.Error {
	n := segLen - ddp.UntaggedLen
	op := sendOps[h.ULP&ctrlOpcode]
	imm := op == OpImm || op == OpImmSE
	if h.MSN != s.recvq.Head() {
		return s.failSegment(term.ErrMSNRange, seg, segLen)
	}
	if !s.supply(h) {
		return s.failSegment(term.ErrNoBuffer, seg, segLen)
	}
	if imm {
		return s.handleImm(h, op, seg, segLen)
	}
	buf, err := s.recvq.Check(h, n)
	if err == nil && !placed && n > 0 {
		err = s.placeRecv(h, op, buf.ID, payload)
	}
	if err == nil {
		err = s.recvq.Accept(h, n)
	}
	inv := op == OpSendInv || op == OpSendSEInv
	if err == nil && h.Last && inv {
		err = s.mem.Invalidate(h.Inv)
	}
	if err == term.ErrTooLong {
		s.overflowed(op)
	}
	if err != nil {
		return s.failSegment(err, seg, segLen)
	}
	if !h.Last {
		return nil
	}
	s.recvq.Pop()
	s.stats.RxSends++
	c := Completion{Kind: CompRecv, ID: buf.ID, Op: op, Len: h.MO + uint32(n), Solicited: op == OpSendSE || op == OpSendSEInv}
	if inv {
		c.InvSTag = h.Inv
	}
	s.complete(&c)
	return nil
}

// overflowed completes the receive buffer whose message is too long for it.
func (s *Stream) overflowed(op Op) {
	buf, _ := s.recvq.Pop()
	s.complete(&Completion{Kind: CompRecv, ID: buf.ID, Op: op, Status: StatusTooLong})
}

// handleImm processes Immediate Data: always one segment of eight bytes (RFC 7306 section 6.3). It consumes a receive buffer and writes
// nothing to it.
func (s *Stream) handleImm(h *ddp.Untagged, op Op, seg []byte, segLen int) *term.Error {
	switch {
	case h.MO != 0:
		return s.failSegment(term.ErrInvalidMO, seg, segLen)
	case segLen != ddp.UntaggedLen+immLen || !h.Last:
		return s.failSegment(errShort, seg, segLen)
	}
	if err := s.recvq.Accept(h, 0); err != nil { // after segments of a Send
		return s.failSegment(err, seg, segLen)
	}
	buf, _ := s.recvq.Pop()
	s.stats.RxImms++
	c := Completion{Kind: CompRecv, ID: buf.ID, Op: op, Solicited: op == OpImmSE}
	copy(c.Imm[:], seg[ddp.UntaggedLen:])
	s.complete(&c)
	return nil
}

// supply requests the buffers of all messages up to that of h, which is in the window, and reports whether that message has one.
func (s *Stream) supply(h *ddp.Untagged) bool {
	for !h.MSN.Less(s.recvq.Tail()) {
		id, size, ok := s.mem.Recv(s.recvq.Tail())
		if !ok {
			return false
		}
		s.recvq.Supply(id, size)
	}
	return true
}

// handleReadRequest queues the response to a Read Request that seg completes.
func (s *Stream) handleReadRequest(msg, seg []byte) *term.Error {
	var req readRequest
	if len(msg) != readRequestLen || !req.decode(msg) {
		return s.failSegment(errShort, seg, len(seg))
	}
	s.stats.RxReadRequests++
	err := s.roomForRequest()
	if err == nil && req.size > 0 {
		if req.srcTO+uint64(req.size) < req.srcTO {
			err = term.ErrReadTOWrap
		} else {
			err = s.mem.CheckRead(req.srcSTag, req.srcTO, req.size)
		}
	}
	if err != nil {
		s.fail(err, seg, len(seg), msg)
		return err
	}
	r := s.resp(s.respTail)
	r.atomic, r.read, r.segLen = false, req, len(seg)
	copy(r.hdr[:], seg)
	s.respTail++
	return nil
}

func (s *Stream) handleAtomicRequest(msg, seg []byte) *term.Error {
	var req atomicRequest
	if len(msg) != atomicRequestLen || !req.decode(msg) {
		return errShort
	}
	s.stats.RxAtomics++
	if req.code != atomicFetchAdd && req.code != atomicCmpSwap {
		return term.ErrOpcode
	}
	if err := s.roomForRequest(); err != nil {
		return err
	}
	r := s.resp(s.respTail)
	r.atomic, r.req, r.segLen = true, req, len(seg)
	copy(r.hdr[:], seg)
	s.respTail++
	return nil
}

// roomForRequest enforces IRD (RFC 5040 section 6.1).
func (s *Stream) roomForRequest() *term.Error {
	if int(s.respTail-s.respHead) >= s.ird {
		return term.ErrStream
	}
	return nil
}

// handleAtomicResponse completes our oldest outstanding request, which must be the atomic that this response answers.
func (s *Stream) handleAtomicResponse(msg []byte) *term.Error {
	var resp atomicResponse
	if !resp.decode(msg) || len(msg) != atomicResponseLen {
		return errShort
	}
	if s.pendHead == s.pendTail {
		return term.ErrNoBuffer
	}
	r := s.pending(s.pendHead)
	if !r.atomic {
		return term.ErrOpcode
	}
	if r.id != resp.id {
		return term.ErrOperation
	}
	s.stats.RxAtomicResponses++
	slot := s.slot(r.slot)
	s.mem.AtomicResult(slot.wr.ID, resp.old)
	s.finish(slot, StatusOK)
	s.pendHead++
	return nil
}

// handleTerminate processes the peer's Terminate. If it identifies a request of ours, that request gets the corresponding status.
func (s *Stream) handleTerminate(msg []byte) *term.Error {
	var t Terminate
	if !t.Decode(msg, s.rxData) {
		return errShort
	}
	s.stats.RxTerminates++
	s.state = stateTerminated
	s.remote = remoteTerm{err: t.Err()}
	s.remote.rawLen = copy(s.remote.raw[:], msg)
	if p := s.terminatedRequest(&t); p != nil {
		st := StatusRemoteOp
		if t.Layer == term.LayerRDMAP && t.Type == term.RDMAPProtection {
			st = StatusRemoteAccess
		}
		s.finishPending(p, st)
	}
	s.event(EventTerminated)
	return nil
}

// terminatedRequest returns the outstanding request that a Terminate identifies. Without a Read Request header, that is
// the one with the MSN of the DDP header. Otherwise it is a Read whose sink contains that of the Read Request header,
// which is that of the missing bytes: the Read with the MSN if it is one of these, and else the first, because some
// peers report a wrong MSN.
func (s *Stream) terminatedRequest(t *Terminate) (first *pending) {
	var h ddp.Untagged
	_, err := h.Decode(t.DDP)
	if t.RDMA == nil && (err != nil || len(t.DDP) != ddp.UntaggedLen || h.QN != ddp.QNReadRequest) {
		return nil
	}
	var req readRequest
	named := req.decode(t.RDMA)
	for i := s.pendHead; i != s.pendTail; i++ {
		p := s.pending(i)
		if named && (p.atomic || p.stag != req.sinkSTag || !p.covers(req.sinkTO, uint64(req.size))) {
			continue
		}
		if p.msn == h.MSN {
			return p
		}
		if named && first == nil {
			first = p
		}
	}
	return first
}

// ExpectRTR announces that the peer's first message is a ready-to-receive message of the given kind, as for SendRTR, which takes no receive
// buffer. A first message that is not an RTR is processed as usual.
func (s *Stream) ExpectRTR(kind Op) { s.expect = kind }

// takeRTR inspects the first ULPDU and returns true if it consumed it. A Write of no bytes is processed as usual.
func (s *Stream) takeRTR(b []byte) bool {
	expect := s.expect
	s.expect = 0
	if expect == OpSend && len(b) == 0 {
		return true // RFC 6581 sections 3 and 9 can be read as an FPDU without a ULPDU.
	}
	var h ddp.Untagged
	if ddp.IsTagged(b) {
		return false
	}
	payload, err := h.Decode(b)
	if err != nil || s.checkUntagged(&h) != nil { // it is about to fail the stream
		return false
	}
	if !h.Last || h.MO != 0 || h.MSN != ddp.FirstMSN {
		return false
	}
	switch h.ULP & ctrlOpcode {
	case opcodeSend:
		if expect != OpSend || len(payload) > 0 {
			return false
		}
		s.recvq.Skip()
		s.stats.RxSends++
	case opcodeReadRequest:
		var req readRequest
		if len(payload) != readRequestLen || !req.decode(payload) || req.size > 0 {
			return false
		}
		s.ctl[0].Accept(&h, payload)
		s.stats.RxReadRequests++
		r := s.resp(s.respTail) // not subject to IRD
		r.atomic, r.read, r.segLen = false, req, len(b)
		copy(r.hdr[:], b)
		s.respTail++
	default:
		return false
	}
	s.rxData = true
	return true
}
