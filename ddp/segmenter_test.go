package ddp

import (
	"encoding/hex"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// The examples of RFC 5041 section 5.2 and the segmentation of 65,536 bytes
// that soft-iWARP did in the perftest captures.
func TestSegmenter(t *testing.T) {
	tests := []struct {
		name   string
		start  func(*Segmenter)
		mulpdu int
		count  int
		first  string
		second string
		last   string
		lastN  int
	}{
		{"RFC 5041 5.2, untagged", func(s *Segmenter) { s.StartUntagged(0x43, 0, 0, 1, 2048) }, 1500, 2,
			"014300000000000000000000000100000000", "4143000000000000000000000001000005ca", "4143000000000000000000000001000005ca", 566},
		{"RFC 5041 5.2, tagged", func(s *Segmenter) { s.StartTagged(0x40, 7, 16384, 2048) }, 1500, 2,
			"8140000000070000000000004000", "c1400000000700000000000045ce", "c1400000000700000000000045ce", 562},
		{"siw Write", func(s *Segmenter) { s.StartTagged(0x40, 0x18ada100, 0x7ffa4e7c0000, 65536) }, 1442, 46,
			"814018ada10000007ffa4e7c0000", "814018ada10000007ffa4e7c0594", "c14018ada10000007ffa4e7cfb04", 1276},
		{"siw Read Response", func(s *Segmenter) { s.StartTagged(0x42, 0x39445000, 0x7fd7ff83b000, 65536) }, 1442, 46,
			"8142394450000000" + "7fd7ff83b000", "8142394450000000" + "7fd7ff83b594", "c142394450000000" + "7fd7ff84ab04", 1276},
		{"siw Send", func(s *Segmenter) { s.StartUntagged(0x43, 0, 0, 2, 65536) }, 1442, 47,
			"014300000000000000000000000200000000", "014300000000000000000000000200000590", "41430000000000000000000000020000ffe0", 32},
		{"no bytes, tagged", func(s *Segmenter) { s.StartTagged(0x40, 1, 0, 0) }, 128, 1,
			"c140000000010000000000000000", "", "c140000000010000000000000000", 0},
		{"no bytes, untagged", func(s *Segmenter) { s.StartUntagged(0x44, 0xabcd, 0, 0xffffffff, 0) }, 128, 1,
			"41440000abcd00000000ffffffff00000000", "", "41440000abcd00000000ffffffff00000000", 0},
		{"just one segment", func(s *Segmenter) { s.StartTagged(0x40, 1, 0, 114) }, 128, 1,
			"c140000000010000000000000000", "", "c140000000010000000000000000", 114},
		{"one byte over", func(s *Segmenter) { s.StartTagged(0x40, 1, 0, 115) }, 128, 2,
			"8140000000010000000000000000", "c140000000010000000000000072", "c140000000010000000000000072", 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var s Segmenter
			tt.start(&s)
			var hdrs []string
			var next uint32
			lastN := -1
			for s.Active() {
				hdr, off, n, last := s.Next(nil, tt.mulpdu)
				if off != next || len(hdr)+n > tt.mulpdu {
					t.Fatalf("segment %d: offset %d, length %d; want offset %d, at most %d", len(hdrs), off, len(hdr)+n, next, tt.mulpdu)
				}
				if last == s.Active() {
					t.Fatalf("segment %d: last is %v and Active %v", len(hdrs), last, s.Active())
				}
				next, lastN = off+uint32(n), n
				hdrs = append(hdrs, hex.EncodeToString(hdr))
			}
			if len(hdrs) != tt.count || hdrs[0] != tt.first || hdrs[len(hdrs)-1] != tt.last || lastN != tt.lastN {
				t.Fatalf("%d segments, %s to %s with %d bytes; want %d, %s to %s with %d",
					len(hdrs), hdrs[0], hdrs[len(hdrs)-1], lastN, tt.count, tt.first, tt.last, tt.lastN)
			}
			if tt.second != "" && hdrs[1] != tt.second {
				t.Errorf("second segment %s; want %s", hdrs[1], tt.second)
			}
		})
	}
}

// A message at the limit of 2^32-1 bytes, with a MULPDU that changes.
func TestSegmenterLongest(t *testing.T) {
	var s Segmenter
	s.StartUntagged(0x43, 0, 0, 9, 0xffffffff)
	total, count := uint64(0), 0
	var hdr [UntaggedLen]byte
	for s.Active() {
		mulpdu := 64768
		if count%2 == 1 {
			mulpdu = 9000
		}
		_, off, n, _ := s.Next(hdr[:0], mulpdu)
		if uint64(off) != total {
			t.Fatalf("segment %d at %d; want %d", count, off, total)
		}
		if want := min(uint64(mulpdu-UntaggedLen), 0xffffffff-total); uint64(n) != want {
			t.Fatalf("segment %d has %d bytes with a MULPDU of %d; want %d", count, n, mulpdu, want)
		}
		total += uint64(n)
		count++
	}
	if total != 0xffffffff {
		t.Errorf("%d bytes; want 2^32-1", total)
	}
	var h Untagged
	if _, err := h.Decode(hdr[:]); err != nil || !h.Last || h.MSN != serial.Num(9) {
		t.Errorf("last header %+v, %v", h, err)
	}
}

// TestSegmenterRun compares segments that Advance has made with those of Next.
func TestSegmenterRun(t *testing.T) {
	for _, start := range []func(*Segmenter){
		func(s *Segmenter) { s.StartTagged(0x40, 7, 1<<40-5000, 20000) },
		func(s *Segmenter) { s.StartUntagged(0x43, 9, 0, 3, 20000) },
	} {
		for _, mulpdu := range []int{128, 1442, 20000, 30000} {
			for most := range 16 {
				var s, by Segmenter
				start(&s)
				start(&by)
				hdr, off, n, last := s.Next(nil, mulpdu)
				by.Next(nil, mulpdu)
				k := s.More(n, most)
				s.Skip(k * n)
				for range k {
					Advance(hdr, n)
					var want []byte
					if want, off, _, last = by.Next(nil, mulpdu); string(hdr) != string(want) {
						t.Fatalf("MULPDU %d: header %x; want %x", mulpdu, hdr, want)
					}
				}
				if last != (mulpdu >= 20018) || k < most && s.Active() && s.Left() > uint32(n) || s.off != off+uint32(n) {
					t.Errorf("MULPDU %d: %d more of at most %d, offset %d, last %v", mulpdu, k, most, s.off, last)
				}
			}
		}
	}
}

func TestSegmenterCancel(t *testing.T) {
	var s Segmenter
	s.StartTagged(0x40, 1, 0, 1000)
	s.Next(nil, 128)
	s.Cancel()
	if s.Active() || s.off != 114 {
		t.Errorf("after Cancel: active %v, offset %d; want false, 114", s.Active(), s.off)
	}
}
