package ctrl

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

// scripted is a server with clients whose requests, and with the events of the engine, a script chooses.
type scripted struct {
	*harness
	t       *testing.T
	in      testenv.Choices
	clients [2]*scriptClient
	peers   []*scriptConn
	known   map[dataplane.ConnID]bool
	port    uint16
	mem     int
}

// scriptClient is a client with the handles that it knows.
type scriptClient struct {
	c                                             *seqpacket.Conn
	id                                            uint64
	pds, cqs, qps, srqs, chs, mrs, mws, ls, conns []uint32
}

// scriptConn is a connection of the engine.
type scriptConn struct {
	id       dataplane.ConnID
	listener dataplane.ListenerID
	flow     pkt.Flow
	sctp     bool
	dialed   bool
	stage    int // 0: not open, 1: streaming, 2: full operation, 3: over
	parted   bool
}

// pick returns a known handle, mostly.
func (s *scripted) pick(l []uint32) uint32 {
	b := s.in.Byte()
	if len(l) == 0 || b >= 0xf0 {
		return uint32(b & 15)
	}
	return l[int(b)%len(l)]
}

// ask returns the request that m is the body of.
func ask(m proto.Message) *ctrlpb.Request {
	r := new(ctrlpb.Request)
	fields := r.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Message() != nil && f.Message().FullName() == m.ProtoReflect().Descriptor().FullName() {
			r.ProtoReflect().Set(f, protoreflect.ValueOfMessage(m.ProtoReflect()))
		}
	}
	return r
}

// do sends a request and returns its reply, or nil if the client is cut off.
func (s *scripted) do(c *scriptClient, r *ctrlpb.Request, fds ...int) *ctrlpb.Reply {
	c.id++
	r.Id = c.id
	b := marshal(s.t, r)
	if c.c == nil || c.c.Write(b, fds) != nil {
		return nil
	}
	for {
		b, got, err := c.c.Read(seqpacket.MaxFDs)
		if err != nil {
			return nil
		}
		seqpacket.CloseAll(got)
		m := new(ctrlpb.Message)
		if err := proto.Unmarshal(b, m); err != nil {
			s.t.Fatal(err)
		}
		if q := m.GetEvent().GetConnectRequest(); q != nil {
			c.conns = append(c.conns, q.Conn)
		}
		if q := m.GetEvent().GetStreamReady(); q != nil {
			c.conns = append(c.conns, q.Conn)
		}
		if rep := m.GetReply(); rep.GetId() == c.id {
			return rep
		}
	}
}

func (s *scripted) hello(i int) {
	if c := s.clients[i]; c != nil && c.c != nil {
		c.c.Close()
	}
	tc := s.client(s.t)
	s.clients[i] = &scriptClient{c: tc.c}
	s.do(s.clients[i], ask(&ctrlpb.Hello{Version: 1, MinVersion: 1}))
}

func (s *scripted) startup() *ctrlpb.Startup {
	b := s.in.Byte()
	st := &ctrlpb.Startup{}
	if b&1 != 0 {
		st.Transport = ctrlpb.Transport_TRANSPORT_SCTP
	}
	st.SharedAssociation = b&2 != 0
	st.UdpEncapsulation = b&12 == 12
	if b&16 != 0 {
		st.Revision = proto.Uint32(1)
	}
	if b&32 != 0 {
		st.P2P = proto.Bool(true)
	}
	return st
}

// request sends a request of client c.
func (s *scripted) request(c *scriptClient, op byte) {
	var rep *ctrlpb.Reply
	switch op {
	case 0:
		if rep = s.do(c, ask(&ctrlpb.AllocPD{})); rep.GetPd() != nil {
			c.pds = append(c.pds, rep.GetPd().Pd)
		}
	case 1:
		r := &ctrlpb.CreateCQ{Depth: uint32(s.in.Byte())}
		if s.in.Byte()&1 != 0 {
			r.Channel = s.pick(c.chs)
		}
		if rep = s.do(c, ask(r)); rep.GetCq() != nil {
			c.cqs = append(c.cqs, rep.GetCq().Cq)
		}
	case 2:
		r := reqQP(s.pick(c.pds), s.pick(c.cqs))
		if s.in.Byte()&1 != 0 {
			r.GetCreateQp().Srq = s.pick(c.srqs)
		}
		if rep = s.do(c, r); rep.GetQp() != nil {
			c.qps = append(c.qps, rep.GetQp().Qp)
		}
	case 3:
		if rep = s.do(c, ask(&ctrlpb.CreateSRQ{Pd: s.pick(c.pds), Depth: 8, MaxSge: 1})); rep.GetSrq() != nil {
			c.srqs = append(c.srqs, rep.GetSrq().Srq)
		}
	case 4:
		if rep = s.do(c, ask(&ctrlpb.CreateChannel{})); rep.GetChannel() != nil {
			c.chs = append(c.chs, rep.GetChannel().Channel)
		}
	case 5:
		r := reqMR(s.pick(c.pds), 1+uint64(s.in.Byte())*32)
		r.GetRegisterMr().Near = s.in.Byte()&1 != 0
		if rep = s.do(c, r, s.mem); rep.GetMr() != nil {
			c.mrs = append(c.mrs, rep.GetMr().Mr)
		}
	case 6:
		if rep = s.do(c, ask(&ctrlpb.AllocMW{Pd: s.pick(c.pds)})); rep.GetMw() != nil {
			c.mws = append(c.mws, rep.GetMw().Mw)
		}
	case 7:
		switch s.in.Byte() % 8 {
		case 0:
			s.do(c, ask(&ctrlpb.DeallocPD{Pd: s.pick(c.pds)}))
		case 1:
			s.do(c, ask(&ctrlpb.DestroyCQ{Cq: s.pick(c.cqs)}))
		case 2, 3:
			s.do(c, ask(&ctrlpb.DestroyQP{Qp: s.pick(c.qps)}))
		case 4:
			s.do(c, ask(&ctrlpb.DestroySRQ{Srq: s.pick(c.srqs)}))
		case 5:
			s.do(c, ask(&ctrlpb.DestroyChannel{Channel: s.pick(c.chs)}))
		case 6:
			s.do(c, ask(&ctrlpb.DeregisterMR{Mr: s.pick(c.mrs)}))
		default:
			s.do(c, ask(&ctrlpb.DeallocMW{Mw: s.pick(c.mws)}))
		}
	case 8:
		b := s.in.Byte()
		r := &ctrlpb.Listen{Port: 7000 + uint32(b&3), Streaming: b&4 != 0, Startup: s.startup(), Backlog: uint32(b >> 5)}
		if b&8 != 0 {
			r.Address = addrA.String()
		}
		if rep = s.do(c, ask(r)); rep.GetListen() != nil {
			c.ls = append(c.ls, rep.GetListen().Listen)
		}
	case 9:
		s.do(c, ask(&ctrlpb.Unlisten{Listen: s.pick(c.ls)}))
	case 10, 11:
		b := s.in.Byte()
		r := &ctrlpb.Connect{Qp: s.pick(c.qps), Remote: "10.0.0.2:7", Streaming: b&4 != 0, Startup: s.startup()}
		if b&8 != 0 {
			r.Local = ":" + fmt.Sprint(8000+uint32(b&3))
		}
		if b > 0xf0 {
			r.Remote = "192.0.2.1:7"
		}
		if rep = s.do(c, ask(r)); rep.GetConnect() != nil {
			c.conns = append(c.conns, rep.GetConnect().Conn)
			s.dialed(s.t)
		}
	case 12:
		s.do(c, ask(&ctrlpb.Accept{Conn: s.pick(c.conns), Qp: s.pick(c.qps)}))
	case 13:
		s.do(c, ask(&ctrlpb.Reject{Conn: s.pick(c.conns)}))
	case 14:
		b := s.in.Byte()
		s.do(c, ask(&ctrlpb.Disconnect{Qp: s.pick(c.qps), Abort: b&1 != 0, Leave: b&2 != 0}))
	case 15:
		h := s.pick(c.conns)
		switch s.in.Byte() % 6 {
		case 0:
			s.do(c, ask(&ctrlpb.StreamSend{Conn: h, Data: make([]byte, 1+int(s.in.Byte()))}))
		case 1:
			s.do(c, ask(&ctrlpb.StreamConsumed{Conn: h, Count: uint32(s.in.Byte())}))
		case 2, 3:
			s.do(c, ask(&ctrlpb.StartMPA{Conn: h, Qp: s.pick(c.qps), Role: ctrlpb.MPARole(s.in.Byte() % 3)}))
		default:
			s.do(c, ask(&ctrlpb.StreamClose{Conn: h, Abort: s.in.Byte()&1 != 0}))
		}
	case 16:
		switch s.in.Byte() % 5 {
		case 0:
			s.do(c, ask(&ctrlpb.ResizeCQ{Cq: s.pick(c.cqs), Depth: uint32(s.in.Byte())}))
		case 1:
			s.do(c, ask(&ctrlpb.ModifyQP{Qp: s.pick(c.qps), Access: uint32(s.in.Byte())}))
		case 2:
			s.do(c, ask(&ctrlpb.AdminDisconnect{Qp: s.pick(c.qps), Abort: s.in.Byte()&1 != 0}))
		case 3:
			s.do(c, ask(&ctrlpb.AttachMemory{Near: true}), s.mem)
		default:
			s.do(c, ask(&ctrlpb.SetDSCP{Qp: s.pick(c.qps), Dscp: uint32(s.in.Byte())}))
		}
	}
}

// host changes what the host or the administrator decides.
func (s *scripted) host(what byte) {
	b := s.in.Byte()
	switch what {
	case 0, 1: // its addresses
		all := [...]netip.Addr{addrA, netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("fd00::3")}
		var now []netip.Addr
		for i, a := range all {
			if b>>i&1 == 0 {
				now = append(now, a)
			}
		}
		s.mu.Lock()
		s.devices[0].Addrs = func() []netip.Addr { return now }
		s.claims.refresh(s.now())
		s.wake(s.now().Add(lostTime))
		s.mu.Unlock()
	case 2: // the rules
		cfg := Config{Limits: Limits{QueueDepth: 64, QPs: 1 + int(b&7), CQs: 6, MRs: 6, Registered: 1 << 20}, EndDenied: b&8 != 0}
		if b&16 != 0 {
			cfg.Allow = []Rule{{AcceptFrom: nets("10.0.0.9/32")}}
		}
		if b&32 != 0 {
			cfg.Allow = []Rule{{ConnectTo: nets("10.0.0.9/32")}}
		}
		s.Reload(cfg)
	default: // the interface
		s.Unplug("eth9")
		for _, p := range s.peers {
			if p.stage < 3 && p.stage > int(b&1) {
				p.stage = 3
				s.OnEvent(dataplane.Event{Conn: p.id, Flow: p.flow, Kind: dataplane.EventClosed, Err: errorf(unreachable, "x")})
			}
		}
		if err := s.Plug("eth9", 1500, nil); err != nil {
			s.t.Fatal(err)
		}
	}
}

// look finds the connections that the server has opened.
func (s *scripted) look() {
	s.e.mu.Lock()
	var ids []dataplane.ConnID
	for id := range s.e.conns {
		if !s.known[id] {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	var joined []*scriptConn
	for _, id := range ids {
		s.known[id] = true
		c := s.e.conns[id]
		p := &scriptConn{id: id, flow: flowOf(c.local, c.remote), sctp: c.sctp != nil, dialed: true, parted: c.sctp == nil}
		s.peers = append(s.peers, p)
		if p.sctp {
			joined = append(joined, p)
		}
	}
	s.e.mu.Unlock()
	for _, p := range joined {
		s.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Conn: p.id, Flow: p.flow})
	}
}

// arrive makes a connection arrive at a listener.
func (s *scripted) arrive() {
	b := s.in.Byte()
	s.mu.Lock()
	var ls []*listener
	for _, l := range s.listeners {
		ls = append(ls, l)
	}
	s.mu.Unlock()
	slices.SortFunc(ls, func(a, b *listener) int { return int(a.index) - int(b.index) })
	if len(ls) == 0 {
		return
	}
	l := ls[int(b)%len(ls)]
	s.port++
	local, remote := netip.AddrPortFrom(addrA, l.claim.addr.Port()), netip.AddrPortFrom(peerA.Addr(), 1000+s.port)
	s.e.mu.Lock()
	id := s.e.add(local, remote)
	s.e.mu.Unlock()
	s.known[id] = true
	p := &scriptConn{id: id, listener: l.id, flow: flowOf(local, remote), stage: 1}
	p.sctp, p.parted = l.sctp != nil, l.sctp == nil
	s.peers = append(s.peers, p)
	if !p.sctp {
		s.OnEvent(dataplane.Event{Kind: dataplane.EventAccepted, Conn: id, Listener: l.id, Flow: p.flow, Host: b > 0xf0})
		return
	}
	s.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Listener: l.id, Flow: p.flow})
	set := &ddp.Setup{Private: []byte("x")}
	if b&16 != 0 {
		set.Enhanced = &mpa.EnhancedData{IRD: 1, ORD: 1}
	}
	s.OnEvent(dataplane.Event{Kind: dataplane.EventRequest, Conn: id, Listener: l.id, Flow: p.flow, Setup: set})
}

// event makes the engine report an event of a connection that it may have now.
func (s *scripted) event() {
	var live []*scriptConn
	for _, p := range s.peers {
		if p.stage < 3 || !p.parted {
			live = append(live, p)
		}
	}
	if len(live) == 0 {
		return
	}
	p := live[int(s.in.Byte())%len(live)]
	b := s.in.Byte()
	ev := dataplane.Event{Conn: p.id, Flow: p.flow}
	var attached, answered bool
	s.e.with(p.id, func(c *fakeConn) { attached, answered = c.attached != nil && c.attached.QP != nil, c.answer != nil })
	switch {
	case p.stage == 3:
		p.parted = true
		ev.Conn, ev.Kind = 0, dataplane.EventParted
	case b&15 == 15:
		p.stage = 3
		ev.Kind, ev.TimeWait = dataplane.EventClosed, b&16 != 0 && !p.sctp
		if b&32 != 0 {
			ev.Err = errors.New("reset")
		}
		if b&64 != 0 && p.sctp {
			ev.Err = [...]error{dataplane.ErrNoStream, ddp.ErrCollision}[b>>7]
		}
	case p.stage == 0 && p.sctp && b&3 == 1:
		ev.Kind = dataplane.EventRejected
		s.OnEvent(ev)
		p.stage = 3
		ev.Kind, ev.Err = dataplane.EventClosed, dataplane.ErrRejected
	case p.stage == 0 && p.sctp:
		p.stage = 1
		ev.Kind, ev.Setup = dataplane.EventAnswer, &ddp.Setup{}
		if b&4 != 0 {
			ev.Setup.Enhanced = &mpa.EnhancedData{IRD: uint16(b >> 3), ORD: uint16(b >> 4)}
		}
	case p.stage == 0:
		p.stage = 1
		ev.Kind, ev.Host = dataplane.EventConnected, b&16 != 0
	case p.stage == 1 && b&7 < 2 && attached && (answered || p.dialed || !p.sctp):
		p.stage = 2
		ev.Kind = dataplane.EventEstablished
	case p.stage == 1 && b&7 < 5 && !p.sctp:
		f := mpa.Frame{Reply: p.dialed != (b&16 != 0), Reject: b&32 != 0, CRC: b&64 != 0, Rev: 1 + b>>7, Enhanced: b>>7 != 0}
		f.EnhancedData = mpa.EnhancedData{IRD: 1, ORD: 1}
		ev.Kind = dataplane.EventData
		if ev.Data, _ = f.Append(nil); b&7 == 4 {
			ev.Data = ev.Data[:1+int(b>>3)%len(ev.Data)]
		}
		if b&7 == 3 {
			ev.Kind, ev.Data = dataplane.EventWritable, nil
		}
	case p.stage == 2 && b&7 == 1:
		ev.Kind, ev.Err = dataplane.EventTerminated, &term.RemoteError{Err: term.ErrInvalidSTag}
	case p.stage == 2 && b&7 == 2:
		ev.Kind, ev.Err = dataplane.EventFailed, term.ErrInvalidSTag
	case b&7 == 5:
		ev.Kind = dataplane.EventPeerClosed
	default:
		return
	}
	s.OnEvent(ev)
}

func runScript(t *testing.T, in []byte) {
	if len(in) > 3000 {
		return
	}
	h := newHarness(t, Config{Limits: Limits{QueueDepth: 64, QPs: 6, CQs: 6, MRs: 6, Registered: 1 << 20}})
	if len(in) > 0 && in[0]&0x40 != 0 {
		h.overSockets()
	}
	done := make(chan struct{})
	go func() { // drains the calls
		for {
			select {
			case <-h.e.calls:
			case <-done:
				return
			}
		}
	}()
	defer close(done)
	s := &scripted{harness: h, t: t, in: in, known: map[dataplane.ConnID]bool{}, mem: memfd(t, 16384)}
	for i := range s.clients {
		s.hello(i)
		for op := range byte(3) {
			s.request(s.clients[i], op)
		}
	}
	for n := 0; len(s.in) > 0 && n < 400; n++ {
		b := s.in.Byte()
		switch op := b & 31; {
		case op < 17:
			s.request(s.clients[b>>5&1], op)
		case op < 22:
			s.arrive()
		case op < 30:
			s.event()
		case op == 30:
			h.advance(time.Duration(s.in.Byte()) * 100 * time.Millisecond)
		case b>>6 == 3: // a client ends, and another one comes
			s.hello(int(b >> 5 & 1))
		default:
			s.host(b >> 5)
		}
		s.look()
	}
	for _, c := range s.clients {
		c.c.Close()
	}
	testenv.Until(t, "the clients have ended", func() bool {
		s.look()
		for _, p := range s.peers { // a client may wait for the end of a connection that it has left
			s.e.mu.Lock()
			ended := p.stage < 3 && s.e.conns[p.id].ended
			s.e.mu.Unlock()
			if ended {
				p.stage = 3
				h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, Flow: p.flow})
			}
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.sessions) == 0
	})
	h.dialed(t)
	s.look()
	for _, p := range s.peers {
		if p.stage < 3 {
			h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, Flow: p.flow})
		}
		if !p.parted {
			h.OnEvent(dataplane.Event{Kind: dataplane.EventParted, Flow: p.flow})
		}
	}
	h.advance(time.Hour)
	h.settled(t)
	h.mu.Lock()
	defer h.mu.Unlock()
	n := len(h.qps) + len(h.usage) + len(h.listeners) + len(h.conns) + len(h.pending) + len(h.assocs) + len(h.late)
	if n += len(h.lingers); n != 0 || h.table.Len() != 0 {
		t.Errorf("%d entries and %d regions left behind", n, h.table.Len())
	}
	if n := len(h.claims.byAddr) + len(h.claims.byPort); n != 0 || h.steer.len() != 0 {
		t.Errorf("%d claims and %d steered endpoints left behind", n, h.steer.len())
	}
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	for _, p := range s.peers {
		if c := h.e.conns[p.id]; p.stage < 3 && !c.ended && !(c.answer != nil && c.attached.QP == nil) {
			t.Errorf("connection %d, at stage %d, was not ended: %+v, %+v", p.id, p.stage, p, c)
		}
	}
}

// FuzzScript makes two clients and the engine do anything: the server must keep nothing when the clients and the
// connections are gone.
func FuzzScript(f *testing.F) {
	f.Add([]byte{10, 0, 0, 0, 22, 0, 0, 22, 0, 2, 22, 0, 0, 14, 0, 0, 22, 0, 15})
	f.Add([]byte{8, 0, 0, 17, 0, 22, 0, 2, 12, 0, 0, 22, 0, 0, 14, 3, 0, 22, 0, 31})
	f.Add([]byte{8, 0, 1, 17, 0, 12, 0, 0, 22, 0, 0, 0xc0 | 31, 22, 0, 15, 22, 0, 0})
	f.Add([]byte{10, 0, 0, 3, 22, 0, 0, 22, 0, 0, 42, 0, 0, 1, 30, 255})
	f.Add([]byte{8, 4, 0, 17, 0, 22, 0, 2, 15, 0, 0, 9, 15, 0, 2, 0, 0, 22, 0, 2})
	f.Fuzz(runScript)
}

// TestScriptRandom runs FuzzScript on random bytes.
func TestScriptRandom(t *testing.T) {
	testenv.Scripts(t, 100, 1000, runScript)
}
