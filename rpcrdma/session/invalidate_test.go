package session

import (
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestInvalidate checks that Send with Invalidate is used if both ends have set R in their private data, or if a call
// of version 2 names the STag and no private data forbids it, and only for an STag that belongs to that call alone
// (RFC 8797 section 4.1, draft section 6.5).
func TestInvalidate(t *testing.T) {
	one := wire.Chunk{{Handle: 100, Length: 50, Offset: 4096}, {Handle: 100, Length: 50, Offset: 8192}}
	for _, c := range []struct {
		name string
		vers uint32
		mode Invalidation
		h    wire.Header
		want uint32
	}{
		{"without private data", 2, InvalidateNamed, wire.Header{InvHandle: 100, Writes: []wire.Chunk{one}}, 100},
		{"R is 0", 2, InvalidateNone, wire.Header{InvHandle: 100, Writes: []wire.Chunk{one}}, 0},
		{"R is 1", 2, InvalidateAny, wire.Header{InvHandle: 100, Writes: []wire.Chunk{one}}, 100},
		{"R is 1, one of several", 2, InvalidateAny, wire.Header{InvHandle: 101, Writes: []wire.Chunk{chunk(5, 5)}}, 101},
		{"the call names none", 2, InvalidateAny, wire.Header{Writes: []wire.Chunk{one}}, 0},
		{"it names what is in no chunk", 2, InvalidateAny, wire.Header{InvHandle: 7, Writes: []wire.Chunk{one}}, 0},
		{"without private data", 1, InvalidateNamed, wire.Header{Writes: []wire.Chunk{one}}, 0},
		{"R is 0", 1, InvalidateNone, wire.Header{Writes: []wire.Chunk{one}}, 0},
		{"R is 1", 1, InvalidateAny, wire.Header{Writes: []wire.Chunk{one}}, 100},
		{"R is 1, of a Reply chunk", 1, InvalidateAny, wire.Header{Reply: one}, 100},
		{"R is 1, of a Read chunk", 1, InvalidateAny, wire.Header{Reads: []wire.ReadSegment{rseg(8, 100, 4)}}, 100},
		{"R is 1, two STags", 1, InvalidateAny, wire.Header{Writes: []wire.Chunk{chunk(5, 5)}}, 0},
		{"R is 1, two STags in two chunks", 1, InvalidateAny, wire.Header{Writes: []wire.Chunk{one}, Reply: wire.Chunk{{Handle: 101, Length: 5}}}, 0},
		{"R is 1, no STag", 1, InvalidateAny, wire.Header{}, 0},
	} {
		t.Run(fmt.Sprintf("version %d, %s", c.vers, c.name), func(t *testing.T) {
			cfg := DefaultConfig(true)
			cfg.Invalidate = c.mode
			p := newPeer(t, cfg)
			if c.vers == 2 {
				p.send(wire.Header{Type: wire.ConnPropFinal})
			}
			arrive := func(xid uint32) {
				h := c.h
				h.XID, h.Vers, h.Type, h.Credit = xid, c.vers, wire.CallInline, 1000
				if c.vers == 1 {
					h.Type = wire.Msg1
				}
				p.clear()
				p.s.HandleMessage(append(h.Append(nil), callBody(xid, 40)...))
			}
			arrived := func(xid uint32) *Call {
				p.drain()
				last := p.evs[len(p.evs)-1]
				if last.Kind != EventCall || last.XID != xid {
					t.Fatalf("%+v", p.evs)
				}
				return last.Call
			}
			call := func(xid uint32) *Call {
				arrive(xid)
				return arrived(xid)
			}
			// reply replies to in, and calls late before the reply is sent.
			reply := func(in *Call, late func()) (inv uint32) {
				plan, _, ok := p.s.PlanReply(in, 40, nil)
				if !ok {
					t.Fatal("no plan")
				}
				p.s.Reply(in, plan, replyBody(in.XID, 40))
				late()
				var o Out
				for p.s.PollTransmit(&o) {
					var h wire.Header
					if _, err := h.Decode(o.B); err != nil {
						t.Fatal(err)
					}
					if h.XID == in.XID && (h.Type == wire.ReplyInline || h.Type == wire.Msg1) {
						inv = o.Inv
					} else if o.Inv != 0 {
						t.Errorf("message for %d invalidates %#x", h.XID, o.Inv)
					}
				}
				return inv
			}
			nothing := func() {}
			if got := reply(call(9), nothing); got != c.want {
				t.Errorf("it invalidates %#x, not %#x", got, c.want)
			}
			// Two calls at once with the same STags: the first reply must not invalidate them, even if it is made before the
			// second call arrives.
			first, second := call(10), call(11)
			if got := reply(first, nothing); got != 0 {
				t.Errorf("it invalidates %#x, which another call has", got)
			}
			if got := reply(second, func() { arrive(12) }); got != 0 {
				t.Errorf("it invalidates %#x, which a later call has", got)
			}
			if got := reply(arrived(12), nothing); got != c.want {
				t.Errorf("the last invalidates %#x, not %#x", got, c.want)
			}
			// An error is no reply.
			p.s.Fail(call(13), wire.Failure{Code: wire.ErrSystem})
			var o Out
			for p.s.PollTransmit(&o) {
				if o.Inv != 0 {
					t.Errorf("an error invalidates %#x", o.Inv)
				}
			}
			if len(p.s.named) != 0 {
				t.Errorf("still counted: %v", p.s.named)
			}
		})
	}
}
