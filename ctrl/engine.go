package ctrl

import (
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane"
)

// Engine is what the control plane uses of a dataplane.Engine.
type Engine interface {
	Workers() int
	WakeFD(worker int) int
	Listen(local netip.AddrPort, backlog int) (dataplane.ListenerID, error)
	Unlisten(dataplane.ListenerID)
	Connect(local, remote netip.AddrPort, timeout time.Duration) (dataplane.ConnID, error)
	StreamSend(dataplane.ConnID, []byte)
	StreamConsumed(dataplane.ConnID, int)
	Attach(dataplane.ConnID, dataplane.Attachment)
	Disconnect(id dataplane.ConnID, abort bool)
	Detach(*dataplane.QPBinding)
	Fence()
	Bind(*dataplane.ClientBinding)
	Unbind(*dataplane.ClientBinding)
}

// Steering claims endpoints in the XDP program; *bpf.Steering implements it.
type Steering interface {
	Claim(bpf.Endpoint) error
	Unclaim(bpf.Endpoint) error
}

// Streaming is an Engine that holds back the peers of byte streams by the window.
type Streaming interface {
	ListenStream(local netip.AddrPort, backlog int) (dataplane.ListenerID, error)
	ConnectStream(local, remote netip.AddrPort, timeout time.Duration) (dataplane.ConnID, error)
}

var _ Streaming = (*dataplane.Engine)(nil)

// Counted is an Engine that can tell of its connections and counters.
type Counted interface {
	QueryConns() (conns []dataplane.ConnInfo, silent []int)
	Stats() []dataplane.Stats
}

var _ Counted = (*dataplane.Engine)(nil)
var _ Engine = (*dataplane.Engine)(nil)
