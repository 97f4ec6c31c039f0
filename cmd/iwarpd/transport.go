package main

import (
	"fmt"
	"slices"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
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

// prepare sets up the transports that the configuration names.
func (d *daemon) prepare() (lower, error) {
	switch d.s.Transport {
	case "socket":
		return d.prepareSockets()
	case "both":
		l, err := d.prepareAFXDP(1)
		if err != nil {
			return l, err
		}
		return d.addSockets(l), nil
	}
	return d.prepareAFXDP(0)
}

// addSockets adds kernel sockets with one worker to l.
func (d *daemon) addSockets(l lower) lower {
	open := l.open
	l.options.Devices = append(l.options.Devices, socketDevice())
	l.open = func() ([]dataplane.Queue, map[string]dataplane.FragmentSource, error) {
		queues, fragments, err := open()
		if err != nil {
			return nil, nil, err
		}
		more, err := d.openSockets(1, nil)
		return append(queues, more...), fragments, err
	}
	return l
}

// prepareAFXDP looks at the interfaces, and loads their XDP programs, which open attaches. more is the
// number of workers that others add.
func (d *daemon) prepareAFXDP(more int) (l lower, err error) {
	names, workers := d.s.names(), 0
	for _, name := range names {
		n, err := d.newNIC(name)
		if err != nil {
			return l, err
		}
		d.nics = append(d.nics, n)
		workers += len(n.queues)
	}
	if err := checkCapabilities(); err != nil {
		return l, err
	}
	if err := d.s.checkLimits(workers+more, workers); err != nil {
		return l, err
	}
	resolve := hostnet.New
	if d.s.Loopback {
		resolve = hostnet.NewWithLoopback
	}
	resolver, err := resolve(names...)
	if err != nil {
		return l, goneError(err)
	}
	d.onClose(resolver.Close)
	l.options = ctrl.Options{Resolver: resolver}
	cpus := d.s.CPUs
	for _, n := range d.nics {
		n.dev = resolver.Device(n.name)
		if len(n.dev.Addrs()) == 0 && len(resolver.Loopback()) == 0 { // nor have its VLANs
			if why := hostcheck.Unusable(n.name); why != "" {
				return l, exitErr(exitInterface, "interface %s has no IP address that can be used: %s: wait, or ip address add ADDR/LEN dev %s",
					n.name, why, n.name)
			}
			return l, exitErr(exitInterface, "interface %s has no IP address: ip address add ADDR/LEN dev %s", n.name, n.name)
		}
		if len(cpus) > 0 {
			n.cpus, cpus = cpus[:len(n.queues)], cpus[len(n.queues):]
		}
		// The queues that the interface has now, or more of those that may come in its place, can have a socket.
		if n.steer, err = bpf.Load(bpf.Options{Queues: max(slices.Max(n.queues)+1, 64), Endpoints: n.s.Endpoints}); err != nil {
			return l, bpfError(err)
		}
		d.onClose(n.steer.Close)
		l.options.Devices = append(l.options.Devices, n.device())
	}
	l.open = d.openNICs
	d.changed = make(chan struct{}, 1)
	resolver.Watch(func() {
		select {
		case d.changed <- struct{}{}:
		default:
		}
	})
	return l, nil
}

// openNICs opens the interfaces and returns the queues for the workers.
func (d *daemon) openNICs() (queues []dataplane.Queue, fragments map[string]dataplane.FragmentSource, err error) {
	fragments = make(map[string]dataplane.FragmentSource)
	for _, n := range d.nics {
		ifi, err := n.find()
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
	workers := s.workers()
	if err := s.checkLimits(workers, workers); err != nil {
		return l, err
	}
	l.options = ctrl.Options{Resolver: hostnet.Sockets{}, Devices: []ctrl.Device{socketDevice()}}
	l.open = func() ([]dataplane.Queue, map[string]dataplane.FragmentSource, error) {
		queues, err := d.openSockets(workers, s.CPUs)
		return queues, nil, err
	}
	return l, nil
}

// socketDevice describes kernel sockets to the control plane.
func socketDevice() ctrl.Device {
	return ctrl.Device{Name: hostnet.AnyInterface, Sockets: true, MTU: dataplane.SocketMTU, Addrs: hostnet.Sockets{}.Addrs, Transport: func() string { return kernelSockets }}
}

// openSockets returns the queues of n workers over kernel sockets.
func (d *daemon) openSockets(n int, cpus []int) (queues []dataplane.Queue, err error) {
	for i := range n {
		sockets, err := dataplane.NewSockets(int(d.s.QueueMem))
		if err != nil {
			return nil, fmt.Errorf("worker %d: %w", i, err)
		}
		d.onClose(sockets.Close)
		queues = append(queues, dataplane.Queue{Link: sockets, Device: hostnet.AnyInterface, CPU: cpuOf(cpus, i)})
	}
	return queues, nil
}
