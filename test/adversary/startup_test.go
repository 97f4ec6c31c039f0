package adversary

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

var key = peer.KeyRequest // the key of every Request

func request(flags, rev byte, pdLen int, private []byte) []byte {
	return peer.Frame{Key: key, Flags: flags, Rev: rev, PDLen: pdLen, Private: private}.Bytes()
}

func reply(flags, rev byte, pdLen int, private []byte) []byte {
	return peer.Frame{Key: peer.KeyReply, Flags: flags, Rev: rev, PDLen: pdLen, Private: private}.Bytes()
}

const (
	crc      = peer.FlagCRC
	enhanced = peer.FlagCRC | peer.FlagEnhanced
)

// TestResponder sends the node invalid Requests. It must close the connection without sending anything.
func TestResponder(t *testing.T) {
	depths := peer.Enhanced(false, false, false, false, 4, 4)
	good := request(enhanced, 2, -1, depths)
	attacks := []struct {
		name  string
		rules string
		send  []byte
		then  func(s *peer.Stream) error // after what was sent
	}{
		{"key/wrong at the first byte", "M99", []byte("m"), nil},
		{"key/wrong at the last byte", "M99", []byte("MPA ID Req Framf"), nil},
		{"key/of a Reply", "M64, M99, M102", reply(enhanced, 2, -1, depths), nil},
		{"key/of another protocol", "M99, M86", []byte("GET / HTTP/1.1\r\nHost: 10.99.0.1\r\n\r\n"), nil},
		{"key/zeros", "M99, M119", make([]byte, 20), nil},
		{"key/an FPDU", "M85", peer.FPDU(peer.SendMsg(1, []byte("too early"))), nil},
		{"revision/0", "M77, M128", request(crc, 0, -1, nil), nil},
		{"revision/0 with S", "M77", request(enhanced, 0, -1, depths), nil},
		{"revision/3", "M77", request(crc, 3, -1, nil), nil},
		{"revision/3 with S", "M77", request(enhanced, 3, -1, depths), nil},
		{"revision/255", "M77", request(crc, 255, -1, nil), nil},
		{"private data/513", "M80", request(crc, 1, 513, nil), nil},
		{"private data/65535", "M80, M105", request(crc, 1, 65535, nil), nil},
		{"private data/513, all there", "M80, M82", request(crc, 1, -1, make([]byte, 513)), nil},
		{"private data/more than announced", "M80, M106", request(crc, 1, 4, make([]byte, 5)), nil},
		{"enhanced/no private data", "E5", request(enhanced, 2, 0, nil), nil},
		{"enhanced/three bytes", "E5", request(enhanced, 2, -1, depths[:3]), nil},
		{"behind the frame/one byte", "M80", append(bytes.Clone(good), 0), nil},
		{"behind the frame/an FPDU", "E1", append(bytes.Clone(good), peer.FPDU(peer.SendMsg(1, nil))...), nil},
		{"behind the frame/the frame again", "M80", append(bytes.Clone(good), good...), nil},
		{"FIN/at once", "M113", nil, (*peer.Stream).CloseWrite},
		{"FIN/in the key", "M113", good[:7], (*peer.Stream).CloseWrite},
		{"FIN/in front of the private data", "M113", good[:20], (*peer.Stream).CloseWrite},
		{"FIN/in the private data", "M113", good[:22], (*peer.Stream).CloseWrite},
		{"old/S to a responder of revision 1", "E41", good, nil},
		{"silence/at once", "M103", nil, nil},
		{"silence/in the key", "M103", good[:15], nil},
		{"silence/in the private data", "M103, M107", good[:23], nil},
	}
	w := newWorld(t)
	listen := func(s iwarp.Startup) *iwarp.Listener {
		l, err := w.dev.Listen(w.ctx, ":0", &iwarp.Config{Startup: s})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := listen(iwarp.Startup{Timeout: time.Hour}) // only silence may end by time-out
	hasty := listen(iwarp.Startup{Timeout: 100 * time.Millisecond})
	old := listen(iwarp.Startup{Timeout: time.Hour, Revision: 1})
	before := w.snapshot()
	for _, a := range attacks {
		checkRules(t, a.name, a.rules)
		t.Run(a.name, func(t *testing.T) {
			to := l
			switch {
			case strings.HasPrefix(a.name, "silence"):
				to = hasty
			case strings.HasPrefix(a.name, "old"):
				to = old
			}
			s, err := w.host.Dial(addrOf(to))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Forget()
			if err := s.Send(a.send); err != nil {
				t.Fatal(err)
			}
			if a.then != nil {
				if err := a.then(s); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.host.Until("end", s.Ended); err != nil {
				t.Fatal(err)
			}
			if len(s.In) > 0 {
				t.Errorf("the node answers % x", s.In)
			}
		})
		if err := w.good.beat(); err != nil {
			t.Fatalf("after %q: %v", a.name, err)
		}
	}
	w.unchanged(t, before)
	w.alone(t)
	// No such request has reached the application.
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	for _, l := range []*iwarp.Listener{l, hasty, old} {
		if r, err := l.Request(ctx); err == nil {
			t.Errorf("the application is asked about %v", r.Remote)
		}
	}
	t.Logf("%d attacks", len(attacks))
}

// TestResponderWaiting sends the node more data while its application has not yet answered a valid Request.
func TestResponderWaiting(t *testing.T) {
	w := newWorld(t)
	for name, then := range map[string]func(s *peer.Stream) error{
		"FIN":     (*peer.Stream).CloseWrite,
		"RST":     (*peer.Stream).Reset,
		"an FPDU": func(s *peer.Stream) error { return s.Send(peer.FPDU(peer.SendMsg(1, nil))) },
		"a byte":  func(s *peer.Stream) error { return s.Send([]byte{0}) },
	} {
		t.Run(name, func(t *testing.T) {
			s, r := w.ask(t, w.listens[onPlain], options{})
			defer s.Forget()
			if err := then(s); err != nil {
				t.Fatal(err)
			}
			if err := w.host.Until("request withdrawn", func() bool {
				select {
				case <-r.Gone():
					return true
				default:
					return false
				}
			}); err != nil {
				t.Fatal(err)
			}
			if len(s.In) > 0 {
				t.Errorf("the node answers % x", s.In)
			}
			q, scq, rcq := w.newQP(t)
			if _, err := r.Accept(w.ctx, q, nil); err == nil {
				t.Error("the application accepts a peer that has left")
			}
			for _, f := range []func() error{q.Close, scq.Close, rcq.Close} {
				if err := f(); err != nil {
					t.Error(err)
				}
			}
		})
		if err := w.good.beat(); err != nil {
			t.Fatalf("after %q: %v", name, err)
		}
	}
}

// TestResponderFrames checks unusual but valid Requests and the Reply to them.
func TestResponderFrames(t *testing.T) {
	w := newWorld(t)
	for _, f := range []struct {
		name, rules string
		request     []byte
		flags, rev  byte
		enhanced    []byte
	}{
		{"revision 1", "E4, E38, E40", request(crc, 1, -1, nil), crc, 1, nil},
		{"revision 1 with S, which it does not know", "E6", request(enhanced, 1, -1, []byte{1, 2}), crc, 1, nil},
		{"revision 2 without S", "E38, E39", request(crc, 2, -1, nil), crc, 2, nil},
		{"R and reserved bits", "M73, M75", request(crc|0x2f, 1, -1, nil), crc, 1, nil},
		{"no CRC wanted", "M71", request(0, 1, -1, nil), crc, 1, nil},
		{"markers wanted", "M69", request(crc|peer.FlagMarkers, 1, -1, nil), crc, 1, nil},
		{"512 bytes of private data", "M82", request(crc, 1, -1, make([]byte, 512)), crc, 1, nil},
		{"depths 0", "E9, E11", request(enhanced, 2, -1, make([]byte, 4)), enhanced, 2, []byte{0, 0, 0, 0}},
		{"no depths negotiated", "E18, E20", request(enhanced, 2, -1, []byte{0x3f, 0xff, 0x3f, 0xff}), enhanced, 2, []byte{0x3f, 0xff, 0x3f, 0xff}},
		{"B, C, D without A", "E33, E35", request(enhanced, 2, -1, []byte{0x40, 4, 0xc0, 4}), enhanced, 2, []byte{0, 4, 0, 4}},
	} {
		checkRules(t, f.name, f.rules)
		t.Run(f.name, func(t *testing.T) {
			l := w.listens[onPlain]
			s, err := w.host.Dial(addrOf(l))
			if err != nil {
				t.Fatal(err)
			}
			for i := range f.request { // one byte per segment
				if err := s.Send(f.request[i : i+1]); err != nil {
					t.Fatal(err)
				}
			}
			r, err := l.Request(w.ctx)
			if err != nil {
				t.Fatal(err)
			}
			c := &conn{world: w, t: t, s: s}
			c.qp, c.scq, c.rcq = w.newQP(t)
			defer c.destroy()
			if _, err := r.Accept(w.ctx, c.qp, nil); err != nil {
				t.Fatal(err)
			}
			got, err := s.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			want := peer.Frame{Key: peer.KeyReply, Flags: f.flags, Rev: f.rev, PDLen: len(f.enhanced), Private: f.enhanced}
			if !bytes.Equal(got.Bytes(), want.Bytes()) {
				t.Errorf("Reply\n% x\nwant\n% x", got.Bytes(), want.Bytes())
			}
		})
	}
}

// TestReject checks that data after a rejection is ignored.
func TestReject(t *testing.T) {
	w := newWorld(t)
	s, r := w.ask(t, w.listens[onPlain], options{})
	if err := r.Reject(w.ctx, []byte("not today")); err != nil {
		t.Fatal(err)
	}
	f, err := s.ReadFrame()
	if err != nil || f.Flags&peer.FlagReject == 0 || !bytes.HasSuffix(f.Private, []byte("not today")) {
		t.Fatalf("Reply %+v, %v", f, err)
	}
	before := w.snapshot()
	if err := s.Send(peer.FPDU(peer.Tagged(peer.Write, true, w.regions["all"].RKey(), 0x10000, []byte("all the same")))); err != nil {
		t.Fatal(err)
	}
	if err := w.good.beat(); err != nil {
		t.Fatal(err)
	}
	w.unchanged(t, before)
	if len(s.In) > 0 {
		t.Errorf("the node answers % x", s.In)
	}
}

// TestRTR breaks the rules of the ready-to-receive message (RFC 6581 section 9).
func TestRTR(t *testing.T) {
	offer := func(b, c, d bool) options {
		return options{rtr: peer.Enhanced(true, b, c, d, 4, 4)}
	}
	sendRTR, writeRTR, readRTR := offer(true, false, false), offer(false, true, false), offer(false, false, true)
	emptySend, emptyWrite := peer.SendMsg(1, nil), peer.Tagged(peer.Write, true, 0, 0, nil)
	opts := func(o options) func(a *attack) { return func(a *attack) { a.opts = o } }
	badCRC := func(u []byte) func(c *conn) []byte {
		return func(c *conn) []byte {
			b := peer.FPDU(u)
			b[len(b)-1] ^= 1
			c.raw(b)
			return nil
		}
	}
	runAttacks(t, []attack{
		last("right/Send", "E30", outcome{}, emptySend).with(opts(sendRTR)).with(func(a *attack) { a.msn = 2 }),
		last("right/Send as an FPDU of no bytes", "E30", outcome{}, nil).with(opts(sendRTR)),
		last("right/Write", "E30", outcome{}, emptyWrite).with(opts(writeRTR)),
		{name: "right/Read", rules: "E30, E10", opts: readRTR, run: func(c *conn) []byte {
			c.send(peer.ReadReq{Sink: 9, SinkTO: 8}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 9, 8, nil))
			return nil
		}},
		{name: "CRC/Send", rules: "M114", opts: sendRTR, want: mpaErr(2), run: badCRC(emptySend)},
		{name: "CRC/Write", rules: "M114", opts: writeRTR, want: mpaErr(2), run: badCRC(emptyWrite)},
		last("none/a Send with bytes", "E30", outcome{}, peer.SendMsg(1, long[:8])).with(opts(sendRTR)).with(func(a *attack) { a.delivered, a.msn = 1, 2 }),
		last("none/a Send too long", "E30", untaggedErr(5), peer.SendMsg(1, long[:slot+1])).with(opts(sendRTR)),
		last("none/MSN 2", "E30", untaggedErr(3), peer.SendMsg(2, nil)).with(opts(sendRTR)),
		last("none/a Write with bytes to nowhere", "E30", taggedErr(0), peer.Tagged(peer.Write, true, 0, 0, long[:8])).with(opts(writeRTR)),
		last("none/a Read of something, from nowhere", "E30", protection(0, withRDMA), peer.ReadReq{Size: 8}.Msg(1)).with(opts(readRTR)),
		last("none/a Read Response", "E30", operation(6), peer.Tagged(peer.ReadResponse, true, 0, 0, nil)).with(opts(readRTR)),
		last("none/version 0", "E30", operation(5), peer.With(emptySend, 1, 0x03)).with(opts(sendRTR)),
		last("none/an FPDU of no bytes where a Write was agreed", "E30", outcome{terminated, 0, 2, 0xff, bare}, nil).with(opts(writeRTR)),
		last("right/Write, where none was offered", "E24, E25, E28, E29", outcome{}, emptyWrite).with(opts(offer(false, false, false))),
		last("twice/Write", "E30", outcome{}, emptyWrite, emptyWrite).with(opts(writeRTR)),
		last("twice/Send, the second of which takes a receive", "E30", outcome{}, emptySend, peer.SendMsg(2, nil)).with(opts(sendRTR)).
			with(func(a *attack) { a.delivered, a.msn = 1, 3 }),
		last("Terminate in its place", "E30", outcome{kind: finished}, peer.Term(2, 0, 7, nil, false)).with(opts(sendRTR)),
	})
}

// TestInitiator answers the node's Requests with invalid Replies.
func TestInitiator(t *testing.T) {
	p2p := func(o *iwarp.Startup) { o.PeerToPeer = true }
	depths := []byte{0, 4, 0, 4}
	deep := func(o *iwarp.Startup) { o.IRD, o.ORD = 4, 4 }
	attacks := []struct {
		name, rules string
		setup       func(o *iwarp.Startup)
		reply       []byte
		then        func(s *peer.Stream) error
		want        error  // what Connect returns
		term        []byte // the Terminate that the node sends
	}{
		{"key/of a Request", "M66, M99, M102", nil, request(enhanced, 2, -1, depths), nil, iwarp.ErrProtocol, nil},
		{"key/wrong at the first byte", "M99", nil, []byte("X"), nil, iwarp.ErrProtocol, nil},
		{"key/wrong at the last byte", "M99, M94", nil, []byte("MPA ID Rep Frame"[:15] + "!"), nil, iwarp.ErrProtocol, nil},
		{"key/an FPDU", "M94", nil, peer.FPDU(peer.SendMsg(1, []byte("too early"))), nil, iwarp.ErrProtocol, nil},
		{"revision/1", "M77", nil, reply(crc, 1, -1, nil), nil, iwarp.ErrProtocol, nil},
		{"revision/0", "M77", nil, reply(crc, 0, -1, nil), nil, iwarp.ErrProtocol, nil},
		{"revision/3", "M77", nil, reply(enhanced, 3, -1, depths), nil, iwarp.ErrProtocol, nil},
		{"revision/2 without S", "E37", nil, reply(crc, 2, -1, nil), nil, iwarp.ErrProtocol, nil},
		{"private data/513", "M80", nil, reply(enhanced, 2, 513, depths), nil, iwarp.ErrProtocol, nil},
		{"private data/65535", "M80, M105", nil, reply(enhanced, 2, 65535, depths), nil, iwarp.ErrProtocol, nil},
		{"enhanced/no private data", "E5", nil, reply(enhanced, 2, 0, nil), nil, iwarp.ErrProtocol, nil},
		{"enhanced/three bytes", "E5", nil, reply(enhanced, 2, -1, depths[:3]), nil, iwarp.ErrProtocol, nil},
		{"FIN/at once", "M113", nil, nil, (*peer.Stream).CloseWrite, iwarp.ErrRefused, nil},
		{"FIN/in the frame", "M113", nil, reply(enhanced, 2, -1, depths)[:22], (*peer.Stream).CloseWrite, iwarp.ErrRefused, nil},
		{"RST/at once", "M113", nil, nil, (*peer.Stream).Reset, iwarp.ErrRefused, nil},
		{"RST/in the frame", "M113", nil, reply(enhanced, 2, -1, depths)[:18], (*peer.Stream).Reset, iwarp.ErrRefused, nil},
		{"silence/at once", "M107", nil, nil, nil, iwarp.ErrTimeout, nil},
		{"silence/in the frame", "M107", nil, reply(enhanced, 2, -1, depths)[:20], nil, iwarp.ErrTimeout, nil},
		{"reject", "M95", nil, reply(enhanced|peer.FlagReject, 2, -1, append(bytes.Clone(depths), "go away"...)), nil, iwarp.ErrRejected, nil},
		{"reject/FPDU behind it", "M95", nil, append(reply(enhanced|peer.FlagReject, 2, -1, append(bytes.Clone(depths), "go away"...)), peer.FPDU(peer.SendMsg(1, nil))...), nil, iwarp.ErrRejected, nil},
		{"depths/more IRD wanted than there is", "E16", deep, reply(enhanced, 2, -1, []byte{0, 4, 0x3f, 0xfe}), nil, iwarp.ErrProtocol, peer.Term(2, 0, 6, nil, false)},
		{"RTR/none taken", "E31", p2p, reply(enhanced, 2, -1, []byte{0x80, 4, 0, 4}), nil, iwarp.ErrProtocol, peer.Term(2, 0, 7, nil, false)},
		{"RTR/A is clear", "E31", p2p, reply(enhanced, 2, -1, []byte{0, 4, 0, 4}), nil, iwarp.ErrProtocol, peer.Term(2, 0, 7, nil, false)},
		{"RTR/A is clear, B to D are set", "E31, E35", p2p, reply(enhanced, 2, -1, []byte{0x40, 4, 0xc0, 4}), nil, iwarp.ErrProtocol, peer.Term(2, 0, 7, nil, false)},
		{"RTR/one that was not offered", "E31", func(o *iwarp.Startup) { o.PeerToPeer, o.RTR = true, iwarp.RTRWrite }, reply(enhanced, 2, -1, []byte{0xc0, 4, 0, 4}), nil, iwarp.ErrProtocol, peer.Term(2, 0, 7, nil, false)},
		{"RTR/Read without an IRD", "E31, E10", p2p, reply(enhanced, 2, -1, []byte{0x80, 0, 0x40, 4}), nil, iwarp.ErrProtocol, peer.Term(2, 0, 7, nil, false)},
	}
	w := newWorld(t)
	w.host.Listen(port)
	before := w.snapshot()
	for _, a := range attacks {
		checkRules(t, a.name, a.rules)
		t.Run(a.name, func(t *testing.T) {
			st := iwarp.Startup{NoFallback: true, NoPeerToPeer: true}
			if strings.HasPrefix(a.name, "silence") {
				st.Timeout = 2 * time.Second // the Request must arrive before that, on a busy machine too
			}
			if a.setup != nil {
				a.setup(&st)
				st.NoPeerToPeer = !st.PeerToPeer
			}
			c := &conn{world: w, t: t}
			c.qp, c.scq, c.rcq = w.newQP(t)
			c.postRecvs(slots)
			result := w.connect(c.qp, st)
			var err error
			if c.s, err = w.host.Accept(port); err != nil {
				t.Fatal(err)
			}
			defer c.destroy()
			if _, err := c.s.ReadFrame(); err != nil {
				t.Fatal(err)
			}
			if err := c.s.Send(a.reply); err != nil {
				t.Fatal(err)
			}
			if a.then != nil {
				if err := a.then(c.s); err != nil {
					t.Fatal(err)
				}
			}
			if a.term != nil {
				c.r = &peer.Reader{S: c.s, CRC: true}
				if u := c.next(); !bytes.Equal(u, a.term) {
					t.Errorf("Terminate\n% x\nwant\n% x", u, a.term)
				}
				c.end(finished)
				if err := c.s.CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			got := w.result(t, result)
			if !errors.Is(got, a.want) {
				t.Errorf("Connect returns %v; want %v", got, a.want)
			}
			if re, ok := errors.AsType[*iwarp.RejectError](got); ok && string(re.PrivateData) != "go away" {
				t.Errorf("rejected with %q", re.PrivateData)
			}
			if len(c.s.In) > 0 {
				t.Errorf("the node answers % x", c.s.In)
			}
		})
		if err := w.good.beat(); err != nil {
			t.Fatalf("after %q: %v", a.name, err)
		}
	}
	w.unchanged(t, before)
	w.alone(t)
	t.Logf("%d attacks", len(attacks))
}

// TestInitiatorEarlyFPDU checks that messages arrive from a responder that does not wait for the initiator's first
// FPDU, whether its own FPDU comes with the Reply or after it.
func TestInitiatorEarlyFPDU(t *testing.T) {
	w := newWorld(t)
	w.host.Listen(port)
	accepted := reply(enhanced, 2, -1, []byte{0, 4, 0, 4})
	both := append(bytes.Clone(accepted), peer.FPDU(peer.SendMsg(1, []byte("too early")))...)
	for _, cut := range []int{len(accepted) - 1, len(accepted), len(accepted) + 1, len(both) - 1, len(both)} {
		c := &conn{world: w, t: t}
		c.qp, c.scq, c.rcq = w.newQP(t)
		c.postRecvs(slots)
		result := w.connect(c.qp, iwarp.Startup{NoFallback: true, NoPeerToPeer: true})
		var err error
		if c.s, err = w.host.Accept(port); err != nil {
			t.Fatal(err)
		}
		if _, err := c.s.ReadFrame(); err != nil {
			t.Fatal(err)
		}
		for _, b := range [][]byte{both[:cut], both[cut:]} {
			if err := c.s.Send(b); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.result(t, result); err != nil {
			t.Errorf("cut at %d: Connect returns %v", cut, err)
		}
		c.until("the message", func() bool { return len(c.got) > 0 })
		if wc := c.got[0]; wc.Status != iwarp.WCSuccess || wc.Len != 9 {
			t.Errorf("cut at %d: received %+v", cut, wc)
		}
		c.destroy()
	}
	w.alone(t)
}

// connect makes the application connect to the raw peer.
func (w *world) connect(q *iwarp.QP, s iwarp.Startup) chan error {
	result := make(chan error, 1)
	go func() {
		_, err := q.Connect(w.ctx, netip.AddrPortFrom(peerAddr, port).String(), &iwarp.Config{Startup: s})
		result <- err
	}()
	return result
}

func (w *world) result(t testing.TB, ch chan error) (err error) {
	t.Helper()
	if uerr := w.host.Until("Connect", func() bool {
		select {
		case err = <-ch:
			return true
		default:
			return false
		}
	}); uerr != nil {
		t.Fatal(uerr)
	}
	return err
}

// TestFallback checks that a peer that rejects enhanced setup is asked once more without it (RFC 6581 section 10).
func TestFallback(t *testing.T) {
	w := newWorld(t)
	w.host.Listen(port)
	for _, f := range []struct {
		name  string
		setup iwarp.Startup
		first func(s *peer.Stream) error
		flags byte // of the second Request
		rev   byte
	}{
		{"the first is reset", iwarp.Startup{}, (*peer.Stream).Reset, crc, 1},
		{"the first is closed", iwarp.Startup{}, (*peer.Stream).CloseWrite, crc, 1},
		{"the first is answered in revision 1", iwarp.Startup{}, func(s *peer.Stream) error { return s.Send(reply(crc, 1, -1, nil)) }, crc, 1},
		{"markers are refused", iwarp.Startup{Markers: true, Revision: 1}, func(s *peer.Stream) error {
			return s.Send(reply(peer.FlagReject, 1, -1, nil))
		}, crc, 1},
	} {
		t.Run(f.name, func(t *testing.T) {
			c := &conn{world: w, t: t}
			c.qp, c.scq, c.rcq = w.newQP(t)
			c.postRecvs(slots)
			result := w.connect(c.qp, f.setup)
			first, err := w.host.Accept(port)
			if err != nil {
				t.Fatal(err)
			}
			defer first.Forget()
			if _, err := first.ReadFrame(); err != nil {
				t.Fatal(err)
			}
			if err := f.first(first); err != nil {
				t.Fatal(err)
			}
			if c.s, err = w.host.Accept(port); err != nil {
				t.Fatal(err)
			}
			defer c.destroy()
			r, err := c.s.ReadFrame()
			if err != nil || r.Flags != f.flags || r.Rev != f.rev {
				t.Fatalf("second Request %+v, %v", r, err)
			}
			if err := c.s.Send(reply(crc, f.rev, -1, nil)); err != nil {
				t.Fatal(err)
			}
			if err := w.result(t, result); err != nil {
				t.Fatal(err)
			}
			c.stillWorks(1)
		})
		if err := w.good.beat(); err != nil {
			t.Fatalf("after %q: %v", f.name, err)
		}
	}
}
