package sctp

import (
	"slices"
	"testing"
	"time"
)

// TestReceive checks delivery of ordered, unordered and fragmented messages.
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
	r.recv(u|b|e, 2, 1, 7, "two") // before TSN 0 and 1; its SSN means nothing
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
	r.recv(b, 6, 3, 2, "a") // a fragmented ordered message, after which another waits
	r.recv(b|e, 8, 3, 3, "next")
	r.recv(e, 7, 3, 2, "b")
	want("a", "b", "next")
	r.recv(u|b|e, 9, 10, 0, "no such stream")
	want()
	reported := false
	for _, s := range r.take() {
		if c, info := cause(s); types(s)[0] == ChunkError && c == causeInvalidStream && slices.Equal(info, []byte{0, 10, 0, 0}) {
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
	type piece struct {
		flags       uint8
		tsn         int
		stream, ssn uint16
		s           string
	}
	for _, c := range []struct {
		name   string
		pieces []piece
		want   []string
	}{
		{"one is missing", []piece{{b, 0, 1, 0, "x"}, {e, 2, 1, 0, "z"}}, nil},
		{"of another stream", []piece{{b, 0, 1, 0, "x"}, {e, 1, 2, 0, "y"}}, nil},
		{"of another message", []piece{{b, 0, 1, 0, "x"}, {e, 1, 1, 1, "y"}}, nil},
		{"one is unordered", []piece{{b, 0, 1, 0, "x"}, {u | e, 1, 1, 0, "y"}}, nil},
		{"another beginning", []piece{{u | b, 0, 1, 0, "x"}, {u | b, 1, 1, 0, "y"}, {u | e, 2, 1, 0, "z"}}, []string{"y", "z"}},
		{"not its turn", []piece{{b, 0, 1, 1, "x"}, {e, 1, 1, 1, "y"}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := listening(t, Config{})
			for _, p := range c.pieces {
				r.recv(p.flags, p.tsn, p.stream, p.ssn, p.s)
			}
			if !slices.Equal(r.got, c.want) {
				t.Errorf("got %q, want %q", r.got, c.want)
			}
		})
	}
}

// TestReceiveLimits checks that a peer cannot make us hold more than the configuration allows.
func TestReceiveLimits(t *testing.T) {
	r := listening(t, Config{MaxKept: 4})
	for i := 10; i > 0; i-- {
		r.recv(flagUnordered, i, 0, 0, "piece")
		if len(r.kept) > 4 {
			t.Fatalf("%d chunks kept", len(r.kept))
		}
	}
	if r.a.Stats().Reneged == 0 || r.a.State() != Established {
		t.Error("nothing was reclaimed", r.a.State())
	}
	r.recv(flagUnordered|flagBegin, 0, 0, 0, "begin")
	r.recv(flagUnordered, 4, 0, 0, "piece")
	if r.a.State() != Closed || r.a.Err() != ErrNoRoom {
		t.Errorf("a message that can never be whole: %v %v", r.a.State(), r.a.Err())
	}
}

// TestSackTimes checks that every second packet and every hole is acknowledged at once, and others late.
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
	if s.Decode(c.Body); len(c.Body) != sackFixed+len(s.gaps)+4 {
		t.Error("no duplicate reported")
	}
}

// TestPause checks that a pause closes the window for the peer, takes what it has sent already, and reports its end.
// What is kept makes the window smaller.
func TestPause(t *testing.T) {
	r := listening(t, Config{})
	window := func() uint32 {
		t.Helper()
		var c Chunk
		var s Sack
		NextChunk(r.one(ChunkSack), HeaderLen, &c)
		if err := s.Decode(c.Body); err != nil {
			t.Fatal(err)
		}
		return s.Rwnd
	}
	r.recv(7, 0, 0, 0, "a")
	whole := window()
	r.a.SetBacklog(0, true)
	r.recv(7|flagImmediate, 1, 0, 0, "on its way")
	if w := window(); w != 0 || !slices.Contains(r.got, "on its way") {
		t.Errorf("window %d, received %q", w, r.got)
	}
	r.a.SetBacklog(0, false)
	r.drain(nil)
	if w := window(); w != whole || whole == 0 {
		t.Errorf("window %d after the pause, %d before", w, whole)
	}
	r.recv(flagUnordered|flagBegin|flagImmediate, 2, 0, 0, "first piece")
	if w := window(); w != whole-uint32(len("first piece")) {
		t.Errorf("window %d with a piece that is kept, %d before", w, whole)
	}
	r.a.SetBacklog(1000, false)
	r.recv(flagUnordered|flagEnd|flagImmediate, 3, 0, 0, "last piece")
	if w := window(); w != whole-1000 {
		t.Errorf("window %d with 1000 bytes that the owner has not consumed, %d before", w, whole)
	}
}

// TestManyGaps checks that a SACK reports as many blocks as fit in the packet (6.2).
func TestManyGaps(t *testing.T) {
	r := listening(t, Config{})
	r.recv(7, 0, 0, 0, "x")
	for i := range 500 {
		r.take()
		r.recv(7, 2+2*i, 0, 0, "x")
	}
	b := r.one(ChunkSack)
	var c Chunk
	var s Sack
	NextChunk(b, HeaderLen, &c)
	if err := s.Decode(c.Body); err != nil || s.Gaps() != (1500-20-12-16)/4 || len(b)+20 != 1500 {
		t.Errorf("%d blocks in %d bytes, %v", s.Gaps(), len(b), err)
	}
}
