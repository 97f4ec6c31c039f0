package rdmap

import (
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// HandleEarly is HandleEarlyMarked for bytes without markers.
func (s *Stream) HandleEarly(key serial.Num, b []byte) bool {
	return s.HandleEarlyMarked(key, marked.Bytes{B: b})
}

// HandleEarlyMarked processes a ULPDU that is out of order: it places the payload and keeps the header under key until DeliverEarly. It
// returns false, without lasting effect, if the ULPDU must be passed again in order. That is so if it is not an RDMA Write, a Read Response
// to an outstanding Read or a Send that has a buffer, if a check fails (whether the error is the stream's first is known only in order), or
// if no more headers can be kept. A ULPDU may be passed early more than once.
func (s *Stream) HandleEarlyMarked(key serial.Num, u marked.Bytes) bool {
	n := u.Len()
	b := s.frontOf(u, n)
	if !s.receiving() || s.expect != 0 || !s.early.room(key) || !s.placeEarly(u, b, n) {
		s.stats.RxEarlyRefused++
		return false
	}
	s.early.put(key, b, n)
	s.stats.RxEarlyPlaced++
	return true
}

// placeEarly places the payload of u, which has segLen bytes, the first of which are b.
func (s *Stream) placeEarly(u marked.Bytes, b []byte, segLen int) bool {
	if ddp.IsTagged(b) {
		var h ddp.Tagged
		n := segLen - ddp.TaggedLen
		if _, err := h.Decode(b); err != nil || h.ULP&ctrlVersion != version {
			return false
		}
		op := OpWrite
		switch h.ULP & ctrlOpcode {
		case opcodeWrite:
		case opcodeReadResponse:
			op = OpRead
			if !s.awaited(&h, n) {
				return false
			}
		default:
			return false
		}
		return n == 0 || s.placeTagged(&h, op, u.After(ddp.TaggedLen), n) == nil
	}
	var h ddp.Untagged
	if _, err := h.Decode(b); err != nil || s.checkUntagged(&h) != nil {
		return false
	}
	n := segLen - ddp.UntaggedLen
	op := sendOps[h.ULP&ctrlOpcode]
	if !op.isSend() || !s.recvq.InWindow(h.MSN) || s.shared && h.MSN != s.recvq.Head() || !s.supply(&h) {
		return false
	}
	buf, terr := s.recvq.Check(&h, n)
	if terr != nil {
		return false
	}
	return n == 0 || s.placeRecv(&h, op, buf.ID, u.After(ddp.UntaggedLen)) == nil
}

// awaited reports whether a Read Response segment of n bytes belongs to an outstanding Read.
func (s *Stream) awaited(h *ddp.Tagged, n int) bool {
	for i := s.pendHead; i != s.pendTail; i++ {
		p := s.pending(i)
		if p.atomic {
			continue
		}
		if n == 0 || p.stag == h.STag && p.covers(h.TO, uint64(n)) {
			return true
		}
	}
	return false
}

// covers reports whether the sink of a Read contains n bytes at to.
func (p *pending) covers(to, n uint64) bool {
	off := to - p.to
	return off <= uint64(p.length) && n <= uint64(p.length)-off
}

// DeliverEarly completes the ULPDU that HandleEarly placed under key, now that it is in order. Errors are as in HandleULPDU.
func (s *Stream) DeliverEarly(key serial.Num) *term.Error {
	e, ok := s.early.take(key)
	if !s.receiving() {
		s.stats.RxDropped++
		return nil
	}
	if !ok { // no segment has this key: the caller has lost track
		s.fail(term.ErrRDMAPLocal, nil, 0, nil)
		return term.ErrRDMAPLocal
	}
	s.stats.RxSegments++
	s.stats.RxBytes += uint64(e.segLen)
	seg, segLen := e.hdr[:], int(e.segLen)
	if ddp.IsTagged(seg) {
		var h ddp.Tagged
		if _, err := h.Decode(seg); err != nil {
			return s.failSegment(headerError(err), seg, segLen)
		}
		if err := s.handleTagged(&h, marked.Bytes{}, segLen-ddp.TaggedLen, true); err != nil {
			return s.failSegment(err, seg, segLen)
		}
		return nil
	}
	var h ddp.Untagged
	if _, err := h.Decode(seg); err != nil {
		return s.failSegment(headerError(err), seg, segLen)
	}
	s.rxData = true
	return s.handleSend(&h, marked.Bytes{}, seg, segLen, true)
}

// earlySeg is a segment that was placed out of order.
type earlySeg struct {
	key    serial.Num
	segLen uint32
	hdr    [ddp.UntaggedLen]byte
	used   bool
}

// earlyTable holds the segments placed early, by key: a hash table with linear
// probing, half full at most.
type earlyTable struct {
	segs  []earlySeg
	n     int
	limit int // 0 or less: nothing is placed early
	shift uint
}

func (t *earlyTable) alloc() {
	t.segs = make([]earlySeg, pow2(2*t.limit))
	t.shift = 32
	for n := len(t.segs); n > 1; n >>= 1 {
		t.shift--
	}
}

func (t *earlyTable) home(key serial.Num) int {
	return int(uint32(key) * 0x9e3779b1 >> t.shift)
}

// find returns the slot of key, or the free slot where it belongs.
func (t *earlyTable) find(key serial.Num) int {
	i := t.home(key)
	for t.segs[i].used && t.segs[i].key != key {
		i = (i + 1) & (len(t.segs) - 1)
	}
	return i
}

// room reports whether key is in the table or can be put there.
func (t *earlyTable) room(key serial.Num) bool {
	return t.n < t.limit || t.n > 0 && t.segs[t.find(key)].used
}

// put stores the header of a segment of segLen bytes that begins with seg.
func (t *earlyTable) put(key serial.Num, seg []byte, segLen int) {
	if t.segs == nil {
		t.alloc()
	}
	e := &t.segs[t.find(key)]
	if !e.used {
		t.n++
	}
	e.key, e.used, e.segLen = key, true, uint32(segLen)
	copy(e.hdr[:], seg)
}

func (t *earlyTable) take(key serial.Num) (e earlySeg, ok bool) {
	if t.n == 0 {
		return earlySeg{}, false
	}
	i := t.find(key)
	if e = t.segs[i]; !e.used {
		return earlySeg{}, false
	}
	t.n--
	// Move up the entries that the free slot would hide.
	mask := len(t.segs) - 1
	for j := (i + 1) & mask; t.segs[j].used; j = (j + 1) & mask {
		if (j-t.home(t.segs[j].key))&mask >= (j-i)&mask {
			t.segs[i] = t.segs[j]
			i = j
		}
	}
	t.segs[i] = earlySeg{}
	return e, true
}
