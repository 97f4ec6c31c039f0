// Package pkt parses and writes the headers before a transport header (Ethernet, up to two VLAN
// tags, IPv4 and IPv6) and computes the Internet checksum. Parsers accept any bytes and return a
// value or an error. No function allocates.
package pkt

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

var be = binary.BigEndian

// IP protocol numbers of the transports and of ICMP.
const (
	ProtoICMP   = 1
	ProtoTCP    = 6
	ProtoUDP    = 17
	ProtoICMPv6 = 58
	ProtoSCTP   = 132
)

// ECN codepoints (RFC 3168, Section 5).
const (
	NotECT = 0
	ECT1   = 1
	ECT0   = 2
	CE     = 3
)

// Errors of the parsers.
var (
	ErrShort    = errors.New("pkt: frame shorter than its headers say")
	ErrNotIP    = errors.New("pkt: neither IPv4 nor IPv6")
	ErrHeader   = errors.New("pkt: malformed IP header")
	ErrChecksum = errors.New("pkt: wrong checksum")
	ErrFragment = errors.New("pkt: IP fragment")
	ErrWhole    = errors.New("pkt: not a fragment")
	ErrNotError = errors.New("pkt: not an ICMP error about a packet of ours")
)

// Flow identifies a connection. Local is this end for packets in either direction. IPv4 addresses
// are v4-mapped, so that a Flow is comparable and can be a map key.
type Flow struct {
	Local, Remote         [16]byte
	LocalPort, RemotePort uint16
}

// NewFlow returns the flow between two endpoints.
func NewFlow(local, remote netip.AddrPort) Flow {
	return Flow{
		Local: local.Addr().As16(), Remote: remote.Addr().As16(),
		LocalPort: local.Port(), RemotePort: remote.Port(),
	}
}

// LocalAddrPort returns the local endpoint. IPv4 addresses are not v4-mapped in the result.
func (f *Flow) LocalAddrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(f.Local).Unmap(), f.LocalPort)
}

// RemoteAddrPort returns the remote endpoint.
func (f *Flow) RemoteAddrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(f.Remote).Unmap(), f.RemotePort)
}

// Reverse returns the flow as the other end sees it.
func (f Flow) Reverse() Flow {
	return Flow{Local: f.Remote, Remote: f.Local, LocalPort: f.RemotePort, RemotePort: f.LocalPort}
}

// String returns "local->remote".
func (f Flow) String() string {
	return f.LocalAddrPort().String() + "->" + f.RemoteAddrPort().String()
}

// is4 reports whether a is v4-mapped.
func is4(a *[16]byte) bool {
	return be.Uint64(a[0:]) == 0 && be.Uint32(a[8:]) == 0xffff
}

// put4 writes the IPv4 address b as v4-mapped.
func put4(a *[16]byte, b []byte) {
	be.PutUint64(a[0:], 0)
	be.PutUint64(a[8:], 0xffff<<32|uint64(be.Uint32(b)))
}
