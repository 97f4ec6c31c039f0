package verbs

import "math"

// localInv executes OpLocalInv: it invalidates the window or fast-register region stag of pd. Any QP of the PD may invalidate a window.
func (t *Table) localInv(pd PDID, stag uint32) bool {
	r := t.at(stag)
	return r != nil && r.pd == pd && r.revoke(r.state.Load(), stag)
}

// others reports whether other QPs than qp may have used the window or fast-register region stag, which qp has just
// invalidated. If it has become valid since then, that is the work of another QP.
func (t *Table) others(qp, stag uint32) bool {
	r := t.at(stag)
	return r == nil || r.kind != kindWindow || r.qp.Load() != qp
}

// fastReg executes OpReg: the invalid fast-register region with the index of stag becomes valid, with the key of stag, for n bytes at
// offset off of its memory, the first of which has address base.
func (t *Table) fastReg(pd PDID, stag uint32, base, off uint64, n uint32, a Access) bool {
	r := t.at(stag)
	if r == nil || r.pd != pd || r.kind != kindFast || !a.valid() || a&^(r.most|ZeroBased) != 0 {
		return false
	}
	if a&ZeroBased != 0 {
		base = 0
	}
	if n == 0 || off > uint64(len(r.mem)) || uint64(n) > uint64(len(r.mem))-off || uint64(n-1) > math.MaxUint64-base {
		return false
	}
	return r.change(stag, nil, func() { r.set(base, off, uint64(n), a) })
}

// bind executes OpBindMW: the unbound window with the index of stag becomes valid, with the key of stag, for the n bytes at addr of the
// region lkey, for QP qp only.
func (t *Table) bind(pd PDID, qp, stag, lkey uint32, addr uint64, n uint32, a Access) bool {
	w, r := t.at(stag), t.at(lkey)
	if w == nil || r == nil || w.pd != pd || r.pd != pd || w.kind != kindWindow || r.kind == kindWindow {
		return false
	}
	if a&^(RemoteWrite|RemoteRead|RemoteAtomic|ZeroBased) != 0 {
		return false
	}
	var v view
	if !r.read(lkey, &v) || v.acc&MWBind == 0 || a&(RemoteWrite|RemoteAtomic) != 0 && v.acc&LocalWrite == 0 {
		return false
	}
	if n == 0 || addr < v.base || addr-v.base > v.size || uint64(n) > v.size-(addr-v.base) {
		return false
	}
	off, base := v.off+(addr-v.base), addr
	if a&ZeroBased != 0 {
		base = 0
	}
	if !r.hold() {
		return false
	}
	// r may have been invalidated before that, and registered again.
	var now view
	if r.read(lkey, &now) && now == v && w.change(stag, r, func() {
		w.set(base, off, uint64(n), a)
		w.qp.Store(qp)
	}) {
		return true
	}
	r.windows.Add(-1)
	return false
}

// hold counts another window bound to r. It returns false if r is deregistered or being invalidated.
func (r *Region) hold() bool {
	for {
		n := r.windows.Load()
		if n < 0 {
			return false
		}
		if r.windows.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// change calls set and makes r, which must be invalid, valid with stag's key. root is the region that a window is bound to. It reports
// false if r is valid, is being changed by another worker, or is gone.
func (r *Region) change(stag uint32, root *Region, set func()) bool {
	if !r.lock() {
		return false
	}
	defer r.unlock()
	state := r.state.Load()
	if state&stateValid != 0 {
		return false
	}
	// An invalidation may have cleared the bit but not yet the binding.
	if root != nil && !r.root.CompareAndSwap(nil, root) {
		return false
	}
	set()
	r.state.Store(state&^stateKey + stateCount | stag&stateKey | stateValid)
	// Deregister marks the region before it invalidates: if it did not see the valid bit, its mark is visible here.
	if r.windows.Load() == windowsClosed {
		r.end()
	}
	return true
}

// remoteInv invalidates stag for the peer of QP qp. The peer can only invalidate what work
// requests made valid: neither regions of the control plane nor windows of other QPs.
func (t *Table) remoteInv(pd PDID, qp, stag uint32) bool {
	r := t.at(stag)
	if r == nil || r.pd != pd {
		return false
	}
	var state, bound uint32
	whole := r.unchanged(func() { state, bound = r.state.Load(), r.qp.Load() })
	if !whole || r.kind == kindWindow && bound != qp {
		return false
	}
	return r.revoke(state, stag)
}
