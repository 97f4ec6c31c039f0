package cache

import (
	"bytes"
	"slices"
	"testing"
	"time"
)

// Whatever lies around the bytes, nothing is touched, and no byte is lost.
func TestBytes(t *testing.T) {
	want := make([]byte, 300)
	for i := range want {
		want[i] = byte(i)
	}
	for name, f := range map[string]func([]byte){"Fetch": Fetch, "FetchForWriting": FetchForWriting, "Evict": Evict} {
		f(nil)
		b := bytes.Clone(want)
		for n := range b {
			f(b[:n])
			f(b[n:])
		}
		if !bytes.Equal(b, want) {
			t.Errorf("%s has changed memory", name)
		}
	}
}

// TestLatency checks that memory that was evicted takes longer to load than memory that was just loaded.
func TestLatency(t *testing.T) {
	if !canEvict {
		t.Log("not implemented on this processor")
		if d := Latency(new([PageSize]byte)); d != 0 {
			t.Errorf("%v", d)
		}
		return
	}
	page := new([PageSize]byte)
	median := func(before func()) time.Duration {
		d := make([]time.Duration, 1001)
		for i := range d {
			before()
			d[i] = Latency(page)
		}
		slices.Sort(d)
		return d[len(d)/2]
	}
	hot, cold := median(func() {}), median(func() { Evict(page[:]) })
	if hot > 5*time.Nanosecond || cold < 10*time.Nanosecond {
		t.Errorf("a line that is in the cache takes %v, one that is not %v", hot, cold)
	}
}

func BenchmarkEvict(b *testing.B) {
	p := make([]byte, 64<<10)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		Fetch(p)
		Evict(p)
	}
}
