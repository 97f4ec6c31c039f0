// Package sctp is the SCTP of the data plane: RFC 9260 with the Adaptation Layer Indication of RFC 5061 and, optionally, the UDP
// encapsulation of RFC 6951. It implements what DDP needs (RFC 5043): messages that fit in one packet are sent whole and unordered, and
// received messages are delivered at once. Ordered and fragmented messages of a peer are supported.
//
// The package does no I/O. One owner drives an Assoc and passes in the time. HandlePacket, HandleTimeout and the application calls are
// inputs. PollData, PollTransmit, PollReleased and PollEvent return outputs and must be drained after each input. Deadline then returns
// when HandleTimeout is due; an early call of HandleTimeout does nothing. Time must never run backwards and is never the zero Time.
//
// User data never passes through the package. Data to send is pushed as messages: a Buf, which is a handle with meaning to the owner only,
// and a length. A Buf belongs to the Assoc until PollReleased returns it, so the owner's buffers are the retransmission queue. Of an
// arriving packet the Assoc reads headers and control chunks; PollData reports where the user data is and what to do with it. The owner
// keeps data that must wait, such as fragments of an incomplete message or a message that is early in an ordered stream, under a small
// number chosen by the Assoc.
package sctp

import "errors"

// Buf is a handle of bytes that the owner of an Assoc stores.
type Buf uint32

// NoBuf is the Buf of no bytes.
const NoBuf Buf = ^Buf(0)

// UDPPort is the IANA port for UDP encapsulation (RFC 6951 5.1).
const UDPPort = 9899

// State is a state of RFC 9260 section 4.
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

// Event is an event of an Assoc.
type Event uint8

// The events.
const (
	EventUp       Event = iota + 1 // the association is established
	EventRestart                   // the peer has restarted: everything in flight either way is lost
	EventShutdown                  // the peer is shutting down: nothing more can be pushed
	EventClosed                    // the state is gone; Err returns why
)

var eventNames = [...]string{EventUp: "up", EventRestart: "restart", EventShutdown: "shutdown", EventClosed: "closed"}

func (e Event) String() string {
	if int(e) < len(eventNames) && eventNames[e] != "" {
		return eventNames[e]
	}
	return "none"
}

// Errors that Assoc.Err returns. An orderly shutdown has none; an ABORT of the peer is an *AbortError.
var (
	ErrTimeout     = errors.New("sctp: association timed out")
	ErrAborted     = errors.New("sctp: association aborted here")
	ErrAdaptation  = errors.New("sctp: peer has another adaptation layer")
	ErrProtocol    = errors.New("sctp: protocol violation by peer")
	ErrNoRoom      = errors.New("sctp: peer's message does not fit in the receive buffer")
	ErrUnreachable = errors.New("sctp: destination unreachable")
	ErrNoSCTP      = errors.New("sctp: peer has no SCTP")
)

// AbortError reports an ABORT of the peer, by its first error cause.
type AbortError struct{ cause causeCode }

func (e *AbortError) Error() string { return "sctp: association aborted by peer: " + e.cause.String() }

// Act says what the owner does with user data that PollData reports.
type Act uint8

const (
	// Deliver: bytes [Off,Off+Len) of the current packet are a message or its next fragment.
	Deliver Act = iota + 1
	// Keep: copy bytes [Off,Off+Len) of the current packet and keep them under the number Slot.
	Keep
	// DeliverKept: the Len bytes kept under Slot are a message or its next fragment. Slot is then free.
	DeliverKept
	// Forget: the bytes kept under Slot are not needed.
	Forget
)

// Data is user data and what to do with it. Begin and End mark the first and last fragment of a message; fragments of one message follow
// each other without other data in between.
type Data struct {
	Act        Act
	Stream     uint16
	PPID       uint32
	Unordered  bool
	Begin, End bool
	Slot       int
	Off, Len   int
}

// Message is a message to send: Len bytes, 1 to MaxMessage, in Buf.
type Message struct {
	Stream uint16
	PPID   uint32
	Urgent bool // ask the peer to acknowledge at once (RFC 7053)
	Buf    Buf
	Len    int
}

// maxParts is the maximum number of messages in one packet.
const maxParts = 32

// Part is a DATA chunk of a packet to send: its header, then Len bytes of Buf, then Pad zero bytes.
type Part struct {
	Hdr [dataHeader]byte
	Buf Buf
	Len int
	Pad int
}

// Out is a packet to send: Head (common header and control chunks, valid until the next call of the Assoc), then the Parts. The owner sets
// the checksum with SetChecksum.
type Out struct {
	Head       []byte
	Parts      [maxParts]Part
	N          int
	Len        int    // length of the packet in bytes
	Path       int    // index of the path to send it on
	UDP        uint16 // destination UDP port, if encapsulated
	Retransmit bool
	Fragment   bool // larger than the path MTU: must be sent as IP fragments
}

// empty reports whether o has no chunk yet.
func (o *Out) empty() bool { return len(o.Head)+o.Len == HeaderLen }

// dataHeader is a chunk header with the fixed fields of DATA.
const dataHeader = 16
