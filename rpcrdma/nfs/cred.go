package nfs

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

const nobody = 65534

// cred is the user on whose behalf a request is executed.
type cred struct {
	uid, gid uint32
	gids     []uint32
}

// credOf returns the caller: that of AUTH_SYS, or nobody for AUTH_NONE. A process that may not act
// on behalf of others acts for all callers as its own user. ok is false for other flavors and
// malformed credentials.
func (s *Server) credOf(a rpc.Auth) (c cred, ok bool) {
	c = cred{uid: nobody, gid: nobody}
	if a.Flavor != rpc.AuthNone {
		sys, ok := rpc.ParseSys(a)
		if !ok {
			return c, false
		}
		c = cred{sys.UID, sys.GID, sys.GIDs}
	}
	if !s.root {
		return cred{uint32(os.Geteuid()), uint32(os.Getegid()), s.groups}, true
	}
	if !s.cfg.NoRootSquash {
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

// actsAs describes, for the user, as whom the server executes requests.
func (s *Server) actsAs() string {
	switch {
	case !s.root:
		return fmt.Sprintf("all clients are user %d", os.Geteuid())
	case s.alone:
		return "the clients' root is root, and nobody else is served: that takes CAP_SETUID and CAP_SETGID"
	case s.cfg.NoRootSquash:
		return "the clients' root is root"
	}
	return "the clients' root is nobody"
}

// Rights, as in the three-bit groups of a mode.
const (
	mayRead  = 4
	mayWrite = 2
	mayExec  = 1
)

// rights returns those of the rights want that c has for o, which was opened by its handle. It asks the
// kernel, for root too, since access may depend on more than the mode.
func (s *Server) rights(c *cred, o *object, want uint32) (got uint32) {
	_ = s.as(c, func() error {
		for _, r := range []uint32{mayRead, mayWrite, mayExec} {
			if want&r != 0 && unix.Faccessat2(o.fd, "", r, unix.AT_EMPTY_PATH|unix.AT_EACCESS) == nil {
				got |= r
			}
		}
		return nil
	})
	return got
}

// may reports whether c has the rights want for o.
func (s *Server) may(c *cred, o *object, want uint32) bool { return s.rights(c, o, want) == want }

// capabilities are the capabilities of threads that act for root, and for other users.
type capabilities struct{ root, others [2]unix.CapUserData }

// Capabilities removed for other users: those that setfsuid(2) removes, and CAP_SYS_RESOURCE, which
// allows to use reserved blocks and to exceed quotas.
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

// as runs f with the caller's file system identity, on a separate thread: the kernel checks
// permissions and quotas, and the caller owns new objects.
func (s *Server) as(c *cred, f func() error) error {
	if !s.root || c.uid == 0 && c.gid == 0 {
		return f()
	}
	runtime.LockOSThread()
	keep := false
	defer func() {
		if !keep { // otherwise the thread, whose identity is uncertain, exits with its goroutine
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
	// The kernel ignores an invalid ID (-1, or one not mapped in the user namespace) and keeps
	// the old one.
	if u, _ := unix.SetfsuidRetUid(-1); u != int(c.uid) {
		return unix.EPERM
	}
	if g, _ := unix.SetfsgidRetGid(-1); g != int(c.gid) {
		return unix.EPERM
	}
	return f()
}

// setGroups sets the groups of this thread; package syscall would set those of all threads.
func setGroups(g []uint32) bool {
	var p unsafe.Pointer
	if len(g) > 0 {
		p = unsafe.Pointer(&g[0])
	}
	_, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(g)), uintptr(p), 0)
	return e == 0
}
