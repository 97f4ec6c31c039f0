package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// notifySocket replaces systemd, with a watchdog of the given period.
func notifySocket(t *testing.T, period time.Duration) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", strconv.FormatInt(period.Microseconds(), 10))
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	return c
}

func TestWatchdog(t *testing.T) {
	systemd := notifySocket(t, 20*time.Millisecond)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	asked, verdict := make(chan struct{}), make(chan string)
	go func() {
		defer close(ended)
		watchdog(ctx, zap.NewNop(), func() string {
			asked <- struct{}{}
			return <-verdict
		})
	}()
	expect := func(want string) {
		t.Helper()
		_ = systemd.SetReadDeadline(time.Now().Add(time.Minute))
		b := make([]byte, 64)
		n, err := systemd.Read(b)
		if err != nil || string(b[:n]) != want {
			t.Fatalf("systemd got %q, %v; want %q", b[:n], err, want)
		}
	}
	for range 3 {
		<-asked
		verdict <- ""
		expect("WATCHDOG=1")
	}
	for range 3 { // a stuck worker: no message
		<-asked
		verdict <- "worker 0"
	}
	<-asked
	const mark = "the first message since"
	if _, err := systemd.WriteTo([]byte(mark), systemd.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	expect(mark)
	verdict <- ""
	expect("WATCHDOG=1")
	cancel()
	select {
	case <-asked:
		verdict <- "worker 0"
		<-ended
	case <-ended:
	}
}

// TestWatchdogAlone checks that the daemon logs once that it is stuck, and that it runs again, where systemd has not
// started it.
func TestWatchdogAlone(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "")
	os.Unsetenv("WATCHDOG_USEC")
	t.Setenv("NOTIFY_SOCKET", "")
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.WarnLevel)
		var what atomic.Value
		what.Store("")
		go watchdog(t.Context(), zap.New(core), func() string { return what.Load().(string) })
		var got []string
		const one, both = "worker 0 of eth0", "worker 0 of eth0, the control plane"
		time.Sleep(watchPeriod / 4) // so that it looks between the changes
		for _, next := range []string{"", "", one, one, both, "", ""} {
			what.Store(next)
			time.Sleep(watchPeriod / 2)
			for _, l := range logs.TakeAll() {
				got = append(got, fmt.Sprint(l.Level, " ", l.Message, l.ContextMap()))
			}
		}
		want := []string{
			"error a part of the daemon is stuckmap[part:worker 0 of eth0]",
			"error a part of the daemon is stuckmap[part:worker 0 of eth0, the control plane]",
			"warn all parts of the daemon run againmap[was-stuck:worker 0 of eth0, the control plane]",
		}
		if !slices.Equal(got, want) {
			t.Errorf("the log:\n%q\nwant:\n%q", got, want)
		}
	})
}

// TestStuck checks that the daemon names a worker that does not turn, and a control plane that hangs.
func TestStuck(t *testing.T) {
	a, _, err := link.NewPipe(link.PipeConfig{})
	if err != nil {
		t.Fatal(err)
	}
	var d daemon
	hang := make(chan struct{})
	close(hang)
	transport := func() string { <-hang; return "" }
	addrs := func() []netip.Addr { return nil }
	d.server, err = ctrl.New(ctrl.Config{}, ctrl.Options{Resolver: noHost{}, NoGuard: true,
		Devices: []ctrl.Device{{Name: "eth0", Transport: transport, Addrs: addrs}}})
	if err != nil {
		t.Fatal(err)
	}
	queues := []dataplane.Queue{{Link: a, CPU: -1, Device: "eth0"}}
	d.engine, err = dataplane.New(dataplane.Config{OnEvent: d.server.OnEvent}, queues, noHost{})
	if err != nil {
		t.Fatal(err)
	}
	d.server.Bind(d.engine)
	if got := d.stuck(); got != "worker 0 of eth0" { // it does not run yet
		t.Errorf("before the start %q is stuck", got)
	}
	d.engine.Start()
	defer d.engine.Stop()
	testenv.Until(t, "nothing is stuck", func() bool { return d.stuck() == "" })
	hang = make(chan struct{})
	testenv.Until(t, "the control plane is stuck", func() bool { return d.stuck() == "the control plane" })
	close(hang)
	d.server.Close()
}
