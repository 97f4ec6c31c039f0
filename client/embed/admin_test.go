package embed_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
)

func TestAdmin(t *testing.T) {
	a, b, ctx := wire(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, nil)
	if _, err := cb.Alloc(ctx, 12345, iwarp.AccessRemoteRead); err != nil {
		t.Fatal(err)
	}
	listen(t, ctx, b, ":7174", &iwarp.Config{Backlog: 5})
	if err := ca.Send(ctx, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := cb.Recv(ctx, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	dev := newDevice(t, ctx, b)
	defer dev.Close()
	adm := dev.Admin()

	if st, err := adm.Status(ctx); err != nil || st.Clients != 2 || st.Qps != 1 || st.Conns != 1 || st.Listens != 1 {
		t.Errorf("%v, %v", st, err)
	}
	qps, err := allQPs(ctx, adm)
	if err != nil || len(qps) != 1 || qps[0].State != "RTS" || qps[0].Remote != ca.Info().Local.String() || len(qps[0].Tcp) < 10 || len(qps[0].Rdmap) < 10 {
		t.Fatalf("%v, %v", qps, err)
	}
	counter := func(name string) uint64 {
		for _, c := range qps[0].Rdmap {
			if c.Name == name {
				return c.Value
			}
		}
		t.Errorf("no counter %s", name)
		return 0
	}
	if n := counter("rx_sends"); n < 1 {
		t.Errorf("%d sends received", n)
	}
	if q, err := adm.QP(ctx, qps[0].Qp); err != nil || q.Qp != cb.QP().Num() {
		t.Errorf("%v, %v", q, err)
	}
	mrs, err := adm.MRs(ctx)
	if err != nil || len(mrs) != 3 || mrs[2].Length != 12345 {
		t.Errorf("%v, %v", mrs, err)
	}
	if ls, err := adm.Listens(ctx); err != nil || len(ls) != 1 || ls[0].Backlog != 5 || !strings.HasSuffix(ls[0].Address, ":7174") {
		t.Errorf("%v, %v", ls, err)
	}
	if cs, err := adm.Clients(ctx); err != nil || len(cs) != 2 || cs[0].Qps != 1 || cs[0].Pid != uint32(os.Getpid()) {
		t.Errorf("%v, %v", cs, err)
	}
	have := counters(t, ctx, adm)
	if have["ctrl.established"] != 1 || have["engine.rx_fpdus"] == 0 || have["link.rx_frames"] == 0 {
		t.Errorf("%v", have)
	}
	if err := adm.Disconnect(ctx, cb.QP().Num(), true); err != nil {
		t.Fatal(err)
	}
	<-ca.QP().Done()
	<-cb.QP().Done()
	if err := adm.Disconnect(ctx, 1<<20, true); !errors.Is(err, iwarp.ErrNoObject) {
		t.Errorf("no such queue pair: %v", err)
	}
}

// TestCaptureQuota checks that each user's captures are limited, and that one that ends makes room.
func TestCaptureQuota(t *testing.T) {
	a, _, ctx := wire(t, embed.PairConfig{CtrlA: ctrl.Config{
		Limits: ctrl.Limits{Captures: 2}, Allow: []ctrl.Rule{{Admin: true}}, // only root is an administrator without a rule
	}})
	open := func() (*iwarp.Capture, error) { return a.Device().Admin().Capture(ctx, iwarp.CaptureFilter{}) }
	first, err := open()
	if err != nil {
		t.Fatal(err)
	}
	second, err := open()
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if c, err := open(); !errors.Is(err, iwarp.ErrQuota) || !strings.Contains(err.Error(), "max-captures") {
		t.Errorf("third capture: %v, %v", c, err)
	}
	first.Close()
	for {
		c, err := open() // the daemon notices the end of the first within milliseconds
		if err == nil {
			c.Close()
			return
		}
		if !errors.Is(err, iwarp.ErrQuota) || ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

func TestOpen(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "iwarpd.sock")
	_, _, ctx := wire(t, embed.PairConfig{CtrlB: ctrl.Config{Socket: sock, Mode: 0o600}})
	d, err := iwarp.Open(ctx, sock)
	if err != nil {
		t.Fatal(err)
	}
	if at := d.Attr(); at.Workers != 1 || len(at.Addrs) != 2 || at.MaxQP == 0 || at.Version != 1 {
		t.Errorf("%+v", at)
	}
	d.Close()
	if _, err := d.AllocPD(ctx); !errors.Is(err, iwarp.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	t.Setenv("IWARPD_SOCKET", sock)
	l, err := iwarp.Listen(ctx, ":7174", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := iwarp.Dial(ctx, "10.99.0.1:7174", nil); !errors.Is(err, iwarp.ErrRefused) {
		t.Errorf("nobody listens: %v", err)
	}
	if _, err := iwarp.Open(ctx, sock+".none"); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "is iwarpd running") {
		t.Errorf("no socket: %v", err)
	}
}
