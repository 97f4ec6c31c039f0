package dataplane

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// requestSCTP makes host 0 request a session of host 1 and waits for the request.
func (s *sim) requestSCTP(o SCTP, v6 bool) (a *stream, req Event) {
	s.t.Helper()
	ha, hb := s.hosts[0], s.hosts[1]
	local, remote := netip.AddrPortFrom(addrOf(0, v6), 40000), netip.AddrPortFrom(addrOf(1, v6), 7174)
	hb.w.turn()
	if hb.w.sctp == nil {
		hb.w.listenSCTP(s.t, 1, remote, o)
	}
	id := ha.w.newID()
	ha.w.dialSCTP(s.t, id, pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, o, session.Setup{Private: []byte("hello")}, 0)
	req = s.event(1, EventRequest)
	if string(req.Setup.Private) != "hello" || req.Listener != 1 {
		s.t.Fatalf("request %+v %+v", req, req.Setup)
	}
	return ha.w.streams[id], req
}

// openSCTP makes a session with queue pairs at both ends.
func (s *sim) openSCTP(o SCTP, qa, qb *simQP) (a, b *stream) {
	s.t.Helper()
	return s.openSCTPWith(o, false, 8, qa, qb)
}

// connect joins two queue pairs over either transport, and returns the first one's
// connection.
func (s *sim) connect(overSCTP bool, qa, qb *simQP) *stream {
	s.t.Helper()
	if overSCTP {
		a, _ := s.openSCTP(SCTP{}, qa, qb)
		return a
	}
	a, b := s.open()
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	return a
}

// openSCTPWith is openSCTP with an IP version and a maximum number of Reads.
func (s *sim) openSCTPWith(o SCTP, v6 bool, reads int, qa, qb *simQP) (a, b *stream) {
	s.t.Helper()
	return s.openSCTPParams(o, v6, mpa.Params{IRD: reads, ORD: reads}, nil, qa, qb)
}

// openSCTPParams is openSCTP with the parameters of full operation and, if fail is not nil, the error that the
// initiator finds in the answer.
func (s *sim) openSCTPParams(o SCTP, v6 bool, p mpa.Params, fail *term.Error, qa, qb *simQP) (a, b *stream) {
	s.t.Helper()
	a, req := s.requestSCTP(o, v6)
	ha, hb := s.hosts[0], s.hosts[1]
	b = hb.w.streams[req.Conn]
	hb.w.answerSCTP(b, session.Setup{Private: []byte("welcome")}, Attachment{QP: &qb.QPBinding, Params: p})
	ans := s.event(0, EventAnswer)
	if string(ans.Setup.Private) != "welcome" || ans.Conn != a.id {
		s.t.Fatalf("answer %+v", ans)
	}
	p.Initiator = true
	ha.w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: p, Fail: fail})
	return a, b
}

// closedSCTP checks that all resources were returned.
func (s *sim) closedSCTP() {
	s.t.Helper()
	s.until("associations gone", func() bool {
		return s.hosts[0].w.sctp.n == 0 && s.hosts[1].w.sctp.n == 0
	})
	for s.step() {
		if s.now > s.limit {
			s.t.Fatal("never at rest")
		}
	}
	for i, h := range s.hosts {
		if h.link.FreeSlots() != h.link.Slots() {
			s.t.Errorf("host %d: %d TX slots not given back", i, h.link.Slots()-h.link.FreeSlots())
		}
		if h.w.timers.Len() != 0 || len(h.w.streams) != 0 {
			s.t.Errorf("host %d: %d timers, %d connections left", i, h.w.timers.Len(), len(h.w.streams))
		}
	}
}

// TestSCTPVerbs moves data by Write, Send and Read over SCTP, over good and lossy wires, in both profiles and over
// UDP.
func TestSCTPVerbs(t *testing.T) {
	oneGoroutine(t)
	seed := testenv.Seed(t)
	seeds := 4
	if testing.Short() {
		seeds = 1
	}
	wires := []struct {
		name string
		cfg  impair.Config
		mtu  int
	}{
		{"clean", impair.Config{}, 1500},
		{"jumbo", impair.Config{}, 9000},
		{"loss", impair.Config{Loss: 0.03, Delay: time.Millisecond}, 1500},
		{"all", impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Corrupt: 0.01, Delay: time.Millisecond, Jitter: time.Millisecond}, 3498},
	}
	for _, wire := range wires {
		for name, o := range map[string]SCTP{"rfc5043": {}, "draft": {Profile: session.Draft}, "udp": {UDP: true}} {
			t.Run(wire.name+"/"+name, func(t *testing.T) {
				for i := range seeds {
					wire.cfg.Seed = seed + uint64(i)
					cfg := link.PipeConfig{MTU: wire.mtu, AtoB: wire.cfg, BtoA: wire.cfg}
					cfg.BtoA.Seed += 1000
					moveDataSCTP(t, cfg, o, rand.New(rand.NewPCG(seed, uint64(i))))
				}
			})
		}
	}
}

func moveDataSCTP(t *testing.T, cfg link.PipeConfig, o SCTP, rng *rand.Rand) {
	s := newSim(t, cfg)
	a, b := s.moveDataOver(rng, func(qa, qb *simQP) (a, b *stream) { return s.openSCTP(o, qa, qb) })
	if b.as().a.Stats().RxChunks == 0 {
		t.Fatal("nothing went by SCTP")
	}
	s.hosts[0].w.disconnect(a, false)
	for i := range s.hosts {
		if ev := s.closed(i); ev.Err != nil {
			t.Errorf("host %d closed by %v", i, ev.Err)
		}
	}
	s.closedSCTP()
}

func newLoadSCTP(tb testing.TB, mtu int, op rdmap.Op, size int) (*sim, *stream, *loadQP) {
	s := newSim(tb, link.PipeConfig{MTU: mtu})
	qa, qb := &loadQP{simQP: newSimQP(tb, s.hosts[0], max(size, 4096))}, newSimQP(tb, s.hosts[1], max(size, 4096))
	qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: qa.h.table, SQDepth: 256, MaxSGE: 1, SigAll: true, Sends: qa, Recvs: qa})
	qa.SendCQ, qa.RecvCQ = qa, qa
	qa.wr = verbs.SendWR{Op: op, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000}
	a, _ := s.openSCTP(SCTP{}, qa.simQP, qb)
	s.limit = 1 << 62
	return s, a, qa
}

// TestSCTPAllocatesNothing covers the whole path through both hosts.
func TestSCTPAllocatesNothing(t *testing.T) {
	oneGoroutine(t)
	for _, l := range loads {
		l.size = min(l.size, 64<<10)
		s, a, q := newLoadSCTP(t, 1500, l.op, l.size)
		s.load(a, q, 400)
		if n := testing.AllocsPerRun(20, func() { s.load(a, q, 10) }); n != 0 {
			t.Errorf("%v/%d: %v allocations in 10 work requests; want 0", l.op, l.size, n)
		}
	}
}

// BenchmarkPipeSCTP is BenchmarkPipe over SCTP.
func BenchmarkPipeSCTP(b *testing.B) {
	for _, mtu := range []int{1500, 9000} {
		for _, l := range loads {
			b.Run(fmt.Sprintf("%v/%d/mtu=%d", l.op, l.size, mtu), func(b *testing.B) {
				s, a, q := newLoadSCTP(b, mtu, l.op, l.size)
				s.load(a, q, 64)
				b.SetBytes(int64(l.size))
				b.ReportAllocs()
				b.ResetTimer()
				s.load(a, q, b.N)
			})
		}
	}
}

// TestSCTPFullSlot sends packets that nearly fill a slot, copied for retransmission.
func TestSCTPFullSlot(t *testing.T) {
	oneGoroutine(t)
	for _, mtu := range []int{3968, 4000, 4050, 4096} {
		bad := impair.Config{Loss: 0.05, Duplicate: 0.05, Seed: 7}
		moveDataSCTP(t, link.PipeConfig{MTU: mtu, AtoB: bad, BtoA: bad}, SCTP{UDP: mtu == 4096}, rand.New(rand.NewPCG(1, uint64(mtu))))
	}
}

// TestSCTPRandomPrograms is TestRandomPrograms over SCTP.
func TestSCTPRandomPrograms(t *testing.T) { eachSeed(t, 20, randomProgramsSCTP) }

func randomProgramsSCTP(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0x73637470))
	v6 := rng.IntN(2) == 0
	cfg := link.PipeConfig{MTU: []int{600, 1280, 1500, 3498, 9000}[rng.IntN(5)]}
	if v6 {
		cfg.MTU = max(cfg.MTU, 1280)
	}
	wire := func() impair.Config {
		bad := impair.Config{Seed: rng.Uint64(), Delay: time.Duration(rng.IntN(5)) * time.Millisecond}
		if rng.IntN(3) != 0 {
			bad.Loss, bad.Duplicate, bad.Reorder, bad.Corrupt = rng.Float64()*0.08, rng.Float64()*0.05, rng.Float64()*0.1, rng.Float64()*0.02
		}
		return bad
	}
	cfg.AtoB, cfg.BtoA = wire(), wire()
	var s *sim
	if rng.IntN(3) == 0 {
		// Both wires are dead for some seconds, sometimes already for the INITs.
		from := clock.Time(time.Second + time.Duration(rng.IntN(2000))*time.Millisecond)
		cfg.Filter = func(bool, []byte) bool { return s.now < from || s.now > from.Add(3*time.Second) }
	}
	o := SCTP{Profile: session.Profile(rng.IntN(2)), UDP: rng.IntN(3) == 0}
	s = newSim(t, cfg)
	s.limit = s.now.Add(time.Hour)
	qa, qb := newSimQP(t, s.hosts[0], memLen), newSimQP(t, s.hosts[1], memLen)
	pa, pb := newPrograms(rng, qa, qb)
	pa.early, pb.early = true, true
	a, b := s.openSCTPWith(o, v6, 1+rng.IntN(16), qa, qb)
	s.runPrograms(a, b, pa, pb, 40+rng.IntN(60))
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
}

// TestSCTPStatsAdd checks that the sums include every counter.
func TestSCTPStatsAdd(t *testing.T) {
	var one, sum SCTPStats
	leaves := func(v reflect.Value, f func(reflect.Value)) {
		for i := range v.NumField() {
			if s := v.Field(i); s.Kind() == reflect.Struct {
				for j := range s.NumField() {
					f(s.Field(j))
				}
			} else {
				f(s)
			}
		}
	}
	n := 0
	leaves(reflect.ValueOf(&one).Elem(), func(v reflect.Value) { v.SetUint(1); n++ })
	sum.Assocs = 2
	for range 2 {
		sum.Assoc.Add(&one.Assoc)
		sum.Sessions.Add(&one.Sessions)
		sum.Listeners.Add(&one.Listeners)
	}
	leaves(reflect.ValueOf(&sum).Elem(), func(v reflect.Value) {
		if v.Uint() != 2 {
			n = -1
		}
	})
	if n < 30 {
		t.Errorf("not all counters are added: %+v", sum)
	}
}

// dialSCTP makes host 0 dial from a port, without waiting.
func (s *sim) dialSCTP(port uint16, timeout time.Duration) *stream {
	s.t.Helper()
	w := s.hosts[0].w
	w.turn()
	id := w.newID()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, port), netip.AddrPortFrom(addrB, 7174))
	w.dialSCTP(s.t, id, flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, timeout)
	return w.streams[id]
}

func (s *sim) listenSCTP() { s.listenSCTPWith(SCTP{}) }

func (s *sim) listenSCTPWith(o SCTP) {
	s.t.Helper()
	s.hosts[1].w.turn()
	s.hosts[1].w.listenSCTP(s.t, 1, netip.AddrPortFrom(addrB, 7174), o)
}
