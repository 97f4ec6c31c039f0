package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	gtcp "gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/tcp/peertest"
)

// seed is printed by every test and can be set by TEST_SEED.
func seed(t *testing.T) uint64 {
	n := uint64(1)
	if v := os.Getenv("TEST_SEED"); v != "" {
		var err error
		if n, err = strconv.ParseUint(v, 0, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TEST_SEED=%d", n)
	return n
}

// scenario is one connection between package tcp and netstack.
type scenario struct {
	name         string
	passive      bool // netstack dials
	v6           bool
	send, recv   int // octets that we send, and that netstack sends
	loss         float64
	reorder, dup float64
	weClose      bool // we close when we have sent, else when the peer has closed
	gClose       bool // netstack closes when it has sent, else when we have closed
	noSACK       bool // of netstack
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

func newStack(t *testing.T, sc *scenario) (*stack.Stack, *channel.Endpoint) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{gtcp.NewProtocol},
	})
	ch := channel.New(4096, uint32(sc.mtu), "")
	if err := s.CreateNIC(1, ch); err != nil {
		t.Fatal(err)
	}
	_, theirs := addrs(sc.v6)
	proto, subnet := ipv4.ProtocolNumber, header.IPv4EmptySubnet
	if sc.v6 {
		proto, subnet = ipv6.ProtocolNumber, header.IPv6EmptySubnet
	}
	addr := tcpip.ProtocolAddress{Protocol: proto, AddressWithPrefix: theirs.WithPrefix()}
	if err := s.AddProtocolAddress(1, addr, stack.AddressProperties{}); err != nil {
		t.Fatal(err)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: subnet, NIC: 1}})
	sack := tcpip.TCPSACKEnabled(!sc.noSACK)
	if err := s.SetTransportProtocolOption(gtcp.ProtocolNumber, &sack); err != nil {
		t.Fatal(err)
	}
	wait := tcpip.TCPTimeWaitTimeoutOption(10 * time.Millisecond)
	if err := s.SetTransportProtocolOption(gtcp.ProtocolNumber, &wait); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ch.Close(); s.Destroy() })
	return s, ch
}

// wire is netstack's link.
type wire struct {
	ch    *channel.Endpoint
	proto tcpip.NetworkProtocolNumber
}

func (w *wire) Send(b []byte) {
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	w.ch.InjectInbound(w.proto, p)
	p.DecRef()
}

func (w *wire) Recv(d time.Duration) []byte {
	p := w.ch.Read()
	if p == nil && d > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), d)
		p = w.ch.ReadContext(ctx)
		cancel()
	}
	if p == nil {
		return nil
	}
	v := p.ToView()
	b := append([]byte(nil), v.AsSlice()...)
	v.Release()
	p.DecRef()
	return b
}

// app is netstack's application.
func app(conn net.Conn, sc *scenario) error {
	errs := make(chan error, 2)
	tc := conn.(*gonet.TCPConn)
	gotAll := make(chan struct{})
	go func() {
		b := make([]byte, 64<<10)
		got := 0
		for {
			n, err := tc.Read(b)
			for i, v := range b[:n] {
				if v != peertest.Octet(got+i) {
					errs <- fmt.Errorf("octet %d from us is wrong", got+i)
					return
				}
			}
			got += n
			if errors.Is(err, io.EOF) {
				close(gotAll)
				if got != sc.send {
					err = fmt.Errorf("netstack got %d octets of %d", got, sc.send)
				} else {
					err = nil
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
		b := make([]byte, sc.recv)
		for i := range b {
			b[i] = peertest.Octet(i)
		}
		if _, err := tc.Write(b); err != nil {
			errs <- err
			return
		}
		if !sc.gClose {
			select {
			case <-gotAll:
			case <-time.After(time.Minute):
				errs <- errors.New("netstack waits in vain for our FIN")
				return
			}
		}
		errs <- tc.CloseWrite()
	}()
	for range 2 {
		if err := <-errs; err != nil {
			return err
		}
	}
	return conn.Close()
}

func run(t *testing.T, sc *scenario, seed uint64) {
	if sc.mtu == 0 {
		sc.mtu = 1500
	}
	s, ch := newStack(t, sc)
	cfg := tcp.DefaultConfig()
	cfg.TimeWait = 20 * time.Millisecond
	cfg.MaxRTO = 2 * time.Second
	if sc.conf != nil {
		sc.conf(&cfg)
	}
	ours, theirs := addrs(sc.v6)
	w := &wire{ch, ipv4.ProtocolNumber}
	if sc.v6 {
		w.proto = ipv6.ProtocolNumber
	}
	as16 := func(a tcpip.Address) [16]byte {
		ip, _ := netip.AddrFromSlice(a.AsSlice())
		return ip.As16()
	}
	out := impair.Config{Loss: sc.loss, Reorder: sc.reorder, Duplicate: sc.dup, Seed: 2 * seed}
	in := out
	in.Seed++
	e := &peertest.End{T: t, Wire: w, Config: cfg, MTU: sc.mtu, Passive: sc.passive, Send: sc.send, Recv: sc.recv, CloseFirst: sc.weClose, Out: out, In: in,
		Flow: pkt.Flow{Local: as16(ours), Remote: as16(theirs), LocalPort: ourPort, RemotePort: theirPort}}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Second)
	defer cancel()
	done := make(chan error, 1)
	if sc.passive {
		go func() {
			c, err := gonet.DialTCPWithBind(ctx, s, tcpip.FullAddress{NIC: 1, Addr: theirs, Port: theirPort},
				tcpip.FullAddress{NIC: 1, Addr: ours, Port: ourPort}, w.proto)
			if err != nil {
				done <- err
				return
			}
			done <- app(c, sc)
		}()
	} else {
		l, err := gonet.ListenTCP(s, tcpip.FullAddress{NIC: 1, Addr: theirs, Port: theirPort}, w.proto)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			c, err := l.Accept()
			if err != nil {
				done <- err
				return
			}
			done <- app(c, sc)
		}()
	}
	st := e.Run(ctx, done)
	t.Logf("retransmits %d (fast %d RTO %d TLP %d) undos %d D-SACK in %d out %d", st.Retransmits, st.RetransFast, st.RetransRTO, st.RetransTLP, st.Undos, st.DSACKIn, st.DSACKOut)
}

// TestNetstack moves octets to and from netstack in both roles, over good and bad
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
		{name: "both close at once, no octets", weClose: true, gClose: true},
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
			run(t, &sc, seed(t))
		})
	}
}
