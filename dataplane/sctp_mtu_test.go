package dataplane

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestSCTPBlackHole lowers the path's MTU below that of the first hop while long packets are dropped silently. DDP's
// segments must become shorter, and those in flight leave in IP fragments; once the path takes long packets again,
// segments must become long again.
func TestSCTPBlackHole(t *testing.T) {
	seed := testenv.Seed(t)
	for _, tc := range []struct {
		mtu, narrow int
		v6          bool
		o           SCTP
	}{
		{1500, 1450, false, SCTP{}},
		{1500, 1300, true, SCTP{}},
		{1500, 1400, false, SCTP{UDP: true}},
		{9000, 1500, false, SCTP{Profile: session.Draft}},
	} {
		t.Run(fmt.Sprintf("%d/%d", tc.mtu, tc.narrow), func(t *testing.T) {
			const size = 300_000
			const ether = 14
			narrow := false
			cfg := link.PipeConfig{MTU: tc.mtu, Filter: func(_ bool, b []byte) bool { return !narrow || len(b) <= tc.narrow+ether }}
			s := newSim(t, cfg)
			s.limit = s.now.Add(time.Hour)
			rng := rand.New(rand.NewPCG(seed, uint64(tc.narrow)))
			qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
			a, _ := s.openSCTPWith(tc.o, tc.v6, 8, qa, qb)
			write := func() {
				t.Helper()
				for i := range qa.mem {
					qa.mem[i] = byte(rng.Uint32())
				}
				n := len(qa.wcs)
				for off := 0; off < size; off += size / 10 {
					qa.sends = append(qa.sends, verbs.SendWR{ID: uint64(off), Op: rdmap.OpWrite, SGEs: qa.sge(off, size/10), RKey: qb.reg.STag(), Remote: 0x10000 + uint64(off)})
				}
				// When the Read after the Writes completes, they have been placed.
				qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpRead, SGEs: qa.sge(0, 1), RKey: qb.reg.STag(), Remote: 0x10000})
				s.hosts[0].w.mark(a.lane)
				s.until("written", func() bool { return len(qa.wcs) == n+11 })
				if !bytes.Equal(qb.mem, qa.mem) {
					t.Fatal("memory differs")
				}
			}
			mtu := func() int { return a.as().a.Path(0).MTU }
			write()
			narrow = true
			write()
			st := &s.hosts[0].w.stats
			if n := mtu(); n > tc.narrow || a.as().a.Stats().BlackHoles != 1 || st.TxFragments == 0 {
				t.Fatalf("the path has an MTU of %d; %d black holes, %d fragments", n, a.as().a.Stats().BlackHoles, st.TxFragments)
			}
			fragments := st.TxFragments
			s.until("all searched", func() bool { return mtu() > tc.narrow-60 })
			write()
			narrow = false
			s.until("raised", func() bool { return mtu() == tc.mtu })
			before := st.TxFPDUs
			write()
			if n := st.TxFPDUs - before; n > uint64(size/(tc.mtu-100)+11) || st.TxFragments != fragments || a.as().a.Stats().BlackHoles != 1 {
				t.Errorf("%d segments at the end; %d fragments more; %+v", n, st.TxFragments-fragments, a.as().a.Stats())
			}
			s.hosts[0].w.disconnect(a, false)
			s.closedSCTP()
		})
	}
}
