package iwarp

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// SRQConfig sets the properties of an SRQ.
type SRQConfig struct {
	PD     *PD
	Depth  int // receives; default 64
	MaxSGE int // pieces in a receive; default 4
	Limit  int // see SetLimit
}

// SRQ is a shared receive queue. Messages of several QPs use its receives, in the order of
// posting. A receive completes on the CQ of the QP that used it.
type SRQ struct {
	d       *Device
	h       uint32
	closing atomic.Bool // Close has been called

	mu sync.Mutex
	rq *shm.RQProducer // nil: closed
}

// CreateSRQ creates a shared receive queue.
func (d *Device) CreateSRQ(ctx context.Context, cfg SRQConfig) (*SRQ, error) {
	if cfg.PD == nil || cfg.Depth < 0 || cfg.MaxSGE < 0 || cfg.Limit < 0 {
		return nil, &Error{"create SRQ", ctrlpb.Code_CODE_INVALID, "a shared receive queue needs a PD, and sizes that are not negative"}
	}
	cfg.Depth, cfg.MaxSGE = cmp.Or(cfg.Depth, defaultDepth), cmp.Or(cfg.MaxSGE, defaultSGE)
	a, err := d.call(ctx, "create SRQ", &ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{
		Pd: cfg.PD.h, Depth: size(cfg.Depth), MaxSge: size(cfg.MaxSGE), Limit: size(cfg.Limit),
	}}}, -1)
	if err != nil {
		return nil, err
	}
	defer seqpacket.CloseAll(a.fds)
	if len(a.fds) != 1 {
		return nil, fmt.Errorf("%w: create SRQ: %d descriptors", ErrInternal, len(a.fds))
	}
	rq, err := shm.MapRQ(a.fds[0])
	if err != nil {
		d.giveBack(a.reply)
		return nil, fmt.Errorf("iwarp: create SRQ: %w", err)
	}
	s := &SRQ{d: d, h: a.reply.GetSrq().GetSrq(), rq: rq}
	d.mu.Lock()
	err = d.err
	if err == nil {
		d.srqs[s.h] = s
	}
	d.mu.Unlock()
	if err != nil {
		s.unmap()
		return nil, fmt.Errorf("iwarp: create SRQ: %w", err)
	}
	return s, nil
}

// PostRecv posts a buffer for a message of any of the QPs.
func (s *SRQ) PostRecv(wr *RecvWR) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rq == nil {
		return ErrClosed
	}
	return postError(s.rq.Post(wr), &s.closing)
}

// SetLimit arms the limit event: AsyncSRQLimit occurs once, when a message leaves fewer than n
// receives. 0 disarms it.
func (s *SRQ) SetLimit(ctx context.Context, n int) error {
	return s.d.do(ctx, "set SRQ limit", &ctrlpb.Request{Body: &ctrlpb.Request_ModifySrq{ModifySrq: &ctrlpb.ModifySRQ{Srq: s.h, Limit: size(max(n, 0))}}})
}

// Close destroys the queue. It fails with ErrBusy while a QP uses it.
func (s *SRQ) Close() error {
	s.closing.Store(true)
	err := s.d.do(context.Background(), "close SRQ", &ctrlpb.Request{Body: &ctrlpb.Request_DestroySrq{DestroySrq: &ctrlpb.DestroySRQ{Srq: s.h}}})
	if err != nil && s.d.Err() == nil {
		s.closing.Store(false)
		return err
	}
	s.d.mu.Lock()
	delete(s.d.srqs, s.h)
	s.d.mu.Unlock()
	s.unmap()
	return err
}

func (s *SRQ) unmap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rq != nil {
		s.rq.Close()
		s.rq = nil
	}
}
