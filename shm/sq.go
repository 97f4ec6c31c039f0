package shm

import (
	"cmp"

	"github.com/iwarpd/iwarpd/internal/ring"
	"github.com/iwarpd/iwarpd/verbs"
)

// SQ is the worker's end of a send ring. It implements verbs.SendSource. It is not safe for concurrent use.
type SQ struct {
	file
	reader
	maxSGE, maxInline int
}

// RQ is the worker's end of a receive ring. It implements verbs.RecvSource. It is not safe for concurrent use.
type RQ struct {
	file
	reader
	maxSGE int
}

// reader takes WQEs of a ring in batches. It publishes the consumer index, whose store is the expensive part, once per batch or on Taken.
type reader struct {
	ring    ring.Consumer
	slots   []byte // the entries
	stride  int
	entries int
	batch   uint32
	first   uint32 // first entry of the current batch
	n, used uint32 // entries in the batch, and those taken
	wqe     []byte // private copy of the current WQE
	told    bool

	// OnFault, if set, is called once, by the reader, when the client has written an invalid producer index.
	OnFault func()
}

func newReader(mem []byte, entries, stride int) reader {
	r := mem[HeaderSize:]
	return reader{
		ring:    ring.NewConsumer(word32(r, RingProducer), word32(r, RingConsumer), uint32(entries)),
		slots:   r[RingEntries:],
		stride:  stride,
		entries: entries,
		batch:   min(max(uint32(entries)/4, 1), 64),
		wqe:     make([]byte, stride),
	}
}

// next copies the fixed part of the next WQE; the rest follows by more.
func (r *reader) next(fixed int) bool {
	if r.used == r.n {
		if r.used != 0 {
			r.ring.Release(r.used)
		}
		r.used = 0
		r.first, r.n = r.ring.Peek(r.batch)
		if r.OnFault != nil && r.ring.Bad() && !r.told {
			r.told = true
			r.OnFault()
		}
		if r.n == 0 {
			return false
		}
	}
	copy(r.wqe[:fixed], r.at())
	return true
}

// at returns the current WQE in shared memory.
func (r *reader) at() []byte {
	off := int(r.ring.Mask(r.first+r.used)) * r.stride
	return r.slots[off : off+r.stride]
}

// more copies n bytes after the fixed part.
func (r *reader) more(fixed, n int) { copy(r.wqe[fixed:fixed+n], r.at()[fixed:]) }

// Posted returns how many work requests wait in the ring.
func (r *reader) Posted() int {
	_, n := r.ring.Peek(uint32(r.entries))
	return int(n - r.used)
}

// CreateSQ creates a send ring of at least entries WQEs with up to maxSGE SGEs or maxInline bytes each.
func CreateSQ(entries, maxSGE, maxInline int) (*SQ, error) {
	f, r, err := createRing("iwarp-sq", header{
		kind: KindSQ, entries: entries, stride: sqStride(maxSGE, maxInline), maxSGE: maxSGE, maxInline: maxInline,
	})
	if err != nil {
		return nil, err
	}
	return &SQ{file: f, reader: r, maxSGE: maxSGE, maxInline: maxInline}, nil
}

// CreateRQ creates a receive ring of at least entries WQEs with up to maxSGE SGEs.
func CreateRQ(entries, maxSGE int) (*RQ, error) {
	f, r, err := createRing("iwarp-rq", header{kind: KindRQ, entries: entries, stride: rqStride(maxSGE), maxSGE: maxSGE})
	if err != nil {
		return nil, err
	}
	return &RQ{file: f, reader: r, maxSGE: maxSGE}, nil
}

// createRing creates the ring that h describes, with at least h.entries entries.
func createRing(name string, h header) (f file, r reader, err error) {
	if err := cmp.Or(checkRange("number of entries", h.entries, MaxEntries),
		checkRange("number of SGEs", h.maxSGE, verbs.MaxSGE),
		checkRange("inline length", h.maxInline+1, verbs.MaxInline+1)); err != nil {
		return f, r, err
	}
	h.entries, h.rings = pow2(h.entries), 1
	h.ringSize = ringSize(h.entries, h.stride)
	if f, err = create(name, HeaderSize+h.ringSize); err != nil {
		return f, r, err
	}
	h.put(f.mem)
	return f, newReader(f.mem, h.entries, h.stride), nil
}

// NextSend implements verbs.SendSource.
func (q *SQ) NextSend(wr *verbs.SendWR) bool {
	if !q.next(SQEFixed) {
		return false
	}
	n := 0
	if verbs.SendFlags(q.wqe[SQEFlags])&verbs.Inline != 0 {
		n = int(min(le.Uint32(q.wqe[SQEInlineLen:]), uint32(q.maxInline)))
	} else {
		n = min(int(le.Uint16(q.wqe[SQENumSGE:])), q.maxSGE) * SGESize
	}
	q.more(SQEFixed, n)
	q.used++
	decodeSend(q.wqe, wr, q.maxSGE, q.maxInline)
	return true
}

// Taken frees the entries of the work requests that NextSend has returned. It is called before any of them completes, because a client that
// keeps the ring full posts the next request on a completion.
func (q *SQ) Taken() {
	if q.used != 0 {
		q.ring.Release(q.used)
		q.first += q.used
		q.n -= q.used
		q.used = 0
	}
}

// NextRecv implements verbs.RecvSource.
func (q *RQ) NextRecv(wr *verbs.RecvWR) bool {
	if !q.next(RQEFixed) {
		return false
	}
	q.more(RQEFixed, min(int(le.Uint16(q.wqe[RQENumSGE:])), q.maxSGE)*SGESize)
	// The entry is free at once: a client that keeps the ring full posts the next receive on a completion.
	q.ring.Release(1)
	q.first++
	q.n--
	decodeRecv(q.wqe, wr, q.maxSGE)
	return true
}

// writer is the client's end of a ring.
type writer struct {
	file
	ring              ring.Producer
	slots             []byte
	entries, stride   int
	maxSGE, maxInline int
}

func newWriter(f file, h header) writer {
	r := f.mem[HeaderSize:]
	return writer{
		file:    f,
		ring:    ring.NewProducer(word32(r, RingProducer), word32(r, RingConsumer), uint32(h.entries)),
		slots:   r[RingEntries:],
		entries: h.entries, stride: h.stride, maxSGE: h.maxSGE, maxInline: h.maxInline,
	}
}

// Space returns how many work requests can be posted now.
func (w *writer) Space() int { return int(w.ring.Free(uint32(w.entries))) }

// Depth returns how many work requests the ring holds.
func (w *writer) Depth() int { return w.entries }

// free returns the next entry to be written, or ErrFull or ErrFreed.
func (w *writer) free() ([]byte, error) {
	if w.ring.Free(1) == 0 {
		if w.freed() {
			return nil, ErrFreed
		}
		return nil, ErrFull
	}
	i, _ := w.ring.Reserve(1)
	off := int(w.ring.Mask(i)) * w.stride
	return w.slots[off : off+w.stride], nil
}

// SQProducer is the client's end of a send ring. One goroutine at a time may
// use it.
type SQProducer struct{ writer }

// RQProducer is the client's end of a receive ring. One goroutine at a time
// may use it.
type RQProducer struct{ writer }

// MapSQ maps the send ring in fd, which the caller still owns.
func MapSQ(fd int) (*SQProducer, error) {
	f, h, err := attach(fd, KindSQ)
	if err != nil {
		return nil, err
	}
	return &SQProducer{newWriter(f, h)}, nil
}

// MapRQ maps the receive ring in fd, which the caller still owns.
func MapRQ(fd int) (*RQProducer, error) {
	f, h, err := attach(fd, KindRQ)
	if err != nil {
		return nil, err
	}
	return &RQProducer{newWriter(f, h)}, nil
}

// Post puts wr in the ring. It returns ErrFull, ErrFreed, or ErrWR if wr has more SGEs or inline data than the ring
// allows. The worker learns of it when the QP's doorbell is rung.
func (p *SQProducer) Post(wr *verbs.SendWR) error {
	if !fitsSend(wr, p.maxSGE, p.maxInline) {
		return ErrWR
	}
	e, err := p.free()
	if err != nil {
		return err
	}
	encodeSend(e, wr)
	p.ring.Submit()
	return nil
}

// Post puts wr in the ring. It returns ErrFull, ErrFreed, or ErrWR if wr has more SGEs than the ring allows. Receives
// need no doorbell.
func (p *RQProducer) Post(wr *verbs.RecvWR) error {
	if len(wr.SGEs) > p.maxSGE {
		return ErrWR
	}
	e, err := p.free()
	if err != nil {
		return err
	}
	encodeRecv(e, wr)
	p.ring.Submit()
	return nil
}
