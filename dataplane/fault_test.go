package dataplane

import (
	"bytes"
	"net/netip"
	"runtime/debug"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/verbs"
)

// lent is a link that counts the frames which its worker has.
type lent struct {
	*link.Pipe
	most, out int // in one burst; now
}

func (l *lent) Receive(fs []link.Frame) int {
	n := l.Pipe.Receive(fs)
	l.most = max(l.most, n)
	l.out += n
	return n
}

func (l *lent) Release(f *link.Frame) {
	l.out--
	l.Pipe.Release(f)
}

// TestFaultInABurst: the frames behind the one in which a worker faulted are
// neither lost nor kept.
func TestFaultInABurst(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const size, lanes = 4096, 4
	s := newSim(t, link.PipeConfig{})
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	ha, w := s.hosts[0], s.hosts[1].w
	bad, err := s.hosts[1].table.Register(1, mem, 0x10000, simAccess)
	if err != nil {
		t.Fatal(err)
	}
	rx := &lent{Pipe: s.hosts[1].link}
	w.link = rx
	var qa, qb [lanes]*simQP
	var a [lanes]*conn
	for i := range lanes {
		c, d := s.openFrom(netip.AddrPortFrom(addrA, 40000+uint16(i)), addrB)
		qa[i], qb[i] = newSimQP(t, ha, size), newSimQP(t, s.hosts[1], size)
		s.attach(c, d, qa[i], qb[i], mpa.Params{CRC: true, IRD: 1, ORD: 1, RTR: mpa.RTRWrite})
		a[i] = c
	}
	for s.step() {
	}
	rx.most = 0
	for i := range lanes {
		for k := range qa[i].mem {
			qa[i].mem[k] = byte(k*7 + i)
		}
		wr := verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa[i].sge(0, size), RKey: qb[i].reg.STag(), Remote: 0x10000}
		if i == 1 {
			wr.RKey = bad.STag()
		}
		qa[i].sends = append(qa[i].sends, wr)
		ha.w.mark(a[i])
	}
	ha.w.turn()
	func() { // as loop
		defer w.survive()
		w.turn()
	}()
	if w.stats.Faults != 1 {
		t.Fatalf("%d faults", w.stats.Faults)
	}
	s.until("the others written", func() bool {
		for i := range lanes {
			if i != 1 && !bytes.Equal(qb[i].mem, qa[i].mem) {
				return false
			}
		}
		return true
	})
	if n := ha.w.stats.TxRetransmits; n != 0 {
		t.Errorf("%d segments sent again", n)
	}
	for s.step() {
	}
	if rx.most < lanes*size/1500 || rx.out > 1 {
		t.Errorf("bursts of at most %d frames, %d not given back", rx.most, rx.out)
	}
}

// TestFaultKeepsAssociations: an association without a session goes on after a
// fault in the memory of another connection's client.
func TestFaultKeepsAssociations(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, b := s.open()
	s.listenSCTP()
	s.dialSCTP(40001, 0).ini = nil // it asks for no session
	w := s.hosts[1].w
	var as *assoc
	s.until("association up", func() bool {
		for _, as = range w.sctp.assocs {
		}
		return as != nil && as.a.State() == sctp.Established && !as.carrier.dirty
	})
	w.mark(&as.carrier) // as a packet of it does
	w.fault(b, "a fault")
	if !slices.Contains(w.dirty, &as.carrier) {
		t.Error("the association is forgotten")
	}
	s.until("pumped", func() bool { return !as.carrier.dirty })
}
