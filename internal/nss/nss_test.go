package nss

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestNameService checks that a static binary finds names that exist only in a name
// service such as LDAP, and that an unknown name and a failing name service are errors.
func TestNameService(t *testing.T) {
	dir := t.TempDir()
	script := `#!/bin/sh
case "$1 $2" in
"group ldapgroup") echo "ldapgroup:*:70001:alice,bob" ;;
"passwd ldapuser") echo "ldapuser:*:70002:70001::/home/ldapuser:/bin/sh" ;;
"group broken") echo "server down" >&2; exit 3 ;;
"group odd") echo "other:*:1:" ;;
"group much") echo "much:*:4294967296:" ;;
*) exit 2 ;;
esac
`
	testenv.WriteFile(t, filepath.Join(dir, "getent"), []byte(script), 0o755)
	t.Setenv("PATH", dir)
	for _, tt := range []struct {
		look    func(string) (uint32, error)
		name    string
		want    uint32
		ok      bool
		unknown bool
	}{
		{GID, "ldapgroup", 70001, true, false},
		{UID, "ldapuser", 70002, true, false},
		{GID, "root", 0, true, false},
		{UID, "root", 0, true, false},
		{GID, "4294967294", 4294967294, true, false},
		{UID, "ldapgroup", 0, false, true},
		{GID, "broken", 0, false, false},
		{GID, "odd", 0, false, false},
		{GID, "much", 0, false, false},
	} {
		got, err := tt.look(tt.name)
		_, failed := errors.AsType[*LookupError](err)
		if (err == nil) != tt.ok || got != tt.want || errors.Is(err, ErrUnknown) != tt.unknown || failed == tt.ok {
			t.Errorf("%q: %d, %v; want %d, found %v, unknown %v", tt.name, got, err, tt.want, tt.ok, tt.unknown)
		}
	}
	t.Setenv("PATH", t.TempDir()) // no getent
	if _, err := GID("ldapgroup"); !errors.Is(err, ErrUnknown) {
		t.Errorf("without getent: %v", err)
	}
}

// TestImpossible checks that text that cannot be a name is not looked up: a later try would not find it either.
func TestImpossible(t *testing.T) {
	for _, name := range []string{"", "-s", "a:b", "a\nb", "a\x00b", "4294967295", "4294967296"} {
		for _, look := range []func(string) (uint32, error){UID, GID} {
			if _, err := look(name); err == nil || errors.As(err, new(*LookupError)) {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
}
