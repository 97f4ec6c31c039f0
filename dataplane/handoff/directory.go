// Package handoff moves frames and connections between workers. It has a directory of the
// worker of each connection, the connections whose first answer may arrive at another worker,
// and rings of frames. W is the type of a worker.
package handoff

import (
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Key identifies a connection or an association among all workers.
type Key struct {
	Flow  pkt.Flow
	Proto uint8  // 0 is TCP, else the IP protocol; SCTP in UDP has that of SCTP
	Host  bool   // between programs of this host: no frame is of it
	Tag   uint32 // SCTP: verification tag of a further address of a peer; 0 for the first address
}

// Directory maps connections and associations to workers. It is used without locks: each change
// replaces a whole bucket. A nil Directory, for a single worker, is always empty.
type Directory[W comparable] struct {
	seed    maphash.Seed
	buckets [1 << 14]atomic.Pointer[[]entry[W]]
}

type entry[W comparable] struct {
	key Key
	w   W
}

// NewDirectory returns an empty Directory.
func NewDirectory[W comparable]() *Directory[W] {
	return &Directory[W]{seed: maphash.MakeSeed()}
}

func (d *Directory[W]) bucket(k *Key) *atomic.Pointer[[]entry[W]] {
	return &d.buckets[maphash.Comparable(d.seed, *k)%uint64(len(d.buckets))]
}

// Find returns the worker that owns k, or the zero W.
func (d *Directory[W]) Find(k *Key) (w W) {
	if d == nil {
		return w
	}
	if b := d.bucket(k).Load(); b != nil {
		for i := range *b {
			if e := &(*b)[i]; e.key == *k {
				return e.w
			}
		}
	}
	return w
}

// Put makes w the owner of k, unless k has another owner.
func (d *Directory[W]) Put(k Key, w W) {
	d.change(&k, func(b []entry[W], at int) []entry[W] {
		if at >= 0 {
			return nil
		}
		return append(slices.Clip(b), entry[W]{k, w})
	})
}

// Move transfers k from worker from to worker to, if from owns it. k is never
// unowned in between.
func (d *Directory[W]) Move(k Key, from, to W) {
	d.change(&k, func(b []entry[W], at int) []entry[W] {
		if at < 0 || b[at].w != from {
			return nil
		}
		b = slices.Clone(b)
		b[at].w = to
		return b
	})
}

// Remove removes k if w owns it.
func (d *Directory[W]) Remove(k Key, w W) {
	d.change(&k, func(b []entry[W], at int) []entry[W] {
		if at < 0 || b[at].w != w {
			return nil
		}
		return slices.Delete(slices.Clone(b), at, at+1)
	})
}

// change replaces the bucket of k by the result of f, which must not modify its argument; at is
// the index of k, or -1. If f returns nil, nothing changes.
func (d *Directory[W]) change(k *Key, f func(b []entry[W], at int) []entry[W]) {
	if d == nil {
		return
	}
	p := d.bucket(k)
	for {
		old := p.Load()
		var b []entry[W]
		if old != nil {
			b = *old
		}
		b = f(b, slices.IndexFunc(b, func(e entry[W]) bool { return e.key == *k }))
		if b == nil || p.CompareAndSwap(old, &b) {
			return
		}
	}
}

// Len returns the number of keys.
func (d *Directory[W]) Len() int {
	n := 0
	for i := range d.buckets {
		if b := d.buckets[i].Load(); b != nil {
			n += len(*b)
		}
	}
	return n
}

// Dialing holds the connections that wait for the peer's first answer, which may arrive on
// another queue than that of the request. The worker of that queue then takes over the
// connection from the worker that dialed it.
type Dialing[W comparable] struct {
	n  atomic.Int32 // len(m)
	mu sync.Mutex
	m  map[Key]W
}

// Add records that w dials k.
func (d *Dialing[W]) Add(k Key, w W) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.m == nil {
		d.m = make(map[Key]W)
	}
	d.m[k] = w
	d.n.Store(int32(len(d.m)))
}

// Remove removes k if w dials it.
func (d *Dialing[W]) Remove(k Key, w W) {
	if d.n.Load() == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.m[k] == w {
		delete(d.m, k)
		d.n.Store(int32(len(d.m)))
	}
}

// Find returns the worker that dials k, or the zero W.
func (d *Dialing[W]) Find(k Key) (w W) {
	if d.n.Load() == 0 {
		return w
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.m[k]
}

// Len returns the number of connections.
func (d *Dialing[W]) Len() int { return int(d.n.Load()) }
