package testenv

import (
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// FewFiles lowers the descriptor limit so that the process can open only n more, until restore is
// called or the test ends. It must not be used in parallel tests.
func FewFiles(t testing.TB, n int) (restore func()) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	var held []int
	open := func() error {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			held = append(held, fd)
		}
		return err
	}
	restore = func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
		for _, fd := range held {
			unix.Close(fd)
		}
		held = nil
	}
	t.Cleanup(restore)
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	top := 0
	for _, e := range list {
		if fd, err := strconv.Atoi(e.Name()); err == nil {
			top = max(top, fd)
		}
	}
	few := was
	few.Cur = uint64(top + n + 1)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	// Unused descriptors below the highest one count too.
	for open() == nil {
	}
	for range min(n, len(held)) {
		unix.Close(held[len(held)-1])
		held = held[:len(held)-1]
	}
	return restore
}

// WriteFile writes a file, as os.WriteFile does.
func WriteFile(t testing.TB, name string, data []byte, perm os.FileMode) {
	t.Helper()
	if err := os.WriteFile(name, data, perm); err != nil {
		t.Fatal(err)
	}
}

// ReadFile reads a file.
func ReadFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Mkdir makes a directory, and those that it is in.
func Mkdir(t testing.TB, name string, perm os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(name, perm); err != nil {
		t.Fatal(err)
	}
}

// Chmod changes the mode of a file.
func Chmod(t testing.TB, name string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
}

// Pipe returns both ends of a pipe. The read end is closed when the test ends.
func Pipe(t testing.TB) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r, w
}
