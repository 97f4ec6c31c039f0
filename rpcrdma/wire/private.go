package wire

// PrivateSize is the length of what Private appends, in bytes.
const PrivateSize = 8

const privateMagic = 0xf6ab0e18

// Private is what an endpoint tells in the private data of a connection
// request or reply (RFC 8797). It is version 1's way to say what version 2
// says by properties, and does no harm there.
type Private struct {
	Invalidate bool // the peer may invalidate by its Sends
	SendSize   int  // bytes, 1024 to 262144
	RecvSize   int
}

// Append appends p. Sizes are rounded down to what can be said.
func (p Private) Append(b []byte) []byte {
	b = be.AppendUint32(b, privateMagic)
	var flags byte
	if p.Invalidate {
		flags = 1
	}
	size := func(n int) byte { return byte(min(max(n, 1024), 1<<18)/1024 - 1) }
	return append(b, 1, flags, size(p.SendSize), size(p.RecvSize))
}

// FindPrivate looks for a Private in private data, at any offset (RFC 8797
// section 5.2). ok false: there is none of a version that is known.
func FindPrivate(b []byte) (p Private, ok bool) {
	for ; len(b) >= PrivateSize; b = b[1:] {
		if be.Uint32(b) != privateMagic || b[4] != 1 {
			continue
		}
		return Private{b[5]&1 != 0, (int(b[6]) + 1) * 1024, (int(b[7]) + 1) * 1024}, true
	}
	return Private{}, false
}
