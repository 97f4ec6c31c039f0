package sctp

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestInitFlood sends INITs and forged cookies from many addresses while an association of the same listener moves
// data. No state may be kept, and all data must arrive.
func TestInitFlood(t *testing.T) {
	n := 100_000
	if testing.Short() {
		n = 5000
	}
	s := newSim(t, testenv.Seed(t), Config{}, Config{}, wireOf(time.Millisecond), 1500, false)
	s.establish()
	l := s.h[1].l
	rng := rand.New(rand.NewPCG(testenv.Seed(t), 3))
	s.h[0].total, s.h[1].total = 500, 500
	for i := range n {
		f := s.h[1].flow
		f.Remote[14], f.Remote[15], f.RemotePort = byte(rng.Uint32()), byte(rng.Uint32()|1), uint16(rng.Uint32())
		h := Header{f.RemotePort, f.LocalPort, 0}
		in := Init{Tag: rng.Uint32() | 1, Rwnd: 5000, Out: 1, In: 1}
		if a, reply := l.HandlePacket(s.now, f, 0, in.Append(h.Append(nil), ChunkInit)); a != nil || reply == nil {
			t.Fatal("an INIT made an association, or had no answer")
		}
		if i%16 == 0 {
			cookie := make([]byte, cookieFixed+macLen)
			for j := range cookie {
				cookie[j] = byte(rng.Uint32())
			}
			h.Tag = rng.Uint32()
			if a, reply := l.HandlePacket(s.now, f, 0, appendChunk(h.Append(nil), ChunkCookieEcho, 0, cookie)); a != nil || reply != nil {
				t.Fatal("a forged cookie has an effect")
			}
		}
		if i%100 == 0 {
			s.step()
		}
	}
	s.transfer(500, 500)
	if st := l.Stats(); st.CookiesGood != 1 || st.Inits < uint64(n) {
		t.Errorf("%+v", st)
	}
}

// TestChunkFlood checks that the control chunks of a packet are limited, wherever DATA is among them, and DATA is not.
func TestChunkFlood(t *testing.T) {
	const most = 64
	unknown := chunk(0xbf, 0, nil) // to be skipped without a report
	for at := range 2 * most {
		r := listening(t, Config{})
		r.send(r.a.tag, bytes.Repeat(unknown, at), dataBytes(whole|flagUnordered, rigTSN, 0, 0, "abcd"), bytes.Repeat(unknown, 10*most))
		if n := r.a.Stats().UnknownChunks; n < most-1 || n > most {
			t.Fatalf("DATA after %d chunks: %d control chunks are processed, of which a packet may have %d", at, n, most)
		}
		if got := len(r.got); got != 1 && at < most {
			t.Fatalf("%d messages", got)
		}
	}
}
