package main

import (
	"context"
	"errors"
	"io/fs"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/app/rping"

	iwarp "github.com/iwarpd/iwarpd/client"
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
  0    done
  1    failed for another reason than those below
  2    wrong flags or arguments
  3    no iwarpd could be reached
  4    no connection to the other side, or it broke
  5    a file could not be read or written, here or there
  6    data is not what was sent
  130  interrupted (SIGINT, SIGTERM)`

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// peerError is a connection to another host that was not made, or broke.
type peerError struct{ error }

func (e peerError) Unwrap() error { return e.error }

// fileError is a file or folder that cannot be used.
type fileError struct{ error }

func (e fileError) Unwrap() error { return e.error }

// exitCode finds the exit code for what a command returned.
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
