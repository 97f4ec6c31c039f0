// Package session implements the state of one RPC-over-RDMA connection, for both requester and
// responder: version negotiation, credits, transport properties, the formats of calls and replies,
// and errors. It does no I/O. Received Sends go in by HandleMessage, messages to be sent come out
// of PollTransmit, and events out of PollEvent. The caller manages memory and RDMA operations: a
// plan says what to register, read and write.
//
// After each input, drain PollTransmit and PollEvent. A Session is not safe for concurrent use.
package session

import (
	"errors"
	"fmt"
	"math"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Limits bound the resources that a peer can use.
type Limits struct {
	Message     int    // length of an RPC message without data item chunks
	ReadChunks  int    // data item chunks of a call; 0: none
	WriteChunks int    // Write chunks of a call; 0: none
	Segments    int    // segments of a chunk
	Chunk       uint64 // bytes of a Read chunk
}

// Config configures a Session. Start from DefaultConfig.
type Config struct {
	Server     bool
	Version    int // highest version to use; a client starts with it
	MinVersion int
	Props      wire.Properties // ours
	Extra      []wire.Prop     // more properties to send
	// Window is the number of messages that the peer may send ahead, at least 2. Window+1
	// Receives of max(Props.RecvSize, Recv1) bytes must always be posted.
	Window int
	// Send1 and Recv1 are the inline thresholds of version 1, taken from the private data of
	// the connection (RFC 8797).
	Send1, Recv1 int
	Invalidate   Invalidation
	Limits       Limits
	// Continue is the maximum number of parts of a continued call; longer ones use a Call
	// chunk. Replies of any length are continued while at most 4 MiB of them are queued.
	// Below 2, neither is continued.
	Continue int
	Auth     Handshake // nil: no host authentication; otherwise version 1, which has none, is not used
}

// Invalidation says which Sends of a responder may invalidate an STag.
type Invalidation uint8

// Invalidations, by the R flags in the private data of the connection (RFC 8797
// section 4.1).
const (
	InvalidateNamed Invalidation = iota // no private data: only version 2 replies, whose calls name the STag
	InvalidateNone                      // one side cleared its flag
	InvalidateAny                       // both sides set it: version 1 replies too
)

// DefaultConfig returns a Config suitable for NFS.
func DefaultConfig(server bool) Config {
	return Config{
		Server: server, Version: 2, MinVersion: 1, Props: wire.DefaultProperties(), Window: 64, Send1: 1024, Recv1: 1024,
		Limits:   Limits{Message: 1 << 20, ReadChunks: 4, WriteChunks: 4, Segments: 64, Chunk: 4 << 20},
		Continue: 8,
	}
}

// Handshake is one end of a host authentication (draft section 5.2.6). The client's Step is called
// first, with nil. Material longer than a message is split, and Step is called with each piece, so
// a handshake must do its own framing.
type Handshake interface {
	// Step processes the peer's material and returns ours, which may be empty. done means that
	// this end has authenticated the peer and needs no more material. An error ends the
	// connection.
	Step(in []byte) (out []byte, done bool, err error)
}

// Errors of RPCs and sessions.
var (
	ErrProtocol  = errors.New("rpcrdma: the peer violates the protocol")
	ErrVersion   = errors.New("rpcrdma: no version in common")
	ErrAuth      = errors.New("rpcrdma: host authentication failed")
	ErrTooLong   = errors.New("rpcrdma: message is too long for the connection")
	ErrReverse   = errors.New("rpcrdma: the peer does not support such calls in the reverse direction")
	ErrCallOnly  = errors.New("rpcrdma: version 1 has no calls without a reply")
	ErrDuplicate = errors.New("rpcrdma: a call with this XID is outstanding")
)

// FailureError is an error that the responder reported.
type FailureError struct{ wire.Failure }

func (e *FailureError) Error() string {
	switch e.Code {
	case wire.ErrVers:
		return fmt.Sprintf("rpcrdma: peer reports %v: it supports versions %d to %d", e.Code, e.Low, e.High)
	case wire.ErrReadChunks, wire.ErrWriteChunks, wire.ErrSegments:
		return fmt.Sprintf("rpcrdma: peer reports %v: at most %d", e.Code, e.Max)
	case wire.ErrWriteResource:
		return fmt.Sprintf("rpcrdma: peer reports %v: chunk %d, %d bytes needed", e.Code, e.Index, e.Needed)
	case wire.ErrReplyResource:
		return fmt.Sprintf("rpcrdma: peer reports %v: %d bytes needed", e.Code, e.Needed)
	}
	return fmt.Sprintf("rpcrdma: peer reports %v", e.Code)
}

// EventKind is the type of an Event.
type EventKind uint8

// Events.
const (
	EventReady   EventKind = iota + 1 // version and credits are settled: calls may be planned
	EventCall                         // Call: a call arrived
	EventReply                        // XID, Reply: a reply to our call
	EventFailure                      // XID, Err: our call got no reply
	EventClose                        // Err: the connection must be closed
)

// Event is a change that the caller must act on.
type Event struct {
	Kind  EventKind
	XID   uint32
	Call  *Call
	Reply *Reply
	Err   error
}

// Call is an incoming call. It owns its memory.
type Call struct {
	XID   uint32
	Inv   uint32             // the STag that the reply may invalidate; 0: none
	Body  []byte             // the message, data items removed; nil with External
	Ext   []wire.ReadSegment // External: the body's segments; otherwise empty
	Reads []wire.ReadSegment // data items, by Position
	// Writes and Reply are what the requester provided for results.
	Writes []wire.Chunk
	Reply  wire.Chunk

	credits int // that it holds until it is answered
}

// Reply is an incoming reply.
type Reply struct {
	Body   []byte       // the message, data items removed; nil: it is in the Reply chunk
	Writes []wire.Chunk // with the lengths that were written; nil: none of them was used
	Ext    uint64       // bytes in the Reply chunk
}

// pending is an unanswered call of ours.
type pending struct {
	writes []wire.Chunk
	reply  wire.Chunk
	got    bool   // version 1: sent
	types  uint32 // bits of the header types that it takes
}

// Stats are counters of a session.
type Stats struct {
	Sent, Received, Discarded  uint64 // messages
	Grants, Errors             uint64 // sent
	CallsIn, CallsOut          uint64
	Inline, Continued, Special [2]uint64 // formats of what was sent: calls, replies
}

// Session is one end of a connection.
type Session struct {
	cfg     Config
	version int // 0: not settled
	peer    wire.Properties
	ready   bool
	closed  bool

	// Version 2's credits (draft section 4.2.1), counted modulo 2^32.
	sent, received     uint32
	limit              uint32 // "Received credits"
	told               uint32 // edge that we advertised last
	busy               int    // credits that unanswered calls hold
	payload            bool   // a message other than a Grant arrived since
	grant1             int    // version 1: credits granted to us
	flight1            int    // version 1: our calls without reply
	propsSent, propsIn phase
	authed             bool // the peer has authenticated itself, if Config.Auth demands that

	asm      assembly
	broken   parts // of a continued message that failed: the rest is discarded
	pending  map[uint32]*pending
	named    map[uint32]int         // number of segments of unanswered calls per handle
	queue    []message              // in order; the head may be partly sent
	replies  struct{ n, bytes int } // in the queue; bytes of those that are continued
	ctrl     []message
	events   []Event
	hdr      wire.Header
	maxRead  int // limit that the peer reported by an error
	maxWrite int
	maxSegs  int
	refused  uint32 // header types that the peer rejects, as bits
	stats    Stats
}

// maxReplies bounds the queued replies: no further calls are served for a peer that has more outstanding and does not
// read its replies. maxReplyBytes bounds those that are continued: further ones are refused.
const (
	maxReplies    = 1024
	maxReplyBytes = 4 << 20
)

// phase is the state of an exchange of properties.
type phase uint8

const (
	phaseNone phase = iota
	phaseMiddle
	phaseFinal
)

// message is a queued message, which may be sent in several parts.
type message struct {
	hdr    wire.Header // of the last piece
	body   []byte
	off    int
	inv    uint32
	call   bool // counts as an outstanding call of ours
	pieces bool // may be continued
}

// parts identifies the parts of a continued message.
type parts struct {
	xid  uint32
	last wire.Type // CallInline or ReplyInline, the type of the last part; 0: there is no message
}

// has reports whether h is one of the parts.
func (p parts) has(h *wire.Header) bool {
	return p.last != 0 && h.XID == p.xid && (h.Type == p.last || h.Type == p.last-1)
}

// assembly is a continued message that is being received.
type assembly struct {
	parts
	buf   []byte
	total [2]int  // length of the whole, by each reading of rdma_remaining
	ok    [2]bool // which readings are still possible
}

// New returns a Session for a connection that was just established. For a client, PollTransmit then
// returns the first message.
func New(cfg Config) *Session {
	cfg.Window = max(cfg.Window, 2)
	cfg.Send1, cfg.Recv1 = max(cfg.Send1, 1024), max(cfg.Recv1, 1024)
	if cfg.Auth != nil { // version 1 has no host authentication
		cfg.Version, cfg.MinVersion = max(cfg.Version, 2), max(cfg.MinVersion, 2)
	}
	s := &Session{
		cfg: cfg, peer: wire.DefaultProperties(), pending: make(map[uint32]*pending), named: make(map[uint32]int),
		limit: 1, told: 1, grant1: 1, maxRead: math.MaxInt, maxWrite: math.MaxInt, maxSegs: math.MaxInt, authed: cfg.Auth == nil,
	}
	if !cfg.Server {
		if cfg.Version >= 2 {
			s.sendProps()
		} else {
			s.version = 1
			s.becomeReady()
		}
	}
	return s
}

// Version returns the version in use, or 0 if it is not yet negotiated.
func (s *Session) Version() int { return s.version }

// Peer returns the peer's properties.
func (s *Session) Peer() wire.Properties { return s.peer }

// Stats returns the counters.
func (s *Session) Stats() Stats { return s.stats }

// PollEvent returns the next event.
func (s *Session) PollEvent() (e Event, ok bool) {
	if len(s.events) == 0 {
		return Event{}, false
	}
	e = s.events[0]
	s.events[0] = Event{}
	s.events = s.events[1:]
	return e, true
}

func (s *Session) event(e Event) { s.events = append(s.events, e) }

func (s *Session) close(err error) {
	if !s.closed {
		s.closed = true
		s.queue, s.ctrl, s.replies.n, s.replies.bytes = nil, nil, 0, 0
		s.event(Event{Kind: EventClose, Err: err})
	}
}

func (s *Session) becomeReady() {
	if !s.ready && !s.closed {
		s.ready = true
		s.event(Event{Kind: EventReady})
	}
}

// Forget drops a call whose reply is no longer needed.
func (s *Session) Forget(xid uint32) { s.settle(xid) }

// settle removes a call from the outstanding ones, and returns it, or nil if it is not one of them.
func (s *Session) settle(xid uint32) *pending {
	p := s.pending[xid]
	if p == nil {
		return nil
	}
	delete(s.pending, xid)
	if p.got {
		s.flight1--
	}
	for i := range s.queue {
		m := &s.queue[i]
		if m.call && m.hdr.XID == xid && m.off == 0 {
			s.queue = append(s.queue[:i], s.queue[i+1:]...)
			break
		}
	}
	return p
}

func (s *Session) fail(xid uint32, err error) {
	if s.settle(xid) != nil {
		s.event(Event{Kind: EventFailure, XID: xid, Err: err})
	}
}

// sendLimit returns the length of the longest message that may be sent now, in bytes.
func (s *Session) sendLimit() int {
	if s.version == 1 {
		return s.cfg.Send1
	}
	return int(min(s.cfg.Props.SendSize, s.peer.RecvSize, 1<<30))
}

// recvLimit returns the length of the longest message that the peer may send.
func (s *Session) recvLimit() int {
	if s.version == 1 {
		return s.cfg.Recv1
	}
	return int(min(s.cfg.Props.RecvSize, s.peer.SendSize, 1<<30))
}

// SetVersion1 sets the Config fields of the same names. It must be called before the first message
// is sent.
func (s *Session) SetVersion1(send, recv int, inv Invalidation) {
	s.cfg.Send1, s.cfg.Recv1, s.cfg.Invalidate = max(send, 1024), max(recv, 1024), inv
}
