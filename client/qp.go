package iwarp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/shm"
)

// Defaults of the sizes of queues.
const (
	defaultDepth  = 64 // work requests
	defaultSGE    = 4
	defaultInline = 64 // bytes
)

// QPConfig sets the properties of a QP.
type QPConfig struct {
	PD                   *PD
	SendCQ, RecvCQ       *CQ  // may be the same
	SendDepth, RecvDepth int  // work requests in each queue; default 64
	MaxSGE               int  // pieces in a work request; default 4
	MaxInline            int  // bytes of inline data; default 64
	SigAll               bool // every send work request generates a completion
	SRQ                  *SRQ // queue to take receives from; RecvDepth is then the number that the QP holds at a time
	// ReceiveWait is how long a Send of the peer may wait for its receive over TCP, in whole
	// milliseconds up to a minute. If it is 0, a Send without a receive ends the connection, as
	// RFC 5041 section 7.1 requires.
	ReceiveWait time.Duration
}

// QP is a queue pair. It can have only one connection, made by Connect or by
// ConnRequest.Accept. Receives may be posted before the connection is established. Sends posted
// before that wait for it. If it is not established, all of them complete with WCFlushErr.
type QP struct {
	d   *Device
	num uint32
	bit int
	srq bool // the QP has no receive queue of its own

	smu sync.Mutex
	sq  *shm.SQProducer // nil after Close; guarded by smu
	rmu sync.Mutex
	rq  *shm.RQProducer // nil after Close or with an SRQ; guarded by rmu

	closing atomic.Bool  // Close has been called
	worker  atomic.Int32 // worker whose doorbell page to ring; -1 before the connection
	ended   atomic.Bool  // the connection has ended: nothing more can be posted
	outcome chan error   // result of connect or accept

	mu      sync.Mutex // guards the rest
	info    *ConnInfo
	stream  *Stream // set by ConnectStream or Initiate
	private []byte  // private data of the request, on the accepting side
	leaving bool    // this side has requested the end
	term    *TerminateError
	async   error // the error of an AsyncError for this QP
	err     error
	done    chan struct{}
}

// CreateQP creates a queue pair.
func (d *Device) CreateQP(ctx context.Context, cfg QPConfig) (*QP, error) {
	if cfg.PD == nil || cfg.SendCQ == nil || cfg.RecvCQ == nil {
		return nil, &Error{"create QP", ctrlpb.Code_CODE_INVALID, "a queue pair needs a PD and two CQs"}
	}
	cfg.SendDepth, cfg.RecvDepth = cmp.Or(cfg.SendDepth, defaultDepth), cmp.Or(cfg.RecvDepth, defaultDepth)
	cfg.MaxSGE, cfg.MaxInline = cmp.Or(cfg.MaxSGE, defaultSGE), cmp.Or(cfg.MaxInline, defaultInline)
	if cfg.SendDepth < 0 || cfg.RecvDepth < 0 || cfg.MaxSGE < 0 || cfg.MaxInline < 0 {
		return nil, &Error{"create QP", ctrlpb.Code_CODE_INVALID, "negative size"}
	}
	srq, want := uint32(0), 2
	if cfg.SRQ != nil {
		srq, want = cfg.SRQ.h, 1
	}
	a, err := d.call(ctx, "create QP", &ctrlpb.Request{Body: &ctrlpb.Request_CreateQp{CreateQp: &ctrlpb.CreateQP{
		Pd: cfg.PD.h, SendCq: cfg.SendCQ.h, RecvCq: cfg.RecvCQ.h, SqDepth: size(cfg.SendDepth), RqDepth: size(cfg.RecvDepth),
		MaxSge: size(cfg.MaxSGE), MaxInline: size(cfg.MaxInline), SigAll: cfg.SigAll, Srq: srq,
		ReceiveWaitMs: uint32(min(max(cfg.ReceiveWait, 0), math.MaxUint32*time.Millisecond) / time.Millisecond),
	}}}, -1)
	if err != nil {
		return nil, err
	}
	defer seqpacket.CloseAll(a.fds)
	r := a.reply.GetQp()
	if len(a.fds) != want || r == nil {
		return nil, fmt.Errorf("%w: create QP: %d descriptors", ErrInternal, len(a.fds))
	}
	q := &QP{
		d: d, num: r.Qp, bit: int(r.Doorbell), srq: cfg.SRQ != nil,
		outcome: make(chan error, 1), done: make(chan struct{}),
	}
	q.worker.Store(-1)
	if q.sq, err = shm.MapSQ(a.fds[0]); err != nil {
		d.giveBack(a.reply)
		return nil, fmt.Errorf("iwarp: create QP: %w", err)
	}
	if cfg.SRQ == nil {
		if q.rq, err = shm.MapRQ(a.fds[1]); err != nil {
			q.sq.Close()
			d.giveBack(a.reply)
			return nil, fmt.Errorf("iwarp: create QP: %w", err)
		}
	}
	d.mu.Lock()
	err = d.err
	if err == nil {
		d.qps[q.num] = q
	}
	d.mu.Unlock()
	if err != nil { // otherwise the QP would not be notified that the daemon has ended
		q.unmap()
		return nil, fmt.Errorf("iwarp: create QP: %w", err)
	}
	return q, nil
}

// Num returns the QP number, which is also in each completion.
func (q *QP) Num() uint32 { return q.num }

// PostSend posts a work request to the send queue. wr may be reused when PostSend returns, and
// the memory of its SGEs when the work request completes. It returns ErrQueueFull if the CQ
// must be polled first, ErrWR if there are more SGEs or inline data than the QP was created
// for, and the reason of the end if the connection has ended.
func (q *QP) PostSend(wr *SendWR) error {
	q.smu.Lock()
	defer q.smu.Unlock()
	if q.sq == nil {
		return ErrClosed
	}
	if q.ended.Load() {
		return q.Err()
	}
	if err := q.sq.Post(wr); err != nil {
		return postError(err, &q.closing)
	}
	if w := q.worker.Load(); w >= 0 {
		q.d.ring(w, q.bit)
	}
	return nil
}

// PostSends posts several work requests with one doorbell. It returns the number of those
// posted, and the error of the first that was not.
func (q *QP) PostSends(wrs []SendWR) (n int, err error) {
	q.smu.Lock()
	defer q.smu.Unlock()
	if q.sq == nil {
		return 0, ErrClosed
	}
	if q.ended.Load() {
		return 0, q.Err()
	}
	for n < len(wrs) {
		if err = q.sq.Post(&wrs[n]); err != nil {
			err = postError(err, &q.closing)
			break
		}
		n++
	}
	if w := q.worker.Load(); n > 0 && w >= 0 {
		q.d.ring(w, q.bit)
	}
	return n, err
}

// PostRecv posts a buffer for a message. Messages fill buffers in the order of posting. A
// message without a buffer ends the connection, unless QPConfig.ReceiveWait is set. PostRecv
// returns ErrWR if the QP has an SRQ.
func (q *QP) PostRecv(wr *RecvWR) error {
	q.rmu.Lock()
	defer q.rmu.Unlock()
	if q.rq == nil {
		if q.srq {
			return ErrWR
		}
		return ErrClosed
	}
	if q.ended.Load() {
		return q.Err()
	}
	return postError(q.rq.Post(wr), &q.closing)
}

// postError returns the error of this package for err, of a ring. closing is set if its object is being closed.
func postError(err error, closing *atomic.Bool) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, shm.ErrFull):
		return ErrQueueFull
	case errors.Is(err, shm.ErrFreed) && closing.Load():
		return ErrClosed
	case errors.Is(err, shm.ErrFreed): // Device.Err will say why
		return ErrDaemonGone
	case errors.Is(err, shm.ErrWR):
		return ErrWR
	}
	return err
}

// Connect connects the QP to a peer that listens at remote, "addr:port". It returns when the
// connection is established. If the peer's application refuses it, the error is a *RejectError.
func (q *QP) Connect(ctx context.Context, remote string, cfg *Config) (*ConnInfo, error) {
	if err := q.connect(ctx, remote, cfg, false); err != nil {
		return nil, err
	}
	return q.await(ctx, "connect to "+remote)
}

func (q *QP) connect(ctx context.Context, remote string, cfg *Config, streaming bool) error {
	cfg = cfg.orDefault()
	timeout := cfg.Timeout
	if dl, ok := ctx.Deadline(); ok {
		if left := time.Until(dl); timeout == 0 || left < timeout {
			timeout = max(left, time.Millisecond)
		}
	}
	local := ""
	switch {
	case cfg.LocalAddr.Addr().IsValid():
		local = cfg.LocalAddr.String()
	case cfg.LocalAddr.Port() != 0:
		local = fmt.Sprintf(":%d", cfg.LocalAddr.Port())
	}
	return q.begin(ctx, "connect to "+remote, &ctrlpb.Request{Body: &ctrlpb.Request_Connect{Connect: &ctrlpb.Connect{
		Qp: q.num, Local: local, Remote: remote, PrivateData: cfg.PrivateData, Startup: cfg.Startup.pb(), TimeoutMs: millis(timeout), Streaming: streaming, Device: q.d.device(),
	}}})
}

// begin sends the request that gives q its connection. If ctx ends before the reply, the connection is reset: the caller
// takes it for one that was not made.
func (q *QP) begin(ctx context.Context, op string, req *ctrlpb.Request) error {
	if err := ctx.Err(); err != nil { // nothing is sent
		return fmt.Errorf("iwarp: %s: %w", op, err)
	}
	err := q.d.do(ctx, op, req)
	if err != nil && ctx.Err() != nil {
		q.abortLater()
	}
	return err
}

// await waits for the result of a connect or accept.
func (q *QP) await(ctx context.Context, op string) (*ConnInfo, error) {
	err, werr := wait(ctx, q.d, q.outcome)
	if werr != nil {
		q.abortLater()
		return nil, fmt.Errorf("iwarp: %s: %w", op, werr)
	}
	if err != nil {
		if e, ok := errors.AsType[*Error](err); ok {
			return nil, &Error{op, e.Code, e.Text}
		}
		return nil, fmt.Errorf("iwarp: %s: %w", op, err)
	}
	return q.Info(), nil
}

// abortLater asks the daemon to reset the connection, without waiting for the reply.
func (q *QP) abortLater() {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = q.Abort(ctx)
	}()
}

// Disconnect starts an orderly close of the connection: requests posted earlier are sent, and
// requests posted later are refused. Disconnect does not wait for the end; see Done. Requests
// that cannot complete are flushed.
func (q *QP) Disconnect(ctx context.Context) error { return q.disconnect(ctx, false) }

// Abort resets the connection. A QP that has had none can have none after Abort, and what was posted is flushed.
func (q *QP) Abort(ctx context.Context) error { return q.disconnect(ctx, true) }

// leave records that this side has requested the end.
func (q *QP) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.leaving = true
}

func (q *QP) disconnect(ctx context.Context, abort bool) error {
	q.leave()
	return q.d.do(ctx, "disconnect", &ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: q.num, Abort: abort}}})
}

// SetDSCP changes the DSCP (0 to 63) of the packets that this end of an established
// connection sends from now on. Over SCTP it changes that of all connections of the
// association; between programs of one host there are no packets. The error is an
// *Error: ErrInvalid for another value, ErrState without an established connection.
func (q *QP) SetDSCP(ctx context.Context, dscp uint32) error {
	return q.d.do(ctx, "set the DSCP", &ctrlpb.Request{Body: &ctrlpb.Request_SetDscp{SetDscp: &ctrlpb.SetDSCP{Qp: q.num, Dscp: dscp}}})
}

// Info returns the addresses and the negotiated settings of the connection, or nil
// before it is established.
func (q *QP) Info() *ConnInfo {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.info
}

// Done returns a channel that is closed when the connection has ended, or could not
// be established.
func (q *QP) Done() <-chan struct{} { return q.done }

// Err returns the reason why the connection has ended: a *TerminateError, ErrPeerClosed,
// ErrClosed if this side requested the end, or an *Error. Before the end it returns nil.
func (q *QP) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// WCErr returns nil for a completion of q that succeeded, and otherwise a *WCError. Its cause is the reason for the end of
// the connection, if that has ended. The event with the reason comes after the completions that the end flushes: for a
// flushed one WCErr waits for the event, until ctx is canceled.
func (q *QP) WCErr(ctx context.Context, wc *WC) error {
	switch wc.Status {
	case WCSuccess:
		return nil
	case WCFlushErr:
		_, _ = wait(ctx, q.d, q.done) // canceled: no cause
	}
	cause := q.Err()
	if t, remote := wc.Terminate(); t != nil && cause == nil {
		cause = terminateError(t, remote, nil)
	}
	return &WCError{Status: wc.Status, Op: wc.Op, Cause: cause}
}

// peerDepth returns a depth of the peer, or -1 if the peer did not send it.
func peerDepth(n *uint32) int {
	if n == nil {
		return -1
	}
	return int(*n)
}

// established handles an Established event.
func (q *QP) established(e *ctrlpb.Established) {
	n := e.GetNegotiated()
	info := &ConnInfo{
		PrivateData: e.PrivateData, Revision: int(n.GetRevision()), IRD: int(n.GetIrd()), ORD: int(n.GetOrd()), CRC: n.GetCrc(),
		PeerIRD: peerDepth(e.PeerIrd), PeerORD: peerDepth(e.PeerOrd),
		SendMarkers: n.GetSendMarkers(), RecvMarkers: n.GetRecvMarkers(), PeerToPeer: n.GetP2P(), Initiator: n.GetInitiator(), Worker: int(e.Worker),
	}
	info.Local, _ = netip.ParseAddrPort(e.Local)
	info.Remote, _ = netip.ParseAddrPort(e.Remote)
	q.mu.Lock()
	if q.private != nil {
		info.PrivateData = q.private
	}
	q.info = info
	stream := q.stream
	q.mu.Unlock()
	if stream != nil {
		stream.over(ErrState)
	}
	q.smu.Lock()
	q.worker.Store(int32(e.Worker))
	if q.sq != nil { // sends posted earlier did not ring a bell
		q.d.ring(int32(e.Worker), q.bit)
	}
	q.smu.Unlock()
	q.settle(nil)
}

func (q *QP) settle(err error) {
	select {
	case q.outcome <- err:
	default:
	}
}

// terminated stores a Terminate, which a Disconnected event will follow.
func (q *QP) terminated(e *ctrlpb.Terminated) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.term == nil {
		q.term = terminateError(&term.Error{Layer: uint8(e.Layer), Type: uint8(e.Type), Code: uint8(e.Code)}, e.Remote, e.Headers)
	}
}

// setup returns what the QP is doing while it has no connection yet, for errors.
func (q *QP) setup() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stream != nil {
		return q.stream.op
	}
	return "connect"
}

// over ends the connection with err, or nil after an orderly close.
func (q *QP) over(err error) {
	q.mu.Lock()
	if q.err != nil {
		q.mu.Unlock()
		return
	}
	switch {
	case q.term != nil:
		q.err = q.term
	case q.async != nil:
		q.err = q.async
	case q.leaving && !errors.Is(err, ErrDaemonGone):
		q.err = ErrClosed
	case err != nil:
		q.err = err
	default:
		q.err = ErrPeerClosed
	}
	err = q.err
	stream := q.stream
	q.mu.Unlock()
	if stream != nil {
		stream.over(err)
		q.d.withdraw(stream.h)
	}

	// From here on nothing can be posted. The daemon has already flushed the queues of a connection that was
	// established. It must do so again for requests posted after that, and for those of a QP that was not connected.
	q.smu.Lock()
	q.rmu.Lock()
	q.ended.Store(true)
	left := q.sq != nil && q.sq.Space() < q.sq.Depth() || q.rq != nil && q.rq.Space() < q.rq.Depth()
	q.rmu.Unlock()
	q.smu.Unlock()
	if left && q.d.Err() == nil {
		q.abortLater()
	}
	q.settle(err)
	close(q.done)
}

// Close destroys the QP and resets its connection, if there is one. Outstanding work
// requests do not complete.
func (q *QP) Close() error {
	q.closing.Store(true)
	err := q.d.do(context.Background(), "close QP", &ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: q.num}}})
	if err != nil && q.d.Err() == nil {
		q.closing.Store(false)
		return err
	}
	q.unmap() // before Device.Close, which unmaps the doorbells, can miss it
	q.d.mu.Lock()
	delete(q.d.qps, q.num)
	q.d.mu.Unlock()
	q.leave()
	q.over(nil)
	return err
}

func (q *QP) unmap() {
	q.smu.Lock()
	if q.sq != nil {
		q.sq.Close()
		q.sq = nil
	}
	q.smu.Unlock()
	q.rmu.Lock()
	if q.rq != nil {
		q.rq.Close()
		q.rq = nil
	}
	q.rmu.Unlock()
}

// event passes an event to its object.
func (d *Device) event(ev *ctrlpb.Event) {
	qp := func(num uint32) *QP {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.qps[num]
	}
	switch b := ev.Body.(type) {
	case *ctrlpb.Event_ConnectRequest:
		d.connectRequest(b.ConnectRequest)
	case *ctrlpb.Event_ConnectGone:
		d.connectGone(b.ConnectGone)
	case *ctrlpb.Event_StreamReady:
		d.streamReady(b.StreamReady)
	case *ctrlpb.Event_StreamData:
		d.mu.Lock()
		s := d.streams[b.StreamData.Conn]
		d.mu.Unlock()
		if s != nil {
			s.data(b.StreamData)
		}
	case *ctrlpb.Event_Established:
		if q := qp(b.Established.Qp); q != nil {
			q.established(b.Established)
		}
	case *ctrlpb.Event_Rejected:
		if q := qp(b.Rejected.Qp); q != nil {
			q.over(&RejectError{b.Rejected.PrivateData, peerDepth(b.Rejected.PeerIrd), peerDepth(b.Rejected.PeerOrd)})
		}
	case *ctrlpb.Event_ConnectFailed:
		if q := qp(b.ConnectFailed.Qp); q != nil {
			q.over(fromPB(q.setup(), b.ConnectFailed.Error))
		}
	case *ctrlpb.Event_Disconnected:
		if q := qp(b.Disconnected.Qp); q != nil {
			q.over(fromPB("connection", b.Disconnected.Error))
		}
	case *ctrlpb.Event_Terminated:
		if q := qp(b.Terminated.Qp); q != nil {
			q.terminated(b.Terminated)
		}
	case *ctrlpb.Event_AsyncError:
		d.asyncError(b.AsyncError)
	case *ctrlpb.Event_Draining:
		d.draining(b.Draining)
	case *ctrlpb.Event_CutOff:
		d.fail(fmt.Errorf("%w: it cut this client off: %s", ErrDaemonGone, b.CutOff.GetError().GetText()))
	}
}
