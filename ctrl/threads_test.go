package ctrl

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestCgroupThreads checks that the lowest limit counts of all cgroups that a process can see.
func TestCgroupThreads(t *testing.T) {
	const v1, v2 = "9:memory:/a/b\n8:pids:%s\n0::/\n", "0::%s\n"
	type limits = map[string]string // by the folder below the mount point
	for _, tt := range []struct {
		name, groups, group string
		mount, root, super  string
		limits              limits
		want                uint64
	}{
		{"version 2", v2, "/a.slice/b", "cgroup2", "/", "rw", limits{"a.slice/b": "4915", "a.slice": "max"}, 4915},
		{"its parent has less", v2, "/a/b/c", "cgroup2", "/", "rw", limits{"a/b/c": "max", "a/b": "10", "a": "30"}, 10},
		{"a namespace of cgroups", v2, "/", "cgroup2", "/", "rw", limits{"": "2048"}, 2048},
		{"no limit", v2, "/", "cgroup2", "/", "rw", limits{"": "max"}, math.MaxUint64},
		{"version 1", v1, "/a", "cgroup", "/", "rw,pids", limits{"a": "100"}, 100},
		{"version 1 in a container", v1, "/docker/12", "cgroup", "/docker/12", "rw,pids", limits{"": "77"}, 77},
		{"another controller", v1, "/a", "cgroup", "/", "rw,memory", limits{"a": "5", "a/b": "5"}, math.MaxUint64},
		{"a mount of other groups", v2, "/a", "cgroup2", "/../../b", "rw", limits{"": "5", "a": "5"}, math.MaxUint64},
	} {
		proc, point := t.TempDir(), t.TempDir()
		for dir, limit := range tt.limits {
			testenv.Mkdir(t, filepath.Join(point, dir), 0o755)
			testenv.WriteFile(t, filepath.Join(point, dir, "pids.max"), []byte(limit+"\n"), 0o644)
		}
		for file, text := range map[string]string{
			"cgroup": fmt.Sprintf(tt.groups, tt.group),
			"mountinfo": "22 1 0:20 / / rw - tmpfs tmpfs rw\n" +
				fmt.Sprintf("39 31 0:36 %s %s rw shared:9 - %s cgroup %s\n", tt.root, point, tt.mount, tt.super),
		} {
			testenv.WriteFile(t, filepath.Join(proc, file), []byte(text), 0o644)
		}
		if got := cgroupThreads(proc); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
	if got := cgroupThreads(t.TempDir()); got != math.MaxUint64 {
		t.Errorf("without procfs: %d", got)
	}
}

// TestMappingThreads checks that clients without a thread of their own cannot take one each by registering memory at
// the same time: the kernel works on that for milliseconds, or for seconds if it is swapped out.
func TestMappingThreads(t *testing.T) {
	const clients, size = 200, 32 << 20
	h := newHarness(t, Config{Limits: Limits{Registered: 1 << 40}})
	h.readers.most, h.mappers.most = 0, 1
	fd := memfd(t, size)
	var all []*tclient
	var pds []uint32
	for i := range clients {
		all = append(all, h.hello(t))
		pds = append(pds, all[i].pd())
	}
	threads := func() int {
		l, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Error(err)
		}
		return len(l)
	}
	before, most := threads(), 0
	var registering sync.WaitGroup
	for i, c := range all {
		registering.Go(func() {
			for range 3 {
				c.ok(reqMR(pds[i], size), fd)
			}
		})
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		registering.Wait()
	}()
	for {
		select {
		case <-over:
			if most > before+clients/10 {
				t.Errorf("%d threads, %d before", most, before)
			}
			return
		case <-time.After(time.Millisecond):
			most = max(most, threads())
		}
	}
}

// TestDivideThreads checks that clients cannot take all threads of the process, and that they get as many as Go allows
// where there is no limit.
func TestDivideThreads(t *testing.T) {
	for _, n := range []uint64{0, 50, 100, 128, 200, 1024, 2048, 4915, 10000, 32768, math.MaxUint64} {
		l := divideThreads(n)
		if all := uint64(l.readers + l.away + l.mappers + l.movers); all > n && all > 2 || all > 9000 {
			t.Errorf("of %d threads: %+v", n, l)
		}
	}
	if l, want := divideThreads(math.MaxUint64), (threadLimits{mostReaders, mostAway, mostMappers, mostMovers}); l != want {
		t.Errorf("of any number of threads: %+v; want %+v", l, want)
	}
}
