package sctp

import (
	"testing"
	"time"
)

// loop is two associations connected without a wire.
type loop struct {
	s   *sim
	out Out
	pkt []byte
	mem []byte
	n   int
}

func newLoop(t testing.TB) *loop {
	s := newSim(t, 1, Config{Heartbeat: -1}, Config{Heartbeat: -1}, wireOf(time.Microsecond), 1500, false)
	s.establish()
	return &loop{s: s, pkt: make([]byte, 0, 2048), mem: make([]byte, 1452)}
}

// turn sends four messages and processes the answers.
func (l *loop) turn() {
	a := l.s.h[0].a
	for range 4 {
		if a.Room() >= 1452 {
			a.Push(&Message{PPID: 16, Buf: 1, Len: 1452})
			l.n++
		}
	}
	for i := range 4 {
		from, to := l.s.h[i%2], l.s.h[1-i%2]
		for from.a.PollTransmit(l.s.now, &l.out) {
			b := append(l.pkt[:0], l.out.Head...)
			for j := range l.out.Parts[:l.out.N] {
				p := &l.out.Parts[j]
				b = append(append(b, p.Hdr[:]...), l.mem[:p.Len+p.Pad]...)
			}
			to.a.HandlePacket(l.s.now, to.flow, 0, b)
			var d Data
			for to.a.PollData(&d) {
			}
		}
		for {
			if _, ok := from.a.PollReleased(); !ok {
				break
			}
		}
		for {
			if _, ok := from.a.PollEvent(); !ok {
				break
			}
		}
	}
	l.s.now = l.s.now.Add(10 * time.Microsecond)
}

// TestNoAllocation checks that processing a packet allocates nothing.
func TestNoAllocation(t *testing.T) {
	l := newLoop(t)
	for range 100 {
		l.turn()
	}
	before := l.n
	if n := testing.AllocsPerRun(1000, l.turn); n != 0 {
		t.Errorf("%v allocations in a turn", n)
	}
	if l.n-before < 2000 {
		t.Errorf("%d messages only", l.n-before)
	}
}

func BenchmarkMessage(b *testing.B) {
	l := newLoop(b)
	b.SetBytes(1452)
	b.ReportAllocs()
	for l.n < b.N {
		l.turn()
	}
}
