package main

import (
	"go/ast"
	"go/parser"
	"go/token"
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
	lit, ok := call.Args[at].(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}
