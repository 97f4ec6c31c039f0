package sctppeer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pion "github.com/pion/sctp"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// pionPorts is the port that pion/sctp uses at both ends.
const pionPorts = 5000

// pionConn is the wire of a pion association: a net.Conn that carries SCTP packets over one end of a link.Pipe. pion is
// made for DTLS, so pionConn adds what it lacks: it maps our ports, adds the Adaptation Layer Indication and
// records ours.
type pionConn struct {
	indication uint32 // 0: none
	tuple      pkt.Tuple

	in, out chan []byte
	once    sync.Once
	ended   chan struct{} // Close was called, or the read deadline has passed
	gone    chan struct{} // the pump has returned

	mu   sync.Mutex
	seen []uint32 // indications of iwarpd
}

// indicationOf returns the adaptation parameter of an INIT or INIT ACK.
func indicationOf(b []byte) (v uint32, ok bool) {
	for b = b[12+20:]; len(b) >= 4; {
		n := int(binary.BigEndian.Uint16(b[2:]))
		if binary.BigEndian.Uint16(b) == 0xc006 && n == 8 {
			return binary.BigEndian.Uint32(b[4:]), true
		}
		if n = (n + 3) &^ 3; n < 4 || n > len(b) {
			break
		}
		b = b[n:]
	}
	return 0, false
}

func isInit(b []byte) bool { return len(b) >= 32 && (b[12] == 1 || b[12] == 2) }

// pump moves packets between the link and the conn. Only pump uses the link.
func (c *pionConn) pump(l link.Link) {
	defer close(c.gone)
	defer l.Close()
	frames := make([]link.Frame, 32)
	var done [64]link.Slot
	end := false
	for !end {
		n := l.Receive(frames)
		for i := range frames[:n] {
			c.arrived(&frames[i])
			l.Release(&frames[i])
		}
		select {
		case <-c.ended:
			end = true // data written before it is still sent
		default:
		}
		for len(c.out) > 0 {
			c.post(l, <-c.out)
		}
		l.Flush()
		for _, s := range done[:l.Reap(done[:])] {
			l.Free(s)
		}
		if n == 0 && !end {
			l.Wait(time.Millisecond, -1)
		}
	}
}

func (c *pionConn) arrived(f *link.Frame) {
	var p pkt.Packet
	b := f.Pieces[0]
	if p.Parse(b, f.Len()) != nil || f.N != 1 || p.Proto != pkt.ProtoSCTP {
		return
	}
	b = slices.Clone(b[p.L4Off : p.L4Off+p.L4Len])
	if !sctp.Verify(b) {
		return // a corrupted packet
	}
	if v, ok := uint32(0), false; isInit(b) {
		if v, ok = indicationOf(b); ok {
			c.mu.Lock()
			c.seen = append(c.seen, v)
			c.mu.Unlock()
		}
	}
	binary.BigEndian.PutUint16(b, pionPorts)
	binary.BigEndian.PutUint16(b[2:], pionPorts)
	sctp.SetChecksum(b)
	select {
	case c.in <- b:
	case <-c.ended:
	}
}

func (c *pionConn) post(l link.Link, b []byte) {
	if isInit(b) && c.indication != 0 {
		n := binary.BigEndian.Uint16(b[14:])
		b = b[:12+int(n+3)&^3]
		b = binary.BigEndian.AppendUint16(b, 0xc006)
		b = binary.BigEndian.AppendUint16(b, 8)
		b = binary.BigEndian.AppendUint32(b, c.indication)
		binary.BigEndian.PutUint16(b[14:], uint16(len(b)-12))
	}
	binary.BigEndian.PutUint16(b, c.tuple.LocalPort)
	binary.BigEndian.PutUint16(b[2:], c.tuple.RemotePort)
	sctp.SetChecksum(b)
	s, ok := l.Alloc()
	if !ok {
		return // lost
	}
	n := c.tuple.HeaderLen()
	slot := l.Bytes(s)
	c.tuple.Put(slot[:n], len(b), 0)
	copy(slot[n:], b)
	if !l.Post(s, 0, n+len(b)) {
		l.Free(s)
	}
}

func (c *pionConn) Read(b []byte) (int, error) {
	select {
	case p := <-c.in:
		return copy(b, p), nil
	case <-c.ended:
		return 0, net.ErrClosed
	}
}

func (c *pionConn) Write(b []byte) (int, error) {
	select {
	case c.out <- slices.Clone(b):
		return len(b), nil
	case <-c.gone:
		return 0, net.ErrClosed
	}
}

func (c *pionConn) Close() error {
	c.once.Do(func() { close(c.ended) })
	return nil
}

// SetReadDeadline ends reading. pion sets the deadline to now, and only to end.
func (c *pionConn) SetReadDeadline(time.Time) error  { return c.Close() }
func (c *pionConn) SetWriteDeadline(time.Time) error { return nil }
func (c *pionConn) SetDeadline(time.Time) error      { return nil }
func (c *pionConn) LocalAddr() net.Addr              { return &net.UDPAddr{} }
func (c *pionConn) RemoteAddr() net.Addr             { return &net.UDPAddr{} }

func (c *pionConn) indications() []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.seen)
}

// ddpPeer is a small DDP peer over a pion association. It sends every segment back in the order of the DDP-SSNs.
type ddpPeer struct {
	t       *testing.T
	conn    *pionConn
	segment uint32 // PPIDs
	control uint32
	first   uint16
	base    uint16 // function code of Initiate

	mu    sync.Mutex
	a     *pion.Association
	said  []string
	total int // segments that a client sends and expects back

	wg sync.WaitGroup
}

func (p *ddpPeer) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said = append(p.said, fmt.Sprintf(format, args...))
}

func (p *ddpPeer) has(line string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.said, func(s string) bool { return strings.HasPrefix(s, line) })
}

func (p *ddpPeer) options() []pion.AssociationOption {
	return []pion.AssociationOption{pion.WithNetConn(p.conn), pion.WithMTU(1480), pion.WithMaxMessageSize(1452), pion.WithRTOMax(2000)}
}

// server accepts one association, and sessions on any of its streams.
func (p *ddpPeer) server() {
	defer p.wg.Done()
	var opts []pion.ServerOption
	for _, o := range p.options() {
		opts = append(opts, o)
	}
	a, err := pion.ServerWithOptions(opts...)
	if err != nil {
		p.say("no association: %v", err)
		return
	}
	p.associated(a)
	for {
		s, err := a.AcceptStream()
		if err != nil {
			p.say("gone: %v", err)
			return
		}
		p.wg.Add(1)
		go p.serve(s)
	}
}

func (p *ddpPeer) associated(a *pion.Association) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.a = a
	p.said = append(p.said, "up")
}

// client starts an association, and a session on stream 3.
func (p *ddpPeer) client() {
	defer p.wg.Done()
	var opts []pion.ClientOption
	for _, o := range p.options() {
		opts = append(opts, o)
	}
	a, err := pion.ClientWithOptions(opts...)
	if err != nil {
		p.say("no association: %v", err)
		return
	}
	p.associated(a)
	s, err := a.OpenStream(3, pion.PayloadProtocolIdentifier(p.segment))
	if err != nil {
		p.say("no stream: %v", err)
		return
	}
	p.wg.Add(1)
	go p.serve(s)
}

// pionStream is the state of the session on a stream.
type pionStream struct {
	p       *ddpPeer
	s       *pion.Stream
	in, out uint16                       // DDP-SSNs
	ahead   map[uint16]func(*pionStream) // by DDP-SSN
	back    int
}

func (x *pionStream) send(ppid uint32, b []byte) {
	m := append(binary.BigEndian.AppendUint16(nil, x.out), b...)
	x.out++
	x.s.SetReliabilityParams(true, pion.ReliabilityTypeReliable, 0)
	if _, err := x.s.WriteSCTP(m, pion.PayloadProtocolIdentifier(ppid)); err != nil {
		x.p.say("write: %v", err)
	}
}

func (x *pionStream) sendControl(code uint16, private string) {
	x.send(x.p.control, append(binary.BigEndian.AppendUint16(nil, code), private...))
}

func (p *ddpPeer) serve(s *pion.Stream) {
	defer p.wg.Done()
	x := &pionStream{p: p, s: s, in: p.first, out: p.first, ahead: map[uint16]func(*pionStream){}}
	if p.total > 0 {
		x.sendControl(p.base, "hello")
	}
	b := make([]byte, 1<<16)
	for {
		n, ppid, err := s.ReadSCTP(b)
		if err != nil {
			p.say("end of stream %d", s.StreamIdentifier())
			return
		}
		if n < 2 {
			p.say("short message")
			continue
		}
		m := slices.Clone(b[2:n])
		x.ahead[binary.BigEndian.Uint16(b)] = func(x *pionStream) { x.handle(uint32(ppid), m) }
		for f := x.ahead[x.in]; f != nil; f = x.ahead[x.in] {
			delete(x.ahead, x.in)
			x.in++
			f(x)
		}
	}
}

// payload returns segment i of the client.
func payload(i int) []byte {
	n := 4 + i*37%1000
	if i%3 == 0 {
		n = 1452 - 2
	}
	b := bytes.Repeat([]byte{byte(i)}, n)
	binary.BigEndian.PutUint32(b, uint32(i))
	return b
}

func (x *pionStream) handle(ppid uint32, m []byte) {
	p := x.p
	switch {
	case ppid == p.control && len(m) >= 2:
		switch code := binary.BigEndian.Uint16(m); code {
		case p.base:
			p.say("control %d private %s", code, m[2:])
			x.sendControl(p.base+1, "welcome")
		case p.base + 1:
			p.say("control %d private %s", code, m[2:])
			for i := range p.total {
				x.send(p.segment, payload(i))
			}
		case 4:
			if p.total == 0 {
				x.sendControl(4, "")
			}
			p.say("terminated")
			x.in, x.out = p.first, p.first // the next session of the stream
		default:
			p.say("unknown function %d", code)
		}
	case ppid != p.segment:
		p.say("unknown ppid %d", ppid)
	case string(m) == "ABORT":
		go p.a.Abort("as told")
	case string(m) == "SHUTDOWN":
		p.wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			p.say("shutdown: %v", p.a.Shutdown(ctx))
		})
	case p.total == 0:
		x.send(p.segment, m)
	default:
		if !bytes.Equal(m, payload(x.back)) {
			p.say("wrong segment %d", x.back)
		}
		if x.back++; x.back == p.total {
			p.say("echoed %d", x.back)
			x.sendControl(4, "")
		}
	}
}

// pionPair connects one of our hosts and a pion peer by a wire.
func pionPair(t *testing.T, profile session.Profile, wire impair.Config) (*host, *ddpPeer) {
	cfg := link.PipeConfig{MTU: 1500, AtoB: wire, BtoA: wire}
	cfg.AtoB.Seed, cfg.BtoA.Seed = 11, 12
	a, b, err := link.NewPipe(cfg)
	if err != nil {
		t.Fatal(err)
	}
	h := makeHost(t, profile, false)
	h.cfg.RTOMin = 100 * time.Millisecond
	h.link = a
	h.flow = pkt.NewFlow(netip.MustParseAddrPort(fmt.Sprintf("10.0.0.1:%d", port)), netip.MustParseAddrPort(fmt.Sprintf("10.0.0.2:%d", peerPort)))
	h.tuple = pkt.Tuple{Flow: h.flow, Proto: pkt.ProtoSCTP, SrcMAC: [6]byte{2, 5: 2}, DstMAC: [6]byte{2, 5: 1}}
	c := &pionConn{indication: h.cfg.Adaptation, tuple: h.tuple, in: make(chan []byte, 4096), out: make(chan []byte, 4096),
		ended: make(chan struct{}), gone: make(chan struct{})}
	c.tuple.Flow = h.flow.Reverse()
	c.tuple.SrcMAC, c.tuple.DstMAC = h.tuple.DstMAC, h.tuple.SrcMAC
	p := &ddpPeer{t: t, conn: c, segment: profile.Segment(), control: profile.Control(), base: 1}
	if profile == session.Draft {
		p.first, p.base = 1, 2
	}
	go c.pump(b)
	t.Cleanup(func() {
		c.Close()
		p.mu.Lock()
		assoc := p.a
		p.mu.Unlock()
		if assoc != nil {
			assoc.Close()
		}
		p.wg.Wait()
		<-c.gone
		a.Close()
		if t.Failed() {
			t.Logf("pion's side said: %q", p.said)
		}
	})
	return h, p
}

// start runs the peer as a server, or as a client if segments is not 0.
func (p *ddpPeer) start(segments int) {
	p.total = segments
	p.wg.Add(1)
	if segments > 0 {
		go p.client()
	} else {
		go p.server()
	}
}

var pionWires = []struct {
	name    string
	profile session.Profile
	wire    impair.Config
	n       int
}{
	{"RFC5043", session.RFC5043, impair.Config{}, 100},
	{"draft", session.Draft, impair.Config{}, 100},
	{"impaired", session.RFC5043, impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Hold: 2 * time.Millisecond, Delay: time.Millisecond}, 400},
}

// check checks that both ends saw the same indication, and that neither complains about the
// other.
func (p *ddpPeer) check(h *host) {
	p.t.Helper()
	ind := p.conn.indications()
	if len(ind) == 0 || slices.ContainsFunc(ind, func(v uint32) bool { return v != h.cfg.Adaptation }) {
		p.t.Errorf("our indications: %v", ind)
	}
	for _, complaint := range []string{"unknown", "wrong", "short", "write"} {
		if p.has(complaint) {
			p.t.Error("the peer complains")
		}
	}
	if n := h.m.Stats().Violations; n != 0 {
		p.t.Errorf("%d violations", n)
	}
}

// TestPionServes sets up an association and sessions with pion, which sends each segment back.
func TestPionServes(t *testing.T) {
	for _, w := range pionWires {
		t.Run(w.name, func(t *testing.T) {
			h, p := pionPair(t, w.profile, w.wire)
			p.start(0)
			h.dial()
			h.run("the association", func() bool { return h.a.State() == sctp.Established })
			for _, stream := range []uint16{3, 5, 3} {
				if err := h.mux().Initiate(stream, session.Setup{Private: []byte("hello")}); err != nil {
					t.Fatal(err)
				}
				h.run("the session", func() bool { return h.state(stream) == session.Open })
				if e := h.ddp[len(h.ddp)-1]; e.Kind != session.EventOpen || string(e.Setup.Private) != "welcome" {
					t.Errorf("event %+v", e)
				}
				sink := &echo{}
				h.m.Attach(stream, sink)
				for i := range w.n {
					h.segment(stream, payload(i))
				}
				h.run("the echo", func() bool { return len(sink.got) == w.n })
				for i, s := range sink.got {
					if s != string(payload(i)) {
						t.Fatalf("segment %d is another one", i)
					}
				}
				h.m.Terminate(stream)
				h.run("the end of the session", func() bool { return h.state(stream) == session.Idle })
			}
			p.check(h)
			h.a.Close(clock.Now())
			h.run("the end", func() bool { return h.a.State() == sctp.Closed && p.has("gone") })
			if h.a.Err() != nil || len(h.bufs) != 0 {
				t.Errorf("err %v, %d buffers were not given back", h.a.Err(), len(h.bufs))
			}
			t.Logf("%+v", h.a.Stats())
		})
	}
}

// TestPionConnects makes pion set up an association and a session. We send each segment back.
func TestPionConnects(t *testing.T) {
	for _, w := range pionWires {
		t.Run(w.name, func(t *testing.T) {
			h, p := pionPair(t, w.profile, w.wire)
			h.listen()
			p.start(w.n)
			h.run("an Initiate", func() bool { return h.m != nil && h.state(3) == session.Requested })
			if e := h.ddp[0]; e.Kind != session.EventRequest || string(e.Setup.Private) != "hello" {
				t.Errorf("event %+v", e)
			}
			if err := h.m.Accept(3, session.Setup{Private: []byte("yes")}); err != nil {
				t.Fatal(err)
			}
			sink := &echo{back: true}
			h.m.Attach(3, sink)
			h.run("all segments", func() bool {
				for len(sink.todo) > 0 && h.m.CanSend(3) && h.a.Room() >= len(sink.todo[0])+2 {
					h.segment(3, []byte(sink.todo[0]))
					sink.todo = sink.todo[1:]
				}
				return h.state(3) == session.Ended || h.state(3) == session.Idle
			})
			if len(sink.got) != w.n || !p.has(fmt.Sprintf("echoed %d", w.n)) {
				t.Errorf("%d segments", len(sink.got))
			}
			h.run("the end of the session", func() bool { return h.state(3) == session.Idle && p.has("terminated") })
			p.check(h)
			h.a.Close(clock.Now())
			h.run("the end", func() bool { return h.a.State() == sctp.Closed && p.has("end of stream 3") })
			if h.a.Err() != nil {
				t.Error(h.a.Err())
			}
		})
	}
}

// TestPionEnds checks ABORT and SHUTDOWN by either side, and a peer without an indication.
func TestPionEnds(t *testing.T) {
	open := func(t *testing.T) (*host, *ddpPeer) {
		h, p := pionPair(t, session.RFC5043, impair.Config{})
		p.start(0)
		h.dial()
		h.run("the association", func() bool { return h.a.State() == sctp.Established })
		h.mux().Initiate(1, session.Setup{})
		h.run("the session", func() bool { return h.state(1) == session.Open })
		h.m.Attach(1, &echo{})
		return h, p
	}
	t.Run("ABORT of pion's", func(t *testing.T) {
		h, _ := open(t)
		h.segment(1, []byte("ABORT"))
		h.run("the end", func() bool { return h.a.State() == sctp.Closed })
		if _, ok := h.a.Err().(*sctp.AbortError); !ok {
			t.Error(h.a.Err())
		}
	})
	t.Run("SHUTDOWN of pion's", func(t *testing.T) {
		h, p := open(t)
		h.segment(1, []byte("SHUTDOWN"))
		h.run("the end", func() bool { return h.a.State() == sctp.Closed && p.has("shutdown") })
		if h.a.Err() != nil || !slices.Contains(h.events, sctp.EventShutdown) || !p.has("shutdown: <nil>") {
			t.Error(h.a.Err(), h.events)
		}
	})
	t.Run("ABORT of ours", func(t *testing.T) {
		h, p := open(t)
		h.a.Abort()
		h.run("the peer's end", func() bool { return p.has("gone") })
	})
	t.Run("no indication", func(t *testing.T) {
		h, p := pionPair(t, session.RFC5043, impair.Config{})
		p.conn.indication = 0
		p.start(0)
		h.dial()
		h.run("the refusal", func() bool { return h.a.State() == sctp.Closed && p.has("no association") })
		if h.a.Err() != sctp.ErrAdaptation {
			t.Error(h.a.Err())
		}
	})
}
