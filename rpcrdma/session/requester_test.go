package session

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestRequesterErrors checks that replies that do not match their call end only that call.
func TestRequesterErrors(t *testing.T) {
	w, r := chunk(100, 50), chunk(400)
	part := func(n ...uint32) wire.Chunk { return chunk(n...) }
	other := chunk(10, 0)
	other[0].Handle = 5
	moved := chunk(10, 0)
	moved[0].Offset++
	inline := func(h wire.Header) msg { h.Type = wire.ReplyInline; return m(h, replyBody(9, 40)...) }
	for _, c := range []struct {
		name string
		msg  msg
		ok   bool
	}{
		{"inline, all lengths 0", inline(wire.Header{Writes: []wire.Chunk{part(0, 0)}}), true},
		{"inline, without the list", inline(wire.Header{}), true},
		{"inline, partly filled", inline(wire.Header{Writes: []wire.Chunk{part(100, 7)}}), true},
		{"more written than there is", inline(wire.Header{Writes: []wire.Chunk{part(100, 51)}}), false},
		{"a gap", inline(wire.Header{Writes: []wire.Chunk{part(99, 1)}}), false},
		{"another handle", inline(wire.Header{Writes: []wire.Chunk{other}}), false},
		{"another offset", inline(wire.Header{Writes: []wire.Chunk{moved}}), false},
		{"a segment less", inline(wire.Header{Writes: []wire.Chunk{part(10)}}), false},
		{"a chunk more", inline(wire.Header{Writes: []wire.Chunk{part(0, 0), part(0)}}), false},
		{"external", m(wire.Header{Type: wire.ReplyExternal, Writes: []wire.Chunk{part(0, 0)}, Reply: part(44)}), true},
		{"external without a chunk", m(wire.Header{Type: wire.ReplyExternal}), false},
		{"external of 4 bytes", m(wire.Header{Type: wire.ReplyExternal, Reply: part(4)}), false},
		{"external, too long", m(wire.Header{Type: wire.ReplyExternal, Reply: part(401)}), false},
		{"external, other segments", m(wire.Header{Type: wire.ReplyExternal, Reply: part(40, 4)}), false},
		{"a call in a reply", m(wire.Header{Type: wire.ReplyInline}, callBody(9, 40)...), false},
		{"another XID in the message", m(wire.Header{Type: wire.ReplyInline}, replyBody(8, 40)...), false},
		{"no payload", m(wire.Header{Type: wire.ReplyInline}), false},
		{"a middle with another XID", m(wire.Header{Type: wire.ReplyMiddle, Remaining: 8}, replyBody(8, 40)...), false},
		{"a middle of 1 GiB", m(wire.Header{Type: wire.ReplyMiddle, Remaining: 1 << 30}, replyBody(9, 40)...), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := clientPeer(t, nil)
			p.call(9, callBody(9, 40), &CallChunks{Writes: []wire.Chunk{w}, Reply: r})
			p.drain()
			p.clear()
			c.msg.h.XID = 9
			p.send(c.msg.h, c.msg.b...)
			if len(p.evs) != 1 {
				t.Fatalf("%+v", p.evs)
			}
			if c.ok != (p.evs[0].Kind == EventReply) || !c.ok && !errors.Is(p.evs[0].Err, ErrProtocol) {
				t.Errorf("%+v", p.evs[0])
			}
			if len(p.s.pending) != 0 {
				t.Error("it is still outstanding")
			}
		})
	}
	// A reply has all Write chunks of its call, or none.
	p := clientPeer(t, nil)
	p.call(9, callBody(9, 40), &CallChunks{Writes: []wire.Chunk{w, w}})
	p.drain()
	p.clear()
	p.send(wire.Header{XID: 9, Type: wire.ReplyInline, Writes: []wire.Chunk{part(0, 0)}}, replyBody(9, 40)...)
	if len(p.evs) != 1 || !errors.Is(p.evs[0].Err, ErrProtocol) {
		t.Errorf("a chunk less: %+v", p.evs)
	}
	// Each error that a responder may send ends the call that it refers to.
	for code := range map[wire.ErrCode]bool{1: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true, 8: true, 9: true, 10: true, 11: true, 100: true} {
		p := clientPeer(t, nil)
		for _, xid := range []uint32{8, 9} {
			p.call(xid, callBody(xid, 40), &CallChunks{})
		}
		p.drain()
		p.clear()
		f := wire.Failure{Code: code, Low: 1, High: 2}
		if code != wire.ErrVers {
			f.Low, f.High = 0, 0
		}
		p.send(wire.Header{XID: 9, Type: wire.Error, Failure: f})
		var e *FailureError
		if len(p.evs) != 1 || p.evs[0].XID != 9 || !errors.As(p.evs[0].Err, &e) || e.Failure != f || len(p.s.pending) != 1 {
			t.Errorf("%v: %+v", code, p.evs)
		}
	}
}

// TestForget checks that a call that is forgotten before it is sent is not sent: its memory may
// be used for something else.
func TestForget(t *testing.T) {
	p := clientPeer(t, nil)
	for xid := uint32(7); xid < 10; xid++ {
		p.call(xid, callBody(xid, 40), &CallChunks{})
	}
	p.s.Forget(8)
	p.drain()
	if len(p.got) != 2 || p.got[0].XID != 7 || p.got[1].XID != 9 || len(p.s.pending) != 2 {
		t.Errorf("sent %+v, %d outstanding", p.got, len(p.s.pending))
	}
}

// Calls in the reverse direction at each level (draft sections 4.6.3, 4.6.4).
func TestReverseLevels(t *testing.T) {
	plain := m(wire.Header{XID: 9, Type: wire.CallInline}, callBody(9, 40)...)
	middle := m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 8}, callBody(9, 40)...)
	reads := m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 4)}}, callBody(9, 40)...)
	writes := m(wire.Header{XID: 9, Type: wire.CallInline, Writes: []wire.Chunk{chunk(4)}}, callBody(9, 40)...)
	reply := m(wire.Header{XID: 9, Type: wire.CallInline, Reply: chunk(4)}, callBody(9, 40)...)
	ext := m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 40)}})
	const none = wire.ErrCode(0)
	for _, c := range []struct {
		level wire.Reverse
		msg   msg
		want  wire.ErrCode
	}{
		{wire.ReverseNone, plain, wire.ErrInvalHType}, {wire.ReverseNone, middle, wire.ErrInvalHType}, {wire.ReverseNone, ext, wire.ErrInvalHType},
		{wire.ReverseSimple, plain, none}, {wire.ReverseSimple, middle, wire.ErrInvalHType}, {wire.ReverseSimple, reads, wire.ErrReadChunks},
		{wire.ReverseSimple, writes, wire.ErrWriteChunks}, {wire.ReverseSimple, reply, wire.ErrReplyResource}, {wire.ReverseSimple, ext, wire.ErrReadChunks},
		{wire.ReverseContinued, plain, none}, {wire.ReverseContinued, middle, none}, {wire.ReverseContinued, reads, wire.ErrReadChunks},
		{wire.ReverseContinued, writes, wire.ErrWriteChunks}, {wire.ReverseContinued, ext, wire.ErrReadChunks},
		{wire.ReverseGeneral, plain, none}, {wire.ReverseGeneral, middle, none}, {wire.ReverseGeneral, reads, none},
		{wire.ReverseGeneral, writes, none}, {wire.ReverseGeneral, reply, none}, {wire.ReverseGeneral, ext, none},
	} {
		p := clientPeer(t, func(cfg *Config) { cfg.Props.Reverse = c.level })
		p.send(c.msg.h, c.msg.b...)
		got := none
		if len(p.got) > 0 {
			got = p.got[0].Failure.Code
		}
		if got != c.want {
			t.Errorf("level %d, %+v: %v, not %v", c.level, c.msg.h, got, c.want)
		}
	}
}

// TestRefusedType checks that a header type that the peer has refused is not used again.
func TestRefusedType(t *testing.T) {
	p := clientPeer(t, nil)
	long := &Spec{Body: 9000, Reply: 40}
	plan, err := p.s.PlanCall(long)
	if err != nil || plan.External {
		t.Fatalf("%+v, %v", plan, err)
	}
	p.call(9, callBody(9, 9000), &CallChunks{})
	p.drain()
	p.send(wire.Header{XID: 9, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrInvalHType}})
	if plan, err = p.s.PlanCall(long); err != nil || !plan.External {
		t.Fatalf("after CALL_MIDDLE was refused: %+v, %v", plan, err)
	}
	p.call(10, nil, &CallChunks{Call: []wire.ReadSegment{rseg(0, 1, 9000)}})
	p.drain()
	p.send(wire.Header{XID: 10, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrInvalHType}})
	if plan, err = p.s.PlanCall(long); !errors.Is(err, ErrTooLong) {
		t.Errorf("after both were refused: %+v, %v", plan, err)
	}
	if plan, err = p.s.PlanCall(&Spec{Body: 100}); err != nil {
		t.Errorf("a short one: %v", err)
	}
}

// TestSegmentLimits checks that a message that would need more segments than the peer accepts is not sent (draft
// sections 5.2.4 and 7.3.3).
func TestSegmentLimits(t *testing.T) {
	cfg := DefaultConfig(false)
	p := newPeer(t, cfg)
	props := wire.DefaultProperties()
	props.SegmentSize, props.Segments = 10_000, 3
	p.send(wire.Header{Type: wire.ConnPropFinal, Props: props.Props()})
	item := func(n int) *Spec { return &Spec{Body: 100, Items: []int{n}, Reply: 40} }
	for _, c := range []struct {
		spec *Spec
		ok   bool
	}{
		{item(30_000), true}, {item(30_001), false}, {&Spec{Body: 100, Results: []int{20_000}, Reply: 40}, true},
		{&Spec{Body: 100, Results: []int{20_000, 10_001}, Reply: 40}, false}, {&Spec{Body: 100, Reply: 31_000}, false},
	} {
		if _, err := p.s.PlanCall(c.spec); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c.spec, err)
		}
	}
	p.call(9, callBody(9, 40), &CallChunks{})
	p.drain()
	p.send(wire.Header{XID: 9, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrSegments, Max: 2}})
	if _, err := p.s.PlanCall(item(30_000)); !errors.Is(err, ErrTooLong) {
		t.Errorf("three segments of two: %v", err)
	}
	if _, err := p.s.PlanCall(item(20_000)); err != nil {
		t.Errorf("two segments of two: %v", err)
	}
}

// TestBrokenReply checks that a continued reply that continues with something else ends its call, and that the peer
// gets INVAL_CONT (draft section 6.3.9).
func TestBrokenReply(t *testing.T) {
	for _, c := range []struct {
		name string
		next msg
		errs []uint32 // XIDs of the errors that go out
	}{
		{"another reply", m(wire.Header{XID: 10, Type: wire.ReplyInline}, replyBody(10, 40)...), []uint32{9, 10}},
		{"another continued reply", m(wire.Header{XID: 10, Type: wire.ReplyMiddle, Remaining: 40}, replyBody(10, 40)...), []uint32{9, 10}},
		{"another special reply", m(wire.Header{XID: 10, Type: wire.ReplyExternal, Reply: chunk(40)}), []uint32{9, 10}},
		{"a special reply to the same call", m(wire.Header{XID: 9, Type: wire.ReplyExternal, Reply: chunk(40)}), []uint32{9}},
		{"a call", m(wire.Header{XID: 10, Type: wire.CallInline}, callBody(10, 40)...), []uint32{9, 10}},
		{"a call with the same XID", m(wire.Header{XID: 9, Type: wire.CallInline}, callBody(9, 40)...), []uint32{9}},
		{"properties", m(wire.Header{Type: wire.ConnPropFinal}), []uint32{9, 0}},
	} {
		p := clientPeer(t, func(c *Config) { c.Props.Reverse = wire.ReverseGeneral })
		for _, xid := range []uint32{9, 10} {
			p.call(xid, callBody(xid, 40), &CallChunks{Reply: chunk(50)})
		}
		p.drain()
		p.clear()
		p.send(wire.Header{XID: 9, Type: wire.ReplyMiddle, Remaining: 40}, replyBody(9, 40)...)
		p.send(c.next.h, c.next.b...)
		var xids []uint32
		for _, h := range p.got {
			if h.Type != wire.Error || h.Failure.Code != wire.ErrInvalCont {
				t.Errorf("%s: %+v", c.name, h)
			}
			xids = append(xids, h.XID)
		}
		if !slices.Equal(xids, c.errs) {
			t.Errorf("%s: errors for %v, not %v", c.name, xids, c.errs)
		}
		if len(p.evs) != 1 || p.evs[0].XID != 9 || !errors.Is(p.evs[0].Err, ErrProtocol) {
			t.Errorf("%s: %+v", c.name, p.evs)
		}
	}
}

// TestUnknownError checks that an error with an undefined code is discarded and its call continues (draft section 7).
func TestUnknownError(t *testing.T) {
	for _, code := range []uint32{0, 12, 13, 99, 101, 1 << 31, 1<<32 - 1} {
		p := clientPeer(t, nil)
		p.call(9, callBody(9, 40), &CallChunks{})
		p.drain()
		p.clear()
		b := (&wire.Header{XID: 9, Vers: 2, Credit: 1000, Type: wire.Error}).Append(nil)[:16]
		p.raw(append(binary.BigEndian.AppendUint32(b, code), make([]byte, 12)...))
		if len(p.evs) != 0 || len(p.got) != 0 || len(p.s.pending) != 1 {
			t.Errorf("code %d: %+v, %+v", code, p.evs, p.got)
		}
		p.send(wire.Header{XID: 9, Type: wire.ReplyInline}, replyBody(9, 40)...)
		if len(p.evs) != 1 || p.evs[0].Kind != EventReply {
			t.Errorf("code %d, then the reply: %+v", code, p.evs)
		}
	}
}

// TestPoisonedRest checks that after INVAL_CONT the rest of the message is discarded.
func TestPoisonedRest(t *testing.T) {
	p := serverPeer(t, nil)
	p.send(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...)
	p.send(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 3}, make([]byte, 16)...)
	if len(p.got) != 1 || p.got[0].Failure.Code != wire.ErrInvalCont {
		t.Fatalf("%+v", p.got)
	}
	p.clear()
	p.send(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 50}, make([]byte, 16)...)
	p.send(wire.Header{XID: 9, Type: wire.CallInline}, make([]byte, 50)...)
	if len(p.got) > 0 || len(p.evs) > 0 {
		t.Errorf("%+v %+v", p.got, p.evs)
	}
	p.send(wire.Header{XID: 9, Type: wire.CallInline}, callBody(9, 50)...) // a new one
	if len(p.evs) != 1 || p.evs[0].Kind != EventCall {
		t.Errorf("%+v %+v", p.got, p.evs)
	}
}

// TestNoReadChunks checks that a responder without support for Read chunks reports a limit of 0 (draft section 7.3.1)
// and accepts other calls.
func TestNoReadChunks(t *testing.T) {
	p := serverPeer(t, func(c *Config) { c.Limits.ReadChunks = 0 })
	p.send(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 4)}}, callBody(9, 40)...)
	if len(p.got) != 1 || p.got[0].Failure != (wire.Failure{Code: wire.ErrReadChunks}) || len(p.evs) != 0 {
		t.Errorf("%+v, %+v", p.got, p.evs)
	}
	p.clear()
	p.send(wire.Header{XID: 10, Type: wire.CallInline}, callBody(10, 40)...)
	if len(p.got) != 0 || len(p.evs) != 1 {
		t.Errorf("%+v, %+v", p.got, p.evs)
	}
}

func TestNoWriteChunks(t *testing.T) {
	for cont, want := range map[int]wire.ErrCode{0: wire.ErrReplyResource, 8: wire.ErrWriteChunks} {
		p := serverPeer(t, func(c *Config) { c.Limits.WriteChunks, c.Continue = 0, cont })
		p.send(wire.Header{XID: 9, Type: wire.CallInline, Writes: []wire.Chunk{chunk(100)}}, callBody(9, 40)...)
		if len(p.got) != 1 || p.got[0].Failure != (wire.Failure{Code: want}) {
			t.Errorf("replies of %d parts: %+v", cont, p.got)
		}
	}
}

// TestPost checks that a call-only procedure is sent inline or continued, without chunks, and that a longer one is
// refused (draft section 4.7).
func TestPost(t *testing.T) {
	p := clientPeer(t, nil)
	for i, n := range []int{8, 4000, 4064, 4068, 20_000, 27_000} {
		p.clear()
		xid := uint32(100 + i)
		if err := p.s.Post(xid, callBody(xid, n)); err != nil {
			t.Fatal(n, err)
		}
		p.drain()
		size := 0
		for j, h := range p.got {
			last := j == len(p.got)-1
			if h.XID != xid || last != (h.Type == wire.CallInline) || !last && h.Type != wire.CallMiddle ||
				h.InvHandle != 0 || len(h.Call)+len(h.Reads)+len(h.Writes) != 0 || h.Reply != nil {
				t.Errorf("%d bytes: %+v", n, h)
			}
			size += len(p.body[j])
		}
		if size != n || len(p.s.pending) != 0 {
			t.Errorf("%d of %d bytes, %d calls wait for a reply", size, n, len(p.s.pending))
		}
	}
	p.clear()
	if err := p.s.Post(200, callBody(200, 100_000)); !errors.Is(err, ErrTooLong) {
		t.Error(err)
	}
	if p.drain(); len(p.got) != 0 {
		t.Errorf("%+v", p.got)
	}
}
