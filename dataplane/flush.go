package dataplane

import "slices"

// When a queue pair ends, its posted work is flushed. A client may have many queue pairs, which
// all end with it, and each may have posted tens of thousands of work requests, so a turn
// flushes a bounded number of them.

const (
	// flushBudget is the number of completions per turn for queue pairs that have ended.
	flushBudget = 1024
	// flushShare is the number of these that a queue pair gets before the next one's share.
	flushShare = 128
)

// flushing holds the queue pairs that have more to flush than fits in a turn.
type flushing struct {
	left int // rest of this turn's budget
	q    []*flush
}

type flush struct {
	b    *QPBinding
	then []func(w *worker)
}

// deliver delivers completions of a queue pair in ERROR, including flushed work requests,
// within the turn's budget. It reports whether none is left. Otherwise the next turns deliver
// the rest.
func (f *flushing) deliver(w *worker, b *QPBinding) bool {
	if f.some(w, b, f.left) {
		return true
	}
	if f.of(b) == nil {
		f.q = append(f.q, &flush{b: b})
	}
	return false
}

// some delivers at most n completions, within the turn's budget. It reports whether none is left.
func (f *flushing) some(w *worker, b *QPBinding, n int) bool {
	for n = min(n, f.left); n > 0; n-- {
		if !b.QP.PollWC(&w.wc) {
			return true
		}
		f.left--
		w.complete(b, &w.wc)
	}
	return false
}

// of returns the entry of b, or nil if it has nothing left to flush.
func (f *flushing) of(b *QPBinding) *flush {
	if i := slices.IndexFunc(f.q, func(p *flush) bool { return p.b == b }); i >= 0 {
		return f.q[i]
	}
	return nil
}

// after calls then when b has nothing left to flush on this worker.
func (f *flushing) after(w *worker, b *QPBinding, then func(w *worker)) {
	if p := f.of(b); p != nil {
		p.then = append(p.then, then)
	} else {
		then(w)
	}
}

// poll begins a turn and continues with the queue pairs that have more to flush. It returns the
// number of completions.
func (f *flushing) poll(w *worker) int {
	f.left = flushBudget
	for f.left > 0 && len(f.q) > 0 {
		p := f.q[0]
		f.q = append(f.q[:0], f.q[1:]...)
		if !f.some(w, p.b, flushShare) {
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

// drop discards the flushes of the queue pairs of cb, whose client has ended.
func (f *flushing) drop(w *worker, cb *ClientBinding) {
	for _, p := range f.q {
		if p.b.Client != cb {
			continue
		}
		for _, then := range p.then {
			then(w)
		}
	}
	f.q = slices.DeleteFunc(f.q, func(p *flush) bool { return p.b.Client == cb })
}
