package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Calls whose text a user sees first, and the place of the text among their arguments.
var spoken = map[string]int{
	"Warn": 0, "Error": 0, // of a logger
	"exitErr": 1, "configErr": 0,
}

// Codes of ctrl.errorf that a user can do something about.
var actionable = []string{"portInUse", "badAddress", "permission", "quota"}

// cut separates the clauses of a format: verbs and punctuation.
var cut = regexp.MustCompile(`%[-+# 0]*[0-9.]*[a-zA-Z]|[:;()]`)

// clauses returns the parts of a format that stand in every message, the
// longest first.
func clauses(format string) []string {
	var out []string
	for _, f := range cut.Split(format, -1) {
		if f = strings.Trim(f, ` ,"`); len(f) >= 10 {
			out = append(out, f)
		}
	}
	slices.SortFunc(out, func(a, b string) int { return len(b) - len(a) })
	return out
}

// TestMessages checks that docs/troubleshooting.md quotes a clause of each warning of the
// daemon, of each reason for which it does not start, and of each refusal that a user can
// act on.
func TestMessages(t *testing.T) {
	page, err := os.ReadFile("../troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(page)), " ")
	seen := 0
	for _, folder := range []string{"../../cmd/iwarpd", "../../ctrl"} {
		files, err := filepath.Glob(folder + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				format, ok := message(n)
				if !ok {
					return true
				}
				seen++
				parts := clauses(format)
				if len(parts) > 0 && !slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(text, p) }) {
					t.Errorf("%s: docs/troubleshooting.md does not know %q: quote one of %q", filepath.Base(name), format, parts)
				}
				return true
			})
		}
	}
	if seen < 40 {
		t.Errorf("%d messages found: the test looks in the wrong place", seen)
	}
}

// variable matches what differs from message to message in a heading.
var variable = regexp.MustCompile(`…( (descriptors|mappings) )?|[0-9]+`)

// symptoms are the headings of the page that are not messages.
var symptoms = []string{"A value is refused", "An unmodified RDMA program finds no device"}

// TestHeadings checks the other direction: each message that is a heading of the page has a
// clause that some program still prints.
func TestHeadings(t *testing.T) {
	page, err := os.ReadFile("../troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	printed := literals(t, "../..")
	for _, h := range regexp.MustCompile("(?m)^### (.*)$").FindAllStringSubmatch(string(page), -1) {
		for part := range strings.SplitSeq(h[1], " · ") {
			parts := clauses(variable.ReplaceAllString(part, ":"))
			known := func(p string) bool { return strings.Contains(printed, p) }
			if len(parts) > 0 && !slices.Contains(symptoms, part) && !slices.ContainsFunc(parts, known) {
				t.Errorf("no program prints any of %q, which docs/troubleshooting.md has as a heading", parts)
			}
		}
	}
}

// literals returns the string literals of all Go files below root, without tests, a line each.
func literals(t *testing.T, root string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			s, ok := quoted(e)
			if ok {
				all.WriteString(s + "\n")
			}
			return !ok
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// quoted returns the text of a string literal, or of a sum with such, in which ":" stands for what is no literal.
func quoted(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return s, err == nil && e.Kind == token.STRING
	case *ast.BinaryExpr:
		x, isX := quoted(e.X)
		y, isY := quoted(e.Y)
		if e.Op == token.ADD && (isX || isY) {
			return x + y, true
		}
	}
	return ":", false
}

// message returns the text of a call that speaks to a user.
func message(n ast.Node) (string, bool) {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return "", false
	}
	var name string
	switch fun := call.Fun.(type) {
	case *ast.Ident:
		name = fun.Name
	case *ast.SelectorExpr:
		name = fun.Sel.Name
	}
	at, ok := spoken[name]
	if name == "errorf" && len(call.Args) > 1 {
		code, isName := call.Args[0].(*ast.Ident)
		at, ok = 1, isName && slices.Contains(actionable, code.Name)
	}
	if !ok || len(call.Args) <= at {
		return "", false
	}
	return quoted(call.Args[at])
}

// mistakes are the commonest ones: a clause of the message that follows, and the heading of its
// section.
var mistakes = []struct{ what, clause, heading string }{
	{"no interface named", "name one with --interface IF", "no interface: name one with"},
	{"wrong interface", "give one of %s with --interface", "no interface \"…\": give one of"},
	{"interface down", "is down: ip link set dev", "is down: ip link set dev"},
	{"interface without address", "has no IP address: ip address add", "has no IP address"},
	{"loopback", "is loopback", "interface … is loopback"},
	{"tunnel of layer 3", "carries no Ethernet frames", "carries no Ethernet frames"},
	{"no root", "capability missing", "capability missing"},
	{"no such queue", "has no queue", "has no queue"},
	{"no such CPU", "does not exist, is offline, or is not allowed for this process", "cpus: …"},
	{"second daemon on the interface", "is served by another iwarpd", "is served by another iwarpd"},
	{"second daemon on the socket", "cannot make the socket", "cannot make the socket"},
	{"another XDP program", "has another XDP program", "has another XDP program"},
	{"misspelt key", "did you mean", "unknown key"},
	{"not YAML", "not YAML", "not YAML"},
	{"wrong value", "must be one of", "A value is refused"},
	{"too few descriptors", "this process may have at most", "open files"},
	{"daemon not running", "start it, or name its socket with --socket", "no iwarpd at"},
	{"not in the socket's group", "join the group that owns it", "no permission to use"},
	{"address of another host", "is not an address of the interface", "is not an address of the interface"},
	{"port taken by a client", "is in use by another client of iwarpd", "is in use by another client of iwarpd"},
	{"port taken by a program", "is in use by another program: choose another port", "is in use by another program"},
	{"port below 1024", "are for root, and for users with a rule that lists them", "ports below 1024"},
	{"quota", "its limit is", "its limit is"},
	{"peer does not listen", "nothing listens on that port", "connection refused"},
	{"peer does not exist", "no answer to ARP or neighbour discovery", "no answer to ARP"},
	{"no route", "no route", "no route"},
	{"MTU mismatch", "do not pass: set the same MTU on both sides and on every switch between", "packets of the MTU, … bytes, do not pass"},
	{"no answer to large packets", "packets of %d bytes get no answer", "bytes get no answer"},
	{"wrong checksum offload", "their checksums are wrong", "their checksums are wrong"},
	{"frames on a queue not served", "by a queue of the interface that iwarpd does not serve", "their frames come by a queue"},
}

// TestMistakes checks that the message of each common mistake is in the programs, and that the
// section of docs/troubleshooting.md whose heading it leads to quotes it.
func TestMistakes(t *testing.T) {
	page, err := os.ReadFile("../troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	var source strings.Builder
	for _, folder := range []string{"cmd/iwarpd", "cmd/iwarpctl", "ctrl", "ctrl/hostnet", "client", "dataplane/ifqueue", "bpf"} {
		source.WriteString(literals(t, "../../"+folder))
	}
	sections := strings.Split(string(page), "\n### ")[1:]
	for _, m := range mistakes {
		if !strings.Contains(source.String(), m.clause) {
			t.Errorf("%s: no program prints %q", m.what, m.clause)
		}
		i := slices.IndexFunc(sections, func(s string) bool {
			heading, _, _ := strings.Cut(s, "\n")
			return strings.Contains(heading, m.heading)
		})
		if i < 0 {
			t.Errorf("%s: no section %q", m.what, m.heading)
			continue
		}
		section := strings.Join(strings.Fields(sections[i]), " ")
		for _, p := range clauses(m.clause) {
			if !strings.Contains(section, p) {
				t.Errorf("%s: the section %q does not quote %q", m.what, m.heading, p)
			}
		}
	}
}
