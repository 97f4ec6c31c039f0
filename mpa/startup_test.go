package mpa

import (
	"errors"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/term"
)

const t0 clock.Time = 1_000_000

// frameOf returns the octets that s sends.
func frameOf(t testing.TB, s *Startup) []byte {
	t.Helper()
	b, ok := s.PollTransmit()
	if !ok {
		t.Fatal("nothing to send")
	}
	if _, ok := s.PollTransmit(); ok {
		t.Fatal("PollTransmit gave a second frame")
	}
	return b
}

// event returns the event of s, which must be of kind k.
func event(t testing.TB, s *Startup, k EventKind) Event {
	t.Helper()
	ev, ok := s.PollEvent()
	if !ok || ev.Kind != k {
		t.Fatalf("event %d, %v (%v); want %d", ev.Kind, ok, ev.Err, k)
	}
	if _, ok := s.PollEvent(); ok {
		t.Fatal("PollEvent gave a second event")
	}
	return ev
}

// give feeds b to s, which must take all of it without an error.
func give(t testing.TB, s *Startup, b []byte) {
	t.Helper()
	if n, err := s.HandleStream(t0, b); n != len(b) || err != nil {
		t.Fatalf("HandleStream took %d of %d octets, %v", n, len(b), err)
	}
}

// connect runs both sides to Full Operation.
func connect(t testing.TB, ic, rc Config, ird, ord int) (i, r Params) {
	t.Helper()
	a, b := NewInitiator(ic, t0), NewResponder(rc, t0)
	give(t, b, frameOf(t, a))
	event(t, b, EventRequest)
	if err := b.Accept(t0, nil, ird, ord); err != nil {
		t.Fatal(err)
	}
	give(t, a, frameOf(t, b))
	event(t, a, EventAccepted)
	event(t, b, EventAccepted)
	if a.Deadline() != 0 || b.Deadline() != 0 {
		t.Error("a timer runs in Full Operation")
	}
	return a.Result(), b.Result()
}

func TestStartupDefault(t *testing.T) {
	i, r := connect(t, DefaultConfig(), DefaultConfig(), -1, -1)
	want := Params{CRC: true, Rev: 2, Enhanced: true, IRD: 16, ORD: 16}
	if r != want {
		t.Errorf("responder runs with %+v; want %+v", r, want)
	}
	want.Initiator = true
	if i != want {
		t.Errorf("initiator runs with %+v; want %+v", i, want)
	}
}

func TestStartupTimeout(t *testing.T) {
	s := NewResponder(DefaultConfig(), t0)
	if s.Deadline() != t0.Add(5*time.Second) {
		t.Errorf("deadline after %v", s.Deadline().Sub(t0))
	}
	s.HandleTimeout(s.Deadline() - 1)
	if _, ok := s.PollEvent(); ok {
		t.Fatal("an early HandleTimeout did something")
	}
	s.HandleTimeout(s.Deadline())
	ev := event(t, s, EventFailed)
	if !errors.Is(ev.Err, ErrTimeout) || !errors.Is(ev.Err, term.ErrMPAClosed) {
		t.Errorf("failed with %v", ev.Err)
	}
}
