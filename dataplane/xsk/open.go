package xsk

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/asavie/xdp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/ring"
)

// FrameSize is the size of a chunk in bytes. Chunks of 2048 bytes are 8 % slower at MTU 9000, and
// the kernel refuses more than 4096.
const FrameSize = 4096

// DefaultFrames is the default of Config.Frames.
const DefaultFrames = 8192

const (
	// defaultRing is from measurements: a fill ring of 2048 lasts 4.5 ms at 0.45 million frames
	// per second. A preempted worker needs longer, so the ring may grow (see fillLevel).
	defaultRing      = 4096
	defaultBindRetry = 5 * time.Second
	// txBudget is the number of frames that the kernel may send per system call. With its default
	// of 32 the frame rate is a tenth lower.
	txBudget = 256
)

// rxHeadroom is the room that the kernel leaves before a received frame.
const rxHeadroom = unix.XDP_PACKET_HEADROOM

// Config configures a Socket. Zero fields mean the defaults.
type Config struct {
	Interface string // in the network namespace of the calling thread
	Queue     int

	// Generic is for a program in generic mode: the kernel copies frames from skbs. With a native
	// program zero-copy is used if the driver supports it, and otherwise the kernel copies too.
	Generic bool

	MTU    int // largest IP packet, fixed while open; the interface's MTU
	Frames int // chunks of the UMEM, half for receiving: a power of two
	Ring   int // entries of each of the four rings: a power of two

	// Super sends super-frames if the kernel supports them, except in zero-copy mode, where
	// the driver's own ring is faster.
	Super bool

	// BindRetry is how long to retry while the queue is busy: the kernel releases the queue
	// of a closed socket or a dead process only after a while. Negative means no retries.
	BindRetry time.Duration

	slotChunks int // adjacent chunks per TX slot
	slotSize   int // bytes: slotChunks, or half a chunk
}

func (c *Config) setDefaults(dev netlink.Link) error {
	c.MTU = cmp.Or(c.MTU, dev.Attrs().MTU)
	c.Frames = cmp.Or(c.Frames, DefaultFrames)
	c.Ring = cmp.Or(c.Ring, defaultRing)
	c.BindRetry = cmp.Or(c.BindRetry, defaultBindRetry)
	c.layoutSlots()
	pow2 := func(n int) bool { return n > 0 && n&(n-1) == 0 }
	switch {
	case !pow2(c.Ring) || !pow2(c.Frames) || c.Frames < 4*c.slotChunks:
		return fmt.Errorf("%d frames and rings of %d: must be powers of two, and at least 4 TX slots' frames", c.Frames, c.Ring)
	case c.rxPieces() > mtuPieces:
		return fmt.Errorf("MTU %d exceeds a frame of %d fragments", c.MTU, mtuPieces)
	case c.Queue < 0:
		return fmt.Errorf("queue %d", c.Queue)
	}
	return nil
}

// txHeadroom is room in a slot for the owner, in addition to the headers of the lower layers.
const txHeadroom = 128

// layoutSlots sets the size of the TX slots.
func (c *Config) layoutSlots() {
	need := c.MTU + link.HeaderRoom
	if need+txHeadroom <= FrameSize/2 {
		// The slots that wait for acknowledgements bound the data in flight.
		c.slotChunks, c.slotSize = 1, FrameSize/2
		return
	}
	c.slotChunks = (need + FrameSize - 1) / FrameSize
	c.slotSize = c.slotChunks * FrameSize
}

// mtuPieces is the maximum number of chunks of a frame of the MTU; super-frames use more.
const mtuPieces = 8

// rxPieces returns the number of chunks of a received frame of the MTU.
func (c *Config) rxPieces() int {
	return (c.MTU + link.HeaderRoom + rxHeadroom + FrameSize - 1) / FrameSize
}

// Errors of Open, for errors.Is.
var (
	// ErrBusy means that another AF_XDP socket uses the queue.
	ErrBusy = errors.New("another AF_XDP socket uses this queue")
	// ErrNoSG means that the MTU needs frames of several fragments, which the kernel does
	// not support.
	ErrNoSG = errors.New("frames of several fragments need Linux 6.6 and driver support; lower the MTU to 3498")
	// ErrPrivilege means that the process lacks CAP_NET_RAW.
	ErrPrivilege = errors.New("needs CAP_NET_RAW and locked memory (root, or AmbientCapabilities= and LimitMEMLOCK= in the unit)")
)

// Open opens an AF_XDP socket on a queue. It receives frames once the XDP program sends them to
// it: see bpf.Steering.SetSocket and FD.
func Open(cfg Config) (*Socket, error) {
	s, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("xsk: %s queue %d: %w", cfg.Interface, cfg.Queue, err)
	}
	return s, nil
}

func open(cfg Config) (_ *Socket, err error) {
	dev, err := netlink.LinkByName(cfg.Interface)
	if err != nil {
		return nil, err
	}
	if err := cfg.setDefaults(dev); err != nil {
		return nil, err
	}
	s := &Socket{cfg: cfg}
	ifindex := dev.Attrs().Index
	if err := s.bind(func(flags uint16) error { return s.newSocket(ifindex, flags) }); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := s.viewRings(); err != nil {
		return nil, err
	}
	// Kernels before 6.16 do not know it and send 32 frames a call.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_XDP, unix.XDP_MAX_TX_SKB_BUDGET, min(txBudget, cfg.Ring))
	opts, err := unix.GetsockoptInt(s.fd, unix.SOL_XDP, unix.XDP_OPTIONS)
	if err != nil {
		return nil, fmt.Errorf("getsockopt XDP_OPTIONS: %w", err)
	}
	s.zeroCopy = opts&unix.XDP_OPTIONS_ZEROCOPY != 0

	if cfg.Super && !s.zeroCopy {
		// A kernel without packet sockets gets segments.
		s.SuperSocket, err = link.OpenSuper(cfg.Interface)
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
	}
	s.layout()
	return s, nil
}

// layout divides the memory and fills the fill ring.
func (s *Socket) layout() {
	chunks := s.cfg.Frames / 2
	s.rxMem = uint64(chunks * FrameSize)
	s.Pool = link.NewPool(s.umem[s.rxMem:], s.cfg.slotSize)
	s.left = make([]uint8, s.Slots())
	s.dead = make([]link.Slot, 0, s.Slots())
	s.spare = make([]uint64, 0, chunks)
	for i := chunks - 1; i >= 0; i-- {
		s.spare = append(s.spare, uint64(i*FrameSize))
	}
	s.keep = newFillLevel(uint32(s.cfg.Ring))
	s.refill()
}

// opening guards the package variables of asavie/xdp, and the reading of /proc/self/maps before
// and after its calls.
var opening sync.Mutex

// onePiece is the longest frame that a driver receives into one page: 4096 bytes without XDP's
// headroom and the 320 of skb_shared_info.
const onePiece = 4096 - rxHeadroom - 320

// needsSG reports whether a frame of the MTU may have several fragments.
func (c *Config) needsSG() bool {
	return c.rxPieces() > 1 || c.MTU+link.HeaderRoom > onePiece
}

// bind binds the socket with newSocket, which takes the flags of bind(2). It requests frames of
// several pieces only if the MTU needs them: many drivers support zero-copy only without them,
// and the kernel would then copy silently. Generic mode always copies, so there they cost
// nothing.
func (s *Socket) bind(newSocket func(flags uint16) error) error {
	flags := uint16(unix.XDP_USE_NEED_WAKEUP)
	if s.cfg.Generic {
		flags |= unix.XDP_COPY
	}
	s.sg = s.cfg.Generic || s.cfg.needsSG()
	for until := time.Now().Add(s.cfg.BindRetry); ; {
		f := flags
		if s.sg {
			f |= unix.XDP_USE_SG
		}
		err := newSocket(f)
		switch {
		case err == nil:
			if !s.sg && s.cfg.rxPieces() > 1 {
				return errors.Join(fmt.Errorf("MTU %d: %w", s.cfg.MTU, ErrNoSG), s.Close())
			}
			return nil
		case errors.Is(err, unix.EBUSY) && time.Now().Before(until):
			time.Sleep(20 * time.Millisecond)
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%w: %w", ErrBusy, err)
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOBUFS): // ENOBUFS: RLIMIT_MEMLOCK
			return fmt.Errorf("%w: %w", ErrPrivilege, err)
		case s.sg && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)):
			s.sg = false
		default:
			return err
		}
	}
}

var goNames = strings.NewReplacer("unix.SetsockoptUint64", "setsockopt", "unix.Syscall6 ", "", "syscall.", "")

// withErrno returns err so that errors.Is finds its errno. asavie/xdp formats every errno with
// %v at the end of the text, which is parsed only here, and begins it with a name of Go's.
func withErrno(err error) error {
	text := goNames.Replace(err.Error())
	for _, errno := range [...]unix.Errno{unix.EBUSY, unix.EPERM, unix.EMFILE, unix.ENOMEM, unix.ENOBUFS, unix.EINVAL, unix.EOPNOTSUPP} {
		if text, ok := strings.CutSuffix(text, errno.Error()); ok {
			return fmt.Errorf("%s%w", text, errno)
		}
	}
	return errors.New(text)
}

// newSocket opens, registers and binds the socket with asavie/xdp. That package takes the flags
// of bind(2) from a package variable, formats each errno into text, does not give access to its
// rings, and never unmaps them. newSocket works around each of these.
func (s *Socket) newSocket(ifindex int, flags uint16) error {
	opening.Lock()
	defer opening.Unlock()
	// It stays open, so that the second reading needs no descriptor: without that reading nothing could be unmapped.
	list, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer list.Close()
	before, err := socketMaps(list)
	if err != nil {
		return err
	}
	saved := xdp.DefaultSocketFlags
	xdp.DefaultSocketFlags = flags
	sock, err := xdp.NewSocket(ifindex, s.cfg.Queue, &xdp.SocketOptions{
		NumFrames: s.cfg.Frames, FrameSize: FrameSize,
		FillRingNumDescs: s.cfg.Ring, CompletionRingNumDescs: s.cfg.Ring,
		RxRingNumDescs: s.cfg.Ring, TxRingNumDescs: s.cfg.Ring,
	})
	xdp.DefaultSocketFlags = saved

	// The rings must be found where asavie/xdp mapped them, because kernels before 6.4 cannot
	// map the rings of a bound socket. A mapping keeps the socket and thus the queue open, so
	// without unmap neither a failed bind nor Close would free them.
	after, merr := socketMaps(list)
	ino := uint64(0)
	if err == nil {
		var st unix.Stat_t
		if serr := unix.Fstat(sock.FD(), &st); serr != nil {
			merr = errors.Join(merr, serr)
		}
		ino = st.Ino
	}
	s.maps = ownMaps(before, after, ino)
	if err != nil {
		return errors.Join(withErrno(err), merr, s.unmap())
	}
	if merr != nil {
		return errors.Join(merr, s.unmap(), sock.Close())
	}
	s.sock = sock
	s.fd = sock.FD()
	s.umem = sock.GetFrame(xdp.Desc{})[:s.cfg.Frames*FrameSize] // whose length may not fit in the package's 32 bits
	return nil
}

// ownMaps returns the mappings of the socket ino that are in after and not in before, since
// other sockets may be mapped concurrently. If the socket is closed and ino is unknown, they
// are those of the socket with a new fill ring: opening is held, so no other AF_XDP socket can
// have one.
func ownMaps(before, after map[mapping]struct{}, ino uint64) (own []mapping) {
	for m := range after {
		if _, old := before[m]; !old && ino == 0 && m.pgoff == unix.XDP_UMEM_PGOFF_FILL_RING {
			ino = m.ino
		}
	}
	for m := range after {
		if _, old := before[m]; !old && m.ino == ino {
			own = append(own, m)
		}
	}
	return own
}

// unmap unmaps the rings.
func (s *Socket) unmap() error {
	var errs []error
	for _, m := range s.maps {
		errs = append(errs, m.unmap())
	}
	s.maps = nil
	return errors.Join(errs...)
}

// mapping is a mapped region of a socket.
type mapping struct {
	addr, length uintptr
	pgoff        uint64
	ino          uint64 // of the socket
}

// socketMaps returns the mappings of sockets that list, which is /proc/self/maps, shows now.
func socketMaps(list *os.File) (map[mapping]struct{}, error) {
	if _, err := list.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	found := map[mapping]struct{}{}
	sc := bufio.NewScanner(list)
	for sc.Scan() {
		if !strings.Contains(sc.Text(), " socket:[") {
			continue
		}
		var lo, hi uintptr
		var perm, dev string
		var pgoff, ino uint64
		if _, err := fmt.Sscanf(sc.Text(), "%x-%x %s %x %s %d", &lo, &hi, &perm, &pgoff, &dev, &ino); err != nil {
			return nil, fmt.Errorf("/proc/self/maps: %w", err)
		}
		found[mapping{lo, hi - lo, pgoff, ino}] = struct{}{}
	}
	return found, sc.Err()
}

// viewRings locates the four rings in the socket's mappings.
func (s *Socket) viewRings() error {
	off, err := mmapOffsets(s.fd)
	if err != nil {
		return err
	}
	n := s.cfg.Ring
	for _, r := range []struct {
		m     *ringMem
		pgoff uint64
		off   *unix.XDPRingOffset
		size  uintptr
	}{
		{&s.rxMap, unix.XDP_PGOFF_RX_RING, &off.Rx, descSize},
		{&s.txMap, unix.XDP_PGOFF_TX_RING, &off.Tx, descSize},
		{&s.fillMap, unix.XDP_UMEM_PGOFF_FILL_RING, &off.Fr, addrSize},
		{&s.compMap, unix.XDP_UMEM_PGOFF_COMPLETION_RING, &off.Cr, addrSize},
	} {
		i := slices.IndexFunc(s.maps, func(m mapping) bool { return m.pgoff == r.pgoff })
		if i < 0 {
			return fmt.Errorf("/proc/self/maps does not show the ring at %#x", r.pgoff)
		}
		if *r.m, err = s.maps[i].ring(r.off, n, r.size); err != nil {
			return err
		}
	}
	s.rxDescs, s.txDescs = s.rxMap.descs(), s.txMap.descs()
	s.fillAddrs, s.compAddrs = s.fillMap.addrs(), s.compMap.addrs()
	s.rx = ring.NewConsumer(s.rxMap.prod, s.rxMap.cons, uint32(n))
	s.tx = ring.NewProducer(s.txMap.prod, s.txMap.cons, uint32(n))
	s.fill = ring.NewProducer(s.fillMap.prod, s.fillMap.cons, uint32(n))
	s.comp = ring.NewConsumer(s.compMap.prod, s.compMap.cons, uint32(n))
	return nil
}

// Queues returns the number of receive queues of an interface.
func Queues(name string) (int, error) {
	dirs, err := os.ReadDir("/sys/class/net/" + name + "/queues")
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) { // and not without memory
			if _, nerr := net.InterfaceByName(name); nerr == nil {
				return 1, nil // of a namespace that /sys does not show
			}
		}
		return 0, fmt.Errorf("xsk: queues of %s: %w", name, err)
	}
	n := 0
	for _, d := range dirs {
		if strings.HasPrefix(d.Name(), "rx-") {
			n++
		}
	}
	return max(n, 1), nil
}
