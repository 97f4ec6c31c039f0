package iwarp

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/spin"
	"github.com/iwarpd/iwarpd/shm"
)

// CQ is a completion queue.
type CQ struct {
	d    *Device
	h    uint32
	file *wakeups // nil if ch is set
	fd   int
	ch   *CompChannel // channel shared with other CQs, or nil if file is set

	queued bool // in ch.ready; guarded by ch.mu

	resizing sync.Mutex // held by Resize and Close; acquired before mu

	mu     sync.Mutex // guards the rest
	ring   *shm.CQConsumer
	old    *shm.CQConsumer // ring before the last Resize until it is empty, or nil
	saved  []WC            // completions left in the rings before old
	swaps  int             // number of times that Resize replaced ring
	ending bool            // Close has sent its request; the daemon closes its end first
	closed bool
	armed  bool // set since the channel was last drained

	sleeper chan struct{} // token of the goroutine that polls and sleeps; it owns the rest
	spin    spin.Limit    // how long it polls
}

// leastSpin is how long Wait polls before it sleeps: about the cost of waking a thread on another
// CPU in a VM, and as long as a worker polls. Wait yields its CPU between polls, so that others
// with work can have it.
const leastSpin = 50 * time.Microsecond

// CreateCQ creates a completion queue with room for at least depth completions. It
// must have room for all requests that can complete before the program polls; an
// overrun ends the connections of its QPs.
func (d *Device) CreateCQ(ctx context.Context, depth int) (*CQ, error) {
	return d.createCQ(ctx, depth, nil)
}

func (d *Device) createCQ(ctx context.Context, depth int, ch *CompChannel) (*CQ, error) {
	if depth <= 0 {
		return nil, &Error{"create CQ", ctrlpb.Code_CODE_INVALID, fmt.Sprintf("depth %d", depth)}
	}
	req, want := &ctrlpb.CreateCQ{Depth: size(depth)}, 2
	if ch != nil {
		req.Channel, want = ch.h, 1
	}
	a, err := d.call(ctx, "create CQ", &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: req}}, -1)
	if err != nil {
		return nil, err
	}
	if len(a.fds) != want {
		seqpacket.CloseAll(a.fds)
		return nil, fmt.Errorf("%w: create CQ: %d descriptors", ErrInternal, len(a.fds))
	}
	ring, err := shm.MapCQ(a.fds[0])
	closeFD(a.fds[0])
	if err != nil {
		seqpacket.CloseAll(a.fds[1:])
		d.giveBack(a.reply)
		return nil, fmt.Errorf("iwarp: create CQ: %w", err)
	}
	c := &CQ{d: d, h: a.reply.GetCq().GetCq(), ring: ring, ch: ch, sleeper: make(chan struct{}, 1), spin: spin.Limit{Least: leastSpin}}
	if ch != nil {
		c.fd = ch.fd
		ch.mu.Lock()
		ch.cqs[c.h] = c
		ch.mu.Unlock()
	} else {
		c.fd, c.file = a.fds[1], newWakeups(a.fds[1], "iwarp-cq", 512)
	}
	d.mu.Lock()
	closed := d.closed
	if !closed {
		d.cqs[c] = struct{}{}
	}
	d.mu.Unlock()
	if closed {
		c.unmap()
		return nil, fmt.Errorf("%w: create CQ", ErrClosed)
	}
	return c, nil
}

// Poll moves up to len(wcs) completions to wcs and returns their number. It does not
// wait.
func (c *CQ) Poll(wcs []WC) int {
	n := c.poll(wcs)
	if n == 0 && c.d.progress != nil && c.d.progress.Turn() > 0 {
		n = c.poll(wcs)
	}
	return n
}

func (c *CQ) poll(wcs []WC) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0
	}
	if c.old != nil || len(c.saved) > 0 {
		n := c.pollOld(wcs)
		return n + c.ring.Poll(wcs[n:])
	}
	return c.ring.Poll(wcs)
}

// Wait is like Poll but waits for at least one completion: it spins for a while, then
// sleeps. n is 0 only with an error. For a CQ of a CompChannel it returns ErrInvalid;
// use CompChannel.Wait.
func (c *CQ) Wait(ctx context.Context, wcs []WC) (n int, err error) {
	return c.waitUnless(ctx, wcs, func() bool { return false })
}

// waitUnless is Wait, but returns without completions, and without an error, when over returns
// true. A goroutine that makes it true calls interrupt after that.
func (c *CQ) waitUnless(ctx context.Context, wcs []WC, over func() bool) (n int, err error) {
	if c.ch != nil {
		return 0, &Error{"wait for completions", ctrlpb.Code_CODE_INVALID, "the queue has a completion channel: wait there"}
	}
	if n := c.Poll(wcs); n > 0 {
		return n, nil
	}
	select { // one goroutine polls and sleeps, the others wait for their turn
	case c.sleeper <- struct{}{}:
		defer func() { <-c.sleeper }()
	case <-ctx.Done():
		return 0, fmt.Errorf("iwarp: wait for completions: %w", ctx.Err())
	}
	for {
		if n := c.look(wcs); n > 0 {
			return n, nil
		}
		swaps := c.arm(false)
		if n := c.Poll(wcs); n > 0 {
			return n, nil
		}
		began := time.Now()
		err := c.sleep(ctx, swaps, over)
		c.spin.Slept(time.Since(began))
		if err == nil && over() {
			return 0, nil
		}
		if err != nil {
			// Completions flushed when the daemon ended are still there.
			if n := c.poll(wcs); n > 0 {
				return n, nil
			}
			return 0, fmt.Errorf("iwarp: wait for completions: %w", err)
		}
	}
}

// look polls for as long as spinning is worth it.
func (c *CQ) look(wcs []WC) int {
	end := time.Now().Add(c.spin.Now())
	for {
		for range 16 {
			if n := c.Poll(wcs); n > 0 {
				return n
			}
		}
		if time.Now().After(end) {
			return 0
		}
		spin.Yield()
	}
}

// interrupt wakes a goroutine in waitUnless.
func (c *CQ) interrupt() { c.file.interrupt() }

// sleep waits for the wake-up of an armed queue, or until Resize has replaced the ring more
// than swaps times, or over returns true.
func (c *CQ) sleep(ctx context.Context, swaps int, over func() bool) error {
	_ = c.file.SetReadDeadline(time.Time{})
	c.mu.Lock()
	resized := c.swaps != swaps
	c.mu.Unlock()
	if resized || over() { // checked after clearing the deadline, which both set
		return nil
	}
	b, err := c.file.sleep(ctx, c.d, c.isEnding)
	if len(b) > 0 {
		c.mu.Lock()
		c.armed = false
		c.mu.Unlock()
	}
	return err
}

// Arm makes FD readable at the next completion or, with solicitedOnly, at the next one that is
// solicited or has failed. Earlier completions do not count, so call Poll once more after Arm.
// For a CQ without a CompChannel, Arm also clears an earlier wake-up of FD.
func (c *CQ) Arm(solicitedOnly bool) { c.arm(solicitedOnly) }

func (c *CQ) arm(solicitedOnly bool) (swaps int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.swaps
	}
	if c.armed && c.ch == nil {
		shm.Drain(c.fd)
	}
	c.armed = true
	c.ring.Arm(solicitedOnly)
	return c.swaps
}

// fired reports whether the daemon has disarmed the queue.
func (c *CQ) fired() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed && c.armed && c.ring.Armed() == shm.ArmNone
}

// FD returns the descriptor that becomes readable after Arm, for poll and epoll. The CQ, or its
// channel, owns it.
func (c *CQ) FD() int { return c.fd }

// Overruns returns the number of completions lost because the queue was full.
func (c *CQ) Overruns() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0
	}
	return c.ring.Overruns()
}

func (c *CQ) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

func (c *CQ) isEnding() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed || c.ending
}

func (c *CQ) setEnding(v bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = v
}

// Close destroys the queue. It fails with ErrBusy while a QP uses it.
func (c *CQ) Close() error {
	c.resizing.Lock() // Resize maps rings that this request frees
	defer c.resizing.Unlock()
	if c.isClosed() {
		return nil
	}
	c.setEnding(true)
	err := c.d.do(context.Background(), "close CQ", &ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: c.h}}})
	if err != nil && c.d.Err() == nil {
		c.setEnding(false)
		return err
	}
	c.d.mu.Lock()
	delete(c.d.cqs, c)
	c.d.mu.Unlock()
	c.unmap()
	return err
}

func (c *CQ) unmap() {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.ring.Close()
	if c.old != nil {
		c.old.Close()
	}
	c.old, c.saved = nil, nil
	c.mu.Unlock()
	if c.ch != nil {
		c.ch.forget(c)
		return
	}
	c.file.Close() // wakes a sleeper
}
