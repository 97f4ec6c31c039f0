package embed

import (
	"fmt"
	"net"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
)

// openInterface opens every queue of an interface, as the daemon does.
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
	n.fragments = map[string]dataplane.FragmentSource{cfg.Interface: fragments}
	all := make([]int, queues)
	for q := range all {
		all[q] = q
	}
	set, err := ifqueue.Open(steer, ifqueue.Config{Interface: cfg.Interface, Queues: all, Link: cfg.LinkKind, Mode: cfg.XDPMode, Super: true})
	if err != nil {
		return nil, fmt.Errorf("embed: interface %s: %w", cfg.Interface, err)
	}
	n.closers = append(n.closers, set.Close)
	var out []dataplane.Queue
	for _, l := range set.Links {
		out = append(out, dataplane.Queue{Link: l, Device: cfg.Interface, CPU: -1, PartialChecksums: set.Local})
	}
	dev := resolver.Device(cfg.Interface)
	n.addrs = dev.Addrs()
	opts.Resolver = resolver
	opts.Devices = []ctrl.Device{{
		Name: cfg.Interface, MTU: link.MTUOn(ifi.MTU), PresentMTU: dev.MTU, Addrs: dev.Addrs, LinkLocal: dev.LinkLocal, Index: dev.Index, VLANs: dev.VLANs,
		Steering: steer, Program: steer.Program(ifi.Index, cfg.XDPMode),
	}}
	return out, nil
}
