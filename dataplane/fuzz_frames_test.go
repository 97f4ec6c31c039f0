package dataplane

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
)

// TestChecksumPieces checks that the checksum does not depend on how a frame is divided.
func TestChecksumPieces(t *testing.T) {
	rng := testenv.Rand(t)
	b := make([]byte, 200)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	var p pkt.Packet
	p.L4Off, p.L4Len, p.PseudoSum = 34, len(b)-40, 12345
	want := pkt.Fold(pkt.Sum(b[p.L4Off:p.L4Off+p.L4Len], p.PseudoSum))
	for range 1000 {
		var f link.Frame
		for rest := b; len(rest) > 0; f.N++ {
			n := min(len(rest), 1+rng.IntN(60))
			if f.N == link.MaxPieces-1 {
				n = len(rest)
			}
			f.Pieces[f.N], rest = rest[:n], rest[n:]
		}
		if got := checksum(&f, &p); got != want {
			t.Fatalf("%#x in %d pieces; want %#x", got, f.N, want)
		}
	}
}

// TestBadFramesCount checks that frames that are no packets are counted by what is wrong with them.
func TestBadFramesCount(t *testing.T) {
	var frame []byte
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, b []byte) bool {
		if toB {
			frame = bytes.Clone(b)
		}
		return true
	}})
	a, _ := s.open()
	w := s.hosts[1].w
	for _, tt := range []struct {
		name                string
		at                  int // byte that is changed
		checksum, malformed uint64
	}{
		{"type", 12, 0, 1},
		{"version", 14, 0, 1},
		{"IP checksum", 24, 1, 0},
		{"TCP checksum", 50, 1, 0},
	} {
		f, was := link.Frame{N: 1}, w.stats
		f.Pieces[0] = bytes.Clone(frame)
		f.Pieces[0][tt.at] ^= 0x21
		w.take(&f)
		checksum, malformed := w.stats.RxChecksum-was.RxChecksum, w.stats.RxMalformed-was.RxMalformed
		if checksum != tt.checksum || malformed != tt.malformed {
			t.Errorf("%s: counted %d and %d", tt.name, checksum, malformed)
		}
	}
	s.closeAll(a)
}

// TestShortTxRing checks that a TX ring that is full is flushed, and that no frame is lost.
func TestShortTxRing(t *testing.T) {
	s := newSim(t, link.PipeConfig{TxRing: 4})
	qa, qb := newSimQP(t, s.hosts[0], 1<<18), newSimQP(t, s.hosts[1], 1<<18)
	a := s.connect(false, qa, qb)
	s.write(a, qa, qb, 1<<18)
	for i, h := range s.hosts {
		if st := h.w.stats; st.TxRingFull+st.TxRetransmits != 0 {
			t.Errorf("host %d: ring full %d times, %d segments sent again", i, st.TxRingFull, st.TxRetransmits)
		}
	}
	s.closeAll(a)
}

// feeder is a link that also receives the frames of a list, in several pieces.
type feeder struct {
	*link.Pipe
	t    *testing.T
	fed  []link.Frame
	held map[uint64]bool // given to the worker and not released
	next uint64
}

// fedID marks the frames of the list.
const fedID = 1 << 40

// feed adds a frame to the list, in pieces of at most size bytes.
func (f *feeder) feed(b []byte, size int) {
	f.next++
	fr := link.Frame{}
	for len(b) > 0 && fr.N < link.MaxPieces {
		n := min(len(b), size)
		if fr.N == link.MaxPieces-1 {
			n = len(b)
		}
		fr.Pieces[fr.N], fr.IDs[fr.N] = bytes.Clone(b[:n]), fedID+f.next
		fr.N++
		b = b[n:]
	}
	if fr.N > 0 {
		f.fed = append(f.fed, fr)
	}
}

func (f *feeder) Receive(fs []link.Frame) int {
	n := 0
	for ; n < len(fs) && len(f.fed) > 0; n++ {
		fs[n] = f.fed[0]
		f.held[fs[n].IDs[0]] = true
		f.fed = f.fed[1:]
	}
	return n + f.Pipe.Receive(fs[n:])
}

func (f *feeder) Release(fr *link.Frame) {
	if fr.N == 0 || fr.IDs[0] < fedID {
		f.Pipe.Release(fr)
		return
	}
	if !f.held[fr.IDs[0]] {
		f.t.Fatal("a frame was released twice")
	}
	delete(f.held, fr.IDs[0])
	clear(fr.Pieces[0]) // the link uses the memory again
	fr.N = 0
}

// Kinds of records of FuzzFrames.
const (
	fuzzRaw      = iota // a frame
	fuzzPacket          // protocol, what follows the IP header; the checksum is set
	fuzzFragment        // protocol, identification, offset / 8, 1 if more follow; the data
	fuzzTCP             // flags, difference of the sequence number and the acknowledgment, length / 4 of the options; options and payload
	fuzzQuote           // type, code, MTU / 8, changed bytes of the quoted packet of the connection
	fuzzSCTP            // the chunks of a packet of the association
	fuzzKinds
)

// frames returns the frame that a record of FuzzFrames asks for, or nil.
func (f *fuzzPair) frames(kind byte, v6 bool, in []byte, as *assoc) []byte {
	at := func(i int) byte {
		if i < len(in) {
			return in[i]
		}
		return 0
	}
	rest := func(i int) []byte { return bytes.Clone(in[min(i, len(in)):]) }
	c := f.b.conn()
	t := pkt.Tuple{SrcMAC: macA, DstMAC: macB, V6: v6, Flow: f.b.flow().Reverse()}
	if v6 {
		t.Local, t.Remote = addrOf(0, true).As16(), addrOf(1, true).As16()
	}
	build := func(l4 []byte) []byte {
		b := make([]byte, t.HeaderLen())
		t.Put(b, len(l4), 0)
		return append(b, l4...)
	}
	sum := func(l4 []byte, at int) []byte {
		if len(l4) < at+2 {
			return l4
		}
		s := uint32(0)
		if t.Proto != pkt.ProtoICMP {
			s = t.PseudoSum(len(l4))
		}
		binary.BigEndian.PutUint16(l4[at:], 0)
		binary.BigEndian.PutUint16(l4[at:], pkt.Checksum(pkt.Sum(l4, s)))
		return l4
	}
	switch kind {
	case fuzzRaw:
		return rest(0)
	case fuzzPacket:
		t.Proto = at(0)
		l4 := rest(1)
		switch t.Proto {
		case pkt.ProtoTCP:
			l4 = sum(l4, 16)
		case pkt.ProtoUDP:
			l4 = sum(l4, 6)
		case pkt.ProtoICMP, pkt.ProtoICMPv6:
			l4 = sum(l4, 2)
		case pkt.ProtoSCTP:
			if len(l4) >= sctp.HeaderLen {
				sctp.SetChecksum(l4)
			}
		}
		return build(l4)
	case fuzzFragment:
		t.Proto = at(0)
		data := rest(4)
		b := make([]byte, t.FragmentHeaderLen())
		t.PutFragment(b, len(data), int(at(2))*8, at(3)&1 != 0, uint32(at(1)))
		return append(b, data...)
	case fuzzTCP:
		t.Proto, t.V6, t.Flow = pkt.ProtoTCP, false, f.b.flow().Reverse()
		opts := min(int(at(3)%11)*4, max(len(in)-4, 0)/4*4)
		l4 := append(make([]byte, 20), rest(4)...)
		binary.BigEndian.PutUint16(l4, t.LocalPort)
		binary.BigEndian.PutUint16(l4[2:], t.RemotePort)
		binary.BigEndian.PutUint32(l4[4:], uint32(c.tcp.RcvNxt())+uint32(int32(int8(at(1))))*16)
		binary.BigEndian.PutUint32(l4[8:], uint32(f.a.conn().tcp.RcvNxt())+uint32(int32(int8(at(2)))))
		l4[12], l4[13] = byte(20+opts)/4<<4, at(0)
		binary.BigEndian.PutUint16(l4[14:], 0xffff)
		return build(sum(l4, 16))
	case fuzzQuote:
		own := pkt.Tuple{SrcMAC: macB, DstMAC: macA, Flow: f.b.flow(), Proto: pkt.ProtoTCP}
		q := make([]byte, own.HeaderLen()+20)
		own.Put(q, 1460, 0)
		l4 := q[own.HeaderLen():]
		binary.BigEndian.PutUint16(l4, own.LocalPort)
		binary.BigEndian.PutUint16(l4[2:], own.RemotePort)
		binary.BigEndian.PutUint32(l4[4:], uint32(f.a.conn().tcp.RcvNxt()))
		q = q[14:]
		for i, x := range rest(3) {
			q[i%len(q)] ^= x
		}
		t.Proto, t.V6, t.Flow = pkt.ProtoICMP, false, f.b.flow().Reverse()
		msg := make([]byte, 8, 8+len(q))
		msg[0], msg[1] = at(0), at(1)
		binary.BigEndian.PutUint16(msg[6:], uint16(at(2))*8)
		return build(sum(append(msg, q...), 2))
	case fuzzSCTP:
		flow := as.key.Flow.Reverse()
		t.Proto, t.V6, t.Flow = pkt.ProtoSCTP, false, flow
		l4 := append(make([]byte, sctp.HeaderLen), rest(0)...)
		binary.BigEndian.PutUint16(l4, flow.LocalPort)
		binary.BigEndian.PutUint16(l4[2:], flow.RemotePort)
		binary.BigEndian.PutUint32(l4[4:], as.a.Tag())
		sctp.SetChecksum(l4)
		return build(l4)
	}
	return nil
}

// FuzzFrames feeds frames of any kind to a host with a TCP connection and an SCTP association: packets of all protocols,
// ICMP errors, and fragments, in frames of several pieces. The input is a list of records: kind, with 0x40 for IPv6; length
// of the first pieces; length; data.
func FuzzFrames(f *testing.F) {
	record := func(kind, piece byte, data string) []byte {
		return append([]byte{kind, piece, byte(len(data))}, data...)
	}
	f.Add(record(fuzzRaw, 255, "\x02\x00\x00\x00\x00\x02\x02\x00\x00\x00\x00\x01\x08\x00\x45\x00\x00\x1c\x00\x00\x00\x00\x40\x06\x00\x00\x0a\x00\x00\x01\x0a\x00\x00\x02"))
	f.Add(record(fuzzPacket, 60, "\x01\x08\x00\x00\x00\x00\x01\x00\x01ping"))
	f.Add(record(fuzzPacket|0x40, 70, "\x3a\x80\x00\x00\x00\x00\x01\x00\x01ping"))
	f.Add(record(fuzzPacket, 255, "\x11\x26\xab\x26\xab\x00\x20\x00\x00\x9c\x40\x1c\x06\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x14\x00\x00\x00\x01"))
	f.Add(append(record(fuzzFragment, 40, "\x06\x01\x00\x01\x9c\x40\x1c\x06\x00\x00\x00\x00\x00\x00\x00\x00\x50\x10\xff\xff"), record(fuzzFragment, 50, "\x06\x01\x02\x00rest of the packet")...))
	f.Add(append(record(fuzzFragment|0x40, 70, "\x84\x01\x00\x01\x9c\x40\x1c\x06\x00\x00\x00\x00"), record(fuzzFragment|0x40, 70, "\x84\x01\x01\x00chunks")...))
	f.Add(append(record(fuzzTCP, 60, "\x18\x01\x00\x00out of order"), record(fuzzTCP, 55, "\x18\x00\x00\x00in order")...))
	f.Add(record(fuzzTCP, 200, "\x12\x00\x00\x03\x02\x04\x05\xb4\x01\x03\x03\x07\x08\x0a\x00\x00"))
	f.Add(record(fuzzQuote, 200, "\x03\x04\x40"))
	f.Add(record(fuzzQuote, 34, "\x03\x03\x00\x00\x00"))
	f.Add(record(fuzzSCTP, 60, "\x00\x03\x00\x14\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x07data"))
	f.Add(record(fuzzSCTP, 48, "\x04\x00\x00\x08\x00\x01\x00\x04\x0e\x00\x00\x04"))
	f.Add(record(fuzzSCTP, 255, "\xc1\x00\x00\x14\x00\x00\x00\x01\x00\x05\x00\x08\x0a\x00\x00\x09\xc0\x01\x00\x08\x00\x00\x00\x02"))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 2000 {
			return
		}
		p := newFuzzPair(t, mpa.Params{CRC: true, IRD: 2, ORD: 2})
		qs := [2]*simQP{newSimQP(t, p.hosts[0], 4096), newSimQP(t, p.hosts[1], 4096)}
		_, sb := p.openSCTP(SCTP{}, qs[0], qs[1])
		as := sb.as()
		w := p.hosts[1].w
		feed := &feeder{Pipe: p.hosts[1].link, t: t, held: make(map[uint64]bool)}
		w.link = feed
		for len(in) >= 3 {
			kind, piece, n := in[0], in[1], min(int(in[2]), len(in)-3)
			data := in[3 : 3+n]
			in = in[3+n:]
			if b := p.frames(kind&0x3f%fuzzKinds, kind&0x40 != 0, data, as); b != nil {
				feed.feed(b, max(int(piece), 1))
			}
			p.step()
			if p.b.mode != modeFull || as.a.State() == sctp.Closed {
				break
			}
		}
		p.finish()
		if w.sctp.n != 0 || p.hosts[0].w.sctp.n != 0 {
			t.Errorf("%d and %d associations left", p.hosts[0].w.sctp.n, w.sctp.n)
		}
		if len(feed.held) != 0 {
			t.Errorf("%d frames not released", len(feed.held))
		}
	})
}
