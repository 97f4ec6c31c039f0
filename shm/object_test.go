package shm

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const testPage = 4096

// sparse makes an Object of a memfd as large as an address space. It has no pages.
func sparse(t *testing.T) (*Object, int) {
	t.Helper()
	fd := testMemfd(t, testPage, 0)
	punch(t, fd, 0, testPage)
	if err := unix.Ftruncate(fd, 1<<56); err != nil {
		t.Fatal(err)
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	o, err := OpenObject(own)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Close() })
	return o, fd
}

// fill allocates n pages at off, whose first bytes say which they are.
func fill(t *testing.T, fd int, off uint64, n int) {
	t.Helper()
	for i := range n {
		b := make([]byte, testPage)
		copy(b, fmt.Sprintf("%#x", off+uint64(i)*testPage))
		if _, err := unix.Pwrite(fd, b, int64(off)+int64(i)*testPage); err != nil {
			t.Fatal(err)
		}
	}
}

// mappings returns how many mappings of the memfd this process has.
func mappings(t *testing.T, fd int) int {
	t.Helper()
	n, _ := mapped(t, fd)
	return n
}

// mapped returns how many mappings of the memfd this process has, and how many bytes they have.
func mapped(t *testing.T, fd int) (n int, bytes uint64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	b := testenv.ReadFile(t, "/proc/self/maps")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 5 && f[4] == fmt.Sprint(st.Ino) && strings.HasPrefix(f[5], "/memfd:test") {
			var start, end uint64
			if _, err := fmt.Sscanf(f[0], "%x-%x", &start, &end); err != nil {
				t.Fatal(err)
			}
			n++
			bytes += end - start
		}
	}
	return n, bytes
}

func slice(t *testing.T, o *Object, off, n uint64) *Region {
	t.Helper()
	r, err := o.Slice(off, n)
	if err != nil {
		t.Fatalf("%d bytes at %#x: %v", n, off, err)
	}
	if uint64(len(r.Bytes())) != n || uint64(cap(r.Bytes())) != n {
		t.Fatalf("%d bytes at %#x: got %d, room for %d", n, off, len(r.Bytes()), cap(r.Bytes()))
	}
	return r
}

// Slices that overlap, touch and are apart have one mapping, and the same memory.
func TestObject(t *testing.T) {
	o, fd := sparse(t)
	const at = 1<<56 - windowSize
	fill(t, fd, at, 8)
	whole := slice(t, o, at+100, 4*testPage)
	part := slice(t, o, at+2*testPage, testPage)
	more := slice(t, o, at+3*testPage, 5*testPage)
	if n := mappings(t, fd); n != 1 {
		t.Errorf("%d mappings", n)
	}
	for i, b := range [][]byte{whole.Bytes()[2*testPage-100:], part.Bytes(), more.Bytes()[testPage:]} {
		if want := fmt.Sprintf("%#x", at+[]int{2, 2, 4}[i]*testPage); string(b[:len(want)]) != want {
			t.Errorf("slice %d: %q, want %q", i, b[:len(want)], want)
		}
	}
	if err := part.Close(); err != nil || part.Close() != nil {
		t.Errorf("Close: %v", err)
	}
	copy(whole.Bytes()[2*testPage-100:], "shared")
	b := make([]byte, 6)
	if _, err := unix.Pread(fd, b, at+2*testPage); err != nil || string(b) != "shared" {
		t.Errorf("in the memfd: %q, %v", b, err)
	}
	if len(o.windows) != 1 || len(o.windows[0].held) == 0 {
		t.Errorf("windows %+v", o.windows)
	}
	whole.Close()
	more.Close()
	if len(o.windows[0].held) != 0 {
		t.Errorf("pages %v are held", o.windows[0].held)
	}
	if err := o.Close(); err != nil || mappings(t, fd) != 0 {
		t.Errorf("after Close: %v, %d mappings", err, mappings(t, fd))
	}
}

// A hole is refused and one that is made later is a fault, as of a region with a mapping of its own. Pages that another slice has are not
// looked at again.
func TestObjectHoles(t *testing.T) {
	o, fd := sparse(t)
	fill(t, fd, 0, 8)
	punch(t, fd, 3*testPage, testPage)
	if _, err := o.Slice(0, 8*testPage); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "MADV_POPULATE_WRITE") {
		t.Errorf("a hole: %v", err)
	}
	if len(o.windows[0].held) != 0 {
		t.Errorf("what was refused holds %v", o.windows[0].held)
	}
	first := slice(t, o, 0, 3*testPage)
	if _, err := o.Slice(2*testPage, 2*testPage); !errors.Is(err, ErrMemory) {
		t.Errorf("a hole after pages of another slice: %v", err)
	}
	if n := allocated(t, fd); n != 7*testPage {
		t.Errorf("%d bytes allocated", n)
	}
	again := slice(t, o, testPage, 2*testPage)
	punch(t, fd, testPage, testPage)
	for _, b := range [][]byte{first.Bytes()[testPage:], again.Bytes()} {
		if !faults(func() { b[0] = 1 }) {
			t.Error("a hole was written")
		}
	}
	if n := allocated(t, fd); n != 6*testPage {
		t.Errorf("%d bytes allocated after access to the hole", n)
	}
	slice(t, o, testPage, testPage).Close() // it was there, and a fault is its owner's
	if faults(func() { sink = first.Bytes()[2*testPage] }) {
		t.Error("a page beside the hole is lost")
	}
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	if !faults(func() { sink = first.Bytes()[0] }) {
		t.Error("no fault in memory that was cut off")
	}
	if _, err := o.Slice(5*testPage, testPage); !errors.Is(err, ErrMemory) {
		t.Errorf("beyond the end: %v", err)
	}
}

// Many places far from each other: beyond maxWindows a slice is mapped by itself, and not longer than it is there.
func TestObjectWindows(t *testing.T) {
	o, fd := sparse(t)
	var all []*Region
	const most = maxWindows + 8
	for i := range uint64(most) {
		fill(t, fd, 3*i*windowSize, 1)
		all = append(all, slice(t, o, 3*i*windowSize, testPage))
	}
	if n, bytes := mapped(t, fd); n != most || bytes != maxWindows*windowSize+8*testPage {
		t.Errorf("%d mappings of %d bytes, want %d", n, bytes, most)
	}
	all[maxWindows].Close()
	if n := mappings(t, fd); n != most-1 {
		t.Errorf("%d mappings after a slice of its own is closed, want %d", n, most-1)
	}
	for _, r := range all {
		r.Close()
	}
	if n := mappings(t, fd); n > maxWindows {
		t.Errorf("%d mappings without a slice", n)
	}
	fill(t, fd, 1<<50, 1)
	slice(t, o, 1<<50, testPage)
	if n := mappings(t, fd); n != 1 {
		t.Errorf("%d mappings after the windows were needed", n)
	}
	// A slice may lie in several windows.
	fill(t, fd, 1<<51-testPage, 2)
	r := slice(t, o, 1<<51-testPage, 2*testPage)
	if want := fmt.Sprintf("%#x", 1<<51); string(r.Bytes()[testPage:][:len(want)]) != want {
		t.Errorf("in the second window: %q", r.Bytes()[testPage:][:len(want)])
	}
}

func TestObjectRefuses(t *testing.T) {
	for _, seals := range []int{unix.F_SEAL_SEAL, unix.F_SEAL_WRITE, unix.F_SEAL_FUTURE_WRITE} {
		if _, err := OpenObject(testMemfd(t, testPage, seals)); !errors.Is(err, ErrMemory) {
			t.Errorf("seals %#x: %v", seals, err)
		}
	}
	o, fd := sparse(t)
	fill(t, fd, 0, 1)
	for _, c := range []struct{ off, n uint64 }{{0, 0}, {1 << 63, 1}, {1<<64 - 1, 2}, {0, 1 << 50}, {1<<56 + testPage, 1}} {
		if _, err := o.Slice(c.off, c.n); !errors.Is(err, ErrMemory) {
			t.Errorf("%d bytes at %#x: %v", c.n, c.off, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Slice(0, testPage); !errors.Is(err, unix.EPERM) {
		t.Errorf("sealed against writing later: %v", err)
	}
}

// A client that holds the lock of its memfd holds up neither its registrations nor its end.
func TestObjectWhileStuck(t *testing.T) {
	o, fd := sparse(t)
	fill(t, fd, 0, 2)
	stickIn(t, unix.SYS_WRITE, fd, stuckPage(t))
	done := make(chan error, 1)
	go func() {
		r, err := o.Slice(0, 2*testPage)
		if err == nil {
			err = errors.Join(r.Close(), o.Close())
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the registration waits for the client")
	}
}

// pageCounts does what an array of counts would.
func TestPageCounts(t *testing.T) {
	rng := testenv.Rand(t)
	const pages = 40
	var c pageCounts
	var want [pages]int
	var held [][2]uint64
	for range 5000 {
		if len(held) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(held))
			h := held[i]
			held = append(held[:i], held[i+1:]...)
			c.add(h[0], h[1], -1)
			for p := h[0]; p < h[1]; p++ {
				want[p]--
			}
		} else {
			start := rng.Uint64N(pages)
			end := start + 1 + rng.Uint64N(pages-start)
			gaps := [pages]bool{}
			outside := false
			if err := c.gaps(start, end, func(a, b uint64) error {
				for p := a; p < b; p++ {
					gaps[p] = true
				}
				outside = outside || a < start || b > end
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if outside {
				t.Fatalf("%v from %d to %d: a gap outside", c, start, end)
			}
			for p := start; p < end; p++ {
				if gaps[p] != (want[p] == 0) {
					t.Fatalf("%v from %d to %d: page %d a gap: %v", c, start, end, p, gaps[p])
				}
			}
			held = append(held, [2]uint64{start, end})
			c.add(start, end, 1)
			for p := start; p < end; p++ {
				want[p]++
			}
		}
		var got [pages]int
		last := pageSpan{}
		for _, s := range c {
			if s.n <= 0 || s.start >= s.end || s.start < last.end || s.start == last.end && s.n == last.n && last.end > 0 {
				t.Fatalf("spans %v", c)
			}
			for p := s.start; p < s.end; p++ {
				got[p] = s.n
			}
			last = s
		}
		if got != want {
			t.Fatalf("%v: counts %v, want %v", c, got, want)
		}
	}
}

// A client that registers much memory for a moment, again and again in other places, leaves little of it mapped, also if it keeps a page
// of each: page tables are the daemon's memory.
func TestObjectKeepsLittle(t *testing.T) {
	o, fd := sparse(t)
	const places = 3
	if err := unix.Fallocate(fd, 0, 0, (places+1)*windowSize); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(places) {
		whole := slice(t, o, i*windowSize+testPage, windowSize)
		defer slice(t, o, i*windowSize+testPage, testPage).Close()
		whole.Close()
	}
	if _, n := mapped(t, fd); n != places*windowSize {
		t.Errorf("%d MiB are mapped for %d pages", n>>20, places)
	}
}
