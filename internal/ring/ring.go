// Package ring is the index logic of single-producer, single-consumer rings
// whose two indices live in memory shared with another thread, process or the
// kernel. Indices run freely modulo 2^32; an entry's place is its index masked.
// The entries themselves are the caller's.
//
// The other side is not trusted: whatever it stores in its index, the counts
// returned never exceed the size of the ring, and a masked index always lies
// in it.
package ring

import "sync/atomic"

// Producer is the writing end. It is for one goroutine.
type Producer struct {
	prod *atomic.Uint32 // ours: only Submit writes it
	cons *atomic.Uint32 // theirs
	size uint32
	next uint32 // our index, reserved entries included
	sent uint32 // our index as published: what is in shared memory is not read again
	seen uint32 // the consumer's index when last looked at
	bad  bool
}

// NewProducer returns the producer of a ring of size entries, a power of two.
// It continues from where the shared indices stand.
func NewProducer(prod, cons *atomic.Uint32, size uint32) Producer {
	check(size)
	at := prod.Load()
	return Producer{prod: prod, cons: cons, size: size, next: at, sent: at, seen: cons.Load()}
}

// Free returns how many entries can be reserved. It looks at the other side's
// index only when what it last saw leaves fewer than want.
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

// Reserve takes up to n free entries and returns the index of the first, not
// masked, and how many there are. They are the caller's to write until Submit.
func (p *Producer) Reserve(n uint32) (first, count uint32) {
	count = min(n, p.Free(n))
	first = p.next
	p.next += count
	return first, count
}

// Submit publishes every reserved entry.
func (p *Producer) Submit() {
	p.sent = p.next
	p.prod.Store(p.sent)
}

// Unsubmitted returns how many entries are reserved and not published.
func (p *Producer) Unsubmitted() uint32 { return p.next - p.sent }

// Pending returns how many published entries the consumer has not released, by
// a fresh look.
func (p *Producer) Pending() uint32 {
	p.seen = p.cons.Load()
	n := p.sent - p.seen
	if n > p.size {
		p.bad = true
		return p.size
	}
	return n
}

// Mask maps an index to its place in the ring.
func (p *Producer) Mask(i uint32) uint32 { return i & (p.size - 1) }

// Bad reports whether the other side's index was ever out of range.
func (p *Producer) Bad() bool { return p.bad }

// Consumer is the reading end. It is for one goroutine.
type Consumer struct {
	prod *atomic.Uint32 // theirs
	cons *atomic.Uint32 // ours: only Release writes it
	size uint32
	next uint32 // our index
	seen uint32 // the producer's index when last looked at
	bad  bool
}

// NewConsumer returns the consumer of a ring of size entries, a power of two.
// It continues from where the shared indices stand.
func NewConsumer(prod, cons *atomic.Uint32, size uint32) Consumer {
	check(size)
	at := cons.Load()
	return Consumer{prod: prod, cons: cons, size: size, next: at, seen: at}
}

// Peek returns the index of the oldest entry, not masked, and how many there
// are, at most n. It looks at the other side's index only when what it last saw
// leaves fewer than n. Entries stay until Release.
func (c *Consumer) Peek(n uint32) (first, count uint32) {
	avail := c.seen - c.next
	if avail < n {
		seen := c.prod.Load()
		if seen-c.next > c.size {
			c.bad = true
			// What was seen before the index went bad is still good.
			return c.next, min(n, avail)
		}
		c.seen = seen
		avail = seen - c.next
	}
	return c.next, min(n, avail)
}

// Release gives the n oldest entries back to the producer. n is at most what
// Peek returned.
func (c *Consumer) Release(n uint32) {
	if n > c.seen-c.next {
		panic("ring: Release of more entries than were seen")
	}
	c.next += n
	c.cons.Store(c.next)
}

// Mask maps an index to its place in the ring.
func (c *Consumer) Mask(i uint32) uint32 { return i & (c.size - 1) }

// Bad reports whether the other side's index was ever out of range.
func (c *Consumer) Bad() bool { return c.bad }

func check(size uint32) {
	if size == 0 || size&(size-1) != 0 {
		panic("ring: size is not a power of two")
	}
}
