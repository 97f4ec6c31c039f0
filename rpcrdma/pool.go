package rpcrdma

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/subnet"
)

// pageSize is the unit of the pool, in bytes.
const pageSize = 4096

// ErrNoMemory means that a request exceeds the size of the pool.
var ErrNoMemory = errors.New("rpcrdma: not enough registered memory")

// pool is a first-fit page allocator over one memory region. A request that cannot be met waits;
// serve decides which waiter is next.
type pool struct {
	mr *iwarp.MR

	mu      sync.Mutex
	free    []extent // sorted by offset; adjacent extents are merged
	waiting []*want  // oldest first
	rounds  uint64   // number of calls of serve
}

// want is a request for memory.
type want struct {
	n, more int // bytes needed now, and in total
	s       *share
	own     int
	got     chan *buffer
}

type extent struct{ off, n int }

func newPool(ctx context.Context, pd *iwarp.PD, size int) (*pool, error) {
	size = (size + pageSize - 1) &^ (pageSize - 1)
	mr, err := pd.Alloc(ctx, size, iwarp.AccessLocalWrite|iwarp.AccessMWBind)
	if err != nil {
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	return &pool{mr: mr, free: []extent{{0, size}}}, nil
}

// share accounts for the memory that the calls of one peer hold, over all of its connections, so
// that one peer, whose calls may take arbitrarily long, cannot exhaust the pool.
type share = subnet.Peer[holding]

// holding is guarded by the pool's mu.
type holding struct {
	bytes int
	round uint64 // last round in which a new call had to wait for this share, or for room
}

// crowded returns the share because of which a call that holds own bytes of s may not get n more:
// s, that of its network, or nil. A peer's calls may start within a quarter of the pool and may
// finish within half of it, so that calls about to finish do not wait for new ones. Those of a
// network may use half as much again. A single call may use the whole pool. Called with mu held.
func (p *pool) crowded(s *share, own, n int) *share {
	if s == nil {
		return nil
	}
	part := len(p.mr.Bytes()) / 4
	if own > 0 {
		part *= 2
	}
	over := func(s *share, part int) bool { return s.Value.bytes > own && s.Value.bytes+n > part }
	switch {
	case over(s, part):
		return s
	case over(s.Net, part*3/2):
		return s.Net
	}
	return nil
}

// charge adds n bytes to what s holds. Called with mu held.
func charge(s *share, n int) {
	if s == nil {
		return
	}
	s.Value.bytes += n
	if s.Net != s {
		s.Net.Value.bytes += n
	}
}

// alloc allocates n bytes, n > 0.
func (p *pool) alloc(ctx context.Context, n int) (*buffer, error) {
	return p.take(ctx, n, n, nil, 0)
}

// memoryWait bounds how long a call waits for registered memory. It allows for a slow client that
// holds the memory.
const memoryWait = time.Minute

// take allocates n bytes for a call that holds own bytes of s and will need more bytes in total,
// including n, before it ends. If s is not nil it waits for memoryWait at most.
func (p *pool) take(ctx context.Context, n, more int, s *share, own int) (*buffer, error) {
	if n <= 0 || n > len(p.mr.Bytes()) {
		return nil, ErrNoMemory
	}
	w := &want{n: n, more: more, s: s, own: own, got: make(chan *buffer, 1)}
	p.mu.Lock()
	p.waiting = append(p.waiting, w)
	p.serve()
	p.mu.Unlock()
	select {
	case b := <-w.got:
		return b, nil
	default:
	}
	if s != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, memoryWait)
		defer cancel()
	}
	select {
	case b := <-w.got:
		return b, nil
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.waiting, w)
	if i < 0 { // allocated in the meantime
		return <-w.got, nil
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.serve() // start calls that had to wait for this one
	return nil, fmt.Errorf("rpcrdma: wait for registered memory: %w", ctx.Err())
}

// serve allocates memory for the waiters that may have it. The calls of a peer, or of a network that
// has too much, start in the order of arrival, so that small ones cannot starve a large one. Called
// with mu held.
func (p *pool) serve() {
	p.rounds++
	p.waiting = slices.DeleteFunc(p.waiting, func(w *want) bool {
		begins := w.s != nil && w.own == 0
		if begins && (w.s.Value.round == p.rounds || w.s.Net.Value.round == p.rounds) {
			return false
		}
		size := (w.n + pageSize - 1) &^ (pageSize - 1)
		s := p.crowded(w.s, w.own, max(size, w.more))
		if s == nil {
			if b := p.fit(w, size); b != nil {
				w.got <- b
				return true
			}
			s = w.s
		}
		if begins {
			s.Value.round = p.rounds
		}
		return false
	})
}

// fit allocates size bytes for w. It returns nil if there is no room. Called with mu held.
func (p *pool) fit(w *want, size int) *buffer {
	for i, e := range p.free {
		if e.n < size {
			continue
		}
		if e.n == size {
			p.free = slices.Delete(p.free, i, i+1)
		} else {
			p.free[i] = extent{e.off + size, e.n - size}
		}
		charge(w.s, size)
		return &buffer{p: p, s: w.s, off: e.off, size: size, b: p.mr.Bytes()[e.off : e.off+w.n : e.off+size]}
	}
	return nil
}

// buffer is an allocation from a pool.
type buffer struct {
	p         *pool
	s         *share // nil: not accounted
	off, size int
	b         []byte
}

func (b *buffer) sge(off, n int) iwarp.SGE { return b.p.mr.SGE(b.off+off, n) }

// addr returns the tagged offset of byte off of the buffer.
func (b *buffer) addr(off int) uint64 { return b.p.mr.Base() + uint64(b.off+off) }

// holds reports whether d is a prefix of the buffer.
func (b *buffer) holds(d []byte) bool {
	return len(d) > 0 && len(d) <= len(b.b) && &d[0] == &b.b[0]
}

// release frees the buffer. No work request may still access it.
func (b *buffer) release() {
	if b == nil || b.p == nil {
		return
	}
	p := b.p
	b.p, b.b = nil, nil
	p.mu.Lock()
	defer p.mu.Unlock()
	charge(b.s, -b.size)
	i, _ := slices.BinarySearchFunc(p.free, b.off, func(e extent, off int) int { return e.off - off })
	p.free = slices.Insert(p.free, i, extent{b.off, b.size})
	if i+1 < len(p.free) && p.free[i].off+p.free[i].n == p.free[i+1].off {
		p.free[i].n += p.free[i+1].n
		p.free = slices.Delete(p.free, i+1, i+2)
	}
	if i > 0 && p.free[i-1].off+p.free[i-1].n == p.free[i].off {
		p.free[i-1].n += p.free[i].n
		p.free = slices.Delete(p.free, i, i+1)
	}
	p.serve()
}
