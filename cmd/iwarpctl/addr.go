package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// resolve returns "address:port" for a host that is an address or a name, with
// or without port.
func resolve(ctx context.Context, host string, defaultPort int) (string, error) {
	name, port := host, strconv.Itoa(defaultPort)
	if _, err := netip.ParseAddr(host); err != nil && strings.Contains(host, ":") {
		var err error
		if name, port, err = net.SplitHostPort(host); err != nil {
			return "", usageError{fmt.Errorf("address %q: must be ADDR or ADDR:PORT, an IPv6 address with a port in brackets", host)}
		}
	}
	if err := checkPort(port); err != nil {
		return "", err
	}
	if addr, err := netip.ParseAddr(name); err == nil {
		return net.JoinHostPort(addr.String(), port), nil
	}
	if name == "" {
		return "", usageError{fmt.Errorf("address %q: the host is missing", host)}
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil || len(addrs) == 0 {
		return "", peerError{fmt.Errorf("cannot find the address of %q: %w", name, err)}
	}
	return net.JoinHostPort(addrs[0].Unmap().String(), port), nil
}

// listenAddr checks "ADDR:PORT", ":PORT" or "ADDR" and puts it in the form that
// Listen takes.
func listenAddr(s string, defaultPort int) (string, error) {
	host, port := s, strconv.Itoa(defaultPort)
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
	return net.JoinHostPort(addr.String(), port), nil
}

func checkPort(port string) error {
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return usageError{fmt.Errorf("port %q: must be a number from 1 to 65535", port)}
	}
	return nil
}

// splitRemote takes ADDR:PORT/NAME apart. A path that looks so is written with
// ./ in front.
func splitRemote(s string) (host, name string, ok bool) {
	rest := s
	if strings.HasPrefix(s, "[") {
		end := strings.IndexByte(s, ']')
		if end < 0 {
			return "", "", false
		}
		rest = s[end+1:]
	}
	slash := strings.IndexByte(rest, '/')
	colon := strings.IndexByte(rest, ':')
	if slash < 0 || colon < 0 || colon > slash {
		return "", "", false
	}
	cut := len(s) - len(rest) + slash
	host, name = s[:cut], s[cut+1:]
	if _, port, err := net.SplitHostPort(host); err != nil || checkPort(port) != nil || strings.HasPrefix(host, ":") {
		return "", "", false
	}
	return host, name, true
}
