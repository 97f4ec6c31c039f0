package dataplane

import (
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/tcp"
)

// send posts the segments that are due. If more will be composed in the next turn, the segments of a
// super-frame that is not full wait for it.
func (c *tcpConn) send(w *worker, more bool) int {
	switch {
	case c.sock != nil:
		return c.sock.flush()
	case c.host != nil:
		return c.host.flush()
	}
	n := 0
	c.segs.SetMayHold(c.mayHold(w))
	if c.super.acked(c.segs.SndUna()) {
		w.stats.TxSuperDropped++
	}
	for o := &w.out; !more || w.super.n > 0 || !c.underfilled(w); n++ {
		c.segs.SetBurst(c.burst(w))
		following := w.super.n > 0 && c.segs.PollFollowing(w.now, o)
		if !following && !c.segs.PollTransmit(w.now, o) {
			break
		}
		if !c.join(w, o, following) {
			c.sendGathered(w)
			if !c.join(w, o, false) {
				c.transmit(w, o)
			}
		}
	}
	c.sendGathered(w)
	return n
}

// takeBack frees the slots and buffers that the peer has acknowledged.
func (c *tcpConn) takeBack(w *worker) int {
	n := 0
	for {
		b, ok := c.tcp.PollReleased()
		if !ok {
			return n
		}
		if isRun(b) {
			w.super.runs.put(b)
			w.sched.Disown(&c.member)
			c.runs--
		} else {
			w.disown(&c.lane, link.Slot(b))
		}
		n++
	}
}

// push passes a composed slot to the transport, which owns it from then on. sum is the partial
// checksum of its n bytes.
func (c *tcpConn) push(w *worker, s link.Slot, n int, sum uint32) {
	st := &w.slots[s]
	st.owned, st.n, st.sum = true, n, sum
	w.record = link.NoSlot
	c.tcp.Push(tcp.Buf(s), n)
	w.sched.Own(&c.member)
}

// composeFPDUs fills TX slots with FPDUs while the window and g have room.
func (c *tcpConn) composeFPDUs(w *worker, g *sched.Grant) int {
	c.remoteEvents(w)
	n := 0
	for pulled := 0; c.mode == modeFull && !c.gate; {
		if c.health != failed && c.ddp.Left() < c.tcp.MSS() {
			pulled = c.pull(w)
		}
		// A segment that does not fit in the current record starts the next one at
		// once, so two slots must be free.
		if c.tcp.Room() <= 0 || !w.sched.May(&c.member, g) {
			break
		}
		records := c.compose(w, g)
		if records == 0 {
			break
		}
		n += records
		if pulled < pullBudget && !c.sendable() {
			break // what was posted meanwhile waits for its doorbell
		}
	}
	if c.mode == modeFull && g.Why == sched.Share && c.sendable() {
		w.sched.Starve()
	}
	c.composed(w, n > 0, g.Why == sched.Idle)
	return n
}

// compose composes a record, or several, and charges them to g. It returns their number: 0 if there was
// nothing to send.
func (c *tcpConn) compose(w *worker, g *sched.Grant) int {
	if c.direct {
		return c.copySegment(w, g)
	}
	if n := c.composeRun(w, g); n > 0 {
		return n
	}
	return c.composeRecord(w, g)
}

// leastFill is the least room in a record, in bytes, for starting a message of several records
// with an FPDU that fills it: the size of the smallest MULPDU. Filling makes the records of
// consecutive messages equally long, which the segments of a super-frame must be.
const leastFill = 144

// recordSize returns how many bytes a record may have: those of a segment, or, as the kernel's TCP
// forms its segments itself, of a slot.
func (c *tcpConn) recordSize() int {
	if c.sock != nil {
		return socketSlot - headroom
	}
	return c.tcp.MSS()
}

// composeRecord packs whole FPDUs into a record. It returns the number of records, as compose does.
func (c *tcpConn) composeRecord(w *worker, g *sched.Grant) int {
	mss, most := c.tcp.MSS(), c.recordSize()
	mulpdu := c.tx.MULPDU(mss)
	if !c.hasPend && !c.poll(w, mulpdu, mulpdu) {
		return 0
	}
	s, ok := w.recordSlot()
	if !ok {
		c.hasPend, g.Why = true, sched.Slots
		return 0
	}
	buf := w.link.Bytes(s)[headroom:]
	seq, used, fpdus, sum := c.tcp.SndNxt(), 0, 0, uint32(0)
	for {
		ulpdu := c.pending.HdrLen + c.pending.Len
		size := c.tx.Size(seq, ulpdu)
		if used > 0 && used+size > most {
			c.hasPend = true
			break
		}
		c.hasPend = false
		if !c.composeFPDU(w, buf[used:], seq, ulpdu) {
			break
		}
		used += size
		fpdus++
		seq = seq.Add(size)
		sum = pkt.Add(sum, c.tx.Sum()) // FPDUs are multiples of four bytes
		room := mulpdu
		if left := most - used; left >= leastFill {
			room = c.tx.MULPDU(min(left, mss))
		}
		if c.ddp.TerminateSent() || !c.poll(w, room, mulpdu) {
			break
		}
	}
	if used == 0 {
		w.freeRecord()
		return 0
	}
	c.push(w, s, used, sum)
	w.sched.Compose((used - 1) / mss) // a long record costs as much as several
	w.stats.TxRecords++
	g.Left -= sched.Cost(used, 1, fpdus)
	return 1
}

// composeRun composes several FPDUs of the largest size at once, each with the next part of the same
// message, starting with the pending segment. It returns the number of records, as compose
// does, and 0 too if there is only one segment.
// Other records, and FPDUs with markers, whose sizes vary, are composed by composeRecord.
func (c *tcpConn) composeRun(w *worker, g *sched.Grant) int {
	p, ulpdu := &c.pending, c.pending.HdrLen+c.pending.Len
	if !c.hasPend || c.tx.Markers() || ulpdu != c.tx.MULPDU(c.tcp.MSS()) {
		return 0
	}
	seq := c.tcp.SndNxt() // matters only with markers
	size := c.tx.Size(seq, ulpdu)
	most := min((c.tcp.Room()+size-1)/size, w.sched.Most(&c.lane.member, g, sched.Cost(size, 1, 1)))
	if most = min(most, c.qp.QP.Gatherable(&p.Src, most*p.Len)/max(p.Len, 1)); most < 2 {
		return 0
	}
	n := 1 + c.ddp.Extend(p, most-1)
	if n < 2 {
		return 0
	}
	c.hasPend = false
	payload, ok := c.gather(w, n*p.Len)
	if !ok {
		return 0
	}
	w.current = &c.stream
	hdr := p.Hdr[:p.HdrLen]
	per := max(c.recordSize()/size, 1) // more than 1 over kernel sockets
	records := 0
	for done := 0; done < n; {
		some, sum := n-done, uint32(0)
		var mem []byte
		long := c.takesRun(w, some, size)
		if long {
			mem = w.payload(w.super.runs.next())
			some = min(some, len(mem)/size)
		} else {
			s, _ := w.recordSlot() // Most has counted the free ones
			mem = w.link.Bytes(s)[headroom:]
			some = min(some, per)
		}
		for i := range some {
			dst := mem[i*size:]
			if b := payload[0]; len(b) > p.Len {
				sum = pkt.Add(sum, c.tx.Put(dst, hdr, b[:p.Len]))
				payload[0] = b[p.Len:]
			} else {
				payload = c.composePieces(dst, seq, hdr, payload)
				sum = pkt.Add(sum, c.tx.Sum())
			}
			ddp.Advance(hdr, p.Len)
		}
		if long {
			c.segs.PushRun(w.super.runs.take(), some*size, size)
			w.sched.Own(&c.member)
			c.runs++
			records += some
		} else {
			c.push(w, w.record, some*size, sum)
			records++
		}
		w.sched.Compose(some - 1)
		done += some
	}
	w.current = nil
	w.stats.TxRecords += uint64(records)
	w.stats.TxFPDUs += uint64(n)
	g.Left -= sched.Cost(n*size, records, n)
	return records
}

// takesRun reports whether the next of n segments of size bytes, which follow each other, shall lie in a
// buffer.
func (c *tcpConn) takesRun(w *worker, n, size int) bool {
	return n*size >= leastRun && c.segs != nil && c.burst(w)*size >= leastRun && c.runs < sched.MemberShare*w.super.runs.left()
}

// composePieces composes an FPDU whose payload lies in several pieces, or ends one. It returns the rest
// of the pieces.
func (c *tcpConn) composePieces(dst []byte, seq serial.Num, hdr []byte, payload [][]byte) [][]byte {
	left := c.pending.Len
	c.tx.Begin(dst, seq, len(hdr)+left)
	c.tx.Write(hdr)
	for left > 0 {
		b := payload[0][:min(left, len(payload[0]))]
		c.tx.Write(b)
		left -= len(b)
		if payload[0] = payload[0][len(b):]; len(payload[0]) == 0 {
			payload = payload[1:]
		}
	}
	c.tx.End()
	return payload
}

// composeFPDU writes the pending segment to dst as an FPDU in one pass: header, payload from
// client memory, markers and CRC.
func (c *tcpConn) composeFPDU(w *worker, dst []byte, seq serial.Num, ulpdu int) bool {
	p := &c.pending
	payload, ok := c.gather(w, p.Len)
	if !ok {
		return false
	}
	w.current = &c.stream
	c.tx.Begin(dst, seq, ulpdu)
	c.tx.Write(p.Hdr[:p.HdrLen])
	for _, b := range payload {
		c.tx.Write(b)
	}
	c.tx.End()
	w.current = nil
	w.stats.TxFPDUs++
	return true
}

// transmit posts a segment that is due, or several of a run.
func (c *tcpConn) transmit(w *worker, o *tcp.Out) {
	h := o.Header
	for off, end := o.Off, o.Off+o.Len; ; {
		n := min(o.Size, end-off)
		s, sum, ok := w.segmentSlot(o.Buf, off, n)
		if !ok {
			return
		}
		if o.Retransmit {
			w.stats.TxRetransmits++
			c.super.resent(o.Seq)
		}
		w.postSegment(&c.tuple, &h, s, n, sum, o.ECN)
		if off += n; off >= end {
			return
		}
		h.Seq = h.Seq.Add(n)
		h.Flags &^= tcp.CWR
	}
}

// segmentSlot returns a slot that holds bytes [off,off+n) of buf after its headroom, and their partial
// checksum.
func (w *worker) segmentSlot(buf tcp.Buf, off, n int) (s link.Slot, sum uint32, ok bool) {
	if buf < firstRun {
		st := &w.slots[buf]
		if !st.posted && off == 0 && n == st.n {
			return link.Slot(buf), st.sum, true
		}
	}
	// A header-only segment, part of a run or of a record that was split when the MSS shrank, or a
	// record that the kernel has not released yet.
	s, ok = w.spareSlot()
	if ok && buf != tcp.NoBuf {
		b := w.link.Bytes(s)[headroom : headroom+n]
		copy(b, w.payload(buf)[off:])
		sum = pkt.Sum(b, 0)
	}
	return s, sum, ok
}

// payload returns the bytes of a buffer, or of a slot after its headroom.
func (w *worker) payload(b tcp.Buf) []byte {
	if isRun(b) {
		return w.super.runs.bufs[b-firstRun]
	}
	return w.link.Bytes(link.Slot(b))[headroom:]
}

// postSegment writes Ethernet, IP and TCP headers before the n payload bytes of slot s, and
// posts the frame.
func (w *worker) postSegment(t *pkt.Tuple, h *tcp.Header, s link.Slot, n int, sum uint32, ecn uint8) {
	b := w.link.Bytes(s)
	hl := h.Len()
	tcpOff := headroom - hl
	off := tcpOff - t.HeaderLen()
	h.Put(b[tcpOff:headroom])
	t.Put(b[off:tcpOff], hl+n, ecn)
	sum = pkt.SumHeader(b[tcpOff:headroom], pkt.Add(sum, t.PseudoSum(hl+n)))
	c := ^pkt.Fold(sum)
	b[tcpOff+16], b[tcpOff+17] = byte(c>>8), byte(c)
	w.postFrame(&t.Flow, s, off, headroom+n-off)
}

// reply answers f with a header-only segment, without a connection.
func (w *worker) reply(f *rxFrame, h *tcp.Header, ip IPOptions) {
	s, ok := w.spareSlot()
	if !ok {
		return
	}
	t := f.pkt.Reply()
	ip.apply(&t)
	w.postSegment(&t, h, s, 0, 0, 0)
	w.stats.TxStateless++
}
