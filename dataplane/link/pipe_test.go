package link

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
)

var _ Link = (*Pipe)(nil)

func newPipe(t testing.TB, cfg PipeConfig) (a, b *Pipe) {
	t.Helper()
	a, b, err := NewPipe(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return a, b
}

// send posts one frame that consists of b and flushes it.
func send(t testing.TB, l Link, b []byte) {
	t.Helper()
	s, ok := l.Alloc()
	if !ok {
		t.Fatal("no slot")
	}
	copy(l.Bytes(s)[8:], b)
	if !l.Post(s, 8, len(b)) {
		t.Fatal("Post refused")
	}
	l.Flush()
	var done [4]Slot
	if n := l.Reap(done[:]); n != 1 || done[0] != s {
		t.Fatalf("Reap gave %d slots", n)
	}
	l.Free(s)
}

// join copies the pieces of a frame together.
func join(f *Frame) []byte {
	var b []byte
	for _, p := range f.Pieces[:f.N] {
		b = append(b, p...)
	}
	return b
}

func frame(n int, id uint32) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)
	}
	binary.BigEndian.PutUint32(b, id)
	return b
}

func TestPipeCarriesFrames(t *testing.T) {
	a, b := newPipe(t, PipeConfig{MTU: 9000, ChunkSize: 4096})
	for _, n := range []int{14, 60, 1514, 4096, 4097, 9000 + HeaderRoom} {
		want := frame(n, 7)
		send(t, a, want)
		fs := make([]Frame, 4)
		if got := b.Receive(fs); got != 1 {
			t.Fatalf("%d bytes: received %d frames", n, got)
		}
		if got := join(&fs[0]); !bytes.Equal(got, want) {
			t.Errorf("%d bytes: changed on the way", n)
		}
		if fs[0].Len() != n || fs[0].N != (n+4095)/4096 {
			t.Errorf("%d bytes: Len %d, %d pieces", n, fs[0].Len(), fs[0].N)
		}
		b.Release(&fs[0])
	}
}

func TestPipePostRefusesWhatIsPosted(t *testing.T) {
	a, _ := newPipe(t, PipeConfig{Slots: 4, TxRing: 2})
	s0, _ := a.Alloc()
	s1, _ := a.Alloc()
	s2, _ := a.Alloc()
	if !a.Post(s0, 0, 60) || a.Post(s0, 0, 60) {
		t.Error("a slot was posted twice")
	}
	if !a.Post(s1, 0, 60) || a.Post(s2, 0, 60) {
		t.Error("more posted than the ring holds")
	}
	a.Flush()
	var done [4]Slot
	if n := a.Reap(done[:1]); n != 1 || done[0] != s0 {
		t.Errorf("reaped %d, %v", n, done[:n])
	}
	if n := a.Reap(done[:]); n != 1 || done[0] != s1 {
		t.Errorf("reaped %d, %v", n, done[:n])
	}
	if !a.Post(s2, 0, 1500+HeaderRoom+1) {
		t.Error("an impossible frame must be taken and counted, or the worker tries forever")
	}
	a.Flush()
	if n := a.Reap(done[:]); n != 1 || done[0] != s2 {
		t.Errorf("reaped %d, %v", n, done[:n])
	}
	var st Stats
	if a.Stats(&st); st.TxInvalid != 1 || st.TxFrames != 2 || st.TxRingFull != 2 {
		t.Errorf("stats %+v", st)
	}
}

func TestPipeDropsWhenReceiverHoldsEverything(t *testing.T) {
	a, b := newPipe(t, PipeConfig{RxFrames: 4})
	for i := range 6 {
		send(t, a, frame(60, uint32(i)))
	}
	fs := make([]Frame, 8)
	if n := b.Receive(fs); n != 4 {
		t.Fatalf("received %d, want 4", n)
	}
	var st Stats
	if b.Stats(&st); st.RxFillEmpty != 2 {
		t.Errorf("RxFillEmpty %d, want 2", st.RxFillEmpty)
	}
	b.Release(&fs[2])
	b.Flush()
	send(t, a, frame(60, 9))
	if n := b.Receive(fs); n != 1 || binary.BigEndian.Uint32(fs[0].Pieces[0]) != 9 {
		t.Errorf("received %d after Release", n)
	}
}

func TestPipeImpairedUnderVirtualClock(t *testing.T) {
	now := clock.Time(1)
	cfg := PipeConfig{
		AtoB: impair.Config{Loss: 0.1, Duplicate: 0.1, Reorder: 0.1, Corrupt: 0.1, Delay: time.Millisecond, Jitter: time.Millisecond, Seed: 3},
		Now:  func() clock.Time { return now },
	}
	run := func() (got []uint32, times []clock.Time, corrupted int) {
		now = 1
		a, b := newPipe(t, cfg)
		fs := make([]Frame, 8)
		receive := func() {
			for n := b.Receive(fs); n > 0; n = b.Receive(fs) {
				for i := range n {
					raw := join(&fs[i])
					id := binary.BigEndian.Uint32(raw)
					if !bytes.Equal(raw, frame(60, id)) {
						corrupted++
					}
					got = append(got, id)
					times = append(times, now)
					b.Release(&fs[i])
				}
			}
		}
		for i := range uint32(1000) {
			send(t, a, frame(60, i))
			now += 10_000
			receive()
		}
		for at := b.Deadline(); at != 0; at = b.Deadline() {
			now = max(now, at)
			receive()
		}
		st := a.out.decider.Stats()
		if want := int(st.Frames - st.Lost + st.Duplicated); len(got) != want {
			t.Errorf("received %d, want %d", len(got), want)
		}
		if st.Lost == 0 || st.Duplicated == 0 || st.Reordered == 0 || st.Corrupted == 0 {
			t.Errorf("something never happened: %+v", st)
		}
		return got, times, corrupted
	}
	ids, times, bad := run()
	ids2, times2, bad2 := run()
	if bad == 0 || bad != bad2 || len(ids) != len(ids2) {
		t.Fatalf("two runs differ: %d and %d frames, %d and %d corrupted", len(ids), len(ids2), bad, bad2)
	}
	for i := range ids {
		if ids[i] != ids2[i] || times[i] != times2[i] {
			t.Fatalf("two runs differ at frame %d", i)
		}
	}
}

func TestPipeFilter(t *testing.T) {
	var seen int
	a, b := newPipe(t, PipeConfig{Filter: func(toB bool, f []byte) bool {
		seen++
		return !toB || binary.BigEndian.Uint32(f) != 1
	}})
	for i := range 3 {
		send(t, a, frame(60, uint32(i)))
	}
	send(t, b, frame(60, 1))
	fs := make([]Frame, 8)
	if n, m := b.Receive(fs), a.Receive(fs[4:]); n != 2 || m != 1 || seen != 4 {
		t.Errorf("b received %d, a %d, filter saw %d", n, m, seen)
	}
}

// TestPipeTwoGoroutines moves frames in both directions between two pollers that sleep when they have nothing to do.
// With -race it proves that the ends share nothing but the rings.
func TestPipeTwoGoroutines(t *testing.T) {
	t.Run("copied", func(t *testing.T) { twoGoroutines(t, false) })
	t.Run("lent", func(t *testing.T) { twoGoroutines(t, true) })
}

func twoGoroutines(t *testing.T, lend bool) {
	const total = 20000
	a, b := newPipe(t, PipeConfig{RxFrames: 64, Slots: 32, Lend: lend})
	var wg sync.WaitGroup
	// b echoes. a keeps at most 16 frames in flight, so that none is dropped.
	wg.Add(2)
	go func() {
		defer wg.Done()
		fs, done := make([]Frame, 8), make([]Slot, 32)
		for n := 0; n < total; {
			got := b.Receive(fs)
			for i := range got {
				s, _ := b.Alloc()
				m := copy(b.Bytes(s), fs[i].Pieces[0])
				b.Post(s, 0, m)
				b.Release(&fs[i])
			}
			b.Flush()
			for _, s := range done[:b.Reap(done)] {
				b.Free(s)
			}
			if n += got; got == 0 && n < total {
				b.Wait(-1, -1)
			}
		}
	}()
	go func() {
		defer wg.Done()
		fs, done := make([]Frame, 8), make([]Slot, 32)
		sent, back := uint32(0), uint32(0)
		for back < total {
			for sent < total && sent-back < 16 {
				s, _ := a.Alloc()
				binary.BigEndian.PutUint32(a.Bytes(s), sent)
				a.Post(s, 0, 60)
				sent++
			}
			a.Flush()
			for _, s := range done[:a.Reap(done)] {
				a.Free(s)
			}
			n := a.Receive(fs)
			for i := range n {
				if id := binary.BigEndian.Uint32(fs[i].Pieces[0]); id != back {
					t.Errorf("frame %d came as %d", back, id)
				}
				back++
				a.Release(&fs[i])
			}
			if n == 0 {
				a.Wait(-1, -1)
			}
		}
	}()
	wg.Wait()
}

// TestPipeLends checks that a lent slot is reaped when the frame in it is released, and not before.
func TestPipeLends(t *testing.T) {
	a, b := newPipe(t, PipeConfig{Slots: 4, RxFrames: 4, Lend: true})
	s, _ := a.Alloc()
	copy(a.Bytes(s)[10:], frame(100, 7))
	a.Post(s, 10, 100)
	a.Flush()
	fs, done := make([]Frame, 4), make([]Slot, 4)
	if n := b.Receive(fs); n != 1 {
		t.Fatalf("received %d frames; want 1", n)
	}
	if &fs[0].Pieces[0][0] != &a.Bytes(s)[10] {
		t.Error("the frame was copied")
	}
	if n := a.Reap(done); n != 0 {
		t.Errorf("%d slots reaped before the release", n)
	}
	b.Release(&fs[0])
	b.Flush()
	if n := a.Reap(done); n != 1 || done[0] != s {
		t.Errorf("reaped %v; want %d", done[:n], s)
	}
	if _, _, err := NewPipe(PipeConfig{Lend: true, AtoB: impair.Config{Loss: 0.1}}); err == nil {
		t.Error("a bad wire that lends was made")
	}
}

func TestPipeWait(t *testing.T) {
	a, b := newPipe(t, PipeConfig{AtoB: impair.Config{Delay: 2 * time.Millisecond}})
	var longest time.Duration
	for range 5 { // a signal may cut one short
		start := clock.Now()
		b.Wait(3*time.Millisecond, -1)
		longest = max(longest, clock.Now().Sub(start))
	}
	if longest < 3*time.Millisecond {
		t.Errorf("woke after %v with nothing there", longest)
	}
	// A frame in flight limits the sleep to the time until it is due.
	send(t, a, frame(60, 1))
	b.Wait(time.Hour, -1)
	fs := make([]Frame, 1)
	for b.Receive(fs) == 0 {
		b.Wait(time.Hour, -1)
	}
	// A wake-up by wakefd ends it too.
	fd, err := unix.Eventfd(1, unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if !b.Wait(time.Hour, fd) {
		t.Error("not woken by wakefd")
	}
}

func TestPipeAllocatesNothing(t *testing.T) {
	for name, bad := range map[string]impair.Config{"perfect": {}, "bad": {Loss: 0.1, Duplicate: 0.1, Jitter: 1}} {
		a, b := newPipe(t, PipeConfig{AtoB: bad})
		fs, done := make([]Frame, 8), make([]Slot, 8)
		runtime.GC()
		if n := testing.AllocsPerRun(1000, func() {
			s, _ := a.Alloc()
			a.Post(s, 0, 1514)
			a.Flush()
			for _, s := range done[:a.Reap(done)] {
				a.Free(s)
			}
			for i := range b.Receive(fs) {
				b.Release(&fs[i])
			}
			b.Wait(0, -1)
		}); n != 0 {
			t.Errorf("%s: %v allocations a frame", name, n)
		}
	}
}

func BenchmarkPipe(b *testing.B) {
	x, y := newPipe(b, PipeConfig{})
	fs, done := make([]Frame, 64), make([]Slot, 64)
	b.ReportAllocs()
	b.SetBytes(1514)
	for i := range b.N {
		s, _ := x.Alloc()
		x.Post(s, 0, 1514)
		if i%32 != 31 {
			continue
		}
		x.Flush()
		for _, s := range done[:x.Reap(done)] {
			x.Free(s)
		}
		for i := range y.Receive(fs) {
			y.Release(&fs[i])
		}
	}
}
