package dataplane

import (
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/histogram"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// Stats are the counters of a worker.
type Stats struct {
	Turns, Sleeps, Timeouts uint64

	RxStats
	TxStats
	ConnStats

	CQOverruns       uint64
	Faults           uint64
	FreeSlots, Slots uint64 // gauges
	HeldFrames       uint64 // gauge
	HeldPeak         uint64 // highest number of frames held at once
	Timers           uint64 // gauge

	Link      link.Stats
	SCTP      SCTPStats
	Fragments FragmentStats // of the device; only its first worker has them

	RTTs        histogram.Counts // round-trip times that TCP and SCTP have measured
	Completions histogram.Counts // from taking a work request to its completion; see timed
}

// RxStats are the counters for reception. A dropped frame is counted in exactly one of
// RxMalformed, RxChecksum, RxNoConn, RxNoHold, RxWrongQueueDropped and RxUnsupported.
type RxStats struct {
	RxFrames, RxBytes  uint64
	RxFPDUs            uint64
	RxEarly            uint64 // segments held out of order
	RxFPDUsEarly       uint64 // whole FPDUs found out of order
	RxFPDUsPlacedEarly uint64 // of those, placed before the gap was filled

	RxPartial uint64 // segments whose checksum field is the sum of the pseudo-header
	RxSuper   uint64 // segments longer than the MTU

	RxWrongQueue        uint64 // frames for other workers' connections, forwarded
	RxICMP              uint64
	RxMalformed         uint64
	RxChecksum          uint64
	RxNoConn            uint64
	RxNoHold            uint64
	RxWrongQueueDropped uint64 // frames for other workers' connections, lost: the connection was moving, or the other worker had too much to do
	RxReclaims          uint64 // times that a connection lost some of its held frames
	RxUnsupported       uint64
	RxAfterCloseBytes   uint64 // bytes
}

// TxStats are the counters for transmission.
type TxStats struct {
	TxFrames, TxBytes    uint64
	TxRetransmits        uint64
	TxStateless          uint64 // RSTs and SYN cookies
	TxFragments          uint64 // IP fragments
	TxFPDUs              uint64
	HostSegments         uint64 // DDP segments copied within the host, without FPDUs
	HostBytes            uint64 // of them
	TxRecords            uint64 // TCP segments composed of FPDUs
	TxSuper              uint64 // super-frames
	TxSuperSegments      uint64 // sent in super-frames
	TxSuperRefused       uint64 // refused by the link, and sent segment by segment
	TxSuperDropped       uint64 // lost as a whole while probing
	TxNoSlot, TxRingFull uint64
	TxStarved            uint64 // times sending stopped because all TX slots waited for acknowledgements
}

// ConnStats are the counters of connections and sessions.
type ConnStats struct {
	Conns                     uint64 // gauge
	ActiveOpens, PassiveOpens uint64
	Evicted                   uint64 // connections removed in TIME-WAIT to make room
	AssocsIdle                uint64 // SCTP associations ended for lack of a session
	AssocsRefused             uint64 // set-up chunks dropped from peers with too many associations
	AssocsNoMemory            uint64 // SCTP associations ended because together they held too much
	SessionRetries            uint64 // over SCTP, without enhanced data
	Violations                uint64 // by peers, answered with a Terminate
}

// SCTPStats are the counters of SCTP: of associations and their DDP sessions, including ended
// ones, and of listeners.
type SCTPStats struct {
	Assocs    uint64 // gauge
	Assoc     sctp.Stats
	Sessions  session.Stats
	Listeners sctp.ListenerStats
}

// add adds the counters of as.
func (s *SCTPStats) add(as *assoc) {
	st := as.a.Stats()
	s.Assoc.Add(&st)
	if as.mux != nil {
		m := as.mux.Stats()
		s.Sessions.Add(&m)
	}
}

// Silent returns the workers that do not answer within a second. Unlike Stats it collects nothing.
func (e *Engine) Silent() []int {
	_, silent := ask(e, func(*worker) struct{} { return struct{}{} })
	return silent
}

// ask calls f in every worker and waits up to a second for the answers, since a worker that an
// application drives may not be running. It also returns the workers that did not answer.
func ask[T any](e *Engine, f func(*worker) T) (all []T, silent []int) {
	answers := make([]chan T, len(e.workers))
	for i, w := range e.workers {
		ch := make(chan T, 1)
		answers[i] = ch
		w.post(func(w *worker) { ch <- f(w) })
	}
	over := make(chan struct{})
	defer time.AfterFunc(time.Second, func() { close(over) }).Stop()
	for i, ch := range answers {
		select {
		case <-over:
		case v := <-ch:
			all = append(all, v)
			continue
		}
		select { // both may have been ready
		case v := <-ch:
			all = append(all, v)
		default:
			silent = append(silent, e.workers[i].id)
		}
	}
	return all, silent
}

// Stats returns the counters of each worker. Those of the workers that do not answer within a second, which silent
// lists, are as of their last answer, so that no counter decreases.
func (e *Engine) Stats() (all []Stats, silent []int) {
	_, silent = ask(e, func(w *worker) struct{} {
		s := w.stats
		s.FreeSlots, s.Slots = uint64(w.link.FreeSlots()), uint64(w.link.Slots())
		s.HeldFrames = uint64(w.held.used)
		s.Timers = uint64(w.timers.Len())
		s.TxStarved = w.sched.Starved()
		s.RTTs, s.Completions = w.times.rtts.Counts(), w.times.completions.Counts()
		w.link.Stats(&s.Link)
		s.Link.Add(&w.past)
		if w.sctp != nil {
			s.SCTP = w.sctpStats()
		}
		if w == w.dev.workers[0] {
			s.Fragments = w.dev.frags.stats()
		}
		w.answered.Store(&s)
		return struct{}{}
	})
	all = make([]Stats, len(e.workers))
	for i, w := range e.workers {
		if s := w.answered.Load(); s != nil {
			all[i] = *s
		}
	}
	return all, silent
}
