package embed_test

import (
	"net/netip"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

func dialAddr(n *embed.Node, l *iwarp.Listener) string {
	return netip.AddrPortFrom(n.Addr(), l.Addr().Port()).String()
}
