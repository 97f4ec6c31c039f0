package impair

import (
	"math"
	"sort"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestPerfectWireChangesNothing(t *testing.T) {
	if c := (Config{Seed: 7, Hold: time.Second}); !c.Perfect() {
		t.Error("a seed alone does no harm")
	}
	d := NewDecider(Config{})
	for i := range clock.Time(1000) {
		got := d.Decide(i+1, 100, nil)
		if len(got) != 1 || got[0] != (Delivery{At: i + 1, Bit: -1}) {
			t.Fatalf("frame %d: %+v", i, got)
		}
	}
}

// TestRates draws many fates: each comes about as often as configured, and the
// counters agree with what was returned.
func TestRates(t *testing.T) {
	const n = 100000
	cfg := Config{Loss: 0.02, Duplicate: 0.05, Reorder: 0.1, Corrupt: 0.03, Seed: testenv.Seed(t)}
	d := NewDecider(cfg)
	var lost, dup, bad uint64
	for i := range n {
		got := d.Decide(clock.Time(i+1), 1500, make([]Delivery, 0, MaxDeliveries))
		switch len(got) {
		case 0:
			lost++
		case 2:
			dup++
		}
		for _, g := range got {
			if g.Bit < -1 || g.Bit >= 1500*8 {
				t.Fatalf("bit %d of 1500 bytes", g.Bit)
			}
			if g.Bit >= 0 {
				bad++
			}
		}
	}
	st := d.Stats()
	if st.Frames != n || st.Lost != lost || st.Duplicated != dup || st.Corrupted != bad {
		t.Errorf("stats %+v; lost %d, duplicated %d, corrupted %d", st, lost, dup, bad)
	}
	arrived := 1 - cfg.Loss
	for _, c := range []struct {
		name string
		got  uint64
		p    float64
	}{
		{"lost", st.Lost, cfg.Loss}, {"duplicated", st.Duplicated, cfg.Duplicate * arrived},
		{"reordered", st.Reordered, cfg.Reorder * arrived}, {"corrupted", st.Corrupted, cfg.Corrupt * arrived},
	} {
		// Six standard deviations: once in 10^8 runs.
		if dev := math.Sqrt(n * c.p * (1 - c.p)); math.Abs(float64(c.got)-n*c.p) > 6*dev {
			t.Errorf("%s %d of %d, want about %.0f", c.name, c.got, n, n*c.p)
		}
	}
}

func TestTimes(t *testing.T) {
	cfg := Config{Reorder: 0.1, Delay: time.Millisecond, Jitter: 5 * time.Millisecond, Hold: 20 * time.Millisecond, Seed: testenv.Seed(t)}
	d := NewDecider(cfg)
	var last clock.Time
	late := 0
	for i := range 10000 {
		now := clock.Time(i * 1000)
		before := d.Stats().Reordered
		got := d.Decide(now, 100, nil)
		at := got[0].At
		if at < now.Add(cfg.Delay) || at > now.Add(cfg.Delay+cfg.Jitter+cfg.Hold) {
			t.Fatalf("frame %d sent at %d arrives at %d", i, now, at)
		}
		if d.Stats().Reordered != before {
			late++
			continue
		}
		if at < last {
			t.Fatalf("frame %d overtakes, and was not to be reordered", i)
		}
		last = at
	}
	if late == 0 {
		t.Error("nothing was reordered")
	}
}

// TestBursts checks that bursts of loss are about as many and as long as configured.
func TestBursts(t *testing.T) {
	const n = 200000
	cfg := Config{Burst: 0.01, BurstLen: 5, Seed: testenv.Seed(t)}
	d := NewDecider(cfg)
	lost, bursts, in := 0.0, 0.0, false
	for i := range n {
		gone := len(d.Decide(clock.Time(i+1), 1500, nil)) == 0
		if gone {
			lost++
			if !in {
				bursts++
			}
		}
		in = gone
	}
	want := n / (1/cfg.Burst + cfg.BurstLen)
	if math.Abs(bursts-want) > 6*math.Sqrt(want) || math.Abs(lost/bursts-cfg.BurstLen) > 0.1*cfg.BurstLen {
		t.Errorf("%v bursts of %.2f frames; want about %.0f of %v", bursts, lost/bursts, want, cfg.BurstLen)
	}
}

// TestBottleneck checks that frames leave at the rate, in order, and that those that find
// the queue full are lost.
func TestBottleneck(t *testing.T) {
	d := NewDecider(Config{Rate: 8_000_000, Queue: 3000, MTU: 1486, Delay: time.Millisecond}) // a byte a microsecond
	us := func(n int) clock.Time { return clock.Time(n * 1000) }
	for i, want := range []int{2001, 3001, 4001, 5001, 0, 0} {
		got := d.Decide(us(1), 1000, nil)
		if want == 0 && len(got) != 0 || want != 0 && (len(got) != 1 || got[0].At != us(want)) {
			t.Errorf("frame %d: %+v, want one after %d µs", i, got, want)
		}
	}
	if got := d.Decide(us(2001), 1000, nil); len(got) != 1 || got[0].At != us(6001) {
		t.Errorf("a frame that came when there was room again: %+v", got)
	}
	if got := d.Decide(us(20000), 1500, nil); len(got) != 1 || got[0].At != us(22500) {
		t.Errorf("a frame that came after a pause: %+v", got)
	}
	if got := d.Decide(us(30000), 1501, nil); len(got) != 0 {
		t.Errorf("a frame longer than the MTU: %+v", got)
	}
	if st := d.Stats(); st.Overflowed != 2 || st.TooBig != 1 || st.Frames != 9 || st.Lost != 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestSameSeedSameFate(t *testing.T) {
	cfg := Config{Loss: 0.1, Duplicate: 0.1, Reorder: 0.1, Corrupt: 0.1, Jitter: time.Second, Seed: testenv.Seed(t)}
	a, b := NewDecider(cfg), NewDecider(cfg)
	cfg.Seed++
	other := NewDecider(cfg)
	differ := false
	for i := range 1000 {
		x, y, z := a.Decide(clock.Time(i), 99, nil), b.Decide(clock.Time(i), 99, nil), other.Decide(clock.Time(i), 99, nil)
		if len(x) != len(y) {
			t.Fatalf("frame %d: %v and %v", i, x, y)
		}
		for j := range x {
			if x[j] != y[j] {
				t.Fatalf("frame %d: %v and %v", i, x, y)
			}
		}
		differ = differ || len(x) != len(z)
	}
	if !differ {
		t.Error("another seed gave the same fates")
	}
}

func TestLossDoesNotShiftOtherFates(t *testing.T) {
	base := Config{Corrupt: 0.2, Seed: 5}
	lossy := base
	lossy.Loss = 0.5
	a, b := NewDecider(base), NewDecider(lossy)
	for i := range 1000 {
		x, y := a.Decide(1, 99, nil), b.Decide(1, 99, nil)
		if len(y) == 1 && x[0].Bit != y[0].Bit {
			t.Fatalf("frame %d: bit %d, and %d where others are lost", i, x[0].Bit, y[0].Bit)
		}
	}
}

func TestQueue(t *testing.T) {
	r := testenv.Rand(t)
	type item struct {
		at clock.Time
		id int
	}
	var model []item
	q := NewQueue[int](4)
	now := clock.Time(0)
	for id := range 5000 {
		if r.IntN(2) == 0 {
			at := now + clock.Time(r.IntN(50))
			q.Push(at, id)
			model = append(model, item{at, id})
			sort.SliceStable(model, func(i, j int) bool { return model[i].at < model[j].at })
		} else {
			now += clock.Time(r.IntN(20))
			for {
				first, there := q.Peek(now)
				v, ok := q.Pop(now)
				if there != ok || first != v {
					t.Fatalf("Peek gave %d %v, Pop %d %v", first, there, v, ok)
				}
				if due := len(model) > 0 && model[0].at <= now; ok != due {
					t.Fatalf("Pop at %d: %v, want %v", now, ok, due)
				}
				if !ok {
					break
				}
				if v != model[0].id {
					t.Fatalf("Pop gave %d, want %d", v, model[0].id)
				}
				model = model[1:]
			}
		}
		var want clock.Time
		if len(model) > 0 {
			want = model[0].at
		}
		if q.Deadline() != want || q.Len() != len(model) {
			t.Fatalf("Deadline %d, Len %d; want %d, %d", q.Deadline(), q.Len(), want, len(model))
		}
	}
}

func TestAllocatesNothing(t *testing.T) {
	d := NewDecider(Config{Duplicate: 0.5, Loss: 0.1, Jitter: time.Second})
	q := NewQueue[Delivery](8)
	plan := make([]Delivery, 0, MaxDeliveries)
	if n := testing.AllocsPerRun(200, func() {
		for _, x := range d.Decide(1, 100, plan) {
			q.Push(x.At, x)
		}
		for range 2 {
			q.Pop(1 << 62)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestParse(t *testing.T) {
	want := Config{Loss: 0.01, Duplicate: 0.5, Reorder: 1, Corrupt: 0.001, Delay: time.Millisecond, Jitter: 2 * time.Microsecond, Hold: time.Second,
		Burst: 0.25, BurstLen: 4, Rate: 1000, Queue: 77, MTU: 1300, Seed: 77}
	const s = "loss=0.01,duplicate=0.5,reorder=1,corrupt=0.001,burst=0.25,burstlen=4,delay=1ms,jitter=2µs,hold=1s,rate=1000,queue=77,mtu=1300,seed=77"
	got, err := Parse(s)
	if err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	if got.String() != s {
		t.Errorf("%q", got.String())
	}
	if c, err := Parse(" loss=0.5, "); err != nil || c != (Config{Loss: 0.5}) {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range []string{"loss", "loss=2", "loss=-1", "loss=NaN", "delay=1", "delay=-1s", "speed=1", "seed=x", "rate=-1", "queue=x", "burstlen=0"} {
		if _, err := Parse(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
