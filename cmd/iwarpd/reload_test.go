package main

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
)

// TestQuotaKeys checks that each quota is a key of the configuration and of a rule, with the default of package ctrl.
func TestQuotaKeys(t *testing.T) {
	s := parsed(t, "interface: eth0\n")
	def := ctrl.DefaultLimits
	def.QueueDepth, def.MaxInline, def.MaxSGE = 0, 0, 0 // limits of a queue, not of a user
	if s.Limits != def {
		t.Errorf("defaults %+v; want %+v", s.Limits, def)
	}
	s = parsed(t, "interface: eth0\nmax-captures: 5\nmax-regions: 100\nallow:\n  - users: 7\n    max-captures: 1\n    max-regions: 9\n")
	if s.Limits.Captures != 5 || s.Limits.MRs != 100 || s.Allow[0].Limits.Captures != 1 || s.Allow[0].Limits.MRs != 9 {
		t.Errorf("%+v, rule %+v", s.Limits, s.Allow[0].Limits)
	}
}

func TestAllow(t *testing.T) {
	s, err := parse(t, `
interface: eth0
max-qps: 100
allow:
  - users: [root, 1007]
    groups: 50
    listen: "7174, 20000-20999"
    addresses: [10.0.0.0/24, "fd00::1"]
    accept-from: [10.0.0.0/24, "fd00::/8"]
    connect-to: 10.0.0.7
    max-registered: 16GiB
    max-rings: 65536
  - users: 7
    deny: true
  - groups: 60
  - admin: true
`)
	if err != nil {
		t.Fatal(err)
	}
	want := []ctrl.Rule{
		{
			UIDs: []uint32{0, 1007}, GIDs: []uint32{50}, Listen: []ctrl.PortRange{{From: 7174, To: 7174}, {From: 20000, To: 20999}},
			Addrs:      []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::1/128")},
			AcceptFrom: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/8")},
			ConnectTo:  []netip.Prefix{netip.MustParsePrefix("10.0.0.7/32")},
			Limits:     &ctrl.Limits{Clients: 256, PDs: 4096, MRs: 16384, MWs: 4096, CQs: 4096, CQDepth: 262144, QPs: 100, Listens: 256, Ports: 8192, Captures: 2, Registered: 16 << 30, Rings: 65536, Messages: 64 << 20},
		},
		{UIDs: []uint32{7}, Deny: true},
		{GIDs: []uint32{60}},
		{Admin: true},
	}
	if diff := cmp.Diff(want, s.Allow, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := ctrlConfig(s); got.Limits.Rings != 1<<30 || len(got.Allow) != len(want) {
		t.Errorf("%+v", got)
	}
	if !sameRules(s.Allow, want) || sameRules(s.Allow, want[:2]) || sameRules(s.Allow, []ctrl.Rule{want[0], {}, want[2]}) {
		t.Error("sameRules")
	}
	for i := range reflect.TypeFor[ctrl.Rule]().NumField() {
		other := []ctrl.Rule{want[0]}
		if f := reflect.ValueOf(&other[0]).Elem().Field(i); f.Kind() == reflect.Bool {
			f.SetBool(!f.Bool())
		} else {
			f.SetZero()
		}
		if sameRules(want[:1], other) {
			t.Errorf("rules with another %s are the same", reflect.TypeFor[ctrl.Rule]().Field(i).Name)
		}
	}
	limits := *want[0].Limits
	other := want[0]
	other.Limits = &limits
	if !sameRules(want[:1], []ctrl.Rule{other}) {
		t.Error("rules with equal quotas differ")
	}
	if limits.QPs++; sameRules(want[:1], []ctrl.Rule{other}) {
		t.Error("rules with other quotas are the same")
	}
}

// newDaemon returns a daemon with the settings of text, on eth0.
func newDaemon(t *testing.T, text string) *daemon {
	t.Helper()
	s := parsed(t, text)
	server, err := ctrl.New(ctrlConfig(s), ctrl.Options{Resolver: &hostnet.Static{}, Devices: []ctrl.Device{{Name: "eth0"}}})
	if err != nil {
		t.Fatal(err)
	}
	server.Bind(countedEngine{})
	return &daemon{s: s, log: zap.NewNop(), level: zap.NewAtomicLevelAt(s.LogLevel), server: server}
}

// TestReload checks that settings that can change do change, and that others are logged and keep their value.
func TestReload(t *testing.T) {
	const before = "interface: eth0\nlog-level: info\nmax-qps: 10\n"
	d := newDaemon(t, before)
	for _, tt := range []struct {
		text          string
		changed, kept []string
	}{
		{before, nil, nil},
		{"interface: eth1\nlog-level: debug\nmax-qps: 10\npoll: busy\n", []string{"log-level"}, []string{"interface", "poll"}},
		{"interface: eth0\nlog-level: debug\nmax-qps: 20\nmax-rings: 1MiB\ncrc: off\nallow: [{users: 5}]\n",
			[]string{"crc", "max-qps", "max-rings", "allow"}, nil},
		{"interface: eth0\nlog-level: debug\nmax-qps: 20\nmax-rings: 1MiB\ncrc: off\nallow: [{users: 5}]\n", nil, nil},
	} {
		next := parsed(t, tt.text)
		changed, kept := d.reload(next)
		if !slices.Equal(changed, tt.changed) || !slices.Equal(kept, tt.kept) {
			t.Errorf("%q:\nchanged %v; want %v\nkept %v; want %v", tt.text, changed, tt.changed, kept, tt.kept)
		}
	}
	if d.s.Limits.QPs != 20 || d.s.CRC != ctrl.CRCOff || d.s.names()[0] != "eth0" || d.s.Poll != dataplane.Adaptive || d.level.Level() != zapcore.DebugLevel || len(d.s.Allow) != 1 {
		t.Errorf("%+v", d.s)
	}
	for _, wrong := range []string{"max-qps: many", "crc: maybe", "crc-peers: 10.0.0.1/8=off", "allow: [{groups: [nosuchgroup]}]", "allow: [{users: 6, deny: 1}]", "allow: [{accept-from: []}]",
		"allow: [{connect-to: []}]", "allow: [{listen: []}]", "allow: [{addresses: []}]", "allow: [{users: []}]", "slots: {listen: []}", "slots: {addresses: []}", "denied-connections: maybe"} {
		d.read = func() (*settings, error) { return parse(t, "interface: eth0\n"+wrong+"\n") }
		d.hangup()
		if d.s.Limits.QPs != 20 || d.s.CRC != ctrl.CRCOff || len(d.s.Allow) != 1 || d.s.Allow[0].UIDs[0] != 5 {
			t.Errorf("%s: taken over: %+v", wrong, d.s)
		}
		key, _, _ := strings.Cut(wrong, ":")
		if why := d.server.Status().NotReloaded; !strings.Contains(why, key) {
			t.Errorf("%s: not reloaded: %q", wrong, why)
		}
	}
}

// TestReloadSlots checks that the rights of slots can change, and that their folder and number cannot.
func TestReloadSlots(t *testing.T) {
	d := newDaemon(t, "interface: eth0\nslots: {folder: /a, count: 2, listen: 7}\n")
	for _, tt := range []struct {
		slots         string
		changed, kept []string
	}{
		{"{folder: /a, count: 2, listen: 7}", nil, nil},
		{"{folder: /a, count: 2, listen: 8}", []string{"slots"}, nil},
		{"{folder: /b, count: 2, listen: 8}", nil, []string{"slots"}},
		{"{folder: /a, count: 3, listen: 8}", nil, []string{"slots"}},
	} {
		changed, kept := d.reload(parsed(t, "interface: eth0\nslots: "+tt.slots+"\n"))
		if !slices.Equal(changed, tt.changed) || !slices.Equal(kept, tt.kept) {
			t.Errorf("%s: changed %v, kept %v; want %v, %v", tt.slots, changed, kept, tt.changed, tt.kept)
		}
	}
	want := ctrl.Slots{Folder: "/a", Count: 2, Rule: ctrl.Rule{Listen: []ctrl.PortRange{{From: 8, To: 8}}}}
	if !reflect.DeepEqual(d.s.Slots, want) {
		t.Errorf("slots %+v; want %+v", d.s.Slots, want)
	}
}

// TestReloadNotifies checks that systemd gets the reason for which a reload was refused, as one line, until a reload succeeds.
func TestReloadNotifies(t *testing.T) {
	systemd := notifySocket(t, time.Minute)
	d := newDaemon(t, "interface: eth0\n")
	for _, tt := range []struct {
		err  error
		want string
	}{{errors.New("config: max-qps:\nMAINPID=1"), `READY=1
STATUS=not reloaded: config: max-qps:\u000aMAINPID=1`}, {nil, "READY=1\nSTATUS="},
		{errors.New(strings.Repeat("x", 1<<16)), "READY=1\nSTATUS=not reloaded: " + strings.Repeat("x", 1024)}} { // systemd takes 4096 bytes
		d.read = func() (*settings, error) { return d.s, tt.err }
		d.hangup()
		for _, want := range []string{"RELOADING=1\nMONOTONIC_USEC=", tt.want} {
			b := make([]byte, 1<<17)
			_ = systemd.SetReadDeadline(time.Now().Add(time.Minute))
			if n, err := systemd.Read(b); err != nil || !strings.HasPrefix(string(b[:n]), want) || want == tt.want && n != len(want) {
				t.Fatalf("systemd got %q, %v; want %q", b[:n], err, want)
			}
		}
		if why := d.server.Status().NotReloaded; (why == "") != (tt.err == nil) {
			t.Errorf("not reloaded: %q, after %v", why, tt.err)
		}
	}
}

func TestReloadable(t *testing.T) {
	for _, name := range reloadable {
		if !slices.ContainsFunc(keys, func(k key) bool { return k.name == name }) {
			t.Errorf("%s is no key", name)
		}
	}
	if got := reloading(); !strings.HasPrefix(got, "RELOADING=1\nMONOTONIC_USEC=") {
		t.Errorf("%q", got)
	}
}
