package sctp

import (
	"slices"
	"testing"
	"time"
)

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
