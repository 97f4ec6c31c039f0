package dataplane

import (
	"math"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/tcp"
)

// headroom is what stands in front of the payload in a TX slot: Ethernet 14,
// two VLAN tags 8, IPv6 40, TCP with options 60, rounded up.
const headroom = 128

// minHeaders is the IPv4 and TCP headers without options.
const minHeaders = 20 + 20

// slotState is what a worker knows of a TX slot. A slot is free when nobody
// owns it and no post of it is outstanding.
type slotState struct {
	owned  bool   // by a tcp.Conn, until the peer has acknowledged it
	posted uint16 // posts that the kernel has not completed
	sum    uint32 // of the payload, so that a retransmission need not sum it again
	n      int    // payload octets

	sid     uint16 // SCTP: the stream
	control bool   // SCTP: a session control message
}

// begin is the first half of moving a connection forward: it takes what the
// transport reports, and the slots that were acknowledged, before any are given
// out. What has something to send enters the round.
func (w *worker) begin(c *conn) int {
	if c.gone {
		return 0
	}
	if c.as != nil {
		w.enqueue(&c.as.carrier)
		return 0
	}
	w.tell(c) // ahead of a FIN or the end
	work := w.tcpEvents(c)
	if c.gone {
		return work + w.send(c) // a RST may be left
	}
	work += w.takeBack(c)
	if c.mode == modeFull || c.wide && c.outAt < len(c.outq) {
		w.enqueue(c)
	}
	return work
}

// send posts what the transport has due.
func (w *worker) send(c *conn) int {
	n := 0
	c.tcp.SetMayHold(w.mayHold(c))
	for c.tcp.PollTransmit(w.now, &w.out) {
		w.transmit(c)
		n++
	}
	return n
}

// takeBack frees the slots that the peer has acknowledged.
func (w *worker) takeBack(c *conn) int {
	n := 0
	for {
		b, ok := c.tcp.PollReleased()
		if !ok {
			return n
		}
		w.disown(c, link.Slot(b))
		n++
	}
}

// pumpConn moves a connection forward: it composes what the window and g let
// out, nothing if g is nil, sends what is due, and arms its timer.
func (w *worker) pumpConn(c *conn, g *grant) int {
	if c.gone {
		return 0
	}
	if c.as != nil {
		c.as.carrier.pumped = w.stats.Turns
		return w.pumpSCTP(c.as, g)
	}
	c.pumped = w.stats.Turns
	work := 0
	if c.mode == modeStreaming || c.mode == modeSwitching {
		if w.composeStream(c, g); c.mode == modeFull {
			w.mark(c)
		}
	} else if c.mode == modeFull && g != nil {
		work += w.composeFPDUs(c, g)
	} else if c.mode == modeFull {
		w.lookAt(c)
	}
	work += w.send(c) + w.takeBack(c)
	w.drainHeld(c)
	w.tell(c)
	work += w.tcpEvents(c)
	if c.gone {
		return work
	}
	if c.mode == modeFull {
		w.completions(c)
	}
	if c.mode == modeFull {
		w.pullMore(c)
		c.watchSilence(w.now)
	}
	w.flushLate(c)
	if at := clock.Earliest(clock.Earliest(c.tcp.Deadline(), c.giveUp), clock.Earliest(c.nudgeAt, c.halfUntil)); at != c.deadline {
		c.deadline = at
		if at != 0 {
			w.timers.arm(&c.timer, at)
		}
	} else if at != 0 && !c.timer.armed() {
		w.timers.arm(&c.timer, at)
	}
	return work
}

// pull takes work requests from c's queue pair, as many as are sensible at once. Once
// the peer has closed these are no more than the queue may have held then.
func (w *worker) pull(c *conn) int {
	if !c.half {
		return c.qp.QP.PullSend(pullBudget)
	}
	n := c.qp.QP.PullSend(min(pullBudget, c.rest))
	c.rest -= n
	return n
}

// tcpEvents acts on what the transport reports.
func (w *worker) tcpEvents(c *conn) int {
	n := 0
	for {
		ev, ok := c.tcp.PollEvent()
		if !ok {
			break
		}
		n++
		switch ev {
		case tcp.EventEstablished:
			w.established(c)
		case tcp.EventPeerClosed:
			w.peerClosed(c)
		case tcp.EventClosed:
			w.takeBack(c)
			w.drainHeld(c)
			w.finish(c, c.tcp.Err())
			w.drop(c)
			return n
		}
	}
	if !c.closed && c.tcp.State() == tcp.TimeWait {
		w.finish(c, nil)
		w.lingers(c)
	}
	return n
}

// peerClosed takes the peer's FIN. In streaming mode our direction stays open,
// until the control plane closes it. In full operation what is still to be sent goes
// out first: the responses to the peer's Reads, and what was posted (RFC 5041 section
// 6.2.1), for some time. The switch to it does not go on without the other half.
func (w *worker) peerClosed(c *conn) {
	if c.closed {
		return
	}
	w.event(c, EventPeerClosed, nil, nil)
	if c.mode == modeStreaming {
		return
	}
	if c.mode == modeFull {
		if w.remoteEvents(c); c.mode == modeFull {
			c.half, c.rest, c.halfUntil = true, c.qp.QP.Config().SQDepth, w.now.Add(halfTime)
			w.leave(c, math.MaxInt)
		}
		return
	}
	w.closeNow(c)
}

// halfTime is how long a connection goes on sending that the peer has closed. It is less
// than the peer, if it is one of ours, waits before it resets.
const halfTime = 5 * time.Second

// halfOver ends that.
func (w *worker) halfOver(c *conn) {
	if c.halfUntil.Due(w.now) {
		w.closeNow(c)
	}
}

// closeNow closes c behind what TCP has, and flushes the rest.
func (w *worker) closeNow(c *conn) {
	w.dropQP(c)
	c.mode, c.halfUntil = modeClosing, 0
	c.tcp.Close(w.now)
}

// lookAt does for a connection in full operation what takes no slot, while it
// waits for its turn to send.
func (w *worker) lookAt(c *conn) {
	w.remoteEvents(c)
	if c.mode == modeFull && !c.gate && !c.failed {
		w.pull(c)
	}
}

// pullMore takes the work requests for which the send queue had no room before
// this turn's completions: no bell need ring for them again, and nothing may be
// under way whose acknowledgement would do.
func (w *worker) pullMore(c *conn) {
	if !c.gate && !c.failed && w.pull(c) > 0 {
		w.mark(c)
	}
}

// flushLate completes what was posted to a queue pair after it ended, as long as
// its connection is there for a bell to ring.
func (w *worker) flushLate(c *conn) {
	if c.mode == modeClosing && c.qp != nil {
		w.flushQP(c.qp)
	}
}

// composeStream sends streaming-mode octets, each call's worth in one segment
// where it fits (an MPA frame must not share its segment). MPA's do not wait for
// their turn; those of a connection that is a byte stream for long do.
func (w *worker) composeStream(c *conn, g *grant) {
	had := len(c.outq) - c.outAt
	for c.outAt < len(c.outq) {
		if c.tcp.Room() <= 0 || c.wide && (g == nil || !w.may(c, g)) {
			break
		}
		s, ok := w.streamSlot()
		if !ok {
			if g != nil {
				g.why = stopSlots
			} else {
				w.enqueue(c)
			}
			break
		}
		n := min(len(c.outq)-c.outAt, c.tcp.MSS())
		copy(w.link.Bytes(s)[headroom:], c.outq[c.outAt:c.outAt+n])
		c.outAt += n
		w.push(c, s, n, pkt.Sum(w.link.Bytes(s)[headroom:headroom+n], 0))
		w.own(c)
		if g != nil {
			g.left -= n + recordCost
		}
	}
	left := len(c.outq) - c.outAt
	if half := w.e.cfg.SendBuffer / 2; had > 0 && left <= half && (left == 0 || had > half) && c.mode == modeStreaming {
		w.event(c, EventWritable, nil, nil)
	}
	if c.outAt > len(c.outq)/2 {
		c.outq = c.outq[:copy(c.outq, c.outq[c.outAt:])]
		c.outAt = 0
	}
	if left > 0 {
		return
	}
	switch {
	case c.mode == modeSwitching:
		w.switchOver(c)
	case c.finish:
		c.tcp.Close(w.now) // the other direction stays open
	}
}

// streamSlot is a TX slot for streaming-mode octets: connection set-up, which takes of
// the reserve, but leaves half for ACKs and retransmissions.
func (w *worker) streamSlot() (link.Slot, bool) {
	if w.link.FreeSlots() <= min(slotReserve/2, w.link.Slots()/4) {
		return link.NoSlot, false
	}
	return w.link.Alloc()
}

// push gives a composed slot to the transport, which owns it from here. sum is
// that of its n octets.
func (w *worker) push(c *conn, s link.Slot, n int, sum uint32) {
	st := &w.slots[s]
	st.owned, st.n, st.sum = true, n, sum
	c.tcp.Push(tcp.Buf(s), n)
}

// composeFPDUs fills TX slots with FPDUs while the window and g have room.
func (w *worker) composeFPDUs(c *conn, g *grant) int {
	w.remoteEvents(c)
	n, start := 0, c.tcp.SndNxt()
	for !c.gate {
		if !c.failed && c.stream.Left() < c.tcp.MSS() {
			w.pull(c)
		}
		// A segment that does not fit in the record in hand begins the next one
		// at once, so two slots must be free before the first is asked for.
		if c.tcp.Room() <= 0 || !w.may(c, g) {
			break
		}
		seq, fpdus := c.tcp.SndNxt(), w.stats.TxFPDUs
		if !w.composeRecord(c, g) {
			break
		}
		g.left -= c.tcp.SndNxt().Sub(seq) + recordCost + fpduCost*int(w.stats.TxFPDUs-fpdus)
		n++
	}
	if g.why == stopShare && (c.hasPend || c.stream.Sendable()) {
		w.starves()
	}
	if n > 0 || c.failed {
		w.remoteEvents(c)
	}
	if c.mode == modeFull && c.stream.TerminateSent() && !c.hasPend { // else that is what waits
		w.closeNow(c)
	}
	if c.sent(c.tcp.SndNxt().Sub(start), g.why) {
		w.closeNow(c)
	}
	return n
}

// composeRecord packs whole FPDUs into one TCP segment. It reports whether
// there was anything to send.
func (w *worker) composeRecord(c *conn, g *grant) bool {
	mss := c.tcp.MSS()
	mulpdu := c.tx.MULPDU(mss)
	if !c.hasPend && !c.stream.PollSegment(mulpdu, &c.pending) {
		return false
	}
	s, ok := w.link.Alloc()
	if !ok {
		c.hasPend, g.why = true, stopSlots
		return false
	}
	buf := w.link.Bytes(s)[headroom:]
	seq, used, sum := c.tcp.SndNxt(), 0, uint32(0)
	for {
		ulpdu := c.pending.HdrLen + c.pending.Len
		size := c.tx.Size(seq, ulpdu)
		if used > 0 && used+size > mss {
			c.hasPend = true
			break
		}
		c.hasPend = false
		if !w.composeFPDU(c, buf[used:], seq, ulpdu) {
			break
		}
		used += size
		seq = seq.Add(size)
		sum = pkt.Add(sum, c.tx.Sum()) // an FPDU has a multiple of four octets
		if c.stream.TerminateSent() || !c.stream.PollSegment(mulpdu, &c.pending) {
			break
		}
	}
	if used == 0 {
		w.link.Free(s)
		return false
	}
	w.push(c, s, used, sum)
	w.own(c)
	w.stats.TxRecords++
	return true
}

// composeFPDU writes the pending segment as an FPDU into dst: header, payload
// copied from client memory, markers, CRC in one pass.
func (w *worker) composeFPDU(c *conn, dst []byte, seq serial.Num, ulpdu int) bool {
	p := &c.pending
	var payload [][]byte
	if p.Len > 0 && p.Src.Kind != rdmap.SourceNone {
		ok := false
		if payload, ok = c.qp.QP.Gather(&p.Src, p.Len, w.parts[:0]); !ok {
			// The memory went away under the work request or the read; the stream
			// knows, and its Terminate is next.
			w.violation(c, c.stream.Err())
			w.mark(c)
			return false
		}
	}
	w.current = c
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

// transmit writes the headers of the segment in w.out and posts it.
func (w *worker) transmit(c *conn) {
	o := &w.out
	var (
		s    link.Slot
		sum  uint32
		slot *slotState
	)
	at := headroom // of the payload in the slot
	whole := false
	if o.Buf != tcp.NoBuf {
		s = link.Slot(o.Buf)
		slot = &w.slots[s]
		whole = slot.posted == 0 && o.Off == 0 && o.Len == slot.n
		sum = slot.sum
	}
	if !whole {
		// An ACK or other header-only segment, part of a record that was cut when
		// the MSS shrank, or a record that the kernel has not let go of yet.
		t, ok := w.link.Alloc()
		if !ok {
			w.stats.TxNoSlot++
			return
		}
		if o.Buf != tcp.NoBuf {
			b := w.link.Bytes(t)[headroom : headroom+o.Len]
			copy(b, w.link.Bytes(s)[headroom+o.Off:][:o.Len])
			sum = pkt.Sum(b, 0)
		}
		s, slot = t, &w.slots[t]
		slot.owned = false
	}
	if o.Retransmit {
		w.stats.TxRetransmits++
	}
	w.postSegment(&c.tuple, &o.Header, s, at, o.Len, sum, o.ECN)
}

// postSegment puts Ethernet, IP and TCP headers in front of n payload octets at
// offset at of slot s, and posts the frame.
func (w *worker) postSegment(t *pkt.Tuple, h *tcp.Header, s link.Slot, at, n int, sum uint32, ecn uint8) {
	b := w.link.Bytes(s)
	hl := h.Len()
	tcpOff := at - hl
	off := tcpOff - t.HeaderLen()
	h.Put(b[tcpOff:at])
	w.ipid++
	t.Put(b[off:tcpOff], hl+n, ecn, w.ipid)
	sum = pkt.SumHeader(b[tcpOff:at], pkt.Add(sum, t.PseudoSum(hl+n)))
	c := ^pkt.Fold(sum)
	b[tcpOff+16], b[tcpOff+17] = byte(c>>8), byte(c)

	if w.taps != nil {
		w.tapOut(&t.Flow, b[off:at+n])
	}
	slot := &w.slots[s]
	if !w.link.Post(s, off, at+n-off) {
		w.link.Flush()
		w.reap()
		if !w.link.Post(s, off, at+n-off) {
			w.stats.TxRingFull++ // as if lost on the wire
			if !slot.owned && slot.posted == 0 {
				w.link.Free(s)
			}
			return
		}
	}
	slot.posted++
	w.stats.TxFrames++
	w.stats.TxOctets += uint64(at + n - off)
}

// reply sends a header-only segment to where the one in hand came from, for no
// connection.
func (w *worker) reply(h *tcp.Header) {
	s, ok := w.link.Alloc()
	if !ok {
		w.stats.TxNoSlot++
		return
	}
	t := w.in.pkt.Reply()
	w.slots[s].owned = false
	w.postSegment(&t, h, s, headroom, 0, 0, 0)
	w.stats.TxStateless++
}

// disown takes back a slot of c that the peer has acknowledged.
func (w *worker) disown(c *conn, s link.Slot) {
	c.slots--
	c.client.slots--
	st := &w.slots[s]
	st.owned = false
	if st.posted == 0 {
		w.link.Free(s)
	}
}
