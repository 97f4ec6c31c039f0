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

	// MaxVLAN is the most VLAN tags that a frame may bear.
	MaxVLAN = 2

	// maxExt bounds the walk over IPv6 extension headers. RFC 8200, Section
	// 4.1 lists six, of which Destination Options may come twice.
	maxExt = 8
)

// Packet is a parsed frame, seen from its receiver: Flow.Local is where it goes
// to.
type Packet struct {
	Flow           Flow
	Proto          uint8 // the transport, after any extension headers
	ECN            uint8
	TTL            uint8 // or hop limit
	V6             bool
	SrcMAC, DstMAC [6]byte
	VLANs          [MaxVLAN]uint16 // TCIs, outermost first
	NVLAN          int
	L3Off          int // of the IP header in the frame

	// L4Off and L4Len say where the transport header and its payload lie in
	// the frame. L4Len comes from the IP header, so padding is cut off.
	L4Off, L4Len int

	// PseudoSum is the sum of the pseudo-header, to start the sum of the
	// transport's checksum from.
	PseudoSum uint32
}

// l4min is what the head must hold of the transport header: its fixed part.
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

// Parse reads the headers of a frame of frameLen bytes whose first piece is
// head. All headers, the fixed part of the transport's included, must lie in
// head. The IPv4 header checksum is verified; the transport's is not. On error
// p holds nothing of use. Fragments are ErrFragment: Fragment reads those. An IPv6
// packet in one fragment is none (RFC 6946).
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
	p.VLANs = [MaxVLAN]uint16{}
	for typ == etherVLAN || typ == etherVLANad {
		if p.NVLAN == MaxVLAN {
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

// parseIPv4 reads the IPv4 header at b (RFC 791, Section 3.1), of a packet of
// which n bytes are in the frame. L4Off is left relative to b.
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

// ipv4Lens returns the lengths of the IPv4 header at b, which is at least ipv4Len
// bytes, and of its packet; not ok, if they or the version cannot be.
func ipv4Lens(b []byte) (ihl, total int, ok bool) {
	ihl, total = int(b[0]&15)*4, int(be.Uint16(b[2:]))
	return ihl, total, b[0]>>4 == 4 && ipv4Len <= ihl && ihl <= total
}

// parseIPv6 reads the IPv6 header at b and its extension headers (RFC 8200,
// Sections 3 and 4), of a packet of which n bytes are in the frame. A
// jumbogram is malformed here: no link of ours carries one.
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
	// An address of IPv4 in a packet of IPv6 would pass for the flow of that.
	if is4((*[16]byte)(b[8:24])) || is4((*[16]byte)(b[24:40])) {
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

// skipExt walks the extension headers of the IPv6 packet at b, which has total
// bytes of which len(b) are here, from a header of type next at offset off. It
// returns the upper-layer protocol and its offset. With first it goes on behind
// the Fragment header of a first fragment.
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
		// A routing header with segments left names a destination that is
		// not the packet's last: the checksum would not be over this one.
		if next == 43 && b[off+3] != 0 {
			return 0, 0, ErrHeader
		}
		next, off = b[off], off+n
	}
	return 0, 0, ErrHeader
}
