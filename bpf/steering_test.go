package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const (
	actPass     = 2
	actRedirect = 4
)

func load(t testing.TB) *Steering {
	t.Helper()
	testenv.RequireRoot(t)
	s, err := Load(Options{Queues: 4, Endpoints: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// TestInterpreted checks that no program makes tail calls and has functions too. The kernel refuses those where it
// interprets programs (net.core.bpf_jit_enable=0), and where the machine's compiler lacks one with the other.
func TestInterpreted(t *testing.T) {
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	tailCalls := 0
	for name, p := range spec.Programs {
		tail, function := false, ""
		for _, ins := range p.Instructions {
			tail = tail || ins.IsBuiltinCall() && ins.Constant == int64(asm.FnTailCall)
			if ins.IsFunctionCall() {
				function = ins.Reference()
			}
		}
		if tail {
			tailCalls++
		}
		if tail && function != "" {
			t.Errorf("%s makes tail calls, and calls %s", name, function)
		}
	}
	if tailCalls == 0 {
		t.Error("no program makes tail calls: the test finds none")
	}
}

// TestVerifiedSoon checks that the verifier has little to do, which takes most of the time that a daemon takes to start: it
// follows each path through the headers as far as it finds no state that it knows.
func TestVerifiedSoon(t *testing.T) {
	o := &load(t).objs
	for name, p := range map[string]*ebpf.Program{
		"iwarpd_steer": o.IwarpdSteer, "iwarpd_ingress": o.IwarpdIngress, "iwarpd_tap": o.IwarpdTap, "iwarpd_tap_super": o.IwarpdTapSuper,
		"iwarpd_fragments": o.IwarpdFragments, "iwarpd_skb_fragments": o.IwarpdSkbFragments,
	} {
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		n, ok := info.VerifiedInstructions()
		if !ok {
			testenv.Skip(t, "needs Linux 5.16, whose verifier says how many instructions it has verified")
		}
		if most := uint32(40_000); n > most {
			t.Errorf("%s: the verifier followed %d instructions; want at most %d", name, n, most)
		}
	}
}

// withSocket puts an AF_XDP socket, not bound, in queue 0: enough for a test
// run to say XDP_REDIRECT.
func withSocket(t testing.TB, s *Steering) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_XDP, unix.SOCK_RAW, 0)
	if err != nil {
		testenv.Skip(t, "AF_XDP socket: %v", err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := s.SetSocket(0, fd); err != nil {
		t.Fatal(err)
	}
}

// run gives one frame to the programs under test and returns their verdict, in the words
// of XDP.
var run = runXDP

func runXDP(t testing.TB, s *Steering, frame []byte) uint32 {
	t.Helper()
	act, err := result(s.objs.IwarpdSteer, frame)
	if err != nil {
		t.Fatal(err)
	}
	return act
}

// runSKB is for the two programs beside a packet socket: what is dropped at ingress the
// socket has received, but for fragments, which are in the ring.
func runSKB(t testing.TB, s *Steering, frame []byte) uint32 {
	t.Helper()
	const next, drop, all = 1<<32 - 1, 2, 1<<32 - 1
	// A socket filter is run without the Ethernet header, and one of no protocol that the
	// kernel knows.
	tap, err := result(s.objs.IwarpdTap, append([]byte{12: 0x88, 13: 0xb5}, frame...))
	if err != nil {
		t.Fatal(err)
	}
	act, err := result(s.objs.IwarpdIngress, frame)
	if notRun = errors.Is(err, unix.EINVAL); notRun {
		act = next
	} else if err != nil {
		t.Fatal(err)
	}
	switch {
	case act == drop && tap == all:
		return actRedirect
	case act == drop && tap == 0:
		return actDrop
	case act == next && tap == 0:
		return actPass
	}
	t.Errorf("the packet socket receives %d bytes, verdict at ingress %d: %x", tap, act, frame)
	return act
}

// notRun says that the kernel did not try the last frame at ingress: it was cut in the IP
// header.
var notRun bool

func result(p *ebpf.Program, frame []byte) (uint32, error) {
	act, err := p.Run(&ebpf.RunOptions{Data: frame})
	if err != nil {
		err = fmt.Errorf("BPF_PROG_TEST_RUN: %w", err)
	}
	return act, err
}

// eachHook runs a test for the program at XDP, and for those of packet sockets.
func eachHook(t *testing.T, test func(*testing.T)) {
	t.Run("xdp", test)
	run = runSKB
	defer func() { run, notRun = runXDP, false }()
	t.Run("skb", test)
}

var (
	addr4  = netip.MustParseAddr("10.1.2.3")
	peer4  = netip.MustParseAddr("10.1.2.4")
	addr6  = netip.MustParseAddr("fd00::3")
	peer6  = netip.MustParseAddr("fd00::4")
	other4 = netip.MustParseAddr("10.1.2.5")
)

const port = 7174

// frame makes a frame to dst with n bytes of transport header, zero but for
// the ports.
func frame(proto uint8, src, dst netip.Addr, sport, dport uint16, vlans int) []byte {
	tu := pkt.Tuple{
		Flow:   pkt.NewFlow(netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)),
		Proto:  proto,
		V6:     dst.Is6(),
		SrcMAC: [6]byte{2, 0, 0, 0, 0, 1}, DstMAC: [6]byte{2, 0, 0, 0, 0, 2},
		VLANs: [2]uint16{7, 8}, NVLAN: vlans,
	}
	b := make([]byte, tu.HeaderLen()+40)
	tu.Put(b, 40, 0)
	l4 := b[tu.HeaderLen():]
	binary.BigEndian.PutUint16(l4, sport)
	binary.BigEndian.PutUint16(l4[2:], dport)
	return b
}

// icmpError makes an ICMP error to dst about the packet in inner.
func icmpError(src, dst netip.Addr, typ byte, inner []byte) []byte {
	proto := uint8(pkt.ProtoICMP)
	if dst.Is6() {
		proto = pkt.ProtoICMPv6
	}
	tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)), Proto: proto, V6: dst.Is6()}
	ip := inner[14:]
	b := make([]byte, tu.HeaderLen()+8+len(ip))
	tu.Put(b, 8+len(ip), 0)
	b[tu.HeaderLen()] = typ
	copy(b[tu.HeaderLen()+8:], ip)
	return b
}

// withOptions inserts n bytes of IPv4 options.
func withOptions(b []byte, n int) []byte {
	out := append([]byte{}, b[:34]...)
	out = append(out, make([]byte, n)...)
	out = append(out, b[34:]...)
	out[14] = 0x40 | byte(5+n/4)
	binary.BigEndian.PutUint16(out[16:], uint16(len(out)-14))
	return out
}

// withExt inserts an IPv6 extension header of n bytes.
func withExt(b []byte, typ byte, n int) []byte {
	ext := make([]byte, n)
	ext[0] = b[20]
	ext[1] = byte(n/8 - 1)
	if typ == 51 {
		ext[1] = byte(n/4 - 2)
	}
	out := append(append(append([]byte{}, b[:54]...), ext...), b[54:]...)
	out[20] = typ
	binary.BigEndian.PutUint16(out[18:], uint16(len(out)-54))
	return out
}

func edit(b []byte, off int, v ...byte) []byte {
	b = append([]byte{}, b...)
	copy(b[off:], v)
	return b
}

func TestVerdicts(t *testing.T) { eachHook(t, testVerdicts) }

func testVerdicts(t *testing.T) {
	s := load(t)
	install(t, s)
	withSocket(t, s)
	for _, e := range []Endpoint{
		{Proto: pkt.ProtoTCP, Addr: addr4, Port: port}, {Proto: pkt.ProtoTCP, Addr: addr6, Port: port}, {Proto: pkt.ProtoSCTP, Addr: addr4, Port: port},
		{Proto: pkt.ProtoUDP, Addr: addr6, Port: 9899}, {Proto: pkt.ProtoTCP, Addr: netip.IPv4Unspecified(), Port: 20000}, {Proto: pkt.ProtoSCTP, Addr: netip.Addr{}, Port: 20001},
	} {
		mustClaim(t, s, e)
	}
	tcp4 := frame(6, peer4, addr4, 999, port, 0)
	tcp6 := frame(6, peer6, addr6, 999, port, 0)
	back4 := frame(6, addr4, peer4, port, 999, 0) // what we sent
	back6 := frame(6, addr6, peer6, port, 999, 0)
	options := func(n int) []byte {
		b := tcp6
		for range n {
			b = withExt(b, 60, 8)
		}
		return b
	}
	type C = Counters
	for _, tc := range []struct {
		name  string
		frame []byte
		act   uint32
		count Counters
	}{
		{"tcp4", tcp4, actRedirect, C{SteeredTCP: 1}},
		{"tcp6", tcp6, actRedirect, C{SteeredTCP: 1}},
		{"tcp4 to an address of Ethernet like an IP header", edit(tcp4, 0, 0x46), actRedirect, C{SteeredTCP: 1}},
		{"tcp6 to an address of Ethernet like an IP header", edit(tcp6, 0, 0x62), actRedirect, C{SteeredTCP: 1}},
		{"tcp4 vlan", frame(6, peer4, addr4, 999, port, 1), actRedirect, C{SteeredTCP: 1}},
		{"tcp6 two vlans", frame(6, peer6, addr6, 999, port, 2), actRedirect, C{SteeredTCP: 1}},
		{"tcp4 other port", frame(6, peer4, addr4, 999, port+1, 0), actPass, C{Passed: 1}},
		{"tcp4 source port is ours", frame(6, peer4, addr4, port, 999, 0), actPass, C{Passed: 1}},
		{"tcp4 other address", frame(6, peer4, other4, 999, port, 0), actPass, C{Passed: 1}},
		{"tcp4 wildcard", frame(6, peer4, other4, 999, 20000, 0), actRedirect, C{SteeredTCP: 1}},
		{"tcp6 wildcard is of IPv4", frame(6, peer6, addr6, 999, 20000, 0), actPass, C{Passed: 1}},
		{"sctp4", frame(132, peer4, addr4, 999, port, 0), actRedirect, C{SteeredSCTP: 1}},
		{"sctp6 wildcard of both", frame(132, peer6, addr6, 999, 20001, 0), actRedirect, C{SteeredSCTP: 1}},
		{"udp6", frame(17, peer6, addr6, 999, 9899, 0), actRedirect, C{SteeredUDP: 1}},
		{"udp4 unclaimed", frame(17, peer4, addr4, 999, 9899, 0), actPass, C{Passed: 1}},
		{"other protocol", frame(47, peer4, addr4, 999, port, 0), actPass, C{Passed: 1}},
		{"options", withOptions(tcp4, 40), actRedirect, C{SteeredTCP: 1}},
		{"hop-by-hop", withExt(tcp6, 0, 8), actRedirect, C{SteeredTCP: 1}},
		{"three extension headers", withExt(withExt(withExt(tcp6, 60, 24), 51, 24), 0, 8), actRedirect, C{SteeredTCP: 1}},
		{"mobility, HIP and Shim6", withExt(withExt(withExt(tcp6, 140, 8), 139, 8), 135, 8),
			actRedirect, C{SteeredTCP: 1}},
		{"routing, segments left", edit(withExt(tcp6, 43, 8), 57, 1), actPass, C{Passed: 1}},
		{"all of a packet in a fragment", withExt(tcp6, 44, 8), actRedirect, C{SteeredTCP: 1}},
		{"to many on the link", edit(tcp4, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), actPass, C{Passed: 1}},
		{"arp", edit(tcp4, 12, 8, 6), actPass, C{Passed: 1}},
		{"three vlans", edit(frame(6, peer4, addr4, 999, port, 2), 20, 0x81, 0), actPass, C{Passed: 1}},
		{"version", edit(tcp4, 14, 0x65), actPass, C{Malformed: 1}},
		{"version of IPv6", edit(tcp6, 14, 0x45), actPass, C{Malformed: 1}},
		{"short header length", edit(tcp4, 14, 0x44), actPass, C{Malformed: 1}},
		{"total length below header", edit(tcp4, 16, 0, 19), actPass, C{Malformed: 1}},
		{"cut in ports", tcp4[:36], actPass, C{Malformed: 1}},
		{"cut in IPv6", tcp6[:40], actPass, C{Malformed: 1}},
		{"extension header beyond the frame", edit(withExt(tcp6, 0, 8), 55, 200), actPass, C{Malformed: 1}},
		{"seven extension headers", options(7), actRedirect, C{SteeredTCP: 1}},
		{"eight extension headers", options(8), actPass, C{Malformed: 1}},
		{"icmp4 unreachable", icmpError(peer4, addr4, 3, back4), actRedirect, C{SteeredICMP: 1}},
		{"icmp4 time exceeded, options inside", icmpError(peer4, addr4, 11, withOptions(back4, 8)), actRedirect, C{SteeredICMP: 1}},
		{"icmp4 parameter problem", icmpError(peer4, addr4, 12, back4), actRedirect, C{SteeredICMP: 1}},
		{"icmp4 about another's packet", icmpError(peer4, addr4, 3, tcp4), actPass, C{Passed: 1}},
		{"icmp4 echo", icmpError(peer4, addr4, 8, back4), actPass, C{Passed: 1}},
		{"icmp4 about a first fragment", icmpError(peer4, addr4, 3, edit(back4, 20, 0x20, 0)), actRedirect, C{SteeredICMP: 1}},
		{"icmp4 about a later fragment", icmpError(peer4, addr4, 3, edit(back4, 20, 0, 5)), actPass, C{PassedFragment: 1}},
		{"icmp4 cut", icmpError(peer4, addr4, 3, back4[:40]), actPass, C{Passed: 1}},
		{"icmp6 too big", icmpError(peer6, addr6, 2, back6), actRedirect, C{SteeredICMP: 1}},
		{"icmp6 parameter problem", icmpError(peer6, addr6, 4, back6), actRedirect, C{SteeredICMP: 1}},
		{"icmp6 of type 0", icmpError(peer6, addr6, 0, back6), actPass, C{Passed: 1}},
		{"icmp6 about a first fragment", icmpError(peer6, addr6, 2, testenv.Cut(back6, 16, 1)[0]), actRedirect, C{SteeredICMP: 1}},
		{"icmp6 about a later fragment", icmpError(peer6, addr6, 2, testenv.Cut(back6, 16, 1)[1]), actPass, C{PassedFragment: 1}},
		{"icmp6 about a fragment after another header",
			icmpError(peer6, addr6, 2, withExt(testenv.Cut(back6, 16, 1)[0], 0, 8)), actPass, C{PassedFragment: 1}},
		{"icmp6 neighbour solicitation", icmpError(peer6, addr6, 135, back6), actPass, C{Passed: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := counters(t, s)
			if act := run(t, s, tc.frame); act != tc.act {
				t.Errorf("verdict %d, want %d", act, tc.act)
			}
			after := counters(t, s)
			if got := minus(after, before); got != tc.count && !notRun {
				t.Errorf("counted %+v, want %+v", got, tc.count)
			}
		})
	}
}

func minus(a, b Counters) Counters {
	return Counters{
		a.SteeredTCP - b.SteeredTCP, a.SteeredSCTP - b.SteeredSCTP, a.SteeredUDP - b.SteeredUDP, a.SteeredICMP - b.SteeredICMP,
		a.Passed - b.Passed, a.PassedFragment - b.PassedFragment, a.Malformed - b.Malformed, a.NoSocket - b.NoSocket,
		a.SteeredFragment - b.SteeredFragment, a.CopiedFragment - b.CopiedFragment, a.DroppedFragment - b.DroppedFragment,
	}
}

func TestClaimsAreCounted(t *testing.T) { eachHook(t, testClaimsAreCounted) }

func testClaimsAreCounted(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	e := Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: port}
	f := frame(6, peer4, addr4, 999, port, 0)
	for _, step := range []struct {
		do  func(Endpoint) error
		act uint32
	}{{s.Claim, actRedirect}, {s.Claim, actRedirect}, {s.Unclaim, actRedirect}, {s.Unclaim, actPass}} {
		if err := step.do(e); err != nil {
			t.Fatal(err)
		}
		if act := run(t, s, f); act != step.act {
			t.Errorf("verdict %d, want %d", act, step.act)
		}
	}
	if err := s.Unclaim(e); !errors.Is(err, ErrUnclaimed) {
		t.Errorf("Unclaim once too often: %v", err)
	}
	// A map that is full says so, and leaves nothing half claimed.
	for i := range 64 {
		mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: uint16(i + 1)})
	}
	if err := s.Claim(Endpoint{Proto: pkt.ProtoTCP, Addr: netip.Addr{}, Port: 1}); !errors.Is(err, unix.E2BIG) || !strings.Contains(err.Error(), "room for 64 endpoints, and is full: raise steering-endpoints") {
		t.Errorf("Claim in a full map: %v", err)
	}
}

// TestStaleEndpoint checks that an endpoint that could not be deleted from the map, as when there is no memory, is
// deleted when the next claim begins or ends, unless that is its own.
func TestStaleEndpoint(t *testing.T) { eachHook(t, testStaleEndpoint) }

func testStaleEndpoint(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	fails, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.Hash, KeySize: s.objs.Endpoints.KeySize(), ValueSize: s.objs.Endpoints.ValueSize(), MaxEntries: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer fails.Close()
	if err := fails.Freeze(); err != nil {
		t.Fatal(err)
	}
	e := Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: port}
	other := Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: port + 1}
	f := frame(6, peer4, addr4, 999, port, 0)
	for _, next := range []struct {
		do   func(Endpoint) error
		with Endpoint
		act  uint32
	}{{s.Claim, other, actPass}, {s.Unclaim, other, actPass}, {s.Claim, e, actRedirect}} {
		mustClaim(t, s, e)
		endpoints := s.objs.Endpoints
		s.objs.Endpoints = fails
		err := s.Unclaim(e)
		s.objs.Endpoints = endpoints
		if !errors.Is(err, unix.EPERM) {
			t.Fatalf("deleted from a map that cannot be written: %v", err)
		}
		if err := next.do(next.with); err != nil {
			t.Fatal(err)
		}
		if act := run(t, s, f); act != next.act {
			t.Errorf("verdict %d, want %d", act, next.act)
		}
	}
	mustClaim(t, s, other) // must not delete what is claimed
	if act := run(t, s, f); act != actRedirect {
		t.Errorf("the endpoint is claimed again: verdict %d", act)
	}
}

// TestPeer checks that of an endpoint that is claimed for one peer only that peer's frames are steered: others to the
// port may be answers to connections that the host translates.
func TestPeer(t *testing.T) { eachHook(t, testPeer) }

func testPeer(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	install(t, s)
	type hosts struct{ own, peer, other, router netip.Addr }
	for _, h := range []hosts{
		{addr4, peer4, other4, netip.MustParseAddr("192.0.2.1")},
		{addr6, peer6, netip.MustParseAddr("fd00::14"), netip.MustParseAddr("fd99::1")},
	} {
		e := Endpoint{Proto: pkt.ProtoTCP, Addr: h.own, Port: port, Peer: netip.AddrPortFrom(h.peer, 999)}
		all, another := e, e
		all.Peer, another.Peer = netip.AddrPort{}, netip.AddrPortFrom(h.other, 999)
		quoted := func(to netip.Addr, dport uint16) []byte {
			typ := byte(3)
			if to.Is6() {
				typ = 1
			}
			return icmpError(h.router, h.own, typ, frame(6, h.own, to, port, dport, 0))
		}
		first := func(from netip.Addr, id uint32) []byte {
			return testenv.Cut(frame(6, from, h.own, 999, port, 0), 24, id)[0]
		}
		check := func(when string, others uint32) {
			t.Helper()
			for _, tt := range []struct {
				what  string
				frame []byte
				want  uint32
			}{
				{"its frame", frame(6, h.peer, h.own, 999, port, 0), actRedirect},
				{"that of another port", frame(6, h.peer, h.own, 998, port, 0), others},
				{"that of another host", frame(6, h.other, h.own, 999, port, 0), others},
				{"an error about a packet to it", quoted(h.peer, 999), actRedirect},
				{"one about a packet to another port", quoted(h.peer, 998), others},
				{"one about a packet to another host", quoted(h.other, 999), others},
			} {
				if got := run(t, s, tt.frame); got != tt.want {
					t.Errorf("%v, %s: %s: verdict %d, want %d", h.own, when, tt.what, got, tt.want)
				}
			}
		}
		for _, step := range []struct {
			when   string
			do     func(Endpoint) error
			e      Endpoint
			others uint32
		}{
			{"claimed", s.Claim, e, actPass},
			{"claimed twice", s.Claim, e, actPass},
			{"claimed for another too", s.Claim, another, actRedirect},
			{"not for that one any more", s.Unclaim, another, actRedirect}, // it may have frames in flight
		} {
			if err := step.do(step.e); err != nil {
				t.Fatal(err)
			}
			check(step.when, step.others)
		}
		for range 2 {
			if err := s.Unclaim(e); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Claim(e); err != nil {
			t.Fatal(err)
		}
		check("claimed again", actPass)
		for i, want := range []uint32{actDrop, actPass} { // what is dropped is in the ring
			if got := run(t, s, first([]netip.Addr{h.peer, h.other}[i], uint32(i+1))); got != want {
				t.Errorf("%v: first fragment %d: verdict %d, want %d", h.own, i, got, want)
			}
		}
		if err := s.Claim(all); err != nil {
			t.Fatal(err)
		}
		check("claimed for all", actRedirect)
	}
}

func TestNoSocketPassesToKernel(t *testing.T) {
	s := load(t)
	mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: port})
	f := frame(6, peer4, addr4, 999, port, 0)
	if act := run(t, s, f); act != actPass {
		t.Errorf("verdict %d", act)
	}
	if c, err := s.Counters(); err != nil || c != (Counters{NoSocket: 1}) {
		t.Errorf("counters %+v, %v", c, err)
	}
	withSocket(t, s)
	if act := run(t, s, f); act != actRedirect {
		t.Errorf("verdict %d with a socket", act)
	}
	if err := s.objs.Sockets.Delete(uint32(0)); err != nil {
		t.Fatal(err)
	}
	if act := run(t, s, f); act != actPass {
		t.Errorf("verdict %d without the socket again", act)
	}
}

// TestCountersWhileClosed checks that counters may be read while the program is unloaded, as a daemon does that ends.
func TestCountersWhileClosed(t *testing.T) {
	s := load(t)
	var readers, began sync.WaitGroup
	for range 4 {
		began.Add(1)
		readers.Go(func() {
			first := sync.OnceFunc(began.Done)
			_, err := s.Counters()
			for ; err == nil; _, err = s.Counters() {
				first()
			}
			if !errors.Is(err, unix.EBADF) {
				t.Error(err)
			}
		})
	}
	began.Wait()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	readers.Wait()
}

func TestWildcardMeansOurAddresses(t *testing.T) { eachHook(t, testWildcardMeansOurAddresses) }

func testWildcardMeansOurAddresses(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: netip.Addr{}, Port: port})
	ours, theirs := frame(6, peer4, addr4, 999, port, 0), frame(6, peer4, other4, 999, port, 0)
	check := func(name string, f []byte, want uint32) {
		t.Helper()
		if act := run(t, s, f); act != want {
			t.Errorf("%s: verdict %d, want %d", name, act, want)
		}
	}
	check("no list", theirs, actRedirect)
	if err := s.SetAddresses([]netip.Addr{addr4, addr6}); err != nil {
		t.Fatal(err)
	}
	check("ours", ours, actRedirect)
	check("ours, IPv6", frame(6, peer6, addr6, 999, port, 0), actRedirect)
	check("forwarded", theirs, actPass)
	if err := s.SetAddresses([]netip.Addr{other4}); err != nil {
		t.Fatal(err)
	}
	check("moved", ours, actPass)
	check("new", theirs, actRedirect)
	if err := s.SetAddresses(nil); err != nil {
		t.Fatal(err)
	}
	check("none of ours left", ours, actPass)
	check("forwarded, and none of ours left", theirs, actPass)
	many := func(net byte) (all []netip.Addr) {
		for i := range maxAddresses * 2 / 3 {
			all = append(all, netip.AddrFrom4([4]byte{10, net, byte(i >> 8), byte(i)}))
		}
		return all
	}
	for _, net := range []byte{1, 2} {
		if err := s.SetAddresses(append(many(net), addr4)); err != nil {
			t.Errorf("other addresses: %v", err)
		}
	}
	check("kept", ours, actRedirect)
	check("replaced", frame(6, peer4, many(1)[0], 999, port, 0), actPass)
	check("instead", frame(6, peer4, many(2)[0], 999, port, 0), actRedirect)
}

// TestVLANs checks that the program takes frames of the VLANs that the host is a member
// of, and that it leaves frames of others alone, even to the host's address.
func TestVLANs(t *testing.T) { eachHook(t, testVLANs) }

func testVLANs(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: port})
	tagged := func(tags ...uint16) []byte {
		b := frame(6, peer4, addr4, 999, port, len(tags))
		for i, tag := range tags {
			binary.BigEndian.PutUint16(b[14+4*i:], tag)
		}
		return b
	}
	for _, step := range []struct {
		set  [][]uint16
		want map[string]uint32
	}{
		{nil, map[string]uint32{"none": actRedirect, "5": actRedirect, "7": actRedirect, "5 7": actRedirect}},
		{[][]uint16{nil, {5}}, map[string]uint32{"none": actRedirect, "priority": actRedirect, "5": actRedirect, "7": actPass, "5 7": actPass}},
		{[][]uint16{{7}, {5, 7}}, map[string]uint32{"none": actRedirect, "5": actPass, "7": actRedirect, "5 7": actRedirect, "7 5": actPass}},
		{[][]uint16{}, map[string]uint32{"none": actRedirect, "priority": actRedirect, "5": actPass}},
	} {
		if step.set != nil {
			if err := s.SetVLANs(step.set); err != nil {
				t.Fatal(err)
			}
		}
		for name, f := range map[string][]byte{
			"none": tagged(), "priority": tagged(0xe000), "5": tagged(0x6005), "7": tagged(7), "5 7": tagged(5, 7), "7 5": tagged(7, 0x1005),
		} {
			if want, ok := step.want[name]; ok {
				if act := run(t, s, f); act != want {
					t.Errorf("in VLANs %v: a frame of VLAN %s: verdict %d, want %d", step.set, name, act, want)
				}
			}
		}
	}
}

// TestAgreesWithPkt gives damaged frames to the program and to pkt.Packet: what
// is steered has headers that pkt reads the same way, or refuses for what the
// program does not look at.
func TestAgreesWithPkt(t *testing.T) { eachHook(t, testAgreesWithPkt) }

func testAgreesWithPkt(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	claim := func(dst netip.Addr) {
		for _, proto := range []uint8{pkt.ProtoTCP, pkt.ProtoSCTP} {
			mustClaim(t, s, Endpoint{Proto: proto, Addr: dst, Port: port})
		}
	}
	claim(addr4)
	claim(addr6)
	seeds := [][]byte{
		frame(6, peer4, addr4, 999, port, 0), frame(132, peer6, addr6, 999, port, 1), withOptions(frame(6, peer4, addr4, 1, port, 0), 12),
		withExt(withExt(frame(6, peer6, addr6, 1, port, 0), 51, 16), 60, 8), withExt(frame(6, peer6, addr6, 1, port, 1), 44, 8),
	}
	r := testenv.Rand(t)
	steered := 0
	for i := range 3000 {
		f := append([]byte{}, seeds[i%len(seeds)]...)
		for range r.IntN(3) {
			f[12+r.IntN(len(f)-12)] = byte(r.Uint32())
		}
		f = f[:14+r.IntN(len(f)-13)]
		act := run(t, s, f)
		var p pkt.Packet
		err := p.Parse(f, len(f))
		ours := err == nil && p.Flow.LocalPort == port && (p.Proto == pkt.ProtoTCP || p.Proto == pkt.ProtoSCTP) &&
			(p.Flow.Local == addr4.As16() || p.Flow.Local == addr6.As16())
		switch {
		case ours && act != actRedirect:
			t.Fatalf("pkt says ours, the program passes: %x", f)
		case err == nil && !ours && act != actPass:
			t.Fatalf("pkt says not ours, the program steers: %x", f)
		case act == actRedirect && err != nil && !errors.Is(err, pkt.ErrShort) && !errors.Is(err, pkt.ErrChecksum) && !errors.Is(err, pkt.ErrHeader):
			t.Fatalf("steered, but pkt says %v: %x", err, f)
		}
		if act == actRedirect {
			steered++
		}
	}
	if steered < 100 {
		t.Errorf("only %d of 3000 frames were steered: the test tests little", steered)
	}
}

// another reports whether Attach failed because another iwarpd serves the interface.
func another(err error) bool {
	e, ok := errors.AsType[*BusyError](err)
	return ok && e.iwarpd()
}

// TestForeignProgram checks that the error of an interface with the XDP program of others names that program.
func TestForeignProgram(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "balance", Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, actPass), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pass.Close()
	v.A.NS.Run(t, func() error {
		l, err := link.AttachXDP(link.XDPOptions{Program: pass, Interface: v.A.Index, Flags: link.XDPGenericMode})
		if err != nil {
			return err
		}
		defer l.Close()
		info, err := pass.Info()
		if err != nil {
			return err
		}
		id, _ := info.ID()
		_, err = s.Attach(v.A.Index, Auto)
		if e, ok := errors.AsType[*BusyError](err); !ok || e.iwarpd() || e.Interface != v.A.Name || e.Program != "balance" || e.ID != id {
			t.Errorf("attach: %v; want one that names the program, whose id is %d", err, id)
		}
		err = withoutAdmin(t, func() error {
			_, err := s.Attach(v.A.Index, Auto)
			return err
		})
		if want := fmt.Sprintf("(perhaps of another iwarpd, id %d)", id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("attach without CAP_SYS_ADMIN: %v; want %s", err, want)
		}
		return nil
	})
}

// withoutAdmin runs f on this thread without CAP_SYS_ADMIN, which the daemon of the unit lacks too.
func withoutAdmin(t *testing.T, f func() error) error {
	t.Helper()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	if err := unix.Capget(&head, &all[0]); err != nil {
		t.Fatal(err)
	}
	less := all
	less[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	if err := unix.Capset(&head, &less[0]); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Capset(&head, &all[0]); err != nil {
			t.Fatal(err)
		}
	}()
	return f()
}

func TestAttach(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	for _, m := range []Mode{Auto, Generic, Native, Ingress} {
		if err := v.A.NS.Do(func() error {
			got, err := s.Attach(v.A.Index, m)
			if m == Ingress && errors.Is(err, ErrNoIngress) {
				testenv.Skip(t, "%v", err)
			}
			if err != nil {
				return err
			}
			if want := max(m, Native); m != Auto && got != want || m == Auto && got != Generic {
				return fmt.Errorf("asked for %v, got %v", m, got)
			}
			if again, err := s.Attach(v.A.Index, m); err != nil || again != got {
				return fmt.Errorf("attached twice: %v, %v", again, err)
			}
			other, err := Load(Options{})
			if err != nil {
				return err
			}
			defer other.Close()
			if _, err := other.Attach(v.A.Index, m); !another(err) {
				return fmt.Errorf("second program: %v", err)
			}
			return s.Detach(v.A.Index)
		}); err != nil {
			t.Fatalf("%v: %v", m, err)
		}
	}
	if err := v.A.NS.Do(func() error {
		_, err := s.Attach(1<<20, Auto)
		return err
	}); err == nil {
		t.Error("attached to an interface that is not there")
	}
}

// detachByOthers detaches the program of s from an interface as bpftool does: by the ID of
// the bpf_link.
func detachByOthers(s *Steering, index int) error {
	info, err := s.links[index].link.Info()
	if err != nil {
		return err
	}
	theirs, err := link.NewFromID(info.ID)
	if err != nil {
		return err
	}
	defer theirs.Close()
	return theirs.Detach()
}

// TestIngressDetachedByOthers is TestDetachedByOthers for the program at tc ingress, which
// tc(8) cannot take away.
func TestIngressDetachedByOthers(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	if err := v.A.NS.Do(func() error {
		if _, err := s.Attach(v.A.Index, Ingress); err != nil {
			return err
		}
		p := s.Program(v.A.Index, Ingress)
		if ok, err := p.Attached(); !ok || err != nil {
			t.Errorf("at first: attached %v, %v", ok, err)
		}
		if err := detachByOthers(s, v.A.Index); err != nil {
			return err
		}
		if ok, err := p.Attached(); ok || err != nil {
			t.Errorf("after bpftool link detach: attached %v, %v", ok, err)
		}
		if err := p.Attach(); err != nil {
			return err
		}
		if ok, err := p.Attached(); !ok || err != nil {
			t.Errorf("attached again: %v, %v", ok, err)
		}
		return nil
	}); errors.Is(err, ErrNoIngress) {
		testenv.Skip(t, "%v", err)
	} else if err != nil {
		t.Fatal(err)
	}
}

// TestDetachedByOthers checks that a program that an administrator detaches by its
// bpf_link, the only way that the kernel allows, is reported as detached, and that it can
// be attached again.
func TestDetachedByOthers(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	v.A.NS.Run(t, func() error {
		if _, err := s.Attach(v.A.Index, Auto); err != nil {
			return err
		}
		p := s.Program(v.A.Index, Auto)
		attached := func(step string, want bool) {
			t.Helper()
			if ok, err := p.Attached(); ok != want || err != nil {
				t.Errorf("%s: attached %v, %v", step, ok, err)
			}
		}
		attached("at first", true)
		nl, err := netlink.LinkByIndex(v.A.Index)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetXdpFdWithFlags(nl, -1, unix.XDP_FLAGS_SKB_MODE); !errors.Is(err, unix.EBUSY) {
			t.Errorf("ip link set dev %s xdpgeneric off: %v; want EBUSY", v.A.Name, err)
		}
		attached("after ip link", true)
		if err := detachByOthers(s, v.A.Index); err != nil {
			return err
		}
		attached("after bpftool link detach", false)
		other, err := Load(Options{})
		if err != nil {
			return err
		}
		defer other.Close()
		if _, err := other.Attach(v.A.Index, Auto); err != nil {
			return err
		}
		attached("with another program", false)
		if err := p.Attach(); !another(err) {
			t.Errorf("attach beside another program: %v", err)
		}
		attached("still with another program", false)
		if err := other.Detach(v.A.Index); err != nil {
			return err
		}
		if err := p.Attach(); err != nil {
			return err
		}
		attached("attached again", true)
		return nil
	})
}

// TestRenew checks that Renew gives the driver another program each time, without the program ever being detached,
// and that it and its counters are the same as before.
func TestRenew(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	v.A.NS.Run(t, func() error {
		for _, m := range []Mode{Generic, Native} {
			if _, err := s.Attach(v.A.Index, m); err != nil {
				return err
			}
			p, before := s.Program(v.A.Index, m), xdpProgram(t, v.A.Index)
			for range 3 {
				if err := s.Renew(v.A.Index); err != nil {
					return err
				}
				if now := xdpProgram(t, v.A.Index); (now != before) != (m == Native) {
					t.Errorf("%v: program %d after %d", m, now, before)
				} else {
					before = now
				}
				if ok, err := p.Attached(); !ok || err != nil {
					t.Errorf("%v: attached %v, %v", m, ok, err)
				}
			}
			if err := s.Detach(v.A.Index); err != nil {
				return err
			}
		}
		if err := s.Renew(v.A.Index); err != nil {
			t.Errorf("not attached: %v", err)
		}
		if _, err := s.Attach(v.A.Index, Native); err != nil {
			return err
		}
		if err := detachByOthers(s, v.A.Index); err != nil {
			return err
		}
		if err := s.Renew(v.A.Index); err != nil {
			t.Errorf("detached by others: %v", err)
		}
		if ok, _ := s.Program(v.A.Index, Native).Attached(); ok {
			t.Error("attached by Renew, which is for the policy to decide")
		}
		return nil
	})
	tcp := frame(6, peer4, addr4, 999, port, 0)
	for _, p := range []*ebpf.Program{s.objs.IwarpdSteer, s.objs.Twin} {
		before := counters(t, s)
		if _, err := result(p, tcp); err != nil {
			t.Fatal(err)
		}
		if after, err := s.Counters(); err != nil || after.Seen() != before.Seen()+1 {
			t.Errorf("%d frames seen after %d, %v", after.Seen(), before.Seen(), err)
		}
	}
}

// xdpProgram returns the ID of the XDP program on an interface.
func xdpProgram(t *testing.T, index int) uint32 {
	t.Helper()
	dev, err := netlink.LinkByIndex(index)
	if err != nil {
		t.Fatal(err)
	}
	return dev.Attrs().Xdp.ProgId
}

// TestAutoIsGenericOnTap checks that auto is generic mode on a tap, whose frames are skbs
// already, as those of a veth are.
func TestAutoIsGenericOnTap(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	v.A.NS.Run(t, func() error {
		tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tap0"}, Mode: netlink.TUNTAP_MODE_TAP}
		if err := netlink.LinkAdd(tap); err != nil {
			testenv.Skip(t, "make a tap: %v", err)
		}
		l, err := netlink.LinkByName("tap0")
		if err != nil {
			return err
		}
		got, err := s.Attach(l.Attrs().Index, Auto)
		if err == nil && got != Generic {
			err = fmt.Errorf("got %v", got)
		}
		return err
	})
}

// TestWithoutPrivileges checks that the error says which privilege is missing.
func TestWithoutPrivileges(t *testing.T) {
	load(t) // or the library would find that the kernel lacks names of programs, and remember it for the tests that follow
	testenv.WithoutPrivileges(t, nil, func() {
		s, err := Load(Options{})
		if !errors.Is(err, ErrPrivilege) {
			t.Errorf("Load: %v", err)
		}
		if err == nil {
			_ = s.Close()
		}
	})
}

// TestSlower checks that the reason for which a driver does not take the program is kept, and only that.
func TestSlower(t *testing.T) {
	s := load(t)
	v := testenv.NewVeth(t, 1500)
	v.A.NS.Run(t, func() error {
		const lo = 1 // its driver has no native mode
		mode, err := s.Attach(lo, Auto)
		if why := s.Slower(lo); err != nil || mode != Generic || !errors.Is(why, unix.EOPNOTSUPP) {
			t.Errorf("attached in %v mode, %v, because of %v", mode, err, why)
		}
		mode, err = s.Attach(v.A.Index, Auto) // native mode is not tried
		if why := s.Slower(v.A.Index); err != nil || mode != Generic || why != nil {
			t.Errorf("attached to a veth in %v mode, %v, because of %v", mode, err, why)
		}
		return errors.Join(s.Detach(lo), s.Detach(v.A.Index))
	})
}

// TestIngressUnknown checks that only a kernel without programs at tc ingress is said to lack them.
func TestIngressUnknown(t *testing.T) {
	testenv.RequireRoot(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if !HasIngress(lo) {
		testenv.Skip(t, "%v", ErrNoIngress)
	}
	gone := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "gone", Index: 1 << 30}}
	err = alone(gone, Ingress)
	if !errors.Is(err, unix.ENODEV) || errors.Is(err, ErrNoIngress) || !strings.Contains(err.Error(), "gone") {
		t.Errorf("of an interface that does not exist: %v", err)
	}
}

func mustClaim(t testing.TB, s *Steering, e Endpoint) {
	t.Helper()
	if err := s.Claim(e); err != nil {
		t.Fatal(err)
	}
}

func counters(t testing.TB, s *Steering) Counters {
	t.Helper()
	c, err := s.Counters()
	if err != nil {
		t.Fatal(err)
	}
	return c
}
