package isolation

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// longestStall is the longest time that an attack may keep another client from making progress.
const longestStall = 250 * time.Millisecond

// tries is how often an attack is repeated while the victim stalls. Other programs may cause that several times in a
// row; an attack that causes it does so every time.
const tries = 10

// progress is how a client fared for some time.
type progress struct {
	Stall time.Duration // longest time between two Writes
	Rate  float64       // Writes a second
}

// leastRate is the part of its rate that a client must keep while another one attacks with far memory.
const leastRate = 0.8

// steady writes continuously, and answers each input line with its progress since the previous line.
func steady(j *job, in *bufio.Reader) error {
	ctx := context.Background()
	d, err := iwarp.Open(ctx, j.Socket)
	if err != nil {
		return err
	}
	c, to, err := dialSink(ctx, d, j.Peer, j.Over)
	if err != nil {
		return err
	}
	var longest, writes atomic.Int64
	failed := make(chan error, 1)
	go func() {
		b := make([]byte, 1024)
		for last := time.Now(); ; {
			if err := c.Write(ctx, to.At(0, 4096), b); err != nil {
				failed <- err
				return
			}
			now := time.Now()
			longest.Store(max(longest.Load(), int64(now.Sub(last))))
			writes.Add(1)
			last = now
			time.Sleep(500 * time.Microsecond) // so that the worker sleeps, and must be woken
		}
	}()
	fmt.Println("{}") // it runs
	for began := time.Now(); ; {
		if _, err := in.ReadString('\n'); err != nil {
			return nil
		}
		select {
		case err := <-failed:
			return err
		default:
			now := time.Now()
			p := progress{time.Duration(longest.Swap(0)), float64(writes.Swap(0)) / now.Sub(began).Seconds()}
			began = now
			if err := json.NewEncoder(os.Stdout).Encode(p); err != nil {
				return err
			}
		}
	}
}

// level holds the resource usage of the daemon, which runs in this process.
type level struct {
	Held            [8]uint64
	Files, Mappings int
}

func (w *world) level(t *testing.T) (l level) {
	t.Helper()
	l.Held = held(w.b.Server().Status())
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	l.Files = len(files)
	maps := testenv.ReadFile(t, "/proc/self/maps")
	l.Mappings = bytes.Count(maps, []byte("/memfd:"))
	return l
}

// settle waits until the daemon has given back what an attack took.
func (w *world) settle(t *testing.T, before level) {
	t.Helper()
	var now level
	err := within("the daemon has given back what the attack took", func() (bool, error) {
		collectSockets(t)
		now = w.level(t)
		return now == before, nil
	})
	if err != nil {
		t.Fatalf("%v: it holds %+v, and held %+v", err, now, before)
	}
}

// collectSockets makes the kernel garbage-collect sockets that are only in flight to each other. It does so when a
// Unix socket is closed, and does not retry if one of them was still in use then.
func collectSockets(t *testing.T) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	syscall.Close(fds[0])
	syscall.Close(fds[1])
}

// resident returns the process's memory of the kind, in bytes, from /proc/self/status.
func resident(t *testing.T, kind string) int {
	t.Helper()
	b := testenv.ReadFile(t, "/proc/self/status")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[0] == kind+":" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatalf("/proc/self/status has no %s", kind)
	return 0
}

// private returns the daemon's memory apart from the clients', in bytes: the resident size or, with the race
// detector, whose shadow memory is several times as large, what the Go runtime obtained from the kernel.
func private(t *testing.T) int {
	t.Helper()
	debug.FreeOSMemory()
	if !testenv.Race {
		return resident(t, "RssAnon")
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.Sys - m.HeapReleased)
}

// TestHostileClient runs a client in C that shares no code with the daemon and attacks it in about a hundred ways. No
// other client may be stalled for long, and when the attacker is gone the daemon must have released its memory,
// descriptors and mappings. With TRANSPORT=both one of them uses kernel sockets, and the other one frames.
func TestHostileClient(t *testing.T) {
	testenv.RequireRoot(t)
	if !testenv.Both() {
		hostile(t, iwarp.TCP, iwarp.TCP)
		return
	}
	t.Run("the attacker over kernel sockets", func(t *testing.T) { hostile(t, iwarp.Socket, iwarp.TCP) })
	t.Run("the victim over kernel sockets", func(t *testing.T) { hostile(t, iwarp.TCP, iwarp.Socket) })
}

// every returns which attacks run: one in so many.
func every() int {
	switch {
	case os.Getenv("ATTACK") != "":
		return 1
	case testenv.Both() && !full():
		return 16
	case testenv.Race: // make test-system runs all attacks without the detector, and these with it
		return 4
	}
	return 1
}

func hostile(t *testing.T, attacker, victim iwarp.Transport) {
	testenv.RequireTool(t, "gcc")
	for _, name := range []string{"/dev/fuse", "/dev/userfaultfd"} {
		if _, err := os.Stat(name); err != nil {
			testenv.Skip(t, "%v", err)
		}
	}
	w := newWorld(t, ctrl.Limits{Clients: 64, Rings: 64 << 20})
	program := filepath.Join(w.dir, "hostile")
	if out, err := exec.Command("gcc", "-O1", "-Wall", "-Wextra", "-Wno-unused-result", "-pthread", "-o", program, "testdata/hostile.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	mnt := filepath.Join(w.dir, "fuse")
	testenv.Mkdir(t, mnt, 0o755)
	list, err := exec.Command(program, "list").Output()
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Split(strings.TrimSpace(string(list)), "\n")
	if len(names) < 80 {
		t.Fatalf("%d attacks", len(names))
	}
	v := w.start(t, "steady", 61001, job{Over: victim})
	var calm, p progress
	v.ask(t, "", &calm)
	// The daemon closes a descriptor that it has received, here of the sink's memory, after its reply and before the next one.
	if _, err := w.a.Device().Admin().Status(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := w.level(t)
	anon, shmem := private(t), resident(t, "RssShmem")
	var worst time.Duration
	lowest, lowestOf := math.Inf(1), ""
	for i, name := range names {
		if !strings.Contains(name, os.Getenv("ATTACK")) || i%every() != 0 {
			continue
		}
		held := t.Run(name, func(t *testing.T) {
			// On a shared machine other programs may delay the victim: only a stall in every attempt counts as the
			// attack's.
			rated := full() && (strings.Contains(name, "far") || strings.Contains(name, "FUSE"))
			shortest, rate := time.Hour, 0.0
			for try := 0; try < tries && (shortest > longestStall || rated && rate < leastRate); try++ {
				v.ask(t, "begin", &calm)
				if rated {
					time.Sleep(time.Second) // its rate just before is to be compared
					v.ask(t, "calm", &calm)
				}
				w.attack(t, attacker, program, mnt, name)
				w.settle(t, before)
				v.ask(t, "end", &p)
				shortest, rate = min(shortest, p.Stall), max(rate, p.Rate/calm.Rate)
			}
			if rated {
				t.Logf("the victim's rate is %.2f of that before, its longest stall %v", rate, shortest)
				if rate < lowest {
					lowest, lowestOf = rate, name
				}
				if rate < leastRate {
					t.Errorf("the victim's rate fell to %.2f", rate)
				}
			}
			if worst = max(worst, shortest); shortest > longestStall {
				t.Errorf("the victim was held up for %v", shortest)
			}
			if n := resident(t, "RssShmem"); n > shmem+1<<20 {
				t.Errorf("%d bytes of shared memory are resident, %d were", n, shmem)
			}
		})
		if !held {
			break // the next attacks would fail for what this one has left
		}
	}
	// A connection that was aborted with data in flight may take ten seconds to end.
	settle(t, "the connections are gone", func() bool { return len(w.b.Engine().Conns()) == 1 })
	if n := private(t); n > anon+64<<20 {
		t.Errorf("the daemon has %d bytes of its own, it had %d", n, anon)
	}
	t.Logf("%d attacks; the victim's longest stall %v", len(names), worst)
	if lowestOf != "" {
		t.Logf("the victim's lowest rate is %.2f of that before: %s", lowest, lowestOf)
	}
	v.in.Close()
	if err := v.Wait(); err != nil {
		t.Error(err)
	}
}

// attack runs an attack until all its processes have exited.
func (w *world) attack(t *testing.T, over iwarp.Transport, program, mnt, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	args := []string{w.socket, w.peerOver(over), mnt, name}
	if over == iwarp.Socket {
		args = append(args, "socket")
	}
	p := exec.CommandContext(ctx, program, args...)
	var text bytes.Buffer
	p.Stderr = &text
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err := p.Run()
	if p.Process != nil {
		_ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL)
	}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == 3:
		t.Error("the daemon let it have its way")
	case err != nil:
		t.Fatalf("%v: %s", err, text.String())
	}
}
