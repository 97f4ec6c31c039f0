package main

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
)

// TestBudget runs both ends over the in-process wire and checks that the data arrives
// unchanged, also when frames come in pieces, at odd offsets too, and in super-frames.
func TestBudget(t *testing.T) {
	for _, c := range []struct {
		mtu, chunk int
		super      link.SuperMode
	}{
		{1500, 4096, link.NoSuper}, {9000, 4096, link.NoSuper}, {3498, 2048, link.NoSuper}, {1500, 301, link.NoSuper}, {9000, 1501, link.NoSuper},
		{1500, 0, link.SuperWhole}, {9000, 0, link.SuperWhole},
	} {
		t.Run(fmt.Sprintf("mtu%d_chunk%d_super%d", c.mtu, c.chunk, c.super), func(t *testing.T) {
			la, lb, err := link.NewPipe(link.PipeConfig{MTU: c.mtu, ChunkSize: c.chunk, Super: c.super})
			if err != nil {
				t.Fatal(err)
			}
			defer la.Close()
			defer lb.Close()
			a, err := newBudget(la, job{Local: "10.98.0.1", Remote: "10.98.0.2", RemoteMAC: "02:00:00:00:00:02"})
			if err != nil {
				t.Fatal(err)
			}
			b, err := newBudget(lb, job{Local: "10.98.0.2", Remote: "10.98.0.1", RemoteMAC: "02:00:00:00:00:01"})
			if err != nil {
				t.Fatal(err)
			}
			a.patience = time.Minute // the wire loses nothing, but b may get no CPU for a while
			if c.super != link.NoSuper {
				a.useSuper()
				b.useSuper()
			}
			want := bytes.Clone(a.data)
			clear(b.data)
			var stop atomic.Bool
			done := make(chan struct{})
			go func() {
				defer close(done)
				b.receive(&stop)
			}()
			if c.super != link.NoSuper {
				// Super-frames have no pings.
			} else if p, err := a.pingPong(job{Window: 10 * time.Millisecond}, 64); err != nil || p.Value <= 0 {
				t.Errorf("pingPong = %+v, %v", p, err)
			}
			var r result
			for sent := 0.0; sent < 2*budgetMessage && err == nil; sent += r.Value * 200e6 / 8 {
				if r, err = a.send(time.Millisecond, 200*time.Millisecond); errors.Is(err, errNoFrame) {
					r, err = result{}, nil
				}
			}
			stop.Store(true)
			<-done
			if err != nil || r.Value <= 0 {
				t.Fatalf("send = %+v, %v", r, err)
			}
			if r.Note != "" || a.bad != 0 || b.bad != 0 {
				t.Errorf("note %q, bad frames %d and %d", r.Note, a.bad, b.bad)
			}
			n := len(want)
			if s := a.super; s != nil {
				n -= n % (s.size - 4) // what a segment does not fit in stays unused
			}
			if !bytes.Equal(b.data[:n], want[:n]) {
				t.Error("the data that arrived is not what was sent")
			}
		})
	}
}

// TestBudgetChecks checks that a frame is refused if any byte of its TCP header or payload is
// changed.
func TestBudgetChecks(t *testing.T) {
	var damage int
	la, lb, err := link.NewPipe(link.PipeConfig{Filter: func(_ bool, f []byte) bool {
		f[34+damage] ^= 0x10
		return true
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer la.Close()
	defer lb.Close()
	a, err := newBudget(la, job{Local: "10.98.0.1", Remote: "10.98.0.2", RemoteMAC: "02:00:00:00:00:02"})
	if err != nil {
		t.Fatal(err)
	}
	b := &budget{link: lb}
	for damage = 0; damage < 1480; damage += 37 {
		if !a.postData(1) {
			t.Fatal("no slot")
		}
		la.Flush()
		if n := lb.Receive(b.frames[:]); n != 1 {
			t.Fatalf("%d frames", n)
		}
		if _, ok := b.check(&b.frames[0]); ok {
			t.Errorf("byte %d damaged, and not seen", damage)
		}
		lb.Release(&b.frames[0])
		a.reap()
	}
}
