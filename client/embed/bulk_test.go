package embed_test

import (
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// TestBulk sends a full window of long and of short messages. A work request's place in the queue must be free when
// its completion is polled.
func TestBulk(t *testing.T) {
	t.Run("long", func(t *testing.T) { bulk(t, 1<<16, 800) })
	t.Run("short", func(t *testing.T) { bulk(t, 100, 15000) })
}

func bulk(t *testing.T, size, total int) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 64)
	wrs := make([]iwarp.SendWR, 16)
	for i := range wrs {
		wrs[i] = iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, size)}, RKey: b.mem.RKey(), Remote: b.mem.Base()}
	}
	wcs := make([]iwarp.WC, 16)
	for posted, done := 0, 0; done < total; {
		if room := min(64-(posted-done), total-posted, len(wrs)); room > 0 {
			n, err := a.qp.PostSends(wrs[:room])
			if err != nil {
				t.Fatalf("%d posted, %d done: %v", posted, done, err)
			}
			posted += n
		}
		n, err := a.cq.Wait(ctx, wcs)
		if err != nil {
			t.Fatalf("%d posted, %d done: %v", posted, done, err)
		}
		for _, wc := range wcs[:n] {
			if wc.Status != iwarp.WCSuccess {
				t.Fatal(wc.Status)
			}
		}
		done += n
	}
}
