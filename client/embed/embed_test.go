package embed_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// pair starts two nodes over the transport under test; with withinHost both are the same node.
func pair(t testing.TB, cfg embed.PairConfig) (a, b *embed.Node, ctx context.Context) {
	t.Helper()
	cfg.Sockets = testenv.Sockets()
	a, b, ctx = nodes(t, cfg)
	if withinHost {
		b = a
	}
	return a, b, ctx
}

// wire starts two nodes over a wire within the process, for tests of frames, of SCTP, and of addresses that the host does not
// have. They are the same over each transport, so one run of them is enough.
func wire(t testing.TB, cfg embed.PairConfig) (a, b *embed.Node, ctx context.Context) {
	t.Helper()
	if testenv.Sockets() {
		t.Skip("does not use kernel sockets")
	}
	return nodes(t, cfg)
}

func nodes(t testing.TB, cfg embed.PairConfig) (a, b *embed.Node, ctx context.Context) {
	t.Helper()
	a, b, err := embed.Pair(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(func() {
		cancel()
		a.Close()
		b.Close()
	})
	return a, b, ctx
}

// newDevice makes one more client of a node.
func newDevice(t testing.TB, ctx context.Context, n *embed.Node) *iwarp.Device {
	t.Helper()
	d, err := n.NewDevice(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// listen listens on a node until the test ends.
func listen(t testing.TB, ctx context.Context, n *embed.Node, addr string, cfg *iwarp.Config) *iwarp.Listener {
	t.Helper()
	l, err := n.Device().Listen(ctx, addr, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// alloc makes memory of a connection.
func alloc(t testing.TB, ctx context.Context, c *iwarp.Conn, n int, a iwarp.Access) *iwarp.MR {
	t.Helper()
	mr, err := c.Alloc(ctx, n, a)
	if err != nil {
		t.Fatal(err)
	}
	return mr
}

// connect returns the two ends of a connection from a to b.
func connect(t testing.TB, ctx context.Context, a, b *embed.Node, cfg *iwarp.Config) (ca, cb *iwarp.Conn) {
	t.Helper()
	l := listen(t, ctx, b, ":0", cfg)
	defer l.Close() // its connections stay
	type result struct {
		c   *iwarp.Conn
		err error
	}
	accepted := make(chan result, 1)
	go func() {
		c, err := l.Accept(ctx)
		accepted <- result{c, err}
	}()
	ca, err := a.Device().Dial(ctx, dialAddr(b, l), cfg)
	if err != nil {
		t.Fatal("dial:", err)
	}
	r := <-accepted
	if r.err != nil {
		t.Fatal("accept:", r.err)
	}
	return ca, r.c
}

// allStats returns the present counters of every worker of n: a worker that gets no CPU for a second has old ones.
func allStats(n *embed.Node) []dataplane.Stats {
	for {
		if all, silent := n.Engine().Stats(); len(silent) == 0 {
			return all
		}
	}
}

// allConns returns the connections of every worker of n, likewise.
func allConns(n *embed.Node) []dataplane.ConnInfo {
	for {
		if all, silent := n.Engine().QueryConns(nil); len(silent) == 0 {
			return all
		}
	}
}

// allQPs returns the queue pairs of adm, all with counters, likewise.
func allQPs(ctx context.Context, adm *iwarp.Admin) ([]*ctrlpb.QPInfo, error) {
	for {
		all, err := adm.QPs(ctx)
		if !slices.ContainsFunc(all, (*ctrlpb.QPInfo).GetSilent) {
			return all, err
		}
	}
}

// counters returns the counters of the daemon of adm and of its worker, likewise.
func counters(t *testing.T, ctx context.Context, adm *iwarp.Admin) map[string]uint64 {
	t.Helper()
	all := map[string]uint64{}
	testenv.Until(t, "the worker answers", func() bool {
		list, err := adm.Stats(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			all[c.Name] = c.Value
		}
		return all["engine.turns"] > 0
	})
	return all
}

// forms runs a test with dedicated workers, and with progress driven by the application.
func forms(t *testing.T, f func(t *testing.T, inline bool)) {
	t.Run("workers", func(t *testing.T) { f(t, false) })
	t.Run("inline", func(t *testing.T) {
		f(t, true)
	})
}

func TestConnSendRecvReadWrite(t *testing.T) {
	forms(t, func(t *testing.T, inline bool) {
		a, b, ctx := pair(t, embed.PairConfig{InlineProgress: inline})
		ca, cb := connect(t, ctx, a, b, nil)
		buf := make([]byte, 1<<16)
		for _, n := range []int{0, 1, 64, 65, 1000, 16384} {
			msg := bytes.Repeat([]byte{byte(n)}, n)
			if err := ca.Send(ctx, msg); err != nil {
				t.Fatalf("send %d: %v", n, err)
			}
			got, err := cb.Recv(ctx, buf)
			if err != nil || !bytes.Equal(buf[:got], msg) {
				t.Fatalf("recv %d: %d bytes, %v", n, got, err)
			}
			if err := cb.Send(ctx, msg); err != nil {
				t.Fatalf("send back %d: %v", n, err)
			}
			if got, err = ca.Recv(ctx, buf); err != nil || got != n {
				t.Fatalf("recv back %d: %d bytes, %v", n, got, err)
			}
		}
		mr := alloc(t, ctx, cb, 1<<20, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite|iwarp.AccessRemoteAtomic)
		src := make([]byte, 1<<20)
		for i := range src {
			src[i] = byte(i * 7)
		}
		if err := ca.Write(ctx, mr.Remote(), src); err != nil {
			t.Fatal("write:", err)
		}
		dst := make([]byte, 1<<20)
		if err := ca.Read(ctx, mr.Remote(), dst); err != nil {
			t.Fatal("read:", err)
		}
		if !bytes.Equal(src, dst) || !bytes.Equal(src, mr.Bytes()) {
			t.Fatal("memory differs")
		}
		clear(mr.Bytes()[:8])
		for i := range uint64(3) {
			if old, err := ca.FetchAdd(ctx, mr.RemoteAt(0, 8), 5); err != nil || old != 5*i {
				t.Fatalf("fetch-add %d: %d, %v", i, old, err)
			}
		}
		if old, err := ca.CompareSwap(ctx, mr.RemoteAt(0, 8), 15, 99); err != nil || old != 15 {
			t.Fatalf("compare-swap: %d, %v", old, err)
		}
		if err := errors.Join(ca.Write(ctx, mr.Remote(), nil), ca.Read(ctx, mr.Remote(), nil)); err != nil {
			t.Fatal("without bytes:", err)
		}
		if err := ca.Close(); err != nil {
			t.Fatal("close:", err)
		}
		if _, err := cb.Recv(ctx, buf); !errors.Is(err, io.EOF) {
			t.Fatal("recv after close:", err)
		}
		// Without bytes they are operations too: a Read waits for earlier Writes.
		if werr, rerr := cb.Write(ctx, iwarp.Remote{}, nil), cb.Read(ctx, iwarp.Remote{}, nil); werr == nil || rerr == nil {
			t.Errorf("after the end: write %v, read %v", werr, rerr)
		}
		if err := cb.Close(); err != nil {
			t.Fatal("close:", err)
		}
	})
}

// idle waits until a Node's server holds only its own client's objects.
func idle(t *testing.T, n *embed.Node) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for {
		s := n.Server().Status()
		if s.Clients == 1 && s.Pds+s.Mrs+s.Mws+s.Cqs+s.Qps+s.Listens+s.Conns == 0 && s.Registered == 0 {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("left behind: %v", s)
		case <-tick.C:
		}
	}
}

func TestReject(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	l := listen(t, ctx, b, ":7174", nil)
	rejected := make(chan struct{})
	go func() {
		defer close(rejected)
		r, err := l.Request(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		if string(r.PrivateData()) != "please" || r.Remote.Addr() != a.Addr() {
			t.Errorf("request %q from %v", r.PrivateData(), r.Remote)
		}
		if err := r.Reject(ctx, []byte("no")); err != nil {
			t.Error(err)
		}
	}()
	_, err := a.Device().Dial(ctx, dialAddr(b, l), &iwarp.Config{PrivateData: []byte("please")})
	var re *iwarp.RejectError
	if !errors.As(err, &re) || string(re.PrivateData) != "no" || !errors.Is(err, iwarp.ErrRejected) {
		t.Errorf("dial: %v", err)
	}
	<-rejected // our side may learn of it before the peer does
	l.Close()
	idle(t, a)
	idle(t, b)
}

// TestCRCPolicy checks that the two administrators decide whether a connection uses CRC32c, and that a client's NoCRC
// counts only where its own administrator allows it (RFC 5044 section 4.4). Data must pass either way.
func TestCRCPolicy(t *testing.T) {
	const required, optional, off = ctrl.CRCRequired, ctrl.CRCOptional, ctrl.CRCOff
	peers := func(rules ...ctrl.CRCRule) []ctrl.CRCRule { return rules }
	rule := func(p string, c ctrl.CRCPolicy) ctrl.CRCRule {
		return ctrl.CRCRule{Peers: netip.MustParsePrefix(p), CRC: c}
	}
	for _, tt := range []struct {
		name  string
		a, b  ctrl.StartupDefaults
		noCRC bool // both clients ask for no CRC
		want  bool
	}{
		{"defaults", ctrl.StartupDefaults{}, ctrl.StartupDefaults{}, false, true},
		{"defaults, clients without", ctrl.StartupDefaults{}, ctrl.StartupDefaults{}, true, true},
		{"optional", ctrl.StartupDefaults{CRC: optional}, ctrl.StartupDefaults{CRC: optional}, false, true},
		{"optional, clients without", ctrl.StartupDefaults{CRC: optional}, ctrl.StartupDefaults{CRC: optional}, true, false},
		{"initiator requires", ctrl.StartupDefaults{CRC: required}, ctrl.StartupDefaults{CRC: off}, true, true},
		{"responder requires", ctrl.StartupDefaults{CRC: off}, ctrl.StartupDefaults{CRC: required}, true, true},
		{"off", ctrl.StartupDefaults{CRC: off}, ctrl.StartupDefaults{CRC: off}, false, false},
		{"off for these peers", ctrl.StartupDefaults{CRCPeers: peers(rule("10.99.0.0/24", off))},
			ctrl.StartupDefaults{CRCPeers: peers(rule("10.99.0.1/32", off))}, false, false},
		{"first rule counts", ctrl.StartupDefaults{CRC: off, CRCPeers: peers(rule("10.99.0.2/32", required), rule("10.99.0.0/24", off))},
			ctrl.StartupDefaults{CRC: off}, true, true},
		{"other peers", ctrl.StartupDefaults{CRCPeers: peers(rule("10.98.0.0/16", off), rule("::/0", off))},
			ctrl.StartupDefaults{CRC: off}, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b, ctx := wire(t, embed.PairConfig{CtrlA: ctrl.Config{Startup: tt.a}, CtrlB: ctrl.Config{Startup: tt.b}})
			ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: iwarp.Startup{NoCRC: tt.noCRC}})
			defer ca.Close()
			defer cb.Close()
			if ca.Info().CRC != tt.want || cb.Info().CRC != tt.want {
				t.Errorf("CRC %v at the initiator, %v at the responder; want %v", ca.Info().CRC, cb.Info().CRC, tt.want)
			}
			buf := make([]byte, 5000)
			if err := ca.Send(ctx, buf); err != nil {
				t.Fatal(err)
			}
			if n, err := cb.Recv(ctx, buf); err != nil || n != 5000 {
				t.Fatal(n, err)
			}
		})
	}
}

func TestNegotiation(t *testing.T) {
	optional := ctrl.Config{Startup: ctrl.StartupDefaults{CRC: ctrl.CRCOptional}}
	a, b, ctx := pair(t, embed.PairConfig{CtrlA: optional, CtrlB: optional})
	for _, tt := range []struct {
		name string
		s    iwarp.Startup
		want iwarp.ConnInfo
	}{
		{"default", iwarp.Startup{}, iwarp.ConnInfo{Revision: 2, CRC: true, PeerToPeer: true, IRD: 16, ORD: 16}},
		{"markers", iwarp.Startup{Markers: true}, iwarp.ConnInfo{Revision: 2, CRC: true, PeerToPeer: true, SendMarkers: true, RecvMarkers: true, IRD: 16, ORD: 16}},
		{"no CRC", iwarp.Startup{NoCRC: true}, iwarp.ConnInfo{Revision: 2, PeerToPeer: true, IRD: 16, ORD: 16}},
		{"revision 1", iwarp.Startup{Revision: 1}, iwarp.ConnInfo{Revision: 1, CRC: true, IRD: 16, ORD: 16}},
		{"no p2p", iwarp.Startup{NoPeerToPeer: true, IRD: 3, ORD: 2}, iwarp.ConnInfo{Revision: 2, CRC: true, IRD: 3, ORD: 2}},
		{"RTR by Send", iwarp.Startup{RTR: iwarp.RTRSend}, iwarp.ConnInfo{Revision: 2, CRC: true, PeerToPeer: true, IRD: 16, ORD: 16}},
		{"RTR by Read", iwarp.Startup{RTR: iwarp.RTRRead}, iwarp.ConnInfo{Revision: 2, CRC: true, PeerToPeer: true, IRD: 16, ORD: 16}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: tt.s})
			defer ca.Close()
			defer cb.Close()
			got := *ca.Info()
			got.Local, got.Remote, got.PrivateData, got.Worker = tt.want.Local, tt.want.Remote, nil, 0
			tt.want.Initiator = true
			tt.want.PeerIRD, tt.want.PeerORD = tt.want.IRD, tt.want.ORD // both sides ask for the same depths
			if tt.want.Revision == 1 {
				tt.want.PeerIRD, tt.want.PeerORD = -1, -1
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
			buf := make([]byte, 5000)
			if err := ca.Send(ctx, buf); err != nil {
				t.Fatal(err)
			}
			if n, err := cb.Recv(ctx, buf); err != nil || n != 5000 {
				t.Fatal(n, err)
			}
			if err := cb.Send(ctx, buf[:7]); err != nil {
				t.Fatal(err)
			}
			if n, err := ca.Recv(ctx, buf); err != nil || n != 7 {
				t.Fatal(n, err)
			}
		})
	}
}

func TestIPv6(t *testing.T) {
	a, b, ctx := wire(t, embed.PairConfig{})
	l := listen(t, ctx, b, "[fd99::2]:7174", nil)
	go func() {
		c, err := l.Accept(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		_ = c.Send(ctx, []byte("six"))
	}()
	c, err := a.Device().Dial(ctx, "[fd99::2]:7174", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, 8)
	if n, err := c.Recv(ctx, buf); err != nil || string(buf[:n]) != "six" {
		t.Fatal(n, err)
	}
}

func TestDialFails(t *testing.T) {
	a, b, ctx := wire(t, embed.PairConfig{})
	if _, err := a.Device().Dial(ctx, "10.99.0.2:1", nil); !errors.Is(err, iwarp.ErrRefused) || !strings.Contains(err.Error(), "10.99.0.2:1") {
		t.Errorf("nobody listens: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	lost, _, _ := wire(t, embed.PairConfig{Pipe: link.PipeConfig{Filter: func(bool, []byte) bool { return false }}})
	if _, err := lost.Device().Dial(short, "10.99.0.2:1", nil); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, iwarp.ErrTimeout) {
		t.Errorf("nobody there: %v", err)
	}
	if _, err := lost.Device().Dial(ctx, "10.99.0.2:1", &iwarp.Config{Timeout: 50 * time.Millisecond}); !errors.Is(err, iwarp.ErrTimeout) {
		t.Errorf("nobody there: %v", err)
	}
	idle(t, lost)
	if _, err := a.Device().Dial(ctx, "10.99.0.2", nil); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("no port: %v", err)
	}
	if _, err := a.Device().Dial(ctx, "10.99.0.2:1", &iwarp.Config{LocalAddr: netip.MustParseAddrPort("10.1.1.1:0")}); !errors.Is(err, iwarp.ErrAddress) {
		t.Errorf("foreign local address: %v", err)
	}
	l := listen(t, ctx, b, ":7174", nil)
	if _, err := b.Device().Listen(ctx, "10.99.0.2:7174", nil); !errors.Is(err, iwarp.ErrPortInUse) {
		t.Errorf("second listener: %v", err)
	}
	if _, err := l.Accept(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("accept: %v", err)
	}
	l.Close()
	if _, err := l.Accept(ctx); !errors.Is(err, iwarp.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
	idle(t, a)
	idle(t, b)
}

// TestListenAgain checks that a port is free again as soon as its listener is closed.
func TestListenAgain(t *testing.T) {
	_, b, ctx := pair(t, embed.PairConfig{})
	at := netip.AddrPortFrom(b.Addr(), 0)
	for range 100 {
		l := listen(t, ctx, b, at.String(), nil)
		at = l.Addr()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCancel checks that a canceled context ends a wait and leaves the connection usable.
func TestCancel(t *testing.T) {
	forms(t, func(t *testing.T, inline bool) {
		a, b, ctx := pair(t, embed.PairConfig{InlineProgress: inline})
		ca, cb := connect(t, ctx, a, b, nil)
		for range 3 {
			short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
			if _, err := cb.Recv(short, nil); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			cancel()
		}
		mr := alloc(t, ctx, cb, 1<<16, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
		buf := make([]byte, 1<<16)
		for i := range 200 { // more than there are operations and chunks, to find leaks
			short, cancel := context.WithTimeout(ctx, time.Duration(i)*time.Microsecond)
			_ = ca.Read(short, mr.Remote(), buf)
			_ = ca.Write(short, mr.Remote(), buf[:i])
			cancel()
		}
		if err := ca.Read(ctx, mr.Remote(), buf); err != nil {
			t.Fatal(err)
		}
	})
}

// TestMany opens many connections at once, each with traffic in both directions, from a listener that accepts
// concurrently.
func TestMany(t *testing.T) {
	const conns, rounds = 40, 50
	a, b, ctx := pair(t, embed.PairConfig{})
	cfg := &iwarp.Config{RecvDepth: 4, SendDepth: 4, RecvSize: 2048}
	l := listen(t, ctx, b, ":7", cfg)
	var wg sync.WaitGroup
	for i := range conns {
		wg.Add(2)
		go func() {
			defer wg.Done()
			c, err := l.Accept(ctx)
			if err != nil {
				t.Error("accept:", err)
				return
			}
			defer c.Close()
			buf := make([]byte, 2048)
			for {
				n, err := c.Recv(ctx, buf)
				if err == io.EOF {
					return
				}
				if err == nil {
					err = c.Send(ctx, buf[:n])
				}
				if err != nil {
					t.Error("echo:", err)
					return
				}
			}
		}()
		go func() {
			defer wg.Done()
			c, err := a.Device().Dial(ctx, dialAddr(b, l), cfg)
			if err != nil {
				t.Error("dial:", err)
				return
			}
			defer c.Close()
			buf, msg := make([]byte, 2048), make([]byte, 2048)
			for r := range rounds {
				n := (i*131 + r*17) % 2048
				msg[0] = byte(i)
				if err := c.Send(ctx, msg[:n]); err != nil {
					t.Error("send:", err)
					return
				}
				if got, err := c.Recv(ctx, buf); err != nil || got != n || n > 0 && buf[0] != byte(i) {
					t.Errorf("recv: %d bytes of %d, %v", got, n, err)
					return
				}
			}
		}()
	}
	wg.Wait()
	l.Close()
	idle(t, a)
	idle(t, b)
}

// TestCloseTimeout checks that Close says that the peer has not taken all.
func TestCloseTimeout(t *testing.T) {
	na, nb, ctx := wire(t, embed.PairConfig{})
	b := newEnd(t, ctx, nb, 16)
	qp := newQP(t, ctx, nb, iwarp.QPConfig{PD: b.pd, SendCQ: b.cq, RecvCQ: b.cq, SendDepth: 1, RecvDepth: 1, ReceiveWait: time.Minute})
	l := listen(t, ctx, nb, ":0", nil)
	accepted := accepting(ctx, l, qp)
	c, err := na.Device().Dial(ctx, dialAddr(nb, l), nil)
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	big := make([]byte, 8<<20) // more than what waits there for a receive, and the window
	if err := c.PostSend(ctx, big); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); !errors.Is(err, iwarp.ErrTimeout) {
		t.Errorf("%v", err)
	}
}
