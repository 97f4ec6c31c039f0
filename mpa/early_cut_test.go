package mpa

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestEarlyCutMarker checks segments that begin in, or right after, the marker that starts an FPDU. That FPDU is not
// whole in the segment, but the next one is, wherever the sequence numbers wrap (RFC 5044 4.3).
func TestEarlyCutMarker(t *testing.T) {
	const ulpdu, size = 1010, 2 * markerEvery // with two markers, one of them leading
	for back := range size + markerEvery {
		start := serial.Num(-back)
		var f Framer
		f.Init(true, true, start)
		var stream []byte
		for range 3 {
			seq := start.Add(len(stream))
			b := make([]byte, f.Size(seq, ulpdu))
			if len(b) != size {
				t.Fatalf("an FPDU takes %d bytes; want %d", len(b), size)
			}
			f.Begin(b, seq, ulpdu)
			f.Write(make([]byte, ulpdu))
			f.End()
			stream = append(stream, b...)
		}
		for cut := 1; cut <= markerLen; cut++ {
			var r Receiver
			r.Init(true, true, start)
			r.HandleEarly(start.Add(size+cut), stream[size+cut:])
			var p FPDU
			if !r.PollEarly(&p) || p.Seq != start.Add(2*size+markerLen) {
				t.Fatalf("start %d, %d bytes of the marker lost: the FPDU after it is not found", int32(start), cut)
			}
			r.MarkPlaced(p.Seq)
			r.HandleStream(stream)
			for i := range 3 {
				if ok, err := r.PollFPDU(&p); !ok || p.Placed != (i == 2) {
					t.Fatalf("start %d, %d bytes of the marker lost: FPDU %d: %v, placed %v, %v", int32(start), cut, i, ok, p.Placed, err)
				}
			}
		}
	}
}
