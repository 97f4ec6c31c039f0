package session

import (
	"testing"
	"unsafe"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// TestPoolMemory checks that few buffers of held messages are kept, and that none is much
// longer than its message, since Held counts bytes of messages.
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
	sizes := func() (free, used int) {
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
		if free, _ := sizes(); free > maxPooled || free != m.pooled || m.Held() != 0 {
			t.Errorf("%d bytes of free buffers, counted %d; held %d", free, m.pooled, m.Held())
		}
		for i := range n {
			msg(next+1+i, 1)
		}
		if _, used := sizes(); used > 4*m.Held()+8*n {
			t.Errorf("%d bytes of buffers for %d", used, m.Held())
		}
		msg(next, 1)
		next += n + 1
	}
}

// TestMemory checks that Memory counts all memory, and that Trim frees what is unused.
func TestMemory(t *testing.T) {
	if aheadSize != unsafe.Sizeof(ahead{}) {
		t.Fatalf("a place takes %d bytes", unsafe.Sizeof(ahead{}))
	}
	m := New(Config{}, 4)
	check := func(when string, least, most int) {
		t.Helper()
		n := m.Held() + m.pooled
		for _, s := range m.streams {
			if s != nil {
				n += aheadSize*len(s.ring) + 8*len(s.seen)
			}
		}
		if got := m.Memory(); got != n || got < least || got > most {
			t.Errorf("%s: Memory is %d, there are %d bytes; want %d to %d", when, got, n, least, most)
		}
	}
	msg := func(id uint16, ssn int, ppid uint32, b ...byte) {
		m.HandleMessage(id, ppid, true, append(be.AppendUint16(nil, uint16(ssn)), b...))
	}
	check("new", 0, 0)
	for id := range uint16(4) {
		msg(id, 0, ppidControl, 0, 1)
		if err := m.Accept(id, Setup{}); err != nil {
			t.Fatal(err)
		}
		if err := m.Attach(id, nullSink{}); err != nil {
			t.Fatal(err)
		}
		check("accepted", 0, aheadSize*2048*int(id)+20)
		msg(id, 2000, ppidSegment, 1, 2, 3)
		check("ahead", aheadSize*2048, aheadSize*2048*int(id+1)+20)
	}
	m.Trim()
	check("trimmed in use", aheadSize*4*2048, 1<<20)
	for i := range 1999 {
		msg(0, i+1, ppidSegment, 1)
	}
	m.Trim()
	check("one in order", aheadSize*3*2048, aheadSize*3*2048+15)
	msg(1, 1, 99, 0) // a violation: what is held is of no use, but that it came
	check("one ended", aheadSize*2*2048, aheadSize*2*2048+8*64*2+20)
	for m.PollControl(new(Control)) {
	}
	m.HandleAcked(1, true)
	m.HandleAcked(1, true)
	msg(1, 0, ppidControl, 0, 1) // it starts over
	check("begun anew", aheadSize*2*2048, aheadSize*2*2048+20)
	m.Reset(4)
	m.Trim()
	check("reset", 0, 0)
}

// nullSink takes segments in order alone.
type nullSink struct{}

func (nullSink) Waits([]byte) bool                   { return false }
func (nullSink) HandleULPDU([]byte) *term.Error      { return nil }
func (nullSink) HandleEarly(serial.Num, []byte) bool { return false }
func (nullSink) DeliverEarly(serial.Num) *term.Error { return nil }
