package system

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// An uplink is an end, and how routes name the other one.
type uplink struct {
	end        *testenv.End
	via4, via6 string
}

// service gives a host the addresses of own on loopback, and routes over both uplinks to those of far that have own as
// the source, as a BGP daemon would. It returns the end that has these addresses.
func service(t *testing.T, up [2]uplink, own, far [2]string) *testenv.End {
	t.Helper()
	e := *up[0].end
	e.Addr4, e.Addr6 = netip.MustParseAddr(own[0]), netip.MustParseAddr(own[1])
	ip(t, &e, "addr add "+own[0]+"/32 dev lo")
	ip(t, &e, "addr add "+own[1]+"/128 dev lo nodad")
	to4, to6 := "route add "+far[0]+"/32 src "+own[0], "-6 route add "+far[1]+"/128 src "+own[1]
	for _, u := range up {
		to4 += fmt.Sprintf(" nexthop via %s dev %s", u.via4, u.end.Name)
		to6 += fmt.Sprintf(" nexthop via %s dev %s", u.via6, u.end.Name)
	}
	ip(t, &e, to4)
	ip(t, &e, to6)
	return &e
}

// TestLoopbackAddresses serves addresses of loopback over two uplinks, as with BGP to the host: against another iwarpd
// and the kernel's TCP, and when one uplink is down. Unnumbered uplinks have link-local addresses only.
func TestLoopbackAddresses(t *testing.T) {
	testenv.RequireRoot(t)
	for _, unnumbered := range []bool{false, true} {
		t.Run(map[bool]string{false: "numbered", true: "unnumbered"}[unnumbered], func(t *testing.T) {
			v := realPair(t)
			w := v.Another(t)
			to := func(e, far *testenv.End) uplink {
				if !unnumbered {
					return uplink{e, far.Addr4.String(), far.Addr6.String()}
				}
				ip(t, e, "addr flush dev "+e.Name+" scope global")
				return uplink{e, "inet6 " + linkLocal(far.MAC), linkLocal(far.MAC)}
			}
			loopbackAddresses(t, v, w, [2]uplink{to(&v.A, &v.B), to(&w.A, &w.B)}, [2]uplink{to(&v.B, &v.A), to(&w.B, &w.A)})
		})
	}
}

// linkLocal returns the IPv6 address that the kernel makes of a MAC address.
func linkLocal(m net.HardwareAddr) string {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]}).String()
}

func loopbackAddresses(t *testing.T, v, w *testenv.Veth, upA, upB [2]uplink) {
	ours, theirs := [2]string{"10.9.9.9", "fd09::9"}, [2]string{"10.9.9.1", "fd09::1"}
	both := []string{"--interface", "", "--interfaces", v.A.Name + "," + w.A.Name, "--loopback-addresses", "on"}
	endA, endB := service(t, upA, ours, theirs), service(t, upB, theirs, ours)
	a := newHost(t, endA, both...)
	reaches(t, a, endB)
	b := newHost(t, endB, both...)
	exchange(t, a, b)
	if out := a.must("status"); !strings.Contains(out, ours[0]) || !strings.Contains(out, ours[1]) {
		t.Errorf("no addresses of loopback: %s", out)
	}
	doctor := v.A.NS.Command(testenv.Program(t, "cmd/iwarpd"), "doctor", "--interface", w.A.Name)
	doctor.Env = append(os.Environ(), "IWARPD_LOOPBACK_ADDRESSES=on")
	p := testenv.Start(t, doctor)
	if code := p.Wait(limit); code != 0 {
		t.Errorf("doctor: exit code %d: %s", code, p)
	}
	// A listener on all addresses, also for the host itself.
	server := testenv.Start(t, b.command("ping", "-s", "-P"))
	server.Expect("listening on")
	for _, addr := range theirs {
		a.must("ping", "-c", "-a", addr, "-C", "10", "-V")
		b.must("ping", "-c", "-a", addr, "-C", "10", "-V")
	}
	for _, down := range []*testenv.Veth{v, w} {
		for _, state := range []string{"down", "up"} {
			ip(t, &down.A, "link set "+down.A.Name+" "+state)
			ip(t, &down.B, "link set "+down.B.Name+" "+state)
			if state == "down" { // the other one may just have come up
				testenv.Until(t, "pings by the other uplink", func() bool {
					code, _ := a.ctl("ping", "-c", "-a", theirs[0], "-C", "10", "-V")
					return code == 0
				})
			}
		}
	}
	server.Signal(os.Interrupt)
	server.Wait(limit)
}
