package dataplane

import (
	"encoding/binary"
	"slices"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
)

// A Tap copies frames in both directions: received frames before they are processed, and sent
// frames as they are posted. Workers never wait for the reader; frames for which there is no
// room are dropped and counted.
type Tap struct {
	match   func(*pkt.Flow) bool // nil: every frame
	snap    int
	rings   []tapRing // one for each worker
	dropped atomic.Uint64
}

// tapRing holds the copies of one worker, which writes it; one goroutine reads it.
type tapRing struct {
	heads []tapHead
	data  []byte // snap bytes per head
	_     [64]byte
	put   atomic.Uint64
	_     [64]byte
	got   atomic.Uint64
}

type tapHead struct {
	at   clock.Time
	size int // length of the frame
	n    int // bytes copied
	out  bool
}

// TapFrame is one copy. Data is valid until the function that got it returns.
type TapFrame struct {
	At     clock.Time
	Worker int
	Out    bool // the frame was sent, not received
	Size   int  // length of the frame; Data may be truncated
	Data   []byte
}

// NewTap returns a Tap for frames that match. Workers call match with our end as Local; nil
// matches all frames. Each worker has room for frames copies of snap bytes.
func (e *Engine) NewTap(frames, snap int, match func(*pkt.Flow) bool) *Tap {
	t := &Tap{match: match, snap: snap, rings: make([]tapRing, len(e.workers))}
	for i := range t.rings {
		t.rings[i].heads = make([]tapHead, frames)
		t.rings[i].data = make([]byte, frames*snap)
	}
	return t
}

// AddTap activates t from the workers' next turn on.
func (e *Engine) AddTap(t *Tap) {
	e.tapMu.Lock()
	defer e.tapMu.Unlock()
	var taps []*Tap
	if old := e.taps.Load(); old != nil {
		taps = slices.Clone(*old)
	}
	taps = append(taps, t)
	e.taps.Store(&taps)
}

// RemoveTap deactivates t. A worker may still copy a frame that it is processing.
func (e *Engine) RemoveTap(t *Tap) {
	e.tapMu.Lock()
	defer e.tapMu.Unlock()
	old := e.taps.Load()
	if old == nil {
		return
	}
	taps := slices.DeleteFunc(slices.Clone(*old), func(o *Tap) bool { return o == t })
	if len(taps) == 0 {
		e.taps.Store(nil)
		return
	}
	e.taps.Store(&taps)
}

// Dropped returns the number of dropped frames.
func (t *Tap) Dropped() uint64 { return t.dropped.Load() }

// Read calls f for each available copy until it returns false, which leaves that copy in place,
// and returns the number of copies consumed. It must not be called concurrently.
func (t *Tap) Read(f func(*TapFrame) bool) int {
	n := 0
	for i := range t.rings {
		r := &t.rings[i]
		for got, put := r.got.Load(), r.put.Load(); got != put; got++ {
			at := int(got % uint64(len(r.heads)))
			h := &r.heads[at]
			if !f(&TapFrame{At: h.at, Worker: i, Out: h.out, Size: h.size, Data: r.data[at*t.snap:][:h.n]}) {
				return n
			}
			r.got.Store(got + 1)
			n++
		}
	}
	return n
}

// take copies the frame in pieces. Called by the worker.
func (t *Tap) take(w *worker, flow *pkt.Flow, out bool, size int, pieces [][]byte) {
	if t.match != nil && (flow == nil || !t.match(flow)) {
		return
	}
	r := &t.rings[w.id]
	put := r.put.Load()
	if put-r.got.Load() >= uint64(len(r.heads)) {
		t.dropped.Add(1)
		return
	}
	at := int(put % uint64(len(r.heads)))
	n := 0
	for _, p := range pieces {
		n += copy(r.data[at*t.snap+n:(at+1)*t.snap], p)
	}
	r.heads[at] = tapHead{w.now, size, n, out}
	r.put.Store(put + 1)
}

// tapIn passes a received frame to the taps.
func (w *worker) tapIn(f *link.Frame) {
	var p pkt.Packet
	var flow *pkt.Flow
	if p.Parse(f.Pieces[0], f.Len()) == nil {
		flow = &p.Flow
		var e pkt.ICMPError
		switch p.Proto {
		case pkt.ProtoICMP, pkt.ProtoICMPv6:
			if e.Parse(&p, f.Pieces[0]) == nil {
				e.Decapsulate()
				flow = &e.Flow // a quoted packet identifies the connection
			}
		case pkt.ProtoUDP: // to the association in it
			if b := f.Pieces[0][p.L4Off:]; p.Flow.LocalPort == sctp.UDPPort && p.L4Len >= 12 && len(b) >= 12 {
				p.Flow.RemotePort, p.Flow.LocalPort = binary.BigEndian.Uint16(b[8:]), binary.BigEndian.Uint16(b[10:])
			}
		}
	}
	for _, t := range *w.taps {
		t.take(w, flow, false, f.Len(), f.Pieces[:f.N])
	}
}

// tapOut passes a sent frame to the taps.
func (w *worker) tapOut(flow *pkt.Flow, b []byte) {
	pieces := [1][]byte{b}
	for _, t := range *w.taps {
		t.take(w, flow, true, len(b), pieces[:])
	}
}
