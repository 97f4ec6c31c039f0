package session

import (
	"encoding/binary"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// peer drives one Session with hand-made messages.
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

// call makes a call.
func (p *peer) call(xid uint32, body []byte, c *CallChunks) {
	p.t.Helper()
	if err := p.s.Call(xid, body, c); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) drain() {
	var o Out
	for p.s.PollTransmit(&o) {
		var h wire.Header
		b := append([]byte(nil), o.B...)
		vers := binary.BigEndian.Uint32(b[4:])
		if wire.Type(binary.BigEndian.Uint32(b[12:])) == wire.Error && p.s.Version() != 1 {
			b[4], b[5], b[6], b[7] = 0, 0, 0, 2 // the body is that of version 2 in any case
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
		e, ok := p.s.PollEvent()
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
	p.s.HandleMessage(b)
	p.drain()
}

// clear discards what was recorded.
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

// serverPeer returns a server that has received a client's first message.
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

// clientPeer returns a client whose server has answered.
func clientPeer(t *testing.T, change func(*Config)) *peer {
	cfg := DefaultConfig(false)
	if change != nil {
		change(&cfg)
	}
	p := newPeer(t, cfg)
	p.send(wire.Header{Type: wire.ConnPropFinal})
	if !p.s.ready {
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
