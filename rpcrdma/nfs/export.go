package nfs

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// Export serves a Server at an address.
type Export struct {
	Server *Server
	// Open connects to the daemon. It is called again after the connection to the daemon is
	// lost.
	Open   func(context.Context) (*iwarp.Device, error)
	Listen string         // "10.0.0.1:20049"
	Config rpcrdma.Config // DefaultConfig(true), with changes
	// MountPort is the port for MOUNT over TCP, and PortmapPort that of a portmapper over TCP
	// and UDP, at Listen's address; 0 means none. Without a portmapper clients must be given
	// the port of MOUNT.
	MountPort, PortmapPort int
	// TCPPort is the port for NFS over TCP at the same address; 0 means none.
	TCPPort int
	Retry   time.Duration // between attempts to reach a daemon; default 500 ms
	// Tell, if set, is called with messages for the user.
	Tell func(format string, args ...any)

	refused chan error // a client that was refused, and why
}

// PortError means that a port of an Export cannot be used, for example because another Export uses
// it.
type PortError struct {
	Service string // "MOUNT" or "NFS over TCP"
	Err     error
}

// Error implements error.
func (e *PortError) Error() string { return fmt.Sprintf("nfs: %s: %v", e.Service, e.Err) }

// Unwrap returns the cause.
func (e *PortError) Unwrap() error { return e.Err }

// Run serves until ctx is done. If the daemon stops, Run waits for it; handles and cached replies
// are kept, so that clients can continue.
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
	x.refused = make(chan error, 1)
	x.Config.Refused = func(peer netip.AddrPort, err error) {
		select {
		case x.refused <- fmt.Errorf("%v was refused: %w", peer, err):
		default:
		}
	}
	// A call of NFS has at most one data item, that of WRITE being the longest (RFC 8267 section 4). Less memory
	// is then held for a client that is slow to send it.
	limits := &x.Config.Session.Limits
	limits.ReadChunks, limits.Chunk = 1, MaxIO
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := x.beginOthers(ctx, cancel, host, server, mountd); err != nil {
		return err
	}
	return x.serveAgain(ctx)
}

// beginOthers starts the servers of x, on host, that are reached by TCP or UDP.
func (x *Export) beginOthers(ctx context.Context, cancel context.CancelCauseFunc, host string, server *rpc.Server, mountd rpc.Program) error {
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
		tcp, udp := &rpc.Server{MaxRecord: 1 << 16}, &rpc.Server{}
		tcp.Register(ProgramPortmap, Portmap(x.mappings(), false))
		udp.Register(ProgramPortmap, Portmap(x.mappings(), true))
		addr := bound(host, x.PortmapPort) // over UDP: used by the tools of nfs-common and rpcbind
		if err := begin(ctx, cancel, addr, listenTCP, tcp.ServeTCP); err != nil {
			x.Tell("no portmapper: %v", err)
		} else if err := begin(ctx, cancel, addr, rpc.ListenUDP, udp.ServeUDP); err != nil {
			x.Tell("no portmapper over UDP: %v", err)
		}
	}
	return nil
}

// serveAgain serves until ctx is done, and again whenever the daemon has been lost.
func (x *Export) serveAgain(ctx context.Context) error {
	up, told := false, ""
	for {
		err := x.serve(ctx, func() { up, told = true, "" })
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !up { // it never worked, so retrying is useless
			return err
		}
		if text := err.Error(); text != told {
			x.Tell("%v; trying again", err)
			told = text
		}
		select {
		case <-time.After(x.Retry):
		case <-ctx.Done():
		}
	}
}

// mappings returns the entries of the portmapper.
func (x *Export) mappings() []Mapping {
	var l []Mapping
	for _, v := range []uint32{2, 3, 4} {
		for _, udp := range []bool{false, true} {
			l = append(l, Mapping{Prog: ProgramPortmap, Vers: v, Port: uint32(x.PortmapPort), UDP: udp})
		}
	}
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

// bound returns the address of host and port to bind to.
func bound(host string, port int) string {
	if a, err := netip.ParseAddr(host); err == nil && a.IsUnspecified() {
		host = ""
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}

// listenTCP is the equivalent of rpc.ListenUDP for TCP.
func listenTCP(ctx context.Context, addr string) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp", addr)
}

// begin listens at addr and serves until ctx is done. It cancels if serving fails.
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

// serve serves until the connection to the daemon is lost.
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
	x.Tell("serving %s at %s; %s", x.Server.cfg.Dir, l.Addr(), x.Server.actsAs())
	defer l.Close()
	refused, quiet := x.refused, (<-chan time.Time)(nil)
	for {
		select {
		case err := <-refused:
			x.Tell("%v", err)
			refused, quiet = nil, time.After(refusedPause)
		case <-quiet:
			refused = x.refused
		case <-ctx.Done():
			return ctx.Err()
		case <-dev.Done():
			return dev.Err()
		case <-l.Done():
			return l.Err()
		}
	}
}

// refusedPause is the time between two messages about refused clients, which try again at once.
const refusedPause = 10 * time.Second
