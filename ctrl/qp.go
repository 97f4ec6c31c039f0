package ctrl

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

func (c *session) createQP(r *ctrlpb.CreateQP, reply *ctrlpb.Reply) (fds []int, err error) {
	s := c.srv
	if err := c.checkQP(r); err != nil {
		return nil, err
	}
	q := &qp{
		sess: c, sqDepth: int(r.SqDepth), rqDepth: int(r.RqDepth), maxSGE: int(r.MaxSge), maxInline: int(r.MaxInline), sigAll: r.SigAll,
	}
	bit, err := c.reserveQP(q, r)
	if err != nil {
		return nil, err
	}

	q.sq, err = shm.CreateSQ(int(r.SqDepth), int(r.MaxSge), int(r.MaxInline))
	if err == nil && q.srq == nil {
		q.rq, err = shm.CreateRQ(int(r.RqDepth), int(r.MaxSge))
	}
	if err != nil {
		c.free(q.rings()...) // the client has not received them
		s.mu.Lock()
		c.forgetQP(q, bit)
		s.mu.Unlock()
		return nil, errorf(internal, "ctrl: queue pair: %w", err)
	}
	q.sq.OnFault = c.ringFault(fmt.Sprintf("producer index of the send queue of queue pair %d", q.num))
	cfg := verbs.QPConfig{
		Num: q.num, PD: q.pd.id, Table: s.table, SQDepth: int(r.SqDepth), RQDepth: int(r.RqDepth),
		MaxSGE: int(r.MaxSge), MaxInline: int(r.MaxInline), SigAll: r.SigAll, Sends: q.sq,
	}
	if q.srq != nil {
		cfg.Recvs, cfg.Shared = q.srq, true
		cfg.MaxSGE = q.mostSGE()
		fds = []int{q.sq.TakeFD()}
	} else {
		fds = []int{q.sq.TakeFD(), q.rq.TakeFD()}
		q.rq.OnFault = c.ringFault(fmt.Sprintf("producer index of the receive queue of queue pair %d", q.num))
		cfg.Recvs = q.rq
	}
	queue := c.mem.mover.NewQueue()
	cfg.Far = queue
	core := verbs.NewQP(cfg)
	s.mu.Lock()
	q.binding = &dataplane.QPBinding{QP: core, SendCQ: q.sendCQ.ring, RecvCQ: q.recvCQ.ring, Client: c.binding, Bit: bit, Far: queue,
		ReceiveWait: time.Duration(r.ReceiveWaitMs) * time.Millisecond}
	c.qps[q.num] = q
	s.mu.Unlock()
	reply.Body = &ctrlpb.Reply_Qp{Qp: &ctrlpb.QPReply{
		Qp: q.num, Doorbell: uint32(bit), SqDepth: r.SqDepth, RqDepth: r.RqDepth, MaxSge: r.MaxSge, MaxInline: r.MaxInline,
	}}
	return fds, nil
}

// reserveQP assigns a number and a doorbell bit to q, and charges the quotas.
func (c *session) reserveQP(q *qp, r *ctrlpb.CreateQP) (bit int, err error) {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.pd, err = c.pdOf(r.Pd); err != nil {
		return 0, err
	}
	if q.sendCQ, q.recvCQ = c.cqs[r.SendCq], c.cqs[r.RecvCq]; q.sendCQ == nil || q.recvCQ == nil {
		return 0, errorf(noObject, "ctrl: no completion queue %d or %d", r.SendCq, r.RecvCq)
	}
	if r.Srq != 0 {
		if q.srq, err = c.srqOf(r.Srq); err != nil {
			return 0, err
		}
		if q.srq.pd != q.pd {
			return 0, errorf(invalid, "ctrl: shared receive queue %d belongs to another protection domain", r.Srq)
		}
	}
	q.size = qpSize(r, q.mostSGE())
	if bit = c.bits.take(); bit < 0 {
		return 0, errorf(quota, "ctrl: a client has at most %d queue pairs", 64*len(c.bits))
	}
	if err := c.takeSized(resQPs, resRings, q.size); err != nil {
		c.bits.free(bit)
		return 0, err
	}
	c.raiseRoom()
	for q.num == 0 || s.qps[q.num] != nil {
		s.lastQP = s.lastQP%maxQPNum + 1
		q.num = s.lastQP
	}
	q.pd.uses++
	q.sendCQ.uses++
	q.recvCQ.uses++
	if q.srq != nil {
		q.srq.uses++
	}
	s.qps[q.num] = q // reserves the number
	return bit, nil
}

// mostSGE returns the greatest number of pieces of a work request that the worker accepts.
func (q *qp) mostSGE() int {
	if q.srq != nil {
		return max(q.maxSGE, q.srq.maxSGE)
	}
	return q.maxSGE
}

// maxQPNum keeps QP numbers within the 24 bits of the verbs.
const maxQPNum = 1<<24 - 1

// rings returns the rings that q has.
func (q *qp) rings() (all []interface{ Free() error }) {
	if q.sq != nil {
		all = append(all, q.sq)
	}
	if q.rq != nil {
		all = append(all, q.rq)
	}
	return all
}

func (c *session) modifyQP(r *ctrlpb.ModifyQP) error {
	c.srv.mu.Lock()
	q, err := c.qpOf(r.Qp)
	c.srv.mu.Unlock()
	if err != nil {
		return err
	}
	q.binding.QP.Permit(verbs.Access(r.Access))
	c.fence()
	return nil
}

func (c *session) destroyQP(num uint32) error {
	c.srv.mu.Lock()
	q, err := c.qpOf(num)
	c.srv.mu.Unlock()
	if err != nil {
		return err
	}
	c.dropQP(q)
	return nil
}

// dropQP destroys a QP and its connection. When it returns, no worker uses it.
func (c *session) dropQP(q *qp) {
	s := c.srv
	s.mu.Lock()
	if q.conn != nil {
		s.abandon(q.conn)
	}
	s.mu.Unlock()
	if c.mem.far != nil && c.hungUp.Err() == nil { // what has arrived completes only when it is there
		s.quiet() // twice: the worker that dialed passes the Disconnect on to the one that has the connection
		c.mem.fence()
	}
	s.engine.Detach(q.binding)
	c.mem.fence()
	ok := c.free(q.rings()...)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(c.qps, q.num)
	if !ok {
		q.size = 0 // stays charged
	}
	c.forgetQP(q, q.binding.Bit)
}

// forgetQP returns the quotas of a QP. Called with mu held.
func (c *session) forgetQP(q *qp, bit int) {
	delete(c.srv.qps, q.num)
	c.bits.free(bit)
	c.giveSized(resQPs, resRings, q.size)
	q.release()
}

// release ends the use of other objects by q. Called with mu held.
func (q *qp) release() {
	if q.left {
		return
	}
	q.left = true
	q.pd.uses--
	q.sendCQ.uses--
	q.recvCQ.uses--
	if q.srq != nil {
		q.srq.uses--
	}
}

// bitmap has a bit for each doorbell of a client: 1 if it is taken.
type bitmap []uint64

// take takes the lowest free bit and returns it, or -1 if there is none.
func (b bitmap) take() int {
	for i, w := range b {
		if w != ^uint64(0) {
			n := bits.TrailingZeros64(^w)
			b[i] |= 1 << n
			return i*64 + n
		}
	}
	return -1
}

func (b bitmap) free(bit int) { b[bit/64] &^= 1 << (bit % 64) }

// async notifies the client that a queue pair ended for a reason that no work request reports.
// Called with mu held.
func (q *qp) async(kind ctrlpb.AsyncKind, err error) {
	e := &ctrlpb.AsyncError{Qp: q.num, Kind: kind, Error: toPB(err)}
	if kind == ctrlpb.AsyncKind_ASYNC_CQ_OVERRUN {
		e.Cq = q.recvCQ.handle
		if n := q.sendCQ.ring.Stats().Overruns; n != q.sendCQ.overruns {
			e.Cq, q.sendCQ.overruns = q.sendCQ.handle, n
		}
	}
	q.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_AsyncError{AsyncError: e}})
}
