package subnet

import (
	"net/netip"
	"slices"
	"testing"
)

func TestOf(t *testing.T) {
	for a, want := range map[string]string{
		"10.0.0.1":            "10.0.0.1/32",
		"::ffff:10.0.0.1":     "10.0.0.1/32",
		"2001:db8:1:2:3::4":   "2001:db8:1:2::/64",
		"2001:db8:1:2:ffff::": "2001:db8:1:2::/64",
		"2001:db8:1:3::4":     "2001:db8:1:3::/64",
		"fe80::1":             "fe80::1/128",
		"fe80::1%eth0":        "fe80::1/128",
	} {
		if got := Of(netip.MustParseAddr(a)); got != netip.MustParsePrefix(want) {
			t.Errorf("Of(%s) = %v, want %s", a, got, want)
		}
	}
	if got := Of(netip.Addr{}); got != (netip.Prefix{}) {
		t.Errorf("of no address: %v", got)
	}
}

func TestPeers(t *testing.T) {
	m := Peers[bool]{}
	find := func(a string) *Peer[bool] {
		return m.Find(netip.MustParseAddr(a), func(network bool) bool { return network })
	}
	for _, a := range []string{"10.0.0.1", "10.0.0.1", "2001:db8::1", "2001:db8::1", "2001:db8::2", "fe80::1"} {
		m.Add(find(a))
	}
	for _, tt := range []struct {
		addr       string
		conns, net int
	}{
		{"10.0.0.1", 2, 2}, {"10.0.0.2", 0, 0}, {"2001:db8::1", 2, 3}, {"2001:db8::2", 1, 3}, {"2001:db8::3", 0, 3},
		{"2001:db8:0:1::", 0, 0}, {"fe80::1", 1, 1},
	} {
		if p := find(tt.addr); p.Conns != tt.conns || p.Net.Conns != tt.net || p.Value || p.Net.Value != (p.Net != p) {
			t.Errorf("%s: %d connections, %d of its network, values %v, %v", tt.addr, p.Conns, p.Net.Conns, p.Value, p.Net.Value)
		}
	}
	for _, tt := range []struct {
		p, q string
		want bool
	}{
		{"10.0.0.1", "10.0.0.2", true},
		{"10.0.0.1", "fe80::1", false},
		{"2001:db8::2", "10.0.0.2", true}, // by its network
		{"2001:db8::2", "fe80::1", false},
		{"2001:db8::2", "2001:db8::3", false},
		{"2001:db8::1", "2001:db8::3", true},
		{"2001:db8::1", "10.0.0.1", false},
	} {
		if find(tt.p).Crowds(find(tt.q)) != tt.want {
			t.Errorf("%s crowds %s: %v", tt.p, tt.q, !tt.want)
		}
	}
	for _, a := range []string{"10.0.0.1", "2001:db8::1", "2001:db8::2", "10.0.0.1", "fe80::1", "2001:db8::1"} {
		m.Remove(find(a))
	}
	if len(m) != 0 {
		t.Errorf("%d peers without connections are left", len(m))
	}
}

// TestSettled checks that hosts that want more connections than there are settle: each of them connects again when its
// connection ended for another host's.
func TestSettled(t *testing.T) {
	const most = 64
	wants := map[netip.Addr]int{netip.MustParseAddr("10.0.0.1"): 8, netip.MustParseAddr("2001:db8:1::1"): 40}
	for i := range byte(most) {
		wants[netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: i})] = 1
	}
	m := Peers[bool]{}
	var conns []*Peer[bool]
	ended := 0
	for range 100 {
		ended = 0
		for a, n := range wants {
			q := m.Find(a, func(network bool) bool { return network })
			for q.Conns < n {
				if len(conns) == most {
					i := slices.IndexFunc(conns, func(p *Peer[bool]) bool { return p.Crowds(q) })
					if i < 0 {
						break
					}
					m.Remove(conns[i])
					conns = slices.Delete(conns, i, i+1)
					ended++
				}
				m.Add(q)
				conns = append(conns, q)
			}
		}
	}
	if ended != 0 {
		t.Errorf("%d connections ended for others after 100 rounds", ended)
	}
}
