package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// transportValue is the flag --transport: TCP, of iwarpd or of the kernel, or SCTP.
type transportValue struct {
	name string
	kind iwarp.Transport
	udp  bool
}

var transports = []transportValue{
	{"tcp", iwarp.TCP, false},
	{"sctp", iwarp.SCTP, false},
	{"sctp-udp", iwarp.SCTP, true},
	{"sctp-draft", iwarp.SCTPDraft, false},
	{"socket", iwarp.Socket, false},
}

func transportNames() (names []string) {
	for _, t := range transports {
		names = append(names, t.name)
	}
	return names
}

func (v *transportValue) Set(s string) error {
	for _, t := range transports {
		if t.name == s {
			*v = t
			return nil
		}
	}
	return fmt.Errorf("%q: must be one of %s", s, strings.Join(transportNames(), ", "))
}

func (v *transportValue) String() string { return v.name }
func (v *transportValue) Type() string   { return "transport" }

// addTransport adds the flag to cmd.
func (c *command) addTransport(cmd *cobra.Command) *cobra.Command {
	c.transport.name = transports[0].name
	cmd.Flags().Var(&c.transport, "transport", "what carries DDP: "+strings.Join(transportNames(), ", ")+" (the kernel's TCP, of a daemon with kernel sockets); over SCTP both sides say the same")
	if cmd.Name() != "serve" { // to a listener it means nothing
		cmd.Flags().BoolVar(&c.share, "shared-association", false, "client: over SCTP, share one association among all connections of this program to the same port")
	}
	cmd.Flags().IntVar(&c.ip.DSCP, "dscp", 0, "DSCP of the packets sent, 1 to 63; 0: the daemon's default, -1: 0")
	cmd.Flags().IntVar(&c.ip.TTL, "ttl", 0, "TTL or hop limit of the packets sent, 1 to 255; 0: the daemon's default")
	cmd.Flags().IntVar(&c.ip.Priority, "priority", 0, "priority in VLAN tags of the packets sent, 1 to 7; 0: the daemon's default, -1: 0")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { return c.checkTransport(cmd.Name()) }
	completes(cmd, "transport", transportNames()...)
	return cmd
}

// checkSide returns an error if a flag is given that only the other side uses, as its help says.
func checkSide(cmd *cobra.Command, server bool) (err error) {
	other := "server"
	if server {
		other = "client"
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if strings.HasPrefix(f.Usage, other+": ") {
			err = usageError{fmt.Errorf("%s: --%s is a flag of the %s: leave it out here", cmd.Name(), f.Name, other)}
		}
	})
	return err
}

// checkTransport checks the flags of addTransport.
func (c *command) checkTransport(name string) error {
	if c.share && (c.transport.kind == iwarp.TCP || c.transport.kind == iwarp.Socket) {
		return usageError{fmt.Errorf("%s: --shared-association: TCP has no associations: add --transport sctp", name)}
	}
	for _, f := range []struct {
		name               string
		value, least, most int
		zero               string
	}{
		{"dscp", c.ip.DSCP, -1, 63, ", or -1 for 0"},
		{"ttl", c.ip.TTL, 0, 255, ""},
		{"priority", c.ip.Priority, -1, 7, ", or -1 for 0"},
	} {
		if f.value < f.least || f.value > f.most {
			return usageError{fmt.Errorf("%s: --%s %d: must be 1 to %d, or 0 for the daemon's default%s", name, f.name, f.value, f.most, f.zero)}
		}
	}
	return nil
}

// over sets the transport in cfg.
func (c *command) over(cfg *iwarp.Config) *iwarp.Config {
	cfg.Startup.Transport, cfg.Startup.UDP = c.transport.kind, c.transport.udp
	cfg.Startup.DSCP, cfg.Startup.TTL, cfg.Startup.Priority = c.ip.DSCP, c.ip.TTL, c.ip.Priority
	cfg.Startup.SharedAssociation = c.share
	return cfg
}
