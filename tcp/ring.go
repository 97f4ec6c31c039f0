package tcp

// ring is a FIFO that grows by doubling and never shrinks.
type ring[T any] struct {
	s          []T // length is a power of two
	head, tail uint32
}

func (r *ring[T]) len() int { return int(r.tail - r.head) }

func (r *ring[T]) push(v T) {
	if int(r.tail-r.head) == len(r.s) {
		r.grow()
	}
	r.s[r.tail&uint32(len(r.s)-1)] = v
	r.tail++
}

func (r *ring[T]) pop() (v T, ok bool) {
	if r.head == r.tail {
		return v, false
	}
	v = r.s[r.head&uint32(len(r.s)-1)]
	r.head++
	return v, true
}

func (r *ring[T]) grow() {
	n := max(16, 2*len(r.s))
	s := make([]T, n)
	k := 0
	for i := r.head; i != r.tail; i++ {
		s[k] = r.s[i&uint32(len(r.s)-1)]
		k++
	}
	r.s, r.head, r.tail = s, 0, uint32(k)
}
