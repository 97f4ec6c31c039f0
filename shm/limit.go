package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Limit adds advice to err if it reports that a limit of the process or of the host was reached.
func Limit(err error) error {
	switch {
	case errors.Is(err, unix.EMFILE):
		return fmt.Errorf("%w: raise RLIMIT_NOFILE (LimitNOFILE of a service, ulimit -n)", err)
	case errors.Is(err, unix.ENFILE):
		return fmt.Errorf("%w: raise the sysctl fs.file-max", err)
	}
	return err
}

// mapLimit is Limit for memory of a memfd. mmap returns the same error when memory or mappings run
// out, and a memfd is subject to the limit of the size of files.
func mapLimit(err error) error {
	switch {
	case errors.Is(err, unix.EFBIG):
		return fmt.Errorf("%w: raise RLIMIT_FSIZE (LimitFSIZE of a service, ulimit -f)", err)
	case errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: too many mappings (raise the sysctl vm.max_map_count), or out of memory", err)
	}
	return err
}
