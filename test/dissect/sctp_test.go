package dissect

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestDissectSCTP is TestDissect over SCTP, of which tshark knows all but the DDP
// segments.
func TestDissectSCTP(t *testing.T) {
	for _, tc := range []struct {
		name       string
		s          iwarp.Startup
		v6         bool
		indication string
		ppids      string // of segments and of session control
	}{
		{"RFC5043", iwarp.Startup{Transport: iwarp.SCTP}, false, "0x00000001", "16 17"},
		{"IPv6", iwarp.Startup{Transport: iwarp.SCTP}, true, "0x00000001", "16 17"},
		{"draft", iwarp.Startup{Transport: iwarp.SCTPDraft}, false, "0x00000002", "1 2"},
		{"UDP", iwarp.Startup{Transport: iwarp.SCTP, UDP: true}, true, "0x00000001", "16 17"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCapture()
			record(t, c, tc.s, tc.v6)
			file := filepath.Join(t.TempDir(), "wire.pcap")
			c.mu.Lock()
			err := os.WriteFile(file, c.b, 0o644)
			c.mu.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			args := []string{"-T", "fields", "-E", "separator=;", "-E", "aggregator=,"}
			for _, f := range []string{"frame.number", "frame.protocols", "sctp.checksum.status", "udp.checksum.status", "_ws.malformed", "_ws.expert.message",
				"sctp.adaptation_layer_indication", "sctp.chunk_type", "sctp.data_u_bit", "sctp.data_b_bit", "sctp.data_e_bit", "sctp.data_payload_proto_id"} {
				args = append(args, "-e", f)
			}
			chunks, ppids, indications := map[string]int{}, map[string]int{}, 0
			for line := range strings.Lines(testenv.Tshark(t, file, args...)) {
				f := strings.Split(strings.TrimSuffix(line, "\n"), ";")
				if len(f) != 12 {
					t.Fatalf("tshark wrote %q", line)
				}
				if strings.Contains(f[1], "malformed") || f[4] != "" || !strings.Contains(f[1], "sctp") || strings.Contains(f[1], "udp") != tc.s.UDP {
					t.Errorf("frame %s is malformed, or not SCTP: %s", f[0], f[1])
				}
				if f[2] != "1" || tc.s.UDP && f[3] != "1" {
					t.Errorf("frame %s: checksum status %s of SCTP, %s of UDP", f[0], f[2], f[3])
				}
				if f[5] != "" && !strings.Contains(f[5], "retransmi") { // a busy machine brings that about
					t.Errorf("frame %s: %s", f[0], f[5])
				}
				if f[6] != "" {
					if indications++; f[6] != tc.indication {
						t.Errorf("frame %s: indication %s", f[0], f[6])
					}
				}
				for _, bits := range f[8:11] {
					if strings.Trim(bits, "1,True") != "" {
						t.Errorf("frame %s: U, B and E are %v", f[0], f[8:11])
					}
				}
				for v := range strings.SplitSeq(f[7], ",") {
					chunks[v]++
				}
				for v := range strings.SplitSeq(f[11], ",") {
					ppids[v]++
				}
			}
			segment, control, _ := strings.Cut(tc.ppids, " ")
			delete(ppids, "")
			if indications < 2 || ppids[segment] < 100 || ppids[control] < 3 || len(ppids) != 2 {
				t.Errorf("%d indications, PPIDs %v", indications, ppids)
			}
			for _, chunk := range []string{"0", "1", "2", "3", "10", "11"} { // DATA, SACK, and the set-up
				if chunks[chunk] == 0 {
					t.Errorf("no chunk of type %s among %v", chunk, chunks)
				}
			}
			t.Logf("chunks %v, PPIDs %v", chunks, ppids)
		})
	}
}
