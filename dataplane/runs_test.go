package dataplane

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// While runs and super-frames are in flight, the MTU of the next hop changes, routers report smaller ones, and the
// connection may end. Data that completes is correct, and all buffers return.
func TestRunsInTrouble(t *testing.T) {
	const size, depth = 1 << 20, 4
	seed := testenv.Seed(t)
	ends := []string{"none", "abort", "reset", "detach", "terminate", "deregister"}
	for i := range testenv.Count(t, "SEEDS", 3*len(ends)) {
		end := ends[i%len(ends)]
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		wire := impair.Config{Seed: seed + uint64(i), Loss: 0.01 * float64(rng.IntN(2)), Reorder: 0.02, Delay: 200 * time.Microsecond}
		back := wire
		back.Seed += 1000
		var last []byte // frame of a full segment
		s := newSim(t, link.PipeConfig{Super: link.SuperMode(1 + rng.IntN(2)), AtoB: wire, BtoA: back, Filter: func(toB bool, f []byte) bool {
			if toB && len(f) > 500 && rng.IntN(8) == 0 {
				last = bytes.Clone(f[:min(len(f), 200)])
			}
			return true
		}})
		a, b := s.open()
		qa, qb := newSimQP(t, s.hosts[0], 2*size), newSimQP(t, s.hosts[1], size)
		s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
		for k := range qa.mem[:size] {
			qa.mem[k] = byte(rng.Uint32())
		}
		for k := range depth {
			qa.sends = append(qa.sends,
				verbs.SendWR{ID: uint64(2 * k), Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000},
				verbs.SendWR{ID: uint64(2*k + 1), Op: rdmap.OpRead, SGEs: qa.sge(size, size), RKey: qb.reg.STag(), Remote: 0x10000})
		}
		s.hosts[0].w.mark(a.lane)
		at := rng.IntN(600)
		hop := [2]Hop{{SrcMAC: macA, DstMAC: macB}, {SrcMAC: macB, DstMAC: macA}}
		for n := 0; !a.closed() && len(qa.wcs) < 2*depth; n++ {
			switch {
			case rng.IntN(60) == 0 && last != nil:
				f := link.Frame{N: 1}
				f.Pieces[0] = tooBig(last, 600+rng.IntN(900), 1<<16)
				last = nil
				s.hosts[0].w.take(&f)
			case rng.IntN(60) == 0:
				k := rng.IntN(2)
				c := []*stream{a, b}[k]
				if !c.closed() {
					hop[k].MTU = 600 + rng.IntN(900)
					c.lane.llp.setHop(s.hosts[k].w, c.flow().Remote, &hop[k])
				}
			case n == at:
				trouble(s, end, a, b, qb)
			}
			if !s.step() || s.now > s.limit {
				t.Fatalf("run %d, %s: stuck at %v with %d completions", i, end, s.now, len(qa.wcs))
			}
		}
		for k, wc := range qa.wcs {
			if wc.ID != uint64(k) || end == "none" && wc.Status != verbs.WCSuccess {
				t.Fatalf("run %d, %s: completion %d: id %d, %v", i, end, k, wc.ID, wc.Status)
			}
		}
		if len(qa.wcs) > 1 && qa.wcs[1].Status == verbs.WCSuccess && !bytes.Equal(qa.mem[:size], qa.mem[size:]) && end == "none" {
			t.Fatalf("run %d, %s: bytes differ", i, end)
		}
		s.closeAll(a)
	}
}

// trouble ends the connection.
func trouble(s *sim, end string, a, b *stream, qb *simQP) {
	switch end {
	case "abort":
		s.hosts[0].w.disconnect(a, true)
	case "reset":
		s.hosts[1].w.disconnect(b, true)
	case "detach":
		s.hosts[0].w.post(func(w *worker) { a.detach(w) })
	case "terminate":
		if b.mode == modeFull {
			b.fail(s.hosts[1].w, term.ErrInvalidSTag)
		}
	case "deregister":
		if err := s.hosts[1].table.Deregister(qb.reg); err != nil {
			panic(err)
		}
	}
}
