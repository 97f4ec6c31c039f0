package ifqueue

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	ebpflink "github.com/cilium/ebpf/link"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const port = 7174

// open opens the queues of one end and claims the port there.
func open(t *testing.T, e *testenv.End, cfg Config) (*Set, *bpf.Steering) {
	t.Helper()
	cfg.Interface = e.Name
	if cfg.Queues == nil {
		cfg.Queues = []int{0}
	}
	var s *Set
	var steer *bpf.Steering
	if err := e.NS.Do(func() (err error) {
		if steer, err = bpf.Load(bpf.Options{Endpoints: 64}); err != nil {
			return err
		}
		if s, err = Open(steer, cfg); err != nil {
			return errors.Join(err, steer.Close())
		}
		return steer.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Port: port})
	}); errors.Is(err, bpf.ErrNoIngress) {
		testenv.Skip(t, "%v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), steer.Close()); err != nil {
			t.Error(err)
		}
	})
	return s, steer
}

// receive waits until one of the links receives a frame that want accepts.
func receive(links []link.Link, want func(b []byte) bool) (on int) {
	fs := make([]link.Frame, 16)
	for until := clock.Now().Add(time.Minute); clock.Now() < until; {
		for i, l := range links {
			found := false
			for j := range l.Receive(fs) {
				var b []byte
				for _, p := range fs[j].Pieces[:fs[j].N] {
					b = append(b, p...)
				}
				found = found || want(b)
				l.Release(&fs[j])
			}
			if found {
				return i
			}
			l.Wait(time.Millisecond, -1)
		}
	}
	return -1
}

// TestKinds checks which kind Auto takes on veth, and that an explicit kind is taken.
func TestKinds(t *testing.T) {
	for _, tc := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "packet ring"},
		{Config{Link: Packet, Mode: bpf.Generic}, "packet ring"},
		{Config{Link: XDP}, "generic, copy"},
		{Config{Mode: bpf.Native}, "native, copy"},
	} {
		v := testenv.NewVethOffloads(t, 1500)
		tc.cfg.Super = true
		if s, _ := open(t, &v.A, tc.cfg); s.Mode != tc.want || !s.Local || !s.Super {
			t.Errorf("%+v: mode %q, local %v, super-frames %v; want %q", tc.cfg, s.Mode, s.Local, s.Super, tc.want)
		}
	}
}

// TestStopsMerging checks that the offload that leaves a wrong checksum in merged frames is turned off where these
// arrive.
func TestStopsMerging(t *testing.T) {
	for _, tc := range []struct {
		cfg  Config
		want bool
	}{{Config{}, false}, {Config{Link: XDP}, false}, {Config{Mode: bpf.Native}, true}} {
		v := testenv.NewVethOffloads(t, 1500)
		const feature = "rx-gro-list"
		merges := func(set bool) (on bool) {
			t.Helper()
			if err := v.A.NS.Do(func() error {
				e, err := ethtool.NewEthtool()
				if err != nil {
					return err
				}
				defer e.Close()
				if set {
					if err := e.Change(v.A.Name, map[string]bool{feature: true}); err != nil {
						return err
					}
				}
				have, err := e.Features(v.A.Name)
				on = have[feature]
				return err
			}); err != nil {
				t.Fatal(err)
			}
			return on
		}
		if !merges(true) {
			testenv.Skip(t, "this kernel has no %s", feature)
		}
		if open(t, &v.A, tc.cfg); merges(false) != tc.want {
			t.Errorf("%+v: %s is %v, want %v", tc.cfg, feature, !tc.want, tc.want)
		}
	}
}

// TestFallsBack checks that where the kernel takes no program at tc ingress, Auto takes XDP and says why, and that
// Packet fails and leaves nothing behind.
func TestFallsBack(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	attach := func() error {
		return v.A.NS.Do(func() error {
			prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.SchedCLS, License: "GPL",
				Instructions: asm.Instructions{asm.LoadImm(asm.R0, -1, asm.DWord), asm.Return()},
			})
			if err != nil {
				return err
			}
			defer prog.Close()
			l, err := ebpflink.AttachTCX(ebpflink.TCXOptions{Program: prog, Interface: v.A.Index, Attach: ebpf.AttachTCXIngress})
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		})
	}
	if err := attach(); err != nil {
		testenv.Skip(t, "programs at tc ingress: %v", err)
	}
	var full error
	for full == nil {
		full = attach()
	}
	if !errors.Is(full, unix.ERANGE) {
		t.Fatal(full)
	}
	var why error
	s, steer := open(t, &v.A, Config{FellBack: func(err error) { why = err }})
	if s.Mode != "generic, copy" || why == nil || !strings.Contains(why.Error(), "ingress") {
		t.Errorf("mode %q, because of %v", s.Mode, why)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := v.A.NS.Do(func() error {
		if _, err := Open(steer, Config{Interface: v.A.Name, Queues: []int{0}, Link: Packet}); err == nil {
			return errors.New("opened packet sockets where no program can be attached")
		}
		why = nil
		if _, err := Open(steer, Config{Interface: v.A.Name, Queues: []int{99}, FellBack: func(err error) { why = err }}); err == nil || why != nil {
			return fmt.Errorf("opened a queue that does not exist: %v; it is said to be by XDP because of %v", err, why)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// TestShort checks that Auto does not take XDP, for as long as the daemon runs, because descriptors were short for a
// moment.
func TestShort(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	var why error
	if err := v.A.NS.Do(func() error {
		steer, err := bpf.Load(bpf.Options{Endpoints: 64})
		if err != nil {
			return err
		}
		defer steer.Close()
		restore := testenv.FewFiles(t, 1) // enough for all but the second socket for packets
		_, err = Open(steer, Config{Interface: v.A.Name, Queues: []int{0}, FellBack: func(err error) { why = err }})
		restore()
		if !errors.Is(err, unix.EMFILE) || !strings.Contains(err.Error(), "packet socket") {
			t.Errorf("opened with one descriptor: %v", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if why != nil {
		t.Errorf("XDP was tried because of %v", why)
	}
}

// TestKernelKeepsItsOwn checks that the kernel's own traffic passes, that claimed packets reach only the link, and
// that the kernel does not respond to them.
func TestKernelKeepsItsOwn(t *testing.T) {
	for _, tc := range []struct {
		name   string
		kind   Kind
		beside bool // generic XDP of another program
	}{{"xdp", XDP, false}, {"packet", Packet, false}, {"packet beside XDP", Packet, true}} {
		t.Run(tc.name, func(t *testing.T) {
			v := testenv.NewVethOffloads(t, 1500)
			if tc.beside {
				v.B.NS.Run(t, func() error { return passXDP(t, v.B.Index) })
			}
			s, steer := open(t, &v.B, Config{Link: tc.kind})
			if c, err := v.A.Dial(t.Context(), v.B.Listen(t, v.B.Addr4).Addr().String()); err != nil {
				t.Errorf("the kernel's own port: %v", err)
			} else {
				c.Close()
			}
			dialed, giveUp := dial(t, &v.A, netip.AddrPortFrom(v.B.Addr4, port))
			var p pkt.Packet
			if on := receive(s.Links, func(b []byte) bool { return p.Parse(b, len(b)) == nil }); on < 0 || p.Flow.LocalPort != port {
				t.Errorf("no SYN came: %+v", p.Flow)
			}
			select {
			case err := <-dialed:
				t.Errorf("connect to the claimed port: %v", err)
			case <-time.After(300 * time.Millisecond): // a RST would have arrived
				giveUp()
				<-dialed
			}
			c, err := steer.Counters()
			if err != nil || c.SteeredTCP == 0 || c.Passed == 0 || c.Malformed+c.NoSocket != 0 {
				t.Errorf("counters %+v, %v", c, err)
			}
		})
	}
}

// passXDP attaches a generic XDP program that passes all frames, for which the kernel copies them.
func passXDP(t *testing.T, ifindex int) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL", Flags: unix.BPF_F_XDP_HAS_FRAGS,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer prog.Close()
	l, err := ebpflink.AttachXDP(ebpflink.XDPOptions{Program: prog, Interface: ifindex, Flags: ebpflink.XDPGenericMode})
	if err == nil {
		t.Cleanup(func() { l.Close() })
	}
	return err
}

// dial connects with the kernel's TCP to an address where nothing responds.
func dial(t *testing.T, from *testenv.End, to netip.AddrPort) (<-chan error, func()) {
	ctx, giveUp := context.WithCancel(t.Context())
	dialed := make(chan error, 1)
	go func() {
		c, err := from.Dial(ctx, to.String())
		if err == nil {
			err = errors.Join(errors.New("connected"), c.Close())
		}
		dialed <- err
	}()
	return dialed, giveUp
}

// TestSharedByFlow checks that each connection is received on one of several links, and that several links are used.
func TestSharedByFlow(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s, _ := open(t, &v.B, Config{Link: Packet, Queues: []int{0, 1, 2}})
	a := raw(t, &v.A)
	used := map[int]bool{}
	for sport := uint16(1000); sport < 1030; sport++ {
		first := -1
		for range 3 {
			send(t, a, tcpFrame(v, sport, 0, 20))
			on := receive(s.Links, func(b []byte) bool { return binary.BigEndian.Uint16(b[34:]) == sport })
			if first < 0 {
				first = on
			}
			if on < 0 || on != first {
				t.Fatalf("flow %d came by link %d, and then by %d", sport, first, on)
			}
		}
		used[first] = true
	}
	if len(used) != 3 {
		t.Errorf("%d of 3 links are used", len(used))
	}
}

// TestVLANs checks that frames have their outer tag, which the kernel removes before any program sees the frame and
// which the programs restore.
func TestVLANs(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s, steer := open(t, &v.B, Config{Link: Packet})
	if err := steer.SetVLANs([][]uint16{{5}, {5, 9}}); err != nil {
		t.Fatal(err)
	}
	a := raw(t, &v.A)
	other := tcpFrame(v, 1000, 1, 20)
	binary.BigEndian.PutUint16(other[14:], 6)
	send(t, a, other)
	for tags := range 3 {
		want := tcpFrame(v, 1000, tags, 20)
		send(t, a, want)
		if receive(s.Links, func(b []byte) bool {
			if bytes.Equal(b, other) {
				t.Error("a frame of another VLAN came")
			}
			return bytes.Equal(b, want)
		}) < 0 {
			t.Errorf("a frame with %d tags did not come", tags)
		}
	}
}

// TestFragments checks that fragments arrive by the ring of the programs, with their tags, and not by the link.
func TestFragments(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	_, steer := open(t, &v.B, Config{Link: Packet})
	ring, err := steer.Fragments()
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	a := raw(t, &v.A)
	for tags := range 3 {
		for _, want := range testenv.Cut(tcpFrame(v, 1000, tags, 64), 32, uint32(tags+1)) {
			send(t, a, want)
			got, err := ring.Read(time.Now().Add(time.Minute))
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d tags: %v\n%x came of\n%x", tags, err, got, want)
			}
		}
	}
	if c, err := steer.Counters(); err != nil || c.SteeredFragment != 6 || c.SteeredTCP != 0 {
		t.Errorf("counters %+v, %v", c, err)
	}
}

func raw(t *testing.T, e *testenv.End) (p *link.Packet) {
	t.Helper()
	e.NS.Run(t, func() (err error) {
		p, err = link.OpenPacket(e.Name, link.PacketOptions{})
		return err
	})
	t.Cleanup(func() { p.Close() })
	return p
}

func tcpFrame(v *testenv.Veth, sport uint16, tags, n int) []byte {
	tu := pkt.Tuple{
		Flow:  pkt.NewFlow(netip.AddrPortFrom(v.A.Addr4, sport), netip.AddrPortFrom(v.B.Addr4, port)),
		Proto: pkt.ProtoTCP, SrcMAC: [6]byte(v.A.MAC), DstMAC: [6]byte(v.B.MAC), NVLAN: tags, VLANs: [2]uint16{5, 9},
	}
	b := make([]byte, tu.HeaderLen()+n)
	tu.Put(b, n, 0)
	binary.BigEndian.PutUint16(b[tu.HeaderLen():], sport)
	binary.BigEndian.PutUint16(b[tu.HeaderLen()+2:], port)
	return b
}

func send(t *testing.T, l link.Link, frame []byte) {
	t.Helper()
	s, ok := l.Alloc()
	if !ok {
		t.Fatal("no slot")
	}
	copy(l.Bytes(s), frame)
	l.Post(s, 0, len(frame))
	l.Flush()
	var done [1]link.Slot
	if l.Reap(done[:]) != 1 {
		t.Fatal("not sent")
	}
	l.Free(done[0])
}

// TestInterfaceDownAndGone removes the interface below a packet socket. The link must go on sleeping, and receive
// again when the interface is back.
func TestInterfaceDownAndGone(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	s, _ := open(t, &v.B, Config{Link: Packet})
	set := func(do func(netlink.Link) error) {
		t.Helper()
		v.B.NS.Run(t, func() error {
			l, err := netlink.LinkByName(v.B.Name)
			if err != nil {
				return err
			}
			return do(l)
		})
	}
	sleeps := func(when string) {
		t.Helper()
		fs := make([]link.Frame, 4)
		start := clock.Now()
		const waits = 20
		for range waits {
			s.Links[0].Wait(2*time.Millisecond, -1)
			s.Links[0].Receive(fs)
		}
		if d := clock.Now().Sub(start); d < waits/4*time.Millisecond {
			t.Errorf("%s: %d Waits took %v", when, waits, d)
		}
	}
	set(netlink.LinkSetDown)
	sleeps("down")
	set(netlink.LinkSetUp)
	a := raw(t, &v.A)
	came := false
	for until := clock.Now().Add(time.Minute); !came && clock.Now() < until; {
		send(t, a, tcpFrame(v, 1000, 0, 20)) // lost until the link is up
		fs := make([]link.Frame, 4)
		s.Links[0].Wait(10*time.Millisecond, -1)
		for i := range s.Links[0].Receive(fs) {
			came = true
			s.Links[0].Release(&fs[i])
		}
	}
	if !came {
		t.Error("nothing comes after the interface is up again")
	}
	set(netlink.LinkDel)
	sleeps("gone")
	if err := s.Close(); err != nil {
		t.Error(fmt.Errorf("close: %w", err))
	}
}

// TestSuperFramesWhole checks that super-frames arrive complete, in order with the frames between them, and that all
// memory is returned, whether they are released at once or held.
func TestSuperFramesWhole(t *testing.T) {
	testenv.OneCPU(t)
	v := testenv.NewVethOffloads(t, 1500)
	s, _ := open(t, &v.B, Config{Link: Packet, Memory: 4 << 20})
	a := superSender(t, v)
	super := superFrame(v, 43, 1448)
	var whole []byte
	for _, p := range super.Parts {
		whole = append(whole, p...)
	}
	b := s.Links[0]
	var held []link.Frame
	next := func() (got []byte) {
		fs := make([]link.Frame, 1)
		for until := clock.Now().Add(time.Minute); clock.Now() < until; b.Wait(time.Millisecond, -1) {
			if b.Receive(fs) == 1 {
				for _, p := range fs[0].Pieces[:fs[0].N] {
					got = append(got, p...)
				}
				held = append(held, fs[0])
				break
			}
		}
		return got
	}
	for round := range 4 * b.RxFrames() / 17 {
		small := tcpFrame(v, uint16(round), 0, 20)
		if !a.SendSuper(super) {
			t.Fatal("not sent")
		}
		send(t, a, small)
		if got := next(); !bytes.Equal(got, whole) {
			t.Fatalf("round %d: %d bytes came of %d", round, len(got), len(whole))
		}
		if got := next(); !bytes.Equal(got, small) {
			t.Fatalf("round %d: %x came of %x", round, got, small)
		}
		if len(held) > 20 { // release the newest first, out of order
			for i := len(held) - 1; i >= 0; i-- {
				b.Release(&held[i])
			}
			held = held[:0]
		}
	}
	var st link.Stats
	if b.Stats(&st); st.RxDropped+st.RxRingFull+st.RxInvalid != 0 {
		t.Errorf("lost: %+v", st)
	}
}

// superSender opens a packet socket on A that sends super-frames.
func superSender(t *testing.T, v *testenv.Veth) (a *link.Packet) {
	t.Helper()
	v.A.NS.Run(t, func() (err error) {
		a, err = link.OpenPacket(v.A.Name, link.PacketOptions{Super: true})
		return err
	})
	t.Cleanup(func() { a.Close() })
	if a.SuperBytes() == 0 {
		testenv.Skip(t, "the kernel takes no super-frames")
	}
	return a
}

// TestShortSuperFrames checks that super-frames no longer than the start of others, which a sender of small
// segments makes, do not fill the memory for long ones.
func TestShortSuperFrames(t *testing.T) {
	testenv.OneCPU(t)
	v := testenv.NewVethOffloads(t, 1500)
	s, _ := open(t, &v.B, Config{Link: Packet})
	a, b := superSender(t, v), s.Links[0]
	const n = 100 // more than there is memory for long ones
	come := func(size int) {
		t.Helper()
		super := superFrame(v, 2, size)
		if !a.SendSuper(super) {
			t.Fatal("not sent")
		}
		fs := make([]link.Frame, 1)
		send(t, a, tcpFrame(v, uint16(size), 0, 20))
		for i, want := range []int{super.Len(), 54} {
			for until := clock.Now().Add(time.Minute); b.Receive(fs) == 0; b.Wait(time.Millisecond, -1) {
				if clock.Now() > until {
					t.Fatalf("frame %d of %d bytes did not come", i, want)
				}
			}
			if got := fs[0].Len(); got != want {
				t.Fatalf("%d bytes came instead of %d", got, want)
			}
			b.Release(&fs[0])
		}
	}
	for range n {
		come(60)
	}
	for size := 90; size < 110; size++ { // about the length of the start
		come(size)
	}
	come(1448)
	var st link.Stats
	if b.Stats(&st); st.RxDropped+st.RxRingFull+st.RxInvalid != 0 {
		t.Errorf("lost: %+v", st)
	}
}
