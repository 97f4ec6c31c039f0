package shm

import (
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// opcodes maps the rings' opcodes to operations.
var opcodes = [256]rdmap.Op{
	WRWrite: rdmap.OpWrite, WRSend: rdmap.OpSend, WRRead: rdmap.OpRead,
	WRCmpSwap: rdmap.OpCmpSwap, WRFetchAdd: rdmap.OpFetchAdd, WRSendInv: rdmap.OpSendInv,
	WRImm: rdmap.OpImm, WRLocalInv: verbs.OpLocalInv, WRBindMW: verbs.OpBindMW, WRReg: verbs.OpReg,
}

// inverse maps operations to the rings' opcodes.
var inverse = func() (all [256]byte) {
	for code, op := range opcodes {
		all[op] = byte(code)
	}
	return all
}()

// opcode returns the opcode of wr; a Solicited Event form becomes a flag.
func opcode(wr *verbs.SendWR) (code byte, flags verbs.SendFlags, ok bool) {
	op, flags := wr.Op, wr.Flags
	switch op {
	case rdmap.OpSendSE:
		op, flags = rdmap.OpSend, flags|verbs.Solicited
	case rdmap.OpSendSEInv:
		op, flags = rdmap.OpSendInv, flags|verbs.Solicited
	case rdmap.OpImmSE:
		op, flags = rdmap.OpImm, flags|verbs.Solicited
	}
	code = inverse[op]
	return code, flags, op != 0 && opcodes[code] == op
}

// decodeSend decodes a copy of a WQE into wr. An invalid WQE becomes verbs.OpInvalid with its ID, so that the client gets an error
// completion.
func decodeSend(wqe []byte, wr *verbs.SendWR, maxSGE, maxInline int) {
	*wr = verbs.SendWR{
		ID:          le.Uint64(wqe[SQEID:]),
		Op:          opcodes[wqe[SQEOpcode]],
		Flags:       verbs.SendFlags(wqe[SQEFlags]),
		SGEs:        wr.SGEs[:0],
		Inline:      wr.Inline[:0],
		RKey:        le.Uint32(wqe[SQERKey:]),
		Remote:      le.Uint64(wqe[SQERemote:]),
		Inv:         le.Uint32(wqe[SQEInv:]),
		Imm:         le.Uint64(wqe[SQEImm:]),
		CompareAdd:  le.Uint64(wqe[SQECompareAdd:]),
		Swap:        le.Uint64(wqe[SQESwap:]),
		CompareMask: le.Uint64(wqe[SQECompareMask:]),
		SwapMask:    le.Uint64(wqe[SQESwapMask:]),
		Access:      verbs.Access(le.Uint32(wqe[SQEAccess:])),
	}
	n, inline := int(le.Uint16(wqe[SQENumSGE:])), uint64(le.Uint32(wqe[SQEInlineLen:]))
	const known = verbs.Fence | verbs.Signaled | verbs.Solicited | verbs.Inline
	switch {
	case wr.Op == 0 || wr.Flags&^known != 0 || n > maxSGE || inline > uint64(maxInline):
		wr.Op = verbs.OpInvalid
	case wr.Flags&verbs.Inline != 0:
		if n != 0 {
			wr.Op = verbs.OpInvalid
			return
		}
		wr.Inline = append(wr.Inline, wqe[SQEFixed:SQEFixed+inline]...)
	case inline != 0:
		wr.Op = verbs.OpInvalid
	default:
		wr.SGEs = decodeSGEs(wr.SGEs, wqe[SQEFixed:], n)
	}
}

// fitsSend reports whether wr fits the ring and its operation exists.
func fitsSend(wr *verbs.SendWR, maxSGE, maxInline int) bool {
	_, flags, ok := opcode(wr)
	if flags&verbs.Inline != 0 {
		return ok && len(wr.SGEs) == 0 && len(wr.Inline) <= maxInline
	}
	return ok && len(wr.Inline) == 0 && len(wr.SGEs) <= maxSGE
}

// encodeSend is the inverse of decodeSend for a wr that fits.
func encodeSend(wqe []byte, wr *verbs.SendWR) {
	op, flags, _ := opcode(wr)
	le.PutUint64(wqe[SQEID:], wr.ID)
	wqe[SQEOpcode], wqe[SQEFlags] = op, byte(flags)
	le.PutUint16(wqe[SQENumSGE:], uint16(len(wr.SGEs)))
	le.PutUint32(wqe[SQEInlineLen:], uint32(len(wr.Inline)))
	le.PutUint64(wqe[SQERemote:], wr.Remote)
	le.PutUint32(wqe[SQERKey:], wr.RKey)
	le.PutUint32(wqe[SQEInv:], wr.Inv)
	switch op {
	case WRCmpSwap, WRFetchAdd:
		le.PutUint64(wqe[SQECompareAdd:], wr.CompareAdd)
		le.PutUint64(wqe[SQESwap:], wr.Swap)
		le.PutUint64(wqe[SQECompareMask:], wr.CompareMask)
		le.PutUint64(wqe[SQESwapMask:], wr.SwapMask)
	case WRReg, WRBindMW:
		le.PutUint64(wqe[SQEAccess:], uint64(wr.Access))
	default:
		le.PutUint64(wqe[SQEImm:], wr.Imm)
	}
	copy(wqe[SQEFixed:], wr.Inline)
	encodeSGEs(wqe[SQEFixed:], wr.SGEs)
}

func decodeSGEs(dst []verbs.SGE, b []byte, n int) []verbs.SGE {
	for i := range n {
		e := b[i*SGESize : (i+1)*SGESize]
		dst = append(dst, verbs.SGE{Addr: le.Uint64(e[SGEAddr:]), Len: le.Uint32(e[SGELen:]), LKey: le.Uint32(e[SGELKey:])})
	}
	return dst
}

func encodeSGEs(b []byte, sges []verbs.SGE) {
	for i := range sges {
		e := b[i*SGESize : (i+1)*SGESize]
		le.PutUint64(e[SGEAddr:], sges[i].Addr)
		le.PutUint32(e[SGELen:], sges[i].Len)
		le.PutUint32(e[SGELKey:], sges[i].LKey)
	}
}

// decodeRecv makes wr from a copy of a receive WQE.
func decodeRecv(wqe []byte, wr *verbs.RecvWR, maxSGE int) {
	wr.ID = le.Uint64(wqe[RQEID:])
	n := int(le.Uint16(wqe[RQENumSGE:]))
	wr.SGEs = wr.SGEs[:0]
	if wr.Bad = n > maxSGE; !wr.Bad {
		wr.SGEs = decodeSGEs(wr.SGEs, wqe[RQEFixed:], n)
	}
}

// encodeRecv is the inverse for a wr that fits.
func encodeRecv(wqe []byte, wr *verbs.RecvWR) {
	le.PutUint64(wqe[RQEID:], wr.ID)
	le.PutUint64(wqe[RQENumSGE:], uint64(len(wr.SGEs)))
	encodeSGEs(wqe[RQEFixed:], wr.SGEs)
}

func encodeCQE(b []byte, wc *verbs.WC) {
	le.PutUint64(b[CQEID:], wc.ID)
	le.PutUint32(b[CQEStatus:], uint32(wc.Status))
	le.PutUint32(b[CQEOpcode:], uint32(wc.Op))
	le.PutUint32(b[CQELen:], wc.Len)
	le.PutUint32(b[CQEQP:], wc.QP)
	le.PutUint32(b[CQEFlags:], uint32(wc.Flags))
	le.PutUint32(b[CQEInvKey:], wc.InvKey)
	le.PutUint64(b[CQEImm:], wc.Imm)
	le.PutUint32(b[CQEVendor:], wc.Vendor)
}

func decodeCQE(b []byte, wc *verbs.WC) {
	*wc = verbs.WC{
		ID:     le.Uint64(b[CQEID:]),
		Status: verbs.WCStatus(le.Uint32(b[CQEStatus:])),
		Op:     verbs.WCOp(le.Uint32(b[CQEOpcode:])),
		Flags:  verbs.WCFlags(le.Uint32(b[CQEFlags:])),
		Len:    le.Uint32(b[CQELen:]),
		QP:     le.Uint32(b[CQEQP:]),
		Imm:    le.Uint64(b[CQEImm:]),
		InvKey: le.Uint32(b[CQEInvKey:]),
		Vendor: le.Uint32(b[CQEVendor:]),
	}
}
