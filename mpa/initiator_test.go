package mpa

import (
	"bytes"
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestInitiatorErrors(t *testing.T) {
	p2p := func(kinds RTRs) func(*Config) { return func(c *Config) { c.P2P, c.RTR = true, kinds } }
	rev1 := func(c *Config) { c.Rev, c.Enhanced = 1, false }
	noRetry := func(c *Config) { c.RetryRev1, c.RetryNoMarkers = false, false }
	for _, tt := range []struct {
		name      string
		cfg       func(*Config)
		wire      string
		cause     error
		violation *term.Error
		terminate bool
		retry     Retry
	}{
		{"not MPA", same, hexOf("HTTP/1.1 400 Bad Request"), ErrKey, term.ErrMPAFrame, false, RetryNone},
		{"initiator against initiator", same, hexReq + "5002000400100010", ErrBothInitiators, term.ErrMPAFrame, false, RetryNone},
		{"513 bytes of private data", same, hexRep + "50020201", ErrPDLength, term.ErrMPAFrame, false, RetryNone},
		{"S without enhanced data", same, hexRep + "50020000", ErrEnhancedData, term.ErrMPAFrame, false, RetryNone},
		{"revision-1 reply", same, hexRep + "40010000", ErrRevision, term.ErrMPAFrame, false, RetryRev1},
		{"revision-1 reply, rejecting", same, hexRep + "60010000", ErrRevision, term.ErrMPAFrame, false, RetryRev1},
		{"revision-1 reply, no retry wanted", noRetry, hexRep + "40010000", ErrRevision, term.ErrMPAFrame, false, RetryNone},
		{"revision-0 reply", same, hexRep + "c0000000", ErrRevision, term.ErrMPAFrame, false, RetryRev1},
		{"revision-2 reply without S", same, hexRep + "40020000", ErrNotEnhanced, term.ErrMPAFrame, false, RetryRev1},
		{"revision-3 reply", same, hexRep + "5003000400100010", ErrRevision, term.ErrMPAFrame, false, RetryNone},
		{"revision-2 reply to revision 1", rev1, hexRep + "40020000", ErrRevision, term.ErrMPAFrame, false, RetryNone},
		{"revision-0 reply to revision 1", rev1, hexRep + "c0000000", ErrRevision, term.ErrMPAFrame, false, RetryNone},
		{"S in a reply to a request without", func(c *Config) { c.Enhanced = false }, hexRep + "5002000400100010", ErrNotEnhanced, term.ErrMPAFrame, false, RetryRev1},
		{"responder's ORD beyond our IRD", same, hexRep + "5002000400100081", ErrIRD, term.ErrMPAIRD, true, RetryNone},
		{"responder's ORD of 0x3ffe", same, hexRep + "5002000400103ffe", ErrIRD, term.ErrMPAIRD, true, RetryNone},
		{"IRD cannot be raised", func(c *Config) { c.MaxIRD = 0 }, hexRep + "5002000400100011", ErrIRD, term.ErrMPAIRD, true, RetryNone},
		{"RTR of a kind that we do not send", p2p(RTRs(RTRSend)), hexRep + "5002000480108010", ErrRTR, term.ErrMPARTR, true, RetryNone},
		{"RTR of no kind", p2p(AllRTRs), hexRep + "5002000480100010", ErrRTR, term.ErrMPARTR, true, RetryNone},
		{"peer to peer not echoed", p2p(AllRTRs), hexRep + "500200044010c010", ErrRTR, term.ErrMPARTR, true, RetryNone},
		{"Read as RTR with an IRD of 0", p2p(RTRs(RTRRead)), hexRep + "5002000480004010", ErrRTR, term.ErrMPARTR, true, RetryNone},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewInitiator(with(tt.cfg), t0)
			frameOf(t, s)
			_, err := s.HandleStream(t0, testenv.Unhex(t, tt.wire))
			if err == nil {
				t.Error("HandleStream returned no error")
			}
			checkFailed(t, s, err, tt.cause, tt.violation, tt.terminate, tt.retry)
			if tt.terminate {
				if p := s.Result(); !p.CRC || !p.Initiator || p.Rev != 2 {
					t.Errorf("params for the Terminate: %+v", p)
				}
			}
		})
	}
}

// TestInitiatorReply checks Replies that must be accepted.
func TestInitiatorReply(t *testing.T) {
	base := Params{CRC: true, Rev: 2, Enhanced: true, IRD: 16, ORD: 16, Initiator: true}
	for _, tt := range []struct {
		name   string
		cfg    func(*Config)
		wire   string
		params func(*Params)
	}{
		{"reserved flags", same, hexRep + "5f02000400100010", nil},
		{"CRCs are on if one side wants them: we do", same, hexRep + "1002000400100010", nil},
		{"CRCs are on if one side wants them: the peer does", func(c *Config) { c.CRC = false }, hexRep + "5002000400100010", nil},
		{"IRD raised to the responder's ORD", same, hexRep + "5002000400100080", func(p *Params) { p.IRD = 128 }},
		{"IRD not lowered to the responder's ORD", same, hexRep + "5002000400100001", nil},
		{"ORD lowered to 0", same, hexRep + "5002000400000000", func(p *Params) { p.ORD = 0 }},
		{"responder's IRD is higher", same, hexRep + "5002000401000010", nil},
		{"0x3fff for both", same, hexRep + "500200043fff3fff", nil},
		{"A without having been asked for", same, hexRep + "500200048010c010", nil},
		{"all kinds of RTR", func(c *Config) { c.P2P = true }, hexRep + "50020004c010c010", func(p *Params) { p.RTR = RTRWrite }},
		{"no kinds in the Config are all", func(c *Config) { c.P2P, c.RTR = true, 0 }, hexRep + "5002000480104010", func(p *Params) { p.RTR = RTRRead }},
		{"kinds that we did not offer beside one that we did", func(c *Config) { c.P2P, c.RTR = true, RTRs(RTRSend) },
			hexRep + "50020004c010c010", func(p *Params) { p.RTR = RTRSend }},
		{"no Read to an IRD of 0", func(c *Config) { c.P2P, c.RTR = true, RTRs(RTRSend|RTRRead) },
			hexRep + "50020004c0004010", func(p *Params) { p.RTR, p.ORD = RTRSend, 0 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewInitiator(with(tt.cfg), t0)
			frameOf(t, s)
			give(t, s, testenv.Unhex(t, tt.wire))
			event(t, s, EventAccepted)
			want := base
			if tt.params != nil {
				tt.params(&want)
			}
			if got := s.Result(); got != want {
				t.Errorf("params %+v\nwant   %+v", got, want)
			}
		})
	}
}

// TestInitiatorOffersAll checks that an empty set of RTRs in the Config offers all of them.
func TestInitiatorOffersAll(t *testing.T) {
	s := NewInitiator(with(func(c *Config) { c.P2P, c.RTR = true, 0 }), t0)
	if f, _, err := Decode(frameOf(t, s)); err != nil || !f.P2P || f.RTR != AllRTRs {
		t.Errorf("Request %+v, %v; want every kind of RTR", f, err)
	}
}

// TestInitiatorRejected checks that a rejection leaves the TCP connection and its following bytes to the ULP.
func TestInitiatorRejected(t *testing.T) {
	markers := func(c *Config) { c.Markers = true }
	for _, tt := range []struct {
		name  string
		cfg   func(*Config)
		wire  string
		retry Retry
		pd    string
		ird   uint16
		ord   uint16
	}{
		{"with private data", same, hexRep + "7002000600070009" + "6e6f", RetryNone, "no", 7, 9},
		{"bare, no markers asked for", same, hexRep + "7002000400000000", RetryNone, "", 0, 0},
		{"bare after M: soft-iWARP", markers, hexRep + "7002000400000000", RetryNoMarkers, "", 0, 0},
		{"bare after M, revision 1", func(c *Config) { markers(c); c.Rev, c.Enhanced = 1, false }, hexRep + "60010000", RetryNoMarkers, "", 0, 0},
		{"bare after M, no retry wanted", func(c *Config) { markers(c); c.RetryNoMarkers = false }, hexRep + "7002000400000000", RetryNone, "", 0, 0},
		{"by the ULP, after M", markers, hexRep + "7002000400010001", RetryNone, "", 1, 1},
		{"by the ULP, with private data, after M", markers, hexRep + "7002000600000000" + "6e6f", RetryNone, "no", 0, 0},
		{"without S", same, hexRep + "60020002" + "6e6f", RetryNone, "no", 0, 0},
		{"bare and without S after M", markers, hexRep + "60020000", RetryNoMarkers, "", 0, 0},
		{"depths that would be an error in an accepting reply", same, hexRep + "7002000400003ffe", RetryNone, "", 0, 0x3ffe},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewInitiator(with(tt.cfg), t0)
			frameOf(t, s)
			wire := testenv.Unhex(t, tt.wire)
			n, err := s.HandleStream(t0, append(bytes.Clone(wire), "more"...))
			if n != len(wire) || err != nil {
				t.Fatalf("HandleStream took %d of %d bytes, %v", n, len(wire), err)
			}
			ev := event(t, s, EventRejected)
			if ev.Err.Retry != tt.retry || !errors.Is(ev.Err, ErrRejected) || ev.Err.Term != nil {
				t.Errorf("rejected with %+v; want %v", ev.Err, tt.retry)
			}
			if f := ev.Frame; string(f.PrivateData) != tt.pd || f.IRD != tt.ird || f.ORD != tt.ord {
				t.Errorf("reply %+v", f)
			}
			if s.Deadline() != 0 {
				t.Error("a timer still runs")
			}
			if n, err := s.HandleStream(t0, []byte("more")); n != 0 || err != nil {
				t.Errorf("HandleStream after the end: %d, %v", n, err)
			}
		})
	}
}

// TestStartupFallback checks that a peer that supports neither enhanced setup nor markers is reached in the end.
func TestStartupFallback(t *testing.T) {
	cfg := with(func(c *Config) { c.Markers, c.P2P = true, true })
	old := with(func(c *Config) { c.Rev, c.Enhanced = 1, false })
	var advice []Retry
	for range 4 {
		i, r := NewInitiator(cfg, t0), NewResponder(old, t0)
		if _, err := r.HandleStream(t0, frameOf(t, i)); err != nil {
			i.HandleClosed() // the responder closes without a Reply
		} else if event(t, r, EventRequest).Frame.Markers {
			if err := r.Reject(nil); err != nil {
				t.Fatal(err)
			}
			give(t, i, frameOf(t, r))
		} else {
			if err := r.Accept(nil, -1, -1); err != nil {
				t.Fatal(err)
			}
			give(t, i, frameOf(t, r))
		}
		ev, ok := i.PollEvent()
		if !ok {
			t.Fatal("no event")
		}
		if ev.Kind == EventAccepted {
			break
		}
		advice = append(advice, ev.Err.Retry)
		cfg = ev.Err.Retry.Apply(cfg)
	}
	if len(advice) != 2 || advice[0] != RetryRev1 || advice[1] != RetryNoMarkers {
		t.Errorf("advice %v", advice)
	}
	if cfg.Rev != 1 || cfg.Enhanced || cfg.P2P || cfg.Markers || !cfg.CRC || cfg.Validate() != nil {
		t.Errorf("settings in the end: %+v", cfg)
	}
	if c := RetryNone.Apply(DefaultConfig()); c.Rev != 2 || !c.Enhanced {
		t.Errorf("RetryNone changes the settings")
	}
}

// TestInitiatorEarlyFPDU checks that HandleStream takes an accepting Reply and no byte more: the bytes after it are
// FPDUs, even in the same read.
func TestInitiatorEarlyFPDU(t *testing.T) {
	reply, fpdu := testenv.Unhex(t, hexRep+"5002000400100010"), []byte{0, 2, 1, 2, 0, 0, 0, 0}
	for cut := 1; cut <= len(reply)+len(fpdu); cut++ {
		s := NewInitiator(DefaultConfig(), t0)
		frameOf(t, s)
		b := append(bytes.Clone(reply), fpdu...)
		took := 0
		for _, p := range [][]byte{b[:cut], b[cut:]} {
			n, err := s.HandleStream(t0, p)
			if err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			took += n
		}
		event(t, s, EventAccepted)
		if took != len(reply) {
			t.Errorf("cut at %d: took %d bytes, want the %d of the Reply", cut, took, len(reply))
		}
	}
}
