package pkt

// Tuple contains the fields for the headers of a packet from Flow.Local to Flow.Remote.
type Tuple struct {
	Flow
	Proto          uint8
	V6             bool
	SrcMAC, DstMAC [6]byte
	VLANs          [maxVLAN]uint16 // TCIs, outermost first
	NVLAN          int             // 0..maxVLAN
	DSCP           uint8           // 0..63
	TTL            uint8           // or hop limit; 0: 64
}

// Answerable reports whether p may be answered or may begin a connection: it was sent by another
// host, and to this host alone, on the link too (RFC 9293, MUST-57 and MUST-63; RFC 1122, Sections
// 3.2.1.3 and 3.3.6). The answer to a group's MAC address would go to many.
func (p *Packet) Answerable() bool {
	return (p.DstMAC[0]|p.SrcMAC[0])&1 == 0 && Unicast(&p.Flow.Remote, p.V6) && p.Flow.Remote != p.Flow.Local
}

// Reply returns the tuple for an answer to p, with addresses and MACs swapped.
func (p *Packet) Reply() Tuple {
	return Tuple{
		Flow: p.Flow, Proto: p.Proto, V6: p.V6,
		SrcMAC: p.DstMAC, DstMAC: p.SrcMAC,
		VLANs: p.VLANs, NVLAN: p.NVLAN,
	}
}

// HeaderLen returns the length of the Ethernet, VLAN and IP headers.
func (t *Tuple) HeaderLen() int {
	n := etherLen + t.NVLAN*vlanLen
	if t.V6 {
		return n + ipv6Len
	}
	return n + ipv4Len
}

// Put writes HeaderLen bytes of headers to b, for a transport header and payload of l4len bytes,
// with DF set. With two VLAN tags the outer one is 802.1ad and the inner one
// 802.1Q. The IPv4 identification is 0, as DF allows (RFC 6864, Section 4.1). From a count of all
// packets each host that gets some would learn how many go to others: also whether a segment that
// it has forged for a connection of theirs was answered.
func (t *Tuple) Put(b []byte, l4len int, ecn uint8) {
	_ = b[t.HeaderLen()-1]
	*(*[6]byte)(b[0:6]) = t.DstMAC
	*(*[6]byte)(b[6:12]) = t.SrcMAC
	off := 12
	for i := range t.NVLAN {
		tag := uint16(etherVLAN)
		if i == 0 && t.NVLAN > 1 {
			tag = etherVLANad
		}
		be.PutUint16(b[off:], tag)
		be.PutUint16(b[off+2:], t.VLANs[i])
		off += vlanLen
	}
	if t.V6 {
		be.PutUint16(b[off:], etherIPv6)
		b = b[off+2:]
		tc := uint32(t.DSCP<<2 | ecn&3)
		be.PutUint32(b[0:], 6<<28|tc<<20)
		be.PutUint16(b[4:], uint16(l4len))
		b[6] = t.Proto
		b[7] = t.ttl()
		*(*[16]byte)(b[8:24]) = t.Local
		*(*[16]byte)(b[24:40]) = t.Remote
		return
	}
	be.PutUint16(b[off:], etherIPv4)
	b = b[off+2 : off+2+ipv4Len]
	// The checksum is computed from the words as they are written, to avoid reading them back.
	first := 0x45<<24 | uint32(t.DSCP<<2|ecn&3)<<16 | uint32(uint16(ipv4Len+l4len))
	const second = 0x4000 // DF
	third := uint32(t.ttl())<<24 | uint32(t.Proto)<<16
	src, dst := be.Uint32(t.Local[12:]), be.Uint32(t.Remote[12:])
	third |= uint32(Checksum(reduce(uint64(first) + uint64(second) + uint64(third) + uint64(src) + uint64(dst))))
	be.PutUint32(b[0:], first)
	be.PutUint32(b[4:], second)
	be.PutUint32(b[8:], third)
	be.PutUint32(b[12:], src)
	be.PutUint32(b[16:], dst)
}

// DefaultTTL is the TTL of a Tuple that has none (RFC 1700).
const DefaultTTL = 64

func (t *Tuple) ttl() uint8 {
	if t.TTL == 0 {
		return DefaultTTL
	}
	return t.TTL
}

// PseudoSum returns the partial sum of the pseudo-header for l4len bytes of transport header and
// payload (RFC 9293, Section 3.1; RFC 8200, Section 8.1).
func (t *Tuple) PseudoSum(l4len int) uint32 {
	s := uint64(t.Proto) + uint64(l4len)
	if t.V6 {
		return reduce(s + words32(t.Local[:]) + words32(t.Remote[:]))
	}
	return reduce(s + words32(t.Local[12:]) + words32(t.Remote[12:]))
}

// FragmentHeaderLen returns the length of the headers of a fragment.
func (t *Tuple) FragmentHeaderLen() int {
	if t.V6 {
		return t.HeaderLen() + 8
	}
	return t.HeaderLen()
}

// FragmentSize returns the number of payload bytes of each fragment, except the last, if packets
// have at most mtu bytes.
func (t *Tuple) FragmentSize(mtu int) int {
	if t.V6 {
		return (mtu - ipv6Len - 8) &^ 7
	}
	return (mtu - ipv4Len) &^ 7
}

// PutFragment writes the headers of a fragment of n bytes at offset off, a multiple of 8. more is
// set for all fragments but the last. All fragments of a packet have the same id.
func (t *Tuple) PutFragment(b []byte, n, off int, more bool, id uint32) {
	m := uint16(0)
	if more {
		m = 1
	}
	if t.V6 {
		t.Put(b, n+8, 0)
		h := b[t.HeaderLen():]
		_ = h[7]
		b[t.HeaderLen()-ipv6Len+6] = 44
		h[0], h[1] = t.Proto, 0
		be.PutUint16(h[2:], uint16(off)|m)
		be.PutUint32(h[4:], id)
		return
	}
	t.Put(b, n, 0)
	ip := b[t.HeaderLen()-ipv4Len : t.HeaderLen()]
	be.PutUint16(ip[4:], uint16(id))
	be.PutUint16(ip[6:], uint16(off/8)|m<<13)
	be.PutUint16(ip[10:], 0)
	be.PutUint16(ip[10:], Checksum(Sum(ip, 0)))
}
