package dataplane

import (
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
	parts [link.MaxSuper][]byte

	head  tcp.Header // header of the first segment
	ecn   uint8
	slots [link.MaxSuper]link.Slot
	n     int // segments, of at most
	most  int
	size  int // payload bytes of the first segment
	used  int // payload bytes
}

// frameCost returns what a full frame of the link costs the scheduler, in bytes, if each of its segments has one FPDU.
func (w *worker) frameCost() int {
	if w.super.link == nil {
		return w.mtu
	}
	n := w.super.link.SuperBytes()
	return n + n/w.mtu*(sched.RecordCost+sched.FPDUCost)
}

// superPath probes how long super-frames may be on the path of a connection. A peer may
// silently drop those that are too long for it, or all of them. So a connection starts
// without super-frames, and probes with one at a time that is twice as long as the longest
// acknowledged so far. A probe has failed if all of its bytes had to be retransmitted.
type superPath struct {
	proven   int  // segments of the longest one acknowledged
	most     int  // segments of the longest one to try; 0 means not known yet
	failures int  // consecutive failures
	trying   bool // a probe, [start,end), is outstanding
	start    serial.Num
	end      serial.Num
	n        int // its segments
	again    int // bytes of the probe that were retransmitted
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

// sent records a super-frame.
func (p *superPath) sent(seq serial.Num, size, n int) {
	if !p.trying {
		p.trying, p.start, p.end, p.n, p.again = true, seq, seq.Add(size), n, 0
	}
}

// resent records a retransmission.
func (p *superPath) resent(seq serial.Num, n int) {
	if p.trying && p.start.LessEq(seq) && seq.Less(p.end) {
		p.again += n
	}
}

// acked processes an acknowledgement. It reports whether a whole super-frame was lost.
func (p *superPath) acked(una serial.Num) (dropped bool) {
	if !p.trying || una.Less(p.end) {
		return false
	}
	p.trying = false
	if p.again < p.end.Sub(p.start) {
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

// join appends a segment that is due to the current super-frame. It returns false if that is
// not possible. following says that the header of the segment continues that of the one before it.
func (c *tcpConn) join(w *worker, o *tcp.Out, following bool) bool {
	b := &w.super
	if b.link == nil || !o.Whole || o.Flags != tcp.ACK|tcp.PSH || c.tuple.NVLAN != 0 {
		return false
	}
	if b.n == 0 {
		if b.most = c.super.limit(); b.most < 2 {
			return false
		}
		b.head, b.ecn, b.size, b.used = o.Header, o.ECN, o.Len, 0
	} else if o.Len > b.size || !following && !b.continues(o) {
		return false
	}
	b.slots[b.n] = link.Slot(o.Buf)
	b.n++
	b.used += o.Len
	if o.Len < b.size || b.n == b.most || b.used+b.size+maxHeaders > b.link.SuperBytes() {
		c.sendGathered(w) // it is full
	}
	return true
}

// partial reports whether some segments are not sent yet, but too few for a full super-frame, while
// others are in flight, whose acknowledgement would send these if nothing else did.
func (c *tcpConn) partial(w *worker) bool {
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
	n := b.n
	b.n = 0
	switch {
	case n == 0:
		return
	case n > 1 && c.sendSuper(w, n):
		c.super.sent(b.head.Seq, b.used, n)
		w.stats.TxSuper++
		w.stats.TxSuperSegments += uint64(n)
		return
	case n > 1:
		w.stats.TxSuperRefused++
	}
	h := b.head
	for _, s := range b.slots[:n] {
		st := &w.slots[s]
		w.postSegment(&c.tuple, &h, s, st.n, st.sum, b.ecn)
		h.Seq = h.Seq.Add(st.n)
	}
}

// sendSuper sends n segments as one packet. Their slots may be retransmitted as soon as it
// returns. It returns false if the link refused the packet.
func (c *tcpConn) sendSuper(w *worker, n int) bool {
	b, t := &w.super, &c.tuple
	hl := b.head.Len()
	first := w.link.Bytes(b.slots[0])
	tcpOff := headroom - hl
	off := tcpOff - t.HeaderLen()
	b.head.Put(first[tcpOff:headroom])
	w.ipid += uint16(n) // each segment uses an identification
	t.Put(first[off:tcpOff], hl+b.used, b.ecn, w.ipid-uint16(n)+1)
	sum := pkt.Fold(t.PseudoSum(hl + b.used))
	first[tcpOff+16], first[tcpOff+17] = byte(sum>>8), byte(sum)
	f := &b.frame
	f.Parts = b.parts[:n]
	for i, s := range b.slots[:n] {
		f.Parts[i] = w.link.Bytes(s)[headroom : headroom+b.size]
	}
	last := b.used - (n-1)*b.size
	f.Parts[n-1] = f.Parts[n-1][:last]
	f.Parts[0] = first[off : headroom+b.size]
	f.HdrLen, f.TCPOff, f.Size, f.V6 = headroom-off, tcpOff-off, b.size, t.V6
	if !b.link.SendSuper(f) {
		return false
	}
	size := f.Len()
	if w.taps != nil {
		for _, tap := range *w.taps {
			tap.take(w, &t.Flow, true, size, f.Parts)
		}
	}
	w.stats.TxFrames++
	w.stats.TxBytes += uint64(size)
	return true
}
