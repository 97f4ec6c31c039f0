package impair

import "github.com/iwarpd/iwarpd/internal/clock"

// Queue is a priority queue of values by time; values with the same time keep their order. The zero
// Queue is empty and ready to use.
type Queue[T any] struct {
	heap []entry[T]
	seq  uint64
}

type entry[T any] struct {
	at  clock.Time
	seq uint64
	v   T
}

// NewQueue returns a queue that does not allocate while it holds at most n values.
func NewQueue[T any](n int) Queue[T] {
	return Queue[T]{heap: make([]entry[T], 0, n)}
}

// Len returns the number of values in the queue.
func (q *Queue[T]) Len() int { return len(q.heap) }

// Deadline returns the time of the next value, or 0 if the queue is empty.
func (q *Queue[T]) Deadline() clock.Time {
	if len(q.heap) == 0 {
		return 0
	}
	return q.heap[0].at
}

// Push adds v with the time at.
func (q *Queue[T]) Push(at clock.Time, v T) {
	q.heap = append(q.heap, entry[T]{at, q.seq, v})
	q.seq++
	i := len(q.heap) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !q.less(i, up) {
			break
		}
		q.heap[i], q.heap[up] = q.heap[up], q.heap[i]
		i = up
	}
}

// Peek returns the earliest value without removing it, if it is due at now.
func (q *Queue[T]) Peek(now clock.Time) (v T, ok bool) {
	if len(q.heap) == 0 || q.heap[0].at > now {
		return v, false
	}
	return q.heap[0].v, true
}

// Pop removes and returns the earliest value, if it is due at now.
func (q *Queue[T]) Pop(now clock.Time) (v T, ok bool) {
	if v, ok = q.Peek(now); !ok {
		return v, false
	}
	n := len(q.heap) - 1
	q.heap[0] = q.heap[n]
	q.heap[n] = entry[T]{}
	q.heap = q.heap[:n]
	for i := 0; ; {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && q.less(c+1, c) {
			c++
		}
		if !q.less(c, i) {
			break
		}
		q.heap[i], q.heap[c] = q.heap[c], q.heap[i]
		i = c
	}
	return v, true
}

func (q *Queue[T]) less(i, j int) bool {
	a, b := &q.heap[i], &q.heap[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}
