package dataplane

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// ReceiveWaitBytes is the approximate limit of the memory of a queue pair with
// QPBinding.ReceiveWait.
const ReceiveWaitBytes = 256 << 10

const (
	// waitFull is the number of waiting bytes after which segments of TCP are dropped, as if
	// lost.
	waitFull = 128 << 10
	// waitCost is the number of bytes that count for a segment in addition to its ULPDU.
	waitCost = 64
	// waitLook is the interval at which a worker looks for a receive: posting one does not wake
	// the worker.
	waitLook = time.Millisecond
)

// receiveWait holds the DDP segments of a connection from the first Send without a receive on.
type receiveWait struct {
	segs   []waitingSegment
	bytes  int
	far    FarQueue   // counts bytes too, or nil: ctrl has charged ReceiveWaitBytes for the queue pair
	until  clock.Time // when the first segment ends the stream
	look   clock.Time // when to look for a receive again
	closed bool       // the peer has closed the stream after them
}

type waitingSegment struct {
	ulpdu []byte     // nil if the segment was placed early
	seq   serial.Num // sequence number of a segment that was placed early
}

// waiting reports whether segments wait. While they do, the receive window closes.
func (r *receiveWait) waiting() bool { return len(r.segs) > 0 }

func (r *receiveWait) full() bool { return r.bytes >= waitFull }

// count adds n to the bytes that wait.
func (r *receiveWait) count(n int) {
	if r.bytes += n; r.far != nil {
		r.far.Wait(n)
	}
}

// end drops what waits.
func (r *receiveWait) end() {
	r.count(-r.bytes)
	*r = receiveWait{}
}

// mustWait reports whether the DDP segment that begins with u has to wait for a receive, or for
// the segments that already wait. A queue pair may also hold as many receives of an SRQ as it can,
// whose data must still be stored in far memory: that ends without a time limit of ours.
func (c *tcpConn) mustWait(w *worker, u marked.Bytes) bool {
	r := &c.waits
	if !r.waiting() && (c.qp.ReceiveWait != 0 || c.qp.QP.RecvsFull()) && c.ddp.AwaitsReceive(u) {
		c.waitFrom(w.now)
		return true
	}
	return r.waiting()
}

// waitFrom starts the timers of the first segment.
func (c *tcpConn) waitFrom(now clock.Time) {
	c.waits.until, c.waits.look = now.Add(c.qp.ReceiveWait), now.Add(waitLook)
}

// keep adds a segment to those that wait.
func (c *tcpConn) keep(w *worker, s waitingSegment) {
	r := &c.waits
	if !r.waiting() && c.qp.ReceiveWait == 0 {
		r.far = c.qp.Far
	}
	r.segs = append(r.segs, s)
	r.count(waitCost + len(s.ulpdu))
	c.noteBacklog(w) // even if the wait ends within the turn: the sender may stop, and the next call resumes it
	w.mark(&c.lane)
}

// resume processes the waiting segments up to the first one that still has no receive, then those
// held after them, which may wait too, and then the end of the stream. Frames that arrive must not
// come before the held ones, even if this turn ends early by a fault in the memory of another client.
func (c *tcpConn) resume(w *worker) {
	r := &c.waits
	if !r.waiting() && !r.closed {
		return
	}
	c.takeWaiting(w)
	c.drainHeld(w)
	if r.waiting() && c.mode == modeFull && c.health == healthy {
		return
	}
	closed := r.closed
	r.end()
	if closed {
		c.peerClosed(w)
	}
}

// takeWaiting processes the waiting segments up to the first one that still has no receive. If the
// time of that one is up, it ends the stream, as it does without ReceiveWait.
func (c *tcpConn) takeWaiting(w *worker) {
	r := &c.waits
	for r.waiting() && c.mode == modeFull && c.health == healthy {
		if w.enough() {
			w.mark(&c.lane) // for the next turn
			return
		}
		if c.makeRoom(w); c.health != healthy {
			return
		}
		s := &r.segs[0]
		w.current = &c.stream
		stays := s.ulpdu != nil && (!r.until.Due(w.now) || c.qp.QP.RecvsFull()) && c.ddp.AwaitsReceive(marked.Bytes{B: s.ulpdu})
		w.current = nil
		if stays {
			r.look = w.now.Add(waitLook)
			return
		}
		c.waitFrom(w.now) // for the next one
		c.takeNext(w)
	}
}

// takeNext processes the first waiting segment.
func (c *tcpConn) takeNext(w *worker) {
	r := &c.waits
	s := r.segs[0]
	r.segs = r.segs[1:] // before the code below, which may fault
	r.count(-waitCost - len(s.ulpdu))
	w.segments++
	w.current = &c.stream
	var err *term.Error
	if s.ulpdu == nil {
		err = c.ddp.DeliverEarly(s.seq)
	} else {
		err = c.ddp.HandleULPDU(s.ulpdu)
	}
	w.current = nil
	c.showReceived()
	if err != nil {
		c.violation(w, err)
	}
}
