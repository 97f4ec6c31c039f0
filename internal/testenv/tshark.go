package testenv

import (
	"bytes"
	"errors"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// Tshark returns the output of tshark for a capture, with the checksums of all layers verified.
// Only the dissectors of iWARP and SCTP are enabled, so that random ports and payloads are not
// taken for other protocols.
func Tshark(t testing.TB, file string, args ...string) string {
	t.Helper()
	tshark := RequireTool(t, "tshark")
	others, err := otherDissectors()
	if err != nil {
		t.Fatalf("tshark -G heuristic-decodes: %v", err)
	}
	all := []string{
		"-n", "-r", file, "-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE", "-o", "tcp.check_checksum:TRUE",
		"-o", "sctp.checksum:CRC 32c", "-o", "sctp.ulp_dissection:FALSE", "-o", "tcp.try_heuristic_first:TRUE",
	}
	cmd := exec.Command(tshark, append(append(all, others...), args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark: %v: %s", err, stderr.Bytes())
	}
	return string(out)
}

// otherDissectors returns the options that disable all heuristic dissectors over TCP except MPA,
// and all over DDP.
var otherDissectors = sync.OnceValues(func() (options []string, err error) {
	out, err := exec.Command("tshark", "-G", "heuristic-decodes").Output()
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) > 1 && (f[0] == "tcp" || f[0] == "iwarp_ddp_rdmap") && f[1] != "iwarp_mpa" {
			options = append(options, "--disable-protocol", f[1])
		}
	}
	if len(options) == 0 {
		return nil, errors.New("no protocol over TCP or DDP is named")
	}
	return options, nil
})
