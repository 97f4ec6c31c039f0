package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/ipfrag"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// cutter is a link of host 1 behind a router that fragments long packets. The fragments arrive outside the queue, in
// any order.
type cutter struct {
	*link.Pipe
	e      *Engine
	rnd    *rand.Rand
	late   [][]byte // fragments in flight
	id     uint32
	loss   float64
	direct bool // fragments arrive on the queue
	cut    int
}

func (c *cutter) Receive(fs []link.Frame) int {
	n := c.Pipe.Receive(fs)
	out := 0
	for i := range fs[:n] {
		f := &fs[i]
		if f.Len() <= 600 {
			fs[out] = *f
			out++
			continue
		}
		var b []byte
		for _, p := range f.Pieces[:f.N] {
			b = append(b, p...)
		}
		c.Pipe.Release(f)
		c.id++
		c.cut++
		for _, p := range testenv.Cut(b, 400, c.id) {
			if c.rnd.Float64() >= c.loss {
				c.late = append(c.late, p)
			}
		}
	}
	c.rnd.Shuffle(len(c.late), func(i, j int) { c.late[i], c.late[j] = c.late[j], c.late[i] })
	keep := 0
	if n > 0 {
		keep = len(c.late) / 4
	}
	w := c.e.workers[0]
	for _, b := range c.late[keep:] {
		if c.direct {
			f := link.Frame{N: 2}
			f.Pieces[0], f.Pieces[1] = b[:100], b[100:]
			w.take(&f)
		} else if whole := w.dev.frags.handle(w.now, b); whole != nil {
			w.dev.frags.deliver(w, whole, false)
		}
	}
	c.late = c.late[:keep]
	return out
}

// TestDefragment moves data over a path with a router that fragments packets.
func TestDefragment(t *testing.T) {
	const size = 200000
	for _, tc := range []struct {
		name                string
		sctp                *SCTP
		v6, markers, direct bool
		loss                float64
	}{
		{name: "TCP"}, {name: "TCP over IPv6", v6: true}, {name: "TCP with markers", markers: true}, {name: "TCP by the queue", direct: true},
		{name: "TCP with loss", loss: 0.01}, {name: "SCTP", sctp: &SCTP{}}, {name: "SCTP over IPv6", sctp: &SCTP{}, v6: true},
		{name: "SCTP over UDP", sctp: &SCTP{UDP: true}}, {name: "SCTP over UDP and IPv6", sctp: &SCTP{UDP: true}, v6: true, loss: 0.01},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			hb := s.hosts[1]
			c := &cutter{Pipe: hb.link, e: hb.e, rnd: testenv.Rand(t), loss: tc.loss, direct: tc.direct}
			hb.w.link = c
			qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, hb, size)
			var a *stream
			if tc.sctp != nil {
				a, _ = s.openSCTPWith(*tc.sctp, tc.v6, 8, qa, qb)
			} else {
				var b *stream
				a, b = s.openTo(addrOf(0, tc.v6), addrOf(1, tc.v6))
				s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 8, ORD: 8, SendMarkers: tc.markers, RecvMarkers: tc.markers})
			}
			for i := range qa.mem {
				qa.mem[i] = byte(i * 7)
			}
			s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
			s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(0, 8), RKey: qb.reg.STag(), Remote: 0x10000})
			s.until("all placed", func() bool { return len(qa.wcs) == 2 })
			if !bytes.Equal(qa.mem, qb.mem) {
				t.Error("memory differs")
			}
			for len(c.late) > 0 { // of a spurious retransmission, or of an acknowledgement's
				hb.w.turn()
			}
			st := hb.w.dev.frags.stats()
			if c.cut < size/1500 || tc.loss == 0 && (int(st.Packets) != c.cut || st.Waiting != 0) || st.Malformed+st.Overlap+st.Lost != 0 {
				t.Errorf("%d packets cut, %+v", c.cut, st)
			}
			if w := hb.w.stats; w.RxMalformed+w.RxChecksum+w.RxNoConn != 0 {
				t.Errorf("%+v", w)
			}
			if tc.sctp != nil {
				s.hosts[0].w.disconnect(a, false)
				s.closedSCTP()
			} else {
				s.closeAll(a)
			}
			if hb.w.held.whole != 0 || hb.w.dev.frags.queued.Load() != 0 {
				t.Errorf("%d bytes held, %d queued", hb.w.held.whole, hb.w.dev.frags.queued.Load())
			}
		})
	}
}

// TestHeldWhole checks that reassembled out-of-order segments are held up to a byte limit, since they do not use the
// link's memory.
func TestHeldWhole(t *testing.T) {
	const size = 8000
	var grabbed [][]byte
	grab := false
	s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool {
		if !isB || !grab || len(f) < 200 {
			return true
		}
		grabbed = append(grabbed, bytes.Clone(f))
		return false
	}})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	w := s.hosts[1].w
	grab = true
	s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("four segments sent", func() bool { return len(grabbed) >= 4 })
	grab = false
	const taken = maxWhole - 3100
	w.held.whole = taken
	for _, f := range grabbed[1:4] {
		w.takeWhole(f, false)
	}
	if b.conn().holds != 2 || w.stats.RxNoHold != 1 {
		t.Errorf("%d segments held, %d not; want 2 and 1", b.conn().holds, w.stats.RxNoHold)
	}
	w.held.whole -= taken
	s.until("the rest", func() bool { return len(qa.wcs) == 1 })
	s.closeAll(a)
	if w.held.whole != 0 {
		t.Errorf("%d bytes held after the end", w.held.whole)
	}
}

// TestTimeExceeded checks that the source of an incomplete packet gets an ICMP Time Exceeded error that it can parse,
// unless no other host can have its address or MAC address.
func TestTimeExceeded(t *testing.T) {
	group := macA
	group[0] |= 1
	for _, tc := range []struct {
		from string
		mac  [6]byte
	}{{"10.0.0.1", macA}, {"fd00::1", macA}, {"10.0.0.255", macA}, {"fd00::9", macA}, {"10.0.0.1", group}} {
		t.Run(fmt.Sprintf("%s, %x", tc.from, tc.mac), func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			w := s.hosts[1].w
			addr := netip.MustParseAddr(tc.from)
			v6, forged := addr.Is6(), addr != addrOf(0, addr.Is6()) || tc.mac == group
			s.hosts[1].e.resolver = hostless{}
			s.hosts[1].e.learnHostless()
			tu := pkt.Tuple{Flow: pkt.Flow{Local: addr.As16(), Remote: addrOf(1, v6).As16(), LocalPort: 40000, RemotePort: 7174},
				Proto: pkt.ProtoTCP, V6: v6, SrcMAC: tc.mac, DstMAC: macB, VLANs: [2]uint16{5, 6}, NVLAN: 2}
			b := make([]byte, tu.HeaderLen()+2000)
			tu.Put(b, 2000, 0)
			binary.BigEndian.PutUint16(b[tu.HeaderLen():], 40000)
			binary.BigEndian.PutUint16(b[tu.HeaderLen()+2:], 7174)
			first := testenv.Cut(b, 1400, 1)[0]
			f := link.Frame{N: 1}
			f.Pieces[0] = first
			w.now = s.now
			if w.take(&f) {
				t.Error("kept")
			}
			s.now = s.now.Add(ipfrag.Timeout6)
			if at := s.hosts[1].w.dev.frags.timeout(); at != 0 {
				t.Errorf("once more at %v", at)
			}
			w.turn()
			var got [1]link.Frame
			if n := s.hosts[0].link.Receive(got[:]); (n == 0) != forged {
				t.Fatalf("%d errors came", n)
			} else if forged {
				return
			}
			defer s.hosts[0].link.Release(&got[0])
			var p pkt.Packet
			var e pkt.ICMPError
			head := got[0].Pieces[0]
			if err := errors.Join(p.Parse(head, got[0].Len()), e.Parse(&p, head)); err != nil {
				t.Fatal(err)
			}
			if e.Kind != pkt.TimeExceeded || e.Code != 1 || e.Flow != tu.Flow || p.SrcMAC != macB || p.DstMAC != macA || p.VLANs != tu.VLANs || p.Flow.Local != tu.Local {
				t.Errorf("%+v, %+v", p, e)
			}
		})
	}
}

// fakeRing is a FragmentSource.
type fakeRing struct {
	frames chan []byte
	closed chan struct{}
	once   sync.Once
}

func (r *fakeRing) Read(deadline time.Time) ([]byte, error) {
	var at <-chan time.Time
	if !deadline.IsZero() {
		timer := time.NewTimer(time.Until(deadline))
		defer timer.Stop()
		at = timer.C
	}
	select {
	case b := <-r.frames:
		return b, nil
	case <-at:
		return nil, os.ErrDeadlineExceeded
	case <-r.closed:
		return nil, os.ErrClosed
	}
}

func (r *fakeRing) Close() error {
	r.once.Do(func() { close(r.closed) })
	return nil
}

// TestFragmentSource checks that a running engine takes the packets of its fragment source and closes it at the end.
func TestFragmentSource(t *testing.T) {
	defer testenv.NoGoroutineLeaks(t)
	a, _ := newPipe(t, link.PipeConfig{})
	r := &fakeRing{frames: make(chan []byte), closed: make(chan struct{})}
	e := newEngine(t, Config{Fragments: map[string]FragmentSource{"": r}}, []Queue{{Link: a, CPU: -1}}, nil)
	e.Start()
	tu := pkt.Tuple{Flow: pkt.Flow{Local: addrB.As16(), Remote: addrA.As16()}, Proto: 99, SrcMAC: macB, DstMAC: macA}
	f := make([]byte, tu.HeaderLen()+100)
	tu.Put(f, 100, 0)
	for _, c := range testenv.Cut(f, 48, 1) {
		r.frames <- c
	}
	testenv.Until(t, "the packet and its fragments are counted", func() bool {
		all, _ := e.Stats()
		return all[0].RxUnsupported == 1 && all[0].Fragments.Packets == 1
	})
	e.Stop()
	select {
	case <-r.closed:
	default:
		t.Error("the source is open after Stop")
	}
}

// TestWholeFindsItsWorker checks that a reassembled packet reaches a connection of a worker other than the first.
func TestWholeFindsItsWorker(t *testing.T) {
	q := newTwoQueues(t, 1)
	h := q.hosts[0]
	for i, w := range q.workers[:2] {
		w.link = &cutter{Pipe: q.links[i], e: h.e, rnd: testenv.Rand(t)}
	}
	q.transfer(q.connected())
	if st := h.w.dev.frags.stats(); st.Packets < 10 || h.w.stats.RxWrongQueue < 10 {
		t.Errorf("%+v, %d forwarded", st, h.w.stats.RxWrongQueue)
	}
}
