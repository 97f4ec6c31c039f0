package shm

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Doorbells is the worker's end of a client's doorbell page, which is a memfd of
// its own. The worker goes to sleep by SetSleeping(true), then Any on each of
// its pages, and sleeps only if none has a bell; it clears the flag when it
// wakes.
type Doorbells struct {
	file
	bits     int
	sleeping *atomic.Uint32
	words    []atomic.Uint64
}

// CreateDoorbells makes a page of at least bits doorbells.
func CreateDoorbells(bits int) (*Doorbells, error) {
	if err := checkRange("number of doorbells", bits, MaxBells); err != nil {
		return nil, err
	}
	bits = align(bits, 64)
	f, err := create("iwarp-bells", HeaderSize+PageSize)
	if err != nil {
		return nil, err
	}
	h := header{kind: KindDoorbells, entries: bits, rings: 1, ringSize: PageSize}
	h.put(f.mem)
	m := f.mem[HeaderSize:]
	return &Doorbells{f, bits, word32(m, BellSleeping), words64(m, BellBits, bits/64)}, nil
}

// Bits returns how many doorbells there are.
func (d *Doorbells) Bits() int { return d.bits }

// Words returns how many words of 64 doorbells there are.
func (d *Doorbells) Words() int { return len(d.words) }

// Take returns the bells of a word that have been rung, and clears them.
func (d *Doorbells) Take(word int) uint64 {
	w := &d.words[word]
	if w.Load() == 0 { // the common case costs no locked instruction
		return 0
	}
	return w.Swap(0)
}

// Any reports whether a bell has been rung.
func (d *Doorbells) Any() bool {
	for i := range d.words {
		if d.words[i].Load() != 0 {
			return true
		}
	}
	return false
}

// SetSleeping tells the client whether bells must be followed by a wake-up.
func (d *Doorbells) SetSleeping(sleeping bool) {
	if sleeping {
		d.sleeping.Store(1)
	} else if d.sleeping.Load() != 0 {
		d.sleeping.Store(0)
	}
}

// DoorbellRinger is the client's end of a doorbell page. Any goroutine may
// ring.
type DoorbellRinger struct {
	file
	bits     int
	sleeping *atomic.Uint32
	words    []atomic.Uint64
	wake     int
}

// MapDoorbells maps the doorbell page in fd. wake is the descriptor that wakes
// its worker. Both stay the caller's.
func MapDoorbells(fd, wake int) (*DoorbellRinger, error) {
	f, h, err := attach(fd, KindDoorbells)
	if err != nil {
		return nil, err
	}
	m := f.mem[HeaderSize:]
	return &DoorbellRinger{f, h.entries, word32(m, BellSleeping), words64(m, BellBits, h.entries/64), wake}, nil
}

// Bits returns how many doorbells there are.
func (r *DoorbellRinger) Bits() int { return r.bits }

// Ring rings a bell: the worker will look at that QP's send ring. Only when the
// worker sleeps does it cost a system call.
func (r *DoorbellRinger) Ring(bit int) {
	r.words[bit/64].Or(1 << (bit % 64))
	if r.sleeping.Load() != 0 && r.sleeping.CompareAndSwap(1, 0) {
		Wake(r.wake)
	}
}

// NewWake makes a wake-up channel: whoever holds r sleeps in poll on it, and
// Wake(w) wakes it; both are non-blocking. It is a pipe, not an eventfd: the
// ends of a pipe have a file description each, so one side cannot take the
// other's O_NONBLOCK away, fill it so that a wake blocks, or read the wakes
// that are for the other.
func NewWake() (r, w int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return -1, -1, fmt.Errorf("shm: pipe2: %w", Limit(err))
	}
	return p[0], p[1], nil
}

var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

// Wake makes fd, an eventfd or the w of NewWake, readable at its other end. It
// does nothing where it is already, or nobody is left to read.
func Wake(fd int) { wake(fd, one) }

// wake writes b to fd. A full pipe has no room, and needs none.
func wake(fd int, b []byte) {
	for {
		if _, err := unix.Write(fd, b); err != unix.EINTR {
			return
		}
	}
}

// Drain makes fd, an eventfd or the r of NewWake, not readable any more. fd
// must be non-blocking.
func Drain(fd int) {
	var b [512]byte
	for {
		n, err := unix.Read(fd, b[:])
		if err != unix.EINTR && n < len(b) {
			return
		}
	}
}
