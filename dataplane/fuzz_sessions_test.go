package dataplane

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// fuzzLives are hosts whose connections a script opens, uses and ends: over TCP, or sessions on one association.
type fuzzLives struct {
	*sim
	o       SCTP
	drop    int // frames that are lost
	qps     []*fuzzQP
	srq     *fuzzSRQ  // of the queue pairs of host 1, or nil
	foreign [2][]byte // in another PD
	stags   [2]uint32 // of foreign
	asked   [2][]ConnID
}

// fuzzQP is a queue pair of fuzzLives.
type fuzzQP struct {
	*simQP
	id     ConnID
	far    *heldMover // stores what it receives, or nil
	posted int
	left   bool // completes nothing any more
}

// fuzzSRQ is a shared receive queue in far memory.
type fuzzSRQ struct {
	client *ClientBinding
	recvs  []verbs.RecvWR
	taken  int
}

func (q *fuzzSRQ) NextRecv(wr *verbs.RecvWR) bool {
	if len(q.recvs) == 0 {
		return false
	}
	*wr = q.recvs[0]
	q.recvs = q.recvs[1:]
	q.taken++
	return true
}

// Settings of fuzzLives.
const (
	fuzzDraft = 1 << iota
	fuzzUDP
	fuzzBadWire
	fuzzShared // the queue pairs of host 1 have a shared receive queue, in far memory
	fuzzHost   // the connections are within one host
	fuzzSuper  // frames may be super-frames
)

func newFuzzLives(t *testing.T, flags byte) *fuzzLives {
	f := &fuzzLives{o: SCTP{Profile: session.Profile(flags & fuzzDraft), UDP: flags&fuzzUDP != 0}}
	cfg := link.PipeConfig{Slots: 256, RxFrames: 256, TxRing: 256, Filter: func(bool, []byte) bool {
		if f.drop == 0 {
			return true
		}
		f.drop--
		return false
	}}
	if flags&fuzzBadWire != 0 {
		cfg.AtoB = impair.Config{Seed: uint64(flags), Loss: 0.02, Duplicate: 0.02, Reorder: 0.2}
		cfg.BtoA = cfg.AtoB
		cfg.BtoA.Seed++
	}
	if flags&fuzzSuper != 0 {
		cfg.Super = link.SuperWhole
	}
	f.sim = newSim(t, cfg)
	f.limit = f.now.Add(100 * time.Hour)
	if flags&fuzzShared != 0 {
		f.srq = &fuzzSRQ{client: (&loadLanes{sim: f.sim}).client(1, 0)}
	}
	for i, h := range f.hosts {
		f.foreign[i] = bytes.Repeat([]byte{fuzzForeign}, 4096)
		r, err := h.table.Register(2, f.foreign[i], 0x10000, simAccess)
		if err != nil {
			t.Fatal(err)
		}
		f.stags[i] = r.STag()
	}
	return f
}

// lone returns the only connection of a host.
func (f *fuzzLives) lone(host int) (id ConnID) {
	for id = range f.hosts[host].w.streams {
	}
	return id
}

// qp makes a queue pair for connection id of a host.
func (f *fuzzLives) qp(host int, id ConnID) *fuzzQP {
	q := &fuzzQP{simQP: newSimQP(f.t, f.hosts[host], 4096), id: id}
	f.qps = append(f.qps, q)
	if host == 1 && f.srq != nil {
		q.far = &heldMover{notify: func() {}}
		cfg := q.QP.Config()
		cfg.RQDepth, cfg.Recvs, cfg.Shared, cfg.Far = 2, f.srq, true, q.far
		q.QP = verbs.NewQP(cfg)
		q.Far, q.Client, q.Bit = q.far, f.srq.client, len(f.qps)
		var err error
		if q.reg, err = q.h.table.RegisterFar(1, q.far, 0, 4096, 0x10000, verbs.LocalWrite|verbs.RemoteWrite); err != nil {
			f.t.Fatal(err)
		}
	}
	if q.far == nil {
		cfg := q.QP.Config()
		cfg.SQDepth = 4 * flushBudget
		q.QP = verbs.NewQP(cfg)
	}
	f.recv(q, 1)
	f.recv(q, 2)
	return q
}

// burst posts more to q than a turn flushes.
func (f *fuzzLives) burst(q *fuzzQP) {
	if s := q.h.w.streams[q.id]; s == nil || s.closed() || s.qp == nil || len(q.sends) > 60 || q.far != nil {
		return
	}
	const n = flushBudget + flushBudget/2
	q.posted += n
	for range n {
		q.sends = append(q.sends, verbs.SendWR{ID: 101, Op: rdmap.OpImm})
	}
}

func (f *fuzzLives) recv(q *fuzzQP, id uint64) {
	wr := verbs.RecvWR{ID: id, SGEs: q.sge(2048, 200)}
	if q.far != nil {
		f.srq.recvs = append(f.srq.recvs, wr)
		return
	}
	q.posted++
	q.recvs = append(q.recvs, wr)
}

// assoc returns the association of a host, or nil.
func (f *fuzzLives) assoc(host int) (as *assoc) {
	for as = range f.hosts[host].w.assocs() {
		if as.mux != nil && as.a.State() == sctp.Established {
			return as
		}
	}
	return nil
}

// message makes a host send a message on its association, whatever its sessions have sent.
func (f *fuzzLives) message(host int, how byte, b []byte) {
	as, w := f.assoc(host), f.hosts[host].w
	if as == nil || as.a.Room() < as.a.MaxMessage() {
		return
	}
	slot, ok := w.link.Alloc()
	if !ok {
		return
	}
	sid := uint16(how & 3)
	p := f.o.Profile
	ppid := [...]uint32{p.Segment(), p.Control(), session.Draft.Segment(), 51}[how>>2&3]
	b = bytes.Clone(b[:min(len(b), as.a.MaxMessage())])
	const ddp = session.HeaderLen
	if len(b) > ddp+6 && b[ddp]&0x80 != 0 && bytes.Equal(b[ddp+2:ddp+5], []byte{0, 0, 0}) {
		for _, q := range f.qps {
			if q.h == f.hosts[1-host] && b[ddp+5] == 1 {
				be32(b[ddp+2:], q.reg.STag())
			}
		}
		if b[ddp+5] == 2 {
			be32(b[ddp+2:], f.stags[1-host])
		}
	}
	n := copy(w.link.Bytes(slot)[headroom:], b)
	as.push(w, slot, n, sid, ppid, false)
	if n >= ddp && how&16 == 0 && as.sessions[sid] != nil {
		as.mux.Begin(sid, w.link.Bytes(slot)[headroom:])
	} else {
		w.slots[slot].sid = ^uint16(0) // the sender's session does not count it
	}
	w.mark(&as.lane)
}

func be32(b []byte, v uint32) { b[0], b[1], b[2], b[3] = byte(v>>24), byte(v>>16), byte(v>>8), byte(v) }

// send posts a work request to q.
func (f *fuzzLives) send(q *fuzzQP, how byte) {
	s := q.h.w.streams[q.id]
	if s == nil || s.closed() || s.qp == nil || len(q.sends) > 60 {
		return
	}
	peer := q.reg
	for _, o := range f.qps {
		if o.h != q.h {
			peer = o.reg
		}
	}
	n := int(how>>3) * 100
	wr := verbs.SendWR{ID: 100, Op: rdmap.OpWrite, SGEs: q.sge(0, n), RKey: peer.STag(), Remote: 0x10000}
	if q.far != nil { // it fetches nothing
		how &= 4
		wr.SGEs = nil
	}
	switch how & 7 {
	case 1:
		wr = verbs.SendWR{ID: 100, Op: rdmap.OpSend, SGEs: q.sge(0, n%200)}
	case 2:
		wr.Op = rdmap.OpRead
	case 3:
		wr = verbs.SendWR{ID: 100, Op: rdmap.OpFetchAdd, SGEs: q.sge(0, 8), RKey: peer.STag(), Remote: 0x10008, CompareAdd: 1}
	case 4:
		wr = verbs.SendWR{ID: 100, Op: rdmap.OpImm, Imm: 1}
	case 5:
		wr.RKey = f.stags[0]
	}
	q.posted++
	q.sends = append(q.sends, wr)
	q.h.w.mark(s.lane)
}

// store makes far memory take what it was given.
func (f *fuzzLives) store() {
	for _, q := range f.qps {
		if q.far != nil && q.far.Backlog() > 0 {
			q.far.release()
		}
	}
}

// restart makes host 0 forget its association, and open another one from the same port.
func (f *fuzzLives) restart() {
	as, w := f.assoc(0), f.hosts[0].w
	if as == nil {
		return
	}
	as.a.Abort()
	for _, s := range slices.Clone(as.round) {
		as.endSession(w, s, errSession)
	}
	for d := (sctp.Data{}); as.a.PollData(&d); {
		as.unkeep(w, d.Slot)
	}
	as.dropReleased(w)
	as.forgetAddrs(w)
	as.a, as.mux = sctp.Dial(w.now, w.sctpConfig(f.o), as.key.Flow, w.e.sctpSecret(), 1500), nil
	as.beginSession(w, 0, w.newID(), joinRequest(as.key.Flow, 0))
}

// turn makes both hosts do what they have to do, and attaches queue pairs to what the peer has answered.
func (f *fuzzLives) turn() {
	f.step()
	for i, h := range f.hosts {
		for _, ev := range h.events {
			switch ev.Kind {
			case EventRequest, EventAccepted, EventConnected:
				f.asked[i] = append(f.asked[i], ev.Conn)
			case EventAnswer:
				q := f.qp(i, ev.Conn)
				p := mpa.Params{Initiator: true, IRD: 2, ORD: 2}
				h.w.attach(ev.Conn, h.w.streams[ev.Conn], Attachment{QP: &q.QPBinding, Params: p})
			}
		}
		h.events = nil
	}
}

// sessions runs a script: pairs of an operation and its argument, which messages follow.
func (f *fuzzLives) sessions(in []byte) {
	for n := 0; len(in) >= 2 && n < 300; n++ {
		op, arg := in[0], in[1]
		in = in[2:]
		host := int(op >> 4 & 1)
		h := f.hosts[host]
		var q *fuzzQP
		for i := range f.qps {
			if o := f.qps[(i+int(arg))%len(f.qps)]; o.h == h {
				q = o
				break
			}
		}
		var s *stream
		if q != nil {
			s = h.w.streams[q.id]
		}
		switch op & 15 {
		case 0, 1:
			n := min(int(op>>5)*8+int(op&1)*4, len(in))
			f.message(host, arg, in[:n])
			in = in[n:]
		case 8:
			if as := f.assoc(0); as != nil {
				_, _ = f.joinSCTP(as, time.Duration(arg)*time.Second)
			}
		case 9:
			if len(f.asked[host]) == 0 {
				break
			}
			id := f.asked[host][0]
			f.asked[host] = f.asked[host][1:]
			a := Attachment{}
			if arg&3 != 0 {
				a = Attachment{QP: &f.qp(host, id).QPBinding, Params: mpa.Params{IRD: 2, ORD: 2}}
			}
			h.w.answer(id, h.w.streams[id], session.Setup{}, a)
		case 11:
			switch as := f.assoc(host); {
			case as != nil && arg < 8:
				as.a.Abort()
				h.w.mark(&as.lane)
			case arg < 32:
				f.restart()
			default:
				f.store()
			}
		case 12:
			if as := f.assoc(host); as != nil {
				hop := Hop{SrcMAC: macA, DstMAC: macB, MTU: 600 + 8*int(arg), Found: arg&1 != 0}
				as.setHop(h.w, as.key.Flow.Remote, &hop)
			}
		case 13:
			if s != nil && s.qp == &q.QPBinding {
				q.left = q.left || q.far != nil // what is not stored yet does not complete
				s.detach(h.w)
			}
		default:
			f.common(op, arg, h, s, q)
		}
		f.turn()
	}
}

// common performs an operation that connections and sessions have, on s and its queue pair q of host h, which may be nil.
func (f *fuzzLives) common(op, arg byte, h *simHost, s *stream, q *fuzzQP) {
	switch op & 15 {
	case 2:
		for _, q := range f.qps {
			if q.h == h {
				f.send(q, arg)
			}
		}
	case 3:
		if s != nil && !s.closed() && s.qp != nil && len(q.recvs) < 60 {
			f.recv(q, 3)
		}
	case 4:
		f.now = f.now.Add(time.Duration(arg) * 10 * time.Millisecond)
	case 5:
		f.drop = int(arg & 7)
	case 6:
		if s != nil {
			h.w.disconnect(s, op&32 != 0)
		}
	case 7:
		if s != nil && q != nil && s.qp == &q.QPBinding {
			q.left = true
			q.QPBinding.id.Store(uint64(s.id))
			h.during(func() { h.e.Leave(&q.QPBinding) })
		}
	case 10:
		switch {
		case arg == 0:
			h.w.unlisten(1)
		case arg < 16 && q != nil:
			f.burst(q)
		}
	default:
		for range arg & 31 {
			f.turn()
		}
	}
}

// finish ends everything and checks that nothing is left.
func (f *fuzzLives) finish() {
	f.t.Helper()
	f.drop = 0
	for range 500 {
		f.turn()
		f.store()
	}
	for i, h := range f.hosts {
		h.w.unlisten(1)
		for _, id := range f.asked[i] {
			h.w.answer(id, h.w.streams[id], session.Setup{}, Attachment{})
		}
		for _, s := range h.w.streams {
			s.abort(h.w, errAborted)
		}
	}
	for i := 0; f.step(); i++ {
		f.store()
		if i > 100_000 {
			f.t.Fatal("never at rest")
		}
	}
	for i, h := range f.hosts {
		w := h.w
		if n := len(w.lanes) + len(w.streams) + len(w.moved) + w.timers.Len(); n != 0 {
			f.t.Errorf("host %d: left %d lanes, %d streams, %d timers", i, len(w.lanes), len(w.streams), w.timers.Len())
		}
		if w.sctp != nil && (w.sctp.n != 0 || w.sctp.memory != 0 || len(w.sctp.peers) != 0) {
			f.t.Errorf("host %d: %d associations, %d bytes, %v", i, w.sctp.n, w.sctp.memory, w.sctp.peers)
		}
		if n := len(w.held.frames) - len(w.held.free); n != 0 || w.super.runs.left() != maxRuns {
			f.t.Errorf("host %d: %d held frames and %d buffers of runs not given back", i, n, maxRuns-w.super.runs.left())
		}
		if h.link.FreeSlots() != h.link.Slots() || w.clientless.Slots() != 0 {
			n := h.link.Slots() - h.link.FreeSlots()
			f.t.Errorf("host %d: %d TX slots not given back, %d counted", i, n, w.clientless.Slots())
		}
		if bytes.Count(f.foreign[i], []byte{fuzzForeign}) != len(f.foreign[i]) {
			f.t.Errorf("host %d: memory of another PD has changed", i)
		}
	}
	received, some := 0, false
	for i, q := range f.qps {
		n := len(q.wcs)
		if q.far != nil {
			if q.far.waits != 0 {
				f.t.Errorf("queue pair %d: %d bytes are counted that wait no more", i, q.far.waits)
			}
			some = some || q.left
			for _, wc := range q.wcs {
				if wc.IsRecv() {
					received++
					n--
				}
			}
		}
		if n > q.posted || n < q.posted && !q.left {
			f.t.Errorf("queue pair %d: %d completions of %d work requests: %v", i, n, q.posted, q.wcs)
		}
	}
	if f.srq != nil && (received > f.srq.taken || received < f.srq.taken && !some) {
		f.t.Errorf("%d receives completed of %d that were taken", received, f.srq.taken)
	}
}

// FuzzSessions runs a script of two hosts with sessions on one association, in which both send also any messages.
// Everything must be returned at the end, and every work request complete once.
func FuzzSessions(f *testing.F) {
	f.Add([]byte{0, 2, 0xff, 15, 5, 8, 0, 15, 5, 0x19, 1, 15, 9, 2, 0x48, 15, 20})
	f.Add([]byte("\x00\xa0\x20\x00\x00\xc1\x40\x00\x00\x00\x01\x00\x00\x00\x00\x00\x01\x00\x10write\x00\x00\x00\x0f\x09"))
	f.Add([]byte{0, 8, 0, 15, 9, 0x19, 1, 2, 0xf8, 7, 0, 15, 9, 0x46, 0, 15, 9})
	f.Add([]byte{0, 0x60, 5, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 15, 9})
	f.Add([]byte{fuzzShared, 2, 0x39, 15, 5, 0x1d, 0}) // detach while far memory is written
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 2000 {
			return
		}
		runSessions(t, in)
	})
}

func runSessions(t *testing.T, in []byte) {
	s := newFuzzLives(t, in[0])
	s.openSCTP(s.o, s.qp(0, 0).simQP, s.qp(1, 0).simQP)
	s.qps[0].id, s.qps[1].id = s.lone(0), s.lone(1)
	s.sessions(in[1:])
	s.finish()
}

// TestSessionsRandom runs FuzzSessions on random bytes.
func TestSessionsRandom(t *testing.T) {
	oneGoroutine(t)
	testenv.Scripts(t, 100, 600, runSessions)
}
