// Package term defines the errors that terminate an RDMAP stream. Each has the Layer, Error Type
// and Error Code of its Terminate message (RFC 5040 section 4.8, registry RFC 6580).
package term

import "fmt"

// Layers (RFC 5040 figure 9).
const (
	LayerRDMAP = 0x0
	LayerDDP   = 0x1
	LayerLLP   = 0x2
)

// Error types of the RDMAP layer (RFC 5040 figure 9).
const (
	RDMAPLocal      = 0x0
	RDMAPProtection = 0x1
	RDMAPOperation  = 0x2
)

// Error types of the DDP layer (RFC 5041 section 8).
const (
	DDPLocal    = 0x0
	DDPTagged   = 0x1
	DDPUntagged = 0x2
)

// LLPMPA is the error type of MPA (RFC 5044 section 8).
const LLPMPA = 0x0

// Error is a protocol violation that terminates a stream. Values are package variables, so
// returning one does not allocate, and Reason never contains data of the peer. Compare with
// errors.Is.
type Error struct {
	Layer, Type, Code uint8
	Reason            string
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("%s (terminate %d/%d/%#02x)", e.Reason, e.Layer, e.Type, e.Code)
}

// Violations of MPA (RFC 5044 section 8, RFC 6581 section 8).
var (
	ErrMPAClosed = &Error{LayerLLP, LLPMPA, 0x01, "mpa: TCP connection closed, terminated or lost"}
	ErrMPACRC    = &Error{LayerLLP, LLPMPA, 0x02, "mpa: CRC mismatch"}
	ErrMPAMarker = &Error{LayerLLP, LLPMPA, 0x03, "mpa: marker and ULPDU length disagree"}
	ErrMPAFrame  = &Error{LayerLLP, LLPMPA, 0x04, "mpa: invalid request or reply frame"}
	ErrMPALocal  = &Error{LayerLLP, LLPMPA, 0x05, "mpa: local catastrophic error"}
	ErrMPAIRD    = &Error{LayerLLP, LLPMPA, 0x06, "mpa: insufficient IRD resources"}
	ErrMPARTR    = &Error{LayerLLP, LLPMPA, 0x07, "mpa: no matching RTR option"}
)

// Violations of DDP (RFC 5041 section 8).
var (
	ErrDDPLocal        = &Error{LayerDDP, DDPLocal, 0x00, "ddp: local catastrophic error"}
	ErrInvalidSTag     = &Error{LayerDDP, DDPTagged, 0x00, "ddp: invalid STag"}
	ErrBounds          = &Error{LayerDDP, DDPTagged, 0x01, "ddp: base or bounds violation"}
	ErrSTagStream      = &Error{LayerDDP, DDPTagged, 0x02, "ddp: STag not associated with stream"}
	ErrTOWrap          = &Error{LayerDDP, DDPTagged, 0x03, "ddp: TO wrap"}
	ErrTaggedVersion   = &Error{LayerDDP, DDPTagged, 0x04, "ddp: invalid version in a tagged segment"}
	ErrInvalidQN       = &Error{LayerDDP, DDPUntagged, 0x01, "ddp: invalid QN"}
	ErrNoBuffer        = &Error{LayerDDP, DDPUntagged, 0x02, "ddp: invalid MSN, no buffer available"}
	ErrMSNRange        = &Error{LayerDDP, DDPUntagged, 0x03, "ddp: invalid MSN, range not valid"}
	ErrInvalidMO       = &Error{LayerDDP, DDPUntagged, 0x04, "ddp: invalid MO"}
	ErrTooLong         = &Error{LayerDDP, DDPUntagged, 0x05, "ddp: message too long for the buffer"}
	ErrUntaggedVersion = &Error{LayerDDP, DDPUntagged, 0x06, "ddp: invalid version in an untagged segment"}
)

// Violations of RDMAP (RFC 5040 section 4.8, RFC 7306 section 8).
var (
	ErrRDMAPLocal       = &Error{LayerRDMAP, RDMAPLocal, 0x00, "rdmap: local catastrophic error"}
	ErrReadSTag         = &Error{LayerRDMAP, RDMAPProtection, 0x00, "rdmap: invalid STag"}
	ErrReadBounds       = &Error{LayerRDMAP, RDMAPProtection, 0x01, "rdmap: base or bounds violation"}
	ErrReadAccess       = &Error{LayerRDMAP, RDMAPProtection, 0x02, "rdmap: access rights violation"}
	ErrReadSTagStream   = &Error{LayerRDMAP, RDMAPProtection, 0x03, "rdmap: STag not associated with stream"}
	ErrReadTOWrap       = &Error{LayerRDMAP, RDMAPProtection, 0x04, "rdmap: TO wrap"}
	ErrCannotInvalidate = &Error{LayerRDMAP, RDMAPProtection, 0x09, "rdmap: STag cannot be invalidated"}
	ErrProtection       = &Error{LayerRDMAP, RDMAPProtection, 0xff, "rdmap: remote protection error"}
	ErrRDMAPVersion     = &Error{LayerRDMAP, RDMAPOperation, 0x05, "rdmap: invalid version"}
	ErrOpcode           = &Error{LayerRDMAP, RDMAPOperation, 0x06, "rdmap: unexpected opcode"}
	ErrStream           = &Error{LayerRDMAP, RDMAPOperation, 0x07, "rdmap: catastrophic error, localized to the stream"}
	ErrGlobal           = &Error{LayerRDMAP, RDMAPOperation, 0x08, "rdmap: catastrophic error, global"}
	ErrOpInvalidate     = &Error{LayerRDMAP, RDMAPOperation, 0x09, "rdmap: STag cannot be invalidated (operation)"}
	ErrOperation        = &Error{LayerRDMAP, RDMAPOperation, 0xff, "rdmap: remote operation error"}
)

var table = []*Error{
	ErrMPAClosed, ErrMPACRC, ErrMPAMarker, ErrMPAFrame, ErrMPALocal, ErrMPAIRD, ErrMPARTR,
	ErrDDPLocal, ErrInvalidSTag, ErrBounds, ErrSTagStream, ErrTOWrap, ErrTaggedVersion,
	ErrInvalidQN, ErrNoBuffer, ErrMSNRange, ErrInvalidMO, ErrTooLong, ErrUntaggedVersion,
	ErrRDMAPLocal, ErrReadSTag, ErrReadBounds, ErrReadAccess, ErrReadSTagStream, ErrReadTOWrap,
	ErrCannotInvalidate, ErrProtection, ErrRDMAPVersion, ErrOpcode, ErrStream, ErrGlobal,
	ErrOpInvalidate, ErrOperation,
}

// Lookup returns the Error for the layer, type and code of a Terminate: the package variable if
// there is one, or else a new value.
func Lookup(layer, typ, code uint8) *Error {
	for _, e := range table {
		if e.Layer == layer && e.Type == typ && e.Code == code {
			return e
		}
	}
	return &Error{layer, typ, code, "unassigned error"}
}

// Assigned reports whether RFC 5040, 5041, 5044 or 6581 defines the code.
func Assigned(layer, typ, code uint8) bool {
	if layer == LayerRDMAP && typ == RDMAPLocal {
		return true // the type defines no codes, so any value is valid
	}
	for _, e := range table {
		if e.Layer == layer && e.Type == typ && e.Code == code {
			return true
		}
	}
	return false
}

// A RemoteError is a Terminate received from the peer.
type RemoteError struct{ Err *Error }

// Error implements error.
func (e *RemoteError) Error() string { return "peer sent Terminate: " + e.Err.Error() }

// Unwrap returns the violation that the peer reported.
func (e *RemoteError) Unwrap() error { return e.Err }
