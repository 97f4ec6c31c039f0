package verbs

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

var update = flag.Bool("update", false, "write the table of docs/verbs.md")

const (
	page  = "../../docs/verbs.md"
	begin = "<!-- table: go test ./test/verbs -run TestTable -update -->\n"
	end   = "<!-- end of table -->\n"
)

// table is what rows says, for people.
func table() string {
	var b strings.Builder
	b.WriteString("| package | programs | two daemons | server on siw | client on siw |\n| --- | --- | --- | --- | --- |\n")
	for _, r := range rows() {
		server, client := "", "" // not tried
		if r.siw {
			server, client = result(r.serverFails), result(r.clientFails)
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s | %s |\n", r.group, r.name, result(r.fails), server, client)
	}
	return b.String()
}

// result says how programs end. fails is why they fail, if they do.
func result(fails string) string {
	if fails == "" {
		return "works"
	}
	return "fails: " + fails
}

// The table of the manual is that of the tests.
func TestTable(t *testing.T) {
	text := testenv.ReadFile(t, page)
	before, rest, ok := strings.Cut(string(text), begin)
	have, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no table", page)
	}
	if have == table() {
		return
	}
	if !*update {
		t.Fatalf("the table of %s is not that of the tests: run go test ./test/verbs -run TestTable -update", page)
	}
	testenv.WriteFile(t, page, []byte(before+begin+table()+end+after), 0o644)
}
