package iwarp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// Conn is a connection at the plain level: a queue pair with its queues,
// buffers and memory.
//
// Each Send is one message, which one Recv of the peer returns. The peer has room for
// RecvDepth messages that it has not received yet, each of at most RecvSize bytes. One
// message more, or a longer one, ends the connection. A protocol over a Conn must
// therefore limit what it sends, by replies or by credits.
type Conn struct {
	d       *Device
	ownDev  bool
	pd      *PD
	ownPD   bool
	scq     *CQ
	rcq     *CQ
	qp      *QP
	inline  int
	recvLen int
	stage   *MR // chunks for data outside of regions
	recv    *MR // receive buffers

	memMu sync.RWMutex // held while stage, recv or an op's tmp is accessed
	gone  bool         // the memory is unmapped; guarded by memMu

	free   chan *op     // operations not in use
	chunks chan int     // chunks of stage not in use
	hungry atomic.Int32 // goroutines that wait for an operation or a chunk
	ops    []*op
	leader chan struct{} // token of the goroutine that polls scq
	swcs   [16]WC        // completions of the leader

	reader  chan struct{} // token of the goroutine in Recv
	rwcs    [16]WC        // completions of the reader
	arrived []WC          // those that are not yet received

	closeOnce sync.Once
}

// op is an operation in flight.
type op struct {
	id   int
	done chan struct{} // signalled when wc is there
	wc   WC

	mu        sync.Mutex
	complete  bool
	abandoned bool // the caller has returned; the goroutine that polls the completion frees o
	chunk     int  // chunk of stage, or -1
	tmp       *MR  // closed when the operation is complete, or the connection is released

	sge [1]SGE // of its work request
}

// The stage is memory for data outside of regions, divided into chunks.
const (
	chunkSize  = 64 << 10
	numChunks  = 8
	chunkAhead = 4 // chunks that one call keeps in flight

	defaultRecvSize = 16 << 10
)

// Dial connects to the peer that listens at addr, "addr:port".
func (d *Device) Dial(ctx context.Context, addr string, cfg *Config) (*Conn, error) {
	c, err := d.newConn(ctx, cfg.orDefault())
	if err != nil {
		return nil, err
	}
	if _, err := c.qp.Connect(ctx, addr, cfg); err != nil {
		c.release()
		return nil, err
	}
	return c, nil
}

// Dial opens a Device of its own by Open with an empty path, and connects to the peer
// that listens at addr, "addr:port". Close of the Conn closes the Device.
func Dial(ctx context.Context, addr string, cfg *Config) (*Conn, error) {
	d, err := Open(ctx, "")
	if err != nil {
		return nil, err
	}
	c, err := d.Dial(ctx, addr, cfg)
	if err != nil {
		d.Close()
		return nil, err
	}
	c.ownDev = true
	return c, nil
}

// Listen opens a Device of its own by Open with an empty path, and listens at addr as
// Device.Listen does. Close of the Listener also ends the connections that Accept
// returned.
func Listen(ctx context.Context, addr string, cfg *Config) (*Listener, error) {
	d, err := Open(ctx, "")
	if err != nil {
		return nil, err
	}
	l, err := d.Listen(ctx, addr, cfg)
	if err != nil {
		d.Close()
		return nil, err
	}
	l.own = true
	return l, nil
}

// AcceptConn accepts the request and returns its connection. If there is no memory or no quota for
// it, AcceptConn rejects the request, also with the private data of cfg, by which the peer can see
// that it has reached the right program.
func (r *ConnRequest) AcceptConn(ctx context.Context, cfg *Config) (*Conn, error) {
	if r.q != nil {
		return nil, &Error{fmt.Sprintf("accept %v", r.Remote), ctrlpb.Code_CODE_INVALID, "the stream has a queue pair already: use Accept"}
	}
	cfg = cfg.orDefault()
	c, err := r.d.newConn(ctx, cfg)
	if err != nil {
		_ = r.refuse(ctx, cfg.PrivateData)
		return nil, err
	}
	if _, err := r.Accept(ctx, c.qp, cfg); err != nil {
		if r.refuse(ctx, cfg.PrivateData) != nil { // the private data may be too long
			_ = r.refuse(ctx, nil) // fails if the daemon has taken the answer
		}
		c.release()
		return nil, err
	}
	return c, nil
}

// refuse rejects the request, within a second, also if ctx is done.
func (r *ConnRequest) refuse(ctx context.Context, private []byte) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	return r.Reject(ctx, private)
}

// ofPeer reports whether the peer caused an accept to fail.
func ofPeer(err error) bool {
	for _, e := range []error{ErrRefused, ErrTimeout, ErrUnreachable, ErrProtocol, ErrNoObject, ErrPeerClosed, ErrCanceled} {
		if errors.Is(err, e) {
			return true
		}
	}
	_, ok := errors.AsType[*TerminateError](err)
	return ok
}

// newConn creates a Conn except for its connection. It checks ctx only before it starts: if a
// call to the daemon were abandoned, the object that it creates would be destroyed too late for
// the objects that it uses to be destroyed.
func (d *Device) newConn(ctx context.Context, cfg *Config) (_ *Conn, err error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("iwarp: make a connection: %w", err)
	}
	ctx = context.WithoutCancel(ctx)
	or := func(v, def, limit int) int {
		if v <= 0 {
			v = def
		}
		if limit > 0 {
			v = min(v, limit)
		}
		return v
	}
	sends, recvs := or(cfg.SendDepth, defaultDepth, d.attrs[0].MaxQPWR), or(cfg.RecvDepth, defaultDepth, d.attrs[0].MaxQPWR)
	c := &Conn{
		d: d, pd: cfg.PD, inline: or(cfg.MaxInline, defaultInline, d.attrs[0].MaxInline), recvLen: or(cfg.RecvSize, defaultRecvSize, 0),
		free: make(chan *op, sends), chunks: make(chan int, numChunks), leader: make(chan struct{}, 1), reader: make(chan struct{}, 1),
	}
	defer func() {
		if err != nil {
			c.release()
		}
	}()
	if c.pd == nil {
		if c.pd, err = d.AllocPD(ctx); err != nil {
			return nil, err
		}
		c.ownPD = true
	}
	if c.scq, err = d.CreateCQ(ctx, sends); err != nil {
		return nil, err
	}
	if c.rcq, err = d.CreateCQ(ctx, recvs); err != nil {
		return nil, err
	}
	if c.stage, err = c.pd.Alloc(ctx, numChunks*chunkSize, AccessLocalWrite); err != nil {
		return nil, err
	}
	if c.recv, err = c.pd.Alloc(ctx, recvs*c.recvLen, AccessLocalWrite); err != nil {
		return nil, err
	}
	if c.qp, err = d.CreateQP(ctx, QPConfig{
		PD: c.pd, SendCQ: c.scq, RecvCQ: c.rcq, SendDepth: sends, RecvDepth: recvs, MaxSGE: 1, MaxInline: c.inline,
	}); err != nil {
		return nil, err
	}
	for i := range sends {
		o := &op{id: i, done: make(chan struct{}, 1), chunk: -1}
		c.ops = append(c.ops, o)
		c.free <- o
	}
	for i := range numChunks {
		c.chunks <- i
	}
	for i := range recvs {
		if err = c.postRecv(i); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *Conn) postRecv(i int) error {
	sge := [1]SGE{c.recv.SGE(i*c.recvLen, c.recvLen)}
	return c.qp.PostRecv(&RecvWR{ID: uint64(i), SGEs: sge[:]})
}

// PD returns the protection domain of the connection.
func (c *Conn) PD() *PD { return c.pd }

// QP returns the queue pair of the connection. The caller must not post work requests
// to it.
func (c *Conn) QP() *QP { return c.qp }

// Info returns the addresses and the negotiated settings of the connection.
func (c *Conn) Info() *ConnInfo { return c.qp.Info() }

// Done returns a channel that is closed when the connection has ended. Messages that arrived before
// can still be received.
func (c *Conn) Done() <-chan struct{} { return c.qp.Done() }

// Alloc allocates and registers size bytes of memory. The peer may access it within
// the rights a, and operations of the connection use it without a copy. Close of the
// Conn unmaps it, unless Config.PD was set.
func (c *Conn) Alloc(ctx context.Context, size int, a Access) (*MR, error) {
	return c.pd.Alloc(ctx, size, a)
}

// begin returns a free operation.
func (c *Conn) begin(ctx context.Context) (*op, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	o, err := take(ctx, c, c.free)
	if err == nil {
		o.reset()
	}
	return o, err
}

// take receives from pool, which is c.free or c.chunks. While the pool is empty it polls for
// completions, since those of abandoned operations fill it.
func take[T any](ctx context.Context, c *Conn, pool <-chan T) (v T, err error) {
	select {
	case v = <-pool:
		return v, nil
	default:
	}
	c.hungry.Add(1)
	defer c.hungry.Add(-1)
	for {
		select {
		case v = <-pool:
			return v, nil
		case c.leader <- struct{}{}:
			err = c.lead(ctx, func() bool { return len(pool) > 0 })
			<-c.leader
			if err != nil {
				return v, err
			}
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
}

// reset prepares o for another use. No other goroutine uses o. The lock, as that of post, is for the race
// detector, which does not see that the previous use is complete: its completion came through memory shared
// with the daemon.
func (o *op) reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.complete, o.abandoned, o.chunk, o.tmp = false, false, -1, nil
}

// swapTmp replaces o.tmp by m, and returns it.
func (o *op) swapTmp(m *MR) *MR {
	o.mu.Lock()
	defer o.mu.Unlock()
	was := o.tmp
	o.tmp = m
	return was
}

// end frees an operation.
func (c *Conn) end(o *op) {
	if o.chunk >= 0 {
		c.chunks <- o.chunk
	}
	if tmp := o.swapTmp(nil); tmp != nil {
		go tmp.Close() // Close asks the daemon; the poller must not wait for it
	}
	c.free <- o
	if c.hungry.Load() > 0 { // the leader may be one of them, and no completion may be outstanding
		c.scq.interrupt()
	}
}

// lead waits for completions and delivers them. The caller holds the leader's token. lead
// returns if idle reports that there is nothing to wait for.
func (c *Conn) lead(ctx context.Context, idle func() bool) error {
	if idle() {
		return nil
	}
	n, err := c.scq.waitUnless(ctx, c.swcs[:], idle)
	for i := range c.swcs[:n] {
		wc := &c.swcs[i]
		if wc.ID >= uint64(len(c.ops)) {
			continue
		}
		o := c.ops[wc.ID]
		o.mu.Lock()
		o.wc, o.complete = *wc, true
		abandoned := o.abandoned
		o.mu.Unlock()
		if abandoned {
			c.end(o)
		} else {
			o.done <- struct{}{}
		}
	}
	return err
}

// move copies between the caller's memory and the connection's own, which a concurrent Close
// may unmap.
func (c *Conn) move(dst, src []byte) error {
	c.memMu.RLock()
	defer c.memMu.RUnlock()
	if c.gone {
		return ErrClosed
	}
	copy(dst, src)
	return nil
}

// chunk returns the memory of o's chunk.
func (c *Conn) chunk(o *op) []byte { return c.stage.mem[o.chunk*chunkSize:][:chunkSize] }

// run posts wr as o, waits for its completion, and frees o.
func (c *Conn) run(ctx context.Context, o *op, wr *SendWR) error {
	if err := c.post(o, wr); err != nil {
		return err
	}
	if err := c.await(ctx, o); err != nil {
		return err
	}
	err := c.qp.WCErr(ctx, &o.wc)
	c.end(o)
	return err
}

// post posts wr as o. If that fails, it frees o.
func (c *Conn) post(o *op, wr *SendWR) error {
	wr.ID = uint64(o.id)
	wr.Flags |= Signaled
	o.mu.Lock() // see reset: PostSend reads o.sge
	err := c.qp.PostSend(wr)
	o.mu.Unlock()
	if err != nil {
		c.end(o)
		return err
	}
	return nil
}

// launch posts wr as o, which is freed when it completes.
func (c *Conn) launch(o *op, wr *SendWR) error {
	o.mu.Lock()
	o.abandoned = true
	o.mu.Unlock()
	return c.post(o, wr)
}

// await waits for the completion of o. After an error the caller must not use o any more.
func (c *Conn) await(ctx context.Context, o *op) error {
	for {
		select {
		case <-o.done:
			return nil
		default:
		}
		var err error
		select {
		case <-o.done:
			return nil
		case c.leader <- struct{}{}:
			err = c.lead(ctx, func() bool { return len(o.done) > 0 })
			<-c.leader
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			return c.abandon(o, err)
		}
	}
}

// abandon leaves o to the goroutine that will poll its completion.
func (c *Conn) abandon(o *op, err error) error {
	o.mu.Lock()
	if !o.complete {
		o.abandoned = true
		o.mu.Unlock()
		return err
	}
	o.mu.Unlock()
	<-o.done
	c.end(o)
	return err
}

// closeWait is the time that Close allows for an orderly close.
const closeWait = 5 * time.Second

// Close closes the connection in order and frees all its objects, except memory of Alloc in a
// PD that the caller passed in. If the peer has not acknowledged all within 5 seconds, Close resets the
// connection and returns ErrTimeout: what was posted last may be lost.
func (c *Conn) Close() error { return c.close(false) }

// Abort resets the connection and frees all its objects.
func (c *Conn) Abort() error { return c.close(true) }

func (c *Conn) close(abort bool) error {
	var err error
	c.closeOnce.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeWait)
		defer cancel()
		derr := c.qp.disconnect(ctx, abort)
		if derr == nil && !abort {
			if _, werr := wait(ctx, c.d, c.qp.Done()); werr != nil {
				werr = fmt.Errorf("%w: the peer has not acknowledged all within %v", ErrTimeout, closeWait)
				err = c.wrap("close connection to", werr)
			}
		} else if derr != nil && !errors.Is(derr, ErrState) {
			err = derr
		}
		c.release()
		if c.ownDev {
			c.d.Close()
		}
	})
	return err
}

// release frees the objects in the order of their dependence.
func (c *Conn) release() {
	if c.qp != nil {
		c.qp.Close()
	}
	for _, q := range []*CQ{c.scq, c.rcq} {
		if q != nil {
			q.Close()
		}
	}
	c.memMu.Lock()
	c.gone = true
	c.memMu.Unlock()
	if c.ownPD {
		for _, m := range c.pd.regions() {
			m.Close()
		}
		c.pd.Close()
		return
	}
	regions := []*MR{c.stage, c.recv}
	for _, o := range c.ops { // the completions of some were not polled
		regions = append(regions, o.swapTmp(nil))
	}
	for _, m := range regions {
		if m != nil {
			m.Close()
		}
	}
}
