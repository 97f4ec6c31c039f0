package dataplane

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// TestAdmit checks that a peer that a listener does not admit is answered as by a closed port, over TCP and SCTP, and
// leaves no state. Once admitted, it can connect.
func TestAdmit(t *testing.T) {
	for _, overSCTP := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		a, b := s.hosts[0], s.hosts[1]
		var denied []netip.Addr
		admit := func(peer netip.Addr) bool {
			denied = append(denied, peer)
			return false
		}
		local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
		r := ListenRequest{Local: remote, Backlog: 8, Admit: func(p netip.Addr) bool { return admit(p) }}
		if overSCTP {
			r.SCTP = &SCTP{}
		}
		b.w.turn()
		listen(t, b.w, 1, &r)
		// A listener on the wildcard address does not accept what this one refuses.
		wild := ListenRequest{Local: netip.AddrPortFrom(netip.IPv6Unspecified(), 7174), Backlog: 8, SCTP: r.SCTP}
		listen(t, b.w, 2, &wild)
		dial := func(port uint16) {
			t.Helper()
			if overSCTP {
				s.dialSCTP(port, 0)
				return
			}
			a.w.turn()
			flow := pkt.NewFlow(netip.AddrPortFrom(local.Addr(), port), remote)
			if err := a.w.connect(a.w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, 0); err != nil {
				t.Fatal(err)
			}
		}
		dial(40000)
		var closed Event
		s.until("refused", func() (ok bool) { closed, ok = a.take(EventClosed); return ok })
		if !overSCTP && !errors.Is(closed.Err, tcp.ErrRefused) || closed.Err == nil {
			t.Errorf("sctp %v: closed with %v", overSCTP, closed.Err)
		}
		if len(denied) == 0 || denied[0] != addrA {
			t.Errorf("sctp %v: asked about %v", overSCTP, denied)
		}
		if len(b.events) != 0 || len(b.w.lanes) != 0 || b.w.stats.RxNoConn == 0 {
			t.Errorf("sctp %v: events %v, %d lanes, %d packets without a connection", overSCTP, b.events, len(b.w.lanes), b.w.stats.RxNoConn)
		}
		admit = func(netip.Addr) bool { return true }
		dial(40001)
		s.until("connected", func() bool {
			for _, k := range []EventKind{EventAccepted, EventJoined} {
				if ev, ok := b.take(k); ok {
					return ev.Listener == 1
				}
			}
			return false
		})
	}
}

// TestAdmitSocket checks that, over kernel sockets, a peer that is not admitted is reset after the kernel's
// handshake.
func TestAdmitSocket(t *testing.T) {
	e := startSockets(t, Config{OnEvent: func(ev Event) { t.Errorf("event %+v", ev) }})
	at := freeEndpoint(t, "127.0.0.1")
	asked := make(chan netip.Addr, 16)
	if _, err := e.Listen(ListenRequest{Local: at, Backlog: 8, Admit: func(p netip.Addr) bool { asked <- p; return false }}); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", at.String())
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the peer got %v; want a reset", err)
	}
	if p := <-asked; p != at.Addr() {
		t.Errorf("asked about %v", p)
	}
}
