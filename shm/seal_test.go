package shm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// testMemfd makes a memfd of size bytes, all allocated.
func testMemfd(t *testing.T, size int64, seals int) int {
	t.Helper()
	fd, err := memfd("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Fallocate(fd, 0, 0, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// TestRingSeals checks that a client can change neither the size nor the seals of the memory that the daemon
// passed to it.
func TestRingSeals(t *testing.T) {
	sq, _ := newSQ(t, 4, 1, 0)
	rq, _ := newRQ(t, 4, 1)
	cq, _ := newCQ(t, 1, 4)
	d, _, _ := newBells(t, 64)
	for name, f := range map[string]*file{"SQ": &sq.file, "RQ": &rq.file, "CQ": &cq.gen.Load().file, "doorbells": &d.file} {
		for _, size := range []int64{0, int64(len(f.mem)) - 4096, int64(len(f.mem)) + 4096} {
			if err := unix.Ftruncate(f.FD(), size); !errors.Is(err, unix.EPERM) {
				t.Errorf("%s: truncated to %d: %v", name, size, err)
			}
		}
		if _, err := unix.FcntlInt(uintptr(f.FD()), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: sealed further: %v", name, err)
		}
		if err := unix.Fallocate(f.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(f.mem))); err != nil {
			t.Errorf("%s: punching a hole: %v", name, err)
		}
		f.mem[len(f.mem)-1] = 1 // a hole is filled again by this store; it does not fault
	}
}

// TestAttachRefuses checks that a client takes only a consistent layout.
func TestAttachRefuses(t *testing.T) {
	const sizes = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if _, err := MapSQ(testMemfd(t, 8192, 0)); !errors.Is(err, ErrMemory) {
		t.Errorf("no seals: %v", err)
	}
	if _, err := MapSQ(testMemfd(t, 8192, sizes)); !errors.Is(err, ErrLayout) {
		t.Errorf("zeros: %v", err)
	}
	if _, err := MapSQ(testMemfd(t, 100, sizes)); !errors.Is(err, ErrLayout) {
		t.Errorf("shorter than the header: %v", err)
	}
	if _, err := MapSQ(-1); err == nil {
		t.Error("no descriptor")
	}
	sq, _ := newSQ(t, 4, 2, 64)
	if _, err := MapRQ(sq.FD()); !errors.Is(err, ErrLayout) {
		t.Errorf("an SQ as RQ: %v", err)
	}
	if _, err := MapCQ(sq.FD()); !errors.Is(err, ErrLayout) {
		t.Errorf("an SQ as CQ: %v", err)
	}
	if _, err := MapDoorbells(sq.FD(), -1); !errors.Is(err, ErrLayout) {
		t.Errorf("an SQ as doorbells: %v", err)
	}
	const many = 2 * MaxEntries
	one := ringSize(1, CQESize)
	for name, h := range map[string]header{
		"no ring":            {kind: KindCQ, entries: 4, stride: CQESize},
		"rings of 0 bytes":   {kind: KindCQ, entries: 4, stride: CQESize, rings: 1},
		"too many rings":     {kind: KindCQ, entries: 1, stride: CQESize, rings: MaxWorkers + 1, ringSize: one},
		"no entries":         {kind: KindCQ, stride: CQESize, rings: 1, ringSize: ringSize(0, CQESize)},
		"three entries":      {kind: KindCQ, entries: 3, stride: CQESize, rings: 1, ringSize: ringSize(3, CQESize)},
		"too many entries":   {kind: KindSQ, entries: many, stride: 128, rings: 1, ringSize: ringSize(many, 128), maxSGE: 4},
		"a longer ring":      {kind: KindCQ, entries: 4, stride: CQESize, rings: 1, ringSize: 3 * 4096},
		"two SQs":            {kind: KindSQ, entries: 4, stride: 128, rings: 2, ringSize: ringSize(4, 128), maxSGE: 4},
		"two RQs":            {kind: KindRQ, entries: 4, stride: 128, rings: 2, ringSize: ringSize(4, 128), maxSGE: 4},
		"two bell pages":     {kind: KindDoorbells, entries: 64, rings: 2, ringSize: PageSize},
		"65 bells":           {kind: KindDoorbells, entries: 65, rings: 1, ringSize: PageSize},
		"too many bells":     {kind: KindDoorbells, entries: MaxBells + 64, rings: 1, ringSize: PageSize},
		"long bells":         {kind: KindDoorbells, entries: 64, rings: 1, ringSize: 2 * PageSize},
		"RQ with other WQEs": {kind: KindRQ, entries: 4, stride: 64, rings: 1, ringSize: ringSize(4, 64), maxSGE: 4},
		"SQ with other WQEs": {kind: KindSQ, entries: 4, stride: 64, rings: 1, ringSize: ringSize(4, 64), maxSGE: 4},
		"CQ with other CQEs": {kind: KindCQ, entries: 4, stride: 128, rings: 1, ringSize: ringSize(4, 128)},
	} {
		if h.valid(HeaderSize + h.rings*h.ringSize) {
			t.Errorf("%s: valid", name)
		}
	}
	good := header{kind: KindCQ, entries: 4, stride: CQESize, rings: 1, ringSize: ringSize(4, CQESize)}
	for _, field := range []int{-1, HdrMagic, HdrVersion} {
		fd := testMemfd(t, int64(HeaderSize+good.ringSize), sizes)
		b := make([]byte, HeaderSize)
		good.put(b)
		if field >= 0 {
			b[field]++
		}
		if _, err := unix.Pwrite(fd, b, 0); err != nil {
			t.Fatal(err)
		}
		if c, err := MapCQ(fd); err == nil {
			c.Close()
		} else if field < 0 || !errors.Is(err, ErrLayout) {
			t.Errorf("field %d changed: %v", field, err)
		}
	}
	// Flip each bit of each field of each kind: a layout that is taken must have its rings inside the memory.
	rng := testenv.Rand(t)
	cq, _ := newCQ(t, 2, 4)
	bells, _, _ := newBells(t, 64)
	for _, f := range []*file{&sq.file, &cq.gen.Load().file, &bells.file} {
		good := bytes.Clone(f.mem[:64])
		for range 2000 {
			i := rng.IntN(40)
			f.mem[i] ^= 1 << rng.IntN(8)
			if p, err := MapSQ(f.FD()); err == nil {
				if HeaderSize+RingEntries+p.entries*p.stride > len(p.mem) || p.stride < SQEFixed+max(p.maxSGE*SGESize, p.maxInline) {
					t.Fatalf("mapped %d entries of %d in %d bytes", p.entries, p.stride, len(p.mem))
				}
				p.Close()
			}
			if c, err := MapCQ(f.FD()); err == nil {
				c.Close()
			}
			if d, err := MapDoorbells(f.FD(), -1); err == nil {
				d.Close()
			}
			if rng.IntN(3) == 0 {
				copy(f.mem, good)
			}
		}
		copy(f.mem, good)
	}
}

func TestMapRegion(t *testing.T) {
	fd := testMemfd(t, 3*4096, 0)
	r, err := MapRegion(fd, 4096+16, 4096, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Bytes()) != 4096 || cap(r.Bytes()) != 4096 {
		t.Errorf("%d bytes, room for %d", len(r.Bytes()), cap(r.Bytes()))
	}
	copy(r.Bytes(), "shared")
	b := make([]byte, 6)
	if _, err := unix.Pread(fd, b, 4096+16); err != nil || string(b) != "shared" {
		t.Errorf("in the memfd: %q, %v", b, err)
	}
	if err := unix.Ftruncate(fd, 0); err != nil { // works, since it was not sealed
		t.Error(err)
	}
	if !faults(func() { r.Bytes()[0]++ }) {
		t.Error("no fault in memory that was cut off")
	}
	if err := r.Close(); err != nil || r.Bytes() != nil || r.Close() != nil {
		t.Errorf("Close: %v", err)
	}
	// Read-only memory, for a region without any write access.
	ro := testMemfd(t, 4096, unix.F_SEAL_WRITE)
	if r, err = MapRegion(ro, 0, 4096, false); err != nil {
		t.Errorf("write-sealed, read-only: %v", err)
	} else {
		r.Close()
	}
	// The same with a descriptor that is open for reading only.
	sealed := testMemfd(t, 4096, unix.F_SEAL_SHRINK)
	rdonly, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", sealed), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(rdonly)
	if r, err := MapRegion(rdonly, 0, 4096, false); err != nil {
		t.Errorf("read-only descriptor: %v", err)
	} else {
		r.Close()
	}
	if r, err := MapRegion(rdonly, 0, 4096, true); err == nil {
		t.Error("a read-only descriptor was mapped for writing")
		r.Close()
	}
}

// TestMapRegionWhileStuck checks that a client that holds the lock of its memfd, by a write(2) from a page that
// never arrives, delays neither its registration nor its end.
func TestMapRegionWhileStuck(t *testing.T) {
	fd := testMemfd(t, 2*4096, 0)
	stickIn(t, unix.SYS_WRITE, fd, stuckPage(t))
	done := make(chan error, 1)
	go func() {
		if !IsMemfd(fd) {
			t.Error("not a memfd")
		}
		r, err := MapRegion(fd, 0, 4096, true)
		if err == nil {
			err = r.Close()
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

// TestMapRegionSparse checks that a client's memfd may be as large as its address space, with each page at the offset
// of its address.
func TestMapRegionSparse(t *testing.T) {
	for _, off := range []int64{1 << 47, 1<<56 - 4096} {
		fd, err := unix.MemfdCreate("sparse", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Ftruncate(fd, 1<<56); err != nil { // sparse, unlike the one of testMemfd
			t.Fatal(err)
		}
		if _, err := unix.Pwrite(fd, []byte("page"), off); err != nil {
			t.Fatal(err)
		}
		r, err := MapRegion(fd, uint64(off), 4096, true)
		if err != nil {
			t.Errorf("offset %#x: %v", off, err)
			continue
		}
		if string(r.Bytes()[:4]) != "page" {
			t.Errorf("offset %#x holds %q", off, r.Bytes()[:4])
		}
		r.Close()
	}
}

func TestMapRegionRefuses(t *testing.T) {
	const page = 4096
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(page); err != nil {
		t.Fatal(err)
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zero.Close()
	pr, pw, err := NewChannel()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(pr, pw)
	tests := []struct {
		name      string
		fd        int
		off, size uint64
		write     bool
	}{
		{"empty", testMemfd(t, page, 0), 0, 0, true},
		{"past the end", testMemfd(t, page, 0), 0, page + 1, true},
		{"past the end within a page", testMemfd(t, page/2, 0), 0, page/2 + 1, true},
		{"offset past the end", testMemfd(t, page, 0), page, 1, true},
		{"sum past the end", testMemfd(t, page, 0), page - 1, 2, true},
		{"overflow", testMemfd(t, page, 0), 1<<63 - 1, 1<<63 - 1, true},
		{"wrap", testMemfd(t, page, 0), 1<<64 - 1, 2, true},
		{"no further seals", testMemfd(t, page, unix.F_SEAL_SEAL), 0, page, true},
		{"write-sealed", testMemfd(t, page, unix.F_SEAL_WRITE), 0, page, true},
		{"sealed against future writes", testMemfd(t, page, unix.F_SEAL_FUTURE_WRITE), 0, page, true},
		{"a file", int(file.Fd()), 0, page, true},
		{"a device", int(zero.Fd()), 0, page, true},
		{"a pipe", pr, 0, page, true},
		{"no descriptor", -1, 0, page, true},
		{"far too large", testMemfd(t, page, 0), 0, 1 << 50, true},
		{"negative as an int64", testMemfd(t, page, 0), 0, 1<<64 - page, true},
	}
	for _, tt := range tests {
		if r, err := MapRegion(tt.fd, tt.off, tt.size, tt.write); !errors.Is(err, ErrMemory) {
			t.Errorf("%s: %v", tt.name, err)
			if err == nil {
				r.Close()
			}
		}
	}
	// A seal against growth alone is allowed, and so is a memfd that the client has sealed.
	for _, seals := range []int{unix.F_SEAL_GROW, unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL} {
		r, err := MapRegion(testMemfd(t, page, seals), 0, page, true)
		if err != nil {
			t.Errorf("seals %#x: %v", seals, err)
			continue
		}
		r.Close()
	}
	if fd, err := unix.MemfdCreate("huge", unix.MFD_HUGETLB|unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC); err == nil {
		defer unix.Close(fd)
		if err := unix.Ftruncate(fd, 1<<30); err != nil {
			t.Fatal(err)
		}
		if r, err := MapRegion(fd, 0, page, true); !errors.Is(err, ErrMemory) {
			t.Errorf("huge pages: %v", err)
			if err == nil {
				r.Close()
			}
		}
	}
}

// allocated returns how many bytes of a memfd are allocated.
func allocated(t *testing.T, fd int) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func punch(t *testing.T, fd int, off, n int64) {
	t.Helper()
	if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n); err != nil {
		t.Fatal(err)
	}
}

var sink byte // sink keeps the compiler from removing reads.

// faults reports whether touch is a memory fault.
func faults(touch func()) (fault bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { fault = recover() != nil }()
	touch()
	return false
}

// TestMapRegionHoles checks that the daemon never allocates memory of a client: it refuses a region with a hole,
// and takes a fault for a hole that is made later.
func TestMapRegionHoles(t *testing.T) {
	const page, pages = 4096, 8
	if err := Guarded(); err != nil {
		t.Fatal(err)
	}
	for hole := range int64(pages) {
		for _, write := range []bool{true, false} {
			fd := testMemfd(t, pages*page, 0)
			punch(t, fd, hole*page, page)
			r, err := MapRegion(fd, 100, pages*page-200, write)
			if !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "MADV_POPULATE_WRITE") {
				t.Errorf("hole at page %d, write %v: %v", hole, write, err)
			}
			if err == nil {
				r.Close()
			}
			if n := allocated(t, fd); n != (pages-1)*page {
				t.Errorf("hole at page %d, write %v: %d bytes allocated", hole, write, n)
			}
		}
	}
	for _, write := range []bool{true, false} {
		fd := testMemfd(t, pages*page, 0)
		r, err := MapRegion(fd, 0, pages*page, write)
		if err != nil {
			t.Fatal(err)
		}
		b := r.Bytes()
		punch(t, fd, page, page)
		if !faults(func() { sink = b[page+7] }) {
			t.Errorf("write %v: a hole was read", write)
		}
		if write && !faults(func() { b[page] = 1 }) {
			t.Error("a hole was written")
		}
		if faults(func() { sink = b[2*page] }) {
			t.Errorf("write %v: a page beside the hole is lost", write)
		}
		if n := allocated(t, fd); n != (pages-1)*page {
			t.Errorf("write %v: %d bytes allocated after access to the hole", write, n)
		}
		// A client that fills the hole again can use the memory.
		if _, err := unix.Pwrite(fd, []byte("new"), page); err != nil {
			t.Fatal(err)
		}
		if string(b[page:page+3]) != "new" {
			t.Errorf("write %v: %q", write, b[page:page+3])
		}
		r.Close()
	}
}

// TestIncore checks how holes are found where there is no userfaultfd. That way counts only pages that were
// written.
func TestIncore(t *testing.T) {
	const pages = mincoreChunk + 5
	m, err := CreateRegion(pages * 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if !incore(m.data) {
		t.Error("a region that is allocated has holes")
	}
	for _, hole := range []int64{0, 4, mincoreChunk - 1, mincoreChunk, pages - 1} {
		punch(t, m.FD(), hole*4096, 4096)
		if incore(m.data) {
			t.Errorf("the hole at page %d was not found", hole)
		}
		if err := Populate(m.data[hole*4096+5 : (hole+1)*4096-5]); err != nil || !incore(m.data) {
			t.Errorf("Populate of page %d: %v", hole, err)
		}
	}
}

// TestPopulate checks that memory that is mapped for reading is allocated too.
func TestPopulate(t *testing.T) {
	fd, err := memfd("test")
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 3*4096); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, 3*4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	for _, end := range []int{8192, 8193} { // the end of a page, and a byte of the next one
		if err := Populate(mem[4000:end]); err != nil || allocated(t, fd) != int64(roundPages(end)) {
			t.Errorf("to %d: %v, %d bytes allocated", end, err, allocated(t, fd))
		}
	}
	r, err := MapRegion(fd, 4000, 4192, false)
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
}

func TestCreateRegion(t *testing.T) {
	m, err := CreateRegion(10000)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r, err := MapRegion(m.FD(), 0, 10000, true)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	r.Bytes()[9999] = 7
	if m.Bytes()[9999] != 7 {
		t.Error("two memories")
	}
	if err := unix.Ftruncate(m.FD(), 4096); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncated: %v", err)
	}
	for _, size := range []int{0, -1, maxRegion + 1} {
		if _, err := CreateRegion(size); !errors.Is(err, ErrMemory) {
			t.Errorf("region of %d bytes: %v", size, err)
		}
	}
}
