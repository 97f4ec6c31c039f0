package dataplane

import (
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// SCTP is what may be set of DDP over SCTP, for a listener or a connect.
type SCTP struct {
	Profile session.Profile
	UDP     bool // encapsulated (RFC 6951), port 9899 at both ends
	// Fallback lets a connect try again without the enhanced set-up data when the peer
	// refuses them by a Terminate, as one of RFC 5043 alone does.
	Fallback bool
	Answer   time.Duration // longest wait of a connect for the answer to its Initiate; 0: no limit
}

// assoc is DDP over SCTP: an association, and a stream for each of its sessions.
type assoc struct {
	lane
	a    *sctp.Assoc
	mux  *session.Mux // nil until established
	opts SCTP
	lst  *listener // nil: it ends with its last session, for we dialed or the listener is closed

	// The way to the peer.
	also  []handoff.Key // by its other addresses
	hops  []Hop         // by path, to those: without a DstMAC as to the first
	tuple pkt.Tuple

	// Its sessions.
	sessions map[uint16]*stream
	round    []*stream  // those of sessions, in the order in which they send
	turn     int        // of round: whose turn it is
	nextSID  uint16     // from which on a stream is sought for a session of ours
	giveUp   clock.Time // the earliest of theirs
	idle     clock.Time // when it ends unless the peer asks for a session; 0: never
	enhanced bool       // the peer has accepted enhanced set-up data
	inHand   bool       // one of its messages is with a stream

	// What the peer makes it hold.
	passive  bool     // the peer opened it
	admitted bool     // we dialed, or a session was accepted
	kept     [][]byte // by sctp.Data.Slot
	memory   int      // what is counted for it in sctpState.memory
}

// initiate is what a session of ours asks for, until it is answered.
type initiate struct {
	setup    session.Setup
	limit    clock.Time    // of the whole set-up; 0: none
	answer   time.Duration // longest wait for the answer to each Initiate; 0: up to limit
	fallback bool          // it may ask again without enhanced data
	retry    bool          // it does, with setup, when its stream is free
}

// A guest is an address that opened associations to one of our ports. They are counted
// by port, so that what a peer does to one listener leaves others alone.
type guest struct {
	remote [16]byte
	port   uint16 // ours
}

func guestOf(f *pkt.Flow) guest { return guest{f.Remote, f.LocalPort} }

// sctpState is what a worker has of SCTP.
type sctpState struct {
	n       int                  // associations
	moved   map[pkt.Flow]*worker // associations dialed here that another queue has adopted
	peers   map[guest]int        // associations that peers opened
	memory  int                  // bytes held for all associations
	free    [][]byte             // buffers of assoc.kept
	part    []byte               // a message that came in pieces
	scratch []byte               // a packet in one piece
	out     sctp.Out
	ctl     session.Control
	ev      session.Event
	over    SCTPStats // of associations and listeners that are gone
}

// assocs gives the associations of the worker.
func (w *worker) assocs() iter.Seq[*assoc] {
	return func(yield func(*assoc) bool) {
		for k, l := range w.lanes {
			if k.SCTP && k.Tag == 0 && !yield(l.llp.(*assoc)) {
				return
			}
		}
	}
}

// assocOf returns the association of k here, nil if there is none.
func (w *worker) assocOf(k handoff.Key) *assoc {
	if l := w.lanes[k]; l != nil {
		return l.llp.(*assoc)
	}
	return nil
}

func (w *worker) sctpStats() SCTPStats {
	sum := w.sctp.over
	sum.Assocs = uint64(w.sctp.n)
	for as := range w.assocs() {
		sum.add(as)
	}
	for _, l := range w.listeners {
		if l.sctp != nil {
			st := l.sctp.Stats()
			sum.Listeners.Add(&st)
		}
	}
	return sum
}

var (
	// ErrRejected is why a connection was closed whose peer refused it.
	ErrRejected = errors.New("dataplane: session rejected by peer")
	errSession  = errors.New("dataplane: session ended by peer")
	errNoAnswer = fmt.Errorf("%w: the peer did not answer the DDP Stream Session Initiate", ErrTimeout)
	// ErrNoStream is why Connect joined no association, or why one was closed that it began:
	// the association has no stream left for it, or is about to end.
	ErrNoStream = errors.New("dataplane: the association has no free stream")
)

// sctpStreams is how many streams an association has each way, if the peer has as many.
const sctpStreams = 64

func (w *worker) sctpConfig(o SCTP) *sctp.Config {
	c := &sctp.Config{Streams: sctpStreams, UDP: o.UDP, RcvWindow: w.tcp.RcvWindow, RTOMin: w.e.cfg.SCTP.RTOMin}
	o.Profile.Configure(c)
	return c
}

func (w *worker) sctpSecret() *sctp.Secret {
	var s sctp.Secret
	copy(s[:], w.e.secret[:])
	copy(s[16:], "DDP over SCTP   ")
	return &s
}

// unlistenSCTP lets the associations of l end: no one takes another session of their
// peers.
func (w *worker) unlistenSCTP(l *listener) {
	st := l.sctp.Stats()
	w.sctp.over.Listeners.Add(&st)
	for as := range w.assocs() {
		if as.lst == l {
			as.lst = nil
			w.mark(&as.lane)
		}
	}
}

// sctp0 returns the worker's SCTP, made when it is first asked for.
func (w *worker) sctp0() *sctpState {
	if w.sctp == nil {
		w.sctp = &sctpState{moved: make(map[pkt.Flow]*worker), peers: make(map[guest]int), scratch: make([]byte, 1<<16)}
	}
	return w.sctp
}

// connectSCTP opens an association, and a session on it.
func (w *worker) connectSCTP(id ConnID, r *ConnectRequest, hop *Hop) error {
	s := w.sctp0()
	flow, o := pkt.NewFlow(r.Local, r.Remote), *r.SCTP
	k := handoff.Key{Flow: flow, SCTP: true}
	switch {
	case w.lanes[k] != nil || w.e.elsewhere(k, w):
		return errFlowExists
	case s.n >= w.e.cfg.MaxConns:
		return errTooMany
	}
	udp := uint16(0)
	if o.UDP {
		udp = sctp.UDPPort
	}
	as := w.newAssoc(sctp.Dial(w.now, w.sctpConfig(o), flow, udp, w.sctpSecret(), w.mtuOf(hop)), flow, tupleOf(flow, hop), o)
	as.admitted = true
	as.beginSession(w, 0, id, r)
	if len(w.e.workers) > 1 {
		w.e.dialing.Add(k, w)
	}
	w.e.events.push(Event{Kind: EventJoined, Conn: id, Flow: flow, Worker: w.id})
	return nil
}

func (as *assoc) streams() []*stream { return as.round }

func (as *assoc) info(ci *ConnInfo) {
	si := &SCTPInfo{State: as.a.State(), Stats: as.a.Stats()}
	_, current := as.a.Paths()
	si.Path, si.further = as.a.Path(current), as.further()
	if as.mux != nil {
		si.Sessions = as.mux.Stats()
	}
	ci.SCTP = si
}
