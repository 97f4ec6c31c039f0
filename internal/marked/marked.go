// Package marked describes byte sequences that contain MPA markers, so that they can be copied
// straight from the received frame to their destination.
package marked

// Size and distance of markers (RFC 5044 section 4.3), in bytes.
const (
	every  = 512
	length = 4
	run    = every - length // bytes between two markers
)

// Bytes are the bytes of B without its markers. A marker of four bytes is at First and at each
// 512th byte after it; if First is zero there are none. B does not end with a marker.
type Bytes struct {
	B     []byte
	First int
}

// Among returns the number of markers to insert among n bytes if the first marker goes before the
// byte at first.
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

// After returns o without its first n bytes. n is at most Len.
func (o Bytes) After(n int) Bytes {
	if o.Plain(n) {
		return Bytes{o.B[n:], max(o.First-n, 0)}
	}
	return o.behind(n)
}

// Plain reports whether the first n bytes, and the byte after them, have no marker before them.
func (o Bytes) Plain(n int) bool { return uint(n) <= uint(o.First-1) }

// behind implements After when n reaches the first marker.
func (o Bytes) behind(n int) Bytes {
	if n == o.Len() {
		return Bytes{}
	}
	n -= o.First
	passed := 1 + n/run
	return Bytes{o.B[o.First+n+passed*length:], run - n%run}
}

// CopyTo fills dst, which is no longer than Len, with the first bytes. During the copy dst may
// temporarily contain other bytes.
func (o Bytes) CopyTo(dst []byte) {
	if o.Plain(len(dst)) {
		copy(dst, o.B)
	} else {
		o.gather(dst)
	}
}

// gather implements CopyTo when there are markers among the bytes.
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
