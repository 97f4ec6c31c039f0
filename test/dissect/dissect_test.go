// Package dissect has Wireshark judge what iwarpd sends: every operation, with
// and without markers and CRCs, is captured on the wire of a link.Pipe and read
// by tshark.
package dissect

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/verbs"
)

// capture is a pcap file of what passes a pipe.
type capture struct {
	mu    sync.Mutex
	b     []byte
	start time.Time
}

func newCapture() *capture {
	c := &capture{start: time.Now()}
	for _, v := range []uint32{0xa1b2c3d4, 2 | 4<<16, 0, 0, 1 << 18, 1} { // microseconds, version 2.4, Ethernet
		c.b = binary.LittleEndian.AppendUint32(c.b, v)
	}
	return c
}

func (c *capture) filter(_ bool, frame []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Since(c.start)
	for _, v := range []uint32{uint32(at / time.Second), uint32(at % time.Second / time.Microsecond), uint32(len(frame)), uint32(len(frame))} {
		c.b = binary.LittleEndian.AppendUint32(c.b, v)
	}
	c.b = append(c.b, frame...)
	return true
}

// end is one side of a connection.
type end struct {
	t        *testing.T
	ctx      context.Context
	pd       *iwarp.PD
	qp       *iwarp.QP
	scq, rcq *iwarp.CQ
	mr       *iwarp.MR
	next     uint64
}

const (
	memory = 1 << 18
	access = iwarp.AccessLocalWrite | iwarp.AccessRemoteRead | iwarp.AccessRemoteWrite | iwarp.AccessRemoteAtomic | iwarp.AccessMWBind
)

func newEnd(t *testing.T, ctx context.Context, n *embed.Node) *end {
	t.Helper()
	e := &end{t: t, ctx: ctx}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	d := n.Device()
	var err error
	e.pd, err = d.AllocPD(ctx)
	must(err)
	e.scq, err = d.CreateCQ(ctx, 256)
	must(err)
	e.rcq, err = d.CreateCQ(ctx, 256)
	must(err)
	e.qp, err = d.CreateQP(ctx, iwarp.QPConfig{PD: e.pd, SendCQ: e.scq, RecvCQ: e.rcq, SigAll: true})
	must(err)
	e.mr, err = e.pd.Alloc(ctx, memory, access)
	must(err)
	for i := range e.mr.Bytes() {
		e.mr.Bytes()[i] = byte(i * 13)
	}
	for i := range 40 {
		must(e.qp.PostRecv(&iwarp.RecvWR{ID: uint64(i), SGEs: []iwarp.SGE{e.mr.SGE(memory/2, 10000)}}))
	}
	return e
}

// do posts a work request and waits for its completion.
func (e *end) do(wr iwarp.SendWR, want iwarp.WCStatus) {
	e.t.Helper()
	e.next++
	wr.ID = e.next
	if err := e.qp.PostSend(&wr); err != nil {
		e.t.Fatal(err)
	}
	var wcs [1]iwarp.WC
	if _, err := e.scq.Wait(e.ctx, wcs[:]); err != nil {
		e.t.Fatal(err)
	}
	if wcs[0].ID != wr.ID || wcs[0].Status != want {
		e.t.Fatalf("%v completes as %+v", wr.Op, wcs[0])
	}
}

// window binds a fresh window of e's.
func (e *end) window() uint32 {
	e.t.Helper()
	mw, err := e.pd.AllocMW(e.ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	e.do(iwarp.SendWR{Op: iwarp.OpBindMW, RKey: mw.RKey(), SGEs: []iwarp.SGE{e.mr.SGE(0, 4096)}, Access: iwarp.AccessRemoteWrite}, iwarp.WCSuccess)
	return mw.RKey()
}

// program is every operation from a to b, the last of which ends in a Terminate.
// b sends long bytes at once.
func program(a, b *end, long int) {
	remote, rkey := b.mr.Base(), b.mr.RKey()
	sge := func(n int) []iwarp.SGE { return []iwarp.SGE{a.mr.SGE(64, n)} }
	for _, n := range []int{0, 1, 2, 3, 4, 470, 1400, 9000} {
		a.do(iwarp.SendWR{Op: iwarp.OpSend, SGEs: sge(n)}, iwarp.WCSuccess)
		a.do(iwarp.SendWR{Op: iwarp.OpWrite, SGEs: sge(n), RKey: rkey, Remote: remote + 8192}, iwarp.WCSuccess)
		a.do(iwarp.SendWR{Op: iwarp.OpRead, SGEs: []iwarp.SGE{a.mr.SGE(32768, n)}, RKey: rkey, Remote: remote + 8192}, iwarp.WCSuccess)
	}
	if !bytes.Equal(a.mr.Bytes()[32768:][:9000], a.mr.Bytes()[64:][:9000]) {
		a.t.Error("bytes read back differ")
	}
	b.do(iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{b.mr.SGE(0, long)}, RKey: a.mr.RKey(), Remote: a.mr.Base()}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpSendSE, SGEs: sge(100)}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpSendInv, SGEs: sge(100), Inv: b.window()}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpSendSEInv, SGEs: sge(100), Inv: b.window()}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpImm, Imm: 0x1122334455667788}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpImmSE, Imm: 0x1122334455667788}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpFetchAdd, SGEs: sge(8), RKey: rkey, Remote: remote, CompareAdd: 7}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpCmpSwap, SGEs: sge(8), RKey: rkey, Remote: remote, CompareAdd: 7, Swap: 8, CompareMask: 1<<64 - 1, SwapMask: 1<<64 - 1}, iwarp.WCSuccess)
	a.do(iwarp.SendWR{Op: iwarp.OpRead, SGEs: sge(8), RKey: rkey ^ 1, Remote: remote}, verbs.WCRemAccessErr)
	for _, e := range []*end{a, b} {
		select {
		case <-e.qp.Done():
		case <-e.ctx.Done():
			a.t.Fatal("the connection outlives its Terminate")
		}
	}
}

func TestDissect(t *testing.T) {
	for _, markers := range []bool{false, true} {
		for _, crc := range []bool{true, false} {
			for _, v6 := range []bool{false, true} {
				name := fmt.Sprintf("markers=%v,crc=%v,v6=%v", markers, crc, v6)
				t.Run(name, func(t *testing.T) {
					c := newCapture()
					record(t, c, iwarp.Startup{Markers: markers, NoCRC: !crc}, v6)
					judge(t, c, markers, crc)
				})
			}
		}
	}
}

// record runs the program over a pipe, with c at it.
func record(t *testing.T, c *capture, s iwarp.Startup, v6 bool) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	optional := ctrl.Config{Startup: ctrl.StartupDefaults{CRC: ctrl.CRCOptional}}
	na, nb, err := embed.Pair(embed.PairConfig{
		Pipe: link.PipeConfig{Filter: c.filter}, CtrlA: optional, CtrlB: optional,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer na.Close()
	defer nb.Close()
	l, err := nb.Device().Listen(ctx, ":7174", &iwarp.Config{Startup: s})
	if err != nil {
		t.Fatal(err)
	}
	a, b := newEnd(t, ctx, na), newEnd(t, ctx, nb)
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Request(ctx)
		if err == nil {
			_, err = r.Accept(ctx, b.qp, &iwarp.Config{PrivateData: []byte("welcome")})
		}
		accepted <- err
	}()
	to := "10.99.0.2:7174"
	if v6 {
		to = "[fd99::2]:7174"
	}
	if _, err := a.qp.Connect(ctx, to, &iwarp.Config{Startup: s, PrivateData: []byte("let me in")}); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	if i := a.qp.Info(); i.CRC == s.NoCRC || i.RecvMarkers != s.Markers || i.SendMarkers != s.Markers {
		t.Fatalf("negotiated %+v", i)
	}
	long := 100000
	if s.Markers {
		// tshark 4.0 counts one marker too many in an FPDU that ends where the next
		// one's leading marker stands, and is lost from there on. In what is sent
		// here none does, as long as it is short.
		long = 5000
	}
	program(a, b, long)
}

// harmless is what tshark says of things as they should be: TCP's life, what a
// segment that was sent twice is answered with, and that RFC 6581 has revised
// RFC 5044.
var harmless = regexp.MustCompile(`Connection (establish|finish)|D-SACK Sequence|Duplicate ACK|This frame (initiates|undergoes) the connection closing|NOT set to (zero|one) as required by RFC 5044`)

func judge(t *testing.T, c *capture, markers, crc bool) {
	file := filepath.Join(t.TempDir(), "wire.pcap")
	if dir := os.Getenv("CAPTURES"); dir != "" {
		file = filepath.Join(dir, strings.NewReplacer("/", "-", "=", "-", ",", "-").Replace(t.Name())+".pcap")
	}
	c.mu.Lock()
	err := os.WriteFile(file, c.b, 0o644)
	c.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]int)
	for line := range strings.SplitSeq(testenv.Tshark(t, file, "-T", "fields", "-E", "separator=;", "-E", "aggregator=,",
		"-e", "frame.number", "-e", "frame.protocols", "-e", "tcp.checksum.status", "-e", "tcp.analysis.flags", "-e", "tcp.len",
		"-e", "_ws.malformed", "-e", "_ws.expert.message", "-e", "iwarp_rdma.opcode"), "\n") {
		f := strings.Split(line, ";")
		if len(f) != 8 {
			continue
		}
		if strings.Contains(f[1], "malformed") || f[5] != "" {
			t.Errorf("frame %s is malformed", f[0])
		}
		if f[2] != "1" {
			t.Errorf("frame %s: TCP checksum status %s", f[0], f[2])
		}
		if strings.Contains(f[6], "retransmission") {
			// A probe for tail loss, as a busy machine brings about. tshark does not
			// take it apart again.
			continue
		}
		if f[3] != "" && f[3] != "1" {
			t.Errorf("frame %s: TCP analysis %s", f[0], f[3])
		}
		if f[4] != "0" && !strings.Contains(f[1], "iwarp_mpa") {
			t.Errorf("frame %s: %s bytes of payload are not iWARP", f[0], f[4])
		}
		for m := range strings.SplitSeq(f[6], ",") {
			if m != "" && !harmless.MatchString(m) {
				t.Errorf("frame %s: %s", f[0], m)
			}
		}
		if f[7] != "" {
			for o := range strings.SplitSeq(f[7], ",") {
				seen[o]++
			}
		}
	}
	for op := range 12 {
		if seen[fmt.Sprintf("0x%02x", op)] == 0 {
			t.Errorf("no message of opcode %d in the capture", op)
		}
	}
	text := testenv.Tshark(t, file, "-V", "-O", "iwarp_mpa")
	fpdus := strings.Count(text, "ULPDU length:")
	good, bad := strings.Count(text, "Good CRC32"), strings.Count(text, "Bad CRC32")
	if bad > 0 || crc && good != fpdus || fpdus < 60 {
		t.Errorf("%d FPDUs, %d with a good CRC, %d with a bad one", fpdus, good, bad)
	}
	if got := strings.Contains(text, "FPDU back pointer"); got != markers {
		t.Errorf("markers in the capture: %v", got)
	}
	t.Logf("%d FPDUs, %d good CRCs, opcodes %v", fpdus, good, seen)
}
