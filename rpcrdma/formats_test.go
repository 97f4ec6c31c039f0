package rpcrdma_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// tape records the messages of one end.
type tape struct {
	t  *testing.T
	mu sync.Mutex
	l  []taped
}

type taped struct {
	sent bool
	n    int // bytes of the Send
	h    wire.Header
	body []byte
}

func (k *tape) wire(_ *rpcrdma.Conn, sent bool, b []byte) {
	m := taped{sent: sent, n: len(b)}
	b = bytes.Clone(b)
	n, err := m.h.Decode(b)
	if err != nil {
		k.t.Errorf("%x: %v", b, err)
	}
	m.body = b[n:]
	k.mu.Lock()
	defer k.mu.Unlock()
	k.l = append(k.l, m)
}

// take returns what was recorded since the last call, without Grants.
func (k *tape) take() (sent, got []taped) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, m := range k.l {
		switch {
		case m.h.Vers == 2 && m.h.Type == wire.Grant:
		case m.sent:
			sent = append(sent, m)
		default:
			got = append(got, m)
		}
	}
	k.l = nil
	return sent, got
}

// inline is the threshold of both versions and directions, in bytes.
const inline = 4096

// judge checks the messages of a call and its reply against the rules of both versions. It derives them from the
// unreduced messages, without the code under test.
type judge struct {
	*rig
	t     *testing.T
	tape  *tape
	vers  uint32
	moved [2]uint64      // bytes moved by RDMA Read and by RDMA Write
	forms map[string]int // number of uses of each
}

func padded(n int) int { return (n + 3) &^ 3 }

// cut returns a message without the bytes of the items in out.
func cut(m rpc.Msg, out []bool) []byte {
	flat := m.AppendFlat(nil)
	moved := 0
	for i, it := range m.Items {
		n := padded(len(it.Data))
		if at := it.Pos + moved; out[i] {
			flat = slices.Delete(flat, at, at+n)
		} else {
			moved += n
		}
	}
	return flat
}

// exchange makes a call with args and checks it and its reply, which has results, against the rules.
func (j *judge) exchange(proc uint32, args, results func(*rpc.Writer), q rpcrdma.Call) {
	t := j.t
	t.Helper()
	var call, reply rpc.Writer
	(&rpc.Call{Prog: prog, Vers: 1, Proc: proc}).Start(&call)
	args(&call)
	reply.U32(0, 1, 0, 0, 0, 0)
	results(&reply)
	j.tape.take()
	_, resp, err := j.c.Do(j.ctx, rpc.Call{Prog: prog, Vers: 1, Proc: proc}, args, q)
	if err != nil {
		t.Fatalf("procedure %d with %d bytes: %v", proc, call.Len(), err)
	}
	resp.Release()
	sent, got := j.tape.take()
	name := fmt.Sprintf("procedure %d, call of %d, reply of %d", proc, call.Len(), reply.Len())
	bad := func(format string, a ...any) {
		t.Helper()
		t.Errorf("%s: %s", name, fmt.Sprintf(format, a...))
	}
	if len(sent) == 0 || len(got) == 0 {
		t.Fatalf("%s: %d messages, %d answers", name, len(sent), len(got))
	}
	xid := sent[0].h.XID
	binary.BigEndian.PutUint32(call.Body, xid)
	binary.BigEndian.PutUint32(reply.Body, xid)
	for _, m := range append(slices.Clone(sent), got...) {
		if m.h.XID != xid || m.h.Vers != j.vers || m.n > inline {
			bad("message of %d bytes: %+v", m.n, m.h)
		}
	}
	payload := func(l []taped, middle, last, external wire.Type) (b []byte) {
		for i, m := range l {
			b = append(b, m.body...)
			switch {
			case i == len(l)-1 && (m.h.Type == last || m.h.Type == external):
			case j.vers == 2 && m.h.Type == middle:
				rest := 0
				for _, o := range l[i+1:] {
					rest += len(o.body)
				}
				if int(m.h.Remaining) != rest || len(m.body)%4 != 0 {
					bad("a piece of %d with %d to come, not %d", len(m.body), m.h.Remaining, rest)
				}
			default:
				bad("message %d of %d is %v", i, len(l), m.h.Type)
			}
		}
		return b
	}

	// The call.
	h := &sent[len(sent)-1].h
	ext := wire.CallExternal
	var body []byte
	if j.vers == 1 {
		ext = wire.NoMsg1
		body = payload(sent, 0, wire.Msg1, ext)
		for len(h.Reads) > 0 && h.Reads[0].Position == 0 {
			h.Call, h.Reads = append(h.Call, h.Reads[0]), h.Reads[1:]
		}
	} else {
		body = payload(sent, wire.CallMiddle, wire.CallInline, ext)
	}
	out := make([]bool, len(call.Items))
	reads, moved := h.Reads, 0
	for i, it := range call.Items {
		at, n := uint32(it.Pos+moved), uint64(0)
		moved += padded(len(it.Data))
		for len(reads) > 0 && reads[0].Position == at {
			out[i] = true
			n += uint64(reads[0].Length)
			reads = reads[1:]
		}
		if out[i] && n != uint64(len(it.Data)) {
			bad("item %d of %d bytes in a chunk of %d", i, len(it.Data), n)
		}
		j.moved[0] += n
	}
	if len(reads) > 0 {
		bad("no item is at position %d", reads[0].Position)
	}
	want := cut(call.Msg, out)
	if h.Type == ext {
		n := 0
		for _, g := range h.Call {
			if g.Position != 0 {
				bad("a Call chunk has position %d", g.Position)
			}
			n += int(g.Length)
		}
		if n != len(want) || len(body) != 0 || n+h.Len() <= inline {
			bad("a Call chunk of %d bytes for a message of %d", n, len(want))
		}
		j.moved[0] += uint64(n)
		j.forms["special call"]++
	} else if !bytes.Equal(body, want) {
		bad("the message differs: %d bytes, not %d", len(body), len(want))
	}
	if slices.Contains(out, true) {
		j.forms["Read chunk"]++
		if call.Len()+h.Len()-24*len(h.Reads) <= inline {
			bad("a Read chunk where all would fit inline")
		}
	}
	if len(sent) > 1 {
		j.forms["continued call"]++
		if len(want)+h.Len() <= inline {
			bad("%d messages for what fits into one", len(sent))
		}
	}
	if len(h.Writes) != 0 && len(h.Writes) != len(q.Results) {
		bad("%d Write chunks for %d results", len(h.Writes), len(q.Results))
	}
	longest := q.Reply
	for i, n := range q.Results {
		if len(h.Writes) == 0 {
			longest += padded(n)
		} else if h.Writes[i].Len() != uint64(n) {
			bad("a Write chunk of %d bytes for a result of %d", h.Writes[i].Len(), n)
		}
	}
	if fits := longest+28 <= inline; fits == (h.Reply != nil) && len(h.Writes) == 0 || h.Reply != nil && h.Reply.Len() < uint64(longest) {
		bad("a Reply chunk of %d bytes for a reply of %d", h.Reply.Len(), longest)
	}

	// The reply.
	rh := &got[len(got)-1].h
	ext = wire.ReplyExternal
	if j.vers == 1 {
		ext = wire.NoMsg1
		body = payload(got, 0, wire.Msg1, ext)
		if len(rh.Reads) > 0 || (rh.Reply == nil) != (h.Reply == nil) {
			bad("a reply with %d Read segments; a Reply chunk: %v for %v", len(rh.Reads), rh.Reply, h.Reply)
		}
	} else {
		body = payload(got, wire.ReplyMiddle, wire.ReplyInline, ext)
	}
	back := func(got, want wire.Chunk) {
		if len(got) != len(want) {
			bad("a chunk of %d segments, not %d", len(got), len(want))
			return
		}
		for i, g := range got {
			if w := want[i]; g.Handle != w.Handle || g.Offset != w.Offset || g.Length > w.Length {
				bad("segment %+v of %+v", g, w)
			}
		}
	}
	if len(rh.Writes) != len(h.Writes) {
		bad("%d of %d Write chunks come back", len(rh.Writes), len(h.Writes))
	}
	out = make([]bool, len(reply.Items))
	for i, c := range rh.Writes {
		back(c, h.Writes[i])
		switch {
		case c.Len() == 0:
		case i >= len(reply.Items) || c.Len() != uint64(len(reply.Items[i].Data)):
			bad("%d bytes in Write chunk %d", c.Len(), i)
		default:
			out[i] = true
			j.moved[1] += c.Len()
			j.forms["Write chunk"]++
		}
	}
	for i, it := range reply.Items {
		if i < len(h.Writes) && h.Writes[i].Len() >= uint64(len(it.Data)) && len(it.Data) > 0 && !out[i] {
			bad("result %d does not use its chunk", i)
		}
	}
	want = cut(reply.Msg, out)
	if rh.Type == ext {
		back(rh.Reply, h.Reply)
		head := rh.Len() // the header of an inline reply of version 1, including the Reply chunk
		if j.vers == 2 {
			head -= 4 + 16*len(rh.Reply)
		}
		if rh.Reply.Len() != uint64(len(want)) || len(body) != 0 || len(want)+head <= inline {
			bad("a Reply chunk with %d bytes for a message of %d", rh.Reply.Len(), len(want))
		}
		j.moved[1] += rh.Reply.Len()
		j.forms["special reply"]++
	} else if !bytes.Equal(body, want) || rh.Reply.Len() != 0 {
		bad("the reply differs: %d bytes, not %d", len(body), len(want))
	}
	if len(got) > 1 {
		j.forms["continued reply"]++
		if len(want)+rh.Len() <= inline || h.Reply.Len() >= uint64(len(want)) {
			bad("%d messages for a reply that has room elsewhere", len(got))
		}
	}
}

// all makes calls of every procedure with n bytes.
func (j *judge) all(n int) {
	j.t.Helper()
	data := fill(n, 1)
	two := data[:min(n, 3001)]
	opaque := func(w *rpc.Writer) { w.Opaque(data) }
	item := func(w *rpc.Writer) { w.Item(data) }
	j.exchange(1, opaque, opaque, rpcrdma.Call{Reply: 24 + 4 + padded(n)})
	if j.vers == 2 { // the reply finds no chunk
		j.exchange(1, opaque, opaque, rpcrdma.Call{Reply: 100})
	}
	j.exchange(2, item, func(w *rpc.Writer) { w.U32(uint32(n), sum(data)) }, rpcrdma.Call{Reply: 64})
	for _, room := range []int{n, n + 5} {
		j.exchange(3, func(w *rpc.Writer) { w.U32(uint32(n)) }, func(w *rpc.Writer) { w.Item(fill(n, 3)) }, rpcrdma.Call{Results: []int{room}, Reply: 64})
	}
	j.exchange(4, item, item, rpcrdma.Call{Results: []int{n}, Reply: 64})
	j.exchange(6, func(w *rpc.Writer) { w.U32(uint32(n)) }, func(w *rpc.Writer) { w.Opaque(make([]byte, n)) }, rpcrdma.Call{Reply: 64 + padded(n)})
	args := func(w *rpc.Writer) { w.Item(two); w.U32(99); w.Item(data); w.U32(77) }
	res := func(w *rpc.Writer) { w.Item(data); w.U32(99 + 77); w.Item(two) }
	j.exchange(7, args, res, rpcrdma.Call{Results: []int{n, len(two)}, Reply: 64})
}

// TestSizesAndFormats checks calls and replies of all formats, with sizes around the thresholds, as the client sees
// them on the wire.
func TestSizesAndFormats(t *testing.T) {
	for _, v := range []struct {
		name           string
		client, server int
	}{{"2", 2, 2}, {"1", 1, 2}, {"fallback", 2, 1}} {
		t.Run("version "+v.name, func(t *testing.T) {
			k := &tape{t: t}
			g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version, c.Wire = v.client, k.wire }, func(c *rpcrdma.Config) { c.Session.Version = v.server })
			conn, err := g.c.Conn(g.ctx)
			if err != nil || conn.Version() != min(v.client, v.server) {
				t.Fatal(conn.Version(), err)
			}
			// The first messages: the client's properties fit a server of version 1, which answers with ERR_VERS;
			// there is no second attempt.
			sent, got := k.take()
			if v.client == 2 {
				if len(sent) != 1 || sent[0].h.Vers != 2 || sent[0].h.Type != wire.ConnPropFinal || sent[0].n > 1024 || len(got) != 1 || got[0].h.XID != sent[0].h.XID {
					t.Fatalf("%+v, %+v", sent, got)
				}
				if v.server == 1 && got[0].h.Failure != (wire.Failure{Code: wire.ErrVers, Low: 1, High: 1}) || v.server == 2 && got[0].h.Type != wire.ConnPropFinal {
					t.Errorf("%+v", got)
				}
			} else if len(sent)+len(got) != 0 {
				t.Errorf("%+v, %+v", sent, got)
			}
			if n := g.b.Server().Status().Qps; n != 1 {
				t.Errorf("%d connections", n)
			}
			j := &judge{rig: g, t: t, tape: k, vers: uint32(min(v.client, v.server)), forms: make(map[string]int)}
			for _, n := range sizes {
				j.all(n)
				g.check(n) // the data
				k.take()
			}
			forms := []string{"special call", "Read chunk", "special reply", "Write chunk"}
			if j.vers == 2 {
				forms = append(forms, "continued call", "continued reply")
			}
			for _, f := range forms {
				if j.forms[f] == 0 {
					t.Errorf("no %s", f)
				}
			}
			// The next connection starts with the version that the server supports.
			for _, s := range g.se.Conns() {
				s.Close()
			}
			<-conn.Done()
			g.check(100)
			sent, _ = k.take()
			if len(sent) == 0 || sent[0].h.Vers != j.vers {
				t.Errorf("again: %+v", sent)
			}
		})
	}
}

// TestMoved checks that exactly the bytes that chunks name move by RDMA Read and Write.
func TestMoved(t *testing.T) {
	for _, v := range []int{1, 2} {
		k := &tape{t: t}
		g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version, c.Wire = v, k.wire }, nil)
		if _, err := g.c.Conn(g.ctx); err != nil {
			t.Fatal(err)
		}
		j := &judge{rig: g, t: t, tape: k, vers: uint32(v), forms: make(map[string]int)}
		for _, n := range []int{1, 4099, 65_537} {
			j.all(n)
		}
		c := g.se.Conns()[0].Counters()
		if c.ReadBytes != j.moved[0] || c.WriteBytes != j.moved[1] || j.moved[0] < 65_537 || j.moved[1] < 65_537 {
			t.Errorf("version %d: %d and %d bytes were moved, the chunks name %v", v, c.ReadBytes, c.WriteBytes, j.moved)
		}
	}
}
