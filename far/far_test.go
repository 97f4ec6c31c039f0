package far

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/spin"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/verbs"
)

func TestMain(m *testing.M) {
	if os.Getenv("FAR_TEST_CHILD") != "" {
		fmt.Println("ready")
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	testenv.Main(m)
}

func openMem(t *testing.T, name string, flags int) int {
	t.Helper()
	fd, err := unix.Open(name, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// own is the memory of this process.
func own(t *testing.T) *Memory {
	t.Helper()
	mem, err := Open(openMem(t, "/proc/self/mem", unix.O_RDWR), os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

// private maps n bytes that the garbage collector does not know.
func private(t *testing.T, n int) ([]byte, uint64) {
	t.Helper()
	b := testenv.Mmap(t, n, unix.PROT_READ|unix.PROT_WRITE)
	return b, uint64(uintptr(unsafe.Pointer(&b[0])))
}

// newQueue starts a Mover over mem. moved gets a value when something was moved.
func newQueue(t *testing.T, mem *Memory, bound time.Duration, onStuck func()) (m *Mover, q *Queue, moved chan struct{}) {
	t.Helper()
	m, moved = New(bound, onStuck), make(chan struct{}, 1)
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.Close()
		mem.Close()
	})
	q = m.NewQueue()
	q.Notify(func() {
		select {
		case moved <- struct{}{}:
		default:
		}
	})
	return m, q, moved
}

func await(t *testing.T, moved chan struct{}, what string, done func() bool) {
	t.Helper()
	late := time.After(time.Minute)
	for !done() {
		select {
		case <-moved:
		case <-late:
			t.Fatalf("within a minute not: %s", what)
		}
	}
}

func TestMover(t *testing.T) {
	const n = 300_000
	mem := own(t)
	b, addr := private(t, n)
	m, q, moved := newQueue(t, mem, time.Minute, func() { t.Error("stuck") })
	want := make([]byte, n)
	for i := range want {
		want[i] = byte(i * i >> 5)
	}
	for i := 0; i < n; i += 1448 {
		q.Store(mem, addr+uint64(i), uint32(min(1448, n-i)), marked.Bytes{B: want[i:]})
	}
	m.Kick()
	const stores = (n + 1447) / 1448
	await(t, moved, "everything is stored", func() bool {
		done, failed := q.Stored()
		return done == stores && failed == 0
	})
	m.mu.Lock()
	if !bytes.Equal(b, want) || q.Backlog() != 0 || m.storing.Load() != 0 || q.cur != nil {
		t.Errorf("stored other bytes, or a backlog of %d, %d in use, a block for more: %v",
			q.Backlog(), m.storing.Load(), q.cur != nil)
	}
	m.mu.Unlock()

	var got []byte
	for i := 0; i < n; i += verbs.MaxFetch {
		f := q.Fetch(mem, addr+uint64(i), uint32(min(verbs.MaxFetch, n-i)))
		m.Kick()
		await(t, moved, "bytes are fetched", func() bool {
			b, ok := f.Bytes()
			return b != nil || !ok
		})
		b, _ := f.Bytes()
		got = append(got, b...)
		f.Release()
	}
	if !bytes.Equal(got, want) || m.fetched != 0 {
		t.Errorf("fetched other bytes, or %d are in use", m.fetched)
	}
	allocs := testing.AllocsPerRun(100, func() {
		q.Store(mem, addr, 1000, marked.Bytes{B: want})
		f := q.Fetch(mem, addr, 1000)
		m.Fence(nil)
		f.Release()
	})
	if allocs > 3 { // of Fence
		t.Errorf("%v allocations", allocs)
	}
}

// A Store to memory that is not there fails, and those after it go on. So does a Fetch.
func TestMoverFails(t *testing.T) {
	mem := own(t)
	b, addr := private(t, 4096)
	m, q, _ := newQueue(t, mem, time.Minute, func() {})
	q.Store(mem, addr, 4, marked.Bytes{B: []byte("good")})
	q.Store(mem, 64, 4, marked.Bytes{B: []byte("lost")})
	q.Store(mem, addr+8, 4, marked.Bytes{B: []byte("also")})
	f := q.Fetch(mem, 64, 4)
	m.Fence(nil)
	if done, failed := q.Stored(); done != 3 || failed != 2 || string(b[:4])+string(b[8:12]) != "goodalso" {
		t.Errorf("%d stored, the first that failed is %d", done, failed)
	}
	if _, ok := f.Bytes(); ok {
		t.Error("bytes were fetched that are not there")
	}
	f.Release()
	// The first of all that fail counts, also of those that are made as one.
	late := make(slow)
	q.Store(late, 0, 1, marked.Bytes{B: []byte{7}})
	m.Kick()
	waitBusy(t, m)
	other := m.NewQueue()
	for _, at := range []uint64{64, 66, 128} {
		other.Store(mem, at, 2, marked.Bytes{B: []byte("no")})
	}
	close(late)
	m.Fence(nil)
	if done, failed := other.Stored(); done != 3 || failed != 1 {
		t.Errorf("%d of three stored, the first that failed is %d", done, failed)
	}
}

// TestFence checks that a Fence waits for the operation in progress, and for none that is never made.
func TestFence(t *testing.T) {
	mem := make(slow)
	m, q, _ := newQueue(t, own(t), time.Hour, func() {})
	q.Store(mem, 0, 1, marked.Bytes{B: []byte{7}})
	m.Kick()
	waitBusy(t, m)
	fence := func(m *Mover) <-chan struct{} {
		over := make(chan struct{})
		go func() {
			defer close(over)
			m.Fence(nil)
		}()
		return over
	}
	over := fence(m)
	testenv.Until(t, "the Fence waits", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.ops) == 1
	})
	close(mem)
	<-over
	closed := New(time.Hour, func() {})
	if err := closed.Start(); err != nil {
		t.Fatal(err)
	}
	closed.Close()
	closed.NewQueue().Store(mem, 0, 1, marked.Bytes{B: []byte{7}})
	select {
	case <-fence(closed):
	case <-time.After(time.Minute):
		t.Error("a Fence waits for a Mover that is closed")
	}
}

// slow is memory that does not come until it is closed.
type slow chan struct{}

func (s slow) read([]byte, uint64) error {
	<-s
	return nil
}

func (s slow) write([]byte, uint64) error {
	<-s
	return nil
}

// Memory that does not come: the Mover says so, takes a bounded amount of data, and goes on when the memory comes.
func TestStuck(t *testing.T) {
	mem, stuck := make(slow), make(chan struct{})
	m, q, moved := newQueue(t, own(t), 10*time.Millisecond, sync.OnceFunc(func() { close(stuck) }))
	q.Store(mem, 0, 1, marked.Bytes{B: []byte{7}})
	m.Kick()
	select {
	case <-stuck:
	case <-time.After(time.Minute):
		t.Fatal("the Mover does not say that it is stuck")
	}
	m.look()       // as if one more operation took too long
	m.Fence(stuck) // it does not wait
	for range storeLimit/blockSize + 2 {
		q.Store(mem, 0, blockSize, marked.Bytes{B: make([]byte, blockSize)})
	}
	if !q.Crowded() {
		t.Error("the client is not crowded")
	}
	var fetches []verbs.Fetch
	for f := q.Fetch(mem, 0, verbs.MaxFetch); f != nil; f = q.Fetch(mem, 0, verbs.MaxFetch) {
		fetches = append(fetches, f)
	}
	if len(fetches) != fetchLimit/blockSize {
		t.Errorf("%d fetches", len(fetches))
	}
	close(mem)
	await(t, moved, "the client is not crowded any more", func() bool { return !q.Crowded() })
	testenv.Until(t, "the fetches", func() bool { b, _ := fetches[len(fetches)-1].Bytes(); return b != nil })
	for _, f := range fetches {
		f.Release()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if kept := len(m.free[0])*smallBlock + len(m.free[1])*blockSize; m.blocks != kept || kept != Limit {
		t.Errorf("%d bytes of blocks are counted, %d kept, and the limit is %d", m.blocks, kept, Limit)
	}
}

// waitBusy waits until the last operation is in progress.
func waitBusy(t *testing.T, m *Mover) {
	t.Helper()
	testenv.Until(t, "the last operation is in progress", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.busy && len(m.ops) == 0
	})
}

// TestFetchWaits checks that a queue whose Fetch found no memory is notified when another Fetch is released, and that
// the memory of one that is released while it is in progress is in use until it ends.
func TestFetchWaits(t *testing.T) {
	mem := make(slow)
	m, q, _ := newQueue(t, own(t), time.Minute, func() {})
	o, notified := m.NewQueue(), make(chan struct{}, 1)
	o.Notify(func() { notified <- struct{}{} })
	var fetches []verbs.Fetch
	for f := q.Fetch(mem, 0, smallBlock); f != nil; f = q.Fetch(mem, 0, smallBlock) {
		fetches = append(fetches, f)
	}
	if len(fetches) != fetchLimit/smallBlock {
		t.Errorf("%d fetches", len(fetches))
	}
	waits := func() {
		t.Helper()
		if o.Fetch(mem, 0, 1) != nil {
			t.Fatal("a Fetch found memory above the limit")
		}
	}
	notify := func(after string) {
		t.Helper()
		select {
		case <-notified:
		case <-time.After(time.Minute):
			t.Fatal("not notified after " + after)
		}
	}
	m.Kick()
	mem <- struct{}{}
	waits()
	fetches[0].Release()
	notify("a release")
	q.Fetch(mem, 0, 1).Release() // it waits for its turn, with its memory
	waits()
	close(mem)
	notify("the end of a released Fetch")
	m.Fence(nil)
	for _, f := range fetches[1:] {
		f.Release()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fetched != 0 || len(m.waiting) != 0 || len(o.waits) != 0 ||
		len(m.free[0]) != len(fetches) || len(m.free[1]) != 0 {
		t.Errorf("%d bytes in use, %d queues wait, %d small and %d large blocks are free",
			m.fetched, len(m.waiting), len(m.free[0]), len(m.free[1]))
	}
}

// A probe is memory whose reads move the calling thread to a CPU, and report its number and time slice.
type probe struct {
	cpu  unix.CPUSet
	seen chan thread
}

type thread struct {
	id    int
	slice time.Duration
}

func (p *probe) read([]byte, uint64) error {
	a, err := unix.SchedGetAttr(0, 0)
	if err == nil {
		err = unix.SchedSetaffinity(0, &p.cpu)
		p.seen <- thread{unix.Gettid(), time.Duration(a.Runtime)}
	}
	return err
}

func (p *probe) write([]byte, uint64) error { return nil }

// TestContended checks that a Mover does not yield before it sleeps while yields take long: each would unlock it for a thread on its CPU.
func TestContended(t *testing.T) {
	m := New(time.Minute, func() { t.Error("stuck") })
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(bell)
	m.bell = bell
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if allowed.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	ready, asleep, over := make(chan struct{}), make(chan bool, 1), make(chan struct{})
	m.mu.Lock()
	go func() {
		runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
		_ = unix.SchedSetaffinity(0, &one)
		m.others.Yielded(time.Second, clock.Now().Add(time.Hour))
		go func() {
			runtime.LockOSThread()
			_ = unix.SchedSetaffinity(0, &one)
			close(ready)
			for !m.mu.TryLock() {
			}
			asleep <- m.asleep.Load()
			m.closed = true
			m.mu.Unlock()
			m.wakeUp()
		}()
		<-ready
		m.sleep()
		m.mu.Unlock()
		close(over)
	}()
	if !<-asleep {
		t.Error("it yields")
	}
	<-over
}

// TestContention checks that a Mover whose CPU is shared with a thread that does not yield has a short time slice. Its thread
// ends with it.
func TestContention(t *testing.T) {
	if a, err := unix.SchedGetAttr(0, 0); err != nil || a.Runtime == 0 {
		testenv.Skip(t, "the kernel has no slices of threads (before Linux 6.12)")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4)) // also where there is one CPU: the thread below never gives its place away
	p := &probe{seen: make(chan thread, 1)}
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; p.cpu.Count() == 0; cpu++ {
		if allowed.IsSet(cpu) {
			p.cpu.Set(cpu)
		}
	}
	var over atomic.Bool
	defer over.Store(true)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
		_ = unix.SchedSetaffinity(0, &p.cpu)
		for !over.Load() {
		}
	}()
	m := New(time.Minute, func() { t.Error("stuck") })
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	q := m.NewQueue()
	var th thread
	testenv.Until(t, "a short time slice", func() bool {
		f := q.Fetch(p, 0, 1)
		m.Fence(nil)
		f.Release()
		th = <-p.seen
		return th.slice == spin.ShortSlice
	})
	m.Close()
	if th.id == os.Getpid() {
		return // Go parks the first thread instead of ending it
	}
	testenv.Until(t, "the thread has ended", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", th.id))
		return errors.Is(err, os.ErrNotExist)
	})
}

// TestBarrier checks that a Barrier ends after the earlier operations of all queues, and is none if there are none.
func TestBarrier(t *testing.T) {
	mem := make(slow)
	m, q, moved := newQueue(t, own(t), time.Hour, func() {})
	if q.Barrier() {
		t.Error("a Barrier of a Mover that has nothing to do")
	}
	other := m.NewQueue()
	other.Store(mem, 0, 1, marked.Bytes{B: []byte{7}})
	if !q.Barrier() {
		t.Fatal("no Barrier")
	}
	m.Kick()
	testenv.Until(t, "the Store is in progress", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.busy
	})
	if done, _ := q.Stored(); done != 0 {
		t.Error("it has ended before the Store of another queue")
	}
	close(mem)
	await(t, moved, "the Barrier has ended", func() bool { done, _ := q.Stored(); return done == 1 })
	if done, failed := other.Stored(); done != 1 || failed != 0 {
		t.Errorf("%d Stores, of which %d has failed", done, failed)
	}
}

// TestStandstill checks that a look alone, which comes late if the process has stood still, does not end a client.
func TestStandstill(t *testing.T) {
	mem, stuck := make(slow), 0
	m, q, moved := newQueue(t, own(t), time.Hour, func() { stuck++ })
	for n := range 3 {
		q.Store(mem, uint64(2*n), 1, marked.Bytes{B: []byte{7}})
	}
	m.Kick()
	for n := range 3 {
		mem <- struct{}{}
		await(t, moved, "a Store", func() bool { done, _ := q.Stored(); return done == uint64(n+1) })
		m.look()
	}
	idle := func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return !m.busy
	}
	testenv.Until(t, "the Mover is idle", idle)
	for range 3 {
		m.look()
	}
	for n := range 2 { // a look at each of two operations, which have nothing to do with each other
		q.Store(mem, 0, 1, marked.Bytes{B: []byte{7}})
		m.Kick()
		waitBusy(t, m)
		m.look()
		mem <- struct{}{}
		await(t, moved, "a Store", func() bool { done, _ := q.Stored(); return done == uint64(n+4) })
		testenv.Until(t, "the Mover is idle", idle)
	}
	if stuck != 0 {
		t.Error("a Mover that works, or has nothing to do, is stuck")
	}
	m.dog.Stop() // as if it had ended, since nothing was in progress
	q.Store(mem, 0, 1, marked.Bytes{B: []byte{7}})
	m.Kick()
	waitBusy(t, m)
	if !m.dog.Stop() { // it was not running
		t.Error("no watchdog runs while an operation is in progress")
	}
	for look := range 2 {
		if m.look(); stuck != look {
			t.Errorf("after look %d: stuck %d times", look+1, stuck)
		}
	}
	close(mem)
}

// TestStoreFault checks that a Store whose source faults does not count, and that its memory is used again, also by another
// queue.
func TestStoreFault(t *testing.T) {
	mem := own(t)
	b, addr := private(t, 2*blockSize)
	m, q, _ := newQueue(t, mem, time.Minute, func() {})
	source, _ := private(t, 2*blockSize)
	if err := unix.Mprotect(source[blockSize:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	faults := func(q *Queue, p []byte) (did bool) {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() { did = recover() != nil }()
		q.Store(mem, addr, uint32(len(p)), marked.Bytes{B: p})
		return false
	}
	for _, q := range []*Queue{q, q, m.NewQueue(), m.NewQueue(), m.NewQueue()} {
		for _, p := range [][]byte{source[blockSize:], source} { // at once, and after a block
			if !faults(q, p) {
				t.Fatal("this tests nothing")
			}
			m.Fence(nil)
		}
	}
	if done, _ := q.Stored(); done != 0 || q.Backlog() != 0 || m.storing.Load() != 0 {
		t.Errorf("%d stored, a backlog of %d, %d bytes in use", done, q.Backlog(), m.storing.Load())
	}
	q.Store(mem, addr, 4, marked.Bytes{B: []byte("good")})
	m.Fence(nil)
	if done, failed := q.Stored(); done != 1 || failed != 0 || string(b[:4]) != "good" || m.blocks > 2*blockSize {
		t.Errorf("after that %d are stored, the first that failed is %d, %d bytes of blocks", done, failed, m.blocks)
	}
}

// TestExtend checks which Stores become one operation.
func TestExtend(t *testing.T) {
	mem, other := make(slow), make(slow)
	m, q, _ := newQueue(t, own(t), time.Minute, func() {})
	q.Store(mem, 0, 1, marked.Bytes{B: []byte{1}})
	m.Kick()
	waitBusy(t, m)
	q2 := m.NewQueue()
	for _, tt := range []struct {
		name string
		q    *Queue
		mem  slow
		addr uint64
		ops  int
	}{
		{"after one in progress", q, mem, 1, 1},
		{"next to it", q, mem, 2, 1},
		{"elsewhere", q, mem, 9, 2},
		{"in other memory", q, other, 10, 3},
		{"next to that", q, other, 11, 3},
		{"of another queue", q2, other, 12, 4},
	} {
		tt.q.Store(tt.mem, tt.addr, 1, marked.Bytes{B: []byte{1}})
		m.mu.Lock()
		if len(m.ops) != tt.ops {
			t.Errorf("%s: %d operations wait, want %d", tt.name, len(m.ops), tt.ops)
		}
		m.mu.Unlock()
	}
	if want := int64(2*blockSize + 5*storeCost); m.storing.Load() != want {
		t.Errorf("%d bytes are charged, want %d", m.storing.Load(), want)
	}
	close(mem)
	close(other)
	m.Fence(nil)
	if done, _ := q.Stored(); done != 6 {
		t.Errorf("%d stored", done)
	}
}

// TestTinyStores checks that Stores of single bytes to scattered addresses crowd the client
// before their operations take more memory than it is charged for.
func TestTinyStores(t *testing.T) {
	if size := unsafe.Sizeof(op{}); 2*size > storeCost {
		t.Errorf("an operation has %d bytes, two of them more than %d", size, storeCost)
	}
	mem := make(slow)
	m, q, moved := newQueue(t, own(t), time.Minute, func() {})
	n := 0
	for ; !q.Crowded(); n++ {
		if n > storeLimit/storeCost {
			t.Fatalf("the client is not crowded after %d stores", n)
		}
		q.Store(mem, uint64(2*n), 1, marked.Bytes{B: []byte{1}})
	}
	m.Kick()
	others := make([]*Queue, 100)
	for i := range others {
		others[i] = m.NewQueue()
		others[i].Notify(func() {})
	}
	for range 2 {
		for _, o := range others {
			o.Crowded()
		}
	}
	m.mu.Lock()
	waiting := len(m.crowd)
	m.mu.Unlock()
	if waiting != len(others)+1 {
		t.Errorf("%d queues wait, %d are crowded", waiting, len(others)+1)
	}
	close(mem)
	await(t, moved, "all is stored", func() bool { done, _ := q.Stored(); return done == uint64(n) })
	q.Store(mem, 0, 1, marked.Bytes{B: []byte{1}}) // another batch, before which the memory of the last one is freed
	m.Fence(nil)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.storing.Load() != 0 || len(m.crowd) != 0 || m.blocks > Limit || cap(m.ops) > keptOps {
		t.Errorf("%d bytes are charged, %d queues wait, %d bytes of blocks and %d operations are kept", m.storing.Load(), len(m.crowd), m.blocks, cap(m.ops))
	}
}

// TestWait checks that what waits for stores makes the client crowded as they do, and no longer when it waits no more.
func TestWait(t *testing.T) {
	_, q, moved := newQueue(t, own(t), time.Minute, func() {})
	if q.Wait(storeLimit); q.Crowded() {
		t.Error("the client is crowded at the limit")
	}
	if q.Wait(1); !q.Crowded() {
		t.Error("the client is not crowded above the limit")
	}
	q.Wait(-2)
	select {
	case <-moved:
	case <-time.After(time.Minute):
		t.Error("the queue is not notified")
	}
	if q.Crowded() {
		t.Error("the client stays crowded")
	}
}

// TestWaitLimit checks that what waits takes the place of blocks that are not in use: a client is charged for Limit.
func TestWaitLimit(t *testing.T) {
	m, q, _ := newQueue(t, own(t), time.Minute, func() {})
	mem := make(slow)
	for !q.Crowded() {
		q.Store(mem, 0, blockSize, marked.Bytes{B: make([]byte, blockSize)})
	}
	var fetches []verbs.Fetch
	for f := q.Fetch(mem, 0, blockSize); f != nil; f = q.Fetch(mem, 0, blockSize) {
		fetches = append(fetches, f)
	}
	close(mem)
	m.Fence(nil)
	for _, f := range fetches {
		f.Release()
	}
	q.Wait(storeLimit)
	m.mu.Lock()
	defer m.mu.Unlock()
	used := storeLimit
	for _, free := range m.free {
		for _, b := range free {
			used += len(b.buf)
		}
	}
	if used > Limit {
		t.Errorf("%d bytes are in use", used)
	}
}

// A Mover that is stuck ends when its operation does, and does nothing more.
func TestCloseStuck(t *testing.T) {
	mem := make(slow)
	m := New(time.Minute, func() {})
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	q := m.NewQueue()
	q.Store(mem, 0, 1, marked.Bytes{B: []byte{1}})
	q.Store(mem, 9, 1, marked.Bytes{B: []byte{1}})
	m.Kick()
	waitBusy(t, m)
	closed := make(chan struct{})
	go func() {
		m.Close()
		close(closed)
	}()
	for begun := false; !begun; runtime.Gosched() {
		m.mu.Lock()
		begun = m.closed
		m.mu.Unlock()
	}
	close(mem)
	<-closed
	if done, _ := q.Stored(); done != 1 {
		t.Errorf("%d stored", done)
	}
	if _, err := unix.FcntlInt(uintptr(m.bell), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("its eventfd is open: %v", err)
	}
}

// child starts a process that prints a line and waits, and returns its memory and the ends of its pipes.
func child(t *testing.T, args ...string) (cmd *exec.Cmd, fd int, in io.Writer, out io.Reader) {
	t.Helper()
	cmd = exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "FAR_TEST_CHILD=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := stdout.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	return cmd, openMem(t, fmt.Sprintf("/proc/%d/mem", cmd.Process.Pid), unix.O_RDWR), stdin, stdout
}

// Only the memory of the process as it is now is taken.
func TestOpen(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mem")
	testenv.WriteFile(t, file, make([]byte, 4096), 0o600)
	cmd, other, _, _ := child(t, os.Args[0])
	exited, gone, _, _ := child(t, os.Args[0])
	_ = exited.Process.Kill()
	_ = exited.Wait()
	threads, err := os.ReadDir("/proc/self/task") // the first has the number of the process
	if err != nil {
		t.Fatal(err)
	}
	last := threads[len(threads)-1].Name()
	for _, tt := range []struct {
		name string
		fd   int
		pid  int
		want string
	}{
		{"a file", openMem(t, file, unix.O_RDWR), os.Getpid(), "not a file of procfs"},
		{"another file of procfs", openMem(t, "/proc/self/comm", unix.O_RDWR), os.Getpid(), `named "/proc/`},
		{"a folder of procfs", openMem(t, "/proc/self", unix.O_RDONLY), os.Getpid(), `named "/proc/`},
		{"another process", other, os.Getpid(), "and the client is process"},
		{"an exited process", gone, exited.Process.Pid, "has exited"},
		{"read-only", openMem(t, "/proc/self/mem", unix.O_RDONLY), os.Getpid(), "not open for reading and writing"},
		{"the client's", openMem(t, fmt.Sprintf("/proc/%d/mem", cmd.Process.Pid), unix.O_RDWR), cmd.Process.Pid, ""},
		{"that of a client in another PID namespace", openMem(t, fmt.Sprintf("/proc/%d/mem", cmd.Process.Pid), unix.O_RDWR), 0, ""},
		{"a thread's", openMem(t, "/proc/self/task/"+last+"/mem", unix.O_RDWR), os.Getpid(), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mem, err := Open(tt.fd, tt.pid)
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want == "":
				mem.Close()
			case !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), tt.want):
				t.Errorf("%v; want %q", err, tt.want)
			}
			if tt.want != "" {
				unix.Close(tt.fd)
			}
		})
	}
}

func TestOwnerOf(t *testing.T) {
	for name, want := range map[string]int{
		"/proc/12/mem":           12,
		"/12/mem":                12,
		"/proc/12/task/13/mem":   12,
		"/12/task/13/mem":        12,
		"/proc/12/task/13/comm":  0,
		"/proc/12/comm":          0,
		"/proc/self/mem":         0,
		"/task/13/mem":           0,
		"/mem":                   0,
		"mem":                    0,
		"/proc/12/mem (deleted)": 0,
	} {
		if pid, err := ownerOf(name); pid != want || (err == nil) != (want != 0) || err != nil && !errors.Is(err, ErrMemory) {
			t.Errorf("%s: process %d, %v; want %d", name, pid, err, want)
		}
	}
}

// TestMove checks that move continues after calls that were interrupted or moved a part.
func TestMove(t *testing.T) {
	type result struct {
		n   int
		err error
	}
	for _, tt := range []struct {
		results []result
		want    error
	}{
		{[]result{{-1, unix.EINTR}, {2, nil}, {-1, unix.EINTR}, {3, nil}}, nil},
		{[]result{{4, nil}, {-1, unix.EIO}}, unix.EIO},
		{[]result{{4, nil}, {0, nil}}, errGone},
	} {
		moved, calls := 0, 0
		err := move(7, make([]byte, 5), 100, func(fd int, b []byte, off int64) (int, error) {
			if fd != 7 || len(b) != 5-moved || off != int64(100+moved) {
				t.Errorf("a call for %d bytes at %d after %d are moved", len(b), off, moved)
			}
			r := tt.results[calls]
			calls++
			moved += max(r.n, 0)
			return r.n, r.err
		})
		if err != tt.want || calls != len(tt.results) {
			t.Errorf("%d calls, %v; want %d, %v", calls, err, len(tt.results), tt.want)
		}
	}
}

// A descriptor from before an exec is of memory that is gone.
func TestOpenAfterExec(t *testing.T) {
	// The shell executes the test as a child of ours, with a descriptor of the shell's own memory as 3.
	cmd, before, in, out := child(t, "/bin/sh", "-c", `exec 3<>/proc/$$/mem; echo ready; read x; exec "$0"`, os.Args[0])
	fmt.Fprintln(in)
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(before, cmd.Process.Pid); !errors.Is(err, errGone) {
		t.Errorf("a descriptor from before the exec: %v", err)
	}
	unix.Close(before)
}

// BenchmarkFetch measures how long a worker waits for the four Fetches of a QP, whose bytes it then uses. Like a worker it has a thread of
// its own and yields while it waits.
func BenchmarkFetch(b *testing.B) {
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	mem := &Memory{fd}
	defer mem.Close()
	p := bytes.Repeat([]byte{1}, 4*verbs.MaxFetch)
	m := New(time.Minute, func() { b.Error("stuck") })
	if err := m.Start(); err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	q, to := m.NewQueue(), make([]byte, verbs.MaxFetch)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		var fetches [4]verbs.Fetch
		for i := range fetches {
			fetches[i] = q.Fetch(mem, uint64(uintptr(unsafe.Pointer(&p[i*verbs.MaxFetch]))), verbs.MaxFetch)
		}
		m.Kick()
		for _, f := range fetches {
			got, ok := f.Bytes()
			for ; got == nil && ok; got, ok = f.Bytes() {
				_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
			for range 4 {
				copy(to, got)
			}
			f.Release()
		}
	}
}

// TestNoDescriptor checks that the error of a Mover without a descriptor says what to do.
func TestNoDescriptor(t *testing.T) {
	testenv.FewFiles(t, 0)
	m := New(time.Minute, func() {})
	err := m.Start()
	if !errors.Is(err, unix.EMFILE) || !strings.Contains(err.Error(), "LimitNOFILE") {
		t.Errorf("Start: %v", err)
	}
	m.Close() // it was not started
}
