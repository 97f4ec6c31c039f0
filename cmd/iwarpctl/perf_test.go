package main

import (
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/app/perf"
)

// TestPlan checks that --all measures each size for a short time, and that --bidirectional measures only bandwidth.
func TestPlan(t *testing.T) {
	f := perfFlags{mode: "both", depth: 32, all: true, sizes: sizesValue{list: allSizes()}, bidirectional: true}
	plan, err := f.plan(perf.Write)
	if err != nil {
		t.Fatal(err)
	}
	if len(plan) != 23 || plan[0].Size != 2 || plan[22].Size != 8<<20 || plan[0].Duration != 500*time.Millisecond || !plan[0].Bidirectional {
		t.Errorf("%d measurements, from %+v", len(plan), plan[0])
	}
}

// TestSizeFlag checks that --size replaces the default, and adds to its list when it is given again.
func TestSizeFlag(t *testing.T) {
	cmd := (&command{}).perf()
	if err := cmd.ParseFlags([]string{"--size", "64,1K", "--size", "2M"}); err != nil {
		t.Fatal(err)
	}
	if got := cmd.Flag("size").Value.String(); got != "64,1024,2097152" {
		t.Errorf("%s", got)
	}
}

// TestPerfLines checks that each interval has one line about what was done in it.
func TestPerfLines(t *testing.T) {
	lines := make(lineWriter, 2)
	c := &command{err: lines}
	p := perf.Params{Op: perf.Write, Size: 1000}
	stop := c.perfLines(&p, time.Millisecond)
	p.Done.Add(5)
	for range 2 {
		if s := <-lines; !strings.Contains(s, "write 1000 bytes: ") {
			t.Errorf("printed %q", s)
		}
	}
	stop()
	p.Done = nil
	if c.perfLines(&p, 0)(); p.Done != nil {
		t.Error("counts though no lines are wanted")
	}
}

// TestPingLine checks that the line about a connection is one write, since those of several connections would mix otherwise.
func TestPingLine(t *testing.T) {
	lines := make(lineWriter, 9)
	c := &command{out: lines}
	if err := c.pingDone(pingResult{Peer: "10.0.0.2:5", Rounds: 3, Bytes: 192, RTT: &perf.Percentiles{}}); err != nil {
		t.Fatal(err)
	}
	if s := <-lines; len(lines) > 0 || !strings.HasPrefix(s, "3 rounds with 10.0.0.2:5, 192 bytes; round") || !strings.HasSuffix(s, " us\n") {
		t.Errorf("%q, and %d writes more", s, len(lines))
	}
}

// lineWriter keeps the first lines that are written to it.
type lineWriter chan string

func (w lineWriter) Write(b []byte) (int, error) {
	select {
	case w <- string(b):
	default:
	}
	return len(b), nil
}
