// Package tcp is the TCP of the data plane: RFC 9293 with window scaling and timestamps (RFC 7323), SACK (RFC 2018, 2883, 6675), RACK-TLP
// (RFC 8985), CUBIC, NewReno and DCTCP congestion control (RFC 9438, 5681, 8257), ECN (RFC 3168), the defences of RFC 5961 and RFC 5927,
// and SYN cookies (RFC 4987).
//
// The package does no I/O. One owner drives a Conn and passes in the time. HandleSegment, HandleTimeout and the application calls are
// inputs. PollTransmit, PollHeld, PollReleased and PollEvent return outputs and must be drained after inputs. Deadline then returns when
// HandleTimeout is due; an early call of HandleTimeout does nothing. Time must never run backwards and is never the zero Time.
//
// Payload never passes through the package. Data to send is pushed as records: a Buf, which is a handle with meaning to the owner only, and
// a length. A record is sent as one segment and, unless the MSS shrinks, retransmitted as exactly that segment; a run of records of one
// length lies in one Buf. The Buf belongs to the Conn until PollReleased returns it. The payload of an arriving segment is the Buf of that segment; Input says what to do with it.
package tcp

import "github.com/iwarpd/iwarpd/internal/serial"

// Buf is a handle of bytes that the owner of a Conn stores.
type Buf uint32

// NoBuf is the Buf of no bytes.
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

// String returns one letter for each flag that is set.
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

// Segment is an arriving segment. Len is its payload length in bytes, Buf the handle of the frame that holds the payload, ECN the ECN field
// of the IP header.
type Segment struct {
	Header
	Len int
	Buf Buf
	ECN uint8
}

// seqLen returns the sequence space that the segment occupies.
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

// Out is a segment to send: the header without checksum, and bytes [Off,Off+Len) of Buf as payload. Buf is NoBuf if there is no payload.
type Out struct {
	Header
	Buf        Buf
	Off, Len   int
	ECN        uint8 // for the IP header
	Retransmit bool

	// Size is the payload of each segment in bytes; the last one may have less. If Len is more than Size, several segments with this header
	// are to be sent, whose sequence numbers follow each other; only the first has CWR.
	Size int
}

// Action says what the owner does with the payload of an arriving segment.
type Action uint8

const (
	// Drop: the payload is not needed, or there is none. The frame is free.
	Drop Action = iota
	// Deliver: bytes [Off,Off+Len) of the payload are next in order. Consume them, then drain PollHeld; the frame is free.
	Deliver
	// Hold: bytes [Off,Off+Len) are out of order. Buf belongs to the Conn until PollHeld returns it.
	Hold
	// Reopen: the Conn was in TIME-WAIT and has closed to make room for the new connection that this SYN requests (RFC 9293 3.10.7.4, RFC
	// 6191). Remove the Conn from the flow table, then pass the segment to the listener.
	Reopen
)

// Input says what to do with an arriving segment. Seq is the sequence number of byte Off of its payload.
type Input struct {
	Action   Action
	Seq      serial.Num
	Off, Len int
}

// Held is a held segment that is returned to the owner, with its Buf. If Deliver is set, its bytes [Off,Off+Len), which start at Seq, are
// next in order; otherwise they are not needed. Buf is NoBuf if the owner has called Placed.
type Held struct {
	Buf      Buf
	Seq      serial.Num
	Off, Len int
	Deliver  bool
}

// Event is an event of a Conn.
type Event uint8

const (
	EventEstablished Event = iota + 1 // the connection is synchronized
	EventPeerClosed                   // the peer's FIN is in order: no more data will arrive
	EventClosed                       // the state is gone; Err returns why
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

// State is a state of RFC 9293 3.3.2, except LISTEN, which a Listener implements.
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
