package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// bound is the longest time that a test waits for an event.
const bound = time.Minute

// kubelet is the part of the kubelet that device plugins use.
type kubelet struct {
	v1beta1.UnimplementedRegistrationServer
	dir        string
	server     *grpc.Server
	registered chan *v1beta1.RegisterRequest
}

func (k *kubelet) Register(_ context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	k.registered <- r
	return &v1beta1.Empty{}, nil
}

// start begins as the kubelet does: it removes every socket in its folder.
func (k *kubelet) start(t *testing.T) {
	t.Helper()
	old, err := filepath.Glob(filepath.Join(k.dir, "*.sock"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range old {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	l, err := net.Listen("unix", filepath.Join(k.dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	k.server = grpc.NewServer()
	v1beta1.RegisterRegistrationServer(k.server, k)
	go k.server.Serve(l)
	t.Cleanup(k.server.Stop)
}

// plugin waits for a registration and connects to the plugin that made it.
func (k *kubelet) plugin(t *testing.T) v1beta1.DevicePluginClient {
	t.Helper()
	select {
	case r := <-k.registered:
		if r.Version != "v1beta1" || r.ResourceName != "iwarpd.io/rdma" || r.Endpoint != "iwarpd.io-rdma.sock" {
			t.Fatalf("registered %v", r)
		}
	case <-time.After(bound):
		t.Fatal("no registration")
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, "iwarpd.io-rdma.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return v1beta1.NewDevicePluginClient(conn)
}

// node is a kubelet and a plugin whose daemon can be declared dead.
type node struct {
	kubelet
	config
	dead atomic.Bool
	end  func() error // ends the plugin and returns its error
}

func newNode(t *testing.T, units ...string) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{kubelet: kubelet{dir: filepath.Join(dir, "kubelet"), registered: make(chan *v1beta1.RegisterRequest, 8)}}
	n.config = config{
		Resource: "iwarpd.io/rdma", Slots: filepath.Join(dir, "slots"), Libraries: filepath.Join(dir, "lib"),
		Kubelet: n.dir, CDI: filepath.Join(dir, "cdi"), Period: 5 * time.Millisecond,
		Alive: func(context.Context) error {
			if n.dead.Load() {
				return errors.New("no answer")
			}
			return nil
		},
	}
	for _, d := range []string{n.dir, n.Slots, n.Libraries, n.CDI} {
		testenv.Mkdir(t, d, 0o755)
	}
	n.install(t)
	for _, u := range units {
		n.addUnit(t, u)
	}
	n.kubelet.start(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx, n.config, slog.New(slog.DiscardHandler)) }()
	n.end = func() error {
		cancel()
		select {
		case err := <-done:
			done <- err
			return err
		case <-time.After(bound):
			return errors.New("the plugin does not end")
		}
	}
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// library is a file of the package iwarpd-verbs.
func (n *node) library() string { return filepath.Join(n.Libraries, "libibverbs.so.1") }

func (n *node) install(t *testing.T) {
	t.Helper()
	testenv.WriteFile(t, n.library(), nil, 0o644)
}

// addUnit makes the folder and the socket of a slot, as the daemon does.
func (n *node) addUnit(t *testing.T, name string) {
	t.Helper()
	dir := filepath.Join(n.Slots, name)
	testenv.Mkdir(t, dir, 0o755)
	l, err := net.Listen("unix", filepath.Join(dir, "iwarpd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
}

// watch returns the updates of ListAndWatch, as "ID health" of each device.
func watch(t *testing.T, c v1beta1.DevicePluginClient) func(want ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	t.Cleanup(cancel)
	stream, err := c.ListAndWatch(ctx, &v1beta1.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	return func(want ...string) {
		t.Helper()
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, d := range r.Devices {
			got = append(got, d.ID+" "+d.Health)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("devices %q; want %q", got, want)
		}
	}
}

func TestListAndWatch(t *testing.T) {
	n := newNode(t, "0", "1")
	next := watch(t, n.plugin(t))
	next("0 Healthy", "1 Healthy")
	n.dead.Store(true)
	next("0 Unhealthy", "1 Unhealthy")
	n.dead.Store(false)
	next("0 Healthy", "1 Healthy")
	n.addUnit(t, "2")
	next("0 Healthy", "1 Healthy", "2 Healthy")
}

// TestKubeletRestarts checks that the plugin registers again when a kubelet that restarts has removed its socket, and
// that it waits for a kubelet that is not there at the start.
func TestKubeletRestarts(t *testing.T) {
	n := newNode(t, "0")
	watch(t, n.plugin(t))("0 Healthy")
	for range 3 {
		n.server.Stop()
		n.kubelet.start(t)
		watch(t, n.plugin(t))("0 Healthy")
	}
}

// TestTwoPlugins checks that a node can have plugins of two resources, which do not remove each other's sockets.
func TestTwoPlugins(t *testing.T) {
	n := newNode(t, "0")
	next := watch(t, n.plugin(t))
	next("0 Healthy")
	other := n.config
	other.Resource = "example.org/rdma"
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, other, slog.New(slog.DiscardHandler)) }()
	select {
	case r := <-n.registered:
		if r.ResourceName != other.Resource || r.Endpoint == "iwarpd.io-rdma.sock" {
			t.Errorf("registered %v", r)
		}
	case <-time.After(bound):
		t.Error("no registration")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	n.addUnit(t, "1") // the first plugin goes on
	next("0 Healthy", "1 Healthy")
}

func TestAllocate(t *testing.T) {
	n := newNode(t, "0", "1", "2")
	c := n.plugin(t)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	r, err := c.Allocate(ctx, &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{
		{DevicesIds: []string{"1"}}, {DevicesIds: []string{"2", "0"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range r.ContainerResponses {
		for _, d := range c.CdiDevices {
			got = append(got, d.Name)
		}
		if lib := c.Envs["LD_LIBRARY_PATH"]; lib != "/usr/lib/iwarpd" {
			t.Errorf("LD_LIBRARY_PATH=%s", lib)
		}
	}
	if want := []string{"iwarpd.io/rdma=1", "iwarpd.io/rdma=0"}; !slices.Equal(got, want) {
		t.Errorf("CDI devices %q; want %q", got, want)
	}
	for _, tt := range []struct {
		ids  []string
		want codes.Code
	}{{[]string{"9"}, codes.NotFound}, {[]string{"0", "../x"}, codes.NotFound}, {nil, codes.InvalidArgument}} {
		_, err := c.Allocate(ctx, &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: tt.ids}}})
		if status.Code(err) != tt.want {
			t.Errorf("Allocate %q: %v; want %v", tt.ids, err, tt.want)
		}
	}
}

// TestCDI checks that the CDI library finds a device for each unit and gives a container the folder of that unit's
// socket, and the libraries, and that the container keeps its own LD_LIBRARY_PATH.
func TestCDI(t *testing.T) {
	n := newNode(t, "0", "1")
	n.plugin(t)
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.CDI), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Fatal(errs)
	}
	for _, s := range cache.GetVendorSpecs("iwarpd.io") {
		if s.Version != "0.5.0" { // the first one in which the name of a device may be a number
			t.Errorf("the CDI file has version %s, which containerd 1.7.0 and podman 4.3 refuse", s.Version)
		}
	}
	process := &oci.Process{Env: []string{"LD_LIBRARY_PATH=/opt/lib"}}
	container := &oci.Spec{Version: "1.0.2", Process: process, Linux: &oci.Linux{}}
	if missing, err := cache.InjectDevices(container, "iwarpd.io/rdma=1"); err != nil {
		t.Fatalf("%v, missing %v", err, missing)
	}
	var got []string
	for _, m := range container.Mounts {
		got = append(got, fmt.Sprint(m.Source, " ", m.Destination, " ", slices.Contains(m.Options, "ro")))
	}
	slices.Sort(got)
	want := []string{n.Libraries + " /usr/lib/iwarpd true", filepath.Join(n.Slots, "1") + " /run/iwarpd true"}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("mounts %q; want %q", got, want)
	}
	for _, want := range []string{"IWARPD_SOCKET=/run/iwarpd/iwarpd.sock", "LD_LIBRARY_PATH=/opt/lib"} {
		if !slices.Contains(container.Process.Env, want) {
			t.Errorf("environment %q lacks %q", container.Process.Env, want)
		}
	}
}

// TestStoppedDaemon checks that units stay, unhealthy, and with them the CDI file, when the daemon stops and removes its
// sockets, and that a slot which the next daemon does not have is gone then. A folder that a daemon has left which was
// killed while it made its sockets is not a unit.
func TestStoppedDaemon(t *testing.T) {
	n := newNode(t, "0", "1")
	testenv.Mkdir(t, filepath.Join(n.Slots, ".old1"), 0o700)
	next := watch(t, n.plugin(t))
	next("0 Healthy", "1 Healthy")
	n.dead.Store(true)
	next("0 Unhealthy", "1 Unhealthy")
	for _, name := range []string{"0", "1"} {
		if err := os.Remove(filepath.Join(n.Slots, name, "iwarpd.sock")); err != nil {
			t.Fatal(err)
		}
	}
	n.addUnit(t, "2") // the update that comes next shows that the removed sockets were seen
	next("0 Unhealthy", "1 Unhealthy", "2 Unhealthy")
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.CDI), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if missing, err := cache.InjectDevices(&oci.Spec{}, "iwarpd.io/rdma=1"); err != nil {
		t.Errorf("a container that has a unit cannot start: %v, missing %v", err, missing)
	}
	n.dead.Store(false)
	next("2 Healthy")
}

// TestAsk checks that the daemon is taken to be alive where it refuses the plugin for a quota of its user: pods have slots, whose quotas are
// their own.
func TestAsk(t *testing.T) {
	for _, tt := range []struct {
		code  ctrlpb.Code
		alive bool
	}{{ctrlpb.Code_CODE_QUOTA, true}, {ctrlpb.Code_CODE_PERMISSION, false}, {ctrlpb.Code_CODE_DRAINING, false}} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			u, err := l.AcceptUnix()
			if err != nil {
				return
			}
			c := seqpacket.FromUnix(u)
			defer c.Close()
			var req ctrlpb.Request
			if b, _, err := c.Read(0); err != nil || proto.Unmarshal(b, &req) != nil {
				return
			}
			reply := &ctrlpb.Reply{Id: req.Id, Error: &ctrlpb.Error{Code: tt.code, Text: "no"}}
			if b, err := proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: reply}}); err == nil {
				_ = c.Write(b, nil)
			}
			_, _, _ = c.Read(0) // until the plugin has read the answer
		}()
		if err := ask(t.Context(), path); (err == nil) != tt.alive {
			t.Errorf("%v: %v", tt.code, err)
		}
	}
}

// TestNoSlots checks that without slots no device is offered and no CDI file is left.
func TestNoSlots(t *testing.T) {
	n := newNode(t)
	testenv.WriteFile(t, filepath.Join(n.Slots, "file"), nil, 0o644)
	next := watch(t, n.plugin(t))
	next()
	n.addUnit(t, "a")
	next("a Healthy")
	if files, _ := os.ReadDir(n.CDI); len(files) != 1 {
		t.Errorf("%d CDI files; want 1", len(files))
	}
	if err := os.RemoveAll(filepath.Join(n.Slots, "a")); err != nil {
		t.Fatal(err)
	}
	next()
	if files, _ := os.ReadDir(n.CDI); len(files) != 0 {
		t.Errorf("%d CDI files; want none", len(files))
	}
}

// TestCDIFileLost checks that a CDI file that is removed or damaged is written again, and that the libraries are added to it
// when they are installed later.
func TestCDIFileLost(t *testing.T) {
	n := newNode(t, "0")
	n.plugin(t)
	path := filepath.Join(n.CDI, "iwarpd.io-rdma.json")
	want := testenv.ReadFile(t, path)
	written := func(step string) {
		t.Helper()
		testenv.Until(t, step+": the file is written again", func() bool {
			got, _ := os.ReadFile(path)
			return bytes.Equal(got, want)
		})
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	written("removed")
	testenv.WriteFile(t, path, want[:len(want)/2], 0o644)
	written("damaged")
	if err := os.Remove(n.library()); err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the file has no libraries, which are not there", func() bool {
		got, _ := os.ReadFile(path)
		return len(got) > 0 && !bytes.Contains(got, []byte(inLibraries))
	})
	n.install(t)
	written("libraries installed")
}

// TestCDIFolderLost checks that no unit is offered as healthy while the CDI file, without which its containers do not start,
// cannot be written.
func TestCDIFolderLost(t *testing.T) {
	n := newNode(t, "0")
	next := watch(t, n.plugin(t))
	next("0 Healthy")
	file := n.CDI + ".file"
	testenv.WriteFile(t, file, nil, 0o644)
	exchange := func() {
		if err := unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, n.CDI, unix.RENAME_EXCHANGE); err != nil {
			t.Fatal(err)
		}
	}
	exchange()
	next("0 Unhealthy")
	exchange()
	next("0 Healthy")
}

// TestMistakes checks that a wrong setting and a kubelet that is not there are named in one line, without the words of
// Go's packages.
func TestMistakes(t *testing.T) {
	dir := t.TempDir()
	good := config{Resource: "iwarpd.io/rdma", Slots: dir, Kubelet: dir, CDI: dir, Period: time.Second}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	for _, resource := range []string{"", "5", "rdma", "/rdma", "iwarpd.io/", "a/b/c", "iwarpd.io/rd ma", "Iwarpd.io/rdma"} {
		c := good
		c.Resource = resource
		if c.check() == nil {
			t.Errorf("resource %q is accepted", resource)
		}
	}
	bad := good
	bad.Period = 0
	if bad.check() == nil {
		t.Error("a period of 0 is accepted")
	}
	for _, folder := range []string{"", "x", "./x"} {
		slots, kubelet, cdi := good, good, good
		slots.Slots, kubelet.Kubelet, cdi.CDI = folder, folder, folder
		for _, c := range []config{slots, kubelet, cdi} {
			if c.check() == nil {
				t.Errorf("%+v is accepted", c)
			}
		}
	}
	relative := good
	relative.Libraries = "lib"
	if relative.check() == nil {
		t.Error("a relative folder of libraries is accepted")
	}
	none := filepath.Join(dir, "none")
	for folder, want := range map[string]string{
		none: "make " + none + "/iwarpd.io-rdma.sock: no such file or directory: is the kubelet running, and is its folder mounted?",
		dir:  "no kubelet answers at " + dir + "/kubelet.sock: is it running?",
	} {
		c := good
		c.Kubelet = folder
		p := &plugin{config: c, log: slog.New(slog.DiscardHandler), changed: make(chan struct{})}
		if err := p.serve(t.Context()); err == nil || err.Error() != want {
			t.Errorf("got %v; want %q", err, want)
		}
	}
}

// TestRepeated checks that an error that lasts is logged once in remindEvery, and at once when it changes or comes back.
func TestRepeated(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(1e9, 0)
	r := repeated{log: slog.New(slog.NewTextHandler(&out, nil)), text: "the kubelet is not reached"}
	one, two := errors.New("one"), errors.New("two")
	for _, tt := range []struct {
		after  time.Duration // since the step before
		err    error
		logged bool
	}{
		{0, one, true},
		{2 * time.Second, errors.New("one"), false},
		{remindEvery - 3*time.Second, one, false},
		{time.Second, one, true},
		{2 * time.Second, one, false},
		{2 * time.Second, two, true},
		{2 * time.Second, one, true},
		{2 * time.Second, nil, false},
		{2 * time.Second, one, true},
	} {
		out.Reset()
		now = now.Add(tt.after)
		r.warn(now, tt.err)
		if logged := out.Len() > 0; logged != tt.logged {
			t.Errorf("%+v: logged %q", tt, out.String())
		}
	}
}

// TestParse checks that each wrong flag gives an error of one line, and that help and version are texts.
func TestParse(t *testing.T) {
	for _, args := range []string{"-nosuch", "-period soon", "extra", "-resource rdma"} {
		if _, text, err := parse(strings.Fields(args)); err == nil || strings.Contains(err.Error(), "\n") || text != "" {
			t.Errorf("%s: %v, %q", args, err, text)
		}
	}
	const unit = `invalid value "5" for flag -period: must be a time with a unit, such as 2s; see -help`
	if _, _, err := parse([]string{"-period", "5"}); err == nil || err.Error() != unit {
		t.Errorf("a period without a unit: %v", err)
	}
	if c, _, err := parse([]string{"-period", "3s"}); err != nil || c.Period != 3*time.Second {
		t.Errorf("%v, %v", c.Period, err)
	}
	for args, want := range map[string]string{"-help": "-period", "-version": "iwarpd-device-plugin " + version} {
		if _, text, err := parse([]string{args}); err != nil || !strings.Contains(text, want) {
			t.Errorf("%s: %v, %q", args, err, text)
		}
	}
	if c, text, err := parse(nil); err != nil || text != "" || c.Alive == nil {
		t.Errorf("no flags: %+v, %q, %v", c, text, err)
	}
}
