package mpa

import (
	"errors"
	"fmt"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Default time-outs, used for a zero in Config. The first two are those of soft-iWARP.
const (
	RequestTimeout  = 5 * time.Second  // responder, for the whole Request
	ReplyTimeout    = 10 * time.Second // initiator, for the whole Reply
	DecisionTimeout = 60 * time.Second // responder, for the ULP's Accept or Reject
)

// Config is the policy for one connection. The zero value is not valid: start from DefaultConfig.
type Config struct {
	// Rev is the highest revision, 1 or 2: what an initiator sends and the most that a responder accepts.
	Rev uint8
	// Enhanced enables RFC 6581: an initiator sets S, and a responder accepts Requests with S. It needs Rev 2.
	Enhanced bool

	// CRC is C. It must be true unless the administrator disables it (RFC 5044 section 4.4); CRCs are off only if both sides say false.
	CRC bool
	// Markers is M: the peer must send markers. Whether we send markers is the peer's choice.
	Markers bool

	// P2P makes an initiator request a peer-to-peer connection, in which it sends an RTR first. It needs Enhanced. A responder follows the
	// Request.
	P2P bool
	// RTR is the set of RTR kinds to offer or accept; empty means all.
	RTR RTRs

	// IRD and ORD are the local depths, 0 to 0x3FFE. An initiator offers them; a responder uses them if neither its ULP nor the Request
	// says otherwise.
	IRD, ORD int
	// MaxIRD is the highest IRD granted to a peer that asks for more than IRD, and MaxORD the highest ORD of a responder whose initiator
	// allows more than ORD. Values below IRD and ORD have no effect.
	MaxIRD, MaxORD int

	// PrivateData is sent in an initiator's Request.
	PrivateData []byte

	// Timeout limits the wait for the peer's frame: 0 means ReplyTimeout for an
	// initiator and RequestTimeout for a responder, negative no limit.
	Timeout time.Duration
	// Decision limits the wait for Accept or Reject: 0 means DecisionTimeout,
	// negative no limit.
	Decision time.Duration

	// RetryNoMarkers and RetryRev1 permit the retries of the same name.
	RetryNoMarkers, RetryRev1 bool
}

// DefaultConfig returns revision 2 with enhanced setup, CRCs, no markers requested, depths of 16, and both retries.
func DefaultConfig() Config {
	return Config{
		Rev: 2, Enhanced: true, CRC: true, RTR: AllRTRs,
		IRD: 16, ORD: 16, MaxIRD: 128, MaxORD: 128,
		RetryNoMarkers: true, RetryRev1: true,
	}
}

// Errors of the caller, not of the peer.
var (
	ErrConfig      = errors.New("mpa: the settings contradict each other")
	ErrPrivateData = errors.New("mpa: more private data than allowed")
	ErrState       = errors.New("mpa: no request waits for an answer")
)

// Validate returns ErrConfig, ErrDepth or ErrPrivateData if c is not valid.
func (c *Config) Validate() error {
	switch {
	case c.Rev < 1 || c.Rev > MaxRev, c.Enhanced && c.Rev < 2, c.P2P && !c.Enhanced, c.RTR&^AllRTRs != 0:
		return ErrConfig
	case !validDepth(c.IRD), !validDepth(c.ORD), c.MaxIRD >= NoNegotiation, c.MaxORD >= NoNegotiation:
		return ErrDepth
	case len(c.PrivateData) > maxPrivateData(c.Enhanced):
		return tooMuch(c.PrivateData, c.Enhanced)
	}
	return nil
}

// tooMuch returns ErrPrivateData with the limit and the length.
func tooMuch(private []byte, enhanced bool) error {
	return fmt.Errorf("%w: at most %d bytes, not %d", ErrPrivateData, maxPrivateData(enhanced), len(private))
}

func validDepth(n int) bool { return n >= 0 && n < NoNegotiation }

// maxPrivateData returns the most private data of the ULP, in bytes.
func maxPrivateData(enhanced bool) int {
	if enhanced {
		return MaxPrivateData - EnhancedLen
	}
	return MaxPrivateData
}

func (c *Config) rtrs() RTRs {
	if c.RTR == 0 {
		return AllRTRs
	}
	return c.RTR
}

// Retry advises to try again, on a new TCP connection, with other settings.
type Retry uint8

// Kinds of Retry.
const (
	RetryNone      Retry = iota
	RetryNoMarkers       // the peer cannot send markers
	RetryRev1            // the peer does not know revision 2
)

// String returns the name of the advice.
func (r Retry) String() string {
	switch r {
	case RetryNoMarkers:
		return "retry without markers"
	case RetryRev1:
		return "retry with revision 1"
	}
	return "no retry"
}

// Apply returns c changed as r says. With revision 1 the ULP must arrange the peer-to-peer model and the depths itself (RFC 6581 section
// 10).
func (r Retry) Apply(c Config) Config {
	switch r {
	case RetryNoMarkers:
		c.Markers = false
	case RetryRev1:
		c.Rev, c.Enhanced, c.P2P = 1, false, false
	}
	return c
}

// Causes of a failed startup, as in Error.Cause.
var (
	ErrTimeout        = errors.New("mpa: no startup frame arrived in time")
	ErrDecision       = errors.New("mpa: no answer from the ULP in time")
	ErrClosed         = errors.New("mpa: TCP connection closed before the startup frame")
	ErrBothInitiators = errors.New("mpa: both sides started as initiator")
	ErrBothResponders = errors.New("mpa: reply without a request")
	ErrRevision       = errors.New("mpa: revision not supported")
	ErrNotEnhanced    = errors.New("mpa: enhanced setup on one side only")
	ErrTrailing       = errors.New("mpa: bytes after the Request Frame")
	ErrRejected       = errors.New("mpa: rejected by the peer")
	ErrIRD            = errors.New("mpa: the responder requires more IRD than this side allows")
	ErrRTR            = errors.New("mpa: the responder accepts none of the RTRs that this side can send")
)

// Error is the reason why a startup did not reach Full Operation. errors.Is matches both Cause and Term.
type Error struct {
	Cause error
	// Term has the error code of RFC 5044 section 8 or RFC 6581 section 8; nil for a rejection and for local errors.
	Term *term.Error
	// Terminate means that the peer is in Full Operation and must be notified: enter Full Operation with Result and send Term in a
	// Terminate before closing. Otherwise close the TCP connection at once, except after a rejection, when it belongs to the ULP (RFC 5044
	// section 7.1.2, 3).
	Terminate bool
	// Retry is advice, as far as the Config permits it.
	Retry Retry
}

// Error implements error.
func (e *Error) Error() string {
	if e.Retry != RetryNone {
		return e.Cause.Error() + " (" + e.Retry.String() + ")"
	}
	return e.Cause.Error()
}

// Unwrap returns the cause and the violation, for errors.Is.
func (e *Error) Unwrap() []error {
	if e.Term == nil {
		return []error{e.Cause}
	}
	return []error{e.Cause, e.Term}
}

// EventKind is the kind of an Event.
type EventKind uint8

// Kinds of events.
const (
	EventRequest  EventKind = iota + 1 // responder: Frame needs Accept or Reject
	EventAccepted                      // Full Operation begins; initiator: Frame is the Reply
	EventRejected                      // the ULP rejected; initiator: Frame is the Reply, Err has the advice
	EventFailed                        // Err has the cause and what to do
)

// Event is an output of a Startup. Frame is the peer's frame as received: the ULP needs its IRD and ORD (RFC 6581 section 9.1). Its Private
// Data stays valid as long as the Startup.
type Event struct {
	Kind  EventKind
	Frame Frame
	Err   *Error
}

// Params are the parameters of Full Operation.
type Params struct {
	CRC         bool // CRCs are generated and checked
	SendMarkers bool // the peer wants markers
	RecvMarkers bool // the peer sends markers
	Rev         uint8
	Enhanced    bool
	IRD, ORD    int
	// RTR is what the initiator sends first and the responder waits for; RTRNone outside of the peer-to-peer model.
	RTR       RTR
	Initiator bool
}

type startupState uint8

const (
	stateWaitFrame startupState = iota // waiting for the peer's frame
	stateWaitULP                       // waiting for Accept or Reject
	stateDone
)

// Startup is one side of the Startup Phase of a connection. It does no I/O and reads no clock; it is not safe for concurrent use.
//
// Inputs are HandleStream, HandleTimeout, HandleClosed, Accept and Reject. After each, and after the constructor, drain PollTransmit, then
// PollEvent, then call Deadline. Initiator: NewInitiator, send, feed the stream until EventAccepted, EventRejected or EventFailed.
// Responder: NewResponder, feed the stream until EventRequest, then Accept or Reject, send. Bytes that HandleStream did not consume belong
// to the caller: after EventAccepted they are FPDUs, after EventRejected the ULP's stream.
type Startup struct {
	cfg       Config
	initiator bool
	state     startupState
	deadline  clock.Time

	in     [maxFrameLen]byte // the peer's frame as far as received
	held   int
	peer   Frame // decoded from in
	sent   Frame
	neg    Negotiation
	out    []byte
	event  Event // at most one is pending
	params Params
}

// NewInitiator starts the side that sends first. PollTransmit returns the Request; if cfg is not valid EventFailed is pending instead.
func NewInitiator(cfg Config, now clock.Time) *Startup {
	s := &Startup{cfg: cfg, initiator: true}
	s.neg = NewNegotiation(&s.cfg)
	if err := cfg.Validate(); err != nil {
		s.failed(&Error{Cause: err})
		return s
	}
	s.sent = Frame{CRC: cfg.CRC, Markers: cfg.Markers, Rev: cfg.Rev, PrivateData: cfg.PrivateData}
	s.sent.setData(s.neg.Request())
	s.send()
	s.arm(now, cfg.Timeout, ReplyTimeout)
	return s
}

// NewResponder starts the side that waits for a Request. If cfg is not valid EventFailed is pending.
func NewResponder(cfg Config, now clock.Time) *Startup {
	s := &Startup{cfg: cfg}
	s.neg = NewNegotiation(&s.cfg)
	if err := cfg.Validate(); err != nil {
		s.failed(&Error{Cause: err})
		return s
	}
	s.arm(now, cfg.Timeout, RequestTimeout)
	return s
}

// send encodes s.sent, whose sizes were checked before.
func (s *Startup) send() {
	b, err := s.sent.Append(make([]byte, 0, s.sent.Len()))
	if err != nil {
		panic(err)
	}
	s.out = b
}

// arm sets the deadline to now plus d, or plus def if d is zero.
func (s *Startup) arm(now clock.Time, d, def time.Duration) {
	switch {
	case d < 0:
		s.deadline = 0
	case d == 0:
		s.deadline = now.Add(def)
	default:
		s.deadline = now.Add(d)
	}
}

// HandleStream processes the next bytes of the stream. It consumes only those of the peer's startup frame, and none once the startup is
// over. The error, an *Error, is also in EventFailed.
func (s *Startup) HandleStream(now clock.Time, b []byte) (consumed int, err error) {
	switch {
	case len(b) == 0 || s.state == stateDone:
		return 0, nil
	case s.state == stateWaitULP:
		// The initiator must not send anything before it has the Reply.
		return 0, s.malformed(ErrTrailing)
	}
	before := s.held
	s.held += copy(s.in[s.held:], b)
	f, n, derr := Decode(s.in[:s.held])
	switch {
	case derr == ErrShort:
		return s.held - before, nil
	case derr != nil:
		return s.held - before, s.malformed(derr)
	}
	s.peer = f
	consumed = n - before
	s.held = n
	if s.initiator {
		return consumed, s.handleReply()
	}
	return consumed, s.handleRequest(now, len(b) > consumed)
}

// HandleClosed reports that the peer has closed or reset the TCP connection.
func (s *Startup) HandleClosed() {
	if s.state == stateDone {
		return
	}
	e := &Error{Cause: ErrClosed, Term: term.ErrMPAClosed}
	if s.initiator && s.held == 0 && s.cfg.Enhanced {
		// A peer that does not know the S flag treats the Request as malformed and closes (RFC 6581 section 10).
		e.Retry = s.allow(RetryRev1)
	}
	s.failed(e)
}

// HandleTimeout ends a wait whose deadline has passed. An early call does nothing.
func (s *Startup) HandleTimeout(now clock.Time) {
	if !s.deadline.Due(now) {
		return
	}
	if s.state == stateWaitULP {
		s.failed(&Error{Cause: ErrDecision})
		return
	}
	s.failed(&Error{Cause: ErrTimeout, Term: term.ErrMPAClosed})
}

// Deadline returns when HandleTimeout must be called, or zero for never.
func (s *Startup) Deadline() clock.Time { return s.deadline }

// PollTransmit returns the bytes of our startup frame, once. They must be written at once, so that they are in one segment with nothing
// after them.
func (s *Startup) PollTransmit() ([]byte, bool) {
	b := s.out
	s.out = nil
	return b, b != nil
}

// PollEvent returns the next event.
func (s *Startup) PollEvent() (Event, bool) {
	ev := s.event
	s.event = Event{}
	return ev, ev.Kind != 0
}

// Result returns the parameters of Full Operation. It is valid after EventAccepted, and after an EventFailed that asks for a Terminate.
func (s *Startup) Result() Params { return s.params }

func (s *Startup) done(ev Event) {
	s.state, s.deadline, s.event = stateDone, 0, ev
}

func (s *Startup) failed(e *Error) error {
	s.done(Event{Kind: EventFailed, Frame: s.peer, Err: e})
	return e
}

// malformed ends the startup because of a malformed frame. TCP is closed at once; a responder sends no Reply (RFC 5044 sections 7.1.2 and
// 8).
func (s *Startup) malformed(cause error) error {
	return s.failed(&Error{Cause: cause, Term: term.ErrMPAFrame})
}

func (s *Startup) allow(r Retry) Retry {
	if r == RetryNoMarkers && !s.cfg.RetryNoMarkers || r == RetryRev1 && !s.cfg.RetryRev1 {
		return RetryNone
	}
	return r
}
