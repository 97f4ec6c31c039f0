package dataplane

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"
)

// socketsOnly creates an engine over kernel sockets.
func socketsOnly(t *testing.T, cfg Config) *Engine {
	t.Helper()
	socks, err := NewSockets(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socks.Close() })
	e := newEngine(t, cfg, []Queue{{Link: socks, CPU: -1}}, nil)
	return e
}

// startSockets starts an engine over kernel sockets.
func startSockets(t *testing.T, cfg Config) *Engine {
	t.Helper()
	e := socketsOnly(t, cfg)
	e.Start()
	t.Cleanup(e.Stop)
	return e
}

// socketEngine is startSockets. It also returns the events and a free endpoint.
func socketEngine(t *testing.T, addr string) (*Engine, <-chan Event, netip.AddrPort) {
	t.Helper()
	events := make(chan Event, 64)
	e := startSockets(t, Config{OnEvent: func(ev Event) { events <- ev }})
	return e, events, freeEndpoint(t, addr)
}

// socketListener creates a worker over kernel sockets, to be run by the test, with a listener.
func socketListener(t *testing.T, backlog int) (*worker, netip.AddrPort) {
	t.Helper()
	w := socketsOnly(t, Config{}).workers[0]
	t.Cleanup(w.closeFDs)
	at := freeEndpoint(t, "127.0.0.1")
	listen(t, w, 1, &ListenRequest{Local: at, Backlog: backlog})
	return w, at
}

// freeEndpoint returns addr with a port that no socket uses.
func freeEndpoint(t *testing.T, addr string) netip.AddrPort {
	t.Helper()
	hold, err := net.Listen("tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	return hold.Addr().(*net.TCPAddr).AddrPort()
}

func awaitEvent(t *testing.T, events <-chan Event, kind EventKind) Event {
	t.Helper()
	for limit := time.After(time.Minute); ; {
		select {
		case ev := <-events:
			if ev.Kind == kind {
				return ev
			}
		case <-limit:
			t.Fatalf("no event %d", kind)
		}
	}
}

// TestSocketResetAfterFIN checks that the peer's RST ends a connection also after the peer's FIN,
// with and without data to send.
func TestSocketResetAfterFIN(t *testing.T) {
	for name, send := range map[string]int{"idle": 0, "sending": 64 << 20} {
		t.Run(name, func(t *testing.T) {
			e, events, at := socketEngine(t, "127.0.0.1")
			if _, err := e.Listen(ListenRequest{Local: at, Backlog: 8, Stream: true}); err != nil {
				t.Fatal(err)
			}
			c := dialTCP(t, at.String())
			id := awaitEvent(t, events, EventAccepted).Conn
			if err := c.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			awaitEvent(t, events, EventPeerClosed)
			if send > 0 {
				e.StreamSend(id, make([]byte, send))
			}
			if err := c.(*net.TCPConn).SetLinger(0); err != nil {
				t.Fatal(err)
			}
			c.Close()
			if ev := awaitEvent(t, events, EventClosed); ev.Conn != id || ev.Err == nil {
				t.Errorf("%+v", ev)
			}
		})
	}
}

// TestSocketFINAndReset checks that a RST ends a connection whose FIN the worker has not yet read: the
// kernel then reports both as one change, and a read only the FIN.
func TestSocketFINAndReset(t *testing.T) {
	w, at := socketListener(t, 8)
	conn := dialTCP(t, at.String())
	c := conn.(*net.TCPConn)
	defer c.Close()
	for len(w.streams) == 0 {
		w.turn()
	}
	if err := errors.Join(c.CloseWrite(), c.SetLinger(0), c.Close()); err != nil {
		t.Fatal(err)
	}
	for late := time.Now().Add(time.Minute); len(w.streams) > 0; w.turn() {
		if time.Now().After(late) {
			t.Fatal("the connection lasts")
		}
	}
}

// TestSocketDataAndFIN checks that a FIN is read that the kernel reports in one change with the data before it.
func TestSocketDataAndFIN(t *testing.T) {
	w, at := socketListener(t, 8)
	c := dialTCP(t, at.String()).(*net.TCPConn)
	for len(w.streams) == 0 {
		w.turn()
	}
	if _, err := c.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	var got []EventKind
	for late := time.Now().Add(time.Minute); len(got) == 0 || got[len(got)-1] != EventPeerClosed; w.turn() {
		for _, f := range w.e.events.q {
			f(func(ev Event) { got = append(got, ev.Kind) })
		}
		w.e.events.q = nil
		if time.Now().After(late) {
			t.Fatalf("events %v", got)
		}
	}
	if len(got) < 2 || got[len(got)-2] != EventData {
		t.Errorf("events %v", got)
	}
}

// TestSocketLongStream checks that all of what a connection sends arrives, though the kernel may take each part of it
// at once, and then does not report that there is room.
func TestSocketLongStream(t *testing.T) {
	e, events, at := socketEngine(t, "127.0.0.1")
	if _, err := e.Listen(ListenRequest{Local: at, Backlog: 8, Stream: true}); err != nil {
		t.Fatal(err)
	}
	c := dialTCP(t, at.String())
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64*socketQueue)
	e.StreamSend(awaitEvent(t, events, EventAccepted).Conn, b)
	if n, err := io.ReadFull(c, make([]byte, len(b))); err != nil {
		t.Errorf("%d of %d bytes arrive: %v", n, len(b), err)
	}
}
