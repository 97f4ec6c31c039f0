package dataplane

import (
	"container/list"
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
)

// tcpConn is a TCP connection with MPA and a single DDP stream.
type tcpConn struct {
	lane
	stream
	tcp    lowerTCP  // segs, sock or host
	segs   *tcp.Conn // over frames, or nil
	sock   *socket   // over a socket, or nil
	host   *hostEnd  // within the host, or nil
	tuple  pkt.Tuple
	ip     IPOptions
	lst    *listener // while half-open
	holds  int       // received frames of the MTU held out of order
	holder int       // index in heldTable.holders if holds is not 0
	super  superPath
	runs   int // buffers of runs not acknowledged

	waiting *list.Element // in worker.timeWait, or nil

	// Streaming mode.
	wide    bool // for a byte stream, in may hold a whole window
	pre     byteStream
	failure *term.Error // if not nil, terminates full operation when it begins

	// Full operation.
	tx        mpa.Framer
	txStart   serial.Num // sequence number of the first FPDU
	backlog   int        // backlog that noteBacklog last passed to the transport
	rx        mpa.Receiver
	direct    bool       // within the host: segments are copied, not framed
	late      bool       // bytes that have arrived in order are not processed yet: see received
	halfUntil clock.Time // when it closes after the peer has closed, or 0
	waits     receiveWait
	probe     silenceProbe
}

// newTCPConn makes a connection over tc. If tc is nil, the caller sets another transport.
func newTCPConn(id ConnID, flow pkt.Flow, tc *tcp.Conn) *tcpConn {
	c := &tcpConn{tcp: tc, segs: tc}
	c.llp, c.key = c, handoff.Key{Flow: flow}
	c.stream.id, c.stream.lane = id, &c.lane
	return c
}

// enter adds a new connection to the tables.
func (c *tcpConn) enter(w *worker) {
	w.enter(&c.lane)
	w.streams[c.id] = &c.stream
	w.stats.Conns++
	w.mark(&c.lane)
}

// enterDialed adds c, which r opens, to the tables.
func (c *tcpConn) enterDialed(w *worker, r *ConnectRequest) {
	c.wide, c.ip = r.Stream, r.IP
	c.giveUp = w.deadlineAfter(r.Timeout)
	w.stats.ActiveOpens++
	c.enter(w)
}

// enterAccepted adds c, which a peer opens to l, to the tables.
func (c *tcpConn) enterAccepted(w *worker, l *listener) {
	c.lst, c.wide, c.ip = l, l.stream, l.ip
	w.stats.PassiveOpens++
	c.enter(w)
}

// discard ends c at once, and removes it from the tables.
func (c *tcpConn) discard(w *worker) {
	c.tcp.Abort(w.now)
	w.pumpLane(&c.lane, nil)
}

// drop removes a connection, whose tcp.Conn has released everything, from the tables.
func (c *tcpConn) drop(w *worker) {
	if c.gone {
		return
	}
	w.drop(&c.lane)
	if c.waiting != nil {
		w.timeWait.Remove(c.waiting)
	}
	w.forget(&c.stream)
	w.e.dir.Remove(c.key, w)
	w.leaves(c)
}

// leaves records that c no longer belongs to this worker.
func (w *worker) leaves(c *tcpConn) {
	if w.recent == c {
		w.recent = nil
	}
	w.stats.Conns--
}

// connectTCP starts an active open.
func (w *worker) connectTCP(id ConnID, r *ConnectRequest, hop *Hop) error {
	flow := pkt.NewFlow(r.Local, r.Remote)
	k := handoff.Key{Flow: flow}
	iss := tcp.ISS(w.e.secret, flow, w.now)
	if old := w.lookup(&flow); old != nil && old.segs.MayFollow(w.now, iss) {
		old.discard(w)
	}
	switch {
	case w.lanes[k] != nil || w.e.elsewhere(k, w):
		return errFlowExists
	case !w.makePlace():
		return errTooMany
	}
	c := newTCPConn(id, flow, tcp.Dial(w.now, &w.tcp, flow, iss, w.mtuOf(hop)))
	c.tuple = tupleOf(flow, hop, r.IP)
	c.enterDialed(w, r)
	if len(w.e.workers) > 1 {
		w.e.dialing.Add(k, w)
	}
	return nil
}

// adoptTCP moves the connection for which a SYN-ACK arrived here from the worker that dialed
// it, and then passes it the segment. It reports whether there is such a connection.
func (w *worker) adoptTCP(f *rxFrame) bool {
	if f.seg.Len != 0 {
		return false
	}
	owner, full := w.e.dialedBy(handoff.Key{Flow: f.pkt.Flow}, w)
	if owner == nil {
		return full
	}
	flow, seg := f.pkt.Flow, f.seg
	owner.post(func(o *worker) {
		c := o.lookup(&flow)
		if c == nil || c.mode != modeOpening || c.lst != nil {
			return
		}
		o.leaves(c)
		o.moveTo(w, &c.lane, func(w *worker) {
			w.stats.Conns++
			seg.Buf = tcp.NoBuf
			c.segs.HandleSegment(w.now, &seg)
		})
	})
	return true
}

func tupleOf(flow pkt.Flow, hop *Hop, ip IPOptions) pkt.Tuple {
	t := pkt.Tuple{Flow: flow, Proto: pkt.ProtoTCP, V6: !netip.AddrFrom16(flow.Remote).Is4In6()}
	setHop(&t, hop, ip)
	return t
}

func setHop(t *pkt.Tuple, hop *Hop, ip IPOptions) {
	t.SrcMAC, t.DstMAC = hop.SrcMAC, hop.DstMAC
	t.NVLAN = copy(t.VLANs[:], hop.VLANs)
	ip.apply(t)
}

func (c *tcpConn) setHop(w *worker, _ [16]byte, hop *Hop) {
	if c.segs == nil {
		return // over a socket or within the host there are no headers
	}
	old, mss := c.tuple, c.segs.MSS()
	setHop(&c.tuple, hop, c.ip)
	c.segs.SetMTU(w.now, w.mtuOf(hop))
	changed := c.tuple != old || hop.Found
	if changed {
		c.segs.PathChanged(w.now)
	}
	if changed || c.segs.MSS() != mss {
		c.super = superPath{} // other super-frames may get through
	}
	w.mark(&c.lane)
}

func (c *tcpConn) setDSCP(dscp uint8) error {
	c.ip.DSCP, c.tuple.DSCP = dscp, dscp
	if c.sock != nil && c.sock.fd >= 0 {
		return c.ip.applySocketDSCP(c.sock.fd)
	}
	return nil
}

func (c *tcpConn) streams() []*stream { return []*stream{&c.stream} }

func (c *tcpConn) info(ci *ConnInfo) {
	ci.State, ci.TCP, ci.StreamData = c.tcp.State(), c.tcp.Stats(), c.pre.unread()
}

func (c *tcpConn) begin(w *worker) int {
	c.showData(w) // before the FIN or the end is reported
	c.resume(w)
	work := c.events(w)
	if c.gone {
		return work + c.send(w, false) // there may be a RST to send
	}
	work += c.takeBack(w)
	if c.mode == modeFull || c.wide && c.pre.unsent() > 0 {
		w.sched.Enqueue(&c.member)
	}
	return work
}

func (c *tcpConn) pump(w *worker, g *sched.Grant) int {
	work := 0
	switch c.mode {
	case modeStreaming, modeSwitching:
		if c.composeStream(w, g); c.mode == modeFull {
			w.mark(&c.lane)
		}
	case modeFull:
		if g != nil {
			work += c.composeFPDUs(w, g)
		} else {
			c.lookAt(w)
		}
	}
	more := c.mode == modeFull && g != nil && g.Why == sched.Spent && g.Alone()
	work += c.send(w, more)
	if g != nil && g.Alone() {
		w.link.Flush() // first, since the peer waits for it, and no other lane has a frame to add
	}
	work += c.takeBack(w)
	c.drainHeld(w)
	c.showData(w)
	work += c.events(w)
	if c.gone {
		return work
	}
	if c.mode == modeFull {
		c.completions(w)
	}
	if c.mode == modeFull {
		c.noteBacklog(w)
		c.pullMore(w)
		c.watchSilence(w.now)
	}
	c.flushLate(w)
	return work
}

func (c *tcpConn) pumpStream(w *worker, _ *stream, g *sched.Grant) { c.pump(w, g) }

func (c *tcpConn) next() clock.Time {
	at := clock.Earliest(clock.Earliest(c.tcp.Deadline(), c.giveUp), clock.Earliest(c.probe.at, c.halfUntil))
	return clock.Earliest(at, c.waits.look)
}

// recheckAfter is the number of consecutive time-outs after which the next hop is resolved again.
const recheckAfter = 2

func (c *tcpConn) timeout(w *worker) {
	if c.giveUp.Due(w.now) {
		c.giveUp = 0
		if c.mode == modeOpening {
			c.err = ErrTimeout
		}
		if c.tcp.State() != tcp.TimeWait {
			c.tcp.Abort(w.now)
		}
	}
	c.probePeer(w.now)
	if c.halfUntil.Due(w.now) {
		c.stream.close(w)
	}
	before := c.tcp.TimeoutsInARow()
	c.tcp.HandleTimeout(w.now)
	if n := c.tcp.TimeoutsInARow(); n > before && n >= recheckAfter && c.lst == nil { // of a half-open one the address may be forged
		w.e.recheckHop(c.id, c.key.Flow)
	}
}

// events handles the events of the transport.
func (c *tcpConn) events(w *worker) int {
	n := 0
	for !c.late { // it has received more before
		ev, ok := c.tcp.PollEvent()
		if !ok {
			break
		}
		n++
		switch ev {
		case tcp.EventEstablished:
			c.established(w)
		case tcp.EventPeerClosed:
			c.peerClosed(w)
		case tcp.EventClosed:
			c.takeBack(w)
			c.finish(w, c.tcp.Err())
			c.drainHeld(w) // drops what it has not delivered
			c.drop(w)
			return n
		}
	}
	if !c.closed() && !c.late && c.rests() {
		if c.tcp.State() == tcp.FinWait2 {
			c.giveUp = w.now.Add(orphanTime)
		}
		c.finish(w, nil)
		w.enterTimeWait(c)
	}
	return n
}

// orphanTime is the time for which a connection without a program waits for the peer's FIN, whatever else the peer sends.
const orphanTime = time.Minute

// rests reports whether c needs its tcp.Conn only for what the peer may still send: in TIME-WAIT, and before the peer's FIN if the
// program is not to wait for that.
func (c *tcpConn) rests() bool {
	state := c.tcp.State()
	return state == tcp.TimeWait || state == tcp.FinWait2 && c.mode == modeForsaken
}

// established is called when the TCP handshake is done.
func (c *tcpConn) established(w *worker) {
	c.giveUp = 0
	w.e.dialing.Remove(c.key, w)
	c.mode = modeStreaming
	ev := c.eventOf(w, Event{Kind: EventConnected, Host: c.host != nil})
	if l := c.lst; l != nil {
		ev.Kind, ev.Listener = EventAccepted, l.id
		c.leaveListener()
		w.e.events.pushCounted(w, &l.unseen, ev)
		if c.host == nil {
			w.e.acceptedHop(c.id, c.key.Flow)
		}
	} else {
		w.e.events.push(ev)
	}
	c.showData(w)
}

// leaveListener removes c from the half-open connections of its listener.
func (c *tcpConn) leaveListener() {
	if c.lst != nil {
		if c.segs != nil {
			c.lst.tcp.Done(c.segs)
		}
		c.lst = nil
	}
}

// finish reports that c is closed; its tcp.Conn may stay in TIME-WAIT.
func (c *tcpConn) finish(w *worker, err error) {
	c.stream.finish(w, err)
	c.leaveListener()
	c.waits.end()
}

// peerClosed handles the peer's FIN. In streaming mode our direction stays open until the
// control plane closes it. In full operation, outstanding Read Responses and posted work are
// still sent (RFC 5041 section 6.2.1), for a limited time. A connection that is switching to
// full operation is closed.
func (c *tcpConn) peerClosed(w *worker) {
	if c.closed() {
		return
	}
	if c.waits.waiting() || c.late {
		c.waits.closed = true // resume calls again
		return
	}
	w.event(&c.stream, Event{Kind: EventPeerClosed})
	switch c.mode {
	case modeStreaming:
	case modeFull:
		if c.remoteEvents(w); c.mode == modeFull {
			c.end, c.rest, c.halfUntil = endHalf, c.qp.QP.Config().SQDepth, w.now.Add(halfTime)
			c.leave(w)
		}
	default:
		c.stream.close(w)
	}
}

// halfTime is the time for which sending continues after the peer has closed. It is shorter
// than the time after which iwarpd, as the peer, resets the connection.
const halfTime = 5 * time.Second

func (c *tcpConn) disconnect(w *worker, s *stream) {
	switch c.mode {
	case modeStreaming:
		c.pre.finish = true
	case modeSwitching, modeFull:
		c.leave(w)
	default:
		s.close(w)
	}
	w.mark(&c.lane)
}

func (c *tcpConn) closeStream(w *worker, _ *stream) {
	c.halfUntil = 0
	c.tcp.Close(w.now)
}

func (c *tcpConn) abortStream(w *worker, _ *stream) { c.tcp.Abort(w.now) }

func (c *tcpConn) fault(*worker) {}

func (c *tcpConn) reset(w *worker) { c.abort(w, c.err) }

// attach starts full operation as soon as all streaming-mode bytes have been sent.
func (c *tcpConn) attach(w *worker, s *stream, a Attachment) {
	if c.mode != modeStreaming || c.pre.finish {
		w.refuseAttach(c.id, a)
		return
	}
	s.linkQP(w, a)
	c.failure = a.Fail
	c.pre.out = append(c.pre.out, a.Reply...)
	c.mode = modeSwitching
	w.mark(&c.lane)
	if a.QP.left.Load() {
		s.forsake(w)
	}
}

// answer refuses the queue pair: only SCTP has requests to answer.
func (c *tcpConn) answer(w *worker, s *stream, _ session.Setup, a Attachment) {
	if a.QP != nil {
		w.refuseAttach(s.id, a)
	}
}

// noteBacklog reduces the window by the data that must still be stored in far memory, and
// closes it while segments wait for a receive.
func (c *tcpConn) noteBacklog(w *worker) {
	n := 0
	if c.waits.waiting() {
		n = w.tcp.RcvWindow
	} else if far := c.qp.Far; far != nil {
		n = far.Backlog()
	}
	if n != c.backlog {
		c.backlog = n
		c.tcp.SetBacklog(n)
	}
}

// room returns how many bytes c may receive now: in streaming mode as many as may wait for the
// control plane. In full operation, at most n: as many as the limit of outstanding far memory
// allows, and none while earlier ones are late or segments wait for a receive.
func (c *tcpConn) room(w *worker, n int) int {
	switch {
	case c.mode < modeFull:
		return c.streamLimit(w) - c.pre.unread()
	case c.late, c.waits.waiting():
		return 0
	case c.qp == nil || c.qp.Far == nil:
		return n
	case c.crowded():
		return 0
	}
	return min(w.tcp.RcvWindow-c.qp.Far.Backlog(), n)
}
