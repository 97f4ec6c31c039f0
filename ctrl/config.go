package ctrl

import (
	"cmp"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/shm"
)

// Config configures the control plane. The zero value of each field means its default. Reload can
// change all fields except Socket, Mode, Group, TimeWait, ReceiveWindow, and Folder and Count of
// Slots.
type Config struct {
	// Socket is the path of the Unix socket. Mode has its permission bits; the default is 0660.
	// Group is the name or number of its group; "" leaves the group unchanged.
	Socket string
	Mode   fs.FileMode
	Group  string

	// Allow grants rights to users: the first rule that matches the uid or a gid of a client
	// applies. Without rules, everybody who can open the socket has all rights within Limits.
	// Root sees the objects of all users, except root of a container.
	Allow  []Rule
	Limits Limits

	// Slots are sockets for containers. The rules of Allow do not apply to them.
	Slots Slots

	Startup StartupDefaults
	IP      dataplane.IPOptions // of connections whose client sets none
	// TimeWait is the time for which the port of a connection that we opened and closed first
	// stays in TIME-WAIT; the default is 60 s, as in Linux.
	TimeWait time.Duration
	// ReceiveWindow is the maximum number of bytes that a peer can send on a byte stream before
	// the client reads; the default is 2 MiB.
	ReceiveWindow int
	Detached      DetachPolicy
	// EndDenied ends running connections whose peer a reload, or a change of Options.Peers,
	// denies. Otherwise they stay.
	EndDenied bool
	// Userfaultfd allows clients to obtain /dev/userfaultfd from the daemon.
	Userfaultfd bool
	File        string // path of the configuration, for errors; "" if there is none
	Version     string // of the daemon, shown to clients
}

// A Rule grants rights to users.
type Rule struct {
	UIDs, GIDs []uint32       // the users it applies to; both empty: all users
	Deny       bool           // they may not connect
	Admin      bool           // they may see the objects of all users and end any connection
	Listen     []PortRange    // local ports that they may use; empty: see unprivileged
	Addrs      []netip.Prefix // local addresses that they may use; empty: all
	AcceptFrom []netip.Prefix // peers that may connect to their listeners; empty: all
	ConnectTo  []netip.Prefix // peers that they may connect to; empty: all
	Limits     *Limits        // nil: Config.Limits
}

// A PortRange includes From and To.
type PortRange struct{ From, To uint16 }

// Limits are the quotas of a uid, summed over all of its clients. Zero means the default.
type Limits struct {
	Clients, PDs, MRs, MWs, CQs, QPs, Listens int
	Ports                                     int    // local ports of active opens, including those in TIME-WAIT
	Captures                                  int    // concurrent captures
	Registered                                uint64 // bytes of all memory regions
	Rings                                     uint64 // bytes of all queues and rings, including the daemon's own data for them
	Messages                                  uint64 // bytes of replies and events that the clients have not read
	QueueDepth                                int    // work requests per queue
	CQDepth                                   int    // completions per CQ, at most shm.MaxCQEntries
	MaxInline                                 int    // bytes
	MaxSGE                                    int
}

// DefaultLimits are the default quotas.
var DefaultLimits = Limits{
	Clients: 256, PDs: 4096, MRs: 16384, MWs: 4096, CQs: 4096, QPs: 4096, Listens: 256, Ports: 8192, Captures: 2,
	Registered: 1 << 30, Rings: 1 << 30, Messages: 64 << 20, QueueDepth: 16384, CQDepth: shm.MaxCQEntries, MaxInline: 256, MaxSGE: 16,
}

// fill replaces each zero by its default.
func (l Limits) fill() Limits {
	d := DefaultLimits
	return Limits{
		Clients: cmp.Or(l.Clients, d.Clients), PDs: cmp.Or(l.PDs, d.PDs), MRs: cmp.Or(l.MRs, d.MRs), MWs: cmp.Or(l.MWs, d.MWs),
		CQs: cmp.Or(l.CQs, d.CQs), QPs: cmp.Or(l.QPs, d.QPs), Listens: cmp.Or(l.Listens, d.Listens), Ports: cmp.Or(l.Ports, d.Ports),
		Captures: cmp.Or(l.Captures, d.Captures), Registered: cmp.Or(l.Registered, d.Registered), Rings: cmp.Or(l.Rings, d.Rings),
		Messages: cmp.Or(l.Messages, d.Messages), QueueDepth: cmp.Or(l.QueueDepth, d.QueueDepth), CQDepth: cmp.Or(l.CQDepth, d.CQDepth),
		MaxInline: cmp.Or(l.MaxInline, d.MaxInline), MaxSGE: cmp.Or(l.MaxSGE, d.MaxSGE),
	}
}

// StartupDefaults are the defaults for the MPA negotiation, and bounds on what a client may
// request.
type StartupDefaults struct {
	CRC      CRCPolicy
	CRCPeers []CRCRule // exceptions from CRC; the first that contains the peer applies
	CRCLocal bool      // CRC and CRCPeers apply within the host too; otherwise there is no CRC there
	Markers  bool
	Revision int           // default 2
	NoP2P    bool          // do not ask for peer-to-peer mode, in which either side may send first
	RTR      uint32        // RTR bits offered in peer-to-peer mode: 1 Send, 2 Write, 4 Read; default all
	IRD, ORD int           // default 16
	MaxIRD   int           // default 128
	Timeout  time.Duration // for each step of the MPA start-up; default 10 s
	Connect  time.Duration // for a whole connect; default 30 s
	Accept   time.Duration // for the client to answer a connect request; default 30 s
	// PerListener bounds the connections of a listener whose MPA request has not arrived; default 1024.
	PerListener int
}

// A CRCPolicy is the administrator's choice of whether MPA uses CRC32c, which RFC 5044 Section
// 4.4 demands. A client's request has effect only within it. A connection runs without CRC only
// if both ends disable it.
type CRCPolicy uint8

// CRC policies.
const (
	CRCRequired CRCPolicy = iota // on every connection
	CRCOptional                  // requested unless the client disables it
	CRCOff                       // only if the peer requests it
)

// A CRCRule is the policy for peers in a network.
type CRCRule struct {
	Peers netip.Prefix
	CRC   CRCPolicy
}

// crc reports whether to request CRC32c from peer, a program of this host if within. wish is the
// client's choice.
func (s *StartupDefaults) crc(peer netip.Addr, within, wish bool) bool {
	if within && !s.CRCLocal {
		return false
	}
	p := s.CRC
	for _, r := range s.CRCPeers {
		if r.Peers.Contains(peer) {
			p = r.CRC
			break
		}
	}
	return p == CRCRequired || p == CRCOptional && wish
}

func (s StartupDefaults) fill() StartupDefaults {
	s.Revision = cmp.Or(s.Revision, 2)
	s.RTR = cmp.Or(s.RTR, 7)
	s.MaxIRD = cmp.Or(s.MaxIRD, 128)
	s.IRD = cmp.Or(s.IRD, min(16, s.MaxIRD))
	s.ORD = cmp.Or(s.ORD, min(16, s.MaxIRD))
	s.Timeout = cmp.Or(s.Timeout, 10*time.Second)
	s.Connect = cmp.Or(s.Connect, 30*time.Second)
	s.Accept = cmp.Or(s.Accept, 30*time.Second)
	s.PerListener = cmp.Or(s.PerListener, 1024)
	return s
}

func (c Config) fill() Config {
	c.Mode = cmp.Or(c.Mode, 0o660)
	c.Version = cmp.Or(c.Version, "devel")
	c.ReceiveWindow = cmp.Or(c.ReceiveWindow, 2<<20)
	c.TimeWait = cmp.Or(c.TimeWait, time.Minute)
	c.Limits = c.Limits.fill()
	c.Startup = c.Startup.fill()
	return c
}

// policy is the set of rights of a client, from the rule that matched.
type policy struct {
	admin  bool
	system bool // root, or the daemon's own user: may use every port that no rule denies
	listen []PortRange
	addrs  []netip.Prefix
	limits Limits

	acceptFrom, connectTo []netip.Prefix
	rule                  string // for errors
}

// policy returns the rights that r grants, except for those of administrators. name is the rule's in
// errors.
func (r *Rule) policy(c *Config, name string) policy {
	p := policy{listen: r.Listen, addrs: r.Addrs, limits: c.Limits, acceptFrom: r.AcceptFrom, connectTo: r.ConnectTo, rule: name}
	if r.Limits != nil {
		p.limits = r.Limits.fill()
	}
	if c.File != "" {
		p.rule += " in " + c.File
	}
	return p
}

// policyOf returns the policy for a uid and its groups. ok is false if the user may not
// connect. Root in a container has only the rights of a user.
func (c *Config) policyOf(uid uint32, gids []uint32, contained bool) (p policy, ok bool) {
	switch {
	case uid == otherRoot:
		uid, contained = 0, true
	case uid >= slotUID:
		return c.Slots.Rule.policy(c, "slots"), true
	}
	root := uid == 0 && !contained
	system := root || int(uid) == os.Geteuid() && !contained
	if len(c.Allow) == 0 {
		return policy{admin: root, system: system, limits: c.Limits}, true
	}
	for i := range c.Allow {
		r := &c.Allow[i]
		if !r.matches(uid, gids) {
			continue
		}
		p = r.policy(c, fmt.Sprintf("rule %d of allow", i+1))
		p.admin, p.system = r.Admin || root, system
		return p, !r.Deny
	}
	return policy{admin: true, system: true, limits: c.Limits}, root
}

func (r *Rule) matches(uid uint32, gids []uint32) bool {
	if len(r.UIDs) == 0 && len(r.GIDs) == 0 {
		return true
	}
	return slices.Contains(r.UIDs, uid) || slices.ContainsFunc(r.GIDs, func(g uint32) bool { return slices.Contains(gids, g) })
}

// unprivileged is the first port that users may use if no rule lists ports for them, as with kernel
// sockets.
const unprivileged = 1024

// mayBind reports whether the client may use a local port, for listening or as the source of a
// connection.
func (p *policy) mayBind(port uint16) bool {
	if len(p.listen) == 0 {
		return p.system || port >= unprivileged
	}
	return slices.ContainsFunc(p.listen, func(r PortRange) bool { return r.From <= port && port <= r.To })
}

// mayUse reports whether the client may use a local address. An unspecified one stands for all, of both families.
func (p *policy) mayUse(a netip.Addr) bool {
	if a.IsUnspecified() && len(p.addrs) > 0 {
		v4, v6 := netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		return slices.Contains(p.addrs, v4) && slices.Contains(p.addrs, v6)
	}
	return len(p.addrs) == 0 || slices.ContainsFunc(p.addrs, func(pre netip.Prefix) bool { return pre.Contains(a) })
}
