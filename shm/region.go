package shm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Region is client memory, mapped.
type Region struct {
	file
	data []byte
}

// Bytes returns the memory.
func (m *Region) Bytes() []byte { return m.data }

// Close unmaps the memory.
func (m *Region) Close() error {
	m.data = nil
	return m.file.Close()
}

const (
	maxRegion      = 1 << 46 // far below what mmap could refuse for arithmetic's sake
	maxOffset      = 1 << 56 // a client may have each page at the offset that is its address
	hugetlbfsMagic = 0x958458f6
)

// MapRegion maps size octets at offset of a client's memfd for use as a memory
// region; with write false the mapping is read-only. fd stays the caller's.
//
// Only a memfd that can be sealed, or is sealed against shrinking, is taken: a file
// of a file system that the client serves could make this process wait at any system
// call. Huge pages are refused: they can be taken back by a hole and then not be had
// again. All pages must be allocated, by the client, to which they are charged: the
// daemon never allocates any, and makes no call that takes the lock of the memfd, which
// a client can hold as long as it likes. An access to what the client cuts off or to a
// hole that it makes later is a fault (see Guarded), so that only code under
// debug.SetPanicOnFault touches the memory.
func MapRegion(fd int, offset, size uint64, write bool) (*Region, error) {
	if size == 0 || offset > maxOffset || size > maxRegion {
		return nil, fmt.Errorf("%w: offset %d, length %d", ErrMemory, offset, size)
	}
	off, length := int64(offset), int64(size)
	have, seals, err := sealsOf(fd)
	if err != nil {
		return nil, err
	}
	var fs unix.Statfs_t // of tmpfs or hugetlbfs, which answer by themselves
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("shm: fstatfs: %w", err)
	}
	switch {
	case fs.Type == hugetlbfsMagic:
		return nil, fmt.Errorf("%w: huge pages", ErrMemory)
	case seals&(unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL) == unix.F_SEAL_SEAL: // as a file of tmpfs is
		return nil, fmt.Errorf("%w: memfd cannot be sealed against shrinking", ErrMemory)
	case write && seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0:
		return nil, fmt.Errorf("%w: memfd is sealed against writing", ErrMemory)
	case off+length > have:
		return nil, fmt.Errorf("%w: %d octets at %d of a memfd of %d", ErrMemory, length, off, have)
	}
	// What is never written through the mapping is the file's page in a private one
	// too, and that can be protected when the memfd is sealed or opened read-only.
	prot, flags := unix.PROT_READ, unix.MAP_PRIVATE
	if write {
		prot, flags = unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED
	}
	head := off % int64(os.Getpagesize())
	mem, err := unix.Mmap(fd, off-head, int(head+length), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("shm: mapping %d octets: %w", length, mapLimit(err))
	}
	if err := protect(mem, write); err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	return &Region{file: file{fd: -1, mem: mem}, data: mem[head : head+length : head+length]}, nil
}

// CreateRegion makes client memory of size octets in a memfd that cannot
// shrink, all allocated, and maps it.
func CreateRegion(name string, size int) (*Region, error) {
	if size <= 0 || size > maxRegion {
		return nil, fmt.Errorf("%w: length %d", ErrMemory, size)
	}
	fd, err := memfd(name)
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
		if err = Populate(mem); err != nil {
			_ = unix.Munmap(mem)
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("shm: making %d octets of memory: %w", size, mapLimit(err))
	}
	return &Region{file: file{fd: fd, mem: mem}, data: mem}, nil
}
