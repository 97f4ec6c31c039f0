package session

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/sctp"
)

// end is one end of the simulation: an association with its sessions, a ULP that sets
// them up and ends them at random, and a checker of what comes.
type end struct {
	id   int
	flow pkt.Flow
	a    *sctp.Assoc
	l    *sctp.Listener
	m    *Mux
	cfg  Config
	rng  *rand.Rand
	bufs map[sctp.Buf]simMessage
	next sctp.Buf

	sinks    map[uint16]*checker
	sent     map[uint16]uint32 // segments of this session
	limit    map[uint16]uint32
	sessions int // that were open
	toOpen   int
	got      int
}

type simMessage struct {
	b       []byte
	stream  uint16
	control bool
}

// checker wants the segments of a session in order, each with its number.
type checker struct {
	t     *testing.T
	next  uint32
	early map[serial.Num]uint32
	rng   *rand.Rand
	n     *int
}

func (c *checker) take(n uint32) {
	if n != c.next {
		c.t.Fatalf("segment %d, want %d", n, c.next)
	}
	c.next++
	*c.n++
}

func (c *checker) Waits([]byte) bool { return false }

func (c *checker) HandleULPDU(b []byte) *term.Error {
	c.take(binary.BigEndian.Uint32(b))
	return nil
}

func (c *checker) HandleEarly(key serial.Num, b []byte) bool {
	if c.rng.IntN(3) == 0 {
		return false
	}
	c.early[key] = binary.BigEndian.Uint32(b)
	return true
}

func (c *checker) DeliverEarly(key serial.Num) *term.Error {
	n, ok := c.early[key]
	if !ok {
		c.t.Fatal("was never placed")
	}
	delete(c.early, key)
	c.take(n)
	return nil
}

// TestSessions runs sessions over associations over bad wires: on each stream one
// after another, with segments both ways, in both profiles.
func TestSessions(t *testing.T) {
	base := testenv.Seed(t)
	seeds := 150
	if testing.Short() {
		seeds = 30
	}
	for i := range seeds {
		t.Run(fmt.Sprint(base+uint64(i)), func(t *testing.T) { runSessions(t, base+uint64(i)) })
	}
}

func runSessions(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	profile := Profile(rng.IntN(2))
	now := clock.Time(1e12)
	var cfg sctp.Config
	profile.Configure(&cfg)
	cfg.Streams = 1 + rng.IntN(6)
	key := sctp.Secret{byte(seed)}
	var ends [2]*end
	var dec [2]*impair.Decider
	var queue impair.Queue[[]byte]
	var queue1 impair.Queue[[]byte]
	queues := [2]*impair.Queue[[]byte]{&queue, &queue1}
	for i := range ends {
		f := pkt.Flow{Local: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}, Remote: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 2}, LocalPort: 1, RemotePort: 2}
		if i == 1 {
			f = f.Reverse()
		}
		ends[i] = &end{id: i, flow: f, cfg: Config{Profile: profile}, rng: rand.New(rand.NewPCG(seed, uint64(i)+5)), bufs: map[sctp.Buf]simMessage{},
			sinks: map[uint16]*checker{}, sent: map[uint16]uint32{}, limit: map[uint16]uint32{}}
		dec[i] = impair.NewDecider(impair.Config{Seed: seed*2 + uint64(i), Delay: time.Duration(1+rng.IntN(5000)) * time.Microsecond,
			Loss: rng.Float64() * 0.1, Duplicate: 0.05, Reorder: 0.3, Hold: time.Duration(rng.IntN(20000)) * time.Microsecond})
	}
	ends[0].toOpen = 12
	ends[0].a = sctp.Dial(now, &cfg, ends[0].flow, &key, 1500)
	ends[1].l = sctp.NewListener(&cfg, &key, 1500)
	var scratch []impair.Delivery
	send := func(e *end, b []byte) {
		sctp.SetChecksum(b)
		scratch = dec[e.id].Decide(now, len(b), scratch[:0])
		for _, d := range scratch {
			queues[1-e.id].Push(d.At, b)
		}
	}
	for steps := 0; ends[0].sessions < 12 || !idle(ends[0]) || ends[1].m == nil || !idle(ends[1]); steps++ {
		if steps > 500_000 || now > 1e12+clock.Time(3*time.Hour) {
			t.Fatalf("no end: %d sessions, %+v", ends[0].sessions, ends[0].a.Stats())
		}
		var next clock.Time
		for _, e := range ends {
			if e.a != nil {
				e.turn(t, now, send)
				next = clock.Earliest(next, e.a.Deadline())
			}
			next = clock.Earliest(next, queues[e.id].Deadline())
		}
		now = max(now, next)
		for _, e := range ends {
			for {
				b, ok := queues[e.id].Pop(now)
				if !ok {
					break
				}
				if e.a == nil {
					a, reply := e.l.HandlePacket(now, e.flow, 0, b)
					if reply != nil {
						send(e, reply)
					}
					if e.a = a; a == nil {
						continue
					}
				}
				e.a.HandlePacket(now, e.flow, 0, b)
				e.data(b)
			}
			if e.a != nil {
				e.a.HandleTimeout(now)
			}
		}
	}
	for _, e := range ends {
		if e.m.Stats().Violations != 0 || e.m.Held() != 0 {
			t.Errorf("%+v, held %d", e.m.Stats(), e.m.Held())
		}
	}
	if ends[0].got+ends[1].got == 0 || ends[0].sessions != ends[1].sessions {
		t.Errorf("sessions %d and %d, segments %d and %d", ends[0].sessions, ends[1].sessions, ends[0].got, ends[1].got)
	}
}

func idle(e *end) bool {
	for i := range e.m.Streams() {
		if e.m.State(uint16(i)) != Idle {
			return false
		}
	}
	return true
}

func (e *end) mux() *Mux {
	if e.m == nil {
		out, in := e.a.Streams()
		e.m = New(e.cfg, min(out, in))
	}
	return e.m
}

func (e *end) data(b []byte) {
	var d sctp.Data
	for e.a.PollData(&d) {
		if d.Act == sctp.Deliver {
			e.mux().HandleMessage(d.Stream, d.PPID, d.Unordered, b[d.Off:d.Off+d.Len])
		}
	}
	if e.m != nil {
		e.a.SetBacklog(e.m.Held(), false)
	}
}

func (e *end) push(m simMessage, ppid uint32) {
	e.next++
	e.bufs[e.next] = m
	e.a.Push(&sctp.Message{Stream: m.stream, PPID: ppid, Buf: e.next, Len: len(m.b)})
}

func (e *end) attach(t *testing.T, id uint16) {
	e.sessions++
	c := &checker{t: t, early: map[serial.Num]uint32{}, rng: e.rng, n: &e.got}
	e.sinks[id] = c
	e.sent[id], e.limit[id] = 0, uint32(e.rng.IntN(60))
	if err := e.m.Attach(id, c); err != nil {
		delete(e.sinks, id) // it has ended in the same turn
	}
}

// turn lets the ULP act and the packets leave.
func (e *end) turn(t *testing.T, now clock.Time, send func(*end, []byte)) {
	if e.a.State() == sctp.Established {
		e.mux()
		for i := range e.m.Streams() {
			id := uint16(i)
			switch e.m.State(id) {
			case Idle:
				if e.toOpen > 0 && e.m.Initiate(id, Setup{Private: []byte("i")}) == nil {
					e.toOpen--
				}
			case Open:
				for e.sinks[id] != nil && e.sent[id] < e.limit[id] && e.m.CanSend(id) && e.a.Room() > 1200 {
					b := make([]byte, 6+e.rng.IntN(1200))
					e.m.Begin(id, b)
					binary.BigEndian.PutUint32(b[2:], e.sent[id])
					e.sent[id]++
					e.push(simMessage{b, id, false}, e.cfg.Profile.Segment())
				}
				if e.sinks[id] != nil && e.sent[id] == e.limit[id] && e.rng.IntN(20) == 0 {
					if err := e.m.Terminate(id); err != nil {
						t.Fatal(err)
					}
					delete(e.sinks, id)
				}
			}
		}
		var c Control
		for e.m.PollControl(&c) {
			e.push(simMessage{c.Data, c.Stream, true}, c.PPID)
		}
	}
	var o sctp.Out
	for e.a.PollTransmit(now, &o) {
		b := append([]byte(nil), o.Head...)
		for i := range o.Parts[:o.N] {
			p := &o.Parts[i]
			b = append(append(append(b, p.Hdr[:]...), e.bufs[p.Buf].b...), make([]byte, p.Pad)...)
		}
		send(e, b)
	}
	for {
		b, ok := e.a.PollReleased()
		if !ok {
			break
		}
		e.m.HandleAcked(e.bufs[b].stream, e.bufs[b].control)
		delete(e.bufs, b)
	}
	for {
		ev, ok := e.a.PollEvent()
		if !ok {
			break
		}
		if ev == sctp.EventClosed {
			t.Fatal(e.a.Err())
		}
	}
	if e.m == nil {
		return
	}
	var ev Event
	for e.m.PollEvent(&ev) {
		switch ev.Kind {
		case EventRequest:
			if err := e.m.Accept(ev.Stream, Setup{}); err != nil {
				t.Fatal(err)
			}
			e.attach(t, ev.Stream)
		case EventOpen:
			e.attach(t, ev.Stream)
		case EventTerminated, EventIdle:
			delete(e.sinks, ev.Stream)
		case EventFailed, EventRejected:
			t.Fatalf("host %d: %v %v", e.id, ev.Kind, ev.Err)
		}
	}
}
