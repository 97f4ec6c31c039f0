package shm

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/ring"
	"github.com/iwarpd/iwarpd/verbs"
)

// CQ is the daemon's end of a completion queue: one ring for each worker, so that workers do not contend, and one arm word for all.
type CQ struct {
	wakeR, wakeW int
	shared       bool                  // wakeW belongs to a Channel
	event        [8]byte               // buffer for the event
	gen          atomic.Pointer[cqMem] // replaced by Resize; each worker switches with its next Push
	before       atomic.Pointer[cqMem] // replaced by the last Resize; the client may still read it
	rings        []cqRing
	moderation   atomic.Uint64 // count<<32 | microseconds
	pushed, lost atomic.Uint64
	woken        atomic.Uint64
	told         atomic.Bool

	// OnFault, if set, is called once, by a worker, when the client has written an invalid consumer index.
	OnFault func()
}

// cqMem is the shared memory of a CQ.
type cqMem struct {
	file
	arm, overruns *atomic.Uint32
	entries       int
	ringSize      int
}

// cqRing is the ring of one worker, padded so that two workers never share a cache line.
type cqRing struct {
	gen     *cqMem
	ring    ring.Producer
	mem     []byte
	wakes   bool       // a completion without wake-up so far is solicited or an error
	waiting uint32     // completions whose wake-up moderation delays
	since   clock.Time // when the first of them was pushed
	_       [64]byte
}

// CreateCQ creates a completion queue of at least entries CQEs for each of workers, with its own channel to wake the client.
func CreateCQ(workers, entries int) (*CQ, error) {
	r, w, err := newWaker(queueWakes)
	if err != nil {
		return nil, err
	}
	c, err := CreateCQOn(workers, entries, w, 1)
	if err != nil {
		unix.Close(r)
		unix.Close(w)
		return nil, err
	}
	c.wakeR, c.shared = r, false
	return c, nil
}

// CreateCQOn is CreateCQ for a queue that wakes its client through wake, the w of NewChannel, which queues may share and which the caller
// owns: it writes event there, as 8 bytes.
func CreateCQOn(workers, entries, wake int, event uint64) (*CQ, error) {
	if err := checkRange("number of workers", workers, MaxWorkers); err != nil {
		return nil, err
	}
	g, err := createCQMem(workers, entries)
	if err != nil {
		return nil, err
	}
	c := &CQ{wakeR: -1, wakeW: wake, shared: true, rings: make([]cqRing, workers)}
	le.PutUint64(c.event[:], event)
	c.gen.Store(g)
	for i := range c.rings {
		c.rings[i].follow(g, i)
	}
	return c, nil
}

func createCQMem(workers, entries int) (*cqMem, error) {
	if err := checkRange("number of entries", entries, MaxCQEntries); err != nil {
		return nil, err
	}
	entries = pow2(entries)
	size := ringSize(entries, CQESize)
	f, err := create("iwarp-cq", HeaderSize+workers*size)
	if err != nil {
		return nil, err
	}
	h := header{kind: KindCQ, entries: entries, stride: CQESize, rings: workers, ringSize: size}
	h.put(f.mem)
	return &cqMem{file: f, arm: word32(f.mem, HdrArm), overruns: word32(f.mem, HdrOverruns), entries: entries, ringSize: size}, nil
}

// follow switches the ring of worker to the memory g.
func (r *cqRing) follow(g *cqMem, worker int) {
	m := g.mem[HeaderSize+worker*g.ringSize:][:g.ringSize]
	r.gen = g
	r.ring = ring.NewProducer(word32(m, RingProducer), word32(m, RingConsumer), uint32(g.entries))
	r.mem = m[RingEntries:]
}

// at returns worker's ring in the current memory. Completions pushed to the old memory are published first.
func (c *CQ) at(worker int) *cqRing {
	r := &c.rings[worker]
	if g := c.gen.Load(); g != r.gen {
		c.publish(r)
		r.follow(g, worker)
	}
	return r
}

// publish makes the completions pushed to r visible to the client.
func (c *CQ) publish(r *cqRing) {
	if n := r.ring.Unsubmitted(); n != 0 {
		c.pushed.Add(uint64(n))
		r.ring.Submit()
		r.waiting += n
	}
}

// Resize replaces the rings by empty, unarmed ones of at least entries CQEs. The client can read the old rings until the next Resize or
// Free. When each worker has published what it had pushed before, done must be called, once.
func (c *CQ) Resize(entries int) (done func(), err error) {
	c.FreeBefore()
	g, err := createCQMem(len(c.rings), entries)
	if err != nil {
		return nil, err
	}
	old := c.gen.Swap(g)
	return func() { c.before.Store(old) }, nil
}

// FreeBefore frees the rings that the last Resize replaced. A client can make that
// wait. Free and Close may be called meanwhile: they leave these rings alone.
func (c *CQ) FreeBefore() {
	if g := c.before.Swap(nil); g != nil {
		_ = g.Free()
	}
}

// Moderate makes an armed queue wake its client only after count completions, or period after the first of them. Solicited completions and
// errors still wake at once. If either is 0 every completion wakes.
func (c *CQ) Moderate(count uint32, period time.Duration) {
	us := uint64(min(max(period.Microseconds(), 0), 1<<31))
	c.moderation.Store(uint64(count)<<32 | us)
}

// FD returns the descriptor of the current memory, or -1 if it was taken.
func (c *CQ) FD() int { return c.gen.Load().FD() }

// TakeFD is FD, and transfers ownership of the descriptor to the caller.
func (c *CQ) TakeFD() int { return c.gen.Load().TakeFD() }

// EventFD returns the descriptor for the client, or -1 if it was taken. It becomes readable when an armed queue has a completion.
func (c *CQ) EventFD() int { return c.wakeR }

// TakeEventFD is EventFD, and transfers ownership of the descriptor to the caller.
func (c *CQ) TakeEventFD() int {
	fd := c.wakeR
	c.wakeR = -1
	return fd
}

// Free is Close, and also returns the memory to the kernel even if others hold its descriptor.
func (c *CQ) Free() error {
	c.FreeBefore()
	return c.end((*file).Free)
}

// Close unmaps the queue and closes its descriptors. The client can still read its completions.
func (c *CQ) Close() error {
	if g := c.before.Swap(nil); g != nil {
		_ = g.Close()
	}
	return c.end((*file).Close)
}

func (c *CQ) end(end func(*file) error) error {
	g := c.gen.Load()
	if g.mem != nil {
		if c.wakeR >= 0 {
			unix.Close(c.wakeR)
		}
		if !c.shared {
			unix.Close(c.wakeW)
		}
	}
	return end(&g.file)
}

// Push puts wc in worker's ring. It returns false, and counts the completion as lost, if the ring is full or the client has written an
// invalid index.
func (c *CQ) Push(worker int, wc *verbs.WC) bool {
	r := c.at(worker)
	if r.ring.Free(1) == 0 {
		c.lost.Add(1)
		r.gen.overruns.Add(1)
		if r.ring.Bad() && c.OnFault != nil && !c.told.Swap(true) {
			c.OnFault()
		}
		return false
	}
	i, _ := r.ring.Reserve(1)
	encodeCQE(r.mem[int(r.ring.Mask(i))*CQESize:][:CQESize], wc)
	r.wakes = r.wakes || wc.Wakes()
	return true
}

// Pending reports whether worker has completions that Flush has not published, or for which it has not woken the client.
func (c *CQ) Pending(worker int) bool {
	r := &c.rings[worker]
	return r.ring.Unsubmitted() != 0 || r.waiting != 0
}

// Flush publishes the completions that worker has pushed, and wakes the client if it has armed the queue for them. If moderation delays the
// wake-up, Flush returns when it must be called again, else 0. With now 0 there is no delay.
func (c *CQ) Flush(worker int, now clock.Time) (again clock.Time) {
	r := &c.rings[worker]
	c.publish(r)
	if r.waiting == 0 {
		return 0
	}
	if r.since == 0 {
		r.since = now
	}
	// The client arms, then reads the rings again; we publish, then read the arm word: at least one of the two sees the other. After Resize
	// the client arms the memory that it received last.
	g := c.gen.Load()
	arm := g.arm.Load()
	if arm != ArmNone && (arm != ArmSolicited || r.wakes) {
		m := c.moderation.Load()
		due := r.since.Add(time.Duration(uint32(m)) * time.Microsecond)
		if now != 0 && !r.wakes && uint64(r.waiting) < m>>32 && now < due {
			return due
		}
		if g.arm.CompareAndSwap(arm, ArmNone) {
			c.woken.Add(1)
			notify(c.wakeW, c.event[:])
		}
	}
	r.waiting, r.since, r.wakes = 0, 0, false
	return 0
}

// CQStats are the counters of a CQ.
type CQStats struct {
	Completions uint64 // published to the client
	Overruns    uint64 // lost because a ring was full
	WakeUps     uint64
}

// Stats returns the counters. It may be called from any goroutine.
func (c *CQ) Stats() CQStats { return CQStats{c.pushed.Load(), c.lost.Load(), c.woken.Load()} }

// Depth returns how many completions each ring holds.
func (c *CQ) Depth() int { return c.gen.Load().entries }

// CQConsumer is the client's end of a completion queue. One goroutine at a
// time may Poll.
type CQConsumer struct {
	file
	arm, overruns *atomic.Uint32
	rings         []ring.Consumer
	mems          [][]byte
	entries       int
	turn          int // ring that Poll starts with
}

// MapCQ maps the completion queue in fd, which the caller still owns.
func MapCQ(fd int) (*CQConsumer, error) {
	f, h, err := attach(fd, KindCQ)
	if err != nil {
		return nil, err
	}
	c := &CQConsumer{
		file: f, entries: h.entries,
		arm: word32(f.mem, HdrArm), overruns: word32(f.mem, HdrOverruns),
		rings: make([]ring.Consumer, h.rings), mems: make([][]byte, h.rings),
	}
	for i := range c.rings {
		m := f.mem[HeaderSize+i*h.ringSize:][:h.ringSize]
		c.rings[i] = ring.NewConsumer(word32(m, RingProducer), word32(m, RingConsumer), uint32(h.entries))
		c.mems[i] = m[RingEntries:]
	}
	return c, nil
}

// Poll takes up to len(wcs) completions and returns their number. Completions of one QP are in order. Those in
// memory that the daemon has freed are gone: what was read there may be zeros.
func (c *CQConsumer) Poll(wcs []verbs.WC) int {
	got := 0
	for range c.rings {
		if got == len(wcs) {
			break
		}
		r, mem := &c.rings[c.turn], c.mems[c.turn]
		first, n := r.Peek(uint32(len(wcs) - got))
		for i := range n {
			decodeCQE(mem[int(r.Mask(first+i))*CQESize:][:CQESize], &wcs[got])
			got++
		}
		if n > 0 {
			r.Release(n)
		}
		if got < len(wcs) { // this ring is empty
			if c.turn++; c.turn == len(c.rings) {
				c.turn = 0
			}
		}
	}
	if got > 0 && c.freed() {
		return 0
	}
	return got
}

// Arm requests one wake-up, for the next completion or for the next solicited or failed one. Poll again after Arm: earlier completions do
// not wake.
func (c *CQConsumer) Arm(solicitedOnly bool) {
	if solicitedOnly {
		// A queue armed for every completion stays so (ibv_req_notify_cq).
		c.arm.CompareAndSwap(ArmNone, ArmSolicited)
		return
	}
	c.arm.Store(ArmNext)
}

// Armed returns the kind of completions for which the queue is armed.
func (c *CQConsumer) Armed() uint32 { return c.arm.Load() }

// Overruns returns how many completions were lost because a ring was full.
func (c *CQConsumer) Overruns() uint32 { return c.overruns.Load() }

// Depth returns how many completions each worker's ring holds.
func (c *CQConsumer) Depth() int { return c.entries }
