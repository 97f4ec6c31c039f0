// Package embed runs iwarpd inside the application: an engine and its control
// plane in the same process, reached by the same API as the daemon's. It
// serves tests and demonstrations without privileges (Pair), machines where no
// daemon can run, and applications that want the lowest latency and give the
// engine their own processor time (InlineProgress).
package embed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/tcp"
)

// Config configures a Node. Link, Interface or Sockets must be set.
type Config struct {
	// Sockets makes the Node use sockets of the kernel's TCP for connections, which takes no
	// privileges. Addrs may restrict the addresses that Node.Addr and clients see. With Link or
	// Interface too, only connections and listeners with iwarp.Socket use them.
	Sockets bool

	// Link carries the frames; Node.Close closes it. Addrs are the addresses of its end, and
	// Resolver finds the next hop of a destination.
	Link     link.Link
	Addrs    []netip.Addr
	Resolver dataplane.Resolver

	// Interface is a network interface of the host, in the network namespace of the process.
	// The Node uses the kernel's addresses, routes and neighbours, and sends frames as LinkKind
	// says. It needs the privileges of the daemon (CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF).
	Interface string
	LinkKind  ifqueue.Kind
	XDPMode   bpf.Mode // of ifqueue.XDP

	// InlineProgress makes CQ.Poll and Wait drive the engine from the application's goroutine.
	// The engine's own goroutine runs only while the application does not poll.
	InlineProgress bool
	Poll           dataplane.PollPolicy
	Spin           time.Duration // default 50 µs
	TCP            *tcp.Config   // nil: defaults
	Ctrl           ctrl.Config   // limits and MPA settings; Socket, if set, serves other processes too
	Logger         *zap.Logger   // nil: none

	shared *progress // drives several engines, or nil
}

// socketMemory is the memory for bytes that the kernel has not yet accepted, in bytes.
const socketMemory = 16 << 20

// Node is an iwarpd inside the process.
type Node struct {
	engine    *dataplane.Engine
	server    *ctrl.Server
	progress  *progress
	device    *iwarp.Device
	addrs     []netip.Addr
	fragments map[string]dataplane.FragmentSource
	closers   []func() error // in reverse order
	cancel    context.CancelFunc
	once      sync.Once
}

// Open starts a Node.
func Open(cfg Config) (n *Node, err error) {
	n = &Node{cancel: func() {}}
	defer func() {
		if err != nil {
			n.Close()
			n = nil
		}
	}()
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	opts := ctrl.Options{Logger: cfg.Logger, Resolver: cfg.Resolver}
	queues, err := n.openLinks(&cfg, &opts)
	if err != nil {
		return n, err
	}
	if n.server, err = ctrl.New(cfg.Ctrl, opts); err != nil {
		return n, err
	}
	n.engine, err = dataplane.New(dataplane.Config{
		Fragments: n.fragments, OnEvent: n.server.OnEvent, Poll: cfg.Poll, Spin: cfg.Spin, TCP: cfg.TCP, Inline: cfg.InlineProgress,
	}, queues, opts.Resolver)
	if err != nil {
		return n, fmt.Errorf("embed: %w", err)
	}
	n.server.Bind(n.engine)
	n.engine.Start()
	if cfg.InlineProgress {
		if n.progress = cfg.shared; n.progress == nil {
			n.progress = &progress{}
		}
		n.progress.add(n.engine)
	}
	if cfg.Ctrl.Socket != "" {
		if err = n.listen(cfg.Logger); err != nil {
			return n, err
		}
	}
	n.device, err = n.NewDevice(context.Background())
	return n, err
}

// openLinks opens what carries the Node's connections, and completes opts by it.
func (n *Node) openLinks(cfg *Config, opts *ctrl.Options) (queues []dataplane.Queue, err error) {
	switch {
	case cfg.Link != nil:
		n.closers = append(n.closers, cfg.Link.Close)
		if cfg.Resolver == nil {
			return nil, errors.New("embed: a link needs a resolver")
		}
		n.addrs = cfg.Addrs
		queues = []dataplane.Queue{{Link: cfg.Link, CPU: -1}}
		opts.Devices = []ctrl.Device{{MTU: cfg.Link.MTU(), Addrs: n.addresses}}
		opts.NoGuard = true
	case cfg.Interface != "":
		if queues, err = n.openInterface(cfg, opts); err != nil {
			return nil, err
		}
	case cfg.Sockets:
		if n.addrs = cfg.Addrs; n.addrs == nil {
			n.addrs = hostnet.Sockets{}.Addrs()
		}
		opts.Resolver = hostnet.Sockets{}
	default:
		return nil, errors.New("embed: neither a link, nor an interface, nor sockets")
	}
	if cfg.Sockets {
		sockets, err := dataplane.NewSockets(socketMemory)
		if err != nil {
			return nil, fmt.Errorf("embed: %w", err)
		}
		n.closers = append(n.closers, sockets.Close)
		queues = append(queues, dataplane.Queue{Link: sockets, Device: hostnet.AnyInterface, CPU: -1})
		opts.Devices = append(opts.Devices, ctrl.Device{Name: hostnet.AnyInterface, Sockets: true, MTU: sockets.MTU(), Addrs: n.addresses})
	}
	return queues, nil
}

// listen serves other processes by the socket of the configuration.
func (n *Node) listen(log *zap.Logger) error {
	if err := n.server.Listen(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	go func() {
		if err := n.server.Serve(ctx); err != nil {
			log.Error("stopped serving the socket", zap.Error(err))
		}
	}()
	return nil
}

func (n *Node) addresses() []netip.Addr { return n.addrs }

// Device returns the Node's client.
func (n *Node) Device() *iwarp.Device { return n.device }

// NewDevice returns another client of the Node. Node.Close ends it.
func (n *Node) NewDevice(ctx context.Context) (*iwarp.Device, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("embed: %w", shm.Limit(err))
	}
	if err := n.server.ServeConn(fds[0]); err != nil {
		unix.Close(fds[1])
		return nil, fmt.Errorf("embed: %w", shm.Limit(err))
	}
	if n.progress == nil {
		return iwarp.OpenFD(ctx, fds[1], nil)
	}
	return iwarp.OpenFD(ctx, fds[1], n.progress)
}

// Addr returns the first address of the Node.
func (n *Node) Addr() netip.Addr {
	if len(n.addrs) == 0 {
		return netip.Addr{}
	}
	return n.addrs[0]
}

// Server returns the control plane.
func (n *Node) Server() *ctrl.Server { return n.server }

// Engine returns the engine.
func (n *Node) Engine() *dataplane.Engine { return n.engine }

// Close ends the Node and all its clients.
func (n *Node) Close() error {
	var err error
	n.once.Do(func() {
		if n.device != nil {
			n.device.Close()
		}
		n.cancel()
		if n.server != nil && n.engine != nil {
			n.server.Close()
		}
		if n.progress != nil {
			n.progress.remove(n.engine)
		}
		if n.engine != nil {
			n.engine.Stop()
		}
		for i := len(n.closers) - 1; i >= 0; i-- {
			err = errors.Join(err, n.closers[i]())
		}
	})
	return err
}

// PairConfig configures the two Nodes of Pair.
type PairConfig struct {
	Sockets        bool // use sockets on 127.0.0.1 and 127.0.0.2 instead of a wire
	Both           bool // use sockets in addition to a wire; the host must have PairAddrs
	Pipe           link.PipeConfig
	InlineProgress bool // polling either side drives both
	Poll           dataplane.PollPolicy
	Spin           time.Duration
	TCP            *tcp.Config
	CtrlA, CtrlB   ctrl.Config
	Logger         *zap.Logger
}

// PairAddrs returns the addresses of Pair's Nodes on a wire.
func PairAddrs() []netip.Addr { return slices.Concat(pairAddrs(0), pairAddrs(1)) }

func pairAddrs(i int) []netip.Addr {
	return []netip.Addr{
		netip.AddrFrom4([4]byte{10, 99, 0, byte(i + 1)}),
		netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x99, 15: byte(i + 1)}),
	}
}

// Pair starts two Nodes, 10.99.0.1 and 10.99.0.2 (also fd99::1 and fd99::2), connected by a
// wire within the process. It takes no privileges.
func Pair(cfg PairConfig) (a, b *Node, err error) {
	var shared *progress
	if cfg.InlineProgress {
		shared = &progress{}
	}
	var nodes [2]Config
	for i, cc := range []ctrl.Config{cfg.CtrlA, cfg.CtrlB} {
		nodes[i] = Config{
			Sockets: cfg.Sockets || cfg.Both, Addrs: pairAddrs(i), InlineProgress: cfg.InlineProgress, Poll: cfg.Poll, Spin: cfg.Spin,
			TCP: cfg.TCP, Ctrl: cc, Logger: cfg.Logger, shared: shared,
		}
		if cfg.Sockets {
			nodes[i].Addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 1)})}
		}
	}
	if !cfg.Sockets {
		la, lb, err := link.NewPipe(cfg.Pipe)
		if err != nil {
			return nil, nil, fmt.Errorf("embed: %w", err)
		}
		macs := [2][6]byte{{2, 0, 0, 0, 0x99, 1}, {2, 0, 0, 0, 0x99, 2}}
		for i, l := range []link.Link{la, lb} {
			nodes[i].Link = l
			nodes[i].Resolver = &hostnet.Static{SrcMAC: macs[i], DstMAC: macs[1-i], MTU: l.MTU(), Addrs: nodes[i].Addrs}
		}
	}
	if a, err = Open(nodes[0]); err != nil {
		if l := nodes[1].Link; l != nil {
			l.Close()
		}
		return nil, nil, err
	}
	if b, err = Open(nodes[1]); err != nil {
		a.Close()
		return nil, nil, err
	}
	return a, b, nil
}
