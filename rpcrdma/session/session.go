// Package session is the state of one RPC-over-RDMA connection, requester and
// responder in one: version negotiation, credits, transport properties, the
// formats of calls and replies, and errors. It is sans-I/O: bytes of received
// Sends go in by HandleMessage, bytes to be sent come out of PollTransmit, and what
// happened out of PollEvent. Memory and RDMA operations are the caller's: a plan says what
// to register, read and write.
//
// After each input drain PollTransmit and PollEvent. Nothing here is safe for two.
package session

import (
	"errors"
	"fmt"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Limits bound what a peer can make this end hold or move.
type Limits struct {
	Message     int    // bytes of an RPC message, chunks of data items apart
	ReadChunks  int    // data item chunks of a call; 0: none
	WriteChunks int    // Write chunks of a call; 0: none
	Segments    int    // segments of a chunk
	Chunk       uint64 // bytes of a Read chunk
}

// Config is what a Session is made of. Start from DefaultConfig.
type Config struct {
	Server     bool
	Version    int // highest version to speak; a client starts with it
	MinVersion int
	Props      wire.Properties // ours
	Extra      []wire.Prop     // more properties to send
	// Window is how many messages the peer may send ahead, at least 2. Window+1
	// Receives of max(Props.RecvSize, Recv1) bytes must be posted at all times.
	Window int
	// Send1 and Recv1 are the inline thresholds of version 1, which the private
	// data of the connection told (RFC 8797).
	Send1, Recv1 int
	Invalidate   Invalidation
	Limits       Limits
	// Continue is how many messages a call may be cut into; longer ones go by a
	// Call chunk. Replies of any length are continued while those that wait to be
	// sent take no more than 16 MiB. Below 2 this end continues neither.
	Continue int
	Auth     Handshake // nil: no host authentication
}

// Invalidation says which Sends of a responder may invalidate an STag.
type Invalidation uint8

// Invalidations, by the R flags in the private data of the connection (RFC 8797
// section 4.1).
const (
	InvalidateNamed Invalidation = iota // no private data: replies of version 2, whose calls name the STag
	InvalidateNone                      // a peer has cleared its flag: none
	InvalidateAny                       // both have set it: replies of version 1 too
)

// DefaultConfig returns a Config that is good for NFS.
func DefaultConfig(server bool) Config {
	return Config{
		Server: server, Version: 2, MinVersion: 1, Props: wire.DefaultProperties(), Window: 64, Send1: 1024, Recv1: 1024,
		Limits:   Limits{Message: 1 << 20, ReadChunks: 4, WriteChunks: 4, Segments: 64, Chunk: 4 << 20},
		Continue: 8,
	}
}

// Handshake is one end of a host authentication (draft section 5.2.6). The
// client's Step is called first, with nil. Material longer than a message is
// cut into pieces, and Step is called with each: a handshake frames its own.
type Handshake interface {
	// Step takes the peer's material and returns ours, which may be none. done:
	// this end needs no more, and has authenticated the peer. An error ends the
	// connection.
	Step(in []byte) (out []byte, done bool, err error)
}

// Errors that an RPC or a session ends with.
var (
	ErrProtocol  = errors.New("rpcrdma: the peer violates the protocol")
	ErrVersion   = errors.New("rpcrdma: no version in common")
	ErrAuth      = errors.New("rpcrdma: host authentication failed")
	ErrTooLong   = errors.New("rpcrdma: message is too long for the connection")
	ErrReverse   = errors.New("rpcrdma: the peer takes no such call in the reverse direction")
	ErrCallOnly  = errors.New("rpcrdma: version 1 has no calls without a reply")
	ErrDuplicate = errors.New("rpcrdma: a call with this XID is outstanding")
)

// FailureError is an error that the responder reported.
type FailureError struct{ wire.Failure }

func (e *FailureError) Error() string {
	switch e.Code {
	case wire.ErrVers:
		return fmt.Sprintf("rpcrdma: peer reports %v: it speaks versions %d to %d", e.Code, e.Low, e.High)
	case wire.ErrReadChunks, wire.ErrWriteChunks, wire.ErrSegments:
		return fmt.Sprintf("rpcrdma: peer reports %v: at most %d", e.Code, e.Max)
	case wire.ErrWriteResource:
		return fmt.Sprintf("rpcrdma: peer reports %v: chunk %d, %d bytes needed", e.Code, e.Index, e.Needed)
	case wire.ErrReplyResource:
		return fmt.Sprintf("rpcrdma: peer reports %v: %d bytes needed", e.Code, e.Needed)
	}
	return fmt.Sprintf("rpcrdma: peer reports %v", e.Code)
}

// EventKind says what an Event tells.
type EventKind uint8

// Events.
const (
	EventReady   EventKind = iota + 1 // version and credits are settled: calls may be planned
	EventCall                         // Call: a call arrived
	EventReply                        // XID, Reply: a reply to our call
	EventFailure                      // XID, Err: our call got no reply
	EventClose                        // Err: the connection must be closed
)

// Event is something that happened.
type Event struct {
	Kind  EventKind
	XID   uint32
	Call  *Call
	Reply *Reply
	Err   error
}

// Call is a call that arrived. Its memory is its own.
type Call struct {
	XID   uint32
	Inv   uint32             // the STag that the reply may invalidate; 0: none
	Body  []byte             // the message, data items removed; nil with External
	Ext   []wire.ReadSegment // External: the body's segments
	Reads []wire.ReadSegment // data items, by Position
	// Writes and Reply are what the requester provided for results.
	Writes []wire.Chunk
	Reply  wire.Chunk

	answered bool
}

// Reply is a reply that arrived.
type Reply struct {
	Body   []byte       // the message, data items removed; nil: it is in the Reply chunk
	Writes []wire.Chunk // with the lengths that were written; nil: none of them was used
	Ext    uint64       // bytes in the Reply chunk
}

// pending is a call of ours without a reply.
type pending struct {
	writes []wire.Chunk
	reply  wire.Chunk
	got    bool   // version 1: sent
	types  uint32 // bits of the header types that it takes
}

// Stats counts.
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
	told               uint32 // the edge that we told last
	busy               int    // calls that hold a credit
	payload            bool   // a message other than a Grant came since we told
	grant1             int    // version 1: credits granted to us
	flight1            int    // version 1: our calls without reply
	propsSent, propsIn phase
	auth               struct {
		on, done, started bool
	}

	asm      assembly
	pending  map[uint32]*pending
	named    map[uint32]int          // how many segments of unanswered calls have a handle
	queue    []message               // in order; the head may be sent in part
	replies  struct{ n, octets int } // in the queue
	ctrl     []message
	events   []Event
	hdr      wire.Header
	maxRead  int // what the peer told us of its limits by errors; -1: nothing
	maxWrite int
	maxSegs  int
	refused  uint32 // bits of types that the peer does not take
	stats    Stats
}

// maxReplies and maxReplyBytes bound the replies that wait to be sent. A peer
// that has so many calls under way, and takes no reply, is not served on.
const (
	maxReplies    = 1024
	maxReplyBytes = 16 << 20
)

// phase is how far an exchange of properties is.
type phase uint8

const (
	phaseNone phase = iota
	phaseMiddle
	phaseFinal
)

// message is one to be sent, perhaps in several pieces.
type message struct {
	hdr    wire.Header // of the last piece
	body   []byte
	off    int
	inv    uint32
	call   bool // counts as an outstanding call of ours
	pieces bool // may be continued
	answer bool // an Error, of the version vers: that of what it answers
	vers   uint32
}

// assembly is a continued message that is being received.
type assembly struct {
	active     bool
	reply      bool
	xid        uint32
	buf        []byte
	total      [2]int  // bytes of the whole by either reading of rdma_remaining
	ok         [2]bool // which readings hold
	poison     bool    // the rest of poisonXID is discarded
	poisonXID  uint32
	poisonType wire.Type
}

// New makes a Session for a connection that was just established. A client's
// PollTransmit has the first message.
func New(cfg Config) *Session {
	cfg.Window = max(cfg.Window, 2)
	cfg.Send1, cfg.Recv1 = max(cfg.Send1, 1024), max(cfg.Recv1, 1024)
	s := &Session{
		cfg: cfg, peer: wire.DefaultProperties(), pending: make(map[uint32]*pending), named: make(map[uint32]int),
		limit: 1, told: 1, grant1: 1, maxRead: -1, maxWrite: -1, maxSegs: -1,
	}
	s.auth.on = cfg.Auth != nil
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

// Version returns the version in use, 0: not settled.
func (s *Session) Version() int { return s.version }

// Peer returns the peer's properties.
func (s *Session) Peer() wire.Properties { return s.peer }

// Stats returns the counters.
func (s *Session) Stats() Stats { return s.stats }

// Outstanding returns how many calls of ours have no reply.
func (s *Session) Outstanding() int { return len(s.pending) }

// Ready reports whether calls may be planned.
func (s *Session) Ready() bool { return s.ready }

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
		s.queue, s.ctrl, s.replies.n, s.replies.octets = nil, nil, 0, 0
		s.event(Event{Kind: EventClose, Err: err})
	}
}

func (s *Session) becomeReady() {
	if !s.ready && !s.closed {
		s.ready = true
		s.event(Event{Kind: EventReady})
	}
}

// Forget drops a call of ours whose reply is not awaited any more.
func (s *Session) Forget(xid uint32) {
	if p := s.pending[xid]; p != nil {
		s.settle(xid)
	}
}

// settle takes a call out of the outstanding ones.
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

// sendLimit is the longest message that may be sent now, in bytes.
func (s *Session) sendLimit() int {
	if s.version == 1 {
		return s.cfg.Send1
	}
	return int(min(s.cfg.Props.SendSize, s.peer.RecvSize, 1<<30))
}

// recvLimit is the longest message that the peer may send.
func (s *Session) recvLimit() int {
	if s.version == 1 {
		return s.cfg.Recv1
	}
	return int(min(s.cfg.Props.RecvSize, s.peer.SendSize, 1<<30))
}

// SetVersion1 sets what Config has of the same names, before the first message
// goes out.
func (s *Session) SetVersion1(send, recv int, inv Invalidation) {
	s.cfg.Send1, s.cfg.Recv1, s.cfg.Invalidate = max(send, 1024), max(recv, 1024), inv
}
