package hostcheck

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// State is the severity of a finding.
type State string

// States.
const (
	OK   State = "ok"
	Warn State = "warn" // it works, but not as well as it could
	Fail State = "fail" // iwarpd does not start or does not work
)

// Finding is the result of one check.
type Finding struct {
	Check string `json:"check"`
	State State  `json:"state"`
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"`
}

// JudgeHost evaluates the facts about the host.
func JudgeHost(f *Facts) []Finding {
	return []Finding{f.kernel(), f.capabilities(), f.memory(), f.files(), f.mappings(), f.guard(), f.jit()}
}

// JudgeSockets evaluates the facts for a daemon that uses kernel sockets. Such a daemon needs
// no capabilities, locked memory, BPF or particular interface.
func JudgeSockets(f *Facts) []Finding {
	return []Finding{f.files(), f.mappings(), f.guard()}
}

// JudgeInterface evaluates the facts about the interface.
func JudgeInterface(f *Facts) (out []Finding) {
	i := f.Interface
	if i == nil {
		fix := "give one with --interface"
		if len(f.Others) > 0 {
			fix += ": " + strings.Join(f.Others, ", ")
		}
		return append(out, Finding{"interface", Fail, "no interface has that name", fix})
	}
	if i.Unfit != "" {
		out = append(out, Finding{"kind", Fail, "it is " + i.Unfit, ""})
	}
	out = append(out, i.link(), i.driver(f), i.xdp(), f.queues(), i.mtu(), i.receive(), i.arp(), f.unseen())
	if i.Kind == "veth" {
		out = append(out, i.peer(f))
	}
	return out
}

// Worst returns the most serious state of the findings.
func Worst(all []Finding) State {
	worst := OK
	for _, f := range all {
		if f.State == Fail || f.State == Warn && worst == OK {
			worst = f.State
		}
	}
	return worst
}

// release returns the number of the kernel's release, for example 6001 for 6.1, or 0 if it
// cannot be parsed.
func (f *Facts) release() int {
	var major, minor int
	if n, _ := fmt.Sscanf(f.Kernel, "%d.%d", &major, &minor); n != 2 {
		return 0
	}
	return major*1000 + minor
}

// kernel checks the release of the kernel. XDP programs for multi-buffer frames, and the helper
// that reads fragments, came with 5.18, and some distributions have backported them. iwarpd is
// tested with 6.1 and later.
func (f *Facts) kernel() Finding {
	switch v := f.release(); {
	case v == 0:
		return Finding{"kernel", Warn, "its release " + f.Kernel + " has no number", "see that it is 6.1 or later"}
	case v < 5011:
		return Finding{"kernel", Fail, f.Kernel + " is too old for iwarpd", "boot Linux 6.1 or later; or transport: socket"}
	case v < 5018:
		return Finding{"kernel", Warn, f.Kernel + " lacks XDP programs for frames in pieces, unless its distributor added them", "boot Linux 6.1 or later"}
	}
	return Finding{"kernel", OK, f.Kernel, ""}
}

// needed are the capabilities for AF_XDP and its program. BPF and PERFMON exist since Linux 5.8;
// before, SYS_ADMIN included them.
var needed = []struct {
	bit  int
	name string
}{{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_NET_RAW, "CAP_NET_RAW"}, {unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_PERFMON, "CAP_PERFMON"}}

func (f *Facts) has(bit int) bool { return f.Capabilities&(1<<bit) != 0 }

// MissingCapabilities returns the names of those that iwarpd needs and this thread does not have.
func MissingCapabilities() []string {
	f := Facts{Capabilities: capabilities()}
	return f.missing()
}

func (f *Facts) missing() (names []string) {
	for _, c := range needed {
		wide := c.bit == unix.CAP_BPF || c.bit == unix.CAP_PERFMON
		if !f.has(c.bit) && !(wide && f.has(unix.CAP_SYS_ADMIN)) {
			names = append(names, c.name)
		}
	}
	return names
}

func (f *Facts) capabilities() Finding {
	if missing := f.missing(); len(missing) > 0 {
		return Finding{"capabilities", Fail, "missing: " + strings.Join(missing, ", "), "run this as root; the unit gives the daemon what it needs; without them: transport: socket"}
	}
	if f.BPF != nil {
		return Finding{"capabilities", Fail, "available, but the system call bpf is refused: " + f.BPF.Error(), "allow the system call bpf (a container's seccomp profile); without it: transport: socket"}
	}
	return Finding{"capabilities", OK, "NET_ADMIN, NET_RAW, BPF and PERFMON are available", ""}
}

// enoughMemory suffices for the packet memory of some queues.
const enoughMemory = 256 << 20

func (f *Facts) memory() Finding {
	switch {
	case f.has(unix.CAP_IPC_LOCK):
		return Finding{"locked memory", OK, "no limit (CAP_IPC_LOCK)", ""}
	case f.MemLock == unix.RLIM_INFINITY:
		return Finding{"locked memory", OK, "no limit", ""}
	case f.MemLock < enoughMemory:
		return Finding{"locked memory", Warn, fmt.Sprintf("at most %d KiB: packet memory may not fit", f.MemLock>>10),
			"LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited"}
	}
	return Finding{"locked memory", OK, fmt.Sprintf("up to %d MiB", f.MemLock>>20), ""}
}

// enoughFiles suffices for the connections of a user with the default quota, if all are active
// opens: each holds a descriptor for its port. enoughMappings suffices for their queue pairs,
// at two each.
const enoughFiles, enoughMappings = 8192, 16384

func (f *Facts) files() Finding {
	if f.Files < enoughFiles {
		return Finding{"open files", Warn, fmt.Sprintf("at most %d: each connection made from here holds one", f.Files),
			"LimitNOFILE=524288 in the unit, or ulimit -Hn 524288"}
	}
	return Finding{"open files", OK, fmt.Sprintf("up to %d; each connection made from here holds one", f.Files), ""}
}

func (f *Facts) mappings() Finding {
	switch {
	case f.Mappings == 0:
		return Finding{"mappings", OK, "their limit is not known", ""}
	case f.Mappings < enoughMappings:
		return Finding{"mappings", Warn, fmt.Sprintf("at most %d: each queue pair has two", f.Mappings), "sysctl vm.max_map_count=262144"}
	}
	return Finding{"mappings", OK, fmt.Sprintf("up to %d; each queue pair has two", f.Mappings), ""}
}

func (f *Facts) guard() Finding {
	if f.Unguarded != nil {
		return Finding{"userfaultfd", Warn, "not available: a client can make the daemon allocate memory: " + printable.Error(f.Unguarded),
			"allow the system call userfaultfd (a container's seccomp profile), and boot a kernel with CONFIG_USERFAULTFD"}
	}
	return Finding{"userfaultfd", OK, "holes in the memory of clients are not charged to the daemon", ""}
}

func (f *Facts) jit() Finding {
	switch f.JIT {
	case "": // in any network namespace but the first
		return Finding{"BPF compiler", OK, "this network namespace does not show whether it is on", ""}
	case "0":
		return Finding{"BPF compiler", Warn, "off: the XDP program is interpreted", "sysctl net.core.bpf_jit_enable=1"}
	}
	return Finding{"BPF compiler", OK, "on", ""}
}

func (i *Interface) link() Finding {
	switch {
	case i.Loopback:
		return Finding{"interface", Fail, i.Name + " is loopback, on which AF_XDP is unreliable", "use a network interface, or a veth pair; or transport: socket"}
	case !i.Ethernet: // tun, and tunnels of layer 3
		return Finding{"interface", Fail, i.Name + " carries no Ethernet frames", "use an Ethernet interface, a veth pair or a tap; or transport: socket"}
	case !i.Up:
		return Finding{"interface", Fail, i.Name + " is down", "ip link set dev " + i.Name + " up"}
	case i.Addresses == 0 && i.Unusable != "":
		return Finding{"interface", Fail, i.Name + " has no IP address that can be used: " + i.Unusable,
			"wait, or ip address add ADDR/LEN dev " + i.Name}
	case i.Addresses == 0:
		return Finding{"interface", Fail, i.Name + " has no IP address but link-local ones", "ip address add ADDR/LEN dev " + i.Name}
	case i.Unusable != "":
		return Finding{"interface", Warn, fmt.Sprintf("%s is up; addresses: %d; %s", i.Name, i.Addresses, i.Unusable),
			"wait, or give it another one"}
	}
	return Finding{"interface", OK, fmt.Sprintf("%s is up; addresses: %d", i.Name, i.Addresses), ""}
}

// nativeDrivers support AF_XDP in the driver, most of them without copying.
var nativeDrivers = []string{
	"atlantic", "bnxt_en", "dpaa2-eth", "ena", "fec", "gve", "hv_netvsc", "i40e", "iavf", "ice", "idpf", "igb", "igc", "ixgbe", "ixgbevf",
	"mana", "mlx4_en", "mlx5_core", "mtk_soc_eth", "mvneta", "mvpp2", "nfp", "qede", "sfc", "stmmac", "tsnep", "virtio_net", "vmxnet3",
}

func (i *Interface) driver(f *Facts) Finding {
	switch {
	case i.Kind != "device" && f.release() >= 6006:
		return Finding{"driver", OK, i.Kind + ": packet sockets with a shared ring (link: auto), faster there than AF_XDP", ""}
	case i.Kind != "device":
		return Finding{"driver", OK, i.Kind + ": generic mode, which is faster there", ""}
	case slices.Contains(nativeDrivers, i.Driver):
		return Finding{"driver", OK, i.Driver + " supports XDP: native mode", ""}
	case i.Driver == "":
		return Finding{"driver", Warn, "unknown: XDP may run only in generic mode", "if the daemon does not start: xdp-mode: generic"}
	}
	return Finding{"driver", Warn, i.Driver + " is not known to support XDP: generic mode costs more CPU", "xdp-mode: generic, if native is refused; or a card whose driver supports XDP"}
}

func (i *Interface) xdp() Finding {
	switch {
	case i.Served:
		return Finding{"XDP program", OK, "iwarpd serves the interface; " + i.taken(), ""}
	case i.XDP:
		return Finding{"XDP program", Warn, "one is attached already: iwarpd is running, or another program is in the way; " + i.taken(),
			"systemctl status iwarpd; or ip link set dev " + i.Name + " xdp off"}
	}
	return Finding{"XDP program", OK, "none attached", ""}
}

// taken describes how the attached program and the sockets receive frames now.
func (i *Interface) taken() string {
	if !i.XDP {
		return "mode taken: packet ring"
	}
	mode, zero := "native", 0
	if i.Generic {
		mode = "generic"
	}
	for _, z := range i.ZeroCopy {
		if z {
			zero++
		}
	}
	switch n := len(i.ZeroCopy); {
	case n == 0:
		return "mode taken: " + mode
	case zero == n:
		return "mode taken: " + mode + ", zero copy"
	case zero > 0:
		return fmt.Sprintf("mode taken: %s, zero copy on %d of %d sockets", mode, zero, n)
	}
	return "mode taken: " + mode + ", copy"
}

func (f *Facts) queues() Finding {
	i := f.Interface
	if i.Queues > f.CPUs {
		fix := fmt.Sprintf("ethtool -L %s combined %d", i.Name, f.CPUs)
		if i.Kind != "device" { // most have no ethtool -L, and packet sockets do not depend on it
			fix = fmt.Sprintf("queues: 0-%d", f.CPUs-1)
		}
		return Finding{"queues", Warn, fmt.Sprintf("%d for %d CPUs: each takes a worker thread", i.Queues, f.CPUs), fix}
	}
	if i.Queues == 1 {
		return Finding{"queues", OK, "1: all connections on one worker", ""}
	}
	return Finding{"queues", OK, fmt.Sprintf("%d: connections are spread over them by the card's hash (RSS)", i.Queues), ""}
}

func (i *Interface) mtu() Finding {
	switch {
	case i.MTU > link.MaxMTU:
		text := fmt.Sprintf("%d exceeds the maximum of iwarpd, which uses %d of it", i.MTU, link.MaxMTU)
		return Finding{"MTU", Warn, text, fmt.Sprintf("ip link set dev %s mtu %d", i.Name, link.MaxMTU)}
	case i.MTU < 1280:
		return Finding{"MTU", Warn, fmt.Sprintf("%d is less than IPv6 needs", i.MTU), "ip link set dev " + i.Name + " mtu 1500"}
	}
	return Finding{"MTU", OK, fmt.Sprint(i.MTU), ""}
}

// largestMerged is the longest packet of merged segments that the data plane receives. It is the kernel's default.
const largestMerged = 1 << 16

// receive checks the offloads that change frames. Merged frames do not fit in an XDP frame; those merged by software come after a native
// program. A VLAN tag that the card removes is lost to such a program.
func (i *Interface) receive() Finding {
	native := slices.Contains(nativeDrivers, i.Driver)
	var on []string
	for _, f := range []struct{ feature, short string }{{"rx-lro", "lro"}, {"rx-gro-hw", "rx-gro-hw"}} {
		if i.Features[f.feature] {
			on = append(on, f.short)
		}
	}
	if len(on) > 0 {
		return Finding{"receive offloads", Warn, strings.Join(on, ", ") + ": merged frames do not reach XDP, or keep it from being attached",
			"ethtool -K " + i.Name + " " + strings.Join(on, " off ") + " off"}
	}
	if i.Features["rx-gro-list"] && !native { // the daemon turns it off when it starts
		const text = "rx-gro-list: merged frames that are not for a socket of the kernel have a wrong checksum, and are lost"
		return Finding{"receive offloads", Warn, text, "ethtool -K " + i.Name + " rx-gro-list off; or restart iwarpd"}
	}
	if i.VLANs > 0 && native && i.Features["rx-vlan-hw-parse"] {
		return Finding{"receive offloads", Warn, "rxvlan: the card removes the VLAN tag, so connections in a VLAN get no frames, or those of another one",
			"ethtool -K " + i.Name + " rxvlan off"}
	}
	if i.Merged > largestMerged && !native {
		return Finding{"receive offloads", Warn, fmt.Sprintf("segments may be merged to packets of %d bytes (BIG TCP): longer ones than %d are lost", i.Merged, largestMerged),
			fmt.Sprintf("ip link set dev %s gro_max_size %[2]d gro_ipv4_max_size %[2]d gso_max_size %[2]d gso_ipv4_max_size %[2]d; also on the other end of a veth", i.Name, largestMerged)}
	}
	return Finding{"receive offloads", OK, "none in the way", ""}
}

// arp checks that peers learn no other interface's MAC address: the kernel gets the frames there, and resets the connections.
func (i *Interface) arp() Finding {
	if len(i.Rivals) > 0 {
		return Finding{"ARP", Warn, strings.Join(i.Rivals, ", ") + ": on the same network, and answers ARP for the addresses of " + i.Name + ": the kernel resets connections whose peer sends there",
			"serve both (interfaces), or sysctl net/ipv4/conf/" + i.Rivals[0] + "/arp_ignore=1"}
	}
	return Finding{"ARP", OK, "no other interface is on the same network, or answers for " + i.Name, ""}
}

// peer checks the other end of a veth. Frames from its kernel lack checksums and exceed the
// MTU, unless that end turns its offloads off. Linux 6.6 passes such frames to AF_XDP in
// several pieces.
func (i *Interface) peer(f *Facts) Finding {
	if f.release() >= 6006 {
		return Finding{"veth peer", OK, "a kernel's TCP on that end may use its offloads; for its SCTP: ethtool -K PEER tx off there", ""}
	}
	const fix = "on the other end, if the kernel's stack sends there: ethtool -K PEER tx off tso off gso off"
	if i.PeerAway {
		return Finding{"veth peer", Warn, "in another network namespace: its offloads are not known", fix}
	}
	if i.Peer == nil {
		return Finding{"veth peer", OK, "none", ""}
	}
	var on []string
	for f := range i.Peer.Features {
		if strings.HasPrefix(f, "tx-checksum") || strings.HasPrefix(f, "tx-tcp") && strings.Contains(f, "segmentation") {
			on = append(on, f)
		}
	}
	slices.Sort(on)
	if len(on) > 0 {
		return Finding{"veth peer", Warn, i.Peer.Name + " leaves checksums and segmentation to offloads: " + strings.Join(on, ", "),
			strings.Replace(fix, "PEER", i.Peer.Name, 1)}
	}
	return Finding{"veth peer", OK, i.Peer.Name + " sends whole frames", ""}
}

// unseen lists the tools of the host that do not see iwarpd's connections.
func (f *Facts) unseen() Finding {
	if f.IPsec > 0 {
		return Finding{"host tools", Warn, fmt.Sprintf("IPsec policies: %d: they do not apply to iwarpd, which sends and receives packets in the clear", f.IPsec),
			"protect the network otherwise (MACsec, a gateway), or transport: socket; see docs/security.md"}
	}
	return Finding{"host tools", OK, "nftables, conntrack and IPsec do not see iWARP connections, and tcpdump those over packet sockets only: restrict peers by allow (accept-from, connect-to), capture with iwarpctl capture", ""}
}
