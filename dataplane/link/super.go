package link

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// MaxSuper is the maximum number of segments of a super-frame.
const MaxSuper = 64

// superBytes is the length of the longest IP packet of a super-frame, limited by the length
// field of IPv4.
const superBytes = 0xffff

// Super is a super-frame: consecutive TCP segments of one connection, with equal headers, that
// are sent as one packet. It may stay one packet up to the receiver. A link that cannot carry
// it splits it into its segments (TCP segmentation offload by a NIC or by the kernel).
type Super struct {
	// Parts are the bytes of the packet, at most 1+MaxSuper pieces. The first one begins with all
	// headers. The lengths in the IP header are those of the whole packet, and the TCP checksum is
	// the sum of its pseudo-header.
	Parts  [][]byte
	TCPOff int // offset of the TCP header in Parts[0]
	HdrLen int // length of all headers
	Size   int // payload bytes of each segment; the last one may have fewer
	V6     bool
}

// Len returns the number of bytes.
func (s *Super) Len() int {
	n := 0
	for _, p := range s.Parts {
		n += len(p)
	}
	return n
}

// cut calls emit with each segment of s as a separate frame, as TCP segmentation offload makes
// it. The frame is valid until emit returns.
func (s *Super) cut(emit func(frame []byte)) {
	var p pkt.Packet
	if p.Parse(s.Parts[0], s.Len()) != nil {
		return
	}
	be := binary.BigEndian
	whole := bytes.Join(s.Parts, nil)
	head, payload := whole[:s.HdrLen], whole[s.HdrLen:]
	seq, id := be.Uint32(head[s.TCPOff+4:]), be.Uint16(head[p.L3Off+4:])
	b := make([]byte, 0, s.HdrLen+s.Size)
	for i := 0; len(payload) > 0; i++ {
		n := min(s.Size, len(payload))
		b = append(append(b[:0], head...), payload[:n]...)
		payload = payload[n:]
		ip, l4 := b[p.L3Off:s.TCPOff], b[s.TCPOff:]
		if s.V6 {
			be.PutUint16(ip[4:], uint16(len(b)-p.L3Off-40))
		} else {
			be.PutUint16(ip[2:], uint16(len(b)-p.L3Off))
			be.PutUint16(ip[4:], id+uint16(i))
			be.PutUint16(ip[10:], 0)
			be.PutUint16(ip[10:], pkt.Checksum(pkt.Sum(ip, 0)))
		}
		be.PutUint32(l4[4:], seq+uint32(i*s.Size))
		if len(payload) > 0 {
			l4[13] &^= 1 | 8 // only the last segment has FIN and PSH
		}
		l4[16], l4[17] = 0, 0
		var q pkt.Packet
		if q.Parse(b, len(b)) == nil {
			be.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, q.PseudoSum)))
		}
		emit(b)
	}
}

// Segmenter is a Link that may accept super-frames.
type Segmenter interface {
	// SuperBytes returns the length of the longest IP packet of a super-frame, or 0 if the link
	// accepts none.
	SuperBytes() int
	// SendSuper sends s after all frames posted before, and copies its bytes. It returns false
	// if it does not accept s; the segments must then be posted one by one.
	SendSuper(s *Super) bool
}

// SuperSocket sends super-frames through an AF_PACKET socket, from which the kernel handles
// them like those of its own TCP. Like a Link it is for one goroutine.
type SuperSocket struct {
	fd   int
	addr unix.RawSockaddrLinklayer
	out  superMsg
}

// Values of struct virtio_net_hdr (linux/virtio_net.h).
const (
	vnetHdrLen    = 10
	vnetNeedsCsum = 1
	vnetGSOTCPv4  = 1
	vnetGSOTCPv6  = 4
)

// OpenSuper opens a SuperSocket on an interface of the calling thread's network namespace. It
// needs CAP_NET_RAW, and fails if the kernel does not support super-frames.
func OpenSuper(ifname string) (*SuperSocket, error) {
	s, err := openSuper(ifname)
	if err != nil {
		return nil, fmt.Errorf("link: super-frames on %s: %w", ifname, err)
	}
	return s, nil
}

func openSuper(ifname string) (*SuperSocket, error) {
	ifi, err := net.InterfaceByName(ifname)
	if err != nil {
		return nil, err
	}
	// Protocol 0 receives nothing.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	s := &SuperSocket{fd: fd, addr: unix.RawSockaddrLinklayer{Family: unix.AF_PACKET, Ifindex: int32(ifi.Index), Halen: 6}}
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("setsockopt PACKET_VNET_HDR: %w", err)
	}
	enlargeSndbuf(fd)
	return s, nil
}

// SuperBytes is Segmenter.SuperBytes. It is 0 for a nil SuperSocket.
func (s *SuperSocket) SuperBytes() int {
	if s == nil {
		return 0
	}
	return superBytes
}

// SendSuper is Segmenter.SendSuper. It never sleeps.
func (s *SuperSocket) SendSuper(f *Super) bool {
	h := &s.out.hdr
	h[0], h[1] = vnetNeedsCsum, vnetGSOTCPv4
	s.addr.Protocol = htons(unix.ETH_P_IP)
	if f.V6 {
		h[1] = vnetGSOTCPv6
		s.addr.Protocol = htons(unix.ETH_P_IPV6)
	}
	binary.NativeEndian.PutUint16(h[2:], uint16(f.HdrLen))
	binary.NativeEndian.PutUint16(h[4:], uint16(f.Size))
	binary.NativeEndian.PutUint16(h[6:], uint16(f.TCPOff))
	binary.NativeEndian.PutUint16(h[8:], 16) // offset of the checksum in the TCP header
	return s.out.send(s.fd, &s.addr, f.Parts) == 0
}

// Close closes the socket. It may be called on a nil SuperSocket.
func (s *SuperSocket) Close() error {
	if s == nil {
		return nil
	}
	return unix.Close(s.fd)
}
