package rping

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv/memconn"
)

// The data and the advertisement are those of rping -C 3 in a capture of two soft-iWARP hosts.
func TestGolden(t *testing.T) {
	b := make([]byte, 64)
	fill(b, 0)
	if want := "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr\x00"; string(b) != want {
		t.Errorf("fill(0) = %q; want %q", b, want)
	}
	fill(b, 1)
	if want := "rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs\x00"; string(b) != want {
		t.Errorf("fill(1) = %q; want %q", b, want)
	}
	const wire = "000056352da3337098a6e80000000040"
	a := Advert{Addr: 0x56352da33370, RKey: 0x98a6e800, Size: 64}
	if got := hex.EncodeToString(a.Append(nil)); got != wire {
		t.Errorf("Append = %s; want %s", got, wire)
	}
	raw, _ := hex.DecodeString(wire)
	if got, err := DecodeAdvert(raw); err != nil || got != a {
		t.Errorf("DecodeAdvert = %+v, %v; want %+v", got, err, a)
	}
	for n := range len(raw) + 2 {
		if n == len(raw) {
			continue
		}
		if _, err := DecodeAdvert(append(raw, 0)[:n]); err == nil {
			t.Errorf("DecodeAdvert accepts %d bytes", n)
		}
	}
}

// The characters wrap from 'z' to 'A', and so does the first one of each round.
func TestFillWraps(t *testing.T) {
	b := make([]byte, 200)
	for _, n := range []int{0, 57, 58, 1000} {
		fill(b, n)
		letters := text(b)[bytes.IndexByte(b, ' ')+1:]
		for i, c := range letters {
			if want := byte('A' + (n+i)%('z'-'A'+1)); c != want {
				t.Fatalf("round %d: letter %d is %q; want %q", n, i, c, want)
			}
		}
		if len(text(b)) != len(b)-1 {
			t.Errorf("round %d: NUL at %d; want only at the end", n, len(text(b)))
		}
	}
}

type side struct {
	rep Report
	err error
}

func run(t *testing.T, size, room int, client Options, tamper func(a, b *memconn.Conn)) (c, s side, out string) {
	t.Helper()
	ctx := t.Context()
	a, b := memconn.Pair(2, advertLen)
	if tamper != nil {
		tamper(a, b)
	}
	var print bytes.Buffer
	done := make(chan side)
	go func() {
		rep, err := runServer(ctx, b, make([]byte, room), Options{Print: &print})
		b.Close()
		done <- side{rep, err}
	}()
	var start, sink buffer
	start.Bytes, start.Remote = a.Alloc(size)
	sink.Bytes, sink.Remote = a.Alloc(size)
	rep, err := runClient(ctx, a, start, sink, client)
	a.Close()
	return side{rep, err}, <-done, print.String()
}

func TestRounds(t *testing.T) {
	for _, size := range []int{MinSize, 64, 4096, MaxSize} {
		var print bytes.Buffer
		c, s, out := run(t, size, MaxSize, Options{Count: 60, Validate: true, Print: &print}, nil)
		if c.err != nil || s.err != nil {
			t.Fatalf("size %d: client %v, server %v", size, c.err, s.err)
		}
		if c.rep.Rounds != 60 || s.rep.Rounds != 60 || c.rep.Bytes != int64(60*size) || s.rep.Bytes != c.rep.Bytes {
			t.Errorf("size %d: client %+v, server %+v", size, c.rep, s.rep)
		}
		if got := strings.Count(out, "server ping data: rdma-ping-"); got != 60 {
			t.Errorf("size %d: the server printed %d rounds", size, got)
		}
		if got := strings.Count(print.String(), "ping data: rdma-ping-"); got != 60 {
			t.Errorf("size %d: the client printed %d rounds", size, got)
		}
	}
}

func TestServerRefusesTooLarge(t *testing.T) {
	c, s, _ := run(t, 4096, 64, Options{Count: 1}, nil)
	if s.err == nil || !strings.Contains(s.err.Error(), "4096 bytes") {
		t.Errorf("server error %v", s.err)
	}
	if c.err == nil {
		t.Error("the client did not notice")
	}
}

func TestValidate(t *testing.T) {
	tamper := func(a, b *memconn.Conn) {
		b.Fault = func(op string, n int) error {
			if op == "write" {
				return errors.New("cable cut")
			}
			return nil
		}
	}
	if c, s, _ := run(t, 64, 64, Options{Count: 1, Validate: true}, tamper); c.err == nil || s.err == nil {
		t.Errorf("a lost write: client %v, server %v", c.err, s.err)
	}

	// Only -V detects a server that writes nothing back.
	for _, validate := range []bool{false, true} {
		a, b := memconn.Pair(2, advertLen)
		go func() {
			m := make([]byte, advertLen)
			for range 2 {
				if _, err := b.Recv(context.Background(), m); err == nil {
					_ = b.Send(context.Background(), m)
				}
			}
		}()
		var start, sink buffer
		start.Bytes, start.Remote = a.Alloc(64)
		sink.Bytes, sink.Remote = a.Alloc(64)
		_, err := runClient(t.Context(), a, start, sink, Options{Count: 1, Validate: validate})
		if errors.Is(err, ErrMismatch) != validate {
			t.Errorf("validate %v: error %v", validate, err)
		}
	}
}
