package rdmap

import (
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Header control bits of a Terminate (RFC 5040 figure 8), in its third byte.
const (
	hdrLength = 0x80 // M: DDP Segment Length is valid
	hdrDDP    = 0x40 // D: the DDP header is present
	hdrRDMA   = 0x20 // R: the Read Request header is present

	hdrBits = hdrLength | hdrDDP | hdrRDMA
)

// maxTerminate is the length of the longest Terminate payload.
const maxTerminate = 4 + 2 + ddp.UntaggedLen + readRequestLen

// Terminate is a decoded Terminate message. Its slices alias the message.
type Terminate struct {
	Layer, Type, Code uint8
	DDP               []byte // the terminated DDP header, or nil
	RDMA              []byte // the terminated Read Request header, or nil
}

// Err returns the error that the Terminate reports.
func (t *Terminate) Err() *term.Error { return term.Lookup(t.Layer, t.Type, t.Code) }

// Decode reads the payload of a Terminate in one of three layouts: that of RFC 5040 section 4.8; that of Linux's soft-iWARP on
// little-endian machines, in which layer and type are swapped and the header bits are mirrored; and that of several hardware RNICs, which
// send error type 3 for MPA instead of 0. data reports whether the stream has carried other messages in this direction, which decides the
// few combinations that are legal in two layouts. ok is false if the payload is too short to identify an error. Truncated headers are left
// out.
func (t *Terminate) Decode(b []byte, data bool) (ok bool) {
	if len(b) < 4 {
		return false
	}
	*t = Terminate{Layer: b[0] >> 4, Type: b[0] & 0x0f, Code: b[1]}
	flags := b[2] & hdrBits
	switch {
	case b[0] == term.LayerLLP<<4|0x3:
		t.Type = term.LLPMPA
	case flags == 0 && (b[2]&0x07 != 0 || swapped(t.Layer, t.Type, t.Code, data)):
		t.Layer, t.Type = t.Type, t.Layer
		flags = b[2]&0x01<<7 | b[2]&0x02<<5 | b[2]&0x04<<3
	}
	b = b[4:]
	if flags&(hdrLength|hdrDDP) == 0 || len(b) < 2 {
		return true
	}
	b = b[2:] // the DDP Segment Length
	if flags&hdrDDP == 0 {
		return true
	}
	n := ddp.HeaderLen(b)
	if len(b) < n {
		return true
	}
	t.DDP, b = b[:n:n], b[n:]
	if flags&hdrRDMA != 0 && len(b) >= readRequestLen {
		t.RDMA = b[:readRequestLen:readRequestLen]
	}
	return true
}

// swapped decides the layout of a Terminate without headers, whose header bits say nothing, from its first two bytes read as in RFC 5040.
func swapped(layer, typ, code uint8, data bool) bool {
	rfc, other := term.Assigned(layer, typ, code), term.Assigned(typ, layer, code)
	switch {
	case !other:
		return false
	case !rfc:
		return true
	}
	// Both readings are valid: 0x20 and 0x02 with codes 5 to 7, and layer 0 against layer 1. MPA's codes from 5 occur only during
	// connection setup; later they are RDMAP's, so a peer that wrote layer 2 has swapped.
	if layer == term.LayerLLP {
		return data
	}
	if typ == term.LayerLLP {
		return !data
	}
	return false
}

// appendTerminate appends the payload of a Terminate for e to dst. seg is the start of the segment that caused it, or nil; segLen its
// length; rdma the Read Request header to report, or nil (RFC 5040 section 4.8, figure 10).
func appendTerminate(dst []byte, e *term.Error, seg []byte, segLen int, rdma []byte) []byte {
	var flags byte
	n := ddp.HeaderLen(seg)
	if len(seg) >= n && withHeader(e) {
		flags = hdrLength | hdrDDP
		if len(rdma) >= readRequestLen && e.Layer == term.LayerRDMAP && e.Type == term.RDMAPProtection {
			flags |= hdrRDMA
		}
	}
	dst = append(dst, e.Layer<<4|e.Type&0x0f, e.Code, flags, 0)
	if flags == 0 {
		return dst
	}
	dst = be.AppendUint16(dst, uint16(min(segLen, 0xffff)))
	dst = append(dst, seg[:n]...)
	if flags&hdrRDMA != 0 {
		dst = append(dst, rdma[:readRequestLen]...)
	}
	return dst
}

// withHeader reports whether a Terminate for e includes the DDP header: not for
// errors of the lower layer, nor for local catastrophic errors.
func withHeader(e *term.Error) bool {
	switch e.Layer {
	case term.LayerRDMAP:
		return e.Type != term.RDMAPLocal
	case term.LayerDDP:
		return e.Type != term.DDPLocal
	}
	return false
}
