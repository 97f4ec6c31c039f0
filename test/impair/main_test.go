package main

import (
	"encoding/json"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// transfer sends n bytes by the kernel's TCP from a to b and returns how long
// it took.
func transfer(t *testing.T, w *testenv.Wire, n int64) time.Duration {
	t.Helper()
	l := w.B.Listen(t, w.B.Addr4)
	got := make(chan int64, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			got <- -1
			return
		}
		defer c.Close()
		m, _ := io.Copy(io.Discard, c)
		got <- m
	}()
	start := time.Now()
	c, err := w.A.Dial(t.Context(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	for left := n; left > 0; {
		m, err := c.Write(buf[:min(int64(len(buf)), left)])
		if err != nil {
			t.Fatal(err)
		}
		left -= int64(m)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if m := <-got; m != n {
		t.Fatalf("%d bytes arrived of %d", m, n)
	}
	return time.Since(start)
}

// report is what -stats prints.
func report(t *testing.T, s string) (ab, ba counters) {
	t.Helper()
	var r map[string]counters
	if err := json.Unmarshal([]byte(s), &r); err != nil {
		t.Fatalf("%v: %q", err, s)
	}
	return r["a-to-b"], r["b-to-a"]
}

func TestKernelTCPThroughPerfectWire(t *testing.T) {
	for _, mtu := range []int{1500, 9000} {
		w := testenv.NewWire(t, mtu)
		stop := w.Impair(t, "-stats", "-seed", "1")
		took := transfer(t, w, 8<<20)
		ab, ba := report(t, stop())
		t.Logf("MTU %d: 8 MiB in %v; a to b %+v", mtu, took, ab)
		if ab.Sent != ab.Received || ba.Sent != ba.Received || ab.TooLong+ba.TooLong+ab.NoRoom+ba.NoRoom != 0 {
			t.Errorf("a to b %+v, b to a %+v", ab, ba)
		}
	}
}

func TestKernelTCPThroughBadWire(t *testing.T) {
	w := testenv.NewWire(t, 1500)
	stop := w.Impair(t, "-stats", "-seed", "7", "-both", "loss=0.01,duplicate=0.01,reorder=0.02,corrupt=0.005,delay=200us,jitter=100us", "-b-to-a", "delay=1ms")
	took := transfer(t, w, 2<<20)
	ab, ba := report(t, stop())
	t.Logf("2 MiB in %v", took)
	if ab.Lost == 0 || ab.Duplicated == 0 || ab.Reordered == 0 || ab.Corrupted == 0 || ab.TooLong != 0 {
		t.Errorf("a to b %+v", ab)
	}
	if want := ab.Frames - ab.Lost + ab.Duplicated; ab.Sent > want || ab.Sent+ab.NoRoom+64 < want {
		t.Errorf("sent %d, want about %d", ab.Sent, want)
	}
	if ba.Lost+ba.Duplicated+ba.Reordered+ba.Corrupted != 0 {
		t.Errorf("the other way is only slow: %+v", ba)
	}
}

// ends opens both ends of w.
func ends(t *testing.T, w *testenv.Wire) (a, b *link.Packet) {
	t.Helper()
	for _, e := range []struct {
		end *testenv.End
		p   **link.Packet
	}{{&w.A, &a}, {&w.B, &b}} {
		e.end.NS.Run(t, func() (err error) {
			*e.p, err = link.OpenPacket(e.end.Name, link.PacketOptions{})
			return err
		})
		t.Cleanup(func() { (*e.p).Close() })
	}
	return a, b
}

// frame returns a frame from the host at from with these VLAN tags.
func frame(from, to *testenv.End, vlans ...uint16) string {
	tu := pkt.Tuple{
		Flow: pkt.NewFlow(netip.AddrPortFrom(from.Addr4, 1), netip.AddrPortFrom(to.Addr4, 2)), Proto: 253,
		SrcMAC: [6]byte(from.MAC), DstMAC: [6]byte{2, 0xff, 1, 2, 3, 4}, NVLAN: len(vlans),
	}
	copy(tu.VLANs[:], vlans)
	f := make([]byte, tu.HeaderLen()+1400)
	tu.Put(f, 1400, 0)
	return string(f)
}

// carried checks that of the frames sent by a, the first of this test that b receives is want.
func carried(t *testing.T, a, b *link.Packet, want string, sent ...string) {
	t.Helper()
	for _, f := range sent {
		s, _ := a.Alloc()
		a.Post(s, 0, copy(a.Bytes(s), f))
	}
	a.Flush()
	fs := make([]link.Frame, 16)
	for until := time.Now().Add(time.Minute); time.Now().Before(until); b.Wait(10*time.Millisecond, -1) {
		for i := range b.Receive(fs) {
			got := string(fs[i].Pieces[0])
			b.Release(&fs[i])
			if got == want {
				return
			}
			if strings.HasPrefix(got, want[:6]) { // the kernels send others
				t.Fatalf("received % x, want % x", got[:40], want[:40])
			}
		}
	}
	t.Error("the frame did not arrive")
}

// TestFramesAreCarriedAsTheyAre carries frames as they are, tags and strange types included.
func TestFramesAreCarriedAsTheyAre(t *testing.T) {
	w := testenv.NewWire(t, 1500)
	w.Impair(t, "-seed", "1")
	a, b := ends(t, w)
	f := frame(&w.A, &w.B, 0x2005)
	carried(t, a, b, f, f)
}

// TestVLAN joins B to a VLAN of A: B sees only its frames, without their tag, and A sees those of B with it.
func TestVLAN(t *testing.T) {
	w := testenv.NewWire(t, 1500)
	w.Impair(t, "-seed", "1", "-vlan", "7")
	a, b := ends(t, w)
	carried(t, a, b, frame(&w.A, &w.B), frame(&w.A, &w.B, 8), frame(&w.A, &w.B), frame(&w.A, &w.B, 7))
	carried(t, b, a, frame(&w.B, &w.A, 7), frame(&w.B, &w.A))
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{
		{}, {"-a", "x"}, {"-a", "x", "-b", "x"}, {"-a", "x", "-b", "y", "z"},
		{"-a", "x", "-b", "y", "-both", "loss=7"}, {"-a", "not-there", "-b", "neither"},
		{"-a", "x", "-b", "y", "-vlan", "4095"},
	} {
		if err := run(args); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}
