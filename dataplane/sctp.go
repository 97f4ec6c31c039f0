package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/subnet"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// SCTP configures DDP over SCTP for a listener or a connect.
type SCTP struct {
	Profile session.Profile
	UDP     bool // encapsulated in UDP (RFC 6951), port 9899 at both ends
	// Fallback makes a connect retry without the enhanced connection data if the peer refuses
	// them with a Terminate, as peers that implement only RFC 5043 do.
	Fallback bool
	Answer   time.Duration // time that a connect waits for the answer to its Initiate; 0 means no limit
}

// assoc is DDP over SCTP: an association, and a stream for each of its sessions.
type assoc struct {
	lane
	a    *sctp.Assoc
	mux  *session.Mux // nil until established
	opts SCTP
	lst  *listener // nil if it ends with its last session: we dialed it, or the listener is closed

	// Paths to the peer.
	also  []handoff.Key // keys for its further addresses
	hops  []Hop         // next hops by path; without a DstMAC that of the first path is used
	tuple pkt.Tuple
	ip    IPOptions

	finding bool // findHop is looking for the first path's next hop

	// Sessions.
	sessions map[uint16]*stream
	round    []*stream  // sessions in the order in which they send
	turn     int        // index in round of the session whose turn it is
	nextSID  uint16     // where to start looking for a free stream
	giveUp   clock.Time // earliest time at which a session gives up
	idle     clock.Time // when it ends unless the peer requests a session, or 0
	enhanced bool       // the peer accepted enhanced connection data
	inHand   bool       // a stream is processing one of its messages
	stalled  bool       // a session waits to receive; see ddpSink.Waits
	unseen   int        // requests and Negotiates that the control plane has not handled yet

	// Memory held for the peer.
	passive  bool     // the peer opened it
	counted  bool     // in sctpState.peers
	admitted bool     // we dialed, or a session was accepted
	kept     [][]byte // by sctp.Data.Slot
	memory   int      // bytes counted in sctpState.memory
}

// initiate is the state of a session that we requested, until it is answered.
type initiate struct {
	setup    session.Setup
	limit    clock.Time    // deadline of the whole set-up, or 0
	answer   time.Duration // how long to wait for the answer to each Initiate; 0: up to limit
	fallback bool          // may retry without enhanced data
	retry    bool          // will retry with setup when its stream is free
}

// A guest is a host with associations to one of our ports. Counting per port keeps a peer's associations with one
// listener from affecting others.
type guest struct {
	remote netip.Prefix
	port   uint16 // ours
}

func guestOf(f *pkt.Flow) guest { return guest{subnet.Of(netip.AddrFrom16(f.Remote)), f.LocalPort} }

// setCounted sets whether an association that the peer opened counts as one without an accepted session.
func (as *assoc) setCounted(w *worker, on bool) {
	if !as.passive || on == as.counted {
		return
	}
	as.counted = on
	g := guestOf(&as.key.Flow)
	if on {
		w.sctp.peers[g]++
	} else if w.sctp.peers[g]--; w.sctp.peers[g] == 0 {
		delete(w.sctp.peers, g)
	}
}

// sctpState is the SCTP state of a worker.
type sctpState struct {
	n       int           // associations
	peers   map[guest]int // number of associations without an accepted session that each peer has opened
	memory  int           // bytes held for all associations
	free    [][]byte      // buffers of assoc.kept
	part    []byte        // buffer for a message received in pieces
	scratch []byte        // buffer for a packet in one piece
	out     sctp.Out
	ctl     session.Control
	ev      session.Event
	over    SCTPStats // counters of ended associations and listeners
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
	// ErrRejected means that the peer rejected the session.
	ErrRejected = errors.New("dataplane: session rejected by peer")
	errSession  = errors.New("dataplane: session ended by peer")
	errNoAnswer = fmt.Errorf("%w: the peer did not answer the DDP Stream Session Initiate", ErrTimeout)
	// ErrNoStream means that an association has no free stream for a session, or is about
	// to end.
	ErrNoStream = errors.New("dataplane: the association has no free stream")
)

// sctpStreams is the number of streams per direction that we offer.
const sctpStreams = 64

func (w *worker) sctpConfig(o SCTP) *sctp.Config {
	c := &sctp.Config{Streams: sctpStreams, UDP: o.UDP, RcvWindow: w.tcp.RcvWindow, RTOMin: w.e.cfg.SCTP.RTOMin, RTT: &w.times.rtts,
		Hostless: func(a netip.Addr) bool { return w.e.isHostless(a.As16()) }}
	o.Profile.Configure(c)
	return c
}

func (e *Engine) sctpSecret() *sctp.Secret {
	var s sctp.Secret
	copy(s[:], e.secret[:])
	copy(s[16:], "DDP over SCTP   ")
	return &s
}

// unlistenSCTP makes the associations of l accept no further sessions, so that they end with
// their last one.
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

// sctp0 returns the worker's SCTP state, creating it if necessary.
func (w *worker) sctp0() *sctpState {
	if w.sctp == nil {
		w.sctp = &sctpState{peers: make(map[guest]int), scratch: make([]byte, 1<<16)}
	}
	return w.sctp
}

// connectSCTP opens an association with a first session.
func (w *worker) connectSCTP(id ConnID, r *ConnectRequest, hop *Hop) error {
	s := w.sctp0()
	flow, o := pkt.NewFlow(r.Local, r.Remote), *r.SCTP
	k := handoff.Key{Flow: flow, Proto: pkt.ProtoSCTP}
	switch {
	case w.lanes[k] != nil || w.e.elsewhere(k, w):
		return errFlowExists
	case s.n >= w.e.cfg.MaxConns:
		return errTooMany
	}
	as := w.newAssoc(sctp.Dial(w.now, w.sctpConfig(o), flow, w.e.sctpSecret(), w.mtuOf(hop)), flow, tupleOf(flow, hop, r.IP), o, r.IP)
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
	si.Path, si.further = as.a.Path(as.a.Primary()), as.further()
	if as.mux != nil {
		si.Sessions = as.mux.Stats()
	}
	ci.SCTP = si
}
