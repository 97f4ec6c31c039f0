// Package ctrl is the control plane: the Unix socket API, its clients' sessions
// and objects, and the connection manager that takes connections through the
// MPA start-up.
package ctrl

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// Options are the dependencies of a Server.
type Options struct {
	Logger   *zap.Logger        // nil: none
	Resolver dataplane.Resolver // must not be nil
	Devices  []Device           // at least one
	NoGuard  bool               // bind no guard sockets, since the kernel does not use the addresses
	Peers    PeerSet            // peers to which every client is restricted, or nil
}

// network holds the parts of a Server that reach peers.
type network struct {
	resolver dataplane.Resolver
	devices  devices
}

// Server is the control plane of one engine.
type Server struct {
	log *zap.Logger
	network
	table *verbs.Table
	peerGate
	started time.Time
	engine  Engine // set by Bind, before anything runs
	now     func() clock.Time
	unread  time.Duration // unreadLimit, except in tests
	threads awayThreads   // that clients can block
	mappers awayThreads   // that map the memory of clients
	readers readers

	admitting chan struct{} // has an element for each of up to mostAdmitting connections

	// mu guards everything below, and the objects of all sessions. It is not held
	// while waiting for a worker, except in Listen.
	mu       sync.Mutex
	cfg      Config
	stale    string // why the last reload was refused, or ""; see NotReloaded
	closed   bool
	sockets  []*UnixListener // the main socket, then those of the slots; none before Listen and when it is to stop
	sessions map[uint32]*session
	qps      map[uint32]*qp // by number
	numbers
	accounts
	claims    claims
	listeners map[dataplane.ListenerID]*listener
	conns     map[dataplane.ConnID]*conn
	assocs    map[pkt.Flow]*claim           // claims of associations
	pending   map[*conn]struct{}            // connections with a deadline
	late      map[bpf.Endpoint]lateEndpoint // SCTP endpoints that are steered for packets in flight after the association
	lingers   map[dataplane.ConnID]*linger
	captures  int        // of users that are no administrators
	wakeAt    clock.Time // when the timer goroutine will wake
	refreshAt clock.Time // when a refresh of the claims that failed is repeated, or 0
	refreshes logLimit   // of the messages about that

	turnedAway
	drained chan struct{} // closed when no connection is left; nil unless draining

	rewake   chan struct{}
	done     chan struct{}
	wg       sync.WaitGroup // sessions and the timer goroutine
	counters counters
}

// numbers are the last numbers assigned. Server.mu guards them.
type numbers struct {
	lastID    uint32
	lastQP    uint32
	lastPD    verbs.PDID
	lastIndex uint32
}

// counters are those of the control plane. They are atomic, since sessions access them
// concurrently.
type counters struct {
	requests, errors, cutOff, faults                          atomic.Uint64
	connRequests, established, rejected                       atomic.Uint64
	startupFailed, startupTimeout, startupsEvicted, fallbacks atomic.Uint64
	detached, peersDenied, connectsDenied                     atomic.Uint64
}

// New returns a Server. Bind must be called before any other method.
func New(cfg Config, o Options) (*Server, error) {
	if o.Resolver == nil {
		return nil, errors.New("ctrl: no resolver")
	}
	if len(o.Devices) == 0 {
		return nil, errors.New("ctrl: no device")
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if err := shm.Guarded(); err != nil {
		o.Logger.Warn("a client can make the daemon allocate memory", zap.Error(err))
	}
	s := &Server{
		log:        o.Logger,
		network:    network{resolver: o.Resolver},
		table:      verbs.NewTable(rand.Reader),
		peerGate:   peerGate{peers: o.Peers, denials: denials{first: make(chan denial, 1)}},
		started:    time.Now(),
		now:        clock.Now,
		unread:     unreadLimit,
		cfg:        cfg.fill(),
		sessions:   make(map[uint32]*session),
		qps:        make(map[uint32]*qp),
		accounts:   newAccounts(),
		listeners:  make(map[dataplane.ListenerID]*listener),
		conns:      make(map[dataplane.ConnID]*conn),
		assocs:     make(map[pkt.Flow]*claim),
		pending:    make(map[*conn]struct{}),
		late:       make(map[bpf.Endpoint]lateEndpoint),
		lingers:    make(map[dataplane.ConnID]*linger),
		admitting:  make(chan struct{}, mostAdmitting),
		turnedAway: turnedAway{refusing: make(map[uint32]int)},
		rewake:     make(chan struct{}, 1),
		done:       make(chan struct{}),
	}
	for _, d := range o.Devices {
		s.devices = append(s.devices, &device{Device: d})
	}
	s.claims = claims{
		devices: s.devices, noGuard: o.NoGuard, accounts: &s.accounts, failed: s.refreshFailed,
		byAddr: make(map[claimKey]*claim), byPort: make(map[uint16][]*claim), inUse: make(map[netip.Addr]int),
		lost: make(map[netip.Addr]clock.Time),
	}
	return s, nil
}

// Bind connects the Server to its engine, which must have s.OnEvent in its Config and must not have
// been started.
func (s *Server) Bind(e Engine) {
	s.engine = e
	limits := divideThreads(Threads())
	s.readers.most, s.threads.most, s.mappers.most = int32(limits.readers), limits.away, limits.mappers
	s.mu.Lock()
	s.movers = newMovers(limits.movers)
	s.files, s.maps = newFiles(s.cfg.Slots.Count, e.Workers(), s.devices[len(s.devices)-1].Sockets), newMaps(e.Workers())
	s.claims.refresh(s.now())
	s.mu.Unlock()
	s.wg.Go(s.runTimers)
	s.wg.Go(func() { s.denials.log(s.done) })
	if s.peers != nil {
		s.peers.Watch(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.endDenied()
		})
	}
	for _, d := range s.devices {
		if d.Program != nil {
			s.wg.Go(func() { s.watchProgram(d) })
		}
	}
	s.resolver.Watch(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.claims.refresh(s.now())
		if len(s.claims.lost) > 0 {
			s.wake(s.now().Add(lostTime))
		}
	})
}

// refreshRetry is the time after which a refresh of the claims that failed is repeated: memory may be free then, or
// there may be room in the steering map.
const refreshRetry = 4 * time.Second

// refreshFailed handles a failed refresh of the claims. Called with mu held.
func (s *Server) refreshFailed(err error) {
	now := s.now()
	if s.refreshes.now(now) {
		s.log.Warn("addresses of the host are not yet served: trying again",
			zap.Duration("every", refreshRetry), zap.Error(err))
	}
	s.refreshAt = now.Add(refreshRetry)
	s.wake(s.refreshAt)
}

// refreshAgain repeats a refresh of the claims that failed, if it is time, and returns when the next one is due, or 0.
// Called with mu held.
func (s *Server) refreshAgain(now clock.Time) (next clock.Time) {
	if s.refreshAt.Due(now) {
		s.refreshAt = 0
		s.claims.refresh(s.now())
	}
	return s.refreshAt
}

// Reload applies the settings of cfg that can change at run time: rules and quotas, also for
// current clients, and the settings of new connections. Clients that the rules no longer allow are
// cut off. Clients keep what exceeds a new quota.
func (s *Server) Reload(cfg Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cfg.Socket, cfg.Mode, cfg.Group = s.cfg.Socket, s.cfg.Mode, s.cfg.Group
	cfg.TimeWait, cfg.ReceiveWindow = s.cfg.TimeWait, s.cfg.ReceiveWindow
	cfg.Slots.Folder, cfg.Slots.Count = s.cfg.Slots.Folder, s.cfg.Slots.Count
	if cfg.Version == "" {
		cfg.Version = s.cfg.Version
	}
	s.cfg = cfg.fill()
	for _, c := range s.sessions {
		pol, ok := s.cfg.policyOf(c.cred.Uid, c.gids, c.contained)
		if !ok {
			go c.cutOff(errorf(permission, "ctrl: %s is no longer allowed", user(c.cred.Uid)))
			continue
		}
		c.pol.Store(&pol)
	}
	s.endDenied()
}

// NotReloaded records why a reload was refused, so that the settings stay as they were, or nil if it was not. It returns what Status
// shows of it: one line of limited length, or "".
func (s *Server) NotReloaded(why error) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = ""
	if why != nil {
		s.stale = clip(printable.String(printable.Error(why)), maxText)
	}
	return s.stale
}

// Listen opens the Unix socket and those of the slots. It replaces a stale socket file, and fails
// if a process still serves the socket.
func (s *Server) Listen() error {
	l, err := listenSocket(s.cfg.Socket, s.cfg.Mode, s.cfg.Group)
	if err != nil {
		return err
	}
	slots, err := s.cfg.Slots.listen()
	if err != nil {
		l.Close()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		l.Close()
		closeAll(slots)
		return net.ErrClosed
	}
	s.sockets = append([]*UnixListener{l}, slots...)
	return nil
}

// Lost returns the paths of the sockets whose files are gone, as after a careless rm, or are another program's.
// The name of a socket in the folder of its slot does not count.
func (s *Server) Lost() (paths []string) {
	for _, l := range s.listening() {
		if l.Lost() {
			paths = append(paths, l.names[0])
		}
	}
	return paths
}

// Relisten opens the sockets again whose files are lost, and restores those that a container has lost in the folder of
// its slot. It returns their paths. What another daemon serves stays as it is. Only one goroutine may call it.
func (s *Server) Relisten() (paths []string, err error) {
	for i, l := range s.listening() {
		lost := l.lost()
		if len(lost) == 0 {
			continue
		}
		next, nerr := s.listenAgain(i, l)
		if nerr != nil {
			err = errors.Join(err, nerr)
			continue
		}
		s.mu.Lock()
		if len(s.sockets) == 0 { // it is to stop
			s.mu.Unlock()
			next.Close()
			return paths, nil
		}
		s.sockets[i] = next
		s.mu.Unlock()
		if next != l {
			l.Close()
		}
		paths = append(paths, lost...)
	}
	return paths, err
}

// listenAgain opens socket i, which is l, again.
func (s *Server) listenAgain(i int, l *UnixListener) (*UnixListener, error) {
	if i > 0 {
		return s.cfg.Slots.listenSlot(i-1, l)
	}
	return listenSocket(s.cfg.Socket, s.cfg.Mode, s.cfg.Group)
}

// closeSockets closes the sockets for good. Called with mu held.
func (s *Server) closeSockets() {
	closeAll(s.sockets)
	s.sockets = nil
}

// listening returns the sockets.
func (s *Server) listening() []*UnixListener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sockets)
}

// Serve opens the Unix sockets, unless Listen did, and serves clients until ctx
// is done or Close is called. It returns nil then.
func (s *Server) Serve(ctx context.Context) error {
	if len(s.listening()) == 0 {
		if err := s.Listen(); err != nil {
			return err
		}
	}
	defer context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.closeSockets()
	})()
	var wg sync.WaitGroup
	for i, l := range s.listening() {
		wg.Go(func() { s.accept(ctx, i, l) })
	}
	wg.Wait()
	return nil
}

// noSlot denotes the main socket. The slot of socket i is i-1.
const noSlot = -1

// accept accepts the clients of socket i, which is l, until it is closed for good. After an error it tries again, for
// example when clients have left and descriptors are free: the connections of the other clients are worth more than a
// new start.
func (s *Server) accept(ctx context.Context, i int, l *UnixListener) {
	var failed logLimit
	for {
		c, err := l.AcceptUnix()
		if err == nil {
			s.serve(seqpacket.FromUnix(c), i-1)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			all := s.listening()
			if len(all) == 0 || all[i] == l {
				return
			}
			l = all[i] // Relisten has opened it
			continue
		}
		if failed.now(s.now()) {
			s.log.Warn("clients not accepted", zap.Error(shm.Limit(err)))
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
}

// ServeConn serves the client at the other end of a connected SOCK_SEQPACKET descriptor. It takes
// ownership of fd and does not wait for the client.
func (s *Server) ServeConn(fd int) error {
	c, err := seqpacket.FromFD(fd)
	if err != nil {
		return err
	}
	s.serve(c, noSlot)
	return nil
}

// Close ends all sessions, which resets their connections, and releases the endpoints. The engine must still run.
func (s *Server) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	s.closeSockets()
	for _, sess := range s.sessions {
		sess.shutdown()
	}
	s.mu.Unlock()
	close(s.done)
	s.wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.usage {
		for _, cl := range u.timeWait {
			s.claims.drop(cl)
		}
		u.timeWait = nil
	}
	for _, cl := range s.assocs {
		s.claims.drop(cl)
	}
	for id := range s.lingers {
		s.endLinger(id)
	}
	for ep := range s.late {
		s.devices.unclaim(ep)
	}
	clear(s.assocs)
	clear(s.late)
}
