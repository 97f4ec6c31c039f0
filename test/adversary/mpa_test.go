package adversary

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// long is a payload with several markers in its FPDU.
var long = bytes.Repeat([]byte("0123456789abcdef"), 80)

// TestMPA breaks the rules of RFC 5044 in full operation.
func TestMPA(t *testing.T) {
	hello := peer.SendMsg(1, []byte("hello"))
	flip := func(off int, from int) func(c *conn) []byte {
		return func(c *conn) []byte {
			b := peer.FPDU(hello)
			if from < 0 {
				off = len(b) - off
			}
			b[off] ^= 0x10
			c.raw(b)
			return nil
		}
	}
	write := func(c *conn, payload []byte) []byte {
		return peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000, payload)
	}
	var attacks []attack
	add := func(name, rules string, want outcome, run func(c *conn) []byte) *attack {
		attacks = append(attacks, attack{name: name, rules: rules, want: want, run: run})
		return &attacks[len(attacks)-1]
	}
	badCRC, badMarker := mpaErr(2), mpaErr(3)

	add("crc/first byte", "M42, M114", badCRC, flip(4, -1))
	add("crc/last byte", "M114", badCRC, flip(1, -1))
	add("crc/ddp control", "M41, M114", badCRC, flip(2, 1))
	add("crc/rdmap control", "M114", badCRC, flip(3, 1))
	add("crc/payload", "M114", badCRC, flip(22, 1))
	add("crc/pad", "M41, M114", badCRC, func(c *conn) []byte {
		b := peer.FPDU(hello)
		b[len(b)-5] ^= 1
		c.raw(b)
		return nil
	})
	add("crc/bytes swapped", "M40, M114", badCRC, func(c *conn) []byte {
		b := peer.FPDU(hello)
		n := len(b)
		b[n-1], b[n-2], b[n-3], b[n-4] = b[n-4], b[n-3], b[n-2], b[n-1]
		c.raw(b)
		return nil
	})
	add("crc/zero", "M39, M114", badCRC, func(c *conn) []byte {
		c.raw(append(peer.Body(hello), 0, 0, 0, 0))
		return nil
	})
	add("crc/of a Write", "M114, M122", badCRC, func(c *conn) []byte {
		b := peer.FPDU(write(c, long))
		b[40] ^= 1
		c.raw(b)
		return nil
	})
	add("crc/second of three in a segment", "M122", badCRC, func(c *conn) []byte {
		bad := peer.FPDU(write(c, []byte("not this")))
		bad[20] ^= 1
		b := append(peer.FPDU(hello), bad...)
		c.raw(append(b, peer.FPDU(write(c, []byte("nor this")))...))
		return nil
	}).delivered = 1
	add("crc/good ones behind it", "M122", badCRC, func(c *conn) []byte {
		b := peer.FPDU(hello)
		b[10] ^= 1
		c.raw(b)
		c.send(write(c, []byte("nothing is placed any more")), peer.SendMsg(1, []byte("nor this")))
		return nil
	})
	add("crc/one byte at a time", "M114, M127", badCRC, func(c *conn) []byte {
		b := peer.FPDU(hello)
		b[len(b)-1] ^= 0x80
		for i := range b {
			c.raw(b[i : i+1])
		}
		return nil
	})
	add("crc/off for us, on for the node", "M36, M71", badCRC, func(c *conn) []byte {
		c.raw(append(peer.Body(hello), 1, 2, 3, 4))
		return nil
	}).opts.noCRC = true
	a := add("crc/off for both", "M15, M37, M70, M72", outcome{}, func(c *conn) []byte {
		c.raw(append(peer.Body(hello), 1, 2, 3, 4))
		return nil
	})
	a.delivered, a.msn, a.opts = 1, 2, options{noCRC: true, on: onNoCRC}

	add("length/one short", "M114", badCRC, func(c *conn) []byte {
		b := peer.Body(hello)
		b[1]--
		c.raw(b[:len(b)-1])
		c.raw(bytes.Repeat([]byte{0xaa}, 64))
		return nil
	})
	add("length/four more", "M114", badCRC, func(c *conn) []byte {
		b := peer.FPDU(hello)
		b[1] += 4
		c.raw(b)
		c.send(peer.SendMsg(2, []byte("eaten")))
		return nil
	})
	add("length/65535 and little behind it, then FIN", "M113", outcome{kind: finished}, func(c *conn) []byte {
		c.raw([]byte{0xff, 0xff, 0x41, 0x43})
		_ = c.s.CloseWrite()
		return nil
	})
	// An FPDU too short for a header cannot be quoted in the Terminate.
	short := func(n int) func(c *conn) []byte {
		return func(c *conn) []byte {
			u := peer.SendMsg(1, nil)[:n]
			c.send(u)
			return u
		}
	}
	tooShort := outcome{terminated, 0, 2, 0xff, bare}
	add("length/0", "D82", tooShort, short(0))
	add("length/1", "D82", tooShort, short(1))
	add("length/17 of 18 untagged", "D82", tooShort, short(17))
	add("length/13 of 14 tagged", "D91", tooShort, func(c *conn) []byte {
		c.send(peer.Tagged(peer.Write, true, 0, 0, nil)[:13])
		return nil
	})
	add("length/65535 whole, out of bounds", "D94", taggedErr(1), func(c *conn) []byte {
		u := write(c, make([]byte, 65535-14))
		c.send(u)
		return u
	})
	add("pad/not zero", "M14", outcome{}, func(c *conn) []byte {
		b := peer.Body(hello)
		b[len(b)-1] = 0x55
		c.raw(peer.Seal(b))
		return nil
	})
	attacks[len(attacks)-1].delivered, attacks[len(attacks)-1].msn = 1, 2

	// Markers.
	marked := func(name, rules string, want outcome, edit func(i int, m []byte)) {
		attacks = append(attacks, attack{name: "marker/" + name, rules: rules, want: want, run: func(c *conn) []byte {
			c.raw(peer.Marked(c.at, write(c, long), edit))
			return nil
		}})
	}
	ptr := func(at int, v ...byte) func(i int, m []byte) {
		return func(i int, m []byte) {
			if i == at {
				copy(m, v)
			}
		}
	}
	first := len(attacks)
	marked("leading points back", "M24, M26, M115", badMarker, ptr(0, 0, 0, 0, 16))
	marked("second says zero", "M28, M115, M118", badMarker, ptr(1, 0, 0, 0, 0))
	marked("second four short", "M22, M115, M118", badMarker, ptr(1, 0, 0, 1, 0xf8))
	marked("second four long", "M115, M118", badMarker, ptr(1, 0, 0, 2, 0))
	marked("third of the second's", "M27, M115, M118", badMarker, ptr(2, 0, 0, 1, 0xfc))
	marked("points past all", "M115, M118", badMarker, ptr(2, 0, 0, 0xff, 0xfc))
	attacks = append(attacks,
		attack{name: "marker/none", rules: "M20, M21, M114", want: badCRC, run: func(c *conn) []byte {
			// The header starts where the first marker should be: the upper half of the STag is then taken for the
			// length.
			c.raw(peer.FPDU(peer.Tagged(peer.Write, true, 0x00200000, 0, long[:64])))
			return nil
		}},
		attack{name: "marker/one byte late", rules: "M21, M41, M114", want: badCRC, run: func(c *conn) []byte {
			b := peer.Marked(c.at, write(c, long), nil)
			copy(b[508:520], append([]byte{'x'}, b[508:519]...))
			c.raw(b)
			return nil
		}},
		attack{name: "marker/between FPDUs, not zero", rules: "M24, M28, M115", want: badMarker, run: func(c *conn) []byte {
			// The first FPDU ends at byte 512, where the marker is the second's.
			c.raw(peer.Marked(0, write(c, make([]byte, 512-4-2-14-4)), nil))
			c.raw(peer.Marked(512, write(c, []byte("second")), ptr(0, 0, 0, 2, 0)))
			return nil
		}, changed: []string{"all"}},
		attack{name: "marker/early segment's points into an FPDU", rules: "M116, M117", want: badMarker, run: func(c *conn) []byte {
			// The second segment arrives first; its only marker points to the wrong start of its FPDU.
			one := peer.Marked(0, write(c, []byte("first")), nil)
			two := peer.Marked(len(one), write(c, long), ptr(0, 0, 0, 0, 4))
			_ = c.s.SendAt(len(one), two)
			c.raw(one)
			c.s.Advance(len(two))
			return nil
		}, changed: []string{"all"}},
		attack{name: "marker/early segment has a bad CRC", rules: "M121, M122", want: badCRC, run: func(c *conn) []byte {
			one := peer.Marked(0, peer.SendMsg(1, []byte("first")), nil)
			two := peer.Marked(len(one), write(c, long), nil)
			two[len(two)-1] ^= 1
			_ = c.s.SendAt(len(one), two)
			c.raw(one)
			c.s.Advance(len(two))
			return nil
		}, delivered: 1},
		attack{name: "marker/early Write is out of bounds", rules: "D96", want: taggedErr(1), run: func(c *conn) []byte {
			one := peer.Marked(0, peer.SendMsg(1, []byte("first")), nil)
			u := peer.Tagged(peer.Write, true, c.regions["all"].RKey(), 0x10000+regionSize-8, long)
			two := peer.Marked(len(one), u, nil)
			_ = c.s.SendAt(len(one), two)
			c.raw(one)
			c.s.Advance(len(two))
			return u
		}, delivered: 1},
		attack{name: "marker/low bits and reserved field", rules: "M17, M18, M19, M25", want: outcome{}, run: func(c *conn) []byte {
			c.raw(peer.Marked(0, write(c, long), func(i int, m []byte) { m[0], m[1], m[3] = 0xff, 0xff, m[3]|3 }))
			return nil
		}, changed: []string{"all"}},
		attack{name: "marker/right, and the node's are read", rules: "M69", want: untaggedErr(3), run: func(c *conn) []byte {
			c.send(write(c, long), peer.SendMsg(1, long[:slot]))
			u := peer.SendMsg(7, nil)
			c.send(u)
			return u
		}, changed: []string{"all"}, delivered: 1},
	)
	for i := first; i < len(attacks); i++ {
		attacks[i].opts.markers = i%2 == 0 // the other direction must not matter
		attacks[i].opts.on = onMarked
	}

	// Ends.
	ends := func(name string, want outcome, run func(c *conn)) {
		add("end/"+name, "M11, M112, M113, D11, D73, D77", want, func(c *conn) []byte { run(c); return nil })
	}
	ends("FIN before any FPDU", outcome{kind: finished}, func(c *conn) { _ = c.s.CloseWrite() })
	ends("data behind a FIN", outcome{kind: finished}, func(c *conn) {
		_ = c.s.CloseWrite()
		c.send(write(c, []byte("too late")), hello)
	})
	ends("FIN in the length field", outcome{kind: finished}, func(c *conn) { c.raw([]byte{0}); _ = c.s.CloseWrite() })
	ends("FIN in the header", outcome{kind: finished}, func(c *conn) { c.raw(peer.FPDU(hello)[:9]); _ = c.s.CloseWrite() })
	ends("FIN in the payload", outcome{kind: finished}, func(c *conn) { c.raw(peer.FPDU(write(c, long))[:600]); _ = c.s.CloseWrite() })
	ends("FIN in the CRC", outcome{kind: finished}, func(c *conn) {
		b := peer.FPDU(hello)
		c.raw(b[:len(b)-1])
		_ = c.s.CloseWrite()
	})
	ends("FIN in a message", outcome{kind: finished}, func(c *conn) {
		c.send(peer.Untagged(peer.Send, false, 0, 0, 1, 0, []byte("the rest never comes")))
		_ = c.s.CloseWrite()
	})
	ends("RST before any FPDU", outcome{kind: cut}, func(c *conn) { _ = c.s.Reset() })
	ends("RST in an FPDU", outcome{kind: cut}, func(c *conn) { c.raw(peer.FPDU(write(c, long))[:600]); _ = c.s.Reset() })
	ends("RST with a Read outstanding", outcome{kind: cut}, func(c *conn) { c.read(64); _ = c.s.Reset() })
	ends("FIN with a Read outstanding", outcome{kind: finished}, func(c *conn) { c.read(64); _ = c.s.CloseWrite() })
	ends("FIN behind Read Requests", outcome{kind: finished}, func(c *conn) {
		u := peer.ReadReq{Sink: 7, SinkTO: 9, Size: 1200, Src: c.regions["readable"].RKey(), SrcTO: 0x20000}
		v := peer.ReadReq{Sink: 8, SinkTO: 9, Size: 4, Src: c.regions["readable"].RKey(), SrcTO: 0x20000}
		c.send(u.Msg(1), v.Msg(2))
		_ = c.s.CloseWrite()
		b := c.regions["readable"].Bytes()
		c.want(peer.Tagged(peer.ReadResponse, true, 7, 9, b[:1200]))
		c.want(peer.Tagged(peer.ReadResponse, true, 8, 9, b[:4]))
	})
	attacks[len(attacks)-1].rules += ", D74"
	ends("FIN in a Read Response", outcome{kind: finished}, func(c *conn) {
		r := c.read(64)
		c.send(peer.Tagged(peer.ReadResponse, false, r.Sink, r.SinkTO, long[:32]))
		_ = c.s.CloseWrite()
	})
	attacks[len(attacks)-1].changed = []string{"sink"}

	runAttacks(t, attacks)
}
