package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestJudge: each way in which a connection fails names the step, and a fix.
func TestJudge(t *testing.T) {
	of := func(code ctrlpb.Code) error { return &iwarp.Error{Op: "connect", Code: code, Text: "because"} }
	for _, tt := range []struct {
		err       error
		last      string // the last finding: check and state
		connected bool
	}{
		{nil, "mpa ok", true},
		{of(ctrlpb.Code_CODE_UNREACHABLE), "route fail", false},
		{of(ctrlpb.Code_CODE_REFUSED), "tcp fail", false},
		{of(ctrlpb.Code_CODE_TIMEOUT), "tcp fail", false},
		{fmt.Errorf("connect: %w", context.DeadlineExceeded), "tcp fail", false},
		{&iwarp.RejectError{}, "mpa warn", false},
		{of(ctrlpb.Code_CODE_PROTOCOL), "mpa fail", false},
		{of(ctrlpb.Code_CODE_QUOTA), "connection fail", false},
		{rping.ErrMismatch, "transfer fail", true},
		{&iwarp.WCError{Status: iwarp.WCFlushErr, Cause: of(ctrlpb.Code_CODE_REFUSED)}, "transfer warn", true},
	} {
		l, connected := judge("10.0.0.2:7174", tt.err)
		f := l[len(l)-1]
		if got := f.Check + " " + f.State; got != tt.last || connected != tt.connected || f.State != "ok" && f.Fix == "" && f.Check != "connection" {
			t.Errorf("%v: %s, %v, fix %q; want %s, %v", tt.err, got, connected, f.Fix, tt.last, tt.connected)
		}
	}
}

// TestFindings: a failure is the exit code for the peer.
func TestFindings(t *testing.T) {
	var out strings.Builder
	c := &command{out: &out, err: &out}
	if err := c.findings([]finding{{"route", "ok", "fine", ""}, {"mpa", "warn", "odd", "look"}}); err != nil || !strings.Contains(out.String(), "fix: look") {
		t.Errorf("%v: %s", err, &out)
	}
	if err := c.findings([]finding{{"tcp", "fail", "nothing", "start it"}}); !errors.As(err, new(peerError)) {
		t.Errorf("%v", err)
	}
}
