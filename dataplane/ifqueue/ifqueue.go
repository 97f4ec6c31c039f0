// Package ifqueue opens the queues of an interface as Links and steers the claimed frames to
// them. The Links are AF_XDP sockets, or packet sockets where those are faster.
package ifqueue

import (
	"cmp"
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
)

// Kind is the kind of the sockets that receive and send frames.
type Kind uint8

// The kinds.
const (
	// Auto is Packet on virtual interfaces, where each frame is already an skb, if the kernel
	// can steer for packet sockets (Linux 6.6), and XDP otherwise.
	Auto Kind = iota
	// XDP uses AF_XDP sockets.
	XDP
	// Packet uses packet sockets, each with a ring shared with the kernel.
	Packet
)

// ParseKind parses a kind: auto, xdp or packet.
func ParseKind(s string) (Kind, error) {
	switch s {
	case "auto":
		return Auto, nil
	case "xdp":
		return XDP, nil
	case "packet":
		return Packet, nil
	}
	return Auto, errors.New("must be one of auto, xdp, packet")
}

// Config configures Open.
type Config struct {
	Interface string // in the network namespace of the calling thread
	Queues    []int  // one link for each; packet sockets distribute all frames by flow
	Link      Kind
	Mode      bpf.Mode // mode of XDP; Auto uses XDP unless this is bpf.Auto
	MTU       int      // largest IP packet, in bytes; 0 means that of the interface, within the limits of links
	Memory    int      // memory for the frames of each queue, in bytes; 0 means 32 MiB
	Super     bool     // send super-frames if the interface has segmentation offload
	// FellBack, if not nil, is called with the reason if Auto uses XDP although it prefers
	// Packet: the kernel does not support that. A lack of memory or descriptors is an error.
	FellBack func(error)
}

// Set holds the open queues of an interface.
type Set struct {
	Links   []link.Link
	Mode    string // description of how frames move
	Super   bool   // super-frames can be sent
	ByQueue bool   // each link receives only the frames of its queue
	Local   bool   // frames with partial checksums may come

	steer   *bpf.Steering
	ifindex int
}

// QueueError is the reason why a queue cannot be opened.
type QueueError struct {
	Queue int
	Err   error
}

func (e *QueueError) Error() string { return e.Err.Error() }

// Unwrap returns e.Err.
func (e *QueueError) Unwrap() error { return e.Err }

// Open opens the queues and steers frames to them.
func Open(steer *bpf.Steering, cfg Config) (*Set, error) {
	dev, err := netlink.LinkByName(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("ifqueue: interface %s: %w", cfg.Interface, err)
	}
	off, err := xsk.FindOffloads(dev)
	if err != nil {
		return nil, err
	}
	cfg.MTU = cmp.Or(cfg.MTU, link.MTUOn(dev.Attrs().MTU))
	cfg.Memory = cmp.Or(cfg.Memory, xsk.DefaultFrames*xsk.FrameSize)
	cfg.Super = cfg.Super && off.Segmentation
	s := &Set{Local: off.Local, steer: steer, ifindex: dev.Attrs().Index}
	var why error // XDP is used, rather than packet sockets
	if prefersPackets(dev, cfg.Link, cfg.Mode) {
		err = s.openPackets(dev, &cfg)
		if _, busy := errors.AsType[*bpf.BusyError](err); err != nil && !busy && !Short(err) && cfg.Link == Auto {
			why, err = err, s.openXDP(dev, &cfg)
		}
	} else {
		err = s.openXDP(dev, &cfg)
	}
	if err != nil && why != nil {
		err = fmt.Errorf("%w (packet sockets: %v)", err, why)
	}
	if err != nil {
		return nil, err
	}
	if why != nil && cfg.FellBack != nil {
		cfg.FellBack(why)
	}
	return s, nil
}

// Short reports whether err is a lack of memory or descriptors, which may be over when the caller tries again.
func Short(err error) bool {
	return errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.ENOBUFS) ||
		errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// prefersPackets reports whether packet sockets serve an interface, if the kernel can steer for them.
func prefersPackets(dev netlink.Link, kind Kind, mode bpf.Mode) bool {
	return kind == Packet || kind == Auto && mode == bpf.Auto && bpf.Virtual(dev)
}

// Workers returns how many links make use of an interface: AF_XDP needs one for each queue, also for those of a bond whose
// ports come and go, and packet sockets one for each that gets frames.
func Workers(name string, kind Kind, mode bpf.Mode) (int, error) {
	n, err := xsk.Queues(name)
	if err != nil {
		return 0, err
	}
	dev, err := netlink.LinkByName(name)
	if err != nil || !prefersPackets(dev, kind, mode) || kind == Auto && !bpf.HasIngress(dev) {
		return n, nil
	}
	return xsk.BusyQueues(dev, n), nil
}

// openPackets opens packet sockets, and then hides their frames from the kernel.
func (s *Set) openPackets(dev netlink.Link, cfg *Config) error {
	xsk.StopMerging(dev)
	links, err := link.OpenPackets(cfg.Interface, len(cfg.Queues), link.PacketOptions{
		FilterFD: s.steer.TapFD(), SuperFilterFD: s.steer.SuperTapFD(), Whole: true, Super: cfg.Super, MTU: cfg.MTU, Memory: cfg.Memory,
	})
	for _, l := range links {
		s.Links = append(s.Links, l)
		s.Super = l.SuperBytes() > 0
	}
	if err == nil {
		_, err = s.steer.Attach(s.ifindex, bpf.Ingress)
	}
	if err != nil {
		return errors.Join(err, s.Close())
	}
	s.Mode = "packet ring"
	s.Local = true // at least GRO of the kernel, which has verified them, leaves partial checksums
	return nil
}

// openXDP attaches the program and opens a socket for each queue.
func (s *Set) openXDP(dev netlink.Link, cfg *Config) error {
	s.ByQueue = true
	got, err := s.steer.Attach(s.ifindex, cfg.Mode)
	if err != nil {
		return err
	}
	if got == bpf.Generic { // a native program sees frames before they are merged
		xsk.StopMerging(dev)
	}
	for _, q := range cfg.Queues {
		sock, err := xsk.Open(xsk.Config{
			Interface: cfg.Interface, Queue: q, Generic: got == bpf.Generic, MTU: cfg.MTU, Frames: cfg.Memory / xsk.FrameSize, Super: cfg.Super,
		})
		if err != nil {
			return errors.Join(&QueueError{q, err}, s.Close())
		}
		s.Links = append(s.Links, sock)
		if err := s.steer.SetSocket(q, sock.FD()); err != nil {
			return errors.Join(err, s.Close())
		}
		if s.Mode == "" || !sock.ZeroCopy() { // that of the slowest queue
			s.Mode = sock.Taken()
		}
		s.Super = sock.SuperBytes() > 0
	}
	return nil
}

// Close detaches the program from the interface and closes the links.
func (s *Set) Close() error {
	errs := []error{s.steer.Detach(s.ifindex)}
	for _, l := range s.Links {
		errs = append(errs, l.Close())
	}
	s.Links = nil
	return errors.Join(errs...)
}
