package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/tcp"
)

// listenKey identifies a listener; the zero address stands for all addresses.
type listenKey struct {
	addr [16]byte
	port uint16
	sctp bool
}

// listener is a listening endpoint. Either tcp or sctp is set.
type listener struct {
	id     ListenerID
	tcp    *tcp.Listener
	stream bool // connections start as byte streams
	sctp   *sctp.Listener
	opts   SCTP
	admit  func(peer netip.Addr) bool // nil: all
	ip     IPOptions
}

// admits reports whether peer may connect to l.
func (l *listener) admits(peer netip.Addr) bool { return l.admit == nil || l.admit(peer) }

// listeners are those of a worker.
type listeners map[listenKey]*listener

// find returns the listener for a packet of flow f, or nil.
func (ls listeners) find(f *pkt.Flow, sctp bool) *listener {
	if l := ls[listenKey{f.Local, f.LocalPort, sctp}]; l != nil {
		return l
	}
	return ls[listenKey{port: f.LocalPort, sctp: sctp}]
}

// admitting returns the listener for a packet of flow f, or nil if there is none or if it does
// not admit the peer.
func (ls listeners) admitting(f *pkt.Flow, sctp bool) *listener {
	l := ls.find(f, sctp)
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
	k := listenKey{port: r.Local.Port(), sctp: r.SCTP != nil}
	if !r.Local.Addr().IsUnspecified() {
		k.addr = r.Local.Addr().As16()
	}
	if w.listeners[k] != nil {
		return fmt.Errorf("dataplane: already listening on %v", r.Local)
	}
	l := &listener{id: id, stream: r.Stream, admit: r.Admit, ip: r.IP}
	if w.socks != nil {
		if r.SCTP != nil {
			return errSocketSCTP
		}
		if err := w.socks.listen(w, l, r.Local, r.Backlog); err != nil {
			return err
		}
	} else if r.SCTP != nil {
		w.sctp0()
		l.opts = *r.SCTP
		l.sctp = sctp.NewListener(w.sctpConfig(l.opts), w.sctpSecret(), w.mtu)
	} else {
		l.tcp = tcp.NewListener(&w.tcp, r.Backlog, w.e.secret, w.told)
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
		if l.sctp != nil {
			w.unlistenSCTP(l)
		}
		if w.socks != nil {
			w.socks.unlisten(l)
		}
	}
}
