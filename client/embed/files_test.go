package embed_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFewFiles checks that a process that runs out of descriptors, at either end of the socket, gets an error for the
// request and loses nothing else.
func TestFewFiles(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{CtrlA: ctrl.Config{Limits: ctrl.Limits{Captures: 16}}})
	a, b, dev := newEnd(t, ctx, na, 16), newEnd(t, ctx, nb, 16), na.Device()
	join(t, ctx, nb, a.qp, b.qp)
	calls := map[string]func() (io.Closer, error){
		"CreateQP": func() (io.Closer, error) {
			return dev.CreateQP(ctx, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq})
		},
		"CreateSRQ":         func() (io.Closer, error) { return dev.CreateSRQ(ctx, iwarp.SRQConfig{PD: a.pd}) },
		"CreateCQ":          func() (io.Closer, error) { return dev.CreateCQ(ctx, 4) },
		"CreateCompChannel": func() (io.Closer, error) { return dev.CreateCompChannel(ctx) },
		"Alloc":             func() (io.Closer, error) { return a.pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite) },
		"Capture":           func() (io.Closer, error) { return dev.Admin().Capture(ctx, iwarp.CaptureFilter{}) },
		"NewDevice":         func() (io.Closer, error) { return na.NewDevice(ctx) },
	}
	for name, call := range calls {
		if name == "Capture" && testenv.Sockets() { // has no frames
			continue
		}
		refused := 0
		for n := range 12 {
			restore := testenv.FewFiles(t, n)
			c, err := call()
			restore()
			switch {
			case err == nil:
				if err = c.Close(); err != nil {
					t.Errorf("%s with %d descriptors left: closing: %v", name, n, err)
				}
			case !strings.Contains(err.Error(), "too many open files") || !strings.Contains(err.Error(), "LimitNOFILE"):
				t.Errorf("%s with %d descriptors left: %v", name, n, err)
			case n == 11:
				t.Errorf("%s: %d descriptors are too few: %v", name, n, err)
			default:
				refused++
			}
		}
		if refused == 0 {
			t.Errorf("%s never lacked a descriptor", name)
		}
	}
	// Objects that the client could not receive are released in the background.
	testenv.Until(t, "one object of each kind is left", func() bool {
		st, err := dev.Admin().Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return st.Clients == 1 && st.Qps == 1 && st.Cqs == 1 && st.Mrs == 1
	})
	if err := errors.Join(dev.Err(), nb.Device().Err(), a.qp.Err(), b.qp.Err()); err != nil {
		t.Error(err)
	}
	a.post(t, &iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 8)}, Remote: b.mem.Base(), RKey: b.mem.RKey()})
	a.wait(t, ctx, 1)
}
