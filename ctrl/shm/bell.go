package shm

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// BellFile is a client's doorbell pages, one for each worker, in one memfd.
type BellFile struct {
	file
	pages []*Doorbells
}

// CreateDoorbells makes the doorbell pages of a client, with bits doorbells in
// each.
func CreateDoorbells(workers, bits int) (*BellFile, error) {
	if err := checkRange("number of workers", workers, MaxWorkers); err != nil {
		return nil, err
	}
	if err := checkRange("number of doorbells", bits, MaxBells); err != nil {
		return nil, err
	}
	f, err := create("iwarp-bells", HeaderSize+workers*PageSize)
	if err != nil {
		return nil, err
	}
	h := header{kind: KindDoorbells, entries: bits, rings: workers, ringSize: PageSize}
	h.put(f.mem)
	b := &BellFile{file: f}
	for i := range workers {
		m := f.mem[HeaderSize+i*PageSize:][:PageSize]
		b.pages = append(b.pages, &Doorbells{word32(m, BellSleeping), words64(m, BellBits, (bits+63)/64)})
	}
	return b, nil
}

// Page returns the page of a worker.
func (b *BellFile) Page(worker int) *Doorbells { return b.pages[worker] }

// Pages returns all pages, by worker.
func (b *BellFile) Pages() []*Doorbells { return b.pages }

// Doorbells is the worker's end of a doorbell page. The worker goes to sleep by
// SetSleeping(true), then Any on each of its pages, and sleeps only if none
// has a bell; it clears the flag when it wakes.
type Doorbells struct {
	sleeping *atomic.Uint32
	words    []atomic.Uint64
}

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

// BellMap is a client's mapping of its doorbell pages.
type BellMap struct {
	file
	bits  int
	pages int
}

// MapDoorbells maps the doorbell pages in fd, which stays the caller's.
func MapDoorbells(fd int) (*BellMap, error) {
	f, h, err := attach(fd, KindDoorbells)
	if err != nil {
		return nil, err
	}
	return &BellMap{file: f, bits: h.entries, pages: h.rings}, nil
}

// Pages returns how many pages there are.
func (b *BellMap) Pages() int { return b.pages }

// Ringer returns the ringer of a page, which wakes its worker by the
// descriptor wake (-1: never).
func (b *BellMap) Ringer(page, wake int) (*DoorbellRinger, error) {
	if page < 0 || page >= b.pages {
		return nil, fmt.Errorf("shm: doorbell page %d is not in 0..%d", page, b.pages-1)
	}
	m := b.mem[HeaderSize+page*PageSize:][:PageSize]
	return &DoorbellRinger{word32(m, BellSleeping), words64(m, BellBits, (b.bits+63)/64), wake}, nil
}

// DoorbellRinger is the client's end of a doorbell page. Any goroutine may
// ring.
type DoorbellRinger struct {
	sleeping *atomic.Uint32
	words    []atomic.Uint64
	wake     int
}

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
		return -1, -1, fmt.Errorf("shm: pipe2: %w", err)
	}
	return p[0], p[1], nil
}

var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

// Wake makes fd, an eventfd or the w of NewWake, readable at its other end. It
// does nothing where it is already, or nobody is left to read.
func Wake(fd int) {
	for {
		if _, err := unix.Write(fd, one); err != unix.EINTR {
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
