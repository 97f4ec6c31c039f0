package shm

import (
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestFreed frees rings that a client still uses, as the daemon does when it cuts the client off. The zeros that the
// client finds then are neither completions, nor a full ring.
func TestFreed(t *testing.T) {
	cq, c := newCQ(t, 1, 16)
	for i := range 3 {
		cq.Push(0, &verbs.WC{ID: uint64(i) + 10})
	}
	cq.Flush(0, 0)
	var wc [1]verbs.WC
	if n := c.Poll(wc[:]); n != 1 || wc[0].ID != 10 {
		t.Fatalf("Poll = %d, %+v", n, wc[0])
	}
	if err := cq.Free(); err != nil {
		t.Fatal(err)
	}
	if n := c.Poll(wc[:]); n != 0 {
		t.Errorf("Poll of a freed queue = %d, %+v; want 0", n, wc[0])
	}

	sq, s := newSQ(t, 4, 1, 8)
	rq, r := newRQ(t, 4, 1)
	for range 5 { // more than the rings have entries: their free memory is no valid ring
		if err := errors.Join(s.Post(&verbs.SendWR{Op: rdmap.OpSend}), r.Post(&verbs.RecvWR{})); err != nil {
			t.Fatal(err)
		}
		if !sq.NextSend(new(verbs.SendWR)) || !rq.NextRecv(new(verbs.RecvWR)) {
			t.Fatal("not posted")
		}
		sq.Taken()
	}
	if err := errors.Join(sq.Free(), rq.Free()); err != nil {
		t.Fatal(err)
	}
	var serr, rerr error
	for range 5 { // until the index is read again
		serr, rerr = s.Post(&verbs.SendWR{Op: rdmap.OpSend}), r.Post(&verbs.RecvWR{})
	}
	if !errors.Is(serr, ErrFreed) || !errors.Is(rerr, ErrFreed) {
		t.Errorf("Post of a send: %v, of a receive: %v; want ErrFreed", serr, rerr)
	}
}
