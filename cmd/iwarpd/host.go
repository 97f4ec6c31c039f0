package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// candidates returns the names of the interfaces that there are but loopback.
func candidates() (names []string) {
	all, _ := net.Interfaces()
	for _, i := range all {
		if i.Flags&net.FlagLoopback == 0 {
			names = append(names, i.Name)
		}
	}
	return names
}

// findInterface looks the interface up and sees that it can be served.
func findInterface(name string) (*net.Interface, error) {
	ifi, err := net.InterfaceByName(name)
	if err != nil {
		names := candidates()
		if len(names) == 0 {
			return nil, exitErr(exitInterface, "no interface %q: there is none here but loopback; check the network namespace", name)
		}
		return nil, exitErr(exitInterface, "no interface %q: give one of %s with --interface", name, strings.Join(names, ", "))
	}
	if ifi.Flags&net.FlagLoopback != 0 {
		return nil, exitErr(exitInterface, "interface %s is loopback: AF_XDP is unreliable on it; use a network interface, or a veth pair, "+instead, name)
	}
	if len(ifi.HardwareAddr) != 6 { // tun, and tunnels of layer 3
		return nil, exitErr(exitInterface, "interface %s carries no Ethernet frames: use an Ethernet interface, a veth pair or a tap, "+instead, name)
	}
	if ifi.Flags&net.FlagUp == 0 {
		return nil, exitErr(exitInterface, "interface %s is down: ip link set dev %s up", name, name)
	}
	return ifi, nil
}

// needed are the capabilities that AF_XDP and its program take. BPF and PERFMON
// are there since Linux 5.8; before, SYS_ADMIN was both.
var needed = []struct {
	bit  int
	name string
}{
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_NET_RAW, "CAP_NET_RAW"}, {unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_PERFMON, "CAP_PERFMON"},
}

// checkCapabilities tells which capabilities are missing, before anything is
// half set up for want of them.
func checkCapabilities(status string) error {
	f, err := os.Open(status)
	if err != nil {
		return nil // no /proc: the kernel will tell
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		hex, ok := strings.CutPrefix(lines.Text(), "CapEff:")
		if !ok {
			continue
		}
		have, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		if err != nil {
			return nil
		}
		var missing []string
		for _, c := range needed {
			wide := c.bit == unix.CAP_BPF || c.bit == unix.CAP_PERFMON
			if have&(1<<c.bit) == 0 && !(wide && have&(1<<unix.CAP_SYS_ADMIN) != 0) {
				missing = append(missing, c.name)
			}
		}
		if len(missing) > 0 {
			return exitErr(exitPermission, "capability missing: %s: run as root, or give them with AmbientCapabilities= in the unit, "+instead, strings.Join(missing, ", "))
		}
	}
	return nil
}

// leastFiles are the descriptors without which there is no start: about thirty, some
// for each queue, one for each slot, and a few clients'.
func leastFiles(queues, slots int) uint64 { return 64 + 8*uint64(queues) + uint64(slots) }

// checkFiles sees that the process may have the descriptors that a start takes; most
// is how many it may have. Want of one would be met half way, and the verifier
// of BPF run several times for that.
func checkFiles(most uint64, queues, slots int) error {
	if least := leastFiles(queues, slots); most < least {
		return exitErr(exitFailure, "this process may have at most %d open files, and needs %d and one for each connection: "+moreFiles, most, least)
	}
	return nil
}

// openFiles is how many descriptors the process may have. The runtime has raised the
// soft limit to the hard one.
func openFiles() uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return unix.RLIM_INFINITY // the kernel will tell
	}
	return l.Cur
}

// makeSocketDir makes the folder of the socket, if it alone is missing. The
// function it returns takes it away again, once empty.
func makeSocketDir(socket string) (undo func(), err error) {
	dir := filepath.Dir(socket)
	err = os.Mkdir(dir, 0o755)
	switch {
	case err == nil:
		return func() { _ = os.Remove(dir) }, nil
	case os.IsExist(err):
		return func() {}, nil
	}
	code := exitConfig
	if os.IsPermission(err) {
		code = exitPermission
	}
	return nil, exitErr(code, "socket %s: cannot make its folder: %w: give another path with --socket", socket, err)
}

// checkQueues returns the queues to serve; have is how many there are.
func checkQueues(ifname string, queues []int, have int) ([]int, error) {
	if len(queues) == 0 {
		for q := range have {
			queues = append(queues, q)
		}
		return queues, nil
	}
	for _, q := range queues {
		if q >= have {
			return nil, exitErr(exitInterface, "interface %s has no queue %d: it has 0 to %d; change --queues, or see ethtool -L %s", ifname, q, have-1, ifname)
		}
	}
	return queues, nil
}

// leftOut says what becomes of the frames of the queues that are not served, and
// how to have none there; "" where every queue is.
func leftOut(ifname string, queues []int, have int) string {
	if len(queues) == have {
		return ""
	}
	mend := fmt.Sprintf("ethtool -L %s combined %d", ifname, len(queues)) // where they are the first ones
	weights := make([]byte, 0, 2*have)
	for q := range have {
		served := slices.Contains(queues, q)
		if served && q >= len(queues) {
			mend = ""
		}
		weights = append(weights, ' ', map[bool]byte{false: '0', true: '1'}[served])
	}
	spread := fmt.Sprintf("ethtool -X %s weight%s", ifname, weights)
	if mend != "" {
		spread += ", or " + mend
	}
	return "frames that come on the other queues are left to the kernel, so that some connections cannot be made: serve all queues, or let the interface use these alone: " + spread
}

// checkCPUs sees that there is one CPU for each of the queues, or none for any,
// and that this process may run on it.
func checkCPUs(cpus []int, queues int) error {
	if len(cpus) == 0 {
		return nil
	}
	if len(cpus) != queues {
		return configErr("cpus: %d CPUs for %d queues: give one CPU a queue with --cpus", len(cpus), queues)
	}
	for _, cpu := range cpus {
		if err := mayRunOn(cpu); err != nil {
			return configErr("cpus: CPU %d is not there, is offline, or is not for this process (see /sys/devices/system/cpu/online and AllowedCPUs= of the unit): %w", cpu, err)
		}
	}
	return nil
}

// mayRunOn tries it, on a thread that is given up then.
func mayRunOn(cpu int) error {
	tried := make(chan error)
	go func() {
		runtime.LockOSThread()
		var set unix.CPUSet
		set.Set(cpu)
		tried <- unix.SchedSetaffinity(0, &set)
	}()
	return <-tried
}
