package dataplane

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// sprayed is a queue of an interface that spreads frames over its queues without
// regard to flows.
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

// TestStrays: connections work, and nothing is retransmitted, where the frames of
// each come on all queues.
func TestStrays(t *testing.T) {
	const size = 300000
	p := mpa.Params{CRC: true, IRD: 8, ORD: 8}
	for _, tt := range []struct {
		name string
		sctp bool
		from int // the host that dials
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
				err := error(nil)
				if tt.sctp {
					err = w.listenSCTP(1, remote, SCTP{})
				} else {
					err = w.listen(1, remote, 8, false)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			qp := []*simQP{newSimQP(t, hosts[0], size), newSimQP(t, hosts[1], size)}
			w := hosts[from].e.workers[0]
			flow := pkt.NewFlow(netip.AddrPortFrom(addrs[from], 40000), remote)
			hop := Hop{SrcMAC: macs[from], DstMAC: macs[to]}
			id := w.newID()
			if tt.sctp {
				if err := w.connectSCTP(id, flow, hop, SCTP{}, session.Setup{}, time.Minute); err != nil {
					t.Fatal(err)
				}
				req := q.event(to, EventRequest)
				hosts[to].e.AnswerSCTP(req.Conn, session.Setup{}, Attachment{QP: &qp[to].QPBinding, Params: p})
				q.event(from, EventAnswer)
			} else {
				if err := w.connect(id, flow, hop, time.Minute, false); err != nil {
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
			// Host 1 reads, so that host 0 gets data; it writes back what it read.
			r := qp[1]
			r.sends = append(r.sends,
				verbs.SendWR{ID: 1, Op: rdmap.OpRead, SGEs: r.sge(0, size/2), RKey: qp[0].reg.STag(), Remote: 0x10000},
				verbs.SendWR{ID: 2, Op: rdmap.OpWrite, Flags: verbs.Fence, SGEs: r.sge(0, size/2), RKey: qp[0].reg.STag(), Remote: 0x10000 + size/2},
				verbs.SendWR{ID: 3, Op: rdmap.OpRead, SGEs: r.sge(size/2, size/2), RKey: qp[0].reg.STag(), Remote: 0x10000 + size/2})
			// A responder sends nothing before the initiator's first FPDU.
			qp[0].sends = append(qp[0].sends, verbs.SendWR{ID: 4, Op: rdmap.OpWrite, SGEs: qp[0].sge(0, 8), RKey: r.reg.STag(), Remote: 0x10000})
			for _, w := range q.workers {
				for _, c := range w.conns {
					if c.as != nil {
						c = &c.as.carrier
					}
					w.mark(c)
				}
			}
			q.until("all done", func() bool { return len(r.wcs) == 3 })
			if !bytes.Equal(r.mem[:size/2], qp[0].mem[:size/2]) || !bytes.Equal(r.mem[size/2:], qp[0].mem[:size/2]) {
				t.Error("memory differs")
			}
			for i, w := range q.workers[:2] {
				if st := w.stats; st.RxStraysLost != 0 || st.RxNoConn != 0 {
					t.Errorf("worker %d: %d strays, %d of them lost, %d frames without a connection", i, st.RxStrays, st.RxStraysLost, st.RxNoConn)
				}
			}
			if q.workers[0].stats.RxStrays+q.workers[1].stats.RxStrays == 0 {
				t.Error("no strays")
			}
			hosts[from].e.Disconnect(id, false)
			for i := range hosts {
				if ev := q.event(i, EventClosed); ev.Err != nil {
					t.Errorf("host %d closed by %v", i, ev.Err)
				}
			}
			q.until("nothing left", func() bool {
				n := len(hosts[0].e.owners.of)
				for _, w := range q.workers {
					n += len(w.flows) + len(w.conns) + len(w.moved) + w.timers.count + len(w.held.frames) - len(w.held.free) + int(w.strays.Load())
					if w.sctp != nil {
						n += len(w.sctp.assocs)
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

// TestStrayICMP: an ICMP error reaches the connection that it is about on whichever
// queue it comes.
func TestStrayICMP(t *testing.T) {
	q := newTwoQueues(t, 0)
	w := q.workers[0]
	remote := netip.AddrPortFrom(addrB, 7174)
	q.workers[2].turn()
	if err := q.workers[2].listen(1, remote, 8, false); err != nil {
		t.Fatal(err)
	}
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), remote)
	id := w.newID()
	if err := w.connect(id, flow, Hop{SrcMAC: macA, DstMAC: macB}, time.Minute, false); err != nil {
		t.Fatal(err)
	}
	q.event(0, EventConnected)
	c := w.conns[id]
	sent := make([]byte, c.tuple.HeaderLen()+20)
	c.tuple.Put(sent, 20, 0, 0)
	h := tcp.Header{SrcPort: 40000, DstPort: 7174, Seq: c.tcp.SndNxt()}
	h.Put(sent[c.tuple.HeaderLen():])
	other := q.workers[1]
	f := link.Frame{N: 1}
	f.Pieces[0] = tooBig(sent, 1400, 1<<16)
	other.frame(&f)
	w.turn()
	if w.stats.RxICMP != 1 || other.stats.RxStrays != 1 {
		t.Errorf("the owner took %d ICMP errors, the other worker handed %d on; want 1 each", w.stats.RxICMP, other.stats.RxStrays)
	}
}
