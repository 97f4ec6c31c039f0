package sctp

import (
	"bytes"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// rig is an association under test, with its peer driven by hand.
type rig struct {
	t       *testing.T
	now     clock.Time
	a       *Assoc
	l       *Listener
	cfg     Config
	key     Secret
	flow    pkt.Flow
	peerTag uint32
	peerTSN serial.Num
	sent    [][]byte // packets sent since take was called
	to      []int    // and their paths, except for a listener's answers
	udp     []uint16 // and their UDP ports
	from    uint16   // the port that the peer's packets come from
	data    []Data
	got     []string
	kept    map[int]string
	events  []Event
}

const rigTag, rigTSN = 0xaabbccdd, serial.Num(0xfffffff0)

func newRig(t *testing.T, cfg Config) *rig {
	r := &rig{t: t, now: simStart, cfg: cfg, key: Secret{9}, flow: simFlow(1, false), peerTag: rigTag, peerTSN: rigTSN, kept: map[int]string{}}
	if cfg.UDP {
		r.from = UDPPort
	}
	return r
}

// listening creates the association from the peer's INIT and COOKIE ECHO.
func listening(t *testing.T, cfg Config) *rig {
	r := newRig(t, cfg)
	r.l = NewListener(&r.cfg, &r.key, 1500)
	r.cookieEcho(r.init())
	if r.a == nil || r.a.State() != Established {
		t.Fatal("not established")
	}
	r.take()
	return r
}

// dialing creates the association by our INIT and stops in the state given.
func dialing(t *testing.T, cfg Config, stop State) *rig {
	r := newRig(t, cfg)
	r.a = Dial(r.now, &r.cfg, r.flow, &r.key, 1500)
	r.drain(nil)
	if stop == CookieWait {
		return r
	}
	r.send(r.a.tag, r.initChunk(ChunkInitAck, []byte("cookie")))
	if stop == CookieEchoed {
		r.take()
		return r
	}
	r.send(r.a.tag, chunk(ChunkCookieAck, 0, nil))
	r.take()
	return r
}

func chunk(t ChunkType, flags uint8, body []byte) []byte { return appendChunk(nil, t, flags, body) }

func (r *rig) initChunk(t ChunkType, cookie []byte) []byte {
	i := Init{Tag: r.peerTag, Rwnd: 100000, Out: 10, In: 10, TSN: r.peerTSN, Cookie: cookie}
	return i.Append(nil, t)
}

// init sends an INIT and returns the answer's content.
func (r *rig) init() Init {
	r.t.Helper()
	r.send(0, r.initChunk(ChunkInit, nil))
	return r.initAck()
}

// initAck returns the content of the INIT ACK that was just sent.
func (r *rig) initAck() Init {
	r.t.Helper()
	b := r.one(ChunkInitAck)
	var i Init
	var c Chunk
	if _, err := NextChunk(b, HeaderLen, &c); err != nil || i.Decode(c.Body) != nil {
		r.t.Fatal("bad INIT ACK")
	}
	i.Cookie = append([]byte(nil), i.Cookie...)
	return i
}

func (r *rig) cookieEcho(i Init) { r.send(i.Tag, chunk(ChunkCookieEcho, 0, i.Cookie)) }

// send delivers a packet of chunks to the association or the listener.
func (r *rig) send(tag uint32, chunks ...[]byte) {
	h := Header{r.flow.RemotePort, r.flow.LocalPort, tag}
	r.packet(append(h.Append(nil), bytes.Join(chunks, nil)...))
}

func (r *rig) packet(b []byte) {
	if r.a == nil {
		a, reply := r.l.HandlePacket(r.now, r.flow, r.from, b)
		if reply != nil {
			r.sent = append(r.sent, reply)
		}
		if r.a = a; a == nil {
			return
		}
	}
	r.a.HandlePacket(r.now, r.flow, r.from, b)
	r.drain(b)
}

// manyHomed creates an association with a peer that has n addresses: 10.0.0.2, of the rig's flow, then 10.0.1.1 and
// so on.
func manyHomed(t *testing.T, cfg Config, n int) *rig {
	r := newRig(t, cfg)
	r.l = NewListener(&r.cfg, &r.key, 1500)
	b := r.initChunk(ChunkInit, nil)
	for i := 1; i < n; i++ {
		b = appendParam(b, paramIPv4, []byte{10, 0, 1, byte(i)})
	}
	be.PutUint16(b[2:], uint16(len(b)))
	r.send(0, b)
	r.cookieEcho(r.initAck())
	if got := r.a.Paths(); got != n {
		t.Fatalf("%d paths, want %d", got, n)
	}
	return r
}

// sendFrom is send from the address of path i.
func (r *rig) sendFrom(i int, tag uint32, chunks ...[]byte) {
	flow := r.flow
	r.flow.Remote = r.a.Path(i).Addr.As16()
	r.send(tag, chunks...)
	r.flow = flow
}

// heartbeats answers those that were sent on paths for which alive returns true, and returns the number sent on each
// path.
func (r *rig) heartbeats(alive func(path int) bool) map[int]int {
	n := map[int]int{}
	to := r.to
	for k, b := range r.take() {
		var c Chunk
		if _, err := NextChunk(b, HeaderLen, &c); err == nil && c.Type == ChunkHeartbeat {
			n[to[k]]++
			if alive(to[k]) {
				r.sendFrom(to[k], r.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
			}
		}
	}
	return n
}

func (r *rig) drain(b []byte) {
	var d Data
	for r.a.PollData(&d) {
		r.data = append(r.data, d)
		switch d.Act {
		case Deliver:
			r.got = append(r.got, string(b[d.Off:d.Off+d.Len]))
		case Keep:
			r.kept[d.Slot] = string(b[d.Off : d.Off+d.Len])
		case DeliverKept:
			r.got = append(r.got, r.kept[d.Slot])
			delete(r.kept, d.Slot)
		case Forget:
			delete(r.kept, d.Slot)
		}
	}
	var o Out
	for r.a.PollTransmit(r.now, &o) {
		p := append([]byte(nil), o.Head...)
		for i := range o.Parts[:o.N] {
			p = append(p, o.Parts[i].Hdr[:]...)
			p = append(p, make([]byte, o.Parts[i].Len+o.Parts[i].Pad)...)
		}
		r.sent, r.to, r.udp = append(r.sent, p), append(r.to, o.Path), append(r.udp, o.UDP)
	}
	for {
		e, ok := r.a.PollEvent()
		if !ok {
			break
		}
		r.events = append(r.events, e)
	}
}

func (r *rig) take() [][]byte {
	s := r.sent
	r.sent, r.to, r.udp = nil, nil, nil
	return s
}

// one returns the only packet sent, which must begin with a chunk of type t.
func (r *rig) one(t ChunkType) []byte {
	r.t.Helper()
	s := r.take()
	if len(s) != 1 || types(s[0])[0] != t {
		r.t.Fatalf("sent %v, want one %v", describe(s), t)
	}
	return s[0]
}

func (r *rig) none() {
	r.t.Helper()
	if s := r.take(); len(s) != 0 {
		r.t.Fatalf("sent %v, want nothing", describe(s))
	}
}

func types(b []byte) (out []ChunkType) {
	for off := HeaderLen; off < len(b); {
		var c Chunk
		next, err := NextChunk(b, off, &c)
		if err != nil {
			break
		}
		out = append(out, c.Type)
		off = next
	}
	return out
}

func describe(s [][]byte) (out [][]ChunkType) {
	for _, b := range s {
		out = append(out, types(b))
	}
	return out
}

// wait advances the clock by d and runs every time-out.
func (r *rig) wait(d time.Duration) {
	end := r.now.Add(d)
	for {
		at := r.a.Deadline()
		if at == 0 || at > end {
			break
		}
		r.now = max(r.now, at)
		r.a.HandleTimeout(r.now)
		r.drain(nil)
	}
	r.now = end
}

func dataBytes(flags uint8, tsn serial.Num, stream, ssn uint16, s string) []byte {
	d := dataChunk{flags: flags, tsn: tsn, stream: stream, ssn: ssn, ppid: 16, n: len(s)}
	var h [dataHeader]byte
	d.put(&h)
	b := append(h[:], s...)
	return append(b, zero4[:pad4(len(s))-len(s)]...)
}

func (r *rig) recv(flags uint8, tsn int, stream, ssn uint16, s string) {
	r.send(r.a.tag, dataBytes(flags, rigTSN.Add(tsn), stream, ssn, s))
}

func (r *rig) push(n int) {
	r.a.Push(&Message{Buf: Buf(n), Len: n})
	r.drain(nil)
}

func sackBytes(cum serial.Num, rwnd uint32, gaps ...uint16) []byte {
	b := be.AppendUint32(nil, uint32(cum))
	b = be.AppendUint32(b, rwnd)
	b = be.AppendUint16(b, uint16(len(gaps)/2))
	b = be.AppendUint16(b, 0)
	for _, g := range gaps {
		b = be.AppendUint16(b, g)
	}
	return chunk(ChunkSack, 0, b)
}

// cause returns the first error cause of an ABORT or ERROR that begins b.
func cause(b []byte) (causeCode, []byte) {
	var c Chunk
	var p param
	if _, err := NextChunk(b, HeaderLen, &c); err != nil || len(c.Body) == 0 {
		return 0, nil
	}
	if _, err := nextParam(c.Body, &p); err != nil {
		return 0, nil
	}
	return causeCode(p.Type), p.Body
}
