// Package far accesses memory of a client that the daemon cannot map, through a descriptor of
// the client's /proc/self/mem. Such an access may block for as long as the client wants
// (userfaultfd, FUSE, swap), so a goroutine for each client makes the accesses, never a worker.
package far

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/spin"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// Memory of the daemon that a client's Mover uses, in bytes.
const (
	storeLimit = 8 << 20 // above this the client is Crowded
	fetchLimit = 4 << 20
	// Limit is the maximum memory of a Mover, except for data that arrives in the turn in which
	// it becomes Crowded.
	Limit = storeLimit + fetchLimit

	blockSize  = verbs.MaxFetch
	smallBlock = 4 << 10

	// storeCost is the memory of a Store's operation in addition to its bytes. A peer may send
	// single bytes to scattered addresses.
	storeCost = 192
	// keptOps is the longest list of operations that is kept for reuse.
	keptOps = 4096

	idleYields = 32 // some 10 us if no other thread wants the CPU
)

// A Mover moves data between the queue pairs of a client and its far memory, one operation
// after another.
type Mover struct {
	bound   time.Duration
	onStuck func()
	over    chan struct{} // closed when the goroutine has ended; nil before it is started

	bell   int         // eventfd on which the goroutine sleeps
	asleep atomic.Bool // it sleeps, or is about to
	posted atomic.Bool // operations were added since the last Kick
	others spin.Contention

	mu      sync.Mutex
	ops     []op
	closed  bool
	busy    bool
	beats   uint64 // number of completed operations
	seen    uint64 // beats at the last look of the watchdog
	still   bool   // and they had not changed since the one before
	dog     *time.Timer
	free    [2][]*block // unused blocks: small ones, large ones
	blocks  int         // bytes of all blocks, and of Wait
	fetched int         // bytes of blocks of Fetches in use
	waiting []*Queue    // queues of Fetches that found no memory

	storing atomic.Int64 // bytes of blocks in use by Stores, of their operations, and of Wait
	crowd   []*Queue     // queues to notify when the client is no longer crowded; guarded by mu
}

// op is an operation: a Store of b[off:off+n], a Fetch into b, a fence, or a Store of nothing, without b.
type op struct {
	q      *Queue
	mem    memory
	addr   uint64
	b      *block
	off, n int
	stores uint64 // number of Stores that end with this operation
	fetch  bool
	fence  chan struct{}
}

// New returns a Mover whose goroutine Start will start. onStuck is called if an operation takes
// longer than bound, at the latest after one and a half times bound.
func New(bound time.Duration, onStuck func()) *Mover { return &Mover{bound: bound, onStuck: onStuck} }

// Start starts the goroutine. It must succeed once, before the first operation.
func (m *Mover) Start() error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("far: eventfd: %w", shm.Limit(err))
	}
	m.bell, m.over = fd, make(chan struct{})
	go m.run()
	return nil
}

// Fence returns when all earlier operations have completed, or never will because the Mover is
// closed, or when quit is closed: however little each operation is late, all may take hours.
func (m *Mover) Fence(quit <-chan struct{}) {
	done := make(chan struct{})
	m.mu.Lock()
	idle := m.idle()
	if !idle {
		m.ops = append(m.ops, op{fence: done})
	}
	m.mu.Unlock()
	if idle {
		return
	}
	m.wakeUp()
	select {
	case <-done:
	case <-m.over:
	case <-quit:
	}
}

// idle reports whether all operations have completed. Called with mu held.
func (m *Mover) idle() bool { return !m.busy && len(m.ops) == 0 }

// Close ends the Mover. Outstanding operations are discarded. Close waits for the operation in
// progress, however long that takes.
func (m *Mover) Close() {
	if m.over == nil {
		return
	}
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.wakeUp()
	<-m.over
	_ = unix.Close(m.bell)
}

// sleep waits for new operations or Close. Called with mu held, which it releases meanwhile. It first yields the CPU, mostly to a worker
// which soon adds more: each sleep costs two system calls and two switches, and Go's monitor then looks every 20 us for blocked threads. It
// does not where a program that polls its memory has the CPU: each yield would take milliseconds.
//
// The thread sleeps in the kernel: a goroutine that waits for Go's scheduler would have to be taken over by another thread, since a
// worker's thread runs no other goroutines, and that takes 50 us.
func (m *Mover) sleep() {
	now := clock.Now()
	for i := 0; i < idleYields && !m.others.At(now); i++ {
		from := now
		m.mu.Unlock()
		spin.Yield()
		m.mu.Lock()
		now = clock.Now()
		m.others.Yielded(now.Sub(from), now)
		if len(m.ops) > 0 || m.closed {
			return
		}
	}
	m.asleep.Store(true)
	m.mu.Unlock()
	var count [8]byte
	for m.asleep.Load() { // an earlier wakeUp may have rung the bell too late
		_, _ = unix.Read(m.bell, count[:])
	}
	m.mu.Lock()
}

// Kick starts the operations added since the last Kick. A worker calls it once a turn, so that a Mover on the same CPU,
// which runs as soon as it is woken, finds them together.
func (m *Mover) Kick() {
	if m.posted.Load() && m.posted.CompareAndSwap(true, false) {
		m.wakeUp()
	}
}

// wakeUp ends the sleep of the goroutine after there are new operations, or on Close.
func (m *Mover) wakeUp() {
	if m.asleep.CompareAndSwap(true, false) {
		shm.Wake(m.bell)
	}
}

// push adds an operation. Called with mu held.
func (m *Mover) push(o op) {
	m.ops = append(m.ops, o)
	m.posted.Store(true)
}

func (m *Mover) run() {
	defer close(m.over)
	runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
	var batch []op
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		for len(m.ops) == 0 && !m.closed {
			m.busy = false
			m.sleep()
		}
		if m.closed {
			return
		}
		m.watch()
		if cap(batch) > keptOps {
			batch = nil
		}
		batch, m.ops = m.ops, batch[:0]
		for i := range batch {
			if m.closed {
				return
			}
			m.mu.Unlock()
			o := &batch[i]
			err := o.do()
			m.mu.Lock()
			m.beats++
			o.end(m, err)
			*o = op{}
		}
	}
}

// watch starts the watchdog when the goroutine becomes busy. Called with mu held.
func (m *Mover) watch() {
	if m.busy {
		return
	}
	m.busy, m.seen, m.still = true, m.beats, false
	if m.dog == nil {
		m.dog = time.AfterFunc(m.bound/2, m.look)
	} else {
		m.dog.Reset(m.bound / 2)
	}
}

// look ends a client whose memory does not respond. It takes two looks: before one the whole process may have stood still,
// as in a virtual machine that was paused.
func (m *Mover) look() {
	m.mu.Lock()
	still := m.busy && m.beats == m.seen
	stuck := still && m.still
	m.seen, m.still = m.beats, still
	if m.busy && !stuck && !m.closed {
		m.dog.Reset(m.bound / 2)
	}
	m.mu.Unlock()
	if stuck {
		m.onStuck()
	}
}

// do makes the system calls of o.
func (o *op) do() error {
	switch {
	case o.b == nil:
		return nil
	case o.fetch:
		return o.mem.read(o.b.buf[:o.n], o.addr)
	}
	return o.mem.write(o.b.buf[o.off:o.off+o.n], o.addr)
}

// end processes the result of o. Called with mu held.
func (o *op) end(m *Mover, err error) {
	switch {
	case o.fence != nil:
		close(o.fence)
		return
	case o.b == nil:
		o.q.stored.Store(o.q.stored.Load() + o.stores)
	case o.fetch:
		to := here
		if err != nil {
			to = failed
		}
		if !o.b.state.CompareAndSwap(fetching, to) { // released meanwhile
			m.freeFetch(o.b)
		}
	default:
		freed := int64(storeCost)
		if o.b.refs--; o.b.refs == 0 {
			if o.q.cur == o.b {
				o.q.cur = nil
			}
			m.put(o.b)
			freed += blockSize
		}
		if m.storing.Add(-freed) <= storeLimit {
			m.wake(&m.crowd)
		}
		done := o.q.stored.Load()
		if err != nil {
			o.q.failed.CompareAndSwap(0, done+1)
		}
		o.q.backlog.Add(-int64(o.n))
		o.q.stored.Store(done + o.stores)
	}
	o.q.notify()
}

// take returns a block with room for n bytes. Called with mu held.
func (m *Mover) take(n int) *block {
	size, i := blockSize, 1
	if n <= smallBlock {
		size, i = smallBlock, 0
	}
	if free := m.free[i]; len(free) > 0 {
		b := free[len(free)-1]
		m.free[i] = free[:len(free)-1]
		return b
	}
	m.blocks += size
	return &block{m: m, buf: make([]byte, size)}
}

// put takes back a block. Called with mu held.
func (m *Mover) put(b *block) {
	i := 0
	if len(b.buf) == blockSize {
		i = 1
	}
	m.free[i] = append(m.free[i], b)
	m.trim()
}

// trim frees unused blocks as long as there is too much memory. Called with mu held.
func (m *Mover) trim() {
	for i, free := range m.free {
		for n := len(free); n > 0 && m.blocks > Limit; n-- {
			m.blocks -= len(free[n-1].buf)
			free[n-1], m.free[i] = nil, free[:n-1]
		}
	}
}

// freeFetch frees the block of a Fetch. Called with mu held.
func (m *Mover) freeFetch(b *block) {
	m.fetched -= len(b.buf)
	m.put(b)
	m.wake(&m.waiting)
}

// wake notifies the queues in a list and empties it. Called with mu held.
func (m *Mover) wake(list *[]*Queue) {
	for _, q := range *list {
		q.waits = slices.DeleteFunc(q.waits, func(l *[]*Queue) bool { return l == list })
		q.notify()
	}
	clear(*list)
	*list = (*list)[:0]
}

// wait adds q to a list. Called with mu held.
func wait(list *[]*Queue, q *Queue) {
	if !slices.Contains(q.waits, list) {
		q.waits = append(q.waits, list)
		*list = append(*list, q)
	}
}

// States of a Fetch.
const (
	fetching uint32 = iota
	here
	failed
	released // while fetching
)

// block is memory of the daemon for data in transit: a Fetch, or Stores of one queue pair.
type block struct {
	m     *Mover
	buf   []byte
	n     int           // Fetch: its bytes; Stores: bytes in use
	refs  int           // Stores: operations; guarded by Mover.mu
	state atomic.Uint32 // Fetch
}

var _ verbs.Fetch = (*block)(nil)

// Len implements verbs.Fetch.
func (b *block) Len() int { return b.n }

// Bytes implements verbs.Fetch.
func (b *block) Bytes() ([]byte, bool) {
	switch b.state.Load() {
	case here:
		return b.buf[:b.n], true
	case failed:
		return nil, false
	}
	return nil, true
}

// Release implements verbs.Fetch.
func (b *block) Release() {
	if b.state.CompareAndSwap(fetching, released) {
		return
	}
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	b.m.freeFetch(b)
}

// Queue is the verbs.FarQueue of one queue pair. Only the goroutine of its worker may use it,
// except for notify.
type Queue struct {
	m       *Mover
	notify  func()
	backlog atomic.Int64 // bytes that must still be stored
	stored  atomic.Uint64
	failed  atomic.Uint64 // number of the first Store that failed, or 0

	cur   *block      // block of the next Store; guarded by Mover.mu
	waits []*[]*Queue // lists that contain the queue; guarded by Mover.mu
}

var _ verbs.FarQueue = (*Queue)(nil)

// NewQueue returns the Queue of a new queue pair.
func (m *Mover) NewQueue() *Queue { return &Queue{m: m, notify: func() {}} }

// Notify makes the Mover call f after each operation, and when memory for a failed Fetch may be
// free. f must not block or use the Queue. Notify must be called before the first operation.
func (q *Queue) Notify(f func()) { q.notify = f }

// Backlog returns the number of bytes that must still be stored.
func (q *Queue) Backlog() int { return int(q.backlog.Load()) }

// Wait counts n more bytes that a worker keeps until earlier ones are stored, or fewer if n is negative.
func (q *Queue) Wait(n int) {
	m := q.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.blocks += n
	m.trim()
	if m.storing.Add(int64(n)) <= storeLimit {
		m.wake(&m.crowd)
	}
}

// Crowded reports whether the client has so many bytes to store, or that wait, that it should receive no more.
// If it does, q is notified when that has changed.
func (q *Queue) Crowded() bool {
	m := q.m
	if m.storing.Load() <= storeLimit {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	crowded := m.storing.Load() > storeLimit
	if crowded {
		wait(&m.crowd, q)
	}
	return crowded
}

// Stored implements verbs.FarQueue.
func (q *Queue) Stored() (done, firstFailed uint64) {
	done = q.stored.Load()
	return done, q.failed.Load()
}

// Store implements verbs.FarQueue. If an access to p faults, the Store does not count: p may be in the memory of another client.
func (q *Queue) Store(mem verbs.FarMemory, addr uint64, size uint32, p marked.Bytes) {
	m, to, n := q.m, mem.(memory), int(size)
	m.mu.Lock()
	defer q.storeDone()
	for n > 0 {
		b := q.cur
		if b == nil || b.n == blockSize {
			b = m.take(blockSize)
			b.n, b.refs = 0, 0
			q.cur = b
		}
		k := min(n, blockSize-b.n)
		p.CopyTo(b.buf[b.n : b.n+k])
		o := m.extend(to, addr, b)
		if o == nil {
			if b.refs == 0 {
				m.storing.Add(blockSize)
			}
			m.storing.Add(storeCost)
			m.push(op{q: q, mem: to, addr: addr, b: b, off: b.n})
			o = &m.ops[len(m.ops)-1]
			b.refs++
		}
		q.backlog.Add(int64(k))
		b.n += k
		o.n += k
		addr += uint64(k)
		if n -= k; n == 0 {
			o.stores++
			return
		}
		p = p.After(k)
	}
}

// Barrier implements verbs.FarQueue.
func (q *Queue) Barrier() bool {
	q.m.mu.Lock()
	defer q.m.mu.Unlock()
	if q.m.idle() {
		return false
	}
	q.m.push(op{q: q, stores: 1})
	return true
}

// storeDone ends a Store, which may have faulted before anything was in its block.
func (q *Queue) storeDone() {
	if b := q.cur; b != nil && b.refs == 0 {
		q.cur = nil
		q.m.put(b)
	}
	q.m.mu.Unlock()
}

// extend returns the newest operation if a Store can be appended to it, because it follows in memory and
// the operation is the last of b, which is the current block of a queue.
func (m *Mover) extend(mem memory, addr uint64, b *block) *op {
	if len(m.ops) == 0 {
		return nil
	}
	o := &m.ops[len(m.ops)-1]
	if o.b == b && o.mem == mem && o.addr+uint64(o.n) == addr {
		return o
	}
	return nil
}

// Fetch implements verbs.FarQueue.
func (q *Queue) Fetch(mem verbs.FarMemory, addr uint64, n uint32) verbs.Fetch {
	m := q.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fetched >= fetchLimit {
		wait(&m.waiting, q)
		return nil
	}
	b := m.take(int(n))
	m.fetched += len(b.buf)
	b.n = int(n)
	b.state.Store(fetching)
	m.push(op{q: q, mem: mem.(memory), addr: addr, b: b, n: int(n), fetch: true})
	return b
}

// errGone is returned for memory of a process that has exited or executed another program.
var errGone = errors.New("its process has exited, or has executed another program")

// memory is implemented by *Memory.
type memory interface {
	read(b []byte, addr uint64) error
	write(b []byte, addr uint64) error
}

// Memory is the memory of a process, accessed through a descriptor of its /proc/self/mem.
type Memory struct{ fd int }

// Close closes the descriptor. No Mover may use the memory any more.
func (m *Memory) Close() error { return unix.Close(m.fd) }

func (m *Memory) read(b []byte, addr uint64) error  { return move(m.fd, b, addr, unix.Pread) }
func (m *Memory) write(b []byte, addr uint64) error { return move(m.fd, b, addr, unix.Pwrite) }

// move moves all of b, in as many calls as needed.
func move(fd int, b []byte, addr uint64, call func(fd int, b []byte, off int64) (int, error)) error {
	for len(b) > 0 {
		n, err := call(fd, b, int64(addr))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case n == 0:
			return errGone
		default:
			b, addr = b[n:], addr+uint64(n)
		}
	}
	return nil
}
