// Package bpf loads and feeds the programs that tell the frames of claimed
// endpoints from all others (steer.c). One of them, at XDP, sends them to the
// AF_XDP socket of their queue. Two others do it for packet sockets: a socket
// filter receives them, and a program at tc ingress, which is behind the packet
// sockets, drops them, so that the kernel does not answer. All else is the kernel's.
//
// XDP sees frames as the device delivers them. Three offloads of the
// receiving side must be off on an interface that uses what they touch: rxvlan
// (a VLAN tag that is not in the frame cannot be seen), gro-hw and lro. A kernel
// that is the peer over a veth pair must have tx, tso and gso off at its end,
// for its frames would lack checksums and exceed the MTU.
package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Mode is how frames are steered on an interface.
type Mode uint8

// The modes. Auto is Generic on veth and tap devices, where each frame is an skb
// already and native mode only converts it back and forth, and on others Native
// with Generic as fallback. Ingress, the program at tc ingress for packet sockets
// that have TapFD as their filter, is got only when asked for: it needs Linux 6.6.
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

// Errors of this package, for errors.Is.
var (
	// ErrPrivilege: the process lacks CAP_BPF or CAP_NET_ADMIN.
	ErrPrivilege = errors.New("needs CAP_BPF and CAP_NET_ADMIN (root, or AmbientCapabilities= in the unit)")
	// ErrBusy: another XDP program is attached to the interface, or in mode Ingress
	// another process steers there.
	ErrBusy = errors.New("another XDP program is attached")
	// ErrNoIngress: the kernel has no bpf_link at tc ingress.
	ErrNoIngress = errors.New("programs at tc ingress need Linux 6.6")
	// ErrUnclaimed: Unclaim of an endpoint that is not claimed.
	ErrUnclaimed = errors.New("endpoint is not claimed")
)

// Endpoint is a local transport address whose frames are steered. Addr 0.0.0.0
// stands for every IPv4 address of the host, :: for every IPv6 address, the
// zero netip.Addr for both.
type Endpoint struct {
	Proto uint8 // IP protocol number: TCP 6, UDP 17, SCTP 132
	Addr  netip.Addr
	Port  uint16
}

func (e Endpoint) String() string {
	addr := "*"
	if e.Addr.IsValid() {
		addr = e.Addr.String()
	}
	return fmt.Sprintf("proto %d %s port %d", e.Proto, addr, e.Port)
}

// Options are what Load needs to know.
type Options struct {
	// Queues is how many receive queues may have a socket; 0 means 256.
	Queues int
	// Endpoints is how many endpoints can be claimed, an address of both families
	// twice; 0 means DefaultEndpoints.
	Endpoints int
}

// DefaultEndpoints is room for every port of one address, and for as many listeners
// of both families.
const DefaultEndpoints = 1 << 17

// Counters says what became of frames, summed over CPUs.
type Counters struct {
	SteeredTCP, SteeredSCTP, SteeredUDP uint64
	SteeredICMP                         uint64 // errors about packets of ours
	Passed                              uint64 // not ours
	PassedFragment                      uint64 // IP fragments, not ours
	Malformed                           uint64 // passed: the kernel counts them better
	NoSocket                            uint64 // ours, passed: no socket on that queue
	SteeredFragment                     uint64 // of packets of ours, in the ring
	CopiedFragment                      uint64 // came before the first of their packet: in the ring, and passed
	DroppedFragment                     uint64 // ours: no room in the ring
}

// Steering is the loaded program and its maps. It is safe for use by several
// goroutines.
type Steering struct {
	objs steerObjects

	room int // of the map of endpoints

	mu     sync.Mutex
	claims map[steerEndpoint]int
	hosts  map[steerEndpoint]int // claims of any port
	local  map[steerAddress]bool
	vlans  map[uint32]bool
	links  map[int]attachment
	closed bool
}

type attachment struct {
	link link.Link
	mode Mode
}

// Load loads the program and its maps into the kernel. Nothing is steered
// until Attach, SetSocket and Claim.
func Load(opts Options) (*Steering, error) {
	// Kernels before 5.11 count maps against the locked memory limit.
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("bpf: raise the locked memory limit: %w", explain(err))
	}
	spec, err := loadSteer()
	if err != nil {
		return nil, fmt.Errorf("bpf: embedded program: %w", err)
	}
	if opts.Queues > 0 {
		spec.Maps[steerMapSockets].MaxEntries = uint32(opts.Queues)
	}
	if opts.Endpoints == 0 {
		opts.Endpoints = DefaultEndpoints
	}
	for _, name := range []string{steerMapEndpoints, steerMapHosts} {
		spec.Maps[name].MaxEntries = uint32(opts.Endpoints)
		spec.Maps[name].Flags |= unix.BPF_F_NO_PREALLOC // most are never used
	}
	s := &Steering{
		room:   opts.Endpoints,
		claims: map[steerEndpoint]int{},
		hosts:  map[steerEndpoint]int{},
		local:  map[steerAddress]bool{},
		vlans:  map[uint32]bool{},
		links:  map[int]attachment{},
	}
	if err := spec.LoadAndAssign(&s.objs, nil); err != nil {
		return nil, fmt.Errorf("bpf: load the steering program: %w", explain(err))
	}
	return s, nil
}

// explain adds what to do to the errors that an operator can do something
// about.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES) && !isVerifier(err):
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%w (see `ip link show`; `ip link set dev IF xdp off` removes one that is no bpf_link): %w", ErrBusy, err)
	}
	return err
}

func isVerifier(err error) bool {
	var v *ebpf.VerifierError
	return errors.As(err, &v)
}

// Attach hangs the program on an interface of the calling thread's network
// namespace. It is held by a bpf_link: when the process ends, however it ends,
// the kernel takes it off. The mode that was got is returned.
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
	if mode == Auto {
		switch dev.Type() {
		case "veth", "tun", "tap", "tuntap":
			try = []Mode{Generic}
		default:
			try = []Mode{Native, Generic}
		}
	}
	if err := alone(dev, mode); err != nil {
		return 0, fmt.Errorf("bpf: attach to %s: %w", dev.Attrs().Name, explain(err))
	}
	var errs []error
	for _, m := range try {
		l, err := s.attach(ifindex, m)
		if err == nil {
			s.links[ifindex] = attachment{l, m}
			return m, nil
		}
		errs = append(errs, fmt.Errorf("bpf: attach to %s in %s mode: %w", dev.Attrs().Name, m, explain(err)))
	}
	return 0, errors.Join(errs...)
}

// attach makes the bpf_link.
func (s *Steering) attach(ifindex int, mode Mode) (link.Link, error) {
	if mode == Ingress { // in front of those that are there
		return link.AttachTCX(link.TCXOptions{Program: s.objs.IwarpdIngress, Interface: ifindex, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
	}
	flags := link.XDPDriverMode
	if mode == Generic {
		flags = link.XDPGenericMode
	}
	return link.AttachXDP(link.XDPOptions{Program: s.objs.IwarpdSteer, Interface: ifindex, Flags: flags})
}

// alone returns an error if another process steers on an interface. Where XDP and tc ingress
// let it attach, each would lose frames to the other.
func alone(dev netlink.Link, mode Mode) error {
	var there []ebpf.ProgramID
	if x := dev.Attrs().Xdp; x != nil && x.Attached {
		there = append(there, ebpf.ProgramID(x.ProgId))
	}
	at, err := link.QueryPrograms(link.QueryOptions{Target: dev.Attrs().Index, Attach: ebpf.AttachTCXIngress})
	if err == nil {
		for _, p := range at.Programs {
			there = append(there, p.ID)
		}
	} else if mode == Ingress {
		return fmt.Errorf("%w: %w", ErrNoIngress, err)
	}
	for _, id := range there {
		prog, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // gone meanwhile
		}
		info, err := prog.Info()
		_ = prog.Close()
		if err == nil && (info.Name == xdpName || info.Name == ingressName) {
			return errOther
		}
	}
	return nil
}

// What the kernel calls the programs: 15 characters at most.
const (
	xdpName     = "iwarpd_steer"
	ingressName = "iwarpd_ingress"
)

// errOther is an ErrBusy.
var errOther = busyError{errors.New("another iwarpd steers the frames of this interface")}

type busyError struct{ error }

func (busyError) Is(target error) bool { return target == ErrBusy }

// TapFD is the descriptor of the filter for packet sockets (SO_ATTACH_BPF), by which they
// receive what is claimed and nothing else. It is valid until Close.
func (s *Steering) TapFD() int { return s.objs.IwarpdTap.FD() }

// A Program is the steering program on one interface, to be watched.
type Program struct {
	s       *Steering
	ifindex int
	mode    Mode
}

// Program returns the program on an interface of the process's network namespace, which
// mode is for if it has not been attached yet.
func (s *Steering) Program(ifindex int, mode Mode) *Program { return &Program{s, ifindex, mode} }

// Attach attaches the program again, as it was.
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

// Attached reports whether the program is on the interface: others can detach its
// bpf_link, or put another program in its place.
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
	prog, on := s.objs.IwarpdSteer, 0
	if a.mode == Ingress {
		prog = s.objs.IwarpdIngress
	}
	if x := info.XDP(); x != nil {
		on = int(x.Ifindex)
	} else if x := info.TCX(); x != nil {
		on = int(x.Ifindex)
	}
	own, err := prog.Info()
	if err != nil {
		return false, fmt.Errorf("bpf: interface %d: %w", ifindex, err)
	}
	id, _ := own.ID()
	return on == ifindex && info.Program == id, nil
}

// Detach takes the program off an interface. To detach what is not attached is
// no error.
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

// SetSocket sends the claimed frames of a receive queue to an AF_XDP socket. The
// kernel drops the entry when the socket is closed.
func (s *Steering) SetSocket(queue, fd int) error {
	if err := s.objs.Sockets.Update(uint32(queue), uint32(fd), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("bpf: socket of queue %d: %w", queue, explain(err))
	}
	return nil
}

// Claim steers the frames to an endpoint, and ICMP errors about its packets. An
// endpoint may be claimed several times, and is ours until Unclaim was called
// as often.
func (s *Steering) Claim(e Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := e.keys()
	for i, k := range keys {
		if err := s.add(k); err != nil {
			for _, k := range keys[:i] {
				_ = s.drop(k)
			}
			if errors.Is(err, unix.E2BIG) {
				err = fmt.Errorf("%w: the steering map has room for %d endpoints, and is full: raise steering-endpoints, or close listeners and connections", err, s.room)
			}
			return fmt.Errorf("bpf: claim %v: %w", e, explain(err))
		}
	}
	return nil
}

// Unclaim undoes one Claim.
func (s *Steering) Unclaim(e Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, k := range e.keys() {
		if s.claims[k] == 0 {
			errs = append(errs, ErrUnclaimed)
			continue
		}
		errs = append(errs, s.drop(k))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("bpf: unclaim %v: %w", e, err)
	}
	return nil
}

// add puts one claim on a key.
func (s *Steering) add(k steerEndpoint) error {
	h := k
	h.Port = 0
	if s.hosts[h] == 0 {
		if err := s.objs.Hosts.Put(h, uint32(1)); err != nil {
			return err
		}
	}
	s.hosts[h]++
	if s.claims[k] == 0 {
		if err := s.objs.Endpoints.Put(k, uint32(1)); err != nil {
			_ = s.dropHost(h)
			return err
		}
	}
	s.claims[k]++
	return nil
}

// drop takes one claim off a key.
func (s *Steering) drop(k steerEndpoint) error {
	h := k
	h.Port = 0
	err := s.dropHost(h)
	if s.claims[k]--; s.claims[k] > 0 {
		return err
	}
	delete(s.claims, k)
	return errors.Join(err, s.objs.Endpoints.Delete(k))
}

func (s *Steering) dropHost(h steerEndpoint) error {
	if s.hosts[h]--; s.hosts[h] > 0 {
		return nil
	}
	delete(s.hosts, h)
	return s.objs.Hosts.Delete(h)
}

// SetAddresses says which addresses a claim of an unspecified address means.
// Until it is called that is every destination address, which is wrong on a
// host that forwards packets of others. A nil list goes back to that.
func (s *Steering) SetAddresses(addrs []netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := map[steerAddress]bool{}
	for _, a := range addrs {
		k := steerAddress{}
		k.Family, k.Addr = family(a)
		want[k] = true
		if !s.local[k] {
			if err := s.objs.Addresses.Put(k, uint32(1)); err != nil {
				return fmt.Errorf("bpf: address %v: %w", a, explain(err))
			}
			s.local[k] = true
		}
	}
	var check uint32
	if addrs != nil {
		check = 1
	}
	if err := s.objs.CheckAddresses.Set(check); err != nil {
		return fmt.Errorf("bpf: addresses: %w", err)
	}
	if err := prune(s.objs.Addresses, s.local, want); err != nil {
		return fmt.Errorf("bpf: addresses: %w", err)
	}
	return nil
}

// SetVLANs says which VLANs the host is in, each by the identifiers of its tags,
// outermost first. Until it is called frames of all VLANs are steered; after that those
// of others are left to the kernel, which drops them. Frames without a VLAN are not
// concerned. At most two tags are looked at.
func (s *Steering) SetVLANs(vlans [][]uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := map[uint32]bool{}
	for _, tags := range vlans {
		var k uint32
		for _, id := range tags {
			k = k<<12 | uint32(id&0xfff)
		}
		if k == 0 {
			continue
		}
		want[k] = true
		if !s.vlans[k] {
			if err := s.objs.Vlans.Put(k, uint32(1)); err != nil {
				return fmt.Errorf("bpf: VLAN %v: %w", tags, explain(err))
			}
			s.vlans[k] = true
		}
	}
	if err := s.objs.CheckVlans.Set(uint32(1)); err != nil {
		return fmt.Errorf("bpf: VLANs: %w", err)
	}
	if err := prune(s.objs.Vlans, s.vlans, want); err != nil {
		return fmt.Errorf("bpf: VLANs: %w", err)
	}
	return nil
}

// prune takes from the map m, and from have, which tells what is in it, all that is not in want.
func prune[K comparable](m *ebpf.Map, have, want map[K]bool) error {
	for k := range have {
		if want[k] {
			continue
		}
		if err := m.Delete(k); err != nil {
			return err
		}
		delete(have, k)
	}
	return nil
}

// keys returns the map keys of an endpoint: two when it is of both families.
func (e *Endpoint) keys() []steerEndpoint {
	var port [2]byte
	binary.BigEndian.PutUint16(port[:], e.Port)
	k := steerEndpoint{Proto: e.Proto, Port: binary.NativeEndian.Uint16(port[:])}
	if !e.Addr.IsValid() {
		k4, k6 := k, k
		k4.Family, k6.Family = 4, 6
		return []steerEndpoint{k4, k6}
	}
	k.Family, k.Addr = family(e.Addr)
	return []steerEndpoint{k}
}

// family returns an address as the program's maps hold it.
func family(a netip.Addr) (fam uint8, bytes [16]byte) {
	if a = a.Unmap(); a.Is4() {
		b := a.As4()
		copy(bytes[:], b[:])
		return 4, bytes
	}
	return 6, a.As16()
}

// Counters reads the program's counters.
func (s *Steering) Counters() (Counters, error) {
	var c Counters
	for i, p := range []*uint64{
		&c.SteeredTCP, &c.SteeredSCTP, &c.SteeredUDP, &c.SteeredICMP,
		&c.Passed, &c.PassedFragment, &c.Malformed, &c.NoSocket,
		&c.SteeredFragment, &c.CopiedFragment, &c.DroppedFragment,
	} {
		var perCPU []uint64
		if err := s.objs.Counters.Lookup(uint32(i), &perCPU); err != nil {
			return Counters{}, fmt.Errorf("bpf: counters: %w", err)
		}
		for _, n := range perCPU {
			*p += n
		}
	}
	return c, nil
}

// Close detaches the program from every interface and unloads it.
func (s *Steering) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	var errs []error
	for _, a := range s.links {
		errs = append(errs, a.link.Close())
	}
	errs = append(errs, s.objs.Close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("bpf: close: %w", err)
	}
	return nil
}
