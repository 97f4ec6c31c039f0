package adversary

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// A state is the state of a connection when its peer ends it.
type state struct {
	name      string
	opts      options
	reach     func(c *conn)
	delivered int
	changed   []string
}

// TestEnds ends the connection by a FIN and by a RST in each state of MPA and RDMAP. Only a FIN is answered, posted
// work is flushed once, and other connections are unaffected.
func TestEnds(t *testing.T) {
	hello := peer.SendMsg(1, []byte("hello"))
	rtr := func(b, c, d bool) options { return options{rtr: peer.Enhanced(true, b, c, d, 4, 4)} }
	piece := func(us ...[]byte) func(c *conn) { return func(c *conn) { c.send(us...) } }
	raw := func(b []byte) func(c *conn) { return func(c *conn) { c.raw(b) } }
	readReq := peer.ReadReq{Sink: 7, SinkTO: 9}.Bytes()
	atomicReq := peer.Atomic{ID: 1}.Bytes()
	var states []state

	// Every byte of an FPDU, and of one with markers at its front and within.
	for n := 1; n < len(peer.FPDU(hello)); n++ {
		states = append(states, state{name: fmt.Sprintf("behind %d bytes of an FPDU", n), reach: raw(peer.FPDU(hello)[:n])})
	}
	for _, n := range []int{1, 3, 4, 5, 511, 512, 513, 515, 516} {
		states = append(states, state{name: fmt.Sprintf("behind %d bytes of an FPDU with markers", n), opts: options{on: onMarked},
			reach: func(c *conn) {
				c.raw(peer.Marked(0, peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000, long), nil)[:n])
			}})
	}
	for name, o := range map[string]options{"Send": rtr(true, false, false), "Write": rtr(false, true, false), "Read": rtr(false, false, true)} {
		states = append(states,
			state{name: "before an RTR that is a " + name, opts: o, reach: func(*conn) {}},
			state{name: "in an RTR that is a " + name, opts: o, reach: raw(peer.FPDU(peer.SendMsg(1, nil))[:9])})
	}
	states = append(states,
		state{name: "behind an RTR", opts: rtr(false, true, false), reach: piece(peer.Tagged(peer.Write, true, 0, 0, nil))},
		state{name: "before any FPDU, with a Send posted", reach: func(c *conn) {
			c.post(iwarp.SendWR{ID: 1, Op: iwarp.OpSend, SGEs: []iwarp.SGE{c.regions["all"].SGE(0, 8)}})
		}},

		state{name: "in a Send", reach: piece(peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]))},
		state{name: "in the second Send", delivered: 1, reach: func(c *conn) {
			c.send(hello, peer.Untagged(peer.Send, false, 0, 0, 2, 0, long[:8]))
			c.until("first Send", func() bool { return len(c.got) == 1 })
		}},
		state{name: "in a Send with Invalidate", reach: func(c *conn) {
			s := c.bindWindow(0, iwarp.AccessRemoteWrite)
			c.send(peer.Untagged(peer.SendInv, false, s, 0, 1, 0, long[:8]))
		}},
		state{name: "in a Write", changed: []string{"all"}, reach: func(c *conn) {
			c.send(peer.Tagged(peer.Write, false, c.regions["all"].RKey(), 0x10000, long[:8]))
		}},
		state{name: "in a Read Request", reach: piece(peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, readReq[:8]))},
		state{name: "in an Atomic Request", reach: piece(peer.Untagged(peer.AtomicRequest, false, 0, 1, 1, 0, atomicReq[:40]))},
		state{name: "in a Terminate", reach: piece(peer.Untagged(peer.Terminate, false, 0, 2, 1, 0, []byte{0x11, 1}))},

		state{name: "with a Read outstanding", reach: func(c *conn) { c.read(64) }},
		state{name: "with an atomic outstanding", reach: func(c *conn) { c.fetchAdd() }},
		state{name: "with Reads and an atomic outstanding, and a Send behind a fence", reach: func(c *conn) {
			c.read(64)
			sink := c.regions["sink"]
			c.post(iwarp.SendWR{ID: 2, Op: iwarp.OpFetchAdd, SGEs: []iwarp.SGE{sink.SGE(256, 8)}, RKey: 1, Remote: 8})
			c.next()
			c.post(iwarp.SendWR{ID: 3, Op: iwarp.OpRead, SGEs: []iwarp.SGE{sink.SGE(512, 8)}, RKey: 1})
			c.next()
			c.post(iwarp.SendWR{ID: 4, Op: iwarp.OpSend, Flags: iwarp.Fence, SGEs: []iwarp.SGE{sink.SGE(0, 8)}})
		}},
		state{name: "in a Read Response", changed: []string{"sink"}, reach: func(c *conn) {
			r := c.read(64)
			c.send(peer.Tagged(peer.ReadResponse, false, r.Sink, r.SinkTO, long[:32]))
		}},
		state{name: "in an Atomic Response", reach: func(c *conn) {
			c.send(peer.Untagged(peer.AtomicResponse, false, 0, 3, 1, 0, peer.AtomicResp(1, c.fetchAdd(), 1)[18:24]))
		}},
		state{name: "behind an Atomic Response", changed: []string{"sink"}, reach: func(c *conn) {
			c.send(peer.AtomicResp(1, c.fetchAdd(), 1))
			c.until("atomic completed", func() bool { return len(c.sent) == 1 })
		}},
		state{name: "behind a Read that was answered", reach: func(c *conn) {
			c.send(peer.ReadReq{Sink: 7, Size: 4, Src: c.regions["all"].RKey(), SrcTO: 0x10000}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 7, 0, c.regions["all"].Bytes()[:4]))
		}},
		state{name: "with a window bound", reach: func(c *conn) { c.bindWindow(0, iwarp.AccessRemoteWrite) }},

		// Segments after a gap are never processed if the connection ends before the gap is filled.
		state{name: "with a segment behind a gap", reach: func(c *conn) {
			c.sendAt(100, peer.FPDU(peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000, long[:64])))
		}},
		state{name: "with a Send placed behind a gap", opts: options{on: onMarked}, reach: func(c *conn) {
			gap := peer.Marked(0, peer.Tagged(peer.Write, true, 0, 0, nil), nil)
			c.sendAt(len(gap), peer.Marked(len(gap), peer.SendMsg(1, long[:slot]), nil))
		}},
	)

	var attacks []attack
	for _, s := range states {
		for _, e := range []struct {
			name string
			do   func(*peer.Stream) error
			want outcomeKind
		}{{"FIN", (*peer.Stream).CloseWrite, finished}, {"RST", (*peer.Stream).Reset, cut}} {
			attacks = append(attacks, attack{
				name: e.name + " " + s.name, rules: "M11, M112, M113, D11, D77, D78", opts: s.opts, want: outcome{kind: e.want},
				delivered: s.delivered, changed: s.changed,
				run: func(c *conn) []byte {
					s.reach(c)
					if err := e.do(c.s); err != nil {
						c.t.Fatal(err)
					}
					return nil
				},
			})
		}
	}

	// Ends that cross the node's own.
	both := func(name, rules string, want outcome, run func(c *conn) []byte) {
		attacks = append(attacks, attack{name: name, rules: rules, want: want, run: run})
	}
	both("RST behind FIN", "M113, D74", outcome{kind: cut}, func(c *conn) []byte {
		c.begin()
		_ = c.s.CloseWrite()
		_ = c.s.Reset()
		return nil
	})
	both("RST behind FIN, with Read Requests unanswered", "M113, D74", outcome{kind: cut}, func(c *conn) []byte {
		u := peer.ReadReq{Sink: 7, Size: regionSize, Src: c.regions["readable"].RKey(), SrcTO: 0x20000}
		c.send(u.Msg(1), u.Msg(2))
		_ = c.s.CloseWrite()
		_ = c.s.Reset()
		return nil
	})
	both("RST behind Read Requests", "M113", outcome{kind: cut}, func(c *conn) []byte {
		u := peer.ReadReq{Sink: 7, Size: regionSize, Src: c.regions["readable"].RKey(), SrcTO: 0x20000}
		c.send(u.Msg(1), u.Msg(2), u.Msg(3))
		_ = c.s.Reset()
		return nil
	})
	bad := peer.Tagged(peer.Write, true, 0, 0, long[:8])
	both("FIN behind what gets a Terminate", "D98, R111", taggedErr(0), func(c *conn) []byte {
		c.send(bad)
		_ = c.s.CloseWrite()
		return bad
	})
	both("RST behind what gets a Terminate", "D98, M113", outcome{kind: cut}, func(c *conn) []byte {
		c.send(bad)
		_ = c.s.Reset()
		return nil
	})
	both("RST behind the node's Terminate", "D98, M113", outcome{kind: cut}, func(c *conn) []byte {
		c.send(bad)
		c.want(peer.Term(1, 1, 0, bad, false))
		c.end(finished)
		_ = c.s.Reset()
		return nil
	})
	both("FIN behind a Terminate", "R85", outcome{kind: finished}, func(c *conn) []byte {
		c.send(peer.Term(1, 1, 1, nil, false))
		_ = c.s.CloseWrite()
		return nil
	})
	both("RST behind a Terminate", "R85, M113", outcome{kind: cut}, func(c *conn) []byte {
		c.send(peer.Term(1, 1, 1, nil, false))
		_ = c.s.Reset()
		return nil
	})
	leave := func(c *conn) {
		c.begin()
		if err := c.qp.Disconnect(c.ctx); err != nil {
			c.t.Fatal(err)
		}
		c.end(finished)
	}
	both("FIN behind the node's FIN", "D76", outcome{kind: finished}, func(c *conn) []byte { leave(c); return nil })
	both("RST behind the node's FIN", "M113", outcome{kind: cut}, func(c *conn) []byte { leave(c); _ = c.s.Reset(); return nil })
	both("a Write and a Send behind the node's FIN", "D76", outcome{kind: finished}, func(c *conn) []byte {
		leave(c)
		c.send(peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000, long[:64]), hello)
		return nil
	})
	runAttacks(t, attacks)
}

// TestEndsOfInitiator is TestEnds where the node has sent the Request: the raw peer
// accepts it, and ends the connection.
func TestEndsOfInitiator(t *testing.T) {
	w := newWorld(t)
	w.host.Listen(port)
	depths := []byte{0, 4, 0, 4}
	accepted := reply(enhanced, 2, -1, depths)
	send := func(c *conn) { // the initiator may send first
		c.post(iwarp.SendWR{ID: 1, Op: iwarp.OpSend, SGEs: []iwarp.SGE{c.regions["all"].SGE(0, 8)}})
		c.next()
	}
	states := []struct {
		name  string
		setup iwarp.Startup
		reply []byte
		fails error // of Connect
		reach func(c *conn)
	}{
		{name: "behind the Reply", reply: accepted},
		{name: "behind its Send", reply: accepted, reach: send},
		{name: "with its Read outstanding", reply: accepted, reach: func(c *conn) {
			c.post(iwarp.SendWR{ID: 1, Op: iwarp.OpRead, SGEs: []iwarp.SGE{c.regions["sink"].SGE(0, 8)}, RKey: 1})
			c.next()
		}},
		{name: "with a segment of an answer behind a gap", reply: accepted, reach: func(c *conn) {
			send(c)
			c.sendAt(8, peer.FPDU(peer.SendMsg(1, long[:8])))
		}},
		{name: "behind its RTR, a Write", setup: iwarp.Startup{PeerToPeer: true}, reply: reply(enhanced, 2, -1, []byte{0x80, 4, 0x80, 4}),
			reach: func(c *conn) { c.want(peer.Tagged(peer.Write, true, 1, 0, nil)) }},
		{name: "behind its RTR, a Send", setup: iwarp.Startup{PeerToPeer: true}, reply: reply(enhanced, 2, -1, []byte{0xc0, 4, 0, 4}),
			reach: func(c *conn) { c.want(peer.SendMsg(1, nil)) }},
		{name: "behind its RTR, a Read", setup: iwarp.Startup{PeerToPeer: true}, reply: reply(enhanced, 2, -1, []byte{0x80, 4, 0x40, 4}),
			reach: func(c *conn) { c.want(peer.ReadReq{Sink: 1, Src: 1}.Msg(1)) }},
		{name: "in the answer to its RTR, a Read", setup: iwarp.Startup{PeerToPeer: true}, reply: reply(enhanced, 2, -1, []byte{0x80, 4, 0x40, 4}),
			reach: func(c *conn) { c.next(); c.raw(peer.FPDU(peer.Tagged(peer.ReadResponse, true, 1, 0, nil))[:12]) }},
		{name: "instead of its Terminate", setup: iwarp.Startup{IRD: 4, ORD: 4}, reply: reply(enhanced, 2, -1, []byte{0, 4, 0x3f, 0xfe}), fails: iwarp.ErrProtocol},
		{name: "behind a rejection", reply: reply(enhanced|peer.FlagReject, 2, -1, depths), fails: iwarp.ErrRejected},
	}
	before := w.snapshot()
	for _, s := range states {
		for name, end := range map[string]func(*peer.Stream) error{"FIN": (*peer.Stream).CloseWrite, "RST": (*peer.Stream).Reset} {
			t.Run(name+" "+s.name, func(t *testing.T) {
				s.setup.NoFallback, s.setup.NoPeerToPeer = true, !s.setup.PeerToPeer
				c := &conn{world: w, t: t}
				c.qp, c.scq, c.rcq = w.newQP(t)
				c.postRecvs(slots)
				result := w.connect(c.qp, s.setup)
				var err error
				if c.s, err = w.host.Accept(port); err != nil {
					t.Fatal(err)
				}
				defer c.destroy()
				c.r = &peer.Reader{S: c.s, CRC: true}
				if _, err := c.s.ReadFrame(); err != nil {
					t.Fatal(err)
				}
				if err := c.s.Send(s.reply); err != nil {
					t.Fatal(err)
				}
				if s.fails == nil {
					if err := w.result(t, result); err != nil {
						t.Fatal(err)
					}
				}
				if s.reach != nil {
					s.reach(c)
				}
				if err := end(c.s); err != nil {
					t.Fatal(err)
				}
				if s.fails != nil {
					if err := w.result(t, result); !errors.Is(err, s.fails) {
						t.Errorf("Connect returns %v; want %v", err, s.fails)
					}
					return
				}
				if err := c.over(); err == nil {
					t.Error("the application gets no event")
				}
				if err := w.good.beat(); err != nil { // after everything that the node sent
					t.Fatal(err)
				}
				if c.s.RST || c.s.FIN != (name == "FIN") {
					t.Errorf("the node ends with FIN %v, RST %v", c.s.FIN, c.s.RST)
				}
				// An initiator that receives nothing sends empty Writes.
				for empty := peer.Tagged(peer.Write, true, 1, 0, nil); len(c.s.In) > 0; {
					if u := c.next(); !bytes.Equal(u, empty) {
						t.Errorf("the node sends % x", u)
					}
				}
				for i, wc := range c.got {
					if wc.ID != uint64(i) || wc.Status != iwarp.WCFlushErr {
						t.Errorf("receive completes as %+v", wc)
					}
				}
			})
			if err := w.good.beat(); err != nil {
				t.Fatalf("after %q: %v", s.name, err)
			}
		}
	}
	w.unchanged(t, before)
	w.alone(t)
}
