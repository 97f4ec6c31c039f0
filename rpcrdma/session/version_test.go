package session

import (
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestVersions checks version negotiation (draft sections 4.3 and 7.1.1).
func TestVersions(t *testing.T) {
	t.Run("a server of version 1 alone", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.Version = 1
		p := newPeer(t, cfg)
		p.send(wire.Header{XID: 4, Type: wire.ConnPropFinal})
		if len(p.got) != 1 || p.got[0].Failure != (wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}) || p.got[0].Vers != 2 || p.got[0].XID != 4 {
			t.Errorf("%+v", p.got)
		}
	})
	for _, v := range []uint32{0, 3, 1 << 31} {
		p := newPeer(t, DefaultConfig(true))
		b := append((&wire.Header{XID: 4, Vers: v, Credit: 1, Type: wire.CallInline}).Append(nil), callBody(4, 40)...)
		p.raw(b)
		if len(p.got) != 1 || p.got[0].Vers != v || p.got[0].Type != wire.Error || p.s.Version() != 0 {
			t.Errorf("version %d: %+v", v, p.got)
		}
	}
	t.Run("a server without version 1", func(t *testing.T) {
		cfg := DefaultConfig(true)
		cfg.MinVersion = 2
		p := newPeer(t, cfg)
		p.send(wire.Header{XID: 4, Vers: 1, Type: wire.Msg1}, callBody(4, 40)...)
		if len(p.got) != 1 || p.got[0].Failure != (wire.Failure{Code: wire.ErrVers, Low: 2, High: 2}) || p.got[0].Vers != 1 {
			t.Errorf("%+v", p.got)
		}
	})
	t.Run("the first message has room for a server of version 1", func(t *testing.T) {
		p := newPeer(t, DefaultConfig(false))
		if len(p.got) != 1 || p.got[0].Len() > firstLimit || p.got[0].Vers != 2 {
			t.Errorf("%+v", p.got)
		}
	})
	for _, vers := range []uint32{1, 2} { // Linux's server copies the version of the request
		p := newPeer(t, DefaultConfig(false))
		p.send(wire.Header{Vers: vers, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}})
		if p.s.Version() != 1 || !p.s.ready {
			t.Fatalf("fallback: %+v", p.evs)
		}
		p.call(8, callBody(8, 40), &CallChunks{})
		p.drain()
		if h := p.got[len(p.got)-1]; h.Vers != 1 || h.Type != wire.Msg1 {
			t.Errorf("%+v", h)
		}
	}
	for _, f := range []wire.Failure{{Code: wire.ErrVers, Low: 3, High: 4}, {Code: wire.ErrVers}, {Code: wire.ErrVers, Low: 5, High: 1}} {
		p := newPeer(t, DefaultConfig(false))
		p.send(wire.Header{Type: wire.Error, Failure: f})
		if len(p.evs) != 1 || p.evs[0].Kind != EventClose || !errors.Is(p.evs[0].Err, ErrVersion) {
			t.Errorf("%+v: %+v", f, p.evs)
		}
	}
	t.Run("version 1 after version 1", func(t *testing.T) {
		p := newPeer(t, DefaultConfig(true))
		p.send(wire.Header{XID: 4, Vers: 1, Type: wire.Msg1}, callBody(4, 40)...)
		p.clear()
		p.send(wire.Header{XID: 5, Vers: 2, Type: wire.CallInline}, callBody(5, 40)...)
		if len(p.got) != 1 || p.got[0].Failure != (wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}) || p.got[0].Vers != 2 {
			t.Errorf("%+v", p.got)
		}
	})
}

// TestVersion1Errors checks that version 1 answers with ERR_CHUNK or not at all (RFC 8166 sections 4.5, 4.6).
func TestVersion1Errors(t *testing.T) {
	for _, c := range []struct {
		name   string
		h      wire.Header
		body   []byte
		silent bool
	}{
		{"RDMA_MSGP", wire.Header{Type: wire.MsgP1}, callBody(9, 40), false},
		{"RDMA_DONE", wire.Header{Type: wire.Done1}, callBody(9, 40), true},
		{"a list that begins with 2", wire.Header{Type: wire.Done1 + 99}, append([]byte{0, 0, 0, 2}, callBody(9, 40)...), false}, // changed below
		{"procedure 5", wire.Header{Type: 5}, make([]byte, 40), false},
		{"an error", wire.Header{Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrChunk1}}, nil, true},
		{"another XID", wire.Header{Type: wire.Msg1}, callBody(8, 40), false},
		{"neither a call nor a reply", wire.Header{Type: wire.Msg1}, append([]byte{0, 0, 0, 9, 0, 0, 0, 2}, make([]byte, 32)...), false},
		{"RDMA_NOMSG with nothing", wire.Header{Type: wire.NoMsg1}, nil, false},
		{"position 0 in RDMA_MSG", wire.Header{Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(0, 1, 40)}}, callBody(9, 40), false},
		{"a position of 5", wire.Header{Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(5, 1, 40)}}, callBody(9, 40), false},
		{"positions that fall", wire.Header{Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(16, 1, 40), rseg(12, 1, 4)}}, callBody(9, 40), false},
		{"a Read chunk of 4 GiB", wire.Header{Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(16, 1, 1<<32-1)}}, callBody(9, 40), false},
		{"too many segments", wire.Header{Type: wire.Msg1, Reply: chunk(1, 1, 1, 1)}, callBody(9, 40), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := DefaultConfig(true)
			cfg.Limits = Limits{Message: 4096, ReadChunks: 2, WriteChunks: 2, Segments: 3, Chunk: 10000}
			p := newPeer(t, cfg)
			p.send(wire.Header{XID: 1, Vers: 1, Type: wire.Msg1}, callBody(1, 40)...)
			p.clear()
			c.h.XID, c.h.Vers = 9, 1
			b := append(c.h.Append(nil), c.body...)
			if c.h.Type == wire.Done1+99 {
				b[15] = byte(wire.Msg1)
			}
			p.raw(b)
			if c.silent {
				if len(p.got) > 0 {
					t.Errorf("%+v", p.got)
				}
			} else if len(p.got) != 1 || p.got[0].Type != wire.Error1 || p.got[0].Failure.Code != wire.ErrChunk1 || p.got[0].XID != 9 || p.got[0].Vers != 1 {
				t.Errorf("%+v", p.got)
			}
			if len(p.evs) > 0 {
				t.Errorf("%+v", p.evs)
			}
		})
	}
}

// TestLateVersionError checks that a late error that says that the peer does not support our version ends the call
// and the connection.
func TestLateVersionError(t *testing.T) {
	p := clientPeer(t, nil)
	p.call(9, callBody(9, 40), &CallChunks{})
	p.drain()
	p.send(wire.Header{XID: 9, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}})
	if len(p.evs) != 2 || p.evs[0].Kind != EventFailure || p.evs[1].Kind != EventClose {
		t.Errorf("%+v", p.evs)
	}
}

// TestVersion1Credits checks that one call is outstanding until the first reply, then as many as were granted; a
// grant of zero counts as one (RFC 8166 section 3.3).
func TestVersion1Credits(t *testing.T) {
	cfg := DefaultConfig(false)
	cfg.Version = 1
	p := newPeer(t, cfg)
	for xid := range uint32(20) {
		p.call(100+xid, callBody(100+xid, 40), &CallChunks{})
	}
	p.drain()
	if len(p.got) != 1 {
		t.Errorf("%d calls before the first reply", len(p.got))
	}
	next := uint32(0) // to be answered
	for _, c := range []struct{ grant, flying uint32 }{{5, 5}, {3, 4}, {3, 3}, {3, 3}, {7, 7}} {
		p.send(wire.Header{XID: 100 + next, Vers: 1, Type: wire.Msg1, Credit: c.grant}, replyBody(100+next, 40)...)
		next++
		if got := uint32(len(p.got)) - next; got != c.flying {
			t.Errorf("after a grant of %d: %d outstanding, not %d", c.grant, got, c.flying)
		}
	}
	// A message that is not a reply grants nothing (RFC 8167 section 4.1).
	sent := len(p.got)
	for _, h := range []wire.Header{
		{XID: 9, Type: wire.Done1}, {XID: 9, Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrChunk1}}, {XID: 9, Type: wire.Msg1}, {XID: 9, Type: wire.MsgP1},
	} {
		h.Vers, h.Credit = 1, 19
		p.send(h, callBody(9, 40)...)
	}
	if len(p.got) != sent {
		t.Errorf("%d calls go by credits that are no grant", len(p.got)-sent)
	}
	p.raw(append((&wire.Header{XID: 100 + next, Vers: 1, Type: wire.Msg1}).Append(nil), replyBody(100+next, 40)...))
	if p.s.grant1 != 1 {
		t.Errorf("a grant of zero is taken as %d", p.s.grant1)
	}
	for _, h := range p.got {
		if h.Credit == 0 {
			t.Error("no credits are asked for")
		}
	}
	s := newPeer(t, DefaultConfig(true))
	s.send(wire.Header{XID: 1, Vers: 1, Type: wire.Msg1}, callBody(1, 40)...)
	plan, _, ok := s.s.PlanReply(s.evs[len(s.evs)-1].Call, 40, nil)
	if !ok {
		t.Fatal("no plan")
	}
	s.s.Reply(s.evs[len(s.evs)-1].Call, plan, replyBody(1, 40))
	s.drain()
	if len(s.got) != 1 || s.got[0].Credit != uint32(DefaultConfig(true).Window) {
		t.Errorf("%+v", s.got)
	}
}

// TestVersion1Replies checks how a requester of version 1 handles bad replies.
func TestVersion1Replies(t *testing.T) {
	for _, c := range []struct {
		name string
		h    wire.Header
		body []byte
		over bool // the call
	}{
		{"RDMA_MSGP", wire.Header{Type: wire.MsgP1}, replyBody(9, 40), false},
		{"RDMA_DONE", wire.Header{Type: wire.Done1}, replyBody(9, 40), false},
		{"another XID", wire.Header{Type: wire.Msg1, XID: 10}, replyBody(10, 40), false},
		{"a Read list", wire.Header{Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(8, 1, 4)}}, replyBody(9, 40), true},
		{"a Reply chunk that is used", wire.Header{Type: wire.Msg1, Reply: chunk(4)}, replyBody(9, 40), true},
		{"two Write chunks", wire.Header{Type: wire.Msg1, Writes: []wire.Chunk{chunk(4), chunk(4)}}, replyBody(9, 40), true},
		{"ERR_CHUNK", wire.Header{Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrChunk1}}, nil, true},
		{"ERR_VERS", wire.Header{Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrVers, Low: 2, High: 2}}, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := DefaultConfig(false)
			cfg.Version = 1
			p := newPeer(t, cfg)
			p.call(9, callBody(9, 40), &CallChunks{})
			p.drain()
			p.clear()
			c.h.Vers = 1
			if c.h.XID == 0 {
				c.h.XID = 9
			}
			p.send(c.h, c.body...)
			if (len(p.s.pending) == 0) != c.over || len(p.got) > 0 || c.over != (len(p.evs) == 1) || c.over && p.evs[0].Kind != EventFailure {
				t.Errorf("%+v, sent %+v", p.evs, p.got)
			}
		})
	}
	cfg := DefaultConfig(false)
	cfg.Version = 1
	p := newPeer(t, cfg)
	p.call(9, callBody(9, 40), &CallChunks{})
	p.drain()
	p.raw((&wire.Header{XID: 9, Vers: 1, Type: wire.Error1, Failure: wire.Failure{Code: 77}}).Append(nil))
	if len(p.s.pending) != 1 {
		t.Error("an error that is none ends the call")
	}
}

// TestVersion1Over checks that a reply of any form ends its call without a further message: no RDMA_DONE, RDMA_MSGP
// or error is sent (RFC 8166 sections 4.2.4, 4.6.1 and 4.6.2).
func TestVersion1Over(t *testing.T) {
	cfg := DefaultConfig(false)
	cfg.Version = 1
	p := newPeer(t, cfg)
	for i, h := range []wire.Header{
		{Type: wire.Msg1}, {Type: wire.Msg1, Writes: []wire.Chunk{chunk(30)}, Reply: chunk(0)}, {Type: wire.NoMsg1, Writes: []wire.Chunk{chunk(0)}, Reply: chunk(40)},
		{Type: wire.NoMsg1, Reply: chunk(7)}, {Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrChunk1}},
	} {
		xid := uint32(i + 9)
		p.call(xid, callBody(xid, 40), &CallChunks{Writes: []wire.Chunk{chunk(30)}, Reply: chunk(50)})
		p.drain()
		if len(p.got) != 1 || p.got[0].Type != wire.Msg1 || p.got[0].Vers != 1 {
			t.Errorf("%+v", p.got)
		}
		p.clear()
		h.XID, h.Vers = xid, 1
		var body []byte
		if h.Type == wire.Msg1 {
			body = replyBody(xid, 40)
		}
		p.send(h, body...)
		if len(p.got) != 0 || len(p.evs) != 1 || len(p.s.pending) != 0 {
			t.Errorf("%+v: sent %+v, %+v", h, p.got, p.evs)
		}
		p.clear()
	}
	// A reply that cannot be parsed ends its call and is not answered.
	p.call(99, callBody(99, 40), &CallChunks{})
	p.drain()
	p.clear()
	b := append((&wire.Header{XID: 99, Vers: 1, Type: wire.Msg1}).Append(nil), replyBody(99, 40)...)
	b[19] = 2 // the list's first word
	p.raw(b)
	if len(p.got) != 0 || len(p.evs) != 1 || !errors.Is(p.evs[0].Err, ErrProtocol) {
		t.Errorf("sent %+v, %+v", p.got, p.evs)
	}
}

// TestVersion1Flood checks that a server of version 1 refuses calls far beyond the credits, until it has answered some.
func TestVersion1Flood(t *testing.T) {
	cfg := DefaultConfig(true)
	cfg.Window = 4
	p := newPeer(t, cfg)
	most := 2 * cfg.Window
	call := func(xid int) {
		p.send(wire.Header{XID: uint32(xid), Vers: 1, Type: wire.Msg1}, callBody(uint32(xid), 40)...)
	}
	call(0)
	one := p.evs[len(p.evs)-1].Call // after EventReady
	p.clear()
	for xid := 1; xid < most; xid++ {
		call(xid)
	}
	if len(p.evs) != most-1 || len(p.got) != 0 {
		t.Fatalf("%d calls after the first, sent %+v; want %d", len(p.evs), p.got, most-1)
	}
	p.clear()
	call(most)
	if len(p.evs) != 0 || len(p.got) != 1 || p.got[0].XID != uint32(most) || p.got[0].Failure.Code != wire.ErrChunk1 {
		t.Errorf("one more: %+v, sent %+v", p.evs, p.got)
	}
	p.s.Drop(one)
	call(most + 1)
	if len(p.evs) != 1 {
		t.Errorf("after one ended: %+v", p.evs)
	}
}

// TestVersion1SameXID checks that a reverse call in a Read chunk is no reply to our call of the same XID (RFC 8167 section 5.2).
func TestVersion1SameXID(t *testing.T) {
	cfg := DefaultConfig(false)
	cfg.Version, cfg.Props.Reverse = 1, wire.ReverseGeneral
	p := newPeer(t, cfg)
	p.call(9, callBody(9, 40), &CallChunks{Reply: chunk(40)})
	p.drain()
	p.clear()
	p.send(wire.Header{XID: 9, Vers: 1, Type: wire.NoMsg1, Reads: []wire.ReadSegment{rseg(0, 1, 40)}})
	if len(p.evs) != 1 || p.evs[0].Kind != EventCall {
		t.Errorf("%+v, sent %+v", p.evs, p.got)
	}
	p.clear()
	p.send(wire.Header{XID: 9, Vers: 1, Type: wire.NoMsg1, Reply: chunk(40)})
	if len(p.evs) != 1 || p.evs[0].Err != nil || len(p.s.pending) != 0 {
		t.Errorf("the reply: %+v, sent %+v", p.evs, p.got)
	}
}

// TestVersion1Reverse checks that a client of version 1 accepts reverse calls if it is configured for them, without
// chunks if it supports none (RFC 8167 section 5.3).
func TestVersion1Reverse(t *testing.T) {
	for level := wire.ReverseNone; level <= wire.ReverseGeneral; level++ {
		cfg := DefaultConfig(false)
		cfg.Version, cfg.Props.Reverse = 1, level
		p := newPeer(t, cfg)
		p.send(wire.Header{XID: 5, Vers: 1, Type: wire.Msg1}, callBody(5, 40)...)
		p.send(wire.Header{XID: 6, Vers: 1, Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(8, 1, 4)}}, callBody(6, 40)...)
		p.send(wire.Header{XID: 7, Vers: 1, Type: wire.Msg1, Writes: []wire.Chunk{chunk(4)}}, callBody(7, 40)...)
		p.send(wire.Header{XID: 8, Vers: 1, Type: wire.Msg1, Reply: chunk(4)}, callBody(8, 40)...)
		p.send(wire.Header{XID: 9, Vers: 1, Type: wire.NoMsg1, Reads: []wire.ReadSegment{rseg(0, 1, 40)}})
		var calls, errs int
		for _, e := range p.evs {
			if e.Kind == EventCall {
				calls++
			}
		}
		for _, h := range p.got {
			if h.Type == wire.Error1 && h.XID >= 6 && h.Failure.Code == wire.ErrChunk1 {
				errs++
			}
		}
		want := [][2]int{{0, 0}, {1, 4}, {1, 4}, {5, 0}}[level]
		if calls != want[0] || errs != want[1] {
			t.Errorf("level %d: %d calls, %d errors", level, calls, errs)
		}
	}
}
