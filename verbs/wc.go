package verbs

import (
	"fmt"

	"github.com/iwarpd/iwarpd/internal/term"
)

// WCStatus is the result of a work request. Values are libibverbs' ibv_wc_status.
type WCStatus uint8

// Statuses. iwarpd itself reports neither WCBadRespErr, WCRemInvReqErr nor WCFatalErr.
const (
	WCSuccess      WCStatus = 0
	WCLocLenErr    WCStatus = 1  // message larger than the receive, or the WR's length out of range
	WCLocQPOpErr   WCStatus = 2  // the WR itself is wrong: opcode, number of SGEs
	WCLocProtErr   WCStatus = 4  // an SGE's region: LKey, PD, rights, bounds
	WCFlushErr     WCStatus = 5  // the QP left RTS before the WR was done
	WCMWBindErr    WCStatus = 6  // bind or fast registration refused
	WCBadRespErr   WCStatus = 7  // the peer's response does not fit the request
	WCLocAccessErr WCStatus = 8  // local invalidate refused
	WCRemInvReqErr WCStatus = 9  // the peer found the request invalid
	WCRemAccessErr WCStatus = 10 // the peer found a protection error
	WCRemOpErr     WCStatus = 11 // the peer could not do the operation
	WCFatalErr     WCStatus = 19
	WCGeneralErr   WCStatus = 21
)

var statusNames = map[WCStatus]string{
	WCSuccess: "success", WCLocLenErr: "local length error", WCLocQPOpErr: "local QP operation error",
	WCLocProtErr: "local protection error", WCFlushErr: "work request flushed", WCMWBindErr: "memory window bind error",
	WCBadRespErr: "bad response", WCLocAccessErr: "local access error", WCRemInvReqErr: "remote invalid request",
	WCRemAccessErr: "remote access error", WCRemOpErr: "remote operation error", WCFatalErr: "fatal error",
	WCGeneralErr: "general error",
}

// String returns a short description.
func (s WCStatus) String() string {
	if n, ok := statusNames[s]; ok {
		return n
	}
	return fmt.Sprintf("status %d", uint8(s))
}

// WCOp is the operation that completed. Values are libibverbs' ibv_wc_opcode; iwarpd's own
// start at 64.
type WCOp uint8

// Opcodes of completions.
const (
	WCSend     WCOp = 0
	WCWrite    WCOp = 1
	WCRead     WCOp = 2
	WCCmpSwap  WCOp = 3
	WCFetchAdd WCOp = 4
	WCBindMW   WCOp = 5
	WCLocalInv WCOp = 6
	WCImm      WCOp = 64 // Immediate Data sent (RFC 7306 section 6)
	WCReg      WCOp = 65 // fast registration
	WCRecv     WCOp = 128
)

var opNames = map[WCOp]string{
	WCSend: "SEND", WCWrite: "RDMA_WRITE", WCRead: "RDMA_READ", WCCmpSwap: "COMP_SWAP", WCFetchAdd: "FETCH_ADD",
	WCBindMW: "BIND_MW", WCLocalInv: "LOCAL_INV", WCImm: "IMM", WCReg: "REG", WCRecv: "RECV",
}

// String returns libibverbs' name without its prefix.
func (o WCOp) String() string {
	if n, ok := opNames[o]; ok {
		return n
	}
	return fmt.Sprintf("opcode %d", uint8(o))
}

// WCFlags are libibverbs' ibv_wc_flags where it has them.
type WCFlags uint8

// Flags of a completion.
const (
	WCWithImm   WCFlags = 1 << 1 // Imm is valid
	WCWithInv   WCFlags = 1 << 3 // InvKey is what the peer named in a Send with Invalidate
	WCSolicited WCFlags = 1 << 7 // wakes a CQ that is armed for solicited completions
)

// WC is a completion. Vendor is zero, or the Terminate that ended the stream
// as packed by vendor.
type WC struct {
	ID     uint64
	Status WCStatus
	Op     WCOp // valid for errors too
	Flags  WCFlags
	Len    uint32 // bytes received or read
	QP     uint32
	Imm    uint64
	InvKey uint32
	Vendor uint32
}

// IsRecv reports whether the completion is for the receive CQ.
func (w *WC) IsRecv() bool { return w.Op&WCRecv != 0 }

// Wakes reports whether the completion wakes a CQ armed for solicited ones:
// solicited events and every error do (ibv_req_notify_cq).
func (w *WC) Wakes() bool { return w.Flags&WCSolicited != 0 || w.Status != WCSuccess }

const vendorValid = 1 << 31

// vendor packs the layer, type and code of a Terminate: 1<<31 | remote<<30 | layer<<16 |
// type<<8 | code. remote is true if the peer sent it. vendor(nil, remote) is 0.
func vendor(e *term.Error, remote bool) uint32 {
	if e == nil {
		return 0
	}
	v := vendorValid | uint32(e.Layer)<<16 | uint32(e.Type)<<8 | uint32(e.Code)
	if remote {
		v |= 1 << 30
	}
	return v
}

// Terminate unpacks w.Vendor. It returns the violation, or nil, and whether the peer reported it.
func (w *WC) Terminate() (e *term.Error, remote bool) {
	if w.Vendor&vendorValid == 0 {
		return nil, false
	}
	return term.Lookup(uint8(w.Vendor>>16), uint8(w.Vendor>>8), uint8(w.Vendor)), w.Vendor&(1<<30) != 0
}
