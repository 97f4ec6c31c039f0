package arch

import (
	"errors"
	"go/ast"
	"go/token"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// protocols are the packages whose names tell a user which layer failed.
var protocols = []string{"tcp", "sctp", "mpa", "ddp", "rdmap", "rpcrdma", "rpc", "nfs"}

// TestErrorPrefixes checks that errors for users, which printable.Error makes, have no names of packages but those of
// protocols.
func TestErrorPrefixes(t *testing.T) {
	seen := make(map[string]bool)
	for _, f := range parse(t) {
		if f.test || anyUnder(f.folder, []string{"client/examples", "cmd", "docs", "deploy", "internal", "test", "tools"}) {
			continue
		}
		for _, name := range []string{f.syntax.Name.Name, path.Base(f.folder)} {
			ast.Inspect(f.syntax, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				text, err := strconv.Unquote(lit.Value)
				if err != nil || !strings.HasPrefix(text, name+": ") || slices.Contains(protocols, name) || seen[name] {
					return true
				}
				seen[name] = true
				if got := printable.Error(errors.New(name + ": x")); got != "x" {
					t.Errorf("%v: a user would see %q: add the package to the list of printable.Error", f.fset.Position(lit.Pos()), got)
				}
				return true
			})
		}
	}
	if len(seen) < 10 {
		t.Errorf("errors of %d packages found: the test looks in the wrong place", len(seen))
	}
	for _, p := range protocols {
		if text := p + ": x"; printable.Error(errors.New(text)) != text {
			t.Errorf("a user would not see %q", text)
		}
	}
}
