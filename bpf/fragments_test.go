package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const actDrop = 1

// TestFragments gives fragments to the program, one after the other.
func TestFragments(t *testing.T) { eachHook(t, testFragments) }

func testFragments(t *testing.T) {
	type C = Counters
	const (
		ours  = port
		other = port + 1
	)
	packet := func(proto uint8, src, dst netip.Addr, dport uint16) []byte {
		return frame(proto, src, dst, 999, dport, 0)
	}
	cut := func(b []byte, id uint32) [][]byte { return testenv.Cut(b, 24, id) }
	taken, copied, passed, malformed := C{SteeredFragment: 1}, C{CopiedFragment: 1}, C{PassedFragment: 1}, C{Malformed: 1}
	type step struct {
		frame []byte
		act   uint32
		count C
	}
	family := func(src, dst netip.Addr) map[string][]step {
		a, b := cut(packet(6, src, dst, ours), 1), cut(packet(6, src, dst, other), 1)
		a2 := cut(packet(6, src, dst, ours), 2)
		udp := cut(packet(17, src, dst, ours), 3)
		icmp := cut(packet(1, src, dst, ours), 3)
		odd := testenv.Cut(packet(6, src, dst, ours), 24, 4)
		l4 := len(odd[0]) - 24
		if dst.Is6() {
			binary.BigEndian.PutUint16(odd[0][18:], 8+23)
		} else {
			binary.BigEndian.PutUint16(odd[0][16:], 20+23)
		}
		far := bytes.Clone(a[1])
		if dst.Is6() {
			far[l4-6], far[l4-5] = 0xff, 0xf8
		} else {
			far[20], far[21] = 0x1f, 0xff
		}
		ends := func(n uint16) []byte { // n bytes after the last offset
			f := bytes.Clone(far)
			if dst.Is6() {
				binary.BigEndian.PutUint16(f[18:], 8+n)
			} else {
				binary.BigEndian.PutUint16(f[16:], 20+n)
			}
			return f
		}
		return map[string][]step{
			"in order":                      {{a[0], actDrop, taken}, {a[1], actDrop, taken}},
			"not ours":                      {{b[0], actPass, passed}, {b[1], actPass, passed}},
			"not ours, backwards":           {{b[1], actPass, copied}, {b[0], actPass, passed}, {b[1], actPass, passed}},
			"ours, backwards":               {{a[1], actPass, copied}, {a[0], actDrop, taken}, {a[1], actDrop, taken}},
			"another identification":        {{a[0], actDrop, taken}, {a2[1], actPass, copied}},
			"identification again, others'": {{a[0], actDrop, taken}, {b[0], actPass, passed}, {b[1], actPass, passed}},
			"identification again, ours":    {{b[0], actPass, passed}, {a[0], actDrop, taken}, {a[1], actDrop, taken}},
			"a protocol without claims":     {{udp[1], actPass, passed}, {udp[0], actPass, passed}, {icmp[0], actPass, passed}},
			"no multiple of eight":          {{odd[0], actPass, malformed}},
			"beyond 65535":                  {{far, actPass, malformed}, {ends(8), actPass, malformed}},
			"up to 65535":                   {{ends(7), actPass, copied}},
			"empty":                         {{ends(0), actPass, malformed}},
			"shorter than its headers":      {{ends(1<<16 - 8), actPass, malformed}},
		}
	}
	v4, v6 := family(peer4, addr4), family(peer6, addr6)
	v6["protocol without claims, same identification"] = []step{
		{cut(packet(6, peer6, addr6, ours), 7)[0], actDrop, taken},
		{cut(packet(17, peer6, addr6, ours), 7)[0], actPass, passed},
		{cut(packet(17, peer6, addr6, ours), 7)[1], actPass, passed},
	}
	v6["headers cut"] = []step{{testenv.Cut(packet(6, peer6, addr6, ours), 16, 8)[0], actPass, malformed}}
	v4["only the ports"] = []step{{testenv.Cut(packet(6, peer4, addr4, ours), 8, 8)[0], actDrop, taken}}
	v4["another destination"] = []step{{cut(packet(6, peer4, other4, ours), 9)[0], actPass, passed}, {cut(packet(6, peer4, other4, ours), 10)[1], actPass, passed}}
	v4["VLAN"] = []step{
		{testenv.Cut(frame(6, peer4, addr4, 999, ours, 2), 24, 11)[0], actDrop, taken},
		{testenv.Cut(frame(6, peer4, addr4, 999, ours, 2), 24, 11)[1], actDrop, taken},
	}
	hop := withExt(cut(packet(6, peer6, addr6, ours), 12)[0], 0, 8)
	v6["behind options"] = []step{{hop, actDrop, taken}}
	dst := testenv.Cut(withExt(packet(6, peer6, addr6, ours), 60, 8), 32, 13)
	v6["in front of options"] = []step{{dst[0], actDrop, taken}, {dst[1], actDrop, taken}}
	nested := withExt(cut(packet(6, peer6, addr6, ours), 14)[0], 44, 8)
	nested[57] = 1
	v6["two Fragment headers"] = []step{{nested, actPass, malformed}}

	s := load(t)
	for _, a := range []netip.Addr{addr4, addr6} {
		mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: a, Port: ours})
	}
	ring, err := s.Fragments()
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	give := func(steps []step) (bad []string) {
		for i, st := range steps {
			before := counters(t, s)
			if act := run(t, s, st.frame); act != st.act {
				bad = append(bad, fmt.Sprintf("step %d: verdict %d, want %d", i, act, st.act))
			}
			after := counters(t, s)
			got := minus(after, before)
			if got != st.count {
				bad = append(bad, fmt.Sprintf("step %d: counted %+v, want %+v", i, got, st.count))
			}
			if got.SteeredFragment+got.CopiedFragment == 0 {
				continue
			}
			if b, err := ring.Read(time.Now().Add(time.Minute)); err != nil || !bytes.Equal(b, st.frame) {
				bad = append(bad, fmt.Sprintf("step %d: the ring has %x, %v", i, b, err))
			}
		}
		return bad
	}
	for fam, tests := range map[string]map[string][]step{"IPv4": v4, "IPv6": v6} {
		for name, steps := range tests {
			t.Run(fam+" "+name, func(t *testing.T) {
				var bad []string
				for range 3 { // a machine that stands still for two seconds has the program forget
					began := time.Now()
					forget(t, s)
					if bad = give(steps); bad == nil || time.Since(began) < time.Second {
						break
					}
				}
				for _, b := range bad {
					t.Error(b)
				}
				if b, err := ring.Read(time.Now()); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("the ring has more: %x, %v", b, err)
				}
			})
		}
	}
}

// forget empties the program's memory of fragments.
func forget(t testing.TB, s *Steering) {
	t.Helper()
	var k steerPacket
	for s.objs.Packets.NextKey(nil, &k) == nil {
		if err := s.objs.Packets.Delete(&k); err != nil {
			t.Fatal(err)
		}
	}
}

// install installs the program for fragments, whose ring nobody reads.
func install(t testing.TB, s *Steering) *Fragments {
	t.Helper()
	f, err := s.Fragments()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// TestFragmentsOptional checks that the fragments of a claimed endpoint go to the kernel
// without the program, before it is installed and after Close.
func TestFragmentsOptional(t *testing.T) { eachHook(t, testFragmentsOptional) }

func testFragmentsOptional(t *testing.T) {
	s := load(t)
	withSocket(t, s)
	mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: addr4, Port: port})
	first := testenv.Cut(frame(6, peer4, addr4, 999, port, 0), 24, 1)[0]
	check := func(when string, act uint32, want Counters) {
		t.Helper()
		before := counters(t, s)
		if got := run(t, s, first); got != act {
			t.Errorf("%s: verdict %d, want %d", when, got, act)
		}
		after, err := s.Counters()
		if err != nil || minus(after, before) != want {
			t.Errorf("%s: counted %+v, %v", when, minus(after, before), err)
		}
	}
	check("not installed", actPass, Counters{PassedFragment: 1})
	f := install(t, s)
	check("installed", actDrop, Counters{SteeredFragment: 1})
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	check("closed", actPass, Counters{PassedFragment: 1})
	if err := f.Close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
}

// TestFragmentRing checks that frames of every length are received whole, and that when
// the ring is full the kernel does not receive some of our fragments.
func TestFragmentRing(t *testing.T) { eachHook(t, testFragmentRing) }

func testFragmentRing(t *testing.T) {
	s := load(t)
	mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: netip.Addr{}, Port: port})
	ring, err := s.Fragments()
	if err != nil {
		t.Fatal(err)
	}
	long := func(n int) []byte {
		b := append(frame(6, peer4, addr4, 999, port, 0), make([]byte, n)...)
		for i := range b[54:] {
			b[54+i] = byte(i * 7)
		}
		binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
		b[20] = 0x20
		return b
	}
	for _, n := range []int{0, 1464, 1488, 1496, 2000, 3392} {
		f := long(n)
		if act := run(t, s, f); act != actDrop {
			t.Fatalf("%d bytes: verdict %d", len(f), act)
		}
		if b, err := ring.Read(time.Time{}); err != nil || !bytes.Equal(b, f) {
			t.Fatalf("%d bytes: %d come, %v", len(f), len(b), err)
		}
	}
	f := long(0)
	n := 0
	for ; ; n++ {
		if act := run(t, s, f); act != actDrop {
			t.Fatalf("verdict %d", act)
		}
		c := counters(t, s)
		if c.DroppedFragment > 0 {
			break
		}
	}
	if n < 500 {
		t.Errorf("full after %d frames", n)
	}
	for range n {
		if _, err := ring.Read(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error)
	go func() {
		_, err := ring.Read(time.Time{})
		done <- err
	}()
	if err := ring.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read after Close: %v", err)
	}
}

// TestFragmentsOfTheHost checks that fragmented packets for a socket of the kernel reach
// it whole, in whatever order the fragments arrive, beside a claim of the same address
// and protocol. Fragments for the claim must not reach the kernel, which would respond
// that the port is closed.
func TestFragmentsOfTheHost(t *testing.T) {
	t.Run("xdp", func(t *testing.T) { testFragmentsOfTheHost(t, Auto, false) })
	t.Run("ingress", func(t *testing.T) { testFragmentsOfTheHost(t, Ingress, false) })
	t.Run("ingress beside XDP", func(t *testing.T) { testFragmentsOfTheHost(t, Ingress, true) })
}

func testFragmentsOfTheHost(t *testing.T, mode Mode, beside bool) {
	v := testenv.NewVeth(t, 1500)
	s := load(t)
	ring := install(t, s)
	if beside {
		v.A.NS.Run(t, func() error {
			prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.XDP, License: "GPL", Flags: unix.BPF_F_XDP_HAS_FRAGS,
				Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, actPass), asm.Return()},
			})
			if err != nil {
				return err
			}
			defer prog.Close()
			l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: v.A.Index, Flags: link.XDPGenericMode})
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		})
	}
	before := uint64(0) // fragments in the ring
	for _, v6 := range []bool{false, true} {
		src, dst := v.B.Addr4, v.A.Addr4
		if v6 {
			src, dst = v.B.Addr6, v.A.Addr6
		}
		if beside { // the type of the frame is also where it would be if the IP header were that of Ethernet
			src = netip.MustParseAddr("8.0.69.2")
			if v6 {
				src = netip.MustParseAddr("2001:db8:86dd::2")
			}
		}
		t.Run(fmt.Sprint("v6=", v6), func(t *testing.T) {
			testenv.OneCPU(t)
			const claimed, theirs = 9899, 5000
			mustClaim(t, s, Endpoint{Proto: pkt.ProtoUDP, Addr: dst, Port: claimed})
			var conn *net.UDPConn
			var raw int
			if err := v.A.NS.Do(func() (err error) {
				if _, err = s.Attach(v.A.Index, mode); err == nil {
					conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, theirs)))
				}
				return err
			}); errors.Is(err, ErrNoIngress) {
				testenv.Skip(t, "%v", err)
			} else if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			v.B.NS.Run(t, func() (err error) {
				raw, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
				return err
			})
			defer unix.Close(raw)
			datagram := func(port uint16, id byte) []byte {
				tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(src, 999), netip.AddrPortFrom(dst, port)), Proto: pkt.ProtoUDP, V6: v6,
					SrcMAC: [6]byte(v.B.MAC), DstMAC: [6]byte(v.A.MAC)}
				const n = 3000
				b := make([]byte, tu.HeaderLen()+n)
				l4 := b[tu.HeaderLen():]
				for i := range l4 {
					l4[i] = id
				}
				binary.BigEndian.PutUint16(l4, 999)
				binary.BigEndian.PutUint16(l4[2:], port)
				binary.BigEndian.PutUint16(l4[4:], n)
				binary.BigEndian.PutUint16(l4[6:], 0)
				binary.BigEndian.PutUint16(l4[6:], pkt.UDPChecksum(pkt.Sum(l4, tu.PseudoSum(n))))
				tu.Put(b, n, 0)
				return b
			}
			id, sent := byte(0), make(map[string]bool)
			for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {2, 0, 1}} {
				for _, port := range []uint16{claimed, theirs} {
					id++
					cut := testenv.Cut(datagram(port, id), 1400, uint32(id))
					for _, i := range order {
						sent[string(cut[i])] = true
						if err := unix.Sendto(raw, cut[i], 0, &unix.SockaddrLinklayer{Ifindex: v.B.Index}); err != nil {
							t.Fatal(err)
						}
					}
					if port == claimed {
						continue
					}
					var got [4096]byte
					if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
						t.Fatal(err)
					}
					n, err := conn.Read(got[:])
					if err != nil || n != 2992 || got[0] != id || got[n-1] != id {
						t.Fatalf("order %v: the kernel's socket has %d bytes, %v", order, n, err)
					}
				}
			}
			c := counters(t, s)
			// Of ours two are known in the first order, one in the others; copied
			// is what comes before its first, ours or not.
			if c.SteeredFragment < 7 || c.CopiedFragment < 8 || c.DroppedFragment != 0 {
				t.Errorf("%+v", c)
			}
			for n := c.SteeredFragment + c.CopiedFragment - before; n > 0; n-- {
				if b, err := ring.Read(time.Now().Add(time.Minute)); err != nil || !sent[string(b)] {
					t.Fatalf("in the ring %x, %v, which was not sent", b, err)
				}
			}
			before = c.SteeredFragment + c.CopiedFragment
			var errs int
			v.A.NS.Run(t, func() (err error) {
				errs, err = noPorts(v6)
				return err
			})
			if errs != 0 {
				t.Errorf("the kernel has got %d datagrams for nobody", errs)
			}
		})
	}
}

// noPorts is how many datagrams the kernel has got that were for no socket.
func noPorts(v6 bool) (n int, err error) {
	if v6 {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		_, rest, _ := strings.Cut(string(b), "Udp6NoPorts")
		if err == nil {
			_, err = fmt.Sscan(rest, &n)
		}
		return n, err
	}
	b, err := os.ReadFile("/proc/thread-self/net/snmp")
	lines := strings.Split(string(b), "Udp: ")
	if err == nil && len(lines) < 3 {
		err = errors.New("no line of UDP")
	}
	if err == nil {
		_, err = fmt.Sscan(lines[2], new(int), &n)
	}
	return n, err
}

// TestFragmentsAgreeWithPkt gives damaged first fragments to the program and to
// pkt.Fragment: what pkt would take is taken, and what is taken pkt refuses only for
// what the program does not look at.
func TestFragmentsAgreeWithPkt(t *testing.T) { eachHook(t, testFragmentsAgreeWithPkt) }

func testFragmentsAgreeWithPkt(t *testing.T) {
	s := load(t)
	for _, a := range []netip.Addr{addr4, addr6} {
		mustClaim(t, s, Endpoint{Proto: pkt.ProtoTCP, Addr: a, Port: port})
	}
	ring, err := s.Fragments()
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	seeds := [][]byte{
		testenv.Cut(frame(6, peer4, addr4, 999, port, 0), 32, 1)[0], testenv.Cut(frame(6, peer6, addr6, 999, port, 1), 32, 1)[0],
		withExt(testenv.Cut(frame(6, peer6, addr6, 999, port, 0), 24, 1)[0], 60, 16),
	}
	r := testenv.Rand(t)
	taken := 0
	for i := range 3000 {
		f := bytes.Clone(seeds[i%len(seeds)])
		for range r.IntN(3) {
			f[12+r.IntN(len(f)-12)] = byte(r.Uint32())
		}
		if r.IntN(4) == 0 {
			f = f[:14+r.IntN(len(f)-13)]
		}
		forget(t, s)
		act := run(t, s, f)
		var p pkt.Fragment
		perr := p.Parse(f)
		ours := perr == nil && p.Off == 0 && (p.Dst == addr4.As16() || p.Dst == addr6.As16())
		if ours {
			// The transport may be another one now, or another port.
			h := p.Unfragment(make([]byte, p.Header()), f, p.Len, p.ECN)
			var whole pkt.Packet
			b := append(h, f[p.Data:p.Data+p.Len]...)
			ours = whole.Parse(b, len(b)) == nil && whole.Proto == pkt.ProtoTCP && whole.Flow.LocalPort == port
		}
		switch {
		case ours && act != actDrop:
			t.Fatalf("pkt says ours, verdict %d: %x", act, f)
		case act == actDrop && perr != nil && !errors.Is(perr, pkt.ErrShort) && !errors.Is(perr, pkt.ErrChecksum) && !errors.Is(perr, pkt.ErrHeader):
			t.Fatalf("taken, but pkt says %v: %x", perr, f)
		case act == actDrop:
			taken++
			if b, err := ring.Read(time.Time{}); err != nil || !bytes.Equal(b, f) {
				t.Fatalf("the ring has %x, %v", b, err)
			}
		}
		for { // copies of what could be ours
			if _, err := ring.Read(time.Unix(1, 0)); err != nil {
				break
			}
		}
	}
	if taken < 100 {
		t.Errorf("only %d of 3000 fragments were taken: the test tests little", taken)
	}
}
