package dataplane

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// fuzzPair is a connection in full operation with work outstanding in both directions, and foreign memory that it
// must not access.
type fuzzPair struct {
	*sim
	a, b    *stream
	qa, qb  *simQP
	foreign [2][]byte // in another PD
	stags   [2]uint32 // of foreign
}

const fuzzForeign = 0xa5

func newFuzzPair(t *testing.T, p mpa.Params) *fuzzPair {
	f := &fuzzPair{sim: newSim(t, link.PipeConfig{Slots: 256, RxFrames: 256, TxRing: 256})}
	f.a, f.b = f.open()
	for i, q := range []**simQP{&f.qa, &f.qb} {
		h := f.hosts[i]
		*q = newSimQP(t, h, 4096)
		f.foreign[i] = bytes.Repeat([]byte{fuzzForeign}, 4096)
		r, err := h.table.Register(2, f.foreign[i], 0x10000, simAccess)
		if err != nil {
			t.Fatal(err)
		}
		f.stags[i] = r.STag()
		for k := range 4 {
			(*q).recvs = append((*q).recvs, verbs.RecvWR{ID: uint64(k), SGEs: (*q).sge(2048+k*256, 200)})
		}
	}
	f.attach(f.a, f.b, f.qa, f.qb, p)
	return f
}

// finish aborts the connections and checks that the foreign memory is unchanged and that all resources were returned.
func (f *fuzzPair) finish() {
	f.t.Helper()
	for range 2000 {
		if !f.step() {
			break
		}
	}
	for _, h := range f.hosts {
		for _, c := range h.w.streams {
			c.abort(h.w, errAborted)
		}
	}
	for n := 0; f.step(); n++ {
		if n > 10_000 {
			f.t.Fatal("never at rest")
		}
	}
	if n := f.hosts[0].w.stats.Conns + f.hosts[1].w.stats.Conns; n != 0 {
		f.t.Errorf("%d connections left", n)
	}
	for i, h := range f.hosts {
		if bytes.Count(f.foreign[i], []byte{fuzzForeign}) != len(f.foreign[i]) {
			f.t.Errorf("host %d: memory of another PD has changed", i)
		}
		if n := len(h.w.held.free); n != len(h.w.held.frames) {
			f.t.Errorf("host %d: %d held frames not given back", i, len(h.w.held.frames)-n)
		}
		if n := maxRuns - h.w.super.runs.left(); n != 0 {
			f.t.Errorf("host %d: %d buffers of runs not given back", i, n)
		}
		if h.link.FreeSlots() != h.link.Slots() {
			f.t.Errorf("host %d: %d TX slots not given back", i, h.link.Slots()-h.link.FreeSlots())
		}
	}
	for i, q := range []*simQP{f.qa, f.qb} {
		seen := make(map[uint64]bool)
		for _, wc := range q.wcs {
			if !wc.IsRecv() {
				continue
			}
			if seen[wc.ID] {
				f.t.Errorf("host %d: receive %d completes twice", i, wc.ID)
			}
			seen[wc.ID] = true
		}
		if len(seen) != 4 {
			f.t.Errorf("host %d: %d receives completed of 4", i, len(seen))
		}
	}
}

func fuzzParams(flags byte) mpa.Params {
	return mpa.Params{CRC: flags&1 != 0, RecvMarkers: flags&2 != 0, SendMarkers: flags&2 != 0, IRD: 2, ORD: 2}
}

// FuzzReceive feeds bytes to a connection as its peer's stream. The first byte holds the settings: CRC, markers, and
// whether the rest is a list of ULPDUs, each with a length byte, that the test frames correctly. In those, STag 1
// stands for the connection's own memory and STag 2 for that of another PD.
func FuzzReceive(f *testing.F) {
	ulpdus := func(flags byte, us ...[]byte) {
		b := []byte{flags | 4}
		for _, u := range us {
			b = append(append(b, byte(len(u))), u...)
		}
		f.Add(b)
	}
	for flags := range byte(4) {
		f.Add(append([]byte{flags}, 0, 22, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 'a', 'b', 'c', 'd', 1, 2, 3, 4))
		ulpdus(flags,
			[]byte("\xc1\x40\x00\x00\x00\x01\x00\x00\x00\x00\x00\x01\x00\x10write"),
			[]byte("\x41\x43\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00send"),
			[]byte("\x41\x41\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x01\x00\x00\x00\x00\x00\x01\x00\x00"),
			[]byte("\x41\x47\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x00\x11\x01\x00\x00"))
		ulpdus(flags, []byte("\xc1\x40\x00\x00\x00\x02\x00\x00\x00\x00\x00\x01\x00\x10other"))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 4096 {
			return
		}
		p := newFuzzPair(t, fuzzParams(in[0]))
		b := in[1:]
		if in[0]&4 != 0 {
			b = p.frame(b, in[0])
		}
		w, c := p.hosts[1].w, p.b
		// A Read is outstanding, so that its response may arrive.
		p.post(c, p.qb, verbs.SendWR{ID: 99, Op: rdmap.OpRead, SGEs: p.qb.sge(0, 64), RKey: 0x77, Remote: 0})
		for i := 0; len(b) > 0 && c.mode == modeFull; i++ {
			n := min(len(b), 1+int(in[i%len(in)]))
			c.conn().receive(w, append([]byte(nil), b[:n]...))
			b = b[n:]
			w.mark(c.lane)
			w.turn() // the peer never answers, since it did not send any of this
		}
		p.finish()
	})
}

// frame makes FPDUs of ULPDUs for the receiver of host 1.
func (f *fuzzPair) frame(in []byte, flags byte) (out []byte) {
	var fr mpa.Framer
	p := fuzzParams(flags)
	seq := f.b.conn().tcp.RcvNxt()
	fr.Init(p.CRC, p.RecvMarkers, seq)
	for len(in) > 1 {
		n := min(int(in[0]), len(in)-1)
		u := append([]byte(nil), in[1:1+n]...)
		in = in[1+n:]
		if n > 6 && u[0]&0x80 != 0 && bytes.Equal(u[2:5], []byte{0, 0, 0}) && (u[5] == 1 || u[5] == 2) {
			stag := f.qb.reg.STag()
			if u[5] == 2 {
				stag = f.stags[1]
			}
			u[2], u[3], u[4], u[5] = byte(stag>>24), byte(stag>>16), byte(stag>>8), byte(stag)
		}
		dst := make([]byte, fr.Size(seq, n))
		fr.Begin(dst, seq, n)
		fr.Write(u)
		fr.End()
		seq = seq.Add(len(dst))
		out = append(out, dst...)
	}
	return out
}

// mutant changes received frames as the fuzzer directs and fixes their checksums, so that the change reaches the
// layers above.
type mutant struct {
	*link.Pipe
	edits []byte // three bytes per frame with payload: offset, value, and whether to apply it
}

func (m *mutant) Receive(fs []link.Frame) int {
	n := m.Pipe.Receive(fs)
	for i := range fs[:n] {
		m.edit(fs[i].Pieces[0])
	}
	return n
}

func (m *mutant) edit(b []byte) {
	var p pkt.Packet
	if len(m.edits) < 3 || p.Parse(b, len(b)) != nil || p.Proto != pkt.ProtoTCP {
		return
	}
	payload := p.L4Off + int(b[p.L4Off+12]>>4)*4
	n := p.L4Off + p.L4Len - payload
	if n <= 0 {
		return
	}
	e := m.edits[:3]
	m.edits = m.edits[3:]
	if e[2]&1 == 0 {
		return
	}
	b[payload+int(e[0])%n] ^= e[1]
	l4 := b[p.L4Off : p.L4Off+p.L4Len]
	l4[16], l4[17] = 0, 0
	sum := pkt.Checksum(pkt.Sum(l4, p.PseudoSum))
	l4[16], l4[17] = byte(sum>>8), byte(sum)
}

// FuzzSegments changes payload bytes of segments between two engines that use every operation. The first byte holds
// the settings; the rest are the edits.
func FuzzSegments(f *testing.F) {
	for flags := range byte(4) {
		f.Add([]byte{flags})
		f.Add([]byte{flags, 3, 1, 1, 2, 0x40, 1})
		f.Add([]byte{flags, 0, 0, 0, 0, 0, 0, 5, 0x80, 1, 20, 2, 1})
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 300 {
			return
		}
		p := newFuzzPair(t, fuzzParams(in[0]))
		half := len(in[1:]) / 2
		for i, h := range p.hosts {
			h.w.link = &mutant{Pipe: h.link, edits: append([]byte(nil), in[1+i*half:]...)}
		}
		for i, q := range []*simQP{p.qa, p.qb} {
			peer := []*simQP{p.qb, p.qa}[i]
			rkey := peer.reg.STag()
			c := []*stream{p.a, p.b}[i]
			for _, wr := range []verbs.SendWR{
				{Op: rdmap.OpWrite, SGEs: q.sge(0, 1500), RKey: rkey, Remote: 0x10000},
				{Op: rdmap.OpSend, SGEs: q.sge(0, 100)},
				{Op: rdmap.OpRead, SGEs: q.sge(0, 1800), RKey: rkey, Remote: 0x10000},
				{Op: rdmap.OpFetchAdd, SGEs: q.sge(0, 8), RKey: rkey, Remote: 0x10008, CompareAdd: 1},
				{Op: rdmap.OpImm, Imm: 1},
				{Op: rdmap.OpSendSE, SGEs: q.sge(0, 200)},
				{Op: rdmap.OpCmpSwap, SGEs: q.sge(0, 8), RKey: rkey, Remote: 0x10008},
			} {
				wr.ID = 100
				p.post(c, q, wr)
			}
		}
		p.finish()
	})
}
