package xsk

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ringMem is a ring in memory shared with the kernel. The index that is not ours is
// written by the kernel only.
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

// ring is the ring of n entries of size bytes each that m shows.
func (m mapping) ring(off *unix.XDPRingOffset, n int, size uintptr) (ringMem, error) {
	if need := off.Desc + uint64(n)*uint64(size); need > uint64(m.length) {
		return ringMem{}, fmt.Errorf("the mapping of the ring at %#x has %d bytes, and the ring %d", m.pgoff, m.length, need)
	}
	base := *(*unsafe.Pointer)(unsafe.Pointer(&m.addr)) // not the collector's memory
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

// unmap unmaps m, for which there is no Go slice of ours.
func (m mapping) unmap() error {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, m.addr, m.length, 0); errno != 0 {
		return fmt.Errorf("munmap: %w", errno)
	}
	return nil
}
