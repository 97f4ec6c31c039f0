package rdmap

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// withMarkers returns p with a marker before the byte at offset first, at least 1, and before each 508th byte after
// it.
func withMarkers(p []byte, first int) marked.Bytes {
	if first >= len(p) {
		return marked.Bytes{B: p}
	}
	b := bytes.Clone(p[:first])
	for rest := p[first:]; len(rest) > 0; {
		n := min(508, len(rest))
		b = append(append(b, 0xc1, 0x40, 0xff, 0xff), rest[:n]...)
		rest = rest[n:]
	}
	return marked.Bytes{B: b, First: first}
}

// TestErrorsMarked checks that a segment is refused in the same way wherever its markers are.
func TestErrorsMarked(t *testing.T) {
	for _, tt := range errorCases {
		in := testenv.Unhex(t, tt.in)
		plain := newVictim()
		want := plain.HandleULPDU(in)
		terminate := plain.poll(testMULPDU)
		for first := 1; first < len(in); first++ {
			e := newVictim()
			if err := e.HandleMarked(withMarkers(in, first)); err != want {
				t.Fatalf("%s, markers from %d: %v; want %v", tt.name, first, err, want)
			}
			if got := e.poll(testMULPDU); !bytes.Equal(got, terminate) {
				t.Fatalf("%s, markers from %d: sends %x; want %x", tt.name, first, got, terminate)
			}
		}
	}
}

// TestPlaceMarked checks that markers are removed from placed data, in order and early.
func TestPlaceMarked(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	payload := make([]byte, 1400)
	for i := range payload {
		payload[i] = byte(rnd.Uint32())
	}
	for _, tt := range []struct {
		name, hdr string
		recv      bool // whether the payload belongs in the receive buffer or in the region
	}{{"Write", "c140 00000007 0000000000001000", false}, {"Send", hSend, true}} {
		for first := 1; first <= 508; first += 1 + rnd.IntN(12) {
			u := withMarkers(append(testenv.Unhex(t, tt.hdr), payload...), first)
			for _, early := range []bool{false, true} {
				e := newVictim()
				region, recv := make([]byte, len(payload)), make([]byte, len(payload))
				e.mem.regions[7].buf, e.mem.recvs = region, [][]byte{recv}
				if early {
					if !e.HandleEarlyMarked(serial.Num(1), u) {
						t.Fatalf("%s, markers from %d: not placed early", tt.name, first)
					}
					if err := e.DeliverEarly(1); err != nil {
						t.Fatal(err)
					}
				} else if err := e.HandleMarked(u); err != nil {
					t.Fatal(err)
				}
				right, other := region, recv
				if tt.recv {
					right, other = recv, region
				}
				if !bytes.Equal(right, payload) || !bytes.Equal(other, make([]byte, len(payload))) {
					t.Fatalf("%s, markers from %d, early %v: other bytes are placed, or elsewhere", tt.name, first, early)
				}
				if e.mem.placed != 1 {
					t.Fatalf("%s, markers from %d, early %v: placed %d times", tt.name, first, early, e.mem.placed)
				}
				if got, want := e.Stats().RxBytes, uint64(u.Len()); got != want {
					t.Fatalf("RxBytes = %d; want %d", got, want)
				}
			}
		}
	}
}
