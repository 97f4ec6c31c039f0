package session

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// TestPoolMemory: buffers of messages that were held are few, and one is not much longer
// than the message that it holds: it is octets of messages that Held counts.
func TestPoolMemory(t *testing.T) {
	const long, n = 1400, 2000
	m := New(Config{}, 1)
	m.HandleMessage(0, ppidControl, true, []byte{0, 0, 0, 1})
	if err := m.Accept(0, Setup{}); err != nil {
		t.Fatal(err)
	}
	if err := m.Attach(0, nullSink{}); err != nil {
		t.Fatal(err)
	}
	msg := func(ssn, size int) {
		m.HandleMessage(0, ppidSegment, true, append(be.AppendUint16(nil, uint16(ssn)), make([]byte, size)...))
	}
	octets := func() (free, used int) {
		for _, b := range m.pool {
			free += cap(b)
		}
		for _, a := range m.streams[0].ring {
			used += cap(a.b)
		}
		return free, used
	}
	next := 1
	for range 3 { // long ones are held and judged, then short ones are held
		for i := range n {
			msg(next+1+i, long)
		}
		msg(next, long)
		next += n + 1
		if free, _ := octets(); free > maxPooled || free != m.pooled || m.Held() != 0 {
			t.Errorf("%d octets of free buffers, counted %d; held %d", free, m.pooled, m.Held())
		}
		for i := range n {
			msg(next+1+i, 1)
		}
		if _, used := octets(); used > 4*m.Held()+8*n {
			t.Errorf("%d octets of buffers for %d", used, m.Held())
		}
		msg(next, 1)
		next += n + 1
	}
}

// nullSink takes segments in order alone.
type nullSink struct{}

func (nullSink) HandleULPDU([]byte) *term.Error      { return nil }
func (nullSink) HandleEarly(serial.Num, []byte) bool { return false }
func (nullSink) DeliverEarly(serial.Num) *term.Error { return nil }
