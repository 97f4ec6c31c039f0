package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"

	iwarp "github.com/iwarpd/iwarpd/client"
)

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
	for i, n := range c.r.sizes() {
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
		return c.move(ctx, c.r.size)
	}
	return nil
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
