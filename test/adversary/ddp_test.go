package adversary

import (
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// one is an attack that ends with the segment that segment returns.
func one(name, rules string, want outcome, segment func(c *conn) []byte) attack {
	return attack{name: name, rules: rules, want: want, run: func(c *conn) []byte {
		u := segment(c)
		c.send(u)
		return u
	}}
}

// last is an attack by the last of some segments.
func last(name, rules string, want outcome, segments ...[]byte) attack {
	return attack{name: name, rules: rules, want: want, run: func(c *conn) []byte {
		c.send(segments...)
		return segments[len(segments)-1]
	}}
}

func (a attack) with(f func(a *attack)) attack { f(&a); return a }

func (a attack) delivering(n int) attack { a.delivered = n; return a }

// TestDDP breaks the rules of RFC 5041.
func TestDDP(t *testing.T) {
	payload := []byte("twelve bytes")
	send := func(last bool, msn, mo uint32, n int) []byte {
		return peer.Untagged(peer.Send, last, 0, 0, msn, mo, long[:n])
	}
	write := func(stag uint32, to uint64, n int) []byte { return peer.Tagged(peer.Write, true, stag, to, long[:n]) }
	to := func(region string, to uint64, n int) func(c *conn) []byte {
		return func(c *conn) []byte { return write(c.regions[region].RKey(), to, n) }
	}
	stag := func(f func(c *conn) uint32) func(c *conn) []byte {
		return func(c *conn) []byte { return write(f(c), 0x10000, 8) }
	}
	attacks := []attack{
		// Versions (D23, D24).
		last("version/tagged 0", "D23", taggedErr(4), peer.With(write(0, 0, 8), 0, 0xc0)),
		last("version/tagged 2", "D23", taggedErr(4), peer.With(write(0, 0, 8), 0, 0xc2)),
		last("version/tagged 3", "D23", taggedErr(4), peer.With(write(0, 0, 8), 0, 0xc3)),
		last("version/untagged 0", "D23", untaggedErr(6), peer.With(send(true, 1, 0, 8), 0, 0x40)),
		last("version/untagged 2", "D23", untaggedErr(6), peer.With(send(true, 1, 0, 8), 0, 0x42)),
		last("version/untagged 3", "D23", untaggedErr(6), peer.With(send(true, 1, 0, 8), 0, 0x43)),
		last("version/changes in a message", "D24", untaggedErr(6), send(false, 1, 0, 8), peer.With(send(true, 1, 8, 8), 0, 0x40)),
		last("reserved bits of the control bytes", "D22", outcome{}, peer.With(peer.With(send(true, 1, 0, 8), 0, 0x7d), 1, 0x73)).
			with(func(a *attack) { a.delivered, a.msn = 1, 2 }),

		// Queues (D82).
		last("queue/4", "D82", untaggedErr(1), peer.Untagged(peer.Send, true, 0, 4, 1, 0, payload)),
		last("queue/5", "D82", untaggedErr(1), peer.Untagged(peer.AtomicResponse, true, 0, 5, 1, 0, payload)),
		last("queue/256", "D82", untaggedErr(1), peer.Untagged(peer.Send, true, 0, 256, 1, 0, payload)),
		last("queue/all ones", "D82", untaggedErr(1), peer.Untagged(peer.Send, true, 0, 0xffffffff, 1, 0, payload)),

		// Message numbers (D43 to D45, D83, D86).
		last("msn/0", "D44", untaggedErr(3), send(true, 0, 0, 8)),
		last("msn/2 first", "D44", untaggedErr(3), send(true, 2, 0, 8)),
		last("msn/all ones first", "D44", untaggedErr(3), send(true, 0xffffffff, 0, 8)),
		last("msn/half way round", "D86", untaggedErr(3), send(true, 0x80000001, 0, 8)),
		last("msn/repeated", "D43", untaggedErr(3), send(true, 1, 0, 8), send(true, 1, 0, 8)).delivering(1),
		last("msn/skipped", "D43", untaggedErr(3), send(true, 1, 0, 8), send(true, 3, 0, 8)).delivering(1),
		last("msn/next before the last segment", "D43", untaggedErr(3), send(false, 1, 0, 8), send(true, 2, 0, 8)),
		last("msn/changes in a message", "D46", untaggedErr(3), send(false, 1, 0, 8), send(true, 2, 8, 8)),
		last("msn/Read Request 0", "D86", untaggedErr(3), peer.ReadReq{Size: 8}.Msg(0)),
		last("msn/Read Request 2 first", "D86", untaggedErr(3), peer.ReadReq{}.Msg(2)),
		last("msn/Terminate 2", "D86", untaggedErr(3), peer.Untagged(peer.Terminate, true, 0, 2, 2, 0, []byte{0, 0, 0, 0})),
		one("msn/Atomic Response 2", "D86", untaggedErr(3), func(c *conn) []byte {
			return peer.AtomicResp(2, c.fetchAdd(), 0)
		}),
		one("msn/Read Request repeated", "D43", untaggedErr(3), func(c *conn) []byte {
			u := peer.ReadReq{Sink: 1, SinkTO: 2}.Msg(1)
			c.send(u)
			if r := c.next(); len(r) != 14 {
				c.t.Fatalf("response % x", r)
			}
			return u
		}),

		// The control fields of all segments of a message must be equal. The last segment's count.
		last("control/of another Send in the last segment", "D39, D40", outcome{}, send(false, 1, 0, 8),
			peer.Untagged(peer.SendSE, true, 0, 0, 1, 8, long[:8])).with(func(a *attack) { a.delivered, a.msn = 1, 2 }),
		last("control/Immediate Data in the last segment", "D39", untaggedErr(4), send(false, 1, 0, 8),
			peer.Untagged(peer.Imm, true, 0, 0, 1, 8, long[:8])),
		last("control/invalidation in the last segment alone", "D39, R122", operation(9), send(false, 1, 0, 8),
			peer.Untagged(peer.SendInv, true, 0x1234, 0, 1, 8, long[:8])),

		// Buffers (D83, D87).
		last("buffer/none posted", "D83, D87", untaggedErr(2), send(true, 1, 0, 8)).with(func(a *attack) { a.opts.recvs = -1 }),
		last("buffer/none posted, no bytes", "R73", untaggedErr(2), send(true, 1, 0, 0)).with(func(a *attack) { a.opts.recvs = -1 }),
		last("buffer/one posted, two messages", "D83", untaggedErr(2), send(true, 1, 0, 8), send(true, 2, 0, 8)).delivering(1).with(func(a *attack) { a.opts.recvs = 1 }),
		last("buffer/none for Immediate Data", "A18", untaggedErr(2), peer.Untagged(peer.Imm, true, 0, 0, 1, 0, make([]byte, 8))).with(func(a *attack) { a.opts.recvs = -1 }),
		last("buffer/more than all posted", "D83", untaggedErr(2), send(true, 1, 0, 1), send(true, 2, 0, 2), send(true, 3, 0, 3), send(true, 4, 0, 4), send(true, 5, 0, 5)).delivering(4),

		// Offsets (D48, D54, D84, D85).
		last("mo/gap before all", "D48", untaggedErr(4), send(true, 1, 4, 8)),
		last("mo/gap in the middle", "D20, D54", untaggedErr(4), send(false, 1, 0, 8), send(true, 1, 12, 8)),
		last("mo/overlap", "D20, D54", untaggedErr(4), send(false, 1, 0, 8), send(true, 1, 4, 8)),
		last("mo/the same twice", "D54", untaggedErr(4), send(false, 1, 0, 8), send(true, 1, 0, 8)),
		last("mo/behind the buffer", "D84", untaggedErr(4), send(true, 1, slot+1, 8)),
		last("mo/far behind the buffer", "D84", untaggedErr(4), send(true, 1, 0x7fffffff, 8)),
		last("mo/all ones, and wraps", "D84, D85", untaggedErr(4), send(true, 1, 0xffffffff, 8)),
		last("mo/Read Request at 4", "D84", untaggedErr(4), peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 4, peer.ReadReq{}.Bytes())),
		last("mo/Terminate far away", "D84", untaggedErr(4), peer.Untagged(peer.Terminate, true, 0, 2, 1, 0xfffffff0, []byte{0, 0, 0, 0})),

		// Lengths (D85).
		last("long/one byte more", "D85", untaggedErr(5), send(true, 1, 0, slot+1)),
		last("long/as a segment can be", "D85", untaggedErr(5), send(true, 1, 0, 1200)),
		last("long/by the last segment", "D85", untaggedErr(5), send(false, 1, 0, slot-4), send(true, 1, slot-4, 8)),
		last("long/not the last segment", "D85", untaggedErr(5), send(false, 1, 0, slot+1)),
		last("long/exactly the buffer", "D85", outcome{}, send(true, 1, 0, slot)).with(func(a *attack) { a.delivered, a.msn = 1, 2 }),
		last("message without an end", "D67", outcome{kind: finished}, send(false, 1, 0, 8), send(false, 1, 8, 8)).with(func(a *attack) {
			run := a.run
			a.run = func(c *conn) []byte { u := run(c); _ = c.s.CloseWrite(); return u }
		}),

		// STags (D30, D91, D92, D101, D102).
		last("stag/0", "D30, D91, D108", taggedErr(0), write(0, 0x10000, 8)),
		last("stag/1", "D91", taggedErr(0), write(1, 0x10000, 8)),
		last("stag/all ones", "D91", taggedErr(0), write(0xffffffff, 0x10000, 8)),
		one("stag/wrong key", "D91", taggedErr(0), stag(func(c *conn) uint32 { return c.regions["all"].RKey() ^ 1 })),
		one("stag/wrong index", "D91", taggedErr(0), stag(func(c *conn) uint32 { return c.regions["all"].RKey() ^ 1<<31 })),
		one("stag/deregistered", "D92, D116", taggedErr(0), stag(func(c *conn) uint32 { return c.gone })),
		one("stag/window bound to nothing", "D92", taggedErr(0), stag(func(c *conn) uint32 { return c.loose.RKey() })),
		one("stag/window invalidated", "D106, D116", taggedErr(0), stag(func(c *conn) uint32 {
			s := c.bindWindow(0, iwarp.AccessRemoteWrite)
			c.invalidate(s)
			return s
		})),
		one("stag/window of another stream", "D102, D112", taggedErr(2), stag(func(c *conn) uint32 {
			return c.neighbour(iwarp.AccessRemoteWrite)
		})),
		one("stag/window without the right", "D115", taggedErr(0), stag(func(c *conn) uint32 {
			return c.bindWindow(0, iwarp.AccessRemoteRead)
		})),
		one("stag/another PD", "D101, D111", taggedErr(2), to("pd2", 0x80000, 8)),
		one("stag/another client's", "D101, D111", taggedErr(2), to("foreign", 0x90000, 8)),
		one("stag/no right to write: read only", "D115", taggedErr(0), to("readable", 0x20000, 8)),
		one("stag/no right to write: local", "D115", taggedErr(0), to("local", 0x40000, 8)),
		one("stag/no right to write: receives", "D115", taggedErr(0), to("recv", 0x60000, 8)),
		one("stag/no right to write: atomics", "D115", taggedErr(0), to("atomic", 0x50000, 8)),
		last("stag/any, with no bytes", "D58, D59", outcome{}, write(0xdeadbeef, 0xffffffffffffffff, 0)),

		// Bounds (D93 to D95).
		one("bounds/one byte below", "D93", taggedErr(1), to("all", 0xffff, 8)),
		one("bounds/straddles the start", "D93", taggedErr(1), to("all", 0xfffc, 8)),
		one("bounds/0", "D93", taggedErr(1), to("all", 0, 8)),
		one("bounds/straddles the end by one", "D94", taggedErr(1), to("all", 0x10000+regionSize-7, 8)),
		one("bounds/at the end", "D94", taggedErr(1), to("all", 0x10000+regionSize, 1)),
		one("bounds/behind the end", "D93", taggedErr(1), to("all", 0x10000+regionSize+1, 8)),
		one("bounds/high bits", "D93", taggedErr(1), to("all", 0x100000000|0x10000, 8)),
		one("bounds/sign bit", "D93", taggedErr(1), to("all", 1<<63|0x10000, 8)),
		one("bounds/another region's address", "D113", taggedErr(1), to("all", 0x30000, 8)),
		one("bounds/of a window", "D114", taggedErr(1), func(c *conn) []byte {
			return write(c.bindWindow(64, iwarp.AccessRemoteWrite), 0x10000+124, 8)
		}),
		one("bounds/below a window", "D114", taggedErr(1), func(c *conn) []byte {
			return write(c.bindWindow(64, iwarp.AccessRemoteWrite), 0x10000+60, 8)
		}),
		one("wrap/at the top", "D95", taggedErr(3), to("top", 0xfffffffffffffffc, 8)),
		one("wrap/from a region far below", "D95", taggedErr(3), to("all", 0xffffffffffffffff, 8)),
		// The sum of TO and length must not wrap: the last byte of the address space cannot be accessed.
		one("wrap/the sum alone", "D95", taggedErr(3), to("top", 0xfffffffffffffff8, 8)),
		one("wrap/not yet", "D95", outcome{}, to("top", 0xfffffffffffffff7, 8)).with(func(a *attack) { a.changed = []string{"top"} }),
		{name: "second segment is out of bounds", rules: "D96", want: taggedErr(1), changed: []string{"all"}, run: func(c *conn) []byte {
			k := c.regions["all"].RKey()
			u := peer.Tagged(peer.Write, true, k, 0x10000+regionSize, long[:8])
			c.send(peer.Tagged(peer.Write, false, k, 0x10000+regionSize-8, long[:8]), u)
			return u
		}},
		{name: "right segments behind a wrong one", rules: "D98", want: taggedErr(1), run: func(c *conn) []byte {
			k := c.regions["all"].RKey()
			u := write(k, 0, 8)
			c.send(u, write(k, 0x10000, 8), send(true, 1, 0, 8))
			return u
		}},
		{name: "two wrong ones", rules: "D97, R118", want: taggedErr(0), run: func(c *conn) []byte {
			u := write(0, 0, 8)
			c.send(u, send(true, 9, 0, 8))
			return u
		}},
	}
	runAttacks(t, attacks)
}
