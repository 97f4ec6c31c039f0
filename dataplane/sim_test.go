package dataplane

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

var (
	addrA = netip.MustParseAddr("10.0.0.1")
	addrB = netip.MustParseAddr("10.0.0.2")
	macA  = [6]byte{2, 0, 0, 0, 0, 1}
	macB  = [6]byte{2, 0, 0, 0, 0, 2}
)

// A sim is two engines joined by a pipe, driven from one goroutine under a
// virtual clock.
type sim struct {
	t     testing.TB
	now   clock.Time
	hosts [2]*simHost
	limit clock.Time
	real  bool // uses the real clock: step never moves it
	host  bool // both hosts are one, for connections within it
}

// withinHost makes newSim use one host for both ends; direct is what attach negotiates.
var withinHost struct{ on, direct bool }

type simHost struct {
	e      *Engine
	w      *worker
	link   *link.Pipe
	events []Event
	table  *verbs.Table

	// Within one host, of the first host:
	other    *simHost            // owns the passive ends
	accepted map[ConnID]*simHost // the owner of each of them
}

func newSim(t testing.TB, cfg link.PipeConfig) *sim {
	s := &sim{t: t, now: clock.Time(time.Second)}
	cfg.Now = func() clock.Time { return s.now }
	s.make(t, cfg)
	t.Cleanup(func() {
		for i, h := range s.hosts {
			if i == 0 || !s.host {
				h.w.closeFDs()
				h.link.Close()
			}
		}
	})
	return s
}

// make makes the two hosts.
func (s *sim) make(t testing.TB, cfg link.PipeConfig) {
	a, b, err := link.NewPipe(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.join(t, [2]link.Link{a, b}, cfg.Super == link.SuperWhole, cfg.Now)
	s.hosts[0].link, s.hosts[1].link = a, b
	if withinHost.on {
		_ = b.Close()
		s.hosts[1].w.closeFDs()
		h := *s.hosts[0]
		s.host, s.hosts[1] = true, &h
		s.hosts[0].accepted = make(map[ConnID]*simHost)
		s.hosts[0].other = &h
	}
}

// join places the two hosts at the ends of a wire.
func (s *sim) join(t testing.TB, ends [2]link.Link, partial bool, now func() clock.Time) {
	for i, l := range ends {
		var err error
		h := &simHost{table: verbs.NewTable(rand.NewChaCha8([32]byte{byte(i)}))}
		h.e, err = New(Config{Now: now}, []Queue{{Link: l, CPU: -1, PartialChecksums: partial}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		h.w = h.e.workers[0]
		s.hosts[i] = h
	}
	s.limit = s.now.Add(10 * time.Minute)
}

// step turns both workers once. If neither has work it moves the clock to the next deadline of a worker or the wire.
// It reports false when nothing is left to do.
func (s *sim) step() bool {
	n := 0
	var next clock.Time
	for i, h := range s.hosts {
		n += len(h.w.dirty) + h.w.turn()
		if i == 0 || !s.host {
			h.drain()
		} else {
			s.hosts[0].drain()
		}
		n += len(h.w.dirty)
	}
	if s.real {
		s.now = clock.Now()
		return true
	}
	if n > 0 {
		s.now = s.now.Add(time.Microsecond)
		return true
	}
	for _, h := range s.hosts {
		next = clock.Earliest(next, clock.Earliest(h.w.timers.Next(), h.link.Deadline()))
	}
	if next == 0 {
		return false
	}
	s.now = max(next, s.now.Add(time.Microsecond))
	return true
}

// until steps until cond holds.
func (s *sim) until(what string, cond func() bool) {
	s.t.Helper()
	for !cond() {
		if !s.step() {
			s.t.Fatalf("at rest, but not: %s", what)
		}
		if s.now > s.limit {
			s.t.Fatalf("not within %v of virtual time: %s", 10*time.Minute, what)
		}
	}
}

// event waits for an event on host i.
func (s *sim) event(i int, kind EventKind) (ev Event) {
	s.t.Helper()
	s.until(fmt.Sprintf("event %d on host %d", kind, i), func() (ok bool) { ev, ok = s.hosts[i].take(kind); return ok })
	return ev
}

func (h *simHost) drain() {
	for _, f := range h.e.events.q {
		f(func(ev Event) {
			if ev.Kind == EventAccepted && h.other != nil {
				h.accepted[ev.Conn] = h.other
			}
			to := h
			if p := h.accepted[ev.Conn]; p != nil {
				to = p
			}
			to.events = append(to.events, ev)
		})
	}
	h.e.events.q = nil
}

// during turns the worker until f, which waits for it, has returned.
func (h *simHost) during(f func()) {
	done := make(chan struct{})
	go func() {
		f()
		close(done)
	}()
	for {
		select {
		case <-done:
			return
		default:
			h.w.turn()
		}
	}
}

func (h *simHost) take(kind EventKind) (Event, bool) {
	for i, ev := range h.events {
		if ev.Kind == kind {
			h.events = append(h.events[:i:i], h.events[i+1:]...)
			return ev, true
		}
	}
	return Event{}, false
}

// open connects host 0 to host 1 and returns the two connections in streaming
// mode.
func (s *sim) open() (a, b *stream) {
	s.t.Helper()
	return s.openTo(addrA, addrB)
}

func (s *sim) openTo(from, to netip.Addr) (a, b *stream) {
	s.t.Helper()
	return s.openFrom(netip.AddrPortFrom(from, 40000), to)
}

func (s *sim) openFrom(local netip.AddrPort, to netip.Addr) (a, b *stream) {
	s.t.Helper()
	ha, hb := s.hosts[0], s.hosts[1]
	remote := netip.AddrPortFrom(to, 7174)
	hb.w.turn()
	if hb.w.listeners.admitting(&pkt.Flow{Local: remote.Addr().As16(), LocalPort: remote.Port()}, pkt.ProtoTCP) == nil {
		listen(s.t, hb.w, 1, &ListenRequest{Local: remote, Backlog: 8})
	}
	id := ha.w.newID()
	if err := s.connectTo(id, pkt.NewFlow(local, remote)); err != nil {
		s.t.Fatal(err)
	}
	con, acc := s.event(0, EventConnected), s.event(1, EventAccepted)
	return ha.w.streams[con.Conn], hb.w.streams[acc.Conn]
}

// connectTo makes host 0 dial.
func (s *sim) connectTo(id ConnID, flow pkt.Flow) error {
	w := s.hosts[0].w
	if s.host {
		return connectHost(w, id, request(flow, 0))
	}
	return w.connect(id, flow, Hop{SrcMAC: macA, DstMAC: macB}, 0)
}

// A simQP is a queue pair whose work requests and completions are plain slices.
type simQP struct {
	QPBinding
	h     *simHost
	mem   []byte
	reg   *verbs.Region
	sends []verbs.SendWR
	recvs []verbs.RecvWR
	wcs   []verbs.WC
	rings []int // the worker that each of wcs was pushed by
}

func (q *simQP) NextSend(wr *verbs.SendWR) bool {
	if len(q.sends) == 0 {
		return false
	}
	*wr = q.sends[0]
	q.sends = q.sends[1:]
	return true
}

func (q *simQP) NextRecv(wr *verbs.RecvWR) bool {
	if len(q.recvs) == 0 {
		return false
	}
	*wr = q.recvs[0]
	q.recvs = q.recvs[1:]
	return true
}

func (q *simQP) Push(worker int, wc *verbs.WC) bool {
	q.wcs, q.rings = append(q.wcs, *wc), append(q.rings, worker)
	return true
}
func (q *simQP) Pending(int) bool                 { return true } // nothing to flush
func (q *simQP) Flush(int, clock.Time) clock.Time { return 0 }

const simAccess = verbs.LocalWrite | verbs.RemoteRead | verbs.RemoteWrite | verbs.RemoteAtomic

func newSimQP(t testing.TB, h *simHost, size int) *simQP {
	q := &simQP{h: h, mem: make([]byte, size)}
	var err error
	if q.reg, err = h.table.Register(1, q.mem, 0x10000, simAccess); err != nil {
		t.Fatal(err)
	}
	q.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: h.table, SQDepth: 128, RQDepth: 128, MaxSGE: 4, SigAll: true, Sends: q, Recvs: q})
	q.SendCQ, q.RecvCQ, q.Client = q, q, &ClientBinding{}
	return q
}

func (q *simQP) sge(off, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: 0x10000 + uint64(off), Len: uint32(n), LKey: q.reg.STag()}}
}

// attach takes both ends to full operation.
func (s *sim) attach(a, b *stream, qa, qb *simQP, p mpa.Params) {
	s.t.Helper()
	if withinHost.direct {
		p.CRC, p.SendMarkers, p.RecvMarkers = false, false, false
	}
	s.hosts[1].w.attach(b.id, b, Attachment{QP: &qb.QPBinding, Params: p})
	p.Initiator = true
	s.hosts[0].w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: p})
	s.until("full operation", func() bool { return a.mode == modeFull && b.mode == modeFull })
}

// attachEach is attach with parameters as seen by the initiator.
func (s *sim) attachEach(a, b *stream, qa, qb *simQP, p mpa.Params) {
	s.t.Helper()
	if withinHost.direct {
		p.CRC, p.SendMarkers, p.RecvMarkers = false, false, false
	}
	p.Initiator = true
	s.hosts[0].w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: p})
	p.Initiator = false
	p.SendMarkers, p.RecvMarkers = p.RecvMarkers, p.SendMarkers
	s.hosts[1].w.attach(b.id, b, Attachment{QP: &qb.QPBinding, Params: p})
	s.until("full operation", func() bool { return a.mode == modeFull && b.mode == modeFull })
}

// closeAll closes the connection gracefully and checks that all resources were returned.
func (s *sim) closeAll(a *stream) {
	s.t.Helper()
	s.hosts[0].w.disconnect(a, false)
	s.until("connections gone", func() bool { return s.hosts[0].w.stats.Conns == 0 && s.hosts[1].w.stats.Conns == 0 })
	for s.step() { // what is still on the wire
		if s.now > s.limit {
			s.t.Fatal("never at rest")
		}
	}
	for i, h := range s.hosts {
		if n := len(h.w.held.free); n != len(h.w.held.frames) {
			s.t.Errorf("host %d: %d held frames not given back", i, len(h.w.held.frames)-n)
		}
		if n := maxRuns - h.w.super.runs.left(); n != 0 {
			s.t.Errorf("host %d: %d buffers of runs not given back", i, n)
		}
		if h.link.FreeSlots() != h.link.Slots() {
			s.t.Errorf("host %d: %d TX slots not given back", i, h.link.Slots()-h.link.FreeSlots())
		}
		if h.w.clientless.Slots() != 0 {
			s.t.Errorf("host %d: %d TX slots accounted for", i, h.w.clientless.Slots())
		}
		if h.w.timers.Len() != 0 {
			s.t.Errorf("host %d: %d timers left", i, h.w.timers.Len())
		}
	}
}

func TestStreamHalfClose(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	msg := bytes.Repeat([]byte("streaming mode, before MPA. "), 400)
	a.conn().streamSend(s.hosts[0].w, msg)
	ea, eb := &streamingEnd{host: s.hosts[0], c: a}, &streamingEnd{host: s.hosts[1], c: b}
	s.until("bytes arrived", func() bool { eb.read(); return len(eb.got) >= len(msg) })
	if !bytes.Equal(eb.got, msg) {
		t.Error("streaming bytes differ")
	}
	// The peer's FIN leaves our direction open.
	s.hosts[0].w.disconnect(a, false)
	s.event(1, EventPeerClosed)
	b.conn().streamSend(s.hosts[1].w, msg)
	s.until("bytes arrived after the FIN", func() bool { ea.read(); return len(ea.got) >= len(msg) })
	if !bytes.Equal(ea.got, msg) {
		t.Error("streaming bytes of the half-closed connection differ")
	}
	s.hosts[1].w.disconnect(b, false)
	s.closeAll(a)
	for i, h := range s.hosts {
		if ev, ok := h.take(EventClosed); !ok || ev.Err != nil {
			t.Errorf("host %d: EventClosed = %v, %v; want one without error", i, ok, ev.Err)
		}
	}
}

// TestVerbsOverBadWire moves data by Write, Read and Send over every kind of bad wire and checks the memory, the
// completions, and that all frames and timers are returned.
func TestVerbsOverBadWire(t *testing.T) {
	oneGoroutine(t)
	seed := testenv.Seed(t)
	seeds := 6
	if testing.Short() {
		seeds = 2
	}
	wires := []struct {
		name string
		cfg  impair.Config
		mtu  int
	}{
		{"clean", impair.Config{}, 1500},
		{"jumbo", impair.Config{}, 9000},
		{"delay", impair.Config{Delay: 5 * time.Millisecond}, 1500},
		{"loss", impair.Config{Loss: 0.03, Delay: time.Millisecond}, 1500},
		{"all", impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Corrupt: 0.01, Delay: time.Millisecond, Jitter: time.Millisecond}, 3498},
	}
	params := []struct {
		name string
		p    mpa.Params
	}{
		{"crc", mpa.Params{CRC: true, IRD: 8, ORD: 8}},
		{"markers", mpa.Params{CRC: true, SendMarkers: true, RecvMarkers: true, IRD: 8, ORD: 8}},
		{"plain", mpa.Params{IRD: 8, ORD: 8}},
	}
	for _, wire := range wires {
		for _, par := range params {
			t.Run(wire.name+"/"+par.name, func(t *testing.T) {
				for i := range seeds {
					wire.cfg.Seed = seed + uint64(i)
					cfg := link.PipeConfig{MTU: wire.mtu, AtoB: wire.cfg, BtoA: wire.cfg}
					cfg.BtoA.Seed += 1000
					newSim(t, cfg).moveData(par.p, rand.New(rand.NewPCG(seed, uint64(i))), addrA, addrB)
				}
			})
		}
	}
}

// moveData moves data from host 0 to host 1 and back over TCP.
func (s *sim) moveData(p mpa.Params, rng *rand.Rand, from, to netip.Addr) {
	a, _ := s.moveDataOver(rng, func(qa, qb *simQP) (a, b *stream) {
		a, b = s.openTo(from, to)
		s.attach(a, b, qa, qb, p)
		return a, b
	})
	s.closeAll(a)
}

// moveDataOver moves data from host 0 to host 1 and back over the connection that open makes, and returns its ends.
func (s *sim) moveDataOver(rng *rand.Rand, open func(qa, qb *simQP) (a, b *stream)) (a, b *stream) {
	const size = 300_000
	t := s.t
	qa, qb := newSimQP(t, s.hosts[0], 2*size), newSimQP(t, s.hosts[1], 2*size)
	for i := range qa.mem[:size] {
		qa.mem[i] = byte(rng.Uint32())
	}
	for i := range 16 {
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: uint64(i), SGEs: qb.sge(size+i*1000, 1000)})
	}
	a, b = open(qa, qb)

	// Writes of random sizes to qb, then the same data read back into the second half.
	n := 0
	for off := 0; off < size; {
		l := min(size-off, 1+rng.IntN(50_000))
		qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(n), Op: rdmap.OpWrite, SGEs: qa.sge(off, l), RKey: qb.reg.STag(), Remote: 0x10000 + uint64(off)})
		off += l
		n++
	}
	for i := range 16 {
		qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(n), Op: rdmap.OpSend, SGEs: qa.sge(i*2000, 1000-i)})
		n++
	}
	for off := 0; off < size; {
		l := min(size-off, 1+rng.IntN(50_000))
		qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(n), Op: rdmap.OpRead, SGEs: qa.sge(size+off, l), RKey: qb.reg.STag(), Remote: 0x10000 + uint64(off)})
		off += l
		n++
	}
	s.hosts[0].w.mark(a.lane)
	s.until("all completed", func() bool { return len(qa.wcs) >= n && len(qb.wcs) >= 16 })
	for i, wc := range qa.wcs {
		if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
			t.Fatalf("completion %d: id %d, status %v", i, wc.ID, wc.Status)
		}
	}
	for i, wc := range qb.wcs {
		if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess || wc.Len != uint32(1000-i) {
			t.Fatalf("receive %d: id %d, status %v, %d bytes", i, wc.ID, wc.Status, wc.Len)
		}
		if !bytes.Equal(qb.mem[size+i*1000:][:1000-i], qa.mem[i*2000:][:1000-i]) {
			t.Fatalf("receive %d: bytes differ", i)
		}
	}
	if !bytes.Equal(qb.mem[:size], qa.mem[:size]) {
		t.Fatal("written bytes differ")
	}
	if !bytes.Equal(qa.mem[size:], qa.mem[:size]) {
		t.Fatal("bytes read back differ")
	}
	return a, b
}
