package embed_test

import (
	"errors"
	"strings"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFewFiles checks that a process that runs out of descriptors, at either end of the socket, gets an error for the
// request and loses nothing else.
func TestFewFiles(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	a, b, dev := newEnd(t, ctx, na, 16), newEnd(t, ctx, nb, 16), na.Device()
	join(t, ctx, nb, a.qp, b.qp)
	refused := 0
	for n := range 8 {
		restore := testenv.FewFiles(t, n)
		qp, err := dev.CreateQP(ctx, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq})
		if err == nil {
			err = qp.Close()
		}
		cq, cqErr := dev.CreateCQ(ctx, 4)
		if cqErr == nil {
			cqErr = cq.Close()
		}
		mr, mrErr := a.pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite)
		if mrErr == nil {
			mrErr = mr.Close()
		}
		restore()
		for _, err := range []error{err, cqErr, mrErr} {
			if err == nil {
				continue
			}
			refused++
			if !strings.Contains(err.Error(), "too many open files") || !strings.Contains(err.Error(), "LimitNOFILE") {
				t.Errorf("%d descriptors left: %v", n, err)
			}
			if n == 7 {
				t.Errorf("%d descriptors are too few: %v", n, err)
			}
		}
	}
	if refused < 3 {
		t.Errorf("%d refusals", refused)
	}
	// Objects that the client could not receive are released in the background.
	testenv.Until(t, "one object of each kind is left", func() bool {
		st, err := dev.Admin().Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return st.Qps == 1 && st.Cqs == 1 && st.Mrs == 1
	})
	if err := errors.Join(dev.Err(), nb.Device().Err(), a.qp.Err(), b.qp.Err()); err != nil {
		t.Error(err)
	}
	a.post(t, &iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 8)}, Remote: b.mem.Base(), RKey: b.mem.RKey()})
	a.wait(t, ctx, 1)
}
