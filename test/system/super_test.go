package system

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/tcp"
)

// frames returns the whole frames in a pcapng file that iwarpctl wrote.
func frames(t *testing.T, file string) (all [][]byte) {
	t.Helper()
	b := testenv.ReadFile(t, file)
	const enhancedPacket = 6
	le := binary.LittleEndian
	for len(b) >= 12 {
		kind, n := le.Uint32(b), int(le.Uint32(b[4:]))
		if n < 12 || n > len(b) {
			break // the last one may be incomplete
		}
		if kind == enhancedPacket {
			captured, size := le.Uint32(b[20:]), le.Uint32(b[24:])
			if captured != size {
				t.Fatalf("a frame of %d bytes has only %d in the capture", size, captured)
			}
			all = append(all, b[28:28+captured])
		}
		b = b[n:]
	}
	return all
}

// TestSuperFramesSegmented sends super-frames through a bridge to an interface without segmentation offload, where
// the kernel segments them, and checks in a capture at the receiver that each segment holds whole FPDUs.
func TestSuperFramesSegmented(t *testing.T) { links(t, superFramesSegmented) }

func superFramesSegmented(t *testing.T, link string) {
	testenv.RequireRoot(t)
	for _, markers := range []string{"false", "true"} {
		t.Run("markers "+markers, func(t *testing.T) {
			w := testenv.NewBridged(t, 1500)
			a, b := newHost(t, &w.A, link, "--mpa-markers="+markers), newHost(t, &w.B, link, "--mpa-markers="+markers)
			dir, there := t.TempDir(), t.TempDir()
			file, captured := filepath.Join(dir, "f"), filepath.Join(dir, "out.pcapng")
			sum := randomFile(t, file, 8<<20)
			capture := testenv.Start(t, b.command("capture", "--host", ":7176", "-w", captured))
			testenv.Until(t, "the capture", func() bool { fi, err := os.Stat(captured); return err == nil && fi.Size() > 0 })
			b.serve(there)
			a.must("cp", file, b.remote("g"))
			checkFile(t, filepath.Join(there, "g"), sum)
			capture.Signal(unix.SIGINT)
			capture.Wait(limit)
			if n := a.counter("engine.tx_super"); n == 0 {
				t.Error("no super-frame was sent")
			}
			if n := b.counter("engine.rx_super"); n != 0 {
				t.Errorf("%d super-frames were received, want all cut", n)
			}

			var framing mpa.Receiver
			var next serial.Num
			segments, fpdus, started := 0, 0, false
			for _, f := range frames(t, captured) {
				var p pkt.Packet
				var h tcp.Header
				if p.Parse(f, len(f)) != nil || p.Flow.LocalPort != 7176 || p.Proto != pkt.ProtoTCP {
					continue
				}
				l4 := f[p.L4Off:][:p.L4Len]
				n, err := h.Decode(l4)
				if err != nil || len(f)-14 > 1500 {
					t.Fatalf("a packet of %d bytes: %v", len(f)-14, err)
				}
				payload := bytes.Clone(l4[n:])
				switch {
				case len(payload) == 0:
				case !started && bytes.HasPrefix(payload, []byte("MPA ID Req Frame")):
					next, started = h.Seq.Add(len(payload)), true
					framing.Init(true, markers == "true", next)
				case started && next.Less(h.Seq):
					t.Logf("the capture has a gap after %d segments", segments)
					started = false
				case started && h.Seq == next:
					next = h.Seq.Add(len(payload))
					segments++
					framing.HandleStream(payload)
					for {
						var d mpa.FPDU
						ok, err := framing.PollFPDU(&d)
						if err != nil {
							t.Fatalf("segment %d: %v", segments, err)
						}
						if !ok {
							break
						}
						fpdus++
					}
					if framing.Held() != 0 {
						t.Fatalf("segment %d ends within an FPDU", segments)
					}
				}
			}
			if segments < 100 || fpdus < segments {
				t.Errorf("%d segments and %d FPDUs in the capture, want at least 100", segments, fpdus)
			}
			t.Logf("%d segments, each of whole FPDUs, %d in all; %d super-frames sent", segments, fpdus, a.counter("engine.tx_super"))
		})
	}
}
