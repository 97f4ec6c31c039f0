package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/docs"
	"github.com/iwarpd/iwarpd/internal/histogram"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func testCollector() collector {
	return collector{
		counters: func() []*ctrlpb.Counter {
			return []*ctrlpb.Counter{{Name: "ctrl.clients", Value: 3}, {Name: "engine.rx_frames", Value: 1 << 40}, {Name: "xdp.passed", Value: 7}}
		},
		workers: func() (all []dataplane.Stats, silent []int) {
			var times histogram.Histogram
			times.Add(3 * time.Microsecond)
			times.Add(time.Minute)
			return []dataplane.Stats{
				{RxStats: dataplane.RxStats{RxBytes: 11}, RTTs: times.Counts()},
				{RTTs: times.Counts(), Completions: times.Counts(), RxStats: dataplane.RxStats{RxBytes: 22}, ConnStats: dataplane.ConnStats{Conns: 2}},
			}, []int{1}
		},
		device: func(worker int) string { return []string{"eth0", "eth1"}[worker] },
		status: func() *ctrlpb.StatusReply {
			return &ctrlpb.StatusReply{Devices: []*ctrlpb.DeviceAttr{{Interface: "eth0", Transport: "native, zero copy", Link: "up", Speed: 8e9}, {Interface: "eth1", Transport: "generic, copy", Down: "removed", Link: "down"}}}
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
	for range 2 { // the second one finds the socket of the first
		l, err := listenMetrics("unix:" + path)
		if err != nil {
			t.Fatal(err)
		}
		l = l.(*ctrl.UnixListener).UnixListener // whose Close leaves the file
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			serveMetrics(ctx, l, metricsHandler(testCollector()), zap.NewNop())
		}()
		code, text := scrape(t, "unix", path)
		for _, want := range []string{
			"# TYPE iwarpd_ctrl_clients gauge", "iwarpd_ctrl_clients 3\n", "# TYPE iwarpd_engine_rx_frames_total counter",
			"iwarpd_engine_rx_frames_total 1.099511627776e+12\n", "iwarpd_xdp_passed_total 7\n",
			`iwarpd_worker_rx_bytes_total{interface="eth0",worker="0"} 11`, `iwarpd_worker_rx_bytes_total{interface="eth1",worker="1"} 22`,
			`iwarpd_worker_connections{interface="eth1",worker="1"} 2`, `iwarpd_worker_up{interface="eth0",worker="0"} 1`,
			`iwarpd_worker_up{interface="eth1",worker="1"} 0`, `iwarpd_build_info{version="devel"} 1`,
			`iwarpd_transport_info{interface="eth0",mode="native, zero copy"} 1`, `iwarpd_transport_info{interface="eth1",mode="generic, copy"} 1`,
			`iwarpd_link_up{interface="eth0"} 1`, `iwarpd_link_up{interface="eth1"} 0`, `iwarpd_link_speed_bytes{interface="eth0"} 1e+09`,
			`iwarpd_interface_up{interface="eth0"} 1`, `iwarpd_interface_up{interface="eth1"} 0`,
			`iwarpd_rtt_seconds_bucket{le="2e-06"} 0`, `iwarpd_rtt_seconds_bucket{le="4e-06"} 2`, `iwarpd_rtt_seconds_bucket{le="16.777216"} 2`,
			`iwarpd_rtt_seconds_bucket{le="+Inf"} 4`, "iwarpd_rtt_seconds_sum 120.000006\n", "iwarpd_rtt_seconds_count 4\n",
			"iwarpd_completion_latency_seconds_count 2\n",
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
	testenv.WriteFile(t, file, nil, 0o600)
	if _, err := listenMetrics("unix:" + file); err == nil {
		t.Error("a file was taken for a socket")
	}
	api := filepath.Join(t.TempDir(), "api") // of another type, so that a stream cannot connect to it
	l, err := net.Listen("unixpacket", api)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := listenMetrics("unix:" + api); err == nil {
		t.Error("the socket of an API was taken away")
	} else if err = metricsError(err); exitCode(err) != exitBusy {
		t.Errorf("exit code %d: %v", exitCode(err), err)
	}
	if c, err := net.Dial("unixpacket", api); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
}

// TestMetricsAgain checks that the socket for metrics is missed when its file is gone, and there again after SIGHUP.
func TestMetricsAgain(t *testing.T) {
	server, err := ctrl.New(ctrl.Config{}, ctrl.Options{Resolver: noHost{}, Devices: []ctrl.Device{{Name: "eth0", Steering: noHost{}}}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "m")
	core, logs := observer.New(zap.WarnLevel)
	d := &daemon{s: &settings{Metrics: "unix:" + path}, log: zap.New(core), server: server}
	if d.metrics, err = listenMetrics(d.s.Metrics); err != nil {
		t.Fatal(err)
	}
	defer func() { d.metrics.Close() }()
	ended := make(chan struct{}, 3)
	d.scrapes = func() {
		l := d.metrics
		go func() {
			serveMetrics(t.Context(), l, metricsHandler(testCollector()), d.log)
			ended <- struct{}{}
		}()
	}
	d.scrapes()
	for i := range 2 {
		scrape(t, "unix", path)
		if lost := d.warnLost(nil); len(lost) > 0 {
			t.Errorf("lost %v", lost)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		var lost []string
		for range 2 {
			if lost = d.warnLost(lost); !slices.Equal(lost, []string{path}) {
				t.Errorf("lost %v; want %s", lost, path)
			}
		}
		if n := logs.FilterMessageSnippet("is gone or is another program's").Len(); n != i+1 {
			t.Errorf("%d warnings about a file that is gone; want %d", n, i+1)
		}
		testenv.WriteFile(t, path, nil, 0o600)
		d.relisten()
		if st, err := os.Lstat(path); err != nil || !st.Mode().IsRegular() {
			t.Fatalf("the file of another program: %v, %v", st, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		d.relisten()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("the listener whose file was gone is still served")
		}
	}
	scrape(t, "unix", path)
}

// pipes is a listener whose connections a test makes.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { close(p.closed); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{} }

// TestScrapers checks that users of the host, who all may connect to a loopback address, cannot take the daemon's
// descriptors by connections for metrics, nor keep others out by requests that they never finish.
func TestScrapers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &pipes{make(chan net.Conn), make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go serveMetrics(ctx, l, http.NotFoundHandler(), zap.NewNop())
		var accepted atomic.Int32
		for range 2 * maxScrapers {
			client, c := net.Pipe()
			go func() {
				select {
				case l.conns <- c:
					accepted.Add(1)
				case <-l.closed:
					return
				}
				_, _ = client.Write([]byte("GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"))
				_, _ = io.Copy(io.Discard, client)
			}()
		}
		synctest.Wait()
		if n := accepted.Load(); n != maxScrapers {
			t.Errorf("%d connections are accepted; want %d", n, maxScrapers)
		}
		time.Sleep(10 * time.Second)
		if n := accepted.Load(); n != 2*maxScrapers {
			t.Errorf("%d connections are accepted later; want %d", n, 2*maxScrapers)
		}
	})
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

// TestDashboard checks that the metrics of the Grafana dashboard exist.
func TestDashboard(t *testing.T) {
	text := testenv.ReadFile(t, "../../deploy/grafana/iwarpd.json")
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
					t.Errorf("%s uses %s, which does not exist", p.Title, name)
				}
			}
		}
	}
}

// TestAlerts checks that the metrics of the alert rules exist, and that docs/troubleshooting.md names each alert.
func TestAlerts(t *testing.T) {
	text := testenv.ReadFile(t, "../../deploy/prometheus/iwarpd.rules.yml")
	page := testenv.ReadFile(t, "../../docs/troubleshooting.md")
	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllSubmatch(text, -1) {
		if !bytes.Contains(page, fmt.Appendf(nil, "`%s`", m[1])) {
			t.Errorf("docs/troubleshooting.md does not name %s", m[1])
		}
	}
	names := regexp.MustCompile(`iwarpd_[a-z0-9_]+`).FindAllString(string(text), -1)
	if len(names) < 6 {
		t.Fatalf("%d metrics in the alerts", len(names))
	}
	known := knownMetrics()
	for _, name := range names {
		if !known[name] {
			t.Errorf("an alert uses %s, which does not exist", name)
		}
	}
	for _, name := range []string{"iwarpd_worker_up", "iwarpd_interface_up"} { // 0: connections stand still or end
		if !slices.Contains(names, name) {
			t.Errorf("no alert uses %s", name)
		}
	}
}

// knownMetrics returns the names of the metrics of a daemon without clients.
func knownMetrics() map[string]bool {
	known := map[string]bool{"iwarpd_build_info": true}
	name := regexp.MustCompile(`iwarpd_[a-z0-9_]+`)
	for _, d := range []*prometheus.Desc{workerUp, interfaceUp, linkUp, linkSpeed, transportInfo} {
		known[name.FindString(d.String())] = true
	}
	for _, m := range perWorker {
		known[name.FindString(m.desc.String())] = true
	}
	for _, m := range histograms {
		known[name.FindString(m.desc.String())+"_bucket"] = true
	}
	for _, k := range allCounters() {
		known[name.FindString(counterDocs()[k.Name].desc(k.Name).String())] = true
	}
	return known
}

// allCounters returns the counters of a daemon without clients.
func allCounters() []*ctrlpb.Counter {
	s, err := ctrl.New(ctrl.Config{}, ctrl.Options{Resolver: noHost{}, Devices: []ctrl.Device{{Name: "eth0", Steering: noHost{}}}})
	if err != nil {
		return nil
	}
	s.Bind(countedEngine{})
	return s.Counters()
}

// TestDocument checks that docs/metrics.md has one row for each counter and no others,
// and that it marks the gauges.
func TestDocument(t *testing.T) {
	gauges := []string{
		"ctrl.clients", "ctrl.conns", "ctrl.ports", "ctrl.ports_time_wait", "ctrl.not_reloaded", "ctrl.program_detached",
		"engine.conns", "engine.free_slots", "engine.slots", "engine.held_frames", "engine.held_peak", "engine.timers",
		"sctp.assocs", "fragments.waiting", "fragments.bytes",
	}
	counters := allCounters()
	if len(counters) < 100 {
		t.Fatalf("%d counters", len(counters))
	}
	exists := make(map[string]bool)
	for _, k := range counters {
		exists[k.Name] = true
		d, ok := counterDocs()[k.Name]
		if !ok {
			t.Errorf("%s is not documented", k.Name)
		} else if d.gauge != slices.Contains(gauges, k.Name) {
			t.Errorf("%s: documented as a gauge: %v", k.Name, d.gauge)
		}
	}
	for name := range counterDocs() {
		if !exists[name] {
			t.Errorf("there is no counter %s", name)
		}
	}
	if rows := counterRow.FindAllString(docs.Metrics, -1); len(rows) != len(counterDocs()) {
		t.Errorf("%d rows for %d counters", len(rows), len(counterDocs()))
	}
}

// TestMetricNames checks a scrape of all metrics as `promtool check metrics` does, and
// that no metric has an octet or an abbreviated unit in its name.
func TestMetricNames(t *testing.T) {
	r := prometheus.NewRegistry()
	c := testCollector()
	c.counters = allCounters
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil || len(families) < 100 {
		t.Fatalf("%d metrics, %v", len(families), err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	unit := regexp.MustCompile(`octet|_(ns|us|ms|sec|kb|mb|mib)(_|$)`)
	for _, f := range families {
		if unit.MatchString(f.GetName()) {
			t.Errorf("%s: name the base unit", f.GetName())
		}
	}
}

// noHost replaces what ctrl needs of the host.
type noHost struct{}

func (noHost) Resolve(_, _ netip.Addr, _ string) (dataplane.Hop, error) { return dataplane.Hop{}, nil }
func (noHost) Watch(func())                                             {}
func (noHost) Claim(bpf.Endpoint) error                                 { return nil }
func (noHost) Unclaim(bpf.Endpoint) error                               { return nil }
func (noHost) SetAddresses([]netip.Addr) error                          { return nil }
func (noHost) SetVLANs([][]uint16) error                                { return nil }
func (noHost) Counters() (bpf.Counters, error)                          { return bpf.Counters{}, nil }

// countedEngine has one worker that has done nothing.
type countedEngine struct{ ctrl.Engine }

func (countedEngine) QueryConns([]dataplane.ConnID) (conns []dataplane.ConnInfo, silent []int) {
	return nil, nil
}
func (countedEngine) Stats() (all []dataplane.Stats, silent []int) {
	return make([]dataplane.Stats, 1), nil
}
func (countedEngine) Workers() int { return 1 }
