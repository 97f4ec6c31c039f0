package seqpacket

import (
	"errors"
	"os"
	"testing"

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
			octets, got, err := b.Read(MaxFDs)
			if string(octets) != text {
				t.Errorf("room for %d: %q, want %q", room, octets, text)
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
