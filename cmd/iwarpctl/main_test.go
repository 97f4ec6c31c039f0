package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/app/perf"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// ctl runs one command line.
func ctl(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(t.Context(), args, &o, &e)
	return code, o.String(), e.String()
}

// TestUsageJSON checks that errors in the command line are JSON with --json, before and after the error.
func TestUsageJSON(t *testing.T) {
	for _, args := range [][]string{
		{"--json", "status", "--nosuch"}, {"status", "--nosuch", "--json"}, {"top", "--count", "many", "--json"}, {"nosuch", "--json"}, {"qp", "show", "--json"},
	} {
		code, out, errOut := ctl(t, args...)
		var e struct {
			Error string
			Code  int
		}
		if err := json.Unmarshal([]byte(errOut), &e); err != nil || code != exitUsage || e.Code != code || e.Error == "" || out != "" {
			t.Errorf("%q: exit code %d, %v: %q", args, code, err, errOut)
		}
	}
	if _, _, errOut := ctl(t, "status", "--nosuch"); !strings.HasPrefix(errOut, "iwarpctl: ") {
		t.Errorf("%q", errOut)
	}
}

// TestHelpWidth checks that the help of each command fits a terminal of 80 columns, but for examples, which stay one line.
func TestHelpWidth(t *testing.T) {
	var show func(cmd *cobra.Command)
	show = func(cmd *cobra.Command) {
		_, out, _ := ctl(t, append(strings.Fields(cmd.CommandPath())[1:], "--help")...)
		for line := range strings.Lines(out) {
			if text.StringWidth(strings.TrimSpace(line)) > 80 && !strings.HasPrefix(line, "  iwarpctl ") {
				t.Errorf("%s --help: %s", cmd.CommandPath(), line)
			}
		}
		for _, sub := range cmd.Commands() {
			show(sub)
		}
	}
	show((&command{}).root())
}

// TestSilentDaemon asks a daemon that is stopped.
func TestSilentDaemon(t *testing.T) {
	defer func(was time.Duration) { daemonPatience = was }(daemonPatience)
	daemonPatience = 50 * time.Millisecond
	socket := filepath.Join(t.TempDir(), "silent.sock")
	l, err := net.Listen("unixpacket", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	code, out, errOut := ctl(t, "--socket", socket, "mr", "list")
	if want := "iwarpd at " + socket + " does not answer: is it still starting, its process stopped"; code != exitDaemon || out != "" || !strings.Contains(errOut, want) {
		t.Errorf("exit code %d, %q, %q; want %d and %q", code, out, errOut, exitDaemon, want)
	}
}

// internals matches Go's own terms, which no error may show.
var internals = regexp.MustCompile(`goroutine|panic|%!|0x[0-9a-f]{6}|strconv|netip|openat|errgroup|context deadline|i/o timeout|lookup .* on |invalid syntax`)

// TestErrors checks that each mistake gives one line that says what to do, and the right exit code.
func TestErrors(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	testenv.WriteFile(t, file, []byte("x"), 0o600)
	t.Chdir(dir)
	testenv.WriteFile(t, "-dash", nil, 0o600)
	stale := filepath.Join(dir, "stale.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: stale, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	none, long := filepath.Join(dir, "none.sock"), filepath.Join(dir, strings.Repeat("s", 108))
	stream := filepath.Join(dir, "stream.sock")
	other, err := net.Listen("unix", stream)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for _, tt := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"unknown command", []string{"pingg"}, exitUsage, `no command "pingg" (did you mean ping?); see iwarpctl --help`},
		{"empty command", []string{""}, exitUsage, `iwarpctl has no command ""; see iwarpctl --help`},
		{"help for an unknown command", []string{"help", "pingg"}, exitUsage, `no command "pingg" (did you mean ping?); see iwarpctl --help`},
		{"unknown command of a group", []string{"qp", "fly"}, exitUsage, `iwarpctl qp has no command "fly"; see iwarpctl qp --help`},
		{"count without a number", []string{"ping", "-c", "-C", "abc"}, exitUsage, `--count "abc": must be a whole number; see iwarpctl ping --help`},
		{"count out of range", []string{"ping", "-c", "-C", "99999999999999999999"}, exitUsage, `--count "99999999999999999999": is out of range; see iwarpctl ping --help`},
		{"port with a leading zero", []string{"ping", "-c", "-a", "1.2.3.4", "-p", "0200000"}, exitUsage, `port "200000": must be`},
		{"count in hexadecimal", []string{"ping", "-c", "-C", "0x10"}, exitUsage, `--count "0x10": must be a whole number`},
		{"switch with a word", []string{"status", "--json=maybe"}, exitUsage, `--json "maybe": must be true or false; see iwarpctl status --help`},
		{"duration without a unit", []string{"perf", "write", "--duration", "5"}, exitUsage, `--duration "5": must be a number with a unit, such as 10s or 500ms; see`},
		{"unknown flag", []string{"status", "--colour"}, exitUsage, "--colour; see iwarpctl status --help"},
		{"no daemon", []string{"--socket", none, "status"}, exitDaemon, "no iwarpd at " + none},
		{"stale socket", []string{"--socket", stale, "status"}, exitDaemon, "no iwarpd at " + stale},
		{"socket is a file", []string{"--socket", file, "status"}, exitDaemon, file + " is not a socket: name the socket of iwarpd with --socket"},
		{"socket is a folder", []string{"--socket", dir, "status"}, exitDaemon, dir + " is not a socket: name the socket of iwarpd with --socket"},
		{"socket of another program", []string{"--socket", stream, "status"}, exitDaemon, stream + " is the socket of another program"},
		{"socket path too long", []string{"--socket", long, "status"}, exitDaemon, "the path of a socket has at most 107 bytes: " + long},
		{"argument after the shell", []string{"completion", "bash", "x"}, exitUsage, `"iwarpctl completion bash x": write it as iwarpctl completion bash`},
		{"unknown shell", []string{"completion", "tcsh"}, exitUsage, `iwarpctl completion has no command "tcsh" (did you mean bash or fish or zsh?); see iwarpctl completion --help`},
		{"cp a file with a leading dash", []string{"cp", "-dash", "10.0.0.1:"}, exitUsage, "write ./-dash for the file of that name"},
		{"cp without a name", []string{"cp", "", "10.0.0.1:"}, exitUsage, "a name is empty"},
		{"cp to an empty name", []string{"cp", file, ""}, exitUsage, "a name is empty"},
		{"status with an argument", []string{"status", "x"}, exitUsage, "iwarpctl status --help"},
		{"ping without side", []string{"ping", "-a", "10.0.0.1"}, exitUsage, "-s (server) or -c (client)"},
		{"ping with both sides", []string{"ping", "-s", "-c"}, exitUsage, "-s (server) or -c (client)"},
		{"ping nobody", []string{"ping", "-c"}, exitUsage, "use -a ADDR"},
		{"ping size", []string{"ping", "-c", "-a", "10.0.0.1", "-S", "5"}, exitUsage, "from 26 to 65535"},
		{"ping count", []string{"ping", "-c", "-a", "10.0.0.1", "-C", "-5"}, exitUsage, "count -5"},
		{"ping port", []string{"ping", "-c", "-a", "10.0.0.1", "-p", "70000"}, exitUsage, "1 to 65535"},
		{"ping source", []string{"ping", "-c", "-a", "10.0.0.1", "-I", "x"}, exitUsage, "not an IP address"},
		{"ping address of server", []string{"ping", "-s", "-a", "host.invalid"}, exitUsage, "not an IP address"},
		{"ping server at a port", []string{"--socket", none, "ping", "-s", "-a", "10.0.0.1:7175"}, exitDaemon, "no iwarpd at " + none},
		{"group without command", []string{"nfs"}, exitUsage, "nfs: missing command; see iwarpctl nfs --help"},
		{"serve without folder", []string{"serve"}, exitUsage, "--dir D is missing"},
		{"serve a folder that is not there", []string{"serve", "--dir", filepath.Join(dir, "no")}, exitFile, "serve: " + filepath.Join(dir, "no") + ": no such file or directory: give the folder to serve by --dir"},
		{"serve a file", []string{"serve", "--dir", file}, exitFile, "serve: " + file + ": not a directory: give the folder to serve by --dir"},
		{"serve nobody", []string{"serve", "--dir", dir, "--max-clients", "0"}, exitUsage, "1 or more"},
		{"serve without daemon", []string{"--socket", none, "serve", "--dir", dir}, exitDaemon, "no iwarpd"},
		{"cp with one argument", []string{"cp", file}, exitUsage, "the target is missing"},
		{"cp with nothing", []string{"cp"}, exitUsage, "SOURCE... TARGET"},
		{"cp local to local", []string{"cp", file, file}, exitUsage, "write a remote file as HOST:PATH"},
		{"cp to a host without colon", []string{"cp", file, "server"}, exitUsage, "such as server:"},
		{"cp to half of an address", []string{"cp", file, "[fd00::1:"}, exitUsage, "such as HOST:"},
		{"cp to a port without path", []string{"cp", file, "10.0.0.1:7176"}, exitUsage, "10.0.0.1:7176/ or 10.0.0.1:./7176"},
		{"cp as a user", []string{"cp", file, "me@10.0.0.1:"}, exitUsage, "no users: write it as 10.0.0.1:"},
		{"cp by URI", []string{"cp", file, "scp://10.0.0.1/x"}, exitUsage, "without scp://"},
		{"cp by URL", []string{"cp", "http://10.0.0.1/x", dir}, exitUsage, "without http://"},
		{"cp to a home folder", []string{"cp", file, "10.0.0.1:~/x"}, exitUsage, "home folders are not supported"},
		{"cp to IPv6 without brackets", []string{"cp", file, "fd00::1:x"}, exitUsage, "in brackets"},
		{"cp to no host", []string{"cp", file, ":x"}, exitUsage, "the host is missing"},
		{"cp to an unknown host", []string{"cp", file, "no.such.host.invalid:"}, exitPeer, "cannot find the address"},
		{"cp to port 0", []string{"cp", file, "10.0.0.1:0/x"}, exitUsage, "from 1 to 65535"},
		{"cp -P 0", []string{"cp", "-P", "0", file, "10.0.0.1:x"}, exitUsage, "from 1 to 65535"},
		{"cp from two hosts", []string{"cp", "10.0.0.1:x", "10.0.0.2:y", dir}, exitUsage, "copy from one at a time"},
		{"cp of no file there", []string{"cp", "10.0.0.1:", dir}, exitUsage, "names no file"},
		{"cp a glob that matches nothing", []string{"cp", filepath.Join(dir, "*.log"), "10.0.0.1:"}, exitFile, "no file matches"},
		{"cp several to one file", []string{"cp", "10.0.0.1:a", "10.0.0.1:b", file}, exitFile, "is not a folder"},
		{"cp two of one name", []string{"cp", file, filepath.Join(dir, "sub", "f"), "10.0.0.1:"}, exitFile, "would both become f: copy one of them by itself"},
		{"cp a file twice", []string{"cp", file, "./" + file, "10.0.0.1:a/"}, exitFile, "would both become f"},
		{"cp two of one name from there", []string{"cp", "10.0.0.1:a/x", "10.0.0.1:b/x", dir}, exitFile, "a/x and b/x would both become x"},
		{"cp to no folder", []string{"cp", "10.0.0.1:a", filepath.Join(dir, "no") + "/"}, exitFile, "make it first"},
		{"cp onto a device", []string{"cp", "10.0.0.1:a", "/dev/null"}, exitFile, "not a regular file"},
		{"nfs put of a folder", []string{"nfs", "put", dir, "10.0.0.1:/x"}, exitFile, "put copies one file"},
		{"cp unknown checksum", []string{"cp", "--checksum", "md5", file, "10.0.0.1:"}, exitUsage, "xxh128, blake3 or sha256"},
		{"perf --size 64X", []string{"perf", "write", "--client", "1.2.3.4", "--size", "64X"}, exitUsage, "64K"},
		{"perf --size of a unit alone", []string{"perf", "write", "--client", "1.2.3.4", "--size", "K"}, exitUsage, "64K"},
		{"perf host/port", []string{"perf", "write", "--client", "1.2.3.4/7175"}, exitUsage, "write 1.2.3.4:7175"},
		{"perf as a user", []string{"perf", "write", "--client", "me@1.2.3.4"}, exitUsage, "write 1.2.3.4"},
		{"perf to IPv6 with a port", []string{"perf", "write", "--client", "fd00::1:99999"}, exitUsage, "in brackets"},
		{"ping of all addresses", []string{"ping", "-c", "-a", "0.0.0.0"}, exitUsage, "is not the address of a host"},
		{"ping of a multicast address", []string{"ping", "-c", "-a", "224.0.0.1"}, exitUsage, "multicast"},
		{"cp remote to remote", []string{"cp", "1.2.3.4:1/a", "1.2.3.4:1/b"}, exitUsage, "both on other hosts"},
		{"cp out of folder to serve", []string{"cp", file, "1.2.3.4:1/../x"}, exitUsage, `".."`},
		{"cp a file that is not there", []string{"cp", filepath.Join(dir, "no"), "1.2.3.4:1/a"}, exitFile, "no such file"},
		{"cp a folder", []string{"cp", dir, "1.2.3.4:1/a"}, exitFile, "is a folder: copy it with cp -r"},
		{"cp into no folder", []string{"cp", "1.2.3.4:1/a", filepath.Join(dir, "no", "a")}, exitFile, "no folder " + filepath.Join(dir, "no") + ": make it first"},
		{"cp without daemon", []string{"--socket", none, "cp", file, "1.2.3.4:1/a"}, exitDaemon, "no iwarpd"},
		{"perf what", []string{"perf", "--client", "1.2.3.4"}, exitUsage, "perf write, perf read or perf send"},
		{"perf server", []string{"--socket", none, "perf", "--server"}, exitDaemon, "no iwarpd"},
		{"perf server of one operation", []string{"--socket", none, "perf", "write", "--server"}, exitDaemon, "no iwarpd"},
		{"perf iterations", []string{"perf", "write", "--client", "1.2.3.4", "--iterations", "-1"}, exitUsage, "--iterations -1: must not be negative"},
		{"unknown transport", []string{"cp", "--transport", "udp", file, "1.2.3.4:"}, exitUsage, `iwarpctl: --transport "udp": must be one of tcp, sctp,`},
		{"ping size in words", []string{"ping", "-c", "-a", "1.2.3.4", "-S", "big"}, exitUsage, `iwarpctl: --size "big": must be a number of bytes`},
		{"one wrong size of several", []string{"perf", "write", "--client", "1.2.3.4", "--size", "64,6x"}, exitUsage, `iwarpctl: --size "6x": must be a number of bytes`},
		{"perf unknown", []string{"perf", "fly", "--server"}, exitUsage, "(write|read|send)"},
		{"perf no side", []string{"perf", "write"}, exitUsage, "--server or --client"},
		{"perf both sides", []string{"perf", "write", "--server", "--client", "1.2.3.4"}, exitUsage, "--server or --client"},
		{"perf mode", []string{"perf", "write", "--client", "1.2.3.4", "--mode", "x"}, exitUsage, "bw or lat, or both"},
		{"stats without watch", []string{"stats", "--count", "2"}, exitUsage, "--watch"},
		{"stats count", []string{"stats", "--watch", "--count", "-1"}, exitUsage, "--count -1"},
		{"top count", []string{"top", "--count", "-1"}, exitUsage, "--count -1"},
		{"perf interval", []string{"perf", "write", "--client", "1.2.3.4", "--interval", "1ns"}, exitUsage, "perf: --interval 1ns: must be 0, or at least 100ms"},
		{"peer with a zone", []string{"ping", "-c", "-a", "fd09::2%eth0"}, exitUsage, "only a link-local address has a zone: write fd09::2"},
		{"listener with a zone", []string{"serve", "--dir", dir, "--listen", "[fd09::2%eth0]:7176"}, exitUsage, "only a link-local address has a zone: write fd09::2"},
		{"top interval", []string{"top", "--interval", "1ms"}, exitUsage, "at least 100ms"},
		{"qp show nothing", []string{"qp", "show"}, exitUsage, "qp show NUMBER"},
		{"export a folder that is not there", []string{"nfs", "export", filepath.Join(dir, "no")}, exitFile, "no such file"},
		{"export, port of MOUNT", []string{"nfs", "export", dir, "--mount-port", "-1"}, exitUsage, "--mount-port -1: must be 1 to 65535, or 0"},
		{"export, one port for two services", []string{"nfs", "export", dir, "--mount-port", "111"}, exitUsage, "--mount-port and --portmap-port: both are port 111: give different ones"},
		{"export, port of RDMA for TCP", []string{"nfs", "export", dir, "--tcp-port", "20049"}, exitUsage, "--listen and --tcp-port: both are port 20049"},
		{"export, port of the portmapper", []string{"nfs", "export", dir, "--portmap-port", "70000"}, exitUsage, "--portmap-port 70000: must be 1 to 65535, or 0"},
		{"export, port of NFS over TCP", []string{"nfs", "export", dir, "--tcp-port", "65536"}, exitUsage, "--tcp-port 65536: must be 1 to 65535, or 0"},
		{"capture of no address", []string{"capture", "--host", "foo", "-w", "-"}, exitUsage, `"foo" is not an IP address`},
		{"capture of no address with a port", []string{"capture", "--host", "foo:7174", "-w", "-"}, exitUsage, `"foo" is not an IP address`},
		{"capture of no port", []string{"capture", "--host", "10.0.0.1:x", "-w", "-"}, exitUsage, `"x" is not a port`},
		{"capture count", []string{"capture", "-n", "-1", "-w", "-"}, exitUsage, "not be negative"},
		{"ping TTL", []string{"ping", "-c", "-a", "1.2.3.4", "--ttl", "256"}, exitUsage, "--ttl 256: must be 1 to 255"},
		{"cp DSCP", []string{"cp", "--dscp", "-2", file, "1.2.3.4:"}, exitUsage, "--dscp -2: must be 1 to 63"},
		{"perf shared association", []string{"perf", "write", "--client", "1.2.3.4", "--shared-association"}, exitUsage, "TCP has no associations: add --transport sctp"},
		{"serve priority", []string{"serve", "--dir", dir, "--priority", "8"}, exitUsage, "--priority 8: must be 1 to 7"},
		{"perf queue pairs", []string{"perf", "write", "--client", "1.2.3.4", "--qps", "0"}, exitUsage, "from 1 to 1024"},
		{"perf interval", []string{"perf", "write", "--client", "1.2.3.4", "--interval", "-1s"}, exitUsage, "--interval -1s"},
		{"perf duration", []string{"perf", "write", "--client", "1.2.3.4", "--duration", "0"}, exitUsage, "--duration 0s: must be at least 1ms"},
		{"perf duration without time for an operation", []string{"perf", "write", "--client", "1.2.3.4", "--duration", "1ns"}, exitUsage, "--duration 1ns: must be at least 1ms"},
		{"duration of millennia", []string{"stats", "--watch", "--interval", "99999999h"}, exitUsage, `--interval "99999999h": is out of range; see iwarpctl stats --help`},
		{"duration of millennia and minutes", []string{"top", "--interval", "-99999999h5.5m"}, exitUsage, `is out of range; see`},
		{"duration without a number", []string{"top", "--interval", "h"}, exitUsage, "must be a number with a unit"},
		{"perf server with a size", []string{"perf", "--server", "--size", "64"}, exitUsage, "perf: --size is a flag of the client: leave it out here"},
		{"perf server with a duration", []string{"perf", "--server", "--duration", "5s"}, exitUsage, "perf: --duration is a flag of the client"},
		{"perf client with a listener", []string{"perf", "write", "--client", "1.2.3.4", "--listen", ":9"}, exitUsage, "perf: --listen is a flag of the server: leave it out here"},
		{"perf server, shared association", []string{"perf", "--server", "--transport", "sctp", "--shared-association"}, exitUsage, "perf: --shared-association is a flag of the client"},
		{"serve, shared association", []string{"serve", "--dir", dir, "--transport", "sctp", "--shared-association"}, exitUsage, "--shared-association; see iwarpctl serve --help"},
		{"ping server with a source", []string{"ping", "-s", "-I", "1.2.3.4"}, exitUsage, "ping: --source is a flag of the client: leave it out here"},
		{"ping client, persistent", []string{"ping", "-c", "-a", "1.2.3.4", "-P"}, exitUsage, "ping: --persistent is a flag of the server"},
		{"ping server with the flags of rping", []string{"--socket", none, "ping", "-s", "-C", "10", "-S", "4096", "-V", "-v"}, exitDaemon, "no iwarpd"},
		{"disconnect nothing", []string{"disconnect"}, exitUsage, `"iwarpctl disconnect": write`},
		{"cp of a name that is not UTF-8", []string{"cp", file, "1.2.3.4:a\xff"}, exitUsage, "not UTF-8"},
		{"perf size", []string{"perf", "write", "--client", "1.2.3.4", "--size", "0"}, exitUsage, "size 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out, errOut := ctl(t, tt.args...)
			if code != tt.code {
				t.Errorf("exit code %d; want %d", code, tt.code)
			}
			if !strings.Contains(errOut, tt.want) {
				t.Errorf("message %q; want it to hold %q", errOut, tt.want)
			}
			if leak := internals.FindString(errOut); leak != "" {
				t.Errorf("%q tells of %q, which is no word of the user's", errOut, leak)
			}
			if strings.Count(errOut, "\n") != 1 || !strings.HasPrefix(errOut, "iwarpctl: ") || out != "" {
				t.Errorf("not one line: %q, and on standard output %q", errOut, out)
			}
		})
	}
}

func TestErrorAsJSON(t *testing.T) {
	code, _, errOut := ctl(t, "--json", "--socket", "/nonexistent", "status")
	var e struct {
		Error string
		Code  int
	}
	if err := json.Unmarshal([]byte(errOut), &e); err != nil || e.Code != code || e.Code != exitDaemon || e.Error == "" {
		t.Errorf("%q: %+v, %v", errOut, e, err)
	}
}

// TestHelp checks that every command has help with an example, and that the root command lists the exit codes.
func TestHelp(t *testing.T) {
	_, help, _ := ctl(t, "--help")
	if !strings.Contains(help, "Exit codes") {
		t.Error("the help lacks the exit codes")
	}
	c := &command{}
	var walk func(path []string)
	commands := 0
	walk = func(path []string) {
		cmd, _, err := c.root().Find(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, sub := range cmd.Commands() {
			if sub.Name() != "help" && sub.Name() != "completion" {
				walk(append(append([]string{}, path...), sub.Name()))
			}
		}
		commands++
		code, out, _ := ctl(t, append(append([]string{}, path...), "--help")...)
		if code != exitOK || !strings.Contains(out, "Examples:") || !strings.Contains(out, "--socket") || !strings.Contains(out, "--json") {
			t.Errorf("help of %q: exit code %d, %q", path, code, out)
		}
	}
	walk(nil)
	if commands < 6 {
		t.Errorf("only %d commands", commands)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var o, e bytes.Buffer
	code := run(ctx, []string{"--socket", "/nonexistent", "status"}, &o, &e)
	if code != exitInterrupted {
		t.Errorf("exit code %d; want %d", code, exitInterrupted)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if code := run(ctx, []string{"--help"}, full, &e); code != exitInterrupted {
		t.Errorf("with an output that fails: exit code %d; want %d", code, exitInterrupted)
	}
}

func TestSplitRemote(t *testing.T) {
	for _, tt := range []struct {
		in, host, path string
	}{
		{"10.0.0.1:7176/f", "10.0.0.1:7176", "f"},
		{"10.0.0.1:7176/", "10.0.0.1:7176", ""},
		{"host:1/a/b:c", "host:1", "a/b:c"},
		{"[fd00::1]:7176/x", "[fd00::1]:7176", "x"},
		{"[fe80::1%eth0]:x", "[fe80::1%eth0]", "x"},
		{"host:", "host", ""}, {"host:f", "host", "f"}, {"host:dir/f", "host", "dir/f"}, {"host:/f", "host", "f"}, {"host:./7/f", "host", "7/f"},
		{"host:.", "host", ""}, {"h:x/b", "h", "x/b"}, {"host:2024-01/f", "host", "2024-01/f"},
		{"db1:", "db1", ""}, {"cafe:/f", "cafe", "f"}, // hexadecimal, but no addresses
		{"/a:1/b", "", ""}, {"./h:1/b", "", ""}, {"[a-z].txt", "", ""}, {"file", "", ""}, {"", "", ""},
	} {
		got, err := splitRemote(tt.in)
		if err != nil || got.host != tt.host || got.path != tt.path {
			t.Errorf("splitRemote(%q) = %+v, %v; want %q, %q", tt.in, got, err, tt.host, tt.path)
		}
	}
	for _, in := range []string{":1/b", "h:0/b", "h:65536/b", "h:7176", "u@h:f", "fd00::1:f", "fd00::1", "fd00:::f", "1:2:3:4:5:6:7:8:f", "[x]:f", "h:~/f", "scp://h/f"} {
		if got, err := splitRemote(in); err == nil {
			t.Errorf("splitRemote(%q) = %+v", in, got)
		}
	}
}

func TestSizes(t *testing.T) {
	for in, want := range map[string]int{"0": 0, "64": 64, "64K": 64 << 10, "64k": 64 << 10, "1M": 1 << 20, "1MiB": 1 << 20, "2MB": 2 << 20, "1G": 1 << 30} {
		if got, err := parseSize(in); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "K", "-1", "1.5K", "64X", "2G", "1KK", "9999999999", "0x10", "B", "iB"} {
		if got, err := parseSize(in); err == nil {
			t.Errorf("parseSize(%q) = %d", in, got)
		}
	}
}

func TestAddresses(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"10.0.0.1", "10.0.0.1:7"}, {"10.0.0.1:9", "10.0.0.1:9"}, {"fd00::1", "[fd00::1]:7"}, {"[fd00::1]:9", "[fd00::1]:9"}, {"[fd00::1]", "[fd00::1]:7"},
	} {
		if got, err := resolve(t.Context(), tt.in, 7); err != nil || got != tt.want {
			t.Errorf("resolve(%q) = %q, %v; want %q", tt.in, got, err, tt.want)
		}
	}
	for _, tt := range []struct{ in, want string }{
		{":9", ":9"}, {"10.0.0.1", "10.0.0.1:7"}, {"0.0.0.0:9", ":9"}, {"[::]:9", ":9"}, {"[fd00::1]:9", "[fd00::1]:9"}, {"[fd00::1]", "[fd00::1]:7"}, {"[::]", ":7"},
	} {
		if got, err := listenAddr(tt.in, 7); err != nil || got != tt.want {
			t.Errorf("listenAddr(%q) = %q, %v; want %q", tt.in, got, err, tt.want)
		}
	}
	for _, bad := range []string{":", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "a:b:c", ":x"} {
		if got, err := listenAddr(bad, 7); err == nil {
			t.Errorf("listenAddr(%q) = %q", bad, got)
		}
		if got, err := resolve(t.Context(), bad, 7); err == nil {
			t.Errorf("resolve(%q) = %q", bad, got)
		}
	}
	for bad, want := range map[string]string{
		"0.0.0.0": "means all addresses", "[::]:9": "means all addresses", "::ffff:0.0.0.0": "means all addresses",
		"224.0.0.1": "multicast", "[ff02::1]:9": "multicast", "::ffff:224.0.0.1": "multicast", "255.255.255.255:9": "broadcast",
		"http://10.0.0.1": "without a slash", "10.0.0.1/24": "without a slash", "10.0.0": "four numbers", "10.0.0.01:9": "four numbers", "10.0.0.256": "four numbers",
		"10.0.0.1%eth0": "only a link-local IPv6 address has a zone: write 10.0.0.1", "host%eth0:9": "write host",
	} {
		if got, err := resolve(t.Context(), bad, 7); err == nil || !strings.Contains(err.Error(), want) || exitCode(t.Context(), err) != exitUsage {
			t.Errorf("resolve(%q) = %q, %v; want %q", bad, got, err, want)
		}
	}
}

func TestBar(t *testing.T) {
	b := &bar{width: 60}
	for _, name := range []string{strings.Repeat("名", 40), strings.Repeat("é", 40), "a-long-name-of-a-file.tar"} {
		b.name = name
		for _, done := range []int64{0, 1, 50, 100} {
			line := b.line(done, 100, time.Second)
			if n := text.StringWidth(line); n >= b.width || !utf8.ValidString(line) {
				t.Errorf("%d columns on a terminal of %d: %q", n, b.width, line)
			}
		}
	}
	if got := b.line(100, 100, time.Second); !strings.Contains(got, "100%") || strings.Contains(got, ".]") {
		t.Errorf("a whole bar: %q", got)
	}
	if got := b.line(0, 0, 0); !strings.Contains(got, "100%") {
		t.Errorf("an empty file: %q", got)
	}
	c := &command{err: &bytes.Buffer{}}
	off := c.newBar("x")
	off.update(1, 2)
	off.clear()
	if got := c.err.(*bytes.Buffer).String(); got != "" {
		t.Errorf("a bar without a terminal: %q", got)
	}
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	printTable(&b, []string{"name", "n"}, [][]any{{"a", 5}, {"bbb", 12345}})
	lines := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "name") || strings.Contains(b.String(), "|") {
		t.Errorf("table:\n%s", b.String())
	}
}

// TestEscapes checks that names that others chose are escaped in all output: tables, JSON and errors.
func TestEscapes(t *testing.T) {
	const name, want = "a\x1b[2J\u009b1m\u202eb", `a\u001b[2J\u009b1m\u202eb`
	var out, errOut strings.Builder
	printTable(&out, []string{"client", "name"}, [][]any{{uint32(1), name}})
	c := &command{out: &out, err: &errOut}
	if err := c.print(map[string]string{"name": name}); err != nil {
		t.Fatal(err)
	}
	c.report(errors.New("refused: "+name), exitFailure)
	c.json = true
	c.report(errors.New("refused: "+name), exitFailure)
	for what, text := range map[string]string{"output": out.String(), "errors": errOut.String()} {
		if strings.Count(text, want) != 2 || strings.ContainsAny(text, "\x1b\u009b\u202e") {
			t.Errorf("%s: %q", what, text)
		}
	}
	out.Reset()
	w := &copying{c: &command{out: &out}}
	if w.copied("get", "RDMA Read", name, time.Now(), filecopy.Result{Hash: filecopy.XXH128}); !strings.Contains(out.String(), want) || strings.ContainsAny(out.String(), "\x1b\u009b\u202e") {
		t.Errorf("cp: %q", &out)
	}
}

func TestCopySource(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	sock, loop, dangling := filepath.Join(dir, "sock"), filepath.Join(dir, "loop"), filepath.Join(dir, "dangling")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(os.Symlink(loop, loop), os.Symlink("/nowhere", dangling)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		pipe: "not a regular file", dir: "a folder", "/dev/zero": "not a regular file", sock: "not a regular file",
		loop: "a symbolic link that leads back to itself", dangling: "a symbolic link to /nowhere: no such file or directory",
	} {
		for _, args := range [][]string{{"cp", name, "10.0.0.1:7176/x"}, {"nfs", "put", name, "10.0.0.1:/x"}} {
			code, _, errOut := ctl(t, args...)
			if code != exitFile || !strings.Contains(errOut, want) && !(name == dir && strings.Contains(errOut, "not a regular file")) {
				t.Errorf("%v: exit code %d: %s", args, code, errOut)
			}
		}
	}
}

func TestParseCopy(t *testing.T) {
	for to, want := range map[string]string{":7176/": "", ":7176/g": "g", ":sub/": "sub/", ":sub/g": "sub/g", ":/": "", ":../": "error"} {
		j, err := parseCopy([]string{"/some/f", "g"}, "10.0.0.1"+to, &cpFlags{checksum: "sha256"})
		if (err != nil) != (want == "error") || err == nil && (j.target != want || len(j.sources) != 2 || !j.put) {
			t.Errorf("a copy to %q: %+v, %v; want %q", to, j, err, want)
		}
	}
}

// fullDisk fails every write.
type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: unix.ENOSPC}
}

// TestOutputLost checks that the command fails if its results cannot be written.
func TestOutputLost(t *testing.T) {
	var e bytes.Buffer
	if code := run(t.Context(), []string{"--help"}, fullDisk{}, &e); code != exitFile || !strings.Contains(e.String(), "no space") {
		t.Errorf("exit code %d: %s", code, e.String())
	}
}

func TestSilentNote(t *testing.T) {
	l := []*ctrlpb.QPInfo{{Qp: 1}, {Qp: 2, Worker: 1, Silent: true}, {Qp: 3, Worker: 1, Silent: true}, {Qp: 4, Worker: 2}}
	for asJSON, want := range map[bool]string{false: "worker 1 does not answer: its connections are shown without counters\n", true: ""} {
		var b bytes.Buffer
		c := &command{err: &b, json: asJSON}
		if c.silent(l); b.String() != want {
			t.Errorf("JSON %v: %q; want %q", asJSON, b.String(), want)
		}
	}
}

// TestTableWidth checks that the lists fit a terminal of 80 columns.
func TestTableWidth(t *testing.T) {
	var b bytes.Buffer
	printTable(&b, qpHeader, [][]any{qpRow(&ctrlpb.QPInfo{
		Qp: 17, State: "RTS", Local: "10.0.0.1:41234", Remote: "10.0.0.2:7174", Client: 123, Pid: 12345, Worker: 1,
		Negotiated: &ctrlpb.Negotiated{Revision: 2, Crc: true, P2P: true, Ird: 16, Ord: 16},
		Tcp:        []*ctrlpb.Counter{{Name: "srtt_ns", Value: 128000}},
	})})
	printTable(&b, mrHeader, [][]any{mrRow(&ctrlpb.MRInfo{
		Client: 123, Uid: 1000, Mr: 4123456789, Pd: 17, Base: 0x7f0123456000, Length: 1 << 20,
		Access: uint32(iwarp.AccessLocalWrite | iwarp.AccessRemoteWrite | iwarp.AccessRemoteRead | iwarp.AccessRemoteAtomic),
	})})
	c := &command{out: &b}
	c.perfTable([]*perf.Result{
		{Op: "write", Mode: "bw", Size: 1 << 20, QPs: 16, Depth: 32, Operations: 1234567, GbitPerSec: 59.19, OpsPerSec: 1e6},
		{Op: "write", Mode: "lat", Size: 64, QPs: 1, Depth: 1, Operations: 123456, GbitPerSec: 0.123, OpsPerSec: 123456,
			Latency: &perf.Percentiles{P50: 12.3, P99: 123.4, P999: 1234.5, Max: 12345.6}},
		{Op: "write", Mode: "lat", Size: 1 << 20, QPs: 1, Depth: 1, Operations: 12, GbitPerSec: 0.07, OpsPerSec: 8,
			Latency: &perf.Percentiles{P50: 123456.7, P99: 234567.8, P999: 345678.9, Max: 1234567.8}},
	})
	busy := topQP{QP: 17, State: "RTS", Remote: "192.168.100.100:41234", TxBytes: 1e9, Messages: 12345, RTT: 128000}
	v := &topView{Interface: "eth0", TxBytes: 1e9, QPs: []topQP{busy}}
	for i, line := range slices.Concat(strings.Split(b.String(), "\n"), v.screen(80, -1, 0, "")) {
		if n := text.StringWidth(line); n > 80 {
			t.Errorf("line %d has %d columns: %s", i, n, line)
		}
	}
	if last := v.screen(80, -1, 0, ""); !strings.Contains(last[len(last)-1], busy.Remote) {
		t.Errorf("no peer: %q", last)
	}
}

// TestHostFilter checks the forms of capture --host.
func TestHostFilter(t *testing.T) {
	for s, want := range map[string]iwarp.CaptureFilter{
		"":               {},
		"10.0.0.1":       {Address: "10.0.0.1"},
		"10.0.0.1:7174":  {Address: "10.0.0.1", Port: 7174},
		":7174":          {Port: 7174},
		"fd00::1":        {Address: "fd00::1"},
		"[fd00::1]":      {Address: "fd00::1"},
		"[fd00::1]:7174": {Address: "fd00::1", Port: 7174},
	} {
		var f iwarp.CaptureFilter
		if err := hostFilter(s, &f); err != nil || f != want {
			t.Errorf("%q: %+v, %v; want %+v", s, f, err, want)
		}
	}
	for _, s := range []string{"[fd00::1", "fd00::1]", "[]", "host", "10.0.0.1:0"} {
		if err := hostFilter(s, new(iwarp.CaptureFilter)); err == nil {
			t.Errorf("%q is accepted", s)
		}
	}
}
