package xsk

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestKernelKeepsItsOwn attaches a program and opens a socket on an interface that the kernel uses too. It checks
// that the kernel's traffic passes, and that the kernel does not respond to what is steered.
func TestKernelKeepsItsOwn(t *testing.T) {
	for _, mode := range []bpf.Mode{bpf.Generic, bpf.Native} {
		t.Run(mode.String(), func(t *testing.T) {
			v := testenv.NewVeth(t, 1500)
			b := openSide(t, &v.B, mode, Config{Frames: 256, Ring: 128})

			// The kernel's TCP exchanges data, after ARP.
			if c, err := v.A.Dial(t.Context(), v.B.Listen(t, v.B.Addr4).Addr().String()); err != nil {
				t.Errorf("the kernel's own port: %v", err)
			} else {
				c.Close()
			}

			// A SYN to the claimed port must arrive at the socket without a response, so the connect is still waiting when it is
			// abandoned.
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			dialed := make(chan error, 1)
			go func() {
				c, err := v.A.Dial(ctx, netip.AddrPortFrom(v.B.Addr4, port).String())
				if err == nil {
					err = errors.Join(errors.New("connected"), c.Close())
				}
				dialed <- err
			}()
			fs := make([]link.Frame, 4)
			syns := 0
			for until := clock.Now().Add(time.Minute); syns == 0 && clock.Now() < until; b.Wait(10*time.Millisecond, -1) {
				for i := range b.Receive(fs) {
					var p pkt.Packet
					if err := p.Parse(fs[i].Pieces[0], fs[i].Len()); err != nil || p.Flow.LocalPort != port {
						t.Errorf("steered: %+v, %v", p, err)
					} else if l4 := fs[i].Pieces[0][p.L4Off : p.L4Off+p.L4Len]; pkt.Fold(pkt.Sum(l4, p.PseudoSum)) != 0xffff {
						t.Error("the checksum of the kernel's SYN is wrong")
					}
					syns++
					b.Release(&fs[i])
				}
			}
			if syns == 0 {
				t.Error("no SYN was steered")
			}
			select {
			case err := <-dialed:
				t.Errorf("connect to the claimed port: %v", err)
			case <-time.After(300 * time.Millisecond):
				giveUp()
				<-dialed
			}
			c, err := b.steer.Counters()
			if err != nil || c.SteeredTCP == 0 || c.Passed == 0 || c.Malformed+c.NoSocket != 0 {
				t.Errorf("counters %+v, %v", c, err)
			}
		})
	}
}

// TestInterfaceDownAndGone removes the interface below a socket. Calls must still return without spinning, and
// frames posted while it was down must be accounted for.
func TestInterfaceDownAndGone(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a := openSide(t, &v.A, bpf.Generic, Config{Frames: 64, Ring: 32})
	tu := tuple(&v.A, &v.B)
	set := func(do func(netlink.Link) error) {
		t.Helper()
		v.A.NS.Run(t, func() error {
			l, err := netlink.LinkByName(v.A.Name)
			if err != nil {
				return err
			}
			return do(l)
		})
	}
	done := make([]link.Slot, 8)
	post := func() link.Slot {
		t.Helper()
		s, ok := a.Alloc()
		if !ok {
			t.Fatal("no slot")
		}
		fillFrame(a.Bytes(s)[:100], &tu, 0)
		if !a.Post(s, 0, 100) {
			t.Fatal("Post refused")
		}
		a.Flush()
		return s
	}
	set(netlink.LinkSetDown)
	s := post()
	if n := a.Reap(done); n != 0 {
		t.Errorf("reaped %d while the interface is down", n)
	}
	var st link.Stats
	if a.Stats(&st); st.TxErrors == 0 || st.TxIncomplete == 0 {
		t.Errorf("stats %+v", st)
	}
	set(netlink.LinkSetUp)
	n := 0
	for until := clock.Now().Add(time.Minute); n == 0 && clock.Now() < until; n = a.Reap(done) {
		a.Wait(time.Millisecond, -1)
		a.Flush()
	}
	if n != 1 || done[0] != s {
		t.Errorf("reaped %d after the interface came back", n)
	}

	set(netlink.LinkDel)
	post()
	fs := make([]link.Frame, 4)
	start := clock.Now()
	const waits = 20 // a signal may cut some short
	for range waits {
		a.Wait(2*time.Millisecond, -1)
		a.Receive(fs)
		a.Flush()
	}
	// With frames left over Wait sleeps one millisecond instead of two, but it does sleep.
	if d := clock.Now().Sub(start); d < waits/4*time.Millisecond {
		t.Errorf("%d Waits took %v: the descriptor of a gone interface keeps poll awake", waits, d)
	}
}
