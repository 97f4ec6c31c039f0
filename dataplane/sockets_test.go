package dataplane

import (
	"net"
	"testing"
	"time"
)

// TestSocketReadsAreBounded checks that a turn reads a bounded amount from the connections that
// have data, and that the next turn begins with those that were not read.
func TestSocketReadsAreBounded(t *testing.T) {
	const conns, each = 32, 48 << 10
	socks, err := NewSockets(0)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[ConnID]int)
	e, err := New(Config{}, []Queue{{Link: socks, CPU: -1}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := e.workers[0]
	defer w.closeFDs()
	defer socks.Close()
	at := freeEndpoint(t, "127.0.0.1")
	if err := w.listen(1, &ListenRequest{Local: at, Backlog: conns}); err != nil {
		t.Fatal(err)
	}
	for range conns {
		c, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(make([]byte, each)); err != nil {
			t.Fatal(err)
		}
	}
	drain := func() (n int) {
		for _, f := range e.events.q {
			f(func(ev Event) {
				if ev.Kind == EventData {
					got[ev.Conn] += len(ev.Data)
					n += len(ev.Data)
				}
			})
		}
		e.events.q = nil
		return n
	}
	first := 0 // turns until each connection was read
	for late := time.Now().Add(time.Minute); ; first++ {
		w.turn()
		if n := drain(); n > socketTurn+socketRead {
			t.Fatalf("%d bytes in a turn", n)
		}
		all := len(w.streams) == conns
		for id := range w.streams {
			all = all && got[id] == each
		}
		if all {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("within a minute: %v", got)
		}
	}
}
