// Package arch holds no code: its test is the import table, of who may know whom
// (docs/architecture.md), and what the protocol cores may not do.
package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const module = "github.com/iwarpd/iwarpd"

// A layer says which of the module's packages, and which outside modules, the
// packages under one folder may import in code that is not a test. A name
// stands for the folder and all below it; every layer may import the leaves.
type layer struct {
	folder  string
	inside  []string
	outside []string
	core    bool // sans-I/O: see forbidden
}

// leaves stand on the standard library alone, but for what layers say.
var leaves = []string{
	"internal/clock", "internal/serial", "internal/ring", "internal/pkt", "internal/term", "internal/impair",
	"internal/cache", "internal/marked", "internal/crc32c", "internal/nss", "internal/printable", "internal/histogram", "internal/spin", "internal/subnet",
}

// layers is searched in order, so a folder stands before the one it lies in.
var layers = []layer{
	{folder: "internal/ipfrag", core: true},
	{folder: "internal/marked", outside: []string{"golang.org/x/sys/cpu"}, core: true},
	{folder: "internal/crc32c", outside: []string{"golang.org/x/sys/cpu"}, core: true},
	{folder: "internal/spin", outside: []string{"golang.org/x/sys"}},
	{folder: "docs/site"},
	{folder: "docs"},
	{folder: "internal/clidoc", outside: []string{"github.com/spf13", "github.com/cpuguy83/go-md2man"}}, // in programs built with the tag docs
	{folder: "internal/conformance"}, // imported by tests alone, as testenv is
	{folder: "internal/testenv", inside: []string{"client"}, outside: []string{"golang.org/x/sys", "github.com/vishvananda", "github.com/safchain/ethtool"}},
	{folder: "app", inside: []string{"client"}, outside: []string{"golang.org/x", "github.com/zeebo/blake3", "github.com/zeebo/xxh3", "github.com/HdrHistogram"}},

	{folder: "tcp", core: true},
	{folder: "sctp/session", inside: []string{"sctp", "mpa"}, core: true},
	{folder: "sctp", core: true},
	{folder: "mpa", core: true},
	{folder: "ddp", core: true},
	{folder: "rdmap", inside: []string{"ddp"}, core: true},
	{folder: "verbs", inside: []string{"rdmap", "ddp"}, core: true},
	{folder: "rpcrdma/wire", core: true},
	{folder: "rpcrdma/session", inside: []string{"rpcrdma/wire"}, core: true},
	{folder: "rpcrdma/rpc", outside: []string{"golang.org/x"}},
	{folder: "rpcrdma/rpcgen", inside: []string{"rpcrdma/rpc"}, outside: []string{"github.com/buildbarn/go-xdr"}},
	{folder: "rpcrdma/nfs", inside: []string{"rpcrdma", "client"}, outside: []string{"github.com/buildbarn/go-xdr", "golang.org/x"}},
	{folder: "rpcrdma", inside: []string{"client", "rpcrdma/wire", "rpcrdma/session", "rpcrdma/rpc"}, outside: []string{"golang.org/x/sys"}},

	{folder: "shm", inside: []string{"verbs", "rdmap"}, outside: []string{"golang.org/x/sys"}},
	{folder: "far", inside: []string{"shm", "verbs", "rdmap"}, outside: []string{"golang.org/x/sys"}},
	{folder: "bpf", outside: []string{"github.com/cilium/ebpf", "golang.org/x/sys", "github.com/vishvananda/netlink"}},
	{folder: "dataplane/sched", core: true},
	{folder: "dataplane/wheel", core: true},
	{folder: "dataplane/handoff", inside: []string{"dataplane/link"}},
	{folder: "dataplane/link", outside: []string{"golang.org/x/sys"}},
	{folder: "dataplane/ifqueue", inside: []string{"dataplane/link", "dataplane/xsk", "bpf"}, outside: []string{"github.com/vishvananda/netlink"}},
	{folder: "dataplane/xsk", inside: []string{"dataplane/link", "bpf"},
		outside: []string{"github.com/asavie/xdp", "github.com/cilium/ebpf", "golang.org/x/sys", "github.com/safchain/ethtool", "github.com/vishvananda/netlink"}},
	{folder: "dataplane", inside: []string{"internal/ipfrag", "bpf", "shm", "verbs", "rdmap", "ddp", "mpa", "tcp", "sctp"},
		outside: []string{"golang.org/x/sys", "github.com/vishvananda"}},

	{folder: "ctrl/hostnet", inside: []string{"dataplane"}, outside: []string{"github.com/vishvananda", "github.com/safchain/ethtool", "golang.org/x/sys"}},
	{folder: "ctrl/nftset", outside: []string{"github.com/google/nftables", "github.com/mdlayher/netlink", "golang.org/x/sys", "go.uber.org/zap"}},
	{folder: "ctrl", inside: []string{"ctrl", "shm", "far", "dataplane", "bpf", "verbs", "rdmap", "ddp", "mpa", "tcp", "sctp"},
		outside: []string{"golang.org/x", "google.golang.org/protobuf", "go.uber.org/zap", "github.com/vishvananda", "github.com/prometheus"}},
	{folder: "client/embed", inside: []string{"client", "ctrl", "shm", "dataplane", "bpf", "verbs", "rdmap", "mpa", "tcp"},
		outside: []string{"golang.org/x/sys", "go.uber.org/zap"}},
	{folder: "client", inside: []string{"ctrl", "shm", "verbs", "rdmap"},
		outside: []string{"golang.org/x", "google.golang.org/protobuf"}},

	{folder: "cmd/iwarpd", inside: []string{"docs", "internal/clidoc", "ctrl", "client", "dataplane", "bpf", "mpa", "shm", "tcp"},
		outside: []string{"github.com/spf13", "go.uber.org/zap", "github.com/coreos/go-systemd", "golang.org/x", "go.yaml.in/yaml", "github.com/prometheus"}},
	{folder: "cmd/iwarpd-device-plugin", inside: []string{"client"}, // a module of its own
		outside: []string{"golang.org/x/sys", "google.golang.org/grpc", "k8s.io/kubelet", "tags.cncf.io/container-device-interface"}},
	{folder: "deploy", outside: []string{"github.com/google/go-containerregistry", "github.com/CycloneDX/cyclonedx-go"}}, // a module of its own
	{folder: "cmd/iwarpctl", inside: []string{"client", "ctrl/ctrlpb", "app", "rpcrdma", "internal/clidoc"},
		outside: []string{"github.com/spf13", "golang.org/x", "github.com/jedib0t/go-pretty", "google.golang.org/protobuf", "github.com/gopacket"}},
}

// forbidden are the imports that a sans-I/O core has no use for. sync/atomic is
// not among them: verbs.Table is read by workers without locks.
var forbidden = []string{"os", "net", "log", "log/slog", "context", "sync", "unsafe", "syscall", "io/fs", "math/rand", "math/rand/v2", "os/signal"}

// clocks are what package time has beside durations.
var clocks = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}

// exempt lists what a core package may do against the rule, with the reason.
var exempt = map[string][]string{
	"verbs": {"sync"}, // verbs.Table: written by ctrl, read by workers
}

// unsafeFolders may import unsafe: shared memory and rings live here, and what serves tests.
var unsafeFolders = []string{"rpcrdma/nfs", "dataplane/xsk", "dataplane/link", "shm", "ctrl/ctrlpb", "ctrl/seqpacket", "client", "test", "internal/testenv"}

type file struct {
	folder string // slash path in the module
	name   string
	syntax *ast.File
	test   bool
	fset   *token.FileSet
}

func parse(t *testing.T) []file {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	var out []file
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			if os.IsNotExist(err) {
				return nil // a temporary file of another test
			}
			return err
		}
		if d.IsDir() {
			if n := d.Name(); p != root && (n == "testdata" || n == "out" || n == "bin" || strings.HasPrefix(n, ".")) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		out = append(out, file{
			folder: path.Dir(filepath.ToSlash(rel)), name: filepath.ToSlash(rel), syntax: syntax,
			test: strings.HasSuffix(p, "_test.go"), fset: fset,
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// under reports whether p is folder or lies in it.
func under(p, folder string) bool {
	return p == folder || strings.HasPrefix(p, folder+"/")
}

func anyUnder(p string, folders []string) bool {
	return slices.ContainsFunc(folders, func(f string) bool { return under(p, f) })
}

func layerOf(folder string) (layer, bool) {
	for _, l := range layers {
		if under(folder, l.folder) {
			return l, true
		}
	}
	return layer{folder: folder}, anyUnder(folder, leaves)
}

// allowed reports whether a package of layer l may import imp.
func allowed(l layer, imp string) bool {
	if inside, ok := strings.CutPrefix(imp, module+"/"); ok {
		if helper(inside) {
			return false
		}
		return under(inside, l.folder) || anyUnder(inside, leaves) || anyUnder(inside, l.inside)
	}
	first, _, _ := strings.Cut(imp, "/")
	if !strings.Contains(first, ".") {
		return true // standard library
	}
	return anyUnder(imp, l.outside)
}

func imports(f file) []string {
	var out []string
	for _, s := range f.syntax.Imports {
		p, err := strconv.Unquote(s.Path.Value)
		if err == nil {
			out = append(out, p)
		}
	}
	return out
}

// helper folders hold programs and packages of the tests, not layers: nothing
// but tests imports them.
func helper(folder string) bool {
	return folder == "." || under(folder, "test") || folder == "internal/arch" || strings.HasSuffix(folder, "test")
}

func TestImportTable(t *testing.T) {
	files := parse(t)
	if len(files) < 3 {
		t.Fatalf("found only %d Go files", len(files))
	}
	for _, f := range files {
		if f.test || helper(f.folder) {
			continue
		}
		l, ok := layerOf(f.folder)
		if !ok {
			t.Errorf("%s: folder %s is in no layer; add it to the table of internal/arch", f.name, f.folder)
			continue
		}
		for _, imp := range imports(f) {
			if !allowed(l, imp) {
				t.Errorf("%s imports %s: not in the table of internal/arch for %s", f.name, imp, l.folder)
			}
		}
	}
}

// top returns the folder that a package counts to in the order of layers: the first of
// its path, or of internal each package.
func top(folder string) string {
	parts := strings.SplitN(folder, "/", 3)
	if parts[0] == "internal" && len(parts) > 1 {
		return parts[0] + "/" + parts[1]
	}
	return parts[0]
}

// TestNoCircles checks that the folders of the module form layers: none imports, directly
// or through others, a folder that imports it.
func TestNoCircles(t *testing.T) {
	next := make(map[string]map[string]string) // folder to folder: the file
	for _, f := range parse(t) {
		if f.test || helper(f.folder) {
			continue
		}
		for _, imp := range imports(f) {
			inside, ok := strings.CutPrefix(imp, module+"/")
			if from, to := top(f.folder), top(inside); ok && from != to {
				if next[from] == nil {
					next[from] = make(map[string]string)
				}
				next[from][to] = f.name
			}
		}
	}
	const open, done = 1, 2
	state := make(map[string]int)
	var visit func(folder string, way []string)
	visit = func(folder string, way []string) {
		way = append(way, folder)
		switch state[folder] {
		case open:
			t.Errorf("a circle of imports: %s", strings.Join(way, " -> "))
			return
		case done:
			return
		}
		state[folder] = open
		for to := range next[folder] {
			visit(to, way)
		}
		state[folder] = done
	}
	for folder := range next {
		visit(folder, nil)
	}
}

// inner reports whether imp is a part of a core that is no layer of its own: only the
// core itself, and tests, may know it.
func inner(folder, imp string) bool {
	inside, ok := strings.CutPrefix(imp, module+"/")
	if !ok {
		return false
	}
	l, ok := layerOf(inside)
	return ok && l.core && inside != l.folder && !under(folder, l.folder)
}

// TestCoresAreClosed checks that no package above a core imports the core's own parts.
func TestCoresAreClosed(t *testing.T) {
	for _, f := range parse(t) {
		if f.test || helper(f.folder) {
			continue
		}
		for _, imp := range imports(f) {
			if inner(f.folder, imp) {
				t.Errorf("%s imports %s, a part of a core", f.name, imp)
			}
		}
	}
	for _, tt := range []struct {
		folder, imp string
		want        bool
	}{
		{"dataplane", module + "/tcp", false},
		{"dataplane", module + "/tcp/recovery", true},
		{"tcp", module + "/tcp/recovery", false},
		{"dataplane", module + "/sctp/session", false},
		{"ctrl", module + "/dataplane/sched", false},
		{"dataplane", module + "/dataplane/sched/ring", true},
	} {
		if got := inner(tt.folder, tt.imp); got != tt.want {
			t.Errorf("%s importing %s: reaches into a core: %v; want %v", tt.folder, tt.imp, got, tt.want)
		}
	}
}

// TestImportTableRules checks the checker: what the table must refuse.
func TestImportTableRules(t *testing.T) {
	for _, tt := range []struct {
		folder, imp string
		want        bool
	}{
		{"tcp", "encoding/binary", true},
		{"tcp", module + "/internal/serial", true},
		{"tcp", module + "/mpa", false},
		{"tcp", module + "/dataplane", false},
		{"rdmap", module + "/ddp", true},
		{"ddp", module + "/rdmap", false},
		{"verbs", module + "/shm", false},
		{"dataplane", module + "/shm", true},
		{"dataplane", module + "/ctrl", false},
		{"dataplane/link", module + "/dataplane", false},
		{"dataplane/sched", module + "/dataplane/link", false},
		{"dataplane/wheel", module + "/dataplane/sched", false},
		{"dataplane/handoff", module + "/dataplane/link", true},
		{"dataplane/handoff", module + "/dataplane/sched", false},
		{"client", module + "/dataplane", false},
		{"client", module + "/client/embed", true},
		{"client/embed", module + "/dataplane", true},
		{"ctrl", "github.com/spf13/viper", false},
		{"dataplane", "go.uber.org/zap", false},
		{"internal/pkt", "golang.org/x/sys/unix", false},
		{"internal/pkt", module + "/tcp", false},
		{"tcp", module + "/tcp/peertest", false},
	} {
		l, ok := layerOf(tt.folder)
		if !ok {
			t.Errorf("no layer for %s", tt.folder)
			continue
		}
		if got := allowed(l, tt.imp); got != tt.want {
			t.Errorf("%s importing %s: allowed = %v; want %v", tt.folder, tt.imp, got, tt.want)
		}
	}
}

// TestCoresAreSansIO keeps the clock, goroutines, channels, locks and unsafe
// out of the protocol cores.
func TestCoresAreSansIO(t *testing.T) {
	for _, f := range parse(t) {
		l, ok := layerOf(f.folder)
		if !ok || !l.core || f.test || helper(f.folder) {
			continue
		}
		for _, imp := range imports(f) {
			if slices.Contains(forbidden, imp) && !slices.Contains(exempt[l.folder], imp) {
				t.Errorf("%s imports %s: a protocol core is sans-I/O (docs/architecture.md)", f.name, imp)
			}
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: a protocol core starts a goroutine", f.fset.Position(n.Pos()))
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(clocks, n.Sel.Name) {
					t.Errorf("%s: a protocol core uses time.%s", f.fset.Position(n.Pos()), n.Sel.Name)
				}
			case *ast.ChanType:
				t.Errorf("%s: a protocol core uses a channel", f.fset.Position(n.Pos()))
			}
			return true
		})
	}
}

func TestUnsafeIsConfined(t *testing.T) {
	for _, f := range parse(t) {
		if f.test || anyUnder(f.folder, unsafeFolders) {
			continue
		}
		if slices.Contains(imports(f), "unsafe") {
			t.Errorf("%s imports unsafe: it belongs in %s", f.name, strings.Join(unsafeFolders, ", "))
		}
	}
}

// TestPage checks that docs/architecture.md names each folder of the table.
func TestPage(t *testing.T) {
	page := testenv.ReadFile(t, "../../docs/architecture.md")
	folders := slices.Clone(leaves)
	for _, l := range layers {
		folders = append(folders, l.folder)
	}
	for _, folder := range folders {
		// The page names the leaves, and the parts of dataplane, by their last element.
		name := strings.TrimPrefix(strings.TrimPrefix(folder, "internal/"), "dataplane/")
		if !regexp.MustCompile(`\b` + name + `\b`).Match(page) {
			t.Errorf("docs/architecture.md does not name %s", folder)
		}
	}
}
