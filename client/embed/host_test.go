package embed_test

import "testing"

// withinHost makes pair start one node, which connects to itself.
var withinHost bool

// TestWithinHost runs the tests of programs over connections within one host.
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
		t.Run(tt.name, tt.f)
	}
}
