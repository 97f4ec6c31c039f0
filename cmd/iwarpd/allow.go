package main

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/internal/nss"
)

// Keys of the file that have no flag: allow is a list of rules, slots a rule for the sockets of
// containers.
const (
	allowKey = "allow"
	slotsKey = "slots"
)

// ruleKeys are the keys of a rule; deploy/iwarpd.yaml documents them.
var ruleKeys = append([]string{"users", "groups", "deny", "admin", "listen", "addresses", "accept-from", "connect-to"}, quotaNames()...)

// parseAllow parses the rules; base has the default quotas.
func parseAllow(v any, base ctrl.Limits) ([]ctrl.Rule, error) {
	if v == nil {
		return nil, nil
	}
	list, ok := v.([]any)
	if !ok {
		return nil, errors.New("must be a list of rules")
	}
	rules := make([]ctrl.Rule, 0, len(list))
	for i, item := range list {
		if i > 0 && len(rules[i-1].UIDs) == 0 && len(rules[i-1].GIDs) == 0 {
			return nil, fmt.Errorf("rule %d has no effect, since rule %d has neither users nor groups, and so matches all: put that one last", i+1, i)
		}
		m, ok := item.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("rule %d: must have keys like \"users: [alice]\"", i+1)
		}
		r, err := parseRule(m, base)
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

func parseRule(m map[string]any, base ctrl.Limits) (r ctrl.Rule, err error) {
	limits := base
	fields := rights(&r, &limits)
	fields["users"] = func(v any) (err error) { r.UIDs, err = ids(v, nss.UID); return err }
	fields["groups"] = func(v any) (err error) { r.GIDs, err = ids(v, nss.GID); return err }
	fields["deny"] = one(func(text string) error { return truth(text, &r.Deny) })
	fields["admin"] = one(func(text string) error { return truth(text, &r.Admin) })
	if err := setFields(m, fields, ruleKeys); err != nil {
		return r, err
	}
	if limits != base {
		r.Limits = &limits
	}
	return r, nil
}

// rights returns the setters of the keys that rules and slots have in common.
func rights(r *ctrl.Rule, limits *ctrl.Limits) map[string]func(v any) error {
	fields := map[string]func(v any) error{
		"listen":    func(v any) (err error) { r.Listen, err = parsePorts(v); return err },
		"addresses": func(v any) (err error) { r.Addrs, err = parsePrefixes(v); return err },

		"accept-from": func(v any) (err error) { r.AcceptFrom, err = parsePrefixes(v); return err },
		"connect-to":  func(v any) (err error) { r.ConnectTo, err = parsePrefixes(v); return err },
	}
	for _, q := range quotaKeys {
		fields[q.name] = one(func(text string) error { return q.set(limits, text) })
	}
	return fields
}

// one returns the setter of a key that cannot have a list. set gets "" if there is no value.
func one(set func(text string) error) func(v any) error {
	return func(v any) error {
		text, ok := v.(string)
		if !ok && v != nil {
			return errors.New("must be one value")
		}
		if err := set(text); err != nil {
			return fmt.Errorf("%q: %w", text, err)
		}
		return nil
	}
}

// setFields calls the setter for each key of m; known lists the valid keys.
func setFields(m map[string]any, fields map[string]func(v any) error, known []string) error {
	for name, v := range m {
		set := fields[name]
		if set == nil {
			return fmt.Errorf("unknown key %q: must be one of %s", name, strings.Join(known, ", "))
		}
		if err := set(v); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// slotKeys are the keys of slots; deploy/iwarpd.yaml documents them.
var slotKeys = append([]string{"folder", "count", "listen", "addresses", "accept-from", "connect-to"}, quotaNames()...)

// parseSlots parses the sockets for containers; base has the default quotas.
func parseSlots(v any, base ctrl.Limits) (s ctrl.Slots, err error) {
	if v == nil {
		return s, nil
	}
	m, ok := v.(map[string]any)
	if !ok {
		return s, errors.New("must have keys like \"count: 16\"")
	}
	s.Folder = "/run/iwarpd/slots"
	limits := base
	fields := rights(&s.Rule, &limits)
	fields["folder"] = one(func(dir string) error {
		if !filepath.IsAbs(dir) || len(dir) > maxSlotFolder {
			return fmt.Errorf("must be an absolute path of at most %d bytes", maxSlotFolder)
		}
		s.Folder = dir
		return nil
	})
	fields["count"] = one(func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > ctrl.MaxSlots {
			return fmt.Errorf("must be a number from 0 to %d", ctrl.MaxSlots)
		}
		s.Count = n
		return nil
	})
	if err := setFields(m, fields, slotKeys); err != nil {
		return s, err
	}
	if limits != base {
		s.Rule.Limits = &limits
	}
	return s, nil
}

// maxSlotFolder leaves room for "/4095/iwarpd.sock" in sun_path of sockaddr_un(7).
const maxSlotFolder = 90

// scalars returns the values of a list, which must not be empty, since that would restrict nothing, or a single value.
func scalars(v any) ([]string, error) {
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	if len(list) == 0 {
		return nil, errors.New("empty, which would restrict nothing: leave the key out if that is intended")
	}
	var out []string
	for _, item := range list {
		text, ok := item.(string)
		if !ok {
			return nil, errors.New("must be one value, or a list of values")
		}
		out = append(out, text)
	}
	return out, nil
}

func ids(v any, lookup func(string) (uint32, error)) ([]uint32, error) {
	names, err := scalars(v)
	if err != nil {
		return nil, err
	}
	var out []uint32
	for _, name := range names {
		n, err := lookup(name)
		if errors.Is(err, nss.ErrUnknown) {
			return nil, fmt.Errorf("%w: use a number, or create it first", err)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	return out, nil
}

func truth(text string, to *bool) error {
	*to = strings.EqualFold(text, "true")
	if !*to && !strings.EqualFold(text, "false") {
		return errors.New("must be true or false")
	}
	return nil
}

// parsePorts parses ports and ranges: 7174, "7000-7999", "20049,7174-7180".
func parsePorts(v any) ([]ctrl.PortRange, error) {
	items, err := scalars(v)
	if err != nil {
		return nil, err
	}
	var out []ctrl.PortRange
	for _, item := range items {
		for part := range strings.SplitSeq(item, ",") {
			from, to, isRange := strings.Cut(strings.TrimSpace(part), "-")
			if !isRange {
				to = from
			}
			a, err1 := strconv.ParseUint(from, 10, 16)
			b, err2 := strconv.ParseUint(to, 10, 16)
			if err1 != nil || err2 != nil || a == 0 || b < a {
				return nil, fmt.Errorf("%q: must be ports from 1 to 65535, like 7174 or 7000-7999", part)
			}
			out = append(out, ctrl.PortRange{From: uint16(a), To: uint16(b)})
		}
	}
	return out, nil
}

func parsePrefixes(v any) ([]netip.Prefix, error) {
	items, err := scalars(v)
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, item := range items {
		p, err := parsePrefix(item)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// parsePrefix parses an address, or a network such as 10.0.0.0/24.
func parsePrefix(v string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(v)
	if err != nil {
		a, err := netip.ParseAddr(v)
		if err != nil || a.Zone() != "" {
			return p, fmt.Errorf("%q: must be an address, or a network like 10.0.0.0/24", v)
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	if p.Addr().Is4In6() {
		return p, fmt.Errorf("%q: write it as an IPv4 address", v) // a v4-mapped address never matches
	}
	if p != p.Masked() {
		return p, fmt.Errorf("%q: has bits set after its length: did you mean %v?", v, p.Masked())
	}
	return p, nil
}

// sameRules reports whether two lists of rules are equal.
func sameRules(a, b []ctrl.Rule) bool {
	return slices.EqualFunc(a, b, func(x, y ctrl.Rule) bool { return reflect.DeepEqual(x, y) })
}
