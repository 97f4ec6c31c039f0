package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// SCTP is what may be set of DDP over SCTP, for a listener or a connect.
type SCTP struct {
	Profile session.Profile
	UDP     bool // encapsulated (RFC 6951), port 9899 at both ends
	// Fallback lets a connect try again without the enhanced set-up data when the peer
	// refuses them by a Terminate, as one of RFC 5043 alone does.
	Fallback bool
}

// assoc is an SCTP association with its DDP streams. Each session on one of them is
// a conn; one more conn, the carrier, stands for the association in the worker's
// lists and timers.
type assoc struct {
	a        *sctp.Assoc
	mux      *session.Mux // nil until established
	opts     SCTP
	flow     pkt.Flow  // of SCTP
	also     []flowKey // with the other addresses of the peer
	tuple    pkt.Tuple
	hopMTU   hopMTU
	carrier  conn
	streams  map[uint16]*conn
	round    []*conn       // those of streams, in the order in which they send
	turn     int           // of round: whose turn it is
	nextSID  uint16        // from which on a stream is sought for a session of ours
	lst      *sctpListener // nil: it ends with its last session, for we dialled or the listener is closed
	kept     [][]byte      // by sctp.Data.Slot
	memory   int           // what is counted for it in sctpState.memory
	admitted bool          // we dialled, or a session was accepted
	over     bool
	passive  bool       // the peer opened it
	enhanced bool       // the peer has accepted enhanced set-up data
	inHand   bool       // one of its messages is with a stream
	idle     clock.Time // when it ends unless the peer asks for a session; 0: never
}

// initiate is what a session of ours asks for, until it is answered.
type initiate struct {
	setup    session.Setup
	fallback bool // it may ask again without enhanced data
	retry    bool // it does, with setup, when its stream is free
}

type sctpListener struct {
	id   ListenerID
	l    *sctp.Listener
	opts SCTP
}

// sctpState is what a worker has of SCTP.
type sctpState struct {
	assocs    map[pkt.Flow]*assoc
	listeners map[listenKey]*sctpListener
	also      map[flowKey]*assoc   // by further addresses of their peers, and tags
	moved     map[pkt.Flow]*worker // associations dialled here that another queue has adopted
	peers     map[[16]byte]int     // associations of listeners, by the peer's address
	memory    int                  // octets held for all associations
	free      [][]byte             // buffers of assoc.kept
	part      []byte               // a message that came in pieces
	scratch   []byte               // a packet in one piece
	out       sctp.Out
	ctl       session.Control
	ev        session.Event
	tapped    pkt.Flow
	over      SCTPStats // of associations and listeners that are gone
}

func (s *sctpState) stats() SCTPStats {
	sum := s.over
	sum.Assocs = uint64(len(s.assocs))
	for _, as := range s.assocs {
		sum.add(as)
	}
	for _, l := range s.listeners {
		st := l.l.Stats()
		sum.Listeners.Add(&st)
	}
	return sum
}

var (
	// ErrRejected is why a connection was closed whose peer refused it.
	ErrRejected = errors.New("dataplane: session rejected by peer")
	errSession  = errors.New("dataplane: session ended by peer")
	// ErrNoStream is why JoinSCTP began no session, or why one was closed that it began:
	// the association has no stream left for it, or is about to end.
	ErrNoStream = errors.New("dataplane: the association has no free stream")
)

// sctpStreams is how many streams an association has each way, if the peer has as many.
const sctpStreams = 64

func (w *worker) sctpConfig(o SCTP) *sctp.Config {
	c := &sctp.Config{Streams: sctpStreams, UDP: o.UDP, RcvWindow: w.tcp.RcvWindow, RTOMin: w.e.cfg.SCTP.RTOMin}
	o.Profile.Configure(c)
	return c
}

func (w *worker) sctpSecret() *sctp.Secret {
	var s sctp.Secret
	copy(s[:], w.e.secret[:])
	copy(s[16:], "DDP over SCTP   ")
	return &s
}

// ListenSCTP makes every worker accept DDP sessions over SCTP to local. EventRequest
// asks for AnswerSCTP.
func (e *Engine) ListenSCTP(local netip.AddrPort, o SCTP) (ListenerID, error) {
	id := ListenerID(e.nextID.Add(1))
	errs := make(chan error, len(e.workers))
	for _, w := range e.workers {
		w.post(func(w *worker) { errs <- w.listenSCTP(id, local, o) })
	}
	var first error
	for range e.workers {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return id, first
}

// ConnectSCTP opens an association from local to remote and a session on it.
// EventAnswer, with the peer's data, or EventClosed follows within timeout; Attach
// then takes the connection to full operation.
func (e *Engine) ConnectSCTP(local, remote netip.AddrPort, o SCTP, set session.Setup, timeout time.Duration) (ConnID, error) {
	hop, err := e.resolver.Resolve(remote.Addr(), local.Addr())
	if err != nil {
		return 0, err
	}
	w := e.dialler(local)
	id := w.newID()
	done := make(chan error, 1)
	w.post(func(w *worker) { done <- w.connectSCTP(id, pkt.NewFlow(local, remote), hop, o, set, timeout) })
	return id, <-done
}

// SessionSCTP names a session that JoinSCTP is to begin on an association from local,
// ahead of its events.
func (e *Engine) SessionSCTP(local netip.AddrPort) ConnID { return e.dialler(local).newID() }

// JoinSCTP begins session id, of SessionSCTP, on a free stream of the association that
// ConnectSCTP has opened, or is opening, from local to remote. Events as for ConnectSCTP
// follow. Without such an association, or a stream, JoinSCTP returns ErrNoStream; if that
// turns out only when the association is established, EventClosed says so.
func (e *Engine) JoinSCTP(id ConnID, local, remote netip.AddrPort, fallback bool, set session.Setup, timeout time.Duration) error {
	done := make(chan error, 1)
	e.dialler(local).post(func(w *worker) {
		w.joinSCTP(id, pkt.NewFlow(local, remote), &initiate{setup: set, fallback: fallback}, timeout, done)
	})
	return <-done
}

// dialler returns the worker that opens associations from local.
func (e *Engine) dialler(local netip.AddrPort) *worker {
	return e.workers[int(local.Port())%len(e.workers)]
}

// AnswerSCTP answers the request of EventRequest: a.QP is attached, or, with a nil
// QP, the request is rejected. If the request is gone, what was posted to a.QP is
// flushed and an EventClosed has the queue pair.
func (e *Engine) AnswerSCTP(id ConnID, set session.Setup, a Attachment) {
	if a.QP != nil {
		a.QP.id.Store(uint64(id)) // as Attach does
	}
	e.onConn(id, func(w *worker, c *conn) {
		switch {
		case c != nil && c.as != nil:
			w.answerSCTP(c, set, a)
		case a.QP != nil:
			w.refuseAttach(id, a)
		}
	})
}

func (w *worker) listenSCTP(id ListenerID, local netip.AddrPort, o SCTP) error {
	s := w.sctp0()
	k := keyOf(local)
	if s.listeners[k] != nil {
		return fmt.Errorf("dataplane: already listening on %v", local)
	}
	s.listeners[k] = &sctpListener{id, sctp.NewListener(w.sctpConfig(o), w.sctpSecret(), w.mtu), o}
	return nil
}

func (w *worker) unlistenSCTP(id ListenerID) {
	if w.sctp == nil {
		return
	}
	for k, l := range w.sctp.listeners {
		if l.id == id {
			st := l.l.Stats()
			w.sctp.over.Listeners.Add(&st)
			delete(w.sctp.listeners, k)
		}
	}
	// Nobody takes another session of their peers.
	for _, as := range w.sctp.assocs {
		if as.lst == nil || as.lst.id != id {
			continue
		}
		as.lst = nil
		w.mark(&as.carrier)
	}
}

// sctp0 returns the worker's SCTP, made when it is first asked for.
func (w *worker) sctp0() *sctpState {
	if w.sctp == nil {
		w.sctp = &sctpState{assocs: make(map[pkt.Flow]*assoc), listeners: make(map[listenKey]*sctpListener), also: make(map[flowKey]*assoc), moved: make(map[pkt.Flow]*worker), peers: make(map[[16]byte]int), scratch: make([]byte, 1<<16)}
	}
	return w.sctp
}

func (w *worker) connectSCTP(id ConnID, flow pkt.Flow, hop Hop, o SCTP, set session.Setup, timeout time.Duration) error {
	s := w.sctp0()
	if s.assocs[flow] != nil || w.elsewhere(flow, true) {
		return errFlowExists
	}
	if len(s.assocs) >= w.e.cfg.MaxConns {
		return errTooMany
	}
	mtu := w.mtu
	if hop.MTU != 0 {
		mtu = min(mtu, hop.MTU)
	}
	udp := uint16(0)
	if o.UDP {
		udp = sctp.UDPPort
	}
	t := tupleOf(flow, &hop)
	as := w.newAssoc(sctp.Dial(w.now, w.sctpConfig(o), flow, udp, w.sctpSecret(), mtu), flow, t, o)
	as.hopMTU, as.admitted = hopMTU(mtu), true
	w.beginSession(as, 0, id, &initiate{setup: set, fallback: o.Fallback}, timeout)
	if len(w.e.workers) > 1 {
		w.e.mu.Lock()
		w.e.dialing[flow] = w
		w.e.ndialing.Store(int32(len(w.e.dialing)))
		w.e.mu.Unlock()
	}
	w.e.events.push(Event{Kind: EventJoined, Conn: id, Flow: flow, Worker: w.id})
	w.mark(&as.carrier)
	return nil
}

// joinSCTP is JoinSCTP. The association may be with another worker.
func (w *worker) joinSCTP(id ConnID, flow pkt.Flow, ini *initiate, timeout time.Duration, done chan<- error) {
	s := w.sctp0()
	as := s.assocs[flow]
	if to := s.moved[flow]; as == nil && to != nil {
		w.moved[id] = to
		to.post(func(w *worker) { w.joinSCTP(id, flow, ini, timeout, done) })
		return
	}
	err := ErrNoStream
	if as != nil {
		if sid, ok := as.freeStream(); ok {
			w.beginSession(as, sid, id, ini, timeout)
			err = nil
		}
	}
	if home := w.e.worker(id); err != nil && home != w {
		home.post(func(home *worker) { delete(home.moved, id) })
	}
	done <- err
}

// freeStream finds a stream for a session of ours. One on which a session has just ended
// is tried last.
func (as *assoc) freeStream() (uint16, bool) {
	n := sctpStreams // as many as the peer has: not known yet
	switch {
	case as.over || as.lst != nil || as.passive || !as.a.Open():
		return 0, false
	case as.mux != nil:
		n = as.mux.Streams()
	}
	for i := range n {
		sid := uint16((int(as.nextSID) + i) % n)
		if as.streams[sid] == nil && (as.mux == nil || as.mux.Free(sid)) {
			return sid, true
		}
	}
	return 0, false
}

// beginSession begins a session of ours on stream sid: at once, or when the association is
// established.
func (w *worker) beginSession(as *assoc, sid uint16, id ConnID, ini *initiate, timeout time.Duration) {
	c := w.newSession(as, sid, id)
	c.ini = ini
	as.nextSID = sid + 1
	if timeout > 0 {
		c.giveUp = w.now.Add(timeout)
		as.carrier.giveUp = clock.Earliest(as.carrier.giveUp, c.giveUp)
	}
	if as.mux != nil {
		w.initiate(c)
	}
	w.mark(&as.carrier)
}

// initiate asks the peer for the session of c.
func (w *worker) initiate(c *conn) {
	if int(c.sid) >= c.as.mux.Streams() {
		w.endSession(c, ErrNoStream)
	} else if err := c.as.mux.Initiate(c.sid, c.ini.setup); err != nil {
		w.endSession(c, err)
	}
}

// forgetDialing ends what connectSCTP noted for adoptSCTP.
func (w *worker) forgetDialing(flow pkt.Flow) {
	if w.e.ndialing.Load() == 0 {
		return
	}
	w.e.mu.Lock()
	if w.e.dialing[flow] == w {
		delete(w.e.dialing, flow)
		w.e.ndialing.Store(int32(len(w.e.dialing)))
	}
	w.e.mu.Unlock()
}

// adoptSCTP is adopt for an association that another worker dials, whose INIT ACK or
// COOKIE ACK came here: nothing is in that worker's slots before it is established. A
// packet without the tag of the association moves nothing. adoptSCTP reports whether
// there is one.
func (w *worker) adoptSCTP(flow pkt.Flow, udp uint16, b []byte) bool {
	if w.e.ndialing.Load() == 0 {
		return false
	}
	w.e.mu.Lock()
	owner := w.e.dialing[flow]
	w.e.mu.Unlock()
	if owner == nil || owner == w {
		return false
	}
	b = bytes.Clone(b)
	owner.post(func(o *worker) {
		as := o.sctp.assocs[flow]
		if as == nil || as.lst != nil || as.over {
			return
		}
		if s := as.a.State(); s != sctp.CookieWait && s != sctp.CookieEchoed {
			return
		}
		if !as.a.Ours(b) { // anybody may have sent it
			as.a.HandlePacket(o.now, flow, udp, b)
			o.sctpData(as, b)
			o.mark(&as.carrier)
			return
		}
		o.forgetDialing(flow)
		o.timers.stop(&as.carrier.timer)
		o.unmark(&as.carrier)
		delete(o.sctp.assocs, flow)
		w.e.dir.move(flowKey{flow: flow, sctp: true}, o, w)
		o.sctp.moved[flow] = w
		for _, c := range as.round {
			o.unmark(c)
			delete(o.conns, c.id)
			o.moved[c.id] = w
		}
		w.post(func(w *worker) {
			as.carrier.timer, as.carrier.deadline, as.carrier.client = timer{conn: &as.carrier}, 0, nil
			as.carrier.pumped = 0
			as.carrier.join(&w.house)
			w.sctp0().assocs[flow] = as
			w.claim(flow, true)
			for _, c := range as.round {
				c.timer = timer{conn: c}
				w.conns[c.id] = c
			}
			as.a.HandlePacket(w.now, flow, udp, b)
			w.sctpData(as, b)
			w.mark(&as.carrier)
		})
	})
	return true
}

func (w *worker) newAssoc(a *sctp.Assoc, flow pkt.Flow, t pkt.Tuple, o SCTP) *assoc {
	as := &assoc{a: a, opts: o, flow: flow, tuple: t, streams: make(map[uint16]*conn)}
	as.tuple.Proto = pkt.ProtoSCTP
	if o.UDP {
		as.tuple.Proto = pkt.ProtoUDP
	}
	as.carrier.as, as.carrier.flow = as, flow
	as.carrier.timer.conn = &as.carrier
	as.carrier.join(&w.house)
	w.sctp.assocs[flow] = as
	w.claim(flow, true)
	return as
}

// learnAddrs lets the packets of as come from each address that the peer has named. That
// it is the peer who sends them is seen by the verification tag: whoever names the address
// of another host, with the ports of an association of that, has none of its packets.
func (w *worker) learnAddrs(as *assoc) {
	n, _ := as.a.Paths()
	for i := range n {
		k := flowKey{flow: as.flow, sctp: true, tag: as.a.Tag()}
		if k.flow.Remote = as.a.Path(i).Addr.As16(); k.flow == as.flow || w.sctp.also[k] != nil {
			continue
		}
		// ICMP errors show packets as we sent them.
		for _, k := range [...]flowKey{k, {flow: k.flow.Reverse(), sctp: true, tag: as.a.PeerTag()}} {
			if w.sctp.also[k] != nil {
				continue
			}
			w.sctp.also[k] = as
			as.also = append(as.also, k)
			if w.e.dir != nil {
				w.e.dir.put(k, w)
			}
		}
	}
}

func (w *worker) forgetAddrs(as *assoc) {
	for _, k := range as.also {
		delete(w.sctp.also, k)
		if w.e.dir != nil {
			w.e.dir.remove(k, w)
		}
	}
	as.also = nil
}

// assocFrom returns the association that packet b of flow f belongs to, if it is one of
// this worker's whose peer has sent it from a further address.
func (w *worker) assocFrom(f pkt.Flow, b []byte) *assoc {
	if len(w.sctp.also) == 0 {
		return nil
	}
	return w.sctp.also[alsoKey(f, b)]
}

// alsoKey is what packet b of flow f belongs to if it came from a further address.
func alsoKey(f pkt.Flow, b []byte) flowKey {
	return flowKey{flow: f, sctp: true, tag: binary.BigEndian.Uint32(b[4:])}
}

// alsoICMP is alsoKey for an ICMP error.
func alsoICMP(e *pkt.ICMPError) flowKey {
	return flowKey{flow: e.Flow.Reverse(), sctp: true, tag: e.Seq}
}

// strayAddr is stray for what belongs to k, of an association whose peer has a further
// address.
func (w *worker) strayAddr(k flowKey, f *link.Frame) bool {
	if w.e.dir == nil || k.tag == 0 {
		return false
	}
	owner := w.e.dir.find(&k)
	return owner != w && w.strays.from == nil && !w.handed && w.strayTo(owner, f)
}

// newSession makes the conn of a session on stream sid.
func (w *worker) newSession(as *assoc, sid uint16, id ConnID) *conn {
	c := &conn{id: id, flow: as.flow, as: as, sid: sid}
	c.timer.conn = c
	as.streams[sid] = c
	as.round = append(as.round, c)
	w.conns[c.id] = c
	return c
}

// plain notes that c asks again without enhanced data, if it may.
func (as *assoc) plain(c *conn, answer *session.Setup) bool {
	i := c.ini
	if answer != nil || i == nil || !i.fallback || i.setup.Enhanced == nil || as.enhanced || c.mode == modeClosing {
		return false
	}
	i.setup.Enhanced, i.retry = nil, true
	return true
}

// answerSCTP is AnswerSCTP.
func (w *worker) answerSCTP(c *conn, set session.Setup, a Attachment) {
	as := c.as
	if c.closed || as.over || as.mux.State(c.sid) != session.Requested {
		if a.QP != nil {
			w.refuseAttach(c.id, a)
		}
		return
	}
	if a.QP == nil {
		if as.mux.Reject(c.sid, set) == nil {
			w.endSession(c, nil)
		}
		w.mark(&as.carrier)
		return
	}
	if err := as.mux.Accept(c.sid, set); err != nil {
		w.refuseAttach(c.id, a)
		w.abort(c, err)
		return
	}
	if !as.admitted {
		as.admitted = true
		as.a.SetWindow(w.sctpConfig(as.opts).RcvWindow)
	}
	w.attachSCTP(c, a)
}

// strangerWindow is the receive window, in octets, of an association that a peer has opened,
// until one of its sessions is accepted: what goes before that is short. INIT ACK has the
// full window, which peers begin their slow start with.
const strangerWindow = 64 << 10

// holds counts what is held for as, and ends associations when it is too much for all.
func (w *worker) holds(as *assoc) {
	w.weigh(as)
	for trimmed := false; w.sctp.memory > w.e.cfg.SCTP.Memory; {
		if !trimmed {
			trimmed = true
			for _, o := range w.sctp.assocs {
				if o.mux != nil {
					o.mux.Trim()
					w.weigh(o)
				}
			}
			continue
		}
		var most *assoc
		for _, o := range w.sctp.assocs {
			if o.memory > 0 && (most == nil || most.admitted && !o.admitted || most.admitted == o.admitted && most.memory < o.memory) {
				most = o
			}
		}
		if most == nil {
			return
		}
		w.stats.AssocsNoMemory++
		most.a.GiveUp(w.now)
		w.sctp.memory -= most.memory
		most.memory = 0
		w.mark(&most.carrier)
	}
}

// weigh counts what is held for as.
func (w *worker) weigh(as *assoc) {
	n := 0
	if as.a.State() != sctp.Closed && !as.over {
		n = as.a.Kept()
		if as.mux != nil {
			n += as.mux.Memory()
		}
	}
	w.sctp.memory += n - as.memory
	as.memory = n
}

func (w *worker) refuseAttach(id ConnID, a Attachment) {
	a.QP.QP.Error()
	w.flushQP(a.QP)
	w.e.events.push(Event{Kind: EventClosed, Conn: id, Worker: w.id, Err: errNoConn, QP: a.QP})
}

// attachSCTP takes a session that is open to full operation.
func (w *worker) attachSCTP(c *conn, a Attachment) {
	as := c.as
	if c.closed || as.over || as.mux == nil || as.mux.State(c.sid) != session.Open || c.qp != nil {
		w.refuseAttach(c.id, a)
		return
	}
	w.linkQP(c, a)
	c.qp.QP.Start(rdmap.Config{IRD: a.Params.IRD, ORD: a.Params.ORD})
	c.stream = c.qp.QP.Stream()
	c.mode = modeFull
	if a.Params.RTR != 0 && a.Params.Initiator {
		c.stream.SendRTR(rtrKind(a.Params.RTR))
	}
	w.event(c, EventEstablished, nil, nil)
	if err := as.mux.Attach(c.sid, &ddpSink{w, c}); err != nil {
		w.abort(c, err)
	}
	w.mark(&as.carrier)
}

// faultSCTP ends an association when a stream faulted over one of its messages: those
// behind it in the packet are acknowledged, and lost.
func (w *worker) faultSCTP(as *assoc) {
	if !as.inHand {
		return
	}
	as.inHand = false
	for d := (sctp.Data{}); as.a.PollData(&d); {
	}
	as.a.Abort(w.now)
}

// linkQP joins a connection and a queue pair.
func (w *worker) linkQP(c *conn, a Attachment) {
	b := a.QP
	c.qp, c.attachP, c.attachE = b, a.Params, a.Fail
	b.conn = c
	cl := w.client(b.Client)
	if cl == nil {
		return
	}
	for len(cl.conns) <= b.Bit {
		cl.conns = append(cl.conns, nil)
	}
	cl.conns[b.Bit] = c
	if c.as != nil {
		c = &c.as.carrier
	}
	if c.client != &w.house {
		return
	}
	queued := c.queued
	if queued {
		c.queued = false
		w.house.queue.remove(c)
	}
	c.join(cl)
	if queued {
		w.enqueue(c)
	}
}

// ddpSink hands the DDP segments of a session to its stream.
type ddpSink struct {
	w *worker
	c *conn
}

// begin notes whose memory a message touches, until end.
func (s *ddpSink) begin() { s.w.current, s.c.as.inHand = s.c, true }

func (s *ddpSink) end() { s.w.current, s.c.as.inHand = nil, false }

func (s *ddpSink) done(err *term.Error) *term.Error {
	s.end()
	if err != nil {
		s.w.violation(s.c, err)
	}
	return err
}

func (s *ddpSink) HandleULPDU(b []byte) *term.Error {
	if s.c.rxFailed || s.c.stream == nil {
		return nil
	}
	s.w.stats.RxFPDUs++
	s.begin()
	return s.done(s.c.stream.HandleULPDU(b))
}

func (s *ddpSink) HandleEarly(key serial.Num, b []byte) bool {
	if s.c.rxFailed || s.c.stream == nil {
		return false
	}
	s.w.stats.RxFPDUsEarly++
	s.begin()
	ok := s.c.stream.HandleEarly(key, b)
	s.end()
	if ok {
		s.w.stats.RxFPDUsPlacedEarly++
	}
	return ok
}

func (s *ddpSink) DeliverEarly(key serial.Num) *term.Error {
	if s.c.rxFailed || s.c.stream == nil {
		return nil
	}
	s.w.stats.RxFPDUs++
	s.begin()
	return s.done(s.c.stream.DeliverEarly(key))
}

// leaveShared is how much a session that leaves an association with others may send, in
// octets, when they have filled the window.
const leaveShared = 64 << 10

// disconnectSCTP ends the session of c: what was posted still goes out.
func (w *worker) disconnectSCTP(c *conn) {
	if c.mode == modeFull {
		room := c.as.a.Room()
		if len(c.as.round) > 1 {
			room = max(room, leaveShared) // what others have filled is no measure
		}
		w.leave(c, room)
		return
	}
	w.dropQP(c)
	c.mode = modeClosing
	w.closeSession(c)
}

// closeSession sends the session's Terminate.
func (w *worker) closeSession(c *conn) {
	as := c.as
	w.mark(&as.carrier)
	if as.mux == nil { // nothing was set up yet
		if len(as.round) > 1 {
			w.endSession(c, nil)
		} else {
			as.a.Abort(w.now)
		}
		return
	}
	if as.mux.State(c.sid) == session.Initiating {
		// Its answer is of no interest to anybody.
		_ = as.mux.Terminate(c.sid)
		w.endSession(c, nil)
		return
	}
	if as.mux.Terminate(c.sid) != nil && as.mux.State(c.sid) == session.Idle {
		w.endSession(c, nil)
	}
}

// idles begins the time that the peer has to ask for a session.
func (w *worker) idles(as *assoc) {
	if d := w.e.cfg.SCTP.Idle; d > 0 {
		as.idle = w.now.Add(d)
	}
}

// endSession tells the control plane that a session is over, and forgets it.
func (w *worker) endSession(c *conn, err error) {
	if c.gone {
		return
	}
	as := c.as
	w.finish(c, err)
	c.gone = true
	if as.streams[c.sid] == c {
		delete(as.streams, c.sid)
	}
	if i := slices.Index(as.round, c); i >= 0 {
		as.round = slices.Delete(as.round, i, i+1)
		if i < as.turn {
			as.turn--
		}
	}
	delete(w.conns, c.id)
	if home := w.e.worker(c.id); home != w {
		id := c.id
		home.post(func(home *worker) { delete(home.moved, id) })
	}
	if len(as.streams) == 0 && as.lst != nil {
		w.idles(as)
	}
	w.mark(&as.carrier)
}

// done reports whether an association has no further use: it ends with its last session,
// once what sessions still have to say is on its way.
func (as *assoc) done() bool {
	return as.lst == nil && len(as.streams) == 0 && (as.mux == nil || as.mux.Quiet())
}

// sctpTimer is onTimer for an association.
func (w *worker) sctpTimer(c *conn) {
	as := c.as
	if as.over {
		return
	}
	w.mark(c)
	if !c.deadline.Due(w.now) {
		return // the wheel is early by up to a tick
	}
	c.deadline = 0
	w.stats.Timeouts++
	if c.giveUp.Due(w.now) {
		c.giveUp = 0
		for _, d := range slices.Clone(as.round) {
			switch {
			case d.ini == nil:
			case d.giveUp.Due(w.now):
				w.abort(d, ErrTimeout)
			default:
				c.giveUp = clock.Earliest(c.giveUp, d.giveUp)
			}
		}
	}
	if as.idle.Due(w.now) {
		as.idle = 0
		if len(as.streams) == 0 {
			w.stats.AssocsIdle++
			as.a.Close(w.now)
		}
	}
	before := as.a.TimeoutsInARow()
	as.a.HandleTimeout(w.now)
	if as.a.TimeoutsInARow() > before {
		for _, c := range as.streams {
			w.e.doubt(c.id, c.flow)
			break // what is found is the association's
		}
	}
}

// deadlineOf returns when the association has to be looked at.
func (as *assoc) deadlineOf() clock.Time {
	return clock.Earliest(as.a.Deadline(), clock.Earliest(as.carrier.giveUp, as.idle))
}

// sessions appends what is known of the sessions over SCTP.
func (w *worker) sessions(infos []ConnInfo) []ConnInfo {
	for _, c := range w.conns {
		if c.as == nil {
			continue
		}
		as := c.as
		si := &SCTPInfo{State: as.a.State(), Stats: as.a.Stats()}
		_, current := as.a.Paths()
		si.Path = as.a.Path(current)
		if as.mux != nil {
			si.Sessions = as.mux.Stats()
		}
		ci := ConnInfo{ID: c.id, Flow: c.flow, Worker: w.id, SCTP: si, Full: c.mode == modeFull, Params: c.attachP, QP: c.qp}
		if c.stream != nil {
			ci.RDMAP, ci.Verbs = c.stream.Stats(), c.qp.QP.Stats()
		}
		infos = append(infos, ci)
	}
	return infos
}

// retire takes an association that has ended out of the tables. Its sessions end with
// it, without a message of their own (RFC 5043 11.3).
func (w *worker) retire(as *assoc) {
	if as.over {
		return
	}
	as.over = true
	as.carrier.gone = true
	w.timers.stop(&as.carrier.timer)
	known := w.sctp.assocs[as.flow] == as
	if known {
		delete(w.sctp.assocs, as.flow)
	}
	w.forgetAddrs(as)
	w.forgetDialing(as.flow)
	if flow := as.flow; !as.passive {
		if home := w.e.dialler(flow.LocalAddrPort()); home != w {
			home.post(func(home *worker) {
				if home.sctp != nil && home.sctp.moved[flow] == w {
					delete(home.sctp.moved, flow)
				}
			})
		}
	}
	if as.passive {
		if n := w.sctp.peers[as.flow.Remote]; n > 1 {
			w.sctp.peers[as.flow.Remote] = n - 1
		} else {
			delete(w.sctp.peers, as.flow.Remote)
		}
	}
	w.holds(as)
	w.sctp.over.add(as)
	for _, c := range slices.Clone(as.round) {
		w.remoteEventsSCTP(c)
		w.endSession(c, as.a.Err())
	}
	w.e.events.push(Event{Kind: EventParted, Flow: as.flow, Worker: w.id})
	if known {
		w.unclaim(as.flow, true) // from here on another worker may have one of this flow, with an EventJoined
	}
	w.dropReleased(as)
}
