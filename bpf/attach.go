package bpf

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Mode is how frames are steered on an interface.
type Mode uint8

// Modes. Auto is Generic on virtual interfaces, where each frame is already an skb that
// native mode would convert back and forth, and Native with Generic as fallback on others.
// Ingress uses the program at tc ingress, for packet sockets that have TapFD as their
// filter. It must be requested explicitly, since it needs Linux 6.6.
const (
	Auto Mode = iota
	Native
	Generic
	Ingress
)

func (m Mode) String() string {
	switch m {
	case Auto:
		return "auto"
	case Native:
		return "native"
	case Generic:
		return "generic"
	case Ingress:
		return "ingress"
	}
	return "unknown"
}

type attachment struct {
	link link.Link
	mode Mode
	prog *ebpf.Program
	why  error // why Auto did not attach in native mode, if it tried that
}

// Attach attaches the program to an interface of the calling thread's network namespace,
// and returns the mode used. A bpf_link holds it: when the process exits, for any reason,
// the kernel detaches the program.
func (s *Steering) Attach(ifindex int, mode Mode) (Mode, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, fmt.Errorf("bpf: attach: %w", unix.EBADF)
	}
	if a, ok := s.links[ifindex]; ok {
		return a.mode, nil
	}
	dev, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return 0, fmt.Errorf("bpf: attach: interface %d: %w", ifindex, err)
	}
	try := []Mode{mode}
	switch {
	case mode == Auto && Virtual(dev): // a native program of a bond would run on its ports, whose queues have no sockets
		try = []Mode{Generic}
	case mode == Auto:
		try = []Mode{Native, Generic}
	}
	if err := alone(dev, mode); err != nil {
		return 0, fmt.Errorf("bpf: attach: %w", explain(err))
	}
	var errs []error
	for _, m := range try {
		a, err := s.attach(ifindex, m)
		if err == nil {
			a.why = errors.Join(errs...)
			s.links[ifindex] = a
			return m, nil
		}
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
			return 0, fmt.Errorf("bpf: attach: %w", xdpOf(dev))
		}
		// Even ENOMEM does not mean that a new attempt may succeed: ixgbe returns it if the host has too many CPUs.
		errs = append(errs, fmt.Errorf("bpf: attach to %s in %s mode: %w", dev.Attrs().Name, m, explain(err)))
	}
	return 0, errors.Join(errs...)
}

// Slower returns why Auto attached the program to an interface in generic mode although it prefers native mode, or nil.
func (s *Steering) Slower(ifindex int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.links[ifindex].why
}

// Virtual reports whether an interface is made by software: veth and tap, and those that are stacked on
// others, such as bridges and bonds.
func Virtual(dev netlink.Link) bool { return dev.Type() != "device" }

// attach creates the bpf_link.
func (s *Steering) attach(ifindex int, mode Mode) (a attachment, err error) {
	a = attachment{mode: mode, prog: s.objs.IwarpdSteer}
	switch mode {
	case Ingress: // run before those already attached
		a.prog = s.objs.IwarpdIngress
		a.link, err = link.AttachTCX(link.TCXOptions{Program: a.prog, Interface: ifindex, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
	case Generic:
		a.link, err = link.AttachXDP(link.XDPOptions{Program: a.prog, Interface: ifindex, Flags: link.XDPGenericMode})
	default:
		a.link, err = link.AttachXDP(link.XDPOptions{Program: a.prog, Interface: ifindex, Flags: link.XDPDriverMode})
	}
	return a, err
}

// alone returns an error if another process steers on the interface in the other way. The
// kernel would allow both, and each would lose frames to the other.
func alone(dev netlink.Link, mode Mode) error {
	if e := xdpOf(dev); e.iwarpd() {
		return e
	}
	e, err := ingressOf(dev)
	switch {
	case e != nil:
		return e
	case mode != Ingress: // also on a kernel without tcx
	case errors.Is(err, unix.EINVAL), errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w: %w", ErrNoIngress, err)
	case err != nil:
		return fmt.Errorf("programs at tc ingress of %s: %w", dev.Attrs().Name, err)
	}
	return nil
}

// HasIngress reports whether the kernel can steer for packet sockets.
func HasIngress(dev netlink.Link) bool {
	_, err := atIngress(dev)
	return err == nil
}

// atIngress returns the programs at tc ingress of an interface.
func atIngress(dev netlink.Link) (*link.QueryResult, error) {
	return link.QueryPrograms(link.QueryOptions{Target: dev.Attrs().Index, Attach: ebpf.AttachTCXIngress})
}

// ingressOf returns the program of an iwarpd at tc ingress of an interface as an error, or nil if there is none.
func ingressOf(dev netlink.Link) (*BusyError, error) {
	at, err := atIngress(dev)
	if err != nil {
		return nil, err
	}
	for _, p := range at.Programs {
		if e := occupant(dev, p.ID); e.iwarpd() {
			return e, nil
		}
	}
	return nil, nil
}

// Served reports whether an iwarpd serves an interface: whether its XDP program is attached, or its program at tc
// ingress. Without CAP_SYS_ADMIN the kernel does not name the programs, and Served returns false.
func Served(dev netlink.Link) bool {
	e, _ := ingressOf(dev)
	return e != nil || xdpOf(dev).iwarpd()
}

// xdpOf returns the XDP program of an interface as an error.
func xdpOf(dev netlink.Link) *BusyError {
	if x := dev.Attrs().Xdp; x != nil && x.Attached {
		return occupant(dev, ebpf.ProgramID(x.ProgId))
	}
	return &BusyError{Interface: dev.Attrs().Name}
}

// occupant returns the program with the given id, on an interface, as an error. It has no name if the
// program was removed in the meantime, and without CAP_SYS_ADMIN, which the daemon of the unit lacks.
func occupant(dev netlink.Link, id ebpf.ProgramID) *BusyError {
	e := &BusyError{Interface: dev.Attrs().Name, ID: id}
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return e
	}
	defer prog.Close()
	if info, err := prog.Info(); err == nil {
		e.Program = info.Name
	}
	return e
}

// The kernel's names of the programs, truncated to 15 characters.
const (
	xdpName     = "iwarpd_steer"
	ingressName = "iwarpd_ingress"
)

// A BusyError is returned by Attach if another program has the interface: an XDP program, of which
// the kernel allows one, or the programs of another iwarpd.
type BusyError struct {
	Interface string
	Program   string         // name of the program, of at most 15 characters; empty if unknown
	ID        ebpf.ProgramID // of the program; 0 if unknown
}

// Error implements error. It names the fix.
func (e *BusyError) Error() string {
	if e.iwarpd() {
		return fmt.Sprintf("interface %s is served by another iwarpd: stop that one, or choose another interface", e.Interface)
	}
	name := ""
	if e.ID != 0 {
		name = fmt.Sprintf(" (%s, id %d)", cmp.Or(e.Program, "perhaps of another iwarpd"), e.ID)
	}
	return fmt.Sprintf("interface %s has another XDP program%s: stop the program that attached it, run \"ip link set dev %s xdp off\" if none runs, or choose another interface",
		e.Interface, name, e.Interface)
}

func (e *BusyError) iwarpd() bool { return e.Program == xdpName || e.Program == ingressName }

// A Program is the steering program on one interface. It implements ctrl.Program.
type Program struct {
	s       *Steering
	ifindex int
	mode    Mode
}

// Program returns the program on an interface of the process's network namespace. mode is
// used if it has not been attached yet.
func (s *Steering) Program(ifindex int, mode Mode) *Program { return &Program{s, ifindex, mode} }

// Attach attaches the program again, in the same mode.
func (p *Program) Attach() error {
	p.s.mu.Lock()
	if a, ok := p.s.links[p.ifindex]; ok {
		p.mode = a.mode
	}
	p.s.mu.Unlock()
	if err := p.s.Detach(p.ifindex); err != nil {
		return err
	}
	_, err := p.s.Attach(p.ifindex, p.mode)
	return err
}

// Attached reports whether the program is attached. Others can detach its bpf_link or
// replace the program.
func (p *Program) Attached() (bool, error) {
	s, ifindex := p.s, p.ifindex
	s.mu.Lock()
	defer s.mu.Unlock()
	a, ok := s.links[ifindex]
	if !ok {
		return false, nil
	}
	info, err := a.link.Info()
	if err != nil {
		return false, fmt.Errorf("bpf: interface %d: %w", ifindex, err)
	}
	on := 0
	if x := info.XDP(); x != nil {
		on = int(x.Ifindex)
	} else if x := info.TCX(); x != nil {
		on = int(x.Ifindex)
	}
	own, err := a.prog.Info()
	if err != nil {
		return false, fmt.Errorf("bpf: interface %d: %w", ifindex, err)
	}
	id, _ := own.ID()
	return on == ifindex && info.Program == id, nil
}

// Renew gives the program to the driver again. A driver may lose it when it closes its rings, because
// the interface goes down or its MTU changes, although the kernel still shows it as attached
// (vmxnet3 of Linux 6.6 to 7.3). Drivers that have not lost it replace it without losing frames. It does
// nothing unless the program is attached in native mode.
func (s *Steering) Renew(ifindex int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, ok := s.links[ifindex]
	if !ok || a.mode != Native {
		return nil
	}
	// The kernel does not notify the driver if a program replaces itself, so two equal programs
	// take turns.
	if a.prog == s.objs.IwarpdSteer {
		a.prog = s.objs.Twin
	} else {
		a.prog = s.objs.IwarpdSteer
	}
	switch err := a.link.Update(a.prog); {
	case errors.Is(err, unix.ENOLINK): // the interface is gone, or the program was detached
		return nil
	case err != nil:
		return fmt.Errorf("bpf: renew the program of interface %d: %w", ifindex, explain(err))
	}
	s.links[ifindex] = a
	return nil
}

// Detach detaches the program from an interface. It returns nil if it is not attached.
func (s *Steering) Detach(ifindex int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, ok := s.links[ifindex]
	if !ok {
		return nil
	}
	delete(s.links, ifindex)
	if err := a.link.Close(); err != nil {
		return fmt.Errorf("bpf: detach from interface %d: %w", ifindex, err)
	}
	return nil
}
