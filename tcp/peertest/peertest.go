// Package peertest tests a tcp.Conn against another TCP implementation. It drives one
// connection as a worker of the data plane does, over a wire that can be impaired. Time is real
// or from a clock of the test.
package peertest

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/tcp"
)

// ByteAt returns the byte at a position of every stream.
func ByteAt(pos int) byte { return byte(pos ^ pos>>8*7 ^ pos>>16*13) }

// Wire carries IP packets to and from the other TCP.
type Wire interface {
	Send(packet []byte)
	// Recv returns the next packet, or nil if none arrives within d by the clock of the End.
	// The packet is valid until the next call.
	Recv(d time.Duration) []byte
}

// End is our end of a connection with its application.
type End struct {
	T          testing.TB
	Wire       Wire
	Config     tcp.Config
	Flow       pkt.Flow
	MTU        int
	Passive    bool // the other end opens the connection
	Send, Recv int  // bytes to send, and to expect
	CloseFirst bool // close when all is sent, not when the peer has closed
	Echo       int  // request and response: send records of this length, each after the previous one has returned; Send and Recv must be equal
	Out, In    impair.Config
	Rate       int // bytes per second in each direction; 0 means no limit
	Queue      int // bytes that may wait for the rate; further ones are dropped
	Small      bool
	Now        func() clock.Time // nil: clock.Now
	Peer       func() string     // state of the other end for failure messages; may be nil

	Took time.Duration // time from the first byte to the last, of the longer direction

	conn     *tcp.Conn
	listener *tcp.Listener
	records  map[tcp.Buf][]byte
	held     map[tcp.Buf][]byte
	next     tcp.Buf
	pushed   int
	got      int
	closed   bool
	eof      bool
	start    clock.Time
	link     [2]*Path // out, in
	seg      []byte
}

// Path is one direction of an impaired wire.
type Path struct {
	d     *impair.Decider
	q     impair.Queue[[]byte]
	rate  int
	queue int
	free  clock.Time
	scr   []impair.Delivery
}

// NewPath returns a path with impairments, a rate and a queue.
func NewPath(cfg impair.Config, rate, queue int) *Path {
	return &Path{d: impair.NewDecider(cfg), rate: rate, queue: queue}
}

// Push sends a packet over the path.
func (p *Path) Push(now clock.Time, b []byte) {
	at := now
	if p.rate > 0 {
		at = max(at, p.free)
		if at.Sub(now).Seconds()*float64(p.rate) > float64(p.queue) {
			return
		}
		at = at.Add(time.Duration(len(b)) * time.Second / time.Duration(p.rate))
		p.free = at
	}
	p.scr = p.d.Decide(at, len(b), p.scr[:0])
	for _, d := range p.scr {
		c := append([]byte(nil), b...)
		if d.Bit >= 0 {
			c[d.Bit/8] ^= 1 << (d.Bit % 8)
		}
		p.q.Push(d.At, c)
	}
}

// Pop returns the next packet that is due.
func (p *Path) Pop(now clock.Time) ([]byte, bool) { return p.q.Pop(now) }

// Deadline returns when the next packet is due.
func (p *Path) Deadline() clock.Time { return p.q.Deadline() }

func (e *End) v6() bool { return e.Flow.Remote[0] != 0 }

// transmit sends a segment in an IP packet.
func (e *End) transmit(now clock.Time, h *tcp.Header, ecn uint8, payload []byte) {
	n := h.Len() + len(payload)
	var b []byte
	var pseudo uint32
	f := &e.Flow
	if e.v6() {
		b = e.seg[:40+n]
		clear(b[:40])
		b[0] = 6 << 4
		b[1] = ecn << 4
		binary.BigEndian.PutUint16(b[4:], uint16(n))
		b[6], b[7] = 6, 64
		copy(b[8:], f.Local[:])
		copy(b[24:], f.Remote[:])
		pseudo = pkt.Sum(b[8:40], uint32(6+n))
		b = b[40:]
	} else {
		b = e.seg[:20+n]
		clear(b[:20])
		b[0], b[1] = 4<<4|5, ecn
		binary.BigEndian.PutUint16(b[2:], uint16(20+n))
		b[6] = 0x40
		b[8], b[9] = 64, 6
		copy(b[12:], f.Local[12:])
		copy(b[16:], f.Remote[12:])
		binary.BigEndian.PutUint16(b[10:], ^pkt.Fold(pkt.Sum(b[:20], 0)))
		pseudo = pkt.Sum(b[12:20], uint32(6+n))
		b = b[20:]
	}
	hl := h.Put(b)
	copy(b[hl:], payload)
	binary.BigEndian.PutUint16(b[16:], ^pkt.Fold(pkt.Sum(b, pseudo)))
	whole := e.seg[:len(b)+20]
	if e.v6() {
		whole = e.seg[:len(b)+40]
	}
	e.link[0].Push(now, whole)
}

// receive processes an IP packet from the wire.
func (e *End) receive(now clock.Time, b []byte) {
	var l4 []byte
	var pseudo uint32
	var ecn uint8
	switch {
	case len(b) >= 40 && b[0]>>4 == 6 && e.v6():
		n := int(binary.BigEndian.Uint16(b[4:]))
		if b[6] != 6 || 40+n > len(b) {
			return
		}
		ecn = b[1] >> 4 & 3
		l4 = b[40 : 40+n]
		pseudo = pkt.Sum(b[8:40], uint32(6+n))
	case len(b) >= 20 && b[0] == 0x45 && !e.v6():
		n := int(binary.BigEndian.Uint16(b[2:]))
		if b[9] != 6 || n > len(b) || n < 20 {
			return
		}
		ecn = b[1] & 3
		l4 = b[20:n]
		pseudo = pkt.Sum(b[12:20], uint32(6+len(l4)))
	default:
		return
	}
	if pkt.Fold(pkt.Sum(l4, pseudo)) != 0xffff {
		return // damaged on the wire
	}
	var s tcp.Segment
	n, err := s.Decode(l4)
	if err != nil {
		e.T.Errorf("the peer's segment does not decode: %v", err)
		return
	}
	s.Len, s.ECN = len(l4)-n, ecn
	e.next++
	s.Buf = e.next
	if e.conn == nil {
		if e.listener == nil {
			return
		}
		c, reply, ok := e.listener.HandleSegment(now, e.Flow, &s)
		if ok {
			e.transmit(now, &reply, 0, nil)
		}
		e.conn = c
		if c == nil || c.State() == tcp.SynReceived {
			return
		}
	}
	if e.conn.State() == tcp.Closed {
		if r, ok := tcp.Reset(&s.Header, s.Len); ok {
			e.transmit(now, &r, 0, nil)
		}
		return
	}
	in := e.conn.HandleSegment(now, &s)
	payload := l4[n:]
	switch in.Action {
	case tcp.Deliver:
		e.deliver(in.Seq, payload[in.Off:in.Off+in.Len])
	case tcp.Hold:
		e.held[s.Buf] = payload
	}
	var h tcp.Held
	for e.conn.PollHeld(&h) {
		b := e.held[h.Buf]
		delete(e.held, h.Buf)
		if h.Deliver {
			e.deliver(h.Seq, b[h.Off:h.Off+h.Len])
		}
	}
}

func (e *End) deliver(_ serial.Num, b []byte) {
	if e.start == 0 {
		e.start = e.Now()
	}
	for i, v := range b {
		if v != ByteAt(e.got+i) {
			e.T.Fatalf("byte %d from the peer is wrong", e.got+i)
		}
	}
	e.got += len(b)
	if e.got == e.Recv {
		e.Took = max(e.Took, e.Now().Sub(e.start))
	}
}

// turn runs the application, and sends what is due.
func (e *End) turn(now clock.Time) {
	c := e.conn
	if d := c.Deadline(); d.Due(now) {
		c.HandleTimeout(now)
	}
	for e.pushed < e.Send && (e.Echo == 0 || e.got >= e.pushed) {
		n := min(c.MSS(), e.Send-e.pushed)
		if e.Echo > 0 {
			n = min(n, e.Echo)
		}
		if e.Small {
			n = min(n, 1+e.pushed%500)
		}
		if c.Room() < n {
			break
		}
		if e.start == 0 {
			e.start = now
		}
		b := make([]byte, n)
		for i := range b {
			b[i] = ByteAt(e.pushed + i)
		}
		e.next++
		e.records[e.next] = b
		c.Push(e.next, n)
		e.pushed += n
	}
	if st := c.State(); !e.closed && e.pushed == e.Send && (e.CloseFirst && st >= tcp.Established && (e.Echo == 0 || e.got == e.Recv) || e.eof) {
		e.closed = true
		c.Close(now)
	}
	var o tcp.Out
	for c.PollTransmit(now, &o) {
		var p []byte
		if o.Buf != tcp.NoBuf {
			p = e.records[o.Buf][o.Off : o.Off+o.Len]
		}
		e.transmit(now, &o.Header, o.ECN, p)
	}
	for {
		b, ok := c.PollReleased()
		if !ok {
			break
		}
		delete(e.records, b)
		if len(e.records) == 0 && e.pushed == e.Send {
			e.Took = max(e.Took, now.Sub(e.start))
		}
	}
	for {
		ev, ok := c.PollEvent()
		if !ok {
			break
		}
		if ev == tcp.EventPeerClosed {
			e.eof = true
		}
	}
}

// Run transfers all data, closes the connection, and checks the final state, all within limit.
// done yields the result of the other end's application.
func (e *End) Run(limit time.Duration, done <-chan error) tcp.Stats {
	t := e.T
	t.Helper()
	if e.Now == nil {
		e.Now = clock.Now
	}
	end := e.Now().Add(limit)
	e.open()
	for peerDone := false; !peerDone || e.conn == nil || e.conn.State() != tcp.Closed || e.link[0].Deadline() != 0; {
		e.step()
		select {
		case err := <-done:
			if err != nil {
				e.fail(fmt.Sprint("the peer: ", err))
			}
			peerDone = true
		default:
		}
		if e.Now() > end {
			e.fail(fmt.Sprintf("out of time after %v, peer done %v", limit, peerDone))
		}
	}
	if err := e.conn.Err(); err != nil {
		t.Errorf("our end: %v", err)
	}
	if e.got != e.Recv {
		t.Errorf("got %d bytes of %d", e.got, e.Recv)
	}
	if len(e.records) != 0 || len(e.held) != 0 {
		t.Errorf("%d records and %d frames not given back", len(e.records), len(e.held))
	}
	return e.conn.Stats()
}

// open begins to connect or listen.
func (e *End) open() {
	e.records, e.held = map[tcp.Buf][]byte{}, map[tcp.Buf][]byte{}
	e.seg = make([]byte, 64<<10)
	e.link[0], e.link[1] = NewPath(e.Out, e.Rate, e.Queue), NewPath(e.In, e.Rate, e.Queue)
	secret := [16]byte{9}
	if e.Passive {
		e.listener = tcp.NewListener(&e.Config, 4, secret, e.MTU)
	} else {
		now := e.Now()
		e.conn = tcp.Dial(now, &e.Config, e.Flow, tcp.ISS(secret, e.Flow, now), e.MTU)
	}
}

// step waits for a packet or the next deadline, at most 50 ms, and then does what is due.
func (e *End) step() {
	now := e.Now()
	next := now.Add(50 * time.Millisecond)
	due := []clock.Time{e.link[0].Deadline(), e.link[1].Deadline()}
	if e.conn != nil {
		due = append(due, e.conn.Deadline())
	}
	for _, d := range due {
		if d != 0 {
			next = min(next, d)
		}
	}
	for i, wait := 0, max(next.Sub(now), 0); i < 64; i, wait = i+1, 0 {
		b := e.Wire.Recv(wait)
		if b == nil {
			break
		}
		e.link[1].Push(e.Now(), b)
	}
	now = e.Now()
	for b, ok := e.link[1].Pop(now); ok; b, ok = e.link[1].Pop(now) {
		e.receive(now, b)
	}
	if e.conn != nil {
		e.turn(now)
	}
	for b, ok := e.link[0].Pop(now); ok; b, ok = e.link[0].Pop(now) {
		e.Wire.Send(b)
	}
}

// fail ends the test and prints the state of both ends.
func (e *End) fail(why string) {
	e.T.Helper()
	state := "no connection"
	if e.conn != nil {
		state = fmt.Sprintf("%v, deadline in %v: %+v", e.conn.State(), e.conn.Deadline().Sub(e.Now()), e.conn.Stats())
	}
	if e.Peer != nil {
		state += "; the peer: " + e.Peer()
	}
	e.T.Fatalf("%s: got %d of %d, pushed %d of %d; %s", why, e.got, e.Recv, e.pushed, e.Send, state)
}
