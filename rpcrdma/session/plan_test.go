package session

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestPlanReply checks how a responder uses the chunks of a call.
func TestPlanReply(t *testing.T) {
	seg := func(n uint32) wire.Segment { return wire.Segment{Handle: 7, Length: n, Offset: 1000} }
	for _, c := range []struct {
		name    string
		version int
		cont    int
		writes  []wire.Chunk
		reply   wire.Chunk
		body    int
		items   []int
		fail    wire.Failure
		typ     wire.Type
		lens    [][]uint32 // of the returned Write chunks
		replyTo uint32     // bytes in the Reply chunk
	}{
		{name: "no item", version: 2, writes: []wire.Chunk{{seg(100), seg(50)}}, body: 40, typ: wire.ReplyInline, lens: [][]uint32{{0, 0}}},
		{name: "an item over two segments", version: 2, writes: []wire.Chunk{{seg(100), seg(50), seg(10)}}, body: 40, items: []int{120}, typ: wire.ReplyInline, lens: [][]uint32{{100, 20, 0}}},
		{name: "no padding is written", version: 2, writes: []wire.Chunk{{seg(5)}}, body: 40, items: []int{5}, typ: wire.ReplyInline, lens: [][]uint32{{5}}},
		{name: "an empty chunk: inline", version: 2, writes: []wire.Chunk{{}, {seg(50)}}, body: 40, items: []int{30, 40}, typ: wire.ReplyInline, lens: [][]uint32{{}, {40}}},
		{name: "an empty chunk, version 1", version: 1, writes: []wire.Chunk{{}, {seg(50)}}, body: 40, items: []int{30, 40}, typ: wire.Msg1, lens: [][]uint32{{}, {40}}},
		{name: "more items than chunks", version: 2, writes: []wire.Chunk{{seg(50)}}, body: 40, items: []int{30, 40}, typ: wire.ReplyInline, lens: [][]uint32{{30}}},
		{name: "too small, inline", version: 2, writes: []wire.Chunk{{seg(10)}}, body: 40, items: []int{30}, typ: wire.ReplyInline, lens: [][]uint32{{0}}},
		{name: "too small by a byte, inline", version: 2, writes: []wire.Chunk{{seg(29)}}, body: 40, items: []int{30}, typ: wire.ReplyInline, lens: [][]uint32{{0}}},
		{name: "too small, by the Reply chunk", version: 2, writes: []wire.Chunk{{seg(10)}}, reply: wire.Chunk{seg(10_000)}, body: 40, items: []int{9000}, typ: wire.ReplyExternal, lens: [][]uint32{{0}}, replyTo: 9040},
		{name: "too small, continued", version: 2, cont: 8, writes: []wire.Chunk{{seg(10)}}, body: 40, items: []int{9000}, typ: wire.ReplyInline, lens: [][]uint32{{0}}},
		{name: "too small, no way", version: 2, writes: []wire.Chunk{{seg(9000)}, {seg(10)}}, body: 40, items: []int{9000, 9001}, fail: wire.Failure{Code: wire.ErrWriteResource, Index: 2, Needed: 9001}},
		{name: "the Reply chunk unused", version: 2, reply: wire.Chunk{seg(10_000)}, body: 4000, typ: wire.ReplyInline},
		{name: "the Reply chunk unused, version 1", version: 1, reply: wire.Chunk{seg(10_000)}, body: 400, typ: wire.Msg1},
		{name: "the Reply chunk used", version: 2, cont: 8, reply: wire.Chunk{seg(4000), seg(4000)}, body: 5000, typ: wire.ReplyExternal, replyTo: 5000},
		{name: "the Reply chunk used, version 1", version: 1, reply: wire.Chunk{seg(4000), seg(4000)}, body: 5000, typ: wire.NoMsg1, replyTo: 5000},
		{name: "the longest inline reply", version: 2, reply: wire.Chunk{seg(10_000)}, body: 4096 - 20, typ: wire.ReplyInline},
		{name: "a word more", version: 2, reply: wire.Chunk{seg(10_000)}, body: 4096 - 16, typ: wire.ReplyExternal, replyTo: 4096 - 16},
		{name: "the longest inline reply, version 1", version: 1, reply: wire.Chunk{seg(10_000)}, body: 1024 - 48, typ: wire.Msg1},
		{name: "a word more, version 1", version: 1, reply: wire.Chunk{seg(10_000)}, body: 1024 - 44, typ: wire.NoMsg1, replyTo: 1024 - 44},
		{name: "the Reply chunk too small", version: 2, reply: wire.Chunk{seg(4999)}, body: 5000, fail: wire.Failure{Code: wire.ErrReplyResource, Needed: 5000}},
		{name: "the Reply chunk too small, version 1", version: 1, reply: wire.Chunk{seg(4999)}, body: 5000, fail: wire.Failure{Code: wire.ErrChunk1}},
		{name: "the Reply chunk too small for an item too", version: 2, reply: wire.Chunk{seg(4999)}, body: 3000, items: []int{2001}, fail: wire.Failure{Code: wire.ErrReplyResource, Needed: 5004}},
		{name: "an empty chunk, and no other way", version: 2, writes: []wire.Chunk{{}}, body: 40, items: []int{9000}, fail: wire.Failure{Code: wire.ErrReplyResource, Needed: 9040}},
		{name: "none", version: 2, body: 5000, fail: wire.Failure{Code: wire.ErrReplyResource, Needed: 5000}},
		{name: "a reduced item and the Reply chunk", version: 2, writes: []wire.Chunk{{seg(9000)}}, reply: wire.Chunk{seg(6000)}, body: 5000, items: []int{9000}, typ: wire.ReplyExternal, lens: [][]uint32{{9000}}, replyTo: 5000},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := DefaultConfig(true)
			cfg.Continue = c.cont
			p := newPeer(t, cfg)
			h := wire.Header{XID: 9, Vers: uint32(c.version), Type: wire.CallInline, Writes: c.writes, Reply: c.reply}
			if c.version == 1 {
				h.Type = wire.Msg1
			}
			p.send(h, callBody(9, 40)...)
			in := p.evs[len(p.evs)-1].Call
			plan, f, ok := p.s.PlanReply(in, c.body, c.items)
			if !ok {
				if f != c.fail {
					t.Errorf("%+v", f)
				}
				return
			}
			if c.fail.Code != 0 {
				t.Fatalf("%+v", plan)
			}
			var lens [][]uint32
			for _, ch := range plan.hdr.Writes {
				l := []uint32{}
				for i, g := range ch {
					l = append(l, g.Length)
					if g.Handle != 7 || g.Offset != 1000 {
						t.Errorf("segment %d: %+v", i, g)
					}
				}
				lens = append(lens, l)
			}
			if d := cmp.Diff(c.lens, lens); d != "" {
				t.Error(d)
			}
			if plan.hdr.Type != c.typ || uint32(plan.hdr.Reply.Len()) != c.replyTo {
				t.Errorf("%v with %d bytes in the Reply chunk", plan.hdr.Type, plan.hdr.Reply.Len())
			}
			if c.version == 1 && (plan.hdr.Reply == nil) != (c.reply == nil) {
				t.Error("version 1 gives the Reply chunk back")
			}
			var n int
			for _, w := range plan.Copies {
				n += int(w.To.Length)
			}
			want := int(c.replyTo)
			for i, size := range c.items {
				if plan.Reduce[i] {
					want += size
				}
			}
			if n != want {
				t.Errorf("%d bytes are written, not %d", n, want)
			}
		})
	}
}
