package ctrl

import (
	"errors"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// The objects of a client. Server.mu guards their use counts.
type (
	pd struct {
		handle uint32
		id     verbs.PDID
		uses   int // regions, windows and QPs that use it
	}
	mr struct {
		sess   *session
		handle uint32
		index  uint32 // creation order, over all clients
		pd     *pd
		region *verbs.Region
		mem    *shm.Region // nil for far memory
		length uint64
		mapped uint64 // bytes that the quota counts
	}
	mw struct {
		handle uint32
		pd     *pd
		window *verbs.Region
	}
	channel struct {
		handle uint32
		wake   int // the end to which workers write
		uses   int // completion queues that use it
	}
	cq struct {
		sess      *session
		handle    uint32
		channel   *channel // nil if the CQ has its own
		index     uint32   // creation order, over all clients
		ring      *shm.CQ
		size      uint64 // bytes, for the quota
		before    uint64 // size of the rings that the last resize replaced
		uses      int    // QPs that complete on it
		modCount  uint32
		modPeriod time.Duration
		overruns  uint64 // overruns reported to the client
	}
	qp struct {
		num            uint32
		sess           *session
		pd             *pd
		sendCQ, recvCQ *cq
		srq            *srq // nil: rq
		sq             *shm.SQ
		rq             *shm.RQ
		binding        *dataplane.QPBinding
		sqDepth        int
		rqDepth        int
		maxSGE         int
		maxInline      int // bytes
		sigAll         bool
		conn           *conn            // its connection, from connect or accept
		used           bool             // it has had a connection, and may not have another
		left           bool             // it uses pd, the CQs and srq no more, though its connection may still send
		size           uint64           // bytes of its queues, for the quota
		over           dataplane.ConnID // its former connection, if the engine had attached it; or 0
	}
)

// qpSize returns the memory of a QP's queues. Each work request has a ring entry in shared
// memory and a state in the worker. maxSGE is the greater of the QP's and of its shared receive
// queue's.
func qpSize(r *ctrlpb.CreateQP, maxSGE int) uint64 {
	fixed := uint64(3 * 4096)
	if r.ReceiveWaitMs != 0 {
		fixed += dataplane.ReceiveWaitBytes
	}
	const sendState, recvState = 192, 128 // sizes in packages verbs and rdmap
	ring, sges := uint64(r.MaxSge)*16, uint64(maxSGE)*16
	return fixed + entries(r.SqDepth)*(64+(max(ring, uint64(r.MaxInline))+63)&^63+sges+uint64(r.MaxInline)+sendState) + entries(r.RqDepth)*((16+ring+63)&^63+sges+recvState)
}

// objects are the objects of a client, by handle or number. Server.mu guards them; only the
// session's own goroutine adds to the maps.
type objects struct {
	lastH    uint32 // last handle assigned
	pds      map[uint32]*pd
	mrs      map[uint32]*mr
	mws      map[uint32]*mw
	cqs      map[uint32]*cq
	qps      map[uint32]*qp // by number
	srqs     map[uint32]*srq
	channels map[uint32]*channel
	listens  map[uint32]*listener
	conns    map[uint32]*conn
	shared   []*shared // associations
}

func newObjects() objects {
	return objects{
		pds: make(map[uint32]*pd), mrs: make(map[uint32]*mr), mws: make(map[uint32]*mw), cqs: make(map[uint32]*cq),
		qps: make(map[uint32]*qp), srqs: make(map[uint32]*srq), channels: make(map[uint32]*channel),
		listens: make(map[uint32]*listener), conns: make(map[uint32]*conn),
	}
}

// newHandle returns a number that is not a handle of a live object of the client.
func (o *objects) newHandle() uint32 {
	for {
		o.lastH++
		h := o.lastH
		if h == 0 || o.pds[h] != nil || o.mrs[h] != nil || o.mws[h] != nil || o.cqs[h] != nil || o.srqs[h] != nil || o.channels[h] != nil || o.listens[h] != nil || o.conns[h] != nil {
			continue
		}
		return h
	}
}

// adopt makes cn a connection that the client knows. Called with mu held.
func (c *session) adopt(cn *conn) {
	cn.handle = c.newHandle()
	c.conns[cn.handle] = cn
	c.raiseRoom()
}

// raiseRoom raises the limit of unread messages for what the client has now. It never decreases, since messages can
// outlive what they are about. Called with mu held.
func (c *session) raiseRoom() {
	c.out.room.Store(max(c.out.room.Load(), maxQueued+perQP*int64(c.own[resQPs])+int64(len(c.conns))))
}

// find returns the object h of m, whose objects noun names for errors.
func find[T any](m map[uint32]*T, noun string, h uint32) (*T, error) {
	if o := m[h]; o != nil {
		return o, nil
	}
	return nil, errorf(noObject, "ctrl: no %s %d", noun, h)
}

func (o *objects) pdOf(h uint32) (*pd, error)             { return find(o.pds, "protection domain", h) }
func (o *objects) mrOf(h uint32) (*mr, error)             { return find(o.mrs, "memory region", h) }
func (o *objects) mwOf(h uint32) (*mw, error)             { return find(o.mws, "memory window", h) }
func (o *objects) cqOf(h uint32) (*cq, error)             { return find(o.cqs, "completion queue", h) }
func (o *objects) qpOf(num uint32) (*qp, error)           { return find(o.qps, "queue pair", num) }
func (o *objects) srqOf(h uint32) (*srq, error)           { return find(o.srqs, "shared receive queue", h) }
func (o *objects) channelOf(h uint32) (*channel, error)   { return find(o.channels, "channel", h) }
func (o *objects) listenerOf(h uint32) (*listener, error) { return find(o.listens, "listener", h) }

// freshQP returns a QP that has never had a connection.
func (o *objects) freshQP(num uint32) (*qp, error) {
	q, err := o.qpOf(num)
	if err == nil && q.used {
		return nil, errorf(badState, "ctrl: queue pair %d has or had a connection: make another", num)
	}
	return q, err
}

// connOf returns a connection in the given state. what describes the state for errors.
func (o *objects) connOf(h uint32, state connState, what string) (*conn, error) {
	c := o.conns[h]
	if c == nil {
		return nil, errorf(noObject, "ctrl: no connection %d: the peer may have left", h)
	}
	if c.state != state {
		return nil, errorf(badState, "ctrl: connection %d is not %s", h, what)
	}
	return c, nil
}

func (c *session) allocPD(reply *ctrlpb.Reply) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := c.take(resPDs, 1); err != nil {
		return err
	}
	s.lastPD++
	p := &pd{handle: c.newHandle(), id: s.lastPD}
	c.pds[p.handle] = p
	reply.Body = &ctrlpb.Reply_Pd{Pd: &ctrlpb.PDReply{Pd: p.handle}}
	return nil
}

func (c *session) deallocPD(h uint32) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	p, err := c.pdOf(h)
	if err != nil {
		return err
	}
	if p.uses > 0 {
		return errorf(busy, "ctrl: protection domain %d still has regions, windows or queue pairs: %d", h, p.uses)
	}
	delete(c.pds, h)
	c.give(resPDs, 1)
	return nil
}

// maxMRSize is the maximum length of a memory region, so that one SGE can describe all of it.
const maxMRSize = 1<<32 - 1

// registerMR maps the client's memory and registers it. The quota is charged before anything is mapped.
func (c *session) registerMR(r *ctrlpb.RegisterMR, fds []int, reply *ctrlpb.Reply) error {
	s := c.srv
	m := &mr{sess: c, length: r.Length}
	if !r.Far {
		if !r.Near && len(fds) != 1 {
			return errorf(invalid, "ctrl: a memory region needs one descriptor, not %d", len(fds))
		}
		if r.Length == 0 || r.Length > maxMRSize {
			return errorf(invalid, "ctrl: a memory region has 1 to %d bytes, not %d", uint64(maxMRSize), r.Length)
		}
		m.mapped = r.Length
	}
	s.mu.Lock()
	p, err := c.pdOf(r.Pd)
	if err == nil {
		err = c.takeSized(resMRs, resRegistered, m.mapped)
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	p.uses++
	s.mu.Unlock()

	m.pd = p
	m.region, m.mem, err = c.mem.register(p.id, r, fds)

	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		c.giveSized(resMRs, resRegistered, m.mapped)
		p.uses--
		return errorf(invalid, "ctrl: memory region: %w", err)
	}
	s.lastIndex++
	m.handle, m.index = c.newHandle(), s.lastIndex
	c.mrs[m.handle] = m
	stag := m.region.STag()
	reply.Body = &ctrlpb.Reply_Mr{Mr: &ctrlpb.MRReply{Mr: m.handle, Lkey: stag, Rkey: stag}}
	return nil
}

func (c *session) deregisterMR(h uint32) error {
	s := c.srv
	s.mu.Lock()
	m, err := c.mrOf(h)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	if err := s.table.Deregister(m.region); err != nil {
		s.mu.Unlock()
		if errors.Is(err, verbs.ErrBusy) {
			return errorf(busy, "ctrl: memory region %d: %w", h, err)
		}
		return errorf(internal, "ctrl: memory region %d: %w", h, err)
	}
	delete(c.mrs, h)
	s.mu.Unlock()
	c.fence()
	c.unmapMR(m)
	return nil
}

// unmapMR releases a region that no worker accesses.
func (c *session) unmapMR(m *mr) {
	if m.mem != nil {
		c.mem.unmap(m.mem)
	}
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	c.giveSized(resMRs, resRegistered, m.mapped)
	m.pd.uses--
}

func (c *session) allocMW(h uint32, reply *ctrlpb.Reply) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	p, err := c.pdOf(h)
	if err != nil {
		return err
	}
	if err := c.take(resMWs, 1); err != nil {
		return err
	}
	w, err := s.table.AllocWindow(p.id)
	if err != nil {
		c.give(resMWs, 1)
		return errorf(internal, "ctrl: memory window: %w", err)
	}
	m := &mw{handle: c.newHandle(), pd: p, window: w}
	c.mws[m.handle] = m
	p.uses++
	reply.Body = &ctrlpb.Reply_Mw{Mw: &ctrlpb.MWReply{Mw: m.handle, Rkey: w.STag()}}
	return nil
}

func (c *session) deallocMW(h uint32) error {
	s := c.srv
	s.mu.Lock()
	m, err := c.mwOf(h)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	if err := s.table.Deregister(m.window); err != nil {
		s.mu.Unlock()
		return errorf(internal, "ctrl: memory window %d: %w", h, err)
	}
	delete(c.mws, h)
	c.give(resMWs, 1)
	m.pd.uses--
	s.mu.Unlock()
	c.fence()
	return nil
}
