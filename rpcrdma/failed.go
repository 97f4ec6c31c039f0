package rpcrdma

import (
	"cmp"
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/subnet"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
)

// failedCalls remembers calls whose chunks ended a connection. If the client sends such a call again on
// a new connection, it gets an error; otherwise both would repeat this forever (draft section 7.3,
// RFC 8166 section 4.5.3).
type failedCalls struct {
	mu    sync.Mutex
	m     map[transaction]failedCall
	peers subnet.Peers[struct{}] // the clients of the calls, which have them as their connections
}

type transaction struct {
	peer string
	xid  uint32
}

type failedCall struct {
	at time.Time
	by *subnet.Peer[struct{}]
}

// maxFailed bounds the number of calls remembered, and failedAge the time.
const (
	maxFailed = 1024
	failedAge = 10 * time.Minute
)

// add remembers a call. If there are too many, it forgets the oldest of the client with the most, in the IPv6 network with the
// most: no client makes it forget those of others.
func (f *failedCalls) add(peer string, xid uint32, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.m == nil {
		f.m, f.peers = make(map[transaction]failedCall), make(subnet.Peers[struct{}])
	}
	k := transaction{peer, xid}
	f.forget(k)
	if len(f.m) == maxFailed {
		var drop transaction
		for k, c := range f.m {
			if o, ok := f.m[drop]; !ok || cmp.Or(cmp.Compare(o.by.Net.Conns, c.by.Net.Conns), cmp.Compare(o.by.Conns, c.by.Conns), c.at.Compare(o.at)) < 0 {
				drop = k
			}
		}
		f.forget(drop)
	}
	a, _ := netip.ParseAddr(peer)
	by := f.peers.Find(a, nil)
	f.peers.Add(by)
	f.m[k] = failedCall{now, by}
}

func (f *failedCalls) forget(k transaction) {
	if c, ok := f.m[k]; ok {
		delete(f.m, k)
		f.peers.Remove(c.by)
	}
}

// take reports whether a call is remembered, and forgets it: the error reply ends the transaction.
func (f *failedCalls) take(peer string, xid uint32, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := transaction{peer, xid}
	c, ok := f.m[k]
	f.forget(k)
	return ok && now.Sub(c.at) < failedAge
}

// maxExposed is the number of calls with chunks that a Conn remembers. It exceeds the number that
// can be outstanding, since a failing Write may belong to a call whose reply is already in the send
// queue.
const maxExposed = 2 * sendSlots

// exposed is a ring of the most recent calls with chunks.
type exposed struct {
	ring [maxExposed]session.Call // without their bodies
	next int
}

func (x *exposed) add(c *session.Call) {
	if len(c.Ext)+len(c.Reads)+len(c.Writes)+len(c.Reply) == 0 {
		return
	}
	e := &x.ring[x.next%maxExposed]
	x.next++
	*e = *c
	e.Body = nil
}

// find calls f with the XID of each call that exposed the byte at offset to of stag.
func (x *exposed) find(stag uint32, to uint64, f func(xid uint32)) {
	for i := range x.ring {
		for s := range x.ring[i].Segments() {
			if s.Handle == stag && to-s.Offset < max(uint64(s.Length), 1) {
				f(x.ring[i].XID)
				break
			}
		}
	}
}

// recordFailed records the calls that made the peer send the Terminate err.
func (c *Conn) recordFailed(err error, now time.Time) {
	t, ok := errors.AsType[*iwarp.TerminateError](err)
	if !ok || !t.Remote {
		return
	}
	if stag, to, ok := terminated(t.Message); ok {
		c.exposed.find(stag, to, func(xid uint32) { c.e.failed.add(c.peer, xid, now) })
	}
}

// terminated returns the memory of the Terminate's sender that b refers to: that of the tagged
// segment, or of the Read Request, whose header follows four bytes of control and two of length
// (RFC 5040 section 4.8).
func terminated(b []byte) (stag uint32, to uint64, ok bool) {
	const ddp, untagged = 6, 18
	at := ddp + 2
	if len(b) <= ddp {
		return 0, 0, false
	}
	if b[ddp]&0x80 == 0 {
		at = ddp + untagged + 16
	}
	if len(b) < at+12 {
		return 0, 0, false
	}
	return binary.BigEndian.Uint32(b[at:]), binary.BigEndian.Uint64(b[at+4:]), true
}
