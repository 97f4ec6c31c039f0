package sctp

import "time"

// Config holds what may be set of an association. The zero value of a field takes
// the default, which is that of RFC 9260 section 16 where there is one.
type Config struct {
	// Adaptation is the Adaptation Layer Indication (RFC 5061 4.2.6) to send in INIT
	// and INIT ACK, and Accept the ones that a peer may have, none of which is 0.
	// With Accept empty a peer may have any, or none; with Adaptation 0 none is sent.
	Adaptation uint32
	Accept     []uint32

	Streams    int // asked for in each direction; default 64, at most 65535
	MinStreams int // with less than this both ways the association is refused; default 1

	RcvWindow int // octets; default 1 MiB
	MaxKept   int // chunks that wait for the rest of their message or their turn; default 256

	RTOInitial, RTOMin, RTOMax time.Duration // 1 s, 1 s, 60 s; see docs/sctp.md for a lower RTOMin
	SackDelay                  time.Duration // 200 ms, at most 500 ms
	SackEvery                  int           // packets; 2
	Heartbeat                  time.Duration // 30 s; negative: none
	CookieLife                 time.Duration // 60 s
	MaxInit                    int           // retransmissions of INIT and COOKIE ECHO; 8
	MaxAssoc                   int           // time-outs in a row that end the association; 10
	MaxPath                    int           // time-outs in a row after which a path is not used; 5
	MaxBurst                   int           // packets of new data after a SACK; 4

	// UDP says that packets are encapsulated (RFC 6951), which costs 8 octets of
	// the MTU. The owner writes and strips the UDP headers.
	UDP bool
}

// maxSackDelay is the longest that a peer may delay a SACK (RFC 9260 6.2).
const maxSackDelay = 500 * time.Millisecond

// withDefaults fills in what is zero.
func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.Streams, 64)
	c.Streams = min(c.Streams, 65535)
	def(&c.MinStreams, 1)
	def(&c.RcvWindow, 1<<20)
	c.RcvWindow = max(c.RcvWindow, 2*minRwnd)
	def(&c.MaxKept, 256)
	dur(&c.RTOInitial, time.Second)
	dur(&c.RTOMin, time.Second)
	dur(&c.RTOMax, 60*time.Second)
	dur(&c.SackDelay, 200*time.Millisecond)
	c.SackDelay = min(c.SackDelay, maxSackDelay)
	def(&c.SackEvery, 2)
	dur(&c.Heartbeat, 30*time.Second)
	dur(&c.CookieLife, 60*time.Second)
	def(&c.MaxInit, 8)
	def(&c.MaxAssoc, 10)
	def(&c.MaxPath, 5)
	def(&c.MaxBurst, 4)
	return c
}

// accepts reports whether a peer with this indication may have an association.
func (c *Config) accepts(value uint32, has bool) bool {
	if len(c.Accept) == 0 {
		return true
	}
	for _, v := range c.Accept {
		if has && v == value {
			return true
		}
	}
	return false
}

// Stats counts what happened to an association.
type Stats struct {
	TxPackets, TxChunks, TxOctets uint64 // chunks and octets of user data, retransmissions included
	RxPackets, RxChunks, RxOctets uint64
	Retransmits, FastRetransmits  uint64 // chunks
	Timeouts                      uint64
	Sacks, Duplicates             uint64
	RxDropped                     uint64 // DATA that found no room, or came out of season
	BadTag, BadPacket             uint64 // packets dropped
	UnknownChunks                 uint64
	Restarts, Collisions          uint64
	Heartbeats                    uint64
	MTUProbes                     uint64 // HEARTBEATs that ask what the path's MTU is
	BlackHoles                    uint64 // times that it was lowered as long packets were lost and short ones not
	Failovers                     uint64
	Reclaimed                     uint64 // chunks acknowledged by gap reports and given up for room
	CookiesBad, CookiesStale      uint64
}

// Add adds o to s, field by field.
func (s *Stats) Add(o *Stats) {
	s.TxPackets += o.TxPackets
	s.TxChunks += o.TxChunks
	s.TxOctets += o.TxOctets
	s.RxPackets += o.RxPackets
	s.RxChunks += o.RxChunks
	s.RxOctets += o.RxOctets
	s.Retransmits += o.Retransmits
	s.FastRetransmits += o.FastRetransmits
	s.Timeouts += o.Timeouts
	s.Sacks += o.Sacks
	s.Duplicates += o.Duplicates
	s.RxDropped += o.RxDropped
	s.BadTag += o.BadTag
	s.BadPacket += o.BadPacket
	s.UnknownChunks += o.UnknownChunks
	s.Restarts += o.Restarts
	s.Collisions += o.Collisions
	s.Heartbeats += o.Heartbeats
	s.MTUProbes += o.MTUProbes
	s.BlackHoles += o.BlackHoles
	s.Failovers += o.Failovers
	s.Reclaimed += o.Reclaimed
	s.CookiesBad += o.CookiesBad
	s.CookiesStale += o.CookiesStale
}
