package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.uber.org/zap/zapcore"
	"go.yaml.in/yaml/v3"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/nftset"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/internal/nss"
	"github.com/iwarpd/iwarpd/tcp"
)

// envPrefix is the prefix of the environment variables that set keys.
const envPrefix = "IWARPD_"

// leastMTU is the size that every host must accept (RFC 791, Section 3.2); an FPDU fits in it.
const leastMTU = 576

// interfaceSettings name the interfaces to serve: one, or several.
type interfaceSettings struct {
	Interface  string
	Interfaces []string // Interface is empty then
}

// settings is the validated configuration of a daemon.
type settings struct {
	Transport string // afxdp, socket or both
	interfaceSettings
	Queues    []int // of each interface; empty: all
	CPUs      []int // one a queue; empty: not pinned
	Link      ifqueue.Kind
	XDPMode   string
	Super     bool   // send super-frames if the interface supports them
	Partial   string // whether to accept partial checksums: auto, accept or refuse
	Detached  ctrl.DetachPolicy
	Poll      string
	Spin      time.Duration
	MTU       int // 0 means that of the interface
	QueueMem  int64
	Endpoints int // endpoints that the XDP program can steer

	Socket      string
	SocketMode  fs.FileMode
	SocketGroup string

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

// peerSettings are about peers, in addition to the rules.
type peerSettings struct {
	File        string // file of the rules, for errors; "" if there is none
	Userfaultfd bool   // open /dev/userfaultfd for clients
	EndDenied   bool   // end running connections whose peer is denied now
	AllowSets   []nftset.Name
}

// tcpSettings are the keys of the section tcp.
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
	{"transport", "", "afxdp", "transport below iWARP: afxdp, socket (the kernel's TCP, which needs no privileges and no interface), or both (AF_XDP, and the kernel's TCP for listeners and connections that ask for it)", oneOf(func(s *settings) *string { return &s.Transport }, "afxdp", "socket", "both")},
	{"interface", "i", "", "network interface to serve", func(s *settings, v string) error {
		s.Interface = v
		return nil
	}},
	{"interfaces", "", "", "several network interfaces to serve, such as eth0,eth1", func(s *settings, v string) error {
		s.Interfaces = nil
		for name := range strings.SplitSeq(v, ",") {
			if name = strings.TrimSpace(name); name != "" {
				s.Interfaces = append(s.Interfaces, name)
			}
		}
		return nil
	}},
	{"queues", "", "all", `queues of each interface to serve: "all", or a list such as 0,2-3`, func(s *settings, v string) (err error) {
		s.Queues, err = parseList(v, "all")
		return err
	}},
	{"cpus", "", "", "CPUs to pin the workers to, one for each queue of each interface in turn, such as 2-5; empty: not pinned", func(s *settings, v string) (err error) {
		s.CPUs, err = parseList(v, "")
		return err
	}},
	{"link", "", "auto", "how to receive and send frames: auto (packet on veth and tap, else xdp), xdp (AF_XDP sockets) or packet (packet sockets with a shared ring; needs Linux 6.6)", func(s *settings, v string) (err error) {
		s.Link, err = ifqueue.ParseKind(v)
		return err
	}},
	{"xdp-mode", "", "auto", "how to attach the XDP program: auto, native (in the driver) or generic", oneOf(func(s *settings) *string { return &s.XDPMode }, "auto", "native", "generic")},
	{"super-frames", "", "auto", "whether to send up to 64 KiB of one connection as one packet: auto (if the interface has TCP segmentation offload) or off", func(s *settings, v string) error {
		s.Super = v == "auto"
		if v != "auto" && v != "off" {
			return errors.New("must be one of auto, off")
		}
		return nil
	}},
	{"partial-checksums", "", "auto", "what to do with TCP segments whose checksum a kernel on this machine left to the hardware: accept, refuse, or auto (accept on veth, tap and virtio)", oneOf(func(s *settings) *string { return &s.Partial }, "auto", "accept", "refuse")},
	{"xdp-detached", "", "end", "what to do when another program detaches the XDP program: end (all connections) or attach (again)", func(s *settings, v string) error {
		s.Detached = ctrl.DetachEnd
		if v == "attach" {
			s.Detached = ctrl.DetachAttach
		} else if v != "end" {
			return errors.New("must be one of end, attach")
		}
		return nil
	}},
	{"poll", "", "adaptive", "what an idle worker does: adaptive (spins, then sleeps) or busy (always spins)", oneOf(func(s *settings) *string { return &s.Poll }, "adaptive", "busy")},
	{"spin", "", "50us", "how long an idle adaptive worker spins before it sleeps, and up to four times as long while work keeps coming soon after; 0: it never spins", duration(func(s *settings) *time.Duration { return &s.Spin }, 0, time.Second)},
	{"mtu", "", "0", "largest IP packet to send, in bytes, 576 to 9216; 0: the MTU of the interface", func(s *settings, v string) error {
		err := number(func(s *settings) *int { return &s.MTU }, 0, 9216)(s, v)
		if err != nil || 0 < s.MTU && s.MTU < leastMTU {
			return fmt.Errorf("must be 0, or a number from %d to 9216", leastMTU)
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
	{"congestion-control", "", "cubic", "TCP congestion control: " + strings.Join(tcp.CongestionControls(), ", "), congestion},
	{"ecn", "", "accept", "ECN of TCP (RFC 3168): accept (if the peer asks for it), request or off", func(s *settings, v string) (err error) {
		s.ECN, err = parseECN(v)
		return err
	}},
	{"receive-window", "", "2MiB", "TCP receive window of a connection, in bytes, from 65535 to 1GiB", func(s *settings, v string) error {
		n, err := parseSize(v)
		if err != nil || n < 65535 || n > 1<<30 {
			return errors.New("must be a size from 65535 to 1GiB, like 2MiB")
		}
		s.RcvWindow = int(n)
		return nil
	}},
	{"keep-alive", "", "30s", "idle time before the first keep-alive probe; 0: no probes", durationOrNone(func(s *settings) *time.Duration { return &s.KeepAlive }, time.Second, 24*time.Hour)},
	{"tcp-r2", "", "2m", "how long TCP retransmits data without an acknowledgement before it ends the connection (R2)", duration(func(s *settings) *time.Duration { return &s.TCPR2 }, time.Second, 24*time.Hour)},
	{"tcp-r2-syn", "", "3m", "how long TCP retransmits a SYN or SYN-ACK before it gives up", duration(func(s *settings) *time.Duration { return &s.TCPR2SYN }, time.Second, 24*time.Hour)},
	{"tcp-user-timeout", "", "0s", "how long sent data may stay unacknowledged, even while the peer's window is closed; 0: no limit", durationOrNone(func(s *settings) *time.Duration { return &s.UserTimeout }, time.Second, 24*time.Hour)},
	{"tcp-time-wait", "", "1m", "how long a connection that this side closed, and its port, stay in TIME-WAIT", duration(func(s *settings) *time.Duration { return &s.TimeWait }, time.Second, 4*time.Minute)},
	{"sctp-rto-min", "", "1s", "minimum SCTP retransmission time-out (RTO.Min), 10ms to 1m", duration(func(s *settings) *time.Duration { return &s.SCTPRTOMin }, 10*time.Millisecond, time.Minute)},
	{"sctp-idle", "", "1m", "how long a peer may keep an SCTP association without a session; 0: forever", durationOrNone(func(s *settings) *time.Duration { return &s.SCTPIdle }, time.Second, 24*time.Hour)},
	{"sctp-per-peer", "", "1024", "maximum number of SCTP associations from one address to one listener, per queue", number(func(s *settings) *int { return &s.SCTPPerPeer }, 1, 1<<20)},
	{"dscp", "", "0", "DSCP of connections whose program sets none, 0 to 63", byteOf(func(s *settings) *uint8 { return &s.IP.DSCP }, 0, 63)},
	{"ttl", "", "64", "TTL or hop limit of connections whose program sets none", byteOf(func(s *settings) *uint8 { return &s.IP.TTL }, 1, 255)},
	{"vlan-priority", "", "0", "priority in VLAN tags of connections whose program sets none, 0 to 7", byteOf(func(s *settings) *uint8 { return &s.IP.Priority }, 0, 7)},
	{"mpa-revision", "", "2", "highest MPA revision offered, 1 or 2", number(func(s *settings) *int { return &s.MPARevision }, 1, 2)},
	{"crc", "", "required", "MPA's CRC32c: required, optional (a client may disable it) or off (used only if the peer requests it)", func(s *settings, v string) (err error) {
		s.CRC, err = parseCRC(v)
		return err
	}},
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
	{"denied-connections", "", "keep", "what happens to running connections whose peer a reload or a change of allow-set denies: keep or end", func(s *settings, v string) error {
		s.EndDenied = v == "end"
		if v != "end" && v != "keep" {
			return errors.New("must be one of keep, end")
		}
		return nil
	}},
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
			return errors.New("must be debug, info, warn or error")
		}
		return nil
	}},
	{"log-format", "", "console", "log format: console or json", oneOf(func(s *settings) *string { return &s.LogFormat }, "console", "json")},
})

// reloadable are the keys that SIGHUP can change, in addition to the rules of "allow".
var reloadable = append(quotaNames(),
	"xdp-detached", "denied-connections", "dscp", "ttl", "vlan-priority", "crc", "crc-peers", "crc-local", "mpa-revision", "mpa-markers", "mpa-peer-to-peer", "ird", "ord", "max-ird", "startup-timeout",
	"drain-timeout", "log-level",
)

// addFlags adds a flag for each key.
func addFlags(flags *pflag.FlagSet) {
	for _, k := range keys {
		flags.StringP(k.name, k.short, k.def, k.help)
		if k.def == "true" || k.def == "false" {
			flags.Lookup(k.name).NoOptDefVal = "true"
		}
	}
}

// load reads the settings. Flags take precedence over the environment, the file and the defaults.
// file may be empty.
func load(flags *pflag.FlagSet, file string) (*settings, error) {
	v := viper.New()
	v.AllowEmptyEnv(true)
	for _, k := range keys {
		// Neither can fail: the flag exists, and the key has a name.
		_ = v.BindPFlag(k.name, flags.Lookup(k.name))
		_ = v.BindEnv(k.name, envName(k.name))
	}
	if file != "" {
		if err := readFile(v, file); err != nil {
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
	rules, err := parseAllow(v.Get(allowKey), s.Limits)
	if err != nil {
		return nil, configErr("%s: %s: %w", file, allowKey, err)
	}
	s.Allow = rules
	if s.Slots, err = parseSlots(v.Get(slotsKey), s.Limits); err != nil {
		return nil, configErr("%s: %s: %w", file, slotsKey, err)
	}
	return s, s.check()
}

// insteadOf returns the key, interface or interfaces, that has no effect because the other one
// was set in a place of higher precedence, such as a unit's template over the file. It returns
// "" if there is none.
func insteadOf(v *viper.Viper, flags *pflag.FlagSet) string {
	rank := func(key string) int {
		_, env := os.LookupEnv(envName(key))
		switch {
		case text(v, key) == "":
			return 0
		case flags.Changed(key):
			return 3
		case env:
			return 2
		}
		return 1
	}
	switch one, many := rank("interface"), rank("interfaces"); {
	case one == 0 || many == 0 || one == many:
		return ""
	case one > many:
		return "interfaces"
	}
	return "interface"
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
	if s.Interface != "" && len(s.Interfaces) > 0 {
		return configErr("interface is %q and interfaces is %q: list all of them in interfaces", s.Interface, strings.Join(s.Interfaces, ","))
	}
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			return configErr("interfaces lists %s twice", name)
		}
	}
	if len(names) == 0 && s.Transport != "socket" {
		there := "there is none here but loopback"
		if names := candidates(); len(names) > 0 {
			there = "choose from " + strings.Join(names, ", ")
		}
		return configErr("no interface: name one with --interface IF, %sINTERFACE or \"interface:\" in the file: %s; %s", envPrefix, there, instead)
	}
	if s.SocketGroup != "" {
		if _, err := nss.GID(s.SocketGroup); err != nil {
			return configErr("socket-group: %w: create the group, or name another", err)
		}
	}
	if s.IRD > s.MaxIRD || s.ORD > s.MaxIRD {
		return configErr("ird %d, ord %d: more than max-ird, which is %d", s.IRD, s.ORD, s.MaxIRD)
	}
	if n := len(s.Queues) * max(len(names), 1); len(s.CPUs) > 0 && n > 0 && len(s.CPUs) != n {
		return configErr("cpus: %d CPUs for %d queues: give one CPU per queue", len(s.CPUs), n)
	}
	return nil
}

// names returns the interfaces to serve.
func (s *interfaceSettings) names() []string {
	if s.Interface != "" {
		return []string{s.Interface}
	}
	return s.Interfaces
}

// readFile reads the YAML file and rejects unknown keys.
func readFile(v *viper.Viper, file string) error {
	text, err := readBounded(file)
	if errors.Is(err, fs.ErrPermission) {
		return configErr("cannot read the configuration: %w: let the user of the daemon read it", err)
	}
	if err != nil {
		return configErr("cannot read the configuration: %w", err)
	}
	m, err := parseYAML(text)
	if err == nil {
		err = v.MergeConfigMap(m)
	}
	if err != nil {
		return configErr("%s: %s", file, oneLine(err.Error()))
	}
	for _, name := range v.AllKeys() {
		if top, _, _ := strings.Cut(name, "."); top == allowKey || top == slotsKey {
			continue
		}
		if !slices.ContainsFunc(keys, func(k key) bool { return k.name == name }) {
			return configErr("%s: unknown key %q: did you mean %q?", file, name, nearest(name))
		}
		switch value := v.Get(name).(type) {
		case []any, map[string]any:
			if _, list := value.([]any); list && (name == "interfaces" || name == "allow-set") {
				continue
			}
			return configErr("%s: %s: must be one value; write a list as a string like \"0,2-3\"", file, name)
		}
	}
	return nil
}

// maxFile bounds the configuration file, since a device that is named by mistake may be endless.
const maxFile = 4 << 20

func readBounded(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if len(text) > maxFile {
		err = fmt.Errorf("%s has more than %d MiB: is that the right file?", file, maxFile>>20)
	}
	return text, err
}

// parseYAML returns the keys of a YAML document. Values are text as it was typed, nil, lists and
// maps of these: errors quote them, and a number would have other digits after YAML had parsed it.
func parseYAML(text []byte) (m map[string]any, err error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	for i := 0; ; i++ {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return m, nil
		}
		if err == nil {
			root := doc.Content[0]
			switch {
			case root.ShortTag() == "!!null":
				continue
			case i > 0: // only the first one would be read
				return nil, errors.New("more than one YAML document: remove the line \"---\" between them")
			case root.Kind != yaml.MappingNode:
				return nil, errors.New("must have keys like \"interface: eth0\"")
			}
			if err := checkMode(root.Content); err != nil {
				return nil, err
			}
			asText(root)
			err = root.Decode(&m)
		}
		if err != nil {
			why := strings.TrimPrefix(strings.TrimPrefix(err.Error(), "yaml: "), "unmarshal errors:\n")
			if bytes.Contains(text, []byte("\t")) && strings.Contains(why, "cannot start any token") {
				why += ": indent with spaces, not with tabs"
			}
			return nil, errors.New("not YAML: " + why)
		}
	}
}

// checkMode returns an error if socket-mode is a number: a program that wrote the file may have
// written 0660 as 432. pairs are the keys and values of the file.
func checkMode(pairs []*yaml.Node) error {
	for i := 0; i+1 < len(pairs); i += 2 {
		if key, value := pairs[i], pairs[i+1]; key.Value == "socket-mode" && value.ShortTag() == "!!int" {
			return fmt.Errorf("socket-mode is %s: put it in quotes, like \"0660\"", value.Value)
		}
	}
	return nil
}

// asText makes all numbers, booleans and times in n strings.
func asText(n *yaml.Node) {
	if tag := n.ShortTag(); n.Kind == yaml.ScalarNode && tag != "!!null" && tag != "!!merge" {
		n.Tag = "!!str"
	}
	for _, c := range n.Content {
		asText(c)
	}
}

// checkEnv rejects unknown variables with the prefix.
func checkEnv(environ []string) error {
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, envPrefix) || name == envPrefix+"CONFIG" {
			continue
		}
		if !slices.ContainsFunc(keys, func(k key) bool { return envName(k.name) == name }) {
			guess := nearest(strings.ReplaceAll(strings.ToLower(name[len(envPrefix):]), "_", "-"))
			return configErr("unknown environment variable %s: did you mean %s?", name, envName(guess))
		}
	}
	return nil
}

func envName(key string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
}

// nearest returns the key with the least edit distance to name.
func nearest(name string) string {
	best, least := "", 1<<30
	for _, k := range keys {
		if d := distance(name, k.name); d < least {
			best, least = k.name, d
		}
	}
	return best
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

func oneOf(field func(*settings) *string, values ...string) func(*settings, string) error {
	return func(s *settings, v string) error {
		if !slices.Contains(values, v) {
			return fmt.Errorf("must be one of %s", strings.Join(values, ", "))
		}
		*field(s) = v
		return nil
	}
}

func congestion(s *settings, v string) (err error) {
	s.Congestion, err = tcp.ParseCongestionControl(v)
	return err
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
			return fmt.Errorf("must be a time from %v to %v, like 50us, 2s", least, most)
		}
		*field(s) = d
		return nil
	}
}

// durationOrNone accepts 0 too.
func durationOrNone(field func(*settings) *time.Duration, least, most time.Duration) func(*settings, string) error {
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

var crcPolicies = map[string]ctrl.CRCPolicy{"required": ctrl.CRCRequired, "optional": ctrl.CRCOptional, "off": ctrl.CRCOff}

func parseECN(v string) (tcp.ECN, error) {
	switch v {
	case "accept":
		return tcp.AcceptECN, nil
	case "request":
		return tcp.RequestECN, nil
	case "off":
		return tcp.NoECN, nil
	}
	return 0, errors.New("must be one of accept, request, off")
}

func parseCRC(v string) (ctrl.CRCPolicy, error) {
	p, ok := crcPolicies[v]
	if !ok {
		return p, errors.New("must be one of required, optional, off")
	}
	return p, nil
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
		if r.CRC, err = parseCRC(policy); err != nil {
			return nil, fmt.Errorf("%q: %w", part, err)
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
		return 0, errors.New("must be a size like 4096, 64KiB, 16MiB or 2GiB")
	}
	return n << shift, nil
}

// oneLine joins the lines of an error message.
func oneLine(s string) string {
	return strings.Join(strings.Fields(s), " ")
}
