package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no go.mod here: run it in the repository")
		}
	}
}

// hash determines the order of mutants. It is the same in every run and does not change when code moves.
func hash(s ...string) string {
	h := sha256.Sum256([]byte(strings.Join(s, "\x00")))
	return hex.EncodeToString(h[:8])
}

// place is code that can be replaced: a function, or the value of a constant or variable.
type place struct {
	dir, file, name string
	decl            *ast.FuncDecl // of a function
	value           ast.Expr      // of a constant or variable
	constant        bool
	text            []byte // of the file
	fset            *token.FileSet
}

func (p *place) pos(n token.Pos) int { return p.fset.Position(n).Offset }

// span returns the text that mutants change, and its offset in the file.
func (p *place) span() (text string, at int) {
	from, to := token.NoPos, token.NoPos
	if p.decl != nil {
		from, to = p.decl.Pos(), p.decl.End()
	} else {
		from, to = p.value.Pos(), p.value.End()
	}
	at = p.pos(from)
	return string(p.text[at:p.pos(to)]), at
}

// mutant replaces bytes [from,to) of its file by text.
type mutant struct {
	place    *place
	op       string
	from, to int
	text     string
	listed   bool // of mutants.txt
	nth      int  // among those of the place with the same operation and text

	id     int // from 1; 0: it does not compile
	broken bool
}

func (m *mutant) old() string { return string(m.place.text[m.from:m.to]) }

// key returns the name of the mutant in survivors.txt.
func (m *mutant) key() string {
	s := fmt.Sprintf("%s.%s %s %s", m.place.dir, m.place.name, m.op, short(m.old()))
	if m.listed || m.text != "" && m.op == "constant" {
		s += " => " + short(m.text)
	}
	if m.nth > 0 {
		s += " #" + strconv.Itoa(m.nth+1)
	}
	return s
}

func short(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > 90 {
		s = s[:90] + "…"
	}
	return s
}

// source has the code of packages, parsed on demand.
type source struct {
	root   string
	dirs   map[string]map[string][]*place // by folder and name
	writes map[string]map[string][]*place // functions that set a field, by folder and name of the field
	muts   map[*place][]*mutant
}

func newSource(root string) *source {
	return &source{root, map[string]map[string][]*place{}, map[string]map[string][]*place{}, map[*place][]*mutant{}}
}

func (s *source) load(dir string) map[string][]*place {
	if p, ok := s.dirs[dir]; ok {
		return p
	}
	places, writes := map[string][]*place{}, map[string][]*place{}
	s.dirs[dir], s.writes[dir] = places, writes
	files, _ := filepath.Glob(filepath.Join(s.root, dir, "*.go"))
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || strings.HasSuffix(file, ".pb.go") || !buildable(file) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			continue
		}
		for _, decl := range f.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				if decl.Body == nil || decl.Name.Name == "init" || decl.Name.Name == "main" || decl.Name.Name == "_" {
					continue
				}
				p := &place{dir: dir, file: file, name: conformance.FuncName(decl), decl: decl, text: text, fset: fset}
				places[p.name] = append(places[p.name], p)
				for field := range fieldsSet(decl) {
					writes[field] = append(writes[field], p)
				}
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					spec, ok := spec.(*ast.ValueSpec)
					if !ok || len(spec.Values) != len(spec.Names) {
						continue
					}
					for i, id := range spec.Names {
						places[id.Name] = append(places[id.Name], &place{dir: dir, file: file, name: id.Name,
							value: spec.Values[i], constant: decl.Tok == token.CONST, text: text, fset: fset})
					}
				}
			}
		}
	}
	return places
}

var foreign = regexp.MustCompile(`_(arm64|windows|darwin|freebsd|s390x|ppc64le|riscv64|386|arm)\.go$`)

func buildable(file string) bool { return !foreign.MatchString(file) }

// fieldsSet returns the names of the fields that a function assigns or sets in composite literals.
func fieldsSet(f *ast.FuncDecl) map[string]bool {
	names := map[string]bool{}
	ast.Inspect(f.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for _, l := range n.Lhs {
				if sel, ok := l.(*ast.SelectorExpr); ok {
					names[sel.Sel.Name] = true
				}
			}
		case *ast.KeyValueExpr:
			if id, ok := n.Key.(*ast.Ident); ok {
				names[id.Name] = true
			}
		}
		return true
	})
	return names
}

// find returns the mutants of what a row names: a function, a constant, a variable, all functions that set a field, or
// the methods of a type.
func (s *source) find(n conformance.Name) (out []*mutant) {
	places := s.load(n.Dir)
	if p := places[n.Name]; p != nil {
		for _, p := range p {
			out = append(out, s.mutants(p)...)
		}
		return out
	}
	if _, field, ok := strings.Cut(n.Name, "."); ok {
		for _, p := range s.writes[n.Dir][field] {
			for _, m := range s.mutants(p) {
				if m.op == "unset "+field {
					out = append(out, m)
				}
			}
		}
		return out
	}
	var names []string
	for name := range places {
		if n.Name != "" && strings.HasPrefix(name, n.Name+".") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		for _, p := range places[name] {
			out = append(out, s.mutants(p)...)
		}
	}
	return out
}

func (s *source) mutants(p *place) []*mutant {
	if m, ok := s.muts[p]; ok {
		return m
	}
	var out []*mutant
	if p.decl != nil {
		out = p.ofFunction()
	} else {
		out = p.ofValue(p.value)
	}
	count := map[string]int{}
	for _, m := range out {
		k := m.op + "\x00" + m.old() + "\x00" + m.text
		m.nth = count[k]
		count[k]++
	}
	s.muts[p] = out
	return out
}

func (p *place) cut(n ast.Node) string { return string(p.text[p.pos(n.Pos()):p.pos(n.End())]) }

func (p *place) replace(n ast.Node, op, text string) *mutant {
	return &mutant{place: p, op: op, from: p.pos(n.Pos()), to: p.pos(n.End()), text: text}
}

var swaps = map[token.Token]string{
	token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">", token.EQL: "!=", token.NEQ: "==",
	token.LAND: "||", token.LOR: "&&", token.ADD: "-", token.SUB: "+",
}

// ofFunction returns every mutant of a function's body.
func (p *place) ofFunction() (out []*mutant) {
	out = append(out, p.early()...)
	conds := map[ast.Expr]bool{}
	ast.Inspect(p.decl.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			conds[n.Cond] = true
			out = append(out, p.replace(n.Cond, "negated", "!("+p.cut(n.Cond)+")"), p.replace(n.Cond, "never", "("+p.cut(n.Cond)+") && false"))
			if n.Else != nil {
				out = append(out, p.replace(n.Cond, "always", "("+p.cut(n.Cond)+") || true"))
			}
		case *ast.BinaryExpr:
			negates := conds[n] && (n.Op == token.EQL || n.Op == token.NEQ)
			if to, ok := swaps[n.Op]; ok && !negates {
				at := p.pos(n.OpPos)
				out = append(out, &mutant{place: p, op: n.Op.String() + " to " + to, from: p.pos(n.Pos()), to: p.pos(n.End()),
					text: string(p.text[p.pos(n.Pos()):at]) + to + string(p.text[at+len(n.Op.String()):p.pos(n.End())])})
			}
		case *ast.BasicLit:
			out = append(out, p.literal(n)...)
		case *ast.ExprStmt:
			out = append(out, p.replace(n, "removed", "{}"))
		case *ast.IncDecStmt:
			out = append(out, p.replace(n, "removed", ""))
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				break
			}
			out = append(out, p.replace(n, "removed", ""))
			for _, l := range n.Lhs {
				if sel, ok := l.(*ast.SelectorExpr); ok {
					out = append(out, p.replace(n, "unset "+sel.Sel.Name, ""))
				}
			}
		case *ast.CompositeLit:
			for i, e := range n.Elts {
				kv, ok := e.(*ast.KeyValueExpr)
				if !ok {
					continue
				}
				if id, ok := kv.Key.(*ast.Ident); ok {
					m := p.replace(kv, "unset "+id.Name, "")
					if i+1 < len(n.Elts) {
						m.to = p.pos(n.Elts[i+1].Pos())
					} else {
						m.to = p.pos(n.Rbrace)
					}
					out = append(out, m)
				}
			}
		case *ast.CaseClause:
			if len(n.Body) > 0 {
				if _, returns := n.Body[len(n.Body)-1].(*ast.ReturnStmt); !returns {
					from, to := p.pos(n.Body[0].Pos()), p.pos(n.Body[len(n.Body)-1].End())
					out = append(out, &mutant{place: p, op: "case emptied", from: from, to: to})
				}
			}
		case *ast.ReturnStmt:
			if len(n.Results) == 1 {
				if id, ok := n.Results[0].(*ast.Ident); ok && (id.Name == "true" || id.Name == "false") {
					out = append(out, p.replace(id, "inverted", map[string]string{"true": "false", "false": "true"}[id.Name]))
				}
			}
		}
		return true
	})
	return out
}

// early makes the function return before it does anything.
func (p *place) early() []*mutant {
	if len(p.decl.Body.List) == 0 {
		return nil
	}
	var zero []string
	if r := p.decl.Type.Results; r != nil {
		for _, f := range r.List {
			for range max(1, len(f.Names)) {
				zero = append(zero, "*new("+p.cut(f.Type)+")")
			}
		}
	}
	at := p.pos(p.decl.Body.Lbrace) + 1
	return []*mutant{{place: p, op: "early return", from: at, to: at, text: " if true { return " + strings.Join(zero, ", ") + " };"}}
}

func (p *place) literal(n *ast.BasicLit) []*mutant {
	switch n.Kind {
	case token.INT:
		by := "+1"
		if v, err := strconv.ParseUint(n.Value, 0, 64); err == nil && v >= 0xff && v&(v+1) == 0 {
			by = "-1" // the largest value of its type, often
		}
		return []*mutant{p.replace(n, "constant", "("+n.Value+by+")")}
	case token.FLOAT:
		return []*mutant{p.replace(n, "constant", "("+n.Value+"*1.5)")}
	}
	return nil
}

// ofValue returns mutants of the value of a constant or variable.
func (p *place) ofValue(v ast.Expr) (out []*mutant) {
	ast.Inspect(v, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return false
		case *ast.BasicLit:
			out = append(out, p.literal(n)...)
		}
		return true
	})
	if len(out) == 0 && p.constant {
		if id, ok := v.(*ast.Ident); !ok || id.Name != "iota" {
			out = append(out, p.replace(v, "constant", "("+p.cut(v)+")+1"))
		}
	}
	return out
}

// row is a row of a table with its mutants, in the order in which they are tried.
type row struct {
	conformance.Row
	mutants []*mutant
	results []result
	killed  bool // by a test of its own
}

func (r *row) candidates(s *source, listed map[string][]*mutant) error {
	r.mutants = append(r.mutants, listed[r.key()]...)
	seen := map[*mutant]bool{}
	var auto []*mutant
	for _, n := range r.Code {
		for _, m := range s.find(n) {
			if !seen[m] {
				seen[m] = true
				auto = append(auto, m)
			}
		}
	}
	slices.SortStableFunc(auto, func(a, b *mutant) int {
		return strings.Compare(hash(r.ID, a.key(), a.text), hash(r.ID, b.key(), b.text))
	})
	r.mutants = append(r.mutants, auto[:min(len(auto), *tries)]...)
	return nil
}

func (r *row) key() string {
	return strings.TrimSuffix(strings.TrimPrefix(r.File, "conformance-"), ".md") + " " + r.ID
}

// readMutants reads mutants.txt. Each mutant has a line with the table, the row and, after a colon, the function,
// constant or variable; then lines "- " with its code, and lines "+ " with the replacement. Indentation does not
// count.
func readMutants(root string, rows []conformance.Row) (map[string][]*mutant, error) {
	const name = "test/mutate/mutants.txt"
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, r := range rows {
		known[(&row{Row: r}).key()] = true
	}
	src := newSource(root)
	out := map[string][]*mutant{}
	var errs []error
	var key, code string
	var minus, plus []string
	flush := func(line int) {
		if key == "" {
			return
		}
		m, err := src.listed(code, minus, plus)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", name, line, key, err))
		case !known[key]:
			errs = append(errs, fmt.Errorf("%s:%d: there is no row %s", name, line, key))
		default:
			out[key] = append(out[key], m)
		}
		key, minus, plus = "", nil, nil
	}
	line := 0
	for l := range strings.Lines(string(b)) {
		line++
		l = strings.TrimRight(l, "\n")
		switch {
		case strings.HasPrefix(l, "#"):
		case strings.TrimSpace(l) == "":
			flush(line)
		case strings.HasPrefix(l, "-"):
			minus = append(minus, strings.TrimSpace(l[1:]))
		case strings.HasPrefix(l, "+"):
			plus = append(plus, strings.TrimSpace(l[1:]))
		default:
			flush(line)
			var ok bool
			if key, code, ok = strings.Cut(l, ": "); !ok {
				return nil, fmt.Errorf("%s:%d: want \"table row: package.Function\"", name, line)
			}
		}
	}
	flush(line)
	return out, errors.Join(errs...)
}

func (s *source) listed(code string, minus, plus []string) (*mutant, error) {
	dir, name, _ := strings.Cut(code, ".")
	var hits []*mutant
	places := s.load(dir)[name]
	if places == nil {
		return nil, fmt.Errorf("there is no %s", code)
	}
	var pattern bytes.Buffer
	for i, l := range minus {
		if i > 0 {
			pattern.WriteString(`\s+`)
		}
		pattern.WriteString(regexp.QuoteMeta(l))
	}
	re := regexp.MustCompile(pattern.String())
	for _, p := range places {
		text, at := p.span()
		for _, ix := range re.FindAllStringIndex(text, -1) {
			hits = append(hits, &mutant{place: p, op: "listed", from: at + ix[0], to: at + ix[1], text: strings.Join(plus, "\n"), listed: true})
		}
	}
	if len(hits) != 1 || len(minus) == 0 {
		return nil, fmt.Errorf("%q stands %d times in %s; want it once", strings.Join(minus, "\n"), len(hits), code)
	}
	return hits[0], nil
}

// readSurvivors reads survivors.txt: the key of a mutant, a tab, and the reason.
func readSurvivors(root string) (map[string]string, error) {
	b, err := os.ReadFile(filepath.Join(root, "test/mutate/survivors.txt"))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for l := range strings.Lines(string(b)) {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "#") {
			continue
		}
		key, why, ok := strings.Cut(l, "\t")
		if !ok {
			return nil, fmt.Errorf("survivors.txt: %q has no reason after a tab", key)
		}
		out[key] = strings.TrimSpace(why)
	}
	return out, nil
}
