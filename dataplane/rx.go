package dataplane

import (
	"errors"
	"iter"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/prefetch"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/tcp"
)

// inbound is the frame in hand: parsed headers, and where the payload lies.
type inbound struct {
	pkt   pkt.Packet
	seg   tcp.Segment
	icmp  pkt.ICMPError
	off   int // of the payload in the frame
	fpdu  mpa.FPDU
	early mpa.FPDU

	summed bool // crc is the CRC32c of the payload but its last four octets
	crc    uint32
}

// heldTable keeps the frames of out-of-order segments; its indices are the
// tcp.Bufs of received segments.
type heldTable struct {
	frames  []heldFrame
	free    []tcp.Buf
	hand    tcp.Buf // that is being delivered; NoBuf: none
	holders int     // connections that have some
	whole   int     // octets of those that were reassembled
}

type heldFrame struct {
	frame link.Frame
	off   int        // of the segment's payload in the frame
	from  *strayRing // nil: the link, or
	whole bool       // it was reassembled
}

func (h *heldTable) init(n int) {
	h.frames, h.hand = make([]heldFrame, n), tcp.NoBuf
	h.free = make([]tcp.Buf, 0, n)
	for i := n - 1; i >= 0; i-- {
		h.free = append(h.free, tcp.Buf(i))
	}
}

// ahead is how much of the next frame is fetched while one is worked on; in a
// longer one the processor sees by then where the reading goes.
const ahead = 2048

// pollRx takes one burst of frames from the link, or what a fault has left of the
// last one.
func (w *worker) pollRx() int {
	if w.rxAt == w.rxEnd {
		w.rxAt, w.rxEnd = 0, w.link.Receive(w.rx[:])
	}
	first, end := w.rxAt, w.rxEnd
	for i := first; i < end; i++ {
		f := &w.rx[i]
		w.rxAt = i + 1
		if i+1 < end {
			next := w.rx[i+1].Pieces[0]
			prefetch.Octets(next[:min(len(next), ahead)])
		}
		w.stats.RxFrames++
		w.stats.RxOctets += uint64(f.Len())
		if w.taps != nil {
			w.tapIn(f)
		}
		w.hand = f
		if !w.frame(f) {
			w.link.Release(f)
		}
		w.hand = nil
	}
	if len(w.strays.sent) > 0 {
		w.wakeOwners()
	}
	return end - first
}

// frame takes one frame. It reports whether the frame was kept: it is then held
// by a connection.
func (w *worker) frame(f *link.Frame) (kept bool) {
	in := &w.in
	head := f.Pieces[0]
	if err := in.pkt.Parse(head, f.Len()); err != nil {
		switch {
		case errors.Is(err, pkt.ErrFragment) && !w.whole:
			w.fragment(f)
		case errors.Is(err, pkt.ErrChecksum):
			w.stats.RxChecksum++
		default:
			w.stats.RxMalformed++
		}
		return false
	}
	switch in.pkt.Proto {
	case pkt.ProtoTCP:
		return w.segment(f)
	case pkt.ProtoSCTP, pkt.ProtoUDP:
		w.sctpFrame(f)
	case pkt.ProtoICMP, pkt.ProtoICMPv6:
		if in.icmp.Parse(&in.pkt, head) != nil {
			break
		}
		if in.icmp.Proto == pkt.ProtoSCTP || in.icmp.Proto == pkt.ProtoUDP {
			w.sctpICMP(f)
		}
		if in.icmp.Proto == pkt.ProtoTCP {
			if c := w.flows[in.icmp.Flow]; c != nil {
				w.stats.RxICMP++
				c.tcp.HandleICMP(w.now, &in.icmp)
				w.mark(c)
			} else {
				w.stray(in.icmp.Flow, false, f)
			}
		}
	default:
		w.stats.RxUnwanted++
	}
	return false
}

// checksum sums the transport header and payload over the pieces of f.
func checksum(f *link.Frame, p *pkt.Packet) uint16 {
	sum, odd := p.PseudoSum, false
	for b := range octets(f, p.L4Off, p.L4Len) {
		if odd {
			sum = pkt.SumSwap(b, sum)
		} else {
			sum = pkt.Sum(b, sum)
		}
		odd = odd != (len(b)%2 == 1)
	}
	return pkt.Fold(sum)
}

// octets gives n octets at off of the frame, piece by piece.
func octets(f *link.Frame, off, n int) iter.Seq[[]byte] {
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

// contiguous returns n octets at off of the frame if they lie in one piece.
func contiguous(f *link.Frame, off, n int) []byte {
	for b := range octets(f, off, n) {
		if len(b) == n {
			return b
		}
		break
	}
	return nil
}

// checksumTCP verifies the checksum of the segment in f, whose header has n
// octets. If its payload looks like FPDUs, it takes the CRC32c that the payload
// has if it is one, in the same pass.
func (in *inbound) checksumTCP(f *link.Frame, n int) bool {
	in.summed = false
	p := &in.pkt
	if b := f.Pieces[0]; crc32c.Together && len(b) >= p.L4Off+p.L4Len {
		b = b[p.L4Off : p.L4Off+p.L4Len]
		if last := len(b) - 4; last-n >= 64 && (last-n)%4 == 0 {
			sum := pkt.SumHeader(b[last:], pkt.SumHeader(b[:n], p.PseudoSum))
			var s uint32
			in.crc, s = crc32c.Sum(0, b[n:last])
			in.summed = true
			return pkt.Fold(pkt.Add(sum, s)) == 0xffff
		}
	}
	return checksum(f, p) == 0xffff
}

func (w *worker) segment(f *link.Frame) (kept bool) {
	in := &w.in
	p, seg := &in.pkt, &in.seg
	head := f.Pieces[0]
	n, err := seg.Decode(head[p.L4Off:min(len(head), p.L4Off+p.L4Len)])
	if err != nil && checksum(f, p) == 0xffff {
		w.stats.RxMalformed++
		return false
	}
	if err != nil || !in.checksumTCP(f, n) {
		w.stats.RxChecksum++
		return false
	}
	in.off = p.L4Off + n
	seg.Len = p.L4Len - n
	seg.ECN = p.ECN
	seg.Buf = tcp.NoBuf

	c := w.lookup(&p.Flow)
	if c == nil {
		if !w.adopt(p.Flow, *seg) && !w.stray(p.Flow, false, f) {
			w.unowned()
		}
		return false
	}
	return w.toConn(c, f)
}

// toConn gives the segment in hand to its connection.
func (w *worker) toConn(c *conn, f *link.Frame) (kept bool) {
	seg := &w.in.seg
	if seg.Len > 0 && c.tcp.RcvNxt().Less(seg.Seq) {
		n := len(w.held.free)
		if from := w.strays.from; from != nil && !from.mayKeep() || w.whole && w.held.whole+f.Len() > maxWhole {
			n = 0
		} else if n == 0 && w.wantsHeld(c) {
			w.reclaim()
			n = len(w.held.free)
		}
		if n == 0 {
			// No frame to spare for data out of order: as if it had been lost.
			w.stats.RxNoHold++
			w.mark(c)
			return false
		}
		seg.Buf = w.held.free[n-1]
	}
	r := c.tcp.HandleSegment(w.now, seg)
	w.mark(c)
	switch r.Action {
	case tcp.Deliver:
		if w.in.summed && c.mode == modeFull && r.Len == seg.Len {
			w.receiveSummed(c, f.Pieces[0][w.in.off:][:r.Len])
		} else {
			w.deliver(c, f, w.in.off+r.Off, r.Len)
		}
		w.drainHeld(c)
	case tcp.Hold:
		w.held.free = w.held.free[:len(w.held.free)-1]
		h := &w.held.frames[seg.Buf]
		h.frame, h.off, h.from, h.whole = *f, w.in.off, w.strays.from, w.whole
		if h.whole {
			w.held.whole += f.Len()
		} else if h.from != nil {
			h.from.keep() // at once: what follows may fault
		} else {
			w.hand = nil
		}
		if c.holds++; c.holds == 1 {
			w.held.holders++
		}
		w.stats.RxEarly++
		if c.markers && c.mode == modeFull && !c.rxFailed && w.placeEarly(c, h, r) {
			c.tcp.Placed(seg.Buf)
			w.freeHeld(c, seg.Buf)
		}
		w.stats.HeldPeak = max(w.stats.HeldPeak, uint64(len(w.held.frames)-len(w.held.free)))
		return true
	case tcp.Reopen:
		w.pumpConn(c, nil) // takes what the old connection still reports, and drops it
		w.unowned()
	}
	return false
}

func (w *worker) freeHeld(c *conn, b tcp.Buf) {
	if c.holds--; c.holds == 0 {
		w.held.holders--
	}
	h := &w.held.frames[b]
	if h.whole {
		w.held.whole -= h.frame.Len()
		h.frame.Pieces[0] = nil
	} else if h.from != nil {
		h.from.unkeep(&h.frame)
	} else {
		w.link.Release(&h.frame)
	}
	w.held.free = append(w.held.free, b)
}

// wantsHeld reports whether c, which has a segment to be held when no frame is left,
// holds less than half of its share, so that another connection has to give. One
// that holds more loses the segment: its peer sends that again, and not, after a
// time-out and from the window of one segment, all that was acknowledged selectively
// and then taken back (RFC 2018 section 8).
func (w *worker) wantsHeld(c *conn) bool {
	return 2*c.holds*w.held.holders < len(w.held.frames)
}

// mayHold is how many segments c could hold: besides what it has all that is free, or
// else the half of its share that others would have to give.
func (w *worker) mayHold(c *conn) int {
	n := c.holds + len(w.held.free)
	if 2*n < len(w.held.frames) {
		n = max(n, len(w.held.frames)/max(2*w.held.holders, 1))
	}
	return n
}

// reclaim takes back some frames of the connection that holds the most, at most once
// a turn. Its peer sends them again.
func (w *worker) reclaim() {
	if w.reclaimed == w.now {
		return
	}
	w.reclaimed = w.now
	var most *conn
	for _, c := range w.flows {
		if most == nil || c.holds > most.holds {
			most = c
		}
	}
	if most == nil || most.holds == 0 {
		return
	}
	w.stats.RxReclaims++
	most.tcp.Reclaim(max(min(len(w.held.frames)/8, most.holds/2), 1))
	w.drainHeld(most)
	w.mark(most)
}

// drainHeld consumes the held segments that have come in order.
func (w *worker) drainHeld(c *conn) {
	var h tcp.Held
	for c.tcp.PollHeld(&h) {
		if h.Buf == tcp.NoBuf {
			if h.Deliver && c.mode == modeFull && !c.rxFailed {
				w.skip(c, h.Len)
			}
			continue
		}
		if h.Deliver {
			hf := &w.held.frames[h.Buf]
			w.held.hand = h.Buf
			w.deliver(c, &hf.frame, hf.off+h.Off, h.Len)
			w.held.hand = tcp.NoBuf
		}
		w.freeHeld(c, h.Buf)
	}
}

// deliver hands n octets at off of the frame, next in order, to what the
// connection runs.
func (w *worker) deliver(c *conn, f *link.Frame, off, n int) {
	for b := range octets(f, off, n) {
		w.deliverOctets(c, b)
	}
}

func (w *worker) deliverOctets(c *conn, b []byte) {
	switch c.mode {
	case modeFull:
		w.receive(c, b)
	case modeOpening, modeStreaming, modeSwitching:
		if c.unread()+len(b) > w.streamLimit(c) {
			w.abort(c, errStreamFull)
			return
		}
		c.in = append(c.in, b...)
		c.tcp.SetBacklog(c.unread())
	case modeClosing:
		w.stats.RxAfterClose += uint64(len(b))
	}
}

// streamLimit is how many streaming-mode octets may wait for the control plane.
// The window, which they lessen, is the other bound.
func (w *worker) streamLimit(c *conn) int {
	if c.wide {
		return max(w.e.cfg.StreamBuffer, w.tcp.RcvWindow)
	}
	return w.e.cfg.StreamBuffer
}

// receive takes in-order octets of FPDUs.
func (w *worker) receive(c *conn, b []byte) {
	if c.rxFailed {
		return
	}
	c.rx.Feed(b)
	w.fpdus(c)
}

// receiveSummed is receive for the payload of the segment in hand, whole.
func (w *worker) receiveSummed(c *conn, b []byte) {
	if c.rxFailed {
		return
	}
	c.rx.FeedSummed(b, w.in.crc)
	w.fpdus(c)
}

// skip passes octets whose FPDUs were placed early.
func (w *worker) skip(c *conn, n int) {
	c.rx.Skip(n)
	w.fpdus(c)
}

func (w *worker) fpdus(c *conn) {
	f := &w.in.fpdu
	for {
		ok, err := c.rx.Next(f)
		if err != nil {
			w.fail(c, err, nil)
			return
		}
		if !ok {
			return
		}
		c.heard, c.nudgeAt = true, 0
		if c.gate {
			c.gate = false
			if c.attachP.RTR != 0 {
				w.event(c, EventEstablished, nil, nil)
			}
		}
		w.stats.RxFPDUs++
		w.current = c
		var terr *term.Error
		if f.Placed {
			terr = c.stream.DeliverEarly(f.Seq)
		} else {
			terr = c.stream.HandleMarked(f.ULPDU)
		}
		w.current = nil
		if terr != nil {
			w.violation(c, terr)
			return
		}
	}
}

// violation notes what the stream itself has found, and answered by a
// Terminate.
func (w *worker) violation(c *conn, err *term.Error) {
	c.rxFailed = true
	if c.failed {
		return
	}
	c.failed = true
	c.gate = false
	w.stats.Violations++
	w.event(c, EventFailed, err, nil)
}

// placeEarly places the whole FPDUs of an out-of-order segment, found by the
// markers. It reports whether that was every octet of the segment.
func (w *worker) placeEarly(c *conn, h *heldFrame, r tcp.Input) bool {
	b := contiguous(&h.frame, h.off+r.Off, r.Len)
	if b == nil {
		return false
	}
	c.rx.FeedEarly(r.Seq, b)
	all := true
	f := &w.in.early
	for c.rx.NextEarly(f) {
		w.stats.RxFPDUsEarly++
		w.current = c
		placed := c.stream.HandleEarlyMarked(f.Seq, f.ULPDU)
		w.current = nil
		if placed {
			c.rx.MarkPlaced(f.Seq)
			w.stats.RxFPDUsPlacedEarly++
		} else {
			all = false
		}
	}
	return c.rx.EarlyWhole() && all
}

// unowned answers the segment in hand, which is no connection's.
func (w *worker) unowned() {
	in := &w.in
	seg, flow := &in.seg, in.pkt.Flow
	if !w.answerable() {
		w.stats.RxMalformed++
		return
	}
	if l := w.listenerFor(&flow); l != nil {
		if len(w.flows) >= w.e.cfg.MaxConns && !w.evict() && seg.Flags&tcp.SYN != 0 {
			w.stats.RxNoConn++
			return
		}
		tc, reply, ok := l.l.HandleSegment(w.now, flow, seg)
		if ok {
			w.reply(&reply)
		}
		if tc != nil {
			w.accept(l, tc)
		}
		return
	}
	w.stats.RxNoConn++
	if h, ok := tcp.Reset(&seg.Header, seg.Len); ok {
		w.reply(&h)
	}
}

// accept enters a connection that a listener made, half-open or, by a SYN
// cookie, established.
func (w *worker) accept(l *listener, tc *tcp.Conn) {
	c := &conn{flow: w.in.pkt.Flow, tcp: tc, lst: l, passive: true, wide: l.stream, tuple: w.in.pkt.Reply()}
	c.id = w.newID()
	w.addConn(c)
	w.stats.PassiveOpens++
	w.mark(c)
	if w.in.seg.Flags&tcp.SYN == 0 {
		// A cookie's ACK may carry data, and takes the connection to ESTABLISHED.
		w.in.seg.Buf = tcp.NoBuf
		w.in.seg.Len = 0
		c.tcp.HandleSegment(w.now, &w.in.seg)
	}
}

// established is called when the TCP handshake is done.
func (w *worker) established(c *conn) {
	c.giveUp = 0
	w.forgetEmbryo(c)
	c.mode = modeStreaming
	kind := EventConnected
	ev := Event{Conn: c.id, Flow: c.flow, Worker: w.id}
	if c.passive {
		kind = EventAccepted
		ev.Listener = c.lst.id
		c.lst.l.Done(c.tcp)
		c.lst = nil
	}
	ev.Kind = kind
	w.e.events.push(ev)
	if c.passive && w.e.resolver != nil {
		go w.e.resolveConn(c.id, c.flow)
	}
	w.tell(c)
}
