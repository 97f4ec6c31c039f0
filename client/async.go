package iwarp

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// AsyncKind is the kind of an asynchronous event.
type AsyncKind uint8

// Kinds of asynchronous events, named as in libibverbs.
const (
	AsyncCQOverrun AsyncKind = 1 + iota // CQ was full; the connection of QP has ended
	AsyncQPFatal                        // a violation ended the stream of QP: see its Err
	AsyncSRQLimit                       // SRQ has fewer receives than its limit; it is not armed any more
	// AsyncNegotiate reports that a peer over SCTPDraft, Remote, has sent a DDP Stream Session
	// Negotiate with PrivateData, to Listener or to the QP that is connecting. It needs no
	// answer.
	AsyncNegotiate
)

// String returns the name of the kind.
func (k AsyncKind) String() string {
	switch k {
	case AsyncCQOverrun:
		return "completion queue overrun"
	case AsyncQPFatal:
		return "queue pair fatal"
	case AsyncSRQLimit:
		return "shared receive queue limit"
	case AsyncNegotiate:
		return "DDP Stream Session Negotiate"
	}
	return fmt.Sprintf("asynchronous event %d", uint8(k))
}

// AsyncEvent is an event that does not belong to a work request. A field is nil if the event
// does not concern such an object, or if the object has been closed.
type AsyncEvent struct {
	Kind AsyncKind
	QP   *QP
	CQ   *CQ
	SRQ  *SRQ
	Err  error // what happened; nil for AsyncSRQLimit and AsyncNegotiate

	// Of AsyncNegotiate.
	Listener    *Listener
	Remote      netip.AddrPort
	PrivateData []byte
}

// maxAsync is the number of events kept for AsyncEvent. Further events replace the oldest.
const maxAsync = 256

// AsyncEvent waits for the next asynchronous event of the Device's objects.
func (d *Device) AsyncEvent(ctx context.Context) (*AsyncEvent, error) {
	select {
	case e := <-d.async:
		return e, nil
	default:
	}
	select {
	case e := <-d.async:
		return e, nil
	case <-d.done:
		return nil, d.Err()
	case <-ctx.Done():
		return nil, fmt.Errorf("iwarp: wait for an asynchronous event: %w", ctx.Err())
	}
}

// asyncError handles an AsyncError event.
func (d *Device) asyncError(e *ctrlpb.AsyncError) {
	ev := &AsyncEvent{Kind: AsyncKind(e.Kind), PrivateData: e.PrivateData}
	ev.Remote, _ = netip.ParseAddrPort(e.Remote)
	d.mu.Lock()
	ev.QP, ev.SRQ, ev.Listener = d.qps[e.Qp], d.srqs[e.Srq], d.listens[e.Listen]
	for c := range d.cqs {
		if e.Cq != 0 && c.h == e.Cq {
			ev.CQ = c
		}
	}
	d.mu.Unlock()
	if e.Error != nil {
		ev.Err = fromPB(ev.Kind.String(), e.Error)
	}
	if q := ev.QP; q != nil && ev.Err != nil {
		q.mu.Lock()
		if q.async == nil {
			q.async = ev.Err
		}
		q.mu.Unlock()
	}
	if ev.QP == nil && ev.CQ == nil && ev.SRQ == nil && ev.Listener == nil {
		return
	}
	for {
		select {
		case d.async <- ev:
			return
		default:
		}
		select { // only readLoop sends
		case <-d.async:
		default:
		}
	}
}
