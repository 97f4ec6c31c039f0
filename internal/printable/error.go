package printable

import (
	"errors"
	"regexp"
	"strings"
	"syscall"
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

// Reason returns the system's error number in err, or err if it has none. It drops the words of packages net and os,
// which name the address or the file again.
func Reason(err error) error {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	return err
}
