package embed_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// streams opens a connection between two nodes as a byte stream.
func streams(t *testing.T, ctx context.Context, nb *embed.Node, a *end, cfg *iwarp.Config) (sa, sb *iwarp.Stream, l *iwarp.Listener) {
	t.Helper()
	lcfg := iwarp.Config{Streaming: true}
	if cfg != nil {
		lcfg.Startup = cfg.Startup
	}
	l = listen(t, ctx, nb, ":0", &lcfg)
	var err error
	if sa, err = a.qp.ConnectStream(ctx, dialAddr(nb, l), cfg); err != nil {
		t.Fatal(err)
	}
	if sb, err = l.AcceptStream(ctx); err != nil {
		t.Fatal(err)
	}
	if sa.Remote != sb.Local || sa.Local != sb.Remote {
		t.Errorf("%v to %v, %v to %v", sa.Local, sa.Remote, sb.Local, sb.Remote)
	}
	return sa, sb, l
}

// talk sends n bytes derived from seed from one side and reads them on the other in pieces of random size.
func talk(ctx context.Context, from, to *iwarp.Stream, n int, seed uint64) error {
	data := make([]byte, n)
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	sent := make(chan error, 1)
	go func() {
		b := data
		for len(b) > 0 {
			k := min(len(b), 1+int(seed%50000))
			if err := from.Write(ctx, b[:k]); err != nil {
				sent <- err
				return
			}
			b = b[k:]
		}
		sent <- nil
	}()
	got := make([]byte, n)
	for at := 0; at < n; {
		k := min(n-at, 1+rng.IntN(20000))
		if err := to.ReadFull(ctx, got[at:at+k]); err != nil {
			return err
		}
		at += k
	}
	if !bytes.Equal(got, data) {
		return errors.New("bytes differ")
	}
	return <-sent
}

const badWire = "loss=0.02,duplicate=0.02,reorder=0.05,delay=100us"

// TestDelayedMPA makes programs talk over the stream in both directions and start MPA directly after the last byte.
// No byte on either side of the switch may be lost or misread, over good and lossy wires, with any start-up,
// whichever side is the initiator (RFC 5044 section 7.1).
func TestDelayedMPA(t *testing.T) {
	rng := testenv.Rand(t)
	for _, tt := range []struct {
		name    string
		loss    string
		startup iwarp.Startup
		early   bool // the responder has the request before it starts MPA
		swapped bool // the side that accepted is the initiator
	}{
		{"plain", "", iwarp.Startup{}, false, false},
		{"request comes first", "", iwarp.Startup{}, true, false},
		{"revision 1", "", iwarp.Startup{Revision: 1}, true, false},
		{"not peer to peer", "", iwarp.Startup{NoPeerToPeer: true}, false, false},
		{"markers, no CRC", "", iwarp.Startup{Markers: true, NoCRC: true}, true, false},
		{"bad wire", badWire, iwarp.Startup{}, false, false},
		{"swapped", "", iwarp.Startup{}, false, true},
		{"swapped, request comes first", "", iwarp.Startup{}, true, true},
		{"swapped, revision 1", "", iwarp.Startup{Revision: 1}, true, true},
		{"swapped, not peer to peer", "", iwarp.Startup{NoPeerToPeer: true}, false, true},
		{"swapped, RTR Send", "", iwarp.Startup{RTR: iwarp.RTRSend}, true, true},
		{"swapped, RTR Read", "", iwarp.Startup{RTR: iwarp.RTRRead}, false, true},
		{"swapped, markers, bad wire", badWire, iwarp.Startup{Markers: true}, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			optional := ctrl.Config{Startup: ctrl.StartupDefaults{CRC: ctrl.CRCOptional}}
			cfg := embed.PairConfig{CtrlA: optional, CtrlB: optional}
			if tt.loss != "" {
				c, err := impair.Parse(tt.loss)
				if err != nil {
					t.Fatal(err)
				}
				cfg.Pipe = link.PipeConfig{AtoB: c, BtoA: c}
			}
			na, nb, ctx := pair(t, cfg)
			for range 3 {
				dialer, accepter := newEnd(t, ctx, na, 16), newEnd(t, ctx, nb, 16)
				sa, sb, l := streams(t, ctx, nb, dialer, &iwarp.Config{Startup: tt.startup})
				for range 3 {
					if err := talk(ctx, sa, sb, rng.IntN(100000), rng.Uint64()); err != nil {
						t.Fatal("to the listener:", err)
					}
					if err := talk(ctx, sb, sa, rng.IntN(100000), rng.Uint64()); err != nil {
						t.Fatal("to the dialer:", err)
					}
				}
				if err := l.Close(); err != nil { // accepted streams remain open
					t.Fatal(err)
				}
				// From here on sa and a belong to the initiator.
				a, b := dialer, accepter
				if tt.swapped {
					a, b, sa, sb = b, a, sb, sa
				}
				a.recv(t, &iwarp.RecvWR{SGEs: []iwarp.SGE{a.mem.SGE(8192, 4096)}})
				b.recv(t, &iwarp.RecvWR{SGEs: []iwarp.SGE{b.mem.SGE(0, 4096)}})
				// The last bytes of the stream and the MPA request go out together.
				if err := sa.Write(ctx, []byte("start")); err != nil {
					t.Fatal(err)
				}
				started := make(chan error, 1)
				go func() {
					cfg := &iwarp.Config{PrivateData: []byte("private")}
					info, err := sa.Initiate(ctx, a.qp, cfg)
					if err == nil && (string(info.PrivateData) != "reply" || !info.Initiator) {
						err = fmt.Errorf("%+v", info)
					}
					started <- err
				}()
				word := make([]byte, 5)
				if err := sb.ReadFull(ctx, word); err != nil || string(word) != "start" {
					t.Fatalf("%q, %v", word, err)
				}
				if tt.early {
					n := nb
					if tt.swapped {
						n = na
					}
					testenv.Until(t, "the request waits in the engine", func() bool { return allConns(n)[0].StreamData > 0 })
				}
				req, err := sb.Request(ctx)
				if err != nil || string(req.PrivateData()) != "private" {
					t.Fatal(req, err)
				}
				info, err := req.Accept(ctx, b.qp, &iwarp.Config{PrivateData: []byte("reply")})
				if err != nil || info.Initiator || string(info.PrivateData) != "private" {
					t.Fatal(info, err)
				}
				if err := <-started; err != nil {
					t.Fatal(err)
				}
				copy(a.mem.Bytes(), "an FPDU")
				a.post(t, &iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 4000)}})
				a.wait(t, ctx, 1)
				if wc := b.wait(t, ctx, 1)[0]; wc.Len != 4000 || string(b.mem.Bytes()[:7]) != "an FPDU" {
					t.Errorf("%+v", wc)
				}
				copy(b.mem.Bytes()[4096:], "its answer")
				b.post(t, &iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{b.mem.SGE(4096, 4001)}})
				b.wait(t, ctx, 1)
				if wc := a.wait(t, ctx, 1)[0]; wc.Len != 4001 || string(a.mem.Bytes()[8192:8202]) != "its answer" {
					t.Errorf("%+v", wc)
				}
				if _, err := sb.Read(ctx, word); !errors.Is(err, iwarp.ErrState) {
					t.Error("read from a stream on which MPA was started")
				}
				if err := a.qp.Abort(ctx); err != nil {
					t.Fatal(err)
				}
				if tt.loss != "" { // the wire may lose the reset, and then b would never end
					_ = b.qp.Abort(ctx)
				}
				<-b.qp.Done()
				<-a.qp.Done()
				testenv.Until(t, "no connection is left", func() bool { return len(allConns(nb))+len(allConns(na)) == 0 })
			}
		})
	}
}

// TestStreamEnds ends the connection from either side before MPA is started.
func TestStreamEnds(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	b := make([]byte, 10)
	t.Run("close", func(t *testing.T) {
		sa, sb, _ := streams(t, ctx, nb, newEnd(t, ctx, na, 8), nil)
		if err := sb.Write(ctx, []byte("last words")); err != nil {
			t.Fatal(err)
		}
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
		if err := sa.ReadFull(ctx, b); err != nil || string(b) != "last words" {
			t.Errorf("%q, %v", b, err)
		}
		if n, err := sa.Read(ctx, b); !errors.Is(err, io.EOF) {
			t.Errorf("%d, %v", n, err)
		}
		if err := sa.Close(); err != nil {
			t.Error(err)
		}
		if _, err := sa.StartMPA(ctx, nil); err == nil {
			t.Error("MPA on a closed stream")
		}
	})
	t.Run("abort", func(t *testing.T) {
		a := newEnd(t, ctx, na, 8)
		sa, sb, _ := streams(t, ctx, nb, a, nil)
		if err := sa.Abort(); err != nil {
			t.Fatal(err)
		}
		if _, err := sb.Read(ctx, b); !errors.Is(err, iwarp.ErrRefused) || strings.Contains(err.Error(), "connect:") {
			t.Errorf("%v", err)
		}
		<-a.qp.Done()
		if _, err := sa.Read(ctx, b); !errors.Is(err, iwarp.ErrClosed) || !errors.Is(a.qp.Err(), iwarp.ErrClosed) {
			t.Errorf("on the side that aborted: %v, queue pair %v", err, a.qp.Err())
		}
		if err := sb.Close(); err != nil {
			t.Errorf("close after the end: %v", err)
		}
	})
	t.Run("reset by the peer", func(t *testing.T) {
		sa, sb, _ := streams(t, ctx, nb, newEnd(t, ctx, na, 8), nil)
		if err := sb.Abort(); err != nil {
			t.Fatal(err)
		}
		if _, err := sa.Read(ctx, b); !errors.Is(err, iwarp.ErrRefused) || !strings.Contains(err.Error(), "stream to") {
			t.Errorf("%v", err)
		}
	})
	t.Run("wrong queue pair", func(t *testing.T) {
		a, other, theirs := newEnd(t, ctx, na, 8), newEnd(t, ctx, na, 8), newEnd(t, ctx, nb, 8)
		sa, sb, _ := streams(t, ctx, nb, a, nil)
		if _, err := sa.Initiate(ctx, other.qp, nil); !errors.Is(err, iwarp.ErrInvalid) {
			t.Errorf("%v", err)
		}
		if _, err := sb.StartMPA(ctx, nil); !errors.Is(err, iwarp.ErrInvalid) {
			t.Errorf("%v", err)
		}
		if _, err := sb.Initiate(ctx, nil, nil); !errors.Is(err, iwarp.ErrInvalid) {
			t.Errorf("%v", err)
		}
		started := make(chan error, 1)
		go func() { _, err := sb.Initiate(ctx, theirs.qp, nil); started <- err }()
		r, err := sa.Request(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Accept(ctx, other.qp, nil); !errors.Is(err, iwarp.ErrInvalid) {
			t.Errorf("%v", err)
		}
		if _, err := r.AcceptConn(ctx, nil); !errors.Is(err, iwarp.ErrInvalid) {
			t.Errorf("%v", err)
		}
		if _, err := r.Accept(ctx, nil, nil); err != nil { // the stream already has a queue pair
			t.Errorf("%v", err)
		}
		if err := <-started; err != nil {
			t.Error(err)
		}
		if a.qp.Info() == nil || theirs.qp.Info() == nil {
			t.Error("not established")
		}
	})
	t.Run("both responders", func(t *testing.T) {
		a := newEnd(t, ctx, na, 8)
		sa, sb, _ := streams(t, ctx, nb, a, &iwarp.Config{Startup: iwarp.Startup{Timeout: 50 * time.Millisecond}})
		errs := make(chan error, 2)
		go func() { _, err := sa.Request(ctx); errs <- err }()
		go func() { _, err := sb.Request(ctx); errs <- err }()
		// One side reports the reason and ends the connection. Which of the two the other side sees first is random.
		said := false
		for range 2 {
			err := <-errs
			switch {
			case errors.Is(err, iwarp.ErrTimeout) && strings.Contains(err.Error(), "may be a responder too"):
				said = true
			case !errors.Is(err, iwarp.ErrTimeout) && !errors.Is(err, iwarp.ErrRefused):
				t.Errorf("%v", err)
			}
		}
		if !said {
			t.Error("neither says that both are responders")
		}
		<-a.qp.Done()
	})
	t.Run("no MPA", func(t *testing.T) {
		sa, sb, _ := streams(t, ctx, nb, newEnd(t, ctx, na, 8), nil)
		if err := sa.Write(ctx, bytes.Repeat([]byte("no MPA frame "), 10)); err != nil {
			t.Fatal(err)
		}
		if _, err := sb.Request(ctx); !errors.Is(err, iwarp.ErrProtocol) {
			t.Errorf("%v", err)
		}
	})
	t.Run("rejected", func(t *testing.T) {
		sa, sb, _ := streams(t, ctx, nb, newEnd(t, ctx, na, 8), nil)
		go func() {
			if r, err := sb.Request(ctx); err == nil {
				_ = r.Reject(ctx, []byte("no"))
			}
		}()
		_, err := sa.StartMPA(ctx, nil)
		if r, ok := errors.AsType[*iwarp.RejectError](err); !ok || string(r.PrivateData) != "no" {
			t.Errorf("%v", err)
		}
	})
	t.Run("rejected by the side that connected", func(t *testing.T) {
		a, b := newEnd(t, ctx, na, 8), newEnd(t, ctx, nb, 8)
		sa, sb, _ := streams(t, ctx, nb, a, nil)
		go func() {
			if r, err := sa.Request(ctx); err == nil {
				_ = r.Reject(ctx, []byte("no"))
			}
		}()
		_, err := sb.Initiate(ctx, b.qp, nil)
		if r, ok := errors.AsType[*iwarp.RejectError](err); !ok || string(r.PrivateData) != "no" {
			t.Errorf("%v", err)
		}
		<-a.qp.Done()
		if err := a.qp.Err(); !errors.Is(err, iwarp.ErrCanceled) {
			t.Errorf("the side that rejected: %v", err)
		}
	})
	t.Run("withdrawn from the side that connected", func(t *testing.T) {
		a, b := newEnd(t, ctx, na, 8), newEnd(t, ctx, nb, 8)
		sa, sb, _ := streams(t, ctx, nb, a, nil)
		gone := make(chan error, 1)
		go func() { _, err := sb.Initiate(ctx, b.qp, nil); gone <- err }()
		r, err := sa.Request(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.qp.Abort(ctx); err != nil {
			t.Fatal(err)
		}
		select {
		case <-r.Gone():
		case <-ctx.Done():
			t.Fatal(ctx.Err())
		}
		<-a.qp.Done()
		if err := a.qp.Err(); !errors.Is(err, iwarp.ErrRefused) {
			t.Errorf("the side that was asked: %v", err)
		}
		if err := <-gone; err == nil {
			t.Error("the side that gave up gets no event")
		}
		if _, err := r.Accept(ctx, nil, nil); !errors.Is(err, iwarp.ErrNoObject) {
			t.Errorf("%v", err)
		}
	})
}

// TestStreamContext checks that a Read whose context has ended returns the bytes that are there, and that later Reads
// get those that follow.
func TestStreamContext(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	sa, sb, _ := streams(t, ctx, nb, newEnd(t, ctx, na, 8), nil)
	if err := sb.Write(ctx, []byte("0123456789")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	if n, err := sa.Read(ctx, b[:1]); n != 1 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	n, err := sa.Read(ended, b[1:])
	if n == 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if err := sb.Write(ctx, []byte("more")); err != nil {
		t.Fatal(err)
	}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	b = append(b[:1+n], make([]byte, 13-n)...)
	if err := sa.ReadFull(wait, b[1+n:]); err != nil || string(b) != "0123456789more" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestStreamWrites checks that long Writes of several goroutines are not mixed.
func TestStreamWrites(t *testing.T) {
	const writers, size = 4, 200_000
	na, nb, ctx := pair(t, embed.PairConfig{})
	sa, sb, _ := streams(t, ctx, nb, newEnd(t, ctx, na, 8), nil)
	done := make(chan error, writers)
	for i := range writers {
		go func() { done <- sb.Write(ctx, bytes.Repeat([]byte{byte('a' + i)}, size)) }()
	}
	b := make([]byte, size)
	for range writers {
		if err := sa.ReadFull(ctx, b); err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(b, b[:1]); n != size {
			t.Errorf("%d bytes of %d are %q", n, size, b[0])
		}
	}
	for range writers {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestRequestAgain checks that a program may wait again for the peer's request after the context of the first wait has ended.
func TestRequestAgain(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	dialer, accepter := newEnd(t, ctx, na, 8), newEnd(t, ctx, nb, 8)
	sa, sb, _ := streams(t, ctx, nb, dialer, nil)
	short, cancel := context.WithCancel(ctx)
	first := make(chan error, 1)
	go func() { _, err := sb.Request(short); first <- err }()
	testenv.Until(t, "MPA is started", func() bool {
		_, err := sb.Read(ctx, nil)
		return errors.Is(err, iwarp.ErrState)
	})
	if _, err := sb.Request(ctx); !errors.Is(err, iwarp.ErrBusy) {
		t.Errorf("a second call at the same time: %v", err)
	}
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	started := make(chan error, 1)
	go func() { _, err := sa.StartMPA(ctx, nil); started <- err }()
	r, err := sb.Request(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Accept(ctx, accepter.qp, nil); err != nil {
		t.Error(err)
	}
	if err := <-started; err != nil {
		t.Error(err)
	}
}

// TestBothInitiate checks that two programs that both start as initiator both get an error that says so (RFC 5044
// section 7.1.2, rule 8), even if frames are lost.
func TestBothInitiate(t *testing.T) {
	for _, loss := range []string{"", badWire} {
		c, err := impair.Parse(loss)
		if err != nil {
			t.Fatal(err)
		}
		na, nb, ctx := pair(t, embed.PairConfig{Pipe: link.PipeConfig{AtoB: c, BtoA: c}})
		for range 5 {
			a, b := newEnd(t, ctx, na, 8), newEnd(t, ctx, nb, 8)
			sa, sb, l := streams(t, ctx, nb, a, nil)
			errs := make(chan error, 2)
			go func() { _, err := sa.StartMPA(ctx, nil); errs <- err }()
			go func() { _, err := sb.Initiate(ctx, b.qp, nil); errs <- err }()
			for range 2 {
				if err := <-errs; !errors.Is(err, iwarp.ErrProtocol) || !strings.Contains(err.Error(), "both sides started as initiator") {
					t.Errorf("wire %q: %v", loss, err)
				}
			}
			for _, q := range []*iwarp.QP{a.qp, b.qp} {
				<-q.Done()
				if err := q.Err(); !errors.Is(err, iwarp.ErrProtocol) {
					t.Errorf("wire %q: %v", loss, err)
				}
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
