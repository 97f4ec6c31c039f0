package shm

import (
	"os"
	"testing"
	"unsafe"
)

// Has knows the pages of what was added, until it was removed as often.
func TestMapped(t *testing.T) {
	page := os.Getpagesize()
	buf := make([]byte, 6*page)
	head := -int(uintptr(unsafe.Pointer(&buf[0]))) & (page - 1)
	pages := buf[head : head+4*page]
	at := func(off int) uintptr { return uintptr(unsafe.Pointer(&pages[0])) + uintptr(off) }
	var m Mapped
	a, b := pages[page+100:page+200], pages[page+100:2*page+1]
	check := func(when string, want ...bool) {
		t.Helper()
		for i, off := range []int{page - 1, page, page + 150, 2*page - 1, 2 * page, 3*page - 1, 3 * page} {
			if got := m.Has(at(off)); got != want[i] {
				t.Errorf("%s: Has of byte %d of page %d is %v", when, off%page, off/page, got)
			}
		}
	}
	check("empty", false, false, false, false, false, false, false)
	m.Add(a)
	m.Add(a)
	check("one page", false, true, true, true, false, false, false)
	m.Add(b)
	check("two pages", false, true, true, true, true, true, false)
	m.Remove(a)
	m.Remove(b)
	check("added twice", false, true, true, true, false, false, false)
	m.Remove(a)
	check("removed", false, false, false, false, false, false, false)
	if n := len(m.ranges); n != 0 {
		t.Errorf("%d ranges are left", n)
	}
}
