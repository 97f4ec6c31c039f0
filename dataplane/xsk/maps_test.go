package xsk

import (
	"errors"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// packetRing maps the receive ring of an AF_PACKET socket.
func packetRing() (fd int, mem []byte, err error) {
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, nil, err
	}
	size := 1 << 16
	err = unix.SetsockoptTpacketReq(fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
		Block_size: uint32(size), Block_nr: 1, Frame_size: 2048, Frame_nr: uint32(size / 2048),
	})
	if err == nil {
		mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, mem, nil
}

// TestOthersMaps checks that a socket takes its own rings and no mapping that the process makes of other sockets at the
// same time, also when the socket cannot be bound.
func TestOthersMaps(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	const rings = 100
	var mapped atomic.Int32
	done := make(chan error, 1)
	go func() {
		done <- func() (err error) {
			defer mapped.Store(rings)
			var undo []func() error
			for range rings {
				fd, mem, rerr := packetRing()
				if rerr != nil {
					err = rerr
					break
				}
				mapped.Add(1)
				undo = append(undo, func() error {
					mem[0] = 1 // faults if it was unmapped
					return errors.Join(unix.Munmap(mem), unix.Close(fd))
				})
			}
			for _, f := range undo {
				err = errors.Join(err, f())
			}
			return err
		}()
	}()
	cfg := Config{Interface: v.A.Name, Generic: true, Frames: 64, Ring: 64}
	v.A.NS.Run(t, func() error {
		for i := 0; i < 3 || mapped.Load() < rings; i++ {
			s, err := Open(cfg)
			if err != nil {
				return err
			}
			if len(s.maps) != 4 {
				t.Errorf("round %d: %d mappings, want the four rings", i, len(s.maps))
			}
			busy := cfg
			busy.BindRetry = -1
			if o, err := Open(busy); !errors.Is(err, ErrBusy) {
				if err == nil {
					o.Close()
				}
				t.Errorf("round %d: a second socket: %v; want ErrBusy", i, err)
			}
			if err := s.Close(); err != nil {
				return err
			}
		}
		return nil
	})
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestOwnMaps checks which mappings of the process are recognized as those of a socket.
func TestOwnMaps(t *testing.T) {
	set := func(ms ...mapping) map[mapping]struct{} {
		all := make(map[mapping]struct{})
		for _, m := range ms {
			all[m] = struct{}{}
		}
		return all
	}
	old := mapping{addr: 1, pgoff: unix.XDP_UMEM_PGOFF_FILL_RING, ino: 5}
	fill, rx := mapping{addr: 2, pgoff: unix.XDP_UMEM_PGOFF_FILL_RING, ino: 7}, mapping{addr: 3, pgoff: unix.XDP_PGOFF_RX_RING, ino: 7}
	packet := mapping{addr: 4, pgoff: 0, ino: 6}
	for _, ino := range []uint64{0, 7} {
		own := ownMaps(set(old), set(old, fill, rx, packet), ino)
		if got := set(own...); len(own) != 2 || len(got) != 2 || got == nil {
			t.Errorf("of socket %d: %+v", ino, own)
		}
		for _, m := range own {
			if m.ino != 7 {
				t.Errorf("of socket %d: %+v", ino, m)
			}
		}
	}
	if own := ownMaps(set(old), set(old, packet), 0); len(own) != 0 {
		t.Errorf("of none: %+v", own)
	}
}
