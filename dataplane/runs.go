package dataplane

import "github.com/iwarpd/iwarpd/tcp"

// A run is several FPDUs of one length that are composed at once, each a segment. A long one lies
// in one buffer instead of a TX slot for each segment, so that TCP and the super-frames, which are
// sent from it, handle it as a whole. Segments of it that are sent separately, as
// retransmissions are, are copied to slots.

const (
	// runBytes is the length of a buffer: the payload of the longest super-frame.
	runBytes = 0xffff - maxHeaders
	// leastRun is the least length of a run in a buffer, in bytes: a shorter one would leave most
	// of it empty.
	leastRun = 16 << 10
	// maxRuns is the maximum number of buffers of a worker.
	maxRuns = 128
	// firstRun is the first handle of a buffer. Those below are of TX slots.
	firstRun tcp.Buf = 1 << 31
)

// runPool holds the buffers of a worker. They are allocated when they are first needed.
type runPool struct {
	bufs [][]byte
	free []tcp.Buf // the one freed last, whose bytes are still in the cache, is used first
}

// left returns how many buffers are free.
func (p *runPool) left() int { return len(p.free) + maxRuns - len(p.bufs) }

// next returns the buffer that the next call of take returns. One must be free.
func (p *runPool) next() tcp.Buf {
	if len(p.free) == 0 {
		p.free = append(p.free, firstRun+tcp.Buf(len(p.bufs)))
		p.bufs = append(p.bufs, make([]byte, runBytes))
	}
	return p.free[len(p.free)-1]
}

// take returns a buffer that belongs to its caller until put.
func (p *runPool) take() tcp.Buf {
	b := p.next()
	p.free = p.free[:len(p.free)-1]
	return b
}

func (p *runPool) put(b tcp.Buf) { p.free = append(p.free, b) }

// isRun reports whether b is a buffer of a runPool.
func isRun(b tcp.Buf) bool { return b >= firstRun && b != tcp.NoBuf }
