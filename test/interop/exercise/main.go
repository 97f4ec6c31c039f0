// Exercise is the other side of test/sctp-peer/peer, in its RDMAP mode: it tells the
// peer by Sends what to do, and verifies every byte that comes of it.
//
//	exercise -socket /run/iwarpd/iwarpd.sock -transport sctp -connect 10.97.3.2:7175 data
//	exercise -socket /run/iwarpd/iwarpd.sock -transport sctp -listen 10.97.3.1:7174 data
//
// What it does is named by the last argument; see cases. One line tells the outcome, and
// the exit status is 1 if it is another than asked for.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// The peer's memory: see rdmap.h there.
const (
	memSize = 4 << 20
	memSTag = 0x00a1b2c3
	memBase = 0x100000
)

const (
	depth   = 256   // of our receives
	maxSend = 70000 // bytes of a message to us
)

var be = binary.BigEndian

type run struct {
	d       *iwarp.Device
	cfg     *iwarp.Config
	listen  *iwarp.Listener
	connect string
	mtu     int
	idle    time.Duration
	size    int // of the largest transfer
	rounds  int
	rng     *rand.Rand
}

var cases = map[string]func(context.Context, *run) (string, error){
	"data":      data,
	"many":      manyMessages,
	"fragments": fragments,
	"both":      func(ctx context.Context, r *run) (string, error) { return together(ctx, r) },
	"idle":      idle,
	"sessions":  sessions,
	"shared":    shared,
	"reject":    reject,    // the peer does
	"rejecting": rejecting, // we do
	"abort":     abort,     // ours
	"aborted":   ends("A"),
	"shutdown":  ends("S"),
	"terminate": ends("T"),
	"ordered":   ends("o"),
	"ppid":      ends("p"),
	"stag":      ends("b"),
	"far":       ends("n"),
	"violate":   violate, // a Write of ours where the peer does not allow it
	"restart":   restart,
	"left":      left, // until whoever runs it ends the daemon
}

func main() {
	socket := flag.String("socket", "", "the daemon's")
	transport := flag.String("transport", "sctp", "sctp, sctp-udp or sctp-draft")
	listen := flag.String("listen", "", "address to serve the peer at")
	connect := flag.String("connect", "", "address of the peer")
	from := flag.String("from", "", "local address to connect from")
	plain := flag.Bool("plain", false, "no enhanced set-up")
	mtu := flag.Int("mtu", 1500, "of the path, for the sizes")
	size := flag.Int("size", 1<<20, "of the largest transfer, in bytes")
	rounds := flag.Int("rounds", 1, "of the data")
	idle := flag.Duration("idle", 40*time.Second, "how long to be silent")
	timeout := flag.Duration("timeout", 2*time.Minute, "of it all")
	seed := flag.Uint64("seed", 1, "of the data")
	flag.Parse()
	f := cases[flag.Arg(0)]
	if f == nil {
		fmt.Fprintf(os.Stderr, "exercise: there is no %q\n", flag.Arg(0))
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	r := &run{connect: *connect, mtu: *mtu, idle: *idle, size: *size, rounds: *rounds, rng: rand.New(rand.NewPCG(*seed, 7))}
	r.cfg = &iwarp.Config{PrivateData: []byte("hello"), RecvDepth: depth, RecvSize: maxSend, SendDepth: depth, Timeout: 30 * time.Second}
	if *listen != "" {
		r.cfg.PrivateData = []byte("welcome to you")
	}
	r.cfg.Startup.Transport = iwarp.SCTP
	switch *transport {
	case "sctp-udp":
		r.cfg.Startup.UDP = true
	case "sctp-draft":
		r.cfg.Startup.Transport = iwarp.SCTPDraft
	}
	if *plain {
		r.cfg.Startup.Revision = 1
	}
	if *from != "" {
		r.cfg.LocalAddr = netip.MustParseAddrPort(*from)
	}
	out, err := func() (string, error) {
		var err error
		if r.d, err = iwarp.Open(ctx, *socket); err != nil {
			return "", err
		}
		defer r.d.Close()
		if *listen != "" {
			if r.listen, err = r.d.Listen(ctx, *listen, r.cfg); err != nil {
				return "", err
			}
			defer r.listen.Close()
			fmt.Println("listening")
		}
		return f(ctx, r)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "exercise:", err)
		os.Exit(1)
	}
	fmt.Println(out)
}

// conn is a session with the peer and a copy of the expected content of the peer's memory.
type conn struct {
	*iwarp.Conn
	r      *run
	mem    []byte
	lo, hi int // the part of it that this session uses; concurrent sessions use different parts
	mr     *iwarp.MR
	rng    *rand.Rand
}

// open accepts the peer's session, or opens one.
func (r *run) open(ctx context.Context) (*conn, error) {
	var c *iwarp.Conn
	var err error
	want := "welcome"
	if r.listen != nil {
		c, err = r.listen.Accept(ctx) // the peer answers with PrivateData
		want = "hello"
	} else {
		c, err = r.d.Dial(ctx, r.connect, r.cfg)
	}
	if err != nil {
		return nil, fmt.Errorf("no session: %w", err)
	}
	if got := string(c.Info().PrivateData); got != want {
		return nil, fmt.Errorf("private data %q, not %q", got, want)
	}
	mr, err := c.Alloc(ctx, memSize, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, r: r, mem: make([]byte, memSize), hi: memSize, mr: mr, rng: rand.New(rand.NewPCG(r.rng.Uint64(), 7))}, nil
}

// end closes the session and, where we dialled, the association.
func (c *conn) end() error {
	if err := c.Close(); err != nil {
		return fmt.Errorf("closing: %w", err)
	}
	return nil
}

func (c *conn) random(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(c.rng.Uint32())
	}
	return b
}

// ask sends a command and returns the answer.
func (c *conn) ask(ctx context.Context, cmd []byte) ([]byte, error) {
	if err := c.Send(ctx, cmd); err != nil {
		return nil, fmt.Errorf("%c: %w", cmd[0], err)
	}
	b := make([]byte, maxSend)
	n, err := c.Recv(ctx, b)
	if err != nil {
		return nil, fmt.Errorf("answer to %c: %w", cmd[0], err)
	}
	return b[:n], nil
}

func (c *conn) echo(ctx context.Context, n int) error {
	m := append([]byte("e"), c.random(n-1)...)
	b, err := c.ask(ctx, m)
	if err == nil && !bytes.Equal(b, m) {
		err = errors.New("the echo differs")
	}
	if err != nil {
		return fmt.Errorf("echo of %d bytes: %w", n, err)
	}
	return nil
}

func remote(off, n int) iwarp.Remote {
	return iwarp.Remote{Addr: memBase + uint64(off), RKey: memSTag, Len: uint32(n)}
}

// move sends n bytes in both directions: by our Write and Read, and by the peer's Read and Write.
func (c *conn) move(ctx context.Context, n int) error {
	off := c.lo + c.rng.IntN(c.hi-c.lo-n+1)
	b := c.random(n)
	copy(c.mem[off:], b)
	if err := c.Write(ctx, remote(off, n), b); err != nil {
		return fmt.Errorf("our Write of %d bytes: %w", n, err)
	}
	if err := c.verify(ctx, off, n); err != nil {
		return fmt.Errorf("our Write of %d bytes: %w", n, err)
	}
	// The peer reads from us into another place.
	off, at := c.lo+c.rng.IntN(c.hi-c.lo-n+1), c.rng.IntN(memSize-n+1)
	b = c.random(n)
	copy(c.mr.Bytes()[at:], b)
	copy(c.mem[off:], b)
	if err := c.tell(ctx, 'r', off, n, at); err != nil {
		return fmt.Errorf("the peer's Read of %d bytes: %w", n, err)
	}
	if err := c.verify(ctx, off, n); err != nil {
		return fmt.Errorf("the peer's Read of %d bytes: %w", n, err)
	}
	// And writes from there. The bytes around it must not change.
	at = c.rng.IntN(memSize - n + 1)
	want := slices.Clone(c.mr.Bytes())
	copy(want[at:], b)
	clear(c.mr.Bytes()[at : at+n])
	if err := c.tell(ctx, 'w', off, n, at); err != nil {
		return fmt.Errorf("the peer's Write of %d bytes: %w", n, err)
	}
	if !bytes.Equal(c.mr.Bytes(), want) {
		return fmt.Errorf("the peer's Write of %d bytes differs", n)
	}
	return nil
}

// tell makes the peer read or write.
func (c *conn) tell(ctx context.Context, op byte, off, n, at int) error {
	r := c.mr.RemoteAt(at, n)
	m := be.AppendUint32(be.AppendUint32([]byte{op}, uint32(off)), uint32(n))
	b, err := c.ask(ctx, be.AppendUint64(be.AppendUint32(m, r.RKey), r.Addr))
	if err == nil && string(b) != string(op) {
		err = fmt.Errorf("the answer is %q", b)
	}
	return err
}

// verify compares a piece of the peer's memory with its expected content, by hash and by a Read.
func (c *conn) verify(ctx context.Context, off, n int) error {
	b, err := c.ask(ctx, be.AppendUint32(be.AppendUint32([]byte("h"), uint32(off)), uint32(n)))
	if err != nil {
		return err
	}
	h := fnv.New64a()
	h.Write(c.mem[off : off+n])
	if len(b) != 9 || be.Uint64(b[1:]) != h.Sum64() {
		return errors.New("the peer has other bytes")
	}
	got := make([]byte, n)
	if err := c.Read(ctx, remote(off, n), got); err != nil {
		return fmt.Errorf("reading it back: %w", err)
	}
	if !bytes.Equal(got, c.mem[off:off+n]) {
		return errors.New("our Read differs")
	}
	return nil
}

// sizes returns sizes around multiples of a packet's payload, and some others.
func (r *run) sizes() (ns []int) {
	ns = []int{1, 2, 3, 4, 5, 17, 64, 255}
	for _, packets := range []int{1, 2} {
		// Less IP (UDP), SCTP, DATA, SSN and DDP: 20+(8+)12+16+2+14 or 18 bytes, or 20 more of IP.
		for d := -104; d <= 4; d += 4 {
			ns = append(ns, packets*r.mtu+d)
		}
		ns = append(ns, packets*r.mtu-61, packets*r.mtu-65, packets*r.mtu-67, packets*r.mtu-69)
	}
	return append(ns, 4096, 9000, 16384, 65535)
}

func (c *conn) data(ctx context.Context) error {
	ns := c.r.sizes()
	for range c.r.rounds {
		for i, n := range ns {
			if err := c.echo(ctx, n); err != nil {
				return err
			}
			if n > 255 && i%3 != 0 && n < 4096 {
				continue // the echo has the same boundaries
			}
			if err := c.move(ctx, n); err != nil {
				return err
			}
		}
		if c.r.size > 0 {
			if err := c.move(ctx, c.r.size); err != nil {
				return err
			}
		}
	}
	return nil
}

func data(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	start := time.Now()
	if err := c.data(ctx); err != nil {
		return "", err
	}
	i := c.Info()
	return fmt.Sprintf("%d sizes and %d bytes, IRD %d, ORD %d, %.1f s", len(r.sizes()), r.size, i.IRD, i.ORD, time.Since(start).Seconds()), c.end()
}

// many requests count messages of size bytes and checks them.
func (c *conn) many(ctx context.Context, count, size int) error {
	seed := c.rng.Uint32()
	if err := c.Send(ctx, be.AppendUint32(be.AppendUint32(be.AppendUint32([]byte("m"), uint32(count)), uint32(size)), seed)); err != nil {
		return err
	}
	b := make([]byte, maxSend)
	want := make([]byte, size)
	for i := range uint32(count) {
		n, err := c.Recv(ctx, b)
		if err != nil {
			return fmt.Errorf("message %d of %d: %w", i, count, err)
		}
		be.PutUint32(want, i)
		for j := 4; j < size; j++ {
			want[j] = byte(i*7 + uint32(j)*13 + seed)
		}
		if !bytes.Equal(b[:n], want) {
			return fmt.Errorf("message %d of %d differs", i, count)
		}
	}
	return nil
}

// pipeline sends messages to be echoed without waiting for each.
func (c *conn) pipeline(ctx context.Context, count, most int) error {
	free := make(chan struct{}, depth/2)
	sent := make(chan []byte, count)
	failed := make(chan error, 1)
	go func() {
		for range count {
			select {
			case free <- struct{}{}:
			case <-ctx.Done():
				failed <- ctx.Err()
				return
			}
			m := append([]byte("e"), c.random(c.rng.IntN(most))...)
			sent <- m
			if err := c.Send(ctx, m); err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	b := make([]byte, maxSend)
	for i := range count {
		n, err := c.Recv(ctx, b)
		if err != nil {
			return fmt.Errorf("echo %d of %d: %w", i, count, err)
		}
		if !bytes.Equal(b[:n], <-sent) {
			return fmt.Errorf("echo %d of %d differs", i, count)
		}
		<-free
	}
	return <-failed
}

func (c *conn) manyMessages(ctx context.Context) (int, error) {
	total := 0
	for _, size := range []int{4, 5, 100, 731, c.r.mtu - 68, c.r.mtu - 66, c.r.mtu - 60, 2 * c.r.mtu, 9000} {
		if err := c.many(ctx, 200, size); err != nil {
			return total, fmt.Errorf("200 messages of %d bytes: %w", size, err)
		}
		total += 200
	}
	for _, most := range []int{1, 64, 3000} {
		if err := c.pipeline(ctx, 1000, most); err != nil {
			return total, fmt.Errorf("1000 echoes of up to %d bytes: %w", most, err)
		}
		total += 1000
	}
	return total, nil
}

func manyMessages(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	start := time.Now()
	n, err := c.manyMessages(ctx)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d messages, %.1f s", n, time.Since(start).Seconds()), c.end()
}

// fragments makes the peer use DDP segments that its SCTP must fragment.
func fragments(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	for _, limit := range []uint32{uint32(r.mtu) - 47, uint32(r.mtu) + 4, 5000, 20000, 60000, 0} {
		if b, err := c.ask(ctx, be.AppendUint32([]byte("f"), limit)); err != nil || string(b) != "f" {
			return "", fmt.Errorf("answer %q, %w", b, err)
		}
		for _, n := range []int{1, r.mtu - 64, r.mtu, 4990, 20000, 65000} {
			if err := c.echo(ctx, n); err != nil {
				return "", fmt.Errorf("segments of %d: %w", limit, err)
			}
			if err := c.move(ctx, n); err != nil {
				return "", fmt.Errorf("segments of %d: %w", limit, err)
			}
		}
		if err := c.many(ctx, 100, 6000); err != nil {
			return "", fmt.Errorf("segments of %d: %w", limit, err)
		}
	}
	return "verified", c.end()
}

// together runs all cases that move data over one session.
func together(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	start := time.Now()
	if err := c.data(ctx); err != nil {
		return "", err
	}
	if _, err := c.manyMessages(ctx); err != nil {
		return "", err
	}
	return fmt.Sprintf("verified, %.1f s", time.Since(start).Seconds()), c.end()
}

func idle(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	if err := c.echo(ctx, 100); err != nil {
		return "", err
	}
	select {
	case <-time.After(r.idle):
	case <-c.QP().Done():
		return "", fmt.Errorf("ended while idle: %w", c.QP().Err())
	}
	if err := c.echo(ctx, 5000); err != nil {
		return "", err
	}
	if err := c.move(ctx, 5000); err != nil {
		return "", err
	}
	return fmt.Sprintf("alive after %v", r.idle), c.end()
}

// sessions accepts consecutive sessions, and a concurrent one, from a peer that connects: peer -k 3.
func sessions(ctx context.Context, r *run) (string, error) {
	var ports []uint16
	for i := range 3 {
		c, err := r.open(ctx)
		if err != nil {
			return "", err
		}
		ports = append(ports, c.Info().Remote.Port())
		if err := c.echo(ctx, 3000); err != nil {
			return "", err
		}
		if i == 0 {
			if err := c.Send(ctx, []byte{'i', 0, 9}); err != nil {
				return "", err
			}
			other, err := r.open(ctx)
			if err != nil {
				return "", err
			}
			ports = append(ports, other.Info().Remote.Port())
			c.hi, other.lo = memSize/2, memSize/2
			done := make(chan error, 1)
			go func() { done <- other.move(ctx, 100000) }()
			if err := c.move(ctx, 100001); err != nil {
				return "", err
			}
			if err := <-done; err != nil {
				return "", err
			}
			// The peer ends it, so that it does not count as one of the three.
			if err := other.Send(ctx, []byte("T")); err != nil {
				return "", err
			}
			if _, err := tell(ctx, other.Conn); err != nil {
				return "", err
			}
		}
		if i == 1 {
			if err := c.Send(ctx, []byte("T")); err != nil {
				return "", err
			}
			if _, err := tell(ctx, c.Conn); err != nil {
				return "", err
			}
			continue
		}
		if err := c.end(); err != nil {
			return "", err
		}
	}
	if slices.Max(ports) != slices.Min(ports) {
		return "", fmt.Errorf("not one association: ports %v", ports)
	}
	return "four sessions of one association", nil
}

// shared opens sessions on an association that we opened, on any of the peer's 16 streams; some end and others
// follow.
func shared(ctx context.Context, r *run) (string, error) {
	const n = 8
	r.cfg.Startup.SharedAssociation = true
	var cs [n]*conn
	for round := range 4 {
		errs := make(chan error, n)
		for i := range cs {
			if cs[i] == nil {
				c, err := r.open(ctx)
				if err != nil {
					return "", fmt.Errorf("round %d, session %d: %w", round, i, err)
				}
				c.lo, c.hi = i*memSize/n, (i+1)*memSize/n
				cs[i] = c
			}
			if got, want := cs[i].Info().Local, cs[0].Info().Local; got != want {
				return "", fmt.Errorf("session %d is on an association of its own, from %v and not %v", i, got, want)
			}
		}
		for _, c := range cs {
			go func() {
				err := c.echo(ctx, 3000)
				if err == nil {
					err = c.move(ctx, 50000)
				}
				errs <- err
			}()
		}
		for range cs {
			if err := <-errs; err != nil {
				return "", fmt.Errorf("round %d: %w", round, err)
			}
		}
		for i, c := range cs {
			if i > 0 && i%2 == round%2 {
				if err := c.end(); err != nil {
					return "", err
				}
				cs[i] = nil
			}
		}
	}
	for _, c := range cs {
		if c != nil {
			if err := c.end(); err != nil {
				return "", err
			}
		}
	}
	return "sessions of one association of ours", nil
}

// tell returns how a session ended.
func tell(ctx context.Context, c *iwarp.Conn) (string, error) {
	select {
	case <-c.QP().Done():
	case <-ctx.Done():
		return "", errors.New("the session goes on")
	}
	var b [1]byte
	_, err := c.Recv(ctx, b[:])
	if t, ok := errors.AsType[*iwarp.TerminateError](c.QP().Err()); ok {
		side := "local"
		if t.Remote {
			side = "remote"
		}
		return fmt.Sprintf("terminate %s %d/%d/%#02x", side, uint8(t.Layer), t.EType, t.ECode), nil
	}
	if errors.Is(err, io.EOF) || errors.Is(c.QP().Err(), iwarp.ErrPeerClosed) {
		return "closed by the peer", nil
	}
	if c.QP().Err() == nil {
		return "no error", nil
	}
	return c.QP().Err().Error(), nil
}

// ends returns a case in which the peer does something that ends the session.
func ends(cmd string) func(context.Context, *run) (string, error) {
	return func(ctx context.Context, r *run) (string, error) {
		c, err := r.open(ctx)
		if err != nil {
			return "", err
		}
		defer c.Abort()
		if err := c.echo(ctx, 2000); err != nil {
			return "", err
		}
		if err := c.Send(ctx, []byte(cmd)); err != nil && !strings.Contains("A", cmd) {
			return "", err
		}
		return tell(ctx, c.Conn)
	}
}

// violate writes to memory that the peer has not opened: the session must end.
func violate(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	defer c.Abort()
	to := remote(0, 100)
	to.RKey++
	if err := c.Write(ctx, to, make([]byte, 100)); err != nil {
		return "", err
	}
	return tell(ctx, c.Conn)
}

func reject(ctx context.Context, r *run) (string, error) {
	r.cfg.PrivateData = []byte("reject, please")
	c, err := r.d.Dial(ctx, r.connect, r.cfg)
	if err == nil {
		c.Abort()
		return "", errors.New("accepted")
	}
	e, ok := errors.AsType[*iwarp.RejectError](err)
	if !ok {
		return "", err
	}
	return fmt.Sprintf("rejected %q", e.PrivateData), nil
}

// another serves the peer's next session (peer -k 2), which shows that the peer has finished the previous one: no
// answer of it is in flight when our end closes the association.
func (r *run) another(ctx context.Context) error {
	c, err := r.open(ctx)
	if err != nil {
		return err
	}
	if err := c.echo(ctx, 2000); err != nil {
		return err
	}
	return c.end()
}

func rejecting(ctx context.Context, r *run) (string, error) {
	q, err := r.listen.Request(ctx)
	if err != nil {
		return "", err
	}
	if string(q.PrivateData()) != "hello" {
		return "", fmt.Errorf("private data %q", q.PrivateData())
	}
	if err := q.Reject(ctx, []byte("no, thank you")); err != nil {
		return "", err
	}
	return "one rejected, one taken", r.another(ctx)
}

func abort(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	if err := c.echo(ctx, 2000); err != nil {
		return "", err
	}
	if err := c.Abort(); err != nil || r.listen == nil {
		return "aborted", err
	}
	return "aborted, and another", r.another(ctx)
}

// restart has a session, waits until the peer, having lost its state, opens another from the same port, and uses
// that.
func restart(ctx context.Context, r *run) (string, error) {
	a, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	defer a.Abort()
	if err := a.move(ctx, 5000); err != nil {
		return "", err
	}
	fmt.Println("ready")
	b, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	if a.Info().Remote != b.Info().Remote {
		return "", fmt.Errorf("another port: %v, then %v", a.Info().Remote, b.Info().Remote)
	}
	how, err := tell(ctx, a.Conn)
	if err != nil {
		return "", err
	}
	if err := b.data(ctx); err != nil {
		return "", err
	}
	return how, b.end()
}

// left exits during a session.
func left(ctx context.Context, r *run) (string, error) {
	c, err := r.open(ctx)
	if err != nil {
		return "", err
	}
	if err := c.move(ctx, 5000); err != nil {
		return "", err
	}
	fmt.Println("ready")
	<-c.QP().Done()
	return "left", nil
}
