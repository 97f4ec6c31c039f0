package clib

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// The installed library is found by pkg-config, and the program in the manual compiles against it, shared and static.
func TestInstalled(t *testing.T) {
	plain.build(t, "")
	defer unix.Umask(unix.Umask(0o022)) // another user runs what is installed
	root := t.TempDir()
	if err := runTool("make", "-s", "-C", source, "O="+plain.dir, "DESTDIR="+root, "PREFIX=/opt/iwarpd", "install"); err != nil {
		t.Fatal(err)
	}
	pkgConfig := func(args ...string) []string {
		cmd := exec.Command("pkg-config", append(args, "libiwarpd")...)
		cmd.Env = append(os.Environ(), "PKG_CONFIG_PATH="+filepath.Join(root, "opt/iwarpd/lib/pkgconfig"))
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("pkg-config %v: %v", args, err)
		}
		flags := strings.Fields(string(out))
		for i := range flags { // flags of the root, not of the machine
			flags[i] = strings.Replace(flags[i], "/opt/", root+"/opt/", 1)
		}
		return flags
	}
	testenv.Chmod(t, filepath.Dir(root), 0o755)
	closed := filepath.Join(root, "closed")
	testenv.WriteFile(t, closed, nil, 0o000)
	program := filepath.Join(t.TempDir(), "prog.c")
	testenv.WriteFile(t, program, []byte(manualProgram(t)), 0o600)
	for name, flags := range map[string][]string{
		"shared": pkgConfig("--cflags", "--libs"),
		"static": append(pkgConfig("--cflags"), filepath.Join(root, "opt/iwarpd/lib/libiwarpd.a"), "-lprotobuf-c", "-lpthread"),
	} {
		args := append([]string{"-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(root, name), program}, flags...)
		if err := runTool("gcc", args...); err != nil {
			t.Error(err)
			continue
		}
		for socket, want := range map[string]string{
			"/nonexistent": "No such file or directory: is iwarpd running?",
			closed:         "Permission denied: join the group that owns it, or run as root",
		} {
			cmd := exec.Command(filepath.Join(root, name))
			cmd.Env = []string{"LD_LIBRARY_PATH=" + filepath.Join(root, "opt/iwarpd/lib"), "IWARPD_SOCKET=" + socket}
			if os.Getuid() == 0 { // root may use any socket
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			}
			out, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(out), socket+": "+want) {
				t.Errorf("%s: %v: %s", name, err, out)
			}
		}
	}
}

// manualProgram returns the example of iwarpd(3) as a whole program.
func manualProgram(t *testing.T) string {
	t.Helper()
	page := testenv.ReadFile(t, source+"/iwarpd.3")
	_, example, ok := strings.Cut(string(page), ".SH EXAMPLES")
	_, example, ok2 := strings.Cut(example, ".nf\n")
	example, _, ok3 := strings.Cut(example, ".fi\n")
	if !ok || !ok2 || !ok3 {
		t.Fatal("iwarpd(3) has no example")
	}
	return "#include <err.h>\n#include <stdio.h>\n#include <string.h>\n#include <iwarpd.h>\n\nint main(void)\n{\n" + example + "}\n"
}
