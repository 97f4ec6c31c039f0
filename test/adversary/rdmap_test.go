package adversary

import (
	"fmt"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// TestRDMAP breaks the rules of RFC 5040 and RFC 7306.
func TestRDMAP(t *testing.T) {
	runAttacks(t, append(opcodes(), append(versions(), append(reads(), append(responses(), append(invalidations(),
		append(immediates(), append(atomics(), terminates()...)...)...)...)...)...)...))
}

// opcodes sends each opcode on the wrong queue (R7 to R9, R120).
func opcodes() (as []attack) {
	queues := map[uint32][]byte{
		0: {peer.Send, peer.SendInv, peer.SendSE, peer.SendSEInv, peer.Imm, peer.ImmSE},
		1: {peer.ReadRequest, peer.AtomicRequest}, 2: {peer.Terminate}, 3: {peer.AtomicResponse},
	}
	for op := range byte(16) {
		if op != peer.Write && op != peer.ReadResponse {
			as = append(as, one(fmt.Sprintf("opcode/%#x tagged", op), "R6, R7, R120, A68", operation(6), func(c *conn) []byte {
				return peer.Tagged(op, true, c.regions["all"].RKey(), 0x10000, long[:8])
			}))
		}
	queue:
		for qn := range uint32(4) {
			for _, good := range queues[qn] {
				if op == good {
					continue queue
				}
			}
			as = append(as, last(fmt.Sprintf("opcode/%#x on queue %d", op, qn), "R8, R9, R125", operation(6),
				peer.Untagged(op, true, 0, qn, 1, 0, long[:8])))
		}
	}
	return as
}

func versions() (as []attack) {
	for _, v := range []byte{0, 2, 3} {
		for name, u := range map[string][]byte{
			"Write":             peer.Tagged(peer.Write, true, 0, 0, long[:8]),
			"Send":              peer.SendMsg(1, long[:8]),
			"Read Request":      peer.ReadReq{}.Msg(1),
			"Terminate":         peer.Term(1, 1, 0, nil, false),
			"Write of no bytes": peer.Tagged(peer.Write, true, 0, 0, nil),
		} {
			as = append(as, last(fmt.Sprintf("version/%d %s", v, name), "R10, R121, R126", operation(5), peer.With(u, 1, u[1]&0x0f|v<<6)))
		}
	}
	return as
}

// reads sends invalid Read Requests (R53, R107, R124 to R131).
func reads() []attack {
	from := func(name, rules string, code byte, src func(c *conn) (uint32, uint64), size uint32) attack {
		a := one("read/"+name, rules, protection(code, withRDMA), func(c *conn) []byte {
			s, to := src(c)
			return peer.ReadReq{Sink: 0x77, SinkTO: 0x88, Size: size, Src: s, SrcTO: to}.Msg(1)
		})
		return a
	}
	stag := func(f func(c *conn) uint32) func(c *conn) (uint32, uint64) {
		return func(c *conn) (uint32, uint64) { return f(c), 0x10000 }
	}
	at := func(region string, to uint64) func(c *conn) (uint32, uint64) {
		return func(c *conn) (uint32, uint64) { return c.regions[region].RKey(), to }
	}
	unspecified := operation(0xff)
	return []attack{
		from("stag 0", "R53, R117, R127", 0, stag(func(*conn) uint32 { return 0 }), 8),
		from("stag unknown", "R127", 0, stag(func(*conn) uint32 { return 0xdeadbeef }), 8),
		from("stag with a wrong key", "R127", 0, stag(func(c *conn) uint32 { return c.regions["all"].RKey() ^ 0x80 }), 8),
		from("stag deregistered", "R127, R139", 0, stag(func(c *conn) uint32 { return c.gone }), 8),
		from("stag of a window bound to nothing", "R127", 0, stag(func(c *conn) uint32 { return c.loose.RKey() }), 8),
		from("stag of a window invalidated", "R139", 0, stag(func(c *conn) uint32 {
			s := c.bindWindow(0, iwarp.AccessRemoteRead)
			c.invalidate(s)
			return s
		}), 8),
		from("window of another stream", "R128, R135", 3, stag(func(c *conn) uint32 { return c.neighbour(iwarp.AccessRemoteRead) }), 8),
		from("another PD", "R128, R134", 3, at("pd2", 0x80000), 8),
		from("another client's", "R128, R134", 3, at("foreign", 0x90000), 8),
		from("no right: write only", "R138", 2, at("writable", 0x30000), 8),
		from("no right: local", "R138", 2, at("local", 0x40000), 8),
		from("no right: atomics", "R138", 2, at("atomic", 0x50000), 8),
		from("no right: window", "R138", 2, stag(func(c *conn) uint32 { return c.bindWindow(0, iwarp.AccessRemoteWrite) }), 8),
		from("below", "R129", 1, at("all", 0xffff), 8),
		from("behind", "R129", 1, at("all", 0x10000+regionSize), 1),
		from("one byte too many", "R130", 1, at("all", 0x10000), regionSize+1),
		from("4 GiB", "R130", 1, at("all", 0x10000), 0xffffffff),
		from("straddles the end", "R130", 1, at("all", 0x10000+regionSize-7), 8),
		from("wraps at the top", "R131", 4, at("top", 0xfffffffffffffffc), 8),
		from("wraps, 4 GiB", "R131", 4, at("all", 0xffffffffffff0000), 0xffffffff),
		{name: "read/of nothing, from nowhere", rules: "R54, R55", run: func(c *conn) []byte {
			c.send(peer.ReadReq{Sink: 0x77, SinkTO: 0x88, Src: 0xdeadbeef, SrcTO: 0xffffffffffffffff}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 0x77, 0x88, nil))
			return nil
		}},
		{name: "read/right", rules: "R51", run: func(c *conn) []byte {
			c.send(peer.ReadReq{Sink: 0x77, SinkTO: 0xfffffffffffffffe, Size: 8, Src: c.regions["readable"].RKey(), SrcTO: 0x20000 + 16}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 0x77, 0xfffffffffffffffe, c.regions["readable"].Bytes()[16:24]))
			return nil
		}},
		last("read/header one byte short", "R14", unspecified, peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 0, peer.ReadReq{}.Bytes()[:27])),
		last("read/no header", "R14", unspecified, peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 0, nil)),
		last("read/in two segments, short", "R14", unspecified,
			peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, peer.ReadReq{}.Bytes()[:8]),
			peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 8, peer.ReadReq{}.Bytes()[8:20])),
		one("read/right ones before a wrong one are answered", "R47, R118", protection(0, withRDMA), func(c *conn) []byte {
			u := peer.ReadReq{Size: 1, Src: 0}.Msg(2)
			c.send(peer.ReadReq{Sink: 5, Size: 4, Src: c.regions["all"].RKey(), SrcTO: 0x10000}.Msg(1))
			c.want(peer.Tagged(peer.ReadResponse, true, 5, 0, c.regions["all"].Bytes()[:4]))
			return u
		}),
		{name: "read/one more than IRD", rules: "R107, R145", want: operation(7), opts: options{ird: 2}, run: func(c *conn) []byte {
			return c.overflow(2, func(msn uint32) []byte {
				return peer.ReadReq{Sink: 1, Size: regionSize, Src: c.regions["all"].RKey(), SrcTO: 0x10000}.Msg(msn)
			})
		}},
		{name: "atomic/one more than IRD", rules: "A37, R107", want: operation(7), opts: options{ird: 2}, run: func(c *conn) []byte {
			return c.overflow(2, func(msn uint32) []byte {
				return peer.Atomic{STag: c.regions["atomic"].RKey(), TO: 0x50000, Data: 1}.Msg(msn)
			})
		}},
	}
}

// want receives the node's next segment, which must be u.
func (c *conn) want(u []byte) {
	c.t.Helper()
	if got := c.next(); string(got) != string(u) {
		c.t.Fatalf("node sends\n% x\nwant\n% x", got, u)
	}
}

// overflow sends ird+1 requests in one segment, so that none is answered before the last has arrived.
func (c *conn) overflow(ird int, request func(msn uint32) []byte) (guilty []byte) {
	c.t.Helper()
	var us [][]byte
	for i := range ird + 1 {
		us = append(us, request(uint32(i+1)))
	}
	c.send(us...)
	return us[ird]
}

// responses sends Read Responses that do not match a request (R51, R62).
func responses() []attack {
	resp := func(name string, want outcome, f func(r peer.ReadReq) []byte) attack {
		return one("response/"+name, "R61, R62", want, func(c *conn) []byte { return f(c.read(64)) })
	}
	tagged := func(last bool, r peer.ReadReq, off, n int) []byte {
		return peer.Tagged(peer.ReadResponse, last, r.Sink, r.SinkTO+uint64(off), long[off:off+n])
	}
	changes := func(a attack) attack { a.changed = []string{"sink"}; return a }
	return []attack{
		one("response/to nothing", "R62", operation(6), func(c *conn) []byte {
			return peer.Tagged(peer.ReadResponse, true, c.regions["sink"].RKey(), 0x70000, long[:8])
		}),
		last("response/to nothing, of no bytes", "R62", operation(6), peer.Tagged(peer.ReadResponse, true, 0, 0, nil)),
		resp("another STag", taggedErr(0), func(r peer.ReadReq) []byte { r.Sink ^= 1; return tagged(true, r, 0, 64) }),
		one("response/another region", "R62", taggedErr(0), func(c *conn) []byte {
			c.read(64)
			return peer.Tagged(peer.ReadResponse, true, c.regions["all"].RKey(), 0x10000, long[:64])
		}),
		resp("another offset", taggedErr(1), func(r peer.ReadReq) []byte { r.SinkTO += 4; return tagged(true, r, 0, 64) }),
		resp("offset below", taggedErr(1), func(r peer.ReadReq) []byte { r.SinkTO--; return tagged(true, r, 0, 64) }),
		resp("too long", taggedErr(1), func(r peer.ReadReq) []byte { return tagged(true, r, 0, 65) }),
		resp("much too long", taggedErr(1), func(r peer.ReadReq) []byte { return tagged(true, r, 0, 1200) }),
		changes(resp("too short", taggedErr(1), func(r peer.ReadReq) []byte { return tagged(true, r, 0, 63) })),
		resp("of no bytes", taggedErr(1), func(r peer.ReadReq) []byte { return tagged(true, r, 0, 0) }),
		changes(attack{name: "response/gap", rules: "R62", want: taggedErr(1), run: func(c *conn) []byte {
			r := c.read(64)
			u := tagged(true, r, 40, 24)
			c.send(tagged(false, r, 0, 32), u)
			return u
		}}),
		changes(attack{name: "response/overlap", rules: "R62", want: taggedErr(1), run: func(c *conn) []byte {
			r := c.read(64)
			u := tagged(true, r, 24, 40)
			c.send(tagged(false, r, 0, 32), u)
			return u
		}}),
		changes(attack{name: "response/second behind the last", rules: "R62", want: operation(6), run: func(c *conn) []byte {
			r := c.read(64)
			u := tagged(true, r, 0, 64)
			c.send(u, u)
			return u
		}}),
		changes(attack{name: "response/Write into the sink of a Read", rules: "R138", want: taggedErr(0), run: func(c *conn) []byte {
			r := c.read(64)
			u := peer.Tagged(peer.Write, true, r.Sink, r.SinkTO, long[:8])
			c.send(u)
			return u
		}}),
		changes(attack{name: "response/to an atomic", rules: "A36", want: operation(6), run: func(c *conn) []byte {
			c.fetchAdd()
			u := peer.Tagged(peer.ReadResponse, true, c.regions["sink"].RKey(), 0x70000+128, long[:8])
			c.send(u)
			return u
		}}),
		changes(attack{name: "response/right", rules: "R59, R100", run: func(c *conn) []byte {
			r := c.read(64)
			c.send(tagged(false, r, 0, 32), tagged(true, r, 32, 32))
			c.until("Read completed", func() bool { return len(c.sent) == 1 })
			if wc := c.sent[0]; wc.Status != iwarp.WCSuccess || string(c.regions["sink"].Bytes()[128:192]) != string(long[:64]) {
				c.t.Errorf("completion %+v", wc)
			}
			return nil
		}}),
	}
}

// invalidations sends Sends with Invalidate of invalid STags (R76, R122, R123).
func invalidations() []attack {
	inv := func(name, rules string, op byte, stag func(c *conn) uint32) attack {
		return one("invalidate/"+name, rules, operation(9), func(c *conn) []byte {
			return peer.Untagged(op, true, stag(c), 0, 1, 0, long[:8])
		})
	}
	return []attack{
		inv("0", "R122", peer.SendInv, func(*conn) uint32 { return 0 }),
		inv("unknown", "R122", peer.SendInv, func(*conn) uint32 { return 0xdeadbeef }),
		inv("a region", "R140", peer.SendInv, func(c *conn) uint32 { return c.regions["all"].RKey() }),
		inv("a region, solicited", "R140", peer.SendSEInv, func(c *conn) uint32 { return c.regions["all"].RKey() }),
		inv("a region of another PD", "R123, R134", peer.SendInv, func(c *conn) uint32 { return c.regions["pd2"].RKey() }),
		inv("a region of another client", "R123, R134", peer.SendInv, func(c *conn) uint32 { return c.regions["foreign"].RKey() }),
		inv("deregistered", "R122", peer.SendInv, func(c *conn) uint32 { return c.gone }),
		inv("a window bound to nothing", "R122", peer.SendSEInv, func(c *conn) uint32 { return c.loose.RKey() }),
		inv("a window with a wrong key", "R122", peer.SendInv, func(c *conn) uint32 { return c.bindWindow(0, iwarp.AccessRemoteWrite) ^ 1 }),
		inv("a window of another stream", "R123, R135", peer.SendInv, func(c *conn) uint32 { return c.neighbour(iwarp.AccessRemoteWrite) }),
		{name: "invalidate/the same twice", rules: "R76", want: operation(9), delivered: 1, run: func(c *conn) []byte {
			s := c.bindWindow(0, iwarp.AccessRemoteWrite)
			u := peer.Untagged(peer.SendInv, true, s, 0, 2, 0, long[:8])
			c.send(peer.Untagged(peer.SendInv, true, s, 0, 1, 0, long[:8]), u)
			return u
		}},
		{name: "invalidate/then write there", rules: "R139", want: taggedErr(0), delivered: 1, run: func(c *conn) []byte {
			s := c.bindWindow(0, iwarp.AccessRemoteWrite)
			u := peer.Tagged(peer.Write, true, s, 0x10000, long[:8])
			c.send(peer.Untagged(peer.SendInv, true, s, 0, 1, 0, long[:8]), u)
			return u
		}},
		{name: "invalidate/right", rules: "R76", delivered: 1, run: func(c *conn) []byte {
			c.send(peer.Untagged(peer.SendInv, true, c.bindWindow(0, iwarp.AccessRemoteWrite), 0, 1, 0, long[:8]))
			return nil
		}, msn: 2},
		{name: "invalidate/the STag of another message is nothing", rules: "R12", delivered: 1, msn: 2, run: func(c *conn) []byte {
			c.send(peer.Untagged(peer.Send, true, c.regions["all"].RKey(), 0, 1, 0, long[:8]))
			return nil
		}},
	}
}

// immediates sends malformed Immediate Data (RFC 7306 section 6).
func immediates() (as []attack) {
	for _, op := range []byte{peer.Imm, peer.ImmSE} {
		imm := func(name string, want outcome, last bool, mo uint32, n int) {
			as = append(as, one(fmt.Sprintf("immediate/%#x %s", op, name), "A57, A59", want, func(*conn) []byte {
				return peer.Untagged(op, last, 0, 0, 1, mo, long[:n])
			}))
		}
		imm("no bytes", operation(0xff), true, 0, 0)
		imm("seven bytes", operation(0xff), true, 0, 7)
		imm("nine bytes", operation(0xff), true, 0, 9)
		imm("not the last segment", operation(0xff), false, 0, 8)
		imm("at an offset", untaggedErr(4), true, 8, 8)
	}
	return as
}

// atomics sends invalid requests and responses of RFC 7306 section 5.
func atomics() []attack {
	req := func(name, rules string, want outcome, f func(c *conn, a *peer.Atomic)) attack {
		return one("atomic/"+name, rules, want, func(c *conn) []byte {
			a := peer.Atomic{ID: 0x99, STag: c.regions["atomic"].RKey(), TO: 0x50000, Data: 1, Mask: ^uint64(0), CmpMask: ^uint64(0)}
			f(c, &a)
			return a.Msg(1)
		})
	}
	fault := func(code byte) outcome { return protection(code, withDDP) } // there is no Read Request header to quote
	swap := func(f func(c *conn, a *peer.Atomic)) func(c *conn, a *peer.Atomic) {
		return func(c *conn, a *peer.Atomic) { a.Op = 2; f(c, a) }
	}
	to := func(v uint64) func(c *conn, a *peer.Atomic) { return func(_ *conn, a *peer.Atomic) { a.TO = v } }
	region := func(name string, base uint64) func(c *conn, a *peer.Atomic) {
		return func(c *conn, a *peer.Atomic) { a.STag, a.TO = c.regions[name].RKey(), base }
	}
	answer := func(name string, want outcome, f func(id uint32) []byte) attack {
		return one("atomic/"+name, "A38, A39", want, func(c *conn) []byte { return f(c.fetchAdd()) })
	}
	unspecified := operation(0xff)
	return []attack{
		req("FetchAdd misaligned by one", "A9, A10, A11, A71, A72", operation(7), to(0x50001)),
		req("FetchAdd misaligned by four", "A9, A10, A11, A71, A72", operation(7), to(0x50004)),
		req("CmpSwap misaligned by one", "A13, A14, A15, A16, A17, A72", operation(7), swap(to(0x50001))),
		req("CmpSwap misaligned by four", "A13, A14, A15, A16, A17, A72", operation(7), swap(to(0x50004))),
		req("FetchAdd below", "A66, A70", fault(1), to(0x4fff8)),
		req("FetchAdd behind", "A66, A70", fault(1), to(0x50000+regionSize)),
		req("CmpSwap straddles the end", "A66, A70", fault(1), swap(to(0x50000+regionSize-4))),
		req("wraps", "A66, A70", fault(4), to(0xfffffffffffffffc)),
		req("STag 0", "A66, A70", fault(0), func(_ *conn, a *peer.Atomic) { a.STag = 0 }),
		req("STag deregistered", "A66, A70", fault(0), func(c *conn, a *peer.Atomic) { a.STag = c.gone }),
		req("no right: Reads and Writes", "A66, A70", fault(2), region("writable", 0x30000)),
		req("no right: read only", "A66, A70", fault(2), region("readable", 0x20000)),
		req("no right: CmpSwap", "A66, A70", fault(2), swap(region("local", 0x40000))),
		req("another PD", "A66, A70", fault(3), region("pd2", 0x80000)),
		req("another client's", "A66, A70", fault(3), swap(region("foreign", 0x90000))),
		req("operation 1", "A20, A27", operation(6), func(_ *conn, a *peer.Atomic) { a.Op = 1 }),
		req("operation 3", "A20, A27", operation(6), func(_ *conn, a *peer.Atomic) { a.Op = 3 }),
		req("operation 15", "A20, A27", operation(6), func(_ *conn, a *peer.Atomic) { a.Op = 15 }),
		last("atomic/header one byte short", "A24", unspecified, peer.Untagged(peer.AtomicRequest, true, 0, 1, 1, 0, make([]byte, 51))),
		last("atomic/no header", "A24", unspecified, peer.Untagged(peer.AtomicRequest, true, 0, 1, 1, 0, nil)),
		last("atomic/in a Read Request's length", "A24", unspecified, peer.Untagged(peer.AtomicRequest, true, 0, 1, 1, 0, make([]byte, 28))),
		last("atomic/header one byte long", "A24", untaggedErr(5), peer.Untagged(peer.AtomicRequest, true, 0, 1, 1, 0, make([]byte, 53))),
		last("atomic/response to nothing", "A38", untaggedErr(2), peer.AtomicResp(1, 0, 0)),
		answer("response of another request", unspecified, func(id uint32) []byte { return peer.AtomicResp(1, id+1, 0) }),
		answer("response one byte short", unspecified, func(id uint32) []byte { u := peer.AtomicResp(1, id, 0); return u[:len(u)-1] }),
		answer("response one byte long", untaggedErr(5), func(id uint32) []byte { return append(peer.AtomicResp(1, id, 0), 0) }),
		one("atomic/response to a Read", "A40", operation(6), func(c *conn) []byte { c.read(64); return peer.AtomicResp(1, 0, 0) }),
		{name: "atomic/response right", rules: "A39", changed: []string{"sink"}, run: func(c *conn) []byte {
			c.send(peer.AtomicResp(1, c.fetchAdd(), 0x1122))
			c.until("atomic completed", func() bool { return len(c.sent) == 1 })
			if wc := c.sent[0]; wc.Status != iwarp.WCSuccess || c.regions["sink"].Bytes()[128] != 0x22 {
				c.t.Errorf("completion %+v", wc)
			}
			return nil
		}},
		{name: "atomic/FetchAdd right", rules: "A32", changed: []string{"atomic"}, run: func(c *conn) []byte {
			c.send(peer.Atomic{ID: 3, STag: c.regions["atomic"].RKey(), TO: 0x50008, Data: 1}.Msg(1))
			if u := c.next(); len(u) != 18+12 || u[1] != 0x40|peer.AtomicResponse || u[21] != 3 {
				c.t.Errorf("response % x", u)
			}
			return nil
		}},
	}
}

// terminates sends malformed Terminates, and data after one.
func terminates() []attack {
	unspecified := operation(0xff)
	msg := func(payload []byte) []byte { return peer.Untagged(peer.Terminate, true, 0, 2, 1, 0, payload) }
	taken := outcome{kind: finished}
	return []attack{
		last("terminate/no bytes", "R18", unspecified, msg(nil)),
		last("terminate/three bytes", "R18", unspecified, msg([]byte{0x11, 0, 0})),
		last("terminate/too long", "D85", untaggedErr(5), msg(make([]byte, 1200))),
		last("terminate/right", "R85, R109", taken, msg(peer.TermHeader(1, 1, 1, nil, false))),
		last("terminate/announces headers that are not there", "R25, R26, R27", taken, msg([]byte{0x11, 1, 0xe0, 0})),
		last("terminate/half a DDP header", "R25, R26, R27", taken, msg([]byte{0x11, 1, 0xc0, 0, 0, 20, 0xc1, 0x40})),
		last("terminate/reserved bits", "R24", taken, msg([]byte{0x11, 1, 0x1f, 0xff})),
		last("terminate/unknown layer, type and code", "R20", taken, msg([]byte{0xff, 0xee, 0, 0})),
		last("terminate/swapped", "R18", taken, msg([]byte{0x21, 1, 0, 0})),
		last("terminate/in two segments", "R80", taken,
			peer.Untagged(peer.Terminate, false, 0, 2, 1, 0, []byte{0x11, 1}), peer.Untagged(peer.Terminate, true, 0, 2, 1, 2, []byte{0, 0})),
		last("terminate/data behind it", "R84", taken, msg(peer.TermHeader(1, 1, 1, nil, false)), peer.SendMsg(1, long[:8])),
		last("terminate/a wrong segment behind it", "R84", taken, msg(peer.TermHeader(1, 1, 1, nil, false)), peer.SendMsg(9, long[:8])),
		last("terminate/twice", "R84", taken, msg(peer.TermHeader(1, 1, 1, nil, false)), msg(peer.TermHeader(1, 1, 1, nil, false))),
		{name: "terminate/bad CRC behind it", rules: "R84", want: taken, run: func(c *conn) []byte {
			b := peer.FPDU(peer.SendMsg(1, long[:8]))
			b[5] ^= 1
			c.raw(append(c.framed(msg(peer.TermHeader(1, 1, 1, nil, false))), b...))
			return nil
		}},
		{name: "terminate/blames a Read that was never sent", rules: "R28", want: taken, run: func(c *conn) []byte {
			c.read(64)
			c.send(msg(peer.TermHeader(0, 1, 0, peer.ReadReq{Sink: 1}.Msg(77), true)))
			return nil
		}},
		{name: "terminate/of a Read of ours", rules: "R109", want: taken, run: func(c *conn) []byte {
			r := c.read(64)
			c.send(msg(peer.TermHeader(0, 1, 0, r.Msg(1), true)))
			c.until("Read completed", func() bool { return len(c.sent) == 1 })
			if wc := c.sent[0]; wc.Status == iwarp.WCSuccess || wc.Status == iwarp.WCFlushErr {
				c.t.Errorf("the Read that the peer refused completes: %+v", wc)
			}
			return nil
		}},
	}
}
