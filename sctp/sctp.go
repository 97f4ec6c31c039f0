// Package sctp is the SCTP of the data plane: RFC 9260 with the Adaptation Layer
// Indication of RFC 5061 and, as an option, the UDP encapsulation of RFC 6951. It
// does what DDP asks of it (RFC 5043): messages that fit in one packet are sent
// whole and unordered, and received messages are delivered at once. Ordered and
// fragmented messages of a peer are supported.
//
// The package does no I/O. An Assoc is driven by one owner that passes the time
// in: HandlePacket, HandleTimeout and the calls of the application are inputs;
// PollData, PollTransmit, PollReleased and PollEvent give outputs and are drained
// after each input; Deadline then says when HandleTimeout is due. A call of
// HandleTimeout that comes too early does nothing. Time never runs backwards and
// is never the zero Time.
//
// User data never passes through the package. What is to be sent is pushed as a
// message, a Buf (a handle that means something to the owner only) and a length;
// it belongs to the Assoc until PollReleased gives it back, so that the owner's
// buffers are the retransmission queue. Of a packet that arrives the Assoc reads
// headers and control chunks; PollData says where user data lies in it and what to
// do with them. The few that have to wait, as they belong to a fragmented message
// or are ahead of their turn in an ordered stream, are kept by the owner under a
// small number that the Assoc gives them.
package sctp

import "errors"

// Buf is the handle of octets that live with the owner of an Assoc.
type Buf uint32

// NoBuf is no octets.
const NoBuf Buf = ^Buf(0)

// UDPPort is the IANA port for UDP encapsulation (RFC 6951 5.1).
const UDPPort = 9899

// State is a state of RFC 9260 section 4. A closed association has no state of
// its own on the wire: the owner forgets it.
type State uint8

// The states.
const (
	Closed State = iota
	CookieWait
	CookieEchoed
	Established
	ShutdownPending
	ShutdownSent
	ShutdownReceived
	ShutdownAckSent
)

var stateNames = [...]string{"CLOSED", "COOKIE-WAIT", "COOKIE-ECHOED", "ESTABLISHED", "SHUTDOWN-PENDING",
	"SHUTDOWN-SENT", "SHUTDOWN-RECEIVED", "SHUTDOWN-ACK-SENT"}

func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "unknown"
}

// Event is something that happened to an Assoc.
type Event uint8

// The events.
const (
	EventUp       Event = iota + 1 // the association is established
	EventRestart                   // the peer has begun anew: all that was in flight either way is lost
	EventShutdown                  // the peer has begun to shut down: nothing more can be pushed
	EventClosed                    // the state is gone; Err says why
)

var eventNames = [...]string{EventUp: "up", EventRestart: "restart", EventShutdown: "shutdown", EventClosed: "closed"}

func (e Event) String() string {
	if int(e) < len(eventNames) && eventNames[e] != "" {
		return eventNames[e]
	}
	return "none"
}

// Reasons for the end of an association, as Assoc.Err gives them. An orderly end
// has none; an ABORT of the peer's is an *AbortError.
var (
	ErrTimeout     = errors.New("sctp: association timed out")
	ErrAborted     = errors.New("sctp: association aborted here")
	ErrAdaptation  = errors.New("sctp: peer has another adaptation layer")
	ErrProtocol    = errors.New("sctp: protocol violation by peer")
	ErrNoRoom      = errors.New("sctp: peer's message does not fit in the receive buffer")
	ErrUnreachable = errors.New("sctp: destination unreachable")
	ErrStreams     = errors.New("sctp: peer grants too few streams")
)

// AbortError is the ABORT of the peer. Cause is its first error cause, 0 if it
// gave none.
type AbortError struct{ Cause Cause }

func (e *AbortError) Error() string { return "sctp: association aborted by peer: " + e.Cause.String() }

// Act is what the owner does with user data that PollData reports.
type Act uint8

const (
	// Deliver: octets [Off,Off+Len) of the packet in hand are the message, or the
	// next piece of one.
	Deliver Act = iota + 1
	// Keep: copy octets [Off,Off+Len) of the packet in hand aside, under the number
	// Slot.
	Keep
	// DeliverKept: what was kept under Slot, Len octets, is the message or the next
	// piece of one. Slot is free then.
	DeliverKept
	// Forget: what was kept under Slot is of no use.
	Forget
)

// Data is user data, and what becomes of them. Begin and End say which pieces of
// their message they are: pieces follow one another with no other data between.
type Data struct {
	Act        Act
	Stream     uint16
	SSN        uint16 // means nothing when Unordered
	PPID       uint32
	Unordered  bool
	Begin, End bool
	Slot       int
	Off, Len   int
}

// Message is a message to be sent: Len octets, 1 to MaxMessage, in Buf.
type Message struct {
	Stream uint16
	PPID   uint32
	Urgent bool // the peer should acknowledge at once (RFC 7053)
	Buf    Buf
	Len    int
}

// MaxParts is how many messages one packet carries at most.
const MaxParts = 32

// Part is a DATA chunk of a packet to be sent: its header, then Len octets of Buf,
// then Pad zero octets.
type Part struct {
	Hdr [dataHeader]byte
	Buf Buf
	Len int
	Pad int
}

// Out is a packet to be sent: Head (common header and control chunks, valid until
// the next call of the Assoc), then the Parts. The checksum is the owner's to
// write, by SetChecksum.
type Out struct {
	Head       []byte
	Parts      [MaxParts]Part
	N          int
	Len        int    // octets of the packet
	Path       int    // index of the path that it goes to
	UDP        uint16 // the port there, when it is encapsulated
	Retransmit bool
	Fragment   bool // larger than the path's MTU: has to leave as IP fragments
	Probe      bool // a HEARTBEAT for path verification, failure detection or the path's MTU
}

// dataHeader is a chunk header with the fixed fields of DATA.
const dataHeader = 16
