// Package nfs is an NFS version 3 server of a directory tree (RFC 1813), with
// the MOUNT protocol and a portmapper, and a client for it. The server's
// programs run over RPC-over-RDMA (package rpcrdma; RFC 8267 is its binding)
// and TCP.
package nfs

import (
	"context"
	"encoding/binary"
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

// MaxIO is the most that a READ or WRITE moves, in bytes.
const MaxIO = 1 << 20

// Config says what is served.
type Config struct {
	Dir        string
	ReadOnly   bool
	RootSquash bool // the client's root is nobody
	Async      bool // do not wait for the disk where the protocol demands it: a crash loses data
	// KeyFile has the key that authenticates file handles, as DefaultKeyFile; it is
	// created if it does not exist. Without one the key is random: handles end with
	// the Server.
	KeyFile string
}

// Server serves one tree. Its methods of the protocol are called by many.
type Server struct {
	cfg    Config
	tree   *tree
	verf   atomic.Uint64 // of writes: another after each start, and when data were lost
	root   bool          // the process may act for others
	groups []uint32
	caps   capabilities
	locks  [256]sync.Mutex
}

// NewServer opens the tree. It sets the process's umask to 0: clients say what
// modes files have.
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
	unix.Umask(0)
	s.verf.Store(rand.Uint64())
	return s, nil
}

// verifier is what replies to WRITE and COMMIT say of the data: as long as it is
// the same, none was lost.
func (s *Server) verifier() (v [8]byte) {
	binary.BigEndian.PutUint64(v[:], s.verf.Load())
	return v
}

// lost notes that data which had been taken could not be written to the disk. The
// kernel tells so once; others who wrote must hear of it too.
func (s *Server) lost(err error) error {
	if err != nil {
		s.verf.Store(rand.Uint64())
	}
	return err
}

// lock keeps others from changing an object of this server's: what a reply tells
// of it from before and after is then of the one request, as clients take it to
// be (RFC 1813 section 2.6).
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

// Close gives the tree back.
func (s *Server) Close() error { return s.tree.close() }

// sync makes what was done to fd last, unless nobody wants that.
func (s *Server) sync(fd int) error {
	if s.cfg.Async {
		return nil
	}
	return s.lost(unix.Fsync(fd))
}

// Procedures that are told apart here (RFC 1813 section 3).
const (
	procSetattr = 2
	procWrite   = 7
	procCreate  = 8
	procSymlink = 10
	procLink    = 15
)

// Program returns the NFS program for a rpc.Server.
func (s *Server) Program() rpc.Program {
	service := nfsv3.NewNfsProgramService(s)
	return rpc.Program{
		Low: 3, High: 3,
		Serve: func(ctx context.Context, r *rpc.Request) rpc.Status {
			c, ok := s.credOf(r.Cred)
			if !ok {
				return rpc.AuthError
			}
			x := &exchange{cred: c, buffer: r.Buffer}
			ctx = context.WithValue(ctx, exchangeKey{}, x)
			if r.Proc == procWrite { // the generated decoder would copy the data
				return s.write(ctx, r)
			}
			return rpcgen.Serve(ctx, service, r)
		},
		// RFC 8267 section 4.
		Items: func(vers, proc uint32) bool { return proc == procWrite || proc == procSymlink },
		// What changes the tree in a way that cannot be done twice; and WRITE, which must
		// not be done again behind a later one.
		Once: func(vers, proc uint32) bool { return proc == procSetattr || proc >= procWrite && proc <= procLink },
		Bulk: func(vers, proc uint32) bool { return proc == procWrite },
	}
}

// exchange is what a request has beside its arguments.
type exchange struct {
	cred   cred
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
	if rpcgen.Write(r, nil, res.WriteTo) != nil {
		return rpc.SystemErr
	}
	return rpc.Success
}
