package dataplane

import (
	"math/bits"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/tcp"
)

// A super-frame carries several new segments of one connection, within the limits of the
// congestion window, the peer's window and pacing. All segments but the last have the same
// length, at which the super-frame is split again, so that each segment on a wire has the FPDUs
// for which it was composed (RFC 5044 Appendix A). Retransmissions, and segments with different
// headers, are sent separately.

// superTx is the super-frame that a worker is composing.
type superTx struct {
	link  link.Segmenter // nil: not supported by the link
	frame link.Super
	hdr   [headroom]byte
	parts [1 + link.MaxSuper][]byte // the headers, and the payload
	from  [1 + link.MaxSuper]part   // where each lies
	np    int
	out   tcp.Out

	head tcp.Header // header of the first segment
	ecn  uint8
	n    int // segments
	most int // limit of n
	size int // payload bytes of the first segment
	used int // payload bytes

	runs runPool
}

// part says where the payload of some segments lies.
type part struct {
	buf tcp.Buf
	off int
}

// frameCost returns what a full frame of the link costs the scheduler, in bytes, if each of its segments has one FPDU.
func (w *worker) frameCost() int {
	if w.super.link == nil {
		return w.mtu
	}
	n := w.super.link.SuperBytes()
	return sched.Cost(n, n/w.mtu, n/w.mtu)
}

// superPath probes how long super-frames may be on the path of a connection. A peer may
// silently drop those that are too long for it, or all of them. So a connection starts
// without super-frames, and probes with one at a time that is twice as long as the longest
// acknowledged so far. A probe has failed if all of its segments had to be retransmitted.
type superPath struct {
	proven   int  // segments of the longest one acknowledged
	most     int  // segments of the longest one to try; 0 means not known yet
	failures int  // consecutive failures
	trying   bool // a probe, [start,end), is outstanding
	start    serial.Num
	end      serial.Num
	n, size  int    // its segments, and the length of each but the last in bytes
	again    uint64 // those of its segments that were retransmitted, a bit for each
}

// maxSuperFailures is the number of attempts for each length.
const maxSuperFailures = 3

// limit returns the maximum number of segments of the next super-frame.
func (p *superPath) limit() int {
	if p.most == 0 {
		p.proven, p.most = 1, link.MaxSuper
	}
	if p.trying {
		return p.proven
	}
	return min(2*p.proven, p.most)
}

// sent records a super-frame of n segments of size bytes each, and bytes together.
func (p *superPath) sent(seq serial.Num, bytes, n, size int) {
	if !p.trying {
		p.trying, p.start, p.end, p.n, p.size, p.again = true, seq, seq.Add(bytes), n, size, 0
	}
}

// resent records the retransmission of a segment. It may be one of several.
func (p *superPath) resent(seq serial.Num) {
	if p.trying && p.start.LessEq(seq) && seq.Less(p.end) {
		p.again |= 1 << (seq.Sub(p.start) / p.size)
	}
}

// acked processes an acknowledgement. It reports whether a whole super-frame was lost.
func (p *superPath) acked(una serial.Num) (dropped bool) {
	if !p.trying || una.Less(p.end) {
		return false
	}
	p.trying = false
	if bits.OnesCount64(p.again) < p.n {
		p.proven, p.failures = max(p.proven, p.n), 0
		return false
	}
	p.failures++
	if p.proven >= p.n {
		p.proven = max(p.n/2, 1)
	}
	if p.failures >= maxSuperFailures {
		p.most = p.proven
	}
	return true
}

// burst returns how many segments of a run the current super-frame has room for.
func (c *tcpConn) burst(w *worker) int {
	b := &w.super
	switch {
	case b.link == nil || c.tuple.NVLAN != 0:
		return 1
	case b.n > 0:
		return min(b.most-b.n, (b.link.SuperBytes()-maxHeaders-b.used)/b.size)
	}
	return c.super.limit()
}

// join appends a segment that is due, or several of a run, to the current super-frame. It returns false if that is not
// possible. following says that the header of the segment continues that of the one before it.
func (c *tcpConn) join(w *worker, o *tcp.Out, following bool) bool {
	b := &w.super
	if b.link == nil || o.Retransmit || o.Flags != tcp.ACK|tcp.PSH || c.tuple.NVLAN != 0 {
		return false
	}
	n := (o.Len + o.Size - 1) / o.Size
	if b.n == 0 {
		if b.most = c.super.limit(); b.most < 2 || n > b.most {
			return false
		}
		b.head, b.ecn, b.size, b.used = o.Header, o.ECN, o.Size, 0
	} else if o.Size > b.size || n > 1 && o.Size != b.size || !following && !b.continues(o) {
		return false
	}
	b.parts[b.np] = w.payload(o.Buf)[o.Off : o.Off+o.Len]
	b.from[b.np] = part{o.Buf, o.Off}
	b.np++
	b.n += n
	b.used += o.Len
	if o.Size < b.size || b.n == b.most || b.used+b.size+maxHeaders > b.link.SuperBytes() {
		c.sendGathered(w) // it is full
	}
	return true
}

// underfilled reports whether some segments are not sent yet, but too few for a full super-frame, while
// others are in flight, whose acknowledgement would send these if nothing else did.
func (c *tcpConn) underfilled(w *worker) bool {
	n, mss := c.segs.Unsent(), c.segs.MSS()
	return n > 0 && w.super.link != nil && n+mss+maxHeaders <= w.super.link.SuperBytes() && c.segs.SndNxt().Add(-n) != c.segs.SndUna()
}

// continues reports whether the header of o is that of the next segment of b.
func (b *superTx) continues(o *tcp.Out) bool {
	h := o.Header
	h.Seq = b.head.Seq
	return o.ECN == b.ecn && o.Seq == b.head.Seq.Add(b.used) && h == b.head
}

// maxHeaders is the maximum length of IPv6 and TCP headers.
const maxHeaders = 40 + tcp.MaxHeaderLen

// sendGathered sends the current super-frame.
func (c *tcpConn) sendGathered(w *worker) {
	b := &w.super
	n, np := b.n, b.np
	b.n, b.np = 0, 1
	switch {
	case n == 0:
		return
	case n > 1 && c.sendSuper(w, b.parts[:np]):
		c.super.sent(b.head.Seq, b.used, n, b.size)
		w.stats.TxSuper++
		w.stats.TxSuperSegments += uint64(n)
		return
	case n > 1:
		w.stats.TxSuperRefused++
	}
	o := &b.out
	o.Header, o.ECN, o.Size = b.head, b.ecn, b.size
	for i := 1; i < np; i++ {
		o.Buf, o.Off, o.Len = b.from[i].buf, b.from[i].off, len(b.parts[i])
		c.transmit(w, o)
		o.Seq = o.Seq.Add(o.Len)
	}
}

// sendSuper sends segments, whose payload is parts[1:], as one packet. Their slots may be retransmitted
// as soon as it returns. It returns false if the link refused the packet.
func (c *tcpConn) sendSuper(w *worker, parts [][]byte) bool {
	b, t := &w.super, &c.tuple
	hl := b.head.Len()
	tcpOff := headroom - hl
	off := tcpOff - t.HeaderLen()
	h := b.hdr[:]
	b.head.Put(h[tcpOff:])
	t.Put(h[off:tcpOff], hl+b.used, b.ecn)
	sum := pkt.Fold(t.PseudoSum(hl + b.used))
	h[tcpOff+16], h[tcpOff+17] = byte(sum>>8), byte(sum)
	parts[0] = h[off:]
	f := &b.frame
	f.Parts, f.HdrLen, f.TCPOff, f.Size, f.V6 = parts, headroom-off, tcpOff-off, b.size, t.V6
	if !b.link.SendSuper(f) {
		return false
	}
	size := f.Len()
	if w.taps != nil {
		for _, tap := range *w.taps {
			tap.take(w, &t.Flow, true, size, parts)
		}
	}
	w.stats.TxFrames++
	w.stats.TxBytes += uint64(size)
	return true
}
