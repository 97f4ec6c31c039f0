package iwarp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// Listener accepts connection requests at an endpoint.
type Listener struct {
	d    *Device
	h    uint32
	addr netip.AddrPort
	cfg  Config
	own  bool // the Listener owns the Device

	mu      sync.Mutex
	queue   []*ConnRequest
	streams []*Stream     // for AcceptStream
	more    chan struct{} // signalled when queue grows
	closed  bool
	done    chan struct{}

	acceptOnce sync.Once
	accepted   chan acceptResult
	wg         sync.WaitGroup
}

// defaultBacklog is the default of Config.Backlog.
const defaultBacklog = 128

type acceptResult struct {
	conn *Conn
	err  error
}

// ConnRequest is a peer's request for a connection.
type ConnRequest struct {
	Local, Remote netip.AddrPort

	d        *Device
	l        *Listener // nil for a request on a Stream of ConnectStream, whose QP is q
	q        *QP
	h        uint32
	priv     []byte
	ird      int
	ord      int
	rev      int
	gone     chan struct{} // see Gone
	once     sync.Once
	streamed bool // it was a Stream before
}

// Listen listens for connections at addr, "addr:port", or ":port" for every address
// of the interface. Port 0 makes the daemon choose a free port; see Listener.Addr.
func (d *Device) Listen(ctx context.Context, addr string, cfg *Config) (*Listener, error) {
	own := *cfg.orDefault()
	if own.Backlog <= 0 {
		own.Backlog = defaultBacklog
	}
	op := "listen on " + addr
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, &Error{op, ctrlpb.Code_CODE_INVALID, err.Error()}
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, &Error{op, ctrlpb.Code_CODE_INVALID, fmt.Sprintf("%q is not a port", port)}
	}
	d.mu.Lock()
	d.opening++
	d.mu.Unlock()
	a, err := d.call(ctx, op, &ctrlpb.Request{Body: &ctrlpb.Request_Listen{Listen: &ctrlpb.Listen{
		Address: host, Port: uint32(p), Backlog: size(own.Backlog), Startup: own.Startup.pb(), Streaming: own.Streaming, Device: d.device(),
	}}}, -1)
	var l *Listener
	if err == nil {
		seqpacket.CloseAll(a.fds)
		l = &Listener{
			d: d, h: a.reply.GetListen().GetListen(), cfg: own, more: make(chan struct{}, 1), done: make(chan struct{}),
			accepted: make(chan acceptResult),
		}
		l.addr, _ = netip.ParseAddrPort(a.reply.GetListen().GetAddress())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opening--
	if l != nil {
		d.listens[l.h] = l
		for _, e := range d.early {
			if e.Listen == l.h {
				d.push(l, e)
			}
		}
		for _, e := range d.earlyStreams {
			if e.listen == l.h {
				l.pushStream(e.s)
			}
		}
	}
	if d.opening == 0 {
		d.early, d.earlyStreams = nil, nil
	}
	return l, err
}

// connectRequest passes a ConnectRequest event to its listener.
func (d *Device) connectRequest(e *ctrlpb.ConnectRequest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.streams[e.Conn]; s != nil {
		delete(d.streams, e.Conn)
		r := d.newRequest(s.l, e)
		r.q, r.streamed = s.q, true
		s.request <- r // buffered: a stream has one request
	} else if l := d.listens[e.Listen]; l != nil {
		d.push(l, e)
	} else if d.opening > 0 {
		d.early = append(d.early, e)
	}
}

// newRequest makes a request of an event. Called with d.mu held.
func (d *Device) newRequest(l *Listener, e *ctrlpb.ConnectRequest) *ConnRequest {
	r := &ConnRequest{
		d: d, l: l, h: e.Conn, priv: e.PrivateData, ird: int(e.Ird), ord: int(e.Ord), rev: int(e.Revision), gone: make(chan struct{}),
	}
	r.Local, _ = netip.ParseAddrPort(e.Local)
	r.Remote, _ = netip.ParseAddrPort(e.Remote)
	d.reqs[r.h] = r
	if d.err != nil {
		r.end()
	}
	return r
}

// push queues a request. Called with d.mu held.
func (d *Device) push(l *Listener, e *ctrlpb.ConnectRequest) {
	r := d.newRequest(l, e)
	l.mu.Lock()
	l.queue = append(l.queue, r)
	l.mu.Unlock()
	signal(l.more)
}

// signal wakes a goroutine that receives from ch, now or later. ch has room for one signal.
func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// withdraw ends the request of the connection h, if there is one. It leaves nothing of it in the
// queue, which peers that connect and leave could otherwise fill while the program does not call
// Request.
func (d *Device) withdraw(h uint32) {
	d.mu.Lock()
	r := d.reqs[h]
	delete(d.reqs, h)
	d.mu.Unlock()
	if r == nil {
		return
	}
	r.end()
	if r.l != nil {
		r.l.mu.Lock()
		r.l.queue = slices.DeleteFunc(r.l.queue, func(q *ConnRequest) bool { return q == r })
		r.l.mu.Unlock()
	}
}

// connectGone withdraws a request or a stream.
func (d *Device) connectGone(e *ctrlpb.ConnectGone) {
	d.withdraw(e.Conn)
	d.mu.Lock()
	for i, early := range d.early {
		if early.Conn == e.Conn {
			d.early = append(d.early[:i:i], d.early[i+1:]...)
			break
		}
	}
	s := d.streams[e.Conn]
	if s != nil && s.l != nil {
		s.l.mu.Lock()
		s.l.streams = slices.DeleteFunc(s.l.streams, func(q *Stream) bool { return q == s })
		s.l.mu.Unlock()
	}
	d.mu.Unlock()
	if s != nil {
		s.over(fromPB(s.op, e.Error))
	}
}

// Addr returns the endpoint.
func (l *Listener) Addr() netip.AddrPort { return l.addr }

// Request waits for the next connection request. The caller must answer it with Accept,
// AcceptConn or Reject within the daemon's time-out.
func (l *Listener) Request(ctx context.Context) (*ConnRequest, error) {
	for {
		r, err := next(ctx, l, &l.queue)
		if err != nil {
			return nil, err
		}
		select {
		case <-r.gone:
		default:
			return r, nil
		}
	}
}

// next waits for an element of queue, which is one of l's, and removes it.
func next[T any](ctx context.Context, l *Listener, queue *[]*T) (*T, error) {
	drained := false // the queue was checked after the daemon announced that it will stop
	for {
		l.mu.Lock()
		if q := *queue; len(q) > 0 {
			if *queue = q[1:]; len(q) > 1 {
				signal(l.more) // pass the signal on to another waiter
			}
			l.mu.Unlock()
			return q[0], nil
		}
		l.mu.Unlock()
		select {
		case <-l.more:
		case <-l.done:
			return nil, ErrClosed
		case <-l.d.done:
			return nil, l.d.Err()
		case <-l.d.drains:
			if drained {
				return nil, ErrDraining
			}
			drained = true
		case <-ctx.Done():
			return nil, fmt.Errorf("iwarp: wait for a connection on %v: %w", l.addr, ctx.Err())
		}
	}
}

// Accept waits for the next connection and returns it, with the settings of Listen.
// Connections are set up concurrently, so a slow or failing peer does not delay
// others. An error such as ErrQuota concerns one connection: Accept may be called again.
// Use either Accept or Request on a Listener, not both.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	l.acceptOnce.Do(func() { l.wg.Go(l.acceptLoop) })
	select {
	case r := <-l.accepted:
		return r.conn, r.err
	case <-l.done:
		return nil, ErrClosed
	case <-l.d.done:
		return nil, l.d.Err()
	case <-ctx.Done():
		return nil, fmt.Errorf("iwarp: accept on %v: %w", l.addr, ctx.Err())
	}
}

// acceptLoop accepts every request in a goroutine of its own. While as many connections as the
// backlog wait for Accept, it leaves further requests to wait, whose number the daemon limits.
func (l *Listener) acceptLoop() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-l.done:
		case <-l.d.done:
		case <-ctx.Done():
		}
		cancel()
	}()
	waiting := make(chan struct{}, l.cfg.Backlog)
	var accepting sync.WaitGroup
	for {
		select {
		case waiting <- struct{}{}: // there is room
			<-waiting
		case <-ctx.Done():
		}
		r, err := l.Request(ctx)
		if err != nil {
			accepting.Wait()
			for { // report to every Accept
				select {
				case l.accepted <- acceptResult{nil, err}:
				case <-ctx.Done():
					return
				}
			}
		}
		accepting.Go(func() {
			c, err := r.AcceptConn(ctx, &l.cfg)
			if err != nil && ofPeer(err) {
				return
			}
			select {
			case waiting <- struct{}{}:
				defer func() { <-waiting }()
			case <-ctx.Done():
			}
			select {
			case l.accepted <- acceptResult{c, err}:
			case <-ctx.Done():
				if c != nil {
					c.Abort()
				}
			}
		})
	}
}

// Close stops listening. Accepted connections stay open; pending requests are
// dropped.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	close(l.done)
	l.mu.Unlock()
	err := l.d.do(context.Background(), "close listener", &ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l.h}}})
	l.d.mu.Lock()
	delete(l.d.listens, l.h)
	l.mu.Lock()
	streams := l.streams
	l.streams = nil
	l.mu.Unlock()
	for h, r := range l.d.reqs {
		if r.l == l && !r.streamed {
			delete(l.d.reqs, h)
			r.end()
		}
	}
	l.d.mu.Unlock()
	for _, s := range streams {
		_ = s.Abort()
	}
	l.wg.Wait()
	if l.own {
		l.d.Close()
	}
	return err
}

// PrivateData returns the private data of the request.
func (r *ConnRequest) PrivateData() []byte { return r.priv }

// IRD returns the number of outstanding RDMA Reads that the peer accepts from this
// side (RFC 6581 section 9.1).
func (r *ConnRequest) IRD() int { return r.ird }

// ORD returns the number of RDMA Reads that the peer wants to have outstanding.
func (r *ConnRequest) ORD() int { return r.ord }

// Revision returns the MPA revision of the request.
func (r *ConnRequest) Revision() int { return r.rev }

// Gone returns a channel that is closed when the request can no longer be accepted: the peer has
// closed the connection, the time to answer has passed, or the Listener or the Device has ended.
func (r *ConnRequest) Gone() <-chan struct{} { return r.gone }

// end closes the channel of Gone.
func (r *ConnRequest) end() { r.once.Do(func() { close(r.gone) }) }

func (r *ConnRequest) forget() {
	r.d.mu.Lock()
	delete(r.d.reqs, r.h)
	r.d.mu.Unlock()
}

// Accept accepts the request with the queue pair q, and returns when the connection is
// established. It uses only PrivateData, Startup.IRD and Startup.ORD of cfg. If the request
// came on a Stream of ConnectStream, q must be the QP of that Stream, or nil.
func (r *ConnRequest) Accept(ctx context.Context, q *QP, cfg *Config) (*ConnInfo, error) {
	cfg = cfg.orDefault()
	op := fmt.Sprintf("accept %v", r.Remote)
	switch {
	case r.q != nil && q != nil && q != r.q:
		return nil, &Error{op, ctrlpb.Code_CODE_INVALID, "the stream has the queue pair that it was connected with"}
	case r.q != nil:
		q = r.q
	}
	q.mu.Lock()
	q.private = append([]byte{}, r.priv...)
	q.mu.Unlock()
	r.forget()
	err := q.begin(ctx, op, &ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{
		Conn: r.h, Qp: q.num, PrivateData: cfg.PrivateData, Ird: depth(cfg.Startup.IRD), Ord: depth(cfg.Startup.ORD),
	}}})
	if err != nil {
		return nil, err
	}
	return q.await(ctx, op)
}

// Reject refuses the request and sends private, at most 508 bytes, to the peer's
// application.
func (r *ConnRequest) Reject(ctx context.Context, private []byte) error {
	r.forget()
	return r.d.do(ctx, fmt.Sprintf("reject %v", r.Remote), &ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{
		Conn: r.h, PrivateData: private,
	}}})
}
