package dataplane

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// oneGoroutine skips a long simulation under the race detector, which is up to eighty times
// slower and cannot find races in one goroutine. make test runs the simulation without it.
func oneGoroutine(t *testing.T) {
	t.Helper()
	if testenv.Race {
		t.Skip("runs in one goroutine")
	}
}

// newPipe returns both ends of a Pipe, which the test closes.
func newPipe(t testing.TB, cfg link.PipeConfig) (a, b *link.Pipe) {
	t.Helper()
	a, b, err := link.NewPipe(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

// as returns the association of a stream, or nil if it is over TCP.
func (s *stream) as() *assoc {
	as, _ := s.lane.llp.(*assoc)
	return as
}

// request is what a test asks the worker to open.
func request(flow pkt.Flow, timeout time.Duration) *ConnectRequest {
	return &ConnectRequest{
		Local:   netip.AddrPortFrom(netip.AddrFrom16(flow.Local).Unmap(), flow.LocalPort),
		Remote:  netip.AddrPortFrom(netip.AddrFrom16(flow.Remote).Unmap(), flow.RemotePort),
		Timeout: timeout,
	}
}

func (w *worker) connect(id ConnID, flow pkt.Flow, hop Hop, timeout time.Duration) error {
	return w.connectTCP(id, request(flow, timeout), &hop)
}

func (w *worker) dialSCTP(t testing.TB, id ConnID, flow pkt.Flow, hop Hop, o SCTP, s session.Setup, most time.Duration) {
	t.Helper()
	r := request(flow, most)
	r.SCTP, r.Setup = &o, s
	if err := w.connectSCTP(id, r, &hop); err != nil {
		t.Fatal(err)
	}
}

func (w *worker) listenSCTP(t testing.TB, id ListenerID, local netip.AddrPort, o SCTP) {
	t.Helper()
	listen(t, w, id, &ListenRequest{Local: local, SCTP: &o})
}

func listen(t testing.TB, w *worker, id ListenerID, r *ListenRequest) {
	t.Helper()
	if err := w.listen(id, r); err != nil {
		t.Fatal(err)
	}
}

func (w *worker) answerSCTP(s *stream, set session.Setup, a Attachment) { w.answer(s.id, s, set, a) }

// surviveTurn is a turn as loop makes it, which a fault in a client's memory ends.
func (w *worker) surviveTurn() {
	defer w.survive()
	w.turn()
}

// newEngine makes an engine that is not started.
func newEngine(t testing.TB, cfg Config, queues []Queue, r Resolver) *Engine {
	t.Helper()
	e, err := New(cfg, queues, r)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// take passes a frame that the test made to the worker. It reports whether the worker holds it.
func (w *worker) take(f *link.Frame) bool {
	r := &rxFrame{Frame: f}
	w.frame(r)
	return r.kept
}

// further returns how many additional peer addresses the worker knows.
func (w *worker) further() int {
	n := 0
	for k := range w.lanes {
		if k.Tag != 0 {
			n++
		}
	}
	return n
}

// joinRequest asks for one more session between the endpoints of flow.
func joinRequest(flow pkt.Flow, timeout time.Duration) *ConnectRequest {
	r := request(flow, timeout)
	r.SCTP, r.Join = &SCTP{}, true
	return r
}

// dialTCP connects to addr by the kernel's TCP until the test ends.
func dialTCP(t testing.TB, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
