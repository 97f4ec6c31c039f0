package adversary

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// TestOddFrames sends malformed and reordered frames in full operation: every wrong length, pad and CRC.
func TestOddFrames(t *testing.T) {
	var attacks []attack
	add := func(name, rules string, want outcome, run func(c *conn) []byte) *attack {
		attacks = append(attacks, attack{name: name, rules: rules, want: want, run: run})
		return &attacks[len(attacks)-1]
	}
	write := func(c *conn, payload []byte) []byte {
		return peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000, payload)
	}
	tooShort := outcome{terminated, 0, 2, 0xff, bare}

	// No length shorter than the header is accepted, whatever the first bytes are.
	for n := 2; n < 18; n++ {
		add(fmt.Sprintf("length/%d of 18 untagged", n), "D49, D82", tooShort, func(c *conn) []byte {
			c.send(peer.SendMsg(1, nil)[:n])
			return nil
		})
	}
	for n := 1; n < 13; n++ {
		add(fmt.Sprintf("length/%d of 14 tagged", n), "D49, D91", tooShort, func(c *conn) []byte {
			c.send(peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000, nil)[:n])
			return nil
		})
	}
	for pad := 1; pad < 4; pad++ {
		a := add(fmt.Sprintf("pad/%d bytes of garbage", pad), "M14", outcome{}, func(c *conn) []byte {
			u := peer.SendMsg(1, long[:8-pad])
			b := peer.Body(u)
			if len(b)-2-len(u) != pad {
				c.t.Fatalf("%d bytes of pad", len(b)-2-len(u))
			}
			for i := len(b) - pad; i < len(b); i++ {
				b[i] = 0xa5
			}
			c.raw(peer.Seal(b))
			return nil
		})
		a.delivered, a.msn = 1, 2
	}

	// Almost correct CRCs.
	crcs := map[string]func(b []byte) uint32{
		"not complemented":      func(b []byte) uint32 { return ^crc32.Checksum(b, castagnoli) },
		"of Ethernet":           crc32.ChecksumIEEE,
		"of the ULPDU alone":    func(b []byte) uint32 { return crc32.Checksum(b[2:], castagnoli) },
		"without the pad":       func(b []byte) uint32 { return crc32.Checksum(b[:len(b)-2], castagnoli) },
		"of nothing":            func([]byte) uint32 { return 0 },
		"begun with zero":       func(b []byte) uint32 { return ^crc32.Update(0xffffffff, castagnoli, b) },
		"with the field, as 0s": func(b []byte) uint32 { return crc32.Checksum(append(bytes.Clone(b), 0, 0, 0, 0), castagnoli) },
	}
	for name, f := range crcs {
		add("crc/"+name, "M40, M41, M42, M114", mpaErr(2), func(c *conn) []byte {
			b := peer.Body(peer.SendMsg(1, long[:6])) // with two bytes of pad
			v := f(b)
			c.raw(append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24)))
			return nil
		})
	}
	add("marker/nobody asked for", "M68, M114", mpaErr(2), func(c *conn) []byte {
		// The leading marker is read as an empty FPDU with a wrong CRC.
		c.raw(peer.Marked(0, write(c, long[:64]), nil))
		return nil
	})
	add("startup/the Request once more", "M114", mpaErr(2), func(c *conn) []byte {
		o := options{}
		c.raw(append(o.request().Bytes(), make([]byte, 0x4d50)...)) // "MP" is a length
		return nil
	})
	add("startup/half of the Request once more, then FIN", "M113", outcome{kind: finished}, func(c *conn) []byte {
		o := options{}
		c.raw(o.request().Bytes()[:10])
		_ = c.s.CloseWrite()
		return nil
	})

	// Messages in unusual pieces.
	attacks = append(attacks,
		last("pieces/of no bytes, then one with", "D57, D67", outcome{}, peer.Untagged(peer.Send, false, 0, 0, 1, 0, nil),
			peer.Untagged(peer.Send, false, 0, 0, 1, 0, nil), peer.SendMsg(1, long[:8])).with(func(a *attack) { a.delivered, a.msn = 1, 2 }),
		last("pieces/the last has no bytes", "D67", outcome{}, peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]),
			peer.Untagged(peer.Send, true, 0, 0, 1, 8, nil)).with(func(a *attack) { a.delivered, a.msn = 1, 2 }),
		last("pieces/the last has no bytes and lies short", "D20, D67", untaggedErr(4), peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]),
			peer.Untagged(peer.Send, true, 0, 0, 1, 4, nil)),
		last("pieces/no bytes at an offset", "D48", untaggedErr(4), peer.Untagged(peer.Send, true, 0, 0, 1, 4, nil)),
		last("pieces/from the end to the start", "D62", outcome{}, peer.Untagged(peer.Send, false, 0, 0, 1, 8, long[8:16]),
			peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]), peer.Untagged(peer.Send, true, 0, 0, 1, 16, long[16:24])).
			with(func(a *attack) { a.delivered, a.msn = 1, 2 }),
		last("pieces/L in the middle", "D18, D20", untaggedErr(4), peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]),
			peer.Untagged(peer.Send, true, 0, 0, 1, 16, long[16:24])),
		last("pieces/more behind L", "D18, D43", untaggedErr(3), peer.SendMsg(1, long[:8]),
			peer.Untagged(peer.Send, false, 0, 0, 1, 8, long[8:16])).delivering(1),
		last("pieces/another opcode's queue in the middle", "D39, R9", operation(6), peer.Untagged(peer.Send, false, 0, 0, 1, 0, long[:8]),
			peer.Untagged(peer.ReadRequest, true, 0, 0, 1, 8, long[8:16])),
		last("pieces/invalidation of nothing, with no bytes", "R122", operation(9), peer.Untagged(peer.SendInv, true, 0x1234, 0, 1, 0, nil)),
		attack{name: "pieces/a Read Request in two, a Send between", rules: "R41, D60", delivered: 1, msn: 2, run: func(c *conn) []byte {
			r := peer.ReadReq{Sink: 7, SinkTO: 9, Size: 4, Src: c.regions["readable"].RKey(), SrcTO: 0x20000}.Bytes()
			c.send(peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, r[:10]), peer.SendMsg(1, long[:8]), peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 10, r[10:]))
			c.want(peer.Tagged(peer.ReadResponse, true, 7, 9, c.regions["readable"].Bytes()[:4]))
			return nil
		}},
		last("pieces/a Read Request in two, another between", "D43, R41", untaggedErr(3),
			peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, peer.ReadReq{}.Bytes()[:10]), peer.ReadReq{}.Msg(2)),
		last("pieces/a Read Request that overlaps", "R41", untaggedErr(4),
			peer.Untagged(peer.ReadRequest, false, 0, 1, 1, 0, peer.ReadReq{}.Bytes()[:10]), peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 8, peer.ReadReq{}.Bytes()[8:])),
		last("pieces/a Read Request with bytes behind it", "R14, R41", untaggedErr(5),
			peer.Untagged(peer.ReadRequest, true, 0, 1, 1, 0, append(peer.ReadReq{}.Bytes(), make([]byte, 40)...))),
		last("pieces/a Terminate without its end, and all goes on", "R80, R81", outcome{},
			peer.Untagged(peer.Terminate, false, 0, 2, 1, 0, []byte{0x11, 1})),
		attack{name: "pieces/a Write of none, not the last, to nowhere", rules: "D59", run: func(c *conn) []byte {
			c.send(peer.Tagged(peer.Write, false, 0xdeadbeef, ^uint64(0), nil))
			return nil
		}},
		attack{name: "pieces/two Writes interleaved", rules: "D53", changed: []string{"all", "writable"}, run: func(c *conn) []byte {
			a, b := c.regions["all"].RKey(), c.regions["writable"].RKey()
			c.send(peer.Tagged(peer.Write, false, a, 0x10000, long[:8]), peer.Tagged(peer.Write, false, b, 0x30000, long[:8]),
				peer.Tagged(peer.Write, true, a, 0x10008, long[:8]), peer.Tagged(peer.Write, true, b, 0x30008, long[:8]))
			return nil
		}},
	)

	// Responses.
	tagged := func(last bool, r peer.ReadReq, off, n int) []byte {
		return peer.Tagged(peer.ReadResponse, last, r.Sink, r.SinkTO+uint64(off), long[off:off+n])
	}
	attacks = append(attacks,
		attack{name: "response/L in a segment of its own", rules: "R59, D67", changed: []string{"sink"}, run: func(c *conn) []byte {
			r := c.read(64)
			c.send(tagged(false, r, 0, 64), peer.Tagged(peer.ReadResponse, true, 0, 0, nil)) // its STag is not checked
			c.until("Read completed", func() bool { return len(c.sent) == 1 })
			if wc := c.sent[0]; wc.Status != iwarp.WCSuccess {
				c.t.Errorf("completion %+v", wc)
			}
			return nil
		}},
		attack{name: "response/longer than its sink, in its second segment", rules: "R62", want: taggedErr(1), changed: []string{"sink"}, run: func(c *conn) []byte {
			r := c.read(64)
			u := tagged(true, r, 60, 8)
			c.send(tagged(false, r, 0, 60), u)
			return u
		}},
		attack{name: "response/that of the second Read first", rules: "R61, R62", want: taggedErr(1), run: func(c *conn) []byte {
			r := c.read(64)
			c.post(iwarp.SendWR{ID: 2, Op: iwarp.OpRead, SGEs: []iwarp.SGE{c.regions["sink"].SGE(1024, 64)}, RKey: 0x1234, Remote: 0x5000})
			second, ok := peer.DecodeReadReq(c.next())
			if !ok || second.Sink != r.Sink {
				c.t.Fatalf("second Read Request %+v", second)
			}
			u := tagged(true, second, 0, 64)
			c.send(u)
			return u
		}},
		attack{name: "response/Terminate in the middle of it", rules: "R85, R109", want: outcome{kind: finished}, changed: []string{"sink"}, run: func(c *conn) []byte {
			r := c.read(64)
			c.send(tagged(false, r, 0, 32), peer.Term(0, 0, 0, nil, false))
			return nil
		}},
		attack{name: "response/rest of it behind a Terminate", rules: "R84, R85", want: outcome{kind: finished}, run: func(c *conn) []byte {
			r := c.read(64)
			c.send(peer.Term(0, 0, 0, nil, false), tagged(true, r, 0, 64))
			return nil
		}},
	)

	// After the node has sent a Terminate it ignores everything.
	behind := func(name string, us func(c *conn) [][]byte) {
		add("behind our Terminate/"+name, "D98, R84", taggedErr(0), func(c *conn) []byte {
			u := peer.Tagged(peer.Write, true, 0, 0, long[:8])
			c.send(append([][]byte{u}, us(c)...)...)
			return u
		})
	}
	behind("a Terminate", func(*conn) [][]byte { return [][]byte{peer.Term(1, 1, 0, nil, false)} })
	behind("a Read Request", func(c *conn) [][]byte {
		return [][]byte{peer.ReadReq{Size: 8, Src: c.regions["all"].RKey(), SrcTO: 0x10000}.Msg(1)}
	})
	behind("an atomic", func(c *conn) [][]byte {
		return [][]byte{peer.Atomic{STag: c.regions["atomic"].RKey(), TO: 0x50000, Data: 1}.Msg(1)}
	})
	behind("a hundred Writes", func(c *conn) (us [][]byte) {
		for range 100 {
			us = append(us, write(c, long[:64]))
		}
		return us
	})
	add("behind our Terminate/RST", "D98", taggedErr(0), func(c *conn) []byte {
		u := peer.Tagged(peer.Write, true, 0, 0, long[:8])
		c.send(u)
		return u
	})
	add("an IRD of empty Reads, and one more", "R107, R145", operation(7), func(c *conn) []byte {
		return c.overflow(2, func(msn uint32) []byte { return peer.ReadReq{Sink: 1}.Msg(msn) })
	}).opts.ird = 2
	add("atomic/reserved bits beside the operation", "A3", outcome{}, func(c *conn) []byte {
		a := peer.Atomic{ID: 3, STag: c.regions["atomic"].RKey(), TO: 0x50008, Data: 1}.Bytes()
		a[0], a[1], a[2], a[3] = 0xff, 0xff, 0xff, 0xf0
		c.send(peer.Untagged(peer.AtomicRequest, true, 0xffffffff, 1, 1, 0, a))
		if u := c.next(); len(u) != 18+12 || u[1] != 0x40|peer.AtomicResponse {
			c.t.Errorf("response % x", u)
		}
		return nil
	}).changed = []string{"atomic"}
	add("window/read by the peer after it invalidated it", "R139, R127", protection(0, withRDMA), func(c *conn) []byte {
		s := c.bindWindow(0, iwarp.AccessRemoteRead)
		u := peer.ReadReq{Sink: 1, Size: 8, Src: s, SrcTO: 0x10000}.Msg(1)
		c.send(peer.Untagged(peer.SendInv, true, s, 0, 1, 0, long[:8]), u)
		return u
	}).delivered = 1
	add("window/atomic by the peer after it invalidated it", "R139, A70", protection(0, withDDP), func(c *conn) []byte {
		s := c.bindWindow(0, iwarp.AccessRemoteAtomic)
		u := peer.Atomic{STag: s, TO: 0x10000, Data: 1}.Msg(1)
		c.send(peer.Untagged(peer.SendInv, true, s, 0, 1, 0, long[:8]), u)
		return u
	}).delivered = 1
	runAttacks(t, attacks)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// TestCutFrames ends the stream after every byte of either startup frame, by FIN and by RST: the node sends nothing,
// the application gets no request, and nothing is left.
func TestCutFrames(t *testing.T) {
	w := newWorld(t)
	l := w.listens[onPlain]
	o := options{}
	whole := o.request().Bytes()
	ends := map[string]func(*peer.Stream) error{"FIN": (*peer.Stream).CloseWrite, "RST": (*peer.Stream).Reset}
	for n := range whole {
		for name, end := range ends {
			s, err := w.host.Dial(addrOf(l))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Send(whole[:n]); err != nil {
				t.Fatal(err)
			}
			if err := end(s); err != nil {
				t.Fatal(err)
			}
			if name == "FIN" {
				if err := w.host.Until("end", s.Ended); err != nil {
					t.Fatalf("%s behind %d bytes: %v", name, n, err)
				}
			}
			if len(s.In) > 0 {
				t.Errorf("%s behind %d bytes: the node answers % x", name, n, s.In)
			}
			s.Forget()
		}
	}
	w.host.Listen(port)
	rep := reply(enhanced, 2, -1, peer.Enhanced(false, false, false, false, 4, 4))
	for n := range rep {
		c := &conn{world: w, t: t}
		c.qp, c.scq, c.rcq = w.newQP(t)
		result := w.connect(c.qp, iwarp.Startup{NoFallback: true, NoPeerToPeer: true})
		var err error
		if c.s, err = w.host.Accept(port); err != nil {
			t.Fatal(err)
		}
		if _, err := c.s.ReadFrame(); err != nil {
			t.Fatal(err)
		}
		if err := c.s.Send(rep[:n]); err != nil {
			t.Fatal(err)
		}
		if err := ends[[]string{"FIN", "RST"}[n%2]](c.s); err != nil {
			t.Fatal(err)
		}
		if err := w.result(t, result); !errors.Is(err, iwarp.ErrRefused) {
			t.Errorf("a Reply cut behind %d bytes: %v", n, err)
		}
		c.destroy()
	}
	if err := w.good.beat(); err != nil {
		t.Fatal(err)
	}
	w.alone(t)
}

// TestOddDepths checks that excessive depths in a Request are answered with the maximum, and that a Reply with zero
// depths makes Reads complete in error.
func TestOddDepths(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct{ send, want []byte }{
		{[]byte{0x3f, 0xfe, 0x3f, 0xfe}, []byte{0, 128, 0, 128}},
		{[]byte{0x00, 0x00, 0x3f, 0xfe}, []byte{0, 128, 0, 0}},
		{[]byte{0x3f, 0xfe, 0x00, 0x00}, []byte{0, 0, 0, 128}},
		{[]byte{0x00, 0x01, 0x3f, 0xff}, []byte{0x3f, 0xff, 0, 1}},
	} {
		c := w.open(t, options{rtr: tt.send})
		if !bytes.Equal(c.reply.Private, tt.want) {
			t.Errorf("% x is answered by % x; want % x", tt.send, c.reply.Private, tt.want)
		}
		c.destroy()
	}
	if err := w.good.beat(); err != nil {
		t.Fatal(err)
	}
}
