package nftset

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestMembership checks which addresses are in sets of addresses and of intervals.
func TestMembership(t *testing.T) {
	at := func(a string, end bool) nftables.SetElement {
		return nftables.SetElement{Key: netip.MustParseAddr(a).AsSlice(), IntervalEnd: end}
	}
	for _, tc := range []struct {
		name     string
		elements []nftables.SetElement
		interval bool
		in, out  string
	}{
		{"empty", nil, true, "", "10.0.0.1 ::"},
		{"addresses", []nftables.SetElement{at("10.0.0.2", false), at("10.0.0.1", false), at("255.255.255.255", false)}, false, "10.0.0.1 10.0.0.2 255.255.255.255", "10.0.0.0 10.0.0.3 0.0.0.0 255.255.255.254 ::1"},
		{"intervals out of order", []nftables.SetElement{at("10.0.2.0", true), at("10.0.1.0", false), at("0.0.0.0", true)}, true, "10.0.1.0 10.0.1.255", "10.0.0.255 10.0.2.0 0.0.0.0"},
		{"adjacent", []nftables.SetElement{at("10.0.1.0", true), at("10.0.0.0", false), at("10.0.1.0", false), at("10.0.2.0", true)}, true, "10.0.0.255 10.0.1.0", "10.0.2.0"},
		{"to the last address", []nftables.SetElement{at("240.0.0.0", false)}, true, "240.0.0.0 255.255.255.255", "239.255.255.255"},
		{"IPv6", []nftables.SetElement{at("fd00:1::", false), at("fd00:2::", true)}, true, "fd00:1::7", "fd00:2:: 10.0.0.1 ::ffff:10.0.0.1"},
	} {
		s := newSet(tc.elements, tc.interval, false)
		for a := range strings.FieldsSeq(tc.in) {
			if !s.contains(netip.MustParseAddr(a)) {
				t.Errorf("%s: %s is not in it", tc.name, a)
			}
		}
		for a := range strings.FieldsSeq(tc.out) {
			if s.contains(netip.MustParseAddr(a)) {
				t.Errorf("%s: %s is in it", tc.name, a)
			}
		}
	}
}

// TestParse checks the names of sets.
func TestParse(t *testing.T) {
	names, err := Parse("inet filter peers4,  ip6 filter peers6")
	if err != nil || len(names) != 2 || names[0].String() != "inet filter peers4" || names[1].String() != "ip6 filter peers6" {
		t.Errorf("%v, %v", names, err)
	}
	if names, err := Parse(""); len(names) > 0 || err != nil {
		t.Errorf("%v, %v", names, err)
	}
	for _, wrong := range []string{"filter peers", "inet filter peers x", "ipv4 filter peers", "inet filter peers,", "inet filter peers,inet filter peers"} {
		if names, err := Parse(wrong); err == nil {
			t.Errorf("%q: %v", wrong, names)
		}
	}
	if want := "nft 'add table ip6 filter; add set ip6 filter peers6 { type ipv6_addr; flags interval; }'"; names[1].Fix() != want {
		t.Error(names[1].Fix())
	}
}

// world is a network namespace with a follower of the sets "inet filter peers4" and "inet filter peers6".
type world struct {
	*testing.T
	*Follower
	logs    *observer.ObservedLogs
	changes chan struct{}
}

func newWorld(t *testing.T) *world {
	testenv.RequireRoot(t)
	if _, err := exec.LookPath("nft"); err != nil {
		testenv.Skip(t, "needs nft: apt-get install nftables")
	}
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	own, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	own.Close()
	core, logs := observer.New(zapcore.InfoLevel)
	names, err := Parse("inet filter peers4,inet filter peers6")
	if err != nil {
		t.Fatal(err)
	}
	f, err := Follow(names, zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, Follower: f, logs: logs, changes: make(chan struct{}, 100)}
	f.Watch(func() { w.changes <- struct{}{} })
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) nft(command string) {
	w.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(strings.ReplaceAll(command, "; ", "\n"))
	if out, err := cmd.CombinedOutput(); err != nil {
		w.Fatalf("nft %.200s: %v: %.200s", command, err, out)
	}
}

// wait waits until the sets contain all addresses of in and none of out.
func (w *world) wait(in, out string) {
	w.Helper()
	limit := time.After(time.Minute)
	for !w.are(in, true) || !w.are(out, false) {
		select {
		case <-w.changes:
		case <-limit:
			w.Fatalf("want %q in, %q out of %.1000s", in, out, fmt.Sprintf("%+v", *w.content.Load()))
		}
	}
}

func (w *world) are(addrs string, in bool) bool {
	for a := range strings.FieldsSeq(addrs) {
		if w.Contains(netip.MustParseAddr(a)) != in {
			return false
		}
	}
	return true
}

// TestFollow checks that a follower has what nft(8) puts into sets, and that sets may come and go.
func TestFollow(t *testing.T) {
	w := newWorld(t)
	w.wait("", "10.0.0.1 fd00::1")
	missing := w.logs.FilterMessage("the nftables set does not exist, so it allows no peer").All()
	if len(missing) != 2 || missing[0].ContextMap()["fix"] != "nft 'add table inet filter; add set inet filter peers4 { type ipv4_addr; flags interval; }'" {
		t.Errorf("%v", missing)
	}

	w.nft("add table inet filter; add set inet filter peers4 { type ipv4_addr; flags interval; }")
	w.nft("add element inet filter peers4 { 10.0.0.0/24, 10.0.2.5-10.0.2.9, 10.0.9.1, 240.0.0.0/4 }")
	w.wait("10.0.0.0 10.0.0.255 10.0.2.5 10.0.2.9 10.0.9.1 ::ffff:10.0.9.1 255.255.255.255", "9.255.255.255 10.0.1.0 10.0.2.4 10.0.2.10 10.0.9.2 fd00::1")
	w.nft("delete element inet filter peers4 { 10.0.0.0/24 }")
	w.wait("10.0.2.5", "10.0.0.0 10.0.0.255")

	w.nft("add set inet filter peers6 { type ipv6_addr; flags timeout; }")
	w.nft("add element inet filter peers6 { fd00::1, fd00::2 timeout 1s }")
	w.wait("10.0.2.5 fd00::1 fd00::1%eth0", "fd00::3")
	w.wait("10.0.2.5 fd00::1", "fd00::2") // the kernel reports no event

	w.nft("delete set inet filter peers4")
	w.wait("fd00::1", "10.0.2.5 10.0.9.1")
	w.nft("delete table inet filter")
	w.wait("", "fd00::1 10.0.2.5")
	w.nft("add table inet filter; add set inet filter peers4 { type ipv4_addr; elements = { 10.7.7.7 }; }")
	w.wait("10.7.7.7", "10.7.7.6 10.7.7.8 fd00::1")
	w.nft("flush set inet filter peers4")
	w.wait("", "10.7.7.7")
}

// TestIncremental checks that the elements of a transaction are applied without reading the sets
// again, and that neighbouring intervals do not affect each other.
func TestIncremental(t *testing.T) {
	w := newWorld(t)
	w.nft("add table inet filter; add set inet filter peers4 { type ipv4_addr; flags interval; }; add set inet filter peers6 { type ipv6_addr; }; add table inet other; add set inet other s { type ipv4_addr; }")
	w.nft("add element inet filter peers4 { 10.0.0.0/24 }")
	w.wait("10.0.0.1", "10.0.1.1 fd00::1")
	w.events <- []netlink.Message{} // taken only after a read for the first transaction, which may have seen the second one
	before := w.reads.Load()
	w.nft("add element inet filter peers4 { 10.0.1.0/24, 10.0.3.0-10.0.4.7 }; add element inet filter peers6 { fd00::1, fd00::2 }; add element inet other s { 10.9.9.9 }")
	w.wait("10.0.0.255 10.0.1.0 10.0.1.255 10.0.3.0 10.0.4.7 fd00::1 fd00::2", "9.255.255.255 10.0.2.0 10.0.2.255 10.0.4.8 10.9.9.9 fd00:: fd00::3")
	w.nft("add element inet filter peers4 { 10.0.0.0/24 }") // there already
	w.nft("delete element inet filter peers4 { 10.0.1.0/24 }; delete element inet filter peers6 { fd00::1 }")
	w.wait("10.0.0.255 10.0.3.0 fd00::2", "10.0.1.0 10.0.1.255 fd00::1")
	w.nft("add element inet filter peers4 { 10.0.1.0/24 }; delete element inet filter peers4 { 10.0.0.0/24 }")
	w.wait("10.0.1.0", "10.0.0.255 10.0.2.0")
	w.nft("flush set inet filter peers6")
	w.wait("10.0.1.0 10.0.3.1", "fd00::1 fd00::2")
	if n := w.reads.Load() - before; n != 0 {
		t.Errorf("the sets were read %d times", n)
	}
	w.nft("add set inet filter more { type ipv4_addr; }") // may be one of them, under another name
	w.nft("delete element inet filter peers4 { 10.0.1.0/24 }")
	w.wait("10.0.3.0", "10.0.1.0")
	if n := w.reads.Load() - before; n == 0 {
		t.Error("the sets were not read after a change of their table")
	}
}

// TestEventsLost checks that the sets are right after a transaction whose events do not fit in the
// socket's buffer.
func TestEventsLost(t *testing.T) {
	w := newWorld(t)
	w.nft("add table inet filter; add set inet filter peers4 { type ipv4_addr; }")
	if err := w.messages.SetReadBuffer(1); err != nil { // the kernel makes it a few events
		t.Fatal(err)
	}
	const n = 20000
	var all strings.Builder
	for i := range n {
		fmt.Fprintf(&all, "10.%d.%d.1,", i>>8, i&255)
	}
	w.nft("add element inet filter peers4 { " + all.String() + " 11.0.0.1 }")
	w.wait("10.0.0.1 10.0.255.1 10.77.255.1 11.0.0.1", "10.0.0.2 10.250.0.1")
	w.nft("delete element inet filter peers4 { " + all.String() + " 11.0.0.1 }; add element inet filter peers4 { 12.0.0.1 }")
	w.wait("12.0.0.1", "10.0.0.1 10.77.255.1 11.0.0.1")

	before := w.reads.Load()
	w.events <- nil
	w.events <- []netlink.Message{}
	if n := w.reads.Load() - before; n == 0 {
		t.Error("the sets are not read after a loss")
	}
}

// TestUnusable checks that a set of something else allows nothing, which the log says.
func TestUnusable(t *testing.T) {
	w := newWorld(t)
	w.nft("add table inet filter; add set inet filter peers4 { type inet_service; elements = { 7174 }; }; add set inet filter peers6 { type ipv6_addr; elements = { fd00::1 }; }")
	w.wait("fd00::1", "0.0.28.6 10.0.0.1")
	testenv.Until(t, "the log says so", func() bool {
		return w.logs.FilterMessage("the nftables set cannot be used, so it allows no peer").Len() == 1
	})
	w.nft("add map inet filter a_map { type ipv4_addr : inet_service; }")
	for _, set := range []string{"peers4", "a_map"} {
		if err := Check(Name{nftables.TableFamilyINet, "filter", set}); !errors.Is(err, errUnusable) {
			t.Errorf("%s: %v", set, err)
		}
	}
	if s := w.String(); s != "nftables sets inet filter peers4, inet filter peers6" {
		t.Error(s)
	}
}
