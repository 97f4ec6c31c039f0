package ctrl

import (
	"net/netip"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/pkt"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

// Engine is the part of dataplane.Engine that the control plane uses.
type Engine interface {
	Workers() int
	Device(dataplane.ConnID) string
	Unplug(device string, why error)
	Plug(device string, queues []dataplane.Queue) error

	Listen(dataplane.ListenRequest) (dataplane.ListenerID, error)
	Unlisten(dataplane.ListenerID)
	NewID(local netip.AddrPort, device string) dataplane.ConnID
	Connect(dataplane.ConnID, dataplane.ConnectRequest) error
	Answer(dataplane.ConnID, ddp.Setup, dataplane.Attachment)
	StreamSend(dataplane.ConnID, []byte)
	StreamConsumed(dataplane.ConnID, int)
	Attach(dataplane.ConnID, dataplane.Attachment)
	SetDSCP(id dataplane.ConnID, dscp uint8) error
	Disconnect(id dataplane.ConnID, abort bool)

	Detach(*dataplane.QPBinding)
	Leave(*dataplane.QPBinding)
	Fence()
	Bind(*dataplane.ClientBinding) error
	Unbind(*dataplane.ClientBinding)

	QueryConns(ids []dataplane.ConnID) (conns []dataplane.ConnInfo, silent []int)
	Stats() (all []dataplane.Stats, silent []int)
	Silent() []int
	NewTap(frames, snap int, match func(*pkt.Flow) bool) *dataplane.Tap
	AddTap(*dataplane.Tap)
	RemoveTap(*dataplane.Tap)
}

var _ Engine = (*dataplane.Engine)(nil)

// Steering is the part of bpf.Steering that the control plane uses.
type Steering interface {
	Claim(bpf.Endpoint) error
	Unclaim(bpf.Endpoint) error
	SetAddresses([]netip.Addr) error
	SetVLANs([][]uint16) error
	Counters() (bpf.Counters, error)
}

var _ Steering = (*bpf.Steering)(nil)
