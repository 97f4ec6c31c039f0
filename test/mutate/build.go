package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// build is the tree with all mutants in it. A mutant is active if MUTANT is its id.
type build struct {
	root, dir string
	file      string // of -overlay

	mu    sync.Mutex
	tests map[string]string // test binaries by folder; those of one constant by folder and id
	made  map[string]string // what the overlay replaces
	pkgs  map[string]string // name of the package in a folder
}

// helper is the file that is added to a package with mutants.
const helper = `package %s

import "os"

var mutantNow = func() (n int) {
	for _, c := range os.Getenv("MUTANT") {
		n = n*10 + int(c-'0')
	}
	return n
}()

func mutantValue[T any](id int, mutated, original T) T {
	if mutantNow == id {
		return mutated
	}
	return original
}
`

// overlay writes the sources with every mutant, and leaves out those that the compiler reports as invalid Go.
func (b *build) overlay(ctx context.Context, rows []*row) error {
	id, seen := 0, map[*mutant]bool{}
	files := map[string][]*mutant{}
	for _, r := range rows {
		for _, m := range r.mutants {
			if seen[m] {
				continue
			}
			seen[m] = true
			id++
			m.id = id
			files[m.place.file] = append(files[m.place.file], m)
		}
	}
	dirs := map[string]bool{}
	for round := 0; ; round++ {
		if round == 12 {
			return fmt.Errorf("the mutants do not compile")
		}
		b.made, b.pkgs = map[string]string{}, map[string]string{}
		lines := map[string][]span{}
		for file, ms := range files {
			text, at := weave(ms)
			if err := b.put(file, text); err != nil {
				return err
			}
			lines[file] = at
			dirs[filepath.Dir(file)] = true
			b.pkgs[filepath.Dir(file)] = packageName(ms[0].place.text)
		}
		for dir := range dirs {
			if err := b.put(filepath.Join(dir, "zz_mutant.go"), fmt.Sprintf(helper, b.pkgs[dir])); err != nil {
				return err
			}
		}
		if err := b.write(b.made, "overlay.json"); err != nil {
			return err
		}
		args := []string{"build", "-gcflags=-e", "-overlay=" + b.file}
		for dir := range dirs {
			args = append(args, dir)
		}
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = b.root
		out, err := cmd.CombinedOutput()
		if err == nil {
			return nil
		}
		if n := b.drop(out, lines); n == 0 {
			return fmt.Errorf("building the mutants: %w\n%s", err, out)
		}
	}
}

func (b *build) put(file, text string) error {
	name := filepath.Join(b.dir, strings.ReplaceAll(strings.TrimPrefix(file, b.root+"/"), "/", "__"))
	b.made[file] = name
	if old, err := os.ReadFile(name); err == nil && string(old) == text {
		return nil
	}
	return os.WriteFile(name, []byte(text), 0o600)
}

func (b *build) write(made map[string]string, name string) error {
	j, err := json.Marshal(map[string]any{"Replace": made})
	if err != nil {
		return err
	}
	b.file = filepath.Join(b.dir, name)
	return os.WriteFile(b.file, j, 0o600)
}

var errorLine = regexp.MustCompile(`(?m)^(\S+\.go):(\d+):\d+: (.*)$`)

// drop marks the mutants that the compiler names, and returns their number.
func (b *build) drop(out []byte, lines map[string][]span) (n int) {
	original := map[string]string{}
	for file, name := range b.made {
		original[name] = file
	}
	for _, m := range errorLine.FindAllSubmatch(out, -1) {
		file := string(m[1])
		if !filepath.IsAbs(file) {
			file = filepath.Join(b.root, file)
		}
		if o := original[file]; o != "" {
			file = o
		}
		line, _ := strconv.Atoi(string(m[2]))
		for _, s := range lines[file] {
			if s.first <= line && line <= s.last && !s.m.broken {
				if s.m.listed {
					fmt.Fprintf(os.Stderr, "mutate: a mutant of mutants.txt does not compile: %s: %s\n", s.m.key(), m[3])
				}
				s.m.broken = true
				n++
			}
		}
	}
	return n
}

func packageName(text []byte) string {
	m := regexp.MustCompile(`(?m)^package (\w+)`).FindSubmatch(text)
	return string(m[1])
}

// span is the range of lines of a mutant in a file.
type span struct {
	first, last int
	m           *mutant
}

type edit struct {
	from, to int
	text     string
}

// weave returns the file with the mutants, all of which are of that file.
func weave(ms []*mutant) (string, []span) {
	text := ms[0].place.text
	byPlace := map[*place][]*mutant{}
	var places []*place
	for _, m := range ms {
		if m.broken || m.place.constant {
			continue
		}
		p := m.place
		if i := slices.IndexFunc(places, func(q *place) bool { return q.file == p.file && q.name == p.name && q.span0() == p.span0() }); i >= 0 {
			p = places[i]
		} else {
			places = append(places, p)
		}
		byPlace[p] = append(byPlace[p], m)
	}
	slices.SortFunc(places, func(a, b *place) int { return a.span0() - b.span0() })
	var edits []edit
	type copied struct {
		m    *mutant
		text string
	}
	var copies []copied
	var values []*mutant
	for _, p := range places {
		if p.decl == nil {
			was, at := p.span()
			s := was
			for _, m := range byPlace[p] {
				mutated := was[:m.from-at] + m.text + was[m.to-at:]
				s = fmt.Sprintf("mutantValue(%d, %s, %s)", m.id, mutated, s)
				values = append(values, m)
			}
			edits = append(edits, edit{at, at + len(was), s})
			continue
		}
		names, call := p.signature()
		edits = append(edits, names...)
		var sw bytes.Buffer
		sw.WriteString(" if mutantNow != 0 { switch mutantNow {")
		for _, m := range byPlace[p] {
			fmt.Fprintf(&sw, "case %d: ", m.id)
			if p.decl.Type.Results != nil {
				fmt.Fprintf(&sw, "return %s; ", call(m.id))
			} else {
				fmt.Fprintf(&sw, "%s; return; ", call(m.id))
			}
			was, at := p.span()
			mutated := was[:m.from-at] + m.text + was[m.to-at:]
			copies = append(copies, copied{m, p.rename(mutated, fmt.Sprintf("__m%d", m.id))})
		}
		sw.WriteString("}}; ")
		at := p.pos(p.decl.Body.Lbrace) + 1
		edits = append(edits, edit{at, at, sw.String()})
	}
	slices.SortStableFunc(edits, func(a, b edit) int { return a.from - b.from })
	var out bytes.Buffer
	last := 0
	for _, e := range edits {
		out.Write(text[last:e.from])
		out.WriteString(e.text)
		last = e.to
	}
	out.Write(text[last:])
	var spans []span
	for _, m := range values {
		first := bytes.Count(text[:m.from], []byte("\n")) + 1
		spans = append(spans, span{first, first, m})
	}
	for _, c := range copies {
		out.WriteString("\n")
		first := bytes.Count(out.Bytes(), []byte("\n")) + 1
		out.WriteString(c.text + "\n")
		spans = append(spans, span{first, first + strings.Count(c.text, "\n"), c.m})
	}
	return out.String(), spans
}

// rename returns the text of a function, which may be a mutant of p from its first line on, with suffix added to its
// name. Text that does not begin with the function is returned unchanged and does not compile.
func (p *place) rename(text, suffix string) string {
	head := regexp.MustCompile(`^func\s*(\([^)]*\)\s*)?` + p.decl.Name.Name + `\b`).FindString(text)
	if head == "" {
		return text
	}
	return head + suffix + text[len(head):]
}

func (p *place) span0() int { _, at := p.span(); return at }

// signature returns edits that give every parameter a name, and the call of a copy with these parameters.
func (p *place) signature() (edits []edit, call func(id int) string) {
	n := 0
	fresh := func() string { n++; return fmt.Sprintf("mutantArg%d", n) }
	var args []string
	fields := func(l *ast.FieldList) (names []string) {
		if l == nil {
			return nil
		}
		for _, f := range l.List {
			if len(f.Names) == 0 {
				name := fresh()
				at := p.pos(f.Type.Pos())
				edits = append(edits, edit{at, at, name + " "})
				names = append(names, name)
			}
			for _, id := range f.Names {
				name := id.Name
				if name == "_" {
					name = fresh()
					edits = append(edits, edit{p.pos(id.Pos()), p.pos(id.End()), name})
				}
				names = append(names, name)
			}
			if _, ok := f.Type.(*ast.Ellipsis); ok {
				names[len(names)-1] += "..."
			}
		}
		return names
	}
	recv := fields(p.decl.Recv)
	args = fields(p.decl.Type.Params)
	return edits, func(id int) string {
		s := fmt.Sprintf("%s__m%d", p.decl.Name.Name, id)
		if len(recv) > 0 {
			s = recv[0] + "." + s
		}
		if tp := p.decl.Type.TypeParams; tp != nil {
			var names []string
			for _, f := range tp.List {
				for _, id := range f.Names {
					names = append(names, id.Name)
				}
			}
			s += "[" + strings.Join(names, ", ") + "]"
		}
		return s + "(" + strings.Join(args, ", ") + ")"
	}
}

// binary returns the test binary of a folder that contains mutant m, and the file of its overlay. A constant needs a
// build of its own.
func (b *build) binary(ctx context.Context, dir string, m *mutant) (bin, overlay string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	overlay = filepath.Join(b.dir, "overlay.json")
	key := dir
	if m != nil && m.place.constant {
		key += " " + strconv.Itoa(m.id)
		if m.broken {
			return "", "", errBroken
		}
	}
	if bin, ok := b.tests[key]; ok {
		if m != nil && m.place.constant {
			overlay = filepath.Join(b.dir, fmt.Sprintf("overlay%d.json", m.id))
		}
		if bin == "" {
			return "", "", errBroken
		}
		return bin, overlay, nil
	}
	if m != nil && m.place.constant {
		made := map[string]string{}
		maps.Copy(made, b.made)
		text := string(m.place.text[:m.from]) + m.text + string(m.place.text[m.to:])
		name := filepath.Join(b.dir, fmt.Sprintf("constant%d.go", m.id))
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			return "", "", err
		}
		made[m.place.file] = name
		if err := b.write(made, fmt.Sprintf("overlay%d.json", m.id)); err != nil {
			return "", "", err
		}
		overlay = b.file
	}
	bin = filepath.Join(b.dir, strings.ReplaceAll(key, "/", "_")+".test")
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-overlay="+overlay, "-o", bin, "./"+dir)
	cmd.Dir = b.root
	if out, err := cmd.CombinedOutput(); err != nil {
		b.tests[key] = ""
		if m != nil && m.place.constant {
			m.broken = true
			return "", "", errBroken
		}
		return "", "", fmt.Errorf("building the tests of %s: %w\n%s", dir, err, out)
	}
	b.tests[key] = bin
	return bin, overlay, nil
}
