package sctp

import (
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// TestHeartbeatAndFailover: a second address of the peer's is verified, and used
// when the first one is silent.
func TestHeartbeatAndFailover(t *testing.T) {
	r := newRig(t, Config{Heartbeat: time.Second})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	b := appendParam(r.initChunk(ChunkInit, nil), ParamIPv4, []byte{10, 0, 0, 9})
	be.PutUint16(b[2:], uint16(len(b)))
	r.send(0, b)
	var c Chunk
	var i Init
	ack := r.one(ChunkInitAck)
	NextChunk(ack, HeaderLen, &c)
	i.Decode(c.Body)
	r.cookieEcho(i)
	if n, cur := r.a.Paths(); n != 2 || cur != 0 || r.a.Path(1).Confirmed {
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
		if _, cur := r.a.Paths(); cur == 1 {
			break
		}
	}
	if _, cur := r.a.Paths(); cur != 1 || !r.a.Path(1).Confirmed || r.a.Path(0).Active || r.a.Stats().Failovers != 1 {
		t.Fatalf("no failover: %+v %+v %v", r.a.Path(0), r.a.Path(1), r.a.Err())
	}
	r.a.Push(&Message{Buf: 1, Len: 10})
	for r.a.PollTransmit(r.now, &o) && o.N == 0 {
	}
	if o.N != 1 || o.Path != 1 {
		t.Error("data go to the path that is down")
	}
	r.take()
	// An ACK with a wrong nonce confirms nothing; a HEARTBEAT of the peer's is
	// answered with its own octets.
	r.send(r.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}))
	if s := r.take(); len(s) != 1 || string(s[0][HeaderLen+4:]) != "\x00\x01\x00\x08\x01\x02\x03\x04" {
		t.Errorf("sent %x", s)
	}
}

// TestPathMTU: an ICMP error with the right tag lowers the size of messages, one
// with a wrong tag does not.
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
	u := listening(t, Config{UDP: true})
	if u.a.MaxMessage() != 1444 {
		t.Error(u.a.MaxMessage())
	}
}

// TestICMPUnreachable ends a set-up only.
func TestICMPUnreachable(t *testing.T) {
	r := dialing(t, Config{}, CookieWait)
	e := pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: pkt.Unreachable, InitTag: r.a.tag + 1}
	r.a.HandleICMP(r.now, &e)
	if r.a.State() != CookieWait {
		t.Fatal("a forged ICMP error is believed")
	}
	e.InitTag--
	r.a.HandleICMP(r.now, &e)
	if r.a.Err() != ErrUnreachable {
		t.Error(r.a.Err())
	}
}
