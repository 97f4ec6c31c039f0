package xsk

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// pin locks the goroutine to a thread on one CPU, if the machine has that CPU.
func pin(cpu int) {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set)
}

// receiveAll counts frames until stop is closed.
func receiveAll(s *Socket, stop *atomic.Bool, got *atomic.Uint64) {
	fs := make([]link.Frame, 64)
	for !stop.Load() {
		n := s.Receive(fs)
		for i := range n {
			s.Release(&fs[i])
		}
		if n > 0 {
			got.Add(uint64(n))
		}
	}
}

// BenchmarkRate measures the raw frame rate of one direction over a veth pair, with a sender and a receiver that each
// spin on a CPU. It is an upper limit for the transports above. The machine should be idle.
func BenchmarkRate(b *testing.B) {
	for _, mode := range []bpf.Mode{bpf.Generic, bpf.Native} {
		for _, size := range []int{64, 1514, 9014} {
			b.Run(fmt.Sprintf("%v/%d", mode, size), func(b *testing.B) {
				v := testenv.NewVeth(b, max(size-14, 1500))
				tx, rx := openSide(b, &v.A, mode, Config{}), openSide(b, &v.B, mode, Config{})
				var stop atomic.Bool
				var got atomic.Uint64
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					pin(1)
					receiveAll(rx.Socket, &stop, &got)
				}()
				pin(0)
				tu := tuple(&v.A, &v.B)
				for s := range tx.Slots() {
					fillFrame(tx.Bytes(link.Slot(s))[:size], &tu, uint32(s))
				}
				done := make([]link.Slot, 256)
				b.ReportAllocs()
				b.ResetTimer()
				start := clock.Now()
				for sent := 0; sent < b.N; {
					for i := 0; i < 64 && sent < b.N; i++ {
						s, ok := tx.Alloc()
						if !ok {
							break
						}
						if !tx.Post(s, 0, size) {
							tx.Free(s)
							break
						}
						sent++
					}
					tx.Flush()
					for _, s := range done[:tx.Reap(done)] {
						tx.Free(s)
					}
				}
				took := clock.Now().Sub(start)
				b.StopTimer()
				stop.Store(true)
				<-ended
				var st link.Stats
				tx.Stats(&st)
				b.ReportMetric(float64(got.Load())/took.Seconds()/1e6, "Mframes/s")
				b.ReportMetric(float64(got.Load())*float64(size)*8/took.Seconds()/1e9, "Gb/s")
				b.ReportMetric(float64(st.Kicks)*1000/float64(max(st.TxFrames, 1)), "kicks/1000")
				b.ReportMetric(100-100*float64(got.Load())/float64(b.N), "%lost")
			})
		}
	}
}

// BenchmarkRoundTrip measures the round-trip time of a 64-byte frame between two spinning sockets.
func BenchmarkRoundTrip(b *testing.B) {
	for _, mode := range []bpf.Mode{bpf.Generic, bpf.Native} {
		b.Run(mode.String(), func(b *testing.B) {
			v := testenv.NewVeth(b, 1500)
			x, y := openSide(b, &v.A, mode, Config{}), openSide(b, &v.B, mode, Config{})
			var stop atomic.Bool
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				pin(1)
				tu := tuple(&v.B, &v.A)
				fs, done := make([]link.Frame, 4), make([]link.Slot, 4)
				for !stop.Load() {
					for i := range y.Receive(fs) {
						y.Release(&fs[i])
						s, _ := y.Alloc()
						fillFrame(y.Bytes(s)[:64], &tu, 0)
						y.Post(s, 0, 64)
						y.Flush()
					}
					for _, s := range done[:y.Reap(done)] {
						y.Free(s)
					}
				}
			}()
			pin(0)
			tu := tuple(&v.A, &v.B)
			fs, done := make([]link.Frame, 4), make([]link.Slot, 4)
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				s, _ := x.Alloc()
				fillFrame(x.Bytes(s)[:64], &tu, 0)
				x.Post(s, 0, 64)
				x.Flush()
				for until := clock.Now().Add(time.Second); ; {
					if n := x.Receive(fs); n > 0 {
						x.Release(&fs[0])
						break
					}
					if clock.Now() > until {
						b.Fatal("no answer within a second")
					}
				}
				for _, s := range done[:x.Reap(done)] {
					x.Free(s)
				}
			}
			b.StopTimer()
			stop.Store(true)
			<-ended
		})
	}
}

// TestAllocatesNothing sends and receives a frame of each size in one goroutine.
func TestAllocatesNothing(t *testing.T) {
	v := testenv.NewVeth(t, 9000)
	a, b := openSide(t, &v.A, bpf.Generic, Config{Frames: 256, Ring: 128}), openSide(t, &v.B, bpf.Generic, Config{Frames: 256, Ring: 128})
	tu := tuple(&v.A, &v.B)
	fs, done := make([]link.Frame, 8), make([]link.Slot, 8)
	for _, size := range []int{64, 9014} {
		got := 0
		if n := testing.AllocsPerRun(500, func() {
			s, ok := a.Alloc()
			if ok {
				fillFrame(a.Bytes(s)[:size], &tu, 0)
				a.Post(s, 0, size)
			}
			a.Flush()
			for _, s := range done[:a.Reap(done)] {
				a.Free(s)
			}
			b.Wait(10*time.Millisecond, -1)
			n := b.Receive(fs)
			for i := range n {
				b.Release(&fs[i])
			}
			got += n
		}); n != 0 {
			t.Errorf("%d bytes: %v allocations a frame", size, n)
		}
		for until := clock.Now().Add(time.Minute); got < 500 && clock.Now() < until; b.Wait(10*time.Millisecond, -1) {
			n := b.Receive(fs)
			for i := range n {
				b.Release(&fs[i])
			}
			got += n
		}
		if got < 500 {
			t.Errorf("%d bytes: only %d frames arrived", size, got)
		}
	}
}
