package verbs

// Access is the set of permitted uses of a region or window, with the bits of libibverbs (IBV_ACCESS_*). Local read is always permitted.
type Access uint32

// Access rights.
const (
	LocalWrite   Access = 1 << 0 // sink of receives, Read Responses and atomic results
	RemoteWrite  Access = 1 << 1 // target of the peer's RDMA Writes
	RemoteRead   Access = 1 << 2 // source of the peer's RDMA Reads
	RemoteAtomic Access = 1 << 3 // target of the peer's atomics (RFC 7306)
	MWBind       Access = 1 << 4 // memory windows may be bound to it
	ZeroBased    Access = 1 << 5 // the first byte has tagged offset 0

	// IgnoreInvalidate is of QP.Permit only: the peer's Send with Invalidate invalidates nothing. Clients that do not know it may pass any
	// access flag of libibverbs, which has none of this value.
	IgnoreInvalidate Access = 1 << 16

	accessAll = LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic | MWBind | ZeroBased
)

// valid reports whether libibverbs would accept a: no unknown bit, and LocalWrite wherever the peer may change memory.
func (a Access) valid() bool {
	if a&^accessAll != 0 {
		return false
	}
	return a&(RemoteWrite|RemoteAtomic) == 0 || a&LocalWrite != 0
}
