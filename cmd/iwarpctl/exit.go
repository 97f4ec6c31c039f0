package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// Exit codes.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitDaemon      = 3
	exitPeer        = 4
	exitFile        = 5
	exitData        = 6
	exitInterrupted = 130
)

const exitCodes = `
  0    success, also of what runs until interrupted, such as a server
  1    other failure, such as a limit or a rule of this host
  2    invalid flags or arguments, or an address that this host does not have
  3    iwarpd is not reachable
  4    the other host is unknown, or the connection to it failed or broke
  5    a local or remote file could not be read or written
  6    received data differs from what was sent
  130  interrupted (SIGINT, SIGTERM, SIGHUP) before it was done`

// usageError is an error in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// peerError means that a connection to another host failed or broke.
type peerError struct{ error }

func (e peerError) Unwrap() error { return e.error }

// fileError means that a file or folder cannot be used.
type fileError struct{ error }

func (e fileError) Unwrap() error { return e.error }

// peerFailed returns the error of op with the peer at addr, without repeating the address or naming
// internal packages. A quota is exceeded on this host, so the error does not name the peer.
func peerFailed(op, addr string, err error) error {
	failure := &peerFailure{op, addr, err}
	switch code := refusal(err); {
	case code == ctrlpb.Code_CODE_QUOTA:
		return fmt.Errorf("%s: %w", op, err)
	case wrongArgument(code):
		return usageError{failure}
	case code != ctrlpb.Code_CODE_UNSPECIFIED, errors.As(err, new(unix.Errno)): // a failure of the peer has no Errno
		return failure
	}
	return peerError{failure}
}

// listenFailed returns the error of a listener, which has no peer.
func listenFailed(err error) error {
	if wrongArgument(refusal(err)) {
		return usageError{err}
	}
	return err
}

// refusal returns the code with which the daemon of this host refused a request or ended a connection. It is
// CODE_UNSPECIFIED if that is about the connection: the peer, the way to it, or an end on request.
func refusal(err error) ctrlpb.Code {
	if d, ok := errors.AsType[*iwarp.Error](err); ok && !lost(err) && d.Code != ctrlpb.Code_CODE_CANCELED {
		return d.Code
	}
	return ctrlpb.Code_CODE_UNSPECIFIED
}

// lost reports whether a connection failed or broke, or the peer refused it.
func lost(err error) bool {
	return slices.ContainsFunc([]error{
		iwarp.ErrUnreachable, iwarp.ErrTimeout, iwarp.ErrRefused, iwarp.ErrRejected, iwarp.ErrProtocol,
	}, func(e error) bool { return errors.Is(err, e) })
}

// wrongArgument reports whether the daemon refused what the command line gives, such as an address that the host does not
// have.
func wrongArgument(code ctrlpb.Code) bool {
	return code == ctrlpb.Code_CODE_INVALID || code == ctrlpb.Code_CODE_ADDRESS
}

type peerFailure struct {
	op, addr string
	err      error
}

func (e *peerFailure) Unwrap() error { return e.err }

func (e *peerFailure) Error() string {
	text := peerReason(e.err, e.addr)
	server := servers[strings.Fields(e.op)[0]]
	if strings.HasPrefix(text, "sctp: ") {
		server += " with the same --transport"
	}
	switch {
	case errors.Is(e.err, iwarp.ErrRefused) && !errors.As(e.err, new(*iwarp.WCError)): // not the reset of a connection
		text += ": nothing listens on that port there: start iwarpctl " + server + ", or check the port"
	case errors.Is(e.err, iwarp.ErrRejected) && (e.op == "ping" || e.op == "nfs"): // the others explain the private data
		text += ": iwarpctl " + server + " has no memory or quota there for another connection, " +
			"or another program listens on that port"
	case strings.HasPrefix(text, "no route"):
		text += ": add a route to it (ip route add)"
	case errors.Is(e.err, iwarp.ErrUnreachable) && !silent.MatchString(text): // the reason is on this host
	case errors.Is(e.err, iwarp.ErrTimeout), errors.Is(e.err, iwarp.ErrUnreachable):
		text += ": is that host up, is iwarpd running there, and does this host reach it?"
	}
	return e.op + ": " + e.addr + ": " + text
}

// silent matches the reasons why a peer is unreachable that are not on this host.
var silent = regexp.MustCompile(`no answer|timed out|unreachable$`)

// daemonEnded replaces the text of iwarp.ErrDaemonGone in the last message of a command. If a reason follows, it is the
// daemon's, which may still run.
var daemonEnded = strings.NewReplacer(
	"the daemon is gone: it ", "the iwarpd of this host ",
	"the daemon is gone", "the iwarpd of this host has ended: start it, and try again",
)

// peerReason is reason without the peer's address, which the caller prints, and with advice if the connection was lost.
func peerReason(err error, addr string) string {
	host, _, _ := net.SplitHostPort(addr)
	noZone, _, _ := strings.Cut(host, "%") // as the daemon writes it
	text := strings.ReplaceAll(reason(err), "wait for completions: ", "")
	for _, prefix := range []string{"rpcrdma: ", host + ": ", noZone + ": "} {
		text = strings.TrimPrefix(text, prefix)
	}
	for _, again := range []string{" (peer " + addr + ")", " of " + addr, " with " + addr, " to " + addr, " from " + addr, addr + ": ", " " + addr} {
		text = strings.ReplaceAll(text, again, "")
	}
	text = daemonEnded.Replace(text)
	if errors.Is(err, iwarp.ErrRefused) && errors.As(err, new(*iwarp.WCError)) {
		text += ": the program or the iwarpd there has ended"
	}
	return text
}

// servers maps a client command to its server command.
var servers = map[string]string{"cp": "serve", "ping": "ping -s", "perf": "perf --server", "nfs": "nfs export"}

// reason returns the text of err for a user, without the operation if the daemon's text follows, and without the
// completion that a lost connection flushed.
func reason(err error) string {
	text := printable.Error(err)
	if wc, ok := errors.AsType[*iwarp.WCError](err); ok && wc.Cause != nil {
		text = strings.Replace(text, printable.Error(wc), printable.Error(wc.Cause), 1)
	}
	if d, ok := errors.AsType[*iwarp.Error](err); ok {
		text = strings.Replace(text, printable.Error(d), d.Text, 1)
	}
	return text
}

// exitCode returns the exit code for the error of a command.
func exitCode(ctx context.Context, err error) int {
	var (
		usage  usageError
		peer   peerError
		daemon *daemonError
		remote *filecopy.RemoteError
		local  *filecopy.Error
		path   *fs.PathError
		file   fileError
		term   *iwarp.TerminateError
		reject *iwarp.RejectError
	)
	switch {
	case err == nil:
		return exitOK
	case ctx.Err() != nil:
		return exitInterrupted
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &daemon), errors.Is(err, iwarp.ErrDaemonGone):
		return exitDaemon
	case errors.Is(err, rping.ErrMismatch):
		return exitData
	case errors.As(err, &remote):
		return copyCode(remote.Code)
	case errors.As(err, &local):
		return copyCode(local.Code)
	case errors.As(err, &path), errors.As(err, &file):
		return exitFile
	case errors.As(err, &peer), errors.As(err, &term), errors.As(err, &reject), errors.Is(err, iwarp.ErrPeerClosed):
		return exitPeer
	}
	return exitFailure
}

func copyCode(c filecopy.Code) int {
	switch c {
	case filecopy.CodeName, filecopy.CodeNotFound, filecopy.CodePermission, filecopy.CodeNoSpace, filecopy.CodeIO:
		return exitFile
	case filecopy.CodeChecksum:
		return exitData
	}
	return exitFailure
}
