package tcp

import "testing"

// TestECNLongAfter: an echo counts however much has been sent since the last
// reduction; the order of sequence numbers 2 to 4 GiB apart is the reverse.
func TestECNLongAfter(t *testing.T) {
	cfg := DefaultConfig()
	cfg.ECN = true
	l := newLoop(t, cfg, 65535)
	for want := uint64(1); want <= 3; want++ {
		for end := l.got + 5<<29; l.got < end; { // 2.5 GiB
			l.push()
			l.turn()
		}
		for i := range l.q[1] {
			l.q[1][i].Flags |= ECE
		}
		for range 20 {
			l.push()
			l.turn()
		}
		if n := l.a.Stats().ECNReductions; n != want {
			t.Fatalf("%d reductions after %d bytes; want %d", n, l.got, want)
		}
	}
}
