package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Limit adds to err what to do about it, where it says that a limit of the
// process or of the host was hit.
func Limit(err error) error {
	switch {
	case errors.Is(err, unix.EMFILE):
		return fmt.Errorf("%w: raise RLIMIT_NOFILE (LimitNOFILE of a service, ulimit -n)", err)
	case errors.Is(err, unix.ENFILE):
		return fmt.Errorf("%w: raise the sysctl fs.file-max", err)
	}
	return err
}

// mapLimit is Limit for mmap, which has the same error for want of memory and of
// mappings.
func mapLimit(err error) error {
	if errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("%w: too many mappings (raise the sysctl vm.max_map_count), or out of memory", err)
	}
	return err
}
