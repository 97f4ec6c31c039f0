package session

import (
	"encoding/binary"
	"math/bits"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/mpa"
)

var be = binary.BigEndian

// HeaderLen is what stands in front of a DDP segment in a message: the DDP-SSN.
const HeaderLen = 2

const (
	controlHeader = 4
	// maxUnacked is how many messages of a stream may be without acknowledgement: SSNs
	// are told apart while they are less than half the space away (RFC 5043 section 10).
	maxUnacked = 32767
)

// Config is the policy of a Mux. The zero value of a field takes its default.
type Config struct {
	Profile    Profile
	NoEnhanced bool // a peer's enhanced Initiate is a violation, as to RFC 5043 alone
	Pending    int  // Initiates that wait for the ULP, at most; default 16
	MaxAhead   int  // messages of a stream taken ahead of their turn; default 4096, at most 32767
}

// Control is a session control message to be sent, unordered, on Stream.
type Control struct {
	Stream uint16
	PPID   uint32
	Data   []byte
}

// Stats counts what a Mux has seen.
type Stats struct {
	Sessions, Rejected, Terminated, Violations uint64
	Early, Held, Delivered                     uint64 // DDP segments placed ahead, held ahead, delivered
	AfterEnd, Stray                            uint64 // messages dropped
}

// Add adds o to s, field by field.
func (s *Stats) Add(o *Stats) {
	s.Sessions += o.Sessions
	s.Rejected += o.Rejected
	s.Terminated += o.Terminated
	s.Violations += o.Violations
	s.Early += o.Early
	s.Held += o.Held
	s.Delivered += o.Delivered
	s.AfterEnd += o.AfterEnd
	s.Stray += o.Stray
}

// Mux holds the DDP streams of an association.
type Mux struct {
	cfg     Config
	streams []*stream // made when used
	events  []Event
	control []Control
	pending int
	held    int // octets
	kept    int // octets of the streams' rings and bits, in use or not
	pool    [][]byte
	pooled  int // octets
	stats   Stats

	seenWords int // of stream.seen: a power of two, of more bits than MaxAhead
}

// New returns the Mux of an association with n streams each way: the smaller of the
// numbers of the two directions.
func New(cfg Config, n int) *Mux {
	if cfg.Pending <= 0 {
		cfg.Pending = 16
	}
	if cfg.MaxAhead <= 0 {
		cfg.MaxAhead = 4096
	}
	cfg.MaxAhead = min(cfg.MaxAhead, maxUnacked)
	return &Mux{cfg: cfg, streams: make([]*stream, n), seenWords: max(1, 1<<bits.Len(uint(cfg.MaxAhead))/64)}
}

// aheadKind says what became of a message that came ahead of its turn.
type aheadKind uint8

const (
	notCome aheadKind = iota
	aheadHeld
	aheadPlaced
)

type ahead struct {
	kind aheadKind
	ppid uint32
	b    []byte // aheadHeld: the message, SSN included
}

// aheadSize is what an ahead takes, in octets.
const aheadSize = 32

// stream is a DDP stream.
type stream struct {
	id    uint16
	state State
	sink  Sink

	enhanced  bool // our Initiate, or the peer's, was
	canceled  bool // Terminate was called while our Initiate is out
	sinkEnded bool // the sink has found an error

	// Sending.
	ssn        uint16
	unacked    int
	ctlUnacked int      // of control messages
	ctlQueue   [][]byte // wait for those before them
	sentTerm   bool

	// Receiving.
	next       uint16 // SSN whose turn it is
	count      serial.Num
	gotTerm    bool // the peer's last message, and all before it, have come
	hasTerm    bool // its Terminate has
	negotiates int  // the peer's Negotiates in this session
	termSSN    uint16
	ring       []ahead  // by SSN
	seen       []uint64 // Ended: of messages ahead it is enough to know that they came; a bit for each, by SSN
	nahead     int      // in ring or seen
}

// Stats returns the counters.
func (m *Mux) Stats() Stats { return m.stats }

// Held returns how many octets wait for their turn: they lessen the window of the
// association.
func (m *Mux) Held() int { return m.held }

// Memory returns how many octets a peer has us keep by what it sends: what is held, buffers
// for more of that, and places for messages that come ahead of their turn.
func (m *Mux) Memory() int { return m.held + m.pooled + m.kept }

// Trim lets go what Memory counts and nothing is in.
func (m *Mux) Trim() {
	m.pool, m.pooled = nil, 0
	for _, s := range m.streams {
		if s != nil && s.nahead == 0 {
			m.keepRing(s, nil)
			m.keepSeen(s, nil)
		}
	}
}

// keepRing and keepSeen give a stream another ring, and other bits.
func (m *Mux) keepRing(s *stream, r []ahead) {
	m.kept += (len(r) - len(s.ring)) * aheadSize
	s.ring = r
}

func (m *Mux) keepSeen(s *stream, b []uint64) {
	m.kept += 8 * (len(b) - len(s.seen))
	s.seen = b
}

// Streams returns how many DDP streams there are.
func (m *Mux) Streams() int { return len(m.streams) }

// State returns the state of the session on stream id.
func (m *Mux) State(id uint16) State {
	if int(id) >= len(m.streams) || m.streams[id] == nil {
		return Idle
	}
	return m.streams[id].state
}

// Free reports whether Initiate may begin a session on stream id: there is none, and
// nothing of the last one is under way.
func (m *Mux) Free(id uint16) bool {
	if int(id) >= len(m.streams) {
		return false
	}
	s := m.streams[id]
	return s == nil || s.state == Idle && s.unacked == 0
}

func (m *Mux) stream(id uint16) *stream {
	if int(id) >= len(m.streams) {
		return nil
	}
	s := m.streams[id]
	if s == nil {
		s = &stream{id: id}
		m.streams[id] = s
		m.begin(s)
	}
	return s
}

// begin makes s ready for a session.
func (m *Mux) begin(s *stream) {
	m.drop(s)
	m.keepSeen(s, nil)
	*s = stream{id: s.id, ring: s.ring, unacked: s.unacked, ctlUnacked: s.ctlUnacked}
	s.ssn = m.cfg.Profile.firstSSN()
	s.next = s.ssn
}

// drop forgets what is held.
func (m *Mux) drop(s *stream) {
	if s.nahead == 0 {
		return
	}
	for i := range s.ring {
		m.free(&s.ring[i])
	}
	s.nahead = 0
}

func (m *Mux) free(a *ahead) {
	if a.kind == aheadHeld {
		m.held -= len(a.b)
		m.recycle(a.b)
	}
	*a = ahead{}
}

// maxPooled is how many octets of buffers that are not in use a Mux has.
const maxPooled = 64 << 10

// recycle takes back the buffer of a message that was held.
func (m *Mux) recycle(b []byte) {
	if m.pooled+cap(b) <= maxPooled {
		m.pool = append(m.pool, b)
		m.pooled += cap(b)
	}
}

// hold returns a copy of b, in a buffer that is not much longer: Held counts octets, and
// a peer chooses how long its messages are.
func (m *Mux) hold(b []byte) []byte {
	if n := len(m.pool); n > 0 && cap(m.pool[n-1]) <= 4*len(b) {
		c := m.pool[n-1]
		m.pool[n-1], m.pool = nil, m.pool[:n-1]
		m.pooled -= cap(c)
		return append(c[:0], b...)
	}
	return append([]byte(nil), b...)
}

func (m *Mux) event(s *stream, k EventKind, set *Setup, err error) {
	m.events = append(m.events, Event{Kind: k, Stream: s.id, Setup: set, Err: err})
}

// PollEvent returns the next event.
func (m *Mux) PollEvent(e *Event) bool {
	if len(m.events) == 0 {
		return false
	}
	*e = m.events[0]
	m.events = append(m.events[:0], m.events[1:]...)
	return true
}

// PollControl gives the next control message to push. Each counts as one message of
// its stream for Acked.
func (m *Mux) PollControl(c *Control) bool {
	if len(m.control) == 0 {
		return false
	}
	*c = m.control[0]
	m.control = append(m.control[:0], m.control[1:]...)
	return true
}

// Quiet reports that PollControl has given all control messages there are.
func (m *Mux) Quiet() bool {
	if len(m.control) > 0 {
		return false
	}
	for _, s := range m.streams {
		if s != nil && len(s.ctlQueue) > 0 {
			return false
		}
	}
	return true
}

// send queues a control message with the next DDP-SSN. One that could overtake an
// earlier one waits until that one is acknowledged (RFC 5043 6.6).
func (m *Mux) send(s *stream, fn function, set *Setup) {
	enh := set != nil && set.Enhanced != nil
	b := make([]byte, 0, controlHeader+mpa.EnhancedLen)
	b = be.AppendUint16(b, s.ssn)
	b = be.AppendUint16(b, m.cfg.Profile.code(fn, enh))
	if enh {
		b = set.Enhanced.Append(b)
	}
	if set != nil {
		b = append(b, set.Private...)
	}
	s.ssn++
	s.ctlQueue = append(s.ctlQueue, b)
	m.release(s)
}

// release lets the next control message of s go, if none is under way.
func (m *Mux) release(s *stream) {
	if s.ctlUnacked > 0 || len(s.ctlQueue) == 0 {
		return
	}
	m.control = append(m.control, Control{s.id, m.cfg.Profile.Control(), s.ctlQueue[0]})
	s.ctlQueue = append(s.ctlQueue[:0], s.ctlQueue[1:]...)
	s.ctlUnacked++
	s.unacked++
}

// Acked says that the peer has acknowledged a message of stream id: control is true
// for one of PollControl, false for a DDP segment.
func (m *Mux) Acked(id uint16, control bool) {
	s := m.stream(id)
	if s == nil || s.unacked == 0 {
		return
	}
	s.unacked--
	if control && s.ctlUnacked > 0 {
		s.ctlUnacked--
		m.release(s)
	}
	m.settle(s)
}

// settle makes an ended stream idle when nothing of its session can be under way:
// ours is acknowledged, and the peer's last message has come.
func (m *Mux) settle(s *stream) {
	if s.state == Ended && s.unacked == 0 && len(s.ctlQueue) == 0 && s.gotTerm {
		m.begin(s)
		m.event(s, EventIdle, nil, nil)
	}
}

func checkSetup(set *Setup) error {
	n := len(set.Private)
	if d := set.Enhanced; d != nil {
		if err := d.Validate(); err != nil {
			return err
		}
		n += mpa.EnhancedLen
	}
	if n > MaxPrivate {
		return ErrSize
	}
	return nil
}

// Negotiate sends a Negotiate, in the draft, before a session is set up. One at a
// time is under way.
func (m *Mux) Negotiate(id uint16, private []byte) error {
	s := m.stream(id)
	switch {
	case s == nil:
		return ErrStream
	case m.cfg.Profile != Draft || s.state != Idle && s.state != Negotiating || s.ctlUnacked > 0:
		return ErrState
	case len(private) > MaxPrivate:
		return ErrSize
	}
	s.state = Negotiating
	m.send(s, fnNegotiate, &Setup{Private: private})
	return nil
}

// Initiate asks the peer for a session on stream id. EventOpen, EventRejected or
// EventFailed follows.
func (m *Mux) Initiate(id uint16, set Setup) error {
	s := m.stream(id)
	switch {
	case s == nil:
		return ErrStream
	case s.state != Idle && s.state != Negotiating || s.state == Idle && s.unacked > 0:
		return ErrState
	case set.Enhanced != nil && m.cfg.Profile == Draft:
		return ErrState
	}
	if err := checkSetup(&set); err != nil {
		return err
	}
	s.state = Initiating
	s.enhanced = set.Enhanced != nil
	m.send(s, fnInitiate, &set)
	return nil
}

// Accept answers the peer's Initiate: the session is open. It is enhanced exactly
// when the Initiate was.
func (m *Mux) Accept(id uint16, set Setup) error {
	s := m.stream(id)
	if s == nil {
		return ErrStream
	}
	if s.state != Requested || s.enhanced != (set.Enhanced != nil) {
		return ErrState
	}
	if err := checkSetup(&set); err != nil {
		return err
	}
	m.pending--
	s.state = Open
	m.stats.Sessions++
	m.send(s, fnAccept, &set)
	m.advance(s)
	return nil
}

// Reject refuses the peer's Initiate, as the ULP wishes (RFC 5043 6.3). In the draft
// it is a Terminate, and private data are not sent.
func (m *Mux) Reject(id uint16, set Setup) error {
	s := m.stream(id)
	if s == nil {
		return ErrStream
	}
	if s.state != Requested || set.Enhanced != nil && !s.enhanced {
		return ErrState
	}
	if err := checkSetup(&set); err != nil {
		return err
	}
	if m.cfg.Profile == Draft {
		return m.Terminate(id)
	}
	m.pending--
	m.stats.Rejected++
	m.send(s, fnReject, &set)
	m.over(s)
	s.gotTerm = true // the peer's Initiate was its last message
	m.settle(s)
	return nil
}

// Terminate ends the session; an Initiate that waits for the ULP is refused by it.
// When ours is unanswered the Terminate follows the answer.
func (m *Mux) Terminate(id uint16) error {
	s := m.stream(id)
	if s == nil {
		return ErrStream
	}
	switch s.state {
	case Idle, Ended:
		return ErrState
	case Initiating:
		s.canceled = true
		return nil
	case Requested:
		m.pending--
		m.terminate(s)
		s.gotTerm = true
		m.settle(s)
	default:
		m.terminate(s)
	}
	return nil
}

// terminate sends a Terminate and ends the session.
func (m *Mux) terminate(s *stream) {
	s.sentTerm = true
	m.send(s, fnTerminate, nil)
	m.over(s)
}

// over ends the session: what is held of it is of no use, but that it came.
func (m *Mux) over(s *stream) {
	s.state = Ended
	s.sink = nil
	for d := 0; s.nahead > 0; d++ {
		a := &s.ring[int(s.next+uint16(d))&(len(s.ring)-1)]
		if a.kind == notCome {
			continue
		}
		if a.kind == aheadHeld && m.isTerminate(a.ppid, a.b) {
			s.hasTerm, s.termSSN = true, be.Uint16(a.b)
		}
		m.free(a)
		s.nahead--
		m.note(s, d)
	}
	s.nahead = 0
	for _, w := range s.seen {
		s.nahead += bits.OnesCount64(w)
	}
	if len(s.ring) > maxIdleRing {
		m.keepRing(s, nil)
	}
	m.pass(s)
}

// maxIdleRing is the largest ring that a stream keeps for its next session.
const maxIdleRing = 1024

// note notes, in seen, that the message d places ahead came.
func (m *Mux) note(s *stream, d int) {
	if s.seen == nil {
		m.keepSeen(s, make([]uint64, m.seenWords))
	}
	i := int(s.next+uint16(d)) & (64*len(s.seen) - 1)
	s.seen[i/64] |= 1 << (i % 64)
}

func (m *Mux) isTerminate(ppid uint32, b []byte) bool {
	if ppid != m.cfg.Profile.Control() || len(b) < controlHeader {
		return false
	}
	fn, _, ok := m.cfg.Profile.decodeFunction(be.Uint16(b[2:]))
	return ok && fn == fnTerminate
}

// came notes that a message of an ended session, or the one that ended it, has come.
func (m *Mux) came(s *stream, ppid uint32, b []byte) {
	if len(b) < HeaderLen {
		return
	}
	d := be.Uint16(b) - s.next
	if int(d) > m.cfg.MaxAhead {
		return
	}
	if !s.saw(s.next + d) {
		m.note(s, int(d))
		s.nahead++
	}
	if m.isTerminate(ppid, b) {
		s.hasTerm, s.termSSN = true, be.Uint16(b)
	}
}

// saw reports whether a message of an ended session has come ahead.
func (s *stream) saw(ssn uint16) bool {
	i := int(ssn) & (64*len(s.seen) - 1)
	return s.seen != nil && s.seen[i/64]&(1<<(i%64)) != 0
}

// pass counts what has come of an ended session.
func (m *Mux) pass(s *stream) {
	for s.nahead > 0 && s.saw(s.next) {
		i := int(s.next) & (64*len(s.seen) - 1)
		s.seen[i/64] &^= 1 << (i % 64)
		s.nahead--
		s.next++
	}
	if s.hasTerm && s.next == s.termSSN+1 {
		s.gotTerm = true
	}
}

// Attach gives the session on stream id its sink, before or after it is open. DDP
// segments wait until then.
func (m *Mux) Attach(id uint16, sink Sink) error {
	s := m.stream(id)
	if s == nil {
		return ErrStream
	}
	if s.state == Idle || s.state == Ended {
		return ErrState
	}
	s.sink = sink
	m.advance(s)
	return nil
}

// CanSend reports whether a DDP segment may leave on stream id now. The initiating
// side waits until its Initiate is acknowledged or answered (RFC 5043 6.6).
func (m *Mux) CanSend(id uint16) bool {
	if int(id) >= len(m.streams) || m.streams[id] == nil {
		return false
	}
	s := m.streams[id]
	return s.state == Open && s.unacked < maxUnacked
}

// Begin writes what stands in front of the next DDP segment of stream id. The segment
// has to be sent, and counts for Acked. CanSend was true.
func (m *Mux) Begin(id uint16, b []byte) {
	s := m.streams[id]
	be.PutUint16(b, s.ssn)
	s.ssn++
	s.unacked++
}

// Reset forgets everything: the association is gone, or has begun anew with n
// streams. Sessions that were there are reported as terminated.
func (m *Mux) Reset(n int) {
	for _, s := range m.streams {
		if s != nil && s.state != Idle && s.state != Ended {
			m.event(s, EventTerminated, nil, nil)
		}
		if s != nil {
			m.drop(s)
		}
	}
	m.pending, m.kept = 0, 0
	m.control = m.control[:0]
	m.streams = make([]*stream, n)
}
