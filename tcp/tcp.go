// Package tcp is the TCP of the data plane: RFC 9293 with window scaling and
// timestamps (RFC 7323), SACK (RFC 2018, 2883, 6675), RACK-TLP (RFC 8985),
// CUBIC, NewReno and DCTCP congestion control (RFC 9438, 5681, 8257), ECN (RFC
// 3168), the defences of RFC 5961 and RFC 5927, and SYN cookies (RFC 4987).
//
// The package does no I/O. A Conn is driven by one owner that passes the time
// in: HandleSegment, HandleTimeout and the calls of the application are inputs;
// PollTransmit, PollHeld, PollReleased and PollEvent give outputs and are
// drained after inputs; Deadline then says when HandleTimeout is due. A call
// of HandleTimeout that comes too early does nothing. Time never runs
// backwards and is never the zero Time.
//
// The octets themselves never pass through the package. What is to be sent is
// pushed in records, each a Buf (a handle that means something to the owner
// only) and a length. A record is sent as one segment and, while the MSS is not
// lowered, retransmitted as exactly that segment. It belongs to the Conn until
// PollReleased gives it back. The payload of an arriving segment is the Buf of
// that segment; Input says what to do with it.
package tcp

import "github.com/iwarpd/iwarpd/internal/serial"

// Buf is the handle of octets that live with the owner of a Conn.
type Buf uint32

// NoBuf is no octets.
const NoBuf Buf = ^Buf(0)

// Flags are the control bits of the TCP header (RFC 9293 3.1).
type Flags uint8

// The control bits.
const (
	FIN Flags = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
	ECE
	CWR
)

const flagLetters = "FSRPAUEC"

// String gives one letter for each flag that is set.
func (f Flags) String() string {
	var b [8]byte
	n := 0
	for i := range 8 {
		if f&(1<<i) != 0 {
			b[n] = flagLetters[i]
			n++
		}
	}
	return string(b[:n])
}

// Codepoints of the ECN field of the IP header (RFC 3168 section 5).
const (
	notECT = 0
	ect0   = 2
	ce     = 3
)

// Segment is an arriving segment. Len is the number of its payload octets, Buf
// the handle of the frame that they lie in, ECN the two ECN bits of the IP
// header.
type Segment struct {
	Header
	Len int
	Buf Buf
	ECN uint8
}

// seqLen is the space that the segment takes in the sequence numbers.
func (s *Segment) seqLen() int {
	n := s.Len
	if s.Flags&SYN != 0 {
		n++
	}
	if s.Flags&FIN != 0 {
		n++
	}
	return n
}

// Out is a segment to be sent: everything of the header but the checksum, and
// octets [Off,Off+Len) of Buf as the payload. Buf is NoBuf when there is none.
type Out struct {
	Header
	Buf        Buf
	Off, Len   int
	ECN        uint8 // for the IP header
	Retransmit bool
}

// Action is what the owner of an arriving segment does with its payload.
type Action uint8

const (
	// Drop: the payload is not wanted (or there is none); its frame is free.
	Drop Action = iota
	// Deliver: octets [Off,Off+Len) of the payload are the next in order.
	// Consume them, then drain PollHeld; the frame is free.
	Deliver
	// Hold: the octets [Off,Off+Len) lie ahead of the in-order point. Buf
	// belongs to the Conn until PollHeld gives it back.
	Hold
	// Reopen: the Conn was in TIME-WAIT, has closed, and makes way for the new
	// connection that this SYN asks for (RFC 9293 3.10.7.4, RFC 6191): after
	// the Conn is taken from the flow table the segment goes to the listener.
	Reopen
)

// Input is the fate of an arriving segment. Seq is the sequence number of octet
// Off of its payload.
type Input struct {
	Action   Action
	Seq      serial.Num
	Off, Len int
}

// Held is a segment that was held and is given back. If Deliver is set its
// octets [Off,Off+Len), which start at Seq, are now next in order; else they are
// of no use. In both cases Buf is the owner's again. If Buf is NoBuf, the owner
// has said Placed before.
type Held struct {
	Buf      Buf
	Seq      serial.Num
	Off, Len int
	Deliver  bool
}

// Event is something that happened to a Conn.
type Event uint8

const (
	EventEstablished Event = iota + 1 // the connection is synchronised
	EventPeerClosed                   // the peer's FIN is in order: no more octets will come
	EventClosed                       // the state is gone; Err says why
)

func (e Event) String() string {
	switch e {
	case EventEstablished:
		return "established"
	case EventPeerClosed:
		return "peer closed"
	case EventClosed:
		return "closed"
	}
	return "none"
}

// State is a state of RFC 9293 3.3.2. LISTEN is not among them: a Listener is
// not a Conn.
type State uint8

const (
	Closed State = iota
	SynSent
	SynReceived
	Established
	FinWait1
	FinWait2
	CloseWait
	Closing
	LastAck
	TimeWait
)

var stateNames = [...]string{"CLOSED", "SYN-SENT", "SYN-RECEIVED", "ESTABLISHED", "FIN-WAIT-1", "FIN-WAIT-2",
	"CLOSE-WAIT", "CLOSING", "LAST-ACK", "TIME-WAIT"}

func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "unknown"
}
