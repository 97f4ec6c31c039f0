package nfs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// mounts is the MOUNT program, versions 1 and 3 (RFC 1813 appendix I).
type mounts struct {
	s *Server

	mu   sync.Mutex
	list []mountEntry // the latest last
}

type mountEntry struct{ host, dir string }

// size returns the bytes of an entry in the reply to DUMP.
func (e *mountEntry) size() int { return 12 + rpc.Pad(len(e.host)) + rpc.Pad(len(e.dir)) }

// maxMounts bounds the bytes of the entries kept for DUMP: a client may have hundreds of short calls in progress, and
// leave all replies unread. The latest are kept, since clients that are gone leave theirs behind.
const maxMounts = 32 << 10

// Status codes of MOUNT (RFC 1813 section 5.1.5).
const (
	mountOK          = 0
	mountNoEnt       = 2
	mountIO          = 5
	mountAcces       = 13
	mountNotDir      = 20
	mountInval       = 22
	mountNameTooLong = 63
	mountServerFault = 10006
)

// maxDirpath is MNTPATHLEN.
const maxDirpath = 1024

// MountProgram returns the MOUNT program for an rpc.Server. It is decoded by hand: the generated code takes
// only ASCII for a path, but Linux takes any bytes.
func (s *Server) MountProgram() rpc.Program {
	m := &mounts{s: s}
	return rpc.Program{
		Low: 1, High: 3,
		Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
			c, ok := s.credOf(r.Cred)
			switch {
			case !ok:
				return rpc.AuthError
			case r.Vers == 2:
				return rpc.ProgMismatch
			}
			return m.serve(&c, r)
		},
		Items: func(uint32, uint32) bool { return false }, // RFC 8267 section 5
	}
}

// serve executes a call. All procedures but MNT are the same in both versions.
func (m *mounts) serve(c *cred, r *rpc.Request) rpc.Status {
	switch r.Proc {
	case 0: // NULL
	case 1: // MNT
		dir := r.Args.String(maxDirpath)
		if r.Args.Err() != nil {
			return rpc.GarbageArgs
		}
		if r.Vers == 1 { // the handle would be for version 2 of NFS, which is not supported
			r.Reply.U32(mountAcces)
			break
		}
		fh, err := m.mount(c, r.Peer, dir)
		if err != nil {
			r.Reply.U32(mountStatus(err))
			break
		}
		r.Reply.U32(mountOK)
		r.Reply.Opaque(fh)
		r.Reply.U32(2, rpc.AuthSys, rpc.AuthNone)
	case 2: // DUMP
		m.dump(r.Reply)
	case 3: // UMNT
		dir := r.Args.String(maxDirpath)
		if r.Args.Err() != nil {
			return rpc.GarbageArgs
		}
		m.forget(r.Peer, func(e mountEntry) bool { return e.dir == dir })
	case 4: // UMNTALL
		m.forget(r.Peer, func(mountEntry) bool { return true })
	case 5: // EXPORT
		r.Reply.U32(1)
		r.Reply.String(m.s.tree.path)
		r.Reply.U32(0, 0) // no groups, and no further entry
	default:
		return rpc.ProcUnavail
	}
	return rpc.Success
}

// mount returns the handle of a directory and records the caller. The path is relative to the
// export, starting with "/", or starts with the export's own path.
func (m *mounts) mount(c *cred, host, dir string) ([]byte, error) {
	p := path.Clean("/" + dir)
	if own := m.s.tree.path; p == own || strings.HasPrefix(p, own+"/") {
		p = p[len(own):]
	}
	fh := m.s.tree.fh
	if p = strings.TrimPrefix(p, "/"); p != "" {
		var err error
		if fh, err = m.s.below(c, p); err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = slices.DeleteFunc(m.list, func(e mountEntry) bool { return e == mountEntry{host, dir} })
	m.list = append(m.list, mountEntry{host, dir})
	size, first := 0, len(m.list)
	for first > 0 && size+m.list[first-1].size() <= maxMounts {
		first--
		size += m.list[first].size()
	}
	m.list = slices.Delete(m.list, 0, first)
	return fh, nil
}

// below returns the handle of a directory of the export if c may access it. p is clean and relative
// to the export.
func (s *Server) below(c *cred, p string) (fh []byte, err error) {
	fd := -1
	if err = s.as(c, func() (err error) { fd, err = at(s.tree.root, p); return err }); err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, unix.ENOTDIR
	}
	if err = s.tree.learnPath(p); err != nil {
		return nil, err
	}
	return s.tree.handle(fd, "")
}

// mountStatus converts an error to a MOUNT status.
func mountStatus(err error) uint32 {
	switch {
	case errors.Is(err, unix.ENOENT):
		return mountNoEnt
	case errors.Is(err, unix.ENOTDIR):
		return mountNotDir
	case errors.Is(err, unix.ENAMETOOLONG):
		return mountNameTooLong
	case errors.Is(err, unix.EINVAL):
		return mountInval
	case errors.Is(err, unix.EIO):
		return mountIO
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return mountServerFault
	}
	return mountAcces // including paths that lead out by a symbolic link or to another file system
}

// forget removes the entries of host for which f returns true.
func (m *mounts) forget(host string, f func(mountEntry) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = slices.DeleteFunc(m.list, func(e mountEntry) bool { return e.host == host && f(e) })
}

// dump writes all entries.
func (m *mounts) dump(w *rpc.Writer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.list {
		w.U32(1)
		w.String(e.host)
		w.String(e.dir)
	}
	w.U32(0)
}

// Mapping is an entry of the portmapper: a program and its TCP or UDP port.
type Mapping struct {
	Prog, Vers, Port uint32
	UDP              bool
}

// protocol returns the IP protocol number.
func (m *Mapping) protocol() uint32 {
	if m.UDP {
		return unix.IPPROTO_UDP
	}
	return unix.IPPROTO_TCP
}

// Portmap returns a portmapper with fixed entries (RFC 1833). It supports NULL, GETPORT of version 2, GETADDR of
// versions 3 and 4, which clients use over IPv6, and, except over UDP, DUMP: a forged call would make it
// send somebody a reply of twelve times its length.
func Portmap(entries []Mapping, overUDP bool) rpc.Program {
	find := func(prog, vers, proto uint32) (port uint32) {
		for _, e := range entries {
			// Another version returns the port too: the program itself reports its versions.
			if e.Prog == prog && proto == e.protocol() && (e.Vers == vers || port == 0) {
				port = e.Port
			}
		}
		return port
	}
	return rpc.Program{Low: 2, High: 4, Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
		const getPort, dump, limit = 3, 4, 1024
		tcp, udp, anyHost := "tcp", "udp", "0.0.0.0"
		if strings.Contains(r.Peer, ":") {
			tcp, udp, anyHost = "tcp6", "udp6", "::"
		}
		switch {
		case r.Proc == 0:
		case r.Proc == getPort && r.Vers == 2:
			prog, vers, proto := r.Args.U32(), r.Args.U32(), r.Args.U32()
			r.Args.U32()
			if r.Args.Err() != nil {
				return rpc.GarbageArgs
			}
			r.Reply.U32(find(prog, vers, proto))
		case r.Proc == getPort: // GETADDR
			prog, vers, netid, addr := r.Args.U32(), r.Args.U32(), r.Args.String(limit), r.Args.String(limit)
			r.Args.String(limit) // the owner
			if r.Args.Err() != nil {
				return rpc.GarbageArgs
			}
			port := find(prog, vers, map[string]uint32{tcp: unix.IPPROTO_TCP, udp: unix.IPPROTO_UDP}[netid])
			host, ok := universalHost(addr) // the client may name the address of this host that it uses
			switch {
			case port == 0:
				r.Reply.String("")
			case ok:
				r.Reply.String(universal(host, port))
			default:
				r.Reply.String(universal(anyHost, port))
			}
		case r.Proc == dump && !overUDP:
			for _, e := range entries {
				r.Reply.U32(1, e.Prog, e.Vers)
				if r.Vers == 2 {
					r.Reply.U32(e.protocol(), e.Port)
					continue
				}
				netid := tcp
				if e.UDP {
					netid = udp
				}
				r.Reply.String(netid)
				r.Reply.String(universal(anyHost, e.Port))
				r.Reply.String("superuser") // the owner, in rpcbind's words
			}
			r.Reply.U32(0)
		default:
			return rpc.ProcUnavail
		}
		return rpc.Success
	}}
}

// universal returns a universal address (RFC 5665 section 5.2.3): the host, then the two bytes of
// the port in decimal.
func universal(host string, port uint32) string {
	return fmt.Sprintf("%s.%d.%d", host, port>>8, port&0xff)
}

// universalHost returns the host of a universal address.
func universalHost(s string) (host string, ok bool) {
	for range 2 {
		i := strings.LastIndexByte(s, '.')
		if i < 0 {
			return "", false
		}
		s = s[:i]
	}
	_, err := netip.ParseAddr(s)
	return s, err == nil
}
