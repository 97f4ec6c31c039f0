package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestJudge checks that each way in which a connection fails names the step and a fix.
func TestJudge(t *testing.T) {
	of := func(code ctrlpb.Code) error { return &iwarp.Error{Op: "connect", Code: code, Text: "because: do this"} }
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
		{of(ctrlpb.Code_CODE_PERMISSION), "connection fail", false},
		{rping.ErrMismatch, "transfer fail", true},
		{&iwarp.WCError{Status: iwarp.WCFlushErr, Cause: of(ctrlpb.Code_CODE_REFUSED)}, "transfer warn", true},
	} {
		l, connected := judge("10.0.0.2:7174", tt.err)
		f := l[len(l)-1]
		if got := f.Check + " " + f.State; got != tt.last || connected != tt.connected || f.State != "ok" && f.Fix == "" {
			t.Errorf("%v: %s, %v, fix %q; want %s, %v", tt.err, got, connected, f.Fix, tt.last, tt.connected)
		}
	}
}

// TestInterfaces checks that doctor names each interface of the daemon that receives no frames.
func TestInterfaces(t *testing.T) {
	l := interfaces("iwarpd 1", &ctrlpb.StatusReply{Detached: "detached", Devices: []*ctrlpb.DeviceAttr{
		{Interface: "eth0", Mtu: 1500, Link: "up"}, {Interface: "eth1", Down: "removed"}, {Interface: "eth2", Down: "detached"},
		{Interface: "eth3", Link: "down"}, {Interface: "any"},
	}})
	var got []string
	for _, f := range l {
		got = append(got, f.State)
		if f.State != "ok" && f.Fix == "" {
			t.Errorf("no fix: %+v", f)
		}
	}
	if !slices.Equal(got, []string{"ok", "fail", "fail", "warn", "ok"}) || !strings.Contains(l[0].Text, "eth0, MTU 1500") || !strings.Contains(l[3].Text, "eth3") {
		t.Errorf("%+v", l)
	}
}

// TestFindings checks that a failed finding about the peer gives the exit code for it, and one about this host does not.
func TestFindings(t *testing.T) {
	var out strings.Builder
	c := &command{out: &out, err: &out}
	if err := c.findings([]finding{{"route", "ok", "fine", ""}, {"mpa", "warn", "odd", "look"}}); err != nil || !strings.Contains(out.String(), "fix: look") {
		t.Errorf("%v: %s", err, &out)
	}
	for check, want := range map[string]int{"tcp": exitPeer, "connection": exitFailure, "daemon": exitFailure} {
		if code := exitCode(t.Context(), c.findings([]finding{{check, "fail", "nothing", "start it"}})); code != want {
			t.Errorf("%s: exit code %d; want %d", check, code, want)
		}
	}
}

// TestAscend checks that doctor finds the MTU of the path with one failure, and that the finding names it.
func TestAscend(t *testing.T) {
	if !slices.IsSorted(commonMTUs) {
		t.Fatal("commonMTUs are not sorted")
	}
	const mtu = 9000
	for path, want := range map[int]int{0: 0, 1279: 0, 1280: 1280, 1459: 1450, 1500: 1500, 8999: 8950, mtu: mtu} {
		failed := 0
		pass, err := ascend(sizes(mtu, "10.0.0.2:7174"), func(t trial) error {
			if t.size == rping.MaxSize && path < mtu || t.size < rping.MaxSize && t.size+packetOverhead-20 > path {
				failed++
				return errors.New("lost")
			}
			return nil
		})
		if pass != want || failed > 1 || (err == nil) != (path == mtu) {
			t.Errorf("path of %d: %d, %v after %d failures; want %d", path, pass, err, failed, want)
		}
		if f := largePackets(silence{mtu, time.Second}, mtu, pass); f.State != "fail" || strings.Contains(f.Fix, fmt.Sprintf("mtu: %d on both", want)) != (want > 0) {
			t.Errorf("path of %d: %+v", path, f)
		}
	}
	// A server that has ended, or that rejects the next client, says nothing about the MTU.
	for _, err := range []error{&iwarp.Error{Code: ctrlpb.Code_CODE_REFUSED, Text: "refused"}, &iwarp.RejectError{}, &iwarp.WCError{Status: iwarp.WCFlushErr}} {
		if f := largePackets(err, mtu, 1450); f.State != "warn" || !strings.Contains(f.Text, "not tried") || !strings.Contains(f.Fix, "ping -s -P") {
			t.Errorf("%v: %+v", err, f)
		}
	}
	if f := largePackets(rping.ErrMismatch, mtu, 1450); f.State != "fail" || strings.Contains(f.Fix, "mtu") {
		t.Errorf("%+v", f)
	}
	if l := sizes(1500, "[fd00::1]:7174"); l[len(l)-1] != (trial{1500, rping.MaxSize}) || l[len(l)-2] != (trial{1492, 1492 - packetOverhead}) {
		t.Errorf("an MTU of 1500: %v", l)
	}
}
