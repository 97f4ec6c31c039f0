package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

var same = cmp.Options{cmpopts.IgnoreUnexported(Header{}), cmpopts.EquateEmpty()}

// What Linux 6.1 sent, client and server, over soft-iWARP.
var linux = []struct {
	name, hex string
	h         Header
}{
	{"null call", "d9ad592f 00000001 00000080 00000000 00000000 00000000 00000000",
		Header{XID: 0xd9ad592f, Vers: 1, Credit: 128, Type: Msg1}},
	{"null reply", "d9ad592f 00000001 00000040 00000000 00000000 00000000 00000000",
		Header{XID: 0xd9ad592f, Vers: 1, Credit: 64, Type: Msg1}},
	{"readdirplus call", "e2ad592f 00000001 00000080 00000000 00000000 00000000 00000001 00000003 9a4e5201 0000007c e2ad592f47fd6000 71850601 00010000 e2ad592f63cd4000 6edf5201 00000004 e2ad592f47fd607c",
		Header{XID: 0xe2ad592f, Vers: 1, Credit: 128, Type: Msg1, Reply: Chunk{
			{0x9a4e5201, 124, 0xe2ad592f47fd6000}, {0x71850601, 65536, 0xe2ad592f63cd4000}, {0x6edf5201, 4, 0xe2ad592f47fd607c}}}},
	{"readdirplus reply", "e2ad592f 00000001 00000040 00000001 00000000 00000000 00000001 00000003 9a4e5201 0000007c e2ad592f47fd6000 71850601 00000140 e2ad592f63cd4000 6edf5201 00000000 e2ad592f47fd607c",
		Header{XID: 0xe2ad592f, Vers: 1, Credit: 64, Type: NoMsg1, Reply: Chunk{
			{0x9a4e5201, 124, 0xe2ad592f47fd6000}, {0x71850601, 320, 0xe2ad592f63cd4000}, {0x6edf5201, 0, 0xe2ad592f47fd607c}}}},
	{"write call", "e8ad592f 00000001 00000080 00000000 00000001 00000070 e09ec801 00020000 e8ad592f47bdb000 00000000 00000000 00000000",
		Header{XID: 0xe8ad592f, Vers: 1, Credit: 128, Type: Msg1, Reads: []ReadSegment{{112, Segment{0xe09ec801, 131072, 0xe8ad592f47bdb000}}}}},
	{"read call", "efad592f 00000001 00000080 00000000 00000000 00000001 00000001 95ec5802 00004000 efad592f47ba0000 00000000 00000000",
		Header{XID: 0xefad592f, Vers: 1, Credit: 128, Type: Msg1, Writes: []Chunk{{{0x95ec5802, 16384, 0xefad592f47ba0000}}}}},
}

func TestLinuxGolden(t *testing.T) {
	for _, c := range linux {
		t.Run(c.name, func(t *testing.T) {
			b := testenv.Unhex(t, string(bytes.ReplaceAll([]byte(c.hex), []byte(" "), nil)))
			var h Header
			n, err := h.Decode(append(b[:len(b):len(b)], 1, 2, 3, 4))
			if err != nil || n != len(b) {
				t.Fatalf("Decode: %d of %d bytes, %v", n, len(b), err)
			}
			if d := cmp.Diff(c.h, h, same); d != "" {
				t.Error(d)
			}
			if got := c.h.Append(nil); !bytes.Equal(got, b) {
				t.Errorf("Append:\n%x\n%x", got, b)
			}
			if c.h.Len() != len(b) {
				t.Errorf("Len %d, not %d", c.h.Len(), len(b))
			}
		})
	}
}

func seg(n uint32) Segment { return Segment{0x100 + n, n, 0x0102030405060708} }

// Every type of version 2 and every error, byte by byte.
var v2 = []struct {
	name, hex string
	h         Header
}{
	{"err vers", "00000004 00000001 00000001 00000002", Header{Type: Error, Failure: Failure{Code: ErrVers, Low: 1, High: 2}}},
	{"err bad xdr", "00000004 00000002", Header{Type: Error, Failure: Failure{Code: ErrBadXDR}}},
	{"err bad propval", "00000004 00000003", Header{Type: Error, Failure: Failure{Code: ErrBadPropVal}}},
	{"err inval htype", "00000004 00000004", Header{Type: Error, Failure: Failure{Code: ErrInvalHType}}},
	{"err inval cont", "00000004 00000005", Header{Type: Error, Failure: Failure{Code: ErrInvalCont}}},
	{"err read chunks", "00000004 00000006 00000007", Header{Type: Error, Failure: Failure{Code: ErrReadChunks, Max: 7}}},
	{"err write chunks", "00000004 00000007 00000008", Header{Type: Error, Failure: Failure{Code: ErrWriteChunks, Max: 8}}},
	{"err segments", "00000004 00000008 00000010", Header{Type: Error, Failure: Failure{Code: ErrSegments, Max: 16}}},
	{"err write resource", "00000004 00000009 00000001 00002000", Header{Type: Error, Failure: Failure{Code: ErrWriteResource, Index: 1, Needed: 8192}}},
	{"err reply resource", "00000004 0000000a 00002000", Header{Type: Error, Failure: Failure{Code: ErrReplyResource, Needed: 8192}}},
	{"err vers mismatch", "00000004 0000000b", Header{Type: Error, Failure: Failure{Code: ErrVersMismatch}}},
	{"err system", "00000004 00000064", Header{Type: Error, Failure: Failure{Code: ErrSystem}}},
	{"grant", "00000005", Header{Type: Grant}},
	{"connprop middle", "00000006 00000001 00000063 00000005 0102030405000000", Header{Type: ConnPropMiddle, Props: []Prop{{99, []byte{1, 2, 3, 4, 5}}}}},
	{"connprop final", "00000007 00000002 00000001 00000004 00001000 00000002 00000000", Header{Type: ConnPropFinal, Props: []Prop{{1, []byte{0, 0, 16, 0}}, {2, nil}}}},
	{"call external", "00000008 00000103" +
		"00000001 00000000 00000103 00000003 0102030405060708 00000000" +
		"00000001 00000028 00000104 00000004 0102030405060708 00000000" +
		"00000001 00000001 00000105 00000005 0102030405060708 00000001 00000000 00000000" +
		"00000001 00000001 00000106 00000006 0102030405060708",
		Header{Type: CallExternal, InvHandle: 0x103, Call: []ReadSegment{{0, seg(3)}}, Reads: []ReadSegment{{40, seg(4)}},
			Writes: []Chunk{{seg(5)}, {}}, Reply: Chunk{seg(6)}}},
	{"call middle", "00000009 00000400", Header{Type: CallMiddle, Remaining: 1024}},
	{"call inline", "0000000a 00000000 00000000 00000000 00000000", Header{Type: CallInline}},
	{"call inline, empty reply chunk", "0000000a 00000000 00000000 00000000 00000001 00000000", Header{Type: CallInline, Reply: Chunk{}}},
	{"reply external", "0000000b 00000000 00000001 00000001 00000106 00000006 0102030405060708", Header{Type: ReplyExternal, Reply: Chunk{seg(6)}}},
	{"reply middle", "0000000c 00000004", Header{Type: ReplyMiddle, Remaining: 4}},
	{"reply inline", "0000000d 00000001 00000002 00000105 00000005 0102030405060708 00000107 00000007 0102030405060708 00000000",
		Header{Type: ReplyInline, Writes: []Chunk{{seg(5), seg(7)}}}},
}

func TestVersion2Golden(t *testing.T) {
	var h Header // one for all: nothing of the last may be left
	for _, c := range v2 {
		t.Run(c.name, func(t *testing.T) {
			b := testenv.Unhex(t, "11223344"+"00000002"+"00000020"+string(bytes.ReplaceAll([]byte(c.hex), []byte(" "), nil)))
			c.h.XID, c.h.Vers, c.h.Credit = 0x11223344, 2, 32
			n, err := h.Decode(append(b[:len(b):len(b)], 9, 9, 9, 9))
			if err != nil || n != len(b) {
				t.Fatalf("Decode: %d of %d bytes, %v", n, len(b), err)
			}
			if d := cmp.Diff(c.h, h, same); d != "" {
				t.Error(d)
			}
			alone := b
			if l, _ := layoutOf(2, c.h.Type); l&hasWord != 0 { // an RPC message follows
				alone = append(b[:len(b):len(b)], 9, 9, 9, 9)
			}
			var first Header
			if _, err := first.Decode(alone); err != nil {
				t.Fatal(err)
			}
			if (c.h.Reply == nil) != (h.Reply == nil) || (c.h.Reply == nil) != (first.Reply == nil) {
				t.Error("an empty Reply chunk is not no Reply chunk")
			}
			if got := c.h.Append(nil); !bytes.Equal(got, b) || c.h.Len() != len(b) {
				t.Errorf("Append, Len %d:\n%x\n%x", c.h.Len(), got, b)
			}
			// Each prefix of it is an error, or a shorter header of its own.
			for i := range len(b) {
				n, err := h.Decode(b[:i])
				switch {
				case i < PrefixSize && !errors.Is(err, ErrShort):
					t.Errorf("%d bytes: %v", i, err)
				case err == nil && n > i:
					t.Errorf("%d bytes: length %d", i, n)
				case err == nil && i < len(b)-4:
					t.Errorf("%d of %d bytes are no header", i, len(b))
				}
			}
		})
	}
}

func TestBadHeaders(t *testing.T) {
	for _, c := range []struct {
		name, hex string
		err       error
	}{
		{"empty", "", ErrShort},
		{"15 bytes", "000000010000000200000003000000", ErrShort},
		{"version 0", "00000001 00000000 00000001 00000000", ErrVersion},
		{"version 3", "00000001 00000003 00000001 00000004", ErrVersion},
		{"v2 type 0", "00000001 00000002 00000001 00000000", ErrType},
		{"v2 type 3", "00000001 00000002 00000001 00000003", ErrType},
		{"v2 type 14", "00000001 00000002 00000001 0000000e", ErrType},
		{"error without a code", "00000001 00000002 00000001 00000004", ErrXDR},
		{"error 12", "00000001 00000002 00000001 00000004 0000000c", ErrUnknownCode},
		{"no first word", "00000001 00000002 00000001 0000000d 00000000", nil /* replaced below */},
		{"middle without payload", "00000001 00000002 00000001 00000009 00000010", ErrXDR},
		{"discriminator 2", "00000001 00000002 00000001 0000000a 00000000 00000002 00000000 00000000 00000000", ErrXDR},
		{"2^28 segments", "00000001 00000002 00000001 0000000d 00000001 10000000 00000000 00000000", ErrXDR},
		{"2^32-1 segments", "00000001 00000002 00000001 0000000d 00000001 ffffffff 00000000 00000000", ErrXDR},
		{"read list without end", "00000001 00000002 00000001 0000000a 00000000 00000001 00000004 00000001 00000001 0000000000000000", ErrXDR},
		{"2^32-1 properties", "00000001 00000002 00000001 00000007 ffffffff", ErrXDR},
		{"property beyond the end", "00000001 00000002 00000001 00000007 00000001 00000001 00000005 00000000", ErrPropVal},
		{"property of 2^32-1", "00000001 00000002 00000001 00000007 00000001 00000001 ffffffff 00000000", ErrPropVal},
		{"v1, 24 bytes", "00000001 00000001 00000001 00000000 00000000 00000000", ErrShort},
		{"v1, procedure 5", "00000001 00000001 00000001 00000005 00000000 00000000 00000000", ErrType},
		{"v1, error of 16 bytes", "00000001 00000001 00000001 00000004", ErrShort},
		{"v1, error 3", "00000001 00000001 00000001 00000004 00000003", ErrUnknownCode},
		{"v1, ERR_VERS without range", "00000001 00000001 00000001 00000004 00000001", ErrXDR},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.err == nil {
				c.err = ErrXDR
			}
			var h Header
			if _, err := h.Decode(testenv.Unhex(t, string(bytes.ReplaceAll([]byte(c.hex), []byte(" "), nil)))); !errors.Is(err, c.err) {
				t.Errorf("%v, not %v", err, c.err)
			}
		})
	}
}

func TestErrChunk1(t *testing.T) {
	h := Header{XID: 7, Vers: 1, Credit: 3, Type: Error1, Failure: Failure{Code: ErrChunk1}}
	b := h.Append(nil)
	var got Header
	if n, err := got.Decode(b); err != nil || n != 20 {
		t.Fatal(n, err)
	}
	if d := cmp.Diff(h, got, same); d != "" {
		t.Error(d)
	}
}

func TestProperties(t *testing.T) {
	want := Properties{8192, minRecvSize, 1, 32, ReverseGeneral} // the least and the most
	got := DefaultProperties()
	if auth, err := got.Apply(append(want.Props(), Prop{77, []byte("whatever")}, HostAuth([]byte("hello")))); err != nil || len(auth) != 1 || string(auth[0]) != "hello" {
		t.Fatal(auth, err)
	}
	if got != want {
		t.Errorf("%+v", got)
	}
	if _, err := got.Apply([]Prop{{ID: 1}, {ID: 2}, {ID: 3}, {ID: 4}, {ID: 5}, {ID: 6}}); err != nil || got != DefaultProperties() {
		t.Errorf("empty values are no defaults: %+v, %v", got, err)
	}
	for _, p := range []Prop{
		{1, []byte{1}}, {2, []byte{0, 0, 16, 0, 0, 0, 0, 0}}, {2, []byte{0, 0, 0, 16}}, {3, []byte{0, 0, 0, 0}}, {4, []byte{1, 2, 3}}, {5, []byte{0, 0, 0, 4}},
		{6, []byte{0, 0}}, {6, []byte{0, 0, 0, 5, 1, 2, 3, 4}}, {6, []byte{255, 255, 255, 255}}, {6, []byte{0, 0, 0, 0, 0, 0, 0, 0}},
	} {
		if _, err := got.Apply([]Prop{{1, []byte{0, 1, 0, 0}}, p}); !errors.Is(err, ErrPropVal) {
			t.Errorf("%+v: %v", p, err)
		}
		if got != DefaultProperties() {
			t.Fatalf("%+v: half of it was applied", p)
		}
	}
}

func TestPrivate(t *testing.T) {
	siw := testenv.Unhex(t, "f6ab0e1801010303")
	p := Private{true, 4096, 4096}
	if b := p.Append(nil); !bytes.Equal(b, siw) {
		t.Errorf("%x", b)
	}
	for off := range 5 {
		got, ok := FindPrivate(append(make([]byte, off), siw...))
		if !ok || got != p {
			t.Errorf("at %d: %+v, %v", off, got, ok)
		}
	}
	// Reserved bits are not looked at (RFC 8797 section 4).
	for flags, want := range map[byte]bool{0: false, 1: true, 0xfe: false, 0xff: true} {
		b := bytes.Clone(siw)
		b[5] = flags
		if got, ok := FindPrivate(b); !ok || got.Invalidate != want {
			t.Errorf("flags %#x: %+v, %v", flags, got, ok)
		}
	}
	// Sizes are rounded down to what can be said.
	for _, c := range []struct {
		p    Private
		want string
	}{
		{Private{}, "f6ab0e1801000000"}, {Private{SendSize: 1023, RecvSize: 2047}, "f6ab0e1801000000"},
		{Private{SendSize: 2048, RecvSize: 1 << 18}, "f6ab0e18010001ff"}, {Private{Invalidate: true, SendSize: 1 << 20, RecvSize: 5000}, "f6ab0e180101ff03"},
	} {
		if b := c.p.Append(nil); !bytes.Equal(b, testenv.Unhex(t, c.want)) {
			t.Errorf("%+v: %x, not %s", c.p, b, c.want)
		}
	}
	for _, s := range []string{"", "f6ab0e18", "f6ab0e1802010303", "f6ab0e19010103030000"} {
		if _, ok := FindPrivate(testenv.Unhex(t, s)); ok {
			t.Errorf("found in %s", s)
		}
	}
}

func TestDecodeAllocatesNothing(t *testing.T) {
	var hs [][]byte
	for _, c := range v2 {
		c.h.Vers = 2
		hs = append(hs, append(c.h.Append(nil), 0, 0, 0, 0))
	}
	var h Header
	if n := testing.AllocsPerRun(100, func() {
		for _, b := range hs {
			if _, err := h.Decode(b); err != nil {
				t.Fatal(err)
			}
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzDecode holds what is decoded against its own encoding, and memory
// against the bytes that are there.
func FuzzDecode(f *testing.F) {
	for _, c := range v2 {
		c.h.Vers = 2
		f.Add(append(c.h.Append(nil), 1, 2, 3, 4))
	}
	for _, c := range linux {
		f.Add(append(c.h.Append(nil), 1, 2, 3, 4))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h, again Header
		n, err := h.Decode(b)
		if n > len(b) || cap(h.Reads)+cap(h.Call)+cap(h.segs)+cap(h.Writes)+cap(h.Props) > 16+len(b) {
			t.Fatalf("%d bytes: %d, %d %d %d", len(b), n, cap(h.Reads), cap(h.segs), cap(h.Writes))
		}
		p := DefaultProperties()
		_, _ = p.Apply(h.Props)
		FindPrivate(b)
		if err != nil {
			return
		}
		out := h.Append(nil)
		if len(out) != h.Len() {
			t.Fatalf("Len %d, but %d bytes", h.Len(), len(out))
		}
		if m, err := again.Decode(append(out, make([]byte, 16)...)); err != nil || m != len(out) {
			t.Fatalf("again: %d, %v", m, err)
		}
		if d := cmp.Diff(h, again, same); d != "" {
			t.Fatal(d)
		}
	})
}
