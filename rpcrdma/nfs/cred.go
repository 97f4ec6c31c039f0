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

// credOf is the caller of AUTH_SYS; that of AUTH_NONE is nobody. ok false: it is of
// another flavor, which is not served, or cannot be parsed.
func (s *Server) credOf(a rpc.Auth) (c cred, ok bool) {
	if a.Flavor == rpc.AuthNone {
		return cred{uid: nobody, gid: nobody}, true
	}
	sys, ok := rpc.ParseSys(a)
	if !ok {
		return c, false
	}
	c = cred{sys.UID, sys.GID, sys.GIDs}
	if s.cfg.RootSquash {
		if c.uid == 0 {
			return cred{uid: nobody, gid: nobody}, true
		}
		if c.gid == 0 {
			c.gid = nobody
		}
		c.gids = slices.DeleteFunc(c.gids, func(g uint32) bool { return g == 0 })
	}
	return c, true
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

// capabilities are those of a thread that acts for root, and for others.
type capabilities struct{ root, others [2]unix.CapUserData }

// Those that others have not: what setfsuid(2) takes away, and CAP_SYS_RESOURCE,
// which would let them have blocks kept for root, and pass by their quota.
var notOthers = []uint{
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_LINUX_IMMUTABLE,
	unix.CAP_MKNOD, unix.CAP_MAC_OVERRIDE, unix.CAP_SYS_RESOURCE,
}

func capabilitiesOf() (c capabilities, err error) {
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &c.root[0]); err != nil {
		return c, err
	}
	c.others = c.root
	for _, n := range notOthers {
		c.others[n/32].Effective &^= 1 << (n % 32)
	}
	return c, nil
}

// setCaps sets the capabilities of this thread.
func setCaps(c *[2]unix.CapUserData) bool {
	return unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &c[0]) == nil
}

// as runs f with the caller's identity for file systems, on a thread of its
// own: the kernel checks the rights and quotas, and what is made is the caller's.
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
	if c.uid != 0 && !setCaps(&s.caps.others) {
		keep = !setGroups(s.groups)
		return unix.EPERM
	}
	_, _ = unix.SetfsgidRetGid(int(c.gid))
	_, _ = unix.SetfsuidRetUid(int(c.uid))
	defer func() {
		_, _ = unix.SetfsuidRetUid(0)
		_, _ = unix.SetfsgidRetGid(0)
		keep = c.uid != 0 && !setCaps(&s.caps.root)
		keep = !setGroups(s.groups) || keep
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
