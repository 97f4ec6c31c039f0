package histogram

import (
	"testing"
	"time"
)

func TestBuckets(t *testing.T) {
	last := Bound(Buckets - 1)
	for _, tt := range []struct {
		d    time.Duration
		want int
	}{
		{-1, 0}, {0, 0}, {1, 0}, {time.Microsecond, 0}, {time.Microsecond + 1, 1}, {2 * time.Microsecond, 1},
		{2*time.Microsecond + 1, 2}, {time.Millisecond, 10}, {last, Buckets - 1}, {last + 1, Buckets}, {time.Hour, Buckets},
	} {
		var h Histogram
		h.Add(tt.d)
		var c Counts
		got := h.Counts()
		c.Add(&got)
		c.Add(&got)
		if c.Buckets[tt.want] != 2 || c.Total() != 2 || c.Sum != 2*max(tt.d, 0) {
			t.Errorf("%v, twice: %+v; want it in bucket %d", tt.d, c, tt.want)
		}
		if tt.want < Buckets && tt.d > Bound(tt.want) {
			t.Errorf("Bound(%d) = %v is less than %v", tt.want, Bound(tt.want), tt.d)
		}
	}
	var none *Histogram
	none.Add(1)
	if n := testing.AllocsPerRun(10, func() { new(Histogram).Add(1); none.Add(1) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
