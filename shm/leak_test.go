package shm

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/verbs"
)

// inUse returns how many descriptors and mappings of memfds the process has.
func inUse(t *testing.T) (fds, maps int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list), bytes.Count(testenv.ReadFile(t, "/proc/self/maps"), []byte("/memfd:"))
}

// TestNoLeak makes everything with few and with enough descriptors, and checks that nothing of it is left when it is
// closed or could not be made.
func TestNoLeak(t *testing.T) {
	_ = Guarded() // keeps a descriptor, as Go's poller does
	inUse(t)
	resize := func(q *CQ, err error) (*CQ, error) {
		if err != nil {
			return nil, err
		}
		for range 2 { // the first one is replaced, the second waits to be freed
			done, err := q.Resize(8)
			if err != nil {
				q.Close()
				return nil, err
			}
			done()
		}
		return q, nil
	}
	onChannel := func() (func() error, error) {
		r, w, err := NewChannel()
		if err != nil {
			return nil, err
		}
		q, err := CreateCQOn(1, 4, w, 7)
		if err != nil {
			closeAll(r, w)
			return nil, err
		}
		return func() error {
			err := q.Close()
			return errors.Join(err, unix.Close(r), unix.Close(w)) // it has not closed these
		}, nil
	}
	taken := func() (func() error, error) {
		q, err := CreateCQ(1, 4)
		if err != nil {
			return nil, err
		}
		fd, event := q.TakeFD(), q.TakeEventFD()
		return func() error {
			err := q.Close()
			return errors.Join(err, unix.Close(fd), unix.Close(event)) // nor these
		}, nil
	}
	object := func() (func() error, error) {
		m, err := CreateRegion(8192)
		if err != nil {
			return nil, err
		}
		o, err := OpenObject(m.TakeFD())
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		if _, err := o.Slice(0, 8192); err != nil {
			return nil, errors.Join(err, o.Close(), m.Close())
		}
		return func() error { return errors.Join(o.Close(), o.Close(), m.Close()) }, nil
	}
	closer := func(c interface{ Close() error }, err error) (func() error, error) {
		return func() error { return errors.Join(c.Close(), c.Close()) }, err // the second one does nothing
	}
	freer := func(c interface{ Free() error }, err error) (func() error, error) {
		return func() error { return errors.Join(c.Free(), c.Free()) }, err
	}
	for name, create := range map[string]func() (func() error, error){
		"SQ":          func() (func() error, error) { return closer(CreateSQ(MaxEntries, verbs.MaxSGE, verbs.MaxInline)) },
		"RQ":          func() (func() error, error) { return closer(CreateRQ(4, 1)) },
		"CQ":          func() (func() error, error) { return closer(CreateCQ(MaxWorkers, 1)) },
		"long CQ":     func() (func() error, error) { return closer(CreateCQ(1, MaxCQEntries)) },
		"freed CQ":    func() (func() error, error) { return freer(CreateCQ(1, 4)) },
		"resized CQ":  func() (func() error, error) { return closer(resize(CreateCQ(1, 4))) },
		"both":        func() (func() error, error) { return freer(resize(CreateCQ(1, 4))) },
		"shared":      onChannel,
		"taken":       taken,
		"bells":       func() (func() error, error) { return closer(CreateDoorbells(MaxBells)) },
		"freed bells": func() (func() error, error) { return freer(CreateDoorbells(64)) },
		"region":      func() (func() error, error) { return closer(CreateRegion(10000)) },
		"object":      object,
		"alarm": func() (func() error, error) {
			a, err := NewAlarm()
			return func() error { a.Close(); return nil }, err
		},
		"channel": func() (func() error, error) {
			r, w, err := NewChannel()
			return func() error { closeAll(r, w); return nil }, err
		},
	} {
		fds, maps := inUse(t)
		for room := range 6 {
			restore := testenv.FewFiles(t, room)
			end, err := create()
			if err == nil {
				err = end()
			} else if room < 5 && errors.Is(err, unix.EMFILE) {
				err = nil
			}
			restore()
			if err != nil {
				t.Errorf("%s with %d descriptors: %v", name, room, err)
			}
			if f, m := inUse(t); f > fds || m > maps {
				t.Errorf("%s with %d descriptors: %d descriptors and %d mappings, before %d and %d", name, room, f, m, fds, maps)
				fds, maps = f, m
			}
		}
	}
	sq, _ := newSQ(t, 4, 1, 0)
	hole := testMemfd(t, 4096, 0)
	punch(t, hole, 0, 4096)
	fds, maps := inUse(t)
	if _, err := MapCQ(sq.FD()); err == nil {
		t.Error("an SQ was mapped as CQ")
	}
	if _, err := MapRegion(hole, 0, 4096, true); err == nil {
		t.Error("a hole was mapped")
	}
	if f, m := inUse(t); f > fds || m > maps {
		t.Errorf("refused memory: %d descriptors and %d mappings, before %d and %d", f, m, fds, maps)
	}
}

// TestFree checks that Free releases the pages of a file whose descriptor the client has kept, also if they are locked,
// as those of a daemon with mlockall are.
func TestFree(t *testing.T) {
	for _, locked := range []bool{false, true} {
		q, err := CreateRQ(4, 1)
		if err != nil {
			t.Fatal(err)
		}
		if locked {
			if err := unix.Mlock(q.mem); err != nil {
				testenv.Skip(t, "mlock: %v", err)
			}
		}
		fd := q.TakeFD()
		if allocated(t, fd) == 0 {
			t.Error("nothing is allocated")
		}
		if err := q.Free(); err != nil || allocated(t, fd) != 0 {
			t.Errorf("locked %v: %d bytes are allocated, %v", locked, allocated(t, fd), err)
		}
		unix.Close(fd)
	}
}

// TestDrain checks that Drain reads more wake-ups than one call does, and that each is the event of its queue.
func TestDrain(t *testing.T) {
	r, w, err := NewChannel()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(r, w)
	q, err := CreateCQOn(1, 4, w, 0x0102030405060708)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	c, err := MapCQ(q.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 100 {
		c.Arm(false)
		q.Push(0, &verbs.WC{})
		q.Flush(0, 0)
	}
	var b [8]byte
	if n, err := ReadWakes(r, b[:]); n != 8 || err != nil || le.Uint64(b[:]) != 0x0102030405060708 {
		t.Errorf("%d bytes, %x, %v", n, b, err)
	}
	if Drain(r); readable(r) {
		t.Error("wake-ups are left")
	}
}
