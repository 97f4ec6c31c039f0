// Package conformance checks the tables of docs/conformance-*.md against the
// source: what a row names as code or as a test must exist.
package conformance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// folders of the packages whose name is not their path.
var folders = map[string]string{
	"term": "internal/term", "serial": "internal/serial", "shm": "shm", "crc32c": "internal/crc32c",
	"wire": "rpcrdma/wire", "session": "rpcrdma/session", "rpc": "rpcrdma/rpc", "rpcgen": "rpcrdma/rpcgen", "nfs": "rpcrdma/nfs",
}

// A row that names no test begins its cell of code with why there is none.
var reasons = []string{"ULP", "administrator", "other", "does not arise:", "not done:", "this table"}

var (
	row    = regexp.MustCompile(`^\| ([A-Z]+)(\d+) \|`)
	quoted = regexp.MustCompile("`([^`]+)`")

	testName = regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`")
	caseName = regexp.MustCompile(`\*([^*]+)\*`)
)

// Check reads docs/<file> of the module that the test runs in, two or fewer
// levels below its root. Rows have six cells: id, section, level, rule, code,
// test. Plain names are of package pkg, others have their package in front. rows
// says how many rows there must be of each prefix of ids.
func Check(t *testing.T, file, pkg string, rows map[string]int) {
	t.Helper()
	root := ".."
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		root = filepath.Join("..", "..")
	}
	b, err := os.ReadFile(filepath.Join(root, "docs", file))
	if err != nil {
		t.Fatal(err)
	}
	p := packages{root: root, pkg: pkg, loaded: map[string]*declared{}}
	count, seen := map[string]int{}, map[string]bool{}
	for line := range strings.Lines(string(b)) {
		m := row.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		id := m[1] + m[2]
		if seen[id] {
			t.Errorf("%s: twice", id)
		}
		seen[id] = true
		count[m[1]]++
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 8 {
			t.Errorf("%s: %d cells; want 6", id, len(cells)-2)
			continue
		}
		p.check(t, id, strings.TrimSpace(cells[5]), strings.TrimSpace(cells[6]))
	}
	for prefix, want := range rows {
		if count[prefix] < want {
			t.Errorf("%d rows %s; want %d", count[prefix], prefix, want)
		}
	}
	if p.find(t, "TestNotThere", true) || p.find(t, pkg+".NotThere", false) || p.find(t, "nopackage", false) {
		t.Error("what does not exist is found")
	}
}

// CheckProofs reads docs/<file> of the module that the test runs in, one level
// below its root, for tables without cells of code. Tests that it names in
// backquotes must be in test files that one of the globs matches, and what it has
// between asterisks, in a row of a table, must be the name of a case there. least
// says how many of both there must be.
func CheckProofs(t *testing.T, file string, globs []string, least int) {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join("..", "docs", file))
	if err != nil {
		t.Fatal(err)
	}
	var src strings.Builder
	for _, g := range globs {
		names, err := filepath.Glob(g)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err != nil {
				t.Fatal(err)
			}
			src.Write(b)
		}
	}
	tests, named := src.String(), 0
	for line := range strings.Lines(string(doc)) {
		for _, m := range testName.FindAllStringSubmatch(line, -1) {
			named++
			if !strings.Contains(tests, "func "+m[1]+"(") {
				t.Errorf("no test %s", m[1])
			}
		}
		if !strings.HasPrefix(line, "|") {
			continue
		}
		for _, m := range caseName.FindAllStringSubmatch(line, -1) {
			named++
			if !strings.Contains(tests, `name: "`+m[1]) && !strings.Contains(tests, `add("`+m[1]) {
				t.Errorf("no case %q", m[1])
			}
		}
	}
	if named < least {
		t.Errorf("only %d proofs found: has the form of %s changed?", named, file)
	}
}

// declared is what a package declares at top level, methods as Type.Method.
type declared struct{ code, tests map[string]bool }

type packages struct {
	root, pkg string
	loaded    map[string]*declared
}

func (p *packages) check(t *testing.T, id, code, tests string) {
	t.Helper()
	for _, q := range quoted.FindAllStringSubmatch(code, -1) {
		if !p.find(t, q[1], false) {
			t.Errorf("%s: there is no %s", id, q[1])
		}
	}
	named := quoted.FindAllStringSubmatch(tests, -1)
	for _, q := range named {
		if !p.find(t, q[1], true) {
			t.Errorf("%s: there is no test %s", id, q[1])
		}
	}
	excused := false
	for _, r := range reasons {
		excused = excused || strings.HasPrefix(code, r)
	}
	if len(named) == 0 && !excused {
		t.Errorf("%s: neither a test nor a reason", id)
	}
}

func (p *packages) dir(pkg string) string {
	if f, ok := folders[pkg]; ok {
		pkg = f
	}
	return filepath.Join(p.root, pkg)
}

// find looks up a name of the table: of the package of the table, of
// package.Name, or a package itself.
func (p *packages) find(t *testing.T, name string, test bool) bool {
	t.Helper()
	pkg := p.pkg
	if c := name[0]; 'a' <= c && c <= 'z' {
		var qualified bool
		if pkg, name, qualified = strings.Cut(name, "."); !qualified {
			_, err := os.Stat(p.dir(pkg))
			return err == nil && !test
		}
	}
	d := p.load(t, pkg)
	if test {
		return d.tests[name] && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz"))
	}
	return d.code[name]
}

func (p *packages) load(t *testing.T, pkg string) *declared {
	t.Helper()
	if d := p.loaded[pkg]; d != nil {
		return d
	}
	d := &declared{map[string]bool{}, map[string]bool{}}
	p.loaded[pkg] = d
	files, _ := filepath.Glob(filepath.Join(p.dir(pkg), "*.go"))
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		into := d.code
		if strings.HasSuffix(file, "_test.go") {
			into = d.tests
		}
		for _, decl := range f.Decls {
			declare(into, decl)
		}
	}
	return d
}

func declare(into map[string]bool, decl ast.Decl) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		into[funcName(decl)] = true
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				into[spec.Name.Name] = true
			case *ast.ValueSpec:
				for _, id := range spec.Names {
					into[id.Name] = true
				}
			}
		}
	}
}

func funcName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	typ := f.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	if id, ok := typ.(*ast.Ident); ok {
		return id.Name + "." + f.Name.Name
	}
	return f.Name.Name
}
