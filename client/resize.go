package iwarp

import (
	"context"
	"fmt"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// Resize makes room for at least depth completions in each ring. Pending completions are kept. It
// may be called concurrently with Poll and Wait; a program that polls FD itself must call Poll once
// more after Resize returns. ctx can cancel it only before the request is sent. If the new memory
// cannot be mapped, the Device fails.
func (c *CQ) Resize(ctx context.Context, depth int) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("iwarp: resize CQ: %w", err)
	}
	c.resizing.Lock()
	defer c.resizing.Unlock()
	if c.isClosed() {
		return fmt.Errorf("%w: resize CQ", ErrClosed)
	}
	c.saveOld() // the request unmaps those rings
	a, err := c.d.call(context.WithoutCancel(ctx), "resize CQ", &ctrlpb.Request{Body: &ctrlpb.Request_ResizeCq{ResizeCq: &ctrlpb.ResizeCQ{Cq: c.h, Depth: size(depth)}}}, -1)
	if err != nil {
		return err
	}
	defer seqpacket.CloseAll(a.fds)
	var ring *shm.CQConsumer
	if len(a.fds) == 1 {
		ring, err = shm.MapCQ(a.fds[0])
	} else {
		err = fmt.Errorf("%d descriptors: %w", len(a.fds), ErrInternal)
	}
	if err != nil {
		err = fmt.Errorf("iwarp: resize CQ: %w", err)
		c.d.fail(err) // completions would be lost
		return err
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		ring.Close()
		return ErrClosed
	}
	arm := c.ring.Armed()
	if arm != shm.ArmNone {
		ring.Arm(arm == shm.ArmSolicited)
	}
	c.old = c.ring
	c.ring = ring
	c.swaps++
	c.mu.Unlock()
	// Wake goroutines in Wait: the new ring may already have completions.
	switch {
	case c.ch == nil:
		c.interrupt()
	case arm != shm.ArmNone:
		c.ch.wake(c)
	}
	return nil
}

// Moderate delays wake-ups of an armed queue until there are count completions, or until period, at
// most a second, has passed since the first of them. Solicited completions and errors still wake it
// at once. If count or period is 0, every completion wakes it.
func (c *CQ) Moderate(ctx context.Context, count int, period time.Duration) error {
	return c.d.do(ctx, "moderate CQ", &ctrlpb.Request{Body: &ctrlpb.Request_ModifyCq{ModifyCq: &ctrlpb.ModifyCQ{
		Cq: c.h, Count: size(max(count, 0)), PeriodUs: uint32(min(max(period.Microseconds(), 0), 1<<31)),
	}}})
}

// Depth returns the number of completions that each ring of the queue can hold.
func (c *CQ) Depth() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ring.Depth()
}

// saveOld copies the completions left in the rings before the last Resize.
func (c *CQ) saveOld() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.old == nil {
		return
	}
	wcs := make([]WC, 64)
	for n := c.old.Poll(wcs); n > 0; n = c.old.Poll(wcs) {
		c.saved = append(c.saved, wcs[:n]...)
	}
	c.old.Close()
	c.old = nil
}

// pollOld returns completions from before the last Resize. Called with mu held.
func (c *CQ) pollOld(wcs []WC) int {
	n := copy(wcs, c.saved)
	c.saved = c.saved[n:]
	if c.old != nil && n < len(wcs) {
		n += c.old.Poll(wcs[n:])
		if n < len(wcs) { // nothing is added to it any longer
			c.old.Close()
			c.old = nil
		}
	}
	return n
}
