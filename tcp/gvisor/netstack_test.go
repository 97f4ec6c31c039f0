package gvisor

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	gtcp "gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/tcp/peertest"
)

// virtualClock is netstack's clock, and ours. It stands still until run moves it,
// so that a run is the same however loaded the machine is.
type virtualClock struct {
	mu     sync.Mutex
	now    clock.Time
	timers impair.Queue[armed]
}

// armed is one arming of a timer, which a later Stop or Reset makes void.
type armed struct {
	t     *virtualTimer
	count int
}

type virtualTimer struct {
	c     *virtualClock
	f     func()
	count int // of armings
	live  bool
}

func (c *virtualClock) Now() time.Time { return time.Unix(0, int64(c.at())) }

func (c *virtualClock) NowMonotonic() (m tcpip.MonotonicTime) { return m.Add(time.Duration(c.at())) }

func (c *virtualClock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	t := &virtualTimer{c: c, f: f}
	t.Reset(d)
	return t
}

func (t *virtualTimer) Reset(d time.Duration) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.count++
	t.live = true
	t.c.timers.Push(t.c.now.Add(max(d, 0)), armed{t, t.count})
}

func (t *virtualTimer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	was := t.live
	t.live = false
	return was
}

func (c *virtualClock) at() clock.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// run moves the clock to the next timer that is due by until, and calls it; else
// to until.
func (c *virtualClock) run(until clock.Time) (called bool) {
	c.mu.Lock()
	for {
		at := c.timers.Deadline()
		a, ok := c.timers.Pop(until)
		if !ok {
			c.now = max(c.now, until)
			c.mu.Unlock()
			return false
		}
		if !a.t.live || a.count != a.t.count {
			continue
		}
		a.t.live = false
		c.now = max(c.now, at)
		c.mu.Unlock()
		a.t.f()
		return true
	}
}

// locked is a source of pseudo-random numbers for several goroutines.
type locked struct {
	mu sync.Mutex
	r  *rand.Rand
}

func (l *locked) Seed(int64) {}

func (l *locked) Int63() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.Int63()
}

func (l *locked) Read(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.Read(b)
}

// netstack is gVisor's end: the stack, its link and its application. It is a Wire.
type netstack struct {
	*virtualClock
	s     *stack.Stack
	ch    *channel.Endpoint
	proto tcpip.NetworkProtocolNumber
	sc    *scenario

	listener, ep  tcpip.Endpoint
	open, shut    bool
	eof, finished bool
	sent, got     int
	flight        flight
	input         bool       // something has happened since settle
	done          chan error // the application's verdict
}

// flight is what netstack counts of what it has sent.
type flight struct {
	mu          sync.Mutex
	unacked     int // bytes without an ACK
	outstanding int // segments that it thinks are in flight
}

func (f *flight) probe(s *gtcp.TCPEndpointState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unacked, f.outstanding = int(s.Sender.SndUna.Size(s.Sender.SndNxt)), s.Sender.Outstanding
}

func (n *netstack) Send(b []byte) {
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(append([]byte(nil), b...))})
	n.ch.InjectInbound(n.proto, p)
	p.DecRef()
	n.input = true
}

func (n *netstack) Recv(d time.Duration) []byte {
	until := n.at().Add(max(d, 0))
	for {
		if n.input {
			n.input = false
			n.settle()
		}
		if p := n.ch.Read(); p != nil {
			v := p.ToView()
			b := append([]byte(nil), v.AsSlice()...)
			v.Release()
			p.DecRef()
			return b
		}
		if n.input = n.run(until); !n.input {
			return nil
		}
	}
}

// settle lets netstack and its application act until neither has anything left
// to do at this time. At all other times the goroutines that process segments are
// paused, so that it does not depend on their luck which segments they take
// together.
func (n *netstack) settle() {
	for {
		n.s.Resume()
		n.s.Pause() // waits until they are done with all segments
		if n.finished {
			return
		}
		acted, err := n.act()
		if err != nil {
			n.finished = true
			n.done <- err
			return
		}
		if n.finished {
			n.ep.Close()
			n.done <- nil
			continue
		}
		if !acted {
			return
		}
	}
}

// act is what the application can do now.
func (n *netstack) act() (acted bool, err error) {
	if n.ep == nil {
		ep, _, err := n.listener.Accept(nil)
		if err != nil {
			return false, wouldBlock(err)
		}
		n.ep = ep
	}
	if !n.open {
		if n.ep.Readiness(waiter.WritableEvents|waiter.EventErr|waiter.EventHUp) == 0 {
			return false, nil
		}
		if err := n.ep.LastError(); err != nil {
			return false, fmt.Errorf("connect: %v", err)
		}
		n.open = true
	}
	var b bytes.Buffer
	for !n.eof {
		b.Reset()
		r, err := n.ep.Read(&limited{&b, 64 << 10}, tcpip.ReadOptions{})
		if _, ok := err.(*tcpip.ErrClosedForReceive); ok {
			n.eof = true
			if n.got != n.sc.send {
				return true, fmt.Errorf("netstack got %d bytes of %d", n.got, n.sc.send)
			}
			acted = true
			break
		}
		if err != nil {
			if err := wouldBlock(err); err != nil {
				return acted, err
			}
			break
		}
		for i, v := range b.Bytes() {
			if v != peertest.ByteAt(n.got+i) {
				return true, fmt.Errorf("byte %d from us is wrong", n.got+i)
			}
		}
		n.got += r.Count
		acted = true
	}
	for n.sent < n.sc.recv {
		out := make([]byte, min(64<<10, n.sc.recv-n.sent))
		for i := range out {
			out[i] = peertest.ByteAt(n.sent + i)
		}
		k, err := n.ep.Write(bytes.NewReader(out), tcpip.WriteOptions{})
		if err != nil {
			if err := wouldBlock(err); err != nil {
				return acted, err
			}
			break
		}
		n.sent += int(k)
		acted = true
	}
	if n.sent == n.sc.recv && !n.shut && (n.sc.gClose || n.eof) {
		if err := n.ep.Shutdown(tcpip.ShutdownWrite); err != nil {
			return acted, fmt.Errorf("shutdown: %v", err)
		}
		n.shut, acted = true, true
	}
	n.finished = n.shut && n.eof
	return acted, nil
}

// limited takes n bytes at most.
type limited struct {
	b *bytes.Buffer
	n int
}

func (l *limited) Write(p []byte) (int, error) {
	k := min(len(p), l.n)
	l.n -= k
	l.b.Write(p[:k])
	if k < len(p) {
		return k, io.ErrShortWrite
	}
	return k, nil
}

func wouldBlock(err tcpip.Error) error {
	if _, ok := err.(*tcpip.ErrWouldBlock); ok {
		return nil
	}
	return errors.New(err.String())
}

// String is the state of netstack's connection.
func (n *netstack) String() string {
	st := n.s.Stats().TCP
	s := fmt.Sprintf("sent %d of %d, got %d of %d, %d segments in, %d out, %d retransmitted, %d fast, %d time-outs, %d checksum errors",
		n.sent, n.sc.recv, n.got, n.sc.send, st.ValidSegmentsReceived.Value(), st.SegmentsSent.Value(), st.Retransmits.Value(), st.FastRetransmit.Value(), st.Timeouts.Value(), st.ChecksumErrors.Value())
	if n.ep == nil {
		return s
	}
	n.flight.mu.Lock()
	defer n.flight.mu.Unlock()
	s += fmt.Sprintf(", %d bytes unacknowledged, %d segments outstanding", n.flight.unacked, n.flight.outstanding)
	var info tcpip.TCPInfoOption
	if err := n.ep.GetSockOpt(&info); err == nil {
		s += fmt.Sprintf(", state %v %+v", gtcp.EndpointState(n.ep.State()), info)
	}
	return s
}
