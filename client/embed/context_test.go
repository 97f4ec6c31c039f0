package embed_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/shm"
)

// endsAtOnce is a context that ends after it has been checked once.
type endsAtOnce struct {
	context.Context
	seen atomic.Bool
}

func (c *endsAtOnce) Done() <-chan struct{} {
	ended := make(chan struct{})
	close(ended)
	return ended
}

func (c *endsAtOnce) Err() error {
	if c.seen.Swap(true) {
		return context.Canceled
	}
	return nil
}

// TestResizeContext checks that a context that ends before Resize leaves the queue unchanged, and that one that ends
// while the daemon resizes it does not lose completions.
func TestResizeContext(t *testing.T) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 16)
	write := func() {
		t.Helper()
		a.post(t, &iwarp.SendWR{
			Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 64)}, Remote: b.mem.Base(), RKey: b.mem.RKey(),
		})
		a.wait(t, ctx, 1)
	}
	before := a.cq.Depth()
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := a.cq.Resize(ended, 4*before); !errors.Is(err, context.Canceled) || a.cq.Depth() != before {
		t.Errorf("%v, depth %d", err, a.cq.Depth())
	}
	write()
	if err := a.cq.Resize(&endsAtOnce{Context: ctx}, 4*before); err != nil || a.cq.Depth() < 4*before {
		t.Fatalf("%v, depth %d", err, a.cq.Depth())
	}
	write()
}

// TestDialContext checks that a context that ends while a connection's objects are created leaves none of them
// behind.
func TestDialContext(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	l := listen(t, ctx, nb, ":0", nil)
	if c, err := na.Device().Dial(&endsAtOnce{Context: ctx}, dialAddr(nb, l), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", c, err)
	}
	if _, err := na.Device().Admin().Status(ctx); err != nil { // processed after the earlier requests
		t.Fatal(err)
	}
	idle(t, na)
}

// TestAbandoned checks that calls whose context ends before the reply leave no object in the daemon.
func TestAbandoned(t *testing.T) {
	a, _, ctx := pair(t, embed.PairConfig{})
	d := a.Device()
	pd, err := d.AllocPD(ctx)
	if err != nil {
		t.Fatal(err)
	}
	cq, err := d.CreateCQ(ctx, 8)
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(context.Context) error{
		"AllocPD":           func(ctx context.Context) error { _, err := d.AllocPD(ctx); return err },
		"Alloc":             func(ctx context.Context) error { _, err := pd.Alloc(ctx, 4096, 0); return err },
		"AllocMW":           func(ctx context.Context) error { _, err := pd.AllocMW(ctx); return err },
		"CreateCQ":          func(ctx context.Context) error { _, err := d.CreateCQ(ctx, 8); return err },
		"CreateCompChannel": func(ctx context.Context) error { _, err := d.CreateCompChannel(ctx); return err },
		"CreateSRQ":         func(ctx context.Context) error { _, err := d.CreateSRQ(ctx, iwarp.SRQConfig{PD: pd}); return err },
		"CreateQP": func(ctx context.Context) error {
			_, err := d.CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: cq, RecvCQ: cq})
			return err
		},
		"Listen": func(ctx context.Context) error { _, err := d.Listen(ctx, ":0", nil); return err },
	} {
		t.Run(name, func(t *testing.T) {
			before := used(t, ctx, a)
			err := call(&endsAtOnce{Context: ctx})
			for ; err == nil; err = call(&endsAtOnce{Context: ctx}) { // the reply was there at once
				before = used(t, ctx, a)
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%v", err)
			}
			testenv.Until(t, "the object is gone", func() bool { return slices.Equal(used(t, ctx, a), before) })
		})
	}
}

// endsAwaited is a context that ends when a call waits for it, so after the call has sent its request.
type endsAwaited struct {
	context.Context
	awaited atomic.Bool
}

func (c *endsAwaited) Done() <-chan struct{} {
	c.awaited.Store(true)
	ended := make(chan struct{})
	close(ended)
	return ended
}

func (c *endsAwaited) Err() error {
	if c.awaited.Load() {
		return context.Canceled
	}
	return nil
}

// TestAbandonedConnection checks that a Connect and an Accept whose context ends before the reply leave no connection.
func TestAbandonedConnection(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	listen := func() *iwarp.Listener {
		l := listen(t, ctx, nb, ":0", nil)
		t.Cleanup(func() { l.Close() })
		return l
	}
	abandoned := func(what string, q *iwarp.QP, err error) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", what, err)
		}
		select {
		case <-q.Done():
		case <-time.After(time.Minute):
			t.Fatalf("%s: the connection stays", what)
		}
		if err := q.Err(); !errors.Is(err, iwarp.ErrClosed) { // not a time-out
			t.Errorf("%s: the connection ends with %v", what, err)
		}
	}
	a := newEnd(t, ctx, na, 16)
	_, err := a.qp.Connect(&endsAwaited{Context: ctx}, dialAddr(nb, listen()), nil)
	abandoned("Connect", a.qp, err)

	a, b, l := newEnd(t, ctx, na, 16), newEnd(t, ctx, nb, 16), listen()
	connecting, cancel := context.WithCancel(ctx)
	connected := make(chan struct{})
	go func() {
		defer close(connected)
		_, _ = a.qp.Connect(connecting, dialAddr(nb, l), nil)
	}()
	r, err := l.Request(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Accept(&endsAwaited{Context: ctx}, b.qp, nil)
	abandoned("Accept", b.qp, err)
	cancel()
	<-connected
}

// used returns what the user of n has of each resource.
func used(t *testing.T, ctx context.Context, n *embed.Node) (all []uint64) {
	t.Helper()
	users, err := n.Device().Admin().Quotas(ctx)
	if err != nil || len(users) != 1 {
		t.Fatalf("%d users, %v", len(users), err)
	}
	for _, q := range users[0].Quotas {
		if q.Name != "messages" {
			all = append(all, q.Used)
		}
	}
	return all
}

// TestResizeUnmappable checks that a device closes when the new memory of a queue cannot be mapped, since the queue
// could never complete anything again.
func TestResizeUnmappable(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	daemon, err := seqpacket.FromFD(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer daemon.Close()
	ring, err := shm.CreateCQ(1, 16)
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	served := make(chan error, 1)
	go func() {
		served <- func() error {
			for {
				b, _, err := daemon.Read(0)
				if err != nil {
					return nil // the client is gone
				}
				var req ctrlpb.Request
				if err := proto.Unmarshal(b, &req); err != nil {
					return err
				}
				reply := &ctrlpb.Reply{Id: req.Id, Body: &ctrlpb.Reply_Cq{Cq: &ctrlpb.CQReply{Cq: 1, Depth: 16, Workers: 1}}}
				var fds []int
				switch req.Body.(type) {
				case *ctrlpb.Request_Hello:
					reply.Body = &ctrlpb.Reply_Hello{Hello: &ctrlpb.HelloReply{Version: 1, Device: &ctrlpb.DeviceAttr{}}}
				case *ctrlpb.Request_CreateCq:
					fds = []int{ring.FD(), ring.EventFD()}
				case *ctrlpb.Request_ResizeCq:
					fds = []int{int(null.Fd())}
				}
				if b, err = proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: reply}}); err != nil {
					return err
				}
				if err := daemon.Write(b, fds); err != nil {
					return err
				}
			}
		}()
	}()
	dev, err := iwarp.OpenFD(t.Context(), fds[1], nil)
	if err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(t.Context(), 16)
	if err != nil {
		t.Fatal(err)
	}
	rerr := cq.Resize(t.Context(), 32)
	if rerr == nil {
		t.Error("/dev/null was mapped")
	}
	if derr := dev.Err(); derr == nil || !errors.Is(rerr, derr) {
		t.Errorf("the device: %v; want %v", derr, rerr)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}
