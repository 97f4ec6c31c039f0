package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestReset checks that a missing server is named as the cause only if no connection was made.
func TestReset(t *testing.T) {
	refused := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_REFUSED, Text: "tcp: connection reset by peer"}
	const hint = "nothing listens on that port"
	if text := peerFailed("ping", "10.0.0.1:7174", refused).Error(); !strings.Contains(text, hint) {
		t.Errorf("refused: %s", text)
	}
	noSCTP := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_REFUSED, Text: "sctp: peer has no SCTP"}
	if text := peerFailed("ping", "10.0.0.1:7174", noSCTP).Error(); !strings.Contains(text, "start iwarpctl ping -s with the same --transport") {
		t.Errorf("no SCTP: %s", text)
	}
	gone := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_UNREACHABLE, Text: "the interface e2 was removed: it is served again when it is back"}
	if text := peerFailed("ping", "10.0.0.1:7174", gone).Error(); strings.Contains(text, "is that host up") {
		t.Errorf("removed: %s", text)
	}
	for text, hint := range map[string]string{
		"10.0.0.1: no route: network is unreachable":                                   "x: 10.0.0.1:7174: no route: network is unreachable: add a route",
		"10.0.0.1: no answer to ARP or neighbour discovery (asked for 10.0.0.7 on e1)": "on e1): is that host up",
		"sctp: destination unreachable":                                                "unreachable: is that host up",
		"connect: SCTP cannot reach programs of this host: use TCP":                    "use TCP",
	} {
		err := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_UNREACHABLE, Text: text}
		if got := peerFailed("x", "10.0.0.1:7174", err).Error(); !strings.Contains(got, hint) || strings.HasSuffix(text, "use TCP") && !strings.HasSuffix(got, "use TCP") {
			t.Errorf("%s", got)
		}
	}
	silent := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_UNREACHABLE, Text: "fe80::1: no answer to ARP or neighbour discovery (asked for fe80::1 on e1)"}
	if got, want := peerFailed("x", "[fe80::1%e1]:7174", silent).Error(), "x: [fe80::1%e1]:7174: no answer to ARP"; !strings.HasPrefix(got, want) {
		t.Errorf("link-local: got %q; want %q", got, want)
	}
	noRoute := fmt.Errorf("rpcrdma: %w", &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_UNREACHABLE, Text: "10.0.0.1: no route: network is unreachable"})
	if got, want := peerFailed("nfs", "10.0.0.1:20049", noRoute).Error(), "nfs: 10.0.0.1:20049: no route: network is unreachable: add a route to it (ip route add)"; got != want {
		t.Errorf("below rpcrdma: got %q; want %q", got, want)
	}
	denied := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_PERMISSION, Text: "uid 7 may not connect to 10.0.0.1: not in connect-to of rule 1"}
	if got, want := peerFailed("ping", "10.0.0.1:7174", denied).Error(), "ping: 10.0.0.1:7174: "+denied.Text; got != want {
		t.Errorf("denied: got %q; want %q", got, want)
	}
	reset := fmt.Errorf("receive: %w", &iwarp.WCError{Status: iwarp.WCFlushErr, Cause: refused})
	if text := peerFailed("ping", "10.0.0.1:7174", reset).Error(); strings.Contains(text, hint) {
		t.Errorf("reset: %s", text)
	}
}

// TestNotHost checks that an address that no host can have is named once and as such, without advice to look at the host.
func TestNotHost(t *testing.T) {
	const what = "a broadcast or multicast address, not that of one host: give the host's own"
	e := &iwarp.Error{Op: "connection to 10.0.0.255:7174", Code: ctrlpb.Code_CODE_INVALID, Text: "10.0.0.255: " + what}
	const want = "ping: 10.0.0.255:7174: " + what
	if got := peerFailed("ping", "10.0.0.255:7174", e).Error(); got != want {
		t.Errorf("got %q; want %q", got, want)
	}
}

// TestLost checks what a server, as a client does, says of a connection that was lost.
func TestLost(t *testing.T) {
	const addr = "10.0.0.1:7176"
	reset := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_REFUSED, Text: "tcp: connection reset by peer (peer " + addr + ")"}
	flushed := &iwarp.WCError{Status: iwarp.WCFlushErr, Cause: reset}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("receive from %s: iwarp: wait for completions: %w", addr, iwarp.ErrDaemonGone), "receive: the iwarpd of this host has ended: start it, and try again"},
		{
			fmt.Errorf("receive from %s: %w: it cut this client off: its ring is invalid", addr, iwarp.ErrDaemonGone),
			"receive: the iwarpd of this host cut this client off: its ring is invalid",
		},
		{fmt.Errorf("receive from %s: %w", addr, iwarp.ErrDraining), "receive: the iwarpd of this host is stopping"},
		{fmt.Errorf("receive from %s: %w", addr, flushed), "receive: tcp: connection reset by peer: the program or the iwarpd there has ended"},
		{fmt.Errorf("receive from %s: %w", addr, context.Canceled), "this server was stopped"},
	} {
		var out strings.Builder
		c := &command{out: &out}
		c.served(netip.MustParseAddrPort(addr), filecopy.Event{Put: true, Name: "f", Err: tt.err})
		if want := addr + ": put \"f\": " + tt.want + "\n"; out.String() != want {
			t.Errorf("serve: got %q; want %q", out.String(), want)
		}
	}
}

// TestRefusals checks that each refusal of this host's daemon, and each fault of this host, has its exit code, which is not that of the
// other host.
func TestRefusals(t *testing.T) {
	here := map[ctrlpb.Code]int{
		ctrlpb.Code_CODE_INVALID: exitUsage, ctrlpb.Code_CODE_ADDRESS: exitUsage, ctrlpb.Code_CODE_DRAINING: exitDaemon,
		ctrlpb.Code_CODE_UNREACHABLE: exitPeer, ctrlpb.Code_CODE_TIMEOUT: exitPeer, ctrlpb.Code_CODE_REFUSED: exitPeer,
		ctrlpb.Code_CODE_REJECTED: exitPeer, ctrlpb.Code_CODE_PROTOCOL: exitPeer, ctrlpb.Code_CODE_CANCELED: exitPeer,
	}
	for n := range ctrlpb.Code_name {
		code := ctrlpb.Code(n)
		want, ok := here[code]
		if !ok {
			want = exitFailure
		}
		if code == ctrlpb.Code_CODE_UNSPECIFIED {
			continue
		}
		for _, op := range []string{"ping", "perf write", "cp", "nfs"} {
			d := &iwarp.Error{Op: "connection", Code: code, Text: "no answer"}
			for _, err := range []error{d, fmt.Errorf("x: %w", d), &iwarp.WCError{Status: iwarp.WCFlushErr, Cause: d}} {
				if got := exitCode(t.Context(), peerFailed(op, "10.0.0.1:7174", err)); got != want {
					t.Errorf("%s: %v, %T: exit code %d; want %d", op, code, err, got, want)
				}
			}
		}
	}
	for err, want := range map[error]int{
		fmt.Errorf("iwarp: make a connection: %w", unix.EMFILE): exitFailure,
		iwarp.ErrPeerClosed: exitPeer,
		fmt.Errorf("%w: it cannot be read from: %w", iwarp.ErrDaemonGone, unix.ECONNRESET): exitDaemon,
	} {
		if got := exitCode(t.Context(), peerFailed("perf write", "10.0.0.1:7175", err)); got != want {
			t.Errorf("%v: exit code %d; want %d", err, got, want)
		}
	}
}

// TestQuota checks that a quota of this host is not taken for a failure of the peer.
func TestQuota(t *testing.T) {
	err := peerFailed("cp", "10.0.0.1:7176", &iwarp.Error{Op: "connect", Code: ctrlpb.Code_CODE_QUOTA, Text: "uid 0 has 1 connected or TIME-WAIT port, its limit is 1"})
	if got, want := reason(err), "cp: uid 0 has 1 connected or TIME-WAIT port, its limit is 1"; got != want || exitCode(t.Context(), err) != exitFailure {
		t.Errorf("got %q, exit code %d; want %q, %d", got, exitCode(t.Context(), err), want, exitFailure)
	}
}

// asProgram makes the test binary run as iwarpctl.
const asProgram = "TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// TestHangup checks that the end of a terminal ends a command in order, so that cp leaves no temporary file, but for
// nohup(1).
func TestHangup(t *testing.T) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, unix.SIGHUP) // so that programs do not ignore it if the tests run under nohup
	defer signal.Stop(hangup)
	for _, ignored := range []bool{false, true} {
		socket := filepath.Join(t.TempDir(), "silent.sock")
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		command := `exec "$@"`
		if ignored {
			command = `trap "" HUP; exec "$@"`
		}
		cmd := exec.CommandContext(t.Context(), "sh", "-c", command, "sh", os.Args[0], "--socket", socket, "status")
		cmd.Env = append(os.Environ(), asProgram+"=1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		conn, err := l.Accept() // it runs
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		want := exitInterrupted
		if err := cmd.Process.Signal(unix.SIGHUP); err != nil {
			t.Fatal(err)
		}
		if ignored {
			conn.Close()
			want = exitDaemon
		}
		if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != want {
			t.Errorf("ignored %v: %v; want exit code %d", ignored, cmd.ProcessState, want)
		}
	}
}

// TestSecondSignal checks that signals end a command that waits in a write to its standard output.
func TestSecondSignal(t *testing.T) {
	r, w := testenv.Pipe(t)
	size, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, os.Getpagesize())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "completion", "bash") // longer than a page
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	testenv.Until(t, "signals end it", func() bool {
		if n, err := unix.IoctlGetInt(int(r.Fd()), unix.TIOCINQ); err != nil {
			t.Fatal(err)
		} else if n < size {
			return false
		}
		_ = cmd.Process.Signal(unix.SIGTERM)
		select {
		case err := <-done:
			if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != unix.SIGTERM {
				t.Errorf("%v; want it ended by SIGTERM", err)
			}
			return true
		default:
			return false
		}
	})
}

// TestStuck checks that status fails if a worker does not answer.
func TestStuck(t *testing.T) {
	if err := stuck(&ctrlpb.StatusReply{Workers: 4}); err != nil {
		t.Error(err)
	}
	if err := stuck(&ctrlpb.StatusReply{Workers: 4, Silent: []uint32{3}}); err == nil || !strings.Contains(err.Error(), "worker 3 does not answer") {
		t.Error(err)
	}
	err := stuck(&ctrlpb.StatusReply{Workers: 4, Silent: []uint32{1, 3}})
	if exitCode(t.Context(), err) != exitFailure || !strings.Contains(err.Error(), "workers [1 3] do not answer") {
		t.Errorf("exit code %d: %v", exitCode(t.Context(), err), err)
	}
}
