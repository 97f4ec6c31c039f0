package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// closed waits for the last event of a connection on host i.
func (s *sim) closed(i int) Event {
	s.t.Helper()
	return s.event(i, EventClosed)
}

func fullPair(t *testing.T, p mpa.Params) (s *sim, a, b *stream, qa, qb *simQP) {
	s = newSim(t, link.PipeConfig{})
	a, b = s.open()
	qa, qb = newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, p)
	return s, a, b, qa, qb
}

func (s *sim) post(c *stream, q *simQP, wr verbs.SendWR) {
	q.sends = append(q.sends, wr)
	q.h.w.mark(c.lane)
}

// TestTerminate checks that a Write to an unknown STag ends both streams, that both sides report the same code, that
// posted work is flushed, and that TIME-WAIT is on the side that sent the Terminate.
func TestTerminate(t *testing.T) {
	s, a, _, qa, _ := fullPair(t, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	within := a.conn().host != nil // then there is no TIME-WAIT
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	if ev := s.closed(1); !errors.Is(ev.Err, term.ErrInvalidSTag) && ev.Err != nil || ev.TimeWait == within {
		t.Errorf("host 1 closed by %v, TIME-WAIT %v", ev.Err, ev.TimeWait)
	}
	if ev, ok := s.hosts[1].take(EventFailed); !ok || !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("host 1: EventFailed = %v, %v; want %v", ev.Err, ok, term.ErrInvalidSTag)
	}
	ev := s.closed(0)
	var remote *term.RemoteError
	if !errors.As(ev.Err, &remote) || !errors.Is(ev.Err, term.ErrInvalidSTag) || ev.TimeWait {
		t.Errorf("host 0 closed by %v, TIME-WAIT %v; want the peer's %v", ev.Err, ev.TimeWait, term.ErrInvalidSTag)
	}
	if _, ok := s.hosts[0].take(EventTerminated); !ok {
		t.Error("host 0: no EventTerminated")
	}
	if len(qa.wcs) != 2 || qa.wcs[0].ID != 1 || qa.wcs[1].ID != 2 || qa.wcs[1].Status == verbs.WCSuccess {
		t.Errorf("completions %+v; want the Write, then the Read in error", qa.wcs)
	}
	s.closeAll(a)
}

// TestTerminateCloses checks that the side that sends a Terminate closes the connection behind it, whatever the peer does.
func TestTerminateCloses(t *testing.T) {
	s, a, b, qa, _ := fullPair(t, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	s.hosts[0].w.turn() // and never again
	for range 10 {
		s.hosts[1].w.turn()
	}
	if state := b.conn().tcp.State(); b.mode != modeClosing || state != tcp.FinWait1 || !b.qp.QP.Stream().TerminateSent() {
		t.Errorf("mode %d, TCP in %v, Terminate sent %v", b.mode, state, b.qp.QP.Stream().TerminateSent())
	}
}

// TestTerminateWaits checks that a Terminate that does not fit the send window is sent as soon as it does, and that
// the connection is not closed before, even if a close is pending.
func TestTerminateWaits(t *testing.T) {
	for _, leaving := range []bool{false, true} {
		t.Run(fmt.Sprintf("leaving=%v", leaving), func(t *testing.T) {
			deaf := false
			s := newSim(t, link.PipeConfig{Filter: func(toB bool, _ []byte) bool { return toB || !deaf }})
			const size = 1 << 20
			a, b := s.open()
			qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
			s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4, RTR: mpa.RTRWrite})
			s.event(1, EventEstablished)
			deaf = true // host 0 sends but acknowledges nothing
			s.post(b, qb, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qb.sge(0, size), RKey: qa.reg.STag(), Remote: 0x10000})
			s.until("the window is full", func() bool { return b.conn().tcp.SndNxt() != b.conn().txStart && b.conn().tcp.Room() <= 0 })
			s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: 0x12345678})
			s.event(1, EventFailed)
			if leaving {
				s.hosts[1].w.disconnect(b, false)
			}
			s.hosts[1].w.turn()
			if b.mode != modeFull || b.conn().tcp.Room() > 0 {
				t.Errorf("mode %v, %d bytes of room; want the connection as it was", b.mode, b.conn().tcp.Room())
			}
			deaf = false
			if ev := s.closed(0); !errors.Is(ev.Err, term.ErrInvalidSTag) {
				t.Errorf("host 0 closed by %v; want the peer's %v", ev.Err, term.ErrInvalidSTag)
			}
			s.closed(1)
			s.closeAll(a)
		})
	}
}

// A fullCQ is a queue pair whose completion queue holds a limited number of completions.
type fullCQ struct {
	*simQP
	room int
}

func (q *fullCQ) Push(i int, wc *verbs.WC) bool {
	return len(q.wcs) < q.room && q.simQP.Push(i, wc)
}

// TestCQOverrun checks that a completion that does not fit ends the connection of its queue pair, and no other, with
// that reason. Earlier completions remain.
func TestCQOverrun(t *testing.T) {
	for _, overSCTP := range []bool{false, true} {
		for _, recv := range []bool{false, true} {
			t.Run(fmt.Sprintf("SCTP=%v/receives=%v", overSCTP, recv), func(t *testing.T) {
				s := newSim(t, link.PipeConfig{})
				qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
				full, host := &fullCQ{simQP: qa, room: 3}, 0
				if recv {
					full, host = &fullCQ{simQP: qb, room: 3}, 1
				}
				full.SendCQ, full.RecvCQ = full, full
				a := s.connect(overSCTP, qa, qb)
				qc, qd := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
				c, d := s.openFrom(netip.AddrPortFrom(addrA, 41000), addrB)
				s.attach(c, d, qc, qd, mpa.Params{CRC: true})
				for i := range uint64(4) {
					qb.recvs = append(qb.recvs, verbs.RecvWR{ID: i, SGEs: qb.sge(0, 10)})
					s.post(a, qa, verbs.SendWR{ID: i, Op: rdmap.OpSend, SGEs: qa.sge(0, 10)})
				}
				if ev := s.closed(host); !errors.Is(ev.Err, ErrCQOverrun) {
					t.Errorf("closed by %v; want %v", ev.Err, ErrCQOverrun)
				}
				if ev := s.closed(1 - host); !overSCTP && ev.Err == nil {
					t.Error("the other side closed without an error")
				}
				for i, wc := range full.wcs {
					if wc.ID != uint64(i) || wc.Status != verbs.WCSuccess {
						t.Errorf("completion %+v", wc)
					}
				}
				if n := s.hosts[host].w.stats.CQOverruns; n == 0 || len(full.wcs) != full.room {
					t.Errorf("%d overruns, %d completions; want some, and %d", n, len(full.wcs), full.room)
				}
				s.write(c, qc, qd, 1000)
			})
		}
	}
}

// TestAtomicMisaligned checks that a violation found only when the response is composed is reported like any other.
func TestAtomicMisaligned(t *testing.T) {
	s, a, _, qa, qb := fullPair(t, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpFetchAdd, SGEs: qa.sge(0, 8), RKey: qb.reg.STag(), Remote: 0x10003})
	s.closed(1)
	if ev, ok := s.hosts[1].take(EventFailed); !ok || !errors.Is(ev.Err, term.ErrStream) {
		t.Errorf("host 1: EventFailed = %v, %v; want %v", ev.Err, ok, term.ErrStream)
	}
	if ev := s.closed(0); !errors.Is(ev.Err, term.ErrStream) {
		t.Errorf("host 0 closed by %v; want the peer's %v", ev.Err, term.ErrStream)
	}
}

// TestCorrupted checks that a segment with a bad TCP checksum is retransmitted, and that corruption the checksum
// misses is detected by the CRC before any byte of the FPDU is placed.
func TestCorrupted(t *testing.T) {
	oneGoroutine(t)
	flip := func(b []byte) { b[700] ^= 0x10 }
	swap := func(b []byte) { b[700], b[701], b[702], b[703] = b[702], b[703], b[700], b[701] }
	for _, markers := range []bool{false, true} {
		for _, cfg := range []link.PipeConfig{{MTU: 1500}, {MTU: 9000}, {MTU: 9000, ChunkSize: 16 << 10}} {
			for _, tt := range []struct {
				name    string
				corrupt func([]byte)
				fatal   bool
			}{{"flip", flip, false}, {"swap", swap, true}} {
				t.Run(fmt.Sprintf("markers=%v/mtu=%d/chunk=%d/%s", markers, cfg.MTU, cfg.ChunkSize, tt.name), func(t *testing.T) {
					var s *sim
					corrupted := 0
					var undo []byte // frame is the sender's own slot
					cfg.Filter = func(toB bool, frame []byte) bool {
						if undo != nil {
							tt.corrupt(undo)
							undo = nil
						}
						if toB && len(frame) > 1400 && corrupted == 0 {
							corrupted++
							tt.corrupt(frame)
							undo = frame
						}
						return true
					}
					s = newSim(t, cfg)
					a, b := s.open()
					const size = 20000
					qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
					for i := range qa.mem {
						qa.mem[i] = byte(i + i/251)
					}
					s.attach(a, b, qa, qb, mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers, IRD: 4, ORD: 4})
					s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
					if !tt.fatal {
						s.until("the Write is placed", func() bool { return bytes.Equal(qa.mem, qb.mem) })
						if n := s.hosts[1].w.stats.RxChecksum; n != 1 || corrupted != 1 {
							t.Errorf("%d frames with a wrong checksum, %d corrupted; want 1", n, corrupted)
						}
						return
					}
					s.closed(1)
					if ev, ok := s.hosts[1].take(EventFailed); !ok || !errors.Is(ev.Err, term.ErrMPACRC) {
						t.Errorf("host 1: EventFailed = %v, %v; want %v", ev.Err, ok, term.ErrMPACRC)
					}
					for i, v := range qb.mem[:1000] {
						if v != 0 {
							t.Fatalf("byte %d of the corrupt FPDU is placed", i)
						}
					}
				})
			}
		}
	}
}

// TestPeerGone checks that a connection to a silent host is dropped and the posted work is flushed.
func TestPeerGone(t *testing.T) {
	silent := false
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, _ []byte) bool { return !silent }})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	silent = true
	s.limit = s.now.Add(time.Hour)
	s.post(a, qa, verbs.SendWR{ID: 7, Op: rdmap.OpRead, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
	if ev := s.closed(0); ev.Err == nil {
		t.Error("EventClosed without an error")
	}
	if len(qa.wcs) != 1 || qa.wcs[0].ID != 7 || qa.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v; want the Read flushed", qa.wcs)
	}
}

// TestAbort checks that a RST ends both sides.
func TestAbort(t *testing.T) {
	s, a, _, _, qb := fullPair(t, mpa.Params{CRC: true})
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 5, SGEs: qb.sge(0, 10)})
	s.hosts[0].w.disconnect(a, true)
	if ev := s.closed(0); !errors.Is(ev.Err, errAborted) {
		t.Errorf("host 0 closed by %v", ev.Err)
	}
	if ev := s.closed(1); ev.Err == nil {
		t.Error("host 1 closed without an error; want a reset")
	}
	if len(qb.wcs) != 1 || qb.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions of host 1: %+v; want the receive flushed", qb.wcs)
	}
}

// TestDetach checks that detaching a queue pair aborts its connection and releases it at once.
func TestDetach(t *testing.T) {
	s, a, _, qa, _ := fullPair(t, mpa.Params{CRC: true})
	a.detach(s.hosts[0].w)
	if qa.stream != nil || a.qp != nil {
		t.Error("binding still attached")
	}
	s.closed(0)
	s.closed(1)
}

// TestDetachBehindAttach checks that a queue pair that is detached before the worker has processed its attachment is
// still released.
func TestDetachBehindAttach(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, _ := s.open()
	q := newSimQP(t, s.hosts[0], 8192)
	w := s.hosts[0].w
	s.hosts[0].e.Attach(a.id, Attachment{QP: &q.QPBinding, Params: mpa.Params{CRC: true}})
	detached := make(chan struct{})
	go func() {
		defer close(detached)
		s.hosts[0].e.Detach(&q.QPBinding)
	}()
	for w.cmds.pending.Load() < 2 { // the attachment, and the first command of Detach
		runtime.Gosched()
	}
	for waiting := true; waiting; {
		select {
		case <-detached:
			waiting = false
		default:
			s.step()
		}
	}
	if a.qp != nil || q.stream != nil {
		t.Error("the worker still has the queue pair")
	}
	s.closed(0)
	s.closed(1)
}

// checkRTR checks that the peer of s has sent an RTR of one kind, and n Sends.
func checkRTR(t *testing.T, s *stream, rtr mpa.RTR, n uint64) {
	t.Helper()
	st := s.ddp.Stats()
	got := map[mpa.RTR]uint64{mpa.RTRSend: st.RxSends - n, mpa.RTRWrite: st.RxWrites, mpa.RTRRead: st.RxReadRequests}
	for kind, n := range got {
		if (n == 1) != (kind == rtr) {
			t.Errorf("received %v; want one %v", got, rtr)
		}
	}
}

// TestRTR checks that with peer-to-peer startup the first message, which consumes no work request, establishes the
// responder, which may then send first.
func TestRTR(t *testing.T) {
	for _, rtr := range []mpa.RTR{mpa.RTRSend, mpa.RTRWrite, mpa.RTRRead} {
		t.Run(rtr.String(), func(t *testing.T) {
			s, a, b, qa, qb := fullPair(t, mpa.Params{CRC: true, RTR: rtr, IRD: 1, ORD: 1})
			s.event(1, EventEstablished)
			checkRTR(t, b, rtr, 0)
			qa.recvs = append(qa.recvs, verbs.RecvWR{ID: 9, SGEs: qa.sge(0, 100)})
			s.post(b, qb, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qb.sge(0, 50)})
			s.until("received", func() bool { return len(qa.wcs) == 1 })
			if wc := qa.wcs[0]; wc.ID != 9 || wc.Status != verbs.WCSuccess || wc.Len != 50 {
				t.Errorf("receive completed as %+v", wc)
			}
			s.closeAll(a)
		})
	}
}

// TestKeepAliveWrites checks that an initiator whose first FPDU is not answered sends a few empty Writes, and none
// after it has received something.
func TestKeepAliveWrites(t *testing.T) {
	s, a, _, qa, qb := fullPair(t, mpa.Params{CRC: true})
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 1, SGEs: qb.sge(0, 100)})
	for range 1000 {
		s.step()
	}
	if n := s.hosts[0].w.stats.TxFPDUs; n != 0 {
		t.Fatalf("%d FPDUs before any work request", n)
	}
	s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpSend, SGEs: qa.sge(0, 50)})
	for range 1000 {
		s.step()
	}
	if n := s.hosts[1].w.stats.RxFPDUs; n != 1+maxProbes {
		t.Errorf("peer got %d FPDUs; want the Send and %d empty Writes", n, maxProbes)
	}
	if len(qa.wcs) != 1 || len(qb.wcs) != 1 {
		t.Errorf("%d and %d completions; want one each", len(qa.wcs), len(qb.wcs))
	}
	s.closeAll(a)
}

// TestNoKeepAliveWrites checks that an initiator that has received something sends no empty Writes.
func TestNoKeepAliveWrites(t *testing.T) {
	s, a, b, qa, qb := fullPair(t, mpa.Params{CRC: true})
	qa.recvs = append(qa.recvs, verbs.RecvWR{ID: 1, SGEs: qa.sge(0, 100)})
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 2, SGEs: qb.sge(0, 100)})
	s.post(a, qa, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qa.sge(0, 50)})
	s.post(b, qb, verbs.SendWR{ID: 4, Op: rdmap.OpSend, SGEs: qb.sge(0, 50)})
	for range 1000 {
		s.step()
	}
	if n := s.hosts[1].w.stats.RxFPDUs; n != 1 {
		t.Errorf("peer got %d FPDUs; want the Send alone", n)
	}
	s.closeAll(a)
}

// TestResponderWaits checks RFC 5044 section 7.1.2 rule 4: the responder sends no FPDU before it has received one.
func TestResponderWaits(t *testing.T) {
	s, a, b, qa, qb := fullPair(t, mpa.Params{CRC: true})
	qa.recvs = append(qa.recvs, verbs.RecvWR{ID: 1, SGEs: qa.sge(0, 100)})
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 2, SGEs: qb.sge(0, 100)})
	s.post(b, qb, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qb.sge(0, 50)})
	for range 1000 {
		s.step()
	}
	if n := s.hosts[1].w.stats.TxFPDUs; n != 0 {
		t.Fatalf("responder sent %d FPDUs before the initiator's first", n)
	}
	s.post(a, qa, verbs.SendWR{ID: 4, Op: rdmap.OpSend, SGEs: qa.sge(0, 50)})
	s.until("both received", func() bool { return len(qa.wcs) == 2 && len(qb.wcs) == 2 })
	for i, h := range s.hosts {
		n := 0
		for _, ok := h.take(EventEstablished); ok; _, ok = h.take(EventEstablished) {
			n++
		}
		if n != 1 {
			t.Errorf("host %d: established %d times", i, n)
		}
	}
	s.closeAll(a)
}

func TestConnectRefused(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	w := s.hosts[0].w
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 1), netip.AddrPortFrom(addrB, 2))
	if err := w.connect(w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, 0); err != nil {
		t.Fatal(err)
	}
	if err := w.connect(w.newID(), flow, Hop{}, 0); err == nil {
		t.Error("a second connection of the same flow was allowed")
	}
	if ev := s.closed(0); ev.Err == nil {
		t.Error("closed without an error; want refused")
	}
}

func TestConnectTimeout(t *testing.T) {
	s := newSim(t, link.PipeConfig{Filter: func(bool, []byte) bool { return false }})
	w := s.hosts[0].w
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 1), netip.AddrPortFrom(addrB, 2))
	start := s.now
	if err := w.connect(w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	if ev := s.closed(0); !errors.Is(ev.Err, ErrTimeout) {
		t.Errorf("closed by %v; want %v", ev.Err, ErrTimeout)
	}
	if d := s.now.Sub(start); d < 2*time.Second || d > 2100*time.Millisecond {
		t.Errorf("given up after %v; want 2s", d)
	}
}

// TestTimeWaitMakesRoom checks that a table full of connections in TIME-WAIT does not refuse new ones, and that a new
// connection may reuse the ports of one in TIME-WAIT.
func TestTimeWaitMakesRoom(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	for _, h := range s.hosts {
		h.e.cfg.MaxConns = 4
	}
	w := s.hosts[0].w
	remote := netip.AddrPortFrom(addrB, 7174)
	listen(t, s.hosts[1].w, 1, &ListenRequest{Local: remote, Backlog: 8})
	for i := range 40 {
		// Host 1 closes first, so that the listener's side is in TIME-WAIT.
		local := netip.AddrPortFrom(addrA, uint16(1000+i/2%7))
		if err := w.connect(w.newID(), pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, 0); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		acc := s.event(1, EventAccepted)
		s.hosts[1].w.disconnect(s.hosts[1].w.streams[acc.Conn], false)
		fin := s.event(0, EventPeerClosed)
		w.disconnect(w.streams[fin.Conn], false)
		s.closed(0)
		s.closed(1)
		s.now = s.now.Add(10 * time.Millisecond) // numbers and timestamps have moved on
	}
	if st := s.hosts[1].w.stats; st.Evicted == 0 || st.Conns > 4 {
		t.Errorf("%d evicted, %d connections; want some, and at most 4", st.Evicted, st.Conns)
	}
	if n := w.stats.TxRetransmits; n != 0 {
		t.Errorf("%d SYNs were sent again", n)
	}
}

// TestFollowTimeWait checks that an active open may reuse the addresses and ports of a connection in TIME-WAIT after
// one second if both used timestamps (RFC 6191), and never without timestamps.
func TestFollowTimeWait(t *testing.T) {
	for _, stamps := range []bool{true, false} {
		s := newSim(t, link.PipeConfig{})
		for _, h := range s.hosts {
			h.w.tcp.NoTimestamps = !stamps
		}
		w := s.hosts[0].w
		local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
		again := func() error {
			return w.connect(w.newID(), pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, 0)
		}
		for i := range 3 {
			a, b := s.open()
			w.disconnect(a, false) // TIME-WAIT is on our side
			s.event(1, EventPeerClosed)
			s.hosts[1].w.disconnect(b, false)
			s.closed(0)
			s.closed(1)
			if err := again(); !errors.Is(err, errFlowExists) {
				t.Errorf("timestamps %v, connection %d: at once: %v", stamps, i, err)
			}
			s.now = s.now.Add(1100 * time.Millisecond)
			for s.hosts[0].w.turn()+s.hosts[1].w.turn() > 0 {
			}
			if stamps {
				continue // open itself checks for success
			}
			if err := again(); !errors.Is(err, errFlowExists) {
				t.Errorf("without timestamps, after a second: %v", err)
			}
			break
		}
	}
}

// A crossLink receives from one wire and sends on another, as a NIC whose RSS
// puts the two directions of a flow on different queues.
type crossLink struct {
	link.Link
	rx link.Link
}

func (c *crossLink) Receive(fs []link.Frame) int { return c.rx.Receive(fs) }
func (c *crossLink) Release(f *link.Frame)       { c.rx.Release(f) }

// TestAdoption checks that when the SYN-ACK arrives on another queue than the one the SYN left on, that queue's
// worker takes over the connection.
func TestAdoption(t *testing.T) {
	now := clock.Time(time.Second)
	cfg := link.PipeConfig{Now: func() clock.Time { return now }}
	var ends [2][2]*link.Pipe
	for i := range ends {
		ends[i][0], ends[i][1] = newPipe(t, cfg)
	}
	ea := newEngine(t, Config{Now: cfg.Now}, []Queue{{Link: ends[0][0], CPU: -1}, {Link: ends[1][0], CPU: -1}}, nil)
	cross := &crossLink{Link: ends[1][1], rx: ends[0][1]}
	eb := newEngine(t, Config{Now: cfg.Now}, []Queue{{Link: cross, CPU: -1}}, nil)
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	listen(t, eb.workers[0], 1, &ListenRequest{Local: remote, Backlog: 8})
	w := ea.workers[0]
	id := w.newID()
	if err := w.connect(id, pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, 0); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		for _, w := range []*worker{ea.workers[0], ea.workers[1], eb.workers[0]} {
			w.turn()
		}
		now = now.Add(time.Microsecond)
	}
	if c := ea.workers[1].streams[id]; c == nil || c.mode != modeStreaming {
		t.Fatal("the second queue's worker does not own the connection")
	}
	if w.stats.Conns != 0 || w.timers.Len() != 0 {
		t.Errorf("the first worker still has %d flows and %d timers", w.stats.Conns, w.timers.Len())
	}
	// A command for the connection still finds it.
	cross.rx = ends[1][1]
	ea.StreamSend(id, []byte("hello"))
	for range 100 {
		for _, w := range []*worker{ea.workers[0], ea.workers[1], eb.workers[0]} {
			w.turn()
		}
	}
	for _, c := range eb.workers[0].streams {
		if string(c.conn().pre.in) != "hello" {
			t.Errorf("peer got %q", c.conn().pre.in)
		}
	}
	for _, e := range []*Engine{ea, eb} {
		for _, w := range e.workers {
			w.closeFDs()
		}
	}
}

// TestFewSlots checks that a connection that ran out of TX slots continues when slots become free, even without other
// activity on it.
func TestFewSlots(t *testing.T) {
	oneGoroutine(t)
	for _, slots := range []int{slotReserve + 1, 100, 200} {
		s, a, q := newLoad(t, link.PipeConfig{Slots: slots}, mpa.Params{CRC: true, IRD: 4, ORD: 4}, rdmap.OpWrite, 1<<20)
		s.load(a, q, 20)
	}
}

// TestPostAfterEnd checks that work posted to a queue pair that has ended is flushed while its connection is still
// closing: the client may not know yet.
func TestPostAfterEnd(t *testing.T) {
	for _, how := range []string{"disconnect", "abort", "refused"} {
		t.Run(how, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			a, b := s.open()
			qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
			s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
			w := s.hosts[0].w
			want := 1
			switch how {
			case "disconnect":
				w.disconnect(a, false)
			case "abort":
				w.disconnect(a, true)
			case "refused":
				qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: verbs.OpInvalid})
				w.mark(a.lane)
				want++
			}
			if how != "abort" {
				w.turn() // the other host gets no turn, so the connection stays in closing
			}
			qa.sends = append(qa.sends, verbs.SendWR{ID: 7, Op: rdmap.OpSend})
			w.mark(a.lane)
			w.turn()
			if len(qa.wcs) != want {
				t.Fatalf("%d completions; want %d", len(qa.wcs), want)
			}
			if wc := qa.wcs[want-1]; wc.ID != 7 || wc.Status != verbs.WCFlushErr {
				t.Errorf("work request %d: %v", wc.ID, wc.Status)
			}
		})
	}
}

// TestStreamLimit checks that at most the bytes that the control plane takes at once are queued in streaming mode. A
// byte stream is bounded by its window instead.
func TestStreamLimit(t *testing.T) {
	const limit = 3000
	for _, tt := range []struct {
		name         string
		wide         bool
		first, again int // bytes that are sent, and then consumed, before the next come
		more         int
		closed       bool
	}{
		{"so many", false, limit, 0, 0, false},
		{"one more", false, limit, 0, 1, true},
		{"one more at once", false, limit + 1, 0, 0, true},
		{"as many again", false, limit, limit, limit, false},
		{"some of them again", false, limit, 100, 100, false},
		{"and one more", false, limit, 100, 101, true},
		{"a byte stream", true, limit, 0, limit, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			s.hosts[1].e.cfg.StreamBuffer = limit
			a, b := s.open()
			b.conn().wide = tt.wide
			send := func(n int) {
				came := int(b.conn().tcp.Stats().BytesIn) + n
				a.conn().streamSend(s.hosts[0].w, make([]byte, n))
				s.until("bytes arrived", func() bool { return b.closed() || int(b.conn().tcp.Stats().BytesIn) >= came })
			}
			send(tt.first)
			b.conn().streamConsumed(s.hosts[1].w, tt.again)
			if tt.more > 0 {
				send(tt.more)
			}
			for range 10 {
				s.step()
			}
			ev, closed := s.hosts[1].take(EventClosed)
			if closed != tt.closed || closed && !errors.Is(ev.Err, errStreamFull) {
				t.Errorf("closed %v, by %v; want %v", closed, ev.Err, tt.closed)
			}
			if want := tt.first - tt.again + tt.more; !closed && b.conn().pre.unread() != want {
				t.Errorf("%d bytes wait; want %d", b.conn().pre.unread(), want)
			}
		})
	}
}

// TestStreamWindow checks that the window of a byte stream opens at once when the control plane has consumed what
// filled it.
func TestStreamWindow(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	b.conn().wide = true
	msg := bytes.Repeat([]byte("a byte stream. "), s.hosts[1].w.tcp.RcvWindow/10)
	a.conn().streamSend(s.hosts[0].w, msg)
	s.until("the window is full", func() bool { return a.conn().tcp.Stats().SndWnd == 0 && b.conn().pre.unread() > 0 })
	e, from := &streamingEnd{host: s.hosts[1], c: b}, s.now
	s.until("bytes arrived", func() bool { e.read(); return len(e.got) >= len(msg) })
	if d := s.now.Sub(from); d > 100*time.Millisecond || !bytes.Equal(e.got, msg) {
		t.Errorf("it takes %v, equal %v", d, bytes.Equal(e.got, msg))
	}
}

// TestAttachTwice checks that a second queue pair for a connection is refused, with its work flushed, and disturbs
// nothing; and so is a second answer to a session, and a queue pair for a connection that ends.
func TestAttachTwice(t *testing.T) {
	for _, overSCTP := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		ha, hb := s.hosts[0], s.hosts[1]
		qa, qb := newSimQP(t, ha, 8192), newSimQP(t, hb, 8192)
		a := s.connect(overSCTP, qa, qb)
		b := qb.stream
		refused := func(h *simHost, c *stream, attach func(Attachment)) {
			t.Helper()
			q := newSimQP(t, h, 100)
			q.recv(5, 10)
			attach(Attachment{QP: &q.QPBinding})
			h.w.turn()
			h.drain()
			if len(q.wcs) != 1 || q.wcs[0].Status != verbs.WCFlushErr {
				t.Errorf("completions %+v", q.wcs)
			}
			if ev, ok := h.take(EventClosed); !ok || ev.Conn != c.id || ev.Err != errNoConn {
				t.Errorf("EventClosed %v, by %v", ok, ev.Err)
			}
		}
		refused(ha, a, func(at Attachment) { ha.w.attach(a.id, a, at) })
		refused(hb, b, func(at Attachment) { hb.w.attach(b.id, b, at) })
		refused(hb, b, func(at Attachment) { hb.w.answer(b.id, b, session.Setup{}, at) })
		s.write(a, qa, qb, 8192)
		if !bytes.Equal(qa.mem, qb.mem) || a.qp != &qa.QPBinding || b.qp != &qb.QPBinding {
			t.Error("the connection has another queue pair")
		}
	}
	s := newSim(t, link.PipeConfig{})
	a, _ := s.open()
	q := newSimQP(t, s.hosts[0], 100)
	s.hosts[0].w.disconnect(a, false)
	s.hosts[0].w.attach(a.id, a, Attachment{QP: &q.QPBinding})
	if s.hosts[0].w.turn(); a.qp != nil || a.mode != modeStreaming {
		t.Errorf("attached after the FIN; mode %d", a.mode)
	}
}

// TestCloseWhileSwitching checks that a connection whose peer closes before its last bytes of streaming mode are sent
// ends, and its queue pair with it.
func TestCloseWhileSwitching(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	q := newSimQP(t, s.hosts[1], 100)
	q.recv(5, 10)
	a.conn().wide = true
	b.conn().streamSend(s.hosts[1].w, make([]byte, 2*s.hosts[0].w.tcp.RcvWindow))
	s.until("the window is full", func() bool { return b.conn().tcp.Stats().SndWnd == 0 && a.conn().pre.unread() > 0 })
	s.hosts[1].w.attach(b.id, b, Attachment{QP: &q.QPBinding})
	s.hosts[0].w.disconnect(a, false)
	s.until("the peer's FIN", func() bool { _, ok := s.hosts[1].take(EventPeerClosed); return ok })
	if b.mode < modeClosing {
		t.Errorf("mode %d after the peer's FIN", b.mode)
	}
	s.hosts[0].w.disconnect(a, true)
	s.closed(1)
	if len(q.wcs) != 1 || q.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", q.wcs)
	}
}

// TestStreamBlackHole shrinks a path's MTU silently while a byte stream holds all the TX slots it may use with
// unacknowledged data. Retransmission in smaller segments needs further slots.
func TestStreamBlackHole(t *testing.T) {
	const size = 1 << 20
	shrunk := false
	far := impair.Config{Delay: time.Millisecond}
	s := newSim(t, link.PipeConfig{Slots: 128, AtoB: far, BtoA: far, Filter: func(toB bool, f []byte) bool {
		return !toB || !shrunk || len(f) <= 1300+14
	}})
	for _, h := range s.hosts {
		h.e.cfg.StreamBuffer, h.e.cfg.SendBuffer = 4<<20, 4<<20
	}
	a, b := s.open()
	msg := make([]byte, size)
	for i := range msg {
		msg[i] = byte(i * 7 >> 3)
	}
	a.conn().streamSend(s.hosts[0].w, msg)
	e := &streamingEnd{host: s.hosts[1], c: b}
	s.until("bytes arrived", func() bool {
		if len(e.got) > size/4 && s.hosts[0].link.FreeSlots() <= slotReserve/2 {
			shrunk = true
		}
		e.read()
		return len(e.got) >= size
	})
	if !bytes.Equal(e.got, msg) {
		t.Error("bytes differ")
	}
	if !shrunk || a.conn().tcp.Stats().PMTUShrinks == 0 {
		t.Error("the slots were never used up, or the MTU did not shrink")
	}
	s.hosts[1].w.disconnect(b, false)
	s.closeAll(a)
}
