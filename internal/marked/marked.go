// Package marked holds bytes among which the markers of MPA stand, so that they
// are copied once: from the frame that they came in to the memory that they are for.
package marked

// Markers of RFC 5044 section 4.3, in bytes.
const (
	every  = 512
	length = 4
	run    = every - length // bytes between two markers
)

// Bytes are those of B but for its markers: four bytes at First, and at each 512th
// from there. With First zero it has none. B does not end with a marker.
type Bytes struct {
	B     []byte
	First int
}

// Among returns the number of markers among n bytes, the first marker in front of
// the byte at first.
func Among(n, first int) int {
	if n <= first {
		return 0
	}
	return 1 + (n-first-1)/run
}

// Len returns the number of bytes without markers.
func (o Bytes) Len() int {
	if n := len(o.B) - o.First; o.First > 0 && n > 0 {
		return len(o.B) - (n+every-1)/every*length
	}
	return len(o.B)
}

// After returns what is behind the first n bytes, at most Len.
func (o Bytes) After(n int) Bytes {
	if o.Plain(n) {
		return Bytes{o.B[n:], max(o.First-n, 0)}
	}
	return o.behind(n)
}

// Plain reports whether no marker stands in front of the byte at n, nor among those before.
func (o Bytes) Plain(n int) bool { return uint(n) <= uint(o.First-1) }

// behind is After where a marker is passed, or stands in front of what is left.
func (o Bytes) behind(n int) Bytes {
	if n == o.Len() {
		return Bytes{}
	}
	n -= o.First
	passed := 1 + n/run
	return Bytes{o.B[o.First+n+passed*length:], run - n%run}
}

// CopyTo fills dst, which is no longer than Len, with the first bytes. Meanwhile there
// may be others in dst.
func (o Bytes) CopyTo(dst []byte) {
	if o.Plain(len(dst)) {
		copy(dst, o.B)
	} else {
		o.gather(dst)
	}
}

// gather is CopyTo where a marker may stand among the bytes.
func (o Bytes) gather(dst []byte) {
	src, first, n := o.B, o.First, len(dst)
	if runs := (n - first) / run; vectors && runs > 0 && first <= run {
		src = src[:n+length*Among(n, first)]
		join(&dst[0], &src[0], n, len(src), first, runs)
		return
	}
	for {
		n := copy(dst, src[:min(first, len(src))])
		if dst = dst[n:]; len(dst) == 0 {
			return
		}
		src, first = src[n+length:], run
	}
}
