package tcp

import (
	"fmt"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestSimGoodput checks that a bulk transfer uses most of a path's rate. min is the smallest acceptable share of the
// bottleneck's rate.
func TestSimGoodput(t *testing.T) {
	for _, tc := range []struct {
		rate   int // bytes a second
		delay  time.Duration
		queue  time.Duration
		loss   float64
		reord  float64
		cc     CongestionControl
		total  int
		min    float64
		noSACK bool
	}{
		{rate: 12_500_000, delay: 500 * time.Microsecond, queue: 5 * time.Millisecond, total: 20e6, min: 0.9},
		{rate: 12_500_000, delay: 500 * time.Microsecond, queue: 5 * time.Millisecond, total: 20e6, min: 0.9, noSACK: true},
		{rate: 12_500_000, delay: 10 * time.Millisecond, queue: 20 * time.Millisecond, total: 40e6, min: 0.85},
		{rate: 12_500_000, delay: 10 * time.Millisecond, queue: 20 * time.Millisecond, total: 40e6, min: 0.8, cc: NewReno},
		{rate: 12_500_000, delay: 10 * time.Millisecond, queue: 20 * time.Millisecond, total: 40e6, min: 0.8, cc: DCTCP},
		{rate: 12_500_000, delay: 50 * time.Millisecond, queue: 50 * time.Millisecond, total: 60e6, min: 0.7},
		{rate: 12_500_000, delay: 500 * time.Microsecond, queue: 5 * time.Millisecond, loss: 0.001, total: 20e6, min: 0.8},
		{rate: 12_500_000, delay: 500 * time.Microsecond, queue: 5 * time.Millisecond, loss: 0.01, total: 20e6, min: 0.6},
		{rate: 12_500_000, delay: 500 * time.Microsecond, queue: 5 * time.Millisecond, loss: 0.05, total: 5e6, min: 0.1},
		{rate: 12_500_000, delay: 10 * time.Millisecond, queue: 20 * time.Millisecond, reord: 0.02, total: 40e6, min: 0.7},
		{rate: 12_500_000, delay: 10 * time.Millisecond, queue: 20 * time.Millisecond, loss: 0.001, total: 20e6, min: 0.15},
		{rate: 12_500_000, delay: 10 * time.Millisecond, queue: 20 * time.Millisecond, loss: 0.01, total: 5e6, min: 0.05},
	} {
		name := fmt.Sprintf("%v/delay %v/loss %v/reorder %v/sack %v", tc.cc, tc.delay, tc.loss, tc.reord, !tc.noSACK)
		t.Run(name, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.RcvWindow, cfg.MaxHeld = 8<<20, 8192
			cfg.CongestionControl = tc.cc
			cfg.NoSACK = tc.noSACK
			a, b := newSimHost(0, cfg, tc.total, 1), newSimHost(1, cfg, 0, 1)
			w := simWire{rate: tc.rate, queue: tc.queue}
			w.Delay, w.Loss, w.Reorder, w.Hold = tc.delay, tc.loss, tc.reord, tc.delay/2
			back := simWire{rate: tc.rate, queue: tc.queue}
			back.Delay = tc.delay
			s := newSim(t, a, b, w, back, 1, false)
			s.fast = true
			s.dial(1500)
			b.readAt = 0
			s.run(600 * time.Second)
			s.finish()
			took := b.doneAt.Sub(simStart)
			got := float64(tc.total) / took.Seconds() / float64(tc.rate)
			st := a.c.Stats()
			t.Logf("%.3f of the rate, acks %d, %+v", got, s.wire[1].sent, st)
			if got < tc.min {
				t.Errorf("goodput is %.3f of the rate, want %.2f", got, tc.min)
			}
		})
	}
}

// TestSimDeepQueue checks that slow start ends before it fills a queue many times as deep as the path (RFC 9406),
// whatever the initial sequence number.
func TestSimDeepQueue(t *testing.T) {
	const total = 20e6
	for _, cc := range []CongestionControl{CUBIC, NewReno} {
		for _, iss := range []serial.Num{1 << 30, 3 << 30} {
			cfg := DefaultConfig()
			cfg.RcvWindow, cfg.MaxHeld = 8<<20, 8192
			cfg.CongestionControl = cc
			a, b := newSimHost(0, cfg, total, 1), newSimHost(1, cfg, 0, 1)
			w := simWire{rate: 12_500_000, queue: 160 * time.Millisecond}
			w.Delay = 5 * time.Millisecond
			s := newSim(t, a, b, w, w, 1, false)
			s.fast = true
			s.dial(1500)
			a.iss = iss
			a.c = Dial(s.now, &cfg, a.flow, iss, 1500)
			s.run(60 * time.Second)
			s.finish()
			st := a.c.Stats()
			if st.RetransBytes > total/100 {
				t.Errorf("%v, initial sequence number %#x: %d bytes were sent again: %+v", cc, uint32(iss), st.RetransBytes, st)
			}
			if took := b.doneAt.Sub(simStart); took > 2*time.Second {
				t.Errorf("%v, initial sequence number %#x: it took %v", cc, uint32(iss), took)
			}
		}
	}
}
