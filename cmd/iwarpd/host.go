package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// findInterface returns the named interface if the daemon can use it.
func findInterface(name string) (*net.Interface, error) {
	ifi, err := net.InterfaceByName(name)
	if err := unasked(name, err); err != nil {
		return nil, err
	}
	if err != nil {
		if strings.Contains(name, ",") {
			return nil, exitErr(exitInterface, "no interface %q: list several with --interfaces", name)
		}
		if why := hostcheck.Unfit(name); why != "" {
			return nil, exitErr(exitInterface, "no interface %q: it is %s", name, why)
		}
		names, _ := hostcheck.Interfaces()
		if len(names) == 0 {
			return nil, exitErr(exitInterface, "no interface %q: there is none here but loopback; check the network namespace", name)
		}
		return nil, exitErr(exitInterface, "no interface %q: give one of %s with --interface", name, strings.Join(names, ", "))
	}
	if ifi.Flags&net.FlagLoopback != 0 {
		return nil, exitErr(exitInterface, "interface %s is loopback: AF_XDP is unreliable on it; use a network interface, or a veth pair, "+instead, name)
	}
	if len(ifi.HardwareAddr) != 6 { // tun, and layer 3 tunnels
		return nil, exitErr(exitInterface, "interface %s carries no Ethernet frames: use an Ethernet interface, a veth pair or a tap, "+instead, name)
	}
	if why := hostcheck.Unfit(name); why != "" {
		return nil, exitErr(exitInterface, "interface %s is %s", name, why)
	}
	if ifi.Flags&net.FlagUp == 0 {
		return nil, exitErr(exitInterface, "interface %s is down: ip link set dev %s up", name, name)
	}
	return ifi, nil
}

// unasked returns an error if err, with which a look-up of the interface has failed, says that the kernel could not be
// asked for it, as without memory: it may exist.
func unasked(name string, err error) error {
	if failed, ok := errors.AsType[*os.SyscallError](err); ok {
		return fmt.Errorf("interface %s: cannot ask the kernel for it: %w", name, failed)
	}
	return nil
}

// checkCapabilities returns an error that names the missing capabilities, before anything is set
// up.
func checkCapabilities() error {
	if missing := hostcheck.MissingCapabilities(); len(missing) > 0 {
		return exitErr(exitPermission, "capability missing: %s: run as root, or give them with AmbientCapabilities= in the unit, "+instead, strings.Join(missing, ", "))
	}
	return nil
}

// leastFiles returns the number of descriptors needed to start: about thirty, some for each queue,
// one for each slot, and a few for clients.
func leastFiles(queues, slots int) uint64 { return 64 + 8*uint64(queues) + uint64(slots) }

// checkFiles returns an error if the descriptor limit most is too low to start. Otherwise the
// failure would come late, and after the BPF verifier had run several times.
func checkFiles(most uint64, queues, slots int) error {
	if least := leastFiles(queues, slots); most < least {
		return configErr("this process may have at most %d open files, and needs %d and one for each connection: "+moreFiles, most, least)
	}
	return nil
}

// leastThreads returns the number of threads needed to start: those of Go's runtime, which hardly runs on more than a few
// CPUs at a time, one for each worker, and some for clients.
func leastThreads(workers int) uint64 { return 64 + uint64(min(runtime.GOMAXPROCS(0), 16)+workers) }

// moreThreads is the remedy for a lack of threads.
const moreThreads = "raise the limit with TasksMax= or LimitNPROC= in the unit, ulimit -u, " +
	"or --pids-limit of a container"

// checkThreads returns an error if the limit of threads most is too low to start: Go's runtime ends the process when it
// has none left.
func checkThreads(most uint64, workers int) error {
	if least := leastThreads(workers); most < least {
		return configErr("this process may have at most %d threads, and needs %d: "+moreThreads, most, least)
	}
	return nil
}

// fewerQueues is the remedy for more queues than a daemon can have workers.
const fewerQueues = "choose them with --queues, or reduce their number with ethtool -L"

// checkWorkers returns an error if clients could not use so many workers.
func checkWorkers(workers int) error {
	if workers > ctrl.MaxWorkers {
		return configErr("queues: %d need as many workers, and a daemon has at most %d: "+fewerQueues, workers, ctrl.MaxWorkers)
	}
	return nil
}

// checkLimits returns an error unless this process may have what so many workers need. pinned is the number of those
// that run on the CPUs of the configuration.
func (s *settings) checkLimits(workers, pinned int) error {
	return cmp.Or(
		checkWorkers(workers), checkFiles(openFiles(), workers, s.Slots.Count),
		checkThreads(ctrl.Threads(), workers), checkCPUs(s.CPUs, pinned),
	)
}

// openFiles returns the descriptor limit. The Go runtime has raised the soft limit to the hard
// limit.
func openFiles() uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return unix.RLIM_INFINITY // the kernel will report it
	}
	return l.Cur
}

// leastMemory are the limits of memory below which Go's runtime may end the daemon with its stacks,
// at any time.
var leastMemory = []struct {
	resource   int
	what       string
	unit, flag string
	bytes      uint64
}{
	{unix.RLIMIT_AS, "address space", "LimitAS", "-v", 4 << 30},
	{unix.RLIMIT_DATA, "data", "LimitDATA", "-d", 1 << 30},
}

// checkMemory returns an error if the process may not have enough memory.
func checkMemory() error {
	for _, m := range leastMemory {
		var l unix.Rlimit
		if unix.Getrlimit(m.resource, &l) == nil && l.Cur < m.bytes {
			return configErr("this process may have at most %d MiB of %s, and needs %d: raise the limit with %s=infinity in the unit, or ulimit %s unlimited",
				l.Cur>>20, m.what, m.bytes>>20, m.unit, m.flag)
		}
	}
	return nil
}

// checkMounts returns an error if a file system that the kernel serves is missing, as in a container
// that was made by hand. Later errors would not say so.
func checkMounts() error {
	for _, m := range []struct{ file, how string }{
		{"/proc/self/status", "mount -t proc proc /proc"},
		{"/sys/class/net", "mount -t sysfs sysfs /sys"},
	} {
		if err := unix.Access(m.file, unix.R_OK); err != nil {
			return exitErr(exitFailure, "%s cannot be read: %w: %s", m.file, err, m.how)
		}
	}
	return nil
}

// makeSocketDir creates the folder of the socket if its parent exists. The returned function
// removes it again if it is empty.
func makeSocketDir(socket string) (undo func(), err error) {
	dir := filepath.Dir(socket)
	err = os.Mkdir(dir, 0o755)
	switch {
	case err == nil:
		_ = os.Chmod(dir, 0o755) // regardless of the umask: the mode of the socket says who may use it
		return func() { _ = os.Remove(dir) }, nil
	case os.IsExist(err):
		return func() {}, nil
	}
	return nil, placeError(fmt.Errorf("socket %s: cannot make its folder: %w", socket, err), "another path with --socket")
}

// checkQueues returns the queues to serve; have is the number of queues.
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

// leftOut returns a warning about the queues that are not served, and how to avoid them, or "" if
// all are served.
func leftOut(ifname string, queues []int, have int) string {
	if len(queues) == have {
		return ""
	}
	fix := fmt.Sprintf("ethtool -L %s combined %d", ifname, len(queues)) // where they are the first ones
	weights := make([]byte, 0, 2*have)
	for q := range have {
		served := slices.Contains(queues, q)
		if served && q >= len(queues) {
			fix = ""
		}
		weights = append(weights, ' ', map[bool]byte{false: '0', true: '1'}[served])
	}
	spread := fmt.Sprintf("ethtool -X %s weight%s", ifname, weights)
	if fix != "" {
		spread += ", or " + fix
	}
	return "frames that come on the other queues are left to the kernel, so that some connections cannot be made: serve all queues, or let the interface use these alone: " + spread
}

// matchCPUs returns an error unless cpus is empty, or has one CPU for each queue.
func matchCPUs(cpus []int, queues int) error {
	if len(cpus) == 0 || len(cpus) == queues {
		return nil
	}
	return configErr("cpus: %s for %s: give one CPU per queue with --cpus", printable.Count(len(cpus), "CPU"), printable.Count(queues, "queue"))
}

// checkCPUs returns an error unless cpus is empty, or has one CPU for each queue on which this
// process may run.
func checkCPUs(cpus []int, queues int) error {
	if err := matchCPUs(cpus, queues); err != nil {
		return err
	}
	for _, cpu := range cpus {
		if err := mayRunOn(cpu); err != nil {
			return configErr("cpus: CPU %d does not exist, is offline, or is not allowed for this process (see /sys/devices/system/cpu/online and AllowedCPUs= of the unit): %w", cpu, err)
		}
	}
	return nil
}

// mayRunOn tries to run on the CPU, in a thread that then exits.
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
