package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// firstPort is the lowest port of an active open.
const firstPort = 20000

// node is an engine on one link, with a byte stream for each of its connections.
type node struct {
	o        *options
	steer    *bpf.Steering // nil: no other stack listens on the link
	engine   *dataplane.Engine
	resolver dataplane.Resolver
	undo     []func() error

	listener dataplane.ListenerID
	accepted chan *conn

	mu    sync.Mutex // held during Connect, so that no event precedes it
	conns map[dataplane.ConnID]*conn
	port  uint16
}

// newNode makes a node on an interface.
func newNode(o *options) (_ *node, err error) {
	runtime.LockOSThread() // interfaces belong to the thread's network namespace
	defer runtime.UnlockOSThread()
	var undo []func() error
	defer func() {
		if err != nil {
			err = errors.Join(err, unwind(undo))
		}
	}()
	resolver, err := hostnet.New(o.ifname)
	if err != nil {
		return nil, err
	}
	undo = append(undo, resolver.Close)
	steer, err := bpf.Load(bpf.Options{Queues: o.queues, Endpoints: 1 << 17})
	if err != nil {
		return nil, err
	}
	undo = append(undo, steer.Close)
	queues := make([]int, o.queues)
	for q := range queues {
		queues[q] = q
	}
	set, err := ifqueue.Open(steer, ifqueue.Config{Interface: o.ifname, Queues: queues, Link: ifqueue.XDP, Memory: 64 << 20, Super: true})
	if err != nil {
		return nil, err
	}
	undo = append(undo, set.Close)
	o.partial = set.Local
	fragments, err := steer.Fragments()
	if err != nil {
		return nil, err
	}
	undo = append(undo, fragments.Close)
	n, err := nodeOver(o, set.Links, resolver, fragments)
	if err != nil {
		return nil, err
	}
	n.steer = steer
	n.undo = append(undo, n.undo...)
	return n, nil
}

// nodeOver makes a node on the queues of an interface, which the caller closes.
func nodeOver(o *options, links []link.Link, resolver dataplane.Resolver, fragments dataplane.FragmentSource) (*node, error) {
	name := o.cc
	if name == "reno" { // the kernel's name for it
		name = "newreno"
	}
	cc, err := tcp.ParseCongestionControl(name)
	if err != nil {
		return nil, fmt.Errorf("congestion control %q %w", o.cc, err)
	}
	n := &node{o: o, resolver: resolver, conns: map[dataplane.ConnID]*conn{}, accepted: make(chan *conn, 1<<16), port: firstPort}
	cfg := tcp.DefaultConfig()
	cfg.RcvWindow, cfg.MaxHeld = o.rcvWindow, 0
	cfg.CongestionControl = cc
	if o.ecn {
		cfg.ECN = tcp.RequestECN
	}
	cfg.NoSACK, cfg.NoTimestamps, cfg.NoWindowScale = o.noSACK, o.noTS, o.noWScale
	cfg.TimeWait = o.timeWait
	var queues []dataplane.Queue
	for _, l := range links {
		queues = append(queues, dataplane.Queue{Link: l, CPU: -1, PartialChecksums: o.partial})
	}
	n.engine, err = dataplane.New(dataplane.Config{
		Fragments: map[string]dataplane.FragmentSource{"": fragments}, OnEvent: n.event, TCP: &cfg, StreamBuffer: 2 * o.rcvWindow, SendBuffer: o.queue, MaxConns: 1 << 16,
	}, queues, resolver)
	if err != nil {
		return nil, err
	}
	n.engine.Start()
	n.undo = append(n.undo, func() error { n.engine.Stop(); return nil })
	return n, nil
}

func unwind(undo []func() error) error {
	var errs []error
	for i := len(undo) - 1; i >= 0; i-- {
		errs = append(errs, undo[i]())
	}
	return errors.Join(errs...)
}

// claim and unclaim steer the frames of an endpoint to us where a kernel would receive them otherwise.
func (n *node) claim(local netip.AddrPort) error {
	if n.steer == nil {
		return nil
	}
	return n.steer.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Addr: local.Addr(), Port: local.Port()})
}

func (n *node) unclaim(local netip.AddrPort) error {
	if n.steer == nil {
		return nil
	}
	return n.steer.Unclaim(bpf.Endpoint{Proto: pkt.ProtoTCP, Addr: local.Addr(), Port: local.Port()})
}

// Close waits until the engine has forgotten all connections, including TIME-WAIT. It waits at most -drain for those
// that a flood has left half-open.
func (n *node) Close(r *report) error {
	if n.listener != 0 {
		n.engine.Unlisten(n.listener)
	}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		r.Engine, _ = n.engine.Stats()
		r.Left = 0
		busy := uint64(0)
		for _, e := range r.Engine {
			r.Left += int(e.Conns)
			busy += e.Slots - e.FreeSlots // free only when the kernel has reported it as sent
		}
		took := time.Since(began)
		if len(r.Engine) < n.engine.Workers() && took < time.Minute {
			continue // a worker that had no CPU for a second is not included
		}
		if r.Left == 0 && busy == 0 || took > max(n.o.drain, time.Minute) {
			break
		}
		if took > n.o.drain && busy == 0 && !slices.ContainsFunc(n.engine.Conns(), func(ci dataplane.ConnInfo) bool { return ci.State != tcp.SynReceived }) {
			break
		}
	}
	for i, ci := range n.engine.Conns() {
		if i < 8 && ci.State != tcp.SynReceived { // one of a flood belongs to nobody
			r.fail(fmt.Errorf("left behind by worker %d: %v in %v, %+v", ci.Worker, ci.Flow, ci.State, ci.TCP))
		}
	}
	return unwind(n.undo)
}

func (n *node) Listen(local netip.AddrPort, backlog int) (err error) {
	if err := n.claim(local); err != nil {
		return err
	}
	n.listener, err = n.engine.Listen(dataplane.ListenRequest{Local: local, Backlog: backlog})
	return err
}

func (n *node) Accept() (stream, error) { return <-n.accepted, nil }

// Dial opens a connection from the next free port.
func (n *node) Dial(remote netip.AddrPort) (stream, error) {
	hop, err := n.resolver.Resolve(remote.Addr(), netip.Addr{}, "")
	if err != nil {
		return nil, err
	}
	c, err := n.connect(hop.Src, remote)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.open && !c.closed {
		c.cond.Wait()
	}
	if !c.open {
		return nil, errors.Join(errors.New("not connected"), c.err)
	}
	return c, nil
}

func (n *node) connect(src netip.Addr, remote netip.AddrPort) (*conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var last error
	for range 1 << 15 {
		if n.port++; n.port < firstPort {
			n.port = firstPort
		}
		local := netip.AddrPortFrom(src, n.port)
		if err := n.claim(local); err != nil {
			return nil, err
		}
		id := n.engine.NewID(local, "")
		if err := n.engine.Connect(id, dataplane.ConnectRequest{Local: local, Remote: remote, Timeout: n.o.timeout}); err != nil { // most likely this port is in TIME-WAIT
			last = errors.Join(err, n.unclaim(local))
			continue
		}
		c := newConn(n, id)
		c.local = local
		n.conns[id] = c
		return c, nil
	}
	return nil, fmt.Errorf("no free port: %w", last)
}

// event handles an event of the engine.
func (n *node) event(ev dataplane.Event) {
	n.mu.Lock()
	c := n.conns[ev.Conn]
	if c == nil && ev.Kind == dataplane.EventAccepted {
		c = newConn(n, ev.Conn)
		n.conns[ev.Conn] = c
	}
	if ev.Kind == dataplane.EventClosed {
		delete(n.conns, ev.Conn)
	}
	n.mu.Unlock()
	if c == nil {
		return // the connection was never accepted
	}
	c.mu.Lock()
	switch ev.Kind {
	case dataplane.EventAccepted, dataplane.EventConnected:
		c.open = true
	case dataplane.EventData:
		c.in = append(c.in, ev.Data)
	case dataplane.EventWritable:
		c.credit = min(c.credit+n.o.queue/2, n.o.queue)
	case dataplane.EventPeerClosed:
		c.peerClosed = true
	case dataplane.EventClosed:
		c.closed, c.err = true, ev.Err
		if c.local.IsValid() {
			// TIME-WAIT still needs its frames.
			time.AfterFunc(n.o.timeWait+time.Second, func() { _ = n.unclaim(c.local) })
		}
	}
	c.mu.Unlock()
	c.cond.Broadcast()
	if ev.Kind == dataplane.EventAccepted {
		n.accepted <- c
	}
}

// conn is a connection of the engine, as a stream.
type conn struct {
	n     *node
	id    dataplane.ConnID
	local netip.AddrPort // of an active open

	mu         sync.Mutex
	cond       *sync.Cond
	in         [][]byte
	credit     int // bytes that may be given to StreamSend
	open       bool
	peerClosed bool
	shut       bool // in our direction
	closed     bool
	err        error

	used int // bytes read and not yet reported as consumed; used by Read alone
}

func newConn(n *node, id dataplane.ConnID) *conn {
	c := &conn{n: n, id: id, credit: n.o.queue}
	c.cond = sync.NewCond(&c.mu)
	return c
}

// consumeAt is the number of bytes that are reported as consumed at once.
const consumeAt = 64 << 10

func (c *conn) Read(b []byte) (int, error) {
	c.mu.Lock()
	for len(c.in) == 0 && !c.peerClosed && !c.closed {
		c.cond.Wait()
	}
	n := 0
	for n < len(b) && len(c.in) > 0 {
		m := copy(b[n:], c.in[0])
		n += m
		if c.in[0] = c.in[0][m:]; len(c.in[0]) == 0 {
			c.in[0] = nil
			c.in = c.in[1:]
		}
	}
	empty, err := len(c.in) == 0, c.err
	c.mu.Unlock()
	c.used += n
	if c.used >= consumeAt || empty && c.used > 0 {
		c.n.engine.StreamConsumed(c.id, c.used)
		c.used = 0
	}
	switch {
	case n > 0:
		return n, nil
	case err != nil:
		return 0, err
	}
	return 0, io.EOF
}

func (c *conn) Write(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		c.mu.Lock()
		for c.credit == 0 && !c.closed {
			c.cond.Wait()
		}
		if c.closed || c.shut {
			err := c.err
			c.mu.Unlock()
			return n, errors.Join(net.ErrClosed, err)
		}
		m := min(len(b)-n, c.credit)
		c.credit -= m
		c.mu.Unlock()
		c.n.engine.StreamSend(c.id, append([]byte(nil), b[n:n+m]...))
		n += m
	}
	return n, nil
}

func (c *conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.err
	}
	c.shut = true
	c.n.engine.Disconnect(c.id, false)
	return nil
}

func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.shut && !c.closed {
		c.shut = true
		c.n.engine.Disconnect(c.id, false)
	}
	for !c.closed {
		c.cond.Wait()
	}
	return c.err
}

func (c *conn) Stats() (tcp.Stats, bool) {
	for _, ci := range c.n.engine.Conns() {
		if ci.ID == c.id {
			return ci.TCP, true
		}
	}
	return tcp.Stats{}, false
}
