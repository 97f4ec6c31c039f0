// Package ipfrag reassembles IP packets (RFC 791, Section 3.2; RFC 1122, Section 3.3.2; RFC 8200,
// Section 4.5). It takes the time as an argument. Its memory is bounded in total and per source.
// When a bound is reached the oldest packet is dropped, not the newest, so a flood of fragments
// cannot block reassembly until a time-out.
//
// Overlapping fragments discard their packet in both address families (RFC 5722; RFC 8200), since
// no router creates them. Exact duplicates are ignored.
package ipfrag

import (
	"bytes"
	"container/list"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

const (
	// Timeout4 is the time after its first fragment arrived at which an incomplete IPv4 packet
	// is dropped. RFC 1122 recommends at least 60 s, but at today's rates the 16-bit
	// identification wraps sooner, and old fragments would be mixed with those of a new packet
	// (RFC 4963, Section 4). Linux uses 30 s.
	Timeout4 = 30 * time.Second
	// Timeout6 is the same for IPv6 (RFC 8200, Section 4.5).
	Timeout6 = 60 * time.Second

	// maxPieces bounds the fragments of a packet, and with them the work to insert one. A
	// packet of 64 KiB on a path with an MTU of 576 has 119.
	maxPieces = 128
	// overhead is the memory charged for a packet, and for each fragment, in addition to its
	// bytes.
	overhead = 256
	// maxErrors bounds the ICMP errors per second (RFC 1812, Section 4.3.2.8; RFC 4443, Section
	// 2.4 (f)), and the number queued.
	maxErrors = 16
)

// Config bounds the memory of a Reassembler. A zero field means its default.
type Config struct {
	Bytes     int // in total; default 4 MiB
	PerSource int // per IPv4 address or IPv6 /64; default an eighth of Bytes
}

// Stats counts fragments and packets.
type Stats struct {
	Received  uint64 // fragments
	Packets   uint64 // reassembled
	Malformed uint64 // fragments that are not part of any valid packet
	Duplicate uint64 // fragments that were received before
	Overlap   uint64 // packets dropped because fragments overlap, or there are too many
	ECN       uint64 // packets dropped because some fragments are not ECN-capable and another is marked CE
	Timeout   uint64 // packets dropped after Timeout4 or Timeout6
	Evicted   uint64 // packets dropped to make room
	Waiting   uint64 // gauge: incomplete packets
	Bytes     uint64 // gauge: memory charged for incomplete packets
}

type key struct {
	src, dst [16]byte
	id       uint32
	proto    uint8 // IPv4 only
	v6       bool
}

// packet is an incomplete packet.
type packet struct {
	key    key
	until  clock.Time
	pieces []piece // ordered by off
	have   int
	total  int  // length of the payload; 0 until the last fragment arrives
	ecn    byte // 1<<codepoint of each fragment, ORed
	cost   int

	first   pkt.Fragment
	head    []byte // of the frame with the first fragment, up to its payload
	quote   []byte // the part of the packet that an ICMP error quotes
	src     *source
	byAge   *list.Element // in Reassembler.age
	bySrc   *list.Element // in src.packets
	refused bool          // discarded; further fragments are ignored
}

// piece is a fragment's payload.
type piece struct {
	off int
	b   []byte
}

// source holds the packets of one source address.
type source struct {
	key     [16]byte
	cost    int
	packets list.List // oldest first
}

// Reassembler reassembles packets. It is not safe for concurrent use.
type Reassembler struct {
	cfg     Config
	packets map[key]*packet
	sources map[[16]byte]*source
	age     [2]list.List // oldest first: IPv4, IPv6
	cost    int
	f       pkt.Fragment
	errors  []Expired
	second  clock.Time // the second that the error budget is for
	allowed int
	stats   Stats
}

// Expired describes an ICMP Time Exceeded error to be sent for a packet that timed out after its
// first fragment had arrived.
type Expired struct {
	Head  []byte // the frame's headers up to the IP header
	Quote []byte // start of the packet
}

// New returns a Reassembler.
func New(cfg Config) *Reassembler {
	if cfg.Bytes == 0 {
		cfg.Bytes = 4 << 20
	}
	if cfg.PerSource == 0 {
		cfg.PerSource = cfg.Bytes / 8
	}
	return &Reassembler{cfg: cfg, packets: make(map[key]*packet), sources: make(map[[16]byte]*source)}
}

// Handle processes a frame with a fragment, of which it keeps copies. If the fragment completes its
// packet, Handle returns a newly allocated frame with the whole packet and the Ethernet header of
// the first fragment.
func (r *Reassembler) Handle(now clock.Time, frame []byte) []byte {
	f := &r.f
	r.stats.Received++
	if f.Parse(frame) != nil {
		r.stats.Malformed++
		return nil
	}
	r.HandleTimeout(now)
	k := key{src: f.Src, dst: f.Dst, id: f.ID, v6: f.V6}
	if !f.V6 {
		k.proto = f.Proto // RFC 8200: in IPv6 it may differ between the fragments of a packet
	}
	p := r.packets[k]
	if p == nil {
		p = r.add(now, k)
	}
	if p.refused {
		return nil
	}
	b := frame[f.Data : f.Data+f.Len]
	switch p.place(f, b) {
	case duplicate:
		r.stats.Duplicate++
		return nil
	case overlap:
		r.stats.Overlap++
		r.refuse(p)
		return nil
	}
	r.charge(p, len(b)+overhead)
	p.ecn |= 1 << f.ECN
	if f.Off == 0 {
		p.keep(f, frame)
		r.charge(p, len(p.head)+len(p.quote))
	}
	if p.have != p.total {
		r.room(p.src)
		return nil
	}
	if p.ecn&(1<<pkt.CE) != 0 && p.ecn&(1<<pkt.NotECT) != 0 { // RFC 3168, Section 5.3
		r.stats.ECN++
		r.drop(p)
		return nil
	}
	whole := p.whole()
	if whole == nil {
		r.stats.Malformed++
	} else {
		r.stats.Packets++
	}
	r.drop(p)
	return whole
}

// add adds an empty packet for k.
func (r *Reassembler) add(now clock.Time, k key) *packet {
	sk := k.src
	if k.v6 {
		clear(sk[8:]) // a sender with one address of a /64 has all of them
	}
	s := r.sources[sk]
	if s == nil {
		s = &source{key: sk}
		r.sources[sk] = s
	}
	p := &packet{key: k, src: s, until: now.Add(Timeout4)}
	if k.v6 {
		p.until = now.Add(Timeout6)
	}
	r.packets[k] = p
	p.byAge, p.bySrc = r.ages(p).PushBack(p), s.packets.PushBack(p)
	r.charge(p, overhead)
	return p
}

func (r *Reassembler) ages(p *packet) *list.List {
	if p.key.v6 {
		return &r.age[1]
	}
	return &r.age[0]
}

func (r *Reassembler) charge(p *packet, n int) {
	p.cost += n
	p.src.cost += n
	r.cost += n
}

// room drops the oldest packets until the memory in use is within its bounds.
func (r *Reassembler) room(s *source) {
	for s.cost > r.cfg.PerSource {
		r.evict(oldest(&s.packets))
	}
	for r.cost > r.cfg.Bytes {
		old := oldest(&r.age[0])
		if o := oldest(&r.age[1]); old == nil || o != nil && o.until.Add(-Timeout6) < old.until.Add(-Timeout4) {
			old = o
		}
		r.evict(old)
	}
}

func (r *Reassembler) evict(p *packet) {
	if !p.refused {
		r.stats.Evicted++
	}
	r.drop(p)
}

// refuse discards the fragments of p and remembers that later ones are to be dropped: "any
// constituent fragments, including those not yet received" (RFC 5722, Section 4).
func (r *Reassembler) refuse(p *packet) {
	r.charge(p, overhead-p.cost)
	p.refused, p.pieces, p.head, p.quote = true, nil, nil, nil
}

func (r *Reassembler) drop(p *packet) {
	delete(r.packets, p.key)
	r.charge(p, -p.cost)
	r.ages(p).Remove(p.byAge)
	p.src.packets.Remove(p.bySrc)
	if p.src.packets.Len() == 0 {
		delete(r.sources, p.src.key)
	}
}

// HandleTimeout drops the packets that have timed out.
func (r *Reassembler) HandleTimeout(now clock.Time) {
	for i := range r.age {
		for p := oldest(&r.age[i]); p != nil && p.until.Due(now); p = oldest(&r.age[i]) {
			if !p.refused {
				r.stats.Timeout++
				r.expired(now, p)
			}
			r.drop(p)
		}
	}
}

// expired queues an ICMP error. Multicast frames cause no error (RFC 1122, Section 3.2.2), nor do those
// from a group, to which it would go.
func (r *Reassembler) expired(now clock.Time, p *packet) {
	if p.head == nil || (p.head[0]|p.head[6])&1 != 0 {
		return
	}
	if now.Sub(r.second) >= time.Second {
		r.second, r.allowed = now, maxErrors
	}
	if r.allowed == 0 || len(r.errors) == maxErrors {
		return
	}
	r.allowed--
	r.errors = append(r.errors, Expired{p.head[:p.first.L3Off], p.quote})
}

// PollExpired returns the next ICMP error to be sent.
func (r *Reassembler) PollExpired() (e Expired, ok bool) {
	if len(r.errors) == 0 {
		return e, false
	}
	e = r.errors[0]
	r.errors = slices.Delete(r.errors, 0, 1)
	return e, true
}

// Deadline returns the time of the next time-out, or 0 if there is none.
func (r *Reassembler) Deadline() (at clock.Time) {
	for i := range r.age {
		if p := oldest(&r.age[i]); p != nil {
			at = clock.Earliest(at, p.until)
		}
	}
	return at
}

// Stats returns the counters.
func (r *Reassembler) Stats() Stats {
	s := r.stats
	s.Waiting, s.Bytes = uint64(len(r.packets)), uint64(r.cost)
	return s
}

type placed uint8

const (
	fits placed = iota
	duplicate
	overlap
)

// place inserts a fragment into p.
func (p *packet) place(f *pkt.Fragment, b []byte) placed {
	end := f.Off + f.Len
	at := len(p.pieces)
	for at > 0 && p.pieces[at-1].off >= f.Off { // fragments mostly arrive in order
		at--
	}
	if at < len(p.pieces) {
		next := &p.pieces[at]
		last := at == len(p.pieces)-1 && p.total != 0
		if next.off == f.Off && bytes.Equal(next.b, b) && f.More != last {
			return duplicate
		}
		if next.off < end || !f.More {
			return overlap
		}
	}
	if at > 0 {
		if prev := &p.pieces[at-1]; prev.off+len(prev.b) > f.Off {
			return overlap
		}
	}
	if p.total != 0 && end > p.total || len(p.pieces) == maxPieces {
		return overlap
	}
	if !f.More {
		p.total = end
	}
	p.have += f.Len
	p.pieces = slices.Insert(p.pieces, at, piece{f.Off, bytes.Clone(b)})
	return fits
}

// keep saves the headers of the first fragment, and the part of it that an ICMP error quotes: up to
// 576 bytes for IPv4 (RFC 1812, Section 4.3.2.3) and 1280 for IPv6 (RFC 4443, Section 3.3).
func (p *packet) keep(f *pkt.Fragment, frame []byte) {
	p.first = *f
	p.head = bytes.Clone(frame[:f.Data])
	most := 576 - 20 - 8
	if f.V6 {
		most = 1280 - 40 - 8
	}
	p.quote = bytes.Clone(frame[f.L3Off:min(f.Data+f.Len, f.L3Off+most)])
}

// whole returns the frame of the complete packet, or nil if the headers of the first fragment make
// it too long.
func (p *packet) whole() []byte {
	n := p.first.Header()
	if n-p.first.L3Off+p.total > 1<<16-1 && !p.key.v6 || n-p.first.L3Off-40+p.total > 1<<16-1 {
		return nil
	}
	ecn := p.first.ECN
	if p.ecn&(1<<pkt.CE) != 0 {
		ecn = pkt.CE
	}
	b := make([]byte, n, n+p.total)
	p.first.Unfragment(b, p.head, p.total, ecn)
	for i := range p.pieces {
		b = append(b, p.pieces[i].b...)
	}
	return b
}

// oldest returns the first packet of l, or nil if there is none.
func oldest(l *list.List) *packet {
	if e := l.Front(); e != nil {
		return e.Value.(*packet)
	}
	return nil
}
