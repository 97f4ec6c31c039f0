package rpcrdma

import (
	"errors"
	"slices"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/spin"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// answer handles a call in its own goroutine. Credits bound the number of goroutines.
func (c *Conn) answer(in *session.Call) {
	defer c.serve.Done()
	defer c.serving.Add(-1)
	var held []*buffer
	defer func() {
		for _, b := range held {
			b.release()
		}
	}()
	alloc := func(n, want int) (*buffer, error) { return c.hold(n, want, &held) }
	m, f, err := c.fetch(in, alloc)
	if err != nil {
		if errors.Is(err, errPlace) {
			c.reply(in, rpc.GarbageReply(in.XID), &held)
			return
		}
		c.refuse(in, f)
		return
	}
	if c.e.cfg.Server == nil {
		c.refuse(in, wire.Failure{Code: wire.ErrSystem})
		return
	}
	reply, ok := c.e.cfg.Server.Serve(c.ctx, c.peer, m, func(n int) ([]byte, error) {
		b, err := alloc(n, n)
		if err != nil {
			return nil, err
		}
		return b.b, nil
	})
	if !ok {
		c.refuse(in, wire.Failure{Code: wire.ErrBadXDR})
		return
	}
	if len(reply.Body) == 0 { // a call-only procedure
		c.mu.Lock()
		c.s.Drop(in)
		c.turn()
		c.mu.Unlock()
		return
	}
	if cred, ok := rpc.GSS(m); ok && cred.Whole() {
		reply = rpc.Msg{Body: reply.AppendFlat(nil)}
	}
	c.reply(in, reply, &held)
	if len(in.Writes) > 0 {
		// A daemon on the same CPU would otherwise send the data only after all other calls that can run: nothing is
		// on the wire until then, and the data has left the cache.
		spin.Yield()
	}
}

// refuse reports the failure of a call to the peer.
func (c *Conn) refuse(in *session.Call, f wire.Failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Fail(in, f)
	c.turn()
}

// hold allocates n bytes, like take, for a call that already has the buffers in held.
func (c *Conn) hold(n, want int, held *[]*buffer) (*buffer, error) {
	own := 0
	for _, b := range *held {
		own += b.size
	}
	b, err := c.e.pool.take(c.ctx, n, want, c.held, own)
	if err == nil {
		*held = append(*held, b)
	}
	return b, err
}

var errPlace = errors.New("rpcrdma: a chunk has no place in the message")

// A chunk is a chunk of a call and the buffer that it is read into, or nil if it is empty.
type chunk struct {
	segs []wire.ReadSegment
	b    *buffer
}

// length returns the sum of the lengths of segs.
func length(segs []wire.ReadSegment) (n int) {
	for _, g := range segs {
		n += int(g.Length)
	}
	return n
}

// chunksOf returns the chunks of a call with a buffer for each: the Call chunk, if there is one, then the Read
// chunks, whose positions it returns too.
func chunksOf(in *session.Call, alloc func(n, want int) (*buffer, error)) (chunks []chunk, pos []uint32, err error) {
	if len(in.Ext) > 0 {
		chunks = append(chunks, chunk{segs: in.Ext})
	}
	for l := in.Reads; len(l) > 0; {
		k := 1
		for k < len(l) && l[k].Position == l[0].Position {
			k++
		}
		chunks, pos = append(chunks, chunk{segs: l[:k]}), append(pos, l[0].Position)
		l = l[k:]
	}
	left := length(in.Ext) + length(in.Reads) // bytes not yet allocated
	for i := range chunks {
		k := &chunks[i]
		n := length(k.segs)
		if n == 0 {
			continue
		}
		if k.b, err = alloc(n, left); err != nil {
			return nil, nil, err
		}
		left -= n
	}
	return chunks, pos, nil
}

// read reads chunks into their buffers.
func (c *Conn) read(chunks []chunk) (err error) {
	n := 0
	for _, k := range chunks {
		n += len(k.segs)
	}
	done := make(chan error, n)
	c.mu.Lock()
	for _, k := range chunks {
		off := 0
		for _, g := range k.segs {
			if g.Length == 0 {
				done <- nil
				continue
			}
			if !c.waitRoom() {
				done <- c.err
				continue
			}
			wr := iwarp.SendWR{Op: iwarp.OpRead, SGEs: []iwarp.SGE{k.b.sge(off, int(g.Length))}, RKey: g.Handle, Remote: g.Offset}
			if err := c.post(&wr, &op{slot: -1, done: func(err error) { done <- err }}); err != nil {
				done <- err
			}
			c.count.ReadBytes += uint64(g.Length)
			off += int(g.Length)
		}
	}
	c.mu.Unlock()
	for range n {
		err = errors.Join(err, <-done)
	}
	return err
}

// fetch reads the chunks of a call and assembles its message. On error, f is the failure to report,
// unless err is errPlace.
func (c *Conn) fetch(in *session.Call, alloc func(n, want int) (*buffer, error)) (m rpc.Msg, f wire.Failure, err error) {
	f = wire.Failure{Code: wire.ErrSystem}
	chunks, pos, err := chunksOf(in, alloc)
	if err == nil && len(chunks) > 0 {
		err = c.read(chunks)
	}
	if err != nil {
		return m, f, err
	}
	m.Body = in.Body
	if len(in.Ext) > 0 {
		m.Body = slices.Clone(chunks[0].b.b) // outlives the buffer if a reply quotes it
		chunks = chunks[1:]
		if !session.CheckBody(in.XID, m.Body) {
			return m, wire.Failure{Code: wire.ErrBadXDR}, rpc.ErrXDR
		}
	}
	items := make([]rpc.Item, len(chunks))
	for i, k := range chunks {
		if k.b != nil {
			items[i].Data = k.b.b
		}
	}
	m, ok := rpc.Place(m.Body, items, pos)
	if !ok {
		return m, f, errPlace
	}
	return m, f, nil
}

// reply sends a reply. Buffers in held that it uses are released when it has been sent.
func (c *Conn) reply(in *session.Call, m rpc.Msg, held *[]*buffer) {
	items := make([]int, len(m.Items))
	for i, it := range m.Items {
		items[i] = len(it.Data)
	}
	c.mu.Lock()
	plan, f, ok := c.s.PlanReply(in, len(m.Body), items)
	c.mu.Unlock()
	if !ok {
		c.refuse(in, f)
		return
	}
	// Items not moved by RDMA Write are part of the message.
	body := flatFrom(m, plan.Reduce)
	src, err := c.sources(plan, m.Items, body, held)
	if err != nil {
		c.refuse(in, wire.Failure{Code: wire.ErrSystem})
		return
	}
	if plan.External() {
		body = nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.write(plan, src, held) {
		c.orphan(held)
		return
	}
	c.s.Reply(in, plan, body)
	c.turn()
}

// sources returns the registered memory of what plan moves by RDMA Write: of each item and, last, of the message.
func (c *Conn) sources(plan *session.ReplyPlan, items []rpc.Item, body []byte, held *[]*buffer) (src []*buffer, err error) {
	src = make([]*buffer, len(items)+1)
	for i, it := range items {
		if plan.Reduce[i] && len(it.Data) > 0 {
			if src[i], err = c.registered(it.Data, held); err != nil {
				return nil, err
			}
		}
	}
	if plan.External() {
		src[len(items)], err = c.registered(body, held)
	}
	return src, err
}

// registered returns the buffer of held that begins with data, or else adds one to it and copies data there.
func (c *Conn) registered(data []byte, held *[]*buffer) (*buffer, error) {
	for _, b := range *held {
		if b.p != nil && b.holds(data) {
			return b, nil
		}
	}
	b, err := c.hold(len(data), len(data), held)
	if err == nil {
		copy(b.b, data)
	}
	return b, err
}

// write posts the RDMA Writes of plan from src. The last one frees held. It returns false if the connection ended. Called with mu held.
func (c *Conn) write(plan *session.ReplyPlan, src []*buffer, held *[]*buffer) bool {
	for i, w := range plan.Copies {
		b := src[len(src)-1]
		if w.Item >= 0 {
			b = src[w.Item]
		}
		if !c.waitRoom() {
			return false
		}
		wr := iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{b.sge(w.Off, int(w.To.Length))}, RKey: w.To.Handle, Remote: w.To.Offset}
		o := &op{slot: -1}
		if i == len(plan.Copies)-1 { // work requests complete in order
			o.free, *held = *held, nil
		}
		if c.post(&wr, o) != nil {
			*held = append(*held, o.free...)
			return false
		}
		c.count.WriteBytes += uint64(w.To.Length)
	}
	return true
}

// orphan transfers buffers to the failing connection, since Writes from them may be outstanding
// until the queue pair is destroyed. Called with mu held.
func (c *Conn) orphan(held *[]*buffer) {
	if c.ops == nil {
		return // already destroyed
	}
	c.nextID++
	c.ops[c.nextID&^recvID] = &op{slot: -1, free: *held}
	*held = nil
}

// flatFrom returns the message with all items inserted, except those that are reduced.
func flatFrom(m rpc.Msg, reduce []bool) []byte {
	var rest []rpc.Item
	for i, it := range m.Items {
		if !reduce[i] {
			rest = append(rest, it)
		}
	}
	if len(rest) == 0 {
		return m.Body
	}
	in := rpc.Msg{Body: m.Body, Items: rest}
	return in.AppendFlat(make([]byte, 0, in.Len()))
}
