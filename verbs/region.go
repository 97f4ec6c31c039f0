package verbs

import (
	"math"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/term"
)

type kind uint8

const (
	kindMR     kind = iota // registered by the control plane; valid for its whole life
	kindFast               // registered and invalidated by work request
	kindWindow             // type 2 memory window
)

// The state word of a Region. Its upper bits count how often the region has become valid: an invalidation that was
// checked against an earlier state fails.
const (
	stateKey   = 0xff
	stateValid = 1 << 8
	stateCount = 1 << 9
)

// Values of Region.windows that permit no binding.
const (
	windowsClosed = -1 << 30 // deregistered
	windowsHeld   = -1       // being invalidated by a work request
)

// Region is a memory region or window. The control plane creates it; work requests may change fast-register regions and windows. The fields
// that a check reads form a small seqlock of atomics: readers never wait, but fail during a change.
type Region struct {
	// The fields that a check reads come first, in one cache line.
	pd    PDID
	ver   atomic.Uint32          // odd while the fields below change
	state atomic.Uint32          // key and valid bit
	qp    atomic.Uint32          // kindWindow: the QP it is bound for
	acc   atomic.Uint32          // Access
	base  atomic.Uint64          // address of the first byte
	off   atomic.Uint64          // offset of the first byte in root's memory
	size  atomic.Uint64          // bytes
	root  atomic.Pointer[Region] // region that owns the memory; nil for an unbound window
	kind  kind
	index uint32

	mem     []byte       // the whole memory; nil for a window and for far memory
	far     FarMemory    // nil: mem, or a window
	addr    uint64       // address of the first byte in far
	windows atomic.Int32 // windows bound to this region, windowsClosed or windowsHeld
	most    Access       // kindFast: what OpReg may grant
}

// STag returns the STag: rkey and lkey are this one number.
func (r *Region) STag() uint32 { return r.index<<8 | r.state.Load()&stateKey }

// Base returns the address of the first byte.
func (r *Region) Base() uint64 { return r.base.Load() }

// Len returns the length in bytes.
func (r *Region) Len() uint64 { return r.size.Load() }

// Access returns the rights.
func (r *Region) Access() Access { return Access(r.acc.Load()) }

// inFar reports whether it is far memory, or a window of that.
func (r *Region) inFar() bool {
	root := r.root.Load()
	return root != nil && root.far != nil
}

// set publishes the range and the rights. The caller sets the state.
func (r *Region) set(base, off, size uint64, a Access) {
	r.base.Store(base)
	r.off.Store(off)
	r.size.Store(size)
	r.acc.Store(uint32(a))
}

// view is a consistent copy of the fields that a check needs.
type view struct {
	state, qp       uint32
	acc             Access
	base, off, size uint64
	root            *Region
}

// read copies the fields of r to v. It reports false if stag is not r's key, r is not valid, or a change is in progress.
func (r *Region) read(stag uint32, v *view) bool {
	whole := r.unchanged(func() {
		v.state = r.state.Load()
		v.qp, v.acc, v.root = r.qp.Load(), Access(r.acc.Load()), r.root.Load()
		v.base, v.off, v.size = r.base.Load(), r.off.Load(), r.size.Load()
	})
	return whole && v.state&(stateKey|stateValid) == stag&stateKey|stateValid && v.root != nil
}

// unchanged calls load, and reports whether no change was in progress before, during or after it.
func (r *Region) unchanged(load func()) bool {
	ver := r.ver.Load()
	load()
	return ver&1 == 0 && r.ver.Load() == ver
}

// lock starts a change. It fails if another one is in progress: the two work requests are not ordered, so one of them fails.
func (r *Region) lock() bool {
	v := r.ver.Load()
	return v&1 == 0 && r.ver.CompareAndSwap(v, v+1)
}

func (r *Region) unlock() { r.ver.Add(1) }

// revoke executes an invalidation by a work request or by the peer, which was checked against state, a state of r. It
// reports whether r was valid in that state, with the key of stag, and has left it.
func (r *Region) revoke(state, stag uint32) bool {
	if r.kind == kindMR || state&(stateKey|stateValid) != stag&stateKey|stateValid {
		return false
	}
	if r.kind == kindFast {
		// A window that is bound at the same time must not outlive the region.
		if !r.windows.CompareAndSwap(0, windowsHeld) {
			return false
		}
		defer r.windows.Store(0)
	}
	return r.invalidate(state)
}

// end invalidates r, whatever its state.
func (r *Region) end() {
	for s := r.state.Load(); s&stateValid != 0 && !r.invalidate(s); s = r.state.Load() {
		// another invalidation, or a change after it
	}
}

// invalidate clears the valid bit, and unbinds a window, if r is still in state s, which is valid.
func (r *Region) invalidate(s uint32) bool {
	if !r.state.CompareAndSwap(s, s&^stateValid) {
		return false
	}
	// The worker that clears the bit also unbinds the window.
	if r.kind == kindWindow {
		if root := r.root.Swap(nil); root != nil {
			root.windows.Add(-1)
		}
	}
	return true
}

// purpose is that of a check. It selects the required rights and the error codes.
type purpose uint8

// Purposes.
const (
	useWriteSink  purpose = iota // RDMA Write from the peer
	useReadSink                  // Read Response to our Read
	useReadSource                // source of the peer's Read
	useAtomic                    // target of the peer's atomic
	useLocalRead                 // SGE of a send
	useLocalWrite                // SGE of a receive or an atomic's result
	numUses
)

var rights = [numUses]Access{
	useWriteSink:  RemoteWrite,
	useReadSink:   LocalWrite,
	useReadSource: RemoteRead,
	useAtomic:     RemoteAtomic,
	useLocalWrite: LocalWrite,
}

type fault uint8

const (
	faultSTag   fault = iota // no such STag, wrong key, or not valid
	faultStream              // another PD, or a window of another QP
	faultAccess
	faultWrap
	faultBounds
	numFaults
)

// DDP has no code for access rights: a Write to memory without RemoteWrite is an invalid STag (RFC 5041 section 7.2 has nothing closer).
var (
	taggedFaults = [numFaults]*term.Error{term.ErrInvalidSTag, term.ErrSTagStream, term.ErrInvalidSTag, term.ErrTOWrap, term.ErrBounds}
	remoteFaults = [numFaults]*term.Error{term.ErrReadSTag, term.ErrReadSTagStream, term.ErrReadAccess, term.ErrReadTOWrap, term.ErrReadBounds}
)

// check is the only place where access to memory is granted. It returns the n bytes at tagged offset to of region stag
// for a QP of pd, or the fault. A window is accessible only to the QP that it was bound on. check validates even if n is
// 0: callers skip it where the RFCs exempt a zero length (RFC 5041 section 5.2, RFC 5040 section 5.2.1).
func (t *Table) check(pd PDID, qp, stag uint32, to uint64, n uint32, use purpose) (m memory, f fault) {
	r := t.at(stag)
	if r == nil {
		return m, faultSTag
	}
	var v view
	if !r.read(stag, &v) {
		return m, faultSTag
	}
	if r.pd != pd || r.kind == kindWindow && v.qp != qp {
		return m, faultStream
	}
	if r.kind == kindWindow && use != useWriteSink && use != useReadSource && use != useAtomic {
		return m, faultAccess // a window's key is no lkey
	}
	if v.acc&rights[use] != rights[use] {
		return m, faultAccess
	}
	if n > 0 && uint64(n-1) > math.MaxUint64-to {
		return m, faultWrap
	}
	if to < v.base || to-v.base > v.size || uint64(n) > v.size-(to-v.base) {
		return m, faultBounds
	}
	start := v.off + (to - v.base)
	if v.root.far != nil {
		return memory{far: v.root, addr: v.root.addr + start, state: v.state}, 0
	}
	return memory{b: v.root.mem[start : start+uint64(n) : start+uint64(n)]}, 0
}
