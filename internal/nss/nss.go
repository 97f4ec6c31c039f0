// Package nss looks up user and group IDs by the host's name service.
package nss

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"time"
)

// ErrUnknown reports a name that the host does not know.
var ErrUnknown = errors.New("not known on this host")

// errName reports text that no name service can know.
var errName = errors.New("is neither a name nor a number from 0 to 4294967294")

// A LookupError means that a user or group was not found. A later try may find it: a directory service may be late or not
// reachable. Text that cannot be a name is another error.
type LookupError struct {
	Name string
	Err  error // ErrUnknown, or why the name service failed
}

// Error implements error.
func (e *LookupError) Error() string { return fmt.Sprintf("%q: %v", e.Name, e.Err) }

// Unwrap returns the cause.
func (e *LookupError) Unwrap() error { return e.Err }

// timeout bounds a name service query, which may involve other hosts.
const timeout = 10 * time.Second

// UID returns the ID of a user, given by name or number.
func UID(name string) (uint32, error) {
	return lookup("passwd", name, func() (string, error) {
		u, err := user.Lookup(name)
		if err != nil {
			return "", err
		}
		return u.Uid, nil
	})
}

// GID returns the ID of a group, given by name or number.
func GID(name string) (uint32, error) {
	return lookup("group", name, func() (string, error) {
		g, err := user.LookupGroup(name)
		if err != nil {
			return "", err
		}
		return g.Gid, nil
	})
}

// lookup asks package os/user first and then getent(1), since os/user reads only /etc/passwd and
// /etc/group in a static binary.
func lookup(database, name string, local func() (string, error)) (uint32, error) {
	id := name
	if n, err := strconv.ParseUint(name, 10, 32); err != nil || n == math.MaxUint32 { // which chown(2) takes for no id
		if err == nil || errors.Is(err, strconv.ErrRange) || name == "" || strings.HasPrefix(name, "-") || strings.ContainsAny(name, ":\n\x00") {
			return 0, fmt.Errorf("%q: %w", name, errName)
		}
		if id, err = local(); err != nil {
			if id, err = getent(database, name); err != nil {
				return 0, &LookupError{name, err}
			}
		}
	}
	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		return 0, &LookupError{name, fmt.Errorf("has the number %q", id)}
	}
	return uint32(n), nil
}

// getent returns the third field of an entry of the name service.
func getent(database, name string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "getent", database, name).Output()
	var exit *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.As(err, &exit) && exit.ExitCode() == 2:
		return "", ErrUnknown
	case err != nil:
		return "", fmt.Errorf("getent %s: %w", database, err)
	}
	f := strings.Split(strings.TrimSpace(string(out)), ":")
	if len(f) < 3 || f[0] != name {
		return "", fmt.Errorf("getent %s: unexpected answer %q", database, out)
	}
	return f[2], nil
}
