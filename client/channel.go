package iwarp

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// manyWakes is a number of bytes that fits in the channel.
const manyWakes = 1024

// wakesRead is the number of bytes read from the channel at a time.
const wakesRead = 4096

// CompChannel is a completion channel: it waits for completions of several CQs, with a single
// descriptor.
type CompChannel struct {
	d    *Device
	h    uint32
	file *wakeups
	fd   int

	mu     sync.Mutex // guards the rest; acquired before that of a CQ
	cqs    map[uint32]*CQ
	ready  []*CQ // CQs with a pending wake-up, oldest first
	ending bool  // Close has sent its request; the daemon closes its end first
	closed bool

	sleeper chan struct{} // held by the goroutine that reads from the descriptor
}

// CreateCompChannel creates a completion channel. Its CreateCQ method creates CQs that use it.
func (d *Device) CreateCompChannel(ctx context.Context) (*CompChannel, error) {
	a, err := d.call(ctx, "create channel", &ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}, -1)
	if err != nil {
		return nil, err
	}
	if len(a.fds) != 1 {
		seqpacket.CloseAll(a.fds)
		return nil, fmt.Errorf("%w: create channel: %d descriptors", ErrInternal, len(a.fds))
	}
	ch := &CompChannel{
		d: d, h: a.reply.GetChannel().GetChannel(), fd: a.fds[0], file: newWakeups(a.fds[0], "iwarp-channel", wakesRead),
		cqs: make(map[uint32]*CQ), sleeper: make(chan struct{}, 1),
	}
	d.mu.Lock()
	closed := d.closed
	if !closed {
		d.channels[ch] = struct{}{}
	}
	d.mu.Unlock()
	if closed {
		ch.file.Close()
		return nil, fmt.Errorf("%w: create channel", ErrClosed)
	}
	return ch, nil
}

// CreateCQ creates a completion queue that wakes this channel. The program arms and polls it, and
// must not call its Wait.
func (ch *CompChannel) CreateCQ(ctx context.Context, depth int) (*CQ, error) {
	return ch.d.createCQ(ctx, depth, ch)
}

// Wait waits until an armed CQ of the channel has a completion, and returns that CQ, which is then
// no longer armed: arm it, poll it until it is empty, then call Wait again. The returned CQ may be
// empty. Several goroutines may call Wait; each gets a different CQ.
func (ch *CompChannel) Wait(ctx context.Context) (*CQ, error) {
	select { // one goroutine reads, the others wait for their turn
	case ch.sleeper <- struct{}{}:
		defer func() { <-ch.sleeper }()
	case <-ctx.Done():
		return nil, fmt.Errorf("iwarp: wait for a completion channel: %w", ctx.Err())
	}
	for {
		_ = ch.file.SetReadDeadline(time.Time{})
		if c := ch.take(); c != nil { // checked after clearing the deadline, which wake sets
			return c, nil
		}
		b, err := ch.file.sleep(ctx, ch.d, ch.isEnding)
		if err != nil {
			return nil, fmt.Errorf("iwarp: wait for a completion channel: %w", err)
		}
		ch.mu.Lock()
		ch.woken(b)
		ch.mu.Unlock()
	}
}

// take returns the queue with the oldest pending wake-up, or nil.
func (ch *CompChannel) take() *CQ {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if len(ch.ready) == 0 {
		return nil
	}
	c := ch.ready[0]
	ch.ready = ch.ready[1:]
	c.queued = false
	return c
}

func (ch *CompChannel) isEnding() bool {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.closed || ch.ending
}

// woken processes the bytes read. Called with mu held.
func (ch *CompChannel) woken(b []byte) {
	if len(b) >= manyWakes { // the channel may have been full and lost wake-ups
		for _, c := range ch.cqs {
			if c.fired() {
				ch.push(c)
			}
		}
	}
	for ; len(b) >= 8; b = b[8:] {
		ch.push(ch.cqs[binary.LittleEndian.Uint32(b)])
	}
}

// Poll is like Wait but does not block. It returns nil if no CQ is ready.
func (ch *CompChannel) Poll() *CQ {
	var b [wakesRead]byte
	ch.mu.Lock()
	if !ch.closed && len(ch.ready) == 0 {
		if n, err := unix.Read(ch.fd, b[:]); err == nil {
			ch.woken(b[:n])
		}
	}
	ch.mu.Unlock()
	c := ch.take()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if len(ch.ready) > 0 && !ch.closed { // wake a goroutine blocked in Wait, since this call read its bytes
		ch.file.interrupt()
	}
	return c
}

// push makes Wait return c, which may be nil or already queued. Called with mu held.
func (ch *CompChannel) push(c *CQ) {
	if c != nil && !c.queued {
		c.queued = true
		ch.ready = append(ch.ready, c)
	}
}

// wake makes Wait return c.
func (ch *CompChannel) wake(c *CQ) {
	ch.mu.Lock()
	ch.push(c)
	ch.mu.Unlock()
	ch.file.interrupt()
}

// forget removes a queue that is being closed.
func (ch *CompChannel) forget(c *CQ) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	delete(ch.cqs, c.h)
	ch.ready = slices.DeleteFunc(ch.ready, func(o *CQ) bool { return o == c })
}

// FD returns a descriptor for poll and epoll that becomes readable when a CQ of the channel wakes
// it. Poll then returns the CQs, one per call, until it returns nil. The channel owns the
// descriptor.
func (ch *CompChannel) FD() int { return ch.fd }

// Close closes the channel. It returns ErrBusy if CQs still use it.
func (ch *CompChannel) Close() error {
	ch.mu.Lock()
	closed := ch.closed
	ch.ending = true
	ch.mu.Unlock()
	if closed {
		return nil
	}
	err := ch.d.do(context.Background(), "close channel", &ctrlpb.Request{Body: &ctrlpb.Request_DestroyChannel{DestroyChannel: &ctrlpb.DestroyChannel{Channel: ch.h}}})
	if err != nil && ch.d.Err() == nil {
		ch.mu.Lock()
		ch.ending = false
		ch.mu.Unlock()
		return err
	}
	ch.d.mu.Lock()
	delete(ch.d.channels, ch)
	ch.d.mu.Unlock()
	ch.end()
	return err
}

// end wakes blocked goroutines.
func (ch *CompChannel) end() {
	ch.mu.Lock()
	ch.closed = true
	ch.mu.Unlock()
	ch.file.Close()
}
