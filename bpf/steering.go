// Package bpf loads and controls the programs that distinguish the frames of claimed endpoints
// from all others (steer.c). At XDP, a program redirects them to the AF_XDP socket of their
// queue. For packet sockets there are two others: a socket filter accepts only these frames,
// and a program at tc ingress, which runs after the packet sockets, drops them, so that the
// kernel does not answer. All other frames go to the kernel.
//
// XDP sees frames as the device delivers them. Three receive offloads must therefore be off on
// an interface: rxvlan (it removes the VLAN tag from the frame), gro-hw and lro. If the peer is
// a kernel at the other end of a veth pair, tx, tso and gso must be off there, since its frames
// would otherwise lack checksums and exceed the MTU.
package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Errors of this package, for errors.Is.
var (
	// ErrPrivilege means that the process lacks CAP_BPF or CAP_NET_ADMIN, or that its seccomp profile refuses bpf(2).
	ErrPrivilege = errors.New("needs CAP_BPF and CAP_NET_ADMIN (root, or AmbientCapabilities= in the unit), and in a container a seccomp profile that allows bpf")
	// ErrNoIngress means that the kernel does not support bpf_link at tc ingress.
	ErrNoIngress = errors.New("programs at tc ingress need Linux 6.6")
	// ErrUnclaimed is returned by Unclaim for an endpoint that is not claimed.
	ErrUnclaimed = errors.New("endpoint is not claimed")
)

// Endpoint is a local transport address whose frames are steered. Addr 0.0.0.0 stands for
// all IPv4 addresses of the host, :: for all IPv6 addresses, and the zero netip.Addr for
// both.
type Endpoint struct {
	Proto uint8 // IP protocol number: TCP 6, UDP 17, SCTP 132
	Addr  netip.Addr
	Port  uint16
	// Peer is the only remote endpoint whose frames are steered; the zero AddrPort stands for all. Claims of an
	// endpoint for different peers steer the frames of all.
	Peer netip.AddrPort
}

func (e Endpoint) String() string {
	addr := "*"
	if e.Addr.IsValid() {
		addr = e.Addr.String()
	}
	return fmt.Sprintf("proto %d %s port %d", e.Proto, addr, e.Port)
}

// Options are the options of Load.
type Options struct {
	// Queues is the number of receive queues that may have a socket; 0 means 256.
	Queues int
	// Endpoints is the number of endpoints that can be claimed; one for both families
	// counts twice. 0 means DefaultEndpoints.
	Endpoints int
}

// DefaultEndpoints suffices for all ports of one address, and as many listeners of both
// families.
const DefaultEndpoints = 1 << 17

// maxAddresses is the number of addresses that SetAddresses takes. Some hosts have thousands of them.
const maxAddresses = 1 << 16

// Counters count frames by verdict, summed over all CPUs.
type Counters struct {
	SteeredTCP, SteeredSCTP, SteeredUDP uint64
	SteeredICMP                         uint64 // errors about packets of steered connections
	Passed                              uint64 // passed to the kernel
	PassedFragment                      uint64 // other IP fragments, passed to the kernel
	Malformed                           uint64 // passed, so that the kernel counts them
	NoSocket                            uint64 // for a claimed endpoint, but passed: the queue has no socket
	SteeredFragment                     uint64 // of steered packets: in the ring
	CopiedFragment                      uint64 // arrived before the first fragment: in the ring, and passed
	DroppedFragment                     uint64 // of steered packets: the ring was full
}

// Seen returns the sum of the counters, which grows with each frame that the program sees.
func (c *Counters) Seen() uint64 {
	return c.SteeredTCP + c.SteeredSCTP + c.SteeredUDP + c.SteeredICMP + c.Passed + c.PassedFragment + c.Malformed + c.NoSocket +
		c.SteeredFragment + c.CopiedFragment + c.DroppedFragment
}

// Steering holds the loaded programs and their maps. It is safe for concurrent use.
type Steering struct {
	objs objects

	room int // entries of the map of endpoints

	mu     sync.Mutex
	claims map[steerEndpoint]claim
	hosts  map[steerEndpoint]int  // claims of any port
	stale  map[steerEndpoint]bool // endpoints without a claim that are in the map, since deleting them failed
	local  map[steerAddress]bool
	vlans  map[uint32]bool
	links  map[int]attachment
	closed bool
}

// A claim is an entry of the map of endpoints.
type claim struct {
	n    int // calls of Claim that Unclaim has not undone
	peer steerPeer
}

// objects are the programs and maps. Twin is a second copy of the XDP program, for Renew.
type objects struct {
	steerObjects
	Twin *ebpf.Program `ebpf:"iwarpd_twin"`
}

func (o *objects) Close() error { return errors.Join(o.Twin.Close(), o.steerObjects.Close()) }

// Load loads the programs and their maps into the kernel. Frames are steered only after
// Attach, SetSocket and Claim.
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
	for name, most := range map[string]int{
		steerMapEndpoints: opts.Endpoints, steerMapHosts: opts.Endpoints, steerMapAddresses: maxAddresses,
	} {
		spec.Maps[name].MaxEntries = uint32(most)
		spec.Maps[name].Flags |= unix.BPF_F_NO_PREALLOC // most entries are never used
	}
	spec.Programs["iwarpd_twin"] = spec.Programs[xdpName].Copy()
	s := &Steering{
		room:   opts.Endpoints,
		claims: map[steerEndpoint]claim{},
		hosts:  map[steerEndpoint]int{},
		stale:  map[steerEndpoint]bool{},
		local:  map[steerAddress]bool{},
		vlans:  map[uint32]bool{},
		links:  map[int]attachment{},
	}
	if err := spec.LoadAndAssign(&s.objs, nil); err != nil {
		return nil, fmt.Errorf("bpf: load the steering program: %w", explain(err))
	}
	return s, nil
}

// explain adds a remedy to errors that an operator can fix.
func explain(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) && !isVerifier(err) {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	return err
}

func isVerifier(err error) bool {
	_, ok := errors.AsType[*ebpf.VerifierError](err)
	return ok
}

// TapFD returns the descriptor of the filter for packet sockets (SO_ATTACH_BPF), which lets
// them receive only frames for claimed endpoints. It is valid until Close.
// Of a super-frame (a merged packet of several segments) of more than 256 bytes they receive the
// first 256.
func (s *Steering) TapFD() int { return s.objs.IwarpdTap.FD() }

// SuperTapFD returns the descriptor of a filter that lets packet sockets receive only super-frames of
// more than 256 bytes for claimed endpoints. It is valid until Close.
func (s *Steering) SuperTapFD() int { return s.objs.IwarpdTapSuper.FD() }

// SetSocket redirects the claimed frames of a receive queue to an AF_XDP socket. The kernel
// removes the entry when the socket is closed.
func (s *Steering) SetSocket(queue, fd int) error {
	if err := s.objs.Sockets.Update(uint32(queue), uint32(fd), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("bpf: socket of queue %d: %w", queue, explain(err))
	}
	return nil
}

// Claim steers the frames for an endpoint, and ICMP errors about its packets. Claims are
// counted: the endpoint is steered until Unclaim has been called as often as Claim.
func (s *Steering) Claim(e Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropStale()
	keys := e.keys()
	for i, k := range keys {
		if err := s.add(k, peer(e.Peer)); err != nil {
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

// Unclaim undoes one call of Claim.
func (s *Steering) Unclaim(e Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropStale()
	var errs []error
	for _, k := range e.keys() {
		if s.claims[k].n == 0 {
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

// add increments the claims of a key.
func (s *Steering) add(k steerEndpoint, peer steerPeer) error {
	h := k
	h.Port = 0
	if s.hosts[h] == 0 {
		if err := s.objs.Hosts.Put(h, uint32(1)); err != nil {
			return err
		}
	}
	s.hosts[h]++
	c := s.claims[k]
	if c.n > 0 && peer != c.peer {
		peer = steerPeer{}
	}
	if c.n == 0 || peer != c.peer {
		if err := s.objs.Endpoints.Put(k, peer); err != nil {
			_ = s.dropHost(h)
			return err
		}
	}
	s.claims[k] = claim{c.n + 1, peer}
	delete(s.stale, k)
	return nil
}

// drop decrements the claims of a key.
func (s *Steering) drop(k steerEndpoint) error {
	h := k
	h.Port = 0
	err := s.dropHost(h)
	c := s.claims[k]
	if c.n--; c.n > 0 {
		s.claims[k] = c
		return err
	}
	delete(s.claims, k)
	gone := s.objs.Endpoints.Delete(k)
	if gone != nil {
		s.stale[k] = true
	}
	return errors.Join(err, gone)
}

// dropStale deletes again the endpoints that drop could not delete, as when there was no memory. The kernel's own
// connections of their ports would be steered.
func (s *Steering) dropStale() {
	for k := range s.stale {
		if err := s.objs.Endpoints.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return // the others would fail too
		}
		delete(s.stale, k)
	}
}

func (s *Steering) dropHost(h steerEndpoint) error {
	if s.hosts[h]--; s.hosts[h] > 0 {
		return nil
	}
	delete(s.hosts, h)
	return s.objs.Hosts.Delete(h)
}

// SetAddresses sets the addresses that claims of unspecified addresses cover: none if addrs is
// empty. By default they cover every destination address, which is wrong on a host that forwards
// packets.
func (s *Steering) SetAddresses(addrs []netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := map[steerAddress]bool{}
	for _, a := range addrs {
		k := steerAddress{}
		k.Family, k.Addr = family(a)
		want[k] = true
	}
	if err := replace(s.objs.Addresses, s.objs.CheckAddresses, s.local, want); err != nil {
		return fmt.Errorf("bpf: addresses: %w", explain(err))
	}
	return nil
}

// SetVLANs sets the VLANs of the host, each as the identifiers of its tags, outermost
// first. By default frames of all VLANs are steered; afterwards those of other VLANs are
// passed to the kernel, which drops them. Frames without a tag are always steered. At most
// two tags are examined.
func (s *Steering) SetVLANs(vlans [][]uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := map[uint32]bool{}
	for _, tags := range vlans {
		var k uint32
		for _, id := range tags {
			k = k<<12 | uint32(id&0xfff)
		}
		if k != 0 {
			want[k] = true
		}
	}
	if err := replace(s.objs.Vlans, s.objs.CheckVlans, s.vlans, want); err != nil {
		return fmt.Errorf("bpf: VLANs: %w", explain(err))
	}
	return nil
}

// replace makes the keys of the map m, which have mirrors, those of want, and then sets check, so that
// the program looks into the map. It deletes the others first, to have their room.
func replace[K comparable](m *ebpf.Map, check *ebpf.Variable, have, want map[K]bool) error {
	for k := range have {
		if want[k] {
			continue
		}
		if err := m.Delete(k); err != nil {
			return err
		}
		delete(have, k)
	}
	for k := range want {
		if have[k] {
			continue
		}
		if err := m.Put(k, uint32(1)); err != nil {
			return err
		}
		have[k] = true
	}
	return check.Set(uint32(1))
}

// keys returns the map keys of an endpoint: two if it stands for both families.
func (e *Endpoint) keys() []steerEndpoint {
	k := steerEndpoint{Proto: e.Proto, Port: bigEndian(e.Port)}
	if !e.Addr.IsValid() {
		k4, k6 := k, k
		k4.Family, k6.Family = 4, 6
		return []steerEndpoint{k4, k6}
	}
	k.Family, k.Addr = family(e.Addr)
	return []steerEndpoint{k}
}

// peer converts a remote endpoint to the format of the map.
func peer(a netip.AddrPort) (p steerPeer) {
	if a.IsValid() {
		p.Port = bigEndian(a.Port())
		_, p.Addr = family(a.Addr())
	}
	return p
}

// bigEndian returns the number that has the bytes of port in network byte order.
func bigEndian(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// family converts an address to the format of the maps.
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Counters{}, fmt.Errorf("bpf: counters: %w", unix.EBADF)
	}
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
