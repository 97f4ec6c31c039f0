package rdmap

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestTerminateDecode decodes Terminates as peers send them: as RFC 5040 section 4.8 says; from soft-iWARP of Linux
// 6.1, which mirrors the layer, type and header bits; and from RNICs that use number 3 for MPA's error type. data:
// the stream has carried messages.
func TestTerminateDecode(t *testing.T) {
	const (
		write = "c140 00000007 0000000000001101"
		read  = hRead
		req   = sink + "00000001 00000006 0000000000001000"
	)
	tests := []struct {
		name string
		in   string
		data bool
		want *term.Error
		ddp  string
		rdma string
	}{
		{"RFC: bounds", "1101c000 000f" + write, true, term.ErrBounds, write, ""},
		{"RFC: read STag", "0100e000 002e" + read + req, true, term.ErrReadSTag, read, req},
		{"RFC: opcode", "0206c000 0013" + read, true, term.ErrOpcode, read, ""},
		{"RFC: IRD", "0207c000 002e" + read, true, term.ErrStream, read, ""},
		{"RFC: CRC", "20020000", true, term.ErrMPACRC, "", ""},
		{"RFC: marker", "20030000", true, term.ErrMPAMarker, "", ""},
		{"RFC: no RTR, at setup", "20070000", false, term.ErrMPARTR, "", ""},
		{"RFC: IRD, at setup", "20060000", false, term.ErrMPAIRD, "", ""},
		{"RFC: opcode, no header", "02060000", true, term.ErrOpcode, "", ""},
		{"RFC: local catastrophic", "00000000", true, term.ErrRDMAPLocal, "", ""},
		{"RFC: DDP local catastrophic", "10000000", true, term.ErrDDPLocal, "", ""},
		{"RFC: headers zeroed, not left out", "20020000 0000" + "000000000000000000000000000000000000" + "00000000000000000000000000000000000000000000000000000000",
			true, term.ErrMPACRC, "", ""},
		{"RFC: D without its header", "1101c000 000f c140", true, term.ErrBounds, "", ""},
		{"RFC: M alone", "02078000 002e" + read, true, term.ErrStream, "", ""},
		{"RFC: R without its header", "0100e000 002e" + read + "00", true, term.ErrReadSTag, read, ""},

		{"siw: CRC", "02020000", true, term.ErrMPACRC, "", ""},
		{"siw: length", "02030000", true, term.ErrMPAMarker, "", ""},
		{"siw: reply key", "02040000", false, term.ErrMPAFrame, "", ""},
		{"siw: IRD, at setup", "02060000", false, term.ErrMPAIRD, "", ""},
		{"siw: no RTR, at setup", "02070000", false, term.ErrMPARTR, "", ""},
		{"siw: RDMAP version", "20050000", true, term.ErrRDMAPVersion, "", ""},
		{"siw: opcode", "20060000", true, term.ErrOpcode, "", ""},
		{"siw: IRD overflow", "20070300 001c" + read, true, term.ErrStream, read, ""},
		{"siw: Invalidate", "20090300 0010" + "4144 00000006 00000000 00000001 00000000", true, term.ErrOpInvalidate, "4144 00000006 00000000 00000001 00000000", ""},
		{"siw: read STag", "10000700 001c" + read + req, true, term.ErrReadSTag, read, req},
		{"siw: write STag", "11000300 0001" + write, true, term.ErrInvalidSTag, write, ""},
		{"siw: write bounds", "11010300 0001" + write, true, term.ErrBounds, write, ""},
		{"siw: DDP version, tagged", "11040000", true, term.ErrTaggedVersion, "", ""},
		{"siw: DDP version, untagged", "21060000", true, term.ErrUntaggedVersion, "", ""},
		{"siw: MSN", "21030300 0001" + hSend, true, term.ErrMSNRange, hSend, ""},
		{"siw: Read Response nobody asked for", "01000300 0001" + write, true, term.ErrDDPLocal, write, ""},

		{"RNIC: no RTR", "23070000", true, term.ErrMPARTR, "", ""},
		{"RNIC: IRD", "23060000", false, term.ErrMPAIRD, "", ""},
		{"RNIC: CRC", "23020000", true, term.ErrMPACRC, "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got Terminate
			if !got.Decode(testenv.Unhex(t, tt.in), tt.data) {
				t.Fatal("not decoded")
			}
			if got.Err() != tt.want {
				t.Errorf("%v; want %v", got.Err(), tt.want)
			}
			if !bytes.Equal(got.DDP, testenv.Unhex(t, tt.ddp)) || !bytes.Equal(got.RDMA, testenv.Unhex(t, tt.rdma)) {
				t.Errorf("headers %x and %x; want %s and %s", got.DDP, got.RDMA, tt.ddp, tt.rdma)
			}
		})
	}
}

// TestTerminateRoundTrip checks that every error that is sent decodes to itself.
func TestTerminateRoundTrip(t *testing.T) {
	seg := testenv.Unhex(t, hRead+sink+"00000001 00000006 0000000000001000")
	for layer := range uint8(3) {
		for typ := range uint8(3) {
			for code := range 256 {
				e := term.Lookup(layer, typ, uint8(code))
				if !term.Assigned(layer, typ, uint8(code)) || e.Layer == term.LayerLLP && e.Code >= 5 {
					continue // 5 and up are ambiguous after setup
				}
				var got Terminate
				b := appendTerminate(nil, e, seg, len(seg), seg[ddp.UntaggedLen:])
				if !got.Decode(b, true) {
					t.Fatalf("%v: not decoded", e)
				}
				if got.Layer != layer || got.Type != typ || int(got.Code) != code {
					t.Errorf("%v comes back as %+v", e, got)
				}
				if got.DDP != nil && (b[2]&hdrLength == 0 || int(be.Uint16(b[4:])) != len(seg)) {
					t.Errorf("%v: %x has not the length %d", e, b, len(seg))
				}
			}
		}
	}
}

// TestTerminated checks the effect of a received Terminate: the event, the raw bytes, no more sending, and the status
// of the request that it names.
func TestTerminated(t *testing.T) {
	read := WR{Op: OpRead, Len: 16, STag: 0x55, TO: 0x66, SinkSTag: 7, SinkTO: 0x1000}
	add := WR{Op: OpFetchAdd, STag: 0x55}
	readHdr := func(msn, rest string) string { return "4141 00000000 00000001 " + msn + " 00000000" + rest }
	tests := []struct {
		name string
		in   string
		want *term.Error
		st   [3]Status // of a Read, an atomic and a Read, MSN 1 to 3
	}{
		{"bounds of a Write", "1101c000 000f c140 00000007 0000000000001101", term.ErrBounds, [3]Status{1, 1, 1}},
		{"the first Read's STag", "0100e000 002e" + readHdr("00000001", "00000007 0000000000001000 00000010 00000055 0000000000000066"), term.ErrReadSTag,
			[3]Status{StatusRemoteAccess, 1, 1}},
		{"the third, half done", "0102e000 002e" + readHdr("00000003", "00000007 0000000000003008 00000008 00000055 000000000000006e"), term.ErrReadAccess,
			[3]Status{1, 1, StatusRemoteAccess}},
		{"siw: the third, with a wrong MSN", "10000700 001c" + readHdr("00000010", "00000007 0000000000003000 00000010 00000055 0000000000000066"), term.ErrReadSTag,
			[3]Status{1, 1, StatusRemoteAccess}},
		{"a Read that begins where the first one's sink ends", "0100e000 002e" + readHdr("00000003", "00000007 0000000000001010 00000010 00000055 0000000000000066"), term.ErrReadSTag,
			[3]Status{1, 1, 1}},
		{"the first, of which nothing is missing", "0100e000 002e" + readHdr("00000001", "00000007 0000000000001010 00000000 00000055 0000000000000076"), term.ErrReadSTag,
			[3]Status{StatusRemoteAccess, 1, 1}},
		{"a Read into another STag", "0100e000 002e" + readHdr("00000001", "00000008 0000000000001000 00000010 00000055 0000000000000066"), term.ErrReadSTag,
			[3]Status{1, 1, 1}},
		{"a Read of more bytes", "0100e000 002e" + readHdr("00000001", "00000007 0000000000001000 00000011 00000055 0000000000000066"), term.ErrReadSTag,
			[3]Status{1, 1, 1}},
		{"a Send with the number of the first", "1204c000 0013" + hSend, term.ErrInvalidMO, [3]Status{1, 1, 1}},
		{"the atomic is not aligned", "0207c000 0046 414a 00000000 00000001 00000002 00000000", term.ErrStream,
			[3]Status{1, StatusRemoteOp, 1}},
		{"the third, by its number alone", "0207c000 002e" + readHdr("00000003", ""), term.ErrStream, [3]Status{1, 1, StatusRemoteOp}},
		{"a request that is not ours", "0207c000 0046 414a 00000000 00000001 00000009 00000000", term.ErrStream, [3]Status{1, 1, 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnd(Config{ORD: 3})
			e.post(t, read)
			e.post(t, add)
			r := read
			r.SinkTO = 0x3000
			e.post(t, r)
			for range 3 {
				if e.poll(testMULPDU) == nil {
					t.Fatal("request not sent")
				}
			}
			e.post(t, WR{Op: OpWrite})
			msg := testenv.Unhex(t, tt.in)
			if err := e.HandleULPDU(append(testenv.Unhex(t, hTerm), msg...)); err != nil {
				t.Fatalf("HandleULPDU: %v", err)
			}
			if ev, ok := e.PollEvent(); !ok || ev != EventTerminated {
				t.Errorf("event %v, %v; want terminated", ev, ok)
			}
			if e.Remote() != tt.want || !bytes.Equal(e.RemoteRaw(), msg) {
				t.Errorf("Remote %v, raw %x; want %v, %x", e.Remote(), e.RemoteRaw(), tt.want, msg)
			}
			e.Fail(term.ErrMPACRC)
			if b := e.poll(testMULPDU); b != nil || e.Terminating() {
				t.Errorf("it sent %x, Terminating %v; want nothing more", b, e.Terminating())
			}
			if err := e.HandleULPDU(testenv.Unhex(t, hSend)); err != nil || e.Stats().RxDropped != 1 {
				t.Errorf("a message after it: %v; want it dropped", err)
			}
			e.Flush()
			cs := e.completions()
			if len(cs) != 4 || cs[0].Status != tt.st[0] || cs[1].Status != tt.st[1] || cs[2].Status != tt.st[2] || cs[3].Status != StatusFlushed {
				t.Errorf("completions %+v; want statuses %v, then flushed", cs, tt.st)
			}
		})
	}
}

// TestTerminatedAtSetup checks that the meaning of 20 07 depends on whether the stream has carried messages.
func TestTerminatedAtSetup(t *testing.T) {
	e := newVictim()
	if err := e.HandleULPDU(testenv.Unhex(t, hTerm+"20070000")); err != nil || e.Remote() != term.ErrMPARTR {
		t.Errorf("first message: %v, %v; want %v", err, e.Remote(), term.ErrMPARTR)
	}
	e = newVictim()
	e.HandleULPDU(testenv.Unhex(t, hSend))
	if err := e.HandleULPDU(testenv.Unhex(t, hTerm+"20070000")); err != nil || e.Remote() != term.ErrStream {
		t.Errorf("after a Send: %v, %v; want %v", err, e.Remote(), term.ErrStream)
	}
	e = newVictim()
	e.HandleULPDU(testenv.Unhex(t, hRead+sink+"00000000 00000000 0000000000000000"))
	if err := e.HandleULPDU(testenv.Unhex(t, hTerm+"20070000")); err != nil || e.Remote() != term.ErrStream {
		t.Errorf("after a Read Request: %v, %v; want %v", err, e.Remote(), term.ErrStream)
	}
}

// TestTerminatedEndToEnd checks that of two Reads, with adjacent sinks or the same, only the one named by the Terminate
// fails with the error.
func TestTerminatedEndToEnd(t *testing.T) {
	for _, apart := range []uint64{16, 0} {
		e := newEnd(Config{ORD: 2})
		for i := range uint32(2) {
			e.post(t, WR{ID: i, Op: OpRead, Len: 16, STag: 0x55, SinkSTag: 7, SinkTO: 0x1000 + apart*uint64(i)})
			e.poll(testMULPDU)
		}
		in := hTerm + "0100e000 002e 4141 00000000 00000001 00000002 00000000 00000007" +
			fmt.Sprintf("%016x", 0x1000+apart) + "00000010 00000055 0000000000000000"
		e.give(t, testenv.Unhex(t, in))
		e.Flush()
		if cs := e.completions(); len(cs) != 2 || cs[0].Status != StatusFlushed || cs[1].Status != StatusRemoteAccess {
			t.Errorf("sinks %d bytes apart: completions %+v; want the first flushed, the second refused", apart, cs)
		}
	}
}

// TestTerminatedSegmented decodes a Terminate in two segments, and one padded with zeros.
func TestTerminatedSegmented(t *testing.T) {
	e := newVictim()
	e.give(t, testenv.Unhex(t, "0147 00000000 00000002 00000001 00000000 2002"))
	if err := e.HandleULPDU(testenv.Unhex(t, "4147 00000000 00000002 00000001 00000002 0000")); err != nil || e.Remote() != term.ErrMPACRC {
		t.Errorf("second half: %v, Remote %v; want %v", err, e.Remote(), term.ErrMPACRC)
	}
	e = newVictim()
	if err := e.HandleULPDU(append(testenv.Unhex(t, hTerm+"20020000"), make([]byte, 60)...)); err != nil || e.Remote() != term.ErrMPACRC {
		t.Errorf("padded: %v, Remote %v; want %v", err, e.Remote(), term.ErrMPACRC)
	}
}

func FuzzTerminate(f *testing.F) {
	for _, s := range []string{"20020000", "0100e000002e" + "414100000000000000010000000100000000" + "00000009000000000000200000000001000000060000000000001000", "21060000", "100007000000", "23070000"} {
		f.Add(testenv.Unhex(f, s), true)
	}
	f.Fuzz(func(t *testing.T, b []byte, data bool) {
		var got Terminate
		if got.Decode(b, data) != (len(b) >= 4) {
			t.Fatalf("%d bytes: %v", len(b), len(b) < 4)
		}
		if len(b) < 4 {
			return
		}
		if got.Err() == nil {
			t.Fatalf("%+v", got)
		}
		if n := len(got.DDP); n != 0 && n != ddp.HeaderLen(got.DDP) || len(got.RDMA) != 0 && len(got.RDMA) != readRequestLen {
			t.Fatalf("headers of %d and %d bytes", n, len(got.RDMA))
		}
	})
}
