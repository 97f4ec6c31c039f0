package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/tcp"
)

// parse parses args as the daemon does. If text is not empty, it is the configuration file.
func parse(t *testing.T, text string, args ...string) (*settings, error) {
	t.Helper()
	flags := pflag.NewFlagSet("iwarpd", pflag.ContinueOnError)
	addFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	file := ""
	if text != "" {
		file = filepath.Join(t.TempDir(), "iwarpd.yaml")
		testenv.WriteFile(t, file, []byte(text), 0o600)
	}
	return load(flags, file)
}

// parsed is parse for what the daemon accepts.
func parsed(t *testing.T, text string, args ...string) *settings {
	t.Helper()
	s, err := parse(t, text, args...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPrecedence(t *testing.T) {
	const text = "interface: file0\nspin: 1ms\nlog-level: warn\n"
	s := parsed(t, text)
	if !slices.Equal(s.names(), []string{"file0"}) || s.Spin != time.Millisecond || s.LogLevel != zapcore.WarnLevel {
		t.Errorf("file: %+v", s)
	}
	if s.Limits.Registered != 1<<30 || s.CRC != ctrl.CRCRequired || s.SocketMode != 0o660 {
		t.Errorf("defaults: %+v", s)
	}
	t.Setenv("IWARPD_INTERFACE", "env0")
	t.Setenv("IWARPD_LOG_LEVEL", "error")
	s = parsed(t, text, "--interface", "flag0", "--mpa-markers")
	if !slices.Equal(s.names(), []string{"flag0"}) || s.LogLevel != zapcore.ErrorLevel || s.Spin != time.Millisecond || !s.MPAMarkers {
		t.Errorf("flag over environment over file: %+v", s)
	}
}

// TestFileOfEnvironment checks that IWARPD_CONFIG names the file, unless --config does.
func TestFileOfEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "iwarpd.yaml")
	testenv.WriteFile(t, file, []byte("interface: env0\n"), 0o600)
	t.Setenv("IWARPD_CONFIG", file)
	if s := parsed(t, ""); !slices.Equal(s.names(), []string{"env0"}) || s.File != file {
		t.Errorf("without --config: %q of %s", s.names(), s.File)
	}
	if s := parsed(t, "interface: flag0\n"); !slices.Equal(s.names(), []string{"flag0"}) {
		t.Errorf("with --config: %q", s.names())
	}
}

// TestCRCKeys checks crc and crc-peers in a file, where YAML might read off as a boolean.
func TestCRCKeys(t *testing.T) {
	s := parsed(t, "interface: x\ncrc: off\ncrc-peers: 10.1.0.0/16=required, 10.2.0.7=optional,fd00::/8=off\n")
	rules := []ctrl.CRCRule{
		{Peers: netip.MustParsePrefix("10.1.0.0/16"), CRC: ctrl.CRCRequired},
		{Peers: netip.MustParsePrefix("10.2.0.7/32"), CRC: ctrl.CRCOptional},
		{Peers: netip.MustParsePrefix("fd00::/8"), CRC: ctrl.CRCOff},
	}
	c := ctrlConfig(s).Startup
	if c.CRC != ctrl.CRCOff || !slices.Equal(c.CRCPeers, rules) {
		t.Errorf("crc %v, crc-peers %v; want %v, %v", c.CRC, c.CRCPeers, ctrl.CRCOff, rules)
	}
}

// TestOff checks that off may be false, as programs write it into the file that have read it as a boolean: Helm does.
func TestOff(t *testing.T) {
	for _, key := range []string{"crc", "ecn", "super-frames"} {
		off, err := parse(t, "interface: x\n"+key+": off\n")
		if err != nil {
			t.Fatal(err)
		}
		s, err := parse(t, "interface: x\n"+key+": false\n")
		if err != nil || s.CRC != off.CRC || s.ECN != off.ECN || s.Super != off.Super {
			t.Errorf("%s: false is not off: %v", key, err)
		}
	}
	const want = `poll is "false": must be one of adaptive, busy`
	if _, err := parse(t, "interface: x\npoll: false\n"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("poll: false: %v", err)
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		args       []string
		want       string // in the message
	}{
		{"no interface", "", nil, "--interface IF"},
		{"no interface, the other transport", "", nil, "--transport socket"},
		{"sockets and an interface", "", []string{"-i", "x", "--transport", "socket"}, "transport socket serves every address"},
		{"transport", "", []string{"-i", "x", "--transport", "udp"}, "afxdp, socket"},
		{"unknown key", "interfcae: eth0\n", nil, `unknown key "interfcae": did you mean "interface"?`},
		{"unknown key, dotted", "interface: x\nallow.users: [root]\n", nil, `unknown key "allow.users": write "allow:", and "users:" indented below it`},
		{"unknown key, nested", "log:\n  level: debug\n", nil, `unknown key "log.level": did you mean "log-level"?`},
		{"unknown key, dotted otherwise", "interface: x\nlog.level: debug\n", nil, `unknown key "log.level": did you mean "log-level"?`},
		{"unknown key, empty", "interface: x\nlogs: {}\n", nil, `unknown key "logs": did you mean`},
		{"unknown key, null", "interface: x\nnull: 3\n", nil, `unknown key "null": did you mean`},
		{"unknown key, null in a rule", "interface: x\nallow: [{users: 5, ~: 3}]\n", nil, `allow: rule 1: unknown key "~": must be one of users`},
		{"unknown key, like none", "interface: x\nvolume: 11\n", nil, `unknown key "volume": iwarpd --help lists the keys`},
		{"quota of too much", "interface: x\nmax-registered: 99999999999999999999\n", nil, `must be a size from 1 to 1024TiB`},
		{"case", "Interface: eth0\n", nil, `unknown key "Interface": did you mean "interface"?`},
		{"case, capitals", "interface: x\nTTL: 3\n", nil, `unknown key "TTL": did you mean "ttl"?`},
		{"case, twice", "interface: x\nttl: 3\nTtl: 4\n", nil, `unknown key "Ttl": did you mean "ttl"?`},
		{"case of allow", "interface: x\nAllow: [{users: 5}]\n", nil, `unknown key "Allow": did you mean "allow"?`},
		{"case in a rule", "interface: x\nallow: [{Users: 5}]\n", nil, `allow: rule 1: unknown key "Users": must be one of users`},
		{"case in slots", "interface: x\nslots: {Count: 5}\n", nil, `slots: unknown key "Count": must be one of folder, count`},
		{"map without keys", "interface: x\nttl: {}\n", nil, "ttl: must be one value"},
		{"list", "ttl: [3]\n", nil, ": ttl: must be one value"},
		{"map for a list", "interface: x\ncpus: {0: 1}\n", nil, "cpus: must be one value, or a list of values"},
		{"list in a rule", "interface: x\nallow: [{users: 5, deny: [true]}]\n", nil, "rule 1: deny: must be one value"},
		{"list of a quota", "interface: x\nallow: [{users: 5, max-qps: [3]}]\n", nil, "rule 1: max-qps: must be one value"},
		{"list in slots", "interface: x\nslots: {count: [3]}\n", nil, "slots: count: must be one value"},
		{"rule after a rule for all", "interface: x\nallow: [{users: 5}, {listen: 7174}, {users: 7, deny: true}]\n", nil, "rule 3 has no effect, since rule 2 has neither users nor groups"},
		{"metrics at port 0", "interface: x\nmetrics: 127.0.0.1:0\n", nil, "a loopback address and port"},
		{"interface with a slash", "interface: a/b\n", nil, `interface is "a/b": no interface has such a name`},
		{"interface with a space", "interfaces: [eth0, \"a b\"]\n", nil, `interface is "a b": no interface has such a name`},
		{"interface with the byte 0xa0", "interface: Straße-à\n", nil, "no interface has such a name"},
		{"interface with a colon", "", []string{"-i", "eth0:1"}, "no interface has such a name"},
		{"interface of 128 bytes", "interface: " + strings.Repeat("a", 128) + "\n", nil, "at most 15 bytes"},
		{"interface of two dots", "interface: \"..\"\n", nil, "no interface has such a name"},
		{"group that cannot have that name", "interface: x\nsocket-group: -x\n", nil, `socket-group: "-x": is neither a name nor a number`},
		{"rule, user that cannot have that name", "interface: x\nallow:\n  - users: [\"a:b\"]\n", nil, `users: "a:b": is neither a name nor a number`},
		{"mode without quotes", "interface: eth0\nsocket-mode: 0660\n", nil, "in quotes"},
		{"not YAML", "interface: eth0\n\tx", nil, "not YAML"},
		{"key twice", "interface: eth0\nttl: 3\nttl: 4\n", nil, "not YAML: line 3: mapping key"},
		{"tab", "interface: eth0\nallow:\n\t- users: [root]\n", nil, "line 3: found character that cannot start any token: indent with spaces, not with tabs"},
		{"no mapping", "eth0\n", nil, "must have keys like \"interface: eth0\""},
		{"equals sign", "interface=eth0\n", nil, "must have keys like \"interface: eth0\""},
		{"list of keys", "- interface: eth0\n", nil, "must have keys like \"interface: eth0\""},
		{"binary", "\x7fELF\x02\x01\x01\x00", nil, "not YAML: control characters are not allowed"},
		{"number quoted as it was typed", "interface: x\nmax-qps: 99999999999999999999\n", nil, `max-qps is "99999999999999999999": must be a number`},
		{"number with an exponent", "interface: x\nmax-qps: 1e3\n", nil, `max-qps is "1e3": must be a number`},
		{"date", "interface: x\nkeep-alive: 2020-01-01\n", nil, `keep-alive is "2020-01-01": must be 0, or a time`},
		{"line ends of Windows", "interface: x\r\nlog-level: inf\r\n", nil, `log-level is "inf": must be`},
		{"receive window", "interface: x\nreceive-window: 4MB\n", nil, "must be a size from 65535 to 1GiB, like 2MiB"},
		{"receive window, too large", "interface: x\nreceive-window: 2GiB\n", nil, "must be a size from 65535 to 1GiB"},
		{"rule, user without a name", "interface: x\nallow:\n  - users: [~]\n", nil, "rule 1: users: must be one value, or a list of values"},
		{"rule, no truth", "interface: x\nallow:\n  - users: [0]\n    deny: maybe\n", nil, `rule 1: deny: "maybe": must be true or false`},
		{"slots", "interface: x\nslots:\n  count: many\n", nil, `count: "many": must be a number from 0 to 4096`},
		{"interface that clients cannot name", "", []string{"-i", "x\xff"}, `interface is "x\xff": clients cannot be given`},
		{"all CPUs", "", []string{"-i", "x", "--cpus", "all"}, `must be "" or a list`},
		{"keep-alive without pause", "", []string{"-i", "x", "--keep-alive", "1ns"}, "must be 0, or a time from 1s to 24h0m0s"},
		{"time-out of no time", "", []string{"-i", "x", "--tcp-user-timeout", "1us"}, "must be 0, or a time from 1s"},
		{"two documents", "interface: eth0\n---\nlog-level: debug\n", nil, "more than one YAML document"},
		{"two documents, the first empty", "# nothing\n---\n---\ninterface: eth0\n", nil, "more than one YAML document"},
		{"not YAML, in a second document", "interface: eth0\n---\n\tx", nil, "not YAML"},
		{"poll", "", []string{"-i", "x", "--poll", "lazy"}, `--poll is "lazy": must be one of adaptive, busy`},
		{"xdp mode", "", []string{"-i", "x", "--xdp-mode", "skb"}, "auto, native, generic"},
		{"log level", "", []string{"-i", "x", "--log-level", "loud"}, "must be one of debug, info, warn, error"},
		{"fatal is no level", "", []string{"-i", "x", "--log-level", "fatal"}, "must be one of debug, info, warn, error"},
		{"mtu", "", []string{"-i", "x", "--mtu", "-1"}, "from 576 to 9216"},
		{"mtu, too small for an FPDU", "", []string{"-i", "x", "--mtu", "68"}, "from 576 to 9216"},
		{"spin", "", []string{"-i", "x", "--spin", "2s"}, "must be a time with a unit, from 0s to 1s"},
		{"queues", "", []string{"-i", "x", "--queues", "3-1"}, "a list like"},
		{"queue twice", "", []string{"-i", "x", "--queues", "0,0"}, "a list like"},
		{"cpus and queues", "", []string{"-i", "x", "--queues", "0-1", "--cpus", "3"}, "1 CPU for 2 queues"},
		{"socket", "", []string{"-i", "x", "--socket", strings.Repeat("s", 108)}, "1 to 107"},
		{"size", "", []string{"-i", "x", "--max-registered", "1GB"}, "16MiB"},
		{"rule, unknown key", "interface: x\nallow:\n  - user: [1]\n", nil, `allow: rule 1: unknown key "user": must be one of users, groups`},
		{"rule, nobody", "interface: x\nallow:\n  - users: []\n", nil, "restrict nothing"},
		{"rule, no group", "interface: x\nallow:\n  - groups: []\n    admin: true\n", nil, "restrict nothing"},
		{"rule, ports", "interface: x\nallow:\n  - listen: 9-8\n", nil, "1 to 65535"},
		{"rule, address", "interface: x\nallow:\n  - addresses: 10.0.0.1/24\n", nil, "did you mean 10.0.0.0/24"},
		{"rule, address with a zone", "interface: x\nallow:\n  - addresses: fe80::1%eth0\n", nil, `"fe80::1%eth0": must be an address, or a network`},
		{"rule, empty truth", "interface: x\nallow:\n  - users: [0]\n    deny:\n", nil, `rule 1: deny: "": must be true or false`},
		{"rule, empty quota", "interface: x\nallow:\n  - users: 5\n    max-qps:\n", nil, `rule 1: max-qps: "": must be a number from 1 to`},
		{"rule, quota", "interface: x\nallow:\n  - users: 5\n    max-qps: none\n", nil, `rule 1: max-qps: "none": must be a number from 1 to`},
		{"rule, quota of nothing", "interface: x\nallow:\n  - users: 5\n    max-registered: 0\n", nil, `rule 1: max-registered: "0": must be a size from 1 to 1024TiB`},
		{"rule, no list", "interface: x\nallow: all\n", nil, "must be a list of rules"},
		{"queue memory", "", []string{"-i", "x", "--queue-memory", "48MiB"}, "a power of two from 4MiB"},
		{"queue memory, too little", "", []string{"-i", "x", "--queue-memory", "2MiB"}, "from 4MiB to 16GiB"},
		{"crc", "", []string{"-i", "x", "--crc", "none"}, "required, optional, off"},
		{"crc peers, no policy", "", []string{"-i", "x", "--crc-peers", "10.0.0.0/8"}, "like 10.1.0.0/16=off"},
		{"crc peers, policy", "", []string{"-i", "x", "--crc-peers", "10.0.0.0/8=never"}, "required, optional, off"},
		{"crc peers, network", "", []string{"-i", "x", "--crc-peers", "10.0.0.1/8=off"}, "did you mean 10.0.0.0/8"},
		{"crc peers, twice", "", []string{"-i", "x", "--crc-peers", "10.0.0.0/8=off,10.0.0.0/8=required"}, "10.0.0.0/8 has no effect, since 10.0.0.0/8 is before it"},
		{"crc peers, covered", "", []string{"-i", "x", "--crc-peers", "fd00::/8=off,10.0.0.0/8=off,10.1.0.0/16=required"}, "10.1.0.0/16 has no effect, since 10.0.0.0/8 is before it"},
		{"crc peers, mapped", "", []string{"-i", "x", "--crc-peers", "::ffff:10.0.0.0/104=off"}, "write it as an IPv4 address"},
		{"size overflow", "", []string{"-i", "x", "--max-registered", "9999999TiB"}, "16MiB"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse(t, tt.text, tt.args...)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v; want it to hold %q", err, tt.want)
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of more than one line: %q", err)
			}
			if got := exitCode(err); got != exitConfig {
				t.Errorf("exit code %d; want %d", got, exitConfig)
			}
		})
	}
}

// TestUnknownNames checks that systemd starts the daemon again after a user or group was not found, which the directory service may know
// later.
func TestUnknownNames(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\ncase $2 in broken) exit 3 ;; *) exit 2 ;; esac\n"
	testenv.WriteFile(t, filepath.Join(dir, "getent"), []byte(script), 0o755)
	t.Setenv("PATH", dir)
	for text, want := range map[string]string{
		"socket-group: nobody-has-this-name":        `socket-group: "nobody-has-this-name": not known on this host: create the group, or name another`,
		"socket-group: broken":                      `socket-group: "broken": getent group: exit status 3`,
		"allow:\n  - users: [nobody-has-this-name]": `allow: rule 1: users: "nobody-has-this-name": not known on this host: use a number, or create it first`,
		"allow:\n  - groups: [5, broken, 7]":        `allow: rule 1: groups: "broken": getent group: exit status 3`,
	} {
		_, err := parse(t, "interface: x\n"+text+"\n")
		if err == nil || !strings.Contains(err.Error(), want) || exitCode(err) != exitFailure {
			t.Errorf("%s: exit code %d: %v; want %q", text, exitCode(err), err, want)
		}
	}
}

// TestInterfaces checks that one interface or several can be given, and that a source of higher precedence replaces
// both keys.
func TestInterfaces(t *testing.T) {
	for _, tt := range []struct {
		name, text, env string
		args            []string
		want            []string
		err             string
	}{
		{name: "one", text: "interface: eth0\n", want: []string{"eth0"}},
		{name: "a list", text: "interfaces: [eth0, eth1]\n", want: []string{"eth0", "eth1"}},
		{name: "text", text: "interfaces: eth0, eth1\n", want: []string{"eth0", "eth1"}},
		{name: "flag", text: "interfaces: [eth0, eth1]\n", args: []string{"--interfaces", "eth2,eth3"}, want: []string{"eth2", "eth3"}},
		{name: "one by flag", text: "interfaces: [eth0, eth1]\n", args: []string{"-i", "eth2"}, want: []string{"eth2"}},
		{name: "several by the environment", text: "interface: eth0\n", env: "eth1,eth2", want: []string{"eth1", "eth2"}},
		{name: "empty", text: "interface: eth0\ninterfaces: []\n", want: []string{"eth0"}},
		{name: "cleared by flag", text: "interfaces: [eth0]\n", args: []string{"-i", ""}, err: "no interface"},
		{name: "cleared by the other flag", text: "interface: eth0\ntransport: socket\n", args: []string{"--interfaces", ""}},
		{name: "cleared by flag, over the environment", env: "eth0", args: []string{"-i", "", "--transport", "socket"}},
		{name: "both", text: "interface: eth0\ninterfaces: [eth1]\n", err: "list all of them in interfaces"},
		{name: "twice", text: "interfaces: [eth1, eth0, eth1]\n", err: "eth1 twice"},
		{name: "a list in the other key", text: "interface: [eth0, eth1]\n", want: []string{"eth0", "eth1"}},
		{name: "flag twice", text: "interface: eth9\n", args: []string{"-i", "eth0", "-i", "eth1"}, want: []string{"eth0", "eth1"}},
		{name: "flag twice, with commas", args: []string{"--interfaces", "eth0,eth1", "--interfaces=eth2"}, want: []string{"eth0", "eth1", "eth2"}},
		{name: "flag again after an empty one", args: []string{"-i", "eth0", "-i", "", "-i", "eth1"}, want: []string{"eth1"}},
		{name: "the same flag twice", args: []string{"-i", "eth0", "-i", "eth0"}, err: "eth0 twice"},
		{name: "null in the list", text: "interfaces: [~, eth0]\n", err: "interfaces: must be one value, or a list of values"},
		{name: "a list in the list", text: "interfaces: [[eth0]]\n", err: "must be one value, or a list of values"},
		{name: "a map in the list", text: "interfaces: [{eth0: 1}]\n", err: "must be one value, or a list of values"},
		{name: "with sockets", text: "interfaces: [eth0, eth1]\ntransport: socket\n", err: "eth0,eth1"},
		{name: "CPUs", text: "interfaces: [eth0, eth1]\nqueues: 0,1\ncpus: 0-2\n", err: "3 CPUs for 4 queues"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.env != "" {
				t.Setenv("IWARPD_INTERFACES", tt.env)
			}
			s, err := parse(t, tt.text, tt.args...)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v; want %q in it", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(s.names(), tt.want) {
				t.Errorf("%v; want %v", s.names(), tt.want)
			}
		})
	}
}

// TestLists checks that each key with several values may be text with commas, a list, or a flag that is given several times.
func TestLists(t *testing.T) {
	text := parsed(t, "interfaces: eth0, eth1\nqueues: 0,2-3\ncpus: 2,3,7-10\ncrc-peers: 10.1.0.0/16=off,fd00::/8=optional\nallow-set: ip f a, ip6 f b\n")
	list := parsed(t, "interfaces: [eth0, eth1]\nqueues: [0, 2-3]\ncpus: [2, 3, 7-10]\ncrc-peers: [10.1.0.0/16=off, \"fd00::/8=optional\"]\nallow-set: [ip f a, ip6 f b]\n")
	flags := parsed(t, "", "--interfaces", "eth0", "--interfaces", "eth1", "--queues", "0", "--queues", "2-3", "--cpus", "2,3", "--cpus", "7-10",
		"--crc-peers", "10.1.0.0/16=off", "--crc-peers", "fd00::/8=optional", "--allow-set", "ip f a", "--allow-set", "ip6 f b")
	for _, s := range []*settings{text, list, flags} {
		s.values, s.File = nil, ""
	}
	if !reflect.DeepEqual(text, list) || !reflect.DeepEqual(text, flags) || len(list.CPUs) != 6 || len(list.CRCPeers) != 2 {
		t.Errorf("text %+v\nlists %+v\nflags %+v", text, list, flags)
	}
}

// TestAllowSet checks that allow-set is one set or a list of sets.
func TestAllowSet(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "[]",
		"allow-set: inet filter peers\n":    "[inet filter peers]",
		"allow-set: ip filter a, ip6 t b\n": "[ip filter a ip6 t b]",
		"allow-set: [inet filter peers4, inet filter peers6]\n": "[inet filter peers4 inet filter peers6]",
	} {
		if s, err := parse(t, "interface: x\n"+text); err != nil || fmt.Sprint(s.AllowSets) != want {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
	if _, err := parse(t, "interface: x\nallow-set: filter peers\n"); err == nil || exitCode(err) != exitConfig || !strings.Contains(err.Error(), "like inet filter rdma_peers") {
		t.Error(err)
	}
}

// TestTyped checks that a file may have the text of Windows and JSON, and that sizes may have short units.
func TestTyped(t *testing.T) {
	for _, text := range []string{
		"interface: x\nreceive-window: 4MiB\nird: 7\nmpa-markers: true\n",
		"interface: x\r\nreceive-window: 4M\r\nird: 7\r\nmpa-markers: true\r\n",
		"\ufeffinterface: x\nreceive-window: 4 MiB\nird: \"7\"\nmpa-markers: True\n",
		`{"interface": "x", "receive-window": 4194304, "ird": 7, "mpa-markers": true}`,
	} {
		if s, err := parse(t, text); err != nil || s.RcvWindow != 4<<20 || s.IRD != 7 || !s.MPAMarkers {
			t.Errorf("%q: %+v, %v", text, s, err)
		}
	}
}

// TestConfigFile checks the errors of a file that cannot be read.
func TestConfigFile(t *testing.T) {
	dir := t.TempDir()
	fifo, large := filepath.Join(dir, "fifo"), filepath.Join(dir, "large")
	if err := errors.Join(unix.Mkfifo(fifo, 0o600), os.WriteFile(large, nil, 0o600), os.Truncate(large, 5<<20)); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		fifo:                       fifo + ": is not a regular file",
		large:                      large + " has more than 4 MiB: is that the right file?",
		dir:                        dir + ": is a directory",
		filepath.Join(dir, "none"): filepath.Join(dir, "none") + ": no such file or directory",
		"/dev/zero":                "/dev/zero: is not a regular file",
	} {
		flags := pflag.NewFlagSet("iwarpd", pflag.ContinueOnError)
		addFlags(flags)
		if _, err := load(flags, file); err == nil || !strings.Contains(err.Error(), want) || exitCode(err) != exitConfig {
			t.Errorf("%q: %v; want %q", file, err, want)
		}
	}
}

func TestEnvironmentUnknown(t *testing.T) {
	t.Setenv("IWARPD_INTRFACE", "eth0")
	_, err := parse(t, "")
	if err == nil || !strings.Contains(err.Error(), "did you mean IWARPD_INTERFACE?") {
		t.Errorf("error %v", err)
	}
	t.Setenv("IWARPD_INTRFACE", "")
	os.Unsetenv("IWARPD_INTRFACE")
	t.Setenv("IWARPD_BOGUS", "1")
	if _, err := parse(t, ""); err == nil || !strings.Contains(err.Error(), "IWARPD_BOGUS: unset it") {
		t.Errorf("like no other: %v", err)
	}
	os.Unsetenv("IWARPD_BOGUS")
	for name, key := range map[string]string{"IWARPD_SLOTS": slotsKey, "IWARPD_ALLOW": allowKey} {
		t.Setenv(name, "x")
		if _, err := parse(t, ""); err == nil || !strings.Contains(err.Error(), name+": write the key "+key+" into the file") {
			t.Errorf("%s: %v", name, err)
		}
		os.Unsetenv(name)
	}
}

// TestEnvironmentOfPrograms checks that the daemon starts in a shell that has the variables of iwarpd-run.
func TestEnvironmentOfPrograms(t *testing.T) {
	t.Setenv("IWARPD_VERBS", "on")
	t.Setenv("IWARPD_VERBS_LOG", "1")
	if _, err := parse(t, "", "--interface", "x"); err != nil {
		t.Error(err)
	}
}

func TestEnvironmentNames(t *testing.T) {
	t.Setenv("IWARPD_QUEUES", "all")
	_, err := parse(t, "", "-i", "x")
	if err != nil {
		t.Error(err)
	}
	t.Setenv("IWARPD_QUEUES", "x")
	_, err = parse(t, "", "-i", "x")
	if err == nil || !strings.HasPrefix(err.Error(), "IWARPD_QUEUES is ") {
		t.Errorf("error %v; want it to name the variable", err)
	}
}

// TestDeployedFile checks that deploy/iwarpd.yaml loads, names every key, and states the real defaults.
func TestDeployedFile(t *testing.T) {
	const file = "../../deploy/iwarpd.yaml"
	text := testenv.ReadFile(t, file)
	if _, err := parse(t, string(text), "--interface", "if0"); err != nil {
		t.Fatal(err)
	}
	// It names no interface, since an XDP program on the wrong one may take a host off the network.
	if _, err := parse(t, string(text)); err == nil || exitCode(err) != exitConfig || !strings.Contains(err.Error(), "no interface: name one") {
		t.Errorf("%s without an interface: %v", file, err)
	}
	v := viper.New()
	rules, err := readFile(v, file)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range ruleKeys {
		if !strings.Contains(string(text), "\n#   "+name) {
			t.Errorf("%s does not explain %s of a rule", file, name)
		}
	}
	for _, name := range slotKeys {
		if !strings.Contains(string(text), "\n#     "+name) && !strings.Contains(string(text), "\n#   "+name) {
			t.Errorf("%s does not explain %s of slots", file, name)
		}
	}
	if got := rules[allowKey]; !reflect.DeepEqual(got, []any{}) {
		t.Errorf("%s: allow is %v", file, got)
	}
	// Keys that share one comment stand together below it.
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		if name, _, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, "#") && lines[i-1] == "" {
			t.Errorf("%s: no comment above %s", file, name)
		}
	}
	for _, k := range keys {
		if !v.InConfig(k.name) {
			t.Errorf("%s does not name %s", file, k.name)
		} else if got := v.GetString(k.name); got != k.def && k.name != "interface" {
			t.Errorf("%s: %s is %q; the default is %q", file, k.name, got, k.def)
		}
	}
}

func TestParseList(t *testing.T) {
	got, err := parseList("0,2-4,9", "all")
	if err != nil || !slices.Equal(got, []int{0, 2, 3, 4, 9}) {
		t.Errorf("parseList = %v, %v", got, err)
	}
	for _, bad := range []string{",", "1,", "-1", "1-", "a", "0-99999", "0-65535"} {
		if got, err := parseList(bad, "all"); err == nil {
			t.Errorf("parseList(%q) = %v; want an error", bad, got)
		}
	}
}

func TestDistance(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"kitten", "sitting", 3}, {"poll", "pol", 1}} {
		if got := distance(tt.a, tt.b); got != tt.want {
			t.Errorf("distance(%q, %q) = %d; want %d", tt.a, tt.b, got, tt.want)
		}
		if got := distance(tt.b, tt.a); got != tt.want {
			t.Errorf("distance(%q, %q) = %d; want %d", tt.b, tt.a, got, tt.want)
		}
	}
}

// TestTCPKeys checks that the time-outs of TCP reach the engine, and that TIME-WAIT also reaches the ports.
func TestTCPKeys(t *testing.T) {
	s := parsed(t, "interface: x\ntcp-r2: 10s\ntcp-r2-syn: 20s\ntcp-user-timeout: 30s\ntcp-time-wait: 40s\nkeep-alive: 60s\necn: request\ndscp: 46\nttl: 9\nvlan-priority: 7\n")
	c := tcpConfig(s)
	if c.DataTimeout != 10*time.Second || c.SynTimeout != 20*time.Second || c.UserTimeout != 30*time.Second || c.TimeWait != 40*time.Second || c.ECN != tcp.RequestECN {
		t.Errorf("%+v", c)
	}
	if c.KeepAliveIdle != time.Minute || c.KeepAliveInterval*time.Duration(c.KeepAliveCount) != time.Minute {
		t.Errorf("keep-alive after %v, %d times each %v; want as much again as the silence", c.KeepAliveIdle, c.KeepAliveCount, c.KeepAliveInterval)
	}
	if got := ctrlConfig(s).IP; got != (dataplane.IPOptions{DSCP: 46, TTL: 9, Priority: 7}) {
		t.Errorf("%+v", got)
	}
	if got := ctrlConfig(s).TimeWait; got != 40*time.Second {
		t.Errorf("ports rest for %v; want 40s", got)
	}
	s = parsed(t, "interface: x\n")
	// RFC 9293 SHLD-11 and MUST-23.
	if c = tcpConfig(s); c.DataTimeout < 100*time.Second || c.SynTimeout < 3*time.Minute || c.UserTimeout != 0 || c.TimeWait != time.Minute || c.ECN != tcp.AcceptECN || c.KeepAliveIdle != 30*time.Second {
		t.Errorf("defaults: %+v", c)
	}
}

func TestSlots(t *testing.T) {
	s := parsed(t, "interface: x\nmax-qps: 7\nslots:\n  count: 3\n  listen: 20000-20009\n  max-clients: 2\n")
	want := ctrl.Slots{Folder: "/run/iwarpd/slots", Count: 3, Rule: ctrl.Rule{Listen: []ctrl.PortRange{{From: 20000, To: 20009}}}}
	limits := s.Limits
	limits.Clients = 2
	want.Rule.Limits = &limits
	if limits.QPs != 7 || !reflect.DeepEqual(s.Slots, want) {
		t.Errorf("slots %+v; want %+v", s.Slots, want)
	}
	longest := ctrl.Slots{Folder: "/" + strings.Repeat("a", 89), Count: 4096}
	if s := parsed(t, "interface: x\nslots: {count: 4096, folder: "+longest.Folder+"}\n"); !reflect.DeepEqual(s.Slots, longest) {
		t.Errorf("slots %+v; want %+v", s.Slots, longest)
	}
	for _, tt := range []struct{ text, want string }{
		{"slots: 3", "slots: must have keys"},
		{"slots:\n  count: 4097", `count: "4097": must be a number from 0 to 4096`},
		{"slots:\n  count: -1", `count: "-1": must be a number from 0 to 4096`},
		{"slots:\n  count: three", `count: "three": must be a number`},
		{"slots:\n  folder: run", `folder: "run": must be an absolute path`},
		{"slots:\n  folder: /" + strings.Repeat("a", 90), "must be an absolute path of at most 90 bytes"},
		{"slots:\n  users: [alice]", "unknown key \"users\": must be one of folder"},
		{"slots:\n  listen: 0", "must be ports from 1 to 65535"},
	} {
		if _, err := parse(t, "interface: x\n"+tt.text+"\n"); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v; want %q in it", tt.text, err, tt.want)
		}
	}
}
