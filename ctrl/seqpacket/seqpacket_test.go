package seqpacket

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFilesLost checks that Receive reports descriptors that it has no room for, and still returns their bytes and
// the next packet.
func TestFilesLost(t *testing.T) {
	a, b, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
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

// TestTryWrite checks that TryWrite sends data with descriptors while there is room, and never
// waits.
func TestTryWrite(t *testing.T) {
	a, b, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	if !a.TryWrite([]byte("one"), []int{0, 1}) {
		t.Fatal("no room")
	}
	got, fds, err := b.Read(2)
	CloseAll(fds)
	if err != nil || string(got) != "one" || len(fds) != 2 {
		t.Fatalf("%q, %d descriptors, %v", got, len(fds), err)
	}
	n := 0
	for a.TryWrite(make([]byte, 1000), nil) {
		n++
	}
	for ; n > 0; n-- {
		if got, _, err := b.Read(0); err != nil || len(got) != 1000 {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	}
	if !a.TryWrite([]byte("more"), nil) {
		t.Error("no room after all was read")
	}
	b.Close()
	if a.TryWrite([]byte("x"), nil) || a.TryWrite(make([]byte, MaxPacket+1), nil) {
		t.Error("sent to nobody")
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
