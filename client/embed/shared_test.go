package embed_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// session is both ends of a connection.
type session struct{ near, far *iwarp.Conn }

// tell sends a number from one end to the other.
func (s session) tell(ctx context.Context, i int) error {
	buf := make([]byte, 64)
	if err := s.near.Send(ctx, []byte{byte(i)}); err != nil {
		return fmt.Errorf("connection %d: %w", i, err)
	}
	if n, err := s.far.Recv(ctx, buf); n != 1 || err != nil || buf[0] != byte(i) {
		return fmt.Errorf("connection %d: %d bytes, %w", i, n, err)
	}
	return nil
}

// dials is how dev opens connections to l.
type dials struct {
	dev *iwarp.Device
	l   *iwarp.Listener
	to  string
	cfg *iwarp.Config
}

// dial opens n connections at once.
func (d *dials) dial(t *testing.T, ctx context.Context, n int) []session {
	t.Helper()
	all, far, errs := make([]session, n), make([]*iwarp.Conn, n), make([]error, 2*n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { all[i].near, errs[2*i] = d.dev.Dial(ctx, d.to, d.cfg) })
		wg.Go(func() { far[i], errs[2*i+1] = d.l.Accept(ctx) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	// Match the ends: each sends its number.
	for i := range n {
		errs[i] = all[i].near.Send(ctx, []byte{byte(i)})
	}
	buf := make([]byte, 64)
	for i := range n {
		k, err := far[i].Recv(ctx, buf)
		if errs[n+i] = err; k == 1 && int(buf[0]) < n {
			all[buf[0]].far = far[i]
		}
	}
	for i := range n {
		if errs[i] != nil || errs[n+i] != nil || all[i].far == nil {
			t.Fatalf("connection %d: %v, %v", i, errs[i], errs[n+i])
		}
	}
	return all
}

// sharing starts two nodes and returns a dialer whose connections share associations.
func sharing(t *testing.T, st iwarp.Startup) (a, b *embed.Node, d *dials, ctx context.Context) {
	t.Helper()
	a, b, ctx = wire(t, embed.PairConfig{})
	st.SharedAssociation = true
	cfg := &iwarp.Config{Startup: st, SendDepth: 8, RecvDepth: 8, RecvSize: 64}
	l := listen(t, ctx, b, ":7174", cfg)
	return a, b, &dials{a.Device(), l, b.Addr().String() + ":7174", cfg}, ctx
}

// assocs returns the number of associations of a node.
func assocs(n *embed.Node) (sum uint64) {
	for _, s := range allStats(n) {
		sum += s.SCTP.Assocs
	}
	return sum
}

// parted waits until no association is left.
func parted(t *testing.T, nodes ...*embed.Node) {
	t.Helper()
	for _, n := range nodes {
		testenv.Until(t, "an association ends with its last session", func() bool { return assocs(n) == 0 })
	}
}

// TestSCTPShared runs many independent sessions of a client on one association.
func TestSCTPShared(t *testing.T) {
	for kind, st := range sctpKinds {
		t.Run(fmt.Sprintf("%d-%d-%v", st.Transport, st.Revision, st.UDP), func(t *testing.T) {
			n, rounds := 8, 1
			if kind == 0 {
				n, rounds = 40, 3
			}
			a, b, d, ctx := sharing(t, st)
			all := d.dial(t, ctx, n)
			for i, s := range all {
				if s.near.Info().Local != all[0].near.Info().Local || s.near.Info().Remote != all[0].near.Info().Remote {
					t.Errorf("connection %d from %v", i, s.near.Info().Local)
				}
			}
			// A session with a violation ends; the others continue.
			none := iwarp.Remote{RKey: 0x12345678, Len: 4}
			if err := all[3].near.Read(ctx, none, make([]byte, 4)); err == nil {
				t.Error("memory that is not there was read")
			}
			<-all[3].near.QP().Done()
			<-all[3].far.QP().Done()
			for _, qp := range []*iwarp.QP{all[3].near.QP(), all[3].far.QP()} {
				if err := qp.Err(); !errors.As(err, new(*iwarp.TerminateError)) {
					t.Errorf("ended by %v", err)
				}
			}
			if err := all[7].near.Abort(); err != nil {
				t.Error(err)
			}
			<-all[7].far.QP().Done()
			// Streams of ended sessions are reused: there are only 64.
			for round := range rounds {
				for i := 3; i < len(all); i += 4 {
					_ = all[i].near.Close() // two have already ended
					_ = all[i].far.Close()
					all[i] = d.dial(t, ctx, 1)[0]
				}
				for i, s := range all {
					if err := s.tell(ctx, i); err != nil {
						t.Fatalf("round %d: %v", round, err)
					}
				}
				if x, y := assocs(a), assocs(b); x != 1 || y != 1 {
					t.Errorf("round %d: %d and %d associations", round, x, y)
				}
			}
			for i, s := range all {
				if err := s.near.Close(); err != nil {
					t.Errorf("connection %d: %v", i, err)
				}
			}
			parted(t, a, b)
		})
	}
}

// TestSCTPSharedLimits checks that a new association is opened when one is full, and that connections of different
// clients or with different settings do not share one.
func TestSCTPSharedLimits(t *testing.T) {
	a, b, d, ctx := sharing(t, iwarp.Startup{Transport: iwarp.SCTP})
	all := d.dial(t, ctx, 70)
	if x, y := assocs(a), assocs(b); x != 2 || y != 2 {
		t.Errorf("%d and %d associations for 70 connections", x, y)
	}
	dev := newDevice(t, ctx, a)
	defer dev.Close()
	other := *d
	other.dev = dev
	all = append(all, other.dial(t, ctx, 2)...)
	if x := assocs(a); x != 3 {
		t.Errorf("%d associations; another client shares one", x)
	}
	alone := *d.cfg
	alone.Startup.SharedAssociation = false
	all = append(all, (&dials{d.dev, d.l, d.to, &alone}).dial(t, ctx, 1)...)
	if x := assocs(a); x != 4 {
		t.Errorf("%d associations; a connection that did not ask shares one", x)
	}
	for i, s := range all {
		if err := s.tell(ctx, i); err != nil {
			t.Fatal(err)
		}
	}
	// A client that closes takes only its own association along.
	dev.Close()
	<-all[70].far.QP().Done()
	<-all[71].far.QP().Done()
	for i, s := range all {
		if i == 70 || i == 71 {
			continue
		}
		if err := s.tell(ctx, i); err != nil {
			t.Fatal(err)
		}
		if err := s.near.Close(); err != nil {
			t.Fatal(err)
		}
	}
	parted(t, a, b)
	if _, err := d.dev.Dial(ctx, d.to, &iwarp.Config{Startup: iwarp.Startup{SharedAssociation: true}}); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("over TCP: %v", err)
	}
}
