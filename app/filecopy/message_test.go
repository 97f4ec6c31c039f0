package filecopy

import (
	"encoding/hex"
	"slices"
	"strings"
	"testing"
)

var messages = []struct {
	name string
	m    message
	wire string // in the layout of docs/cp.md
}{
	{"get", message{Kind: kindGet, Name: "a/b", Hash: BLAKE3, Flags: 2, Mode: 0o644, Mtime: 3, Offset: 4},
		"41 0003 612f62 02 02 000001a4 0000000000000003 0000000000000004"},
	{"put", message{Kind: kindPut, Size: 0x1_0000_0001, Name: "x", Hash: SHA256},
		"42 0000000100000001 0001 78 01 00 00000000" + strings.Repeat("00", 16)},
	{"open", message{Kind: kindOpen, Size: 5, Addr: 0x1122334455667788, RKey: 0xaabbccdd, Chunk: 1 << 20, Slots: 8, Hash: XXH128, Offset: 5},
		"43 0000000000000005 1122334455667788 aabbccdd 00100000 0008 03 00 00000000 0000000000000000 0000000000000005"},
	{"chunk", message{Kind: kindChunk, Seq: 7, Len: 9}, "04 0000000000000007 00000009"},
	{"free", message{Kind: kindFree, Seq: 7}, "05 0000000000000007"},
	{"end", message{Kind: kindEnd, Size: 3, Sum: [32]byte{0: 1, 31: 2}, DiskTime: 1, HashTime: 2},
		"46 0000000000000003 01" + strings.Repeat("00", 30) + "02 0000000000000001 0000000000000002"},
	{"done", message{Kind: kindDone, DiskTime: 1, HashTime: 2}, "47 0000000000000001 0000000000000002"},
	{"ok", message{Kind: kindOK}, "07"},
	{"list", message{Kind: kindList, Flags: 4, Name: "d", After: "f"}, "09 04 0001 64 0001 66"},
	{"entry", message{Kind: kindEntry, Type: typeFolder, Mode: 0o755, Mtime: 1, Size: 2, Name: "d"}, "0a 01 000001ed 0000000000000001 0000000000000002 0001 64"},
	{"mkdir", message{Kind: kindMkdir, Flags: 1, Mode: 0o755, Mtime: 1, Name: "d"}, "0b 01 000001ed 0000000000000001 0001 64"},
	{"error", message{Kind: kindError, Code: CodeNoSpace, Text: "no"}, "08 0005 0002 6e6f"},
}

func TestMessages(t *testing.T) {
	for _, tt := range messages {
		t.Run(tt.name, func(t *testing.T) {
			wire := strings.ReplaceAll(tt.wire, " ", "")
			if got := hex.EncodeToString(tt.m.encode()); got != wire {
				t.Errorf("encode = %s; want %s", got, wire)
			}
			raw, err := hex.DecodeString(wire)
			if err != nil {
				t.Fatal(err)
			}
			var m message
			if err := m.decode(raw); err != nil || m != tt.m {
				t.Errorf("decode = %+v, %v; want %+v", m, err, tt.m)
			}
			for n := range raw {
				if err := m.decode(raw[:n]); err == nil {
					t.Errorf("decode accepts %d of %d bytes", n, len(raw))
				}
			}
			if err := m.decode(append(raw, 0)); err == nil {
				t.Error("decode accepts a byte too many")
			}
		})
	}
}

func TestMessageLimits(t *testing.T) {
	var m message
	long := message{Kind: kindGet, Name: strings.Repeat("n", maxName+1)}
	if err := m.decode(long.encode()); err == nil {
		t.Error("decode accepts a name that is too long")
	}
	e := message{Kind: kindError, Text: strings.Repeat("t", 10000)}
	if b := e.encode(); len(b) > maxMessage || m.decode(b) != nil {
		t.Errorf("the text of an error is not cut: %d bytes", len(b))
	}
	full := message{Kind: kindPut, Name: strings.Repeat("n", maxName), Hash: XXH128}
	if b := full.encode(); len(b) > maxMessage || m.decode(b) != nil {
		t.Error("the longest name does not fit")
	}
}

func FuzzDecode(f *testing.F) {
	for _, tt := range messages {
		f.Add(tt.m.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m, again message
		if m.decode(b) != nil {
			return
		}
		out := m.encode()
		if string(out) != string(b) {
			t.Fatalf("%x decodes to %+v, which is %x", b, m, out)
		}
		if err := again.decode(out); err != nil || again != m {
			t.Fatalf("%x: %+v, then %+v, %v", b, m, again, err)
		}
	})
}

func TestHello(t *testing.T) {
	for v := uint8(oldest); v <= Version; v++ {
		if got, err := checkHello(hello(v)); err != nil || got != v {
			t.Error(got, err)
		}
	}
	for _, tt := range []struct{ in, want string }{
		{"", "does not support"}, {"IWC", "does not support"}, {"IWCP", "does not support"}, {"IWCX\x01", "does not support"}, {"IWCP\x04", "version 4"}, {"IWCP\x01", "version 1"},
	} {
		if _, err := checkHello([]byte(tt.in)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("checkHello(%q) = %v; want %q", tt.in, err, tt.want)
		}
	}
}

func TestRemoteErrorIsOneLine(t *testing.T) {
	e := &RemoteError{CodeIO, "a\nb\x1b[31m"}
	if got := e.Error(); strings.ContainsAny(got, "\n\x1b") {
		t.Errorf("Error() = %q", got)
	}
}

// TestHashes checks that the sums are the standard ones, however the data is split. Those of
// BLAKE3 come from the test vectors of its specification, in which byte i of the input is i
// modulo 251. Those of XXH128 come from libxxhash.
func TestHashes(t *testing.T) {
	input := make([]byte, 102400)
	for i := range input {
		input[i] = byte(i % 251)
	}
	for _, tt := range []struct {
		hash Hash
		n    int
		want string
	}{
		{BLAKE3, 0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"},
		{BLAKE3, 102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"},
		{XXH128, 0, "99aa06d3014798d86001c324468d497f"},
		{XXH128, 1000, "18bf41bc8229e27733ef703fb2b20ed1"},
		{XXH128, 102400, "ecd387d36185351b1428e17f1cac2837"},
		{SHA256, 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
	} {
		for _, cut := range []int{1 << 20, 8192, 1024, 1000} {
			h := tt.hash.new()
			for b := range slices.Chunk(input[:tt.n], cut) {
				h.Write(b)
			}
			if got := hex.EncodeToString(h.Sum(nil)); got != tt.want {
				t.Errorf("%v of %d bytes by %d = %s; want %s", tt.hash, tt.n, cut, got, tt.want)
			}
		}
	}
}
