package verbs

import (
	"math/bits"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/rdmap"
)

// State is a QP state (RDMA verbs).
type State uint8

// States of a QP.
const (
	StateIdle      State = iota // no stream yet; receives may be posted
	StateRTS                    // full operation
	StateTerminate              // a Terminate was sent or received, or is about to be
	StateError                  // all work is flushed
)

// Limits of a QPConfig.
const (
	MaxDepth     = 1 << 15 // work requests in a queue
	MaxSGE       = 32      // pieces in a work request
	MaxInline    = 4096    // bytes of inline data
	MaxMsg       = 1<<31 - 1
	atomicLen    = 8
	firstMSN     = serial.Num(1) // RFC 5041 section 4.3
	defaultDepth = 64
)

// QPConfig configures a QP. Zero depths and a zero MaxSGE get a default; larger values than the limits are reduced to them.
type QPConfig struct {
	Num       uint32
	PD        PDID
	Table     *Table
	SQDepth   int
	RQDepth   int
	MaxSGE    int
	MaxInline int
	SigAll    bool // every send work request reports its success
	Sends     SendSource
	Recvs     RecvSource
	Shared    bool     // Recvs is a shared receive queue, from which other QPs take too
	Far       FarQueue // accesses far memory; nil if the PD has none
}

// slot is a work request that was taken.
type slot struct {
	id     uint64
	nsge   int
	length uint32
	done   bool
	status WCStatus
	stores uint64 // it completes when this many Stores of the QP have ended
	turns  uint64 // and when this mark of Turns has passed, unless it is 0
}

// finish completes s; an error status set earlier is kept.
func (s *slot) finish(st WCStatus) {
	s.done = true
	if s.status == WCSuccess {
		s.status = st
	}
}

type sendSlot struct {
	slot
	op     WCOp
	signal bool
	inline int // bytes of inline data; -1: SGEs

	need, gathered uint32 // bytes of payload to send, and those that Gather has returned
	far, fence     bool   // some of its payload is far memory; it is fenced
}

// complete reports whether the work request is complete. An outgoing payload must have been gathered too, because its memory may be reused
// afterwards.
func (s *sendSlot) complete() bool {
	return s.done && (s.status != WCSuccess || s.gathered >= s.need)
}

type recvSlot struct {
	slot
	solicited bool
	withImm   bool
	withInv   bool
	size      uint32
	imm       uint64
	inv       uint32
}

// QP is a queue pair on an RDMAP stream. It is not safe for concurrent use, except for Permit.
//
// In each turn call HandleULPDU on Stream for arriving data, then HandleSends, then PollFilling on Stream and Gather for each segment while
// there is room to send, then PollWC until it returns false.
type QP struct {
	cfg    QPConfig
	state  State
	stream rdmap.Stream
	inited bool
	ord    int

	sq             []sendSlot
	sges           []SGE                // cfg.MaxSGE for each send slot
	inline         []byte               // cfg.MaxInline for each send slot
	sqHead, sqTail uint32               // oldest slot in use, next free one; free-running
	taken          interface{ Taken() } // Sends, if it has such a method
	held           bool                 // the newest slot is a local operation or an invalid work request that waits for all earlier ones
	heldFor        uint32               // the slots before it are complete, while held

	rq     []recvSlot
	rsges  []SGE
	rqHead serial.Num // MSN of the oldest receive in use
	rqTail serial.Num // MSN of the next receive to be taken

	stores      uint64 // number of Stores passed to cfg.Far
	storeFailed bool   // a Store has failed
	farSends    farSends
	farResponse farResponse
	awaits      bool            // the last Gather returned nothing because far memory is being fetched
	word        [atomicLen]byte // result of an atomic
	turns       Turns           // nil: no other worker accesses memory
	turnsMark   uint64          // mark of the peer's last invalidation that others may not have noticed
	invalidates bool            // the last PollWC waited for a mark
	denied      atomic.Uint32   // Access: rights that the peer does not have, whatever a region grants
	ignoreInv   atomic.Bool     // the peer's Send with Invalidate invalidates nothing

	flushes int // posted work requests flushed since PollWC last returned false

	wr   SendWR // scratch of HandleSends
	rwr  RecvWR
	comp rdmap.Completion

	stats Stats
}

// Stats are a QP's counters.
type Stats struct {
	Sends, Recvs         uint64 // work requests taken
	Completions, Flushed uint64 // WCs generated, and those of them with WCFlushErr
	LocalErrors          uint64 // WCs with another error
	ProtectionErrors     uint64 // checks of the peer's accesses that failed
	BytesPlaced          uint64
}

// NewQP returns a QP in IDLE. It allocates the memory that the QP needs: a worker, which calls Start, has no time for that.
func NewQP(cfg QPConfig) *QP {
	cfg.SQDepth = pow2(clamp(cfg.SQDepth, defaultDepth, MaxDepth))
	cfg.RQDepth = pow2(clamp(cfg.RQDepth, defaultDepth, MaxDepth))
	cfg.MaxSGE = clamp(cfg.MaxSGE, 1, MaxSGE)
	cfg.MaxInline = min(max(cfg.MaxInline, 0), MaxInline)
	q := &QP{
		cfg:    cfg,
		sq:     make([]sendSlot, cfg.SQDepth),
		sges:   make([]SGE, cfg.SQDepth*cfg.MaxSGE),
		inline: make([]byte, cfg.SQDepth*cfg.MaxInline),
		rq:     make([]recvSlot, cfg.RQDepth),
		rsges:  make([]SGE, cfg.RQDepth*cfg.MaxSGE),
		rqHead: firstMSN,
		rqTail: firstMSN,
	}
	q.stream.Reserve(rdmap.Config{MaxWR: cfg.SQDepth, MaxRecv: cfg.RQDepth})
	q.taken, _ = cfg.Sends.(interface{ Taken() })
	q.wr.SGEs = make([]SGE, 0, cfg.MaxSGE)
	q.wr.Inline = make([]byte, 0, cfg.MaxInline)
	q.rwr.SGEs = make([]SGE, 0, cfg.MaxSGE)
	return q
}

func clamp(v, def, limit int) int {
	if v <= 0 {
		return def
	}
	return min(v, limit)
}

// pow2 rounds n, at least 1, up to a power of two: slots are masked indices.
func pow2(n int) int { return 1 << bits.Len(uint(n-1)) }

// Config returns the configuration, with the actual depths.
func (q *QP) Config() QPConfig { return q.cfg }

// RecvsFull reports whether the QP holds as many receives as it can. PollWC frees those that are complete.
func (q *QP) RecvsFull() bool { return q.rqTail.Sub(q.rqHead) >= len(q.rq) }

// Taken returns the number of send work requests that the QP has taken.
func (q *QP) Taken() uint64 { return q.stats.Sends }

// Retired returns the number of those that are complete, in order.
func (q *QP) Retired() uint64 { return q.stats.Sends - uint64(q.sqTail-q.sqHead) }

// Stream returns the RDMAP stream, which is usable after Start.
func (q *QP) Stream() *rdmap.Stream { return &q.stream }

// Stats returns the counters.
func (q *QP) Stats() Stats { return q.stats }

// Permit sets which of RemoteWrite, RemoteRead and RemoteAtomic the peer may have by a region or window: all of them at first. With
// IgnoreInvalidate the peer's Send with Invalidate is a Send with 32 bits for the application.
func (q *QP) Permit(a Access) {
	q.denied.Store(uint32((RemoteWrite | RemoteRead | RemoteAtomic) &^ a))
	q.ignoreInv.Store(a&IgnoreInvalidate != 0)
}

// check is Table.check for q.
func (q *QP) check(stag uint32, to uint64, n uint32, use purpose) (memory, fault) {
	if Access(q.denied.Load())&rights[use] != 0 {
		return memory{}, faultAccess
	}
	return q.cfg.Table.check(q.cfg.PD, q.cfg.Num, stag, to, n, use)
}

// Turns reports the ends of accesses that other workers make. A worker that has begun one before an invalidation
// may still copy after it.
type Turns interface {
	// Mark returns a mark, not 0, for the accesses that have begun.
	Mark() uint64
	// Passed reports whether those of other workers have ended.
	Passed(mark uint64) bool
}

// SetTurns must be called before Start if several workers access memory.
func (q *QP) SetTurns(t Turns) { q.turns = t }

// Invalidates reports whether the last PollWC returned false because an invalidation waits for other workers. The
// caller calls it again soon.
func (q *QP) Invalidates() bool { return q.invalidates }

// Start moves the QP from IDLE to RTS; in any other state it does nothing. It sets cfg.MaxWR and cfg.MaxRecv to the depths of the queues,
// so that the stream has room for everything that the QP takes, and cfg.SharedRecvs.
func (q *QP) Start(cfg rdmap.Config) {
	if q.state != StateIdle {
		return
	}
	cfg.MaxWR, cfg.MaxRecv, cfg.SharedRecvs = len(q.sq), len(q.rq), q.cfg.Shared
	q.stream.Init(cfg, q)
	q.ord = cfg.ORD
	q.inited = true
	q.state = StateRTS
}

// State returns the state. A terminating stream moves RTS to TERMINATE.
func (q *QP) State() State {
	if q.state == StateRTS && (q.stream.Terminating() || q.stream.Remote() != nil) {
		q.state = StateTerminate
	}
	return q.state
}

// Error moves the QP to ERROR: it sends and places nothing more, and PollWC returns everything posted, now or later, with WCFlushErr.
func (q *QP) Error() {
	if q.state == StateError {
		return
	}
	if q.inited {
		q.stream.Flush()
	}
	q.drain()
	q.state = StateError
	q.held = false
	q.farSends.drop()
	q.farResponse.drop()
	// Flush what the stream did not report.
	for i := q.sqHead; i != q.sqTail; i++ {
		if s := q.sendSlot(i); !s.complete() {
			s.finish(WCFlushErr)
			s.stores = q.stores // before that its memory may still be written
		}
	}
	for m := q.rqHead; m != q.rqTail; m++ {
		if s := q.recvSlot(m); !s.done {
			s.finish(WCFlushErr)
			s.stores = q.stores
		}
	}
}

func (q *QP) sendSlot(i uint32) *sendSlot { return &q.sq[i&uint32(len(q.sq)-1)] }

func (q *QP) recvSlot(msn serial.Num) *recvSlot { return &q.rq[uint32(msn)&uint32(len(q.rq)-1)] }
