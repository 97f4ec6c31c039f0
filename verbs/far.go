package verbs

import (
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/rdmap"
)

// Far memory is client memory that no worker may access, because an access can block for as long
// as the client wants. Another thread copies between it and memory of the daemon. Received data is
// stored, and completes only then. Data to send is fetched ahead of its turn.

// FarMemory identifies the memory of a process to a FarQueue.
type FarMemory any

// MaxFetch is the maximum number of bytes of a Fetch.
const MaxFetch = 64 << 10

// fetchAhead is the number of bytes of far memory that a QP fetches ahead, for its own messages
// and for responses each.
const fetchAhead = 4 * MaxFetch

// A FarQueue accesses far memory for one QP. Its methods never block. Operations take effect in
// order.
type FarQueue interface {
	// Store copies the first n bytes of p and will store them at addr.
	Store(mem FarMemory, addr uint64, n uint32, p marked.Bytes)
	// Barrier is a Store of nothing that ends after all earlier operations of all QPs on the memory of
	// their process. It returns false, and is no Store, if there are none.
	Barrier() bool
	// Stored returns the number of Stores that have completed, and the number of the first one
	// that failed, counted from 1, or 0.
	Stored() (done, failed uint64)
	// Fetch starts to read n bytes at addr, at most MaxFetch. It returns nil if there is no
	// memory for them now.
	Fetch(mem FarMemory, addr uint64, n uint32) Fetch
}

// A Fetch is a read of far memory in progress, or its result.
type Fetch interface {
	Len() int
	// Bytes returns the bytes, or nil while the read is in progress. ok is false if it has
	// failed.
	Bytes() (b []byte, ok bool)
	// Release frees the bytes. It may be called while the read is in progress.
	Release()
}

// RegisterFar is Register for length bytes at addr of mem. Far memory cannot allow atomics,
// because accesses to it are not atomic.
func (t *Table) RegisterFar(pd PDID, mem FarMemory, addr, length, base uint64, a Access) (*Region, error) {
	if a&RemoteAtomic != 0 {
		return nil, ErrFarAtomic
	}
	return t.register(&Region{pd: pd, kind: kindMR, far: mem, addr: addr}, length, base, a)
}

// memory is the memory that a check has granted: b, or the bytes from addr on of the region
// far. The zero value is no memory.
type memory struct {
	b     []byte
	far   *Region
	addr  uint64
	state uint32 // of the region or window that was checked, for far memory
}

func (m *memory) granted() bool { return m.b != nil || m.far != nil }

// put places the first n bytes of p.
func (q *QP) put(m *memory, n uint32, p marked.Bytes) {
	if m.far == nil {
		p.CopyTo(m.b)
		return
	}
	q.cfg.Far.Store(m.far.far, m.addr, n, p) // if p cannot be read, this faults and does not count as a Store
	q.stores++
}

// stored reports whether the first n Stores of the QP have ended.
func (q *QP) stored(n uint64) bool {
	if n == 0 {
		return true
	}
	done, _ := q.cfg.Far.Stored()
	return done >= n
}

// Settled reports whether all placed data is in the client's memory. Completions wait for that.
func (q *QP) Settled() bool { return q.stored(q.stores) }

// storedOK reports whether none of the first n Stores has failed.
func (q *QP) storedOK(n uint64) bool {
	if n == 0 {
		return true
	}
	_, failed := q.cfg.Far.Stored()
	return failed == 0 || n < failed
}

// fetches holds bytes of far memory in the order of sending.
type fetches struct {
	list  []Fetch
	spent int // entries of list that were taken whole and are not yet released
	head  int // first entry of list that was not taken whole
	taken int // bytes taken of that entry
	n     int // bytes that are not taken yet
}

func (f *fetches) push(x Fetch) {
	f.list = append(f.list, x)
	f.n += x.Len()
}

// ready reports whether the next n bytes have arrived. ok is false if some of them could not be
// read.
func (f *fetches) ready(n int) (here, ok bool) {
	if n == 0 {
		return true, true
	}
	n += f.taken
	for _, x := range f.list[f.head:] {
		b, ok := x.Bytes()
		if !ok {
			return false, false
		}
		if b == nil {
			return false, true
		}
		if n -= len(b); n <= 0 {
			return true, true
		}
	}
	return false, true
}

// arrived returns how many of the next n bytes have arrived.
func (f *fetches) arrived(n int) int {
	sum := -f.taken
	for _, x := range f.list[f.head:] {
		b, _ := x.Bytes()
		if b == nil || sum >= n {
			break
		}
		sum += len(b)
	}
	return min(sum, n)
}

// take appends the next n bytes to dst. They are valid until the next release. It returns false
// if some have not arrived.
func (f *fetches) take(n int, dst [][]byte) ([][]byte, bool) {
	if here, _ := f.ready(n); !here {
		return dst, false
	}
	f.n -= n
	for n > 0 {
		b, _ := f.list[f.head].Bytes()
		b = b[f.taken:]
		if len(b) > n {
			f.taken += n
			return append(dst, b[:n]), true
		}
		dst = append(dst, b)
		n -= len(b)
		f.head, f.taken = f.head+1, 0
	}
	return dst, true
}

// release frees the bytes that were taken.
func (f *fetches) release() {
	for ; f.spent < f.head; f.spent++ {
		f.list[f.spent].Release()
		f.list[f.spent] = nil
	}
	if f.head > len(f.list)/2 {
		f.list = f.list[:copy(f.list, f.list[f.head:])]
		f.spent, f.head = 0, 0
	}
}

// drop frees everything.
func (f *fetches) drop() {
	f.head = len(f.list)
	f.release()
	f.taken, f.n = 0, 0
}

// farSends holds the fetches for work requests.
type farSends struct {
	fetches
	any bool   // a work request had payload in far memory
	at  uint32 // slot to fetch for next; free-running
	off uint64 // bytes of its payload requested so far
}

// fetchSends fetches the payload of posted work requests ahead of their turn. A fenced one is
// not fetched before its turn, since an earlier Read may still write to its memory. sending is
// the slot whose turn it is, or noSlot.
func (q *QP) fetchSends(sending uint32) {
	f := &q.farSends
	if !f.any || q.awaits && sending == noSlot {
		return // fetch for the fenced request first
	}
	if int32(f.at-q.sqHead) < 0 {
		f.at, f.off = q.sqHead, 0
	}
	for ; f.at != q.sqTail; f.at, f.off = f.at+1, 0 {
		s := q.sendSlot(f.at)
		if !s.far || s.status != WCSuccess || s.gathered == s.need {
			continue
		}
		f.off = max(f.off, uint64(s.gathered)) // after ready has dropped the fetches
		if s.fence && f.at&uint32(len(q.sq)-1) != sending || !q.fetchSlot(s) {
			return
		}
	}
}

const noSlot = 1<<32 - 1

// fetchSlot fetches the rest of the payload of s, the work request at farSends.at. It returns
// false if there was not enough memory.
func (q *QP) fetchSlot(s *sendSlot) bool {
	f := &q.farSends
	off := f.off
	i := int(f.at&uint32(len(q.sq)-1)) * q.cfg.MaxSGE
	for _, g := range q.sges[i:][:s.nsge] {
		for off < uint64(g.Len) {
			if f.n >= fetchAhead {
				return false
			}
			n := min(g.Len-uint32(off), MaxFetch)
			m, _ := q.check(g.LKey, g.Addr+off, n, useLocalRead)
			if m.far != nil {
				x := q.cfg.Far.Fetch(m.far.far, m.addr, n)
				if x == nil {
					return false
				}
				f.push(x)
			} else if m.b == nil {
				return false // Gather reports the error
			}
			f.off += uint64(n)
			off += uint64(n)
		}
		off -= uint64(g.Len)
	}
	return true
}

// farBytes returns how many of the n bytes at off of a work request's payload are in far
// memory.
func (q *QP) farBytes(sges []SGE, off uint64, n int) (far int) {
	for k := range sges {
		g := &sges[k]
		if off >= uint64(g.Len) {
			off -= uint64(g.Len)
			continue
		}
		m := min(uint32(n), g.Len-uint32(off))
		if r := q.cfg.Table.at(g.LKey); r != nil && r.far != nil {
			far += int(m)
		}
		if n -= int(m); n == 0 {
			break
		}
		off = 0
	}
	return far
}

// farResponse holds the fetches for the response to a Read.
type farResponse struct {
	fetches
	stag  uint32
	state uint32 // of its region or window: what was fetched before an invalidation is not sent after it
	next  uint64 // tagged offset to fetch next
}

// follows reports whether src, whose region or window has this state, is what f has fetched.
func (f *farResponse) follows(src *rdmap.Source, state uint32) bool {
	return f.stag == src.STag && f.state == state && f.next-uint64(f.n) == src.Off
}

// gatherResponse is Gather for a response from far memory in this state, of which left bytes follow. It
// returns false if the bytes have not arrived; awaits reports whether they will.
func (q *QP) gatherResponse(src *rdmap.Source, state uint32, n, left int, dst [][]byte) ([][]byte, bool) {
	f := &q.farResponse
	f.release()
	if !f.follows(src, state) {
		f.drop()
		f.stag, f.state, f.next = src.STag, state, src.Off
	}
	if whole := q.fetchResponse(src.Off + uint64(n) + uint64(left)); !whole && f.n < n || !q.ready(&f.fetches, n) {
		return dst, false
	}
	return f.take(n, dst)
}

// ready reports whether the next n bytes of f have arrived; awaits reports whether they will. A
// QP that gets no memory for the bytes that it needs next frees all its fetches: if many QPs
// kept theirs while waiting, none might get enough.
func (q *QP) ready(f *fetches, n int) bool {
	here, ok := f.ready(n)
	q.awaits = !here && ok
	if q.awaits && f.n < n {
		q.farResponse.drop()
		q.farResponse.stag = 0
		q.farSends.drop()
		q.farSends.at, q.farSends.off = q.sqHead, 0
	}
	return here
}

// fetchResponse fetches a response up to tagged offset end, as far as there is room. It returns false if the memory is gone.
func (q *QP) fetchResponse(end uint64) bool {
	f := &q.farResponse
	for f.next < end && f.n < fetchAhead {
		n := uint32(min(end-f.next, MaxFetch))
		m, _ := q.check(f.stag, f.next, n, useReadSource)
		if m.far == nil {
			return false
		}
		x := q.cfg.Far.Fetch(m.far.far, m.addr, n)
		if x == nil {
			return true
		}
		f.push(x)
		f.next += uint64(n)
	}
	return true
}
