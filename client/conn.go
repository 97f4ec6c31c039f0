package iwarp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Conn is a connection at the plain level: a queue pair with its queues,
// buffers and memory.
//
// Each Send is a message, received by one Recv of the peer. The peer has room
// for as many messages as its RecvDepth says that it has not received yet, and
// none may be longer than its RecvSize: one more, or a longer one, ends the
// connection. So protocols over a Conn answer requests, or count credits.
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
	stage   *MR // chunks for data that is in no region
	recv    *MR // receive buffers

	memMu sync.RWMutex // held while stage, recv or an op's tmp is touched
	gone  bool         // they are unmapped; guarded by memMu

	free   chan *op // operations not in use
	chunks chan int // chunks of stage not in use
	ops    []*op
	leader chan struct{} // token of the one that polls scq
	swcs   [16]WC        // the leader's

	reader chan struct{} // token of the one that is in Recv
	rwcs   [16]WC        // the reader's; nr of them from ri on are not received yet
	ri, nr int

	closeOnce sync.Once
}

// op is an operation in flight.
type op struct {
	id   int
	done chan struct{} // signalled when wc is there
	wc   WC

	mu        sync.Mutex
	complete  bool
	abandoned bool // the caller has gone; whoever sees the completion cleans up
	chunk     int  // of stage; -1: none
	tmp       *MR  // closed when the operation is complete
}

// Stage: chunks through which data goes that lies in no region.
const (
	chunkSize  = 64 << 10
	numChunks  = 8
	chunkAhead = 4 // chunks that one call keeps in flight

	defaultRecvSize = 16 << 10
	defaultDepth    = 64
	defaultInline   = 64
)

// Dial connects to a peer that listens at addr, "addr:port".
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

// Dial connects by the daemon of DefaultSocket.
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

// Listen listens by the daemon of DefaultSocket. The connections that Accept
// gives end with the Listener.
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

// AcceptConn gives the peer a connection at the plain level.
func (r *ConnRequest) AcceptConn(ctx context.Context, cfg *Config) (*Conn, error) {
	c, err := r.l.d.newConn(ctx, cfg.orDefault())
	if err != nil {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = r.Reject(rctx, nil)
		return nil, err
	}
	if _, err := r.Accept(ctx, c.qp, cfg); err != nil {
		c.release()
		return nil, err
	}
	return c, nil
}

// ofPeer reports whether a failed accept is the peer's doing.
func ofPeer(err error) bool {
	for _, e := range []error{ErrRefused, ErrTimeout, ErrProtocol, ErrNoObject, ErrPeerClosed, ErrCanceled} {
		if errors.Is(err, e) {
			return true
		}
	}
	_, ok := errors.AsType[*TerminateError](err)
	return ok
}

// newConn makes all that a Conn needs but its connection.
func (d *Device) newConn(ctx context.Context, cfg *Config) (_ *Conn, err error) {
	or := func(v, def, limit int) int {
		if v <= 0 {
			v = def
		}
		if limit > 0 {
			v = min(v, limit)
		}
		return v
	}
	sends, recvs := or(cfg.SendDepth, defaultDepth, d.attr.MaxQPWR), or(cfg.RecvDepth, defaultDepth, d.attr.MaxQPWR)
	c := &Conn{
		d: d, pd: cfg.PD, inline: or(cfg.MaxInline, defaultInline, d.attr.MaxInline), recvLen: or(cfg.RecvSize, defaultRecvSize, 0),
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

// QP returns the queue pair below. Work requests must not be posted to it.
func (c *Conn) QP() *QP { return c.qp }

// Info returns the facts of the connection.
func (c *Conn) Info() *ConnInfo { return c.qp.Info() }

// Alloc makes memory for the connection: for the peer to read or write within
// the rights of a, and to be sent from and read into without a copy. Unless the
// PD is the caller's, Close unmaps it.
func (c *Conn) Alloc(ctx context.Context, size int, a Access) (*MR, error) {
	return c.pd.Alloc(ctx, size, a)
}

// begin takes an operation that is not in use.
func (c *Conn) begin(ctx context.Context) (*op, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for {
		select {
		case o := <-c.free:
			o.complete, o.abandoned, o.chunk, o.tmp = false, false, -1, nil
			return o, nil
		case c.leader <- struct{}{}: // operations that nobody waits for any more come free by polling
			err := c.lead(ctx, func() bool { return len(c.free) > 0 })
			<-c.leader
			if err != nil {
				return nil, err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// end gives an operation back.
func (c *Conn) end(o *op) {
	if o.chunk >= 0 {
		c.chunks <- o.chunk
	}
	if o.tmp != nil {
		tmp := o.tmp
		go tmp.Close() // asks the daemon, and the poller must not wait for that
	}
	c.free <- o
}

// lead waits for completions and hands them out. The caller holds the leader's
// token; it returns at once when idle says that there is nothing to wait for.
func (c *Conn) lead(ctx context.Context, idle func() bool) error {
	if idle() {
		return nil
	}
	n, err := c.scq.Wait(ctx, c.swcs[:])
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

// move copies between the caller's memory and the connection's own, which Close
// may be unmapping.
func (c *Conn) move(dst, src []byte) error {
	c.memMu.RLock()
	defer c.memMu.RUnlock()
	if c.gone {
		return ErrClosed
	}
	copy(dst, src)
	return nil
}

// chunk is the memory of o's chunk.
func (c *Conn) chunk(o *op) []byte { return c.stage.mem[o.chunk*chunkSize:][:chunkSize] }

// run posts wr as o and waits for its completion. o is given back.
func (c *Conn) run(ctx context.Context, o *op, wr *SendWR) error {
	if err := c.post(o, wr); err != nil {
		return err
	}
	if err := c.await(ctx, o); err != nil {
		return err
	}
	err := c.result(&o.wc)
	c.end(o)
	return err
}

// post posts wr as o, which is given back if that fails.
func (c *Conn) post(o *op, wr *SendWR) error {
	wr.ID = uint64(o.id)
	wr.Flags |= Signaled
	if err := c.qp.PostSend(wr); err != nil {
		c.end(o)
		return err
	}
	return nil
}

// await waits for the completion of o. With an error o is not the caller's any
// more.
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

// abandon leaves o to whoever sees its completion.
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

// result makes an error of a completion that is one.
func (c *Conn) result(wc *WC) error {
	if wc.Status == WCSuccess {
		return nil
	}
	cause := c.qp.Err()
	if wc.Status == WCFlushErr && cause == nil {
		// The end of the connection is on its way.
		select {
		case <-c.qp.Done():
			cause = c.qp.Err()
		case <-time.After(time.Second):
		}
	}
	if t, remote := wc.Terminate(); t != nil && cause == nil {
		cause = &TerminateError{Remote: remote, Term: t}
	}
	return &WCError{Status: wc.Status, Op: wc.Op, Cause: cause}
}

// A SendMode says how a message is sent.
type SendMode struct {
	Solicited  bool   // wakes a peer that has armed its CQ for such messages only
	Invalidate uint32 // rkey of the peer's that is invalidated with the arrival; 0: none
}

// Send sends b as one message. It returns when b may be used again.
func (c *Conn) Send(ctx context.Context, b []byte) error { return c.SendMsg(ctx, b, SendMode{}) }

// SendMsg is Send with a mode.
func (c *Conn) SendMsg(ctx context.Context, b []byte, mode SendMode) error {
	wr := SendWR{Op: OpSend}
	if mode.Invalidate != 0 {
		wr.Op, wr.Inv = OpSendInv, mode.Invalidate
	}
	if mode.Solicited {
		wr.Flags |= Solicited
	}
	o, err := c.begin(ctx)
	if err != nil {
		return c.wrap("send", err)
	}
	var sge [1]SGE
	switch mr, off := c.pd.find(b); {
	case mr != nil:
		sge[0] = mr.SGE(off, len(b))
		wr.SGEs = sge[:]
	case len(b) <= c.inline:
		wr.Flags |= Inline
		wr.Inline = b
	case len(b) <= chunkSize:
		if err := c.takeChunk(ctx, o); err != nil {
			c.end(o)
			return c.wrap("send", err)
		}
		err = c.move(c.chunk(o), b)
		sge[0] = c.stage.SGE(o.chunk*chunkSize, len(b))
		wr.SGEs = sge[:]
	default: // a message has to be in one piece
		if o.tmp, err = c.pd.Alloc(ctx, len(b), AccessLocalWrite); err != nil {
			c.end(o)
			return c.wrap("send", err)
		}
		err = c.move(o.tmp.mem, b)
		sge[0] = o.tmp.SGE(0, len(b))
		wr.SGEs = sge[:]
	}
	if err != nil {
		c.end(o)
		return c.wrap("send", err)
	}
	return c.wrap("send", c.run(ctx, o, &wr))
}

// takeChunk waits for a chunk of the stage for o.
func (c *Conn) takeChunk(ctx context.Context, o *op) error {
	for {
		select {
		case o.chunk = <-c.chunks:
			return nil
		case c.leader <- struct{}{}:
			err := c.lead(ctx, func() bool { return len(c.chunks) > 0 })
			<-c.leader
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// wrap names the operation and the peer in an error.
func (c *Conn) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	if i := c.Info(); i != nil {
		return fmt.Errorf("%s to %v: %w", what, i.Remote, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// MsgInfo tells more of a message than its octets.
type MsgInfo struct {
	Imm       uint64 // immediate data, if HasImm
	HasImm    bool
	InvKey    uint32 // the key that it invalidated; 0: none
	Solicited bool
}

// Recv receives the next message into b and returns its length. A message that
// is longer than b stays, with ErrMessage. io.EOF: the peer has closed the
// connection, and everything it sent has been received.
func (c *Conn) Recv(ctx context.Context, b []byte) (int, error) {
	n, _, err := c.RecvMsg(ctx, b)
	return n, err
}

// RecvMsg is Recv that tells more of the message.
func (c *Conn) RecvMsg(ctx context.Context, b []byte) (int, MsgInfo, error) {
	select {
	case c.reader <- struct{}{}:
		defer func() { <-c.reader }()
	case <-ctx.Done():
		return 0, MsgInfo{}, c.wrap("receive", ctx.Err())
	}
	if c.nr == 0 {
		n, err := c.rcq.Wait(ctx, c.rwcs[:])
		if err != nil {
			return 0, MsgInfo{}, c.wrap("receive", err)
		}
		c.ri, c.nr = 0, n
	}
	wc := &c.rwcs[c.ri]
	if wc.Status != WCSuccess {
		err := c.result(wc) // stays: whoever asks again gets the same answer
		if errors.Is(err, ErrPeerClosed) && wc.Status == WCFlushErr {
			return 0, MsgInfo{}, io.EOF
		}
		return 0, MsgInfo{}, c.wrap("receive", err)
	}
	n := int(wc.Len)
	if n > len(b) {
		return n, MsgInfo{}, fmt.Errorf("iwarp: message of %d octets, buffer of %d: %w", n, len(b), ErrMessage)
	}
	i := int(wc.ID)
	info := MsgInfo{Imm: wc.Imm, HasImm: wc.Flags&WCWithImm != 0, Solicited: wc.Flags&WCSolicited != 0}
	if wc.Flags&WCWithInv != 0 {
		info.InvKey = wc.InvKey
	}
	if err := c.move(b, c.recv.mem[i*c.recvLen:][:n]); err != nil {
		return 0, MsgInfo{}, c.wrap("receive", err)
	}
	c.ri++
	c.nr--
	_ = c.postRecv(i) // fails only when the connection is over, which the next call tells
	return n, info, nil
}

// Write writes b to the peer's memory r, from its start on. When it returns b
// may be used again; that the peer's memory holds it is certain once a message
// sent later has been answered.
func (c *Conn) Write(ctx context.Context, r Remote, b []byte) error {
	if uint64(len(b)) > uint64(r.Len) {
		return fmt.Errorf("iwarp: write of %d octets to %d of the peer's: %w", len(b), r.Len, ErrInvalid)
	}
	if mr, off := c.pd.find(b); mr != nil {
		return c.wrap("write", c.direct(ctx, OpWrite, r, mr.SGE(off, len(b))))
	}
	return c.wrap("write", c.staged(ctx, OpWrite, r, b))
}

// Read reads the peer's memory r, from its start on, into b.
func (c *Conn) Read(ctx context.Context, r Remote, b []byte) error {
	if uint64(len(b)) > uint64(r.Len) {
		return fmt.Errorf("iwarp: read of %d octets from %d of the peer's: %w", len(b), r.Len, ErrInvalid)
	}
	if mr, off := c.pd.find(b); mr != nil {
		return c.wrap("read", c.direct(ctx, OpRead, r, mr.SGE(off, len(b))))
	}
	return c.wrap("read", c.staged(ctx, OpRead, r, b))
}

func (c *Conn) direct(ctx context.Context, what Op, r Remote, sge SGE) error {
	o, err := c.begin(ctx)
	if err != nil {
		return err
	}
	sges := [1]SGE{sge}
	return c.run(ctx, o, &SendWR{Op: what, SGEs: sges[:], RKey: r.RKey, Remote: r.Addr})
}

// staged moves b through chunks of the stage, some of them in flight.
func (c *Conn) staged(ctx context.Context, what Op, r Remote, b []byte) (err error) {
	var (
		flight [chunkAhead]*op
		parts  [chunkAhead][]byte
		n      int // in flight
	)
	finish := func() error {
		o, part := flight[0], parts[0]
		copy(flight[:], flight[1:n])
		copy(parts[:], parts[1:n])
		n--
		if err := c.await(ctx, o); err != nil {
			return err
		}
		err := c.result(&o.wc)
		if err == nil && what == OpRead {
			err = c.move(part, c.chunk(o))
		}
		c.end(o)
		return err
	}
	for off := 0; off < len(b) || n > 0; {
		var o *op
		if off < len(b) && n < chunkAhead {
			if o, err = c.beginChunk(ctx, n == 0); err != nil {
				break
			}
		}
		if o == nil { // all in flight that can be
			if err = finish(); err != nil {
				break
			}
			continue
		}
		part := b[off:min(off+chunkSize, len(b))]
		if what == OpWrite {
			if err = c.move(c.chunk(o), part); err != nil {
				c.end(o)
				break
			}
		}
		sges := [1]SGE{c.stage.SGE(o.chunk*chunkSize, len(part))}
		if err = c.post(o, &SendWR{Op: what, SGEs: sges[:], RKey: r.RKey, Remote: r.Addr + uint64(off)}); err != nil {
			break
		}
		flight[n], parts[n] = o, part
		n++
		off += len(part)
	}
	for n > 0 { // after an error
		if ferr := finish(); err == nil {
			err = ferr
		}
	}
	return err
}

// beginChunk takes an operation with a chunk. It waits for them only if told
// to, so that nobody waits for others while holding some.
func (c *Conn) beginChunk(ctx context.Context, block bool) (*op, error) {
	if block {
		o, err := c.begin(ctx)
		if err != nil {
			return nil, err
		}
		if err := c.takeChunk(ctx, o); err != nil {
			c.end(o)
			return nil, err
		}
		return o, nil
	}
	select {
	case o := <-c.free:
		o.complete, o.abandoned, o.chunk, o.tmp = false, false, -1, nil
		select {
		case o.chunk = <-c.chunks:
			return o, nil
		default:
			c.end(o)
		}
	default:
	}
	return nil, nil
}

// CompareSwap replaces the 8 octets at the start of r by swap if they hold cmp,
// and returns what they held before. Both sides take them for a number in
// their byte order (RFC 7306).
func (c *Conn) CompareSwap(ctx context.Context, r Remote, cmp, swap uint64) (old uint64, err error) {
	return c.atomic(ctx, &SendWR{Op: OpCmpSwap, RKey: r.RKey, Remote: r.Addr, CompareAdd: cmp, Swap: swap, CompareMask: ^uint64(0), SwapMask: ^uint64(0)})
}

// FetchAdd adds add to the number in the 8 octets at the start of r, and
// returns what it was before.
func (c *Conn) FetchAdd(ctx context.Context, r Remote, add uint64) (old uint64, err error) {
	return c.atomic(ctx, &SendWR{Op: OpFetchAdd, RKey: r.RKey, Remote: r.Addr, CompareAdd: add})
}

func (c *Conn) atomic(ctx context.Context, wr *SendWR) (uint64, error) {
	o, err := c.beginChunk(ctx, true)
	if err != nil {
		return 0, c.wrap("atomic", err)
	}
	at := o.chunk * chunkSize
	sges := [1]SGE{c.stage.SGE(at, 8)}
	wr.SGEs = sges[:]
	if err := c.post(o, wr); err != nil {
		return 0, c.wrap("atomic", err)
	}
	if err := c.await(ctx, o); err != nil {
		return 0, c.wrap("atomic", err)
	}
	var old [8]byte
	if err = c.result(&o.wc); err == nil {
		err = c.move(old[:], c.chunk(o))
	}
	c.end(o)
	return binary.NativeEndian.Uint64(old[:]), c.wrap("atomic", err)
}

// closeWait is how long Close lets an orderly close take.
const closeWait = 5 * time.Second

// Close closes the connection in order and gives back all that belongs to it,
// but for memory of Alloc whose PD is the caller's.
func (c *Conn) Close() error { return c.close(false) }

// Abort resets the connection and gives back all that belongs to it.
func (c *Conn) Abort() error { return c.close(true) }

func (c *Conn) close(abort bool) error {
	var err error
	c.closeOnce.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeWait)
		defer cancel()
		derr := c.qp.disconnect(ctx, abort)
		if derr == nil && !abort {
			_, _ = wait(ctx, c.d, c.qp.Done())
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

// release gives back the objects, in the order of their dependence.
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
	for _, m := range []*MR{c.stage, c.recv} {
		if m != nil {
			m.Close()
		}
	}
}
