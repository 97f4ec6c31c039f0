package session

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// peer drives one Session by messages made by hand.
type peer struct {
	t    *testing.T
	s    *Session
	sent uint32
	got  []wire.Header // what the session sent
	body [][]byte
	evs  []Event
}

func newPeer(t *testing.T, cfg Config) *peer {
	p := &peer{t: t, s: New(cfg)}
	p.drain()
	return p
}

func (p *peer) drain() {
	var o Out
	for p.s.Poll(&o) {
		var h wire.Header
		b := append([]byte(nil), o.B...)
		vers := binary.BigEndian.Uint32(b[4:])
		if wire.Type(binary.BigEndian.Uint32(b[12:])) == wire.Error && p.s.Version() != 1 {
			b[4], b[5], b[6], b[7] = 0, 0, 0, 2 // the body is version 2's whatever it answers
		}
		n, err := h.Decode(b)
		if err != nil {
			p.t.Fatalf("it sends %x: %v", o.B, err)
		}
		h.Vers = vers
		p.got = append(p.got, h)
		p.body = append(p.body, append([]byte(nil), o.B[n:]...))
	}
	for {
		e, ok := p.s.Event()
		if !ok {
			return
		}
		p.evs = append(p.evs, e)
	}
}

// send sends a message with enough credits for the other side.
func (p *peer) send(h wire.Header, body ...byte) {
	if h.Vers == 0 {
		h.Vers = 2
	}
	if h.Credit == 0 {
		h.Credit = 1000
	}
	p.raw(append(h.Append(nil), body...))
}

func (p *peer) raw(b []byte) {
	p.sent++
	p.s.Receive(b)
	p.drain()
}

// clear forgets what was seen.
func (p *peer) clear() { p.got, p.body, p.evs = nil, nil, nil }

func callBody(xid uint32, n int) []byte {
	b := make([]byte, max(n, 8))
	binary.BigEndian.PutUint32(b, xid)
	return b
}

func replyBody(xid uint32, n int) []byte {
	b := callBody(xid, n)
	b[7] = rpcReply
	return b
}

// serverPeer is a server that has had a client's first message.
func serverPeer(t *testing.T, change func(*Config)) *peer {
	cfg := DefaultConfig(true)
	cfg.Limits = Limits{Message: 4096, ReadChunks: 2, WriteChunks: 2, Segments: 3, Chunk: 10000}
	if change != nil {
		change(&cfg)
	}
	p := newPeer(t, cfg)
	p.send(wire.Header{Type: wire.ConnPropFinal})
	p.clear()
	return p
}

// clientPeer is a client whose server has answered.
func clientPeer(t *testing.T, change func(*Config)) *peer {
	cfg := DefaultConfig(false)
	if change != nil {
		change(&cfg)
	}
	p := newPeer(t, cfg)
	p.send(wire.Header{Type: wire.ConnPropFinal})
	if !p.s.Ready() {
		t.Fatal("not ready")
	}
	p.clear()
	return p
}

func rseg(pos, handle, n uint32) wire.ReadSegment {
	return wire.ReadSegment{Position: pos, Segment: wire.Segment{Handle: handle, Length: n, Offset: 64}}
}

func chunk(n ...uint32) (c wire.Chunk) {
	c = wire.Chunk{}
	for i, v := range n {
		c = append(c, wire.Segment{Handle: uint32(100 + i), Length: v, Offset: 4096})
	}
	return c
}

type msg struct {
	h wire.Header
	b []byte
}

func m(h wire.Header, b ...byte) msg { return msg{h, b} }

// The errors that a responder sends (draft section 7), each with the section
// that demands it. What is sent is the last message; the answer is to it.
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
	{"a call chunk of 4 octets", "7.2", []msg{m(wire.Header{XID: 9, Type: wire.CallExternal, Call: []wire.ReadSegment{rseg(0, 1, 4)}})}, 9, wire.Failure{Code: wire.ErrBadXDR}, 0},
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
			// The connection goes on.
			p.clear()
			p.send(wire.Header{XID: 77, Type: wire.CallInline}, callBody(77, 40)...)
			if len(p.evs) != 1 || p.evs[0].Kind != EventCall {
				t.Errorf("the next call: %+v, %+v", p.evs, p.got)
			}
		})
	}
}

// What a receiver must discard without a word.
func TestDiscarded(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
	}{
		{"nothing", nil},
		{"15 octets", make([]byte, 15)},
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

// Properties that are refused, and what becomes of those in the same message.
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

// Versions (draft sections 4.3 and 7.1.1).
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
		if p.s.Version() != 1 || !p.s.Ready() {
			t.Fatalf("fallback: %+v", p.evs)
		}
		if err := p.s.Call(8, callBody(8, 40), &CallChunks{}); err != nil {
			t.Fatal(err)
		}
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

// Version 1: everything is ERR_CHUNK, or silence (RFC 8166 sections 4.5, 4.6).
func TestVersion1Errors(t *testing.T) {
	for _, c := range []struct {
		name   string
		h      wire.Header
		body   []byte
		silent bool
	}{
		{"RDMA_MSGP", wire.Header{Type: wire.MsgP1}, make([]byte, 40), false},
		{"RDMA_DONE", wire.Header{Type: wire.Done1}, make([]byte, 40), true},
		{"procedure 5", wire.Header{Type: 5}, make([]byte, 40), false},
		{"an error", wire.Header{Type: wire.Error1, Failure: wire.Failure{Code: wire.ErrChunk1}}, nil, true},
		{"another XID", wire.Header{Type: wire.Msg1}, callBody(8, 40), false},
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
			p.send(c.h, c.body...)
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

// Replies that do not fit their call end it, and nothing else.
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
		{"external of 4 octets", m(wire.Header{Type: wire.ReplyExternal, Reply: part(4)}), false},
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
			if err := p.s.Call(9, callBody(9, 40), &CallChunks{Writes: []wire.Chunk{w}, Reply: r}); err != nil {
				t.Fatal(err)
			}
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
			if p.s.Outstanding() != 0 {
				t.Error("it is still outstanding")
			}
		})
	}
	// Each error that a responder may send ends the call it is about.
	for code := range map[wire.ErrCode]bool{1: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true, 8: true, 9: true, 10: true, 11: true, 100: true} {
		p := clientPeer(t, nil)
		for _, xid := range []uint32{8, 9} {
			if err := p.s.Call(xid, callBody(xid, 40), &CallChunks{}); err != nil {
				t.Fatal(err)
			}
		}
		p.drain()
		p.clear()
		f := wire.Failure{Code: code, Low: 1, High: 2}
		if code != wire.ErrVers {
			f.Low, f.High = 0, 0
		}
		p.send(wire.Header{XID: 9, Type: wire.Error, Failure: f})
		var e *FailureError
		if len(p.evs) != 1 || p.evs[0].XID != 9 || !errors.As(p.evs[0].Err, &e) || e.Failure != f || p.s.Outstanding() != 1 {
			t.Errorf("%v: %+v", code, p.evs)
		}
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

// TestRefusedType: a header type that the peer has refused is not used again.
func TestRefusedType(t *testing.T) {
	p := clientPeer(t, nil)
	long := &Spec{Body: 9000, Reply: 40}
	plan, err := p.s.PlanCall(long)
	if err != nil || plan.External {
		t.Fatalf("%+v, %v", plan, err)
	}
	if err := p.s.Call(9, callBody(9, 9000), &CallChunks{}); err != nil {
		t.Fatal(err)
	}
	p.drain()
	p.send(wire.Header{XID: 9, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrInvalHType}})
	if plan, err = p.s.PlanCall(long); err != nil || !plan.External {
		t.Fatalf("after CALL_MIDDLE was refused: %+v, %v", plan, err)
	}
	if err := p.s.Call(10, nil, &CallChunks{Call: []wire.ReadSegment{rseg(0, 1, 9000)}}); err != nil {
		t.Fatal(err)
	}
	p.drain()
	p.send(wire.Header{XID: 10, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrInvalHType}})
	if plan, err = p.s.PlanCall(long); !errors.Is(err, ErrTooLong) {
		t.Errorf("after both were refused: %+v, %v", plan, err)
	}
	if plan, err = p.s.PlanCall(&Spec{Body: 100}); err != nil {
		t.Errorf("a short one: %v", err)
	}
}

// TestLateVersionError: an error that says that the peer does not speak our
// version ends the call, and the connection.
func TestLateVersionError(t *testing.T) {
	p := clientPeer(t, nil)
	if err := p.s.Call(9, callBody(9, 40), &CallChunks{}); err != nil {
		t.Fatal(err)
	}
	p.drain()
	p.send(wire.Header{XID: 9, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}})
	if len(p.evs) != 2 || p.evs[0].Kind != EventFailure || p.evs[1].Kind != EventClose {
		t.Errorf("%+v", p.evs)
	}
}

// TestSegmentLimits: what would need more segments than the peer takes is not
// sent (draft sections 5.2.4 and 7.3.3).
func TestSegmentLimits(t *testing.T) {
	cfg := DefaultConfig(false)
	p := newPeer(t, cfg)
	props := wire.DefaultProperties()
	props.SegmentSize, props.Segments = 10_000, 3
	p.send(wire.Header{Type: wire.ConnPropFinal, Props: props.Props()})
	item := func(n int) *Spec { return &Spec{Body: 100, Items: []Item{{Pos: 100, Len: n}}, Reply: 40} }
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
	if err := p.s.Call(9, callBody(9, 40), &CallChunks{}); err != nil {
		t.Fatal(err)
	}
	p.drain()
	p.send(wire.Header{XID: 9, Type: wire.Error, Failure: wire.Failure{Code: wire.ErrSegments, Max: 2}})
	if _, err := p.s.PlanCall(item(30_000)); !errors.Is(err, ErrTooLong) {
		t.Errorf("three segments of two: %v", err)
	}
	if _, err := p.s.PlanCall(item(20_000)); err != nil {
		t.Errorf("two segments of two: %v", err)
	}
}

// TestBrokenReply: a continued reply that goes on with something else ends its
// call, and the peer is told (draft section 6.3.9).
func TestBrokenReply(t *testing.T) {
	p := clientPeer(t, nil)
	for _, xid := range []uint32{9, 10} {
		if err := p.s.Call(xid, callBody(xid, 40), &CallChunks{}); err != nil {
			t.Fatal(err)
		}
	}
	p.drain()
	p.clear()
	p.send(wire.Header{XID: 9, Type: wire.ReplyMiddle, Remaining: 40}, replyBody(9, 40)...)
	p.send(wire.Header{XID: 10, Type: wire.ReplyInline}, replyBody(10, 40)...)
	var codes []uint32
	for _, h := range p.got {
		if h.Type != wire.Error || h.Failure.Code != wire.ErrInvalCont {
			t.Errorf("%+v", h)
		}
		codes = append(codes, h.XID)
	}
	if len(codes) != 2 || codes[0] != 9 || codes[1] != 10 {
		t.Errorf("errors for %v", codes)
	}
	if len(p.evs) != 1 || p.evs[0].XID != 9 || !errors.Is(p.evs[0].Err, ErrProtocol) {
		t.Errorf("%+v", p.evs)
	}
}

// TestPoisonedRest: after INVAL_CONT the rest of the message is discarded.
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

func TestNoWriteChunks(t *testing.T) {
	p := serverPeer(t, func(c *Config) { c.Limits.WriteChunks, c.Continue = 0, 0 })
	p.send(wire.Header{XID: 9, Type: wire.CallInline, Writes: []wire.Chunk{chunk(100)}}, callBody(9, 40)...)
	if len(p.got) != 1 || p.got[0].Failure.Code != wire.ErrReplyResource {
		t.Errorf("%+v", p.got)
	}
}

// TestVersion1Credits: one call until the first reply, then as many as were
// granted; a grant of zero is one (RFC 8166 section 3.3).
func TestVersion1Credits(t *testing.T) {
	cfg := DefaultConfig(false)
	cfg.Version = 1
	p := newPeer(t, cfg)
	for xid := range uint32(20) {
		if err := p.s.Call(100+xid, callBody(100+xid, 40), &CallChunks{}); err != nil {
			t.Fatal(err)
		}
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

// TestVersion1Replies: what a requester of version 1 does with bad ones.
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
			if err := p.s.Call(9, callBody(9, 40), &CallChunks{}); err != nil {
				t.Fatal(err)
			}
			p.drain()
			p.clear()
			c.h.Vers = 1
			if c.h.XID == 0 {
				c.h.XID = 9
			}
			p.send(c.h, c.body...)
			if (p.s.Outstanding() == 0) != c.over || len(p.got) > 0 {
				t.Errorf("%+v, sent %+v", p.evs, p.got)
			}
		})
	}
	cfg := DefaultConfig(false)
	cfg.Version = 1
	p := newPeer(t, cfg)
	if err := p.s.Call(9, callBody(9, 40), &CallChunks{}); err != nil {
		t.Fatal(err)
	}
	p.drain()
	p.raw((&wire.Header{XID: 9, Vers: 1, Type: wire.Error1, Failure: wire.Failure{Code: 77}}).Append(nil))
	if p.s.Outstanding() != 1 {
		t.Error("an error that is none ends the call")
	}
}

// TestVersion1Reverse: a client of version 1 takes reverse calls if it is set
// up for them, without chunks if it has none (RFC 8167 section 5.3).
func TestVersion1Reverse(t *testing.T) {
	for level := wire.ReverseNone; level <= wire.ReverseGeneral; level++ {
		cfg := DefaultConfig(false)
		cfg.Version, cfg.Props.Reverse = 1, level
		p := newPeer(t, cfg)
		p.send(wire.Header{XID: 5, Vers: 1, Type: wire.Msg1}, callBody(5, 40)...)
		p.send(wire.Header{XID: 6, Vers: 1, Type: wire.Msg1, Reads: []wire.ReadSegment{rseg(8, 1, 4)}}, callBody(6, 40)...)
		var calls, errs int
		for _, e := range p.evs {
			if e.Kind == EventCall {
				calls++
			}
		}
		for _, h := range p.got {
			if h.Type == wire.Error1 && h.XID == 6 && h.Failure.Code == wire.ErrChunk1 {
				errs++
			}
		}
		want := [][2]int{{0, 0}, {1, 1}, {1, 1}, {2, 0}}[level]
		if calls != want[0] || errs != want[1] {
			t.Errorf("level %d: %d calls, %d errors", level, calls, errs)
		}
	}
}

// TestFlood: a peer that sends more than it was granted is cut off.
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

// TestErrorFlood: who sends nothing but what must be answered by errors, and
// grants no credits for them, costs no more than a bound.
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
			s.Receive(append(c.first.Append(nil), make([]byte, 16)...))
		}
		b := append(c.flood.Append(nil), make([]byte, 16)...)
		var last Event
		for range 1000 {
			s.Receive(b)
			for e, ok := s.Event(); ok; e, ok = s.Event() {
				last = e
			}
			if s.Version() != 1 { // version 1 has no credits for errors: there the Sends that are under way are the bound
				for s.Poll(&o) {
				}
			}
		}
		if last.Kind != EventClose || !errors.Is(last.Err, ErrProtocol) || len(s.ctrl) > 100 {
			t.Errorf("%s: %+v, %d queued", c.name, last, len(s.ctrl))
		}
	}
}

// TestReplyFlood: who calls on and on, and takes no reply, costs no more than a
// bound; who takes them goes on for ever.
func TestReplyFlood(t *testing.T) {
	for _, c := range []struct {
		name   string
		octets int
		vers   uint32
		takes  bool
	}{
		{"many", 100, 2, false}, {"long", 25_000, 2, false}, {"version 1", 100, 1, false}, {"takes them", 100, 2, true}, {"takes them, version 1", 100, 1, true},
	} {
		s := New(DefaultConfig(true))
		var o Out
		var last Event
		queued, most, octets := 0, 0, 0
		for i := range uint32(5000) {
			h := wire.Header{XID: i + 1, Vers: c.vers, Credit: 2, Type: wire.CallInline}
			if c.vers == 1 {
				h.Type = wire.Msg1
			}
			if c.takes {
				h.Credit = i + 100
			}
			s.Receive(append(h.Append(nil), callBody(i+1, 40)...))
			for e, ok := s.Event(); ok; e, ok = s.Event() {
				last = e
				if e.Kind == EventCall {
					p, _, ok := s.PlanReply(e.Call, c.octets, nil)
					if !ok {
						t.Fatalf("%s: no plan", c.name)
					}
					s.Reply(e.Call, p, replyBody(i+1, c.octets))
				}
			}
			if c.vers == 2 || c.takes { // of version 1 Sends that are under way are the bound: none completes
				for s.Poll(&o) {
				}
			}
			queued, octets = len(s.queue), 0
			for _, m := range s.queue {
				octets += len(m.body)
			}
			if most = max(most, queued); queued != s.replies.n || octets != s.replies.octets {
				t.Fatalf("%s: %d replies with %d octets, counted %+v", c.name, queued, octets, s.replies)
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
