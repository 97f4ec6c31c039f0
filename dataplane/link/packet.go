package link

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Packet is a Link on an AF_PACKET socket. Frames arrive in a ring shared with the kernel
// (TPACKET_V2). Super-frames, which do not fit in its slots, arrive in the ring of a second socket.
// The first ring has the start of each, which marks its place among the other frames.
//
// The kernel thus copies a super-frame, and frees it, on the CPU of its sender, if that is on this
// machine. A frame that waited in a socket's queue would be freed on the CPU of its receiver, and
// the sender would get other, cold memory for each.
//
// It receives the frames that the filter accepts, from all queues of the interface, before the
// kernel's own stack sees them. The caller must keep the kernel from answering them: with a
// program at tc ingress (bpf.Ingress), or in a test with a kernel socket bound to each claimed
// port and an nftables input chain that drops the port's segments. The kernel sends frames with
// two VLAN tags only if they are eight bytes shorter than the MTU; longer ones are counted in
// TxInvalid.
type Packet struct {
	txQueue
	*SuperSocket // nil if no super-frames are sent
	fd           int
	mtu          int
	ring         rxRing
	supers       *superRing // nil if none are received whole
	small        buffers
	out          mmsgs
	poll         Poller
	stats        Stats
}

var (
	_ Link      = (*Packet)(nil)
	_ Segmenter = (*Packet)(nil)
)

// RxFrames is Link.RxFrames.
func (p *Packet) RxFrames() int { return cap(p.small.free) }

// Sizes of a Packet.
const (
	packetMemory = 32 << 20
	packetRing   = 4096
	packetSndbuf = 4 << 20

	// packetHead is the room before a received frame, into which a VLAN tag that the kernel has
	// removed is reinserted.
	packetHead = 64
	// packetRoom is the room before a frame in a TX slot for its owner.
	packetRoom = 128
	// packetChunk is the least size of an RX buffer. A super-frame must fit in MaxPieces of
	// them.
	packetChunk = 4096
	// packetBurst limits the bytes of one Receive, so that they are still in the cache when
	// they are processed.
	packetBurst = 256 << 10
)

// buffers are the RX buffers. Their IDs are below those of the slots of a superRing.
type buffers struct {
	mem  []byte
	size int
	free []uint32 // the most recently used buffer is last
}

func newBuffers(n, size int) buffers {
	b := buffers{mem: make([]byte, n*size), size: size, free: make([]uint32, n)}
	for i := range b.free {
		b.free[i] = uint32(n - 1 - i)
	}
	return b
}

// take adds a buffer to f, without its first room bytes. One must be free.
func (b *buffers) take(f *Frame, room int) {
	id := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	off := int(id) * b.size
	f.IDs[f.N], f.Pieces[f.N] = uint64(id), b.mem[off+room:off+b.size:off+b.size]
	f.N++
}

// hold copies the frame p to buffers, and makes it f. It returns false if too few are free.
func (b *buffers) hold(f *Frame, p []byte) bool {
	if len(b.free) < MaxPieces {
		return false
	}
	for f.N = 0; len(p) > 0 && f.N < MaxPieces; {
		b.take(f, 0)
		c := f.Pieces[f.N-1]
		n := copy(c, p)
		f.Pieces[f.N-1], p = c[:n:n], p[n:]
	}
	return true
}

// PacketOptions are the options of OpenPacket.
type PacketOptions struct {
	// Filter is a classic BPF program that selects the frames to receive; nil selects all.
	Filter []unix.SockFilter
	// FilterFD is the descriptor of a BPF program used instead of Filter; 0 if there is none.
	// SuperFilterFD is the descriptor of one that selects super-frames alone; Whole needs it. Of
	// these, and of no others, FilterFD must select only the start.
	FilterFD, SuperFilterFD int
	// Promiscuous receives frames for other stations too.
	Promiscuous bool
	// Whole receives frames unchanged: merged segments (GRO, or a sender on this machine) stay
	// one frame, and partial transport checksums of a kernel on this machine stay partial.
	// Otherwise frames longer than the MTU are dropped and counted in RxInvalid, and partial
	// checksums are completed.
	Whole bool
	// Super sends super-frames if the kernel supports them.
	Super bool
	// MTU is the longest IP packet in bytes; 0 means that of the interface.
	MTU int
	// Memory is the memory for frames in bytes, half for received frames and half for TX slots.
	// 0 means 32 MiB. The ring takes up to a quarter more, and Whole an eighth, which is room for
	// 60 super-frames: two windows of 2 MiB. The kernel fills all slots of a ring in turn, so that
	// a longer one takes more of the cache.
	Memory int
}

// OpenPackets opens n links on an interface. They share its frames by flow, so that all frames
// of a connection arrive on one of them.
func OpenPackets(ifname string, n int, opts PacketOptions) (links []*Packet, err error) {
	groups := [2]int{-1, -1}
	for range n {
		p, err := OpenPacket(ifname, opts)
		if err == nil && n > 1 {
			if err = p.join(&groups); err != nil {
				err = errors.Join(fmt.Errorf("link: packet sockets on %s: share flows: %w", ifname, err), p.Close())
			}
		}
		if err != nil {
			for _, p := range links {
				err = errors.Join(err, p.Close())
			}
			return nil, err
		}
		links = append(links, p)
	}
	return links, nil
}

// join adds the sockets to the fanout groups, or to new ones if these are -1.
func (p *Packet) join(groups *[2]int) (err error) {
	if groups[0], err = joinGroup(p.fd, groups[0]); err == nil && p.supers != nil {
		groups[1], err = joinGroup(p.supers.fd, groups[1])
	}
	return err
}

// joinGroup adds a socket to a fanout group, or to a new one if group is -1. It returns the group.
func joinGroup(fd, group int) (int, error) {
	how := unix.PACKET_FANOUT_HASH | unix.PACKET_FANOUT_FLAG_IGNORE_OUTGOING
	if group < 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_FANOUT, (how|unix.PACKET_FANOUT_FLAG_UNIQUEID)<<16); err != nil {
			return -1, err
		}
		got, err := unix.GetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_FANOUT)
		return got & 0xffff, err
	}
	return group, unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_FANOUT, how<<16|group)
}

// OpenPacket opens an AF_PACKET link on an interface of the calling thread's
// network namespace. It needs CAP_NET_RAW.
func OpenPacket(ifname string, opts PacketOptions) (*Packet, error) {
	p, err := openPacket(ifname, opts)
	if err != nil {
		return nil, fmt.Errorf("link: packet socket on %s: %w", ifname, err)
	}
	return p, nil
}

func openPacket(ifname string, opts PacketOptions) (_ *Packet, err error) {
	ifi, err := net.InterfaceByName(ifname)
	if err != nil {
		return nil, err
	}
	opts.MTU = cmp.Or(opts.MTU, ifi.MTU)
	opts.Memory = cmp.Or(opts.Memory, packetMemory)
	fd, err := packetSocket()
	if err != nil {
		return nil, err
	}
	longest := opts.MTU + HeaderRoom
	slot := (longest + packetRoom + 63) &^ 63
	p := &Packet{
		txQueue: newTxQueue(opts.Memory/2/slot, slot, packetRing, longest),
		fd:      fd, mtu: opts.MTU,
	}
	defer func() {
		if err != nil {
			_ = p.Close()
		}
	}()
	chunk := max(packetChunk, (packetHead+longest+63)&^63)
	p.small = newBuffers(opts.Memory/2/chunk, chunk)
	if err := attach(fd, opts.FilterFD, opts.Filter); err != nil {
		return nil, err
	}
	enlargeSndbuf(fd)
	if p.ring, err = openRxRing(fd, longest, ringBlock, opts.Memory/4); err != nil {
		return nil, err
	}
	if opts.Super {
		if p.SuperSocket, err = OpenSuper(ifname); err != nil {
			return nil, err
		}
	}
	if opts.Promiscuous {
		mreq := unix.PacketMreq{Ifindex: int32(ifi.Index), Type: unix.PACKET_MR_PROMISC}
		if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &mreq); err != nil {
			return nil, fmt.Errorf("promiscuous mode: %w", err)
		}
	}
	sa := unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: ifi.Index}
	if err := unix.Bind(fd, &sa); err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	if opts.Whole {
		// The kernel passes a frame first to the socket that was bound last.
		if p.supers, err = openSuperRing(&sa, &opts, longest); err != nil {
			return nil, fmt.Errorf("super-frames: %w", err)
		}
	}
	return p, nil
}

// packetSocket opens a socket that receives nothing until it is bound.
func packetSocket() (int, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.EPERM):
		return -1, fmt.Errorf("needs CAP_NET_RAW: %w", err)
	case err != nil:
		return -1, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("setsockopt PACKET_IGNORE_OUTGOING: %w", err)
	}
	return fd, nil
}

// enlargeSndbuf sets the send buffer. Without CAP_NET_ADMIN the limit of net.core applies.
func enlargeSndbuf(fd int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, packetSndbuf) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, packetSndbuf)
	}
}

// attach attaches the BPF program prog or, if that is 0, the classic filter, if it is not empty.
func attach(fd, prog int, filter []unix.SockFilter) (err error) {
	switch {
	case prog != 0:
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, prog)
	case len(filter) > 0:
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	}
	if err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	return nil
}

// htons converts v to network byte order.
func htons(v uint16) uint16 {
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		return v
	}
	return bits.ReverseBytes16(v)
}

// FD returns the socket's descriptor, for waiting for several links at once.
func (p *Packet) FD() int { return p.fd }

// MTU is Link.MTU.
func (p *Packet) MTU() int { return p.mtu }

// Receive is Link.Receive. It copies frames other than super-frames and returns their slots to the
// kernel at once, so that a frame that is kept does not block later ones.
func (p *Packet) Receive(fs []Frame) int {
	n := 0
	for size := 0; n < len(fs) && size < packetBurst; {
		h := p.ring.peek()
		if h == nil {
			break
		}
		f := &fs[n]
		f.N = 0
		var got outcome
		if h.Snaplen < h.Len {
			got = p.takeSuper(h, f)
		} else {
			got = p.takeFrame(h, f)
		}
		if got == later {
			break
		}
		p.ring.next()
		if got == taken {
			size += f.Len()
			p.stats.RxFrames++
			p.stats.RxBytes += uint64(f.Len())
			n++
		}
	}
	return n
}

// outcome is the result of taking a frame from the ring.
type outcome uint8

const (
	taken outcome = iota
	lost
	later // it stays in the ring
)

// takeFrame copies the next frame of the ring, whose header is h, to f.
func (p *Packet) takeFrame(h *unix.Tpacket2Hdr, f *Frame) outcome {
	switch {
	case h.Len < 14:
		p.stats.RxInvalid++
		return lost
	case len(p.small.free) == 0:
		p.stats.RxFillEmpty++
		return later
	}
	p.small.take(f, packetHead-tagLen)
	b := f.Pieces[0]
	f.Pieces[0] = tagged(b[:tagLen+copy(b[tagLen:], p.ring.frame(h))], h)
	if h.Status&unix.TP_STATUS_CSUMNOTREADY != 0 && p.supers == nil {
		finishChecksum(f.Pieces[0])
	}
	return taken
}

// takeSuper takes the super-frame whose start is the next frame of the ring, with the header h.
func (p *Packet) takeSuper(h *unix.Tpacket2Hdr, f *Frame) outcome {
	s := p.supers
	if s == nil {
		p.stats.RxInvalid++
		return lost
	}
	l := s.find(p.ring.frame(h), h.Len)
	switch {
	case l == nil && s.looks < maxLooks && !p.ring.more():
		s.looks++ // another CPU may be about to store it
		return later
	case l == nil:
		s.looks = 0
		s.missed()
		p.stats.RxRingFull++
		return lost
	}
	s.looks = 0
	if s.kept < len(s.keeps)/4 {
		f.IDs[0], f.Pieces[0], f.N = uint64(p.firstSuper()+s.ring.index()), tagged(s.ring.withRoom(l), l), 1
		s.keep()
		return taken
	}
	// If this one were kept too, it might block the ring.
	if !p.small.hold(f, tagged(s.ring.withRoom(l), l)) {
		p.stats.RxFillEmpty++
		return later
	}
	s.ring.next()
	return taken
}

// tagLen is the length of a VLAN tag.
const tagLen = 4

// tagged returns the frame b[tagLen:]. If the kernel has removed a VLAN tag from it, it reinserts it.
func tagged(b []byte, h *unix.Tpacket2Hdr) []byte {
	if h.Status&unix.TP_STATUS_VLAN_VALID == 0 {
		return b[tagLen:len(b):len(b)]
	}
	tpid := h.Vlan_tpid
	if h.Status&unix.TP_STATUS_VLAN_TPID_VALID == 0 {
		tpid = unix.ETH_P_8021Q
	}
	copy(b[:12], b[tagLen:tagLen+12])
	binary.BigEndian.PutUint16(b[12:], tpid)
	binary.BigEndian.PutUint16(b[14:], h.Vlan_tci)
	return b[:len(b):len(b)]
}

// firstSuper is the ID of the first slot of the ring of super-frames.
func (p *Packet) firstSuper() int { return len(p.small.mem) / p.small.size }

// put frees an RX buffer, or a slot of the ring of super-frames.
func (p *Packet) put(id uint32) {
	if p.fd < 0 {
		return // Close has freed all
	}
	b := &p.small
	if slot := int(id) - p.firstSuper(); slot >= 0 {
		p.supers.giveBack(slot)
		return
	}
	if len(b.free) == cap(b.free) {
		panic("link: frame released twice")
	}
	b.free = append(b.free, id)
}

// finishChecksum completes a transport checksum that a local sender left to the hardware.
func finishChecksum(b []byte) {
	var q pkt.Packet
	if q.Parse(b, len(b)) != nil {
		return
	}
	l4 := b[q.L4Off : q.L4Off+q.L4Len]
	var at int
	switch q.Proto {
	case pkt.ProtoTCP:
		at = 16
	case pkt.ProtoUDP:
		at = 6
	default:
		return // SCTP uses a CRC32c, which Linux completes itself for such devices
	}
	l4[at], l4[at+1] = 0, 0
	binary.BigEndian.PutUint16(l4[at:], pkt.Checksum(pkt.Sum(l4, q.PseudoSum)))
}

// Hold is Link.Hold. It copies a super-frame, since the kernel, which fills the slots in turn, stores none
// from a slot that is kept on. Without memory for the copy the frame stays where it is.
func (p *Packet) Hold(f *Frame) {
	slot := int(f.IDs[0]) - p.firstSuper()
	if f.N == 1 && slot >= 0 && p.small.hold(f, f.Pieces[0]) {
		p.supers.giveBack(slot)
	}
}

// Release is Link.Release.
func (p *Packet) Release(f *Frame) {
	for _, id := range f.IDs[:f.N] {
		p.put(uint32(id))
	}
	f.N = 0
}

// Post is Link.Post.
func (p *Packet) Post(s Slot, off, n int) bool { return p.post(s, off, n, &p.stats) }

// Flush is Link.Flush. The kernel copies each frame at once.
func (p *Packet) Flush() {
	for len(p.queued) > 0 {
		n := min(len(p.queued), batch)
		for i := range n {
			p.out.set(i, p.frameBytes(&p.queued[i]))
		}
		p.stats.Kicks++
		sent, errno := p.out.send(p.fd, n)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			p.stats.TxIncomplete++
			return
		case unix.ENOBUFS:
			// The device has dropped the first frame, as veth does with frames longer than its
			// peer's MTU.
			p.stats.TxErrors++
			p.finish(1)
			continue
		case unix.EMSGSIZE:
			// The first frame is invalid and would be refused again.
			p.stats.TxInvalid++
			p.finish(1)
			continue
		default:
			// The interface is down or removed: frames are lost, as with an unplugged wire.
			p.stats.TxErrors++
			p.finish(n)
			continue
		}
		for i := range sent {
			p.stats.TxFrames++
			p.stats.TxBytes += uint64(p.queued[i].n)
		}
		p.finish(sent)
	}
}

// SendSuper is Segmenter.SendSuper. Frames posted before are sent first.
func (p *Packet) SendSuper(f *Super) bool {
	if p.Flush(); len(p.queued) > 0 || !p.SuperSocket.SendSuper(f) {
		return false
	}
	p.stats.Kicks++
	p.stats.TxFrames++
	p.stats.TxBytes += uint64(f.Len())
	return true
}

// Wait is Link.Wait. While there are unsent frames it sleeps at most a millisecond.
func (p *Packet) Wait(timeout time.Duration, wakefd int) (woken bool) {
	if len(p.queued) > 0 && (timeout < 0 || timeout > time.Millisecond) {
		timeout = time.Millisecond
	}
	if timeout != 0 {
		p.stats.Wakes++
	}
	woken = p.poll.Wait(timeout, p.fd, wakefd)
	if p.poll.events()&unix.POLLERR != 0 {
		// The interface went down. Clear the error, since poll would not sleep otherwise.
		_, _ = unix.GetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	}
	return woken
}

// Stats is Link.Stats. It makes a system call.
func (p *Packet) Stats(s *Stats) {
	p.stats.RxRingFull += packetDrops(p.fd)
	*s = p.stats
}

// Close is Link.Close.
func (p *Packet) Close() error {
	if p.fd < 0 {
		return nil
	}
	err := errors.Join(p.supers.close(), p.ring.close(), p.SuperSocket.Close(), unix.Close(p.fd))
	p.fd, p.SuperSocket, p.supers, p.small = -1, nil, nil, buffers{}
	if err != nil {
		return fmt.Errorf("link: close: %w", err)
	}
	return nil
}
