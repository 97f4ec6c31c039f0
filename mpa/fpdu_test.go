package mpa

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// compose returns the FPDU of a ULPDU that begins at seq.
func compose(f *Framer, seq serial.Num, ulpdu []byte) []byte {
	dst := bytes.Repeat([]byte{0xaa}, f.Size(seq, len(ulpdu)))
	f.Begin(dst, seq, len(ulpdu))
	f.Write(ulpdu)
	return dst[:f.End()]
}

// figure5 and figure6 are the FPDUs of RFC 5044 section 4.4, octet for octet.
const (
	figure5 = "00000000 002a 4143 00000000 00000000 00000001 00000000" +
		"000000000000000000000000000000000000000000000000 52239983"
	figure6 = "002a 4143 00000000 00000000 00000002 00000000 00000014" +
		"000000000000000000000000000000000000000000000000 84925898"
)

func TestRFC5044Figures(t *testing.T) {
	var start serial.Num = 0xffff_fff0
	for _, tt := range []struct {
		name string
		seq  serial.Num
		msn  byte
		wire string
	}{
		{"figure 5", start, 1, figure5},
		{"figure 6", start + 0x1ec, 2, figure6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ulpdu := unhex(t, "4143000000000000000000000000000000000000000000000000000000000000"+"00000000000000000000")
			ulpdu[13] = tt.msn
			wire := unhex(t, tt.wire)
			var f Framer
			f.Init(true, true, start)
			if got := compose(&f, tt.seq, ulpdu); !bytes.Equal(got, wire) {
				t.Errorf("composed %x\nwant     %x", got, wire)
			}
			var r Receiver
			r.Init(true, true, start)
			r.next = tt.seq
			r.Feed(wire)
			var p FPDU
			if ok, err := r.Next(&p); !ok || err != nil || !bytes.Equal(p.ULPDU, ulpdu) {
				t.Errorf("Next = %v, %v, ULPDU %x; want %x", ok, err, p.ULPDU, ulpdu)
			}
		})
	}
}
