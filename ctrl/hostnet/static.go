package hostnet

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane"
)

// Static is a Resolver for a point-to-point link, such as a pipe: it resolves every destination but
// its own addresses to the other end.
type Static struct {
	SrcMAC, DstMAC [6]byte
	MTU            int
	Addrs          []netip.Addr // local addresses; the first of the destination's family is the source
}

// Resolve implements dataplane.Resolver.
func (s *Static) Resolve(dst, src netip.Addr, _ string) (dataplane.Hop, error) {
	h := dataplane.Hop{SrcMAC: s.SrcMAC, DstMAC: s.DstMAC, MTU: s.MTU, Src: src, Local: slices.Contains(s.Addrs, dst)}
	for _, a := range s.Addrs {
		if !src.IsValid() && a.Is4() == dst.Is4() || a == src {
			h.Src = a
			return h, nil
		}
	}
	if src.IsValid() {
		return h, fmt.Errorf("hostnet: %v is %w", src, dataplane.ErrSource)
	}
	return h, fmt.Errorf("hostnet: no address of %v's family on the link", dst)
}

// Watch implements dataplane.Resolver. It does nothing, since nothing changes.
func (s *Static) Watch(func()) {}
