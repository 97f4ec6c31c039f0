package perf

import (
	"context"
	"errors"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// extra is the number of queue entries in addition to the measured operations: for the final Read,
// credits, and unsignaled operations.
const extra = 64

// endpoint is the queue pair of one side and its memory.
type endpoint struct {
	pd *iwarp.PD
	cq *iwarp.CQ
	qp *iwarp.QP
	mr *iwarp.MR

	posted int // send work requests
	wcs    [64]iwarp.WC
	sge    [1]iwarp.SGE
	wr     iwarp.SendWR
}

// open creates the queue pair and the memory for p: a window of p.Size bytes, followed by credits.
func open(ctx context.Context, dev *iwarp.Device, p *Params) (e *endpoint, err error) {
	e = &endpoint{}
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	if e.pd, err = dev.AllocPD(ctx); err != nil {
		return e, err
	}
	depth := p.Depth + extra
	if e.cq, err = dev.CreateCQ(ctx, 2*depth); err != nil {
		return e, err
	}
	e.qp, err = dev.CreateQP(ctx, iwarp.QPConfig{PD: e.pd, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: depth, RecvDepth: depth, MaxSGE: 1})
	if err != nil {
		return e, err
	}
	e.mr, err = e.pd.Alloc(ctx, p.Size+creditLen, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
	return e, err
}

func (e *endpoint) close() {
	if e.qp != nil {
		e.qp.Close()
	}
	if e.mr != nil {
		e.mr.Close()
	}
	if e.cq != nil {
		e.cq.Close()
	}
	if e.pd != nil {
		e.pd.Close()
	}
}

func (e *endpoint) window() window {
	return window{e.mr.Base(), e.mr.RKey()}
}

// post posts one operation on the bytes [off,off+n) of the window; to is the
// other side's window for Writes and Reads.
func (e *endpoint) post(op Op, off, n int, to window, signaled bool) error {
	e.wr = iwarp.SendWR{Op: wireOps[op], RKey: to.rkey, Remote: to.addr}
	if n > 0 {
		e.sge[0] = e.mr.SGE(off, n)
		e.wr.SGEs = e.sge[:]
	}
	if signaled {
		e.wr.Flags |= iwarp.Signaled
	}
	if err := e.qp.PostSend(&e.wr); err != nil {
		return err
	}
	e.posted++
	return nil
}

var wireOps = [...]iwarp.Op{Write: iwarp.OpWrite, Read: iwarp.OpRead, Send: iwarp.OpSend}

// often reports whether to signal the next operation, so that unsignaled ones cannot fill the
// queue.
func (e *endpoint) often() bool { return (e.posted+1)%(extra/4) == 0 }

// postRecv posts a receive into the bytes [off,off+n) of the window.
func (e *endpoint) postRecv(off, n int) error {
	var wr iwarp.RecvWR
	if n > 0 {
		wr.SGEs = []iwarp.SGE{e.mr.SGE(off, n)}
	}
	return e.qp.PostRecv(&wr)
}

// wait returns the next completions. It returns an error if one of them failed.
func (e *endpoint) wait(ctx context.Context) ([]iwarp.WC, error) {
	n, err := e.cq.Wait(ctx, e.wcs[:])
	if err != nil {
		return nil, err
	}
	for i := range e.wcs[:n] {
		if err := e.qp.WCErr(ctx, &e.wcs[i]); err != nil {
			return nil, err
		}
	}
	return e.wcs[:n], nil
}

// waitRecv waits for the next message.
func (e *endpoint) waitRecv(ctx context.Context) error {
	for {
		wcs, err := e.wait(ctx)
		if err != nil {
			return err
		}
		for i := range wcs {
			if wcs[i].IsRecv() {
				return nil
			}
		}
	}
}

// ended reports whether err only means that the other side disconnected.
func ended(err error) bool {
	return errors.Is(err, iwarp.ErrPeerClosed) || errors.Is(err, iwarp.ErrClosed)
}
