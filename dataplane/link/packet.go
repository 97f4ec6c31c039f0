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

// Packet is a Link on an AF_PACKET socket, for machines without AF_XDP. It sees
// every queue of the interface.
//
// The kernel's own stack sees each frame too, and would answer with RST or ICMP
// where it knows no socket. The caller prevents that: it binds a kernel socket
// to each claimed port, and drops the port's segments in an nftables input
// chain, which a packet socket does not mind. Receive offloads that merge
// segments (GRO, LRO) must be off, for a merged frame is longer than the MTU:
// it is dropped and counted in RxInvalid. Checksums that the kernel left
// unfinished, as it does for a local sender, are finished here. Of a frame with
// two VLAN tags the kernel takes eight bytes less than the MTU: a longer one is
// counted in TxInvalid.
type Packet struct {
	txQueue
	fd    int
	mtu   int
	rx    []byte // arena of RX buffers
	rxLen int
	free  []uint32
	in    mmsgs
	out   mmsgs
	ids   [batch]uint32
	poll  poller
	stats Stats
}

var _ Link = (*Packet)(nil)

// RxFrames is Link.RxFrames.
func (p *Packet) RxFrames() int { return packetFrames }

// Sizes of a Packet. RX buffers are many because TCP may hold frames that are
// ahead of order.
const (
	packetSlots  = 2048
	packetFrames = 4096
	packetRing   = 1024
	packetSndbuf = 4 << 20
	packetRcvbuf = 32 << 20

	// packetHead is free room in front of a received frame, where a VLAN tag
	// that the kernel took out goes back in.
	packetHead = 64
)

// PacketOptions are what OpenPacketWith may be told.
type PacketOptions struct {
	// Filter is a classic BPF program that says which frames are received;
	// nil: all.
	Filter []unix.SockFilter
	// Promiscuous receives frames for other stations too.
	Promiscuous bool
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
	// Protocol 0: nothing is received before the filter is in place.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("needs CAP_NET_RAW: %w", err)
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	size := (packetHead + ifi.MTU + HeaderRoom + 63) &^ 63
	p := &Packet{
		txQueue: newTxQueue(packetSlots, size, packetRing, ifi.MTU+HeaderRoom),
		fd:      fd, mtu: ifi.MTU,
		rx: make([]byte, packetFrames*size), rxLen: size,
		free: make([]uint32, packetFrames),
	}
	for i := range p.free {
		p.free[i] = uint32(packetFrames - 1 - i)
	}
	if err := p.SetFilter(opts.Filter); err != nil {
		return nil, err
	}
	for _, o := range []struct{ name, val int }{{unix.PACKET_IGNORE_OUTGOING, 1}, {unix.PACKET_AUXDATA, 1}} {
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, o.name, o.val); err != nil {
			return nil, fmt.Errorf("setsockopt %d: %w", o.name, err)
		}
	}
	// Without CAP_NET_ADMIN the limits of net.core apply.
	for _, o := range []struct{ force, plain, val int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, packetRcvbuf}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, packetSndbuf},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, o.val) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.plain, o.val)
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

// Receive is Link.Receive.
func (p *Packet) Receive(fs []Frame) int {
	n := min(len(fs), batch, len(p.free))
	if n == 0 {
		if len(fs) > 0 {
			p.stats.RxFillEmpty++
		}
		return 0
	}
	for i := range n {
		id := p.free[len(p.free)-1-i]
		p.ids[i] = id
		p.in.set(i, p.buffer(id)[packetHead:], true)
	}
	got, errno := p.in.recv(p.fd, n)
	if errno != 0 {
		if errno != unix.EAGAIN && errno != unix.EINTR {
			p.stats.TxErrors++
		}
		return 0
	}
	p.free = p.free[:len(p.free)-got]
	kept := 0
	for i := range got {
		if b := p.frame(i); b != nil {
			f := &fs[kept]
			f.N, f.Pieces[0], f.IDs[0] = 1, b, uint64(p.ids[i])
			p.stats.RxFrames++
			p.stats.RxBytes += uint64(len(b))
			kept++
			continue
		}
		p.stats.RxInvalid++
		p.free = append(p.free, p.ids[i])
	}
	return kept
}

// buffer returns the bytes of an RX buffer.
func (p *Packet) buffer(id uint32) []byte {
	off := int(id) * p.rxLen
	return p.rx[off : off+p.rxLen : off+p.rxLen]
}

// frame returns the bytes of received message i, with its VLAN tag back in
// place and its checksum finished, or nil when it was truncated.
func (p *Packet) frame(i int) []byte {
	b := p.buffer(p.ids[i])
	n := int(p.in.msg[i].n)
	if n < 14 || n > len(b)-packetHead {
		return nil
	}
	start := packetHead
	aux, ok := p.in.auxdata(i)
	if ok && aux.status&unix.TP_STATUS_VLAN_VALID != 0 {
		start -= 4
		n += 4
		copy(b[start:start+12], b[packetHead:packetHead+12])
		tpid := uint16(unix.ETH_P_8021Q)
		if aux.status&unix.TP_STATUS_VLAN_TPID_VALID != 0 {
			tpid = aux.vlanTPID
		}
		binary.BigEndian.PutUint16(b[start+12:], tpid)
		binary.BigEndian.PutUint16(b[start+14:], aux.vlanTCI)
	}
	b = b[start : start+n : start+n]
	if ok && aux.status&unix.TP_STATUS_CSUMNOTREADY != 0 {
		finishChecksum(b)
	}
	return b
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
	if f.N == 0 || len(p.free) == cap(p.free) {
		panic("link: frame released twice")
	}
	f.N = 0
	p.free = append(p.free, uint32(f.IDs[0]))
}

// Post is Link.Post.
func (p *Packet) Post(s Slot, off, n int) bool { return p.post(s, off, n, &p.stats) }

// Flush is Link.Flush. The kernel copies each frame at once.
func (p *Packet) Flush() {
	for len(p.queued) > 0 {
		n := min(len(p.queued), batch)
		for i := range n {
			p.out.set(i, p.octets(&p.queued[i]), false)
		}
		p.stats.Kicks++
		sent, errno := p.out.send(p.fd, n)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN, unix.ENOBUFS:
			p.stats.TxIncomplete++
			return
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

// Wait is Link.Wait. While frames could not be sent it sleeps a millisecond at
// most.
func (p *Packet) Wait(timeout time.Duration, wakefd int) (woken bool) {
	if len(p.queued) > 0 && (timeout < 0 || timeout > time.Millisecond) {
		timeout = time.Millisecond
	}
	if timeout != 0 {
		p.stats.Wakes++
	}
	return p.poll.wait(timeout, p.fd, wakefd)
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
	err := unix.Close(p.fd)
	p.fd = -1
	if err != nil {
		return fmt.Errorf("link: close: %w", err)
	}
	return nil
}
