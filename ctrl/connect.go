package ctrl

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/mpa"
)

// mpa merges the settings of a client with the defaults. The CRC of the result is only the
// client's choice: startup applies the policy, which depends on the peer.
func (d *StartupDefaults) mpa(w *ctrlpb.Startup) (mpa.Config, error) {
	cfg := mpa.DefaultConfig()
	cfg.Markers = d.Markers
	cfg.Rev, cfg.Enhanced = uint8(d.Revision), d.Revision >= 2
	cfg.P2P, cfg.RTR = !d.NoP2P, mpa.RTRs(d.RTR)
	cfg.IRD, cfg.ORD, cfg.MaxIRD, cfg.MaxORD = d.IRD, d.ORD, d.MaxIRD, d.MaxIRD
	cfg.Timeout, cfg.Decision = d.Timeout, d.Accept
	if w == nil {
		w = &ctrlpb.Startup{}
	}
	if w.Crc != nil {
		cfg.CRC = *w.Crc
	}
	if w.Markers != nil {
		cfg.Markers = *w.Markers
	}
	if w.Revision != nil {
		if *w.Revision < 1 || *w.Revision > mpa.MaxRev {
			return cfg, errorf(invalid, "ctrl: MPA has no revision %d: choose 1 or 2", *w.Revision)
		}
		cfg.Rev, cfg.Enhanced = uint8(*w.Revision), *w.Revision >= 2
	}
	if w.Fallback != nil {
		cfg.RetryRev1, cfg.RetryNoMarkers = *w.Fallback, *w.Fallback
	}
	if w.P2P != nil {
		cfg.P2P = *w.P2P
	}
	if w.Rtr != nil && *w.Rtr != 0 {
		if *w.Rtr > uint32(mpa.AllRTRs) {
			return cfg, errorf(invalid, "ctrl: RTR bits are 1 (Send), 2 (Write) and 4 (Read), not %#x", *w.Rtr)
		}
		cfg.RTR = mpa.RTRs(*w.Rtr)
	}
	if w.Ird != nil {
		if *w.Ird > uint32(d.MaxIRD) {
			return cfg, errorf(invalid, "ctrl: IRD is at most %d here, not %d", d.MaxIRD, *w.Ird)
		}
		cfg.IRD = int(*w.Ird)
	}
	if w.Ord != nil {
		if *w.Ord > uint32(d.MaxIRD) {
			return cfg, errorf(invalid, "ctrl: ORD is at most %d here, not %d", d.MaxIRD, *w.Ord)
		}
		cfg.ORD = int(*w.Ord)
	}
	if ms := w.GetTimeoutMs(); ms != 0 {
		cfg.Timeout = time.Duration(ms) * time.Millisecond
	}
	if !cfg.Enhanced {
		if w.GetP2P() {
			return cfg, errorf(invalid, "ctrl: peer-to-peer mode needs MPA revision 2 (RFC 6581)")
		}
		cfg.P2P = false
	}
	return cfg, nil
}

// connSettings are the settings of a connection, or of those of a listener.
type connSettings struct {
	mpa  mpa.Config
	sctp *dataplane.SCTP // nil: TCP
	ip   dataplane.IPOptions
}

// settings merges the settings of a client with the defaults.
func (c *Config) settings(w *ctrlpb.Startup, streaming bool) (set connSettings, err error) {
	if set.mpa, err = c.Startup.mpa(w); err != nil {
		return set, err
	}
	if set.sctp, err = sctpOf(w, streaming); err != nil {
		return set, err
	}
	setSCTP(&set.mpa, set.sctp, w.GetP2P())
	set.ip, err = ipOptions(c.IP, w)
	return set, err
}

// connect starts an active open.
func (c *session) connect(r *ctrlpb.Connect, reply *ctrlpb.Reply) error {
	s := c.srv
	remote, local, by, err := connectAddrs(c, r)
	if err != nil {
		return err
	}
	if err := c.mayConnectTo(remote.Addr()); err != nil {
		return err
	}
	if r.Streaming && len(r.PrivateData) > 0 {
		return errorf(invalid, "ctrl: private data of a connection that begins as a byte stream must be passed to StartMPA")
	}
	if len(r.PrivateData) > maxPrivate {
		return errorf(invalid, "ctrl: private data has at most %d bytes, not %d", maxPrivate, len(r.PrivateData))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.unready(by); err != nil {
		return err
	}
	set, err := s.cfg.settings(r.Startup, r.Streaming)
	if err == nil && set.sctp != nil {
		err = checkPrivate(r.PrivateData)
	}
	if err != nil {
		return err
	}
	set.mpa.PrivateData = r.PrivateData
	if err := set.mpa.Validate(); err != nil {
		return errorf(invalid, "ctrl: %w", err)
	}
	q, err := c.freshQP(r.Qp)
	if err != nil {
		return err
	}
	if n, limit := c.use.dials, c.policy().limits.QPs; n >= limit {
		return errorf(quota, "ctrl: %s has %s whose next hop is being looked up, canceled ones included, its limit is %d: cancel fewer, or raise max-qps in the configuration",
			user(c.cred.Uid), printable.Count(n, "connect"), limit)
	}
	memory := uint64(0)
	if r.Streaming {
		memory = s.cfg.streamMemory()
	}
	if err := c.take(resRings, memory); err != nil {
		return err
	}
	timeout := s.cfg.Startup.Connect
	if r.TimeoutMs != 0 {
		timeout = time.Duration(r.TimeoutMs) * time.Millisecond
	}
	cn := &conn{
		sess: c, qp: q, cfg: set.mpa, by: by, wantAddr: local, remote: remote, ip: set.ip, limit: s.now().Add(timeout),
		overSCTP:   overSCTP{sctp: set.sctp, shares: set.sctp != nil && r.Startup.GetSharedAssociation()},
		byteStream: byteStream{streaming: r.Streaming, memory: memory},
	}
	c.adopt(cn)
	cn.take(q)
	s.arm(cn)
	s.startDial(cn)
	reply.Body = &ctrlpb.Reply_Connect{Connect: &ctrlpb.ConnectReply{Conn: cn.handle}}
	return nil
}

// connectAddrs returns the endpoints and the device that r names, if the client may use the local
// port. The device is nil if r names none.
func connectAddrs(c *session, r *ctrlpb.Connect) (remote, local netip.AddrPort, by *device, err error) {
	remote, err = parseAddrPort(r.Remote)
	if err != nil || !remote.Addr().IsValid() || remote.Addr().IsUnspecified() || remote.Port() == 0 {
		return remote, local, nil, errorf(invalid, "ctrl: remote %q: want address:port of one host", clip(r.Remote, 64))
	}
	if remote.Addr().IsMulticast() {
		return remote, local, nil, errorf(invalid, "ctrl: remote %v is a multicast address", remote.Addr())
	}
	local, err = parseAddrPort(r.Local)
	if err != nil {
		return remote, local, nil, errorf(invalid, "ctrl: local %w", err)
	}
	if local.Addr().IsUnspecified() {
		local = netip.AddrPortFrom(netip.Addr{}, local.Port())
	}
	if local.Addr().IsValid() && local.Addr().Is4() != remote.Addr().Is4() {
		return remote, local, nil, errorf(invalid, "ctrl: local %v and remote %v are of different families", local.Addr(), remote.Addr())
	}
	if local.Port() != 0 {
		if err := c.mayBind(local.Port()); err != nil {
			return remote, local, nil, err
		}
	}
	by, err = c.srv.devices.pick(r.Device, r.Startup.GetTransport())
	if err != nil {
		return remote, local, nil, err
	}
	addrs := []*netip.AddrPort{&remote, &local}
	if local.Addr().Zone() != "" { // the remote address may then omit its zone
		slices.Reverse(addrs)
	}
	for _, a := range addrs {
		var to netip.Addr
		if to, by, err = c.srv.devices.unzoned(a.Addr(), by); err != nil {
			return remote, local, nil, err
		}
		*a = netip.AddrPortFrom(to, a.Port())
	}
	return remote, local, by, nil
}

// startDial begins an attempt to open c. Called with mu held.
func (s *Server) startDial(c *conn) {
	c.state, c.id, c.st = connResolving, 0, nil
	c.sess.use.dials++
	to, ended := c.remote.Addr(), make(chan struct{})
	before := c.sess.dialed[to]
	if c.shares { // it may wait for a later one
		before = nil
	} else {
		c.sess.dialed[to] = ended
	}
	s.wg.Go(func() {
		s.dial(c, before)
		s.mu.Lock()
		defer s.mu.Unlock()
		close(ended)
		if c.sess.dialed[to] == ended {
			delete(c.sess.dialed, to)
		}
		c.sess.use.dials--
		s.settle(c.sess.cred.Uid)
	})
}

// dial resolves the route to the peer, claims a local port and makes the engine connect. It runs in
// its own goroutine, since the resolver may block. before is closed when the client's previous dial to the
// same address has ended, or nil: connections are opened in the order of the requests, which programs rely on
// that number their queue pairs on both sides by it (perftest).
func (s *Server) dial(c *conn, before <-chan struct{}) {
	var sh *shared
	if c.shares {
		if sh = s.share(c); sh == nil {
			return
		}
		defer close(sh.ready)
	}
	hop, err := s.resolver.Resolve(c.remote.Addr(), c.wantAddr.Addr(), c.by.name())
	if before != nil {
		<-before
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if c.state != connResolving {
		return // canceled in the meantime
	}
	var dev *device
	var cl *claim
	if err != nil {
		err = errorf(dialCode(err), "%w", err)
	} else {
		dev, cl, err = s.claimLocal(c, &hop)
	}
	if err != nil {
		s.failConn(c, err)
		return
	}
	cl.refs++ // until Connect returns, even if c ends before
	ours, err := s.open(c, cl, dev.Name, false)
	if err != nil && ours {
		s.failConn(c, err)
	}
	if err == nil && !ours {
		s.partedSCTP(cl, cl.addr.Addr())
	} else {
		s.claims.drop(cl)
	}
	if sh != nil && err == nil {
		sh.claim, sh.device = cl, dev.Name
	}
}

// open makes the engine open c from cl over device, with join on an association that it has. ours is false if c has
// been canceled, or has ended by an event, before Connect returned. Called with mu held, which it releases meanwhile.
func (s *Server) open(c *conn, cl *claim, device string, join bool) (ours bool, err error) {
	id := s.engine.NewID(cl.addr, device)
	c.claim, c.local, c.state, c.id = cl, cl.addr, connDialing, id
	s.conns[id] = c // its events may arrive before Connect returns
	r := c.connectRequest(s.now())
	r.Join = join
	s.mu.Unlock()
	err = s.engine.Connect(id, r)
	s.mu.Lock()
	ours = c.id == id && c.state != connGone
	switch {
	case err != nil:
		err = errorf(dialCode(err), "ctrl: connect to %v: %w", c.remote, err)
	case !ours: // it may have been canceled before the worker handled it
		s.engine.Disconnect(id, true)
	}
	return ours, err
}

// claimLocal reserves the local endpoint of c on the device of hop. Called with mu held.
func (s *Server) claimLocal(c *conn, hop *dataplane.Hop) (*device, *claim, error) {
	dev := s.devices.named(hop.Device)
	switch {
	case c.by.sockets():
		dev = c.by
	case hop.Local && c.by == nil:
		dev = s.devices.local(c.remote.Addr())
	}
	if dev.down != nil {
		return nil, nil, dev.down
	}
	addr := c.wantAddr.Addr()
	if !addr.IsValid() {
		addr = hop.Src
	}
	if pol := c.sess.policy(); !pol.mayUse(addr) {
		return nil, nil, errorf(permission, "ctrl: %s may not use the address %v: not in addresses of %s: choose one that is", user(c.sess.cred.Uid), addr, pol.rule)
	}
	cl, err := s.takePort(c, netip.AddrPortFrom(addr, c.wantAddr.Port()))
	if err != nil {
		return nil, nil, err
	}
	if c.sctp != nil {
		if err := s.claims.steerSCTP(cl, c.sctp); err != nil {
			s.claims.drop(cl)
			return nil, nil, err
		}
	}
	return dev, cl, nil
}

// connectRequest returns the request to the engine. Called with mu held.
func (c *conn) connectRequest(now clock.Time) dataplane.ConnectRequest {
	r := dataplane.ConnectRequest{Local: c.local, Remote: c.remote, Timeout: max(c.limit.Sub(now), time.Millisecond), Stream: c.streaming, IP: c.ip}
	if c.sctp != nil {
		o := *c.sctp
		o.Fallback, o.Answer = c.cfg.RetryRev1, c.cfg.Timeout
		r.SCTP, r.Setup = &o, c.initiateSetup()
	}
	return r
}

func dialCode(err error) ctrlpb.Code {
	switch {
	case errors.Is(err, dataplane.ErrTimeout):
		return timedOut
	case errors.Is(err, dataplane.ErrSource):
		return badAddress
	case errors.Is(err, dataplane.ErrBroadcast), errors.Is(err, dataplane.ErrNetwork):
		return invalid
	}
	return unreachable
}

func flowOf(local, remote netip.AddrPort) pkt.Flow {
	return pkt.Flow{
		Local: local.Addr().As16(), LocalPort: local.Port(),
		Remote: remote.Addr().As16(), RemotePort: remote.Port(),
	}
}
