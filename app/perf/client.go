package perf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// creditLen is the length of a credit: the number of messages received so far, as be64.
const creditLen = 8

// closeWait is how long to wait for the other side to close the connection.
const closeWait = time.Second

// Client runs a measurement against the server at addr. cfg may be nil.
func Client(ctx context.Context, dev *iwarp.Device, addr string, p Params, cfg *iwarp.Config) (*Result, error) {
	if p.Mode == Latency {
		p.Depth = 1
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var lanes []*lane
	defer func() {
		for _, l := range lanes {
			l.e.close()
		}
	}()
	for range max(p.QPs, 1) {
		plans := []Params{p}
		if p.Bidirectional {
			plans = append(plans, p.opposite())
		}
		for _, plan := range plans {
			l, err := plan.connect(ctx, dev, addr, cfg)
			if err != nil {
				return nil, err
			}
			lanes = append(lanes, l)
		}
	}
	var wg sync.WaitGroup
	began := time.Now()
	for _, l := range lanes {
		wg.Go(func() {
			if l.result, l.err = l.p.run(ctx, l.e, l.far); l.err != nil {
				cancel() // the others would measure something else
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	var errs []error
	for _, l := range lanes {
		if l.err == nil {
			l.err = l.e.leave(ctx)
		}
		if l.err != nil && !errors.Is(l.err, context.Canceled) {
			errs = append(errs, l.err)
		}
	}
	switch {
	case len(errs) > 0:
		return nil, errs[0]
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case len(lanes) == 1:
		return lanes[0].result, nil
	}
	return p.sum(lanes, took), nil
}

// lane is a queue pair of a client.
type lane struct {
	p      Params
	e      *endpoint
	far    window
	result *Result
	err    error
}

// connect creates a lane.
func (p *Params) connect(ctx context.Context, dev *iwarp.Device, addr string, cfg *iwarp.Config) (l *lane, err error) {
	e, err := open(ctx, dev, p)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	// Incoming messages: credits, or the replies of a ping-pong.
	for range p.clientReceives() {
		if err := e.postRecv(p.clientRecv()); err != nil {
			return nil, err
		}
	}
	var c iwarp.Config
	if cfg != nil {
		c = *cfg
	}
	c.PrivateData = appendRequest(p, e.window())
	info, err := e.qp.Connect(ctx, addr, &c)
	if err != nil {
		return nil, refused(err)
	}
	far, err := decodeReply(info.PrivateData)
	if err != nil {
		return nil, err
	}
	return &lane{p: *p, e: e, far: far}, nil
}

// leave closes the connection gracefully; closing the queue pair at once would reset it.
func (e *endpoint) leave(ctx context.Context) error {
	if err := e.qp.Disconnect(ctx); err != nil {
		return err
	}
	select {
	case <-e.qp.Done():
	case <-time.After(closeWait):
	case <-ctx.Done():
	}
	return nil
}

// refused returns the server's own error text, if there is one.
func refused(err error) error {
	r, ok := errors.AsType[*iwarp.RejectError](err)
	if !ok {
		return err
	}
	text, e := checkHead(r.PrivateData)
	if e != nil {
		return fmt.Errorf("%w: %w", err, e)
	}
	return fmt.Errorf("%w: it says: %s", err, printable.String(string(text)))
}

func (p *Params) clientReceives() int {
	switch {
	case p.Op == Send && p.Mode == Bandwidth:
		return extra // credits
	case p.Op != Read && p.Mode == Latency:
		return 2
	}
	return 0
}

// clientRecv returns where the client receives messages.
func (p *Params) clientRecv() (off, n int) {
	if p.Mode == Bandwidth {
		return p.Size, creditLen
	}
	return p.pongRecv()
}

// pongRecv returns where both sides receive the messages of a ping-pong.
func (p *Params) pongRecv() (off, n int) {
	if p.Op == Write {
		return 0, 0 // the Send after a Write is empty
	}
	return 0, p.Size
}

func (p *Params) run(ctx context.Context, e *endpoint, far window) (*Result, error) {
	switch {
	case p.Mode == Latency:
		return p.latency(ctx, e, far)
	case p.Op == Send:
		return p.sendBandwidth(ctx, e)
	}
	return p.bandwidth(ctx, e, far)
}

// due reports whether operation n is to be started.
func (p *Params) due(n int, began time.Time) bool {
	if p.Count > 0 && n >= p.Count {
		return false
	}
	return p.Duration == 0 || time.Since(began) < p.Duration
}

// latency measures single operations.
func (p *Params) latency(ctx context.Context, e *endpoint, far window) (*Result, error) {
	h := NewHistogram()
	began := time.Now()
	n := 0
	for ; p.due(n, began); n++ {
		start := time.Now()
		if p.Op == Read {
			if err := e.post(Read, 0, p.Size, far, true); err != nil {
				return nil, err
			}
			if _, err := e.wait(ctx); err != nil {
				return nil, err
			}
		} else {
			if err := p.ping(e, far); err != nil {
				return nil, err
			}
			if err := e.waitRecv(ctx); err != nil {
				return nil, err
			}
		}
		h.Add(time.Since(start))
		p.count(1)
		if p.Op != Read {
			if err := e.postRecv(p.pongRecv()); err != nil {
				return nil, err
			}
		}
	}
	return p.result(int64(n), time.Since(began), h), nil
}

// ping sends one message of a ping-pong, from either side.
func (p *Params) ping(e *endpoint, far window) error {
	if p.Op == Send {
		return e.post(Send, 0, p.Size, window{}, e.often())
	}
	if err := e.post(Write, 0, p.Size, far, false); err != nil {
		return err
	}
	return e.post(Send, 0, 0, window{}, e.often())
}

// bandwidth keeps Depth Writes or Reads outstanding. The measured time ends with a Read after the
// last of them, which proves that all data has been placed.
func (p *Params) bandwidth(ctx context.Context, e *endpoint, far window) (*Result, error) {
	const end = 1 << 63
	every := max(1, p.Depth/4) // operations per completion
	began := time.Now()
	done, posted := 0, 0
	for p.due(posted, began) {
		for posted-done < p.Depth && (p.Count == 0 || posted < p.Count) {
			if err := e.post(p.Op, 0, p.Size, far, (posted+1)%every == 0); err != nil {
				return nil, err
			}
			posted++
		}
		if posted-done < p.Depth {
			break // Count is reached
		}
		wcs, err := e.wait(ctx)
		if err != nil {
			return nil, err
		}
		done += len(wcs) * every
		p.count(len(wcs) * every)
	}
	e.wr = iwarp.SendWR{ID: end, Op: iwarp.OpRead, Flags: iwarp.Signaled, RKey: far.rkey, Remote: far.addr, SGEs: e.sge[:]}
	e.sge[0] = e.mr.SGE(p.Size, 1)
	if err := e.qp.PostSend(&e.wr); err != nil {
		return nil, err
	}
	for {
		wcs, err := e.wait(ctx)
		if err != nil {
			return nil, err
		}
		if wcs[len(wcs)-1].ID == end {
			return p.result(int64(posted), time.Since(began), nil), nil
		}
	}
}

// sendBandwidth keeps Depth Sends outstanding; the server returns credits when it has reposted its
// receives. An empty Send requests the last credit.
func (p *Params) sendBandwidth(ctx context.Context, e *endpoint) (*Result, error) {
	began := time.Now()
	posted, credit := 0, 0
	for asked := false; ; {
		for posted-credit < p.Depth && p.due(posted, began) {
			if err := e.post(Send, 0, p.Size, window{}, e.often()); err != nil {
				return nil, err
			}
			posted++
		}
		if !asked && !p.due(posted, began) {
			if err := e.post(Send, 0, 0, window{}, true); err != nil {
				return nil, err
			}
			asked = true
		}
		if asked && credit == posted+1 { // includes the empty one
			return p.result(int64(posted), time.Since(began), nil), nil
		}
		wcs, err := e.wait(ctx)
		if err != nil {
			return nil, err
		}
		for i := range wcs {
			if !wcs[i].IsRecv() {
				continue
			}
			// All credits are received into the same buffer; only the latest matters.
			n := binary.BigEndian.Uint64(e.mr.Bytes()[p.Size:])
			if n < uint64(credit) || n > uint64(posted)+1 {
				return nil, fmt.Errorf("credit for %d messages of %d sent", n, posted)
			}
			p.count(int(n) - credit)
			credit = int(n)
			if err := e.postRecv(p.Size, creditLen); err != nil {
				return nil, err
			}
		}
	}
}
