// Package kerneltcp tests the data plane's TCP against the kernel's: bulk transfers and requests over good and bad
// wires, without each option, under a SYN flood, and with thousands of connections. `go test` runs a short matrix;
// KERNELTCP=full in the environment runs all of it.
package kerneltcp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
)

// full reports whether the whole matrix is requested.
func full() bool { return os.Getenv("KERNELTCP") == "full" }

// parallel lets a test run beside others, each in its own namespaces: most of its time is waiting. A full run
// measures, so there the tests run one at a time.
func parallel(t *testing.T) {
	t.Helper()
	if !full() {
		t.Parallel()
	}
}

func TestMain(m *testing.M) { testenv.Main(m) }

// bytestream builds the program, once.
func bytestream(t testing.TB) string { return testenv.Program(t, "test/bytestream") }

// report is what bytestream prints; see there.
type report struct {
	Stack, Do              string
	Done                   int
	Sent, Received         int64
	SentHash, ReceivedHash string
	Seconds, MBps          float64
	Requests               int
	P50, P99               float64
	Errors                 []string
	TCP                    []tcp.Stats
	Engine                 []dataplane.Stats
	Left                   int
	HeapMiB                float64
	Goroutines             int
	OpenSeconds            []float64
}

// proc is a running bytestream.
type proc struct {
	t      testing.TB
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
}

func start(t testing.TB, ns *testenv.Namespace, args ...string) *proc {
	t.Helper()
	p := &proc{t: t, cmd: ns.Command(bytestream(t), args...)}
	p.cmd.Stderr = &p.stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(stdout)
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	})
	return p
}

// ready waits until a listener listens.
func (p *proc) ready() {
	p.t.Helper()
	if line, err := p.out.ReadString('\n'); err != nil || line != "ready\n" {
		_ = p.cmd.Wait()
		p.t.Fatalf("%v: %q %v\n%s", p.cmd.Args, line, err, p.stderr.String())
	}
}

// wait waits for the end and returns the report.
func (p *proc) wait(limit time.Duration) (*report, error) {
	p.t.Helper()
	kill := time.AfterFunc(limit, func() { _ = p.cmd.Process.Kill() })
	out, _ := io.ReadAll(p.out)
	err := p.cmd.Wait()
	if !kill.Stop() {
		return nil, fmt.Errorf("%v: not done within %v\n%s", p.cmd.Args[4:], limit, p.stderr.String())
	}
	r := &report{}
	if jerr := json.Unmarshal(out, r); jerr != nil || err != nil {
		return nil, fmt.Errorf("%v: %v, %v\n%s", p.cmd.Args[4:], err, jerr, p.stderr.String())
	}
	return r, nil
}

// place is the location of one side of a run, and whose TCP it uses.
type place struct {
	end   *testenv.End
	stack string // ours or kernel
	args  []string
}

var nextPort atomic.Uint32

// run makes the program talk between two places. Every run uses its own port.
func run(t testing.TB, server, client place, serverDo, clientDo string, v6 bool, args ...string) (s, c *report, err error) {
	t.Helper()
	return runWhile(t, server, client, serverDo, clientDo, v6, nil, args...)
}

// runWhile is run with an action on the two programs meanwhile.
func runWhile(t testing.TB, server, client place, serverDo, clientDo string, v6 bool, while func(s, c *proc), args ...string) (s, c *report, err error) {
	t.Helper()
	addr := server.end.Addr4
	if v6 {
		addr = server.end.Addr6
	}
	at := netip.AddrPortFrom(addr, uint16(7000+nextPort.Add(1)%10000)).String()
	const limit = 3 * time.Minute
	ps := start(t, server.end.NS, append(append([]string{"-stack", server.stack, "-i", server.end.Name, "-listen", at, "-do", serverDo}, server.args...), args...)...)
	ps.ready()
	pc := start(t, client.end.NS, append(append([]string{"-stack", client.stack, "-i", client.end.Name, "-connect", at, "-do", clientDo}, client.args...), args...)...)
	if while != nil {
		while(ps, pc)
	}
	c, err = pc.wait(limit)
	if err != nil {
		return nil, nil, err
	}
	if s, err = ps.wait(limit); err != nil {
		return nil, nil, err
	}
	return s, c, nil
}

// check fails the test unless both sides report success: every byte arrived, both ends closed gracefully, and nothing
// is left.
func check(t testing.TB, s, c *report) {
	t.Helper()
	for _, r := range []*report{s, c} {
		if len(r.Errors) > 0 {
			t.Errorf("%s %s: %s", r.Stack, r.Do, strings.Join(r.Errors, "; "))
		}
		if r.Left != 0 {
			t.Errorf("%s %s: %d connections left", r.Stack, r.Do, r.Left)
		}
		for _, e := range r.Engine {
			if e.FreeSlots != e.Slots || e.HeldFrames != 0 {
				t.Errorf("%s: %d of %d TX slots free, %d frames held after the end", r.Do, e.FreeSlots, e.Slots, e.HeldFrames)
			}
			if e.Faults != 0 {
				t.Errorf("%s: %d faults", r.Do, e.Faults)
			}
		}
	}
	if s.Sent != c.Received || c.Sent != s.Received || s.SentHash != c.ReceivedHash || c.SentHash != s.ReceivedHash {
		t.Errorf("server sent %d (%s), client received %d (%s); client sent %d (%s), server received %d (%s)",
			s.Sent, s.SentHash, c.Received, c.ReceivedHash, c.Sent, c.SentHash, s.Received, s.ReceivedHash)
	}
	if s.Done != c.Done {
		t.Errorf("%d connections ended at the server, %d at the client", s.Done, c.Done)
	}
}

// counters reads a namespace's TCP counters.
func counters(t testing.TB, ns *testenv.Namespace) map[string]int64 {
	t.Helper()
	m := map[string]int64{}
	ns.Run(t, func() error {
		for _, f := range []string{"/proc/thread-self/net/snmp", "/proc/thread-self/net/netstat"} {
			b, err := os.ReadFile(f)
			if err != nil {
				return err
			}
			lines := strings.Split(string(b), "\n")
			for i := 0; i+1 < len(lines); i += 2 {
				names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
				for j := 1; j < len(names) && j < len(values); j++ {
					var v int64
					if _, err := fmt.Sscan(values[j], &v); err == nil {
						m[names[0]+names[j]] = v
					}
				}
			}
		}
		return nil
	})
	return m
}

// unclean lists the kernel counters that stay constant as long as every connection is opened and closed gracefully.
var unclean = []string{
	"Tcp:EstabResets", "Tcp:AttemptFails", "Tcp:InErrs", "Tcp:InCsumErrors",
	"TcpExt:TCPAbortOnData", "TcpExt:TCPAbortOnClose", "TcpExt:TCPAbortOnTimeout", "TcpExt:TCPAbortFailed",
	"TcpExt:TCPChallengeACK", "TcpExt:TCPSYNChallenge", "TcpExt:PAWSEstab", "TcpExt:PAWSActive",
	"TcpExt:TCPSACKDiscard", "TcpExt:TCPSACKReneging",
}

// clean runs f, which returns how many segments our side has retransmitted, and fails the test if a kernel's counters
// show an error meanwhile. It returns the retransmissions of all sides: on a busy machine a FIN or its
// acknowledgement may be late, and then the second copy, or the answer to it, finds the connection closed.
func clean(t testing.TB, ns []*testenv.Namespace, f func() (again uint64)) (again uint64) {
	t.Helper()
	var before []map[string]int64
	for _, n := range ns {
		before = append(before, counters(t, n))
	}
	again = f()
	rsts := uint64(0)
	for i, n := range ns {
		after := counters(t, n)
		for _, k := range unclean {
			if d := after[k] - before[i][k]; d != 0 {
				t.Errorf("kernel in %s: %s went up by %d", n.Name, k, d)
			}
		}
		again += uint64(after["Tcp:RetransSegs"] - before[i]["Tcp:RetransSegs"])
		rsts += uint64(after["Tcp:OutRsts"] - before[i]["Tcp:OutRsts"])
	}
	if rsts > again {
		t.Errorf("%d RSTs of the kernel's, and only %d segments were sent again", rsts, again)
	}
	return again
}

// sysctl sets a sysctl of the namespace.
func sysctl(t testing.TB, ns *testenv.Namespace, name, value string) {
	t.Helper()
	if err := ns.Do(func() error { return os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0) }); err != nil {
		t.Fatalf("sysctl %s=%s: %v", name, value, err)
	}
}
