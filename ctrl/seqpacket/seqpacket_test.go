package seqpacket

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
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

// TestPolling checks that polling ends with the first packet, and that there is none while it rests.
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
