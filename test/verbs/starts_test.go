package verbs

import (
	"debug/elf"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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

// rdmaFiles are the installed files that use RDMA.
type rdmaFiles struct {
	programs  []string
	libraries []string // and plug-ins, that need libibverbs or librdmacm themselves
}

var installed = sync.OnceValue(func() rdmaFiles { return rdmaFilesIn("/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/lib") })

// rdmaFilesIn finds the files that use RDMA. A file with several names is listed once.
func rdmaFilesIn(folders ...string) (files rdmaFiles) {
	n, seen := make(needing), make(map[string]bool)
	for _, dir := range folders {
		_ = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error { // not each of them is there
			if err != nil || e.IsDir() {
				return nil
			}
			path, err = filepath.EvalSymlinks(path)
			if err != nil || seen[path] {
				return nil
			}
			seen[path] = true
			switch kind, direct := kindOf(path); {
			case kind == elfProgram && n.needs(path):
				files.programs = append(files.programs, path)
			case kind == elfLibrary && direct:
				files.libraries = append(files.libraries, path)
			}
			return nil
		})
	}
	slices.Sort(files.programs)
	slices.Sort(files.libraries)
	return files
}

const (
	elfProgram = iota + 1
	elfLibrary
)

// kindOf returns what a file is, 0 for neither, and whether it needs libibverbs or librdmacm itself.
func kindOf(path string) (kind int, direct bool) {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 && !strings.Contains(path, ".so") {
		return 0, false
	}
	f, err := elf.Open(path)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	libs, _ := f.ImportedLibraries()
	direct = slices.ContainsFunc(libs, func(l string) bool { return slices.Contains(verbsLibraries, l) })
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) && info.Mode()&0o111 != 0 {
		return elfProgram, direct
	}
	return elfLibrary, direct
}

// TestStarts checks that every installed program of the distribution that uses RDMA starts with
// all its symbols bound at once.
func TestStarts(t *testing.T) {
	t.Parallel() // mostly waits, for programs that do not end
	dir := plain.libraries(t)
	programs := installed().programs
	if len(programs) < 20 {
		testenv.Skip(t, "only %d programs that use RDMA are installed: see .ci/need in the Makefile", len(programs))
	}
	var wg sync.WaitGroup
	turn := make(chan struct{}, 8) // those that do not end take five seconds
	for _, path := range programs {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			if out := startNow(t, dir, path); out != "" {
				t.Errorf("%s:\n%s", path, out)
			}
		})
	}
	wg.Wait()
	t.Logf("%d programs: %s", len(programs), strings.Join(programs, " "))
}

// TestSymbols checks that every installed library and plug-in that needs libibverbs or librdmacm finds as many symbols with iwarpd's
// libraries as without.
func TestSymbols(t *testing.T) {
	t.Parallel()
	dir := plain.libraries(t)
	libraries := installed().libraries
	missing := func(path, dir string) (lines []string, out string) {
		cmd := exec.Command("ldd", "-r", path)
		cmd.Env = append(os.Environ(), "LC_ALL=C", "LD_LIBRARY_PATH="+dir)
		b, _ := cmd.CombinedOutput()
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, "undefined symbol") || strings.Contains(line, "not found") {
				lines = append(lines, line)
			}
		}
		return lines, string(b)
	}
	for _, path := range libraries {
		without, _ := missing(path, "")
		with, out := missing(path, dir)
		if !slices.Equal(with, without) || !strings.Contains(out, dir) {
			t.Errorf("ldd -r %s:\n%s", path, out)
		}
	}
	t.Logf("%d libraries: %s", len(libraries), strings.Join(libraries, " "))
}

// verbsLibraries are the libraries of libibverbs and librdmacm.
var verbsLibraries = []string{"libibverbs.so.1", "librdmacm.so.1"}

// offers returns the symbols, as "name@version", and the versions, as "@version", that a library of iwarpd in dir has together with that
// of the distribution, which it loads. The versions must be its own.
func offers(t *testing.T, dir, library string) map[string]bool {
	t.Helper()
	has := make(map[string]bool)
	real, err := filepath.Glob("/usr/lib/*/" + library)
	if err != nil || len(real) == 0 {
		testenv.Skip(t, "needs %s: %v", library, err)
	}
	for _, path := range []string{real[0], filepath.Join(dir, library)} {
		f, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		symbols, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range symbols {
			if s.Section != elf.SHN_UNDEF {
				has[s.Name+"@"+s.Version] = true
			}
		}
		versions, err := f.DynamicVersions()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range versions {
			has["@"+v.Name] = path != real[0]
		}
	}
	return has
}

// missing returns what a file needs of a library and has does not have.
func missing(path, library string, has map[string]bool) (all []string, err error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	if err != nil {
		return nil, err
	}
	for _, s := range symbols {
		if s.Library == library && !has[s.Name+"@"+s.Version] {
			all = append(all, s.Name+"@"+s.Version)
		}
	}
	needs, err := f.DynamicVersionNeeds()
	for _, n := range needs {
		for _, v := range n.Needs {
			if n.Name == library && !has["@"+v.Dep] {
				all = append(all, "@"+v.Dep)
			}
		}
	}
	return all, err
}

// TestUnpacked looks up the symbols of programs, libraries and plug-ins without starting them, since other libraries that they need may not be
// installed. VERBS_UNPACKED names a folder in which packages were unpacked (dpkg -x). Without it the test takes the installed files.
func TestUnpacked(t *testing.T) {
	t.Parallel()
	dir := plain.libraries(t)
	uses := installed()
	if root := os.Getenv("VERBS_UNPACKED"); root != "" {
		uses = rdmaFilesIn(root)
	}
	files := make(map[string]bool) // those that need something
	for _, library := range verbsLibraries {
		has := offers(t, dir, library)
		for _, path := range slices.Concat(uses.programs, uses.libraries) {
			lacks, err := missing(path, library, has)
			if err != nil || len(lacks) > 0 {
				t.Errorf("%s: %s lacks %v: %v", path, library, lacks, err)
			}
			if lacks, _ := missing(path, library, nil); len(lacks) > 0 {
				files[path] = true
			}
		}
	}
	t.Logf("%d files: %s", len(files), strings.Join(slices.Sorted(maps.Keys(files)), " "))
	if len(files) == 0 {
		testenv.Skip(t, "no file uses RDMA")
	}
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
	if err := os.Symlink(filepath.Join(plain.dir, "libibverbs.so.1"), filepath.Join(dir, "libibverbs.so.1")); err != nil {
		t.Fatal(err)
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
