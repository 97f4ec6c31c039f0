package embed_test

import (
	"errors"
	"fmt"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// TestDepths checks that an accept without depths grants what the initiator requests, within the limits, and that
// each side sees the other's values (RFC 6581 section 9.1).
func TestDepths(t *testing.T) {
	for _, st := range []iwarp.Startup{{}, {Revision: 1}, {Transport: iwarp.SCTP}, {Transport: iwarp.SCTPDraft}} {
		enhanced := st.Revision != 1 && st.Transport != iwarp.SCTPDraft
		t.Run(fmt.Sprintf("%d-%d", st.Transport, st.Revision), func(t *testing.T) {
			a, b, ctx := wire(t, embed.PairConfig{})
			for _, reject := range []bool{false, true} {
				l := listen(t, ctx, b, ":0", &iwarp.Config{Startup: st})
				type result struct {
					c   *iwarp.Conn
					err error
				}
				done := make(chan result, 1)
				go func() {
					r, err := l.Request(ctx)
					if err == nil && enhanced && (r.IRD() != 33 || r.ORD() != 44) {
						err = fmt.Errorf("the request has IRD %d, ORD %d", r.IRD(), r.ORD())
					}
					var c *iwarp.Conn
					switch {
					case err != nil:
					case reject:
						err = r.Reject(ctx, nil)
					default:
						c, err = r.AcceptConn(ctx, nil)
					}
					done <- result{c, err}
				}()
				ask := st
				ask.IRD, ask.ORD = 33, 44
				ca, err := a.Device().Dial(ctx, dialAddr(b, l), &iwarp.Config{Startup: ask})
				r := <-done
				if r.err != nil {
					t.Fatal(r.err)
				}
				if reject {
					re, ok := errors.AsType[*iwarp.RejectError](err)
					if want := 16; !ok || enhanced && (re.IRD != want || re.ORD != want) || !enhanced && (re.IRD != -1 || re.ORD != -1) {
						t.Errorf("rejected by %v: %+v", err, re)
					}
					l.Close()
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				ia, ib := ca.Info(), r.c.Info()
				if enhanced {
					if ia.IRD != 33 || ia.ORD != 44 || ia.PeerIRD != 44 || ia.PeerORD != 33 {
						t.Errorf("initiator: %+v", ia)
					}
					if ib.IRD != 44 || ib.ORD != 33 || ib.PeerIRD != 33 || ib.PeerORD != 44 {
						t.Errorf("responder: %+v", ib)
					}
				} else {
					if ia.IRD != 33 || ia.ORD != 44 || ia.PeerIRD != -1 || ia.PeerORD != -1 {
						t.Errorf("initiator: %+v", ia)
					}
					if ib.IRD != 16 || ib.ORD != 16 || ib.PeerIRD != -1 || ib.PeerORD != -1 {
						t.Errorf("responder: %+v", ib)
					}
				}
				if err := errors.Join(ca.Close(), r.c.Close(), l.Close()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
