// Package ring implements the index logic of single-producer, single-consumer rings whose two
// indices are shared with another thread, another process or the kernel. Indices increase freely
// modulo 2^32; Mask maps an index to its entry. The entries themselves belong to the caller.
//
// The other side is not trusted. Whatever it stores in its index, the returned counts never exceed
// the size of the ring, and a masked index is always valid.
package ring

import "sync/atomic"

// Producer is the writing end. It is not safe for concurrent use.
type Producer struct {
	prod *atomic.Uint32 // ours: only Submit writes it
	cons *atomic.Uint32 // the other side's
	size uint32
	next uint32 // our index, reserved entries included
	sent uint32 // our index as published; shared memory is not read back
	seen uint32 // last value read of the consumer's index
	bad  bool
}

// NewProducer returns the producer of a ring of size entries, a power of two. It continues from the
// current shared indices.
func NewProducer(prod, cons *atomic.Uint32, size uint32) Producer {
	check(size)
	at := prod.Load()
	return Producer{prod: prod, cons: cons, size: size, next: at, sent: at, seen: cons.Load()}
}

// Free returns the number of entries that can be reserved. It reads the other side's index only if
// the last value read leaves fewer than want.
func (p *Producer) Free(want uint32) uint32 {
	if used := p.next - p.seen; used <= p.size && p.size-used >= want {
		return p.size - used
	}
	p.seen = p.cons.Load()
	used := p.next - p.seen
	if used > p.size {
		p.bad = true
		return 0
	}
	return p.size - used
}

// Reserve reserves up to n free entries. It returns the index of the first, not masked, and their
// number. The caller may write them until Submit.
func (p *Producer) Reserve(n uint32) (first, count uint32) {
	count = min(n, p.Free(n))
	first = p.next
	p.next += count
	return first, count
}

// Submit publishes all reserved entries.
func (p *Producer) Submit() {
	p.sent = p.next
	p.prod.Store(p.sent)
}

// Unsubmitted returns the number of entries reserved but not published.
func (p *Producer) Unsubmitted() uint32 { return p.next - p.sent }

// Pending reads the other side's index and returns the number of published entries that the
// consumer has not released.
func (p *Producer) Pending() uint32 {
	p.seen = p.cons.Load()
	n := p.sent - p.seen
	if n > p.size {
		p.bad = true
		return p.size
	}
	return n
}

// Mask returns the position of index i in the ring.
func (p *Producer) Mask(i uint32) uint32 { return i & (p.size - 1) }

// Bad reports whether the other side's index has ever been out of range.
func (p *Producer) Bad() bool { return p.bad }

// Consumer is the reading end. It is not safe for concurrent use.
type Consumer struct {
	prod *atomic.Uint32 // the other side's
	cons *atomic.Uint32 // ours: only Release writes it
	size uint32
	next uint32 // our index
	seen uint32 // last value read of the producer's index
	bad  bool
}

// NewConsumer returns the consumer of a ring of size entries, a power of two. It continues from the
// current shared indices.
func NewConsumer(prod, cons *atomic.Uint32, size uint32) Consumer {
	check(size)
	at := cons.Load()
	return Consumer{prod: prod, cons: cons, size: size, next: at, seen: at}
}

// Peek returns the index of the oldest entry, not masked, and the number of entries available, at
// most n. It reads the other side's index only if the last value read leaves fewer than n. Entries
// remain in the ring until Release.
func (c *Consumer) Peek(n uint32) (first, count uint32) {
	avail := c.seen - c.next
	if avail < n {
		// Entries seen before the index went bad are still valid, also if it moves back before them: the caller may hold them.
		if now := c.prod.Load() - c.next; now < avail || now > c.size {
			c.bad = true
		} else {
			c.seen, avail = c.next+now, now
		}
	}
	return c.next, min(n, avail)
}

// Release returns the n oldest entries to the producer. n must not exceed the count that Peek
// returned.
func (c *Consumer) Release(n uint32) {
	if n > c.seen-c.next {
		panic("ring: Release of more entries than were seen")
	}
	c.next += n
	c.cons.Store(c.next)
}

// Mask returns the position of index i in the ring.
func (c *Consumer) Mask(i uint32) uint32 { return i & (c.size - 1) }

// Bad reports whether the other side's index has ever been out of range, or moved back.
func (c *Consumer) Bad() bool { return c.bad }

func check(size uint32) {
	if size == 0 || size&(size-1) != 0 {
		panic("ring: size is not a power of two")
	}
}
