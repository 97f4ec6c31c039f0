package nfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// TestTreeKey: the key is the host's and the tree's, and cannot be computed where
// the host has no id.
func TestTreeKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "machine-id")
	var seen [][32]byte
	for _, c := range []struct {
		id   string // "": no file
		kept bool
	}{
		{"", false}, {"\n", false}, {"uninitialized\n", false}, {"0123456789abcdef", false}, {"0123456789abcdef0123456789abcdeg\n", false},
		{"0123456789abcdef0123456789abcdef\n", true}, {"0123456789abcdef0123456789abcde0", true},
	} {
		if c.id != "" {
			if err := os.WriteFile(file, []byte(c.id), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		one, kept := treeKey(&unix.Stat_t{Dev: 1, Ino: 2}, file)
		again, _ := treeKey(&unix.Stat_t{Dev: 1, Ino: 2}, file)
		other, _ := treeKey(&unix.Stat_t{Dev: 1, Ino: 3}, file)
		if kept != c.kept || (one == again) != kept || one == other || slices.Contains(seen, one) {
			t.Errorf("%q: kept %v, %x, %x, %x", c.id, kept, one, again, other)
		}
		seen = append(seen, one)
	}
}

// TestKeyWarning: who exports is told that handles will not last.
func TestKeyWarning(t *testing.T) {
	gone := errors.New("no daemon")
	for _, kept := range []bool{false, true} {
		var told []string
		x := &Export{
			Server: &Server{tree: &tree{kept: kept}}, Listen: "127.0.0.1:20049",
			Open: func(context.Context) (*iwarp.Device, error) { return nil, gone },
			Tell: func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) },
		}
		if err := x.Run(t.Context()); !errors.Is(err, gone) {
			t.Fatal(err)
		}
		if kept != (len(told) == 0) || !kept && !strings.Contains(told[0], machineID) {
			t.Errorf("kept %v: %q", kept, told)
		}
	}
}
