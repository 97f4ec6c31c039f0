package shm

import (
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Object is a memfd of a client. Slice makes regions of it. It is mapped in windows that stay
// mapped, so a region costs system calls only for pages that no other region covers. The offset
// of a page may equal its address in the client; such a memfd is larger than any possible
// mapping. An Object is for one goroutine.
type Object struct {
	fd      int
	windows []*window
}

// window is a mapping of windowSize bytes of an Object.
type window struct {
	start uint64 // in the memfd
	mem   []byte
	held  pageCounts
}

const (
	// windowSize is the size and the alignment of a window in the memfd. The page tables of an empty one are at most 1/512 of it.
	windowSize = 64 << 20
	// maxWindows is the maximum number of windows. A region beyond that, or in several windows, is mapped by itself.
	maxWindows = 64
	// ObjectMaps is the number of mappings that an Object may have beyond one for each slice.
	ObjectMaps = maxWindows
)

// OpenObject checks a memfd as MapRegion does. The Object owns fd, unless OpenObject fails.
func OpenObject(fd int) (*Object, error) {
	if _, err := checkMemfd(fd, true); err != nil {
		return nil, err
	}
	return &Object{fd: fd}, nil
}

// Slice returns length bytes at offset as a region for reading and writing. As for MapRegion, the client has allocated the pages. The daemon
// looks only at pages that no open slice has.
func (o *Object) Slice(offset, length uint64) (*Region, error) {
	if length == 0 || offset > maxOffset || length > maxRegion {
		return nil, fmt.Errorf("%w: offset %d, length %d", ErrMemory, offset, length)
	}
	page := uint64(os.Getpagesize())
	start, end := offset/page*page, (offset+length+page-1)/page*page
	w, err := o.window(start, end)
	if err != nil {
		return nil, err
	}
	if w == nil {
		return MapRegion(o.fd, offset, length, true)
	}
	err = w.held.gaps(start, end, func(start, end uint64) error { return populate(w.mem[start-w.start : end-w.start]) })
	if err != nil {
		return nil, err
	}
	w.held.add(start, end, 1)
	from := offset - w.start
	return &Region{
		file: file{fd: -1}, data: w.mem[from : from+length : from+length],
		close: func() { w.held.add(start, end, -1) },
	}, nil
}

// window returns the window that contains the pages from start to end, which it maps if needed. It returns
// nil if they are in several windows, or if there are too many.
func (o *Object) window(start, end uint64) (*window, error) {
	at := start / windowSize * windowSize
	if end > at+windowSize {
		return nil, nil
	}
	for _, w := range o.windows {
		if w.start == at {
			return w, nil
		}
	}
	if len(o.windows) == maxWindows {
		o.unmap(func(w *window) bool { return len(w.held) == 0 })
	}
	if len(o.windows) == maxWindows {
		return nil, nil
	}
	mem, err := unix.Mmap(o.fd, int64(at), windowSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("shm: mapping %d bytes: %w", windowSize, mapLimit(err))
	}
	if err := guardHoles(mem); err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	w := &window{start: at, mem: mem}
	o.windows = append(o.windows, w)
	return w, nil
}

// unmap unmaps the windows for which which returns true.
func (o *Object) unmap(which func(*window) bool) {
	o.windows = slices.DeleteFunc(o.windows, func(w *window) bool {
		if !which(w) {
			return false
		}
		_ = unix.Munmap(w.mem)
		return true
	})
}

// Close unmaps the windows and closes the memfd. The slices must not be used afterwards. A second Close does nothing.
func (o *Object) Close() error {
	if o.fd < 0 {
		return nil
	}
	o.unmap(func(*window) bool { return true })
	err := unix.Close(o.fd)
	o.fd = -1
	return err
}

// pageCounts counts the slices that contain each page. Its spans are in order and do not
// overlap. Neighbors differ in n.
type pageCounts []pageSpan

// pageSpan is pages that n slices have, n > 0.
type pageSpan struct {
	start, end uint64
	n          int
}

// after returns the index of the first span that ends after at.
func (c pageCounts) after(at uint64) int {
	i, _ := slices.BinarySearchFunc(c, at, func(s pageSpan, at uint64) int {
		if s.end <= at {
			return -1
		}
		return 1
	})
	return i
}

// gaps calls f with each part from start to end that no slice has, until f fails.
func (c pageCounts) gaps(start, end uint64, f func(start, end uint64) error) error {
	for _, s := range c[c.after(start):] {
		if s.start >= end {
			break
		}
		if s.start > start {
			if err := f(start, s.start); err != nil {
				return err
			}
		}
		start = s.end
	}
	if start < end {
		return f(start, end)
	}
	return nil
}

// add adds by, 1 or -1, to the count of each page from start to end.
func (c *pageCounts) add(start, end uint64, by int) {
	c.cut(start)
	c.cut(end)
	var changed pageCounts
	first := c.after(start)
	next := first
	if first > 0 { // it may grow
		first--
		changed.put((*c)[first])
	}
	at := start
	for ; next < len(*c) && (*c)[next].start < end; next++ {
		s := (*c)[next]
		changed.put(pageSpan{at, s.start, by})
		changed.put(pageSpan{s.start, s.end, s.n + by})
		at = s.end
	}
	changed.put(pageSpan{at, end, by})
	if next < len(*c) { // so may this one
		changed.put((*c)[next])
		next++
	}
	*c = slices.Replace(*c, first, next, changed...)
}

// cut makes two spans of the one that has pages before and after at.
func (c *pageCounts) cut(at uint64) {
	i := c.after(at)
	if i == len(*c) || (*c)[i].start >= at {
		return
	}
	s := (*c)[i]
	*c = slices.Insert(*c, i, pageSpan{s.start, at, s.n})
	(*c)[i+1].start = at
}

// put appends s, which comes after all others.
func (c *pageCounts) put(s pageSpan) {
	if s.start >= s.end || s.n == 0 {
		return
	}
	if k := len(*c) - 1; k >= 0 && (*c)[k].end == s.start && (*c)[k].n == s.n {
		(*c)[k].end = s.end
		return
	}
	*c = append(*c, s)
}
