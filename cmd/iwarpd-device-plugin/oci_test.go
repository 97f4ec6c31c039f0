package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestContainer checks that an OCI runtime starts a container with what CDI injects. As root of the container, without
// capabilities and without a network of its own, iwarpctl pings another host through the injected socket, and is
// not an administrator.
func TestContainer(t *testing.T) {
	testenv.RequireRoot(t)
	runc := testenv.RequireTool(t, "runc")
	bin := t.TempDir()
	build := exec.Command("go", "build", "-C", "../..", "-trimpath", "-o", bin, "./cmd/iwarpd", "./cmd/iwarpctl")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	v := testenv.NewVeth(t, 1500)
	dir := t.TempDir()
	slotDir := filepath.Join(dir, "slots")
	conf := filepath.Join(dir, "iwarpd.yaml")
	testenv.WriteFile(t, conf, []byte("slots:\n  count: 2\n  folder: "+slotDir+"\n"), 0o644)
	daemon := func(e *testenv.End, socket string, args ...string) {
		testenv.Start(t, e.NS.Command(filepath.Join(bin, "iwarpd"), append(args, "--interface", e.Name, "--socket", socket)...)).Expect("ready")
	}
	socketA, socketB := filepath.Join(dir, "a.sock"), filepath.Join(dir, "b.sock")
	daemon(&v.A, socketA, "--config", conf)
	daemon(&v.B, socketB)
	server := testenv.Start(t, v.B.NS.Command(filepath.Join(bin, "iwarpctl"), "--socket", socketB, "ping", "-s", "-P", "-a", v.B.Addr4.String()))
	server.Expect("listening")

	c := config{Resource: "iwarpd.io/rdma", Slots: slotDir, CDI: filepath.Join(dir, "cdi")}
	names, err := slots(slotDir, true)
	if err != nil || len(names) != 2 {
		t.Fatalf("slots %q, %v; want 2", names, err)
	}
	testenv.Mkdir(t, c.CDI, 0o755)
	if err := writeCDI(c, names); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(c.CDI), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (string, error) {
		t.Helper()
		return runContainer(t, runc, filepath.Join(bin, "iwarpctl"), cache, args...)
	}
	out, err := run("/iwarpctl", "ping", "-c", "-a", v.B.Addr4.String(), "-C", "3", "-V")
	if err != nil {
		t.Fatalf("ping from the container: %v\n%s", err, out)
	}
	// This program of the host is hidden from root of the container.
	other := testenv.Start(t, exec.Command(filepath.Join(bin, "iwarpctl"), "--socket", socketA, "ping", "-s", "-p", "7200"))
	other.Expect("listening")
	out, err = run("/iwarpctl", "listen", "list")
	if err != nil || strings.Contains(out, "7200") {
		t.Errorf("the container sees: %v\n%s", err, out)
	}
}

// runContainer runs a program in a container with the CDI device of slot 1.
func runContainer(t *testing.T, runc, program string, cache *cdi.Cache, args ...string) (string, error) {
	t.Helper()
	bundle := t.TempDir()
	root := filepath.Join(bundle, "rootfs")
	testenv.Mkdir(t, root, 0o755)
	testenv.WriteFile(t, filepath.Join(root, filepath.Base(program)), testenv.ReadFile(t, program), 0o755)
	spec := &oci.Spec{
		Version: "1.0.2",
		Root:    &oci.Root{Path: "rootfs"},
		Process: &oci.Process{Args: args, Cwd: "/", NoNewPrivileges: true, Capabilities: &oci.LinuxCapabilities{}},
		Mounts: []oci.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev"}},
		},
		Linux: &oci.Linux{Namespaces: []oci.LinuxNamespace{
			{Type: oci.PIDNamespace}, {Type: oci.NetworkNamespace}, {Type: oci.IPCNamespace}, {Type: oci.UTSNamespace}, {Type: oci.MountNamespace},
		}},
	}
	if _, err := cache.InjectDevices(spec, "iwarpd.io/rdma=1"); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	testenv.WriteFile(t, filepath.Join(bundle, "config.json"), b, 0o644)
	id := fmt.Sprintf("iwarpd-test-%d-%s", os.Getpid(), filepath.Base(bundle))
	cmd := exec.Command(runc, "--root", filepath.Join(bundle, "state"), "run", "--bundle", bundle, id)
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	return string(out), err
}
