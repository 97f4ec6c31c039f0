package iwarp

import (
	"context"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestAsyncNegotiate checks that a Negotiate of the draft is reported to the program with its listener.
func TestAsyncNegotiate(t *testing.T) {
	l := &Listener{}
	d := &Device{async: make(chan *AsyncEvent, maxAsync), listens: map[uint32]*Listener{7: l}, done: make(chan struct{})}
	e := &ctrlpb.AsyncError{Kind: ctrlpb.AsyncKind_ASYNC_NEGOTIATE, Listen: 7, Remote: "192.0.2.1:7174", PrivateData: []byte("how about")}
	d.asyncError(e)
	e = &ctrlpb.AsyncError{Kind: ctrlpb.AsyncKind_ASYNC_NEGOTIATE, Listen: 8} // closed meanwhile
	d.asyncError(e)
	ev, err := d.AsyncEvent(context.Background())
	if err != nil || ev.Kind != AsyncNegotiate || ev.Listener != l || ev.Remote.String() != "192.0.2.1:7174" || string(ev.PrivateData) != "how about" || ev.Err != nil {
		t.Errorf("%+v, %v", ev, err)
	}
	if n := len(d.async); n != 0 {
		t.Errorf("%d events of nothing", n)
	}
}
