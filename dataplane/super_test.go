package dataplane

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestSuperOverBadWire is TestVerbsOverBadWire with super-frames: some that a NIC segments, so that their segments
// are lost one by one, and some that arrive or are lost whole.
func TestSuperOverBadWire(t *testing.T) {
	oneGoroutine(t)
	seed := testenv.Seed(t)
	seeds := 4
	if testing.Short() {
		seeds = 2
	}
	bad := impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Delay: time.Millisecond, Jitter: time.Millisecond}
	corrupt := bad
	corrupt.Corrupt = 0.01 // not frames that arrive whole: no checksum covers them
	wires := []struct {
		name  string
		super link.SuperMode
		cfg   impair.Config
		mtu   int
	}{
		{"cut", link.SuperCut, impair.Config{}, 1500},
		{"cut, delay", link.SuperCut, impair.Config{Delay: 5 * time.Millisecond}, 1500},
		{"cut, all", link.SuperCut, corrupt, 1500},
		{"cut, all, 3498", link.SuperCut, corrupt, 3498},
		{"whole", link.SuperWhole, impair.Config{}, 1500},
		{"whole, delay", link.SuperWhole, impair.Config{Delay: 5 * time.Millisecond}, 1500},
		{"whole, all", link.SuperWhole, bad, 1500},
		{"whole, all, 9000", link.SuperWhole, bad, 9000},
	}
	params := []struct {
		name     string
		p        mpa.Params
		from, to netip.Addr
	}{
		{"crc", mpa.Params{CRC: true, IRD: 8, ORD: 8}, addrA, addrB},
		{"markers, IPv6", mpa.Params{CRC: true, SendMarkers: true, RecvMarkers: true, IRD: 8, ORD: 8}, netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")},
		{"plain", mpa.Params{IRD: 8, ORD: 8}, addrA, addrB},
	}
	for _, wire := range wires {
		for _, par := range params {
			t.Run(wire.name+"/"+par.name, func(t *testing.T) {
				for i := range seeds {
					wire.cfg.Seed = seed + uint64(i)
					cfg := link.PipeConfig{MTU: wire.mtu, Super: wire.super, AtoB: wire.cfg, BtoA: wire.cfg}
					cfg.BtoA.Seed += 1000
					s := newSim(t, cfg)
					s.moveData(par.p, rand.New(rand.NewPCG(seed, uint64(i))), par.from, par.to)
					a, b := &s.hosts[0].w.stats, &s.hosts[1].w.stats
					if a.TxSuper == 0 || a.TxSuperSegments < 2*a.TxSuper || a.TxSuperRefused != 0 {
						t.Errorf("%d super-frames of %d segments, %d refused", a.TxSuper, a.TxSuperSegments, a.TxSuperRefused)
					}
					if got := b.RxSuper; (got > 0) != (wire.super == link.SuperWhole) {
						t.Errorf("%d super-frames received", got)
					}
				}
			})
		}
	}
}

// mover is a link that moves frames that are held.
type mover struct {
	*link.Pipe
	moved uint64
}

func (m *mover) Hold(f *link.Frame) {
	m.moved++
	var to link.Frame
	to.IDs = f.IDs
	for _, p := range f.Pieces[:f.N] {
		parts := [][]byte{p[:len(p)/2], p[len(p)/2:]}
		if 2*f.N > link.MaxPieces {
			parts = [][]byte{p}
		}
		for _, b := range parts {
			to.Pieces[to.N] = bytes.Clone(b)
			to.N++
		}
		clear(p)
	}
	*f = to
}

// TestHeldFramesMove checks that the worker lets the link move each frame that it holds, and uses the new pieces. With markers
// it first places from a frame what it can.
func TestHeldFramesMove(t *testing.T) {
	oneGoroutine(t)
	seed := testenv.Seed(t)
	for _, markers := range []bool{false, true} {
		var moved, placed uint64
		for i := range uint64(8) {
			wire := impair.Config{Loss: 0.02, Reorder: 0.05, Delay: time.Millisecond, Jitter: time.Millisecond, Seed: seed + i}
			cfg := link.PipeConfig{MTU: 1500, Super: link.SuperWhole, AtoB: wire, BtoA: wire}
			cfg.BtoA.Seed += 1000
			s := newSim(t, cfg)
			w := s.hosts[1].w
			m := &mover{Pipe: s.hosts[1].link}
			w.link = m
			p := mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers, IRD: 8, ORD: 8}
			s.moveData(p, rand.New(rand.NewPCG(seed, i)), addrA, addrB)
			if early := w.stats.RxEarly; !markers && m.moved != early {
				t.Errorf("%d segments held, %d moved", early, m.moved)
			}
			moved, placed = moved+m.moved, placed+w.stats.RxFPDUsPlacedEarly
		}
		if moved == 0 || markers && placed == 0 {
			t.Errorf("markers %v: %d segments moved, %d FPDUs placed early", markers, moved, placed)
		}
	}
}

// TestSuperCut checks that after segmentation offload every segment on the wire starts with an FPDU, holds whole
// FPDUs only, and fits the MTU.
func TestSuperCut(t *testing.T) {
	for _, markers := range []bool{false, true} {
		segments, fpdus := 0, 0
		var framing mpa.Receiver
		var next serial.Num
		cfg := link.PipeConfig{Super: link.SuperCut, Filter: func(toB bool, b []byte) bool {
			var p pkt.Packet
			var h tcp.Header
			if !toB {
				return true
			}
			if err := p.Parse(b, len(b)); err != nil {
				t.Fatal(err)
			}
			l4 := b[p.L4Off:][:p.L4Len]
			if pkt.Fold(pkt.Sum(l4, p.PseudoSum)) != 0xffff {
				t.Fatal("the checksum of a segment is wrong")
			}
			n, err := h.Decode(l4)
			if err != nil || len(b)-14 > 1500 {
				t.Fatalf("a packet of %d bytes: %v", len(b)-14, err)
			}
			if len(l4) == n || segments == 0 && next == 0 && len(l4)-n < 100 {
				return true
			}
			payload := append([]byte(nil), l4[n:]...)
			if segments == 0 {
				framing.Init(true, markers, h.Seq)
			} else if h.Seq != next {
				t.Fatal("a segment out of order")
			}
			next = h.Seq.Add(len(payload))
			segments++
			framing.HandleStream(payload)
			var f mpa.FPDU
			whole := 0
			for {
				ok, err := framing.PollFPDU(&f)
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					break
				}
				whole++
			}
			if whole == 0 || framing.Held() != 0 {
				t.Fatalf("segment %d does not hold whole FPDUs", segments)
			}
			fpdus += whole
			return true
		}}
		s := newSim(t, cfg)
		a, b := s.open()
		const size = 1 << 20
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		s.attach(a, b, qa, qb, mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers})
		qa.sends = append(qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
		s.hosts[0].w.mark(a.lane)
		s.until("written", func() bool { return len(qa.wcs) == 1 })
		s.closeAll(a)
		if st := &s.hosts[0].w.stats; st.TxSuperSegments < uint64(segments)/2 || fpdus < segments {
			t.Errorf("markers %v: %d of %d segments were in super-frames, %d FPDUs", markers, st.TxSuperSegments, segments, fpdus)
		}
	}
}

// TestPartialChecksums checks that a pseudo-header sum is accepted as a checksum only where the queue says so.
func TestPartialChecksums(t *testing.T) {
	for _, ok := range []bool{false, true} {
		left := 0 // segments to B whose checksum is left to the device
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, b []byte) bool {
			var p pkt.Packet
			if toB && p.Parse(b, len(b)) == nil {
				left++
				binary.BigEndian.PutUint16(b[p.L4Off+16:], pkt.Fold(p.PseudoSum))
			}
			return true
		}})
		s.hosts[1].w.partial = ok
		if ok {
			s.open()
			if got := s.hosts[1].w.stats.RxPartial; got == 0 || got != uint64(left) {
				t.Errorf("%d partial checksums counted, want %d", got, left)
			}
			continue
		}
		ha := s.hosts[0]
		listen(t, s.hosts[1].w, 1, &ListenRequest{Local: netip.AddrPortFrom(addrB, 7174), Backlog: 8})
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
		if err := ha.w.connect(ha.w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, 0); err != nil {
			t.Fatal(err)
		}
		s.until("a SYN was dropped", func() bool { return s.hosts[1].w.stats.RxChecksum > 0 })
		if n := s.hosts[1].w.stats.Conns; n != 0 {
			t.Errorf("%d connections by SYNs with a bad checksum", n)
		}
	}
}

// TestSuperPeerTakesNone sends to a peer that drops every frame longer than its MTU, and to one that takes
// super-frames up to some length. The sender must adapt to both and deliver every byte.
func TestSuperPeerTakesNone(t *testing.T) {
	for _, limit := range []int{1514, 9000, 20000} {
		s := newSim(t, link.PipeConfig{Super: link.SuperWhole, Filter: func(_ bool, b []byte) bool { return len(b) <= limit }})
		s.moveData(mpa.Params{CRC: true, IRD: 8, ORD: 8}, rand.New(rand.NewPCG(1, 2)), addrA, addrB)
		st := &s.hosts[0].w.stats
		if st.TxSuperDropped == 0 || st.TxSuperDropped > maxSuperFailures {
			t.Errorf("limit %d: %d super-frames were lost", limit, st.TxSuperDropped)
		}
		if got := st.TxSuper - st.TxSuperDropped; (got > 0) != (limit > 1514) {
			t.Errorf("limit %d: %d super-frames arrived", limit, got)
		}
	}
}

// TestSuperResent checks that a super-frame counts as lost only if each of its segments was retransmitted, however often
// one of them was.
func TestSuperResent(t *testing.T) {
	for _, tt := range []struct {
		again []int // offsets of retransmitted segments
		lost  bool
	}{
		{nil, false},
		{[]int{0, 0, 0, 0}, false},
		{[]int{0, 2000, 0, 2000}, false},
		{[]int{2000, 1000, 0}, true},
		{[]int{2000, 500, 1000, 500, 0}, true}, // one was cut
		{[]int{-1000, 0, 1000, 2500}, false},
	} {
		p, start := superPath{}, serial.Num(1<<32-1500)
		p.sent(start, 2500, 3, 1000)
		for _, off := range tt.again {
			p.resent(start.Add(off))
		}
		if p.acked(start.Add(2499)) || p.acked(start.Add(2500)) != tt.lost {
			t.Errorf("%v: lost %v, want %v", tt.again, !tt.lost, tt.lost)
		}
	}
}

// TestSuperOtherPath checks that a connection whose path took no super-frames tries them again when its path has
// changed.
func TestSuperOtherPath(t *testing.T) {
	for _, hop := range []Hop{
		{SrcMAC: macA, DstMAC: macB, Found: true}, {SrcMAC: macA, DstMAC: macA}, {SrcMAC: macA, DstMAC: macB, MTU: 1400},
	} {
		limit := 1514
		cfg := link.PipeConfig{Super: link.SuperWhole, Filter: func(_ bool, b []byte) bool { return len(b) <= limit }}
		s, a, q := newLoad(t, cfg, mpa.Params{CRC: true}, rdmap.OpWrite, 64<<10)
		s.load(a, q, 20)
		w := s.hosts[0].w
		if st := w.stats; st.TxSuper != maxSuperFailures || st.TxSuperDropped != st.TxSuper {
			t.Fatalf("%d super-frames, %d lost", st.TxSuper, st.TxSuperDropped)
		}
		limit = 1 << 16
		a.lane.llp.setHop(w, a.conn().tuple.Remote, &Hop{SrcMAC: macA, DstMAC: macB})
		s.load(a, q, 20)
		if got := w.stats.TxSuper; got != maxSuperFailures {
			t.Errorf("%d super-frames although nothing has changed", got)
		}
		a.lane.llp.setHop(w, a.conn().tuple.Remote, &hop)
		s.load(a, q, 20)
		if got := w.stats.TxSuper; got == maxSuperFailures {
			t.Errorf("%+v: no super-frame on the new path", hop)
		}
	}
}

// TestSuperMTU lowers the path's MTU while super-frames are in flight.
func TestSuperMTU(t *testing.T) {
	oneGoroutine(t)
	s := newSim(t, link.PipeConfig{Super: link.SuperCut, AtoB: impair.Config{Delay: time.Millisecond}, BtoA: impair.Config{Delay: time.Millisecond}})
	a, b := s.open()
	const size = 4 << 20
	qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
	rng := rand.NewChaCha8([32]byte{7})
	rng.Read(qa.mem)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	qa.sends = append(qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
	s.hosts[0].w.mark(a.lane)
	s.until("some super-frames", func() bool { return s.hosts[0].w.stats.TxSuper > 10 })
	before := s.hosts[0].w.stats.TxSuper
	a.lane.llp.setHop(s.hosts[0].w, a.conn().tuple.Remote, &Hop{SrcMAC: macA, DstMAC: macB, MTU: 1280})
	s.until("written", func() bool { return len(qa.wcs) == 1 })
	s.closeAll(a)
	if string(qa.mem) != string(qb.mem) {
		t.Error("written bytes differ")
	}
	if s.hosts[0].w.stats.TxSuper == before {
		t.Error("no super-frame with the new MTU")
	}
}

// TestSuperFull checks that super-frames are full while messages follow each other: the last record of
// a message is filled by the next one, and the frames of 90 segments, two full super-frames, leave at once. One ACK
// is sent for all that arrive in a turn.
func TestSuperFull(t *testing.T) {
	oneGoroutine(t)
	for _, tt := range []struct {
		op        rdmap.Op
		size, mtu int
		frames    float64 // per message; an upper bound
		acks      float64 // and of the receiver
	}{
		{rdmap.OpWrite, 4 << 10, 1500, 0.25, 0.1},
		{rdmap.OpWrite, 64 << 10, 1500, 1.15, 0.7},
		{rdmap.OpRead, 64 << 10, 1500, 1.15, 0.7},
		{rdmap.OpWrite, 1 << 20, 1500, 17, 10},
		{rdmap.OpWrite, 64 << 10, 9000, 1.2, 0.5},
		{rdmap.OpWrite, 1 << 20, 9000, 18, 6},
	} {
		t.Run(fmt.Sprintf("%v/%d/mtu=%d", tt.op, tt.size, tt.mtu), func(t *testing.T) {
			s, a, q := newLoad(t, link.PipeConfig{Super: link.SuperWhole, MTU: tt.mtu}, mpa.Params{CRC: true, IRD: 16, ORD: 16}, tt.op, tt.size)
			s.load(a, q, 200)
			w, far := s.hosts[0].w, s.hosts[1].w
			if tt.op == rdmap.OpRead {
				w, far = far, w
			}
			const n = 200
			before, acks := w.stats.TxFrames, far.stats.TxFrames
			s.load(a, q, n)
			if got := float64(w.stats.TxFrames-before) / n; got > tt.frames {
				t.Errorf("%.2f frames a message; want at most %v", got, tt.frames)
			}
			if got := float64(far.stats.TxFrames-acks) / n; got > tt.acks {
				t.Errorf("%.2f frames of the receiver a message; want at most %v", got, tt.acks)
			}
		})
	}
}

// TestSuperShared checks that super-frames are full while many connections send at the same time.
func TestSuperShared(t *testing.T) {
	oneGoroutine(t)
	for _, mtu := range []int{1500, 9000} {
		t.Run(fmt.Sprintf("mtu=%d", mtu), func(t *testing.T) {
			const conns, size, n = 16, 64 << 10, 100
			s := newLoadLanes(t, link.PipeConfig{Super: link.SuperWhole, MTU: mtu, Slots: 8192})
			s.add(conns, 0, 0, rdmap.OpWrite, size)
			s.run(n * size) // the paths are probed
			w := s.hosts[0].w
			before := w.stats.TxFrames
			s.run(n * size)
			got := float64(w.stats.TxFrames-before) / (n * conns)
			t.Logf("%.2f frames for a message of 64 KiB", got)
			if got > 1.5 {
				t.Errorf("%.2f frames for a message of 64 KiB; want at most 1.5", got)
			}
		})
	}
}

// refusing is a link that refuses every third super-frame.
type refusing struct {
	link.Segmenter
	n int
}

func (r *refusing) SendSuper(s *link.Super) bool {
	r.n++
	return r.n%3 != 0 && r.Segmenter.SendSuper(s)
}

// TestSuperRefused checks that the segments of a super-frame that the link refuses leave separately, those of a run
// from slots to which they are copied.
func TestSuperRefused(t *testing.T) {
	oneGoroutine(t)
	s := newSim(t, link.PipeConfig{Super: link.SuperWhole})
	for i := range s.hosts {
		w := s.hosts[i].w
		w.super.link = &refusing{Segmenter: w.super.link}
	}
	s.moveData(mpa.Params{CRC: true, IRD: 8, ORD: 8}, rand.New(rand.NewPCG(testenv.Seed(t), 1)), addrA, addrB)
	if a := &s.hosts[0].w.stats; a.TxSuper == 0 || a.TxSuperRefused == 0 {
		t.Errorf("%d super-frames sent, %d refused", a.TxSuper, a.TxSuperRefused)
	}
}

// TestRuns checks that large Writes lie in buffers of runs, also after losses, that many connections together get no
// more buffers than there are, and that all come back.
func TestRuns(t *testing.T) {
	oneGoroutine(t)
	for _, wire := range []impair.Config{{}, {Delay: 20 * time.Millisecond}, {Loss: 0.01, Delay: time.Millisecond}} {
		s := newLoadLanes(t, link.PipeConfig{Super: link.SuperWhole, AtoB: wire, BtoA: wire})
		s.add(20, 0, 0, rdmap.OpWrite, 256<<10)
		s.run(4 << 20)
		p := &s.hosts[0].w.super.runs
		t.Logf("%d buffers", len(p.bufs))
		if len(p.bufs) == 0 || len(p.bufs) > maxRuns {
			t.Errorf("%+v: %d buffers", wire, len(p.bufs))
		}
		held := 0
		for _, l := range s.all {
			if c := l.c.conn(); c.segs != nil {
				held += c.runs
			}
		}
		if held != maxRuns-p.left() {
			t.Errorf("%+v: the connections have %d buffers, %d are taken", wire, held, maxRuns-p.left())
		}
	}
}
