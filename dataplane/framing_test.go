package dataplane

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestRecordBoundary checks that FPDUs share a segment when they fit, and that no FPDU is split at the end of a
// segment (RFC 5044 section 5.1).
func TestRecordBoundary(t *testing.T) {
	for _, over := range []int{-4, 0, 4, 8} { // length of both FPDUs, minus the MSS
		var lens []int // payload lengths on the wire
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
			if toB {
				ip := f[14:]
				hdr := 20 + int(ip[20+12]>>4)*4
				if n := int(binary.BigEndian.Uint16(ip[2:])) - hdr; n > 0 {
					lens = append(lens, n)
				}
			}
			return true
		}})
		a, b := s.open()
		qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
		s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
		mss := a.conn().tcp.MSS()
		const first = 100
		one := a.conn().tx.Size(0, ddp.UntaggedLen+first)
		second := mss + over - one - (2 + ddp.UntaggedLen + 4)
		if got := one + a.conn().tx.Size(0, ddp.UntaggedLen+second); got != mss+over {
			t.Fatalf("FPDUs of %d bytes at an MSS of %d", got, mss)
		}
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 1, SGEs: qb.sge(0, 2000)}, verbs.RecvWR{ID: 2, SGEs: qb.sge(2000, 2000)})
		s.post(a, qa, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qa.sge(0, first)})
		s.post(a, qa, verbs.SendWR{ID: 4, Op: rdmap.OpSend, SGEs: qa.sge(0, second)})
		s.until("both received", func() bool { return len(qb.wcs) == 2 })
		want := []int{mss + over}
		if over > 0 {
			want = []int{one, mss + over - one}
		}
		if !slices.Equal(lens, want) {
			t.Errorf("%+d bytes beyond the MSS: payloads of %v bytes; want %v", over, lens, want)
		}
		s.closeAll(a)
	}
}

// TestAttachUnread checks that FPDUs, or a part of one, that arrived before the switch to full operation are
// processed at the switch, with the first marker where the first FPDU begins. FPDUs after a gap are then found by
// their markers.
func TestAttachUnread(t *testing.T) {
	for _, markers := range []bool{false, true} {
		for _, before := range []int{1, 100, 514, 640} {
			t.Run(fmt.Sprintf("markers=%v/%d bytes", markers, before), func(t *testing.T) {
				losing, lost := false, 0
				s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
					if toB && losing && len(f) > 1000 && lost == 0 {
						lost++
						return false
					}
					return true
				}})
				a, b := s.open()
				const size, each = 6000, 300
				qb := newSimQP(t, s.hosts[1], 8192)
				data := bytes.Repeat([]byte("before the switch, and behind it "), size)[:size]
				var f mpa.Framer
				var wire []byte
				start := a.conn().tcp.SndNxt()
				f.Init(true, markers, start)
				for i := 0; i < size; i += each {
					h := ddp.Tagged{Last: true, ULP: 0x40, STag: qb.reg.STag(), TO: 0x10000 + uint64(i)}
					ulpdu := append(h.Append(nil), data[i:i+each]...)
					seq := start.Add(len(wire))
					fpdu := make([]byte, f.Size(seq, len(ulpdu)))
					f.Begin(fpdu, seq, len(ulpdu))
					f.Write(ulpdu)
					f.End()
					wire = append(wire, fpdu...)
				}
				a.conn().streamSend(s.hosts[0].w, wire[:before])
				s.until("the front", func() bool { return b.conn().pre.unread() == before })
				s.hosts[1].w.attach(b.id, b, Attachment{QP: &qb.QPBinding, Params: mpa.Params{CRC: true, RecvMarkers: markers}})
				s.until("full operation", func() bool { return b.mode == modeFull })
				losing = true
				a.conn().streamSend(s.hosts[0].w, wire[before:])
				s.until("the Writes", func() bool { return bytes.Equal(qb.mem[:size], data) })
				if n := s.hosts[1].w.stats.RxFPDUsPlacedEarly; (n > 0) != markers || lost != 1 {
					t.Errorf("%d FPDUs placed early, %d frames lost", n, lost)
				}
				s.closeAll(a)
			})
		}
	}
}

// TestEarlyOneWay checks that early placement depends on the peer's markers only, not on ours.
func TestEarlyOneWay(t *testing.T) {
	for _, sends := range []bool{true, false} {
		lost := 0
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
			if toB && len(f) > 1400 && lost == 0 {
				lost++
				return false
			}
			return true
		}})
		a, b := s.open()
		const size = 8000
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		for i := range qa.mem {
			qa.mem[i] = byte(i + i/251)
		}
		s.attachEach(a, b, qa, qb, mpa.Params{CRC: true, SendMarkers: sends, RecvMarkers: !sends, IRD: 4, ORD: 4})
		s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
		s.until("the Write", func() bool { return bytes.Equal(qa.mem, qb.mem) })
		if n := s.hosts[1].w.stats.RxFPDUsPlacedEarly; (n > 0) != sends || lost != 1 {
			t.Errorf("peer sends markers: %v; %d FPDUs placed early, %d frames lost", sends, n, lost)
		}
		s.closeAll(a)
	}
}
