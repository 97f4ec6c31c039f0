package tcp

import (
	"fmt"
	"testing"
	"time"
)

// TestECNLongAfter checks that an ECN echo counts however much has been sent since the last reduction: the order of
// sequence numbers 2 to 4 GiB apart is reversed.
func TestECNLongAfter(t *testing.T) {
	cfg := DefaultConfig()
	cfg.ECN = RequestECN
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

// TestSimECN simulates a router that marks packets. With ECN, if one end requests it and the other
// accepts it, as by default, CUBIC and NewReno reduce their windows before the router's queue
// overflows, and lose nothing. If the other end refuses it, or neither requests it, the same queue
// overflows.
func TestSimECN(t *testing.T) {
	for _, cc := range []CongestionControl{CUBIC, NewReno} {
		for _, tc := range []struct {
			a, b ECN // of the end that opens the connection and sends, and of the other
			used bool
		}{
			{RequestECN, AcceptECN, true},
			{RequestECN, RequestECN, true},
			{RequestECN, NoECN, false},
			{AcceptECN, AcceptECN, false},
			{AcceptECN, RequestECN, false},
		} {
			t.Run(fmt.Sprintf("%v/%d-%d", cc, tc.a, tc.b), func(t *testing.T) {
				cfg := DefaultConfig()
				cfg.RcvWindow, cfg.MaxHeld, cfg.CongestionControl = 8<<20, 8192, cc
				const total, rate = 40e6, 12_500_000
				ca, cb := cfg, cfg
				ca.ECN, cb.ECN = tc.a, tc.b
				a, b := newSimHost(0, ca, total, 1), newSimHost(1, cb, 0, 1)
				w := simWire{rate: rate, queue: 30 * time.Millisecond, markAt: 5 * time.Millisecond}
				w.Delay = 5 * time.Millisecond
				back := simWire{rate: rate, queue: 30 * time.Millisecond}
				back.Delay = w.Delay
				s := newSim(t, a, b, w, back, 1, false)
				s.fast = true
				s.dial(1500)
				b.readAt = 0
				s.run(600 * time.Second)
				s.finish()
				st := a.c.Stats()
				got := total / b.doneAt.Sub(simStart).Seconds() / rate
				t.Logf("%.3f of the rate, %+v", got, st)
				switch {
				case tc.used && (st.ECNReductions == 0 || st.Retransmits != 0):
					t.Errorf("%d reductions by ECN and %d retransmissions; want some and none", st.ECNReductions, st.Retransmits)
				case !tc.used && (st.ECNReductions != 0 || st.Retransmits == 0):
					t.Errorf("%d reductions by ECN and %d retransmissions; want none and some", st.ECNReductions, st.Retransmits)
				case got < 0.8:
					t.Errorf("goodput is %.3f of the rate", got)
				}
			})
		}
	}
}
