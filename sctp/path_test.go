package sctp

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestHeartbeatAndFailover checks that a second address of the peer is verified, and used when the first one is
// silent.
func TestHeartbeatAndFailover(t *testing.T) {
	r := newRig(t, Config{Heartbeat: time.Second})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	b := appendParam(r.initChunk(ChunkInit, nil), paramIPv4, []byte{10, 0, 0, 9})
	be.PutUint16(b[2:], uint16(len(b)))
	r.send(0, b)
	var c Chunk
	var i Init
	ack := r.one(ChunkInitAck)
	NextChunk(ack, HeaderLen, &c)
	i.Decode(c.Body)
	r.cookieEcho(i)
	if r.a.Paths() != 2 || r.a.Primary() != 0 || r.a.Path(1).Confirmed {
		t.Fatal("no second path")
	}
	answer := true
	var o Out
	second := netip.AddrFrom4([4]byte{10, 0, 0, 9})
	for range 3000 {
		for r.a.PollTransmit(r.now, &o) {
			if NextChunk(o.Head, HeaderLen, &c); c.Type == ChunkHeartbeat && o.Path == 1 && answer {
				f := r.flow
				f.Remote = pkt.NewFlow(netip.AddrPortFrom(second, 1), netip.AddrPortFrom(second, 1)).Remote
				h := Header{f.RemotePort, f.LocalPort, r.a.tag}
				r.a.HandlePacket(r.now, f, 0, append(h.Append(nil), chunk(ChunkHeartbeatAck, 0, c.Body)...))
			}
		}
		d := r.a.Deadline()
		if d == 0 {
			break
		}
		r.now = max(d, r.now)
		r.a.HandleTimeout(r.now)
		if cur := r.a.Primary(); cur == 1 {
			break
		}
	}
	if cur := r.a.Primary(); cur != 1 || !r.a.Path(1).Confirmed || r.a.Path(0).Active || r.a.Stats().Failovers != 1 {
		t.Fatalf("no failover: %+v %+v %v", r.a.Path(0), r.a.Path(1), r.a.Err())
	}
	r.a.Push(&Message{Buf: 1, Len: 10})
	for r.a.PollTransmit(r.now, &o) && o.N == 0 {
	}
	if o.N != 1 || o.Path != 1 {
		t.Error("data go to the path that is down")
	}
	r.take()
	// A HEARTBEAT ACK with a wrong nonce confirms nothing; a HEARTBEAT from the peer is answered with its own bytes.
	r.send(r.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}))
	if s := r.take(); len(s) != 1 || string(s[0][HeaderLen+4:]) != "\x00\x01\x00\x08\x01\x02\x03\x04" {
		t.Errorf("sent %x", s)
	}
}

// TestPathMTU checks that an ICMP error with the right tag lowers the message size and one with a wrong tag does not.
func TestPathMTU(t *testing.T) {
	r := listening(t, Config{})
	if r.a.MaxMessage() != 1452 {
		t.Fatal(r.a.MaxMessage())
	}
	r.push(1452)
	r.take()
	e := pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: pkt.TooBig, MTU: 1000, Seq: r.a.peerTag + 1}
	r.a.HandleICMP(r.now, &e)
	if r.a.MaxMessage() != 1452 {
		t.Error("a forged ICMP error is believed")
	}
	e.Seq--
	r.a.HandleICMP(r.now, &e)
	if r.a.MaxMessage() != 1000-48 {
		t.Error(r.a.MaxMessage())
	}
	var o Out
	if !r.a.PollTransmit(r.now, &o) || !o.Fragment || o.N != 1 {
		t.Error("what is in flight does not leave as IP fragments")
	}
	// At the minimum fragment size an error changes nothing.
	for _, n := range []int{1, 0} {
		e.MTU = 400
		r.a.HandleICMP(r.now, &e)
		r.drain(nil)
		if got := len(r.take()); got != n || r.a.Path(0).MTU != 576 {
			t.Errorf("%d packets sent again, MTU %d; want %d, 576", got, r.a.Path(0).MTU, n)
		}
	}
	six := newRig(t, Config{})
	six.flow = simFlow(0, true)
	six.a = Dial(six.now, &six.cfg, six.flow, &six.key, 1500)
	six.a.HandleICMP(six.now, &pkt.ICMPError{Flow: six.flow, Proto: 132, Kind: pkt.TooBig, MTU: 1000, InitTag: six.a.tag})
	if n := six.a.MaxMessage(); n != 1280-40-12-16 {
		t.Errorf("%d bytes in a packet of IPv6, whose links have 1280 at least", n)
	}
	u := listening(t, Config{UDP: true})
	if u.a.MaxMessage() != 1444 {
		t.Error(u.a.MaxMessage())
	}
}

// TestICMPUnreachable checks RFC 9260 section 10 and RFC 6951 5.5.
func TestICMPUnreachable(t *testing.T) {
	const v4, v6, udp4 = 1, 2, 3
	const never = maxInit + 1
	for _, c := range []struct {
		name   string
		over   int
		kind   pkt.ICMPKind
		code   uint8
		setup  int  // number of retransmissions of INIT after which it ends the set-up
		always bool // ends the association in any state
	}{
		{"network", v4, pkt.Unreachable, 0, 2, false},
		{"host", v4, pkt.Unreachable, 1, 2, false},
		{"protocol", v4, pkt.Unreachable, 2, 0, true},
		{"port", v4, pkt.Unreachable, 3, never, false},
		{"prohibited", v4, pkt.Unreachable, 13, 0, false},
		{"time exceeded", v4, pkt.TimeExceeded, 0, 2, false},
		{"no route, IPv6", v6, pkt.Unreachable, 0, 2, false},
		{"prohibited, IPv6", v6, pkt.Unreachable, 1, 0, false},
		{"port, IPv6", v6, pkt.Unreachable, 4, never, false},
		{"next header", v6, pkt.ParameterProblem, 1, 0, true},
		{"header field", v6, pkt.ParameterProblem, 0, never, false},
		{"port, of UDP", udp4, pkt.Unreachable, 3, 0, true},
		{"host, of UDP", udp4, pkt.Unreachable, 1, 2, false},
	} {
		for _, stop := range []State{CookieWait, CookieEchoed, Established} {
			r := newRig(t, Config{UDP: c.over == udp4})
			r.flow = simFlow(0, c.over == v6)
			r.a = Dial(r.now, &r.cfg, r.flow, &r.key, 1500)
			e := pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: c.kind, Code: c.code, InitTag: r.a.tag}
			forged := e
			forged.InitTag++
			if stop > CookieWait {
				r.send(r.a.tag, r.initChunk(ChunkInitAck, []byte("cookie")))
				e.InitTag, e.Seq = 0, rigTag
				forged.InitTag, forged.Seq = 0, rigTag+1
			}
			if stop == Established {
				r.send(r.a.tag, chunk(ChunkCookieAck, 0, nil))
			}
			r.a.HandleICMP(r.now, &forged)
			if r.a.State() != stop {
				t.Fatalf("%s in %v: a forged ICMP error is believed", c.name, stop)
			}
			again := 0 // retransmissions of INIT
			for r.a.HandleICMP(r.now, &e); r.a.State() == CookieWait && again < maxInit; r.a.HandleICMP(r.now, &e) {
				again++
				r.wait(r.a.Deadline().Sub(r.now))
			}
			ends := c.always || c.setup != never && stop == CookieWait
			if stop == CookieWait && again != min(c.setup, maxInit) {
				t.Errorf("%s ends the set-up after %d retransmissions, not %d", c.name, again, c.setup)
			}
			why := ErrUnreachable
			if c.always {
				why = ErrNoSCTP
			}
			if (r.a.Err() == why) != ends || (r.a.State() == Closed) != ends {
				t.Errorf("%s in %v: %v, %v", c.name, stop, r.a.State(), r.a.Err())
			}
		}
	}
}

// TestVerification checks that one unverified path is probed in each RTO (HB.Max.Burst, RFC 9260 5.4), in turn, even
// if none answers.
func TestVerification(t *testing.T) {
	for _, answers := range []bool{true, false} {
		r := manyHomed(t, Config{}, 8)
		asked := map[int]int{}
		times := 0
		var last clock.Time
		for range 290 {
			n := r.heartbeats(func(int) bool { return answers })
			delete(n, 0)
			for i, k := range n {
				if asked[i], times = asked[i]+k, times+k; last != 0 && r.now.Sub(last) < 900*time.Millisecond { // observed up to one step late
					t.Fatalf("answers %v: path %d is asked %v after another", answers, i, r.now.Sub(last))
				}
				last = r.now
			}
			r.wait(100 * time.Millisecond)
		}
		for i := 1; i < 8; i++ {
			if asked[i] == 0 || answers && !r.a.Path(i).Confirmed {
				t.Errorf("answers %v: path %d was asked %d times: %+v", answers, i, asked[i], r.a.Path(i))
			}
		}
		if answers && times != 7 {
			t.Errorf("%d HEARTBEATs for 7 paths: %v", times, asked)
		}
		if r.a.State() != Established {
			t.Fatal(r.a.Err())
		}
	}
}

// TestSilentPaths checks that silent paths that are not in use do not end the association (8.1), and are probed at
// the usual rate once they are down (8.3).
func TestSilentPaths(t *testing.T) {
	r := manyHomed(t, Config{}, 8)
	all := func(int) bool { return true }
	for range 200 {
		r.heartbeats(all)
		r.wait(100 * time.Millisecond)
	}
	for i := range 8 {
		if !r.a.Path(i).Confirmed {
			t.Fatalf("path %d is not verified", i)
		}
	}
	asked := map[int]int{}
	for range 36000 { // an hour
		for i, n := range r.heartbeats(func(i int) bool { return i == 0 }) {
			asked[i] += n
		}
		r.wait(100 * time.Millisecond)
		if r.a.State() != Established {
			t.Fatalf("%v after %v: %v", r.a.State(), r.now.Sub(simStart), r.a.Err())
		}
	}
	for i := 1; i < 8; i++ {
		if n := asked[i]; r.a.Path(i).Active || n < 35 || n > 55 { // every 90 s, at the maximum RTO
			t.Errorf("path %d: active %v, asked %d times in an hour", i, r.a.Path(i).Active, n)
		}
	}
	if i := r.a.Primary(); i != 0 || r.a.Stats().Failovers != 0 {
		t.Errorf("path %d in use", i)
	}
	// They become active again.
	for range 3000 {
		r.heartbeats(all)
		r.wait(100 * time.Millisecond)
	}
	for i := range 8 {
		if !r.a.Path(i).Active {
			t.Errorf("path %d answers, and is down", i)
		}
	}
}

// TestHeartbeatPeriod checks that on an idle path one HEARTBEAT is sent per HB.interval plus RTO, which backs off for
// each unanswered one, with a jitter of half the RTO (8.3); that an unanswered one is counted when its RTO expires;
// and that a late answer still clears the count.
func TestHeartbeatPeriod(t *testing.T) {
	const interval = 10 * time.Second
	for _, late := range []bool{false, true} {
		r := listening(t, Config{Heartbeat: interval})
		var last clock.Time
		var c Chunk
		n, rto := 0, time.Second
		for r.a.State() == Established {
			at := r.a.Deadline()
			errors := r.a.TimeoutsInARow()
			r.wait(at.Sub(r.now))
			switch s := r.take(); {
			case len(s) == 1 && types(s[0])[0] == ChunkHeartbeat:
				if d := r.now.Sub(last); n > 0 && (d < interval+rto/2 || d > interval+rto*3/2) {
					t.Errorf("HEARTBEAT %d is sent %v after the one before, at an RTO of %v", n, d, rto)
				}
				n++
				last = r.now
				NextChunk(s[0], HeaderLen, &c)
			case r.a.State() == Established && r.a.TimeoutsInARow() == errors+1:
				if d := r.now.Sub(last); d != rto {
					t.Errorf("HEARTBEAT %d is given up after %v, at an RTO of %v", n, d, rto)
				}
				if rto = min(2*rto, 60*time.Second); late && n == 5 {
					r.wait(interval / 2)
					r.send(r.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
					if r.a.TimeoutsInARow() != 0 || r.a.Path(0).SRTT != r.now.Sub(last) {
						t.Errorf("a late answer: %d errors, RTT %v", r.a.TimeoutsInARow(), r.a.Path(0).SRTT)
					}
					rto, last = r.a.Path(0).RTO, r.now
				}
			}
		}
		want := 11 // Association.Max.Retrans is 10
		if late {
			want += 5
		}
		if n != want || r.a.Err() != ErrTimeout {
			t.Errorf("late %v: the association ends after %d HEARTBEATs, want %d: %v", late, n, want, r.a.Err())
		}
	}
}

// TestReturn checks that data uses another path while its own is down, and returns to its own when that is up.
func TestReturn(t *testing.T) {
	r := manyHomed(t, Config{}, 2)
	for range 20 {
		r.heartbeats(func(int) bool { return true })
		r.wait(100 * time.Millisecond)
	}
	down := true
	base := r.a.cumAck
	used := []int{}
	for i := range 2000 {
		if r.a.Room() > 0 && r.a.Unacked() == 0 {
			r.push(100)
		}
		to := r.to
		for k, b := range r.take() {
			var c Chunk
			NextChunk(b, HeaderLen, &c)
			switch p := to[k]; {
			case p == 0 && down:
			case c.Type == ChunkHeartbeat:
				r.sendFrom(p, r.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
			case c.Type == ChunkData:
				if len(used) == 0 || used[len(used)-1] != p {
					used = append(used, p)
				}
				base = serial.Max(base, serial.Num(be.Uint32(c.Body)))
				r.sendFrom(p, r.a.tag, sackBytes(base, 100000))
			}
		}
		if r.wait(100 * time.Millisecond); r.a.State() != Established {
			t.Fatal(r.a.Err())
		}
		if i == 1000 {
			down = false
		}
	}
	if !slices.Equal(used, []int{1, 0}) || r.a.Stats().Failovers != 2 {
		t.Errorf("paths in use %v, %d fail-overs", used, r.a.Stats().Failovers)
	}
}

// TestPathChanged checks that what waits for a backed-off timer leaves when the path changes, and that nothing else
// does.
func TestPathChanged(t *testing.T) {
	for _, c := range []struct {
		name string
		make func() *rig // an association in which something waits
		sent ChunkType
	}{
		{"T1", func() *rig { return dialing(t, Config{}, CookieWait) }, ChunkInit},
		{"T3", func() *rig { r := listening(t, Config{}); r.push(10); return r }, ChunkData},
		{"first probe", func() *rig { r := listening(t, Config{}); r.push(10); return r }, ChunkData},
		{"probe", func() *rig {
			r := listening(t, Config{})
			r.push(10)
			r.send(r.a.tag, sackBytes(r.a.cumAck+1, 0))
			r.push(10)
			return r
		}, ChunkData},
		{"T2", func() *rig { r := listening(t, Config{}); r.a.Close(r.now); return r }, ChunkShutdown},
	} {
		r := c.make()
		for range 5 {
			r.wait(r.a.Deadline().Sub(r.now))
			if c.name == "probe" {
				r.send(r.a.tag, sackBytes(r.a.cumAck, 0))
			}
		}
		if c.name == "first probe" { // of a window that closes when the backed-off RTO has brought the data across
			r.send(r.a.tag, sackBytes(r.a.cumAck+1, 0))
			r.push(10)
		}
		r.take()
		r.a.PathChanged(r.now, 0)
		r.drain(nil)
		if s := r.take(); len(s) != 1 || types(s[0])[0] != c.sent {
			t.Errorf("%s: sent %v, want one %v", c.name, describe(s), c.sent)
		}
	}
	r := listening(t, Config{})
	r.push(10)
	r.take()
	r.a.PathChanged(r.now, 0)
	r.drain(nil)
	r.none()
}

// TestUnconfirmed checks that only HEARTBEAT and HEARTBEAT ACK are sent to an unverified address (5.4).
func TestUnconfirmed(t *testing.T) {
	r := manyHomed(t, Config{}, 2)
	r.take()
	check := func(what string, want ...ChunkType) {
		t.Helper()
		to := r.to
		var at1 []ChunkType
		for k, b := range r.take() {
			if to[k] == 1 {
				at1 = append(at1, types(b)...)
			}
		}
		if !slices.Equal(at1, want) {
			t.Errorf("%s: %v go to an address that is not verified, want %v", what, at1, want)
		}
	}
	r.sendFrom(1, r.a.tag, dataBytes(7, rigTSN, 0, 0, "a"))
	check("DATA")
	r.sendFrom(1, r.a.tag, dataBytes(7, rigTSN+1, 10, 0, "no such stream"))
	check("an invalid stream")
	r.sendFrom(1, r.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}), dataBytes(7|flagImmediate, rigTSN+2, 0, 0, "b"))
	check("HEARTBEAT and DATA", ChunkHeartbeatAck)
	r.send(r.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}), dataBytes(7|flagImmediate, rigTSN+3, 0, 0, "c"))
	if s := r.take(); len(s) != 1 || !slices.Equal(types(s[0]), []ChunkType{ChunkHeartbeatAck, ChunkSack}) {
		t.Errorf("sent %v", describe(s))
	}
}

// TestHeartbeatsFill checks that the answers to a peer's HEARTBEATs stay within the path's MTU.
func TestHeartbeatsFill(t *testing.T) {
	r := listening(t, Config{})
	r.a.SetMTU(0, 576)
	body := make([]byte, 400)
	for range 3 {
		h := Header{r.flow.RemotePort, r.flow.LocalPort, r.a.tag}
		r.a.HandlePacket(r.now, r.flow, 0, append(h.Append(nil), chunk(ChunkHeartbeat, 0, body)...))
	}
	r.recv(7, 0, 20, 0, "no such stream")
	n := 0
	for _, b := range r.take() {
		if n++; len(b)+20 > 576 {
			t.Errorf("a packet of %d bytes", len(b)+20)
		}
	}
	if n < 1 {
		t.Error("no answer")
	}
}

// TestUDPPort checks that replies go to the UDP port that a packet came from, also after a restart by INIT (RFC 6951
// 5.4), and that a packet without the tag does not change the port, nor one without UDP.
func TestUDPPort(t *testing.T) {
	r := newRig(t, Config{UDP: true})
	r.from = 1000
	r.l = NewListener(&r.cfg, &r.key, 1500)
	r.cookieEcho(r.init())
	r.take()
	r.from = 2000
	r.send(r.a.tag+1, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}))
	if p := r.a.Path(0).UDPPort; p != 1000 {
		t.Fatalf("port %d after a packet with a wrong tag", p)
	}
	r.peerTag = 77
	r.send(0, r.initChunk(ChunkInit, nil))
	if len(r.udp) != 1 || r.udp[0] != 2000 || r.a.Path(0).UDPPort != 1000 {
		t.Fatalf("INIT ACK goes to port %v; the association's is %d", r.udp, r.a.Path(0).UDPPort)
	}
	r.cookieEcho(r.initAck())
	if len(r.udp) != 1 || r.udp[0] != 2000 || r.a.Path(0).UDPPort != 2000 || r.a.Stats().Restarts != 1 {
		t.Fatalf("COOKIE ACK goes to port %v; the association's is %d", r.udp, r.a.Path(0).UDPPort)
	}
	r.take()
	r.from = 3000
	r.send(r.a.tag, dataBytes(7|flagImmediate, r.peerTSN, 0, 0, "a"))
	if len(r.udp) != 1 || r.udp[0] != 3000 {
		t.Errorf("SACK goes to port %v", r.udp)
	}
	r.take()
	r.from = 0
	r.send(r.a.tag, dataBytes(7|flagImmediate, r.peerTSN+1, 0, 0, "a"))
	if len(r.sent) > 0 || r.a.Path(0).UDPPort != 3000 {
		t.Errorf("a packet without UDP is answered, to port %v; the association's is %d", r.udp, r.a.Path(0).UDPPort)
	}
}

// TestLostMessageApart checks that a lost message, which goes to another address, is not bundled with the SACK for what has
// come from the first.
func TestLostMessageApart(t *testing.T) {
	r := manyHomed(t, Config{Heartbeat: -1}, 2)
	a := r.a
	a.paths[1].confirmed = true
	r.wait(time.Millisecond) // the HEARTBEAT that verifies the second address
	r.push(100)
	r.take()
	r.now = a.paths[0].deadlines[timerT3]
	a.HandleTimeout(r.now)
	r.send(a.tag, dataBytes(whole|flagUnordered, r.peerTSN, 0, 0, "x"))
	if to := r.to; !slices.Equal(to, []int{0, 1}) || a.lostCount != 0 {
		t.Errorf("packets to paths %v, %d messages still lost", to, a.lostCount)
	}
}
