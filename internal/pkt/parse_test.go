package pkt

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// A SYN of 10.0.0.1 port 40000 to 10.0.0.2 port 7174, as Linux sends it, and
// the same over IPv6.
const (
	mac4 = `02aa00000002 02aa00000001 0800 `
	mac6 = `02aa00000002 02aa00000001 86dd `
	ip4  = `45020028 1c464000 4006 0a86 0a000001 0a000002 `
	ip6  = `60200000 0014 06 40 fd000000000000000000000000000001 fd000000000000000000000000000002 `
	tcp  = `9c40 1c06 01020304 00000000 5002 faf0 0000 0000 `
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func TestParseGolden(t *testing.T) {
	flow4 := NewFlow(ap("10.0.0.2:7174"), ap("10.0.0.1:40000"))
	flow6 := NewFlow(ap("[fd00::2]:7174"), ap("[fd00::1]:40000"))
	src, dst := [6]byte{2, 0xaa, 0, 0, 0, 1}, [6]byte{2, 0xaa, 0, 0, 0, 2}
	// Pseudo-headers as RFC 9293, Section 3.1 and RFC 8200, Section 8.1 have
	// them.
	sum4 := uint32(slowSum([]byte{10, 0, 0, 1, 10, 0, 0, 2, 0, 6, 0, 20}))
	sum6 := uint32(slowSum(testenv.Unhex(t, `fd000000000000000000000000000001 fd000000000000000000000000000002 00000014 00000006`)))
	for _, tc := range []struct {
		name, frame string
		want        Packet
	}{
		{"IPv4", mac4 + ip4 + tcp,
			Packet{Flow: flow4, Proto: 6, ECN: ECT0, TTL: 64, L3Off: 14, L4Off: 34, L4Len: 20, PseudoSum: sum4}},
		{"Ethernet padding", mac4 + ip4 + tcp + `000000000000`,
			Packet{Flow: flow4, Proto: 6, ECN: ECT0, TTL: 64, L3Off: 14, L4Off: 34, L4Len: 20, PseudoSum: sum4}},
		{"IPv4 options", mac4 + `47000030 1c464000 4006 047d 0a000001 0a000002 0101010101010100 ` + tcp,
			Packet{Flow: flow4, Proto: 6, TTL: 64, L3Off: 14, L4Off: 42, L4Len: 20, PseudoSum: sum4}},
		{"one VLAN tag", `02aa00000002 02aa00000001 8100 6005 0800 ` + ip4 + tcp,
			Packet{Flow: flow4, Proto: 6, ECN: ECT0, TTL: 64, NVLAN: 1, VLANs: [2]uint16{0x6005}, L3Off: 18, L4Off: 38, L4Len: 20, PseudoSum: sum4}},
		{"two VLAN tags", `02aa00000002 02aa00000001 88a8 0007 8100 0008 0800 ` + ip4 + tcp,
			Packet{Flow: flow4, Proto: 6, ECN: ECT0, TTL: 64, NVLAN: 2, VLANs: [2]uint16{7, 8}, L3Off: 22, L4Off: 42, L4Len: 20, PseudoSum: sum4}},
		{"IPv6", mac6 + ip6 + tcp,
			Packet{Flow: flow6, Proto: 6, ECN: ECT0, TTL: 64, V6: true, L3Off: 14, L4Off: 54, L4Len: 20, PseudoSum: sum6}},
		{"IPv6 extension headers", mac6 + `60000000 0034 00 40 fd000000000000000000000000000001 fd000000000000000000000000000002
			3c00010400000000 3300010400000000 06020000 00000001 00000002 00000003 ` + tcp,
			Packet{Flow: flow6, Proto: 6, TTL: 64, V6: true, L3Off: 14, L4Off: 86, L4Len: 20, PseudoSum: sum6}},
		{"IPv6 Routing header, a long one, Mobility, HIP and Shim6", mac6 + `60000000 0044 2b 40 fd000000000000000000000000000001 fd000000000000000000000000000002
			3c00000000000000 8701000000000000 0000000000000000 8b00000000000000 8c00000000000000 0600000000000000 ` + tcp,
			Packet{Flow: flow6, Proto: 6, TTL: 64, V6: true, L3Off: 14, L4Off: 102, L4Len: 20, PseudoSum: sum6}},
		{"SCTP", mac4 + `45000020 00004000 4084 2658 0a000001 0a000002 9c40 1c06 01020304 00000000 `,
			Packet{Flow: flow4, Proto: ProtoSCTP, TTL: 64, L3Off: 14, L4Off: 34, L4Len: 12,
				PseudoSum: uint32(slowSum([]byte{10, 0, 0, 1, 10, 0, 0, 2, 0, 132, 0, 12}))}},
		{"ICMP has no ports", mac4 + `4500001c 00004000 4001 26df 0a000001 0a000002 0800 f7ff 0000 0000 `,
			Packet{Flow: NewFlow(ap("10.0.0.2:0"), ap("10.0.0.1:0")), Proto: ProtoICMP, TTL: 64, L3Off: 14, L4Off: 34, L4Len: 8,
				PseudoSum: uint32(slowSum([]byte{10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 8}))}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := testenv.Unhex(t, tc.frame)
			tc.want.SrcMAC, tc.want.DstMAC = src, dst
			// Remains of an earlier packet must not show.
			got := Packet{NVLAN: 2, VLANs: [2]uint16{1, 2}, V6: true, ECN: 3, PseudoSum: 77}
			if err := got.Parse(b, len(b)); err != nil {
				t.Fatal(err)
			}
			if !same(Fold(got.PseudoSum), Fold(tc.want.PseudoSum)) {
				t.Errorf("pseudo-header sum %#x, want %#x", Fold(got.PseudoSum), Fold(tc.want.PseudoSum))
			}
			got.PseudoSum = tc.want.PseudoSum
			if got != tc.want {
				t.Errorf("\n got %+v\nwant %+v", got, tc.want)
			}
			for n := range len(b) {
				// No prefix shorter than the IP packet is a whole frame, nor
				// are its headers whole.
				var p Packet
				if whole := tc.want.L4Off + tc.want.L4Len; n < whole && p.Parse(b[:n], n) == nil {
					t.Errorf("parsed %d bytes of %d", n, whole)
				}
				if head := tc.want.L4Off + l4min(tc.want.Proto); n < head && p.Parse(b[:n], len(b)) == nil {
					t.Errorf("parsed a head of %d bytes, headers are %d", n, head)
				}
			}
		})
	}
}

func TestParseErrors(t *testing.T) {
	v4, v6 := testenv.Unhex(t, mac4+ip4+tcp), testenv.Unhex(t, mac6+ip6+tcp)
	edit := func(b []byte, off int, v ...byte) []byte {
		b = append([]byte{}, b...)
		copy(b[off:], v)
		return b
	}
	// fix puts the IPv4 header checksum right again.
	fix := func(b []byte) []byte {
		b[24], b[25] = 0, 0
		binary.BigEndian.PutUint16(b[24:], ^slowSum(b[14:34]))
		return b
	}
	ext := func(next byte, hdr ...byte) []byte {
		b := append(append(append([]byte{}, v6[:54]...), hdr...), v6[54:]...)
		b[20] = next
		binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
		return b
	}
	for _, tc := range []struct {
		name  string
		frame []byte
		want  error
	}{
		{"empty", nil, ErrShort},
		{"ARP", edit(v4, 12, 8, 6), ErrNotIP},
		{"three VLAN tags", append(append(v4[:12:12], testenv.Unhex(t, "8100 0001 8100 0002 8100 0003")...), v4[12:]...), ErrNotIP},
		{"version", fix(edit(v4, 14, 0x55)), ErrHeader},
		{"header length below 20", fix(edit(v4, 14, 0x44)), ErrHeader},
		{"header length beyond the packet", fix(edit(v4, 14, 0x4f)), ErrHeader},
		{"total length 0", fix(edit(v4, 16, 0, 0)), ErrHeader},
		{"total length below header", fix(edit(v4, 16, 0, 19)), ErrHeader},
		{"total length beyond frame", fix(edit(v4, 16, 0, 41)), ErrShort},
		{"no room for the TCP header", fix(edit(v4, 16, 0, 39)), ErrShort},
		{"checksum", edit(v4, 24, 1), ErrChecksum},
		{"first fragment", fix(edit(v4, 20, 0x20)), ErrFragment},
		{"last fragment", fix(edit(v4, 20, 0, 1)), ErrFragment},
		{"IPv6 version", edit(v6, 14, 0x50), ErrHeader},
		{"IPv6 length beyond frame", edit(v6, 18, 0, 21), ErrShort},
		{"IPv6, all of a packet in a fragment (RFC 6946)", ext(44, 6, 0, 0, 6, 0, 0, 0, 1), nil},
		{"IPv6 first fragment", ext(44, 6, 0, 0, 1, 0, 0, 0, 1), ErrFragment},
		{"IPv6 last fragment", ext(44, 6, 0, 0, 8, 0, 0, 0, 1), ErrFragment},
		{"IPv6 extension header beyond packet", ext(60, 6, 9, 1, 4, 0, 0, 0, 0), ErrHeader},
		{"IPv6 option to skip", ext(60, 6, 0, 0x1e, 4, 0, 0, 0, 0), nil},
		{"IPv6 option to discard behind padding", ext(60, 6, 0, 0, 1, 0, 0x42, 0, 0), ErrHeader},
		{"IPv6 hop-by-hop option to discard and report", ext(0, 6, 0, 0xc2, 4, 0, 0, 0, 0), ErrHeader},
		{"IPv6 option beyond its header", ext(60, 6, 0, 1, 5, 0, 0, 0, 0), ErrHeader},
		{"IPv6 option without length", ext(60, 6, 0, 1, 3, 0, 0, 0, 1), ErrHeader},
		{"IPv6 segments left", ext(43, 6, 0, 0, 1, 0, 0, 0, 0), ErrHeader},
		{"IPv6 nothing but extension headers", ext(60, testenv.Unhex(t, strings.Repeat("3c00010400000000", 9))...), ErrHeader},
		{"IPv6 from an address of IPv4", edit(v6, 22, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1), ErrHeader},
		{"IPv6 to an address of IPv4", edit(v6, 38, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2), ErrHeader},
		{"IPv6 no next header", edit(v6, 20, 59), nil},
	} {
		var p Packet
		if err := p.Parse(tc.frame, len(tc.frame)); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

func TestPutIsInverseOfParse(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for nvlan := range 3 {
			local, remote := ap("10.0.0.1:40000"), ap("10.0.0.2:7174")
			if v6 {
				local, remote = ap("[fd00::1]:40000"), ap("[fd00::2]:7174")
			}
			tu := Tuple{
				Flow: NewFlow(local, remote), Proto: ProtoTCP, V6: v6, SrcMAC: [6]byte{2, 1}, DstMAC: [6]byte{2, 2},
				NVLAN: nvlan, VLANs: [2]uint16{0x6001, 0x0fff}, DSCP: 46, TTL: 33,
			}
			for i := nvlan; i < 2; i++ {
				tu.VLANs[i] = 0
			}
			const l4len = 1460
			b := make([]byte, tu.HeaderLen()+l4len)
			for i := range b {
				b[i] = 0xee
			}
			tu.Put(b, l4len, CE)
			copy(b[tu.HeaderLen():], []byte{0x9c, 0x40, 0x1c, 0x06})
			var p Packet
			if err := p.Parse(b, len(b)); err != nil {
				t.Fatalf("v6 %v, %d tags: %v", v6, nvlan, err)
			}
			if p.Flow != tu.Flow.Reverse() || p.ECN != CE || p.TTL != 33 || p.L4Off != tu.HeaderLen() || p.L4Len != l4len || p.VLANs != tu.VLANs || p.NVLAN != nvlan {
				t.Errorf("v6 %v, %d tags: %+v", v6, nvlan, p)
			}
			if !same(Fold(p.PseudoSum), Fold(tu.PseudoSum(l4len))) {
				t.Errorf("pseudo-header sums %#x and %#x", Fold(p.PseudoSum), Fold(tu.PseudoSum(l4len)))
			}
			if !v6 && (b[p.L3Off+6] != 0x40 || b[p.L3Off+1] != 46<<2|CE) {
				t.Errorf("flags %#x, TOS %#x", b[p.L3Off+6], b[p.L3Off+1])
			}
			if v6 && binary.BigEndian.Uint32(b[p.L3Off:]) != 6<<28|(46<<2|CE)<<20 {
				t.Errorf("version and traffic class %#x", binary.BigEndian.Uint32(b[p.L3Off:]))
			}
			r := p.Reply()
			r.DSCP, r.TTL = tu.DSCP, tu.TTL
			if want := (Tuple{Flow: tu.Flow.Reverse(), Proto: ProtoTCP, V6: v6, SrcMAC: tu.DstMAC, DstMAC: tu.SrcMAC, VLANs: tu.VLANs, NVLAN: nvlan, DSCP: 46, TTL: 33}); r != want {
				t.Errorf("reply %+v", r)
			}
		}
	}
}

func TestFlowString(t *testing.T) {
	f := NewFlow(ap("10.0.0.1:1"), ap("[fd00::2]:2"))
	if s := f.String(); s != "10.0.0.1:1->[fd00::2]:2" {
		t.Error(s)
	}
	if f.Reverse().Reverse() != f || is4(&f.Remote) || !is4(&f.Local) {
		t.Error("Reverse or is4")
	}
}

func TestAllocatesNothing(t *testing.T) {
	v4, v6 := testenv.Unhex(t, mac4+ip4+tcp), testenv.Unhex(t, mac6+ip6+tcp)
	var p Packet
	var e ICMPError
	b := make([]byte, 100)
	if n := testing.AllocsPerRun(100, func() {
		_ = p.Parse(v6, len(v6))
		_ = p.Parse(v4, len(v4))
		_ = e.Parse(&p, v4)
		tu := p.Reply()
		tu.Put(b, 20, 0)
		sink = tu.PseudoSum(20)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		mac4 + ip4 + tcp, mac6 + ip6 + tcp,
		`02aa00000002 02aa00000001 88a8 0007 8100 0008 0800 ` + ip4 + tcp,
		mac4 + `45000038 00004000 4001 26c1 0a000002 0a000001 0304 0000 0000 05dc ` + ip4 + `9c40 1c06 01020304`,
	} {
		f.Add(testenv.Unhex(f, s), uint16(2000))
	}
	f.Fuzz(func(t *testing.T, b []byte, head uint16) {
		frame := len(b)
		b = b[:min(int(head), len(b))]
		var p Packet
		if err := p.Parse(b, frame); err != nil {
			return
		}
		if p.L4Off < 34 || p.L4Len < 0 || p.L4Off+p.L4Len > frame || p.L4Off+l4min(p.Proto) > len(b) || p.NVLAN > maxVLAN {
			t.Fatalf("%+v of a frame of %d", p, frame)
		}
		// What was parsed can be written and parsed again.
		tu := p.Reply()
		tu.Flow, tu.SrcMAC, tu.DstMAC = tu.Flow.Reverse(), tu.DstMAC, tu.SrcMAC
		if tu.V6 == is4(&tu.Local) || tu.V6 == is4(&tu.Remote) {
			return // a v4-mapped address on the wire is legal, if odd
		}
		out := make([]byte, tu.HeaderLen()+p.L4Len)
		tu.Put(out, p.L4Len, p.ECN)
		copy(out[tu.HeaderLen():], b[p.L4Off:min(len(b), p.L4Off+p.L4Len)])
		var q Packet
		if err := q.Parse(out, len(out)); err != nil || q.Flow != p.Flow || q.Proto != p.Proto || q.L4Len != p.L4Len || q.ECN != p.ECN {
			t.Fatalf("%v: %+v, then %+v", err, p, q)
		}
		var e ICMPError
		_ = e.Parse(&p, b)
	})
}

func BenchmarkParse(b *testing.B) {
	f := testenv.Unhex(b, mac4+ip4+tcp)
	var p Packet
	b.ReportAllocs()
	for range b.N {
		if err := p.Parse(f, len(f)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPut(b *testing.B) {
	f := testenv.Unhex(b, mac4+ip4+tcp)
	var p Packet
	if err := p.Parse(f, len(f)); err != nil {
		b.Fatal(err)
	}
	tu := p.Reply()
	b.ReportAllocs()
	for range b.N {
		tu.Put(f, 20, 0)
	}
}
