package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// receivedSim is a connection whose passive end shows its client that data has arrived.
type receivedSim struct {
	*loadLanes
	a, b   *stream
	qa, qb *simQP
	far    lateMover // of qb
	ringer *shm.DoorbellRinger
}

func newReceivedSim(t *testing.T, s *sim) *receivedSim {
	s.limit = 1 << 62
	r := &receivedSim{loadLanes: &loadLanes{sim: s}}
	r.a, r.b = s.open()
	r.qa, r.qb = newSimQP(t, s.hosts[0], 1000), newSimQP(t, s.hosts[1], 1000)
	r.qb.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: s.hosts[1].table, SQDepth: 16, RQDepth: 16, MaxSGE: 1, Sends: r.qb, Recvs: r.qb, Far: &r.far})
	r.qb.Client, r.qb.ReceiveWait, r.qb.Far = r.client(1, 0), time.Minute, &r.far
	page := r.qb.Client.Doorbells[0]
	var err error
	if r.ringer, err = shm.MapDoorbells(page.FD(), page.WakeFD()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.ringer.Close() })
	s.attach(r.a, r.b, r.qa, r.qb, mpa.Params{CRC: true})
	for i := range r.qa.mem {
		r.qa.mem[i] = 1
	}
	return r
}

// send posts a work request for ten bytes.
func (r *receivedSim) send(op rdmap.Op, stag uint32) {
	r.post(r.a, r.qa, verbs.SendWR{Op: op, SGEs: r.qa.sge(0, 10), RKey: stag, Remote: 0x10000 + 500})
}

// rest runs both hosts until they have nothing to do.
func (r *receivedSim) rest() {
	for r.step() {
	}
}

// TestReceivedWaiting checks that a client sees that data is in its memory which has waited for a receive.
func TestReceivedWaiting(t *testing.T) {
	r := newReceivedSim(t, newSim(t, link.PipeConfig{}))
	r.send(rdmap.OpSend, 0)
	r.send(rdmap.OpWrite, r.qb.reg.STag())
	r.until("the Write waits", func() bool { return len(r.b.conn().waits.segs) == 2 })
	before := r.ringer.Received()
	r.qb.recvs = append(r.qb.recvs, verbs.RecvWR{SGEs: r.qb.sge(0, 10)})
	r.until("the Write is placed", func() bool { return r.qb.mem[500] == 1 })
	if r.ringer.Received() == before {
		t.Error("Received has not changed")
	}
}

// TestReceivedBeforeViolation checks that a client sees a Write that comes together with a violation.
func TestReceivedBeforeViolation(t *testing.T) {
	r := newReceivedSim(t, hostSim(t))
	before := r.ringer.Received()
	r.send(rdmap.OpWrite, r.qb.reg.STag())
	r.send(rdmap.OpWrite, 0xbad)
	r.until("the violation", func() bool { return r.b.health == failed })
	if r.qb.mem[500] != 1 || r.ringer.Received() == before {
		t.Errorf("memory is %d, and Received has changed: %v", r.qb.mem[500], r.ringer.Received() != before)
	}
}

// lateMover is a FarQueue for far memory, a []byte. A Store ends when move is called.
type lateMover struct {
	verbs.FarQueue
	notify   func()
	to, data []byte // of the outstanding Store
	stored   uint64
}

func (m *lateMover) Store(mem verbs.FarMemory, addr uint64, size uint32, p marked.Bytes) {
	m.to, m.data = mem.([]byte)[addr:][:size], make([]byte, size)
	p.CopyTo(m.data)
}

func (m *lateMover) Stored() (done, firstFailed uint64) { return m.stored, 0 }
func (m *lateMover) Backlog() int                       { return len(m.data) }
func (m *lateMover) Wait(int)                           {}
func (m *lateMover) Crowded() bool                      { return false }
func (m *lateMover) Notify(f func())                    { m.notify = f }

func (m *lateMover) move() {
	copy(m.to, m.data)
	m.data = nil
	m.stored++
	m.notify()
}

// TestReceivedFar checks that a client sees data when it is in its far memory, not before, and that a Fetch is no such data.
func TestReceivedFar(t *testing.T) {
	r := newReceivedSim(t, newSim(t, link.PipeConfig{}))
	mem := make([]byte, 1000)
	reg, err := r.hosts[1].table.RegisterFar(1, mem, 0, 1000, 0x10000, verbs.RemoteWrite|verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	before := r.ringer.Received()
	r.send(rdmap.OpWrite, reg.STag())
	r.until("the Write is being stored", func() bool { return r.far.data != nil })
	r.rest()
	if r.ringer.Received() != before {
		t.Error("Received has changed before the Write was in memory")
	}
	r.far.move()
	r.rest()
	if mem[500] != 1 || r.ringer.Received() == before {
		t.Errorf("memory is %d, and Received has changed: %v", mem[500], r.ringer.Received() != before)
	}
	before = r.ringer.Received()
	r.far.notify()
	r.rest()
	if r.ringer.Received() != before {
		t.Error("Received has changed when nothing was stored")
	}
}
