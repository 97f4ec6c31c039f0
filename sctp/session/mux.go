package session

import (
	"encoding/binary"
	"math/bits"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/mpa"
)

var be = binary.BigEndian

// HeaderLen is the length of the DDP-SSN, which precedes a DDP segment in a message.
const HeaderLen = 2

const (
	controlHeader = 4
	// maxUnacked limits the unacknowledged messages of a stream: SSNs can be compared while they are less than half the number space apart
	// (RFC 5043 section 10).
	maxUnacked = 32767
)

// Config is the policy of a Mux. A zero field means its default.
type Config struct {
	Profile    Profile
	NoEnhanced bool // treat a peer's enhanced Initiate as a violation, as in RFC 5043 alone
	Pending    int  // maximum number of Initiates waiting for the ULP; default 16
	MaxAhead   int  // messages of a stream accepted out of order; default 4096, at most 32767
}

// Control is a session control message to send, unordered, on Stream.
type Control struct {
	Stream uint16
	PPID   uint32
	Data   []byte
}

// Stats holds the counters of a Mux.
type Stats struct {
	Sessions, Rejected, Terminated, Violations uint64
	Early, Held, Delivered                     uint64 // DDP segments placed early, held early, delivered
	AfterEnd, NoSession                        uint64 // messages dropped
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
	s.NoSession += o.NoSession
}

// Mux manages the DDP streams of an association.
type Mux struct {
	cfg     Config
	streams []*stream // allocated on first use
	events  []Event
	control []Control
	pending int
	held    int // bytes of held messages
	kept    int // bytes of the streams' rings and bitmaps
	pool    [][]byte
	pooled  int // bytes of free buffers
	stats   Stats

	seenWords int // length of stream.seen: a power of two, with more bits than MaxAhead
}

// New returns the Mux of an association with n streams each way, the smaller of the two directions' counts.
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

// aheadKind is how an out-of-order message was handled.
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

// aheadSize is the size of an ahead in bytes.
const aheadSize = 32

// stream is a DDP stream.
type stream struct {
	id    uint16
	state State
	sink  Sink

	enhanced  bool // our Initiate, or the peer's, was enhanced
	canceled  bool // Terminate was called while our Initiate was outstanding
	sinkEnded bool // the sink has returned an error

	// Sending.
	ssn        uint16
	unacked    int
	ctlUnacked int      // unacknowledged control messages
	ctlQueue   [][]byte // control messages that wait for earlier ones

	// Receiving.
	next       uint16 // next SSN in order
	count      serial.Num
	gotTerm    bool // the peer's last message, and all before it, have been received
	hasTerm    bool // the peer's Terminate has been received
	negotiates int  // Negotiates received in this session
	termSSN    uint16
	ring       []ahead  // indexed by SSN
	seen       []uint64 // in state Ended, a bitmap by SSN of out-of-order messages received
	nahead     int      // entries in ring or seen
}

// Stats returns the counters.
func (m *Mux) Stats() Stats { return m.stats }

// Held returns how many bytes are held until their turn. They reduce the window of the association.
func (m *Mux) Held() int { return m.held }

// Memory returns how many bytes of memory the peer's messages occupy: held messages, free buffers for more, and the rings of out-of-order
// messages.
func (m *Mux) Memory() int { return m.held + m.pooled + m.kept }

// Trim frees the unused part of what Memory counts.
func (m *Mux) Trim() {
	m.pool, m.pooled = nil, 0
	for _, s := range m.streams {
		if s != nil && s.nahead == 0 {
			m.keepRing(s, nil)
			m.keepSeen(s, nil)
		}
	}
}

// keepRing and keepSeen replace a stream's ring or bitmap and account for its memory.
func (m *Mux) keepRing(s *stream, r []ahead) {
	m.kept += (len(r) - len(s.ring)) * aheadSize
	s.ring = r
}

func (m *Mux) keepSeen(s *stream, b []uint64) {
	m.kept += 8 * (len(b) - len(s.seen))
	s.seen = b
}

// Streams returns the number of DDP streams.
func (m *Mux) Streams() int { return len(m.streams) }

// State returns the state of the session on stream id.
func (m *Mux) State(id uint16) State {
	if int(id) >= len(m.streams) || m.streams[id] == nil {
		return Idle
	}
	return m.streams[id].state
}

// Free reports whether Initiate may start a session on stream id: it has none, and nothing of the last one is outstanding.
func (m *Mux) Free(id uint16) bool {
	return int(id) < len(m.streams) && m.State(id) == Idle
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

// begin prepares s for a session.
func (m *Mux) begin(s *stream) {
	m.drop(s)
	m.keepSeen(s, nil)
	*s = stream{id: s.id, ring: s.ring, unacked: s.unacked, ctlUnacked: s.ctlUnacked}
	s.ssn = m.cfg.Profile.firstSSN()
	s.next = s.ssn
}

// drop discards held messages. The caller forgets how many there were.
func (m *Mux) drop(s *stream) {
	if s.nahead == 0 {
		return
	}
	for i := range s.ring {
		m.free(&s.ring[i])
	}
}

func (m *Mux) free(a *ahead) {
	if a.kind == aheadHeld {
		m.held -= len(a.b)
		m.recycle(a.b)
	}
	*a = ahead{}
}

// maxPooled is the maximum size in bytes of a Mux's free buffers.
const maxPooled = 64 << 10

// recycle takes back the buffer of a held message.
func (m *Mux) recycle(b []byte) {
	if m.pooled+cap(b) <= maxPooled {
		m.pool = append(m.pool, b)
		m.pooled += cap(b)
	}
}

// hold returns a copy of b in a buffer that is at most four times longer: Held counts the bytes used, and the peer chooses the message
// length.
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

// PollControl returns the next control message to push. Each counts as one message of its stream for Acked.
func (m *Mux) PollControl(c *Control) bool {
	if len(m.control) == 0 {
		return false
	}
	*c = m.control[0]
	m.control = append(m.control[:0], m.control[1:]...)
	return true
}

// Quiet reports whether PollControl has no more messages.
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

// send queues a control message with the next DDP-SSN. A message that could overtake an earlier one waits until that one is acknowledged
// (RFC 5043 6.6).
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

// release sends the next control message of s, unless one is outstanding.
func (m *Mux) release(s *stream) {
	if s.ctlUnacked > 0 || len(s.ctlQueue) == 0 {
		return
	}
	m.control = append(m.control, Control{s.id, m.cfg.Profile.Control(), s.ctlQueue[0]})
	s.ctlQueue = append(s.ctlQueue[:0], s.ctlQueue[1:]...)
	s.ctlUnacked++
	s.unacked++
}

// HandleAcked reports that the peer has acknowledged a message of stream id: control is true for a message of PollControl, false for a DDP
// segment.
func (m *Mux) HandleAcked(id uint16, control bool) {
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

// settle makes an ended stream idle once nothing of its session can be in flight: ours is acknowledged, and the peer's last message has
// been received. A session that ends with a message of ours is not there yet.
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

// Initiate requests a session on stream id. EventOpen, EventRejected or EventFailed follows.
func (m *Mux) Initiate(id uint16, set Setup) error {
	s := m.stream(id)
	switch {
	case s == nil:
		return ErrStream
	case s.state != Idle && s.state != Negotiating:
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

// Accept accepts the peer's Initiate and opens the session. The session is enhanced if and only if the Initiate was.
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
	return nil
}

// Reject refuses the peer's Initiate on behalf of the ULP (RFC 5043 6.3). In the draft it sends a Terminate, without private data.
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
	return nil
}

// Terminate ends the session, or refuses an Initiate that waits for the ULP. If our own Initiate is unanswered, the Terminate is sent after
// the answer.
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
	default:
		m.terminate(s)
	}
	return nil
}

// terminate sends a Terminate and ends the session.
func (m *Mux) terminate(s *stream) {
	m.send(s, fnTerminate, nil)
	m.over(s)
}

// over ends the session and discards its held messages, but remembers which SSNs were received.
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

// note marks in seen that the message d positions ahead was received.
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

// came records a message of an ended session, or the one that ended it.
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

// saw reports whether a message of an ended session was received out of order.
func (s *stream) saw(ssn uint16) bool {
	i := int(ssn) & (64*len(s.seen) - 1)
	return s.seen != nil && s.seen[i/64]&(1<<(i%64)) != 0
}

// pass advances over the received messages of an ended session.
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

// Attach sets the sink of the session on stream id, before or after it is open. DDP segments wait until then.
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

// Resume continues with the segments of stream id for which its sink has waited.
func (m *Mux) Resume(id uint16) {
	if s := m.stream(id); s != nil {
		m.advance(s)
	}
}

// CanSend reports whether a DDP segment may be sent on stream id now. The initiating side waits until its Initiate is acknowledged or
// answered (RFC 5043 6.6).
func (m *Mux) CanSend(id uint16) bool {
	if int(id) >= len(m.streams) || m.streams[id] == nil {
		return false
	}
	s := m.streams[id]
	return s.state == Open && s.unacked < maxUnacked
}

// Begin writes the header that precedes the next DDP segment of stream id. CanSend must be true; the segment must then be sent, and counts
// for HandleAcked.
func (m *Mux) Begin(id uint16, b []byte) {
	s := m.streams[id]
	be.PutUint16(b, s.ssn)
	s.ssn++
	s.unacked++
}

// Reset discards all sessions: the association has ended, or restarted with n streams. Open sessions are reported as terminated.
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
