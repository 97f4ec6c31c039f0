package testenv

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Capture runs dumpcap, which comes with tshark, on an interface with a pcap-filter(7) expression.
// stop ends the capture and returns the file. If the environment variable CAPTURES names a
// directory, the file is kept there as name.
func Capture(t testing.TB, ns *Namespace, ifname, filter, name string) (stop func() string) {
	t.Helper()
	dumpcap := RequireTool(t, "dumpcap")
	dir := os.Getenv("CAPTURES")
	if dir == "" {
		dir = t.TempDir()
	}
	file := filepath.Join(dir, name+".pcap")
	cmd := ns.Command(dumpcap, "-P", "-i", ifname, "-B", "64", "-w", file, "-f", fmt.Sprintf("%s or ether proto %#x", filter, markType))
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	lines := bufio.NewReader(stderr)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("testenv: dumpcap: %q %v", line, err)
		}
		if strings.HasPrefix(line, "File: ") {
			break
		}
	}
	return func() string {
		t.Helper()
		mark(t, ns, ifname, file)
		_ = cmd.Process.Signal(unix.SIGINT)
		var rest bytes.Buffer
		_, _ = rest.ReadFrom(lines)
		_ = cmd.Wait()
		if m := dropped.FindStringSubmatch(rest.String()); m == nil || m[1] != "0" {
			t.Logf("dumpcap missed frames: %s", strings.TrimSpace(rest.String()))
		}
		return file
	}
}

// markType is an Ethertype for experiments (IEEE 802).
const markType = 0x88b5

// mark sends a frame with an unknown Ethertype out of the captured interface, and waits until it is
// in the file. Everything received earlier is then in the file too.
func mark(t testing.TB, ns *Namespace, ifname, file string) {
	t.Helper()
	frame := make([]byte, 60)
	copy(frame, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, markType >> 8, markType & 0xff})
	nonce := frame[14:46]
	_, _ = rand.Read(nonce)
	if err := ns.Do(func() error {
		ifi, err := net.InterfaceByName(ifname)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: ifi.Index, Halen: 6})
	}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tail := make([]byte, 1<<20)
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		fi, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		n, err := f.ReadAt(tail, max(0, fi.Size()-int64(len(tail))))
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if bytes.Contains(tail[:n], nonce) {
			return
		}
	}
	t.Fatalf("testenv: dumpcap on %s has not seen the last frame within %v", ifname, patience)
}

var dropped = regexp.MustCompile(`received/dropped on interface .*: \d+/(\d+)`)
