package shm

import (
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/ring"
	"github.com/iwarpd/iwarpd/verbs"
	"golang.org/x/sys/unix"
)

// CQ is the daemon's end of a completion queue: one ring for each worker, so
// that none waits for another, and one arm word for all.
type CQ struct {
	file
	arm, overruns *atomic.Uint32
	wakeR, wakeW  int
	entries       int
	rings         []cqRing
}

// cqRing is one worker's. Padding keeps two workers off one cache line.
type cqRing struct {
	ring    ring.Producer
	mem     []byte
	dirty   bool // pushed since the last Flush
	wakes   bool // one of those is solicited or an error
	dropped uint64
	_       [64]byte
}

// CreateCQ makes a completion queue of at least entries CQEs for each of
// workers, and the channel by which Flush wakes the client.
func CreateCQ(workers, entries int) (*CQ, error) {
	if err := checkRange("number of entries", entries, MaxEntries); err != nil {
		return nil, err
	}
	if err := checkRange("number of workers", workers, MaxWorkers); err != nil {
		return nil, err
	}
	entries = pow2(entries)
	size := ringSize(entries, CQESize)
	f, err := create("iwarp-cq", HeaderSize+workers*size)
	if err != nil {
		return nil, err
	}
	r, w, err := NewWake()
	if err != nil {
		f.Close()
		return nil, err
	}
	h := header{kind: KindCQ, entries: entries, stride: CQESize, rings: workers, ringSize: size}
	h.put(f.mem)
	c := &CQ{
		file: f, wakeR: r, wakeW: w, entries: entries,
		arm: word32(f.mem, HdrArm), overruns: word32(f.mem, HdrOverruns),
		rings: make([]cqRing, workers),
	}
	for i := range c.rings {
		m := f.mem[HeaderSize+i*size:][:size]
		c.rings[i].ring = ring.NewProducer(word32(m, RingProducer), word32(m, RingConsumer), uint32(entries))
		c.rings[i].mem = m[RingEntries:]
	}
	return c, nil
}

// EventFD returns the descriptor to hand to the client: it becomes readable
// when an armed queue has a completion.
func (c *CQ) EventFD() int { return c.wakeR }

// Close unmaps the queue and closes its descriptors.
func (c *CQ) Close() error {
	if c.mem != nil {
		unix.Close(c.wakeR)
		unix.Close(c.wakeW)
	}
	return c.file.Close()
}

// Room returns how many completions worker's ring takes now.
func (c *CQ) Room(worker int) int { return int(c.rings[worker].ring.Free(uint32(c.entries))) }

// Push puts wc in worker's ring. False: the ring is full, or its client has
// written an impossible index; the completion is counted as lost.
func (c *CQ) Push(worker int, wc *verbs.WC) bool {
	r := &c.rings[worker]
	if r.ring.Free(1) == 0 {
		r.dropped++
		c.overruns.Add(1)
		return false
	}
	i, _ := r.ring.Reserve(1)
	encodeCQE(r.mem[int(r.ring.Mask(i))*CQESize:][:CQESize], wc)
	r.dirty = true
	r.wakes = r.wakes || wc.Wakes()
	return true
}

// Flush shows the client what worker has pushed, and wakes it if it has armed
// the queue for that.
func (c *CQ) Flush(worker int) {
	r := &c.rings[worker]
	if !r.dirty {
		return
	}
	r.ring.Submit()
	wakes := r.wakes
	r.dirty, r.wakes = false, false
	// The client arms, then looks at the rings again; we publish, then look at
	// the arm word: one of the two sees the other.
	arm := c.arm.Load()
	if arm == ArmNone || arm == ArmSolicited && !wakes {
		return
	}
	if c.arm.CompareAndSwap(arm, ArmNone) {
		Wake(c.wakeW)
	}
}

// Dropped returns how many completions of worker found no room. It is for the
// worker's goroutine.
func (c *CQ) Dropped(worker int) uint64 { return c.rings[worker].dropped }

// Fault reports whether the client has written an impossible consumer index to
// worker's ring.
func (c *CQ) Fault(worker int) bool { return c.rings[worker].ring.Bad() }

// Depth returns how many completions each ring holds.
func (c *CQ) Depth() int { return c.entries }

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

// MapCQ maps the completion queue in fd, which stays the caller's.
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

// Poll takes up to len(wcs) completions and returns how many. Completions of
// one QP come in order.
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
	return got
}

// Arm asks for one wake-up by the next completion, or by the next solicited or
// failed one. Poll once more after it: what came before Arm does not wake.
func (c *CQConsumer) Arm(solicitedOnly bool) {
	if solicitedOnly {
		// An armed "next" is not weakened (ibv_req_notify_cq).
		c.arm.CompareAndSwap(ArmNone, ArmSolicited)
		return
	}
	c.arm.Store(ArmNext)
}

// Overruns returns how many completions were lost for want of room.
func (c *CQConsumer) Overruns() uint32 { return c.overruns.Load() }

// Depth returns how many completions each worker's ring holds.
func (c *CQConsumer) Depth() int { return c.entries }
