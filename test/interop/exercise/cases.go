package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

var cases = map[string]func(context.Context, *run) (string, error){
	"data":      data,
	"many":      manyMessages,
	"fragments": fragments,
	"both":      together,
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
