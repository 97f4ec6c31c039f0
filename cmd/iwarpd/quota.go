package main

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/shm"
)

// A quotaKey is a per-user quota. It is a key of the configuration, which sets the default, and a
// key of a rule.
type quotaKey struct {
	name string
	def  string
	help string
	set  func(l *ctrl.Limits, v string) error
}

// quotaKeys lists the configurable quotas; deploy/iwarpd.yaml documents them.
var quotaKeys = []quotaKey{
	{"max-clients", "256", "connected clients of one user", count(func(l *ctrl.Limits) *int { return &l.Clients }, 1<<16)},
	{"max-qps", "4096", "queue pairs of one user", count(func(l *ctrl.Limits) *int { return &l.QPs }, 1<<20)},
	{"max-pds", "4096", "protection domains of one user", count(func(l *ctrl.Limits) *int { return &l.PDs }, 1<<20)},
	{"max-cqs", "4096", "completion queues and channels of one user", count(func(l *ctrl.Limits) *int { return &l.CQs }, 1<<20)},
	{"max-cq-depth", "262144", "completions that one completion queue can hold", count(func(l *ctrl.Limits) *int { return &l.CQDepth }, shm.MaxCQEntries)},
	{"max-regions", "16384", "memory regions of one user", count(func(l *ctrl.Limits) *int { return &l.MRs }, 1<<20)},
	{"max-windows", "4096", "memory windows of one user", count(func(l *ctrl.Limits) *int { return &l.MWs }, 1<<20)},
	{"max-listens", "256", "listeners of one user", count(func(l *ctrl.Limits) *int { return &l.Listens }, 1<<16)},
	{"max-captures", "2", "concurrent captures of one user", count(func(l *ctrl.Limits) *int { return &l.Captures }, 64)},

	{"max-ports", "8192", "local ports of the outgoing connections of one user, including TIME-WAIT", count(func(l *ctrl.Limits) *int { return &l.Ports }, 1<<20)},
	{"max-registered", "1GiB", "memory that one user may register", bytesOf(func(l *ctrl.Limits) *uint64 { return &l.Registered })},
	{"max-messages", "64MiB", "memory of replies and events that the programs of one user have not read", bytesOf(func(l *ctrl.Limits) *uint64 { return &l.Messages })},
	{"max-rings", "1GiB", "memory that the queues of one user may use", bytesOf(func(l *ctrl.Limits) *uint64 { return &l.Rings })},
}

// count returns the setter for a quota that is a number from 1 to most.
func count(at func(*ctrl.Limits) *int, most int) func(*ctrl.Limits, string) error {
	return func(l *ctrl.Limits, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > most {
			return fmt.Errorf("must be a number from 1 to %d", most)
		}
		*at(l) = n
		return nil
	}
}

// bytesOf returns the setter for a quota in bytes.
func bytesOf(at func(*ctrl.Limits) *uint64) func(*ctrl.Limits, string) error {
	return func(l *ctrl.Limits, v string) error {
		n, err := parseSize(v)
		*at(l) = uint64(n)
		return err
	}
}

// quotaSettings returns the configuration keys that set the default quotas.
func quotaSettings() []key {
	var out []key
	for _, q := range quotaKeys {
		out = append(out, key{q.name, "", q.def, q.help, func(s *settings, v string) error { return q.set(&s.Limits, v) }})
	}
	return out
}

func quotaNames() []string {
	var out []string
	for _, q := range quotaKeys {
		out = append(out, q.name)
	}
	return slices.Clip(out)
}
