package embed_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/term"
)

// TestTerminate checks that a violation ends the connection on both sides, and that both report its name.
func TestTerminate(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, nil)
	mr := alloc(t, ctx, cb, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	r := mr.Remote()
	r.Addr += 4090
	_ = ca.Write(ctx, r, make([]byte, 100)) // sent before the peer detects the error
	_, err := ca.Recv(ctx, make([]byte, 8))
	bounds := func(te *iwarp.TerminateError) bool {
		return te.Layer == iwarp.TerminateDDP && te.EType == 1 && te.ECode == 1 && errors.Is(te, term.ErrBounds) // RFC 5041 section 8
	}
	var te *iwarp.TerminateError
	if !errors.As(err, &te) || !te.Remote || !bounds(te) || !bytes.HasPrefix(te.Message, []byte{0x11, 1}) {
		t.Errorf("the side that broke the rule: %v, %+v", err, te)
	}
	_, err = cb.Recv(ctx, make([]byte, 8))
	if !errors.As(err, &te) || te.Remote || !bounds(te) || te.Message != nil {
		t.Errorf("the other side: %v, %+v", err, te)
	}
	if err := ca.Send(ctx, nil); !errors.Is(err, term.ErrBounds) {
		t.Errorf("send afterwards: %v", err)
	}
	ca.Close()
	cb.Close()
}

// TestDisconnectSends checks that an orderly close first sends everything that was posted before it, also much more than
// the window allows at that moment (RFC 5041 section 6.2.1).
func TestDisconnectSends(t *testing.T) {
	for _, tr := range []iwarp.Transport{iwarp.TCP, iwarp.SCTP} {
		a, b, ctx := wire(t, embed.PairConfig{})
		ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: iwarp.Startup{Transport: tr}})
		const size, count = 1 << 20, 16
		to := alloc(t, ctx, cb, size*count, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
		from := alloc(t, ctx, ca, size, iwarp.AccessLocalWrite)
		for i := range from.Bytes() {
			from.Bytes()[i] = byte(i%251) + 1
		}
		for i := range count {
			r := to.Remote().At(uint32(i*size), size)
			if err := ca.QP().PostSend(&iwarp.SendWR{Op: iwarp.OpWrite, RKey: r.RKey, Remote: r.Addr, SGEs: []iwarp.SGE{from.SGE(0, size)}}); err != nil {
				t.Fatal(err)
			}
		}
		if err := ca.QP().Disconnect(ctx); err != nil {
			t.Fatal(err)
		}
		<-ca.Done()
		<-cb.Done()
		for i := range count {
			if !bytes.Equal(to.Bytes()[i*size:][:size], from.Bytes()) {
				t.Errorf("transport %d: Write %d of %d has not arrived", tr, i+1, count)
				break
			}
		}
	}
}

// TestClientDies checks that a client that exits during transfers leaves nothing behind and that the other client's
// connections continue.
func TestClientDies(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	stay, stayPeer := connect(t, ctx, a, b, nil)
	doomed := newDevice(t, ctx, a)
	l := listen(t, ctx, b, ":9", nil)
	ended := make(chan error, 3)
	for range 3 {
		go func() {
			c, err := l.Accept(ctx)
			if err != nil {
				ended <- err
				return
			}
			mr, err := c.Alloc(ctx, 1<<20, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteRead)
			if err != nil {
				ended <- err
				return
			}
			r := mr.Remote()
			_ = c.Send(ctx, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, r.Addr), r.RKey))
			_, err = c.Recv(ctx, make([]byte, 8))
			c.Close()
			ended <- err
		}()
	}
	busy := make(chan struct{}, 3)
	for i := range 3 {
		c, err := doomed.Dial(ctx, dialAddr(b, l), nil)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 12)
		if _, err := c.Recv(ctx, buf); err != nil {
			t.Fatal(err)
		}
		r := iwarp.Remote{Addr: binary.BigEndian.Uint64(buf), RKey: binary.BigEndian.Uint32(buf[8:]), Len: 1 << 20}
		mr := alloc(t, ctx, c, 1<<20, iwarp.AccessLocalWrite)
		op := iwarp.OpWrite
		if i == 1 {
			op = iwarp.OpRead
		}
		go func() { // keeps its queue full till the end
			wr := iwarp.SendWR{Op: op, SGEs: []iwarp.SGE{mr.SGE(0, 1<<20)}, RKey: r.RKey, Remote: r.Addr}
			for n := 0; ; n++ {
				if n == 20 {
					busy <- struct{}{}
				}
				if err := c.QP().PostSend(&wr); errors.Is(err, iwarp.ErrQueueFull) {
					runtime.Gosched()
				} else if err != nil {
					return
				}
			}
		}()
	}
	for range 3 {
		<-busy
	}
	doomed.Close()
	for range 3 {
		if err := <-ended; err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the peer of a dead client: %v", err)
		}
	}
	l.Close()
	if err := stay.Send(ctx, []byte("still here")); err != nil {
		t.Error(err)
	}
	if _, err := stayPeer.Recv(ctx, make([]byte, 16)); err != nil {
		t.Error(err)
	}
	stay.Close()
	stayPeer.Close()
	idle(t, a)
	idle(t, b)
}

// TestDaemonGone checks that clients are notified when their daemon exits, and that it resets their connections.
func TestDaemonGone(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, nil)
	got := make(chan error, 1)
	go func() {
		_, err := ca.Recv(ctx, make([]byte, 8))
		got <- err
	}()
	dev := b.Device()
	b.Server().Close()
	<-dev.Done()
	if !errors.Is(dev.Err(), iwarp.ErrDaemonGone) {
		t.Errorf("device: %v", dev.Err())
	}
	if err := cb.Send(ctx, nil); !errors.Is(err, iwarp.ErrDaemonGone) {
		t.Errorf("send: %v", err)
	}
	if _, err := dev.AllocPD(ctx); !errors.Is(err, iwarp.ErrDaemonGone) {
		t.Errorf("allocate: %v", err)
	}
	if err := <-got; err == nil || !strings.Contains(err.Error(), "connection reset by peer") {
		t.Errorf("the peer of a dead daemon: %v", err)
	}
}

// TestDraining checks that clients are notified when their daemon drains, can finish their work, and get no new
// connections.
func TestDraining(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, nil)
	l := listen(t, ctx, b, ":7180", nil)
	dev := b.Device()
	if !dev.DrainDeadline().IsZero() {
		t.Error("a deadline before draining")
	}
	left := make(chan int, 1)
	go func() { left <- b.Server().Drain(ctx, time.Minute) }()
	<-dev.Draining()
	if d := time.Until(dev.DrainDeadline()); d <= 0 || d > time.Minute {
		t.Errorf("deadline in %v", d)
	}
	for range 2 {
		if _, err := l.Accept(ctx); !errors.Is(err, iwarp.ErrDraining) || !errors.Is(err, iwarp.ErrDaemonGone) {
			t.Errorf("accept: %v", err)
		}
	}
	if _, err := dev.Dial(ctx, netip.AddrPortFrom(a.Addr(), 7180).String(), nil); !errors.Is(err, iwarp.ErrDraining) {
		t.Errorf("dial: %v", err)
	}
	if _, err := a.Device().Dial(ctx, netip.AddrPortFrom(b.Addr(), 7180).String(), nil); !errors.Is(err, iwarp.ErrRefused) {
		t.Errorf("dial of a peer: %v", err)
	}
	if err := ca.Send(ctx, []byte("last")); err != nil {
		t.Error(err)
	}
	if n, err := cb.Recv(ctx, make([]byte, 8)); err != nil || n != 4 {
		t.Errorf("receive: %d, %v", n, err)
	}
	cb.Close()
	l.Close()
	if n := <-left; n != 0 {
		t.Errorf("%d connections left", n)
	}
	select {
	case <-dev.Done():
		t.Error("the device ended")
	default:
	}
}
