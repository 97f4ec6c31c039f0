package dataplane

import (
	"errors"
	"net/netip"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/tcp"
)

// hostEnd is one end of a connection between two programs of this host. It takes the place of a
// TCP connection. Both ends belong to one worker, so that data sent by one end has been
// received by the other when the call returns. MPA's start-up exchanges bytes, as over TCP. In
// full operation, FPDUs are exchanged as bytes too if CRC or markers were negotiated. Otherwise
// each DDP segment is copied once, from the memory of one program to that of the other.
type hostEnd struct {
	byteEnd
	peer *hostEnd // other end, or nil if the connection was refused
}

const (
	// hostQueue bounds the bytes of FPDUs that are composed but not delivered.
	hostQueue = 256 << 10
	// hostSegment is the longest DDP segment in bytes. A segment of this length is still in the
	// cache when the receiving program reads it, and does not delay other connections for long.
	hostSegment = 128 << 10
	// hostRecord is the number of copied bytes that count as one record.
	hostRecord = 16 << 10
)

var errHostSCTP = errors.New("dataplane: SCTP cannot reach programs of this host: use TCP")

// newHostEnd returns one end of a connection.
func newHostEnd(w *worker, id ConnID, flow pkt.Flow) *tcpConn {
	c := newTCPConn(id, flow, nil)
	h := &hostEnd{byteEnd: byteEnd{w: w, c: c, state: tcp.Established}}
	c.tcp, c.host = h, h
	c.key.Host = true
	c.probe.n = maxProbes
	return c
}

// reaches reports whether the engine of w must accept or refuse connections to remote, an
// endpoint of this host. With kernel sockets another engine may listen there.
func reaches(w *worker, remote netip.AddrPort) bool {
	return w.socks == nil || w.listeners.find(&pkt.Flow{Local: remote.Addr().As16(), LocalPort: remote.Port()}, pkt.ProtoTCP) != nil
}

// connectHost opens a connection to an address of this host. w gets both ends.
func connectHost(w *worker, id ConnID, r *ConnectRequest) error {
	flow, back := pkt.NewFlow(r.Local, r.Remote), pkt.NewFlow(r.Remote, r.Local)
	for _, f := range []pkt.Flow{flow, back} {
		if k := (handoff.Key{Flow: f, Host: true}); w.lanes[k] != nil || w.e.elsewhere(k, w) {
			return errFlowExists
		}
	}
	switch {
	case r.Local == r.Remote:
		return errSelf
	case !w.makePlace():
		return errTooMany
	}
	c := newHostEnd(w, id, flow)
	c.enterDialed(w, r)
	l := w.listeners.admitting(&back, pkt.ProtoTCP)
	switch {
	case l == nil:
		c.host.end(tcp.ErrRefused)
		return nil
	case !w.makePlace():
		c.host.end(errTooMany)
		return nil
	}
	p := newHostEnd(w, w.newID(), back)
	p.enterAccepted(w, l)
	c.host.peer, p.host.peer = p.host, c.host
	for _, h := range []*hostEnd{c.host, p.host} {
		h.events = append(h.events, tcp.EventEstablished)
	}
	return nil
}

// flush delivers composed data to the peer, as far as it has room, and then the FIN.
func (h *hostEnd) flush() int {
	w, n := h.w, 0
	for h.outAt < len(h.out) {
		room := h.peerRoom()
		if room <= 0 {
			break // the peer's SetBacklog resumes
		}
		o := &h.out[h.outAt]
		b := w.link.Bytes(link.Slot(o.buf))[headroom:][h.written:o.n]
		b = b[:min(len(b), room)]
		h.take(len(b)) // first, since the code below may fault
		p := h.peer
		p.received += uint64(len(b))
		w.mark(&p.c.lane)
		p.c.deliverBytes(w, b)
		n++
	}
	if n > 0 {
		h.goOn()
	}
	if h.closing && h.unsent == 0 && h.open() {
		h.finish()
	}
	return n
}

// finish delivers the FIN to the peer.
func (h *hostEnd) finish() {
	p := h.peer
	if h.state == tcp.CloseWait {
		h.end(nil)
		p.end(nil)
		return
	}
	h.state, p.state = tcp.FinWait2, tcp.CloseWait
	p.events = append(p.events, tcp.EventPeerClosed)
	p.w.mark(&p.c.lane)
}

// peerRoom returns how many bytes the peer can accept.
func (h *hostEnd) peerRoom() int { return h.peer.c.room(h.w, hostQueue) }

// MSS returns the size of a slot.
func (h *hostEnd) MSS() int { return h.w.link.SlotSize() - headroom }

// Room returns how many bytes may be composed now. Copied segments must follow the bytes of
// streaming mode.
func (h *hostEnd) Room() int {
	if !h.open() || h.closing {
		return 0
	}
	if h.c.direct && (h.unsent > 0 || h.peer.c.mode < modeFull) {
		return 0
	}
	return h.peerRoom() - h.unsent
}

// SetBacklog makes the peer send if there is room now.
func (h *hostEnd) SetBacklog(int) {
	if h.peer != nil {
		h.w.mark(&h.peer.c.lane)
	}
}

// Close sends a FIN after all composed data.
func (h *hostEnd) Close(clock.Time) {
	if !h.closing && h.state != tcp.Closed {
		h.close()
	}
}

// Abort resets the connection.
func (h *hostEnd) Abort(clock.Time) {
	h.end(tcp.ErrAborted)
	if h.peer != nil {
		h.peer.end(tcp.ErrReset)
	}
}

// copySegment copies the next DDP segment of c to the peer, which counts as a record. It returns the
// number of records, as compose does.
func (c *tcpConn) copySegment(w *worker, g *sched.Grant) int {
	seg := &c.pending
	if !c.hasPend && !c.poll(w, hostSegment, hostSegment) {
		return 0
	}
	c.hasPend = false
	parts, ok := c.gather(w, seg.Len)
	if !ok {
		return 0
	}
	h, p := c.host, c.host.peer
	n := seg.HdrLen + seg.Len
	h.composed += uint64(n)
	p.received += uint64(n)
	w.sched.Compose(1 + n/hostRecord)
	w.stats.HostSegments++
	w.stats.HostBytes += uint64(n)
	g.Left -= sched.Cost(n, 1, 1)
	w.mark(&p.c.lane)
	p.c.receiveSegment(w, c, parts)
	return 1
}

// receiveSegment processes the pending segment of from, whose payload is parts.
func (c *tcpConn) receiveSegment(w *worker, from *tcpConn, parts [][]byte) {
	seg := &from.pending
	switch {
	case c.mode != modeFull:
		w.stats.RxAfterCloseBytes += uint64(seg.HdrLen + seg.Len)
		return
	case c.health != healthy:
		return
	}
	c.receivedFull(w)
	if c.makeRoom(w); c.health != healthy {
		return
	}
	payload := from.inOne(w, parts)
	w.source, w.current = &from.stream, &c.stream
	var err *term.Error
	if hdr := seg.Hdr[:seg.HdrLen]; c.mustWait(w, marked.Bytes{B: hdr}) {
		c.keep(w, waitingSegment{ulpdu: append(append([]byte(nil), hdr...), payload...)})
	} else {
		err = c.ddp.HandleSegment(hdr, payload)
	}
	w.current, w.source = nil, nil
	c.showReceived()
	if err != nil {
		c.violation(w, err)
	}
}

// inOne returns the bytes of parts, in memory of the client of c, as one contiguous slice.
func (c *tcpConn) inOne(w *worker, parts [][]byte) []byte {
	switch len(parts) {
	case 0:
		return nil
	case 1:
		return parts[0]
	}
	if w.joined == nil {
		w.joined = make([]byte, 0, hostSegment)
	}
	b := w.joined
	w.current = &c.stream
	for _, p := range parts {
		b = append(b, p...)
	}
	w.current = nil
	return b
}
