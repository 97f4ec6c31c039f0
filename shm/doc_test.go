package shm

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/verbs"
)

// table is one table of docs/api.md: the heading above it, the name of its first column, and for each row the
// number and the name.
type table struct {
	heading, column string
	rows            map[string]string // name -> number, with "/size" if there is a size column
}

// readTables returns the tables of docs/api.md whose rows start with a number.
func readTables(t *testing.T) []table {
	t.Helper()
	doc := testenv.ReadFile(t, "../docs/api.md")
	var tables []table
	var cur *table
	heading := ""
	for line := range strings.Lines(string(doc)) {
		line = strings.TrimSpace(line)
		if h, ok := strings.CutPrefix(line, "### "); ok {
			heading = h
		}
		if !strings.HasPrefix(line, "| ") {
			cur = nil
			continue
		}
		var cells []string
		for c := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			cells = append(cells, strings.TrimSpace(c))
		}
		if cur == nil {
			tables = append(tables, table{heading, cells[0], map[string]string{}})
			cur = &tables[len(tables)-1]
			continue
		}
		if _, err := strconv.Atoi(cells[0]); err != nil {
			continue
		}
		name, number := cells[1], cells[0]
		if cur.column == "offset" {
			name, number = cells[2], cells[0]+"/"+cells[1]
		}
		if old, dup := cur.rows[name]; dup {
			t.Errorf("%s: %q stands twice, as %s and %s", heading, name, old, number)
		}
		cur.rows[name] = number
	}
	return tables
}

func at(off, size int) string { return fmt.Sprintf("%d/%d", off, size) }

func num[T ~uint8 | ~uint16 | ~uint32 | ~int](v T) string { return fmt.Sprint(uint64(v)) }

// TestDocument compares every number in the tables of docs/api.md with the code.
func TestDocument(t *testing.T) {
	want := []table{
		{"Header", "offset", map[string]string{
			"magic": at(HdrMagic, 8), "version": at(HdrVersion, 4), "kind": at(HdrKind, 4), "entries": at(HdrEntries, 4),
			"stride": at(HdrStride, 4), "rings": at(HdrRings, 4), "ring size": at(HdrRingSize, 4), "max sge": at(HdrMaxSGE, 4),
			"max inline": at(HdrMaxInline, 4), "arm": at(HdrArm, 4), "overruns": at(HdrOverruns, 4),
		}},
		{"Header", "kind", map[string]string{
			"send queue": num(KindSQ), "receive queue": num(KindRQ), "completion queue": num(KindCQ), "doorbell page": num(KindDoorbells),
		}},
		{"Ring", "offset", map[string]string{
			"producer": at(RingProducer, 4), "consumer": at(RingConsumer, 4), "entries": fmt.Sprintf("%d/stride", RingEntries),
		}},
		{"Send WQE", "offset", map[string]string{
			"wr id": at(SQEID, 8), "opcode": at(SQEOpcode, 1), "flags": at(SQEFlags, 1), "num sge": at(SQENumSGE, 2),
			"inline length": at(SQEInlineLen, 4), "remote addr": at(SQERemote, 8), "rkey": at(SQERKey, 4), "inv key": at(SQEInv, 4),
			"imm": at(SQEImm, 8), "compare-add": at(SQECompareAdd, 8), "swap": at(SQESwap, 8), "access": at(SQEAccess, 4),
			"compare mask": at(SQECompareMask, 8), "swap mask": at(SQESwapMask, 8), "pieces": fmt.Sprintf("%d/-", SQEFixed),
		}},
		{"Send WQE", "opcode", map[string]string{
			"RDMA_WRITE": num(WRWrite), "SEND": num(WRSend), "RDMA_READ": num(WRRead), "CMP_SWAP": num(WRCmpSwap), "FETCH_ADD": num(WRFetchAdd),
			"LOCAL_INV": num(WRLocalInv), "BIND_MW": num(WRBindMW), "SEND_WITH_INV": num(WRSendInv), "IMM": num(WRImm), "REG": num(WRReg),
		}},
		{"Send WQE", "flag", map[string]string{
			"FENCE": num(verbs.Fence), "SIGNALED": num(verbs.Signaled), "SOLICITED": num(verbs.Solicited), "INLINE": num(verbs.Inline),
		}},
		{"Receive WQE", "offset", map[string]string{
			"wr id": at(RQEID, 8), "num sge": at(RQENumSGE, 2), "pieces": fmt.Sprintf("%d/-", RQEFixed),
		}},
		{"SGE", "offset", map[string]string{"addr": at(SGEAddr, 8), "len": at(SGELen, 4), "lkey": at(SGELKey, 4)}},
		{"CQE", "offset", map[string]string{
			"wr id": at(CQEID, 8), "status": at(CQEStatus, 4), "opcode": at(CQEOpcode, 4), "len": at(CQELen, 4), "qp": at(CQEQP, 4),
			"flags": at(CQEFlags, 4), "inv key": at(CQEInvKey, 4), "imm": at(CQEImm, 8), "vendor": at(CQEVendor, 4),
		}},
		{"CQE", "status", map[string]string{
			"SUCCESS": num(verbs.WCSuccess), "LOC_LEN_ERR": num(verbs.WCLocLenErr), "LOC_QP_OP_ERR": num(verbs.WCLocQPOpErr),
			"LOC_PROT_ERR": num(verbs.WCLocProtErr), "WR_FLUSH_ERR": num(verbs.WCFlushErr), "MW_BIND_ERR": num(verbs.WCMWBindErr),
			"BAD_RESP_ERR": num(verbs.WCBadRespErr), "LOC_ACCESS_ERR": num(verbs.WCLocAccessErr), "REM_INV_REQ_ERR": num(verbs.WCRemInvReqErr),
			"REM_ACCESS_ERR": num(verbs.WCRemAccessErr), "REM_OP_ERR": num(verbs.WCRemOpErr), "FATAL_ERR": num(verbs.WCFatalErr),
			"GENERAL_ERR": num(verbs.WCGeneralErr),
		}},
		{"CQE", "opcode", map[string]string{
			"SEND": num(verbs.WCSend), "RDMA_WRITE": num(verbs.WCWrite), "RDMA_READ": num(verbs.WCRead), "COMP_SWAP": num(verbs.WCCmpSwap),
			"FETCH_ADD": num(verbs.WCFetchAdd), "BIND_MW": num(verbs.WCBindMW), "LOCAL_INV": num(verbs.WCLocalInv), "IMM": num(verbs.WCImm),
			"REG": num(verbs.WCReg), "RECV": num(verbs.WCRecv),
		}},
		{"CQE", "flag", map[string]string{
			"WITH_IMM": num(verbs.WCWithImm), "WITH_INV": num(verbs.WCWithInv), "SOLICITED": num(verbs.WCSolicited),
		}},
		{"Sleeping until a completion", "arm", map[string]string{
			"not armed; the daemon stores it as it wakes": num(ArmNone), "next completion": num(ArmNext), "next solicited or failed completion": num(ArmSolicited),
		}},
		{"Doorbell page", "offset", map[string]string{"sleeping": at(BellSleeping, 4), "received": at(BellReceived, 4), "bells": at(BellBits, 8)}},
		{"Client memory", "access", map[string]string{
			"LOCAL_WRITE": num(verbs.LocalWrite), "REMOTE_WRITE": num(verbs.RemoteWrite), "REMOTE_READ": num(verbs.RemoteRead),
			"REMOTE_ATOMIC": num(verbs.RemoteAtomic), "MW_BIND": num(verbs.MWBind), "ZERO_BASED": num(verbs.ZeroBased),
		}},
	}
	got := readTables(t)
	for _, w := range want {
		found := false
		for _, g := range got {
			if g.heading != w.heading || g.column != w.column {
				continue
			}
			found = true
			if diff := cmp.Diff(w.rows, g.rows); diff != "" {
				t.Errorf("%s, table of %ss (-code +document):\n%s", w.heading, w.column, diff)
			}
		}
		if !found {
			t.Errorf("docs/api.md has no table of %ss under %q", w.column, w.heading)
		}
	}

	// Numbers in the text.
	doc := testenv.ReadFile(t, "../docs/api.md")
	for _, s := range []string{
		fmt.Sprintf("the bytes `WARPRING`, %#x", uint64(Magic)),
		fmt.Sprintf("| version | %d |", Version),
		fmt.Sprintf("Ring *i* starts at `%d + i * ring size`", HeaderSize),
		fmt.Sprintf("`ring size` is `%d + entries * stride`, rounded up to a multiple of 4096", RingEntries),
		fmt.Sprintf("`stride` is `%d + max(%d * max sge, max inline)`, rounded up to a multiple of 64", SQEFixed, SGESize),
		fmt.Sprintf("`stride` is `%d + %d * max sge`, rounded", RQEFixed, SGESize),
		fmt.Sprintf("`stride` is %d.", CQESize),
		fmt.Sprintf("of a doorbell page %d |", PageSize),
	} {
		if !strings.Contains(strings.ReplaceAll(string(doc), "\n", " "), s) {
			t.Errorf("docs/api.md does not say %q", s)
		}
	}
	var magic [8]byte
	le.PutUint64(magic[:], Magic)
	if string(magic[:]) != "WARPRING" {
		t.Errorf("the magic reads %q", magic)
	}
}

// TestDocumentRaw checks that a client can be written from docs/api.md alone. It uses only numbers, and neither
// the constants nor the client code of this package.
func TestDocumentRaw(t *testing.T) {
	q, p := newSQ(t, 4, 2, 16)
	m := p.mem
	if string(m[:8]) != "WARPRING" || le.Uint32(m[16:]) != 4 || le.Uint32(m[20:]) != 128 {
		t.Fatalf("header % x", m[:40])
	}
	e := m[4096+256:]
	le.PutUint64(e[0:], 0x1234)
	e[8], e[9] = 0, 2 // RDMA_WRITE, SIGNALED
	le.PutUint16(e[10:], 1)
	le.PutUint64(e[16:], 0x7000)
	le.PutUint32(e[24:], 0xabcd00)
	le.PutUint64(e[64:], 0x9000)
	le.PutUint32(e[72:], 512)
	le.PutUint32(e[76:], 0x1200)
	word32(m, 4096).Store(1)
	wr := newSendWR()
	if !q.NextSend(wr) {
		t.Fatal("not seen")
	}
	if wr.ID != 0x1234 || wr.Flags != verbs.Signaled || wr.Remote != 0x7000 || wr.RKey != 0xabcd00 ||
		len(wr.SGEs) != 1 || wr.SGEs[0] != (verbs.SGE{Addr: 0x9000, Len: 512, LKey: 0x1200}) {
		t.Errorf("%+v", wr)
	}
	cq, c := newCQ(t, 2, 4)
	cq.Push(1, &verbs.WC{ID: 9, Status: verbs.WCFlushErr, Op: verbs.WCRecv, QP: 3})
	cq.Flush(1, 0)
	r := c.mem[4096+int(le.Uint32(c.mem[28:])):]
	if le.Uint32(r[0:]) != 1 || le.Uint64(r[256:]) != 9 || le.Uint32(r[264:]) != 5 || le.Uint32(r[268:]) != 128 || le.Uint32(r[276:]) != 3 {
		t.Errorf("CQE % x", r[256:320])
	}
}
