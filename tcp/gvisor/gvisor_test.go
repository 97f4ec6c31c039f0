package gvisor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	gtcp "gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// octet is the octet at a position of every stream.
func octet(pos int) byte { return byte(pos ^ pos>>8*7 ^ pos>>16*13) }

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

// end is our end of the wire: what a worker of the data plane does, for one
// connection.
type end struct {
	t       *testing.T
	sc      *scenario
	rng     *rand.Rand
	ch      *channel.Endpoint
	c       *tcp.Conn
	l       *tcp.Listener
	flow    pkt.Flow
	records map[tcp.Buf][]byte
	held    map[tcp.Buf][]byte
	next    tcp.Buf
	pushed  int
	got     int
	closed  bool
	eof     bool
	late    []byte // a packet that is overtaken
	lateIn  []byte
}

// chance draws the fate of one packet.
func (e *end) chance(p float64) bool { return e.rng.Float64() < p }

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

// transmit puts a segment on the wire towards netstack.
func (e *end) transmit(h *tcp.Header, payload []byte) {
	ours, theirs := addrs(e.sc.v6)
	ip := header.IPv4MinimumSize
	if e.sc.v6 {
		ip = header.IPv6MinimumSize
	}
	n := h.Len()
	b := make([]byte, ip+n+len(payload))
	if e.sc.v6 {
		header.IPv6(b).Encode(&header.IPv6Fields{PayloadLength: uint16(n + len(payload)), TransportProtocol: gtcp.ProtocolNumber,
			HopLimit: 64, SrcAddr: ours, DstAddr: theirs})
	} else {
		p := header.IPv4(b)
		p.Encode(&header.IPv4Fields{TotalLength: uint16(len(b)), TTL: 64, Protocol: uint8(gtcp.ProtocolNumber), SrcAddr: ours, DstAddr: theirs,
			Flags: header.IPv4FlagDontFragment})
		p.SetChecksum(^p.CalculateChecksum())
	}
	h.Put(b[ip:])
	copy(b[ip+n:], payload)
	sum := header.PseudoHeaderChecksum(gtcp.ProtocolNumber, ours, theirs, uint16(n+len(payload)))
	binary.BigEndian.PutUint16(b[ip+16:], ^checksum.Checksum(b[ip:], sum))

	if e.chance(e.sc.loss) {
		return
	}
	if e.late == nil && e.chance(e.sc.reorder) {
		e.late = b
		return
	}
	e.inject(b)
	if e.chance(e.sc.dup) {
		e.inject(b)
	}
	if e.late != nil {
		b, e.late = e.late, nil
		e.inject(b)
	}
}

func (e *end) inject(b []byte) {
	proto := header.IPv4ProtocolNumber
	if e.sc.v6 {
		proto = header.IPv6ProtocolNumber
	}
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	e.ch.InjectInbound(proto, p)
	p.DecRef()
}

// receive takes a packet of netstack's.
func (e *end) receive(now clock.Time, p *stack.PacketBuffer) {
	v := p.ToView()
	b := append([]byte(nil), v.AsSlice()...)
	v.Release()
	p.DecRef()
	if e.chance(e.sc.loss) {
		return
	}
	if e.lateIn == nil && e.chance(e.sc.reorder) {
		e.lateIn = b
		return
	}
	e.handle(now, b)
	if e.chance(e.sc.dup) {
		e.handle(now, b)
	}
	if e.lateIn != nil {
		b, e.lateIn = e.lateIn, nil
		e.handle(now, b)
	}
}

func (e *end) handle(now clock.Time, b []byte) {
	var l4 []byte
	if e.sc.v6 {
		p := header.IPv6(b)
		if p.NextHeader() != uint8(gtcp.ProtocolNumber) {
			return
		}
		l4 = p.Payload()
	} else {
		p := header.IPv4(b)
		if p.TransportProtocol() != gtcp.ProtocolNumber {
			return
		}
		l4 = p.Payload()
	}
	var s tcp.Segment
	n, err := s.Decode(l4)
	if err != nil {
		e.t.Fatalf("netstack's segment: %v", err)
	}
	// What Put makes of it is what netstack wrote, but for padding.
	s.Len = len(l4) - n
	e.next++
	s.Buf = e.next
	if e.c == nil {
		if e.l == nil {
			return
		}
		c, reply, ok := e.l.HandleSegment(now, e.flow, &s)
		if ok {
			e.transmit(&reply, nil)
		}
		e.c = c
		if c == nil || c.State() == tcp.SynReceived {
			return
		}
	}
	if e.c.State() == tcp.Closed {
		if r, ok := tcp.Reset(&s.Header, s.Len); ok {
			e.transmit(&r, nil)
		}
		return
	}
	in := e.c.HandleSegment(now, &s)
	payload := l4[n:]
	switch in.Action {
	case tcp.Deliver:
		e.deliver(payload[in.Off : in.Off+in.Len])
	case tcp.Hold:
		e.held[s.Buf] = payload
	}
	var h tcp.Held
	for e.c.PollHeld(&h) {
		b := e.held[h.Buf]
		delete(e.held, h.Buf)
		if h.Deliver {
			e.deliver(b[h.Off : h.Off+h.Len])
		}
	}
}

func (e *end) deliver(b []byte) {
	for i, v := range b {
		if v != octet(e.got+i) {
			e.t.Fatalf("octet %d from netstack is wrong", e.got+i)
		}
	}
	e.got += len(b)
}

// turn lets the application act, and sends what is due.
func (e *end) turn(now clock.Time) {
	c := e.c
	if d := c.Deadline(); d.Due(now) {
		c.HandleTimeout(now)
	}
	for e.pushed < e.sc.send {
		n := min(c.MSS(), e.sc.send-e.pushed)
		if e.rng.IntN(4) == 0 {
			n = 1 + e.rng.IntN(n)
		}
		if c.Room() < n {
			break
		}
		b := make([]byte, n)
		for i := range b {
			b[i] = octet(e.pushed + i)
		}
		e.next++
		e.records[e.next] = b
		c.Push(e.next, n)
		e.pushed += n
	}
	if st := c.State(); !e.closed && e.pushed == e.sc.send && (e.sc.weClose && st >= tcp.Established || e.eof) {
		e.closed = true
		c.Close(now)
	}
	var o tcp.Out
	for c.PollTransmit(now, &o) {
		var p []byte
		if o.Buf != tcp.NoBuf {
			p = e.records[o.Buf][o.Off : o.Off+o.Len]
		}
		e.transmit(&o.Header, p)
	}
	for {
		b, ok := c.PollReleased()
		if !ok {
			break
		}
		delete(e.records, b)
	}
	for {
		ev, ok := c.PollEvent()
		if !ok {
			break
		}
		if ev == tcp.EventPeerClosed {
			e.eof = true
		}
	}
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
				if v != octet(got+i) {
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
			b[i] = octet(i)
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
	e := &end{t: t, sc: sc, ch: ch, rng: rand.New(rand.NewPCG(seed, 3)), records: map[tcp.Buf][]byte{}, held: map[tcp.Buf][]byte{}}
	e.flow = pkt.Flow{LocalPort: ourPort, RemotePort: theirPort}
	as16 := func(a tcpip.Address) (b [16]byte) {
		if a.Len() == 16 {
			return a.As16()
		}
		b[10], b[11] = 0xff, 0xff
		v := a.As4()
		copy(b[12:], v[:])
		return b
	}
	e.flow.Local, e.flow.Remote = as16(ours), as16(theirs)
	proto := ipv4.ProtocolNumber
	if sc.v6 {
		proto = ipv6.ProtocolNumber
	}
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Second)
	defer cancel()
	secret := [16]byte{9}
	if sc.passive {
		e.l = tcp.NewListener(&cfg, 4, secret, sc.mtu)
		go func() {
			c, err := gonet.DialTCPWithBind(ctx, s, tcpip.FullAddress{NIC: 1, Addr: theirs, Port: theirPort},
				tcpip.FullAddress{NIC: 1, Addr: ours, Port: ourPort}, proto)
			if err != nil {
				done <- err
				return
			}
			done <- app(c, sc)
		}()
	} else {
		l, err := gonet.ListenTCP(s, tcpip.FullAddress{NIC: 1, Addr: theirs, Port: theirPort}, proto)
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
		e.c = tcp.Dial(clock.Now(), &cfg, e.flow, tcp.ISS(secret, e.flow, clock.Now()), sc.mtu)
	}
	e.loop(ctx, done)
	if err := e.c.Err(); err != nil {
		t.Errorf("our end: %v", err)
	}
	if e.got != sc.recv {
		t.Errorf("got %d octets of %d", e.got, sc.recv)
	}
	if len(e.records) != 0 || len(e.held) != 0 {
		t.Errorf("%d records and %d frames not given back", len(e.records), len(e.held))
	}
	st := e.c.Stats()
	t.Logf("retransmits %d (fast %d RTO %d TLP %d) undos %d D-SACK in %d out %d", st.Retransmits, st.RetransFast, st.RetransRTO, st.RetransTLP, st.Undos, st.DSACKIn, st.DSACKOut)
}

// loop drives our end until both are done.
func (e *end) loop(ctx context.Context, done chan error) {
	theirsDone := false
	for {
		wait := 50 * time.Millisecond
		if e.c != nil {
			if d := e.c.Deadline(); d != 0 {
				wait = min(wait, max(d.Sub(clock.Now()), 0))
			}
		}
		rctx, cancel := context.WithTimeout(ctx, wait)
		p := e.ch.ReadContext(rctx)
		cancel()
		for p != nil {
			e.receive(clock.Now(), p)
			p = e.ch.Read()
		}
		if e.c != nil {
			e.turn(clock.Now())
		}
		select {
		case err := <-done:
			if err != nil {
				e.t.Fatalf("netstack: %v (our state %v, err %v, got %d, pushed %d)", err, e.c.State(), e.c.Err(), e.got, e.pushed)
			}
			theirsDone = true
		default:
		}
		if theirsDone && e.c != nil && e.c.State() == tcp.Closed {
			return
		}
		if ctx.Err() != nil {
			e.t.Fatalf("out of time: state %v got %d pushed %d, netstack done %v, %+v", e.c.State(), e.got, e.pushed, theirsDone, e.c.Stats())
		}
	}
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
