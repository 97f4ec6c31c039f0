package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/cache"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// downAndUp sets the interface of e down and up again.
func downAndUp(t *testing.T, e *testenv.End) {
	t.Helper()
	e.NS.Run(t, func() error {
		l, err := netlink.LinkByName(e.Name)
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetUp(l))
	})
}

func openPacketEnd(t testing.TB, e *testenv.End, filter []unix.SockFilter) *Packet {
	t.Helper()
	var p *Packet
	e.NS.Run(t, func() (err error) {
		p, err = OpenPacket(e.Name, PacketOptions{Filter: filter})
		return err
	})
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// ipFrame returns a frame with an IP header and n bytes after it.
func ipFrame(from, to *testenv.End, v6 bool, proto uint8, dport uint16, vlans, n int) []byte {
	src, dst := from.Addr4, to.Addr4
	if v6 {
		src, dst = from.Addr6, to.Addr6
	}
	tu := pkt.Tuple{
		Flow: pkt.NewFlow(netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)), Proto: proto, V6: v6,
		SrcMAC: [6]byte(from.MAC), DstMAC: [6]byte(to.MAC), NVLAN: vlans, VLANs: [2]uint16{0x6005, 9},
	}
	b := make([]byte, tu.HeaderLen()+n)
	tu.Put(b, n, 0)
	l4 := b[tu.HeaderLen():]
	for i := range l4 {
		l4[i] = byte(i)
	}
	binary.BigEndian.PutUint16(l4[2:], dport)
	return b
}

// receive waits for a frame that want accepts. It ignores others, such as the kernel's own neighbour discovery.
func receive(t testing.TB, l Link, want func(b []byte) bool) []byte {
	t.Helper()
	fs := make([]Frame, 16)
	for until := clock.Now().Add(time.Minute); clock.Now() < until; l.Wait(10*time.Millisecond, -1) {
		var found []byte
		for i := range l.Receive(fs) {
			if b := join(&fs[i]); found == nil && want(b) {
				found = b
			}
			l.Release(&fs[i])
		}
		if found != nil {
			return found
		}
	}
	return nil
}

func TestPacketCarriesFrames(t *testing.T) {
	v := testenv.NewVeth(t, 9000)
	a, b := openPacketEnd(t, &v.A, nil), openPacketEnd(t, &v.B, nil)
	for _, vlans := range []int{0, 1, 2} {
		for _, n := range []int{40, 1480, 8972} {
			want := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, vlans, n)
			send(t, a, want)
			if got := receive(t, b, func(g []byte) bool { return bytes.Equal(g, want) }); got == nil {
				t.Errorf("a frame of %d bytes with %d VLAN tags did not arrive whole", len(want), vlans)
			}
		}
	}
	var st Stats
	if a.Stats(&st); st.TxFrames != 9 || st.TxInvalid+st.TxErrors != 0 {
		t.Errorf("stats %+v", st)
	}
}

// TestPacketReleaseAfterClose checks that a frame may be released when its link is closed.
func TestPacketReleaseAfterClose(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a, b := openPacketEnd(t, &v.A, nil), openPacketEnd(t, &v.B, nil)
	send(t, a, ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40))
	fs := make([]Frame, 1)
	for until := clock.Now().Add(time.Minute); b.Receive(fs) == 0; b.Wait(10*time.Millisecond, -1) {
		if clock.Now() > until {
			t.Fatal("no frame")
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if b.Release(&fs[0]); fs[0].N != 0 {
		t.Errorf("%d pieces are left", fs[0].N)
	}
}

func TestPacketManyFrames(t *testing.T) {
	testenv.OneCPU(t)
	v := testenv.NewVeth(t, 1500)
	a, b := openPacketEnd(t, &v.A, PortFilter([]uint16{1})), openPacketEnd(t, &v.B, PortFilter([]uint16{7174}))
	const total = 5000
	f := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 100)
	fs, done := make([]Frame, 64), make([]Slot, 64)
	sent, got, reaped := 0, 0, 0
	for until := clock.Now().Add(time.Minute); got < total; {
		if clock.Now() > until {
			t.Fatalf("sent %d, received %d of %d", sent, got, total)
		}
		for i := 0; i < 100 && sent < total; i++ {
			s, ok := a.Alloc()
			if !ok {
				break
			}
			copy(a.Bytes(s), f)
			binary.BigEndian.PutUint32(a.Bytes(s)[60:], uint32(sent))
			if !a.Post(s, 0, len(f)) {
				a.Free(s)
				break
			}
			sent++
		}
		a.Flush()
		n := a.Reap(done)
		for _, s := range done[:n] {
			a.Free(s)
		}
		reaped += n
		for i := range b.Receive(fs) {
			// The kernel's multicast reports have an extension header and pass the filter too.
			if g := fs[i].Pieces[0]; len(g) == len(f) && bytes.Equal(g[:40], f[:40]) {
				if id := binary.BigEndian.Uint32(g[60:]); id != uint32(got) {
					t.Fatalf("frame %d came as %d", got, id)
				}
				got++
			}
			b.Release(&fs[i])
		}
	}
	for n := a.Reap(done); n > 0; n = a.Reap(done) {
		reaped += n
	}
	if reaped != total {
		t.Errorf("reaped %d of %d", reaped, total)
	}
}

func TestPortFilter(t *testing.T) {
	testenv.OneCPU(t)
	v := testenv.NewVeth(t, 1500)
	a, b := openPacketEnd(t, &v.A, nil), openPacketEnd(t, &v.B, PortFilter([]uint16{7174, 9899}))
	frag := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40)
	frag[20] = 0x20
	icmp := func(v6 bool, proto, typ uint8) []byte {
		f := ipFrame(&v.A, &v.B, v6, proto, 0, 0, 40)
		f[len(f)-40] = typ
		return f
	}
	hop := ipFrame(&v.A, &v.B, true, 0, 0, 0, 40)
	for _, tc := range []struct {
		name  string
		frame []byte
		want  bool
	}{
		{"tcp4", ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40), true},
		{"tcp6", ipFrame(&v.A, &v.B, true, pkt.ProtoTCP, 7174, 0, 40), true},
		{"tcp4 with a tag", ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 1, 40), true},
		{"sctp4 second port", ipFrame(&v.A, &v.B, false, pkt.ProtoSCTP, 9899, 0, 40), true},
		{"udp6 second port", ipFrame(&v.A, &v.B, true, pkt.ProtoUDP, 9899, 0, 40), true},
		{"tcp4 other port", ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7175, 0, 40), false},
		{"tcp6 other port", ipFrame(&v.A, &v.B, true, pkt.ProtoTCP, 7175, 0, 40), false},
		{"gre", ipFrame(&v.A, &v.B, false, 47, 7174, 0, 40), false},
		{"fragment", frag, false},
		{"icmp4 unreachable", icmp(false, pkt.ProtoICMP, 3), true},
		{"icmp4 time exceeded", icmp(false, pkt.ProtoICMP, 11), true},
		{"icmp4 echo", icmp(false, pkt.ProtoICMP, 8), false},
		{"icmp6 too big", icmp(true, pkt.ProtoICMPv6, 2), true},
		{"icmp6 neighbour solicitation", icmp(true, pkt.ProtoICMPv6, 135), false},
		{"hop-by-hop", hop, true},
	} {
		send(t, a, tc.frame)
		// The frame after it shows that it was filtered and is not merely late.
		last := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 33)
		send(t, a, last)
		seen := false
		if receive(t, b, func(g []byte) bool {
			seen = seen || bytes.Equal(g, tc.frame)
			return bytes.Equal(g, last)
		}) == nil {
			t.Fatalf("%s: the frame after it did not arrive", tc.name)
		}
		if seen != tc.want {
			t.Errorf("%s: taken %v, want %v", tc.name, seen, tc.want)
		}
	}
	// A changed filter applies at once.
	if err := attach(b.fd, 0, PortFilter([]uint16{1})); err != nil {
		t.Fatal(err)
	}
	send(t, a, ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40))
	send(t, a, ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 1, 0, 40))
	if got := receive(t, b, func(b []byte) bool { return b[23] == pkt.ProtoTCP }); got == nil || binary.BigEndian.Uint16(got[36:]) != 1 {
		t.Errorf("the new filter let through %x", got)
	}
}

// TestPacketFinishesChecksums receives packets whose checksum the kernel has left to the hardware.
func TestPacketFinishesChecksums(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	if out, err := v.A.NS.Command(testenv.RequireTool(t, "ethtool"), "-K", v.A.Name, "tx", "on").CombinedOutput(); err != nil {
		testenv.Skip(t, "ethtool: %v: %s", err, out)
	}
	b := openPacketEnd(t, &v.B, PortFilter([]uint16{9899}))
	var c net.Conn
	v.A.NS.Run(t, func() (err error) {
		c, err = net.Dial("udp", netip.AddrPortFrom(v.B.Addr4, 9899).String())
		return err
	})
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	got := receive(t, b, func(b []byte) bool { return b[23] == pkt.ProtoUDP })
	var p pkt.Packet
	if err := p.Parse(got, len(got)); err != nil {
		t.Fatalf("%v: %x", err, got)
	}
	if pkt.Fold(pkt.Sum(got[p.L4Off:p.L4Off+p.L4Len], p.PseudoSum)) != 0xffff {
		t.Errorf("checksum is wrong: %x", got)
	}
}

func TestPacketErrors(t *testing.T) {
	testenv.RequireRoot(t)
	if _, err := OpenPacket("nothere", PacketOptions{}); err == nil {
		t.Error("opened an interface that is not there")
	}
	v := testenv.NewVeth(t, 1500)
	testenv.WithoutPrivileges(t, v.A.NS, func() {
		if _, err := OpenPacket(v.A.Name, PacketOptions{}); !errors.Is(err, unix.EPERM) {
			t.Errorf("without privileges: %v", err)
		}
	})
	v.A.NS.Run(t, func() error {
		_, err := OpenPacket(v.A.Name, PacketOptions{Filter: []unix.SockFilter{{Code: 0xffff}}})
		if err == nil {
			t.Error("took a filter that is none")
		}
		return nil
	})
}

// TestPacketFewDescriptors checks that OpenPacket fails with too few free descriptors, rather than open a link that
// sends no super-frames as long as it lasts.
func TestPacketFewDescriptors(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	v.A.NS.Run(t, func() error {
		restore := testenv.FewFiles(t, 1)
		p, err := OpenPacket(v.A.Name, PacketOptions{Super: true})
		restore()
		if err == nil {
			t.Errorf("opened with one descriptor: super-frames have %d bytes", p.SuperBytes())
			return p.Close()
		}
		if !errors.Is(err, unix.EMFILE) {
			return err
		}
		return nil
	})
}

// TestPacketFrameTooLong checks that a frame which the kernel refuses, or the peer of a veth drops, since it is longer
// than the MTU there, is lost, and that the frames after it are sent.
func TestPacketFrameTooLong(t *testing.T) {
	for name, counted := range map[string]Stats{
		"to send":    {TxFrames: 1, TxInvalid: 1},
		"to receive": {TxFrames: 1, TxErrors: 1},
	} {
		t.Run(name, func(t *testing.T) {
			v := testenv.NewVeth(t, 1500)
			a, b, lower := openPacketEnd(t, &v.A, nil), openPacketEnd(t, &v.B, nil), &v.B
			if counted.TxInvalid > 0 {
				lower = &v.A
			}
			lower.NS.Run(t, func() error {
				l, err := netlink.LinkByName(lower.Name)
				if err != nil {
					return err
				}
				return netlink.LinkSetMTU(l, 1000)
			})
			send(t, a, ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 1400))
			want := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40)
			send(t, a, want)
			if receive(t, b, func(g []byte) bool { return bytes.Equal(g, want) }) == nil {
				t.Error("the frame after it did not arrive")
			}
			var st Stats
			a.Stats(&st)
			if got := (Stats{TxFrames: st.TxFrames, TxErrors: st.TxErrors, TxInvalid: st.TxInvalid}); got != counted {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

// TestPacketWait checks that a link sleeps until the time is over, also after its interface was down, but not for long
// while frames wait to be sent.
func TestPacketWait(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a := openPacketEnd(t, &v.A, PortFilter([]uint16{1}))
	downAndUp(t, &v.A)
	fs := make([]Frame, 16)
	sleep := func(limit time.Duration) time.Duration {
		start := clock.Now()
		a.Wait(limit, -1)
		took := clock.Now().Sub(start)
		for i := range a.Receive(fs) { // of the kernel
			a.Release(&fs[i])
		}
		return took
	}
	const pause = 5 * time.Millisecond
	longest := time.Duration(0)
	for n := 0; longest < pause && n < 100; n++ { // a signal, or a frame, may cut some short
		longest = max(longest, sleep(pause))
	}
	if longest < pause {
		t.Errorf("woke after %v with nothing there", longest)
	}
	s, _ := a.Alloc()
	a.Post(s, 0, 60)
	sum := time.Duration(0)
	for range 20 {
		sum += sleep(2 * time.Second)
	}
	if sum > 10*time.Second {
		t.Errorf("slept for %v with a frame to send", sum)
	}
}

// TestSuperTooManyParts checks that a super-frame of more parts than a message has room for is refused.
func TestSuperTooManyParts(t *testing.T) {
	var m superMsg
	if errno := m.send(-1, new(unix.RawSockaddrLinklayer), make([][]byte, MaxSuper+2)); errno != unix.EMSGSIZE {
		t.Errorf("%v", errno)
	}
}

func TestPacketAllocatesNothing(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a, b := openPacketEnd(t, &v.A, nil), openPacketEnd(t, &v.B, nil)
	f := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 1000)
	fs, done := make([]Frame, 8), make([]Slot, 8)
	got := 0
	if n := testing.AllocsPerRun(500, func() {
		s, _ := a.Alloc()
		copy(a.Bytes(s), f)
		a.Post(s, 0, len(f))
		a.Flush()
		for _, s := range done[:a.Reap(done)] {
			a.Free(s)
		}
		b.Wait(10*time.Millisecond, -1)
		n := b.Receive(fs)
		for i := range n {
			b.Release(&fs[i])
		}
		got += n
	}); n != 0 {
		t.Errorf("%v allocations a frame", n)
	}
	for until := clock.Now().Add(time.Minute); got < 500 && clock.Now() < until; b.Wait(10*time.Millisecond, -1) {
		n := b.Receive(fs)
		for i := range n {
			b.Release(&fs[i])
		}
		got += n
	}
	if got < 500 {
		t.Errorf("only %d frames arrived", got)
	}
}

// superEnds returns two packet sockets, of which a sends super-frames and b receives them whole, and such a
// super-frame of 20 segments.
func superEnds(t *testing.T) (v *testenv.Veth, a, b *Packet, s *Super) {
	t.Helper()
	v = testenv.NewVethOffloads(t, 1500)
	open := func(e *testenv.End, opts PacketOptions) (p *Packet) {
		e.NS.Run(t, func() (err error) {
			p, err = OpenPacket(e.Name, opts)
			return err
		})
		t.Cleanup(func() { p.Close() })
		return p
	}
	a, b = open(&v.A, PacketOptions{Super: true}), open(&v.B, PacketOptions{Filter: PortFilter([]uint16{7174}), Whole: true})
	if a.SuperBytes() == 0 {
		testenv.Skip(t, "no super-frames on %s", v.A.Name)
	}
	const size, n, headers = 1400, 20, 14 + 20 + 20
	want := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 20+n*size)
	want[14+20+12] = 5 << 4 // the length of the TCP header
	s = &Super{TCPOff: 14 + 20, HdrLen: headers, Size: size, Parts: [][]byte{want[:headers+size]}}
	for at := headers + size; at < len(want); at += size {
		s.Parts = append(s.Parts, want[at:at+size])
	}
	return v, a, b, s
}

// TestPacketSuperInOnePiece checks that a super-frame is received in one piece, and in several while
// many are kept, that a ring full of them loses some and no other, and that a ring is used again after the
// starts of all in it were lost.
func TestPacketSuperInOnePiece(t *testing.T) {
	testenv.OneCPU(t)
	v, a, b, s := superEnds(t)
	want, headers := bytes.Join(s.Parts, nil), s.HdrLen
	for _, mean := range []time.Duration{0, time.Hour} {
		b.supers.distance.mean = mean // slots are evicted from the caches, or not
		limit := len(b.supers.keeps) / 4
		kept := make([]Frame, limit+2)
		got := 0
		for until := clock.Now().Add(time.Minute); got < len(kept) && clock.Now() < until; b.Wait(10*time.Millisecond, -1) {
			if !a.SendSuper(s) {
				t.Fatal("the kernel refused a super-frame")
			}
			for got < len(kept) && b.Receive(kept[got:got+1]) == 1 {
				f := &kept[got]
				if f.Len() != len(want) { // a multicast report from the kernel
					b.Release(f)
					continue
				}
				if !bytes.Equal(join(f)[headers:], want[headers:]) {
					t.Fatalf("frame %d differs", got)
				}
				if one := got < limit; one != (f.N == 1) {
					t.Errorf("frame %d has %d pieces", got, f.N)
				}
				got++
			}
		}
		if got < len(kept) {
			t.Fatalf("%d of %d frames arrived", got, len(kept))
		}
		for i := range kept {
			b.Release(&kept[i])
		}
	}
	// burst sends n super-frames with a frame after each, then receives. It returns how many super-frames arrived.
	burst := func(n int) (supers int) {
		for i := range n {
			if !a.SendSuper(s) {
				t.Fatal("the kernel refused a super-frame")
			}
			send(t, a, ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40+i))
		}
		small := 0
		for until := clock.Now().Add(time.Minute); small < n && clock.Now() < until; {
			var f [1]Frame
			if b.Receive(f[:]) == 0 {
				continue
			}
			switch f[0].Len() {
			case len(want):
				if !bytes.Equal(join(&f[0])[headers:], want[headers:]) {
					t.Fatal("a super-frame differs")
				}
				supers++
			case 14 + 20 + 40 + small:
				small++
			}
			b.Release(&f[0])
		}
		if small != n || b.supers.kept != 0 {
			t.Errorf("%d of %d frames between super-frames arrived; %d are kept", small, n, b.supers.kept)
		}
		return supers
	}
	// More than the ring holds arrive at once: those that were stored, and the frames between them, are received.
	slots := len(b.supers.keeps)
	supers := burst(slots + 10)
	var st Stats
	if b.Stats(&st); supers != slots || st.RxRingFull != 10 {
		t.Errorf("%d super-frames of %d, stats %+v", supers, slots, st)
	}
	// The ring fills while the starts are lost.
	if err := attach(b.fd, 0, PortFilter([]uint16{7175})); err != nil {
		t.Fatal(err)
	}
	for range slots {
		a.SendSuper(s)
	}
	if err := attach(b.fd, 0, PortFilter([]uint16{7174})); err != nil {
		t.Fatal(err)
	}
	s.Parts[0][14+5]++ // another identification
	burst(2 * slots)
	if n := burst(slots / 2); n != slots/2 {
		t.Errorf("%d of %d super-frames arrived after the starts of a full ring were lost", n, slots/2)
	}
}

// TestPacketSuperHeld checks that a super-frame that is held does not keep later ones from arriving, and stays
// what it was. Without memory a super-frame stays in the ring.
func TestPacketSuperHeld(t *testing.T) {
	testenv.OneCPU(t)
	_, a, b, s := superEnds(t)
	var held [1]Frame
	receive := func(what string, f []Frame) []byte {
		t.Helper()
		if !a.SendSuper(s) {
			t.Fatal("the kernel refused a super-frame")
		}
		for until := clock.Now().Add(time.Minute); ; b.Wait(time.Millisecond, -1) {
			switch {
			case clock.Now() > until:
				t.Fatalf("%s does not arrive", what)
			case b.Receive(f) == 0:
			case f[0].Len() == s.Len():
				return join(&f[0])
			default: // a multicast report from the kernel
				b.Release(&f[0])
			}
		}
	}
	want := receive("a super-frame", held[:])
	if b.Hold(&held[0]); b.supers.kept != 0 {
		t.Fatalf("%d are kept in the ring", b.supers.kept)
	}
	for i := range 2 * len(b.supers.keeps) {
		var f [1]Frame
		receive(fmt.Sprintf("super-frame %d", i), f[:])
		b.Release(&f[0])
	}
	if !bytes.Equal(join(&held[0]), want) {
		t.Error("the held frame has changed")
	}
	free := b.small.free
	b.small.free = free[:MaxPieces-1]
	var f [1]Frame
	receive("one more", f[:])
	if b.Hold(&f[0]); b.supers.kept != 1 || !bytes.Equal(join(&f[0]), want) {
		t.Error("moved without memory")
	}
	b.Release(&f[0])
	b.small.free = free
	b.Release(&held[0])
	if len(b.small.free) != cap(b.small.free) || b.supers.kept != 0 {
		t.Errorf("%d of %d buffers free", len(b.small.free), cap(b.small.free))
	}
}

// TestDistanceInterrupted checks that frames are not taken for those of a far core because a measurement was interrupted, and that
// those of a far core are recognized.
func TestDistanceInterrupted(t *testing.T) {
	var d distance
	for range 20 {
		d.add(25 * time.Nanosecond)
	}
	d.add(4 * time.Millisecond)
	if d.far() {
		t.Errorf("after one measurement that was interrupted, a line takes %v", d.mean)
	}
	for range 20 {
		d.add(115 * time.Nanosecond)
	}
	if !d.far() {
		t.Errorf("a line of a far core takes %v", d.mean)
	}
}

// TestDistance checks that frames that are in the cache are not taken for those of a far core.
func TestDistance(t *testing.T) {
	d := distance{mean: 2 * farCores}
	frame := make([]byte, 4*cache.PageSize)
	far := 0
	for range 100 {
		cache.Fetch(frame)
		for i := range frame {
			frame[i]++
		}
		d.count = distanceEvery - 1 // measure each: between two measurements the race detector's memory takes the place of their code in the cache
		d.see(frame)
		if d.far() {
			far++
		}
	}
	if far > 50 { // some measurements are interrupted
		t.Errorf("%d of 100 times a line that was just written was far, at the end with %v", far, d.mean)
	}
}

// TestPacketSuperAfterDown checks that super-frames arrive after the interface was down: the kernel may then pass
// frames to the two sockets in the other order.
func TestPacketSuperAfterDown(t *testing.T) {
	v := testenv.NewVethOffloads(t, 1500)
	var a, b *Packet
	for _, end := range []struct {
		e    *testenv.End
		p    **Packet
		opts PacketOptions
	}{{&v.A, &a, PacketOptions{Super: true}}, {&v.B, &b, PacketOptions{Filter: PortFilter([]uint16{7174}), Whole: true}}} {
		end.e.NS.Run(t, func() (err error) {
			*end.p, err = OpenPacket(end.e.Name, end.opts)
			return err
		})
		defer (*end.p).Close()
	}
	if a.SuperBytes() == 0 {
		testenv.Skip(t, "no super-frames on %s", v.A.Name)
	}
	downAndUp(t, &v.B)
	const size, headers = 1400, 14 + 20 + 20
	want := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 20+2*size)
	want[14+20+12] = 5 << 4
	s := &Super{TCPOff: 14 + 20, HdrLen: headers, Size: size, Parts: [][]byte{want[:headers+size], want[headers+size:]}}
	got := 0
	for until := clock.Now().Add(time.Minute); got < 100 && clock.Now() < until; {
		var f [1]Frame
		a.SendSuper(s) // refused until the interface is up
		if b.Receive(f[:]) == 0 {
			continue
		}
		if f[0].Len() == len(want) {
			got++
		}
		b.Release(&f[0])
	}
	var st Stats
	if b.Stats(&st); got < 100 || st.RxInvalid != 0 {
		t.Errorf("%d super-frames arrived, stats %+v", got, st)
	}
}

// TestPacketsAfterDown checks that several links of an interface share its frames by flow also after the
// interface was down: none is lost, and those of a flow arrive on one link.
func TestPacketsAfterDown(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a := openPacketEnd(t, &v.A, PortFilter([]uint16{1}))
	const n = 3
	var links []*Packet
	v.B.NS.Run(t, func() (err error) {
		links, err = OpenPackets(v.B.Name, n, PacketOptions{Filter: PortFilter([]uint16{7174})})
		return err
	})
	for _, l := range links {
		defer l.Close()
	}
	const flows, each = 64, 4
	exchange := func(round byte) {
		t.Helper()
		by := make(map[uint16]int) // link of a flow
		got := make([]int, n)
		take := func() (all int) {
			fs := make([]Frame, 16)
			for i, l := range links {
				for k := range l.Receive(fs) {
					f := fs[k].Pieces[0]
					if len(f) == 14+20+40 && f[len(f)-1] == round { // others are the kernel's, or late
						port := binary.BigEndian.Uint16(f[34:])
						if had, ok := by[port]; ok && had != i {
							t.Errorf("round %d: a flow arrives on links %d and %d", round, had, i)
						}
						by[port] = i
						got[i]++
					}
					l.Release(&fs[k])
				}
				all += got[i]
			}
			return all
		}
		for k := range flows * each {
			f := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40)
			binary.BigEndian.PutUint16(f[34:], uint16(20000+k%flows))
			f[14+20+12], f[len(f)-1] = 5<<4, round
			send(t, a, f)
			take()
		}
		for until := clock.Now().Add(time.Minute); take() < flows*each; links[0].Wait(time.Millisecond, -1) {
			if clock.Now() > until {
				t.Fatalf("round %d: %v frames of %d arrived", round, got, flows*each)
			}
		}
		for i, k := range got {
			if k == 0 {
				t.Errorf("round %d: link %d received none of %d flows", round, i, flows)
			}
		}
	}
	exchange(1)
	downAndUp(t, &v.B)
	probe := ipFrame(&v.A, &v.B, false, pkt.ProtoTCP, 7174, 0, 40)
	for until, up := clock.Now().Add(time.Minute), false; !up; {
		if clock.Now() > until {
			t.Fatal("no frame arrives after the interface was down")
		}
		send(t, a, probe) // lost until the interface is up
		fs := make([]Frame, 16)
		for _, l := range links {
			k := l.Receive(fs)
			for i := range k {
				l.Release(&fs[i])
			}
			up = up || k > 0
		}
	}
	exchange(2)
}
