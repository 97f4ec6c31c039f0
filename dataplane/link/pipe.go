package link

import (
	"cmp"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/ring"
)

// PipeConfig describes an in-process wire. Zero fields mean the defaults.
type PipeConfig struct {
	MTU       int // largest IP packet; 1500
	ChunkSize int // maximum size of a piece of a received frame; 4096
	Slots     int // TX slots of each end; 1024
	RxFrames  int // frames in flight to, or held by, each end; 2048, or 512 with SuperWhole; a power of two
	TxRing    int // frames posted between two Flushes; 1024

	Super SuperMode // handling of super-frames

	AtoB, BtoA impair.Config // impairments, by direction

	// Filter, if set, is called for each frame at Flush, and drops it by returning false. toB
	// is the direction of the frame. It is called from the sending side's goroutine.
	Filter func(toB bool, frame []byte) bool

	// Lend lets the receiver read the sender's slots without a copy, as between a NIC and its
	// driver. Each slot is reaped when its frame has been released. It requires a wire without
	// impairments and RxFrames >= Slots.
	Lend bool

	// Now is the clock of the impairments; nil means clock.Now. With a virtual clock both ends
	// must be driven from one goroutine, and Wait returns at once.
	Now func() clock.Time
}

// SuperMode is how a Pipe handles super-frames.
type SuperMode uint8

const (
	NoSuper    SuperMode = iota // does not accept them
	SuperCut                    // cuts them into segments, which are impaired individually
	SuperWhole                  // passes them on unchanged, with a partial checksum
)

// Pipe is one end of an in-process wire. The two ends may be driven by two
// goroutines.
type Pipe struct {
	txQueue
	out, in *wire
	virtual bool
	now     func() clock.Time
	cfg     *PipeConfig
	toB     bool

	// Receiving side: frames removed from the ring that are not yet due.
	early impair.Queue[parcel]
	super []byte // buffer for a super-frame in one piece

	poll  Poller
	stats Stats
	shut  *atomic.Bool // the descriptors are closed; shared by both ends
}

// parcel is a frame in a cell of a wire.
type parcel struct {
	at   clock.Time // when the frame is due; not used without impairments
	cell uint32     // or slot of the sender
	off  int32      // offset in the slot
	n    int32
}

// wire is one direction. Full cells go from the sender to the receiver in full, and return
// empty in free. Each ring has one producer and one consumer. Data written by one side is on
// other cache lines than that of the other side.
type wire struct {
	arena []byte
	size  int   // bytes of a cell
	slots *Pool // slots of the sender, if the wire lends

	full []parcel
	free []uint32

	wakeup *waker // wakes the receiver

	_                 [64]byte
	fullProd, freeCon atomic.Uint32 // written by the sender
	lost              atomic.Uint64 // frames dropped because no cell was free

	_                 [64]byte
	freeProd, fullCon atomic.Uint32 // written by the receiver
	closed            atomic.Bool

	// Sender's.
	_       [64]byte
	put     ring.Producer
	take    ring.Consumer
	decider *impair.Decider // nil: perfect
	plan    []impair.Delivery

	// Receiver's.
	_    [64]byte
	get  ring.Consumer
	give ring.Producer
}

// minSlot is the minimum size of a TX slot. With a tiny MTU an owner may compose in a slot what
// it sends in several frames.
const minSlot = 512

// NewPipe makes a wire and returns its two ends. It fails only if the configuration is invalid
// or the process has no free descriptor.
func NewPipe(cfg PipeConfig) (a, b *Pipe, err error) {
	cfg.MTU = cmp.Or(cfg.MTU, 1500)
	cfg.ChunkSize = cmp.Or(cfg.ChunkSize, 4096)
	cfg.Slots = cmp.Or(cfg.Slots, 1024)
	if cfg.Super == SuperWhole {
		cfg.RxFrames = cmp.Or(cfg.RxFrames, 512)
	}
	cfg.RxFrames = cmp.Or(cfg.RxFrames, 2048)
	cfg.TxRing = cmp.Or(cfg.TxRing, 1024)
	if cfg.MTU < 68 || cfg.MTU+HeaderRoom > MaxPieces*cfg.ChunkSize || cfg.Slots < 1 || cfg.TxRing < 1 ||
		cfg.RxFrames < 1 || cfg.RxFrames&(cfg.RxFrames-1) != 0 {
		return nil, nil, fmt.Errorf("link: bad pipe configuration: MTU %d, %d slots, %d RX frames of pieces of %d",
			cfg.MTU, cfg.Slots, cfg.RxFrames, cfg.ChunkSize)
	}
	if cfg.Lend && (!cfg.AtoB.Perfect() || !cfg.BtoA.Perfect() || cfg.Filter != nil || cfg.RxFrames < cfg.Slots) {
		return nil, nil, errors.New("link: a pipe that lends needs a perfect wire, no filter, and as many RX frames as slots")
	}
	ab, err := newWire(&cfg, cfg.AtoB)
	if err != nil {
		return nil, nil, fmt.Errorf("link: pipe: %w", err)
	}
	ba, err := newWire(&cfg, cfg.BtoA)
	if err != nil {
		_ = unix.Close(ab.wakeup.fd)
		return nil, nil, fmt.Errorf("link: pipe: %w", err)
	}
	a, b = newEnd(&cfg, ab, ba, true), newEnd(&cfg, ba, ab, false)
	a.shut = new(atomic.Bool)
	b.shut = a.shut
	return a, b, nil
}

func newWire(cfg *PipeConfig, bad impair.Config) (*wire, error) {
	wk, err := newWaker()
	if err != nil {
		return nil, err
	}
	n := uint32(cfg.RxFrames)
	size := (cfg.MTU + HeaderRoom + 63) &^ 63
	if cfg.Super == SuperWhole {
		size = (superBytes + HeaderRoom + 63) &^ 63
	}
	w := &wire{
		size: size,
		full: make([]parcel, n), free: make([]uint32, n),
		plan: make([]impair.Delivery, 0, impair.MaxDeliveries), wakeup: wk,
	}
	w.put = ring.NewProducer(&w.fullProd, &w.fullCon, n)
	w.get = ring.NewConsumer(&w.fullProd, &w.fullCon, n)
	w.take = ring.NewConsumer(&w.freeProd, &w.freeCon, n)
	w.give = ring.NewProducer(&w.freeProd, &w.freeCon, n)
	if !cfg.Lend {
		w.arena = make([]byte, int(n)*size)
		w.give.Reserve(n)
		for i := range w.free {
			w.free[i] = uint32(i)
		}
		w.give.Submit()
	}
	if !bad.Perfect() {
		w.decider = impair.NewDecider(bad)
	}
	return w, nil
}

func newEnd(cfg *PipeConfig, out, in *wire, toB bool) *Pipe {
	p := &Pipe{
		txQueue: newTxQueue(cfg.Slots, max((cfg.MTU+HeaderRoom+63)&^63+64, minSlot), cfg.TxRing, cfg.MTU+HeaderRoom),
		out:     out, in: in, toB: toB, cfg: cfg, now: cfg.Now, virtual: cfg.Now != nil,
		early: impair.NewQueue[parcel](cfg.RxFrames),
	}
	if p.now == nil {
		p.now = clock.Now
	}
	if cfg.Lend {
		out.slots = &p.Pool
	}
	return p
}

// MTU is Link.MTU.
func (p *Pipe) MTU() int { return p.cfg.MTU }

// RxFrames is Link.RxFrames.
func (p *Pipe) RxFrames() int { return p.cfg.RxFrames }

// Post is Link.Post.
func (p *Pipe) Post(s Slot, off, n int) bool { return p.post(s, off, n, &p.stats) }

// Flush is Link.Flush. It copies each frame to the other side, or lends it.
func (p *Pipe) Flush() {
	p.giveBack()
	if len(p.queued) == 0 {
		return
	}
	if p.cfg.Lend && !p.out.closed.Load() {
		p.lend()
		return
	}
	now := p.sendTime()
	for i := range p.queued {
		p.emit(now, p.frameBytes(&p.queued[i]))
	}
	p.finish(len(p.queued))
	p.submit()
}

// sendTime returns the time of frames that are sent now, or 0 if that does not matter.
func (p *Pipe) sendTime() clock.Time {
	if p.out.decider == nil {
		return 0
	}
	return p.now()
}

// emit copies a frame to the other side, where it arrives after submit.
func (p *Pipe) emit(now clock.Time, b []byte) {
	p.stats.TxFrames++
	p.stats.TxBytes += uint64(len(b))
	if p.cfg.Filter == nil || p.cfg.Filter(p.toB, b) {
		p.out.send(now, b)
	}
}

func (p *Pipe) submit() {
	if w := p.out; w.put.Unsubmitted() > 0 {
		w.put.Submit()
		w.wakeup.wake()
	}
}

// SuperBytes is Segmenter.SuperBytes.
func (p *Pipe) SuperBytes() int {
	if p.cfg.Super == NoSuper || p.cfg.Lend {
		return 0
	}
	return superBytes
}

// SendSuper is Segmenter.SendSuper.
func (p *Pipe) SendSuper(s *Super) bool {
	p.Flush()
	now := p.sendTime()
	if p.cfg.Super == SuperCut {
		s.cut(func(b []byte) { p.emit(now, b) })
	} else {
		p.super = p.super[:0]
		for _, part := range s.Parts {
			p.super = append(p.super, part...)
		}
		p.emit(now, p.super)
	}
	p.submit()
	return true
}

// lend passes the queued slots to the other side.
func (p *Pipe) lend() {
	w := p.out
	for _, f := range p.queued {
		// The ring has as many entries as there are slots.
		i, _ := w.put.Reserve(1)
		w.full[w.put.Mask(i)] = parcel{cell: uint32(f.slot), off: int32(f.off), n: int32(f.n)}
		p.stats.TxFrames++
		p.stats.TxBytes += uint64(f.n)
	}
	p.queued = p.queued[:0]
	w.put.Submit()
	w.wakeup.wake()
}

// Reap is Link.Reap.
func (p *Pipe) Reap(done []Slot) int {
	if p.cfg.Lend {
		w := p.out
		first, n := w.take.Peek(uint32(len(w.free)))
		for i := range n {
			p.done = append(p.done, Slot(w.free[w.take.Mask(first+i)]))
		}
		if n > 0 {
			w.take.Release(n)
		}
	}
	return p.txQueue.Reap(done)
}

// send copies a frame to the ring, as often as the impairments say, without publishing it.
func (w *wire) send(now clock.Time, b []byte) {
	if w.closed.Load() {
		return
	}
	plan := append(w.plan[:0], impair.Delivery{Bit: -1})
	if w.decider != nil {
		plan = w.decider.Decide(now, len(b), w.plan[:0])
	}
	for _, d := range plan {
		i, n := w.take.Peek(1)
		if n == 0 {
			w.lost.Add(1)
			continue
		}
		cell := w.free[w.take.Mask(i)]
		w.take.Release(1)
		c := w.arena[int(cell)*w.size:]
		copy(c, b)
		if d.Bit >= 0 {
			c[d.Bit/8] ^= 1 << (d.Bit % 8)
		}
		// There are as many cells as entries, so a free cell implies a free entry.
		i, _ = w.put.Reserve(1)
		w.full[w.put.Mask(i)] = parcel{at: d.At, cell: cell, n: int32(len(b))}
	}
}

// Receive is Link.Receive.
func (p *Pipe) Receive(fs []Frame) int {
	p.giveBack()
	w := p.in
	if w.decider == nil {
		first, n := w.get.Peek(uint32(len(fs)))
		for i := range n {
			p.fill(&fs[i], w.full[w.get.Mask(first+i)])
		}
		if n > 0 {
			w.get.Release(n)
		}
		return int(n)
	}
	p.collect()
	if p.early.Len() == 0 {
		return 0
	}
	now := p.now()
	for n := range fs {
		q, ok := p.early.Pop(now)
		if !ok {
			return n
		}
		p.fill(&fs[n], q)
	}
	return len(fs)
}

// collect moves frames from the ring to the queue ordered by time.
func (p *Pipe) collect() {
	w := p.in
	first, n := w.get.Peek(uint32(len(w.full)))
	for i := range n {
		q := w.full[w.get.Mask(first+i)]
		p.early.Push(q.at, q)
	}
	if n > 0 {
		w.get.Release(n)
	}
}

// fill makes f the frame of q.
func (p *Pipe) fill(f *Frame, q parcel) {
	var b []byte
	if p.in.slots != nil {
		b = p.in.slots.Bytes(Slot(q.cell))[q.off:][:q.n:q.n]
	} else {
		b = p.in.arena[int(q.cell)*p.in.size:][:q.n:q.n]
	}
	p.stats.RxFrames++
	p.stats.RxBytes += uint64(len(b))
	f.N = 0
	f.IDs[0] = uint64(q.cell)
	for len(b) > 0 {
		n := min(len(b), p.cfg.ChunkSize)
		f.Pieces[f.N] = b[:n:n]
		f.N++
		b = b[n:]
	}
}

// Hold is Link.Hold.
func (p *Pipe) Hold(*Frame) {}

// Release is Link.Release.
func (p *Pipe) Release(f *Frame) {
	if f.N == 0 {
		panic("link: frame released twice")
	}
	f.N = 0
	w := p.in
	i, n := w.give.Reserve(1)
	if n == 0 {
		panic("link: more frames released than received")
	}
	w.free[w.give.Mask(i)] = uint32(f.IDs[0])
}

// giveBack publishes the released cells to the other side, once for a burst of frames because
// publishing waits for all earlier stores.
func (p *Pipe) giveBack() {
	if w := p.in; w.give.Unsubmitted() > 0 {
		w.give.Submit()
	}
}

// Deadline returns when the next frame in flight to this end is due: 0 if there is none, and a
// time not after now if it can be received. A simulation uses it to advance its clock.
func (p *Pipe) Deadline() clock.Time {
	if p.in.decider == nil {
		if _, n := p.in.get.Peek(1); n == 0 {
			return 0
		}
		return p.now()
	}
	p.collect()
	return p.early.Deadline()
}

// Wait is Link.Wait.
func (p *Pipe) Wait(timeout time.Duration, wakefd int) (woken bool) {
	p.giveBack()
	if p.virtual {
		return p.poll.Wait(0, -1, wakefd)
	}
	wk := p.in.wakeup
	wk.asleep.Store(true)
	// Check once more: a sender that did not see the flag does not wake this end.
	if at := p.Deadline(); at != 0 {
		left := max(at.Sub(p.now()), 0)
		if timeout < 0 || left < timeout {
			timeout = left
		}
	}
	if timeout != 0 {
		p.stats.Wakes++
	}
	woken = p.poll.Wait(timeout, wk.fd, wakefd)
	wk.asleep.Store(false)
	if p.poll.events() != 0 {
		wk.clear()
	}
	return woken
}

// Stats is Link.Stats.
func (p *Pipe) Stats(s *Stats) {
	*s = p.stats
	s.RxFillEmpty = p.in.lost.Load()
}

// Close is Link.Close. The other end may stay open; frames that it sends are lost.
func (p *Pipe) Close() error {
	if p.in.closed.Swap(true) || !p.out.closed.Load() {
		return nil
	}
	// The second end to be closed closes the descriptors: no one can write to them any more.
	if p.shut.Swap(true) {
		return nil
	}
	return errors.Join(unix.Close(p.in.wakeup.fd), unix.Close(p.out.wakeup.fd))
}
