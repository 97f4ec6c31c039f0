package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// plain converts a message for encoding/json: all fields by their names in iwarpd.proto, including
// zeros, and numbers as numbers.
func plain(m proto.Message) map[string]any { return plainMessage(m.ProtoReflect()) }

func plainMessage(m protoreflect.Message) map[string]any {
	out := make(map[string]any)
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		v := m.Get(f)
		switch {
		case f.IsList() && f.Message() != nil && f.Message().FullName() == counterName:
			out[string(f.Name())] = plainCounters(v.List())
		case f.IsList():
			list := make([]any, v.List().Len())
			for j := range list {
				list[j] = plainValue(f, v.List().Get(j))
			}
			out[string(f.Name())] = list
		case f.Message() != nil && !m.Has(f):
			out[string(f.Name())] = nil
		default:
			out[string(f.Name())] = plainValue(f, v)
		}
	}
	return out
}

func plainValue(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	if f.Message() == nil {
		return v.Interface()
	}
	return plainMessage(v.Message())
}

var counterName = (&ctrlpb.Counter{}).ProtoReflect().Descriptor().FullName()

// plainCounters converts a list of counters to an object.
func plainCounters(l protoreflect.List) map[string]uint64 {
	out := make(map[string]uint64, l.Len())
	for i := range l.Len() {
		c := l.Get(i).Message()
		of := c.Descriptor().Fields()
		out[c.Get(of.ByName("name")).String()] = c.Get(of.ByName("value")).Uint()
	}
	return out
}

// query returns the function of a command that queries the daemon and prints the answer.
func query[T any](c *command, ask func(*iwarp.Admin, context.Context) (T, error), print func(T) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		dev, err := c.open(cmd.Context())
		if err != nil {
			return err
		}
		defer dev.Close()
		c.self = dev.Attr().Client
		v, err := ask(dev.Admin(), cmd.Context())
		if err != nil {
			return err
		}
		return print(v)
	}
}

// status returns the state of the daemon, without counting this client.
func status(a *iwarp.Admin, ctx context.Context) (*ctrlpb.StatusReply, error) {
	s, err := a.Status(ctx)
	if s.GetClients() > 0 {
		s.Clients--
	}
	return s, err
}

// clients returns the daemon's clients, except this one.
func (c *command) clients(a *iwarp.Admin, ctx context.Context) ([]*ctrlpb.ClientInfo, error) {
	all, err := a.Clients(ctx)
	return slices.DeleteFunc(all, func(i *ctrlpb.ClientInfo) bool { return i.Client == c.self }), err
}

// maxTimed is the greatest number of connections for which status asks for round-trip times.
// With more connections the request would slow down programs that only probe the daemon.
const maxTimed = 64

func (c *command) status() *cobra.Command {
	var trips string
	ask := func(a *iwarp.Admin, ctx context.Context) (*ctrlpb.StatusReply, error) {
		s, err := status(a, ctx)
		if err != nil || c.json || s.Conns == 0 || s.Conns > maxTimed {
			return s, err
		}
		qps, err := a.QPs(ctx)
		trips = roundTrips(qps)
		return s, err
	}
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show the state of the daemon",
		Example: "  iwarpctl status\n  iwarpctl status --json",
		Args:    usageArgs(cobra.NoArgs),
		RunE: query(c, ask, func(s *ctrlpb.StatusReply) error {
			if c.json {
				return cmp.Or(c.print(plain(s)), stuck(s))
			}
			d := s.GetDevice()
			lines := [][2]any{
				{"daemon", fmt.Sprintf("iwarpd %s, process %d, up %v, %s", s.Version, s.Pid, (time.Duration(s.UptimeMs) * time.Millisecond).Round(time.Second), printable.Count(s.Workers, "worker"))},
			}
			if why := s.GetNotReloaded(); why != "" {
				lines = append(lines, [2]any{"  settings", "NOT RELOADED: " + why})
			}
			for _, d := range s.GetDevices() {
				lines = append(lines, [][2]any{
					{"interface", fmt.Sprintf("%s, MTU %d%s", d.GetInterface(), d.GetMtu(), link(d))},
					{"  steering", attached(s, d)},
					{"  addresses", strings.Join(d.GetAddresses(), ", ")},
				}...)
			}
			for _, l := range append(lines, [][2]any{
				{"clients", s.Clients},
				{"connections", s.Conns},
				{"  round trip", trips},
				{"queue pairs", fmt.Sprintf("%d of %d", s.Qps, d.GetMaxQp())},
				{"memory", fmt.Sprintf("%s, %s of %s", printable.Count(s.Mrs, "region"), bytesText(s.Registered), bytesText(d.GetMaxRegistered()))},
				{"listening", "on " + printable.Count(s.Listens, "endpoint")},
			}...) {
				if l[1] != "" {
					fmt.Fprintf(c.out, "%-12s %v\n", l[0], l[1])
				}
			}
			return stuck(s)
		}),
	}
	show := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		err := show(cmd, args)
		if errors.Is(err, iwarp.ErrQuota) && !c.json { // it runs, and a probe must not fail
			fmt.Fprintf(c.out, "%-12s %v\n", "daemon", printable.String(reason(err)))
			return nil
		}
		return err
	}
	return cmd
}

// stuck returns an error if a worker does not answer, so that a probe fails.
func stuck(s *ctrlpb.StatusReply) error {
	switch len(s.Silent) {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("worker %d does not answer: its connections stand still", s.Silent[0])
	}
	return fmt.Errorf("workers %v do not answer: their connections stand still", s.Silent)
}

// link describes the link of an interface: ", link up, 10 Gbit/s".
func link(d *ctrlpb.DeviceAttr) string {
	if d.GetLink() == "" {
		return ""
	}
	s := ", link " + d.GetLink()
	switch v := d.GetSpeed(); {
	case v >= 1e9:
		s += fmt.Sprintf(", %g Gbit/s", float64(v)/1e9)
	case v > 0:
		s += fmt.Sprintf(", %g Mbit/s", float64(v)/1e6)
	}
	return s
}

// roundTrips summarizes the smoothed round-trip times of the connections. It returns "" if
// there are none.
func roundTrips(qps []*ctrlpb.QPInfo) string {
	var all []time.Duration
	for _, q := range qps {
		if rtt := llp(q, "srtt_ns", "path_srtt_ns"); rtt > 0 {
			all = append(all, time.Duration(rtt))
		}
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	us := func(d time.Duration) time.Duration { return d.Round(time.Microsecond) }
	return fmt.Sprintf("min/median/max %v/%v/%v", us(all[0]), us(all[len(all)/2]), us(all[len(all)-1]))
}

// attached describes whether the XDP program is attached to an interface, and in which mode.
func attached(s *ctrlpb.StatusReply, d *ctrlpb.DeviceAttr) string {
	switch mode := d.GetTransport(); {
	case mode == "kernel sockets":
		return "none: " + mode
	case d.GetDown() != "" && d.GetDown() == s.GetDetached():
		return "DETACHED: " + d.GetDown()
	case d.GetDown() != "":
		return "DOWN: " + d.GetDown()
	case mode != "":
		return "attached, " + mode
	}
	return "attached"
}

// printPlain prints a list in the form of plain.
func printPlain[T proto.Message](c *command, all []T) error {
	out := make([]any, len(all))
	for i, v := range all {
		out[i] = plain(v)
	}
	return c.print(out)
}

// bytesText writes a number of bytes in a unit that fits.
func bytesText(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// lists returns the commands that list objects.
func (c *command) lists() []*cobra.Command {
	return []*cobra.Command{
		group("qp", "Queue pairs", c.listQPs(), c.showQP()),
		group("mr", "Memory regions", list(c, "mr", "registered memory", (*iwarp.Admin).MRs, mrHeader, mrRow)),
		group("cq", "Completion queues", list(c, "cq", "completion queues", (*iwarp.Admin).CQs,
			[]string{"client", "uid", "cq", "depth", "qps", "completions", "overruns", "wake-ups", "moderation"},
			func(q *ctrlpb.CQInfo) []any {
				moderation := "-"
				if q.ModerationCount != 0 && q.ModerationUs != 0 {
					moderation = fmt.Sprintf("%d or %v", q.ModerationCount, time.Duration(q.ModerationUs)*time.Microsecond)
				}
				return []any{q.Client, owner(q.Uid), q.Cq, q.Depth, q.Qps, counter(q.Counters, "completions"), counter(q.Counters, "overruns"), counter(q.Counters, "wake_ups"), moderation}
			})),
		group("srq", "Shared receive queues", list(c, "srq", "shared receive queues", (*iwarp.Admin).SRQs,
			[]string{"client", "uid", "srq", "pd", "depth", "posted", "limit", "qps", "taken", "empty"},
			func(q *ctrlpb.SRQInfo) []any {
				return []any{q.Client, owner(q.Uid), q.Srq, q.Pd, q.Depth, q.Posted, q.Limit, q.Qps, counter(q.Counters, "taken"), counter(q.Counters, "empty")}
			})),
		group("listen", "Listening endpoints", list(c, "listen", "endpoints that clients listen on", (*iwarp.Admin).Listens,
			[]string{"address", "transport", "device", "client", "uid", "pid", "backlog", "waiting", "accepted", "rejected", "dropped"},
			func(l *ctrlpb.ListenInfo) []any {
				return []any{l.Address, cmp.Or(l.Transport, "-"), cmp.Or(l.Device, "-"), l.Client, owner(l.Uid), l.Pid, l.Backlog, l.Waiting, l.Accepted, l.Rejected, l.Dropped}
			})),
		group("client", "Programs that use the daemon", list(c, "client", "programs that are connected", c.clients,
			[]string{"client", "name", "uid", "pid", "qps", "regions", "memory", "listens", "connected"},
			func(l *ctrlpb.ClientInfo) []any {
				return []any{l.Client, l.Name, owner(l.Uid), l.Pid, l.Qps, l.Mrs, bytesText(l.Registered), l.Listens, (time.Duration(l.ConnectedMs) * time.Millisecond).Round(time.Second)}
			})),
		group("quota", "What users hold, and their limits", c.listQuotas()),
		c.stats(), c.top(), c.capture(), c.disconnect(),
	}
}

var mrHeader = []string{"client", "uid", "region", "pd", "base", "length", "memory", "access"}

func mrRow(m *ctrlpb.MRInfo) []any {
	memory := "mapped"
	if m.Far {
		memory = "far"
	}
	base := fmt.Sprintf("%#x", m.Base)
	return []any{m.Client, owner(m.Uid), m.Mr, m.Pd, base, bytesText(m.Length), memory, access(m.Access)}
}

// listQuotas returns the command "iwarpctl quota list", which prints a line for each quota of each
// user.
func (c *command) listQuotas() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List what all programs of each user hold together, and the limits", Example: "  iwarpctl quota list\n  iwarpctl quota list --json",
		Args: usageArgs(cobra.NoArgs),
		RunE: query(c, (*iwarp.Admin).Quotas, func(all []*ctrlpb.UserQuotas) error {
			if c.json {
				return printPlain(c, all)
			}
			var rows [][]any
			for _, u := range all {
				for _, q := range u.Quotas {
					row := []any{owner(u.Uid), q.Name, q.Used, q.Limit, cmp.Or(q.Key, "-")}
					if q.Bytes {
						row[2], row[3] = bytesText(q.Used), bytesText(q.Limit)
					}
					rows = append(rows, row)
				}
			}
			printTable(c.out, []string{"uid", "quota", "used", "limit", "key"}, rows)
			return nil
		}),
	}
}

// group returns a command that only has subcommands.
func group(name, short string, subs ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{
		Use: name, Short: short, Example: "  iwarpctl " + name + " list",
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{fmt.Errorf("%s: missing command; see iwarpctl %s --help", name, name)}
		},
	}
	g.AddCommand(subs...)
	return g
}

// list returns the command "iwarpctl WHAT list".
func list[T proto.Message](c *command, what, short string, ask func(*iwarp.Admin, context.Context) ([]T, error), header []string, row func(T) []any) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List " + short, Example: "  iwarpctl " + what + " list\n  iwarpctl " + what + " list --json",
		Args: usageArgs(cobra.NoArgs),
		RunE: query(c, ask, func(all []T) error {
			if c.json {
				return printPlain(c, all)
			}
			rows := make([][]any, len(all))
			for i, v := range all {
				rows[i] = row(v)
			}
			printTable(c.out, header, rows)
			return nil
		}),
	}
}

// silent prints a warning to standard error for each worker that did not answer about the queue
// pairs l. In JSON each queue pair has this information.
func (c *command) silent(l []*ctrlpb.QPInfo) {
	warned := make(map[uint32]bool)
	for _, q := range l {
		if q.Silent && !warned[q.Worker] && !c.json {
			warned[q.Worker] = true
			fmt.Fprintf(c.err, "worker %d does not answer: its connections are shown without counters\n", q.Worker)
		}
	}
}

func (c *command) listQPs() *cobra.Command {
	ask := func(a *iwarp.Admin, ctx context.Context) ([]*ctrlpb.QPInfo, error) {
		all, err := a.QPs(ctx)
		c.silent(all)
		return all, err
	}
	return list(c, "qp", "queue pairs and their connections", ask, qpHeader, qpRow)
}

var qpHeader = []string{"qp", "state", "local", "remote", "mpa", "reads", "rtt", "client", "pid", "worker"}

func qpRow(q *ctrlpb.QPInfo) []any {
	n := q.Negotiated
	reads := fmt.Sprintf("%d/%d", n.GetIrd(), n.GetOrd())
	return []any{q.Qp, q.State, q.Local, q.Remote, negotiated(n, ","), reads, rtt(q), q.Client, q.Pid, q.Worker}
}

// rtt returns the smoothed round-trip time of the connection of q, or "-".
func rtt(q *ctrlpb.QPInfo) string {
	v := llp(q, "srtt_ns", "path_srtt_ns")
	if v == 0 {
		return "-"
	}
	return time.Duration(v).Round(time.Microsecond).String()
}

// negotiated returns the MPA revision and what MPA has negotiated, separated by sep.
func negotiated(n *ctrlpb.Negotiated, sep string) string {
	if n == nil {
		return "-"
	}
	out := fmt.Sprint(n.Revision)
	for _, f := range []struct {
		on   bool
		name string
	}{{n.Crc, "crc"}, {n.SendMarkers, "markers-out"}, {n.RecvMarkers, "markers-in"}, {n.P2P, "p2p"}} {
		if f.on {
			out += sep + f.name
		}
	}
	return out
}

func (c *command) showQP() *cobra.Command {
	return &cobra.Command{
		Use: "show NUMBER", Short: "Show one queue pair with the counters of its connection", Example: "  iwarpctl qp show 3",
		Args: usageArgs(cobra.ExactArgs(1)), ValidArgsFunction: c.completeQP,
		RunE: func(cmd *cobra.Command, args []string) error {
			num, err := qpNumber(args[0])
			if err != nil {
				return err
			}
			ask := func(a *iwarp.Admin, ctx context.Context) (*ctrlpb.QPInfo, error) { return a.QP(ctx, num) }
			return query(c, ask, func(q *ctrlpb.QPInfo) error {
				if c.json {
					return c.print(plain(q))
				}
				llp, state, ulp := "tcp", q.TcpState, "mpa"
				if q.SctpState != "" {
					llp, state, ulp = "sctp", q.SctpState, "ddp"
				}
				role := ""
				switch {
				case q.GetNegotiated().GetInitiator():
					role = ", initiator"
				case q.Negotiated != nil:
					role = ", responder"
				}
				how := negotiated(q.Negotiated, ", ")
				if q.Negotiated != nil {
					how = "rev " + how
				}
				fmt.Fprintf(c.out, "qp %d   %s\nlocal  %s\nremote %s\n%-6s %s\n%-6s %s%s, ird %d, ord %d\n",
					q.Qp, q.State, q.Local, q.Remote, llp, state, ulp, how, role, q.GetNegotiated().GetIrd(), q.GetNegotiated().GetOrd())
				fmt.Fprintf(c.out, "queues send %d, receive %d, %s, %s inline, worker %d\nuses   pd %d, cq %d and %d, srq %d\nowner  client %d, process %d, uid %s\n",
					q.SqDepth, q.RqDepth, printable.Count(q.MaxSge, "SGE"), printable.Count(q.MaxInline, "byte"), q.Worker, q.Pd, q.SendCq, q.RecvCq, q.Srq, q.Client, q.Pid, owner(q.Uid))
				c.silent([]*ctrlpb.QPInfo{q})
				c.counters("tcp.", q.Tcp)
				c.counters("sctp.", q.Sctp)
				c.counters("rdmap.", q.Rdmap)
				c.counters("verbs.", q.Verbs)
				return nil
			})(cmd, nil)
		},
	}
}

func qpNumber(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 0 {
		return 0, usageError{fmt.Errorf("queue pair %q: must be a number of iwarpctl qp list", s)}
	}
	return uint32(n), nil
}

func (c *command) counters(prefix string, cs []*ctrlpb.Counter) {
	for _, k := range cs {
		if name, ok := strings.CutSuffix(k.Name, "_ns"); ok {
			fmt.Fprintf(c.out, "%-34s %12v\n", prefix+name, time.Duration(k.Value))
			continue
		}
		fmt.Fprintf(c.out, "%-34s %12d\n", prefix+k.Name, k.Value)
	}
}

// access formats access rights: r for reading, w for writing, a for atomics.
func access(bits uint32) string {
	has := func(f iwarp.Access, name string) string {
		if iwarp.Access(bits)&f == 0 {
			return ""
		}
		return name
	}
	out := "local-r" + has(iwarp.AccessLocalWrite, "w")
	if remote := has(iwarp.AccessRemoteRead, "r") + has(iwarp.AccessRemoteWrite, "w") + has(iwarp.AccessRemoteAtomic, "a"); remote != "" {
		out += ",remote-" + remote
	}
	return out + has(iwarp.AccessMWBind, ",window") + has(iwarp.AccessZeroBased, ",zero-based")
}

// slotUID is the uid that the daemon uses for slot 0, and otherRoot that for root of containers.
const slotUID, otherRoot = 1 << 31, 1<<31 + 4096

// owner formats the user of an object: a uid, the slot of a container, or root of a container.
func owner(uid uint32) string {
	switch {
	case uid == otherRoot:
		return "root of a container"
	case uid >= slotUID:
		return "slot " + strconv.FormatUint(uint64(uid-slotUID), 10)
	}
	return strconv.FormatUint(uint64(uid), 10)
}
