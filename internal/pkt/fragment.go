package pkt

// maxPayload is the largest payload that follows an IP header.
const maxPayload = 1<<16 - 1

// Fragment is a parsed frame that contains a fragment of an IP packet.
type Fragment struct {
	Src, Dst [16]byte // IPv4 as v4-mapped
	V6       bool
	ID       uint32
	Proto    uint8 // protocol of the payload; in IPv6 only the first fragment has it
	ECN      uint8
	More     bool
	Off      int // offset in the packet's payload, in bytes: the fragment is [Off, Off+Len)
	Len      int

	L3Off int // offset of the IP header in the frame
	Data  int // offset of the fragment's payload in the frame, after IP options or the Fragment header
	Next  int // IPv6: offset in the frame of the Next Header field that announces the Fragment header
}

// Parse parses the headers of a frame, all of which is in b. The checksum of an IPv4 header must be
// right. It returns ErrWhole if the packet is not a fragment, and ErrHeader for fragments of which
// no valid packet could consist:
//
//   - a fragment that ends beyond 65535 bytes, is empty, or is not the last
//     and not a multiple of eight bytes (RFC 791, Section 3.2; RFC 8200,
//     Section 4.5),
//   - the first fragment of an IPv6 packet without all headers up to the
//     transport's (RFC 8200, Section 4.5),
//   - a fragment whose source is not a host (RFC 1122, Section 3.2.1.3).
func (f *Fragment) Parse(b []byte) error {
	if len(b) < etherLen {
		return ErrShort
	}
	typ, off := be.Uint16(b[12:]), etherLen
	for n := 0; typ == etherVLAN || typ == etherVLANad; n++ {
		if n == maxVLAN {
			return ErrNotIP
		}
		if len(b) < off+vlanLen {
			return ErrShort
		}
		typ = be.Uint16(b[off+2:])
		off += vlanLen
	}
	*f = Fragment{L3Off: off}
	var err error
	switch typ {
	case etherIPv4:
		err = f.parseIPv4(b[off:])
	case etherIPv6:
		err = f.parseIPv6(b[off:])
	default:
		err = ErrNotIP
	}
	if err != nil {
		return err
	}
	if f.Len == 0 || f.More && f.Len%8 != 0 || !Unicast(&f.Src, f.V6) {
		return ErrHeader
	}
	f.Data += off
	f.Next += off
	return nil
}

func (f *Fragment) parseIPv4(b []byte) error {
	if len(b) < ipv4Len {
		return ErrShort
	}
	ihl, total, ok := ipv4Lens(b)
	if !ok {
		return ErrHeader
	}
	if len(b) < total {
		return ErrShort
	}
	m := be.Uint16(b[6:])
	if m&0x3fff == 0 {
		return ErrWhole
	}
	if Fold(Sum(b[:ihl], 0)) != 0xffff {
		return ErrChecksum
	}
	put4(&f.Src, b[12:16])
	put4(&f.Dst, b[16:20])
	f.ID = uint32(be.Uint16(b[4:]))
	f.Proto = b[9]
	f.ECN = b[1] & 3
	f.More = m&0x2000 != 0
	f.Off = int(m&0x1fff) * 8
	f.Len = total - ihl
	f.Data = ihl
	if ihl+f.Off+f.Len > maxPayload {
		return ErrHeader
	}
	return nil
}

func (f *Fragment) parseIPv6(b []byte) error {
	if len(b) < ipv6Len {
		return ErrShort
	}
	if b[0]>>4 != 6 {
		return ErrHeader
	}
	total := ipv6Len + int(be.Uint16(b[4:]))
	if len(b) < total {
		return ErrShort
	}
	b = b[:total]
	// Headers before the Fragment header are processed by each node on the path.
	next, off := b[6], ipv6Len
	f.Next = 6
	for n := 0; next != 44; n++ {
		if n == maxExt || next != 0 && next != 43 && next != 60 {
			return ErrWhole
		}
		if len(b) < off+8 || len(b) < off+8+int(b[off+1])*8 {
			return ErrHeader
		}
		if next == 43 && b[off+3] != 0 {
			return ErrHeader
		}
		f.Next = off
		next, off = b[off], off+8+int(b[off+1])*8
	}
	if len(b) < off+fragmentLen {
		return ErrHeader
	}
	m := be.Uint16(b[off+2:])
	if m&0xfff9 == 0 {
		return ErrWhole
	}
	f.V6 = true
	f.Src = [16]byte(b[8:24])
	f.Dst = [16]byte(b[24:40])
	f.ID = be.Uint32(b[off+4:])
	f.Proto = b[off]
	f.ECN = b[1] >> 4 & 3
	f.More = m&1 != 0
	f.Off = int(m &^ 7)
	f.Data = off + fragmentLen
	f.Len = total - f.Data
	// The packet's payload includes the extension headers before the Fragment header.
	if off-ipv6Len+f.Off+f.Len > maxPayload {
		return ErrHeader
	}
	if f.Off == 0 {
		proto, at, err := skipExt(f.Proto, b, f.Data, total, false)
		if err != nil || total-at < l4min(proto) {
			return ErrHeader
		}
	}
	return nil
}

// Unicast reports whether a may be the address of another host. If v6 is not set, a is an IPv4 address.
func Unicast(a *[16]byte, v6 bool) bool {
	if v6 {
		return a[0] != 0xff && !is4(a) && (be.Uint64(a[0:]) != 0 || be.Uint64(a[8:]) > 1)
	}
	return a[12] != 0 && a[12] != 127 && a[12] < 224
}

// Unfragment writes the headers that the packet had before it was fragmented, with a payload of n
// bytes, to dst and returns the bytes written. f is the packet's first fragment, in frame. dst must
// have room for f.Header() bytes.
func (f *Fragment) Unfragment(dst, frame []byte, n int, ecn uint8) []byte {
	dst = dst[:f.Header()]
	copy(dst, frame)
	ip := dst[f.L3Off:]
	if f.V6 {
		dst[f.Next] = f.Proto
		be.PutUint16(ip[4:], uint16(len(ip)-ipv6Len+n))
		ip[1] = ip[1]&^0x30 | ecn<<4
		return dst
	}
	be.PutUint16(ip[2:], uint16(len(ip)+n))
	be.PutUint16(ip[6:], 0)
	ip[1] = ip[1]&^3 | ecn
	be.PutUint16(ip[10:], 0)
	be.PutUint16(ip[10:], Checksum(Sum(ip, 0)))
	return dst
}

// Header returns the length of the headers before the payload of the reassembled packet. f is its
// first fragment.
func (f *Fragment) Header() int {
	if f.V6 {
		return f.Data - fragmentLen
	}
	return f.Data
}
