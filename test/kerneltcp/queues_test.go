package kerneltcp

import (
	"fmt"
	"testing"
	"time"

	"github.com/safchain/ethtool"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// setQueues sets the number of TX queues of an end, as ethtool -L does. A frame arrives at the other end on the queue
// with the same number.
func setQueues(e *testenv.End, n uint32) error {
	return e.NS.Do(func() error {
		h, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer h.Close()
		c, err := h.GetChannels(e.Name)
		if err != nil {
			return err
		}
		c.TxCount = n
		_, err = h.SetChannels(e.Name, c)
		return err
	})
}

// TestQueues moves the kernel's frames to other queues of ours during transfers: connections must continue and end
// gracefully.
func TestQueues(t *testing.T) {
	const queues = 4
	v := testenv.NewVethQueues(t, 1500, queues)
	if err := setQueues(&v.B, 1); err != nil {
		testenv.Skip(t, "queues of a veth: %v", err)
	}
	length := time.Second
	if full() {
		length = 10 * time.Second
	}
	var all uint64
	for i, w := range talks[:3] {
		for _, v6 := range []bool{false, true} {
			if !full() && (i < 2 || v6) {
				continue
			}
			t.Run(fmt.Sprintf("%s, IPv6 %v", w.name, v6), func(t *testing.T) {
				stop, done := make(chan struct{}), make(chan error, 1)
				go func() {
					n := uint32(1)
					tick := time.NewTicker(100 * time.Millisecond)
					defer tick.Stop()
					for {
						select {
						case <-tick.C:
							n = n%queues + 1
							if err := setQueues(&v.B, n); err != nil {
								done <- err
								return
							}
						case <-stop:
							done <- nil
							return
						}
					}
				}()
				here := place{end: &v.A, stack: "ours", args: []string{"-timewait", "200ms", "-queues", fmt.Sprint(queues)}}
				there := place{end: &v.B, stack: "kernel"}
				var we, they *report
				var err error
				before := counters(t, v.B.NS)
				if w.weListen {
					we, they, err = run(t, here, there, w.ours, w.kernel, v6, "-conns", "8", "-for", length.String())
				} else {
					they, we, err = run(t, there, here, w.kernel, w.ours, v6, "-conns", "8", "-for", length.String())
				}
				close(stop)
				if serr := <-done; serr != nil {
					t.Error(serr)
				}
				if err != nil {
					t.Fatal(err)
				}
				check(t, we, they)
				// A reordered frame may find its connection closed, so its RST is not for an open connection.
				after := counters(t, v.B.NS)
				for _, k := range []string{"Tcp:EstabResets", "Tcp:AttemptFails", "Tcp:InErrs", "TcpExt:TCPAbortOnData", "TcpExt:TCPAbortOnTimeout"} {
					if d := after[k] - before[k]; d != 0 {
						t.Errorf("the kernel's %s went up by %d", k, d)
					}
				}
				var strays, lost, stateless uint64
				for _, e := range we.Engine {
					strays += e.RxWrongQueue
					lost += e.RxWrongQueueDropped
					stateless += e.TxStateless
				}
				all += strays
				t.Logf("%d frames came to another queue, %d of them lost; %d found no connection; %.0f MB/s in, the kernel %.0f", strays, lost, stateless, we.MBps, they.MBps)
			})
		}
	}
	if full() && all == 0 {
		t.Error("no frame came to another queue")
	}
}
