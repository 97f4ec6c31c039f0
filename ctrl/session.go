package ctrl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/far"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/shm"
)

const (
	// Version and MinVersion are the highest and lowest supported protocol versions.
	Version, MinVersion = 1, 1
	// MaxWorkers is the maximum number of workers: a client gets two descriptors for each of them, in one packet.
	MaxWorkers = seqpacket.MaxFDs / 2
	// lookAgain is the polling interval for a client that is not served.
	lookAgain = time.Millisecond
	maxName   = 64
)

// unreadLimit is the time for which a client may leave more than maxQueuedFDs descriptors
// unread.
const unreadLimit = 10 * time.Second

// session is the session of a client.
type session struct {
	srv  *Server
	id   uint32
	conn *seqpacket.Conn
	log  *zap.Logger
	tenant
	out outbox
	cut atomic.Bool // it is being cut off, and the reason has been sent
	hangup
	stuck   []<-chan struct{} // each is closed when a delayed system call has returned; the session's goroutine's
	mem     memory
	started time.Time

	requests, errors atomic.Uint64

	// Server.mu guards the rest. Only the session's own goroutine adds to the maps.
	dead bool // being torn down
	name string
	objects
	binding *dataplane.ClientBinding // nil before Hello
	bits    bitmap
	late    []*conn                      // byte streams with data that waits until the client has read more
	dialed  map[netip.Addr]chan struct{} // the last dial to each address; closed at its end
}

// hangup says when nothing more is read from a client.
type hangup struct {
	hungUp context.Context // done then
	hangUp context.CancelFunc
}

// newSession registers a client. Called with mu held.
func (s *Server) newSession(c *seqpacket.Conn, cred *unix.Ucred, gids []uint32, contained bool) (*session, error) {
	pol, ok := s.cfg.policyOf(cred.Uid, gids, contained)
	if !ok {
		why := "no rule of allow matches the user: add one, and reload iwarpd"
		if pol.rule != "" {
			why = pol.rule + " denies it: change it, and reload iwarpd"
		}
		return nil, errorf(permission, "ctrl: %s (pid %d) is not allowed: %s", user(cred.Uid), cred.Pid, why)
	}
	s.lastID++
	sess := &session{
		srv: s, id: s.lastID, conn: c, started: time.Now(),
		tenant: tenant{cred: *cred, gids: gids, contained: contained, accounts: &s.accounts, use: s.usageOf(cred.Uid)},
		log:    s.log.With(zap.Uint32("client", s.lastID), zap.Uint32("uid", cred.Uid), zap.Int32("pid", cred.Pid)),
		dialed: make(map[netip.Addr]chan struct{}), objects: newObjects(),
	}
	sess.out.init(sess)
	sess.hungUp, sess.hangUp = context.WithCancel(context.Background())
	sess.pol.Store(&pol)
	sess.mem = memory{sess: sess, mover: far.New(farWait, sess.mem.stuck)}
	if err := sess.take(resClients, 1); err != nil {
		s.settle(cred.Uid)
		return nil, err
	}
	sess.raiseRoom()
	s.sessions[sess.id] = sess
	return sess, nil
}

// run serves the client's requests one at a time, and tears the session down at the end.
func (c *session) run() {
	err := c.readLoop()
	defer c.teardown()
	switch {
	case c.cut.Load(): // the reason was sent
	case hasEnded(err):
		c.log.Debug("client gone")
	default: // the reason is not sent: the client's only descriptor may be in a packet that nobody reads any more
		c.logCut(err)
	}
}

// hasEnded reports whether err says that the client or the session has ended.
func hasEnded(err error) bool {
	for _, end := range []error{io.EOF, net.ErrClosed, unix.ECONNRESET, unix.EPIPE} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

func (c *session) readLoop() error {
	for {
		if err := c.awaitRead(); err != nil {
			return err
		}
		b, fds, err := c.conn.Read(1)
		lost := errors.Is(err, seqpacket.ErrFilesLost)
		switch {
		case c.hungUp.Err() != nil:
			err = net.ErrClosed
		case c.cut.Load(): // what it delayed must not be repeated
		case err == nil || lost:
			err = c.packet(b, fds, lost)
		}
		c.closeFiles(fds)
		if err != nil {
			return err
		}
	}
}

// awaitRead waits until the client has read most of the descriptors sent to it, or all of them
// if the daemon has few left. The client is not served meanwhile. A client that does not read
// them is disconnected.
func (c *session) awaitRead() error {
	var late <-chan time.Time
	over := false
	for {
		n := c.out.unreadFDs()
		switch {
		case c.hungUp.Err() != nil:
			return net.ErrClosed
		case n == 0 || n <= maxQueuedFDs && c.srv.spareFiles():
			return nil
		case over:
			err := errorf(quota, "ctrl: the client left %s unread for %v: read the replies", printable.Count(n, "descriptor"), c.srv.unread)
			c.cutOff(err)
			return err
		case late == nil:
			t := time.NewTimer(c.srv.unread)
			defer t.Stop()
			late = t.C
		}
		select {
		case <-c.out.less:
		case <-time.After(lookAgain):
		case <-late:
			over = true // unless the client has read them since the last look
		}
	}
}

// spareFiles reports whether a quarter of the daemon's descriptors is free.
func (s *Server) spareFiles() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.files.spare()
}

// packet handles one packet. An error ends the session; errors in a well-formed request are
// returned in the reply. The caller keeps ownership of fds. lost reports that descriptors of the
// packet were dropped because the process was out of descriptors.
func (c *session) packet(b []byte, fds []int, lost bool) (err error) {
	var req ctrlpb.Request
	if err := proto.Unmarshal(b, &req); err != nil {
		return fmt.Errorf("ctrl: packet of %d bytes is not a Request: %w", len(b), err)
	}
	if req.Id == 0 {
		return errors.New("ctrl: request without an id")
	}
	defer func() {
		if r := recover(); r != nil {
			c.log.Error("request panicked", zap.Any("panic", r), zap.ByteString("stack", debug.Stack()))
			err = fmt.Errorf("ctrl: fault of the daemon in %T", req.Body)
		}
	}()
	c.srv.counters.requests.Add(1)
	reply := &ctrlpb.Reply{}
	var out []int
	var herr error
	if lost {
		herr = errorf(internal, "ctrl: the descriptor of the request did not arrive: the daemon: %w", shm.Limit(unix.EMFILE))
	} else {
		out, herr = c.dispatch(&req, fds, reply)
	}
	reply.Id = req.Id
	if herr != nil {
		c.srv.counters.errors.Add(1)
		c.errors.Add(1)
		reply = &ctrlpb.Reply{Id: req.Id, Error: toPB(herr)}
		c.log.Debug("request refused", zap.String("request", fmt.Sprintf("%T", req.Body)), zap.Error(herr))
	}
	c.requests.Add(1)
	if c.hungUp.Err() != nil { // the request may not have waited for the client's memory
		seqpacket.CloseAll(out)
		return net.ErrClosed
	}
	return c.answer(&ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: reply}}, out)
}

// answer sends a reply, at once if that is possible.
func (c *session) answer(m *ctrlpb.Message, fds []int) error {
	b, err := proto.Marshal(m)
	if err != nil {
		seqpacket.CloseAll(fds)
		return fmt.Errorf("ctrl: %w", err)
	}
	if c.out.try(b, fds) {
		return nil
	}
	return c.queue(&outMessage{b: b, fds: fds})
}

// dispatch executes a request. It fills in reply and returns the descriptors to send with it, which
// are duplicates.
func (c *session) dispatch(req *ctrlpb.Request, fds []int, reply *ctrlpb.Reply) ([]int, error) {
	if h := req.GetHello(); h != nil {
		return c.doHello(h, reply)
	}
	if c.binding == nil {
		return nil, errorf(badVersion, "ctrl: the first request must be Hello")
	}
	switch b := req.Body.(type) {
	case *ctrlpb.Request_AllocPd:
		return nil, c.allocPD(reply)
	case *ctrlpb.Request_DeallocPd:
		return nil, c.deallocPD(b.DeallocPd.Pd)
	case *ctrlpb.Request_RegisterMr:
		return nil, c.registerMR(b.RegisterMr, fds, reply)
	case *ctrlpb.Request_DeregisterMr:
		return nil, c.deregisterMR(b.DeregisterMr.Mr)
	case *ctrlpb.Request_AttachMemory:
		return nil, c.mem.attach(b.AttachMemory, fds)
	case *ctrlpb.Request_OpenUserfaultfd:
		return c.openUserfaultfd()
	case *ctrlpb.Request_AllocMw:
		return nil, c.allocMW(b.AllocMw.Pd, reply)
	case *ctrlpb.Request_DeallocMw:
		return nil, c.deallocMW(b.DeallocMw.Mw)
	case *ctrlpb.Request_CreateCq:
		return c.createCQ(b.CreateCq, reply)
	case *ctrlpb.Request_DestroyCq:
		return nil, c.destroyCQ(b.DestroyCq.Cq)
	case *ctrlpb.Request_ResizeCq:
		return c.resizeCQ(b.ResizeCq, reply)
	case *ctrlpb.Request_ModifyCq:
		return nil, c.modifyCQ(b.ModifyCq)
	case *ctrlpb.Request_CreateChannel:
		return c.createChannel(reply)
	case *ctrlpb.Request_DestroyChannel:
		return nil, c.destroyChannel(b.DestroyChannel.Channel)
	case *ctrlpb.Request_CreateSrq:
		return c.createSRQ(b.CreateSrq, reply)
	case *ctrlpb.Request_ModifySrq:
		return nil, c.modifySRQ(b.ModifySrq)
	case *ctrlpb.Request_DestroySrq:
		return nil, c.destroySRQ(b.DestroySrq.Srq)
	case *ctrlpb.Request_CreateQp:
		return c.createQP(b.CreateQp, reply)
	case *ctrlpb.Request_ModifyQp:
		return nil, c.modifyQP(b.ModifyQp)
	case *ctrlpb.Request_DestroyQp:
		return nil, c.destroyQP(b.DestroyQp.Qp)
	case *ctrlpb.Request_Listen:
		return nil, c.listen(b.Listen, reply)
	case *ctrlpb.Request_Unlisten:
		return nil, c.unlisten(b.Unlisten.Listen)
	case *ctrlpb.Request_Connect:
		return nil, c.connect(b.Connect, reply)
	case *ctrlpb.Request_Accept:
		return nil, c.accept(b.Accept)
	case *ctrlpb.Request_Reject:
		return nil, c.reject(b.Reject)
	case *ctrlpb.Request_StreamSend:
		return nil, c.onStream(b.StreamSend.Conn, func(cn *conn) error { return c.srv.streamSend(cn, b.StreamSend) })
	case *ctrlpb.Request_StreamConsumed:
		return nil, c.onStream(b.StreamConsumed.Conn, func(cn *conn) error { return c.srv.streamConsumed(cn, b.StreamConsumed) })
	case *ctrlpb.Request_StartMpa:
		return nil, c.onStream(b.StartMpa.Conn, func(cn *conn) error { return c.srv.startMPA(cn, b.StartMpa) })
	case *ctrlpb.Request_StreamClose:
		return nil, c.onStream(b.StreamClose.Conn, func(cn *conn) error { return c.srv.streamClose(cn, b.StreamClose) })
	case *ctrlpb.Request_Disconnect:
		return nil, c.disconnect(b.Disconnect)
	case *ctrlpb.Request_SetDscp:
		return nil, setDSCP(c, b.SetDscp)
	case *ctrlpb.Request_Capture:
		return c.capture(b.Capture, reply)
	}
	return nil, c.viewer().query(req, reply)
}

// doHello negotiates the version and sends the client its doorbell pages.
func (c *session) doHello(h *ctrlpb.Hello, reply *ctrlpb.Reply) ([]int, error) {
	s := c.srv
	if c.binding != nil {
		return nil, errorf(badState, "ctrl: second Hello")
	}
	if h.Version < MinVersion || h.MinVersion > Version {
		return nil, errorf(badVersion, "ctrl: the client supports protocol versions %d to %d, this daemon %d to %d: update the older one",
			h.MinVersion, h.Version, MinVersion, Version)
	}
	n := s.engine.Workers()
	if n > MaxWorkers {
		return nil, errorf(internal, "ctrl: the daemon has %d workers, and its clients support %d", n, MaxWorkers)
	}
	bells, fds, err := newBells(n, min(shm.MaxBells, max(c.policy().limits.QPs, 64)))
	if err != nil {
		return nil, errorf(internal, "ctrl: doorbells: %w", err)
	}
	binding := &dataplane.ClientBinding{Doorbells: bells, Mover: c.mem.mover, OnFault: func() { go c.fault() }}
	if err := s.engine.Bind(binding); err != nil {
		seqpacket.CloseAll(fds)
		closeBells(bells)
		return nil, errorf(internal, "ctrl: %w", err)
	}

	s.mu.Lock()
	c.binding = binding
	c.bits = make(bitmap, bells[0].Bits()/64)
	c.name = clip(printable.String(clip(h.Name, maxName)), maxName)
	attrs := s.devices.interfaces().attrs(&s.cfg, c.policy())
	version := s.cfg.Version
	s.mu.Unlock()
	c.log.Debug("client", zap.String("name", c.name))
	reply.Body = &ctrlpb.Reply_Hello{Hello: &ctrlpb.HelloReply{
		Version: min(h.Version, Version), Server: "iwarpd " + version, Workers: uint32(n), Client: c.id, Device: attrs[0], Devices: attrs,
	}}
	return fds, nil
}

// newBells creates the doorbell pages of a client and the descriptors to send.
func newBells(workers, bits int) (bells []*shm.Doorbells, fds []int, err error) {
	defer func() {
		if err != nil {
			seqpacket.CloseAll(fds)
			closeBells(bells)
		}
	}()
	for range workers {
		b, err := shm.CreateDoorbells(bits)
		if err != nil {
			return bells, fds, err
		}
		bells = append(bells, b)
		fds = append(fds, b.TakeFD())
		wake, err := seqpacket.Dup(b.WakeFD())
		if err != nil {
			return bells, fds, shm.Limit(err)
		}
		fds = append(fds, wake)
	}
	return bells, fds, nil
}

func closeBells(bells []*shm.Doorbells) {
	for _, b := range bells {
		_ = b.Free()
	}
}

// queue queues a message and takes ownership of its descriptors. It cuts off a client that does not read its
// messages.
func (c *session) queue(m *outMessage) error {
	err := c.out.put(m)
	if err != nil {
		if c.cut.CompareAndSwap(false, true) {
			c.srv.counters.cutOff.Add(1)
			c.logCut(err)
		}
		c.shutdown()
	}
	return err
}

// event queues an event.
func (c *session) event(e *ctrlpb.Event) {
	if c.dead {
		return
	}
	b, err := proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Event{Event: e}})
	if err != nil {
		return
	}
	_ = c.queue(&outMessage{b: b})
}

func values[K comparable, V any](m map[K]V) []V {
	return slices.Collect(maps.Values(m))
}

// clip truncates s to at most n bytes, at a character boundary.
func clip(s string, n int) string {
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return s
}
