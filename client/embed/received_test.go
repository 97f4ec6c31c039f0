package embed_test

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// TestReceived checks that a program sees that a Write of its peer has arrived.
func TestReceived(t *testing.T) {
	nodes := map[iwarp.Transport]func(testing.TB, embed.PairConfig) (*embed.Node, *embed.Node, context.Context){iwarp.TCP: pair, iwarp.SCTP: wire}
	for transport, start := range nodes {
		t.Run(fmt.Sprint(transport), func(t *testing.T) {
			a, b, ctx := start(t, embed.PairConfig{})
			ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: iwarp.Startup{Transport: transport}})
			mr := alloc(t, ctx, cb, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
			for _, size := range []int{1, 4000} {
				before := b.Device().Received()
				data := bytes.Repeat([]byte{byte(size)}, size)
				if err := ca.Write(ctx, mr.RemoteAt(0, size), data); err != nil {
					t.Fatal(err)
				}
				for late := time.Now().Add(time.Minute); b.Device().Received() == before; runtime.Gosched() {
					if time.Now().After(late) {
						t.Fatalf("within a minute Received did not change after a Write of %d bytes", size)
					}
				}
				if !bytes.HasPrefix(mr.Bytes(), data[:1]) {
					t.Errorf("Received changed before a Write of %d bytes was in memory", size)
				}
			}
		})
	}
}

// TestReceivedClosed checks that a program may look for data of a peer while another goroutine closes the Device.
func TestReceivedClosed(t *testing.T) {
	a, _, ctx := pair(t, embed.PairConfig{})
	d := newDevice(t, ctx, a)
	looks, closed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(closed)
		<-looks
		d.Close()
	}()
	d.Received()
	close(looks)
	for over := false; !over; d.Received() {
		select {
		case <-closed:
			over = true
		default:
		}
	}
}
