package hostnet

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFollowLinkAfterLoss checks that FollowLink still reports the interface after the kernel has dropped events
// because the socket was full.
func TestFollowLinkAfterLoss(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	ctx, cancel := context.WithCancel(t.Context())
	began, goOn, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var mtu atomic.Int64
	go func() {
		err := v.A.NS.Do(func() error {
			first := true
			return FollowLink(ctx, v.A.Name, func(_, now LinkState) {
				if first {
					first = false
					close(began)
					<-goOn
				}
				mtu.Store(int64(now.MTU))
			}, func(int) {})
		})
		done <- err
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	<-began
	const last, changes = 1300, 2000 // events of that many do not fit in the default buffer of a socket
	err := v.A.NS.Do(func() error {
		l, err := netlink.LinkByName(v.A.Name)
		for i := 0; i < changes && err == nil; i++ {
			err = netlink.LinkSetMTU(l, 1400+i%2)
		}
		if err == nil {
			err = netlink.LinkSetMTU(l, last)
		}
		return err
	})
	close(goOn)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); mtu.Load() != last; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the MTU reported last is %d", mtu.Load())
		}
	}
}
