package ctrl

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/clock"
)

// TestName checks that a name truncated within a character does not break the list.
func TestName(t *testing.T) {
	h := newHarness(t, Config{})
	c := h.client(t)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1, Name: strings.Repeat("a", maxName-1) + "\u00e9"}}})
	list := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{}}}).GetClients().Clients
	if len(list) != 1 || list[0].Name != strings.Repeat("a", maxName-1) {
		t.Errorf("clients %v", list)
	}
}

// TestNameEscaped checks that control characters in a program's name are escaped for terminals and logs.
func TestNameEscaped(t *testing.T) {
	h := newHarness(t, Config{})
	core, logs := observer.New(zap.DebugLevel)
	h.log = zap.New(core)
	c := h.client(t)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1, Name: "a\x1b[2J\n\u009b1m\u202e"}}})
	const want = `a\u001b[2J\u000a\u009b1m\u202e`
	list := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{}}}).GetClients().Clients
	if len(list) != 1 || list[0].Name != want {
		t.Errorf("clients %v; want the name %s", list, want)
	}
	for _, e := range logs.FilterMessage("client").All() {
		if got := e.ContextMap()["name"]; got != want {
			t.Errorf("logged %q; want %q", got, want)
		}
	}
}

// TestCutOffLog checks that a client that is disconnected and returns repeatedly does not fill the log.
func TestCutOffLog(t *testing.T) {
	h := newHarness(t, Config{})
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	cut := func(n int) (times []uint64) {
		for range n {
			c := h.hello(t)
			if err := c.c.Write([]byte("no request"), nil); err != nil {
				t.Fatal(err)
			}
			for c.next() != nil {
			}
		}
		h.settled(t)
		for _, e := range logs.FilterMessage("client cut off").TakeAll() {
			times = append(times, e.ContextMap()["times"].(uint64))
		}
		logs.TakeAll()
		return times
	}
	if got := cut(5); !slices.Equal(got, []uint64{1}) {
		t.Errorf("logged %v; want 1", got)
	}
	h.advance(logEvery)
	if got := cut(1); !slices.Equal(got, []uint64{5}) {
		t.Errorf("logged %v; want 5", got)
	}
}

// TestUnsentLog checks that the log says why a client was cut off to which the kernel takes no message.
func TestUnsentLog(t *testing.T) {
	h := newHarness(t, Config{})
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	c := h.hello(t)
	h.mu.Lock()
	for _, s := range h.sessions {
		_ = s.queue(&outMessage{b: make([]byte, seqpacket.MaxPacket+1)}) // an error as good as any
	}
	h.mu.Unlock()
	for c.next() != nil {
	}
	h.settled(t)
	lines := logs.FilterMessage("client cut off").All()
	if len(lines) != 1 || !strings.Contains(fmt.Sprint(lines[0].ContextMap()["error"]), "cannot be sent") {
		t.Errorf("logged %v", logs.All())
	}
}

// TestRefusedLog checks that a client that is refused repeatedly does not fill the log.
func TestRefusedLog(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{Clients: 1}})
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	h.hello(t)
	for _, step := range []struct {
		after   time.Duration
		clients int
		times   []uint64 // of the log lines
	}{{0, 5, []uint64{1}}, {logEvery, 1, []uint64{5}}, {logEvery - 1, 3, nil}, {1, 2, []uint64{4}}} {
		h.advance(step.after)
		for range step.clients {
			c := h.client(t)
			c.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
			c.c.Close()
		}
		var times []uint64
		for _, e := range logs.TakeAll() {
			if e.Message == "client refused" {
				times = append(times, e.ContextMap()["times"].(uint64))
			}
		}
		if !slices.Equal(times, step.times) {
			t.Errorf("%d clients: logged %v; want %v", step.clients, times, step.times)
		}
	}
}

func TestSeldom(t *testing.T) {
	var s logLimit
	var logged []clock.Time
	for at := clock.Time(1e9); at < 1e9+clock.Time(25*time.Second); at = at.Add(100 * time.Millisecond) {
		if s.now(at) {
			logged = append(logged, at)
		}
	}
	if want := []clock.Time{1e9, 11e9, 21e9}; !slices.Equal(logged, want) {
		t.Errorf("logged at %v; want %v", logged, want)
	}
}
