// Package verbs is the RNIC model of iwarpd: protection domains, memory
// regions, memory windows and queue pairs, with the names, numbers and rules
// of libibverbs and of the RDMA verbs.
//
// It is a sans-I/O core: no clock, no goroutine, no logging, nothing allocated
// per work request. A QP belongs to one worker. The Table is shared by all
// workers and the control plane: look-ups are lock-free, changes by the control
// plane are serialised inside it.
package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"sync/atomic"
)

// PDID identifies a protection domain. It is unique over all clients.
type PDID uint64

// Errors of the control path.
var (
	ErrAccess    = errors.New("verbs: access rights unknown, or remote write or atomic without local write")
	ErrLength    = errors.New("verbs: region is empty or leaves the 64-bit address space")
	ErrTableFull = errors.New("verbs: no STag free")
	ErrBusy      = errors.New("verbs: memory windows are bound to the region")
	ErrFarAtomic = errors.New("verbs: no atomics on far memory")
)

// An STag is a 24-bit index and an 8-bit key (low byte). The table is a radix tree over the index whose nodes are allocated on demand.
// Indices are random, so wide leaves would be mostly empty.
const (
	dirBits, midBits, leafBits = 12, 6, 6

	// MaxRegions is the maximum number of regions and windows in a Table: a sixteenth of the
	// index space. A random index is nearly always free at the first try, and a guessed STag is
	// valid with a probability of at most 2^-12; a wrong guess ends the stream.
	MaxRegions = 1 << 20

	maxDraws = 1000 // attempts to draw a free index
)

type (
	mid struct {
		leaves [1 << midBits]atomic.Pointer[leaf]
		n      int // leaves in use; guarded by Table.mu
	}
	leaf struct {
		regions [1 << leafBits]atomic.Pointer[Region]
		n       int // regions in use; guarded by Table.mu
	}
)

// Table maps STags to regions. Lookups and checks may be made by any
// goroutine at any time; they take no lock.
type Table struct {
	dir [1 << dirBits]atomic.Pointer[mid]

	// atomics is held during an atomic operation, because atomics are atomic with respect to each other over all regions (RFC 7306 section
	// 5.3). It is the only lock that workers share, and only concurrent atomics contend for it.
	atomics sync.Mutex

	mu   sync.Mutex // Register and Deregister only
	rand io.Reader
	n    int
}

// NewTable returns an empty Table that draws STags from r, which must be
// unpredictable (RFC 5040 section 8.1.1).
func NewTable(r io.Reader) *Table { return &Table{rand: r} }

// Len returns the number of regions and windows.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n
}

// Register creates a region of mem, whose first byte has the address base (ignored with ZeroBased), for the QPs of pd. mem must stay mapped
// until Deregister has returned and every worker has completed a turn.
func (t *Table) Register(pd PDID, mem []byte, base uint64, a Access) (*Region, error) {
	return t.register(&Region{pd: pd, kind: kindMR, mem: mem}, uint64(len(mem)), base, a)
}

// register makes r valid. It has size bytes.
func (t *Table) register(r *Region, size, base uint64, a Access) (*Region, error) {
	if !a.valid() {
		return nil, fmt.Errorf("%w: %#x", ErrAccess, uint32(a))
	}
	if a&ZeroBased != 0 {
		base = 0
	}
	if size == 0 || size-1 > math.MaxUint64-base {
		return nil, ErrLength
	}
	r.root.Store(r)
	r.set(base, 0, size, a)
	if err := t.insert(r, true); err != nil {
		return nil, err
	}
	return r, nil
}

// RegisterFast creates a region for fast registration by work request (OpReg); it is not valid until then. a is the most that OpReg may
// grant.
func (t *Table) RegisterFast(pd PDID, mem []byte, a Access) (*Region, error) {
	if !a.valid() {
		return nil, fmt.Errorf("%w: %#x", ErrAccess, uint32(a))
	}
	if len(mem) == 0 {
		return nil, ErrLength
	}
	r := &Region{pd: pd, kind: kindFast, mem: mem, most: a}
	r.root.Store(r)
	if err := t.insert(r, false); err != nil {
		return nil, err
	}
	return r, nil
}

// AllocWindow creates a type 2 memory window, which is not valid until OpBindMW binds it to part of a region, for the QP of that request.
func (t *Table) AllocWindow(pd PDID) (*Region, error) {
	r := &Region{pd: pd, kind: kindWindow}
	if err := t.insert(r, false); err != nil {
		return nil, err
	}
	return r, nil
}

// insert gives r a free STag and makes it visible.
func (t *Table) insert(r *Region, valid bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n >= MaxRegions {
		return ErrTableFull
	}
	for range maxDraws {
		var b [4]byte
		if _, err := io.ReadFull(t.rand, b[:]); err != nil {
			return fmt.Errorf("verbs: drawing an STag: %w", err)
		}
		stag := binary.LittleEndian.Uint32(b[:])
		// Index 0 is never used, so STag 0 (and the 1 that some peers put in zero-length RTR messages) is never valid.
		if stag>>8 == 0 || t.at(stag) != nil {
			continue
		}
		d := &t.dir[stag>>(8+midBits+leafBits)]
		m := d.Load()
		if m == nil {
			m = new(mid)
			d.Store(m)
		}
		ls := &m.leaves[stag>>(8+leafBits)&(1<<midBits-1)]
		l := ls.Load()
		if l == nil {
			l = new(leaf)
			ls.Store(l)
			m.n++
		}
		r.index = stag >> 8
		r.state.Store(stag & stateKey)
		if valid {
			r.state.Store(stag&stateKey | stateValid)
		}
		l.regions[stag>>8&(1<<leafBits-1)].Store(r)
		l.n++
		t.n++
		return nil
	}
	return ErrTableFull // reached only if the reader is broken
}

// Deregister invalidates r and frees its STag. If windows are bound to it, it returns ErrBusy and changes nothing. A second call does
// nothing. A worker that looked r up before may still copy: unmap the memory only after every worker has completed a turn.
func (t *Table) Deregister(r *Region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for !r.windows.CompareAndSwap(0, windowsClosed) {
		switch n := r.windows.Load(); {
		case n > 0:
			return ErrBusy
		case n == windowsClosed:
			return nil
		} // windowsHeld passes in no time
	}
	r.end()
	stag := r.index << 8
	m := t.dir[stag>>(8+midBits+leafBits)].Load()
	ls := &m.leaves[stag>>(8+leafBits)&(1<<midBits-1)]
	l := ls.Load()
	l.regions[stag>>8&(1<<leafBits-1)].Store(nil)
	t.n--
	// Readers of a leaf keep it alive; nothing is added to it any more.
	if l.n--; l.n == 0 {
		ls.Store(nil)
		if m.n--; m.n == 0 {
			t.dir[stag>>(8+midBits+leafBits)].Store(nil)
		}
	}
	return nil
}

// at returns the region of stag's index, whatever its key and state.
func (t *Table) at(stag uint32) *Region {
	m := t.dir[stag>>(8+midBits+leafBits)].Load()
	if m == nil {
		return nil
	}
	l := m.leaves[stag>>(8+leafBits)&(1<<midBits-1)].Load()
	if l == nil {
		return nil
	}
	return l.regions[stag>>8&(1<<leafBits-1)].Load()
}

// Lookup returns the valid region with that STag, or nil.
func (t *Table) Lookup(stag uint32) *Region {
	r := t.at(stag)
	if r == nil || r.state.Load()&(stateKey|stateValid) != stag&stateKey|stateValid {
		return nil
	}
	return r
}
