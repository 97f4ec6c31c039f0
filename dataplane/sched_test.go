package dataplane

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// A loadLane is a queue pair of host side that always has work posted.
type loadLane struct {
	*loadQP
	c    *stream
	w    *worker
	side int
}

// moved is the number of bytes that the lane has moved.
func (l *loadLane) moved() int { return l.done * int(l.wr.SGEs[0].Len) }

// loadLanes is a set of loads between two hosts.
type loadLanes struct {
	*sim
	all     []*loadLane
	clients [2][]*ClientBinding
	port    uint16
}

func newLoadLanes(t testing.TB, cfg link.PipeConfig) *loadLanes {
	s := newSim(t, cfg)
	s.limit = 1 << 62
	return &loadLanes{sim: s, port: 20000}
}

// client registers client i of a host with its worker.
func (s *loadLanes) client(side, i int) *ClientBinding {
	for len(s.clients[side]) <= i {
		bells, err := shm.CreateDoorbells(256)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { bells.Close() })
		cb := &ClientBinding{Doorbells: []*shm.Doorbells{bells}}
		s.clients[side] = append(s.clients[side], cb)
		if err := s.hosts[side].w.cmds.alarm.Watch(bells.WakeFD()); err != nil {
			s.t.Fatal(err)
		}
		s.hosts[side].w.bind(cb)
	}
	return s.clients[side][i]
}

// add creates n lanes of a client of host side, which perform op with size bytes.
func (s *loadLanes) add(n, side, client int, op rdmap.Op, size int) {
	for range n {
		l := s.addLane(side, s.client(side, client), len(s.all)%64, op, size, 16, nil, nil)
		l.left = 1 << 60
	}
}

// addLane creates one lane, which takes its work requests from src and delivers completions to cq, unless these are
// nil.
func (s *loadLanes) addLane(side int, cb *ClientBinding, bit int, op rdmap.Op, size, depth int, src verbs.SendSource, cq CQ) *loadLane {
	s.port++
	a, b := s.openFrom(netip.AddrPortFrom(addrA, s.port), addrB)
	l := &loadLane{loadQP: &loadQP{simQP: newSimQP(s.t, s.hosts[side], size)}, w: s.hosts[side].w, side: side}
	peer := newSimQP(s.t, s.hosts[1-side], size)
	if src == nil {
		src, cq = l, l
	}
	l.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: l.h.table, SQDepth: depth, MaxSGE: 1, SigAll: true, Sends: src, Recvs: l})
	l.SendCQ, l.RecvCQ, l.Client, l.Bit = cq, cq, cb, bit
	l.wr = verbs.SendWR{Op: op, SGEs: l.sge(0, size), RKey: peer.reg.STag(), Remote: 0x10000}
	ends, qps := [2]*stream{a, b}, [2]*simQP{l.simQP, peer}
	l.c = ends[side]
	s.attach(a, b, qps[side], qps[1-side], mpa.Params{CRC: true, IRD: 4, ORD: 4, RTR: mpa.RTRWrite})
	s.all = append(s.all, l)
	return l
}

// run runs the lanes until each has moved the given number of bytes on average.
func (s *loadLanes) run(each int) {
	for _, l := range s.all {
		l.done = 0
		l.w.mark(l.c.lane)
	}
	for sum := 0; sum < each*len(s.all); {
		for range 64 {
			if !s.step() {
				s.t.Fatal("at rest")
			}
		}
		sum = 0
		for _, l := range s.all {
			sum += l.moved()
		}
	}
}

// spread returns the smallest and largest byte counts among the lanes that meant selects.
func (s *loadLanes) spread(meant func(*loadLane) bool) (least, most int) {
	least = 1 << 62
	for _, l := range s.all {
		if meant(l) {
			least, most = min(least, l.moved()), max(most, l.moved())
		}
	}
	return least, most
}

func everyLane(*loadLane) bool { return true }

// TestFair checks that connections that always have work get equal shares of each scarce resource.
func TestFair(t *testing.T) {
	oneGoroutine(t)
	for _, c := range []struct {
		name  string
		slots int
		make  func(*loadLanes)
		each  int
		meant []func(*loadLane) bool
	}{
		{"more loadLanes than slots", 100, func(s *loadLanes) { s.add(80, 0, 0, rdmap.OpWrite, 1024) }, 60 << 10, []func(*loadLane) bool{everyLane}},
		{"fewer loadLanes than slots", 1024, func(s *loadLanes) { s.add(20, 0, 0, rdmap.OpWrite, 1024) }, 120 << 10, []func(*loadLane) bool{everyLane}},
		{"long beside short", 100, func(s *loadLanes) {
			s.add(10, 0, 0, rdmap.OpWrite, 1024)
			s.add(10, 0, 0, rdmap.OpWrite, 32<<10)
			s.add(10, 0, 0, rdmap.OpWrite, 64)
		}, 150 << 10, []func(*loadLane) bool{func(l *loadLane) bool { return l.wr.SGEs[0].Len > 64 }, func(l *loadLane) bool { return l.wr.SGEs[0].Len == 64 }}},
		{"Reads beside Writes", 100, func(s *loadLanes) {
			s.add(10, 0, 0, rdmap.OpRead, 8<<10)
			s.add(10, 1, 0, rdmap.OpWrite, 8<<10)
		}, 150 << 10, []func(*loadLane) bool{everyLane}},
		{"both ways", 100, func(s *loadLanes) {
			s.add(10, 0, 0, rdmap.OpRead, 4<<10)
			s.add(10, 0, 0, rdmap.OpWrite, 4<<10)
			s.add(10, 1, 0, rdmap.OpWrite, 4<<10)
		}, 120 << 10, []func(*loadLane) bool{
			func(l *loadLane) bool { return l.side == 0 && l.wr.Op == rdmap.OpWrite },
			func(l *loadLane) bool { return l.side == 1 || l.wr.Op == rdmap.OpRead },
		}},
		{"many clients", 100, func(s *loadLanes) {
			for i := range 15 {
				s.add(3, 0, i, rdmap.OpWrite, 1024)
			}
		}, 80 << 10, []func(*loadLane) bool{everyLane}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newLoadLanes(t, link.PipeConfig{Slots: c.slots})
			c.make(s)
			s.run(c.each / 10) // windows open
			s.run(c.each)
			for i, meant := range c.meant {
				least, most := s.spread(meant)
				t.Logf("kind %d: %d to %d bytes, %.2f", i, least, most, float64(most)/float64(least))
				if 5*most > 8*least {
					t.Errorf("kind %d: %d to %d bytes; want a factor of 1.6", i, least, most)
				}
			}
		})
	}
}

// TestFairClients checks that a client with one connection gets as much as one with many.
func TestFairClients(t *testing.T) {
	for _, many := range []int{2, 30} {
		s := newLoadLanes(t, link.PipeConfig{Slots: 100})
		s.add(1, 0, 0, rdmap.OpWrite, 16<<10)
		s.add(many, 0, 1, rdmap.OpWrite, 16<<10)
		s.run(16 << 10)
		s.run(2 << 20 / many)
		one, all := s.all[0].moved(), 0
		for _, l := range s.all[1:] {
			all += l.moved()
		}
		t.Logf("one connection: %d bytes; %d connections: %d bytes", one, many, all)
		if 5*all > 8*one || 5*one > 8*all {
			t.Errorf("one connection got %d bytes, %d of another client %d; want equal shares", one, many, all)
		}
	}
}

// TestSilentPeers checks that a client whose peers have stopped acknowledging does not keep others from sending.
func TestSilentPeers(t *testing.T) {
	silent := false
	s := newLoadLanes(t, link.PipeConfig{Slots: 200, Filter: func(toB bool, b []byte) bool {
		port := binary.BigEndian.Uint16(b[14+20:])
		if !toB {
			port = binary.BigEndian.Uint16(b[14+22:])
		}
		return !silent || port > 20020
	}})
	s.add(20, 0, 0, rdmap.OpWrite, 64<<10)
	s.add(10, 0, 1, rdmap.OpWrite, 1024)
	s.run(32 << 10)
	silent = true
	for _, l := range s.all {
		l.done = 0
	}
	s.limit = s.now.Add(500 * time.Microsecond)
	for s.now < s.limit && s.step() {
	}
	least, most := s.spread(func(l *loadLane) bool { return l.wr.SGEs[0].Len == 1024 })
	t.Logf("%d to %d bytes in 500 µs", least, most)
	if least < 1<<18 || most > 2*least {
		t.Errorf("%d to %d bytes in 500 µs while another client's peers are silent", least, most)
	}
}

// TestStarved checks that a sender with fewer TX slots than the path and windows can use reports that, and that
// another sender does not.
func TestStarved(t *testing.T) {
	for _, tc := range []struct {
		slots  int
		starve bool
	}{{256, true}, {2048, false}} {
		t.Run(fmt.Sprint(tc.slots, " slots"), func(t *testing.T) {
			const size = 6 << 20
			far := impair.Config{Delay: 50 * time.Millisecond}
			s := newSim(t, link.PipeConfig{Slots: tc.slots, RxFrames: 4096, AtoB: far, BtoA: far})
			a, b := s.open()
			qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
			s.attach(a, b, qa, qb, mpa.Params{CRC: true})
			qa.sends = append(qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
			s.hosts[0].w.mark(a.lane)
			s.until("written", func() bool { return len(qa.wcs) == 1 })
			if n := s.hosts[0].w.sched.Starved(); (n > 0) != tc.starve {
				t.Errorf("starved %d times; want some: %v", n, tc.starve)
			}
			s.closeAll(a)
		})
	}
}

// TestHoldAll checks that without MaxHeld only the number of the link's frames bounds the window that a connection
// offers.
func TestHoldAll(t *testing.T) {
	for _, frames := range []int{256, 16384} {
		cfg := tcp.DefaultConfig()
		cfg.RcvWindow, cfg.MaxHeld = 1<<30, 0
		l, other, err := link.NewPipe(link.PipeConfig{RxFrames: frames})
		if err != nil {
			t.Fatal(err)
		}
		e := newEngine(t, Config{TCP: &cfg}, []Queue{{Link: l, CPU: -1}}, nil)
		if got := e.workers[0].tcp.MaxHeld; got != frames/2 {
			t.Errorf("of %d frames a connection may hold %d", frames, got)
		}
		if cfg.MaxHeld != 0 {
			t.Error("the caller's configuration was changed")
		}
		e.workers[0].closeFDs()
		l.Close()
		other.Close()
	}
}

// TestJoinWhileReady checks that a connection that gets a client while it is scheduled among those without one moves
// to its client's round.
func TestJoinWhileReady(t *testing.T) {
	s := newLoadLanes(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
	qa.Client = s.client(0, 0)
	w := s.hosts[0].w
	a, req := s.requestSCTP(SCTP{}, false)
	s.hosts[1].w.answerSCTP(s.hosts[1].w.streams[req.Conn], session.Setup{}, Attachment{QP: &qb.QPBinding, Params: mpa.Params{IRD: 8, ORD: 8}})
	s.event(0, EventAnswer)
	c := &a.as().lane
	w.sched.Enqueue(&c.member)
	w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: mpa.Params{IRD: 8, ORD: 8, Initiator: true}})
	if cl := w.clients[0]; c.member.Group() != cl.group || cl.group.Head() != &c.member || !cl.group.Queued() || w.clientless.Len() != 0 {
		t.Errorf("of its client %v, in its round %v, in that of lanes without a client %v", c.member.Group() == cl.group, cl.group.Head() == &c.member, w.clientless.Head() == &c.member)
	}
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 4096), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("written", func() bool { return len(qa.wcs) == 1 })
}

// A leaver posts its work request left times and disconnects before they are done.
type leaver struct {
	wr            verbs.SendWR
	left          int
	done, flushed int
}

func (l *leaver) NextSend(wr *verbs.SendWR) bool {
	if l.left == 0 {
		return false
	}
	l.left--
	sges := append(wr.SGEs[:0], l.wr.SGEs...)
	*wr = l.wr
	wr.SGEs = sges
	return true
}

func (l *leaver) Push(_ int, wc *verbs.WC) bool {
	if wc.Status == verbs.WCSuccess {
		l.done++
	} else {
		l.flushed++
	}
	return true
}

func (l *leaver) Pending(int) bool                 { return true } // nothing to flush
func (l *leaver) Flush(int, clock.Time) clock.Time { return 0 }

// TestSilentLeavers checks that a client cannot exceed its share of the TX slots by disconnecting, and that what it
// had posted to a responsive peer is still sent.
func TestSilentLeavers(t *testing.T) {
	oneGoroutine(t)
	const n = 20
	silent := false
	s := newLoadLanes(t, link.PipeConfig{Slots: 200, Filter: func(toB bool, b []byte) bool {
		port := binary.BigEndian.Uint16(b[14+20:])
		if !toB {
			port = binary.BigEndian.Uint16(b[14+22:])
		}
		return !silent || port > 20000+n
	}})
	w, cb := s.hosts[0].w, s.client(0, 0)
	cl := w.clients[0]
	var leavers [n + 2]*leaver
	var conns [n + 2]*stream
	for i := range n + 1 {
		l := new(leaver)
		lane := s.addLane(0, cb, i, rdmap.OpWrite, 64<<10, 16, l, l)
		l.wr = lane.wr
		leavers[i], conns[i] = l, lane.c
	}
	over := new(leaver)
	qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
	qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: qa.h.table, SQDepth: 16, MaxSGE: 1, SigAll: true, Sends: over})
	qa.SendCQ, qa.RecvCQ, qa.Client, qa.Bit = over, over, cb, n+1
	over.wr = verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, 1000), RKey: qb.reg.STag(), Remote: 0x10000}
	leavers[n+1] = over
	conns[n+1], _ = s.openSCTP(SCTP{}, qa, qb)
	s.add(10, 0, 1, rdmap.OpWrite, 1024)

	for i := range n {
		leavers[i].left = 1 << 60
		w.mark(conns[i].lane)
	}
	s.run(32 << 10) // windows open
	silent = true
	for _, l := range s.all {
		l.left = 0
	}
	s.until("only the silent ones have slots, their client's share", func() bool {
		return cl.group.Slots() >= sched.GroupShare*w.freeSlots() && w.clients[1].group.Slots() == 0
	})
	had := cl.group.Slots()
	for i, c := range conns {
		if i >= n {
			leavers[i].left, leavers[i].wr.SGEs[0].Len = 3, 1000 // three fit in any window
		}
		w.disconnect(c, false)
	}
	for _, l := range s.all {
		l.left, l.done = 1<<60, 0
		w.mark(l.c.lane)
	}
	for at := s.now.Add(500 * time.Microsecond); s.now < at && s.step(); {
		if cl.group.Slots() > had {
			t.Fatalf("%d TX slots where it had %d", cl.group.Slots(), had)
		}
	}
	if least, _ := s.spread(func(l *loadLane) bool { return l.wr.SGEs[0].Len == 1024 }); least < 1<<17 {
		t.Errorf("%d bytes in 500 µs while another client leaves silent peers", least)
	}
	silent = false
	for _, l := range s.all {
		l.left = 0
	}
	for _, l := range leavers[:n] {
		l.left = 0
	}
	left := len(conns)
	s.until("all closed", func() bool {
		if ev, ok := s.hosts[0].take(EventClosed); ok {
			left--
			if ev.Err != nil {
				t.Errorf("closed by %v", ev.Err)
			}
		}
		return left == 0
	})
	for _, l := range leavers[n:] {
		if l.done != 3 || l.flushed != 0 {
			t.Errorf("%d work requests done, %d flushed; want 3 done", l.done, l.flushed)
		}
	}
}
