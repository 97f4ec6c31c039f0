package seqpacket

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFilesLost checks that Receive reports descriptors that it has no room for, and still returns their bytes and
// the next packet.
func TestFilesLost(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fds := []int{int(f.Fd()), int(f.Fd())}
	for room := range 4 {
		restore := testenv.FewFiles(t, room)
		for _, text := range []string{"one", "two"} {
			if err := a.Write([]byte(text), fds); err != nil {
				t.Fatal(err)
			}
			packet, got, err := b.Read(MaxFDs)
			if string(packet) != text {
				t.Errorf("room for %d: %q, want %q", room, packet, text)
			}
			if room < len(fds) && (!errors.Is(err, ErrFilesLost) || len(got) > room) {
				t.Errorf("room for %d: %v, %v; want ErrFilesLost", room, got, err)
			}
			if room >= len(fds) && (err != nil || len(got) != len(fds)) {
				t.Errorf("room for %d: %v, %v", room, got, err)
			}
			CloseAll(got)
		}
		restore()
	}
}

// TestLimits checks both sides of each limit of a packet. Read returns the descriptors that exceed its limit, for the
// caller to close.
func TestLimits(t *testing.T) {
	a, b := pair(t)
	for _, tt := range []struct {
		name       string
		size, fds  int
		most       int // descriptors that the reader takes
		write, err error
		got        int // descriptors that Read returns
	}{
		{"longest packet", MaxPacket, 0, 0, nil, nil, 0},
		{"longer packet", MaxPacket + 1, 0, 0, ErrTooLong, ErrTooLong, 0},
		{"most descriptors", 1, MaxFDs, MaxFDs, nil, nil, MaxFDs},
		{"more descriptors", 1, MaxFDs + 1, MaxFDs, ErrTooManyFDs, ErrTooManyFDs, MaxFDs + 1},
		{"all that the reader takes", 1, 2, 2, nil, nil, 2},
		{"more than the reader takes", 1, 2, 1, nil, ErrTooManyFDs, 2},
		{"one, and the reader takes none", 1, 1, 0, nil, ErrTooManyFDs, 0},
	} {
		p, fds := make([]byte, tt.size), make([]int, tt.fds)
		for _, try := range []bool{false, true} {
			if try {
				if ok := a.TryWrite(p, fds); ok != (tt.write == nil) {
					t.Errorf("%s: TryWrite returned %v", tt.name, ok)
				}
			} else if err := a.Write(p, fds); err != tt.write {
				t.Errorf("%s: Write returned %v, want %v", tt.name, err, tt.write)
			}
			if tt.write != nil { // the peer may be another program
				var err error
				_ = a.raw.Control(func(fd uintptr) { err = trySend(fd, p, fds) })
				if err != nil {
					t.Fatal(err)
				}
			}
			got, files, err := b.Read(tt.most)
			CloseAll(files)
			if err != tt.err || len(files) != tt.got || err == nil && len(got) != tt.size {
				t.Errorf("%s: read %d bytes, %d descriptors, %v; want %d descriptors, %v",
					tt.name, len(got), len(files), err, tt.got, tt.err)
			}
		}
	}
}

// open counts the open descriptors of the process.
func open(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestNoLeak checks that no descriptor stays open after Block, and after FromFD has failed.
func TestNoLeak(t *testing.T) {
	for name, f := range map[string]func() error{
		"Block": func() error {
			a, b, err := Pair()
			if err != nil {
				return err
			}
			defer b.Close()
			defer a.Close()
			return a.Block()
		},
		"Block without descriptors": func() error {
			a, b, err := Pair()
			if err != nil {
				return err
			}
			defer b.Close()
			defer a.Close()
			defer testenv.FewFiles(t, 0)()
			if a.Block() == nil || a.Blocks() {
				return errors.New("Block succeeded")
			}
			if !b.TryWrite([]byte("one"), nil) {
				return errors.New("no room")
			}
			_, _, err = a.Read(0)
			return err
		},
		"FromFD of a file": func() error {
			fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if _, ferr := FromFD(fd); err == nil && ferr == nil {
				return errors.New("FromFD succeeded")
			}
			return err
		},
		"FromFD of a UDP socket": func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if _, ferr := FromFD(fd); err == nil && ferr == nil {
				return errors.New("FromFD succeeded")
			}
			return err
		},
		"FromFD of no descriptor": func() error {
			if _, err := FromFD(-1); !errors.Is(err, unix.EBADF) {
				return fmt.Errorf("FromFD: %v", err)
			}
			return nil
		},
	} {
		before := open(t)
		if err := f(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if after := open(t); after > before {
			t.Errorf("%s: %d descriptors are open, %d before", name, after, before)
		}
	}
}

// TestDialFails checks what is wrong with a path, according to the error of Dial.
func TestDialFails(t *testing.T) {
	dir := t.TempDir()
	testenv.WriteFile(t, dir+"/file", nil, 0o600)
	listen := func(network, name string) *net.UnixListener {
		l, err := net.ListenUnix(network, &net.UnixAddr{Name: dir + name, Net: network})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	listen("unix", "/other")
	old := listen("unixpacket", "/old")
	old.SetUnlinkOnClose(false)
	old.Close()
	for path, want := range map[string]error{
		dir + "/none":                        unix.ENOENT,
		dir + "/file":                        unix.ENOTSOCK,
		dir + "/old":                         unix.ECONNREFUSED,
		dir + "/other":                       unix.EPROTOTYPE,
		"/" + strings.Repeat("n", maxPath-1): unix.ENOENT,
		"/" + strings.Repeat("n", maxPath):   unix.ENAMETOOLONG,
	} {
		if _, err := Dial(t.Context(), path); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

// TestEmptyPacket checks that Read ends with an empty packet, and returns its descriptors: they would stay open.
func TestEmptyPacket(t *testing.T) {
	for _, block := range []bool{false, true} {
		a, b := pair(t)
		if block {
			if err := b.Block(); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		if err := a.raw.Control(func(fd uintptr) { err = sendEmpty(fd, unix.UnixRights(0, 1)) }); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		a.Shutdown()
		if _, fds, err := b.Read(MaxFDs); len(fds) != 2 || err != io.EOF {
			t.Errorf("blocking %v: descriptors %v, %v", block, fds, err)
		} else {
			CloseAll(fds)
		}
	}
}

// sendEmpty sends a packet without data. unix.Sendmsg would add a byte to it.
func sendEmpty(fd uintptr, oob []byte) error {
	m := unix.Msghdr{Control: &oob[0]}
	m.SetControllen(len(oob))
	if _, _, e := unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&m)), 0); e != 0 {
		return e
	}
	return nil
}

// TestTryWrite checks that TryWrite sends data with descriptors while there is room, and never
// waits.
func TestTryWrite(t *testing.T) {
	a, b := pair(t)
	if !a.TryWrite([]byte("one"), []int{0, 1}) {
		t.Fatal("no room")
	}
	got, fds, err := b.Read(2)
	CloseAll(fds)
	if err != nil || string(got) != "one" || len(fds) != 2 {
		t.Fatalf("%q, %d descriptors, %v", got, len(fds), err)
	}
	for range fill(a) {
		if got, _, err := b.Read(0); err != nil || len(got) != 1000 {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	}
	if !a.TryWrite([]byte("more"), nil) {
		t.Error("no room after all was read")
	}
	b.Close()
	if a.TryWrite([]byte("x"), nil) || a.TryWrite(make([]byte, MaxPacket+1), nil) {
		t.Error("sent although the peer has closed")
	}
}

// Pair returns the two ends of a connection within this process.
func Pair() (a, b *Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("seqpacket: %w", err)
	}
	if a, err = FromFD(fds[0]); err != nil {
		unix.Close(fds[1])
		return nil, nil, err
	}
	if b, err = FromFD(fds[1]); err != nil {
		a.Close()
		return nil, nil, err
	}
	return a, b, nil
}

// fill writes packets until there is no room.
func fill(c *Conn) (n int) {
	for c.TryWrite(make([]byte, 1000), nil) {
		n++
	}
	return n
}

// TestLastPacket checks that Read returns the last packet of an end that is shut down or closed at once, also if
// that end leaves packets unread.
func TestLastPacket(t *testing.T) {
	last := func(unread bool) error {
		a, b, err := Pair()
		if err != nil {
			return err
		}
		defer b.Close()
		if unread {
			b.TryWrite([]byte("unread"), nil)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			a.TryWrite([]byte("last"), nil)
			a.Shutdown()
			a.Close()
		}()
		defer func() { <-done }()
		if unread {
			<-done
		}
		if got, _, err := b.Read(0); err != nil || string(got) != "last" {
			return fmt.Errorf("unread packet %v: %q, %v", unread, got, err)
		}
		if _, _, err := b.Read(0); err != io.EOF {
			return fmt.Errorf("unread packet %v: after the last one: %v", unread, err)
		}
		return nil
	}
	if err := last(true); err != nil {
		t.Error(err)
	}
	for range 5000 { // without the second look, a few in 10,000 fail
		if err := last(false); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPolling checks that polling ends with the first packet or after a while, that it rests if another program had the
// CPU for long, and that there is none while it rests.
func TestPolling(t *testing.T) {
	tries := 0
	try := func() bool {
		tries++
		return true
	}
	var p polling
	if !p.until(try) || tries != 1 {
		t.Errorf("%d tries, want one that succeeds", tries)
	}
	if p.until(func() bool { return false }) {
		t.Error("it succeeds without a packet")
	}
	p = polling{}
	began := time.Now()
	p.until(func() bool {
		time.Sleep(2 * longYield) // takes as long as another program would
		return false
	})
	if p.rest.Before(began.Add(restFor)) {
		t.Error("it does not rest")
	}
	p.rest = time.Now().Add(time.Hour)
	if p.until(try) || tries != 1 {
		t.Errorf("%d tries, want none while it rests", tries-1)
	}
}

// TestBlock checks a connection whose system calls wait: each wait ends when there is a packet, room, the time is
// over, or the connection is shut down or closed.
func TestBlock(t *testing.T) {
	blocking := func(t *testing.T) (a, b *Conn) {
		a, b = pair(t)
		if err := a.Block(); err != nil {
			t.Fatal(err)
		}
		return a, b
	}
	result := func(t *testing.T, errs <-chan error) error {
		t.Helper()
		select {
		case err := <-errs:
			return err
		case <-time.After(30 * time.Second):
			t.Fatal("it waits forever")
			return nil
		}
	}
	start := func(f func() error) <-chan error {
		errs := make(chan error, 1)
		go func() { errs <- f() }()
		return errs
	}
	read := func(c *Conn) func() error {
		return func() error {
			_, _, err := c.Read(0)
			return err
		}
	}
	t.Run("packet", func(t *testing.T) {
		a, b := blocking(t)
		errs := start(read(a))
		if err := b.Write([]byte("one"), nil); err != nil {
			t.Fatal(err)
		}
		if err := result(t, errs); err != nil {
			t.Error(err)
		}
	})
	t.Run("peer closes", func(t *testing.T) {
		a, b := blocking(t)
		errs := start(read(a))
		b.Close()
		if err := result(t, errs); err != io.EOF {
			t.Error(err)
		}
	})
	for name, end := range map[string]func(*Conn){"shutdown": (*Conn).Shutdown, "close": func(c *Conn) { c.Close() }} {
		t.Run(name, func(t *testing.T) {
			for i := range 20 { // the other goroutines wait before it or not
				a, _ := blocking(t)
				fill(a)
				reads := start(read(a))
				writes := start(func() error { return a.Write([]byte("more"), nil) })
				for range i * i {
					runtime.Gosched()
				}
				end(a)
				if err := result(t, reads); err == nil {
					t.Error("read")
				}
				if err := result(t, writes); err == nil {
					t.Error("written")
				}
			}
		})
	}
	t.Run("room", func(t *testing.T) {
		a, b := blocking(t)
		n := fill(a)
		errs := start(func() error { return a.Write([]byte("more"), nil) })
		for range n {
			if _, _, err := b.Read(0); err != nil {
				t.Fatal(err)
			}
		}
		if err := result(t, errs); err != nil {
			t.Error(err)
		}
		if p, _, err := b.Read(0); string(p) != "more" || err != nil {
			t.Errorf("%q, %v", p, err)
		}
	})
	t.Run("last", func(t *testing.T) {
		a, b := blocking(t)
		n := fill(a)
		a.WriteLast([]byte("late"), time.Millisecond)
		for range n {
			if _, _, err := b.Read(0); err != nil {
				t.Fatal(err)
			}
		}
		a.WriteLast([]byte("last"), time.Hour)
		if p, _, err := b.Read(0); string(p) != "last" || err != nil {
			t.Errorf("%q, %v", p, err)
		}
	})
}

// pair is Pair until the test ends.
func pair(t *testing.T) (a, b *Conn) {
	t.Helper()
	a, b, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	t.Cleanup(func() { b.Close() })
	return a, b
}
