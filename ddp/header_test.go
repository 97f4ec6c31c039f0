package ddp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// Headers of soft-iWARP are from captures of Linux 6.1: rping and perftest.
func TestTagged(t *testing.T) {
	tests := []struct {
		name string
		wire string
		want Tagged
	}{
		{"RFC 5041 section 4.2 figure", "c1430102030405060708090a0b0c", Tagged{true, 0x43, 0x01020304, 0x05060708090a0b0c}},
		{"siw Write, last", "c1409a4e5201e2ad592f47fd6000", Tagged{true, 0x40, 0x9a4e5201, 0xe2ad592f47fd6000}},
		{"siw Read Response, not last", "814259e47801ff3e4bc6f747f000", Tagged{false, 0x42, 0x59e47801, 0xff3e4bc6f747f000}},
		{"siw zero-length Write as RTR", "c140000000010000000000000000", Tagged{true, 0x40, 1, 0}},
		{"perftest Write, first", "814018ada10000007ffa4e7c0000", Tagged{false, 0x40, 0x18ada100, 0x7ffa4e7c0000}},
		{"perftest Write, last", "c14018ada10000007ffa4e7cfb04", Tagged{true, 0x40, 0x18ada100, 0x7ffa4e7cfb04}},
		{"all ones", "c1ffffffffffffffffffffffffff", Tagged{true, 0xff, 0xffffffff, 0xffffffffffffffff}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wire := testenv.Unhex(t, tt.wire)
			var got Tagged
			payload, err := got.Decode(append(wire, 0xaa, 0xbb))
			if err != nil || got != tt.want || !bytes.Equal(payload, []byte{0xaa, 0xbb}) {
				t.Fatalf("Decode = %+v, payload %x, %v; want %+v, aabb", got, payload, err, tt.want)
			}
			if b := got.Append(nil); !bytes.Equal(b, wire) {
				t.Errorf("Append = %x; want %x", b, wire)
			}
			if !IsTagged(wire) || HeaderLen(wire) != TaggedLen {
				t.Error("not seen as tagged")
			}
			for n := range wire {
				if _, err := got.Decode(wire[:n]); !errors.Is(err, ErrShort) {
					t.Errorf("Decode of %d bytes: %v; want ErrShort", n, err)
				}
			}
			reserved := bytes.Clone(wire)
			reserved[0] |= 0x3c
			if _, err := got.Decode(reserved); err != nil || got != tt.want {
				t.Errorf("reserved bits: %+v, %v; want them ignored", got, err)
			}
			for _, v := range []byte{0, 2, 3} {
				bad := bytes.Clone(wire)
				bad[0] = bad[0]&^ctrlVersion | v
				if _, err := got.Decode(bad); !errors.Is(err, term.ErrTaggedVersion) || got != tt.want {
					t.Errorf("version %d: %v, header now %+v; want %v", v, err, got, term.ErrTaggedVersion)
				}
			}
		})
	}
}

func TestUntagged(t *testing.T) {
	tests := []struct {
		name string
		wire string
		want Untagged
	}{
		{"RFC 5041 section 4.3 figure", "41430102030405060708090a0b0c0d0e0f10", Untagged{true, 0x43, 0x01020304, 0x05060708, 0x090a0b0c, 0x0d0e0f10}},
		{"siw Send, last", "414300000000000000000000000600000000", Untagged{Last: true, ULP: 0x43, MSN: 6}},
		{"siw Read Request", "414100000000000000010000000300000000", Untagged{Last: true, ULP: 0x41, QN: 1, MSN: 3}},
		{"perftest Send, second segment", "014300000000000000000000000100000590", Untagged{ULP: 0x43, MSN: 1, MO: 0x590}},
		{"perftest Send, last", "41430000000000000000000000020000ffe0", Untagged{Last: true, ULP: 0x43, MSN: 2, MO: 0xffe0}},
		{"siw Send with Invalidate of nfsd, last", "4144e09ec801000000000000001100000000", Untagged{true, 0x44, 0xe09ec801, 0x0, 0x11, 0x0}},
		{"last MSN", "0144aabbccdd00000000ffffffff00000000", Untagged{ULP: 0x44, Inv: 0xaabbccdd, MSN: 0xffffffff}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wire := testenv.Unhex(t, tt.wire)
			var got Untagged
			payload, err := got.Decode(append(wire, 0xaa, 0xbb))
			if err != nil || got != tt.want || !bytes.Equal(payload, []byte{0xaa, 0xbb}) {
				t.Fatalf("Decode = %+v, payload %x, %v; want %+v, aabb", got, payload, err, tt.want)
			}
			if b := got.Append(nil); !bytes.Equal(b, wire) {
				t.Errorf("Append = %x; want %x", b, wire)
			}
			if IsTagged(wire) || HeaderLen(wire) != UntaggedLen {
				t.Error("seen as tagged")
			}
			for n := range wire {
				if _, err := got.Decode(wire[:n]); !errors.Is(err, ErrShort) {
					t.Errorf("Decode of %d bytes: %v; want ErrShort", n, err)
				}
			}
			for _, v := range []byte{0, 2, 3} {
				bad := bytes.Clone(wire)
				bad[0] = bad[0]&^ctrlVersion | v
				if _, err := got.Decode(bad); !errors.Is(err, term.ErrUntaggedVersion) || got != tt.want {
					t.Errorf("version %d: %v, header now %+v; want %v", v, err, got, term.ErrUntaggedVersion)
				}
			}
		})
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add(testenv.Unhex(f, "c1409a4e5201e2ad592f47fd6000"))
	f.Add(testenv.Unhex(f, "41410000000000000001000000030000000059e47801"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if HeaderLen(b) > len(b) {
			var h Untagged
			if _, err := h.Decode(b); !IsTagged(b) && !errors.Is(err, ErrShort) {
				t.Fatalf("short segment: %v", err)
			}
			return
		}
		var again []byte
		if IsTagged(b) {
			var h Tagged
			payload, err := h.Decode(b)
			if err != nil {
				return
			}
			again = append(h.Append(nil), payload...)
		} else {
			var h Untagged
			payload, err := h.Decode(b)
			if err != nil {
				return
			}
			again = append(h.Append(nil), payload...)
		}
		b = bytes.Clone(b)
		b[0] &^= 0x3c // reserved: ignored, sent as zero
		if !bytes.Equal(again, b) {
			t.Fatalf("encoded again:\n%x; want\n%x", again, b)
		}
	})
}
