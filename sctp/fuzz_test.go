package sctp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// FuzzAssoc sends an association in each state packets of chunks taken from the input, with the right tag. It must
// not panic, its accounts must stay correct, and every handle must be returned.
func FuzzAssoc(f *testing.F) {
	for i, b := range capture(f) {
		f.Add(uint8(i), b[HeaderLen:])
	}
	f.Add(uint8(3), append(dataBytes(0, rigTSN+1, 0, 0, "piece"), dataBytes(2, rigTSN, 0, 0, "begin")...))
	f.Fuzz(func(t *testing.T, how uint8, in []byte) {
		var r *rig
		tt := &testing.T{}
		cfg := Config{MaxKept: 8, RcvWindow: 4096}
		switch how % 6 {
		case 0:
			r = dialing(tt, cfg, CookieWait)
		case 1:
			r = dialing(tt, cfg, CookieEchoed)
		case 2:
			r = listening(tt, cfg)
			r.a.Close(r.now)
		case 3:
			r = listening(tt, cfg)
			r.send(r.a.tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(r.a.cumAck))))
		default:
			r = listening(tt, cfg)
		}
		for i := range 4 {
			r.push(10 + i)
		}
		out := map[Buf]bool{}
		for len(in) > 0 {
			n := min(len(in), 1+int(in[0]))
			tag := r.a.tag
			if in[0]&0xc0 == 0xc0 {
				tag = 0
			}
			r.send(tag, in[:n])
			in = in[n:]
			r.wait(time.Duration(n) * 10 * time.Millisecond)
			r.a.HandleICMP(r.now, &pkt.ICMPError{Flow: r.flow, Kind: pkt.TooBig, MTU: n * 20, Seq: r.a.peerTag})
			if len(r.kept) > 8 {
				t.Fatal("too much is kept")
			}
		}
		r.a.Abort()
		r.drain(nil)
		for {
			b, ok := r.a.PollReleased()
			if !ok {
				break
			}
			if out[b] {
				t.Fatal("released twice")
			}
			out[b] = true
		}
		if len(out) != 4 {
			t.Fatalf("%d of 4 buffers came back", len(out))
		}
		if len(r.kept) != 0 {
			t.Fatal("chunks are still kept")
		}
	})
}
