package embed_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// TestPost posts more Writes and messages, of each size that Conn sends in another way, than a connection has operations,
// without waiting for any. Each message finds the data before it. A Write that the peer refuses ends the connection, and
// Recv says why.
func TestPost(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	const recvSize = 100 << 10
	ca, cb := connect(t, ctx, a, b, &iwarp.Config{SendDepth: 8, RecvSize: recvSize})
	far := alloc(t, ctx, cb, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	near := alloc(t, ctx, ca, 4096, iwarp.AccessLocalWrite)
	if err := ca.PostWrite(ctx, far.Remote(), make([]byte, 8)); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("PostWrite of other memory: %v", err)
	}
	if err := ca.PostWrite(ctx, far.RemoteAt(0, 8), near.Bytes()); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("PostWrite beyond the peer's memory: %v", err)
	}
	got := make([]byte, recvSize)
	for i := range 40 {
		for j := range near.Bytes() {
			near.Bytes()[j] = byte(i)
		}
		msg := bytes.Repeat([]byte{byte(i)}, []int{1, 1000, recvSize}[i%3])
		if err := errors.Join(ca.PostWrite(ctx, far.Remote(), near.Bytes()), ca.PostSend(ctx, msg)); err != nil {
			t.Fatal(err)
		}
		if n, err := cb.Recv(ctx, got); err != nil || !bytes.Equal(got[:n], msg) {
			t.Fatalf("message %d: %d bytes, %v", i, n, err)
		}
		if !bytes.Equal(far.Bytes(), near.Bytes()) {
			t.Fatalf("message %d came before the data", i)
		}
	}
	select {
	case <-ca.Done():
		t.Fatal("Done before the end")
	default:
	}
	r := far.Remote()
	r.RKey ^= 0xff00
	if err := ca.PostWrite(ctx, r, near.Bytes()); err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Recv(ctx, got); !errors.As(err, new(*iwarp.TerminateError)) {
		t.Errorf("Recv after a Write that was refused: %v", err)
	}
	<-ca.Done()
}

// TestPostClose checks that a connection that is closed after PostSend leaves nothing in the caller's PD, although nothing
// has taken the completion.
func TestPostClose(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	pd, err := a.Device().AllocPD(ctx)
	if err != nil {
		t.Fatal(err)
	}
	msg := make([]byte, 100<<10)
	l := listen(t, ctx, b, ":0", &iwarp.Config{RecvSize: len(msg)})
	go l.Accept(ctx)
	c, err := a.Device().Dial(ctx, dialAddr(b, l), &iwarp.Config{PD: pd})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.PostSend(ctx, msg); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := pd.Close(); err != nil {
		t.Error(err)
	}
}

// TestWriteTurns checks that goroutines that share one operation, or the memory of a connection, all get their turn.
func TestWriteTurns(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	for name, tt := range map[string]struct{ depth, writers int }{"operations": {1, 3}, "memory": {64, 16}} {
		t.Run(name, func(t *testing.T) {
			ca, cb := connect(t, ctx, a, b, &iwarp.Config{SendDepth: tt.depth})
			mr := alloc(t, ctx, cb, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
			late, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			for i := range 1000 {
				var writers sync.WaitGroup
				for range tt.writers {
					writers.Go(func() {
						if err := ca.Write(late, mr.Remote(), []byte{1}); err != nil {
							t.Errorf("round %d: %v", i, err)
						}
					})
				}
				if writers.Wait(); t.Failed() {
					return
				}
			}
		})
	}
}

// TestPostTurns posts from several goroutines, which take each other's operations without waiting for completions.
// The race detector checks that a goroutine has read the memory of its work request before another one uses the
// operation.
func TestPostTurns(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, &iwarp.Config{SendDepth: 1})
	near := alloc(t, ctx, ca, 4096, iwarp.AccessLocalWrite)
	far := alloc(t, ctx, cb, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for range 500 {
				if err := ca.PostWrite(ctx, far.RemoteAt(0, 8), near.Bytes()[:8]); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	writers.Wait()
}

// TestPostWhileClosing checks what a goroutine gets that posts while another one closes the connection: the daemon
// frees the queues before the client has unmapped them.
func TestPostWhileClosing(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	for range 100 {
		ca, cb := connect(t, ctx, a, b, &iwarp.Config{SendDepth: 1})
		near := alloc(t, ctx, ca, 4096, iwarp.AccessLocalWrite)
		far := alloc(t, ctx, cb, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
		mem := near.Bytes()[:1]
		posted, ended := make(chan struct{}), make(chan error)
		go func() {
			var err error
			for n := 0; err == nil; n++ {
				if n == 10 {
					close(posted)
				}
				err = ca.PostWrite(ctx, far.RemoteAt(0, 1), mem)
			}
			ended <- err
		}()
		<-posted
		if err := ca.Abort(); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; !errors.Is(err, iwarp.ErrClosed) {
			t.Fatalf("PostWrite while the connection is closed: %v", err)
		}
		cb.Close()
	}
}

// TestErrorsNamePeer checks that the error of each operation names it and the peer.
func TestErrorsNamePeer(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, _ := connect(t, ctx, a, b, nil)
	mem := alloc(t, ctx, ca, 4096, iwarp.AccessLocalWrite).Bytes()
	if err := ca.Abort(); err != nil {
		t.Fatal(err)
	}
	r, buf := iwarp.Remote{Len: 1}, make([]byte, 1)
	_, received := ca.Recv(ctx, buf)
	_, added := ca.FetchAdd(ctx, r, 1)
	for what, err := range map[string]error{
		"send to": ca.Send(ctx, buf), "receive from": received, "write to": ca.Write(ctx, r, buf),
		"read from": ca.Read(ctx, r, buf), "atomic on": added,
	} {
		want := fmt.Sprintf("%s %v: ", what, ca.Info().Remote)
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v; want it to begin with %q", err, want)
		}
	}
	if err := ca.PostWrite(ctx, r, mem[:1]); !errors.Is(err, iwarp.ErrClosed) { // which does not touch mem
		t.Errorf("PostWrite after Abort: %v", err)
	}
}
