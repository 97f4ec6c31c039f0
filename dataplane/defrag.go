package dataplane

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/ipfrag"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// IP fragments are reassembled in one place for all workers of a device: they have no ports, and a hash of
// their own, so they arrive on any queue. The packet is passed to the first worker, which
// forwards it to the worker of its connection if that is another one.

// maxWhole bounds the bytes of reassembled packets in transit to the workers, and the bytes
// that each worker holds out of order.
const maxWhole = 4 << 20

// FragmentSource provides frames with IP fragments; bpf.Fragments implements it. Read returns
// os.ErrDeadlineExceeded after the deadline, unless that is zero, and any other error when
// there will be no more frames, such as after Close. The bytes are valid until the next Read.
type FragmentSource interface {
	Read(deadline time.Time) ([]byte, error)
	Close() error
}

// FragmentStats are the counters of reassembly, for all workers.
type FragmentStats struct {
	ipfrag.Stats
	Lost uint64 // packets dropped after reassembly because the worker was too far behind
}

// defrag reassembles the fragments from the workers' links and from the engine's
// FragmentSource.
type defrag struct {
	e      *Engine
	dev    *device
	source FragmentSource // source in addition to the queues, or nil

	mu     sync.Mutex
	r      *ipfrag.Reassembler // nil until the first fragment
	queued atomic.Int64        // bytes of packets in transit to a worker
	lost   atomic.Uint64
	done   chan struct{} // closed when the reader has ended; may be nil
}

func (d *defrag) stats() (s FragmentStats) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.r != nil {
		s.Stats = d.r.Stats()
	}
	s.Lost = d.lost.Load()
	return s
}

// start reads from the source.
func (d *defrag) start() {
	if d.source != nil {
		d.done = make(chan struct{})
		go d.read()
	}
}

// stop closes the source, and waits for its reader.
func (d *defrag) stop() {
	if d.source != nil {
		_ = d.source.Close()
	}
	if d.done != nil {
		<-d.done
	}
}

// read reads from the source until it is closed.
func (d *defrag) read() {
	defer close(d.done)
	for {
		var wait time.Time
		now := d.e.cfg.Now
		if at := d.timeout(); at != 0 {
			wait = time.Now().Add(at.Sub(now()) + time.Millisecond) // a source may return that much too early
		}
		b, err := d.source.Read(wait)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return
		default:
			if whole := d.handle(now(), b); whole != nil {
				d.deliver(d.dev.workers[0], whole, false)
			}
		}
	}
}

// timeout drops packets that have timed out, and returns the time of the next time-out.
func (d *defrag) timeout() clock.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.r == nil {
		return 0
	}
	d.r.HandleTimeout(d.e.cfg.Now())
	d.reportExpired()
	return d.r.Deadline()
}

// handle processes a frame with a fragment. It returns the frame of the packet if that is
// now complete.
func (d *defrag) handle(now clock.Time, frame []byte) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.r == nil {
		d.r = ipfrag.New(ipfrag.Config{})
	}
	whole := d.r.Handle(now, frame)
	d.reportExpired()
	return whole
}

// reportExpired makes the device's first worker send the ICMP errors for packets that have timed
// out. d.mu is held.
func (d *defrag) reportExpired() {
	for {
		x, ok := d.r.PollExpired()
		if !ok {
			return
		}
		d.dev.workers[0].post(func(w *worker) { w.timeExceeded(x) })
	}
}

// deliver passes a reassembled packet to a worker. moved is set if another worker has
// already forwarded it.
func (d *defrag) deliver(w *worker, b []byte, moved bool) {
	n := int64(len(b))
	if d.queued.Add(n) > maxWhole {
		d.queued.Add(-n)
		d.lost.Add(1)
		return
	}
	w.post(func(w *worker) {
		d.queued.Add(-n)
		w.takeWhole(b, moved)
	})
}

// takeWhole processes a reassembled packet. moved is set if another worker has forwarded it.
func (w *worker) takeWhole(b []byte, moved bool) {
	f := &rxFrame{Frame: &link.Frame{N: 1}, whole: true, moved: moved}
	f.Pieces[0] = b
	if w.taps != nil && !moved {
		w.tapIn(f.Frame)
	}
	w.frame(f)
}

// gathered returns the bytes of f in one newly allocated slice.
func gathered(f *link.Frame) []byte {
	b := make([]byte, 0, f.Len())
	for _, p := range f.Pieces[:f.N] {
		b = append(b, p...)
	}
	return b
}

// fragment processes a frame of the link that contains a fragment.
func (w *worker) fragment(f *rxFrame) {
	if whole := w.dev.frags.handle(w.now, gathered(f.Frame)); whole != nil {
		w.takeWhole(whole, false)
	}
}

// timeExceeded reports to the source of a packet that not all of its fragments arrived in time
// (RFC 792; RFC 4443, Section 3.3).
func (w *worker) timeExceeded(e ipfrag.Expired) {
	t := pkt.Tuple{Proto: pkt.ProtoICMP, V6: e.Quote[0]>>4 == 6, SrcMAC: [6]byte(e.Head), DstMAC: [6]byte(e.Head[6:])}
	for at := 14; at+4 <= len(e.Head); at += 4 {
		t.VLANs[t.NVLAN] = binary.BigEndian.Uint16(e.Head[at:])
		t.NVLAN++
	}
	kind := byte(11)
	if t.V6 {
		kind, t.Proto = 3, pkt.ProtoICMPv6
		t.Remote, t.Local = [16]byte(e.Quote[8:]), [16]byte(e.Quote[24:])
	} else {
		t.Remote, t.Local = mapped(e.Quote[12:]), mapped(e.Quote[16:])
	}
	n := 8 + len(e.Quote)
	if n > w.mtu-40 || w.e.isHostless(t.Remote) { // RFC 1122, Section 3.2.2: not to a source that is no single host
		return
	}
	s, ok := w.spareSlot()
	if !ok {
		return
	}
	at := t.HeaderLen()
	b := w.link.Bytes(s)[:at+n]
	t.Put(b, n, 0)
	msg := b[at:]
	copy(msg, []byte{kind, 1, 0, 0, 0, 0, 0, 0}) // code 1: fragment reassembly time exceeded
	copy(msg[8:], e.Quote)
	sum := uint32(0)
	if t.V6 {
		sum = t.PseudoSum(n)
	}
	binary.BigEndian.PutUint16(msg[2:], pkt.Checksum(pkt.Sum(msg, sum)))
	w.postFrame(nil, s, 0, len(b))
	w.stats.TxStateless++
}

// mapped returns the IPv4 address at b, v4-mapped.
func mapped(b []byte) [16]byte {
	return [16]byte{10: 0xff, 11: 0xff, 12: b[0], 13: b[1], 14: b[2], 15: b[3]}
}
