package dataplane

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestIPOptions checks that every packet of a connection, from the SYN or INIT and its answer
// on, has the DSCP, TTL and VLAN priority of its end, also after its next hop or the DSCP
// has changed.
func TestIPOptions(t *testing.T) {
	for _, tt := range []struct {
		name         string
		sctp, cookie bool
		local, peer  netip.Addr
	}{
		{"TCP", false, false, addrA, addrB},
		{"TCP over IPv6", false, false, addrOf(0, true), addrOf(1, true)},
		{"TCP, SYN cookie", false, true, addrA, addrB},
		{"SCTP", true, false, addrA, addrB},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ours, peers := IPOptions{DSCP: 45, TTL: 7, Priority: 5}, IPOptions{DSCP: 10, Priority: 1}
			seen := [2]int{}
			s := newSim(t, link.PipeConfig{Filter: func(toB bool, frame []byte) bool {
				var p pkt.Packet
				if err := p.Parse(frame, len(frame)); err != nil {
					t.Fatal(err)
				}
				want, i := peers, 0
				if toB {
					want, i = ours, 1
				}
				seen[i]++
				if want.TTL == 0 {
					want.TTL = pkt.DefaultTTL
				}
				ip := frame[p.L3Off:]
				tos := ip[1]
				if p.V6 {
					tos = ip[0]<<4 | ip[1]>>4
				}
				got := IPOptions{tos >> 2, p.TTL, uint8(p.VLANs[0] >> 13)}
				if got != want || p.NVLAN != 1 || p.VLANs[0]&vlanID != 9 {
					t.Errorf("to the peer %v: %+v and tag %#x; want %+v", toB, got, p.VLANs[0], want)
				}
				return true
			}})
			a, b := s.hosts[0], s.hosts[1]
			local, remote := netip.AddrPortFrom(tt.local, 40000), netip.AddrPortFrom(tt.peer, 7174)
			l := ListenRequest{Local: remote, Backlog: 1, IP: peers}
			c := ConnectRequest{Local: local, Remote: remote, IP: ours}
			hop := Hop{SrcMAC: macA, DstMAC: macB, VLANs: []uint16{9}}
			if tt.sctp {
				l.SCTP, c.SCTP = &SCTP{}, &SCTP{}
			}
			a.w.turn()
			b.w.turn()
			listen(t, b.w, 1, &l)
			connect := a.w.connectTCP
			if tt.sctp {
				connect = a.w.connectSCTP
			}
			other := a.w.newID()
			if tt.cookie { // it takes the only place among the half-open
				r := c
				r.Local = netip.AddrPortFrom(tt.local, 39999)
				if err := connect(other, &r, &hop); err != nil {
					t.Fatal(err)
				}
			}
			id := a.w.newID()
			if err := connect(id, &c, &hop); err != nil {
				t.Fatal(err)
			}
			var passive Event
			s.until("connected", func() (ok bool) {
				for _, k := range []EventKind{EventAccepted, EventRequest} {
					if passive, ok = b.take(k); ok && passive.Flow.RemotePort == 40000 {
						return true
					}
				}
				return false
			})
			back := Hop{SrcMAC: macB, DstMAC: macA, VLANs: []uint16{9}}
			a.w.streams[id].lane.llp.setHop(a.w, remote.Addr().As16(), &hop)
			b.w.streams[passive.Conn].lane.llp.setHop(b.w, local.Addr().As16(), &back)
			if !tt.sctp {
				s.until("the other end too", func() bool { return a.w.streams[id].mode == modeStreaming })
				s.attach(a.w.streams[id], b.w.streams[passive.Conn], newSimQP(t, a, 64), newSimQP(t, b, 64), mpa.Params{CRC: true})
			}
			ours.DSCP = 12 // while the connections last
			for _, s := range a.w.streams {
				if err := s.lane.llp.setDSCP(ours.DSCP); err != nil {
					t.Fatal(err)
				}
			}
			a.w.streams[id].lane.llp.setHop(a.w, remote.Addr().As16(), &hop)
			a.w.disconnect(a.w.streams[id], false)
			if tt.cookie {
				a.w.disconnect(a.w.streams[other], true)
			}
			s.until("gone", func() bool { return a.w.stats.Conns == 0 && len(b.w.lanes) == 0 })
			if seen[0] < 2 || seen[1] < 2 {
				t.Errorf("%v frames each way", seen)
			}
			if tt.cookie != (b.w.stats.TxStateless > 0) && !tt.sctp {
				t.Errorf("%d stateless answers", b.w.stats.TxStateless)
			}
		})
	}
}

// TestSocketIPOptions checks that the kernel gets the options of connections over kernel
// sockets, for both ends.
func TestSocketIPOptions(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1", "::"} {
		t.Run(addr, func(t *testing.T) {
			e, events, at := socketEngine(t, addr)
			want := IPOptions{DSCP: 46, TTL: 7, Priority: 5}
			if _, err := e.Listen(ListenRequest{Local: at, Backlog: 8, IP: want}); err != nil {
				t.Fatal(err)
			}
			to := at
			if at.Addr().IsUnspecified() {
				to = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
			}
			dialTCP(t, to.String())
			awaitEvent(t, events, EventAccepted)
			id := make(chan ConnID, 1)
			opts := make(chan [3]int, 1)
			look := func(w *worker) {
				for fd, s := range w.socks.conns {
					get := func(level, opt int) int { n, _ := unix.GetsockoptInt(fd, level, opt); return n }
					tos, ttl := get(unix.IPPROTO_IP, unix.IP_TOS), get(unix.IPPROTO_IP, unix.IP_TTL)
					if to.Addr().Is6() {
						tos, ttl = get(unix.IPPROTO_IPV6, unix.IPV6_TCLASS), get(unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS)
					}
					id <- s.c.id
					opts <- [3]int{tos >> 2, ttl, get(unix.SOL_SOCKET, unix.SO_PRIORITY)}
				}
			}
			e.workers[0].post(look)
			if got := <-opts; got != [3]int{46, 7, 5} {
				t.Errorf("DSCP, TTL and priority of the accepted socket are %v; want %+v", got, want)
			}
			if err := e.SetDSCP(<-id, 0); err != nil {
				t.Fatal(err)
			}
			e.workers[0].post(look)
			if got := <-opts; got != [3]int{0, 7, 5} {
				t.Errorf("after its DSCP was set to 0: %v", got)
			}
			if err := e.SetDSCP(<-id+1, 0); err == nil {
				t.Error("the DSCP of an unknown connection can be set")
			}
		})
	}
}
