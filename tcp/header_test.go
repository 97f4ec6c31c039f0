package tcp

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestHeaderGolden compares headers with those that the kernel's TCP writes.
func TestHeaderGolden(t *testing.T) {
	for _, tc := range []struct {
		name string
		hex  string
		h    Header
	}{
		{"SYN", "a12c 1c06 12345678 00000000 a0 02 faf0 0000 0000 020405b4 0402080a 01020304 00000000 01030307", Header{
			SrcPort: 0xa12c, DstPort: 7174, Seq: 0x12345678, Flags: SYN, Window: 0xfaf0,
			Opts: Options{MSS: 1460, SACKPermitted: true, HasTimestamps: true, TSVal: 0x01020304, HasWScale: true, WScale: 7}}},
		{"SYN without timestamps", "a12c 1c06 12345678 00000000 80 c2 faf0 0000 0000 020405b4 01010402 01030307", Header{
			SrcPort: 0xa12c, DstPort: 7174, Seq: 0x12345678, Flags: SYN | ECE | CWR, Window: 0xfaf0,
			Opts: Options{MSS: 1460, SACKPermitted: true, HasWScale: true, WScale: 7}}},
		{"data", "1c06 a12c fffffffe 12345679 80 18 01f6 0000 0000 0101080a 0a0b0c0d 01020304", Header{
			SrcPort: 7174, DstPort: 0xa12c, Seq: 0xfffffffe, Ack: 0x12345679, Flags: PSH | ACK, Window: 0x1f6,
			Opts: Options{HasTimestamps: true, TSVal: 0x0a0b0c0d, TSEcr: 0x01020304}}},
		{"SACK", "1c06 a12c 00000001 12345679 b0 10 01f6 0000 0000 0101080a 0a0b0c0d 01020304 0101050a 00000010 00000020", Header{
			SrcPort: 7174, DstPort: 0xa12c, Seq: 1, Ack: 0x12345679, Flags: ACK, Window: 0x1f6,
			Opts: Options{HasTimestamps: true, TSVal: 0x0a0b0c0d, TSEcr: 0x01020304, NSACK: 1, SACK: [4]SACKBlock{{0x10, 0x20}}}}},
		{"RST", "1c06 a12c 00000001 00000000 50 04 0000 0000 0000", Header{SrcPort: 7174, DstPort: 0xa12c, Seq: 1, Flags: RST}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			want := testenv.Unhex(t, tc.hex)
			got := make([]byte, tc.h.Len())
			if n := tc.h.Put(got); n != len(want) || !bytes.Equal(got, want) {
				t.Errorf("Put:\n got %x\nwant %x", got, want)
			}
			var h Header
			if n, err := h.Decode(append(want, 1, 2, 3)); err != nil || n != len(want) || h != tc.h {
				t.Errorf("Decode: %d %v\n got %+v\nwant %+v", n, err, h, tc.h)
			}
		})
	}
}

// TestHeaderErrors checks every length that is too short (RFC 9293 3.1).
func TestHeaderErrors(t *testing.T) {
	b := testenv.Unhex(t, "a12c 1c06 12345678 00000000 a0 02 faf0 0000 0000 020405b4 0402080a 01020304 00000000 01030307")
	var h Header
	for n := range b {
		if _, err := h.Decode(b[:n]); err != ErrShortHeader {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	for off := range 5 {
		b[12] = byte(off) << 4
		if _, err := h.Decode(b); err != ErrDataOffset {
			t.Errorf("data offset %d: %v", off, err)
		}
	}
}

// TestOptionGarbage checks that malformed and unknown options do not affect others (RFC 9293 MUST-6, MUST-7).
func TestOptionGarbage(t *testing.T) {
	for _, tc := range []struct {
		name, hex string
		want      Options
	}{
		{"MUST-6 an unknown option is skipped", "fe04abcd 020405b4", Options{MSS: 1460}},
		{"MUST-6 an unknown option without data", "fe02 020405b4 01 01", Options{MSS: 1460}},
		{"MUST-7 length 0", "020405b4 0800 0101", Options{MSS: 1460, Malformed: true}},
		{"MUST-7 length 1", "020405b4 0801 0101", Options{MSS: 1460, Malformed: true}},
		{"MUST-7 length beyond the header", "020405b4 01 01 08 0a", Options{MSS: 1460, Malformed: true}},
		{"MUST-7 kind without length", "020405b4 010101 08", Options{MSS: 1460, Malformed: true}},
		{"9293 3.1 nothing after the end of the list", "00 020405b4 010101", Options{}},
		{"MSS of a wrong length", "0203 05 02 06 05b40000 0204 0100 01", Options{MSS: 256}},
		{"window scale of a wrong length", "0304 0707 01010101", Options{}},
		{"7323 2.3 a shift above 14", "03030f 01", Options{HasWScale: true, WScale: 14}},
		{"SACK permitted of a wrong length", "040300 01", Options{}},
		{"timestamps of a wrong length", "0809 01020304050607 010101", Options{}},
		{"SACK of half a block", "050600000001 0101", Options{}},
		{"SACK without a block", "0502 0101", Options{}},
		{"2018 3 four blocks", "0101 0522 0000000100000002 0000000300000004 0000000500000006 0000000700000008",
			Options{NSACK: 4, SACK: [4]SACKBlock{{1, 2}, {3, 4}, {5, 6}, {7, 8}}}},
		{"MUST-64 no option is aligned", "01 0204 05b4 080a 00000001 00000002 01 030307 0402 050a 00000003 00000004",
			Options{MSS: 1460, HasTimestamps: true, TSVal: 1, TSEcr: 2, HasWScale: true, WScale: 7, SACKPermitted: true, NSACK: 1, SACK: [4]SACKBlock{{3, 4}}}},
		{"the last of two MSS options counts", "020405b4 02040100", Options{MSS: 256}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			opts := testenv.Unhex(t, tc.hex)
			for len(opts)%4 != 0 {
				opts = append(opts, 0)
			}
			b := append(make([]byte, headerLen), opts...)
			b[12] = byte(len(b)/4) << 4
			var h Header
			if n, err := h.Decode(b); err != nil || n != len(b) {
				t.Fatal(n, err)
			}
			if h.Opts != tc.want {
				t.Errorf("got %+v", h.Opts)
			}
		})
	}
}

// FuzzHeader checks that the decoder takes any bytes without a panic and that its result survives Put and Decode.
func FuzzHeader(f *testing.F) {
	f.Add(testenv.Unhex(f, "a12c1c061234567800000000a002faf000000000020405b40402080a010203040000000001030307"))
	f.Add(testenv.Unhex(f, "1c06a12c0000000112345679b01001f6000000000101080a0a0b0c0d010203040101050a0000001000000020"))
	f.Add(testenv.Unhex(f, "1c06a12c00000001123456796010000000000000fe00feff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h Header
		n, err := h.Decode(b)
		if err != nil {
			return
		}
		if n < headerLen || n > len(b) || n > MaxHeaderLen {
			t.Fatalf("length %d of %d", n, len(b))
		}
		var out [MaxHeaderLen]byte
		m := h.Put(out[:])
		if m != h.Len() {
			t.Fatalf("Put wrote %d, Len is %d", m, h.Len())
		}
		var g Header
		if k, err := g.Decode(out[:m]); err != nil || k != m {
			t.Fatalf("own header: %d %v", k, err)
		}
		// Put may have dropped SACK blocks for lack of room.
		h.Opts.Malformed = false
		clear(h.Opts.SACK[g.Opts.NSACK:])
		h.Opts.NSACK = g.Opts.NSACK
		if g != h {
			t.Fatalf("got %+v\nwant %+v", g, h)
		}
	})
}

// TestReset checks RFC 9293 3.10.7.1.
func TestReset(t *testing.T) {
	if _, ok := Reset(&Header{Flags: RST | ACK}, 0); ok {
		t.Error("a RST for a RST")
	}
	r, ok := Reset(&Header{SrcPort: 1, DstPort: 2, Seq: 10, Ack: 77, Flags: ACK}, 5)
	if want := (Header{SrcPort: 2, DstPort: 1, Seq: 77, Flags: RST}); !ok || r != want {
		t.Errorf("got %+v", r)
	}
	r, ok = Reset(&Header{SrcPort: 1, DstPort: 2, Seq: 0xffffffff, Flags: SYN | FIN}, 5)
	if want := (Header{SrcPort: 2, DstPort: 1, Ack: 6, Flags: RST | ACK}); !ok || r != want {
		t.Errorf("got %+v", r)
	}
}

// TestISS checks RFC 6528 and RFC 9293 MUST-8: the number depends on the flow and the secret and increases by one
// every 4 microseconds.
func TestISS(t *testing.T) {
	s, f := [16]byte{1}, simFlow(0, false)
	a := ISS(s, f, simStart)
	if b := ISS(s, f, simStart.Add(4000)); b != a+1 {
		t.Errorf("after 4 microseconds: %d, not %d", b, a+1)
	}
	g := f
	g.LocalPort++
	for _, tc := range []struct {
		s [16]byte
		f pkt.Flow
	}{{[16]byte{2}, f}, {s, g}, {s, simFlow(1, false)}, {s, simFlow(0, true)}} {
		if ISS(tc.s, tc.f, simStart) == a {
			t.Errorf("same number for %v", tc.f)
		}
	}
}
