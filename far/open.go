package far

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrMemory is returned for a descriptor that Open does not accept.
var ErrMemory = errors.New("far: not the client's /proc/self/mem")

// Open accepts fd if it is the /proc/self/mem of the process pid, open for reading and writing.
// If pid is 0, it may be that of any process: a client in another PID namespace has other numbers
// in its procfs. On success Open owns fd. It may block for as long as the owner of fd wants.
//
// The kernel determines which memory it is when the file is opened. Open detects mistakes, not
// attacks: a client with such a descriptor of another process can already access that process's
// memory.
func Open(fd, pid int) (*Memory, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("far: fstatfs: %w", err)
	}
	if fs.Type != unix.PROC_SUPER_MAGIC {
		return nil, fmt.Errorf("%w: not a file of procfs", ErrMemory)
	}
	name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return nil, fmt.Errorf("far: %w", err)
	}
	owner, err := ownerOf(name)
	if err != nil {
		return nil, err
	}
	if pid != 0 && owner != pid {
		return nil, fmt.Errorf("%w: the memory of process %d, and the client is process %d", ErrMemory, owner, pid)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, fmt.Errorf("far: fcntl: %w", err)
	}
	if flags&unix.O_ACCMODE != unix.O_RDWR {
		return nil, fmt.Errorf("%w: not open for reading and writing", ErrMemory)
	}
	// A read returns nothing if the process has ended. Otherwise it returns a byte or EIO.
	var b [1]byte
	if n, err := unix.Pread(fd, b[:], 0); n == 0 && err == nil {
		return nil, fmt.Errorf("%w: %w", ErrMemory, errGone)
	}
	return &Memory{fd}, nil
}

// ownerOf returns the process of a memory file of procfs, by the file's name there: PID/mem or
// PID/task/TID/mem.
func ownerOf(name string) (int, error) {
	part := strings.Split(name, "/")
	n := len(part)
	if n >= 4 && part[n-1] == "mem" && part[n-3] == "task" {
		part, n = append(part[:n-3:n-3], "mem"), n-2
	}
	if n >= 2 && part[n-1] == "mem" {
		if pid, err := strconv.Atoi(part[n-2]); err == nil {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("%w: a file named %q", ErrMemory, name)
}
