package system

import (
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestExtremeMTU serves interfaces whose MTU is less or more than what a link has.
func TestExtremeMTU(t *testing.T) {
	testenv.RequireRoot(t)
	for _, mtu := range []int{84, 65535} {
		for _, link := range []string{"packet", "xdp"} {
			t.Run(fmt.Sprintf("%d, %s", mtu, link), func(t *testing.T) {
				v := testenv.NewVeth(t, 1500)
				for _, e := range []*testenv.End{&v.A, &v.B} {
					ip(t, e, fmt.Sprintf("link set %s mtu %d", e.Name, mtu))
				}
				a, b := newHost(t, &v.A, "--link", link), newHost(t, &v.B, "--link", link)
				testenv.Start(t, b.command("ping", "-s", "-a", b.end.Addr4.String())).Expect("listening on")
				a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "10", "-S", "2000", "-V")
			})
		}
	}
}
