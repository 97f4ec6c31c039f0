package conformance

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// A Row is one requirement in a table of docs/conformance-*.md.
type Row struct {
	File   string // "conformance-mpa.md"
	ID     string // the first cell: "M14", "MUST-39"
	Code   []Name
	Tests  []Name
	Reason bool // the code cell gives a reason for having no test
}

// A Name is an identifier in backquotes, or a subtest between asterisks, that a row refers to.
type Name struct {
	Dir  string // folder in the module: "mpa", "sctp/session"
	Name string // "Framer", "Framer.End", "Config.Rev", "TestFramerReference"; "" for a package
	Case string // prefix of the name of a subtest; "" for the whole test
}

func (n Name) String() string {
	s := n.Dir
	if n.Name != "" {
		s += "." + n.Name
	}
	if n.Case != "" {
		s += "/" + n.Case
	}
	return s
}

// tables lists the files, each with the package that its unqualified names refer to.
var tables = []struct{ file, pkg string }{
	{"conformance-tcp.md", "tcp"},
	{"conformance-mpa.md", "mpa"},
	{"conformance-rdmap.md", "rdmap"},
	{"conformance-sctp.md", "sctp"},
	{"conformance-rpcrdma.md", "rpcrdma"},
}

// folders maps the names of packages whose directory has another name to their directories.
var folders = map[string]string{
	"term": "internal/term", "serial": "internal/serial", "crc32c": "internal/crc32c", "pkt": "internal/pkt",
	"ipfrag": "internal/ipfrag", "marked": "internal/marked",
	"wire": "rpcrdma/wire", "session": "rpcrdma/session", "rpc": "rpcrdma/rpc", "nfs": "rpcrdma/nfs", "rpcgen": "rpcrdma/rpcgen",
	"adversary": "test/adversary",
}

// reasons lists how the code cell of a row without a test may begin.
var reasons = []string{"ULP", "administrator", "other", "does not arise:", "not done:", "this table"}

var (
	quoted   = regexp.MustCompile("`([^`]+)`")
	caseName = regexp.MustCompile(`\*([^*]+)\*`)
)

// Rows reads every conformance table of the module at root. It returns an error for each malformed
// row and for each name that does not exist.
func Rows(root string) (rows []Row, errs []error) {
	src := &source{root: root, loaded: map[string]*declared{}}
	for _, t := range tables {
		r, e := src.table(t.file, t.pkg)
		rows, errs = append(rows, r...), append(errs, e...)
	}
	return rows, errs
}

func (s *source) table(file, pkg string) (rows []Row, errs []error) {
	b, err := os.ReadFile(filepath.Join(s.root, "docs", file))
	if err != nil {
		return nil, []error{err}
	}
	var head []string
	seen := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			head = nil
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if head == nil {
			head = cells
			continue
		}
		if strings.Trim(cells[0], "-: ") == "" {
			continue
		}
		r := Row{File: file, ID: cells[0]}
		fail := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s: %s: %s", file, r.ID, fmt.Sprintf(format, args...)))
		}
		if len(cells) != len(head) {
			fail("%d cells; the table has %d columns", len(cells), len(head))
			continue
		}
		if seen[r.ID] {
			fail("twice")
		}
		seen[r.ID] = true
		code, test := -1, -1
		for i, h := range head {
			switch h {
			case "Code":
				code = i
			case "Test", "Proof":
				test = i
			}
		}
		if code < 0 || test < 0 {
			fail("its table has no column Code or no column Test")
			continue
		}
		for _, reason := range reasons {
			r.Reason = r.Reason || strings.HasPrefix(cells[code], reason)
		}
		for _, q := range quoted.FindAllStringSubmatch(cells[code], -1) {
			n, ok := s.code(pkg, q[1])
			if !ok {
				fail("there is no %s", q[1])
			}
			r.Code = append(r.Code, n)
		}
		r.Tests = s.tests(pkg, cells[test], fail)
		if len(r.Code) == 0 && !r.Reason {
			fail("neither code nor a reason")
		}
		if len(r.Tests) == 0 && !r.Reason {
			fail("neither a test nor a reason")
		}
		rows = append(rows, r)
	}
	return rows, errs
}

// tests parses a cell of tests: names in backquotes, and subtests between asterisks, which belong
// to whichever test of the table's package has them.
func (s *source) tests(pkg, cell string, fail func(string, ...any)) (names []Name) {
	for _, q := range quoted.FindAllStringSubmatch(cell, -1) {
		n := s.split(pkg, q[1])
		if !isTest(n.Name) || s.load(n.Dir).tests[n.Name] == nil {
			fail("there is no test %s", q[1])
		}
		names = append(names, n)
	}
	for _, m := range caseName.FindAllStringSubmatch(quoted.ReplaceAllString(cell, ""), -1) {
		found := false
		for test, cases := range s.load(s.dir(pkg)).tests {
			for _, c := range cases {
				if strings.HasPrefix(c, m[1]) {
					names, found = append(names, Name{s.dir(pkg), test, m[1]}), true
					break
				}
			}
		}
		if !found {
			fail("no test of package %s has a case %q", pkg, m[1])
		}
	}
	return names
}

// declared holds the top-level declarations of a package, with methods and fields as Type.Name, and
// the subtests of its tests.
type declared struct {
	code  map[string]bool
	tests map[string][]string
}

type source struct {
	root   string
	loaded map[string]*declared
}

func (s *source) dir(pkg string) string {
	if f, ok := folders[pkg]; ok {
		return f
	}
	return pkg
}

// split parses package.Name, where package may be a path. A name without a package belongs to pkg.
func (s *source) split(pkg, name string) Name {
	if name == "" || 'a' > name[0] || name[0] > 'z' {
		return Name{Dir: s.dir(pkg), Name: name}
	}
	pkg, name, _ = strings.Cut(name, ".")
	return Name{Dir: s.dir(pkg), Name: name}
}

// code looks up a name in non-test code. The name of a package alone is valid too.
func (s *source) code(pkg, name string) (Name, bool) {
	if n := (Name{Dir: s.dir(pkg), Name: name}); s.load(n.Dir).code[name] {
		return n, true
	}
	n := s.split(pkg, name)
	if n.Name == "" {
		fi, err := os.Stat(filepath.Join(s.root, n.Dir))
		return n, err == nil && fi.IsDir()
	}
	return n, s.load(n.Dir).code[n.Name]
}

func isTest(name string) bool {
	return strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz")
}

func (s *source) load(dir string) *declared {
	if d := s.loaded[dir]; d != nil {
		return d
	}
	d := &declared{map[string]bool{}, map[string][]string{}}
	s.loaded[dir] = d
	files, _ := filepath.Glob(filepath.Join(s.root, dir, "*.go"))
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			continue // the compiler reports it
		}
		for _, decl := range f.Decls {
			if !strings.HasSuffix(file, "_test.go") {
				declare(d.code, decl)
			} else if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && f.Body != nil {
				d.tests[f.Name.Name] = cases(f)
			}
		}
	}
	return d
}

// cases returns the names of the subtests in f: the name fields of a test table, and the first
// arguments of calls of add.
func cases(f *ast.FuncDecl) []string {
	names := []string{}
	add := func(e ast.Expr) {
		if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil {
				names = append(names, s)
			}
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.KeyValueExpr:
			if id, ok := n.Key.(*ast.Ident); ok && id.Name == "name" {
				add(n.Value)
			}
		case *ast.CallExpr:
			if id, ok := n.Fun.(*ast.Ident); ok && id.Name == "add" && len(n.Args) > 0 {
				add(n.Args[0])
			}
		}
		return true
	})
	return names
}

func declare(into map[string]bool, decl ast.Decl) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		into[FuncName(decl)] = true
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				into[spec.Name.Name] = true
				if st, ok := spec.Type.(*ast.StructType); ok {
					for _, field := range st.Fields.List {
						for _, id := range field.Names {
							into[spec.Name.Name+"."+id.Name] = true
						}
					}
				}
				if it, ok := spec.Type.(*ast.InterfaceType); ok {
					for _, m := range it.Methods.List {
						for _, id := range m.Names {
							into[spec.Name.Name+"."+id.Name] = true
						}
					}
				}
			case *ast.ValueSpec:
				for _, id := range spec.Names {
					into[id.Name] = true
				}
			}
		}
	}
}

// FuncName returns the name of a function as the tables write it: Type.Method for a method.
func FuncName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	typ := f.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	if ix, ok := typ.(*ast.IndexExpr); ok {
		typ = ix.X
	}
	if id, ok := typ.(*ast.Ident); ok {
		return id.Name + "." + f.Name.Name
	}
	return f.Name.Name
}
