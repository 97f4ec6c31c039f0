package dataplane

import (
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
)

// fullRing is a link whose TX ring has no room.
type fullRing struct{ *link.Pipe }

func (fullRing) Post(link.Slot, int, int) bool { return false }

// TestTXRingFull checks that a frame for which the ring has no room is treated as lost and its slot is freed.
func TestTXRingFull(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, _ := s.open()
	w := s.hosts[0].w
	free := w.link.FreeSlots()
	w.link = fullRing{s.hosts[0].link}
	a.abort(w, errAborted)
	w.turn() // a RST
	if w.stats.TxRingFull != 1 || w.link.FreeSlots() != free {
		t.Errorf("%d found no room; %d slots are free, %d were", w.stats.TxRingFull, w.link.FreeSlots(), free)
	}
}

// TestHalfCloseOver checks that the time limit after the peer's FIN expires once, even if the peer acknowledges
// nothing: the worker is not called for it again.
func TestHalfCloseOver(t *testing.T) {
	silent := false
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, _ []byte) bool { return toB || !silent }})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	c := b.conn()
	c.halfUntil = s.now.Add(halfTime)
	silent = true
	s.hosts[1].w.mark(b.lane)
	for end := s.now.Add(2 * halfTime); s.now < end && s.step(); {
	}
	if b.mode != modeClosing || c.halfUntil != 0 {
		t.Errorf("mode %d, closes at %d; want closed once", b.mode, c.halfUntil)
	}
}

// TestHalfOpenPlace checks that an established connection no longer counts as half-open, so that the next one needs
// no SYN cookie.
func TestHalfOpenPlace(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	remote := netip.AddrPortFrom(addrB, 7174)
	b := s.hosts[1].w
	b.turn()
	listen(t, b, 1, &ListenRequest{Local: remote, Backlog: 1})
	for i := range uint16(3) {
		s.openFrom(netip.AddrPortFrom(addrA, 40000+i), addrB)
	}
	if n := b.stats.TxStateless; n != 0 {
		t.Errorf("%d SYN cookies", n)
	}
}

// TestAbortEndsAssociation checks that aborting the last session sends ABORT and ends the association at once.
func TestAbortEndsAssociation(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	as := a.as()
	s.hosts[0].w.disconnect(a, true)
	if as.a.State() != sctp.Closed {
		t.Errorf("the association is %v", as.a.State())
	}
	s.closedSCTP()
}

// TestUnlistenEndsAssociations checks that an association whose listener is closed ends with its last session,
// without waiting for the idle time-out.
func TestUnlistenEndsAssociations(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	a.as().lst = &listener{} // as at a peer that keeps its associations
	w := s.hosts[1].w
	w.unlisten(1)
	w.disconnect(b, false)
	start := s.now
	s.until("the association ends", func() bool { return w.sctp.n == 0 })
	if d := s.now.Sub(start); d > 10*time.Second {
		t.Errorf("after %v", d)
	}
}
