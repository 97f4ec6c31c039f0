package dataplane

import (
	"cmp"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/tcp"
)

// PollPolicy determines what an idle worker does.
type PollPolicy uint8

const (
	// Adaptive spins for Config.Spin after the last work, then sleeps until a
	// frame, a doorbell, a command or a timer.
	Adaptive PollPolicy = iota
	// Busy spins forever, for the lowest latency at the cost of one core per worker.
	Busy
)

// Config configures an engine. The zero value of each field means its default.
type Config struct {
	// OnEvent is called for every event, in order, from a single goroutine. It must not
	// block for long.
	OnEvent func(Event)
	Poll    PollPolicy
	// Spin is the time for which an adaptive worker spins after work, and up to four times as
	// long while more work comes soon after; default 50 µs. If it is negative, it never spins.
	Spin time.Duration
	// TCP is the configuration of every connection; default tcp.DefaultConfig(). If MaxHeld
	// is 0, the worker's memory is the only limit.
	TCP  *tcp.Config
	SCTP SCTPConfig
	// StreamBuffer bounds the streaming-mode bytes of a connection that the control plane
	// has not consumed; default 64 KiB.
	StreamBuffer int
	// SendBuffer is the number of streaming-mode bytes that should be queued for sending:
	// EventWritable reports that at most half as many are left. Default StreamBuffer.
	SendBuffer int
	// MaxConns bounds the connections of each worker; default 16384.
	MaxConns int
	// Inline lets an application drive worker 0 by calling Turn. The engine's own goroutine
	// takes over only while the application does not call it.
	Inline bool
	// Fragments are the sources of IP fragments in addition to the queues, by the name of the
	// device. The engine closes them.
	Fragments map[string]FragmentSource
	// Now is the workers' clock; default clock.Now.
	Now func() clock.Time
}

// fill replaces each zero by its default.
func (c Config) fill() Config {
	if c.OnEvent == nil {
		c.OnEvent = func(Event) {}
	}
	if c.Now == nil {
		c.Now = clock.Now
	}
	if c.TCP == nil {
		t := tcp.DefaultConfig()
		c.TCP = &t
	}
	c.Spin = cmp.Or(c.Spin, 50*time.Microsecond)
	c.StreamBuffer = cmp.Or(c.StreamBuffer, 64<<10)
	c.SendBuffer = cmp.Or(c.SendBuffer, c.StreamBuffer)
	c.MaxConns = cmp.Or(c.MaxConns, 16384)
	c.SCTP.Idle = cmp.Or(c.SCTP.Idle, time.Minute)
	c.SCTP.PerPeer = cmp.Or(c.SCTP.PerPeer, 1024)
	c.SCTP.Memory = cmp.Or(c.SCTP.Memory, max(256<<20, 4*c.TCP.RcvWindow))
	return c
}

// SCTPConfig is the configuration of all associations.
type SCTPConfig struct {
	// RTOMin is RTO.Min of RFC 9260; default 1 s. It is the least time to recover from the
	// loss of the last message of an exchange.
	RTOMin time.Duration
	// Idle is how long a peer may keep an association that it opened without a session;
	// default a minute, negative means forever.
	Idle time.Duration
	// PerPeer bounds the associations without an accepted session between one address, or one
	// IPv6 /64, and one listener, per worker; default 1024. Before its first accepted session
	// each holds at most 64 KiB of data of its peer.
	PerPeer int
	// Memory bounds the out-of-order data, in bytes, that the associations of one worker
	// hold; default 256 MiB, or four receive windows if that is more. When it is exceeded,
	// the associations that hold the most are ended, those without an accepted session first,
	// until an eighth is free.
	Memory int
}

// Queue is a NIC queue, to be served by a worker.
type Queue struct {
	Link link.Link
	// Device is the name of the interface. A connection stays with its device; its frames may
	// arrive on any device.
	Device string
	CPU    int // CPU to pin the worker to, or -1; not used with Config.Inline
	// PartialChecksums accepts TCP segments whose checksum field contains only the sum of the
	// pseudo-header. Kernels of this host and of its guests send such segments over virtual
	// links. From a physical link they would be corrupt.
	PartialChecksums bool
}
