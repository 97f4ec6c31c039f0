// Package rdmap is the RDMA protocol of iWARP (RFC 5040) with the atomic
// operations and Immediate Data of RFC 7306, over package ddp. A Stream turns
// work requests into DDP segments and DDP segments into placements,
// completions and events. It does no I/O, reads no clock, starts no goroutine,
// touches user memory only through Memory, and allocates nothing once it is
// initialised.
package rdmap

import (
	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Op is an operation of a work request or a completion.
type Op uint8

// The operations. The zero Op is none of them.
const (
	OpWrite     Op = iota + 1 // RDMA Write
	OpRead                    // RDMA Read
	OpSend                    // Send
	OpSendInv                 // Send with Invalidate
	OpSendSE                  // Send with Solicited Event
	OpSendSEInv               // Send with Solicited Event and Invalidate
	OpImm                     // Immediate Data
	OpImmSE                   // Immediate Data with Solicited Event
	OpFetchAdd                // Atomic FetchAdd, masked
	OpCmpSwap                 // Atomic CmpSwap, masked
	OpTerminate               // Terminate: never in a work request
)

var opNames = [...]string{
	OpWrite: "write", OpRead: "read", OpSend: "send", OpSendInv: "send-inv", OpSendSE: "send-se",
	OpSendSEInv: "send-se-inv", OpImm: "imm", OpImmSE: "imm-se", OpFetchAdd: "fetch-add",
	OpCmpSwap: "cmp-swap", OpTerminate: "terminate",
}

// String returns the operation's short name.
func (o Op) String() string { return name(opNames[:], int(o)) }

// IsAtomic reports whether o is an atomic operation.
func (o Op) IsAtomic() bool { return o == OpFetchAdd || o == OpCmpSwap }

// isSend reports whether o is one of the four Send message types.
func (o Op) isSend() bool { return o >= OpSend && o <= OpSendSEInv }

// HasResponse reports whether o completes only with a message from the peer,
// and so counts against IRD and ORD.
func (o Op) HasResponse() bool { return o == OpRead || o.IsAtomic() }

func name(names []string, i int) string {
	if i < len(names) && names[i] != "" {
		return names[i]
	}
	return "unknown"
}

// WR is a work request of the send queue.
type WR struct {
	ID    uint32 // chosen by the poster; returned in Source, Completion and AtomicResult
	Op    Op
	Fence bool // wait until all earlier Reads and atomics have completed

	Len uint32 // bytes of a Write, Read or Send; atomics and Immediate Data always have 8

	STag uint32 // the peer's buffer: sink of a Write, source of a Read, target of an atomic
	TO   uint64

	SinkSTag uint32 // local buffer of a Read
	SinkTO   uint64

	Inv uint32  // STag that OpSendInv and OpSendSEInv invalidate
	Imm [8]byte // Immediate Data

	// Atomics (RFC 7306 section 5.1). A bit in FetchAdd's mask is the top bit
	// of a field, so 0 adds 64 bits. CmpSwap compares under CmpMask and swaps
	// under SwapMask: all ones in both is the plain operation, CmpMask 0 an
	// unconditional swap.
	Add, AddMask                 uint64 // OpFetchAdd
	Swap, SwapMask, Cmp, CmpMask uint64 // OpCmpSwap
}

// SourceKind says where the payload of a Segment comes from.
type SourceKind uint8

// The sources of a payload.
const (
	SourceNone   SourceKind = iota // there is none
	SourceWR                       // the buffer of a work request: WR and Off
	SourceTagged                   // the source of a Read Response: STag and Off
)

// Source is where the payload of a Segment comes from.
type Source struct {
	Kind SourceKind
	WR   uint32 // SourceWR: the work request's ID
	STag uint32 // SourceTagged
	Off  uint64 // SourceWR: offset in the message; SourceTagged: tagged offset
}

// Segment is a DDP segment to send: HdrLen bytes of Hdr, then Len bytes from
// Src. Together they are at most the MULPDU.
type Segment struct {
	Hdr    [ddp.MaxHeader]byte
	HdrLen int
	Src    Source
	Len    int
}

// PlacementKind says what kind of buffer a payload belongs to.
type PlacementKind uint8

// The kinds of placement.
const (
	PlaceTagged PlacementKind = iota + 1 // STag and TO
	PlaceRecv                            // receive buffer Recv, at Off
)

// Placement is where the payload of a segment belongs. Op says why: OpWrite for
// an RDMA Write, OpRead for the response to a Read of ours, a Send for the rest.
type Placement struct {
	Kind PlacementKind
	STag uint32
	TO   uint64
	Recv uint32
	Off  uint32
	Op   Op
}

// AtomicOp is an atomic operation on 64 bits (RFC 7306 section 5.1).
type AtomicOp struct {
	Op      Op     // OpFetchAdd or OpCmpSwap
	Data    uint64 // to add, or to swap in
	Mask    uint64 // FetchAdd: top bits of the fields; CmpSwap: bits to swap
	Cmp     uint64 // CmpSwap
	CmpMask uint64 // CmpSwap: bits to compare
}

// Apply returns the new value of a target that held old.
func (a *AtomicOp) Apply(old uint64) uint64 {
	if a.Op == OpCmpSwap {
		if (a.Cmp^old)&a.CmpMask != 0 {
			return old
		}
		return old&^a.Mask | a.Data&a.Mask
	}
	// Add each field separately: first without the fields' top bits, so that nothing can carry between fields, then the top bits, whose
	// carry is dropped.
	low := old&^a.Mask + a.Data&^a.Mask
	return low ^ (old^a.Data)&a.Mask
}

// Memory is the user memory as a Stream sees it. A Stream calls its methods from within its own; they must not call the Stream, nor retain
// their arguments. An error that they return ends the stream with the corresponding Terminate.
type Memory interface {
	// Recv returns the buffer for message msn of queue 0. The Stream asks for each MSN in order, and again only if ok was false.
	Recv(msn serial.Num) (id, size uint32, ok bool)
	// Place checks p and copies payload there. The same placement may be requested twice.
	Place(p *Placement, payload marked.Bytes) *term.Error
	// CheckRead checks the source of a Read Request of n > 0 bytes.
	CheckRead(stag uint32, to uint64, n uint32) *term.Error
	// Atomic performs a, atomically with respect to all atomics, and returns the old value.
	Atomic(stag uint32, to uint64, a *AtomicOp) (old uint64, err *term.Error)
	// Invalidate invalidates an STag that the peer may invalidate.
	Invalidate(stag uint32) *term.Error
	// AtomicResult receives the old value for our atomic wr, before it completes.
	AtomicResult(wr uint32, old uint64)
}

// CompletionKind says which queue a Completion belongs to.
type CompletionKind uint8

// The kinds of completion.
const (
	CompSend CompletionKind = iota // a work request of the send queue
	CompRecv                       // a receive buffer
)

// Status is the outcome that a Completion reports.
type Status uint8

// The statuses.
const (
	StatusOK              Status = iota
	StatusFlushed                // the stream ended before the work was complete
	StatusBadWR                  // the work request is not valid; nothing was sent
	StatusLocalProtection        // a local buffer could not be read or written
	StatusRemoteAccess           // the peer refused the request: protection
	StatusRemoteOp               // the peer could not do the request
	StatusTooLong                // the peer's message is longer than the receive buffer
)

var statusNames = [...]string{
	StatusOK: "ok", StatusFlushed: "flushed", StatusBadWR: "bad work request",
	StatusLocalProtection: "local protection error", StatusRemoteAccess: "remote access error",
	StatusRemoteOp: "remote operation error", StatusTooLong: "message too long",
}

// String returns the status in words.
func (s Status) String() string { return name(statusNames[:], int(s)) }

// Completion is the end of a work request or a receive.
type Completion struct {
	Kind      CompletionKind
	ID        uint32 // the work request's, or the receive buffer's
	Op        Op     // for a receive: the operation that the peer used; 0 when flushed
	Status    Status
	Len       uint32  // bytes moved; for Immediate Data 0, as none went to a buffer
	Imm       [8]byte // OpImm, OpImmSE received
	InvSTag   uint32  // OpSendInv, OpSendSEInv received: the STag now invalid
	Solicited bool    // received with Solicited Event
}

// Event is an event of a Stream. Each occurs at most once.
type Event uint8

// The events.
const (
	EventTerminated Event = iota + 1 // a Terminate came: Stream.Remote
	EventFailed                      // the stream failed here, Stream.Err: a Terminate is queued
)

var eventNames = [...]string{EventTerminated: "terminated", EventFailed: "failed"}

// String returns the event's short name.
func (e Event) String() string { return name(eventNames[:], int(e)) }
