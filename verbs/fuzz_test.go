package verbs

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/rdmap"
)

// FuzzPeer lets a peer send any ULPDUs to a queue pair, each after two bytes of length. It checks that they change only
// memory that the peer may write and posted receives, and that only memory that the peer may read is sent.
func FuzzPeer(f *testing.F) {
	const quarter = 1024
	// The draws are the same each time, so that a corpus may contain STags.
	table := func() *Table { return NewTable(rand.NewChaCha8([32]byte{7})) }
	setup := func(mem []byte) (*Table, []*Region) {
		tb := table()
		var rs []*Region
		for i, a := range []Access{accessRW, LocalWrite | RemoteWrite | RemoteAtomic, RemoteRead, LocalWrite} {
			pd := pdA
			if i == 0 {
				pd = pdB // belongs to another client
			}
			r, err := tb.Register(pd, mem[i*quarter:(i+1)*quarter], uint64(i)<<32, a)
			if err != nil {
				panic(err)
			}
			rs = append(rs, r)
		}
		return tb, rs
	}

	// Seeds: what our own sender would send, to each region.
	_, rs := setup(make([]byte, 4*quarter))
	for _, r := range rs {
		for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpRead, rdmap.OpFetchAdd, rdmap.OpSend, rdmap.OpSendInv, rdmap.OpImm} {
			s := newSide(f, 1, 4096, QPConfig{})
			s.Start(rdmap.Config{IRD: 2, ORD: 2})
			wr := SendWR{Op: op, SGEs: []SGE{s.sge(0, 8)}, RKey: r.STag(), Remote: r.Base() + 16, CompareAdd: 1, Inv: r.STag()}
			if op == rdmap.OpImm {
				wr.SGEs = nil
			}
			s.post(wr)
			s.HandleSends(1)
			var seg rdmap.Segment
			var script []byte
			for s.Stream().PollFilling(1000, 1000, &seg) {
				script = binary.BigEndian.AppendUint16(script, uint16(seg.HdrLen+seg.Len))
				script = append(script, seg.Hdr[:seg.HdrLen]...)
				script = append(script, make([]byte, seg.Len)...)
			}
			f.Add(script)
		}
	}

	f.Fuzz(func(t *testing.T, script []byte) {
		mem := bytes.Repeat([]byte{0xaa}, 4*quarter)
		copy(mem[2*quarter:], bytes.Repeat([]byte{0x55}, quarter))
		tb, rs := setup(mem)
		posted := &recvs{q: []RecvWR{
			{ID: 1, SGEs: []SGE{{rs[3].Base(), 50, rs[3].STag()}, {rs[3].Base() + 60, 40, rs[3].STag()}}},
			{ID: 2},
			{ID: 3, SGEs: []SGE{{rs[2].Base(), 50, rs[2].STag()}}}, // not writable
		}}
		q := NewQP(QPConfig{Num: 1, PD: pdA, Table: tb, MaxSGE: 4, Recvs: posted})
		q.Start(rdmap.Config{IRD: 2, ORD: 2})
		var wc WC
		for len(script) >= 2 {
			n := min(int(binary.BigEndian.Uint16(script)), len(script)-2)
			if n > 0 {
				q.Stream().HandleULPDU(bytes.Clone(script[2 : 2+n]))
			}
			script = script[2+n:]
			var seg rdmap.Segment
			for q.Stream().PollFilling(500, 500, &seg) {
				parts, ok := q.Gather(&seg.Src, seg.Len, nil)
				if !ok && q.Err() == nil {
					t.Fatal("Gather failed and the stream does not know")
				}
				for _, p := range parts {
					if bytes.Count(p, []byte{0x55}) != len(p) {
						t.Fatal("bytes left that may not be read")
					}
				}
			}
			for q.PollWC(&wc) {
				if wc.Status == WCSuccess && wc.Op != WCRecv {
					t.Fatalf("completion %+v", wc)
				}
			}
		}
		q.Error()
		for n := 0; q.PollWC(&wc); n++ {
			if n > 3 {
				t.Fatal("more completions than receives")
			}
		}
		same := func(what string, b []byte, v byte) {
			if bytes.Count(b, []byte{v}) != len(b) {
				t.Errorf("%s has changed", what)
			}
		}
		same("another client's memory", mem[:quarter], 0xaa)
		same("read-only memory", mem[2*quarter:3*quarter], 0x55)
		same("memory between two pieces of a receive", mem[3*quarter+50:3*quarter+60], 0xaa)
		same("memory behind a receive", mem[3*quarter+100:], 0xaa)
	})
}
