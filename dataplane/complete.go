package dataplane

import (
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// completions moves what the queue pair has completed to its CQs. A work request
// is complete only when its payload has been copied.
func (w *worker) completions(c *conn) {
	for c.qp.QP.PollWC(&w.wc) {
		if !w.complete(c.qp, &w.wc) {
			w.abort(c, ErrCQOverrun)
			return
		}
	}
}

// complete writes one completion. It reports false when the CQ is full.
func (w *worker) complete(b *QPBinding, wc *verbs.WC) bool {
	cq := b.SendCQ
	if wc.IsRecv() {
		cq = b.RecvCQ
	}
	if cq == nil {
		return true
	}
	listed := cq.Pending(w.id)
	if !cq.Push(w.id, wc) {
		w.stats.CQOverruns++
		return false
	}
	if !listed {
		w.cqs = append(w.cqs, cq)
	}
	return true
}

// remoteEvents acts on what the stream reports.
func (w *worker) remoteEvents(c *conn) {
	for {
		ev, ok := c.stream.PollEvent()
		if !ok {
			return
		}
		switch ev {
		case rdmap.EventFailed: // found while composing, or told by violation already
			w.violation(c, c.stream.Err())
		case rdmap.EventTerminated:
			err := &term.RemoteError{Err: c.stream.Remote()}
			c.err = err
			c.rxFailed = true
			w.event(c, EventTerminated, err, append([]byte(nil), c.stream.RemoteRaw()...))
			w.dropQP(c)
			c.mode = modeClosing
			if c.as != nil {
				w.sctpTerminated(c, err)
				return
			}
			c.tcp.Close(w.now)
			return
		}
	}
}
