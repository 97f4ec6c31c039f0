package main

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLeftOut checks that with the suggested fix every frame arrives on a queue that is served.
func TestLeftOut(t *testing.T) {
	for _, tt := range []struct {
		queues []int
		have   int
		want   string // suffix of the message; "": no message
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

func TestCheckFiles(t *testing.T) {
	for _, tt := range []struct {
		most   uint64
		queues int
		slots  int
		ok     bool
	}{
		{20, 1, 0, false}, {71, 1, 0, false}, {72, 1, 0, true}, {1024, 64, 0, true}, {512, 64, 0, false}, {unix.RLIM_INFINITY, 64, 0, true},
		{135, 1, 64, false}, {136, 1, 64, true},
	} {
		err := checkFiles(tt.most, tt.queues, tt.slots)
		if (err == nil) != tt.ok {
			t.Errorf("%d files, %d queues: %v", tt.most, tt.queues, err)
		}
		if err != nil && (!strings.Contains(err.Error(), "LimitNOFILE") || exitCode(err) != exitFailure) {
			t.Errorf("%v, exit code %d", err, exitCode(err))
		}
	}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil || openFiles() != l.Cur {
		t.Errorf("%d files: %v, %v", openFiles(), l, err)
	}
}
