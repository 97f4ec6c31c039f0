package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"time"
	"unicode/utf8"

	"github.com/gopacket/gopacket/pcapgo"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/app/perf"
	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/internal/testenv/memconn"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/tcp"
)

// pair starts two nodes, and returns a context that ends after a minute.
func pair(t *testing.T, cfg embed.PairConfig) (a, b *embed.Node, ctx context.Context) {
	t.Helper()
	a, b, err := embed.Pair(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(func() { cancel(); a.Close(); b.Close() })
	return a, b, ctx
}

// running starts two daemons in the process, with a connection between them. The command lines use the socket of the
// accepting one.
func running(t *testing.T) (socket string, ca, cb *iwarp.Conn) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "iwarpd.sock")
	a, b, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	l, err := b.Device().Listen(ctx, ":7174", nil)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan *iwarp.Conn, 1)
	go func() {
		c, _ := l.Accept(ctx)
		accepted <- c
	}()
	if ca, err = a.Device().Dial(ctx, fmt.Sprintf("%v:7174", b.Addr()), nil); err != nil {
		t.Fatal(err)
	}
	if cb = <-accepted; cb == nil {
		t.Fatal("not accepted")
	}
	return socket, ca, cb
}

// message sends one message across.
func message(t *testing.T, ca, cb *iwarp.Conn, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := ca.Send(ctx, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	if got, err := cb.Recv(ctx, make([]byte, n)); err != nil || got != n {
		t.Fatal(got, err)
	}
}

// TestCaptureFIFO checks that capture does not take a FIFO that nothing reads: it would fill it, and then wait.
func TestCaptureFIFO(t *testing.T) {
	socket, _, cb := running(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out, errOut strings.Builder
	args := []string{"--socket", socket, "capture", fmt.Sprint(cb.QP().Num()), "-w", fifo} // all frames are for administrators
	if code := run(ctx, args, &out, &errOut); code != exitFile || !strings.Contains(errOut.String(), "start its reader first") {
		t.Errorf("exit code %d: %q", code, &errOut)
	}
}

// TestServerOutlivesReader checks that servers go on when nobody reads their messages, nor their lines about clients.
// systemd takes an end by SIGPIPE for a clean exit, after which a unit is not restarted.
func TestServerOutlivesReader(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	a, b, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	for port, args := range map[int][]string{
		7175: {"perf", "--server", "--listen", ":7175"},
		7176: {"nfs", "export", t.TempDir(), "--listen", ":7176", "--mount-port", "0", "--portmap-port", "0", "--key-file", filepath.Join(t.TempDir(), "key")},
		7177: {"serve", "--dir", t.TempDir(), "--listen", ":7177"},
	} {
		r, w := testenv.Pipe(t)
		r.Close()
		cmd := exec.CommandContext(ctx, os.Args[0], append([]string{"--socket", socket}, args...)...)
		cmd.Env = append(os.Environ(), asProgram+"=1")
		cmd.Stdout, cmd.Stderr = w, w
		err := cmd.Start()
		w.Close()
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for served := 0; served < 2; { // it reports the first one
			conn, err := a.Device().Dial(ctx, fmt.Sprintf("%v:%d", b.Addr(), port), nil)
			if err == nil {
				conn.Close()
			}
			if err == nil || errors.Is(err, iwarp.ErrRejected) {
				served++
			}
			select {
			case err := <-ended:
				t.Fatalf("%q: %v", args, err)
			case <-time.After(10 * time.Millisecond): // it may not listen yet
			}
		}
		_ = cmd.Process.Signal(unix.SIGTERM) // or it has ended
		if err := <-ended; err != nil {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// TestPingLack checks that a persistent ping server goes on after a connection for which it had no descriptors.
func TestPingLack(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	a, b, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	cmd := exec.CommandContext(ctx, os.Args[0], "--socket", socket, "ping", "-s", "-P")
	cmd.Env = append(os.Environ(), asProgram+"=1")
	errs, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(errs)
	lines.Scan() // "listening on"
	var usual unix.Rlimit
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &usual); err != nil {
		t.Fatal(err)
	}
	limit := func(most uint64) {
		l := unix.Rlimit{Cur: most, Max: usual.Max}
		if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_NOFILE, &l, nil); err != nil {
			t.Fatal(err)
		}
	}
	addr := fmt.Sprintf("%v:%d", b.Addr(), rping.DefaultPort)
	limit(3)
	if _, err := a.Device().Dial(ctx, addr, rping.Config()); !errors.Is(err, iwarp.ErrRejected) {
		t.Errorf("without descriptors: %v", err)
	}
	if lines.Scan(); !strings.Contains(lines.Text(), "too many open files") {
		t.Errorf("it says %q", lines.Text())
	}
	limit(usual.Cur)
	if conn, err := a.Device().Dial(ctx, addr, rping.Config()); err != nil {
		t.Errorf("with descriptors: %v", err)
	} else {
		conn.Close()
	}
	_ = cmd.Process.Signal(unix.SIGTERM) // or it has ended
	for lines.Scan() {
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestFullServers checks that a client does not take a server without a quota for another program.
func TestFullServers(t *testing.T) {
	dir := t.TempDir()
	socketA, socketB := filepath.Join(dir, "a.sock"), filepath.Join(dir, "b.sock")
	a, b, ctx := pair(t, embed.PairConfig{
		CtrlA: ctrl.Config{Socket: socketA, Mode: 0o600},
		CtrlB: ctrl.Config{Socket: socketB, Mode: 0o600, Limits: ctrl.Limits{QPs: 1}},
	})
	l, err := b.Device().Listen(ctx, ":7180", nil)
	if err != nil {
		t.Fatal(err)
	}
	go a.Device().Dial(ctx, fmt.Sprintf("%v:7180", b.Addr()), nil)
	if _, err := l.Accept(ctx); err != nil { // it has the only queue pair
		t.Fatal(err)
	}
	file, addr := filepath.Join(dir, "file"), b.Addr().String()
	testenv.WriteFile(t, file, []byte("content"), 0o600)
	for _, tt := range []struct{ server, client []string }{
		{[]string{"ping", "-s", "-P"}, []string{"ping", "-c", "-a", addr, "-C", "1"}},
		{[]string{"serve", "--dir", dir}, []string{"cp", file, addr + ":copy"}},
		{
			[]string{
				"nfs", "export", dir, "--mount-port", "0", "--portmap-port", "0",
				"--key-file", filepath.Join(t.TempDir(), "key"),
			},
			[]string{"nfs", "ls", addr + ":/"},
		},
	} {
		server, stop := context.WithCancel(ctx)
		ended := make(chan int, 1)
		go func() {
			ended <- run(server, append([]string{"--socket", socketB}, tt.server...), io.Discard, io.Discard)
		}()
		var code int
		var errOut string
		for {
			code, _, errOut = ctl(t, append([]string{"--socket", socketA}, tt.client...)...)
			if !strings.Contains(errOut, "nothing listens") || ctx.Err() != nil {
				break
			}
		}
		if code != exitPeer || !strings.Contains(errOut, "quota") || strings.Contains(errOut, "does not support") {
			t.Errorf("%q: %d, %q", tt.client, code, errOut)
		}
		stop()
		<-ended
	}
}

// TestPingQuota checks that a persistent ping server goes on after clients that exceed its quota.
func TestPingQuota(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	a, b, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600, Limits: ctrl.Limits{QPs: 1}}})
	server, interrupt := context.WithCancel(ctx)
	defer interrupt()
	errs, say := io.Pipe()
	defer errs.Close()
	code := make(chan int, 1)
	go func() {
		code <- run(server, []string{"--socket", socket, "ping", "-s", "-P"}, io.Discard, say)
		say.Close()
	}()
	lines := bufio.NewScanner(errs)
	lines.Scan() // "listening on"
	addr := fmt.Sprintf("%v:%d", b.Addr(), rping.DefaultPort)
	first, err := a.Device().Dial(ctx, addr, rping.Config())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if _, err := a.Device().Dial(ctx, addr, rping.Config()); !errors.Is(err, iwarp.ErrRejected) {
		t.Errorf("beyond the quota: %v", err)
	}
	if lines.Scan(); !strings.Contains(lines.Text(), "quota") && !strings.Contains(lines.Text(), "queue pair") {
		t.Errorf("it says %q", lines.Text())
	}
	go io.Copy(io.Discard, errs)
	first.Close()
	for err = iwarp.ErrRejected; errors.Is(err, iwarp.ErrRejected); { // until the server has noticed
		_, err = rping.Ping(ctx, a.Device(), addr, rping.Config(), 64, rping.Options{Count: 1})
	}
	if err != nil {
		t.Errorf("after that: %v", err)
	}
	interrupt()
	if c := <-code; c != exitOK && c != exitInterrupted {
		t.Errorf("exit code %d", c)
	}
}

// A justDone context has just ended: nothing that waits for its end has noticed.
type justDone struct{ context.Context }

func (justDone) Err() error { return context.Canceled }

// TestInterruptedAfterSuccess checks that doctor which is interrupted just after the first transfer has succeeded
// reports that it was.
func TestInterruptedAfterSuccess(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	l, err := a.Device().Listen(ctx, ":7174", rping.Config())
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		if conn, err := l.Accept(ctx); err == nil {
			_, _ = rping.ServeConn(ctx, conn, rping.Options{})
		}
	}()
	if found, err := examine(justDone{ctx}, b.Device(), a.Addr().String()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", found, err)
	}
}

// TestInterruptedConnect checks that a command which is interrupted before the peer has answered, or whose daemon ends, reports
// that, and nothing about the peer.
func TestInterruptedConnect(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	a, b, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	l, err := a.Device().Listen(ctx, ":7174", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"doctor", a.Addr().String()}, {"ping", "-c", "-a", a.Addr().String()}, {"ping", "-c", "-C", "2", "-a", a.Addr().String()}} {
		ctl, interrupt := context.WithCancel(ctx)
		var out, errOut strings.Builder
		code := make(chan int, 1)
		go func() { code <- run(ctl, append([]string{"--socket", socket}, args...), &out, &errOut) }()
		if _, err := l.Request(ctx); err != nil {
			t.Fatal(err)
		}
		interrupt()
		if got := <-code; got != exitInterrupted || out.Len() > 0 || errOut.Len() > 0 {
			t.Errorf("%q: exit code %d, %q, %q", args, got, &out, &errOut)
		}
	}
	var out, errOut strings.Builder
	code := make(chan int, 1)
	go func() {
		code <- run(ctx, []string{"--socket", socket, "doctor", a.Addr().String()}, &out, &errOut)
	}()
	if _, err := l.Request(ctx); err != nil {
		t.Fatal(err)
	}
	b.Close()
	if got := <-code; got != exitDaemon || out.Len() > 0 {
		t.Errorf("when the daemon ends: exit code %d, %q, %q", got, &out, &errOut)
	}
}

// TestNextDaemonRefuses checks that a server which the next daemon does not accept ends with the text and the exit code of
// one that the first daemon does not accept.
func TestNextDaemonRefuses(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	_, _, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	c := &command{socket: socket, err: io.Discard}
	err := c.serveAt(ctx, ":7176", &iwarp.Config{}, true, func(*iwarp.Device, *iwarp.Listener) error {
		if err := errors.Join(os.Remove(socket), os.WriteFile(socket, nil, 0o600)); err != nil {
			t.Error(err)
		}
		return iwarp.ErrDaemonGone
	})
	if code := exitCode(ctx, err); code != exitDaemon || !strings.Contains(fmt.Sprint(err), "is not a socket: name the socket of iwarpd") {
		t.Errorf("exit code %d: %v", code, err)
	}
}

// TestShowQP checks that each statistic of TCP and RDMAP has its name in the output.
func TestShowQP(t *testing.T) {
	socket, ca, cb := running(t)
	message(t, ca, cb, 100)
	num := fmt.Sprint(cb.QP().Num())
	code, out, errOut := ctl(t, "--socket", socket, "qp", "show", num)
	if code != exitOK || !strings.Contains(out, "RTS") || !strings.Contains(out, ca.Info().Local.String()) {
		t.Fatal(code, out, errOut)
	}
	code, asJSON, errOut := ctl(t, "--socket", socket, "--json", "qp", "show", num)
	var q struct {
		TCP      map[string]uint64 `json:"tcp"`
		RDMAP    map[string]uint64 `json:"rdmap"`
		TCPState string            `json:"tcp_state"`
	}
	if err := json.Unmarshal([]byte(asJSON), &q); err != nil || code != exitOK || q.TCPState != "ESTABLISHED" {
		t.Fatal(code, err, q.TCPState, errOut)
	}
	for _, s := range []struct {
		typ  reflect.Type
		have map[string]uint64
	}{{reflect.TypeFor[tcp.Stats](), q.TCP}, {reflect.TypeFor[rdmap.Stats](), q.RDMAP}} {
		fields := 0
		for _, f := range reflect.VisibleFields(s.typ) {
			if !f.Anonymous { // the fields of an embedded struct are counted themselves
				fields++
			}
		}
		if len(s.have) != fields {
			t.Errorf("%d of the %d fields of %v are shown: %v", len(s.have), fields, s.typ, s.have)
		}
	}
	for name := range q.TCP {
		if !strings.Contains(out, "tcp."+strings.TrimSuffix(name, "_ns")+" ") {
			t.Errorf("no tcp.%s in the output for people", name)
		}
	}
	if q.RDMAP["rx_sends"] == 0 {
		t.Error("no message was counted")
	}
}

// TestKeepsResults checks that cp, perf and ping print the results that they have when a later file, measurement or round
// fails.
func TestKeepsResults(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "iwarpd.sock")
	a, _, ctx := pair(t, embed.PairConfig{
		CtrlA: ctrl.Config{Limits: ctrl.Limits{Registered: 16 << 20}},
		CtrlB: ctrl.Config{Socket: socket, Mode: 0o600},
	})
	serving, stop := context.WithCancel(ctx)
	var servers sync.WaitGroup
	defer servers.Wait()
	defer stop()
	listen := func(addr string, cfg *iwarp.Config) *iwarp.Listener {
		l, err := a.Device().Listen(ctx, addr, cfg)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	files, measures := listen(":7176", filecopy.Config()), listen(":7175", nil)
	store, err := filecopy.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	oneFile := func(netip.AddrPort, filecopy.Event) { stop() }
	server := &filecopy.Server{Store: store, MaxClients: 1, Tell: oneFile}
	servers.Go(func() { _ = server.Serve(serving, files) })
	servers.Go(func() { _ = perf.Serve(serving, a.Device(), measures, func(netip.AddrPort, error) {}) })
	pings := listen(":7174", rping.Config())
	servers.Go(func() {
		conn, err := pings.Accept(ctx)
		if err != nil {
			return
		}
		serving, stop := context.WithCancel(ctx)
		defer stop()
		rounds := 0
		_, _ = rping.ServeConn(serving, conn, rping.Options{Print: writerFunc(func() {
			if rounds++; rounds == 2 {
				stop()
			}
		})})
		conn.Close()
	})
	args := []string{"cp"}
	for _, name := range []string{"a", "b"} {
		file := filepath.Join(dir, name)
		testenv.WriteFile(t, file, []byte(name), 0o600)
		args = append(args, file)
	}
	for _, tt := range []struct {
		first string // character of the output
		args  []string
	}{
		// 32M is more than the quota.
		{"[", []string{"perf", "write", "--mode", "lat", "--iterations", "3", "--size", "64,32M", "--client", a.Addr().String()}},
		{"[", append(args, a.Addr().String()+":")},
		{"{", []string{"ping", "-c", "-C", "1000000", "-a", a.Addr().String()}},
	} {
		code, out, errOut := ctl(t, append([]string{"--socket", socket, "--json"}, tt.args...)...)
		if !json.Valid([]byte(out)) || !strings.HasPrefix(out, tt.first) || code == exitOK || errOut == "" {
			t.Errorf("%q: exit code %d: %s%s", tt.args, code, out, errOut)
		}
	}
}

// fileServer serves a folder until the end of the test. It returns the socket of the daemon of a host that has dir, and
// what cp writes before a path of the folder.
func fileServer(t *testing.T, dir, folder string, tell func(netip.AddrPort, filecopy.Event)) (socket, host string) {
	t.Helper()
	socket = filepath.Join(dir, "iwarpd.sock")
	a, b, err := embed.Pair(embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	l, err := a.Device().Listen(ctx, ":7176", filecopy.Config())
	if err != nil {
		t.Fatal(err)
	}
	store, err := filecopy.OpenStore(folder)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- (&filecopy.Server{Store: store, MaxClients: 8, Tell: tell}).Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); <-ended; store.Close(); a.Close(); b.Close() })
	return socket, a.Addr().String() + ":"
}

// TestCopyWalksFirst checks that cp -r has read the folders before it connects: a server ends a connection without a
// request, and a large tree takes long.
func TestCopyWalksFirst(t *testing.T) {
	dir := t.TempDir()
	socket, inner := filepath.Join(dir, "iwarpd.sock"), filepath.Join(dir, "tree", "inner")
	a, _, ctx := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l, err := a.Device().Listen(ctx, ":7176", filecopy.Config())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	opened, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(opened)
	if _, err := unix.InotifyAddWatch(opened, inner, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	ended := make(chan int)
	go func() {
		ended <- run(ctx, []string{"--socket", socket, "cp", "-r", filepath.Dir(inner), a.Addr().String() + ":"}, io.Discard, io.Discard)
	}()
	if _, err := l.Request(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Read(opened, make([]byte, 1<<10)); err != nil {
		t.Errorf("the folders are not read yet: %v", err)
	}
	cancel()
	<-ended
}

// TestCopyEndless checks that cp -r ends if a server lists files in a folder, or folders in folders, without end.
func TestCopyEndless(t *testing.T) {
	for typ, what := range []string{"files", "folders"} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		near, far := memconn.Pair(40, 2048)
		defer near.Close()
		go func() {
			for n := 0; ; {
				if _, err := far.Recv(ctx, make([]byte, 2048)); err != nil {
					return
				}
				for range 16 { // docs/cp.md: kind, type, mode, mtime, size, name
					n++
					entry := append([]byte{10, byte(typ)}, make([]byte, 4+8+8)...)
					_ = far.Send(ctx, append(entry, fmt.Sprintf("\x00\x08%08d", n)...))
				}
				_ = far.Send(ctx, []byte{7})
			}
		}()
		w := &copying{copyJob: &copyJob{flags: &cpFlags{recursive: true}}, client: &filecopy.Client{Conn: near}, folders: make(map[string]bool), room: 1 << 20}
		err := w.listFolders(ctx, "d", filecopy.Entry{Folder: true})
		if err == nil || !strings.Contains(err.Error(), ": the server lists more files and folders than ") || exitCode(ctx, err) != exitFailure {
			t.Errorf("%s: exit code %d, %v", what, exitCode(ctx, err), err)
		}
	}
}

// TestCopyReadOnlyFolder checks that a folder which cp -rp copies becomes read-only after its files have been made: the
// side that receives it may be a plain user.
func TestCopyReadOnlyFolder(t *testing.T) {
	dir, there, back := t.TempDir(), t.TempDir(), t.TempDir()
	tree := filepath.Join(dir, "tree")
	testenv.Mkdir(t, tree, 0o755)
	for _, name := range []string{"f", "g"} {
		testenv.WriteFile(t, filepath.Join(tree, name), nil, 0o600)
	}
	testenv.Chmod(t, tree, 0o555)
	var mu sync.Mutex // guards modes and to
	var modes []os.FileMode
	to := there
	see := func() {
		mu.Lock()
		defer mu.Unlock()
		if st, err := os.Stat(filepath.Join(to, "tree")); err == nil {
			modes = append(modes, st.Mode().Perm())
		}
	}
	socket, host := fileServer(t, dir, there, func(_ netip.AddrPort, e filecopy.Event) {
		if e.Name == "tree/f" { // the server takes the request for the other file afterwards
			see()
		}
	})
	t.Cleanup(func() { // or a plain user cannot remove them
		for _, d := range []string{dir, there, back} {
			_ = os.Chmod(filepath.Join(d, "tree"), 0o700)
		}
	})
	for _, c := range []struct{ from, target, to string }{{tree, host, there}, {host + "tree", back, back}} {
		mu.Lock()
		to = c.to
		mu.Unlock()
		for range 2 { // the second time the folder exists
			if code, out, errOut := ctl(t, "--socket", socket, "cp", "-rp", c.from, c.target); code != exitOK {
				t.Errorf("exit code %d: %s%s", code, out, errOut)
			}
			see()
			mu.Lock()
			if len(modes) != 2 || modes[0]&0o200 == 0 || modes[1] != 0o555 {
				t.Errorf("from %s: modes %v", c.from, modes)
			}
			modes = nil
			mu.Unlock()
		}
	}
}

// TestCopyIntoFolderOfAnother checks that cp -rp copies the files into folders of another user, who lets the server's user
// write there, and says that it could not preserve the attributes of the folders.
func TestCopyIntoFolderOfAnother(t *testing.T) {
	testenv.RequireRoot(t)
	dir, there := t.TempDir(), t.TempDir()
	tree, into := filepath.Join(dir, "tree"), filepath.Join(there, "tree")
	for _, folder := range []string{tree, filepath.Join(tree, "sub"), into} {
		testenv.Mkdir(t, folder, 0o755)
	}
	testenv.WriteFile(t, filepath.Join(tree, "f"), nil, 0o600)
	testenv.WriteFile(t, filepath.Join(tree, "sub", "g"), nil, 0o600)
	testenv.Chmod(t, filepath.Dir(there), 0o755)
	testenv.Chmod(t, there, 0o777)
	testenv.Chmod(t, into, 0o777)
	const serving, sending = "a.sock", "b.sock"
	a, _, ctx := pair(t, embed.PairConfig{
		CtrlA: ctrl.Config{Socket: filepath.Join(dir, serving), Mode: 0o666}, CtrlB: ctrl.Config{Socket: filepath.Join(dir, sending), Mode: 0o600},
	})
	server := exec.CommandContext(ctx, "/proc/self/exe", "--socket", filepath.Join(dir, serving), "serve", "--dir", there)
	server.Env = append(os.Environ(), asProgram+"=1")
	server.SysProcAttr = &unix.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	p := testenv.Start(t, server)
	p.Expect("serving")
	code, out, errOut := ctl(t, "--socket", filepath.Join(dir, sending), "cp", "-rp", tree, a.Addr().String()+":")
	if code != exitFile || strings.Count(errOut, "not permitted") != 1 {
		t.Errorf("exit code %d: %s%s", code, out, errOut)
	}
	for _, name := range []string{"f", "sub/g"} {
		if _, err := os.Stat(filepath.Join(into, name)); err != nil {
			t.Error(err)
		}
	}
}

// A writerFunc is called for each write.
type writerFunc func()

func (f writerFunc) Write(b []byte) (int, error) {
	f()
	return len(b), nil
}

// TestNFSJSON checks what nfs put and nfs get print with --json, and that both keep a file's name in a folder. Only root may
// write to that: if this is root, the export must take --no-root-squash, and say so.
func TestNFSJSON(t *testing.T) {
	dir := t.TempDir()
	socketA, socketB := filepath.Join(dir, "a.sock"), filepath.Join(dir, "b.sock")
	_, b, _ := pair(t, embed.PairConfig{CtrlA: ctrl.Config{Socket: socketA, Mode: 0o600}, CtrlB: ctrl.Config{Socket: socketB, Mode: 0o600}})
	file := filepath.Join(dir, "file")
	testenv.WriteFile(t, file, make([]byte, 100), 0o600)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan int)
	go func() {
		var out, errOut strings.Builder
		code := run(ctx, []string{"--socket", socketB, "nfs", "export", t.TempDir(), "--mount-port", "0", "--portmap-port", "0", "--key-file", filepath.Join(dir, "key"), "--no-root-squash"}, &out, &errOut)
		if os.Geteuid() == 0 && !strings.Contains(errOut.String(), "; the clients' root is root\n") {
			t.Errorf("the export prints %s", &errOut)
		}
		ended <- code
	}()
	root := b.Addr().String() + ":/"
	for code := exitPeer; code == exitPeer && ctx.Err() == nil; { // it may not listen yet
		code, _, _ = ctl(t, "--socket", socketA, "nfs", "ls", root)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"put", file, root}, `{"op":"put","path":"/file","size":100}`},
		{[]string{"put", file, root + "other"}, `{"op":"put","path":"/other","size":100}`},
		{[]string{"get", root + "other", file}, `{"op":"get","path":"/other","size":100}`},
		{[]string{"get", root + "other", dir}, `{"op":"get","path":"/other","size":100}`},
	} {
		code, out, errOut := ctl(t, append([]string{"--socket", socketA, "--json", "nfs"}, tt.args...)...)
		if got := strings.Join(strings.Fields(out), ""); code != exitOK || got != tt.want {
			t.Errorf("%q: exit code %d, %s, %s; want %s", tt.args, code, got, errOut, tt.want)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "other")); err != nil || st.Size() != 100 {
		t.Errorf("in the folder: %v, %v", st, err)
	}
	cancel()
	if code := <-ended; code != exitOK {
		t.Errorf("export: exit code %d", code)
	}
}

// TestExportConnections checks that an export with more memory serves more connections.
func TestExportConnections(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	a, b, _ := pair(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: socket, Mode: 0o600}})
	for memory, want := range map[int]int{4: 3, 32: 24, 64: 48} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		ended := make(chan int)
		go func() {
			ended <- run(ctx, []string{"--socket", socket, "nfs", "export", t.TempDir(), "--memory", fmt.Sprint(memory), "--mount-port", "0",
				"--portmap-port", "0", "--key-file", filepath.Join(t.TempDir(), "key")}, io.Discard, io.Discard)
		}()
		var conns []*iwarp.Conn
		for ctx.Err() == nil {
			c, err := a.Device().Dial(ctx, fmt.Sprintf("%v:%d", b.Addr(), rpcrdma.Port), nil)
			if err == nil {
				conns = append(conns, c)
			} else if len(conns) > 0 { // otherwise it may not listen yet
				break
			}
		}
		if len(conns) != want {
			t.Errorf("%d MiB: %d connections, want %d", memory, len(conns), want)
		}
		for _, c := range conns {
			c.Close()
		}
		cancel()
		<-ended
	}
}

func TestDisconnect(t *testing.T) {
	socket, ca, cb := running(t)
	num := fmt.Sprint(cb.QP().Num())
	if code, out, errOut := ctl(t, "--socket", socket, "__complete", "disconnect", ""); code != exitOK || !strings.HasPrefix(out, num+"\tRTS ") {
		t.Errorf("completion: %d, %q, %q", code, out, errOut)
	}
	if code, out, errOut := ctl(t, "--socket", socket, "--json", "disconnect", num, "--abort"); code != exitOK || !strings.Contains(out, `"qp": `+num) {
		t.Fatal(code, out, errOut)
	}
	<-ca.QP().Done()
	<-cb.QP().Done()
	if code, _, errOut := ctl(t, "--socket", socket, "disconnect", "99999"); code != exitFailure || !strings.Contains(errOut, "no queue pair 99999") {
		t.Error(code, errOut)
	}
}

func TestStatsWatch(t *testing.T) {
	socket, ca, cb := running(t)
	message(t, ca, cb, 100)
	code, out, errOut := ctl(t, "--socket", socket, "stats", "--watch", "--interval", "100ms", "--count", "2", "--all")
	if code != exitOK || strings.Count(out, "engine.rx_fpdus ") != 2 || !strings.Contains(out, "/s\n") {
		t.Fatal(code, out, errOut)
	}
	code, out, errOut = ctl(t, "--socket", socket, "--json", "stats", "--watch", "--interval", "100ms", "-n", "3")
	if code != exitOK {
		t.Fatal(code, errOut)
	}
	dec := json.NewDecoder(strings.NewReader(out))
	for i := range 3 {
		var look struct {
			Time     time.Time         `json:"time"`
			Counters map[string]uint64 `json:"counters"`
		}
		if err := dec.Decode(&look); err != nil || look.Counters["engine.rx_fpdus"] == 0 || look.Time.IsZero() {
			t.Fatalf("object %d: %v", i, err)
		}
	}
	if code, _, errOut := ctl(t, "stats", "--watch", "--interval", "1ms"); code != exitUsage {
		t.Error(code, errOut)
	}
	if line, changed := statLine("x", map[string]uint64{"x": 5}, map[string]uint64{"x": 15}, 2*time.Second); !changed || !strings.Contains(line, "5.0/s") {
		t.Error(line, changed)
	}
}

func TestTop(t *testing.T) {
	socket, ca, cb := running(t)
	message(t, ca, cb, 1000)
	code, out, errOut := ctl(t, "--socket", socket, "--json", "top", "-n", "2", "--interval", "100ms")
	if code != exitOK {
		t.Fatal(code, errOut)
	}
	dec := json.NewDecoder(strings.NewReader(out))
	for range 2 {
		var v topView
		if err := dec.Decode(&v); err != nil || len(v.QPs) != 1 || v.QPs[0].QP != cb.QP().Num() || v.QPs[0].RTT == 0 || v.QPCount != 1 {
			t.Fatalf("%v: %+v", err, v)
		}
	}
	// A single display has rates too.
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				message(t, ca, cb, 1000)
			}
		}
	}()
	for v, end := (topView{}), time.Now().Add(time.Minute); v.RxFrames == 0; {
		code, out, errOut = ctl(t, "--socket", socket, "--json", "top", "-n", "1", "--interval", "100ms")
		if err := json.Unmarshal([]byte(out), &v); err != nil || code != exitOK || time.Now().After(end) {
			t.Errorf("%v: %d %s%s", err, code, out, errOut)
			break
		}
	}
	close(stop)
	<-stopped
	if code, out, errOut = ctl(t, "--socket", socket, "top", "-n", "1"); code != exitOK || !strings.Contains(out, ca.Info().Local.String()) {
		t.Error(code, out, errOut)
	}
	if code, _, errOut = ctl(t, "--socket", socket, "top", "--sort", "luck"); code != exitUsage || !strings.Contains(errOut, "rate, retransmissions, rtt, qp") {
		t.Error(code, errOut)
	}
}

// TestStatusConnections checks that status and qp list show round-trip times once there are some.
func TestStatusConnections(t *testing.T) {
	socket, ca, cb := running(t)
	message(t, ca, cb, 100)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"status"}, `(?m)^connections +[12]\n  round trip min/median/max [0-9.]+.?s/[0-9.]+.?s/[0-9.]+.?s$`},
		{[]string{"qp", "list"}, `^qp +.* rtt .*\n *[0-9]+ +RTS .* [0-9.]+.?s `},
	} {
		code, out, errOut := ctl(t, append([]string{"--socket", socket}, c.args...)...)
		if code != exitOK || !regexp.MustCompile(c.want).MatchString(out) {
			t.Errorf("%v: exit code %d, %s\n%s\nwant a match of %s", c.args, code, errOut, out, c.want)
		}
	}
}

// TestStatusQuota checks that status succeeds where the daemon answers, and refuses its user another client: the probes
// of the chart would end the daemon, and the connections of all users.
func TestStatusQuota(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	config := ctrl.Config{Socket: socket, Mode: 0o600, Limits: ctrl.Limits{Clients: 1}}
	pair(t, embed.PairConfig{CtrlB: config}) // its device is the one client
	code, out, errOut := ctl(t, "--socket", socket, "status")
	if code != exitOK || !strings.Contains(out, "has 1 client, its limit is 1") {
		t.Errorf("exit code %d, %s\n%s", code, out, errOut)
	}
	if code, out, _ := ctl(t, "--socket", socket, "status", "--json"); code == exitOK {
		t.Errorf("status --json succeeds without the status:\n%s", out)
	}
}

// TestLink checks the state of the link that status shows.
func TestLink(t *testing.T) {
	for want, d := range map[string]*ctrlpb.DeviceAttr{
		"": {}, ", link down": {Link: "down"}, ", link up": {Link: "up"},
		", link up, 2.5 Gbit/s": {Link: "up", Speed: 2.5e9}, ", link up, 100 Mbit/s": {Link: "up", Speed: 100e6},
	} {
		if got := link(d); got != want {
			t.Errorf("link(%v) = %q; want %q", d, got, want)
		}
	}
}

// TestOtherClients checks that a client that queries is not itself counted or listed. The daemon may take a moment to
// notice that the previous one has ended.
func TestOtherClients(t *testing.T) {
	socket, _, _ := running(t)
	for _, c := range []struct {
		args  []string
		count func(out []byte) (n int, err error)
	}{
		{[]string{"client", "list"}, func(out []byte) (int, error) {
			var l []struct{ Client int }
			err := json.Unmarshal(out, &l)
			return len(l), err
		}},
		{[]string{"status"}, func(out []byte) (int, error) {
			var s struct{ Clients int }
			err := json.Unmarshal(out, &s)
			return s.Clients, err
		}},
		{[]string{"top", "-n", "1", "--interval", "100ms"}, func(out []byte) (int, error) {
			var v topView
			err := json.Unmarshal(out, &v)
			return int(v.Clients), err
		}},
	} {
		for end := time.Now().Add(time.Minute); ; {
			code, out, errOut := ctl(t, append([]string{"--socket", socket, "--json"}, c.args...)...)
			n, err := c.count([]byte(out))
			if n == 1 && err == nil && code == exitOK {
				break
			}
			if n < 1 || err != nil || code != exitOK || time.Now().After(end) {
				t.Fatalf("%v: %d clients, want 1: %v, exit code %d, %s", c.args, n, err, code, errOut)
			}
		}
	}
}

func TestTopView(t *testing.T) {
	qp := func(num uint32, in, out, retr, rtt uint64) *ctrlpb.QPInfo {
		return &ctrlpb.QPInfo{Qp: num, State: "RTS", Remote: "10.0.0.9:7174", Tcp: []*ctrlpb.Counter{
			{Name: "bytes_in", Value: in}, {Name: "bytes_out", Value: out}, {Name: "retransmits", Value: retr}, {Name: "srtt_ns", Value: rtt * 1000},
		}, Rdmap: []*ctrlpb.Counter{{Name: "rx_sends", Value: in / 100}}}
	}
	at := time.Unix(1000, 0)
	devices := []*ctrlpb.DeviceAttr{{Interface: "eth9"}, {Interface: "eth10"}}
	status := &ctrlpb.StatusReply{Qps: 3, Conns: 3, Device: devices[0], Devices: devices}
	last := &topSample{at, status, map[string]uint64{"engine.rx_bytes": 100}, []*ctrlpb.QPInfo{qp(1, 0, 0, 0, 1), qp(2, 1000, 0, 0, 1)}}
	now := &topSample{at.Add(2 * time.Second), status, map[string]uint64{"engine.rx_bytes": 300},
		[]*ctrlpb.QPInfo{qp(1, 200, 0, 8, 50), qp(2, 3000, 1000, 2, 70), qp(3, 9, 9, 9, 60)}}
	order := func(by int) (nums []uint32) {
		for _, q := range view(last, now, by).QPs {
			nums = append(nums, q.QP)
		}
		return nums
	}
	for by, want := range [][]uint32{{2, 1, 3}, {1, 2, 3}, {2, 3, 1}, {1, 2, 3}} {
		if got := order(by); !reflect.DeepEqual(got, want) {
			t.Errorf("sorted by %s: %v; want %v", topSorts[by].name, got, want)
		}
	}
	v := view(last, now, 0)
	if q := v.QPs[0]; q.RxBytes != 1000 || q.TxBytes != 500 || q.Messages != 10 || q.Retransmits != 1 || v.RxBytes != 100 {
		t.Errorf("%+v, %v", q, v.RxBytes)
	}
	lines := v.screen(60, 2, 1, "note")
	if len(lines) != 8 || !strings.HasPrefix(lines[6], "   1 RTS") || !strings.Contains(lines[0], "eth9, eth10") {
		t.Errorf("%q", lines)
	}
	for width := 60; width < 90; width++ { // some cut the round-trip time in its unit
		for _, l := range v.screen(width, 2, 1, "note") {
			if n := text.StringWidth(l); n > width || !utf8.ValidString(l) {
				t.Errorf("line of %d columns, not %d: %q", n, width, l)
			}
		}
	}
	u := topUI{}
	u.keys([]byte("sjjj\x1b[Ap"), 3)
	if u != (topUI{sortBy: 1, offset: 2, paused: true}) {
		t.Errorf("%+v", u) // the offset ends at the last queue pair
	}
	if u.keys([]byte("\x1b[A\x1b[A\x1b[A"), 3); u.offset != 0 {
		t.Errorf("%+v", u)
	}
}

// TestTopUnknownSize checks that top draws on a terminal whose size is not known, as that of a serial console.
func TestTopUnknownSize(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	num, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.OpenFile(fmt.Sprint("/dev/pts/", num), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	draw(out, &topView{Interface: "eth9", QPs: []topQP{{QP: 17}}}, &topUI{})
	b := make([]byte, 4096)
	n, err := master.Read(b)
	if err != nil || !bytes.Contains(b[:n], []byte("eth9")) || !bytes.Contains(b[:n], []byte("  17 ")) {
		t.Errorf("%v: %q", err, b[:n])
	}
}

// TestTopQuits checks that keys end top while it waits for a daemon that does not answer, and so reads no keys.
func TestTopQuits(t *testing.T) {
	for _, last := range []string{"q", "\x03"} {
		typed, quit := make(chan []byte, 1), make(chan struct{})
		go readKeys(iotest.OneByteReader(strings.NewReader("ssp"+last)), typed, func() { close(quit) })
		select {
		case <-quit:
		case <-time.After(time.Minute):
			t.Fatalf("%q does not end it", last)
		}
		if b := <-typed; string(b) != "s" {
			t.Errorf("before that it was told %q", b)
		}
	}
}

func TestCapture(t *testing.T) {
	socket, ca, cb := running(t)
	file := filepath.Join(t.TempDir(), "out.pcapng")
	const want = 20
	done := make(chan error, 1)
	go func() {
		code, out, errOut := ctl(t, "--socket", socket, "--json", "capture", fmt.Sprint(cb.QP().Num()), "-w", file, "-n", fmt.Sprint(want))
		var have captured
		switch err := json.Unmarshal([]byte(out), &have); {
		case code != exitOK || err != nil:
			done <- fmt.Errorf("exit code %d, %v, %s", code, err, errOut)
		case have.Frames != want || have.Bytes == 0:
			done <- fmt.Errorf("%+v", have)
		default:
			done <- nil
		}
	}()
	for finished := false; !finished; {
		message(t, ca, cb, 3000)
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			finished = true
		default:
		}
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := pcapgo.NewNgReader(f, pcapgo.DefaultNgReaderOptions)
	if err != nil {
		t.Fatal(err)
	}
	ways := map[pcapgo.NgEpbFlag]int{}
	for n := 0; ; n++ {
		data, ci, opts, err := r.ReadPacketDataWithOptions()
		if errors.Is(err, io.EOF) {
			if n != want {
				t.Errorf("%d frames in the file; want %d", n, want)
			}
			break
		}
		if err != nil || ci.Length != len(data) || time.Since(ci.Timestamp).Abs() > time.Minute || opts.Flags == nil {
			t.Fatalf("frame %d: %v, %+v", n, err, ci)
		}
		ways[opts.Flags.Direction]++
	}
	if ways[pcapgo.NgEpbFlagDirectionInbound] == 0 || ways[pcapgo.NgEpbFlagDirectionOutbound] == 0 {
		t.Errorf("directions %v", ways)
	}
	for _, args := range [][]string{{"capture"}, {"capture", "x", "-w", file}, {"capture", "1", "-w", file, "--host", "1.2.3.4"}, {"capture", "-w", file, "--host", "a:b"}} {
		if code, _, errOut := ctl(t, append([]string{"--socket", socket}, args...)...); code != exitUsage {
			t.Errorf("%q: exit code %d, %s", args, code, errOut)
		}
	}
	num := fmt.Sprint(cb.QP().Num())
	if code, _, errOut := ctl(t, "--socket", socket, "capture", num, "-w", file, "--duration", "1ns"); code != exitOK || !strings.Contains(errOut, " dropped") {
		t.Errorf("--duration 1ns: exit code %d, %s", code, errOut)
	}
	if code, _, errOut := ctl(t, "--socket", socket, "capture", "77777", "-w", file); code != exitFailure || !strings.Contains(errOut, "no queue pair") {
		t.Error(code, errOut)
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, out, errOut := ctl(t, "completion", shell); code != exitOK || !strings.Contains(out, "iwarpctl") {
			t.Errorf("%s: exit code %d, %d bytes, %s", shell, code, len(out), errOut)
		}
	}
	for _, flag := range []struct{ command, name, value string }{
		{"top", "--sort", "retransmissions"}, {"perf", "--mode", "lat"}, {"perf", "--transport", "sctp"}, {"cp", "--checksum", "blake3"},
	} {
		if _, out, _ := ctl(t, "__complete", flag.command, flag.name, ""); !strings.Contains(out, flag.value+"\n") {
			t.Errorf("values of %s: %q", flag.name, out)
		}
	}
}

// TestCompletionOfNames checks that shells complete the names that the daemon knows, and those of files only where one is meant.
func TestCompletionOfNames(t *testing.T) {
	socket, _, _ := running(t)
	dev, err := iwarp.Open(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close() // its interface has no name, and so the addresses no description
	const anyFile, noFile, folder = ":0\n", ":4\n", ":16\n"
	var own strings.Builder
	for _, a := range dev.Attr().Addrs {
		fmt.Fprintln(&own, a)
	}
	for args, want := range map[string]string{
		"status --device ": dev.Attr().Interface + "\n" + noFile, "ping -I ": own.String() + noFile, "ping --count ": noFile, "status ": noFile,
		"serve --dir ": folder, "nfs export ": folder, "capture -w ": anyFile, "cp ": anyFile, "nfs get ": anyFile, "nfs put ": anyFile, "--socket ": anyFile,
	} {
		if code, out, errOut := ctl(t, append([]string{"--socket", socket, "__complete"}, strings.Split(args, " ")...)...); code != exitOK || out != want {
			t.Errorf("%s: exit code %d, %q; want %q (%s)", args, code, out, want, errOut)
		}
	}
}

func TestQueueLists(t *testing.T) {
	socket, ca, cb := running(t)
	message(t, ca, cb, 100)
	ctx := t.Context()
	dev, err := iwarp.Open(ctx, socket)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	pd, err := dev.AllocPD(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dev.CreateSRQ(ctx, iwarp.SRQConfig{PD: pd, Depth: 77, Limit: 5}); err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(ctx, 99)
	if err != nil {
		t.Fatal(err)
	}
	if err := cq.Moderate(ctx, 16, 50*time.Microsecond); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := ctl(t, "--socket", socket, "srq", "list"); code != exitOK || !strings.Contains(out, " 77 ") {
		t.Error(code, out, errOut)
	}
	if code, out, errOut := ctl(t, "--socket", socket, "cq", "list"); code != exitOK || !strings.Contains(out, "16 or 50µs") {
		t.Error(code, out, errOut)
	}
	var cqs []struct {
		QPs      int `json:"qps"`
		Counters map[string]uint64
	}
	if _, out, _ := ctl(t, "--socket", socket, "--json", "cq", "list"); json.Unmarshal([]byte(out), &cqs) != nil || len(cqs) < 2 {
		t.Fatal(out)
	}
	var n uint64
	for _, q := range cqs {
		n += q.Counters["completions"]
	}
	if n == 0 {
		t.Error("no completion was counted")
	}
}
