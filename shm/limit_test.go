package shm

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFileSizeLimit checks the advice when the limit of the size of files is below that of the memory.
func TestFileSizeLimit(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4096, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	r, err := CreateRegion(8192)
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if err == nil {
		r.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "ulimit -f") {
		t.Errorf("error %v", err)
	}
}
