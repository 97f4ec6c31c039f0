package main

import (
	"fmt"
	"strings"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestReset checks that a missing server is named as the cause only if no connection was made.
func TestReset(t *testing.T) {
	refused := &iwarp.Error{Op: "connection", Code: ctrlpb.Code_CODE_REFUSED, Text: "tcp: connection reset by peer"}
	const hint = "nothing listens on that port"
	if text := peerFailed("ping", "10.0.0.1:7174", refused).Error(); !strings.Contains(text, hint) {
		t.Errorf("refused: %s", text)
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
