package ctrl

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/mpa"
)

const defaultBacklog, maxBacklog = 128, 4096

// listener is an endpoint that a client listens on. Guarded by Server.mu.
type listener struct {
	handle  uint32
	index   uint32
	id      dataplane.ListenerID
	sess    *session
	claim   *claim
	on      *device // nil: all
	cfg     mpa.Config
	backlog int
	waiting int  // connect requests that the client has not answered, and byte streams
	keep    bool // the connect requests that the client has outlive it
	ending  bool // closed, and in resListens until nothing is waiting

	streaming bool            // connections begin as byte streams
	sctp      *dataplane.SCTP // nil: TCP

	starting startups

	accepted, rejected, dropped uint64
}

func (c *session) listen(r *ctrlpb.Listen, reply *ctrlpb.Reply) error {
	s := c.srv
	local, on, err := listenAddr(c, r)
	if err != nil {
		return err
	}
	backlog := cmp.Or(int(min(r.Backlog, maxBacklog)), defaultBacklog)

	c.use.slow.Lock() // as for a query: it waits for the workers
	defer c.use.slow.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.unready(on); err != nil {
		return err
	}
	if addr := local.Addr(); !addr.IsUnspecified() && !addr.IsLoopback() && !s.devices.have(addr, on) {
		return errorf(badAddress, "ctrl: %v is not an address of the interface: choose one of those that iwarpctl status shows", addr)
	}
	set, err := listenSettings(s, r, local.Addr())
	if err != nil {
		return err
	}
	if err := c.take(resListens, 1); err != nil {
		return err
	}
	cl, err := s.claims.take(local, on, c.cred.Uid, netip.AddrPort{})
	if err == nil {
		if err = s.files.room(c.cred.Uid, s.files.of(&c.use.account), s.claims.uncounted(cl)); err != nil {
			s.claims.unlisten(cl)
		}
	}
	if err != nil {
		c.give(resListens, 1)
		return err
	}
	s.claims.count(cl)
	// Workers answer from their own goroutines and never wait for mu, so mu can be held here.
	// It must be, so that the first EventAccepted finds the listener.
	l := &listener{sess: c, claim: cl, cfg: set.mpa, backlog: backlog, keep: r.KeepRequests, streaming: r.Streaming, sctp: set.sctp}
	if set.sctp != nil {
		err = s.claims.steerSCTP(cl, set.sctp)
	}
	if err == nil {
		l.id, err = s.engine.Listen(dataplane.ListenRequest{
			Local: cl.addr, Backlog: backlog, Stream: r.Streaming, SCTP: set.sctp, Admit: l.admits, IP: set.ip,
			Device: on.name(),
		})
	}
	if err != nil {
		s.claims.unlisten(cl)
		c.give(resListens, 1)
		return errorf(internal, "ctrl: listen on %v: %w", cl.addr, err)
	}
	s.lastIndex++
	l.handle, l.index, l.on = c.newHandle(), s.lastIndex, on
	if on.sockets() {
		l.starting.sockets = &s.files
	}
	c.listens[l.handle] = l
	s.listeners[l.id] = l
	reply.Body = &ctrlpb.Reply_Listen{Listen: &ctrlpb.ListenReply{Listen: l.handle, Address: cl.addr.String()}}
	return nil
}

// listenAddr returns the endpoint and the device that r names, if the client may listen there. The
// device is nil for all.
func listenAddr(c *session, r *ctrlpb.Listen) (netip.AddrPort, *device, error) {
	if r.Port > 65535 {
		return netip.AddrPort{}, nil, errorf(invalid, "ctrl: invalid port %d", r.Port)
	}
	port := uint16(r.Port)
	addr := netip.IPv6Unspecified()
	if r.Address != "" {
		a, err := netip.ParseAddr(r.Address)
		if err != nil || a.IsMulticast() {
			return netip.AddrPort{}, nil, errorf(invalid, "ctrl: %q is not an address to listen on", clip(r.Address, 64))
		}
		if a = a.Unmap(); !a.IsUnspecified() {
			addr = a
		}
	}
	on, err := c.srv.devices.pick(r.Device, r.Startup.GetTransport())
	if err != nil {
		return netip.AddrPort{}, nil, err
	}
	addr, on, err = c.srv.devices.unzoned(addr, on)
	if err != nil {
		return netip.AddrPort{}, nil, err
	}
	pol := c.policy()
	switch {
	case port != 0:
		if err := c.mayBind(port); err != nil {
			return netip.AddrPort{}, nil, err
		}
	case len(pol.listen) > 0: // port 0 could yield a port outside of the ranges
		return netip.AddrPort{}, nil, errorf(permission, "ctrl: %s may listen only on the ports in listen of %s: name one of them", user(c.cred.Uid), pol.rule)
	}
	if !pol.mayUse(addr) {
		return netip.AddrPort{}, nil, errorf(permission, "ctrl: %s may not listen on %v: not in addresses of %s: choose one that is", user(c.cred.Uid), addr, pol.rule)
	}
	return netip.AddrPortFrom(addr, port), on, nil
}

// listenSettings returns the settings of the connections that r requests. Called with mu held.
func listenSettings(s *Server, r *ctrlpb.Listen, addr netip.Addr) (connSettings, error) {
	set, err := s.cfg.settings(r.Startup, r.Streaming)
	if err != nil {
		return set, err
	}
	if set.sctp != nil && addr.IsLoopback() {
		return set, errorf(badAddress, "ctrl: SCTP cannot reach programs of this host: listen on %v over TCP", addr)
	}
	// Depths in the request also bound those of an Accept that specifies none.
	if r.Startup != nil && r.Startup.Ird != nil {
		set.mpa.MaxIRD = set.mpa.IRD
	}
	if r.Startup != nil && r.Startup.Ord != nil {
		set.mpa.MaxORD = set.mpa.ORD
	}
	if err := set.mpa.Validate(); err != nil {
		return set, errorf(invalid, "ctrl: %w", err)
	}
	return set, nil
}

func (c *session) unlisten(h uint32) error {
	c.srv.mu.Lock()
	l, err := c.listenerOf(h)
	c.srv.mu.Unlock()
	if err != nil {
		return err
	}
	c.dropListener(l)
	return nil
}

// stopListening resets the connections of l whose request has not arrived, and those that the engine still accepts. Called
// with mu held.
func (s *Server) stopListening(l *listener) {
	delete(s.listeners, l.id)
	for _, all := range l.starting.by {
		for _, cn := range slices.Clone(all) {
			s.abandon(cn)
		}
	}
}

// dropListener closes a listener and resets the connections that the client has not accepted. A listener that keeps them
// counts until they are answered, since some of them may be beyond the quota of requests.
func (c *session) dropListener(l *listener) {
	s := c.srv
	s.engine.Unlisten(l.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopListening(l)
	delete(c.listens, l.handle)
	for _, cn := range c.conns {
		if cn.listener == l && cn.qp == nil && !cn.streaming && !l.keep { // a byte stream already belongs to the client
			s.abandon(cn)
		}
	}
	s.claims.unlisten(l.claim)
	if l.ending = l.waiting > 0 && !l.streaming; !l.ending {
		c.give(resListens, 1)
	}
}
