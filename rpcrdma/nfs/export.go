package nfs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// Export says how a Server is reached.
type Export struct {
	Server *Server
	// Open connects to the daemon. It is called again when the daemon was gone.
	Open   func(context.Context) (*iwarp.Device, error)
	Listen string         // "10.0.0.1:20049"
	Config rpcrdma.Config // DefaultConfig(true), with changes
	// MountPort is where MOUNT is served over TCP, and PortmapPort where a portmapper
	// is, over TCP and UDP, at Listen's address; 0: not at all. Without a portmapper
	// clients must be told the port of MOUNT.
	MountPort, PortmapPort int
	// TCPPort is where NFS itself is served over TCP as well, at the same address; 0: not at all.
	TCPPort int
	Retry   time.Duration // between attempts to reach a daemon; default 500 ms
	// Tell, if set, hears of what happens.
	Tell func(format string, args ...any)
}

// PortError is a port of an Export's that cannot be served, such as one that another
// Export has.
type PortError struct {
	Service string // "MOUNT" or "NFS over TCP"
	Err     error
}

// Error implements error.
func (e *PortError) Error() string { return fmt.Sprintf("nfs: %s: %v", e.Service, e.Err) }

// Unwrap returns the cause.
func (e *PortError) Unwrap() error { return e.Err }

// Run serves until ctx is done. A daemon that stops is waited for: handles and
// the cache of replies stay, so clients go on where they were.
func (x *Export) Run(ctx context.Context) error {
	if x.Tell == nil {
		x.Tell = func(string, ...any) {}
	}
	if x.Retry == 0 {
		x.Retry = 500 * time.Millisecond
	}
	host, port, err := net.SplitHostPort(x.Listen)
	if err != nil {
		return fmt.Errorf("nfs: listen on %s: %w", x.Listen, err)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("nfs: listen on %s: %w", x.Listen, err)
	}
	for _, p := range []int{x.MountPort, x.PortmapPort, x.TCPPort} {
		if p < 0 || p > 65535 {
			return fmt.Errorf("nfs: port %d: must be 1 to 65535, or 0 for none", p)
		}
	}
	server := &rpc.Server{}
	server.Register(ProgramNFS, x.Server.Program())
	mountd := x.Server.MountProgram()
	server.Register(ProgramMount, mountd)
	x.Config.Server = server
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if x.MountPort != 0 {
		side := &rpc.Server{MaxRecord: 1 << 16}
		side.Register(ProgramMount, mountd)
		if err := begin(ctx, cancel, bound(host, x.MountPort), listenTCP, side.ServeTCP); err != nil {
			return &PortError{"MOUNT", err}
		}
	}
	if x.TCPPort != 0 {
		if err := begin(ctx, cancel, bound(host, x.TCPPort), listenTCP, server.ServeTCP); err != nil {
			return &PortError{"NFS over TCP", err}
		}
	}
	if x.PortmapPort != 0 {
		side := &rpc.Server{MaxRecord: 1 << 16}
		side.Register(ProgramPortmap, Portmap(x.mappings()))
		addr := bound(host, x.PortmapPort) // over UDP: the tools of nfs-common and rpcbind ask so
		if err := begin(ctx, cancel, addr, listenTCP, side.ServeTCP); err != nil {
			x.Tell("no portmapper: %v", err)
		} else if err := begin(ctx, cancel, addr, rpc.ListenUDP, side.ServeUDP); err != nil {
			x.Tell("no portmapper over UDP: %v", err)
		}
	}
	up := false
	for {
		err := x.serve(ctx, func() { up = true })
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !up { // it never worked: the reason will not go away
			return err
		}
		x.Tell("%v; trying again", err)
		select {
		case <-time.After(x.Retry):
		case <-ctx.Done():
		}
	}
}

// mappings are what the portmapper tells.
func (x *Export) mappings() []Mapping {
	portmap := Mapping{Prog: ProgramPortmap, Vers: 2, Port: uint32(x.PortmapPort)}
	l := []Mapping{portmap, portmap}
	l[1].UDP = true
	if x.MountPort != 0 {
		for _, v := range []uint32{1, 3} {
			l = append(l, Mapping{Prog: ProgramMount, Vers: v, Port: uint32(x.MountPort)})
		}
	}
	if x.TCPPort != 0 {
		l = append(l, Mapping{Prog: ProgramNFS, Vers: 3, Port: uint32(x.TCPPort)})
	}
	return l
}

// bound is the address of host and port to bind a socket to.
func bound(host string, port int) string {
	if a, err := netip.ParseAddr(host); err == nil && a.IsUnspecified() {
		host = ""
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}

// listenTCP is what rpc.ListenUDP is for TCP.
func listenTCP(ctx context.Context, addr string) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp", addr)
}

// begin listens at addr, and serves there until ctx is done. It cancels where that
// fails.
func begin[L any](ctx context.Context, cancel context.CancelCauseFunc, addr string, listen func(context.Context, string) (L, error), serve func(context.Context, L) error) error {
	l, err := listen(ctx, addr)
	if err != nil {
		return err
	}
	go func() {
		if err := serve(ctx, l); err != nil {
			cancel(fmt.Errorf("nfs: %w", err))
		}
	}()
	return nil
}

// serve serves over one connection to the daemon.
func (x *Export) serve(ctx context.Context, up func()) error {
	dev, err := x.Open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	e, err := rpcrdma.New(ctx, dev, x.Config)
	if err != nil {
		return err
	}
	defer e.Close()
	l, err := e.Listen(ctx, x.Listen)
	if err != nil {
		return err
	}
	up()
	x.Tell("serving %s at %s", x.Server.cfg.Dir, l.Addr())
	defer l.Close()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-dev.Done():
		return errors.Join(errors.New("nfs: the daemon is gone"), dev.Err())
	case <-l.Done():
		return l.Err()
	}
}
