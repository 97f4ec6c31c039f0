package wire

// Transport properties (draft section 5.2).
const (
	PropSendSize    = 1 // uint32, bytes
	PropRecvSize    = 2 // uint32, bytes
	PropSegmentSize = 3 // uint32, bytes
	PropSegments    = 4 // uint32
	PropReverse     = 5 // uint32, a Reverse
	PropHostAuth    = 6 // opaque<>
)

// Reverse is the level of support for calls in the reverse direction (draft section 5.2.5).
type Reverse uint32

// Levels of support.
const (
	ReverseNone      Reverse = 0
	ReverseSimple    Reverse = 1 // Simple format without data item chunks
	ReverseContinued Reverse = 2 // also Continued format
	ReverseGeneral   Reverse = 3 // as in the forward direction
)

// minRecvSize is the smallest valid Receive Buffer Size: a smaller one has no room for a header
// with a chunk or an error.
const minRecvSize = 256

// Properties are the values of an endpoint.
type Properties struct {
	SendSize    uint32 // longest Send
	RecvSize    uint32 // size of Receive buffers
	SegmentSize uint32 // longest segment
	Segments    uint32 // most segments in a header
	Reverse     Reverse
}

// DefaultProperties returns the properties of a peer that has sent none.
func DefaultProperties() Properties {
	return Properties{SendSize: 4096, RecvSize: 4096, SegmentSize: 1 << 20, Segments: 16}
}

// Props returns p in wire format.
func (p *Properties) Props() []Prop {
	u := func(id, v uint32) Prop { return Prop{id, be.AppendUint32(nil, v)} }
	return []Prop{
		u(PropSendSize, p.SendSize), u(PropRecvSize, p.RecvSize), u(PropSegmentSize, p.SegmentSize),
		u(PropSegments, p.Segments), u(PropReverse, uint32(p.Reverse)),
	}
}

// HostAuth returns a host authentication property with material data.
func HostAuth(data []byte) Prop { return Prop{PropHostAuth, appendOpaque(nil, data)} }

// Apply sets the fields of p from props and returns the authentication material among them, or nil.
// Unknown properties are ignored. If it returns ErrPropVal, p is unchanged.
func (p *Properties) Apply(props []Prop) (auth [][]byte, err error) {
	next, def := *p, DefaultProperties()
	for _, v := range props {
		var field *uint32
		var dflt, low, high uint32 = 0, 0, 1<<32 - 1
		switch v.ID {
		case PropSendSize:
			field, dflt = &next.SendSize, def.SendSize
		case PropRecvSize:
			field, dflt, low = &next.RecvSize, def.RecvSize, minRecvSize
		case PropSegmentSize:
			field, dflt, low = &next.SegmentSize, def.SegmentSize, 1
		case PropSegments:
			field, dflt = &next.Segments, def.Segments
		case PropReverse:
			field, high = (*uint32)(&next.Reverse), uint32(ReverseGeneral)
		case PropHostAuth:
			if len(v.Data) == 0 {
				continue
			}
			d := decoder{b: v.Data}
			n := d.u32()
			if d.bad || (uint64(n)+3)&^3 != uint64(len(v.Data)-d.off) {
				return nil, ErrPropVal
			}
			auth = append(auth, v.Data[4:4+n])
			continue
		default:
			continue
		}
		if len(v.Data) == 0 {
			*field = dflt
			continue
		}
		if len(v.Data) != 4 {
			return nil, ErrPropVal
		}
		x := be.Uint32(v.Data)
		if x < low || x > high {
			return nil, ErrPropVal
		}
		*field = x
	}
	*p = next
	return auth, nil
}
