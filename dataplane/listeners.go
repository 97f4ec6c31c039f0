package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// listenKey identifies a listener; the zero address stands for all addresses.
type listenKey struct {
	addr  [16]byte
	port  uint16
	proto uint8 // pkt.ProtoTCP, pkt.ProtoSCTP
}

// listener is a listening endpoint.
type listener struct {
	id     ListenerID
	stream bool // connections start as byte streams
	transportListener
	admit func(peer netip.Addr) bool // nil: all
	ip    IPOptions

	unseen int // accepted connections and associations that the control plane has not seen
}

// maxUnseen is the limit of listener.unseen. Packets for further connections are dropped, as if
// lost.
const maxUnseen = 1024

// admits reports whether peer may connect to l.
func (l *listener) admits(peer netip.Addr) bool { return l.admit == nil || l.admit(peer) }

// listeners are those of a worker.
type listeners map[listenKey]*listener

// find returns the listener for a packet of flow f and transport proto, or nil.
func (ls listeners) find(f *pkt.Flow, proto uint8) *listener {
	if l := ls[listenKey{f.Local, f.LocalPort, proto}]; l != nil {
		return l
	}
	return ls[listenKey{port: f.LocalPort, proto: proto}]
}

// admitting returns the listener for a packet of flow f and transport proto, or nil if there is
// none or if it does not admit the peer.
func (ls listeners) admitting(f *pkt.Flow, proto uint8) *listener {
	l := ls.find(f, proto)
	if l == nil || !l.admits(netip.AddrFrom16(f.Remote).Unmap()) {
		return nil
	}
	return l
}

// setMTU sets the MTU that listeners over TCP announce.
func (ls listeners) setMTU(mtu int) {
	for _, l := range ls {
		if l.tcp != nil {
			l.tcp.SetMTU(mtu)
		}
	}
}

// listen makes this worker listen.
func (w *worker) listen(id ListenerID, r *ListenRequest) error {
	k := listenKey{port: r.Local.Port(), proto: r.proto()}
	if !r.Local.Addr().IsUnspecified() {
		k.addr = r.Local.Addr().As16()
	}
	if w.listeners[k] != nil {
		return fmt.Errorf("dataplane: already listening on %v", r.Local)
	}
	l := &listener{id: id, stream: r.Stream, admit: r.Admit, ip: r.IP}
	if err := l.open(w, r); err != nil {
		return err
	}
	w.listeners[k] = l
	return nil
}

// unlisten ends the listener id, if this worker has it.
func (w *worker) unlisten(id ListenerID) {
	for k, l := range w.listeners {
		if l.id != id {
			continue
		}
		delete(w.listeners, k)
		l.close(w)
	}
}
