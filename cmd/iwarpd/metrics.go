package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
	"golang.org/x/net/netutil"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/docs"
	"github.com/iwarpd/iwarpd/internal/histogram"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// A counterDoc is the documentation of a counter.
type counterDoc struct {
	help  string
	gauge bool
}

// counterRow matches a row of the tables in docs/metrics.md.
var counterRow = regexp.MustCompile("(?m)^\\| `([a-z0-9_.]+)` \\| (gauge: )?(.+) \\|$")

// counterDocs parses docs/metrics.md, the only place that describes the counters.
var counterDocs = sync.OnceValue(func() map[string]counterDoc {
	all := make(map[string]counterDoc)
	for _, m := range counterRow.FindAllStringSubmatch(docs.Metrics, -1) {
		help := strings.ReplaceAll(m[3], "`", "")
		all[m[1]] = counterDoc{help: strings.ToUpper(help[:1]) + help[1:] + ".", gauge: m[2] != ""}
	}
	return all
})

// desc returns the name and the help of the metric of the counter called name.
func (d counterDoc) desc(name string) *prometheus.Desc {
	metric := "iwarpd_" + strings.ReplaceAll(name, ".", "_")
	if !d.gauge {
		metric += "_total"
	}
	return prometheus.NewDesc(metric, d.help, nil, nil)
}

func (d counterDoc) kind() prometheus.ValueType {
	if d.gauge {
		return prometheus.GaugeValue
	}
	return prometheus.CounterValue
}

// collector exports the daemon's counters to Prometheus. It reads them at each scrape.
type collector struct {
	counters func() []*ctrlpb.Counter
	workers  func() (all []dataplane.Stats, silent []int)
	device   func(worker int) string
	status   func() *ctrlpb.StatusReply
}

// Describe implements prometheus.Collector. It sends nothing, since the counters are
// known only once they are read.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for _, k := range c.counters() {
		d := counterDocs()[k.Name]
		ch <- prometheus.MustNewConstMetric(d.desc(k.Name), d.kind(), float64(k.Value))
	}
	workers, silent := c.workers()
	for i, w := range workers {
		ch <- prometheus.MustNewConstMetric(workerUp, prometheus.GaugeValue, oneIf(!slices.Contains(silent, i)), strconv.Itoa(i), c.device(i))
		for _, m := range perWorker {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, float64(m.value(&w)), strconv.Itoa(i), c.device(i))
		}
	}
	for _, m := range histograms {
		var sum histogram.Counts
		for i := range workers {
			sum.Add(m.value(&workers[i]))
		}
		ch <- prometheus.MustNewConstHistogram(m.desc, sum.Total(), sum.Sum.Seconds(), cumulative(&sum))
	}
	for _, d := range c.status().Devices {
		ch <- prometheus.MustNewConstMetric(interfaceUp, prometheus.GaugeValue, oneIf(d.Down == ""), d.Interface)
		if d.Link != "" {
			ch <- prometheus.MustNewConstMetric(linkUp, prometheus.GaugeValue, oneIf(d.Link == "up"), d.Interface)
		}
		if d.Speed != 0 {
			ch <- prometheus.MustNewConstMetric(linkSpeed, prometheus.GaugeValue, float64(d.Speed)/8, d.Interface)
		}
		ch <- prometheus.MustNewConstMetric(transportInfo, prometheus.GaugeValue, 1, d.Interface, d.Transport)
	}
}

// oneIf returns 1 if ok is true, and 0 otherwise.
func oneIf(ok bool) float64 {
	if ok {
		return 1
	}
	return 0
}

// histograms are the metrics that are histograms of seconds, summed over all workers.
var histograms = []struct {
	desc  *prometheus.Desc
	value func(*dataplane.Stats) *histogram.Counts
}{
	{prometheus.NewDesc("iwarpd_rtt_seconds", "Round-trip times measured by TCP and SCTP.", nil, nil),
		func(s *dataplane.Stats) *histogram.Counts { return &s.RTTs }},
	{prometheus.NewDesc("iwarpd_completion_latency_seconds", "Time from the taking of a work request of a send queue to its completion, one at a time of each queue pair.", nil, nil),
		func(s *dataplane.Stats) *histogram.Counts { return &s.Completions }},
}

// cumulative returns the buckets of Prometheus: how many durations are at most a bound in seconds.
func cumulative(c *histogram.Counts) map[float64]uint64 {
	buckets, n := make(map[float64]uint64, histogram.Buckets), uint64(0)
	for i := range histogram.Buckets {
		n += c.Buckets[i]
		buckets[histogram.Bound(i).Seconds()] = n
	}
	return buckets
}

// What there is for each interface.
var (
	interfaceUp   = prometheus.NewDesc("iwarpd_interface_up", "1; 0 while the interface is gone, or its XDP program is detached.", []string{"interface"}, nil)
	linkUp        = prometheus.NewDesc("iwarpd_link_up", "1 while the link of the interface is up; 0 while it is down.", []string{"interface"}, nil)
	linkSpeed     = prometheus.NewDesc("iwarpd_link_speed_bytes", "Bytes per second that the link of the interface carries, where its driver reports them.", []string{"interface"}, nil)
	transportInfo = prometheus.NewDesc("iwarpd_transport_info", "1; a label has the mode taken, as iwarpctl status shows it.", []string{"interface", "mode"}, nil)
)

// workerUp distinguishes a stuck worker from one without traffic: the counters of both stand still.
var workerUp = workerDesc("up", "1; 0 while the worker does not answer within a second.")

// perWorker are the counters with a label for the worker.
var perWorker = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*dataplane.Stats) uint64
}{
	{workerDesc("turns_total", "Iterations of the worker's loop."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.Turns }},
	{workerDesc("sleeps_total", "Times the worker slept because it had nothing to do."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.Sleeps }},
	{workerDesc("rx_bytes_total", "Bytes of received frames."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.RxBytes }},
	{workerDesc("tx_bytes_total", "Bytes of sent frames."), prometheus.CounterValue, func(s *dataplane.Stats) uint64 { return s.TxBytes }},
	{workerDesc("connections", "Connections, including those in TIME-WAIT."), prometheus.GaugeValue, func(s *dataplane.Stats) uint64 { return s.Conns }},
}

func workerDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("iwarpd_worker_"+name, help, []string{"worker", "interface"}, nil)
}

// metricsHandler serves /metrics.
func metricsHandler(c collector) http.Handler {
	r := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "iwarpd_build_info", Help: "Always 1; the label version is the version of iwarpd.", ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	r.MustRegister(c, info, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	return mux
}

// parseMetrics parses the address to serve metrics on: "" for none, "unix:PATH", or
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
	if err != nil || !ap.Addr().IsLoopback() || ap.Port() == 0 {
		return "", "", errors.New("must be unix:PATH, or a loopback address and port like 127.0.0.1:9488; use a proxy for other addresses")
	}
	return "tcp", v, nil
}

// listenMetrics opens the socket for metrics. A Unix socket is accessible to the
// daemon's user and group. A socket file to which nothing listens is replaced.
func listenMetrics(v string) (l net.Listener, err error) {
	network, address, err := parseMetrics(v)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		l, err = ctrl.ListenUnix(network, address, 0o660, -1)
	} else {
		l, err = net.Listen(network, address)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics: %s: %w", v, printable.Reason(err))
	}
	return l, nil
}

// maxScrapers is the maximum number of connections for metrics. Every user of the host may connect to a loopback address,
// and no quota counts the descriptors that this takes.
const maxScrapers = 16

// serveMetrics serves until ctx is done or l is closed.
func serveMetrics(ctx context.Context, l net.Listener, h http.Handler, log *zap.Logger) {
	l = netutil.LimitListener(l, maxScrapers)
	s := &http.Server{Handler: h, ReadTimeout: 5 * time.Second, WriteTimeout: 15 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		log.Error("metrics: stopped serving", zap.Error(err))
	}
}
