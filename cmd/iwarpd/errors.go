package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/nss"
)

// Exit codes, as --help lists them.
const (
	exitOK         = 0
	exitFailure    = 1 // other failure
	exitConfig     = 2 // invalid flag, key or value; limit of the process too low
	exitInterface  = 3 // no such interface, no address, no such queue
	exitPermission = 4 // missing capability or file permission
	exitBusy       = 5 // interface, queue, socket or address for metrics is in use
)

// An exitError is an error that decides the exit code.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func exitErr(code int, format string, args ...any) error {
	return &exitError{code, fmt.Errorf(format, args...)}
}

func configErr(format string, args ...any) error {
	return exitErr(exitConfig, format, args...)
}

// exitCode returns the exit code for err; nil gives exitOK.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	// The configuration may be right, and a directory service late: systemd tries again.
	if errors.As(err, new(*nss.LookupError)) {
		return exitFailure
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		return e.code
	}
	return exitFailure
}

// moreFiles is the remedy for a lack of descriptors.
const moreFiles = "raise the limit with LimitNOFILE=524288 in the unit, or ulimit -n 524288"

// fewFiles adds the remedy to an error caused by a lack of descriptors, which any step of start may
// return.
func fewFiles(err error) error {
	if errors.Is(err, unix.EMFILE) {
		return configErr("%w: "+moreFiles, err)
	}
	return err
}
