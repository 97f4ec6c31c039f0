package ctrl

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/mpa"
)

// fakeProgram is an XDP program that the test can detach.
type fakeProgram struct {
	off   atomic.Bool
	fails error // of Attach
	tries int
	then  func() // called at the end of Attach; nil: nothing
}

func (p *fakeProgram) Attached() (bool, error) { return !p.off.Load(), nil }

func (p *fakeProgram) Attach() error {
	p.tries++
	if p.fails == nil {
		p.off.Store(false)
	}
	if p.then != nil {
		p.then()
	}
	return p.fails
}

// detachable is a harness with an established connection, a connect that the peer has not answered, and a request
// that waits for its client.
func detachable(t *testing.T, cfg Config) (h *harness, c *tclient, up *mpaPeer, logs *observer.ObservedLogs) {
	h = newHarness(t, cfg)
	c, up, logs = h.busy(t)
	return h, c, up, logs
}

// busy makes the connections of detachable on h.
func (h *harness) busy(t *testing.T) (c *tclient, up *mpaPeer, logs *observer.ObservedLogs) {
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	c = h.hello(t)
	up, _ = h.dial(t, c, reqConnect(c.qp(), peerA.String()), mpa.DefaultConfig())
	up.accept("", -1, -1)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: up.id})
	if c.event().GetEstablished() == nil {
		t.Fatal("not established")
	}
	c.ok(reqListen("", 7174))
	h.arrive(t, "10.0.0.3:1", 7174, mpa.DefaultConfig()).send()
	if c.event().GetConnectRequest() == nil {
		t.Fatal("no request")
	}
	c.ok(reqConnect(c.qp(), "10.0.0.4:7174"))
	h.e.await(t, "connect")
	return c, up, logs
}

func (h *harness) value(t *testing.T, name string) uint64 {
	t.Helper()
	for _, k := range h.Counters() {
		if k.Name == name {
			return k.Value
		}
	}
	t.Fatalf("no counter %s", name)
	return 0
}

// TestDetachEnd checks that when the program is detached every connection ends with that reason, and that new ones
// are refused until it is back.
func TestDetachEnd(t *testing.T) {
	h, c, up, logs := detachable(t, Config{})
	p, d := &fakeProgram{}, h.devices[0]
	d.Program = p
	h.checkProgram(d)
	if up, abort := up.ended(); up || abort || h.Status().Detached != "" || h.value(t, "ctrl.program_detached") != 0 {
		t.Fatal("ended while the program was attached")
	}
	p.off.Store(true)
	const why = "the XDP program was detached from the interface eth9"
	for range 3 {
		h.checkProgram(d)
	}
	if p.tries != 0 {
		t.Error("attached again without leave")
	}
	var failed, gone bool
	for range 2 {
		switch e := c.event(); {
		case e.GetConnectFailed() != nil:
			failed = strings.Contains(e.GetConnectFailed().Error.Text, why)
		case e.GetConnectGone() != nil:
			gone = strings.Contains(e.GetConnectGone().Error.Text, why)
		default:
			t.Errorf("event %v", e)
		}
	}
	if !failed || !gone {
		t.Errorf("reason of the connect %v, of the request %v", failed, gone)
	}
	if _, abort := up.ended(); !abort {
		t.Error("the peer of the connection gets no reset")
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: up.id})
	if d := c.event().GetDisconnected(); d == nil || !strings.Contains(d.GetError().GetText(), why) {
		t.Errorf("event %v", d)
	}
	const code = ctrlpb.Code_CODE_UNREACHABLE
	for _, req := range []*ctrlpb.Request{reqListen("", 7175), reqConnect(c.qp(), peerA.String())} {
		if text := c.fails(code, req); !strings.Contains(text, why) {
			t.Errorf("refused for %q", text)
		}
	}
	if h.value(t, "ctrl.program_detached") != 1 || h.value(t, "ctrl.program_detachments") != 1 || !strings.Contains(h.Status().Detached, why) {
		t.Errorf("status %q", h.Status().Detached)
	}
	if n := logs.FilterMessageSnippet("detached").Len(); n != 1 {
		t.Errorf("%d lines in the log; want 1", n)
	}
	// The administrator changes the setting back.
	h.Reload(Config{Detached: DetachAttach})
	h.checkProgram(d)
	if p.off.Load() || h.Status().Detached != "" || h.value(t, "ctrl.program_detached") != 0 {
		t.Error("not attached after the reload")
	}
	c.ok(reqListen("", 7175))
}

// TestDetachAttach checks that the program is attached again and connections stay. If that fails they end, and
// attaching is retried.
func TestDetachAttach(t *testing.T) {
	h, c, up, logs := detachable(t, Config{Detached: DetachAttach})
	p, d := &fakeProgram{}, h.devices[0]
	p.off.Store(true)
	d.Program = p
	h.checkProgram(d)
	if _, abort := up.ended(); abort || p.off.Load() || h.Status().Detached != "" {
		t.Error("the connection was ended, or the program is off")
	}
	if h.value(t, "ctrl.program_detachments") != 1 || logs.FilterMessageSnippet("attached again").Len() != 1 {
		t.Errorf("logged %v", logs.All())
	}
	c.ok(reqListen("", 7175))
	p.off.Store(true)
	p.fails = errors.New("another program is there")
	for range 3 {
		h.checkProgram(d)
	}
	if _, abort := up.ended(); !abort || h.Status().Detached == "" || p.tries != 4 {
		t.Errorf("after a failure: reset %v, status %q, %d tries", abort, h.Status().Detached, p.tries)
	}
	p.fails = nil
	h.checkProgram(d)
	if h.Status().Detached != "" || p.off.Load() || h.value(t, "ctrl.program_detachments") != 2 {
		t.Errorf("status %q", h.Status().Detached)
	}
	c.ok(reqListen("", 7176))
}

// TestDetachUnplug checks that an interface that is removed while its program is attached again stays removed, whether
// that succeeds or not.
func TestDetachUnplug(t *testing.T) {
	for _, fails := range []error{nil, errors.New("no such device")} {
		h := newHarness(t, Config{Detached: DetachAttach})
		d := h.devices[0]
		p := &fakeProgram{fails: fails, then: func() { h.Unplug(d.Name) }}
		p.off.Store(true)
		d.Program = p
		h.checkProgram(d)
		h.mu.Lock()
		if d.down == nil || d.detached || !strings.Contains(d.down.Error(), "was removed") {
			t.Errorf("attaching: %v; down: %v, detached %v", fails, d.down, d.detached)
		}
		h.mu.Unlock()
	}
}

// TestWatchProgram checks with a virtual clock that a server notices within half a second that its program was
// detached, and that closing the server ends the watch.
func TestWatchProgram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeProgram{}
		s, err := New(Config{}, Options{Resolver: fakeResolver{addrA}, NoGuard: true, Devices: []Device{{Name: "eth9", Program: p}}})
		if err != nil {
			t.Fatal(err)
		}
		s.Bind(newFakeEngine())
		defer s.Close()
		synctest.Wait() // the first check is as far away as it can be
		p.off.Store(true)
		time.Sleep(time.Second / 2)
		synctest.Wait()
		if s.Status().Detached == "" {
			t.Error("not noticed within half a second")
		}
	})
}
