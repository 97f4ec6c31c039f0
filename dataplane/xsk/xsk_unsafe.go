package xsk

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ringMem is a ring of the kernel's, mapped. The index that is not ours is
// written by the kernel only.
type ringMem struct {
	mem              []byte
	prod, cons, flag *atomic.Uint32
	entries          unsafe.Pointer
	n                uint32
}

// Octets of a ring's entry.
const (
	descSize = unsafe.Sizeof(unix.XDPDesc{})
	addrSize = unsafe.Sizeof(uint64(0))
)

// mmapOffsets asks where in their mappings the parts of the rings lie.
func mmapOffsets(fd int) (off unix.XDPMmapOffsets, err error) {
	err = getsockopt(fd, unix.XDP_MMAP_OFFSETS, unsafe.Pointer(&off), unsafe.Sizeof(off))
	if err != nil {
		return off, fmt.Errorf("getsockopt XDP_MMAP_OFFSETS: %w", err)
	}
	return off, nil
}

// kernelStats reads the socket's counters.
func kernelStats(fd int) (st unix.XDPStatistics, err error) {
	err = getsockopt(fd, unix.XDP_STATISTICS, unsafe.Pointer(&st), unsafe.Sizeof(st))
	return st, err
}

func getsockopt(fd, opt int, val unsafe.Pointer, size uintptr) error {
	n := uint32(size)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_XDP, uintptr(opt), uintptr(val), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// mapRing maps a ring of n entries of size octets each.
func mapRing(fd int, pgoff int64, off *unix.XDPRingOffset, n int, size uintptr) (ringMem, error) {
	length := off.Desc + uint64(n)*uint64(size)
	mem, err := unix.Mmap(fd, pgoff, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return ringMem{}, fmt.Errorf("mmap ring at %#x: %w", pgoff, err)
	}
	base := unsafe.Pointer(unsafe.SliceData(mem))
	at := func(o uint64) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Add(base, o)) }
	return ringMem{
		mem: mem, n: uint32(n),
		prod: at(off.Producer), cons: at(off.Consumer), flag: at(off.Flags),
		entries: unsafe.Add(base, off.Desc),
	}, nil
}

// descs views the entries of an RX or TX ring.
func (r *ringMem) descs() []unix.XDPDesc {
	return unsafe.Slice((*unix.XDPDesc)(r.entries), r.n)
}

// addrs views the entries of a fill or completion ring.
func (r *ringMem) addrs() []uint64 { return unsafe.Slice((*uint64)(r.entries), r.n) }

func (r *ringMem) unmap() error {
	if r.mem == nil {
		return nil
	}
	mem := r.mem
	*r = ringMem{}
	return unix.Munmap(mem)
}

// kick asks the kernel to send what is in the TX ring. It does not block, so
// the scheduler need not know: RawSyscall keeps the P.
func kick(fd int) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
	return errno
}

// kickRx asks the driver to look at the fill ring.
func kickRx(fd int) {
	_, _, _ = unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
}

// munmapRange unmaps pages that no Go slice of ours stands for.
func munmapRange(addr, length uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, addr, length, 0); errno != 0 {
		return errno
	}
	return nil
}
