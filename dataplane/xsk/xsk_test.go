package xsk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const port = 7174

// side is a socket on one end of a veth pair, with its program.
type side struct {
	*Socket
	steer *bpf.Steering
	end   *testenv.End
}

// openSide attaches the program and opens a socket, both in the given mode.
func openSide(t testing.TB, e *testenv.End, mode bpf.Mode, cfg Config) *side {
	t.Helper()
	s := &side{end: e}
	var err error
	if s.steer, err = bpf.Load(bpf.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.steer.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := s.steer.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Addr: netip.Addr{}, Port: port}); err != nil {
		t.Fatal(err)
	}
	cfg.Interface, cfg.Generic = e.Name, mode == bpf.Generic
	e.NS.Run(t, func() error {
		if _, err := s.steer.Attach(e.Index, mode); err != nil {
			return err
		}
		s.Socket, err = Open(cfg)
		return err
	})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := s.steer.SetSocket(0, s.FD()); err != nil {
		t.Fatal(err)
	}
	return s
}

// tuple is the flow from one end to the other.
func tuple(from, to *testenv.End) pkt.Tuple {
	return pkt.Tuple{
		Flow:   pkt.NewFlow(netip.AddrPortFrom(from.Addr4, port), netip.AddrPortFrom(to.Addr4, port)),
		Proto:  pkt.ProtoTCP,
		SrcMAC: [6]byte(from.MAC), DstMAC: [6]byte(to.MAC),
	}
}

// fillFrame writes a frame of n bytes that contains a number.
func fillFrame(b []byte, tu *pkt.Tuple, id uint32) {
	h := tu.HeaderLen()
	tu.Put(b, len(b)-h, 0)
	for i := h; i < len(b); i++ {
		b[i] = byte(i) ^ byte(id)
	}
	binary.BigEndian.PutUint16(b[h:], port)
	binary.BigEndian.PutUint16(b[h+2:], port)
	binary.BigEndian.PutUint32(b[h+4:], id)
}

func join(f *link.Frame) []byte {
	var b []byte
	for _, p := range f.Pieces[:f.N] {
		b = append(b, p...)
	}
	return b
}

// exchange sends frames of the given lengths from a to b and checks that each arrives once, in order and complete,
// and that each slot is reaped once.
func exchange(t *testing.T, a, b *side, off int, lengths []int, total int) {
	t.Helper()
	tu := tuple(a.end, b.end)
	fs := make([]link.Frame, 64)
	done := make([]link.Slot, 64)
	want := make([]byte, a.SlotSize())
	sent, got, reaped := 0, 0, 0
	posted := map[link.Slot]bool{}
	for until := clock.Now().Add(time.Minute); got < total || reaped < total; {
		if clock.Now() > until {
			t.Fatalf("sent %d, received %d, reaped %d of %d", sent, got, reaped, total)
		}
		for i := 0; i < 40 && sent < total; i++ {
			s, ok := a.Alloc()
			if !ok {
				break
			}
			n := lengths[sent%len(lengths)]
			fillFrame(a.Bytes(s)[off:off+n], &tu, uint32(sent))
			if !a.Post(s, off, n) {
				a.Free(s)
				break
			}
			if posted[s] {
				t.Fatalf("slot %d allocated while posted", s)
			}
			posted[s] = true
			sent++
		}
		a.Flush()
		for _, s := range done[:a.Reap(done)] {
			if !posted[s] {
				t.Fatalf("slot %d reaped twice", s)
			}
			delete(posted, s)
			a.Free(s)
			reaped++
		}
		for i := range b.Receive(fs) {
			f := &fs[i]
			n := lengths[got%len(lengths)]
			fillFrame(want[:n], &tu, uint32(got))
			if !bytes.Equal(join(f), want[:n]) {
				t.Fatalf("frame %d: %d bytes in %d pieces, differs from what was sent", got, f.Len(), f.N)
			}
			var p pkt.Packet
			if err := p.Parse(f.Pieces[0], f.Len()); err != nil || p.L4Len != n-34 {
				t.Fatalf("frame %d: L4Len %d, %v", got, p.L4Len, err)
			}
			got++
			b.Release(f)
		}
	}
}

func TestFramesBothWays(t *testing.T) {
	for _, mode := range []bpf.Mode{bpf.Generic, bpf.Native} {
		for _, mtu := range []int{1500, 3498, 9000} {
			t.Run(fmt.Sprintf("%v/%d", mode, mtu), func(t *testing.T) {
				testenv.OneCPU(t)
				v := testenv.NewVeth(t, mtu)
				cfg := Config{Frames: 1024, Ring: 512}
				a, b := openSide(t, &v.A, mode, cfg), openSide(t, &v.B, mode, cfg)
				if a.MTU() != mtu || a.SlotSize() < mtu+link.HeaderRoom || a.sg != (mode == bpf.Generic || mtu > 3498) {
					t.Fatalf("MTU %d, slot size %d, multi-buffer %v", a.MTU(), a.SlotSize(), a.sg)
				}
				lengths := []int{60, 64, 1514, 590}
				if mtu > 1500 {
					lengths = append(lengths, mtu+14, 3500)
				}
				if mtu > 4096 {
					lengths = append(lengths, 4096, 4097, 8192, 8193)
				}
				// There are more frames than chunks, so that every chunk is reused.
				exchange(t, a, b, 0, lengths, 1500)
				exchange(t, b, a, 8, lengths, 1500)
				var st link.Stats
				a.Stats(&st)
				if st.TxFrames != 1500 || st.RxFrames != 1500 || st.RxRingFull+st.RxDropped+st.RxInvalid+st.TxInvalid != 0 {
					t.Errorf("stats %+v", st)
				}
				if a.FreeSlots() != a.Slots() {
					t.Errorf("%d of %d slots free at the end", a.FreeSlots(), a.Slots())
				}
			})
		}
	}
}

func TestPostRefuses(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a := openSide(t, &v.A, bpf.Generic, Config{Frames: 64, Ring: 4})
	tu := tuple(&v.A, &v.B)
	var slots []link.Slot
	for range 6 {
		s, ok := a.Alloc()
		if !ok {
			t.Fatal("no slot")
		}
		fillFrame(a.Bytes(s)[:100], &tu, 0)
		slots = append(slots, s)
	}
	for i, s := range slots {
		if ok := a.Post(s, 0, 100); ok != (i < 4) {
			t.Errorf("Post %d: %v with a ring of 4", i, ok)
		}
	}
	if a.Post(slots[0], 0, 100) {
		t.Error("a posted slot was posted again")
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("a posted slot was freed")
			}
		}()
		a.Free(slots[0])
	}()
	if !a.Post(slots[5], 0, 1500+link.HeaderRoom+1) {
		t.Error("an impossible frame must be taken and counted, or the worker tries forever")
	}
	reaped := map[link.Slot]int{}
	done := make([]link.Slot, 2)
	for until := clock.Now().Add(time.Minute); len(reaped) < 5 && clock.Now() < until; {
		a.Flush()
		for _, s := range done[:a.Reap(done)] {
			reaped[s]++
		}
	}
	for i, s := range slots {
		if want := map[bool]int{true: 1}[i != 4]; reaped[s] != want {
			t.Errorf("slot %d reaped %d times, want %d", i, reaped[s], want)
		}
	}
	var st link.Stats
	if a.Stats(&st); st.TxInvalid != 1 || st.TxFrames != 4 {
		t.Errorf("stats %+v", st)
	}
}

func TestWait(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	a, b := openSide(t, &v.A, bpf.Generic, Config{Frames: 64, Ring: 64}), openSide(t, &v.B, bpf.Generic, Config{Frames: 64, Ring: 64})
	var longest time.Duration
	for range 5 { // a signal may cut one short
		start := clock.Now()
		b.Wait(3*time.Millisecond, -1)
		longest = max(longest, clock.Now().Sub(start))
	}
	if longest < 3*time.Millisecond {
		t.Errorf("woke after %v with nothing there", longest)
	}
	fd, err := unix.Eventfd(1, unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if !b.Wait(time.Hour, fd) {
		t.Error("not woken by wakefd")
	}
	// A frame that arrives while b sleeps wakes it.
	woken := make(chan int)
	go func() {
		fs := make([]link.Frame, 1)
		n := 0
		for n == 0 {
			b.Wait(time.Hour, -1)
			n = b.Receive(fs)
		}
		woken <- n
	}()
	tu := tuple(&v.A, &v.B)
	s, _ := a.Alloc()
	fillFrame(a.Bytes(s)[:100], &tu, 1)
	a.Post(s, 0, 100)
	a.Flush()
	select {
	case <-woken:
	case <-time.After(time.Minute):
		t.Fatal("a frame did not wake the sleeper")
	}
}

// TestCloseFreesQueue opens a queue repeatedly. Each Close must free it, which the rings that asavie/xdp leaves
// mapped would prevent.
func TestCloseFreesQueue(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	for i := range 3 {
		v.A.NS.Run(t, func() error {
			s, err := Open(Config{Interface: v.A.Name, Frames: 64, Ring: 64})
			if err != nil {
				return err
			}
			if i == 0 {
				if _, err := Open(Config{Interface: v.A.Name, Frames: 64, Ring: 64, BindRetry: -1}); !errors.Is(err, ErrBusy) {
					t.Errorf("second socket on a queue: %v", err)
				}
			}
			return s.Close()
		})
	}
	maps := testenv.ReadFile(t, "/proc/self/maps")
	if n := strings.Count(string(maps), " socket:["); n != 0 {
		t.Errorf("%d mappings of sockets left", n)
	}
}

// TestOpenWithFewDescriptors checks that Open fails with any number of free descriptors that is too low, and keeps no
// queue then.
func TestOpenWithFewDescriptors(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	cfg := Config{Interface: v.A.Name, Frames: 64, Ring: 64}
	v.A.NS.Run(t, func() error {
		for free := range 16 {
			restore := testenv.FewFiles(t, free)
			s, err := Open(cfg)
			restore()
			if err == nil {
				return s.Close()
			}
			if !errors.Is(err, unix.EMFILE) {
				return fmt.Errorf("%d free descriptors: %w", free, err)
			}
			if s, err = Open(cfg); err != nil {
				return fmt.Errorf("after %d free descriptors: %w", free, err)
			}
			if err := s.Close(); err != nil {
				return err
			}
		}
		return errors.New("16 free descriptors do not suffice")
	})
}

func TestCloseLeavesNoProgram(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	xdpOf := func() (attached bool) {
		v.A.NS.Run(t, func() error {
			l, err := netlink.LinkByName(v.A.Name)
			attached = err == nil && l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached
			return err
		})
		return attached
	}
	a := openSide(t, &v.A, bpf.Native, Config{Frames: 64, Ring: 64})
	if !xdpOf() {
		t.Error("no program while open")
	}
	if err := errors.Join(a.Close(), a.steer.Close()); err != nil {
		t.Fatal(err)
	}
	if xdpOf() {
		t.Error("program left behind")
	}
}

func TestOpenErrors(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	for name, cfg := range map[string]Config{
		"no interface":     {Interface: "nothere"},
		"no queue":         {Interface: v.A.Name, Queue: 7, BindRetry: -1},
		"ring":             {Interface: v.A.Name, Ring: 1000},
		"MTU":              {Interface: v.A.Name, MTU: 40000},
		"too few for MTU":  {Interface: v.A.Name, MTU: 9000, Frames: 8},
		"a negative queue": {Interface: v.A.Name, Queue: -1},
	} {
		if err := v.A.NS.Do(func() error {
			s, err := Open(cfg)
			if err == nil {
				return errors.Join(errors.New("opened"), s.Close())
			}
			t.Logf("%s: %v", name, err)
			return nil
		}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOpenWithoutPrivileges(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	testenv.WithoutPrivileges(t, v.A.NS, func() {
		s, err := Open(Config{Interface: v.A.Name, Frames: 64, Ring: 64})
		if !errors.Is(err, ErrPrivilege) {
			t.Errorf("Open: %v", err)
		}
		if err == nil {
			_ = s.Close()
		}
	})
}
