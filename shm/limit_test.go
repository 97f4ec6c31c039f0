package shm

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFileSizeLimit checks the advice when the limit of the size of files is below that of the memory, and that nothing is left of it.
func TestFileSizeLimit(t *testing.T) {
	_, _ = inUse(t) // opens the descriptor of Go's poller
	fds, maps := inUse(t)
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
	if f, m := inUse(t); f != fds || m != maps {
		t.Errorf("%d descriptors and %d mappings; want %d and %d", f, m, fds, maps)
	}
}

// TestLimitAdvice checks which limit an error tells to raise.
func TestLimitAdvice(t *testing.T) {
	for _, tt := range []struct {
		limit func(error) error
		err   error
		want  string
	}{
		{Limit, unix.EMFILE, "LimitNOFILE"},
		{Limit, unix.ENFILE, "fs.file-max"},
		{Limit, unix.ENOMEM, ""},
		{mapLimit, unix.EFBIG, "LimitFSIZE"},
		{mapLimit, unix.ENOMEM, "vm.max_map_count"},
		{mapLimit, unix.EMFILE, ""},
	} {
		err := tt.limit(fmt.Errorf("call: %w", tt.err))
		advice := strings.Contains(err.Error(), "raise")
		if !errors.Is(err, tt.err) || !strings.Contains(err.Error(), tt.want) || advice != (tt.want != "") {
			t.Errorf("%v: %v; want %q", tt.err, err, tt.want)
		}
	}
}
