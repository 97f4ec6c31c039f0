package session

import (
	"bytes"
	"fmt"
	"math/bits"
	"runtime"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
)

// record is a Sink that notes what it is given.
type record struct {
	got   []string
	early map[serial.Num]string
	place bool
	fail  string // segment that is a violation
	wait  string // segment that waits
}

func (r *record) Waits(b []byte) bool { return r.wait != "" && string(b) == r.wait }

func (r *record) HandleULPDU(b []byte) *term.Error {
	r.got = append(r.got, string(b))
	if r.fail != "" && string(b) == r.fail {
		return term.ErrMPALocal
	}
	return nil
}

func (r *record) HandleEarly(key serial.Num, b []byte) bool {
	if !r.place {
		return false
	}
	if r.early == nil {
		r.early = map[serial.Num]string{}
	}
	r.early[key] = string(b)
	return true
}

func (r *record) DeliverEarly(key serial.Num) *term.Error {
	s, ok := r.early[key]
	if !ok {
		panic("key was never placed")
	}
	delete(r.early, key)
	return r.HandleULPDU([]byte(s))
}

// bench is a Mux and the hand of its peer, on stream 3.
type bench struct {
	t      *testing.T
	m      *Mux
	p      Profile
	ssn    uint16 // of the peer's next message
	sink   *record
	events []Event
	sent   []Control
}

const sid = 3

func newBench(t *testing.T, cfg Config) *bench {
	return &bench{t: t, m: New(cfg, 8), p: cfg.Profile, ssn: cfg.Profile.firstSSN(), sink: &record{}}
}

func (b *bench) drain() {
	var e Event
	var c Control
	for b.m.PollEvent(&e) {
		b.events = append(b.events, e)
	}
	for b.m.PollControl(&c) {
		b.sent = append(b.sent, c)
	}
}

// ack acknowledges all control messages.
func (b *bench) ack() {
	for b.drain(); ; b.drain() {
		s := b.m.stream(sid)
		if s.ctlUnacked == 0 {
			break
		}
		b.m.HandleAcked(sid, true)
	}
}

func message(ssn, code uint16, private string) []byte {
	return append([]byte{byte(ssn >> 8), byte(ssn), byte(code >> 8), byte(code)}, private...)
}

// control sends the peer's next message, a control message.
func (b *bench) control(code uint16, private string) {
	b.m.HandleMessage(sid, b.p.Control(), true, message(b.ssn, code, private))
	b.ssn++
	b.drain()
}

func (b *bench) segment(s string) {
	b.m.HandleMessage(sid, b.p.Segment(), true, append([]byte{byte(b.ssn >> 8), byte(b.ssn)}, s...))
	b.ssn++
	b.drain()
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
	b.drain()
}

// codes are the function codes that we sent.
func (b *bench) codes() (out []uint16) {
	for _, c := range b.sent {
		out = append(out, be.Uint16(c.Data[2:]))
	}
	b.sent = nil
	return out
}

func (b *bench) kinds() (out []EventKind) {
	for _, e := range b.events {
		out = append(out, e.Kind)
	}
	b.events = nil
	return out
}

// in takes the bench to a state.
func (b *bench) in(s string) *bench {
	b.t.Helper()
	i, a := uint16(1), uint16(2)
	if b.p == Draft {
		i, a = 2, 3
	}
	switch s {
	case "idle":
	case "negotiating":
		b.control(1, "n")
	case "initiating":
		b.must(b.m.Initiate(sid, Setup{}))
	case "initiating+":
		b.must(b.m.Initiate(sid, Setup{Enhanced: &mpa.EnhancedData{}}))
	case "requested":
		b.control(i, "")
	case "requested+":
		b.control(5, "\x00\x00\x00\x00")
	case "passive":
		b.in("requested")
		b.must(b.m.Accept(sid, Setup{}))
		b.must(b.m.Attach(sid, b.sink))
	case "active":
		b.in("initiating")
		b.control(a, "")
		b.must(b.m.Attach(sid, b.sink))
	case "ended":
		b.in("passive")
		b.must(b.m.Terminate(sid))
	default:
		b.t.Fatal(s)
	}
	b.ack()
	b.events, b.sent = nil, nil
	return b
}

// again checks that the stream is free: the peer may begin another session.
func (b *bench) again() {
	b.t.Helper()
	if s := b.m.State(sid); s != Idle {
		b.t.Fatalf("state %v, want idle", s)
	}
	b.ssn = b.p.firstSSN()
	if b.in("requested"); b.m.State(sid) != Requested {
		b.t.Fatalf("an Initiate leads to state %v", b.m.State(sid))
	}
}

// TestFunctionCodes checks the SCTP function codes: those of the registry (RFC 6580 section
// 3.5 and RFC 6581 section 11) and those of the draft. All others are unknown, including
// the experimental one.
func TestFunctionCodes(t *testing.T) {
	type known struct {
		fn       function
		enhanced bool
	}
	for profile, registry := range map[Profile]map[uint16]known{
		RFC5043: {
			0x0001: {fnInitiate, false}, 0x0002: {fnAccept, false}, 0x0003: {fnReject, false}, 0x0004: {fnTerminate, false},
			0x0005: {fnInitiate, true}, 0x0006: {fnAccept, true}, 0x0007: {fnReject, true},
		},
		Draft: {0x0001: {fnNegotiate, false}, 0x0002: {fnInitiate, false}, 0x0003: {fnAccept, false}, 0x0004: {fnTerminate, false}},
	} {
		for code := range 1 << 16 {
			fn, enhanced, ok := profile.decodeFunction(uint16(code))
			want, isKnown := registry[uint16(code)]
			if ok != isKnown || ok && (fn != want.fn || enhanced != want.enhanced) {
				t.Errorf("%v: code %#04x is %v, enhanced %v, %v; want %v, %v", profile, code, fn, enhanced, ok, want, isKnown)
			}
			if ok && profile.code(fn, enhanced) != uint16(code) {
				t.Errorf("%v: sent as %#04x; want %#04x", profile, profile.code(fn, enhanced), code)
			}
		}
	}
}

// TestSequences gives every message in every state, with its outcome: an error of
// this package, or the state that follows. More than sixty are illegal.
func TestSequences(t *testing.T) {
	type row struct {
		name    string
		profile Profile
		send    func(b *bench)
		out     map[string]any // by state before
	}
	ctl := func(code uint16, private string) func(*bench) {
		return func(b *bench) { b.control(code, private) }
	}
	raw := func(ppid uint32, u bool, m []byte) func(*bench) {
		return func(b *bench) {
			c := bytes.Clone(m)
			if len(c) >= 2 {
				be.PutUint16(c, b.ssn)
				b.ssn++
			}
			b.m.HandleMessage(sid, ppid, u, c)
			b.drain()
		}
	}
	all := func(v any, but ...any) map[string]any {
		m := map[string]any{"idle": v, "initiating": v, "requested": v, "passive": v, "active": v}
		for i := 0; i < len(but); i += 2 {
			m[but[i].(string)] = but[i+1]
		}
		return m
	}
	long := string(make([]byte, 513))
	rows := []row{
		{"Initiate", RFC5043, ctl(1, ""), all(ErrAgain, "idle", Requested, "initiating", ErrCollision, "initiating+", ErrCollision, "ended", Ended)},
		{"Accept", RFC5043, ctl(2, "x"), all(ErrAgain, "idle", ErrNoInitiate, "initiating", Open, "initiating+", ErrKind, "ended", Ended)},
		{"Reject", RFC5043, ctl(3, "x"), all(ErrAgain, "idle", ErrNoInitiate, "initiating", Idle, "initiating+", Idle, "ended", Ended)},
		{"Terminate", RFC5043, ctl(4, ""), all(Ended, "idle", Idle, "initiating", Idle, "initiating+", Idle, "ended", Idle)},
		{"enhanced Initiate", RFC5043, ctl(5, "\x80\x01\x40\x01pd"), all(ErrAgain, "idle", Requested, "initiating", ErrCollision)},
		{"enhanced Accept", RFC5043, ctl(6, "\x00\x01\x00\x01"), all(ErrAgain, "idle", ErrNoInitiate, "initiating", ErrKind, "initiating+", Open)},
		{"enhanced Reject", RFC5043, ctl(7, "\x00\x01\x00\x01"), all(ErrAgain, "idle", ErrNoInitiate, "initiating", ErrKind, "initiating+", Idle)},
		{"enhanced Initiate without data", RFC5043, ctl(5, "abc"), all(ErrShort)},
		{"function 0", RFC5043, ctl(0, ""), all(ErrFunction)},
		{"function 8", RFC5043, ctl(8, ""), all(ErrFunction)},
		{"function 0xffff", RFC5043, ctl(0xffff, ""), all(ErrFunction)},
		{"Terminate with private data", RFC5043, ctl(4, "x"), all(ErrTermData)},
		{"513 bytes of private data", RFC5043, ctl(1, long), all(ErrPrivate)},
		{"segment", RFC5043, func(b *bench) { b.segment("s") }, all(Open, "idle", ErrNoSession, "initiating", ErrEarlyData, "requested", ErrEarlyData, "ended", Ended)},
		{"ordered segment", RFC5043, raw(16, false, []byte("__s")), all(ErrOrdered)},
		{"ordered control", RFC5043, raw(17, false, message(0, 1, "")), all(ErrOrdered)},
		{"ordered Terminate", RFC5043, raw(17, false, message(0, 4, "")), all(ErrOrdered)},
		{"PPID 0", RFC5043, raw(0, true, []byte("__s")), all(ErrPPID)},
		{"PPID of the draft's segments", RFC5043, raw(1, true, []byte("__s")), all(ErrProfile)},
		{"PPID of the draft's control", RFC5043, raw(2, true, message(0, 2, "")), all(ErrProfile)},
		{"one byte", RFC5043, raw(16, true, []byte{0}), all(ErrShort)},
		{"control of three bytes", RFC5043, raw(17, true, []byte{0, 0, 0}), all(ErrShort)},

		{"Negotiate", Draft, ctl(1, "n"), all(ErrNegotiate, "idle", Negotiating, "initiating", Initiating, "negotiating", Negotiating)},
		{"Initiate", Draft, ctl(2, ""), all(ErrAgain, "idle", Requested, "initiating", Open, "negotiating", Requested)},
		{"Accept", Draft, ctl(3, ""), all(ErrAgain, "idle", ErrNoInitiate, "initiating", Open, "negotiating", ErrNoInitiate)},
		{"Terminate", Draft, ctl(4, ""), all(Ended, "idle", Idle, "initiating", Idle, "negotiating", Ended)},
		{"Terminate with private data", Draft, ctl(4, "x"), all(ErrTermData)},
		{"function 5", Draft, ctl(5, "\x00\x00\x00\x00"), all(ErrFunction, "negotiating", ErrFunction)},
		{"function 0", Draft, ctl(0, ""), all(ErrFunction)},
		{"segment", Draft, func(b *bench) { b.segment("s") }, all(Open, "idle", ErrNoSession, "initiating", ErrEarlyData, "requested", ErrEarlyData, "negotiating", ErrNoSession)},
		{"PPID of the RFC's control", Draft, raw(17, true, message(0, 1, "")), all(ErrProfile)},
		{"PPID of the RFC's segments", Draft, raw(16, true, []byte("__s")), all(ErrProfile)},
		{"ordered", Draft, raw(1, false, []byte("__s")), all(ErrOrdered)},
	}
	illegal, legal := 0, 0
	for _, r := range rows {
		for _, st := range slices.Sorted(mapsKeys(r.out)) {
			t.Run(fmt.Sprintf("%v/%s in %s", r.profile, r.name, st), func(t *testing.T) {
				b := newBench(t, Config{Profile: r.profile}).in(st)
				r.send(b)
				switch want := r.out[st].(type) {
				case State:
					legal++
					b.ack()
					if slices.Contains(b.kinds(), EventFailed) {
						t.Fatal("a legal message is taken for a violation")
					}
					got := b.m.State(sid)
					if want == Ended && got == Idle && st != "ended" {
						got = Ended // all is acknowledged: the stream is free already
					}
					if got != want {
						t.Fatalf("state %v, want %v", got, want)
					}
					if want == Idle {
						b.again()
					}
				case *Error:
					illegal++
					i := slices.IndexFunc(b.events, func(e Event) bool { return e.Kind == EventFailed })
					if i < 0 || b.events[i].Err != error(want) {
						t.Fatalf("events %v, want %v", b.events, want)
					}
					b.ack()
					if c := b.codes(); len(c) == 0 || c[len(c)-1] != 4 {
						t.Fatalf("sent functions %v, want a Terminate last", c)
					}
					if s := b.m.State(sid); s != Ended && s != Idle {
						t.Fatalf("state %v", s)
					}
					if b.m.pending != 0 || b.m.Held() != 0 {
						t.Fatalf("pending %d, held %d", b.m.pending, b.m.Held())
					}
					if st != "idle" && r.name != "ordered Terminate" {
						b.control(4, "")
					}
					b.again()
				}
			})
		}
	}
	t.Logf("%d legal, %d illegal", legal, illegal)
	if illegal < 60 {
		t.Errorf("only %d illegal sequences", illegal)
	}
}

func mapsKeys(m map[string]any) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// TestNumbers checks illegal DDP-SSNs in an open session, and legal ones in any order.
func TestNumbers(t *testing.T) {
	for _, c := range []struct {
		name string
		ssns []int // offsets from the first segment's
		err  error
	}{
		{"in order", []int{0, 1, 2}, nil},
		{"backwards", []int{3, 2, 1, 0}, nil},
		{"the same twice, ahead", []int{2, 2}, ErrSSNTwice},
		{"the same twice, in order", []int{0, 0}, ErrSSN},
		{"an old one", []int{0, 1, -1}, ErrSSN},
		{"just inside the window", []int{4096}, nil},
		{"just outside", []int{4097}, ErrSSN},
		{"half the space away", []int{32768}, ErrSSN},
	} {
		for _, place := range []bool{false, true} {
			b := newBench(t, Config{}).in("passive")
			b.sink.place = place
			base := int(b.ssn)
			for _, o := range c.ssns {
				b.ssn = uint16(base + o)
				b.segment(fmt.Sprint(o))
			}
			var err error
			for _, e := range b.events {
				if e.Kind == EventFailed {
					err = e.Err
				}
			}
			if err != c.err {
				t.Errorf("%s: %v, want %v", c.name, err, c.err)
			}
			if c.err == nil && c.name == "backwards" && !slices.Equal(b.sink.got, []string{"0", "1", "2", "3"}) {
				t.Errorf("%s: got %v", c.name, b.sink.got)
			}
			if place && c.name == "backwards" && (b.m.Stats().Early != 3 || b.m.Held() != 0) {
				t.Errorf("placed early: %+v", b.m.Stats())
			}
		}
	}
}

// TestWrap checks that DDP-SSNs wrap from 65535 to 0.
func TestWrap(t *testing.T) {
	for _, p := range []Profile{RFC5043, Draft} {
		b := newBench(t, Config{Profile: p}).in("passive")
		for i := 0; i < 140000; i += 2 {
			s := b.ssn
			b.ssn = s + 1
			b.segment("b")
			b.ssn = s
			b.segment("a")
			b.ssn = s + 2
			if len(b.sink.got) != 2 || b.sink.got[0] != "a" {
				t.Fatalf("at %d: %v", i, b.sink.got)
			}
			b.sink.got = b.sink.got[:0]
		}
	}
}

// TestSetup follows the numbers, codes and data of both ways to a session.
func TestSetup(t *testing.T) {
	b := newBench(t, Config{})
	b.must(b.m.Initiate(sid, Setup{Private: []byte("hello"), Enhanced: &mpa.EnhancedData{IRD: 5, ORD: 9, P2P: true, RTR: 6}}))
	want := Control{sid, 17, append([]byte{0, 0, 0, 5, 0x80, 5, 0xc0, 9}, "hello"...)}
	if len(b.sent) != 1 || b.sent[0].PPID != want.PPID || !bytes.Equal(b.sent[0].Data, want.Data) {
		t.Fatalf("sent %+v, want %+v", b.sent, want)
	}
	if b.m.CanSend(sid) {
		t.Error("may send before an answer")
	}
	b.segmentAt(1, "early") // overtakes the Accept
	b.control(6, "\x80\x03\x80\x04bye")
	e := b.events[0]
	if e.Kind != EventOpen || string(e.Setup.Private) != "bye" || *e.Setup.Enhanced != (mpa.EnhancedData{IRD: 3, ORD: 4, P2P: true, RTR: 2}) {
		t.Fatalf("event %+v %+v", e, e.Setup)
	}
	if len(b.sink.got) != 0 || b.m.Held() == 0 {
		t.Error("the segment did not wait for its sink")
	}
	b.must(b.m.Attach(sid, b.sink))
	if !slices.Equal(b.sink.got, []string{"early"}) || b.m.Held() != 0 || !b.m.CanSend(sid) {
		t.Errorf("got %v", b.sink.got)
	}
	var h [2]byte
	if b.m.Begin(sid, h[:]); be.Uint16(h[:]) != 1 {
		t.Errorf("DDP-SSN %d", be.Uint16(h[:]))
	}
	b.sent, b.events = nil, nil
	b.must(b.m.Terminate(sid))
	if len(b.sent) != 0 {
		t.Fatal("the Terminate may overtake the Initiate")
	}
	b.m.HandleAcked(sid, true)
	b.drain()
	if len(b.sent) != 1 || !bytes.Equal(b.sent[0].Data, []byte{0, 2, 0, 4}) {
		t.Fatalf("sent %+v", b.sent)
	}
	// The stream is free when ours is acknowledged and the peer's last has come.
	b.ssn = 3
	b.control(4, "")
	b.m.HandleAcked(sid, true)
	b.segmentAt(2, "late")
	if b.m.State(sid) != Ended {
		t.Fatal("free too early")
	}
	b.m.HandleAcked(sid, false)
	b.drain()
	if b.m.State(sid) != Idle || !slices.Equal(b.kinds(), []EventKind{EventIdle}) {
		t.Fatal(b.m.State(sid))
	}
	b.must(b.m.Initiate(sid, Setup{}))
	if !bytes.Equal(b.sent[1].Data, []byte{0, 0, 0, 1}) {
		t.Errorf("the next session begins with %x", b.sent[1].Data)
	}
}

func (b *bench) segmentAt(ssn uint16, s string) {
	b.ssn = ssn
	b.segment(s)
	b.ssn = 0
}

// TestDraftSetup checks the set-up of the draft: numbers begin at 1, codes differ, and
// both sides may be active.
func TestDraftSetup(t *testing.T) {
	b := newBench(t, Config{Profile: Draft})
	b.control(1, "offer")
	b.must(b.m.Initiate(sid, Setup{Private: []byte("i")}))
	b.ack()
	b.control(2, "j")
	if b.m.State(sid) != Open {
		t.Fatal(b.m.State(sid))
	}
	if len(b.sent) != 1 || b.sent[0].PPID != 2 || !bytes.Equal(b.sent[0].Data, []byte{0, 1, 0, 2, 'i'}) {
		t.Errorf("sent %+v", b.sent)
	}
	if !slices.Equal(b.kinds(), []EventKind{EventNegotiate, EventOpen}) {
		t.Error("events")
	}
	// A negotiation that comes to nothing.
	n := newBench(t, Config{Profile: Draft}).in("negotiating")
	n.must(n.m.Terminate(sid))
	n.ack()
	n.control(4, "")
	if n.m.State(sid) != Idle {
		t.Error(n.m.State(sid))
	}
	// A refusal is a Terminate.
	r := newBench(t, Config{Profile: Draft}).in("requested")
	r.must(r.m.Reject(sid, Setup{}))
	if c := r.codes(); !slices.Equal(c, []uint16{4}) {
		t.Errorf("sent %v", c)
	}
}

// TestSessionRefusals checks the ULP's Reject, and the limit of waiting requests (6.3,
// 6.4).
func TestSessionRefusals(t *testing.T) {
	b := newBench(t, Config{Pending: 2}).in("requested+")
	b.must(b.m.Reject(sid, Setup{Private: []byte("no"), Enhanced: &mpa.EnhancedData{RTR: 1, P2P: true}}))
	if !bytes.Equal(b.sent[0].Data, []byte{0, 0, 0, 7, 0xc0, 0, 0, 0, 'n', 'o'}) {
		t.Errorf("sent %x", b.sent[0].Data)
	}
	b.sent = nil
	for i := range uint16(4) {
		b.m.HandleMessage(4+i, 17, true, message(0, 1, ""))
	}
	b.drain()
	if len(b.sent) != 2 || b.sent[0].Stream != 6 || b.sent[0].Data[3] != 4 || b.m.Stats().Rejected != 3 {
		t.Errorf("sent %+v, %+v", b.sent, b.m.Stats())
	}
	for id := range uint16(2) { // the refused ones
		b.m.HandleAcked(6+id, true)
		if !b.m.Free(6 + id) {
			t.Errorf("stream %d is not free: %v", 6+id, b.m.State(6+id))
		}
	}
	// A refusal tells who refused.
	for code, byULP := range map[uint16]bool{3: true, 4: false} {
		c := newBench(t, Config{}).in("initiating")
		c.control(code, "")
		if e := c.events[0]; e.Kind != EventRejected || (e.Setup != nil) != byULP {
			t.Errorf("%d: %+v", code, e)
		}
	}
	// An Initiate that was abandoned.
	d := newBench(t, Config{}).in("initiating")
	d.must(d.m.Terminate(sid))
	d.control(2, "")
	if c := d.codes(); !slices.Equal(c, []uint16{4}) || len(d.kinds()) != 0 {
		t.Errorf("sent %v", c)
	}
	// RFC 5043 alone.
	e := newBench(t, Config{NoEnhanced: true})
	e.control(5, "\x00\x00\x00\x00")
	if e.events[0].Err != error(ErrEnhanced) {
		t.Error(e.events)
	}
}

// TestCalls checks which calls fail in which state.
func TestCalls(t *testing.T) {
	for _, c := range []struct {
		state string
		call  func(m *Mux) error
		want  error
	}{
		{"idle", func(m *Mux) error { return m.Accept(sid, Setup{}) }, ErrState},
		{"idle", func(m *Mux) error { return m.Reject(sid, Setup{}) }, ErrState},
		{"idle", func(m *Mux) error { return m.Terminate(sid) }, ErrState},
		{"idle", func(m *Mux) error { return m.Attach(sid, nil) }, ErrState},
		{"idle", func(m *Mux) error { return m.Initiate(8, Setup{}) }, ErrStream},
		{"idle", func(m *Mux) error { return m.Initiate(sid, Setup{Private: make([]byte, 513)}) }, ErrSize},
		{"idle", func(m *Mux) error { return m.Initiate(sid, Setup{Private: make([]byte, 512)}) }, nil},
		{"idle", func(m *Mux) error {
			return m.Initiate(sid, Setup{Private: make([]byte, 509), Enhanced: &mpa.EnhancedData{}})
		}, ErrSize},
		{"requested", func(m *Mux) error { return m.Initiate(sid, Setup{}) }, ErrState},
		{"requested", func(m *Mux) error { return m.Accept(sid, Setup{Enhanced: &mpa.EnhancedData{}}) }, ErrState},
		{"requested+", func(m *Mux) error { return m.Accept(sid, Setup{}) }, ErrState},
		{"requested", func(m *Mux) error { return m.Reject(sid, Setup{Private: make([]byte, 513)}) }, ErrSize},
		{"requested", func(m *Mux) error { return m.Reject(sid, Setup{Enhanced: &mpa.EnhancedData{}}) }, ErrState},
		{"requested+", func(m *Mux) error { return m.Reject(sid, Setup{}) }, nil},
		{"passive", func(m *Mux) error { return m.Accept(sid, Setup{}) }, ErrState},
		{"ended", func(m *Mux) error { return m.Initiate(sid, Setup{}) }, ErrState},
		{"ended", func(m *Mux) error { return m.Terminate(sid) }, ErrState},
	} {
		b := newBench(t, Config{}).in(c.state)
		if err := c.call(b.m); err != c.want {
			t.Errorf("in %s: %v, want %v", c.state, err, c.want)
		}
	}
}

// TestSinkError checks that the sink gets nothing more after it has found a violation,
// and that the session lasts until its owner ends it.
func TestSinkError(t *testing.T) {
	for _, early := range []bool{false, true} {
		b := newBench(t, Config{}).in("passive")
		b.sink.fail, b.sink.place = "bad", early
		first := b.ssn
		if early {
			b.ssn++
			b.segment("bad")
			b.ssn = first
		}
		b.segment("good")
		b.ssn = first + 1
		if !early {
			b.segment("bad")
		}
		b.ssn = first + 2
		b.segment("more")
		if !slices.Equal(b.sink.got, []string{"good", "bad"}) || b.m.State(sid) != Open {
			t.Errorf("early %v: got %v, %v", early, b.sink.got, b.m.State(sid))
		}
	}
}

// TestEndWhileHeld checks that the stream of a session that ends here is free again, if the peer's Terminate has come
// and waits after a segment that has no sink.
func TestEndWhileHeld(t *testing.T) {
	b := newBench(t, Config{}).in("requested")
	b.must(b.m.Accept(sid, Setup{}))
	b.segment("s")
	b.control(4, "")
	b.must(b.m.Terminate(sid))
	b.ack()
	b.again()
}

// TestSinkWaits checks that a segment for which its sink waits comes before all that follow, also those placed early, and
// that no other may have its number.
func TestSinkWaits(t *testing.T) {
	for _, place := range []bool{false, true} {
		b := newBench(t, Config{}).in("passive")
		b.sink.wait, b.sink.place = "two", place
		for _, s := range []string{"one", "two", "three"} {
			b.segment(s)
		}
		b.control(4, "")
		for range 2 {
			if b.m.Resume(sid); fmt.Sprint(b.sink.got) != "[one]" || b.m.State(sid) != Open {
				t.Fatalf("%v, state %v", b.sink.got, b.m.State(sid))
			}
		}
		b.sink.wait = ""
		b.m.Resume(sid)
		b.drain()
		if got := b.kinds(); fmt.Sprint(b.sink.got) != "[one two three]" || !slices.Contains(got, EventTerminated) {
			t.Errorf("%v, events %v", b.sink.got, got)
		}
	}
	b := newBench(t, Config{}).in("passive")
	b.sink.wait = "two"
	b.segment("two")
	b.sink.wait = ""
	b.ssn--
	if b.segment("two again"); b.events[0].Err != error(ErrSSNTwice) {
		t.Errorf("%v", b.events)
	}
}

// TestReset checks that the end of the association ends each session with an event and without a message, and that
// nothing of them is left.
func TestReset(t *testing.T) {
	b := newBench(t, Config{Pending: 1}).in("passive")
	b.segmentAt(9, "held")
	ended := newBench(t, Config{}).in("ended").m.stream(sid) // has had its event
	b.m.streams[0] = ended
	b.m.HandleMessage(sid+1, b.p.Control(), true, message(0, 1, "")) // waits for the ULP
	b.drain()
	if err := b.m.Initiate(sid+2, Setup{}); err != nil { // is not polled before the end
		t.Fatal(err)
	}
	b.events = nil
	b.m.Reset(4)
	b.drain()
	var over []uint16
	for _, e := range b.events {
		if e.Kind != EventTerminated {
			t.Errorf("event %v", e.Kind)
		}
		over = append(over, e.Stream)
	}
	if !slices.Equal(over, []uint16{sid, sid + 1, sid + 2}) || len(b.sent) != 0 {
		t.Errorf("ended: %v, sent %+v", over, b.sent)
	}
	if b.m.Held() != 0 || b.m.Memory() != b.m.pooled || b.m.Streams() != 4 {
		t.Errorf("%d streams, %d bytes held, %d of memory", b.m.Streams(), b.m.Held(), b.m.Memory())
	}
	b.again() // the place of the request that waited is free
}

// TestOutstanding checks that fewer than 32768 messages of a stream are in flight.
func TestOutstanding(t *testing.T) {
	b := newBench(t, Config{}).in("passive")
	n := 0
	var h [2]byte
	for ; b.m.CanSend(sid); n++ {
		b.m.Begin(sid, h[:])
	}
	if n != 32767 {
		t.Errorf("%d", n)
	}
	b.m.HandleAcked(sid, false)
	if !b.m.CanSend(sid) {
		t.Error("no room again")
	}
}

func TestConfigure(t *testing.T) {
	for p, want := range map[Profile]uint32{RFC5043: 1, Draft: 2} {
		var c sctp.Config
		if p.Configure(&c); c.Adaptation != want || len(c.Accept) != 1 || c.Accept[0] != want {
			t.Errorf("%v: %+v", p, c)
		}
	}
}

// FuzzMessages gives a Mux any messages.
func FuzzMessages(f *testing.F) {
	f.Add(uint8(0), []byte{4, 0x11, 0, 0, 0, 1})
	f.Add(uint8(9), []byte{4, 0x10, 0, 1, 'a', 'b', 4, 0x10, 0, 3, 'a', 'b'})
	states := []string{"idle", "initiating", "requested", "passive", "active", "ended"}
	f.Fuzz(func(t *testing.T, how uint8, in []byte) {
		b := newBench(t, Config{Profile: Profile(how >> 3 & 1), MaxAhead: 100}).in(states[int(how&7)%len(states)])
		b.sink.place = how&16 != 0
		for len(in) >= 2 {
			n := min(len(in)-2, int(in[0]&15))
			b.m.HandleMessage(uint16(in[1]>>6)+1, uint32(in[1]&31), in[1]&32 == 0, in[2:2+n])
			if in[0]&16 != 0 {
				b.m.HandleAcked(sid, true)
			}
			in = in[2+n:]
		}
		b.drain()
		held := 0
		for _, s := range b.m.streams {
			if s == nil {
				continue
			}
			c := 0
			for _, a := range s.ring {
				if a.kind != notCome {
					c++
				}
				if a.kind == aheadHeld {
					held += len(a.b)
				}
			}
			for _, w := range s.seen {
				c += bits.OnesCount64(w)
			}
			if c != s.nahead || s.seen != nil && s.state != Ended {
				t.Fatalf("%d ahead, counted %d", c, s.nahead)
			}
			if s.state == Idle && s.unacked != 0 {
				t.Fatalf("stream %d is free, with %d messages outstanding", s.id, s.unacked)
			}
		}
		if held != b.m.Held() || b.m.pending < 0 {
			t.Fatalf("held %d of %d, pending %d", held, b.m.Held(), b.m.pending)
		}
	})
}

// TestAheadMemory checks that messages which a peer sends far ahead of their turn,
// without a session, take little memory, on however many streams.
func TestAheadMemory(t *testing.T) {
	const streams = 64
	initiate := []byte{0, 0, 0, 1}
	for name, ppid := range map[string]uint32{"another PPID": 99, "a segment": ppidSegment, "control": ppidControl} {
		m := New(Config{Pending: streams}, streams)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for id := range uint16(streams) {
			if id%2 == 0 {
				m.HandleMessage(id, ppidControl, true, initiate)
			}
			for _, ssn := range []uint16{4096, 2000, 1, 4095} {
				m.HandleMessage(id, ppid, true, be.AppendUint16(nil, ssn))
				m.HandleMessage(id, ppid, true, append(be.AppendUint16(nil, ssn), 0, 4))
			}
		}
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 4<<10*streams {
			t.Errorf("%s: %d bytes for %d streams", name, n, streams)
		}
	}
}

// TestNegotiateCrosses checks that a Negotiate that crosses our Initiate is reported and
// ends nothing, in order or not (draft 3.2). One that the peer sends after its Accept or
// Initiate is a violation, and so are too many.
func TestNegotiateCrosses(t *testing.T) {
	for _, late := range []bool{false, true} {
		b := newBench(t, Config{Profile: Draft}).in("initiating")
		if late { // the Accept overtakes it
			first := b.ssn
			b.ssn++
			b.control(3, "yes")
			b.ssn = first
			b.control(1, "n")
			b.ssn++
		} else {
			b.control(1, "n")
			b.control(3, "yes")
		}
		if got := b.kinds(); !slices.Equal(got, []EventKind{EventNegotiate, EventOpen}) {
			t.Errorf("late %v: events %v", late, got)
		}
		b.control(1, "n")
		if got := b.kinds(); !slices.Contains(got, EventFailed) {
			t.Errorf("a Negotiate after the Accept: %v", got)
		}
	}
	b := newBench(t, Config{Profile: Draft})
	for range maxNegotiates {
		b.control(1, "n")
	}
	if got := b.kinds(); len(got) != maxNegotiates || slices.Contains(got, EventFailed) {
		t.Errorf("%d Negotiates: %v", maxNegotiates, got)
	}
	b.control(1, "n")
	if len(b.events) == 0 || b.events[0].Err != error(ErrNegotiates) {
		t.Errorf("one more: %v", b.events)
	}
}

// TestEnhancedChunks has the golden bytes of enhanced session control chunks (RFC 6581
// sections 7 and 9): DDP-SSN, function code, enhanced data, the ULP's Private Data.
func TestEnhancedChunks(t *testing.T) {
	word := &mpa.EnhancedData{IRD: 0x123, ORD: 0x3fff, P2P: true, RTR: mpa.RTRs(mpa.RTRSend | mpa.RTRRead)}
	set := Setup{Private: []byte("pd"), Enhanced: word}
	for _, c := range []struct {
		name, state string
		do          func(m *Mux) error
		want        string // in hex, but for the DDP-SSN
	}{
		{"Initiate", "idle", func(m *Mux) error { return m.Initiate(sid, set) }, "0005c1237fff7064"},
		{"Accept", "requested+", func(m *Mux) error { return m.Accept(sid, set) }, "0006c1237fff7064"},
		{"Reject", "requested+", func(m *Mux) error { return m.Reject(sid, set) }, "0007c1237fff7064"},
		{"plain Initiate", "idle", func(m *Mux) error { return m.Initiate(sid, Setup{Private: []byte("pd")}) }, "00017064"},
		{"Terminate", "requested+", func(m *Mux) error { return m.Terminate(sid) }, "0004"},
	} {
		b := newBench(t, Config{}).in(c.state)
		b.must(c.do(b.m))
		b.drain()
		if len(b.sent) != 1 || fmt.Sprintf("%x", b.sent[0].Data[2:]) != c.want || b.sent[0].PPID != 17 {
			t.Errorf("%s: sent %x, want %s", c.name, b.sent, c.want)
		}
	}
	// What comes: the word and the rest are taken apart.
	b := newBench(t, Config{})
	b.control(5, "\xc1\x23\x7f\xffpd")
	if e := b.events[0]; e.Kind != EventRequest || *e.Setup.Enhanced != *word || string(e.Setup.Private) != "pd" {
		t.Errorf("Initiate: %+v", e)
	}
	for _, code := range []uint16{6, 7} {
		b := newBench(t, Config{}).in("initiating+")
		b.control(code, "\xc1\x23\x7f\xffpd")
		if e := b.events[0]; *e.Setup.Enhanced != *word || string(e.Setup.Private) != "pd" {
			t.Errorf("function %d: %+v", code, e)
		}
	}
	for _, bad := range []mpa.EnhancedData{{IRD: 0x4000}, {ORD: 0x4000}} {
		if err := newBench(t, Config{}).m.Initiate(sid, Setup{Enhanced: &bad}); err != mpa.ErrDepth {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

// TestRequestEnds checks that a request which ends unaccepted, whoever ends it, leaves its place to others, of which a peer may
// have few, and that its stream takes the next one.
func TestRequestEnds(t *testing.T) {
	for _, p := range []Profile{RFC5043, Draft} {
		for name, end := range map[string]func(b *bench){
			"rejected":             func(b *bench) { b.must(b.m.Reject(sid, Setup{})) },
			"ended by the ULP":     func(b *bench) { b.must(b.m.Terminate(sid)) },
			"ended by the peer":    func(b *bench) { b.control(p.code(fnTerminate, false), "") },
			"ended by a violation": func(b *bench) { b.control(p.code(fnInitiate, false), "") },
		} {
			b := newBench(t, Config{Profile: p, Pending: 2})
			for i := range 5 {
				if b.ssn = p.firstSSN(); !b.m.Free(sid) {
					t.Fatalf("%v, %s: the stream is not free for request %d", p, name, i)
				}
				b.control(p.code(fnInitiate, false), "")
				if k := b.kinds(); !slices.Equal(k, []EventKind{EventRequest}) || b.m.Free(sid) {
					t.Fatalf("%v, %s: request %d: events %v", p, name, i, k)
				}
				end(b)
				if b.m.Free(sid) {
					t.Errorf("%v, %s: the stream is free before its last message is acknowledged", p, name)
				}
				if b.ack(); name == "ended by a violation" { // it has more to say
					b.control(p.code(fnTerminate, false), "")
				}
				if k := b.kinds(); b.m.pending != 0 || len(k) == 0 || k[len(k)-1] != EventIdle {
					t.Fatalf("%v, %s: %d requests wait, events %v", p, name, b.m.pending, k)
				}
			}
		}
	}
}

// TestUnanswered checks what a peer may send before its request is answered: a few control messages, of which one is missing,
// and no segment. Each message would be held.
func TestUnanswered(t *testing.T) {
	for _, tc := range []struct {
		name  string
		ahead uint16
		seg   bool
		want  error
	}{
		{"a control message", maxUnanswered, false, nil},
		{"one too far ahead", maxUnanswered + 1, false, ErrSSN},
		{"a segment ahead", 1, true, ErrEarlyData},
	} {
		b := newBench(t, Config{}).in("requested")
		ppid, m := b.p.Control(), message(b.ssn+tc.ahead, 4, "")
		if tc.seg {
			ppid = b.p.Segment()
		}
		b.m.HandleMessage(sid, ppid, true, m)
		b.drain()
		switch {
		case tc.want == nil && (len(b.events) != 0 || b.m.Held() != len(m)):
			t.Errorf("%s: events %+v, %d bytes held", tc.name, b.events, b.m.Held())
		case tc.want != nil && (len(b.events) != 1 || b.events[0].Err != tc.want || b.m.Held() != 0 || b.m.pending != 0):
			t.Errorf("%s: events %+v, %d bytes held", tc.name, b.events, b.m.Held())
		}
	}
}

// TestNoSession checks messages for streams without a session. The peer may have more streams than the association, whose number
// is the smaller one of both directions.
func TestNoSession(t *testing.T) {
	b := newBench(t, Config{})
	b.m.HandleMessage(uint16(b.m.Streams()), b.p.Control(), true, message(0, 1, ""))
	if b.drain(); len(b.events) != 0 || len(b.sent) != 0 || b.m.Stats().NoSession != 1 {
		t.Errorf("events %+v, sent %+v, %+v", b.events, b.sent, b.m.Stats())
	}
	b.m.HandleMessage(sid, b.p.Control(), true, message(7, 4, "")) // the end of an older session
	if b.drain(); len(b.events) != 0 || len(b.sent) != 0 || b.m.Stats().NoSession != 2 || b.m.State(sid) != Idle {
		t.Errorf("events %+v, sent %+v, %+v", b.events, b.sent, b.m.Stats())
	}
	b.m.HandleMessage(sid, b.p.Control(), true, message(7, 1, ""))
	if b.drain(); len(b.events) != 1 || b.events[0].Err != error(ErrSSN) || b.m.Held() != 0 {
		t.Errorf("events %+v, %d bytes held", b.events, b.m.Held())
	}
}
