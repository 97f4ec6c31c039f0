package main

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// pingPong calls once in a loop, first for the warm-up time and then for the window. It returns
// the distribution of the call's duration in microseconds.
func pingPong(j job, once func() error) (r result, err error) {
	h := hdrhistogram.New(1, int64(10*time.Second), 3)
	for end := time.Now().Add(j.Warm); time.Now().Before(end); {
		if err := once(); err != nil {
			return r, err
		}
	}
	t := time.Now()
	for end := t.Add(j.Window); t.Before(end); {
		if err := once(); err != nil {
			return r, err
		}
		now := time.Now()
		_ = h.RecordValue(int64(now.Sub(t)))
		t = now
	}
	us := func(ns int64) float64 { return float64(ns) / 1000 }
	return result{Value: us(h.ValueAtQuantile(50)), Mean: h.Mean() / 1000, P99: us(h.ValueAtQuantile(99)), P999: us(h.ValueAtQuantile(99.9))}, nil
}

// cpuBusy returns the seconds that all CPUs together have worked since the machine started, in
// steps of 10 ms.
func cpuBusy() float64 {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	var user, nice, system, idle, wait, irq, softirq uint64
	if _, err := fmt.Sscanf(string(b), "cpu %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &wait, &irq, &softirq); err != nil {
		return 0
	}
	return float64(user+nice+system+irq+softirq) / 100
}

// spread is the least, the median and the greatest value of several rounds.
type spread struct {
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

func spreadOf(v []float64) spread {
	return spread{Min: slices.Min(v), Median: median(v), Max: slices.Max(v)}
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

func (s spread) String() string {
	return fmt.Sprintf("%s / %s / %s", short(s.Min), short(s.Median), short(s.Max))
}

// short formats v with three significant digits.
func short(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func sizeName(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
