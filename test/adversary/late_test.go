package adversary

import (
	"bytes"
	"fmt"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// untilSent waits for the first completion of the send queue, which must have the status.
func (c *conn) untilSent(status iwarp.WCStatus) {
	c.t.Helper()
	c.until("work request completed", func() bool { return len(c.sent) > 0 })
	if wc := c.sent[0]; wc.Status != status {
		c.t.Errorf("work request completes as %+v; want status %v", wc, status)
	}
}

// TestOldKeys uses the keys that windows and fast-registered regions had before they were invalidated and made valid
// again with another key.
func TestOldKeys(t *testing.T) {
	const old, now = 0x11, 0x12
	const rights = iwarp.AccessLocalWrite | iwarp.AccessRemoteRead | iwarp.AccessRemoteWrite | iwarp.AccessRemoteAtomic
	// Each kind of STag is made valid by the work request that valid returns.
	kinds := []struct {
		name  string
		valid func(c *conn) (stag uint32, wr func(key uint8) iwarp.SendWR)
	}{
		{"window", func(c *conn) (uint32, func(uint8) iwarp.SendWR) {
			mw, err := c.pd.AllocMW(c.ctx)
			if err != nil {
				c.t.Fatal(err)
			}
			c.t.Cleanup(func() { _ = mw.Close() })
			return mw.RKey() &^ 0xff, func(key uint8) iwarp.SendWR {
				return iwarp.SendWR{ID: 7, Op: iwarp.OpBindMW, RKey: mw.RKey()&^0xff | uint32(key),
					SGEs: []iwarp.SGE{c.regions["all"].SGE(0, 64)}, Access: rights &^ iwarp.AccessLocalWrite}
			}
		}},
		{"fast registration", func(c *conn) (uint32, func(uint8) iwarp.SendWR) {
			mr, err := c.pd.AllocFast(c.ctx, regionSize, rights)
			if err != nil {
				c.t.Fatal(err)
			}
			c.t.Cleanup(func() { _ = mr.Close() })
			return mr.RKey() &^ 0xff, func(key uint8) iwarp.SendWR { return mr.Reg(7, key, 0x10000, 0, 64, rights) }
		}},
	}
	// Each use of the STag, as message msn of its queue. The answer is nil if there is none.
	uses := []struct {
		name string
		msg  func(stag, sends uint32) []byte
		want outcome
	}{
		{"Write", func(s, _ uint32) []byte { return peer.Tagged(peer.Write, true, s, 0x10000, long[:8]) }, taggedErr(0)},
		{"Read", func(s, _ uint32) []byte { return peer.ReadReq{Sink: 5, Size: 8, Src: s, SrcTO: 0x10000}.Msg(1) }, protection(0, withRDMA)},
		{"atomic", func(s, _ uint32) []byte { return peer.Atomic{STag: s, TO: 0x10000}.Msg(1) }, protection(0, withDDP)},
		{"Send with Invalidate", func(s, n uint32) []byte { return peer.Untagged(peer.SendInv, true, s, 0, n, 0, long[:8]) }, operation(9)},
	}
	var attacks []attack
	for _, k := range kinds {
		for _, u := range uses {
			for _, invalidate := range []string{"the application", "the peer"} {
				a := attack{name: fmt.Sprintf("%s/%s, invalidated by %s", k.name, u.name, invalidate), rules: "D92, R127, R122, R139", want: u.want}
				if invalidate == "the peer" {
					a.delivered = 1
				}
				a.run = func(c *conn) []byte {
					c.begin()
					stag, valid := k.valid(c)
					make := func(key uint8) {
						c.post(valid(key))
						c.local(7)
					}
					make(old)
					if n := uint32(a.delivered); n > 0 {
						c.send(peer.Untagged(peer.SendInv, true, stag|old, 0, n, 0, nil))
						c.until("invalidation", func() bool { return len(c.got) == 1 })
					} else {
						c.invalidate(stag | old)
					}
					make(now)
					g := u.msg(stag|old, uint32(a.delivered)+1)
					c.send(g)
					return g
				}
				attacks = append(attacks, a)
			}
			// The same use with the valid key succeeds.
			attacks = append(attacks, attack{name: k.name + "/" + u.name + " by the new key", rules: "R139", run: func(c *conn) []byte {
				c.begin()
				stag, valid := k.valid(c)
				c.post(valid(old))
				c.local(7)
				c.invalidate(stag | old)
				c.post(valid(now))
				c.local(7)
				c.send(u.msg(stag|now, 1))
				if u.want.typ == 1 && u.want.layer == 0 { // a request, which gets a response
					c.next()
				}
				return nil
			}, changed: []string{"all"}}.with(func(a *attack) {
				if u.name == "Send with Invalidate" {
					a.delivered, a.msn = 1, 2
				}
			}))
		}
	}
	runAttacks(t, attacks)
}

// TestNothing sends every message without payload, to invalid places.
func TestNothing(t *testing.T) {
	const nowhere = 0xdeadbeef
	taken := func(a *attack) { a.delivered, a.msn = 1, 2 }
	untagged := func(op byte, inv uint32) []byte { return peer.Untagged(op, true, inv, 0, 1, 0, nil) }
	readNothing := func(c *conn) peer.ReadReq { return c.read(0) }
	attacks := []attack{
		last("Write/wraps", "D58, D59", outcome{}, peer.Tagged(peer.Write, true, 1, ^uint64(0), nil)),
		last("Write/in two segments", "D58, D59", outcome{}, peer.Tagged(peer.Write, false, nowhere, 5, nil), peer.Tagged(peer.Write, true, nowhere+1, 3, nil)),
		{name: "Write/to a window of another stream", rules: "D59", run: func(c *conn) []byte {
			c.send(peer.Tagged(peer.Write, true, c.neighbour(iwarp.AccessRemoteWrite), 0x10000, nil))
			return nil
		}},
		{name: "Write/early", rules: "D59", opts: options{on: onMarked}, run: func(c *conn) []byte {
			one := peer.Marked(0, peer.Tagged(peer.Write, true, nowhere, 1, nil), nil)
			two := peer.Marked(len(one), peer.Tagged(peer.Write, true, nowhere, ^uint64(0), nil), nil)
			c.sendAt(len(one), two)
			c.raw(one)
			c.s.Advance(len(two))
			c.at += len(two)
			return nil
		}},
		last("Send", "R72, R73", outcome{}, untagged(peer.Send, 0)).with(taken),
		last("Send/the Invalidate STag is nothing to it", "R12", outcome{}, untagged(peer.Send, nowhere)).with(taken),
		last("Send with Solicited Event", "R72, R73", outcome{}, untagged(peer.SendSE, 0)).with(taken),
		last("Send/no bytes far behind the buffer, then all", "D82", outcome{}, peer.Untagged(peer.Send, false, 0, 0, 1, 0xffffffff, nil), peer.SendMsg(1, long[:8])).with(taken),
		last("Send/no bytes far behind the buffer, and the last", "D67, D84", untaggedErr(4), peer.Untagged(peer.Send, true, 0, 0, 1, 0xffffffff, nil)),
		last("Send with Solicited Event and Invalidate/nowhere", "R122", operation(9), untagged(peer.SendSEInv, nowhere)),
		{name: "Send with Invalidate/of a window", rules: "R76, R139", want: taggedErr(0), delivered: 1, run: func(c *conn) []byte {
			s := c.bindWindow(0, iwarp.AccessRemoteWrite)
			u := peer.Tagged(peer.Write, true, s, 0x10000, long[:8])
			c.send(untagged(peer.SendInv, s), u)
			return u
		}},
		one("Send with Invalidate/of a window of another stream", "R123, R135", operation(9), func(c *conn) []byte {
			return untagged(peer.SendSEInv, c.neighbour(iwarp.AccessRemoteWrite))
		}),
		{name: "Read/from a window of another stream", rules: "R54, R55", run: func(c *conn) []byte {
			c.send(peer.ReadReq{Sink: 1, SinkTO: ^uint64(0), Src: c.neighbour(iwarp.AccessRemoteRead), SrcTO: 1}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 1, ^uint64(0), nil))
			return nil
		}},
		{name: "Read/from a region that only takes Writes", rules: "R54, R55", run: func(c *conn) []byte {
			c.send(peer.ReadReq{Src: c.regions["writable"].RKey()}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 0, 0, nil))
			return nil
		}},
		{name: "Read Response", rules: "R55, R59", run: func(c *conn) []byte {
			r := readNothing(c)
			c.send(peer.Tagged(peer.ReadResponse, true, r.Sink, r.SinkTO, nil))
			c.untilSent(iwarp.WCSuccess)
			return nil
		}},
		{name: "Read Response/from nowhere", rules: "D59, R59", run: func(c *conn) []byte {
			readNothing(c)
			c.send(peer.Tagged(peer.ReadResponse, true, nowhere, ^uint64(0), nil))
			c.untilSent(iwarp.WCSuccess)
			return nil
		}},
		{name: "Read Response/twice", rules: "R62", want: operation(6), run: func(c *conn) []byte {
			r := readNothing(c)
			u := peer.Tagged(peer.ReadResponse, true, r.Sink, r.SinkTO, nil)
			c.send(u, u)
			return u
		}},
		one("Read Response/of one byte to it", "R62", taggedErr(1), func(c *conn) []byte {
			r := readNothing(c)
			return peer.Tagged(peer.ReadResponse, true, r.Sink, r.SinkTO, long[:1])
		}),
		{name: "Read Response/none of the bytes, then all", rules: "D59, R59", changed: []string{"sink"}, run: func(c *conn) []byte {
			r := c.read(64)
			c.send(peer.Tagged(peer.ReadResponse, false, nowhere, 0, nil), peer.Tagged(peer.ReadResponse, true, r.Sink, r.SinkTO, long[:64]))
			c.untilSent(iwarp.WCSuccess)
			return nil
		}},
		one("Read Response/in place of an Atomic Response", "A36", operation(6), func(c *conn) []byte {
			c.fetchAdd()
			return peer.Tagged(peer.ReadResponse, true, 0, 0, nil)
		}),
		last("Atomic Response/to nothing", "A38", operation(0xff), peer.Untagged(peer.AtomicResponse, true, 0, 3, 1, 0, nil)),
		one("Atomic Response", "A39", operation(0xff), func(c *conn) []byte {
			c.fetchAdd()
			return peer.Untagged(peer.AtomicResponse, true, 0, 3, 1, 0, nil)
		}),
		last("Read Request/at the end of MO", "D84", untaggedErr(4), peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 0xffffffff, nil)),
		last("Terminate/at the end of MO", "D84", untaggedErr(4), peer.Untagged(peer.Terminate, true, 0, 2, 1, 0xffffffff, nil)),
	}
	// The node's own empty messages are sent as posted.
	for _, p := range []struct {
		name string
		wr   iwarp.SendWR
		want []byte
	}{
		{"Write", iwarp.SendWR{Op: iwarp.OpWrite, RKey: nowhere, Remote: ^uint64(0)}, peer.Tagged(peer.Write, true, nowhere, ^uint64(0), nil)},
		{"Send", iwarp.SendWR{Op: iwarp.OpSend}, peer.SendMsg(1, nil)},
		{"Send with Solicited Event", iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Solicited}, untagged(peer.SendSE, 0)},
		{"Send with Invalidate", iwarp.SendWR{Op: iwarp.OpSendInv, Inv: nowhere}, untagged(peer.SendInv, nowhere)},
		{"Send with Solicited Event and Invalidate", iwarp.SendWR{Op: iwarp.OpSendInv, Flags: iwarp.Solicited, Inv: nowhere}, untagged(peer.SendSEInv, nowhere)},
	} {
		attacks = append(attacks, attack{name: "from the node/" + p.name, rules: "R37, R72, D57", run: func(c *conn) []byte {
			c.begin()
			c.post(p.wr)
			c.want(p.want)
			c.untilSent(iwarp.WCSuccess)
			return nil
		}})
	}
	runAttacks(t, attacks)
}

// TestOutOfTurn sends messages of valid form at the wrong time: a Terminate within another message or about one that
// never existed, more of a message after its last segment, requests beyond IRD, offsets beyond 2^32 and 2^64.
func TestOutOfTurn(t *testing.T) {
	taken := outcome{kind: finished}
	term := peer.Term(1, 1, 1, nil, false)
	readReq, atomicReq := peer.ReadReq{Sink: 7, SinkTO: 9}.Bytes(), peer.Atomic{ID: 1}.Bytes()
	attacks := []attack{
		last("Terminate/in a Send", "R81, R85", taken, peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]), term),
		last("Terminate/in a Send, and its rest", "R84, R85", taken, peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]), term,
			peer.Untagged(peer.Send, true, 0, 0, 1, 8, long[:8])),
		last("Terminate/in a Read Request, and its rest", "R84, R85", taken, peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, readReq[:8]), term,
			peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 8, readReq[8:])),
		last("Terminate/in an Atomic Request, and its rest", "R84, R85", taken, peer.Untagged(peer.AtomicRequest, false, 0, 1, 1, 0, atomicReq[:8]), term,
			peer.Untagged(peer.AtomicRequest, true, 0, 1, 1, 8, atomicReq[8:])),
		{name: "Terminate/in a Write, and its rest", rules: "R84, R85", want: taken, run: func(c *conn) []byte {
			// The first segment is processed; here it changes nothing.
			k, b := c.regions["all"].RKey(), c.regions["all"].Bytes()
			c.send(peer.Tagged(peer.Write, false, k, 0x10000, b[:8]), term, peer.Tagged(peer.Write, true, k, 0x10008, long[:8]))
			return nil
		}},
		{name: "Terminate/in a Send with Invalidate, and its rest", rules: "R76, R84", want: taken, run: func(c *conn) []byte {
			s := c.bindWindow(0, iwarp.AccessRemoteWrite)
			c.send(peer.Untagged(peer.SendInv, false, s, 0, 1, 0, long[:8]), term, peer.Untagged(peer.SendInv, true, s, 0, 1, 8, nil))
			return nil
		}},
		{name: "Terminate/in an Atomic Response, and its rest", rules: "R84, R85", want: taken, run: func(c *conn) []byte {
			r := peer.AtomicResp(1, c.fetchAdd(), 1)[18:]
			c.send(peer.Untagged(peer.AtomicResponse, false, 0, 3, 1, 0, r[:4]), term, peer.Untagged(peer.AtomicResponse, true, 0, 3, 1, 4, r[4:]))
			return nil
		}},
		last("Terminate/in two, a Send between", "R80", taken, peer.Untagged(peer.Terminate, false, 0, 2, 1, 0, []byte{0x11, 1}),
			peer.SendMsg(1, long[:8]), peer.Untagged(peer.Terminate, true, 0, 2, 1, 2, []byte{0, 0})).delivering(1),
		last("Terminate/in two, a wrong segment between", "R118", untaggedErr(3), peer.Untagged(peer.Terminate, false, 0, 2, 1, 0, []byte{0x11, 1}),
			peer.SendMsg(9, long[:8])),

		// More segments of a message that is complete.
		last("behind L/Read Request", "D43", untaggedErr(3), peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 0, nil)).with(func(a *attack) {
			a.run = func(c *conn) []byte {
				c.send(peer.ReadReq{Sink: 7, SinkTO: 9}.Msg(1))
				c.want(peer.Tagged(peer.ReadResponse, true, 7, 9, nil))
				u := peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 28, readReq[:4])
				c.send(u)
				return u
			}
		}),
		one("behind L/Read Request, none of it", "D43", untaggedErr(3), func(c *conn) []byte {
			c.send(peer.ReadReq{Sink: 7, SinkTO: 9}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 7, 9, nil))
			return peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 28, nil)
		}),
		{name: "behind L/Atomic Request", rules: "D43", want: untaggedErr(3), changed: []string{"atomic"}, run: func(c *conn) []byte {
			a := peer.Atomic{STag: c.regions["atomic"].RKey(), TO: 0x50000, Data: 1}
			c.send(a.Msg(1))
			c.next()
			u := a.Msg(1)
			c.send(u)
			return u
		}},
		{name: "behind L/Atomic Response", rules: "A38", want: untaggedErr(2), changed: []string{"sink"}, run: func(c *conn) []byte {
			u := peer.AtomicResp(1, c.fetchAdd(), 1)
			c.send(u)
			c.untilSent(iwarp.WCSuccess)
			c.send(u)
			return u
		}},
		{name: "behind L/Atomic Response, with another atomic outstanding", rules: "D43", want: untaggedErr(3), changed: []string{"sink"}, run: func(c *conn) []byte {
			u := peer.AtomicResp(1, c.fetchAdd(), 1)
			c.send(u)
			c.untilSent(iwarp.WCSuccess)
			c.post(iwarp.SendWR{ID: 2, Op: iwarp.OpFetchAdd, SGEs: []iwarp.SGE{c.regions["sink"].SGE(256, 8)}, RKey: 1, Remote: 8})
			c.next()
			c.send(u)
			return u
		}},
		last("behind L/Immediate Data", "D43", untaggedErr(3), peer.Untagged(peer.Imm, true, 0, 0, 1, 0, long[:8]),
			peer.Untagged(peer.Imm, true, 0, 0, 1, 0, long[:8])).delivering(1),
		{name: "behind L/Write goes on", rules: "D53", changed: []string{"all"}, run: func(c *conn) []byte {
			k := c.regions["all"].RKey()
			c.send(peer.Tagged(peer.Write, true, k, 0x10000, long[:8]), peer.Tagged(peer.Write, false, k, 0x10008, long[:8]))
			return nil
		}},

		// Requests beyond IRD, each of them valid by itself.
		{name: "IRD/the same Read thrice", rules: "R107", want: operation(7), opts: options{ird: 2}, run: func(c *conn) []byte {
			return c.overflow(2, func(msn uint32) []byte {
				return peer.ReadReq{Sink: 1, Size: 64, Src: c.regions["all"].RKey(), SrcTO: 0x10000}.Msg(msn)
			})
		}},
		{name: "IRD/Reads and atomics count together", rules: "A37, R107", want: operation(7), opts: options{ird: 2}, run: func(c *conn) []byte {
			return c.overflow(2, func(msn uint32) []byte {
				if msn == 2 {
					return peer.Atomic{STag: c.regions["atomic"].RKey(), TO: 0x50000, Data: 1}.Msg(msn)
				}
				return peer.ReadReq{Sink: 1, Size: regionSize, Src: c.regions["all"].RKey(), SrcTO: 0x10000}.Msg(msn)
			})
		}},
		{name: "IRD/a wrong Read beyond it", rules: "R107, R118", want: operation(7), opts: options{ird: 1}, run: func(c *conn) []byte {
			return c.overflow(1, func(msn uint32) []byte {
				if msn == 1 {
					return peer.ReadReq{Sink: 1}.Msg(1)
				}
				return peer.ReadReq{Sink: 1, Size: 8}.Msg(msn)
			})
		}},
		{name: "IRD/full again and again", rules: "R104, R107", opts: options{ird: 2}, run: func(c *conn) []byte {
			for msn := uint32(1); msn < 9; msn += 2 {
				r := peer.ReadReq{Sink: 1, SinkTO: uint64(msn), Size: 8, Src: c.regions["all"].RKey(), SrcTO: 0x10000}
				c.send(r.Msg(msn), r.Msg(msn+1)) // the same place twice
				for range 2 {
					c.want(peer.Tagged(peer.ReadResponse, true, 1, uint64(msn), c.regions["all"].Bytes()[:8]))
				}
			}
			return nil
		}},

		// Offsets.
		last("MO/its sum is 2^32", "D84, D85", untaggedErr(4), peer.Untagged(peer.Send, true, 0, 0, 1, 0xfffffff8, long[:8])),
		last("MO/its sum wraps into the buffer", "D84, D85", untaggedErr(4), peer.Untagged(peer.Send, false, 0, 0, 1, 0xfffffff8, long[:24])),
		last("MO/wraps behind a first segment", "D84, D85", untaggedErr(4), peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:16]),
			peer.Untagged(peer.Send, true, 0, 0, 1, 0xfffffff8, long[:24])),
		last("MO/Read Request wraps behind a first segment", "D84, D85", untaggedErr(4), peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, readReq[:16]),
			peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 0xfffffff8, readReq[:24])),
		last("MO/Immediate Data at 2^32 - 8", "D84", untaggedErr(4), peer.Untagged(peer.Imm, true, 0, 0, 1, 0xfffffff8, long[:8])),
		{name: "TO/goes on behind 2^64", rules: "D93, D95", want: taggedErr(1), changed: []string{"top"}, run: func(c *conn) []byte {
			k := c.regions["top"].RKey()
			u := peer.Tagged(peer.Write, true, k, 0, long[:8])
			c.send(peer.Tagged(peer.Write, false, k, 0xfffffffffffffff0, long[:8]), u)
			return u
		}},
		one("TO/wraps to the start of a region", "D95", taggedErr(3), func(c *conn) []byte {
			return peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0xfffffffffffffff0, long[:64])
		}),
		{name: "TO/early Write wraps", rules: "D95", want: taggedErr(3), opts: options{on: onMarked}, delivered: 1, run: func(c *conn) []byte {
			one := peer.Marked(0, peer.SendMsg(1, long[:8]), nil)
			u := peer.Tagged(peer.Write, true, c.regions["top"].RKey(), 0xfffffffffffffff8, long[:16])
			c.sendAt(len(one), peer.Marked(len(one), u, nil))
			c.raw(one)
			c.s.Advance(len(peer.Marked(len(one), u, nil)))
			return u
		}},
		one("TO/Read Response wraps", "R62", taggedErr(1), func(c *conn) []byte {
			r := c.read(64)
			return peer.Tagged(peer.ReadResponse, true, r.Sink, 0xfffffffffffffff8, long[:64])
		}),
		{name: "TO/Read Response into the top, and right", rules: "R16, R60", changed: []string{"top"}, run: func(c *conn) []byte {
			c.begin()
			c.post(iwarp.SendWR{ID: 1, Op: iwarp.OpRead, SGEs: []iwarp.SGE{c.regions["top"].SGE(regionSize-16, 8)}, RKey: 1})
			r, ok := peer.DecodeReadReq(c.next())
			if !ok || r.SinkTO != 0xfffffffffffffff0 {
				c.t.Fatalf("Read Request %+v", r)
			}
			c.send(peer.Tagged(peer.ReadResponse, true, r.Sink, r.SinkTO, long[:8]))
			c.untilSent(iwarp.WCSuccess)
			return nil
		}},
	}
	// An early Read Response may be placed only in the sink of its Read.
	attacks = append(attacks, attack{name: "early/Read Response into another region", rules: "R62, R138", want: taggedErr(0), opts: options{on: onMarked}, run: func(c *conn) []byte {
		c.read(64)
		one := peer.Marked(c.at, peer.Tagged(peer.Write, true, 0, 0, nil), nil)
		u := peer.Tagged(peer.ReadResponse, true, c.regions["local"].RKey(), 0x40000, long[:600])
		two := peer.Marked(c.at+len(one), u, nil)
		c.sendAt(len(one), two)
		c.raw(one)
		c.s.Advance(len(two))
		return u
	}})

	// TCP may repeat the bytes of a segment together with others, or split them anywhere.
	write := func(c *conn, off int) []byte {
		return peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000+uint64(off), long[off:off+600])
	}
	segments := func(name string, on listenerKind, run func(c *conn, one, two []byte)) {
		attacks = append(attacks, attack{name: "segments/" + name, rules: "M29, M53, M127", opts: options{on: on}, changed: []string{"all"}, run: func(c *conn) []byte {
			c.begin()
			one := c.framed(write(c, 0))
			c.at += len(one)
			two := c.framed(write(c, 600))
			c.at -= len(one)
			run(c, one, two)
			c.until("both Writes", func() bool { return string(c.regions["all"].Bytes()[:1200]) == string(long[:1200]) })
			return nil
		}})
	}
	for on, kind := range map[listenerKind]string{onPlain: "", onMarked: ", with markers"} {
		segments("the second first, then both at once"+kind, on, func(c *conn, one, two []byte) {
			c.sendAt(len(one), two)
			c.raw(append(bytes.Clone(one), two...))
		})
		segments("a part of the second first, then all but its rest"+kind, on, func(c *conn, one, two []byte) {
			both := append(bytes.Clone(one), two...)
			c.sendAt(len(one)+100, two[100:])
			c.raw(both[:len(one)+301])
			c.s.Advance(len(both) - len(one) - 301)
			c.at += len(both) - len(one) - 301
		})
		segments("the second in two that overlap, then the first"+kind, on, func(c *conn, one, two []byte) {
			c.sendAt(len(one), two[:300])
			c.sendAt(len(one)+99, two[99:])
			c.raw(one)
			c.s.Advance(len(two))
			c.at += len(two)
		})
		segments("cut at odd places"+kind, on, func(c *conn, one, two []byte) {
			for both := append(bytes.Clone(one), two...); len(both) > 0; {
				n := min(69+len(both)%7*2, len(both))
				c.raw(both[:n])
				both = both[n:]
			}
		})
	}

	// A Terminate about a request that we never sent does not apply to our Read, which is flushed instead of refused.
	never := map[string][]byte{
		"a Send":                         peer.TermHeader(1, 2, 4, peer.SendMsg(1, long[:8]), false),
		"a Write":                        peer.TermHeader(1, 1, 0, peer.Tagged(peer.Write, true, 1, 2, long[:8]), false),
		"a Read Request by number":       peer.TermHeader(0, 1, 0, peer.ReadReq{Sink: 1}.Msg(2), false),
		"the Read Request before all":    peer.TermHeader(0, 1, 0, peer.ReadReq{Sink: 1}.Msg(0), false),
		"a Read Request by sink":         peer.TermHeader(0, 1, 0, peer.ReadReq{Sink: 1}.Msg(1), true),
		"an Atomic Request":              peer.TermHeader(0, 1, 0, peer.Atomic{}.Msg(2), false),
		"number 1 of the Sends' queue":   peer.TermHeader(0, 2, 6, peer.Untagged(peer.ReadRequest, true, 0, 0, 1, 0, nil), false),
		"a header of another version":    peer.TermHeader(1, 2, 6, peer.With(peer.ReadReq{Sink: 1}.Msg(1), 0, 0x42), false),
		"a Terminate":                    peer.TermHeader(0, 2, 6, term, false),
		"nothing, with a sink of ours":   {0x01, 0, 0x20, 0},
		"all bits, and one header alone": append([]byte{0x01, 0, 0xe0, 0, 0, 46}, peer.SendMsg(1, nil)...),
	}
	for name, payload := range never {
		attacks = append(attacks, attack{name: "Terminate/about " + name, rules: "R28, R109", want: taken, run: func(c *conn) []byte {
			c.read(64)
			c.send(peer.Untagged(peer.Terminate, true, 0, 2, 1, 0, payload))
			c.untilSent(iwarp.WCFlushErr)
			return nil
		}})
	}
	runAttacks(t, attacks)
}
