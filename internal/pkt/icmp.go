package pkt

// ICMPKind is what an ICMP error reports about a packet that we sent.
type ICMPKind uint8

// The kinds of ICMP errors.
const (
	Unreachable ICMPKind = iota + 1
	TooBig
	TimeExceeded
	ParameterProblem
)

func (k ICMPKind) String() string {
	switch k {
	case Unreachable:
		return "unreachable"
	case TooBig:
		return "packet too big"
	case TimeExceeded:
		return "time exceeded"
	case ParameterProblem:
		return "parameter problem"
	}
	return "unknown"
}

// ICMPError is an ICMP or ICMPv6 error about a packet that we sent (RFC 792, RFC 1191, RFC 4443).
type ICMPError struct {
	Flow  Flow // of the quoted packet: Local is its source
	Proto uint8
	Kind  ICMPKind
	Code  uint8 // the ICMP code

	// MTU is that of the next hop, for TooBig, or 0 if the router did not report it.
	MTU int

	// Seq is the TCP sequence number of the packet, or its SCTP verification tag. It must be
	// checked before the error is acted on (RFC 5927, Section 4.1; RFC 9260, Section 10).
	Seq uint32

	// InitTag is the Initiate Tag of an SCTP packet whose verification tag is 0, or 0 if the
	// error does not quote it.
	InitTag uint32

	inner  [20]byte // what the error quotes after a UDP header
	ninner int
}

// Decapsulate converts an error about a UDP packet into one about the SCTP packet in it (RFC 6951,
// Section 5.5): it replaces the ports and the protocol, and sets the tags. It reports whether the
// error quotes enough to include a verification tag.
func (e *ICMPError) Decapsulate() bool {
	return e.Proto == ProtoUDP && e.transport(ProtoSCTP, e.inner[:e.ninner]) == nil
}

// Prohibited reports whether the code of an Unreachable says that communication is prohibited (RFC
// 1812, Section 5.2.7.1; RFC 4443, Section 3.1). That does not pass soon, unlike the lack of a route.
func Prohibited(v6 bool, code uint8) bool {
	if v6 {
		return code == 1 || code == 5 || code == 6
	}
	return code == 9 || code == 10 || code == 13
}

// Parse parses the ICMP error in p. head is the first piece of the frame and must contain the whole
// error. The ICMP checksum is verified; that of the quoted header is not, since routers may not
// preserve it. Parse returns ErrNotError for other ICMP messages, and for errors about packets
// other than TCP, SCTP and UDP.
func (e *ICMPError) Parse(p *Packet, head []byte) error {
	*e = ICMPError{}
	if p.Proto != ProtoICMP && p.Proto != ProtoICMPv6 || p.V6 != (p.Proto == ProtoICMPv6) {
		return ErrNotError
	}
	if p.L4Off < 0 || p.L4Len < 8 || len(head) < p.L4Off+p.L4Len {
		return ErrShort
	}
	b := head[p.L4Off : p.L4Off+p.L4Len]
	e.Code = b[1]
	var sum uint32
	if p.V6 {
		sum = p.PseudoSum
		switch b[0] {
		case 1:
			e.Kind = Unreachable
		case 2:
			e.Kind = TooBig
			e.MTU = int(min(be.Uint32(b[4:]), 1<<16))
		case 3:
			e.Kind = TimeExceeded
		case 4:
			e.Kind = ParameterProblem
		default:
			return ErrNotError
		}
	} else {
		switch {
		case b[0] == 3 && b[1] == 4:
			e.Kind = TooBig
			e.MTU = int(be.Uint16(b[6:]))
		case b[0] == 3:
			e.Kind = Unreachable
		case b[0] == 11:
			e.Kind = TimeExceeded
		case b[0] == 12:
			e.Kind = ParameterProblem
		default:
			return ErrNotError
		}
	}
	if Fold(Sum(b, sum)) != 0xffff {
		return ErrChecksum
	}
	if p.V6 {
		return e.embedded6(b[8:])
	}
	return e.embedded4(b[8:])
}

// embedded4 parses the start of the quoted IPv4 packet.
func (e *ICMPError) embedded4(b []byte) error {
	if len(b) < ipv4Len {
		return ErrShort
	}
	ihl := int(b[0]&15) * 4
	if b[0]>>4 != 4 || ihl < ipv4Len {
		return ErrHeader
	}
	if len(b) < ihl {
		return ErrShort
	}
	if be.Uint16(b[6:])&0x1fff != 0 { // only the first fragment has ports
		return ErrFragment
	}
	put4(&e.Flow.Local, b[12:16])
	put4(&e.Flow.Remote, b[16:20])
	return e.transport(b[9], b[ihl:])
}

// embedded6 parses the start of the quoted IPv6 packet.
func (e *ICMPError) embedded6(b []byte) error {
	if len(b) < ipv6Len {
		return ErrShort
	}
	if b[0]>>4 != 6 || isFlow4(b) {
		return ErrHeader
	}
	proto, off, err := skipExt(b[6], b, ipv6Len, len(b), true)
	if err != nil {
		return err
	}
	e.Flow.Local = [16]byte(b[8:24])
	e.Flow.Remote = [16]byte(b[24:40])
	return e.transport(proto, b[off:])
}

// transport parses the first bytes of the quoted transport header. Only eight are guaranteed (RFC
// 792).
func (e *ICMPError) transport(proto uint8, b []byte) error {
	e.Proto = proto
	switch proto {
	case ProtoTCP, ProtoSCTP, ProtoUDP:
	default:
		return ErrNotError
	}
	if len(b) < 8 {
		return ErrShort
	}
	e.Flow.LocalPort = be.Uint16(b[0:])
	e.Flow.RemotePort = be.Uint16(b[2:])
	if proto == ProtoUDP {
		e.ninner = copy(e.inner[:], b[8:])
		return nil
	}
	e.Seq = be.Uint32(b[4:])
	// An INIT chunk (type 1) after the common header contains the Initiate Tag.
	if proto == ProtoSCTP && e.Seq == 0 && len(b) >= 20 && b[12] == 1 {
		e.InitTag = be.Uint32(b[16:])
	}
	return nil
}
