package dataplane

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// The memory of each side of a program:
//
//	source   constant pattern: what its own Writes and Sends take
//	remote   the peer's Writes and atomics land here, and its Reads read here
//	sink     its own Reads and atomics land here
//	receive  its receives
const (
	partLen    = 64 << 10
	offSource  = 0 * partLen
	offRemote  = 1 * partLen
	offSink    = 2 * partLen
	offReceive = 3 * partLen
	memLen     = 4 * partLen
	recvSlot   = 2048
)

// A program is the work of one side, with the outcome that a model in plain memory predicts: of the peer's remote
// part, of its own sink, and of each completion.
type program struct {
	rng     *rand.Rand
	q, peer *simQP
	remote  []byte // model of the peer's remote part
	sink    []byte // model of our sink part
	receive []byte // model of the peer's receive part
	want    []verbs.WC
	wantRcv []verbs.WC
	sinkOff int

	// The ranges used as sources of Reads and targets of Writes since the last fence. A Write over the source of an
	// incomplete Read must be fenced (RFC 5040 section 5.5, rule 12), and so must a Write over another Write where
	// the peer places out of order (rule 3).
	readLo, readHi   int
	writeLo, writeHi int
	early            bool
}

func newProgram(rng *rand.Rand, q, peer *simQP) *program {
	p := &program{rng: rng, q: q, peer: peer, readLo: partLen, writeLo: partLen}
	for i := range q.mem {
		q.mem[i] = byte(rng.Uint32())
	}
	return p
}

// newPrograms makes the programs of both sides, with their receives posted.
func newPrograms(rng *rand.Rand, qa, qb *simQP) (pa, pb *program) {
	pa, pb = newProgram(rng, qa, qb), newProgram(rng, qb, qa)
	pa.start()
	pb.start()
	pa.postReceives()
	pb.postReceives()
	return pa, pb
}

// runPrograms runs both programs for the given number of steps each over the connection between a and b, and checks
// the result.
func (s *sim) runPrograms(a, b *stream, pa, pb *program, steps int) {
	s.t.Helper()
	for range steps {
		pa.step()
		pb.step()
	}
	pa.readNothing()
	pb.readNothing()
	s.hosts[0].w.mark(a.lane)
	s.hosts[1].w.mark(b.lane)
	s.until("both programs done", func() bool {
		return len(pa.q.wcs) >= len(pa.want)+len(pb.wantRcv) && len(pb.q.wcs) >= len(pb.want)+len(pa.wantRcv)
	})
	if err := pa.check("initiator"); err != nil {
		s.t.Fatal(err)
	}
	if err := pb.check("responder"); err != nil {
		s.t.Fatal(err)
	}
}

// start copies both sides' memory into the model after it is filled.
func (p *program) start() {
	p.remote = bytes.Clone(p.peer.mem[offRemote:][:partLen])
	p.sink = bytes.Clone(p.q.mem[offSink:][:partLen])
	p.receive = bytes.Clone(p.peer.mem[offReceive:][:partLen])
}

func (p *program) span(limit int) (off, n int) {
	switch p.rng.IntN(4) {
	case 0:
		n = p.rng.IntN(65)
	case 1:
		n = p.rng.IntN(3000)
	default:
		n = p.rng.IntN(limit)
	}
	return p.rng.IntN(partLen - n), n
}

// step adds one random work request.
func (p *program) step() {
	wr := verbs.SendWR{ID: uint64(len(p.want)), RKey: p.peer.reg.STag()}
	wc := verbs.WC{ID: wr.ID, Status: verbs.WCSuccess}
	fence := func(lo, hi int) {
		again := p.early && lo < p.writeHi && p.writeLo < hi
		if !again && (lo >= p.readHi || p.readLo >= hi) {
			return
		}
		if again {
			// A complete Read shows that the Writes before it were delivered.
			p.readNothing()
			wr.ID++
			wc.ID++
			p.writeLo, p.writeHi = partLen, 0
		}
		wr.Flags |= verbs.Fence // it does not show that for Writes after the last Read
		p.readLo, p.readHi = partLen, 0
	}
	switch k := p.rng.IntN(10); {
	case k < 4: // Write, of up to four pieces
		off, n := p.span(20_000)
		wr.Op, wc.Op = rdmap.OpWrite, verbs.WCWrite
		wr.Remote = 0x10000 + offRemote + uint64(off)
		var data []byte
		for left := n; ; {
			l := left
			if len(wr.SGEs) < 3 {
				l = p.rng.IntN(left + 1)
			}
			from := p.rng.IntN(partLen - l)
			wr.SGEs = append(wr.SGEs, p.q.sge(offSource+from, l)...)
			data = append(data, p.q.mem[offSource+from:][:l]...)
			if left -= l; left == 0 {
				break
			}
		}
		fence(off, off+n)
		p.writeLo, p.writeHi = min(p.writeLo, off), max(p.writeHi, off+n)
		copy(p.remote[off:], data)
	case k < 6: // Read into a place that no other Read uses
		off, n := p.span(20_000)
		if p.sinkOff+n > partLen {
			return
		}
		wr.Op, wc.Op, wc.Len = rdmap.OpRead, verbs.WCRead, uint32(n)
		wr.Remote = 0x10000 + offRemote + uint64(off)
		wr.SGEs = p.q.sge(offSink+p.sinkOff, n)
		copy(p.sink[p.sinkOff:], p.remote[off:][:n])
		p.sinkOff += n
		p.readLo, p.readHi = min(p.readLo, off), max(p.readHi, off+n)
	case k < 7: // atomics, each on a word of its own
		off := p.rng.IntN(partLen/8) * 8
		if p.sinkOff+16 > partLen {
			return
		}
		p.sinkOff = (p.sinkOff + 7) &^ 7
		wr.Remote = 0x10000 + offRemote + uint64(off)
		wr.SGEs = p.q.sge(offSink+p.sinkOff, 8)
		fence(off, off+8)
		old := binary.LittleEndian.Uint64(p.remote[off:])
		var now uint64
		if p.rng.IntN(2) == 0 {
			wr.Op, wc.Op = rdmap.OpFetchAdd, verbs.WCFetchAdd
			wr.CompareAdd = p.rng.Uint64()
			now = old + wr.CompareAdd
		} else {
			wr.Op, wc.Op = rdmap.OpCmpSwap, verbs.WCCmpSwap
			wr.CompareAdd, wr.Swap = old, p.rng.Uint64()
			wr.CompareMask, wr.SwapMask = ^uint64(0), ^uint64(0)
			now = wr.Swap
			if p.rng.IntN(2) == 0 {
				wr.CompareAdd, now = ^old, old
			}
		}
		wc.Len = 8
		binary.LittleEndian.PutUint64(p.remote[off:], now)
		binary.LittleEndian.PutUint64(p.sink[p.sinkOff:], old)
		p.sinkOff += 8
		p.readLo, p.readHi = min(p.readLo, off), max(p.readHi, off+8)
	default: // a Send to the peer's next receive
		i := len(p.wantRcv)
		if (i+1)*recvSlot > partLen {
			return
		}
		rc := verbs.WC{ID: uint64(i), Status: verbs.WCSuccess, Op: verbs.WCRecv}
		if p.rng.IntN(4) == 0 {
			wr.Op, wc.Op = rdmap.OpImm, verbs.WCImm
			wr.Imm = p.rng.Uint64()
			rc.Imm, rc.Flags = wr.Imm, verbs.WCWithImm
		} else {
			wr.Op, wc.Op = rdmap.OpSend, verbs.WCSend
			n := p.rng.IntN(recvSlot + 1)
			from := p.rng.IntN(partLen - n)
			wr.SGEs = p.q.sge(offSource+from, n)
			rc.Len = uint32(n)
			copy(p.receive[i*recvSlot:], p.q.mem[offSource+from:][:n])
		}
		if p.rng.IntN(2) == 0 {
			wr.Flags |= verbs.Solicited
			rc.Flags |= verbs.WCSolicited
		}
		p.wantRcv = append(p.wantRcv, rc)
	}
	p.want = append(p.want, wc)
	p.q.sends = append(p.q.sends, wr)
}

// readNothing adds a Read of zero bytes; when it completes, all earlier Writes have been delivered.
func (p *program) readNothing() {
	id := uint64(len(p.want))
	p.q.sends = append(p.q.sends, verbs.SendWR{
		ID: id, Op: rdmap.OpRead, RKey: p.peer.reg.STag(), Remote: 0x10000 + offRemote, SGEs: p.q.sge(offSink, 0),
	})
	p.want = append(p.want, verbs.WC{ID: id, Status: verbs.WCSuccess, Op: verbs.WCRead})
}

func (p *program) postReceives() {
	for i := range partLen / recvSlot {
		p.q.recvs = append(p.q.recvs, verbs.RecvWR{ID: uint64(i), SGEs: p.q.sge(offReceive+i*recvSlot, recvSlot)})
	}
}

// split separates a queue pair's completions by queue.
func split(wcs []verbs.WC) (sends, recvs []verbs.WC) {
	for _, wc := range wcs {
		if wc.IsRecv() {
			recvs = append(recvs, wc)
		} else {
			sends = append(sends, wc)
		}
	}
	return sends, recvs
}

// check compares the memory and completions of the program with the model.
func (p *program) check(who string) error {
	sends, _ := split(p.q.wcs)
	_, recvs := split(p.peer.wcs)
	for i, want := range p.want {
		got := sends[i]
		got.QP = 0
		if want.Len == 0 {
			got.Len = 0 // undefined for Writes and Sends
		}
		if got != want {
			return fmt.Errorf("%s: completion %d is %+v; want %+v", who, i, got, want)
		}
	}
	for i, want := range p.wantRcv {
		got := recvs[i]
		got.QP, got.InvKey = 0, 0
		if got != want {
			return fmt.Errorf("%s: receive %d of the peer is %+v; want %+v", who, i, got, want)
		}
	}
	if len(sends) != len(p.want) || len(recvs) != len(p.wantRcv) {
		return fmt.Errorf("%s: %d completions and %d receives; want %d and %d", who, len(sends), len(recvs), len(p.want), len(p.wantRcv))
	}
	for _, m := range []struct {
		name      string
		got, want []byte
	}{
		{"remote part", p.peer.mem[offRemote:][:partLen], p.remote},
		{"sink", p.q.mem[offSink:][:partLen], p.sink},
		{"peer's receive part", p.peer.mem[offReceive:][:partLen], p.receive},
	} {
		if !bytes.Equal(m.got, m.want) {
			for i := range m.got {
				if m.got[i] != m.want[i] {
					return fmt.Errorf("%s: %s differs from byte %d on", who, m.name, i)
				}
			}
		}
	}
	return nil
}

// TestRandomPrograms runs random programs of all verbs in both directions at once over random lossy wires, MTUs, IP
// versions, markers and CRC, and compares the result with a model in plain memory. SEEDS sets how many.
func TestRandomPrograms(t *testing.T) { eachSeed(t, 30, randomPrograms) }

// eachSeed runs a test with SEEDS seeds, at most short if the tests shall be short.
func eachSeed(t *testing.T, short int, run func(t *testing.T, seed uint64)) {
	oneGoroutine(t)
	base := testenv.Seed(t)
	seeds := testenv.Count(t, "SEEDS", 60)
	if testing.Short() {
		seeds = min(seeds, short)
	}
	for i := range seeds {
		seed := base + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) { run(t, seed) })
	}
}

func randomPrograms(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0x707267))
	v6 := rng.IntN(2) == 0
	cfg := link.PipeConfig{MTU: []int{128, 256, 576, 1280, 1500, 3498, 9000}[rng.IntN(7)]}
	if v6 {
		cfg.MTU = max(cfg.MTU, 1280)
	}
	wire := func() impair.Config {
		bad := impair.Config{Seed: rng.Uint64(), Delay: time.Duration(rng.IntN(5)) * time.Millisecond}
		switch rng.IntN(4) {
		case 0:
		case 1:
			bad.Loss = rng.Float64() * 0.1
		case 2:
			bad.Reorder, bad.Jitter = rng.Float64()*0.1, time.Duration(rng.IntN(3))*time.Millisecond
		default:
			bad.Loss, bad.Duplicate, bad.Reorder, bad.Corrupt = rng.Float64()*0.05, rng.Float64()*0.05, rng.Float64()*0.05, rng.Float64()*0.02
		}
		return bad
	}
	cfg.AtoB, cfg.BtoA = wire(), wire()
	par := mpa.Params{CRC: rng.IntN(4) != 0, SendMarkers: rng.IntN(2) == 0, IRD: 1 + rng.IntN(16)}
	par.RecvMarkers, par.ORD = rng.IntN(2) == 0, par.IRD
	if !par.CRC {
		cfg.AtoB.Corrupt, cfg.BtoA.Corrupt = 0, 0 // the TCP checksum does not catch every corruption
	}
	defer func() {
		if t.Failed() {
			t.Logf("MTU %d, IPv6 %v, %+v, wires %+v %+v", cfg.MTU, v6, par, cfg.AtoB, cfg.BtoA)
		}
	}()

	s := newSim(t, cfg)
	a, b := s.openTo(addrOf(0, v6), addrOf(1, v6))
	qa, qb := newSimQP(t, s.hosts[0], memLen), newSimQP(t, s.hosts[1], memLen)
	pa, pb := newPrograms(rng, qa, qb)
	pa.early, pb.early = par.SendMarkers, par.RecvMarkers
	s.attachEach(a, b, qa, qb, par)
	s.runPrograms(a, b, pa, pb, 40+rng.IntN(60))
	s.closeAll(a)
}

func addrOf(host int, v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr([]string{"fd00::1", "fd00::2"}[host])
	}
	return []netip.Addr{addrA, addrB}[host]
}

// TestEarlyPlacement measures what markers are for: on a wire with 5 % loss and reordering, nearly all FPDUs that
// arrive whole after a gap are placed before the gap is filled, and hardly any frame is held for them.
func TestEarlyPlacement(t *testing.T) {
	oneGoroutine(t)
	run := func(markers bool) Stats {
		bad := impair.Config{Loss: 0.05, Reorder: 0.05, Delay: 2 * time.Millisecond, Seed: 1}
		par := mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers, IRD: 4, ORD: 4}
		s, a, q := newLoad(t, link.PipeConfig{AtoB: bad, BtoA: impair.Config{Delay: 2 * time.Millisecond}}, par, rdmap.OpWrite, 256<<10)
		s.load(a, q, 64)
		q.wr.Op, q.wr.SGEs[0].Len = rdmap.OpRead, 0 // wait until all is delivered
		s.load(a, q, 1)
		return s.hosts[1].w.stats
	}
	with, without := run(true), run(false)
	// Here one FPDU fills a segment, so each early whole segment is one FPDU.
	if with.RxEarly < 500 {
		t.Fatalf("only %d segments came early: the wire is too good", with.RxEarly)
	}
	if share := float64(with.RxFPDUsPlacedEarly) / float64(with.RxEarly); share < 0.9 {
		t.Errorf("%d of %d early FPDUs placed at once (%.3f); want 0.9", with.RxFPDUsPlacedEarly, with.RxEarly, share)
	}
	if with.HeldPeak*5 > without.HeldPeak {
		t.Errorf("%d frames held at most with markers, %d without; want a fifth", with.HeldPeak, without.HeldPeak)
	}
	t.Logf("markers: %d of %d early segments placed, %d frames held at most; without: %d held", with.RxFPDUsPlacedEarly, with.RxEarly, with.HeldPeak, without.HeldPeak)
}

// TestHeldFramesRunOut checks that when one connection holds all frames for out-of-order data, it drops further ones,
// keeps those it holds, and continues.
func TestHeldFramesRunOut(t *testing.T) {
	bad := impair.Config{Loss: 0.05, Delay: 2 * time.Millisecond, Seed: 1}
	s, a, q := newLoad(t, link.PipeConfig{AtoB: bad, BtoA: impair.Config{Delay: 2 * time.Millisecond}}, mpa.Params{CRC: true, IRD: 4, ORD: 4}, rdmap.OpWrite, 256<<10)
	s.hosts[1].w.held.init(8)
	s.load(a, q, 16)
	if st := s.hosts[1].w.stats; st.RxNoHold == 0 || st.RxReclaims != 0 {
		t.Errorf("%d segments not held, %d times taken back; want some and none", st.RxNoHold, st.RxReclaims)
	}
	s.closeAll(a)
	if n := len(s.hosts[1].w.held.holders); n != 0 {
		t.Errorf("%d connections hold frames after the end", n)
	}
}

// TestHeldFramesShared checks that when no frames for out-of-order data are left, a connection that holds less than
// half of its share gets some from the connection that holds the most.
func TestHeldFramesShared(t *testing.T) {
	const size, frames = 16 << 10, 8
	first := map[uint16]uint32{} // the segment to lose, by source port
	losing := false
	s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool {
		if !isB || !losing || len(f) < 200 {
			return true
		}
		port, seq := binary.BigEndian.Uint16(f[34:]), binary.BigEndian.Uint32(f[38:])
		if _, ok := first[port]; !ok {
			first[port] = seq
		}
		return first[port] != seq
	}})
	w := s.hosts[1].w
	w.held.init(frames)
	var as, bs [2]*stream
	var qas, qbs [2]*simQP
	for i := range as {
		as[i], bs[i] = s.openFrom(netip.AddrPortFrom(addrA, uint16(40000+i)), addrB)
		qas[i], qbs[i] = newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		s.attach(as[i], bs[i], qas[i], qbs[i], mpa.Params{CRC: true, IRD: 4, ORD: 4})
	}
	losing = true
	post := func(i int) {
		s.post(as[i], qas[i], verbs.SendWR{Op: rdmap.OpWrite, SGEs: qas[i].sge(0, size), RKey: qbs[i].reg.STag(), Remote: 0x10000})
	}
	post(0)
	s.until("all frames held", func() bool { return bs[0].conn().holds == frames })
	post(1)
	s.until("the other has its part", func() bool { return bs[1].conn().holds == frames/4 })
	if w.stats.RxReclaims != frames/4 || bs[0].conn().holds != frames-frames/4 {
		t.Errorf("taken back %d times, and %d left; want one each time, half of a share", w.stats.RxReclaims, bs[0].conn().holds)
	}
	losing = false
	s.until("all written", func() bool { return len(qas[0].wcs) == 1 && len(qas[1].wcs) == 1 })
	s.hosts[0].w.disconnect(as[1], false)
	s.closeAll(as[0])
	if n := len(w.held.holders); n != 0 || len(w.held.free) != frames {
		t.Errorf("%d connections hold %d frames after the end", n, frames-len(w.held.free))
	}
}

// TestReclaimCost checks that it takes no look at all connections to take frames back: a few peers that send out of order could make it
// happen in each turn, and there may be thousands.
func TestReclaimCost(t *testing.T) {
	oneGoroutine(t)
	const frames, times = 8, 3000
	h := newForeign(t, 1)
	w := h.w
	w.held.init(frames)
	h.segment(40000, tcp.Header{Flags: tcp.SYN}, "")
	h.segment(40000, tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}, "")
	ack := h.answer.Seq + 1
	hold := func(i int) {
		hdr := tcp.Header{SrcPort: 40000, DstPort: h.local.Port(), Flags: tcp.ACK, Seq: serial.Num(10 + 2*i), Ack: ack, Window: 1000}
		tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), h.local), Proto: pkt.ProtoTCP, SrcMAC: macA, DstMAC: macB}
		n := hdr.Len() + 1
		b := make([]byte, tu.HeaderLen()+n)
		tu.Put(b, n, 0)
		l4 := b[tu.HeaderLen():]
		hdr.Put(l4)
		binary.BigEndian.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, tu.PseudoSum(n))))
		w.takeWhole(b, false) // a frame that the link does not get back
		w.turn()
	}
	for i := range frames {
		hold(i)
	}
	for i := range 16384 {
		flow := pkt.NewFlow(netip.AddrPortFrom(addrB, 1), netip.AddrPortFrom(addrA, uint16(i)))
		newTCPConn(w.newID(), flow, tcp.Dial(h.sim.now, &w.tcp, flow, 1, 1500)).enter(w)
	}
	w.turn()
	began := time.Now()
	for range times {
		w.reclaim()
		hold(frames - 1)
	}
	if w.stats.RxReclaims != times || w.held.room() != 0 {
		t.Fatalf("taken back %d times, %d frames free", w.stats.RxReclaims, w.held.room())
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("that took %v", d)
	}
}

// TestHeldFramesScarce makes many connections with constant loss share few frames. The windows they offer must match
// what the frames can hold: little is dropped for lack of frames, and no connection stalls.
func TestHeldFramesScarce(t *testing.T) {
	oneGoroutine(t)
	const conns, frames = 16, 64
	bad := impair.Config{Loss: 0.01, Delay: 5 * time.Millisecond, Rate: 1e9, Queue: 2 << 20, Seed: 1}
	s := newLoadLanes(t, link.PipeConfig{AtoB: bad, BtoA: impair.Config{Delay: 5 * time.Millisecond}})
	w := s.hosts[1].w
	w.held.init(frames)
	s.add(conns, 0, 0, rdmap.OpWrite, 16<<10)
	for _, l := range s.all {
		l.w.mark(l.c.lane)
	}
	for end := s.now.Add(2 * time.Second); s.now < end && s.step(); {
	}
	least, most := s.spread(everyLane)
	lost, held := w.stats.RxNoHold, w.stats.RxEarly
	t.Logf("%d to %d bytes a connection; %d segments held, %d not, %d times taken back", least, most, held, lost, w.stats.RxReclaims)
	if held < 1000 {
		t.Fatal("the wire is too good")
	}
	if lost*2 > held {
		t.Errorf("%d segments lost for want of a frame, %d held; want half at most", lost, held)
	}
	if least < 256<<10 {
		t.Errorf("one connection moved %d bytes, another %d", least, most)
	}
	posted := 0
	for _, l := range s.all {
		posted += 1<<60 - l.left
		l.left = 0
	}
	s.until("all written", func() bool {
		done := 0
		for _, l := range s.all {
			done += l.done
		}
		return done == posted
	})
	s.until("all given back", func() bool { return len(w.held.free) == frames && len(w.held.holders) == 0 })
}
