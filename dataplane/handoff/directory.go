// Package handoff moves frames and connections between workers: a directory of which
// worker has what, the connections whose first answer may come to another worker,
// and rings of frames. W is a worker.
package handoff

import (
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Key names a connection or an association to all workers.
type Key struct {
	Flow pkt.Flow
	SCTP bool   // in UDP too
	Host bool   // between programs of this host: no frame is of it
	Tag  uint32 // SCTP: from a further address of a peer, with this verification tag; 0: from the first
}

// Directory says which worker, a W, has a connection or an association. Workers read
// and change it without locks: a bucket is replaced whole. A nil Directory is that of a
// single worker: it is empty, and stays so.
type Directory[W comparable] struct {
	seed    maphash.Seed
	buckets [1 << 14]atomic.Pointer[[]entry[W]]
}

type entry[W comparable] struct {
	key Key
	w   W
}

// NewDirectory makes an empty one.
func NewDirectory[W comparable]() *Directory[W] {
	return &Directory[W]{seed: maphash.MakeSeed()}
}

func (d *Directory[W]) bucket(k *Key) *atomic.Pointer[[]entry[W]] {
	return &d.buckets[maphash.Comparable(d.seed, *k)%uint64(len(d.buckets))]
}

// Find returns the worker that has k, the zero W if none has.
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

// Put enters k as w's, unless it is another's.
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

// Remove takes k out if it is w's.
func (d *Directory[W]) Remove(k Key, w W) {
	d.change(&k, func(b []entry[W], at int) []entry[W] {
		if at < 0 || b[at].w != w {
			return nil
		}
		return slices.Delete(slices.Clone(b), at, at+1)
	})
}

// change replaces the bucket of k by what f makes of it without changing it; at is
// where k stands, or -1. Nothing changes when f returns nil.
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

// Len returns how many keys there are.
func (d *Directory[W]) Len() int {
	n := 0
	for i := range d.buckets {
		if b := d.buckets[i].Load(); b != nil {
			n += len(*b)
		}
	}
	return n
}

// Dialing is the connections that wait for the peer's first answer. It may come to
// another queue than the request went out on; the worker of that queue then asks the
// one that dials for the connection.
type Dialing[W comparable] struct {
	n  atomic.Int32 // of m
	mu sync.Mutex
	m  map[Key]W
}

// Add notes that w dials k.
func (d *Dialing[W]) Add(k Key, w W) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.m == nil {
		d.m = make(map[Key]W)
	}
	d.m[k] = w
	d.n.Store(int32(len(d.m)))
}

// Remove ends that, if w does.
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

// Find returns the worker that dials k, the zero W if none does.
func (d *Dialing[W]) Find(k Key) (w W) {
	if d.n.Load() == 0 {
		return w
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.m[k]
}

// Len returns how many there are.
func (d *Dialing[W]) Len() int { return int(d.n.Load()) }
