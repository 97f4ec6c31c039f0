// Impair joins two interfaces into one bad wire: what comes in on one goes out
// on the other, lost, duplicated, reordered, corrupted and delayed by a seed.
// The interfaces are veth or tap ends that nothing else uses. It prints one line
// when it is ready, and stops on SIGINT or SIGTERM.
//
//	impair -a veth1 -b veth2 -both loss=0.01,delay=1ms -b-to-a corrupt=0.001 -seed 7
//	impair -a veth1 -b veth2 -both delay=1ms -after 2s -then delay=1ms,mtu=1300 -icmp
//	impair -a tap0 -b veth2 -vlan 7
//
// With -vlan it joins b to that VLAN of a: frames without that tag stay at a, and b has none with it.
//
// The ends where a kernel's stack sits must not leave segmentation and checksums
// to the hardware: ethtool -K DEV tx off tso off gso off gro off. On its own
// two ends the program does that itself.
package main

import (
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "impair:", err)
		os.Exit(1)
	}
}

// options is what the command line says.
type options struct {
	a, b        string
	seed        uint64
	ab, ba      impair.Config
	after       time.Duration
	later       *impair.Config // for both ways from after on
	icmp, stats bool
	vlan        uint
}

func parse(args []string) (*options, error) {
	o := &options{}
	fl := flag.NewFlagSet("impair", flag.ContinueOnError)
	fl.StringVar(&o.a, "a", "", "one interface")
	fl.StringVar(&o.b, "b", "", "the other interface")
	both := fl.String("both", "", "what happens to frames either way: loss= duplicate= reorder= corrupt= burst= (0..1), delay= jitter= hold= (durations), burstlen= (frames), rate= (bits a second), queue= mtu= (bytes)")
	ab := fl.String("a-to-b", "", "the same, for frames from a to b only, in place of -both")
	ba := fl.String("b-to-a", "", "the same, for frames from b to a only, in place of -both")
	fl.DurationVar(&o.after, "after", 0, "when to change to -then, from the first frame on")
	then := fl.String("then", "", "what happens to frames either way from -after on")
	fl.BoolVar(&o.icmp, "icmp", false, "report packets longer than mtu= to their sender, as a router does")
	fl.UintVar(&o.vlan, "vlan", 0, "join b to this VLAN of a, 1 to 4094; 0: to a itself")
	fl.Uint64Var(&o.seed, "seed", 0, "seed of all decisions; 0: $TEST_SEED, else from the clock")
	fl.BoolVar(&o.stats, "stats", false, "print counters as JSON at the end")
	if err := fl.Parse(args); err != nil {
		return nil, err
	}
	if o.a == "" || o.b == "" || o.a == o.b || fl.NArg() != 0 {
		return nil, fmt.Errorf("needs two interfaces: -a and -b")
	}
	if o.vlan > 4094 {
		return nil, fmt.Errorf("-vlan %d: 4094 at most", o.vlan)
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano())
		if s := os.Getenv("TEST_SEED"); s != "" {
			n, err := strconv.ParseUint(s, 0, 64)
			if err != nil {
				return nil, fmt.Errorf("TEST_SEED: %w", err)
			}
			o.seed = n
		}
	}
	config := func(way string, salt uint64) (impair.Config, error) {
		if way == "" {
			way = *both
		}
		c, err := impair.Parse(way)
		if c.Seed == 0 {
			c.Seed = o.seed + salt // the two ways must not mirror each other
		}
		return c, err
	}
	var err error
	if o.ab, err = config(*ab, 0); err != nil {
		return nil, err
	}
	if o.ba, err = config(*ba, 1); err != nil {
		return nil, err
	}
	if o.after > 0 {
		c, err := config(*then, 2)
		if err != nil {
			return nil, err
		}
		o.later = &c
	}
	return o, nil
}

func run(args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	la, err := open(o.a)
	if err != nil {
		return err
	}
	defer la.Close()
	lb, err := open(o.b)
	if err != nil {
		return err
	}
	defer lb.Close()

	stop, err := stopFD()
	if err != nil {
		return err
	}
	w := &wire{ab: newWay(la, lb, o.ab), ba: newWay(lb, la, o.ba), stop: stop, after: o.after, later: o.later}
	w.ab.untag, w.ba.tag = uint16(o.vlan), uint16(o.vlan)
	if o.icmp {
		w.ab.back, w.ba.back = w.ba, w.ab
	}
	fmt.Printf("impair: ready a=%s b=%s seed=%d a-to-b=[%v] b-to-a=[%v]\n", o.a, o.b, o.seed, o.ab, o.ba)
	w.run()
	if o.stats {
		return json.NewEncoder(os.Stdout).Encode(map[string]counters{"a-to-b": w.ab.counters(), "b-to-a": w.ba.counters()})
	}
	return nil
}

// open opens an end, with its offloads off and all frames let in.
func open(name string) (*link.Packet, error) {
	if err := testenv.OffloadsOff(name); err != nil {
		return nil, fmt.Errorf("offloads of %s: %w", name, err)
	}
	return link.OpenPacket(name, link.PacketOptions{Promiscuous: true})
}

// stopFD returns a descriptor that is readable once a signal asks to stop.
func stopFD() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ch
		one := [8]byte{1}
		_, _ = unix.Write(fd, one[:])
	}()
	return fd, nil
}

// wire is the two directions.
type wire struct {
	ab, ba *way
	stop   int

	after   time.Duration
	later   *impair.Config // nil: nothing changes any more
	changes clock.Time
}

// change goes over to -then when it is time.
func (w *wire) change(now clock.Time) {
	switch {
	case w.changes == 0:
		if w.ab.decider.Stats().Frames+w.ba.decider.Stats().Frames > 0 {
			w.changes = now.Add(w.after)
		}
	case w.changes.Due(now):
		w.ab.become(*w.later)
		c := *w.later
		c.Seed++
		w.ba.become(c)
		w.later = nil
	}
}

// run moves frames until told to stop.
func (w *wire) run() {
	fds := []unix.PollFd{
		{Fd: int32(w.ab.from.FD()), Events: unix.POLLIN},
		{Fd: int32(w.ba.from.FD()), Events: unix.POLLIN},
		{Fd: int32(w.stop), Events: unix.POLLIN},
	}
	for fds[2].Revents == 0 {
		now := clock.Now()
		if w.later != nil {
			w.change(now)
		}
		busy := w.ab.turn(now)
		busy = w.ba.turn(now) || busy
		ts := unix.Timespec{}
		wait := &ts
		if !busy {
			wait = nil
			at := clock.Earliest(w.ab.deadline(now), w.ba.deadline(now))
			if at != 0 {
				ts = unix.NsecToTimespec(max(int64(at.Sub(clock.Now())), 0))
				wait = &ts
			}
		}
		_, _ = unix.Ppoll(fds, wait, nil) // EINTR: look again
	}
}

// way is one direction.
type way struct {
	from, to *link.Packet
	decider  *impair.Decider
	before   impair.Stats // of earlier deciders
	mtu      int
	untag    uint16               // the VLAN whose frames alone are carried, without its tag; 0: all frames as they are
	tag      uint16               // the VLAN whose tag frames get; 0: none
	back     *way                 // where senders of longer packets are told; nil: they are not
	late     impair.Queue[[]byte] // frames that wait for their time
	free     [][]byte             // buffers for more
	plan     []impair.Delivery
	frames   []link.Frame
	done     []link.Slot
	waiting  int    // Posted, not reaped
	noRoom   uint64 // lost here, not by decision
}

// maxLate is how many frames a direction holds at once: a tenth of a second of
// what 4 Gbit/s bring, in frames of 1,500 bytes.
const maxLate = 1 << 15

func newWay(from, to *link.Packet, cfg impair.Config) *way {
	return &way{
		from: from, to: to, decider: impair.NewDecider(cfg), mtu: cfg.MTU,
		late: impair.NewQueue[[]byte](to.Slots()), plan: make([]impair.Delivery, 0, impair.MaxDeliveries),
		frames: make([]link.Frame, 64), done: make([]link.Slot, 64),
	}
}

// turn takes what came in, sends what is due, and reports whether there may be
// more at once.
func (w *way) turn(now clock.Time) (busy bool) {
	n := w.from.Receive(w.frames)
	for i := range n {
		f := &w.frames[i]
		if w.untag != 0 && !inVLAN(f.Pieces[0], w.untag) {
			w.from.Release(f)
			continue
		}
		if w.back != nil && w.mtu > 0 && f.Len() > ethernet+w.mtu {
			if b := tooBig(f.Pieces[0], w.mtu); b != nil {
				w.back.late.Push(now, b)
			}
		}
		for _, d := range w.decider.Decide(now, f.Len(), w.plan[:0]) {
			w.hold(f, d)
		}
		w.from.Release(f)
	}
	for {
		b, ok := w.late.Peek(now)
		if !ok {
			break
		}
		s, ok := w.to.Alloc()
		if !ok {
			break // the kernel is behind: try again soon
		}
		if !w.to.Post(s, 0, copy(w.to.Bytes(s), b)) {
			w.to.Free(s)
			break
		}
		w.late.Pop(now)
		w.free = append(w.free, b)
		w.waiting++
	}
	w.to.Flush()
	for m := w.to.Reap(w.done); m > 0; m = w.to.Reap(w.done) {
		for _, s := range w.done[:m] {
			w.to.Free(s)
		}
		w.waiting -= m
	}
	return n > 0
}

// become changes what happens to frames that come from now on.
func (w *way) become(cfg impair.Config) {
	st := w.decider.Stats()
	w.before.Add(&st)
	w.decider, w.mtu = impair.NewDecider(cfg), cfg.MTU
}

// A VLAN tag of tagLen bytes follows the two MAC addresses of a frame.
const macs, tagLen = 12, 4

// inVLAN reports whether the outer tag of the frame that begins with head is of that VLAN.
func inVLAN(head []byte, vlan uint16) bool {
	return len(head) >= macs+tagLen && binary.BigEndian.Uint16(head[macs:]) == 0x8100 && binary.BigEndian.Uint16(head[macs+2:])&0xfff == vlan
}

// hold copies a frame for one delivery.
func (w *way) hold(f *link.Frame, d impair.Delivery) {
	n := f.Len()
	if w.tag != 0 {
		n += tagLen
	}
	if n > w.to.SlotSize() || w.late.Len() >= maxLate {
		w.noRoom++
		return
	}
	var b []byte
	if k := len(w.free); k > 0 && cap(w.free[k-1]) >= n {
		b, w.free = w.free[k-1], w.free[:k-1]
	} else {
		b = make([]byte, w.to.SlotSize())
	}
	b = b[:0]
	for _, p := range f.Pieces[:f.N] {
		b = append(b, p...)
	}
	if d.Bit >= 0 {
		b[d.Bit/8] ^= 1 << (d.Bit % 8)
	}
	switch {
	case w.untag != 0:
		b = slices.Delete(b, macs, macs+tagLen)
	case w.tag != 0:
		b = slices.Insert(b, macs, 0x81, 0, byte(w.tag>>8), byte(w.tag))
	}
	w.late.Push(d.At, b)
}

// deadline is when turn has something to do even if nothing comes in.
func (w *way) deadline(now clock.Time) clock.Time {
	at := w.late.Deadline()
	if w.waiting > 0 {
		at = clock.Earliest(at, now.Add(time.Millisecond))
	}
	return at
}

// counters are what -stats prints of a direction.
type counters struct {
	impair.Stats
	Received, Sent uint64
	TooLong        uint64 // merged or beyond the MTU: an offload is on somewhere
	NoRoom         uint64 // lost here, not by decision
}

func (w *way) counters() counters {
	var in, out link.Stats
	w.from.Stats(&in)
	w.to.Stats(&out)
	st := w.decider.Stats()
	st.Add(&w.before)
	return counters{
		Stats: st, Received: in.RxFrames, Sent: out.TxFrames,
		TooLong: in.RxInvalid + out.TxInvalid, NoRoom: w.noRoom + in.RxRingFull,
	}
}
