package ctrl

import (
	"fmt"
	"sync"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// srq is a receive queue shared by several queue pairs, on any worker. It is a verbs.RecvSource with a lock.
type srq struct {
	sess          *session
	handle, index uint32
	pd            *pd
	depth, maxSGE int
	size          uint64 // bytes, for the quota
	uses          int    // queue pairs that use it
	onLimit       func() // called from a worker

	ring *shm.RQ // only workers read it, with mu held

	mu     sync.Mutex // guards the rest
	limit  int        // 0 if not armed
	posted int        // receives in the ring when a worker last read it
	taken  uint64
	short  uint64 // messages without a receive
}

// NextRecv implements verbs.RecvSource.
func (q *srq) NextRecv(wr *verbs.RecvWR) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.ring.NextRecv(wr) {
		q.short++
		q.posted = 0
		return false
	}
	q.taken++
	q.posted = q.ring.Posted()
	if q.limit > 0 && q.posted < q.limit {
		q.limit = 0
		q.onLimit()
	}
	return true
}

// arm sets the limit; 0 disarms it. The event follows when a worker next takes a receive and
// fewer than limit remain, even if fewer remain already.
func (q *srq) arm(limit int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.limit = limit
}

func (c *session) createSRQ(r *ctrlpb.CreateSRQ, reply *ctrlpb.Reply) ([]int, error) {
	s := c.srv
	if err := c.checkQueue("shared receive queue", r.Depth, r.MaxSge); err != nil {
		return nil, err
	}
	if r.Limit > r.Depth {
		return nil, errorf(invalid, "ctrl: a limit of %d receives exceeds the depth %d of the queue", r.Limit, r.Depth)
	}
	q := &srq{sess: c, depth: int(r.Depth), maxSGE: int(r.MaxSge), limit: int(r.Limit), size: 8192 + 2*entries(r.Depth)*(64+16*uint64(r.MaxSge))}
	s.mu.Lock()
	p, err := c.pdOf(r.Pd)
	if err == nil {
		err = c.takeSized(resSRQs, resRings, q.size)
	}
	if err != nil {
		s.mu.Unlock()
		return nil, err
	}
	p.uses++
	s.mu.Unlock()

	q.ring, err = shm.CreateRQ(q.depth, q.maxSGE)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		p.uses--
		c.giveSized(resSRQs, resRings, q.size)
		return nil, errorf(internal, "ctrl: shared receive queue: %w", err)
	}
	s.lastIndex++
	q.handle, q.index, q.pd = c.newHandle(), s.lastIndex, p
	q.ring.OnFault = c.ringFault(fmt.Sprintf("producer index of shared receive queue %d", q.handle))
	q.onLimit = func() { go c.srqLimit(q) }
	c.srqs[q.handle] = q
	reply.Body = &ctrlpb.Reply_Srq{Srq: &ctrlpb.SRQReply{Srq: q.handle, Depth: r.Depth, MaxSge: r.MaxSge}}
	return []int{q.ring.TakeFD()}, nil
}

// srqLimit reports the limit event to the client.
func (c *session) srqLimit(q *srq) {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	if c.srqs[q.handle] == q {
		c.event(&ctrlpb.Event{Body: &ctrlpb.Event_AsyncError{AsyncError: &ctrlpb.AsyncError{Srq: q.handle, Kind: ctrlpb.AsyncKind_ASYNC_SRQ_LIMIT}}})
	}
}

func (c *session) modifySRQ(r *ctrlpb.ModifySRQ) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	q, err := c.srqOf(r.Srq)
	if err != nil {
		return err
	}
	if int64(r.Limit) > int64(q.depth) {
		return errorf(invalid, "ctrl: a limit of %d receives exceeds the depth %d of the queue", r.Limit, q.depth)
	}
	q.arm(int(r.Limit))
	return nil
}

func (c *session) destroySRQ(h uint32) error {
	s := c.srv
	s.mu.Lock()
	q, err := c.srqOf(h)
	if err == nil && q.uses > 0 {
		err = errorf(busy, "ctrl: shared receive queue %d is still used by %s", h, printable.Count(q.uses, "queue pair"))
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	delete(c.srqs, h)
	s.mu.Unlock()
	ok := c.free(q.ring) // Detach or Leave of the last QP was a fence
	s.mu.Lock()
	defer s.mu.Unlock()
	q.pd.uses--
	if ok {
		c.giveSized(resSRQs, resRings, q.size)
	}
	return nil
}

func (v viewer) listSRQs(after uint32) *ctrlpb.SRQList {
	srqs, more := listOf(v, func(o *session) map[uint32]*srq { return o.srqs }, func(q *srq) uint32 { return q.index }, (*srq).info, after)
	return &ctrlpb.SRQList{Srqs: srqs, More: more}
}

func (q *srq) info() *ctrlpb.SRQInfo {
	q.mu.Lock()
	defer q.mu.Unlock()
	return &ctrlpb.SRQInfo{
		Client: q.sess.id, Uid: q.sess.cred.Uid, Srq: q.handle, Pd: q.pd.handle, Depth: uint32(q.depth), Posted: uint32(q.posted),
		Limit: uint32(q.limit), Qps: uint32(q.uses), Index: q.index,
		Counters: []*ctrlpb.Counter{{Name: "taken", Value: q.taken}, {Name: "empty", Value: q.short}},
	}
}
