package link

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// batch is how many frames one system call moves at most.
const batch = 64

// auxSpace is room for the control message PACKET_AUXDATA.
const auxSpace = 64

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

// mmsgs are the arguments of recvmmsg and sendmmsg, kept so that no call
// allocates.
type mmsgs struct {
	msg [batch]mmsghdr
	iov [batch]unix.Iovec
	aux [batch][auxSpace]byte
}

// set makes message i the buffer b, with room for auxiliary data when receiving.
func (m *mmsgs) set(i int, b []byte, aux bool) {
	m.iov[i].Base = unsafe.SliceData(b)
	m.iov[i].SetLen(len(b))
	h := &m.msg[i].hdr
	*h = unix.Msghdr{Iov: &m.iov[i]}
	h.SetIovlen(1)
	if aux {
		h.Control = &m.aux[i][0]
		h.SetControllen(auxSpace)
	}
	m.msg[i].n = 0
}

// recv receives up to n messages without blocking.
func (m *mmsgs) recv(fd, n int) (int, unix.Errno) {
	// MSG_TRUNC in the call makes the lengths those of the frames, also of
	// frames that do not fit.
	r, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.msg[0])), uintptr(n), unix.MSG_DONTWAIT|unix.MSG_TRUNC, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(r), 0
}

// send sends up to n messages without blocking.
func (m *mmsgs) send(fd, n int) (int, unix.Errno) {
	r, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.msg[0])), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(r), 0
}

// auxdata returns the auxiliary data of received message i (struct
// tpacket_auxdata), false when there is none.
func (m *mmsgs) auxdata(i int) (a auxdata, ok bool) {
	h := &m.msg[i].hdr
	const want = unix.SizeofCmsghdr + unsafe.Sizeof(a)
	if uintptr(h.Controllen) < want {
		return a, false
	}
	c := (*unix.Cmsghdr)(unsafe.Pointer(&m.aux[i]))
	if c.Level != unix.SOL_PACKET || c.Type != unix.PACKET_AUXDATA {
		return a, false
	}
	return *(*auxdata)(unsafe.Pointer(&m.aux[i][unix.CmsgLen(0)])), true
}

// auxdata is struct tpacket_auxdata.
type auxdata struct {
	status, len, snaplen uint32
	mac, net             uint16
	vlanTCI, vlanTPID    uint16
}

// packetDrops reads, and so resets, the count of frames that an AF_PACKET socket
// had no room for.
func packetDrops(fd int) uint64 {
	var st struct{ packets, drops uint32 }
	n := uint32(unsafe.Sizeof(st))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS, uintptr(unsafe.Pointer(&st)), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return 0
	}
	return uint64(st.drops)
}
