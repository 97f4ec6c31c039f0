package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Packet is a Link on an AF_PACKET socket. Frames that fit in a slot arrive in a ring shared
// with the kernel (TPACKET_V2). Longer ones, which are super-frames, arrive in the socket's
// queue, from which the Link copies them.
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
	whole        bool
	ring         rxRing
	small        buffers // each takes a frame of the ring
	large        buffers // each takes a super-frame
	in           scatter
	out          mmsgs
	poll         poller
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
	// packetChunk is the least size of a small RX buffer. A super-frame must fit in MaxPieces
	// of them.
	packetChunk = 4096
	// packetLarge is the number of RX buffers that take a whole super-frame.
	packetLarge = 32
	// packetBurst limits the bytes of one Receive, so that they are still in the cache when
	// they are processed.
	packetBurst = 256 << 10
)

// buffers are RX buffers of one size. first is the ID of the first.
type buffers struct {
	mem   []byte
	size  int
	first int
	free  []uint32 // the most recently used buffer is last
}

func newBuffers(n, size, first int) buffers {
	b := buffers{mem: make([]byte, n*size), size: size, first: first, free: make([]uint32, n)}
	for i := range b.free {
		b.free[i] = uint32(first + n - 1 - i)
	}
	return b
}

// bytes returns the bytes of the buffer id.
func (b *buffers) bytes(id uint32) []byte {
	off := (int(id) - b.first) * b.size
	return b.mem[off : off+b.size : off+b.size]
}

// take adds a buffer to f. One must be free.
func (b *buffers) take(f *Frame) {
	id := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	f.IDs[f.N], f.Pieces[f.N] = uint64(id), b.bytes(id)
	f.N++
}

// PacketOptions are the options of OpenPacketWith.
type PacketOptions struct {
	// Filter is a classic BPF program that selects the frames to receive; nil selects all.
	Filter []unix.SockFilter
	// FilterFD is the descriptor of a BPF program used instead of Filter; 0 if there is none.
	FilterFD int
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
	// 0 means 32 MiB. Whole adds 2 MiB for super-frames.
	Memory int
}

// OpenPackets opens n links on an interface. They share its frames by flow, so that all frames
// of a connection arrive on one of them.
func OpenPackets(ifname string, n int, opts PacketOptions) (links []*Packet, err error) {
	group := -1
	for range n {
		p, err := OpenPacketWith(ifname, opts)
		if err == nil && n > 1 {
			if group, err = p.join(group); err != nil {
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

// join adds the socket to a fanout group, or to a new one if group is -1. It returns the group.
func (p *Packet) join(group int) (int, error) {
	how := unix.PACKET_FANOUT_HASH | unix.PACKET_FANOUT_FLAG_IGNORE_OUTGOING
	if group < 0 {
		if err := unix.SetsockoptInt(p.fd, unix.SOL_PACKET, unix.PACKET_FANOUT, (how|unix.PACKET_FANOUT_FLAG_UNIQUEID)<<16); err != nil {
			return -1, err
		}
		got, err := unix.GetsockoptInt(p.fd, unix.SOL_PACKET, unix.PACKET_FANOUT)
		return got & 0xffff, err
	}
	return group, unix.SetsockoptInt(p.fd, unix.SOL_PACKET, unix.PACKET_FANOUT, how<<16|group)
}

// OpenPacket opens an AF_PACKET link on an interface of the calling thread's
// network namespace. It needs CAP_NET_RAW.
func OpenPacket(ifname string, filter []unix.SockFilter) (*Packet, error) {
	return OpenPacketWith(ifname, PacketOptions{Filter: filter})
}

// OpenPacketWith is OpenPacket with more options.
func OpenPacketWith(ifname string, opts PacketOptions) (*Packet, error) {
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
	if opts.MTU == 0 {
		opts.MTU = ifi.MTU
	}
	if opts.Memory == 0 {
		opts.Memory = packetMemory
	}
	// Protocol 0 receives nothing until the filter is attached.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("needs CAP_NET_RAW: %w", err)
		}
		return nil, err
	}
	longest := opts.MTU + HeaderRoom
	slot := (longest + packetRoom + 63) &^ 63
	p := &Packet{
		txQueue: newTxQueue(opts.Memory/2/slot, slot, packetRing, longest),
		fd:      fd, mtu: opts.MTU, whole: opts.Whole,
	}
	defer func() {
		if err != nil {
			_ = p.Close()
		}
	}()
	chunk := max(packetChunk, (packetHead+longest+63)&^63)
	n := opts.Memory / 2 / chunk
	p.small = newBuffers(n, chunk, 0)
	if opts.Whole {
		p.large = newBuffers(packetLarge, packetHead+HeaderRoom+superBytes, n)
	}
	if opts.FilterFD != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, opts.FilterFD); err != nil {
			return nil, fmt.Errorf("attach filter: %w", err)
		}
	} else if err := p.SetFilter(opts.Filter); err != nil {
		return nil, err
	}
	options := []struct{ name, val int }{{unix.PACKET_IGNORE_OUTGOING, 1}, {unix.PACKET_AUXDATA, 1}}
	if opts.Whole {
		options = append(options, struct{ name, val int }{unix.PACKET_COPY_THRESH, 1})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, o.name, o.val); err != nil {
			return nil, fmt.Errorf("setsockopt %d: %w", o.name, err)
		}
	}
	// Without CAP_NET_ADMIN the limits of net.core apply.
	for _, o := range []struct{ force, plain, val int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, opts.Memory / 2}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, packetSndbuf},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, o.val) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.plain, o.val)
		}
	}
	if p.ring, err = openRxRing(fd, longest, opts.Memory/4); err != nil {
		return nil, err
	}
	if opts.Super {
		// A kernel without support for it gets segments.
		p.SuperSocket, _ = OpenSuper(ifname)
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
	return p, nil
}

// htons converts v to network byte order.
func htons(v uint16) uint16 {
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		return v
	}
	return bits.ReverseBytes16(v)
}

// SetFilter replaces the classic BPF program that selects the frames to receive. nil selects
// all.
func (p *Packet) SetFilter(filter []unix.SockFilter) error {
	if len(filter) == 0 {
		err := unix.SetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("detach filter: %w", err)
		}
		return nil
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(p.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	return nil
}

// FD returns the socket's descriptor, for waiting for several links at once.
func (p *Packet) FD() int { return p.fd }

// MTU is Link.MTU.
func (p *Packet) MTU() int { return p.mtu }

// Receive is Link.Receive. It copies each frame and returns its slot to the kernel at once, so
// that a frame that is kept does not block later ones.
func (p *Packet) Receive(fs []Frame) int {
	n := 0
	for octets := 0; n < len(fs) && octets < packetBurst; {
		h := p.ring.peek()
		if h == nil {
			break
		}
		f := &fs[n]
		f.N = 0
		if !p.room(h, f) {
			p.stats.RxFillEmpty++
			break
		}
		if p.take(h, f) {
			octets += f.Len()
			p.stats.RxFrames++
			p.stats.RxBytes += uint64(f.Len())
			n++
		} else {
			p.Release(f)
		}
		p.ring.next()
	}
	return n
}

// room gives f enough buffers for the frame in a slot. It returns false if too few are free.
func (p *Packet) room(h *unix.Tpacket2Hdr, f *Frame) bool {
	n := 1
	if h.Status&unix.TP_STATUS_COPY != 0 {
		// The length in h is not that of the next frame in the socket's queue if two CPUs
		// deliver frames at once.
		if len(p.large.free) > 0 {
			p.large.take(f)
			return true
		}
		n = (packetHead+HeaderRoom+superBytes-1)/p.small.size + 1
	}
	if len(p.small.free) < n {
		return false
	}
	for range n {
		p.small.take(f)
	}
	return true
}

// take copies the frame in a slot to f. It returns false if the frame is lost.
func (p *Packet) take(h *unix.Tpacket2Hdr, f *Frame) bool {
	f.Pieces[0] = f.Pieces[0][packetHead:]
	tag := vlanTag{h.Status, h.Vlan_tci, h.Vlan_tpid}
	switch {
	case h.Status&unix.TP_STATUS_COPY != 0:
		n, aux, errno := p.in.recv(p.fd, f.Pieces[:f.N])
		if errno != 0 {
			p.stats.RxDropped++
			return false
		}
		tag = vlanTag{aux.status, aux.vlanTCI, aux.vlanTPID}
		if !p.cut(f, n) {
			p.stats.RxInvalid++
			return false
		}
	case h.Snaplen < h.Len && p.whole:
		p.stats.RxRingFull++ // the socket's queue was full
		return false
	case h.Snaplen < h.Len || h.Len < 14:
		p.stats.RxInvalid++
		return false
	default:
		f.Pieces[0] = f.Pieces[0][:copy(f.Pieces[0], p.ring.frame(h))]
	}
	if tag.status&unix.TP_STATUS_VLAN_VALID != 0 {
		p.putTag(f, tag)
	}
	if tag.status&unix.TP_STATUS_CSUMNOTREADY != 0 && !p.whole {
		finishChecksum(f.Pieces[0])
	}
	return true
}

// cut truncates f to n bytes and frees the buffers that it no longer needs. It returns false if
// f is shorter.
func (p *Packet) cut(f *Frame, n int) bool {
	used := 0
	for ; n > 0 && used < f.N; used++ {
		b := f.Pieces[used]
		m := min(n, len(b))
		f.Pieces[used] = b[:m:m]
		n -= m
	}
	for f.N > used {
		f.N--
		p.put(uint32(f.IDs[f.N]))
	}
	return n == 0
}

// vlanTag is a tag that the kernel has removed from a frame.
type vlanTag struct {
	status    uint32 // TP_STATUS_VLAN_VALID and others
	tci, tpid uint16
}

// putTag reinserts the tag in f.
func (p *Packet) putTag(f *Frame, tag vlanTag) {
	whole := p.buffer(uint32(f.IDs[0]))
	const start = packetHead - 4
	b := whole[start : packetHead+len(f.Pieces[0])]
	copy(b[:12], whole[packetHead:packetHead+12])
	if tag.status&unix.TP_STATUS_VLAN_TPID_VALID == 0 {
		tag.tpid = unix.ETH_P_8021Q
	}
	binary.BigEndian.PutUint16(b[12:], tag.tpid)
	binary.BigEndian.PutUint16(b[14:], tag.tci)
	f.Pieces[0] = b[:len(b):len(b)]
}

// pool returns the buffers that id belongs to.
func (p *Packet) pool(id uint32) *buffers {
	if len(p.large.mem) > 0 && int(id) >= p.large.first {
		return &p.large
	}
	return &p.small
}

// buffer returns the bytes of an RX buffer.
func (p *Packet) buffer(id uint32) []byte { return p.pool(id).bytes(id) }

// put frees an RX buffer.
func (p *Packet) put(id uint32) {
	b := p.pool(id)
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
			p.out.set(i, p.octets(&p.queued[i]))
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
	woken = p.poll.wait(timeout, p.fd, wakefd)
	if p.poll.fds[0].Revents&unix.POLLERR != 0 {
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
	err := errors.Join(p.ring.close(), p.SuperSocket.Close(), unix.Close(p.fd))
	p.fd, p.SuperSocket, p.small, p.large = -1, nil, buffers{}, buffers{}
	if err != nil {
		return fmt.Errorf("link: close: %w", err)
	}
	return nil
}
