package rpcrdma

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/subnet"
)

// TestReplaceable checks which connection of a full server makes room for a new one.
func TestReplaceable(t *testing.T) {
	now := time.Now()
	addrs := map[string]string{
		"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "net 1": "2001:db8::1", "net 2": "2001:db8::2", "net 3": "2001:db8::3",
	}
	type conn struct {
		peer string
		idle time.Duration
		busy bool
	}
	for _, tt := range []struct {
		name  string
		conns []conn
		peer  string
		want  int // index, or -1
	}{
		{"the least recently used", []conn{{"a", 1, false}, {"a", 3, false}, {"a", 2, false}}, "b", 1},
		{"not the busy", []conn{{"a", 1, false}, {"a", 3, true}, {"a", 2, false}}, "b", 2},
		{"all busy", []conn{{"a", 1, true}, {"a", 3, true}, {"a", 2, true}}, "b", 1},
		{"all busy, equal shares", []conn{{"a", 1, true}, {"a", 2, true}, {"b", 3, true}}, "b", -1},
		{"idle for long before busy", []conn{{"a", 1, true}, {"a", idleWait + 1, true}, {"b", idleWait, false}}, "c", 2},
		{"its own", []conn{{"a", 1, false}, {"a", 3, false}}, "a", -1},
		{"of the largest client", []conn{{"a", 1, false}, {"a", 2, false}, {"b", 3, false}}, "c", 1},
		{"equal shares", []conn{{"a", 1, false}, {"a", 2, false}, {"b", 3, false}}, "b", -1},
		{"one each", []conn{{"a", 1, false}, {"b", 2, false}}, "c", -1},
		{"one each, idle for long", []conn{{"a", idleWait, false}, {"b", 2, false}}, "c", 0},
		{"busy for long", []conn{{"a", idleWait, true}, {"b", 2, false}}, "c", -1},
		{"one each of a network", []conn{{"net 1", 1, false}, {"net 2", 3, false}, {"net 3", 2, false}}, "c", 1},
		{"within a network", []conn{{"net 1", 1, false}, {"net 2", 2, false}}, "net 3", -1},
		{"two of a network and two of an address", []conn{{"net 1", 1, false}, {"net 2", 2, false}, {"a", 3, false}, {"a", 4, false}}, "net 3", 3},
		{"its own, idle for long", []conn{{"a", idleWait + 1, false}, {"a", idleWait, false}}, "a", 0},
	} {
		conns, index, shares := make(map[*Conn]struct{}), make(map[*Conn]int), make(subnet.Peers[holding])
		share := func(peer string) *share {
			return shares.Find(netip.MustParseAddr(addrs[peer]), func(bool) holding { return holding{} })
		}
		for i, x := range tt.conns {
			c := &Conn{accepted: true, held: share(x.peer), began: now.Add(-time.Hour)}
			shares.Add(c.held)
			c.used.Store(int64(time.Hour - x.idle))
			if at := c.lastUsed(); !strings.Contains(at.String(), " m=") {
				t.Fatalf("%v is a time of day, which may jump", at)
			}
			if x.busy {
				c.serving.Store(1)
			}
			conns[c], index[c] = struct{}{}, i
		}
		got := -1
		if c := replaceable(conns, share(tt.peer), now); c != nil {
			got = index[c]
		}
		if got != tt.want {
			t.Errorf("%s: connection %d makes room, want %d", tt.name, got, tt.want)
		}
	}
}
