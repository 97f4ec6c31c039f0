package ctrl

import (
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Threads returns the number of threads that this process may have: the lowest limit of its cgroups and, unless it is
// root, of its user.
func Threads() uint64 {
	most := cgroupThreads("/proc/self")
	var l unix.Rlimit
	if os.Getuid() != 0 && unix.Getrlimit(unix.RLIMIT_NPROC, &l) == nil {
		most = min(most, l.Cur)
	}
	return most
}

// cgroupThreads returns the lowest pids.max of the cgroups of a process, whose folder in procfs is proc, as far as they
// are mounted. A container does not see those above its own.
func cgroupThreads(proc string) uint64 {
	most := uint64(math.MaxUint64)
	groups, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return most
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return most
	}
	for line := range strings.Lines(string(mounts)) {
		mount, super, _ := strings.Cut(strings.TrimSpace(line), " - ")
		m, fs := strings.Fields(mount), strings.Fields(super)
		if len(m) < 5 || len(fs) < 3 {
			continue
		}
		controller := ""
		switch {
		case fs[0] == "cgroup2": // its lines in cgroup name none
		case fs[0] == "cgroup" && slices.Contains(strings.Split(fs[2], ","), "pids"):
			controller = "pids"
		default:
			continue
		}
		root, point := m[3], m[4]
		below, ok := strings.CutPrefix(cgroupOf(string(groups), controller), strings.TrimSuffix(root, "/"))
		if !ok {
			continue
		}
		for dir := filepath.Join(point, below); ; dir = filepath.Dir(dir) {
			if b, err := os.ReadFile(filepath.Join(dir, "pids.max")); err == nil {
				if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil { // else "max"
					most = min(most, n)
				}
			}
			if len(dir) <= len(point) {
				break
			}
		}
	}
	return most
}

// cgroupOf returns the path of a process's cgroup in the hierarchy with the controller, or "". groups is its
// /proc/PID/cgroup, with lines NUMBER:CONTROLLERS:PATH.
func cgroupOf(groups, controller string) string {
	for line := range strings.Lines(groups) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), controller) {
			return f[2]
		}
	}
	return ""
}

// threadLimits are the numbers of threads that clients can take. The Go runtime ends the process when it cannot start
// one, so these are a part of those that the process may have.
type threadLimits struct {
	readers int // that read the requests of one client each
	away    int // blocked in system calls for clients
	mappers int // that map their memory, which ends by itself
	movers  int // of far memory
}

// The limits where the process may have any number. The Go runtime allows 10000.
const (
	mostReaders = 256
	mostAway    = 2048
	mostMappers = 256
	mostMovers  = 4096
)

// divideThreads returns the limits in a process that may have n threads. An eighth and 32 more than Go code runs on at
// a time are for the daemon itself.
func divideThreads(n uint64) threadLimits {
	n = less(n, n/8+32+uint64(runtime.GOMAXPROCS(0)))
	return threadLimits{
		readers: int(min(n/8, mostReaders)),
		away:    int(max(min(n/4, mostAway), 1)),
		mappers: int(max(min(n/8, mostMappers), 1)),
		movers:  int(min(n/2, mostMovers)),
	}
}
