package rpcrdma

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// sendDepth is the length of a connection's send queue, and sendSlots how many of its entries are
// for Sends.
const (
	sendDepth = 256
	sendSlots = 64
)

// Conn is a connection.
type Conn struct {
	e        *Endpoint
	peer     string
	qp       *iwarp.QP
	cq       *iwarp.CQ
	mem      *buffer // receive slots, then send slots
	slot     int     // size of a slot in bytes
	accepted bool    // by a server

	held *share // memory held by the incoming calls of peer

	ctx    context.Context
	cancel context.CancelFunc
	loop   chan struct{} // closed when the completion loop has returned
	ready  chan struct{}
	dead   chan struct{} // closed when the queue pair is destroyed
	done   chan struct{} // closed when the connection has ended
	serve  sync.WaitGroup

	serving atomic.Int32 // calls in progress at this side
	began   time.Time
	used    atomic.Int64 // time from began to the last completion

	mu      sync.Mutex // guards the rest
	s       *session.Session
	err     error
	started bool
	room    *sync.Cond     // signaled when the send queue has free entries
	free    int            // entries
	slots   []int          // free send slots
	ops     map[uint64]*op // outstanding work requests
	nextID  uint64
	moving  int         // outstanding RDMA Reads and Writes
	watch   *time.Timer // their timer; nil before the first
	doneAt  time.Time   // when one last completed, or when the first was posted
	calls   map[uint32]chan result
	windows []*window
	byKey   map[uint32]*window
	exposed exposed
	woke    bool // goroutines have become runnable in this round of run
	count   Counters
}

// Counters are the counters of a connection.
type Counters struct {
	session.Stats
	ReadBytes, WriteBytes uint64 // by RDMA Read and Write
	InlineBytes           uint64 // in Sends
	Invalidated           uint64 // windows that the peer invalidated
}

// op is an outstanding work request.
type op struct {
	slot int       // of a Send, or -1
	move bool      // an RDMA Read or Write
	free []*buffer // to be released
	done func(err error)
	err  error // why it failed, once it is complete
}

// window is a memory window of a connection.
type window struct {
	mw    *iwarp.MW
	key   uint8
	rkey  uint32
	bound bool
}

const recvID = 1 << 63

// opWait bounds how long RDMA Reads and Writes may be outstanding without one completing. Those of
// a server occupy memory that other calls wait for, even if the peer is alive.
const opWait = time.Minute

var errSilent = errors.New("rpcrdma: the peer does not complete RDMA Reads or Writes")

// watched ends a connection whose Reads and Writes have stalled. Work requests complete in order,
// so if any request completes, those queued after it have not stalled.
func (c *Conn) watched() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.moving == 0 || c.err != nil {
		return
	}
	if left := time.Until(c.doneAt.Add(c.e.opWait)); left > 0 {
		c.watch.Reset(left)
		return
	}
	c.failLocked(errSilent)
}

// newConn makes a connection that is not started. It returns errFull if a server has too many.
func (e *Endpoint) newConn(ctx context.Context, peer netip.Addr, cfg session.Config) (c *Conn, err error) {
	held, err := e.reserve(ctx, peer, cfg.Server)
	if err != nil {
		return nil, err
	}
	recvs := max(cfg.Window, 2) + 1
	if !cfg.Server || cfg.Version == 1 {
		recvs += 2 // version 1 grants no receive for an error
	}
	c = &Conn{
		e: e, peer: peer.String(), accepted: cfg.Server, held: held, slot: int(max(cfg.Props.RecvSize, cfg.Props.SendSize, 4096)),
		ready: make(chan struct{}), done: make(chan struct{}), dead: make(chan struct{}),
		loop: make(chan struct{}), free: sendDepth, ops: make(map[uint64]*op), calls: make(map[uint32]chan result), byKey: make(map[uint32]*window),
	}
	c.began = time.Now()
	c.room = sync.NewCond(&c.mu)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	defer func(made *Conn) {
		if err != nil {
			made.cancel()
			made.release()
			e.remove(made)
		}
	}(c)
	if c.mem, err = e.pool.alloc(ctx, (recvs+sendSlots)*c.slot); err != nil {
		return nil, err
	}
	if c.cq, err = e.dev.CreateCQ(ctx, sendDepth+recvs); err != nil {
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	// The queues are twice as long as needed, since an entry may become free only shortly after
	// its completion.
	if c.qp, err = e.dev.CreateQP(ctx, iwarp.QPConfig{
		PD: e.pd, SendCQ: c.cq, RecvCQ: c.cq, SendDepth: 2 * sendDepth, RecvDepth: 2 * recvs, MaxSGE: 4, SigAll: true,
	}); err != nil {
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	for i := range recvs {
		if err = c.postRecv(i); err != nil {
			return nil, err
		}
	}
	for i := range sendSlots {
		c.slots = append(c.slots, recvs+i)
	}
	c.s = session.New(cfg)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, ErrClosed
	}
	e.conns[c] = struct{}{}
	return c, nil
}

func (c *Conn) postRecv(i int) error {
	return c.qp.PostRecv(&iwarp.RecvWR{ID: recvID | uint64(i), SGEs: []iwarp.SGE{c.mem.sge(i*c.slot, c.slot)}})
}

// start starts an established connection, unless it was closed in the meantime.
func (c *Conn) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.started = true
	c.turn()
	go c.run()
}

// Version returns the version in use, or 0 if it is not yet negotiated.
func (c *Conn) Version() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s.Version()
}

// Properties returns the peer's transport properties.
func (c *Conn) Properties() wire.Properties {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s.Peer()
}

// Counters returns the counters.
func (c *Conn) Counters() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.count
	n.Stats = c.s.Stats()
	return n
}

// Done returns a channel that is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// lastUsed returns the time of the last completion, or of the creation.
func (c *Conn) lastUsed() time.Time { return c.began.Add(time.Duration(c.used.Load())) }

// Err returns why the connection ended.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection.
func (c *Conn) Close() error {
	c.fail(ErrClosed)
	<-c.done
	return nil
}

// fail ends the connection with err. It does not block.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failLocked(err)
}

func (c *Conn) failLocked(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	c.cancel()
	c.room.Broadcast()
	if c.watch != nil {
		c.watch.Stop()
	}
	for xid, done := range c.calls {
		delete(c.calls, xid)
		done <- result{err: &LostError{err}}
	}
	if !c.started {
		close(c.loop)
	}
	go c.end()
}

// LostError is the error of a call whose connection broke. The server may or may not have executed
// the call.
type LostError struct{ Cause error }

func (e *LostError) Error() string { return "rpcrdma: connection lost: " + e.Cause.Error() }
func (e *LostError) Unwrap() error { return e.Cause }

// end tears down a failed connection.
func (c *Conn) end() {
	<-c.loop
	ctx, cancel := context.WithTimeout(context.Background(), c.e.cfg.Setup)
	defer cancel()
	if c.started {
		_ = c.qp.Abort(ctx)
		select {
		case <-c.qp.Done():
		case <-ctx.Done():
		}
		c.recordFailed(c.qp.Err(), time.Now())
	}
	c.release()
	c.e.remove(c)
	close(c.done)
}

// release frees the resources of the connection. The queue pair is destroyed first; after that
// nothing accesses the memory.
func (c *Conn) release() {
	if c.qp != nil {
		_ = c.qp.Close()
	}
	c.mu.Lock()
	ops := c.ops
	c.ops = nil
	c.mu.Unlock()
	for _, o := range ops {
		o.err = errGone
		o.finish()
	}
	close(c.dead)
	c.serve.Wait()
	if c.cq != nil {
		_ = c.cq.Close()
	}
	c.mu.Lock()
	windows := c.windows
	c.windows = nil
	c.mu.Unlock()
	for _, w := range windows {
		_ = w.mw.Close()
	}
	c.mem.release()
}

func (o *op) finish() {
	for _, b := range o.free {
		b.release()
	}
	if o.done != nil {
		o.done(o.err)
	}
}

// run handles completions until the connection ends.
func (c *Conn) run() {
	defer close(c.loop)
	var wcs [64]iwarp.WC
	for {
		n, err := c.cq.Wait(c.ctx, wcs[:])
		if err != nil {
			c.fail(err)
			return
		}
		now := time.Now()
		c.used.Store(int64(now.Sub(c.began)))
		ferr := c.firstErr(wcs[:n]) // without mu, since it may wait
		c.mu.Lock()
		var finished []*op
		for i := range wcs[:n] {
			w := &wcs[i]
			if w.ID&recvID == 0 {
				if o := c.completed(w, ferr); o != nil {
					finished = append(finished, o)
				}
			} else if w.Status == iwarp.WCSuccess {
				c.received(w)
			}
		}
		if len(finished) > 0 {
			c.doneAt = now
		}
		if ferr != nil {
			c.failLocked(ferr)
		}
		c.turn()
		c.room.Broadcast()
		woke := c.woke
		c.woke = false
		c.mu.Unlock()
		for _, o := range finished {
			o.finish()
		}
		// Calls that have arrived, and callers that have their replies, run on this thread at once. Otherwise they would wait while
		// it polls, until Go's scheduler has woken another thread.
		if woke {
			runtime.Gosched()
		}
	}
}

// completed takes back what the work request of w held, and returns its op, which the caller finishes without mu, or nil
// if it has none. err is why it failed, if it did. Called with mu held.
func (c *Conn) completed(w *iwarp.WC, err error) *op {
	o := c.ops[w.ID]
	delete(c.ops, w.ID)
	c.free++
	if o == nil {
		return nil
	}
	if o.slot >= 0 {
		c.slots = append(c.slots, o.slot)
	}
	if o.move {
		c.moving--
	}
	if w.Status != iwarp.WCSuccess {
		o.err = err
	}
	c.woke = c.woke || o.done != nil
	return o
}

// firstErr returns the error of the first failed completion, or nil.
func (c *Conn) firstErr(wcs []iwarp.WC) error {
	for i := range wcs {
		if err := c.qp.WCErr(c.ctx, &wcs[i]); err != nil {
			return err
		}
	}
	return nil
}

// received processes a message of the peer. Called with mu held.
func (c *Conn) received(w *iwarp.WC) {
	i := int(w.ID &^ recvID)
	b := c.mem.b[i*c.slot : i*c.slot+int(w.Len)]
	if w.Flags&iwarp.WCWithInv != 0 {
		if win := c.byKey[w.InvKey]; win != nil {
			win.bound = false
			c.count.Invalidated++
		}
	}
	if c.e.cfg.Wire != nil {
		c.e.cfg.Wire(c, false, b)
	}
	c.count.InlineBytes += uint64(len(b))
	c.s.HandleMessage(b)
	if err := c.postRecv(i); err != nil && c.err == nil {
		c.failLocked(err)
	}
	c.events()
}

// events processes the events of the session. Called with mu held.
func (c *Conn) events() {
	for {
		e, ok := c.s.PollEvent()
		if !ok {
			return
		}
		switch e.Kind {
		case session.EventReady:
			close(c.ready)
		case session.EventCall:
			switch {
			case c.err != nil:
			case c.e.failed.take(c.peer, e.XID, time.Now()):
				c.s.Fail(e.Call, wire.Failure{Code: wire.ErrSystem})
			default:
				c.exposed.add(e.Call)
				c.serve.Add(1)
				c.serving.Add(1)
				c.woke = true
				go c.answer(e.Call)
			}
		case session.EventReply:
			c.resolve(e.XID, result{reply: e.Reply})
		case session.EventFailure:
			c.resolve(e.XID, result{err: e.Err})
		case session.EventClose:
			c.failLocked(e.Err)
		}
	}
}

func (c *Conn) resolve(xid uint32, r result) {
	if done := c.calls[xid]; done != nil {
		delete(c.calls, xid)
		c.woke = true
		done <- r
	}
}

// turn sends as many messages as possible. Called with mu held.
func (c *Conn) turn() {
	c.events()
	for c.err == nil && c.started && c.free > 0 && len(c.slots) > 0 {
		i := c.slots[len(c.slots)-1]
		o := session.Out{B: c.mem.b[i*c.slot : i*c.slot : (i+1)*c.slot]}
		if !c.s.PollTransmit(&o) {
			return
		}
		if len(o.B) > c.slot {
			c.failLocked(session.ErrTooLong)
			return
		}
		c.slots = c.slots[:len(c.slots)-1]
		if c.e.cfg.Wire != nil {
			c.e.cfg.Wire(c, true, o.B)
		}
		c.count.InlineBytes += uint64(len(o.B))
		wr := iwarp.SendWR{Op: iwarp.OpSend, SGEs: []iwarp.SGE{c.mem.sge(i*c.slot, len(o.B))}, Flags: iwarp.Solicited}
		if o.Inv != 0 {
			wr.Op, wr.Inv = iwarp.OpSendInv, o.Inv
		}
		if err := c.post(&wr, &op{slot: i}); err != nil {
			return
		}
	}
}

// post posts a work request. Called with mu held, and with free > 0.
func (c *Conn) post(wr *iwarp.SendWR, o *op) error {
	c.nextID++
	wr.ID = c.nextID &^ recvID
	wr.Flags |= iwarp.Signaled
	c.ops[wr.ID] = o
	c.free--
	if err := c.qp.PostSend(wr); err != nil {
		delete(c.ops, wr.ID)
		c.free++
		c.failLocked(err)
		return err
	}
	if wr.Op == iwarp.OpRead || wr.Op == iwarp.OpWrite {
		o.move = true
		if c.moving++; c.moving == 1 {
			if now := time.Now(); now.After(c.doneAt) {
				c.doneAt = now
			}
			if c.watch == nil {
				c.watch = time.AfterFunc(c.e.opWait, c.watched)
			} else {
				c.watch.Reset(c.e.opWait)
			}
		}
	}
	return nil
}

// waitRoom waits until the send queue has an entry that Sends do not need. It returns false if the
// connection ended. Called with mu held.
func (c *Conn) waitRoom() bool {
	for c.err == nil && c.free <= 8 {
		c.room.Wait()
	}
	return c.err == nil
}

// takeWindow binds the window of p to its memory. Called with mu held.
func (c *Conn) takeWindow(p *part) error {
	win := p.win
	if !c.waitRoom() {
		return c.err
	}
	delete(c.byKey, win.rkey)
	win.key++
	win.rkey = win.mw.RKey()&^0xff | uint32(win.key)
	c.byKey[win.rkey] = win
	win.bound = true
	return c.post(&iwarp.SendWR{Op: iwarp.OpBindMW, RKey: win.rkey, SGEs: []iwarp.SGE{p.b.sge(0, p.n)}, Access: p.access}, &op{slot: -1})
}

// window returns an unbound window. Called without mu.
func (c *Conn) window(ctx context.Context) (*window, error) {
	c.mu.Lock()
	if n := len(c.windows); n > 0 {
		w := c.windows[n-1]
		c.windows = c.windows[:n-1]
		c.mu.Unlock()
		return w, nil
	}
	c.mu.Unlock()
	mw, err := c.e.pd.AllocMW(ctx)
	if err != nil {
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	return &window{mw: mw, key: uint8(keys.Add(1))}, nil
}

// keys makes the initial keys of windows differ.
var keys atomic.Uint32

var errGone = errors.New("rpcrdma: the connection is over")
