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

func TestRemoteError(t *testing.T) {
	var err error = &RemoteError{ErrBounds}
	if !errors.Is(err, ErrBounds) || errors.Is(err, ErrReadBounds) {
		t.Errorf("%v is not %v, or is %v", err, ErrBounds, ErrReadBounds)
	}
	if got, want := err.Error(), "peer sent Terminate: ddp: base or bounds violation (terminate 1/1/0x01)"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}
