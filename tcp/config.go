package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/histogram"
)

// CongestionControl selects a congestion control algorithm.
type CongestionControl uint8

const (
	CUBIC   CongestionControl = iota // RFC 9438
	NewReno                          // RFC 5681
	DCTCP                            // RFC 8257; requires ECN
)

// ECN selects when a connection uses explicit congestion notification (RFC 3168). DCTCP requests it always.
type ECN uint8

const (
	NoECN      ECN = iota
	AcceptECN      // if the peer, who opens the connection, requests it
	RequestECN     // and in connections opened here, if the peer accepts
)

// Config holds the settings of an administrator or an owner. Each connection copies it.
type Config struct {
	RcvWindow int // largest window offered, in bytes
	MaxHeld   int // maximum number of out-of-order segments held

	NoSACK, NoTimestamps, NoWindowScale bool

	CongestionControl CongestionControl
	ECN               ECN
	MaxBurst          int // segments sent back to back before the rest of the window is paced over the round trip; 0: no limit

	MaxRTO time.Duration // longest retransmission time-out; RFC 6298 (2.5): at least 60 s

	SynTimeout  time.Duration // R2 for SYN and SYN-ACK; RFC 9293 MUST-23: at least 3 minutes
	DataTimeout time.Duration // R2 for data; SHLD-11: at least 100 s
	UserTimeout time.Duration // time without acknowledgement of data that ends the connection; 0: none

	DelayedAck time.Duration // longest delay of an ACK; RFC 9293 MUST-40: below 0.5 s
	TimeWait   time.Duration // twice the MSL
	FinWait2   time.Duration // time to wait for the peer's FIN after ours is acknowledged; 0: forever

	KeepAliveIdle     time.Duration // idle time before the first probe; 0: no keep-alive (MUST-25)
	KeepAliveInterval time.Duration
	KeepAliveCount    int // unanswered probes that end the connection

	RTT *histogram.Histogram // counts the measured round-trip times; nil: they are not counted
}

// DefaultConfig returns a configuration that suits most networks.
func DefaultConfig() Config {
	return Config{
		RcvWindow:         2 << 20,
		MaxHeld:           1024,
		ECN:               AcceptECN,
		MaxBurst:          90, // two packets of 64 KiB at an MTU of 1500
		MaxRTO:            60 * time.Second,
		SynTimeout:        180 * time.Second,
		DataTimeout:       120 * time.Second,
		DelayedAck:        40 * time.Millisecond,
		TimeWait:          10 * time.Second,
		FinWait2:          60 * time.Second,
		KeepAliveInterval: 75 * time.Second,
		KeepAliveCount:    9,
	}
}

func (c *Config) requestsECN() bool { return c.ECN == RequestECN || c.CongestionControl == DCTCP }

func (c *Config) acceptsECN() bool { return c.ECN != NoECN || c.requestsECN() }

// withDefaults returns c with every field in its legal range, so that the state machine need not check.
func (c Config) withDefaults() Config {
	d := DefaultConfig()
	or := func(v *int, def int) {
		if *v <= 0 {
			*v = def
		}
	}
	orTime := func(v *time.Duration, def time.Duration) {
		if *v <= 0 {
			*v = def
		}
	}
	or(&c.RcvWindow, d.RcvWindow)
	c.RcvWindow = min(c.RcvWindow, 65535<<maxWScale)
	or(&c.MaxHeld, d.MaxHeld)
	or(&c.KeepAliveCount, d.KeepAliveCount)
	orTime(&c.MaxRTO, d.MaxRTO)
	orTime(&c.SynTimeout, d.SynTimeout)
	orTime(&c.DataTimeout, d.DataTimeout)
	orTime(&c.DelayedAck, d.DelayedAck)
	c.DelayedAck = min(c.DelayedAck, 499*time.Millisecond)
	orTime(&c.TimeWait, d.TimeWait)
	orTime(&c.KeepAliveInterval, d.KeepAliveInterval)
	return c
}
