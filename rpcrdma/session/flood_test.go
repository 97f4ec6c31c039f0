package session

import (
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestFlood checks that a peer that exceeds its credits is disconnected.
func TestFlood(t *testing.T) {
	p := serverPeer(t, func(c *Config) { c.Window = 4 })
	for i := range uint32(20) {
		p.send(wire.Header{XID: 50 + i, Type: wire.CallInline}, callBody(50+i, 40)...)
	}
	calls := 0
	for _, e := range p.evs {
		if e.Kind == EventCall {
			calls++
		}
	}
	last := p.evs[len(p.evs)-1]
	if calls > 6 || last.Kind != EventClose || !errors.Is(last.Err, ErrProtocol) {
		t.Errorf("%d calls, then %+v", calls, last)
	}
}

// TestErrorFlood checks that a peer that sends only messages that must be answered by errors, and grants no credits
// for them, uses bounded memory.
func TestErrorFlood(t *testing.T) {
	for _, c := range []struct {
		name  string
		first *wire.Header
		flood wire.Header
	}{
		{"unknown versions before the first message", nil, wire.Header{XID: 5, Vers: 7, Type: wire.CallInline}},
		{"unknown versions", &wire.Header{Type: wire.ConnPropFinal, Vers: 2, Credit: 2}, wire.Header{XID: 5, Vers: 7, Type: wire.CallInline}},
		{"version 1 on a connection of version 2", &wire.Header{Type: wire.ConnPropFinal, Vers: 2, Credit: 2}, wire.Header{XID: 5, Vers: 1, Type: wire.Msg1}},
		{"version 2 on a connection of version 1", &wire.Header{XID: 4, Type: wire.Done1, Vers: 1, Credit: 2}, wire.Header{XID: 5, Vers: 2, Type: wire.Grant}},
	} {
		cfg := DefaultConfig(true)
		cfg.Window = 4
		s := New(cfg)
		var o Out
		if c.first != nil {
			s.HandleMessage(append(c.first.Append(nil), make([]byte, 16)...))
		}
		b := append(c.flood.Append(nil), make([]byte, 16)...)
		var last Event
		for range 1000 {
			s.HandleMessage(b)
			for e, ok := s.PollEvent(); ok; e, ok = s.PollEvent() {
				last = e
			}
			if s.Version() != 1 { // version 1 has no credits for errors; there the Sends in flight are the bound
				for s.PollTransmit(&o) {
				}
			}
		}
		if last.Kind != EventClose || !errors.Is(last.Err, ErrProtocol) || len(s.ctrl) > 100 {
			t.Errorf("%s: %+v, %d queued", c.name, last, len(s.ctrl))
		}
	}
}

// TestReplyFlood checks that a peer that keeps calling and reads no reply uses bounded memory, and that one that
// reads them can continue forever.
func TestReplyFlood(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  int
		vers  uint32
		takes bool
	}{
		{"many", 100, 2, false}, {"long", 25_000, 2, false}, {"version 1", 100, 1, false}, {"takes them", 100, 2, true}, {"takes them, version 1", 100, 1, true},
	} {
		s := New(DefaultConfig(true))
		var o Out
		var last Event
		queued, most, size := 0, 0, 0
		for i := range uint32(5000) {
			h := wire.Header{XID: i + 1, Vers: c.vers, Credit: 2, Type: wire.CallInline}
			if c.vers == 1 {
				h.Type = wire.Msg1
			}
			if c.takes {
				h.Credit = i + 100
			}
			s.HandleMessage(append(h.Append(nil), callBody(i+1, 40)...))
			for e, ok := s.PollEvent(); ok; e, ok = s.PollEvent() {
				last = e
				if e.Kind == EventCall {
					p, _, ok := s.PlanReply(e.Call, c.size, nil)
					if !ok {
						t.Fatalf("%s: no plan", c.name)
					}
					s.Reply(e.Call, p, replyBody(i+1, c.size))
				}
			}
			if c.vers == 2 || c.takes { // in version 1 the Sends in flight are the bound: none completes
				for s.PollTransmit(&o) {
				}
			}
			queued, size = len(s.queue), 0
			for _, m := range s.queue {
				if m.pieces {
					size += len(m.body)
				}
			}
			if most = max(most, queued); queued != s.replies.n || size != s.replies.bytes {
				t.Fatalf("%s: %d replies with %d bytes, counted %+v", c.name, queued, size, s.replies)
			}
			if last.Kind == EventClose {
				break
			}
		}
		if closed := last.Kind == EventClose; closed == c.takes || most > maxReplies || c.takes && most > 2 {
			t.Errorf("%s: %+v after %d replies waited", c.name, last, most)
		}
	}
}

// TestLongCalls checks that the continued calls of a peer that waits for no reply need bounded memory, and that the peer gets
// credits for more when they have ended.
func TestLongCalls(t *testing.T) {
	cfg := DefaultConfig(true)
	p := newPeer(t, cfg)
	p.send(wire.Header{Type: wire.ConnPropFinal})
	const piece = 4000
	long, edge, xid, off := cfg.Limits.Message, uint32(0), uint32(100), 0
	for round := range 3 {
		var calls []*Call
		for {
			for _, h := range p.got {
				edge = h.Credit
			}
			for _, e := range p.evs {
				if e.Kind == EventCall {
					calls = append(calls, e.Call)
				}
			}
			p.clear()
			if edge == p.sent {
				break
			}
			n := min(piece, long-off)
			h := wire.Header{XID: xid, Type: wire.CallMiddle, Remaining: uint32(long - off - n), Credit: 1 << 20}
			if h.Remaining == 0 {
				h.Type = wire.CallInline
			}
			p.send(h, callBody(xid, long)[off:off+n]...)
			if off += n; off == long {
				xid, off = xid+1, 0
			}
		}
		if len(calls) < 2 || len(calls) > 5 {
			t.Errorf("round %d: %d calls of %d bytes in progress", round, len(calls), long)
		}
		for _, c := range calls {
			p.s.Drop(c)
		}
		p.drain()
	}
	if p.s.busy != 0 {
		t.Errorf("%d credits are held", p.s.busy)
	}
}
