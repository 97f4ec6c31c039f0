package pkt_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// packet makes a frame with 100 bytes of TCP header and payload.
func packet(v6 bool) []byte {
	const n = 100
	local, remote := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.0.0.2:7174")
	if v6 {
		local, remote = netip.MustParseAddrPort("[fd00::1]:40000"), netip.MustParseAddrPort("[fd00::2]:7174")
	}
	tu := pkt.Tuple{Flow: pkt.NewFlow(local, remote), Proto: pkt.ProtoTCP, V6: v6, SrcMAC: [6]byte{2, 1}, DstMAC: [6]byte{2, 2}, VLANs: [2]uint16{5}, NVLAN: 1}
	b := make([]byte, tu.HeaderLen()+n)
	tu.Put(b, n, pkt.ECT0)
	for i := range b[tu.HeaderLen():] {
		b[tu.HeaderLen()+i] = byte(i)
	}
	return b
}

func TestFragmentParse(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		whole := packet(v6)
		for i, b := range testenv.Cut(whole, 48, 0x1234) {
			var f pkt.Fragment
			if err := f.Parse(b); err != nil {
				t.Fatalf("v6 %v, fragment %d: %v", v6, i, err)
			}
			src, dst := netip.AddrFrom16(f.Src).Unmap(), netip.AddrFrom16(f.Dst).Unmap()
			if v6 && (src.String() != "fd00::1" || dst.String() != "fd00::2") || !v6 && (src.String() != "10.0.0.1" || dst.String() != "10.0.0.2") {
				t.Errorf("%v to %v", src, dst)
			}
			if f.V6 != v6 || f.ID != 0x1234 || f.Proto != pkt.ProtoTCP || f.ECN != pkt.ECT0 || f.More != (i < 2) || f.Off != 48*i || f.Len != min(48, 100-48*i) || f.L3Off != 18 {
				t.Errorf("v6 %v, fragment %d: %+v", v6, i, f)
			}
			if !bytes.Equal(b[f.Data:f.Data+f.Len], whole[len(whole)-100+f.Off:][:f.Len]) {
				t.Errorf("v6 %v, fragment %d: payload at %d", v6, i, f.Data)
			}
			if i == 0 {
				h := f.Unfragment(make([]byte, f.Header()), b, 100, pkt.ECT0)
				if want := whole[:len(whole)-100]; !bytes.Equal(mask(h, v6), mask(want, v6)) {
					t.Errorf("v6 %v: headers of the packet\n%x, were\n%x", v6, h, want)
				}
				var p pkt.Packet
				if err := p.Parse(append(h, whole[len(whole)-100:]...), len(whole)); err != nil || p.L4Len != 100 || p.ECN != pkt.ECT0 {
					t.Errorf("v6 %v: %v, %+v", v6, err, p)
				}
				h = f.Unfragment(h, b, 100, pkt.CE)
				if err := p.Parse(append(h, whole[len(whole)-100:]...), len(whole)); err != nil || p.ECN != pkt.CE {
					t.Errorf("v6 %v, CE: %v, %+v", v6, err, p)
				}
			}
			for n := range len(b) {
				if f.Parse(b[:n]) == nil {
					t.Errorf("v6 %v: parsed %d bytes of %d", v6, n, len(b))
				}
			}
		}
		var f pkt.Fragment
		if err := f.Parse(whole); !errors.Is(err, pkt.ErrWhole) {
			t.Errorf("v6 %v, whole: %v", v6, err)
		}
	}
}

// withExt inserts extension headers behind the IPv6 header of a frame of packet. Each begins with its own type, in place of the
// next one's.
func withExt(b []byte, hdrs ...[]byte) []byte {
	const l3 = 18
	b = bytes.Clone(b)
	next, at := &b[l3+6], []byte{}
	for _, h := range hdrs {
		h = bytes.Clone(h)
		*next, h[0] = h[0], *next
		at = append(at, h...)
		next = &at[len(at)-len(h)]
	}
	binary.BigEndian.PutUint16(b[l3+4:], binary.BigEndian.Uint16(b[l3+4:])+uint16(len(at)))
	return append(append(b[:l3+40:l3+40], at...), b[l3+40:]...)
}

// TestFragmentExtensions checks headers between that of IPv6 and the Fragment header.
func TestFragmentExtensions(t *testing.T) {
	whole := packet(true)
	c := testenv.Cut(whole, 48, 1)
	hop, dst, routing := []byte{0, 0, 1, 4, 0, 0, 0, 0}, append([]byte{60, 1}, make([]byte, 14)...), []byte{43, 0, 0, 0, 0, 0, 0, 0}
	many := func(n int) (hdrs [][]byte) {
		for range n {
			hdrs = append(hdrs, dst)
		}
		return hdrs
	}
	for _, tc := range []struct {
		name string
		hdrs [][]byte
		want error
	}{
		{"Hop-by-Hop", [][]byte{hop}, nil},
		{"Destination Options", [][]byte{dst}, nil},
		{"Routing", [][]byte{routing}, nil},
		{"all three", [][]byte{hop, dst, routing}, nil},
		{"as many as may be", many(8), nil},
		{"one more", many(9), pkt.ErrWhole},
		{"segments left", [][]byte{{43, 0, 0, 1, 0, 0, 0, 0}}, pkt.ErrHeader},
		{"segments left, in front of others", [][]byte{{43, 0, 0, 1, 0, 0, 0, 0}, dst}, pkt.ErrHeader},
		{"beyond the packet", [][]byte{{60, 9, 0, 0, 0, 0, 0, 0}}, pkt.ErrHeader},
		{"beyond the packet, in front of others", [][]byte{{60, 99, 0, 0, 0, 0, 0, 0}, dst}, pkt.ErrHeader},
		{"up to its end", [][]byte{{60, 6, 0, 0, 0, 0, 0, 0}}, pkt.ErrHeader},
		{"Mobility, which only the destination looks at", [][]byte{{135, 0, 0, 0, 0, 0, 0, 0}}, pkt.ErrWhole},
	} {
		for i := range c {
			b := withExt(c[i], tc.hdrs...)
			var f pkt.Fragment
			switch err := f.Parse(b); {
			case !errors.Is(err, tc.want):
				t.Errorf("%s, fragment %d: %v, want %v", tc.name, i, err, tc.want)
			case err == nil:
				ext := len(b) - len(c[i])
				if f.Off != 48*i || f.Len != len(c[i])-18-48 || f.Data != 18+48+ext || f.ID != 1 || f.More != (i < 2) {
					t.Errorf("%s, fragment %d: %+v", tc.name, i, f)
				}
				if got := f.Unfragment(make([]byte, f.Header()), b, 100, pkt.ECT0); i == 0 && !bytes.Equal(append(got, whole[58:]...), withExt(whole, tc.hdrs...)) {
					t.Errorf("%s: the packet has the headers %x", tc.name, got)
				}
			}
			for n := range b {
				if f.Parse(b[:n:n]) == nil {
					t.Errorf("%s: parsed %d bytes of %d", tc.name, n, len(b))
				}
			}
		}
	}
	// The packet's length includes these headers.
	for _, n := range []int{1, 2} {
		b := withExt(c[1], many(n)...) // of 16 bytes each
		binary.BigEndian.PutUint16(b[18+40+16*n+2:], 65535-48-31&^7|1)
		var f pkt.Fragment
		if err := f.Parse(b); (err == nil) != (n == 1) {
			t.Errorf("%d bytes of headers: up to %d, %v", 16*n, f.Off+f.Len+16*n, err)
		}
	}
}

// mask clears what a packet of IPv4 does not get back: its identification stays,
// DF goes, and with it the checksum changes.
func mask(b []byte, v6 bool) []byte {
	b = bytes.Clone(b)
	if !v6 {
		clear(b[18+4 : 18+8])
		clear(b[18+10 : 18+12])
	}
	return b
}

func TestFragmentRefuses(t *testing.T) {
	v4, v6 := testenv.Cut(packet(false), 48, 1), testenv.Cut(packet(true), 48, 1)
	edit := func(b []byte, off int, v ...byte) []byte {
		b = bytes.Clone(b)
		copy(b[18+off:], v)
		if b[18]>>4 == 4 && off != 10 {
			testenv.FixIPv4(b[18 : 18+int(b[18]&15)*4])
		}
		return b
	}
	length := func(b []byte, n int) []byte {
		b = bytes.Clone(b)
		if b[18]>>4 == 6 {
			binary.BigEndian.PutUint16(b[22:], uint16(n))
			return b
		}
		return edit(b, 2, byte(n>>8), byte(n))
	}
	for _, tc := range []struct {
		name  string
		frame []byte
		want  error
	}{
		{"empty", nil, pkt.ErrShort},
		{"ARP", edit(v4[0], -2, 8, 6), pkt.ErrNotIP},
		{"IPv4 checksum", edit(v4[0], 10, 1), pkt.ErrChecksum},
		{"IPv4 header length", edit(v4[0], 0, 0x44), pkt.ErrHeader},
		{"IPv4 length below the header", length(v4[0], 19), pkt.ErrHeader},
		{"IPv4 no bytes", length(v4[2], 20), pkt.ErrHeader},
		{"IPv4 beyond the frame", length(v4[0], 69), pkt.ErrShort},
		{"IPv4 not a multiple of eight", length(v4[0], 67), pkt.ErrHeader},
		{"IPv4 beyond 65535", edit(v4[2], 6, 0x1f, 0xff), pkt.ErrHeader},
		{"IPv4 from a group", edit(v4[0], 12, 224), pkt.ErrHeader},
		{"IPv4 from nobody", edit(v4[0], 12, 0), pkt.ErrHeader},
		{"IPv4 from ourselves", edit(v4[0], 12, 127), pkt.ErrHeader},
		{"IPv6 no bytes", length(v6[2], 8), pkt.ErrHeader},
		{"IPv6 cut in the Fragment header", length(v6[2], 7), pkt.ErrHeader},
		{"IPv6 beyond the frame", length(v6[0], 57), pkt.ErrShort},
		{"IPv6 not a multiple of eight", length(v6[0], 55), pkt.ErrHeader},
		{"IPv6 beyond 65535", edit(v6[1], 42, 0xff, 0xf9), pkt.ErrHeader},
		{"IPv6 from a group", edit(v6[0], 8, 0xff), pkt.ErrHeader},
		{"IPv6 from nobody", edit(v6[0], 8, make([]byte, 16)...), pkt.ErrHeader},
		{"IPv6 from ourselves", edit(v6[0], 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1), pkt.ErrHeader},
		{"IPv6 from an address of IPv4", edit(v6[0], 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1), pkt.ErrHeader},
		{"IPv6 headers in the second", testenv.Cut(packet(true), 16, 1)[0], pkt.ErrHeader},
		{"IPv6 two Fragment headers", edit(v6[0], 40, 44), pkt.ErrHeader},
		{"IPv6 all of a packet", edit(v6[0], 42, 0, 0), pkt.ErrWhole},
	} {
		var f pkt.Fragment
		if err := f.Parse(tc.frame); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

func FuzzFragment(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		for _, b := range testenv.Cut(packet(v6), 48, 1) {
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var fr pkt.Fragment
		if fr.Parse(b) != nil {
			return
		}
		if fr.Len < 1 || fr.Off < 0 || fr.Off+fr.Len > 1<<16-1 || fr.Data+fr.Len > len(b) || fr.Header() > fr.Data || fr.More && fr.Len%8 != 0 {
			t.Fatalf("%+v of %d bytes", fr, len(b))
		}
		if fr.Off == 0 {
			fr.Unfragment(make([]byte, fr.Header()), b, fr.Len, pkt.CE)
		}
	})
}
