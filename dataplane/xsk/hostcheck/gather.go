// Package hostcheck finds out what a host and an interface lack for iwarpd, and how to fix it.
// Gather collects facts, and JudgeHost and JudgeInterface evaluate them.
package hostcheck

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
)

// Facts are the results of Gather.
type Facts struct {
	Kernel       string // release, as uname reports it
	Capabilities uint64 // effective capabilities of this process
	BPF          error  // reason why bpf(2) is refused whatever the capabilities, or nil
	MemLock      uint64 // limit of locked memory of this process, in bytes
	Files        uint64 // limit of descriptors; the daemon raises its soft limit to the hard one
	Mappings     uint64 // vm.max_map_count; 0 if it cannot be read
	CPUs         int
	IPsec        int    // IPsec policies of the host, as far as this process may read them
	Unguarded    error  // reason why client memory is not protected against holes, or nil; set from shm.Guarded, not by Gather
	JIT          string // net.core.bpf_jit_enable; "" if it cannot be read

	Interface *Interface // nil if no interface has that name
	Others    []string   // names of the interfaces, without loopback
}

// Interface holds the facts about an interface.
type Interface struct {
	Name      string
	Unfit     string // result of Unfit
	Loopback  bool
	Up        bool
	Ethernet  bool
	Addresses int      // number, including the VLANs on it, without link-local IPv6 addresses
	Unusable  string   // an address that the kernel does not use, and why; "" if there is none
	VLANs     int      // interfaces of VLANs on it
	Rivals    []string // other interfaces that answer ARP for its addresses on the same network
	Driver    string   // "" if the interface does not report it
	Kind      string   // kind of a virtual interface: veth, bond, ...
	MTU       int
	Merged    uint32 // longest packet of merged segments that the interface takes or delivers, in bytes; 0: not known
	Queues    int
	XDP       bool            // an XDP program is attached
	Generic   bool            // the program runs in generic mode
	Served    bool            // by an iwarpd: with XDP by AF_XDP sockets, otherwise by packet sockets
	ZeroCopy  []bool          // one for each AF_XDP socket on it; empty if the kernel does not list them
	Features  map[string]bool // enabled offloads, by their names in ethtool
	Peer      *Interface      // peer of a veth in this namespace
	PeerAway  bool            // the peer of the veth is in another namespace
}

// Gather collects the facts about the host and the interface with that name, which is served together with others.
func Gather(name string, served ...string) (*Facts, error) {
	f := &Facts{CPUs: runtime.NumCPU()}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, fmt.Errorf("hostcheck: uname: %w", err)
	}
	f.Kernel = unix.ByteSliceToString(u.Release[:])
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		return nil, fmt.Errorf("hostcheck: RLIMIT_MEMLOCK: %w", err)
	}
	f.MemLock = lim.Cur
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return nil, fmt.Errorf("hostcheck: RLIMIT_NOFILE: %w", err)
	}
	f.Files = lim.Max
	f.Capabilities, f.BPF = capabilities(), bpfRefused()
	if b, err := os.ReadFile("/proc/sys/net/core/bpf_jit_enable"); err == nil {
		f.JIT = strings.TrimSpace(string(b))
	}
	if b, err := os.ReadFile("/proc/sys/vm/max_map_count"); err == nil {
		f.Mappings, _ = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	}
	if policies, err := netlink.XfrmPolicyList(netlink.FAMILY_ALL); err == nil { // only root may list them
		f.IPsec = len(policies)
	}
	var err error
	if f.Others, err = Interfaces(); err != nil {
		return nil, fmt.Errorf("hostcheck: %w", err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return f, nil
	}
	e, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("hostcheck: ethtool: %w", err)
	}
	defer e.Close()
	f.Interface = look(e, link)
	f.Interface.Unfit = Unfit(name)
	f.Interface.Rivals = rivals(link, served)
	for _, l := range vlansOn(link) {
		f.Interface.addresses(l)
		f.Interface.VLANs++
	}
	if f.Interface.Kind == "veth" {
		// The index belongs to the namespace of the peer.
		if peer, err := netlink.LinkByIndex(link.Attrs().ParentIndex); err == nil && link.Attrs().NetNsID < 0 {
			f.Interface.Peer = look(e, peer)
		} else {
			f.Interface.PeerAway = true
		}
	}
	return f, nil
}

// Interfaces returns the names of the host's interfaces, without loopback.
func Interfaces() (names []string, err error) {
	all, err := net.Interfaces()
	for _, i := range all {
		if i.Flags&net.FlagLoopback == 0 {
			names = append(names, i.Name)
		}
	}
	return names, err
}

// umemZeroCopy is XDP_DU_F_ZEROCOPY of linux/xdp_diag.h.
const umemZeroCopy = 1

// look collects the facts about one interface.
func look(e *ethtool.Ethtool, link netlink.Link) *Interface {
	a := link.Attrs()
	i := &Interface{
		Name: a.Name, Loopback: a.Flags&net.FlagLoopback != 0, Up: a.Flags&net.FlagUp != 0, Kind: link.Type(), MTU: a.MTU,
		Ethernet: len(a.HardwareAddr) == 6, XDP: a.Xdp != nil && a.Xdp.Attached, Generic: a.Xdp != nil && a.Xdp.AttachMode == nl.XDP_ATTACHED_SKB, Features: map[string]bool{},
	}
	i.Merged = max(a.GROMaxSize, a.GROIPv4MaxSize, a.GSOMaxSize, a.GSOIPv4MaxSize)
	i.Queues, _ = xsk.Queues(a.Name)
	i.Queues = xsk.BusyQueues(link, i.Queues)
	i.Driver, _ = e.DriverName(a.Name)
	if socks, err := netlink.SocketDiagXDP(); err == nil { // CONFIG_XDP_SOCKETS_DIAG
		for _, s := range socks {
			if s.XDPInfo != nil && s.XDPInfo.Ifindex == uint32(a.Index) && s.XDPInfo.Umem != nil {
				i.ZeroCopy = append(i.ZeroCopy, s.XDPInfo.Umem.Flags&umemZeroCopy != 0)
			}
		}
	}
	i.Served = bpf.Served(link)
	i.addresses(link)
	if features, err := e.Features(a.Name); err == nil {
		for name, on := range features {
			if on {
				i.Features[name] = true
			}
		}
	}
	return i
}

// addresses adds the addresses of link, except link-local IPv6 addresses, which every interface has.
func (i *Interface) addresses(link netlink.Link) {
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return
	}
	for _, a := range addrs {
		switch {
		case a.IP.To4() == nil && a.IP.IsLinkLocalUnicast():
		case a.Flags&unix.IFA_F_DADFAILED != 0:
			i.Unusable = fmt.Sprintf("another host has %v (duplicate address detection)", a.IP)
		case a.Flags&unix.IFA_F_TENTATIVE != 0:
			i.Unusable = fmt.Sprintf("%v is being checked for duplicates, which takes two seconds once there is a carrier", a.IP)
		default:
			i.Addresses++
		}
	}
}

// Unusable returns an address of the named interface, or of a VLAN on it, that the kernel does not use, and why, or "".
func Unusable(name string) string {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return ""
	}
	var i Interface
	for _, l := range append(vlansOn(l), l) {
		i.addresses(l)
	}
	return i.Unusable
}

// rivals returns the interfaces that are not served, have an IPv4 address in a network of link, and answer ARP for all
// addresses of the host, as Linux does by default.
func rivals(link netlink.Link, served []string) (names []string) {
	if arpIgnored("all") {
		return nil
	}
	all, err := netlink.LinkList()
	if err != nil {
		return nil
	}
	own, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return nil
	}
	for _, l := range all {
		a := l.Attrs()
		if a.Index == link.Attrs().Index || a.Flags&(net.FlagUp|net.FlagLoopback) != net.FlagUp || a.RawFlags&unix.IFF_NOARP != 0 || slices.Contains(served, a.Name) || arpIgnored(a.Name) {
			continue
		}
		theirs, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err == nil && slices.ContainsFunc(theirs, func(t netlink.Addr) bool {
			return slices.ContainsFunc(own, func(o netlink.Addr) bool { return o.Contains(t.IP) && t.Contains(o.IP) })
		}) {
			names = append(names, a.Name)
		}
	}
	return names
}

// arpIgnored reports whether an interface answers ARP for its own addresses only.
func arpIgnored(name string) bool {
	b, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + name + "/arp_ignore")
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

// vlansOn returns the VLANs on link, and the VLANs on these.
func vlansOn(link netlink.Link) []netlink.Link {
	all, err := netlink.LinkList()
	if err != nil {
		return nil
	}
	on := []netlink.Link{link}
	for range 2 { // number of tags that a frame may have
		for _, l := range all {
			if l.Type() == "vlan" && !slices.Contains(on, l) && slices.ContainsFunc(on, func(o netlink.Link) bool { return o.Attrs().Index == l.Attrs().ParentIndex }) {
				on = append(on, l)
			}
		}
	}
	return on[1:]
}

// capabilities returns the effective capabilities of this thread.
func capabilities() uint64 {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if unix.Capget(&h, &d[0]) != nil {
		return 0
	}
	return uint64(d[1].Effective)<<32 | uint64(d[0].Effective)
}

// bpfRefused returns the error of bpf(2) if a seccomp profile refuses it, as some of container runtimes do. The kernel
// itself refuses a command that does not exist by another error.
func bpfRefused() error {
	const noCommand = 1 << 30
	if _, _, err := unix.Syscall(unix.SYS_BPF, noCommand, 0, 0); err != unix.EINVAL {
		return err
	}
	return nil
}
