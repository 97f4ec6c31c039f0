package dataplane

import (
	"net/netip"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// TestListeners checks that passive opens on one port, for a specific and for the wildcard address, each get their
// own connections, and that they do not disturb other connections (RFC 9293 MUST-41 to MUST-43).
func TestListeners(t *testing.T) {
	const port = 7174
	s := newSim(t, link.PipeConfig{})
	a, b := s.open() // listener 1 is of addrB
	w := s.hosts[1].w
	any4 := netip.AddrPortFrom(netip.IPv4Unspecified(), port)
	v6 := netip.AddrPortFrom(addrOf(1, true), port)
	other := netip.AddrPortFrom(addrB, port+1)
	for i, l := range []netip.AddrPort{any4, v6, other} {
		listen(t, w, ListenerID(i+2), &ListenRequest{Local: l, Backlog: 8})
	}
	for _, l := range []netip.AddrPort{any4, v6, other, netip.AddrPortFrom(addrB, port)} {
		if err := w.listen(9, &ListenRequest{Local: l, Backlog: 8}); err == nil {
			t.Errorf("a second listener on %v", l)
		}
	}
	want := func(local string, lport uint16, id ListenerID) {
		t.Helper()
		var got ListenerID
		if l := w.listeners.admitting(&pkt.Flow{Local: netip.MustParseAddr(local).As16(), LocalPort: lport}, pkt.ProtoTCP); l != nil {
			got = l.id
		}
		if got != id {
			t.Errorf("a SYN to %s port %d is for listener %d; want %d", local, lport, got, id)
		}
	}
	want("10.0.0.2", port, 1)
	want("10.0.0.3", port, 2)
	want("fd00::2", port, 3)
	want("10.0.0.2", port+1, 4)
	want("10.0.0.3", port+1, 0)
	want("10.0.0.2", port+2, 0)
	w.unlisten(1)
	want("10.0.0.2", port, 2)
	w.unlisten(2)
	want("10.0.0.2", port, 0)
	want("fd00::2", port, 3)
	want("10.0.0.2", port+1, 4)

	a.conn().streamSend(s.hosts[0].w, []byte("still here"))
	s.until("bytes", func() bool { return b.conn().pre.unread() == len("still here") })
	s.closeAll(a)
}
