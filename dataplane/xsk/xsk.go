// Package xsk implements link.Link on an AF_XDP socket. github.com/asavie/xdp opens and binds
// the socket. This package drives the four rings itself, in batches and with acquire and
// release semantics, without searching for free frames.
package xsk

import (
	"errors"
	"fmt"
	"time"

	"github.com/asavie/xdp"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/ring"
)

var (
	_ link.Link      = (*Socket)(nil)
	_ link.Segmenter = (*Socket)(nil)
)

// Socket is an open queue. Like every Link it is not safe for concurrent use. The first half of
// its memory is for reception, the second half has the TX slots.
type Socket struct {
	link.Pool         // in the second half of the memory
	*link.SuperSocket // nil if not supported

	cfg      Config
	sock     *xdp.Socket
	fd       int
	umem     []byte
	sg       bool // frames may have several fragments
	zeroCopy bool

	maps                           []mapping // created by asavie/xdp
	rxMap, txMap, fillMap, compMap ringMem
	rxDescs, txDescs               []unix.XDPDesc
	fillAddrs, compAddrs           []uint64
	rx, comp                       ring.Consumer
	tx, fill                       ring.Producer

	rxMem uint64      // bytes for reception: [0,rxMem) of umem
	spare []uint64    // RX chunks that are neither in the fill ring nor held by the worker
	keep  fillLevel   // number of chunks to keep in the fill ring
	left  []uint8     // per slot: descriptors of its posted frame that are not completed
	dead  []link.Slot // posted but invalid: to be reaped

	behind bool // the kernel left frames in the TX ring at the last Flush
	poll   link.Poller
	stats  link.Stats
}

// FD returns the socket's descriptor, for bpf.Steering.SetSocket.
func (s *Socket) FD() int { return s.fd }

// ZeroCopy reports whether the driver avoids copying frames.
func (s *Socket) ZeroCopy() bool { return s.zeroCopy }

// Taken describes the mode in use: native or generic, and whether the kernel copies.
func (s *Socket) Taken() string {
	switch {
	case s.zeroCopy:
		return "native, zero copy"
	case s.cfg.Generic:
		return "generic, copy"
	}
	return "native, copy"
}

// MTU is link.Link.MTU.
func (s *Socket) MTU() int { return s.cfg.MTU }

// RxFrames is link.Link.RxFrames.
func (s *Socket) RxFrames() int { return s.cfg.Frames / 2 / s.cfg.rxPieces() }

// Receive is link.Link.Receive.
func (s *Socket) Receive(fs []link.Frame) int {
	s.refill()
	// All available descriptors are needed, since the last one of a chain must be seen too.
	first, avail := s.rx.Peek(uint32(s.cfg.Ring))
	if avail == 0 {
		return 0
	}
	n, used := 0, uint32(0)
	for n < len(fs) && used < avail {
		end := used
		for end < avail && s.rxDescs[s.rx.Mask(first+end)].Options&unix.XDP_PKT_CONTD != 0 {
			end++
		}
		if end == avail {
			break // the rest of the chain has not arrived yet
		}
		f := &fs[n]
		f.N = 0
		ok := true
		for ; used <= end; used++ {
			d := s.rxDescs[s.rx.Mask(first+used)]
			last := d.Addr + uint64(d.Len)
			if last < d.Addr || last > s.rxMem || d.Len > FrameSize {
				ok = false
				continue
			}
			if f.N == link.MaxPieces {
				// The chain is too long: release its chunks one by one.
				ok = false
				s.giveBack(d.Addr)
				continue
			}
			f.Pieces[f.N] = s.umem[d.Addr:last:last]
			f.IDs[f.N] = d.Addr
			f.N++
		}
		if !ok || f.N == 0 {
			s.stats.RxInvalid++
			s.Release(f)
			continue
		}
		s.stats.RxFrames++
		s.stats.RxBytes += uint64(f.Len())
		n++
	}
	if used > 0 {
		s.rx.Release(used)
	}
	return n
}

// Hold is link.Link.Hold. The kernel has other chunks.
func (s *Socket) Hold(*link.Frame) {}

// Release implements link.Link. The chunks return to the fill ring at the next Receive, Flush
// or Wait.
func (s *Socket) Release(f *link.Frame) {
	for _, addr := range f.IDs[:f.N] {
		s.giveBack(addr)
	}
	f.N = 0
}

// giveBack makes an RX chunk available to the fill ring.
func (s *Socket) giveBack(addr uint64) {
	if len(s.spare) == cap(s.spare) {
		panic("xsk: frame released twice")
	}
	s.spare = append(s.spare, addr&^(FrameSize-1))
}

// fillLevel is the number of chunks to keep in a fill ring. The kernel uses chunks in FIFO
// order. With many chunks it uses memory that is no longer in the cache; with few, recently
// released chunks are soon used again. If a ring is found nearly empty, frames may have been
// lost, so its level is doubled. If half of the level has sufficed for a long time, it is
// halved.
type fillLevel struct {
	want, least, most uint32
	low               uint32 // lowest level found since count was reset
	count             uint32 // chunks added since low was reset
}

// leastFill bounds the initial level of the fill ring: what a receive window of 2 MiB takes that arrives
// in super-frames of 17 chunks while the worker waits for a CPU, and some more. shrinkAfter is the
// number of chunks to be added before the level is lowered.
const (
	leastFill   = 768
	shrinkAfter = 1 << 16
)

func newFillLevel(ring uint32) fillLevel {
	n := min(leastFill, ring)
	return fillLevel{want: n / 2, least: n, most: ring, low: ring} // the ring is found empty at first
}

// more returns the number of chunks to add to a ring that has have.
func (l *fillLevel) more(have uint32) uint32 {
	l.low = min(l.low, have)
	switch {
	case have <= l.want/8 && l.want < l.most:
		l.want, l.low, l.count = min(2*l.want, l.most), l.most, 0
	case l.count >= shrinkAfter:
		if l.low > l.want/2+l.want/8 && l.want > l.least {
			l.want = max(l.want/2, l.least)
		}
		l.low, l.count = l.most, 0
	}
	if have >= l.want {
		return 0
	}
	l.count += l.want - have
	return l.want - have
}

// refill moves spare chunks to the fill ring, the most recently released first.
func (s *Socket) refill() {
	if len(s.spare) == 0 {
		return
	}
	first, n := s.fill.Reserve(min(s.keep.more(s.fill.Pending()), uint32(len(s.spare))))
	if n == 0 {
		return
	}
	top := len(s.spare)
	for i := range n {
		top--
		s.fillAddrs[s.fill.Mask(first+i)] = s.spare[top]
	}
	s.spare = s.spare[:top]
	s.fill.Submit()
	if s.fillMap.flag.Load()&unix.XDP_RING_NEED_WAKEUP != 0 {
		s.stats.Kicks++
		kickRx(s.fd)
	}
}

// Post is link.Link.Post. A frame that spans several chunks of its slot becomes
// a chain of descriptors.
func (s *Socket) Post(slot link.Slot, off, n int) bool {
	if s.Posted(slot) {
		s.stats.TxRingFull++
		return false
	}
	if !link.ValidFrame(off, n, s.SlotSize(), s.cfg.MTU+link.HeaderRoom) {
		s.stats.TxInvalid++
		s.SetPosted(slot, true)
		s.dead = append(s.dead, slot)
		return true
	}
	addr := s.rxMem + uint64(int(slot)*s.SlotSize()+off)
	count := uint32((int(addr)%FrameSize + n + FrameSize - 1) / FrameSize)
	if s.tx.Free(count) < count {
		s.stats.TxRingFull++
		return false
	}
	first, _ := s.tx.Reserve(count)
	for i := range count {
		m := min(n, FrameSize-int(addr%FrameSize))
		d := unix.XDPDesc{Addr: addr, Len: uint32(m)}
		if i+1 < count {
			d.Options = unix.XDP_PKT_CONTD
		}
		s.txDescs[s.tx.Mask(first+i)] = d
		addr += uint64(m)
		n -= m
		s.stats.TxBytes += uint64(m)
	}
	s.left[slot] = uint8(count)
	s.SetPosted(slot, true)
	s.stats.TxFrames++
	return true
}

// Flush is link.Link.Flush. The kernel handles a limited number of frames per call, so Flush
// repeats the call while it makes progress. If it makes none, the kernel's own queue or the
// completion ring is full, and only time or Reap helps.
func (s *Socket) Flush() {
	s.refill()
	if s.tx.Unsubmitted() > 0 {
		s.tx.Submit()
	} else if !s.behind {
		return
	}
	s.behind = false
	left := s.tx.Pending()
	for left > 0 && s.txMap.flag.Load()&unix.XDP_RING_NEED_WAKEUP != 0 {
		s.stats.Kicks++
		errno := kick(s.fd)
		was := left
		if left = s.tx.Pending(); left == 0 {
			return
		}
		switch errno {
		case 0, unix.EAGAIN, unix.EBUSY, unix.ENOBUFS, unix.EINTR:
		default:
			s.stats.TxErrors++
		}
		if left >= was && errno != unix.EINTR {
			s.behind = true
			s.stats.TxIncomplete++
			return
		}
	}
}

// SendSuper is link.Segmenter.SendSuper. Frames posted before are sent first.
func (s *Socket) SendSuper(f *link.Super) bool {
	if s.Flush(); s.behind || !s.SuperSocket.SendSuper(f) {
		return false
	}
	s.stats.Kicks++
	s.stats.TxFrames++
	s.stats.TxBytes += uint64(f.Len())
	return true
}

// Reap is link.Link.Reap.
func (s *Socket) Reap(done []link.Slot) int {
	n := 0
	for n < len(done) && len(s.dead) > 0 {
		done[n] = s.dead[len(s.dead)-1]
		s.dead = s.dead[:len(s.dead)-1]
		s.SetPosted(done[n], false)
		n++
	}
	first, avail := s.comp.Peek(uint32(s.cfg.Ring))
	if avail == 0 {
		return n
	}
	used := uint32(0)
	for ; n < len(done) && used < avail; used++ {
		addr := s.compAddrs[s.comp.Mask(first+used)]
		slot := link.Slot((addr - s.rxMem) / uint64(s.SlotSize()))
		if addr < s.rxMem || int(slot) >= len(s.left) || s.left[slot] == 0 {
			s.stats.TxErrors++
			continue
		}
		if s.left[slot]--; s.left[slot] == 0 {
			s.SetPosted(slot, false)
			done[n] = slot
			n++
		}
	}
	if used > 0 {
		s.comp.Release(used)
	}
	return n
}

// retry limits the sleep in Wait while the TX ring has frames that the kernel has not accepted.
// The kernel does not report when it can accept them.
const retry = time.Millisecond

// Wait is link.Link.Wait.
func (s *Socket) Wait(timeout time.Duration, wakefd int) (woken bool) {
	s.refill()
	if s.behind && (timeout < 0 || timeout > retry) {
		timeout = retry
	}
	if timeout != 0 {
		s.stats.Wakes++
	}
	return s.poll.Wait(timeout, s.fd, wakefd) // in copy mode poll itself sends the frames in the TX ring
}

// Stats is link.Link.Stats. It makes a system call.
func (s *Socket) Stats(st *link.Stats) {
	*st = s.stats
	k, err := kernelStats(s.fd)
	if err != nil {
		return
	}
	st.RxDropped = k.Rx_dropped
	st.RxRingFull = k.Rx_ring_full
	st.RxFillEmpty = k.Rx_fill_ring_empty_descs
	st.RxInvalid += k.Rx_invalid_descs
	st.TxInvalid += k.Tx_invalid_descs
}

// Close is link.Link.Close. Another socket can use the queue soon after.
func (s *Socket) Close() error {
	if s.sock == nil {
		return nil
	}
	opening.Lock() // opening a socket compares the mappings before and after
	err := errors.Join(s.unmap(), s.sock.Close(), s.SuperSocket.Close())
	opening.Unlock()
	s.sock, s.fd, s.umem = nil, -1, nil
	if err != nil {
		return fmt.Errorf("xsk: close: %w", err)
	}
	return nil
}
