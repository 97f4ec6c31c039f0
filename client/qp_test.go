package iwarp

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// TestWCErr checks that the error of a flushed completion has the reason for the connection's end, which comes after it.
func TestWCErr(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &QP{d: new(Device), done: make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		if err := q.WCErr(ctx, &WC{Status: WCSuccess}); err != nil {
			t.Errorf("the error of a completion that succeeded is %v", err)
		}
		flushed := func(ctx context.Context) <-chan error {
			got := make(chan error, 1)
			go func() { got <- q.WCErr(ctx, &WC{Status: WCFlushErr, Op: WCSend}) }()
			synctest.Wait()
			return got
		}
		cause := func(got <-chan error) error {
			synctest.Wait()
			select {
			case err := <-got:
				wc, ok := errors.AsType[*WCError](err)
				if !ok || wc.Status != WCFlushErr || wc.Op != WCSend {
					t.Fatalf("the error is %v", err)
				}
				return wc.Cause
			default:
				t.Fatal("no error yet")
			}
			return nil
		}

		got := flushed(ctx)
		if len(got) > 0 {
			t.Error("WCErr did not wait")
		}
		cancel()
		if err := cause(got); err != nil {
			t.Errorf("after the cancellation the cause is %v", err)
		}

		got = flushed(t.Context())
		q.over(nil)
		if err := cause(got); err != ErrPeerClosed {
			t.Errorf("the cause is %v", err)
		}
		if err := cause(flushed(t.Context())); err != ErrPeerClosed {
			t.Errorf("after the end the cause is %v", err)
		}
	})
}
