package adversary

import (
	"errors"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// TestDSCP changes the DSCP of a connection while it lasts (RFC 9293 SHLD-21): what is sent afterwards has it.
func TestDSCP(t *testing.T) {
	w := newWorld(t)
	c := w.open(t, options{})
	c.begin()
	all := c.regions["all"]
	for i, dscp := range []uint32{46, 0, 63, 10} {
		if err := c.qp.SetDSCP(c.ctx, dscp); err != nil {
			t.Fatal(err)
		}
		c.post(iwarp.SendWR{Op: iwarp.OpSend, SGEs: []iwarp.SGE{all.SGE(0, 64)}})
		c.want(peer.SendMsg(uint32(i+1), all.Bytes()[:64]))
		if got := uint32(c.s.TOS >> 2); got != dscp {
			t.Errorf("message %d has DSCP %d; want %d", i+1, got, dscp)
		}
	}
	if err := c.qp.SetDSCP(c.ctx, 64); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("64: %v", err)
	}
	if err := c.s.Reset(); err != nil {
		t.Fatal(err)
	}
	_ = c.over()
	if err := c.qp.SetDSCP(c.ctx, 10); !errors.Is(err, iwarp.ErrState) {
		t.Errorf("after the end: %v", err)
	}
	c.destroy()
	w.alone(t)
}
