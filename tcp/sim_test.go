package tcp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// simStart is when every simulation begins.
const simStart = clock.Time(1_000_000_000_000)

// byteAt returns the byte at a position of every simulated stream.
func byteAt(pos int) byte { return byte(pos ^ pos>>8*7 ^ pos>>16*13) }

// simFrame is a segment on the wire.
type simFrame struct {
	b   []byte // header and payload
	ecn uint8
	to  int
	icm *pkt.ICMPError
}

// simWire is one direction of the path.
type simWire struct {
	impair.Config
	rate     int // bytes a second; 0: no limit
	queue    time.Duration
	mtu      int
	icmp     bool // oversized packets are reported
	blackout [2]clock.Time
	mark     float64       // chance of a CE mark on an ECT packet
	markAt   time.Duration // ECT packets that wait longer in the queue are marked CE; 0: none
	ackLoss  float64       // probability that a segment without payload is dropped
	bunch    time.Duration // segments without payload are sent in bunches, this far apart
	burst    float64       // probability of many duplicates

	rng  *rand.Rand
	d    *impair.Decider
	free clock.Time // when the wire will have sent what it was given
	scr  []impair.Delivery
	sent int
}

// simHost is one end: an application that sends total bytes in records, reads what arrives, and closes.
type simHost struct {
	id       int
	c        *Conn
	l        *Listener
	cfg      Config
	flow     pkt.Flow
	total    int
	pushed   int
	records  map[Buf][]byte
	nextBuf  Buf
	got      int
	rx       map[Buf][]byte // held frames
	rng      *rand.Rand
	maxRec   int
	runs     bool // records are queued in runs
	together int  // segments that left together
	readRate int  // bytes a second that the application reads; 0: at once
	backlog  int
	readAt   clock.Time
	place    float64 // probability that a held segment is placed early
	placed   map[serial.Num]int
	events   []Event
	closeAt  int // closes when this many bytes have arrived, or -1: when all is pushed
	noClose  bool
	closed   bool
	eof      bool
	iss      serial.Num
	halfDone bool
	stopped  bool       // the application does not read
	doneAt   clock.Time // the peer's FIN arrived
}

type sim struct {
	t     *testing.T
	now   clock.Time
	seed  uint64
	h     [2]*simHost
	wire  [2]*simWire // wire[i] carries what h[i] sends
	queue impair.Queue[simFrame]
	steps int
	trace bool
	fast  bool // skips the checks of invariants
	log   bytes.Buffer
	mtuAt clock.Time // the links change their MTU
	mtuTo int
	step  func() // called at every step
	plan  impair.Queue[func()]
}

func newSimHost(id int, cfg Config, total int, seed uint64) *simHost {
	return &simHost{id: id, cfg: cfg, total: total, records: map[Buf][]byte{}, rx: map[Buf][]byte{}, placed: map[serial.Num]int{},
		rng: rand.New(rand.NewPCG(seed, uint64(id)+77)), closeAt: -1, runs: seed%2 == 1}
}

func simFlow(id int, v6 bool) pkt.Flow {
	a := [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}
	b := [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 2}
	if v6 {
		a, b = [16]byte{0: 0xfd, 15: 1}, [16]byte{0: 0xfd, 15: 2}
	}
	f := pkt.Flow{Local: a, Remote: b, LocalPort: 40000, RemotePort: 7174}
	if id == 1 {
		f = pkt.Flow{Local: b, Remote: a, LocalPort: 7174, RemotePort: 40000}
	}
	return f
}

func newSim(t *testing.T, a, b *simHost, wa, wb simWire, seed uint64, v6 bool) *sim {
	s := &sim{t: t, now: simStart, seed: seed}
	s.h = [2]*simHost{a, b}
	for i, w := range []simWire{wa, wb} {
		w.Seed = seed*2 + uint64(i)
		w.rng = rand.New(rand.NewPCG(seed, uint64(i)+5))
		w.d = impair.NewDecider(w.Config)
		if w.mtu == 0 {
			w.mtu = 1500
		}
		s.wire[i] = &w
		s.h[i].flow = simFlow(i, v6)
	}
	return s
}

// dial opens from host 0 to host 1, which listens.
func (s *sim) dial(mtu int) {
	a, b := s.h[0], s.h[1]
	secret := [16]byte{1, 2, 3, byte(s.seed), byte(s.seed >> 8)}
	// Many runs start close to the wrap of sequence numbers.
	a.iss = ISS(secret, a.flow, s.now)
	if a.rng.IntN(2) == 0 {
		a.iss = serial.Num(0) - serial.Num(a.rng.IntN(20000))
	}
	a.c = Dial(s.now, &a.cfg, a.flow, a.iss, mtu)
	b.l = NewListener(&b.cfg, 8, secret, mtu)
}

func (s *sim) logf(format string, args ...any) {
	if s.trace {
		fmt.Fprintf(&s.log, "%v "+format+"\n", append([]any{s.now.Sub(simStart)}, args...)...)
	}
}

func (s *sim) send(from int, o *Out, payload []byte) {
	w, h := s.wire[from], s.h[from]
	b := make([]byte, o.Len0()+len(payload))
	n := o.Put(b)
	if n != o.Header.Len() {
		s.t.Fatalf("Put wrote %d bytes, Len is %d", n, o.Header.Len())
	}
	copy(b[n:], payload)
	s.logf("%d> %v seq=%d ack=%d win=%d len=%d re=%v sack=%v cwnd=%d pipe=%d %v", from, o.Flags, o.Seq-h.c.iss, o.Ack-h.c.irs, o.Window, len(payload), o.Retransmit, o.Opts.SACK[:o.Opts.NSACK], h.c.w.cwnd, h.c.pipe(), h.c.ca)
	w.sent++
	ip := len(b) + h.c.ipHeader()
	if s.now >= w.blackout[0] && s.now < w.blackout[1] {
		return
	}
	if ip > w.mtu {
		if w.icmp && w.rng.IntN(4) != 0 {
			e := &pkt.ICMPError{Flow: h.flow, Proto: 6, Kind: pkt.TooBig, MTU: w.mtu, Seq: uint32(o.Seq)}
			s.queue.Push(s.now.Add(w.Delay+time.Microsecond), simFrame{to: from, icm: e})
		}
		return
	}
	at, ecn := s.now, o.ECN
	if w.rate > 0 {
		at = max(at, w.free)
		if ecn != notECT && w.markAt > 0 && at.Sub(s.now) > w.markAt {
			ecn = ce
		}
		if at.Sub(s.now) > w.queue {
			return // tail drop
		}
		w.free = at.Add(time.Duration(ip) * time.Second / time.Duration(w.rate))
		at = w.free
	}
	if len(payload) == 0 && o.Flags&(SYN|FIN|RST) == 0 {
		if w.ackLoss > 0 && w.rng.Float64() < w.ackLoss {
			return
		}
		if w.bunch > 0 {
			at = at.Add(w.bunch - time.Duration(at)%w.bunch)
		}
	}
	if ecn != notECT && w.rng.Float64() < w.mark {
		ecn = ce
	}
	w.scr = w.d.Decide(at, len(b), w.scr[:0])
	for _, d := range w.scr {
		if d.Bit >= 0 {
			continue // a corrupted segment fails its checksum
		}
		s.queue.Push(d.At, simFrame{b: b, ecn: ecn, to: 1 - from})
		if w.burst > 0 && w.rng.Float64() < w.burst {
			for range 1 + w.rng.IntN(20) {
				s.queue.Push(d.At.Add(time.Duration(w.rng.Int64N(int64(2*w.Delay)))), simFrame{b: b, ecn: ecn, to: 1 - from})
			}
		}
	}
}

// Len0 returns the header length of an Out.
func (o *Out) Len0() int { return o.Header.Len() }

// receive delivers a frame to its host.
func (s *sim) receive(f simFrame) {
	h := s.h[f.to]
	if f.icm != nil {
		if h.c != nil {
			h.c.HandleICMP(s.now, f.icm)
		}
		return
	}
	var seg Segment
	n, err := seg.Decode(f.b)
	if err != nil {
		s.t.Fatalf("own segment does not decode: %v", err)
	}
	seg.Len = len(f.b) - n
	seg.ECN = f.ecn
	h.nextBuf++
	seg.Buf = h.nextBuf
	if h.c == nil || h.c.State() == Closed {
		if h.l != nil && h.c == nil {
			c, reply, ok := h.l.HandleSegment(s.now, h.flow, &seg)
			if c != nil {
				h.c = c
				h.iss = c.iss
			}
			if ok {
				s.send(f.to, &Out{Header: reply, Buf: NoBuf}, nil)
			}
			if c == nil || c.State() == SynReceived {
				return
			}
		} else {
			if r, ok := Reset(&seg.Header, seg.Len); ok {
				s.send(f.to, &Out{Header: r, Buf: NoBuf}, nil)
			}
			return
		}
	}
	payload := f.b[n:]
	in := h.c.HandleSegment(s.now, &seg)
	switch in.Action {
	case Deliver:
		s.deliver(h, in.Seq, payload[in.Off:in.Off+in.Len])
	case Hold:
		h.rx[seg.Buf] = payload
		if h.place > 0 && h.rng.Float64() < h.place {
			s.check(h, in.Seq, payload[in.Off:in.Off+in.Len])
			delete(h.rx, seg.Buf)
			h.c.Placed(seg.Buf)
		}
	}
	s.drainHeld(h)
}

// check compares received bytes with those expected at their sequence number.
func (s *sim) check(h *simHost, seq serial.Num, b []byte) {
	pos := int(uint32(seq - h.c.irs - 1))
	for i, v := range b {
		if v != byteAt(pos+i) {
			s.t.Fatalf("host %d: byte %d is wrong", h.id, pos+i)
		}
	}
}

func (s *sim) deliver(h *simHost, seq serial.Num, b []byte) {
	if want := h.c.irs + 1 + serial.Num(h.got); seq != want {
		s.t.Fatalf("host %d: delivery at %d, in-order point is %d", h.id, seq-h.c.irs, want-h.c.irs)
	}
	s.check(h, seq, b)
	h.got += len(b)
	if h.readRate > 0 || h.stopped {
		h.backlog += len(b)
	}
}

func (s *sim) drainHeld(h *simHost) {
	var d Held
	for h.c.PollHeld(&d) {
		if d.Buf == NoBuf {
			if !d.Deliver {
				s.t.Fatal("a placed range was given back undelivered")
			}
			if want := h.c.irs + 1 + serial.Num(h.got); d.Seq != want {
				s.t.Fatalf("host %d: placed delivery at %d, want %d", h.id, d.Seq, want)
			}
			h.got += d.Len
			continue
		}
		b, ok := h.rx[d.Buf]
		if !ok {
			s.t.Fatalf("host %d: frame %d was not held", h.id, d.Buf)
		}
		delete(h.rx, d.Buf)
		if d.Deliver {
			s.deliver(h, d.Seq, b[d.Off:d.Off+d.Len])
		}
	}
	if h.readRate > 0 || h.stopped {
		h.c.SetBacklog(h.backlog)
	}
}

// app runs the application of h.
func (s *sim) app(h *simHost) {
	c := h.c
	if h.stopped {
		h.readAt = s.now
	} else if h.readRate > 0 {
		if d := s.now.Sub(h.readAt); h.backlog > 0 && d > 0 {
			n := min(h.backlog, int(d.Seconds()*float64(h.readRate)))
			if n > 0 {
				h.backlog -= n
				h.readAt = s.now
				c.SetBacklog(h.backlog)
			}
		} else if h.backlog == 0 {
			h.readAt = s.now
		}
	}
	if c.State() != Established && c.State() != CloseWait {
		return
	}
	for h.pushed < h.total && len(h.records) < 4096 {
		n := min(h.total-h.pushed, c.MSS())
		if h.maxRec > 0 {
			n = min(n, 1+h.rng.IntN(h.maxRec))
		}
		if c.Room() < n {
			break
		}
		if want := h.iss + 1 + serial.Num(h.pushed); c.SndNxt() != want {
			s.t.Fatalf("SndNxt is %d, want %d", c.SndNxt(), want)
		}
		size := n
		if h.runs && c.useSACK { // otherwise they are split at once
			c.SetBurst(1 + h.rng.IntN(50))
			n *= 1 + h.rng.IntN(min(50, c.Room()/n, (h.total-h.pushed)/n))
		}
		b := make([]byte, n)
		for i := range b {
			b[i] = byteAt(h.pushed + i)
		}
		h.nextBuf++
		h.records[h.nextBuf] = b
		c.PushRun(h.nextBuf, n, size)
		h.pushed += n
	}
	if h.pushed == h.total && !h.closed && !h.noClose && (h.closeAt < 0 || h.got >= h.closeAt) {
		h.closed = true
		c.Close(s.now)
	}
}

func (s *sim) drain(h *simHost) {
	c := h.c
	var o Out
	for i := 0; i%8 > 0 && c.PollFollowing(s.now, &o) || c.PollTransmit(s.now, &o); i++ {
		if i > 100000 {
			s.t.Fatalf("host %d: PollTransmit does not end", h.id)
		}
		for rest, more := o, true; more; {
			var o Out
			if o, more = rest.split(); more {
				h.together++
			}
			var p []byte
			if o.Buf != NoBuf {
				rec, ok := h.records[o.Buf]
				if !ok {
					s.t.Fatalf("host %d: segment of released record %d", h.id, o.Buf)
				}
				p = rec[o.Off : o.Off+o.Len]
			}
			if len(p)+o.Header.Len()+c.ipHeader() > c.mtu && !o.Retransmit {
				s.t.Fatalf("host %d: segment of %d bytes exceeds the MTU %d", h.id, len(p)+o.Header.Len()+c.ipHeader(), c.mtu)
			}
			s.send(h.id, &o, p)
		}
	}
	for {
		b, ok := c.PollReleased()
		if !ok {
			break
		}
		if _, ok := h.records[b]; !ok {
			s.t.Fatalf("host %d: record %d released twice", h.id, b)
		}
		delete(h.records, b)
	}
	for {
		e, ok := c.PollEvent()
		if !ok {
			break
		}
		s.logf("%d: event %v %v", h.id, e, c.Err())
		h.events = append(h.events, e)
		if e == EventPeerClosed {
			h.eof = true
			h.doneAt = s.now
		}
	}
	if h.l != nil && !h.halfDone && c.State() != SynReceived {
		h.halfDone = true
		h.l.Done(c)
	}
	if !s.fast {
		checkInvariants(s.t, c)
	}
}

// run continues until both ends are closed or limit has passed.
func (s *sim) run(limit time.Duration) {
	end := s.now.Add(limit)
	for {
		next, done := s.turn()
		if done {
			return
		}
		s.now = max(next, s.now+1)
		if s.now > end {
			s.fail("out of time")
		}
	}
}

// turn runs everything that is due now. It returns when the next work is due, or that both ends are closed.
func (s *sim) turn() (next clock.Time, done bool) {
	s.steps++
	if s.steps > 5_000_000 {
		s.fail("too many steps")
	}
	for {
		f, ok := s.queue.Pop(s.now)
		if !ok {
			break
		}
		s.receive(f)
	}
	if s.step != nil {
		s.step()
	}
	for {
		f, ok := s.plan.Pop(s.now)
		if !ok {
			break
		}
		f()
	}
	if s.mtuAt.Due(s.now) {
		s.mtuAt = 0
		for i, h := range s.h {
			s.wire[i].mtu = min(s.wire[i].mtu, s.mtuTo)
			if h.c != nil {
				h.c.SetMTU(s.now, s.mtuTo)
			}
		}
	}
	next = s.mtuAt
	done = true
	for _, h := range s.h {
		if h.c == nil {
			done = done && h.l != nil && s.h[0].c.State() == Closed
			continue
		}
		if d := h.c.Deadline(); d.Due(s.now) {
			h.c.HandleTimeout(s.now)
			if d := h.c.Deadline(); d != 0 && d <= s.now {
				s.fail("deadline not moved")
			}
		}
		s.app(h)
		s.drain(h)
		s.app(h)
		s.drain(h)
		next = clock.Earliest(next, h.c.Deadline())
		if h.backlog > 0 && !h.stopped {
			next = clock.Earliest(next, s.now.Add(10*time.Millisecond))
		}
		done = done && h.c.State() == Closed
	}
	next = clock.Earliest(clock.Earliest(next, s.queue.Deadline()), s.plan.Deadline())
	if next == 0 && !done {
		s.fail("nothing will happen any more")
	}
	return next, done
}

func (s *sim) fail(why string) {
	s.t.Helper()
	for _, h := range s.h {
		if h.c != nil {
			s.t.Logf("host %d: %v pushed %d of %d got %d una=%d nxt=%d wnd=%d stats %+v deadlines %v", h.id, h.c.State(), h.pushed, h.total, h.got,
				h.c.una-h.c.iss, h.c.nxt-h.c.iss, h.c.wnd, h.c.Stats(), h.c.deadlines)
		}
	}
	if s.trace {
		b := s.log.Bytes()
		if len(b) > 20000 {
			b = b[len(b)-20000:]
		}
		s.t.Logf("%s", b)
	}
	s.t.Fatalf("%s after %v", why, s.now.Sub(simStart))
}

// finish checks the end of an orderly run.
func (s *sim) finish() {
	s.t.Helper()
	for i, h := range s.h {
		if h.c.Err() != nil {
			s.fail(fmt.Sprintf("host %d: %v", i, h.c.Err()))
		}
		if h.got != s.h[1-i].total {
			s.fail(fmt.Sprintf("host %d got %d bytes of %d", i, h.got, s.h[1-i].total))
		}
		if len(h.records) != 0 || len(h.rx) != 0 {
			s.fail(fmt.Sprintf("host %d: %d records and %d frames not given back", i, len(h.records), len(h.rx)))
		}
		if n := len(h.events); n == 0 || h.events[n-1] != EventClosed {
			s.fail(fmt.Sprintf("host %d: events %v", i, h.events))
		}
	}
	if s.h[1].l.half != 0 {
		s.fail("SYN queue not empty")
	}
}

// checkInvariants verifies the sums of the scoreboard and of the reassembly queue.
func checkInvariants(t *testing.T, c *Conn) {
	t.Helper()
	var fl, lo, los, sas, un, listed int
	for p := c.q.head; p != c.q.tail; p++ {
		s := c.q.at(p)
		if s.run() && (!c.q.runs || s.state > inFlight || s.retrans > 0 || s.len%s.unit != 0) {
			t.Fatalf("segment %d in state %d, sent again %d times, is a run of %d bytes", p, s.state, s.retrans, s.len)
		}
		if p+1 != c.q.tail && c.q.at(p+1).seq != s.end() {
			t.Fatalf("send queue has a gap behind %d", s.seq)
		}
		if p >= c.q.next != (s.state == unsent) {
			t.Fatalf("segment %d has state %d, next is %d", p, s.state, c.q.next)
		}
		switch s.state {
		case unsent:
			un += int(s.len)
		case inFlight:
			fl += int(s.len)
			listed++
		case lost:
			lo += int(s.len)
			los++
			if p < c.q.lostHint {
				t.Fatalf("segment %d is lost, hint is %d", p, c.q.lostHint)
			}
		case sacked:
			sas++
		}
	}
	if fl != c.q.inFlight || lo != c.q.lostBytes || los != c.q.lostSegs || sas != c.q.sackedSegs || un != c.q.unsent {
		t.Fatalf("scoreboard: in flight %d/%d lost %d/%d %d/%d sacked %d/%d queued %d/%d", c.q.inFlight, fl, c.q.lostBytes, lo,
			c.q.lostSegs, los, c.q.sackedSegs, sas, c.q.unsent, un)
	}
	var last clock.Time
	for p := c.q.oldest; p != noPos; p = c.q.at(p).next {
		listed--
		if s := c.q.at(p); s.state != inFlight || s.sent < last {
			t.Fatalf("list by time: segment %d in state %d", p, s.state)
		} else {
			last = s.sent
		}
	}
	if listed != 0 {
		t.Fatalf("list by time is short of %d", listed)
	}
	for i := 1; i < len(c.reasm.s); i++ {
		a, b := &c.reasm.s[i-1], &c.reasm.s[i]
		if !a.seq.Less(b.seq) || !a.end().Less(b.end()) {
			t.Fatalf("reassembly queue out of order")
		}
	}
	if len(c.reasm.s) > c.cfg.MaxHeld {
		t.Fatalf("%d segments held", len(c.reasm.s))
	}
	if c.state >= Established && c.w.cwnd < c.w.mss {
		t.Fatalf("cwnd %d below MSS %d", c.w.cwnd, c.w.mss)
	}
}

func TestSimClean(t *testing.T) {
	cfg := DefaultConfig()
	a, b := newSimHost(0, cfg, 3_000_000, 1), newSimHost(1, cfg, 50_000, 1)
	w := simWire{Config: impair.Config{Delay: time.Millisecond}}
	s := newSim(t, a, b, w, w, 1, false)
	s.trace = testing.Verbose()
	s.dial(1500)
	s.run(60 * time.Second)
	s.finish()
	if n := a.c.stats.Retransmits + b.c.stats.Retransmits; n != 0 {
		t.Errorf("%d retransmissions on a perfect wire", n)
	}
	t.Logf("%v %+v", s.now.Sub(simStart), a.c.Stats())
}
