package session

import (
	"maps"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// responderCases are the errors that a responder sends (draft section 7), each with its section. The answer is to the
// last message sent.
var responderCases = []struct {
	name, section string
	send          []msg
	xid           uint32 // of the error
	want          wire.Failure
	calls         int // that are delivered all the same
}{
	{"version 3 after 2", "7.1.2", []msg{m(wire.Header{XID: 9, Vers: 3, Type: wire.CallInline}, callBody(9, 8)...)}, 9, wire.Failure{Code: wire.ErrVersMismatch}, 0},
	{"version 1 after 2", "7.1.2", []msg{m(wire.Header{XID: 9, Vers: 1, Type: wire.Msg1}, callBody(9, 8)...)}, 9, wire.Failure{Code: wire.ErrVersMismatch}, 0},
	{"version 0 after 2", "7.1.2", []msg{m(wire.Header{XID: 9, Vers: 77, Type: wire.CallInline}, callBody(9, 8)...)}, 9, wire.Failure{Code: wire.ErrVersMismatch}, 0},
	{"type 0", "6.1", []msg{m(wire.Header{XID: 9, Type: 0})}, 9, wire.Failure{Code: wire.ErrInvalHType}, 0},
	{"type 1", "6.1", []msg{m(wire.Header{XID: 9, Type: 1})}, 9, wire.Failure{Code: wire.ErrInvalHType}, 0},
	{"type 2", "6.1", []msg{m(wire.Header{XID: 9, Type: 2})}, 9, wire.Failure{Code: wire.ErrInvalHType}, 0},
	{"type 3", "6.1", []msg{m(wire.Header{XID: 9, Type: 3})}, 9, wire.Failure{Code: wire.ErrInvalHType}, 0},
	{"type 14", "7.1.3", []msg{m(wire.Header{XID: 9, Type: 14})}, 9, wire.Failure{Code: wire.ErrInvalHType}, 0},
	{"type 2^32-1", "7.1.3", []msg{m(wire.Header{XID: 9, Type: 1<<32 - 1})}, 9, wire.Failure{Code: wire.ErrInvalHType}, 0},

	{"call without a payload", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallInline})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"call of one word", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallInline}, 0, 0, 0, 9)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"another XID in the message", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallInline}, callBody(10, 40)...)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"a reply in a call", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallInline}, replyBody(9, 40)...)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"positions that fall", "4.5.1.1", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(44, 1, 4), rseg(40, 1, 4)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"a position that is no multiple of 4", "4.5.1", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(42, 1, 4)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"position 0 in an inline call", "6.3.7", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(0, 1, 4)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"position 0 in the data items of an external call", "4.5.1.2", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 40)}, Reads: []wire.ReadSegment{rseg(0, 1, 4)}})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"an external call without a chunk", "6.3.5", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"a call chunk with a position", "6.6.3", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 40), rseg(4, 1, 40)}})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"a call chunk of 7 bytes", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 7)}})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"a middle message without payload", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 8})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
	{"another XID in a continued message", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 8}, callBody(8, 16)...)}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},

	{"three Read chunks of two", "7.3.1", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 4), rseg(16, 1, 4), rseg(24, 1, 4)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrReadChunks, Max: 2}, 0},
	{"a Read chunk of more than the limit", "7.3.1", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 10001)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrReadChunks, Max: 2}, 0},
	{"segments that are more in sum", "7.3.1", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 1<<32-1), rseg(8, 1, 1<<32-1)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrReadChunks, Max: 2}, 0},
	{"three Write chunks of two", "7.3.2", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Writes: []wire.Chunk{chunk(1), chunk(1), chunk(1)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrWriteChunks, Max: 2}, 0},
	{"four segments of a Read chunk", "7.3.3", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 4), rseg(8, 1, 4), rseg(8, 1, 4), rseg(8, 1, 4)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrSegments, Max: 3}, 0},
	{"four segments of a Write chunk", "7.3.3", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Writes: []wire.Chunk{chunk(1, 1, 1, 1)}}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrSegments, Max: 3}, 0},
	{"four segments of a Reply chunk", "7.3.3", []msg{m(wire.Header{XID: 9, Type: wire.CallInline, Reply: chunk(1, 1, 1, 1)}, callBody(9, 80)...)}, 9, wire.Failure{Code: wire.ErrSegments, Max: 3}, 0},
	{"four segments of a Call chunk", "7.3.3", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 4), rseg(0, 1, 4), rseg(0, 1, 4), rseg(0, 1, 4)}})}, 9, wire.Failure{Code: wire.ErrSegments, Max: 3}, 0},
	{"a Call chunk of 4 GiB", "7.4.1", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 1<<32-1)}})}, 9, wire.Failure{Code: wire.ErrSystem}, 0},

	{"a continued call with nothing to come", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle}, callBody(9, 16)...)}, 9, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"a continued call beyond the limit", "7.1.4", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 1 << 30}, callBody(9, 16)...)}, 9, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"remaining that does not add up", "7.1.4", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 77}, make([]byte, 16)...)}, 9, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"an end that comes early", "7.1.4", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 9, Type: wire.CallInline}, make([]byte, 96)...)}, 9, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"an end that comes late", "7.1.4", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 9, Type: wire.CallInline}, make([]byte, 104)...)}, 9, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"an external call in a continued one", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 40)}})}, 9, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"a call of another XID in a continued one", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 10, Type: wire.CallInline}, callBody(10, 40)...)}, 10, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"the end of another XID with the length that is left", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 40}, callBody(9, 16)...), m(wire.Header{XID: 10, Type: wire.CallInline}, callBody(10, 40)...)}, 10, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"a middle of another XID", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 10, Type: wire.CallMiddle, Remaining: 8}, callBody(10, 40)...)}, 10, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"a reply in a continued call", "4.1", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 10, Type: wire.ReplyInline}, replyBody(10, 40)...)}, 10, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"properties in a continued call", "6.3.6", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 10, Type: wire.ConnPropFinal})}, 10, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"an unknown type in a continued call", "6.1", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 100}, callBody(9, 16)...), m(wire.Header{XID: 10, Type: 99})}, 10, wire.Failure{Code: wire.ErrInvalHType}, 0},
	{"properties after the final ones", "6.3.4", []msg{m(wire.Header{XID: 7, Type: wire.ConnPropFinal})}, 7, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"middle properties after the final ones", "6.3.4", []msg{m(wire.Header{XID: 7, Type: wire.ConnPropMiddle})}, 7, wire.Failure{Code: wire.ErrInvalCont}, 0},
	{"bad limits of the chunks at the end of a continued call", "7.3.1", []msg{m(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 16}, callBody(9, 16)...), m(wire.Header{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{rseg(8, 1, 10001)}}, make([]byte, 16)...)}, 9, wire.Failure{Code: wire.ErrReadChunks, Max: 2}, 0},
}

func TestResponderErrors(t *testing.T) {
	for _, c := range responderCases {
		t.Run(c.name, func(t *testing.T) {
			p := serverPeer(t, nil)
			for _, x := range c.send {
				p.send(x.h, x.b...)
			}
			var errs []wire.Header
			for _, h := range p.got {
				if h.Type == wire.Error {
					errs = append(errs, h)
				}
			}
			if len(errs) == 0 {
				t.Fatalf("section %s: no error; events %+v", c.section, p.evs)
			}
			h := errs[len(errs)-1]
			last := c.send[len(c.send)-1].h
			if last.Vers == 0 {
				last.Vers = 2
			}
			if h.XID != c.xid || h.Failure != c.want || h.Vers != last.Vers {
				t.Errorf("section %s: %+v of version %d for %d", c.section, h.Failure, h.Vers, h.XID)
			}
			for _, e := range p.evs {
				if e.Kind == EventCall {
					t.Errorf("a call was delivered: %+v", e.Call)
				}
			}
			// The connection continues.
			p.clear()
			p.send(wire.Header{XID: 77, Type: wire.CallInline}, callBody(77, 40)...)
			if len(p.evs) != 1 || p.evs[0].Kind != EventCall {
				t.Errorf("the next call: %+v, %+v", p.evs, p.got)
			}
		})
	}
}

// TestDiscarded checks what a receiver must discard silently.
func TestDiscarded(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
	}{
		{"nothing", nil},
		{"15 bytes", make([]byte, 15)},
		{"an error for no call", (&wire.Header{XID: 3, Vers: 2, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrSystem}}).Append(nil)},
		{"an error of no known code", append((&wire.Header{XID: 3, Vers: 2, Type: wire.Error}).Append(nil)[:16], 0, 0, 0, 99)},
		{"an error cut short", (&wire.Header{XID: 3, Vers: 2, Type: wire.Error}).Append(nil)[:16]},
		{"an error of another version", (&wire.Header{XID: 3, Vers: 1, Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrChunk1}}).Append(nil)},
		{"an error of version 9", (&wire.Header{XID: 3, Vers: 9, Type: wire.Error}).Append(nil)},
		{"a reply to no call", append((&wire.Header{XID: 3, Vers: 2, Type: wire.ReplyInline}).Append(nil), replyBody(3, 40)...)},
		{"a middle reply to no call", append((&wire.Header{XID: 3, Vers: 2, Type: wire.ReplyMiddle, Remaining: 8}).Append(nil), replyBody(3, 40)...)},
		{"a reply chunk to no call", (&wire.Header{XID: 3, Vers: 2, Type: wire.ReplyExternal, Reply: chunk(40)}).Append(nil)},
		{"a grant with an XID", (&wire.Header{XID: 3, Vers: 2, Type: wire.Grant, Credit: 1000}).Append(nil)},
		{"a grant with a tail", append((&wire.Header{Vers: 2, Type: wire.Grant, Credit: 1000}).Append(nil), 1, 2, 3)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := serverPeer(t, nil)
			p.raw(c.b)
			if len(p.got) > 0 || len(p.evs) > 0 {
				t.Errorf("%+v, %+v", p.got, p.evs)
			}
		})
	}
}

// TestBadXDRInContinued checks that a header that cannot be parsed ends the continued call that it continues, or interrupts with another
// XID: the rest of that call is not the end of it.
func TestBadXDRInContinued(t *testing.T) {
	for _, c := range []struct {
		xid  uint32
		want map[uint32]wire.ErrCode // by XID
	}{
		{9, map[uint32]wire.ErrCode{9: wire.ErrBadXDR}},
		{10, map[uint32]wire.ErrCode{9: wire.ErrInvalCont, 10: wire.ErrBadXDR}},
	} {
		p := serverPeer(t, nil)
		p.send(wire.Header{XID: 9, Type: wire.CallMiddle, Remaining: 40}, callBody(9, 16)...)
		p.raw((&wire.Header{XID: c.xid, Vers: 2, Credit: 1000, Type: wire.CallInline}).Append(nil)[:20])
		got := map[uint32]wire.ErrCode{}
		for _, h := range p.got {
			if h.Type == wire.Error {
				got[h.XID] = h.Failure.Code
			}
		}
		if !maps.Equal(got, c.want) {
			t.Errorf("XID %d: errors %v; want %v", c.xid, got, c.want)
		}
		p.send(wire.Header{XID: 9, Type: wire.CallInline}, make([]byte, 40)...)
		if len(p.evs) > 0 {
			t.Errorf("XID %d: %+v", c.xid, p.evs)
		}
	}
}

// TestBadProperties checks properties that are refused, and the effect on others in the same message.
func TestBadProperties(t *testing.T) {
	for _, c := range []struct {
		name string
		prop wire.Prop
	}{
		{"short", wire.Prop{ID: wire.PropRecvSize, Data: []byte{0, 0}}},
		{"long", wire.Prop{ID: wire.PropSendSize, Data: make([]byte, 8)}},
		{"a reverse level that does not exist", wire.Prop{ID: wire.PropReverse, Data: []byte{0, 0, 0, 4}}},
		{"receive buffers of 16", wire.Prop{ID: wire.PropRecvSize, Data: []byte{0, 0, 0, 16}}},
		{"segments of 0", wire.Prop{ID: wire.PropSegmentSize, Data: []byte{0, 0, 0, 0}}},
		{"authentication cut short", wire.Prop{ID: wire.PropHostAuth, Data: []byte{0, 0, 0, 9, 1, 2, 3, 4}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPeer(t, DefaultConfig(true))
			p.send(wire.Header{XID: 5, Type: wire.ConnPropFinal, Props: []wire.Prop{{ID: wire.PropSegments, Data: []byte{0, 0, 0, 3}}, c.prop}})
			last := p.got[len(p.got)-1]
			if last.Type != wire.Error || last.Failure.Code != wire.ErrBadPropVal || last.XID != 5 {
				t.Errorf("%+v", last)
			}
			if p.s.Peer() != wire.DefaultProperties() {
				t.Errorf("%+v", p.s.Peer())
			}
		})
	}
	t.Run("beyond the message", func(t *testing.T) {
		p := newPeer(t, DefaultConfig(true))
		p.raw(append((&wire.Header{XID: 5, Vers: 2, Credit: 9, Type: wire.ConnPropFinal}).Append(nil)[:16], 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0))
		if last := p.got[len(p.got)-1]; last.Failure.Code != wire.ErrBadPropVal {
			t.Errorf("%+v", last)
		}
	})
	t.Run("cut short", func(t *testing.T) {
		p := newPeer(t, DefaultConfig(true))
		p.raw(append((&wire.Header{XID: 5, Vers: 2, Credit: 9, Type: wire.ConnPropFinal}).Append(nil)[:16], 0, 0, 0, 2))
		if last := p.got[len(p.got)-1]; last.Failure.Code != wire.ErrBadXDR {
			t.Errorf("%+v", last)
		}
	})
	t.Run("a call between middle and final", func(t *testing.T) {
		p := newPeer(t, DefaultConfig(true))
		p.send(wire.Header{Type: wire.ConnPropMiddle})
		p.clear()
		p.send(wire.Header{XID: 9, Type: wire.CallInline}, callBody(9, 40)...)
		if len(p.got) == 0 || p.got[0].Failure.Code != wire.ErrInvalCont || p.got[0].XID != 9 || len(p.evs) > 0 {
			t.Errorf("%+v %+v", p.got, p.evs)
		}
	})
}

// TestSegmentWraps checks that segments beyond the end of the address space are answered with an error each time, and
// that their calls are not executed (draft section 7.4.1, RFC 8166 section 4.5.2).
func TestSegmentWraps(t *testing.T) {
	for _, vers := range []uint32{1, 2} {
		cfg := DefaultConfig(true)
		p := newPeer(t, cfg)
		p.send(wire.Header{Vers: vers, Type: map[uint32]wire.Type{1: wire.Done1, 2: wire.ConnPropFinal}[vers]}, make([]byte, 16)...)
		xid := uint32(100)
		for _, c := range []struct {
			seg wire.Segment
			ok  bool
		}{
			{wire.Segment{Handle: 1, Length: 400, Offset: 1<<64 - 1}, false},
			{wire.Segment{Handle: 1, Length: 400, Offset: 1<<64 - 399}, false},
			{wire.Segment{Handle: 1, Length: 400, Offset: 1<<64 - 400}, false},
			{wire.Segment{Handle: 1, Length: 400, Offset: 1<<64 - 401}, true},
			{wire.Segment{Handle: 1, Length: 0, Offset: 1<<64 - 1}, true},
		} {
			good := wire.Segment{Handle: 1, Length: 40, Offset: 64}
			for name, h := range map[string]wire.Header{
				"Call chunk":            {Call: []wire.ReadSegment{{Segment: good}, {Segment: c.seg}}},
				"Read chunk":            {Reads: []wire.ReadSegment{{Position: 8, Segment: c.seg}}},
				"Read chunk in pieces":  {Reads: []wire.ReadSegment{{Position: 8, Segment: good}, {Position: 8, Segment: c.seg}}},
				"Write chunk":           {Writes: []wire.Chunk{{c.seg}}},
				"second Write chunk":    {Writes: []wire.Chunk{{good}, {good, c.seg}}},
				"Reply chunk":           {Reply: wire.Chunk{c.seg}},
				"Reply chunk in pieces": {Reply: wire.Chunk{good, c.seg}},
				"Call and Write chunks": {Call: []wire.ReadSegment{{Segment: good}}, Writes: []wire.Chunk{{c.seg}}},
			} {
				h.Vers, h.XID, h.Type = vers, xid, wire.CallInline
				body := callBody(xid, 40)
				if h.Call != nil {
					h.Type, body = wire.CallExternal, nil
				}
				if vers == 1 {
					h.Type = wire.Msg1
					if h.Call != nil {
						h.Type = wire.NoMsg1
						h.Reads, h.Call = h.Call, nil
					}
				}
				for range 3 {
					p.clear()
					p.send(h, body...)
					if c.ok {
						if len(p.evs) != 1 || p.evs[0].Kind != EventCall {
							t.Fatalf("version %d, %s, %+v: %+v %+v", vers, name, c.seg, p.got, p.evs)
						}
						if in := p.evs[0].Call; !p.s.Drop(in) || p.s.Drop(in) {
							t.Fatal("a call is dropped once")
						}
						continue
					}
					want := wire.ErrSystem
					if vers == 1 {
						want = wire.ErrChunk1
					}
					if len(p.evs) != 0 || len(p.got) != 1 || p.got[0].Failure.Code != want || p.got[0].XID != xid {
						t.Errorf("version %d, %s, %+v: %+v %+v", vers, name, c.seg, p.got, p.evs)
					}
				}
				xid++
			}
		}
	}
}
