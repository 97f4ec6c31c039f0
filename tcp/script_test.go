package tcp

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// A script drives one Conn by hand. Each line is a step:
//
//	+200ms                     time goes on; timers run at their time
//	dial | listen [backlog]    open; the script's peer sends what follows "<"
//	closed | accept            there is no connection, or one that the peer opened. A script that begins with neither of
//	                           these four starts in ESTABLISHED, after a handshake that we began
//	< FLAGS SEQ[+LEN] [ack N] [win N] [mss N] [ws N] [sackok] [ts VAL/ECR] [sack A-B ...] [ce] [ect]
//	                           a segment from the peer. SEQ counts from its ISN, ack from ours. A "." in FLAGS is ACK
//	> FLAGS SEQ[+LEN] ...      the next segment out. Fields that are not named are not compared
//	<, > or send ... xN        N such segments, each of which begins where the one before it ends
//	push N [N ...]             records; buf handles are 1, 2, ...
//	send SEQ+LEN               the same as push LEN and > P. SEQ+LEN
//	reclaim                    the owner is short of frames
//	quick                      the quick ACKs of the beginning are over
//	close | abort | backlog N | mtu N | path | icmp toobig SEQ MTU | icmp unreachable|exceeded SEQ CODE
//	in ACTION [SEQ+LEN]        what the last segment from the peer led to: drop, deliver, hold, reopen
//	held SEQ+LEN | held drop | placed
//	state S | err TEXT | event NAME | released N ... | mss N | room >=N | cwnd N | stat NAME N | deadline none
//
// Each segment out has to be named by the script, in order. "win" is as on the wire. With timestamps on,
// the peer's segments carry them unless the line has "nots"; ts VAL defaults to the last one given.
type script struct {
	name string // starts with the RFC section or label that it tests
	opts string // options of the SYN of a handshake, as above; default "mss 1460"
	conf func(*Config)
	text string
}

const scriptPeerISN = serial.Num(0x20000000)

type scriptRun struct {
	t       *testing.T
	line    string
	n       int
	now     clock.Time
	cfg     Config
	flow    pkt.Flow
	c       *Conn
	l       *Listener
	outs    []Out
	in      Input
	nextBuf Buf
	rxBuf   Buf
	peer    serial.Num
	tsVal   uint32
	ts      bool
	opts    string
	iss     serial.Num
	relBufs []Buf
	lastSeg Segment
	events  []Event
	rtt     time.Duration
}

func runScripts(t *testing.T, scripts []script) {
	t.Helper()
	for _, sc := range scripts {
		t.Run(strings.ReplaceAll(sc.name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			cfg := DefaultConfig()
			cfg.NoTimestamps = true
			cfg.NoWindowScale = true
			cfg.RcvWindow = 65535
			if sc.conf != nil {
				sc.conf(&cfg)
			}
			r := &scriptRun{t: t, now: simStart, cfg: cfg, flow: simFlow(0, false), peer: scriptPeerISN, opts: sc.opts, tsVal: 1000}
			if r.opts == "" {
				r.opts = "mss 1460"
			}
			text := strings.TrimSpace(sc.text)
			switch first, _, _ := strings.Cut(text, "\n"); strings.Fields(first)[0] {
			case "dial", "listen", "closed", "accept":
			default:
				r.handshake(true)
			}
			for i, line := range strings.Split(text, "\n") {
				r.n, r.line = i+1, strings.TrimSpace(line)
				if k := strings.Index(r.line, "#"); k >= 0 {
					r.line = strings.TrimSpace(r.line[:k])
				}
				if r.line != "" {
					r.steps(strings.Fields(r.line))
				}
			}
			r.line = "end of the script"
			r.noOuts()
		})
	}
}

func (r *scriptRun) fatalf(format string, args ...any) {
	r.t.Helper()
	state := ""
	if r.c != nil {
		state = fmt.Sprintf(" [%v una %d nxt %d rcv %d wnd %d cwnd %d pipe %d ca %d]", r.c.State(), r.c.una-r.c.iss, r.c.nxt-r.c.iss,
			r.c.rcvNxt-r.peer, r.c.wnd, r.c.w.cwnd, r.c.pipe(), r.c.ca)
	}
	r.t.Fatalf("line %d %q: %s%s", r.n, r.line, fmt.Sprintf(format, args...), state)
}

func (r *scriptRun) num(s string) int {
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		r.fatalf("bad number %q", s)
	}
	return int(n)
}

func (r *scriptRun) poll() {
	if r.c == nil {
		return
	}
	var o Out
	for i := 0; r.c.PollTransmit(r.now, &o); i++ {
		if i > 10000 {
			r.fatalf("PollTransmit does not end")
		}
		r.outs = append(r.outs, o)
	}
	for {
		b, ok := r.c.PollReleased()
		if !ok {
			break
		}
		r.relBufs = append(r.relBufs, b)
	}
	for {
		e, ok := r.c.PollEvent()
		if !ok {
			break
		}
		r.events = append(r.events, e)
	}
	checkInvariants(r.t, r.c)
}

func (r *scriptRun) noOuts() {
	r.t.Helper()
	if len(r.outs) > 0 {
		r.fatalf("unexpected segment: %s", r.show(&r.outs[0]))
	}
}

func (r *scriptRun) show(o *Out) string {
	s := fmt.Sprintf("%v %d+%d ack %d win %d", o.Flags, o.Seq-r.iss, o.Len, o.Ack-r.peer, o.Window)
	if o.Opts.MSS != 0 {
		s += fmt.Sprintf(" mss %d", o.Opts.MSS)
	}
	if o.Opts.HasWScale {
		s += fmt.Sprintf(" ws %d", o.Opts.WScale)
	}
	if o.Opts.SACKPermitted {
		s += " sackok"
	}
	if o.Opts.HasTimestamps {
		s += fmt.Sprintf(" ts %d/%d", o.Opts.TSVal, o.Opts.TSEcr)
	}
	if o.Opts.NSACK > 0 {
		s += " sack"
		for _, b := range o.Opts.SACK[:o.Opts.NSACK] {
			s += fmt.Sprintf(" %d-%d", b.Start-r.peer, b.End-r.peer)
		}
	}
	return s + fmt.Sprintf(" ecn %d buf %d off %d", o.ECN, int32(o.Buf), o.Off)
}

// advance moves the clock by d and runs timers.
func (r *scriptRun) advance(d time.Duration) {
	end := r.now.Add(d)
	for r.c != nil {
		at := r.c.Deadline()
		if at == 0 || at > end {
			break
		}
		r.now = max(r.now, at)
		r.c.HandleTimeout(r.now)
		r.poll()
	}
	r.now = end
	r.poll()
}

var flagOf = map[rune]Flags{'.': ACK, 'S': SYN, 'F': FIN, 'R': RST, 'P': PSH, 'U': URG, 'E': ECE, 'C': CWR, '-': 0}

func (r *scriptRun) flags(w string) (f Flags) {
	for _, ch := range w {
		b, ok := flagOf[ch]
		if !ok {
			r.fatalf("bad flags %q", w)
		}
		f |= b
	}
	return f
}

func (r *scriptRun) seqLen(w string) (seq, n int) {
	a, b, ok := strings.Cut(w, "+")
	if ok {
		n = r.num(b)
	}
	return r.num(a), n
}

// segment parses a segment from the peer.
func (r *scriptRun) segment(f []string) Segment {
	s := Segment{Header: Header{SrcPort: r.flow.RemotePort, DstPort: r.flow.LocalPort, Window: 65535}, Buf: NoBuf}
	s.Flags = r.flags(f[0])
	seq, n := r.seqLen(f[1])
	s.Seq, s.Len = r.peer.Add(seq), n
	if r.ts {
		s.Opts.HasTimestamps, s.Opts.TSVal = true, r.tsVal
		if r.c != nil {
			s.Opts.TSEcr = r.c.tsAt(r.now)
		}
	}
	for i := 2; i < len(f); i++ {
		arg := func() string { i++; return f[i] }
		switch f[i] {
		case "ack":
			s.Ack = r.iss.Add(r.num(arg()))
		case "win":
			s.Window = uint16(r.num(arg()))
		case "mss":
			s.Opts.MSS = uint16(r.num(arg()))
		case "ws":
			s.Opts.HasWScale, s.Opts.WScale = true, uint8(r.num(arg()))
		case "sackok":
			s.Opts.SACKPermitted = true
		case "nots":
			s.Opts.HasTimestamps = false
		case "ts":
			v, e, ok := strings.Cut(arg(), "/")
			s.Opts.HasTimestamps = true
			s.Opts.TSVal = uint32(r.num(v))
			r.tsVal = s.Opts.TSVal
			if ok {
				s.Opts.TSEcr = r.c.tsOff + uint32(uint64(simStart)/1e6) + uint32(r.num(e)) // milliseconds of the script
			}
		case "tsold": // does not move the default
			s.Opts.HasTimestamps = true
			s.Opts.TSVal = uint32(r.num(arg()))
		case "sack":
			for i+1 < len(f) && strings.Contains(f[i+1], "-") {
				a, b, _ := strings.Cut(arg(), "-")
				s.Opts.SACK[s.Opts.NSACK] = SACKBlock{r.iss.Add(r.num(a)), r.iss.Add(r.num(b))}
				s.Opts.NSACK++
			}
		case "ce":
			s.ECN = ce
		case "ect":
			s.ECN = ect0
		default:
			r.fatalf("bad word %q", f[i])
		}
	}
	return s
}

func (r *scriptRun) inject(s Segment) {
	// Encode and decode it, so that it is what the wire carries.
	var b [MaxHeaderLen]byte
	n := s.Put(b[:])
	t := s
	if m, err := t.Decode(b[:n]); err != nil || m != n {
		r.fatalf("codec: %v", err)
	}
	if s.Len > 0 {
		r.nextBuf++
		t.Buf = 1000 + r.nextBuf
		r.rxBuf = t.Buf
	}
	r.lastSeg = t
	if r.c == nil || r.c.State() == Closed {
		if r.l == nil {
			if h, ok := Reset(&t.Header, t.Len); ok {
				r.outs = append(r.outs, Out{Header: h, Buf: NoBuf})
			}
			return
		}
		c, reply, ok := r.l.HandleSegment(r.now, r.flow, &t)
		if ok {
			r.outs = append(r.outs, Out{Header: reply, Buf: NoBuf})
			if reply.Flags&SYN != 0 {
				r.iss = reply.Seq
			}
		}
		if c == nil {
			return
		}
		r.c = c
		r.iss = c.iss
		if c.State() == SynReceived {
			r.poll()
			return
		}
	}
	r.in = r.c.HandleSegment(r.now, &t)
	r.poll()
}

// steps performs a line, as often as it says.
func (r *scriptRun) steps(f []string) {
	r.t.Helper()
	n := 1
	if times, ok := strings.CutPrefix(f[len(f)-1], "x"); ok {
		n, f = r.num(times), f[:len(f)-1]
	}
	if f[0] == "send" {
		_, size, _ := strings.Cut(f[1], "+")
		r.step(append([]string{"push"}, slices.Repeat([]string{size}, n)...))
		f = []string{">", "P.", f[1]}
	}
	for i := range n {
		if i > 0 {
			seq, size := r.seqLen(f[2])
			f[2] = fmt.Sprintf("%d+%d", seq+size, size)
		}
		r.step(f)
	}
}

func (r *scriptRun) step(f []string) {
	r.t.Helper()
	if f[0][0] == '+' {
		r.noOuts()
		d, err := time.ParseDuration(f[0][1:])
		if err != nil {
			r.fatalf("%v", err)
		}
		r.advance(d)
		if f = f[1:]; len(f) == 0 {
			return
		}
	}
	switch f[0] {
	case ">":
		if len(r.outs) == 0 {
			r.fatalf("no segment")
		}
		o := r.outs[0]
		r.outs = r.outs[1:]
		r.compare(&o, f[1:])
		return
	case "state", "err", "event", "released", "in", "held", "mss", "cwnd", "stat", "room", "deadline":
		r.assert(f)
		return
	}
	r.noOuts()
	switch f[0] {
	case "<":
		r.inject(r.segment(f[1:]))
	case "dial":
		r.dial(f[1:])
	case "listen":
		n := 8
		if len(f) > 1 {
			n = r.num(f[1])
		}
		r.l = NewListener(&r.cfg, n, [16]byte{1}, 1500)
	case "closed":
	case "accept":
		r.handshake(false)
	case "push":
		for _, w := range f[1:] {
			r.nextBuf++
			r.c.Push(r.nextBuf, r.num(w))
		}
		r.poll()
	case "close":
		r.c.Close(r.now)
		r.poll()
	case "abort":
		r.c.Abort(r.now)
		r.poll()
	case "backlog":
		r.c.SetBacklog(r.num(f[1]))
		r.poll()
	case "mtu":
		r.c.SetMTU(r.now, r.num(f[1]))
		r.poll()
	case "path": // packets take another one
		r.c.PathChanged(r.now)
		r.advance(0)
	case "reclaim":
		r.c.Reclaim(math.MaxInt)
	case "quick":
		r.c.quickAcks = 0
	case "placed":
		r.c.Placed(r.rxBuf)
	case "icmp":
		e := pkt.ICMPError{Flow: r.flow, Proto: 6, Seq: uint32(r.iss.Add(r.num(f[2])))}
		if f[1] == "toobig" {
			e.Kind, e.MTU = pkt.TooBig, r.num(f[3])
		} else {
			e.Kind, e.Code = pkt.Unreachable, uint8(r.num(f[3]))
		}
		if f[1] == "exceeded" {
			e.Kind = pkt.TimeExceeded
		}
		r.c.HandleICMP(r.now, &e)
		r.poll()
	default:
		r.fatalf("bad step")
	}
}

// start reads iss and peer, the initial sequence numbers, and returns the other words.
func (r *scriptRun) start(f []string) (rest []string) {
	r.iss = 0x10000000
	for i := 0; i < len(f); i++ {
		switch f[i] {
		case "iss":
			i++
			r.iss = serial.Num(r.num(f[i]))
		case "peer":
			i++
			r.peer = serial.Num(r.num(f[i]))
		case "rtt": // of the handshake
			i++
			d, err := time.ParseDuration(f[i])
			if err != nil {
				r.fatalf("%v", err)
			}
			r.rtt = d
		case "noopts":
		default:
			rest = append(rest, f[i])
		}
	}
	return rest
}

func (r *scriptRun) dial(f []string) {
	r.start(f)
	r.c = Dial(r.now, &r.cfg, r.flow, r.iss, 1500)
	r.poll()
}

// handshake brings the connection to ESTABLISHED and discards what was sent.
func (r *scriptRun) handshake(active bool) {
	words := r.start(strings.Fields(r.opts))
	if active {
		r.c = Dial(r.now, &r.cfg, r.flow, r.iss, 1500)
		r.poll()
		flags := "S."
		if r.cfg.requestsECN() {
			flags = "SE."
		}
		r.advance(r.rtt)
		r.inject(r.segment(append([]string{flags, "0", "ack", "1"}, words...)))
	} else {
		r.l = NewListener(&r.cfg, 8, [16]byte{1}, 1500)
		flags := "S"
		if r.cfg.requestsECN() {
			flags = "SEC"
		}
		r.inject(r.segment(append([]string{flags, "0"}, words...)))
		r.ts = r.c.tsOK
		r.advance(r.rtt)
		r.inject(r.segment([]string{".", "1", "ack", "1"}))
		r.l.Done(r.c)
	}
	r.ts = r.c.tsOK
	if r.c.State() != Established {
		r.fatalf("handshake failed")
	}
	r.outs, r.events = nil, nil
	r.in = Input{}
}

func (r *scriptRun) compare(o *Out, f []string) {
	r.t.Helper()
	bad := func(what string) {
		r.t.Helper()
		r.fatalf("%s differs: got %s", what, r.show(o))
	}
	if o.Flags != r.flags(f[0]) {
		bad("flags")
	}
	if len(f) > 1 {
		seq, n := r.seqLen(f[1])
		if o.Seq != r.iss.Add(seq) || o.Len != n {
			bad("sequence")
		}
	}
	for i := 2; i < len(f); i++ {
		arg := func() string { i++; return f[i] }
		ok := true
		w := f[i]
		switch w {
		case "ack":
			ok = o.Ack == r.peer.Add(r.num(arg()))
		case "absack":
			ok = o.Ack == serial.Num(r.num(arg()))
		case "win":
			ok = int(o.Window) == r.num(arg())
		case "mss":
			ok = int(o.Opts.MSS) == r.num(arg())
		case "ws":
			ok = o.Opts.HasWScale && int(o.Opts.WScale) == r.num(arg())
		case "nows":
			ok = !o.Opts.HasWScale
		case "sackok":
			ok = o.Opts.SACKPermitted
		case "nosackok":
			ok = !o.Opts.SACKPermitted
		case "ts":
			ok = o.Opts.HasTimestamps
		case "nots":
			ok = !o.Opts.HasTimestamps
		case "ecr":
			ok = o.Opts.HasTimestamps && o.Opts.TSEcr == uint32(r.num(arg()))
		case "nosack":
			ok = o.Opts.NSACK == 0
		case "ect":
			ok = o.ECN == ect0
		case "noect":
			ok = o.ECN == notECT
		case "re":
			ok = o.Retransmit
		case "new":
			ok = !o.Retransmit
		case "buf":
			ok = int(o.Buf) == r.num(arg())
		case "off":
			ok = o.Off == r.num(arg())
		case "sack":
			n := 0
			for i+1 < len(f) && strings.Contains(f[i+1], "-") {
				a, b, _ := strings.Cut(arg(), "-")
				ok = ok && n < int(o.Opts.NSACK) && o.Opts.SACK[n] == SACKBlock{r.peer.Add(r.num(a)), r.peer.Add(r.num(b))}
				n++
			}
			ok = ok && n == int(o.Opts.NSACK)
		default:
			r.fatalf("bad word %q", w)
		}
		if !ok {
			bad(w)
		}
	}
}

func (r *scriptRun) assert(f []string) {
	r.t.Helper()
	fail := func(got any) {
		r.t.Helper()
		r.fatalf("got %v", got)
	}
	switch f[0] {
	case "state":
		if r.c.State().String() != f[1] {
			fail(r.c.State())
		}
	case "err":
		if err := r.c.Err(); (err == nil) != (f[1] == "none") || err != nil && !strings.Contains(err.Error(), strings.Join(f[1:], " ")) {
			fail(err)
		}
	case "event":
		if f[1] == "none" {
			if len(r.events) > 0 {
				fail(r.events)
			}
			return
		}
		if len(r.events) == 0 || strings.ReplaceAll(r.events[0].String(), " ", "-") != f[1] {
			fail(r.events)
		}
		r.events = r.events[1:]
	case "released":
		got := fmt.Sprint(r.relBufs)
		want := "[" + strings.Join(f[1:], " ") + "]"
		r.relBufs = nil
		if f[1] == "none" {
			want = "[]"
		}
		if got != want {
			fail(got)
		}
	case "in":
		want := map[string]Action{"drop": Drop, "deliver": Deliver, "hold": Hold, "reopen": Reopen}[f[1]]
		if r.in.Action != want {
			fail(r.in)
		}
		if len(f) > 2 {
			seq, n := r.seqLen(f[2])
			first := r.lastSeg.Seq // of the payload
			if r.lastSeg.Flags&SYN != 0 {
				first++
			}
			if r.in.Seq != r.peer.Add(seq) || r.in.Len != n || r.in.Off != int(r.in.Seq-first) {
				fail(fmt.Sprintf("%d+%d off %d", r.in.Seq-r.peer, r.in.Len, r.in.Off))
			}
		}
	case "held":
		var h Held
		ok := r.c.PollHeld(&h)
		switch {
		case f[1] == "none":
			if ok {
				fail(h)
			}
			return
		case !ok:
			fail("nothing")
		case f[1] == "drop":
			if h.Deliver {
				fail(h)
			}
			return
		}
		seq, n := r.seqLen(f[1])
		if !h.Deliver || h.Seq != r.peer.Add(seq) || h.Len != n {
			fail(fmt.Sprintf("%d+%d off %d deliver %v", h.Seq-r.peer, h.Len, h.Off, h.Deliver))
		}
		if len(f) > 2 && f[2] == "nobuf" && h.Buf != NoBuf {
			fail(h)
		}
	case "mss":
		if r.c.MSS() != r.num(f[1]) {
			fail(r.c.MSS())
		}
	case "cwnd":
		if r.c.w.cwnd != r.num(f[1]) {
			fail(r.c.w.cwnd)
		}
	case "room":
		if r.c.Room() != r.num(f[1]) {
			fail(r.c.Room())
		}
	case "deadline":
		if r.c.Deadline() != 0 {
			fail(r.c.Deadline().Sub(r.now))
		}
	case "stat":
		got := r.stat(f[1])
		if got != uint64(r.num(f[2])) {
			fail(got)
		}
	}
}

func (r *scriptRun) stat(name string) uint64 {
	s := r.c.Stats()
	m := map[string]uint64{"retransmits": s.Retransmits, "fast": s.RetransFast, "rto": s.RetransRTO, "tlp": s.RetransTLP,
		"timeouts": s.Timeouts, "spurious": s.SpuriousRTO, "undos": s.Undos, "recoveries": s.Recoveries, "challenge": s.ChallengeAcks,
		"paws": s.PAWSDropped, "dsackin": s.DSACKIn, "dsackout": s.DSACKOut, "ooo": s.OutOfOrderIn, "dup": s.DuplicateIn,
		"helddropped": s.HeldDropped, "probes": s.WindowProbes, "shrinks": s.PMTUShrinks, "ecn": s.ECNReductions, "bad": s.BadOptions, "ce": s.CEIn,
		"rtoms": uint64(s.RTO / time.Millisecond)}
	v, ok := m[name]
	if !ok {
		r.fatalf("no statistic %q", name)
	}
	return v
}
