package main

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
)

// instead names the transport without the requirements of AF_XDP.
const instead = "or use kernel sockets, which need no privileges: --transport socket"

// lower is what a transport provides to the daemon.
type lower struct {
	name    string // interface name shown to clients
	mtu     int
	options ctrl.Options
	// open opens a link for each worker. fragments may be nil.
	open func() (queues []dataplane.Queue, fragments dataplane.FragmentSource, err error)
}

// prepareAFXDP checks the interface and loads the XDP program, which open attaches.
func (d *daemon) prepareAFXDP() (l lower, err error) {
	s := d.s
	ifi, err := findInterface(s.Interface)
	if err != nil {
		return l, err
	}
	if err := checkCapabilities("/proc/self/status"); err != nil {
		return l, err
	}
	have, err := xsk.Queues(ifi.Name)
	if err != nil {
		return l, exitErr(exitInterface, "interface %s: %w", ifi.Name, err)
	}
	queues, err := checkQueues(ifi.Name, s.Queues, have)
	if err != nil {
		return l, err
	}
	if err := checkFiles(openFiles(), len(queues), s.Slots.Count); err != nil {
		return l, err
	}
	if err := checkCPUs(s.CPUs, len(queues)); err != nil {
		return l, err
	}
	if why := leftOut(ifi.Name, queues, have); why != "" {
		d.log.Warn(why, zap.Ints("served", queues), zap.Int("queues", have))
	}
	resolver, err := hostnet.New(ifi.Name)
	if err != nil {
		return l, exitErr(exitInterface, "interface %s: %w", ifi.Name, err)
	}
	d.onClose(resolver.Close)
	if len(resolver.Addrs()) == 0 { // and its VLANs have none either
		return l, exitErr(exitInterface, "interface %s has no IP address: ip address add ADDR/LEN dev %s", ifi.Name, ifi.Name)
	}
	d.gone = resolver.Gone()
	if d.steer, err = bpf.Load(bpf.Options{Queues: have, Endpoints: s.Endpoints}); err != nil {
		return l, bpfError(err)
	}
	d.onClose(d.steer.Close)
	l.name, l.mtu = ifi.Name, s.MTU
	if l.mtu == 0 {
		l.mtu = ifi.MTU
	}
	l.options = ctrl.Options{
		Steering: d.steer, Resolver: resolver, Addrs: resolver.Addrs, LinkLocal: resolver.LinkLocal, MTU: resolver.MTU,
		Program: d.steer.Program(ifi.Index, bpfMode(s.XDPMode)),
	}
	l.open = func() ([]dataplane.Queue, dataplane.FragmentSource, error) {
		links, err := d.openQueues(ifi.Name, queues, l.mtu)
		if err != nil {
			return nil, nil, err
		}
		fragments, err := d.steer.Fragments()
		if err != nil {
			return nil, nil, bpfError(err)
		}
		d.onClose(fragments.Close)
		return links, fragments, nil
	}
	return l, nil
}

// cpu returns the CPU that worker i is pinned to, or -1.
func (d *daemon) cpu(i int) int {
	if len(d.s.CPUs) == 0 {
		return -1
	}
	return d.s.CPUs[i]
}

// openQueues opens a link for each queue and steers to it.
func (d *daemon) openQueues(ifname string, queues []int, mtu int) ([]dataplane.Queue, error) {
	set, err := ifqueue.Open(d.steer, ifqueue.Config{
		Interface: ifname, Queues: queues, Link: d.s.Link, Mode: bpfMode(d.s.XDPMode), MTU: mtu, Memory: int(d.s.QueueMem), Super: d.s.Super,
		FellBack: func(err error) {
			d.log.Info("packet sockets would be faster on this interface, and cannot be used: AF_XDP is used", zap.String("interface", ifname), zap.Error(err))
		},
	})
	if err != nil {
		return nil, linkError(ifname, err)
	}
	d.onClose(set.Close)
	d.mode, d.super = set.Mode, set.Super
	partial := d.s.Partial == "accept" || d.s.Partial == "auto" && set.Local
	var out []dataplane.Queue
	for i, l := range set.Links {
		out = append(out, dataplane.Queue{Link: l, CPU: d.cpu(i), PartialChecksums: partial})
	}
	return out, nil
}

// prepareSockets sets up the transport over kernel sockets.
func (d *daemon) prepareSockets() (l lower, err error) {
	s := d.s
	workers := max(len(s.Queues), 1)
	if err := checkFiles(openFiles(), workers, s.Slots.Count); err != nil {
		return l, err
	}
	if err := checkCPUs(s.CPUs, workers); err != nil {
		return l, err
	}
	d.mode = "kernel sockets"
	resolver := hostnet.Sockets{}
	l.name, l.mtu = "any", dataplane.SocketMTU
	l.options = ctrl.Options{Sockets: true, Resolver: resolver, Addrs: resolver.Addrs}
	l.open = func() ([]dataplane.Queue, dataplane.FragmentSource, error) {
		var queues []dataplane.Queue
		for i := range workers {
			sockets, err := dataplane.NewSockets(int(s.QueueMem))
			if err != nil {
				return nil, nil, fmt.Errorf("worker %d: %w", i, err)
			}
			d.onClose(sockets.Close)
			queues = append(queues, dataplane.Queue{Link: sockets, CPU: d.cpu(i)})
		}
		return queues, nil, nil
	}
	return l, nil
}
