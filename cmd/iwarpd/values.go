package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iwarpd/iwarpd/ctrl"
)

// A listFlag is the value of a flag that may be given several times. The first value replaces the default, and others add
// to it; an empty one replaces those before it.
type listFlag struct {
	value string
	given bool
}

func (f *listFlag) Set(v string) error {
	if f.given && f.value != "" && v != "" {
		v = f.value + "," + v
	}
	f.value, f.given = v, true
	return nil
}

func (f *listFlag) String() string { return f.value }
func (f *listFlag) Type() string   { return "list" }

// oneOf accepts the words of names, which are separated by spaces and stand for values.
func oneOf[T any](field func(*settings) *T, names string, values ...T) func(*settings, string) error {
	words := strings.Fields(names)
	return func(s *settings, v string) error {
		if v == "false" { // YAML 1.1, and so Helm and others that write the file, reads a bare off as false
			v = "off"
		}
		i := slices.Index(words, v)
		if i < 0 {
			return fmt.Errorf("must be one of %s", strings.Join(words, ", "))
		}
		*field(s) = values[i]
		return nil
	}
}

// word accepts one of words.
func word(field func(*settings) *string, words ...string) func(*settings, string) error {
	return oneOf(field, strings.Join(words, " "), words...)
}

func crcPolicy(field func(*settings) *ctrl.CRCPolicy) func(*settings, string) error {
	return oneOf(field, "required optional off", ctrl.CRCRequired, ctrl.CRCOptional, ctrl.CRCOff)
}

func number(field func(*settings) *int, least, most int) func(*settings, string) error {
	return func(s *settings, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < least || n > most {
			return fmt.Errorf("must be a number from %d to %d", least, most)
		}
		*field(s) = n
		return nil
	}
}

func byteOf(field func(*settings) *uint8, least, most int) func(*settings, string) error {
	return func(s *settings, v string) error {
		n := 0
		err := number(func(*settings) *int { return &n }, least, most)(s, v)
		*field(s) = uint8(n)
		return err
	}
}

func boolean(field func(*settings) *bool) func(*settings, string) error {
	return func(s *settings, v string) error {
		b, err := strconv.ParseBool(v)
		if err != nil {
			return errors.New("must be true or false")
		}
		*field(s) = b
		return nil
	}
}

func duration(field func(*settings) *time.Duration, least, most time.Duration) func(*settings, string) error {
	return func(s *settings, v string) error {
		d, err := time.ParseDuration(v)
		if err != nil || d < least || d > most {
			return fmt.Errorf("must be a time with a unit, from %v to %v", least, most)
		}
		*field(s) = d
		return nil
	}
}

// durationOrNone accepts 0 too, which means never.
func durationOrNone(field func(*settings) *time.Duration) func(*settings, string) error {
	const least, most = time.Second, 24 * time.Hour
	return func(s *settings, v string) error {
		if d, err := time.ParseDuration(v); err == nil && d == 0 {
			*field(s) = 0
			return nil
		}
		if err := duration(field, least, most)(s, v); err != nil {
			return fmt.Errorf("must be 0, or a time from %v to %v, like 90s", least, most)
		}
		return nil
	}
}

func interfaceNames(field func(*settings) *[]string) func(*settings, string) error {
	return func(s *settings, v string) error {
		var names []string
		for name := range strings.SplitSeq(v, ",") {
			if name = strings.TrimSpace(name); name != "" {
				names = append(names, name)
			}
		}
		*field(s) = names
		return nil
	}
}

// maxListed is the maximum length of a list of queues or CPUs.
const maxListed = 1024

// parseList parses "0,2-3"; "" and the word every return an empty list.
func parseList(v, every string) ([]int, error) {
	if v == "" || v == every {
		return nil, nil
	}
	bad := fmt.Errorf("must be %q or a list like 0,2-3, each number once", every)
	var out []int
	for part := range strings.SplitSeq(v, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err1 := strconv.ParseUint(first, 10, 16)
		b, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || b < a {
			return nil, bad
		}
		for n := int(a); n <= int(b); n++ {
			if slices.Contains(out, n) || len(out) == maxListed {
				return nil, bad
			}
			out = append(out, n)
		}
	}
	return out, nil
}

// parseCRCPeers parses "10.1.0.0/16=off,fd00::/8=optional".
func parseCRCPeers(v string) (rules []ctrl.CRCRule, err error) {
	if v == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(v, ",") {
		peers, policy, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return nil, fmt.Errorf("%q: must be a network and its policy, like 10.1.0.0/16=off", part)
		}
		var r ctrl.CRCRule
		if r.Peers, err = parsePrefix(peers); err != nil {
			return nil, err
		}
		if err := crcPolicy(func(*settings) *ctrl.CRCPolicy { return &r.CRC })(nil, policy); err != nil {
			return nil, fmt.Errorf("%q: %w", part, err)
		}
		for _, first := range rules {
			if first.Peers.Bits() <= r.Peers.Bits() && first.Peers.Overlaps(r.Peers) {
				return nil, fmt.Errorf("%v has no effect, since %v is before it, and the first match counts: put it first, or omit one", r.Peers, first.Peers)
			}
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// parseSize parses a number of bytes: 4096, 64KiB, 16MiB, 2GiB, or 64K, 16M, 2G.
func parseSize(v string) (int64, error) {
	number, shift := v, 0
	for i, unit := range []string{"K", "M", "G", "T"} {
		if n, ok := strings.CutSuffix(strings.TrimSuffix(v, "iB"), unit); ok {
			number, shift = strings.TrimSpace(n), 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > 1<<50>>shift {
		return 0, errors.New("must be a size from 1 to 1024TiB, like 4096, 64KiB, 16MiB or 2GiB")
	}
	return n << shift, nil
}

// oneLine joins the lines of an error message.
func oneLine(s string) string {
	return strings.Join(strings.Fields(s), " ")
}
