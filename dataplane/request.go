package dataplane

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/sctp/session"
)

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
	// Device is the only device to listen on; "" means all, without kernel sockets unless the
	// engine has nothing else.
	Device string
}

// Listen makes all workers accept connections, which EventAccepted reports, or sessions over
// SCTP, which EventRequest reports and Answer answers. If one worker cannot listen, none does.
func (e *Engine) Listen(r ListenRequest) (ListenerID, error) {
	id := ListenerID(e.nextID.Add(1))
	workers := e.listening(r.Device)
	errs := make(chan error, len(workers))
	for _, w := range workers {
		w.post(func(w *worker) { errs <- w.listen(id, &r) })
	}
	var first error
	for range workers {
		err, stopped := await(e, errs)
		first = cmp.Or(first, err, stopped)
	}
	if first != nil {
		e.Unlisten(id)
		return 0, first
	}
	return id, nil
}

// listening returns the workers that listen on a device.
func (e *Engine) listening(device string) (all []*worker) {
	if device != "" {
		return e.device(device).workers
	}
	for _, w := range e.workers {
		if w.socks == nil {
			all = append(all, w)
		}
	}
	if all == nil {
		return e.workers
	}
	return all
}

// Unlisten closes a listener. Its connections are not affected. When it returns, its port is free.
func (e *Engine) Unlisten(id ListenerID) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.unlisten(id) })
	}
	e.Fence()
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
		if hop, err = e.resolver.Resolve(r.Remote.Addr(), r.Local.Addr(), w.dev.name); err != nil && w.socks == nil {
			return err
		}
	}
	done := make(chan error, 1)
	w.post(func(w *worker) { r.connect(w, id, &hop, done) })
	err, stopped := await(e, done)
	return cmp.Or(err, stopped)
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
		if c := streamOf(s); c != nil {
			c.streamSend(w, b)
		}
	})
}

// StreamConsumed reports that the control plane has consumed the next n bytes of those in
// EventData.
func (e *Engine) StreamConsumed(id ConnID, n int) {
	e.onStream(id, func(w *worker, s *stream) {
		if c := streamOf(s); c != nil {
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

// SetDSCP changes the DSCP of the packets that a connection sends, and, over SCTP, of those of its
// association. A connection within the host has none.
func (e *Engine) SetDSCP(id ConnID, dscp uint8) error {
	err := errOver
	e.awaitStream(id, func(_ *worker, s *stream) {
		if s != nil {
			err = s.lane.llp.setDSCP(dscp)
		}
	})
	return err
}

// Disconnect closes a connection. A graceful close first sends posted work (in streaming mode,
// everything passed to StreamSend), however long the peer's window makes it wait; abort sends a
// RST. EventClosed follows.
func (e *Engine) Disconnect(id ConnID, abort bool) {
	e.onStream(id, func(w *worker, s *stream) {
		if s != nil {
			w.disconnect(s, abort)
		}
	})
}
