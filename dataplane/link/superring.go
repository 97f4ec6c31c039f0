package link

import (
	"bytes"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/cache"
)

// superRing is the ring for super-frames, on a socket of its own. They stay in their slots until they
// are released or held.
type superRing struct {
	fd    int
	ring  rxRing
	keeps []bool // by slot: it has a frame that was received and not released
	kept  int    // number of those
	looks int    // times that the next super-frame was looked for in vain
	lost  int    // super-frames that were not found, since the last one that was

	distance distance
}

const (
	// superBlock is the size of the ring's blocks: 15 slots.
	superBlock = 1 << 20
	// maxLooks is how often a super-frame is looked for if nothing after it has arrived. It is
	// lost only if the ring was full.
	maxLooks = 64
)

// openSuperRing opens a ring that receives frames as a socket bound to sa and with opts does.
func openSuperRing(sa *unix.SockaddrLinklayer, opts *PacketOptions, longest int) (_ *superRing, err error) {
	s := new(superRing)
	if s.fd, err = packetSocket(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	if err := attach(s.fd, opts.SuperFilterFD, longer(longest, opts.Filter)); err != nil {
		return nil, err
	}
	if s.ring, err = openRxRing(s.fd, HeaderRoom+superBytes, superBlock, opts.Memory/8); err != nil {
		return nil, err
	}
	s.keeps = make([]bool, s.ring.slots())
	return s, unix.Bind(s.fd, sa)
}

// longer returns a filter that accepts the frames that filter does, if they are longer than n bytes.
func longer(n int, filter []unix.SockFilter) []unix.SockFilter {
	f := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_LEN},
		{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, Jt: 1, K: uint32(n)},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	if len(filter) == 0 {
		filter = []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 18}} // all of it
	}
	return append(f, filter...)
}

// find makes the super-frame of that length that begins with start the next one of the ring, and
// returns its header. It returns nil if there is none. Those before it are dropped: their starts were
// lost.
func (s *superRing) find(start []byte, length uint32) *unix.Tpacket2Hdr {
	for c := s.ring; !s.keeps[c.index()]; {
		h := c.peek()
		if h == nil {
			return nil
		}
		if b := c.frame(h); h.Len == length && len(b) == int(length) && bytes.Equal(b[:min(len(b), len(start))], start) {
			for s.ring.at != c.at {
				s.ring.next()
			}
			s.lost = 0
			return h
		}
		if c.skip(); c.at == s.ring.at {
			return nil
		}
	}
	return nil
}

// missed records that a super-frame was not found. If as many as the ring holds were not, the oldest in the
// ring is dropped: the starts of all in it may have been lost, and a full ring would take no others.
func (s *superRing) missed() {
	if s.lost++; s.lost > len(s.keeps) && !s.keeps[s.ring.index()] && s.ring.peek() != nil {
		s.ring.next()
	}
}

// keep leaves the next slot to the receiver of its frame, until giveBack.
func (s *superRing) keep() {
	s.distance.see(s.ring.frame(s.ring.header()))
	s.keeps[s.ring.index()] = true
	s.kept++
	s.ring.skip()
}

func (s *superRing) giveBack(slot int) {
	if !s.keeps[slot] {
		panic("link: frame released twice")
	}
	s.keeps[slot] = false
	s.kept--
	r := s.ring
	r.seek(slot)
	if s.distance.far() {
		cache.Evict(r.frame(r.header()))
	}
	r.giveBack()
}

// distance is how long this core takes to load a line of a frame, which the kernel has written on the sender's core. Cores that share
// no cache are far: the kernel's next write to a line that this core has read then takes much longer than
// a write to a line that is in no cache. It may change at any time, since threads change their cores, and virtual CPUs theirs.
type distance struct {
	mean  time.Duration // moving average
	count uint
}

const (
	// farCores is more than a line takes from a core that shares a cache (25 ns on a Zen 4, up to 80 on Intel's), and less than a line takes from
	// any other core (115 ns on a Zen 4).
	farCores = 90 * time.Nanosecond
	// One of distanceEvery frames is measured. A measurement takes about 1 us.
	distanceEvery = 16
)

func (d *distance) far() bool { return d.mean > farCores }

// see measures some of the frames. b is a frame that has not been read yet.
func (d *distance) see(b []byte) {
	if d.count++; d.count%distanceEvery != 0 || len(b) < 4*cache.PageSize {
		return
	}
	d.add(cache.Latency(pageIn(b[len(b)/2:])))
}

// add adds a measurement. If the thread was interrupted meanwhile it may have taken milliseconds.
func (d *distance) add(latency time.Duration) {
	d.mean += (min(latency, 2*farCores) - d.mean) / 4
}

func (s *superRing) close() error {
	if s == nil {
		return nil
	}
	return errors.Join(s.ring.close(), unix.Close(s.fd))
}
