package main

import (
	"regexp"
	"strconv"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestUnitFiles checks that eight users within the default quotas, on eight workers, do not use up the descriptors that
// the unit allows the daemon.
func TestUnitFiles(t *testing.T) {
	const users, workers = 8, 8
	unit := testenv.ReadFile(t, "../../deploy/iwarpd.service")
	m := regexp.MustCompile(`(?m)^LimitNOFILE=(\d+)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("no LimitNOFILE")
	}
	limit, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	l := ctrl.DefaultLimits
	channels := l.CQs          // channels share the quota of CQs
	client := 1 + workers + 64 // the socket, the wake-up descriptors and the unread descriptors
	listener := 2 * workers    // one for each address
	user := l.Ports + l.CQs + channels + l.Clients*client + l.Listens*listener + 2*l.Captures
	if users*user > limit {
		t.Errorf("%d users may take %d descriptors each, LimitNOFILE is %d", users, user, limit)
	}
}

// TestUnitOrder checks that the unit starts after what the configuration can name: interfaces, and users and groups of a directory
// service. A name that is not known yet ends the daemon.
func TestUnitOrder(t *testing.T) {
	unit := testenv.ReadFile(t, "../../deploy/iwarpd.service")
	for _, target := range []string{"network-online.target", "nss-user-lookup.target"} {
		if !regexp.MustCompile(`(?m)^After=.*\b` + regexp.QuoteMeta(target)).Match(unit) {
			t.Errorf("the unit does not start after %s", target)
		}
	}
}
