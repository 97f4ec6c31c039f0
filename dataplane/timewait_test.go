package dataplane

import (
	"slices"
	"testing"
)

// TestTimeWaitQueue checks that the queue keeps the connections in TIME-WAIT, in order, when it drops those that have
// ended.
func TestTimeWaitQueue(t *testing.T) {
	var tw timeWait
	var want []*tcpConn
	for i := range 1000 {
		c := new(tcpConn)
		tw.add(c)
		want = append(want, c)
		if i%3 != 0 {
			old := want[len(want)/2]
			old.gone = true
			want = slices.DeleteFunc(want, func(c *tcpConn) bool { return c == old })
		}
		if i%50 == 0 {
			for tw.q[tw.at].gone {
				tw.at++
			}
			tw.at++ // as evict
			want = want[1:]
		}
		got := slices.DeleteFunc(slices.Clone(tw.q[tw.at:]), func(c *tcpConn) bool { return c.gone })
		if !slices.Equal(got, want) {
			t.Fatalf("step %d: %d connections, want %d", i, len(got), len(want))
		}
	}
	if n := cap(tw.q); n > 2*len(want) {
		t.Errorf("a queue of %d for %d", n, len(want))
	}
}

// TestTimeWaitLooks checks that a connection that enters TIME-WAIT rarely makes the queue look at all others, also if one
// leaves for each: there may be thousands, and peers choose when.
func TestTimeWaitLooks(t *testing.T) {
	var tw timeWait
	for len(tw.q) < 1000 || len(tw.q) < cap(tw.q) {
		tw.add(new(tcpConn))
	}
	looks := 0
	for i := range 100 {
		tw.q[len(tw.q)-1].gone = true
		if len(tw.q) == cap(tw.q) {
			looks++
		}
		tw.add(new(tcpConn))
		if looks > 1 {
			t.Fatalf("%d looks for %d connections", looks, i)
		}
	}
}
