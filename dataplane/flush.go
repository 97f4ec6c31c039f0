package dataplane

// When a queue pair ends, its posted work is flushed. A client may have many queue pairs, which
// all end with it, and each may have posted tens of thousands of work requests, so a turn
// flushes a bounded number of them.

const (
	// flushBudget is the number of completions per turn for queue pairs that have ended. Each of
	// the queue pairs counts as one more.
	flushBudget = 1024
	// flushShare is the number of these that a queue pair gets before the next one's share.
	flushShare = 128
)

// flushing holds the queue pairs that have more to flush than fits in a turn.
type flushing struct {
	left        int // rest of this turn's budget
	first, last *flush
	of          map[*QPBinding]*flush
}

type flush struct {
	b    *QPBinding
	then []func(w *worker)
	next *flush
}

// deliver delivers completions of a queue pair in ERROR, including flushed work requests,
// within the turn's budget. The next turns deliver the rest.
func (f *flushing) deliver(w *worker, b *QPBinding) {
	if f.some(w, b, f.left) || f.of[b] != nil {
		return
	}
	if f.of == nil {
		f.of = make(map[*QPBinding]*flush)
	}
	p := &flush{b: b}
	f.of[b] = p
	f.push(p)
}

// some delivers at most n completions, within the turn's budget. It reports whether none is left.
func (f *flushing) some(w *worker, b *QPBinding, n int) bool {
	for n = min(n, f.left); n > 0; n-- {
		if !b.QP.PollWC(&w.wc) {
			return !b.QP.Invalidates()
		}
		f.left--
		w.complete(b, &w.wc)
	}
	return false
}

// push makes p the last.
func (f *flushing) push(p *flush) {
	if f.last == nil {
		f.first = p
	} else {
		f.last.next = p
	}
	f.last = p
}

// pop removes the first.
func (f *flushing) pop() *flush {
	p := f.first
	if f.first = p.next; f.first == nil {
		f.last = nil
	}
	p.next = nil
	return p
}

// done reports whether b has nothing left to flush on this worker.
func (f *flushing) done(b *QPBinding) bool { return f.of[b] == nil }

// after calls then when b has nothing left to flush on this worker.
func (f *flushing) after(w *worker, b *QPBinding, then func(w *worker)) {
	if p := f.of[b]; p != nil {
		p.then = append(p.then, then)
	} else {
		then(w)
	}
}

// poll begins a turn and continues with the queue pairs that have more to flush. It returns the
// amount of work.
func (f *flushing) poll(w *worker) int {
	f.left = flushBudget
	for waits := 0; f.left > 0 && waits < len(f.of); {
		f.left-- // also for one that has nothing
		p := f.pop()
		if !f.some(w, p.b, flushShare) {
			f.push(p)
			if p.b.QP.Invalidates() { // it waits for turns of other workers, and not for more of this one
				w.waits = true
				waits++
			}
			continue
		}
		delete(f.of, p.b)
		if s := p.b.stream; s != nil {
			s.settle(w)
		}
		p.end(w)
	}
	return flushBudget - f.left
}

func (p *flush) end(w *worker) {
	for _, then := range p.then {
		then(w)
	}
}

// drop discards the flushes of the queue pairs of cb, whose client has ended.
func (f *flushing) drop(w *worker, cb *ClientBinding) {
	p := f.first
	f.first, f.last = nil, nil
	for p != nil {
		next := p.next
		p.next = nil
		if p.b.Client == cb {
			delete(f.of, p.b)
			p.end(w)
		} else {
			f.push(p)
		}
		p = next
	}
}
