package embed_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
)

// TestNothingGrows checks that connections that are opened and closed repeatedly leave nothing on the heap. Client,
// control plane and data plane of both ends all run in this process. GROW_CYCLES sets the number of cycles.
func TestNothingGrows(t *testing.T) {
	cfg := tcp.DefaultConfig()
	cfg.TimeWait = 100 * time.Millisecond
	na, nb, _ := pair(t, embed.PairConfig{TCP: &cfg})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, b := newEnd(t, ctx, na, 16), newEnd(t, ctx, nb, 16)
	l := listen(t, ctx, nb, ":0", nil)
	const conns = 50
	cycle := func() {
		var qps []*iwarp.QP
		for i := range conns {
			qa := newQP(t, ctx, na, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq, SendDepth: 1, RecvDepth: 1})
			qb := newQP(t, ctx, nb, iwarp.QPConfig{PD: b.pd, SendCQ: b.cq, RecvCQ: b.cq, SendDepth: 1, RecvDepth: 1})
			qps = append(qps, qa, qb)
			joinBy(t, ctx, nb, l, qa, qb)
			if err := qa.PostSend(&iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 64)}, Remote: b.mem.Base(), RKey: b.mem.RKey()}); err != nil {
				t.Fatal(err)
			}
			a.wait(t, ctx, 1)
			if i%2 == 0 { // close half of them gracefully, from the passive side
				if err := qb.Disconnect(ctx); err != nil {
					t.Fatal(err)
				}
				<-qa.Done()
				<-qb.Done()
			}
		}
		for _, q := range qps {
			if err := q.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // frees objects that the first cycle left to finalizers and pools
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for range 2 { // warms up tables and pools
		cycle()
	}
	before := heap()
	cycles := testenv.Count(t, "GROW_CYCLES", 5)
	for range cycles {
		cycle()
	}
	// Temporary state, such as a TIME-WAIT of the last cycle or an exiting goroutine, disappears by itself.
	const limit = 256 << 10 // for the runtime's own allocations
	var grown int64
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if grown = heap() - before; grown < limit {
			break
		}
	}
	t.Logf("%d bytes more after %d connections", grown, conns*cycles)
	if grown >= limit {
		t.Errorf("the heap has grown by %d bytes, %d for each of %d connections", grown, grown/int64(conns*cycles), conns*cycles)
	}
}
