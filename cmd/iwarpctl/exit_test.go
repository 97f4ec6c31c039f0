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
	reset := fmt.Errorf("receive: %w", &iwarp.WCError{Status: iwarp.WCFlushErr, Cause: refused})
	if text := peerFailed("ping", "10.0.0.1:7174", reset).Error(); strings.Contains(text, hint) {
		t.Errorf("reset: %s", text)
	}
}
