package tcp

import (
	"errors"
	"math/bits"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// Errors that Conn.Err returns. An orderly close has none.
var (
	ErrReset       = errors.New("tcp: connection reset by peer")
	ErrRefused     = errors.New("tcp: connection refused")
	ErrTimeout     = errors.New("tcp: connection timed out")
	ErrUnreachable = errors.New("tcp: destination unreachable")
	ErrAborted     = errors.New("tcp: connection aborted")
)

// Conn is one connection: the transmission control block of RFC 9293. It is not safe for concurrent use.
type Conn struct {
	cfg    Config
	flow   pkt.Flow
	state  State
	err    error
	active bool  // active open
	queued bool  // counted in the SYN queue of its listener
	events uint8 // not yet polled: 1<<Event each

	sender
	pathState
	options
	opening
	resets
	probing
	pacing
	rcvSpace
	owedAcks
	timers

	stats Stats
}

// sender is what decides how much may be in flight: the data itself, loss recovery and congestion control.
type sender struct {
	sndSpace
	rttState
	recoveryState
	cc     congestion
	sample ackSample
	w      window
}

// sndSpace is the send sequence space (RFC 9293 3.3.1) and the records in it.
//
//	  una            nxt           pushNxt
//	---|--------------|---------------|------
//	   | in flight    | pushed        | to be pushed
//	   |------- una+wnd: the window ------->
type sndSpace struct {
	q             sendq
	iss, una, nxt serial.Num
	pushNxt       serial.Num // sequence number of the next byte to be pushed
	wnd, maxWnd   int
	wl1, wl2      serial.Num
	released      ring[Buf]
	burst         int // segments of a run that may leave at once
	lastSend      clock.Time
	finQueued     bool // Close was called
}

// pathState holds the limits of the size of a segment.
type pathState struct {
	v6           bool
	mtu, linkMTU int // of the path; of the link
	mss, peerMSS int
	proven       int        // payload of the longest segment that has arrived since the MTU was last raised
	softError    bool       // an ICMP error has arrived since una last advanced
	progress     clock.Time // when una last advanced, or the queue became non-empty
}

// options are the options negotiated with the SYNs.
type options struct {
	sndShift     uint8
	rcvShift     uint8
	sackOK, tsOK bool
	wsOK, ecnOK  bool
	tsOff        uint32
	tsRecent     uint32
	tsRecentAt   clock.Time
	cwrPending   bool
}

// opening is the state of the handshake.
type opening struct {
	synPending bool // a SYN or SYN-ACK must be sent
	synRetries int  // time-outs
	synCopies  int  // sent, also in answer to the peer's
	synSent    clock.Time
}

// roundTrip returns the time since the SYN or SYN-ACK was sent, or 0 if it was not sent exactly once (Karn's algorithm).
func (o *opening) roundTrip(now clock.Time) time.Duration {
	if o.synCopies != 1 {
		return 0
	}
	return max(now.Sub(o.synSent), 1)
}

// resets holds the RST to be sent and the rate limit of challenge ACKs.
type resets struct {
	rstSeq          serial.Num // sequence number of a RST that does not change the state
	rstPending      bool
	rstFinal        bool // send the RST of a connection that has ended
	challenges      int
	challengeWindow clock.Time
}

// challengeLimit is the number of challenge ACKs per second and connection. A limit per connection reveals nothing about other connections.
const challengeLimit = 10

// mayChallenge counts a challenge ACK, or reports false if the rate limit of RFC 5961 section 7 is reached.
func (r *resets) mayChallenge(now clock.Time) bool {
	if now.Sub(r.challengeWindow) >= time.Second {
		r.challengeWindow = now
		r.challenges = 0
	}
	if r.challenges >= challengeLimit {
		return false
	}
	r.challenges++
	return true
}

// probing is the state of window probes and keep-alive probes.
type probing struct {
	probePending   bool // a window probe must be sent
	persistBackoff uint8
	blockedAt      clock.Time // since when the peer's window blocks everything queued
	keepPending    bool
	keepProbes     int
	lastRcv        clock.Time
}

// pacing spreads over the round trip what is more than a burst, at twice the rate of one window per round trip, so that it never keeps the
// window from being used.
type pacing struct {
	bucket   int // bytes that may leave before pacing applies
	bucketAt clock.Time
}

// wait returns how long a segment of n bytes must wait if the bucket holds at most full bytes and w is sent in each srtt.
func (p *pacing) wait(now clock.Time, n, full int, w *window, srtt time.Duration) time.Duration {
	d := now.Sub(p.bucketAt)
	rate := 2 * float64(max(w.cwnd, w.mss)) / float64(srtt)
	if d >= srtt {
		p.bucket, p.bucketAt = full, now
	} else {
		// The time for a fraction of a byte still counts next time: a caller that is busy may ask more often than once a byte.
		add := int(rate * float64(d))
		p.bucket = min(full, p.bucket+add)
		p.bucketAt = p.bucketAt.Add(time.Duration(float64(add) / rate))
	}
	if p.bucket >= n {
		return 0
	}
	// Wait until several segments may be sent, so that pacing does not need a timer per segment.
	need := min(full, max(n, 4*w.mss)) - p.bucket
	return max(time.Duration(float64(need)/rate)+1, time.Microsecond)
}

// rcvSpace is the receive sequence space.
//
//	 rcvNxt                    rcvAdv
//	---|-------------------------|------
//	   | reasm: out of order     |
type rcvSpace struct {
	irs, rcvNxt serial.Num
	rcvAdv      serial.Num // right edge of the advertised window
	rcvMSS      int        // largest payload seen
	rcvLast     int        // payload of the last segment
	rcvMean     int        // moving average of payload sizes, in sixteenths of a byte
	rcvMax      int        // largest window that may be offered
	backlog     int
	mayHold     int // limit of SetMayHold, in segments
	reasm       reassembly
	finSeq      serial.Num
	finSeen     bool
}

// owedAcks is the state of acknowledgements to be sent.
type owedAcks struct {
	lastAckSent serial.Num
	unacked     int        // bytes received since the last ACK became due
	ackPoint    serial.Num // rcvNxt at that time
	ackNow      bool
	beyondGap   int // segments received out of order since rcvNxt last moved
	dupAcksOwed int // duplicate ACKs to send; a peer without SACK counts them
	quickAcks   int
	dsack       SACKBlock // D-SACK to be sent, or empty
	ceSeen      bool      // RFC 3168 6.1.3; for DCTCP: DCTCP.CE of RFC 8257 3.2
	earlyAcks   ring[earlyAck]
}

// earlyAck is an ACK sent before the current one: for data that came before a change of the CE mark (RFC 8257 3.2), for an earlier part of
// a burst (RFC 9293 3.8.6.3 SHLD-19: at least every second full segment), or for a D-SACK that the next ACK would replace.
type earlyAck struct {
	ack   serial.Num
	ece   bool
	dsack SACKBlock // empty: none
}

func newConn(now clock.Time, cfg *Config, f pkt.Flow, iss serial.Num, mtu int) *Conn {
	c := &Conn{cfg: cfg.withDefaults(), flow: f, pathState: newPath(&f, mtu)}
	c.sndSpace = sndSpace{iss: iss, una: iss, nxt: iss, pushNxt: iss + 1, burst: 1}
	c.q.init()
	c.peerMSS = c.defaultMSS()
	c.rcvShift, c.rcvMax = rcvScale(&c.cfg, c.offeredMSS())
	c.rcvMean = 16 * c.offeredMSS()
	c.mayHold = c.cfg.MaxHeld
	c.cc = algorithms[c.cfg.CongestionControl].state()
	c.rttState = rttState{rto: initialRTO, maxRTO: c.cfg.MaxRTO, samples: c.cfg.RTT}
	c.tsOff = uint32(iss) - issClock(now)
	c.lastRcv = now
	c.progress = now
	c.quickAcks = 16
	c.rack.mult = 1
	c.setMSS()
	c.w.ssthresh = infinite
	return c
}

// rcvScale returns the window scale to offer and the largest receive window, which is limited by the frames that may be held.
func rcvScale(cfg *Config, mss int) (shift uint8, window int) {
	window = min(cfg.RcvWindow, cfg.MaxHeld*mss)
	if cfg.NoWindowScale {
		return 0, min(window, 0xffff)
	}
	for window>>shift > 0xffff {
		shift++
	}
	return shift, window
}

// Dial opens a connection in SYN-SENT; PollTransmit returns the SYN. iss comes from ISS. mtu is that of the link, or of the path if it is
// known.
func Dial(now clock.Time, cfg *Config, f pkt.Flow, iss serial.Num, mtu int) *Conn {
	c := newConn(now, cfg, f, iss, mtu)
	c.active = true
	c.state = SynSent
	c.synPending = true
	c.nxt = iss + 1
	c.arm(timerRTO, now.Add(c.rto))
	return c
}

// State returns the state of RFC 9293 3.3.2.
func (c *Conn) State() State { return c.state }

// Err returns why the connection ended. It is nil before the end and after an orderly close.
func (c *Conn) Err() error { return c.err }

// edge returns the right edge of the peer's window.
func (c *sndSpace) edge() serial.Num { return c.una.Add(c.wnd) }

// SndNxt returns the sequence number of the next byte to be pushed.
func (c *sndSpace) SndNxt() serial.Num { return c.pushNxt }

// SndUna returns the sequence number of the first byte that the peer has not acknowledged.
func (c *sndSpace) SndUna() serial.Num { return c.una }

// RcvNxt returns the sequence number after the last byte that was delivered or that PollHeld has ready for delivery.
func (c *rcvSpace) RcvNxt() serial.Num { return c.rcvNxt }

// MSS returns the current payload size of a full segment in bytes, options deducted: the EMSS of RFC 5044.
func (c *Conn) MSS() int { return c.mss }

// Room returns how many bytes could be sent now: the smaller of the congestion window and the peer's window, less what is in flight or
// queued. An owner that builds records just in time pushes a record of n bytes, up to MSS, when Room is at least n. While nothing is
// unacknowledged or queued, Room is at least MSS, because a closed window is probed only when a record is queued. That record is sent whole
// or, if the window stays too small for it, in pieces (RFC 9293 3.8.6.2.1: at once if the window is at least half of the largest seen, else
// after the override time). A record is never delayed in favour of later ones (no Nagle algorithm). Room is 0 when nothing may be sent.
func (c *Conn) Room() int {
	if c.state != Established && c.state != CloseWait {
		return 0
	}
	n := min(c.w.cwnd-c.pipe()-c.q.unsent-c.q.lostBytes, c.edge().Sub(c.pushNxt))
	if c.q.empty() {
		return max(c.mss, n)
	}
	return n
}

// Unsent returns the number of bytes that were pushed and not sent yet.
func (c *sndSpace) Unsent() int { return c.q.unsent }

// release returns the Buf of s, all of which is acknowledged or no longer needed, to the owner if it ends with s.
func (c *sndSpace) release(s *seg) {
	if s.last && s.buf != NoBuf {
		c.released.push(s.buf)
	}
}

// Push queues a record of n bytes, 1 to MSS, stored in b. Records wait until the connection is established. A record that can no longer be
// sent is released at once.
func (c *Conn) Push(b Buf, n int) { c.PushRun(b, n, n) }

// PushRun queues a run of records of size bytes each, 1 to MSS, and n bytes together, stored in b. It costs less than to queue them one by
// one.
func (c *Conn) PushRun(b Buf, n, size int) {
	if n <= 0 || c.finQueued || c.state == Closed {
		if b != NoBuf {
			c.released.push(b)
		}
		return
	}
	s := c.q.add()
	s.seq, s.buf, s.len, s.unit, s.last = c.pushNxt, b, int32(n), int32(size), true
	c.pushNxt = c.pushNxt.Add(n)
	c.q.unsent += n
	switch {
	case size > c.mss:
		for p := c.q.tail - 1; p != c.q.tail; p++ {
			if s := c.q.single(p); int(s.len) > c.mss {
				c.q.cut(p, int32(c.mss))
			}
		}
	case n <= size:
	case c.useSACK && c.ca <= caCWR && c.q.sackedSegs == 0 && c.q.lostSegs == 0:
		c.q.runs = true
	default: // segments are judged one by one
		for p := c.q.tail - 1; c.q.at(p).run(); p++ {
			c.q.single(p)
		}
	}
}

// SetBurst sets the number of segments of a run that PollTransmit and PollFollowing may return at once. It is 1 at first.
func (c *sndSpace) SetBurst(n int) { c.burst = n }

// PollReleased returns a pushed Buf that is no longer needed: all of its bytes are acknowledged, or the connection is over.
func (c *sndSpace) PollReleased() (Buf, bool) { return c.released.pop() }

// PollHeld returns a held segment to the owner.
func (c *rcvSpace) PollHeld(h *Held) bool {
	v, ok := c.reasm.out.pop()
	if ok {
		*h = v
	}
	return ok
}

// Placed reports that the bytes of the held segment b are in their final place, and returns its frame to the owner. PollHeld still reports
// the range, with NoBuf.
func (c *rcvSpace) Placed(b Buf) {
	if b != NoBuf {
		c.reasm.placed(b)
	}
}

// Reclaim drops up to n segments that are held out of order and not placed, starting with the highest sequence number: PollHeld returns
// their frames, undelivered. An owner that is short of frames calls it. The peer must retransmit those bytes, as RFC 2018 section 8 allows.
func (c *rcvSpace) Reclaim(n int) { c.reasm.reclaim(n) }

// PollEvent returns the next event. EventClosed is the last event of a connection.
func (c *Conn) PollEvent() (Event, bool) {
	if c.events == 0 {
		return 0, false
	}
	e := Event(bits.TrailingZeros8(c.events))
	c.events &= c.events - 1
	return e, true
}

// Close ends our half of the connection: pushed data is sent, then a FIN. Data still arrives until the peer closes too.
func (c *Conn) Close(now clock.Time) {
	switch c.state {
	case SynSent:
		c.end(nil)
	case SynReceived:
		c.finQueued = true
	case Established:
		c.finQueued = true
		c.state = FinWait1
		c.pushFIN()
	case CloseWait:
		c.finQueued = true
		c.state = LastAck
		c.pushFIN()
	}
	c.armPersist(now)
}

func (c *sndSpace) pushFIN() {
	c.q.push(seg{seq: c.pushNxt, buf: NoBuf, fin: true})
	c.pushNxt++
}

// Abort ends the connection with a RST, which PollTransmit returns. Pushed data is lost.
func (c *Conn) Abort(now clock.Time) {
	switch c.state {
	case Closed:
		return
	case SynReceived, Established, FinWait1, FinWait2, CloseWait:
		c.finalReset()
	}
	c.end(ErrAborted)
}

func (c *Conn) finalReset() {
	c.rstSeq = c.bareSeq()
	c.rstPending, c.rstFinal = true, true
}

// end discards the state of the connection and releases every Buf.
func (c *Conn) end(err error) {
	if c.state == Closed {
		return
	}
	c.state = Closed
	c.err = err
	for p := c.q.head; p != c.q.tail; p++ {
		c.release(c.q.at(p))
	}
	c.q.init()
	c.reasm.drop()
	c.timers = timers{}
	c.synPending, c.probePending, c.keepPending, c.ackNow = false, false, false, false
	c.dupAcksOwed = 0
	c.earlyAcks = ring[earlyAck]{}
	c.events |= 1 << EventClosed
}

// establish enters ESTABLISHED. The options of the peer's SYN are known.
func (c *Conn) establish(now clock.Time) {
	c.state = Established
	c.events |= 1 << EventEstablished
	if r := c.opening.roundTrip(now); r > 0 {
		c.sampleRTT(now, r)
		c.rack.minRTT, c.rack.minRTTAt = r, now
	}
	c.stop(timerRTO)
	c.synPending = false
	c.setMSS()
	c.w.cwnd = min(10*c.mss, max(2*c.mss, 14600)) // RFC 6928 (1)
	if c.synRetries > 1 {
		c.w.cwnd = c.mss // RFC 5681 3.1
	}
	c.initialWindow = c.w.cwnd
	if c.synRetries > 0 {
		c.rto = max(c.rto, min(3*time.Second, c.cfg.MaxRTO)) // RFC 6298 (5.7)
	}
	c.backoff = 0
	c.bucket = c.cfg.MaxBurst * c.mss
	c.bucketAt = now
	c.rack.fack = c.una
	c.roundEnd = c.una
	c.progress = now
	c.lastSend = now
	if c.cfg.KeepAliveIdle > 0 {
		c.keepAliveAt(now.Add(c.cfg.KeepAliveIdle))
	}
	if c.finQueued {
		c.state = FinWait1
		c.pushFIN()
	}
	if !c.q.empty() {
		c.armUser(now)
	}
}

// takeSYN records the fields and options of the peer's SYN.
func (c *Conn) takeSYN(now clock.Time, h *Header) {
	c.irs = h.Seq
	c.rcvNxt = h.Seq + 1
	c.rcvAdv = c.rcvNxt.Add(min(c.rcvMax, 0xffff))
	c.lastAckSent = c.rcvNxt
	o := &h.Opts
	if o.MSS != 0 {
		c.peerMSS = int(o.MSS)
	}
	c.tsOK = o.HasTimestamps && !c.cfg.NoTimestamps
	if c.tsOK {
		c.tsRecent, c.tsRecentAt = o.TSVal, now
	}
	c.sackOK = o.SACKPermitted && !c.cfg.NoSACK
	c.useSACK = c.sackOK
	c.wsOK = o.HasWScale && !c.cfg.NoWindowScale
	if c.wsOK {
		c.sndShift = o.WScale
	} else {
		c.sndShift, c.rcvShift = 0, 0
		c.rcvMax = min(c.rcvMax, 0xffff)
	}
	c.wnd = int(h.Window) // never scaled in a SYN
	c.maxWnd = c.wnd
	c.wl1 = h.Seq
	c.wl2 = h.Ack
	c.setMSS()
}
