package ifqueue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/spin"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// BenchmarkLinks moves frames over a veth pair by each kind of link: a frame of 64 bytes in each direction, and
// super-frames of 43 segments. One thread serves both ends, so that cpu-ns/op, its CPU time with the kernel's part,
// can be compared on a busy machine.
func BenchmarkLinks(b *testing.B) {
	for _, kind := range []Kind{XDP, Packet} {
		name := []string{XDP: "xdp", Packet: "packet"}[kind]
		v := testenv.NewVethOffloads(b, 1500)
		var ends [2]link.Link
		for i, e := range []*testenv.End{&v.A, &v.B} {
			if err := e.NS.Do(func() error {
				steer, err := bpf.Load(bpf.Options{Endpoints: 64})
				if err != nil {
					return err
				}
				b.Cleanup(func() { steer.Close() })
				s, err := Open(steer, Config{Interface: e.Name, Queues: []int{0}, Link: kind, Super: true})
				if err != nil {
					return err
				}
				b.Cleanup(func() { s.Close() })
				ends[i] = s.Links[0]
				return steer.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Port: port})
			}); errors.Is(err, bpf.ErrNoIngress) {
				b.Skip(err)
			} else if err != nil {
				b.Fatal(err)
			}
		}
		there := tcpFrame(v, port, 0, 20+10)
		back := append([]byte(nil), there...)
		copy(back, there[6:12])
		copy(back[6:], there[:6])
		copy(back[26:], there[30:34])
		copy(back[30:], there[26:30])
		b.Run(name+"/ping", func(b *testing.B) {
			thread(b, func() {
				move(b, ends[0], ends[1], there)
				move(b, ends[1], ends[0], back)
			})
		})
		super := superFrame(v, 43, 1448)
		b.Run(name+"/super", func(b *testing.B) {
			b.SetBytes(int64(super.Len()))
			sum := 0
			thread(b, func() {
				if !ends[0].(link.Segmenter).SendSuper(super) {
					b.Fatal("not sent")
				}
				take(b, ends[1], func(f *link.Frame) {
					for _, p := range f.Pieces[:f.N] {
						for i := 0; i < len(p); i += 64 {
							sum += int(p[i])
						}
					}
				})
			})
		})
		for _, to := range []int{1, 0} {
			b.Run(fmt.Sprintf("%s/super-across/to=%d", name, to), func(b *testing.B) { across(b, ends[0], ends[1], super, to) })
		}
	}
}

// across sends super-frames from one CPU to a thread on the other one, and reports the CPU time of each.
func across(b *testing.B, from, to link.Link, super *link.Super, cpu int) {
	if runtime.NumCPU() < 2 {
		b.Skip("one CPU")
	}
	b.SetBytes(int64(super.Len()))
	var sent, got atomic.Int64
	received := make(chan int64)
	go func() {
		received <- onCPU(cpu, func() {
			for got.Load() < int64(b.N) {
				take(b, to, func(*link.Frame) {})
				got.Add(1)
			}
		})
	}()
	ns := onCPU(1-cpu, func() {
		for range b.N {
			for sent.Load()-got.Load() >= 16 {
				spin.Yield()
			}
			if !from.(link.Segmenter).SendSuper(super) {
				b.Error("not sent")
				return
			}
			sent.Add(1)
		}
	})
	b.ReportMetric(float64(ns)/float64(b.N), "sender-ns/op")
	b.ReportMetric(float64(<-received)/float64(b.N), "receiver-ns/op")
}

// onCPU runs f on a thread of that CPU and returns the thread's CPU time in nanoseconds.
func onCPU(cpu int, f func()) int64 {
	runtime.LockOSThread() // the thread stays pinned, and ends with its goroutine
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set)
	return cpuTime(f)
}

// cpuTime runs f and returns the CPU time of the thread in nanoseconds.
func cpuTime(f func()) int64 {
	var start, end unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &start)
	f()
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &end)
	return unix.TimevalToNsec(end.Utime) + unix.TimevalToNsec(end.Stime) - unix.TimevalToNsec(start.Utime) - unix.TimevalToNsec(start.Stime)
}

// thread runs f for each iteration on one thread and reports the thread's CPU time.
func thread(b *testing.B, f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns := cpuTime(func() {
		for b.Loop() {
			f()
		}
	})
	b.ReportMetric(float64(ns)/float64(b.N), "cpu-ns/op")
}

func move(b *testing.B, from, to link.Link, frame []byte) {
	s, ok := from.Alloc()
	if !ok {
		b.Fatal("no slot")
	}
	copy(from.Bytes(s), frame)
	from.Post(s, 0, len(frame))
	from.Flush()
	take(b, to, func(*link.Frame) {})
	var done [8]link.Slot
	for _, s := range done[:from.Reap(done[:])] {
		from.Free(s)
	}
}

// take receives one frame. Frames that the kernel sends on its own are not claimed.
func take(b *testing.B, l link.Link, f func(*link.Frame)) {
	var fs [1]link.Frame
	for range 1 << 22 {
		if l.Receive(fs[:]) == 1 {
			f(&fs[0])
			l.Release(&fs[0])
			return
		}
	}
	b.Fatal("a frame was lost")
}

// superFrame returns a super-frame of n segments with size bytes each.
func superFrame(v *testenv.Veth, n, size int) *link.Super {
	b := tcpFrame(v, port, 0, 32+n*size)
	l4 := b[34:]
	l4[12], l4[13] = 8<<4, 0x10
	copy(l4[20:], []byte{1, 1, 8, 10})
	var p pkt.Packet
	if err := p.Parse(b, len(b)); err != nil {
		panic(fmt.Sprint("superFrame: ", err))
	}
	binary.BigEndian.PutUint16(l4[16:], pkt.Fold(p.PseudoSum))
	s := &link.Super{TCPOff: 34, HdrLen: 34 + 32, Size: size}
	s.Parts = append(s.Parts, b[:66+size])
	for rest := b[66+size:]; len(rest) > 0; rest = rest[size:] {
		s.Parts = append(s.Parts, rest[:size])
	}
	return s
}
