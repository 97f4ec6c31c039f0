package system

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestSeveralQueues runs 32 queue pairs between two daemons on a veth pair with two queues: each of the two workers of
// either daemon must carry a share of the data. XDP is native, since in generic mode a veth delivers what is sent from
// queues 0 and 1 on queue 0.
func TestSeveralQueues(t *testing.T) {
	t.Run("packet", func(t *testing.T) { severalQueues(t, "--link=packet") })
	t.Run("xdp", func(t *testing.T) { severalQueues(t, "--link=xdp", "--xdp-mode=native") })
}

// TestSomeQueues checks that a daemon that serves some of the queues warns of the others only if their frames do not
// reach it: packet sockets receive those of all queues.
func TestSomeQueues(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVethQueues(t, 1500, 2)
	for _, link := range []string{"packet", "xdp"} {
		h := newHost(t, &v.A, "--queues", "0", "--link", link)
		if warned := strings.Contains(h.daemon.String(), "are left to the kernel"); warned != (link == "xdp") {
			t.Errorf("link %s: warned %v", link, warned)
		}
		h.daemon.Signal(unix.SIGTERM)
		h.daemon.Wait(limit)
	}
}

func severalQueues(t *testing.T, args ...string) {
	testenv.RequireRoot(t)
	const queues = 2
	v := testenv.NewVethQueues(t, 1500, queues)
	dir := t.TempDir()
	metrics := func(name string) string { return filepath.Join(dir, name) }
	a := newHost(t, &v.A, append(args, "--metrics", "unix:"+metrics("a"))...)
	b := newHost(t, &v.B, append(args, "--metrics", "unix:"+metrics("b"))...)
	testenv.Start(t, b.command("perf", "write", "--server")).Expect("listening on")
	const qps, count, size = 32, 64, 64 << 10
	for _, op := range []string{"write", "read"} {
		a.must("perf", op, "--client", b.end.Addr4.String(), "--mode", "bw", "--qps", fmt.Sprint(qps), "--size", fmt.Sprint(size), "--iterations", fmt.Sprint(count))
	}
	const all = qps * count * size
	for _, c := range []struct{ host, counter string }{
		{"a", "tx_bytes"}, {"b", "rx_bytes"}, // Writes
		{"b", "tx_bytes"}, {"a", "rx_bytes"}, // Read Responses
	} {
		for w := range queues {
			// Connections are spread by chance.
			if n := ofWorker(t, metrics(c.host), c.counter, w); n < all/qps {
				t.Errorf("host %s, worker %d: %s is %d; want at least those of one queue pair, %d", c.host, w, c.counter, n, all/qps)
			}
		}
	}
	for _, h := range []*host{a, b} {
		if n := h.counter("engine.rx_wrong_queue_dropped"); n > 0 {
			t.Errorf("%d frames were dropped on their way to another worker", n)
		}
	}
}

// ofWorker returns a counter of one worker, from the Prometheus metrics on a Unix socket.
func ofWorker(t *testing.T, socket, counter string, worker int) int {
	t.Helper()
	c := http.Client{Timeout: limit, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}}
	resp, err := c.Get("http://daemon/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(fmt.Sprintf(`(?m)^iwarpd_worker_%s_total\{interface="[^"]*",worker="%d"\} (\S+)$`, counter, worker)).FindSubmatch(body)
	if m == nil {
		t.Fatalf("no %s of worker %d in %s", counter, worker, tail(string(body), 5))
	}
	n, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}
