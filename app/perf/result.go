package perf

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Result is the outcome of a measurement. Its JSON form is that of iwarpctl perf --json.
type Result struct {
	Op         string       `json:"op"`
	Mode       string       `json:"mode"`
	Size       int          `json:"size"`
	Depth      int          `json:"depth"`
	Operations int64        `json:"operations"`
	Seconds    float64      `json:"seconds"`
	GbitPerSec float64      `json:"gbit_per_s"`
	OpsPerSec  float64      `json:"ops_per_s"`
	QPs        int          `json:"qps"`
	Least      int64        `json:"least_operations"`     // of any queue pair
	Most       int64        `json:"most_operations"`      // likewise
	Latency    *Percentiles `json:"latency_us,omitempty"` // of an operation, or of a round of a ping-pong

	h *Histogram
}

// Percentiles are percentiles of latencies in microseconds.
type Percentiles struct {
	Min  float64 `json:"min"`
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99_9"`
	Max  float64 `json:"max"`
}

// A Histogram collects durations from 1 ns to a minute, with three significant digits.
type Histogram struct {
	h *hdrhistogram.Histogram
}

// NewHistogram returns an empty one.
func NewHistogram() *Histogram {
	return &Histogram{hdrhistogram.New(1, int64(time.Minute), 3)}
}

// Add adds a duration. Durations out of range are clamped.
func (h *Histogram) Add(d time.Duration) {
	_ = h.h.RecordValue(min(max(int64(d), 1), int64(time.Minute)))
}

// Percentiles returns the percentiles, or nil if the histogram is empty.
func (h *Histogram) Percentiles() *Percentiles {
	if h.h.TotalCount() == 0 {
		return nil
	}
	us := func(ns int64) float64 { return float64(ns) / 1e3 }
	return &Percentiles{
		Min: us(h.h.Min()), Mean: h.h.Mean() / 1e3, Max: us(h.h.Max()),
		P50: us(h.h.ValueAtQuantile(50)), P99: us(h.h.ValueAtQuantile(99)), P999: us(h.h.ValueAtQuantile(99.9)),
	}
}

func (p *Params) result(ops int64, took time.Duration, h *Histogram) *Result {
	s := took.Seconds()
	r := &Result{Op: p.Op.String(), Mode: p.Mode.String(), Size: p.Size, Depth: p.Depth, Operations: ops, Seconds: s, QPs: 1, Least: ops, Most: ops, h: h}
	if s > 0 {
		r.OpsPerSec = float64(ops) / s
		r.GbitPerSec = r.OpsPerSec * float64(p.Size) * 8 / 1e9
	}
	if h != nil {
		r.Latency = h.Percentiles()
	}
	return r
}

// sum combines the results of queue pairs that ran concurrently for the duration took.
func (p *Params) sum(lanes []*lane, took time.Duration) *Result {
	first := lanes[0].result
	ops, least, most := int64(0), first.Operations, first.Operations
	for _, l := range lanes {
		n := l.result.Operations
		ops, least, most = ops+n, min(least, n), max(most, n)
		if first.h != nil && l.result != first {
			first.h.h.Merge(l.result.h.h)
		}
	}
	r := p.result(ops, took, first.h)
	if p.Bidirectional {
		r.Op += "+" + p.opposite().Op.String()
	}
	r.QPs, r.Least, r.Most = len(lanes), least, most
	return r
}
