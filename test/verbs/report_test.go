package verbs

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
)

// A report collects the results of rows for the file that VERBS_TABLE names, as Markdown.
type report struct {
	mu   sync.Mutex
	file *os.File
}

// unfinished is the reason of a row whose test stopped early. Its log says more.
const unfinished = "the programs did not get to their end"

// add adds a row and the kind of its peers. fails is the reason why it must fail, and why is
// how it differed from the expectation; both are empty for a row that works.
func (p *report) add(t *testing.T, r row, peers, fails, why string) {
	path := os.Getenv("VERBS_TABLE")
	if path == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.file == nil {
		f, err := os.Create(path)
		if err != nil {
			t.Error(err)
			return
		}
		p.file = f
		fmt.Fprint(f, "| package | programs | how | result |\n| --- | --- | --- | --- |\n")
	}
	result := "pass"
	switch {
	case t.Skipped():
		result = "not run: see the log"
	case why != "":
		result = "FAIL: " + firstLine(why)
	case fails != "":
		result = "cannot work: " + fails
	}
	fmt.Fprintf(p.file, "| %s | `%s` | %s | %s |\n", r.group, r.name, peers, result)
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return strings.ReplaceAll(s, "|", `\|`)
}
