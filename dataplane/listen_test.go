package dataplane

import (
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
)

// TestListenUndone checks that if one worker cannot listen, none does, over either transport.
func TestListenUndone(t *testing.T) {
	var queues []Queue
	for range 2 {
		a, _ := newPipe(t, link.PipeConfig{})
		queues = append(queues, Queue{Link: a, CPU: -1})
	}
	e := newEngine(t, Config{}, queues, nil)
	e.Start()
	defer e.Stop()
	for _, r := range []ListenRequest{
		{Local: netip.MustParseAddrPort("10.0.0.1:7174"), Backlog: 8},
		{Local: netip.MustParseAddrPort("10.0.0.1:7174"), SCTP: &SCTP{}},
	} {
		second := make(chan error)
		e.workers[1].post(func(w *worker) { second <- w.listen(1<<40, &r) })
		if err := <-second; err != nil {
			t.Fatal(err)
		}
		if _, err := e.Listen(r); err == nil {
			t.Fatalf("%+v: listens twice", r)
		}
		e.Unlisten(1 << 40)
		id, err := e.Listen(r)
		if err != nil {
			t.Errorf("%+v: after it failed once: %v", r, err)
		}
		e.Unlisten(id)
	}
}

// TestStoppedEngine checks that what waits for a worker returns an error when the engine has stopped.
func TestStoppedEngine(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	e := newEngine(t, Config{}, []Queue{{Link: a, CPU: -1}}, fixed{})
	e.Start()
	e.Stop()
	local, remote := netip.AddrPortFrom(addrA, 7174), netip.AddrPortFrom(addrB, 7174)
	over := make(chan error, 3)
	go func() {
		_, err := e.Listen(ListenRequest{Local: local, Backlog: 8})
		over <- err
		over <- e.Connect(e.NewID(local, ""), ConnectRequest{Local: local, Remote: remote})
		over <- e.Connect(e.NewID(local, ""), ConnectRequest{Local: local, Remote: remote, SCTP: &SCTP{}, Join: true})
	}()
	for i := range 3 {
		select {
		case err := <-over:
			if err == nil {
				t.Errorf("call %d: no error", i)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("call %d waits", i)
		}
	}
}
