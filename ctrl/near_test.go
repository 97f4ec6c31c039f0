package ctrl

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/far"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// nearMemory attaches a sparse memfd with n pages at off to a client.
func nearMemory(t *testing.T, c *tclient, off int64, n int) int {
	t.Helper()
	fd := memfd(t, 4096)
	if err := unix.Ftruncate(fd, 1<<56); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Pwrite(fd, make([]byte, 4096*n), off); err != nil {
		t.Fatal(err)
	}
	c.ok(reqAttach(), fd)
	return fd
}

func reqAttach() *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{Near: true}}}
}

func reqNear(pd uint32, off, length uint64) *ctrlpb.Request {
	r := reqMR(pd, length)
	r.GetRegisterMr().Near, r.GetRegisterMr().Offset = true, off
	return r
}

// mapped returns how many mappings of a memfd this process, which is the daemon too, has.
func mapped(t *testing.T, fd int) int {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	b := testenv.ReadFile(t, "/proc/self/maps")
	return strings.Count(string(b), fmt.Sprintf(" %d  ", st.Ino))
}

// TestNear checks that near regions are slices of one memfd, which is sent once, that they are charged by their lengths, and that
// the memfd stays mapped until the client has ended.
func TestNear(t *testing.T) {
	h, c := newClient(t, Config{Limits: Limits{Registered: 5 * 4096, MRs: 3}})
	pd := c.pd()
	const at = 0x7f12_3456_7000
	if text := c.fails(cInvalid, reqNear(pd, at, 4096)); !strings.Contains(text, "AttachMemory") {
		t.Errorf("before the memory is attached: %q", text)
	}
	c.fails(cInvalid, reqAttach())
	c.fails(cInvalid, reqAttach(), nullFD(t))
	fd := nearMemory(t, c, at, 3)
	c.fails(ctrlpb.Code_CODE_STATE, reqAttach(), fd)
	first := c.ok(reqNear(pd, at, 2*4096)).GetMr()
	second := c.ok(reqNear(pd, at+100, 3*4096-100)).GetMr()
	if n := mapped(t, fd); n != 1 {
		t.Errorf("%d mappings for two regions", n)
	}
	if text := c.fails(cInvalid, reqNear(pd, at+3*4096, 1)); !strings.Contains(text, "not all of its") {
		t.Errorf("a hole: %q", text)
	}
	c.fails(cInvalid, reqNear(pd, at, 0))
	c.fails(cInvalid, reqNear(pd, 1<<63, 1))
	c.fails(cQuota, reqNear(pd, at, 4096))
	if st := h.Status(); st.Mrs != 2 || st.Registered != 5*4096-100 {
		t.Errorf("status %v", st)
	}
	list := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListMrs{ListMrs: &ctrlpb.ListMRs{}}}).GetMrs().Mrs
	if len(list) != 2 || list[0].Far || list[0].Length != 2*4096 {
		t.Errorf("list %v", list)
	}
	for _, m := range []*ctrlpb.MRReply{first, second} {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: m.Mr}}})
	}
	if st := h.Status(); st.Mrs != 0 || st.Registered != 0 {
		t.Errorf("status after all are deregistered: %v", st)
	}
	c.ok(reqNear(pd, at, 3*4096)) // it goes with the client
	h.leave(t, c)
	if n := mapped(t, fd); n != 0 {
		t.Errorf("%d mappings after the client is gone", n)
	}
}

func nullFD(t *testing.T) int {
	t.Helper()
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return int(f.Fd())
}

// TestContainedFar checks that a client in another PID namespace may attach its memory, whose process has another number in
// the client's procfs than the kernel has recorded for the daemon.
func TestContainedFar(t *testing.T) {
	other := exec.CommandContext(t.Context(), "cat")
	in, err := other.StdinPipe() // it ends with this
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = other.Wait()
	}()
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/mem", other.Process.Pid), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	attach := &ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}
	h, c := newClient(t, Config{})
	if text := c.fails(cInvalid, attach, fd); !strings.Contains(text, "the process that connected") {
		t.Errorf("another process: %q", text)
	}
	h.mu.Lock()
	h.sessions[h.lastID].contained = true
	h.mu.Unlock()
	c.ok(attach, fd)
	c.fails(cState, attach, fd)
}

// waitFar returns a client with a queue pair and a ModifyQP that waits for its far memory, in which nothing is ever stored.
func waitFar(t *testing.T) (h *harness, c *tclient, qp uint32) {
	t.Helper()
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	h, c = newClient(t, Config{})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}, fd)
	qp = c.qp()
	stuck := far.New(time.Hour, func() {}) // never started
	t.Cleanup(func() {
		if t.Failed() {
			_ = stuck.Start() // otherwise the server's end waits
		}
	})
	h.mu.Lock()
	mem := &h.sessions[h.lastID].mem
	mem.mover.Close()
	mem.mover = stuck
	stuck.NewQueue().Store(mem.far, 0, 1, marked.Bytes{B: []byte{7}})
	h.mu.Unlock()
	c.send(&ctrlpb.Request{Body: &ctrlpb.Request_ModifyQp{ModifyQp: &ctrlpb.ModifyQP{Qp: qp}}})
	testenv.Until(t, "the request waits", func() bool {
		stacks := make([]byte, 1<<20)
		return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("(*Mover).Fence"))
	})
	return h, c, qp
}

// TestCutWhileFar checks that a client is cut off at once while a request of it waits for its far memory: each access
// may be almost late, and there may be many.
func TestCutWhileFar(t *testing.T) {
	h, _, qp := waitFar(t)
	h.Reload(Config{Allow: []Rule{{UIDs: []uint32{uint32(os.Getuid())}, Deny: true}}})
	h.until(t, "the queue pair has ended", func() bool { return h.qps[qp] == nil })
}

// TestNoReplyWhileFar checks that a request that stopped waiting for far memory because the client is hung up on is not
// answered: the data may still come, into memory that the client would use for something else.
func TestNoReplyWhileFar(t *testing.T) {
	h, c, _ := waitFar(t)
	h.mu.Lock()
	sess := h.sessions[h.lastID]
	h.mu.Unlock()
	sess.hangUp() // as shutdown does before it shuts down the connection
	if m := c.next(); m != nil {
		t.Errorf("the client is told %v", m)
	}
	sess.shutdown()
}

// TestDestroyFar checks that a queue pair that is destroyed leaves its worker when what has arrived for it is in far
// memory: otherwise its completions never come, and nobody has the receives that it took from a shared queue.
func TestDestroyFar(t *testing.T) {
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	h := newHarness(t, Config{})
	c := h.hello(t)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}, fd)
	num := c.qp()
	h.mu.Lock()
	q := h.qps[num]
	h.mu.Unlock()
	to := []byte{0}
	q.binding.Far.(*far.Queue).Store(q.sess.mem.far, uint64(reflect.ValueOf(to).Pointer()), 1, marked.Bytes{B: []byte{7}})
	detached := false
	h.e.mu.Lock()
	h.e.onDetach = func(b *dataplane.QPBinding) {
		detached = true
		if n := b.Far.Backlog(); n != 0 {
			t.Errorf("%d bytes are not in far memory", n)
		}
	}
	h.e.mu.Unlock()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: num}}})
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	if !detached || to[0] != 7 {
		t.Errorf("detached: %v; far memory has %d", detached, to[0])
	}
}
