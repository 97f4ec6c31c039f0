package sctp

import (
	"bytes"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// scripted is a rig whose peer and owner a script drives.
type scripted struct {
	*rig
	in     testenv.Choices
	bufs   map[Buf]bool // pushed and not released
	next   Buf
	beats  [][]byte // bodies of HEARTBEATs that were sent
	cookie []byte   // of the last INIT ACK
	tag    uint32   // and its tag
}

// near returns a small number, mostly.
func (s *scripted) near() int {
	switch v := s.in.Byte(); {
	case v < 0xe0:
		return int(v&31) - 4
	default:
		return int(int16(uint16(v)<<8 | uint16(s.in.Byte())))
	}
}

// settle takes what the association has put out, and checks its accounts.
func (s *scripted) settle() {
	s.t.Helper()
	s.drain(nil)
	for _, p := range s.take() {
		var c Chunk
		for off := HeaderLen; off < len(p); {
			next, err := NextChunk(p, off, &c)
			if err != nil {
				s.t.Fatalf("sends a bad packet %x: %v", p, err)
			}
			off = next
			switch c.Type {
			case ChunkHeartbeat:
				s.beats = append(s.beats, bytes.Clone(c.Body))
			case ChunkInitAck:
				var i Init
				if i.Decode(c.Body) == nil {
					s.cookie, s.tag = bytes.Clone(i.Cookie), i.Tag
				}
			}
		}
	}
	for {
		b, ok := s.a.PollReleased()
		if !ok {
			break
		}
		if !s.bufs[b] {
			s.t.Fatalf("buffer %d was released twice", b)
		}
		delete(s.bufs, b)
	}
	checkAccounts(s.t, s.a)
	if len(s.kept) > s.a.cfg.MaxKept || len(s.kept) != len(s.a.rcv.kept) {
		s.t.Fatalf("%d chunks are kept, %d counted, at most %d", len(s.kept), len(s.a.rcv.kept), s.a.cfg.MaxKept)
	}
}

// sendOn sends chunks from one of the peer's addresses.
func (s *scripted) sendOn(path byte, tag uint32, chunks ...[]byte) {
	s.sendFrom(int(path)%s.a.Paths(), tag, chunks...)
}

// run runs the script: each step is an operation, with its argument in the upper half of a byte.
func (s *scripted) run() {
	for n := 0; len(s.in) > 0 && n < 500 && s.a.State() != Closed; n++ {
		op := s.in.Byte()
		arg, tag := op>>4, s.a.tag
		switch op & 15 {
		case 0, 1:
			for range 1 + int(arg) {
				s.next++
				s.bufs[s.next] = true
				n := 1 + int(s.in.Byte())*6%s.a.MaxMessage()
				s.a.Push(&Message{Stream: uint16(arg & 7), Buf: s.next, Len: n, Urgent: arg&1 != 0})
			}
		case 2, 3:
			sent := int(s.a.next - s.a.first) // the peer acknowledges no more, mostly
			n, lie := s.near(), s.in.Byte() >= 0xfc
			if arg&1 != 0 {
				n = sent
			}
			if !lie {
				n = min(n, sent)
			}
			var gaps []uint16
			for at, k := 1, s.in.Byte()&7; k > 0; k-- {
				from := at + 1 + int(s.in.Byte()&15)
				if at = from + int(s.in.Byte()&7); at > sent-n && !lie {
					break
				}
				gaps = append(gaps, uint16(from), uint16(at))
			}
			s.sendOn(s.in.Byte(), tag, sackBytes(s.a.cumAck.Add(n), uint32(s.in.Byte())*600, gaps...))
		case 4, 5:
			var chunks [][]byte
			for range 1 + arg&3 {
				f := s.in.Byte()
				tsn := s.a.rcv.cum.Add(1 + s.near())
				ssn, b := uint16(s.in.Byte()&7), make([]byte, 1+int(s.in.Byte()))
				chunks = append(chunks, dataBytes(f&15, tsn, uint16(f>>4&3), ssn, string(b)))
			}
			s.sendOn(s.in.Byte(), tag, chunks...)
		case 6:
			s.wait(time.Duration(1+int(s.in.Byte())) << (arg & 7) * time.Millisecond)
		case 7:
			if at := s.a.Deadline(); at != 0 {
				s.now = max(s.now, at)
				s.a.HandleTimeout(s.now)
			}
		case 8:
			s.a.SetMTU(int(arg)%s.a.Paths(), 300+int(s.in.Byte())*40)
		case 9:
			s.a.PathChanged(s.now, int(arg)%s.a.Paths())
		case 10:
			e := pkt.ICMPError{Flow: s.flow, Proto: pkt.ProtoSCTP, Kind: pkt.ICMPKind(arg % 5), Seq: s.a.peerTag}
			e.MTU = int(s.in.Byte()) * 8
			e.Flow.Remote = s.a.Path(int(s.in.Byte()) % s.a.Paths()).Addr.As16()
			s.a.HandleICMP(s.now, &e)
		case 11:
			if len(s.beats) > 0 {
				b := s.beats[int(s.in.Byte())%len(s.beats)]
				s.sendOn(s.in.Byte(), tag, chunk(ChunkHeartbeatAck, 0, b))
			} else {
				s.sendOn(s.in.Byte(), tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}))
			}
		case 12:
			switch arg {
			case 0:
				s.a.Close(s.now)
			case 1:
				cum := s.a.cumAck.Add(min(s.near(), int(s.a.next-s.a.first)))
				s.sendOn(0, tag, chunk(ChunkShutdown, 0, be.AppendUint32(nil, uint32(cum))))
			case 2:
				s.sendOn(0, tag, chunk(ChunkShutdownAck, 0, nil))
			case 3:
				s.sendOn(0, tag, chunk(ChunkShutdownComplete, s.in.Byte()&1, nil))
			case 4:
				s.sendOn(0, tag, chunk(ChunkCookieAck, 0, nil))
			case 5:
				s.a.SetWindow(int(s.in.Byte()) * 1000)
			default:
				s.a.SetBacklog(int(s.in.Byte())*100, arg&1 != 0)
			}
		case 13:
			switch arg & 3 {
			case 0: // the peer restarts, perhaps from another port
				s.peerTag += uint32(s.in.Byte() & 1)
				s.peerTSN = s.peerTSN.Add(s.near())
				if s.cfg.UDP && arg&4 != 0 {
					s.rig.from++
				}
				s.send(0, s.initChunk(ChunkInit, nil))
			case 1:
				if s.cookie != nil {
					s.send(s.tag, chunk(ChunkCookieEcho, 0, s.cookie))
				}
			case 2:
				s.send(tag, s.initChunk(ChunkInitAck, []byte("cookie")))
			default:
				s.sendOn(s.in.Byte(), tag, chunk(ChunkError, 0, []byte{0, s.in.Byte() & 15, 0, 8, 0, 0, 0, 1}))
			}
		case 14:
			s.a.PollRestart()
		default:
			n := min(int(s.in.Byte()), len(s.in))
			s.sendOn(arg, tag, s.in[:n])
			s.in = s.in[n:]
		}
		s.settle()
	}
}

func runScript(t *testing.T, in []byte) {
	if len(in) < 2 || len(in) > 5000 {
		return
	}
	cfg := Config{MaxKept: 8, RcvWindow: 20000, UDP: in[0]&8 != 0}
	s := &scripted{in: in[2:], bufs: map[Buf]bool{}}
	switch in[0] % 6 {
	case 0:
		s.rig = dialing(t, cfg, CookieWait)
	case 1:
		s.rig = dialing(t, cfg, CookieEchoed)
	case 2, 3:
		s.rig = manyHomed(t, cfg, 3)
	default:
		s.rig = listening(t, cfg)
	}
	s.run()
	s.a.Abort()
	s.settle()
	if len(s.bufs) != 0 || len(s.kept) != 0 {
		t.Fatalf("%d buffers and %d kept chunks are missing", len(s.bufs), len(s.kept))
	}
	if s.a.State() != Closed || s.a.Deadline() != 0 {
		t.Fatalf("%v with a timer at %v after the end", s.a.State(), s.a.Deadline())
	}
}

// FuzzScript makes a peer and the owner of an association do anything: the accounts must stay correct, and every
// buffer and chunk must be returned once.
func FuzzScript(f *testing.F) {
	for how := range byte(16) {
		f.Add([]byte{how, 0, 0xf0, 9, 200, 3, 0x02, 5, 4, 0x07, 0x12, 1, 0x46, 40, 0x04, 3, 5, 1, 0x0d, 1, 0x1d, 0x0c})
	}
	f.Fuzz(runScript)
}

// TestScriptRandom runs FuzzScript on random bytes.
func TestScriptRandom(t *testing.T) {
	testenv.Scripts(t, 500, 1500, runScript)
}
