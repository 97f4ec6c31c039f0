package session

import (
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestCreditEdge checks that the granted credits are the messages received plus the window, less the calls in
// progress, and never decrease (draft section 4.2.1).
func TestCreditEdge(t *testing.T) {
	const window = 8
	p := newPeer(t, func() Config { c := DefaultConfig(true); c.Window = window; return c }())
	p.send(wire.Header{Type: wire.ConnPropFinal})
	if len(p.got) != 1 || p.got[0].Credit != 1+window {
		t.Fatalf("%+v", p.got)
	}
	var open []*Call
	last := p.got[0].Credit
	for xid := range uint32(6) {
		p.clear()
		p.send(wire.Header{XID: xid + 100, Type: wire.CallInline}, callBody(xid+100, 40)...)
		for _, e := range p.evs {
			if e.Kind == EventCall {
				open = append(open, e.Call)
			}
		}
	}
	reply := func(c *Call) uint32 {
		p.clear()
		plan, _, ok := p.s.PlanReply(c, 40, nil)
		if !ok {
			t.Fatal("no plan")
		}
		p.s.Reply(c, plan, replyBody(c.XID, 40))
		p.drain()
		if len(p.got) != 1 {
			t.Fatalf("%+v", p.got)
		}
		return p.got[0].Credit
	}
	for i, c := range open {
		busy := uint32(len(open) - 1 - i)
		got := reply(c)
		if want := max(p.sent+window-busy, last); got != want {
			t.Errorf("with %d calls of %d: credits up to %d, not %d", busy, p.sent, got, want)
		}
		last = got
	}
	if last != p.sent+window {
		t.Errorf("at the end: %d", last)
	}
	// More calls than the window again: granted credits are not revoked.
	for xid := range uint32(window) {
		p.clear()
		p.send(wire.Header{XID: xid + 200, Type: wire.CallInline}, callBody(xid+200, 40)...)
		for _, h := range p.got {
			if int32(h.Credit-last) < 0 {
				t.Errorf("the credits fall from %d to %d", last, h.Credit)
			}
			last = h.Credit
		}
	}
	p.s.Fail(p.evs[len(p.evs)-1].Call, wire.Failure{Code: wire.ErrSystem})
	p.clear()
	p.drain()
	if len(p.got) != 1 || int32(p.got[0].Credit-last) < 0 {
		t.Errorf("the credits fall from %d: %+v", last, p.got)
	}
}

// TestCreditRefresh checks that an otherwise silent end sends a Grant before the peer has used more than half of its
// credits (draft section 4.2.1.1).
func TestCreditRefresh(t *testing.T) {
	for _, window := range []int{2, 5, 8, 64} {
		p := newPeer(t, func() Config { c := DefaultConfig(true); c.Window = window; return c }())
		p.send(wire.Header{Type: wire.ConnPropFinal})
		edge := p.got[len(p.got)-1].Credit
		grants := 0
		for i := range uint32(4 * window) {
			if left := int(int32(edge - p.sent)); left < (window+1)/2 {
				t.Fatalf("window %d: %d credits are left of %d", window, left, edge)
			}
			p.clear()
			p.send(wire.Header{XID: 100 + i, Type: wire.CallInline}, callBody(100+i, 40)...)
			for _, e := range p.evs {
				if e.Kind == EventCall {
					p.s.Drop(e.Call) // a call-only procedure
				}
			}
			p.drain()
			for _, h := range p.got {
				if h.Type != wire.Grant || h.XID != 0 {
					t.Errorf("%+v", h)
				}
				grants++
				edge = h.Credit
			}
		}
		if grants > 10 && window > 5 {
			t.Errorf("window %d: %d Grants for %d messages", window, grants, 4*window)
		}
	}
}

// TestThresholds checks that without an exchange of properties messages are at most 4096 bytes in both directions,
// and with it at most the smaller of what one end sends and the other receives (draft section 4.2.2).
func TestThresholds(t *testing.T) {
	for _, c := range []struct {
		props      []wire.Prop
		send, recv int
	}{
		{nil, 4096, 4096},
		{(&wire.Properties{SendSize: 16384, RecvSize: 16384, SegmentSize: 1 << 20}).Props(), 8192, 8192},
		{(&wire.Properties{SendSize: 1000, RecvSize: 2000, SegmentSize: 1 << 20}).Props(), 2000, 1000},
	} {
		cfg := DefaultConfig(true)
		cfg.Props.SendSize, cfg.Props.RecvSize = 8192, 8192
		p := newPeer(t, cfg)
		p.send(wire.Header{Type: wire.ConnPropFinal, Props: c.props})
		if p.s.sendLimit() != c.send || p.s.recvLimit() != c.recv {
			t.Errorf("%d and %d, not %d and %d", p.s.sendLimit(), p.s.recvLimit(), c.send, c.recv)
		}
		for _, n := range []int{c.send - 20, c.send - 16, 30_000} { // 20 bytes of header
			p.clear()
			p.send(wire.Header{XID: uint32(n), Type: wire.CallInline}, callBody(uint32(n), 40)...)
			in := p.evs[0].Call
			plan, _, ok := p.s.PlanReply(in, n, nil)
			if !ok {
				t.Fatal("no plan")
			}
			p.clear()
			p.s.Reply(in, plan, replyBody(uint32(n), n))
			p.drain()
			for i, h := range p.got {
				if size := h.Len() + len(p.body[i]); size > c.send {
					t.Errorf("a message of %d bytes, not %d", size, c.send)
				}
			}
			if (len(p.got) == 1) != (n == c.send-20) {
				t.Errorf("%d messages for a reply of %d", len(p.got), n)
			}
		}
	}
}

// TestThresholds1 checks that those of version 1 are at least 1024 (RFC 8166 section 3.3.3).
func TestThresholds1(t *testing.T) {
	for size, want := range map[int]int{0: 1024, 100: 1024, 1024: 1024, 4096: 4096} {
		cfg := DefaultConfig(false)
		cfg.Version, cfg.Send1, cfg.Recv1 = 1, size, size
		for _, s := range []*Session{New(cfg), func() *Session { s := New(cfg); s.SetVersion1(size, size, InvalidateNone); return s }()} {
			if s.sendLimit() != want || s.recvLimit() != want {
				t.Errorf("%d: %d and %d, not %d", size, s.sendLimit(), s.recvLimit(), want)
			}
			if p, err := s.PlanCall(&Spec{Body: want - 32, Reply: want - 32}); err != nil || p.External || p.Reply != 0 {
				t.Errorf("%d: a call of %d: %+v, %v", size, want-32, p, err)
			}
		}
	}
}

// TestFirstMessage checks that the first message of a client fits a server of version 1, however many properties it
// has (draft section 4.3).
func TestFirstMessage(t *testing.T) {
	cfg := DefaultConfig(false)
	for range 40 {
		cfg.Extra = append(cfg.Extra, wire.Prop{ID: 1000, Data: make([]byte, 100)})
	}
	p := newPeer(t, cfg)
	if len(p.got) != 1 || p.got[0].Len() > 1024 || p.got[0].Vers != 2 || p.got[0].Type != wire.ConnPropMiddle || p.got[0].XID != 0 {
		t.Fatalf("%d messages, the first of %d bytes: %+v", len(p.got), p.got[0].Len(), p.got[0].Type)
	}
	p.clear()
	p.send(wire.Header{Type: wire.ConnPropFinal}) // it has credits now
	props := 0
	for i, h := range p.got {
		props += len(h.Props)
		if final := i == len(p.got)-1; final != (h.Type == wire.ConnPropFinal) {
			t.Errorf("message %d of %d is %v", i, len(p.got), h.Type)
		}
	}
	if props < 30 {
		t.Errorf("%d properties follow", props)
	}
}

// TestAccepted checks messages that are unusual but allowed.
func TestAccepted(t *testing.T) {
	for _, c := range []struct {
		name, section string
		h             wire.Header
	}{
		{"segments of odd lengths", "4.4.1", wire.Header{Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 1), rseg(8, 2, 7), rseg(8, 3, 3)}}},
		{"a segment of no bytes", "4.4.1", wire.Header{Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 0)}, Writes: []wire.Chunk{chunk(0)}}},
		{"Write chunks of odd lengths", "4.4.1", wire.Header{Type: wire.CallInline, Writes: []wire.Chunk{chunk(1, 1, 3), chunk(5)}, Reply: chunk(7, 9)}},
		{"an empty Write chunk", "4.4.1", wire.Header{Type: wire.CallInline, Writes: []wire.Chunk{{}}, Reply: wire.Chunk{}}},
		{"Read chunks that are each as long as is allowed", "7.3.1", wire.Header{Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 10_000), rseg(16, 2, 10_000)}}},
		{"a Call chunk of 8 bytes", "6.6.3", wire.Header{Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 8)}}},
		{"a short Call chunk", "6.6.3", wire.Header{Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 13), rseg(0, 2, 27)}}},
		{"a Call chunk and others", "6.6.3", wire.Header{Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 40)}, Reads: []wire.ReadSegment{rseg(8, 1, 4)}, Writes: []wire.Chunk{chunk(5)}, Reply: chunk(7, 9)}},
	} {
		p := serverPeer(t, nil)
		c.h.XID = 9
		var body []byte
		if c.h.Type == wire.CallInline {
			body = callBody(9, 40)
		}
		p.send(c.h, body...)
		if len(p.evs) != 1 || p.evs[0].Kind != EventCall || len(p.got) != 0 {
			t.Errorf("%s (%s): %+v %+v", c.name, c.section, p.evs, p.got)
		}
	}
	// A continued call with chunks: they are in its last message (section 6.6.2.1).
	p := serverPeer(t, nil)
	body := pattern(9, 100, rpcCall)
	p.send(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 60}, body[:40]...)
	p.send(wire.Header{XID: 9, Type: wire.CallInline, InvHandle: 100, Reads: []wire.ReadSegment{rseg(8, 1, 4)}, Writes: []wire.Chunk{chunk(50)}, Reply: chunk(60)}, body[40:]...)
	if len(p.evs) != 1 || p.evs[0].Kind != EventCall {
		t.Fatalf("%+v %+v", p.evs, p.got)
	}
	if c := p.evs[0].Call; string(c.Body) != string(body) || len(c.Reads) != 1 || len(c.Writes) != 1 || c.Reply.Len() != 60 || c.Inv != 100 {
		t.Errorf("%+v", c)
	}
}

// TestChunksOfContinuedCall checks that a call that we continue has its chunks in the last message.
func TestChunksOfContinuedCall(t *testing.T) {
	p := clientPeer(t, nil)
	body := pattern(9, 9000, rpcCall)
	p.call(9, body, &CallChunks{Inv: 100, Reads: []wire.ReadSegment{rseg(8, 1, 4)}, Writes: []wire.Chunk{chunk(50)}, Reply: chunk(60)})
	p.drain()
	var got []byte
	for i, h := range p.got {
		got = append(got, p.body[i]...)
		if i < len(p.got)-1 {
			if h.Type != wire.CallMiddle || int(h.Remaining) != len(body)-len(got) {
				t.Errorf("%+v", h)
			}
			continue
		}
		if h.Type != wire.CallInline || h.InvHandle != 100 || len(h.Reads) != 1 || len(h.Writes) != 1 || h.Reply.Len() != 60 {
			t.Errorf("%+v", h)
		}
	}
	if len(p.got) != 3 || string(got) != string(body) {
		t.Errorf("%d messages with %d bytes", len(p.got), len(got))
	}
}

// TestNothingBetween checks that no error is sent between the parts of a continued message (draft section 4.1).
func TestNothingBetween(t *testing.T) {
	p := clientPeer(t, func(c *Config) { c.Props.Reverse = wire.ReverseNone })
	p.s.limit = p.s.sent + 1
	p.call(9, callBody(9, 9000), &CallChunks{})
	p.drain()
	p.send(wire.Header{XID: 10, Type: wire.CallInline, Credit: p.s.sent + 1}, callBody(10, 40)...) // to be refused
	p.send(wire.Header{Type: wire.Grant, Credit: p.s.sent + 10})
	var types []wire.Type
	for _, h := range p.got {
		if h.Type != wire.Grant {
			types = append(types, h.Type)
		}
	}
	want := []wire.Type{wire.CallMiddle, wire.CallMiddle, wire.CallInline, wire.Error}
	if len(types) != len(want) {
		t.Fatalf("%v", types)
	}
	for i := range want {
		if types[i] != want[i] {
			t.Errorf("%v, not %v", types, want)
		}
	}
}
