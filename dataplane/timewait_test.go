package dataplane

import (
	"reflect"
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// freed reports whether the memory of p has been freed.
func freed[T any](p weak.Pointer[T]) bool {
	for range 3 { // one may have begun before the last use
		runtime.GC()
		if p.Value() == nil {
			return true
		}
	}
	return false
}

// TestTimeWaitMemory checks that a connection in TIME-WAIT does not keep the memory of its client, which has ended, and
// that nothing keeps the connection after TIME-WAIT.
func TestTimeWaitMemory(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	w := s.hosts[0].w
	conn, client := s.timeWait()
	if c := conn.Value(); c == nil || c.tcp.State() != tcp.TimeWait {
		t.Fatal("the connection is not in TIME-WAIT")
	}
	if c := conn.Value(); !reflect.ValueOf(c.rx).IsZero() || !reflect.ValueOf(c.pre).IsZero() {
		t.Error("a connection in TIME-WAIT keeps its buffers")
	}
	if !freed(client) {
		t.Error("a connection in TIME-WAIT keeps the memory of its client")
	}
	end := s.now.Add(w.tcp.TimeWait + time.Second)
	s.until("TIME-WAIT is over", func() bool { return w.stats.Conns == 0 || s.now > end })
	if w.stats.Conns != 0 {
		t.Fatalf("TIME-WAIT lasts longer than %v", w.tcp.TimeWait)
	}
	if !freed(conn) {
		t.Error("the memory of a connection is in use after TIME-WAIT")
	}
}

// timeWait ends a connection of host 0, which is in TIME-WAIT then, and after it the client that had it.
func (s *sim) timeWait() (weak.Pointer[tcpConn], weak.Pointer[ClientBinding]) {
	s.t.Helper()
	w := s.hosts[0].w
	bells, err := shm.CreateDoorbells(256)
	if err != nil {
		s.t.Fatal(err)
	}
	defer bells.Close()
	cb := &ClientBinding{Doorbells: []*shm.Doorbells{bells}}
	w.bind(cb)
	qa, qb := newSimQP(s.t, s.hosts[0], 4096), newSimQP(s.t, s.hosts[1], 4096)
	qa.Client = cb
	a, b := s.open()
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 8, ORD: 8})
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 4096), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("written", func() bool { return len(qa.wcs) == 1 })
	w.disconnect(a, false)
	s.closed(0)
	s.closed(1)
	w.unbind(cb)
	qa.Client = nil // the test keeps qa
	return weak.Make(a.lane.llp.(*tcpConn)), weak.Make(cb)
}
