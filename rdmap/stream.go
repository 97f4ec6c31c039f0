package rdmap

import (
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Defaults of Config.
const (
	defaultMaxWR   = 128
	defaultMaxRecv = 128
	defaultEarly   = 1024
)

// recvWindow is how many messages of queue 0 may be open at once, starting with the next in order. Only early segments open more than one.
const recvWindow = 64

// Config sets the sizes of a Stream. Init allocates all memory that Reserve has not, except that the table of early segments is allocated with the first of them
// unless Early is set, because only streams with markers need it.
type Config struct {
	IRD int // maximum number of the peer's Reads and atomics served at once, from 0
	ORD int // maximum number of our Reads and atomics outstanding at once, from 0

	MaxWR   int // work requests posted and not completed; 0: 128
	MaxRecv int // completions of receives not yet polled; 0: 128. The ring grows if there are more
	Early   int // segments placed out of order and not yet delivered; 0: 1024, negative: none

	// SharedRecvs means that other streams take receives from the same queue: segments out of order take none from it, except for the
	// message that is next in order (RFC 5042 6.4.3.1).
	SharedRecvs bool
}

// Stats holds the counters of a Stream.
type Stats struct {
	TxSegments, TxBytes uint64 // DDP segments, headers included
	RxSegments, RxBytes uint64

	// Messages, by their first segment sent and their last one received.
	TxWrites, TxReadRequests, TxReadResponses, TxSends, TxImms, TxAtomics, TxAtomicResponses, TxTerminates uint64
	RxWrites, RxReadRequests, RxReadResponses, RxSends, RxImms, RxAtomics, RxAtomicResponses, RxTerminates uint64

	RxEarlyPlaced  uint64 // segments placed out of order
	RxEarlyRefused uint64 // segments passed early that must be passed again in order
	RxDropped      uint64 // segments received after the end of the stream
	BadWRs         uint64 // work requests that were not valid
	Flushed        uint64 // work requests and receives flushed
}

// streamState is the state of a Stream.
type streamState uint8

const (
	stateOpen       streamState = iota
	stateFailing                // a Terminate must be sent
	stateFailed                 // the Terminate was sent
	stateTerminated             // the peer's Terminate was received
)

// wrState is the progress of a work request.
type wrState uint8

const (
	wrQueued  wrState = iota
	wrWaiting         // request sent, response awaited
	wrDone
)

type sendSlot struct {
	wr     WR
	state  wrState
	status Status
}

// pending is a request of ours whose response is outstanding.
type pending struct {
	slot   uint32 // position in the send queue
	rtr    bool   // an RTR, which has no work request
	atomic bool
	id     uint32 // Request Identifier of an atomic
	msn    serial.Num
	stag   uint32 // Read: the sink
	to     uint64
	length uint32
	got    uint32
}

// response is a request of the peer that is not completely answered.
type response struct {
	atomic bool
	read   readRequest
	req    atomicRequest
	segLen int                   // of the request
	hdr    [ddp.UntaggedLen]byte // of the request
}

// Stream is one RDMAP stream. It is not safe for concurrent use.
//
// Inputs are PostSend, HandleULPDU or HandleMarked, HandleEarly, DeliverEarly, Fail, SourceError and Flush. After any of them drain
// PollFilling as far as the transport has room, then PollCompletion, then PollEvent.
//
// A Write, Send or Immediate Data completes when PollFilling has built its last segment, because the caller copies the payload before it
// polls completions; a Read or an atomic completes when its response has been delivered. Send queue completions are in the order of
// posting, receive completions in the order of arrival.
//
// A violation, found here or reported by Fail, ends the stream: PollFilling returns the Terminate next and nothing after it, and arriving
// segments are dropped. Work requests stay queued until Flush.
type Stream struct {
	mem     Memory
	state   streamState
	flushed bool
	err     *term.Error // ours
	stats   Stats

	// Send queue: head <= next <= tail, positions that only grow.
	slots            []sendSlot
	head, next, tail uint32
	seg              ddp.Segmenter // the message being sent
	sending          turn
	contended        bool // both sides had something to send when this message was chosen
	balance          int  // bytes that responses have sent more than the send queue while both waited
	msn              [4]serial.Num
	rtr              Op // RTR to be sent first, or 0
	ord              int
	pendings         []pending
	pendHead         uint32
	pendTail         uint32

	responses

	// Receive side.
	expect    Op   // kind of RTR that may come first, or 0
	rxData    bool // a message other than a Terminate has been received
	recvq     ddp.Queue
	shared    bool             // Config.SharedRecvs
	ctl       [3]ddp.Assembler // of queues 1, 2, 3
	comps     []Completion
	compHead  uint32
	compTail  uint32
	early     earlyTable
	placement Placement // argument of Memory.Place; a local variable would escape to the heap
	atomic    AtomicOp  // likewise
	events    [2]Event
	eventHead uint8
	eventTail uint8

	// The Terminate, to be sent or received.
	termBuf [maxTerminate]byte
	termLen int
	remote  remoteTerm

	front [front]byte // start of a ULPDU that has a marker there
}

// responses are those to be sent, a ring.
type responses struct {
	ird      int
	resps    []response
	respHead uint32
	respTail uint32
}

// remoteTerm is the peer's Terminate.
type remoteTerm struct {
	err    *term.Error
	raw    [ddp.MaxControl]byte
	rawLen int
}

// turn is the side whose message is being sent.
type turn uint8

const (
	turnNone turn = iota
	turnSend
	turnResponse
)

// Reserve allocates what depends on MaxWR and MaxRecv of cfg, most of the memory of s. Init then does not, if it is called with the same
// sizes.
func (s *Stream) Reserve(cfg Config) {
	if cfg.MaxWR <= 0 {
		cfg.MaxWR = defaultMaxWR
	}
	if cfg.MaxRecv <= 0 {
		cfg.MaxRecv = defaultMaxRecv
	}
	if n := pow2(cfg.MaxWR); len(s.slots) != n {
		s.slots = make([]sendSlot, n)
	}
	if n := pow2(cfg.MaxRecv); len(s.comps) != n {
		s.comps = make([]Completion, n)
	}
}

// Init initializes s over mem.
func (s *Stream) Init(cfg Config, mem Memory) {
	s.Reserve(cfg)
	cfg.IRD, cfg.ORD = max(cfg.IRD, 0), max(cfg.ORD, 0)
	*s = Stream{
		mem: mem,
		ord: cfg.ORD,
		// One more entry for an RTR that is a Read, which does not count against ORD.
		pendings:  make([]pending, pow2(cfg.ORD+1)),
		responses: responses{ird: cfg.IRD, resps: make([]response, pow2(cfg.IRD+1))},
		slots:     s.slots,
		comps:     s.comps,
	}
	for i := range s.msn {
		s.msn[i] = ddp.FirstMSN
	}
	s.recvq.Init(recvWindow)
	s.shared = cfg.SharedRecvs
	s.ctl[0].Init(atomicRequestLen)
	s.ctl[1].Init(ddp.MaxControl)
	s.ctl[2].Init(atomicResponseLen)
	if s.early.limit = cfg.Early; cfg.Early == 0 {
		s.early.limit = defaultEarly
	}
	if cfg.Early > 0 {
		s.early.alloc()
	}
}

// pow2 returns the smallest power of two that is at least n.
func pow2(n int) int {
	p := 1
	for p < n {
		p <<= 1
	}
	return p
}

// PostSend queues a copy of wr. It returns false if the send queue is full: MaxWR, rounded up to a power of two, requests are posted whose
// completions are not polled. An invalid work request completes with StatusBadWR in order and does not end the stream; one posted after the
// end of the stream is flushed.
func (s *Stream) PostSend(wr *WR) bool {
	if int(s.tail-s.head) == len(s.slots) {
		return false
	}
	slot := s.slot(s.tail)
	slot.wr, slot.state, slot.status = *wr, wrQueued, StatusOK
	s.tail++
	switch {
	case s.flushed:
		s.finish(slot, StatusFlushed)
		s.stats.Flushed++
	case !s.valid(&slot.wr):
		s.finish(slot, StatusBadWR)
		s.stats.BadWRs++
	}
	return true
}

// valid checks a work request and sets the length that its operation implies.
func (s *Stream) valid(wr *WR) bool {
	switch wr.Op {
	case OpWrite:
		return wr.TO+uint64(wr.Len) >= wr.TO
	case OpRead:
		return s.ord > 0 && wr.TO+uint64(wr.Len) >= wr.TO && wr.SinkTO+uint64(wr.Len) >= wr.SinkTO
	case OpSend, OpSendInv, OpSendSE, OpSendSEInv:
		return true
	case OpImm, OpImmSE:
		wr.Len = immLen
		return true
	case OpFetchAdd, OpCmpSwap:
		wr.Len = 8
		return s.ord > 0 && wr.TO+8 >= wr.TO
	}
	return false
}

func (s *Stream) slot(i uint32) *sendSlot { return &s.slots[int(i)&(len(s.slots)-1)] }

func (s *Stream) finish(slot *sendSlot, st Status) { slot.state, slot.status = wrDone, st }

// PollCompletion returns the next completion, send queue first.
func (s *Stream) PollCompletion(c *Completion) bool {
	if s.head != s.tail {
		if slot := s.slot(s.head); slot.state == wrDone {
			*c = Completion{Kind: CompSend, ID: slot.wr.ID, Op: slot.wr.Op, Status: slot.status, Len: slot.wr.Len}
			s.head++
			if int32(s.next-s.head) < 0 {
				s.next = s.head
			}
			return true
		}
	}
	if s.compHead != s.compTail {
		*c = s.comps[int(s.compHead)&(len(s.comps)-1)]
		s.compHead++
		return true
	}
	if s.flushed {
		if b, ok := s.recvq.Pop(); ok {
			*c = Completion{Kind: CompRecv, ID: b.ID, Status: StatusFlushed}
			s.stats.Flushed++
			return true
		}
	}
	return false
}

// complete queues the completion of a receive. The ring has the configured length; if the owner polls too rarely it grows, up to the number
// of receives posted.
func (s *Stream) complete(c *Completion) {
	if int(s.compTail-s.compHead) == len(s.comps) {
		grown := make([]Completion, 2*len(s.comps))
		for i := range s.comps {
			grown[i] = s.comps[(int(s.compHead)+i)&(len(s.comps)-1)]
		}
		s.compHead, s.compTail, s.comps = 0, uint32(len(s.comps)), grown
	}
	s.comps[int(s.compTail)&(len(s.comps)-1)] = *c
	s.compTail++
}

// PollEvent returns the next event.
func (s *Stream) PollEvent() (Event, bool) {
	if s.eventHead == s.eventTail {
		return 0, false
	}
	e := s.events[s.eventHead]
	s.eventHead++
	return e, true
}

// event queues e. Each event occurs at most once, so there is room.
func (s *Stream) event(e Event) {
	s.events[s.eventTail] = e
	s.eventTail++
}

// Stats returns the counters.
func (s *Stream) Stats() Stats { return s.stats }

// Err returns the violation that ended the stream here, or nil.
func (s *Stream) Err() *term.Error { return s.err }

// Remote returns the error of the peer's Terminate, or nil.
func (s *Stream) Remote() *term.Error { return s.remote.err }

// RemoteRaw returns the bytes of the peer's Terminate after its DDP header.
func (s *Stream) RemoteRaw() []byte { return s.remote.raw[:s.remote.rawLen] }

// Terminating reports whether a Terminate must be sent or was sent.
func (s *Stream) Terminating() bool { return s.err != nil }

// TerminateSent reports whether PollFilling has returned our Terminate.
func (s *Stream) TerminateSent() bool { return s.state == stateFailed }

// Fail ends the stream for an error that the owner or the layer below found, and queues the Terminate. Only the first
// error counts (RFC 5040 section 7.1, rule 4); a stream that the peer has terminated sends none.
func (s *Stream) Fail(err *term.Error) { s.fail(err, nil, 0, nil) }

// fail ends the stream; seg and rdma are the headers that the Terminate reports.
func (s *Stream) fail(err *term.Error, seg []byte, segLen int, rdma []byte) {
	if s.state != stateOpen {
		return
	}
	s.state, s.err = stateFailing, err
	s.termLen = len(appendTerminate(s.termBuf[:0], err, seg, segLen, rdma))
	s.event(EventFailed)
}

// SourceError reports that the payload of seg, the last segment that PollFilling returned, could not be read, so that the segment was not
// sent. For a work request err is usually term.ErrRDMAPLocal, and the request completes with StatusLocalProtection. For a Read Response err
// is the reason why the peer may not read there (any more), and the Terminate shows how far the Read had come (RFC 5040 section 4.8).
func (s *Stream) SourceError(seg *Segment, err *term.Error) {
	switch {
	case s.state != stateOpen:
	case seg.Src.Kind == SourceTagged:
		r := s.resp(s.respHead)
		if !s.seg.Active() { // that was the last one
			r = s.resp(s.respHead - 1)
		}
		done := uint32(seg.Src.Off - r.read.srcTO)
		now := r.read
		now.sinkTO += uint64(done)
		now.srcTO += uint64(done)
		now.size -= done
		var rdma [readRequestLen]byte
		s.fail(err, r.hdr[:], r.segLen, now.append(rdma[:0]))
	default:
		if seg.Src.Kind == SourceWR {
			i := s.next
			if !s.seg.Active() {
				i--
			}
			if int32(i-s.head) >= 0 {
				s.finish(s.slot(i), StatusLocalProtection)
			}
		}
		s.fail(err, nil, 0, nil)
	}
	s.seg.Cancel()
}

func (s *Stream) resp(i uint32) *response { return &s.resps[int(i)&(len(s.resps)-1)] }

func (s *Stream) pending(i uint32) *pending { return &s.pendings[int(i)&(len(s.pendings)-1)] }

// Flush completes every outstanding work request, and every receive buffer taken, with StatusFlushed. Afterwards the stream neither sends
// nor receives, except for a queued Terminate.
func (s *Stream) Flush() {
	for i := s.head; i != s.tail; i++ {
		if slot := s.slot(i); slot.state != wrDone {
			s.finish(slot, StatusFlushed)
			s.stats.Flushed++
		}
	}
	s.flushed = true
}
