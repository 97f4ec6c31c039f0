package ctrl

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// lingerers returns n TCP sockets whose close waits for an hour: their peers take nothing.
func lingerers(t *testing.T, n int) (fds []int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
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

func threads(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestRefusedFiles: clients that are refused, or are cut off with messages unread, and have sent sockets whose close waits take no thread of
// the daemon each. The Go runtime allows 10000.
func TestRefusedFiles(t *testing.T) {
	const clients = 4 * maxRefusing
	for _, unread := range []bool{false, true} {
		limits := Limits{Clients: 1}
		if unread {
			limits.Clients = clients
		}
		h := newHarness(t, Config{Limits: limits})
		if !unread {
			h.hello(t)
		}
		before := threads(t)
		for _, fd := range lingerers(t, clients) {
			c := h.client(t)
			c.send(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}}, fd)
			for range 3 {
				_ = c.c.Write([]byte("no request"), []int{fd})
			}
			unix.Close(fd)
			if !unread {
				c.c.Close()
			}
		}
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			h.mu.Lock()
			n := len(h.refusing)
			if unread { // they are cut off, and are still there
				n = len(h.sessions)
				for _, s := range h.sessions {
					if s.dead {
						n--
					}
				}
			}
			h.mu.Unlock()
			if n == 0 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("unread %v: %d clients are waited for", unread, n)
			}
		}
		time.Sleep(awayWait / 2)
		if n := threads(t); n > before+maxRefusing {
			t.Errorf("unread %v: %d threads, %d before", unread, n, before)
		}
	}
}
