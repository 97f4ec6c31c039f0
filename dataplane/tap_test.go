package dataplane

import (
	"net/netip"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestTap checks that a tap sees every frame of its connection in both directions, whole and in order; that frames
// without room are counted; and that a tap that matches nothing sees nothing.
func TestTap(t *testing.T) {
	s, a, _, qa, qb := fullPair(t, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	e := s.hosts[0].e
	e.RemoveTap(e.NewTap(1, 64, nil)) // there is none
	all := e.NewTap(4096, 2048, func(f *pkt.Flow) bool { return *f == a.flow() })
	none := e.NewTap(1, 64, func(*pkt.Flow) bool { return false })
	tiny := e.NewTap(2, 60, nil)
	for _, tap := range []*Tap{all, none, tiny} {
		e.AddTap(tap)
	}
	gone := e.NewTap(64, 64, nil)
	e.RemoveTap(gone) // not active
	e.AddTap(gone)
	e.RemoveTap(gone)
	before := s.hosts[0].w.stats
	const size = 8192
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpRead, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("the read", func() bool { return len(qa.wcs) == 1 })
	for _, tap := range []*Tap{all, none, tiny} {
		e.RemoveTap(tap)
	}
	after := s.hosts[0].w.stats
	rx, tx := after.RxFrames-before.RxFrames, after.TxFrames-before.TxFrames

	var in, out, total uint64
	all.Read(func(f *TapFrame) bool {
		var p pkt.Packet
		if err := p.Parse(f.Data, len(f.Data)); err != nil || f.Size != len(f.Data) {
			t.Errorf("frame of %d bytes, %d copied: %v", f.Size, len(f.Data), err)
		}
		total += uint64(f.Size)
		switch {
		case f.Out && p.Flow == a.flow().Reverse():
			out++
		case !f.Out && p.Flow == a.flow():
			in++
		default:
			t.Errorf("out %v: %v", f.Out, p.Flow)
		}
		return true
	})
	if in != rx || out != tx || in < size/1500 || all.Dropped() != 0 {
		t.Errorf("%d frames in, %d out, %d dropped; the worker had %d and %d", in, out, all.Dropped(), rx, tx)
	}
	if want := after.RxBytes - before.RxBytes + after.TxBytes - before.TxBytes; total != want {
		t.Errorf("%d bytes; want %d", total, want)
	}
	if n := gone.Read(func(*TapFrame) bool { return true }); n != 0 {
		t.Errorf("%d frames for a tap that was removed", n)
	}
	if n := none.Read(func(*TapFrame) bool { return true }); n != 0 || none.Dropped() != 0 {
		t.Errorf("%d frames that do not match", n)
	}
	if n := tiny.Read(func(*TapFrame) bool { return false }); n != 0 {
		t.Errorf("%d frames taken that were refused", n)
	}
	n := tiny.Read(func(f *TapFrame) bool {
		if len(f.Data) > 60 || f.Size < len(f.Data) {
			t.Errorf("%d of %d bytes", len(f.Data), f.Size)
		}
		return true
	})
	if n != 2 || tiny.Dropped() != rx+tx-2 {
		t.Errorf("tap of 2: %d frames, %d dropped; want %d", n, tiny.Dropped(), rx+tx-2)
	}
	s.step()
	if s.hosts[0].w.taps != nil {
		t.Error("taps are looked at after RemoveTap")
	}
}

// TestTapSCTP checks that a tap of an association's flow sees its packets in both directions, also over UDP.
func TestTapSCTP(t *testing.T) {
	for name, o := range map[string]SCTP{"raw": {}, "UDP": {UDP: true}} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
			var taps []*Tap
			for i, h := range s.hosts {
				flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
				if i == 1 {
					flow = flow.Reverse()
				}
				taps = append(taps, h.e.NewTap(4096, 2048, func(f *pkt.Flow) bool { return *f == flow }))
				h.e.AddTap(taps[i])
			}
			a, _ := s.openSCTP(o, qa, qb)
			s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpRead, SGEs: qa.sge(0, 8192), RKey: qb.reg.STag(), Remote: 0x10000})
			s.until("the read", func() bool { return len(qa.wcs) == 1 })
			for i, h := range s.hosts {
				h.e.RemoveTap(taps[i])
				var in, out uint64
				taps[i].Read(func(f *TapFrame) bool {
					if f.Out {
						out++
					} else {
						in++
					}
					return true
				})
				if st := h.w.stats; in != st.RxFrames || out != st.TxFrames || in < 3 || out < 3 {
					t.Errorf("host %d: %d frames in, %d out; the worker had %d and %d", i, in, out, st.RxFrames, st.TxFrames)
				}
			}
		})
	}
}
