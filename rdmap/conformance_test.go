package rdmap

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

// declared is what a package declares at top level, methods as Type.Method.
type declared struct{ code, tests map[string]bool }

// packages reads the declarations of packages of this module, each once.
type packages map[string]*declared

// folders of the packages whose name is not their path.
var folders = map[string]string{"term": "internal/term", "serial": "internal/serial", "shm": "ctrl/shm"}

func (p packages) load(t *testing.T, pkg string) *declared {
	t.Helper()
	if d := p[pkg]; d != nil {
		return d
	}
	d := &declared{map[string]bool{}, map[string]bool{}}
	p[pkg] = d
	dir := pkg
	if f, ok := folders[pkg]; ok {
		dir = f
	}
	files, _ := filepath.Glob(filepath.Join("..", dir, "*.go"))
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
	}
	return d
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

// find looks up a name of the table: of this package, of pkg.Name, or a package
// itself.
func (p packages) find(t *testing.T, name string, test bool) bool {
	t.Helper()
	pkg := "rdmap"
	if c := name[0]; 'a' <= c && c <= 'z' {
		var qualified bool
		if pkg, name, qualified = strings.Cut(name, "."); !qualified {
			_, err := os.Stat(filepath.Join("..", pkg))
			return err == nil && !test
		}
	}
	d := p.load(t, pkg)
	if test {
		return d.tests[name] && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz"))
	}
	return d.code[name]
}

// Every row of the table of conformance names code and tests that exist, or says
// why there are none.
func TestConformance(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "docs", "conformance-rdmap.md"))
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`^\| ([DRA])(\d+) \|`)
	quoted := regexp.MustCompile("`([^`]+)`")
	reasons := []string{"ULP", "administrator:", "other:", "does not arise:", "this table"}
	count := map[string]int{}
	pkgs := packages{}
	for line := range strings.Lines(string(b)) {
		m := row.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		count[m[1]]++
		id := m[1] + m[2]
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 8 {
			t.Errorf("%s: %d cells; want 6", id, len(cells)-2)
			continue
		}
		code, tests := strings.TrimSpace(cells[5]), strings.TrimSpace(cells[6])
		for _, q := range quoted.FindAllStringSubmatch(code, -1) {
			if !pkgs.find(t, q[1], false) {
				t.Errorf("%s: there is no %s", id, q[1])
			}
		}
		named := quoted.FindAllStringSubmatch(tests, -1)
		for _, q := range named {
			if !pkgs.find(t, q[1], true) {
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
	// No row is lost: one for each rule of RFC 5041, 5040 and 7306.
	for prefix, want := range map[string]int{"D": 138, "R": 168, "A": 72} {
		if count[prefix] < want {
			t.Errorf("%d rows %s; want %d", count[prefix], prefix, want)
		}
	}
	if pkgs.find(t, "TestNotThere", true) || pkgs.find(t, "ddp.NotThere", false) || pkgs.find(t, "nopackage", false) {
		t.Error("what does not exist is found")
	}
}
