package dataplane

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// openQueues connects host 0, by its first queue or its second, to host 1 and takes both ends to full operation. It
// returns host 0's end.
func (q *twoQueues) openQueues(over string, qa, qb *simQP) *stream {
	q.t.Helper()
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	hop := Hop{SrcMAC: macA, DstMAC: macB}
	p := mpa.Params{CRC: true, SendMarkers: q.markers, RecvMarkers: q.markers, IRD: 8, ORD: 8}
	w, b := q.workers[0], q.workers[2]
	b.turn()
	id := w.newID()
	if over == "TCP" {
		listen(q.t, b, 1, &ListenRequest{Local: remote, Backlog: 8})
		if err := w.connect(id, pkt.NewFlow(local, remote), hop, time.Minute); err != nil {
			q.t.Fatal(err)
		}
		q.event(0, EventConnected)
		acc := q.event(1, EventAccepted)
		q.hosts[1].e.Attach(acc.Conn, Attachment{QP: &qb.QPBinding, Params: p})
	} else {
		o := SCTP{UDP: over == "SCTP in UDP"}
		b.listenSCTP(q.t, 1, remote, o)
		w.dialSCTP(q.t, id, pkt.NewFlow(local, remote), hop, o, session.Setup{}, time.Minute)
		req := q.event(1, EventRequest)
		q.hosts[1].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding, Params: p})
		q.event(0, EventAnswer)
	}
	p.Initiator = true
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding, Params: p})
	q.event(0, EventEstablished)
	for _, w := range q.workers[:2] {
		if c := w.streams[id]; c != nil {
			return c
		}
	}
	q.t.Fatal("no worker has the connection")
	return nil
}

// closeQueues ends the connection and checks for leftover state.
func (q *twoQueues) closeQueues(id ConnID) {
	q.t.Helper()
	q.hosts[0].e.Disconnect(id, false)
	for i := range q.hosts {
		if ev := q.event(i, EventClosed); ev.Err != nil {
			q.t.Errorf("host %d closed by %v", i, ev.Err)
		}
	}
	q.until("nothing left", func() bool {
		n := 0
		for _, w := range q.workers {
			n += int(w.stats.Conns) + len(w.streams) + len(w.moved) + w.timers.Len()
			if w.sctp != nil {
				n += w.sctp.n
			}
		}
		e := q.hosts[0].e
		return n == 0 && e.dialing.Len() == 0
	})
	for i, l := range q.links {
		if l.FreeSlots() != l.Slots() {
			q.t.Errorf("link %d: %d slots not given back", i, l.Slots()-l.FreeSlots())
		}
	}
	for i, w := range q.workers {
		if n := w.stats.Conns; n != 0 {
			q.t.Errorf("worker %d counts %d connections", i, n)
		}
		if n := len(w.held.frames) - len(w.held.free); n != 0 {
			q.t.Errorf("worker %d holds %d frames", i, n)
		}
		for from := range w.forwarding.in {
			r := w.forwarding.in[from].Load()
			if r == nil {
				continue
			}
			if kept, free, all := r.Len(); kept != 0 || free != all {
				q.t.Errorf("from worker %d to %d: %d frames kept, %d free of %d", from, i, kept, free, all)
			}
		}
	}
	if n := q.hosts[0].e.dir.Len(); n != 0 {
		q.t.Errorf("%d still in the directory", n)
	}
}

// TestForwardedRound moves data while the frames of the connection alternate between two queues, over a good or lossy
// wire.
func TestForwardedRound(t *testing.T) {
	seed := testenv.Seed(t)
	for _, over := range []string{"TCP", "SCTP", "SCTP in UDP"} {
		for _, wire := range []string{"good", "bad", "super-frames"} {
			if wire == "super-frames" && over != "TCP" {
				continue
			}
			t.Run(fmt.Sprintf("%s, %s", over, wire), func(t *testing.T) {
				var cfg link.PipeConfig
				switch wire {
				case "super-frames":
					cfg.Super = link.SuperWhole
				case "bad":
					im := impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Delay: 100 * time.Microsecond, Seed: seed}
					cfg.AtoB, cfg.BtoA = im, im
					cfg.BtoA.Seed++
				}
				const size = 300_000
				q := newTwoQueuesOver(t, 0, cfg)
				qa, qb := newSimQP(t, q.hosts[0], 2*size), newSimQP(t, q.hosts[1], 2*size)
				c := q.openQueues(over, qa, qb)
				rng := rand.New(rand.NewPCG(seed, 1))
				for i := range qa.mem[:size] {
					qa.mem[i] = byte(rng.Uint32())
				}
				q.cross = true
				for round := range 4 {
					qa.wcs = nil
					clear(qb.mem)
					clear(qa.mem[size:])
					qa.sends = append(qa.sends,
						verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000},
						verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(size, size), RKey: qb.reg.STag(), Remote: 0x10000})
					if c.as() != nil {
						q.workers[0].mark(&c.as().lane)
					} else {
						q.workers[0].mark(c.lane)
					}
					n := 0
					q.until("both done", func() bool {
						if n++; round == 3 && n%50 == 0 {
							q.cross = !q.cross
						}
						return len(qa.wcs) == 2
					})
					for _, wc := range qa.wcs {
						if wc.Status != verbs.WCSuccess {
							t.Fatalf("completion %+v", wc)
						}
					}
					if !bytes.Equal(qb.mem[:size], qa.mem[:size]) || !bytes.Equal(qa.mem[size:], qa.mem[:size]) {
						t.Fatal("memory differs")
					}
					if round == 2 {
						q.cross = false
					}
				}
				st := q.workers[1].stats
				if st.RxWrongQueue == 0 || st.RxNoConn != 0 || q.workers[1].stats.TxFrames != 0 {
					t.Errorf("the second worker passed on %d frames, found no connection for %d, sent %d", st.RxWrongQueue, st.RxNoConn, st.TxFrames)
				}
				if wire == "super-frames" && q.workers[1].stats.RxSuper == 0 {
					t.Error("the second worker passed on no super-frame")
				}
				q.cross = true
				q.closeQueues(c.id)
			})
		}
	}
}

// TestForwardedICMP delivers a router's ICMP errors to a queue that does not own the flow.
func TestForwardedICMP(t *testing.T) {
	const lower, size = 800, 60_000
	for _, over := range []string{"TCP", "SCTP", "SCTP in UDP"} {
		t.Run(over, func(t *testing.T) {
			shrunk := false
			var errs [][]byte
			q := newTwoQueuesOver(t, 0, link.PipeConfig{Filter: func(isB bool, f []byte) bool {
				if !isB || !shrunk || len(f)-14 <= lower {
					return true
				}
				errs = append(errs, tooBig(f, lower, 40))
				return false
			}})
			qa, qb := newSimQP(t, q.hosts[0], size), newSimQP(t, q.hosts[1], size)
			c := q.openQueues(over, qa, qb)
			shrunk = true
			qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
			if c.as() != nil {
				q.workers[0].mark(&c.as().lane)
			} else {
				q.workers[0].mark(c.lane)
			}
			q.until("errors passed on", func() bool {
				for _, b := range errs {
					f := link.Frame{N: 1}
					f.Pieces[0] = b
					q.workers[1].take(&f)
				}
				errs = nil
				return q.workers[0].stats.RxICMP > 0
			})
			if n := q.workers[1].stats.RxWrongQueue; n == 0 {
				t.Error("the second worker passed nothing on")
			}
			if c.as() == nil {
				q.until("the write is done", func() bool { return len(qa.wcs) == 1 })
				q.closeQueues(c.id)
			}
		})
	}
	t.Run("of a connection that is dialled", func(t *testing.T) {
		q := newTwoQueues(t, 0)
		w := q.workers[0]
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
		if err := w.connect(w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, time.Minute); err != nil {
			t.Fatal(err)
		}
		w.turn()
		tuple := pkt.Tuple{Flow: flow, Proto: pkt.ProtoTCP, SrcMAC: macA, DstMAC: macB}
		syn := make([]byte, tuple.HeaderLen(), 200)
		h := q.workers[0].out.Header
		syn = syn[:len(syn)+h.Len()]
		h.Put(syn[tuple.HeaderLen():])
		tuple.Put(syn, h.Len(), 0)
		f := link.Frame{N: 1}
		f.Pieces[0] = tooBig(syn, lower, 40)
		q.workers[1].take(&f)
		q.until("the error has come", func() bool { return w.stats.RxICMP == 1 })
	})
}

// sprayed is a queue of an interface that distributes frames over its queues regardless of flow.
type sprayed struct {
	*link.Pipe
	from *link.Pipe
	n    int
}

func (s *sprayed) Receive(fs []link.Frame) int {
	s.n = s.n%3 + 1
	return s.from.Receive(fs[:s.n])
}

func (s *sprayed) Release(f *link.Frame) { s.from.Release(f) }

// TestForwarded checks that connections work without retransmissions where the frames of each arrive on all queues.
func TestForwarded(t *testing.T) {
	const size = 300000
	p := mpa.Params{CRC: true, IRD: 8, ORD: 8}
	for _, tt := range []struct {
		name string
		sctp bool
		from int // the dialing host
	}{{"TCP, active", false, 0}, {"TCP, passive", false, 1}, {"SCTP, active", true, 0}, {"SCTP, passive", true, 1}} {
		t.Run(tt.name, func(t *testing.T) {
			q := newTwoQueues(t, 0)
			for i, w := range q.workers[:2] {
				w.link = &sprayed{Pipe: q.links[i], from: q.links[0], n: i}
			}
			hosts, addrs, macs := q.hosts, []netip.Addr{addrA, addrB}, [][6]byte{macA, macB}
			from, to := tt.from, 1-tt.from
			remote := netip.AddrPortFrom(addrs[to], 7174)
			for _, w := range hosts[to].e.workers {
				w.turn()
				if tt.sctp {
					w.listenSCTP(t, 1, remote, SCTP{})
				} else {
					listen(t, w, 1, &ListenRequest{Local: remote, Backlog: 8})
				}
			}
			qp := []*simQP{newSimQP(t, hosts[0], size), newSimQP(t, hosts[1], size)}
			w := hosts[from].e.workers[0]
			flow := pkt.NewFlow(netip.AddrPortFrom(addrs[from], 40000), remote)
			hop := Hop{SrcMAC: macs[from], DstMAC: macs[to]}
			id := w.newID()
			if tt.sctp {
				w.dialSCTP(t, id, flow, hop, SCTP{}, session.Setup{}, time.Minute)
				req := q.event(to, EventRequest)
				hosts[to].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qp[to].QPBinding, Params: p})
				q.event(from, EventAnswer)
			} else {
				if err := w.connect(id, flow, hop, time.Minute); err != nil {
					t.Fatal(err)
				}
				q.event(from, EventConnected)
				acc := q.event(to, EventAccepted)
				hosts[to].e.Attach(acc.Conn, Attachment{QP: &qp[to].QPBinding, Params: p})
			}
			p := p
			p.Initiator = true
			hosts[from].e.Attach(id, Attachment{QP: &qp[from].QPBinding, Params: p})
			q.event(from, EventEstablished)

			for i := range qp[0].mem {
				qp[0].mem[i] = byte(i * 7)
			}
			// Host 1 reads, so that host 0 sends data; it then writes back what it read.
			r := qp[1]
			r.sends = append(r.sends,
				verbs.SendWR{ID: 1, Op: rdmap.OpRead, SGEs: r.sge(0, size/2), RKey: qp[0].reg.STag(), Remote: 0x10000},
				verbs.SendWR{ID: 2, Op: rdmap.OpWrite, Flags: verbs.Fence, SGEs: r.sge(0, size/2), RKey: qp[0].reg.STag(), Remote: 0x10000 + size/2},
				verbs.SendWR{ID: 3, Op: rdmap.OpRead, SGEs: r.sge(size/2, size/2), RKey: qp[0].reg.STag(), Remote: 0x10000 + size/2})
			// A responder sends nothing before the initiator's first FPDU.
			qp[0].sends = append(qp[0].sends, verbs.SendWR{ID: 4, Op: rdmap.OpWrite, SGEs: qp[0].sge(0, 8), RKey: r.reg.STag(), Remote: 0x10000})
			for _, w := range q.workers {
				for _, c := range w.streams {
					w.mark(c.lane)
				}
			}
			q.until("all done", func() bool { return len(r.wcs) == 3 })
			if !bytes.Equal(r.mem[:size/2], qp[0].mem[:size/2]) || !bytes.Equal(r.mem[size/2:], qp[0].mem[:size/2]) {
				t.Error("memory differs")
			}
			for i, w := range q.workers[:2] {
				if st := w.stats; st.RxWrongQueueDropped != 0 || st.RxNoConn != 0 {
					t.Errorf("worker %d: %d forwarded, %d of them lost, %d frames without a connection", i, st.RxWrongQueue, st.RxWrongQueueDropped, st.RxNoConn)
				}
			}
			if q.workers[0].stats.RxWrongQueue+q.workers[1].stats.RxWrongQueue == 0 {
				t.Error("no frame was forwarded")
			}
			hosts[from].e.Disconnect(id, false)
			for i := range hosts {
				if ev := q.event(i, EventClosed); ev.Err != nil {
					t.Errorf("host %d closed by %v", i, ev.Err)
				}
			}
			q.until("nothing left", func() bool {
				n := 0
				for _, w := range q.workers {
					n += int(w.stats.Conns) + len(w.streams) + len(w.moved) + w.timers.Len() + len(w.held.frames) - len(w.held.free)
					if w.sctp != nil {
						n += w.sctp.n
					}
				}
				return n == 0
			})
			for i, l := range q.links {
				if l.FreeSlots() != l.Slots() {
					t.Errorf("link %d: %d slots not given back", i, l.Slots()-l.FreeSlots())
				}
			}
		})
	}
}

// TestForwardedFault checks that a held frame of another worker is returned once, by the connection, when touching a
// client's memory faults.
func TestForwardedFault(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const size = 20_000
	drop := false
	q := newTwoQueuesOver(t, 0, link.PipeConfig{Filter: func(isB bool, f []byte) bool {
		if isB || !drop || len(f) < 1000 {
			return true
		}
		drop = false
		return false
	}})
	none := testenv.Mmap(t, size+unix.Getpagesize(), unix.PROT_NONE)
	w, second, b := q.workers[0], q.workers[1], q.workers[2]
	qa, qb := newSimQP(t, q.hosts[0], size), newSimQP(t, q.hosts[1], size)
	bad := qa.register(none)
	q.markers = true
	c := q.openQueues("TCP", qa, qb)
	// Our first message allows the responder to send.
	qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 8), RKey: qb.reg.STag(), Remote: 0x10000})
	w.mark(c.lane)
	q.until("written", func() bool { return len(qa.wcs) == 1 && b.stats.RxFPDUs == 1 })
	for settled := q.now.Add(time.Second); q.now < settled; q.now = q.now.Add(time.Millisecond) {
		for _, w := range q.workers {
			w.turn()
		}
	}
	var peer *stream
	for _, peer = range b.streams {
	}
	qb.sends = append(qb.sends, verbs.SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: qb.sge(0, size), RKey: bad.STag(), Remote: 0x10000})
	q.cross, drop = true, true
	b.mark(peer.lane)
	b.turn()
	second.turn()
	w.surviveTurn()
	if w.stats.Faults != 1 || c.conn().holds != 1 {
		t.Fatalf("%d faults, %d frames held: this tests nothing", w.stats.Faults, c.conn().holds)
	}
	for i := range q.hosts {
		q.event(i, EventClosed)
	}
	q.until("at rest", func() bool { return !w.forwarding.pending.Load() && w.stats.Conns == 0 })
	r := w.forwarding.in[1].Load()
	if kept, free, all := r.Len(); kept != 0 || free != all {
		t.Errorf("%d frames kept, %d free of %d", kept, free, all)
	}
	if n := len(w.held.frames) - len(w.held.free); n != 0 {
		t.Errorf("%d frames held", n)
	}
}
