package main

import (
	"context"
	"fmt"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
)

// instead names the transport without the requirements of AF_XDP.
const instead = "or use kernel sockets, which need no privileges: --transport socket"

// kernelSockets describes this transport to clients.
const kernelSockets = "kernel sockets"

// lower holds the parts of a transport that the rest of the daemon uses.
type lower struct {
	options ctrl.Options
	// open opens the link of each worker. fragments may be nil.
	open func() (queues []dataplane.Queue, fragments map[string]dataplane.FragmentSource, err error)
}

// prepareAFXDP looks at the interfaces, and loads their XDP programs, which open attaches.
func (d *daemon) prepareAFXDP() (l lower, err error) {
	names, workers := d.s.names(), 0
	for _, name := range names {
		n, err := d.newNIC(name)
		if err != nil {
			return l, err
		}
		d.nics = append(d.nics, n)
		workers += len(n.queues)
	}
	if err := checkCapabilities("/proc/self/status"); err != nil {
		return l, err
	}
	if err := checkFiles(openFiles(), workers, d.s.Slots.Count); err != nil {
		return l, err
	}
	if err := checkCPUs(d.s.CPUs, workers); err != nil {
		return l, err
	}
	resolver, err := hostnet.New(names...)
	if err != nil {
		return l, exitErr(exitInterface, "%w", err)
	}
	d.onClose(resolver.Close)
	l.options = ctrl.Options{Resolver: resolver}
	cpus := d.s.CPUs
	for _, n := range d.nics {
		n.dev = resolver.Device(n.name)
		if len(n.dev.Addrs()) == 0 { // nor have its VLANs
			return l, exitErr(exitInterface, "interface %s has no IP address: ip address add ADDR/LEN dev %s", n.name, n.name)
		}
		if len(cpus) > 0 {
			n.cpus, cpus = cpus[:len(n.queues)], cpus[len(n.queues):]
		}
		if err := n.load(); err != nil {
			return l, err
		}
		d.onClose(n.steer.Close)
		l.options.Devices = append(l.options.Devices, n.device())
	}
	l.open = d.openNICs
	changed := make(chan struct{}, 1)
	resolver.Watch(func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	d.watch = func(ctx context.Context) { d.watchNICs(ctx, changed) }
	return l, nil
}

// openNICs opens the interfaces and returns the queues for the workers.
func (d *daemon) openNICs() (queues []dataplane.Queue, fragments map[string]dataplane.FragmentSource, err error) {
	fragments = make(map[string]dataplane.FragmentSource)
	for _, n := range d.nics {
		ifi, err := findInterface(n.name)
		if err != nil {
			return nil, nil, err
		}
		d.onClose(n.shut)
		qs, err := n.open(ifi)
		if err != nil {
			return nil, nil, err
		}
		queues = append(queues, qs...)
		f, err := n.steer.Fragments()
		if err != nil {
			return nil, nil, bpfError(err)
		}
		d.onClose(f.Close)
		fragments[n.name] = f
	}
	return queues, fragments, nil
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
	resolver := hostnet.Sockets{}
	l.options = ctrl.Options{Sockets: true, Resolver: resolver, Devices: []ctrl.Device{{
		Name: "any", MTU: dataplane.SocketMTU, Addrs: resolver.Addrs, Transport: func() string { return kernelSockets },
	}}}
	l.open = func() ([]dataplane.Queue, map[string]dataplane.FragmentSource, error) {
		var queues []dataplane.Queue
		for i := range workers {
			sockets, err := dataplane.NewSockets(int(s.QueueMem))
			if err != nil {
				return nil, nil, fmt.Errorf("worker %d: %w", i, err)
			}
			d.onClose(sockets.Close)
			queues = append(queues, dataplane.Queue{Link: sockets, CPU: cpuOf(s.CPUs, i)})
		}
		return queues, nil, nil
	}
	return l, nil
}
