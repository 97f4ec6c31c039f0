package embed_test

import (
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// withinHost makes pair start one node, which connects to itself.
var withinHost bool

// TestWithinHost runs the tests of programs over connections within one host. Over kernel sockets only those whose connections
// begin or end in another way: between the ends there is no socket.
func TestWithinHost(t *testing.T) {
	defer func() { withinHost = false }()
	withinHost = true
	for _, tt := range []struct {
		name string
		f    func(*testing.T)
	}{
		{"Bulk", TestBulk},
		{"Depths", TestDepths},
		{"ConnSendRecvReadWrite", TestConnSendRecvReadWrite},
		{"Reject", TestReject},
		{"DialFails", TestDialFails},
		{"Terminate", TestTerminate},
		{"Received", TestReceived},
		{"Hole", TestHole},
		{"Register", TestRegister},
		{"Invalidate", TestInvalidate},
		{"WriteRefused", TestWriteRefused},
		{"Cancel", TestCancel},
		{"CQResize", TestCQResize},
		{"FastRegistration", TestFastRegistration},
		{"Sizes", TestSizes},
		{"DelayedMPA", TestDelayedMPA},
		{"StreamEnds", TestStreamEnds},
		{"BothInitiate", TestBothInitiate},
		{"Verbs", TestVerbs},
		{"LateFlush", TestLateFlush},
		{"Window", TestWindow},
		{"ReceiveWait", TestReceiveWait},
		{"ReceiveWaitOver", TestReceiveWaitOver},
	} {
		if testenv.Sockets() && !slices.Contains([]string{"Bulk", "ConnSendRecvReadWrite", "DialFails", "StreamEnds"}, tt.name) {
			continue
		}
		t.Run(tt.name, tt.f)
	}
}
