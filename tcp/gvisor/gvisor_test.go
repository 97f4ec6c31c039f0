package gvisor

import (
	"flag"
	"math/rand"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	gtcp "gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/tcp/peertest"
)

var seeds = flag.Int("gvisor.seeds", 1, "seeds of each scenario over a bad wire")

// scenario is one connection between package tcp and netstack.
type scenario struct {
	name         string
	passive      bool // netstack dials
	v6           bool
	send, recv   int // bytes that we send, and that netstack sends
	loss         float64
	reorder, dup float64
	weClose      bool // we close when we have sent, else when the peer has closed
	gClose       bool // netstack closes when it has sent, else when we have closed
	noSACK       bool // of netstack
	noRACK       bool // of netstack: RFC 6675 and time-outs only
	conf         func(*tcp.Config)
	mtu          int
}

func addrs(v6 bool) (ours, theirs tcpip.Address) {
	if v6 {
		return tcpip.AddrFrom16([16]byte{0: 0xfd, 15: 1}), tcpip.AddrFrom16([16]byte{0: 0xfd, 15: 2})
	}
	return tcpip.AddrFrom4([4]byte{10, 0, 0, 1}), tcpip.AddrFrom4([4]byte{10, 0, 0, 2})
}

const ourPort, theirPort = 7174, 20000

// began is when every run begins, by the virtual clock.
const began = clock.Time(time.Hour)

func newNetstack(t *testing.T, sc *scenario, seed uint64) *netstack {
	n := &netstack{virtualClock: &virtualClock{now: began}, sc: sc, done: make(chan error, 1), proto: ipv4.ProtocolNumber}
	random := &locked{r: rand.New(rand.NewSource(int64(seed)))}
	n.s = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{gtcp.NewProtocolProbe(n.flight.probe)},
		Clock:              n.virtualClock,
		RandSource:         random,
		SecureRNG:          random,
	})
	n.ch = channel.New(4096, uint32(sc.mtu), "")
	if err := n.s.CreateNIC(1, n.ch); err != nil {
		t.Fatal(err)
	}
	_, theirs := addrs(sc.v6)
	subnet := header.IPv4EmptySubnet
	if sc.v6 {
		n.proto, subnet = ipv6.ProtocolNumber, header.IPv6EmptySubnet
	}
	addr := tcpip.ProtocolAddress{Protocol: n.proto, AddressWithPrefix: theirs.WithPrefix()}
	if err := n.s.AddProtocolAddress(1, addr, stack.AddressProperties{}); err != nil {
		t.Fatal(err)
	}
	n.s.SetRouteTable([]tcpip.Route{{Destination: subnet, NIC: 1}})
	sack := tcpip.TCPSACKEnabled(!sc.noSACK)
	if err := n.s.SetTransportProtocolOption(gtcp.ProtocolNumber, &sack); err != nil {
		t.Fatal(err)
	}
	if sc.noRACK {
		recovery := tcpip.TCPRecovery(0)
		if err := n.s.SetTransportProtocolOption(gtcp.ProtocolNumber, &recovery); err != nil {
			t.Fatal(err)
		}
	}
	wait := tcpip.TCPTimeWaitTimeoutOption(10 * time.Millisecond)
	if err := n.s.SetTransportProtocolOption(gtcp.ProtocolNumber, &wait); err != nil {
		t.Fatal(err)
	}
	n.s.Pause()
	n.input = true
	t.Cleanup(func() { n.s.Resume(); n.ch.Close(); n.s.Destroy() })
	return n
}

// limit is how long a connection may take, by the virtual clock, of which time-outs
// take nearly all.
const limit = 5 * time.Minute

func run(t *testing.T, sc *scenario, seed uint64) {
	if sc.mtu == 0 {
		sc.mtu = 1500
	}
	n := newNetstack(t, sc, seed)
	cfg := tcp.DefaultConfig()
	cfg.TimeWait = 20 * time.Millisecond
	if sc.conf != nil {
		sc.conf(&cfg)
	}
	ours, theirs := addrs(sc.v6)
	as16 := func(a tcpip.Address) [16]byte {
		ip, _ := netip.AddrFromSlice(a.AsSlice())
		return ip.As16()
	}
	out := impair.Config{Loss: sc.loss, Reorder: sc.reorder, Duplicate: sc.dup, Delay: 100 * time.Microsecond, Seed: 2 * seed}
	in := out
	in.Seed++
	e := &peertest.End{T: t, Wire: n, Config: cfg, MTU: sc.mtu, Passive: sc.passive, Send: sc.send, Recv: sc.recv, CloseFirst: sc.weClose, Out: out, In: in,
		Rate: 125_000_000, Queue: 4 << 20, Now: n.at, Peer: n.String,
		Flow: pkt.Flow{Local: as16(ours), Remote: as16(theirs), LocalPort: ourPort, RemotePort: theirPort}}
	var wq waiter.Queue
	ep, err := n.s.NewEndpoint(gtcp.ProtocolNumber, n.proto, &wq)
	if err != nil {
		t.Fatal(err)
	}
	if err := ep.Bind(tcpip.FullAddress{NIC: 1, Addr: theirs, Port: theirPort}); err != nil {
		t.Fatal(err)
	}
	if sc.passive {
		n.ep = ep
		if _, started := ep.Connect(tcpip.FullAddress{NIC: 1, Addr: ours, Port: ourPort}).(*tcpip.ErrConnectStarted); !started {
			t.Fatal("netstack does not connect")
		}
	} else {
		n.listener = ep
		if err := ep.Listen(8); err != nil {
			t.Fatal(err)
		}
	}
	st := e.Run(limit, n.done)
	t.Logf("%v: retransmits %d (fast %d RTO %d TLP %d) undos %d D-SACK in %d out %d; %v", n.at().Sub(began), st.Retransmits, st.RetransFast, st.RetransRTO, st.RetransTLP, st.Undos, st.DSACKIn, st.DSACKOut, n)
}

// TestNetstack moves bytes to and from netstack in both roles, over good and bad
// wires, and closes in every order.
func TestNetstack(t *testing.T) {
	const bulk = 4 << 20
	for _, sc := range []scenario{
		{name: "active, bulk to netstack", send: bulk, weClose: true},
		{name: "active, bulk from netstack", recv: bulk, gClose: true},
		{name: "active, both ways", send: bulk, recv: bulk, weClose: true, gClose: true},
		{name: "passive, bulk to netstack", passive: true, send: bulk, weClose: true},
		{name: "passive, bulk from netstack", passive: true, recv: bulk, gClose: true},
		{name: "passive, both ways", passive: true, send: bulk, recv: bulk, weClose: true, gClose: true},
		{name: "we close first", send: 1000, recv: 1000, weClose: true},
		{name: "netstack closes first", send: 1000, recv: 1000, gClose: true},
		{name: "both close at once, no bytes", weClose: true, gClose: true},
		{name: "passive, we close first", passive: true, send: 1000, recv: 1000, weClose: true},
		{name: "passive, netstack closes first", passive: true, send: 1000, recv: 1000, gClose: true},
		{name: "passive, both at once", passive: true, weClose: true, gClose: true},
		{name: "IPv6, both ways", v6: true, send: bulk, recv: bulk, weClose: true, gClose: true},
		{name: "IPv6, passive", v6: true, passive: true, send: 100_000, recv: 100_000, weClose: true},
		{name: "jumbo", mtu: 9000, send: bulk, recv: bulk, weClose: true, gClose: true},
		{name: "MTU 1280", mtu: 1280, send: 500_000, recv: 500_000, weClose: true, gClose: true},
		{name: "no SACK", noSACK: true, send: bulk, recv: bulk, weClose: true, gClose: true},
		{name: "no timestamps, no window scale", send: bulk, recv: bulk, weClose: true, gClose: true,
			conf: func(c *tcp.Config) { c.NoTimestamps, c.NoWindowScale = true, true }},
		{name: "small window", send: 100_000, recv: 300_000, weClose: true, gClose: true, conf: func(c *tcp.Config) { c.RcvWindow = 5000 }},
		{name: "NewReno", send: bulk, weClose: true, conf: func(c *tcp.Config) { c.CongestionControl = tcp.NewReno }},
		{name: "loss 1 %, to netstack", send: 1 << 20, loss: 0.01, weClose: true},
		{name: "loss 1 %, from netstack", recv: 1 << 20, loss: 0.01, gClose: true},
		{name: "loss 5 %, both ways", send: 200_000, recv: 200_000, loss: 0.05, weClose: true, gClose: true},
		{name: "loss 5 %, passive", passive: true, send: 100_000, recv: 100_000, loss: 0.05, weClose: true},
		{name: "loss 2 %, no SACK", noSACK: true, send: 200_000, recv: 200_000, loss: 0.02, weClose: true, gClose: true},
		{name: "reordering and duplication", send: 1 << 20, recv: 1 << 20, reorder: 0.05, dup: 0.05, weClose: true, gClose: true},
		{name: "everything, IPv6", v6: true, send: 300_000, recv: 300_000, loss: 0.02, reorder: 0.02, dup: 0.02, weClose: true, gClose: true},
	} {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			first := testenv.Seed(t)
			run(t, &sc, first)
			if sc.loss+sc.reorder+sc.dup == 0 {
				return
			}
			// Netstack may miscount what is outstanding after a recovery by RACK, and
			// then arms no timer behind a lost tail probe (sender.postXmit): in one run
			// of some hundred at a loss of 5 % it never sends its last segment again.
			sc.noRACK = true
			for i := 1; i < *seeds; i++ {
				t.Run(strconv.FormatUint(first+uint64(i), 10), func(t *testing.T) { run(t, &sc, first+uint64(i)) })
			}
		})
	}
}
