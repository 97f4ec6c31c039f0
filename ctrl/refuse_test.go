package ctrl

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// lingerers returns n TCP sockets whose close waits for an hour, because their peers read
// nothing.
func lingerers(t *testing.T, n int) (fds []int) {
	t.Helper()
	l := testenv.Listen(t)
	t.Cleanup(func() { l.Close() })
	junk := make([]byte, 1<<16)
	for range n {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		at := l.Addr().(*net.TCPAddr)
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: at.Port, Addr: [4]byte(at.IP.To4())}); err != nil {
			t.Fatal(err)
		}
		for unix.Send(fd, junk, unix.MSG_DONTWAIT) == nil {
		}
		if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}); err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	return fds
}

// calling returns how many threads of this process are in a system call. The runtime may have more
// threads than that at any time, which say nothing about the daemon.
func calling(t *testing.T, number int) (n int) {
	t.Helper()
	calls, err := filepath.Glob("/proc/self/task/*/syscall")
	if err != nil || len(calls) == 0 {
		t.Fatalf("no threads in /proc/self/task: %v", err)
	}
	for _, name := range calls {
		call, _ := os.ReadFile(name) // the thread may have ended
		if strings.HasPrefix(string(call), fmt.Sprintf("%d ", number)) {
			n++
		}
	}
	return n
}

// closes closes fd and reports whether that ended soon. If fd is the last reference to a
// socket, its close waits, in a thread of the test.
func closes(fd int) bool {
	closed := make(chan struct{})
	go func() {
		unix.Close(fd)
		close(closed)
	}()
	select {
	case <-closed:
		return true
	case <-time.After(time.Second):
		return false
	}
}

// TestRefusedFiles checks that clients that are refused, or cut off with unread messages, do
// not occupy threads of the daemon. They have sent sockets whose close waits, and each close
// could block a thread. The Go runtime allows 10000 threads.
func TestRefusedFiles(t *testing.T) {
	const clients = 4 * maxRefusing
	hello := marshal(t, &ctrlpb.Request{Id: 1, Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	for _, unread := range []bool{false, true} {
		limits := Limits{Clients: 1}
		if unread {
			limits.Clients = clients
		}
		h := newHarness(t, Config{Limits: limits})
		if !unread {
			h.hello(t)
		}
		before, ours := calling(t, unix.SYS_CLOSE), 0
		for _, fd := range lingerers(t, clients) {
			c := h.client(t)
			_ = c.c.Write(hello, []int{fd}) // the server may have refused the client and closed
			for range 3 {
				_ = c.c.Write([]byte("no request"), []int{fd})
			}
			if !closes(fd) {
				ours++
			}
			if !unread {
				c.c.Close()
			}
		}
		testenv.Until(t, fmt.Sprintf("unread %v: no client is waited for", unread), func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			if !unread {
				return len(h.refusing) == 0
			}
			for _, s := range h.sessions { // they are cut off, and are still connected
				if !s.dead {
					return false
				}
			}
			return true
		})
		time.Sleep(awayWait / 2) // time for closes that the daemon should not make
		// A close that does not wait is over soon.
		testenv.Until(t, fmt.Sprintf("unread %v: few threads are in close", unread), func() bool {
			return calling(t, unix.SYS_CLOSE) <= before+maxRefusing+ours
		})
	}
}

// TestRefusedFlood checks that however many clients are refused at a time, few are being turned away: each takes memory and a thread, of which
// the Go runtime allows 10000.
func TestRefusedFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, Config{Allow: []Rule{{Deny: true}}})
		refused, goOn := make(chan struct{}, 2*mostAdmitting), make(chan struct{})
		core, _ := observer.New(zap.WarnLevel)
		h.log = zap.New(core, zap.Hooks(func(zapcore.Entry) error {
			refused <- struct{}{}
			<-goOn
			return nil
		}))
		var now atomic.Int64
		now.Store(int64(h.now()))
		h.mu.Lock()
		h.Server.now = func() clock.Time { return clock.Time(now.Add(int64(logEvery))) } // each refusal is logged
		h.mu.Unlock()
		served := make(chan struct{})
		go func() {
			defer close(served)
			for range cap(refused) {
				fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					t.Error(err)
					return
				}
				if err := h.ServeConn(fds[0]); err != nil {
					t.Error(err)
				}
				unix.Close(fds[1])
			}
		}()
		synctest.Wait()
		if len(refused) != mostAdmitting {
			t.Errorf("%d clients are being turned away", len(refused))
		}
		close(goOn)
		<-served
	})
}
