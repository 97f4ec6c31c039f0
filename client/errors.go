package iwarp

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Errors for use with errors.Is. An *Error unwraps to one of those from ErrInvalid
// to ErrCanceled; the others are errors of this package itself.
var (
	ErrInvalid     = errors.New("iwarp: invalid argument")
	ErrNoObject    = errors.New("iwarp: no such object")
	ErrPermission  = errors.New("iwarp: permission denied")
	ErrQuota       = errors.New("iwarp: quota exceeded")
	ErrPortInUse   = errors.New("iwarp: port in use")
	ErrAddress     = errors.New("iwarp: not a local address")
	ErrUnreachable = errors.New("iwarp: peer unreachable")
	ErrTimeout     = errors.New("iwarp: timed out")
	ErrRefused     = errors.New("iwarp: connection refused")
	ErrRejected    = errors.New("iwarp: connection rejected")
	ErrState       = errors.New("iwarp: wrong state")
	ErrBusy        = errors.New("iwarp: object in use")
	ErrVersion     = errors.New("iwarp: protocol version not supported")
	ErrProtocol    = errors.New("iwarp: the peer violated the MPA start-up or SCTP")
	ErrInternal    = errors.New("iwarp: internal error of the daemon or the host")
	ErrCanceled    = errors.New("iwarp: canceled")

	ErrDaemonGone = errors.New("iwarp: the daemon is gone")
	// ErrDraining: the daemon is stopping and takes no new work; see Device.Draining. It is
	// an ErrDaemonGone too.
	ErrDraining   = fmt.Errorf("%w: it is stopping", ErrDaemonGone)
	ErrClosed     = errors.New("iwarp: closed")
	ErrPeerClosed = errors.New("iwarp: the peer closed the connection")
	ErrQueueFull  = errors.New("iwarp: queue full")
	ErrWR         = errors.New("iwarp: work request does not fit the queue pair")
	ErrMessage    = errors.New("iwarp: message longer than the buffer")
)

var codeErrors = map[ctrlpb.Code]error{
	ctrlpb.Code_CODE_INVALID: ErrInvalid, ctrlpb.Code_CODE_NO_OBJECT: ErrNoObject, ctrlpb.Code_CODE_PERMISSION: ErrPermission,
	ctrlpb.Code_CODE_QUOTA: ErrQuota, ctrlpb.Code_CODE_PORT_IN_USE: ErrPortInUse, ctrlpb.Code_CODE_ADDRESS: ErrAddress,
	ctrlpb.Code_CODE_UNREACHABLE: ErrUnreachable, ctrlpb.Code_CODE_TIMEOUT: ErrTimeout, ctrlpb.Code_CODE_REFUSED: ErrRefused,
	ctrlpb.Code_CODE_REJECTED: ErrRejected, ctrlpb.Code_CODE_STATE: ErrState, ctrlpb.Code_CODE_BUSY: ErrBusy,
	ctrlpb.Code_CODE_VERSION: ErrVersion, ctrlpb.Code_CODE_PROTOCOL: ErrProtocol, ctrlpb.Code_CODE_INTERNAL: ErrInternal,
	ctrlpb.Code_CODE_CANCELED: ErrCanceled, ctrlpb.Code_CODE_DRAINING: ErrDraining,
}

// Error is an error that the daemon reported for a request or a connection. Use
// errors.Is to compare it with the variables of this package.
type Error struct {
	Op   string // the request that failed
	Code ctrlpb.Code
	Text string // names the layer, the peer and the rule
}

// Error implements error.
func (e *Error) Error() string { return "iwarp: " + e.Op + ": " + e.Text }

// Unwrap returns the variable of this package for the code: ErrInternal for one of a later daemon.
func (e *Error) Unwrap() error { return cmp.Or(codeErrors[e.Code], ErrInternal) }

func fromPB(op string, e *ctrlpb.Error) error {
	if e == nil {
		return nil
	}
	return &Error{Op: op, Code: e.Code, Text: e.Text}
}

// RejectError reports that the peer's application rejected the connection.
type RejectError struct {
	PrivateData []byte // from the peer's application; may be empty
	// IRD and ORD are the depths that the peer requires, like PeerIRD and PeerORD of ConnInfo.
	IRD, ORD int
}

// Error implements error.
func (e *RejectError) Error() string {
	return "iwarp: the peer's application rejected the connection"
}

// Is reports whether target is ErrRejected.
func (e *RejectError) Is(target error) bool { return target == ErrRejected }

// TerminateError is a Terminate message (RFC 5040 section 4.8) that ended a stream. Layer,
// EType and ECode have the values of the RFCs (RFC 5040 figure 9, RFC 5041 section 8, RFC 5044
// section 8, RFC 6581 section 8), even if the peer puts them in other places of the message.
type TerminateError struct {
	Remote bool // the peer found the violation, not this side
	Layer  TerminateLayer
	EType  uint8 // error type, 0 to 15
	ECode  uint8 // error code
	// Message holds the bytes that the peer sent: the four control bytes, then the length and
	// the headers of the terminated segment if present. It is nil if this side sent the
	// Terminate, or did not receive it completely.
	Message []byte
}

// TerminateLayer is the layer that found a violation.
type TerminateLayer uint8

// Layers of a Terminate.
const (
	TerminateRDMAP TerminateLayer = term.LayerRDMAP
	TerminateDDP   TerminateLayer = term.LayerDDP
	TerminateLLP   TerminateLayer = term.LayerLLP // MPA
)

// String returns "rdmap", "ddp", "llp" or the number.
func (l TerminateLayer) String() string {
	switch l {
	case TerminateRDMAP:
		return "rdmap"
	case TerminateDDP:
		return "ddp"
	case TerminateLLP:
		return "llp"
	}
	return strconv.Itoa(int(l))
}

func terminateError(e *term.Error, remote bool, message []byte) *TerminateError {
	return &TerminateError{Remote: remote, Layer: TerminateLayer(e.Layer), EType: e.Type, ECode: e.Code, Message: message}
}

// violation returns the violation with its description.
func (e *TerminateError) violation() *term.Error {
	return term.Lookup(uint8(e.Layer), e.EType, e.ECode)
}

// Error implements error.
func (e *TerminateError) Error() string {
	if e.Remote {
		return "iwarp: the peer sent a Terminate: " + e.violation().Error()
	}
	return "iwarp: stream terminated: " + e.violation().Error()
}

// Unwrap returns the violation.
func (e *TerminateError) Unwrap() error { return e.violation() }

// WCError reports that a work request failed.
type WCError struct {
	Status WCStatus
	Op     WCOp
	Cause  error // reason why the connection ended, if that made the request fail
}

// Error implements error.
func (e *WCError) Error() string {
	if e.Cause != nil {
		return fmt.Sprintf("iwarp: %v: %v: %v", e.Op, e.Status, e.Cause)
	}
	return fmt.Sprintf("iwarp: %v: %v", e.Op, e.Status)
}

// Unwrap returns the cause.
func (e *WCError) Unwrap() error { return e.Cause }
