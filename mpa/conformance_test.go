package mpa

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// names returns what the Go files in dir declare at top level: the tests and
// fuzz tests, and all else, methods as Type.Method.
func names(t *testing.T, dir string) (tests, code map[string]bool) {
	t.Helper()
	tests, code = map[string]bool{}, map[string]bool{}
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no Go files in %s: %v", dir, err)
	}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		isTest := strings.HasSuffix(name, "_test.go")
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				n := d.Name.Name
				if d.Recv != nil {
					typ := d.Recv.List[0].Type
					if p, ok := typ.(*ast.StarExpr); ok {
						typ = p.X
					}
					if id, ok := typ.(*ast.Ident); ok {
						n = id.Name + "." + n
					}
				}
				if !isTest {
					code[n] = true
				} else if strings.HasPrefix(n, "Test") || strings.HasPrefix(n, "Fuzz") {
					tests[n] = true
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						code[s.Name.Name] = !isTest
					case *ast.ValueSpec:
						for _, id := range s.Names {
							code[id.Name] = !isTest
						}
					}
				}
			}
		}
	}
	return tests, code
}

// Each row of the table of conformance names code and tests that exist.
func TestConformance(t *testing.T) {
	root := ".."
	f, err := os.Open(filepath.Join(root, "docs", "conformance-mpa.md"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	quoted := regexp.MustCompile("`([^`]+)`")
	lower := regexp.MustCompile(`^[a-z]+\.`)
	type index struct{ tests, code map[string]bool }
	pkgs := map[string]index{}
	has := func(id string, test bool) bool {
		dir := "mpa"
		if p := lower.FindString(id); p != "" {
			dir, id = strings.TrimSuffix(p, "."), id[len(p):]
		}
		if dir == "term" {
			dir = "internal/term"
		}
		if _, ok := pkgs[dir]; !ok {
			tests, code := names(t, filepath.Join(root, dir))
			pkgs[dir] = index{tests, code}
		}
		if test {
			return pkgs[dir].tests[id]
		}
		return pkgs[dir].code[id]
	}

	rows, seen := 0, map[string]bool{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		cells := strings.Split(sc.Text(), "|")
		if len(cells) < 2 || !regexp.MustCompile(`^ [ME][0-9]+ $`).MatchString(cells[1]) {
			continue
		}
		id := strings.TrimSpace(cells[1])
		if len(cells) != 8 {
			t.Errorf("%s: %d cells; want 6", id, len(cells)-2)
			continue
		}
		if seen[id] {
			t.Errorf("%s: twice", id)
		}
		seen[id] = true
		rows++
		code, tests := cells[5], cells[6]
		for _, m := range quoted.FindAllStringSubmatch(code, -1) {
			if !has(m[1], false) {
				t.Errorf("%s: no %s in the code", id, m[1])
			}
		}
		named := quoted.FindAllStringSubmatch(tests, -1)
		for _, m := range named {
			if !has(m[1], true) {
				t.Errorf("%s: no test %s", id, m[1])
			}
		}
		excused := false
		for _, why := range []string{" ULP:", " administrator:", " other:", " not done:"} {
			excused = excused || strings.HasPrefix(code, why)
		}
		if len(named) == 0 && !excused {
			t.Errorf("%s: neither a test nor a reason", id)
		}
	}
	if rows < 170 {
		t.Errorf("found %d rows; want all 170", rows)
	}
}
