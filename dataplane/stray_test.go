package dataplane

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"sync"
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

// openQueues connects host 0, by its first queue or its second, to host 1 and takes
// both ends to full operation. It returns what host 0 has.
func (q *twoQueues) openQueues(over string, qa, qb *simQP) *conn {
	q.t.Helper()
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	hop := Hop{SrcMAC: macA, DstMAC: macB}
	p := mpa.Params{CRC: true, SendMarkers: q.markers, RecvMarkers: q.markers, IRD: 8, ORD: 8}
	w, b := q.workers[0], q.workers[2]
	b.turn()
	id := w.newID()
	if over == "TCP" {
		if err := b.listen(1, &ListenRequest{Local: remote, Backlog: 8}); err != nil {
			q.t.Fatal(err)
		}
		if err := w.connect(id, pkt.NewFlow(local, remote), hop, time.Minute, false); err != nil {
			q.t.Fatal(err)
		}
		q.event(0, EventConnected)
		acc := q.event(1, EventAccepted)
		q.hosts[1].e.Attach(acc.Conn, Attachment{QP: &qb.QPBinding, Params: p})
	} else {
		o := SCTP{UDP: over == "SCTP in UDP"}
		if err := b.listenSCTP(1, remote, o); err != nil {
			q.t.Fatal(err)
		}
		if err := w.connectSCTP(id, pkt.NewFlow(local, remote), hop, o, session.Setup{}, time.Minute); err != nil {
			q.t.Fatal(err)
		}
		req := q.event(1, EventRequest)
		q.hosts[1].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding, Params: p})
		q.event(0, EventAnswer)
	}
	p.Initiator = true
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding, Params: p})
	q.event(0, EventEstablished)
	for _, w := range q.workers[:2] {
		if c := w.conns[id]; c != nil {
			return c
		}
	}
	q.t.Fatal("nobody has the connection")
	return nil
}

// closeQueues ends the connection, and looks for what is left.
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
			n += len(w.flows) + len(w.conns) + len(w.moved) + w.timers.count
			if w.sctp != nil {
				n += len(w.sctp.assocs)
			}
		}
		e := q.hosts[0].e
		return n == 0 && e.nembryos.Load() == 0 && e.ndialing.Load() == 0
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
		for from := range w.strays.in {
			r := w.strays.in[from].Load()
			if r == nil {
				continue
			}
			if _, n := r.take.Peek(uint32(len(r.back))); r.kept != 0 || len(r.free)+int(n) != len(r.full) {
				q.t.Errorf("from worker %d to %d: %d frames kept, %d free of %d", from, i, r.kept, len(r.free)+int(n), len(r.full))
			}
		}
	}
	for i := range q.hosts[0].e.dir.buckets {
		if b := q.hosts[0].e.dir.buckets[i].Load(); b != nil && len(*b) != 0 {
			q.t.Errorf("still in the directory: %v", *b)
		}
	}
}

// TestStrayRound moves data while the frames of the connection come now to one queue and now
// to the other, over a wire that is good or bad.
func TestStrayRound(t *testing.T) {
	seed := testenv.Seed(t)
	for _, over := range []string{"TCP", "SCTP", "SCTP in UDP"} {
		for _, bad := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, bad wire %v", over, bad), func(t *testing.T) {
				var cfg link.PipeConfig
				if bad {
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
					if c.as != nil {
						q.workers[0].mark(&c.as.carrier)
					} else {
						q.workers[0].mark(c)
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
				if st.RxStrays == 0 || st.RxNoConn != 0 || q.workers[1].stats.TxFrames != 0 {
					t.Errorf("the second worker passed on %d frames, found no connection for %d, sent %d", st.RxStrays, st.RxNoConn, st.TxFrames)
				}
				q.cross = true
				q.closeQueues(c.id)
			})
		}
	}
}

// TestStrayICMP has the errors of a router come to the queue that is not the flow's.
func TestStrayICMP(t *testing.T) {
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
			if c.as != nil {
				q.workers[0].mark(&c.as.carrier)
			} else {
				q.workers[0].mark(c)
			}
			q.until("errors passed on", func() bool {
				for _, b := range errs {
					f := link.Frame{N: 1}
					f.Pieces[0] = b
					q.workers[1].frame(&f)
				}
				errs = nil
				return q.workers[0].stats.RxICMP > 0
			})
			if n := q.workers[1].stats.RxStrays; n == 0 {
				t.Error("the second worker passed nothing on")
			}
			if c.as == nil {
				q.until("the write is done", func() bool { return len(qa.wcs) == 1 })
				q.closeQueues(c.id)
			}
		})
	}
	t.Run("of a connection that is dialled", func(t *testing.T) {
		q := newTwoQueues(t, 0)
		w := q.workers[0]
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
		if err := w.connect(w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, time.Minute, false); err != nil {
			t.Fatal(err)
		}
		w.turn()
		tuple := pkt.Tuple{Flow: flow, Proto: pkt.ProtoTCP, SrcMAC: macA, DstMAC: macB}
		syn := make([]byte, tuple.HeaderLen(), 200)
		h := q.workers[0].out.Header
		syn = syn[:len(syn)+h.Len()]
		h.Put(syn[tuple.HeaderLen():])
		tuple.Put(syn, h.Len(), 0, 1)
		f := link.Frame{N: 1}
		f.Pieces[0] = tooBig(syn, lower, 40)
		q.workers[1].frame(&f)
		q.until("the error has come", func() bool { return w.stats.RxICMP == 1 })
	})
}

// TestStrayRing passes frames between two goroutines, some of which are kept for a
// while: each arrives once and in order, and full means lost, not mixed up.
func TestStrayRing(t *testing.T) {
	r := newStrayRing(1522)
	if n := len(r.mem); n > strayMemory || 2*n < strayMemory {
		t.Errorf("%d octets", n)
	}
	const frames = 50_000
	var wg sync.WaitGroup
	var sent []uint32
	wg.Add(1)
	go func() {
		defer wg.Done()
		var b [1500]byte
		for i := range uint32(frames) {
			n := 5 + int(i%1400)
			b[0], b[1], b[2], b[3] = byte(i), byte(i>>8), byte(i>>16), byte(i>>24)
			b[n-1] = byte(n)
			f := link.Frame{N: 2}
			f.Pieces[0], f.Pieces[1] = b[:3], b[3:n]
			if r.send(&f) {
				sent = append(sent, i)
			}
		}
	}()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	var got []uint32
	var kept []link.Frame
	read := func(f *link.Frame) uint32 {
		b := f.Pieces[0]
		i := uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
		if n := 5 + int(i%1400); len(b) != n || b[n-1] != byte(n) {
			t.Errorf("frame %d: %d octets", i, len(b))
		}
		return i
	}
	var f link.Frame
	for over := false; ; {
		if !r.receive(&f) {
			if over {
				break
			}
			select {
			case <-done:
				over = true
			default:
			}
			continue
		}
		i := read(&f)
		got = append(got, i)
		if i%3 == 0 && r.mayKeep() {
			kept = append(kept, f)
			r.keep()
		} else {
			r.release()
		}
		if len(kept) > 100 {
			read(&kept[0])
			r.unkeep(&kept[0])
			kept = kept[1:]
		}
	}
	if len(got) == 0 || len(got) != len(sent) {
		t.Fatalf("%d arrived of %d", len(got), len(sent))
	}
	for i := range got {
		if got[i] != sent[i] {
			t.Fatalf("frame %d is %d, want %d", i, got[i], sent[i])
		}
	}
	for i := range kept {
		r.unkeep(&kept[i])
	}
	_, n := r.take.Peek(uint32(len(r.back)))
	if r.kept != 0 || len(r.free)+int(n) != len(r.full) {
		t.Errorf("%d kept, %d free", r.kept, len(r.free)+int(n))
	}
}

// TestDirectory changes one bucket from several goroutines.
func TestDirectory(t *testing.T) {
	d := newDirectory()
	key := func(i int) flowKey {
		return flowKey{flow: pkt.Flow{LocalPort: uint16(i), RemotePort: uint16(i >> 16)}}
	}
	ws := []*worker{{id: 0}, {id: 1}, {id: 2}, {id: 3}}
	const n = 5_000
	var wg sync.WaitGroup
	for g, w := range ws {
		wg.Go(func() {
			for i := g * n; i < (g+1)*n; i++ {
				d.put(key(i), w)
				if i%2 == 0 {
					d.remove(key(i), ws[(g+1)%4]) // not its own
					d.remove(key(i), w)
				}
			}
		})
	}
	wg.Wait()
	for i := range 4 * n {
		k := key(i)
		want := ws[i/n]
		if i%2 == 0 {
			want = nil
		}
		if got := d.find(&k); got != want {
			t.Fatalf("flow %d: %v, want %v", i, got, want)
		}
	}
	d.put(key(1), ws[3])
	k := key(1)
	if d.find(&k) != ws[0] {
		t.Error("put took a flow from its owner")
	}
	d.move(k, ws[2], ws[3])
	if d.find(&k) != ws[0] {
		t.Error("move took a flow from another than its owner")
	}
	wg.Go(func() {
		for i := range n {
			d.move(k, ws[i%2], ws[1-i%2])
		}
	})
	for range n {
		if d.find(&k) == nil {
			t.Fatal("a flow that moves is nobody's")
		}
	}
	wg.Wait()
	if a := testing.AllocsPerRun(100, func() { d.find(&k) }); a != 0 {
		t.Errorf("%v allocations to find a flow", a)
	}
}

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
					err = w.listen(1, &ListenRequest{Local: remote, Backlog: 8})
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
				hosts[to].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qp[to].QPBinding, Params: p})
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
				n := 0
				for _, w := range q.workers {
					n += len(w.flows) + len(w.conns) + len(w.moved) + w.timers.count + len(w.held.frames) - len(w.held.free)
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

// TestStrayFault: a frame of another worker that is held when touching a client's memory
// faults is given back once, by the connection.
func TestStrayFault(t *testing.T) {
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
	none, err := unix.Mmap(-1, 0, size+unix.Getpagesize(), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(none)
	bad, err := q.hosts[0].table.Register(1, none, 0x10000, simAccess)
	if err != nil {
		t.Fatal(err)
	}
	w, second, b := q.workers[0], q.workers[1], q.workers[2]
	qa, qb := newSimQP(t, q.hosts[0], size), newSimQP(t, q.hosts[1], size)
	q.markers = true
	c := q.openQueues("TCP", qa, qb)
	// The first word of ours ends the responder's silence.
	qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 8), RKey: qb.reg.STag(), Remote: 0x10000})
	w.mark(c)
	q.until("written", func() bool { return len(qa.wcs) == 1 && b.stats.RxFPDUs == 1 })
	for settled := q.now.Add(time.Second); q.now < settled; q.now = q.now.Add(time.Millisecond) {
		for _, w := range q.workers {
			w.turn()
		}
	}
	var peer *conn
	for _, peer = range b.flows {
	}
	qb.sends = append(qb.sends, verbs.SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: qb.sge(0, size), RKey: bad.STag(), Remote: 0x10000})
	q.cross, drop = true, true
	b.mark(peer)
	b.turn()
	second.turn()
	func() { // as loop
		defer w.survive()
		w.turn()
	}()
	if w.stats.Faults != 1 || c.holds != 1 {
		t.Fatalf("%d faults, %d frames held: this tests nothing", w.stats.Faults, c.holds)
	}
	for i := range q.hosts {
		q.event(i, EventClosed)
	}
	q.until("at rest", func() bool { return !w.strays.pending.Load() && len(w.flows) == 0 })
	r := w.strays.in[1].Load()
	_, n := r.take.Peek(uint32(len(r.back)))
	if r.kept != 0 || len(r.free)+int(n) != len(r.full) {
		t.Errorf("%d frames kept, %d free of %d", r.kept, len(r.free)+int(n), len(r.full))
	}
	if n := len(w.held.frames) - len(w.held.free); n != 0 {
		t.Errorf("%d frames held", n)
	}
}
