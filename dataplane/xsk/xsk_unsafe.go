package xsk

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ringMem is a ring shared with the kernel. Only the kernel writes the other side's index.
type ringMem struct {
	prod, cons, flag *atomic.Uint32
	entries          unsafe.Pointer
	n                uint32
}

// Bytes of a ring's entry.
const (
	descSize = unsafe.Sizeof(unix.XDPDesc{})
	addrSize = unsafe.Sizeof(uint64(0))
)

// mmapOffsets queries the offsets of the rings' parts in their mappings.
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

// ring returns the ring of n entries of size bytes each in m.
func (m mapping) ring(off *unix.XDPRingOffset, n int, size uintptr) (ringMem, error) {
	if need := off.Desc + uint64(n)*uint64(size); need > uint64(m.length) {
		return ringMem{}, fmt.Errorf("the mapping of the ring at %#x has %d bytes, and the ring %d", m.pgoff, m.length, need)
	}
	base := *(*unsafe.Pointer)(unsafe.Pointer(&m.addr)) // not memory of the garbage collector
	at := func(o uint64) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Add(base, o)) }
	return ringMem{
		n: uint32(n), prod: at(off.Producer), cons: at(off.Consumer), flag: at(off.Flags),
		entries: unsafe.Add(base, off.Desc),
	}, nil
}

// descs views the entries of an RX or TX ring.
func (r *ringMem) descs() []unix.XDPDesc {
	return unsafe.Slice((*unix.XDPDesc)(r.entries), r.n)
}

// addrs views the entries of a fill or completion ring.
func (r *ringMem) addrs() []uint64 { return unsafe.Slice((*uint64)(r.entries), r.n) }

// kick makes the kernel send the frames in the TX ring. It does not block, so RawSyscall is
// used, which does not involve the scheduler.
func kick(fd int) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
	return errno
}

// kickRx makes the driver check the fill ring.
func kickRx(fd int) {
	_, _, _ = unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
}

// unmap unmaps m, which is not a Go slice.
func (m mapping) unmap() error {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, m.addr, m.length, 0); errno != 0 {
		return fmt.Errorf("munmap: %w", errno)
	}
	return nil
}
