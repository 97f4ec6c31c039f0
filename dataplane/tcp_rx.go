package dataplane

import (
	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/tcp"
)

// checksumTCP verifies the checksum of the segment in f, whose header has n bytes. If the
// payload looks like an FPDU, the same pass computes its CRC32c.
func (f *rxFrame) checksumTCP(n int) bool {
	p := &f.pkt
	if b := f.Pieces[0]; crc32c.Together && len(b) >= p.L4Off+p.L4Len {
		b = b[p.L4Off : p.L4Off+p.L4Len]
		if last := len(b) - 4; last-n >= 64 && (last-n)%4 == 0 {
			sum := pkt.SumHeader(b[last:], pkt.SumHeader(b[:n], p.PseudoSum))
			var s uint32
			f.crc, s = crc32c.Sum(0, b[n:last])
			f.summed = true
			return pkt.Fold(pkt.Add(sum, s)) == 0xffff
		}
	}
	return checksum(f.Frame, p) == 0xffff
}

// partial reports whether the checksum field of the segment in f contains only the sum of the
// pseudo-header. Kernels leave the rest to the device.
func (f *rxFrame) partial() bool {
	b := f.Pieces[0][f.pkt.L4Off:]
	return uint16(b[16])<<8|uint16(b[17]) == pkt.Fold(f.pkt.PseudoSum)
}

func (w *worker) segment(f *rxFrame) {
	p, seg := &f.pkt, &f.seg
	head := f.Pieces[0]
	n, err := seg.Decode(head[p.L4Off:min(len(head), p.L4Off+p.L4Len)])
	partial := (w.partial || f.moved) && f.partial() // a worker that forwards it has accepted it
	switch {
	case err != nil && (partial || checksum(f.Frame, p) == 0xffff):
		w.stats.RxMalformed++
		return
	case err != nil, !partial && !f.checksumTCP(n):
		w.stats.RxChecksum++
		return
	case partial && !f.moved:
		w.stats.RxPartial++
	}
	if p.L4Off-p.L3Off+p.L4Len > w.link.MTU() && !f.moved {
		w.stats.RxSuper++
	}
	f.off = p.L4Off + n
	seg.Len = p.L4Len - n
	seg.ECN = p.ECN
	seg.Buf = tcp.NoBuf

	if c := w.lookup(&p.Flow); c != nil {
		c.handle(w, f)
	} else if !w.adoptTCP(f) && !w.forward(handoff.Key{Flow: p.Flow}, f) {
		w.unowned(f)
	}
}

// tcpICMP processes an ICMP error about a segment.
func (w *worker) tcpICMP(f *rxFrame) {
	c := w.lookup(&f.icmp.Flow)
	if c == nil {
		w.forward(handoff.Key{Flow: f.icmp.Flow}, f)
		return
	}
	w.stats.RxICMP++
	c.segs.HandleICMP(w.now, &f.icmp)
	w.mark(&c.lane)
}

// handle processes a segment of c.
func (c *tcpConn) handle(w *worker, f *rxFrame) {
	seg := &f.seg
	if seg.Len > 0 && (c.late || c.crowded() || c.waits.full()) {
		w.stats.RxNoHold++
		return // as if it had been lost
	}
	if seg.Len > 0 && c.tcp.RcvNxt().Less(seg.Seq) {
		if !c.canHold(w, f) {
			w.stats.RxNoHold++
			w.mark(&c.lane)
			return
		}
		seg.Buf = w.held.next()
	}
	r := c.segs.HandleSegment(w.now, seg)
	w.mark(&c.lane)
	if c.waiting != nil { // the peer may have sent its FIN again
		w.timeWait.MoveToBack(c.waiting)
	}
	switch r.Action {
	case tcp.Deliver:
		if f.summed && c.mode == modeFull && r.Len == seg.Len {
			c.receiveSummed(w, f.Pieces[0][f.off:][:r.Len], f.crc)
		} else {
			c.deliver(w, f.Frame, f.off+r.Off, r.Len)
		}
		c.drainHeld(w)
	case tcp.Hold:
		c.hold(w, f, r)
	case tcp.Reopen:
		w.pumpLane(&c.lane, nil) // takes the remaining results of the old connection and drops them
		w.unowned(f)
	}
}

// deliver passes n in-order bytes at off of the frame to the current mode of the connection.
func (c *tcpConn) deliver(w *worker, f *link.Frame, off, n int) {
	for b := range pieces(f, off, n) {
		c.deliverBytes(w, b)
	}
}

func (c *tcpConn) deliverBytes(w *worker, b []byte) {
	switch c.mode {
	case modeFull:
		c.receive(w, b)
	case modeOpening, modeStreaming, modeSwitching:
		if c.pre.unread()+len(b) > c.streamLimit(w) {
			c.abort(w, errStreamFull)
			return
		}
		if c.pre.unread() == c.pre.shown {
			w.markLast(&c.lane) // connections report their first data, such as MPA requests, in the order of arrival
		}
		c.pre.in = append(c.pre.in, b...)
		c.tcp.SetBacklog(c.pre.unread())
	default:
		w.stats.RxAfterCloseBytes += uint64(len(b))
	}
}

// receive processes in-order bytes of FPDUs.
func (c *tcpConn) receive(w *worker, b []byte) {
	if c.health != healthy {
		return
	}
	c.rx.HandleStream(b)
	c.fpdus(w)
}

// receiveSummed is receive for the whole payload of a segment. crc is the CRC32c of all but its
// last four bytes.
func (c *tcpConn) receiveSummed(w *worker, b []byte, crc uint32) {
	if c.health != healthy {
		return
	}
	c.rx.HandleSummed(b, crc)
	c.fpdus(w)
}

// fpdus handles the FPDUs that are whole now.
func (c *tcpConn) fpdus(w *worker) {
	before := w.stats.RxFPDUs
	c.handleFPDUs(w)
	if w.stats.RxFPDUs != before {
		c.showReceived()
	}
}

func (c *tcpConn) handleFPDUs(w *worker) {
	f := &w.fpdu
	for {
		ok, err := c.rx.PollFPDU(f)
		if err != nil {
			c.fail(w, err)
			return
		}
		if !ok {
			return
		}
		c.receivedFull(w)
		if c.makeRoom(w); c.health != healthy {
			return
		}
		w.stats.RxFPDUs++
		w.segments++
		w.current = &c.stream
		var terr *term.Error
		switch {
		case f.Placed && c.waits.waiting():
			c.keep(w, waitingSegment{seq: f.Seq})
		case f.Placed:
			terr = c.ddp.DeliverEarly(f.Seq)
		case c.mustWait(w, f.ULPDU):
			b := make([]byte, f.ULPDU.Len())
			f.ULPDU.CopyTo(b)
			c.keep(w, waitingSegment{ulpdu: b})
		default:
			terr = c.ddp.HandleMarked(f.ULPDU)
		}
		w.current = nil
		if terr != nil {
			c.violation(w, terr)
			return
		}
	}
}

// receivedFull records that data of full operation has arrived from the peer.
func (c *tcpConn) receivedFull(w *worker) {
	w.response.news = true // if the peer is within the host, the client's bell was the turn's only work
	c.probe = silenceProbe{n: maxProbes}
	if c.gate {
		c.gate = false
		if c.params.RTR != 0 {
			w.event(&c.stream, Event{Kind: EventEstablished})
		}
	}
}

// placeEarly places the whole FPDUs of an out-of-order segment, found by the
// markers. It reports whether that was every byte of the segment.
func (c *tcpConn) placeEarly(w *worker, h *heldFrame, r tcp.Input) bool {
	b := contiguous(&h.frame, h.off+r.Off, r.Len)
	if b == nil {
		return false
	}
	c.rx.HandleEarly(r.Seq, b)
	all := true
	f := &w.early
	for c.rx.PollEarly(f) {
		w.stats.RxFPDUsEarly++
		w.segments++
		w.current = &c.stream
		placed := c.ddp.HandleEarlyMarked(f.Seq, f.ULPDU)
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

// unowned handles a segment that belongs to no connection.
func (w *worker) unowned(f *rxFrame) {
	if !w.e.answerable(&f.pkt) {
		w.stats.RxMalformed++
		return
	}
	seg, flow := &f.seg, f.pkt.Flow
	if l := w.listeners.admitting(&flow, pkt.ProtoTCP); l != nil {
		syn := seg.Flags&tcp.SYN != 0
		if syn && !w.makePlace() || l.unseen >= maxUnseen {
			w.stats.RxNoConn++
			return
		}
		tc, reply, ok := l.tcp.HandleSegment(w.now, flow, seg)
		if ok {
			w.reply(f, &reply, l.ip)
		}
		switch {
		case tc == nil:
		case !syn && !w.makePlace(): // the SYN cookie is from when there was room
			w.stats.RxNoConn++
		default:
			w.accept(l, tc, f)
		}
		return
	}
	w.stats.RxNoConn++
	if h, ok := tcp.Reset(&seg.Header, seg.Len); ok {
		w.reply(f, &h, IPOptions{})
	}
}

// accept adds a connection created by a listener, half-open or, from a SYN cookie, established.
func (w *worker) accept(l *listener, tc *tcp.Conn, f *rxFrame) {
	c := newTCPConn(w.newID(), f.pkt.Flow, tc)
	c.tuple = f.pkt.Reply()
	l.ip.apply(&c.tuple)
	c.enterAccepted(w, l)
	if f.seg.Flags&tcp.SYN == 0 {
		c.handle(w, f) // the ACK of a cookie, which may carry data
	}
}
