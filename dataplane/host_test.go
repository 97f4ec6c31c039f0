package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestWithinHost runs the connection tests over connections within one host, with and without FPDUs.
func TestWithinHost(t *testing.T) {
	oneGoroutine(t)
	defer func() { withinHost.on, withinHost.direct = false, false }()
	withinHost.on = true
	for _, direct := range []bool{false, true} {
		withinHost.direct = direct
		name := map[bool]string{false: "framed", true: "direct"}[direct]
		for _, tt := range []struct {
			name string
			f    func(*testing.T)
		}{
			{"StreamHalfClose", TestStreamHalfClose},
			{"Verbs", TestVerbsOverBadWire},
			{"RandomPrograms", TestRandomPrograms},
			{"Terminate", TestTerminate},
			{"AtomicMisaligned", TestAtomicMisaligned},
			{"Abort", TestAbort},
			{"Detach", TestDetach},
			{"DetachBehindAttach", TestDetachBehindAttach},
			{"RTR", TestRTR},
			{"ResponderWaits", TestResponderWaits},
			{"HalfClose", TestHalfClose},
			{"HalfCloseIdle", TestHalfCloseIdle},
			{"HalfCloseReset", TestHalfCloseReset},
			{"PostAfterEnd", TestPostAfterEnd},
			{"FewSlots", TestFewSlots},
			{"AllocatesNothing", TestSteadyStateAllocatesNothing},
			{"StreamingMode", TestStreamingMode},
			{"Fair", TestFair},
		} {
			if direct && tt.name == "Fair" {
				continue // some of its loads are smaller than a segment
			}
			t.Run(name+"/"+tt.name, tt.f)
		}
	}
}

// hostSim returns a sim of one host.
func hostSim(t *testing.T) *sim {
	withinHost.on = true
	defer func() { withinHost.on = false }()
	return newSim(t, link.PipeConfig{})
}

// TestHostFault checks that a fault in the memory of one program ends that program, on either end of the connection,
// and not the other one.
func TestHostFault(t *testing.T) {
	const size = 1 << 16
	page := unix.Getpagesize()
	for _, tt := range []struct {
		name   string
		crc    bool
		bad    int // the host whose memory faults
		op     rdmap.Op
		pieces int // of the payload
	}{
		{"source of a Write", false, 0, rdmap.OpWrite, 1},
		{"source of a Write in pieces", false, 0, rdmap.OpWrite, 2},
		{"source of a framed Write", true, 0, rdmap.OpWrite, 1},
		{"target of a Write", false, 1, rdmap.OpWrite, 1},
		{"target of a Write in pieces", false, 1, rdmap.OpWrite, 2},
		{"target of a framed Write", true, 1, rdmap.OpWrite, 1},
		{"source of a Read", false, 1, rdmap.OpRead, 1},
		{"sink of a Read", false, 0, rdmap.OpRead, 1},
		{"sink of a framed Read", true, 0, rdmap.OpRead, 1},
		{"receive", false, 1, rdmap.OpSend, 1},
		{"source of a Send", false, 0, rdmap.OpSend, 1},
		{"target of an atomic", false, 1, rdmap.OpFetchAdd, 1},
		{"target of a framed atomic", true, 1, rdmap.OpFetchAdd, 1},
		{"result of an atomic", false, 0, rdmap.OpFetchAdd, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // for this goroutine
			s := hostSim(t)
			a, b := s.open()
			q := [2]*simQP{newSimQP(t, s.hosts[0], 2*size), newSimQP(t, s.hosts[1], 2*size)}
			mem := testenv.Mmap(t, 2*size, unix.PROT_READ|unix.PROT_WRITE)
			if err := unix.Mprotect(mem[size-page:], unix.PROT_NONE); err != nil {
				t.Fatal(err)
			}
			q[tt.bad].reg = q[tt.bad].register(mem)
			var faults [2]int
			for i := range q {
				q[i].Client.OnFault = func() { faults[i]++ }
			}
			s.attach(a, b, q[0], q[1], mpa.Params{CRC: tt.crc, IRD: 4, ORD: 4})
			q[1].recvs = append(q[1].recvs, verbs.RecvWR{ID: 2, SGEs: q[1].sge(0, size)})
			wr := verbs.SendWR{ID: 1, Op: tt.op, RKey: q[1].reg.STag(), Remote: 0x10000}
			if tt.op.IsAtomic() {
				wr.SGEs, wr.Remote = q[0].sge(size-8, 8), wr.Remote+size-8
			} else {
				for i := range tt.pieces {
					wr.SGEs = append(wr.SGEs, q[0].sge(i*size/tt.pieces, size/tt.pieces)...)
				}
			}
			s.post(a, q[0], wr)
			w := s.hosts[0].w
			for n := 0; w.stats.Faults == 0 && n < 100; n++ {
				w.surviveTurn()
			}
			if faults[tt.bad] != 1 || faults[1-tt.bad] != 0 {
				t.Fatalf("the programs were ended %v times; want host %d alone", faults, tt.bad)
			}
			s.closed(tt.bad)
			if ev := s.closed(1 - tt.bad); !errors.Is(ev.Err, tcp.ErrReset) {
				t.Errorf("the other one closed by %v; want %v", ev.Err, tcp.ErrReset)
			}
			// A connection of the surviving program continues.
			c, d := s.openFrom(netip.AddrPortFrom(addrA, 41000), addrB)
			qc, qd := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
			s.attach(c, d, qc, qd, mpa.Params{CRC: tt.crc})
			s.write(c, qc, qd, 1000)
			s.hosts[0].w.disconnect(c, false)
			s.closeAll(c)
		})
	}
}

// TestHostDirect checks that segments that are copied do not come before the other end is in full operation, and that
// one that is not allowed there ends the connection, with an error at the other end.
func TestHostDirect(t *testing.T) {
	s := hostSim(t)
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	for i := range qa.mem {
		qa.mem[i] = byte(i * 3)
	}
	s.hosts[0].w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: mpa.Params{Initiator: true}})
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 8192), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("full operation", func() bool { return a.mode == modeFull })
	for range 100 {
		s.step()
	}
	s.hosts[1].w.attach(b.id, b, Attachment{QP: &qb.QPBinding})
	s.until("the Write", func() bool { return len(qa.wcs) == 1 })
	if s.until("full operation", func() bool { return b.mode == modeFull }); !bytes.Equal(qa.mem, qb.mem) {
		t.Error("memory differs")
	}
	s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0x10000})
	if ev := s.event(1, EventFailed); !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("failed by %v", ev.Err)
	}
	if ev := s.event(0, EventTerminated); !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("terminated by %v", ev.Err)
	}
	s.closed(0)
	s.closed(1)
}

// TestHostNoProbes checks that an initiator within the host does not probe an end that sends nothing, which is never
// soft-iWARP.
func TestHostNoProbes(t *testing.T) {
	s := hostSim(t)
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{})
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("the Write", func() bool { return len(qa.wcs) == 1 })
	for s.step() { // until nothing is due
		if s.now > s.limit {
			t.Fatal("never at rest")
		}
	}
	if n := a.ddp.Stats().TxWrites; n != 1 {
		t.Errorf("%d Writes were sent; want 1", n)
	}
}

// TestHostRefused checks that a connection to a port without a listener is refused, as by a RST, and that a
// connection to itself is refused.
func TestHostRefused(t *testing.T) {
	s := hostSim(t)
	w := s.hosts[0].w
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrA, 7174)
	if err := connectHost(w, w.newID(), request(pkt.NewFlow(local, remote), 0)); err != nil {
		t.Fatal(err)
	}
	if ev := s.closed(0); !errors.Is(ev.Err, tcp.ErrRefused) {
		t.Errorf("closed by %v; want %v", ev.Err, tcp.ErrRefused)
	}
	if err := connectHost(w, w.newID(), request(pkt.NewFlow(local, local), 0)); !errors.Is(err, errSelf) {
		t.Errorf("to itself: %v; want %v", err, errSelf)
	}
	a, _ := s.open()
	if err := connectHost(w, w.newID(), request(a.flow(), 0)); !errors.Is(err, errFlowExists) {
		t.Errorf("twice: %v; want %v", err, errFlowExists)
	}
}

// TestHostCounts checks that a connection within the host counts its bytes beyond 4 GiB.
func TestHostCounts(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	h := newHostEnd(s.hosts[0].w, 1, pkt.Flow{}).host
	for range 5 {
		h.Push(tcp.NoBuf, 1<<30)
		h.take(1 << 30)
	}
	if n := h.Stats().BytesOut; n != 5<<30 {
		t.Errorf("%d bytes sent; want %d", n, 5<<30)
	}
}

// TestHostCloseLimit checks that a connection within the host that the peer does not close ends after a while, and why.
func TestHostCloseLimit(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	w := s.hosts[0].w
	h := newHostEnd(w, 1, pkt.Flow{}).host
	h.Close(w.now)
	h.HandleTimeout(h.Deadline() - 1)
	if h.State() != tcp.Established {
		t.Fatalf("%v before the limit", h.State())
	}
	h.HandleTimeout(h.Deadline())
	if h.State() != tcp.Closed || h.Err() != tcp.ErrTimeout || h.Deadline() != 0 {
		t.Errorf("%v, %v, until %v", h.State(), h.Err(), h.Deadline())
	}
}

// TestHostMaxConns checks that both ends count against the limit, and that a connection beyond it is refused.
func TestHostMaxConns(t *testing.T) {
	s := hostSim(t)
	s.hosts[0].e.cfg.MaxConns = 3
	w := s.hosts[0].w
	a, _ := s.open()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40001), netip.AddrPortFrom(addrB, 7174))
	if err := connectHost(w, w.newID(), request(flow, 0)); err != nil {
		t.Fatal(err)
	}
	if ev := s.closed(0); !errors.Is(ev.Err, errTooMany) {
		t.Errorf("closed by %v; want %v", ev.Err, errTooMany)
	}
	s.hosts[0].w.disconnect(a, true)
	s.until("none is left", func() bool { return w.stats.Conns == 0 })
}

// TestHostForged checks that a frame from the wire with the addresses and ports of a connection within the host does
// not reach that connection.
func TestHostForged(t *testing.T) {
	s := hostSim(t)
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{IRD: 4, ORD: 4})
	w := s.hosts[0].w
	for _, c := range []*stream{a, b} {
		for _, h := range []tcp.Header{{Flags: tcp.ACK}, {Flags: tcp.RST}, {Flags: tcp.FIN | tcp.ACK}} {
			tu := pkt.Tuple{Flow: c.flow().Reverse(), Proto: pkt.ProtoTCP, SrcMAC: macB, DstMAC: macA}
			h.SrcPort, h.DstPort = tu.Flow.LocalPort, tu.Flow.RemotePort
			l4 := make([]byte, h.Len())
			h.Put(l4)
			binary.BigEndian.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, tu.PseudoSum(len(l4)))))
			w.takes(&tu, l4)
		}
	}
	if n := w.stats.RxNoConn; n != 3 {
		t.Errorf("%d frames were for no connection or listener, want 3", n)
	}
	for i := range qa.mem {
		qa.mem[i] = byte(i)
	}
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 8192), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("written", func() bool { return len(qa.wcs) == 1 })
	if !bytes.Equal(qa.mem, qb.mem) || w.stats.HostSegments == 0 {
		t.Errorf("memory differs, or did not go from one to the other: %d segments", w.stats.HostSegments)
	}
	s.closeAll(a)
}

// BenchmarkHost is Writes within a host, one at a time, by a worker without another program
// beside it: the time of a turn, and for 1 MiB that as a multiple of one copy. What is
// reported is the best twentieth, as of BenchmarkSides.
func BenchmarkHost(b *testing.B) {
	withinHost.on = true
	defer func() { withinHost.on = false }()
	for _, crc := range []bool{false, true} {
		for _, size := range []int{64, 1 << 20} {
			b.Run(fmt.Sprintf("crc=%v/%d", crc, size), func(b *testing.B) {
				p := mpa.Params{CRC: crc, IRD: 16, ORD: 16}
				s, a, q := newLoad(b, link.PipeConfig{ChunkSize: 16 << 10}, p, rdmap.OpWrite, size)
				s.load(a, q, 64)
				w, src, dst := s.hosts[0].w, make([]byte, size), make([]byte, size)
				b.ReportAllocs()
				b.ResetTimer()
				var turns, copies []float64
				for range b.N {
					start := clock.Now()
					copy(dst, src)
					copies = append(copies, float64(clock.Now()-start))
					start = clock.Now()
					q.left, q.done = 1, 0
					w.mark(a.lane)
					for q.done < 1 {
						w.turn()
					}
					turns = append(turns, float64(clock.Now()-start))
					s.now += 1000
				}
				b.StopTimer()
				best, one := sorted(turns, len(turns)/20), sorted(copies, len(copies)/20)
				b.ReportMetric(best/1000, "us-write")
				b.ReportMetric(best/one, "x-memcpy")
			})
		}
	}
}
