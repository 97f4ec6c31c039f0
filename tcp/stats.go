package tcp

import "time"

// Stats is the state and the counters of a connection. Windows and flight are in bytes.
type Stats struct {
	State  State
	SRTT   time.Duration
	RTTVar time.Duration
	MinRTT time.Duration
	RTO    time.Duration

	Cwnd, Ssthresh      int
	InFlight            int
	SndWnd, RcvWnd      int
	MSS, PMTU           int
	QueuedSegs, HeldNow int

	SegsOut, SegsIn   uint64
	BytesOut, BytesIn uint64 // payload first sent; payload delivered in order
	RetransStats
	ECNReductions, CEIn uint64
	SACKIn, DSACKIn     uint64 // blocks
	SACKOut, DSACKOut   uint64
	Reordering          bool // reordering was seen on the path
	DupAcksIn           uint64
	OutOfOrderIn        uint64
	DuplicateIn         uint64 // segments without new data
	HeldDropped         uint64 // out-of-order segments dropped for lack of room
	PAWSDropped         uint64
	ChallengeAcks       uint64
	AcksOut             uint64 // segments without payload
	WindowProbes        uint64
	ZeroWindow          time.Duration // time during which the peer's window blocked data
	PMTUShrinks         uint64
	BadOptions          uint64
}

// RetransStats counts losses and retransmissions.
type RetransStats struct {
	Retransmits           uint64 // segments, for any reason; the reasons follow
	RetransFast           uint64 // after RACK or three duplicate ACKs
	RetransRTO            uint64
	RetransTLP            uint64
	RetransBytes          uint64
	Timeouts, SpuriousRTO uint64
	Recoveries, Undos     uint64
}

// Stats returns the counters.
func (c *Conn) Stats() Stats {
	s := c.stats
	s.State = c.state
	s.SRTT, s.RTTVar, s.RTO = c.srtt, c.rttvar, c.rto
	s.MinRTT = c.rack.minRTT
	s.Cwnd, s.Ssthresh = c.w.cwnd, c.w.ssthresh
	s.InFlight = c.pipe()
	s.SndWnd = c.wnd
	s.RcvWnd = max(0, c.rcvAdv.Sub(c.rcvNxt))
	s.MSS, s.PMTU = c.mss, c.mtu
	s.QueuedSegs = int(c.q.tail - c.q.head)
	s.HeldNow = len(c.reasm.s)
	s.Reordering = c.rack.reordering
	return s
}
