package rping

import (
	"fmt"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
)

// TestOverRDMA runs rping with the whole stack, over a pipe.
func TestOverRDMA(t *testing.T) {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	addr := fmt.Sprintf("%v:%d", b.Addr(), DefaultPort)
	l, err := b.Device().Listen(t.Context(), addr, Config())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, size := range []int{MinSize, 1000, MaxSize} {
		done := make(chan side, 1)
		go func() {
			conn, err := l.Accept(t.Context())
			if err != nil {
				done <- side{err: err}
				return
			}
			if info := conn.Info(); info.IRD != 1 || info.ORD != 1 {
				t.Errorf("IRD %d, ORD %d; rping asks 1 and 1", info.IRD, info.ORD)
			}
			rep, err := ServeConn(t.Context(), conn, Options{})
			done <- side{rep, err}
		}()
		rounds := 0
		o := Options{Count: 20, Validate: true, Round: func(d time.Duration) {
			if d > 0 {
				rounds++
			}
		}}
		rep, err := Ping(t.Context(), a.Device(), addr, Config(), size, o)
		if err != nil || rep.Rounds != 20 || rounds != 20 {
			t.Errorf("size %d: client %+v, %v, %d rounds reported", size, rep, err, rounds)
		}
		if s := <-done; s.err != nil || s.rep.Rounds != 20 {
			t.Errorf("size %d: server %+v", size, s)
		}
	}
}
