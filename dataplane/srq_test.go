package dataplane

import (
	"errors"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/term"
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
				Num: 1, PD: 1, Table: s.hosts[1].table, SQDepth: 128, RQDepth: 4, MaxSGE: 4, SigAll: true, Sends: qb, Recvs: qb, Shared: true,
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
			s.until("received", func() bool { return len(qb.wcs) == sends || a.closed() })
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

// heldMover is a FarQueue for far memory that stores nothing until release is called.
type heldMover struct {
	verbs.FarQueue
	notify         func()
	stores, stored uint64
	waits          int // bytes
}

func (m *heldMover) Store(verbs.FarMemory, uint64, uint32, marked.Bytes) { m.stores++ }
func (m *heldMover) Stored() (done, firstFailed uint64)                  { return m.stored, 0 }
func (m *heldMover) Backlog() int                                        { return int(m.stores - m.stored) }
func (m *heldMover) Wait(n int)                                          { m.waits += n }
func (m *heldMover) Crowded() bool                                       { return false }
func (m *heldMover) Notify(f func())                                     { m.notify = f }

func (m *heldMover) release() {
	m.stored = m.stores
	m.notify()
}

// farSRQ returns two hosts that are connected over a transport, a queue pair on each, and far memory on the second. Its
// queue pair takes held receives of an SRQ at a time.
func farSRQ(t *testing.T, over string, held int) (s *sim, qa, qb *simQP, far *heldMover, reg *verbs.Region) {
	t.Helper()
	if over == "host" {
		s = hostSim(t)
		withinHost.direct = true
		t.Cleanup(func() { withinHost.direct = false })
	} else {
		s = newSim(t, link.PipeConfig{MTU: 9000})
	}
	qa, qb, far = newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192), &heldMover{}
	reg, err := s.hosts[1].table.RegisterFar(1, far, 0, 1000, 0x20000, verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	qb.QP = verbs.NewQP(verbs.QPConfig{
		Num: 1, PD: 1, Table: s.hosts[1].table, SQDepth: 128, RQDepth: held, MaxSGE: 4, SigAll: true,
		Sends: qb, Recvs: qb, Shared: true, Far: far,
	})
	qb.Far, qb.Client = far, (&loadLanes{sim: s}).client(1, 0)
	return s, qa, qb, far, reg
}

// TestSRQFar checks that Sends wait while the queue pair holds as many receives of an SRQ as it can, whose data is not yet in
// far memory. The peer is not to blame that this takes longer than a turn.
func TestSRQFar(t *testing.T) {
	const sends, held = 100, 4
	for _, over := range []string{"tcp", "sctp", "host"} {
		t.Run(over, func(t *testing.T) {
			s, qa, qb, far, reg := farSRQ(t, over, held)
			a := s.connect(over == "sctp", qa, qb)
			for i := range uint64(sends) {
				qa.sends = append(qa.sends, verbs.SendWR{ID: i, Op: rdmap.OpSend, SGEs: qa.sge(0, 10)})
				qb.recvs = append(qb.recvs, verbs.RecvWR{ID: i, SGEs: []verbs.SGE{{Addr: 0x20000, Len: 10, LKey: reg.STag()}}})
			}
			s.hosts[0].w.mark(a.lane)
			for n := 0; len(qb.wcs) < sends && !a.closed(); n += held {
				s.until("far memory holds up the Sends", func() bool { return far.Backlog() == held || a.closed() })
				if len(qb.wcs) != n {
					t.Fatalf("%d receives are complete, want %d", len(qb.wcs), n)
				}
				if c, ok := qb.stream.lane.llp.(*tcpConn); ok && c.waits.bytes != far.waits {
					t.Fatalf("%d bytes wait, and %d count", c.waits.bytes, far.waits)
				}
				if over == "tcp" && qb.stream.conn().waits.waiting() {
					w := s.hosts[1].w
					w.lookMoved(&qb.QPBinding) // as when something else is stored
					if got := qb.stream.conn().backlog; got != w.tcp.RcvWindow {
						t.Errorf("the window is reduced by %d bytes while Sends wait, want all %d", got, w.tcp.RcvWindow)
					}
				}
				far.release()
				s.until("receives are complete", func() bool { return len(qb.wcs) == n+held || a.closed() })
			}
			for i, wc := range qb.wcs {
				if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
					t.Fatalf("receive %d: %v", wc.ID, wc.Status)
				}
			}
			if a.closed() {
				t.Errorf("closed after %d receives: %v", len(qb.wcs), a.err)
			}
			if n := s.hosts[0].w.stats.TxRetransmits; n != 0 {
				t.Errorf("%d packets were sent again, since others waited", n)
			}
			// A Send without a receive ends the stream as ever.
			qa.sends = append(qa.sends, verbs.SendWR{ID: sends, Op: rdmap.OpSend})
			s.hosts[0].w.mark(a.lane)
			if ev := s.closed(0); !errors.Is(ev.Err, term.ErrNoBuffer) {
				t.Errorf("closed by %v; want %v", ev.Err, term.ErrNoBuffer)
			}
		})
	}
}

// TestDetachFar checks that receives of an SRQ whose data gets into far memory after the connection was reset complete
// before the queue pair is gone.
func TestDetachFar(t *testing.T) {
	const held = 4
	for _, over := range []string{"tcp", "sctp", "host"} {
		t.Run(over, func(t *testing.T) {
			s, qa, qb, far, reg := farSRQ(t, over, held)
			a := s.connect(over == "sctp", qa, qb)
			for i := range uint64(held + 2) {
				qa.sends = append(qa.sends, verbs.SendWR{ID: i, Op: rdmap.OpSend, SGEs: qa.sge(0, 10)})
				qb.recvs = append(qb.recvs, verbs.RecvWR{ID: i, SGEs: []verbs.SGE{{Addr: 0x20000, Len: 10, LKey: reg.STag()}}})
			}
			s.hosts[0].w.mark(a.lane)
			s.until("far memory holds up the Sends", func() bool { return far.Backlog() == held })
			h := s.hosts[1]
			if c, ok := qb.stream.lane.llp.(*tcpConn); ok {
				s.until("a Send waits", c.waits.waiting)
			}
			h.w.disconnect(qb.stream, true)
			h.w.turn()
			if len(qb.wcs) != 0 {
				t.Fatalf("%d receives are complete before their data is there", len(qb.wcs))
			}
			far.release()
			h.during(func() { h.e.Detach(&qb.QPBinding) })
			for i, wc := range qb.wcs {
				if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
					t.Errorf("receive %d: %v", wc.ID, wc.Status)
				}
			}
			if len(qb.wcs) != held || far.waits != 0 {
				t.Errorf("%d receives are complete, want %d; %d bytes wait", len(qb.wcs), held, far.waits)
			}
		})
	}
}

// slowMover is a heldMover that counts bytes.
type slowMover struct {
	heldMover
	bytes int
}

func (m *slowMover) Store(mem verbs.FarMemory, addr uint64, size uint32, b marked.Bytes) {
	m.heldMover.Store(mem, addr, size, b)
	m.bytes += int(size)
}
func (m *slowMover) Backlog() int { return m.bytes }

func (m *slowMover) release() {
	m.bytes = 0
	m.heldMover.release()
}

// TestFarWindow checks that data that must still be stored in far memory takes room in the receive window, so that the peer stops
// sending and nothing is dropped.
func TestFarWindow(t *testing.T) {
	const writes, size = 64, 64 << 10
	for _, over := range []string{"tcp", "sctp"} {
		t.Run(over, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{MTU: 9000})
			qa, qb, far := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], 8192), &slowMover{}
			reg, err := s.hosts[1].table.RegisterFar(1, far, 0, size, 0x20000, verbs.LocalWrite|verbs.RemoteWrite)
			if err != nil {
				t.Fatal(err)
			}
			qb.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: s.hosts[1].table, SQDepth: 128, RQDepth: 4, MaxSGE: 4, SigAll: true, Sends: qb, Recvs: qb, Far: far})
			qb.Far, qb.Client = far, (&loadLanes{sim: s}).client(1, 0)
			a := s.connect(over == "sctp", qa, qb)
			for i := range uint64(writes) {
				qa.sends = append(qa.sends, verbs.SendWR{ID: i, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: reg.STag(), Remote: 0x20000})
			}
			s.hosts[0].w.mark(a.lane)
			most, stored, began := 0, 0, s.now
			for len(qa.wcs) < writes && !a.closed() {
				end := s.now.Add(time.Millisecond)
				s.until("time passes", func() bool { return s.now > end })
				if stored == 0 {
					began = s.now
				}
				most = max(most, far.bytes)
				stored += far.bytes
				far.release()
			}
			if took := s.now.Sub(began); took > 100*time.Millisecond {
				t.Errorf("the peer goes on after %v", took)
			}
			if limit := s.hosts[1].w.tcp.RcvWindow; most > limit*3/2 || stored < writes*size-limit*3/2 {
				t.Errorf("%d bytes wait, more than the window of %d; %d are stored", most, limit, stored)
			}
			if n := s.hosts[0].w.stats.TxRetransmits; n != 0 || a.closed() {
				t.Errorf("%d packets were sent again; closed %v, %v", n, a.closed(), a.err)
			}
		})
	}
}
