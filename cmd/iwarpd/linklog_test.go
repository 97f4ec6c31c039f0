package main

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestWatchLink checks that changes of the interface are logged, that its state is known, and
// that the driver gets its program again when the MTU changes and when the interface is set
// down or up.
func TestWatchLink(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	var r *hostnet.Resolver
	if err := v.A.NS.Do(func() (err error) { r, err = hostnet.New(v.A.Name); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	var state atomic.Pointer[hostnet.LinkState]
	var served atomic.Int32
	served.Store(1500)
	core, logs := observer.New(zap.InfoLevel)
	expect := func(what string) {
		t.Helper()
		testenv.Until(t, "the log says: "+what, func() bool { return logs.FilterMessageSnippet(what).Len() != 0 })
	}
	var renewed atomic.Int32
	renew := func() error {
		renewed.Add(1)
		return errors.New("no such luck")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	started := make(chan struct{})
	go func() {
		defer close(done)
		_ = v.A.NS.Do(func() error {
			close(started)
			watchLink(ctx, zap.New(core), v.A.Name, r.Device(v.A.Name), &state, &served, renew)
			return nil
		})
	}()
	defer func() { cancel(); <-done }()
	<-started
	// The first change may precede the subscription: repeat it until it is logged.
	for n := 0; logs.FilterMessageSnippet("the MTU of the interface changed").Len() == 0; n++ {
		if n == 600 {
			t.Fatal("no change of the MTU seen")
		}
		v.A.NS.IP(t, "link", "set", v.A.Name, "mtu", strconv.Itoa(1400+n%2))
		time.Sleep(50 * time.Millisecond)
	}
	for _, mtu := range []int{1500, 1501, 1400, 1502} {
		v.A.NS.IP(t, "link", "set", v.A.Name, "mtu", strconv.Itoa(mtu))
		testenv.Until(t, "the log has the MTU", func() bool { return logs.FilterField(zap.Int("mtu", mtu)).Len() != 0 })
	}
	for _, e := range logs.FilterFieldKey("mtu").All() {
		m := e.ContextMap()
		if mtu := m["mtu"].(int64); (m["note"] != nil) != (mtu > 1500) {
			t.Errorf("an MTU of %d, where the links are for 1500: %v", mtu, m)
		}
	}
	expect(refused)
	v.A.NS.IP(t, "route", "add", "192.0.2.0/24", "dev", v.A.Name)
	expect("routes over the interface changed")
	for _, up := range []bool{false, true} {
		before, word := renewed.Load(), map[bool]string{false: "down", true: "up"}[up]
		v.A.NS.IP(t, "link", "set", v.A.Name, word)
		expect("the link is " + word)
		if s := state.Load(); s == nil || s.Up != up || up && s.Speed != 10e9 { // values that veth reports
			t.Errorf("set %s: state %+v", word, s)
		}
		testenv.Until(t, "the program is renewed when the link is set "+word, func() bool { return renewed.Load() != before })
	}
	v.A.NS.IP(t, "link", "set", v.A.Name, "down")
	v.A.NS.IP(t, "link", "set", v.A.Name, "name", "other0")
	expect("the interface was renamed")
	v.A.NS.IP(t, "link", "set", "other0", "up")
	testenv.Until(t, "it is up under the other name", func() bool { return state.Load().Up })
	v.A.NS.IP(t, "link", "del", "other0")
	testenv.Until(t, "it is removed", func() bool { return !state.Load().Enabled })
	v.A.NS.IP(t, "link", "add", v.A.Name, "up", "type", "veth", "peer", "name", "other1")
	testenv.Until(t, "there is a new interface of the first name", func() bool { return state.Load().Enabled })
}
