package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// finding is the outcome of one check; its JSON form is that of doctor --json.
type finding struct {
	Check string `json:"check"`
	State string `json:"state"` // ok, warn or fail
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"`
}

func (c *command) doctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor [PEER[:PORT]]",
		Short: "Check the daemon, and whether a peer can be reached by RDMA",
		Long: "doctor checks that the daemon answers and receives frames. With a peer it\n" +
			fmt.Sprintf("connects to PORT (default %d, that of ping), and reports which step fails:\n", rping.DefaultPort) +
			"route and neighbour, TCP, MPA, a small transfer, or one of packets as large as\n" +
			"the MTU; if only that one fails, it searches for an MTU that works. For the\n" +
			"transfers the peer must run \"iwarpctl ping -s -P\", or rping -s -P -S 65535.\n" +
			"It changes nothing. \"iwarpd doctor\" checks the host and its interface.",
		Example: "  iwarpctl doctor\n  iwarpctl doctor 10.0.0.2\n  iwarpctl doctor 10.0.0.2:7176 --json",
		Args:    usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			dev, err := c.open(cmd.Context())
			if err != nil {
				return err
			}
			defer dev.Close()
			s, err := dev.Admin().Status(cmd.Context())
			if err != nil {
				return err
			}
			findings := interfaces(dev.Attr().Server, s)
			if len(args) == 1 {
				more, err := examine(cmd.Context(), dev, args[0])
				if err != nil {
					return err
				}
				findings = append(findings, more...)
			}
			return c.findings(findings)
		},
	}
}

// interfaces returns a finding for each interface of a daemon.
func interfaces(server string, s *ctrlpb.StatusReply) (l []finding) {
	for _, d := range s.GetDevices() {
		f := finding{"daemon", "ok", fmt.Sprintf("%s serves %s, MTU %d", server, d.GetInterface(), d.GetMtu()), ""}
		switch {
		case d.GetDown() != "" && d.GetDown() == s.Detached:
			f = finding{"daemon", "fail", d.GetDown(), "restart iwarpd"}
		case d.GetDown() != "":
			f = finding{"daemon", "fail", d.GetDown(), "make an interface of that name again, and set it up: ip link"}
		case d.GetLink() == "down":
			f.State, f.Text, f.Fix = "warn", f.Text+": its link is down, so that no frames arrive", "ip link set dev "+d.GetInterface()+" up, or look at the cable"
		}
		l = append(l, f)
	}
	return l
}

// findings prints the findings; it returns an error if something fails.
func (c *command) findings(l []finding) error {
	var failed error
	for _, f := range l {
		if f.State == "fail" {
			failed = fmt.Errorf("doctor: %s: %s", f.Check, strings.TrimPrefix(f.Text, f.Check+": "))
			if f.Check != "daemon" && f.Check != "connection" { // these are about this host
				failed = peerError{failed}
			}
		}
		if c.json {
			continue
		}
		fmt.Fprintf(c.out, "%-4s  %-13s  %s\n", f.State, f.Check, f.Text)
		if f.Fix != "" {
			fmt.Fprintf(c.out, "%4s  %13s  fix: %s\n", "", "", f.Fix)
		}
	}
	if c.json {
		return errors.Join(c.print(l), failed)
	}
	return failed
}

// doctorWait bounds the first transfer with a peer.
const doctorWait = 15 * time.Second

// trialWait bounds a transfer that tries a packet size, if another transfer took that long. TCP's detection of
// black holes makes packets smaller after 1.4 s without an answer, so a longer trial would pass on any path.
func trialWait(took time.Duration) time.Duration { return time.Second + 2*took }

// corrupted is the fix for data that arrives changed.
const corrupted = "the data changed on its way: check memory and network cards, and use crc: required"

// smallPing is a transfer that fits any packet.
const smallPing = 64

// examine checks the way to a peer, step by step.
func examine(ctx context.Context, dev *iwarp.Device, peer string) ([]finding, error) {
	addr, err := resolve(ctx, peer, rping.DefaultPort)
	if err != nil {
		return nil, err
	}
	var mtu int
	began := time.Now()
	err = roundTrip(ctx, dev, addr, smallPing, doctorWait, func(time.Duration) { mtu = mtuInUse(ctx, dev) })
	took := time.Since(began)
	if ctx.Err() != nil || errors.Is(err, iwarp.ErrDaemonGone) { // nothing was learned about the peer
		return nil, cmp.Or(err, ctx.Err())
	}
	if wrongArgument(refusal(err)) { // nor is there a peer with such an address
		return nil, peerFailed("doctor", addr, err)
	}
	l, connected := judge(addr, err)
	if !connected || err != nil {
		return l, nil
	}
	l = append(l, finding{"transfer", "ok", fmt.Sprintf("%d bytes there and back, compared; with the connection %v", smallPing, took.Round(10*time.Microsecond)), ""})
	pass, err := ascend(sizes(mtu, addr), func(t trial) error {
		began, wait := time.Now(), trialWait(took)
		err := roundTrip(ctx, dev, addr, t.size, wait, nil)
		if errors.Is(err, context.DeadlineExceeded) {
			return silence{t.mtu, wait.Round(100 * time.Millisecond)}
		}
		took = min(took, time.Since(began))
		return err
	})
	return append(l, largePackets(err, mtu, pass)), ctx.Err()
}

// A silence means that packets of mtu bytes got no answer.
type silence struct {
	mtu  int
	wait time.Duration
}

func (e silence) Error() string {
	return fmt.Sprintf("packets of %d bytes get no answer within %v", e.mtu, e.wait)
}

// largePackets is the finding about transfers in packets of up to mtu bytes, of which one ended with err. Packets of pass
// bytes arrive; 0: none that was tried does.
func largePackets(err error, mtu, pass int) finding {
	switch {
	case err == nil:
		return finding{"large packets", "ok", fmt.Sprintf("%d bytes there and back, compared, in packets of up to %d bytes", rping.MaxSize, mtu), ""}
	case errors.Is(err, rping.ErrMismatch):
		return finding{"large packets", "fail", reason(err), corrupted}
	case !errors.As(err, new(silence)): // such as the end of a server that serves one client only
		return finding{"large packets", "warn", "not tried: " + reason(err), "run a server there that takes several clients and any size: iwarpctl ping -s -P, or rping -s -P -S 65535"}
	}
	fix := fmt.Sprintf("packets of the MTU, %d bytes, do not pass: set the same MTU on both sides and on every switch between", mtu)
	if pass > 0 {
		fix += fmt.Sprintf("; packets of %d bytes pass: with the key mtu: %d on both sides it works meanwhile", pass, pass)
	} else {
		fix += fmt.Sprintf(" (ping -M do -s %d), or a smaller one with the key mtu", mtu-28)
	}
	return finding{"large packets", "fail", reason(err), fix}
}

// commonMTUs are the MTUs that doctor tries: of jumbo frames, Ethernet, PPPoE, tunnels, and the
// minimum of IPv6.
var commonMTUs = []int{1280, 1400, 1420, 1450, 1476, 1492, 1500, 2000, 3498, 4000, 8000, 8950, 9000}

// packetOverhead is the maximum length of a packet in addition to the data of a Write of one
// segment: the headers of IPv6, TCP with timestamps, MPA and DDP, up to 3 bytes of padding, and
// the CRC.
const packetOverhead = 40 + 32 + 2 + 14 + 3 + 4

// A trial is a transfer of size bytes, which takes packets of up to mtu bytes.
type trial struct{ mtu, size int }

// sizes returns the transfers to try with the peer at addr: one that fills a packet for each
// common MTU below mtu, and one of many packets of mtu bytes.
func sizes(mtu int, addr string) (l []trial) {
	over := packetOverhead
	if a, err := netip.ParseAddrPort(addr); err == nil && a.Addr().Is4() {
		over -= 20
	}
	for _, m := range commonMTUs {
		if m < mtu {
			l = append(l, trial{m, m - over})
		}
	}
	return append(l, trial{mtu, rping.MaxSize})
}

// ascend tries l in order, up to the first failure: a server that serves one client at a time
// hangs after it. It returns the MTU of the last success, or 0.
func ascend(l []trial, try func(trial) error) (pass int, err error) {
	for _, t := range l {
		if err := try(t); err != nil {
			return pass, err
		}
		pass = t.mtu
	}
	return pass, nil
}

// roundTrip makes a connection, and one round of ping over it, within wait. It calls round, if that is not nil, before
// the connection ends.
func roundTrip(ctx context.Context, dev *iwarp.Device, addr string, size int,
	wait time.Duration, round func(took time.Duration)) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	o := rping.Options{Count: 1, Validate: true, Round: round}
	_, err := rping.Ping(ctx, dev, addr, rping.Config(), size, o)
	return err
}

// mtuInUse returns the MTU of the interface that dev's only connection uses, which the route to the peer determines.
func mtuInUse(ctx context.Context, dev *iwarp.Device) int {
	in := dev.Attr()
	qps, _ := dev.Admin().QPs(ctx) // after a failure it stays the first interface
	for _, q := range qps {
		for _, a := range dev.Interfaces() {
			if q.GetClient() == in.Client && q.GetDevice() == a.Interface {
				in = a
			}
		}
	}
	return in.MTU
}

// judge derives findings about each step from the result of a first connection with a small
// transfer, and reports whether there was a connection.
func judge(addr string, err error) (l []finding, connected bool) {
	route, mpa := finding{"route", "ok", addr + " answers", ""}, finding{"mpa", "ok", "the peer answers MPA", ""}
	flushed := errors.As(err, new(*iwarp.WCError)) // there was a connection
	switch {
	case err == nil:
		return []finding{route, mpa}, true
	case errors.Is(err, iwarp.ErrUnreachable):
		return []finding{{"route", "fail", reason(err), "check the address, the route (ip route get) and the cable; iwarpd sends only by its own interface"}}, false
	case errors.Is(err, iwarp.ErrRefused) && !flushed:
		return []finding{route, {"tcp", "fail", reason(err), "start a server on that port of the peer: iwarpctl ping -s -P"}}, false
	case errors.Is(err, iwarp.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		return []finding{{"tcp", "fail", reason(err), "a firewall drops it, the peer's server hangs, or the peer does not support MPA on that port"}}, false
	case errors.Is(err, iwarp.ErrRejected):
		return []finding{route, {"mpa", "warn", "the peer's program rejects this connection, so MPA works; the transfers were not tried", "name the port of iwarpctl ping -s"}}, false
	case errors.Is(err, iwarp.ErrProtocol):
		return []finding{route, {"mpa", "fail", reason(err), "what listens on that port does not support MPA: name the port of an RDMA server"}}, false
	case errors.As(err, new(*iwarp.Error)) && !flushed:
		text, fix := reason(err), ""
		if errors.Is(err, iwarp.ErrPermission) || errors.Is(err, iwarp.ErrQuota) { // of which the daemon says what to do
			if i := strings.LastIndex(text, ": "); i >= 0 {
				text, fix = text[:i], text[i+2:]
			}
		}
		return []finding{{"connection", "fail", text, fix}}, false
	case errors.Is(err, rping.ErrMismatch):
		return []finding{route, mpa, {"transfer", "fail", reason(err), corrupted}}, true
	}
	return []finding{route, mpa, {"transfer", "warn", reason(err), "what listens on that port is not a ping server: run iwarpctl ping -s -P there"}}, true
}
