package mpa

import (
	"errors"
	"fmt"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Time-outs that a zero in Config stands for. The first two are soft-iWARP's.
const (
	RequestTimeout  = 5 * time.Second  // responder, for the whole Request
	ReplyTimeout    = 10 * time.Second // initiator, for the whole Reply
	DecisionTimeout = 60 * time.Second // responder, for the ULP's Accept or Reject
)

// Config is the policy for one connection. The zero value is not a good one:
// start from DefaultConfig.
type Config struct {
	// Rev is the highest revision: what an initiator sends and the highest that
	// a responder takes, 1 or 2.
	Rev uint8
	// Enhanced is the use of RFC 6581: an initiator sets S, a responder takes
	// Requests that have it set. It needs Rev 2.
	Enhanced bool
	// AllowRev0 makes a responder take Requests of the RDMA Consortium's
	// revision, with markers and CRCs both ways (RFC 5044 appendix C).
	AllowRev0 bool

	// CRC is C. It must be true unless the administrator has asked for false
	// (RFC 5044 section 4.4); CRCs are off only if both sides say false.
	CRC bool
	// Markers is M: the peer must put markers in what it sends. Whether we send
	// markers is for the peer to say.
	Markers bool

	// P2P makes an initiator ask for a peer-to-peer connection, in which it
	// sends an RTR first. It needs Enhanced. A responder does as the Request says.
	P2P bool
	// RTR holds the kinds of RTR to offer or take; empty means all.
	RTR RTRs

	// IRD and ORD are the local depths, 0 to 0x3FFE. An initiator offers them; a
	// responder runs with them if neither its ULP nor the Request gives others.
	IRD, ORD int
	// MaxIRD is the highest IRD for a peer that wants more than IRD, MaxORD the
	// highest ORD of a responder whose initiator takes more than ORD. Values below
	// IRD and ORD allow no more than these.
	MaxIRD, MaxORD int
	// ManualIRD and ManualORD keep the depth out of the negotiation: 0x3FFF is
	// sent for it and the ULPs agree on it by themselves.
	ManualIRD, ManualORD bool

	// PrivateData goes into an initiator's Request.
	PrivateData []byte
	// MaxPrivateData limits what the ULP may send, in octets; 0 means as much as
	// fits: 512, or 508 beside enhanced data. soft-iWARP and cxgb4 take 252.
	MaxPrivateData int

	// Timeout limits the wait for the peer's frame: 0 means ReplyTimeout for an
	// initiator and RequestTimeout for a responder, negative no limit.
	Timeout time.Duration
	// Decision limits the wait for Accept or Reject: 0 means DecisionTimeout,
	// negative no limit.
	Decision time.Duration

	// RetryNoMarkers and RetryRev1 allow the hints of these names.
	RetryNoMarkers, RetryRev1 bool
}

// DefaultConfig returns revision 2 with enhanced setup, CRCs, no markers asked
// for, depths of 16, and both retries.
func DefaultConfig() Config {
	return Config{
		Rev: 2, Enhanced: true, CRC: true, RTR: AllRTRs,
		IRD: 16, ORD: 16, MaxIRD: 128, MaxORD: 128,
		RetryNoMarkers: true, RetryRev1: true,
	}
}

// Errors of the use of this package, not of the peer.
var (
	ErrConfig      = errors.New("mpa: the settings contradict each other")
	ErrPrivateData = errors.New("mpa: more private data than allowed")
	ErrState       = errors.New("mpa: no request waits for an answer")
)

// Validate reports ErrConfig, ErrDepth or ErrPrivateData.
func (c *Config) Validate() error {
	switch {
	case c.Rev < 1 || c.Rev > MaxRev, c.Enhanced && c.Rev < 2, c.P2P && !c.Enhanced, c.RTR&^AllRTRs != 0:
		return ErrConfig
	case !validDepth(c.IRD), !validDepth(c.ORD), c.MaxIRD >= NoNegotiation, c.MaxORD >= NoNegotiation:
		return ErrDepth
	case len(c.PrivateData) > c.maxPrivateData(c.Enhanced):
		return c.tooMuch(c.PrivateData, c.Enhanced)
	}
	return nil
}

// tooMuch is ErrPrivateData with the numbers.
func (c *Config) tooMuch(private []byte, enhanced bool) error {
	return fmt.Errorf("%w: at most %d octets, not %d", ErrPrivateData, c.maxPrivateData(enhanced), len(private))
}

func validDepth(n int) bool { return n >= 0 && n < NoNegotiation }

func (c *Config) maxPrivateData(enhanced bool) int {
	n := MaxPrivateData
	if enhanced {
		n -= EnhancedLen
	}
	if c.MaxPrivateData > 0 {
		n = min(n, c.MaxPrivateData)
	}
	return n
}

func (c *Config) rtrs() RTRs {
	if c.RTR == 0 {
		return AllRTRs
	}
	return c.RTR
}

// Retry is advice to try again, on a new TCP connection, with other settings.
type Retry uint8

// Kinds of advice.
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

// Apply returns c changed as r says. With revision 1 the peer-to-peer model and
// the negotiation of depths are the ULP's own business (RFC 6581 section 10).
func (r Retry) Apply(c Config) Config {
	switch r {
	case RetryNoMarkers:
		c.Markers = false
	case RetryRev1:
		c.Rev, c.Enhanced, c.P2P = 1, false, false
	}
	return c
}

// Reasons for the end of a startup: the Cause of an Error.
var (
	ErrTimeout        = errors.New("mpa: no startup frame in time")
	ErrDecision       = errors.New("mpa: no answer from the ULP in time")
	ErrClosed         = errors.New("mpa: TCP connection closed before the startup frame")
	ErrBothInitiators = errors.New("mpa: both sides started as initiator")
	ErrBothResponders = errors.New("mpa: reply without a request")
	ErrRevision       = errors.New("mpa: revision not supported")
	ErrNotEnhanced    = errors.New("mpa: enhanced setup on one side only")
	ErrTrailing       = errors.New("mpa: bytes after the Request Frame")
	ErrRejected       = errors.New("mpa: rejected by the peer")
	ErrIRD            = errors.New("mpa: the responder needs more IRD than there is")
	ErrRTR            = errors.New("mpa: the responder takes no RTR that can be sent")
)

// Error is why a startup did not end in Full Operation. errors.Is finds both
// the Cause and the Term in it.
type Error struct {
	Cause error
	// Term has the error code of RFC 5044 section 8 or RFC 6581 section 8; nil
	// for a rejection and for errors of our own side.
	Term *term.Error
	// Terminate says that the peer is in Full Operation and must be told: enter
	// Full Operation with Result and send Term in a Terminate before closing.
	// Otherwise the TCP connection is closed at once, except for a rejection,
	// after which it belongs to the ULP (RFC 5044 section 7.1.2, 3).
	Terminate bool
	// Retry is advice, where the Config allows it.
	Retry Retry
}

// Error implements error.
func (e *Error) Error() string {
	if e.Retry != RetryNone {
		return e.Cause.Error() + " (" + e.Retry.String() + ")"
	}
	return e.Cause.Error()
}

// Unwrap gives errors.Is the cause and the violation.
func (e *Error) Unwrap() []error {
	if e.Term == nil {
		return []error{e.Cause}
	}
	return []error{e.Cause, e.Term}
}

// EventKind says what happened.
type EventKind uint8

// Kinds of events.
const (
	EventRequest  EventKind = iota + 1 // responder: Frame asks for Accept or Reject
	EventAccepted                      // Full Operation begins; initiator: Frame is the Reply
	EventRejected                      // the ULP said no; initiator: Frame is the Reply, Err has the advice
	EventFailed                        // Err says why and what to do
)

// Event is an output of a Startup. Frame is the peer's, as it was received: its
// IRD and ORD are for the ULP to know (RFC 6581 section 9.1). Its Private Data
// stays valid as long as the Startup.
type Event struct {
	Kind  EventKind
	Frame Frame
	Err   *Error
}

// Params is what Full Operation runs with.
type Params struct {
	CRC         bool // CRCs are generated and checked
	SendMarkers bool // the peer wants markers
	RecvMarkers bool // the peer sends markers
	Rev         uint8
	Enhanced    bool
	IRD, ORD    int
	// RTR is what the initiator sends first and the responder waits for;
	// RTRNone outside of the peer-to-peer model.
	RTR       RTR
	Initiator bool
}

type startupState uint8

const (
	stateWaitFrame startupState = iota // for the peer's frame
	stateWaitULP                       // for Accept or Reject
	stateDone
)

// Startup is the Startup Phase of one connection, on one side. It does no I/O
// and reads no clock; one goroutine at a time may use it.
//
// Inputs are HandleStream, HandleTimeout, HandleClosed, Accept and Reject. After
// each, and after the constructor, drain PollTransmit, then PollEvent, then ask
// Deadline. An initiator: NewInitiator, send, feed the stream until
// EventAccepted, EventRejected or EventFailed. A responder: NewResponder, feed
// the stream until EventRequest, then Accept or Reject, send. Octets that
// HandleStream did not consume are the caller's: after EventAccepted they are
// FPDUs, after EventRejected the ULP's stream.
type Startup struct {
	cfg       Config
	initiator bool
	state     startupState
	deadline  clock.Time

	in     [MaxFrameLen]byte // the peer's frame as far as it came
	held   int
	peer   Frame // decoded from in
	sent   Frame
	neg    Negotiation
	out    []byte
	event  Event // at most one is pending
	params Params
}

// NewInitiator starts the side that sends first. PollTransmit has the Request;
// EventFailed follows at once if cfg is not valid.
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

// NewResponder starts the side that waits for a Request. EventFailed follows at
// once if cfg is not valid.
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

// send makes the octets of s.sent, whose sizes were checked before.
func (s *Startup) send() {
	b, err := s.sent.Append(make([]byte, 0, s.sent.Len()))
	if err != nil {
		panic(err)
	}
	s.out = b
}

// arm sets the deadline d after now, or def after now for a d of zero.
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

// HandleStream takes the next octets of the stream. It consumes those of the
// peer's startup frame and no more; once the startup is over, none. The error,
// an *Error, is also in EventFailed.
func (s *Startup) HandleStream(now clock.Time, b []byte) (consumed int, err error) {
	switch {
	case len(b) == 0 || s.state == stateDone:
		return 0, nil
	case s.state == stateWaitULP:
		// The initiator may send nothing before it has the Reply.
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

// HandleClosed says that the peer has closed or reset the TCP connection.
func (s *Startup) HandleClosed(now clock.Time) {
	if s.state == stateDone {
		return
	}
	e := &Error{Cause: ErrClosed, Term: term.ErrMPAClosed}
	if s.initiator && s.held == 0 && s.cfg.Enhanced {
		// So does a peer to which the S flag makes the Request malformed
		// (RFC 6581 section 10).
		e.Retry = s.allow(RetryRev1)
	}
	s.failed(e)
}

// HandleTimeout ends a wait that has lasted too long. Calling it early does
// nothing.
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

// Deadline returns when HandleTimeout must be called, zero for never.
func (s *Startup) Deadline() clock.Time { return s.deadline }

// PollTransmit returns the octets of our startup frame, once. They must leave
// in one piece, so that they are in one segment, with nothing behind them.
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

// Result returns what Full Operation runs with. It is valid after EventAccepted,
// and after an EventFailed that asks for a Terminate.
func (s *Startup) Result() Params { return s.params }

// Peer returns the peer's frame, as in the events.
func (s *Startup) Peer() Frame { return s.peer }

func (s *Startup) done(ev Event) {
	s.state, s.deadline, s.event = stateDone, 0, ev
}

func (s *Startup) failed(e *Error) error {
	s.done(Event{Kind: EventFailed, Frame: s.peer, Err: e})
	return e
}

// malformed ends the startup by a frame that is not what it must be. TCP is
// closed at once; a responder sends no Reply (RFC 5044 sections 7.1.2 and 8).
func (s *Startup) malformed(cause error) error {
	return s.failed(&Error{Cause: cause, Term: term.ErrMPAFrame})
}

func (s *Startup) allow(r Retry) Retry {
	if r == RetryNoMarkers && !s.cfg.RetryNoMarkers || r == RetryRev1 && !s.cfg.RetryRev1 {
		return RetryNone
	}
	return r
}
