package dataplane

import (
	"bytes"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/verbs"
)

// lent is a link that counts the frames that its worker holds.
type lent struct {
	*link.Pipe
	most, out int // in one burst; now
}

func (l *lent) Receive(fs []link.Frame) int {
	n := l.Pipe.Receive(fs)
	l.most = max(l.most, n)
	l.out += n
	return n
}

func (l *lent) Release(f *link.Frame) {
	l.out--
	l.Pipe.Release(f)
}

// register registers mem, which a client has mapped and may fault.
func (q *simQP) register(mem []byte) *verbs.Region {
	q.Client.Memory.Add(mem)
	r, err := q.h.table.Register(1, mem, 0x10000, simAccess)
	if err != nil {
		panic(err)
	}
	return r
}

// memoryFault is a panic like that of the runtime for a fault at an address.
type memoryFault uintptr

func (f memoryFault) Addr() uintptr { return uintptr(f) }

// theBug is a function whose name a stack must have.
//
//go:noinline
func theBug(why any) { panic(why) }

// Only a fault at an address that the client's memory has ends the client. Any other panic is ours, and continues with the stack of where
// it happened.
func TestFaultOrBug(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	c, d := s.openFrom(netip.AddrPortFrom(addrA, 40001), addrB)
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	qc, qd := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	s.attach(c, d, qc, qd, mpa.Params{CRC: true})
	mem := make([]byte, 3*unix.Getpagesize())
	at := memoryFault(unsafe.Pointer(&mem[unix.Getpagesize()]))
	qb.Client.Memory.Add(mem)
	told := 0
	qb.Client.OnFault = func() { told++ }
	w := s.hosts[1].w
	turn := func(on *stream, why any) (r any, stack string) {
		w.post(func(w *worker) {
			w.current = on
			theBug(why)
		})
		defer func() {
			r, stack = recover(), string(debug.Stack())
			w.current = nil
		}()
		w.surviveTurn()
		return nil, ""
	}
	var none *worker
	for _, tt := range []struct {
		name string
		on   *stream
		why  any
	}{
		{"a panic", b, "index out of range"},
		{"a fault elsewhere", b, at + 1<<30},
		{"a fault at no address", b, memoryFault(0)},
		{"another client's memory", d, at},
		{"no client's turn", nil, at},
	} {
		r, stack := turn(tt.on, tt.why)
		if r != tt.why || !strings.Contains(stack, "theBug") {
			t.Errorf("%s: panic %v with the stack\n%s", tt.name, r, stack)
		}
	}
	r, stack := func() (r any, stack string) {
		w.post(func(w *worker) {
			w.current = b
			none.theNilBug()
		})
		defer func() { r, stack = recover(), string(debug.Stack()) }()
		defer w.survive()
		w.turn()
		return nil, ""
	}()
	w.current = nil
	if err, ok := r.(runtime.Error); !ok || !strings.Contains(err.Error(), "nil pointer") || !strings.Contains(stack, "theNilBug") {
		t.Errorf("a nil pointer of ours: panic %v with the stack\n%s", r, stack)
	}
	if w.stats.Faults != 0 || told != 0 || b.closed() || d.closed() {
		t.Fatalf("%d faults; the client was ended %d times", w.stats.Faults, told)
	}
	if r, _ := turn(b, at); r != nil || w.stats.Faults != 1 || told != 1 {
		t.Errorf("a fault in the client's memory: panic %v, %d faults, the client was ended %d times", r, w.stats.Faults, told)
	}
	s.closed(1)
	for i := range qc.mem {
		qc.mem[i] = byte(i * 3)
	}
	s.write(c, qc, qd, 1000)
}

//go:noinline
func (w *worker) theNilBug() { w.stats.Turns++ }

// TestFaultInABurst checks that the frames after the one in which a worker faulted are neither lost nor leaked.
func TestFaultInABurst(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const size, lanes = 4096, 4
	s := newSim(t, link.PipeConfig{})
	mem := testenv.Mmap(t, size, unix.PROT_NONE)
	ha, w := s.hosts[0], s.hosts[1].w
	rx := &lent{Pipe: s.hosts[1].link}
	w.link = rx
	var qa, qb [lanes]*simQP
	var a [lanes]*stream
	for i := range lanes {
		c, d := s.openFrom(netip.AddrPortFrom(addrA, 40000+uint16(i)), addrB)
		qa[i], qb[i] = newSimQP(t, ha, size), newSimQP(t, s.hosts[1], size)
		s.attach(c, d, qa[i], qb[i], mpa.Params{CRC: true, IRD: 1, ORD: 1, RTR: mpa.RTRWrite})
		a[i] = c
	}
	for s.step() {
	}
	bad := qb[1].register(mem)
	rx.most = 0
	for i := range lanes {
		for k := range qa[i].mem {
			qa[i].mem[k] = byte(k*7 + i)
		}
		wr := verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa[i].sge(0, size), RKey: qb[i].reg.STag(), Remote: 0x10000}
		if i == 1 {
			wr.RKey = bad.STag()
		}
		qa[i].sends = append(qa[i].sends, wr)
		ha.w.mark(a[i].lane)
	}
	ha.w.turn()
	w.surviveTurn()
	if w.stats.Faults != 1 {
		t.Fatalf("%d faults", w.stats.Faults)
	}
	s.until("the others written", func() bool {
		for i := range lanes {
			if i != 1 && !bytes.Equal(qb[i].mem, qa[i].mem) {
				return false
			}
		}
		return true
	})
	if n := ha.w.stats.TxRetransmits; n != 0 {
		t.Errorf("%d segments sent again", n)
	}
	for s.step() {
	}
	if rx.most < lanes*size/1500 || rx.out > 0 {
		t.Errorf("bursts of at most %d frames, %d not given back", rx.most, rx.out)
	}
}

// TestFaultKeepsAssociations checks that an association without a session survives a fault in the memory of another
// connection's client.
func TestFaultKeepsAssociations(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, b := s.open()
	s.listenSCTP()
	s.dialSCTP(40001, 0).ini = nil // opens no session
	w := s.hosts[1].w
	var as *assoc
	s.until("association up", func() bool {
		for as = range w.assocs() {
		}
		return as != nil && as.a.State() == sctp.Established && !as.dirty
	})
	w.mark(&as.lane) // as a packet of it does
	w.fault(b, "a fault")
	if !slices.Contains(w.dirty, &as.lane) {
		t.Error("the association is forgotten")
	}
	s.until("pumped", func() bool { return !as.dirty })
}

// TestSCTPFault checks that a fault in a client's memory ends the association whose packet was being processed,
// because its other messages are acknowledged and lost.
func TestSCTPFault(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	none := testenv.Mmap(t, 4096, unix.PROT_NONE)
	bad := qb.register(none)
	told := 0
	qb.Client.OnFault = func() { told++ }
	a, b := s.openSCTP(SCTP{}, qa, qb)
	wa, wb := s.hosts[0].w, s.hosts[1].w
	settled := s.now.Add(time.Second)
	s.until("rest", func() bool { return s.now > settled })
	for i := range uint64(2) {
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: i, SGEs: []verbs.SGE{{Addr: 0x10000, Len: 100, LKey: bad.STag()}}})
		qa.sends = append(qa.sends, verbs.SendWR{ID: i, Op: rdmap.OpSend, SGEs: qa.sge(0, 100)})
	}
	wa.mark(a.lane)
	wa.turn()
	frames, chunks := wb.stats.RxFrames, b.as().a.Stats().RxChunks
	wb.surviveTurn()
	if wb.stats.Faults != 1 || told != 1 {
		t.Fatalf("%d faults, %d reported", wb.stats.Faults, told)
	}
	if f, c := wb.stats.RxFrames-frames, b.as().a.Stats().RxChunks-chunks; f != 1 || c != 2 {
		t.Fatalf("%d messages in %d frames: this tests nothing", c, f)
	}
	wb.turn()
	if !b.as().gone {
		t.Error("the association has not ended")
	}
	for i := range s.hosts {
		if ev := s.closed(i); ev.Err == nil {
			t.Errorf("host %d closed without an error", i)
		}
	}
	if n := len(qb.wcs); n != 2 || qb.wcs[0].Status != verbs.WCFlushErr || qb.wcs[1].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", qb.wcs)
	}
	s.closedSCTP()
}

// TestFaultKeepsCommands checks that the commands queued after one that faults are each run once and in order.
func TestFaultKeepsCommands(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	qb.Client.Memory.Add(qb.mem)
	w := s.hosts[1].w
	var got []int
	note := func(i int) func(*worker) { return func(*worker) { got = append(got, i) } }
	w.post(note(1))
	w.post(func(w *worker) {
		w.post(note(4))
		w.current = b
		panic(memoryFault(unsafe.Pointer(&qb.mem[0])))
	})
	w.post(note(2))
	w.post(note(3))
	w.surviveTurn()
	w.post(func(w *worker) {
		for i := range 8 {
			w.post(note(6 + i))
		}
	})
	w.post(note(5))
	w.turn()
	w.turn()
	if want := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}; w.stats.Faults != 1 || !slices.Equal(got, want) {
		t.Errorf("%d faults, called %v; want %v", w.stats.Faults, got, want)
	}
}

// TestFaultKeepsMarks checks that connections marked for pumping when a fault ended the turn stay marked, including
// an association without a session.
func TestFaultKeepsMarks(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTP()
	s.dialSCTP(40001, 0).ini = nil
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	w := s.hosts[1].w
	s.until("an association", func() bool { return w.sctp.n == 1 })
	marked := []*lane{b.lane}
	for as := range w.assocs() {
		marked = append(marked, &as.lane)
	}
	if len(w.streams) != 1 {
		t.Fatalf("%d connections, the association has a session: this tests nothing", len(w.streams))
	}
	for _, c := range marked {
		w.mark(c)
	}
	w.fault(b, "none")
	for _, c := range marked {
		if !c.dirty || !slices.Contains(w.dirty, c) {
			t.Errorf("%v: dirty %v, in the list %v", c.key, c.dirty, slices.Contains(w.dirty, c))
		}
	}
}

// TestFaultHeld checks that when held out-of-order frames become in order and the first one faults, all of them and
// the frame that filled the gap are released.
func TestFaultHeld(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const size = 8192
	page := unix.Getpagesize()
	drop := false
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
		if !toB || !drop || len(f) < 1000 {
			return true
		}
		drop = false
		return false
	}})
	a, b := s.open()
	ha, w := s.hosts[0], s.hosts[1].w
	mem := testenv.Mmap(t, 2*page, unix.PROT_READ|unix.PROT_WRITE)
	if err := unix.Mprotect(mem[page:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	rx := &lent{Pipe: s.hosts[1].link}
	w.link = rx
	qa, qb := newSimQP(t, ha, size), newSimQP(t, s.hosts[1], size)
	bad := qb.register(mem)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	// The first segment is placed in the mapped page, the following ones in the unmapped page.
	drop = true
	s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, 1400), RKey: bad.STag(), Remote: 0x10000})
	s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, 4000), RKey: bad.STag(), Remote: 0x10000 + uint64(page)})
	s.until("some are held", func() bool { return b.conn().holds > 1 })
	for w.stats.Faults == 0 && s.now < s.limit {
		ha.w.turn()
		w.surviveTurn()
		s.now = s.now.Add(time.Millisecond)
	}
	if w.stats.Faults != 1 || w.stats.RxEarly == 0 {
		t.Fatal("this tests nothing")
	}
	s.closed(1)
	if n := len(w.held.frames) - len(w.held.free); n != 0 || rx.out != 0 {
		t.Errorf("%d frames held, %d not given back", n, rx.out)
	}
}

// TestFaultFreesSlot checks that the TX slot of a record is freed when reading the record's memory faults.
func TestFaultFreesSlot(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const size = 4096
	for _, overSCTP := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		mem := testenv.Mmap(t, size, unix.PROT_NONE)
		w := s.hosts[0].w
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		qa.reg = qa.register(mem)
		a := s.connect(overSCTP, qa, qb)
		s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
		w.surviveTurn()
		s.closed(0)
		s.closed(1)
		for s.step() {
		}
		if n := w.link.Slots() - w.link.FreeSlots(); w.stats.Faults != 1 || n != 0 {
			t.Errorf("SCTP %v: %d faults, %d slots not given back", overSCTP, w.stats.Faults, n)
		}
	}
}

// TestFaultInAtomic checks that a fault in the target of an atomic, which is performed when its response is composed, ends the client.
func TestFaultInAtomic(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	for _, overSCTP := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		mem := testenv.Mmap(t, 4096, unix.PROT_NONE)
		qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
		bad, told := qb.register(mem), 0
		qb.Client.OnFault = func() { told++ }
		a := s.connect(overSCTP, qa, qb)
		s.post(a, qa, verbs.SendWR{Op: rdmap.OpFetchAdd, SGEs: qa.sge(0, 8), RKey: bad.STag(), Remote: 0x10000})
		w := s.hosts[1].w
		for w.stats.Faults == 0 && s.now < s.limit {
			s.hosts[0].w.turn()
			w.surviveTurn()
			s.now = s.now.Add(time.Millisecond)
		}
		s.closed(0)
		s.closed(1)
		for s.step() {
		}
		if n := w.link.Slots() - w.link.FreeSlots(); w.stats.Faults != 1 || told != 1 || n != 0 {
			t.Errorf("SCTP %v: %d faults, the client was ended %d times, %d slots not given back", overSCTP, w.stats.Faults, told, n)
		}
	}
}

// A fault costs no work for the connections of others: a client can cause one after the other.
func TestFaultMarksFew(t *testing.T) {
	const others = 40
	s := newSim(t, link.PipeConfig{})
	for i := range others {
		s.openFrom(netip.AddrPortFrom(addrA, 40001+uint16(i)), addrB)
	}
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	for settled := s.now.Add(time.Second); s.now < settled && s.step(); {
	}
	w := s.hosts[1].w
	if n := len(w.dirty); n != 0 || len(w.lanes) != others+1 {
		t.Fatalf("%d of %d lanes are marked before the fault", n, len(w.lanes))
	}
	w.fault(b, "a fault")
	if len(w.dirty) != 1 || w.dirty[0] != b.lane {
		t.Errorf("%d lanes are marked", len(w.dirty))
	}
}

// A fault in the midst of pumping keeps the lanes marked that the turn did not come to.
func TestFaultWhilePumping(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const lanes, bad, size = 4, 1, 4096
	s := newSim(t, link.PipeConfig{})
	mem := testenv.Mmap(t, size, unix.PROT_NONE)
	var a [lanes]*stream
	var qa, qb [lanes]*simQP
	for i := range lanes {
		c, d := s.openFrom(netip.AddrPortFrom(addrA, 40000+uint16(i)), addrB)
		qa[i], qb[i] = newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		s.attach(c, d, qa[i], qb[i], mpa.Params{CRC: true})
		a[i] = c
	}
	for settled := s.now.Add(time.Second); s.now < settled && s.step(); {
	}
	qa[bad].reg = qa[bad].register(mem)
	w := s.hosts[0].w
	for i := range lanes {
		if i != lanes-1 { // the last one has nothing to send
			qa[i].sends = append(qa[i].sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa[i].sge(0, size), RKey: qb[i].reg.STag(), Remote: 0x10000})
		}
		w.mark(a[i].lane)
	}
	w.surviveTurn()
	if w.stats.Faults != 1 || a[lanes-1].lane.pumped == w.stats.Turns {
		t.Fatalf("%d faults, or they came after the last lane", w.stats.Faults)
	}
	seen := make(map[*lane]int)
	for _, l := range w.dirty {
		if seen[l]++; seen[l] > 1 || !l.dirty {
			t.Errorf("%v is in the list %d times, marked %v", l.key, seen[l], l.dirty)
		}
	}
	if seen[a[lanes-1].lane] == 0 {
		t.Error("the last lane is forgotten")
	}
	s.until("the others have written", func() bool { return len(qa[0].wcs) == 1 && len(qa[2].wcs) == 1 })
	for settled := s.now.Add(time.Second); s.now < settled && s.step(); {
	}
	for _, l := range w.lanes {
		if l.dirty != slices.Contains(w.dirty, l) {
			t.Errorf("%v: marked %v, not so in the list", l.key, l.dirty)
		}
	}
}

// A client whose memory faults ends with all its connections, some in each turn, and does not fault on each of them.
func TestFaultEndsClient(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const lanes, size = 5*failBudget + 3, 4096
	s := newLoadLanes(t, link.PipeConfig{})
	mem := testenv.Mmap(t, size, unix.PROT_NONE)
	ha, w := s.hosts[0], s.hosts[1].w
	told := 0
	cb := s.client(1, 0)
	cb.OnFault = func() { told++ }
	var a, other [lanes + 1]*stream
	var qa, qb [lanes + 1]*simQP
	for i := range lanes + 1 {
		qa[i], qb[i] = newSimQP(t, ha, size), newSimQP(t, s.hosts[1], size)
		if i < lanes {
			qb[i].Client, qb[i].Bit = cb, i
		}
		a[i], other[i] = s.openFrom(netip.AddrPortFrom(addrA, 40000+uint16(i)), addrB)
		s.attach(a[i], other[i], qa[i], qb[i], mpa.Params{CRC: true})
	}
	for settled := s.now.Add(time.Second); s.now < settled && s.step(); {
	}
	bad := qb[0].register(mem)
	for i := range lanes + 1 {
		to := bad
		if i == lanes {
			to = qb[i].reg // of another client
		}
		qa[i].sends = append(qa[i].sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa[i].sge(0, size), RKey: to.STag(), Remote: 0x10000})
		ha.w.mark(a[i].lane)
	}
	closed := 0
	for n := 0; closed < lanes || len(qa[lanes].wcs) == 0; n++ {
		if n == 10000 {
			t.Fatalf("%d of %d connections are closed", closed, lanes)
		}
		ha.w.turn()
		w.surviveTurn()
		s.now = s.now.Add(10 * time.Microsecond)
		s.hosts[1].drain()
		before := closed
		for ev, ok := s.hosts[1].take(EventClosed); ok; ev, ok = s.hosts[1].take(EventClosed) {
			if closed++; ev.Err == nil || ev.Conn == other[lanes].id {
				t.Errorf("connection %d is closed: %v", ev.Conn, ev.Err)
			}
		}
		if closed-before > failBudget+1 {
			t.Fatalf("%d connections ended in a turn", closed-before)
		}
	}
	if w.stats.Faults != 1 || told != 1 {
		t.Errorf("%d faults, the client was ended %d times", w.stats.Faults, told)
	}
	if wc := qa[lanes].wcs[0]; wc.Status != verbs.WCSuccess || other[lanes].closed() {
		t.Errorf("another client's connection: %v", wc.Status)
	}
}
