package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// NFSv3 READs and WRITEs of one file in memory, nfsDepth of them outstanding, over
// RPC-over-RDMA version 2 and two daemons, and over the kernel's TCP, with the same server. A
// READ is an RDMA Write by the server, and a WRITE is an RDMA Read by the server.

const (
	nfsDepth   = 8
	nfsTCPPort = 2049
)

func init() {
	roles["nfs-server"] = nfsServer
	roles["nfs-client"] = nfsClient
}

// runNFS measures NFS over two daemons.
func runNFS(m *matrix, _ int, tests []test) ([]result, error) {
	return m.withDaemons(func(socketA, socketB string) ([]result, error) { return m.nfs(tests, socketA, socketB) })
}

// runNFSTCP measures NFS over the kernel's TCP.
func runNFSTCP(m *matrix, tests []test, gso bool) ([]result, error) {
	if err := m.lab.setOffloads(gso); err != nil {
		return nil, err
	}
	return m.nfs(tests, "", "")
}

func (m *matrix) nfs(tests []test, socketA, socketB string) ([]result, error) {
	addr := m.lab.b.addr.Addr().String()
	return m.lab.pairOf(job{Role: "nfs-server", Socket: socketB, Local: addr},
		job{Role: "nfs-client", Socket: socketA, Remote: addr, Tests: tests, Warm: m.opt.warm, Window: m.opt.window},
		m.limit(len(tests)), "GOMAXPROCS=3")
}

func nfsServer(j job, ready func()) ([]result, error) {
	ctx, cancel := whileStdinOpen()
	defer cancel()
	dir, err := memoryDir()
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, nfsDepth*mib), 0o666); err != nil {
		return nil, err
	}
	s, err := nfs.NewServer(nfs.Config{Dir: dir, Async: true, NoRootSquash: true})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if j.Socket == "" {
		server := &rpc.Server{}
		server.Register(nfs.ProgramNFS, s.Program())
		server.Register(nfs.ProgramMount, s.MountProgram())
		l, err := net.Listen("tcp", net.JoinHostPort(j.Local, strconv.Itoa(nfsTCPPort)))
		if err != nil {
			return nil, err
		}
		ready()
		return nil, server.ServeTCP(ctx, l)
	}
	x := &nfs.Export{
		Server: s, Listen: net.JoinHostPort(j.Local, strconv.Itoa(rpcrdma.Port)), Config: rpcrdma.DefaultConfig(true),
		Open: func(ctx context.Context) (*iwarp.Device, error) { return iwarp.Open(ctx, j.Socket) },
		Tell: func(format string, _ ...any) {
			if strings.HasPrefix(format, "serving") {
				ready()
			}
		},
	}
	if err := x.Run(ctx); ctx.Err() == nil {
		return nil, err
	}
	return nil, nil
}

// memoryDir mounts a file system in memory, which is gone when the process ends. Its files have
// large pages if the kernel supports them, as files of ext4 and XFS have in the page cache:
// looking up each 4 KiB of a file doubles the time of its copy.
func memoryDir() (string, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", fmt.Errorf("tmpfs: %w", err)
	}
	defer unix.Close(fs)
	_ = unix.FsconfigSetString(fs, "huge", "always")
	if err := unix.FsconfigCreate(fs); err != nil {
		return "", fmt.Errorf("tmpfs: %w", err)
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("tmpfs: %w", err)
	}
	return "/proc/self/fd/" + strconv.Itoa(m), nil
}

func nfsClient(j job, _ func()) ([]result, error) {
	ctx := context.Background()
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		f := nfsRDMA
		if j.Socket == "" {
			f = nfsTCP
		}
		r, err := f(ctx, j, t)
		if err != nil {
			r.Err = err.Error()
		}
		rs[i] = r
	}
	return rs, nil
}

// nfsArgs writes the arguments of the n-th READ or WRITE.
func nfsArgs(w *rpc.Writer, t test, fh, data []byte, n int) {
	w.Opaque(fh)
	w.U64(uint64(n%nfsDepth) * uint64(t.Size))
	w.U32(uint32(t.Size))
	if t.Workload == "nfs-write" {
		w.U32(uint32(nfsv3.UNSTABLE))
		w.Item(data)
	}
}

func nfsProc(t test) uint32 {
	if t.Workload == "nfs-write" {
		return 7
	}
	return 6
}

// nfsMoved checks that a reply moved all bytes.
func nfsMoved(r *rpc.Reader, t test) error {
	if st := r.U32(); st != 0 {
		return fmt.Errorf("NFS status %d", st)
	}
	if nfsProc(t) == 7 && r.U32() == 1 { // wcc_data
		r.Fixed(24)
	}
	if r.U32() == 1 {
		r.Fixed(84)
	}
	if n := r.U32(); int(n) != t.Size || r.Err() != nil {
		return fmt.Errorf("%d bytes of %d were moved", n, t.Size)
	}
	return nil
}

// meter counts operations between the end of the warm-up and that of the window.
type meter struct {
	j           job
	t           test
	start, from time.Time
	n           int
}

// done counts an operation, and reports whether it was the last.
func (m *meter) done(r *result) bool {
	now := time.Now()
	if m.from.IsZero() {
		if now.Sub(m.start) >= m.j.Warm {
			m.from = now
		}
		return false
	}
	m.n++
	took := now.Sub(m.from)
	if took < m.j.Window {
		return false
	}
	r.Value = float64(m.n) * float64(m.t.Size) * 8 / float64(took)
	return true
}

func nfsRDMA(ctx context.Context, j job, t test) (r result, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	d, err := iwarp.Open(ctx, j.Socket)
	if err != nil {
		return r, err
	}
	defer d.Close()
	e, err := rpcrdma.New(ctx, d, rpcrdma.DefaultConfig(false))
	if err != nil {
		return r, err
	}
	defer e.Close()
	c := e.Dial(net.JoinHostPort(j.Remote, strconv.Itoa(rpcrdma.Port)))
	defer c.Close()
	n, err := nfs.Mount(ctx, c, "/")
	if err != nil {
		return r, err
	}
	f, err := n.Lookup(ctx, n.Root(), "file")
	if err != nil {
		return r, err
	}
	conn, err := c.Conn(ctx)
	if err != nil {
		return r, err
	}
	if conn.Version() != 2 {
		return r, fmt.Errorf("RPC-over-RDMA version %d", conn.Version())
	}
	before := counters(ctx, d)
	cred := (&rpc.Sys{}).Auth()
	ends, stop := make(chan error, nfsDepth), make(chan struct{})
	var wg sync.WaitGroup
	for i := range nfsDepth {
		buf, err := c.Buffer(ctx, t.Size)
		if err != nil {
			return r, err
		}
		defer buf.Release()
		wg.Go(func() {
			for {
				q := rpcrdma.Call{Reply: 256, Again: true}
				if t.Workload == "nfs-read" {
					q.Results, q.Into = []int{t.Size}, []*rpcrdma.Buffer{buf}
				}
				rd, resp, err := c.Do(ctx, rpc.Call{Prog: nfs.ProgramNFS, Vers: 3, Proc: nfsProc(t), Cred: cred}, func(w *rpc.Writer) { nfsArgs(w, t, f.Handle, buf.Bytes(), i) }, q)
				if err == nil {
					err = nfsMoved(rd, t)
					resp.Release()
				}
				ends <- err
				select {
				case <-stop:
					return
				default:
				}
				if err != nil {
					return
				}
			}
		})
	}
	go func() {
		wg.Wait()
		close(ends)
	}()
	m := meter{j: j, t: t, start: time.Now()}
	over := false
	for e := range ends { // wait for all ends, which still use their buffers
		err = errors.Join(err, e)
		if !over && (err != nil || m.done(&r)) {
			over = true
			close(stop)
		}
	}
	r.Client = changes(before, counters(ctx, d))
	return r, err
}

// nfsTCP runs a client in one goroutine, which sends calls and reads the replies.
func nfsTCP(_ context.Context, j job, t test) (r result, err error) {
	c, err := net.Dial("tcp", net.JoinHostPort(j.Remote, strconv.Itoa(nfsTCPPort)))
	if err != nil {
		return r, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	in := bufio.NewReaderSize(c, 4*kib) // larger reads bypass it
	var xid uint32
	ask := func(prog, proc uint32, args func(*rpc.Writer)) error {
		xid++
		var w rpc.Writer
		cred := (&rpc.Sys{}).Auth()
		(&rpc.Call{XID: xid, Prog: prog, Vers: 3, Proc: proc, Cred: cred}).Start(&w)
		args(&w)
		return rpc.WriteRecord(c, &w.Msg)
	}
	buf := make([]byte, t.Size+512)
	take := func() (*rpc.Reader, error) {
		var mark [4]byte
		if _, err := io.ReadFull(in, mark[:]); err != nil {
			return nil, err
		}
		n := binary.BigEndian.Uint32(mark[:])
		if n>>31 != 1 || n&^(1<<31) > uint32(len(buf)) {
			return nil, errors.New("a reply of another form")
		}
		b := buf[:n&^(1<<31)]
		if _, err := io.ReadFull(in, b); err != nil {
			return nil, err
		}
		return rpc.ParseReply(rpc.Msg{Body: b})
	}
	if err := ask(nfs.ProgramMount, 1, func(w *rpc.Writer) { w.String("/") }); err != nil {
		return r, err
	}
	rd, err := take()
	if err != nil {
		return r, err
	}
	rd.U32()
	root := append([]byte(nil), rd.Opaque(64)...)
	if err := ask(nfs.ProgramNFS, 3, func(w *rpc.Writer) { w.Opaque(root); w.String("file") }); err != nil {
		return r, err
	}
	if rd, err = take(); err != nil {
		return r, err
	}
	rd.U32()
	fh := append([]byte(nil), rd.Opaque(64)...)
	data := make([]byte, t.Size)
	n := 0
	next := func() error {
		n++
		return ask(nfs.ProgramNFS, nfsProc(t), func(w *rpc.Writer) { nfsArgs(w, t, fh, data, n) })
	}
	for range nfsDepth {
		if err := next(); err != nil {
			return r, err
		}
	}
	m := meter{j: j, t: t, start: time.Now()}
	for {
		rd, err := take()
		if err == nil {
			err = nfsMoved(rd, t)
		}
		if err != nil {
			return r, err
		}
		if m.done(&r) {
			return r, nil
		}
		if err := next(); err != nil {
			return r, err
		}
	}
}
