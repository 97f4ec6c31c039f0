package dataplane

import (
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestRunOfPieces sends messages whose payload lies in several pieces of memory, which end anywhere within FPDUs.
func TestRunOfPieces(t *testing.T) {
	for _, crc := range []bool{true, false} {
		s := newSim(t, link.PipeConfig{Super: link.SuperCut})
		a, b := s.open()
		const size = 400_000
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		rng := rand.NewChaCha8([32]byte{3})
		rng.Read(qa.mem)
		s.attach(a, b, qa, qb, mpa.Params{CRC: crc})
		var want []byte
		var sges []verbs.SGE
		for _, p := range [][2]int{{300_001, 1}, {7, 99_998}, {200_000, 1428}, {100_003, 100_000}} {
			sges = append(sges, qa.sge(p[0], p[1])...)
			want = append(want, qa.mem[p[0]:p[0]+p[1]]...)
		}
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 9, SGEs: qb.sge(0, size/2)})
		qa.sends = append(qa.sends,
			verbs.SendWR{Op: rdmap.OpWrite, SGEs: sges, RKey: qb.reg.STag(), Remote: 0x10000 + size/2 - 2000},
			verbs.SendWR{Op: rdmap.OpSend, SGEs: sges[2:]})
		before := s.hosts[0].w.stats.TxRecords
		s.hosts[0].w.mark(a.lane)
		s.until("sent", func() bool { return len(qa.wcs) == 2 && len(qb.wcs) == 1 })
		s.closeAll(a)
		if got := qb.mem[size/2-2000:][:len(want)]; string(got) != string(want) {
			t.Errorf("CRC %v: written bytes differ", crc)
		}
		if sent := want[99_999:]; string(qb.mem[:len(sent)]) != string(sent) {
			t.Errorf("CRC %v: sent bytes differ", crc)
		}
		if n := s.hosts[0].w.stats.TxRecords - before; n > 225 {
			t.Errorf("CRC %v: %d records", crc, n)
		}
	}
}

// instant is a FarQueue of far memory, a []byte, whose operations end at once.
type instant struct{ verbs.FarQueue }

func (instant) Fetch(mem verbs.FarMemory, addr uint64, n uint32) verbs.Fetch {
	return fetched(mem.([]byte)[addr:][:n])
}

type fetched []byte

func (f fetched) Len() int              { return len(f) }
func (f fetched) Bytes() ([]byte, bool) { return f, true }
func (f fetched) Release()              {}

// TestRunOfFarMemory checks that a message from far memory is composed in runs.
func TestRunOfFarMemory(t *testing.T) {
	s := newSim(t, link.PipeConfig{Super: link.SuperCut})
	a, b := s.open()
	const size = 600_000
	qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
	mem := make([]byte, size)
	rand.NewChaCha8([32]byte{4}).Read(mem)
	far, err := s.hosts[0].table.RegisterFar(1, mem, 0, size, 0, verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: s.hosts[0].table, SQDepth: 128, RQDepth: 128, MaxSGE: 4, SigAll: true, Sends: qa, Recvs: qa, Far: instant{}})
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	qa.sends = append(qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: []verbs.SGE{{Addr: 7, Len: size - 7, LKey: far.STag()}}, RKey: qb.reg.STag(), Remote: 0x10000})
	s.hosts[0].w.mark(a.lane)
	s.until("sent", func() bool { return len(qa.wcs) == 1 })
	s.closeAll(a)
	if string(qb.mem[:size-7]) != string(mem[7:]) {
		t.Error("the bytes differ")
	}
	if len(s.hosts[0].w.super.runs.bufs) == 0 {
		t.Error("there was no run")
	}
}
