package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
)

// A nic is an interface that the daemon serves: an XDP program with its maps, and a worker for
// each queue. If the interface is removed, the program and its claims stay, and the program is
// attached to the next interface of that name.
type nic struct {
	name   string
	s      *settings
	log    *zap.Logger
	dev    *hostnet.Device
	steer  *bpf.Steering
	queues []int // that workers serve
	cpus   []int // of those workers; empty: not pinned

	mtu   atomic.Int32           // that the links are for
	index atomic.Int32           // of the interface that the links are open on; 0: none
	mode  atomic.Pointer[string] // how frames move; see ifqueue.Set
	super atomic.Bool            // super-frames are sent
	link  atomic.Pointer[hostnet.LinkState]
	set   *ifqueue.Set     // nil while none is open
	on    hostnet.Presence // that the links are open on
	why   string           // reason why it could not be served again, as last logged
}

// newNIC looks at the interface, and loads the XDP program, which open attaches.
func (d *daemon) newNIC(name string) (*nic, error) {
	s := d.s
	ifi, err := findInterface(name)
	if err != nil {
		return nil, err
	}
	have, err := xsk.Queues(name)
	if err == nil && len(s.Queues) == 0 {
		have, err = ifqueue.Workers(name, s.Link, s.XDPMode)
	}
	if err != nil {
		return nil, goneError(fmt.Errorf("interface %s: %w", name, err))
	}
	n := &nic{name: name, s: s, log: d.log}
	n.setMTU(ifi)
	n.mode.Store(new(string))
	if n.queues, err = checkQueues(name, s.Queues, have); err != nil {
		return nil, err
	}
	return n, nil
}

// setMTU sets the largest packet that links of ifi are to carry.
func (n *nic) setMTU(ifi *net.Interface) {
	mtu := cmp.Or(n.s.MTU, link.MTUOn(ifi.MTU))
	changed := n.mtu.Swap(int32(mtu)) != int32(mtu) // rather than another attempt to serve it
	if changed && n.s.MTU == 0 && mtu < ifi.MTU {
		n.log.Info("the MTU of the interface is more than iwarpd uses", zap.String("interface", n.name), zap.Int("mtu", ifi.MTU), zap.Int("used", mtu))
	}
}

// device describes n to the control plane.
func (n *nic) device() ctrl.Device {
	return ctrl.Device{
		Name: n.name, MTU: int(n.mtu.Load()), PresentMTU: n.dev.MTU, Addrs: n.dev.Addrs, LinkLocal: n.dev.LinkLocal, Index: n.dev.Index, VLANs: n.dev.VLANs,
		Transport: func() string { return *n.mode.Load() }, Link: n.linkState, Steering: n.steer, Program: n,
	}
}

// linkState implements ctrl.Device.Link.
func (n *nic) linkState() (state string, speed uint64) {
	l := n.link.Load()
	switch {
	case l == nil:
		return "", 0
	case l.Up:
		return "up", l.Speed
	}
	return "down", 0
}

// find returns the interface that the Device holds, whose name may have changed, if the daemon can use it. Another
// interface of the name may have other addresses and routes.
func (n *nic) find() (*net.Interface, error) {
	held, err := net.InterfaceByIndex(n.dev.Index())
	if err := unasked(n.name, err); err != nil {
		return nil, err
	}
	if err != nil { // or its return is not noted yet
		return nil, exitErr(exitInterface, "interface %s: %w", n.name, hostnet.ErrGone)
	}
	return findInterface(held.Name)
}

// errRenamed means that sockets, which are opened by name, may be those of another interface.
var errRenamed = errors.New("it was renamed in the meantime")

// open attaches the program to the interface ifi, which find has returned, and opens a socket for each queue.
func (n *nic) open(ifi *net.Interface) (queues []dataplane.Queue, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, n.shut())
		}
	}()
	have, err := xsk.Queues(ifi.Name)
	if err != nil {
		return nil, err
	}
	// The interface may have come back with fewer.
	there := slices.DeleteFunc(slices.Clone(n.queues), func(q int) bool { return q >= have })
	if n.on = n.dev.Presence(); n.on.Index != ifi.Index {
		return nil, hostnet.ErrGone
	}
	n.index.Store(int32(ifi.Index))
	n.set, err = ifqueue.Open(n.steer, ifqueue.Config{
		Interface: ifi.Name, Queues: there, Link: n.s.Link, Mode: n.s.XDPMode, MTU: int(n.mtu.Load()), Memory: int(n.s.QueueMem), Super: n.s.Super,
		FellBack: func(err error) {
			n.log.Info("packet sockets would be faster on this interface, and cannot be used: AF_XDP is used", zap.String("interface", n.name), zap.Error(err))
		},
	})
	if err != nil {
		return nil, linkError(ifi.Name, err)
	}
	if now, err := net.InterfaceByIndex(ifi.Index); err != nil || now.Name != ifi.Name {
		return nil, errRenamed
	}
	if why := leftOut(ifi.Name, there, have); why != "" && n.set.ByQueue {
		n.log.Warn(why, zap.String("interface", n.name), zap.Ints("served", there), zap.Int("queues", have))
	}
	if why := n.steer.Slower(ifi.Index); why != nil {
		n.log.Info("the driver does not take the XDP program, so that generic mode is used, which is slower",
			zap.String("interface", n.name), zap.Error(why))
	}
	n.mode.Store(&n.set.Mode)
	n.super.Store(n.set.Super)
	partial := n.s.Partial == "accept" || n.s.Partial == "auto" && n.set.Local
	links := n.set.Links
	for i, q := range n.queues {
		out := dataplane.Queue{Link: link.NewNone(int(n.mtu.Load())), Device: n.name, CPU: cpuOf(n.cpus, i), PartialChecksums: partial}
		if q < have {
			out.Link, links = links[0], links[1:]
		}
		queues = append(queues, out)
	}
	return queues, nil
}

// cpuOf returns the CPU of cpus that the i-th worker is pinned to, or -1 if there are none.
func cpuOf(cpus []int, i int) int {
	if len(cpus) == 0 {
		return -1
	}
	return cpus[i]
}

// shut undoes open.
func (n *nic) shut() (err error) {
	if n.set != nil {
		err = n.set.Close()
	}
	n.set = nil
	n.index.Store(0)
	return err
}

// Attached implements ctrl.Program. It returns an error while the interface is missing.
func (n *nic) Attached() (bool, error) {
	i := int(n.index.Load())
	if i == 0 {
		return false, hostnet.ErrGone
	}
	ok, err := n.steer.Program(i, n.s.XDPMode).Attached()
	if !ok && err == nil {
		_, err = net.InterfaceByIndex(i) // the interface disappears before its program
	}
	return ok, err
}

// Attach implements ctrl.Program.
func (n *nic) Attach() error {
	return n.steer.Program(int(n.index.Load()), n.s.XDPMode).Attach()
}

// retryPeriod is the interval of attempts to serve an interface that has returned. Some of the
// conditions for success are not reported by netlink.
const retryPeriod = time.Second

// watchNICs stops to serve interfaces that are removed, and serves those that are back,
// until ctx is done.
func (d *daemon) watchNICs(ctx context.Context) {
	for {
		var retry <-chan time.Time
		for _, n := range d.nics {
			now := n.dev.Presence()
			if n.set != nil && now != n.on {
				d.unplug(n)
			}
			if n.set == nil && now.Index != 0 && !d.plug(n) {
				retry = time.After(retryPeriod)
			}
		}
		select {
		case <-d.changed:
		case <-retry:
		case <-ctx.Done():
			return
		}
	}
}

// unplug ends the connections of n, whose interface is gone.
func (d *daemon) unplug(n *nic) {
	d.server.Unplug(n.name)
	_ = n.shut() // the kernel has detached the program already
}

// plug starts to serve n again, and reports whether that succeeded.
func (d *daemon) plug(n *nic) bool {
	err := d.tryPlug(n)
	switch {
	case err == nil:
		n.why = ""
	case err.Error() != n.why:
		n.why = err.Error()
		d.log.Warn("the interface is back, but cannot be served yet", zap.String("interface", n.name), zap.Error(err))
	}
	return err == nil
}

func (d *daemon) tryPlug(n *nic) error {
	ifi, err := n.find()
	if err != nil {
		return err
	}
	n.setMTU(ifi)
	queues, err := n.open(ifi)
	if err != nil {
		return err
	}
	if err := d.server.Plug(n.name, int(n.mtu.Load()), queues); err != nil {
		return errors.Join(err, n.shut())
	}
	return nil
}
