package ctrl

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestPorts checks that rules cover the local port of Connect as well as that of Listen. Ports below 1024 are for
// root, the daemon's user, and clients whose rule lists them.
func TestPorts(t *testing.T) {
	rule := func(ranges ...PortRange) []Rule { return []Rule{{Listen: ranges}} }
	for _, tt := range []struct {
		name  string
		allow []Rule
		uid   uint32
		port  uint16
		ok    bool
	}{
		{"no rules, root", nil, 0, 80, true},
		{"no rules, the daemon's user", nil, uint32(os.Geteuid()), 80, true},
		{"no rules, a user", nil, 54321, 80, false},
		{"no rules, a user, the last", nil, 54321, 1023, false},
		{"no rules, a user, the first", nil, 54321, 1024, true},

		{"rule without ports", rule(), 54321, 80, false},
		{"rule without ports, high", rule(), 54321, 7174, true},
		{"rule without ports, root", rule(), 0, 80, true},
		{"rule with the port", rule(PortRange{80, 80}), 54321, 80, true},
		{"rule with others", rule(PortRange{7000, 7999}), 54321, 8000, false},
		{"rule with others, root", rule(PortRange{7000, 7999}), 0, 8000, false},
	} {
		cfg := Config{Allow: tt.allow}.fill()
		pol, ok := cfg.policyOf(tt.uid, nil, false)
		if !ok || pol.mayBind(tt.port) != tt.ok {
			t.Errorf("%s: port %d allowed %v; want %v", tt.name, tt.port, !tt.ok, tt.ok)
		}
	}

	_, c := newClient(t, Config{Allow: rule(PortRange{7000, 7999})})
	from := func(local string) *ctrlpb.Request {
		req := reqConnect(c.qp(), peerA.String())
		req.GetConnect().Local = local
		return req
	}
	const denied = ctrlpb.Code_CODE_PERMISSION
	c.fails(denied, from(":22"))
	c.fails(denied, from("10.0.0.1:8000"))
	c.fails(denied, reqListen("", 8000))
	c.fails(denied, reqListen("", 0)) // port 0 may become any port
	c.ok(from("10.0.0.1:7001"))
	c.ok(from("")) // a port that the daemon chooses
	c.ok(reqListen("", 7002))
}

// TestListenOnAll checks that only a rule that allows the addresses of both families allows a listener on all of them,
// which takes connections of both.
func TestListenOnAll(t *testing.T) {
	for _, tt := range []struct {
		allow string
		ok    bool
	}{
		{"", true}, {"10.0.0.0/8", false}, {"0.0.0.0/0", false}, {"::/0", false}, {"::/64 0.0.0.0/8", false}, {"::/0 0.0.0.0/0", true},
	} {
		var rule Rule
		for _, p := range strings.Fields(tt.allow) {
			rule.Addrs = append(rule.Addrs, netip.MustParsePrefix(p))
		}
		h := newHarness(t, Config{Allow: []Rule{rule}})
		r := h.hello(t).do(reqListen("", 7174))
		if ok := r.Error == nil; ok != tt.ok {
			t.Errorf("addresses [%s]: %v", tt.allow, r.Error)
		}
	}
}

// TestContainedRoot checks that root of a container has the rights of a user, unless a rule says otherwise.
func TestContainedRoot(t *testing.T) {
	for _, tt := range []struct {
		name              string
		allow             []Rule
		ok, admin, system bool
	}{
		{"no rules", nil, true, false, false},
		{"a rule for others", []Rule{{UIDs: []uint32{7}}}, false, false, false},
		{"a rule", []Rule{{UIDs: []uint32{0}}}, true, false, false},
		{"a rule for administrators", []Rule{{UIDs: []uint32{0}, Admin: true}}, true, true, false},
	} {
		cfg := Config{Allow: tt.allow}.fill()
		if p, ok := cfg.policyOf(0, nil, true); ok != tt.ok || ok && (p.admin != tt.admin || p.system != tt.system) {
			t.Errorf("%s: allowed %v, admin %v, system %v", tt.name, ok, p.admin, p.system)
		}
		if p, ok := cfg.policyOf(0, nil, false); !ok || !p.admin || !p.system {
			t.Errorf("%s: root of the host: allowed %v, admin %v, system %v", tt.name, ok, p.admin, p.system)
		}
	}
}

// TestUserPorts checks the ports of a client that is neither root nor the daemon's user.
func TestUserPorts(t *testing.T) {
	h := newHarness(t, Config{})
	var c *tclient
	testenv.AsUser(t, 54321, 54321, nil, func() { c = h.client(t) })
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	c.fails(ctrlpb.Code_CODE_PERMISSION, reqListen("", 22))
	req := reqConnect(c.qp(), peerA.String())
	req.GetConnect().Local = ":1023"
	c.fails(ctrlpb.Code_CODE_PERMISSION, req)
	c.ok(reqListen("", 1024))
	c.ok(reqListen("", 0))
}

// TestGroupRules checks that rules use the groups that the kernel reports for a client, not those of the name
// service.
func TestGroupRules(t *testing.T) {
	const group, other = 70001, 70002
	hello := &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}}
	for _, tt := range []struct {
		name   string
		allow  []Rule
		gid    uint32
		groups []int
		ok     bool
	}{
		{"allowed by a supplementary group", []Rule{{GIDs: []uint32{group}}}, other, []int{5, group}, true},
		{"allowed by the effective group", []Rule{{GIDs: []uint32{group}}}, group, nil, true},
		{"not of the group", []Rule{{GIDs: []uint32{group}}}, other, []int{5}, false},
		{"denied by a supplementary group", []Rule{{GIDs: []uint32{group}, Deny: true}, {}}, other, []int{5, group}, false},
		{"not denied", []Rule{{GIDs: []uint32{group}, Deny: true}, {}}, other, []int{5}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, Config{Allow: tt.allow})
			var c *tclient
			testenv.AsUser(t, 54321, tt.gid, tt.groups, func() { c = h.client(t) }) // a uid without a name
			if !tt.ok {
				c.fails(ctrlpb.Code_CODE_PERMISSION, hello)
				return
			}
			c.ok(hello)
			// A reload uses the same groups.
			h.Reload(Config{Allow: append([]Rule{{UIDs: []uint32{1}, Addrs: []netip.Prefix{}}}, tt.allow...)})
			c.ok(reqListen("", 7174))
		})
	}
}

// TestOtherRoot checks that root of another PID namespace is no administrator, does not see the objects of root, and
// does not share its quotas.
func TestOtherRoot(t *testing.T) {
	const connect = "CONNECT_TO" // the path to which the process in the namespace connects its descriptor 3
	if path := os.Getenv(connect); path != "" {
		if err := unix.Connect(3, &unix.SockaddrUnix{Name: path}); err != nil {
			t.Fatal(err)
		}
		return
	}
	testenv.RequireRoot(t)
	path := filepath.Join(t.TempDir(), "socket")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	sock := os.NewFile(uintptr(fd), "socket")
	defer sock.Close()
	other := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOtherRoot$")
	other.Env = append(os.Environ(), connect+"="+path)
	other.ExtraFiles = []*os.File{sock}
	other.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if out, err := other.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	h := newHarness(t, Config{Limits: Limits{QPs: 1}})
	root := h.hello(t)
	qp := root.qp()
	accepted, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	h.serve(seqpacket.FromUnix(accepted), noSlot)
	dup, err := seqpacket.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := seqpacket.FromFD(dup)
	if err != nil {
		t.Fatal(err)
	}
	c := &tclient{t: t, c: conn}
	defer func() { conn.Close(); seqpacket.CloseAll(c.fds) }()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	c.qp() // root has its only one
	clients := &ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{}}}
	if all := c.ok(clients).GetClients().Clients; len(all) != 1 || all[0].Uid != otherRoot {
		t.Errorf("it sees the clients %v", all)
	}
	c.fails(cNoObject, ask(&ctrlpb.AdminDisconnect{Qp: qp}))
	if all := root.ok(clients).GetClients().Clients; len(all) != 2 {
		t.Errorf("root sees the clients %v", all)
	}
	rules := Config{Allow: []Rule{{UIDs: []uint32{0}, Admin: true}}}.fill()
	if pol, ok := rules.policyOf(otherRoot, nil, true); !ok || !pol.admin {
		t.Error("the rule for root does not apply to it")
	}
}
