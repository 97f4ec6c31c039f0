package shm

import (
	"fmt"
	"sync/atomic"
)

// Doorbells is the worker's end of a client's doorbell page, a memfd of its own, and of the eventfd with which the client wakes the worker.
// Before it sleeps the worker calls SetSleeping(true), then Take for each word, and sleeps only if no bell was rung; it clears the flag when
// it wakes.
type Doorbells struct {
	file
	wake     int
	sleeping *atomic.Uint32
	received *atomic.Uint32
	words    []atomic.Uint64
}

// CreateDoorbells creates a page of at least bits doorbells.
func CreateDoorbells(bits int) (*Doorbells, error) {
	if err := checkRange("number of doorbells", bits, MaxBells); err != nil {
		return nil, err
	}
	bits = align(bits, 64)
	f, err := create("iwarp-bells", HeaderSize+PageSize)
	if err != nil {
		return nil, err
	}
	wake, err := newEventFD()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("shm: eventfd: %w", Limit(err))
	}
	h := header{kind: KindDoorbells, entries: bits, rings: 1, ringSize: PageSize}
	h.put(f.mem)
	m := f.mem[HeaderSize:]
	return &Doorbells{f, wake, word32(m, BellSleeping), word32(m, BellReceived), words64(m, BellBits, bits/64)}, nil
}

// WakeFD returns the eventfd, for Alarm.Watch and the client. The page still owns it.
func (d *Doorbells) WakeFD() int { return d.wake }

// Close unmaps the page and closes its descriptors.
func (d *Doorbells) Close() error { return d.end((*file).Close) }

// Free is Close, and also returns the memory to the kernel even if others hold its descriptor.
func (d *Doorbells) Free() error { return d.end((*file).Free) }

func (d *Doorbells) end(end func(*file) error) error {
	if d.mem != nil {
		closeFDs(d.wake)
	}
	return end(&d.file)
}

// Bits returns how many doorbells there are.
func (d *Doorbells) Bits() int { return 64 * len(d.words) }

// Take returns the bells of a word of 64 that were rung, and clears them.
func (d *Doorbells) Take(word int) uint64 {
	w := &d.words[word]
	if w.Load() == 0 { // the common case needs no locked instruction
		return 0
	}
	return w.Swap(0)
}

// SetSleeping sets whether the client must wake the worker after it rings a bell.
func (d *Doorbells) SetSleeping(sleeping bool) {
	if sleeping {
		d.sleeping.Store(1)
	} else if d.sleeping.Load() != 0 {
		d.sleeping.Store(0)
	}
}

// Received shows the client that data of a peer has been placed, with a completion or without.
func (d *Doorbells) Received() { d.received.Store(d.received.Load() + 1) }

// DoorbellRinger is the client's end of a doorbell page. Any goroutine may
// ring.
type DoorbellRinger struct {
	file
	sleeping *atomic.Uint32
	received *atomic.Uint32
	words    []atomic.Uint64
	wake     int
}

// MapDoorbells maps the doorbell page in fd. wake is the eventfd of its worker. The caller still owns both.
func MapDoorbells(fd, wake int) (*DoorbellRinger, error) {
	f, h, err := attach(fd, KindDoorbells)
	if err != nil {
		return nil, err
	}
	m := f.mem[HeaderSize:]
	return &DoorbellRinger{f, word32(m, BellSleeping), word32(m, BellReceived), words64(m, BellBits, h.entries/64), wake}, nil
}

// Received returns a number that changes when the worker has placed data of a peer for the client.
func (r *DoorbellRinger) Received() uint32 { return r.received.Load() }

// Ring rings a bell, so that the worker processes the QP's send ring. It needs a system call only if the worker sleeps.
func (r *DoorbellRinger) Ring(bit int) {
	r.words[bit/64].Or(1 << (bit % 64))
	if r.sleeping.Load() != 0 && r.sleeping.CompareAndSwap(1, 0) {
		Wake(r.wake)
	}
}
