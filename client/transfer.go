package iwarp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// SendMode modifies how a message is sent.
type SendMode struct {
	Solicited  bool   // wakes a peer whose CQ is armed for solicited messages only
	Invalidate uint32 // rkey of the peer to invalidate on arrival; 0: none
}

// Send sends b as one message. b may be reused when it returns.
func (c *Conn) Send(ctx context.Context, b []byte) error { return c.SendMsg(ctx, b, SendMode{}) }

// SendMsg is Send with a mode.
func (c *Conn) SendMsg(ctx context.Context, b []byte, mode SendMode) error {
	o, wr, err := c.message(ctx, b, mode)
	if err == nil {
		err = c.run(ctx, o, &wr)
	}
	return c.wrap("send to", err)
}

// PostSend is Send that does not wait until the message has been sent. b may be reused when it
// returns, unless it lies in memory of Alloc. A message that cannot be sent ends the connection,
// and Recv returns the reason.
func (c *Conn) PostSend(ctx context.Context, b []byte) error {
	o, wr, err := c.message(ctx, b, SendMode{})
	if err == nil {
		err = c.launch(o, &wr)
	}
	return c.wrap("send to", err)
}

// message returns the work request that sends b, and the operation that holds its memory.
func (c *Conn) message(ctx context.Context, b []byte, mode SendMode) (o *op, wr SendWR, err error) {
	wr.Op = OpSend
	if mode.Invalidate != 0 {
		wr.Op, wr.Inv = OpSendInv, mode.Invalidate
	}
	if mode.Solicited {
		wr.Flags |= Solicited
	}
	if o, err = c.begin(ctx); err != nil {
		return nil, wr, err
	}
	switch mr, off := c.pd.find(b); {
	case mr != nil:
		o.sge[0] = mr.SGE(off, len(b))
		wr.SGEs = o.sge[:]
	case len(b) <= c.inline:
		wr.Flags |= Inline
		wr.Inline = b
	case len(b) <= chunkSize:
		if err = c.takeChunk(ctx, o); err == nil {
			err = c.move(c.chunk(o), b)
			o.sge[0] = c.stage.SGE(o.chunk*chunkSize, len(b))
			wr.SGEs = o.sge[:]
		}
	default: // a message must be contiguous
		var tmp *MR
		if tmp, err = c.pd.Alloc(ctx, len(b), AccessLocalWrite); err == nil {
			o.swapTmp(tmp)
			err = c.move(tmp.mem, b)
			o.sge[0] = tmp.SGE(0, len(b))
			wr.SGEs = o.sge[:]
		}
	}
	if err != nil {
		c.end(o)
	}
	return o, wr, err
}

// takeChunk assigns a chunk of the stage to o, waiting until one is free.
func (c *Conn) takeChunk(ctx context.Context, o *op) error {
	chunk, err := take(ctx, c, c.chunks)
	if err == nil {
		o.chunk = chunk
	}
	return err
}

// wrap adds the operation, with its preposition, and the peer to an error.
func (c *Conn) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %v: %w", what, c.Info().Remote, err)
}

// MsgInfo describes a message, in addition to its data.
type MsgInfo struct {
	Imm       uint64 // immediate data, if HasImm
	HasImm    bool
	InvKey    uint32 // the key that the message invalidated; 0: none
	Solicited bool
}

// Recv receives the next message into b and returns its length. If b is too short it returns
// ErrMessage, and the message stays queued. It returns io.EOF after the last message if the peer
// has closed the connection.
func (c *Conn) Recv(ctx context.Context, b []byte) (int, error) {
	n, _, err := c.RecvMsg(ctx, b)
	return n, err
}

// RecvMsg is like Recv and also returns the MsgInfo of the message.
func (c *Conn) RecvMsg(ctx context.Context, b []byte) (int, MsgInfo, error) {
	select {
	case c.reader <- struct{}{}:
		defer func() { <-c.reader }()
	case <-ctx.Done():
		return 0, MsgInfo{}, c.wrap("receive from", ctx.Err())
	}
	if len(c.arrived) == 0 {
		n, err := c.rcq.Wait(ctx, c.rwcs[:])
		if err != nil {
			return 0, MsgInfo{}, c.wrap("receive from", err)
		}
		c.arrived = c.rwcs[:n]
	}
	wc := &c.arrived[0]
	if wc.Status != WCSuccess {
		err := c.qp.WCErr(ctx, wc) // not consumed: further calls return the same error
		if errors.Is(err, ErrPeerClosed) && wc.Status == WCFlushErr {
			return 0, MsgInfo{}, io.EOF
		}
		return 0, MsgInfo{}, c.wrap("receive from", err)
	}
	n := int(wc.Len)
	if n > len(b) {
		return n, MsgInfo{}, fmt.Errorf("%w: %d bytes, buffer of %d", ErrMessage, n, len(b))
	}
	i := int(wc.ID)
	info := MsgInfo{Imm: wc.Imm, HasImm: wc.Flags&WCWithImm != 0, Solicited: wc.Flags&WCSolicited != 0}
	if wc.Flags&WCWithInv != 0 {
		info.InvKey = wc.InvKey
	}
	if err := c.move(b, c.recv.mem[i*c.recvLen:][:n]); err != nil {
		return 0, MsgInfo{}, c.wrap("receive from", err)
	}
	c.arrived = c.arrived[1:]
	_ = c.postRecv(i) // fails only if the connection has ended, which the next call reports
	return n, info, nil
}

// Write writes b to the start of the peer's memory r. When it returns without an error, b may
// be reused, but the data need not have been placed: RDMA does not acknowledge a Write (RFC
// 5040 Section 5.1). If the peer's memory does not allow the access, the peer ends the
// connection, and a later call returns the *TerminateError. The data has been placed once a
// later Read has returned, or the peer has answered a later message.
func (c *Conn) Write(ctx context.Context, r Remote, b []byte) error {
	return c.transfer(ctx, "write to", OpWrite, r, b)
}

// PostWrite is Write that does not wait until b may be reused. b must lie in memory of Alloc, have at
// most 1 GiB, and stay as it is until the peer has answered a message sent after the Write. A Write that fails ends
// the connection, and Recv returns the reason.
func (c *Conn) PostWrite(ctx context.Context, r Remote, b []byte) error {
	mr, off := c.pd.find(b)
	if mr == nil || uint64(len(b)) > uint64(r.Len) || len(b) > maxTransfer {
		if err := c.qp.Err(); err != nil { // Close has unmapped b
			return c.wrap("write to", err)
		}
		return fmt.Errorf("%w: post a write of %d bytes, at most 1 GiB, to %d of the peer's, from memory that Alloc must have returned", ErrInvalid, len(b), r.Len)
	}
	o, err := c.begin(ctx)
	if err != nil {
		return c.wrap("write to", err)
	}
	o.sge[0] = mr.SGE(off, len(b))
	return c.wrap("write to", c.launch(o, &SendWR{Op: OpWrite, SGEs: o.sge[:], RKey: r.RKey, Remote: r.Addr}))
}

// Read reads len(b) bytes from the start of the peer's memory r into b. Also without bytes it
// waits for the peer's answer.
func (c *Conn) Read(ctx context.Context, r Remote, b []byte) error {
	return c.transfer(ctx, "read from", OpRead, r, b)
}

// transfer performs a Write or Read of b, without a copy if b lies in registered memory.
func (c *Conn) transfer(ctx context.Context, what string, op Op, r Remote, b []byte) error {
	if uint64(len(b)) > uint64(r.Len) {
		return fmt.Errorf("%w: %s memory of the peer: %d bytes, of its %d", ErrInvalid, what, len(b), r.Len)
	}
	mr, at := c.pd.find(b)
	if mr == nil {
		return c.wrap(what, c.staged(ctx, op, r, b))
	}
	for off, left := 0, true; left; { // without bytes there is one operation too
		n := min(len(b)-off, maxTransfer)
		if err := c.direct(ctx, op, Remote{Addr: r.Addr + uint64(off), RKey: r.RKey}, mr.SGE(at+off, n)); err != nil {
			return c.wrap(what, err)
		}
		off += n
		left = off < len(b)
	}
	return nil
}

// maxTransfer is the maximum number of bytes of one operation, which the daemon limits to 2^31-1.
const maxTransfer = 1 << 30

func (c *Conn) direct(ctx context.Context, what Op, r Remote, sge SGE) error {
	o, err := c.begin(ctx)
	if err != nil {
		return err
	}
	o.sge[0] = sge
	return c.run(ctx, o, &SendWR{Op: what, SGEs: o.sge[:], RKey: r.RKey, Remote: r.Addr})
}

// staged transfers b through chunks of the stage, several at a time.
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
		err := c.qp.WCErr(ctx, &o.wc)
		if err == nil && what == OpRead {
			err = c.move(part, c.chunk(o))
		}
		c.end(o)
		return err
	}
	for off, left := 0, true; left || n > 0; { // without bytes there is one operation too
		var o *op
		if left && n < chunkAhead {
			if o, err = c.beginChunk(ctx, n == 0); err != nil {
				break
			}
		}
		if o == nil { // no free chunk, but operations in flight
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
		o.sge[0] = c.stage.SGE(o.chunk*chunkSize, len(part))
		if err = c.post(o, &SendWR{Op: what, SGEs: o.sge[:], RKey: r.RKey, Remote: r.Addr + uint64(off)}); err != nil {
			break
		}
		flight[n], parts[n] = o, part
		n++
		off += len(part)
		left = off < len(b)
	}
	for n > 0 { // after an error
		if ferr := finish(); err == nil {
			err = ferr
		}
	}
	return err
}

// beginChunk returns an operation with a chunk. It waits for them only if block is set: a goroutine
// that already has chunks must not wait for others.
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
		o.reset()
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

// CompareSwap replaces the 8 bytes at the start of r by swap if they equal cmp, and returns their
// previous value. Each side uses its own byte order (RFC 7306).
func (c *Conn) CompareSwap(ctx context.Context, r Remote, cmp, swap uint64) (old uint64, err error) {
	return c.atomic(ctx, &SendWR{Op: OpCmpSwap, RKey: r.RKey, Remote: r.Addr, CompareAdd: cmp, Swap: swap, CompareMask: ^uint64(0), SwapMask: ^uint64(0)})
}

// FetchAdd adds add to the 8-byte number at the start of r, and returns its previous value.
func (c *Conn) FetchAdd(ctx context.Context, r Remote, add uint64) (old uint64, err error) {
	return c.atomic(ctx, &SendWR{Op: OpFetchAdd, RKey: r.RKey, Remote: r.Addr, CompareAdd: add})
}

func (c *Conn) atomic(ctx context.Context, wr *SendWR) (uint64, error) {
	o, err := c.beginChunk(ctx, true)
	if err != nil {
		return 0, c.wrap("atomic on", err)
	}
	o.sge[0] = c.stage.SGE(o.chunk*chunkSize, 8)
	wr.SGEs = o.sge[:]
	if err := c.post(o, wr); err != nil {
		return 0, c.wrap("atomic on", err)
	}
	if err := c.await(ctx, o); err != nil {
		return 0, c.wrap("atomic on", err)
	}
	var old [8]byte
	if err = c.qp.WCErr(ctx, &o.wc); err == nil {
		err = c.move(old[:], c.chunk(o))
	}
	c.end(o)
	return binary.NativeEndian.Uint64(old[:]), c.wrap("atomic on", err)
}
