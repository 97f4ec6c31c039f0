package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
)

func testCollector() collector {
	return collector{
		counters: func() []*ctrlpb.Counter {
			return []*ctrlpb.Counter{{Name: "ctrl.clients", Value: 3}, {Name: "engine.rx_frames", Value: 1 << 40}, {Name: "xdp.passed", Value: 7}}
		},
		workers: func() []dataplane.Stats {
			return []dataplane.Stats{{RxStats: dataplane.RxStats{RxBytes: 11}}, {RxStats: dataplane.RxStats{RxBytes: 22}, ConnStats: dataplane.ConnStats{Conns: 2}}}
		},
	}
}

func scrape(t *testing.T, network, address string) (int, string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}}
	r, err := c.Get("http://iwarpd/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func TestMetrics(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m")
	for range 2 { // the second finds the socket that the first left
		l, err := listenMetrics("unix:" + path)
		if err != nil {
			t.Fatal(err)
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			serveMetrics(ctx, l, metricsHandler(testCollector(), "native, zero copy"), zap.NewNop())
		}()
		code, text := scrape(t, "unix", path)
		for _, want := range []string{
			"# TYPE iwarpd_ctrl_clients gauge", "iwarpd_ctrl_clients 3\n", "# TYPE iwarpd_engine_rx_frames_total counter",
			"iwarpd_engine_rx_frames_total 1.099511627776e+12\n", "iwarpd_xdp_passed_total 7\n",
			`iwarpd_worker_rx_bytes_total{worker="0"} 11`, `iwarpd_worker_rx_bytes_total{worker="1"} 22`,
			`iwarpd_worker_connections{worker="1"} 2`, `iwarpd_build_info{version="devel"} 1`, `iwarpd_transport_info{mode="native, zero copy"} 1`,
			"\nprocess_resident_memory_bytes ", "\nprocess_open_fds ", "\ngo_gc_duration_seconds_count ", "\ngo_goroutines ",
		} {
			if code != http.StatusOK || !strings.Contains(text, want) {
				t.Errorf("status %d, no %q in:\n%s", code, want, text)
			}
		}
		if _, err := listenMetrics("unix:" + path); err == nil {
			t.Error("a socket that is served was taken away")
		} else if err = metricsError(err); exitCode(err) != exitBusy || !strings.Contains(err.Error(), "--metrics") {
			t.Errorf("exit code %d: %v", exitCode(err), err)
		}
		cancel()
		<-done
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenMetrics("unix:" + file); err == nil {
		t.Error("a file was taken for a socket")
	}
}

func TestParseMetrics(t *testing.T) {
	for v, ok := range map[string]bool{
		"": true, "127.0.0.1:9488": true, "[::1]:9488": true, "unix:/run/iwarpd/metrics.sock": true,
		"0.0.0.0:9488": false, ":9488": false, "10.0.0.1:9488": false, "localhost": false, "unix:": false, "[::]:1": false,
	} {
		if _, _, err := parseMetrics(v); (err == nil) != ok {
			t.Errorf("%q: %v", v, err)
		}
	}
}

// The dashboard asks for metrics that there are: those of the counters that the
// daemon's packages have, and the workers'.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../../deploy/grafana/iwarpd.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil || len(board.Panels) < 6 {
		t.Fatalf("%d panels, %v", len(board.Panels), err)
	}
	known := knownMetrics()
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			for _, name := range regexp.MustCompile(`iwarpd_[a-z0-9_]+`).FindAllString(target.Expr, -1) {
				if !known[name] {
					t.Errorf("%s asks for %s, which there is not", p.Title, name)
				}
			}
		}
	}
}

// The alerts ask for metrics that there are, too.
func TestAlerts(t *testing.T) {
	text, err := os.ReadFile("../../deploy/prometheus/iwarpd.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`iwarpd_[a-z0-9_]+`).FindAllString(string(text), -1)
	if len(names) < 6 {
		t.Fatalf("%d metrics in the alerts", len(names))
	}
	known := knownMetrics()
	for _, name := range names {
		if !known[name] {
			t.Errorf("an alert asks for %s, which there is not", name)
		}
	}
}

// knownMetrics are the names that a daemon without clients gives.
func knownMetrics() map[string]bool {
	known := map[string]bool{"iwarpd_build_info": true}
	for _, m := range perWorker {
		known[regexp.MustCompile(`iwarpd_worker_[a-z_]+`).FindString(m.desc.String())] = true
	}
	for _, k := range allCounters() {
		name := "iwarpd_" + strings.ReplaceAll(k.Name, ".", "_")
		if !gauges[k.Name] {
			name += "_total"
		}
		known[name] = true
	}
	return known
}

// allCounters are the counters of a daemon without clients.
func allCounters() []*ctrlpb.Counter {
	s, err := ctrl.New(ctrl.Config{}, ctrl.Options{Resolver: noHost{}, Steering: noHost{}})
	if err != nil {
		return nil
	}
	s.Bind(countedEngine{})
	return s.Counters()
}

// TestDocument: docs/metrics.md tells of each counter what it means and whether it
// is a gauge, and of none that there is not.
func TestDocument(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	told := make(map[string]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_.]+)` \\| (.+) \\|$").FindAllStringSubmatch(string(doc), -1) {
		if told[m[1]] != "" {
			t.Errorf("%s has two rows", m[1])
		}
		told[m[1]] = m[2]
	}
	counters := allCounters()
	if len(counters) < 100 {
		t.Fatalf("%d counters", len(counters))
	}
	for _, k := range counters {
		text := told[k.Name]
		delete(told, k.Name)
		if text == "" {
			t.Errorf("%s is not explained", k.Name)
		} else if strings.HasPrefix(text, "gauge: ") != gauges[k.Name] {
			t.Errorf("%s: %q, but gauge is %v", k.Name, text, gauges[k.Name])
		}
	}
	for name := range told {
		t.Errorf("%s is no counter", name)
	}
}

// noHost stands for what ctrl needs of the host.
type noHost struct{}

func (noHost) Resolve(_, _ netip.Addr) (dataplane.Hop, error) { return dataplane.Hop{}, nil }
func (noHost) Watch(func())                                   {}
func (noHost) Claim(bpf.Endpoint) error                       { return nil }
func (noHost) Unclaim(bpf.Endpoint) error                     { return nil }
func (noHost) Counters() (bpf.Counters, error)                { return bpf.Counters{}, nil }

// countedEngine has one worker that has done nothing.
type countedEngine struct{ ctrl.Engine }

func (countedEngine) QueryConns() (conns []dataplane.ConnInfo, silent []int) { return nil, nil }
func (countedEngine) Stats() []dataplane.Stats                               { return make([]dataplane.Stats, 1) }
func (countedEngine) Workers() int                                           { return 1 }
