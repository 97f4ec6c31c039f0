package iwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// Stream is a connection before MPA: the two programs exchange bytes, for example to agree on
// parameters, and then both start MPA (RFC 5044 section 7.1.3). ConnectStream and AcceptStream
// return Streams. Bytes that a program has not read when it starts MPA are treated as MPA's. A
// program must therefore read everything that its peer sends before MPA, and must not send more
// after it has asked the peer to start.
//
// One program starts MPA as the initiator and the other as the responder. The roles do not
// depend on which side opened the TCP connection, but the programs must agree on them. If both
// are initiators, both fail with ErrProtocol; if both are responders, with ErrTimeout.
type Stream struct {
	Local, Remote netip.AddrPort

	d  *Device
	h  uint32
	q  *QP       // set by ConnectStream
	l  *Listener // set by AcceptStream
	op string

	request chan *ConnRequest
	reading chan struct{} // token of the goroutine in Read
	writing chan struct{} // token of the goroutine in Write

	asking sync.Mutex // held by Request
	asked  bool       // Request has started MPA, and has not returned the request; guarded by asking

	mu   sync.Mutex // guards the rest
	buf  []byte     // received from the daemon, not yet read
	end  bool       // the peer sends nothing after buf
	err  error      // why the stream ended
	mpa  bool       // MPA was started; it gets the rest of buf
	more chan struct{}
}

// streamReady handles a StreamReady event.
func (d *Device) streamReady(e *ctrlpb.StreamReady) {
	s := &Stream{
		d: d, h: e.Conn, more: make(chan struct{}, 1), request: make(chan *ConnRequest, 1),
		reading: make(chan struct{}, 1), writing: make(chan struct{}, 1),
	}
	s.Local, _ = netip.ParseAddrPort(e.Local)
	s.Remote, _ = netip.ParseAddrPort(e.Remote)
	d.mu.Lock()
	d.streams[s.h] = s
	if e.Qp != 0 {
		q := d.qps[e.Qp]
		d.mu.Unlock()
		if q != nil {
			s.q, s.op = q, fmt.Sprintf("stream to %v", s.Remote)
			q.mu.Lock()
			q.stream = s
			q.mu.Unlock()
			q.settle(nil)
		}
		return
	}
	defer d.mu.Unlock()
	s.op = fmt.Sprintf("stream from %v", s.Remote)
	if l := d.listens[e.Listen]; l != nil {
		l.pushStream(s)
	} else if d.opening > 0 {
		d.earlyStreams = append(d.earlyStreams, earlyStream{e.Listen, s})
	}
}

// earlyStream is a stream that arrived before the reply to Listen.
type earlyStream struct {
	listen uint32
	s      *Stream
}

// pushStream queues a stream for AcceptStream. Called with d.mu held.
func (l *Listener) pushStream(s *Stream) {
	s.l = l
	l.mu.Lock()
	l.streams = append(l.streams, s)
	l.mu.Unlock()
	signal(l.more)
}

// ConnectStream opens a TCP connection for the QP and returns it as a Stream. cfg is as for
// Connect, without private data.
func (q *QP) ConnectStream(ctx context.Context, remote string, cfg *Config) (*Stream, error) {
	if err := q.connect(ctx, remote, cfg, true); err != nil {
		return nil, err
	}
	if _, err := q.await(ctx, "connect to "+remote); err != nil {
		return nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.stream, nil
}

// AcceptStream waits for the next connection of a Listener whose Config has Streaming set.
func (l *Listener) AcceptStream(ctx context.Context) (*Stream, error) {
	return next(ctx, l, &l.streams)
}

// data handles a StreamData event.
func (s *Stream) data(e *ctrlpb.StreamData) {
	s.mu.Lock()
	s.buf = append(s.buf, e.Data...)
	s.end = s.end || e.End
	s.mu.Unlock()
	signal(s.more)
}

// over ends the stream.
func (s *Stream) over(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.d.mu.Lock()
	delete(s.d.streams, s.h)
	s.d.mu.Unlock()
	signal(s.more)
}

// take takes the token of Read or Write.
func (s *Stream) take(ctx context.Context, token chan struct{}) error {
	select {
	case token <- struct{}{}: // even if ctx has ended
		return nil
	default:
	}
	select {
	case token <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("iwarp: %s: %w", s.op, ctx.Err())
	}
}

// Read reads up to len(b) bytes and waits for at least one. It returns io.EOF after the peer's last
// byte. Bytes that have arrived are returned even if ctx has ended.
func (s *Stream) Read(ctx context.Context, b []byte) (int, error) {
	if err := s.take(ctx, s.reading); err != nil {
		return 0, err
	}
	defer func() { <-s.reading }()
	for {
		s.mu.Lock()
		if s.mpa {
			s.mu.Unlock()
			return 0, fmt.Errorf("%w: %s: MPA was started", ErrState, s.op)
		}
		n := copy(b, s.buf)
		s.buf = s.buf[n:]
		end, err := s.end && len(s.buf) == 0, s.err
		s.mu.Unlock()
		switch {
		case n > 0:
			// Without this request the daemon sends no more, so ctx must not cancel it.
			err := s.d.do(context.WithoutCancel(ctx), s.op, &ctrlpb.Request{Body: &ctrlpb.Request_StreamConsumed{StreamConsumed: &ctrlpb.StreamConsumed{Conn: s.h, Count: uint32(n)}}})
			if errors.Is(err, ErrNoObject) { // the connection ended after these bytes
				err = nil
			}
			return n, err
		case len(b) == 0:
			return 0, nil
		case end:
			return 0, io.EOF
		case err != nil:
			return 0, err
		}
		select {
		case <-s.more:
		case <-s.d.done:
			return 0, s.d.Err()
		case <-ctx.Done():
			return 0, fmt.Errorf("iwarp: %s: %w", s.op, ctx.Err())
		}
	}
}

// ReadFull reads len(b) bytes. It returns io.ErrUnexpectedEOF if the peer sends fewer.
func (s *Stream) ReadFull(ctx context.Context, b []byte) error {
	for got := 0; got < len(b); {
		n, err := s.Read(ctx, b[got:])
		if got += n; err != nil && got < len(b) {
			if errors.Is(err, io.EOF) && got > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// Write sends b. It returns when the daemon has accepted all of it. Calls of several goroutines are
// sent one after the other.
func (s *Stream) Write(ctx context.Context, b []byte) error {
	const chunk = 32 << 10
	if err := s.take(ctx, s.writing); err != nil {
		return err
	}
	defer func() { <-s.writing }()
	for len(b) > 0 {
		n := min(len(b), chunk)
		err := s.d.do(ctx, s.op, &ctrlpb.Request{Body: &ctrlpb.Request_StreamSend{StreamSend: &ctrlpb.StreamSend{Conn: s.h, Data: b[:n]}}})
		if errors.Is(err, ErrBusy) { // the peer reads slowly
			select {
			case <-time.After(time.Millisecond):
				continue
			case <-ctx.Done():
				return fmt.Errorf("iwarp: %s: %w", s.op, ctx.Err())
			}
		}
		if err != nil {
			return s.why(err)
		}
		b = b[n:]
	}
	return nil
}

// why returns the reason for the stream's end if it has ended, or err.
func (s *Stream) why(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil && errors.Is(err, ErrNoObject) {
		return s.err
	}
	return err
}

// StartMPA starts MPA as the initiator on a Stream of ConnectStream, and returns when work requests
// can be posted. It uses only PrivateData of cfg.
func (s *Stream) StartMPA(ctx context.Context, cfg *Config) (*ConnInfo, error) {
	if s.l != nil {
		return nil, &Error{s.op, ctrlpb.Code_CODE_INVALID, "the side that accepted has no queue pair yet: use Initiate, or Request to be the responder"}
	}
	return s.Initiate(ctx, nil, cfg)
}

// Initiate is StartMPA for either kind of Stream. A Stream of AcceptStream needs q; one of
// ConnectStream has a QP already, so q must be nil.
func (s *Stream) Initiate(ctx context.Context, q *QP, cfg *Config) (*ConnInfo, error) {
	switch {
	case s.l == nil && q != nil && q != s.q:
		return nil, &Error{s.op, ctrlpb.Code_CODE_INVALID, "the stream has the queue pair that it was connected with"}
	case s.l == nil:
		q = s.q
	case q == nil:
		return nil, &Error{s.op, ctrlpb.Code_CODE_INVALID, "the side that accepted has no queue pair yet: pass one"}
	}
	// Events of the connection may arrive before the reply.
	q.mu.Lock()
	was := q.stream
	q.stream = s
	q.mu.Unlock()
	err := s.start(ctx, &ctrlpb.StartMPA{Role: ctrlpb.MPARole_MPA_ROLE_INITIATOR, PrivateData: cfg.orDefault().PrivateData, Qp: q.num})
	if err != nil {
		q.mu.Lock()
		q.stream = was
		q.mu.Unlock()
		return nil, err
	}
	return q.await(ctx, s.op)
}

// Request starts MPA as the responder and waits for the initiator's request, which the caller must
// accept or reject. For a Stream of ConnectStream, accept with nil or the stream's QP; rejecting
// ends that QP's connection. If ctx ends the wait, Request may be called again.
func (s *Stream) Request(ctx context.Context) (*ConnRequest, error) {
	if !s.asking.TryLock() {
		return nil, &Error{s.op, ctrlpb.Code_CODE_BUSY, "another Request is waiting: end it first"}
	}
	defer s.asking.Unlock()
	if !s.asked {
		if err := s.start(ctx, &ctrlpb.StartMPA{Role: ctrlpb.MPARole_MPA_ROLE_RESPONDER}); err != nil {
			return nil, err
		}
	}
	r, err := s.awaitRequest(ctx)
	s.asked = err != nil
	return r, err
}

func (s *Stream) awaitRequest(ctx context.Context) (*ConnRequest, error) {
	for {
		select {
		case r := <-s.request:
			return r, nil
		default:
		}
		s.mu.Lock()
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case r := <-s.request:
			return r, nil
		case <-s.more:
		case <-s.d.done:
			return nil, s.d.Err()
		case <-ctx.Done():
			return nil, fmt.Errorf("iwarp: %s: %w", s.op, ctx.Err())
		}
	}
}

// start starts MPA. ctx can cancel it only before the request is sent.
func (s *Stream) start(ctx context.Context, m *ctrlpb.StartMPA) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("iwarp: %s: %w", s.op, err)
	}
	select {
	case s.reading <- struct{}{}:
		defer func() { <-s.reading }()
	default:
		return &Error{s.op, ctrlpb.Code_CODE_BUSY, "a Read is waiting and would take the bytes meant for MPA: end it first"}
	}
	m.Conn = s.h
	err := s.d.do(context.WithoutCancel(ctx), s.op, &ctrlpb.Request{Body: &ctrlpb.Request_StartMpa{StartMpa: m}})
	if err != nil {
		return s.why(err)
	}
	s.mu.Lock()
	s.mpa = true
	s.mu.Unlock()
	return nil
}

// Close closes the connection without starting MPA. Data already written is sent.
func (s *Stream) Close() error { return s.close(false) }

// Abort resets the connection.
func (s *Stream) Abort() error { return s.close(true) }

func (s *Stream) close(abort bool) error {
	s.mu.Lock()
	leaves := s.q != nil && !s.mpa // otherwise the daemon refuses the request
	s.mu.Unlock()
	if leaves {
		s.q.leave()
	}
	err := s.d.do(context.Background(), s.op, &ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: s.h, Abort: abort}}})
	s.over(ErrClosed)
	if errors.Is(err, ErrNoObject) { // already ended
		return nil
	}
	return err
}
