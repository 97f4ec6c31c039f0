package sctp

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

func tagOf(b []byte) uint32 { return be.Uint32(b[4:]) }

// TestListenerKeepsNothing: an INIT flood and forged cookies leave no trace.
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
	if c, info := cause(r.one(ChunkError)); c != CauseStaleCookie || be.Uint32(info) != 1e6 {
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

// TestRefusals are INITs that get an ABORT, by their fault.
func TestRefusals(t *testing.T) {
	good := func() Init {
		return Init{Tag: 5, Rwnd: 5000, Out: 3, In: 3, TSN: 7, Adaptation: 1, HasAdaptation: true}
	}
	fine := good()
	host := appendParam(fine.Append(nil, ChunkInit), ParamHostName, []byte("h\x00"))
	be.PutUint16(host[2:], uint16(len(host)))
	for _, c := range []struct {
		name  string
		chunk []byte
		cause Cause // 0: silence
	}{
		{"tag 0", func() []byte { i := good(); i.Tag = 0; return i.Append(nil, ChunkInit) }(), 0},
		{"no streams out", func() []byte { i := good(); i.Out = 0; return i.Append(nil, ChunkInit) }(), CauseInvalidParam},
		{"no streams in", func() []byte { i := good(); i.In = 0; return i.Append(nil, ChunkInit) }(), CauseInvalidParam},
		{"small window", func() []byte { i := good(); i.Rwnd = 1499; return i.Append(nil, ChunkInit) }(), CauseInvalidParam},
		{"no adaptation", func() []byte { i := good(); i.HasAdaptation = false; return i.Append(nil, ChunkInit) }(), CauseUserAbort},
		{"other adaptation", func() []byte { i := good(); i.Adaptation = 2; return i.Append(nil, ChunkInit) }(), CauseUserAbort},
		{"one stream", func() []byte { i := good(); i.In = 1; return i.Append(nil, ChunkInit) }(), CauseUserAbort},
		{"host name", host, CauseUnresolvable},
	} {
		r := newRig(t, Config{Adaptation: 1, Accept: []uint32{1}, MinStreams: 2})
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

// TestUnknownParameters: the two top bits say what happens (RFC 9260 3.2.1).
func TestUnknownParameters(t *testing.T) {
	r := newRig(t, Config{})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	for _, c := range []struct {
		typ         ParamType
		report, run bool
	}{{0x3001, false, false}, {0x7001, true, false}, {0xb001, false, true}, {0xf001, true, true}} {
		b := r.initChunk(ChunkInit, nil)
		b = appendParam(b, c.typ, []byte("abc"))
		b = appendParam(b, ParamAdaptation, []byte{0, 0, 0, 1})
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
	// In INIT ACK: an ERROR rides behind the COOKIE ECHO.
	d := dialing(t, Config{}, CookieWait)
	d.take()
	b := appendParam(d.initChunk(ChunkInitAck, []byte("cook")), 0xf001, []byte("abc"))
	be.PutUint16(b[2:], uint16(len(b)))
	d.send(d.a.tag, b)
	if s := d.take(); len(s) != 1 || !slices.Equal(types(s[0]), []ChunkType{ChunkCookieEcho, ChunkError}) {
		t.Errorf("sent %v", describe(s))
	}
}

// TestUnknownChunks is RFC 9260 3.2.
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
			if k, info := cause(s); types(s)[0] == ChunkError && k == CauseUnknownChunk && info[0] == byte(c.typ) {
				reported = true
			}
		}
		if reported != c.report {
			t.Errorf("%#x: reported %v", uint8(c.typ), reported)
		}
	}
}

// TestDialRefusals: answers to our INIT that end it.
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

// TestSetupTimers: INIT and COOKIE ECHO go out 1+Max.Init.Retransmits times.
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

func TestStaleCookie(t *testing.T) {
	r := dialing(t, Config{}, CookieEchoed)
	r.send(r.a.tag, chunk(ChunkError, 0, appendParam(nil, ParamType(CauseStaleCookie), []byte{0, 0x0f, 0x42, 0x40})))
	b := r.one(ChunkInit)
	var c Chunk
	var i Init
	NextChunk(b, HeaderLen, &c)
	if i.Decode(c.Body); i.Preserve != 2000 || r.a.State() != CookieWait {
		t.Errorf("preserve %d, state %v", i.Preserve, r.a.State())
	}
}

// TestTags is RFC 9260 8.5: packets with a wrong verification tag are not there.
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
		{"SACK with more gaps than octets", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkSack, 0, []byte{0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}), true},
		{"SHUTDOWN too long", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkShutdown, 0, make([]byte, 8)), true},
		{"DATA too short", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkData, 7, make([]byte, 4)), true},
		{"INIT ACK", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkInitAck, 0, make([]byte, 16)), false},
		{"HEARTBEAT ACK nobody asked for", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkHeartbeatAck, 0, []byte{0, 1, 0, 4}), false},
		{"ERROR", func(a *Assoc) uint32 { return a.tag }, chunk(ChunkError, 0, appendParam(nil, 3, []byte{0, 0, 0, 1})), false},
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
}

// TestOutOfBlue is RFC 9260 8.4.
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
	stale := chunk(ChunkError, 0, appendParam(nil, ParamType(CauseStaleCookie), []byte{0, 0, 0, 0}))
	for _, c := range []struct {
		name string
		b    []byte
		typ  ChunkType
		tag  uint32
		none bool
	}{
		{"DATA", pack(7, dataBytes(7, 1, 0, 0, "x")), ChunkAbort, 7, false},
		{"INIT", pack(0, r.initChunk(ChunkInit, nil)), ChunkAbort, rigTag, false},
		{"SHUTDOWN ACK", pack(7, chunk(ChunkShutdownAck, 0, nil)), ChunkShutdownComplete, 7, false},
		{"ABORT", pack(7, chunk(ChunkAbort, 0, nil)), 0, 0, true},
		{"DATA and ABORT", pack(7, dataBytes(7, 1, 0, 0, "x"), chunk(ChunkAbort, 0, nil)), 0, 0, true},
		{"SHUTDOWN COMPLETE", pack(7, chunk(ChunkShutdownComplete, 0, nil)), 0, 0, true},
		{"COOKIE ACK", pack(7, chunk(ChunkCookieAck, 0, nil)), 0, 0, true},
		{"stale cookie", pack(7, stale), 0, 0, true},
		{"short", []byte{1, 2, 3}, 0, 0, true},
	} {
		b := OutOfBlue(f, c.b)
		if (b == nil) != c.none {
			t.Errorf("%s: answer %x", c.name, b)
			continue
		}
		if b != nil && (types(b)[0] != c.typ || tagOf(b) != c.tag) {
			t.Errorf("%s: %v tag %d", c.name, types(b), tagOf(b))
		}
	}
	f.Local = [16]byte{10: 0xff, 11: 0xff, 12: 224, 15: 1}
	if OutOfBlue(f, pack(7, dataBytes(7, 1, 0, 0, "x"))) != nil {
		t.Error("an answer to a multicast")
	}
}

// TestDuplicateInit: an INIT in each state, and what the cookie then does (5.2).
func TestDuplicateInit(t *testing.T) {
	t.Run("restart", func(t *testing.T) {
		r := listening(t, Config{})
		r.push(100)
		r.recv(7, 0, 0, 0, "before")
		r.take()
		old := r.a.tag
		r.peerTag, r.peerTSN = 77, 5000
		i := r.init()
		if i.Tag == old {
			t.Error("the INIT ACK has the old tag")
		}
		r.cookieEcho(i)
		b := r.one(ChunkCookieAck)
		if tagOf(b) != 77 || r.a.tag == old || r.a.State() != Established {
			t.Error("not restarted")
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
	t.Run("restart with new addresses", func(t *testing.T) {
		r := listening(t, Config{})
		b := appendParam(r.initChunk(ChunkInit, nil), ParamIPv4, []byte{10, 9, 9, 9})
		be.PutUint16(b[2:], uint16(len(b)))
		r.send(0, b)
		if c, info := cause(r.one(ChunkAbort)); c != CauseRestartAddresses || len(info) != 8 || r.a.State() != Established {
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
		r := newRig(t, Config{})
		r.l = NewListener(&r.cfg, &r.key, 1500)
		older := r.init()
		r.cookieEcho(r.init())
		r.take()
		tag := r.a.tag
		r.cookieEcho(older) // (X,M,0,0): C
		r.none()
		if r.a.tag != tag {
			t.Error("taken over")
		}
	})
	t.Run("SHUTDOWN-ACK-SENT", func(t *testing.T) {
		r := listening(t, Config{})
		i := r.init()
		r.send(r.a.tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(r.a.cumAck))))
		r.one(ChunkShutdownAck)
		r.send(0, r.initChunk(ChunkInit, nil))
		r.one(ChunkShutdownAck)
		r.peerTag = 12
		_ = i
	})
}

// TestShutdown walks the ways to an orderly end.
func TestShutdown(t *testing.T) {
	t.Run("by us", func(t *testing.T) {
		r := listening(t, Config{})
		r.push(10)
		r.take()
		r.a.Close(r.now)
		r.drain(nil)
		r.none()
		if r.a.State() != ShutdownPending {
			t.Fatal(r.a.State())
		}
		r.send(r.a.tag, sackBytes(r.a.cumAck+1, 1000))
		r.one(ChunkShutdown)
		r.wait(3 * time.Second)
		if s := r.take(); len(s) == 0 || types(s[0])[0] != ChunkShutdown {
			t.Fatalf("T2 sent %v", describe(s))
		}
		r.recv(7, 0, 0, 0, "late") // still taken in SHUTDOWN-SENT
		if len(r.got) != 1 {
			t.Error("late data are lost")
		}
		r.take()
		r.send(r.a.tag, chunk(ChunkShutdownAck, 0, nil))
		r.one(ChunkShutdownComplete)
		if r.a.State() != Closed || r.a.Err() != nil {
			t.Error(r.a.State(), r.a.Err())
		}
	})
	t.Run("by the peer", func(t *testing.T) {
		r := listening(t, Config{})
		r.push(10)
		r.take()
		r.send(r.a.tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(r.a.cumAck))))
		r.none()
		if r.a.State() != ShutdownReceived || !slices.Contains(r.events, EventShutdown) {
			t.Fatal(r.a.State(), r.events)
		}
		r.recv(7, 0, 0, 0, "no")
		if len(r.got) != 0 {
			t.Error("data behind a SHUTDOWN are taken")
		}
		r.a.Push(&Message{Buf: 55, Len: 5})
		if b, _ := r.a.PollReleased(); b != 55 {
			t.Error("a message behind a SHUTDOWN is queued")
		}
		r.send(r.a.tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(r.a.cumAck+1))))
		r.one(ChunkShutdownAck)
		r.send(r.a.tag, chunk(ChunkShutdownComplete, 0, nil))
		if r.a.State() != Closed || r.a.Err() != nil {
			t.Error(r.a.State(), r.a.Err())
		}
	})
	t.Run("both at once", func(t *testing.T) {
		r := listening(t, Config{})
		r.a.Close(r.now)
		r.drain(nil)
		r.one(ChunkShutdown)
		r.send(r.a.tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(r.a.cumAck))))
		r.one(ChunkShutdownAck)
		r.send(r.a.tag, chunk(ChunkShutdownAck, 0, nil))
		r.one(ChunkShutdownComplete)
		if r.a.State() != Closed {
			t.Error(r.a.State())
		}
	})
	t.Run("nobody answers", func(t *testing.T) {
		r := listening(t, Config{})
		r.a.Close(r.now)
		r.wait(time.Hour)
		if r.a.State() != Closed || r.a.Err() != ErrTimeout {
			t.Error(r.a.State(), r.a.Err())
		}
	})
	for _, who := range []string{"we", "the peer"} {
		t.Run("a closed window, and "+who+" end", func(t *testing.T) {
			r := listening(t, Config{})
			r.push(10)
			r.take()
			if who == "we" {
				r.a.Close(r.now)
				r.drain(nil)
			} else {
				r.send(r.a.tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(r.a.cumAck))))
			}
			began := r.now
			for r.a.State() != Closed && r.now.Sub(began) < time.Hour {
				r.send(r.a.tag, sackBytes(r.a.cumAck, 0)) // it lives, and takes nothing
				r.wait(time.Second)
				r.take()
			}
			if d := r.now.Sub(began); d > 6*time.Minute || r.a.Err() != ErrTimeout {
				t.Errorf("%v after %v: %v", r.a.State(), d, r.a.Err())
			}
		})
	}
	t.Run("abort", func(t *testing.T) {
		r := listening(t, Config{})
		r.push(10)
		r.take()
		r.a.Abort(r.now)
		r.drain(nil)
		if c, _ := cause(r.one(ChunkAbort)); c != CauseUserAbort {
			t.Error(c)
		}
		if b, ok := r.a.PollReleased(); !ok || b != 10 {
			t.Error("not released")
		}
	})
}

// TestReceive is what the receiver does with ordered, unordered and fragmented
// messages.
func TestReceive(t *testing.T) {
	const u, b, e = flagUnordered, flagBegin, flagEnd
	r := listening(t, Config{})
	want := func(s ...string) {
		t.Helper()
		if !slices.Equal(r.got, s) {
			t.Fatalf("got %q, want %q", r.got, s)
		}
		r.got = nil
	}
	r.recv(u|b|e, 2, 1, 0, "two") // ahead of TSN 0 and 1
	want("two")
	r.recv(u|b|e, 2, 1, 0, "two")
	want()
	r.recv(b|e, 1, 3, 1, "second")
	want()
	r.recv(b|e, 0, 3, 0, "first")
	want("first", "second")
	r.recv(u|e, 5, 0, 0, "C")
	r.recv(u, 4, 0, 0, "B")
	want()
	r.recv(u|b, 3, 0, 0, "A")
	want("A", "B", "C")
	r.recv(b, 6, 3, 2, "a") // an ordered message in pieces, behind which another waits
	r.recv(b|e, 8, 3, 3, "next")
	r.recv(e, 7, 3, 2, "b")
	want("a", "b", "next")
	r.recv(u|b|e, 9, 10, 0, "no such stream")
	want()
	reported := false
	for _, s := range r.take() {
		if c, info := cause(s); types(s)[0] == ChunkError && c == CauseInvalidStream && info[1] == 10 {
			reported = true
		}
	}
	if !reported {
		t.Error("invalid stream is not reported")
	}
	r.recv(u|b|e, 5000, 0, 0, "far ahead")
	want()
	if len(r.kept) != 0 || r.a.rcv.cum != rigTSN+9 {
		t.Errorf("kept %v, cumulative %d", r.kept, r.a.rcv.cum-rigTSN)
	}
}

// TestReceiveLimits: a peer cannot make us hold more than the configuration says.
func TestReceiveLimits(t *testing.T) {
	r := listening(t, Config{MaxKept: 4})
	for i := 10; i > 0; i-- {
		r.recv(flagUnordered, i, 0, 0, "piece")
		if len(r.kept) > 4 {
			t.Fatalf("%d chunks kept", len(r.kept))
		}
	}
	if r.a.Stats().Reclaimed == 0 || r.a.State() != Established {
		t.Error("nothing was reclaimed", r.a.State())
	}
	r.recv(flagUnordered|flagBegin, 0, 0, 0, "begin")
	r.recv(flagUnordered, 4, 0, 0, "piece")
	if r.a.State() != Closed || r.a.Err() != ErrNoRoom {
		t.Errorf("a message that can never be whole: %v %v", r.a.State(), r.a.Err())
	}
}

// TestZeroWindow: a closed window is probed, for as long as the peer answers.
func TestZeroWindow(t *testing.T) {
	r := listening(t, Config{})
	r.push(1000)
	r.take()
	r.send(r.a.tag, sackBytes(r.a.cumAck+1, 0))
	if r.a.Room() < r.a.MaxMessage() {
		t.Fatal("no room for a probe")
	}
	r.push(1000)
	r.one(ChunkData)
	for range 30 {
		r.send(r.a.tag, sackBytes(r.a.cumAck, 0)) // dropped by the peer
		r.wait(61 * time.Second)
		if s := r.take(); len(s) == 0 {
			t.Fatal("no probe")
		}
	}
	if r.a.State() != Established {
		t.Fatalf("%v %v", r.a.State(), r.a.Err())
	}
	r.wait(2 * time.Hour) // no answer any more
	if r.a.State() != Closed || r.a.Err() != ErrTimeout {
		t.Errorf("%v %v", r.a.State(), r.a.Err())
	}
}

// TestFastRetransmit: three reports of a hole send it again, once.
func TestFastRetransmit(t *testing.T) {
	r := listening(t, Config{MaxBurst: 100})
	r.a.paths[0].cwnd = 100000
	base := r.a.cumAck
	for i := range 8 {
		r.push(1000 + i)
	}
	r.take()
	for i := range uint16(2) {
		r.send(r.a.tag, sackBytes(base, 100000, 2, 2+i))
		r.none()
	}
	r.send(r.a.tag, sackBytes(base, 100000, 2, 4))
	b := r.one(ChunkData)
	if be.Uint32(b[HeaderLen+4:]) != uint32(base+1) {
		t.Error("another TSN was sent again")
	}
	p := &r.a.paths[0]
	if p.cwnd != p.ssthresh || p.cwnd != 50000 {
		t.Errorf("cwnd %d ssthresh %d", p.cwnd, p.ssthresh)
	}
	for i := range uint16(3) {
		r.send(r.a.tag, sackBytes(base, 100000, 2, 5+i))
	}
	r.none()
	if p.cwnd != 50000 {
		t.Error("the window shrank twice in one recovery")
	}
	// What was named by a gap report and then is not was given up: it is sent again.
	r.send(r.a.tag, sackBytes(base, 100000))
	r.wait(5 * time.Second)
	r.send(r.a.tag, sackBytes(base+8, 100000))
	if r.a.Unacked() != 0 || r.a.State() != Established {
		t.Error(r.a.Unacked(), r.a.State())
	}
}

// TestHeartbeatAndFailover: a second address of the peer's is verified, and used
// when the first one is silent.
func TestHeartbeatAndFailover(t *testing.T) {
	r := newRig(t, Config{Heartbeat: time.Second})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	b := appendParam(r.initChunk(ChunkInit, nil), ParamIPv4, []byte{10, 0, 0, 9})
	be.PutUint16(b[2:], uint16(len(b)))
	r.send(0, b)
	var c Chunk
	var i Init
	ack := r.one(ChunkInitAck)
	NextChunk(ack, HeaderLen, &c)
	i.Decode(c.Body)
	r.cookieEcho(i)
	if n, cur := r.a.Paths(); n != 2 || cur != 0 || r.a.Path(1).Confirmed {
		t.Fatal("no second path")
	}
	answer := true
	var o Out
	second := netip.AddrFrom4([4]byte{10, 0, 0, 9})
	for range 3000 {
		for r.a.PollTransmit(r.now, &o) {
			if NextChunk(o.Head, HeaderLen, &c); c.Type == ChunkHeartbeat && o.Path == 1 && answer {
				f := r.flow
				f.Remote = pkt.NewFlow(netip.AddrPortFrom(second, 1), netip.AddrPortFrom(second, 1)).Remote
				h := Header{f.RemotePort, f.LocalPort, r.a.tag}
				r.a.HandlePacket(r.now, f, 0, append(h.Append(nil), chunk(ChunkHeartbeatAck, 0, c.Body)...))
			}
		}
		d := r.a.Deadline()
		if d == 0 {
			break
		}
		r.now = max(d, r.now)
		r.a.HandleTimeout(r.now)
		if _, cur := r.a.Paths(); cur == 1 {
			break
		}
	}
	if _, cur := r.a.Paths(); cur != 1 || !r.a.Path(1).Confirmed || r.a.Path(0).Active || r.a.Stats().Failovers != 1 {
		t.Fatalf("no failover: %+v %+v %v", r.a.Path(0), r.a.Path(1), r.a.Err())
	}
	r.a.Push(&Message{Buf: 1, Len: 10})
	for r.a.PollTransmit(r.now, &o) && o.N == 0 {
	}
	if o.N != 1 || o.Path != 1 {
		t.Error("data go to the path that is down")
	}
	r.take()
	// An ACK with a wrong nonce confirms nothing; a HEARTBEAT of the peer's is
	// answered with its own octets.
	r.send(r.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}))
	if s := r.take(); len(s) != 1 || string(s[0][HeaderLen+4:]) != "\x00\x01\x00\x08\x01\x02\x03\x04" {
		t.Errorf("sent %x", s)
	}
}

// TestPathMTU: an ICMP error with the right tag lowers the size of messages, one
// with a wrong tag does not.
func TestPathMTU(t *testing.T) {
	r := listening(t, Config{})
	if r.a.MaxMessage() != 1452 {
		t.Fatal(r.a.MaxMessage())
	}
	r.push(1452)
	r.take()
	e := pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: pkt.TooBig, MTU: 1000, Seq: r.a.peerTag + 1}
	r.a.HandleICMP(r.now, &e)
	if r.a.MaxMessage() != 1452 {
		t.Error("a forged ICMP error is believed")
	}
	e.Seq--
	r.a.HandleICMP(r.now, &e)
	if r.a.MaxMessage() != 1000-48 {
		t.Error(r.a.MaxMessage())
	}
	var o Out
	if !r.a.PollTransmit(r.now, &o) || !o.Fragment || o.N != 1 {
		t.Error("what is in flight does not leave as IP fragments")
	}
	u := listening(t, Config{UDP: true})
	if u.a.MaxMessage() != 1444 {
		t.Error(u.a.MaxMessage())
	}
}

// TestICMPUnreachable ends a set-up only.
func TestICMPUnreachable(t *testing.T) {
	r := dialing(t, Config{}, CookieWait)
	e := pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: pkt.Unreachable, InitTag: r.a.tag + 1}
	r.a.HandleICMP(r.now, &e)
	if r.a.State() != CookieWait {
		t.Fatal("a forged ICMP error is believed")
	}
	e.InitTag--
	r.a.HandleICMP(r.now, &e)
	if r.a.Err() != ErrUnreachable {
		t.Error(r.a.Err())
	}
}

// TestSackTimes: every second packet, at once for a hole, else late.
func TestSackTimes(t *testing.T) {
	r := listening(t, Config{})
	r.recv(7, 0, 0, 0, "a")
	r.one(ChunkSack) // the first DATA
	r.recv(7, 1, 0, 0, "b")
	r.none()
	r.recv(7, 2, 0, 0, "c")
	r.one(ChunkSack)
	r.recv(7, 3, 0, 0, "d")
	r.none()
	r.wait(200 * time.Millisecond)
	r.one(ChunkSack)
	r.recv(7|flagImmediate, 4, 0, 0, "e")
	r.one(ChunkSack)
	r.recv(7, 6, 0, 0, "g")
	b := r.one(ChunkSack)
	var c Chunk
	var s Sack
	NextChunk(b, HeaderLen, &c)
	if s.Decode(c.Body); s.Gaps() != 1 || s.Cum != rigTSN+4 {
		t.Fatalf("%+v", s)
	} else if from, to := s.Gap(0); from != rigTSN+6 || to != rigTSN+6 {
		t.Error(from, to)
	}
	r.recv(7, 6, 0, 0, "g")
	b = r.one(ChunkSack)
	NextChunk(b, HeaderLen, &c)
	if s.Decode(c.Body); s.Dups() != 1 {
		t.Error("no duplicate reported")
	}
}

// TestBurst: a SACK lets four packets go (6.1 D), and one for many packets as many as
// SACKs for every second of them would have.
func TestBurst(t *testing.T) {
	r := dialing(t, Config{}, Established)
	p := &r.a.paths[0]
	p.cwnd, r.a.peerRwnd = 1<<20, 1<<20
	for i := range 200 {
		r.a.Push(&Message{Buf: Buf(i), Len: 1400})
	}
	r.drain(nil)
	if n := len(r.take()); n != 4 {
		t.Fatalf("%d packets leave at first", n)
	}
	cum := r.a.cumAck
	for range 12 {
		cum++
		r.send(r.a.tag, sackBytes(cum, 1<<20))
		if n := len(r.take()); n != 4 {
			t.Fatalf("%d packets after a SACK for one", n)
		}
	}
	r.send(r.a.tag, sackBytes(cum+20, 1<<20))
	if n := len(r.take()); n != 36 {
		t.Errorf("%d packets after a SACK for 20, want four for every second one in whole", n)
	}
}

// TestSlowStart: a SACK opens the window by a packet, or, if it stands for many, by one for
// every second packet that it acknowledges.
func TestSlowStart(t *testing.T) {
	for acked, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 20: 10} {
		r := dialing(t, Config{MaxBurst: 100}, Established)
		p := &r.a.paths[0]
		m := r.a.MaxMessage()
		p.cwnd, r.a.peerRwnd = 20*m, 1<<20
		for i := range 20 {
			r.a.Push(&Message{Buf: Buf(i), Len: m})
		}
		r.drain(nil)
		r.take()
		r.send(r.a.tag, sackBytes(r.a.cumAck+serial.Num(acked), 1<<20))
		if n := p.cwnd - 20*m; n != want*m {
			t.Errorf("a SACK for %d packets opens the window by %d octets, want %d packets of %d", acked, n, want, m)
		}
	}
}
