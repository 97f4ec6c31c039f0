package pkt

const (
	etherLen    = 14
	vlanLen     = 4
	ipv4Len     = 20
	ipv6Len     = 40
	fragmentLen = 8 // the Fragment header of IPv6
	etherIPv4   = 0x0800
	etherIPv6   = 0x86dd
	etherVLAN   = 0x8100
	etherVLANad = 0x88a8

	// maxVLAN is the largest number of VLAN tags in a frame.
	maxVLAN = 2

	// maxExt bounds the walk over IPv6 extension headers. RFC 8200, Section
	// 4.1 lists six, of which Destination Options may come twice.
	maxExt = 8
)

// Packet is a parsed frame as its receiver sees it: Flow.Local is the destination.
type Packet struct {
	Flow           Flow
	Proto          uint8 // the transport, after any extension headers
	ECN            uint8
	TTL            uint8 // TTL or hop limit
	V6             bool
	SrcMAC, DstMAC [6]byte
	VLANs          [maxVLAN]uint16 // TCIs, outermost first
	NVLAN          int
	L3Off          int // offset of the IP header in the frame

	// L4Off and L4Len locate the transport header and its payload in the frame. L4Len is
	// derived from the IP header, so it excludes padding.
	L4Off, L4Len int

	// PseudoSum is the partial sum of the pseudo-header, the initial value for the transport's
	// checksum.
	PseudoSum uint32
}

// l4min returns the length of the fixed part of the transport header.
func l4min(proto uint8) int {
	switch proto {
	case ProtoTCP:
		return 20
	case ProtoSCTP:
		return 12
	case ProtoUDP, ProtoICMP, ProtoICMPv6:
		return 8
	}
	return 0
}

// Parse parses the headers of a frame of frameLen bytes whose first piece is head. All headers, up
// to the fixed part of the transport header, must be in head. The IPv4 header checksum is verified;
// that of the transport is not. Parse returns ErrFragment for fragments, which Fragment parses, but
// not for an IPv6 packet in a single fragment (RFC 6946). The contents of p are undefined after an
// error.
func (p *Packet) Parse(head []byte, frameLen int) error {
	if len(head) > frameLen {
		head = head[:max(frameLen, 0)]
	}
	if len(head) < etherLen {
		return ErrShort
	}
	p.DstMAC = [6]byte(head[0:6])
	p.SrcMAC = [6]byte(head[6:12])
	typ := be.Uint16(head[12:])
	off := etherLen
	p.NVLAN = 0
	p.VLANs = [maxVLAN]uint16{}
	for typ == etherVLAN || typ == etherVLANad {
		if p.NVLAN == maxVLAN {
			return ErrNotIP
		}
		if len(head) < off+vlanLen {
			return ErrShort
		}
		p.VLANs[p.NVLAN] = be.Uint16(head[off:])
		p.NVLAN++
		typ = be.Uint16(head[off+2:])
		off += vlanLen
	}
	p.L3Off = off
	var err error
	switch typ {
	case etherIPv4:
		err = p.parseIPv4(head[off:], frameLen-off)
	case etherIPv6:
		err = p.parseIPv6(head[off:], frameLen-off)
	default:
		err = ErrNotIP
	}
	if err != nil {
		return err
	}
	p.L4Off += off
	n := l4min(p.Proto)
	if p.L4Len < n || len(head) < p.L4Off+n {
		return ErrShort
	}
	p.Flow.LocalPort, p.Flow.RemotePort = 0, 0
	switch p.Proto {
	case ProtoTCP, ProtoSCTP, ProtoUDP:
		p.Flow.RemotePort = be.Uint16(head[p.L4Off:])
		p.Flow.LocalPort = be.Uint16(head[p.L4Off+2:])
	}
	return nil
}

// parseIPv4 parses the IPv4 header at b (RFC 791, Section 3.1). The frame has n bytes of the
// packet. L4Off is set relative to b.
func (p *Packet) parseIPv4(b []byte, n int) error {
	if len(b) < ipv4Len {
		return ErrShort
	}
	ihl, total, ok := ipv4Lens(b)
	if !ok {
		return ErrHeader
	}
	if len(b) < ihl || n < total {
		return ErrShort
	}
	if be.Uint16(b[6:])&0x3fff != 0 { // More Fragments, or an offset
		return ErrFragment
	}
	addrs := words32(b[12:20])
	if Fold(reduce(words32(b[:12])+addrs+words32(b[ipv4Len:ihl]))) != 0xffff {
		return ErrChecksum
	}
	p.V6 = false
	p.ECN = b[1] & 3
	p.TTL = b[8]
	p.Proto = b[9]
	put4(&p.Flow.Remote, b[12:16])
	put4(&p.Flow.Local, b[16:20])
	p.L4Off = ihl
	p.L4Len = total - ihl
	p.PseudoSum = reduce(addrs + uint64(p.Proto) + uint64(p.L4Len))
	return nil
}

// ipv4Lens returns the lengths of the IPv4 header at b, which has at least ipv4Len bytes, and of
// its packet. ok is false if they or the version are invalid.
func ipv4Lens(b []byte) (ihl, total int, ok bool) {
	ihl, total = int(b[0]&15)*4, int(be.Uint16(b[2:]))
	return ihl, total, b[0]>>4 == 4 && ipv4Len <= ihl && ihl <= total
}

// parseIPv6 parses the IPv6 header at b and its extension headers (RFC 8200, Sections 3 and 4). The
// frame has n bytes of the packet. Jumbograms are treated as malformed: none of our links can carry
// one.
func (p *Packet) parseIPv6(b []byte, n int) error {
	if len(b) < ipv6Len {
		return ErrShort
	}
	if b[0]>>4 != 6 {
		return ErrHeader
	}
	total := ipv6Len + int(be.Uint16(b[4:]))
	if n < total {
		return ErrShort
	}
	next, off, err := skipExt(b[6], b[:min(len(b), total)], ipv6Len, total, false)
	if err != nil {
		return err
	}
	if isFlow4(b) {
		return ErrHeader
	}
	p.V6 = true
	p.ECN = b[1] >> 4 & 3
	p.TTL = b[7]
	p.Proto = next
	p.Flow.Remote = [16]byte(b[8:24])
	p.Flow.Local = [16]byte(b[24:40])
	p.L4Off = off
	p.L4Len = total - off
	p.PseudoSum = reduce(words32(b[8:40]) + uint64(p.Proto) + uint64(p.L4Len))
	return nil
}

// isFlow4 reports whether the IPv6 header at b has a v4-mapped address: the flow of the packet would
// be mistaken for one of IPv4.
func isFlow4(b []byte) bool { return is4((*[16]byte)(b[8:24])) || is4((*[16]byte)(b[24:40])) }

// skipExt walks the extension headers of the IPv6 packet at b, starting with a header of type next
// at offset off. The packet has total bytes, of which len(b) are available. It returns the
// upper-layer protocol and its offset. If first is set, it continues after the Fragment header of a
// first fragment.
func skipExt(next uint8, b []byte, off, total int, first bool) (proto uint8, at int, err error) {
	for range maxExt {
		var n int
		switch next {
		case 0, 43, 60, 135, 139, 140: // Hop-by-Hop, Routing, Destination Options, Mobility, HIP, Shim6
			if len(b) < off+2 {
				return 0, 0, ErrShort
			}
			n = int(b[off+1])*8 + 8
		case 51: // Authentication Header counts in units of 4 bytes (RFC 4302)
			if len(b) < off+2 {
				return 0, 0, ErrShort
			}
			n = int(b[off+1])*4 + 8
		case 44:
			if len(b) < off+fragmentLen {
				return 0, 0, ErrShort
			}
			if m := be.Uint16(b[off+2:]); m>>3 != 0 || m&1 != 0 && !first {
				return 0, 0, ErrFragment
			}
			n = fragmentLen
		default:
			return next, off, nil
		}
		if off+n > total {
			return 0, 0, ErrHeader
		}
		if off+n > len(b) {
			return 0, 0, ErrShort
		}
		// A routing header with segments left means that the destination is not the final
		// one, which the checksum covers.
		if next == 43 && b[off+3] != 0 || (next == 0 || next == 60) && !skippable(b[off+2:off+n]) {
			return 0, 0, ErrHeader
		}
		next, off = b[off], off+n
	}
	return 0, 0, ErrHeader
}

// skippable reports whether a receiver that knows none of the options but Pad1 may skip them all: the type of another one begins with
// two bits that say so (RFC 8200, Section 4.2).
func skippable(options []byte) bool {
	for len(options) > 0 {
		switch {
		case options[0] == 0: // Pad1 has no length
			options = options[1:]
		case options[0]>>6 != 0 || len(options) < 2 || len(options) < 2+int(options[1]):
			return false
		default:
			options = options[2+int(options[1]):]
		}
	}
	return true
}
