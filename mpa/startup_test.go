package mpa

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const t0 clock.Time = 1_000_000

// frameOf returns the bytes that s sends.
func frameOf(t testing.TB, s *Startup) []byte {
	t.Helper()
	b, ok := s.PollTransmit()
	if !ok {
		t.Fatal("nothing to send")
	}
	if _, ok := s.PollTransmit(); ok {
		t.Fatal("PollTransmit gave a second frame")
	}
	return b
}

// event returns the event of s, which must be of kind k.
func event(t testing.TB, s *Startup, k EventKind) Event {
	t.Helper()
	ev, ok := s.PollEvent()
	if !ok || ev.Kind != k {
		t.Fatalf("event %d, %v (%v); want %d", ev.Kind, ok, ev.Err, k)
	}
	if _, ok := s.PollEvent(); ok {
		t.Fatal("PollEvent gave a second event")
	}
	return ev
}

// give feeds b to s, which must consume all of it without an error.
func give(t testing.TB, s *Startup, b []byte) {
	t.Helper()
	if n, err := s.HandleStream(t0, b); n != len(b) || err != nil {
		t.Fatalf("HandleStream took %d of %d bytes, %v", n, len(b), err)
	}
}

// connect runs both sides to Full Operation.
func connect(t testing.TB, ic, rc Config, ird, ord int) (i, r Params) {
	t.Helper()
	a, b := NewInitiator(ic, t0), NewResponder(rc, t0)
	give(t, b, frameOf(t, a))
	event(t, b, EventRequest)
	if err := b.Accept(nil, ird, ord); err != nil {
		t.Fatal(err)
	}
	give(t, a, frameOf(t, b))
	event(t, a, EventAccepted)
	event(t, b, EventAccepted)
	if a.Deadline() != 0 || b.Deadline() != 0 {
		t.Error("a timer runs in Full Operation")
	}
	return a.Result(), b.Result()
}

func TestStartupDefault(t *testing.T) {
	i, r := connect(t, DefaultConfig(), DefaultConfig(), -1, -1)
	want := Params{CRC: true, Rev: 2, Enhanced: true, IRD: 16, ORD: 16}
	if r != want {
		t.Errorf("responder runs with %+v; want %+v", r, want)
	}
	want.Initiator = true
	if i != want {
		t.Errorf("initiator runs with %+v; want %+v", i, want)
	}
}

func TestStartupTimeout(t *testing.T) {
	s := NewResponder(DefaultConfig(), t0)
	if s.Deadline() != t0.Add(5*time.Second) {
		t.Errorf("deadline after %v", s.Deadline().Sub(t0))
	}
	s.HandleTimeout(s.Deadline() - 1)
	if _, ok := s.PollEvent(); ok {
		t.Fatal("an early HandleTimeout did something")
	}
	s.HandleTimeout(s.Deadline())
	ev := event(t, s, EventFailed)
	if !errors.Is(ev.Err, ErrTimeout) || !errors.Is(ev.Err, term.ErrMPAClosed) {
		t.Errorf("failed with %v", ev.Err)
	}
}

// with returns DefaultConfig, changed.
func with(change func(c *Config)) Config {
	c := DefaultConfig()
	change(&c)
	return c
}

func same(*Config) {}

func TestStartupNegotiation(t *testing.T) {
	p2p := func(kinds RTRs) func(*Config) { return func(c *Config) { c.P2P, c.RTR = true, kinds } }
	takes := func(kinds RTRs) func(*Config) { return func(c *Config) { c.RTR = kinds } }
	depths := func(ird, ord int) func(*Config) { return func(c *Config) { c.IRD, c.ORD = ird, ord } }
	noCRC := func(c *Config) { c.CRC = false }
	markers := func(c *Config) { c.Markers = true }
	rev1 := func(c *Config) { c.Rev, c.Enhanced = 1, false }
	base := Params{CRC: true, Rev: 2, Enhanced: true, IRD: 16, ORD: 16}
	const send, write, read = RTRs(RTRSend), RTRs(RTRWrite), RTRs(RTRRead)
	for _, tt := range []struct {
		name     string
		ic, rc   func(*Config)
		ird, ord int // for Accept
		i, r     func(*Params)
	}{
		{"CRC asked for by the initiator", same, noCRC, -1, -1, nil, nil},
		{"CRC asked for by the responder", noCRC, same, -1, -1, nil, nil},
		{"CRC off", noCRC, noCRC, -1, -1, func(p *Params) { p.CRC = false }, func(p *Params) { p.CRC = false }},

		{"markers to the initiator", markers, same, -1, -1, func(p *Params) { p.RecvMarkers = true }, func(p *Params) { p.SendMarkers = true }},
		{"markers to the responder", same, markers, -1, -1, func(p *Params) { p.SendMarkers = true }, func(p *Params) { p.RecvMarkers = true }},
		{"markers both ways", markers, markers, -1, -1,
			func(p *Params) { p.SendMarkers, p.RecvMarkers = true, true }, func(p *Params) { p.SendMarkers, p.RecvMarkers = true, true }},

		{"revision 1", rev1, same, 3, 4, func(p *Params) { p.Rev, p.Enhanced = 1, false },
			func(p *Params) { p.Rev, p.Enhanced, p.IRD, p.ORD = 1, false, 3, 4 }},
		{"revision 1 on both sides", rev1, rev1, -1, -1,
			func(p *Params) { p.Rev, p.Enhanced = 1, false }, func(p *Params) { p.Rev, p.Enhanced = 1, false }},
		{"revision 2 without S", func(c *Config) { c.Enhanced = false }, same, -1, -1,
			func(p *Params) { p.Enhanced = false }, func(p *Params) { p.Enhanced = false }},

		{"initiator's ORD lowered to the responder's IRD", depths(16, 16), func(c *Config) { c.IRD, c.MaxIRD = 5, 0 }, -1, -1,
			func(p *Params) { p.ORD = 5 }, func(p *Params) { p.IRD = 5 }},
		{"responder's ORD lowered to the initiator's IRD", depths(3, 16), same, -1, -1,
			func(p *Params) { p.IRD = 3 }, func(p *Params) { p.ORD = 3 }},
		{"depths of Accept", same, same, 7, 2, func(p *Params) { p.ORD = 7 }, func(p *Params) { p.IRD, p.ORD = 7, 2 }},
		{"no reads at all", depths(0, 0), depths(0, 0), -1, -1,
			func(p *Params) { p.IRD, p.ORD = 0, 0 }, func(p *Params) { p.IRD, p.ORD = 0, 0 }},
		{"largest depths", depths(0x3ffe, 0x3ffe), depths(0x3ffe, 0x3ffe), -1, -1,
			func(p *Params) { p.IRD, p.ORD = 0x3ffe, 0x3ffe }, func(p *Params) { p.IRD, p.ORD = 0x3ffe, 0x3ffe }},

		{"peer to peer, all kinds", p2p(AllRTRs), same, -1, -1, func(p *Params) { p.RTR = RTRWrite }, func(p *Params) { p.RTR = RTRWrite }},
		{"peer to peer, no set given", p2p(0), takes(0), -1, -1, func(p *Params) { p.RTR = RTRWrite }, func(p *Params) { p.RTR = RTRWrite }},
		{"peer to peer by Send", p2p(send), same, -1, -1, func(p *Params) { p.RTR = RTRSend }, func(p *Params) { p.RTR = RTRSend }},
		{"peer to peer by Read", p2p(read | send), takes(read | write), -1, -1, func(p *Params) { p.RTR = RTRRead }, func(p *Params) { p.RTR = RTRRead }},
		{"responder's IRD raised for the Read", func(c *Config) { p2p(read)(c); depths(0, 0)(c) }, depths(0, 0), -1, -1,
			func(p *Params) { p.RTR, p.IRD, p.ORD = RTRRead, 0, 0 }, func(p *Params) { p.RTR, p.IRD, p.ORD = RTRRead, 1, 0 }},
		{"IRD not raised for a Write", func(c *Config) { p2p(write)(c); depths(0, 0)(c) }, depths(0, 0), -1, -1,
			func(p *Params) { p.RTR, p.IRD, p.ORD = RTRWrite, 0, 0 }, func(p *Params) { p.RTR, p.IRD, p.ORD = RTRWrite, 0, 0 }},
		{"responder's wish for peer to peer changes nothing", same, p2p(AllRTRs), -1, -1, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i, r := connect(t, with(tt.ic), with(tt.rc), tt.ird, tt.ord)
			wi, wr := base, base
			wi.Initiator = true
			if tt.i != nil {
				tt.i(&wi)
			}
			if tt.r != nil {
				tt.r(&wr)
			}
			if i != wi {
				t.Errorf("initiator %+v\nwant      %+v", i, wi)
			}
			if r != wr {
				t.Errorf("responder %+v\nwant      %+v", r, wr)
			}
			if !wi.Enhanced {
				return
			}
			if i.ORD > r.IRD || r.ORD > i.IRD { // RFC 6581 section 9.1
				t.Errorf("initiator has IRD %d, ORD %d, responder IRD %d, ORD %d", i.IRD, i.ORD, r.IRD, r.ORD)
			}
		})
	}
}

// replyTo returns the responder's answer to the Request req.
func replyTo(t *testing.T, cfg Config, req Frame, answer func(s *Startup) error) Frame {
	t.Helper()
	b, err := req.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	s := NewResponder(cfg, t0)
	give(t, s, b)
	event(t, s, EventRequest)
	if err := answer(s); err != nil {
		t.Fatal(err)
	}
	out := frameOf(t, s)
	f, n, err := Decode(out)
	if err != nil || n != len(out) {
		t.Fatalf("the reply %x: %v", out, err)
	}
	if out[16]&0x0f != 0 {
		t.Errorf("the reply has reserved flags: %x", out)
	}
	return f
}

func accept(s *Startup) error { return s.Accept([]byte("yes"), -1, -1) }
func reject(s *Startup) error { return s.Reject([]byte("no")) }

func hexOf(s string) string { return hex.EncodeToString([]byte(s)) }

// checkFailed checks that s has ended with an error.
func checkFailed(t *testing.T, s *Startup, err, cause error, violation *term.Error, terminate bool, retry Retry) {
	t.Helper()
	ev := event(t, s, EventFailed)
	if err != nil && err != error(ev.Err) {
		t.Errorf("HandleStream returned %v, the event has %v", err, ev.Err)
	}
	if ev.Err.Cause != cause || ev.Err.Term != violation || ev.Err.Terminate != terminate || ev.Err.Retry != retry {
		t.Errorf("failed with %+v; want cause %v, violation %v, Terminate %v, %v", ev.Err, cause, violation, terminate, retry)
	}
	if !errors.Is(ev.Err, cause) || violation != nil && !errors.Is(ev.Err, violation) {
		t.Errorf("errors.Is does not find cause and violation in %v", ev.Err)
	}
	if s.Deadline() != 0 {
		t.Error("a timer still runs")
	}
	if n, err := s.HandleStream(t0, []byte("more")); n != 0 || err != nil {
		t.Errorf("HandleStream after the end: %d, %v", n, err)
	}
	s.HandleClosed()
	s.HandleTimeout(t0 + 1<<60)
	if ev, ok := s.PollEvent(); ok {
		t.Errorf("another event: %+v", ev)
	}
}

// TestStartupSplit sends both frames with the largest private data, split at every byte.
func TestStartupSplit(t *testing.T) {
	pd := bytes.Repeat([]byte{0xa5, 1, 2}, 200)
	for _, enhanced := range []bool{true, false} {
		max := 512
		if enhanced {
			max = 508
		}
		cfg := with(func(c *Config) { c.Enhanced = enhanced })
		for step := 1; step <= 540; step += 1 + step/4 {
			ic := cfg
			ic.PrivateData = pd[:max]
			i, r := NewInitiator(ic, t0), NewResponder(cfg, t0)
			feed := func(s *Startup, b []byte) {
				for len(b) > 0 {
					if _, ok := s.PollEvent(); ok {
						t.Fatal("an event before the frame is complete")
					}
					n := min(step, len(b))
					give(t, s, b[:n])
					b = b[n:]
				}
			}
			feed(r, frameOf(t, i))
			if ev := event(t, r, EventRequest); !bytes.Equal(ev.Frame.PrivateData, pd[:max]) {
				t.Fatal("the request's private data is wrong")
			}
			if err := r.Accept(pd[1:max+1], -1, -1); err != nil {
				t.Fatal(err)
			}
			event(t, r, EventAccepted)
			feed(i, frameOf(t, r))
			if ev := event(t, i, EventAccepted); !bytes.Equal(ev.Frame.PrivateData, pd[1:max+1]) {
				t.Fatal("the reply's private data is wrong")
			}
		}
	}
}

// TestStartupConsumes checks that bytes of Full Operation are not consumed.
func TestStartupConsumes(t *testing.T) {
	i, r := NewInitiator(DefaultConfig(), t0), NewResponder(DefaultConfig(), t0)
	give(t, r, frameOf(t, i))
	event(t, r, EventRequest)
	if err := r.Accept(nil, -1, -1); err != nil {
		t.Fatal(err)
	}
	give(t, i, frameOf(t, r))
	event(t, i, EventAccepted)
	event(t, r, EventAccepted)
	for _, s := range []*Startup{i, r} {
		if n, err := s.HandleStream(t0, []byte("FPDU")); n != 0 || err != nil {
			t.Errorf("HandleStream in Full Operation: %d, %v", n, err)
		}
	}

	// Nor are those that come with the Reply.
	i, r = NewInitiator(DefaultConfig(), t0), NewResponder(DefaultConfig(), t0)
	give(t, r, frameOf(t, i))
	if err := r.Accept(nil, -1, -1); err != nil {
		t.Fatal(err)
	}
	reply := frameOf(t, r)
	if n, err := i.HandleStream(t0, append(bytes.Clone(reply), "FPDU"...)); n != len(reply) || err != nil {
		t.Errorf("HandleStream of a Reply of %d bytes and an FPDU: %d, %v", len(reply), n, err)
	}

	// The initiator may send nothing before it has the Reply.
	i, r = NewInitiator(DefaultConfig(), t0), NewResponder(DefaultConfig(), t0)
	give(t, r, frameOf(t, i))
	event(t, r, EventRequest)
	n, err := r.HandleStream(t0, []byte("FPDU"))
	if n != 0 || err == nil {
		t.Errorf("HandleStream before the reply: %d, %v", n, err)
	}
	checkFailed(t, r, err, ErrTrailing, term.ErrMPAFrame, false, RetryNone)
	if err := r.Accept(nil, -1, -1); err != ErrState {
		t.Errorf("Accept after the failure: %v", err)
	}
}

func TestStartupTimers(t *testing.T) {
	const d = 700 * time.Millisecond
	for _, tt := range []struct {
		name  string
		s     func() *Startup
		after time.Duration
		cause error
		viol  *term.Error
	}{
		{"responder", func() *Startup { return NewResponder(DefaultConfig(), t0) }, RequestTimeout, ErrTimeout, term.ErrMPAClosed},
		{"initiator", func() *Startup { return NewInitiator(DefaultConfig(), t0) }, ReplyTimeout, ErrTimeout, term.ErrMPAClosed},
		{"responder, set", func() *Startup { return NewResponder(with(func(c *Config) { c.Timeout = d }), t0) }, d, ErrTimeout, term.ErrMPAClosed},
		{"initiator, set", func() *Startup { return NewInitiator(with(func(c *Config) { c.Timeout = d }), t0) }, d, ErrTimeout, term.ErrMPAClosed},
		{"a partial frame does not wind the timer up", func() *Startup {
			s := NewResponder(DefaultConfig(), t0)
			s.HandleStream(t0+1000, []byte("MPA ID"))
			return s
		}, RequestTimeout, ErrTimeout, term.ErrMPAClosed},
		{"ULP", func() *Startup { return waiting(t, DefaultConfig()) }, DecisionTimeout, ErrDecision, nil},
		{"ULP, set", func() *Startup { return waiting(t, with(func(c *Config) { c.Decision = d })) }, d, ErrDecision, nil},
		{"none", func() *Startup { return NewInitiator(with(func(c *Config) { c.Timeout = -1 }), t0) }, 0, nil, nil},
		{"none for the ULP", func() *Startup { return waiting(t, with(func(c *Config) { c.Decision = -1 })) }, 0, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := tt.s()
			if tt.after == 0 {
				if s.Deadline() != 0 {
					t.Errorf("deadline after %v", s.Deadline().Sub(t0))
				}
				return
			}
			if got := s.Deadline().Sub(t0); got != tt.after {
				t.Errorf("deadline after %v; want %v", got, tt.after)
			}
			s.HandleTimeout(s.Deadline() - 1)
			if ev, ok := s.PollEvent(); ok {
				t.Fatalf("event %+v before the deadline", ev)
			}
			s.HandleTimeout(s.Deadline())
			checkFailed(t, s, nil, tt.cause, tt.viol, false, RetryNone)
		})
	}
}

// waiting returns a responder that waits for its ULP.
func waiting(t *testing.T, cfg Config) *Startup {
	t.Helper()
	s := NewResponder(cfg, t0)
	give(t, s, testenv.Unhex(t, hexReq+"5002000400010001"))
	event(t, s, EventRequest)
	return s
}

func TestStartupClosed(t *testing.T) {
	part := testenv.Unhex(t, hexRep)
	for _, tt := range []struct {
		name  string
		s     *Startup
		feed  []byte
		retry Retry
	}{
		{"enhanced initiator, no reply", NewInitiator(DefaultConfig(), t0), nil, RetryRev1},
		{"enhanced initiator, part of a reply", NewInitiator(DefaultConfig(), t0), part, RetryNone},
		{"no retry wanted", NewInitiator(with(func(c *Config) { c.RetryRev1 = false }), t0), nil, RetryNone},
		{"initiator of revision 1", NewInitiator(RetryRev1.Apply(DefaultConfig()), t0), nil, RetryNone},
		{"responder", NewResponder(DefaultConfig(), t0), nil, RetryNone},
		{"responder, ULP undecided", waiting(t, DefaultConfig()), nil, RetryNone},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.s.PollTransmit()
			give(t, tt.s, tt.feed)
			tt.s.HandleClosed()
			checkFailed(t, tt.s, nil, ErrClosed, term.ErrMPAClosed, false, tt.retry)
		})
	}
}

func TestConfigValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		err    error
	}{
		{"default", same, nil},
		{"revision 0", func(c *Config) { c.Rev, c.Enhanced = 0, false }, ErrConfig},
		{"revision 3", func(c *Config) { c.Rev = 3 }, ErrConfig},
		{"enhanced with revision 1", func(c *Config) { c.Rev = 1 }, ErrConfig},
		{"peer to peer without enhanced", func(c *Config) { c.Enhanced, c.P2P = false, true }, ErrConfig},
		{"unknown RTR", func(c *Config) { c.RTR = 8 }, ErrConfig},
		{"negative IRD", func(c *Config) { c.IRD = -1 }, ErrDepth},
		{"ORD of 0x3fff", func(c *Config) { c.ORD = 0x3fff }, ErrDepth},
		{"MaxIRD of 0x3fff", func(c *Config) { c.MaxIRD = 0x3fff }, ErrDepth},
		{"508 bytes, enhanced", func(c *Config) { c.PrivateData = make([]byte, 508) }, nil},
		{"509 bytes, enhanced", func(c *Config) { c.PrivateData = make([]byte, 509) }, ErrPrivateData},
		{"512 bytes", func(c *Config) { c.Enhanced, c.PrivateData = false, make([]byte, 512) }, nil},
		{"513 bytes", func(c *Config) { c.Enhanced, c.PrivateData = false, make([]byte, 513) }, ErrPrivateData},
	} {
		c := with(tt.change)
		if err := c.Validate(); !errors.Is(err, tt.err) {
			t.Errorf("%s: %v; want %v", tt.name, err, tt.err)
		}
		for _, s := range []*Startup{NewInitiator(c, t0), NewResponder(c, t0)} {
			ev, ok := s.PollEvent()
			if (tt.err != nil) != (ok && ev.Kind == EventFailed && errors.Is(ev.Err, tt.err)) {
				t.Errorf("%s: event %+v, %v", tt.name, ev, ok)
			}
		}
	}
	if c := DefaultConfig(); !c.CRC {
		t.Error("CRCs are not on by default")
	}
}

func FuzzStartup(f *testing.F) {
	for _, v := range frameVectors {
		b := testenv.Unhex(f, v.wire)
		for _, cfg := range []uint8{0, 1, 2, 5, 0xff} {
			f.Add(b, cfg, uint8(3))
			f.Add(append(b, 1, 2, 3), cfg, uint8(255))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, bits, step uint8) {
		cfg := with(func(c *Config) {
			c.CRC, c.Markers = bits&1 != 0, bits&2 != 0
			c.P2P = bits&4 != 0
			if bits&16 != 0 {
				*c = RetryRev1.Apply(*c)
			}
		})
		for _, s := range []*Startup{NewInitiator(cfg, t0), NewResponder(cfg, t0)} {
			s.PollTransmit()
			taken := 0
			ended := false
			for rest := b; len(rest) > 0; {
				n := min(int(step)+1, len(rest))
				k, err := s.HandleStream(t0, rest[:n])
				if taken += k; k < 0 || k > n || taken > maxFrameLen {
					t.Fatalf("took %d of %d, %d in all", k, n, taken)
				}
				ev, ok := s.PollEvent()
				if (err != nil) != (ok && ev.Kind == EventFailed) {
					t.Fatalf("error %v, event %+v", err, ev)
				}
				if ok && ended {
					t.Fatalf("event %+v after the end", ev)
				}
				if ok && ev.Kind == EventRequest {
					if err := s.Accept(nil, -1, -1); err != nil {
						t.Fatal(err)
					}
					reply, _ := s.PollTransmit()
					if _, n, err := Decode(reply); err != nil || n != len(reply) {
						t.Fatalf("our reply %x: %v", reply, err)
					}
					if p := s.Result(); p.Enhanced && ev.Frame.IRD != NoNegotiation && p.ORD > int(ev.Frame.IRD) {
						t.Fatalf("ORD %d for an IRD of %d", p.ORD, ev.Frame.IRD)
					}
					ev, ok = s.PollEvent()
				}
				ended = ended || ok
				if ended && s.Deadline() != 0 {
					t.Fatal("a timer runs after the end")
				}
				if k < n {
					break
				}
				rest = rest[n:]
			}
		}
	})
}

// TestStartupReject checks a rejection end to end: each ULP gets the other's depths and private data, and the TCP
// connection stays open for them.
func TestStartupReject(t *testing.T) {
	ic := with(func(c *Config) { c.IRD, c.ORD, c.PrivateData = 3, 4, []byte("who is it") })
	i, r := NewInitiator(ic, t0), NewResponder(with(func(c *Config) { c.IRD, c.ORD = 5, 6 }), t0)
	give(t, r, frameOf(t, i))
	if f := event(t, r, EventRequest).Frame; f.IRD != 3 || f.ORD != 4 || string(f.PrivateData) != "who is it" {
		t.Errorf("the responder's ULP sees %+v", f)
	}
	if err := r.Reject([]byte("go away")); err != nil {
		t.Fatal(err)
	}
	ev := event(t, r, EventRejected)
	if ev.Err != nil || ev.Frame.IRD != 3 || r.Deadline() != 0 {
		t.Errorf("responder: %+v, deadline %d", ev, r.Deadline())
	}
	give(t, i, frameOf(t, r))
	ev = event(t, i, EventRejected)
	if f := ev.Frame; f.IRD != 5 || f.ORD != 6 || string(f.PrivateData) != "go away" || !f.Reject {
		t.Errorf("the initiator's ULP sees %+v", f)
	}
	if p := i.peer; !sameFrame(p, ev.Frame) {
		t.Errorf("Peer is %+v", p)
	}
	for _, s := range []*Startup{i, r} {
		if n, err := s.HandleStream(t0, []byte("the ULPs' own protocol")); n != 0 || err != nil {
			t.Errorf("HandleStream after a rejection: %d, %v", n, err)
		}
		s.HandleClosed()
		if ev, ok := s.PollEvent(); ok {
			t.Errorf("event %+v after a rejection", ev)
		}
	}
}
