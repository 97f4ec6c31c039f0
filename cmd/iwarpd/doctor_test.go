package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func doctor(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := rootCommand()
	cmd.SetArgs(append([]string{"doctor"}, args...))
	cmd.SetOut(&out)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestDoctor(t *testing.T) {
	out, err := doctor(t, "--interface", "iwarpd-none", "--json")
	var findings []hostcheck.Finding
	if jerr := json.Unmarshal([]byte(out), &findings); jerr != nil || len(findings) < 5 {
		t.Fatalf("%v: %s", jerr, out)
	}
	if last := findings[len(findings)-1]; last.Check != "interface" || last.State != hostcheck.Fail || exitCode(err) != exitFailure {
		t.Errorf("%+v, %v", last, err)
	}
	out, err = doctor(t, "-i", "lo") // no address is needed for it
	if exitCode(err) != exitFailure || !strings.Contains(out, "fail  interface          lo is loopback") || !strings.Contains(out, "userfaultfd") || !strings.Contains(out, "fix: use a network interface") {
		t.Errorf("%v:\n%s", err, out)
	}
	t.Setenv("IWARPD_INTERFACE", "iwarpd-none") // overrides the configuration file
	if _, err := doctor(t); err == nil || !strings.Contains(err.Error(), "iwarpd-none") {
		t.Errorf("%v", err)
	}
	t.Setenv("IWARPD_INTERFACE", "")
	for _, args := range [][]string{{}, {"x"}, {"--mtu", "3"}, {"--config", "/nonexistent"}} {
		if _, err := doctor(t, args...); exitCode(err) != exitConfig {
			t.Errorf("doctor %q: %v", args, err)
		}
	}
	if exitCode(errors.New("x")) != exitFailure {
		t.Error("an error without a code has one")
	}
}

// TestDoctorSockets checks that doctor judges kernel sockets by the needs of sockets alone.
func TestDoctorSockets(t *testing.T) {
	t.Run("flag", func(t *testing.T) { doctorSockets(t, "--transport", "socket") })
	t.Run("environment", func(t *testing.T) {
		t.Setenv("IWARPD_TRANSPORT", "socket")
		doctorSockets(t)
	})
	if _, err := doctor(t, "--transport", "tcp"); exitCode(err) != exitConfig {
		t.Errorf("--transport tcp: %v", err)
	}
	if _, err := doctor(t, "--interface", "iwarpd-none", "--transport", "both"); exitCode(err) != exitFailure || !strings.Contains(err.Error(), "iwarpd-none") {
		t.Errorf("--transport both: %v", err)
	}
	if _, err := doctor(t, "--colour"); err == nil || !strings.Contains(err.Error(), "see iwarpd doctor --help") {
		t.Errorf("an unknown flag: %v", err)
	}
}

func doctorSockets(t *testing.T, args ...string) {
	t.Helper()
	out, err := doctor(t, args...)
	if err != nil || !strings.Contains(out, "open files") || !strings.Contains(out, "userfaultfd") {
		t.Errorf("%v:\n%s", err, out)
	}
	for _, not := range []string{"capabilities", "BPF", "interface", "transport"} {
		if strings.Contains(out, not) {
			t.Errorf("doctor speaks of %q:\n%s", not, out)
		}
	}
}

// TestDoctorSets checks that doctor finds the sets of allow-set.
func TestDoctorSets(t *testing.T) {
	testenv.RequireRoot(t)
	t.Setenv("IWARPD_TRANSPORT", "socket")
	t.Setenv("IWARPD_ALLOW_SET", "inet iwarpd_none peers")
	out, _ := doctor(t)
	if !strings.Contains(out, "warn  allow-set          the nftables set inet iwarpd_none peers does not exist") || !strings.Contains(out, "fix: nft 'add table inet iwarpd_none; add set") {
		t.Error(out)
	}
}
