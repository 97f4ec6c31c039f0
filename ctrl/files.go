package ctrl

import (
	"golang.org/x/sys/unix"
)

// files counts the descriptors that the daemon holds for its clients. RLIMIT_NOFILE bounds them over all users, however many there are and
// whatever their quotas are. The last quarter is for users that have few, so that a new user finds some. Server.mu guards files.
type files struct {
	most    uint64 // those of all users
	used    uint64
	workers uint64
	sockets bool // connections are kernel sockets
}

// few is how many descriptors a user may always have, as long as some are free: enough for a client with a few queues.
func (f *files) few() uint64 { return max(f.most/1024, 16) }

// filesLimit returns files.most: what RLIMIT_NOFILE leaves after a reserve for the daemon itself, for messages with descriptors that clients
// have not read, and for sockets of slots.
func filesLimit(slots int) uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		l.Cur = 1024
	}
	own := l.Cur/8 + 32 + uint64(slots)
	return max(l.Cur, own) - own
}

// of returns how many descriptors n of r hold. A listener may hold one for each address; two stands for them.
func (f *files) of(r resource, n uint64) uint64 {
	switch r {
	case resClients: // the socket, near and far memory, and what wakes each worker
		return n * (3 + f.workers)
	case resListens:
		return 2 * n
	case resCQs, resChannels, resCaptures, resPorts:
		return n
	case resQPs:
		if f.sockets {
			return n
		}
	}
	return 0
}

// add charges n of r to a, the account of uid, or returns an error if there are too few descriptors for it.
func (f *files) add(a *account, uid uint32, r resource, n uint64) error {
	if more := f.of(r, n); more > 0 {
		have, limit := uint64(0), f.most
		for r, n := range a {
			have += f.of(resource(r), n)
		}
		if have+more > f.few() {
			limit -= f.most / 4
		}
		if f.used+more > limit {
			return errorf(quota, "ctrl: %s has %d descriptors of the daemon, all users have %d, and the limit is %d: close connections or queues, or raise LimitNOFILE of the unit (ulimit -n)",
				user(uid), have, f.used, limit)
		}
	}
	f.charge(a, r, n)
	return nil
}

// charge is add without the bound.
func (f *files) charge(a *account, r resource, n uint64) {
	f.used += f.of(r, n)
	a[r] += n
}

// remove undoes add or charge.
func (f *files) remove(a *account, r resource, n uint64) {
	f.used -= f.of(r, n)
	a[r] -= n
}
