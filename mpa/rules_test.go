package mpa

import (
	"encoding/binary"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// marks returns an FPDU of a ULPDU of 1500 bytes with its markers, and their offsets.
func marks(start serial.Num) (fpdu []byte, at []int) {
	var f Framer
	f.Init(true, true, start)
	ulpdu := make([]byte, 1500)
	for i := range ulpdu {
		ulpdu[i] = byte(i)
	}
	fpdu = make([]byte, f.Size(start, len(ulpdu)))
	f.Begin(fpdu, start, len(ulpdu))
	f.Write(ulpdu)
	f.End()
	for i := 0; i < len(fpdu); i += markerEvery {
		at = append(at, i)
	}
	return fpdu, at
}

// TestEveryMarker checks that every marker of an FPDU must point to its beginning, not only the first or the last
// (RFC 5044 4.3).
func TestEveryMarker(t *testing.T) {
	fpdu, at := marks(1000)
	if len(at) != 3 {
		t.Fatalf("%d markers; want 3", len(at))
	}
	for _, i := range at {
		b := append([]byte(nil), fpdu...)
		binary.BigEndian.PutUint16(b[i+2:], binary.BigEndian.Uint16(b[i+2:])+4)
		resum(b)
		var r Receiver
		r.Init(true, true, 1000)
		r.HandleStream(b)
		var f FPDU
		if ok, err := r.PollFPDU(&f); ok || err != term.ErrMPAMarker {
			t.Errorf("marker at %d changed: FPDU %v, %v; want %v", i, ok, err, term.ErrMPAMarker)
		}
	}
}

// TestEarlyWrap checks that an FPDU is found by a marker at whichever of its bytes the sequence numbers wrap (RFC
// 5044 4.3).
func TestEarlyWrap(t *testing.T) {
	for back := range 1600 {
		start := serial.Num(-back)
		fpdu, _ := marks(start)
		var f Framer
		f.Init(true, true, start)
		var stream []byte
		for range 3 {
			seq := start.Add(len(stream))
			b := make([]byte, f.Size(seq, 900))
			f.Begin(b, seq, 900)
			f.Write(make([]byte, 900))
			f.End()
			stream = append(stream, b...)
		}
		// The first bytes are lost: only a marker shows where the second FPDU begins.
		first := len(stream) / 3 &^ 3
		lost := first - 100
		var r Receiver
		r.Init(true, true, start)
		r.HandleEarly(start.Add(lost), stream[lost:])
		var got []serial.Num
		var p FPDU
		for r.PollEarly(&p) {
			got = append(got, p.Seq)
			r.MarkPlaced(p.Seq)
		}
		if len(got) != 2 {
			t.Fatalf("start %d: %d FPDUs found; want 2", int32(start), len(got))
		}
		_ = fpdu
	}
}

// TestDefaultIsCRC checks that the default configuration asks for CRCs (RFC 5044 4.4).
func TestDefaultIsCRC(t *testing.T) {
	f, _, err := Decode(frameOf(t, NewInitiator(DefaultConfig(), t0)))
	if err != nil || !f.CRC {
		t.Errorf("the Request of the default configuration has C %v, %v", f.CRC, err)
	}
	if i, r := connect(t, DefaultConfig(), DefaultConfig(), -1, -1); !i.CRC || !r.CRC {
		t.Errorf("CRCs of the default configuration: %v, %v", i.CRC, r.CRC)
	}
}

// TestInitiatorLearnsDepths checks that the initiator's ULP gets the IRD and ORD of the responder, whether it accepts
// or rejects (RFC 6581 9.1).
func TestInitiatorLearnsDepths(t *testing.T) {
	for kind, flags := range map[EventKind]string{EventAccepted: "50", EventRejected: "70"} {
		s := NewInitiator(with(same), t0)
		frameOf(t, s)
		give(t, s, testenv.Unhex(t, hexRep+flags+"02000400070005"))
		ev := event(t, s, kind)
		if ev.Frame.IRD != 7 || ev.Frame.ORD != 5 || s.peer.IRD != 7 || s.peer.ORD != 5 {
			t.Errorf("event %d: IRD %d, ORD %d; want 7 and 5", kind, ev.Frame.IRD, ev.Frame.ORD)
		}
	}
}
