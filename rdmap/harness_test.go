package rdmap

import (
	"testing"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// region is a tagged buffer of fakeMemory.
type region struct {
	base  uint64
	buf   []byte
	write bool // peer may write
	read  bool // peer may read
	gone  bool
	other bool // of another protection domain
}

// fakeMemory is plain memory behind a Stream.
type fakeMemory struct {
	regions map[uint32]*region
	recvs   [][]byte // posted receive buffers, by ID
	taken   int      // number that Recv has taken
	sources map[uint32][]byte
	results map[uint32]uint64
	placed  int
}

func newFakeMemory() *fakeMemory {
	return &fakeMemory{regions: map[uint32]*region{}, sources: map[uint32][]byte{}, results: map[uint32]uint64{}}
}

func (m *fakeMemory) Recv(msn serial.Num) (id, size uint32, ok bool) {
	if m.taken == len(m.recvs) {
		return 0, 0, false
	}
	id = uint32(m.taken)
	m.taken++
	return id, uint32(len(m.recvs[id])), true
}

func (m *fakeMemory) Place(p *Placement, payload marked.Bytes) *term.Error {
	n := payload.Len()
	if p.Kind == PlaceRecv {
		m.placed++
		payload.CopyTo(m.recvs[p.Recv][p.Off:][:n])
		return nil
	}
	r := m.regions[p.STag]
	switch {
	case r == nil || r.gone || p.Op == OpWrite && !r.write:
		return term.ErrInvalidSTag
	case r.other:
		return term.ErrSTagStream
	case p.TO < r.base || p.TO-r.base > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(p.TO-r.base):
		return term.ErrBounds
	}
	m.placed++
	payload.CopyTo(r.buf[p.TO-r.base:][:n])
	return nil
}

func (m *fakeMemory) CheckRead(stag uint32, to uint64, n uint32) *term.Error {
	r := m.regions[stag]
	switch {
	case r == nil || r.gone:
		return term.ErrReadSTag
	case r.other:
		return term.ErrReadSTagStream
	case !r.read:
		return term.ErrReadAccess
	case to < r.base || to-r.base > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(to-r.base):
		return term.ErrReadBounds
	}
	return nil
}

func (m *fakeMemory) Atomic(stag uint32, to uint64, a *AtomicOp) (uint64, *term.Error) {
	if err := m.CheckRead(stag, to, 8); err != nil {
		return 0, err
	}
	r := m.regions[stag]
	if (to-r.base)%8 != 0 {
		return 0, term.ErrStream
	}
	b := r.buf[to-r.base:]
	old := be.Uint64(b)
	be.PutUint64(b, a.Apply(old))
	return old, nil
}

func (m *fakeMemory) Invalidate(stag uint32) *term.Error {
	r := m.regions[stag]
	if r == nil || r.gone {
		return term.ErrCannotInvalidate
	}
	r.gone = true
	return nil
}

func (m *fakeMemory) AtomicResult(wr uint32, old uint64) { m.results[wr] = old }

// gather returns the bytes of a segment as they go over the wire.
func (m *fakeMemory) gather(seg *Segment) []byte {
	b := append([]byte(nil), seg.Hdr[:seg.HdrLen]...)
	switch seg.Src.Kind {
	case SourceWR:
		b = append(b, m.sources[seg.Src.WR][seg.Src.Off:][:seg.Len]...)
	case SourceTagged:
		r := m.regions[seg.Src.STag]
		b = append(b, r.buf[seg.Src.Off-r.base:][:seg.Len]...)
	}
	return b
}

// end is one end of a connection.
type end struct {
	Stream
	mem *fakeMemory
}

// give passes a segment to the stream, which must take it.
func (e *end) give(t testing.TB, b []byte) {
	t.Helper()
	if err := e.HandleULPDU(b); err != nil {
		t.Fatal(err)
	}
}

func newEnd(cfg Config) *end {
	e := &end{mem: newFakeMemory()}
	e.Init(cfg, e.mem)
	return e
}

func newPair(cfg Config) (a, b *end) { return newEnd(cfg), newEnd(cfg) }

// poll returns the next ULPDU of e, or nil.
func (e *end) poll(mulpdu int) []byte {
	var seg Segment
	if !e.PollFilling(mulpdu, mulpdu, &seg) {
		return nil
	}
	return e.mem.gather(&seg)
}

func (e *end) post(t testing.TB, wr WR) {
	t.Helper()
	if !e.PostSend(&wr) {
		t.Fatalf("PostSend(%v): queue full", wr.Op)
	}
}

// pump carries segments both ways until neither end has any.
func pump(t testing.TB, a, b *end, mulpdu int) {
	t.Helper()
	for range 1 << 20 {
		p, q := a.poll(mulpdu), b.poll(mulpdu)
		if p == nil && q == nil {
			return
		}
		if p != nil {
			b.HandleULPDU(p)
		}
		if q != nil {
			a.HandleULPDU(q)
		}
	}
	t.Fatal("the ends never stop sending")
}

func (e *end) completions() (cs []Completion) {
	var c Completion
	for e.PollCompletion(&c) {
		cs = append(cs, c)
	}
	return cs
}

func fill(b []byte, seed byte) []byte {
	for i := range b {
		b[i] = seed + byte(i*7)
	}
	return b
}

const testMULPDU = ddp.MinMULPDU
