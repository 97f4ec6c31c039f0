package ctrl

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// A pool is a resource of which the kernel grants the daemon a limited number: descriptors,
// mappings or threads. It limits their number over all users, regardless of the number of users and of
// their quotas, so that the daemon itself never runs out. The last quarter is reserved for
// users that have few, so that a new user gets some.
type pool struct {
	noun, fix string  // for errors; noun in the singular
	most      uint64  // limit over all users
	used      uint64  // used by the accounts
	extra     uint64  // used, but in no account
	per       account // number that each resource of an account uses
}

// few returns the number that a user may always have while some are free. It suffices for a
// client with a few queues.
func (p *pool) few() uint64 { return max(p.most/1024, 16) }

// of returns the number that the resources of a use.
func (p *pool) of(a *account) (n uint64) {
	for r, have := range a {
		n += have * p.per[r]
	}
	return n
}

// spare reports whether more than the last quarter is free.
func (p *pool) spare() bool { return p.used+p.extra < p.most-p.most/4 }

// room returns an error if uid, which has have, may not have more of them.
func (p *pool) room(uid uint32, have, more uint64) error {
	limit := p.most
	if have+more > p.few() {
		limit -= p.most / 4
	}
	if more == 0 || p.used+p.extra+more <= limit {
		return nil
	}
	return errorf(quota, "ctrl: %s has %s of the daemon, all users have %d, and the limit is %d: %s", user(uid), printable.Count(have, p.noun), p.used+p.extra, limit, p.fix)
}

// newFiles returns the pool of descriptors, whose limit is RLIMIT_NOFILE. Some are reserved for
// the daemon itself and for the sockets of slots. sockets says that connections may be
// kernel sockets.
func newFiles(slots, workers int, sockets bool) pool {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		l.Cur = 1024
	}
	p := pool{
		noun: "descriptor", fix: "close connections or queues, or raise LimitNOFILE of the unit (ulimit -n)",
		most: less(l.Cur, l.Cur/8+32+uint64(slots)),
		per: account{
			resClients: 4 + uint64(workers), // the socket, near and far memory, and eventfds of the mover and of each worker
			resListens: 2,                   // one for each address; claims.count adds those of further ones
			resCQs:     1, resChannels: 1, resCaptures: 1, resPorts: 1,
		},
	}
	if sockets {
		p.per[resQPs], p.per[resWaiting] = 1, 1
		p.per[resListens] = 1 + uint64(workers) // each of which may listen
	}
	return p
}

// newMaps returns the pool of mappings, whose limit is vm.max_map_count. The Go runtime ends
// the process when no mapping is left, so some are reserved for the daemon itself.
func newMaps(workers int) pool {
	most := uint64(65530)
	if b, err := os.ReadFile("/proc/sys/vm/max_map_count"); err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32); err == nil {
			most = n
		}
	}
	return pool{
		noun: "mapping", fix: "deregister memory or destroy queues, or raise the sysctl vm.max_map_count",
		most: less(most, most/8+1024),
		per: account{
			resClients: uint64(workers), // doorbells
			resMRs:     1, resQPs: 2, resSRQs: 1,
			resCQs: 2, // also the one before a resize
		},
	}
}

// newMovers returns the pool of threads for far memory.
func newMovers(most int) pool {
	return pool{
		noun: "far-memory thread", fix: "end some of the programs that use them, or raise TasksMax of the unit",
		most: uint64(most),
	}
}

// less returns n-m, or 0 if m is greater.
func less(n, m uint64) uint64 { return n - min(n, m) }
