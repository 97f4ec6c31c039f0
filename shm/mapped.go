package shm

import (
	"os"
	"sync"
	"unsafe"
)

// Mapped is the memory of one client that this process has mapped for use by workers. The client can punch holes in it, so an access to it
// may fault; a fault anywhere else is a bug of this process. The zero value is empty. All methods may be called from any goroutine.
type Mapped struct {
	mu     sync.Mutex
	ranges map[addrRange]int // how often each was added: slices of an Object may be the same
}

// addrRange is whole pages.
type addrRange struct{ start, end uintptr }

func rangeOf(mem []byte) addrRange {
	page := uintptr(os.Getpagesize())
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	return addrRange{start &^ (page - 1), (start + uintptr(len(mem)) + page - 1) &^ (page - 1)}
}

// Add adds mem, before a worker accesses it.
func (m *Mapped) Add(mem []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ranges == nil {
		m.ranges = make(map[addrRange]int)
	}
	m.ranges[rangeOf(mem)]++
}

// Remove undoes one Add of mem, when no worker accesses it any longer and before it is unmapped.
func (m *Mapped) Remove(mem []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := rangeOf(mem)
	if m.ranges[r]--; m.ranges[r] <= 0 {
		delete(m.ranges, r)
	}
}

// Has reports whether addr is in one of the pages. It looks at all ranges: it is for faults, which end the client.
func (m *Mapped) Has(addr uintptr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for r := range m.ranges {
		if addr-r.start < r.end-r.start {
			return true
		}
	}
	return false
}
