package term

import (
	"errors"
	"strings"
	"testing"
)

// The values of RFC 5040 figure 9, RFC 5041 section 7.2, RFC 5044 section 8 and
// RFC 6581 section 8.
func TestTable(t *testing.T) {
	codes := map[[2]uint8]string{
		{LayerRDMAP, RDMAPLocal}:      "\x00",
		{LayerRDMAP, RDMAPProtection}: "\x00\x01\x02\x03\x04\x09\xff",
		{LayerRDMAP, RDMAPOperation}:  "\x05\x06\x07\x08\x09\xff",
		{LayerDDP, DDPLocal}:          "\x00",
		{LayerDDP, DDPTagged}:         "\x00\x01\x02\x03\x04",
		{LayerDDP, DDPUntagged}:       "\x01\x02\x03\x04\x05\x06",
		{LayerLLP, LLPMPA}:            "\x01\x02\x03\x04\x05\x06\x07",
	}
	n := 0
	for layer := range uint8(16) {
		for typ := range uint8(16) {
			for code := range 256 {
				c := uint8(code)
				defined := strings.IndexByte(codes[[2]uint8{layer, typ}], c) >= 0
				e := Lookup(layer, typ, c)
				if e.Layer != layer || e.Type != typ || e.Code != c || e.Reason == "" {
					t.Fatalf("Lookup(%d, %d, %#x) = %+v", layer, typ, c, e)
				}
				if again := Lookup(layer, typ, c); (again == e) != defined {
					t.Errorf("%v: a package variable: %v; want %v", e, again == e, defined)
				}
				// A local catastrophic error of RDMAP has no codes: all will do.
				want := defined || layer == LayerRDMAP && typ == RDMAPLocal
				if Assigned(layer, typ, c) != want {
					t.Errorf("Assigned(%d, %d, %#x) = %v; want %v", layer, typ, c, !want, want)
				}
				if defined {
					n++
				}
			}
		}
	}
	if n != len(table) {
		t.Errorf("%d values in the table, %d of them by the RFCs", len(table), n)
	}
}

// TestRegistry has each error with its entry in the registries of RFC 6580 sections
// 3.1 to 3.3, and of RFC 6581 section 8, which added to the last.
func TestRegistry(t *testing.T) {
	registry := []struct {
		e                 *Error
		layer, typ, code  uint8
		errorType, reason string // of RFC 6580, abridged
	}{
		{ErrRDMAPLocal, 0x0, 0x0, 0x00, "Local Catastrophic Error", "local catastrophic"}, // ALL
		{ErrReadSTag, 0x0, 0x1, 0x00, "Remote Protection Error", "invalid STag"},
		{ErrReadBounds, 0x0, 0x1, 0x01, "Remote Protection Error", "base or bounds"},
		{ErrReadAccess, 0x0, 0x1, 0x02, "Remote Protection Error", "access rights"},
		{ErrReadSTagStream, 0x0, 0x1, 0x03, "Remote Protection Error", "STag not associated"},
		{ErrReadTOWrap, 0x0, 0x1, 0x04, "Remote Protection Error", "TO wrap"},
		{ErrCannotInvalidate, 0x0, 0x1, 0x09, "Remote Protection Error", "cannot be invalidated"},
		{ErrProtection, 0x0, 0x1, 0xff, "Remote Protection Error", "remote protection"},
		{ErrRDMAPVersion, 0x0, 0x2, 0x05, "Remote Operation Error", "invalid version"},
		{ErrOpcode, 0x0, 0x2, 0x06, "Remote Operation Error", "unexpected opcode"},
		{ErrStream, 0x0, 0x2, 0x07, "Remote Operation Error", "localized to the stream"},
		{ErrGlobal, 0x0, 0x2, 0x08, "Remote Operation Error", "global"},
		{ErrOpInvalidate, 0x0, 0x2, 0x09, "Remote Operation Error", "cannot be invalidated"},
		{ErrOperation, 0x0, 0x2, 0xff, "Remote Operation Error", "remote operation"},

		{ErrDDPLocal, 0x1, 0x0, 0x00, "Local Catastrophic", "local catastrophic"},
		{ErrInvalidSTag, 0x1, 0x1, 0x00, "Tagged Buffer Error", "invalid STag"},
		{ErrBounds, 0x1, 0x1, 0x01, "Tagged Buffer Error", "base or bounds"},
		{ErrSTagStream, 0x1, 0x1, 0x02, "Tagged Buffer Error", "STag not associated"},
		{ErrTOWrap, 0x1, 0x1, 0x03, "Tagged Buffer Error", "TO wrap"},
		{ErrTaggedVersion, 0x1, 0x1, 0x04, "Tagged Buffer Error", "invalid version"},
		{ErrInvalidQN, 0x1, 0x2, 0x01, "Untagged Buffer Error", "invalid QN"},
		{ErrNoBuffer, 0x1, 0x2, 0x02, "Untagged Buffer Error", "no buffer"},
		{ErrMSNRange, 0x1, 0x2, 0x03, "Untagged Buffer Error", "range not valid"},
		{ErrInvalidMO, 0x1, 0x2, 0x04, "Untagged Buffer Error", "invalid MO"},
		{ErrTooLong, 0x1, 0x2, 0x05, "Untagged Buffer Error", "too long"},
		{ErrUntaggedVersion, 0x1, 0x2, 0x06, "Untagged Buffer Error", "invalid version"},

		{ErrMPAClosed, 0x2, 0x0, 0x01, "MPA Error", "closed, terminated or lost"},
		{ErrMPACRC, 0x2, 0x0, 0x02, "MPA Error", "CRC"},
		{ErrMPAMarker, 0x2, 0x0, 0x03, "MPA Error", "marker and ULPDU length"},
		{ErrMPAFrame, 0x2, 0x0, 0x04, "MPA Error", "invalid request or reply"},
		{ErrMPALocal, 0x2, 0x0, 0x05, "MPA Error", "local catastrophic"},
		{ErrMPAIRD, 0x2, 0x0, 0x06, "MPA Error", "insufficient IRD"},
		{ErrMPARTR, 0x2, 0x0, 0x07, "MPA Error", "no matching RTR"},
	}
	for _, r := range registry {
		if e := r.e; e.Layer != r.layer || e.Type != r.typ || e.Code != r.code || !strings.Contains(e.Reason, r.reason) {
			t.Errorf("%v; want %d/%d/%#02x, %s / %s", e, r.layer, r.typ, r.code, r.errorType, r.reason)
		}
	}
	if len(registry) != len(table) {
		t.Errorf("%d errors, %d entries of registries", len(table), len(registry))
	}
	// Of a type without codes any is the error; nothing of ours is reserved for others.
	for code := range 256 {
		if !Assigned(0x0, 0x0, uint8(code)) || Assigned(0x1, 0x3, uint8(code)) {
			t.Errorf("code %#x: 0/0 assigned %v, 1/3 assigned %v", code, Assigned(0, 0, uint8(code)), Assigned(1, 3, uint8(code)))
		}
	}
}

func TestRemoteError(t *testing.T) {
	var err error = &RemoteError{ErrBounds}
	if !errors.Is(err, ErrBounds) || errors.Is(err, ErrReadBounds) {
		t.Errorf("%v is not %v, or is %v", err, ErrBounds, ErrReadBounds)
	}
	if got, want := err.Error(), "peer sent Terminate: ddp: base or bounds violation (terminate 1/1/0x01)"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}
