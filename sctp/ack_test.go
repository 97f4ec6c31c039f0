package sctp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestZeroWindow: a closed window is probed, for as long as the peer answers.
func TestZeroWindow(t *testing.T) {
	r := listening(t, Config{})
	r.push(1000)
	r.take()
	r.send(r.a.tag, sackBytes(r.a.cumAck+1, 0))
	if r.a.Room() < r.a.MaxMessage() {
		t.Fatal("no room for a probe")
	}
	r.push(1000)
	r.one(ChunkData)
	for range 30 {
		r.send(r.a.tag, sackBytes(r.a.cumAck, 0)) // dropped by the peer
		r.wait(61 * time.Second)
		if s := r.take(); len(s) == 0 {
			t.Fatal("no probe")
		}
	}
	if r.a.State() != Established {
		t.Fatalf("%v %v", r.a.State(), r.a.Err())
	}
	r.wait(2 * time.Hour) // no answer any more
	if r.a.State() != Closed || r.a.Err() != ErrTimeout {
		t.Errorf("%v %v", r.a.State(), r.a.Err())
	}
}

// TestFastRetransmit: three reports of a hole send it again, once.
func TestFastRetransmit(t *testing.T) {
	r := listening(t, Config{MaxBurst: 100})
	r.a.paths[0].cwnd = 100000
	base := r.a.cumAck
	for i := range 8 {
		r.push(1000 + i)
	}
	r.take()
	for i := range uint16(2) {
		r.send(r.a.tag, sackBytes(base, 100000, 2, 2+i))
		r.none()
	}
	r.send(r.a.tag, sackBytes(base, 100000, 2, 4))
	b := r.one(ChunkData)
	if be.Uint32(b[HeaderLen+4:]) != uint32(base+1) {
		t.Error("another TSN was sent again")
	}
	p := &r.a.paths[0]
	if p.cwnd != p.ssthresh || p.cwnd != 50000 {
		t.Errorf("cwnd %d ssthresh %d", p.cwnd, p.ssthresh)
	}
	for i := range uint16(3) {
		r.send(r.a.tag, sackBytes(base, 100000, 2, 5+i))
	}
	r.none()
	if p.cwnd != 50000 {
		t.Error("the window shrank twice in one recovery")
	}
	// What was named by a gap report and then is not was given up: it is sent again.
	r.send(r.a.tag, sackBytes(base, 100000))
	r.wait(5 * time.Second)
	r.send(r.a.tag, sackBytes(base+8, 100000))
	if r.a.Unacked() != 0 || r.a.State() != Established {
		t.Error(r.a.Unacked(), r.a.State())
	}
}

// TestBurst: a SACK lets four packets go (6.1 D), and one for many packets as many as
// SACKs for every second of them would have.
func TestBurst(t *testing.T) {
	r := dialing(t, Config{}, Established)
	p := &r.a.paths[0]
	p.cwnd, r.a.peerRwnd = 1<<20, 1<<20
	for i := range 200 {
		r.a.Push(&Message{Buf: Buf(i), Len: 1400})
	}
	r.drain(nil)
	if n := len(r.take()); n != 4 {
		t.Fatalf("%d packets leave at first", n)
	}
	cum := r.a.cumAck
	for range 12 {
		cum++
		r.send(r.a.tag, sackBytes(cum, 1<<20))
		if n := len(r.take()); n != 4 {
			t.Fatalf("%d packets after a SACK for one", n)
		}
	}
	r.send(r.a.tag, sackBytes(cum+20, 1<<20))
	if n := len(r.take()); n != 36 {
		t.Errorf("%d packets after a SACK for 20, want four for every second one in whole", n)
	}
}

// TestSlowStart: a SACK opens the window by a packet, or, if it stands for many, by one for
// every second packet that it acknowledges.
func TestSlowStart(t *testing.T) {
	for acked, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 20: 10} {
		r := dialing(t, Config{MaxBurst: 100}, Established)
		p := &r.a.paths[0]
		m := r.a.MaxMessage()
		p.cwnd, r.a.peerRwnd = 20*m, 1<<20
		for i := range 20 {
			r.a.Push(&Message{Buf: Buf(i), Len: m})
		}
		r.drain(nil)
		r.take()
		r.send(r.a.tag, sackBytes(r.a.cumAck+serial.Num(acked), 1<<20))
		if n := p.cwnd - 20*m; n != want*m {
			t.Errorf("a SACK for %d packets opens the window by %d octets, want %d packets of %d", acked, n, want, m)
		}
	}
}
