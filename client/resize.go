package iwarp

import (
	"context"
	"fmt"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// Resize gives the queue room for at least depth completions in each ring. Those
// that wait stay. It may run beside Poll and Wait; a program that sleeps on FD
// itself polls once more when Resize returns. Once it is asked for it happens:
// that ctx ends matters only before. A queue whose new memory cannot be mapped
// ends the Device.
func (c *CQ) Resize(ctx context.Context, depth int) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("iwarp: resize CQ: %w", err)
	}
	c.resizing.Lock()
	defer c.resizing.Unlock()
	c.saveOld() // the request takes those rings away
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
		c.d.fail(err) // completions go where nobody sees them
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
	// Whoever sleeps looks at the new ring, which may hold something already.
	switch {
	case c.ch == nil:
		_ = c.file.SetReadDeadline(time.Unix(1, 0))
	case arm != shm.ArmNone:
		c.ch.wake(c)
	}
	return nil
}

// Moderate has an armed queue wake up only after count completions, or period
// after the first of them, at most a second. Solicited ones and errors still
// wake at once. 0 for either: every completion wakes.
func (c *CQ) Moderate(ctx context.Context, count int, period time.Duration) error {
	return c.d.do(ctx, "moderate CQ", &ctrlpb.Request{Body: &ctrlpb.Request_ModifyCq{ModifyCq: &ctrlpb.ModifyCQ{
		Cq: c.h, Count: size(max(count, 0)), PeriodUs: uint32(min(max(period.Microseconds(), 0), 1<<31)),
	}}})
}

// Depth returns how many completions each ring of the queue holds.
func (c *CQ) Depth() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ring.Depth()
}

// saveOld copies what the rings before the last Resize still hold.
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

// pollOld takes what there was before the last Resize. Called with mu held.
func (c *CQ) pollOld(wcs []WC) int {
	n := copy(wcs, c.saved)
	c.saved = c.saved[n:]
	if c.old != nil && n < len(wcs) {
		n += c.old.Poll(wcs[n:])
		if n < len(wcs) { // nothing is added to it any more
			c.old.Close()
			c.old = nil
		}
	}
	return n
}
