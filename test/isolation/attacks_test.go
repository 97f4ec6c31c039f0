package isolation

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// raw is a client that speaks the protocol by hand and can send any descriptors.
type raw struct {
	*seqpacket.Conn
	fd    int
	id    uint64
	hello *ctrlpb.HelloReply
	bells []int // doorbell pages and wake-up descriptors, alternating
}

// dial connects without a greeting.
func dial(path string) (*raw, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, err
	}
	keep, err := unix.Dup(fd)
	if err != nil {
		return nil, err
	}
	c, err := seqpacket.FromFD(fd)
	return &raw{Conn: c, fd: keep}, err
}

func (r *raw) close() {
	r.Close()
	unix.Close(r.fd)
	seqpacket.CloseAll(r.bells)
}

// greet connects and says Hello.
func greet(path string) (*raw, error) {
	r, err := dial(path)
	if err != nil {
		return nil, err
	}
	rep, fds, err := r.do(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	if err == nil && rep.Error != nil {
		err = errors.New(rep.Error.Text)
	}
	if err != nil {
		r.close()
		return nil, err
	}
	r.hello, r.bells = rep.GetHello(), fds
	return r, nil
}

// do sends a request and reads messages until its reply.
func (r *raw) do(req *ctrlpb.Request, fds ...int) (*ctrlpb.Reply, []int, error) {
	r.id++
	req.Id = r.id
	b, err := proto.Marshal(req)
	if err != nil {
		return nil, nil, err
	}
	if err := r.Write(b, fds); err != nil {
		return nil, nil, err
	}
	for {
		m, got, err := r.next()
		if err != nil {
			return nil, nil, err
		}
		if rep := m.GetReply(); rep.GetId() == r.id {
			return rep, got, nil
		}
		seqpacket.CloseAll(got)
	}
}

func (r *raw) next() (*ctrlpb.Message, []int, error) {
	b, fds, err := r.Read(seqpacket.MaxFDs)
	if err != nil {
		return nil, nil, err
	}
	m := new(ctrlpb.Message)
	return m, fds, proto.Unmarshal(b, m)
}

// must is do for requests that must succeed.
func (r *raw) must(req *ctrlpb.Request, fds ...int) (*ctrlpb.Reply, []int, error) {
	rep, got, err := r.do(req, fds...)
	if err == nil && rep.Error != nil {
		err = fmt.Errorf("%T: %s", req.Body, rep.Error.Text)
	}
	return rep, got, err
}

// An attack returns nil if it was refused or its client was disconnected, as it must be.
type attack struct {
	name string
	run  func(*foe) error
}

// foe is the attacking client.
type foe struct {
	*job
	rng *rand.Rand
	r   *raw // greeted; a new one for each attack
}

var errCarriedOut = errors.New("it was carried out")

// refused returns an attack whose request must fail with one of codes.
func refused(body *ctrlpb.Request, codes ...ctrlpb.Code) func(*foe) error {
	return func(f *foe) error {
		rep, fds, err := f.r.do(proto.CloneOf(body))
		seqpacket.CloseAll(fds)
		if err != nil {
			return fmt.Errorf("cut off instead of refused: %w", err)
		}
		for _, c := range codes {
			if rep.Error.GetCode() == c && len(rep.Error.Text) > 10 {
				return nil
			}
		}
		if rep.Error == nil {
			return errCarriedOut
		}
		return fmt.Errorf("refused as %v: %s", rep.Error.Code, rep.Error.Text)
	}
}

// cutOff returns an attack that sends bytes, after which the daemon must disconnect the client.
func cutOff(b []byte, fds ...int) func(*foe) error {
	return func(f *foe) error {
		if err := unix.Sendmsg(f.r.fd, b, unix.UnixRights(fds...), nil, 0); err != nil {
			return nil // the kernel refused to send it
		}
		return f.ended()
	}
}

// ended waits until the daemon has disconnected the client.
func (f *foe) ended() error {
	end := time.AfterFunc(patience, func() { _ = unix.Shutdown(f.r.fd, unix.SHUT_RDWR) })
	for {
		m, fds, err := f.r.next()
		seqpacket.CloseAll(fds)
		if err != nil {
			if !end.Stop() {
				return fmt.Errorf("not cut off within %v", patience)
			}
			return nil
		}
		if why := m.GetEvent().GetCutOff(); why != nil && len(why.Error.GetText()) < 10 {
			return fmt.Errorf("cut off without a reason: %v", why)
		}
	}
}

const (
	noObject = ctrlpb.Code_CODE_NO_OBJECT
	invalid  = ctrlpb.Code_CODE_INVALID
	noPerm   = ctrlpb.Code_CODE_PERMISSION
	noQuota  = ctrlpb.Code_CODE_QUOTA
)

// captures returns the code with which a capture is refused: code, or over kernel sockets, where nobody can
// capture, that of a bad state.
func captures(code ctrlpb.Code) ctrlpb.Code {
	if testenv.Sockets() {
		return ctrlpb.Code_CODE_STATE
	}
	return code
}

// everyHandle tries a request with each handle that the victim may have; none of them is the attacker's.
func everyHandle(make func(h uint32) *ctrlpb.Request, codes ...ctrlpb.Code) func(*foe) error {
	return func(f *foe) error {
		for _, h := range f.Victim.Handles {
			if err := refused(make(h), codes...)(f); err != nil {
				return fmt.Errorf("handle %d: %w", h, err)
			}
		}
		return nil
	}
}

// own is the attacker's set of objects.
type own struct {
	pd, cq, qp, bit uint32
	sq, rq, ring    int // memfds
	worker          uint32
}

func sq(o *own) int   { return o.sq }
func rq(o *own) int   { return o.rq }
func ring(o *own) int { return o.ring }

// objects creates a PD, a CQ and a QP, and connects the QP if connect is set.
func (f *foe) objects(connect bool) (o own, err error) {
	rep, _, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	if err != nil {
		return o, err
	}
	o.pd = rep.GetPd().Pd
	rep, fds, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 64}}})
	if err != nil {
		return o, err
	}
	o.cq, o.ring = rep.GetCq().Cq, fds[0]
	rep, fds, err = f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_CreateQp{CreateQp: &ctrlpb.CreateQP{
		Pd: o.pd, SendCq: o.cq, RecvCq: o.cq, SqDepth: 16, RqDepth: 16, MaxSge: 4, MaxInline: 64,
	}}})
	if err != nil {
		return o, err
	}
	o.qp, o.bit, o.sq, o.rq = rep.GetQp().Qp, rep.GetQp().Doorbell, fds[0], fds[1]
	if !connect {
		return o, nil
	}
	// The sink sends a message; without a buffer for it the connection would end.
	if err := f.receive(&o); err != nil {
		return o, err
	}
	if _, _, err = f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_Connect{Connect: &ctrlpb.Connect{Qp: o.qp, Remote: f.Peer}}}); err != nil {
		return o, err
	}
	for {
		m, _, err := f.r.next()
		if err != nil {
			return o, err
		}
		if e := m.GetEvent().GetEstablished(); e != nil {
			o.worker = e.Worker
			return o, nil
		}
		if e := m.GetEvent().GetConnectFailed(); e != nil {
			return o, errors.New(e.Error.GetText())
		}
	}
}

// receive posts a buffer in the attacker's own memory.
func (f *foe) receive(o *own) error {
	const size = 4096
	fd, err := memfd(size, 0)()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	rep, _, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_RegisterMr{RegisterMr: &ctrlpb.RegisterMR{
		Pd: o.pd, Length: size, Access: uint32(verbs.LocalWrite),
	}}}, fd)
	if err != nil {
		return err
	}
	rp, err := shm.MapRQ(o.rq)
	if err != nil {
		return err
	}
	defer rp.Close()
	return rp.Post(&iwarp.RecvWR{SGEs: []iwarp.SGE{{Len: size, LKey: rep.GetMr().Lkey}}})
}

// mapped maps a memfd that the daemon created.
func mapped(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	return unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// mapping creates objects of f, with a connection, and maps one of their memfds.
func (f *foe) mapping(which func(*own) int) (o own, m []byte, err error) {
	if o, err = f.objects(true); err == nil {
		m, err = mapped(which(&o))
	}
	return o, m, err
}

func word(m []byte, off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&m[off])) }

// ring rings the doorbell of a QP and always wakes the worker.
func (f *foe) ring(o *own) error {
	m, err := mapped(f.r.bells[2*o.worker])
	if err != nil {
		return err
	}
	defer unix.Munmap(m)
	at := shm.HeaderSize + shm.BellBits + 8*int(o.bit/64)
	(*atomic.Uint64)(unsafe.Pointer(&m[at])).Or(1 << (o.bit % 64))
	shm.Wake(f.r.bells[2*o.worker+1])
	return nil
}

// scribble writes one word of a ring and rings the doorbell; the daemon must then disconnect the client.
func scribble(which func(*own) int, off int, v uint32) func(*foe) error {
	return func(f *foe) error {
		o, m, err := f.mapping(which)
		if err != nil {
			return err
		}
		defer unix.Munmap(m)
		word(m, off).Store(v)
		if err := f.ring(&o); err != nil {
			return err
		}
		return f.ended()
	}
}

// movesBack moves the producer index of a shared receive queue back between messages to its queue pairs: behind receives that
// the daemon has seen, but not behind those that it has taken.
func movesBack(f *foe) error {
	const posted = 4 // what the daemon sees at a time
	o, err := f.objects(false)
	if err != nil {
		return err
	}
	rep, fds, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: o.pd, Depth: 4 * posted, MaxSge: 1}}})
	if err != nil {
		return err
	}
	srq := rep.GetSrq().Srq
	o.rq = fds[0]
	m, err := mapped(o.rq)
	if err != nil {
		return err
	}
	defer unix.Munmap(m)
	for range posted {
		if err := f.receive(&o); err != nil {
			return err
		}
	}
	for taken := uint32(1); taken <= posted+1; taken++ {
		rep, _, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_CreateQp{CreateQp: &ctrlpb.CreateQP{
			Pd: o.pd, SendCq: o.cq, RecvCq: o.cq, SqDepth: 1, RqDepth: 1, MaxSge: 1, Srq: srq,
		}}})
		if err != nil {
			return err
		}
		if _, _, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_Connect{Connect: &ctrlpb.Connect{Qp: rep.GetQp().Qp, Remote: f.Peer}}}); err != nil {
			return err
		}
		if taken > posted {
			break
		}
		if err := within("a message", func() (bool, error) { return word(m, shm.HeaderSize+shm.RingConsumer).Load() == taken, nil }); err != nil {
			return err
		}
		word(m, shm.HeaderSize+shm.RingProducer).Store(2)
	}
	return f.ended()
}

// wqe posts a hand-made work request; it must end the attacker's QP or disconnect the attacker, and affect nobody
// else.
func wqe(fill func(f *foe, e []byte)) func(*foe) error {
	return func(f *foe) error {
		o, m, err := f.mapping(sq)
		if err != nil {
			return err
		}
		defer unix.Munmap(m)
		fill(f, m[shm.HeaderSize+shm.RingEntries:][:128])
		word(m, shm.HeaderSize+shm.RingProducer).Store(1)
		if err := f.ring(&o); err != nil {
			return err
		}
		cq, err := shm.MapCQ(o.ring)
		if err != nil {
			return err
		}
		defer cq.Close()
		wcs := make([]iwarp.WC, 8)
		err = within("a completion", func() (bool, error) {
			for _, wc := range wcs[:cq.Poll(wcs)] {
				if wc.IsRecv() {
					continue
				}
				if wc.Status == iwarp.WCSuccess {
					return false, errCarriedOut
				}
				return true, nil
			}
			return false, nil
		})
		if err != nil {
			rep, _, e := f.r.do(&ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{Qp: o.qp}}})
			return errors.Join(fmt.Errorf("%w: %v", err, rep.GetQps()), e)
		}
		return nil
	}
}

// region tries to register an unsuitable descriptor, which must be refused.
func region(fd func() (int, error), r *ctrlpb.RegisterMR, codes ...ctrlpb.Code) func(*foe) error {
	return func(f *foe) error {
		o, err := f.objects(false)
		if err != nil {
			return err
		}
		n, err := fd()
		if err != nil {
			return err
		}
		defer unix.Close(n)
		req := proto.CloneOf(r)
		req.Pd = o.pd
		rep, _, err := f.r.do(&ctrlpb.Request{Body: &ctrlpb.Request_RegisterMr{RegisterMr: req}}, n)
		if err != nil {
			return err
		}
		if slices.Contains(codes, rep.Error.GetCode()) {
			return nil
		}
		if rep.Error == nil {
			return errCarriedOut
		}
		return fmt.Errorf("refused as %v: %s", rep.Error.Code, rep.Error.Text)
	}
}

func memfd(size int64, seals int) func() (int, error) {
	return func() (int, error) {
		fd, err := unix.MemfdCreate("attack", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
		if err == nil {
			err = unix.Fallocate(fd, 0, 0, size)
		}
		if err == nil && seals != 0 {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		return fd, err
	}
}

func opened(name string, flags int) func() (int, error) {
	return func() (int, error) { return unix.Open(name, flags|unix.O_CLOEXEC, 0o600) }
}

// struck connects to the peer's service that accesses memory by a guessed STag. A Terminate must end that connection.
func struck(read bool, guess func(f *foe, i int) (rkey uint32, addr uint64)) func(*foe) error {
	return func(f *foe) error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		d, err := iwarp.Open(ctx, f.Socket)
		if err != nil {
			return err
		}
		defer d.Close()
		for i := range 4 {
			rkey, addr := guess(f, i)
			c, err := d.Dial(ctx, f.Strike, &iwarp.Config{PrivateData: marshal(map[string]any{"RKey": rkey, "Addr": addr, "Len": 64, "Read": read})})
			if err != nil {
				return err
			}
			select {
			case <-c.QP().Done():
			case <-ctx.Done():
				return errors.New("the connection did not end")
			}
			var te *iwarp.TerminateError
			if !errors.As(c.QP().Err(), &te) {
				return fmt.Errorf("STag %#x: ended by %w", rkey, c.QP().Err())
			}
			c.Abort()
		}
		return nil
	}
}

// empty requests a list that must not contain the victim.
func empty(body *ctrlpb.Request, count func(*ctrlpb.Reply) int) func(*foe) error {
	return func(f *foe) error {
		rep, _, err := f.r.must(proto.CloneOf(body))
		if err != nil {
			return err
		}
		if n := count(rep); n > 0 {
			return fmt.Errorf("%d objects are shown", n)
		}
		return nil
	}
}

// untilQuota creates objects until the daemon reports that a quota is exceeded.
func untilQuota(make func(f *foe, o *own) *ctrlpb.Request) func(*foe) error {
	return func(f *foe) error {
		const most = 100_000
		o, err := f.objects(false)
		if err != nil {
			return err
		}
		for range most {
			rep, fds, err := f.r.do(make(f, &o))
			seqpacket.CloseAll(fds)
			if err != nil {
				return err
			}
			if rep.Error != nil {
				if rep.Error.Code != noQuota {
					return fmt.Errorf("refused as %v: %s", rep.Error.Code, rep.Error.Text)
				}
				return nil
			}
		}
		return fmt.Errorf("%d objects", most)
	}
}

// attacker runs every attack and reports each in one line.
func attacker(j *job, in *bufio.Reader) error {
	f := &foe{job: j, rng: rand.New(rand.NewPCG(j.Seed, 1))}
	for {
		if _, err := in.ReadString('\n'); err != nil {
			return nil
		}
		for _, a := range attacks(j) {
			if only := os.Getenv("ATTACK"); only != "" && !strings.Contains(a.name, only) {
				continue
			}
			report := map[string]string{"Attack": a.name}
			err := f.strikeOnce(&a)
			if err != nil {
				report["Error"] = err.Error()
			}
			fmt.Println(string(marshal(report)))
		}
		fmt.Println(`{"Attack":""}`)
	}
}

// strikeOnce runs one attack and checks that the daemon is alive.
func (f *foe) strikeOnce(a *attack) (err error) {
	if f.r, err = greet(f.Socket); err != nil {
		return fmt.Errorf("the daemon does not greet: %w", err)
	}
	err = within("what the attack before had is given back", func() (bool, error) {
		rep, _, err := f.r.must(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}})
		if err != nil {
			return false, fmt.Errorf("the daemon does not answer: %w", err)
		}
		return rep.GetStatus().Clients == 1, nil
	})
	if err != nil {
		return err
	}
	fds := openFDs()
	err = a.run(f)
	f.r.close()
	closeFrom(fds)
	if err != nil {
		return err
	}
	// The quota of clients may be exhausted until the last of them are gone.
	return within("the daemon greets afterwards", func() (bool, error) {
		r, err := greet(f.Socket)
		if err == nil {
			r.close()
		}
		return err == nil, nil
	})
}

// openFDs returns the highest descriptor in use.
func openFDs() int {
	fd, err := unix.Dup(0)
	if err != nil {
		return 1 << 10
	}
	unix.Close(fd)
	return fd
}

// closeFrom closes the memfds that an attack has left, which are all above the earlier descriptors, and leaves those
// of the runtime.
func closeFrom(from int) {
	for fd := from; fd < from+4096; fd++ {
		name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err == nil && len(name) > 7 && name[:7] == "/memfd:" {
			unix.Close(fd)
		}
	}
}
