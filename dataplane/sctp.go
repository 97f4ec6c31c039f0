package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

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

// assoc is an SCTP association with its DDP streams. Each session on one of them is
// a conn; one more conn, the carrier, stands for the association in the worker's
// lists and timers.
type assoc struct {
	a        *sctp.Assoc
	mux      *session.Mux // nil until established
	opts     SCTP
	flow     pkt.Flow  // of SCTP
	also     []flowKey // with the other addresses of the peer
	hops     []Hop     // by path, to those: without a DstMAC as to the first
	tuple    pkt.Tuple
	carrier  conn
	streams  map[uint16]*conn
	round    []*conn       // those of streams, in the order in which they send
	turn     int           // of round: whose turn it is
	nextSID  uint16        // from which on a stream is sought for a session of ours
	lst      *sctpListener // nil: it ends with its last session, for we dialled or the listener is closed
	kept     [][]byte      // by sctp.Data.Slot
	memory   int           // what is counted for it in sctpState.memory
	admitted bool          // we dialled, or a session was accepted
	over     bool
	passive  bool       // the peer opened it
	enhanced bool       // the peer has accepted enhanced set-up data
	inHand   bool       // one of its messages is with a stream
	idle     clock.Time // when it ends unless the peer asks for a session; 0: never
}

// initiate is what a session of ours asks for, until it is answered.
type initiate struct {
	setup    session.Setup
	limit    clock.Time    // of the whole set-up; 0: none
	answer   time.Duration // longest wait for the answer to each Initiate; 0: up to limit
	fallback bool          // it may ask again without enhanced data
	retry    bool          // it does, with setup, when its stream is free
}

type sctpListener struct {
	id   ListenerID
	l    *sctp.Listener
	opts SCTP
}

// sctpState is what a worker has of SCTP.
type sctpState struct {
	assocs    map[pkt.Flow]*assoc
	listeners map[listenKey]*sctpListener
	also      map[flowKey]*assoc   // by further addresses of their peers, and tags
	moved     map[pkt.Flow]*worker // associations dialled here that another queue has adopted
	peers     map[[16]byte]int     // associations of listeners, by the peer's address
	memory    int                  // octets held for all associations
	free      [][]byte             // buffers of assoc.kept
	part      []byte               // a message that came in pieces
	scratch   []byte               // a packet in one piece
	out       sctp.Out
	ctl       session.Control
	ev        session.Event
	tapped    pkt.Flow
	over      SCTPStats // of associations and listeners that are gone
}

func (s *sctpState) stats() SCTPStats {
	sum := s.over
	sum.Assocs = uint64(len(s.assocs))
	for _, as := range s.assocs {
		sum.add(as)
	}
	for _, l := range s.listeners {
		st := l.l.Stats()
		sum.Listeners.Add(&st)
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

func (w *worker) listenSCTP(id ListenerID, local netip.AddrPort, o SCTP) error {
	s := w.sctp0()
	k := keyOf(local)
	if s.listeners[k] != nil {
		return fmt.Errorf("dataplane: already listening on %v", local)
	}
	s.listeners[k] = &sctpListener{id, sctp.NewListener(w.sctpConfig(o), w.sctpSecret(), w.mtu), o}
	return nil
}

func (w *worker) unlistenSCTP(id ListenerID) {
	if w.sctp == nil {
		return
	}
	for k, l := range w.sctp.listeners {
		if l.id == id {
			st := l.l.Stats()
			w.sctp.over.Listeners.Add(&st)
			delete(w.sctp.listeners, k)
		}
	}
	// Nobody takes another session of their peers.
	for _, as := range w.sctp.assocs {
		if as.lst == nil || as.lst.id != id {
			continue
		}
		as.lst = nil
		w.mark(&as.carrier)
	}
}

// sctp0 returns the worker's SCTP, made when it is first asked for.
func (w *worker) sctp0() *sctpState {
	if w.sctp == nil {
		w.sctp = &sctpState{assocs: make(map[pkt.Flow]*assoc), listeners: make(map[listenKey]*sctpListener), also: make(map[flowKey]*assoc), moved: make(map[pkt.Flow]*worker), peers: make(map[[16]byte]int), scratch: make([]byte, 1<<16)}
	}
	return w.sctp
}

func (w *worker) connectSCTP(id ConnID, flow pkt.Flow, hop Hop, o SCTP, set session.Setup, timeout time.Duration) error {
	s := w.sctp0()
	if s.assocs[flow] != nil || w.elsewhere(flow, true) {
		return errFlowExists
	}
	if len(s.assocs) >= w.e.cfg.MaxConns {
		return errTooMany
	}
	udp := uint16(0)
	if o.UDP {
		udp = sctp.UDPPort
	}
	t := tupleOf(flow, &hop)
	as := w.newAssoc(sctp.Dial(w.now, w.sctpConfig(o), flow, udp, w.sctpSecret(), w.mtuOf(&hop)), flow, t, o)
	as.admitted = true
	w.beginSession(as, 0, id, &initiate{setup: set, answer: o.Answer, fallback: o.Fallback}, timeout)
	if len(w.e.workers) > 1 {
		w.e.mu.Lock()
		w.e.dialing[flow] = w
		w.e.ndialing.Store(int32(len(w.e.dialing)))
		w.e.mu.Unlock()
	}
	w.e.events.push(Event{Kind: EventJoined, Conn: id, Flow: flow, Worker: w.id})
	w.mark(&as.carrier)
	return nil
}

// sessions appends what is known of the sessions over SCTP.
func (w *worker) sessions(infos []ConnInfo) []ConnInfo {
	for _, c := range w.conns {
		if c.as == nil {
			continue
		}
		as := c.as
		si := &SCTPInfo{State: as.a.State(), Stats: as.a.Stats()}
		_, current := as.a.Paths()
		si.Path, si.further = as.a.Path(current), as.further()
		if as.mux != nil {
			si.Sessions = as.mux.Stats()
		}
		ci := ConnInfo{ID: c.id, Flow: c.flow, Worker: w.id, SCTP: si, Full: c.mode == modeFull, Params: c.attachP, QP: c.qp}
		if c.stream != nil {
			ci.RDMAP, ci.Verbs = c.stream.Stats(), c.qp.QP.Stats()
		}
		infos = append(infos, ci)
	}
	return infos
}
