package sctp

import (
	"net/netip"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/internal/histogram"
)

// Config holds the settings of an association. A zero field means its default, which is that of RFC 9260 section 16 where there is one.
type Config struct {
	// Adaptation is the Adaptation Layer Indication (RFC 5061 4.2.6) to send in INIT and INIT ACK; 0 sends none. Accept lists the
	// indications that a peer may send, none of which is 0; if it is empty, a peer may send any or none.
	Adaptation uint32
	Accept     []uint32

	Streams int // requested in each direction; default 64, at most 65535

	RcvWindow int // bytes; default 1 MiB
	MaxKept   int // chunks kept until their message is complete or its turn comes; default 256

	RTOMin    time.Duration // 1 s; see docs/sctp.md for a lower one
	Heartbeat time.Duration // 30 s; negative: none
	MaxAssoc  int           // consecutive time-outs that end the association; 10
	MaxBurst  int           // packets of new data per SACK; 4

	// Hostless reports whether no other host can have an address, because it is ours or a broadcast address. Nothing is sent to such an
	// address that a peer lists. If it is nil, the peer may list each unicast address.
	Hostless func(addr netip.Addr) bool

	RTT *histogram.Histogram // counts the measured round-trip times; nil: they are not counted

	// UDP enables UDP encapsulation (RFC 6951), which costs 8 bytes of the MTU. The owner adds and removes the UDP headers.
	UDP bool
}

// Parameters of RFC 9260 section 16.
const (
	rtoInitial = time.Second
	rtoMax     = 60 * time.Second
	cookieLife = 60 * time.Second
	guardTime  = 5 * rtoMax // of T5-shutdown-guard (9.2)
	maxInit    = 8          // retransmissions of INIT and COOKIE ECHO
	maxPath    = 5          // consecutive time-outs that make a path inactive
)

// The delay of a SACK (RFC 9260 6.2).
const (
	sackEvery    = 2 // packets
	sackDelay    = 200 * time.Millisecond
	maxSackDelay = 500 * time.Millisecond // of a peer
)

// withDefaults returns c with defaults in place of zero fields.
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
	def(&c.RcvWindow, 1<<20)
	c.RcvWindow = max(c.RcvWindow, 2*minRwnd)
	def(&c.MaxKept, 256)
	dur(&c.RTOMin, time.Second)
	dur(&c.Heartbeat, 30*time.Second)
	def(&c.MaxAssoc, 10)
	def(&c.MaxBurst, 4)
	return c
}

// accepts reports whether the peer's indication is acceptable.
func (c *Config) accepts(value uint32, has bool) bool {
	return len(c.Accept) == 0 || has && slices.Contains(c.Accept, value)
}

// Stats holds the counters of an association.
type Stats struct {
	TxPackets, TxChunks, TxBytes uint64 // chunks and bytes of user data, including retransmissions
	RxPackets, RxChunks, RxBytes uint64
	Retransmits, FastRetransmits uint64 // chunks
	Timeouts                     uint64
	Sacks, Duplicates            uint64
	RxDropped                    uint64 // DATA chunks dropped for lack of room or in a wrong state
	BadTag, BadPacket            uint64 // packets dropped
	UnknownChunks                uint64
	Restarts, Collisions         uint64
	Heartbeats                   uint64
	MTUProbes                    uint64 // HEARTBEATs sent to probe the path MTU
	BlackHoles                   uint64 // times the MTU was lowered because long packets were lost and short ones were not
	Failovers                    uint64
	Reneged                      uint64 // chunks acknowledged by gap reports and then dropped for lack of room
	CookiesBad, CookiesStale     uint64
}

// Add adds o to s, field by field.
func (s *Stats) Add(o *Stats) {
	s.TxPackets += o.TxPackets
	s.TxChunks += o.TxChunks
	s.TxBytes += o.TxBytes
	s.RxPackets += o.RxPackets
	s.RxChunks += o.RxChunks
	s.RxBytes += o.RxBytes
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
	s.Reneged += o.Reneged
	s.CookiesBad += o.CookiesBad
	s.CookiesStale += o.CookiesStale
}
