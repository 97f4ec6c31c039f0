package mpa

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// segment is the payload of a TCP segment of a capture.
type segment struct {
	initiator bool
	data      []byte
}

// capture reads testdata/name, which has one segment per line.
func capture(t *testing.T, name string) (segs []segment) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		switch line := sc.Text(); {
		case line == "" || line[0] == '#':
		case line[0] == '>' || line[0] == '<':
			segs = append(segs, segment{line[0] == '>', testenv.Unhex(t, line[2:])})
		default:
			t.Fatalf("%s: %q", name, line)
		}
	}
	return segs
}

// TestCaptures replays connections between two soft-iWARP peers: our two sides must make the same startup frames, the
// Receiver must take every segment as captured, and the Framer must make the same FPDUs.
func TestCaptures(t *testing.T) {
	siw := Config{Rev: 2, Enhanced: true, IRD: 1, ORD: 1}
	for _, tt := range []struct {
		name   string
		cfg    func(*Config)
		params Params
		fpdus  int // of the initiator
	}{
		{"siw-rping-default", func(*Config) {}, Params{Rev: 2, Enhanced: true, IRD: 1, ORD: 1}, 9},
		{"siw-rping-crc", func(c *Config) { c.CRC = true }, Params{CRC: true, Rev: 2, Enhanced: true, IRD: 1, ORD: 1}, 9},
		{"siw-rping-p2p", func(c *Config) { c.P2P, c.RTR = true, RTRs(RTRWrite|RTRRead) },
			Params{Rev: 2, Enhanced: true, IRD: 1, ORD: 1, RTR: RTRWrite}, 10},
		{"siw-ib_read_bw", func(c *Config) { c.IRD, c.ORD = 128, 128 }, Params{Rev: 2, Enhanced: true, IRD: 128, ORD: 128}, 128},
	} {
		t.Run(tt.name, func(t *testing.T) {
			segs := capture(t, tt.name)
			ic, rc := siw, siw
			tt.cfg(&ic)
			tt.cfg(&rc)
			rc.RTR = AllRTRs
			i, r := NewInitiator(ic, t0), NewResponder(rc, t0)
			if got := frameOf(t, i); !bytes.Equal(got, segs[0].data) {
				t.Fatalf("our request  %x\nsoft-iWARP's %x", got, segs[0].data)
			}
			give(t, r, segs[0].data)
			event(t, r, EventRequest)
			if err := r.Accept(nil, -1, -1); err != nil {
				t.Fatal(err)
			}
			if got := frameOf(t, r); !bytes.Equal(got, segs[1].data) {
				t.Fatalf("our reply    %x\nsoft-iWARP's %x", got, segs[1].data)
			}
			give(t, i, segs[1].data)
			if diff := cmp.Diff(tt.params, r.Result()); diff != "" {
				t.Errorf("responder (-want +got):\n%s", diff)
			}
			tt.params.Initiator = true
			if diff := cmp.Diff(tt.params, i.Result()); diff != "" {
				t.Errorf("initiator (-want +got):\n%s", diff)
			}

			crc := tt.params.CRC
			for _, initiator := range []bool{true, false} {
				var rx Receiver
				var tx Framer
				rx.Init(crc, false, 1)
				tx.Init(crc, false, 1)
				var in, out []byte
				var p FPDU
				n := 0
				for _, s := range segs[2:] {
					if s.initiator != initiator {
						continue
					}
					in = append(in, s.data...)
					rx.HandleStream(s.data)
					for {
						ok, err := rx.PollFPDU(&p)
						if err != nil {
							t.Fatalf("FPDU %d: %v", n, err)
						}
						if !ok {
							break
						}
						n++
						out = append(out, compose(&tx, serial.Num(1+len(out)), joined(p.ULPDU))...)
					}
				}
				if initiator && n != tt.fpdus || n == 0 {
					t.Errorf("%d FPDUs; want %d", n, tt.fpdus)
				}
				if len(out) != len(in)-rx.Held() || !bytes.Equal(out, in[:len(out)]) {
					t.Errorf("initiator %v: what we composed differs from what was sent", initiator)
				}
			}
		})
	}
}
