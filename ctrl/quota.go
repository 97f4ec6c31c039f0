package ctrl

import (
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// A resource is an amount that the daemon accounts per user (uid), over all clients of that user,
// and bounds by a quota.
type resource uint8

const (
	resClients resource = iota
	resPDs
	resMRs
	resMWs
	resCQs
	resQPs
	resSRQs
	resChannels
	resListens
	resWaiting
	resCaptures

	resPorts
	resRegistered // bytes
	resRings      // bytes
	resMessages   // bytes; counted in usage.unread, not in an account
	numResources
)

// quotas describes the resources. To add one, add a field to Limits, a line here,
// and a key to quotaKeys of cmd/iwarpd.
var quotas = [numResources]struct {
	name  string // in lists
	noun  string // in errors; in the singular if it is counted
	key   string // of the configuration
	bytes bool
	limit func(*Limits) uint64
}{
	resClients:  {"clients", "client", "max-clients", false, func(l *Limits) uint64 { return uint64(l.Clients) }},
	resPDs:      {"pds", "protection domain", "max-pds", false, func(l *Limits) uint64 { return uint64(l.PDs) }},
	resMRs:      {"mrs", "memory region", "max-regions", false, func(l *Limits) uint64 { return uint64(l.MRs) }},
	resMWs:      {"mws", "memory window", "max-windows", false, func(l *Limits) uint64 { return uint64(l.MWs) }},
	resCQs:      {"cqs", "completion queue", "max-cqs", false, func(l *Limits) uint64 { return uint64(l.CQs) }},
	resQPs:      {"qps", "queue pair", "max-qps", false, func(l *Limits) uint64 { return uint64(l.QPs) }},
	resSRQs:     {"srqs", "shared receive queue", "max-qps", false, func(l *Limits) uint64 { return uint64(l.QPs) }},
	resChannels: {"channels", "channel", "max-cqs", false, func(l *Limits) uint64 { return uint64(l.CQs) }},
	resListens:  {"listens", "listener", "max-listens", false, func(l *Limits) uint64 { return uint64(l.Listens) }},
	resWaiting:  {"waiting", "unanswered connection", "max-qps", false, func(l *Limits) uint64 { return uint64(l.QPs) }},
	resCaptures: {"captures", "capture", "max-captures", false, func(l *Limits) uint64 { return uint64(l.Captures) }},

	resPorts:      {"ports", "connected or TIME-WAIT port", "max-ports", false, func(l *Limits) uint64 { return uint64(l.Ports) }},
	resRegistered: {"registered", "registered memory", "max-registered", true, func(l *Limits) uint64 { return l.Registered }},
	resMessages:   {"messages", "messages unread", "max-messages", true, func(l *Limits) uint64 { return l.Messages }},
	resRings:      {"rings", "queues", "max-rings", true, func(l *Limits) uint64 { return l.Rings }},
}

// An account is the usage of one user, or the share of one client in it. Server.mu guards it.
type account [numResources]uint64

// usage is what a user has. Server.mu guards it, except for the first two.
type usage struct {
	slow   sync.Mutex    // acquired before Server.mu, for a request that holds that for long
	unread atomic.Uint64 // bytes of messages that its clients have not read
	account
	dials    int       // calls of Server.dial in progress; those of canceled connects last until the resolver answers
	starting int       // connections of all listeners in start-up
	movers   uint64    // clients that have a place in accounts.movers
	lingers  []*linger // earliest limit first
	timeWait []*claim  // ports in TIME-WAIT, in the order of their ends
}

// accounts are the resources that the users have. Server.mu guards them.
type accounts struct {
	usage  map[uint32]*usage // by uid
	files  pool
	maps   pool
	movers pool // threads of far.Movers, all of which clients may block; no account counts them
}

func newAccounts() accounts { return accounts{usage: make(map[uint32]*usage)} }

// usageOf returns the usage of uid.
func (s *accounts) usageOf(uid uint32) *usage {
	u := s.usage[uid]
	if u == nil {
		u = new(usage)
		s.usage[uid] = u
	}
	return u
}

// account returns the account of uid.
func (s *accounts) account(uid uint32) *account { return &s.usageOf(uid).account }

// settle forgets the usage of uid if there is none.
func (s *accounts) settle(uid uint32) {
	if u := s.usage[uid]; u != nil && u.account == (account{}) && u.dials == 0 && len(u.lingers) == 0 {
		delete(s.usage, uid)
	}
}

// room returns an error if the kernel does not grant the daemon n more of r. a is the account
// of uid.
func (s *accounts) room(a *account, uid uint32, r resource, n uint64) error {
	for _, p := range []*pool{&s.files, &s.maps} {
		if err := p.room(uid, p.of(a), n*p.per[r]); err != nil {
			return err
		}
	}
	return nil
}

// charge adds n of r to a, regardless of limits.
func (s *accounts) charge(a *account, r resource, n uint64) {
	s.files.used += n * s.files.per[r]
	s.maps.used += n * s.maps.per[r]
	a[r] += n
}

// uncharge undoes charge.
func (s *accounts) uncharge(a *account, r resource, n uint64) {
	s.files.used -= n * s.files.per[r]
	s.maps.used -= n * s.maps.per[r]
	a[r] -= n
}

// overQuota returns the error for a user that uses have of r and requested n more, which exceeds
// limit.
func overQuota(uid uint32, r resource, have, n, limit uint64) error {
	q := &quotas[r]
	if q.bytes {
		return errorf(quota, "ctrl: %s has %s of %s, %s more exceed its limit of %s: release some, or raise %s in the configuration",
			user(uid), printable.Count(have, "byte"), q.noun, printable.Count(n, "byte"), printable.Count(limit, "byte"), q.key)
	}
	return errorf(quota, "ctrl: %s has %s, its limit is %d: close some, or raise %s in the configuration", user(uid), printable.Count(have, q.noun), limit, q.key)
}
