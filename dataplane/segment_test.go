package dataplane

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/tcp"
)

// A speaker takes the place of host 0 and sends host 1 segments that our TCP never sends: they overlap or exceed the
// window. Host 0 does not see the answers.
type speaker struct {
	*sim
	a, b  *stream
	qb    *simQP
	start serial.Num // first byte of the stream of FPDUs
	edge  serial.Num // right edge of the window that host 1 offered first
	data  []byte     // data that the FPDUs write
	fpdus []byte
	ends  []int // end offsets in fpdus
	said  tcp.Header
}

// newSpeaker composes the stream of one Write for each of sizes, contiguous in memory, and takes host 1 to full
// operation with a window of window bytes.
func newSpeaker(t *testing.T, markers bool, window int, sizes []int) *speaker {
	var heard tcp.Header
	deaf := false
	p := &speaker{}
	p.sim = newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
		var in pkt.Packet
		if err := in.Parse(f, len(f)); err != nil {
			t.Error(err)
		}
		h := &heard
		if toB {
			h = &p.said
		}
		if _, err := h.Decode(f[in.L4Off:]); err != nil {
			t.Error(err)
		}
		return toB || !deaf
	}})
	p.hosts[1].w.tcp.RcvWindow = window
	p.a, p.b = p.open()
	p.start, p.edge = heard.Ack, heard.Ack.Add(int(heard.Window)) // the window of a SYN-ACK is not scaled
	deaf = true
	if p.start != p.a.conn().tcp.SndNxt() || p.edge != p.start.Add(window) {
		t.Fatalf("a window of %d bytes at %d; want %d at %d", heard.Window, p.start, window, p.a.conn().tcp.SndNxt())
	}
	p.qb = newSimQP(t, p.hosts[1], 1<<16)
	var f mpa.Framer
	f.Init(true, markers, p.start)
	for i, size := range sizes {
		h := ddp.Tagged{Last: true, ULP: 0x40, STag: p.qb.reg.STag(), TO: 0x10000 + uint64(len(p.data))}
		ulpdu := append(h.Append(nil), bytes.Repeat([]byte{byte(i + 1)}, size)...)
		p.data = append(p.data, ulpdu[ddp.TaggedLen:]...)
		seq := p.start.Add(len(p.fpdus))
		fpdu := make([]byte, f.Size(seq, len(ulpdu)))
		f.Begin(fpdu, seq, len(ulpdu))
		f.Write(ulpdu)
		f.End()
		p.fpdus = append(p.fpdus, fpdu...)
		p.ends = append(p.ends, len(p.fpdus))
	}
	p.hosts[1].w.attach(p.b.id, p.b, Attachment{QP: &p.qb.QPBinding, Params: mpa.Params{CRC: true, RecvMarkers: markers}})
	p.until("full operation", func() bool { return p.b.mode == modeFull })
	return p
}

// at returns the offset of FPDU i, or of the end if i is their number.
func (p *speaker) at(i int) int {
	if i == 0 {
		return 0
	}
	return p.ends[i-1]
}

// say makes host 1 receive one segment with the FPDUs from number from up to number to.
func (p *speaker) say(from, to int) {
	p.t.Helper()
	w := p.hosts[0].w
	w.reap()
	s, ok := w.link.Alloc()
	if !ok {
		p.t.Fatal("no slot")
	}
	n := copy(w.link.Bytes(s)[headroom:], p.fpdus[p.at(from):p.at(to)])
	h := p.said
	h.Seq = p.start.Add(p.at(from))
	w.slots[s].owned = false
	w.postSegment(&p.a.conn().tuple, &h, s, n, pkt.Sum(w.link.Bytes(s)[headroom:headroom+n], 0), 0)
	w.link.Flush()
	if n := p.hosts[1].w.pollRx(); n != 1 {
		p.t.Fatalf("%d frames have come", n)
	}
}

// written checks that the first n FPDUs are placed and no other byte is.
func (p *speaker) written(n int) {
	p.t.Helper()
	if ev, ok := p.hosts[1].take(EventFailed); ok || p.b.health != healthy {
		p.t.Fatalf("failed: %v", ev.Err)
	}
	want := len(p.data)
	if n < len(p.ends) {
		want = 0
		for _, v := range p.data {
			if int(v) > n {
				break
			}
			want++
		}
	}
	if !bytes.Equal(p.qb.mem[:want], p.data[:want]) || bytes.Count(p.qb.mem[want:], []byte{0}) != len(p.qb.mem)-want {
		p.t.Errorf("%d FPDUs: other bytes are placed", n)
	}
	if got := p.b.conn().tcp.RcvNxt(); got != p.start.Add(p.at(n)) {
		p.t.Errorf("received up to %d; want %d", got.Sub(p.start), p.at(n))
	}
	if w := p.hosts[1].w; len(w.held.free) != len(w.held.frames) {
		p.t.Errorf("%d frames are held", len(w.held.frames)-len(w.held.free))
	}
}

// TestOverlaps checks that only the new bytes of a segment are used, in order or out of order, placed or held.
func TestOverlaps(t *testing.T) {
	for _, tt := range []struct {
		name  string
		says  [][2]int
		early [2]uint64 // number of FPDUs placed out of order: without markers, and with them
	}{
		{"in order", [][2]int{{0, 2}, {2, 4}, {4, 6}}, [2]uint64{}},
		{"the front came before", [][2]int{{0, 2}, {1, 3}, {0, 4}, {3, 6}}, [2]uint64{}},
		{"ahead, and longer", [][2]int{{2, 4}, {2, 6}, {0, 2}}, [2]uint64{0, 4}},
		{"ahead, and later", [][2]int{{2, 4}, {3, 6}, {0, 2}}, [2]uint64{0, 4}},
		{"ahead, and earlier", [][2]int{{3, 5}, {1, 4}, {0, 2}, {5, 6}}, [2]uint64{0, 3}},
		{"around", [][2]int{{3, 4}, {2, 6}, {0, 2}, {2, 6}}, [2]uint64{0, 2}},
		{"up to what is held", [][2]int{{2, 4}, {0, 3}, {4, 6}}, [2]uint64{0, 2}},
	} {
		for i, markers := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, markers %v", tt.name, markers), func(t *testing.T) {
				p := newSpeaker(t, markers, 16<<10, []int{200, 248, 300, 268, 340, 220})
				for _, s := range tt.says {
					p.say(s[0], s[1])
				}
				p.written(len(p.ends))
				if n := p.hosts[1].w.stats.RxFPDUsPlacedEarly; n != tt.early[i] {
					t.Errorf("%d FPDUs are placed early; want %d", n, tt.early[i])
				}
			})
		}
	}
}

// TestBeyondWindow checks that the part of a segment within the window is used, and that a CRC computed over the
// whole segment is not.
func TestBeyondWindow(t *testing.T) {
	const window = 8 << 10
	var sizes []int
	left := window
	for ; left > 1600; left -= 1200 {
		sizes = append(sizes, 1200-2-ddp.TaggedLen-4)
	}
	sizes = append(sizes, left-400-2-ddp.TaggedLen-4, 400-2-ddp.TaggedLen-4, 400-2-ddp.TaggedLen-4)
	p := newSpeaker(t, false, window, sizes)
	last := len(sizes) - 2 // that fits
	if p.start.Add(p.at(last+1)) != p.edge {
		t.Fatalf("FPDUs of %v bytes; want one to end at the window's edge", p.ends)
	}
	for i := range last {
		p.say(i, i+1)
	}
	p.say(last, last+2)
	p.written(last + 1)
}
