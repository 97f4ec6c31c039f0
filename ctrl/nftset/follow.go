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
	"github.com/mdlayher/netlink"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// rereadPeriod is the interval of reading sets whose changes the kernel does not report, or
// that could not be read.
const rereadPeriod = time.Second

// sizeofNfgenmsg is the size of struct nfgenmsg, which begins with the family.
const sizeofNfgenmsg = 4

// A Follower tracks the content of sets. It is a ctrl.PeerSet of the addresses in any of the
// sets.
type Follower struct {
	names   []Name
	log     *zap.Logger
	reader  *nftables.Conn
	events  *netlink.Conn
	content atomic.Pointer[[]followed]
	changed atomic.Pointer[func()]
	event   chan struct{}
	done    chan struct{}
	wg      sync.WaitGroup
}

// followed is the state of one set.
type followed struct {
	set
	err error // error of the last read
}

// Follow follows the sets names of the network namespace of the caller until the follower is closed.
// Sets need not exist: one that does not exist has no elements. It needs CAP_NET_ADMIN.
func Follow(names []Name, log *zap.Logger) (*Follower, error) {
	events, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, failed(err)
	}
	// Before the first read, so that no change is missed.
	if err := events.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		events.Close()
		return nil, failed(err)
	}
	// A lasting connection stays in the namespace of this thread.
	reader, err := nftables.New(nftables.AsLasting())
	if err != nil {
		events.Close()
		return nil, failed(err)
	}
	f := &Follower{names: names, log: log, reader: reader, events: events, event: make(chan struct{}, 1), done: make(chan struct{})}
	first := make([]followed, len(names))
	f.content.Store(&first)
	f.changed.Store(new(func()))
	for i := range first {
		first[i].err = errNotRead
	}
	f.read()
	for i, s := range *f.content.Load() {
		if s.err != nil && !answered(s.err) {
			events.Close()
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
	return fmt.Errorf("allow-set: cannot follow nftables sets: %w: iwarpd needs CAP_NET_ADMIN and a kernel with nf_tables for it", err)
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
	err := f.events.Close()
	f.wg.Wait()
	return errors.Join(err, f.reader.CloseLasting())
}

// listen notifies follow of changes of the sets until the follower is closed.
func (f *Follower) listen() {
	for {
		messages, err := f.events.Receive()
		if err == nil && !slices.ContainsFunc(messages, f.concerns) {
			continue
		}
		select {
		case f.event <- struct{}{}:
		default: // a read is already pending
		}
		if err == nil {
			continue
		}
		// Events were lost (ENOBUFS), or the follower is closed.
		select {
		case <-f.done:
			return
		case <-time.After(rereadPeriod / 10):
		}
	}
}

// concerns reports whether m is about one of the sets, or a table of them.
func (f *Follower) concerns(m netlink.Message) bool {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < sizeofNfgenmsg {
		return false
	}
	switch m.Header.Type & 0xff {
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE, unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET, unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
	default:
		return false
	}
	attributes, err := netlink.NewAttributeDecoder(m.Data[sizeofNfgenmsg:])
	if err != nil {
		return true
	}
	for attributes.Next() {
		if attributes.Type() == unix.NFTA_SET_TABLE { // as NFTA_TABLE_NAME and NFTA_SET_ELEM_LIST_TABLE
			family, table := nftables.TableFamily(m.Data[0]), attributes.String()
			return slices.ContainsFunc(f.names, func(n Name) bool { return n.Family == family && n.Table == table })
		}
	}
	return true
}

// follow reads the sets after each event, until the follower is closed.
func (f *Follower) follow() {
	tick := time.NewTicker(rereadPeriod)
	defer tick.Stop()
	for {
		select {
		case <-f.event:
		case <-tick.C:
			if !slices.ContainsFunc(*f.content.Load(), func(s followed) bool { return s.aging || s.err != nil && !answered(s.err) }) {
				continue
			}
		case <-f.done:
			return
		}
		f.read()
	}
}

// read reads all sets and calls the watcher if one has changed.
func (f *Follower) read() {
	old := *f.content.Load()
	now := make([]followed, len(old))
	changed := false
	for i, n := range f.names {
		s, err := read(f.reader, n)
		if err != nil && !answered(err) {
			s = old[i].set
			f.reconnect()
		}
		now[i] = followed{s, err}
		changed = changed || !slices.Equal(s.edges, old[i].edges)
	}
	f.content.Store(&now)
	for i, n := range f.names {
		f.report(n, now[i], old[i])
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
