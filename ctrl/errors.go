package ctrl

import (
	"errors"
	"fmt"
	"strings"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// An Error is the reason for a refused request or failed connection, as reported to the client.
type Error struct {
	Code ctrlpb.Code
	Text string
	Err  error // the cause, if any; Text includes its text
}

// Error implements error.
func (e *Error) Error() string { return e.Text }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// errorf returns an Error. A %w verb in the format sets its cause.
func errorf(code ctrlpb.Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Text: err.Error(), Err: errors.Unwrap(err)}
}

// toPB converts err to a message: nil for nil, otherwise with the code of the first Error in its
// chain, or the code for an internal error. The text is for users of the client.
func toPB(err error) *ctrlpb.Error {
	if err == nil {
		return nil
	}
	code := ctrlpb.Code_CODE_INTERNAL
	if e, ok := errors.AsType[*Error](err); ok {
		code = e.Code
	}
	return &ctrlpb.Error{Code: code, Text: clip(strings.ToValidUTF8(printable.Error(err), "?"), maxText)}
}

// maxText is the maximum length in bytes of an error text in a message.
const maxText = 1024

// Short names of the codes.
const (
	invalid     = ctrlpb.Code_CODE_INVALID
	noObject    = ctrlpb.Code_CODE_NO_OBJECT
	permission  = ctrlpb.Code_CODE_PERMISSION
	quota       = ctrlpb.Code_CODE_QUOTA
	portInUse   = ctrlpb.Code_CODE_PORT_IN_USE
	badAddress  = ctrlpb.Code_CODE_ADDRESS
	unreachable = ctrlpb.Code_CODE_UNREACHABLE
	timedOut    = ctrlpb.Code_CODE_TIMEOUT
	refused     = ctrlpb.Code_CODE_REFUSED
	badState    = ctrlpb.Code_CODE_STATE
	busy        = ctrlpb.Code_CODE_BUSY
	badVersion  = ctrlpb.Code_CODE_VERSION
	protocol    = ctrlpb.Code_CODE_PROTOCOL
	internal    = ctrlpb.Code_CODE_INTERNAL
	canceled    = ctrlpb.Code_CODE_CANCELED
	draining    = ctrlpb.Code_CODE_DRAINING
)
