// Command demo shows iwarpd at work on one machine: two network namespaces
// joined by a veth pair, an iwarpd in each, and a real file that goes from one
// to the other by RDMA Write and back by RDMA Read. It checks what it shows,
// and removes whatever it made, and whatever a crashed run left.
//
// Without root or AF_XDP it does the same between two iwarpd on loopback, over kernel
// sockets, as any user.
package main

import (
	"archive/tar"
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/perf"
)

func init() {
	// Children are started from the main goroutine, in other namespaces and with
	// a signal for the parent's death, which is that of its thread.
	runtime.LockOSThread()
}

type options struct {
	bin  string // folder of iwarpd and iwarpctl
	dir  string // for the files
	size int64
	mtu  int
	mode string // auto, netns or socket
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder of iwarpd and iwarpctl")
	flag.StringVar(&o.dir, "dir", "out/demo", "folder for the files; it is emptied")
	flag.Int64Var(&o.size, "size", 256<<20+4321, "bytes of the file")
	flag.IntVar(&o.mtu, "mtu", 1500, "MTU of the veth pair")
	flag.StringVar(&o.mode, "mode", "auto",
		"netns (needs root and AF_XDP), socket (kernel sockets on loopback), or auto: the first that is possible")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	err := run(ctx, &o)
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case interrupted:
		fmt.Fprintln(os.Stderr, "demo: interrupted; everything it made is removed")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo: FAILED:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options) (err error) {
	unlock, err := lock(o.dir + ".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.RemoveAll(o.dir); err != nil { // of a run that crashed
		return err
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()

	mode := o.mode
	if mode == "auto" {
		mode = "netns"
		if why := cannot(); why != "" {
			saySockets(why)
			mode = "socket"
		}
	}
	file := filepath.Join(o.dir, "go.tar")
	fmt.Printf("Making a file of %d bytes from the Go tree\n", o.size)
	sum, err := makeFile(ctx, file, o.size)
	if err != nil {
		return err
	}
	r := &report{file: file, size: o.size, sum: sum}
	if mode == "netns" {
		err = runNamespaces(ctx, o, r)
		if errors.Is(err, errUnable) && o.mode == "auto" && ctx.Err() == nil {
			saySockets(err.Error())
			mode = "socket"
		}
	}
	switch mode {
	case "netns":
	case "socket":
		err = runSockets(ctx, o, r)
	default:
		err = fmt.Errorf("no mode %q: choose auto, netns or socket", mode)
	}
	if err != nil {
		return err
	}
	r.print(os.Stdout)
	return nil
}

// errUnable: the machine does not permit what the demo with namespaces does.
var errUnable = errors.New("not permitted here")

func saySockets(why string) {
	fmt.Printf("Two namespaces need root and AF_XDP, and here: %s.\nSo two iwarpd run on loopback, over the kernel's TCP, without privileges.\n", strings.Join(strings.Fields(why), " "))
}

// lock keeps two demos from removing each other's things.
func lock(path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another demo is running (it holds %s)", path)
	}
	return func() { os.Remove(path); f.Close() }, nil
}

// cannot says why the demo with namespaces cannot run here; "" if it can.
func cannot() string {
	if os.Geteuid() != 0 {
		return "the user is not root"
	}
	fd, err := unix.Socket(unix.AF_XDP, unix.SOCK_RAW, 0)
	if err != nil {
		return fmt.Sprintf("the kernel gives no AF_XDP socket (%v)", err)
	}
	unix.Close(fd)
	return ""
}

// makeFile writes a tar of the Go tree, again and again, cut at size bytes.
func makeFile(ctx context.Context, name string, size int64) (sum [sha256.Size]byte, err error) {
	out, err := exec.CommandContext(ctx, cmp.Or(os.Getenv("GO"), "go"), "env", "GOROOT").Output() // GO: of the Makefile
	if err != nil {
		return sum, fmt.Errorf("go env GOROOT: %w", err)
	}
	f, err := os.Create(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	b := bufio.NewWriterSize(io.MultiWriter(f, h), 1<<20)
	w := &limited{w: b, left: size}
	for w.left > 0 && ctx.Err() == nil {
		before := w.left
		if err := tarTree(w, filepath.Join(strings.TrimSpace(string(out)), "src")); err != nil && !errors.Is(err, errFull) {
			return sum, err
		}
		if w.left == before {
			return sum, errors.New("the Go tree is empty")
		}
	}
	if err := errors.Join(b.Flush(), f.Close(), ctx.Err()); err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, nil
}

var errFull = errors.New("enough")

// limited takes so many bytes and then fails with errFull.
type limited struct {
	w    io.Writer
	left int64
}

func (l *limited) Write(b []byte) (int, error) {
	n := min(int64(len(b)), l.left)
	l.left -= n
	if _, err := l.w.Write(b[:n]); err != nil {
		return 0, err
	}
	if int(n) < len(b) {
		return int(n), errFull
	}
	return int(n), nil
}

func tarTree(w io.Writer, root string) error {
	t := tar.NewWriter(w)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		hdr, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		hdr.Name, err = filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if err := t.WriteHeader(hdr); err != nil {
			return err
		}
		src, err := os.Open(path)
		if err != nil {
			return err
		}
		defer src.Close()
		_, err = io.Copy(t, src)
		return err
	})
	if err != nil {
		return err
	}
	return t.Close()
}

func sumFile(name string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, nil
}

// report is what the demo shows in the end.
type report struct {
	file string
	size int64
	sum  [sha256.Size]byte

	where    string
	cpus     string // how threads share CPUs, or ""
	put, get time.Duration
	rounds   int
	rtt      *perf.Percentiles
	perf     []*perf.Result
	hosts    []host
}

// host holds the counters of one side.
type host struct {
	name            string
	steered, passed uint64 // by XDP
	tx, rx          uint64 // frames of the data plane
	retransmissions uint64
	xdp             string // mode; "" without XDP
}

// compare checks that the file named is the one that was made.
func (r *report) compare(name, what string) error {
	sum, err := sumFile(name)
	if err != nil {
		return err
	}
	if sum != r.sum {
		return fmt.Errorf("%s: SHA-256 is %x; want %x", what, sum, r.sum)
	}
	return nil
}

func (r *report) print(w io.Writer) {
	rate := func(d time.Duration) string {
		perSec := float64(r.size) / d.Seconds()
		return fmt.Sprintf("%.2f s, %.1f MiB/s, %.2f Gbit/s", d.Seconds(), perSec/(1<<20), perSec*8/1e9)
	}
	fmt.Fprintf(w, "\n%s\n", r.where)
	if r.cpus != "" {
		fmt.Fprintf(w, "%s\n", r.cpus)
	}
	fmt.Fprintln(w)
	fmt.Fprintf(w, "verbs     RDMA Write (put), RDMA Read (get), Send (control); ping: Send, RDMA Read, RDMA Write\n")
	fmt.Fprintf(w, "file      %d bytes, sha256 %s\n", r.size, hex.EncodeToString(r.sum[:]))
	fmt.Fprintf(w, "put       %s: the copy there is the same\n", rate(r.put))
	fmt.Fprintf(w, "get       %s: the copy back is the same\n", rate(r.get))
	fmt.Fprintf(w, "ping      %d rounds of Read and Write, data verified; a round takes p50 %.1f us, p99 %.1f us\n", r.rounds, r.rtt.P50, r.rtt.P99)
	for _, p := range r.perf {
		if p.Latency != nil {
			fmt.Fprintf(w, "perf      %-5s %7d bytes  p50 %.1f us, p99 %.1f us, p99.9 %.1f us\n", p.Op, p.Size, p.Latency.P50, p.Latency.P99, p.Latency.P999)
		} else {
			fmt.Fprintf(w, "perf      %-5s %7d bytes  %.2f Gbit/s, %.0f operations/s\n", p.Op, p.Size, p.GbitPerSec, p.OpsPerSec)
		}
	}
	for _, h := range r.hosts {
		fmt.Fprintf(w, "host %s    ", h.name)
		if h.xdp != "" {
			fmt.Fprintf(w, "XDP (%s): %d frames steered to iwarpd, %d passed to the kernel; ", h.xdp, h.steered, h.passed)
		}
		if h.tx == 0 {
			fmt.Fprintf(w, "kernel sockets\n")
			continue
		}
		fmt.Fprintf(w, "%d frames sent, %d received, %d retransmitted\n", h.tx, h.rx, h.retransmissions)
	}
	fmt.Fprintf(w, "\nDemo passed.\n")
}
