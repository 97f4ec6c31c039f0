package embed_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

func pair(t testing.TB, cfg embed.PairConfig) (a, b *embed.Node, ctx context.Context) {
	t.Helper()
	a, b, err := embed.Pair(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(func() {
		cancel()
		a.Close()
		b.Close()
	})
	return a, b, ctx
}

// connect gives the two ends of a connection from a to b.
func connect(t testing.TB, ctx context.Context, a, b *embed.Node, cfg *iwarp.Config) (ca, cb *iwarp.Conn) {
	t.Helper()
	l, err := b.Device().Listen(ctx, ":0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	type result struct {
		c   *iwarp.Conn
		err error
	}
	accepted := make(chan result, 1)
	go func() {
		c, err := l.Accept(ctx)
		accepted <- result{c, err}
	}()
	ca, err = a.Device().Dial(ctx, dialAddr(b, l), cfg)
	if err != nil {
		t.Fatal("dial:", err)
	}
	r := <-accepted
	if r.err != nil {
		t.Fatal("accept:", r.err)
	}
	return ca, r.c
}

func TestConnSendRecvReadWrite(t *testing.T) {
	for _, inline := range []bool{false, true} {
		t.Run(map[bool]string{false: "workers", true: "inline"}[inline], func(t *testing.T) {
			a, b, ctx := pair(t, embed.PairConfig{InlineProgress: inline})
			ca, cb := connect(t, ctx, a, b, nil)
			buf := make([]byte, 1<<16)
			for _, n := range []int{0, 1, 64, 65, 1000, 16384} {
				msg := bytes.Repeat([]byte{byte(n)}, n)
				if err := ca.Send(ctx, msg); err != nil {
					t.Fatalf("send %d: %v", n, err)
				}
				got, err := cb.Recv(ctx, buf)
				if err != nil || !bytes.Equal(buf[:got], msg) {
					t.Fatalf("recv %d: %d octets, %v", n, got, err)
				}
				if err := cb.Send(ctx, msg); err != nil {
					t.Fatalf("send back %d: %v", n, err)
				}
				if got, err = ca.Recv(ctx, buf); err != nil || got != n {
					t.Fatalf("recv back %d: %d octets, %v", n, got, err)
				}
			}
			mr, err := cb.Alloc(ctx, 1<<20, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite|iwarp.AccessRemoteAtomic)
			if err != nil {
				t.Fatal(err)
			}
			src := make([]byte, 1<<20)
			for i := range src {
				src[i] = byte(i * 7)
			}
			if err := ca.Write(ctx, mr.Remote(), src); err != nil {
				t.Fatal("write:", err)
			}
			dst := make([]byte, 1<<20)
			if err := ca.Read(ctx, mr.Remote(), dst); err != nil {
				t.Fatal("read:", err)
			}
			if !bytes.Equal(src, dst) || !bytes.Equal(src, mr.Bytes()) {
				t.Fatal("memory differs")
			}
			clear(mr.Bytes()[:8])
			for i := range uint64(3) {
				if old, err := ca.FetchAdd(ctx, mr.RemoteAt(0, 8), 5); err != nil || old != 5*i {
					t.Fatalf("fetch-add %d: %d, %v", i, old, err)
				}
			}
			if old, err := ca.CompareSwap(ctx, mr.RemoteAt(0, 8), 15, 99); err != nil || old != 15 {
				t.Fatalf("compare-swap: %d, %v", old, err)
			}
			if err := ca.Close(); err != nil {
				t.Fatal("close:", err)
			}
			if _, err := cb.Recv(ctx, buf); !errors.Is(err, io.EOF) {
				t.Fatal("recv after close:", err)
			}
			if err := cb.Close(); err != nil {
				t.Fatal("close:", err)
			}
		})
	}
}
