package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// A burst of Sends gets its receives from an SRQ, however few of them the queue pair can hold. If they do not fit in
// the CQ, the stream ends.
func TestSRQBurst(t *testing.T) {
	const sends = 100
	for _, tt := range []struct {
		name string
		over string // transport
		wait time.Duration
		room int // of the CQ
	}{
		{"tcp", "tcp", 0, sends},
		{"receive-wait", "tcp", time.Minute, sends},
		{"sctp", "sctp", 0, sends},
		{"host", "host", 0, sends},
		{"tcp, overrun", "tcp", 0, sends / 2},
		{"receive-wait, overrun", "tcp", time.Minute, sends / 2},
		{"sctp, overrun", "sctp", 0, sends / 2},
		{"host, overrun", "host", 0, sends / 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s *sim
			if tt.over == "host" {
				s = hostSim(t)
				withinHost.direct = true
				defer func() { withinHost.direct = false }()
			} else {
				s = newSim(t, link.PipeConfig{MTU: 9000})
			}
			qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
			qb.QP = verbs.NewQP(verbs.QPConfig{
				Num: 1, PD: 1, Table: s.hosts[1].table, SQDepth: 128, RQDepth: 4, MaxSGE: 4, SigAll: true, Sends: qb, SRQ: verbs.NewSRQ(qb),
			})
			qb.ReceiveWait = tt.wait
			qb.RecvCQ = &fullCQ{simQP: qb, room: tt.room}
			a := s.connect(tt.over == "sctp", qa, qb)
			for i := range uint64(sends) {
				qa.sends = append(qa.sends, verbs.SendWR{ID: i, Op: rdmap.OpSend})
			}
			s.hosts[0].w.mark(a.lane)
			if tt.wait != 0 {
				s.until("the Sends wait", func() bool { return qb.stream != nil && len(qb.stream.conn().waits.segs) == sends })
			}
			for i := range uint64(sends) {
				qb.recvs = append(qb.recvs, verbs.RecvWR{ID: i})
			}
			began := s.now
			if tt.room < sends {
				if ev := s.closed(1); ev.Err != ErrCQOverrun {
					t.Errorf("closed: %v", ev.Err)
				}
				// The queue pair takes four receives at a time, and none after the 51st completion did not fit.
				if left := len(qb.recvs); left != 48 {
					t.Errorf("%d receives left in the SRQ, want 48", left)
				}
				return
			}
			s.until("received", func() bool { return len(qb.wcs) == sends || a.closed })
			for i, wc := range qb.wcs {
				if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
					t.Fatalf("receive %d: %v", wc.ID, wc.Status)
				}
			}
			if len(qb.wcs) != sends {
				t.Errorf("%d receives", len(qb.wcs))
			}
			if took := s.now.Sub(began); tt.wait != 0 && took > 3*waitLook {
				t.Errorf("the Sends that waited were received in %v", took)
			}
		})
	}
}
