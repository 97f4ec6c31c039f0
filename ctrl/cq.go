package ctrl

import (
	"fmt"
	"math/bits"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/shm"
)

// ringFault returns a function that cuts off the client for writing an invalid index. Workers call
// it.
func (c *session) ringFault(what string) func() {
	return func() {
		c.srv.counters.faults.Add(1)
		go c.cutOff(errorf(invalid, "ctrl: the %s, written by the client, is invalid: it has moved back, or is ahead by more than the length of the ring", what))
	}
}

// quiet waits until all workers have finished handling the completions made before the call.
func (s *Server) quiet() {
	s.engine.Fence() // completions may still be published during the current turn
	s.engine.Fence()
}

// resizeCQ replaces the rings of a completion queue.
func (c *session) resizeCQ(r *ctrlpb.ResizeCQ, reply *ctrlpb.Reply) ([]int, error) {
	s := c.srv
	if err := c.cqDepth(r.Depth); err != nil {
		return nil, err
	}
	size := cqSize(s.engine.Workers(), r.Depth)
	s.mu.Lock()
	defer s.mu.Unlock()
	q, err := c.cqOf(r.Cq)
	if err != nil {
		return nil, err
	}
	// The client has read what it needs from the rings before the last resize. The current ones
	// stay charged until its next resize, since it still has to read them.
	if q.before != 0 {
		s.mu.Unlock()
		ok := c.away("its rings", q.ring.FreeBefore)
		s.mu.Lock()
		if !ok {
			return nil, errorf(internal, "ctrl: completion queue %d: its rings cannot be freed", r.Cq)
		}
		c.give(resRings, q.before)
		q.before = 0
	}
	if err := c.take(resRings, size); err != nil {
		return nil, err
	}
	s.mu.Unlock()
	done, err := q.ring.Resize(int(r.Depth))
	if err == nil {
		s.quiet()
		done()
	}
	s.mu.Lock()
	if err != nil {
		c.give(resRings, size)
		return nil, errorf(internal, "ctrl: completion queue %d: %w", r.Cq, err)
	}
	q.before, q.size = q.size, size
	reply.Body = &ctrlpb.Reply_Cq{Cq: &ctrlpb.CQReply{Cq: q.handle, Depth: uint32(q.ring.Depth()), Workers: uint32(s.engine.Workers())}}
	return []int{q.ring.TakeFD()}, nil
}

// maxModeration is the longest time that a wake-up can be delayed.
const maxModeration = time.Second

func (c *session) modifyCQ(r *ctrlpb.ModifyCQ) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	q, err := c.cqOf(r.Cq)
	if err != nil {
		return err
	}
	period := time.Duration(r.PeriodUs) * time.Microsecond
	if period > maxModeration {
		return errorf(invalid, "ctrl: a moderation of %v: at most %v", period, maxModeration)
	}
	q.modCount, q.modPeriod = r.Count, period
	q.ring.Moderate(r.Count, period)
	return nil
}

// cqSize returns the memory that the rings of a completion queue use.
func cqSize(workers int, depth uint32) uint64 { return 4096 + uint64(workers)*(4096+64*entries(depth)) }

// entries returns the number of entries of a ring for the given depth.
func entries(depth uint32) uint64 { return 1 << bits.Len32(depth-1) }

func (v viewer) listCQs(after uint32) *ctrlpb.CQList {
	cqs, more := listOf(v, func(o *session) map[uint32]*cq { return o.cqs }, func(q *cq) uint32 { return q.index }, (*cq).info, after)
	return &ctrlpb.CQList{Cqs: cqs, More: more}
}

func (q *cq) info() *ctrlpb.CQInfo {
	i := &ctrlpb.CQInfo{
		Client: q.sess.id, Uid: q.sess.cred.Uid, Cq: q.handle, Depth: uint32(q.ring.Depth()), Qps: uint32(q.uses), Index: q.index,
		ModerationCount: q.modCount, ModerationUs: uint32(q.modPeriod.Microseconds()), Counters: appendCounters(nil, "", q.ring.Stats()),
	}
	if q.channel != nil {
		i.Channel = q.channel.handle
	}
	return i
}

// createChannel creates a wake-up channel that several completion queues can share.
func (c *session) createChannel(reply *ctrlpb.Reply) ([]int, error) {
	s := c.srv
	r, w, err := shm.NewChannel()
	if err != nil {
		return nil, errorf(internal, "ctrl: channel: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := c.take(resChannels, 1); err != nil {
		seqpacket.CloseAll([]int{r, w})
		return nil, err
	}
	ch := &channel{handle: c.newHandle(), wake: w}
	c.channels[ch.handle] = ch
	reply.Body = &ctrlpb.Reply_Channel{Channel: &ctrlpb.ChannelReply{Channel: ch.handle}}
	return []int{r}, nil
}

func (c *session) destroyChannel(h uint32) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	ch, err := c.channelOf(h)
	if err != nil {
		return err
	}
	if ch.uses > 0 {
		return errorf(busy, "ctrl: channel %d still has %s", h, printable.Count(ch.uses, "completion queue"))
	}
	delete(c.channels, h)
	c.give(resChannels, 1)
	unix.Close(ch.wake)
	return nil
}

func (c *session) createCQ(r *ctrlpb.CreateCQ, reply *ctrlpb.Reply) ([]int, error) {
	s := c.srv
	if err := c.cqDepth(r.Depth); err != nil {
		return nil, err
	}
	q := &cq{sess: c, size: cqSize(s.engine.Workers(), r.Depth)}
	s.mu.Lock()
	var err error
	if r.Channel != 0 {
		q.channel, err = c.channelOf(r.Channel)
	}
	if err == nil {
		err = c.takeSized(resCQs, resRings, q.size)
	}
	if err == nil {
		q.handle = c.newHandle()
		if q.channel != nil {
			q.channel.uses++
		}
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if q.channel != nil {
		q.ring, err = shm.CreateCQOn(s.engine.Workers(), int(r.Depth), q.channel.wake, uint64(q.handle))
	} else {
		q.ring, err = shm.CreateCQ(s.engine.Workers(), int(r.Depth))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		c.forgetCQ(q)
		return nil, errorf(internal, "ctrl: completion queue: %w", err)
	}
	s.lastIndex++
	q.index = s.lastIndex
	q.ring.OnFault = c.ringFault(fmt.Sprintf("consumer index of completion queue %d", q.handle))
	c.cqs[q.handle] = q
	reply.Body = &ctrlpb.Reply_Cq{Cq: &ctrlpb.CQReply{Cq: q.handle, Depth: uint32(q.ring.Depth()), Workers: uint32(s.engine.Workers())}}
	fds := []int{q.ring.TakeFD()}
	if q.channel == nil {
		fds = append(fds, q.ring.TakeEventFD())
	}
	return fds, nil
}

// forgetCQ returns the quota of a queue. Called with mu held.
func (c *session) forgetCQ(q *cq) {
	c.giveSized(resCQs, resRings, q.size+q.before)
	if q.channel != nil {
		q.channel.uses--
	}
}

func (c *session) destroyCQ(h uint32) error {
	s := c.srv
	s.mu.Lock()
	q, err := c.cqOf(h)
	if err == nil && q.uses > 0 {
		err = errorf(busy, "ctrl: completion queue %d is still used by %s", h, printable.Count(q.uses, "queue"))
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	delete(c.cqs, h)
	s.mu.Unlock()
	q.ring.Moderate(0, 0)
	s.quiet() // no worker has a completion to publish, or delays a wake-up
	if !c.free(q.ring) {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.forgetCQ(q)
	return nil
}
