package iwarp

import (
	"math"
	"net/netip"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// DefaultSocket is the default path of the daemon's socket.
const DefaultSocket = "/run/iwarpd/iwarpd.sock"

// Types of the verbs level.
type (
	// SendWR is a work request for a send queue.
	SendWR = verbs.SendWR
	// RecvWR is a work request for a receive queue: a buffer for one message.
	RecvWR = verbs.RecvWR
	// SGE is a piece of a registered region, as part of a work request.
	SGE = verbs.SGE
	// Op is the operation of a SendWR.
	Op = rdmap.Op
	// SendFlags are the flags of a SendWR.
	SendFlags = verbs.SendFlags
	// WC is a completion.
	WC = verbs.WC
	// WCStatus is the result of a work request.
	WCStatus = verbs.WCStatus
	// WCOp is the operation that completed.
	WCOp = verbs.WCOp
	// Access is a set of rights to a memory region.
	Access = verbs.Access
)

// Access rights of memory. Local read is always granted.
const (
	AccessLocalWrite   = verbs.LocalWrite
	AccessRemoteWrite  = verbs.RemoteWrite
	AccessRemoteRead   = verbs.RemoteRead
	AccessRemoteAtomic = verbs.RemoteAtomic
	AccessMWBind       = verbs.MWBind
	AccessZeroBased    = verbs.ZeroBased
)

// Operations of the send queue.
const (
	OpSend      = rdmap.OpSend
	OpSendInv   = rdmap.OpSendInv
	OpSendSE    = rdmap.OpSendSE
	OpSendSEInv = rdmap.OpSendSEInv
	OpWrite     = rdmap.OpWrite
	OpRead      = rdmap.OpRead
	OpImm       = rdmap.OpImm
	OpImmSE     = rdmap.OpImmSE
	OpFetchAdd  = rdmap.OpFetchAdd
	OpCmpSwap   = rdmap.OpCmpSwap
	OpLocalInv  = verbs.OpLocalInv
	OpReg       = verbs.OpReg
	OpBindMW    = verbs.OpBindMW
)

// Flags of a send work request.
const (
	Fence     = verbs.Fence
	Signaled  = verbs.Signaled
	Solicited = verbs.Solicited
	Inline    = verbs.Inline
)

// The most used statuses, operations and flags of completions; package verbs has the others.
const (
	WCSuccess  = verbs.WCSuccess
	WCFlushErr = verbs.WCFlushErr

	WCSend     = verbs.WCSend
	WCWrite    = verbs.WCWrite
	WCRead     = verbs.WCRead
	WCCmpSwap  = verbs.WCCmpSwap
	WCFetchAdd = verbs.WCFetchAdd
	WCRecv     = verbs.WCRecv

	WCWithImm = verbs.WCWithImm
	WCWithInv = verbs.WCWithInv

	WCSolicited = verbs.WCSolicited
)

// DeviceAttr describes the daemon, one of its interfaces and the limits of this client.
type DeviceAttr struct {
	Interface string
	Down      string // why the interface receives no frames; "" if it does
	Addrs     []netip.Addr
	MTU       int
	Server    string // name and version of the daemon
	Version   int    // protocol version
	Client    uint32 // this client's number in the daemon's lists
	Workers   int

	MaxQP, MaxCQ, MaxPD, MaxMR, MaxMW, MaxListen int
	MaxMRSize, MaxRegistered                     uint64 // bytes
	MaxQPWR, MaxCQE, MaxSGE                      int
	MaxInline, MaxPrivateData                    int // bytes
	MaxIRD, MaxORD                               int
}

// RTR is a set of kinds of ready-to-receive messages (RFC 6581 section 9.2).
type RTR uint32

// Kinds of RTR.
const (
	RTRSend  RTR = 1
	RTRWrite RTR = 2
	RTRRead  RTR = 4
)

// Startup sets how MPA negotiates a connection. Its zero value means the daemon's
// configuration: by default CRC32c, no markers, and revision 2 in peer-to-peer
// mode, with a retry at revision 1.
type Startup struct {
	// NoCRC asks for a connection without CRC32c. It has effect only if the daemon is
	// configured with crc: optional (RFC 5044 Section 4.4) and the peer does not request the
	// CRC. ConnInfo.CRC is the result.
	NoCRC        bool
	Markers      bool // ask the peer to send markers
	Revision     int  // 1 or 2
	NoFallback   bool // do not retry with revision 1 (over SCTP: without enhanced data), or without markers
	PeerToPeer   bool // request peer-to-peer mode; if neither is set the daemon decides, and by default requests it
	NoPeerToPeer bool
	RTR          RTR // offered in peer-to-peer mode
	// IRD is the number of RDMA Reads and atomics that the peer may have outstanding,
	// ORD the number that this side may have. 0: the daemon's default, negative: none.
	IRD, ORD int
	Timeout  time.Duration // limit of each step of the start-up

	Transport Transport // protocol below DDP; over SCTP only Revision, IRD and ORD of the others are used
	UDP       bool      // SCTP in UDP, port 9899 (RFC 6951)
	// SharedAssociation makes the connections of this Device to one address and port
	// share one SCTP association. The first Connect opens it, and it is closed after the
	// last connection. The connections share one congestion window, and end together if
	// the association fails. Listeners need not set it.
	SharedAssociation bool

	// DSCP (1 to 63), TTL (or hop limit, 1 to 255) and Priority (in VLAN tags, 1 to 7) of the
	// packets. 0 means the daemon's default. Negative values mean 0, or for TTL the default. A
	// shared association uses those of the Connect that opened it.
	DSCP, TTL, Priority int
}

// Transport is the protocol below DDP.
type Transport uint8

// The transports.
const (
	TCP       Transport = iota // with MPA
	SCTP                       // RFC 5043, with the set-up of RFC 6581
	SCTPDraft                  // draft-ietf-rddp-sctp-00
	Socket                     // TCP of the kernel, with MPA, if the daemon has kernel sockets
)

func (s *Startup) pb() *ctrlpb.Startup {
	p := &ctrlpb.Startup{}
	if s.NoCRC {
		p.Crc = proto.Bool(false)
	}
	if s.Markers {
		p.Markers = proto.Bool(true)
	}
	if s.Revision != 0 {
		p.Revision = proto.Uint32(uint32(s.Revision))
	}
	if s.NoFallback {
		p.Fallback = proto.Bool(false)
	}
	if s.PeerToPeer || s.NoPeerToPeer {
		p.P2P = proto.Bool(s.PeerToPeer)
	}
	if s.RTR != 0 {
		p.Rtr = proto.Uint32(uint32(s.RTR))
	}
	p.Ird, p.Ord = depth(s.IRD), depth(s.ORD)
	if s.Timeout > 0 {
		p.TimeoutMs = proto.Uint32(millis(s.Timeout))
	}
	p.Transport, p.UdpEncapsulation, p.SharedAssociation = ctrlpb.Transport(s.Transport), s.UDP, s.SharedAssociation
	p.Dscp, p.Ttl, p.Priority = depth(s.DSCP), depth(max(s.TTL, 0)), depth(s.Priority)
	return p
}

// depth returns n for the daemon, or nil for the default. A negative n stands for 0.
func depth(n int) *uint32 {
	if n == 0 {
		return nil
	}
	return proto.Uint32(size(max(n, 0)))
}

// size converts n for the daemon. Values that do not fit become the greatest value, which the
// daemon refuses.
func size(n int) uint32 {
	if n < 0 || n > math.MaxUint32 {
		return math.MaxUint32
	}
	return uint32(n)
}

func millis(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32(min(max(d.Milliseconds(), 1), 1<<31))
}

// Config sets how connections are established. The zero value, or a nil *Config, suits most
// uses.
type Config struct {
	Startup     Startup
	PrivateData []byte         // sent with the request, or with the reply of an accept
	LocalAddr   netip.AddrPort // Connect and Dial: local address, whose parts may be zero
	// Backlog, of Listen, is the number of requests that may wait for an answer, and of
	// connections that may wait for Accept; default 128. More are reset: their Connect fails
	// with ErrRefused.
	Backlog   int
	Streaming bool // Listen: connections start as byte streams, for AcceptStream
	// Timeout is the limit of Dial and Connect as a whole. 0 means the daemon's default of 30
	// s. The deadline of a context applies too.
	Timeout time.Duration

	// The fields below apply to a Conn only.
	SendDepth int // operations in flight; default 64
	RecvDepth int // messages that may wait for Recv; default 64
	RecvSize  int // longest message that can be received, in bytes; default 16 KiB
	MaxInline int // longest message that is copied into the queue, in bytes; default 64
	PD        *PD // protection domain of the connection; nil creates one
}

var zeroConfig Config

func (c *Config) orDefault() *Config {
	if c == nil {
		return &zeroConfig
	}
	return c
}

// ConnInfo describes an established connection.
type ConnInfo struct {
	Local, Remote netip.AddrPort
	PrivateData   []byte // private data of the peer's reply or, on the accepting side, request
	Revision      int    // of MPA
	IRD, ORD      int    // depths in use on this side
	// PeerIRD and PeerORD are the values in the peer's request or reply (RFC 6581 section 9.1):
	// the number of our Reads that it accepts, and the number that it wants outstanding. 0x3FFF
	// leaves the number to the applications; -1 means that the peer did not send it (revision
	// 1).
	PeerIRD, PeerORD         int
	CRC                      bool
	SendMarkers, RecvMarkers bool
	PeerToPeer               bool
	Initiator                bool // this side initiated the MPA start-up
	Worker                   int
}

// Remote identifies memory of the peer. The peer gets it from MR.Remote and sends it to the
// program that reads or writes the memory.
type Remote struct {
	Addr uint64
	RKey uint32
	Len  uint32
}

// At returns the n bytes of r that start at offset off. It does not check that they
// are within r; the peer does.
func (r Remote) At(off, n uint32) Remote {
	return Remote{Addr: r.Addr + uint64(off), RKey: r.RKey, Len: n}
}
