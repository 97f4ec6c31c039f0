package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl"
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
	for _, args := range [][]string{{}, {"x"}, {"--mtu", "3"}, {"--config", "/nonexistent"}, {"-i", "lo", "--config", "/nonexistent"}} {
		if _, err := doctor(t, args...); exitCode(err) != exitConfig {
			t.Errorf("doctor %q: %v", args, err)
		}
	}
	if exitCode(errors.New("x")) != exitFailure {
		t.Error("an error without a code has one")
	}
}

// TestDoctorCPUs checks that doctor finds a CPU that does not exist, which would end the daemon.
func TestDoctorCPUs(t *testing.T) {
	for cpu, ok := range map[string]bool{"": true, "1023": false} {
		t.Setenv("IWARPD_CPUS", cpu)
		out, err := doctor(t, "--transport", "socket")
		if (err == nil) != ok || strings.Contains(out, "fail  cpus               CPU 1023 does not exist") == ok {
			t.Errorf("CPU %q: %v\n%s", cpu, err, out)
		}
	}
}

// TestTooManyQueues checks that doctor, and the daemon before it opens anything, refuse more queues than clients have
// descriptors for, with a remedy. The daemon would be ready, and no client could use it.
func TestTooManyQueues(t *testing.T) {
	out, err := doctor(t, "--transport", "socket")
	if err != nil || strings.Contains(out, "workers") {
		t.Errorf("one worker: %v\n%s", err, out)
	}
	for _, tt := range []struct {
		queues string
		ok     bool
	}{{"0-63", true}, {"0-64", false}} {
		t.Setenv("IWARPD_QUEUES", tt.queues)
		out, err := doctor(t, "--transport", "socket")
		if (err == nil) != tt.ok || strings.Contains(out, "fix: "+fewerQueues) == tt.ok {
			t.Errorf("queues %s: %v\n%s", tt.queues, err, out)
		}
		s, err := settingsOf("", "", "socket")
		if err != nil {
			t.Fatal(err)
		}
		if _, err = (&daemon{s: s}).prepareSockets(); (err == nil) != tt.ok || err != nil && (exitCode(err) != exitConfig || !strings.Contains(err.Error(), fewerQueues)) {
			t.Errorf("queues %s: %v", tt.queues, err)
		}
	}

	testenv.RequireRoot(t)
	v := testenv.NewVethQueues(t, 1500, ctrl.MaxWorkers+1)
	for _, queues := range []string{"all", "0-63"} {
		cmd := v.A.NS.Command(os.Args[0], "doctor")
		cmd.Env = append(os.Environ(), asProgram+"=1", "IWARPD_INTERFACE="+v.A.Name, "IWARPD_QUEUES="+queues)
		out, _ := cmd.CombinedOutput()
		if strings.Contains(string(out), "fix: "+fewerQueues) != (queues == "all") || !strings.Contains(string(out), "queues") {
			t.Errorf("%d queues, of which it serves %s:\n%s", ctrl.MaxWorkers+1, queues, out)
		}
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
