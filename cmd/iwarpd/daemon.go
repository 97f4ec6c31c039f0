package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/ctrl/nftset"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
	"github.com/iwarpd/iwarpd/tcp"
)

// daemon is a running daemon.
type daemon struct {
	s       *settings
	log     *zap.Logger
	level   zap.AtomicLevel // log level
	hangups <-chan os.Signal
	read    func() (*settings, error) // reads the settings again
	hurry   context.Context           // done when the drain is to end early
	nics    []*nic                    // none: the transport is kernel sockets
	changed chan struct{}             // an interface has changed; nil: there are none
	server  *ctrl.Server
	engine  *dataplane.Engine
	// controls is closed when the control plane answers the watchdog; nil if it has.
	controls chan struct{}
	metrics  net.Listener // nil: none are served
	scrapes  func()       // serves metrics

	undo []func() error // cleanup functions, in order of registration
}

// onClose registers a cleanup function.
func (d *daemon) onClose(f func() error) { d.undo = append(d.undo, f) }

// close runs the cleanup functions in reverse order.
func (d *daemon) close() error {
	var errs []error
	for i := len(d.undo) - 1; i >= 0; i-- {
		errs = append(errs, d.undo[i]())
	}
	d.undo = nil
	return errors.Join(errs...)
}

// start sets up everything, including the socket, where clients can wait for run. On error it
// cleans up.
func start(s *settings) (_ *daemon, err error) {
	log, level := newLogger(s)
	d := &daemon{s: s, log: log, level: level}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if err := errors.Join(checkMounts(), checkMemory()); err != nil {
		return nil, err
	}
	lower, err := d.prepare()
	if err != nil {
		return nil, err
	}
	lower.options.Logger = log
	if len(s.AllowSets) > 0 {
		peers, err := nftset.Follow(s.AllowSets, log)
		if errors.Is(err, fs.ErrPermission) {
			return nil, exitErr(exitPermission, "%w", err)
		}
		if err != nil {
			return nil, err
		}
		d.onClose(peers.Close)
		lower.options.Peers = peers
	}
	if d.server, err = ctrl.New(ctrlConfig(s), lower.options); err != nil {
		return nil, err
	}
	undoDir, err := makeSocketDir(s.Socket)
	if err != nil {
		return nil, err
	}
	d.onClose(func() error { undoDir(); return nil })
	if err := d.server.Listen(); err != nil {
		return nil, socketError(err)
	}
	d.onClose(func() error { d.server.Close(); return nil })

	if s.Metrics != "" {
		if d.metrics, err = listenMetrics(s.Metrics); err != nil {
			return nil, metricsError(err)
		}
		d.onClose(func() error { d.metrics.Close(); return nil })
	}

	queues, fragments, err := lower.open()
	if err != nil {
		return nil, err
	}
	addThreads(len(queues))
	tcpConfig := tcpConfig(s)
	d.engine, err = dataplane.New(dataplane.Config{
		Fragments: fragments, OnEvent: d.server.OnEvent,
		Poll: s.Poll, Spin: cmp.Or(s.Spin, -1), TCP: &tcpConfig, SCTP: sctpConfig(s),
	}, queues, lower.options.Resolver)
	if err != nil {
		return nil, err
	}
	d.server.Bind(d.engine)
	return d, nil
}

// addThreads makes Go run n more goroutines at a time than there are CPUs, for n workers, which
// run nearly always. Without that, the control plane would wait for the end of a worker's time slice
// if there are as many workers as CPUs. The environment variable GOMAXPROCS overrides it.
func addThreads(n int) {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
	}
}

func sctpConfig(s *settings) dataplane.SCTPConfig {
	c := dataplane.SCTPConfig{RTOMin: s.SCTPRTOMin, Idle: s.SCTPIdle, PerPeer: s.SCTPPerPeer}
	if c.Idle == 0 {
		c.Idle = -1
	}
	return c
}

// tcpConfig enables keep-alive by default, against RFC 9293 MUST-25. The rule is for applications
// that did not request it, but a client that waits for a message has no other way to detect that
// its peer's host is gone. A dead peer is detected after twice the idle time.
func tcpConfig(s *settings) tcp.Config {
	c := tcp.DefaultConfig()
	c.RcvWindow, c.MaxHeld = s.RcvWindow, 0 // MaxHeld: as many as queue-memory allows
	c.ECN = s.ECN
	c.CongestionControl = s.Congestion
	const probes = 6
	c.KeepAliveIdle = s.KeepAlive
	c.KeepAliveInterval = max(s.KeepAlive/probes, time.Second)
	c.KeepAliveCount = probes
	c.DataTimeout, c.SynTimeout, c.UserTimeout, c.TimeWait = s.TCPR2, s.TCPR2SYN, s.UserTimeout, s.TimeWait
	return c
}

func ctrlConfig(s *settings) ctrl.Config {
	return ctrl.Config{
		TimeWait: s.TimeWait, ReceiveWindow: s.RcvWindow, Detached: s.Detached,
		IP: s.IP, EndDenied: s.EndDenied, Userfaultfd: s.Userfaultfd, File: s.File,
		Socket: s.Socket, Mode: s.SocketMode, Group: s.SocketGroup,
		Allow: s.Allow, Limits: s.Limits, Slots: s.Slots,
		Startup: ctrl.StartupDefaults{
			CRC: s.CRC, CRCPeers: s.CRCPeers, CRCLocal: s.CRCLocal, Markers: s.MPAMarkers, Revision: s.MPARevision, NoP2P: !s.MPAPeer,
			IRD: s.IRD, ORD: s.ORD, MaxIRD: s.MaxIRD, Timeout: s.StartTimeout,
		},
		Version: version,
	}
}

// run serves clients until ctx is done, then drains.
func (d *daemon) run(ctx context.Context) error {
	d.engine.Start()
	d.onClose(func() error { d.engine.Stop(); return nil })
	serving, cancel := context.WithCancel(ctx)
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- d.server.Serve(serving) }()

	d.log.Info("ready", append(d.how(), zap.String("socket", d.s.Socket), zap.Int("queues", d.engine.Workers()), zap.String("version", version))...)
	notify(d.log, sd.SdNotifyReady)
	go watchdog(serving, d.log, d.stuck)
	for _, n := range d.nics {
		go watchLink(serving, d.log, n.name, n.dev, &n.link, &n.mtu, n.renew)
		go n.watchUnseen(serving, time.Tick(lostPeriod))
		for _, l := range d.losses(n) {
			go l.watch(serving, d.log, n.name, time.Tick(lostPeriod))
		}
	}
	if d.metrics != nil {
		h := metricsHandler(collector{d.server.Counters, d.engine.Stats, d.engine.WorkerDevice, d.server.Status})
		d.scrapes = func() { go serveMetrics(serving, d.metrics, h, d.log) }
		d.scrapes()
	}
	var watching sync.WaitGroup
	watching.Go(func() { d.watchNICs(serving) })

	err := d.wait(ctx, served)
	cancel()
	watching.Wait()
	notify(d.log, sd.SdNotifyStopping)
	if err == nil { // asked to stop; otherwise the connections are lost
		d.drain()
	}
	d.stop()
	d.traffic()
	return err
}

// how returns log fields that describe how frames move.
func (d *daemon) how() (fields []zap.Field) {
	if len(d.nics) == 0 {
		return []zap.Field{zap.String("transport", kernelSockets)}
	}
	var names, modes, super []string
	for _, n := range d.nics {
		names, modes = append(names, n.name), append(modes, *n.mode.Load())
		super = append(super, strconv.FormatBool(n.super.Load()))
	}
	list := func(key string, all []string) zap.Field { return zap.String(key, strings.Join(all, "; ")) }
	return []zap.Field{list("interface", names), list("link", modes), list("super-frames", super)}
}

// wait reloads with each hangup, and watches the files of the sockets, until ctx is done or serving has ended.
func (d *daemon) wait(ctx context.Context, served <-chan error) error {
	var lost []string
	tick := time.NewTicker(lostPeriod)
	defer tick.Stop()
	for {
		select {
		case <-d.hangups:
			d.hangup()
		case <-tick.C:
			lost = d.warnLost(lost)
		case err := <-served:
			if err == nil && ctx.Err() == nil {
				err = errors.New("the socket was closed")
			}
			return err
		case <-ctx.Done():
			return <-served
		}
	}
}

// notify sends a state to systemd, if it started the daemon.
func notify(log *zap.Logger, state string) {
	if _, err := sd.SdNotify(false, state); err != nil {
		log.Warn("systemd could not be notified", zap.String("state", state), zap.Error(err))
	}
}

// drain gives the clients drain-timeout to end their connections, or less if a second signal comes.
func (d *daemon) drain() {
	// systemd must wait that long too, regardless of TimeoutStopSec.
	notify(d.log, fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", (d.s.Drain+2*stopTimeout).Microseconds()))
	d.log.Info("draining", zap.Duration("drain-timeout", d.s.Drain))
	began := time.Now()
	ctx, cancel := context.WithTimeout(d.hurry, d.s.Drain)
	defer cancel()
	if left := d.server.Drain(ctx, d.s.Drain); left > 0 && d.s.Drain > 0 {
		d.log.Warn("connections did not end in time", zap.Int("connections", left), zap.Duration("waited", time.Since(began).Round(time.Millisecond)))
	}
}

// stopTimeout bounds how long stop waits.
const stopTimeout = 5 * time.Second

// stop ends the sessions of all clients, which resets the connections that are left.
func (d *daemon) stop() {
	d.log.Info("stopping")
	done := make(chan struct{})
	go func() {
		d.server.Close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(stopTimeout):
		d.log.Warn("clients did not end in time", zap.Duration("limit", stopTimeout))
	}
}

// traffic logs the daemon's total traffic.
func (d *daemon) traffic() {
	stats, _ := d.engine.Stats()
	for _, n := range d.nics { // without one the kernel counts
		d.trafficOf(n, stats)
	}
}

func (d *daemon) trafficOf(n *nic, stats []dataplane.Stats) {
	c, err := n.steer.Counters()
	if err != nil {
		d.log.Warn("no counters", zap.String("interface", n.name), zap.Error(err))
		return
	}
	var rx, tx, again uint64
	for i, w := range stats {
		if d.engine.WorkerDevice(i) == n.name {
			rx, tx, again = rx+w.RxFrames, tx+w.TxFrames, again+w.TxRetransmits
		}
	}
	d.log.Info("traffic", zap.String("interface", n.name),
		zap.Uint64("frames-steered", c.SteeredTCP+c.SteeredSCTP+c.SteeredUDP+c.SteeredICMP), zap.Uint64("frames-passed", c.Passed+c.PassedFragment+c.Malformed+c.NoSocket),
		zap.Uint64("rx-frames", rx), zap.Uint64("tx-frames", tx), zap.Uint64("retransmissions", again))
}

// goneError adds the exit code to an error that means that an interface does not exist.
func goneError(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, hostnet.ErrGone) {
		return exitErr(exitInterface, "%w", err)
	}
	return err
}

// bpfError adds the exit code to an error of package bpf.
func bpfError(err error) error {
	if errors.Is(err, bpf.ErrPrivilege) {
		return exitErr(exitPermission, "%w; "+instead, err)
	}
	if busy, ok := errors.AsType[*bpf.BusyError](err); ok {
		return exitErr(exitBusy, "%w", busy)
	}
	return err
}

// linkError gives an error of package ifqueue its exit code.
func linkError(ifname string, err error) error {
	var q *ifqueue.QueueError
	switch {
	case errors.Is(err, xsk.ErrPrivilege):
		return exitErr(exitPermission, "%w; "+instead, err)
	case !errors.As(err, &q):
		return bpfError(err)
	case errors.Is(err, xsk.ErrBusy):
		return exitErr(exitBusy, "queue %d of %s is taken: stop the other program, or choose other queues with --queues: %w", q.Queue, ifname, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV):
		return exitErr(exitInterface, "queue %d of %s cannot be used: see ethtool -l %s: %w", q.Queue, ifname, ifname, err)
	}
	return err
}

func metricsError(err error) error {
	if errors.Is(err, unix.EADDRINUSE) {
		return exitErr(exitBusy, "%w: stop the other program, or give another place with --metrics", err)
	}
	return placeError(err, "another place with --metrics")
}

func socketError(err error) error {
	err = fmt.Errorf("cannot make the socket: %w", err)
	switch {
	case errors.Is(err, ctrl.ErrNotMember):
		return exitErr(exitPermission, "%w", err)
	case errors.Is(err, unix.EADDRINUSE):
		return exitErr(exitBusy, "%w", err)
	case errors.Is(err, ctrl.ErrSlots):
		return placeError(err, `another "folder:" of slots`)
	}
	return placeError(err, "another path with --socket")
}

// placeError adds the exit code and the remedy to an error about a file or an address. other says
// how to choose another one.
func placeError(err error, other string) error {
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return exitErr(exitPermission, "%w: give %s", err, other)
	case errors.Is(err, fs.ErrNotExist):
		return exitErr(exitConfig, "%w: make the folder, or give %s", err, other)
	case errors.Is(err, unix.ENOSPC):
		return exitErr(exitFailure, "%w: make room there, or give %s", err, other)
	case ifqueue.Short(err):
		return err // any other place would fail too
	}
	return exitErr(exitConfig, "%w: give %s", err, other)
}
