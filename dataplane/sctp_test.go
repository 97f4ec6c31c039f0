package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// requestSCTP has host 0 ask host 1 for a session and waits for the request.
func (s *sim) requestSCTP(o SCTP, v6 bool) (a *conn, req Event) {
	s.t.Helper()
	ha, hb := s.hosts[0], s.hosts[1]
	local, remote := netip.AddrPortFrom(addrOf(0, v6), 40000), netip.AddrPortFrom(addrOf(1, v6), 7174)
	hb.w.turn()
	if hb.w.sctp == nil {
		if err := hb.w.listenSCTP(1, remote, o); err != nil {
			s.t.Fatal(err)
		}
	}
	id := ha.w.newID()
	if err := ha.w.connectSCTP(id, pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, o, session.Setup{Private: []byte("hello")}, 0); err != nil {
		s.t.Fatal(err)
	}
	s.until("request", func() bool {
		ev, ok := hb.take(EventRequest)
		if ok {
			req = ev
		}
		return ok
	})
	if string(req.Setup.Private) != "hello" || req.Listener != 1 {
		s.t.Fatalf("request %+v %+v", req, req.Setup)
	}
	return ha.w.conns[id], req
}

// openSCTP makes a session with queue pairs at both ends.
func (s *sim) openSCTP(o SCTP, qa, qb *simQP) (a, b *conn) {
	s.t.Helper()
	return s.openSCTPWith(o, false, 8, qa, qb)
}

// openSCTPWith is openSCTP with an IP version and a number of Reads.
func (s *sim) openSCTPWith(o SCTP, v6 bool, reads int, qa, qb *simQP) (a, b *conn) {
	s.t.Helper()
	a, req := s.requestSCTP(o, v6)
	ha, hb := s.hosts[0], s.hosts[1]
	b = hb.w.conns[req.Conn]
	hb.w.answerSCTP(b, session.Setup{Private: []byte("welcome")}, Attachment{QP: &qb.QPBinding, Params: mpa.Params{IRD: reads, ORD: reads}})
	var ans Event
	s.until("answer", func() bool {
		ev, ok := ha.take(EventAnswer)
		if ok {
			ans = ev
		}
		return ok
	})
	if string(ans.Setup.Private) != "welcome" || ans.Conn != a.id {
		s.t.Fatalf("answer %+v", ans)
	}
	ha.w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: mpa.Params{IRD: reads, ORD: reads, Initiator: true}})
	return a, b
}

// closedSCTP checks that everything came back.
func (s *sim) closedSCTP() {
	s.t.Helper()
	s.until("associations gone", func() bool {
		return len(s.hosts[0].w.sctp.assocs) == 0 && len(s.hosts[1].w.sctp.assocs) == 0
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
		if h.w.timers.count != 0 || len(h.w.conns) != 0 {
			s.t.Errorf("host %d: %d timers, %d connections left", i, h.w.timers.count, len(h.w.conns))
		}
	}
}

// TestSCTPVerbs moves data by Write, Send and Read over SCTP, over good and bad
// wires, in both profiles and over UDP.
func TestSCTPVerbs(t *testing.T) {
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
	const size = 200_000
	s := newSim(t, cfg)
	qa, qb := newSimQP(t, s.hosts[0], 2*size), newSimQP(t, s.hosts[1], 2*size)
	for i := range qa.mem[:size] {
		qa.mem[i] = byte(rng.Uint32())
	}
	for i := range 16 {
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: uint64(i), SGEs: qb.sge(size+i*1000, 1000)})
	}
	a, b := s.openSCTP(o, qa, qb)
	n := 0
	for off := 0; off < size; n++ {
		l := min(size-off, 1+rng.IntN(50_000))
		qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(n), Op: rdmap.OpWrite, SGEs: qa.sge(off, l), RKey: qb.reg.STag(), Remote: 0x10000 + uint64(off)})
		off += l
	}
	for i := range 16 {
		qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(n), Op: rdmap.OpSend, SGEs: qa.sge(i*2000, 1000-i)})
		n++
	}
	for off := 0; off < size; n++ {
		l := min(size-off, 1+rng.IntN(50_000))
		qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(n), Op: rdmap.OpRead, SGEs: qa.sge(size+off, l), RKey: qb.reg.STag(), Remote: 0x10000 + uint64(off)})
		off += l
	}
	s.hosts[0].w.mark(a)
	s.until("all completed", func() bool { return len(qa.wcs) >= n && len(qb.wcs) >= 16 })
	for i, wc := range qa.wcs {
		if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
			t.Fatalf("completion %d: id %d, status %v", i, wc.ID, wc.Status)
		}
	}
	for i, wc := range qb.wcs {
		if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess || wc.Len != uint32(1000-i) ||
			!bytes.Equal(qb.mem[size+i*1000:][:1000-i], qa.mem[i*2000:][:1000-i]) {
			t.Fatalf("receive %d: %+v", i, wc)
		}
	}
	if !bytes.Equal(qb.mem[:size], qa.mem[:size]) || !bytes.Equal(qa.mem[size:], qa.mem[:size]) {
		t.Fatal("memory differs")
	}
	if b.as.a.Stats().RxChunks == 0 {
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

func newLoadSCTP(tb testing.TB, mtu int, op rdmap.Op, size int) (*sim, *conn, *loadQP) {
	s := newSim(tb, link.PipeConfig{MTU: mtu})
	qa, qb := &loadQP{simQP: newSimQP(tb, s.hosts[0], max(size, 4096))}, newSimQP(tb, s.hosts[1], max(size, 4096))
	qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: qa.h.table, SQDepth: 256, MaxSGE: 1, SigAll: true, Sends: qa, Recvs: qa})
	qa.SendCQ, qa.RecvCQ = qa, qa
	qa.wr = verbs.SendWR{Op: op, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000}
	a, _ := s.openSCTP(SCTP{}, qa.simQP, qb)
	s.limit = 1 << 62
	return s, a, qa
}

// TestSCTPAllocatesNothing covers the whole path of both hosts.
func TestSCTPAllocatesNothing(t *testing.T) {
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

// TestSCTPTerminate: a violation ends the session at both sides by the same code.
func TestSCTPTerminate(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	s.closed(1)
	if ev, ok := s.hosts[1].take(EventFailed); !ok || !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("host 1: EventFailed = %v, %v", ev.Err, ok)
	}
	if ev := s.closed(0); !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("host 0 closed by %v", ev.Err)
	}
	if len(qa.wcs) != 2 || qa.wcs[1].Status == verbs.WCSuccess {
		t.Errorf("completions %+v", qa.wcs)
	}
	s.closedSCTP()
}

// TestSCTPReject: the ULP's refusal reaches the other side with its data.
func TestSCTPReject(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, req := s.requestSCTP(SCTP{}, false)
	w := s.hosts[1].w
	w.answerSCTP(w.conns[req.Conn], session.Setup{Private: []byte("no")}, Attachment{})
	if ev := s.closed(0); ev.Err != ErrRejected {
		t.Errorf("closed by %v", ev.Err)
	}
	if ev, ok := s.hosts[0].take(EventRejected); !ok || string(ev.Setup.Private) != "no" {
		t.Errorf("EventRejected %v", ok)
	}
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPRejectAndUnlisten: a refusal is said even if the listener is closed at once.
func TestSCTPRejectAndUnlisten(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, req := s.requestSCTP(SCTP{}, false)
	w := s.hosts[1].w
	w.answerSCTP(w.conns[req.Conn], session.Setup{Private: []byte("no")}, Attachment{})
	w.unlisten(1)
	if ev := s.closed(0); ev.Err != ErrRejected {
		t.Errorf("closed by %v", ev.Err)
	}
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPPeerGone: a host that falls silent is given up, and posted work is flushed.
func TestSCTPPeerGone(t *testing.T) {
	silent := false
	s := newSim(t, link.PipeConfig{Filter: func(bool, []byte) bool { return !silent }})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	silent = true
	s.limit = s.now.Add(time.Hour)
	s.post(a, qa, verbs.SendWR{ID: 7, Op: rdmap.OpRead, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
	if ev := s.closed(0); ev.Err == nil {
		t.Error("closed without an error")
	}
	if len(qa.wcs) != 1 || qa.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", qa.wcs)
	}
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPAbortAndDetach: what the application cuts ends at both sides.
func TestSCTPAbortAndDetach(t *testing.T) {
	for _, detach := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
		a, _ := s.openSCTP(SCTP{}, qa, qb)
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 5, SGEs: qb.sge(0, 10)})
		if detach {
			s.hosts[0].w.detach(a)
		} else {
			s.hosts[0].w.disconnect(a, true)
		}
		if ev := s.closed(0); ev.Err == nil {
			t.Error("closed without an error")
		}
		s.closed(1)
		if len(qb.wcs) != 1 || qb.wcs[0].Status != verbs.WCFlushErr {
			t.Errorf("completions of host 1: %+v", qb.wcs)
		}
		s.closedSCTP()
	}
}

// TestSCTPJoinedParted: an association is reported for as long as its packets have to
// come, and one whose listener is closed ends with its last session.
func TestSCTPJoinedParted(t *testing.T) {
	for _, how := range []string{"the dialling side ends", "listener closed in a session", "listener closed after the session"} {
		t.Run(how, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
			a, b := s.openSCTP(SCTP{}, qa, qb)
			for i, want := range []Event{{Conn: a.id, Flow: a.flow}, {Listener: 1, Flow: b.flow}} {
				if ev, ok := s.hosts[i].take(EventJoined); !ok || ev.Conn != want.Conn || ev.Listener != want.Listener || ev.Flow != want.Flow {
					t.Errorf("host %d: %+v, %v", i, ev, ok)
				}
			}
			rest := func() {
				end := s.now.Add(3 * time.Second)
				s.until("rest", func() bool { return s.now > end })
				for i, h := range s.hosts {
					if _, ok := h.take(EventParted); ok || len(h.w.sctp.assocs) != 1 {
						t.Errorf("host %d: the association has ended", i)
					}
				}
			}
			w := s.hosts[1].w
			switch how {
			case "the dialling side ends":
				s.hosts[0].w.disconnect(a, false)
			case "listener closed in a session":
				w.unlisten(1)
				rest()
				w.disconnect(b, false)
			default:
				a.as.lst = &sctpListener{} // a peer that keeps its associations
				s.hosts[0].w.disconnect(a, false)
				rest()
				w.unlisten(1)
			}
			s.closed(0)
			s.closed(1)
			s.closedSCTP()
			for i, h := range s.hosts {
				if ev, ok := h.take(EventParted); !ok || ev.Flow != []pkt.Flow{a.flow, b.flow}[i] {
					t.Errorf("host %d: no EventParted", i)
				}
			}
		})
	}
}

// TestSCTPOverUDPZeroSum: of the packets whose UDP checksum comes out as 0, which means
// none, the receiver finds the sum right too.
func TestSCTPOverUDPZeroSum(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	w := s.hosts[0].w
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 9899), netip.AddrPortFrom(addrB, 9899))
	tuple := pkt.Tuple{Flow: flow, Proto: pkt.ProtoUDP, SrcMAC: macA, DstMAC: macB}
	p := make([]byte, 12+16)
	udp := append([]byte{9899 >> 8, 9899 & 0xff, 9899 >> 8, 9899 & 0xff, 0, byte(8 + len(p)), 0, 0}, p...)
	for v := uint32(1); ; v++ {
		if v == 1<<24 {
			t.Fatal("no packet has that sum")
		}
		binary.BigEndian.PutUint32(udp[8+4:], v)
		sctp.SetChecksum(udp[8:])
		if pkt.Checksum(pkt.Sum(udp, tuple.PseudoSum(len(udp)))) == 0 {
			break
		}
	}
	slot, ok := w.link.Alloc()
	if !ok {
		t.Fatal("no slot")
	}
	copy(w.link.Bytes(slot)[headroom:], udp[8:])
	w.slots[slot].owned = false
	w.postSCTP(&tuple, 9899, slot, headroom, len(udp)-8)
	w.link.Flush()
	var f [1]link.Frame
	if s.hosts[1].link.Receive(f[:]) != 1 {
		t.Fatal("no frame")
	}
	var got pkt.Packet
	b := f[0].Pieces[0]
	if err := got.Parse(b, f[0].Len()); err != nil {
		t.Fatal(err)
	}
	b = b[got.L4Off : got.L4Off+got.L4Len]
	if sum := binary.BigEndian.Uint16(b[6:]); sum == 0 || pkt.Fold(pkt.Sum(b, got.PseudoSum)) != 0xffff {
		t.Errorf("checksum %#x is wrong", sum)
	}
}

// TestSCTPDetach: a queue pair that was given to a peer's session is let go of by Detach.
func TestSCTPDetach(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qb := newSimQP(t, s.hosts[1], 8192)
	_, req := s.requestSCTP(SCTP{}, false)
	h := s.hosts[1]
	h.e.AnswerSCTP(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding})
	h.w.turn()
	c := h.w.conns[req.Conn]
	if c == nil || c.qp != &qb.QPBinding {
		t.Fatal("no queue pair")
	}
	done := make(chan struct{})
	go func() {
		h.e.Detach(&qb.QPBinding)
		close(done)
	}()
	for {
		select {
		case <-done:
			if c.qp != nil {
				t.Error("the session still has it")
			}
			return
		default:
			h.w.turn()
		}
	}
}

// TestSCTPAnswerGone: a request that is answered when its session has ended leaves
// nothing posted.
func TestSCTPAnswerGone(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qb := newSimQP(t, s.hosts[1], 8192)
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 5, SGEs: qb.sge(0, 10)})
	a, req := s.requestSCTP(SCTP{}, false)
	h := s.hosts[1]
	s.hosts[0].w.disconnect(a, true)
	s.closed(1)
	h.e.AnswerSCTP(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding})
	h.w.turn()
	h.drain()
	if len(qb.wcs) != 1 || qb.wcs[0].ID != 5 || qb.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", qb.wcs)
	}
	if ev, ok := h.take(EventClosed); !ok || ev.Conn != req.Conn || ev.QP != &qb.QPBinding || !errors.Is(ev.Err, errNoConn) {
		t.Errorf("EventClosed %+v, %v", ev, ok)
	}
	s.closedSCTP()
}

// TestSCTPFault: a fault in a client's memory ends the association whose packet was in
// hand, for its other messages are acknowledged and lost.
func TestSCTPFault(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	none, err := unix.Mmap(-1, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(none)
	bad, err := s.hosts[1].table.Register(1, none, 0, simAccess)
	if err != nil {
		t.Fatal(err)
	}
	told := 0
	qb.Client.OnFault = func() { told++ }
	a, b := s.openSCTP(SCTP{}, qa, qb)
	wa, wb := s.hosts[0].w, s.hosts[1].w
	settled := s.now.Add(time.Second)
	s.until("rest", func() bool { return s.now > settled })
	for i := range uint64(2) {
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: i, SGEs: []verbs.SGE{{Len: 100, LKey: bad.STag()}}})
		qa.sends = append(qa.sends, verbs.SendWR{ID: i, Op: rdmap.OpSend, SGEs: qa.sge(0, 100)})
	}
	wa.mark(a)
	wa.turn()
	frames, chunks := wb.stats.RxFrames, b.as.a.Stats().RxChunks
	func() {
		defer wb.survive()
		wb.turn()
	}()
	if wb.stats.Faults != 1 || told != 1 {
		t.Fatalf("%d faults, told of %d", wb.stats.Faults, told)
	}
	if f, c := wb.stats.RxFrames-frames, b.as.a.Stats().RxChunks-chunks; f != 1 || c != 2 {
		t.Fatalf("%d messages in %d frames: this tests nothing", c, f)
	}
	wb.turn()
	if !b.as.over {
		t.Error("the association has not ended")
	}
	for i := range s.hosts {
		if ev := s.closed(i); ev.Err == nil {
			t.Errorf("host %d closed without an error", i)
		}
	}
	if n := len(qb.wcs); n != 2 || qb.wcs[0].Status != verbs.WCFlushErr || qb.wcs[1].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", qb.wcs)
	}
	s.closedSCTP()
}

// TestFaultKeepsCommands: commands behind one that faults are called, in their order, once.
func TestFaultKeepsCommands(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	w := s.hosts[1].w
	var got []int
	note := func(i int) func(*worker) { return func(*worker) { got = append(got, i) } }
	w.post(note(1))
	w.post(func(w *worker) {
		w.post(note(4))
		w.current = b
		panic("a fault")
	})
	w.post(note(2))
	w.post(note(3))
	func() {
		defer w.survive()
		w.turn()
	}()
	w.post(func(w *worker) {
		for i := range 8 {
			w.post(note(6 + i))
		}
	})
	w.post(note(5))
	w.turn()
	w.turn()
	if want := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}; w.stats.Faults != 1 || !slices.Equal(got, want) {
		t.Errorf("%d faults, called %v; want %v", w.stats.Faults, got, want)
	}
}

// TestFaultKeepsMarks: what waited to be pumped when a fault ended the turn still does,
// also an association without a session.
func TestFaultKeepsMarks(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTP()
	s.dialSCTP(40001, 0).ini = nil
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	w := s.hosts[1].w
	s.until("an association", func() bool { return len(w.sctp.assocs) == 1 })
	marked := []*conn{b}
	for _, as := range w.sctp.assocs {
		marked = append(marked, &as.carrier)
	}
	if len(w.conns) != 1 {
		t.Fatalf("%d connections, the association has a session: this tests nothing", len(w.conns))
	}
	for _, c := range marked {
		w.mark(c)
	}
	w.fault(b, "none")
	for _, c := range marked {
		if !c.dirty || !slices.Contains(w.dirty, c) {
			t.Errorf("%v: dirty %v, in the list %v", c.flow, c.dirty, slices.Contains(w.dirty, c))
		}
	}
}

// TestSCTPStaleDisconnect: a command for a session that has ended does nothing to the
// next one of its stream, whose Initiate came in the same turn.
func TestSCTPStaleDisconnect(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	wa, wb, mux := s.hosts[0].w, s.hosts[1].w, a.as.mux
	a.as.lst = &sctpListener{} // a peer that keeps its associations
	wa.disconnect(a, false)
	for {
		wa.turn()
		if mux.State(0) == session.Idle {
			break
		}
		wb.turn()
		if s.now = s.now.Add(time.Microsecond); s.now > s.limit {
			t.Fatal("the session does not end")
		}
	}
	if err := mux.Initiate(0, session.Setup{Private: []byte("again")}); err != nil {
		t.Fatal(err)
	}
	wa.mark(&a.as.carrier)
	wa.turn()
	if b.gone || wb.conns[b.id] != b {
		t.Fatal("the session has ended here already: this tests nothing")
	}
	wb.post(func(w *worker) {
		if c := w.conns[b.id]; c != nil {
			w.disconnect(c, false)
		}
	})
	wb.turn()
	s.until("the request", func() bool {
		ev, ok := s.hosts[1].take(EventRequest)
		return ok && string(ev.Setup.Private) == "again"
	})
	if got := b.as.mux.State(0); got != session.Requested {
		t.Errorf("the session is %v", got)
	}
}

// TestSCTPRestartWithData: what comes in the packet that restarts an association is of
// the new one.
func TestSCTPRestartWithData(t *testing.T) {
	var cookie []byte
	var tsn uint32
	armed := false
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
		if !armed || !toB {
			return true
		}
		switch chunk := f[14+20+12:]; sctp.ChunkType(chunk[0]) {
		case sctp.ChunkInit:
			tsn = binary.BigEndian.Uint32(chunk[16:])
		case sctp.ChunkCookieEcho:
			cookie = bytes.Clone(f)
			return false
		}
		return true
	}})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	wa, wb := s.hosts[0].w, s.hosts[1].w
	// Host 0 loses its memory, and begins anew from the same port.
	wa.timers.stop(&a.as.carrier.timer)
	wa.unmark(&a.as.carrier)
	wa.unmark(a)
	delete(wa.sctp.assocs, a.flow)
	delete(wa.conns, a.id)
	armed = true
	s.now = s.now.Add(time.Second)
	wa.turn()
	if err := wa.connectSCTP(wa.newID(), a.flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 0); err != nil {
		t.Fatal(err)
	}
	s.until("the cookie", func() bool { return cookie != nil })

	p := cookie[14+20:]
	for len(p)%4 != 0 {
		p = append(p, 0)
	}
	p = append(p, byte(sctp.ChunkData), 7, 0, 16+4+5) // U, B, E
	p = binary.BigEndian.AppendUint32(p, tsn)
	p = append(p, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 1)
	p = append(p, "hello\x00\x00\x00"...)
	sctp.SetChecksum(p)
	tuple := pkt.Tuple{Flow: a.flow, Proto: pkt.ProtoSCTP, SrcMAC: macA, DstMAC: macB}
	frame := make([]byte, tuple.HeaderLen(), tuple.HeaderLen()+len(p))
	tuple.Put(frame, len(p), 0, 0)
	frame = append(frame, p...)
	if err := wb.in.pkt.Parse(frame, len(frame)); err != nil {
		t.Fatal(err)
	}
	f := link.Frame{N: 1}
	f.Pieces[0] = frame
	wb.sctpFrame(&f)
	s.until("the request", func() bool {
		ev, ok := s.hosts[1].take(EventRequest)
		return ok && string(ev.Setup.Private) == "hello" && ev.Conn != b.id
	})
	if ev := s.closed(1); ev.Conn != b.id || !errors.Is(ev.Err, errSession) {
		t.Errorf("the old session: %+v", ev)
	}
	if got := b.as.mux.State(0); got != session.Requested {
		t.Errorf("the new session is %v", got)
	}
}

// TestSCTPNoListener: a connect to nobody fails at once; one to silence in time.
func TestSCTPNoListener(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.hosts[1].w.sctp0()
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 9)
	w := s.hosts[0].w
	w.turn()
	if err := w.connectSCTP(w.newID(), pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 0); err != nil {
		t.Fatal(err)
	}
	if ev := s.closed(0); ev.Err == nil {
		t.Error("closed without an error")
	}
	s.closedSCTP()
}

// TestSCTPLimit: associations are bounded, whoever asks for them.
func TestSCTPLimit(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	ha, hb := s.hosts[0], s.hosts[1]
	hb.w.turn()
	if err := hb.w.listenSCTP(1, netip.AddrPortFrom(addrB, 7174), SCTP{}); err != nil {
		t.Fatal(err)
	}
	hb.e.cfg.MaxConns = 3
	ha.w.turn()
	for i := range uint16(6) {
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000+i), netip.AddrPortFrom(addrB, 7174))
		if err := ha.w.connectSCTP(ha.w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 20*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		if ev := s.closed(0); !errors.Is(ev.Err, ErrTimeout) {
			t.Errorf("connection %d closed by %v", i, ev.Err)
		}
		if len(hb.w.sctp.assocs) > 3 {
			t.Fatalf("%d associations", len(hb.w.sctp.assocs))
		}
	}
}

// TestSCTPFullSlot: packets that nearly fill a slot, copied for retransmission.
func TestSCTPFullSlot(t *testing.T) {
	for _, mtu := range []int{3968, 4000, 4050, 4096} {
		bad := impair.Config{Loss: 0.05, Duplicate: 0.05, Seed: 7}
		moveDataSCTP(t, link.PipeConfig{MTU: mtu, AtoB: bad, BtoA: bad}, SCTP{UDP: mtu == 4096}, rand.New(rand.NewPCG(1, uint64(mtu))))
	}
}

// TestSCTPRandomPrograms is TestRandomPrograms over SCTP.
func TestSCTPRandomPrograms(t *testing.T) {
	base := testenv.Seed(t)
	seeds := testenv.Count(t, "SEEDS", 60)
	if testing.Short() {
		seeds = min(seeds, 20)
	}
	for i := range seeds {
		seed := base + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomProgramsSCTP(t, seed) })
	}
}

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
		// For some seconds both wires are dead.
		from := clock.Time(time.Second + time.Duration(rng.IntN(2000))*time.Millisecond)
		cfg.Filter = func(bool, []byte) bool { return s.now < from || s.now > from.Add(5*time.Second) }
	}
	o := SCTP{Profile: session.Profile(rng.IntN(2)), UDP: rng.IntN(3) == 0}
	s = newSim(t, cfg)
	s.limit = s.now.Add(time.Hour)
	qa, qb := newSimQP(t, s.hosts[0], memLen), newSimQP(t, s.hosts[1], memLen)
	pa, pb := newProgram(rng, qa, qb), newProgram(rng, qb, qa)
	pa.start()
	pb.start()
	pa.early, pb.early = true, true
	pa.postReceives()
	pb.postReceives()
	a, b := s.openSCTPWith(o, v6, 1+rng.IntN(16), qa, qb)
	for range 40 + rng.IntN(60) {
		pa.step()
		pb.step()
	}
	pa.readNothing()
	pb.readNothing()
	s.hosts[0].w.mark(a)
	s.hosts[1].w.mark(b)
	s.until("both programs done", func() bool {
		return len(qa.wcs) >= len(pa.want)+len(pb.wantRcv) && len(qb.wcs) >= len(pb.want)+len(pa.wantRcv)
	})
	if err := pa.check("initiator"); err != nil {
		t.Fatal(err)
	}
	if err := pb.check("responder"); err != nil {
		t.Fatal(err)
	}
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
}

// TestSCTPStatsAdd: every counter is in the sums.
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

// dialSCTP has host 0 dial from a port, without waiting.
func (s *sim) dialSCTP(port uint16, timeout time.Duration) *conn {
	s.t.Helper()
	w := s.hosts[0].w
	w.turn()
	id := w.newID()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, port), netip.AddrPortFrom(addrB, 7174))
	if err := w.connectSCTP(id, flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, timeout); err != nil {
		s.t.Fatal(err)
	}
	return w.conns[id]
}

func (s *sim) listenSCTP() {
	s.t.Helper()
	s.hosts[1].w.turn()
	if err := s.hosts[1].w.listenSCTP(1, netip.AddrPortFrom(addrB, 7174), SCTP{}); err != nil {
		s.t.Fatal(err)
	}
}

// TestSCTPIdle: a peer that opens an association and asks for no session is told to go
// after a minute; one that has a session is not.
func TestSCTPIdle(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTP()
	c := s.dialSCTP(40001, 0)
	c.ini = nil
	idle := c.as
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	s.until("two associations", func() bool { return len(s.hosts[1].w.sctp.assocs) == 2 })
	began := s.now
	s.until("one is over", func() bool { return idle.over && len(s.hosts[1].w.sctp.assocs) == 1 })
	if d := s.now.Sub(began); d < 58*time.Second || d > 62*time.Second {
		t.Errorf("over after %v", d)
	}
	if idle.a.Err() != nil || s.hosts[1].w.stats.AssocsIdle != 1 {
		t.Errorf("ended by %v", idle.a.Err())
	}
	wait := s.now.Add(5 * time.Minute)
	s.until("time to pass", func() bool { return s.now > wait })
	if a.as.over || a.mode != modeFull {
		t.Error("an association with a session ended")
	}
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
}

// TestSCTPPerPeer: the associations of one address are bounded; one that ends makes
// room.
func TestSCTPPerPeer(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.hosts[1].e.cfg.SCTP.PerPeer = 2
	s.listenSCTP()
	var reqs []Event
	for port := range uint16(3) {
		s.dialSCTP(40001+port, 0)
	}
	requests := func(n int) func() bool {
		return func() bool {
			if ev, ok := s.hosts[1].take(EventRequest); ok {
				reqs = append(reqs, ev)
			}
			return len(reqs) == n
		}
	}
	s.until("two requests", requests(2))
	s.until("a refusal", func() bool { return s.hosts[1].w.stats.AssocsRefused > 0 })
	if n := len(s.hosts[1].w.sctp.assocs); n != 2 {
		t.Fatalf("%d associations", n)
	}
	w := s.hosts[1].w
	w.answerSCTP(w.conns[reqs[0].Conn], session.Setup{}, Attachment{})
	s.until("a third request", requests(3))
	for _, r := range reqs[1:] {
		w.answerSCTP(w.conns[r.Conn], session.Setup{}, Attachment{})
	}
	s.closedSCTP()
	if len(w.sctp.peers) != 0 {
		t.Errorf("counts left: %v", w.sctp.peers)
	}
}

// TestSCTPTailLoss: with a lower RTO.Min the loss of the only message under way costs
// about that, and no time-out is spurious though the peer delays SACKs by more.
func TestSCTPTailLoss(t *testing.T) {
	lose := false
	cfg := link.PipeConfig{Filter: func(toB bool, _ []byte) bool {
		ok := !(toB && lose)
		lose = lose && !toB
		return ok
	}}
	s := newSim(t, cfg)
	s.hosts[0].e.cfg.SCTP.RTOMin = 20 * time.Millisecond
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	write := func() (took time.Duration) {
		began, sent := s.now, a.as.a.Stats().TxChunks
		s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
		s.until("acknowledged", func() bool { return a.as.a.Stats().TxChunks > sent && a.as.a.Unacked() == 0 })
		return s.now.Sub(began)
	}
	for range 60 { // the round trip is what the last of them took
		if d := write(); d > 5*time.Millisecond {
			t.Fatalf("a Write is acknowledged after %v", d)
		}
	}
	if n := a.as.a.Stats().Timeouts; n != 0 {
		t.Errorf("%d time-outs", n)
	}
	lose = true
	if d := write(); d < 20*time.Millisecond || d > 30*time.Millisecond {
		t.Errorf("a Write whose packet is lost is acknowledged after %v", d)
	}
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
}

// TestSCTPFallback: a peer of RFC 5043 alone answers enhanced set-up data by a
// Terminate; a connect that may asks again without them, on the same association.
func TestSCTPFallback(t *testing.T) {
	for _, may := range []bool{true, false} {
		s := newSim(t, link.PipeConfig{})
		s.listenSCTP()
		ha, hb := s.hosts[0], s.hosts[1]
		ha.w.turn()
		id := ha.w.newID()
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
		set := session.Setup{Private: []byte("hello"), Enhanced: &session.Enhanced{IRD: 4, ORD: 4}}
		if err := ha.w.connectSCTP(id, flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{Fallback: may}, set, 0); err != nil {
			t.Fatal(err)
		}
		s.until("the association", func() bool { return len(hb.w.sctp.assocs) == 1 })
		for _, as := range hb.w.sctp.assocs {
			as.mux = session.New(session.Config{NoEnhanced: true}, 64)
		}
		if !may {
			if ev := s.closed(0); ev.Err != ErrRejected {
				t.Errorf("closed by %v", ev.Err)
			}
			s.closedSCTP()
			continue
		}
		var req Event
		s.until("a request", func() (ok bool) {
			req, ok = hb.take(EventRequest)
			return ok
		})
		if string(req.Setup.Private) != "hello" || req.Setup.Enhanced != nil {
			t.Errorf("request %+v", req.Setup)
		}
		qb := newSimQP(t, hb, 8192)
		hb.w.answerSCTP(hb.w.conns[req.Conn], session.Setup{Private: []byte("welcome")}, Attachment{QP: &qb.QPBinding, Params: mpa.Params{IRD: 1, ORD: 1}})
		s.until("the answer", func() bool {
			ev, ok := ha.take(EventAnswer)
			return ok && ev.Conn == id && string(ev.Setup.Private) == "welcome"
		})
		if n := ha.w.stats.SessionRetries; n != 1 {
			t.Errorf("%d retries", n)
		}
		ha.w.disconnect(ha.w.conns[id], false)
		s.closedSCTP()
	}
}
