package dataplane

import (
	"errors"
	"math/bits"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/tcp"
)

// mode is where a connection stands on its way from a byte stream to FPDUs.
type mode uint8

const (
	modeOpening   mode = iota // TCP handshake
	modeStreaming             // octets go to and come from the control plane
	modeSwitching             // attached; the last streaming octets wait for the window
	modeFull                  // full operation: FPDUs
	modeClosing               // nothing more is composed
)

// conn is a connection with all that it owns. Its worker's goroutine is the
// only one to touch it.
type conn struct {
	id      ConnID
	flow    pkt.Flow
	tuple   pkt.Tuple
	hopMTU  hopMTU
	tcp     *tcp.Conn // nil: a session of as
	as      *assoc
	sid     uint16    // its DDP stream
	ini     *initiate // a session that we began, until it is answered
	mode    mode
	lst     *listener // while half-open
	passive bool
	dirty   bool
	closed  bool // EventClosed is out
	gone    bool // in no table any more
	err     error

	client *client // whose share of the sending it takes from
	queued bool    // in the client's round
	credit int     // what it may still send before others, in octets of cost
	slots  int     // TX slots that wait for the peer's acknowledgement
	pumped uint64  // the last turn in which it was

	holds    int        // received frames that wait out of order
	giveUp   clock.Time // of an active open
	deadline clock.Time // the earliest of tcp's, giveUp, nudgeAt and halfUntil
	timer    timer

	// streaming mode
	in      []byte // received, not consumed by the control plane, from inAt on
	inAt    int
	told    int    // octets of in, from inAt on, that an EventData has given
	outq    []byte // to be sent, from outAt on
	outAt   int
	finish  bool // close once outq is sent
	wide    bool // in may hold a whole window
	attachP mpa.Params
	attachE *term.Error

	// full operation
	qp        *QPBinding
	stream    *rdmap.Stream
	tx        mpa.Framer
	txStart   serial.Num // of the first FPDU
	rx        mpa.Receiver
	markers   bool // the peer sends them
	heard     bool // an FPDU has arrived
	nudges    int
	nudgeAt   clock.Time
	gate      bool // a responder waits for the first FPDU
	pending   rdmap.Segment
	hasPend   bool
	failed    bool // a Terminate is queued or sent
	leaving   bool // closed once it has sent what was posted, but no more than last octets
	last      int
	half      bool       // the peer has closed, and
	rest      int        // so many work requests may still be taken,
	halfUntil clock.Time // until then
	rxFailed  bool       // nothing that arrives is looked at any more
}

var (
	errDetached   = errors.New("dataplane: queue pair destroyed")
	errAborted    = errors.New("dataplane: connection aborted by the application")
	errNoConn     = errors.New("dataplane: connection is gone")
	errTooMany    = errors.New("dataplane: too many connections")
	errFlowExists = errors.New("dataplane: a connection with these addresses and ports exists")
	errStreamFull = errors.New("dataplane: peer sent too much before MPA startup ended")
)

func trailingZeros(v uint64) int { return bits.TrailingZeros64(v) }

// lookup returns the connection of flow f, or nil. Segments come in bursts of
// one connection.
func (w *worker) lookup(f *pkt.Flow) *conn {
	if c := w.recent; c != nil && c.flow == *f {
		return c
	}
	c := w.flows[*f]
	if c != nil {
		w.recent = c
	}
	return c
}

// unlink takes a connection out of the tables.
func (w *worker) unlink(c *conn) {
	if w.recent == c {
		w.recent = nil
	}
	delete(w.flows, c.flow)
	delete(w.conns, c.id)
	w.stats.Conns = uint64(len(w.flows))
	w.unclaim(c.flow, false)
}

// addConn enters a new connection in the tables.
func (w *worker) addConn(c *conn) {
	c.timer.conn = c
	c.join(&w.house)
	w.flows[c.flow] = c
	w.claim(c.flow, false)
	if c.id != 0 {
		w.conns[c.id] = c
	}
	w.stats.Conns = uint64(len(w.flows))
}

// drop takes a connection out of the tables. Its tcp.Conn has given back all.
func (w *worker) drop(c *conn) {
	if c.gone {
		return
	}
	c.gone = true
	w.timers.stop(&c.timer)
	w.unlink(c)
	w.forgetEmbryo(c)
	if home := w.e.worker(c.id); home != w && c.id != 0 {
		id := c.id
		home.post(func(home *worker) { delete(home.moved, id) })
	}
}

// evict makes room for a new connection where one in TIME-WAIT has the least
// time to go, as hosts do that run out of room for them. It reports whether
// there was one.
func (w *worker) evict() bool {
	for w.lingerAt < len(w.linger) {
		c := w.linger[w.lingerAt]
		w.linger[w.lingerAt] = nil
		w.lingerAt++
		if !c.gone {
			c.tcp.Abort(w.now)
			w.pumpConn(c, nil)
			w.stats.Evicted++
			return true
		}
	}
	w.linger, w.lingerAt = w.linger[:0], 0
	return false
}

// lingers notes that c is in TIME-WAIT, behind those that came to it earlier.
func (w *worker) lingers(c *conn) {
	if len(w.linger) == cap(w.linger) {
		// Drop what is gone before growing.
		kept := w.linger[:0]
		for _, l := range w.linger[w.lingerAt:] {
			if !l.gone {
				kept = append(kept, l)
			}
		}
		clear(w.linger[len(kept):])
		w.linger, w.lingerAt = kept, 0
	}
	w.linger = append(w.linger, c)
}

func (w *worker) withConn(id ConnID, f func(*worker, *conn)) {
	if to := w.moved[id]; to != nil {
		to.post(func(w *worker) { w.withConn(id, f) })
		return
	}
	f(w, w.conns[id])
}

func (w *worker) event(c *conn, kind EventKind, err error, data []byte) {
	w.e.events.push(Event{Kind: kind, Conn: c.id, Flow: c.flow, Worker: w.id, Err: err, Data: data, QP: c.qp})
}

// connect begins an active open.
func (w *worker) connect(id ConnID, flow pkt.Flow, hop Hop, timeout time.Duration, stream bool) error {
	switch {
	case w.flows[flow] != nil || w.elsewhere(flow, false):
		return errFlowExists
	case len(w.flows) >= w.e.cfg.MaxConns && !w.evict():
		return errTooMany
	}
	mtu := w.mtu
	if hop.MTU != 0 {
		mtu = min(mtu, hop.MTU)
	}
	c := &conn{id: id, flow: flow, wide: stream, hopMTU: hopMTU(mtu)}
	c.tuple = tupleOf(flow, &hop)
	c.tcp = tcp.Dial(w.now, &w.tcp, flow, tcp.ISS(w.e.secret, flow, w.now), mtu)
	if timeout > 0 {
		c.giveUp = w.now.Add(timeout)
	}
	w.addConn(c)
	w.rememberEmbryo(c)
	w.stats.ActiveOpens++
	w.mark(c)
	return nil
}

func (c *conn) connectTimeout(w *worker) {
	if c.mode == modeOpening && c.giveUp.Due(w.now) {
		c.giveUp = 0
		c.err = ErrTimeout
		c.tcp.Abort(w.now)
	}
}

func tupleOf(flow pkt.Flow, hop *Hop) pkt.Tuple {
	t := pkt.Tuple{Flow: flow, Proto: pkt.ProtoTCP, V6: !isV4(flow.Remote)}
	setHop(&t, hop)
	return t
}

func setHop(t *pkt.Tuple, hop *Hop) {
	t.SrcMAC, t.DstMAC = hop.SrcMAC, hop.DstMAC
	t.NVLAN = copy(t.VLANs[:], hop.VLANs)
}

// isV4 reports whether a is a v4-mapped address.
func isV4(a [16]byte) bool {
	return [12]byte(a[:12]) == [12]byte{10: 0xff, 11: 0xff}
}

// setHop gives c the next hop to its peer, or, to an SCTP peer, that to one of its addresses.
func (w *worker) setHop(c *conn, remote [16]byte, hop *Hop) {
	mtu := w.mtuOf(hop)
	if c.as != nil {
		if remote != c.flow.Remote {
			w.setFurtherHop(c.as, remote, hop)
			return
		}
		setHop(&c.as.tuple, hop)
		c.as.setMTU(mtu)
		w.mark(&c.as.carrier)
		return
	}
	if c.tuple.HeaderLen() != 0 {
		setHop(&c.tuple, hop)
	}
	if c.hopMTU.set(w, mtu) {
		c.tcp.SetMTU(w.now, mtu)
	}
	w.mark(c)
}

// mtuOf returns the MTU of a way that begins with hop.
func (w *worker) mtuOf(hop *Hop) int {
	if hop.MTU != 0 {
		return min(w.mtu, hop.MTU)
	}
	return w.mtu
}

// hopMTU is the MTU of the first hop; 0 is that of the link. To say it again would make
// a connection forget what it has found out about the path.
type hopMTU int

// set reports whether mtu is another one than before.
func (h *hopMTU) set(w *worker, mtu int) bool {
	old := int(*h)
	if old == 0 {
		old = w.mtu
	}
	*h = hopMTU(mtu)
	return mtu != old
}

// An embryo is a connection in SYN-SENT. Its SYN-ACK may arrive on another
// queue than the SYN went out on; that queue's worker then adopts it.

func (w *worker) rememberEmbryo(c *conn) {
	if len(w.e.workers) == 1 {
		return
	}
	w.e.mu.Lock()
	w.e.embryos[c.flow] = w
	w.e.nembryos.Store(int32(len(w.e.embryos)))
	w.e.mu.Unlock()
}

func (w *worker) forgetEmbryo(c *conn) {
	if w.e.nembryos.Load() == 0 {
		return
	}
	w.e.mu.Lock()
	if w.e.embryos[c.flow] == w {
		delete(w.e.embryos, c.flow)
		w.e.nembryos.Store(int32(len(w.e.embryos)))
	}
	w.e.mu.Unlock()
}

// adopt asks the owner of an embryo to hand it over, and gives it the segment
// once it is here. It reports whether there is such an embryo.
func (w *worker) adopt(flow pkt.Flow, seg tcp.Segment) bool {
	if w.e.nembryos.Load() == 0 || seg.Len != 0 {
		return false
	}
	w.e.mu.Lock()
	owner := w.e.embryos[flow]
	w.e.mu.Unlock()
	if owner == nil || owner == w {
		return false
	}
	owner.post(func(o *worker) {
		c := o.flows[flow]
		if c == nil || c.mode != modeOpening || c.passive {
			return
		}
		o.forgetEmbryo(c)
		o.timers.stop(&c.timer)
		o.unmark(c)
		w.e.dir.move(flowKey{flow: flow}, o, w) // what comes before it is there is lost, not answered
		o.unlink(c)
		o.moved[c.id] = w
		w.post(func(w *worker) {
			c.timer, c.deadline, c.client, c.pumped = timer{}, 0, nil, 0
			w.addConn(c)
			seg.Buf = tcp.NoBuf
			c.tcp.HandleSegment(w.now, &seg)
			w.mark(c)
		})
	})
	return true
}

// streamSend queues streaming-mode octets.
func (w *worker) streamSend(c *conn, b []byte) {
	if c.mode == modeStreaming && !c.finish {
		c.outq = append(c.outq, b...)
		w.mark(c)
	}
}

func (w *worker) streamConsumed(c *conn, n int) {
	if c.mode == modeFull {
		return // what was not consumed is FPDUs
	}
	n = min(n, c.told)
	c.inAt += n
	c.told -= n
	if c.inAt > len(c.in)/2 {
		c.in = c.in[:copy(c.in, c.in[c.inAt:])]
		c.inAt = 0
	}
	c.tcp.SetBacklog(c.unread())
	w.mark(c)
}

// unread returns how many streaming-mode octets wait for the control plane.
func (c *conn) unread() int { return len(c.in) - c.inAt }

// tell gives the control plane what arrived since it was last told: once for
// the frames of a turn.
func (w *worker) tell(c *conn) {
	if b := c.in[c.inAt+c.told:]; len(b) > 0 && c.mode == modeStreaming {
		c.told += len(b)
		w.event(c, EventData, nil, append([]byte(nil), b...))
	}
}

// attach takes c to full operation, as soon as its streaming octets are sent.
func (w *worker) attach(id ConnID, c *conn, a Attachment) {
	b := a.QP
	if c != nil && c.as != nil {
		w.attachSCTP(c, a)
		return
	}
	if c == nil || c.mode != modeStreaming || c.finish || c.closed {
		b.QP.Error()
		w.flushQP(b)
		w.e.events.push(Event{Kind: EventClosed, Conn: id, Worker: w.id, Err: errNoConn, QP: b})
		return
	}
	w.linkQP(c, a)
	c.outq = append(c.outq, a.Reply...)
	c.mode = modeSwitching
	w.mark(c)
}

// switchOver begins full operation: from here each octet is part of an FPDU.
func (w *worker) switchOver(c *conn) {
	p := &c.attachP
	c.txStart = c.tcp.SndNxt()
	c.tx.Init(p.CRC, p.SendMarkers, c.txStart)
	c.rx.Init(p.CRC, p.RecvMarkers, c.tcp.RcvNxt().Add(-c.unread()))
	c.markers = p.RecvMarkers
	c.qp.QP.Start(rdmap.Config{IRD: p.IRD, ORD: p.ORD})
	c.stream = c.qp.QP.Stream()
	c.mode = modeFull
	c.tcp.SetBacklog(0)
	// RFC 5044 section 7.1.2 rule 4: a responder sends nothing before the first
	// FPDU of the initiator.
	c.gate = !p.Initiator
	if c.attachE != nil {
		w.fail(c, c.attachE, nil)
		return
	}
	switch rtr := rtrKind(p.RTR); {
	case p.RTR == 0:
		w.event(c, EventEstablished, nil, nil)
	case p.Initiator:
		c.stream.SendRTR(rtr)
		w.event(c, EventEstablished, nil, nil)
	default:
		c.stream.ExpectRTR(rtr)
	}
	left := c.in[c.inAt:]
	c.in, c.inAt, c.told = nil, 0, 0
	if len(left) > 0 {
		w.receive(c, left)
	}
	c.outq, c.outAt = nil, 0
}

// Soft-iWARP gives its socket to the queue pair only after it has sent its MPA
// reply. An FPDU that arrives in between lies there unseen until another comes:
// an initiator that has heard nothing after its first FPDU sends an empty RDMA
// Write, and again, a few times, after longer waits.
const (
	nudgeAfter = 30 * time.Millisecond
	nudgeMore  = 5 // times longer each time
	maxNudges  = 3
)

// watchSilence arms the next nudge when an initiator has sent its first FPDUs.
func (c *conn) watchSilence(now clock.Time) {
	if c.heard || c.nudgeAt != 0 || c.nudges == maxNudges || !c.attachP.Initiator || c.tcp.SndNxt() == c.txStart {
		return
	}
	wait := nudgeAfter
	for range c.nudges {
		wait *= nudgeMore
	}
	c.nudgeAt = now.Add(wait)
}

func (c *conn) nudge(now clock.Time) {
	if !c.nudgeAt.Due(now) {
		return
	}
	c.nudgeAt = 0
	if c.mode == modeFull && !c.heard {
		c.nudges++
		c.stream.Nudge()
	}
}

// disconnect closes c at the application's wish.
func (w *worker) disconnect(c *conn, abort bool) {
	if abort {
		w.abort(c, errAborted)
		return
	}
	if c.as != nil {
		w.disconnectSCTP(c)
		return
	}
	switch c.mode {
	case modeStreaming:
		c.finish = true
		w.mark(c)
		return
	case modeSwitching, modeFull:
		w.leave(c, c.tcp.Room())
		return
	}
	w.dropQP(c)
	c.mode = modeClosing
	c.tcp.Close(w.now)
	w.mark(c)
}

// leave closes c behind what was posted or queued before, as far as room goes, the
// window's at the time of the call, or, when the peer has closed, all of it; the rest is
// flushed. As anything that takes TX slots it waits for its turns of the round.
func (w *worker) leave(c *conn, room int) {
	if !c.leaving {
		c.leaving, c.last = true, room
	}
	w.mark(c)
}

// sent notes that c composed n octets, and why it stopped. It reports whether c has to
// be closed now.
func (c *conn) sent(n int, why stopped) bool {
	if !c.leaving || c.mode != modeFull || c.failed { // a Terminate ends it
		return false
	}
	if c.half { // also what the window does not let out yet
		return why == stopIdle && (c.gate || !c.hasPend && !c.stream.Sendable())
	}
	c.last -= n
	return c.last <= 0 || why == stopIdle
}

// abort cuts c with a RST. Of an association it ends the session, and the association
// by ABORT if that was its last.
func (w *worker) abort(c *conn, why error) {
	if c.err == nil {
		c.err = why
	}
	w.dropQP(c)
	c.mode = modeClosing
	if as := c.as; as != nil {
		if as.lst == nil && len(as.round) == 1 {
			as.a.Abort(w.now)
			w.mark(&as.carrier)
		} else {
			w.closeSession(c)
		}
		w.endSession(c, nil)
		return
	}
	c.tcp.Abort(w.now)
	w.mark(c)
}

// detach cuts c because its queue pair goes away, and lets go of the pair at
// once.
func (w *worker) detach(c *conn) {
	w.abort(c, errDetached)
	w.unlinkQP(c)
}

// dropQP ends the queue pair of c: what was posted is flushed.
func (w *worker) dropQP(c *conn) {
	if c.qp == nil {
		return
	}
	c.hasPend = false
	c.qp.QP.Error()
	w.flushQP(c.qp)
}

// flushQP delivers the completions of a queue pair in ERROR, flushed work
// requests included.
func (w *worker) flushQP(b *QPBinding) {
	for b.QP.PollWC(&w.wc) {
		w.complete(b, &w.wc)
	}
}

func (w *worker) unlinkQP(c *conn) {
	b := c.qp
	if b == nil {
		return
	}
	if cl := w.client(b.Client); cl != nil && b.Bit < len(cl.conns) && cl.conns[b.Bit] == c {
		cl.conns[b.Bit] = nil
	}
	b.conn = nil
	c.qp, c.stream = nil, nil
}

// finish tells the control plane that c is closed; the tcp.Conn may linger in
// TIME-WAIT.
func (w *worker) finish(c *conn, err error) {
	if c.closed {
		return
	}
	c.closed = true
	if c.half && errors.Is(err, tcp.ErrReset) {
		err = nil // it had closed, and wants nothing more
	}
	if c.err != nil {
		err = c.err
	}
	if c.lst != nil {
		c.lst.l.Done(c.tcp)
		c.lst = nil
	}
	w.dropQP(c)
	c.mode = modeClosing
	if c.id != 0 {
		w.event(c, EventClosed, err, nil)
	}
	w.unlinkQP(c)
}

// fail ends the stream for a violation: a Terminate goes out, then a FIN.
func (w *worker) fail(c *conn, err *term.Error, ulpdu []byte) {
	c.rxFailed = true
	if c.failed {
		return
	}
	c.failed = true
	c.stream.Fail(err, ulpdu)
	c.gate = false
	w.stats.Violations++
	w.event(c, EventFailed, err, nil)
	w.mark(c)
}

func rtrKind(r mpa.RTR) rdmap.Op {
	switch r {
	case mpa.RTRWrite:
		return rdmap.OpWrite
	case mpa.RTRRead:
		return rdmap.OpRead
	}
	return rdmap.OpSend
}
