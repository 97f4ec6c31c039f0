package dataplane

import (
	"fmt"
	"net/netip"
)

// Static is a Resolver for links that have no kernel behind them: a fixed hop
// for each destination.
type Static map[netip.Addr]Hop

// Resolve implements Resolver.
func (s Static) Resolve(dst, src netip.Addr) (Hop, error) {
	h, ok := s[dst]
	if !ok {
		return Hop{}, fmt.Errorf("dataplane: no route to %v", dst)
	}
	if src.IsValid() && !src.IsUnspecified() {
		h.Src = src
	}
	return h, nil
}

// Watch implements Resolver: nothing ever changes.
func (s Static) Watch(func()) {}
