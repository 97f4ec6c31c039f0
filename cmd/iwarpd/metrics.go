package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
)

// gauges are the counters that can go down.
var gauges = map[string]bool{
	"ctrl.clients": true, "ctrl.conns": true, "ctrl.ports": true, "ctrl.ports_resting": true, "ctrl.program_detached": true,
	"engine.conns": true, "engine.free_slots": true, "engine.slots": true, "engine.held_frames": true,
	"engine.held_peak": true, "engine.timers": true, "sctp.assocs": true,
	"fragments.waiting": true, "fragments.bytes": true,
}

// collector gives Prometheus the daemon's counters, which it reads when it is
// asked: the workers know nothing of it.
type collector struct {
	counters func() []*ctrlpb.Counter
	workers  func() []dataplane.Stats
}

// Describe implements prometheus.Collector: it names nothing, since what there
// is the counters tell.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for _, k := range c.counters() {
		name, kind := "iwarpd_"+strings.ReplaceAll(k.Name, ".", "_"), prometheus.GaugeValue
		if !gauges[k.Name] {
			name, kind = name+"_total", prometheus.CounterValue
		}
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, "Counter "+k.Name+" of iwarpctl stats.", nil, nil), kind, float64(k.Value))
	}
	for i, w := range c.workers() {
		for _, m := range perWorker {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, float64(m.value(&w)), strconv.Itoa(i))
		}
	}
}

// perWorker are the metrics that each worker has for itself.
var perWorker = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*dataplane.Stats) uint64
}{
	{workerDesc("turns_total", "Turns of the worker's loop."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.Turns }},
	{workerDesc("sleeps_total", "Times that the worker slept."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.Sleeps }},
	{workerDesc("rx_bytes_total", "Bytes of frames received."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.RxBytes }},
	{workerDesc("tx_bytes_total", "Bytes of frames sent."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.TxBytes }},
	{workerDesc("connections", "Connections, also those in TIME-WAIT."), prometheus.GaugeValue, func(s *dataplane.Stats) uint64 { return s.Conns }},
}

func workerDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("iwarpd_worker_"+name, help, []string{"worker"}, nil)
}

// metricsHandler serves /metrics. mode is how frames move.
func metricsHandler(c collector, mode string) http.Handler {
	r := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "iwarpd_build_info", Help: "1; the label has the version.", ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	transport := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "iwarpd_transport_info", Help: "1; the label has the mode taken, as iwarpctl status shows it.", ConstLabels: prometheus.Labels{"mode": mode},
	})
	transport.Set(1)
	r.MustRegister(c, info, transport, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	return mux
}

// parseMetrics checks where metrics are served: "" not at all, "unix:PATH", or
// an address and port of the loopback interface.
func parseMetrics(v string) (network, address string, err error) {
	if v == "" {
		return "", "", nil
	}
	if path, ok := strings.CutPrefix(v, "unix:"); ok {
		if path == "" || len(path) > 107 {
			return "", "", errors.New("must be unix: and a path of 1 to 107 bytes")
		}
		return "unix", path, nil
	}
	ap, err := netip.ParseAddrPort(v)
	if err != nil || !ap.Addr().IsLoopback() {
		return "", "", errors.New("must be unix:PATH, or a loopback address and port like 127.0.0.1:9488; for others put a proxy in front")
	}
	return "tcp", v, nil
}

// listenMetrics opens the socket that metrics are served on. A Unix socket is
// for the daemon's user and group, and one that nobody serves any more is
// taken away.
func listenMetrics(v string) (net.Listener, error) {
	network, address, err := parseMetrics(v)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen(network, address)
	if err != nil && network == "unix" {
		if c, derr := net.Dial(network, address); derr == nil {
			c.Close()
		} else if st, serr := os.Lstat(address); serr == nil && st.Mode().Type() == os.ModeSocket {
			if err = os.Remove(address); err == nil {
				l, err = net.Listen(network, address)
			}
		}
	}
	if err == nil && network == "unix" {
		if err = os.Chmod(address, 0o660); err != nil {
			l.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return l, nil
}

// serveMetrics serves until ctx is done.
func serveMetrics(ctx context.Context, l net.Listener, h http.Handler, log *zap.Logger) {
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		log.Error("metrics are not served any more", zap.Error(err))
	}
}
