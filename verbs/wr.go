package verbs

import "github.com/iwarpd/iwarpd/rdmap"

// Operations of the send queue, in addition to rdmap's, that never reach the wire.
const (
	OpLocalInv rdmap.Op = 0xf0 // invalidate Inv, a window or fast-register region
	OpReg      rdmap.Op = 0xf1 // fast registration of RKey
	OpBindMW   rdmap.Op = 0xf2 // bind window RKey to SGEs[0]
	OpInvalid  rdmap.Op = 0xff // a WQE that could not be decoded; completes with WCLocQPOpErr
)

// SendFlags are libibverbs' IBV_SEND_* bits.
type SendFlags uint8

// Flags of a send work request.
const (
	Fence     SendFlags = 1 << 0 // start only when earlier Reads and atomics are complete
	Signaled  SendFlags = 1 << 1 // report success too
	Solicited SendFlags = 1 << 2 // turns OpSend, OpSendInv and OpImm into their Solicited Event form
	Inline    SendFlags = 1 << 3 // the payload is in Inline, not in SGEs
)

// SGE describes Len bytes of client memory at Addr of the region LKey. Addr is an address of the region, or an offset if the region is
// ZeroBased.
type SGE struct {
	Addr uint64
	Len  uint32
	LKey uint32
}

// SendWR is a work request of the send queue. Which fields count depends on Op:
//
//	OpWrite                      SGEs or Inline, RKey, Remote
//	OpRead                       SGEs (one: iWARP's Read has one sink), RKey, Remote
//	OpSend, OpSendSE             SGEs or Inline
//	OpSendInv, OpSendSEInv       SGEs or Inline, Inv
//	OpImm, OpImmSE               Imm
//	OpFetchAdd                   SGEs (one, 8 bytes), RKey, Remote, CompareAdd, SwapMask (field boundaries)
//	OpCmpSwap                    SGEs (one, 8 bytes), RKey, Remote, CompareAdd, Swap, CompareMask, SwapMask
//	OpLocalInv                   Inv
//	OpReg                        RKey (index of the region, new key), Remote (new base), SGEs[0] (Addr: offset in the region's memory, Len), Access
//	OpBindMW                     RKey (index of the window, new key), SGEs[0] (LKey: region, Addr, Len), Access
type SendWR struct {
	ID     uint64
	Op     rdmap.Op
	Flags  SendFlags
	SGEs   []SGE
	Inline []byte
	RKey   uint32
	Remote uint64
	Inv    uint32
	Imm    uint64 // 8 bytes of immediate data, the first byte most significant

	CompareAdd, Swap, CompareMask, SwapMask uint64

	Access Access
}

// RecvWR is a work request of a receive queue.
type RecvWR struct {
	ID   uint64
	SGEs []SGE
	Bad  bool // the WQE could not be decoded: completes with WCLocQPOpErr
}

// SendSource holds posted work requests until the QP takes them. NextSend fills *wr, appending to wr.SGEs[:0] and wr.Inline[:0] so that a
// caller that reuses *wr does not allocate; it returns false if there is none. If the source has a method Taken(), the QP calls it after it
// has taken a batch, before any request of it completes.
type SendSource interface {
	NextSend(wr *SendWR) bool
}

// RecvSource is SendSource's counterpart for receives.
type RecvSource interface {
	NextRecv(wr *RecvWR) bool
}
