package perf

import (
	"encoding/hex"
	"math"
	"strings"
	"testing"
	"time"
)

func TestPrivateData(t *testing.T) {
	p := Params{Op: Read, Mode: Bandwidth, Size: 65536, Depth: 16, Count: 1}
	w := window{0x1122334455667788, 0xaabbccdd}
	const wire = "49575046" + "01" + "02" + "01" + "00010000" + "00000010" + "1122334455667788" + "aabbccdd"
	b := appendRequest(&p, w)
	if got := hex.EncodeToString(b); got != wire {
		t.Errorf("request = %s; want %s", got, wire)
	}
	got, gotw, err := decodeRequest(b)
	if err != nil || got != p || gotw != w {
		t.Errorf("decodeRequest = %+v, %+v, %v", got, gotw, err)
	}
	for n := range b {
		if _, _, err := decodeRequest(b[:n]); err == nil {
			t.Errorf("decodeRequest accepts %d bytes", n)
		}
	}
	reply := appendReply(w)
	if got, err := decodeReply(reply); err != nil || got != w {
		t.Errorf("decodeReply = %+v, %v", got, err)
	}
	for n := range reply {
		if _, err := decodeReply(reply[:n]); err == nil {
			t.Errorf("decodeReply accepts %d bytes", n)
		}
	}
	b[4] = 9
	if _, _, err := decodeRequest(b); err == nil || !strings.Contains(err.Error(), "version 9") {
		t.Errorf("another version: %v", err)
	}
	if got := appendRefusal(strings.Repeat("x", 1000)); len(got) > 300 {
		t.Errorf("a refusal of %d bytes", len(got))
	}
}

func TestServerLimits(t *testing.T) {
	good := Params{Op: Send, Mode: Latency, Size: MaxSize, Depth: MaxDepth, Count: 1}
	if _, _, err := decodeRequest(appendRequest(&good, window{})); err != nil {
		t.Error(err)
	}
	for _, change := range []func(*Params){
		func(p *Params) { p.Size = 0 }, func(p *Params) { p.Size = MaxSize + 1 }, func(p *Params) { p.Size = math.MaxUint32 },
		func(p *Params) { p.Depth = 0 }, func(p *Params) { p.Depth = MaxDepth + 1 },
		func(p *Params) { p.Op = 0 }, func(p *Params) { p.Op = 4 }, func(p *Params) { p.Mode = 0 }, func(p *Params) { p.Mode = 3 },
	} {
		p := good
		change(&p)
		if _, _, err := decodeRequest(appendRequest(&p, window{})); err == nil {
			t.Errorf("%+v accepted", p)
		}
	}
}

func TestNames(t *testing.T) {
	for _, o := range []Op{Write, Read, Send} {
		if got, err := ParseOp(o.String()); err != nil || got != o {
			t.Errorf("ParseOp(%v) = %v, %v", o, got, err)
		}
	}
	for _, m := range []Mode{Bandwidth, Latency} {
		if got, err := ParseMode(m.String()); err != nil || got != m {
			t.Errorf("ParseMode(%v) = %v, %v", m, got, err)
		}
	}
	for _, bad := range []string{"", "fly"} {
		if _, err := ParseOp(bad); err == nil {
			t.Errorf("ParseOp(%q)", bad)
		}
		if _, err := ParseMode(bad); err == nil {
			t.Errorf("ParseMode(%q)", bad)
		}
	}
}

func TestHistogram(t *testing.T) {
	h := NewHistogram()
	if h.Percentiles() != nil {
		t.Error("percentiles of nothing")
	}
	for i := range 1000 {
		h.Add(time.Duration(i+1) * time.Microsecond)
	}
	h.Add(time.Hour) // beyond the range
	p := h.Percentiles()
	for _, tt := range []struct {
		name      string
		got, want float64
	}{{"min", p.Min, 1}, {"p50", p.P50, 501}, {"p99", p.P99, 991}, {"p99.9", p.P999, 1000}, {"max", p.Max, 60e6}} {
		if math.Abs(tt.got-tt.want) > tt.want/500 {
			t.Errorf("%s = %v us; want about %v", tt.name, tt.got, tt.want)
		}
	}
}

func TestResult(t *testing.T) {
	p := Params{Op: Write, Mode: Bandwidth, Size: 1 << 20, Depth: 8}
	r := p.result(1000, 2*time.Second, nil)
	if r.OpsPerSec != 500 || math.Abs(r.GbitPerSec-4.194304) > 1e-9 || r.Latency != nil {
		t.Errorf("result %+v", r)
	}
	if r := p.result(0, 0, nil); r.OpsPerSec != 0 || math.IsNaN(r.GbitPerSec) {
		t.Errorf("result of nothing: %+v", r)
	}
}

func TestDue(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		p    Params
		n    int
		ago  time.Duration
		want bool
	}{
		{Params{Count: 3}, 2, time.Hour, true}, {Params{Count: 3}, 3, 0, false},
		{Params{Duration: time.Hour}, 1e9, 0, true}, {Params{Duration: time.Second}, 0, time.Minute, false},
		{Params{Count: 3, Duration: time.Second}, 1, time.Minute, false},
	} {
		if got := tt.p.due(tt.n, now.Add(-tt.ago)); got != tt.want {
			t.Errorf("%+v.due(%d, %v ago) = %v", tt.p, tt.n, tt.ago, got)
		}
	}
}
