package dataplane

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// tooBig returns the ICMP error of a router whose next link cannot take frame.
func tooBig(frame []byte, mtu, show int) []byte {
	v6 := frame[14]>>4 == 6
	ip := frame[14:min(len(frame), 14+show)]
	msg := make([]byte, 8, 8+len(ip))
	t := pkt.Tuple{Proto: pkt.ProtoICMP, V6: v6, SrcMAC: [6]byte(frame), DstMAC: [6]byte(frame[6:])}
	msg[0], msg[1] = 3, 4
	if v6 {
		t.Proto = pkt.ProtoICMPv6
		msg[0], msg[1] = 2, 0
		copy(t.Local[:], ip[24:40])
		copy(t.Remote[:], ip[8:24])
	} else {
		t.Local, t.Remote = mapped(ip[16:20]), mapped(ip[12:16])
	}
	binary.BigEndian.PutUint32(msg[4:], uint32(mtu))
	msg = append(msg, ip...)
	sum := uint32(0)
	if v6 {
		sum = t.PseudoSum(len(msg))
	}
	binary.BigEndian.PutUint16(msg[2:], pkt.Checksum(pkt.Sum(msg, sum)))
	b := make([]byte, t.HeaderLen(), t.HeaderLen()+len(msg))
	t.Put(b, len(msg), 0)
	return append(b, msg...)
}

// reassembly reassembles the IP fragments of one packet.
type reassembly struct {
	id    uint32
	have  []byte
	total int
	sum   int
}

// take adds a frame; whole is the reassembled packet once it is complete.
func (r *reassembly) take(f []byte) (whole []byte, fragment bool) {
	ip := f[14:]
	var off, at int
	var more bool
	var id uint32
	if ip[0]>>4 == 6 {
		if ip[6] != 44 {
			return nil, false
		}
		h := ip[40:]
		off, more, id, at = int(binary.BigEndian.Uint16(h[2:])&^7), h[3]&1 == 1, binary.BigEndian.Uint32(h[4:]), 48
	} else {
		v := binary.BigEndian.Uint16(ip[6:])
		if v&0x3fff == 0 {
			return nil, false
		}
		off, more, id, at = int(v&0x1fff)*8, v&0x2000 != 0, uint32(binary.BigEndian.Uint16(ip[4:])), 20
	}
	if id != r.id || r.have == nil {
		*r = reassembly{id: id, have: make([]byte, 1<<14)}
	}
	n := copy(r.have[off:], ip[at:])
	r.sum += n
	if !more {
		r.total = off + n
	}
	if r.sum != r.total {
		return nil, true
	}
	v6 := ip[0]>>4 == 6
	t := pkt.Tuple{SrcMAC: [6]byte(f[6:]), DstMAC: [6]byte(f), V6: v6}
	if v6 {
		t.Proto = ip[40]
		copy(t.Local[:], ip[8:24])
		copy(t.Remote[:], ip[24:40])
	} else {
		t.Proto, t.Local, t.Remote = ip[9], mapped(ip[12:16]), mapped(ip[16:20])
	}
	b := make([]byte, t.HeaderLen())
	t.Put(b, r.total, 0)
	return append(b, r.have[:r.total]...), true
}

// TestSCTPFragments shrinks the path's MTU while large messages are in flight. Those leave as IP fragments; later
// messages are smaller.
func TestSCTPFragments(t *testing.T) {
	const lower = 1280
	for _, tc := range []struct {
		name string
		o    SCTP
		v6   bool
		show int // bytes of the packet that the router quotes
		ok   bool
	}{
		{"IPv4", SCTP{}, false, 28, true},
		{"IPv6", SCTP{}, true, 600, true},
		{"UDP", SCTP{UDP: true}, false, 36, true},
		{"UDP over IPv6", SCTP{UDP: true}, true, 600, true},
		{"UDP without a tag", SCTP{UDP: true}, false, 28, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			shrunk, dropped := false, 0
			var r reassembly
			var toA, toB [][]byte
			var s *sim
			cfg := link.PipeConfig{MTU: 1500, Filter: func(isB bool, f []byte) bool {
				if !isB || !shrunk {
					return true
				}
				if len(f)-14 > lower {
					dropped++
					toA = append(toA, tooBig(f, lower, tc.show))
					return false
				}
				whole, fragment := r.take(f)
				if whole != nil {
					toB = append(toB, whole)
				}
				return !fragment
			}}
			s = newSim(t, cfg)
			deliver := func() {
				for i, q := range []*[][]byte{&toA, &toB} {
					for _, b := range *q {
						f := link.Frame{N: 1}
						f.Pieces[0] = bytes.Clone(b)
						s.hosts[i].w.take(&f)
					}
					*q = nil
				}
			}
			qa, qb := newSimQP(t, s.hosts[0], 40000), newSimQP(t, s.hosts[1], 40000)
			a, _ := s.openSCTPWith(tc.o, tc.v6, 8, qa, qb)
			for i := range qa.mem {
				qa.mem[i] = byte(i * 3)
			}
			shrunk = true
			from := s.now
			s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, 40000), RKey: qb.reg.STag(), Remote: 0x10000})
			if !tc.ok {
				end := s.now.Add(1e9)
				s.until("time to pass", func() bool { deliver(); return s.now > end })
				if dropped == 0 || s.hosts[0].w.stats.RxICMP != 0 || s.hosts[0].w.stats.TxFragments != 0 {
					t.Error("an error without a tag is believed")
				}
				return
			}
			s.until("all placed", func() bool { deliver(); return a.as().a.Stats().TxChunks > 20 && a.as().a.Unacked() == 0 })
			if !bytes.Equal(qa.mem, qb.mem) {
				t.Error("memory differs")
			}
			if d := s.now.Sub(from); d > 500*time.Millisecond {
				t.Errorf("it takes %v: the error caused no retransmission", d)
			}
			st := s.hosts[0].w.stats
			if dropped == 0 || st.TxFragments < 4 || st.RxICMP == 0 || s.hosts[1].w.stats.RxChecksum != 0 {
				t.Errorf("%d dropped, %+v", dropped, st)
			}
			s.hosts[0].w.disconnect(a, false)
			s.closedSCTP()
		})
	}
}
