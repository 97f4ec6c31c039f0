package mpa

import (
	"bytes"
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const (
	hexReq = "4d504120494420526571204672616d65"
	hexRep = "4d504120494420526570204672616d65"
)

// frameVectors hold frames in both forms. Those of soft-iWARP are from captures
// of Linux 6.1 (rping, default and peer-to-peer builds).
var frameVectors = []struct {
	name string
	wire string
	f    Frame
}{
	{"revision 1, bare", hexReq + "00010000", Frame{Rev: 1}},
	{"revision 0 of the RDMA Consortium", hexReq + "c0000000", Frame{Markers: true, CRC: true}},
	{"revision 1, all flags, private data", hexReq + "c00100036162ff",
		Frame{Markers: true, CRC: true, Rev: 1, PrivateData: []byte{'a', 'b', 0xff}}},
	{"rejecting reply", hexRep + "60010002beef",
		Frame{Reply: true, Reject: true, CRC: true, Rev: 1, PrivateData: []byte{0xbe, 0xef}}},
	{"revision 2 without S", hexReq + "40020001aa", Frame{CRC: true, Rev: 2, PrivateData: []byte{0xaa}}},
	{"soft-iWARP request", hexReq + "1002000400010001", Frame{Enhanced: true, Rev: 2, EnhancedData: EnhancedData{IRD: 1, ORD: 1}}},
	{"soft-iWARP peer-to-peer request", hexReq + "100200048001c001",
		Frame{Enhanced: true, Rev: 2, EnhancedData: EnhancedData{IRD: 1, ORD: 1, P2P: true, RTR: RTRs(RTRWrite | RTRRead)}}},
	{"soft-iWARP peer-to-peer reply", hexRep + "1002000480018001",
		Frame{Reply: true, Enhanced: true, Rev: 2, EnhancedData: EnhancedData{IRD: 1, ORD: 1, P2P: true, RTR: RTRs(RTRWrite)}}},
	{"no negotiation, all kinds of RTR", hexReq + "50020006ffffffff0102",
		Frame{CRC: true, Enhanced: true, Rev: 2, EnhancedData: EnhancedData{IRD: NoNegotiation, ORD: NoNegotiation, P2P: true, RTR: AllRTRs}, PrivateData: []byte{1, 2}}},
	{"Send only", hexReq + "50020004c0020003",
		Frame{CRC: true, Enhanced: true, Rev: 2, EnhancedData: EnhancedData{IRD: 2, ORD: 3, P2P: true, RTR: RTRs(RTRSend)}}},
}

func sameFrame(a, b Frame) bool {
	pa, pb := a.PrivateData, b.PrivateData
	a.PrivateData, b.PrivateData = nil, nil
	return a.Reply == b.Reply && a.Reject == b.Reject && a.CRC == b.CRC && a.Markers == b.Markers &&
		a.Enhanced == b.Enhanced && a.Rev == b.Rev && a.IRD == b.IRD && a.ORD == b.ORD &&
		a.P2P == b.P2P && a.RTR == b.RTR && bytes.Equal(pa, pb)
}

func TestFrameVectors(t *testing.T) {
	for _, tt := range frameVectors {
		t.Run(tt.name, func(t *testing.T) {
			wire := testenv.Unhex(t, tt.wire)
			b, err := tt.f.Append([]byte{7})
			if err != nil || !bytes.Equal(b, append([]byte{7}, wire...)) {
				t.Errorf("Append = %x, %v; want 07%x", b, err, wire)
			}
			if tt.f.Len() != len(wire) {
				t.Errorf("Len = %d; want %d", tt.f.Len(), len(wire))
			}
			f, n, err := Decode(append(wire, 0xde, 0xad))
			if err != nil || n != len(wire) || !sameFrame(f, tt.f) {
				t.Errorf("Decode = %+v, %d, %v; want %+v, %d", f, n, err, tt.f, len(wire))
			}
			for i := range wire {
				if f, n, err := Decode(wire[:i]); err != ErrShort || n != 0 || !sameFrame(f, Frame{}) {
					t.Errorf("Decode of %d bytes = %+v, %d, %v; want ErrShort", i, f, n, err)
				}
			}
		})
	}
}

func TestFrameDecodeLenient(t *testing.T) {
	for _, tt := range []struct {
		name, wire string
		f          Frame
	}{
		{"reserved flags are not looked at", hexReq + "4f010000", Frame{CRC: true, Rev: 1}},
		{"S is reserved below revision 2", hexReq + "50010000", Frame{CRC: true, Rev: 1}},
		{"S is reserved below revision 2, with data", hexReq + "50010004c0020003",
			Frame{CRC: true, Rev: 1, PrivateData: []byte{0xc0, 2, 0, 3}}},
		{"B, C, D are ignored without A", hexReq + "100200044001c001", Frame{Enhanced: true, Rev: 2, EnhancedData: EnhancedData{IRD: 1, ORD: 1}}},
		{"any revision", hexReq + "10ff000400000000", Frame{Enhanced: true, Rev: 255}},
		{"R in a request", hexReq + "20010000", Frame{Reject: true, Rev: 1}},
	} {
		if f, _, err := Decode(testenv.Unhex(t, tt.wire)); err != nil || !sameFrame(f, tt.f) {
			t.Errorf("%s: Decode = %+v, %v; want %+v", tt.name, f, err, tt.f)
		}
	}
}

func TestFrameErrors(t *testing.T) {
	for _, tt := range []struct {
		name, wire string
		err        error
	}{
		{"first byte", "4e", ErrKey},
		{"neither key", "4d5041204944205265722046", ErrKey},
		{"last byte of the key", hexReq[:30] + "64", ErrKey},
		{"513 bytes of private data", hexReq + "40010201", ErrPDLength},
		{"length field all ones", hexReq + "4001ffff", ErrPDLength},
		{"S without data", hexReq + "50020000", ErrEnhancedData},
		{"S with three bytes", hexReq + "50020003000000", ErrEnhancedData},
		{"rejecting reply, S without data", hexRep + "70020000", ErrEnhancedData},
	} {
		if f, n, err := Decode(testenv.Unhex(t, tt.wire)); !errors.Is(err, tt.err) || n != 0 || !sameFrame(f, Frame{}) {
			t.Errorf("%s: Decode = %+v, %d, %v; want %v", tt.name, f, n, err, tt.err)
		}
	}
	for _, tt := range []struct {
		name string
		f    Frame
		err  error
	}{
		{"512 bytes", Frame{Rev: 1, PrivateData: make([]byte, 512)}, nil},
		{"513 bytes", Frame{Rev: 1, PrivateData: make([]byte, 513)}, ErrPDLength},
		{"508 bytes, enhanced", Frame{Rev: 2, Enhanced: true, PrivateData: make([]byte, 508)}, nil},
		{"509 bytes, enhanced", Frame{Rev: 2, Enhanced: true, PrivateData: make([]byte, 509)}, ErrPDLength},
		{"IRD of 15 bits", Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 0x4000}}, ErrDepth},
		{"ORD of 15 bits", Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{ORD: 0x4000}}, ErrDepth},
	} {
		b, err := tt.f.Append([]byte{7})
		if err != tt.err {
			t.Errorf("%s: Append: %v; want %v", tt.name, err, tt.err)
		}
		if err != nil && !bytes.Equal(b, []byte{7}) {
			t.Errorf("%s: Append changed dst on error", tt.name)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, v := range frameVectors {
		f.Add(testenv.Unhex(f, v.wire))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, n, err := Decode(b)
		if err != nil {
			if n != 0 {
				t.Fatalf("error %v with %d bytes taken", err, n)
			}
			return
		}
		if n < HeaderLen || n > len(b) || n > maxFrameLen {
			t.Fatalf("took %d bytes of %d", n, len(b))
		}
		again, err := fr.Append(nil)
		if err != nil || len(again) != n {
			t.Fatalf("Append of a decoded frame: %d bytes, %v; want %d", len(again), err, n)
		}
		f2, _, err := Decode(again)
		if err != nil || !sameFrame(fr, f2) {
			t.Fatalf("decoded %+v, encoded and decoded %+v, %v", fr, f2, err)
		}
	})
}

func TestFrameFlagsWithoutA(t *testing.T) {
	f := Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 1, ORD: 2, RTR: AllRTRs}}
	if b, err := f.Append(nil); err != nil || !bytes.Equal(b, testenv.Unhex(t, hexReq+"1002000400010002")) {
		t.Errorf("Append = %x, %v", b, err)
	}
}

func TestRTRs(t *testing.T) {
	for _, tt := range []struct {
		s    RTRs
		want RTR
		name string
	}{
		{0, RTRNone, "none"},
		{RTRs(RTRSend), RTRSend, "send"},
		{RTRs(RTRSend | RTRRead), RTRRead, "read"},
		{AllRTRs, RTRWrite, "write"},
	} {
		if got := tt.s.prefer(); got != tt.want || got.String() != tt.name {
			t.Errorf("of %03b %v is preferred; want %v", tt.s, got, tt.want)
		}
		if tt.s.Has(RTRNone) || tt.want != RTRNone && !tt.s.Has(tt.want) {
			t.Errorf("Has is wrong for %03b", tt.s)
		}
	}
}
