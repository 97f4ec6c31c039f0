package verbs

import (
	"crypto/rand"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// sends and recvs are rings of posted work requests on the heap.
type (
	sends struct{ q []SendWR }
	recvs struct{ q []RecvWR }
)

func (s *sends) NextSend(wr *SendWR) bool {
	if len(s.q) == 0 {
		return false
	}
	sges, inline := append(wr.SGEs[:0], s.q[0].SGEs...), append(wr.Inline[:0], s.q[0].Inline...)
	*wr = s.q[0]
	wr.SGEs, wr.Inline = sges, inline
	s.q = s.q[1:]
	return true
}

func (s *recvs) NextRecv(wr *RecvWR) bool {
	if len(s.q) == 0 {
		return false
	}
	wr.ID, wr.SGEs = s.q[0].ID, append(wr.SGEs[:0], s.q[0].SGEs...)
	s.q = s.q[1:]
	return true
}

// side is one end of a pair: a QP with its queues, memory and completions.
type side struct {
	*QP
	table *Table
	s     sends
	r     recvs
	mem   []byte
	mr    *Region
	wcs   []WC
	ulpdu []byte
	parts [][]byte
	fails int // Gathers that failed
	pend  rdmap.Segment
}

const sideBase = 0x7f00_0000_0000

func newSide(t testing.TB, num uint32, memLen int, cfg QPConfig) *side {
	t.Helper()
	s := &side{table: NewTable(rand.Reader), mem: make([]byte, memLen), ulpdu: make([]byte, 0, 2048)}
	s.mr = mustRegister(t, s.table, pdA, s.mem, sideBase, accessRW)
	cfg.Num, cfg.PD, cfg.Table = num, pdA, s.table
	if cfg.Sends == nil {
		cfg.Sends = &s.s
	}
	if cfg.Recvs == nil {
		cfg.Recvs = &s.r
	}
	if cfg.MaxSGE == 0 {
		cfg.MaxSGE = 16
	}
	if cfg.MaxInline == 0 {
		cfg.MaxInline = 256
	}
	s.QP = NewQP(cfg)
	return s
}

// newPair returns two QPs in RTS.
func newPair(t testing.TB, memLen int, cfg QPConfig) (a, b *side) {
	t.Helper()
	a, b = newSide(t, 1, memLen, cfg), newSide(t, 2, memLen, cfg)
	a.Start(rdmap.Config{IRD: 4, ORD: 4})
	b.Start(rdmap.Config{IRD: 4, ORD: 4})
	return a, b
}

// sge returns n bytes at offset off of the side's memory.
func (s *side) sge(off, n int) SGE {
	return SGE{Addr: sideBase + uint64(off), Len: uint32(n), LKey: s.mr.STag()}
}

func (s *side) post(wrs ...SendWR) { s.s.q = append(s.s.q, wrs...) }

func (s *side) postRecv(wrs ...RecvWR) { s.r.q = append(s.r.q, wrs...) }

// turn sends all that s can send to p, and reports whether it sent anything.
func (s *side) turn(p *side, mulpdu int) bool {
	busy := s.HandleSends(64) > 0
	var seg rdmap.Segment
	for s.Stream().PollFilling(mulpdu, mulpdu, &seg) {
		busy = true
		var ok bool
		if s.parts, ok = s.Gather(&seg.Src, seg.Len, s.parts[:0]); !ok {
			s.fails++
			continue
		}
		s.ulpdu = append(s.ulpdu[:0], seg.Hdr[:seg.HdrLen]...)
		for _, b := range s.parts {
			s.ulpdu = append(s.ulpdu, b...)
		}
		if len(s.ulpdu) != seg.HdrLen+seg.Len {
			panic("Gather gave another length")
		}
		p.Stream().HandleULPDU(s.ulpdu) // the stream keeps the error
	}
	return busy
}

func (s *side) poll() bool {
	var wc WC
	busy := false
	for s.PollWC(&wc) {
		busy = true
		s.wcs = append(s.wcs, wc)
	}
	return busy
}

// run lets both sides send until neither has more to do.
func run(a, b *side, mulpdu int) {
	for busy := true; busy; {
		busy = a.turn(b, mulpdu)
		busy = b.turn(a, mulpdu) || busy
		busy = a.poll() || busy
		busy = b.poll() || busy
	}
}

// take returns the completions so far and clears them.
func (s *side) take() []WC {
	w := s.wcs
	s.wcs = nil
	return w
}

// outcome is the ID and the status of a completion.
type outcome struct {
	id uint64
	st WCStatus
}

func outcomes(wcs []WC) []outcome {
	var o []outcome
	for _, w := range wcs {
		o = append(o, outcome{w.ID, w.Status})
	}
	return o
}

// wantOutcomes checks the completions so far and clears them.
func (s *side) wantOutcomes(t *testing.T, want []outcome) {
	t.Helper()
	if diff := cmp.Diff(want, outcomes(s.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
}

func remoteErr(q *QP) *term.Error { return q.Stream().Remote() }

// Err returns the reason why the stream ended: a *term.Error found here, a *term.RemoteError from the peer's Terminate,
// or nil.
func (q *QP) Err() error {
	if e := q.stream.Err(); e != nil {
		return e
	}
	if e := q.stream.Remote(); e != nil {
		return &term.RemoteError{Err: e}
	}
	return nil
}
