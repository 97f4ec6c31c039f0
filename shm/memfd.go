package shm

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

var le = binary.LittleEndian

const sealSize = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// file is a mapped memfd that the daemon created.
type file struct {
	fd  int // -1: not owned, or taken
	mem []byte
}

// create creates a memfd of size bytes, all allocated, whose size and seals cannot change.
func create(name string, size int) (file, error) {
	fd, err := memfd(name)
	if err != nil {
		return file{}, err
	}
	if err = unix.Fallocate(fd, 0, 0, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealSize)
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		unix.Close(fd)
		return file{}, fmt.Errorf("shm: making %s of %d bytes: %w", name, size, mapLimit(err))
	}
	return file{fd: fd, mem: mem}, nil
}

// memfd creates an empty memfd, not executable if the kernel supports that.
func memfd(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("shm: memfd_create: %w", Limit(err))
	}
	return fd, nil
}

// FD returns the descriptor for the other side, or -1 if it was taken.
func (f *file) FD() int { return f.fd }

// TakeFD is FD, and transfers ownership of the descriptor to the caller; the memory stays mapped.
func (f *file) TakeFD() int {
	fd := f.fd
	f.fd = -1
	return fd
}

// Close unmaps the memory and closes the descriptor. The memory must not be used afterwards.
func (f *file) Close() error {
	if f.mem == nil {
		return nil
	}
	err := unix.Munmap(f.mem)
	f.mem = nil
	if f.fd >= 0 {
		unix.Close(f.fd)
		f.fd = -1
	}
	return err
}

// Free releases the pages, even if others hold the descriptor, and closes the file. It is for files of create: their pages are charged to
// this process, and a client could otherwise keep them through its descriptor. A page that the client touches later is a new one, charged
// to the client.
func (f *file) Free() error {
	if f.mem == nil {
		return nil
	}
	err := unix.Madvise(f.mem, unix.MADV_REMOVE)
	if err == unix.EINVAL { // locked
		if err = unix.Munlock(f.mem); err == nil {
			err = unix.Madvise(f.mem, unix.MADV_REMOVE)
		}
	}
	if err != nil {
		err = fmt.Errorf("shm: freeing %d bytes: %w", len(f.mem), err)
	}
	return errors.Join(err, f.Close())
}

// freed reports whether the other side has freed the memory by Free, which leaves zeros also where the magic was. Free
// is a single step to other processes: an access waits until all is zero. So what was read before freed returned false
// is true.
func (f *file) freed() bool { return word32(f.mem, HdrMagic).Load() == 0 }

// header is the header's content.
type header struct {
	kind, entries, stride, rings, ringSize, maxSGE, maxInline int
}

func (h *header) put(b []byte) {
	le.PutUint64(b[HdrMagic:], Magic)
	le.PutUint32(b[HdrVersion:], Version)
	le.PutUint32(b[HdrKind:], uint32(h.kind))
	le.PutUint32(b[HdrEntries:], uint32(h.entries))
	le.PutUint32(b[HdrStride:], uint32(h.stride))
	le.PutUint32(b[HdrRings:], uint32(h.rings))
	le.PutUint32(b[HdrRingSize:], uint32(h.ringSize))
	le.PutUint32(b[HdrMaxSGE:], uint32(h.maxSGE))
	le.PutUint32(b[HdrMaxInline:], uint32(h.maxInline))
}

// attach maps a memfd that the other side created and reads its header. The size must match the header and be sealed. The caller still owns
// fd.
func attach(fd, kind int) (file, header, error) {
	var h header
	size, seals, err := sealsOf(fd)
	if err != nil {
		return file{}, h, err
	}
	if seals&(unix.F_SEAL_SHRINK|unix.F_SEAL_GROW) != unix.F_SEAL_SHRINK|unix.F_SEAL_GROW {
		return file{}, h, fmt.Errorf("%w: size not sealed", ErrMemory)
	}
	if size < HeaderSize || size > 1<<40 {
		return file{}, h, ErrLayout
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return file{}, h, fmt.Errorf("shm: mapping: %w", mapLimit(err))
	}
	f := file{fd: -1, mem: mem}
	u32 := func(off int) int { return int(le.Uint32(mem[off:])) }
	h = header{u32(HdrKind), u32(HdrEntries), u32(HdrStride), u32(HdrRings), u32(HdrRingSize), u32(HdrMaxSGE), u32(HdrMaxInline)}
	if le.Uint64(mem[HdrMagic:]) != Magic || u32(HdrVersion) != Version || h.kind != kind || !h.valid(len(mem)) {
		f.Close()
		return file{}, h, ErrLayout
	}
	return f, h, nil
}

// valid checks a header against the size of its memfd and the layout rules.
func (h *header) valid(size int) bool {
	if h.rings < 1 || h.rings > MaxWorkers || h.entries < 1 || size != HeaderSize+h.rings*h.ringSize {
		return false
	}
	if h.kind == KindDoorbells {
		return h.rings == 1 && h.entries <= MaxBells && h.entries%64 == 0 && h.ringSize == PageSize
	}
	most := MaxEntries
	if h.kind == KindCQ {
		most = MaxCQEntries
	}
	if h.entries > most || h.entries&(h.entries-1) != 0 || h.ringSize != ringSize(h.entries, h.stride) {
		return false
	}
	switch h.kind {
	case KindSQ:
		return h.rings == 1 && h.stride == sqStride(h.maxSGE, h.maxInline)
	case KindRQ:
		return h.rings == 1 && h.stride == rqStride(h.maxSGE)
	}
	return h.stride == CQESize
}

// IsMemfd reports whether fd is a memfd, or a file of tmpfs or hugetlbfs, which the kernel implements with the same code. It is safe for
// any fd; on one that is not a memfd, every other system call, even close, may block on the client.
func IsMemfd(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	return err == nil
}

// sealsOf returns the size and seals of a memfd; anything else is an error.
func sealsOf(fd int) (size int64, seals int, err error) {
	seals, err = unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0) // before any other call: see IsMemfd
	if err != nil {
		return 0, 0, fmt.Errorf("%w: not a memfd (%w)", ErrMemory, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, 0, fmt.Errorf("shm: fstat: %w", err)
	}
	return st.Size, seals, nil
}
