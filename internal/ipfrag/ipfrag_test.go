package ipfrag

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const (
	start = clock.Time(1e9)
	l4    = 200 // bytes behind the IP header
	size  = 48
)

// frameOf makes a frame with n bytes behind the IP header, all of value fill but
// for the ports, from host of the test's network.
func frameOf(v6 bool, host byte, n int, fill byte) []byte {
	src, dst := netip.AddrFrom4([4]byte{10, 0, 0, host}), netip.MustParseAddr("10.0.0.200")
	if v6 {
		src, dst = netip.AddrFrom16([16]byte{0xfd, 7: host, 15: 1}), netip.MustParseAddr("fd00::200")
	}
	tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(src, 40000), netip.AddrPortFrom(dst, 7174)), Proto: pkt.ProtoTCP, V6: v6,
		SrcMAC: [6]byte{2, 1}, DstMAC: [6]byte{2, 2}, VLANs: [2]uint16{5}, NVLAN: 1}
	b := make([]byte, tu.HeaderLen()+n)
	tu.Put(b, n, pkt.ECT0)
	l := b[tu.HeaderLen():]
	for i := range l {
		l[i] = fill
	}
	copy(l, []byte{0x9c, 0x40, 0x1c, 0x06})
	return b
}

func both(t *testing.T, f func(t *testing.T, v6 bool)) {
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("v6=%v", v6), func(t *testing.T) { f(t, v6) })
	}
}

// same reports whether whole is the packet that want was, to what is above IP.
func same(t *testing.T, whole, want []byte) bool {
	t.Helper()
	var a, b pkt.Packet
	if err := a.Parse(whole, len(whole)); err != nil {
		t.Errorf("what was put together: %v", err)
		return false
	}
	if err := b.Parse(want, len(want)); err != nil {
		t.Fatal(err)
	}
	if a != b {
		t.Errorf("got %+v\nwant %+v", a, b)
	}
	return bytes.Equal(whole[a.L4Off:], want[b.L4Off:])
}

func sameStats(t *testing.T, r *Reassembler, want Stats) {
	t.Helper()
	if got := r.Stats(); got != want {
		t.Errorf("counted %+v\nwant    %+v", got, want)
	}
}

// charged checks that what r holds is charged: in total, to its packet and to its source.
func charged(t *testing.T, r *Reassembler) {
	t.Helper()
	total, sources := 0, map[*source]int{}
	for _, p := range r.packets {
		n := overhead + len(p.head) + len(p.quote)
		for _, f := range p.pieces {
			n += overhead + len(f.b)
		}
		if p.cost != n {
			t.Fatalf("a packet costs %d, and holds %d", p.cost, n)
		}
		total += n
		sources[p.src] += n
	}
	for s, n := range sources {
		if s.cost != n || r.sources[s.key] != s {
			t.Fatalf("a source costs %d, and holds %d", s.cost, n)
		}
	}
	if r.cost != total || len(r.sources) != len(sources) {
		t.Fatalf("%d sources cost %d; %d hold %d", len(r.sources), r.cost, len(sources), total)
	}
}

// TestOrders puts five fragments together in each of their orders.
func TestOrders(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		want := frameOf(v6, 1, l4, 7)
		var orders func(done []int)
		n := uint64(0)
		r := New(Config{})
		orders = func(done []int) {
			if len(done) < 5 {
			next:
				for i := range 5 {
					for _, d := range done {
						if d == i {
							continue next
						}
					}
					orders(append(done[:len(done):len(done)], i))
				}
				return
			}
			n++
			frames := testenv.Cut(want, size, uint32(n))
			for i, d := range done {
				whole := r.Handle(start, frames[d])
				if (whole != nil) != (i == 4) || i == 4 && !same(t, whole, want) {
					t.Fatalf("order %v, step %d: %x", done, i, whole)
				}
			}
		}
		orders(nil)
		sameStats(t, r, Stats{Received: 5 * n, Packets: n})
		if v6 {
			return
		}
		// An identification is of one protocol (RFC 791 section 3.2).
		frames := testenv.Cut(want, size, 0)
		other := bytes.Clone(frames[0])
		ip := other[18:38]
		ip[9], ip[10], ip[11] = pkt.ProtoSCTP, 0, 0
		binary.BigEndian.PutUint16(ip[10:], pkt.Checksum(pkt.Sum(ip, 0)))
		for i, f := range append([][]byte{other}, frames...) {
			if whole := r.Handle(start, f); (whole != nil) != (i == 5) || i == 5 && !same(t, whole, want) {
				t.Fatalf("step %d, with a fragment of another protocol: %x", i, whole)
			}
		}
	})
}

// TestOverlap checks that overlapping fragments, which no router makes, end the packet,
// and that its later fragments are dropped too.
func TestOverlap(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		p, other, short := frameOf(v6, 1, l4, 7), frameOf(v6, 1, l4, 8), frameOf(v6, 1, l4-8, 7)
		c, o, s, wide := testenv.Cut(p, size, 1), testenv.Cut(other, size, 1), testenv.Cut(short, size, 1), testenv.Cut(p, 2*size, 1)
		for _, tc := range []struct {
			name string
			in   [][]byte
		}{
			{"other bytes", [][]byte{c[0], c[1], o[1]}},
			{"wider", [][]byte{c[0], c[1], wide[0]}},
			{"narrower", [][]byte{wide[0], c[0]}},
			{"into the next", [][]byte{c[2], c[3], wide[1]}},
			{"from within", [][]byte{wide[0], c[1]}},
			{"from within, by one unit", [][]byte{testenv.Cut(p, size+8, 1)[0], c[1]}},
			{"into the next, by one unit", [][]byte{c[1], testenv.Cut(p, size+8, 1)[0]}},
			{"two ends", [][]byte{c[4], s[3]}},
			{"two ends, the later one longer", [][]byte{s[3], c[4]}},
			{"behind the end", [][]byte{testenv.Cut(frameOf(v6, 1, 2*size, 7), size, 1)[1], c[2]}},
			{"an end that is none", [][]byte{c[3], testenv.Cut(frameOf(v6, 1, 2*size, 7), size, 1)[1]}},
			{"an end in the middle", [][]byte{c[1], testenv.Cut(frameOf(v6, 1, 2*size, 7), size, 1)[1]}},
		} {
			t.Run(tc.name, func(t *testing.T) {
				r := New(Config{})
				for _, f := range tc.in {
					if r.Handle(start, f) != nil {
						t.Fatal("complete")
					}
				}
				if st := r.Stats(); st.Overlap != 1 || st.Bytes != overhead {
					t.Errorf("%+v", st)
				}
				for _, f := range c {
					if r.Handle(start, f) != nil {
						t.Error("complete, after an overlap")
					}
				}
				r.HandleTimeout(start.Add(Timeout6))
				if st := r.Stats(); st.Timeout != 0 || st.Waiting != 0 {
					t.Errorf("after its time %+v", st)
				}
				for _, f := range testenv.Cut(p, size, 2) { // another packet is not affected
					if whole := r.Handle(start, f); whole != nil && same(t, whole, p) {
						return
					}
				}
				t.Error("the next packet does not become whole")
			})
		}
	})
}

// TestDuplicate checks that a duplicated fragment does no harm.
func TestDuplicate(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		p := frameOf(v6, 1, l4, 7)
		c := testenv.Cut(p, size, 1)
		for first := range c {
			for _, order := range [][]int{{first, first, 0, 1, 2, 3, 4}, {4, first, first, 0, 1, 2, 3}} {
				r := New(Config{})
				var whole []byte
				n := uint64(0)
				for ; whole == nil && n < 7; n++ {
					whole = r.Handle(start, c[order[n]])
				}
				same(t, whole, p)
				sameStats(t, r, Stats{Received: n, Packets: 1, Duplicate: n - 5})
			}
		}
	})
}

// TestApart checks that fragments of different packets are kept apart.
func TestApart(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		r := New(Config{})
		a, b, c := frameOf(v6, 1, l4, 1), frameOf(v6, 2, l4, 2), frameOf(v6, 1, l4, 3)
		fa, fb, fc := testenv.Cut(a, size, 1), testenv.Cut(b, size, 1), testenv.Cut(c, size, 2)
		for i := range 5 {
			wa, wb, wc := r.Handle(start, fa[i]), r.Handle(start, fb[i]), r.Handle(start, fc[i])
			if i == 4 && !(same(t, wa, a) && same(t, wb, b) && same(t, wc, c)) {
				t.Error("mixed")
			}
		}
		sameStats(t, r, Stats{Received: 15, Packets: 3})
	})
}

// TestKey checks that the destination and in IPv4 the protocol distinguish packets. In IPv6 only the first fragment has the
// protocol, and others may have anything in its place (RFC 8200, Section 4.5).
func TestKey(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		want := frameOf(v6, 1, l4, 7)
		dst, proto := 18+19, 18+9
		if v6 {
			dst, proto = 18+39, 18+40
		}
		for at, apart := range map[int]bool{dst: true, proto: !v6} {
			r := New(Config{})
			var whole []byte
			for i, f := range testenv.Cut(want, size, 1) {
				if i > 0 {
					f[at] ^= 2
					if !v6 {
						testenv.FixIPv4(f[18:38])
					}
				}
				whole = r.Handle(start, f)
			}
			if n := r.Stats().Waiting; (whole == nil) != apart || apart != (n == 2) {
				t.Errorf("byte %d differs: whole %v, %d packets wait", at, whole != nil, n)
			}
			if whole != nil {
				same(t, whole, want)
			}
		}
	})
}

// TestTimeout checks that a packet is dropped a fixed time after its first fragment
// arrived, and that the source of its first fragment gets an ICMP error (RFC 1122,
// Section 3.3.2; RFC 8200, Section 4.5).
func TestTimeout(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		limit := Timeout4
		if v6 {
			limit = Timeout6
		}
		c := testenv.Cut(frameOf(v6, 1, 4000, 7), 1400, 1)
		for _, tc := range []struct {
			name string
			in   []int
			tell bool
		}{{"first there", []int{1, 0}, true}, {"first missing", []int{1, 2}, false}} {
			t.Run(tc.name, func(t *testing.T) {
				r := New(Config{})
				r.Handle(start, c[tc.in[0]])
				if at := r.Deadline(); at != start.Add(limit) {
					t.Errorf("deadline %v", at)
				}
				r.Handle(start.Add(time.Second), c[tc.in[1]])
				if at := r.Deadline(); at != start.Add(limit) {
					t.Errorf("deadline %v after the second", at)
				}
				r.HandleTimeout(start.Add(limit - 1))
				if r.Stats().Waiting != 1 {
					t.Error("given up too early")
				}
				r.HandleTimeout(start.Add(limit))
				sameStats(t, r, Stats{Received: 2, Timeout: 1})
				if r.Deadline() != 0 {
					t.Error("a deadline for nothing")
				}
				e, ok := r.PollExpired()
				if ok != tc.tell {
					t.Fatalf("an error: %v", ok)
				}
				if !ok {
					return
				}
				want, most := c[0][18:], 576-28
				if v6 {
					most = 1280 - 48
				}
				if !bytes.Equal(e.Head, c[0][:18]) || !bytes.Equal(e.Quote, want[:min(len(want), most)]) {
					t.Errorf("error of %d bytes: %x %x", len(e.Quote), e.Head, e.Quote)
				}
				if _, ok := r.PollExpired(); ok {
					t.Error("two errors")
				}
			})
		}
	})
}

// TestLate checks that the last fragment is useless when the time is over, and that the families, whose time differs, do not
// wait for each other.
func TestLate(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		limit := Timeout4
		if v6 {
			limit = Timeout6
		}
		for _, at := range []time.Duration{limit - 1, limit} {
			r := New(Config{})
			var whole []byte
			for i, f := range testenv.Cut(frameOf(v6, 1, l4, 7), size, 1) {
				now := start
				if i == 4 {
					now = start.Add(at)
				}
				whole = r.Handle(now, f)
			}
			if (whole != nil) != (at < limit) {
				t.Errorf("the last fragment after %v: whole %v", at, whole != nil)
			}
		}
	})
	r := New(Config{})
	r.Handle(start, testenv.Cut(frameOf(true, 1, l4, 7), size, 1)[0])
	r.Handle(start.Add(time.Second), testenv.Cut(frameOf(false, 1, l4, 7), size, 1)[0])
	if at := start.Add(time.Second + Timeout4); r.Deadline() != at {
		t.Errorf("deadline %v, want %v", r.Deadline(), at)
	}
	r.HandleTimeout(start.Add(time.Second + Timeout4))
	if st := r.Stats(); st.Timeout != 1 || st.Waiting != 1 || r.Deadline() != start.Add(Timeout6) {
		t.Errorf("%+v, deadline %v", st, r.Deadline())
	}
}

// TestErrorsAreFew checks that many incomplete packets cause only a few errors a second, and
// frames to a group none.
func TestErrorsAreFew(t *testing.T) {
	r := New(Config{})
	errors := func() (n int) {
		for {
			if _, ok := r.PollExpired(); !ok {
				return n
			}
			n++
		}
	}
	fill := func(now clock.Time, host, group byte) {
		for i := range 500 {
			f := testenv.Cut(frameOf(false, host, l4, 7), size, uint32(i))[0]
			f[0] |= group
			r.Handle(now, f)
		}
	}
	at := start
	for range 2 {
		fill(at, 1, 0)
		at = at.Add(Timeout4)
		r.HandleTimeout(at)
		if n := errors(); n != maxErrors {
			t.Errorf("%d errors", n)
		}
		fill(at, 1, 0) // these end in the same second as those after them
		fill(at.Add(time.Second-1), 2, 0)
		for i, want := range []int{maxErrors, 0} {
			r.HandleTimeout(at.Add(Timeout4 + time.Duration(i)*(time.Second-1)))
			if n := errors(); n != want {
				t.Errorf("%d errors, want %d", n, want)
			}
		}
		at = at.Add(Timeout4 + time.Second)
	}
	for range 2 { // nobody polls them
		fill(at, 1, 0)
		at = at.Add(Timeout4)
		r.HandleTimeout(at)
	}
	if n := errors(); n != maxErrors {
		t.Errorf("%d errors wait", n)
	}
	fill(at, 1, 1)
	r.HandleTimeout(at.Add(Timeout4))
	if n := errors(); n != 0 {
		t.Errorf("%d errors about frames to a group", n)
	}
}

// TestECN is the table of RFC 3168, Section 5.3.
func TestECN(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		for _, tc := range []struct{ first, second, want int }{
			{pkt.NotECT, pkt.NotECT, pkt.NotECT}, {pkt.ECT0, pkt.ECT0, pkt.ECT0}, {pkt.ECT1, pkt.ECT1, pkt.ECT1}, {pkt.CE, pkt.CE, pkt.CE},
			{pkt.ECT0, pkt.CE, pkt.CE}, {pkt.CE, pkt.ECT0, pkt.CE}, {pkt.ECT1, pkt.CE, pkt.CE}, {pkt.CE, pkt.ECT1, pkt.CE},
			{pkt.NotECT, pkt.CE, -1}, {pkt.CE, pkt.NotECT, -1},
			{pkt.ECT0, pkt.ECT1, pkt.ECT0}, {pkt.NotECT, pkt.ECT0, pkt.NotECT}, // not specified: as the first
		} {
			r := New(Config{})
			c := testenv.Cut(frameOf(v6, 1, 2*size, 7), size, 1)
			for i, ecn := range []int{tc.first, tc.second} {
				ip := c[i][18:]
				if v6 {
					ip[1] = ip[1]&^0x30 | byte(ecn)<<4
				} else {
					ip[1] = ip[1]&^3 | byte(ecn)
					testenv.FixIPv4(ip[:20])
				}
			}
			r.Handle(start, c[0])
			whole := r.Handle(start, c[1])
			if tc.want < 0 {
				if st := r.Stats(); whole != nil || st.ECN != 1 || st.Waiting != 0 {
					t.Errorf("%+v: %+v", tc, st)
				}
				continue
			}
			var p pkt.Packet
			if err := p.Parse(whole, len(whole)); err != nil || int(p.ECN) != tc.want {
				t.Errorf("%+v: %v, ECN %d", tc, err, p.ECN)
			}
		}
	})
}

// TestLengths checks the largest possible packet, and one that its headers make too
// large.
func TestLengths(t *testing.T) {
	for _, tc := range []struct {
		v6 bool
		n  int
	}{{false, 65535 - 20}, {true, 65535}} {
		r := New(Config{})
		p := frameOf(tc.v6, 1, tc.n, 7)
		var whole []byte
		for _, f := range testenv.Cut(p, 1480, 1) {
			whole = r.Handle(start, f)
		}
		if !same(t, whole, p) {
			t.Errorf("%d bytes: another packet", tc.n)
		}
	}
	// The options, or a header before the Fragment header, are in the first fragment alone.
	both(t, func(t *testing.T, v6 bool) {
		r := New(Config{})
		n, header := 65535-20, 20
		if v6 {
			n, header = 65535, 40
		}
		c := testenv.Cut(frameOf(v6, 1, n, 7), 1480, 1)
		ip := slices.Insert(bytes.Clone(c[0][18:]), header, make([]byte, 8)...)
		if v6 {
			ip[header], ip[6] = ip[6], 0 // Hop-by-Hop Options
			ip[4], ip[5] = byte((len(ip)-40)>>8), byte((len(ip)-40)&0xff)
		} else {
			ip[0] = 0x47
			ip[2], ip[3] = byte(len(ip)>>8), byte(len(ip)&0xff)
			testenv.FixIPv4(ip[:28])
		}
		c[0] = append(c[0][:18:18], ip...)
		for _, f := range c {
			if r.Handle(start, f) != nil {
				t.Error("a packet of more than 65535 bytes")
			}
		}
		r.Handle(start, c[0][:30])
		sameStats(t, r, Stats{Received: uint64(len(c)) + 1, Malformed: 2})
	})
}

// TestBounds checks that the memory stays within its bounds, whatever arrives, and that
// packets whose fragments arrive together are reassembled in the middle of a flood.
func TestBounds(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		rnd := testenv.Rand(t)
		cfg := Config{Bytes: 64 << 10, PerSource: 16 << 10}
		r := New(cfg)
		good, now := 0, start
		for i := range 3000 {
			now = now.Add(time.Millisecond)
			host := byte(rnd.IntN(20) * rnd.IntN(2)) // one sends more than a source may have
			c := testenv.Cut(frameOf(v6, host, 600, 1), 200, uint32(rnd.IntN(100)))
			r.Handle(now, c[rnd.IntN(3)])
			if i%10 == 0 {
				p := frameOf(v6, 99, 600, 2)
				for _, f := range testenv.Cut(p, 200, uint32(i)) {
					if whole := r.Handle(now, f); whole != nil && same(t, whole, p) {
						good++
					}
				}
			}
			if st := r.Stats(); st.Bytes > uint64(cfg.Bytes) {
				t.Fatalf("%+v", st)
			}
			charged(t, r)
			for _, s := range r.sources {
				if s.cost > cfg.PerSource {
					t.Fatalf("a source has %d", s.cost)
				}
			}
		}
		if st := r.Stats(); good != 300 || st.Evicted == 0 {
			t.Errorf("%d of 300 packets whole, %+v", good, st)
		}
		r.HandleTimeout(now.Add(Timeout6))
		if st := r.Stats(); st.Waiting != 0 || st.Bytes != 0 || len(r.sources) != 0 {
			t.Errorf("left: %+v, %d sources", st, len(r.sources))
		}
	})
}

// TestOldestOfBoth checks that the oldest packet makes room, whichever its family is.
func TestOldestOfBoth(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		r := New(Config{Bytes: 1200, PerSource: 1200})
		for i, of6 := range []bool{v6, !v6, !v6} {
			r.Handle(start.Add(time.Duration(i)*time.Second), testenv.Cut(frameOf(of6, 1, l4, 7), size, uint32(i))[1])
		}
		for k := range r.packets {
			if k.id == 0 {
				t.Error("the oldest has stayed")
			}
		}
		if st := r.Stats(); st.Waiting != 2 || st.Evicted != 1 {
			t.Errorf("%+v", st)
		}
	})
}

// TestManyPieces checks that a packet in more fragments than any path makes is dropped.
func TestManyPieces(t *testing.T) {
	both(t, func(t *testing.T, v6 bool) {
		r := New(Config{})
		for i, f := range testenv.Cut(frameOf(v6, 1, 24*(maxPieces+1), 7), 24, 1) {
			if r.Handle(start, f) != nil {
				t.Fatalf("whole after %d", i)
			}
		}
		if st := r.Stats(); st.Overlap != 1 || st.Bytes != overhead {
			t.Errorf("%+v", st)
		}
	})
}

// TestSources checks that IPv6 sources in one /64 count as one.
func TestSources(t *testing.T) {
	r := New(Config{})
	for i := range 10 {
		f := testenv.Cut(frameOf(true, 1, l4, 7), size, 1)[0]
		f[18+8+8+7*(i%2)] = byte(i + 1)
		r.Handle(start, f)
	}
	if len(r.sources) != 1 || len(r.packets) != 10 {
		t.Errorf("%d sources, %d packets", len(r.sources), len(r.packets))
	}
}

// FuzzHandle cuts a packet at places of the fuzzer's choice, doubles, drops and
// changes fragments: what comes out whole is what went in, or was changed.
func FuzzHandle(f *testing.F) {
	f.Add(false, []byte{0, 1, 2, 3, 4})
	f.Add(true, []byte{4, 3, 2, 1, 0})
	f.Add(true, []byte{0, 0, 0x45, 1, 0x81, 2, 3, 4})
	f.Fuzz(func(t *testing.T, v6 bool, script []byte) {
		r := New(Config{Bytes: 8 << 10, PerSource: 4 << 10})
		p := frameOf(v6, 1, l4, 7)
		now, changed := start, false
		for i, op := range script {
			id := uint32(op >> 5 & 1)
			frames := testenv.Cut(p, size+int(op>>4&1)*8, id)
			b := frames[int(op&15)%len(frames)]
			switch op >> 6 {
			case 1: // of whatever the script has next
				if i+2 < len(script) {
					at := 12 + int(script[i+1])%(len(b)-12)
					b[at] ^= script[i+2]
					if !v6 && at >= 18 && at < 38 && len(b) > 38 {
						testenv.FixIPv4(b[18:38])
					}
					changed = true
				}
			case 2:
				now = now.Add(10 * time.Second)
			}
			whole := r.Handle(now, b)
			if whole != nil && !changed && !same(t, whole, p) {
				t.Fatal("another packet")
			}
			charged(t, r)
			for _, q := range r.packets {
				if q.byAge.Value != q || q.have > 0 && q.refused && q.pieces != nil {
					t.Fatalf("%+v", q)
				}
			}
			if r.cost > 8<<10 {
				t.Fatalf("cost %d", r.cost)
			}
			for {
				if _, ok := r.PollExpired(); !ok {
					break
				}
			}
		}
		r.HandleTimeout(now.Add(Timeout6))
		if r.cost != 0 || len(r.packets) != 0 || len(r.sources) != 0 || r.Deadline() != 0 {
			t.Fatalf("left: %d bytes, %d packets, %d sources", r.cost, len(r.packets), len(r.sources))
		}
	})
}
