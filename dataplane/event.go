package dataplane

import (
	"sync"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// EventKind is the type of an event.
type EventKind uint8

// The events of a connection occur in this order; EventClosed is the last. The events of an
// association precede and follow those of its sessions.
const (
	// EventAccepted: a passive open succeeded; the connection is in streaming mode.
	EventAccepted EventKind = iota + 1
	// EventConnected: an active open succeeded; the connection is in streaming mode.
	EventConnected
	// EventData: Data contains the streaming-mode bytes that arrived in one turn.
	EventData
	// EventWritable: bytes passed to StreamSend have been sent; more can be queued.
	EventWritable
	// EventEstablished: the connection is in full operation, and the QP may send.
	EventEstablished
	// EventPeerClosed: the peer's FIN arrived in order.
	EventPeerClosed
	// EventTerminated: the peer sent a Terminate; Err is a *term.RemoteError, Data its bytes.
	EventTerminated
	// EventFailed: the peer violated the protocol and was sent a Terminate; Err is a
	// *term.Error.
	EventFailed
	// EventRequest: SCTP, the peer requests a session; call Answer. Setup has its contents.
	EventRequest
	// EventNegotiate: SCTP in the draft's profile, a Negotiate of the peer, in Setup. Conn
	// is an unanswered session of ours, or 0 if it is for the listener.
	EventNegotiate
	// EventAnswer: SCTP, the peer accepted our session; call Attach. Setup has its
	// contents.
	EventAnswer
	// EventRejected: SCTP, the peer rejected our session; Setup is nil if its ULP was not
	// involved.
	EventRejected
	// EventClosed: the connection has ended; Err is the reason, or nil if both sides closed
	// it gracefully.
	EventClosed
	// EventJoined: SCTP, an association of Flow has started, for Listener or dialed for
	// Conn. Its packets must be steered until EventParted, which may be long after its last
	// session.
	EventJoined
	// EventParted: SCTP, the association of Flow has ended.
	EventParted
)

// Event reports a change of a connection to the control plane.
type Event struct {
	Kind     EventKind
	Conn     ConnID
	Listener ListenerID // EventAccepted, EventRequest, EventNegotiate, EventJoined
	Flow     pkt.Flow
	Host     bool // EventAccepted, EventConnected: the peer is a program of this host
	Worker   int  // index of the client's doorbell page for the connection
	Data     []byte
	Err      error
	Setup    *session.Setup // SCTP
	TimeWait bool           // EventClosed: TCP is in TIME-WAIT, so the ports stay in use
}

// eventQueue carries events from the workers to the event goroutine.
type eventQueue struct {
	mu     sync.Mutex
	cond   *sync.Cond
	q      []func(func(Event))
	closed bool
}

func (q *eventQueue) init() { q.cond = sync.NewCond(&q.mu) }

func (q *eventQueue) push(ev Event) { q.call(func(on func(Event)) { on(ev) }) }

// pushCounted is push for an event of w that a peer causes without being asked. Peers may be faster than
// the control plane: unseen, of w, counts the events that it has not handled, for the caller to
// limit.
func (q *eventQueue) pushCounted(w *worker, unseen *int, ev Event) {
	*unseen++
	q.call(func(on func(Event)) {
		on(ev)
		w.post(func(*worker) { *unseen-- })
	})
}

// call runs f in the event goroutine, after the events queued so far.
func (q *eventQueue) call(f func(on func(Event))) {
	q.mu.Lock()
	q.q = append(q.q, f)
	q.mu.Unlock()
	q.cond.Signal()
}

func (q *eventQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.cond.Signal()
}

func (q *eventQueue) run(on func(Event)) {
	for {
		q.mu.Lock()
		for len(q.q) == 0 && !q.closed {
			q.cond.Wait()
		}
		batch, closed := q.q, q.closed
		q.q = nil
		q.mu.Unlock()
		if len(batch) == 0 && closed {
			return
		}
		for _, f := range batch {
			f(on)
		}
	}
}
