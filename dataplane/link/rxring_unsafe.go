package link

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rxRing is the receive ring of an AF_PACKET socket. It has slots in blocks. The status in a
// slot's header says whether the kernel or the link owns it.
type rxRing struct {
	mem      []byte
	slot     int // bytes of a slot
	perBlock int // slots
	at       int // offset of the next slot to read
	left     int // slots left in its block, including it
}

// Sizes of an rxRing.
const (
	ringBlock = 64 << 10
	// ringHead is the space before a frame in its slot, for the header, the sender's address
	// and padding.
	ringHead = 80
	// ringSlots is the number of slots of a ring that can hold a window of 2 MiB in segments of
	// 1500 bytes, and more.
	ringSlots = 2048
)

// openRxRing sets up a ring for frames of up to longest bytes, in about memory bytes.
func openRxRing(fd, longest, memory int) (r rxRing, err error) {
	r.slot = (ringHead + longest + unix.TPACKET_ALIGNMENT - 1) &^ (unix.TPACKET_ALIGNMENT - 1)
	r.perBlock = ringBlock / r.slot
	blocks := max(min(memory/ringBlock, (ringSlots+r.perBlock-1)/r.perBlock), 1)
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
		return r, fmt.Errorf("setsockopt PACKET_VERSION: %w", err)
	}
	if err := unix.SetsockoptTpacketReq(fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
		Block_size: ringBlock, Block_nr: uint32(blocks), Frame_size: uint32(r.slot), Frame_nr: uint32(blocks * r.perBlock),
	}); err != nil {
		return r, fmt.Errorf("setsockopt PACKET_RX_RING: %w", err)
	}
	if r.mem, err = unix.Mmap(fd, 0, blocks*ringBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return r, fmt.Errorf("map the ring: %w", err)
	}
	r.left = r.perBlock
	return r, nil
}

// status returns the status of the next slot to read.
func (r *rxRing) status() *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&r.mem[r.at])) }

// peek returns the header of the next slot, or nil if the kernel has not filled it.
func (r *rxRing) peek() *unix.Tpacket2Hdr {
	if r.status().Load()&unix.TP_STATUS_USER == 0 {
		return nil
	}
	return (*unix.Tpacket2Hdr)(unsafe.Pointer(&r.mem[r.at]))
}

// frame returns the frame in the next slot, whose header is h.
func (r *rxRing) frame(h *unix.Tpacket2Hdr) []byte {
	n := min(int(h.Snaplen), r.slot-int(h.Mac))
	return r.mem[r.at+int(h.Mac):][:max(n, 0)]
}

// next returns the slot to the kernel.
func (r *rxRing) next() {
	r.status().Store(unix.TP_STATUS_KERNEL)
	if r.left--; r.left > 0 {
		r.at += r.slot
		return
	}
	r.left = r.perBlock
	if r.at = (r.at/ringBlock + 1) * ringBlock; r.at == len(r.mem) {
		r.at = 0
	}
}

func (r *rxRing) close() error {
	if r.mem == nil {
		return nil
	}
	mem := r.mem
	r.mem = nil
	return unix.Munmap(mem)
}

// scatter holds the arguments of recvmsg, so that calls do not allocate.
type scatter struct {
	msg unix.Msghdr
	iov [MaxPieces]unix.Iovec
	aux [auxSpace]byte
}

// auxSpace is the space for the control message PACKET_AUXDATA.
const auxSpace = 64

// auxdata is struct tpacket_auxdata.
type auxdata struct {
	status, len, snaplen uint32
	mac, net             uint16
	vlanTCI, vlanTPID    uint16
}

// errNoAux means that the kernel did not send the PACKET_AUXDATA of a frame.
const errNoAux = unix.EBADMSG

// recv receives a frame from the socket's queue into pieces, without blocking. It returns the
// length of the frame, which may exceed the pieces.
func (s *scatter) recv(fd int, pieces [][]byte) (n int, aux auxdata, errno unix.Errno) {
	for i, b := range pieces {
		s.iov[i].Base = unsafe.SliceData(b)
		s.iov[i].SetLen(len(b))
	}
	s.msg = unix.Msghdr{Iov: &s.iov[0], Control: &s.aux[0]}
	s.msg.SetIovlen(len(pieces))
	s.msg.SetControllen(auxSpace)
	for {
		r, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.msg)), unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return 0, aux, errno
		}
		n = int(r)
		break
	}
	c := (*unix.Cmsghdr)(unsafe.Pointer(&s.aux))
	if uintptr(s.msg.Controllen) < unix.SizeofCmsghdr+unsafe.Sizeof(aux) || c.Level != unix.SOL_PACKET || c.Type != unix.PACKET_AUXDATA {
		return 0, aux, errNoAux
	}
	return n, *(*auxdata)(unsafe.Pointer(&s.aux[unix.CmsgLen(0)])), 0
}

// packetDrops reads and resets the number of frames that did not fit in the buffers of an
// AF_PACKET socket.
func packetDrops(fd int) uint64 {
	var st struct{ packets, drops uint32 }
	n := uint32(unsafe.Sizeof(st))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS, uintptr(unsafe.Pointer(&st)), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return 0
	}
	return uint64(st.drops)
}
