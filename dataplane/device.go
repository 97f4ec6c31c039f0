package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/link"
)

// device is an interface with the workers of its queues. Connections do not move between
// devices. Listeners, regions and completion queues belong to no device.
type device struct {
	name    string
	workers []*worker
	frags   defrag
}

// errUnplugged is the error of connects over a device whose interface has been removed.
var errUnplugged = errors.New("dataplane: the interface is gone")

// named returns the device with that name, or nil.
func (e *Engine) named(name string) *device {
	for _, d := range e.devices {
		if d.name == name {
			return d
		}
	}
	return nil
}

// device returns the device with that name, or the first device if there is none.
func (e *Engine) device(name string) *device { return cmp.Or(e.named(name), e.devices[0]) }

// addDevice returns the device with that name. It creates one if there is none.
func (e *Engine) addDevice(name string) *device {
	if d := e.named(name); d != nil {
		return d
	}
	d := &device{name: name}
	d.frags.e, d.frags.dev, d.frags.source = e, d, e.cfg.Fragments[name]
	e.devices = append(e.devices, d)
	return d
}

// Device returns the name of the device that a connection uses.
func (e *Engine) Device(id ConnID) string { return e.worker(id).dev.name }

// WorkerDevice returns the name of the device whose queue a worker serves. Workers are numbered
// from 0 to Workers()-1.
func (e *Engine) WorkerDevice(worker int) string { return e.workers[worker].dev.name }

// dialer returns the worker that opens connections from local, by a hash of the port: all ports
// that Linux's bind(2) chooses are odd, unless none of those is free.
func (d *device) dialer(local netip.AddrPort) *worker {
	h := uint32(local.Port()) * 0x9e3779b1 >> 16
	return d.workers[int(h)%len(d.workers)]
}

// Unplug ends all connections of a device with the error why, because its interface has been
// removed. When it returns, the device's links are no longer used, and the caller must close
// them. Until Plug nothing can be opened over the device; its listeners stay.
func (e *Engine) Unplug(name string, why error) {
	d := e.device(name)
	for range 2 { // a connection may have been moving from one worker to another
		for _, w := range d.workers {
			w.post(func(w *worker) { replaceLink(w, Queue{Link: link.NewNone(w.link.MTU())}, why) })
		}
		e.Fence()
	}
}

// Plug gives a device that was unplugged new links, one for each of its workers, in the order
// of those passed to New.
func (e *Engine) Plug(name string, queues []Queue) error {
	d := e.device(name)
	if len(queues) != len(d.workers) {
		return fmt.Errorf("dataplane: %d queues for the %d workers of %s", len(queues), len(d.workers), name)
	}
	for i, w := range d.workers {
		w.post(func(w *worker) { replaceLink(w, queues[i], errUnplugged) })
	}
	e.Fence()
	return nil
}

// unplugged reports whether l stands for a removed interface.
func unplugged(l link.Link) bool {
	_, none := l.(*link.None)
	return none
}

// replaceLink gives w another link. Its connections, which hold frames of the old link, end
// with the error why. Its listeners stay.
func replaceLink(w *worker, q Queue, why error) {
	for _, c := range w.late { // the rest is in frames of the old link
		c.late = false
	}
	w.late = nil
	for _, l := range slices.Collect(maps.Values(w.lanes)) {
		l.cut(w, why)
	}
	var st link.Stats
	w.link.Stats(&st)
	w.past.Add(&st)
	setLink(w, q)
	for _, l := range w.listeners {
		l.relink(w)
	}
}

// cut ends a lane at once. It also ends those in TIME-WAIT, and those within the host, which
// use slots of the link too.
func (l *lane) cut(w *worker, why error) {
	if l.gone {
		return // already cut under another key
	}
	for _, s := range l.llp.streams() {
		if s.err == nil {
			s.err = why
		}
	}
	l.llp.reset(w)
	if l.llp.begin(w); !l.gone {
		w.pumpLane(l, nil)
	}
}

// setLink makes w use a link and discards all state of the previous one.
func setLink(w *worker, q Queue) {
	w.link, w.partial = q.Link, q.PartialChecksums
	w.rx, w.recent, w.super = rxBurst{}, nil, superTx{np: 1}
	w.slots, w.record = make([]slotState, q.Link.Slots()), link.NoSlot
	if s, ok := q.Link.(link.Segmenter); ok && s.SuperBytes() > 0 {
		w.super.link = s
	}
	// A slot holds the payload after headroom, so that the largest segment of a
	// link whose packets nearly fill a slot is a few bytes smaller.
	w.mtu = min(q.Link.MTU(), q.Link.SlotSize()-headroom+minHeaders)
	w.announced = w.mtu
	w.sched.Init(w.frameCost(), w.freeSlots, w.pumpLane)
	w.held = heldTable{}
	w.held.init(q.Link.RxFrames() / 2)
	if w.e.cfg.TCP.MaxHeld == 0 {
		w.tcp.MaxHeld = len(w.held.frames)
	}
	clear(w.forwarding.out) // their buffers have the size of the old MTU
}
