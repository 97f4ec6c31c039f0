package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// A rawPeer takes the place of host 0 and sends host 1 what the test composes.
type rawPeer struct {
	*sim
	local, remote netip.AddrPort
	tag           uint32 // its own
	peerTag, tsn  uint32
	got           [][]byte // received SCTP packets, and their destinations
	to            []netip.Addr
	macs          [][6]byte
}

func newRawPeer(t testing.TB, params ...[]byte) *rawPeer {
	t.Helper()
	return newRawPeerOf(t, newSim(t, link.PipeConfig{}), params...)
}

func newRawPeerOf(t testing.TB, s *sim, params ...[]byte) *rawPeer {
	t.Helper()
	p := &rawPeer{sim: s, local: netip.AddrPortFrom(addrA, 40000), remote: netip.AddrPortFrom(addrB, 7174), tag: 0x11223344, tsn: 1000}
	p.listenSCTP()
	if !p.connect(params...) {
		t.Fatalf("no association, but %x", p.got)
	}
	return p
}

// other returns another peer of host 1, with an association of its own.
func (p *rawPeer) other(local netip.AddrPort, params ...[]byte) *rawPeer {
	p.t.Helper()
	o := *p
	if o.local = local; !o.connect(params...) {
		p.t.Fatalf("no association of %v", local)
	}
	return &o
}

// chunk makes a chunk, or a parameter whose type is t<<8|flags.
func chunk(t sctp.ChunkType, flags byte, body ...byte) []byte {
	b := binary.BigEndian.AppendUint16([]byte{byte(t), flags}, uint16(4+len(body)))
	b = append(b, body...)
	return append(b, make([]byte, -len(b)&3)...)
}

// data makes a DATA chunk with the next TSN.
func (p *rawPeer) data(flags byte, stream, ssn uint16, ppid uint32, body ...byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, p.tsn)
	p.tsn++
	b = binary.BigEndian.AppendUint16(b, stream)
	b = binary.BigEndian.AppendUint16(b, ssn)
	b = binary.BigEndian.AppendUint32(b, ppid)
	return chunk(sctp.ChunkData, flags, append(b, body...)...)
}

// connect sets up an association with params in the INIT. It reports whether host 1 accepts it.
func (p *rawPeer) connect(params ...[]byte) bool {
	p.peerTag = 0
	p.send(p.local.Addr(), p.init(params...))
	cookie, ok := p.initAck()
	if !ok {
		return false
	}
	p.send(p.local.Addr(), chunk(sctp.ChunkCookieEcho, 0, cookie...))
	return p.assoc() != nil
}

// init returns an INIT with params.
func (p *rawPeer) init(params ...[]byte) []byte {
	init := binary.BigEndian.AppendUint32(nil, p.tag)
	init = append(init, 0, 1, 0, 0, 0, 64, 0, 64)
	init = binary.BigEndian.AppendUint32(init, p.tsn)
	init = append(init, 0xc0, 6, 0, 8, 0, 0, 0, 1) // the indication
	return chunk(sctp.ChunkInit, 0, append(init, slices.Concat(params...)...)...)
}

// initAck returns the cookie of the last INIT ACK and stores its tag.
func (p *rawPeer) initAck() (cookie []byte, ok bool) {
	var h sctp.Header
	var c sctp.Chunk
	var ack sctp.Init
	b := p.got[len(p.got)-1]
	if _, err := sctp.NextChunk(b, sctp.HeaderLen, &c); err != nil || c.Type != sctp.ChunkInitAck || h.Decode(b) != nil || h.Tag != p.tag || ack.Decode(c.Body) != nil {
		return nil, false
	}
	p.peerTag = ack.Tag
	return ack.Cookie, true
}

func (p *rawPeer) assoc() *assoc {
	return p.hosts[1].w.assocOf(handoff.Key{Flow: pkt.NewFlow(p.remote, p.local), Proto: pkt.ProtoSCTP})
}

// send sends a packet of chunks from an address and collects the replies.
func (p *rawPeer) send(from netip.Addr, chunks ...[]byte) {
	p.put(from, chunks...)
	p.turn()
}

// put passes host 1 a packet of chunks from an address.
func (p *rawPeer) put(from netip.Addr, chunks ...[]byte) {
	h := sctp.Header{SrcPort: p.local.Port(), DstPort: p.remote.Port(), Tag: p.peerTag}
	b := append(h.Append(nil), slices.Concat(chunks...)...)
	sctp.SetChecksum(b)
	t := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(from, p.local.Port()), p.remote), Proto: pkt.ProtoSCTP, SrcMAC: macA, DstMAC: macB}
	frame := make([]byte, t.HeaderLen(), t.HeaderLen()+len(b))
	t.Put(frame, len(b), 0)
	f := rxFrame{Frame: &link.Frame{N: 1}}
	f.Pieces[0] = append(frame, b...)
	w := p.hosts[1].w
	if err := f.pkt.Parse(f.Pieces[0], f.Len()); err != nil {
		p.t.Fatal(err)
	}
	w.sctpFrame(&f)
}

// turn runs host 1 and collects what it sends.
func (p *rawPeer) turn() {
	for p.hosts[1].w.turn() > 0 {
		p.now = p.now.Add(time.Microsecond)
	}
	p.hosts[1].drain()
	var fs [8]link.Frame
	l := p.hosts[0].link
	for n := l.Receive(fs[:]); n > 0; n = l.Receive(fs[:]) {
		for i := range fs[:n] {
			var in pkt.Packet
			b := slices.Concat(fs[i].Pieces[:fs[i].N]...)
			if err := in.Parse(b, len(b)); err != nil {
				p.t.Fatal(err)
			}
			p.got = append(p.got, b[in.L4Off:in.L4Off+in.L4Len])
			p.to = append(p.to, netip.AddrFrom16(in.Flow.Local).Unmap())
			p.macs = append(p.macs, in.DstMAC)
			l.Release(&fs[i])
		}
	}
}

// chunks returns the received chunks of type t.
func (p *rawPeer) chunks(t sctp.ChunkType) (cs []sctp.Chunk) {
	for _, b := range p.got {
		var c sctp.Chunk
		for off, err := sctp.NextChunk(b, sctp.HeaderLen, &c); err == nil; off, err = sctp.NextChunk(b, off, &c) {
			if c.Type == t {
				cs = append(cs, c)
			}
			if off >= len(b) {
				break
			}
		}
	}
	return cs
}

// TestSCTPFurtherAddress checks that packets may arrive from each address that the peer announced, if they carry the
// association's tag.
func TestSCTPFurtherAddress(t *testing.T) {
	second := netip.MustParseAddr("10.0.0.7")
	p := newRawPeer(t, []byte{0, 5, 0, 8, 10, 0, 0, 7}, []byte{0, 5, 0, 8, 10, 0, 0, 1})
	for end := p.now.Add(time.Second); p.now < end && !slices.Contains(p.to, second); p.now = p.now.Add(time.Millisecond) {
		p.turn()
	}
	hb := p.chunks(sctp.ChunkHeartbeat)
	if len(hb) != 1 {
		t.Fatalf("%d HEARTBEATs", len(hb))
	}
	tag := p.peerTag
	p.peerTag ^= 1
	p.send(second, chunk(sctp.ChunkHeartbeatAck, 0, hb[0].Body...))
	if p.assoc().a.Path(1).Confirmed {
		t.Error("a foreign tag was believed")
	}
	p.peerTag, p.got = tag, nil
	p.send(second, chunk(sctp.ChunkHeartbeatAck, 0, hb[0].Body...))
	if !p.assoc().a.Path(1).Confirmed {
		t.Error("the answer to a HEARTBEAT was not seen")
	}
	p.send(second, p.data(7, 0, 0, 17, 0, 0, 0, 1))
	if _, ok := p.hosts[1].take(EventRequest); !ok {
		t.Error("DATA were not seen")
	}
	if n := len(p.chunks(sctp.ChunkAbort)); n != 0 {
		t.Errorf("%d ABORTs", n)
	}
	// Another host at that address, which knows nothing of the association, is a different peer.
	other := p.other(netip.AddrPortFrom(second, p.local.Port()))
	if p.assoc() == other.assoc() || p.assoc().gone {
		t.Error("an association went to another host")
	}
	for _, q := range []*rawPeer{p, other} {
		q.send(q.local.Addr(), chunk(sctp.ChunkAbort, 0))
	}
	p.turn()
	if w := p.hosts[1].w; w.sctp.n+w.further()+len(w.streams) != 0 {
		t.Errorf("left: %d associations, %d addresses, %d sessions", w.sctp.n, w.further(), len(w.streams))
	}
}

// TestSCTPFurtherAddressICMP checks the effect of an ICMP error about the path to an additional address.
func TestSCTPFurtherAddressICMP(t *testing.T) {
	p := newRawPeer(t, []byte{0, 5, 0, 8, 10, 0, 0, 7})
	w, a := p.hosts[1].w, p.assoc().a
	mtu := a.Path(1).MTU
	for _, tc := range []struct {
		to   string
		tag  uint32
		want int
	}{{"10.0.0.7", p.tag + 1, mtu}, {"10.0.0.8", p.tag, mtu}, {"10.0.0.7", p.tag, 1000}} {
		f := &rxFrame{Frame: &link.Frame{}}
		f.icmp = pkt.ICMPError{Flow: pkt.NewFlow(p.remote, netip.AddrPortFrom(netip.MustParseAddr(tc.to), p.local.Port())),
			Proto: pkt.ProtoSCTP, Kind: pkt.TooBig, MTU: 1000, Seq: tc.tag}
		w.sctpICMP(f)
		if got := a.Path(1).MTU; got != tc.want || a.Path(0).MTU != mtu {
			t.Errorf("to %s, tag %#x: the path's MTU is %d, want %d; the first one's %d", tc.to, tc.tag, got, tc.want, a.Path(0).MTU)
		}
	}
}

// ways is a resolver of neighbours by address.
type ways struct {
	mu   sync.Mutex
	macs map[netip.Addr][6]byte
}

func (r *ways) Resolve(dst, _ netip.Addr, _ string) (Hop, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if mac, ok := r.macs[dst]; ok {
		return Hop{SrcMAC: macB, DstMAC: mac, MTU: 1400}, nil
	}
	return Hop{}, errors.New("no such neighbour")
}

func (*ways) Watch(func()) {}

// TestSCTPFurtherHop checks that packets to an additional address of the peer go to that address's next hop, also
// after it changes.
func TestSCTPFurtherHop(t *testing.T) {
	second, third := netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("10.0.0.8")
	r := &ways{macs: map[netip.Addr][6]byte{second: {2, 0, 0, 0, 0, 7}}}
	s := newSim(t, link.PipeConfig{})
	e := s.hosts[1].e
	e.resolver = r
	p := newRawPeerOf(t, s, []byte{0, 5, 0, 8, 10, 0, 0, 7}, []byte{0, 5, 0, 8, 10, 0, 0, 8})
	p.admit(t)
	// The resolver's answers take no virtual time, and none arrives late.
	answered := func() {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
			if e.hopLookups.Load() == 0 {
				if p.turn(); e.hopLookups.Load() == 0 {
					return
				}
			}
			if time.Now().After(end) {
				t.Fatal("the resolver has not answered")
			}
		}
	}
	sent := func(to netip.Addr) (macs [][6]byte) {
		t.Helper()
		p.got, p.to, p.macs = nil, nil, nil
		// A HEARTBEAT goes there at least once in two minutes, when the RTO is at its maximum.
		for end := p.now.Add(125 * time.Second); p.now < end && !slices.Contains(p.to, to); p.now = p.now.Add(100 * time.Millisecond) {
			answered()
		}
		for i, a := range p.to {
			if a == to && !slices.Contains(macs, p.macs[i]) {
				macs = append(macs, p.macs[i])
			}
		}
		return macs
	}
	answered()
	if got := sent(second); len(got) != 1 || got[0] != r.macs[second] {
		t.Errorf("packets to the second address go to %x, want %x", got, r.macs[second])
	}
	if got := sent(third); len(got) != 1 || got[0] != macA {
		t.Errorf("packets to an unassigned address go to %x, want the first one's, %x", got, macA)
	}
	if mtu := p.assoc().a.Path(1).MTU; mtu != 1400 {
		t.Errorf("the path has an MTU of %d", mtu)
	}
	r.mu.Lock()
	r.macs[second] = [6]byte{2, 0, 0, 0, 0, 9}
	r.mu.Unlock()
	var ids []ConnID
	for id := range s.hosts[1].w.streams {
		ids = append(ids, id)
	}
	infos := make([]ConnInfo, 1)
	s.hosts[1].w.streams[ids[0]].lane.llp.info(&infos[0])
	if len(ids) != 1 || !slices.Equal(infos[0].SCTP.further, [][16]byte{second.As16(), third.As16()}) {
		t.Fatalf("addresses of the peer's: %+v", infos)
	}
	e.resolveConns(ids, pkt.Flow{Local: addrB.As16(), Remote: second.As16()}, "")
	p.turn()
	if got := sent(second); len(got) != 1 || got[0] != r.macs[second] {
		t.Errorf("packets to the second address go to %x now, want %x", got, r.macs[second])
	}
	// Two addresses have paths with their own MTU; the third shares that of the first. An MTU learned from ICMP lasts
	// until the route changes.
	w, a := s.hosts[1].w, p.assoc().a
	mtus := func(what string, want ...int) {
		t.Helper()
		for i, mtu := range want {
			if got := a.Path(i).MTU; got != mtu {
				t.Errorf("%s: path %d has an MTU of %d, want %d", what, i, got, mtu)
			}
		}
	}
	hop := func(to netip.Addr, mtu int) {
		w.streams[ids[0]].lane.llp.setHop(w, to.As16(), &Hop{SrcMAC: macB, DstMAC: r.macs[second], MTU: mtu})
	}
	for _, mtu := range []int{1300, 1500} {
		w.streams[ids[0]].lane.llp.setHop(w, addrA.As16(), &Hop{SrcMAC: macB, DstMAC: macA, MTU: mtu})
		mtus("the first way changes", mtu, 1400, mtu)
	}
	flow := pkt.NewFlow(netip.AddrPortFrom(addrB, 7174), netip.AddrPortFrom(second, 40000))
	a.HandleICMP(w.now, &pkt.ICMPError{Flow: flow, Proto: pkt.ProtoSCTP, Kind: pkt.TooBig, MTU: 1000, Seq: a.PeerTag()})
	hop(second, 1400)
	mtus("ICMP about the second way", 1500, 1000, 1500)
	hop(second, 1450)
	mtus("the second way changes", 1500, 1450, 1500)
	hop(second, 0)
	mtus("the second way takes what the link does", 1500, 1500, 1500)
}

// silence is a resolver of neighbours that do not answer until it is closed.
type silence chan struct{}

func (s silence) Resolve(netip.Addr, netip.Addr, string) (Hop, error) {
	<-s
	return Hop{}, errors.New("no such neighbour")
}

func (silence) Watch(func()) {}

// TestSCTPFurtherHopsOfMany checks that peers that announce unreachable addresses do not keep others from the
// resolver.
func TestSCTPFurtherHopsOfMany(t *testing.T) {
	p := newRawPeer(t, []byte{0, 5, 0, 8, 10, 0, 0, 7})
	w, as, r := p.hosts[1].w, p.assoc(), make(silence)
	w.e.resolver = r
	for range 100 {
		as.findHops(w)
	}
	n := w.e.hopLookups.Load()
	w.e.recheckHop(1, as.key.Flow)
	if got := w.e.hopLookups.Load(); n == 0 || got != n+1 {
		t.Errorf("%d lookups in flight, and %d after another for a connection", n, got)
	}
	close(r)
	testenv.Until(t, "the lookups have ended", func() bool { return w.e.hopLookups.Load() == 0 })
}

// TestSCTPRestartForgets checks that data in flight before the peer restarted is not taken for messages of later
// sessions.
func TestSCTPRestartForgets(t *testing.T) {
	p := newRawPeer(t)
	p.admit(t) // the Accept is not acknowledged
	old := p.assoc()
	p.tag, p.peerTag, p.tsn = 77, 0, 5000
	p.send(p.local.Addr(), p.init())
	cookie, ok := p.initAck()
	if !ok {
		t.Fatal("no INIT ACK")
	}
	p.got = nil
	p.send(p.local.Addr(), chunk(sctp.ChunkCookieEcho, 0, cookie...), p.data(7, 0, 0, 17, 0, 0, 0, 2)) // an Accept of nothing
	if p.assoc() != old || len(p.chunks(sctp.ChunkData)) != 1 || old.a.Unacked() != 1 {
		t.Fatalf("%d messages after the restart, %d not acknowledged", len(p.chunks(sctp.ChunkData)), old.a.Unacked())
	}
	if old.mux.Free(0) {
		t.Error("the stream is free while its Terminate is in flight")
	}
}

// TestSCTPFurtherAddressTwice checks that a peer that announces another peer's address and port neither receives that
// peer's packets nor prevents their delivery.
func TestSCTPFurtherAddressTwice(t *testing.T) {
	second := netip.MustParseAddr("10.0.0.7")
	p := newRawPeer(t, []byte{0, 5, 0, 8, 10, 0, 0, 7}) // this peer announces an address that is not its own
	other := p.other(netip.AddrPortFrom(netip.MustParseAddr("10.0.0.9"), p.local.Port()), []byte{0, 5, 0, 8, 10, 0, 0, 7})
	other.got = nil
	other.send(second, other.data(7, 0, 0, 17, 0, 0, 0, 1))
	if ev, ok := p.hosts[1].take(EventRequest); !ok || ev.Flow != other.assoc().key.Flow {
		t.Error("DATA of the second address were not seen")
	}
	if n := len(other.chunks(sctp.ChunkAbort)); n != 0 {
		t.Errorf("%d ABORTs", n)
	}
	p.send(p.local.Addr(), chunk(sctp.ChunkAbort, 0)) // the other association remains
	other.send(second, chunk(sctp.ChunkHeartbeat, 0, 1, 2, 3, 4))
	if n := len(other.chunks(sctp.ChunkHeartbeatAck)); n != 1 {
		t.Errorf("%d answers to a HEARTBEAT", n)
	}
	other.send(second, chunk(sctp.ChunkAbort, 0))
	if w := p.hosts[1].w; w.sctp.n+w.further()+len(w.streams) != 0 {
		t.Errorf("left: %d associations, %d addresses, %d sessions", w.sctp.n, w.further(), len(w.streams))
	}
}

// piece sends n bytes of a message without an end.
func (p *rawPeer) piece(flags byte, n int) {
	p.send(p.local.Addr(), p.data(flags, 1, 0, 16, make([]byte, n)...))
}

// pieces sends the first n pieces of a message, of size bytes each.
func (p *rawPeer) pieces(n, size int) {
	p.piece(6, size)
	for range n - 1 {
		p.piece(4, size)
	}
}

// window returns the receive window of the last SACK.
func (p *rawPeer) window() uint32 {
	var s sctp.Sack
	sacks := p.chunks(sctp.ChunkSack)
	if len(sacks) == 0 || s.Decode(sacks[len(sacks)-1].Body) != nil {
		p.t.Fatal("no SACK")
	}
	return s.Rwnd
}

// admit accepts the session that the peer requests.
func (p *rawPeer) admit(t *testing.T) {
	t.Helper()
	h := p.hosts[1]
	qb := newSimQP(t, h, 8192)
	p.send(p.local.Addr(), p.data(7, 0, 0, 17, 0, 0, 0, 1))
	ev, ok := h.take(EventRequest)
	if !ok {
		t.Fatal("no request")
	}
	h.w.answerSCTP(h.w.streams[ev.Conn], session.Setup{}, Attachment{QP: &qb.QPBinding, Params: mpa.Params{IRD: 4, ORD: 4}})
	p.turn()
}

// TestSCTPStranger checks that a peer without an accepted session can make us hold little memory, however it
// fragments its data; a peer with one may use the whole window.
func TestSCTPStranger(t *testing.T) {
	for _, size := range []int{1400, 1} {
		p := newRawPeer(t)
		p.pieces(201, size)
		as, memory := p.assoc(), 0
		for _, b := range as.kept {
			memory += cap(b)
		}
		if n := as.a.Kept(); n >= strangerWindow+size || n != as.memory || n != p.hosts[1].w.sctp.memory || memory > 2*strangerWindow || size*30 > n {
			t.Errorf("pieces of %d: keeps %d bytes in buffers of %d, counted %d of %d", size, n, memory, as.memory, p.hosts[1].w.sctp.memory)
		}
		if n := p.window(); n > strangerWindow {
			t.Errorf("a window of %d", n)
		}
		p.send(p.local.Addr(), chunk(sctp.ChunkAbort, 0))
		if w := p.hosts[1].w; w.sctp.memory != 0 {
			t.Errorf("%d bytes are counted of nothing", w.sctp.memory)
		}
	}
	p := newRawPeer(t)
	p.admit(t)
	if n := p.window(); int(n) != p.hosts[1].w.tcp.RcvWindow {
		t.Errorf("a window of %d when the session is accepted", n)
	}
	p.pieces(201, 1400)
	if n := p.assoc().a.Kept(); n != 201*1400 {
		t.Errorf("keeps %d bytes of a session", n)
	}
}

// TestSCTPMemory checks that the memory of all associations is bounded, and that those with accepted sessions lose
// nothing while others still hold some.
func TestSCTPMemory(t *testing.T) {
	p := newRawPeer(t)
	const most = 300 << 10
	w := p.hosts[1].w
	w.e.cfg.SCTP.Memory = most
	p.admit(t)
	p.pieces(101, 1400)
	for port := range uint16(8) {
		other := p.other(netip.AddrPortFrom(p.local.Addr(), 41000+port))
		other.piece(6, 1400)
		for range 50 {
			if other.piece(4, 1400); w.sctp.memory > most {
				t.Fatalf("%d bytes", w.sctp.memory)
			}
		}
	}
	sum := 0
	for as := range w.assocs() {
		sum += as.a.Kept() + as.mux.Memory()
	}
	if w.stats.AssocsNoMemory == 0 || sum != w.sctp.memory || p.assoc() == nil || p.assoc().a.Kept() != 101*1400 {
		t.Errorf("%d associations ended; %d bytes, counted %d", w.stats.AssocsNoMemory, sum, w.sctp.memory)
	}
	w.e.cfg.SCTP.Memory = 100 << 10
	p.piece(4, 1400)
	if p.turn(); w.sctp.memory > 100<<10 || p.assoc() != nil {
		t.Errorf("%d bytes with less room", w.sctp.memory)
	}
}

// segment sends a meaningless DDP segment of a session with the given DDP-SSN.
func (p *rawPeer) segment(stream, ssn uint16) {
	p.send(p.local.Addr(), p.data(7, stream, 0, 16, byte(ssn>>8), byte(ssn), 0, 0, 0, 0))
}

// TestSCTPMemoryOfPlaces checks that the slots that a stream keeps for out-of-order segments count as memory, and
// that empty ones are freed before an association is ended.
func TestSCTPMemoryOfPlaces(t *testing.T) {
	oneGoroutine(t)
	p := newRawPeer(t)
	w := p.hosts[1].w
	w.e.cfg.SCTP.Memory = 100 << 10
	p.send(p.local.Addr(), p.data(7, 0, 0, 17, 0, 0, 0, 1))
	ev, ok := p.hosts[1].take(EventRequest)
	if !ok {
		t.Fatal("no request")
	}
	// The session is accepted but has no queue pair, so segments wait.
	c := w.streams[ev.Conn]
	if err := c.as().mux.Accept(c.sid, session.Setup{}); err != nil {
		t.Fatal(err)
	}
	c.as().admitted = true
	p.segment(0, 900)
	if m := p.assoc().mux; m.Held() > 100 || m.Memory() < 900*24 || w.sctp.memory != m.Memory() {
		t.Errorf("%d bytes are held, %d with their places; counted %d", m.Held(), m.Memory(), w.sctp.memory)
	}
	// Peers without sessions, each with a slot or two on many streams.
	for port := range uint16(40) {
		other := p.other(netip.AddrPortFrom(p.local.Addr(), 41000+port))
		for stream := range uint16(64) {
			other.send(p.local.Addr(), other.data(7, stream, 0, 17, 0, 0, 0, 1))
			other.send(p.local.Addr(), other.data(7, stream, 0, 17, 0, 60, 0, 4))
		}
		if w.sctp.memory > 100<<10 {
			t.Fatalf("%d bytes after %d strangers", w.sctp.memory, port+1)
		}
	}
	if w.stats.AssocsNoMemory == 0 || p.assoc() == nil {
		t.Errorf("%d associations ended; that with a session: %v", w.stats.AssocsNoMemory, p.assoc())
	}
	n := w.stats.AssocsNoMemory
	p.segment(0, 4000) // needs a larger ring than allowed
	if p.turn(); p.assoc() != nil || w.stats.AssocsNoMemory == n {
		t.Errorf("%d bytes, and no association was ended", w.sctp.memory)
	}
}

// TestSCTPMemoryIsFreed checks that an eighth of the memory is free after there was too little: peers must send much before
// all associations are looked at again.
func TestSCTPMemoryIsFreed(t *testing.T) {
	p := newRawPeer(t)
	const most = 80 << 10
	w := p.hosts[1].w
	w.e.cfg.SCTP.Memory = most
	p.admit(t)
	p.pieces(40, 1400)
	for port := uint16(41000); w.stats.AssocsNoMemory == 0; port++ {
		if w.sctp.memory > most {
			t.Fatalf("%d bytes", w.sctp.memory)
		}
		other := p.other(netip.AddrPortFrom(p.local.Addr(), port))
		other.piece(6, 1400)
	}
	if w.sctp.memory > most-most/8 || p.assoc() == nil || p.assoc().a.Kept() != 40*1400 {
		t.Errorf("%d of %d bytes are in use; that with a session: %v", w.sctp.memory, most, p.assoc())
	}
}

// TestSCTPOddPeer has peers send random valid and invalid chunks and then leave. No state of them may remain.
func TestSCTPOddPeer(t *testing.T) {
	oneGoroutine(t)
	base := testenv.Seed(t)
	for i := range testenv.Count(t, "SCTP_PEERS", 100) {
		seed := base + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) { oddPeer(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func oddPeer(t *testing.T, rng *rand.Rand) {
	p := newRawPeer(t, []byte{0, 5, 0, 8, 10, 0, 0, 7})
	any := func(n int) []byte {
		b := make([]byte, rng.IntN(n+1))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	near := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v+uint32(rng.IntN(9))-4) }
	w := p.hosts[1].w
	for range 60 {
		var packet []byte
		for range 1 + rng.IntN(4) {
			var c []byte
			switch rng.IntN(16) {
			default: // session control or a segment, valid or nearly so
				stream, ssn := uint16(rng.IntN(66)), uint16(rng.IntN(3))
				if rng.IntN(4) != 0 {
					stream = uint16(rng.IntN(2))
				}
				if rng.IntN(10) == 0 {
					ssn = uint16(rng.Uint32())
				}
				flags := byte(7)
				if rng.IntN(6) == 0 {
					flags = byte(rng.Uint32())
				}
				if rng.IntN(8) == 0 {
					p.tsn += uint32(rng.IntN(5)) - 2
				}
				body := binary.BigEndian.AppendUint16(nil, ssn)
				body = append(body, 0, byte(rng.IntN(9)))
				c = p.data(flags, stream, uint16(rng.IntN(2)), uint32(15+rng.IntN(4)), append(body, any(40)...)...)
			case 0:
				body := append(near(1000), 0, 1, 0, 0, 0, byte(rng.IntN(3)), 0, byte(rng.IntN(3)))
				c = chunk(sctp.ChunkSack, 0, append(body, any(24)...)...)
			case 1:
				c = chunk(sctp.ChunkShutdown, 0, near(1000)...)
			case 2:
				c = chunk(sctp.ChunkType(rng.Uint32()), byte(rng.Uint32()), any(64)...)
			case 3:
				c = chunk(sctp.ChunkError, 0, any(32)...)
			case 4:
				c = chunk(sctp.ChunkHeartbeat, 0, any(64)...)
			case 5:
				c = p.data(3+4*byte(rng.IntN(2)), 0, 0, 16) // no user data
			case 6:
				types := []sctp.ChunkType{0x40, 0x80, 0x82, 0xc0, 0xc1, 0xc2} // I-DATA, ASCONF ACK, RE-CONFIG, FORWARD TSN, ASCONF, I-FORWARD TSN
				c = chunk(types[rng.IntN(len(types))], 0, any(64)...)
			}
			packet = append(packet, c...)
		}
		from := p.local.Addr()
		if rng.IntN(8) == 0 {
			from = netip.MustParseAddr("10.0.0.7")
		}
		p.send(from, packet)
		for ev, ok := p.hosts[1].take(EventRequest); ok; ev, ok = p.hosts[1].take(EventRequest) {
			if c := w.streams[ev.Conn]; c != nil && rng.IntN(2) == 0 {
				w.disconnect(c, rng.IntN(2) == 0)
			}
		}
		if rng.IntN(4) == 0 {
			p.now = p.now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
			p.turn()
		}
		if rng.IntN(20) == 0 && p.assoc() != nil { // the peer restarts
			p.connect()
		}
	}
	p.send(p.local.Addr(), chunk(sctp.ChunkAbort, 0))
	w.unlisten(1)
	for end := p.now.Add(30 * time.Minute); p.now < end && w.sctp.n > 0; p.now = p.now.Add(time.Second) {
		p.turn()
	}
	p.turn()
	if w.sctp.n+w.further()+len(w.streams)+len(w.sctp.peers)+w.timers.Len() != 0 || w.link.FreeSlots() != w.link.Slots() {
		t.Fatalf("left: %d associations, %d addresses, %d sessions, %d timers, %d slots", w.sctp.n, w.further(), len(w.streams),
			w.timers.Len(), w.link.Slots()-w.link.FreeSlots())
	}
}

// TestSCTPManyRequests checks that a peer that requests sessions faster than the control plane handles them makes
// neither the queue of events nor the number of lookups grow without limit, and that it is served again later.
func TestSCTPManyRequests(t *testing.T) {
	p := newRawPeer(t)
	h := p.hosts[1]
	r := &slowly{asked: make(chan netip.Addr, 10000), gone: make(chan struct{})}
	defer close(r.gone)
	h.e.resolver = r
	initiate := []byte{0, 0, 0, 1}
	request := func() { // the second one is a violation, which ends the session
		p.put(p.local.Addr(), p.data(7, 0, 0, 17, initiate...), p.data(7, 0, 0, 17, initiate...))
		for h.w.turn() > 0 {
			p.now = p.now.Add(time.Microsecond)
		}
	}
	for range 1000 {
		request()
	}
	if n, most := len(h.e.events.q), 3*sctpStreams; n > most {
		t.Errorf("%d events wait for the control plane; at most %d may", n, most)
	}
	if n := len(r.asked); n > 1 {
		t.Errorf("%d lookups of the next hop at once", n)
	}
	h.drain()
	h.events = nil
	for h.w.turn() > 0 {
		p.now = p.now.Add(time.Microsecond)
	}
	p.put(p.local.Addr(), p.data(7, 0, 0, 17, initiate...))
	p.turn()
	if _, ok := h.take(EventRequest); !ok {
		t.Error("no request once the control plane has handled the others")
	}
}

// TestSCTPManyAssocs is TestSCTPManyRequests for a peer that opens and aborts associations.
func TestSCTPManyAssocs(t *testing.T) {
	p := newRawPeer(t)
	h := p.hosts[1]
	abort := chunk(sctp.ChunkAbort, 0)
	p.send(p.local.Addr(), abort)
	p.peerTag = 0
	p.send(p.local.Addr(), p.init())
	cookie, _ := p.initAck()
	echo := chunk(sctp.ChunkCookieEcho, 0, cookie...)
	for range 2 {
		opens := h.w.stats.PassiveOpens
		for range 2 * maxUnseen { // each packet is an association
			p.put(p.local.Addr(), echo, abort)
			h.w.turn()
		}
		if n, most := len(h.e.events.q), 2*maxUnseen; n > most {
			t.Fatalf("%d events wait for the control plane; at most %d may", n, most)
		}
		if n := h.w.stats.PassiveOpens - opens; n < maxUnseen {
			t.Fatalf("only %d associations", n)
		}
		h.drain()
		for h.w.turn() > 0 {
		}
	}
}

// hostlessWays is a resolver that knows our own addresses and the broadcast address too.
type hostlessWays struct {
	ways
	hostless
}

func (r *hostlessWays) Resolve(dst, src netip.Addr, device string) (Hop, error) {
	return r.ways.Resolve(dst, src, device)
}

func (r *hostlessWays) Watch(f func()) { r.ways.Watch(f) }

// TestSCTPHostlessAddress checks that nothing is sent to addresses that the peer lists but no other host can have.
func TestSCTPHostlessAddress(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	e := s.hosts[1].e
	e.resolver = &hostlessWays{}
	e.learnHostless()
	second := netip.MustParseAddr("10.0.0.7")
	var params [][]byte
	for _, a := range []string{"127.0.0.1", "0.0.0.1", "224.0.0.1", "255.255.255.255", "10.0.0.2", "10.0.0.9", "10.0.0.255", second.String()} {
		params = append(params, append([]byte{0, 5, 0, 8}, netip.MustParseAddr(a).AsSlice()...))
	}
	p := newRawPeerOf(t, s, params...)
	for end := p.now.Add(time.Minute); p.now < end; p.now = p.now.Add(100 * time.Millisecond) {
		p.turn()
	}
	if !slices.Contains(p.to, second) {
		t.Error("nothing is sent to the peer's further address")
	}
	for _, to := range p.to {
		if to != p.local.Addr() && to != second {
			t.Fatalf("a packet to %v", to)
		}
	}
}
