package printable

import (
	"regexp"
	"strings"
)

// packages are the Go packages whose names errors begin with and that mean nothing to a user. The names of
// protocols (mpa, tcp, ...) are not among them: they say which layer failed. A test of internal/arch finds
// packages that are missing.
var packages = []string{
	"bpf", "ctrl", "dataplane", "embed", "far", "hostcheck", "hostnet", "ifqueue", "iwarp", "link", "memconn",
	"pkt", "rping", "seqpacket", "shm", "verbs", "xsk",
}

var prefixes = regexp.MustCompile(`(^|[:;,\n] |\(|\n)(?:(?:` + strings.Join(packages, "|") + `): )+`)

// Error returns the text of err for a user: without the names of Go packages that its parts begin with.
func Error(err error) string { return prefixes.ReplaceAllString(err.Error(), "$1") }
