package nfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/testenv"
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

// TestCapabilities: what is done for others than root is done without the rights
// to what is kept for root, and to pass by quotas; the thread has them again then.
func TestCapabilities(t *testing.T) {
	testenv.RequireRoot(t)
	s, err := NewServer(Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	effective := func() uint64 {
		c, err := capabilitiesOf()
		if err != nil {
			t.Fatal(err)
		}
		return uint64(c.root[1].Effective)<<32 | uint64(c.root[0].Effective)
	}
	all := effective()
	if all&(1<<unix.CAP_DAC_OVERRIDE) == 0 {
		t.Fatalf("root has %#x", all)
	}
	var none uint64
	for _, n := range notOthers {
		none |= 1 << n
	}
	for _, c := range []struct {
		cred cred
		want uint64
	}{{cred{uid: 1000, gid: 100}, all &^ none}, {cred{uid: 1000}, all &^ none}, {cred{gid: 100}, all}, {cred{}, all}} {
		var got uint64
		if err := s.as(&c.cred, func() error { got = effective(); return nil }); err != nil || got != c.want {
			t.Errorf("%+v: %#x, not %#x, %v", c.cred, got, c.want, err)
		}
		if got := effective(); got != all {
			t.Errorf("%+v: %#x afterwards, not %#x", c.cred, got, all)
		}
	}
}
