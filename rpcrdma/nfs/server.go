// Package nfs implements an NFS version 3 server for a directory tree (RFC 1813), with the MOUNT
// protocol and a portmapper, and a client. The server's programs run over RPC-over-RDMA (package
// rpcrdma, bound by RFC 8267) and TCP.
package nfs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/rpcgen"
)

// Program numbers (RFC 1813, RFC 1833).
const (
	ProgramNFS     = 100003
	ProgramMount   = 100005
	ProgramPortmap = 100000
)

// Ports.
const (
	PortMount   = 20048
	PortPortmap = 111
)

// MaxIO is the maximum size of a READ or WRITE, in bytes.
const MaxIO = 1 << 20

// Config configures a Server.
type Config struct {
	Dir      string
	ReadOnly bool
	// NoRootSquash trusts clients that claim to be root. Otherwise their root is nobody, and group 0 counts for no
	// caller.
	NoRootSquash bool
	Async        bool // do not wait for the disk where the protocol requires it: a crash may lose data
	// KeyFile contains the key that authenticates file handles; see DefaultKeyFile. It is
	// created if it does not exist. If it is "", the key is random and handles become invalid
	// when the Server ends.
	KeyFile string
}

// Server serves one tree. Its protocol methods are called concurrently.
type Server struct {
	cfg    Config
	tree   *tree
	verf   atomic.Uint64 // write verifier: changes at each start, and when data was lost
	root   bool          // the process acts on behalf of its callers; otherwise it is the only user
	alone  bool          // but it cannot act for users other than root
	groups []uint32
	caps   capabilities
	locks  [256]sync.Mutex

	unstable unstable
}

// errAlone is the error of a server that would refuse each call. No other user takes the place of nobody, who has no files.
var errAlone = errors.New("nfs: export: root cannot act for other users here, and would serve nobody: give it CAP_SETUID and CAP_SETGID, " +
	"and its user namespace the user nobody, 65534; or export as a plain user")

// NewServer opens the tree. It sets the process's umask to 0, since clients specify modes. If it cannot use the folder or the
// key file, the error is an *fs.PathError.
func NewServer(cfg Config) (*Server, error) {
	t, err := openTree(cfg.Dir, cfg.KeyFile)
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, tree: t, root: os.Geteuid() == 0}
	if s.caps, err = capabilitiesOf(); err != nil {
		t.close()
		return nil, fmt.Errorf("nfs: capabilities: %w", err)
	}
	if g, err := os.Getgroups(); err == nil {
		for _, v := range g {
			s.groups = append(s.groups, uint32(v))
		}
	}
	s.alone = s.as(&cred{uid: nobody, gid: nobody}, func() error { return nil }) != nil
	if s.alone && !cfg.NoRootSquash {
		t.close()
		return nil, errAlone
	}
	unix.Umask(0)
	s.verf.Store(rand.Uint64())
	return s, nil
}

// verifier returns the verifier for replies to WRITE and COMMIT. While it stays the same, no data
// has been lost.
func (s *Server) verifier() (v [8]byte) {
	binary.BigEndian.PutUint64(v[:], s.verf.Load())
	return v
}

// lost records that data could not be written to disk after it had been accepted. The kernel
// reports that only once, but all clients that wrote must learn of it, by a new verifier.
func (s *Server) lost(err error) error {
	if err != nil {
		s.verf.Store(rand.Uint64())
	}
	return err
}

// lock locks objects against other requests, so that the attributes before and after in a reply
// reflect only that request, as clients assume (RFC 1813 section 2.6).
func (s *Server) lock(o ...*object) (unlock func()) {
	var l []int
	for _, o := range o {
		if i := int(o.st.Ino % uint64(len(s.locks))); !slices.Contains(l, i) {
			l = append(l, i)
		}
	}
	slices.Sort(l)
	for _, i := range l {
		s.locks[i].Lock()
	}
	return func() {
		for _, i := range l {
			s.locks[i].Unlock()
		}
	}
}

// HandlesLast reports whether file handles stay valid after a restart with the same key file, and
// when files are renamed on the host. That requires CAP_DAC_READ_SEARCH.
func (s *Server) HandlesLast() bool { return s.tree.names == nil && s.cfg.KeyFile != "" }

// Close closes the tree. Clients send again what they have not committed, since the next Server has another verifier.
func (s *Server) Close() error {
	s.unstable.close()
	return s.tree.close()
}

// sync commits changes of fd to disk, unless Async is set. If fd was opened for its attributes, since a plain user may
// not read it, sync commits the whole file system.
func (s *Server) sync(fd int) error {
	if s.cfg.Async {
		return nil
	}
	err := unix.Fsync(fd)
	if err == unix.EBADF {
		err = unix.Syncfs(s.tree.root)
	}
	return s.lost(err)
}

// Procedures with special treatment (RFC 1813 section 3).
const (
	procSetattr = 2
	procWrite   = 7
	procSymlink = 10
	procLink    = 15
)

// Program returns the NFS program for an rpc.Server.
func (s *Server) Program() rpc.Program {
	service := nfsv3.NewNfsProgramService(s)
	return rpc.Program{
		Low: 3, High: 3,
		Serve: func(ctx context.Context, r *rpc.Request) rpc.Status {
			c, ok := s.credOf(r.Cred)
			if !ok {
				return rpc.AuthError
			}
			x := &exchange{cred: c, peer: r.Peer, buffer: r.Buffer}
			ctx = context.WithValue(ctx, exchangeKey{}, x)
			if r.Proc == procWrite { // the generated decoder would copy the data
				return s.write(ctx, r)
			}
			return rpcgen.Serve(ctx, service, r)
		},
		// RFC 8267 section 4.
		Items: func(vers, proc uint32) bool { return proc == procWrite || proc == procSymlink },
		// Procedures that are not idempotent, and WRITE, which must not be repeated after a
		// later one.
		Once: func(vers, proc uint32) bool { return proc == procSetattr || proc >= procWrite && proc <= procLink },
		Bulk: func(vers, proc uint32) bool { return proc == procWrite },
	}
}

// exchange holds the context of a request.
type exchange struct {
	cred   cred
	peer   string // address of the client
	buffer func(int) ([]byte, error)
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange { return ctx.Value(exchangeKey{}).(*exchange) }

// write decodes a WRITE without a copy of its data.
func (s *Server) write(ctx context.Context, r *rpc.Request) rpc.Status {
	a := nfsv3.Write3args{
		File: nfsv3.NfsFh3{Data: r.Args.Opaque(nfsv3.NFS3_FHSIZE)}, Offset: r.Args.U64(), Count: r.Args.U32(),
		Stable: nfsv3.StableHow(r.Args.U32()),
	}
	a.Data = r.Args.Opaque(2 * MaxIO)
	if r.Args.Err() != nil || a.Stable < nfsv3.UNSTABLE || a.Stable > nfsv3.FILE_SYNC {
		return rpc.GarbageArgs
	}
	res, _ := s.NfsV3Nfsproc3Write(ctx, &a)
	if rpcgen.Write(r, res.WriteTo) != nil {
		return rpc.SystemErr
	}
	return rpc.Success
}
