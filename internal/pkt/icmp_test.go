package pkt

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// icmpFrame makes a frame to 10.0.0.1 or fd00::1 from a router with an ICMP
// message, checksum and all.
func icmpFrame(t testing.TB, v6 bool, msg []byte) []byte {
	t.Helper()
	tu := Tuple{Flow: NewFlow(ap("10.0.0.9:0"), ap("10.0.0.1:0")), Proto: ProtoICMP}
	if v6 {
		tu = Tuple{Flow: NewFlow(ap("[fd00::9]:0"), ap("[fd00::1]:0")), Proto: ProtoICMPv6, V6: true}
	}
	b := make([]byte, tu.HeaderLen()+len(msg))
	tu.Put(b, len(msg), 0)
	l4 := b[tu.HeaderLen():]
	copy(l4, msg)
	l4[2], l4[3] = 0, 0
	sum := uint32(0)
	if v6 {
		sum = tu.PseudoSum(len(msg))
	}
	binary.BigEndian.PutUint16(l4[2:], Checksum(Sum(l4, sum)))
	return b
}

func TestICMPErrorGolden(t *testing.T) {
	flow4 := NewFlow(ap("10.0.0.1:40000"), ap("10.0.0.2:7174"))
	flow6 := NewFlow(ap("[fd00::1]:40000"), ap("[fd00::2]:7174"))
	const first8 = `9c40 1c06 01020304`
	for _, tc := range []struct {
		name string
		v6   bool
		msg  string
		want ICMPError
	}{
		{"fragmentation needed (RFC 1191)", false, `0304 0000 0000 05dc ` + ip4 + first8,
			ICMPError{Flow: flow4, Proto: 6, Kind: TooBig, Code: 4, MTU: 1500, Seq: 0x01020304}},
		{"fragmentation needed, old router", false, `0304 0000 0000 0000 ` + ip4 + first8,
			ICMPError{Flow: flow4, Proto: 6, Kind: TooBig, Code: 4, Seq: 0x01020304}},
		{"port unreachable, options inside", false, `0303 0000 0000 0000 47000030 1c464000 4006 0000 0a000001 0a000002 0101010101010100 ` + first8,
			ICMPError{Flow: flow4, Proto: 6, Kind: Unreachable, Code: 3, Seq: 0x01020304}},
		{"time exceeded, SCTP", false, `0b00 0000 0000 0000 45000020 00004000 0184 0000 0a000001 0a000002 ` + first8,
			ICMPError{Flow: flow4, Proto: ProtoSCTP, Kind: TimeExceeded, Seq: 0x01020304}},
		{"protocol unreachable, SCTP INIT", false, `0302 0000 0000 0000 45000020 00004000 4084 0000 0a000001 0a000002 9c40 1c06 00000000 11111111 01000014 0a0b0c0d`,
			ICMPError{Flow: flow4, Proto: ProtoSCTP, Kind: Unreachable, Code: 2, InitTag: 0x0a0b0c0d}},
		{"parameter problem, UDP", false, `0c00 0000 0000 0000 45000020 00004000 4011 0000 0a000001 0a000002 9c40 1c06 01020304`,
			ICMPError{Flow: flow4, Proto: ProtoUDP, Kind: ParameterProblem}},
		{"IPv6 too big", true, `0200 0000 00000500 ` + ip6 + first8,
			ICMPError{Flow: flow6, Proto: 6, Kind: TooBig, MTU: 1280, Seq: 0x01020304}},
		{"IPv6 too big, absurd MTU", true, `0200 0000 ffffffff ` + ip6 + first8,
			ICMPError{Flow: flow6, Proto: 6, Kind: TooBig, MTU: 1 << 16, Seq: 0x01020304}},
		{"IPv6 no route, extension header inside", true, `0100 0000 00000000 60000000 001c 3c 40
			fd000000000000000000000000000001 fd000000000000000000000000000002 0600010400000000 ` + first8,
			ICMPError{Flow: flow6, Proto: 6, Kind: Unreachable, Seq: 0x01020304}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			msg := testenv.Unhex(t, tc.msg)
			b := icmpFrame(t, tc.v6, msg)
			var p Packet
			if err := p.Parse(b, len(b)); err != nil {
				t.Fatal(err)
			}
			got := ICMPError{MTU: 9, InitTag: 9}
			if err := got.Parse(&p, b); err != nil {
				t.Fatal(err)
			}
			if got != tc.want {
				t.Errorf("\n got %+v\nwant %+v", got, tc.want)
			}
			if err := got.Parse(&p, b[:len(b)-1]); !errors.Is(err, ErrShort) {
				t.Errorf("cut head: %v", err)
			}
			b[len(b)-1] ^= 1
			if err := got.Parse(&p, b); !errors.Is(err, ErrChecksum) {
				t.Errorf("one bit flipped: %v", err)
			}
			for n := 8; n < len(msg); n++ {
				b := icmpFrame(t, tc.v6, msg[:n])
				if p.Parse(b, len(b)) != nil {
					t.Fatal("a shorter ICMP message must parse as a packet")
				}
				if err := got.Parse(&p, b); err == nil && tc.want.InitTag == 0 {
					t.Errorf("parsed an error of %d bytes of %d", n, len(msg))
				}
			}
		})
	}
}

func TestICMPErrorRefuses(t *testing.T) {
	const first8 = `9c40 1c06 01020304`
	for _, tc := range []struct {
		name string
		v6   bool
		msg  string
		want error
	}{
		{"echo", false, `0800 0000 0000 0000 ` + ip4 + first8, ErrNotError},
		{"redirect", false, `0500 0000 0000 0000 ` + ip4 + first8, ErrNotError},
		{"neighbour solicitation", true, `8700 0000 0000 0000 ` + ip6 + first8, ErrNotError},
		{"about ICMP", false, `0303 0000 0000 0000 45000020 00004000 4001 0000 0a000001 0a000002 ` + first8, ErrNotError},
		{"later fragment", false, `0303 0000 0000 0000 45000020 00000001 4006 0000 0a000001 0a000002 ` + first8, ErrFragment},
		{"version", false, `0303 0000 0000 0000 65000020 00000000 4006 0000 0a000001 0a000002 ` + first8, ErrHeader},
		{"header length", false, `0303 0000 0000 0000 41000020 00000000 4006 0000 0a000001 0a000002 ` + first8, ErrHeader},
		{"IPv4 addresses in IPv6", true, `0100 0000 0000 0000 60000000 0014 06 40
			00000000000000000000ffff0a000001 00000000000000000000ffff0a000002 ` + first8, ErrHeader},
		{"IPv6 version", true, `0100 0000 0000 0000 4` + ip6[1:] + first8, ErrHeader},
	} {
		b := icmpFrame(t, tc.v6, testenv.Unhex(t, tc.msg))
		var p Packet
		if err := p.Parse(b, len(b)); err != nil {
			t.Fatal(err)
		}
		var e ICMPError
		if err := e.Parse(&p, b); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
	// Not ICMP at all.
	b := testenv.Unhex(t, mac4+ip4+tcp)
	var p Packet
	if err := p.Parse(b, len(b)); err != nil {
		t.Fatal(err)
	}
	var e ICMPError
	if err := e.Parse(&p, b); !errors.Is(err, ErrNotError) {
		t.Error(err)
	}
}
