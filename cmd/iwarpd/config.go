package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.uber.org/zap/zapcore"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/nftset"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
	"github.com/iwarpd/iwarpd/internal/nss"
	"github.com/iwarpd/iwarpd/tcp"
)

// envPrefix is the prefix of the environment variables that set keys.
const envPrefix = "IWARPD_"

// interfaceSettings name the interfaces to serve, by one of the two keys.
type interfaceSettings struct {
	Interface, Interfaces []string
}

// settings is the validated configuration of a daemon.
type settings struct {
	Transport string // afxdp, socket or both
	interfaceSettings
	Queues    []int // of each interface; empty: all
	CPUs      []int // one a queue; empty: not pinned
	Link      ifqueue.Kind
	XDPMode   bpf.Mode
	Super     bool   // send super-frames if the interface supports them
	Loopback  bool   // whether the addresses of loopback are served
	Partial   string // whether to accept partial checksums: auto, accept or refuse
	Detached  ctrl.DetachPolicy
	Poll      dataplane.PollPolicy
	Spin      time.Duration
	MTU       int // 0 means that of the interface
	QueueMem  int64
	Endpoints int // endpoints that the XDP program can steer

	apiSettings
	tcpSettings
	SCTPRTOMin   time.Duration
	SCTPIdle     time.Duration // 0: off
	SCTPPerPeer  int
	MPARevision  int
	CRC          ctrl.CRCPolicy
	CRCPeers     []ctrl.CRCRule
	CRCLocal     bool
	MPAMarkers   bool
	MPAPeer      bool // MPA peer-to-peer mode
	IRD, ORD     int
	MaxIRD       int
	StartTimeout time.Duration

	Limits ctrl.Limits // default quotas
	Allow  []ctrl.Rule
	Slots  ctrl.Slots
	peerSettings

	Metrics   string // "": none
	Drain     time.Duration
	LogLevel  zapcore.Level
	LogFormat string

	values map[string]string // values of the keys as given
}

// apiSettings are about the API socket and its clients.
type apiSettings struct {
	Socket      string
	SocketMode  fs.FileMode
	SocketGroup string
	Userfaultfd bool // open /dev/userfaultfd for clients
}

// peerSettings are about peers, in addition to the rules.
type peerSettings struct {
	File      string // file of the rules, for errors; "" if there is none
	EndDenied bool   // end running connections whose peer is denied now
	AllowSets []nftset.Name
}

// tcpSettings are about TCP.
type tcpSettings struct {
	Congestion  tcp.CongestionControl
	ECN         tcp.ECN
	RcvWindow   int
	KeepAlive   time.Duration // 0: off
	TCPR2       time.Duration
	TCPR2SYN    time.Duration
	UserTimeout time.Duration       // 0: none
	IP          dataplane.IPOptions // over SCTP too
	TimeWait    time.Duration
}

// A key is a setting. Its name is the flag, the key in the file and, in capitals after IWARPD_, the
// environment variable.
type key struct {
	name  string
	short string // one-letter flag
	def   string
	help  string
	set   func(s *settings, v string) error
}

// keys lists all settings; deploy/iwarpd.yaml documents them.
var keys = slices.Concat([]key{
	{"transport", "", "afxdp", "transport below iWARP: afxdp, socket (the kernel's TCP, which needs no privileges and no interface), or both (AF_XDP, and the kernel's TCP for listeners and connections that ask for it)", word(func(s *settings) *string { return &s.Transport }, "afxdp", "socket", "both")},
	{"interface", "i", "", "network interface to serve, or several, such as eth0,eth1", interfaceNames(func(s *settings) *[]string { return &s.Interface })},
	{"interfaces", "", "", "the same as interface", interfaceNames(func(s *settings) *[]string { return &s.Interfaces })},
	{"queues", "", "all", `queues of each interface to serve: "all", or a list such as 0,2-3`, func(s *settings, v string) (err error) {
		s.Queues, err = parseList(v, "all")
		return err
	}},
	{"cpus", "", "", "CPUs to pin the workers to, one for each queue of each interface in turn, such as 2-5; empty: not pinned", func(s *settings, v string) (err error) {
		s.CPUs, err = parseList(v, "")
		return err
	}},
	{"link", "", "auto", "how to receive and send frames: auto (packet on virtual interfaces, else xdp), xdp (AF_XDP sockets) or packet (packet sockets with a shared ring; needs Linux 6.6)", func(s *settings, v string) (err error) {
		s.Link, err = ifqueue.ParseKind(v)
		return err
	}},
	{"xdp-mode", "", "auto", "how to attach the XDP program: auto, native (in the driver) or generic", oneOf(func(s *settings) *bpf.Mode { return &s.XDPMode }, "auto native generic", bpf.Auto, bpf.Native, bpf.Generic)},
	{"loopback-addresses", "", "off", "whether the interfaces also serve the addresses of loopback and dummy interfaces, as with BGP to the host: on or off", oneOf(func(s *settings) *bool { return &s.Loopback }, "on off", true, false)},
	{"super-frames", "", "auto", "whether to send up to 64 KiB of one connection as one packet: auto (if the interface has TCP segmentation offload) or off", oneOf(func(s *settings) *bool { return &s.Super }, "auto off", true, false)},
	{"partial-checksums", "", "auto", "what to do with TCP segments whose checksum a kernel on this machine left to the hardware: accept, refuse, or auto (accept on virtual interfaces and virtio)", word(func(s *settings) *string { return &s.Partial }, "auto", "accept", "refuse")},
	{"xdp-detached", "", "end", "what to do when another program detaches the XDP program: end (all connections) or attach (again)", oneOf(func(s *settings) *ctrl.DetachPolicy { return &s.Detached }, "end attach", ctrl.DetachEnd, ctrl.DetachAttach)},
	{"poll", "", "adaptive", "what an idle worker does: adaptive (spins, then sleeps) or busy (always spins)", oneOf(func(s *settings) *dataplane.PollPolicy { return &s.Poll }, "adaptive busy", dataplane.Adaptive, dataplane.Busy)},
	{"spin", "", "50us", "how long an idle adaptive worker spins before it sleeps, and up to four times as long while work keeps coming soon after; 0: it never spins", duration(func(s *settings) *time.Duration { return &s.Spin }, 0, time.Second)},
	{"mtu", "", "0", "largest IP packet to send, in bytes, 576 to 9216; 0: the MTU of the interface, up to 9216", func(s *settings, v string) error {
		err := number(func(s *settings) *int { return &s.MTU }, 0, link.MaxMTU)(s, v)
		if err != nil || 0 < s.MTU && s.MTU < link.MinMTU {
			return fmt.Errorf("must be 0, or a number from %d to %d", link.MinMTU, link.MaxMTU)
		}
		return nil
	}},
	{"queue-memory", "", "32MiB", "memory of each queue for frames: half for received frames, half for sent frames that are not acknowledged yet", func(s *settings, v string) (err error) {
		s.QueueMem, err = parseSize(v)
		if err == nil && (s.QueueMem < 4<<20 || s.QueueMem > 16<<30 || s.QueueMem&(s.QueueMem-1) != 0) {
			err = errors.New("must be a power of two from 4MiB to 16GiB")
		}
		return err
	}},

	{"steering-endpoints", "", strconv.Itoa(bpf.DefaultEndpoints), "maximum number of local endpoints that the XDP program can steer: ports of connections, including TIME-WAIT, and of listeners", number(func(s *settings) *int { return &s.Endpoints }, 64, 1<<24)},

	{"socket", "", "/run/iwarpd/iwarpd.sock", "path of the API socket", func(s *settings, v string) error {
		if v == "" || len(v) > 107 { // sun_path of sockaddr_un(7)
			return errors.New("must be a path of 1 to 107 bytes")
		}
		s.Socket = v
		return nil
	}},
	{"socket-mode", "", "0660", "permissions of the API socket, octal", func(s *settings, v string) error {
		n, err := strconv.ParseUint(v, 8, 32)
		if err != nil || n > 0o777 {
			return errors.New("must be octal, 0000 to 0777, in quotes in a file")
		}
		s.SocketMode = fs.FileMode(n)
		return nil
	}},
	{"socket-group", "", "", "group that owns the API socket; empty: that of the daemon", func(s *settings, v string) error {
		s.SocketGroup = v
		return nil
	}},

	{"userfaultfd", "", "true", "open /dev/userfaultfd for clients that may not; without it their system calls can fail while memory is being registered", boolean(func(s *settings) *bool { return &s.Userfaultfd })},
	{"congestion-control", "", "cubic", "TCP congestion control: " + strings.Join(tcp.CongestionControls(), ", "), func(s *settings, v string) (err error) {
		s.Congestion, err = tcp.ParseCongestionControl(v)
		return err
	}},
	{"ecn", "", "accept", "ECN of TCP (RFC 3168): accept (if the peer asks for it), request or off", oneOf(func(s *settings) *tcp.ECN { return &s.ECN }, "accept request off", tcp.AcceptECN, tcp.RequestECN, tcp.NoECN)},
	{"receive-window", "", "2MiB", "TCP receive window of a connection, in bytes, from 65535 to 1GiB", func(s *settings, v string) error {
		n, err := parseSize(v)
		if err != nil || n < 65535 || n > 1<<30 {
			return errors.New("must be a size from 65535 to 1GiB, like 2MiB")
		}
		s.RcvWindow = int(n)
		return nil
	}},
	{"keep-alive", "", "30s", "idle time before the first keep-alive probe; 0: no probes", durationOrNone(func(s *settings) *time.Duration { return &s.KeepAlive })},
	{"tcp-r2", "", "2m", "how long TCP retransmits data without an acknowledgement before it ends the connection (R2)", duration(func(s *settings) *time.Duration { return &s.TCPR2 }, time.Second, 24*time.Hour)},
	{"tcp-r2-syn", "", "3m", "how long TCP retransmits a SYN or SYN-ACK before it gives up", duration(func(s *settings) *time.Duration { return &s.TCPR2SYN }, time.Second, 24*time.Hour)},
	{"tcp-user-timeout", "", "0s", "how long sent data may stay unacknowledged, even while the peer's window is closed; 0: no limit", durationOrNone(func(s *settings) *time.Duration { return &s.UserTimeout })},
	{"tcp-time-wait", "", "1m", "how long a connection that this side closed, and its port, stay in TIME-WAIT", duration(func(s *settings) *time.Duration { return &s.TimeWait }, time.Second, 4*time.Minute)},
	{"sctp-rto-min", "", "1s", "minimum SCTP retransmission time-out (RTO.Min), 10ms to 1m", duration(func(s *settings) *time.Duration { return &s.SCTPRTOMin }, 10*time.Millisecond, time.Minute)},
	{"sctp-idle", "", "1m", "how long a peer may keep an SCTP association without a session; 0: forever", durationOrNone(func(s *settings) *time.Duration { return &s.SCTPIdle })},
	{"sctp-per-peer", "", "1024", "maximum number of SCTP associations without a session from one address, or one IPv6 /64, to one listener, per queue", number(func(s *settings) *int { return &s.SCTPPerPeer }, 1, 1<<20)},
	{"dscp", "", "0", "DSCP of connections whose program sets none, 0 to 63", byteOf(func(s *settings) *uint8 { return &s.IP.DSCP }, 0, 63)},
	{"ttl", "", "64", "TTL or hop limit of connections whose program sets none, 1 to 255", byteOf(func(s *settings) *uint8 { return &s.IP.TTL }, 1, 255)},
	{"vlan-priority", "", "0", "priority in VLAN tags of connections whose program sets none, 0 to 7", byteOf(func(s *settings) *uint8 { return &s.IP.Priority }, 0, 7)},
	{"mpa-revision", "", "2", "highest MPA revision offered, 1 or 2", number(func(s *settings) *int { return &s.MPARevision }, 1, 2)},
	{"crc", "", "required", "MPA's CRC32c: required, optional (a client may disable it) or off (used only if the peer requests it)", crcPolicy(func(s *settings) *ctrl.CRCPolicy { return &s.CRC })},
	{"crc-peers", "", "", "CRC policy for some networks, overriding crc, such as 10.1.0.0/16=off,fd00::/8=optional", func(s *settings, v string) (err error) {
		s.CRCPeers, err = parseCRCPeers(v)
		return err
	}},
	{"crc-local", "", "false", "apply crc and crc-peers to connections within the host too, which otherwise have no CRC32c", boolean(func(s *settings) *bool { return &s.CRCLocal })},
	{"mpa-markers", "", "false", "ask the peer to send MPA markers", boolean(func(s *settings) *bool { return &s.MPAMarkers })},
	{"mpa-peer-to-peer", "", "true", "ask for MPA peer-to-peer mode, in which either side may send first", boolean(func(s *settings) *bool { return &s.MPAPeer })},
	{"ird", "", "16", "default inbound read depth: RDMA Reads and atomics that the peer may have outstanding on a connection", number(func(s *settings) *int { return &s.IRD }, 1, 16382)},
	{"ord", "", "16", "default outbound read depth: RDMA Reads and atomics that a connection may have outstanding", number(func(s *settings) *int { return &s.ORD }, 1, 16382)},
	{"max-ird", "", "128", "largest ird and ord that a client may request", number(func(s *settings) *int { return &s.MaxIRD }, 1, 16382)},
	{"startup-timeout", "", "10s", "how long to wait for the peer in each step of connection set-up", duration(func(s *settings) *time.Duration { return &s.StartTimeout }, 100*time.Millisecond, 10*time.Minute)},
}, quotaSettings(), []key{
	{"denied-connections", "", "keep", "what happens to running connections whose peer a reload or a change of allow-set denies: keep or end", oneOf(func(s *settings) *bool { return &s.EndDenied }, "keep end", false, true)},
	{"allow-set", "", "", "comma-separated nftables sets of the peers to which connections are restricted, such as \"inet filter rdma_peers\"; empty: no restriction", func(s *settings, v string) (err error) {
		s.AllowSets, err = nftset.Parse(v)
		return err
	}},
	{"metrics", "", "", "address to serve Prometheus metrics on: unix:PATH, or a loopback ADDR:PORT; empty: none", func(s *settings, v string) error {
		s.Metrics = v
		_, _, err := parseMetrics(v)
		return err
	}},

	{"drain-timeout", "", "5s", "time that a stopping daemon waits for clients to end their connections; 0: do not wait", duration(func(s *settings) *time.Duration { return &s.Drain }, 0, 10*time.Minute)},
	{"log-level", "", "info", "least severe level to log: debug, info, warn or error", func(s *settings, v string) error {
		if err := s.LogLevel.UnmarshalText([]byte(v)); err != nil || s.LogLevel > zapcore.ErrorLevel {
			return errors.New("must be one of debug, info, warn, error")
		}
		return nil
	}},
	{"log-format", "", "console", "log format: console or json", word(func(s *settings) *string { return &s.LogFormat }, "console", "json")},
})

// reloadable are the keys that SIGHUP can change, in addition to the rules of "allow".
var reloadable = append(quotaNames(),
	"xdp-detached", "denied-connections", "dscp", "ttl", "vlan-priority", "crc", "crc-peers", "crc-local", "mpa-revision", "mpa-markers", "mpa-peer-to-peer", "ird", "ord", "max-ird", "startup-timeout",
	"drain-timeout", "log-level",
)

// addFlags adds a flag for each key.
func addFlags(flags *pflag.FlagSet) {
	for _, k := range keys {
		if slices.Contains(listKeys, k.name) {
			flags.VarP(&listFlag{value: k.def}, k.name, k.short, k.help)
			continue
		}
		flags.StringP(k.name, k.short, k.def, k.help)
		if k.def == "true" || k.def == "false" {
			flags.Lookup(k.name).NoOptDefVal = "true"
		}
	}
}

// load reads the settings. Flags take precedence over the environment, the file and the defaults.
// If file is "", the environment may name one.
func load(flags *pflag.FlagSet, file string) (*settings, error) {
	file = cmp.Or(file, os.Getenv(envPrefix+"CONFIG"))
	v := viper.New()
	v.AllowEmptyEnv(true)
	for _, k := range keys {
		// Neither can fail: the flag exists, and the key has a name.
		_ = v.BindPFlag(k.name, flags.Lookup(k.name))
		_ = v.BindEnv(k.name, envName(k.name))
	}
	var rules map[string]any
	if file != "" {
		var err error
		if rules, err = readFile(v, file); err != nil {
			return nil, err
		}
	}
	if err := checkEnv(os.Environ()); err != nil {
		return nil, err
	}
	s := &settings{peerSettings: peerSettings{File: file}, values: make(map[string]string, len(keys))}
	instead := insteadOf(v, flags)
	for _, k := range keys {
		value := text(v, k.name)
		if k.name == instead {
			value = ""
		}
		s.values[k.name] = value
		if err := k.set(s, value); err != nil {
			return nil, configErr("%s is %q: %w", source(v, flags, file, k.name), value, err)
		}
	}
	var err error
	if s.Allow, err = parseAllow(rules[allowKey], s.Limits); err != nil {
		return nil, configErr("%s: %s: %w", file, allowKey, err)
	}
	if s.Slots, err = parseSlots(rules[slotsKey], s.Limits); err != nil {
		return nil, configErr("%s: %s: %w", file, slotsKey, err)
	}
	return s, s.check()
}

// insteadOf returns the key, interface or interfaces, that has no effect because the other one was
// set, even to nothing, in a place of higher precedence, such as a unit's template over the file. It
// returns "" if there is none.
func insteadOf(v *viper.Viper, flags *pflag.FlagSet) string {
	rank := func(key string) int {
		_, env := os.LookupEnv(envName(key))
		switch {
		case flags.Changed(key):
			return 3
		case env:
			return 2
		case v.InConfig(key):
			return 1
		}
		return 0
	}
	switch cmp.Compare(rank("interface"), rank("interfaces")) {
	case 1:
		return "interfaces"
	case -1:
		return "interface"
	}
	return ""
}

// text is the value of a key as a flag would have it: a list has commas.
func text(v *viper.Viper, name string) string {
	list, ok := v.Get(name).([]any)
	if !ok {
		return v.GetString(name)
	}
	var all []string
	for _, e := range list {
		all = append(all, fmt.Sprint(e))
	}
	return strings.Join(all, ",")
}

// source returns where the value of a key was set, checking in the order of precedence.
func source(v *viper.Viper, flags *pflag.FlagSet, file, key string) string {
	if flags.Changed(key) {
		return "--" + key
	}
	if _, ok := os.LookupEnv(envName(key)); ok {
		return envName(key)
	}
	if v.InConfig(key) {
		return file + ": " + key
	}
	return "default of " + key
}

// check validates combinations of keys.
func (s *settings) check() error {
	names := s.names()
	if s.Transport == "socket" && len(names) > 0 {
		return configErr("interface is %q: transport socket serves every address of the host, whatever the interface: omit one of them", strings.Join(names, ","))
	}
	if len(s.Interface) > 0 && len(s.Interfaces) > 0 {
		return configErr("interface is %q and interfaces is %q: list all of them in interfaces", strings.Join(s.Interface, ","), strings.Join(s.Interfaces, ","))
	}
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			return configErr("interfaces lists %s twice", name)
		}
		if !possible(name) {
			return configErr("interface is %q: no interface has such a name: it has no spaces, slashes and colons, and at most 15 bytes", name)
		}
		if !utf8.ValidString(name) {
			return configErr("interface is %q: clients cannot be given a name that is not UTF-8: "+
				"rename it (ip link set dev IF name NEW)", name)
		}
	}
	if len(names) == 0 && s.Transport != "socket" {
		there := "there is none here but loopback"
		if names, _ := hostcheck.Interfaces(); len(names) > 0 {
			there = "choose from " + strings.Join(names, ", ")
		}
		return configErr("no interface: name one with --interface IF, %sINTERFACE or \"interface:\" in the file: %s; %s", envPrefix, there, instead)
	}
	if s.SocketGroup != "" {
		_, err := nss.GID(s.SocketGroup)
		if errors.Is(err, nss.ErrUnknown) {
			return configErr("socket-group: %w: create the group, or name another", err)
		}
		if err != nil {
			return configErr("socket-group: %w", err)
		}
	}
	if s.IRD > s.MaxIRD || s.ORD > s.MaxIRD {
		return configErr("ird %d, ord %d: more than max-ird, which is %d", s.IRD, s.ORD, s.MaxIRD)
	}
	if n := len(s.Queues) * max(len(names), 1); n > 0 {
		return matchCPUs(s.CPUs, n)
	}
	return nil
}

// maxAltName is ALTIFNAMSIZ - 1 of the kernel.
const maxAltName = 127

// possible reports whether an interface can have the name: dev_valid_name of the kernel, to which the byte 0xa0 is a space, in
// UTF-8 too. A longer one may be an alternative name, which is refused at the start, when the one to serve is known.
func possible(name string) bool {
	return len(name) <= maxAltName && name != "." && name != ".." && !strings.ContainsAny(name, "/: \t\n\v\f\r") && strings.IndexByte(name, 0xa0) < 0
}

// names returns the interfaces to serve.
func (s *interfaceSettings) names() []string { return slices.Concat(s.Interface, s.Interfaces) }

// checkEnv rejects unknown variables with the prefix, except those of iwarpd-run and its libraries.
func checkEnv(environ []string) error {
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, envPrefix) || name == envPrefix+"CONFIG" || strings.HasPrefix(name, envPrefix+"VERBS") {
			continue
		}
		if !slices.ContainsFunc(keys, func(k key) bool { return envName(k.name) == name }) {
			guess, near := nearest(strings.ReplaceAll(strings.ToLower(name[len(envPrefix):]), "_", "-"))
			switch {
			case !near:
				return configErr("unknown environment variable %s: unset it; iwarpd --help lists them, as flags", name)
			case guess == allowKey || guess == slotsKey:
				return configErr("unknown environment variable %s: write the key %s into the file", name, guess)
			}
			return configErr("unknown environment variable %s: did you mean %s?", name, envName(guess))
		}
	}
	return nil
}

func envName(key string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
}

// nearest returns the key with the least edit distance to name. near reports whether name is probably a misspelling of it.
func nearest(name string) (guess string, near bool) {
	all := []string{allowKey, slotsKey}
	for _, k := range keys {
		all = append(all, k.name)
	}
	guess = slices.MinFunc(all, func(a, b string) int { return cmp.Compare(distance(name, a), distance(name, b)) })
	return guess, distance(name, guess) <= len(name)/2
}

// distance returns the Levenshtein distance of a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
