package hostcheck

import (
	"errors"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// healthy is a host on which nothing is wrong.
func healthy() *Facts {
	return &Facts{
		Kernel: "6.1.0-18-amd64", Capabilities: 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_NET_RAW | 1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON | 1<<unix.CAP_IPC_LOCK,
		MemLock: 1 << 30, Files: 65536, Mappings: 65530, CPUs: 8, JIT: "1", Others: []string{"eth0"},
		Interface: &Interface{Name: "eth0", Up: true, Ethernet: true, Addresses: 1, Driver: "ice", Kind: "device", MTU: 1500, Queues: 4, Features: map[string]bool{}},
	}
}

func TestJudge(t *testing.T) {
	veth := func(f *Facts) {
		f.Interface.Kind, f.Interface.Driver = "veth", "veth"
		f.Interface.Peer = &Interface{Name: "peer0", Features: map[string]bool{}}
	}
	for _, tt := range []struct {
		name   string
		change func(*Facts)
		what   string
		state  State
		fix    string
	}{
		{"healthy", func(*Facts) {}, "interface", OK, ""},
		{"old kernel", func(f *Facts) { f.Kernel = "5.10.0-28" }, "kernel", Fail, "boot"},
		{"older kernel", func(f *Facts) { f.Kernel = "5.14.0-503" }, "kernel", Warn, "boot"},
		{"odd kernel", func(f *Facts) { f.Kernel = "mine" }, "kernel", Warn, "6.1"},
		{"no capabilities", func(f *Facts) { f.Capabilities = 0 }, "capabilities", Fail, "root"},
		{"seccomp", func(f *Facts) { f.BPF = unix.EPERM }, "capabilities", Fail, "seccomp"},
		{"SYS_ADMIN for both", func(f *Facts) { f.Capabilities ^= 1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON | 1<<unix.CAP_SYS_ADMIN }, "capabilities", OK, ""},
		{"little memory", func(f *Facts) { f.Capabilities ^= 1 << unix.CAP_IPC_LOCK; f.MemLock = 8 << 20 }, "locked memory", Warn, "LimitMEMLOCK"},
		{"all memory", func(f *Facts) { f.Capabilities ^= 1 << unix.CAP_IPC_LOCK; f.MemLock = unix.RLIM_INFINITY }, "locked memory", OK, ""},
		{"few files", func(f *Facts) { f.Files = 1024 }, "open files", Warn, "LimitNOFILE"},
		{"few mappings", func(f *Facts) { f.Mappings = 10000 }, "mappings", Warn, "vm.max_map_count"},
		{"mappings unknown", func(f *Facts) { f.Mappings = 0 }, "mappings", OK, ""},
		{"no userfaultfd", func(f *Facts) { f.Unguarded = unix.EPERM }, "userfaultfd", Warn, "seccomp"},
		{"host tools", func(*Facts) {}, "host tools", OK, ""},
		{"IPsec policies", func(f *Facts) { f.IPsec = 2 }, "host tools", Warn, "MACsec"},
		{"no JIT", func(f *Facts) { f.JIT = "0" }, "BPF compiler", Warn, "sysctl"},
		{"no interface", func(f *Facts) { f.Interface = nil }, "interface", Fail, "eth0"},
		{"loopback", func(f *Facts) { f.Interface.Loopback = true }, "interface", Fail, "veth"},
		{"down", func(f *Facts) { f.Interface.Up = false }, "interface", Fail, "ip link set dev eth0 up"},
		{"no address", func(f *Facts) { f.Interface.Addresses = 0 }, "interface", Fail, "ip address add"},
		{"driver without XDP", func(f *Facts) { f.Interface.Driver = "e1000e" }, "driver", Warn, "generic"},
		{"driver unknown", func(f *Facts) { f.Interface.Driver = "" }, "driver", Warn, "generic"},
		{"bond", func(f *Facts) { f.Interface.Kind, f.Interface.Driver = "bond", "bonding" }, "driver", OK, ""},
		{"duplicate address", func(f *Facts) { f.Interface.Unusable = "another host has fd00::1" }, "interface", Warn, "another one"},
		{"no other address", func(f *Facts) {
			f.Interface.Addresses, f.Interface.Unusable = 0, "another host has fd00::1"
		}, "interface", Fail, "wait, or ip address add"},
		{"tunnel", func(f *Facts) { f.Interface.Ethernet = false }, "interface", Fail, "tap"},
		{"program attached", func(f *Facts) { f.Interface.XDP = true }, "XDP program", Warn, "xdp off"},
		{"iwarpd runs", func(f *Facts) { f.Interface.XDP, f.Interface.Served = true, true }, "XDP program", OK, ""},
		{"iwarpd runs with packet sockets", func(f *Facts) { f.Interface.Served = true }, "XDP program", OK, ""},
		{"many queues", func(f *Facts) { f.Interface.Queues = 64 }, "queues", Warn, "combined 8"},
		{"many queues of a bond", func(f *Facts) { f.Interface.Kind, f.Interface.Queues = "bond", 16 }, "queues", Warn, "queues: 0-7"},
		{"large MTU", func(f *Facts) { f.Interface.MTU = 65535 }, "MTU", Warn, "9216"},
		{"small MTU", func(f *Facts) { f.Interface.MTU = 1000 }, "MTU", Warn, "1500"},
		{"LRO", func(f *Facts) { f.Interface.Features["rx-lro"] = true }, "receive offloads", Warn, "ethtool -K eth0 lro off"},
		{"LRO and GRO", func(f *Facts) { f.Interface.Features["rx-lro"], f.Interface.Features["rx-gro-hw"] = true, true }, "receive offloads", Warn, "lro off rx-gro-hw off"},
		{"lists of segments", func(f *Facts) {
			f.Interface.Driver, f.Interface.Kind, f.Interface.Features["rx-gro-list"] = "veth", "veth", true
		}, "receive offloads", Warn, "ethtool -K eth0 rx-gro-list off"},
		{"lists of segments after a native program", func(f *Facts) { f.Interface.Features["rx-gro-list"] = true }, "receive offloads", OK, ""},
		{"VLAN tags removed", func(f *Facts) {
			f.Interface.VLANs, f.Interface.Features["rx-vlan-hw-parse"] = 1, true
		}, "receive offloads", Warn, "ethtool -K eth0 rxvlan off"},
		{"VLAN tags removed, no VLAN", func(f *Facts) { f.Interface.Features["rx-vlan-hw-parse"] = true }, "receive offloads", OK, ""},
		{"BIG TCP", func(f *Facts) {
			f.Interface.Driver, f.Interface.Kind, f.Interface.Merged, f.Kernel = "veth", "veth", 200000, "6.6.9"
		}, "receive offloads", Warn, "gro_ipv4_max_size 65536"},
		{"BIG TCP after a native program", func(f *Facts) { f.Interface.Merged = 200000 }, "receive offloads", OK, ""},
		{"no rival", func(*Facts) {}, "ARP", OK, ""},
		{"rival", func(f *Facts) { f.Interface.Rivals = []string{"eth1.5"} }, "ARP", Warn, "sysctl net/ipv4/conf/eth1.5/arp_ignore=1"},
		{"veth", veth, "veth peer", OK, ""},
		{"veth peer with offloads", func(f *Facts) { veth(f); f.Interface.Peer.Features["tx-checksum-ip-generic"] = true }, "veth peer", Warn, "ethtool -K peer0 tx off"},
		{"veth peer with offloads, Linux 6.6", func(f *Facts) {
			veth(f)
			f.Kernel = "6.6.9"
			f.Interface.Peer.Features["tx-checksum-ip-generic"] = true
		}, "veth peer", OK, ""},
		{"veth peer away", func(f *Facts) { veth(f); f.Interface.Peer, f.Interface.PeerAway = nil, true }, "veth peer", Warn, "ethtool -K PEER"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := healthy()
			tt.change(f)
			all := judge(f)
			found := false
			for _, g := range all {
				if g.Text == "" || g.State != OK && g.Fix == "" {
					t.Errorf("%+v says too little", g)
				}
				if g.Check != tt.what {
					if g.State != OK {
						t.Errorf("%+v, which is not what was broken", g)
					}
					continue
				}
				found = true
				if g.State != tt.state || !strings.Contains(g.Fix, tt.fix) {
					t.Errorf("%+v; want %s, %q", g, tt.state, tt.fix)
				}
			}
			if !found || Worst(all) != tt.state {
				t.Errorf("found %v, worst %s; want %s", found, Worst(all), tt.state)
			}
		})
	}
}

// TestCompilerUnseen checks that doctor does not say that the BPF compiler is on where the host's setting cannot be read.
func TestCompilerUnseen(t *testing.T) {
	f := healthy()
	f.JIT = ""
	for _, g := range judge(f) {
		if g.Check == "BPF compiler" && (g.State != OK || g.Text == "on") {
			t.Errorf("%+v", g)
		}
	}
}

// TestGather looks at a real veth, whose offloads testenv has switched off.
func TestGather(t *testing.T) {
	v := testenv.NewVeth(t, 1400)
	var f *Facts
	if err := v.A.NS.Do(func() (err error) { f, err = Gather(v.A.Name); return err }); err != nil {
		t.Fatal(err)
	}
	i := f.Interface
	if i == nil || !i.Up || !i.Ethernet || i.Kind != "veth" || i.Driver != "veth" || i.MTU != 1400 || i.Queues != 1 || i.Merged != 1<<16 || i.Addresses != 2 || i.XDP || i.Served || !i.PeerAway {
		t.Errorf("%+v", i)
	}
	if f.Capabilities == 0 || f.Files == 0 || f.Mappings == 0 || f.Kernel == "" || f.CPUs < 1 || len(f.Others) != 1 {
		t.Errorf("%+v", f)
	}
	if all := judge(f); Worst(all) == Fail {
		t.Errorf("%+v", all)
	}
	// The addresses of VLANs on it count, and those of loopback only where they are served.
	err := v.A.NS.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		service := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 9, 9, 9), Mask: net.CIDRMask(32, 32)}}
		if err := netlink.AddrAdd(lo, service); err != nil {
			return err
		}
		if f, err = Gather(v.A.Name); err == nil && f.Interface.Addresses != 2 {
			t.Errorf("%d addresses beside one of loopback; want 2", f.Interface.Addresses)
		}
		parent, err := netlink.LinkByName(v.A.Name)
		if err != nil {
			return err
		}
		for n, name := range []string{"outer", "inner"} {
			l := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: parent.Attrs().Index}, VlanId: n + 5}
			if err := netlink.LinkAdd(l); errors.Is(err, unix.EOPNOTSUPP) {
				t.Log("this kernel has no VLANs")
				return nil
			} else if err != nil {
				return err
			}
			if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, byte(n), 1), Mask: net.CIDRMask(24, 32)}}); err != nil {
				return err
			}
			parent = l
		}
		if f, err = Gather(v.A.Name); err == nil && f.Interface.Addresses != 4 {
			t.Errorf("%d addresses with those of two VLANs; want 4", f.Interface.Addresses)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := v.A.NS.Do(func() (err error) { f, err = Gather("none"); return err }); err != nil || f.Interface != nil {
		t.Errorf("an interface that is not there: %+v, %v", f.Interface, err)
	}
}

// judge evaluates all facts.
func judge(f *Facts) []Finding { return append(JudgeHost(f), JudgeInterface(f)...) }

// TestRivals checks that an interface on the same network is found, unless it is served too or answers ARP only for its
// own addresses.
func TestRivals(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	err := v.A.NS.Do(func() error {
		near, far := &net.IPNet{IP: v.A.Addr4.Next().Next().AsSlice(), Mask: net.CIDRMask(24, 32)}, &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(24, 32)}
		for name, addr := range map[string]*net.IPNet{"near": near, "far": far} {
			l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "er"}
			if err := errors.Join(netlink.LinkAdd(l), netlink.LinkSetUp(l), netlink.AddrAdd(l, &netlink.Addr{IPNet: addr})); err != nil {
				return err
			}
		}
		silent := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "silent"}, PeerName: "silenter"}
		if err := errors.Join(netlink.LinkAdd(silent), netlink.LinkSetARPOff(silent), netlink.LinkSetUp(silent), netlink.AddrAdd(silent, &netlink.Addr{IPNet: near})); err != nil {
			return err
		}
		loopback, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(loopback, &netlink.Addr{IPNet: near}); err != nil {
			return err
		}
		check := func(want []string, served ...string) {
			t.Helper()
			if f, err := Gather(v.A.Name, served...); err != nil || !slices.Equal(f.Interface.Rivals, want) {
				t.Errorf("%v, %v; want %v", f.Interface.Rivals, err, want)
			}
		}
		check([]string{"near"})
		check(nil, v.A.Name, "near")
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/near/arp_ignore", []byte("1"), 0); err != nil {
			return err
		}
		check(nil)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestBPFRefused checks that a seccomp profile is noticed that refuses bpf(2) to a process with all capabilities.
func TestBPFRefused(t *testing.T) {
	testenv.RequireRoot(t)
	if err := bpfRefused(); err != nil {
		t.Fatalf("without a profile: %v", err)
	}
	refused := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the profile stays with the thread, which ends with this goroutine
		refused <- func() error {
			filter := []unix.SockFilter{
				{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the number of the system call
				{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_BPF, Jf: 1},
				{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
				{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
			}
			program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
			if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0); err != nil {
				return err
			}
			return bpfRefused()
		}()
	}()
	if err := <-refused; err != unix.EPERM {
		t.Errorf("with a profile that refuses bpf: %v; want %v", err, unix.EPERM)
	}
}
