package sctp

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

func tagOf(b []byte) uint32 { return be.Uint32(b[4:]) }

// TestListenerKeepsNothing checks that an INIT flood and forged cookies leave no state.
func TestListenerKeepsNothing(t *testing.T) {
	r := newRig(t, Config{Adaptation: 1})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	i := r.init()
	if !i.HasAdaptation || i.Adaptation != 1 || i.Tag == 0 {
		t.Fatalf("INIT ACK %+v", i)
	}
	if again := r.init(); again.Tag == i.Tag || again.TSN == i.TSN {
		t.Error("two INITs had the same tag or TSN")
	}
	for n := range i.Cookie {
		c := slices.Clone(i.Cookie)
		c[n] ^= 0x10
		r.cookieEcho(Init{Tag: i.Tag, Cookie: c})
		r.cookieEcho(Init{Tag: i.Tag, Cookie: i.Cookie[:n]})
		if r.a != nil {
			t.Fatalf("a cookie forged at %d is accepted", n)
		}
	}
	r.none()
	r.cookieEcho(Init{Tag: i.Tag + 1, Cookie: i.Cookie})
	other := r.flow
	r.flow.Remote[15]++
	r.cookieEcho(i)
	r.flow = other
	if r.a != nil {
		t.Fatal("a cookie of another flow is accepted")
	}
	r.none()
	r.now = r.now.Add(61 * time.Second)
	r.cookieEcho(i)
	if c, info := cause(r.one(ChunkError)); c != causeStaleCookie || be.Uint32(info) != 1e6 {
		t.Fatalf("cause %v %x", c, info)
	}
	r.cookieEcho(r.init())
	if s := r.one(ChunkCookieAck); r.a == nil || tagOf(s) != rigTag {
		t.Fatal("no association")
	}
	if out, in := r.a.Streams(); out != 10 || in != 10 {
		t.Errorf("streams %d %d", out, in)
	}
}

// TestDraw checks that tag and initial TSN depend on the secret, the flow, the time and the count.
func TestDraw(t *testing.T) {
	f := pkt.Flow{LocalPort: 1, RemotePort: 2}
	var key Secret
	tag, tsn := draw(&key, &f, 1, 1)
	other, far := key, f
	other[0]++
	far.RemotePort++
	for _, tc := range []struct {
		what string
		key  *Secret
		flow *pkt.Flow
		now  clock.Time
		salt uint32
	}{{"secret", &other, &f, 1, 1}, {"flow", &key, &far, 1, 1}, {"time", &key, &f, 2, 1}, {"count", &key, &f, 1, 2}} {
		if g, n := draw(tc.key, tc.flow, tc.now, tc.salt); g == tag || n == tsn {
			t.Errorf("another %s gives the same tag %#x or TSN %#x", tc.what, g, uint32(n))
		}
	}
}

// TestRefusals sends INITs that get an ABORT for various faults.
func TestRefusals(t *testing.T) {
	good := func() Init {
		return Init{Tag: 5, Rwnd: 5000, Out: 3, In: 3, TSN: 7, Adaptation: 1, HasAdaptation: true}
	}
	fine := good()
	host := appendParam(fine.Append(nil, ChunkInit), paramHostName, []byte("h\x00"))
	be.PutUint16(host[2:], uint16(len(host)))
	cut := append(fine.Append(nil, ChunkInit), byte(paramIPv4>>8), byte(paramIPv4), 0, 8)
	be.PutUint16(cut[2:], uint16(len(cut)))
	for _, c := range []struct {
		name  string
		chunk []byte
		cause causeCode // 0: silence
	}{
		{"tag 0", func() []byte { i := good(); i.Tag = 0; return i.Append(nil, ChunkInit) }(), 0},
		{"no streams out", func() []byte { i := good(); i.Out = 0; return i.Append(nil, ChunkInit) }(), causeInvalidParam},
		{"no streams in", func() []byte { i := good(); i.In = 0; return i.Append(nil, ChunkInit) }(), causeInvalidParam},
		{"small window", func() []byte { i := good(); i.Rwnd = 1499; return i.Append(nil, ChunkInit) }(), causeInvalidParam},
		{"no adaptation", func() []byte { i := good(); i.HasAdaptation = false; return i.Append(nil, ChunkInit) }(), causeUserAbort},
		{"other adaptation", func() []byte { i := good(); i.Adaptation = 2; return i.Append(nil, ChunkInit) }(), causeUserAbort},
		{"host name", host, causeUnresolvable},
		{"parameter beyond the chunk", cut, causeInvalidParam},
	} {
		r := newRig(t, Config{Adaptation: 1, Accept: []uint32{1}})
		r.l = NewListener(&r.cfg, &r.key, 1500)
		r.send(0, c.chunk)
		if c.cause == 0 {
			r.none()
			continue
		}
		b := r.one(ChunkAbort)
		if got, _ := cause(b); got != c.cause || tagOf(b) != 5 {
			t.Errorf("%s: cause %v, tag %d", c.name, got, tagOf(b))
		}
	}
	// INIT is alone in its packet, with tag 0.
	r := newRig(t, Config{})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	r.send(0, r.initChunk(ChunkInit, nil), chunk(ChunkCookieAck, 0, nil))
	r.send(1, r.initChunk(ChunkInit, nil))
	r.none()
}

// TestUnknownParameters checks the action that the two top bits select (RFC 9260 3.2.1).
func TestUnknownParameters(t *testing.T) {
	r := newRig(t, Config{})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	for _, c := range []struct {
		typ         paramType
		report, run bool
	}{{0x3001, false, false}, {0x7001, true, false}, {0xb001, false, true}, {0xf001, true, true}} {
		b := r.initChunk(ChunkInit, nil)
		b = appendParam(b, c.typ, []byte("abc"))
		b = appendParam(b, paramAdaptation, []byte{0, 0, 0, 1})
		be.PutUint16(b[2:], uint16(len(b)))
		var i Init
		if err := i.Decode(b[4:]); err != nil || i.HasAdaptation != c.run {
			t.Errorf("%#x: read on %v", c.typ, i.HasAdaptation)
		}
		r.send(0, b)
		ack := r.one(ChunkInitAck)
		var ch Chunk
		NextChunk(ack, HeaderLen, &ch)
		i.Decode(ch.Body)
		if (len(i.Unrecognized) == 4+3) != c.report {
			t.Errorf("%#x: reported %x", c.typ, i.Unrecognized)
		}
	}
	// In INIT ACK: an ERROR is bundled after the COOKIE ECHO.
	d := dialing(t, Config{}, CookieWait)
	d.take()
	b := appendParam(d.initChunk(ChunkInitAck, []byte("cook")), 0xf001, []byte("abc"))
	be.PutUint16(b[2:], uint16(len(b)))
	d.send(d.a.tag, b)
	if s := d.take(); len(s) != 1 || !slices.Equal(types(s[0]), []ChunkType{ChunkCookieEcho, ChunkError}) {
		t.Errorf("sent %v", describe(s))
	}
}

// TestUnknownChunks checks RFC 9260 3.2.
func TestUnknownChunks(t *testing.T) {
	for _, c := range []struct {
		typ         ChunkType
		report, run bool
	}{{0x3d, false, false}, {0x7d, true, false}, {0xbd, false, true}, {0xfd, true, true}} {
		r := listening(t, Config{})
		r.send(r.a.tag, chunk(c.typ, 0, []byte("x")), dataBytes(7, rigTSN, 0, 0, "data"))
		if (len(r.got) == 1) != c.run {
			t.Errorf("%#x: data came: %v", uint8(c.typ), len(r.got) == 1)
		}
		reported := false
		for _, s := range r.take() {
			if k, info := cause(s); types(s)[0] == ChunkError && k == causeUnknownChunk && info[0] == byte(c.typ) {
				reported = true
			}
		}
		if reported != c.report {
			t.Errorf("%#x: reported %v", uint8(c.typ), reported)
		}
	}
}

// TestDialRefusals sends answers to our INIT that end the set-up.
func TestDialRefusals(t *testing.T) {
	for _, c := range []struct {
		name  string
		edit  func(*Init)
		err   error
		abort bool
	}{
		{"no cookie", func(i *Init) { i.Cookie = nil }, ErrProtocol, true},
		{"tag 0", func(i *Init) { i.Tag = 0 }, ErrProtocol, false},
		{"no streams", func(i *Init) { i.Out = 0 }, ErrProtocol, true},
		{"a cookie that fits no packet", func(i *Init) { i.Cookie = make([]byte, 1500) }, ErrProtocol, false},
		{"adaptation", func(i *Init) { i.Adaptation = 3 }, ErrAdaptation, true},
		{"no adaptation", func(i *Init) { i.HasAdaptation = false }, ErrAdaptation, true},
	} {
		r := dialing(t, Config{Adaptation: 1, Accept: []uint32{1}}, CookieWait)
		r.take()
		i := Init{Tag: rigTag, Rwnd: 5000, Out: 1, In: 1, Cookie: []byte("c"), Adaptation: 1, HasAdaptation: true}
		c.edit(&i)
		r.send(r.a.tag, i.Append(nil, ChunkInitAck))
		if r.a.State() != Closed || !errors.Is(r.a.Err(), c.err) {
			t.Errorf("%s: %v, %v", c.name, r.a.State(), r.a.Err())
		}
		if c.abort {
			r.one(ChunkAbort)
		} else {
			r.none()
		}
	}
}

// TestSetupTimers checks that INIT and COOKIE ECHO are sent 1+Max.Init.Retransmits times.
func TestSetupTimers(t *testing.T) {
	for _, c := range []struct {
		stop State
		typ  ChunkType
	}{{CookieWait, ChunkInit}, {CookieEchoed, ChunkCookieEcho}} {
		r := dialing(t, Config{}, c.stop)
		if c.stop == CookieWait {
			r.one(ChunkInit)
		}
		r.wait(20 * time.Minute)
		if s := r.take(); len(s) != 8 || types(s[7])[0] != c.typ {
			t.Errorf("%v: sent %v", c.stop, describe(s))
		}
		if r.a.State() != Closed || r.a.Err() != ErrTimeout {
			t.Errorf("%v: %v %v", c.stop, r.a.State(), r.a.Err())
		}
	}
}

// TestSetupBackOff checks that a lost INIT or COOKIE ECHO does not lengthen the time-out of the first DATA (6.3.1
// C1), and that what was not retransmitted gives an RTT measurement.
func TestSetupBackOff(t *testing.T) {
	const rtt = 400 * time.Millisecond
	for _, c := range []struct {
		name         string
		init, cookie int // number of retransmissions of each
		rto          time.Duration
	}{
		{"none", 0, 0, 1000 * time.Millisecond}, // one sample of 400 ms, and four of 150 ms
		{"INIT", 3, 0, 1200 * time.Millisecond},
		{"COOKIE ECHO", 0, 3, 1200 * time.Millisecond},
		{"both", 3, 3, time.Second},
	} {
		r := dialing(t, Config{RTOMin: 10 * time.Millisecond}, CookieWait)
		again := func(n int, typ ChunkType) {
			for range n + 1 {
				r.one(typ)
				if n--; n >= 0 {
					r.now = r.a.Deadline()
					r.a.HandleTimeout(r.now)
					r.drain(nil)
				}
			}
			r.now = r.now.Add(rtt)
		}
		again(c.init, ChunkInit)
		r.send(r.a.tag, r.initChunk(ChunkInitAck, []byte("cookie")))
		again(c.cookie, ChunkCookieEcho)
		r.send(r.a.tag, chunk(ChunkCookieAck, 0, nil))
		r.take()
		if rto := r.a.Path(0).RTO; rto != c.rto {
			t.Errorf("%s sent again: an RTO of %v, want %v", c.name, rto, c.rto)
		}
		r.push(100)
		r.take()
		r.wait(c.rto - 1)
		r.none()
		r.wait(1)
		r.one(ChunkData)
	}
}

func TestStaleCookie(t *testing.T) {
	r := dialing(t, Config{}, CookieEchoed)
	r.send(r.a.tag, chunk(ChunkError, 0, appendCause(nil, causeStaleCookie, []byte{0, 0x0f, 0x42, 0x40})))
	b := r.one(ChunkInit)
	var c Chunk
	var i Init
	NextChunk(b, HeaderLen, &c)
	if i.Decode(c.Body); i.Preserve != 2000 || r.a.State() != CookieWait {
		t.Errorf("preserve %d, state %v", i.Preserve, r.a.State())
	}
	// A peer whose cookies are always stale is abandoned.
	for range 20 {
		r.send(r.a.tag, r.initChunk(ChunkInitAck, []byte("cookie")))
		r.send(r.a.tag, chunk(ChunkError, 0, appendCause(nil, causeStaleCookie, []byte{0, 0, 0, 1})))
	}
	if n := len(r.take()); r.a.State() != Closed || r.a.Err() != ErrTimeout || n > 20 {
		t.Errorf("%v %v after %d packets", r.a.State(), r.a.Err(), n)
	}
}

// TestTags checks RFC 9260 8.5: packets with a wrong verification tag are ignored.
func TestTags(t *testing.T) {
	for _, c := range []struct {
		name string
		tag  func(a *Assoc) uint32
		b    []byte
		ends bool
	}{
		{"ABORT, wrong tag", func(a *Assoc) uint32 { return a.tag + 1 }, chunk(ChunkAbort, 0, nil), false},
		{"ABORT, our tag", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkAbort, 0, nil), true},
		{"ABORT, peer's tag", func(a *Assoc) uint32 { return a.peerTag }, chunk(ChunkAbort, 0, nil), false},
		{"ABORT, T, peer's tag", func(a *Assoc) uint32 { return a.peerTag }, chunk(ChunkAbort, 1, nil), true},
		{"ABORT, T, our tag", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkAbort, 1, nil), false},
		{"no user data, wrong tag", func(a *Assoc) uint32 { return a.tag ^ 1 }, dataBytes(7, rigTSN, 0, 0, ""), false},
		{"no user data", func(a *Assoc) uint32 { return a.tag }, dataBytes(7, rigTSN, 0, 0, ""), true},
		{"SHUTDOWN COMPLETE", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkShutdownComplete, 0, nil), false},
		{"SHUTDOWN ACK", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkShutdownAck, 0, nil), false},
		{"COOKIE ACK", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkCookieAck, 0, nil), false},
		{"SACK of what was never sent", func(a *Assoc) uint32 { return a.tag }, nil, true},
		{"SACK too short", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkSack, 0, make([]byte, 8)), true},
		{"SACK with more gaps than bytes", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkSack, 0, []byte{0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}), true},
		{"SHUTDOWN too long", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkShutdown, 0, make([]byte, 8)), true},
		{"DATA too short", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkData, 7, make([]byte, 4)), true},
		{"INIT ACK", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkInitAck, 0, make([]byte, 16)), false},
		{"HEARTBEAT ACK nobody asked for", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkHeartbeatAck, 0, []byte{0, 1, 0, 4}), false},
		{"ERROR", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkError, 0, appendParam(nil, 3, []byte{0, 0, 0, 1})), false},
		{"ABORT that leaves the packet", func(a *Assoc) uint32 { return a.tag }, []byte{6, 0, 0, 5}, false},
		{"chunk that leaves the packet", func(a *Assoc) uint32 { return a.tag }, []byte{0, 7, 0, 99}, false},
	} {
		r := listening(t, Config{})
		if c.b == nil {
			c.b = sackBytes(r.a.cumAck+1, 1000)
		}
		r.send(c.tag(r.a), c.b)
		if (r.a.State() == Closed) != c.ends {
			t.Errorf("%s: %v", c.name, r.a.State())
		}
		if c.ends && r.a.Err() == nil {
			t.Errorf("%s: no reason", c.name)
		}
	}
	r := listening(t, Config{})
	r.recv(7, 3, 0, 0, "")
	if c, info := cause(r.one(ChunkAbort)); c != causeNoUserData || !bytes.Equal(info, be.AppendUint32(nil, uint32(rigTSN.Add(3)))) {
		t.Errorf("no user data: %v, %x", c, info)
	}
}

// TestOutOfBlue checks RFC 9260 8.4.
func TestOutOfBlue(t *testing.T) {
	r := newRig(t, Config{})
	f := r.flow
	pack := func(tag uint32, chunks ...[]byte) []byte {
		h := Header{f.RemotePort, f.LocalPort, tag}
		b := h.Append(nil)
		for _, c := range chunks {
			b = append(b, c...)
		}
		return b
	}
	stale := chunk(ChunkError, 0, appendCause(nil, causeStaleCookie, []byte{0, 0, 0, 0}))
	for _, c := range []struct {
		name string
		b    []byte
		typ  ChunkType
		tag  uint32
		none bool
	}{
		{"DATA", pack(7, dataBytes(7, 1, 0, 0, "x")), ChunkAbort, 7, false},
		{"INIT", pack(0, r.initChunk(ChunkInit, nil)), ChunkAbort, rigTag, false},
		{"INIT with a tag", pack(7, r.initChunk(ChunkInit, nil)), 0, 0, true},
		{"INIT behind another chunk", pack(0, chunk(ChunkHeartbeat, 0, nil), r.initChunk(ChunkInit, nil)), 0, 0, true},
		{"SHUTDOWN ACK", pack(7, chunk(ChunkShutdownAck, 0, nil)), ChunkShutdownComplete, 7, false},
		{"ABORT", pack(7, chunk(ChunkAbort, 0, nil)), 0, 0, true},
		{"DATA and ABORT", pack(7, dataBytes(7, 1, 0, 0, "x"), chunk(ChunkAbort, 0, nil)), 0, 0, true},
		{"SHUTDOWN COMPLETE", pack(7, chunk(ChunkShutdownComplete, 0, nil)), 0, 0, true},
		{"COOKIE ACK", pack(7, chunk(ChunkCookieAck, 0, nil)), 0, 0, true},
		{"stale cookie", pack(7, stale), 0, 0, true},
		{"another error", pack(7, chunk(ChunkError, 0, appendCause(nil, causeProtocol, nil))), ChunkAbort, 7, false},
		{"short", []byte{1, 2, 3}, 0, 0, true},
	} {
		b := OutOfBlue(f, c.b)
		if (b == nil) != c.none {
			t.Errorf("%s: answer %x", c.name, b)
			continue
		}
		if b == nil {
			continue
		}
		reflected := b[HeaderLen+1]&flagTag != 0 // the T bit: the tag is that of the packet
		if types(b)[0] != c.typ || tagOf(b) != c.tag || reflected != (c.tag == 7) {
			t.Errorf("%s: %v tag %d, T %v", c.name, types(b), tagOf(b), reflected)
		}
	}
	f.Local = [16]byte{10: 0xff, 11: 0xff, 12: 224, 15: 1}
	if OutOfBlue(f, pack(7, dataBytes(7, 1, 0, 0, "x"))) != nil {
		t.Error("an answer to a multicast")
	}
}

// TestDuplicateInit sends an INIT in each state, and then its cookie (5.2).
func TestDuplicateInit(t *testing.T) {
	t.Run("restart", func(t *testing.T) {
		r := listening(t, Config{})
		p := &r.a.paths[0]
		fresh := *p
		r.push(100)
		r.recv(7, 0, 0, 0, "before")
		r.wait(time.Second) // a time-out: the window shrinks, and the RTO grows
		r.take()
		old, oldPeer := r.a.tag, r.peerTag
		r.peerTag, r.peerTSN = 77, 5000
		i := r.init()
		if i.Tag == old {
			t.Error("the INIT ACK has the old tag")
		}
		// A cookie is not secret, and another program of the peer's host may have sent the INIT.
		for _, tag := range []uint32{old, oldPeer} {
			if bytes.Contains(i.Cookie, be.AppendUint32(nil, tag)) {
				t.Errorf("the cookie reveals the tag %#x", tag)
			}
		}
		// What is to be answered is not, once the peer has forgotten it.
		h := Header{r.flow.RemotePort, r.flow.LocalPort, old}
		r.a.HandlePacket(r.now, r.flow, 0, append(h.Append(nil), chunk(0xfd, 0, nil)...))
		r.cookieEcho(i)
		b := r.one(ChunkCookieAck)
		if tagOf(b) != 77 || r.a.tag == old || r.a.State() != Established || len(types(b)) != 1 {
			t.Errorf("not restarted: %v, sent %v", r.a.State(), types(b))
		}
		if p.cwnd != fresh.cwnd || p.ssthresh != fresh.ssthresh || p.rto != fresh.rto || p.errors != 0 || r.a.TimeoutsInARow() != 0 {
			t.Errorf("of the time before remain: window %d, threshold %d, RTO %v, errors %d", p.cwnd, p.ssthresh, p.rto, p.errors)
		}
		if !slices.Contains(r.events, EventRestart) {
			t.Errorf("events %v", r.events)
		}
		if buf, ok := r.a.PollReleased(); !ok || buf != 100 {
			t.Error("the message in flight was not given back")
		}
		r.send(r.a.tag, dataBytes(7, 5000, 0, 0, "after"))
		if r.got[len(r.got)-1] != "after" {
			t.Errorf("got %q", r.got)
		}
	})
	t.Run("restart while we shut down", func(t *testing.T) {
		r := listening(t, Config{Heartbeat: -1})
		r.a.Close(r.now)
		r.drain(nil)
		r.one(ChunkShutdown)
		r.peerTag = 77
		r.cookieEcho(r.init())
		r.one(ChunkCookieAck)
		r.wait(time.Hour)
		if r.none(); r.a.State() != Established {
			t.Errorf("%v: %v", r.a.State(), r.a.Err())
		}
	})
	t.Run("restart with new addresses", func(t *testing.T) {
		r := listening(t, Config{})
		b := appendParam(r.initChunk(ChunkInit, nil), paramIPv4, []byte{10, 9, 9, 9})
		be.PutUint16(b[2:], uint16(len(b)))
		r.send(0, b)
		if c, info := cause(r.one(ChunkAbort)); c != causeRestartAddresses || len(info) != 8 || r.a.State() != Established {
			t.Errorf("cause %v %x, %v", c, info, r.a.State())
		}
	})
	with := func(r *rig, addrs ...string) []byte {
		b := r.initChunk(ChunkInit, nil)
		for _, s := range addrs {
			ad := netip.MustParseAddr(s)
			typ := paramIPv4
			if ad.Is6() {
				typ = paramIPv6
			}
			b = appendParam(b, typ, ad.AsSlice())
		}
		be.PutUint16(b[2:], uint16(len(b)))
		return b
	}
	var many []string
	for i := range 12 {
		many = append(many, netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 1)}).String())
	}
	for name, list := range map[string][]string{
		"addresses of both families": {"10.0.0.2", "fd00::2", "10.0.0.3"},
		"many addresses":             many,
	} {
		t.Run("restart of a peer with "+name, func(t *testing.T) {
			r := newRig(t, Config{})
			r.l = NewListener(&r.cfg, &r.key, 1500)
			for range 2 {
				r.peerTag++
				r.send(0, with(r, list...))
				r.cookieEcho(r.initAck())
				r.take()
			}
			if r.a == nil || r.a.Stats().Restarts != 1 {
				t.Error("not restarted")
			}
		})
	}
	t.Run("new addresses in COOKIE-ECHOED", func(t *testing.T) {
		r := dialing(t, Config{}, CookieEchoed)
		r.send(0, with(r, "10.9.9.9"))
		if c, info := cause(r.one(ChunkAbort)); c != causeRestartAddresses || len(info) != 8 || r.a.State() != CookieEchoed {
			t.Errorf("cause %v %x, %v", c, info, r.a.State())
		}
	})
	t.Run("collision in COOKIE-WAIT", func(t *testing.T) {
		r := dialing(t, Config{}, CookieWait)
		r.take()
		i := r.init()
		if i.Tag != r.a.tag || i.TSN != r.a.initTSN {
			t.Error("the INIT ACK is not that of our INIT")
		}
		r.cookieEcho(i)
		if r.a.State() != Established || r.a.peerTag != rigTag {
			t.Errorf("%v", r.a.State())
		}
		r.one(ChunkCookieAck)
	})
	t.Run("collision in COOKIE-ECHOED", func(t *testing.T) {
		r := dialing(t, Config{}, CookieEchoed)
		r.peerTag = 99
		r.cookieEcho(r.init())
		if r.a.State() != Established || r.a.peerTag != 99 {
			t.Errorf("%v", r.a.State())
		}
	})
	t.Run("late COOKIE ECHO of a collision", func(t *testing.T) {
		r := dialing(t, Config{}, CookieEchoed)
		r.peerTag = 99
		i := r.init()
		r.send(r.a.tag, chunk(ChunkCookieAck, 0, nil))
		r.cookieEcho(i) // (M,X,0,0), when there is an association: C
		if r.none(); r.a.State() != Established || r.a.peerTag != rigTag || r.a.Stats().Collisions != 0 {
			t.Errorf("%v, tag %d", r.a.State(), r.a.peerTag)
		}
	})
	t.Run("duplicate COOKIE ECHO", func(t *testing.T) {
		r := newRig(t, Config{})
		r.l = NewListener(&r.cfg, &r.key, 1500)
		i := r.init()
		r.cookieEcho(i)
		r.one(ChunkCookieAck)
		r.now = r.now.Add(100 * time.Second) // stale, but both tags are right
		r.cookieEcho(i)
		r.one(ChunkCookieAck)
		if r.a.Stats().Restarts != 0 {
			t.Error("restarted")
		}
	})
	t.Run("late COOKIE ECHO of an older association", func(t *testing.T) {
		for _, peerTag := range []uint32{rigTag, 50} {
			r := newRig(t, Config{})
			r.l = NewListener(&r.cfg, &r.key, 1500)
			r.peerTag = peerTag
			older := r.init()
			r.peerTag = rigTag
			r.cookieEcho(r.init())
			r.take()
			tag := r.a.tag
			r.cookieEcho(older) // (X,M,0,0): C; and (X,X,0,0), which is no restart without Tie-Tags
			r.none()
			if r.a.tag != tag {
				t.Errorf("taken over by a cookie for tag %d", peerTag)
			}
		}
	})
	t.Run("SHUTDOWN-ACK-SENT", func(t *testing.T) {
		r := listening(t, Config{})
		r.peerTag = 12
		i := r.init()
		r.send(r.a.tag, shutdown(r.a.cumAck))
		r.one(ChunkShutdownAck)
		r.send(0, r.initChunk(ChunkInit, nil))
		r.one(ChunkShutdownAck)
		r.cookieEcho(i) // no restart, but an ERROR behind the SHUTDOWN ACK (5.2.4 A)
		b := r.one(ChunkShutdownAck)
		if c, _ := cause(b[chunkHeader:]); !slices.Equal(types(b), []ChunkType{ChunkShutdownAck, ChunkError}) || c != causeShuttingDown || r.a.State() != ShutdownAckSent {
			t.Errorf("sent %v, cause %v, %v", types(b), c, r.a.State())
		}
	})
}
