package rdmap

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/ddp"
)

// TestExtend compares the ULPDUs of a stream whose segments are extended with those of one whose segments are built one by one.
func TestExtend(t *testing.T) {
	const mulpdu = 1442
	send := func(extend bool) (ulpdus [][]byte, stats Stats) {
		a, b := newPair(Config{IRD: 4, ORD: 4})
		for id := range uint32(6) {
			a.mem.sources[id] = fill(make([]byte, 50000), byte(id))
		}
		b.mem.regions[8] = &region{base: 1000, buf: fill(make([]byte, 50000), 7), read: true}
		a.mem.regions[9] = &region{base: 500, buf: make([]byte, 50000), write: true}
		for _, wr := range []WR{
			{ID: 0, Op: OpWrite, STag: 5, TO: 100, Len: 50000},
			{ID: 1, Op: OpSend, Len: 30000},
			{ID: 2, Op: OpWrite, STag: 5, Len: 1428 * 3},
			{ID: 3, Op: OpWrite, STag: 5, Len: 100},
			{ID: 4, Op: OpWrite, STag: 5, Len: 0},
			{ID: 5, Op: OpRead, STag: 8, TO: 1000, Len: 50000, SinkSTag: 9, SinkTO: 500},
		} {
			a.post(t, wr)
		}
		poll := func(e *end) {
			for n := 2; ; n++ {
				var seg Segment
				if !e.PollFilling(mulpdu, mulpdu, &seg) {
					return
				}
				ulpdus = append(ulpdus, e.mem.gather(&seg))
				if !extend {
					continue
				}
				for range e.Extend(&seg, n%40) {
					ddp.Advance(seg.Hdr[:seg.HdrLen], seg.Len)
					seg.Src.Off += uint64(seg.Len)
					ulpdus = append(ulpdus, e.mem.gather(&seg))
				}
			}
		}
		poll(a)
		b.HandleULPDU(ulpdus[len(ulpdus)-1]) // the Read Request
		poll(b)
		stats = a.Stats()
		stats.TxSegments += b.Stats().TxSegments
		stats.TxBytes += b.Stats().TxBytes
		return ulpdus, stats
	}
	want, wantStats := send(false)
	got, gotStats := send(true)
	if len(got) != len(want) || len(want) < 100 || gotStats != wantStats {
		t.Fatalf("%d ULPDUs, %+v; want %d, %+v", len(got), gotStats, len(want), wantStats)
	}
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Fatalf("ULPDU %d begins with %x; want %x", i, got[i][:min(len(got[i]), 20)], want[i][:min(len(want[i]), 20)])
		}
	}
}

// TestExtendNothing checks that a stream that has ended, or has no message in progress, extends no segment.
func TestExtendNothing(t *testing.T) {
	e := newEnd(Config{})
	e.mem.sources[0] = make([]byte, 5000)
	e.post(t, WR{Op: OpWrite, STag: 5, Len: 5000})
	var seg Segment
	if e.Extend(&seg, 9) != 0 {
		t.Error("without a segment")
	}
	if !e.PollFilling(1442, 1442, &seg) || e.Extend(&seg, 0) != 0 {
		t.Error("by none")
	}
	e.Flush()
	if n := e.Extend(&seg, 9); n != 0 {
		t.Errorf("after Flush by %d", n)
	}
}
