package kerneltcp

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
)

// flood sends n SYNs to a port from unused addresses, spread over d. It runs in the namespace of from; the addresses
// are those set aside for benchmarks (RFC 2544), which are not routed there.
func flood(from, to *testenv.End, port uint16, n int, d time.Duration, rng *rand.Rand) (took time.Duration, err error) {
	fd := -1
	if err := from.NS.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	to2 := unix.SockaddrLinklayer{Ifindex: from.Index, Halen: 6}
	began := time.Now()
	frame := make([]byte, 128)
	for i := range n {
		var src [4]byte
		binary.BigEndian.PutUint32(src[:], 198<<24|18<<16|rng.Uint32N(1<<17))
		flow := pkt.NewFlow(netip.AddrPortFrom(netip.AddrFrom4(src), uint16(1024+rng.IntN(60000))), netip.AddrPortFrom(to.Addr4, port))
		tup := pkt.Tuple{Flow: flow, Proto: pkt.ProtoTCP, SrcMAC: [6]byte(from.MAC), DstMAC: [6]byte(to.MAC)}
		h := tcp.Header{SrcPort: flow.LocalPort, DstPort: flow.RemotePort, Seq: serial.Num(rng.Uint32()), Flags: tcp.SYN, Window: 64240}
		h.Opts.MSS = 1460
		h.Opts.SACKPermitted = true
		if i%2 == 0 {
			h.Opts.HasTimestamps, h.Opts.TSVal = true, rng.Uint32()
			h.Opts.HasWScale, h.Opts.WScale = true, 7
		}
		l2 := tup.HeaderLen()
		l4 := h.Put(frame[l2:])
		tup.Put(frame, l4, 0)
		sum := ^pkt.Fold(pkt.Sum(frame[l2:l2+l4], tup.PseudoSum(l4)))
		binary.BigEndian.PutUint16(frame[l2+16:], sum)
		if err := unix.Sendto(fd, frame[:l2+l4], 0, &to2); err != nil && err != unix.ENOBUFS {
			return 0, err
		}
		if ahead := d*time.Duration(i)/time.Duration(n) - time.Since(began); ahead > time.Millisecond {
			time.Sleep(ahead) // the pace of the flood, not a wait for something
		}
	}
	return time.Since(began), nil
}

// TestSYNFlood sends 100,000 SYNs (in the short run, 25,000 at the same rate) from spoofed addresses to a port of
// ours during an echoed transfer through it: a new connection must be served, and the state that the flood leaves
// must be bounded. In the full run, on an otherwise idle machine, the transfer keeps half of its goodput, and most
// SYNs are answered.
func TestSYNFlood(t *testing.T) {
	n, rounds, last := 100000, 3, 4*time.Second
	if !full() {
		n, rounds, last = 25000, 1, time.Second
	}
	v := testenv.NewVeth(t, 1500)
	rng := testenv.Rand(t)
	const port, backlog = 7001, 1024
	at := netip.AddrPortFrom(v.A.Addr4, port).String()
	server := start(t, v.A.NS, "-stack", "ours", "-i", v.A.Name, "-listen", at, "-do", "echo", "-cycles", "0",
		"-backlog", fmt.Sprint(backlog), "-drain", "1s", "-timewait", "100ms")
	server.ready()
	client := func(args ...string) *proc {
		return start(t, v.B.NS, append([]string{"-stack", "kernel", "-connect", at}, args...)...)
	}
	transfer := func() *proc { return client("-do", "both", "-for", last.String(), "-cc", "cubic") }
	finish := func(p *proc) *report {
		r, err := p.wait(3 * time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Errors) > 0 || r.Sent != r.Received || r.SentHash != r.ReceivedHash {
			t.Errorf("%s: sent %d (%s), heard %d (%s), %v", r.Do, r.Sent, r.SentHash, r.Received, r.ReceivedHash, r.Errors)
		}
		return r
	}
	var quiet, flooded []float64
	var took time.Duration
	for range rounds {
		quiet = append(quiet, finish(transfer()).MBps)
		// The whole flood falls within one transfer.
		p := transfer()
		done := make(chan error, 1)
		go func() {
			var err error
			took, err = flood(&v.B, &v.A, port, n, last*3/4, rng)
			done <- err
		}()
		time.Sleep(last / 4) // in the middle of the flood
		began := time.Now()
		legitimate := finish(client("-do", "request", "-bytes", "50"))
		t.Logf("a new connection under the flood: 50 requests and both closes after %v, p50 %.0f µs, p99 %.0f µs", time.Since(began), legitimate.P50, legitimate.P99)
		if legitimate.Requests != 50 {
			t.Errorf("%d requests answered of a new connection", legitimate.Requests)
		}
		flooded = append(flooded, finish(p).MBps)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		t.Logf("%d SYNs in %v: %.0f a second", n, took, float64(n)/took.Seconds())
	}
	if c, err := dialKernel(&v.B, at); err != nil {
		t.Errorf("connect after the flood: %v", err)
	} else {
		c.Close()
	}
	_ = server.stdin.Close()
	r, err := server.wait(3 * time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	e := r.Engine[0]
	t.Logf("goodput, MB/s each way: %.1f without, %.1f with the flood", quiet, flooded)
	t.Logf("server: %d frames in, %d accepted or half-open, %d stateless answers, %d connections left, %d without a slot, %.0f MiB of heap", e.RxFrames, e.PassiveOpens, e.TxStateless, r.Left, e.TxNoSlot, r.HeapMiB)
	if full() && median(flooded) < 0.5*median(quiet) {
		t.Errorf("goodput %.1f MB/s under the flood, %.1f without; want half", flooded, quiet)
	}
	if r.Left > backlog+8 {
		t.Errorf("%d connections left; want no more than the SYN queue holds, %d", r.Left, backlog)
	}
	if sent := uint64(n * rounds); e.TxStateless == 0 || full() && e.TxStateless < sent/4 {
		t.Errorf("only %d cookies for %d SYNs", e.TxStateless, sent)
	}
	if r.HeapMiB > 256 {
		t.Errorf("%.0f MiB of heap", r.HeapMiB)
	}
	if len(r.Errors) > 0 {
		t.Errorf("server: %v", r.Errors)
	}
}

// dialKernel opens a connection with the kernel's TCP and has one byte echoed.
func dialKernel(from *testenv.End, at string) (c net.Conn, err error) {
	err = from.NS.Do(func() error {
		c, err = net.DialTimeout("tcp", at, time.Minute)
		return err
	})
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err = c.Write([]byte{7}); err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	return c, err
}
