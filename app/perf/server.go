package perf

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// Serve serves the clients of l until ctx is done or l is closed, and then returns nil. tell, if
// not nil, is called for each client that was served or refused, possibly concurrently.
func Serve(ctx context.Context, dev *iwarp.Device, l *iwarp.Listener, tell func(peer netip.AddrPort, err error)) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		req, err := l.Request(ctx)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, iwarp.ErrClosed) {
				return nil
			}
			return err
		}
		wg.Go(func() {
			err := serveOne(ctx, dev, req)
			if tell != nil {
				tell(req.Remote, err)
			}
		})
	}
}

func serveOne(ctx context.Context, dev *iwarp.Device, req *iwarp.ConnRequest) error {
	p, far, err := decodeRequest(req.PrivateData())
	if err != nil {
		return errors.Join(err, req.Reject(ctx, appendRefusal(err.Error())))
	}
	e, err := open(ctx, dev, &p)
	if err != nil {
		return errors.Join(err, req.Reject(ctx, appendRefusal(err.Error())))
	}
	defer e.close()
	for range p.serverReceives() {
		if err := e.postRecv(p.pongRecv()); err != nil {
			return errors.Join(err, req.Reject(ctx, appendRefusal(err.Error())))
		}
	}
	if _, err := req.Accept(ctx, e.qp, &iwarp.Config{PrivateData: appendReply(e.window())}); err != nil {
		return err
	}
	alive, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-e.qp.Done():
			cancel()
		case <-alive.Done():
		}
	}()
	err = p.answer(alive, e, far)
	if ctx.Err() == nil && (alive.Err() != nil || ended(err)) {
		if err = e.qp.Err(); ended(err) {
			err = nil
		}
	}
	return err
}

func (p *Params) serverReceives() int {
	switch {
	case p.Op == Send && p.Mode == Bandwidth:
		return p.Depth + 2 // and the end mark
	case p.Op != Read && p.Mode == Latency:
		return 2
	}
	return 0
}

// answer performs the server's part until the client disconnects.
func (p *Params) answer(ctx context.Context, e *endpoint, far window) error {
	if p.Op == Read || p.Op == Write && p.Mode == Bandwidth {
		<-ctx.Done() // the daemon does everything
		return ctx.Err()
	}
	every := uint64(max(1, p.Depth/4))
	for received := uint64(0); ; {
		wcs, err := e.wait(ctx)
		if err != nil {
			return err
		}
		last := false
		for i := range wcs {
			if !wcs[i].IsRecv() {
				continue
			}
			if err := e.postRecv(p.pongRecv()); err != nil {
				return err
			}
			received++
			if p.Mode == Latency {
				if err := p.ping(e, far); err != nil {
					return err
				}
				continue
			}
			last = last || wcs[i].Len == 0
			if received%every == 0 || last {
				if err := e.credit(p, received); err != nil {
					return err
				}
			}
		}
	}
}

// credit sends the number of messages received. All credits use the same buffer: sending an old
// credit with a newer value does no harm.
func (e *endpoint) credit(p *Params, received uint64) error {
	binary.BigEndian.PutUint64(e.mr.Bytes()[p.Size:], received)
	return e.post(Send, p.Size, creditLen, window{}, e.often())
}
