package testenv

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Mmap returns private memory of the process with the given rights, until the test ends.
func Mmap(t testing.TB, size, prot int) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, size, prot, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return mem
}

// Page returns a page of memory between two pages that cannot be accessed.
func Page(t testing.TB) []byte {
	t.Helper()
	page := unix.Getpagesize()
	mem := Mmap(t, 3*page, unix.PROT_READ|unix.PROT_WRITE)
	for _, i := range []int{0, 2} {
		if err := unix.Mprotect(mem[i*page:(i+1)*page], unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return mem[page : 2*page : 2*page]
}
