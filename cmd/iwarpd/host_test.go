package main

import (
	"strings"
	"testing"
)

// TestLeftOut: the mend has every frame come on a queue that is served.
func TestLeftOut(t *testing.T) {
	for _, tt := range []struct {
		queues []int
		have   int
		want   string // the end of it; "": nothing is said
	}{
		{[]int{0}, 1, ""},
		{[]int{3, 1, 0, 2}, 4, ""},
		{[]int{1, 3}, 4, ": ethtool -X eth0 weight 0 1 0 1"},
		{[]int{3}, 4, ": ethtool -X eth0 weight 0 0 0 1"},
		{[]int{1, 0}, 4, ": ethtool -X eth0 weight 1 1 0 0, or ethtool -L eth0 combined 2"},
	} {
		got := leftOut("eth0", tt.queues, tt.have)
		if !strings.HasSuffix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%v of %d: %q; want it to end with %q", tt.queues, tt.have, got, tt.want)
		}
	}
}
