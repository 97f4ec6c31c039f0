package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"go.uber.org/zap"
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
	asked, verdict := make(chan struct{}), make(chan bool)
	go func() {
		defer close(ended)
		watchdog(ctx, zap.NewNop(), func() bool {
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
		verdict <- true
		expect("WATCHDOG=1")
	}
	for range 3 { // a stuck worker: no message
		<-asked
		verdict <- false
	}
	<-asked
	const mark = "the first message since"
	if _, err := systemd.WriteTo([]byte(mark), systemd.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	expect(mark)
	verdict <- true
	expect("WATCHDOG=1")
	cancel()
	select {
	case <-asked:
		verdict <- false
		<-ended
	case <-ended:
	}
}

// Outside such a unit nothing is sent.
func TestWatchdogOff(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "")
	os.Unsetenv("WATCHDOG_USEC")
	watchdog(t.Context(), zap.NewNop(), func() bool {
		t.Error("asked")
		return true
	})
}
