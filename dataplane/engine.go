// Package dataplane connects the protocol cores to the network and to clients. A worker for
// each NIC queue polls the link, the clients' doorbells and its timers, and owns its frames,
// connections and queue pairs. The control plane sends a worker commands through its command
// queue, and receives events.
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

// ConnID identifies a connection for the life of the engine. Its upper 16 bits are the number
// of the worker that created it.
type ConnID uint64

// Worker returns the worker that created id. IDs of one worker increase.
func (id ConnID) Worker() int { return int(id >> 48) }

// ListenerID identifies a listener.
type ListenerID uint64

// PollPolicy determines what an idle worker does.
type PollPolicy uint8

const (
	// Adaptive spins for Config.Spin after the last work, then sleeps until a
	// frame, a doorbell, a command or a timer.
	Adaptive PollPolicy = iota
	// Busy spins forever, for the lowest latency at the cost of one core per worker.
	Busy
)

// Config configures an engine. The zero value of each field means its default.
type Config struct {
	// OnEvent is called for every event, in order, from a single goroutine. It must not
	// block for long.
	OnEvent func(Event)
	Poll    PollPolicy
	// Spin is the time for which an adaptive worker spins after work; default 50 µs.
	Spin time.Duration
	// TCP is the configuration of every connection; default tcp.DefaultConfig(). If MaxHeld
	// is 0, the worker's memory is the only limit.
	TCP  *tcp.Config
	SCTP SCTPConfig
	// StreamBuffer bounds the streaming-mode bytes of a connection that the control plane
	// has not consumed; default 64 KiB.
	StreamBuffer int
	// SendBuffer is the number of streaming-mode bytes that should be queued for sending:
	// EventWritable reports that at most half as many are left. Default StreamBuffer.
	SendBuffer int
	// MaxConns bounds the connections of each worker; default 16384.
	MaxConns int
	// Inline lets an application drive worker 0 by calling Turn. The engine's own goroutine
	// takes over only while the application does not call it.
	Inline bool
	// Fragments are the sources of IP fragments in addition to the queues, by the name of the
	// device. The engine closes them.
	Fragments map[string]FragmentSource
	// Now is the workers' clock; default clock.Now.
	Now func() clock.Time
}

// SCTPConfig is the configuration of all associations.
type SCTPConfig struct {
	// RTOMin is RTO.Min of RFC 9260; default 1 s. It is the least time to recover from the
	// loss of the last message of an exchange.
	RTOMin time.Duration
	// Idle is how long a peer may keep an association that it opened without a session;
	// default a minute, negative means forever.
	Idle time.Duration
	// PerPeer bounds the associations between one address and one listener, per worker;
	// default 1024. Before its first accepted session each holds at most 64 KiB of data of
	// its peer.
	PerPeer int
	// Memory bounds the out-of-order data, in bytes, that the associations of one worker
	// hold; default 256 MiB, or four receive windows if that is more. When it is exceeded,
	// the association that holds the most is ended, preferring those without an accepted
	// session.
	Memory int
}

// Queue is a NIC queue, to be served by a worker.
type Queue struct {
	Link link.Link
	// Device is the name of the interface. A connection stays with its device; its frames may
	// arrive on any device.
	Device string
	CPU    int // CPU to pin the worker to, or -1
	// PartialChecksums accepts TCP segments whose checksum field contains only the sum of the
	// pseudo-header. Kernels of this host and of its guests send such segments over virtual
	// links. From a physical link they would be corrupt.
	PartialChecksums bool
}

// Hop is the first hop to a destination, from the kernel's routes and neighbours.
type Hop struct {
	SrcMAC, DstMAC [6]byte
	VLANs          []uint16 // TCIs, outermost first
	MTU            int      // path MTU, in bytes of an IP packet
	Src            netip.Addr
	Local          bool   // the destination is an address of this host
	Device         string // name of the outgoing interface
}

// Resolver finds the next hop to a destination over the interface device, or over the one that
// the routes name if device is "". Resolve may block for a bounded time while the kernel
// resolves a neighbour. Watch registers a function that is called when routes, neighbours or
// the MTU may have changed.
type Resolver interface {
	Resolve(dst, src netip.Addr, device string) (Hop, error)
	Watch(changed func())
}

// CQ is a completion queue; shm.CQ implements it. Flush publishes the completions pushed by a
// worker and wakes the client if it waits, possibly later: if again is not 0, Flush must be
// called again at that time. Pending reports whether worker must call Flush.
type CQ interface {
	Push(worker int, wc *verbs.WC) bool // false: full
	Pending(worker int) bool
	Flush(worker int, now clock.Time) (again clock.Time)
}

// QPBinding is a queue pair with its rings, as passed to the worker of its connection.
type QPBinding struct {
	QP             *verbs.QP
	SendCQ, RecvCQ CQ
	Client         *ClientBinding
	Bit            int // in the client's doorbell pages
	User           any // for the owner's use
	Far            Far // the Mover of QP, or nil
	// ReceiveWait is how long a Send may wait for its receive over TCP. If it is 0, a Send
	// without a receive ends the stream at once, as RFC 5041 section 7.1 requires.
	ReceiveWait time.Duration

	stream *stream       // owned by the worker it is attached to
	moved  atomic.Bool   // Far has moved data since the worker last looked
	id     atomic.Uint64 // connection passed to Attach
}

// Far is the part of a queue pair's Mover that the worker uses.
type Far interface {
	// Notify makes the Mover call f, from any goroutine, when it has moved data.
	Notify(f func())
	// Backlog returns the number of bytes that must still be stored.
	Backlog() int
	// Crowded reports whether the client has so many bytes to store that it should receive no
	// more.
	Crowded() bool
}

// ClientBinding is the part of a client that workers use: its doorbell pages.
type ClientBinding struct {
	Doorbells []*shm.Doorbells // one per worker
	// OnFault is called by the worker when an access to the client's memory has faulted. The
	// client must then be ended.
	OnFault func()
}

// Attachment moves a connection from streaming mode to full operation.
type Attachment struct {
	QP     *QPBinding
	Params mpa.Params
	Reply  []byte // the last streaming-mode bytes to send: a responder's MPA reply
	// Fail, if set, terminates the stream with this Terminate as soon as full operation begins.
	// Some start-up failures are reported to the peer in this way (RFC 6581 section 9).
	Fail *term.Error
}

// EventKind is the type of an event.
type EventKind uint8

// The events of a connection occur in this order; EventClosed is the last. The events of an
// association precede and follow those of its sessions.
const (
	EventNone EventKind = iota
	// EventAccepted: a passive open succeeded; the connection is in streaming mode.
	EventAccepted
	// EventConnected: an active open succeeded; the connection is in streaming mode.
	EventConnected
	// EventData: Data contains the streaming-mode bytes that arrived in one turn.
	EventData
	// EventWritable: bytes passed to StreamSend have been sent; more can be queued.
	EventWritable
	// EventEstablished: the connection is in full operation, and the QP may send.
	EventEstablished
	// EventPeerClosed: the peer's FIN arrived in order.
	EventPeerClosed
	// EventTerminated: the peer sent a Terminate; Err is a *term.RemoteError, Data its bytes.
	EventTerminated
	// EventFailed: the peer violated the protocol and was sent a Terminate; Err is a
	// *term.Error.
	EventFailed
	// EventRequest: SCTP, the peer requests a session; call Answer. Setup has its contents.
	EventRequest
	// EventNegotiate: SCTP in the draft's profile, a Negotiate of the peer, in Setup. Conn
	// is an unanswered session of ours, or 0 if it is for the listener.
	EventNegotiate
	// EventAnswer: SCTP, the peer accepted our session; call Attach. Setup has its
	// contents.
	EventAnswer
	// EventRejected: SCTP, the peer rejected our session; Setup is nil if its ULP was not
	// involved.
	EventRejected
	// EventClosed: the connection has ended; Err is the reason, or nil if both sides closed
	// it gracefully.
	EventClosed
	// EventJoined: SCTP, an association of Flow has started, for Listener or dialed for
	// Conn. Its packets must be steered until EventParted, which may be long after its last
	// session.
	EventJoined
	// EventParted: SCTP, the association of Flow has ended.
	EventParted
)

// Event reports a change of a connection to the control plane.
type Event struct {
	Kind     EventKind
	Conn     ConnID
	Listener ListenerID // EventAccepted, EventRequest, EventNegotiate, EventJoined
	Flow     pkt.Flow
	Host     bool // EventAccepted, EventConnected: the peer is a program of this host
	Worker   int  // index of the client's doorbell page for the connection
	Data     []byte
	Err      error
	QP       *QPBinding     // nil in streaming mode
	Setup    *session.Setup // SCTP
}

// Errors of the engine's calls.
var (
	ErrStopped = errors.New("dataplane: engine stopped")
	ErrTimeout = errors.New("dataplane: connect timed out")
	// ErrCQOverrun is the error of a connection whose completion queue overflowed.
	ErrCQOverrun = errors.New("dataplane: completion queue overrun")
)

// Engine owns the workers, one per queue of each device.
type Engine struct {
	cfg      Config
	resolver Resolver
	workers  []*worker
	devices  []*device
	secret   [16]byte // for ISS and SYN cookies
	nextID   atomic.Uint64

	events eventQueue
	dir    *handoff.Directory[*worker] // nil if there is only one worker

	taps  atomic.Pointer[[]*Tap] // nil: none
	tapMu sync.Mutex             // serializes changes of taps

	dialing    handoff.Dialing[*worker]
	hopLookups atomic.Int32                          // pending lookups
	hostless   atomic.Pointer[map[[16]byte]struct{}] // see learnHostless
	changes    atomic.Int32                          // changes of hops that are not yet processed, including those of the rehop in progress

	stop    atomic.Bool
	wg      sync.WaitGroup
	evDone  chan struct{}
	started bool
}

// New returns an engine for queues. Start starts it.
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
		w.dev.workers = append(w.dev.workers, w)
	}
	return e, nil
}

// Start starts the workers and the event goroutine.
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
	for _, d := range e.devices {
		d.frags.start()
	}
	if e.resolver != nil {
		e.learnHostless()
		e.resolver.Watch(e.hopsChanged)
	}
}

// Stop stops the workers. Peers are not notified; the caller must close the links.
func (e *Engine) Stop() {
	if e.stop.Swap(true) {
		return
	}
	for _, w := range e.workers {
		w.cmds.alarm.Ring()
	}
	for _, d := range e.devices {
		d.frags.stop()
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

// Turn runs one turn of worker 0 in the calling goroutine and returns the amount of work done.
// The engine must have been created with Inline. It returns 0 if the engine's own goroutine is
// in a turn.
func (e *Engine) Turn() int { return e.workers[0].inlineTurn() }

func (e *Engine) worker(id ConnID) *worker {
	i := id.Worker()
	if i >= len(e.workers) {
		i = 0
	}
	return e.workers[i]
}

// elsewhere reports whether a worker other than w owns k.
func (e *Engine) elsewhere(k handoff.Key, w *worker) bool {
	owner := e.dir.Find(&k)
	return owner != nil && owner != w
}

// onStream makes the owner of a stream call f once, with nil if the stream no longer exists.
func (e *Engine) onStream(id ConnID, f func(w *worker, s *stream)) {
	e.worker(id).post(func(w *worker) { w.withStream(id, f) })
}

// ListenRequest describes a listener.
type ListenRequest struct {
	// Local is the endpoint. An unspecified address stands for all addresses.
	Local netip.AddrPort
	// Backlog bounds the half-open TCP connections of each worker.
	Backlog int
	// Stream marks TCP connections that start as byte streams: a full receive window may
	// wait for the control plane. For others Config.StreamBuffer is sufficient, and more is
	// treated as an attack.
	Stream bool
	// SCTP has the settings for SCTP; nil means TCP.
	SCTP *SCTP
	// Admit reports whether a peer may connect. Workers call it for each packet that may begin
	// a connection, so it must not block. A peer that is not admitted gets the answer of a port
	// without a listener. nil admits all.
	Admit func(peer netip.Addr) bool
	IP    IPOptions // of the accepted connections
	// Device is the only device to listen on; "" means all.
	Device string
}

// Listen makes all workers accept connections, which EventAccepted reports, or sessions over
// SCTP, which EventRequest reports and Answer answers. If one worker cannot listen, none does.
func (e *Engine) Listen(r ListenRequest) (ListenerID, error) {
	id := ListenerID(e.nextID.Add(1))
	workers := e.workers
	if r.Device != "" {
		workers = e.device(r.Device).workers
	}
	errs := make(chan error, len(workers))
	for _, w := range workers {
		w.post(func(w *worker) { errs <- w.listen(id, &r) })
	}
	var first error
	for range workers {
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

// Unlisten closes a listener. Its connections are not affected.
func (e *Engine) Unlisten(id ListenerID) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.unlisten(id) })
	}
}

// NewID returns the id for a connection that Connect will open from local over the device of
// the Hop. No event has this id before Connect is called.
func (e *Engine) NewID(local netip.AddrPort, device string) ConnID {
	return e.device(device).dialer(local).newID()
}

// ConnectRequest describes the connection that Connect opens.
type ConnectRequest struct {
	Local, Remote netip.AddrPort
	Timeout       time.Duration // 0 means as long as the transport tries
	Stream        bool          // as in ListenRequest
	SCTP          *SCTP         // nil means TCP
	Setup         session.Setup // over SCTP: contents of the session request
	// Join begins the session on an existing association between the same endpoints, which an
	// earlier Connect has opened or is opening, instead of a new one.
	Join bool
	IP   IPOptions // ignored with Join: the association keeps its own
}

// Connect opens the connection id, which NewID returned for the same local endpoint and device.
// EventConnected, or EventAnswer over SCTP, or EventClosed follows within the timeout. After an
// error nothing was opened, and no event follows. The error is ErrNoStream if there is no
// association to join, or no free stream on it. If this is known only when the association is
// established, EventClosed reports it. Connect waits for the resolver.
func (e *Engine) Connect(id ConnID, r ConnectRequest) error {
	var hop Hop
	w := e.worker(id)
	if !r.Join {
		var err error
		if hop, err = e.resolver.Resolve(r.Remote.Addr(), r.Local.Addr(), w.dev.name); err != nil && e.workers[0].socks == nil {
			return err
		}
	}
	done := make(chan error, 1)
	w.post(func(w *worker) {
		switch {
		case hop.Local && r.SCTP != nil && w.socks == nil:
			done <- errHostSCTP
		case hop.Local && reaches(w, r.Remote):
			done <- connectHost(w, id, &r)
		case unplugged(w.link):
			done <- errUnplugged
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

// Answer answers the request of an EventRequest. It attaches a.QP, or rejects the request if
// a.QP is nil. If the request has been withdrawn, work posted to a.QP is flushed, and an
// EventClosed reports the queue pair.
func (e *Engine) Answer(id ConnID, set session.Setup, a Attachment) {
	if a.QP != nil {
		a.QP.id.Store(uint64(id)) // like Attach
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

// StreamConsumed reports that the control plane has consumed the next n bytes of those in
// EventData.
func (e *Engine) StreamConsumed(id ConnID, n int) {
	e.onStream(id, func(w *worker, s *stream) {
		if c, ok := streamOf(s); ok {
			c.streamConsumed(w, n)
		}
	})
}

// Attach starts full operation of a connection: after the bytes consumed so far, and after
// a.Reply, both directions consist of FPDUs.
func (e *Engine) Attach(id ConnID, a Attachment) {
	a.QP.id.Store(uint64(id)) // Detach may be called before the worker handles this
	e.onStream(id, func(w *worker, s *stream) { w.attach(id, s, a) })
}

// Disconnect closes a connection. A graceful close first sends posted work as far as the window
// allows (in streaming mode, everything passed to StreamSend); abort sends a RST. EventClosed
// follows.
func (e *Engine) Disconnect(id ConnID, abort bool) {
	e.onStream(id, func(w *worker, s *stream) {
		if s != nil {
			w.disconnect(s, abort)
		}
	})
}

// Detach removes a queue pair from its worker and resets its connection, if any. When it
// returns, all posted work is flushed, and no worker uses the binding or its rings.
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
	for _, w := range e.workers { // serves as a fence too
		done := make(chan struct{})
		w.post(func(w *worker) { w.flushes.after(w, b, func(*worker) { close(done) }) })
		e.await(done)
	}
}

// Fence returns after every worker has finished its current turn: then no worker uses memory
// that was unlinked before the call.
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

// Bind makes the workers poll a client's doorbells, and registers the client's wake-ups.
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

// unwatch removes the wake-ups of a client from the first n workers.
func (e *Engine) unwatch(cb *ClientBinding, n int) {
	for i, w := range e.workers[:n] {
		w.cmds.alarm.Unwatch(cb.Doorbells[i].WakeFD())
	}
}

// Unbind undoes Bind. When it returns, no worker uses the pages.
func (e *Engine) Unbind(cb *ClientBinding) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.unbind(cb) })
	}
	e.Fence()
	e.unwatch(cb, len(e.workers))
}

// hopsChanged starts to resolve all next hops again, without waiting. It never runs twice at
// once, so that results cannot arrive out of order.
func (e *Engine) hopsChanged() {
	if e.changes.Add(1) > 1 {
		return // the running goroutine starts over
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

// learnHostless asks the resolver, if it supports this, for the addresses at which no other
// host can be: this host's own, and the broadcast addresses of its subnets.
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

// answerable reports whether p may be answered and may begin a connection (RFC 9293 MUST-57 and
// MUST-63).
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

// offerMTU makes new connections announce the current MTU of their interface, if the resolver
// knows it: larger frames may not arrive.
func (e *Engine) offerMTU() {
	r, ok := e.resolver.(interface{ MTU(device string) int })
	if !ok {
		return
	}
	for _, d := range e.devices {
		mtu := r.MTU(d.name)
		if mtu <= 0 {
			continue // the interface has been removed
		}
		for _, w := range d.workers {
			w.post(func(w *worker) { w.offerMTU(mtu) })
		}
	}
}

// maxRehops bounds the concurrent lookups of rehop.
const maxRehops = 64

// rehop resolves the next hop of every connection again, once per pair of addresses and many at
// a time, since each unreachable neighbour takes seconds.
func (e *Engine) rehop() {
	type way struct {
		local, remote [16]byte
		device        string
	}
	conns := make(map[way][]ConnID)
	all, silent := e.QueryConns()
	for _, id := range silent { // the worker's connections are resolved when it runs again
		e.workers[id].post(func(*worker) { e.hopsChanged() })
	}
	for _, ci := range all {
		w := way{ci.Flow.Local, ci.Flow.Remote, e.Device(ci.ID)}
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
			e.resolveConns(ids, pkt.Flow{Local: w.local, Remote: w.remote}, w.device)
			<-turns
		})
	}
	wg.Wait()
}

// maxHopLookups bounds the concurrent lookups of recheckHop. Other connections retry at their next
// time-out.
const maxHopLookups = 16

// recheckHop resolves the next hop of a connection again after repeated time-outs. The kernel sees
// none of its packets, so it would not notice by itself that the neighbour is gone or has a new
// address (RFC 1122, Section 3.3.1.4; RFC 4861, Section 7.3.1).
func (e *Engine) recheckHop(id ConnID, flow pkt.Flow) {
	e.ask(maxHopLookups, func() { e.resolveConn(id, flow) })
}

// ask calls f in a goroutine, unless the number of lookups in progress has reached most.
func (e *Engine) ask(most int32, f func()) {
	if e.resolver == nil {
		return
	}
	if e.hopLookups.Add(1) > most {
		e.hopLookups.Add(-1)
		return
	}
	go func() {
		defer e.hopLookups.Add(-1)
		f()
	}()
}

// resolveConn resolves a connection's next hop and passes the result to its worker.
func (e *Engine) resolveConn(id ConnID, flow pkt.Flow) {
	e.resolveConns([]ConnID{id}, flow, e.Device(id))
}

func (e *Engine) resolveConns(ids []ConnID, flow pkt.Flow, device string) {
	if e.resolver == nil {
		return
	}
	hop, err := e.resolver.Resolve(netip.AddrFrom16(flow.Remote).Unmap(), netip.AddrFrom16(flow.Local).Unmap(), device)
	if err != nil {
		return // keep the current hop: the peer was reached through it
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

// call runs f in the event goroutine, after the events queued so far.
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
