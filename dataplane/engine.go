// Package dataplane joins the protocol cores to the edges: a worker for each
// NIC queue polls the link, the clients' doorbells and its timers, and owns the
// frames, connections and queue pairs that live there. The control plane
// reaches a worker only by its command queue, and hears of it by events.
package dataplane

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// ConnID names a connection for the life of the engine. Its upper 16 bits are
// the worker that made it.
type ConnID uint64

// Worker returns the worker that made id. Of two ids of one worker the greater was made
// later.
func (id ConnID) Worker() int { return int(id >> 48) }

// ListenerID names a listener.
type ListenerID uint64

// PollPolicy says what a worker does when there is nothing to do.
type PollPolicy uint8

const (
	// Adaptive spins for Config.Spin after the last work, then sleeps until a
	// frame, a doorbell, a command or a timer.
	Adaptive PollPolicy = iota
	// Busy spins for ever: lowest latency, one core each.
	Busy
)

// Config holds what an engine is made from. The zero value of each field has a
// default.
type Config struct {
	// OnEvent is called for every event, in order, from one goroutine of the
	// engine's. It must not block for long.
	OnEvent func(Event)
	Poll    PollPolicy
	// Spin is how long an adaptive worker spins after work; default 50 µs.
	Spin time.Duration
	// TCP is used for every connection; default tcp.DefaultConfig(). With a MaxHeld
	// of 0 a connection may hold as many segments as its worker has room for.
	TCP  *tcp.Config
	SCTP SCTPConfig
	// StreamBuffer bounds the streaming-mode bytes of a connection that wait for
	// the control plane; default 64 KiB.
	StreamBuffer int
	// SendBuffer is how many streaming-mode bytes should wait to be sent:
	// EventWritable says that it is at most half as many. Default StreamBuffer.
	SendBuffer int
	// MaxConns bounds the connections of each worker; default 16384.
	MaxConns int
	// Inline lets an application drive worker 0 itself by Turn; the engine's own
	// goroutine then only fills in while the application does not.
	Inline bool
	// Fragments is where IP fragments come from beside the queues; nil: from nowhere.
	// The engine closes it.
	Fragments FragmentSource
	// Now is the workers' clock; default clock.Now.
	Now func() clock.Time
}

// SCTPConfig holds what is the same for all associations.
type SCTPConfig struct {
	// RTOMin is RTO.Min of RFC 9260; default 1 s. What the loss of the last message of
	// an exchange costs is at least this.
	RTOMin time.Duration
	// Idle is how long a peer may keep an association that it opened without a session;
	// default a minute, negative: for ever.
	Idle time.Duration
	// PerPeer bounds the associations that one address may have with each listener of
	// one worker; default 1024. Until it has an accepted session each holds at most 64 KiB
	// of what its peer sends.
	PerPeer int
	// Memory bounds what the associations of one worker hold of what their peers have sent
	// ahead of its turn, in bytes; default 256 MiB, or four receive windows if that is more. When it
	// is not enough the association that holds most is ended, first of those without an
	// accepted session.
	Memory int
}

// Queue is one NIC queue for a worker.
type Queue struct {
	Link link.Link
	CPU  int // to pin the worker to; -1: any
	// PartialChecksums accepts TCP segments whose checksum field holds the sum of the
	// pseudo-header alone. A kernel on this machine, the host's own or a guest's, leaves
	// it so on a virtual link. A wire never does: there it is corruption.
	PartialChecksums bool
}

// Hop is the way to a destination: what the kernel's routes and neighbours say.
type Hop struct {
	SrcMAC, DstMAC [6]byte
	VLANs          []uint16 // TCIs, outermost first
	MTU            int      // largest IP packet on that path
	Src            netip.Addr
	Local          bool // the destination is an address of this host
}

// Resolver finds the next hop of a destination. Resolve may block for a bounded
// time while the kernel asks for a neighbour. Watch registers a function that
// is called when routes, neighbours or the MTU may have changed.
type Resolver interface {
	Resolve(dst, src netip.Addr) (Hop, error)
	Watch(changed func())
}

// CQ is where completions go; shm.CQ is one. Flush makes those pushed by a
// worker visible, and wakes a client that waits: now, or when it is called again,
// as again asks unless that is 0. Pending reports whether worker owes it a Flush.
type CQ interface {
	Push(worker int, wc *verbs.WC) bool // false: full
	Pending(worker int) bool
	Flush(worker int, now clock.Time) (again clock.Time)
}

// QPBinding joins a queue pair to its rings, for the worker that gets its
// connection.
type QPBinding struct {
	QP             *verbs.QP
	SendCQ, RecvCQ CQ
	Client         *ClientBinding
	Bit            int // in the client's doorbell pages
	User           any // the owner's, untouched

	stream *stream       // owned by the worker it is attached to
	id     atomic.Uint64 // of the connection that Attach was given
}

// ClientBinding is what the workers know of a client: its doorbell pages.
type ClientBinding struct {
	Doorbells []*shm.Doorbells // one for each worker
	// OnFault is called, from the worker, when touching the client's memory
	// faulted. The client has to be ended.
	OnFault func()
}

// Attachment takes a connection from streaming mode to full operation.
type Attachment struct {
	QP     *QPBinding
	Params mpa.Params
	Reply  []byte // sent last in streaming mode: the MPA reply of a responder
	// Fail, if set, ends the stream as soon as full operation begins, with that
	// Terminate: startup failed in a way that the peer is told of by one (RFC
	// 6581 section 9).
	Fail *term.Error
}

// EventKind says what happened.
type EventKind uint8

// Events of a connection come in this order; EventClosed is the last. Those of an
// association stand around them.
const (
	EventNone EventKind = iota
	// EventAccepted: a passive open is done; the connection is in streaming mode.
	EventAccepted
	// EventConnected: an active open is done; the connection is in streaming mode.
	EventConnected
	// EventData: streaming-mode bytes, in Data: what arrived in one turn.
	EventData
	// EventWritable: bytes of StreamSend have left; more may be sent.
	EventWritable
	// EventEstablished: full operation, in which the QP may send.
	EventEstablished
	// EventPeerClosed: the peer's FIN arrived in order.
	EventPeerClosed
	// EventTerminated: the peer sent a Terminate; Err is a *term.RemoteError, Data its bytes.
	EventTerminated
	// EventFailed: a violation was found here and a Terminate sent; Err is a *term.Error.
	EventFailed
	// EventRequest: SCTP, the peer asks for a session; Answer. Setup is what it says.
	EventRequest
	// EventNegotiate: SCTP in the draft's profile, the peer's Negotiate, in Setup. Conn is a
	// session of ours that is not answered yet; otherwise it is of the listener.
	EventNegotiate
	// EventAnswer: SCTP, the peer has accepted our session; Attach. Setup likewise.
	EventAnswer
	// EventRejected: SCTP, the peer has not; Setup is nil when its ULP was not asked.
	EventRejected
	// EventClosed: the connection is gone, Err says why (nil: closed by both in order).
	EventClosed
	// EventJoined: SCTP, an association of Flow has begun: of Listener, or dialled for Conn. Its
	// packets have to come until EventParted, which may be long after its sessions have ended.
	EventJoined
	// EventParted: SCTP, the association of Flow is gone.
	EventParted
)

// Event tells the control plane what happened to a connection.
type Event struct {
	Kind     EventKind
	Conn     ConnID
	Listener ListenerID // EventAccepted, EventRequest, EventNegotiate, EventJoined
	Flow     pkt.Flow
	Host     bool // EventAccepted, EventConnected: the peer is a program of this host
	Worker   int  // which of the client's doorbell pages serves the connection
	Data     []byte
	Err      error
	QP       *QPBinding     // nil in streaming mode
	Setup    *session.Setup // SCTP
}

// Errors of the engine's calls.
var (
	ErrStopped = errors.New("dataplane: engine stopped")
	ErrTimeout = errors.New("dataplane: connect timed out")
	// ErrCQOverrun ends the connection of a QP whose completion found no room.
	ErrCQOverrun = errors.New("dataplane: completion queue overrun")
)

// Engine owns the workers, one for each queue.
type Engine struct {
	cfg      Config
	resolver Resolver
	workers  []*worker
	secret   [16]byte // for ISS and SYN cookies
	nextID   atomic.Uint64

	events eventQueue
	dir    *handoff.Directory[*worker] // nil: there is one worker

	taps  atomic.Pointer[[]*Tap] // nil: none
	tapMu sync.Mutex             // for changes of taps

	dialing  handoff.Dialing[*worker]
	frags    defrag
	doubts   atomic.Int32                          // under way
	hostless atomic.Pointer[map[[16]byte]struct{}] // see learnHostless
	changes  atomic.Int32                          // of hops, since the rehop under way began and before; 0: none is

	stop    atomic.Bool
	wg      sync.WaitGroup
	evDone  chan struct{}
	started bool
}

// New makes an engine over queues. Nothing runs before Start.
func New(cfg Config, queues []Queue, res Resolver) (*Engine, error) {
	if len(queues) == 0 {
		return nil, errors.New("dataplane: no queue")
	}
	if cfg.OnEvent == nil {
		cfg.OnEvent = func(Event) {}
	}
	if cfg.Spin == 0 {
		cfg.Spin = 50 * time.Microsecond
	}
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	if cfg.StreamBuffer == 0 {
		cfg.StreamBuffer = 64 << 10
	}
	if cfg.SendBuffer == 0 {
		cfg.SendBuffer = cfg.StreamBuffer
	}
	if cfg.SCTP.Idle == 0 {
		cfg.SCTP.Idle = time.Minute
	}
	if cfg.SCTP.PerPeer == 0 {
		cfg.SCTP.PerPeer = 1024
	}
	if cfg.MaxConns == 0 {
		cfg.MaxConns = 16384
	}
	if cfg.TCP == nil {
		c := tcp.DefaultConfig()
		cfg.TCP = &c
	}
	if cfg.SCTP.Memory == 0 {
		cfg.SCTP.Memory = max(256<<20, 4*cfg.TCP.RcvWindow)
	}
	e := &Engine{cfg: cfg, resolver: res, evDone: make(chan struct{})}
	if _, err := rand.Read(e.secret[:]); err != nil {
		return nil, fmt.Errorf("dataplane: %w", err)
	}
	e.events.init()
	if len(queues) > 1 {
		e.dir = handoff.NewDirectory[*worker]()
	}
	for i, q := range queues {
		w, err := newWorker(e, i, q)
		if err != nil {
			for _, w := range e.workers {
				w.closeFDs()
			}
			return nil, err
		}
		w.strays.init(len(queues))
		e.workers = append(e.workers, w)
	}
	return e, nil
}

// Start runs the workers and the event goroutine.
func (e *Engine) Start() {
	e.started = true
	go func() {
		defer close(e.evDone)
		e.events.run(e.cfg.OnEvent)
	}()
	for _, w := range e.workers {
		e.wg.Add(1)
		go func() {
			defer e.wg.Done()
			w.run()
		}()
	}
	if e.cfg.Fragments != nil {
		e.frags.done = make(chan struct{})
		go e.readFragments()
	}
	if e.resolver != nil {
		e.learnHostless()
		e.resolver.Watch(e.hopsChanged)
	}
}

// Stop ends the workers. Connections are cut without a word; the links are the
// caller's to close.
func (e *Engine) Stop() {
	if e.stop.Swap(true) {
		return
	}
	for _, w := range e.workers {
		w.cmds.alarm.Ring()
	}
	if e.cfg.Fragments != nil {
		_ = e.cfg.Fragments.Close()
	}
	if e.frags.done != nil {
		<-e.frags.done
	}
	e.wg.Wait()
	e.events.close()
	if e.started {
		<-e.evDone
	}
	for _, w := range e.workers {
		w.closeFDs()
	}
}

// Workers returns the number of workers.
func (e *Engine) Workers() int { return len(e.workers) }

// Turn drives worker 0 once from the calling goroutine and returns the amount
// of work found. The engine must have been made with Inline. It returns 0 when
// the engine's own goroutine is in a turn just then.
func (e *Engine) Turn() int { return e.workers[0].inlineTurn() }

func (e *Engine) worker(id ConnID) *worker {
	i := id.Worker()
	if i >= len(e.workers) {
		i = 0
	}
	return e.workers[i]
}

// elsewhere reports whether another worker than w has k.
func (e *Engine) elsewhere(k handoff.Key, w *worker) bool {
	owner := e.dir.Find(&k)
	return owner != nil && owner != w
}

// onStream makes the owner of a stream call f, once; f gets nil when the stream is
// gone.
func (e *Engine) onStream(id ConnID, f func(w *worker, s *stream)) {
	e.worker(id).post(func(w *worker) { w.withStream(id, f) })
}

// ListenRequest says what Listen is to listen on.
type ListenRequest struct {
	// Local is the endpoint. An unspecified address stands for every address that
	// frames arrive for.
	Local netip.AddrPort
	// Backlog bounds the half-open TCP connections of each worker.
	Backlog int
	// Stream says that TCP connections are byte streams for a while: as much as the
	// receive window may wait for the control plane, where on others
	// Config.StreamBuffer is enough, and more is taken for an attack.
	Stream bool
	// SCTP is how DDP sessions are carried over SCTP; nil: the transport is TCP.
	SCTP *SCTP
}

// Listen makes every worker accept connections, which EventAccepted reports, or
// sessions over SCTP, for which EventRequest asks for Answer. If one worker
// cannot listen, none does.
func (e *Engine) Listen(r ListenRequest) (ListenerID, error) {
	id := ListenerID(e.nextID.Add(1))
	errs := make(chan error, len(e.workers))
	for _, w := range e.workers {
		w.post(func(w *worker) { errs <- w.listen(id, &r) })
	}
	var first error
	for range e.workers {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	if first != nil {
		e.Unlisten(id)
		return 0, first
	}
	return id, nil
}

// Unlisten ends a listener. Connections that it made stay.
func (e *Engine) Unlisten(id ListenerID) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.unlisten(id) })
	}
}

// NewID returns the id of a connection that Connect is to open from local. No event
// has it before Connect is called.
func (e *Engine) NewID(local netip.AddrPort) ConnID { return e.dialer(local).newID() }

// dialer returns the worker that opens connections from local.
func (e *Engine) dialer(local netip.AddrPort) *worker {
	return e.workers[int(local.Port())%len(e.workers)]
}

// ConnectRequest says what Connect is to open.
type ConnectRequest struct {
	Local, Remote netip.AddrPort
	Timeout       time.Duration // 0: as long as the transport tries
	Stream        bool          // as in ListenRequest
	SCTP          *SCTP         // nil: the transport is TCP
	Setup         session.Setup // over SCTP: what the session is asked for with
	// Join begins the session on an association that an earlier Connect has opened, or is
	// opening, between the same endpoints, and not on a new one.
	Join bool
}

// Connect opens connection id, of NewID for the same local endpoint. EventConnected, or
// EventAnswer over SCTP, or EventClosed follows within the timeout. An error means that
// nothing was opened and no event comes. Without an association to join, or a free stream
// on it, it is ErrNoStream; if that turns out only when the association is established,
// EventClosed says so. Connect waits for the resolver.
func (e *Engine) Connect(id ConnID, r ConnectRequest) error {
	var hop Hop
	if !r.Join {
		var err error
		if hop, err = e.resolver.Resolve(r.Remote.Addr(), r.Local.Addr()); err != nil && e.workers[0].socks == nil {
			return err
		}
	}
	done := make(chan error, 1)
	e.worker(id).post(func(w *worker) {
		switch {
		case hop.Local && r.SCTP != nil && w.socks == nil:
			done <- errHostSCTP
		case hop.Local && reaches(w, r.Remote):
			done <- connectHost(w, id, &r)
		case w.socks != nil && r.SCTP != nil:
			done <- errSocketSCTP
		case w.socks != nil:
			done <- w.socks.connect(w, id, &r)
		case r.Join:
			w.joinSCTP(id, &r, done)
		case r.SCTP != nil:
			done <- w.connectSCTP(id, &r, &hop)
		default:
			done <- w.connectTCP(id, &r, &hop)
		}
	})
	return <-done
}

// Answer answers the request of EventRequest: a.QP is attached, or, with a nil
// QP, the request is rejected. If the request is gone, what was posted to a.QP is
// flushed and an EventClosed has the queue pair.
func (e *Engine) Answer(id ConnID, set session.Setup, a Attachment) {
	if a.QP != nil {
		a.QP.id.Store(uint64(id)) // as Attach does
	}
	e.onStream(id, func(w *worker, s *stream) { w.answer(id, s, set, a) })
}

// StreamSend sends bytes in streaming mode, before Attach.
func (e *Engine) StreamSend(id ConnID, b []byte) {
	e.onStream(id, func(w *worker, s *stream) {
		if c, ok := streamOf(s); ok {
			c.streamSend(w, b)
		}
	})
}

// StreamConsumed says that the first n bytes of those given by EventData and
// not yet consumed have been used.
func (e *Engine) StreamConsumed(id ConnID, n int) {
	e.onStream(id, func(w *worker, s *stream) {
		if c, ok := streamOf(s); ok {
			c.streamConsumed(w, n)
		}
	})
}

// Attach takes a connection to full operation: what arrives behind the bytes
// that were consumed is FPDUs, and so is what is sent behind a.Reply.
func (e *Engine) Attach(id ConnID, a Attachment) {
	a.QP.id.Store(uint64(id)) // Detach may come before the worker has got to it
	e.onStream(id, func(w *worker, s *stream) { w.attach(id, s, a) })
}

// Disconnect closes a connection: in order, behind what was posted before, as much of
// it as the window has room for (in streaming mode, all that StreamSend was given), or
// with a RST. EventClosed follows.
func (e *Engine) Disconnect(id ConnID, abort bool) {
	e.onStream(id, func(w *worker, s *stream) {
		if s != nil {
			w.disconnect(s, abort)
		}
	})
}

// Detach takes a queue pair from its worker, cutting its connection if there is
// one. When it returns no worker uses the binding or its rings.
func (e *Engine) Detach(b *QPBinding) {
	if id := ConnID(b.id.Load()); id != 0 {
		done := make(chan struct{})
		e.onStream(id, func(w *worker, s *stream) {
			if s != nil && s.qp == b {
				s.detach(w)
			}
			close(done)
		})
		e.await(done)
	}
	e.Fence()
}

// Fence returns when each worker has passed a turn: memory that was unlinked
// before the call is no longer used by any.
func (e *Engine) Fence() {
	for _, w := range e.workers {
		done := make(chan struct{})
		w.post(func(*worker) { close(done) })
		e.await(done)
	}
}

func (e *Engine) await(done chan struct{}) {
	for {
		select {
		case <-done:
			return
		case <-time.After(10 * time.Millisecond):
			if e.stop.Load() {
				e.wg.Wait()
				return
			}
		}
	}
}

// Bind makes the workers look at a client's doorbells, and gives the client their
// wake-ups.
func (e *Engine) Bind(cb *ClientBinding) error {
	for i, w := range e.workers {
		if err := w.cmds.alarm.Watch(cb.Doorbells[i].WakeFD()); err != nil {
			e.unwatch(cb, i)
			return fmt.Errorf("dataplane: wake-ups of a client: %w", err)
		}
	}
	for _, w := range e.workers {
		w.post(func(w *worker) { w.bind(cb) })
	}
	e.Fence()
	return nil
}

// unwatch ends the wake-ups of a client for the first n workers.
func (e *Engine) unwatch(cb *ClientBinding, n int) {
	for i, w := range e.workers[:n] {
		w.cmds.alarm.Unwatch(cb.Doorbells[i].WakeFD())
	}
}

// Unbind ends Bind. When it returns no worker uses the pages.
func (e *Engine) Unbind(cb *ClientBinding) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.unbind(cb) })
	}
	e.Fence()
	e.unwatch(cb, len(e.workers))
}

// hopsChanged has the next hops found again, and does not wait for that, nor lets
// it be done twice at a time: the answers would cross.
func (e *Engine) hopsChanged() {
	if e.changes.Add(1) > 1 {
		return // who is at it begins again
	}
	go func() {
		for left := int32(1); left > 0 && !e.stop.Load(); {
			n := e.changes.Load()
			e.learnHostless()
			e.offerMTU()
			e.rehop()
			left = e.changes.Add(-n)
		}
	}()
}

// learnHostless asks the resolver, if it knows, for the addresses that no other host has:
// this host's own, and the broadcast addresses of its subnets.
func (e *Engine) learnHostless() {
	r, ok := e.resolver.(interface{ Hostless() []netip.Addr })
	if !ok {
		return
	}
	all := make(map[[16]byte]struct{})
	for _, a := range r.Hostless() {
		all[a.As16()] = struct{}{}
	}
	e.hostless.Store(&all)
}

// answerable reports whether p may be answered, or begin a connection (RFC 9293 MUST-57
// and MUST-63).
func (e *Engine) answerable(p *pkt.Packet) bool {
	if !p.Answerable() {
		return false
	}
	hostless := e.hostless.Load()
	if hostless == nil {
		return true
	}
	_, bad := (*hostless)[p.Flow.Remote]
	return !bad
}

// offerMTU has connections to come tell their peers of the MTU that the interface has
// now, if the resolver knows it: frames for the one it had may not arrive.
func (e *Engine) offerMTU() {
	r, ok := e.resolver.(interface{ MTU() int })
	if !ok {
		return
	}
	mtu := r.MTU()
	if mtu <= 0 {
		return // it is gone
	}
	for _, w := range e.workers {
		w.post(func(w *worker) { w.offerMTU(mtu) })
	}
}

// maxRehops bounds the ways that rehop asks for at a time.
const maxRehops = 64

// rehop finds the next hop of every connection again: once for those between the
// same addresses, and many at a time, since each neighbour that is gone takes
// seconds to find out.
func (e *Engine) rehop() {
	type way struct{ local, remote [16]byte }
	conns := make(map[way][]ConnID)
	all, silent := e.QueryConns()
	for _, id := range silent { // what it has is asked for when it turns again
		e.workers[id].post(func(*worker) { e.hopsChanged() })
	}
	for _, ci := range all {
		w := way{ci.Flow.Local, ci.Flow.Remote}
		conns[w] = append(conns[w], ci.ID)
		if ci.SCTP == nil {
			continue
		}
		for _, a := range ci.SCTP.further {
			w.remote = a
			conns[w] = append(conns[w], ci.ID)
		}
	}
	var wg sync.WaitGroup
	turns := make(chan struct{}, maxRehops)
	for w, ids := range conns {
		turns <- struct{}{}
		wg.Go(func() {
			e.resolveConns(ids, pkt.Flow{Local: w.local, Remote: w.remote})
			<-turns
		})
	}
	wg.Wait()
}

// maxDoubts bounds the next hops that are being doubted. Others come again with
// their next time-out.
const maxDoubts = 16

// doubt asks for the next hop of a connection that is not heard: the kernel, which
// sees none of its packets, has no reason of its own to find out that the
// neighbour is gone or has another address (RFC 1122, Section 3.3.1.4; RFC
// 4861, Section 7.3.1).
func (e *Engine) doubt(id ConnID, flow pkt.Flow) {
	e.ask(maxDoubts, func() { e.resolveConn(id, flow) })
}

// ask has f ask the resolver, unless most, of maxDoubts, do already.
func (e *Engine) ask(most int32, f func()) {
	if e.resolver == nil {
		return
	}
	if e.doubts.Add(1) > most {
		e.doubts.Add(-1)
		return
	}
	go func() {
		defer e.doubts.Add(-1)
		f()
	}()
}

// resolveConn asks the resolver for a connection's next hop and tells its
// worker.
func (e *Engine) resolveConn(id ConnID, flow pkt.Flow) { e.resolveConns([]ConnID{id}, flow) }

func (e *Engine) resolveConns(ids []ConnID, flow pkt.Flow) {
	if e.resolver == nil {
		return
	}
	hop, err := e.resolver.Resolve(netip.AddrFrom16(flow.Remote).Unmap(), netip.AddrFrom16(flow.Local).Unmap())
	if err != nil {
		return // the hop in use stays: the peer was heard over it
	}
	for _, id := range ids {
		e.onStream(id, func(w *worker, s *stream) {
			if s != nil {
				s.lane.llp.setHop(w, flow.Remote, &hop)
			}
		})
	}
}

// eventQueue carries events from the workers to the event goroutine.
type eventQueue struct {
	mu     sync.Mutex
	cond   *sync.Cond
	q      []func(func(Event))
	closed bool
}

func (q *eventQueue) init() { q.cond = sync.NewCond(&q.mu) }

func (q *eventQueue) push(ev Event) { q.call(func(on func(Event)) { on(ev) }) }

// call runs f in the event goroutine, behind the events pushed so far.
func (q *eventQueue) call(f func(on func(Event))) {
	q.mu.Lock()
	q.q = append(q.q, f)
	q.mu.Unlock()
	q.cond.Signal()
}

func (q *eventQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.cond.Signal()
}

func (q *eventQueue) run(on func(Event)) {
	for {
		q.mu.Lock()
		for len(q.q) == 0 && !q.closed {
			q.cond.Wait()
		}
		batch, closed := q.q, q.closed
		q.q = nil
		q.mu.Unlock()
		if len(batch) == 0 && closed {
			return
		}
		for _, f := range batch {
			f(on)
		}
	}
}
