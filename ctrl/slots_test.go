package ctrl

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// slotServer serves a main socket and two slots until the test ends.
func slotServer(t *testing.T, rule Rule) (main string, slot func(n string) string) {
	t.Helper()
	dir := t.TempDir()
	main = filepath.Join(dir, "main")
	serveSockets(t, Config{Socket: main, Slots: Slots{Folder: filepath.Join(dir, "slots"), Count: 2, Rule: rule}})
	return main, func(n string) string { return filepath.Join(dir, "slots", n, "iwarpd.sock") }
}

// serveSockets serves the sockets of cfg until the test ends.
func serveSockets(t *testing.T, cfg Config) *harness {
	t.Helper()
	h := newHarness(t, cfg)
	if err := h.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- h.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return h
}

func dialSocket(t *testing.T, path string) *tclient {
	t.Helper()
	c, err := seqpacket.Dial(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	tc := &tclient{t: t, c: c}
	t.Cleanup(func() {
		seqpacket.CloseAll(tc.fds)
		c.Close()
	})
	return tc
}

func helloOn(t *testing.T, path string) *tclient {
	t.Helper()
	c := dialSocket(t, path)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	return c
}

func (c *tclient) clients() []*ctrlpb.ClientInfo {
	return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{}}}).GetClients().GetClients()
}

// TestSlots checks that clients of a slot see only each other, that root is no administrator there, and that the
// administrator of the host sees all.
func TestSlots(t *testing.T) {
	main, slot := slotServer(t, Rule{})
	admin, a, a2, b := helloOn(t, main), helloOn(t, slot("0")), helloOn(t, slot("0")), helloOn(t, slot("1"))
	for _, tt := range []struct {
		name string
		c    *tclient
		want int
	}{{"slot 0", a, 2}, {"slot 0, second", a2, 2}, {"slot 1", b, 1}} {
		if got := tt.c.clients(); len(got) != tt.want || got[0].Uid < slotUID {
			t.Errorf("%s: %d clients, the first of uid %d; want %d of its slot", tt.name, len(got), got[0].Uid, tt.want)
		}
	}
	if os.Getuid() == 0 {
		if got := admin.clients(); len(got) != 4 {
			t.Errorf("root of the host sees %d clients; want 4", len(got))
		}
	}
	text := a.fails(ctrlpb.Code_CODE_PERMISSION, &ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{}}})
	if !strings.Contains(text, "slot 0 may capture") {
		t.Errorf("error %q does not name the slot", text)
	}
	// Root of a container may not use ports below 1024.
	a.fails(ctrlpb.Code_CODE_PERMISSION, &ctrlpb.Request{Body: &ctrlpb.Request_Listen{Listen: &ctrlpb.Listen{Port: 80}}})
	a.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Listen{Listen: &ctrlpb.Listen{Port: 8080}}})
}

// TestSlotQuota checks that each slot has its own quota, regardless of the users of its programs.
func TestSlotQuota(t *testing.T) {
	limits := DefaultLimits
	limits.Clients = 2
	main, slot := slotServer(t, Rule{Limits: &limits, Listen: []PortRange{{20000, 20009}}})
	first := helloOn(t, slot("0"))
	helloOn(t, slot("0"))
	text := dialSocket(t, slot("0")).fails(ctrlpb.Code_CODE_QUOTA, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	if !strings.Contains(text, "slot 0 has 2 clients, its limit is 2") {
		t.Errorf("error %q", text)
	}
	for range 2 {
		helloOn(t, slot("1"))
	}
	for range 3 {
		helloOn(t, main)
	}
	for port, want := range map[uint32]string{8080: "slot 0 may not use port 8080: not in listen of slots: choose one that is", 0: "may listen only on the ports in listen of slots"} {
		text := first.fails(ctrlpb.Code_CODE_PERMISSION, &ctrlpb.Request{Body: &ctrlpb.Request_Listen{Listen: &ctrlpb.Listen{Port: port}}})
		if !strings.Contains(text, want) {
			t.Errorf("error %q; want %q", text, want)
		}
	}
	first.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Listen{Listen: &ctrlpb.Listen{Port: 20003}}})
}

// TestSlotUID checks that a user with the uid of a slot is admitted only by a slot's socket.
func TestSlotUID(t *testing.T) {
	testenv.RequireRoot(t)
	main, slot := slotServer(t, Rule{})
	testenv.Chmod(t, main, 0o666)
	for dir := filepath.Dir(slot("0")); dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			break // above the test's own directory
		}
	}
	connect := func(path string) (c *tclient) {
		done := make(chan struct{})
		go func() { // ends with its thread, because it changes the thread's uid
			defer close(done)
			runtime.LockOSThread()
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), slotUID+1, ^uintptr(0)); errno != 0 {
				t.Error(errno)
				return
			}
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Error(err)
				return
			}
			if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
				t.Error(err)
				return
			}
			conn, err := seqpacket.FromFD(fd)
			if err != nil {
				t.Error(err)
				return
			}
			c = &tclient{t: t, c: conn}
		}()
		<-done
		if c == nil {
			t.FailNow()
		}
		t.Cleanup(func() { c.c.Close() })
		return c
	}
	hello := &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}}
	connect(slot("0")).ok(hello)
	text := connect(main).fails(ctrlpb.Code_CODE_PERMISSION, hello)
	if !strings.Contains(text, "stand for slots") {
		t.Errorf("error %q", text)
	}
}

// TestSlotOfNext checks that a daemon that ends does not remove the sockets of the next one, which began when the first
// had closed its own to drain.
func TestSlotOfNext(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Socket: filepath.Join(dir, "main"), Slots: Slots{Folder: filepath.Join(dir, "slots"), Count: 1}}
	old := newHarness(t, cfg)
	if err := old.Listen(); err != nil {
		t.Fatal(err)
	}
	old.Drain(t.Context(), 0)
	serveSockets(t, cfg)
	old.Close()
	helloOn(t, cfg.Socket)
	helloOn(t, filepath.Join(dir, "slots", "0", "iwarpd.sock"))
}

// TestRelisten checks that sockets whose files were removed are there again after Relisten, that their clients stay,
// and that the socket of another daemon is left alone.
func TestRelisten(t *testing.T) {
	dir := t.TempDir()
	main, slots := filepath.Join(dir, "main"), filepath.Join(dir, "slots")
	h := serveSockets(t, Config{Socket: main, Slots: Slots{Folder: slots, Count: 3}})
	slot := func(n string) string { return filepath.Join(slots, n, "iwarpd.sock") }
	all := []string{main, slot("0"), slot("1"), slot("2")}
	var first []*tclient
	for _, path := range all {
		first = append(first, helloOn(t, path))
	}
	relisten := func(lost []string, want []string) {
		t.Helper()
		if got := h.Lost(); !slices.Equal(got, lost) {
			t.Errorf("lost %v; want %v", got, lost)
		}
		if got, err := h.Relisten(); err != nil || !slices.Equal(got, want) {
			t.Errorf("made %v, %v; want %v", got, err, want)
		}
		for _, path := range all {
			helloOn(t, path)
		}
	}
	relisten(nil, nil)
	of1 := filepath.Join(slots, ".1")
	err := errors.Join(os.Remove(main), os.Remove(slot("0")), os.Remove(of1), os.RemoveAll(filepath.Dir(slot("1"))))
	if err != nil {
		t.Fatal(err)
	}
	relisten([]string{main, of1}, []string{main, slot("0"), of1, slot("1")})
	if err := os.RemoveAll(slots); err != nil {
		t.Fatal(err)
	}
	var own, made []string
	for i, path := range all[1:] {
		own = append(own, filepath.Join(slots, "."+strconv.Itoa(i)))
		made = append(made, own[i], path)
	}
	relisten(own, made)
	for _, c := range first {
		c.clients()
	}

	if err := os.Remove(main); err != nil {
		t.Fatal(err)
	}
	other, err := ListenUnix("unixpacket", main, 0o600, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if made, err := h.Relisten(); !errors.Is(err, unix.EADDRINUSE) || len(made) > 0 {
		t.Errorf("the socket of another daemon: %v, %v", made, err)
	}
	h.Drain(t.Context(), 0)
	if !other.has(main) {
		t.Error("the socket of another daemon was removed")
	}
	if err := os.RemoveAll(slots); err != nil {
		t.Fatal(err)
	}
	if made, err := h.Relisten(); err != nil || len(made) > 0 || len(h.Lost()) > 0 {
		t.Errorf("while it drains: made %v, %v; lost %v", made, err, h.Lost())
	}
}

// TestSlotFolder checks that a container that may write to the directory of its slot can neither keep the daemon from
// starting nor make it change a file of the container's choice.
func TestSlotFolder(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	testenv.WriteFile(t, secret, []byte("secret"), 0o600)
	for _, tt := range []struct {
		name string
		put  func(path string) error
	}{
		{"file", func(path string) error { return os.WriteFile(path, nil, 0o600) }},
		{"symlink", func(path string) error { return os.Symlink(secret, path) }},
		{"folder", func(path string) error { return os.MkdirAll(filepath.Join(path, "more", "of it"), 0o755) }},
		{"socket", func(path string) error {
			l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			slot := filepath.Join(dir, "slots", "0")
			testenv.Mkdir(t, slot, 0o755)
			path := filepath.Join(slot, "iwarpd.sock")
			if err := tt.put(path); err != nil {
				t.Fatal(err)
			}
			serveSockets(t, Config{Socket: filepath.Join(dir, "main"), Slots: Slots{Folder: filepath.Dir(slot), Count: 1}})
			if got := helloOn(t, path).clients(); len(got) != 1 || got[0].Uid != slotUID {
				t.Errorf("%v", got)
			}
			if names, err := os.ReadDir(filepath.Dir(slot)); err != nil || len(names) != 2 { // the slot, and the socket's own name
				t.Errorf("%v, %v", names, err)
			}
			if fi, err := os.Stat(secret); err != nil || fi.Mode() != 0o600 || fi.Size() == 0 {
				t.Errorf("%v, %v", fi, err)
			}
		})
	}
}
