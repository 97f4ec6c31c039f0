package impair

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Parse parses a Config written as "loss=0.01,duplicate=0.001,delay=2ms". The keys are the field
// names in lower case; fields that are not given are zero.
func Parse(s string) (Config, error) {
	var c Config
	for item := range strings.SplitSeq(s, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		key, val, _ := strings.Cut(item, "=")
		var err error
		switch key {
		case "loss":
			err = probability(&c.Loss, val)
		case "duplicate":
			err = probability(&c.Duplicate, val)
		case "reorder":
			err = probability(&c.Reorder, val)
		case "corrupt":
			err = probability(&c.Corrupt, val)
		case "delay":
			err = duration(&c.Delay, val)
		case "jitter":
			err = duration(&c.Jitter, val)
		case "hold":
			err = duration(&c.Hold, val)
		case "burst":
			err = probability(&c.Burst, val)
		case "burstlen":
			if c.BurstLen, err = strconv.ParseFloat(val, 64); err == nil && !(c.BurstLen >= 1 && c.BurstLen <= 1e9) {
				err = fmt.Errorf("a burst has at least one frame")
			}
		case "rate":
			err = count(&c.Rate, val)
		case "queue":
			err = count(&c.Queue, val)
		case "mtu":
			err = count(&c.MTU, val)
		case "seed":
			c.Seed, err = strconv.ParseUint(val, 0, 64)
		default:
			err = fmt.Errorf("unknown; known are loss duplicate reorder corrupt delay jitter hold burst burstlen rate queue mtu seed")
		}
		if err != nil {
			return Config{}, fmt.Errorf("impair: %q: %w", item, err)
		}
	}
	return c, nil
}

func probability(p *float64, s string) error {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return err
	}
	if !(v >= 0 && v <= 1) {
		return fmt.Errorf("a probability is 0 to 1")
	}
	*p = v
	return nil
}

func count(n *int, s string) error {
	v, err := strconv.Atoi(s)
	if err != nil {
		return err
	}
	if v < 0 {
		return fmt.Errorf("must not be negative")
	}
	*n = v
	return nil
}

func duration(d *time.Duration, s string) error {
	v, err := time.ParseDuration(s)
	if err != nil {
		return err
	}
	if v < 0 {
		return fmt.Errorf("a duration must not be negative")
	}
	*d = v
	return nil
}

// String formats c so that Parse can read it.
func (c Config) String() string {
	var b strings.Builder
	add := func(key, val string) {
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(key + "=" + val)
	}
	for _, p := range []struct {
		key string
		v   float64
	}{{"loss", c.Loss}, {"duplicate", c.Duplicate}, {"reorder", c.Reorder}, {"corrupt", c.Corrupt}, {"burst", c.Burst}, {"burstlen", c.BurstLen}} {
		if p.v != 0 {
			add(p.key, strconv.FormatFloat(p.v, 'g', -1, 64))
		}
	}
	for _, d := range []struct {
		key string
		v   time.Duration
	}{{"delay", c.Delay}, {"jitter", c.Jitter}, {"hold", c.Hold}} {
		if d.v != 0 {
			add(d.key, d.v.String())
		}
	}
	for _, n := range []struct {
		key string
		v   int
	}{{"rate", c.Rate}, {"queue", c.Queue}, {"mtu", c.MTU}} {
		if n.v != 0 {
			add(n.key, strconv.Itoa(n.v))
		}
	}
	if c.Seed != 0 {
		add("seed", strconv.FormatUint(c.Seed, 10))
	}
	return b.String()
}
