package dataplane

import (
	"maps"
	"slices"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// ConnInfo describes a connection.
type ConnInfo struct {
	ID         ConnID
	Flow       pkt.Flow
	Worker     int
	State      tcp.State // without SCTP
	TCP        tcp.Stats
	SCTP       *SCTPInfo // nil: over TCP
	RDMAP      rdmap.Stats
	Verbs      verbs.Stats
	QP         *QPBinding
	StreamData int // streaming-mode bytes not yet consumed
}

// SCTPInfo describes an association, which the sessions on it share.
type SCTPInfo struct {
	State    sctp.State
	Stats    sctp.Stats
	Path     sctp.PathInfo // the path in use
	Sessions session.Stats

	further [][16]byte // further addresses of the peer
}

// Conns returns the connections of all workers that answer.
func (e *Engine) Conns() []ConnInfo {
	all, _ := e.QueryConns(nil)
	return all
}

// QueryConns returns the connections ids, or all if ids is nil, of all workers that answer within a
// second, and the workers that do not.
func (e *Engine) QueryConns(ids []ConnID) (conns []ConnInfo, silent []int) {
	all, silent := ask(e, func(w *worker) []ConnInfo {
		some := ids
		if some == nil {
			some = slices.Collect(maps.Keys(w.streams))
		}
		infos := make([]ConnInfo, 0, len(some))
		for _, id := range some {
			if s := w.streams[id]; s != nil {
				infos = append(infos, s.connInfo(w))
			}
		}
		return infos
	})
	return slices.Concat(all...), silent
}

// connInfo returns the state of s.
func (s *stream) connInfo(w *worker) ConnInfo {
	ci := ConnInfo{ID: s.id, Flow: s.flow(), Worker: w.id, QP: s.qp}
	s.lane.llp.info(&ci)
	if s.ddp != nil {
		ci.RDMAP, ci.Verbs = s.ddp.Stats(), s.qp.QP.Stats()
	}
	return ci
}
