package nfs

import (
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

const nobody = 65534

// cred is whom a request is done for.
type cred struct {
	uid, gid uint32
	gids     []uint32
}

// credOf is the caller of AUTH_SYS; all others are nobody.
func (s *Server) credOf(a rpc.Auth) cred {
	sys, ok := rpc.ParseSys(a)
	if !ok {
		return cred{uid: nobody, gid: nobody}
	}
	c := cred{sys.UID, sys.GID, sys.GIDs}
	if s.cfg.RootSquash {
		if c.uid == 0 {
			return cred{uid: nobody, gid: nobody}
		}
		if c.gid == 0 {
			c.gid = nobody
		}
		c.gids = slices.DeleteFunc(c.gids, func(g uint32) bool { return g == 0 })
	}
	return c
}

// Rights as in a mode's groups of three bits.
const (
	mayRead  = 4
	mayWrite = 2
	mayExec  = 1
)

// may reports whether c may do want with o, which was opened by its handle: the
// kernel is asked, for there may be more to it than the mode.
func (s *Server) may(c *cred, o *object, want uint32) bool {
	if c.uid == 0 || !s.root {
		return c.may(&o.st, want)
	}
	return s.as(c, func() error { return unix.Faccessat2(o.fd, "", want, unix.AT_EMPTY_PATH|unix.AT_EACCESS) }) == nil
}

// may holds want against the mode of a file.
func (c *cred) may(st *unix.Stat_t, want uint32) bool {
	if c.uid == 0 {
		return want&mayExec == 0 || st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Mode&0o111 != 0
	}
	bits := st.Mode
	switch {
	case c.uid == st.Uid:
		bits >>= 6
	case c.gid == st.Gid || slices.Contains(c.gids, st.Gid):
		bits >>= 3
	}
	return bits&want == want
}

// as runs f with the caller's identity for file systems, on a thread of its
// own: the kernel checks the rights, and what is made is the caller's.
func (s *Server) as(c *cred, f func() error) error {
	if !s.root || c.uid == 0 && c.gid == 0 {
		return f()
	}
	runtime.LockOSThread()
	keep := false
	defer func() {
		if !keep { // else the thread, whose identity is in doubt, ends with its goroutine
			runtime.UnlockOSThread()
		}
	}()
	if !setGroups(c.gids) {
		return unix.EPERM
	}
	_, _ = unix.SetfsgidRetGid(int(c.gid))
	_, _ = unix.SetfsuidRetUid(int(c.uid))
	defer func() {
		_, _ = unix.SetfsuidRetUid(0)
		_, _ = unix.SetfsgidRetGid(0)
		if !setGroups(s.groups) {
			keep = true
		}
	}()
	// An id that is none (-1, or without a place in the user namespace) is not taken,
	// and the thread keeps what it had.
	if u, _ := unix.SetfsuidRetUid(-1); u != int(c.uid) {
		return unix.EPERM
	}
	if g, _ := unix.SetfsgidRetGid(-1); g != int(c.gid) {
		return unix.EPERM
	}
	return f()
}

// setGroups sets the groups of this thread; package syscall's would set those
// of all.
func setGroups(g []uint32) bool {
	var p unsafe.Pointer
	if len(g) > 0 {
		p = unsafe.Pointer(&g[0])
	}
	_, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(g)), uintptr(p), 0)
	return e == 0
}
