package testenv

import "encoding/binary"

// Cut returns the fragments of the IP packet in frame, each with at most size bytes after the IP
// header, a multiple of 8. The Fragment header of IPv6 is inserted after the fixed header.
func Cut(frame []byte, size int, id uint32) [][]byte {
	be := binary.BigEndian
	l3 := 14
	for frame[l3-2] == 0x81 || frame[l3-2] == 0x88 {
		l3 += 4
	}
	ip := frame[l3:]
	v6 := ip[0]>>4 == 6
	hdr, end := int(ip[0]&15)*4, int(be.Uint16(ip[2:]))
	if v6 {
		hdr, end = 40, 40+int(be.Uint16(ip[4:]))
	}
	payload := ip[hdr:end]
	var out [][]byte
	for off := 0; off < len(payload); off += size {
		n := min(size, len(payload)-off)
		more := uint16(0)
		if off+n < len(payload) {
			more = 1
		}
		f := append([]byte{}, frame[:l3+hdr]...)
		h := f[l3:]
		if v6 {
			be.PutUint16(h[4:], uint16(n+8))
			next := h[6]
			h[6] = 44
			f = append(f, next, 0)
			f = be.AppendUint16(f, uint16(off)|more)
			f = be.AppendUint32(f, id)
		} else {
			be.PutUint16(h[2:], uint16(hdr+n))
			be.PutUint16(h[4:], uint16(id))
			be.PutUint16(h[6:], uint16(off/8)|more<<13)
			FixIPv4(h[:hdr])
		}
		out = append(out, append(f, payload[off:off+n]...))
	}
	return out
}

// FixIPv4 recomputes the checksum of an IPv4 header.
func FixIPv4(h []byte) {
	h[10], h[11] = 0, 0
	sum := 0
	for i := 0; i+1 < len(h); i += 2 {
		sum += int(h[i])<<8 | int(h[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum))
}
