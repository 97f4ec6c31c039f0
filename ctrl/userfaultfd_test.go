package ctrl

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestOpenUserfaultfd checks that the daemon opens the device for a client, unless the
// configuration forbids it.
func TestOpenUserfaultfd(t *testing.T) {
	req := func() *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_OpenUserfaultfd{OpenUserfaultfd: &ctrlpb.OpenUserfaultfd{}}}
	}
	newHarness(t, Config{}).hello(t).fails(ctrlpb.Code_CODE_PERMISSION, req())

	const device = "/dev/userfaultfd"
	var want, got unix.Stat_t
	if f, err := os.OpenFile(device, os.O_RDWR, 0); err != nil {
		testenv.Skip(t, "%v", err)
	} else {
		f.Close()
	}
	if err := unix.Stat(device, &want); err != nil {
		t.Fatal(err)
	}
	c := newHarness(t, Config{Userfaultfd: true}).hello(t)
	n := len(c.fds)
	c.ok(req())
	if len(c.fds) != n+1 {
		t.Fatalf("%d descriptors, want 1", len(c.fds)-n)
	}
	if err := unix.Fstat(c.fds[n], &got); err != nil || got.Rdev != want.Rdev {
		t.Errorf("device %#x, %v; want %#x", got.Rdev, err, want.Rdev)
	}
}

// TestUserfaultfdReload checks, with the race detector, that a reload may come at the same time as a request.
func TestUserfaultfdReload(t *testing.T) {
	h, c := newClient(t, Config{})
	done, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-done:
				return
			default:
				h.Reload(Config{})
			}
		}
	}()
	for range 200 {
		c.fails(ctrlpb.Code_CODE_PERMISSION, &ctrlpb.Request{Body: &ctrlpb.Request_OpenUserfaultfd{OpenUserfaultfd: &ctrlpb.OpenUserfaultfd{}}})
	}
	close(done)
	<-over
}
