package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

func (c *command) nfs() *cobra.Command {
	cmd := group("nfs", "Serve or use a folder by NFSv3 over RDMA", c.nfsExport(), c.nfsLs(), c.nfsGet(), c.nfsPut(), c.nfsStat())
	cmd.Long = "nfs export serves a folder by NFS version 3 over RPC-over-RDMA, versions 2 and\n" +
		"1. Linux mounts it (version 1) through soft-iWARP or an iWARP adapter:\n\n" +
		"  mount -o rdma,port=20049,vers=3,nolock ADDR:/ /mnt\n\n" +
		"The other commands are a client that needs no mount, over version 2."
	cmd.Example = "  iwarpctl nfs export /srv/files --listen 10.0.0.1:20049"
	return cmd
}

func (c *command) nfsExport() *cobra.Command {
	var cfg nfs.Config
	x := &nfs.Export{Open: c.open, Config: rpcrdma.DefaultConfig(true)}
	var memory int
	cmd := &cobra.Command{
		Use:   "export DIR [--listen ADDR:PORT]",
		Short: "Serve a folder",
		Long: "export serves a folder until interrupted. It also serves MOUNT and a small\n" +
			"portmapper over the kernel's TCP and UDP, at the same address. Anyone who can\n" +
			"reach the address can access the folder with the rights of any user but root\n" +
			"that they claim to be, or with yours if you are not root. Their root is nobody,\n" +
			"unless --no-root-squash. Without CAP_DAC_READ_SEARCH, which plain users do not\n" +
			"have, clients must mount again when export restarts, and a file that somebody\n" +
			"renames on this host is stale until clients look it up again. When the daemon\n" +
			"stops, export waits for it to restart, and continues.",
		Example: "  iwarpctl nfs export /srv/files --listen 10.0.0.1:20049",
		Args:    usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Dir = args[0]
			return c.runExport(cmd.Context(), x, cfg, memory)
		},
	}
	f := cmd.Flags()
	f.StringVar(&x.Listen, "listen", fmt.Sprintf(":%d", rpcrdma.Port), "address to listen on, ADDR:PORT or :PORT")
	f.BoolVar(&cfg.ReadOnly, "read-only", false, "refuse changes")
	f.BoolVar(&cfg.NoRootSquash, "no-root-squash", false, "trust clients that claim to be root; otherwise their root is nobody")
	f.BoolVar(&cfg.Async, "async", false, "do not wait for the disk: faster, and a crash loses data")
	f.IntVar(&x.MountPort, "mount-port", nfs.PortMount, "TCP port of MOUNT; 0: none")
	f.IntVar(&x.PortmapPort, "portmap-port", nfs.PortPortmap, "TCP and UDP port of the portmapper; 0: none")
	f.IntVar(&x.TCPPort, "tcp-port", 0, "also serve NFS over TCP on this port, usually 2049; 0: do not")
	f.StringVar(&cfg.KeyFile, "key-file", "", "file with the secret key of file handles, made if it does not exist; default /var/lib/iwarpd/nfs.key for root")
	f.IntVar(&memory, "memory", 32, "registered memory, MiB; 32 are for 24 connections")
	return cmd
}

// runExport serves a folder by x, with so many MiB of registered memory.
func (c *command) runExport(ctx context.Context, x *nfs.Export, cfg nfs.Config, memory int) error {
	if memory < 4 || memory > 4096 {
		return usageError{fmt.Errorf("nfs export: --memory %d: must be 4 to 4096", memory)}
	}
	x.Config.Pool = memory << 20
	x.Config.MaxConns = max(memory*3/4, min(24, 2*memory-8)) // each takes 0.52 MiB
	addr, err := listenAddr(x.Listen, rpcrdma.Port)
	if err != nil {
		return err
	}
	x.Listen = addr
	ports := map[string]string{addr[strings.LastIndexByte(addr, ':')+1:]: "listen"}
	for _, f := range []struct {
		name string
		port int
	}{{"mount-port", x.MountPort}, {"portmap-port", x.PortmapPort}, {"tcp-port", x.TCPPort}} {
		port := strconv.Itoa(f.port)
		switch other, taken := ports[port]; {
		case f.port < 0 || f.port > 65535:
			return usageError{fmt.Errorf("nfs export: --%s %d: must be 1 to 65535, or 0 for none", f.name, f.port)}
		case taken && f.port > 0:
			return usageError{fmt.Errorf("nfs export: --%s and --%s: both are port %s: give different ones", other, f.name, port)}
		}
		ports[port] = f.name
	}
	if cfg.KeyFile == "" {
		if cfg.KeyFile, err = nfs.DefaultKeyFile(); err != nil {
			return fileError{err}
		}
	}
	outlive()
	x.Tell = func(format string, args ...any) { fmt.Fprintln(c.err, reason(fmt.Errorf(format, args...))) }
	if x.Server, err = nfs.NewServer(cfg); err != nil {
		return err
	}
	defer x.Server.Close()
	if !x.Server.HandlesLast() {
		x.Tell("no CAP_DAC_READ_SEARCH, as a plain user: file handles end with this process, and a file renamed on this host is stale until clients look it up again")
	}
	if err := x.Run(ctx); err != nil && ctx.Err() == nil {
		return portRemedy(err)
	}
	return nil
}

// portRemedy adds a remedy to the error for a port that cannot be used.
func portRemedy(err error) error {
	p, ok := errors.AsType[*nfs.PortError](err)
	switch {
	case ok && errors.Is(err, unix.EADDRNOTAVAIL):
		return usageError{fmt.Errorf("%w: give an address of this host with --listen", err)}
	case !ok || !errors.Is(err, unix.EADDRINUSE):
		return listenFailed(err)
	case p.Service == "MOUNT":
		return fmt.Errorf("%w: each export of an address needs a port of its own for MOUNT: give another with --mount-port (clients mount with mountport=N then), or 0 for none", err)
	}
	return fmt.Errorf("%w: give another port with --tcp-port, or 0 for none", err)
}

// nfsTarget parses ADDR:/path or ADDR:PORT:/path.
func nfsTarget(ctx context.Context, s string) (addr, p string, err error) {
	host, p, ok := strings.Cut(s, ":/")
	if !ok {
		return "", "", usageError{fmt.Errorf("%q: must be ADDR:/path or ADDR:PORT:/path", s)}
	}
	addr, err = resolve(ctx, host, rpcrdma.Port)
	return addr, "/" + p, err
}

// nfsPatience is how long a transfer waits for an unreachable server.
const nfsPatience = 2 * time.Minute

// withNFS calls f with a client of the server in target.
func (c *command) withNFS(ctx context.Context, target string, f func(ctx context.Context, n *nfs.Client, p string) error) error {
	addr, p, err := nfsTarget(ctx, target)
	if err != nil {
		return err
	}
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	cfg := rpcrdma.DefaultConfig(false)
	cfg.Patience = nfsPatience
	cfg.Silent = func(addr string, err error) {
		fmt.Fprintf(c.err, "%v: trying again for %v\n", peerFailed("nfs", addr, err), nfsPatience)
	}
	e, err := rpcrdma.New(ctx, dev, cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	conn := e.Dial(addr)
	defer conn.Close()
	n, err := nfsMount(ctx, conn)
	if err != nil {
		return peerFailed("nfs", addr, err)
	}
	if err := f(ctx, n, p); err != nil {
		return nfsFailed(target, os.Geteuid(), err)
	}
	return nil
}

// nfsFailed returns the error of a transfer that the user uid began.
func nfsFailed(target string, uid int, err error) error {
	e, answered := errors.AsType[*nfs.Error](err)
	switch {
	case answered && e.Status == nfsv3.NFS3ERR_ACCES && uid == 0:
		err = fileError{fmt.Errorf("%w: root is the user nobody there, unless the server exports with --no-root-squash", err)}
	case answered:
		err = fileError{err}
	case lost(err):
		err = peerError{err}
	}
	return fmt.Errorf("%s: %w", target, err)
}

// nfsMount connects and mounts the root. A server that cannot be reached is an error at once: only a transfer that has
// begun waits for it.
func nfsMount(ctx context.Context, conn *rpcrdma.Client) (*nfs.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if _, err := conn.Conn(ctx); err != nil {
		return nil, err
	}
	return nfs.Mount(ctx, conn, "/")
}

// nfsTypes has the letters of ls(1).
var nfsTypes = map[nfsv3.Ftype3]byte{
	nfsv3.NF3REG: '-', nfsv3.NF3DIR: 'd', nfsv3.NF3LNK: 'l', nfsv3.NF3BLK: 'b', nfsv3.NF3CHR: 'c',
	nfsv3.NF3SOCK: 's', nfsv3.NF3FIFO: 'p',
}

// nfsEntry is the JSON form of an object.
type nfsEntry struct {
	Name      string `json:"name"`
	*nfsAttrs        // nil if the server does not tell them
	ID        uint64 `json:"id"`
	Raw       []byte `json:"name_base64,omitempty"` // if Name is not UTF-8, which JSON cannot hold
}

type nfsAttrs struct {
	Mode  string    `json:"mode"`
	Links uint32    `json:"links"`
	UID   uint32    `json:"uid"`
	GID   uint32    `json:"gid"`
	Size  uint64    `json:"size"`
	Mtime time.Time `json:"mtime"`
}

// nfsMode returns the type and the permissions of an object as ls(1) writes them.
func nfsMode(i *nfs.Info) string {
	mode := []byte("?" + fs.FileMode(i.Perm & 0o777).String()[1:])
	if letter, ok := nfsTypes[i.Type]; ok { // the type is what the server says
		mode[0] = letter
	}
	for _, special := range []struct {
		bit    uint32
		at     int
		letter byte
	}{{unix.S_ISUID, 3, 's'}, {unix.S_ISGID, 6, 's'}, {unix.S_ISVTX, 9, 't'}} {
		switch at := &mode[special.at]; {
		case i.Perm&special.bit == 0:
		case *at == 'x':
			*at = special.letter
		default:
			*at = special.letter - 'a' + 'A'
		}
	}
	return string(mode)
}

func nfsEntryOf(i *nfs.Info) nfsEntry {
	e := nfsEntry{Name: i.Name, ID: i.Fileid}
	if i.Type != 0 {
		e.nfsAttrs = &nfsAttrs{nfsMode(i), i.Nlink, i.UID, i.GID, i.Size, i.Mtime.UTC()}
	}
	if !utf8.ValidString(i.Name) {
		e.Raw = []byte(i.Name)
	}
	return e
}

// nfsResult is the JSON form of a copy's outcome.
type nfsResult struct {
	Op   string `json:"op"`
	Path string `json:"path"`
	Size int64  `json:"size"`
}

// nfsAligned is the number of lines of a listing whose columns are aligned: a folder may have more than fit into memory.
const nfsAligned = 1000

// nfsShow prints the objects for which each calls the function that it gets.
func (c *command) nfsShow(each func(func(nfs.Info) error) error) error {
	if c.json {
		l := jsonList{w: c.out}
		err := each(func(i nfs.Info) error { return l.add(nfsEntryOf(&i)) })
		if err != nil && !l.begun {
			return err
		}
		return errors.Join(err, l.end())
	}
	w := tabwriter.NewWriter(c.out, 0, 8, 2, ' ', 0)
	lines := 0
	err := each(func(i nfs.Info) error {
		if e := nfsEntryOf(&i); e.nfsAttrs == nil {
			fmt.Fprintf(w, "??????????\t?\t?\t?\t?\t?\t%q\n", e.Name)
		} else {
			fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%s\t%q\n", e.Mode, e.Links, e.UID, e.GID, e.Size, e.Mtime.Format(time.DateTime), e.Name)
		}
		if lines++; lines%nfsAligned != 0 {
			return nil
		}
		return w.Flush()
	})
	return errors.Join(err, w.Flush())
}

func (c *command) nfsLs() *cobra.Command {
	return &cobra.Command{
		Use: "ls ADDR:/path", Short: "List a folder", Args: usageArgs(cobra.ExactArgs(1)),
		Long: "ls lists a folder: type and permissions, links, owner, group, size, time of the\n" +
			"last change (UTC) and name. A question mark is what the server does not tell.\n" +
			"With --json, a name that is not UTF-8 is in name_base64 too.",
		Example: "  iwarpctl nfs ls 10.0.0.1:/",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.withNFS(cmd.Context(), args[0], func(ctx context.Context, n *nfs.Client, p string) error {
				i, err := n.Walk(ctx, p)
				if err != nil {
					return err
				}
				return c.nfsShow(func(show func(nfs.Info) error) error {
					if i.Type != nfsv3.NF3DIR {
						return show(i)
					}
					return n.List(ctx, i.Handle, show)
				})
			})
		},
	}
}

func (c *command) nfsStat() *cobra.Command {
	return &cobra.Command{
		Use: "stat ADDR:/path", Short: "Show the attributes of a file or folder", Args: usageArgs(cobra.ExactArgs(1)),
		Example: "  iwarpctl nfs stat 10.0.0.1:/file",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.withNFS(cmd.Context(), args[0], func(ctx context.Context, n *nfs.Client, p string) error {
				i, err := n.Walk(ctx, p)
				if err != nil {
					return err
				}
				return c.nfsShow(func(show func(nfs.Info) error) error { return show(i) })
			})
		},
	}
}

// nfsRegular returns an error unless the object is a regular file.
func nfsRegular(i *nfs.Info) error {
	switch i.Type {
	case nfsv3.NF3REG:
		return nil
	case nfsv3.NF3DIR:
		return fileError{errors.New("is a folder")}
	case nfsv3.NF3LNK:
		return fileError{errors.New("is a symbolic link, which is not followed")}
	}
	return fileError{errors.New("is not a file")}
}

// writeWhole atomically creates or replaces the file name with what f writes: f writes to a
// temporary file in the same folder, which then gets the permissions and, as far as allowed, the owner
// and the group of the old file, and replaces it. If name is not a regular file, such as a device, f writes to it
// directly.
func writeWhole(name string, f func(io.Writer) error) (err error) {
	p, perr := filepath.EvalSymlinks(name)
	if perr == nil {
		name = p
	}
	st, err := os.Stat(name)
	if err == nil && (perr != nil || !st.Mode().IsRegular()) {
		w, err := openOutput(name, 0, 0)
		if err != nil {
			return err
		}
		return errors.Join(f(w), w.Close())
	}
	temp := filepath.Join(filepath.Dir(name), ".iwarpctl-"+rand.Text())
	perm := fs.FileMode(0o666)
	if err == nil {
		perm = 0o600 // not accessible to others before it has the final permissions
	}
	w, terr := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if terr != nil {
		return &fs.PathError{Op: "create", Path: name, Err: errors.Unwrap(terr)}
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temp)
		}
		if p, ok := errors.AsType[*fs.PathError](err); ok && p.Path == temp {
			p.Path = name
		}
	}()
	if err == nil {
		err = filecopy.Succeed(w, st, filecopy.ACL(name))
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		err = f(w)
	}
	if err == nil {
		err = w.Sync()
	}
	if cerr := w.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(temp, name)
	}
	return err
}

func (c *command) nfsGet() *cobra.Command {
	return &cobra.Command{
		Use: "get ADDR:/path [FILE]", Short: "Copy a file from the server; FILE -: standard output", Args: usageArgs(cobra.RangeArgs(1, 2)),
		Long:    "get copies a file from the server, under its own name if FILE is a folder or\nmissing. FILE -: standard output.",
		Example: "  iwarpctl nfs get 10.0.0.1:/big.tar",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.withNFS(cmd.Context(), args[0], func(ctx context.Context, n *nfs.Client, p string) (err error) {
				i, err := n.Walk(ctx, p)
				if err != nil {
					return err
				}
				if err := nfsRegular(&i); err != nil {
					return err
				}
				name := path.Base(p)
				if len(args) == 2 {
					if st, err := os.Stat(args[1]); err == nil && st.IsDir() {
						name = filepath.Join(args[1], name)
					} else {
						name = args[1]
					}
				}
				var done int64
				get := func(w io.Writer) error {
					done, err = n.Get(ctx, i.Handle, w)
					return err
				}
				if name == "-" {
					return get(c.out)
				}
				if err := writeWhole(name, get); err != nil || !c.json {
					return err
				}
				return c.print(nfsResult{"get", p, done})
			})
		},
	}
}

// until wraps r so that reads return when ctx is done, even if r is a terminal or pipe without
// input.
func until(ctx context.Context, r io.Reader) io.Reader {
	pr, pw := io.Pipe()
	context.AfterFunc(ctx, func() { pw.CloseWithError(ctx.Err()) })
	go func() {
		_, err := io.Copy(pw, r)
		pw.CloseWithError(err)
	}()
	return pr
}

func (c *command) nfsPut() *cobra.Command {
	return &cobra.Command{
		Use: "put FILE ADDR:/path", Short: "Copy a file to the server; FILE -: standard input", Args: usageArgs(cobra.ExactArgs(2)),
		Long:    "put copies a file to the server, under its own name if path is a folder.\nFILE -: standard input.",
		Example: "  iwarpctl nfs put big.tar 10.0.0.1:/big.tar",
		RunE: func(cmd *cobra.Command, args []string) error {
			in, perm := cmd.InOrStdin(), uint32(0o644)
			if args[0] != "-" {
				f, st, err := openSource(args[0])
				if errors.Is(err, errNotRegular) {
					return fileError{fmt.Errorf("nfs put: %s is not a regular file: put copies one file, or standard input as -", args[0])}
				}
				if err != nil {
					return fmt.Errorf("nfs put: %w", err)
				}
				defer f.Close()
				perm = uint32(st.Mode().Perm())
				in = f
			} else {
				in = until(cmd.Context(), in)
			}
			return c.withNFS(cmd.Context(), args[1], func(ctx context.Context, n *nfs.Client, p string) error {
				name := path.Base(args[0])
				file := path.Join(p, name)
				dir, err := n.Walk(ctx, p)
				if err != nil || dir.Type != nfsv3.NF3DIR {
					file, name = p, path.Base(p)
					dir, err = n.Walk(ctx, path.Dir(p))
				}
				if err != nil {
					return err
				}
				if name == "-" {
					return usageError{errors.New("is a folder: give the name of the file for standard input")}
				}
				done, err := n.PutFile(ctx, dir.Handle, name, perm, in)
				if err != nil || !c.json {
					return err
				}
				return c.print(nfsResult{"put", file, done})
			})
		},
	}
}
