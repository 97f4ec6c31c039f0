package dataplane

import (
	"testing"

	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestInvalidateWaits checks that an invalidation completes when the turns of other workers that have begun before it
// have ended, since they may still copy to the memory (RFC 5040 section 5.3).
func TestInvalidateWaits(t *testing.T) {
	inv := func(tag uint32) verbs.SendWR { return verbs.SendWR{ID: 2, Op: verbs.OpLocalInv, Inv: tag} }
	for name, invalidate := range map[string]func(q *twoQueues, id ConnID, qa, qb *simQP, tag uint32){
		"local": func(_ *twoQueues, _ ConnID, qa, _ *simQP, tag uint32) {
			qa.sends = append(qa.sends, inv(tag))
		},
		"remote": func(q *twoQueues, _ ConnID, qa, qb *simQP, tag uint32) {
			qa.recvs = append(qa.recvs, verbs.RecvWR{ID: 2})
			qb.sends = append(qb.sends, verbs.SendWR{Op: rdmap.OpSendInv, Inv: tag})
			for _, s := range q.workers[2].streams {
				q.workers[2].mark(s.lane)
			}
		},
		"local, then the end": func(q *twoQueues, id ConnID, qa, _ *simQP, tag uint32) {
			w := q.workers[1]
			qa.sends = append(qa.sends, inv(tag))
			w.mark(w.streams[id].lane)
			w.turn()
			w.disconnect(w.streams[id], true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := newTwoQueues(t, 1)
			id, qa, qb := q.connected()
			other, w, peer := q.workers[0], q.workers[1], q.workers[2]
			fast, err := q.hosts[0].table.RegisterFast(1, make([]byte, 64), verbs.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			valid := func() bool { return q.hosts[0].table.Lookup(fast.STag()) != nil }
			lane := w.streams[id].lane
			qa.sends = append(qa.sends,
				verbs.SendWR{Op: rdmap.OpWrite}, // the responder sends nothing before
				verbs.SendWR{Op: verbs.OpReg, RKey: fast.STag(), SGEs: []verbs.SGE{{Len: 64}}, Access: verbs.LocalWrite})
			w.mark(lane)
			q.until("registered", func() bool { return len(qa.wcs) == 2 })
			qa.wcs = nil
			other.began.Store(q.hosts[0].e.invalidations.Load()) // its turn begins
			invalidate(q, id, qa, qb, fast.STag())
			w.mark(lane)
			for range 100 {
				peer.turn()
				if w.turn() == 0 && valid() {
					q.now = q.now.Add(1e6)
				}
			}
			if valid() {
				t.Fatal("it is valid")
			}
			if len(qa.wcs) != 0 {
				t.Fatalf("completions %+v during a turn of another worker", qa.wcs)
			}
			if w.turn() == 0 {
				t.Error("the worker sleeps meanwhile")
			}
			other.turn()
			w.turn()
			if len(qa.wcs) != 1 || qa.wcs[0].ID != 2 || qa.wcs[0].Status != verbs.WCSuccess {
				t.Fatalf("completions %+v after it", qa.wcs)
			}
			q.until("at rest", func() bool { return w.turn() == 0 })
		})
	}
}
