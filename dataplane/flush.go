package dataplane

import "slices"

// The work that a queue pair has posted when it ends is flushed. A client may have many queue pairs, all of which end with it, and each
// may have tens of thousands of work requests posted, so a turn flushes a bounded number of them.

const (
	// flushBudget is the number of completions of queue pairs that have ended, per turn.
	flushBudget = 1024
	// flushShare is how many of them one queue pair gets before the others get theirs.
	flushShare = 128
)

// flushing are the queue pairs that have more to flush than a turn does.
type flushing struct {
	left int // budget of this turn
	q    []*flush
}

type flush struct {
	b    *QPBinding
	then []func(w *worker)
}

// flushQP delivers completions of a queue pair in ERROR, flushed work requests included, as far as the turn's budget goes. It reports
// whether none is left now; otherwise the next turns deliver the rest.
func (w *worker) flushQP(b *QPBinding) bool {
	f := &w.flushing
	if w.flushSome(b, f.left) {
		return true
	}
	if w.flushOf(b) == nil {
		f.q = append(f.q, &flush{b: b})
	}
	return false
}

// flushSome delivers at most n completions, within the turn's budget. It reports whether none is left.
func (w *worker) flushSome(b *QPBinding, n int) bool {
	for n = min(n, w.flushing.left); n > 0; n-- {
		if !b.QP.PollWC(&w.wc) {
			return true
		}
		w.flushing.left--
		w.complete(b, &w.wc)
	}
	return false
}

func (w *worker) flushOf(b *QPBinding) *flush {
	if i := slices.IndexFunc(w.flushing.q, func(f *flush) bool { return f.b == b }); i >= 0 {
		return w.flushing.q[i]
	}
	return nil
}

// afterFlush calls f when b has nothing left to flush on this worker.
func (w *worker) afterFlush(b *QPBinding, f func(w *worker)) {
	if p := w.flushOf(b); p != nil {
		p.then = append(p.then, f)
	} else {
		f(w)
	}
}

// pollFlushes goes on with the queue pairs that have more to flush. It returns the number of completions.
func (w *worker) pollFlushes() int {
	f := &w.flushing
	f.left = flushBudget
	for f.left > 0 && len(f.q) > 0 {
		p := f.q[0]
		f.q = append(f.q[:0], f.q[1:]...)
		if !w.flushSome(p.b, flushShare) {
			f.q = append(f.q, p)
			continue
		}
		if s := p.b.stream; s != nil {
			s.settle(w)
		}
		for _, then := range p.then {
			then(w)
		}
	}
	return flushBudget - f.left
}

// dropFlushes forgets what the queue pairs of cb have left to flush: their client has ended.
func (w *worker) dropFlushes(cb *ClientBinding) {
	for _, p := range w.flushing.q {
		if p.b.Client != cb {
			continue
		}
		for _, then := range p.then {
			then(w)
		}
	}
	w.flushing.q = slices.DeleteFunc(w.flushing.q, func(p *flush) bool { return p.b.Client == cb })
}
