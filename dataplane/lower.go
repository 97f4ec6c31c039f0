package dataplane

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/tcp"
)

// lowerTCP is the TCP below MPA: a tcp.Conn, whose segments are frames of the link, a
// kernel socket, or an end of a connection within the host. The sequence numbers of the
// latter two start at 0; MPA uses only their differences.
type lowerTCP interface {
	State() tcp.State
	Err() error
	Stats() tcp.Stats
	MSS() int
	Room() int
	SndNxt() serial.Num
	RcvNxt() serial.Num
	Push(b tcp.Buf, n int)
	PollReleased() (tcp.Buf, bool)
	PollEvent() (tcp.Event, bool)
	SetBacklog(n int)
	Close(now clock.Time)
	Abort(now clock.Time)
	Deadline() clock.Time
	TimeoutsInARow() int
	HandleTimeout(now clock.Time)
}

var (
	_ lowerTCP = (*tcp.Conn)(nil)
	_ lowerTCP = (*socket)(nil)
	_ lowerTCP = (*hostEnd)(nil)
)

// byteEnd holds the slots to be sent and the events of a lowerTCP without segments.
type byteEnd struct {
	w     *worker
	c     *tcpConn
	state tcp.State
	err   error

	events   []tcp.Event // not yet polled
	released []tcp.Buf   // sent, not yet polled

	out     []outSlot // composed slots; those before outAt are done
	outAt   int
	written int // bytes of the first slot already sent
	unsent  int // composed bytes not yet sent

	closing bool       // send the FIN when everything is sent
	until   clock.Time // when to reset the connection if it has not ended, or 0

	composed, received uint64 // bytes
}

type outSlot struct {
	buf tcp.Buf
	n   int
}

// State returns the state, like that of tcp.Conn.
func (b *byteEnd) State() tcp.State { return b.state }

// open reports whether b has not sent its FIN.
func (b *byteEnd) open() bool { return b.state == tcp.Established || b.state == tcp.CloseWait }

// Err returns the reason for the end, like that of tcp.Conn.
func (b *byteEnd) Err() error { return b.err }

// SndNxt returns the number of the next byte to be composed.
func (b *byteEnd) SndNxt() serial.Num { return serial.Num(b.composed) }

// RcvNxt returns the number of the next byte to be received.
func (b *byteEnd) RcvNxt() serial.Num { return serial.Num(b.received) }

// Push queues a composed slot.
func (b *byteEnd) Push(buf tcp.Buf, n int) {
	b.out = append(b.out, outSlot{buf, n})
	b.composed += uint64(n)
	b.unsent += n
}

// PollReleased returns a slot that has been sent.
func (b *byteEnd) PollReleased() (tcp.Buf, bool) {
	n := len(b.released)
	if n == 0 {
		return tcp.NoBuf, false
	}
	buf := b.released[n-1]
	b.released = b.released[:n-1]
	return buf, true
}

// PollEvent returns the next event, like that of tcp.Conn.
func (b *byteEnd) PollEvent() (tcp.Event, bool) {
	if len(b.events) == 0 {
		return 0, false
	}
	ev := b.events[0]
	b.events = b.events[:copy(b.events, b.events[1:])]
	return ev, true
}

// Stats returns the counters of a connection without packets.
func (b *byteEnd) Stats() tcp.Stats {
	return tcp.Stats{
		State: b.state, MSS: b.c.tcp.MSS(), QueuedSegs: len(b.out) - b.outAt,
		BytesOut: b.composed - uint64(b.unsent), BytesIn: b.received,
	}
}

// Deadline returns when a closed connection is to be reset.
func (b *byteEnd) Deadline() clock.Time { return b.until }

// HandleTimeout resets a connection that the peer has not closed in time.
func (b *byteEnd) HandleTimeout(now clock.Time) {
	if b.until.Due(now) {
		b.c.tcp.Abort(now)
		b.err = tcp.ErrTimeout
	}
}

// TimeoutsInARow returns 0: the next hop needs no confirmation.
func (b *byteEnd) TimeoutsInARow() int { return 0 }

// take records that n bytes were sent.
func (b *byteEnd) take(n int) {
	if b.closing {
		b.limitClose()
	}
	b.unsent -= n
	n += b.written
	for b.outAt < len(b.out) && n >= b.out[b.outAt].n {
		n -= b.out[b.outAt].n
		b.released = append(b.released, b.out[b.outAt].buf)
		b.outAt++
	}
	b.written = n
	if b.outAt == len(b.out) {
		b.out, b.outAt = b.out[:0], 0
	} else if b.outAt > len(b.out)/2 {
		b.out = b.out[:copy(b.out, b.out[b.outAt:])]
		b.outAt = 0
	}
}

// close makes b send its FIN after all composed data.
func (b *byteEnd) close() {
	b.closing = true
	b.limitClose()
	b.w.mark(&b.c.lane)
}

// limitClose starts the time in which a connection that is being closed must send more, or end.
func (b *byteEnd) limitClose() { b.until = b.w.deadlineAfter(b.w.tcp.FinWait2) }

// goOn makes the connection compose more in the next turn, if it has more: there will be no acknowledgement to do this.
func (b *byteEnd) goOn() {
	if b.c.sendable() || b.c.pre.unsent() > 0 {
		b.w.mark(&b.c.lane)
	}
}

// end closes b, unless it is closed, and releases unsent slots. err is nil if both sides have closed.
func (b *byteEnd) end(err error) {
	if b.state == tcp.Closed {
		return
	}
	b.state, b.err, b.until = tcp.Closed, err, 0
	for _, o := range b.out[b.outAt:] {
		b.released = append(b.released, o.buf)
	}
	b.out, b.outAt, b.written, b.unsent = nil, 0, 0, 0
	b.events = append(b.events, tcp.EventClosed)
	b.w.mark(&b.c.lane)
}
