package filecopy

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
)

// serving runs s at an address of one of two nodes until the test ends, and returns the other one.
func serving(t *testing.T, s *Server, addr string) *embed.Node {
	t.Helper()
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	l, err := b.Device().Listen(t.Context(), addr, Config())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		l.Close()
	})
	return a
}

// TestOverRDMA runs the whole stack over a pipe. Several clients put and get at the same time, and one more than the
// server accepts is refused.
func TestOverRDMA(t *testing.T) {
	dir, there := t.TempDir(), t.TempDir()
	store := openStore(t, there)
	const clients = 3
	s := &Server{Store: store, MaxClients: clients, Tell: func(p netip.AddrPort, e Event) {
		if e.Err != nil && e.Name != "" {
			t.Errorf("%v: %+v", p, e)
		}
	}}
	addr := netip.AddrPortFrom(embed.PairAddrs()[2], 7176).String()
	a := serving(t, s, addr)

	home := openStore(t, dir)
	all := make([]*Client, clients)
	for i := range all {
		var err error
		if all[i], err = Dial(t.Context(), a.Device(), addr, Config()); err != nil {
			t.Fatal(err)
		}
		defer all[i].Close()
	}
	if c, err := Dial(t.Context(), a.Device(), addr, Config()); err == nil {
		c.Close()
		t.Error("a client too many was accepted")
	}
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() {
			data := random(3<<20 + i*12345)
			name := fmt.Sprintf("f%d", i)
			for range 2 {
				if _, err := c.Put(t.Context(), bytes.NewReader(data), int64(len(data)), Attrs{Mode: 0o644}, name); err != nil {
					t.Errorf("put: %v", err)
					return
				}
				if _, err := c.Get(t.Context(), name, home, name); err != nil {
					t.Errorf("get: %v", err)
					return
				}
			}
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: %d bytes, %v", name, len(got), err)
			}
		})
	}
	wg.Wait()
}

// TestRefusedQuietly checks that a client that is refused again and again does not make the server say so each time.
func TestRefusedQuietly(t *testing.T) {
	var told atomic.Int32
	addr := netip.AddrPortFrom(embed.PairAddrs()[2], 7176).String()
	a := serving(t, &Server{Store: openStore(t, t.TempDir()), MaxClients: 1, Tell: func(netip.AddrPort, Event) { told.Add(1) }}, addr)
	c, err := Dial(t.Context(), a.Device(), addr, Config())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 2 * maxFailures {
		if c, err := Dial(t.Context(), a.Device(), addr, Config()); err == nil {
			c.Close()
			t.Error("a client too many was accepted")
		}
	}
	if n := told.Load(); n != maxFailures { // that of the last may still come
		t.Errorf("it was said %d times", n)
	}
}

// TestFailuresOfOne checks that the failures of one client, with and without a file, are told a few times only, and hide
// neither those of others nor the files that are copied.
func TestFailuresOfOne(t *testing.T) {
	told := make(map[netip.AddrPort]int)
	s := &Server{Tell: func(peer netip.AddrPort, _ Event) { told[peer]++ }}
	fails := []string{"[fd00::1]:1", "[fd00::2]:2", "10.0.0.1:3", "10.0.0.2:4"} // the first two are of one /64
	for _, at := range fails {
		for range maxFailures {
			s.tell(netip.MustParseAddrPort(at), Event{Err: errMessage})
			s.tell(netip.MustParseAddrPort(at), Event{Name: "f", Err: errMessage})
		}
	}
	copies := netip.MustParseAddrPort("10.0.0.1:5")
	for range 3 * maxFailures {
		s.tell(copies, Event{Name: "f"})
	}
	for i, want := range []int{maxFailures, 0, maxFailures, maxFailures} {
		if got := told[netip.MustParseAddrPort(fails[i])]; got != want {
			t.Errorf("%d failures of %s were told, want %d", got, fails[i], want)
		}
	}
	if got := told[copies]; got != 3*maxFailures {
		t.Errorf("%d copies were told", got)
	}
}

// TestFailuresOfMany checks that failures of many clients do not need memory without end, and that each is told again later.
func TestFailuresOfMany(t *testing.T) {
	var s Server
	now := time.Now()
	net := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)
	}
	for i := range 2 * maxFailing {
		if got := s.failed(net(i), now); got != (i < maxFailing) {
			t.Fatalf("client %d: told %v", i, got)
		}
	}
	if n := len(s.failures); n != maxFailing {
		t.Errorf("%d clients are remembered", n)
	}
	if last := net(2*maxFailing - 1); s.failed(last, now.Add(failureTime-1)) || !s.failed(last, now.Add(failureTime)) {
		t.Error("the last client is not told when the time has passed")
	}
}

// TestPlacesForOthers checks that a peer that connects as often as it can leaves places for others, and that places become
// free again.
func TestPlacesForOthers(t *testing.T) {
	const most = 10
	a := serving(t, &Server{Store: openStore(t, t.TempDir()), MaxClients: most}, ":7176")
	addrs := embed.PairAddrs()[2:] // of b: IPv4, IPv6
	dial := func(addr netip.Addr) (l []*Client) {
		for range most {
			c, err := Dial(t.Context(), a.Device(), netip.AddrPortFrom(addr, 7176).String(), Config())
			if err != nil {
				break
			}
			l = append(l, c)
		}
		return l
	}
	for _, addr := range []netip.Addr{addrs[0], addrs[1], addrs[0]} {
		first := dial(addr)
		other := dial(addrs[1])
		if addr == addrs[1] {
			other = dial(addrs[0])
		}
		if len(first) != 8 || len(other) != 2 {
			t.Errorf("the first peer at %v has %d places, another one %d", addr, len(first), len(other))
		}
		for _, c := range append(first, other...) {
			c.Close()
		}
	}
}
