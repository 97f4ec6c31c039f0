package mpa

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// piece is a range of bytes of a stream, as TCP has received it.
type piece struct {
	from, to int
	data     []byte // nil: placed early and released
}

// early takes the FPDUs found in bytes [from, to) of stream out of order. place is called for each. It returns what
// was found, and whether the bytes may be dropped.
func early(t testing.TB, r *Receiver, start serial.Num, stream []byte, from, to int, place func(*FPDU) bool) (found []serial.Num, gone bool) {
	t.Helper()
	// The bytes belong to a frame, which is reused later.
	seg := bytes.Clone(stream[from:to])
	r.HandleEarly(start+serial.Num(from), seg)
	gone = true
	var f FPDU
	for r.PollEarly(&f) {
		if f.Placed {
			t.Fatal("PollEarly gave an FPDU as placed before")
		}
		found = append(found, f.Seq)
		if place(&f) {
			r.MarkPlaced(f.Seq)
		} else {
			gone = false
		}
	}
	for i := range seg {
		seg[i] = 0xee
	}
	return found, gone && r.EarlyWhole()
}

// world is a stream, its receiver, and the expected FPDUs.
type world struct {
	t      testing.TB
	r      *Receiver
	start  serial.Num
	stream []byte
	fpdus  []sent
	at     int          // in-order point, as an offset in stream
	next   int          // next FPDU in order
	placed map[int]bool // FPDUs placed early, by index
	held   []piece
}

func newWorld(t testing.TB, rnd *rand.Rand, crc bool, start serial.Num, sizes ...int) *world {
	w := &world{t: t, r: new(Receiver), start: start, placed: map[int]bool{}}
	w.stream, w.fpdus = stream(rnd, crc, true, start, sizes...)
	w.r.Init(crc, true, start)
	return w
}

// end returns the offset of the end of FPDU i.
func (w *world) end(i int) int {
	if i+1 < len(w.fpdus) {
		return w.fpdus[i+1].begin
	}
	return len(w.stream)
}

// index returns the index of the FPDU whose length field is at seq.
func (w *world) index(seq serial.Num) int {
	w.t.Helper()
	i := slices.IndexFunc(w.fpdus, func(s sent) bool { return s.seq == seq })
	if i < 0 {
		w.t.Fatalf("an FPDU at %d, where none begins", seq-w.start)
	}
	return i
}

// arrive passes bytes [from, to) to the receiver as TCP would.
func (w *world) arrive(from, to int, place func() bool) {
	w.t.Helper()
	if to <= w.at {
		return
	}
	if from > w.at {
		_, gone := early(w.t, w.r, w.start, w.stream, from, to, func(f *FPDU) bool {
			w.t.Helper()
			i := w.index(f.Seq)
			if w.placed[i] {
				w.t.Fatalf("FPDU %d is given early a second time", i)
			}
			if !bytes.Equal(joined(f.ULPDU), w.fpdus[i].ulpdu) {
				w.t.Fatalf("FPDU %d is wrong ahead of order", i)
			}
			if w.fpdus[i].begin < from || w.end(i) > to {
				w.t.Fatalf("FPDU %d is not whole in the segment", i)
			}
			w.placed[i] = place()
			return w.placed[i]
		})
		p := piece{from: from, to: to}
		if !gone {
			p.data = w.stream[from:to]
		}
		for i := range w.fpdus {
			if gone && w.fpdus[i].begin < to && w.end(i) > from && !w.placed[i] {
				w.t.Fatalf("bytes of FPDU %d, which was not placed, are not kept", i)
			}
		}
		w.held = append(w.held, p)
		return
	}
	w.deliver(piece{from, to, w.stream[from:to]})
	for {
		i := slices.IndexFunc(w.held, func(p piece) bool { return p.from <= w.at })
		if i < 0 {
			return
		}
		p := w.held[i]
		w.held = slices.Delete(w.held, i, i+1)
		if p.to > w.at {
			w.deliver(p)
		}
	}
}

// deliver moves the in-order point to the end of p.
func (w *world) deliver(p piece) {
	w.t.Helper()
	if p.data == nil {
		w.r.HandleSkipped(p.to - w.at)
	} else {
		w.r.HandleStream(p.data[w.at-p.from:])
	}
	w.at = p.to
	var f FPDU
	for {
		ok, err := w.r.PollFPDU(&f)
		if err != nil {
			w.t.Fatalf("Next: %v", err)
		}
		if !ok {
			return
		}
		i := w.index(f.Seq)
		if i != w.next {
			w.t.Fatalf("FPDU %d in order; want %d", i, w.next)
		}
		w.next++
		if f.Placed != w.placed[i] {
			w.t.Fatalf("FPDU %d in order: placed %v; want placed %v", i, f.Placed, w.placed[i])
		}
		if f.Placed && f.ULPDU.Len() != 0 || !f.Placed && !bytes.Equal(joined(f.ULPDU), w.fpdus[i].ulpdu) {
			w.t.Fatalf("FPDU %d is wrong in order", i)
		}
	}
}

func (w *world) finish() {
	w.t.Helper()
	if w.next != len(w.fpdus) || w.at != len(w.stream) || w.r.early.count() != 0 {
		w.t.Fatalf("%d of %d FPDUs, %d of %d bytes delivered; %d placed FPDUs remembered",
			w.next, len(w.fpdus), w.at, len(w.stream), w.r.early.count())
	}
}

// segments divides the stream at FPDU boundaries into at most most bytes each where the FPDUs allow.
func (w *world) segments(most int) (segs [][2]int) {
	from := 0
	for i := range w.fpdus {
		if w.end(i)-from > most && w.fpdus[i].begin > from {
			segs = append(segs, [2]int{from, w.fpdus[i].begin})
			from = w.fpdus[i].begin
		}
	}
	return append(segs, [2]int{from, len(w.stream)})
}

func always() bool { return true }

// TestEarlyAfterLoss loses the first segment; the others must be placed and their frames freed.
func TestEarlyAfterLoss(t *testing.T) {
	rnd := seeded(t)
	for _, crc := range []bool{true, false} {
		sizes := make([]int, 200)
		for i := range sizes {
			sizes[i] = 1442
		}
		w := newWorld(t, rnd, crc, 0xfffe0000, sizes...)
		segs := w.segments(1460)
		for _, s := range segs[1:] {
			w.arrive(s[0], s[1], always)
		}
		for i, p := range w.held {
			if p.data != nil {
				t.Errorf("segment %d is kept", i+1)
			}
		}
		if len(w.placed) != 199 {
			t.Errorf("%d FPDUs found and placed; want 199", len(w.placed))
		}
		w.arrive(segs[0][0], segs[0][1], always)
		w.finish()
	}
}

// TestEarlyLocate checks that an FPDU is found early only through a marker or from the end of one that was.
func TestEarlyLocate(t *testing.T) {
	rnd := seeded(t)
	// FPDUs of 504 bytes with their leading marker, or similar; the offsets are below.
	w := newWorld(t, rnd, true, 7, 98, 98, 98, 98, 98, 98, 98, 98, 98, 98, 98, 98)
	for _, tt := range []struct {
		name     string
		from, to int // FPDUs of the segment
		cut      int // bytes dropped from the front
		found    []int
		whole    bool
	}{
		{"no marker", 1, 3, 0, nil, false},
		{"marker in the third: the two in front are not found", 2, 6, 0, []int{4, 5}, false},
		{"marker in the first", 4, 6, 0, []int{4, 5}, true},
		{"begins within an FPDU without a marker", 3, 6, 8, []int{4, 5}, false},
		{"begins within the FPDU of the only marker", 4, 6, 8, nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.r.Init(true, true, w.start)
			from := w.fpdus[tt.from].begin + tt.cut
			found, gone := early(t, w.r, w.start, w.stream, from, w.end(tt.to-1), func(f *FPDU) bool { return true })
			var got []int
			for _, s := range found {
				got = append(got, w.index(s))
			}
			if !slices.Equal(got, tt.found) || gone != tt.whole {
				t.Errorf("found %v, whole %v; want %v, %v", got, gone, tt.found, tt.whole)
			}
		})
	}
	t.Run("the end of one found is the start of the next", func(t *testing.T) {
		w.r.Init(true, true, w.start)
		for i := 4; i < len(w.fpdus); i++ { // one FPDU a segment, most without a marker
			found, gone := early(t, w.r, w.start, w.stream, w.fpdus[i].begin, w.end(i), func(*FPDU) bool { return true })
			if len(found) != 1 || !gone {
				t.Errorf("FPDU %d: found %d, gone %v", i, len(found), gone)
			}
		}
	})
	t.Run("the same when none is placed", func(t *testing.T) {
		w.r.Init(true, true, w.start)
		for i := 4; i < len(w.fpdus); i++ {
			found, gone := early(t, w.r, w.start, w.stream, w.fpdus[i].begin, w.end(i), func(*FPDU) bool { return false })
			if len(found) != 1 || gone {
				t.Errorf("FPDU %d: found %d, gone %v", i, len(found), gone)
			}
		}
	})
	t.Run("behind one that was placed, not as the last", func(t *testing.T) {
		w := newWorld(t, rnd, true, 7, 600, 600, 60, 600, 600) // FPDU 2 has no marker
		if d := w.r.toMarker(w.fpdus[2].seq); d < bodyLen(60) {
			t.Fatalf("FPDU 2 has a marker at %d", d)
		}
		for _, i := range []int{1, 4, 2} {
			found, gone := early(t, w.r, w.start, w.stream, w.fpdus[i].begin, w.end(i), func(*FPDU) bool { return true })
			if len(found) != 1 || !gone {
				t.Errorf("FPDU %d: found %d, gone %v", i, len(found), gone)
			}
		}
	})
	t.Run("overlap with one that was placed", func(t *testing.T) {
		w.r.Init(true, true, w.start)
		for _, s := range []struct{ from, to, found int }{
			{w.fpdus[4].begin, w.end(4), 1},      // has the marker
			{w.fpdus[4].begin + 50, w.end(6), 2}, // its rest, and two after it
			{w.fpdus[5].begin + 3, w.end(6), 0},  // nothing new
			{w.fpdus[5].begin, w.end(6) - 3, 0},  // only a part is new
			{w.fpdus[6].begin, w.end(7), 1},
			{w.fpdus[6].begin + 1, w.fpdus[6].begin + 2, 0},
		} {
			found, gone := early(t, w.r, w.start, w.stream, s.from, s.to, func(*FPDU) bool { return true })
			if len(found) != s.found || !gone {
				t.Errorf("bytes %d to %d: found %d, gone %v; want %d", s.from, s.to, len(found), gone, s.found)
			}
		}
		if _, gone := early(t, w.r, w.start, w.stream, w.fpdus[7].begin, w.end(8)-1, func(*FPDU) bool { return true }); gone {
			t.Error("a segment with part of an FPDU that was not placed need not be kept")
		}
	})
	t.Run("the leading marker is in another segment", func(t *testing.T) {
		w := newWorld(t, rnd, false, 7, 502, 1400, 20)
		begin := w.fpdus[1].begin
		if begin != 512 {
			t.Fatalf("FPDU 1 begins at %d", begin)
		}
		if found, gone := early(t, w.r, w.start, w.stream, begin+4, w.end(1), func(*FPDU) bool { return true }); len(found) != 0 || gone {
			t.Errorf("found %d, gone %v", len(found), gone)
		}
	})
	t.Run("not placed, found again in order", func(t *testing.T) {
		w.r.Init(true, true, w.start)
		if found, gone := early(t, w.r, w.start, w.stream, w.fpdus[4].begin, w.end(5), func(*FPDU) bool { return false }); len(found) != 2 || gone {
			t.Fatalf("found %d, gone %v", len(found), gone)
		}
		w.r.HandleStream(w.stream)
		if left := collect(t, w.r, w.fpdus); len(left) != 0 {
			t.Errorf("%d FPDUs are missing", len(left))
		}
	})
	t.Run("markers off", func(t *testing.T) {
		var r Receiver
		b, fpdus := stream(rnd, true, false, 7, 600, 600)
		r.Init(true, false, 7)
		if found, gone := early(t, &r, 7, b, fpdus[1].begin, len(b), func(*FPDU) bool { return true }); len(found) != 0 || gone {
			t.Errorf("found %d, gone %v", len(found), gone)
		}
	})
	t.Run("within what is gathered", func(t *testing.T) {
		w.r.Init(true, true, w.start)
		w.r.HandleStream(w.stream[:w.fpdus[4].begin+10])
		collect(t, w.r, w.fpdus)
		if found, gone := early(t, w.r, w.start, w.stream, w.fpdus[4].begin, w.end(4), func(*FPDU) bool { return true }); len(found) != 0 || gone {
			t.Errorf("found %d, gone %v", len(found), gone)
		}
	})
	t.Run("behind the in-order point", func(t *testing.T) {
		w.r.Init(true, true, w.start)
		w.r.HandleStream(w.stream)
		collect(t, w.r, w.fpdus)
		if found, gone := early(t, w.r, w.start, w.stream, w.fpdus[4].begin, w.end(5), func(*FPDU) bool { return true }); len(found) != 0 || gone {
			t.Errorf("found %d, gone %v", len(found), gone)
		}
	})
}

func TestEarlyRandom(t *testing.T) {
	rnd := seeded(t)
	rounds := 300
	if testing.Short() {
		rounds = 60
	}
	var found, whole int
	for range rounds {
		sizes := make([]int, 2+rnd.IntN(120))
		mean := []int{20, 300, 1400, 5000}[rnd.IntN(4)]
		for i := range sizes {
			sizes[i] = rnd.IntN(2 * mean)
		}
		w := newWorld(t, rnd, rnd.IntN(4) > 0, serial.Num(rnd.Uint32()), sizes...)
		if rnd.IntN(3) == 0 {
			w.start = -serial.Num(rnd.IntN(len(w.stream)))
			crc := w.r.crc
			w.stream, w.fpdus = stream(rnd, crc, true, w.start, sizes...)
			w.r.Init(crc, true, w.start)
		}
		var segs [][2]int
		switch rnd.IntN(3) {
		case 0: // aligned
			segs = w.segments(1460)
		case 1: // cut anywhere
			for from := 0; from < len(w.stream); {
				to := min(from+1+rnd.IntN(3000), len(w.stream))
				segs = append(segs, [2]int{from, to})
				from = to
			}
		default: // overlapping and repeated, all bytes covered
			segs = w.segments(1460)
			for range 2 * len(segs) {
				from := rnd.IntN(len(w.stream))
				segs = append(segs, [2]int{from, min(from+1+rnd.IntN(3000), len(w.stream))})
			}
			segs = append(segs, w.segments(700)...)
		}
		for i := range segs { // reorder within a window
			j := min(i+rnd.IntN(1+rnd.IntN(40)), len(segs)-1)
			segs[i], segs[j] = segs[j], segs[i]
		}
		refuse := rnd.IntN(4)
		for _, s := range segs {
			w.arrive(s[0], s[1], func() bool { return rnd.IntN(16) >= refuse })
		}
		w.finish()
		found += len(w.placed)
		whole += len(w.fpdus)
	}
	t.Logf("%d of %d FPDUs found ahead of order", found, whole)
	if found < whole/10 {
		t.Errorf("only %d of %d FPDUs were found ahead of order", found, whole)
	}
}

func TestEarlyFull(t *testing.T) {
	rnd := seeded(t)
	sizes := make([]int, maxPlaced+50)
	for i := range sizes {
		sizes[i] = 600
	}
	w := newWorld(t, rnd, true, 5, sizes...)
	segs := w.segments(700)
	if len(segs) != len(sizes) {
		t.Fatalf("%d segments", len(segs))
	}
	for _, i := range rnd.Perm(len(segs) - 1) {
		w.arrive(segs[i+1][0], segs[i+1][1], always)
	}
	kept := 0
	for _, p := range w.held {
		if p.data != nil {
			kept++
		}
	}
	if kept != 49 || len(w.placed) != maxPlaced {
		t.Errorf("%d segments kept, %d placed; want 49 and %d", kept, len(w.placed), maxPlaced)
	}
	w.arrive(segs[0][0], segs[0][1], always)
	w.finish()
}

// TestEarlyDisagreement checks that the position that a marker gave out of order and the length fields seen in order
// must agree when the gap is closed (RFC 5044 section 8).
func TestEarlyDisagreement(t *testing.T) {
	rnd := seeded(t)
	place := func(*FPDU) bool { return true }
	for _, tt := range []struct {
		name string
		gone bool
		// first is the size of the ULPDU whose FPDU is sent in place of the one before the early FPDU.
		first int
		err   *term.Error
	}{
		{"agree, kept", false, 600, nil},
		{"agree, gone", true, 600, nil},
		{"FPDU in order reaches into the one placed, kept", false, 700, term.ErrMPAMarker},
		{"FPDU in order is not complete, gone", true, 700, term.ErrMPAMarker},
		{"FPDU in order is shorter, kept", false, 500, term.ErrMPAMarker},
		{"FPDU in order is shorter, gone", true, 500, term.ErrMPAMarker},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, rnd, true, 5, 600, 600, 600)
			from, to := w.fpdus[1].begin, w.end(1)
			if found, gone := early(t, w.r, w.start, w.stream, from, to, place); len(found) != 1 || !gone {
				t.Fatalf("found %d, gone %v", len(found), gone)
			}
			front, _ := stream(rnd, true, true, w.start, tt.first, 20, 20, 20, 20, 20)
			if tt.first == 600 {
				front = w.stream
			}
			var f FPDU
			var err *term.Error
			drain := func() {
				for ok := true; ok; {
					ok, err = w.r.PollFPDU(&f)
				}
			}
			w.r.HandleStream(front[:from])
			drain()
			if err == nil && tt.gone {
				w.r.HandleSkipped(to - from)
				drain()
			} else if err == nil {
				w.r.HandleStream(append(bytes.Clone(front[from:min(to, len(front))]), w.stream[min(to, len(front)):]...))
				drain()
			}
			if err != tt.err {
				t.Errorf("Next: %v; want %v", err, tt.err)
			}
		})
	}
}

// TestEarlyInvalid checks that errors in an early segment are left for the check in order.
func TestEarlyInvalid(t *testing.T) {
	rnd := seeded(t)
	const mark = 408 // index in the FPDU of the marker in it
	for _, tt := range []struct {
		name   string
		change func(fpdu []byte)
	}{
		{"payload", func(b []byte) { b[100] ^= 1 }},
		{"CRC", func(b []byte) { b[len(b)-1]++ }},
		{"marker points into the FPDU", func(b []byte) { b[mark+3] -= 4; resum(b) }},
		{"marker points in front of the segment", func(b []byte) { b[mark+3] += 4; resum(b) }},
		{"marker points far away", func(b []byte) { b[mark+2] = 0xff; resum(b) }},
		{"marker is zero", func(b []byte) { b[mark+2], b[mark+3] = 0, 0; resum(b) }},
		{"length reaches beyond the segment", func(b []byte) { b[0] = 0x7f; resum(b) }},
		{"length ends before the marker that points back", func(b []byte) {
			b[0], b[1] = 0, 18
			resum(b[:bodyLen(18)])
		}},
		{"length ends at the marker that points back", func(b []byte) {
			const n = mark - lengthLen - crcLen
			b[0], b[1] = n>>8, n&0xff
			resum(b[:bodyLen(n)])
		}},
	} {
		w := newWorld(t, rnd, true, 5, 600, 600, 600)
		seg := bytes.Clone(w.stream[w.fpdus[1].begin:w.end(1)])
		if got := w.r.toMarker(w.fpdus[1].seq); got != mark || int(seg[mark+2])<<8|int(seg[mark+3]) != mark {
			t.Fatalf("the marker is at %d", got)
		}
		tt.change(seg)
		w.r.HandleEarly(w.fpdus[1].seq, seg)
		var f FPDU
		if w.r.PollEarly(&f) || w.r.EarlyWhole() {
			t.Errorf("%s: found an FPDU, or the segment is taken for whole", tt.name)
		}
		if _, err := w.r.PollFPDU(&f); err != nil {
			t.Errorf("%s: an error ahead of order: %v", tt.name, err)
		}
	}
}

// TestEarlyKnownMarker checks that an FPDU known to begin after another one is not taken if a marker in it disagrees.
func TestEarlyKnownMarker(t *testing.T) {
	w := newWorld(t, seeded(t), true, 5, 600, 600, 600, 600)
	second := w.stream[w.fpdus[2].begin:w.end(2)]
	second[w.r.toMarker(w.fpdus[2].seq)+3] ^= 4
	resum(second)
	found, gone := early(t, w.r, w.start, w.stream, w.fpdus[1].begin, w.end(2), func(*FPDU) bool { return true })
	if len(found) != 1 || gone {
		t.Errorf("found %d, gone %v; want the first FPDU alone", len(found), gone)
	}
}

// TestEarlyOverlap checks that an FPDU that overlaps one that was placed is not taken, whatever its CRC.
func TestEarlyOverlap(t *testing.T) {
	rnd := seeded(t)
	w := newWorld(t, rnd, true, 5, 600, 600, 600, 600)
	w.arrive(w.fpdus[2].begin, w.end(2), always)
	other, fpdus := stream(rnd, true, true, w.start, 600, 1300, 20)
	if fpdus[1].seq != w.fpdus[1].seq {
		t.Fatal("the other stream differs too soon")
	}
	if found, gone := early(t, w.r, w.start, other, fpdus[1].begin, len(other), func(*FPDU) bool { return true }); len(found) != 0 || gone {
		t.Errorf("found %d, gone %v", len(found), gone)
	}
}

func TestMarkPlacedMisuse(t *testing.T) {
	w := newWorld(t, seeded(t), true, 5, 600, 600)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	w.r.MarkPlaced(w.fpdus[1].seq)
}

// TestEarlyLowBits checks that the two low bits of FPDUPTR count as zero (RFC 5044 section 4.2).
func TestEarlyLowBits(t *testing.T) {
	w := newWorld(t, seeded(t), true, 5, 600, 600, 600)
	fpdu := w.stream[w.fpdus[1].begin:w.end(1)]
	fpdu[w.r.toMarker(w.fpdus[1].seq)+3] |= 3
	resum(fpdu)
	w.arrive(w.fpdus[1].begin, w.end(1), always)
	if !w.placed[1] || w.held[0].data != nil {
		t.Error("the FPDU was not found ahead of order")
	}
	w.arrive(0, w.fpdus[1].begin, always)
	w.arrive(w.end(1), len(w.stream), always)
	w.finish()
}

// TestEarlyShare checks that nearly all FPDUs that arrive whole and out of order are placed early, with one segment
// in 20 lost and retransmitted, and with swapped neighbors.
func TestEarlyShare(t *testing.T) {
	rnd := seeded(t)
	for _, tt := range []struct {
		name  string
		size  func() int
		most  int     // bytes in a segment
		share float64 // at least
	}{
		{"full segments", func() int { return 1442 }, 1460, 0.99},
		{"half segments, packed", func() int { return 600 + rnd.IntN(100) }, 1460, 0.97},
		{"small FPDUs, packed", func() int { return 14 + rnd.IntN(200) }, 1460, 0.9},
		// After a gap, bytes before the first marker cannot be located.
		{"small FPDUs, one a segment", func() int { return 14 + rnd.IntN(100) }, 1, 0.6},
		{"anything", func() int { return rnd.IntN(1443) }, 1460, 0.95},
		{"jumbo", func() int { return 8870 }, 8948, 0.99},
		{"small FPDUs, jumbo", func() int { return 14 + rnd.IntN(1000) }, 8948, 0.95},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sizes := make([]int, 3000)
			for i := range sizes {
				sizes[i] = tt.size()
			}
			w := newWorld(t, rnd, true, serial.Num(rnd.Uint32()), sizes...)
			type arrival struct {
				at       float64
				from, to int
			}
			var all []arrival
			for i, s := range w.segments(tt.most) {
				at := float64(i) + 2*rnd.Float64()*float64(rnd.IntN(10)/9)
				if rnd.IntN(20) == 0 {
					at += 30 // a round trip later
				}
				all = append(all, arrival{at, s[0], s[1]})
			}
			slices.SortStableFunc(all, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
			whole := 0
			for _, a := range all {
				if a.from > w.at {
					for i := range w.fpdus {
						if w.fpdus[i].begin >= a.from && w.end(i) <= a.to {
							whole++
						}
					}
				}
				w.arrive(a.from, a.to, always)
			}
			w.finish()
			share := float64(len(w.placed)) / float64(whole)
			t.Logf("%d of %d placed: %.1f %%", len(w.placed), whole, 100*share)
			if share < tt.share {
				t.Errorf("%.1f %% placed; want %.0f %%", 100*share, 100*tt.share)
			}
		})
	}
}
