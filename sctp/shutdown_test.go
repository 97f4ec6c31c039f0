package sctp

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestShutdown checks the ways to a graceful end.
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
		r.recv(7, 0, 0, 0, "late") // still accepted in SHUTDOWN-SENT
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
	t.Run("during the set-up", func(t *testing.T) {
		for _, state := range []State{CookieWait, CookieEchoed} {
			r := dialing(t, Config{}, state)
			r.a.Close(r.now)
			if r.a.State() != Closed || r.a.Err() != nil || r.a.Deadline() != 0 {
				t.Errorf("in %v: then %v, %v", state, r.a.State(), r.a.Err())
			}
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
	for name, b := range map[string][]byte{
		"of what was never sent": shutdown(1000),
		"too short":              chunk(ChunkShutdown, 0, make([]byte, 3)),
		"too long":               chunk(ChunkShutdown, 0, make([]byte, 8)),
	} {
		t.Run(name, func(t *testing.T) {
			r := listening(t, Config{})
			r.a.setTSN(998)
			r.push(10)
			r.push(10)
			r.take()
			r.a.Push(&Message{Buf: 1, Len: 10}) // 1000, which waits
			r.send(r.a.tag, b)
			if c, _ := cause(r.one(ChunkAbort)); c != causeProtocol || r.a.Err() != ErrProtocol {
				t.Errorf("%v, %v: %v", c, r.a.State(), r.a.Err())
			}
		})
	}
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
				r.send(r.a.tag, sackBytes(r.a.cumAck, 0)) // alive, but it acknowledges nothing
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
		r.a.Abort()
		r.drain(nil)
		if c, _ := cause(r.one(ChunkAbort)); c != causeUserAbort {
			t.Error(c)
		}
		if b, ok := r.a.PollReleased(); !ok || b != 10 {
			t.Error("not released")
		}
	})
	t.Run("abort before the peer's tag is known", func(t *testing.T) {
		r := dialing(t, Config{}, CookieWait)
		r.one(ChunkInit)
		r.a.Abort()
		r.drain(nil)
		if r.none(); r.a.State() != Closed || r.a.Err() != ErrAborted {
			t.Error(r.a.State(), r.a.Err())
		}
	})
	t.Run("abort by the peer", func(t *testing.T) {
		r := listening(t, Config{})
		r.send(r.a.tag, chunk(ChunkAbort, 0, appendCause(nil, causeOutOfResource, nil)))
		r.none()
		if e, ok := errors.AsType[*AbortError](r.a.Err()); !ok || e.cause != causeOutOfResource {
			t.Error(r.a.State(), r.a.Err())
		}
	})
}

func shutdown(cum serial.Num) []byte {
	return chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(cum)))
}

// TestShutdownAcknowledges checks that a peer that shuts down may acknowledge our remaining data by SHUTDOWN alone.
func TestShutdownAcknowledges(t *testing.T) {
	t.Run("flow", func(t *testing.T) {
		r := listening(t, Config{})
		m := r.a.MaxMessage()
		r.a.peerRwnd = 20 * m
		for range 60 {
			r.a.Push(&Message{Buf: 1, Len: m})
		}
		r.drain(nil)
		base, turns := r.a.cumAck, 0
		for sent := len(tsns(r.take(), base)); r.a.Unacked() > 0; turns++ {
			r.send(r.a.tag, shutdown(base.Add(sent)))
			sent += len(tsns(r.take(), base))
		}
		if turns > 25 {
			t.Errorf("60 messages took %d round trips", turns)
		}
		if r.a.State() != ShutdownAckSent {
			t.Error(r.a.State())
		}
	})
	t.Run("a bad wire", func(t *testing.T) {
		r := listening(t, Config{})
		r.a.peerRwnd = 1 << 20
		for range 300 {
			r.a.Push(&Message{Buf: 1, Len: 1000})
		}
		r.drain(nil)
		base, sent := r.a.cumAck, 0
		look := func() {
			for _, n := range tsns(r.take(), base) {
				sent = max(sent, n)
			}
		}
		look()
		r.send(r.a.tag, shutdown(base))
		for range 20 { // the first of every two flights is lost
			r.wait(time.Second)
			look()
			r.send(r.a.tag, shutdown(base.Add(sent)))
			look()
			r.send(r.a.tag, shutdown(base.Add(sent)))
			look()
		}
		if r.a.State() != ShutdownReceived || r.a.Stats().Timeouts < 15 {
			t.Errorf("%v: %v, %d time-outs", r.a.State(), r.a.Err(), r.a.Stats().Timeouts)
		}
	})
}

// TestShutdownSent checks that each arriving DATA is answered by a SHUTDOWN and restarts T2, and that no heartbeats
// are sent (9.2, 8.3).
func TestShutdownSent(t *testing.T) {
	r := listening(t, Config{Heartbeat: 100 * time.Millisecond})
	r.a.Close(r.now)
	r.drain(nil)
	r.one(ChunkShutdown)
	for i := range 100 {
		r.wait(900 * time.Millisecond)
		r.none()
		r.recv(7, i, 0, 0, "more")
		b := r.one(ChunkSack)
		var c Chunk
		next, _ := NextChunk(b, HeaderLen, &c)
		if NextChunk(b, next, &c); c.Type != ChunkShutdown || serial.Num(be.Uint32(c.Body)) != rigTSN.Add(i) {
			t.Fatalf("answered by %v, %x", types(b), c.Body)
		}
	}
	r.wait(20 * time.Second)
	for _, b := range r.take() {
		if types(b)[0] != ChunkShutdown {
			t.Errorf("sent %v", types(b))
		}
	}
	// Nor do packets without DATA: a peer that sends HEARTBEATs more often than a backed-off T2 expires would stop the
	// shutdown.
	for range 10 {
		r.wait(10 * time.Second)
		r.send(r.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}))
	}
	if n := len(r.take()); n < 10+2 {
		t.Errorf("sent %d packets, 10 of them HEARTBEAT ACKs", n)
	}
	r.recv(7, 100, 0, 0, "more")
	if r.a.TimeoutsInARow() != 0 {
		t.Errorf("%d time-outs in a row after a packet of the peer's", r.a.TimeoutsInARow())
	}
	// Packets that anyone could have sent do not restart it either.
	r.take()
	r.wait(r.a.Path(0).RTO - 1)
	r.none()
	r.send(r.a.tag+1, chunk(ChunkCookieEcho, 0, []byte("no cookie")))
	r.wait(1)
	r.one(ChunkShutdown)
}
