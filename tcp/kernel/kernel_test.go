//go:build linux

package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/tcp/peertest"
)

var (
	ours4, theirs4 = netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.99.0.2")
	ours6, theirs6 = netip.MustParseAddr("fd99::1"), netip.MustParseAddr("fd99::2")
)

const ourPort, theirPort = 7174, 7175

// tun is a tun device of which we are the wire.
type tun struct {
	fd  int
	buf []byte
}

func (w *tun) Send(b []byte) { _, _ = unix.Write(w.fd, b) }

func (w *tun) Recv(d time.Duration) []byte {
	for {
		n, err := unix.Read(w.fd, w.buf)
		if err == nil {
			return w.buf[:n]
		}
		if d <= 0 {
			return nil
		}
		ts := unix.NsecToTimespec(int64(d))
		_, _ = unix.Ppoll([]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}, &ts, nil)
		d = 0
	}
}

// namespace is a thread in a network namespace of its own, with a tun device and
// the addresses local of the kernel's end.
type namespace struct {
	do  chan func()
	tun *tun
}

// newNamespace skips the test when it may not make one.
func newNamespace(t testing.TB, mtu int, local4, local6, peer4, peer6 netip.Addr, sysctl map[string]string) *namespace {
	ns := &namespace{do: make(chan func())}
	ready := make(chan error)
	go func() {
		// The thread is not unlocked: it ends with the goroutine.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = ns.setup(mtu, local4, local6, peer4, peer6, sysctl)
		}
		ready <- err
		if err != nil {
			return
		}
		for f := range ns.do {
			f()
		}
	}()
	if err := <-ready; err != nil {
		testenv.Skip(t, "needs root and tun: %v", err)
	}
	t.Cleanup(func() { close(ns.do); unix.Close(ns.tun.fd) })
	return ns
}

func (ns *namespace) setup(mtu int, local4, local6, peer4, peer6 netip.Addr, sysctl map[string]string) error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ifr, err := unix.NewIfreq("iwtun")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return err
	}
	ns.tun = &tun{fd: fd, buf: make([]byte, 64<<10)}
	l, err := netlink.LinkByName("iwtun")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetMTU(l, mtu); err != nil {
		return err
	}
	if err := netlink.LinkSetTxQLen(l, 10000); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/iwtun/accept_dad", []byte("0"), 0); err != nil {
		return err
	}
	for _, a := range [][2]netip.Addr{{local4, peer4}, {local6, peer6}} {
		bits := a[0].BitLen()
		ip := func(a netip.Addr) *net.IPNet { return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)} }
		if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ip(a[0]), Peer: ip(a[1]), Flags: unix.IFA_F_NODAD}); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return err
	}
	dst := &net.IPNet{IP: peer6.AsSlice(), Mask: net.CIDRMask(128, 128)}
	if err := netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst}); err != nil {
		return err
	}
	for k, v := range sysctl {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+k, []byte(v), 0); err != nil {
			return fmt.Errorf("%s: %w", k, err)
		}
	}
	return nil
}

// run calls f on the thread in the namespace.
func (ns *namespace) run(f func()) {
	done := make(chan struct{})
	ns.do <- func() { f(); close(done) }
	<-done
}

// app is the kernel's application.
type app struct {
	send, recv int
	closeFirst bool
	writeFirst bool // it reads nothing before it has written everything
	echo       bool
	cubic      bool // the algorithm that we use too, whatever the machine's default is
}

func setCubic(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
	})
	return errors.Join(cerr, err)
}

func (a *app) run(conn *net.TCPConn) error {
	defer conn.Close()
	if a.cubic {
		if err := setCubic(conn); err != nil {
			return err
		}
	}
	if a.echo {
		if _, err := io.Copy(conn, conn); err != nil {
			return err
		}
		return conn.CloseWrite()
	}
	errs := make(chan error, 2)
	eof, wrote := make(chan struct{}), make(chan struct{})
	if !a.writeFirst {
		close(wrote)
	}
	go func() {
		<-wrote
		b := make([]byte, 256<<10)
		got := 0
		for {
			n, err := conn.Read(b)
			for i, v := range b[:n] {
				if v != peertest.ByteAt(got+i) {
					errs <- fmt.Errorf("byte %d from us is wrong", got+i)
					return
				}
			}
			got += n
			if errors.Is(err, io.EOF) {
				close(eof)
				err = nil
				if got != a.recv {
					err = fmt.Errorf("the kernel got %d bytes of %d", got, a.recv)
				}
				errs <- err
				return
			}
			if err != nil {
				errs <- err
				return
			}
		}
	}()
	go func() {
		b := make([]byte, a.send)
		for i := range b {
			b[i] = peertest.ByteAt(i)
		}
		if _, err := conn.Write(b); err != nil {
			errs <- err
			return
		}
		if a.writeFirst {
			close(wrote)
		}
		if !a.closeFirst {
			select {
			case <-eof:
			case <-time.After(2 * time.Minute):
				errs <- errors.New("no FIN from us")
				return
			}
		}
		errs <- conn.CloseWrite()
	}()
	for range 2 {
		if err := <-errs; err != nil {
			return err
		}
	}
	return nil
}

func flow(v6 bool) pkt.Flow {
	f := pkt.Flow{Local: ours4.As16(), Remote: theirs4.As16(), LocalPort: ourPort, RemotePort: theirPort}
	if v6 {
		f.Local, f.Remote = ours6.As16(), theirs6.As16()
	}
	return f
}

// peer starts the kernel's end in ns.
func peer(t testing.TB, ns *namespace, a *app, dials bool, from, to netip.Addr) <-chan error {
	done := make(chan error, 1)
	if dials {
		go ns.run(func() {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice(), Port: theirPort}, Timeout: 2 * time.Minute}
			c, err := d.Dial("tcp", netip.AddrPortFrom(to, ourPort).String())
			if err != nil {
				done <- err
				return
			}
			go func() { done <- a.run(c.(*net.TCPConn)) }()
		})
		return done
	}
	var l *net.TCPListener
	var err error
	ns.run(func() { l, err = net.ListenTCP("tcp", &net.TCPAddr{IP: from.AsSlice(), Port: theirPort}) })
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer l.Close()
		c, err := l.AcceptTCP()
		if err != nil {
			done <- err
			return
		}
		done <- a.run(c)
	}()
	return done
}

// TestKernel moves bytes to and from the kernel's TCP in both roles, with its
// options switched off one by one, over good and bad wires.
func TestKernel(t *testing.T) {
	const bulk = 16 << 20
	lossy := func(p float64) impair.Config { return impair.Config{Loss: p, Seed: 1} }
	for _, tc := range []struct {
		name       string
		passive    bool
		v6         bool
		send, recv int
		close      int // 0: both when they have sent, 1: we first, 2: the kernel first
		mtu        int
		wire       impair.Config
		rate       int
		sysctl     map[string]string
		conf       func(*tcp.Config)
		echo       int
		small      bool
		writeFirst bool
	}{
		{name: "to the kernel", send: bulk},
		{name: "from the kernel", recv: bulk},
		{name: "both ways", send: bulk, recv: bulk},
		{name: "passive, both ways", passive: true, send: bulk, recv: bulk},
		{name: "IPv6, both ways", v6: true, send: bulk, recv: bulk},
		{name: "IPv6, passive", v6: true, passive: true, send: 100_000, recv: 100_000},
		{name: "we close first", send: 1000, recv: 1000, close: 1},
		{name: "the kernel closes first", send: 1000, recv: 1000, close: 2},
		{name: "close, no bytes", close: 0},
		{name: "passive, we close first", passive: true, send: 1000, recv: 1000, close: 1},
		{name: "passive, the kernel closes first", passive: true, send: 1000, recv: 1000, close: 2},
		{name: "MTU 1280", mtu: 1280, send: bulk, recv: bulk},
		{name: "MTU 3498", mtu: 3498, send: bulk, recv: bulk},
		{name: "MTU 9000", mtu: 9000, send: bulk, recv: bulk},
		{name: "no SACK", send: bulk, recv: bulk, wire: lossy(0.001), sysctl: map[string]string{"tcp_sack": "0"}},
		{name: "no timestamps", send: bulk, recv: bulk, wire: lossy(0.001), sysctl: map[string]string{"tcp_timestamps": "0"}},
		{name: "no window scale", send: bulk, recv: bulk, sysctl: map[string]string{"tcp_window_scaling": "0"}},
		{name: "ECN", send: bulk, recv: bulk, sysctl: map[string]string{"tcp_ecn": "1"}, conf: func(c *tcp.Config) { c.ECN = tcp.RequestECN }},
		{name: "ECN, passive", passive: true, send: bulk, recv: bulk, sysctl: map[string]string{"tcp_ecn": "1"}, conf: func(c *tcp.Config) { c.ECN = tcp.RequestECN }},
		{name: "reno", recv: bulk, send: bulk, wire: lossy(0.001), sysctl: map[string]string{"tcp_congestion_control": "reno"}, conf: func(c *tcp.Config) { c.CongestionControl = tcp.NewReno }},
		{name: "request and response", echo: 64, send: 64_000, recv: 64_000, close: 1},
		{name: "small records", send: 1 << 20, recv: 1 << 20, small: true},
		{name: "small window", send: 1 << 20, recv: 1 << 20, conf: func(c *tcp.Config) { c.RcvWindow = 8000 }},
		{name: "the kernel reads when it has written", send: 1 << 20, recv: 8 << 20, rate: rate, writeFirst: true}, // it closes its window
		{name: "loss 1 %", send: 4 << 20, recv: 4 << 20, wire: lossy(0.01)},
		{name: "loss 5 %", send: 1 << 20, recv: 1 << 20, wire: lossy(0.05)},
		{name: "reordering", send: 4 << 20, recv: 4 << 20, wire: impair.Config{Reorder: 0.02, Seed: 1, Delay: time.Millisecond, Hold: 500 * time.Microsecond}},
		{name: "duplication and corruption", send: 4 << 20, recv: 4 << 20, wire: impair.Config{Duplicate: 0.02, Corrupt: 0.005, Seed: 1}},
		{name: "delay 20 ms, loss 0.1 %", send: 2 << 20, recv: 2 << 20, wire: impair.Config{Delay: 10 * time.Millisecond, Loss: 0.001, Seed: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if tc.mtu == 0 {
				tc.mtu = 1500
			}
			ns := newNamespace(t, tc.mtu, theirs4, theirs6, ours4, ours6, tc.sysctl)
			from, to := theirs4, ours4
			if tc.v6 {
				from, to = theirs6, ours6
			}
			a := &app{send: tc.recv, recv: tc.send, closeFirst: tc.close != 1, writeFirst: tc.writeFirst, echo: tc.echo > 0}
			cfg := tcp.DefaultConfig()
			cfg.TimeWait = 20 * time.Millisecond
			if tc.conf != nil {
				tc.conf(&cfg)
			}
			in := tc.wire
			in.Seed++
			e := &peertest.End{T: t, Wire: ns.tun, Config: cfg, Flow: flow(tc.v6), MTU: tc.mtu, Passive: tc.passive, Send: tc.send, Recv: tc.recv,
				CloseFirst: tc.close != 2, Out: tc.wire, In: in, Rate: tc.rate, Queue: queue, Echo: tc.echo, Small: tc.small}
			done := peer(t, ns, a, tc.passive, from, to)
			st := e.Run(2*time.Minute, done)
			t.Logf("%v, retransmits %d (fast %d RTO %d TLP %d) undos %d D-SACK in %d out %d", e.Took, st.Retransmits, st.RetransFast, st.RetransRTO, st.RetransTLP, st.Undos, st.DSACKIn, st.DSACKOut)
		})
	}
}

// relay carries packets between two kernels over the same bad wire as End has.
func relay(ctx context.Context, a, b *tun, out, in impair.Config) {
	p := [2]*peertest.Path{peertest.NewPath(out, rate, queue), peertest.NewPath(in, rate, queue)}
	w := [2]*tun{a, b}
	for ctx.Err() == nil {
		now := clock.Now()
		next := now.Add(20 * time.Millisecond)
		for _, q := range p {
			if d := q.Deadline(); d != 0 {
				next = min(next, d)
			}
		}
		ts := unix.NsecToTimespec(int64(max(next.Sub(now), 0)))
		_, _ = unix.Ppoll([]unix.PollFd{{Fd: int32(a.fd), Events: unix.POLLIN}, {Fd: int32(b.fd), Events: unix.POLLIN}}, &ts, nil)
		for i, t := range w {
			for range 64 {
				b := t.Recv(0)
				if b == nil {
					break
				}
				p[i].Push(clock.Now(), b)
			}
		}
		now = clock.Now()
		for i, q := range p {
			for {
				b, ok := q.Pop(now)
				if !ok {
					break
				}
				w[1-i].Send(b)
			}
		}
	}
}

// TestKernelGoodput compares what we send to the kernel with what the kernel sends
// to another kernel over the same wire, in the same run. With
// KERNELTCP=full in the environment we must reach 0.8 of that, on a machine that does
// nothing else; otherwise half.
func TestKernelGoodput(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	if testenv.Race {
		t.Skip("measures time, which the race detector changes")
	}
	for _, tc := range []struct {
		loss  float64
		delay time.Duration
		total int
		recv  bool // the kernel sends
	}{
		{0, 500 * time.Microsecond, 4 << 20, false},
		{0.01, 500 * time.Microsecond, 4 << 20, false},
		{0.05, 500 * time.Microsecond, 2 << 20, false},
		{0, 10 * time.Millisecond, 4 << 20, false},
		{0.001, 10 * time.Millisecond, 4 << 20, false},
		{0.01, 10 * time.Millisecond, 2 << 20, false},
		{0, 500 * time.Microsecond, 4 << 20, true},
		{0.01, 500 * time.Microsecond, 4 << 20, true},
		{0.001, 10 * time.Millisecond, 4 << 20, true},
	} {
		t.Run(fmt.Sprintf("loss %v delay %v kernel sends %v", tc.loss, tc.delay, tc.recv), func(t *testing.T) {
			least := 0.5
			if os.Getenv("KERNELTCP") == "full" {
				least = 0.8
			} else {
				t.Parallel() // the wire is slow, so the CPU is idle most of the time
			}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
			defer cancel()
			// Which packets are lost is luck, and so is when a busy machine lets us run: a bad
			// first run is one of nine.
			var ours, kernel time.Duration
			for i := range uint64(9) {
				out := impair.Config{Loss: tc.loss, Delay: tc.delay, Seed: 4 + 10*i}
				in := impair.Config{Loss: tc.loss, Delay: tc.delay, Seed: 5 + 10*i}
				kernel += kernelToKernel(ctx, t, tc.total, out, in)
				ours += oursAndKernel(t, tc.total, out, in, tc.recv)
				if ours.Seconds()*least <= kernel.Seconds() {
					break
				}
			}
			ratio := kernel.Seconds() / ours.Seconds()
			t.Logf("%.2f of the kernel's goodput", ratio)
			if ratio < least {
				t.Errorf("goodput is %.2f of the kernel's; want %.1f", ratio, least)
			}
		})
	}
}

// The bottleneck of TestKernelGoodput: bytes a second, and bytes that wait. It is
// so slow that the CPU is never the bottleneck, not even on a busy machine.
const rate, queue = 3_125_000, 62_500

// oursAndKernel returns how long we need for total bytes to a kernel, or from it.
func oursAndKernel(t *testing.T, total int, out, in impair.Config, recv bool) time.Duration {
	ns := newNamespace(t, 1500, theirs4, theirs6, ours4, ours6, nil)
	cfg := tcp.DefaultConfig()
	cfg.TimeWait = 20 * time.Millisecond
	e := &peertest.End{T: t, Wire: ns.tun, Config: cfg, Flow: flow(false), MTU: 1500, Send: total, CloseFirst: true, Out: out, In: in, Rate: rate, Queue: queue}
	a := &app{recv: total, cubic: true}
	if recv {
		e.Send, e.Recv, e.CloseFirst, e.Out, e.In = 0, total, false, in, out
		a.send, a.recv, a.closeFirst = total, 0, true
	}
	st := e.Run(2*time.Minute, peer(t, ns, a, false, theirs4, ours4))
	t.Logf("ours %.2f MB/s: %+v", float64(total)/e.Took.Seconds()/1e6, st)
	return e.Took
}

// kernelToKernel returns how long the kernel needs for total bytes to another.
func kernelToKernel(ctx context.Context, t *testing.T, total int, out, in impair.Config) time.Duration {
	na := newNamespace(t, 1500, ours4, ours6, theirs4, theirs6, nil)
	nb := newNamespace(t, 1500, theirs4, theirs6, ours4, ours6, nil)
	rctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { relay(rctx, na.tun, nb.tun, out, in); close(stopped) }()
	defer func() { cancel(); <-stopped }()
	a := &app{recv: total}
	done := peer(t, nb, a, false, theirs4, ours4)
	var conn *net.TCPConn
	var err error
	na.run(func() {
		conn, err = net.DialTCP("tcp", &net.TCPAddr{IP: ours4.AsSlice(), Port: ourPort}, &net.TCPAddr{IP: theirs4.AsSlice(), Port: theirPort})
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	start := clock.Now()
	if err := (&app{send: total, closeFirst: true, cubic: true}).run(conn); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	took := clock.Now().Sub(start)
	t.Logf("kernel %.2f MB/s", float64(total)/took.Seconds()/1e6)
	return took
}
