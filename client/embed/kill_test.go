package embed_test

import (
	"sync"
	"sync/atomic"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestKilled checks that a client that is killed at a random moment leaves nothing behind, on its own daemon or on
// the peer's.
func TestKilled(t *testing.T) {
	rounds := testenv.Count(t, "KILLS", 40)
	rnd := testenv.Rand(t)
	a, b, ctx := pair(t, embed.PairConfig{})
	l := listen(t, ctx, b, ":7", &iwarp.Config{RecvDepth: 4, RecvSize: 512})
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			served.Go(func() {
				defer c.Close()
				buf := make([]byte, 512)
				for {
					n, err := c.Recv(ctx, buf)
					if err != nil {
						return
					}
					if c.Send(ctx, buf[:n]) != nil {
						return
					}
				}
			})
		}
	})
	for round := range rounds {
		dev := newDevice(t, ctx, a)
		var steps atomic.Int64
		reached := make(chan struct{})
		limit := rnd.Int64N(120)
		step := func() {
			if steps.Add(1) == limit+1 {
				close(reached)
			}
		}
		var wg sync.WaitGroup
		for g := range 3 {
			wg.Go(func() {
				msg, buf := make([]byte, 300), make([]byte, 512)
				for dev.Err() == nil {
					step()
					if g == 0 { // objects
						pd, err := dev.AllocPD(ctx)
						if err != nil {
							continue
						}
						step()
						mr, err := pd.Alloc(ctx, 1<<16, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead)
						step()
						if err == nil && steps.Load()%2 == 0 {
							mr.Close()
							pd.Close()
						}
						continue
					}
					c, err := dev.Dial(ctx, dialAddr(b, l), &iwarp.Config{RecvDepth: 4, SendDepth: 4, RecvSize: 512})
					if err != nil {
						continue
					}
					for range 5 {
						step()
						if c.Send(ctx, msg) != nil {
							break
						}
						if _, err := c.Recv(ctx, buf); err != nil {
							break
						}
					}
					if g == 1 {
						c.Close()
					}
				}
			})
		}
		<-reached
		dev.Close()
		wg.Wait()
		idle(t, a)
		if t.Failed() {
			t.Fatalf("round %d, killed after %d steps", round, limit)
		}
	}
	l.Close()
	served.Wait()
	idle(t, b)
}
