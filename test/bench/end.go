package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/internal/spin"
)

// open returns the device of the job: a daemon's, or one in this process.
func open(ctx context.Context, j job) (*iwarp.Device, func(), error) {
	if j.Socket != "" {
		d, err := iwarp.Open(ctx, j.Socket)
		return d, func() { d.Close() }, err
	}
	// A worker whose application sleeps spins on a CPU of its own, as the peers' programs do.
	// IWARPD_LINK is read here, since only the daemon reads it by itself.
	kind, err := ifqueue.ParseKind(cmp.Or(os.Getenv("IWARPD_LINK"), "auto"))
	if err != nil {
		return nil, nil, fmt.Errorf("IWARPD_LINK: %w", err)
	}
	n, err := embed.Open(embed.Config{Interface: j.If, LinkKind: kind, InlineProgress: j.Inline, Poll: dataplane.Busy})
	if err != nil {
		return nil, nil, err
	}
	return n.Device(), func() { n.Close() }, nil
}

// offer is the private data of the server's reply: the region that the client may access.
type offer struct {
	Addr uint64
	RKey uint32
}

func (o offer) encode() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, o.Addr), o.RKey)
}

func decodeOffer(b []byte) (offer, error) {
	if len(b) < 12 {
		return offer{}, fmt.Errorf("the server's private data has %d bytes", len(b))
	}
	return offer{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}, nil
}

// An end is the queue pair of one side with its memory.
type end struct {
	pd *iwarp.PD
	cq *iwarp.CQ
	qp *iwarp.QP
	mr *iwarp.MR

	shared bool // the engine is in another process on this CPU, so yield it
	spins  int
	wcs    [128]iwarp.WC
	sge    [1]iwarp.SGE
	wr     iwarp.SendWR
	rr     iwarp.RecvWR
	spread bool // each outstanding operation uses its own part of the regions
	posts  int
}

func newEnd(ctx context.Context, d *iwarp.Device, shared bool) (e *end, err error) {
	e = &end{shared: shared}
	if e.pd, err = d.AllocPD(ctx); err != nil {
		return nil, err
	}
	if e.cq, err = d.CreateCQ(ctx, 2*writeDepth); err != nil {
		return nil, err
	}
	if e.mr, err = e.pd.Alloc(ctx, regionSize, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite); err != nil {
		return nil, err
	}
	e.qp, err = d.CreateQP(ctx, iwarp.QPConfig{PD: e.pd, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: writeDepth, RecvDepth: 64, MaxSGE: 1, MaxInline: 64})
	return e, err
}

func (e *end) close() error {
	return errors.Join(e.qp.Close(), e.cq.Close(), e.mr.Close(), e.pd.Close())
}

// poll spins until there are completions, and returns them. It fails if one of them has failed.
func (e *end) poll() ([]iwarp.WC, error) {
	for {
		if n := e.cq.Poll(e.wcs[:]); n > 0 {
			return e.good(n)
		}
		if e.shared {
			spin.Yield()
		}
		if e.spins++; e.spins%4096 == 0 {
			select {
			case <-e.qp.Done():
				return nil, e.over()
			default:
			}
		}
	}
}

// wait is poll that yields the CPU to an engine that shares it.
func (e *end) wait() ([]iwarp.WC, error) {
	if !e.shared {
		return e.poll()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	n, err := e.cq.Wait(ctx, e.wcs[:])
	if err != nil {
		return nil, err
	}
	return e.good(n)
}

func (e *end) good(n int) ([]iwarp.WC, error) {
	for i := range e.wcs[:n] {
		if wc := &e.wcs[i]; wc.Status != iwarp.WCSuccess {
			return nil, e.failed(wc)
		}
	}
	return e.wcs[:n], nil
}

// failed returns the error of a failed completion. A flushed one gets the reason why the
// connection ended.
func (e *end) failed(wc *iwarp.WC) error {
	if wc.Status == iwarp.WCFlushErr {
		select {
		case <-e.qp.Done():
			return e.over()
		case <-time.After(5 * time.Second):
		}
	}
	return fmt.Errorf("%v: %v", wc.Op, wc.Status)
}

func (e *end) over() error {
	if err := e.qp.Err(); err != nil {
		return err
	}
	return iwarp.ErrPeerClosed
}

// post posts op on n bytes of both regions: the first n, or the next n if the operations
// spread.
func (e *end) post(op iwarp.Op, n int, to offer, flags iwarp.SendFlags) error {
	at := 0
	if e.spread {
		at = e.posts % spreadDepth * n
	}
	e.wr = iwarp.SendWR{Op: op, Flags: flags, RKey: to.RKey, Remote: to.Addr + uint64(at)}
	if flags&iwarp.Inline != 0 {
		e.wr.Inline = e.mr.Bytes()[:n]
	} else {
		e.sge[0] = e.mr.SGE(at, n)
		e.wr.SGEs = e.sge[:]
	}
	err := e.qp.PostSend(&e.wr)
	if err == nil {
		e.posts++
	}
	return err
}

// recvOffset is the offset of received messages, so that they do not overlap those that are
// sent.
const recvOffset = 4096

func (e *end) postRecv(n int) error {
	e.sge[0] = e.mr.SGE(recvOffset, n)
	e.rr = iwarp.RecvWR{SGEs: e.sge[:]}
	return e.qp.PostRecv(&e.rr)
}

// written spins until the peer's Write of size bytes with the last four equal to n has arrived.
// Like perftest, it reads the memory. Unlike perftest, it yields the CPU to an engine that shares it.
func (e *end) written(n uint32, size int) error {
	word := (*uint32)(unsafe.Pointer(&e.mr.Bytes()[recvOffset+size-4]))
	for spins := 1; atomic.LoadUint32(word) != n; spins++ {
		if e.shared {
			spin.Yield()
		}
		if spins%4096 == 0 {
			select {
			case <-e.qp.Done():
				return e.over()
			default:
			}
		}
	}
	return nil
}

// write writes size bytes to the peer's memory. The last four are n.
func (e *end) write(n uint32, size int, to offer) error {
	binary.NativeEndian.PutUint32(e.mr.Bytes()[size-4:], n)
	for k := e.cq.Poll(e.wcs[:]); k > 0; k = e.cq.Poll(e.wcs[:]) {
		if _, err := e.good(k); err != nil {
			return err
		}
	}
	to.Addr += recvOffset
	flags := iwarp.Inline
	if n%signalEach == 0 {
		flags |= iwarp.Signaled
	}
	return e.post(iwarp.OpWrite, size, to, flags)
}

// send sends a message. Some of them are signaled, so that the queue never fills.
func (e *end) send(size int, n *int) error {
	flags := iwarp.SendFlags(0)
	if size <= 64 {
		flags = iwarp.Inline
	}
	if *n++; *n%signalEach == 0 {
		flags |= iwarp.Signaled
	}
	return e.post(iwarp.OpSend, size, offer{}, flags)
}
