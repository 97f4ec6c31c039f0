package nftset

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// rereadPeriod is the interval of reading sets whose changes the kernel does not report, or
// that could not be read.
const rereadPeriod = time.Second

// A Follower tracks the content of sets. It is a ctrl.PeerSet of the addresses in any of the
// sets.
type Follower struct {
	names   []Name
	log     *zap.Logger
	reader  *nftables.Conn
	content atomic.Pointer[[]followed]
	changed atomic.Pointer[func()]
	reads   atomic.Int64 // how often the sets were read whole
	changes
	done chan struct{}
	wg   sync.WaitGroup
}

// followed is the state of one set.
type followed struct {
	set
	err error // error of the last read
}

// Follow follows the sets names of the network namespace of the caller until the follower is closed.
// Sets need not exist: one that does not exist has no elements. It needs CAP_NET_ADMIN.
func Follow(names []Name, log *zap.Logger) (*Follower, error) {
	// Before the first read, so that no change is missed.
	c, err := newChanges()
	if err != nil {
		return nil, failed(err)
	}
	// A lasting connection stays in the namespace of this thread.
	reader, err := nftables.New(nftables.AsLasting())
	if err != nil {
		c.close()
		return nil, failed(err)
	}
	f := &Follower{names: names, log: log, reader: reader, changes: c, done: make(chan struct{})}
	first := make([]followed, len(names))
	f.content.Store(&first)
	f.changed.Store(new(func()))
	for i := range first {
		first[i].err = errNotRead
	}
	f.read()
	for i, s := range *f.content.Load() {
		if s.err != nil && !answered(s.err) {
			f.close()
			f.reader.CloseLasting()
			return nil, fmt.Errorf("allow-set: cannot read the nftables set %v: %w", names[i], s.err)
		}
	}
	f.wg.Go(f.listen)
	f.wg.Go(f.follow)
	return f, nil
}

// errNotRead is the error of a set before the first read.
var errNotRead = errors.New("not read yet")

func failed(err error) error {
	err = fmt.Errorf("allow-set: cannot follow nftables sets: %w", err)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EPROTONOSUPPORT) { // and not, for example, without memory
		return fmt.Errorf("%w: iwarpd needs CAP_NET_ADMIN and a kernel with nf_tables for it", err)
	}
	return err
}

// answered reports whether err is a finding about the set, not a failure to read it.
func answered(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, errUnusable) }

// Contains reports whether a is in one of the sets.
func (f *Follower) Contains(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return slices.ContainsFunc(*f.content.Load(), func(s followed) bool { return s.contains(a) })
}

// Watch registers a function that is called after a set has changed.
func (f *Follower) Watch(changed func()) { f.changed.Store(&changed) }

// String returns the names of the sets.
func (f *Follower) String() string {
	var all []string
	for _, n := range f.names {
		all = append(all, n.String())
	}
	if len(all) == 1 {
		return "nftables set " + all[0]
	}
	return "nftables sets " + strings.Join(all, ", ")
}

// Close ends following.
func (f *Follower) Close() error {
	close(f.done)
	err := f.close()
	f.wg.Wait()
	return errors.Join(err, f.reader.CloseLasting())
}

// listen passes events to follow until the follower is closed. nil says that events were lost.
func (f *Follower) listen() {
	for {
		messages, err := f.messages.Receive()
		if err != nil {
			f.drain()
			messages = nil
		}
		select {
		case f.events <- messages:
		case <-f.done:
			return
		}
	}
}

// drain discards the events that wait, until there are none. After the kernel has lost an event
// (ENOBUFS) it loses all others too, without another error, until its buffer has been empty once.
func (f *Follower) drain() {
	raw, err := f.messages.SyscallConn()
	if err != nil {
		return // the follower is being closed
	}
	_ = raw.Read(func(fd uintptr) bool {
		for err := error(nil); err == nil || errors.Is(err, unix.ENOBUFS); {
			_, _, err = unix.Recvfrom(int(fd), nil, unix.MSG_DONTWAIT)
		}
		return true
	})
}

// follow keeps the content of the sets current until the follower is closed.
func (f *Follower) follow() {
	tick := time.NewTicker(rereadPeriod)
	defer tick.Stop()
	for {
		select {
		case messages := <-f.events:
			if messages == nil {
				f.lost()
			}
			for _, m := range messages {
				f.handle(m)
			}
		case <-tick.C:
			if slices.ContainsFunc(*f.content.Load(), func(s followed) bool { return s.aging || s.err != nil && !answered(s.err) }) {
				f.read()
			}
		case <-f.done:
			return
		}
	}
}

// readTries bounds how often read starts again because the sets change while it reads.
const readTries = 5

// read reads all sets and the generation of the ruleset that they are of.
func (f *Follower) read() {
	f.known = false
	for range readTries {
		before, err := f.generation()
		f.readSets()
		after, again := f.generation()
		if err != nil || again != nil {
			return // each transaction is read whole
		}
		if before == after {
			f.gen, f.known = before, true
			return
		}
	}
}

// readSets reads all sets.
func (f *Follower) readSets() {
	f.reads.Add(1)
	old := *f.content.Load()
	now := make([]followed, len(old))
	for i, n := range f.names {
		s, err := read(f.reader, n)
		if err != nil && !answered(err) {
			s = old[i].set
			f.reconnect()
		}
		now[i] = followed{s, err}
	}
	f.publish(now)
}

// publish makes now the content, and calls the watcher if a set has changed.
func (f *Follower) publish(now []followed) {
	old := *f.content.Load()
	f.content.Store(&now)
	changed := false
	for i, n := range f.names {
		f.report(n, now[i], old[i])
		changed = changed || !slices.Equal(now[i].edges, old[i].edges)
	}
	if watch := *f.changed.Load(); changed && watch != nil {
		watch()
	}
}

// reconnect reopens the reader's connection, because replies to the failed request may still
// arrive.
func (f *Follower) reconnect() {
	if c, err := nftables.New(nftables.AsLasting()); err == nil {
		f.reader.CloseLasting()
		f.reader = c
	}
}

// report logs that a set is followed, or the reason why it is not, if this has changed.
func (f *Follower) report(n Name, now, old followed) {
	switch {
	case fmt.Sprint(now.err) == fmt.Sprint(old.err):
	case now.err == nil:
		f.log.Info("following the nftables set", zap.Stringer("set", n))
	case errors.Is(now.err, fs.ErrNotExist):
		f.log.Warn("the nftables set does not exist, so it allows no peer", zap.Stringer("set", n), zap.String("fix", n.Fix()))
	case errors.Is(now.err, errUnusable):
		f.log.Warn("the nftables set cannot be used, so it allows no peer", zap.Stringer("set", n), zap.Error(now.err))
	default:
		f.log.Warn("the nftables set cannot be read, so its last elements apply", zap.Stringer("set", n), zap.Error(now.err))
	}
}
