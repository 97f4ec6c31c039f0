package adversary

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

const (
	regionSize = 4096

	// Receives are of slot bytes each, slotStride apart.
	slots      = 4
	slot       = 64
	slotStride = 256
)

var (
	nodeAddr = netip.MustParseAddr("10.99.0.1")
	peerAddr = netip.MustParseAddr("10.99.0.66")
	nodeMAC  = [6]byte{2, 0, 0, 0, 0x99, 1}
)

// A world is one daemon, with clients and their memory, and the raw peer at the other end of the wire.
type world struct {
	ctx  context.Context
	node *embed.Node
	host *peer.Host

	dev     *iwarp.Device // the application under attack
	pd, pd2 *iwarp.PD
	other   *iwarp.Device // a bystander

	regions map[string]*iwarp.MR
	gone    uint32    // STag of a deregistered region
	loose   *iwarp.MW // an unbound window
	listens [numListeners]*iwarp.Listener
	good    *good
}

const allAccess = iwarp.AccessLocalWrite | iwarp.AccessRemoteRead | iwarp.AccessRemoteWrite | iwarp.AccessRemoteAtomic | iwarp.AccessMWBind

func newWorld(t testing.TB) *world {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	cfg, b := wire(t)
	cfg.Addrs = []netip.Addr{nodeAddr}
	cfg.Ctrl = ctrl.Config{Startup: ctrl.StartupDefaults{CRC: ctrl.CRCOptional}}
	w := &world{regions: make(map[string]*iwarp.MR)}
	var err error
	w.node, err = embed.Open(cfg)
	must(err)
	var cancel context.CancelFunc
	w.ctx, cancel = context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(func() {
		cancel()
		must(w.node.Close())
		must(b.Close())
	})
	w.host = peer.New(b, peerAddr, nodeMAC)
	w.dev = w.node.Device()
	w.other, err = w.node.NewDevice(w.ctx)
	must(err)
	w.pd, err = w.dev.AllocPD(w.ctx)
	must(err)
	w.pd2, err = w.dev.AllocPD(w.ctx)
	must(err)
	pdx, err := w.other.AllocPD(w.ctx)
	must(err)

	add := func(name string, pd *iwarp.PD, base uint64, a iwarp.Access) {
		t.Helper()
		mr, err := pd.AllocBase(w.ctx, regionSize, base, a)
		must(err)
		for i := range mr.Bytes() {
			mr.Bytes()[i] = byte(i*7 + len(w.regions)*31)
		}
		w.regions[name] = mr
	}
	add("all", w.pd, 0x10000, allAccess)
	add("readable", w.pd, 0x20000, iwarp.AccessRemoteRead)
	add("writable", w.pd, 0x30000, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	add("local", w.pd, 0x40000, iwarp.AccessLocalWrite)
	add("atomic", w.pd, 0x50000, iwarp.AccessLocalWrite|iwarp.AccessRemoteAtomic)
	add("top", w.pd, 1<<64-regionSize, allAccess)
	add("recv", w.pd, 0x60000, iwarp.AccessLocalWrite)
	add("sink", w.pd, 0x70000, iwarp.AccessLocalWrite)
	add("pd2", w.pd2, 0x80000, allAccess)
	add("foreign", pdx, 0x90000, allAccess)
	mr, err := w.pd.AllocBase(w.ctx, regionSize, 0xa0000, allAccess)
	must(err)
	w.gone = mr.RKey()
	must(mr.Close())
	w.loose, err = w.pd.AllocMW(w.ctx)
	must(err)

	listen := func(s iwarp.Startup) *iwarp.Listener {
		l, err := w.dev.Listen(w.ctx, ":0", &iwarp.Config{Startup: s})
		must(err)
		return l
	}
	w.listens[onPlain] = listen(iwarp.Startup{})
	w.listens[onMarked] = listen(iwarp.Startup{Markers: true})
	w.listens[onNoCRC] = listen(iwarp.Startup{NoCRC: true})
	w.good = newGood(t, w, pdx)
	return w
}

// wire makes a wire. It returns the node's end, as a configuration, and the raw peer's. With
// TRANSPORT=socket the node's end is the kernel's TCP on a veth, otherwise a link in the process.
func wire(t testing.TB) (embed.Config, link.Link) {
	t.Helper()
	if testenv.Sockets() {
		end, err := link.OpenPacket(station(t), link.PacketOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return embed.Config{Sockets: true}, end
	}
	a, b, err := link.NewPipe(link.PipeConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return embed.Config{Link: a, Resolver: &hostnet.Static{SrcMAC: nodeMAC, DstMAC: peer.MAC, MTU: a.MTU(), Addrs: []netip.Addr{nodeAddr}}}, b
}

// station makes a veth pair in the process's network namespace. One end has the node's addresses, and knows the raw
// peer as a neighbour; it returns the name of the other, which belongs to the raw peer alone.
func station(t testing.TB) string {
	t.Helper()
	testenv.RequireRoot(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	near, far := netlink.NewLinkAttrs(), "raw-peer"
	near.Name, near.HardwareAddr = "node", nodeMAC[:]
	pair := &netlink.Veth{LinkAttrs: near, PeerName: far, PeerHardwareAddr: peer.MAC[:]}
	must(netlink.LinkAdd(pair))
	t.Cleanup(func() { must(netlink.LinkDel(pair)) })
	l, err := netlink.LinkByName(near.Name)
	must(err)
	must(netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: nodeAddr.AsSlice(), Mask: net.CIDRMask(24, 32)}}))
	other, err := netlink.LinkByName(far)
	must(err)
	must(netlink.LinkSetUp(other))
	must(netlink.LinkSetUp(l))
	for _, name := range []string{near.Name, far} { // the kernel drops all frames until shortly after both are up
		testenv.Until(t, name+" is up", func() bool {
			l, err := netlink.LinkByName(name)
			must(err)
			return l.Attrs().OperState == netlink.OperUp
		})
	}
	must(netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: peerAddr.AsSlice(), HardwareAddr: peer.MAC[:], State: netlink.NUD_PERMANENT}))
	return far
}

func (w *world) snapshot() map[string][]byte {
	m := make(map[string][]byte)
	for name, mr := range w.regions {
		m[name] = bytes.Clone(mr.Bytes())
	}
	return m
}

// unchanged compares memory with a snapshot. Regions named in allowed may differ, and so may the posted slots of
// recv.
func (w *world) unchanged(t *testing.T, before map[string][]byte, allowed ...string) {
	t.Helper()
next:
	for name, mr := range w.regions {
		for _, a := range allowed {
			if a == name {
				continue next
			}
		}
		for i, v := range mr.Bytes() {
			if v == before[name][i] || name == "recv" && i < slots*slotStride && i%slotStride < slot {
				continue
			}
			t.Errorf("region %s changed at %#x", name, i)
			continue next
		}
	}
}

type listenerKind uint8

const (
	onPlain  listenerKind = iota
	onMarked              // asks for markers
	onNoCRC               // does not ask for CRCs
	numListeners
)

// options are the raw peer's settings for a connection.
type options struct {
	on      listenerKind
	rev1    bool
	noCRC   bool   // C is clear in our Request
	markers bool   // M is set in our Request: the node must send markers
	rtr     []byte // enhanced data other than the usual
	ird     int    // of the node
	recvs   int    // receives to post; 0: all slots; negative: none
}

// A conn is a connection under attack: the raw peer's end, and the
// application's queue pair at the other.
type conn struct {
	*world
	t        testing.TB
	s        *peer.Stream
	r        *peer.Reader
	qp       *iwarp.QP
	scq, rcq *iwarp.CQ
	posted   int  // receives
	sends    int  // posted work requests whose completions local has not taken
	marked   bool // we send markers
	at       int  // offset in our half of the connection
	reply    peer.Frame
	sent     []iwarp.WC
	got      []iwarp.WC
}

func (w *world) newQP(t testing.TB) (q *iwarp.QP, scq, rcq *iwarp.CQ) {
	t.Helper()
	var err error
	if scq, err = w.dev.CreateCQ(w.ctx, 64); err != nil {
		t.Fatal(err)
	}
	if rcq, err = w.dev.CreateCQ(w.ctx, 64); err != nil {
		t.Fatal(err)
	}
	q, err = w.dev.CreateQP(w.ctx, iwarp.QPConfig{PD: w.pd, SendCQ: scq, RecvCQ: rcq, SigAll: true})
	if err != nil {
		t.Fatal(err)
	}
	return q, scq, rcq
}

func (c *conn) postRecvs(n int) {
	c.t.Helper()
	recv := c.regions["recv"]
	for i := range n {
		if err := c.qp.PostRecv(&iwarp.RecvWR{ID: uint64(i), SGEs: []iwarp.SGE{recv.SGE(i*slotStride, slot)}}); err != nil {
			c.t.Fatal(err)
		}
	}
	c.posted = n
}

func (c *conn) destroy() {
	for _, f := range []func() error{c.qp.Close, c.scq.Close, c.rcq.Close} {
		if err := f(); err != nil {
			c.t.Error(err)
		}
	}
	c.s.Forget()
}

func addrOf(l *iwarp.Listener) netip.AddrPort { return netip.AddrPortFrom(nodeAddr, l.Addr().Port()) }

// request returns the frame that a well-behaved initiator sends.
func (o *options) request() peer.Frame {
	f := peer.Frame{Key: peer.KeyRequest, Flags: peer.FlagCRC, Rev: 1, PDLen: -1}
	if !o.rev1 {
		f.Rev, f.Flags, f.Private = 2, f.Flags|peer.FlagEnhanced, o.rtr
		if o.rtr == nil {
			f.Private = peer.Enhanced(false, false, false, false, 4, 4)
		}
	}
	if o.noCRC {
		f.Flags &^= peer.FlagCRC
	}
	if o.markers {
		f.Flags |= peer.FlagMarkers
	}
	return f
}

// ask connects to l and sends a Request for the application to answer.
func (w *world) ask(t testing.TB, l *iwarp.Listener, o options) (*peer.Stream, *iwarp.ConnRequest) {
	t.Helper()
	s, err := w.host.Dial(addrOf(l))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(o.request().Bytes()); err != nil {
		t.Fatal(err)
	}
	req, err := l.Request(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	return s, req
}

// open opens a connection in full operation.
func (w *world) open(t testing.TB, o options) *conn {
	t.Helper()
	s, req := w.ask(t, w.listens[o.on], o)
	c := &conn{world: w, t: t, s: s, marked: o.on == onMarked}
	c.qp, c.scq, c.rcq = w.newQP(t)
	switch {
	case o.recvs == 0:
		c.postRecvs(slots)
	case o.recvs > 0:
		c.postRecvs(o.recvs)
	}
	accepted := make(chan error, 1)
	go func() {
		_, err := req.Accept(w.ctx, c.qp, &iwarp.Config{Startup: iwarp.Startup{IRD: o.ird}})
		accepted <- err
	}()
	var err error
	if c.reply, err = s.ReadFrame(); err != nil {
		t.Fatal(err)
	}
	if c.reply.Key != peer.KeyReply || c.reply.Flags&peer.FlagReject != 0 {
		t.Fatalf("reply %q, flags %#x", c.reply.Key, c.reply.Flags)
	}
	crc := c.reply.Flags&peer.FlagCRC != 0
	c.r = &peer.Reader{S: s, CRC: crc, Markers: o.markers}
	if o.rtr == nil { // else the node waits for the RTR
		if err := <-accepted; err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// framed frames ULPDUs as negotiated with the node.
func (c *conn) framed(ulpdus ...[]byte) (b []byte) {
	for _, u := range ulpdus {
		if c.marked {
			b = append(b, peer.Marked(c.at+len(b), u, nil)...)
		} else {
			b = append(b, peer.FPDU(u)...)
		}
	}
	return b
}

// sendAt sends b at off after what was sent in order.
func (c *conn) sendAt(off int, b []byte) {
	c.t.Helper()
	if err := c.s.SendAt(off, b); err != nil {
		c.t.Fatal(err)
	}
}

// raw sends bytes unchanged.
func (c *conn) raw(b []byte) {
	c.t.Helper()
	if err := c.s.Send(b); err != nil {
		c.t.Fatal(err)
	}
	c.at += len(b)
}

func (c *conn) send(ulpdus ...[]byte) { c.t.Helper(); c.raw(c.framed(ulpdus...)) }

func (c *conn) next() []byte {
	c.t.Helper()
	u, err := c.r.Next()
	if err != nil {
		c.t.Fatal(err)
	}
	return u
}

// post posts a send work request.
func (c *conn) post(wr iwarp.SendWR) {
	c.t.Helper()
	if err := c.qp.PostSend(&wr); err != nil {
		c.t.Fatal(err)
	}
	c.sends++
}

func (c *conn) drain() {
	var wcs [16]iwarp.WC
	for n := c.scq.Poll(wcs[:]); n > 0; n = c.scq.Poll(wcs[:]) {
		c.sent = append(c.sent, wcs[:n]...)
	}
	for n := c.rcq.Poll(wcs[:]); n > 0; n = c.rcq.Poll(wcs[:]) {
		c.got = append(c.got, wcs[:n]...)
	}
}

func (c *conn) until(what string, cond func() bool) {
	c.t.Helper()
	if err := c.host.Until(what, func() bool { c.drain(); return cond() }); err != nil {
		c.t.Fatal(err)
	}
}

// over waits until the queue pair's connection has ended, and takes all completions.
func (c *conn) over() error {
	c.t.Helper()
	c.until("end of the connection", func() bool {
		select {
		case <-c.qp.Done():
			return true
		default:
			return false
		}
	})
	c.until("every work request completed", func() bool { return len(c.got) >= c.posted && len(c.sent) >= c.sends })
	return c.qp.Err()
}

// begin starts full operation: a responder sends nothing before the first FPDU.
func (c *conn) begin() { c.send(peer.Tagged(peer.Write, true, 0, 0, nil)) }

// read makes the application read n bytes of the peer's memory into the sink region, and returns the resulting Read
// Request.
func (c *conn) read(n int) peer.ReadReq {
	c.t.Helper()
	c.begin()
	c.post(iwarp.SendWR{ID: 1, Op: iwarp.OpRead, SGEs: []iwarp.SGE{c.regions["sink"].SGE(128, n)}, RKey: 0x1234, Remote: 0x5000})
	req, ok := peer.DecodeReadReq(c.next())
	if !ok || req.Size != uint32(n) || req.Src != 0x1234 || req.SrcTO != 0x5000 {
		c.t.Fatalf("Read Request %+v", req)
	}
	return req
}

// fetchAdd makes the application post an atomic, and returns its identifier.
func (c *conn) fetchAdd() uint32 {
	c.t.Helper()
	c.begin()
	c.post(iwarp.SendWR{ID: 1, Op: iwarp.OpFetchAdd, SGEs: []iwarp.SGE{c.regions["sink"].SGE(128, 8)}, RKey: 0x1234, Remote: 0x5000, CompareAdd: 5})
	u := c.next()
	if len(u) != 18+52 || u[1] != 0x40|peer.AtomicRequest {
		c.t.Fatalf("atomic request % x", u)
	}
	return uint32(u[18+4])<<24 | uint32(u[18+5])<<16 | uint32(u[18+6])<<8 | uint32(u[18+7])
}

// bindWindow makes the application bind a new window to 64 bytes at off of the region all, and returns its STag.
func (c *conn) bindWindow(off int, a iwarp.Access) uint32 {
	c.t.Helper()
	mw, err := c.pd.AllocMW(c.ctx)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = mw.Close() })
	c.begin()
	c.post(iwarp.SendWR{ID: 7, Op: iwarp.OpBindMW, RKey: mw.RKey(), SGEs: []iwarp.SGE{c.regions["all"].SGE(off, 64)}, Access: a})
	c.local(7)
	return mw.RKey()
}

// invalidate makes the application invalidate a window.
func (c *conn) invalidate(stag uint32) {
	c.t.Helper()
	c.post(iwarp.SendWR{ID: 8, Op: iwarp.OpLocalInv, Inv: stag})
	c.local(8)
}

func (c *conn) local(id uint64) {
	c.t.Helper()
	c.until("local operation", func() bool { return len(c.sent) > 0 })
	if wc := c.sent[0]; wc.ID != id || wc.Status != iwarp.WCSuccess {
		c.t.Fatalf("local operation: %+v", wc)
	}
	c.sent = c.sent[1:]
	c.sends--
}

// good is a well-behaved connection to another client of the daemon: each beat writes into memory, sends a message,
// and gets an answer.
type good struct {
	w        *world
	s        *peer.Stream
	r        *peer.Reader
	qp       *iwarp.QP
	scq, rcq *iwarp.CQ
	mr       *iwarp.MR
	msn      uint32
}

func newGood(t testing.TB, w *world, pd *iwarp.PD) *good {
	t.Helper()
	g := &good{w: w, msn: 1}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := w.other.Listen(w.ctx, ":0", nil)
	must(err)
	g.scq, err = w.other.CreateCQ(w.ctx, 64)
	must(err)
	g.rcq, err = w.other.CreateCQ(w.ctx, 64)
	must(err)
	g.qp, err = w.other.CreateQP(w.ctx, iwarp.QPConfig{PD: pd, SendCQ: g.scq, RecvCQ: g.rcq, SigAll: true})
	must(err)
	g.mr, err = pd.Alloc(w.ctx, 4096, allAccess)
	must(err)
	var req *iwarp.ConnRequest
	g.s, req = w.ask(t, l, options{})
	_, err = req.Accept(w.ctx, g.qp, nil)
	must(err)
	_, err = g.s.ReadFrame()
	must(err)
	g.r = &peer.Reader{S: g.s, CRC: true}
	return g
}

// beat checks that the connection works.
func (g *good) beat() error {
	msg := fmt.Appendf(nil, "all is well, message %d", g.msn)
	if err := g.qp.PostRecv(&iwarp.RecvWR{ID: uint64(g.msn), SGEs: []iwarp.SGE{g.mr.SGE(1024, 256)}}); err != nil {
		return err
	}
	b := peer.FPDU(peer.Tagged(peer.Write, true, g.mr.RKey(), g.mr.Base(), msg))
	if err := g.s.Send(append(b, peer.FPDU(peer.SendMsg(g.msn, msg))...)); err != nil {
		return err
	}
	var wcs [4]iwarp.WC
	n := 0
	if err := g.w.host.Until("good connection's message", func() bool { n = g.rcq.Poll(wcs[:]); return n > 0 }); err != nil {
		return err
	}
	if wc := wcs[0]; n != 1 || wc.Status != iwarp.WCSuccess || wc.ID != uint64(g.msn) || int(wc.Len) != len(msg) {
		return fmt.Errorf("good connection: %+v", wc)
	}
	if !bytes.Equal(g.mr.Bytes()[:len(msg)], msg) || !bytes.Equal(g.mr.Bytes()[1024:][:len(msg)], msg) {
		return errors.New("good connection: memory differs")
	}
	if err := g.qp.PostSend(&iwarp.SendWR{ID: uint64(g.msn), Op: iwarp.OpSend, SGEs: []iwarp.SGE{g.mr.SGE(1024, len(msg))}}); err != nil {
		return err
	}
	u, err := g.r.Next()
	if err != nil {
		return fmt.Errorf("good connection: %w", err)
	}
	if !bytes.Equal(u, peer.SendMsg(g.msn, msg)) {
		return fmt.Errorf("good connection: answer % x", u)
	}
	if err := g.w.host.Until("good connection's completion", func() bool { return g.scq.Poll(wcs[:]) > 0 }); err != nil {
		return err
	}
	if wcs[0].Status != iwarp.WCSuccess {
		return fmt.Errorf("good connection: %+v", wcs[0])
	}
	g.msn++
	return nil
}

// neighbour binds a window on another connection of the same application, and returns its STag.
func (c *conn) neighbour(a iwarp.Access) uint32 {
	c.t.Helper()
	n := c.open(c.t, options{recvs: -1})
	stag := n.bindWindow(0, a)
	c.t.(*testing.T).Cleanup(n.destroy)
	return stag
}

// port is where the raw peer listens.
const port = 7174
