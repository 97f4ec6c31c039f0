package link

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/cache"
)

// rxRing is the receive ring of an AF_PACKET socket. It has slots in blocks. The status in a
// slot's header says whether the kernel or the link owns it.
type rxRing struct {
	mem      []byte
	block    int // bytes of a block
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

// openRxRing sets up a ring for frames of up to longest bytes, in about memory bytes, in blocks of
// block bytes.
func openRxRing(fd, longest, block, memory int) (r rxRing, err error) {
	r.block, r.slot = block, (ringHead+longest+unix.TPACKET_ALIGNMENT-1)&^(unix.TPACKET_ALIGNMENT-1)
	r.perBlock = block / r.slot
	blocks := max(min(memory/block, (ringSlots+r.perBlock-1)/r.perBlock), 1)
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
		return r, fmt.Errorf("setsockopt PACKET_VERSION: %w", err)
	}
	if err := unix.SetsockoptTpacketReq(fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
		Block_size: uint32(block), Block_nr: uint32(blocks), Frame_size: uint32(r.slot), Frame_nr: uint32(blocks * r.perBlock),
	}); err != nil {
		return r, fmt.Errorf("setsockopt PACKET_RX_RING: %w", err)
	}
	if r.mem, err = unix.Mmap(fd, 0, blocks*block, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
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
	return r.header()
}

// header returns the header of the next slot, which the kernel has filled.
func (r *rxRing) header() *unix.Tpacket2Hdr {
	return (*unix.Tpacket2Hdr)(unsafe.Pointer(&r.mem[r.at]))
}

// frame returns the frame in the next slot, whose header is h.
func (r *rxRing) frame(h *unix.Tpacket2Hdr) []byte { return r.withRoom(h)[tagLen:] }

// withRoom returns the frame in the next slot, whose header is h, and tagLen bytes before it, which
// may be overwritten.
func (r *rxRing) withRoom(h *unix.Tpacket2Hdr) []byte {
	n := min(int(h.Snaplen), r.slot-int(h.Mac))
	return r.mem[r.at+int(h.Mac)-tagLen:][:max(n, 0)+tagLen]
}

// next returns the slot to the kernel, and goes on to the one after it.
func (r *rxRing) next() {
	r.giveBack()
	r.skip()
}

// skip leaves the slot to its user.
func (r *rxRing) skip() {
	if r.left--; r.left > 0 {
		r.at += r.slot
		return
	}
	r.left = r.perBlock
	if r.at = (r.at/r.block + 1) * r.block; r.at == len(r.mem) {
		r.at = 0
	}
}

// more reports whether the slot after the next one is filled.
func (r *rxRing) more() bool {
	after := *r
	after.skip()
	return after.peek() != nil
}

// index returns the number of the next slot.
func (r *rxRing) index() int { return r.at/r.block*r.perBlock + r.at%r.block/r.slot }

// slots returns the number of slots.
func (r *rxRing) slots() int { return len(r.mem) / r.block * r.perBlock }

// seek makes a slot the next one to read.
func (r *rxRing) seek(slot int) { r.at = slot/r.perBlock*r.block + slot%r.perBlock*r.slot }

// giveBack returns the next slot to the kernel. It may be one that was skipped before.
func (r *rxRing) giveBack() { r.status().Store(unix.TP_STATUS_KERNEL) }

func (r *rxRing) close() error {
	if r.mem == nil {
		return nil
	}
	mem := r.mem
	r.mem = nil
	return unix.Munmap(mem)
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

// pageIn returns a whole page in b, which has at least the length of two.
func pageIn(b []byte) *[cache.PageSize]byte {
	return (*[cache.PageSize]byte)(b[-uintptr(unsafe.Pointer(&b[0]))%cache.PageSize:])
}
