package session

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// end is one Session on the simulated wire, with a checker of what it receives.
type end struct {
	t    *testing.T
	s    *Session
	in   [][]byte // in flight to it
	recv int      // Receives posted, Window+1 at all times
	max  int      // longest message that it may receive
	open []*Call  // calls it has not answered
	done map[uint32]int
	fail map[uint32]error
	told uint32 // credits that it granted last
	sent uint32 // messages that it sent, Grants included
	edge uint32 // credits that it has received
}

// deliver passes the oldest message in flight to e.
func (e *end) deliver() {
	b := e.in[0]
	e.in = e.in[1:]
	if len(b) > e.max {
		e.t.Fatalf("a message of %d bytes into buffers of %d", len(b), e.max)
	}
	if e.s.Version() == 2 || binary.BigEndian.Uint32(b[4:]) == 2 {
		e.edge = binary.BigEndian.Uint32(b[8:])
	}
	e.s.HandleMessage(b)
}

// send moves what e may send onto the wire to o, and checks the credits: a message must be below the edge, a Grant at
// most at it.
func (e *end) send(o *end) {
	var out Out
	for e.s.PollTransmit(&out) {
		var h wire.Header
		if _, err := h.Decode(append(out.B[:len(out.B):len(out.B)], 0, 0, 0, 0)); err != nil {
			e.t.Fatalf("%x: %v", out.B, err)
		}
		if h.Vers == 2 {
			d := int32(e.sent - e.edge)
			if d > 0 || d == 0 && h.Type != wire.Grant {
				e.t.Fatalf("%v sent at %d with credits up to %d", h.Type, e.sent, e.edge)
			}
			if int32(h.Credit-e.told) < 0 {
				e.t.Fatalf("credits fall from %d to %d", e.told, h.Credit)
			}
			e.told = h.Credit
		}
		e.sent++
		o.in = append(o.in, append([]byte(nil), out.B...))
		if len(o.in) > o.recv {
			e.t.Fatalf("%d messages in flight, %d Receives", len(o.in), o.recv)
		}
	}
}

func (e *end) events() {
	for {
		ev, ok := e.s.PollEvent()
		if !ok {
			return
		}
		switch ev.Kind {
		case EventCall:
			want := pattern(ev.XID, len(ev.Call.Body), rpcCall)
			if !bytes.Equal(ev.Call.Body, want) {
				e.t.Fatalf("call %x: %d bytes differ", ev.XID, len(ev.Call.Body))
			}
			e.open = append(e.open, ev.Call)
		case EventReply:
			if !bytes.Equal(ev.Reply.Body, pattern(ev.XID, len(ev.Reply.Body), rpcReply)) {
				e.t.Fatalf("reply %x: %d bytes differ", ev.XID, len(ev.Reply.Body))
			}
			e.done[ev.XID]++
		case EventFailure:
			e.fail[ev.XID] = ev.Err
		case EventClose:
			e.t.Fatalf("closed: %v", ev.Err)
		}
	}
}

func pattern(xid uint32, n, typ int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) ^ byte(xid)
	}
	binary.BigEndian.PutUint32(b, xid)
	binary.BigEndian.PutUint32(b[4:], uint32(typ))
	return b
}

// answer replies to one of e's open calls with n bytes.
func (e *end) answer(rnd *rand.Rand, n int) {
	if len(e.open) == 0 {
		return
	}
	i := rnd.IntN(len(e.open))
	c := e.open[i]
	e.open = append(e.open[:i], e.open[i+1:]...)
	if c.XID&1 == 1 { // call-only
		e.s.Drop(c)
		e.done[c.XID]++
		return
	}
	p, f, ok := e.s.PlanReply(c, n, nil)
	if !ok {
		e.s.Fail(c, f)
		return
	}
	e.s.Reply(c, p, pattern(c.XID, n, rpcReply))
}

// TestSimulation runs calls of all sizes, some call-only, in both directions over a wire with delays, and checks
// every message against the credits and Receives of the other end.
func TestSimulation(t *testing.T) {
	seed := testenv.Seed(t)
	for round := range 60 {
		rnd := rand.New(rand.NewPCG(seed, uint64(round)))
		version := 2
		if round%4 == 3 {
			version = 1
		}
		t.Run(fmt.Sprintf("round %d, version %d", round, version), func(t *testing.T) {
			mk := func(server bool) *end {
				cfg := DefaultConfig(server)
				cfg.Window = 2 + rnd.IntN(6)
				if round%4 == 1 { // enough for calls that hold several credits
					cfg.Window += 20
				}
				cfg.Props.Reverse = wire.ReverseGeneral
				if !server {
					cfg.Version = version
				}
				for range rnd.IntN(3) * 20 {
					cfg.Extra = append(cfg.Extra, wire.Prop{ID: 99, Data: make([]byte, 100)})
				}
				cfg.Props.RecvSize = 4096 << rnd.IntN(2)
				recv := cfg.Window + 1
				limit := int(max(cfg.Props.RecvSize, 4096))
				if version == 1 {
					recv, limit = 1000, 1024
				}
				s := New(cfg)
				return &end{t: t, s: s, recv: recv, max: limit, done: map[uint32]int{}, fail: map[uint32]error{}, edge: 1}
			}
			a, b := mk(false), mk(true)
			want := map[*end]int{}
			next := uint32(2)
			sizes := []int{8, 40, 900, 1000, 4000, 4060, 4064, 4068, 4096, 9000, 20000}
			replies := append(slices.Clone(sizes), 60_000)
			if version == 1 {
				sizes, replies = sizes[:3], sizes[:3]
			}
			for step := 0; ; step++ {
				if step > 200_000 {
					t.Fatalf("stuck: %d of %d and %d of %d done, %d %d in flight, %+v %+v", len(a.done), want[a], len(b.done), want[b], len(a.in), len(b.in), a.s.Stats(), b.s.Stats())
				}
				issue := step < 400
				for _, e := range []*end{a, b} {
					o := a
					if e == a {
						o = b
					}
					if issue && e.s.ready && rnd.IntN(3) == 0 {
						n := sizes[rnd.IntN(len(sizes))]
						xid := next * 2
						if version == 2 && rnd.IntN(6) == 0 {
							xid++
							if e.s.Post(xid, pattern(xid, n, rpcCall)) == nil {
								want[o]++
							}
						} else if plan, err := e.s.PlanCall(&Spec{Body: n, Reply: 8}); err == nil && !plan.External {
							if err := e.s.Call(xid, pattern(xid, n, rpcCall), &CallChunks{}); err != nil {
								t.Fatal(err)
							}
							want[e]++
						}
						next++
					}
					if len(e.in) > 0 && rnd.IntN(2) == 0 {
						e.deliver()
					}
					e.events()
					if rnd.IntN(3) == 0 {
						e.answer(rnd, replies[rnd.IntN(len(replies))])
					}
					e.send(o)
				}
				if !issue && len(a.in)+len(b.in)+len(a.open)+len(b.open) == 0 &&
					len(a.done)+len(a.fail) == want[a] && len(b.done)+len(b.fail) == want[b] {
					break
				}
			}
			for _, e := range []*end{a, b} {
				for xid, err := range e.fail {
					t.Errorf("call %d: %v", xid, err)
				}
				for xid, n := range e.done {
					if n != 1 {
						t.Errorf("%d was done %d times", xid, n)
					}
				}
			}
			if want[a] == 0 {
				t.Error("nothing was done")
			}
		})
	}
}

// TestCreditWrap runs consecutive calls across the wrap of the counters.
func TestCreditWrap(t *testing.T) {
	p := clientPeer(t, nil)
	p.s.sent, p.s.limit = 1<<32-3, 1<<32-1
	for i := range uint32(8) {
		xid := 50 + i
		p.call(xid, callBody(xid, 40), &CallChunks{})
		p.clear()
		p.drain()
		if len(p.got) != 1 {
			t.Fatalf("call %d is not sent: %d, credits %d", i, p.s.sent, p.s.limit)
		}
		p.send(wire.Header{XID: xid, Type: wire.ReplyInline, Credit: 1<<32 - 1 + i + 1}, replyBody(xid, 40)...)
	}
	if p.s.sent != 5 {
		t.Errorf("sent %d", p.s.sent)
	}
}

// TestZeroGrant checks that without credits only a Grant is sent, and that a Grant releases what waits (draft section
// 4.2.1.1).
func TestZeroGrant(t *testing.T) {
	p := clientPeer(t, func(c *Config) { c.Window = 2 })
	p.s.limit = p.s.sent // the peer granted nothing more
	p.call(9, callBody(9, 40), &CallChunks{})
	p.drain()
	if len(p.got) != 0 {
		t.Fatalf("sent without credit: %+v", p.got)
	}
	sent := p.s.sent
	p.send(wire.Header{Type: wire.Grant, Credit: sent}) // still no credits; our window is used up
	p.send(wire.Header{Type: wire.Grant, Credit: sent})
	for _, h := range p.got {
		if h.Type != wire.Grant {
			t.Errorf("%+v", h)
		}
	}
	if len(p.got) > 1 {
		t.Errorf("%d Grants on one spare Receive", len(p.got))
	}
	p.clear()
	p.send(wire.Header{Type: wire.Grant, Credit: p.s.sent + 1})
	if len(p.got) != 1 || p.got[0].Type != wire.CallInline {
		t.Errorf("%+v", p.got)
	}
}

// TestCreditsFall checks that the edge is that of the most recent message, even if it decreases, and that nothing is
// sent beyond it (draft section 4.2.1).
func TestCreditsFall(t *testing.T) {
	p := clientPeer(t, nil)
	grant := func(edge uint32) {
		p.clear()
		p.send(wire.Header{Type: wire.Grant, Credit: edge})
	}
	calls := func() (n int) {
		for _, h := range p.got {
			if h.Type == wire.CallInline {
				n++
			}
		}
		return n
	}
	grant(p.s.sent + 100)
	grant(p.s.sent + 2)
	p.clear()
	for xid := range uint32(10) {
		p.call(50+xid, callBody(50+xid, 40), &CallChunks{})
	}
	p.drain()
	if calls() != 2 || len(p.got) != 2 {
		t.Fatalf("%d calls of %d messages with 2 credits", calls(), len(p.got))
	}
	// Below what was sent: not even a Grant is sent, although this end's window is used up.
	for range 4 {
		p.s.told = p.s.received
		grant(p.s.sent - 1)
		if len(p.got) != 0 {
			t.Fatalf("%+v is sent beyond the credits", p.got)
		}
	}
	p.s.told = p.s.edge()
	grant(p.s.sent + 4)
	if calls() != 4 {
		t.Errorf("%d calls with 4 credits", calls())
	}
	grant(p.s.sent + 50)
	if calls() != 4 {
		t.Errorf("%d calls of the last 4", calls())
	}
}

// TestShorterBuffers checks that a continued reply ends for a peer that says, after its call, that its Receive buffers are
// shorter than the header of the last part.
func TestShorterBuffers(t *testing.T) {
	p := newPeer(t, DefaultConfig(true))
	segs := slices.Repeat([]uint32{1}, 60)
	h := wire.Header{XID: 9, Credit: 1, Type: wire.CallInline, Writes: []wire.Chunk{chunk(segs...), chunk(segs...), chunk(segs...)}}
	p.send(h, callBody(9, 40)...)
	c := p.evs[len(p.evs)-1].Call
	want := pattern(9, 3000, rpcReply)
	plan, f, ok := p.s.PlanReply(c, len(want), nil)
	if !ok {
		t.Fatalf("%+v", f)
	}
	p.s.Reply(c, plan, want)
	p.drain()
	p.clear()
	props := wire.DefaultProperties()
	props.RecvSize = 256
	p.send(wire.Header{Type: wire.ConnPropFinal, Props: props.Props()})
	if n := len(p.got); n < 2 || n > 20 || p.got[n-1].Type != wire.ReplyInline {
		t.Fatalf("%d messages", n)
	}
	if got := slices.Concat(p.body...); !bytes.Equal(got, want) {
		t.Error("other bytes")
	}
}

// TestLongContinuedReply checks that a reply that fits no chunk is continued however long it is (draft section
// 6.6.4), up to a connection's memory for replies; a longer one becomes REPLY_RESOURCE, and the connection continues.
func TestLongContinuedReply(t *testing.T) {
	p := serverPeer(t, nil)
	want := pattern(9, 1<<20+13, rpcReply)
	p.send(wire.Header{XID: 9, Type: wire.CallInline, Reply: chunk(100)}, callBody(9, 40)...)
	c := p.evs[0].Call
	plan, f, ok := p.s.PlanReply(c, len(want), nil)
	if !ok {
		t.Fatalf("%+v", f)
	}
	p.clear()
	p.s.Reply(c, plan, want)
	p.drain()
	var got []byte
	for i := 0; len(got) < len(want); i++ {
		if i > len(p.got)-1 {
			p.send(wire.Header{Type: wire.Grant, Credit: p.s.sent + 1000})
			if i > len(p.got)-1 {
				t.Fatalf("%d messages, %d bytes", i, len(got))
			}
		}
		h := p.got[i]
		if h.Type == wire.Grant {
			continue
		}
		got = append(got, p.body[i]...)
		if last := len(got) == len(want); h.XID != 9 || last != (h.Type == wire.ReplyInline) || !last && (h.Type != wire.ReplyMiddle || int(h.Remaining) != len(want)-len(got)) {
			t.Fatalf("message %d: %+v", i, h)
		}
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes")
	}
	// A peer that reads no replies: at most maxReplyBytes are queued.
	p.send(wire.Header{Type: wire.Grant, Credit: p.s.sent})
	planned, refused := 0, 0
	for i := range uint32(40) {
		p.clear()
		p.send(wire.Header{XID: 100 + i, Type: wire.CallInline, Credit: p.s.sent}, callBody(100+i, 40)...)
		for _, e := range p.evs {
			if e.Kind != EventCall {
				t.Fatalf("%+v", e)
			}
			plan, f, ok := p.s.PlanReply(e.Call, 1<<20, nil)
			if ok {
				planned++
				p.s.Reply(e.Call, plan, replyBody(e.XID, 1<<20))
				continue
			}
			refused++
			if f != (wire.Failure{Code: wire.ErrReplyResource, Needed: 1 << 20}) {
				t.Fatalf("%+v", f)
			}
			p.s.Fail(e.Call, f)
		}
	}
	if planned != maxReplyBytes>>20 || planned+refused != 40 {
		t.Errorf("%d replies wait, %d are refused", planned, refused)
	}
}

// TestLongRepliesAtOnce checks that replies that exceed the memory for replies only together, and were planned before any of
// them was queued, do not end the connection. The short ones that follow do not either.
func TestLongRepliesAtOnce(t *testing.T) {
	const size = maxReplyBytes - 1000
	sizes := []int{size, size, 500, 600}
	p := serverPeer(t, nil)
	var calls []*Call
	var plans []*ReplyPlan
	for i, size := range sizes {
		xid := uint32(i)
		p.send(wire.Header{XID: xid, Type: wire.CallInline}, callBody(xid, 40)...)
		c := p.evs[len(p.evs)-1].Call
		plan, f, ok := p.s.PlanReply(c, size, nil)
		if !ok {
			t.Fatalf("%+v", f)
		}
		calls, plans = append(calls, c), append(plans, plan)
	}
	p.clear()
	for i, c := range calls {
		p.s.Reply(c, plans[i], replyBody(c.XID, sizes[i]))
	}
	p.send(wire.Header{Type: wire.Grant, Credit: p.s.sent + 2000})
	n := 0
	var failed []wire.Header
	for i, h := range p.got {
		switch {
		case h.Type == wire.Error:
			failed = append(failed, h)
		case h.XID == 0:
			n += len(p.body[i])
		}
	}
	if len(p.evs) > 0 || n != size || len(failed) != 1 || failed[0].XID != 1 || failed[0].Failure != (wire.Failure{Code: wire.ErrReplyResource, Needed: size}) {
		t.Errorf("events %+v, %d bytes of the first reply, errors %+v", p.evs, n, failed)
	}
}

// TestRemainingReadings checks that both meanings of rdma_remaining are accepted, since the draft does not say
// whether it counts the message that carries it.
func TestRemainingReadings(t *testing.T) {
	body := pattern(9, 100, rpcCall)
	for reading := range 2 {
		p := serverPeer(t, nil)
		left := len(body)
		for at := 0; at < 90; at += 30 {
			r := left - 30
			if reading == 1 {
				r = left
			}
			left -= 30
			p.send(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: uint32(r)}, body[at:at+30]...)
			p.send(wire.Header{Type: wire.Grant}) // may stand between
		}
		p.send(wire.Header{XID: 9, Type: wire.CallInline}, body[90:]...)
		if len(p.evs) != 1 || p.evs[0].Kind != EventCall || !bytes.Equal(p.evs[0].Call.Body, body) {
			t.Errorf("reading %d: %+v %+v", reading, p.evs, p.got)
		}
	}
}

// shake is a handshake of several rounds with long material.
type shake struct {
	steps int
	size  int
	got   int
	bad   bool
}

func (s *shake) Step(in []byte) (out []byte, done bool, err error) {
	if s.bad && in != nil {
		return nil, false, errors.New("no")
	}
	s.got += len(in)
	if in != nil && s.got < s.size { // a piece
		return nil, false, nil
	}
	s.got = 0
	s.steps--
	if s.steps < 0 {
		return nil, true, nil
	}
	return make([]byte, s.size), s.steps == 0, nil
}

func TestHostAuthentication(t *testing.T) {
	for _, size := range []int{1, 900, 5000} {
		for steps := 1; steps < 4; steps++ {
			mk := func(server bool) *end {
				cfg := DefaultConfig(server)
				cfg.Auth = &shake{steps: steps, size: size}
				s := New(cfg)
				return &end{t: t, s: s, recv: cfg.Window + 1, max: 4096, done: map[uint32]int{}, fail: map[uint32]error{}, edge: 1}
			}
			a, b := mk(false), mk(true)
			for range 100 {
				a.send(b)
				b.send(a)
				if len(a.in) > 0 {
					a.deliver()
				}
				if len(b.in) > 0 {
					b.deliver()
				}
				a.events()
				b.events()
			}
			if !a.s.ready || !b.s.authed || a.s.propsSent != phaseFinal || b.s.propsSent != phaseFinal {
				t.Fatalf("%d bytes, %d steps: ready %v, done %v %v, sent %v %v", size, steps, a.s.ready, a.s.authed, b.s.authed, a.s.propsSent, b.s.propsSent)
			}
			if err := a.s.Call(4, pattern(4, 40, rpcCall), &CallChunks{}); err != nil {
				t.Fatal(err)
			}
			a.send(b)
			b.deliver()
			b.events()
			if len(b.open) != 1 {
				t.Error("a call is not taken")
			}
		}
	}
	t.Run("calls before it", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.Auth = &shake{steps: 1, size: 4}
		p := newPeer(t, cfg)
		p.send(wire.Header{XID: 9, Type: wire.CallInline}, callBody(9, 40)...)
		last := p.got[len(p.got)-1]
		if last.Failure.Code != wire.ErrSystem {
			t.Errorf("%+v", p.got)
		}
	})
	t.Run("calls to a client before it", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.Auth = &shake{steps: 1, size: 4}
		p := newPeer(t, cfg)
		p.send(wire.Header{Type: wire.ConnPropMiddle, Props: (&wire.Properties{RecvSize: 4096, SegmentSize: 1, Reverse: wire.ReverseGeneral}).Props()})
		if len(p.evs) > 0 {
			t.Errorf("%+v", p.evs)
		}
		p.send(wire.Header{Type: wire.ConnPropFinal, Props: []wire.Prop{wire.HostAuth(make([]byte, 4))}})
		if len(p.evs) != 1 || p.evs[0].Kind != EventReady {
			t.Errorf("then: %+v", p.evs)
		}
	})
	t.Run("a peer that has none", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.Auth = &shake{steps: 1, size: 4}
		p := newPeer(t, cfg)
		p.send(wire.Header{Type: wire.ConnPropFinal})
		if len(p.evs) == 0 || !errors.Is(p.evs[len(p.evs)-1].Err, ErrAuth) {
			t.Errorf("%+v", p.evs)
		}
	})
	t.Run("a client of version 1, which has none", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.Auth = &shake{steps: 1, size: 4}
		p := newPeer(t, cfg)
		p.send(wire.Header{XID: 9, Vers: 1, Type: wire.Msg1}, callBody(9, 40)...)
		if len(p.evs) > 0 || len(p.got) != 1 || p.got[0].Failure != (wire.Failure{Code: wire.ErrVers, Low: 2, High: 2}) {
			t.Errorf("%+v %+v", p.evs, p.got)
		}
	})
	t.Run("a server of version 1, which has none", func(t *testing.T) {
		for _, version := range []int{1, 2} {
			cfg := DefaultConfig(false)
			cfg.Version, cfg.Auth = version, &shake{steps: 1, size: 4}
			p := newPeer(t, cfg)
			p.send(wire.Header{Vers: 1, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}})
			if len(p.evs) != 1 || !errors.Is(p.evs[0].Err, ErrVersion) {
				t.Errorf("version %d: %+v", version, p.evs)
			}
		}
	})
	t.Run("a wrong one", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.Auth = &shake{steps: 2, size: 4, bad: true}
		p := newPeer(t, cfg)
		p.send(wire.Header{Type: wire.ConnPropMiddle, Props: []wire.Prop{wire.HostAuth([]byte("xxxx"))}})
		if len(p.evs) == 0 || !errors.Is(p.evs[len(p.evs)-1].Err, ErrAuth) {
			t.Errorf("%+v", p.evs)
		}
	})
}

// FuzzSession feeds both kinds of end with any messages: it must not panic, and its memory must be bounded.
func FuzzSession(f *testing.F) {
	add := func(server bool, l ...[]byte) {
		b := []byte{0}
		if server {
			b[0] = 1
		}
		for _, x := range l {
			b = binary.BigEndian.AppendUint16(b, uint16(len(x)))
			b = append(b, x...)
		}
		f.Add(b)
	}
	for _, c := range responderCases {
		l := [][]byte{(&wire.Header{Vers: 2, Credit: 9, Type: wire.ConnPropFinal}).Append(nil)}
		for _, x := range c.send {
			h := x.h
			if h.Vers == 0 {
				h.Vers = 2
			}
			l = append(l, append(h.Append(nil), x.b...))
		}
		add(true, l...)
	}
	add(false, (&wire.Header{Vers: 2, Credit: 9, Type: wire.ConnPropFinal}).Append(nil), append((&wire.Header{XID: 9, Vers: 2, Credit: 9, Type: wire.ReplyInline}).Append(nil), replyBody(9, 40)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 {
			return
		}
		cfg := DefaultConfig(b[0]&1 == 1)
		cfg.Props.Reverse = wire.Reverse(b[0] >> 1 & 3)
		cfg.Limits = Limits{Message: 4096, ReadChunks: 2, WriteChunks: 2, Segments: 3, Chunk: 10000}
		s := New(cfg)
		b = b[1:]
		var out Out
		held := 0
		for len(b) >= 2 {
			n := min(int(binary.BigEndian.Uint16(b)), len(b)-2)
			s.HandleMessage(b[2 : 2+n])
			b = b[2+n:]
			for s.PollTransmit(&out) {
				if len(out.B) > 4096 {
					t.Fatalf("%d bytes", len(out.B))
				}
			}
			for {
				e, ok := s.PollEvent()
				if !ok {
					break
				}
				switch e.Kind {
				case EventReady:
					for xid := range uint32(4) {
						_ = s.Call(8+xid, callBody(8+xid, 40), &CallChunks{Writes: []wire.Chunk{chunk(10, 10)}, Reply: chunk(100)})
					}
				case EventCall:
					held++
					if len(e.Call.Body) > 4096 || len(e.Call.Reads) > 6 {
						t.Fatalf("%d bytes, %d segments", len(e.Call.Body), len(e.Call.Reads))
					}
					if p, f, ok := s.PlanReply(e.Call, 100*held, []int{held}); ok {
						var n uint64
						for _, c := range p.Copies {
							n += uint64(c.To.Length)
						}
						if n > uint64(101*held) {
							t.Fatalf("%d bytes written of %d", n, 101*held)
						}
						s.Reply(e.Call, p, make([]byte, 100*held))
					} else {
						s.Fail(e.Call, f)
					}
				}
			}
			if cap(s.asm.buf) > 2*4096 {
				t.Fatalf("%d bytes held", cap(s.asm.buf))
			}
		}
	})
}
