package dataplane

import (
	"errors"
	"iter"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/cache"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// rxFrame is a received frame: its origin, its parsed headers, and the position of its payload.
type rxFrame struct {
	*link.Frame
	ring  *handoff.Ring // ring of the worker that forwarded it; nil: not forwarded
	whole bool          // a reassembled IP packet
	moved bool          // another worker has forwarded it, so it is not forwarded again
	kept  bool          // held by a connection

	pkt  pkt.Packet
	seg  tcp.Segment
	icmp pkt.ICMPError
	off  int // offset of the payload in the frame

	summed bool // crc is the CRC32c of the payload except its last four bytes
	crc    uint32
}

// reset initializes f for the frame lf of the link.
func (f *rxFrame) reset(lf *link.Frame) {
	f.Frame, f.ring, f.whole, f.moved, f.kept, f.summed = lf, nil, false, false, false, false
}

// rxBurst holds the frames of one Receive.
type rxBurst struct {
	frames  [rxBudget]link.Frame
	at, end int // frames[at:end] are still to be processed
	frame   rxFrame
}

// ahead is the number of bytes of the next frame that are prefetched. For longer frames the
// hardware prefetcher takes over.
const ahead = 2048

// pollRx processes a burst of frames from the link, or the rest of a burst that was interrupted
// by a fault or by the budget of the turn.
func (w *worker) pollRx() int {
	rx := &w.rx
	if w.enough() {
		return 0
	}
	if rx.at == rx.end {
		rx.at, rx.end = 0, w.link.Receive(rx.frames[:])
	}
	first, end := rx.at, rx.end
	for i := first; i < end && !w.enough(); i++ {
		rx.at = i + 1
		if i+1 < end {
			next := rx.frames[i+1].Pieces[0]
			cache.Fetch(next[:min(len(next), ahead)])
		}
		w.fromLink(&rx.frames[i])
	}
	if len(w.forwarding.sent) > 0 {
		w.wakeOwners()
	}
	return end - first
}

// fromLink processes a frame of the link, and releases it unless a connection holds it, even if
// the turn faults.
func (w *worker) fromLink(lf *link.Frame) {
	w.stats.RxFrames++
	w.stats.RxBytes += uint64(lf.Len())
	if w.taps != nil {
		w.tapIn(lf)
	}
	f := &w.rx.frame
	f.reset(lf)
	defer func() {
		if !f.kept {
			w.link.Release(lf)
		}
	}()
	w.frame(f)
}

// frame processes a frame. f.kept is set if a connection holds it.
func (w *worker) frame(f *rxFrame) {
	head := f.Pieces[0]
	if err := f.pkt.Parse(head, f.Len()); err != nil {
		switch {
		case errors.Is(err, pkt.ErrFragment) && !f.whole:
			w.fragment(f)
		case errors.Is(err, pkt.ErrChecksum):
			w.stats.RxChecksum++
		default:
			w.stats.RxMalformed++
		}
		return
	}
	w.packet(f)
}

// checksum sums the transport header and payload over the pieces of f.
func checksum(f *link.Frame, p *pkt.Packet) uint16 {
	sum, odd := p.PseudoSum, false
	for b := range pieces(f, p.L4Off, p.L4Len) {
		if odd {
			sum = pkt.SumSwap(b, sum)
		} else {
			sum = pkt.Sum(b, sum)
		}
		odd = odd != (len(b)%2 == 1)
	}
	return pkt.Fold(sum)
}

// pieces yields n bytes at off of the frame, piece by piece.
func pieces(f *link.Frame, off, n int) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for i := 0; i < f.N && n > 0; i++ {
			b := f.Pieces[i]
			if off >= len(b) {
				off -= len(b)
				continue
			}
			b = b[off:min(len(b), off+n)]
			off = 0
			n -= len(b)
			if !yield(b) {
				return
			}
		}
	}
}

// contiguous returns n bytes at off of the frame if they lie in one piece.
func contiguous(f *link.Frame, off, n int) []byte {
	for b := range pieces(f, off, n) {
		if len(b) == n {
			return b
		}
		break
	}
	return nil
}
