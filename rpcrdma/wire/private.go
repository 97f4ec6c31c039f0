package wire

// privateSize is the length of what Private appends, in bytes.
const privateSize = 8

const privateMagic = 0xf6ab0e18

// Private is the private data of a connection request or reply (RFC 8797). Version 1 announces by
// it what version 2 announces by properties.
type Private struct {
	Invalidate bool // the sender accepts Send with Invalidate
	SendSize   int  // bytes, 1024 to 262144
	RecvSize   int
}

// Append appends p. Sizes are rounded down to a multiple of 1024.
func (p Private) Append(b []byte) []byte {
	b = be.AppendUint32(b, privateMagic)
	var flags byte
	if p.Invalidate {
		flags = 1
	}
	size := func(n int) byte { return byte(min(max(n, 1024), 1<<18)/1024 - 1) }
	return append(b, 1, flags, size(p.SendSize), size(p.RecvSize))
}

// FindPrivate searches b for a Private at any offset (RFC 8797 section 5.2). ok is false if there
// is none of a known version.
func FindPrivate(b []byte) (p Private, ok bool) {
	for ; len(b) >= privateSize; b = b[1:] {
		if be.Uint32(b) != privateMagic || b[4] != 1 {
			continue
		}
		return Private{b[5]&1 != 0, (int(b[6]) + 1) * 1024, (int(b[7]) + 1) * 1024}, true
	}
	return Private{}, false
}
