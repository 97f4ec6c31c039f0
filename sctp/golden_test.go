package sctp

import (
	"encoding/binary"
	"encoding/hex"
	"path/filepath"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// capture returns the SCTP packets of testdata/peers.hex, one per line in hex, exchanged by Linux, usrsctp and pion.
func capture(t testing.TB) [][]byte {
	f := testenv.ReadFile(t, filepath.Join("testdata", "peers.hex"))
	var out [][]byte
	for len(f) > 0 {
		n := 0
		for n < len(f) && f[n] != '\n' {
			n++
		}
		b, err := hex.DecodeString(string(f[:n]))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
		f = f[min(n+1, len(f)):]
	}
	return out
}

// TestCapture parses packets of other implementations: every checksum must be right, every chunk must be decoded, and
// encoding it again must give the same bytes.
func TestCapture(t *testing.T) {
	seen := map[ChunkType]int{}
	adaptations := 0
	for n, b := range capture(t) {
		if !Verify(b) {
			t.Fatalf("packet %d: checksum", n)
		}
		c := append([]byte(nil), b...)
		binary.LittleEndian.PutUint32(c[8:], 0)
		if Verify(c) {
			t.Fatalf("packet %d: a wrong checksum passes", n)
		}
		SetChecksum(c)
		if string(c) != string(b) {
			t.Fatalf("packet %d: SetChecksum differs", n)
		}
		for off := HeaderLen; off < len(b); {
			var c Chunk
			next, err := NextChunk(b, off, &c)
			if err != nil {
				t.Fatalf("packet %d at %d: %v", n, off, err)
			}
			seen[c.Type]++
			off = next
			switch c.Type {
			case ChunkInit, ChunkInitAck:
				var i Init
				if err := i.Decode(c.Body); err != nil {
					t.Fatalf("packet %d: %v", n, err)
				}
				if !i.valid() || c.Type == ChunkInitAck && len(i.Cookie) == 0 {
					t.Fatalf("packet %d: %+v", n, i)
				}
				if i.HasAdaptation && i.Adaptation == 1 {
					adaptations++
				}
				var again Init
				w := i.Append(nil, c.Type)
				if _, err := NextChunk(w, 0, &c); err != nil || again.Decode(c.Body) != nil || again.Tag != i.Tag || again.TSN != i.TSN {
					t.Fatalf("packet %d: does not survive a round trip", n)
				}
			case ChunkData:
				var d dataChunk
				if !d.decode(&c) {
					t.Fatalf("packet %d: DATA", n)
				}
				var h [dataHeader]byte
				d.put(&h)
				if string(h[:]) != string(b[c.Off:c.Off+dataHeader]) {
					t.Fatalf("packet %d: DATA header %x, was %x", n, h, b[c.Off:c.Off+dataHeader])
				}
				if d.off+d.n > len(b) {
					t.Fatalf("packet %d: user data leave the packet", n)
				}
			case ChunkSack:
				var s Sack
				if err := s.Decode(c.Body); err != nil {
					t.Fatalf("packet %d: %v", n, err)
				}
			}
		}
	}
	for _, c := range []ChunkType{ChunkData, ChunkInit, ChunkInitAck, ChunkSack, ChunkAbort, ChunkShutdown, ChunkShutdownAck, ChunkCookieEcho, ChunkCookieAck, ChunkShutdownComplete} {
		if seen[c] == 0 {
			t.Errorf("the capture shows no %v", c)
		}
	}
	if adaptations == 0 {
		t.Error("no adaptation layer indication seen")
	}
}

// FuzzParse parses any bytes as a packet and as each kind of chunk.
func FuzzParse(f *testing.F) {
	for _, b := range capture(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		Verify(b)
		OutOfBlue(simFlow(0, false), b)
		for off := HeaderLen; off < len(b); {
			var c Chunk
			next, err := NextChunk(b, off, &c)
			if err != nil {
				break
			}
			if next <= off {
				t.Fatal("no progress")
			}
			off = next
			var i Init
			var s Sack
			var d dataChunk
			if i.Decode(c.Body) == nil {
				i.Append(nil, ChunkInitAck)
			}
			if s.Decode(c.Body) == nil {
				for n := range s.Gaps() {
					s.Gap(n)
				}
			}
			if d.decode(&c) && (d.n < 0 || d.off+d.n > len(b)) {
				t.Fatal("user data leave the packet")
			}
		}
	})
}
