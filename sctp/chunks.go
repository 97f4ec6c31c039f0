package sctp

import (
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// maxAddrs is how many addresses of a peer are used.
const maxAddrs = 8

// Init is the content of INIT and INIT ACK (RFC 9260 3.3.2, 3.3.3).
type Init struct {
	Tag     uint32
	Rwnd    uint32
	Out, In uint16 // OS, MIS
	TSN     serial.Num

	Adaptation    uint32
	HasAdaptation bool
	Cookie        []byte // INIT ACK
	Preserve      uint32 // Cookie Preservative, in milliseconds
	Addrs         [maxAddrs]netip.Addr
	NAddrs        int
	HostName      bool
	Unrecognized  []byte // parameters that the peer did not know, as INIT ACK reports them; aliases the packet

	report [maxReports][]byte // parameters unknown here whose type asks for a report
	nrep   int
}

const (
	maxReports = 8
	initFixed  = 16
	minRwnd    = 1500
)

// Decode reads the body of an INIT or INIT ACK. Unknown parameters are recorded if their type asks for a report, and end the decoding if it
// says so. Values are not validated: see valid.
func (i *Init) Decode(b []byte) error {
	*i = Init{}
	if len(b) < initFixed {
		return errChunk
	}
	i.Tag, i.Rwnd = be.Uint32(b), be.Uint32(b[4:])
	i.Out, i.In = be.Uint16(b[8:]), be.Uint16(b[10:])
	i.TSN = serial.Num(be.Uint32(b[12:]))
	b = b[initFixed:]
	for len(b) > 0 {
		var p param
		var err error
		if b, err = nextParam(b, &p); err != nil {
			return err
		}
		switch p.Type {
		case paramIPv4:
			if len(p.Body) != 4 {
				return errParam
			}
			i.addAddr(netip.AddrFrom4([4]byte(p.Body)))
		case paramIPv6:
			if len(p.Body) != 16 {
				return errParam
			}
			i.addAddr(netip.AddrFrom16([16]byte(p.Body)).Unmap())
		case paramStateCookie:
			i.Cookie = p.Body
		case paramCookiePreservative:
			if len(p.Body) != 4 {
				return errParam
			}
			i.Preserve = be.Uint32(p.Body)
		case paramHostName:
			i.HostName = true
		case paramUnrecognized:
			i.Unrecognized = p.Body
		case paramAddressTypes, paramECN:
		case paramAdaptation:
			if len(p.Body) != 4 {
				return errParam
			}
			i.Adaptation, i.HasAdaptation = be.Uint32(p.Body), true
		default:
			how := p.Type.unknown()
			if how&unknownReport != 0 && i.nrep < maxReports {
				i.report[i.nrep] = p.raw
				i.nrep++
			}
			if how&unknownSkip == 0 {
				return nil
			}
		}
	}
	return nil
}

func (i *Init) addAddr(a netip.Addr) {
	b := a.As16()
	if i.NAddrs == maxAddrs || !pkt.Unicast(&b, a.Is6()) || slices.Contains(i.Addrs[:i.NAddrs], a) {
		return
	}
	i.Addrs[i.NAddrs] = a
	i.NAddrs++
}

// valid reports whether the fixed fields are valid: tag and stream counts are not 0, and the window is at least 1500 (RFC 9260 3.3.2).
func (i *Init) valid() bool { return i.Tag != 0 && i.Out != 0 && i.In != 0 && i.Rwnd >= minRwnd }

// Append appends the chunk, of type ChunkInit or ChunkInitAck. It writes no addresses: the association has only the source address of the
// packet.
func (i *Init) Append(b []byte, t ChunkType) []byte {
	b, at := beginChunk(b, t, 0)
	b = be.AppendUint32(b, i.Tag)
	b = be.AppendUint32(b, i.Rwnd)
	b = be.AppendUint16(b, i.Out)
	b = be.AppendUint16(b, i.In)
	b = be.AppendUint32(b, uint32(i.TSN))
	if len(i.Cookie) > 0 {
		b = appendParam(b, paramStateCookie, i.Cookie)
	}
	if i.HasAdaptation {
		b = appendParam(b, paramAdaptation, be.AppendUint32(nil, i.Adaptation))
	}
	if i.Preserve != 0 {
		b = appendParam(b, paramCookiePreservative, be.AppendUint32(nil, i.Preserve))
	}
	for _, r := range i.report[:i.nrep] {
		b = appendParam(b, paramUnrecognized, r)
	}
	return endChunk(b, at)
}

// dataChunk is a DATA chunk; its user data is [off,off+n) of the packet.
type dataChunk struct {
	flags       uint8
	tsn         serial.Num
	stream, ssn uint16
	ppid        uint32
	off, n      int
}

func (d *dataChunk) decode(c *Chunk) bool {
	if len(c.Body) < dataHeader-chunkHeader {
		return false
	}
	d.flags = c.Flags
	d.tsn = serial.Num(be.Uint32(c.Body))
	d.stream, d.ssn = be.Uint16(c.Body[4:]), be.Uint16(c.Body[6:])
	d.ppid = be.Uint32(c.Body[8:])
	d.off, d.n = c.Off+dataHeader, len(c.Body)-(dataHeader-chunkHeader)
	return true
}

func (d *dataChunk) put(b *[dataHeader]byte) {
	b[0], b[1] = byte(ChunkData), d.flags
	be.PutUint16(b[2:], uint16(dataHeader+d.n))
	be.PutUint32(b[4:], uint32(d.tsn))
	be.PutUint16(b[8:], d.stream)
	be.PutUint16(b[10:], d.ssn)
	be.PutUint32(b[12:], d.ppid)
}

const sackFixed = 12

// Sack is a SACK chunk (RFC 9260 3.3.4). Its gap blocks alias the packet. Its duplicates are ignored.
type Sack struct {
	Cum  serial.Num
	Rwnd uint32
	gaps []byte // pairs of 16-bit offsets
}

// Decode reads the body of a SACK.
func (s *Sack) Decode(b []byte) error {
	if len(b) < sackFixed {
		return errChunk
	}
	s.Cum, s.Rwnd = serial.Num(be.Uint32(b)), be.Uint32(b[4:])
	ng, nd := 4*int(be.Uint16(b[8:])), 4*int(be.Uint16(b[10:]))
	if len(b)-sackFixed < ng+nd {
		return errChunk
	}
	s.gaps = b[sackFixed : sackFixed+ng]
	return nil
}

// Gaps returns the number of gap blocks.
func (s *Sack) Gaps() int { return len(s.gaps) / 4 }

// Gap returns the first and the last TSN of gap block i.
func (s *Sack) Gap(i int) (first, last serial.Num) {
	g := s.gaps[4*i:]
	return s.Cum + serial.Num(be.Uint16(g)), s.Cum + serial.Num(be.Uint16(g[2:]))
}
