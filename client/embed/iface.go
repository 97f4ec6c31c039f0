package embed

import (
	"fmt"
	"net"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
)

// openInterface opens AF_XDP sockets on every queue of an interface, as the
// daemon does.
func (n *Node) openInterface(cfg *Config, opts *ctrl.Options) ([]dataplane.Queue, error) {
	ifi, err := net.InterfaceByName(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
	}
	resolver, err := hostnet.New(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("embed: %w", err)
	}
	n.closers = append(n.closers, resolver.Close)
	queues, err := xsk.Queues(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
	}
	steer, err := bpf.Load(bpf.Options{Queues: queues})
	if err != nil {
		return nil, fmt.Errorf("embed: %w", err)
	}
	n.closers = append(n.closers, steer.Close)
	fragments, err := steer.Fragments()
	if err != nil {
		return nil, fmt.Errorf("embed: %w", err)
	}
	n.closers = append(n.closers, fragments.Close)
	n.fragments = fragments
	mode, err := steer.Attach(ifi.Index, cfg.XDPMode)
	if err != nil {
		return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
	}
	xmode := xsk.Native
	if mode == bpf.Generic {
		xmode = xsk.Generic
	}
	off, err := xsk.FindOffloads(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
	}
	var out []dataplane.Queue
	for q := range queues {
		sock, err := xsk.Open(xsk.Config{Interface: cfg.Interface, Queue: q, Mode: xmode, Super: off.Segmentation})
		if err != nil {
			return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
		}
		n.closers = append(n.closers, sock.Close)
		if err := steer.SetSocket(q, sock.FD()); err != nil {
			return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
		}
		out = append(out, dataplane.Queue{Link: sock, CPU: -1, PartialChecksums: off.Local})
	}
	opts.Program = steer.Program(ifi.Index, cfg.XDPMode)
	n.addrs = resolver.Addrs()
	opts.Resolver, opts.Addrs, opts.LinkLocal, opts.Steering = resolver, resolver.Addrs, resolver.LinkLocal, steer
	cfg.Ctrl.Interface, cfg.Ctrl.MTU = cfg.Interface, ifi.MTU
	return out, nil
}
