package session

import (
	"slices"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Spec describes a call to be planned.
type Spec struct {
	Body int // length of the message without items and their padding
	// Items are the lengths of the data items that may be moved separately, in bytes, without
	// padding, in order (draft section 4.4.2).
	Items []int
	// Results are the maximum lengths of the reply's data items, in bytes, in order.
	Results []int
	Reply   int // maximum length of the reply without Results and their padding
}

// CallPlan describes how to send a call.
type CallPlan struct {
	Reduce   []bool // which of Items go by Read chunks; nil: none
	External bool   // the message goes by a Call chunk
	Writes   []int  // bytes of the Write chunks to provide
	Reply    int    // bytes of the Reply chunk to provide; 0: none
	MaxSeg   int    // bytes of the longest segment
}

// pad is n rounded up to XDR's unit.
func pad(n int) int { return (n + 3) &^ 3 }

// smallItem is the size in bytes up to which an item is not moved by a chunk if the message fits
// without.
const smallItem = 256

// continueLimit returns the length of the longest body that a continued message may have now, in
// bytes, or 0.
func (s *Session) continueLimit(call bool) int {
	t := wire.ReplyMiddle
	if call {
		t = wire.CallMiddle
	}
	if s.version != 2 || s.cfg.Continue < 2 || s.refused&(1<<t) != 0 {
		return 0
	}
	if !call {
		return maxReplyBytes - s.replies.bytes
	}
	return (s.sendLimit() - wire.PrefixSize - 4 - 600) * s.cfg.Continue
}

// PlanCall chooses the formats of a call and its reply. It may return ErrTooLong or ErrReverse.
func (s *Session) PlanCall(spec *Spec) (CallPlan, error) {
	p, err := s.planCall(spec)
	if err != nil || s.version != 2 {
		return p, err
	}
	// The peer's limits on segments: in total (draft section 5.2.4), and per chunk as reported
	// by its errors.
	total, worst := 0, 0
	add := func(n int) {
		k := (n + p.MaxSeg - 1) / p.MaxSeg
		total, worst = total+k, max(worst, k)
	}
	body := spec.Body
	for i, n := range spec.Items {
		if p.Reduce != nil && p.Reduce[i] {
			add(n)
		} else {
			body += pad(n)
		}
	}
	for _, n := range p.Writes {
		add(n)
	}
	add(p.Reply)
	if p.External {
		add(body)
	}
	if uint64(total) > uint64(s.peer.Segments) || worst > s.maxSegs {
		return p, ErrTooLong
	}
	return p, nil
}

func (s *Session) planCall(spec *Spec) (p CallPlan, err error) {
	p.MaxSeg = 1 << 30
	if s.version == 2 {
		p.MaxSeg = int(min(s.peer.SegmentSize, s.cfg.Props.SegmentSize, 1<<30))
	}
	level := s.calls()
	if level == wire.ReverseNone {
		return p, ErrReverse
	}
	chunks := level == wire.ReverseGeneral
	body := spec.Body
	for _, n := range spec.Items {
		body += pad(n)
	}
	limit := s.sendLimit()
	fixed := wire.PrefixSize + 4 + 4 + 4 + 4 // InvHandle and three empty lists
	if chunks {
		fixed += s.planResults(spec, &p)
	}
	if body+fixed <= limit {
		return p, nil
	}
	if chunks {
		moved, lists := s.planItems(spec, &p)
		body, fixed = body-moved, fixed+lists
		if body+fixed <= limit {
			return p, nil
		}
	}
	if body <= s.continueLimit(true) && level != wire.ReverseSimple {
		return p, nil
	}
	if !chunks {
		return p, ErrTooLong
	}
	p.External = true
	fixed += 24*p.segments(body) + 4
	if fixed > limit || s.refused&(1<<wire.CallExternal) != 0 && s.version == 2 {
		return p, ErrTooLong
	}
	return p, nil
}

// calls returns which calls the peer supports: a server all, a client those that it has announced.
func (s *Session) calls() wire.Reverse {
	switch {
	case !s.cfg.Server:
		return wire.ReverseGeneral
	case s.version == 1:
		return wire.ReverseSimple
	}
	return s.peer.Reverse
}

// segments returns the number of segments of a chunk of n bytes.
func (p *CallPlan) segments(n int) int { return max((n+p.MaxSeg-1)/p.MaxSeg, 1) }

// planResults plans the chunks for a reply that does not fit in a message, and returns their length in the header of the call.
func (s *Session) planResults(spec *Spec, p *CallPlan) (lists int) {
	reply := spec.Reply
	for _, n := range spec.Results {
		reply += pad(n)
	}
	limit := s.recvLimit() - wire.PrefixSize - 12
	if reply <= limit {
		return 0
	}
	if len(spec.Results) > 0 && len(spec.Results) <= s.maxWrite {
		p.Writes = spec.Results
		for _, n := range spec.Results {
			lists += 8 + 16*p.segments(n)
		}
		reply = spec.Reply
		limit -= lists
	}
	// A responder of version 2 could continue a long reply; a Reply chunk is cheaper
	// for it.
	if reply > limit {
		p.Reply = reply
		lists += 8 + 16*p.segments(reply)
	}
	return lists
}

// planItems plans Read chunks for the larger items. It returns the number of bytes that they move out of the message,
// and the length of their list in the header.
func (s *Session) planItems(spec *Spec, p *CallPlan) (moved, list int) {
	reads := 0
	reduce := make([]bool, len(spec.Items))
	for i, n := range spec.Items {
		if n >= smallItem && reads < s.maxRead {
			reduce[i] = true
			reads++
			moved += pad(n)
			list += 24 * p.segments(n)
		}
	}
	if reads > 0 {
		p.Reduce = reduce
	}
	return moved, list
}

// CallChunks are the segments that a CallPlan asks for.
type CallChunks struct {
	Inv    uint32 // the STag that the peer may invalidate; 0: none
	Call   []wire.ReadSegment
	Reads  []wire.ReadSegment // by Position, which is that of the unreduced message
	Writes []wire.Chunk
	Reply  wire.Chunk
}

// Call queues a call. body is the message without the reduced items, or nil if it is in the Call
// chunk; it must not change until the reply arrives. Call may return ErrDuplicate or ErrTooLong.
func (s *Session) Call(xid uint32, body []byte, c *CallChunks) error {
	if s.pending[xid] != nil {
		return ErrDuplicate
	}
	m := message{body: body, call: true, pieces: s.continueLimit(true) > 0 && len(body) > 0}
	m.hdr = wire.Header{XID: xid, Type: wire.CallInline, InvHandle: c.Inv, Call: c.Call, Reads: c.Reads, Writes: c.Writes, Reply: c.Reply}
	format := &s.stats.Inline
	if len(c.Call) > 0 {
		m.hdr.Type, format = wire.CallExternal, &s.stats.Special
	}
	if s.version == 1 {
		m.pieces = false
		m.hdr.Type = wire.Msg1
		if len(c.Call) > 0 {
			m.hdr.Type = wire.NoMsg1
			m.hdr.Reads = append(append([]wire.ReadSegment(nil), c.Call...), c.Reads...)
		}
	}
	m.hdr.Vers = uint32(s.version)
	n := m.hdr.Len() + len(body)
	if n > s.sendLimit() {
		if !m.pieces || m.hdr.Len()+4 > s.sendLimit() {
			return ErrTooLong
		}
		format = &s.stats.Continued
	}
	format[0]++
	s.stats.CallsOut++
	types := uint32(1) << m.hdr.Type
	if format == &s.stats.Continued {
		types |= 1 << wire.CallMiddle
	}
	s.pending[xid] = &pending{writes: c.Writes, reply: c.Reply, types: types}
	s.queue = append(s.queue, m)
	return nil
}

// Post queues a call-only procedure, which has no reply and must not use chunks (draft section
// 4.7). Version 1 does not support it, since replies return its credits. Post may return
// ErrTooLong, ErrReverse or ErrCallOnly.
func (s *Session) Post(xid uint32, body []byte) error {
	if s.version != 2 {
		return ErrCallOnly
	}
	p, err := s.PlanCall(&Spec{Body: len(body)})
	if err != nil {
		return err
	}
	if p.External {
		return ErrTooLong
	}
	m := message{hdr: wire.Header{XID: xid, Vers: 2, Type: wire.CallInline}, body: body, call: true, pieces: true}
	if m.hdr.Len()+len(body) > s.sendLimit() {
		s.stats.Continued[0]++
	} else {
		s.stats.Inline[0]++
	}
	s.queue = append(s.queue, m)
	return nil
}

// Copy is an RDMA Write needed for a reply.
type Copy struct {
	To   wire.Segment // Length bytes
	Item int          // index of the data item, or -1 for the message itself
	Off  int          // offset in the item
}

// ReplyPlan describes how to send a reply: perform the Copies, then call Session.Reply with the
// remaining bytes.
type ReplyPlan struct {
	Reduce []bool // which items go by Write chunks
	Copies []Copy
	hdr    wire.Header
	pieces bool // the message is continued
}

// External reports whether the message itself goes by the Reply chunk.
func (p *ReplyPlan) External() bool {
	return p.hdr.Type == wire.ReplyExternal || p.hdr.Type == wire.NoMsg1
}

// PlanReply chooses the format of a reply to c. body and items are as in Spec.
// If ok is false no format is possible, and f is the error to pass to Fail.
func (s *Session) PlanReply(c *Call, body int, items []int) (p *ReplyPlan, f wire.Failure, ok bool) {
	p = &ReplyPlan{}
	// Results are written to the Write chunks in order (draft section 6.6.3, RFC 8166 section
	// 4.3.2). An empty chunk requests the result inline (RFC 8166 section 4.3.2.3).
	var short *wire.Failure
	rest := body
	p.Reduce = make([]bool, len(items))
	for i, n := range items {
		if i < len(c.Writes) && len(c.Writes[i]) > 0 {
			if p.Reduce[i] = c.Writes[i].Len() >= uint64(n); p.Reduce[i] {
				continue
			}
			if short == nil {
				short = &wire.Failure{Code: wire.ErrWriteResource, Index: uint32(i + 1), Needed: uint32(n)}
			}
		}
		rest += pad(n)
	}
	h := &p.hdr
	h.XID, h.Vers = c.XID, uint32(s.version)
	h.Writes = cloneChunks(c.Writes)
	for i := range h.Writes {
		if i < len(items) && p.Reduce[i] {
			p.fill(h.Writes[i], items[i], i)
		} else {
			p.fill(h.Writes[i], 0, -1)
		}
	}
	reply := slices.Clone(c.Reply)
	// An inline reply has no Reply chunk in version 2; in version 1 it returns the unused
	// chunk.
	h.Type = wire.ReplyInline
	if s.version == 1 {
		h.Type = wire.Msg1
		h.Reply = reply
	}
	limit := s.sendLimit()
	if h.Len()+rest <= limit {
		p.fill(h.Reply, 0, -1)
		return p, f, true
	}
	if c.Reply != nil && c.Reply.Len() >= uint64(rest) {
		h.Type = wire.ReplyExternal
		if s.version == 1 {
			h.Type = wire.NoMsg1
		}
		h.Reply = reply
		if h.Len() <= limit {
			p.fill(h.Reply, rest, -1)
			return p, f, true
		}
	}
	if s.version == 2 && rest <= s.continueLimit(false) {
		h.Type, h.Reply = wire.ReplyInline, nil
		p.pieces = true
		if h.Len()+8 <= limit {
			return p, f, true
		}
	}
	if s.version == 1 {
		return nil, wire.Failure{Code: wire.ErrChunk1}, false
	}
	if short != nil {
		return nil, *short, false
	}
	return nil, wire.Failure{Code: wire.ErrReplyResource, Needed: uint32(rest)}, false
}

// fill distributes n bytes of an item over a chunk and sets the lengths.
func (p *ReplyPlan) fill(c wire.Chunk, n, item int) {
	off := 0
	for i := range c {
		part := int(min(uint64(c[i].Length), uint64(n-off)))
		c[i].Length = uint32(part)
		if part > 0 {
			p.Copies = append(p.Copies, Copy{c[i], item, off})
		}
		off += part
	}
}

// Reply queues the reply to c according to p. body is the message without the reduced items, or nil
// if it is in the Reply chunk. It must not change until it has been sent.
func (s *Session) Reply(c *Call, p *ReplyPlan, body []byte) {
	if p.pieces && len(body) > s.continueLimit(false) { // others have been queued since it was planned
		s.Fail(c, wire.Failure{Code: wire.ErrReplyResource, Needed: uint32(len(body))})
		return
	}
	if !s.Drop(c) {
		return
	}
	switch {
	case p.pieces:
		s.stats.Continued[1]++
	case p.External():
		s.stats.Special[1]++
	default:
		s.stats.Inline[1]++
	}
	s.queue = append(s.queue, message{hdr: p.hdr, body: body, inv: c.Inv, pieces: p.pieces})
	if p.pieces {
		s.replies.bytes += len(body)
	}
	if s.replies.n++; s.replies.n > maxReplies {
		s.close(ErrProtocol)
	}
}

// Fail answers c with an error. Errors that version 1 lacks become ERR_CHUNK.
func (s *Session) Fail(c *Call, f wire.Failure) {
	if !s.Drop(c) {
		return
	}
	if s.version == 1 {
		f = wire.Failure{Code: wire.ErrChunk1}
	}
	s.sendError(c.XID, uint32(s.version), f)
}

// Drop ends c without an answer, for a call-only procedure or an answer that is no longer needed. It returns false if c had
// an answer, or the session is closed.
func (s *Session) Drop(c *Call) bool {
	if c.credits == 0 || s.closed {
		return false
	}
	s.busy -= c.credits
	c.credits = 0
	for g := range c.Segments() {
		if s.named[g.Handle]--; s.named[g.Handle] == 0 {
			delete(s.named, g.Handle)
		}
	}
	return true
}
