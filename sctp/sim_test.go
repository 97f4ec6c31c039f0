package sctp

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const simStart = clock.Time(1_000_000_000_000)

func simFlow(id int, v6 bool) pkt.Flow {
	a := [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}
	b := [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 2}
	if v6 {
		a, b = [16]byte{0: 0xfd, 15: 1}, [16]byte{0: 0xfd, 15: 2}
	}
	f := pkt.Flow{Local: a, Remote: b, LocalPort: 40000, RemotePort: 7174}
	if id == 1 {
		f = f.Reverse()
	}
	return f
}

// simHost is one end: it pushes total messages and checks what arrives.
type simHost struct {
	id      int
	a       *Assoc
	l       *Listener
	flow    pkt.Flow
	rng     *rand.Rand
	total   int
	pushed  int
	bufs    map[Buf][]byte
	nextBuf Buf
	ssn     map[uint16]uint16 // next SSN of what we push
	nextIn  map[uint16]uint16 // next SSN of what should arrive
	got     map[uint32]bool   // serial numbers of messages that arrived
	kept    map[int][]byte
	part    []byte // a fragmented message
	events  []Event
	slow    bool // the application reads late
	backlog int
}

type simFrame struct {
	to int
	b  []byte
}

type sim struct {
	t        testing.TB
	now      clock.Time
	h        [2]*simHost
	d        [2]*impair.Decider
	scr      []impair.Delivery
	queue    impair.Queue[simFrame]
	blackout [2]clock.Time
	mtu      int
	narrow   int // longest IP packet while narrowed
	narrowed [2]clock.Time
	filter   func(from int, b []byte) bool // false: lost
	tap      func(from int, b []byte)
	steps    int
	out      Out
}

func newSim(t testing.TB, seed uint64, ca, cb Config, wire impair.Config, mtu int, v6 bool) *sim {
	s := &sim{t: t, now: simStart, mtu: mtu}
	key := Secret{1, 2, byte(seed)}
	for i := range s.h {
		w := wire
		w.Seed = seed*2 + uint64(i)
		s.d[i] = impair.NewDecider(w)
		s.h[i] = &simHost{id: i, flow: simFlow(i, v6), rng: rand.New(rand.NewPCG(seed, uint64(i))), bufs: map[Buf][]byte{},
			ssn: map[uint16]uint16{}, nextIn: map[uint16]uint16{}, got: map[uint32]bool{}, kept: map[int][]byte{}}
	}
	s.h[0].a = Dial(s.now, &ca, s.h[0].flow, &key, mtu)
	s.h[1].l = NewListener(&cb, &key, mtu)
	return s
}

// byteAt returns the byte of message n of host id at position i.
func byteAt(id int, n uint32, i int) byte {
	return byte(uint32(id)*31 + n*7 + uint32(i)*13 + uint32(i>>8))
}

// message makes message n: its serial number, whether it is in order and its SSN,
// then bytes that follow from these.
func (h *simHost) message(n uint32, size int) (b []byte, m Message, ordered bool) {
	size = max(size, 8)
	b = make([]byte, size)
	m = Message{Stream: uint16(h.rng.IntN(h.a.out)), PPID: 16, Len: size}
	ordered = h.rng.IntN(4) == 0
	binary.BigEndian.PutUint32(b, n)
	if ordered {
		b[4] = 1
		binary.BigEndian.PutUint16(b[5:], h.ssn[m.Stream])
		h.ssn[m.Stream]++
	}
	for i := 7; i < size; i++ {
		b[i] = byteAt(h.id, n, i)
	}
	h.nextBuf++
	m.Buf = h.nextBuf
	return b, m, ordered
}

// order turns the message that was pushed last into an ordered one, as a peer may send: an Assoc sends only unordered
// ones.
func (h *simHost) order(b []byte) {
	it := h.a.at(h.a.last - 1)
	it.flags &^= flagUnordered
	it.ssn = binary.BigEndian.Uint16(b[5:])
}

func (s *sim) deliver(h *simHost, d *Data, b []byte) {
	if d.Begin != (len(h.part) == 0) {
		s.t.Fatalf("host %d: piece out of place", h.id)
	}
	h.part = append(h.part, b...)
	if !d.End {
		return
	}
	b, h.part = h.part, nil
	n := binary.BigEndian.Uint32(b)
	if h.got[n] {
		s.t.Fatalf("host %d: message %d came twice", h.id, n)
	}
	h.got[n] = true
	for i := 7; i < len(b); i++ {
		if b[i] != byteAt(1-h.id, n, i) {
			s.t.Fatalf("host %d: message %d of %d bytes is wrong at %d", h.id, n, len(b), i)
		}
	}
	if (b[4] == 1) == d.Unordered {
		s.t.Fatal("U bit is wrong")
	}
	if !d.Unordered {
		if got, want := binary.BigEndian.Uint16(b[5:]), h.nextIn[d.Stream]; got != want {
			s.t.Fatalf("host %d stream %d: message %d, want %d", h.id, d.Stream, got, want)
		}
		h.nextIn[d.Stream]++
	}
	if h.slow {
		h.backlog += len(b)
	}
}

func (s *sim) drainData(h *simHost, b []byte) {
	var d Data
	for h.a.PollData(&d) {
		switch d.Act {
		case Deliver:
			s.deliver(h, &d, b[d.Off:d.Off+d.Len])
		case Keep:
			if h.kept[d.Slot] != nil {
				s.t.Fatal("slot is taken")
			}
			h.kept[d.Slot] = append([]byte{}, b[d.Off:d.Off+d.Len]...)
		case DeliverKept, Forget:
			k := h.kept[d.Slot]
			if k == nil || len(k) != d.Len {
				s.t.Fatal("slot was not kept")
			}
			if d.Act == DeliverKept {
				s.deliver(h, &d, k)
			}
			delete(h.kept, d.Slot)
		}
	}
	if h.slow {
		h.a.SetBacklog(h.backlog, false)
	}
}

func (s *sim) send(from int, b []byte) {
	SetChecksum(b)
	if s.tap != nil {
		s.tap(from, b)
	}
	if len(b)+20 > s.mtu || s.now >= s.blackout[0] && s.now < s.blackout[1] || s.filter != nil && !s.filter(from, b) {
		return
	}
	s.scr = s.d[from].Decide(s.now, len(b), s.scr[:0])
	for _, d := range s.scr {
		c := append([]byte(nil), b...)
		if d.Bit >= 0 {
			c[d.Bit/8] ^= 1 << (d.Bit % 8)
		}
		s.queue.Push(d.At, simFrame{1 - from, c})
	}
}

// assemble composes the packet of an Out, as its owner does.
func assemble(o *Out, bufs map[Buf][]byte) []byte {
	b := append([]byte(nil), o.Head...)
	for i := range o.Parts[:o.N] {
		p := &o.Parts[i]
		b = append(b, p.Hdr[:]...)
		b = append(b, bufs[p.Buf][:p.Len]...)
		b = append(b, zero4[:p.Pad]...)
	}
	return b
}

func (s *sim) pump(h *simHost) {
	if h.a == nil {
		return
	}
	s.app(h)
	for h.a.PollTransmit(s.now, &s.out) {
		b := assemble(&s.out, h.bufs)
		if len(b) != s.out.Len {
			s.t.Fatalf("Len %d, packet %d", s.out.Len, len(b))
		}
		if n := len(b) + h.a.paths[0].overhead - HeaderLen; s.now >= s.narrowed[0] && s.now < s.narrowed[1] {
			if s.out.Fragment {
				n = h.a.Path(s.out.Path).MTU
			}
			if n > s.narrow {
				continue
			}
		}
		s.send(h.id, b)
	}
	s.drainData(h, nil)
	for {
		b, ok := h.a.PollReleased()
		if !ok {
			break
		}
		if h.bufs[b] == nil {
			s.t.Fatal("released twice")
		}
		delete(h.bufs, b)
	}
	for {
		e, ok := h.a.PollEvent()
		if !ok {
			break
		}
		h.events = append(h.events, e)
	}
	s.invariants(h)
}

func (s *sim) app(h *simHost) {
	a := h.a
	if h.slow && h.backlog > 0 && h.rng.IntN(3) == 0 {
		h.backlog = max(0, h.backlog-h.rng.IntN(20000))
		a.SetBacklog(h.backlog, false)
	}
	if a.State() != Established {
		return
	}
	for h.pushed < h.total {
		size := 8 + h.rng.IntN(a.MaxMessage()-7)
		if h.rng.IntN(2) == 0 {
			size = 8 + h.rng.IntN(100)
		}
		if a.Room() < size {
			break
		}
		b, m, ordered := h.message(uint32(h.pushed), size)
		h.bufs[m.Buf] = b
		h.pushed++
		a.Push(&m)
		if ordered {
			h.order(b)
		}
	}
}

func (s *sim) invariants(h *simHost) {
	checkAccounts(s.t, h.a)
	n := 0
	for _, k := range h.a.rcv.kept {
		n += k.n
	}
	if n != h.a.rcv.keptLen || len(h.kept) != len(h.a.rcv.kept) {
		s.t.Fatalf("host %d: kept %d/%d chunks %d/%d", h.id, n, h.a.rcv.keptLen, len(h.kept), len(h.a.rcv.kept))
	}
}

// checkAccounts recomputes the sums that an association keeps and compares them.
func checkAccounts(t testing.TB, a *Assoc) {
	t.Helper()
	flight, lostN, ackedN, queued := 0, 0, 0, 0
	for p := a.first; p != a.last; p++ {
		it := a.at(p)
		switch it.state {
		case inFlight:
			flight += int(it.len)
		case lost:
			lostN++
		case acked:
			ackedN++
		case waiting:
			queued += int(it.len)
		}
	}
	sum := 0
	for i := range a.paths {
		p := &a.paths[i]
		sum += p.flight
		if p.flight > 0 && !p.armed(timerT3) {
			t.Fatal("data in flight and no timer")
		}
	}
	if flight != a.outstanding || flight != sum || lostN != a.lostCount || ackedN != a.gapAcked || queued != a.queued {
		t.Fatalf("accounts are wrong: flight %d/%d/%d lost %d/%d acked %d/%d queued %d/%d",
			flight, a.outstanding, sum, lostN, a.lostCount, ackedN, a.gapAcked, queued, a.queued)
	}
	if queued > 0 && flight+lostN == 0 && (a.State() == Established || a.State() == ShutdownPending || a.State() == ShutdownReceived) && a.Deadline() == 0 {
		t.Fatal("messages wait, and nothing is to happen")
	}
}

func (s *sim) receive(f simFrame) {
	h := s.h[f.to]
	if !Verify(f.b) {
		return
	}
	if h.a == nil || h.a.State() == Closed {
		if h.l != nil && h.a == nil {
			a, reply := h.l.HandlePacket(s.now, h.flow, 0, f.b)
			if reply != nil {
				s.send(h.id, reply)
			}
			if a == nil {
				return
			}
			h.a = a
		} else {
			if r := OutOfBlue(h.flow, f.b); r != nil {
				s.send(h.id, r)
			}
			return
		}
	}
	h.a.HandlePacket(s.now, h.flow, 0, f.b)
	s.drainData(h, f.b)
}

// step advances to the next event. It reports whether there is one.
func (s *sim) step() bool {
	s.steps++
	for _, h := range s.h {
		s.pump(h)
	}
	d := s.queue.Deadline()
	for _, h := range s.h {
		if h.a != nil {
			d = clock.Earliest(d, h.a.Deadline())
		}
		if h.slow && h.backlog > 0 {
			d = clock.Earliest(d, s.now.Add(5*time.Millisecond))
		}
	}
	if d == 0 {
		return false
	}
	s.now = max(s.now, d)
	for {
		f, ok := s.queue.Pop(s.now)
		if !ok {
			break
		}
		s.receive(f)
	}
	for _, h := range s.h {
		if h.a != nil {
			h.a.HandleTimeout(s.now)
		}
	}
	return true
}

func (s *sim) run(until func() bool) {
	s.t.Helper()
	for !until() {
		if !s.step() {
			s.t.Fatalf("nothing happens any more; %s", s.describe())
		}
		if s.steps > 2_000_000 || s.now.Sub(simStart) > 4*time.Hour {
			s.t.Fatalf("no end; %s", s.describe())
		}
	}
}

func (s *sim) describe() string {
	out := ""
	for _, h := range s.h {
		if h.a == nil {
			out += fmt.Sprintf("[%d: none] ", h.id)
			continue
		}
		out += fmt.Sprintf("[%d: %v err %v pushed %d got %d unacked %d events %v stats %+v] ", h.id, h.a.State(), h.a.Err(), h.pushed, len(h.got), h.a.Unacked(), h.events, h.a.Stats())
	}
	return out + s.now.Sub(simStart).String()
}

func (s *sim) establish() {
	s.t.Helper()
	s.run(func() bool {
		return s.h[1].a != nil && s.h[0].a.State() == Established && s.h[1].a.State() == Established
	})
}

// transfer moves all messages and shuts down.
func (s *sim) transfer(n0, n1 int) {
	s.t.Helper()
	a, b := s.h[0], s.h[1]
	a.total, b.total = n0, n1
	s.run(func() bool {
		for _, h := range s.h {
			if h.a != nil && h.a.State() == Closed {
				s.t.Fatalf("ended early: %s", s.describe())
			}
		}
		return b.a != nil && a.pushed == n0 && b.pushed == n1 && len(a.got) == n1 && len(b.got) == n0
	})
	a.a.Close(s.now)
	s.run(func() bool { return a.a.State() == Closed && b.a.State() == Closed })
	for _, h := range s.h {
		s.pump(h)
		if len(h.bufs) != 0 || len(h.kept) != 0 {
			s.t.Fatalf("host %d has %d buffers and %d kept chunks left", h.id, len(h.bufs), len(h.kept))
		}
		if h.events[len(h.events)-1] != EventClosed {
			s.t.Fatalf("events %v", h.events)
		}
	}
}

func wireOf(d time.Duration) impair.Config { return impair.Config{Delay: d} }

// TestTransfer moves messages both ways over good and bad wires.
func TestTransfer(t *testing.T) {
	base := testenv.Seed(t)
	seeds := 300
	if testing.Short() {
		seeds = 60
	}
	for i := range seeds {
		seed := base + uint64(i)
		rng := rand.New(rand.NewPCG(seed, 99))
		wire := impair.Config{Delay: time.Duration(50+rng.IntN(20000)) * time.Microsecond}
		if rng.IntN(4) != 0 {
			wire.Loss = rng.Float64() * 0.15
			wire.Duplicate = rng.Float64() * 0.1
			wire.Corrupt = rng.Float64() * 0.05
			wire.Jitter = time.Duration(rng.IntN(2000)) * time.Microsecond
			wire.Reorder = rng.Float64() * 0.2
			wire.Hold = time.Duration(rng.IntN(10000)) * time.Microsecond
		}
		ca, cb := Config{}, Config{}
		ca.Streams, cb.Streams = 1+rng.IntN(20), 1+rng.IntN(20)
		if rng.IntN(3) == 0 {
			cb.RcvWindow = 3000 + rng.IntN(20000)
			cb.MaxKept = 1 + rng.IntN(20)
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newSim(t, seed, ca, cb, wire, 576+rng.IntN(9000-576), rng.IntN(3) == 0)
			s.h[1].slow = rng.IntN(3) == 0
			if rng.IntN(4) == 0 {
				at := s.now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
				s.blackout = [2]clock.Time{at, at.Add(time.Duration(rng.IntN(20)) * time.Second)}
			}
			s.transfer(rng.IntN(400), rng.IntN(400))
		})
	}
}
