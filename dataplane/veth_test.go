package dataplane

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

// BenchmarkVeth moves messages between two workers over a veth pair, for each kind of link. They take turns in one
// thread. cpu-us is the CPU time of that thread per message, for both sides and the kernel, and is comparable on a
// busy machine. It says nothing about what two CPUs do in parallel.
func BenchmarkVeth(b *testing.B) {
	for _, kind := range []string{"xdp", "packet"} {
		for _, mtu := range []int{1500, 9000} {
			for _, l := range loads {
				b.Run(fmt.Sprintf("%s/mtu=%d/%v/%d", kind, mtu, l.op, l.size), func(b *testing.B) {
					s := newVethSim(b, kind, mtu)
					a, q := s.newLoad(mpa.Params{CRC: true, IRD: 16, ORD: 16}, l.op, l.size)
					s.load(a, q, 200)
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
					b.ResetTimer()
					began := threadTime()
					s.load(a, q, b.N)
					b.ReportMetric(float64(threadTime()-began)/1000/float64(b.N), "cpu-us/op")
					for i, h := range s.hosts {
						b.ReportMetric(float64(h.w.stats.RxFrames)/float64(b.N), fmt.Sprintf("rx-frames-%d/op", i))
					}
					b.ReportMetric(float64(s.hosts[0].w.stats.TxRetransmits+s.hosts[1].w.stats.TxRetransmits), "resent")
				})
			}
		}
	}
}

// threadTime is the CPU time of the thread in nanoseconds.
func threadTime() int64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return unix.TimevalToNsec(u.Utime) + unix.TimevalToNsec(u.Stime)
}

// newVethSim is a sim over a veth pair, by the real clock.
func newVethSim(t testing.TB, kind string, mtu int) *sim {
	k, err := ifqueue.ParseKind(kind)
	if err != nil {
		t.Fatal(err)
	}
	v := testenv.NewVethOffloads(t, mtu)
	s := &sim{t: t, now: clock.Now(), real: true}
	var ends [2]link.Link
	for i, e := range []*testenv.End{&v.A, &v.B} {
		if err := e.NS.Do(func() error {
			steer, err := bpf.Load(bpf.Options{Endpoints: 64})
			if err != nil {
				return err
			}
			t.Cleanup(func() { steer.Close() })
			set, err := ifqueue.Open(steer, ifqueue.Config{Interface: e.Name, Queues: []int{0}, Link: k, Super: true})
			if err != nil {
				return err
			}
			t.Cleanup(func() { set.Close() })
			ends[i] = set.Links[0]
			for _, port := range []uint16{40000, 7174} {
				err = errors.Join(err, steer.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Port: port}))
			}
			return err
		}); errors.Is(err, bpf.ErrNoIngress) {
			testenv.Skip(t, "%v", err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	s.join(t, ends, true, func() clock.Time { return s.now })
	t.Cleanup(func() {
		for _, h := range s.hosts {
			h.w.closeFDs()
		}
	})
	return s
}
