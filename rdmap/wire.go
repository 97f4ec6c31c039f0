package rdmap

import "encoding/binary"

var be = binary.BigEndian

// The control byte (RFC 5040 section 4.1). Two reserved bits are sent as zero
// and not checked.
const (
	ctrlVersion = 0xc0
	version     = 0x40
	ctrlOpcode  = 0x0f
)

// Opcodes (RFC 5040 figure 4, RFC 7306 figure 2).
const (
	opcodeWrite          = 0x0
	opcodeReadRequest    = 0x1
	opcodeReadResponse   = 0x2
	opcodeSend           = 0x3
	opcodeSendInv        = 0x4
	opcodeSendSE         = 0x5
	opcodeSendSEInv      = 0x6
	opcodeTerminate      = 0x7
	opcodeImm            = 0x8
	opcodeImmSE          = 0x9
	opcodeAtomicRequest  = 0xa
	opcodeAtomicResponse = 0xb
)

// control returns the control byte of an opcode.
func control(opcode uint8) uint8 { return version | opcode }

// sendOpcodes maps the operations of queue 0 to their opcodes.
var sendOpcodes = [...]uint8{
	OpSend: opcodeSend, OpSendInv: opcodeSendInv, OpSendSE: opcodeSendSE, OpSendSEInv: opcodeSendSEInv,
	OpImm: opcodeImm, OpImmSE: opcodeImmSE,
}

// sendOps is the inverse of sendOpcodes; 0 for the opcodes of other queues.
var sendOps = [16]Op{
	opcodeSend: OpSend, opcodeSendInv: OpSendInv, opcodeSendSE: OpSendSE, opcodeSendSEInv: OpSendSEInv,
	opcodeImm: OpImm, opcodeImmSE: OpImmSE,
}

const noQueue = 0xff

// opcodeQueue gives the queue number of each untagged opcode.
var opcodeQueue = [16]uint8{
	noQueue, 1, noQueue, 0, 0, 0, 0, 2, 0, 0, 1, 3, noQueue, noQueue, noQueue, noQueue,
}

const immLen = 8

// readRequest is the header of a Read Request (RFC 5040 section 4.4).
type readRequest struct {
	sinkSTag uint32
	sinkTO   uint64
	size     uint32 // bytes to read
	srcSTag  uint32
	srcTO    uint64
}

const readRequestLen = 28

// decode reads h from the first readRequestLen bytes of b.
func (h *readRequest) decode(b []byte) bool {
	if len(b) < readRequestLen {
		return false
	}
	h.sinkSTag, h.sinkTO = be.Uint32(b), be.Uint64(b[4:])
	h.size = be.Uint32(b[12:])
	h.srcSTag, h.srcTO = be.Uint32(b[16:]), be.Uint64(b[20:])
	return true
}

func (h *readRequest) append(dst []byte) []byte {
	dst = be.AppendUint32(dst, h.sinkSTag)
	dst = be.AppendUint64(dst, h.sinkTO)
	dst = be.AppendUint32(dst, h.size)
	dst = be.AppendUint32(dst, h.srcSTag)
	return be.AppendUint64(dst, h.srcTO)
}

// Atomic operation codes (RFC 7306 figure 5).
const (
	atomicFetchAdd = 0x0
	atomicCmpSwap  = 0x2
)

// atomicRequest is the header of an Atomic Request (RFC 7306 section 5.2.1).
type atomicRequest struct {
	code    uint8 // four bits
	id      uint32
	stag    uint32
	to      uint64
	data    uint64
	mask    uint64
	cmp     uint64
	cmpMask uint64
}

const atomicRequestLen = 52

func (h *atomicRequest) decode(b []byte) bool {
	if len(b) < atomicRequestLen {
		return false
	}
	h.code = b[3] & 0x0f
	h.id, h.stag, h.to = be.Uint32(b[4:]), be.Uint32(b[8:]), be.Uint64(b[12:])
	h.data, h.mask = be.Uint64(b[20:]), be.Uint64(b[28:])
	h.cmp, h.cmpMask = be.Uint64(b[36:]), be.Uint64(b[44:])
	return true
}

func (h *atomicRequest) append(dst []byte) []byte {
	dst = append(dst, 0, 0, 0, h.code)
	dst = be.AppendUint32(dst, h.id)
	dst = be.AppendUint32(dst, h.stag)
	dst = be.AppendUint64(dst, h.to)
	dst = be.AppendUint64(dst, h.data)
	dst = be.AppendUint64(dst, h.mask)
	dst = be.AppendUint64(dst, h.cmp)
	return be.AppendUint64(dst, h.cmpMask)
}

// atomicResponse is the header of an Atomic Response (RFC 7306 section 5.2.2,
// figure 6; the 32 bytes of section 4 contradict it).
type atomicResponse struct {
	id  uint32
	old uint64
}

const atomicResponseLen = 12

func (h *atomicResponse) decode(b []byte) bool {
	if len(b) < atomicResponseLen {
		return false
	}
	h.id, h.old = be.Uint32(b), be.Uint64(b[4:])
	return true
}

func (h *atomicResponse) append(dst []byte) []byte {
	dst = be.AppendUint32(dst, h.id)
	return be.AppendUint64(dst, h.old)
}
