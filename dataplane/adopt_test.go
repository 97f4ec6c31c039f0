package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// joined is a link that also receives the frames of another link. It sends on itself only, so the replies leave on a
// different queue.
type joined struct {
	*link.Pipe
	second *link.Pipe
}

// ofSecond marks frames that belong to the second link, not to the embedded one.
const ofSecond = 1 << 40

func (j *joined) Receive(fs []link.Frame) int {
	n := j.Pipe.Receive(fs)
	return n + receiveMarked(j.second, fs[n:])
}

func (j *joined) Release(f *link.Frame) { releaseMarked(j.Pipe, j.second, f) }

func receiveMarked(l *link.Pipe, fs []link.Frame) int {
	n := l.Receive(fs)
	for i := range fs[:n] {
		fs[i].IDs[0] |= ofSecond
	}
	return n
}

func releaseMarked(first, second *link.Pipe, f *link.Frame) {
	if f.IDs[0]&ofSecond == 0 {
		first.Release(f)
		return
	}
	f.IDs[0] &^= ofSecond
	second.Release(f)
}

// crossed is a link that, while on, receives the frames meant for another link, as when a NIC changes its RSS table.
type crossed struct {
	*link.Pipe
	other *link.Pipe
	on    *bool
}

func (c *crossed) Receive(fs []link.Frame) int {
	if *c.on {
		return receiveMarked(c.other, fs)
	}
	return c.Pipe.Receive(fs)
}

func (c *crossed) Release(f *link.Frame) { releaseMarked(c.Pipe, c.other, f) }

// twoQueues joins host 0, which has two queues, to host 1, which has one and sends all replies to one of the two. One
// goroutine drives both under a virtual clock.
type twoQueues struct {
	*sim
	workers []*worker
	links   []*link.Pipe
	cross   bool // frames for one queue of host 0 arrive on the other
	markers bool // openQueues negotiates markers
}

func newTwoQueues(t *testing.T, answer int) *twoQueues {
	return newTwoQueuesOver(t, answer, link.PipeConfig{})
}

func newTwoQueuesOver(t *testing.T, answer int, cfg link.PipeConfig) *twoQueues {
	return newTwoQueuesOf(t, answer, cfg, "", "")
}

// newTwoQueuesOf is newTwoQueuesOver for queues of the devices of those names.
func newTwoQueuesOf(t *testing.T, answer int, cfg link.PipeConfig, first, second string) *twoQueues {
	q := &twoQueues{sim: &sim{t: t, now: clock.Time(time.Second)}}
	s := q.sim
	cfg.Now = func() clock.Time { return s.now }
	a0, b0, err := link.NewPipe(cfg)
	a1, b1, err1 := link.NewPipe(cfg)
	if err := errors.Join(err, err1); err != nil {
		t.Fatal(err)
	}
	q.links = []*link.Pipe{a0, a1, b0, b1}
	to, other := b0, b1
	if answer == 1 {
		to, other = b1, b0
	}
	for i, queues := range [][]Queue{{{Link: &crossed{a0, a1, &q.cross}, Device: first, CPU: -1}, {Link: &crossed{a1, a0, &q.cross}, Device: second, CPU: -1}}, {{Link: &joined{to, other}, CPU: -1}}} {
		for k := range queues {
			queues[k].PartialChecksums = cfg.Super == link.SuperWhole
		}
		e := newEngine(t, Config{Now: cfg.Now}, queues, nil)
		s.hosts[i] = &simHost{e: e, w: e.workers[0], table: verbs.NewTable(rand.NewChaCha8([32]byte{byte(i)}))}
		q.workers = append(q.workers, e.workers...)
	}
	t.Cleanup(func() {
		for _, w := range q.workers {
			w.closeFDs()
		}
		for _, l := range q.links {
			l.Close()
		}
	})
	return q
}

// until turns all workers until cond holds.
func (q *twoQueues) until(what string, cond func() bool) {
	q.t.Helper()
	for limit := q.now.Add(10 * time.Minute); !cond(); {
		n := 0
		next := clock.Time(0)
		for _, w := range q.workers {
			n += w.turn()
			if len(w.dirty) > 0 || w.cmds.pending.Load() != 0 || w.forwarding.pending.Load() {
				n++
			}
			next = clock.Earliest(next, w.timers.Next())
		}
		for _, l := range q.links {
			next = clock.Earliest(next, l.Deadline())
		}
		for _, h := range q.hosts {
			h.drain()
		}
		if n == 0 {
			if next == 0 || q.now > limit {
				q.t.Fatalf("not: %s", what)
			}
			q.now = max(q.now, next)
		}
		q.now = q.now.Add(time.Microsecond)
	}
}

func (q *twoQueues) event(host int, kind EventKind) (ev Event) {
	q.t.Helper()
	q.until(fmt.Sprint("event ", kind), func() (ok bool) {
		ev, ok = q.hosts[host].take(kind)
		return ok
	})
	return ev
}

// connected dials on the first queue; the answer arrives on the second.
func (q *twoQueues) connected() (id ConnID, qa, qb *simQP) {
	t := q.t
	t.Helper()
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	p := mpa.Params{CRC: true, IRD: 8, ORD: 8}
	w, b := q.workers[0], q.workers[2]
	qa, qb = newSimQP(t, q.hosts[0], 65536), newSimQP(t, q.hosts[1], 65536)
	b.turn()
	listen(t, b, 1, &ListenRequest{Local: remote, Backlog: 8})
	id = w.newID()
	if err := w.connect(id, pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, time.Minute); err != nil {
		t.Fatal(err)
	}
	if ev := q.event(0, EventConnected); ev.Conn != id || ev.Worker != 1 {
		t.Errorf("event %+v", ev)
	}
	acc := q.event(1, EventAccepted)
	q.hosts[1].e.Attach(acc.Conn, Attachment{QP: &qb.QPBinding, Params: p})
	p.Initiator = true
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding, Params: p})
	q.event(0, EventEstablished)
	q.event(1, EventEstablished)
	return id, qa, qb
}

// transfer performs a Write and disconnects; all frames use the second queue.
func (q *twoQueues) transfer(id ConnID, qa, qb *simQP) {
	q.t.Helper()
	const size = 20000
	a1 := q.workers[1]
	for i := range qa.mem {
		qa.mem[i] = byte(i * 7)
	}
	qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000},
		verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(size, size), RKey: qb.reg.STag(), Remote: 0x10000})
	before := q.workers[0].stats.TxFrames
	c := a1.streams[id]
	if c == nil {
		q.t.Fatal("the second worker has no such connection")
	}
	if c.as() != nil {
		a1.mark(&c.as().lane)
	} else {
		a1.mark(c.lane)
	}
	q.until("both done", func() bool { return len(qa.wcs) == 2 })
	if !bytes.Equal(qb.mem[:size], qa.mem[:size]) || !bytes.Equal(qa.mem[size:2*size], qa.mem[:size]) {
		q.t.Error("memory differs")
	}
	if n := q.workers[0].stats.TxFrames; n != before {
		q.t.Errorf("the first queue sent %d frames", n-before)
	}
	q.closeQueues(id)
}

// TestAdopt dials on one queue and is answered on another. The worker of that queue must take over the connection.
func TestAdopt(t *testing.T) {
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	hop := Hop{SrcMAC: macA, DstMAC: macB}
	p := mpa.Params{CRC: true, IRD: 8, ORD: 8}
	t.Run("TCP", func(t *testing.T) {
		q := newTwoQueues(t, 1)
		q.transfer(q.connected())
	})
	for name, o := range map[string]SCTP{"SCTP": {}, "SCTP in UDP": {UDP: true}} {
		t.Run(name, func(t *testing.T) {
			q := newTwoQueues(t, 1)
			w, b := q.workers[0], q.workers[2]
			qa, qb := newSimQP(t, q.hosts[0], 65536), newSimQP(t, q.hosts[1], 65536)
			b.turn()
			b.listenSCTP(t, 1, remote, o)
			id := w.newID()
			w.dialSCTP(t, id, pkt.NewFlow(local, remote), hop, o, session.Setup{}, time.Minute)
			req := q.event(1, EventRequest)
			q.hosts[1].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding, Params: p})
			if ev := q.event(0, EventAnswer); ev.Conn != id || ev.Worker != 1 {
				t.Errorf("event %+v", ev)
			}
			q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding, Params: p})
			q.event(0, EventEstablished)
			q.transfer(id, qa, qb)
		})
	}
}

// TestAdoptedFlush checks that the worker that had adopted a connection flushes what is posted after its end, since the
// completions of a queue pair are in order only in the ring of one worker.
func TestAdoptedFlush(t *testing.T) {
	q := newTwoQueues(t, 1)
	id, qa, qb := q.connected()
	q.transfer(id, qa, qb)
	qa.sends = append(qa.sends, verbs.SendWR{ID: 3, Op: rdmap.OpSend})
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding})
	q.until("flushed", func() bool { return len(qa.wcs) == 3 })
	if wc := qa.wcs[2]; wc.ID != 3 || wc.Status != verbs.WCFlushErr || qa.rings[2] != qa.rings[0] {
		t.Errorf("completion %+v in ring %d, after those in ring %d", wc, qa.rings[2], qa.rings[0])
	}
}

// endedQueues returns two queues with a connection that the second has adopted, and that the peer has ended just before
// a queue pair with many posted Sends is attached to it. The second worker has not yet been told of the queue pair, nor the
// first of the end.
func endedQueues(t *testing.T) (q *twoQueues, id ConnID, qa *simQP) {
	t.Helper()
	q, id, _ = dialingQueues(t)
	first, second := q.workers[0], q.workers[1]
	q.event(0, EventConnected)
	acc := q.event(1, EventAccepted)
	qa = newSimQP(t, q.hosts[0], 4096)
	cfg := qa.QP.Config()
	cfg.SQDepth = 4 * flushBudget
	qa.QP, qa.sends = verbs.NewQP(cfg), make([]verbs.SendWR, 3*flushBudget)
	for i := range qa.sends {
		qa.sends[i] = verbs.SendWR{ID: uint64(i), Op: rdmap.OpSend}
	}
	for range cmdBudget { // it will come after these, in another turn
		second.post(func(*worker) {})
	}
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding})
	first.turn()
	q.hosts[1].e.Disconnect(acc.Conn, true)
	q.workers[2].turn()
	second.turn()
	if second.streams[id] != nil || second.cmds.pending.Load() == 0 || first.moved[id] != second || len(qa.wcs) > 0 {
		t.Fatal("not as the test needs it")
	}
	return q, id, qa
}

// TestAdoptedRefused checks that one worker alone flushes a queue pair that was not attached in time, also for the command
// that comes while it does: both would use the queue pair otherwise.
func TestAdoptedRefused(t *testing.T) {
	q, id, qa := endedQueues(t)
	q.until("one flushes", func() bool { return len(qa.wcs) > 0 })
	q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding})
	q.until("flushed", func() bool { return len(qa.wcs) == 3*flushBudget })
	for i, wc := range qa.wcs {
		if wc.ID != uint64(i) || qa.rings[i] != qa.rings[0] {
			t.Fatalf("completion %d is %+v in ring %d, the first was in ring %d", i, wc, qa.rings[i], qa.rings[0])
		}
	}
}

// TestAdoptedDetach checks that Detach waits last for the worker that flushes such a queue pair: until then another may
// make it do that.
func TestAdoptedDetach(t *testing.T) {
	q, _, qa := endedQueues(t)
	first, second := q.workers[0], q.workers[1]
	first.turn() // it knows of the end now
	over := q.hosts[0].begin(func() { q.hosts[0].e.Detach(&qa.QPBinding) })
	first.turn() // it has no such stream
	testenv.Until(t, "Detach waits for a worker", func() bool { return first.cmds.pending.Load()+second.cmds.pending.Load() == 2 })
	if second.cmds.pending.Load() != 2 {
		t.Error("Detach waits for the worker that dialed, before the other one has been told of the queue pair")
	}
	testenv.Until(t, "detached", func() bool {
		for _, w := range q.workers {
			w.turn()
		}
		select {
		case <-over:
			return true
		default:
			return false
		}
	})
	if len(qa.sends) > 0 {
		t.Errorf("%d Sends are not flushed", len(qa.sends))
	}
}

// TestAdoptGivenUp cancels a connect that was adopted and is never answered.
func TestAdoptGivenUp(t *testing.T) {
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	q := newTwoQueues(t, 1)
	w, b := q.workers[0], q.workers[2]
	b.turn()
	b.listenSCTP(t, 1, remote, SCTP{})
	id := w.newID()
	w.dialSCTP(t, id, pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, time.Second)
	q.event(1, EventRequest)
	if ev := q.event(0, EventClosed); ev.Conn != id || !errors.Is(ev.Err, ErrTimeout) {
		t.Errorf("event %+v", ev)
	}
	q.until("nothing left", func() bool {
		return len(w.streams)+len(w.moved)+len(q.workers[1].streams)+q.workers[1].sctp.n == 0 && q.hosts[0].e.dialing.Len() == 0
	})
}

// TestAdoptForeignTag checks that a packet of a dialed flow that arrives on another queue moves the association only
// if it carries the association's tag, which only the peer knows.
func TestAdoptForeignTag(t *testing.T) {
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	for name, o := range map[string]SCTP{"SCTP": {}, "SCTP in UDP": {UDP: true}} {
		t.Run(name, func(t *testing.T) {
			q := newTwoQueues(t, 0)
			w, second, b := q.workers[0], q.workers[1], q.workers[2]
			qa, qb := newSimQP(t, q.hosts[0], 4096), newSimQP(t, q.hosts[1], 4096)
			b.turn()
			b.listenSCTP(t, 1, remote, o)
			id, flow := w.newID(), pkt.NewFlow(local, remote)
			w.dialSCTP(t, id, flow, Hop{SrcMAC: macA, DstMAC: macB}, o, session.Setup{}, time.Minute)
			as := w.assocOf(handoff.Key{Flow: flow, Proto: pkt.ProtoSCTP})

			h := sctp.Header{SrcPort: flow.RemotePort, DstPort: flow.LocalPort}
			p := append(h.Append(nil), byte(sctp.ChunkHeartbeat), 0, 0, 8, 0, 1, 0, 4)
			if as.a.Ours(p) {
				p[4] ^= 1
			}
			sctp.SetChecksum(p)
			tuple := pkt.Tuple{Flow: pkt.NewFlow(remote, local), Proto: pkt.ProtoSCTP, SrcMAC: macB, DstMAC: macA}
			if o.UDP {
				tuple.Proto = pkt.ProtoUDP
				p = append([]byte{0x12, 0x34, sctp.UDPPort >> 8, sctp.UDPPort & 0xff, 0, byte(8 + len(p)), 0, 0}, p...)
			}
			frame := make([]byte, tuple.HeaderLen(), tuple.HeaderLen()+len(p))
			tuple.Put(frame, len(p), 0)
			frame = append(frame, p...)
			f := link.Frame{N: 1}
			f.Pieces[0] = frame
			for range 2 * maxAdopting {
				second.take(&f)
			}
			if n := w.cmds.pending.Load(); n > maxAdopting {
				t.Errorf("%d packets wait for the worker; at most %d may", n, maxAdopting)
			}
			q.until("the packets are seen", func() bool { return as.a.Stats().BadTag > 0 && w.cmds.pending.Load() == 0 })

			req := q.event(1, EventRequest)
			q.hosts[1].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding})
			if ev := q.event(0, EventAnswer); ev.Conn != id || ev.Worker != 0 {
				t.Errorf("event %+v", ev)
			}
			q.hosts[0].e.Attach(id, Attachment{QP: &qa.QPBinding, Params: mpa.Params{Initiator: true}})
			q.event(0, EventEstablished)
			q.event(1, EventEstablished)
		})
	}
}

// dialingQueues returns two queues whose first worker has begun to dial flow, as id, to a listener of the other side. Segments arrive on the second.
func dialingQueues(t *testing.T) (q *twoQueues, id ConnID, flow pkt.Flow) {
	t.Helper()
	q = newTwoQueues(t, 1)
	owner, b := q.workers[0], q.workers[2]
	b.turn()
	listen(t, b, 1, &ListenRequest{Local: netip.AddrPortFrom(addrB, 7174), Backlog: 8})
	id, flow = owner.newID(), pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
	if err := owner.connect(id, flow, Hop{SrcMAC: macA, DstMAC: macB}, time.Minute); err != nil {
		t.Fatal(err)
	}
	return q, id, flow
}

// TestAdoptManySegments checks that few segments of a dialed flow that arrive on another queue wait for the worker that
// dialed, which may be in a long turn, and that the connection is adopted nevertheless.
func TestAdoptManySegments(t *testing.T) {
	q, id, flow := dialingQueues(t)
	owner, second := q.workers[0], q.workers[1]
	owner.turn() // SYN
	tuple := pkt.Tuple{Flow: flow.Reverse(), Proto: pkt.ProtoTCP, SrcMAC: macB, DstMAC: macA}
	hdr := tcp.Header{SrcPort: flow.RemotePort, DstPort: flow.LocalPort, Flags: tcp.ACK}
	l4 := make([]byte, hdr.Len())
	hdr.Put(l4)
	binary.BigEndian.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, tuple.PseudoSum(len(l4)))))
	for range 2 * maxAdopting {
		second.receives(&tuple, l4)
	}
	if n := owner.cmds.pending.Load(); n == 0 || n > maxAdopting {
		t.Errorf("%d segments wait for the worker; at most %d may", n, maxAdopting)
	}
	if ev := q.event(0, EventConnected); ev.Conn != id || ev.Worker != 1 {
		t.Errorf("event %+v", ev)
	}
}

// TestAdoptInTheSameTurn adopts a connection in a turn with the same number as the turn in which its owner last
// pumped it. The handshake must still complete at once.
func TestAdoptInTheSameTurn(t *testing.T) {
	q, id, _ := dialingQueues(t)
	owner, w, b := q.workers[0], q.workers[1], q.workers[2]
	c := owner.streams[id]
	owner.turn() // SYN
	b.turn()     // SYN-ACK
	w.turn()     // asks for c
	owner.turn() // gives it
	w.stats.Turns = c.lane.pumped - 1
	w.turn()
	if w.streams[id] != c {
		t.Fatal("not adopted")
	}
	if n := w.stats.TxFrames; n != 1 {
		t.Errorf("%d frames sent; want an ACK", n)
	}
}
