package main

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestWatchLink checks that changes of the interface are logged, and that its state is known.
func TestWatchLink(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	var state atomic.Pointer[hostnet.LinkState]
	core, logs := observer.New(zap.InfoLevel)
	expect := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); logs.FilterMessageSnippet(what).Len() == 0; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("no %q in %v", what, logs.All())
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	started := make(chan struct{})
	go func() {
		defer close(done)
		_ = v.A.NS.Do(func() error {
			close(started)
			watchLink(ctx, zap.New(core), v.A.Name, &state)
			return nil
		})
	}()
	defer func() { cancel(); <-done }()
	<-started
	ip := func(args ...string) {
		t.Helper()
		if out, err := v.A.NS.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	// The first change may precede the subscription: repeat it until it is logged.
	for n := 0; logs.FilterMessageSnippet("the MTU of the interface changed").Len() == 0; n++ {
		if n == 600 {
			t.Fatal("no change of the MTU seen")
		}
		ip("link", "set", v.A.Name, "mtu", strconv.Itoa(1400+n%2))
		time.Sleep(50 * time.Millisecond)
	}
	ip("route", "add", "192.0.2.0/24", "dev", v.A.Name)
	expect("routes over the interface changed")
	ip("link", "set", v.A.Name, "down")
	expect("the link is down")
	if s := state.Load(); s == nil || s.Up {
		t.Errorf("state %+v; want it down", s)
	}
	ip("link", "set", v.A.Name, "up")
	expect("the link is up")
	if s := state.Load(); s == nil || !s.Up || s.Speed != 10e9 { // what veth reports
		t.Errorf("state %+v; want it up with 10 Gbit/s", s)
	}
}
