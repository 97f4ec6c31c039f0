package nfs

import (
	"context"
	"path"
	"sync"

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

// maxMounts bounds what is remembered for DUMP alone.
const maxMounts = 1024

// MountProgram returns the MOUNT program for a rpc.Server.
func (s *Server) MountProgram() rpc.Program {
	m := &mounts{s: s, list: make(map[mountEntry]struct{})}
	f := mount.NewMountProgramService(m)
	return rpc.Program{Low: 1, High: 3, Serve: func(ctx context.Context, r *rpc.Request) rpc.Status {
		if _, ok := s.credOf(r.Cred); !ok {
			return rpc.AuthError
		}
		return rpcgen.Serve(context.WithValue(ctx, peerKey{}, r.Peer), f, r)
	}}
}

type peerKey struct{}

// root gives the handle for a path: the export's own, or "/".
func (m *mounts) root(ctx context.Context, dir string) ([]byte, bool) {
	if p := path.Clean("/" + dir); p != "/" && p != path.Clean(m.s.tree.path) {
		return nil, false
	}
	host, _ := ctx.Value(peerKey{}).(string)
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.list) < maxMounts {
		m.list[mountEntry{host, dir}] = struct{}{}
	}
	return m.s.tree.fh, true
}

func (m *mounts) forget(ctx context.Context, f func(mountEntry) bool) {
	host, _ := ctx.Value(peerKey{}).(string)
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

// MountV1MountprocMnt has no handle for version 2 of NFS, which is not served.
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
	fh, ok := m.root(ctx, dir)
	if !ok {
		return &mount.Mountres3_default{FhsStatus: mount.MNT3ERR_NOENT}, nil
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

// Mapping is an entry of the portmapper: a program at a TCP port.
type Mapping struct{ Prog, Vers, Port uint32 }

// Portmap is a portmapper of fixed entries (RFC 1833 section 3): NULL, GETPORT
// and DUMP of version 2.
func Portmap(entries []Mapping) rpc.Program {
	const tcp = 6
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
				// Any version tells the port: the program itself says what it has.
				if e.Prog == prog && proto == tcp && (e.Vers == vers || port == 0) {
					port = e.Port
				}
			}
			r.Reply.U32(port)
		case 4:
			for _, e := range entries {
				r.Reply.U32(1, e.Prog, e.Vers, tcp, e.Port)
			}
			r.Reply.U32(0)
		default:
			return rpc.ProcUnavail
		}
		return rpc.Success
	}}
}
