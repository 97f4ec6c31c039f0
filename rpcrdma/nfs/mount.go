package nfs

import (
	"context"
	"errors"
	"path"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/buildbarn/go-xdr/pkg/protocols/mount"

	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/rpcgen"
)

// mounts is the MOUNT program, versions 1 and 3 (RFC 1813 appendix I).
type mounts struct {
	s *Server

	mu   sync.Mutex
	list map[mountEntry]struct{}
}

type mountEntry struct{ host, dir string }

// maxMounts bounds the entries kept for DUMP.
const maxMounts = 1024

// MountProgram returns the MOUNT program for an rpc.Server.
func (s *Server) MountProgram() rpc.Program {
	m := &mounts{s: s, list: make(map[mountEntry]struct{})}
	f := mount.NewMountProgramService(m)
	return rpc.Program{
		Low: 1, High: 3,
		Serve: func(ctx context.Context, r *rpc.Request) rpc.Status {
			c, ok := s.credOf(r.Cred)
			if !ok {
				return rpc.AuthError
			}
			return rpcgen.Serve(context.WithValue(ctx, mounterKey{}, &mounter{r.Peer, c}), f, r)
		},
		Items: func(uint32, uint32) bool { return false }, // RFC 8267 section 5
	}
}

// mounter is a caller of MOUNT.
type mounter struct {
	host string
	cred cred
}

type mounterKey struct{}

func mounterOf(ctx context.Context) *mounter { return ctx.Value(mounterKey{}).(*mounter) }

// mount returns the handle of a directory and records the caller. The path is relative to the
// export, starting with "/", or starts with the export's own path.
func (m *mounts) mount(ctx context.Context, dir string) ([]byte, error) {
	who := mounterOf(ctx)
	p := path.Clean("/" + dir)
	if own := m.s.tree.path; p == own || strings.HasPrefix(p, own+"/") {
		p = p[len(own):]
	}
	fh := m.s.tree.fh
	if p = strings.TrimPrefix(p, "/"); p != "" {
		var err error
		if fh, err = m.s.below(&who.cred, p); err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.list) < maxMounts {
		m.list[mountEntry{who.host, dir}] = struct{}{}
	}
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
func mountStatus(err error) mount.Mountstat3 {
	switch {
	case errors.Is(err, unix.ENOENT):
		return mount.MNT3ERR_NOENT
	case errors.Is(err, unix.ENOTDIR):
		return mount.MNT3ERR_NOTDIR
	case errors.Is(err, unix.ENAMETOOLONG):
		return mount.MNT3ERR_NAMETOOLONG
	case errors.Is(err, unix.EINVAL):
		return mount.MNT3ERR_INVAL
	case errors.Is(err, unix.EIO):
		return mount.MNT3ERR_IO
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return mount.MNT3ERR_SERVERFAULT
	}
	return mount.MNT3ERR_ACCES // including paths that lead out by a symbolic link or to another file system
}

func (m *mounts) forget(ctx context.Context, f func(mountEntry) bool) {
	host := mounterOf(ctx).host
	m.mu.Lock()
	defer m.mu.Unlock()
	for e := range m.list {
		if e.host == host && f(e) {
			delete(m.list, e)
		}
	}
}

func (m *mounts) dump() (l *mount.Mountbody) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for e := range m.list {
		l = &mount.Mountbody{MlHostname: e.host, MlDirectory: e.dir, MlNext: l}
	}
	return l
}

func (m *mounts) exports() *mount.Exportnode { return &mount.Exportnode{ExDir: m.s.tree.path} }

func (m *mounts) MountV1MountprocNull(context.Context) error { return nil }

// MountV1MountprocMnt fails: a handle would be for version 2 of NFS, which is not supported.
func (m *mounts) MountV1MountprocMnt(context.Context, string) (mount.Fhstatus, error) {
	return &mount.Fhstatus_default{Status: 13}, nil
}
func (m *mounts) MountV1MountprocDump(context.Context) (*mount.Mountbody, error) {
	return m.dump(), nil
}
func (m *mounts) MountV1MountprocUmnt(ctx context.Context, dir string) error {
	return m.MountV3Mountproc3Umnt(ctx, dir)
}
func (m *mounts) MountV1MountprocUmntall(ctx context.Context) error {
	return m.MountV3Mountproc3Umntall(ctx)
}
func (m *mounts) MountV1MountprocExport(context.Context) (*mount.Exportnode, error) {
	return m.exports(), nil
}
func (m *mounts) MountV3Mountproc3Null(context.Context) error { return nil }

func (m *mounts) MountV3Mountproc3Mnt(ctx context.Context, dir string) (mount.Mountres3, error) {
	fh, err := m.mount(ctx, dir)
	if err != nil {
		return &mount.Mountres3_default{FhsStatus: mountStatus(err)}, nil
	}
	return &mount.Mountres3_MNT3_OK{Mountinfo: mount.Mountres3Ok{Fhandle: fh, AuthFlavors: []int32{rpc.AuthSys, rpc.AuthNone}}}, nil
}
func (m *mounts) MountV3Mountproc3Dump(context.Context) (*mount.Mountbody, error) {
	return m.dump(), nil
}
func (m *mounts) MountV3Mountproc3Umnt(ctx context.Context, dir string) error {
	m.forget(ctx, func(e mountEntry) bool { return e.dir == dir })
	return nil
}
func (m *mounts) MountV3Mountproc3Umntall(ctx context.Context) error {
	m.forget(ctx, func(mountEntry) bool { return true })
	return nil
}
func (m *mounts) MountV3Mountproc3Export(context.Context) (*mount.Exportnode, error) {
	return m.exports(), nil
}

// Mapping is an entry of the portmapper: a program and its TCP or UDP port.
type Mapping struct {
	Prog, Vers, Port uint32
	UDP              bool
}

// protocol returns the IP protocol number.
func (m *Mapping) protocol() uint32 {
	if m.UDP {
		return 17
	}
	return 6
}

// Portmap returns a portmapper with fixed entries (RFC 1833 section 3). It supports NULL, GETPORT
// and DUMP of version 2.
func Portmap(entries []Mapping) rpc.Program {
	return rpc.Program{Low: 2, High: 2, Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
		switch r.Proc {
		case 0:
		case 3:
			prog, vers, proto := r.Args.U32(), r.Args.U32(), r.Args.U32()
			r.Args.U32()
			if r.Args.Err() != nil {
				return rpc.GarbageArgs
			}
			var port uint32
			for _, e := range entries {
				// Another version returns the port too: the program itself reports
				// its versions.
				if e.Prog == prog && proto == e.protocol() && (e.Vers == vers || port == 0) {
					port = e.Port
				}
			}
			r.Reply.U32(port)
		case 4:
			for _, e := range entries {
				r.Reply.U32(1, e.Prog, e.Vers, e.protocol(), e.Port)
			}
			r.Reply.U32(0)
		default:
			return rpc.ProcUnavail
		}
		return rpc.Success
	}}
}
