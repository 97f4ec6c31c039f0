package iwarp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// protocolVersion is the supported version of the control API.
const protocolVersion = 1

// Device is a connection to a daemon. It is one client of the daemon and owns the
// objects created through it.
type Device struct {
	conn     *seqpacket.Conn
	attrs    []DeviceAttr               // one for each of the daemon's interfaces
	use      atomic.Pointer[DeviceAttr] // one of attrs, or nil; see Use
	progress Progress                   // nil if a daemon runs the engine

	ringers []*shm.DoorbellRinger
	wakes   []int

	wmu    sync.Mutex // guards writes to conn
	nextID atomic.Uint64
	async  chan *AsyncEvent
	done   chan struct{} // closed when the daemon has ended, or Close was called
	drains chan struct{} // closed when the daemon announces that it stops

	mu           sync.Mutex
	closed       bool
	err          error
	waiting      map[uint64]chan answer
	qps          map[uint32]*QP
	listens      map[uint32]*Listener
	opening      int                      // Listen calls without a reply so far
	early        []*ctrlpb.ConnectRequest // requests that arrived meanwhile
	reqs         map[uint32]*ConnRequest
	streams      map[uint32]*Stream
	earlyStreams []earlyStream // as early
	drainBy      time.Time     // when a draining daemon ends connections
	cqs          map[*CQ]struct{}
	channels     map[*CompChannel]struct{}
	srqs         map[uint32]*SRQ
}

// answer is the reply to a request, with its descriptors.
type answer struct {
	reply *ctrlpb.Reply
	fds   []int
	lost  bool // its descriptors were lost for lack of free ones
	err   error
}

// Open connects to the daemon that listens on the Unix socket with that path. An empty path
// means $IWARPD_SOCKET or, if that is empty, DefaultSocket.
func Open(ctx context.Context, socket string) (*Device, error) {
	c, err := seqpacket.Dial(ctx, cmp.Or(socket, os.Getenv("IWARPD_SOCKET"), DefaultSocket))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("iwarp: %w: is iwarpd running (systemctl status iwarpd)?", err)
		}
		return nil, fmt.Errorf("iwarp: %w", shm.Limit(err))
	}
	return newDevice(ctx, c, nil)
}

// reopenEvery is the interval between two attempts of OpenWait.
const reopenEvery = 200 * time.Millisecond

// OpenWait is Open for programs that survive a restart of the daemon: it waits until ctx is
// done for a daemon that is not running yet, or is restarting. Errors that waiting cannot fix
// are returned at once, and missing permission after a second attempt, since a daemon that starts
// permits access a moment after it has made the socket. After ErrDaemonGone a program closes its
// Device, calls OpenWait, and creates its objects again.
func OpenWait(ctx context.Context, socket string) (*Device, error) {
	tick := time.NewTicker(reopenEvery)
	defer tick.Stop()
	var last error
	for denied := false; ; {
		d, err := Open(ctx, socket)
		before := denied
		denied = errors.Is(err, unix.EACCES)
		switch {
		case err == nil:
			return d, nil
		case denied && !before:
		case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, ErrDaemonGone):
		case errors.Is(err, unix.EAGAIN): // more programs connect at once than its socket holds
		case ctx.Err() != nil && last != nil: // which says more
			err = last
		default:
			return nil, err
		}
		last = err
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (last: %w)", ctx.Err(), err)
		}
	}
}

// Progress drives an engine in the process of its application.
type Progress interface {
	// Turn lets the engine work once, and returns the amount of work found.
	Turn() int
	// Rest says that the caller is about to sleep, so that the engine must run by itself until
	// the next Turn.
	Rest()
}

// OpenFD is Open for a connected SOCK_SEQPACKET descriptor, which it takes over. If progress is
// not nil, the Device drives the engine by it while it waits.
func OpenFD(ctx context.Context, fd int, progress Progress) (*Device, error) {
	c, err := seqpacket.FromFD(fd)
	if err != nil {
		return nil, fmt.Errorf("iwarp: %w", shm.Limit(err))
	}
	return newDevice(ctx, c, progress)
}

func newDevice(ctx context.Context, c *seqpacket.Conn, progress Progress) (*Device, error) {
	d := &Device{
		conn: c, progress: progress, done: make(chan struct{}), drains: make(chan struct{}), async: make(chan *AsyncEvent, maxAsync), srqs: make(map[uint32]*SRQ), streams: make(map[uint32]*Stream),
		waiting: make(map[uint64]chan answer), qps: make(map[uint32]*QP), listens: make(map[uint32]*Listener),
		reqs: make(map[uint32]*ConnRequest), cqs: make(map[*CQ]struct{}), channels: make(map[*CompChannel]struct{}),
	}
	go d.readLoop()
	if err := d.hello(ctx); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// hello negotiates the version and maps the doorbell pages.
func (d *Device) hello(ctx context.Context) error {
	a, err := d.call(ctx, "hello", &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{
		Version: protocolVersion, MinVersion: protocolVersion, Name: filepath.Base(os.Args[0]),
	}}}, -1)
	if err != nil {
		return err
	}
	h := a.reply.GetHello()
	if h == nil || len(a.fds) != 2*int(h.Workers) {
		seqpacket.CloseAll(a.fds)
		return fmt.Errorf("%w: hello: invalid reply from the daemon", ErrVersion)
	}
	for i := 0; i < len(a.fds); i += 2 {
		page, wake := a.fds[i], a.fds[i+1]
		d.wakes = append(d.wakes, wake)
		if err == nil {
			var r *shm.DoorbellRinger
			if r, err = shm.MapDoorbells(page, wake); err == nil {
				d.ringers = append(d.ringers, r)
			}
		}
		closeFD(page)
	}
	if err != nil {
		return fmt.Errorf("iwarp: hello: %w", err)
	}
	for _, p := range devices(h.GetDevice(), h.GetDevices()) {
		d.attrs = append(d.attrs, attrFromPB(h, p))
	}
	return nil
}

// devices returns all, the interfaces of a daemon, of which an old daemon has only the first.
func devices(first *ctrlpb.DeviceAttr, all []*ctrlpb.DeviceAttr) []*ctrlpb.DeviceAttr {
	if len(all) == 0 {
		return []*ctrlpb.DeviceAttr{first}
	}
	return all
}

func attrFromPB(h *ctrlpb.HelloReply, p *ctrlpb.DeviceAttr) DeviceAttr {
	a := DeviceAttr{
		Interface: p.GetInterface(), Down: p.GetDown(), MTU: int(p.GetMtu()), Server: h.Server, Version: int(h.Version), Client: h.Client, Workers: int(h.Workers),
		MaxQP: int(p.GetMaxQp()), MaxCQ: int(p.GetMaxCq()), MaxPD: int(p.GetMaxPd()), MaxMR: int(p.GetMaxMr()),
		MaxMW: int(p.GetMaxMw()), MaxListen: int(p.GetMaxListen()), MaxMRSize: p.GetMaxMrSize(), MaxRegistered: p.GetMaxRegistered(),
		MaxQPWR: int(p.GetMaxQpWr()), MaxCQE: int(p.GetMaxCqe()), MaxSGE: int(p.GetMaxSge()), MaxInline: int(p.GetMaxInline()),
		MaxPrivateData: int(p.GetMaxPrivateData()), MaxIRD: int(p.GetMaxIrd()), MaxORD: int(p.GetMaxOrd()),
	}
	for _, s := range p.GetAddresses() {
		if ad, err := netip.ParseAddr(s); err == nil {
			a.Addrs = append(a.Addrs, ad)
		}
	}
	return a
}

// Attr returns the attributes of the daemon and the limits of this client. The interface is
// that of Use, or else the first one.
func (d *Device) Attr() DeviceAttr {
	if a := d.use.Load(); a != nil {
		return *a
	}
	return d.attrs[0]
}

// Interfaces returns the attributes of each interface that the daemon serves, as they
// were when the Device was opened.
func (d *Device) Interfaces() []DeviceAttr { return slices.Clone(d.attrs) }

// Use makes later connections and listeners use one interface of the daemon. Without it a
// connection uses the interface of the host's route to the peer, and a listener listens on all
// interfaces. Use("") restores this. Regions, queue pairs and completion queues do not belong
// to an interface.
func (d *Device) Use(name string) error {
	if name == "" {
		d.use.Store(nil)
		return nil
	}
	var names []string
	for i := range d.attrs {
		if d.attrs[i].Interface == name {
			d.use.Store(&d.attrs[i])
			return nil
		}
		names = append(names, d.attrs[i].Interface)
	}
	return fmt.Errorf("iwarp: %q is not an interface of the daemon: choose from %s", name, strings.Join(names, ", "))
}

// device returns the name of the interface of Use.
func (d *Device) device() string {
	if a := d.use.Load(); a != nil {
		return a.Interface
	}
	return ""
}

// Received returns a number that changes when data of a peer has been placed for a queue pair of the device, also where that makes no
// completion, as with RDMA Writes. With a daemon older than this method it never changes.
func (d *Device) Received() uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed { // Close unmaps the pages
		return 0
	}
	var n uint32
	for _, r := range d.ringers {
		n += r.Received()
	}
	return n
}

// Done returns a channel that is closed when the Device is closed or the daemon ends
// the connection.
func (d *Device) Done() <-chan struct{} { return d.done }

// Draining returns a channel that is closed when the daemon announces that it will stop, for an
// upgrade for example. Connections continue until DrainDeadline, but Listen, Dial and Connect
// fail with ErrDraining. So do Accept and Request of a Listener after they have returned all
// earlier requests. A program finishes its transfers, closes the Device and calls OpenWait. The
// daemon exits as soon as no client has connections. A daemon that is killed announces nothing.
func (d *Device) Draining() <-chan struct{} { return d.drains }

// DrainDeadline returns when the draining daemon will end the remaining connections, or the
// zero Time if it is not draining.
func (d *Device) DrainDeadline() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.drainBy
}

// draining handles a Draining event.
func (d *Device) draining(e *ctrlpb.Draining) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.drainBy.IsZero() {
		d.drainBy = time.Now().Add(time.Duration(e.TimeoutMs) * time.Millisecond)
		close(d.drains)
	}
}

// Err returns the reason why Done is closed, or nil if it is not closed.
func (d *Device) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// Close disconnects from the daemon, which destroys all objects of this client. Memory of Alloc
// stays mapped until its MR is closed.
func (d *Device) Close() error {
	d.fail(ErrClosed)
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	qps, cqs, srqs, channels := d.qps, d.cqs, d.srqs, d.channels
	d.qps, d.cqs, d.srqs, d.channels = map[uint32]*QP{}, map[*CQ]struct{}{}, map[uint32]*SRQ{}, map[*CompChannel]struct{}{}
	d.mu.Unlock()
	for _, q := range qps {
		q.unmap()
	}
	for q := range cqs {
		q.unmap()
	}
	for ch := range channels {
		ch.end()
	}
	for _, q := range srqs {
		q.unmap()
	}
	for _, r := range d.ringers {
		r.Close()
	}
	seqpacket.CloseAll(d.wakes)
	return nil
}

// fail ends all calls that wait for the daemon.
func (d *Device) fail(err error) {
	defer d.conn.Close() // after err is set, since the reader calls fail too
	d.mu.Lock()
	if d.err != nil {
		d.mu.Unlock()
		return
	}
	d.err = err
	waiting := d.waiting
	d.waiting = nil
	qps := slices.Collect(maps.Values(d.qps))
	for _, r := range d.reqs {
		r.end()
	}
	close(d.done)
	d.mu.Unlock()
	for _, ch := range waiting {
		ch <- answer{err: err}
	}
	for _, q := range qps {
		q.over(err)
	}
}

// gone returns ErrDaemonGone, with the error of reading from the daemon unless it says no more than that.
func gone(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
		return ErrDaemonGone
	}
	return fmt.Errorf("%w: it cannot be read from: %w", ErrDaemonGone, err)
}

// readLoop passes replies to the calls that wait for them, and events to their objects.
func (d *Device) readLoop() {
	for {
		b, fds, err := d.conn.Read(seqpacket.MaxFDs)
		lost := errors.Is(err, seqpacket.ErrFilesLost)
		if err != nil && !lost {
			seqpacket.CloseAll(fds)
			d.fail(gone(err))
			return
		}
		if lost {
			seqpacket.CloseAll(fds)
			fds = nil
		}
		var m ctrlpb.Message
		if err := proto.Unmarshal(b, &m); err != nil {
			seqpacket.CloseAll(fds)
			d.fail(fmt.Errorf("%w: it sent an invalid message: %w", ErrDaemonGone, err))
			return
		}
		if r := m.GetReply(); r != nil {
			if ch := d.forget(r.Id); ch != nil {
				ch <- answer{reply: r, fds: fds, lost: lost}
				continue
			}
		}
		seqpacket.CloseAll(fds)
		d.giveBack(m.GetReply()) // its caller did not wait
		if e := m.GetEvent(); e != nil {
			d.event(e)
		}
	}
}

// forget makes no call wait for the reply to request id, and returns the channel of the call that did, or nil.
func (d *Device) forget(id uint64) chan answer {
	d.mu.Lock()
	defer d.mu.Unlock()
	ch := d.waiting[id]
	delete(d.waiting, id)
	return ch
}

// call sends a request, with the descriptor fd unless it is negative, and waits for its reply.
// If ctx ends first, the object that the request creates is destroyed when the reply arrives.
func (d *Device) call(ctx context.Context, op string, req *ctrlpb.Request, fd int) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, fmt.Errorf("iwarp: %s: %w", op, err)
	}
	req.Id = d.nextID.Add(1)
	b, err := proto.Marshal(req)
	if err != nil {
		return answer{}, fmt.Errorf("iwarp: %s: %w", op, err)
	}
	if len(b) > seqpacket.MaxPacket {
		return answer{}, &Error{op, ctrlpb.Code_CODE_INVALID, "request too long"}
	}
	ch := make(chan answer, 1)
	d.mu.Lock()
	if d.err != nil {
		err := d.err
		d.mu.Unlock()
		return answer{}, fmt.Errorf("iwarp: %s: %w", op, err)
	}
	d.waiting[req.Id] = ch
	d.mu.Unlock()

	var fds []int
	if fd >= 0 {
		fds = []int{fd}
	}
	err = whenBuffers(ctx, func() error {
		d.wmu.Lock()
		defer d.wmu.Unlock()
		return d.conn.Write(b, fds)
	})
	switch {
	case err == nil:
	case local(err):
		d.forget(req.Id)
		return answer{}, fmt.Errorf("iwarp: %s: %w", op, err)
	default:
		d.conn.Shutdown() // the reader fails once it has read what the daemon said last
	}
	a, err := wait(ctx, d, ch)
	if err != nil {
		if d.forget(req.Id) == nil { // the reply has arrived
			a := <-ch
			seqpacket.CloseAll(a.fds)
			d.giveBack(a.reply)
		}
		return answer{}, fmt.Errorf("iwarp: %s: %w", op, err)
	}
	if a.err != nil {
		return a, fmt.Errorf("iwarp: %s: %w", op, a.err)
	}
	if a.reply.Error != nil {
		seqpacket.CloseAll(a.fds)
		return answer{}, fromPB(op, a.reply.Error)
	}
	if a.lost {
		err := fmt.Errorf("iwarp: %s: %w", op, shm.Limit(unix.EMFILE))
		if req.GetResizeCq() != nil { // completions would be lost
			d.fail(err)
		} else {
			d.giveBack(a.reply)
		}
		return answer{}, err
	}
	return a, nil
}

// mostPauses is the number of milliseconds for which a request waits for buffers of the kernel.
const mostPauses = 5000

// whenBuffers calls send until the kernel has buffers for its packet, for at most about 5 s or until ctx is done. Most
// callers that destroy something cannot report that it is still there, nor try again later. But the memory may be what
// the caller would free next, so that it waits no more in the end.
func whenBuffers(ctx context.Context, send func() error) error {
	for pauses := 0; ; pauses++ {
		err := send()
		switch {
		case !lacksBuffers(err) || pauses == mostPauses:
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		time.Sleep(time.Millisecond)
	}
}

func lacksBuffers(err error) bool { return errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) }

// local reports whether a request was not sent because of an error on this side: an invalid
// descriptor, too many in flight, or no buffers.
func local(err error) bool {
	return lacksBuffers(err) || errors.Is(err, unix.EBADF) || errors.Is(err, unix.ETOOMANYREFS)
}

// giveBack destroys the object of a reply, which may be nil, that cannot be used. It does not wait.
func (d *Device) giveBack(r *ctrlpb.Reply) {
	var req ctrlpb.Request
	switch b := r.GetBody().(type) {
	case *ctrlpb.Reply_Pd:
		req.Body = &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: b.Pd.Pd}}
	case *ctrlpb.Reply_Mr:
		req.Body = &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: b.Mr.Mr}}
	case *ctrlpb.Reply_Mw:
		req.Body = &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: b.Mw.Mw}}
	case *ctrlpb.Reply_Listen:
		req.Body = &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: b.Listen.Listen}}
	case *ctrlpb.Reply_Cq:
		req.Body = &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: b.Cq.Cq}}
	case *ctrlpb.Reply_Channel:
		req.Body = &ctrlpb.Request_DestroyChannel{DestroyChannel: &ctrlpb.DestroyChannel{Channel: b.Channel.Channel}}
	case *ctrlpb.Reply_Srq:
		req.Body = &ctrlpb.Request_DestroySrq{DestroySrq: &ctrlpb.DestroySRQ{Srq: b.Srq.Srq}}
	case *ctrlpb.Reply_Qp:
		req.Body = &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: b.Qp.Qp}}
	default:
		return
	}
	go func() { _ = d.do(context.Background(), "give back", &req) }()
}

// do is call for requests whose reply has no content.
func (d *Device) do(ctx context.Context, op string, req *ctrlpb.Request) error {
	a, err := d.call(ctx, op, req, -1)
	seqpacket.CloseAll(a.fds)
	return err
}

// wait receives from ch. If the engine is in this process, it drives the engine meanwhile.
func wait[T any](ctx context.Context, d *Device, ch <-chan T) (v T, err error) {
	if d.progress != nil {
		for range progressTurns {
			select {
			case v = <-ch:
				return v, nil
			case <-ctx.Done():
				return v, ctx.Err()
			default:
			}
			if d.progress.Turn() == 0 {
				runtime.Gosched()
			}
		}
	}
	d.rest()
	select {
	case v = <-ch:
		return v, nil
	case <-ctx.Done():
		return v, ctx.Err()
	}
}

// rest says that the caller is about to sleep.
func (d *Device) rest() {
	if d.progress != nil {
		d.progress.Rest()
	}
}

// progressTurns is the number of turns for which a wait drives the engine itself. After that
// the engine's own goroutine takes over.
const progressTurns = 2000

// ring notifies worker that the QP with that doorbell has work.
func (d *Device) ring(worker int32, bit int) {
	if int(worker) < len(d.ringers) {
		d.ringers[worker].Ring(bit)
	}
}
