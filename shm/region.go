package shm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Region is mapped client memory.
type Region struct {
	file
	data  []byte
	close func() // of a slice of an Object
}

// Bytes returns the memory.
func (m *Region) Bytes() []byte { return m.data }

// Close ends the use of the memory. A second Close does nothing.
func (m *Region) Close() error {
	m.data = nil
	if m.close != nil {
		m.close()
		m.close = nil
	}
	return m.file.Close()
}

const (
	maxRegion      = 1 << 46 // far below the limit of mmap
	maxOffset      = 1 << 56 // a client may give each page the offset of its address
	hugetlbfsMagic = 0x958458f6
)

// MapRegion maps size bytes at offset of a client's memfd for use as a memory region; if write is false the mapping is read-only. The
// caller still owns fd.
//
// MapRegion accepts only a memfd that can be sealed, or is sealed against shrinking: with a file of a file system that the client serves,
// any system call could block. It refuses huge pages: punching a hole frees them, and they may not be available again. All pages must be
// allocated by the client, to which they are charged. The daemon never allocates any, and makes no call that takes the lock of the memfd,
// which a client can hold indefinitely. An access to memory that the client truncates, or to a hole that it punches later, faults (see
// Guarded), so only code under debug.SetPanicOnFault may access the memory.
func MapRegion(fd int, offset, size uint64, write bool) (*Region, error) {
	if size == 0 || offset > maxOffset || size > maxRegion {
		return nil, fmt.Errorf("%w: offset %d, length %d", ErrMemory, offset, size)
	}
	off, length := int64(offset), int64(size)
	have, err := checkMemfd(fd, write)
	if err != nil {
		return nil, err
	}
	if off+length > have {
		return nil, fmt.Errorf("%w: %d bytes at %d of a memfd of %d", ErrMemory, length, off, have)
	}
	// A private mapping that is never written shows the pages of the file too, and it can be protected even if the memfd is sealed or open
	// read-only.
	prot, flags := unix.PROT_READ, unix.MAP_PRIVATE
	if write {
		prot, flags = unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED
	}
	head := off % int64(os.Getpagesize())
	mem, err := unix.Mmap(fd, off-head, int(head+length), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("shm: mapping %d bytes: %w", length, mapLimit(err))
	}
	if err = guardHoles(mem); err == nil {
		err = populate(mem)
	}
	if err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	return &Region{file: file{fd: -1, mem: mem}, data: mem[head : head+length : head+length]}, nil
}

// checkMemfd returns the size of a memfd that a client may register memory of.
func checkMemfd(fd int, write bool) (size int64, err error) {
	size, seals, err := sealsOf(fd)
	if err != nil {
		return 0, err
	}
	var fs unix.Statfs_t // of tmpfs or hugetlbfs, which answer by themselves
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return 0, fmt.Errorf("shm: fstatfs: %w", err)
	}
	switch {
	case fs.Type == hugetlbfsMagic:
		return 0, fmt.Errorf("%w: huge pages", ErrMemory)
	case seals&(unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL) == unix.F_SEAL_SEAL: // as a file of tmpfs is
		return 0, fmt.Errorf("%w: memfd cannot be sealed against shrinking", ErrMemory)
	case write && seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0:
		return 0, fmt.Errorf("%w: memfd is sealed against writing", ErrMemory)
	}
	return size, nil
}

// CreateRegion creates client memory of size bytes in a memfd that cannot shrink, all allocated, and maps it.
func CreateRegion(size int) (*Region, error) {
	if size <= 0 || size > maxRegion {
		return nil, fmt.Errorf("%w: length %d", ErrMemory, size)
	}
	fd, err := memfd("iwarp-mr")
	if err != nil {
		return nil, err
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		if err = allocate(fd, mem); err != nil {
			_ = unix.Munmap(mem)
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("shm: making %d bytes of memory: %w", size, mapLimit(err))
	}
	return &Region{file: file{fd: fd, mem: mem}, data: mem}, nil
}

// zeros is what allocate writes at a time: a large page, so that the kernel can use one where it may.
var zeros [2 << 20]byte

// allocate allocates the pages of mem, a mapping of all of the new memfd fd. It writes zeros instead of using MADV_POPULATE_WRITE, which
// takes a fault for each page. Pages that exist are mapped many at a time.
func allocate(fd int, mem []byte) error {
	for off := 0; off < len(mem); {
		n, err := unix.Pwrite(fd, zeros[:min(len(zeros), len(mem)-off)], int64(off))
		if err != nil {
			return err
		}
		off += n
	}
	return unix.Madvise(mem, unix.MADV_POPULATE_READ)
}
