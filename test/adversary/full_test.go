package adversary

import (
	"bytes"
	"errors"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/test/adversary/peer"
)

// An outcome is the expected end of a connection, or that it continues.
type outcome struct {
	kind    outcomeKind
	layer   byte
	typ     byte
	code    byte
	headers headers
}

type (
	outcomeKind uint8
	headers     uint8
)

const (
	goesOn     outcomeKind = iota // no violation: a Send still arrives
	terminated                    // a Terminate, then FIN
	finished                      // a FIN and nothing else
	wasReset                      // RST and nothing else
	cut                           // the raw peer resets: nothing is sent
)

const (
	withDDP  headers = iota // DDP header of the offending segment
	withRDMA                // and its Read Request header
	bare                    // no headers
)

func mpaErr(code byte) outcome                { return outcome{terminated, 2, 0, code, bare} }
func taggedErr(code byte) outcome             { return outcome{terminated, 1, 1, code, withDDP} }
func untaggedErr(code byte) outcome           { return outcome{terminated, 1, 2, code, withDDP} }
func protection(code byte, h headers) outcome { return outcome{terminated, 0, 1, code, h} }
func operation(code byte) outcome             { return outcome{terminated, 0, 2, code, withDDP} }

// An attack is a single violation in full operation.
type attack struct {
	name  string
	rules string // rows of the conformance tables
	opts  options
	// run performs it and returns the ULPDU of the offending segment.
	run       func(c *conn) []byte
	want      outcome
	delivered int      // receives that complete successfully
	msn       uint32   // of the Send that must still arrive; 0: 1
	changed   []string // regions that the valid part may change
}

// runAttacks runs attacks against one daemon, one after the other.
func runAttacks(t *testing.T, attacks []attack) {
	w := newWorld(t)
	names := make(map[string]bool)
	for _, a := range attacks {
		if names[a.name] {
			t.Fatalf("two attacks are called %q", a.name)
		}
		names[a.name] = true
		checkRules(t, a.name, a.rules)
		ok := t.Run(a.name, func(t *testing.T) { w.attack(t, &a) })
		if err := w.good.beat(); err != nil {
			t.Fatalf("after %q: %v", a.name, err)
		}
		if !ok && testing.Short() {
			break
		}
	}
	w.alone(t)
	t.Logf("%d attacks", len(attacks))
}

// alone waits until the daemon holds nothing of the attacked connections.
func (w *world) alone(t *testing.T) {
	t.Helper()
	err := w.host.Until("everything given back", func() bool {
		s := w.node.Server().Status()
		return s.Qps == 1 && s.Conns == 1 && s.Cqs == 2
	})
	if err != nil {
		t.Errorf("%v: %v", err, w.node.Server().Status())
	}
}

func (w *world) attack(t *testing.T, a *attack) {
	before := w.snapshot()
	c := w.open(t, a.opts)
	defer c.destroy()
	guilty := a.run(c)
	if err := w.good.beat(); err != nil {
		t.Fatal(err)
	}
	c.expect(a, guilty)
	w.unchanged(t, before, a.changed...)
	ok := 0
	for i, wc := range c.got {
		switch {
		case wc.ID != uint64(i):
			t.Errorf("receive %d completes as number %d", wc.ID, i)
		case wc.Status == iwarp.WCSuccess:
			ok++
		}
	}
	if len(c.got) != c.posted || ok != a.delivered {
		t.Errorf("%d receives of %d completed, %d of them well; want %d", len(c.got), c.posted, ok, a.delivered)
	}
	if len(c.sent) != c.sends {
		t.Errorf("%d work requests posted, %d completed", c.sends, len(c.sent))
	}
	for name, mr := range w.regions { // for the next one
		copy(mr.Bytes(), before[name])
	}
}

func (c *conn) expect(a *attack, guilty []byte) {
	t := c.t
	t.Helper()
	switch a.want.kind {
	case goesOn:
		c.stillWorks(max(a.msn, 1))
		a.delivered++
		if err := c.s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		c.end(finished)
		if err := c.over(); !errors.Is(err, iwarp.ErrPeerClosed) {
			t.Errorf("the application gets %v", err)
		}
	case terminated:
		o := &a.want
		seg := guilty
		if o.headers == bare {
			seg = nil
		}
		want := peer.Term(o.layer, o.typ, o.code, seg, o.headers == withRDMA)
		if got := c.next(); !bytes.Equal(got, want) {
			t.Fatalf("Terminate of %d bytes\n% x\nwant\n% x", len(got), got[:min(len(got), 80)], want)
		}
		c.end(finished)
		if err := c.s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		err := c.over()
		te, ok := errors.AsType[*iwarp.TerminateError](err)
		if !ok || te.Remote || !errors.Is(te, term.Lookup(o.layer, o.typ, o.code)) {
			t.Errorf("the application gets %v", err)
		}
	case finished:
		c.end(finished)
		if err := c.s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if err := c.over(); err == nil {
			t.Error("the application gets no event")
		}
	case wasReset, cut:
		if a.want.kind == wasReset {
			c.end(wasReset)
		}
		if err := c.over(); err == nil {
			t.Error("the application gets no event")
		}
		if a.want.kind == cut {
			if err := c.good.beat(); err != nil { // after everything that the node sent
				t.Fatal(err)
			}
			if c.s.RST {
				t.Error("a RST is answered by a RST")
			}
		}
	}
}

// end waits for FIN or RST, without data before it.
func (c *conn) end(kind outcomeKind) {
	c.t.Helper()
	u, err := c.r.Next()
	if !errors.Is(err, peer.ErrEnd) {
		c.t.Fatalf("instead of the end: % x, %v", u, err)
	}
	if kind == finished && (c.s.RST || !c.s.FIN) || kind == wasReset && !c.s.RST {
		c.t.Fatalf("stream ends with FIN %v, RST %v", c.s.FIN, c.s.RST)
	}
}

// stillWorks sends a message, which must arrive, and receives one.
func (c *conn) stillWorks(msn uint32) {
	c.t.Helper()
	c.drain()
	n := len(c.got)
	c.send(peer.SendMsg(msn, []byte("still here")))
	c.until("message after all this", func() bool { return len(c.got) > n })
	if wc := c.got[n]; wc.Status != iwarp.WCSuccess || wc.Len != 10 {
		c.t.Fatalf("message after all this: %+v", wc)
	}
	if got := c.regions["recv"].Bytes()[int(c.got[n].ID)*slotStride:][:10]; string(got) != "still here" {
		c.t.Fatalf("message after all this: %q", got)
	}
}
