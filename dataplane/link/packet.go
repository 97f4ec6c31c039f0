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

// Packet is a Link on an AF_PACKET socket. Frames that fit in a slot come by a ring that
// the kernel shares (TPACKET_V2); those that do not, which are super-frames, by the
// socket's queue, from which this Link copies them.
//
// It receives what the filter lets through, of every queue of the interface, before
// the kernel's own stack sees it. The caller keeps that from answering: by a program at
// tc ingress (bpf.Ingress), or in a test by a kernel socket bound to each claimed port
// and an nftables input chain that drops the port's segments. Of a frame with
// two VLAN tags the kernel takes eight bytes less than the MTU: a longer one is
// counted in TxInvalid.
type Packet struct {
	txQueue
	*SuperSocket // nil: no super-frames are sent
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

	// packetHead is free room in front of a received frame, where a VLAN tag
	// that the kernel took out goes back in.
	packetHead = 64
	// packetRoom is what an owner of a TX slot may want in front of a frame.
	packetRoom = 128
	// packetChunk is the least size of a small RX buffer. A super-frame must fit in MaxPieces
	// of them.
	packetChunk = 4096
	// packetLarge is the number of RX buffers that take a whole super-frame.
	packetLarge = 32
	// packetBurst bounds the bytes of one Receive, so that they are still in the cache
	// when they are processed.
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

// PacketOptions are what OpenPacketWith may be told.
type PacketOptions struct {
	// Filter is a classic BPF program that says which frames are received;
	// nil: all.
	Filter []unix.SockFilter
	// FilterFD is the descriptor of a BPF program instead; 0: none.
	FilterFD int
	// Promiscuous receives frames for other stations too.
	Promiscuous bool
	// Whole receives frames as the kernel has them: merged segments (GRO, or a sender on
	// this machine) as one frame, and transport checksums that a kernel on this machine
	// has left undone as they are. Without it a frame longer than the MTU is dropped and
	// counted in RxInvalid, and those checksums are finished.
	Whole bool
	// Super sends super-frames, if the kernel takes them.
	Super bool
	// MTU is the longest IP packet; 0: that of the interface.
	MTU int
	// Memory is the memory for frames in bytes, half for received frames and half for TX slots.
	// 0 means 32 MiB. Whole adds 2 MiB for super-frames.
	Memory int
}

// OpenPackets opens n links on an interface that share its frames by flow, so that all
// frames of a connection come by one of them.
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

// join joins a group of sockets; -1 makes a new one. It returns the group.
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
	// Protocol 0: nothing is received before the filter is in place.
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
		// A kernel that has none of it gets segments.
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

// htons returns v so that it lies in memory in network order.
func htons(v uint16) uint16 {
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		return v
	}
	return bits.ReverseBytes16(v)
}

// SetFilter replaces the classic BPF program that chooses what is received. Nil
// receives everything.
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

// FD is the socket's descriptor, to wait for several links at once.
func (p *Packet) FD() int { return p.fd }

// MTU is Link.MTU.
func (p *Packet) MTU() int { return p.mtu }

// Receive is Link.Receive. A slot of the ring is the kernel's again when its frame has
// been copied, so that one that is kept holds up none behind it.
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

// take copies the frame in a slot to f. It reports false if the frame is lost.
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

// cut makes f as long as n bytes, if it has so many, and takes back the chunks that it
// does not need.
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

// vlanTag is a tag that the kernel took out of a frame.
type vlanTag struct {
	status    uint32 // TP_STATUS_VLAN_VALID and others
	tci, tpid uint16
}

// putTag puts the tag back into f.
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

// finishChecksum writes the transport checksum of a frame that a local sender
// left to the hardware.
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
		return // SCTP's is a CRC32c; Linux finishes it itself for devices like these
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
			// The first frame is refused, and would be again.
			p.stats.TxInvalid++
			p.finish(1)
			continue
		default:
			// The interface is down or gone: frames are lost, as on a wire
			// that was pulled.
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

// SendSuper is Segmenter.SendSuper. What was posted before leaves first.
func (p *Packet) SendSuper(f *Super) bool {
	if p.Flush(); len(p.queued) > 0 || !p.SuperSocket.SendSuper(f) {
		return false
	}
	p.stats.Kicks++
	p.stats.TxFrames++
	p.stats.TxBytes += uint64(f.Len())
	return true
}

// Wait is Link.Wait. While frames could not be sent it sleeps a millisecond at
// most.
func (p *Packet) Wait(timeout time.Duration, wakefd int) (woken bool) {
	if len(p.queued) > 0 && (timeout < 0 || timeout > time.Millisecond) {
		timeout = time.Millisecond
	}
	if timeout != 0 {
		p.stats.Wakes++
	}
	woken = p.poll.wait(timeout, p.fd, wakefd)
	if p.poll.fds[0].Revents&unix.POLLERR != 0 {
		// The interface went down. The error is read, or poll would not sleep any more.
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
