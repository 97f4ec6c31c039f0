package embed_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// sctpKinds are the variants of SCTP.
var sctpKinds = []iwarp.Startup{
	{Transport: iwarp.SCTP},
	{Transport: iwarp.SCTP, Revision: 1},
	{Transport: iwarp.SCTPDraft},
	{Transport: iwarp.SCTP, UDP: true},
}

// TestSCTP runs the Conn API over SCTP, where it behaves the same.
func TestSCTP(t *testing.T) {
	for _, st := range sctpKinds {
		t.Run(fmt.Sprintf("%d-%d-%v", st.Transport, st.Revision, st.UDP), func(t *testing.T) {
			a, b, ctx := wire(t, embed.PairConfig{})
			ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: st})
			buf := make([]byte, 1<<16)
			for _, n := range []int{0, 1, 1000, 16384} {
				msg := bytes.Repeat([]byte{byte(n)}, n)
				if err := ca.Send(ctx, msg); err != nil {
					t.Fatal(err)
				}
				if got, err := cb.Recv(ctx, buf); err != nil || !bytes.Equal(buf[:got], msg) {
					t.Fatalf("recv %d: %d bytes, %v", n, got, err)
				}
				if err := cb.Send(ctx, msg); err != nil {
					t.Fatal(err)
				}
				if got, err := ca.Recv(ctx, buf); err != nil || got != n {
					t.Fatalf("recv back %d: %d bytes, %v", n, got, err)
				}
			}
			mr := alloc(t, ctx, cb, 1<<20, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite|iwarp.AccessRemoteAtomic)
			src, dst := make([]byte, 1<<20), make([]byte, 1<<20)
			for i := range src {
				src[i] = byte(i * 7)
			}
			if err := ca.Write(ctx, mr.Remote(), src); err != nil {
				t.Fatal(err)
			}
			if err := ca.Read(ctx, mr.Remote(), dst); err != nil || !bytes.Equal(src, dst) {
				t.Fatal("read:", err)
			}
			if _, err := ca.FetchAdd(ctx, mr.RemoteAt(0, 8), 5); err != nil {
				t.Fatal(err)
			}
			if err := ca.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := cb.Recv(ctx, buf); !errors.Is(err, io.EOF) {
				t.Fatal("recv after close:", err)
			}
			if err := cb.Close(); err != nil {
				t.Fatal(err)
			}
			for _, s := range allStats(b) {
				if s.TxRecords != 0 || s.TxFPDUs == 0 {
					t.Errorf("went by TCP: %+v", s)
				}
			}
		})
	}
}

// TestSCTPReject checks that private data passes in both directions, also with a rejection.
func TestSCTPReject(t *testing.T) {
	for _, st := range sctpKinds {
		a, b, ctx := wire(t, embed.PairConfig{})
		l := listen(t, ctx, b, ":7174", &iwarp.Config{Startup: st})
		done := make(chan error, 1)
		go func() {
			r, err := l.Request(ctx)
			if err == nil && string(r.PrivateData()) != "may I" {
				err = fmt.Errorf("private data %q", r.PrivateData())
			}
			if err == nil {
				err = r.Reject(ctx, []byte("no"))
			}
			done <- err
		}()
		_, err := a.Device().Dial(ctx, b.Addr().String()+":7174", &iwarp.Config{Startup: st, PrivateData: []byte("may I")})
		var re *iwarp.RejectError
		if !errors.As(err, &re) || st.Transport == iwarp.SCTP && string(re.PrivateData) != "no" {
			t.Errorf("%+v: dial: %v", st, err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestSCTPMismatch checks that a peer that uses the other profile, or only TCP, is refused.
func TestSCTPMismatch(t *testing.T) {
	a, b, ctx := wire(t, embed.PairConfig{})
	if _, err := b.Device().Listen(ctx, ":7174", &iwarp.Config{Startup: iwarp.Startup{Transport: iwarp.SCTP}}); err != nil {
		t.Fatal(err)
	}
	for _, st := range []iwarp.Startup{{Transport: iwarp.SCTPDraft}, {}} {
		if c, err := a.Device().Dial(ctx, b.Addr().String()+":7174", &iwarp.Config{Startup: st}); err == nil {
			c.Close()
			t.Errorf("%+v: connected", st)
		}
	}
	for _, st := range []iwarp.Startup{{UDP: true}, {Transport: 9}} {
		if _, err := a.Device().Listen(ctx, ":7175", &iwarp.Config{Startup: st}); !errors.Is(err, iwarp.ErrInvalid) {
			t.Errorf("%+v: %v", st, err)
		}
	}
}

// TestSCTPCounters checks that an association's counters are listed with its queue pair and remain in the sums after
// it ends.
func TestSCTPCounters(t *testing.T) {
	a, b, ctx := wire(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: iwarp.Startup{Transport: iwarp.SCTP}})
	if err := ca.Send(ctx, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := cb.Recv(ctx, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	dev := newDevice(t, ctx, b)
	defer dev.Close()
	qps, err := allQPs(ctx, dev.Admin())
	if err != nil || len(qps) != 1 || qps[0].SctpState != "ESTABLISHED" || qps[0].TcpState != "" || len(qps[0].Tcp) != 0 {
		t.Fatalf("%v, %v", qps, err)
	}
	of := func(cs []*ctrlpb.Counter, name string) uint64 {
		for _, c := range cs {
			if c.Name == name {
				return c.Value
			}
		}
		t.Errorf("no counter %s", name)
		return 0
	}
	if q := qps[0].Sctp; of(q, "rx_chunks") < 2 || of(q, "ddp_sessions") != 1 || of(q, "path_mtu") < 576 || of(q, "path_rto_ns") == 0 {
		t.Errorf("%v", q)
	}
	sum := func(name string) uint64 {
		n, ok := counters(t, ctx, dev.Admin())[name]
		if !ok {
			t.Errorf("no counter %s", name)
		}
		return n
	}
	if sum("sctp.assocs") != 1 || sum("sctp.listen_cookies_good") != 1 {
		t.Error("no association")
	}
	if err := errors.Join(ca.Close(), cb.Close()); err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the association ends", func() bool { return sum("sctp.assocs") == 0 })
	if sum("sctp.rx_chunks") < 2 || sum("sctp.ddp_sessions") != 1 {
		t.Error("the counters of what is over are lost")
	}
}

// TestSCTPPeerToPeer checks that a client that asks for peer-to-peer mode sends a ready-to-receive message that no
// program sees, and that others send none.
func TestSCTPPeerToPeer(t *testing.T) {
	for _, ask := range []bool{true, false} {
		a, b, ctx := wire(t, embed.PairConfig{})
		ca, cb := connect(t, ctx, a, b, &iwarp.Config{Startup: iwarp.Startup{Transport: iwarp.SCTP, PeerToPeer: ask}})
		if ca.Info().PeerToPeer != ask || cb.Info().PeerToPeer != ask {
			t.Errorf("asked %v: %v and %v", ask, ca.Info().PeerToPeer, cb.Info().PeerToPeer)
		}
		first, second := ca, cb
		if !ask {
			first, second = cb, ca // RFC 6581 section 7: either side may send first, also without an RTR
		}
		if err := first.Send(ctx, []byte("x")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 10)
		if n, err := second.Recv(ctx, buf); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		var writes uint64
		for _, ci := range allConns(b) {
			writes += ci.RDMAP.RxWrites
		}
		if (writes == 1) != ask {
			t.Errorf("asked %v: %d Writes came", ask, writes)
		}
	}
}
