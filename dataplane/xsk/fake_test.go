package xsk

import (
	"bytes"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/ring"
)

// fake is a Socket over plain memory, with the kernel's ends of its rings.
type fake struct {
	*Socket
	rxIn, compIn    ring.Producer
	txOut, fillOut  ring.Consumer
	rxIdx, compIdx  [2]atomic.Uint32
	txIdx, fillIdx  [2]atomic.Uint32
	txFlag, rxFlags atomic.Uint32
}

// newFake returns a socket with n chunks, half of them for receiving, and rings of size entries whose indices wrap
// soon.
func newFake(mtu, n, size int) *fake {
	cfg := Config{MTU: mtu, Frames: n, Ring: size, Generic: true}
	cfg.layoutSlots()
	f := &fake{Socket: &Socket{cfg: cfg, fd: -1, sg: true, umem: make([]byte, n*FrameSize)}}
	for _, i := range []*[2]atomic.Uint32{&f.rxIdx, &f.compIdx, &f.txIdx, &f.fillIdx} {
		i[0].Store(^uint32(2))
		i[1].Store(^uint32(2))
	}
	s, u := f.Socket, uint32(size)
	s.rx, f.rxIn = ring.NewConsumer(&f.rxIdx[0], &f.rxIdx[1], u), ring.NewProducer(&f.rxIdx[0], &f.rxIdx[1], u)
	s.comp, f.compIn = ring.NewConsumer(&f.compIdx[0], &f.compIdx[1], u), ring.NewProducer(&f.compIdx[0], &f.compIdx[1], u)
	s.tx, f.txOut = ring.NewProducer(&f.txIdx[0], &f.txIdx[1], u), ring.NewConsumer(&f.txIdx[0], &f.txIdx[1], u)
	s.fill, f.fillOut = ring.NewProducer(&f.fillIdx[0], &f.fillIdx[1], u), ring.NewConsumer(&f.fillIdx[0], &f.fillIdx[1], u)
	s.txMap.flag, s.fillMap.flag = &f.txFlag, &f.rxFlags
	s.rxDescs, s.txDescs = make([]unix.XDPDesc, size), make([]unix.XDPDesc, size)
	s.fillAddrs, s.compAddrs = make([]uint64, size), make([]uint64, size)
	s.layout()
	return f
}

// arrive puts a frame of several pieces in the RX ring, as the kernel would, into chunks from the fill ring. whole
// says that the last piece is among them.
func (f *fake) arrive(t *testing.T, whole bool, pieces ...[]byte) {
	t.Helper()
	for i, p := range pieces {
		at, n := f.fillOut.Peek(1)
		if n == 0 {
			t.Fatal("fill ring is empty")
		}
		addr := f.fillAddrs[f.fillOut.Mask(at)] + rxHeadroom
		f.fillOut.Release(1)
		copy(f.umem[addr:], p)
		d := unix.XDPDesc{Addr: addr, Len: uint32(len(p))}
		if !whole || i+1 < len(pieces) {
			d.Options = unix.XDP_PKT_CONTD
		}
		f.desc(t, d)
	}
}

// desc puts any descriptor into the RX ring.
func (f *fake) desc(t *testing.T, d unix.XDPDesc) {
	t.Helper()
	at, n := f.rxIn.Reserve(1)
	if n == 0 {
		t.Fatal("RX ring is full")
	}
	f.rxDescs[f.rxIn.Mask(at)] = d
	f.rxIn.Submit()
}

// sent takes the descriptors that the socket has published.
func (f *fake) sent() []unix.XDPDesc {
	var ds []unix.XDPDesc
	at, n := f.txOut.Peek(uint32(f.cfg.Ring))
	for i := range n {
		ds = append(ds, f.txDescs[f.txOut.Mask(at+i)])
	}
	f.txOut.Release(n)
	return ds
}

// complete reports addresses as sent.
func (f *fake) complete(addrs ...uint64) {
	for _, a := range addrs {
		at, _ := f.compIn.Reserve(1)
		f.compAddrs[f.compIn.Mask(at)] = a
	}
	f.compIn.Submit()
}

// TestBindFlags checks that a driver that has zero copy only for frames of one piece gets zero copy where the MTU
// allows it. Frames of several pieces are requested where the MTU needs them, and in generic mode.
func TestBindFlags(t *testing.T) {
	const sg = unix.XDP_USE_SG
	for _, tc := range []struct {
		name     string
		generic  bool
		mtu      int
		refuseSG bool
		want     []uint16 // the flags of each call of bind(2), apart from XDP_USE_NEED_WAKEUP
		err      error
	}{
		{"native", false, 1500, false, []uint16{0}, nil},
		{"native, largest frame of one piece", false, 3498, false, []uint16{0}, nil},
		{"native, two pieces", false, 3499, false, []uint16{sg}, nil},
		{"native, two pieces, refused", false, 9000, true, []uint16{sg, 0}, ErrNoSG},
		{"generic", true, 1500, false, []uint16{unix.XDP_COPY | sg}, nil},
		{"generic, old kernel", true, 1500, true, []uint16{unix.XDP_COPY | sg, unix.XDP_COPY}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &Socket{cfg: Config{Generic: tc.generic, MTU: tc.mtu, BindRetry: -1}}
			s.cfg.layoutSlots()
			var got []uint16
			err := s.bind(func(flags uint16) error {
				got = append(got, flags&^unix.XDP_USE_NEED_WAKEUP)
				if flags&sg != 0 && tc.refuseSG {
					return unix.EOPNOTSUPP
				}
				return nil
			})
			if !slices.Equal(got, tc.want) || !errors.Is(err, tc.err) {
				t.Errorf("flags %#x, %v; want %#x, %v", got, err, tc.want, tc.err)
			}
			if err == nil && s.sg != (got[len(got)-1]&sg != 0) {
				t.Errorf("sg %v after flags %#x", s.sg, got)
			}
		})
	}
}

// TestTaken checks that the reported mode is the one that the kernel reports, not the one that was requested.
func TestTaken(t *testing.T) {
	for want, s := range map[string]*Socket{
		"native, zero copy": {zeroCopy: true},
		"native, copy":      {},
		"generic, copy":     {cfg: Config{Generic: true}},
	} {
		if got := s.Taken(); got != want {
			t.Errorf("%q; want %q", got, want)
		}
	}
}

func TestReceiveChains(t *testing.T) {
	f := newFake(9000, 64, 32)
	piece := func(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }
	fs := make([]link.Frame, 4)
	for round := range 20 { // every chunk is reused, and the indices wrap
		f.arrive(t, true, piece(1, 60))
		f.arrive(t, true, piece(2, 3840), piece(3, 4096), piece(4, 1))
		f.arrive(t, false, piece(5, 3840))
		if n := f.Receive(fs); n != 2 || fs[0].N != 1 || fs[1].N != 3 || fs[1].Len() != 7937 || fs[1].Pieces[2][0] != 4 {
			t.Fatalf("round %d: received %d: %d and %d pieces", round, n, fs[0].N, fs[1].N)
		}
		if n := f.Receive(fs[2:]); n != 0 {
			t.Fatalf("round %d: received half a frame", round)
		}
		f.arrive(t, true, piece(6, 5))
		if n := f.Receive(fs[2:]); n != 1 || fs[2].N != 2 || fs[2].Len() != 3845 {
			t.Fatalf("round %d: received %d, %d pieces", round, n, fs[2].N)
		}
		for i := range 3 {
			f.Release(&fs[i])
		}
	}
	f.Receive(fs)
	if _, n := f.fillOut.Peek(64); n != 32 {
		t.Errorf("%d of 32 chunks are back in the fill ring", n)
	}
}

// TestReceiveTooLong checks that the chunks of a chain that is too long for a frame are used again once each, though the
// chain arrives in two parts.
func TestReceiveTooLong(t *testing.T) {
	f := newFake(9000, 64, 32)
	fs := make([]link.Frame, 4)
	pieces := make([][]byte, link.MaxPieces+2)
	for i := range pieces {
		pieces[i] = []byte{byte(i)}
	}
	for round := range 4 {
		f.Receive(fs) // fills the fill ring
		f.arrive(t, false, pieces...)
		if n := f.Receive(fs); n != 0 {
			t.Fatalf("round %d: received half a frame", round)
		}
		f.arrive(t, true, []byte{1})
		if n := f.Receive(fs); n != 0 || f.stats.RxInvalid != uint64(round+1) {
			t.Fatalf("round %d: received %d, %d invalid", round, n, f.stats.RxInvalid)
		}
	}
	f.Receive(fs)
	seen := make(map[uint64]bool)
	at, n := f.fillOut.Peek(64)
	for i := range n {
		seen[f.fillAddrs[f.fillOut.Mask(at+i)]] = true
	}
	if n != 32 || len(seen) != 32 {
		t.Errorf("%d entries in the fill ring for %d of 32 chunks", n, len(seen))
	}
}

func TestReceiveRefusesBadDescriptors(t *testing.T) {
	f := newFake(9000, 64, 32)
	fs := make([]link.Frame, 4)
	good := []byte("a frame that is good")
	for _, d := range []unix.XDPDesc{
		{Addr: f.rxMem - 10, Len: 11}, // reaches into the TX half
		{Addr: f.rxMem, Len: 60},
		{Addr: ^uint64(0), Len: 60}, // wraps
		{Addr: 0, Len: FrameSize + 1},
		{Addr: 1 << 40, Len: 60},
	} {
		f.desc(t, d)
		f.arrive(t, true, good)
		if n := f.Receive(fs); n != 1 || !bytes.Equal(fs[0].Pieces[0], good) {
			t.Fatalf("%+v: received %d", d, n)
		}
		f.Release(&fs[0])
	}
	var long [][]byte
	for range link.MaxPieces + 2 {
		long = append(long, good)
	}
	f.arrive(t, true, long...)
	if n := f.Receive(fs); n != 0 {
		t.Errorf("received %d of a chain that is too long", n)
	}
	f.Receive(fs)
	if _, n := f.fillOut.Peek(64); n != 32 {
		t.Errorf("%d of 32 chunks are back in the fill ring", n)
	}
	if f.stats.RxInvalid != 6 || f.stats.RxFrames != 5 {
		t.Errorf("stats %+v", f.stats)
	}
}

func TestPostCutsAtChunks(t *testing.T) {
	f := newFake(9000, 64, 32)
	for _, tc := range []struct {
		off, n int
		want   []uint32
	}{
		{0, 60, []uint32{60}},
		{0, 4096, []uint32{4096}},
		{1, 4096, []uint32{4095, 1}},
		{100, 9014, []uint32{3996, 4096, 922}},
		{4090, 8198, []uint32{6, 4096, 4096}},
		{4096, 60, []uint32{60}},
	} {
		s, _ := f.Alloc()
		if !f.Post(s, tc.off, tc.n) {
			t.Fatalf("%+v: refused", tc)
		}
		f.Flush()
		ds := f.sent()
		if len(ds) != len(tc.want) {
			t.Fatalf("%+v: %d descriptors", tc, len(ds))
		}
		next := f.rxMem + uint64(int(s)*f.SlotSize()+tc.off)
		for i, d := range ds {
			last := i == len(ds)-1
			if d.Addr != next || d.Len != tc.want[i] || (d.Options == 0) != last || d.Addr/4096 != (d.Addr+uint64(d.Len)-1)/4096 {
				t.Errorf("%+v: descriptor %d is %+v", tc, i, d)
			}
			next += uint64(d.Len)
		}
		// Only the last completion of a chain reaps the slot.
		done := make([]link.Slot, 4)
		for i, d := range ds {
			f.complete(d.Addr)
			want := 0
			if i == len(ds)-1 {
				want = 1
			}
			if n := f.Reap(done); n != want || n == 1 && done[0] != s {
				t.Errorf("%+v: reaped %d after %d of %d completions", tc, n, i+1, len(ds))
			}
		}
		f.Free(s)
	}
	if f.FreeSlots() != f.Slots() {
		t.Errorf("%d of %d slots free", f.FreeSlots(), f.Slots())
	}
}

// TestHalfSlots checks that short frames have two slots in a chunk, and that no slot crosses into the next.
func TestHalfSlots(t *testing.T) {
	for _, tc := range []struct{ mtu, size, rxFrames int }{
		{576, 2048, 32}, {1500, 2048, 32}, {1898, 2048, 32}, {1899, 4096, 32}, {3498, 4096, 32}, {4052, 4096, 16}, {9000, 3 * 4096, 10},
	} {
		f := newFake(tc.mtu, 64, 32)
		if f.SlotSize() != tc.size || f.Slots() != 32*4096/tc.size || f.RxFrames() != tc.rxFrames {
			t.Errorf("MTU %d: %d slots of %d, %d frames; want %d slots of %d, %d frames", tc.mtu, f.Slots(), f.SlotSize(), f.RxFrames(), 32*4096/tc.size, tc.size, tc.rxFrames)
		}
	}
	f := newFake(1500, 64, 128)
	seen := map[uint64]bool{}
	for range f.Slots() {
		s, _ := f.Alloc()
		f.Bytes(s)[2047] = byte(s)
		if !f.Post(s, 70, 1500) || !f.Posted(s) {
			t.Fatalf("slot %d is not posted", s)
		}
	}
	f.Flush()
	ds := f.sent()
	for _, d := range ds {
		if d.Len != 1500 || d.Options != 0 || d.Addr%4096%2048 != 70 || d.Addr < f.rxMem || seen[d.Addr] {
			t.Errorf("descriptor %+v", d)
		}
		seen[d.Addr] = true
		f.complete(d.Addr)
	}
	done := make([]link.Slot, 128)
	if n := f.Reap(done); len(ds) != f.Slots() || n != f.Slots() {
		t.Errorf("%d descriptors and %d reaped of %d slots", len(ds), n, f.Slots())
	}
}

func TestPostWantsRoomForTheWholeChain(t *testing.T) {
	f := newFake(9000, 64, 4)
	a, _ := f.Alloc()
	b, _ := f.Alloc()
	if !f.Post(a, 0, 9000) || f.Post(b, 0, 9000) || !f.Post(b, 0, 4096) {
		t.Error("a chain of 3 in a ring of 4 leaves room for 1")
	}
	f.Flush()
	if ds := f.sent(); len(ds) != 4 {
		t.Errorf("%d descriptors", len(ds))
	}
}

func TestReapIgnoresStrangeCompletions(t *testing.T) {
	f := newFake(1500, 64, 32)
	s, _ := f.Alloc()
	f.Post(s, 0, 60)
	f.Flush()
	addr := f.sent()[0].Addr
	done := make([]link.Slot, 8)
	// Addresses in the RX half, beyond the memory and of a slot that was not posted, and then the right one, twice.
	f.complete(0, 1<<40, f.rxMem+uint64((int(s)+1)*f.SlotSize()), addr, addr)
	if n := f.Reap(done); n != 1 || done[0] != s {
		t.Errorf("reaped %v", done[:n])
	}
	if f.stats.TxErrors != 4 {
		t.Errorf("stats %+v", f.stats)
	}
}

// TestFlushBehind checks that frames that the kernel has not accepted are offered again by each Flush, and that a
// worker does not sleep for long meanwhile.
func TestFlushBehind(t *testing.T) {
	f := newFake(1500, 64, 32)
	f.txFlag.Store(unix.XDP_RING_NEED_WAKEUP)
	slot, _ := f.Alloc()
	f.Post(slot, 0, 60)
	for n := range uint64(3) {
		if f.Flush(); f.stats.Kicks != n+1 || f.stats.TxIncomplete != n+1 {
			t.Fatalf("after %d kicks: %+v", n, f.stats)
		}
	}
	start := clock.Now()
	f.Wait(time.Minute, -1)
	if d := clock.Now().Sub(start); d > 30*time.Second {
		t.Errorf("slept for %v", d)
	}
	if n := len(f.sent()); n != 1 {
		t.Errorf("%d frames", n)
	}
	for range 3 {
		f.Flush()
	}
	if f.stats.Kicks != 3 {
		t.Errorf("%d kicks; the last have nothing to send", f.stats.Kicks)
	}
}

// TestFillLevel checks that the fill ring is kept short while frames return at once, that it grows when a burst
// nearly empties it, and that it shrinks after a long quiet time.
func TestFillLevel(t *testing.T) {
	f := newFake(1500, 8192, 4096)
	level := func() int { return int(f.fill.Pending()) }
	burst := func(n int) {
		t.Helper()
		fs := make([]link.Frame, n)
		for range n {
			f.arrive(t, true, []byte("a frame"))
		}
		if got := f.Receive(fs); got != n {
			t.Fatalf("received %d of %d", got, n)
		}
		for i := range fs {
			f.Release(&fs[i])
		}
		f.Flush()
	}
	if level() != leastFill {
		t.Fatalf("%d chunks in the fill ring at the start, want %d", level(), leastFill)
	}
	used := map[uint64]bool{}
	for range 200 {
		burst(64)
		for _, a := range f.fillAddrs {
			used[a] = true
		}
	}
	if level() != leastFill {
		t.Errorf("%d chunks in the fill ring after short bursts, want %d", level(), leastFill)
	}
	if len(used) > leastFill+64+1 { // address 0 stands in entries that were never written
		t.Errorf("short bursts passed through %d chunks, want those that are in use and no more", len(used))
	}
	for want := leastFill; want < 4096; {
		want = min(2*want, 4096)
		burst(level() - 1)
		if level() != want {
			t.Fatalf("%d chunks in the fill ring after a burst that took nearly all, want %d", level(), want)
		}
	}
	burst(4095)
	if level() != 4096 {
		t.Errorf("%d chunks in the fill ring, want all 4096", level())
	}
	for range 10 * shrinkAfter / 64 {
		burst(64)
	}
	if level() != leastFill {
		t.Errorf("%d chunks in the fill ring after a long quiet, want %d", level(), leastFill)
	}
}

// TestFillHoldsWindow checks that a new fill ring has room for a receive window of super-frames that arrive while the
// worker waits for a CPU: 64 KiB each, in 17 chunks.
func TestFillHoldsWindow(t *testing.T) {
	f := newFake(1500, 8192, 4096)
	pieces := make([][]byte, 17)
	for i := range pieces {
		pieces[i] = make([]byte, 3840)
	}
	const window = 2 << 20 // of tcp.DefaultConfig
	n := window/(45*1448) + 1
	for range n {
		f.arrive(t, true, pieces...) // fails if the ring is empty
	}
	if got := f.Receive(make([]link.Frame, n)); got != n {
		t.Errorf("received %d super-frames of %d", got, n)
	}
}
