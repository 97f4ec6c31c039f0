package dataplane

import (
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
)

// byteStream holds the bytes of streaming mode.
type byteStream struct {
	in     []byte // received, not consumed by the control plane, from inAt on
	inAt   int
	shown  int    // bytes of in, from inAt on, already reported by EventData
	out    []byte // to be sent, from outAt on
	outAt  int
	finish bool // close once out is sent
}

// unread returns the number of bytes that the control plane has not consumed.
func (b *byteStream) unread() int { return len(b.in) - b.inAt }

func (b *byteStream) unsent() int { return len(b.out) - b.outAt }

// streamOf returns the connection of s if it is in streaming mode, or still opening, and otherwise nil.
func streamOf(s *stream) *tcpConn {
	if s == nil || s.mode == modeFull {
		return nil
	}
	return s.conn()
}

// streamSend queues streaming-mode bytes.
func (c *tcpConn) streamSend(w *worker, b []byte) {
	if c.mode == modeStreaming && !c.pre.finish {
		c.pre.out = append(c.pre.out, b...)
		w.mark(&c.lane)
	}
}

// composeStream sends streaming-mode bytes, one call's worth per segment if it fits (an MPA
// frame must not share a segment). MPA frames are sent at once; data of a byte stream waits for
// its turn.
func (c *tcpConn) composeStream(w *worker, g *sched.Grant) {
	b := &c.pre
	had := b.unsent()
	for b.unsent() > 0 {
		if c.tcp.Room() <= 0 || c.wide && (g == nil || !w.sched.May(&c.member, g)) {
			break
		}
		s, ok := w.setupSlot()
		if !ok {
			if g != nil {
				g.Why = sched.Slots
			} else {
				w.sched.Enqueue(&c.member)
			}
			break
		}
		n := min(b.unsent(), c.tcp.MSS())
		dst := w.link.Bytes(s)[headroom : headroom+n]
		copy(dst, b.out[b.outAt:])
		b.outAt += n
		c.push(w, s, n, pkt.Sum(dst, 0))
		if g != nil {
			g.Left -= sched.Cost(n, 1, 0)
		}
	}
	left := b.unsent()
	if half := w.e.cfg.SendBuffer / 2; had > 0 && left <= half && (left == 0 || had > half) && c.mode == modeStreaming {
		w.event(&c.stream, Event{Kind: EventWritable})
	}
	if b.outAt > len(b.out)/2 {
		b.out = b.out[:copy(b.out, b.out[b.outAt:])]
		b.outAt = 0
	}
	switch {
	case left > 0, c.late:
	case c.mode == modeSwitching:
		c.switchOver(w)
	case b.finish:
		c.tcp.Close(w.now) // the other direction stays open
	}
}

// streamLimit returns the number of streaming-mode bytes that may wait for the control plane.
// They also reduce the receive window, which is another limit.
func (c *tcpConn) streamLimit(w *worker) int {
	if c.wide {
		return max(w.e.cfg.StreamBuffer, w.tcp.RcvWindow)
	}
	return w.e.cfg.StreamBuffer
}

// showData reports the data received since the last EventData, once per turn.
func (c *tcpConn) showData(w *worker) {
	b := &c.pre
	if p := b.in[b.inAt+b.shown:]; len(p) > 0 && c.mode == modeStreaming {
		b.shown += len(p)
		w.event(&c.stream, Event{Kind: EventData, Data: append([]byte(nil), p...)})
	}
}

// streamConsumed removes n bytes that the control plane has consumed.
func (c *tcpConn) streamConsumed(w *worker, n int) {
	b := &c.pre
	n = min(n, b.shown)
	b.inAt += n
	b.shown -= n
	if b.inAt > len(b.in)/2 {
		b.in = b.in[:copy(b.in, b.in[b.inAt:])]
		b.inAt = 0
	}
	c.tcp.SetBacklog(b.unread())
	w.mark(&c.lane)
}

// switchOver starts full operation: from here on every byte is part of an FPDU.
func (c *tcpConn) switchOver(w *worker) {
	p := &c.params
	c.txStart = c.tcp.SndNxt()
	c.tx.Init(p.CRC, p.SendMarkers, c.txStart)
	c.rx.Init(p.CRC, p.RecvMarkers, c.tcp.RcvNxt().Add(-c.pre.unread()))
	c.direct = c.host != nil && !p.CRC && !p.SendMarkers
	c.start()
	c.tcp.SetBacklog(0)
	// RFC 5044 section 7.1.2 rule 4: a responder sends nothing before the first
	// FPDU of the initiator.
	c.gate = !p.Initiator
	if c.failure != nil {
		c.fail(w, c.failure)
		return
	}
	c.getReady()
	if p.RTR == mpa.RTRNone || p.Initiator {
		w.event(&c.stream, Event{Kind: EventEstablished})
	}
	c.pre = byteStream{in: c.pre.in, inAt: c.pre.inAt}
	c.takeAhead(w)
}

// aheadPiece is the number of bytes ahead of full operation between two looks at the turn's budget.
const aheadPiece = 16 << 10

// takeAhead processes the FPDUs that had arrived when full operation began: up to a receive window of them.
func (c *tcpConn) takeAhead(w *worker) {
	for c.mode == modeFull && c.pre.unread() > 0 {
		if w.enough() {
			w.postpone(c)
			return
		}
		b := c.pre.in[c.pre.inAt:]
		b = b[:min(len(b), aheadPiece)]
		c.pre.inAt += len(b) // first, since the code below may fault
		c.receive(w, b)
	}
	c.pre = byteStream{}
}
