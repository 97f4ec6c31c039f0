// Package session is the DDP adaptation of SCTP: DDP streams over an association, after RFC 5043 with the enhanced setup of RFC 6581
// section 7, or after draft-ietf-rddp-sctp-00, the predecessor of the RFC with different code points.
//
// A Mux manages the DDP streams of one association. A DDP stream is the pair of SCTP streams with one number. It carries one session after
// another, each with its own start, end and sequence numbers (DDP-SSN). SCTP sends all chunks unordered, so a session restores DDP-SSN
// order itself; the payload of DDP segments is placed as it arrives.
//
// A Mux does no I/O and does not depend on sctp.Assoc. Its owner passes in arriving messages (HandleMessage) and acknowledgements (Acked),
// pushes the messages that PollControl returns, and puts the header that Begin returns before each DDP segment.
package session

import (
	"errors"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
)

// Profile selects the specification to follow.
type Profile uint8

// The profiles.
const (
	RFC5043 Profile = iota // with RFC 6581
	Draft                  // draft-ietf-rddp-sctp-00
)

func (p Profile) String() string {
	if p == Draft {
		return "draft-ietf-rddp-sctp-00"
	}
	return "RFC 5043"
}

// Adaptation Layer Indications (RFC 5043 5.1; draft 2.1).
const (
	adaptationDDP       = 1 // the draft: DDP without RDMA
	adaptationDraftRDMA = 2
)

// Payload Protocol Identifiers (RFC 5043 5.2; draft 2.2).
const (
	ppidSegment      = 16
	ppidControl      = 17
	ppidDraftSegment = 1
	ppidDraftControl = 2
)

// Segment returns the PPID of DDP segments.
func (p Profile) Segment() uint32 {
	if p == Draft {
		return ppidDraftSegment
	}
	return ppidSegment
}

// Control returns the PPID of session control messages.
func (p Profile) Control() uint32 {
	if p == Draft {
		return ppidDraftControl
	}
	return ppidControl
}

// firstSSN is the DDP-SSN that begins a session (RFC 5043 6.1; draft 2.2.1).
func (p Profile) firstSSN() uint16 {
	if p == Draft {
		return 1
	}
	return 0
}

// Configure sets the Adaptation Layer Indication of an association and those accepted from the peer. iwarpd runs RDMAP, so its indication
// in the draft is DDP+RDMA.
func (p Profile) Configure(c *sctp.Config) {
	c.Adaptation = adaptationDDP
	if p == Draft {
		c.Adaptation = adaptationDraftRDMA
	}
	c.Accept = []uint32{c.Adaptation}
}

// function is the function of a session control message.
type function uint8

const (
	fnNegotiate function = iota + 1
	fnInitiate
	fnAccept
	fnReject
	fnTerminate
)

// Function codes (RFC 5043 5.2.3, RFC 6581 section 7; draft 2.2.3).
var rfcCodes = [...]struct {
	fn       function
	enhanced bool
}{1: {fnInitiate, false}, 2: {fnAccept, false}, 3: {fnReject, false}, 4: {fnTerminate, false},
	5: {fnInitiate, true}, 6: {fnAccept, true}, 7: {fnReject, true}}

var draftCodes = [...]function{1: fnNegotiate, 2: fnInitiate, 3: fnAccept, 4: fnTerminate}

// decodeFunction reads a function code.
func (p Profile) decodeFunction(code uint16) (fn function, enhanced, ok bool) {
	if p == Draft {
		if code == 0 || int(code) >= len(draftCodes) {
			return 0, false, false
		}
		return draftCodes[code], false, true
	}
	if code == 0 || int(code) >= len(rfcCodes) {
		return 0, false, false
	}
	c := rfcCodes[code]
	return c.fn, c.enhanced, true
}

func (p Profile) code(fn function, enhanced bool) uint16 {
	if p == Draft {
		for c, f := range draftCodes {
			if f == fn {
				return uint16(c)
			}
		}
		return 0
	}
	for c, f := range rfcCodes {
		if f.fn == fn && f.enhanced == enhanced {
			return uint16(c)
		}
	}
	return 0
}

// MaxPrivate is the maximum private data of a message, including enhanced data (RFC 5043 5.2.3). The draft has no limit; the same one is
// used.
const MaxPrivate = 512

// Setup is the content of Initiate, Accept and Reject.
type Setup struct {
	Private  []byte
	Enhanced *mpa.EnhancedData // nil: the message is unenhanced
}

// Sink receives the DDP segments of a session. Keys of early segments are unique in a session while fewer than 2^31 segments are in flight.
type Sink interface {
	// Waits reports whether b, which is next in order, cannot be processed yet. Mux.Resume then asks again.
	Waits(b []byte) bool
	HandleULPDU(b []byte) *term.Error
	HandleEarly(key serial.Num, b []byte) bool
	DeliverEarly(key serial.Num) *term.Error
}

// State is the state of the session of a DDP stream.
type State uint8

// The states.
const (
	Idle        State = iota // no session; one may start
	Negotiating              // draft: the peer has sent a Negotiate
	Initiating               // our Initiate is outstanding
	Requested                // the peer's Initiate waits for the ULP
	Open                     // DDP segments may flow
	Ended                    // ended; its messages may still be in flight
)

var stateNames = [...]string{"idle", "negotiating", "initiating", "requested", "open", "ended"}

func (s State) String() string { return stateNames[s] }

// EventKind is the kind of an Event.
type EventKind uint8

// The events.
const (
	EventNegotiate  EventKind = iota + 1 // draft: the peer's Negotiate
	EventRequest                         // the peer's Initiate: Accept, Reject or Terminate
	EventOpen                            // our Initiate was accepted
	EventRejected                        // our Initiate was refused; Setup is nil if not by the ULP
	EventTerminated                      // the peer has ended the session
	EventFailed                          // this side found a violation, Err; the session is over
	EventIdle                            // nothing of the last session is in flight: the stream may have another
)

var eventNames = [...]string{"", "negotiate", "request", "open", "rejected", "terminated", "failed", "idle"}

func (k EventKind) String() string { return eventNames[k] }

// Event is an event of a DDP stream for the ULP.
type Event struct {
	Kind   EventKind
	Stream uint16
	Setup  *Setup // EventNegotiate, EventRequest, EventOpen, EventRejected
	Err    error  // EventFailed: an *Error
}

// Error is an illegal sequence or message. It ends the session, not the association.
type Error struct{ text string }

func (e *Error) Error() string { return "ddp over sctp: " + e.text }

// Violations.
var (
	ErrOrdered    = &Error{"message is not unordered"}
	ErrPPID       = &Error{"unknown payload protocol identifier"}
	ErrProfile    = &Error{"peer follows the other text (payload protocol identifier)"}
	ErrShort      = &Error{"message too short"}
	ErrFunction   = &Error{"unknown function code"}
	ErrEnhanced   = &Error{"enhanced message where none is allowed"}
	ErrPrivate    = &Error{"too much private data"}
	ErrTermData   = &Error{"Terminate with private data"}
	ErrSSN        = &Error{"DDP-SSN outside the window"}
	ErrSSNTwice   = &Error{"DDP-SSN came twice"}
	ErrNoSession  = &Error{"DDP segment outside a session"}
	ErrNoInitiate = &Error{"answer to no Initiate"}
	ErrCollision  = &Error{"Initiate from both sides"}
	ErrAgain      = &Error{"set-up message in a session that is set up"}
	ErrEarlyData  = &Error{"DDP segment before the session was accepted"}
	ErrKind       = &Error{"answer is not of the kind of the Initiate"}
	ErrNegotiate  = &Error{"Negotiate after Initiate or Accept"}
	ErrNegotiates = &Error{"too many Negotiates"}
)

// Errors of calls.
var (
	ErrState  = errors.New("ddp over sctp: not in this state of the session")
	ErrStream = errors.New("ddp over sctp: no such stream")
	ErrSize   = errors.New("ddp over sctp: too much private data")
)
