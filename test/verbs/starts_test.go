package verbs

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// libraryFolders are the folders in which the distribution's loader finds libraries.
var libraryFolders = []string{"/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"}

// needing finds the binaries that need libibverbs or librdmacm, directly or through other
// libraries. It maps the path of each binary to the result.
type needing map[string]bool

func (n needing) needs(path string) bool {
	if known, ok := n[path]; ok {
		return known
	}
	n[path] = false // ends circles
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	libs, _ := f.ImportedLibraries()
	for _, lib := range libs {
		if lib == "libibverbs.so.1" || lib == "librdmacm.so.1" {
			n[path] = true
			return true
		}
		for _, dir := range libraryFolders {
			if p := filepath.Join(dir, lib); exists(p) {
				if n.needs(p) {
					n[path] = true
					return true
				}
				break
			}
		}
	}
	return false
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// rdmaPrograms returns the installed programs that use RDMA. A program with several names is
// listed once.
func rdmaPrograms(t *testing.T) (paths []string) {
	t.Helper()
	n, seen := make(needing), make(map[string]bool)
	for _, dir := range []string{"/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/lib/fio"} {
		entries, _ := os.ReadDir(dir) // not every folder exists
		for _, e := range entries {
			path, err := filepath.EvalSymlinks(filepath.Join(dir, e.Name()))
			if err != nil || seen[path] {
				continue
			}
			seen[path] = true
			if n.needs(path) {
				paths = append(paths, path)
			}
		}
	}
	slices.Sort(paths)
	return paths
}

// TestStarts checks that every installed program of the distribution that uses RDMA starts with
// all its symbols bound at once.
func TestStarts(t *testing.T) {
	dir := plain.libraries(t)
	programs := rdmaPrograms(t)
	if len(programs) < 20 {
		testenv.Skip(t, "only %d programs that use RDMA are installed: see .ci/need in the Makefile", len(programs))
	}
	for _, path := range programs {
		if out := startNow(t, dir, path); out != "" {
			t.Errorf("%s:\n%s", path, out)
		}
	}
	t.Logf("%d programs: %s", len(programs), strings.Join(programs, " "))
}

// TestStartsFail checks that TestStarts would notice a library that lacks a symbol.
func TestStartsFail(t *testing.T) {
	dir := t.TempDir()
	plain.libraries(t)
	// A librdmacm without any symbols.
	stub := filepath.Join(dir, "librdmacm.so.1")
	if out, err := exec.Command("gcc", "-shared", "-nostdlib", "-Wl,-soname,librdmacm.so.1", "-o", stub, "-x", "c", "/dev/null").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	run, err := os.ReadFile(filepath.Join(plain.dir, "iwarpd-run"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "iwarpd-run"), []byte(strings.ReplaceAll(string(run), plain.dir, dir)), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	if startNow(t, dir, testenv.RequireTool(t, "rping")) == "" {
		t.Error("rping starts without librdmacm's symbols")
	}
}

// startNow starts a program with the iwarpd-run of dir and returns the loader's errors. The
// program is run with --help; what it does then is ignored, and some do not end.
func startNow(t *testing.T, dir, path string) string {
	t.Helper()
	cmd := exec.Command("timeout", "-k", "1", "5", filepath.Join(dir, "iwarpd-run"), path, "--help")
	cmd.Env = append(os.Environ(), "LD_BIND_NOW=1", "IWARPD_SOCKET="+filepath.Join(t.TempDir(), "none"), "LC_ALL=C")
	cmd.Dir = t.TempDir()
	cmd.WaitDelay = time.Second
	out, _ := cmd.CombinedOutput()
	// The loader reports errors with status 127. So do timeout and the shell.
	if code := cmd.ProcessState.ExitCode(); code == 126 || code == 127 {
		return string(out)
	}
	for _, complaint := range []string{"symbol lookup error", "undefined symbol", "error while loading shared libraries", "' not found (required by"} {
		if strings.Contains(string(out), complaint) {
			return string(out)
		}
	}
	return ""
}
