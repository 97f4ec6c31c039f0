package ctrl

import (
	"cmp"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/far"
	"github.com/iwarpd/iwarpd/verbs"
)

// tenant is a client as rules and quotas see it: who it is, what it may do, and what it has.
type tenant struct {
	cred      unix.Ucred
	gids      []uint32               // the first is the effective group
	contained bool                   // see seqpacket.Conn.Contained
	pol       atomic.Pointer[policy] // Reload may replace it
	accounts  *accounts
	use       *usage // of its user

	// Server.mu guards the rest.
	own   account // the client's share of the account
	moves bool    // it has a place in accounts.movers
}

// policy returns the current rights of the client.
func (t *tenant) policy() *policy { return t.pol.Load() }

// mayBind returns an error if the client may not use a local port.
func (t *tenant) mayBind(port uint16) error {
	pol := t.policy()
	switch {
	case pol.mayBind(port):
		return nil
	case len(pol.listen) == 0:
		return errorf(permission, "ctrl: %s may not use port %d: ports below %d are for root, "+
			"and for users with a rule that lists them (allow: listen)", user(t.cred.Uid), port, unprivileged)
	}
	return errorf(permission, "ctrl: %s may not use port %d: not in listen of %s: choose one that is", user(t.cred.Uid), port, pol.rule)
}

func checkDepth(what string, d uint32, most int) error {
	if d == 0 || int64(d) > int64(most) {
		return errorf(invalid, "ctrl: the depth of a %s is 1 to %d, not %d", what, most, d)
	}
	return nil
}

func (t *tenant) cqDepth(d uint32) error {
	return checkDepth("completion queue", d, t.policy().limits.CQDepth)
}

// checkQueue returns an error if the depth of a queue or the size of its work requests exceeds the client's limits.
func (t *tenant) checkQueue(what string, depth, maxSGE uint32) error {
	lim := &t.policy().limits
	if most := min(lim.MaxSGE, verbs.MaxSGE); maxSGE == 0 || int64(maxSGE) > int64(most) {
		return errorf(invalid, "ctrl: a work request has 1 to %d pieces, not %d", most, maxSGE)
	}
	return checkDepth(what, depth, lim.QueueDepth)
}

// checkQP returns an error if a requested size exceeds the client's limits.
func (t *tenant) checkQP(r *ctrlpb.CreateQP) error {
	err := cmp.Or(t.checkQueue("send queue", r.SqDepth, r.MaxSge), t.checkQueue("receive queue", r.RqDepth, r.MaxSge))
	if err != nil {
		return err
	}
	if most := min(t.policy().limits.MaxInline, verbs.MaxInline); int64(r.MaxInline) > int64(most) {
		return errorf(invalid, "ctrl: inline data is at most %d bytes, not %d", most, r.MaxInline)
	}
	if wait := time.Duration(r.ReceiveWaitMs) * time.Millisecond; wait > maxReceiveWait {
		return errorf(invalid, "ctrl: a Send may wait for its receive for at most %v, not %v", maxReceiveWait, wait)
	}
	return nil
}

// maxReceiveWait is the longest time that a Send can wait for its receive.
const maxReceiveWait = time.Minute

// take charges n of r to the client's user, or returns an error if that would exceed the quota.
// give undoes it; giveAll does so when the client ends. Called with mu held.
func (t *tenant) take(r resource, n uint64) error {
	have, limit := t.use.account[r], quotas[r].limit(&t.policy().limits)
	if n > less(limit, have) {
		return overQuota(t.cred.Uid, r, have, n, limit)
	}
	return t.takeBeyond(r, n)
}

// takeBeyond is take regardless of the quota. Called with mu held.
func (t *tenant) takeBeyond(r resource, n uint64) error {
	if err := t.accounts.room(&t.use.account, t.cred.Uid, r, n); err != nil {
		return err
	}
	t.accounts.charge(&t.use.account, r, n)
	t.own[r] += n
	return nil
}

// give returns n of r to the quota. Called with mu held.
func (t *tenant) give(r resource, n uint64) {
	t.accounts.uncharge(&t.use.account, r, n)
	t.own[r] -= n
}

// takeSized charges an object of kind r and its n bytes of memory, or neither. giveSized undoes it.
// Called with mu held.
func (t *tenant) takeSized(r, memory resource, n uint64) error {
	if err := t.take(r, 1); err != nil {
		return err
	}
	err := t.take(memory, n)
	if err != nil {
		t.give(r, 1)
	}
	return err
}

// giveSized returns an object and its memory to the quota. Called with mu held.
func (t *tenant) giveSized(r, memory resource, n uint64) {
	t.give(r, 1)
	t.give(memory, n)
}

// giveAll returns everything charged to a client that has ended. Called with mu held.
func (t *tenant) giveAll() {
	for r, n := range t.own {
		t.accounts.uncharge(&t.use.account, resource(r), n)
	}
	t.own = account{}
	t.accounts.settle(t.cred.Uid)
}

// takeMover charges the memory and the thread of a client's Mover. giveMover returns the thread. Called with mu held.
func (t *tenant) takeMover() error {
	movers := &t.accounts.movers
	if err := movers.room(t.cred.Uid, t.use.movers, 1); err != nil {
		return err
	}
	if err := t.take(resRings, far.Limit); err != nil {
		return err
	}
	t.moves = true
	t.use.movers++
	movers.extra++
	return nil
}

func (t *tenant) giveMover() {
	if t.moves {
		t.moves = false
		t.use.movers--
		t.accounts.movers.extra--
	}
}
