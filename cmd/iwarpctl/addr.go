package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// resolve returns "address:port" for a host that is an address or a name, with
// or without port.
func resolve(ctx context.Context, host string, defaultPort int) (string, error) {
	name, port := unbracket(host), strconv.Itoa(defaultPort)
	_, prefixErr := netip.ParsePrefix(host)
	switch _, err := netip.ParseAddr(host); {
	case err == nil, name != host:
	case prefixErr == nil, strings.Contains(host, "//"):
		return "", usageError{fmt.Errorf("address %q: must be HOST or HOST:PORT, without a slash", host)}
	case strings.Contains(host, "/"):
		return "", usageError{fmt.Errorf("address %q: a port follows a colon: write %s", host, strings.Replace(host, "/", ":", 1))}
	case strings.Contains(host, "@"):
		return "", usageError{fmt.Errorf("address %q: user names are not supported: write %s", host, host[strings.IndexByte(host, '@')+1:])}
	case strings.Contains(host, ":"):
		if name, port, err = net.SplitHostPort(host); err != nil {
			return "", usageError{fmt.Errorf("address %q: must be HOST or HOST:PORT, an IPv6 address with a port in brackets", host)}
		}
	}
	if err := checkPort(port); err != nil {
		return "", err
	}
	if addr, err := netip.ParseAddr(name); err == nil {
		return endpoint(host, addr, port)
	}
	if name == "" {
		return "", usageError{fmt.Errorf("address %q: the host is missing", host)}
	}
	if name, _, ok := strings.Cut(name, "%"); ok {
		return "", usageError{fmt.Errorf("address %q: only a link-local IPv6 address has a zone: write %s", host, name)}
	}
	if strings.Contains(name, ".") && strings.Trim(name, "0123456789.") == "" {
		return "", usageError{fmt.Errorf("address %q: an IPv4 address has four numbers from 0 to 255 without leading zeros", host)}
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil || len(addrs) == 0 {
		return "", peerError{unknownHost(name, err)}
	}
	return endpoint(name+", "+addrs[0].Unmap().String(), addrs[0], port)
}

// unbracket returns an IPv6 address without the brackets that it may have.
func unbracket(s string) string {
	if len(s) > 1 && s[0] == '[' && s[len(s)-1] == ']' {
		return s[1 : len(s)-1]
	}
	return s
}

// endpoint returns "address:port" of one host, which the user calls host.
func endpoint(host string, addr netip.Addr, port string) (string, error) {
	addr = addr.Unmap()
	switch {
	case addr.IsUnspecified():
		return "", usageError{fmt.Errorf("address %q: is not the address of a host: it means all addresses, and is only for listening", host)}
	case addr.IsMulticast():
		return "", usageError{fmt.Errorf("address %q: is a multicast address: RDMA needs the address of one host", host)}
	case addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "", usageError{fmt.Errorf("address %q: is a broadcast address: RDMA needs the address of one host", host)}
	}
	if err := checkZone(addr); err != nil {
		return "", err
	}
	return net.JoinHostPort(addr.String(), port), nil
}

// unknownHost returns an error that explains why a name cannot be resolved.
func unknownHost(name string, err error) error {
	why := "the name server does not answer: try again, or give the address"
	if d, ok := errors.AsType[*net.DNSError](err); err == nil || ok && d.IsNotFound {
		why = "no such host: check the name, or put it into /etc/hosts"
	}
	return fmt.Errorf("cannot find the address of %q: %s", name, why)
}

// listenAddr parses "ADDR:PORT", ":PORT" or "ADDR" and returns an address for Listen.
func listenAddr(s string, defaultPort int) (string, error) {
	host, port := s, strconv.Itoa(defaultPort)
	if strings.HasSuffix(s, "]") {
		s += ":" + port
	}
	if _, err := netip.ParseAddr(s); err != nil && strings.Contains(s, ":") {
		var err error
		if host, port, err = net.SplitHostPort(s); err != nil {
			return "", usageError{fmt.Errorf("address %q: must be ADDR:PORT or :PORT", s)}
		}
	}
	if err := checkPort(port); err != nil {
		return "", err
	}
	if host == "" {
		return ":" + port, nil
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return "", usageError{fmt.Errorf("address %q: %q is not an IP address", s, host)}
	}
	if addr.IsUnspecified() {
		return ":" + port, nil
	}
	if err := checkZone(addr); err != nil {
		return "", err
	}
	return net.JoinHostPort(addr.String(), port), nil
}

// checkZone returns an error if an address has a zone and is not link-local.
func checkZone(addr netip.Addr) error {
	if addr.Zone() != "" && !addr.IsLinkLocalUnicast() {
		return usageError{fmt.Errorf("address \"%v\": only a link-local address has a zone: write %v", addr, addr.WithZone(""))}
	}
	return nil
}

func checkPort(port string) error {
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return usageError{fmt.Errorf("port %q: must be a number from 1 to 65535", port)}
	}
	return nil
}

// remote is a file on another host; host is "" for a local file.
type remote struct {
	host string // HOST or HOST:PORT, an IPv6 address with its brackets
	path string
}

// splitRemote parses HOST:PATH and HOST:PORT/PATH. As with scp, a name with a colon before its
// first slash is remote. Remote paths, even with a leading slash, are relative to the folder that
// is served.
func splitRemote(s string) (remote, error) {
	rest, host := s, ""
	if strings.HasPrefix(s, "[") {
		end := strings.IndexByte(s, ']')
		if end < 0 || !strings.HasPrefix(s[end+1:], ":") {
			return remote{}, nil // a local file
		}
		host, rest = s[:end+1], s[end+2:]
		if _, err := netip.ParseAddr(s[1:end]); err != nil {
			return remote{}, fmt.Errorf("%q: %q is not an IPv6 address; a local file of that name is written ./%s", s, s[1:end], s)
		}
	} else {
		colon := strings.IndexByte(s, ':')
		if slash := strings.IndexByte(s, '/'); colon < 0 || slash >= 0 && slash < colon {
			return remote{}, nil
		}
		host, rest = s[:colon], s[colon+1:]
	}
	switch {
	case strings.HasPrefix(rest, "//"):
		return remote{}, fmt.Errorf("%q: is a URL: write it as HOST:PATH or HOST:PORT/PATH, without %s://", s, host)
	case host == "":
		return remote{}, fmt.Errorf("%q: the host is missing; a local file of that name is written ./%s", s, s)
	case strings.Contains(host, "@"):
		return remote{}, fmt.Errorf("%q: iwarpctl serve has no users: write it as %s", s, s[strings.IndexByte(s, '@')+1:])
	case bareIPv6(s):
		return remote{}, fmt.Errorf("%q: write an IPv6 address in brackets, such as [fd00::1]:PATH", s)
	case rest == "~" || strings.HasPrefix(rest, "~/"):
		return remote{}, fmt.Errorf("%q: home folders are not supported: paths are relative to the folder that iwarpctl serve serves", s)
	}
	port, after, slash := strings.Cut(rest, "/")
	if n, err := strconv.ParseUint(port, 10, 64); err == nil {
		switch {
		case !slash && n > 0 && n < 65536:
			return remote{}, fmt.Errorf("%q: is %s the port or a file? write %s/ or %s:./%s", s, port, s, host, port)
		case slash:
			if err := checkPort(port); err != nil {
				return remote{}, fmt.Errorf("%q: %w", s, err)
			}
			host, rest = host+":"+port, after
		}
	}
	for strings.HasPrefix(rest, "./") {
		rest = rest[2:]
	}
	rest = strings.TrimLeft(rest, "/")
	if rest == "." {
		rest = ""
	}
	return remote{host, rest}, nil
}

// bareIPv6 reports whether s begins with an IPv6 address without brackets.
func bareIPv6(s string) bool {
	host, _, _ := strings.Cut(s, "/")
	for strings.Count(host, ":") > 1 {
		if _, err := netip.ParseAddr(host); err == nil {
			return true
		}
		host = host[:strings.LastIndexByte(host, ':')]
	}
	return false
}

// sizeValue is a number of bytes, with K, M or G for powers of 1024.
type sizeValue int

func parseSize(s string) (int, error) {
	digits, shift := s, 0
	for i, units := range []string{"kK", "mM", "gG"} {
		short := strings.TrimSuffix(strings.TrimSuffix(s, "B"), "i")
		if n := len(short) - 1; n > 0 && strings.ContainsRune(units, rune(short[n])) {
			digits, shift = short[:n], 10*(i+1)
		}
	}
	n, err := strconv.ParseUint(digits, 10, 31)
	if err != nil || n<<shift > 1<<31-1 {
		return 0, fmt.Errorf("%q: must be a number of bytes below 2G, such as 65536 or 64K (K, M and G are powers of 1024)", s)
	}
	return int(n << shift), nil
}

func (v *sizeValue) Set(s string) (err error) {
	n, err := parseSize(s)
	*v = sizeValue(n)
	return err
}

func (v *sizeValue) String() string { return strconv.Itoa(int(*v)) }
func (v *sizeValue) Type() string   { return "size" }

// sizesValue is a list of sizes. The first value of the flag replaces the default, and others add to it.
type sizesValue struct {
	list  []int
	given bool
}

func (v *sizesValue) Set(s string) error {
	var l []int
	for f := range strings.SplitSeq(s, ",") {
		n, err := parseSize(strings.TrimSpace(f))
		if err != nil {
			return err
		}
		l = append(l, n)
	}
	if v.given {
		l = append(v.list, l...)
	}
	v.list, v.given = l, true
	return nil
}

func (v *sizesValue) String() string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(v.list), " ", ","), "[]")
}
func (v *sizesValue) Type() string { return "sizes" }
