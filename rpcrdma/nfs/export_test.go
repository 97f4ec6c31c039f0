package nfs_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// TestExport checks that MOUNT is served over TCP beside the export, and NFS where requested, and that a portmapper
// lists their ports. NLM and NSM are not served (RFC 8267 section 5.1).
func TestExport(t *testing.T) {
	testenv.RequireRoot(t)
	s := nfs.NewTestServer(t, nfs.Config{Dir: t.TempDir(), KeyFile: filepath.Join(t.TempDir(), "nfs.key")})
	var ports [3]int
	for i := range ports {
		ports[i] = testenv.Port(t, "127.0.0.9")
	}
	up, gone := make(chan struct{}), errors.New("no daemon")
	x := &nfs.Export{
		Server: s, Listen: "127.0.0.9:20049", MountPort: ports[0], PortmapPort: ports[1], TCPPort: ports[2],
		Open: func(ctx context.Context) (*iwarp.Device, error) { close(up); <-ctx.Done(); return nil, gone },
		Tell: func(format string, args ...any) { t.Errorf(format, args...) },
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	select {
	case <-up:
	case err := <-done:
		t.Fatal(err)
	}
	call := func(port int, prog, vers, proc uint32, args func(*rpc.Writer)) (*rpc.Reader, error) {
		t.Helper()
		c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.9", strconv.Itoa(port)))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		var w rpc.Writer
		sys := rpc.Sys{}
		(&rpc.Call{XID: 7, Prog: prog, Vers: vers, Proc: proc, Cred: sys.Auth()}).Start(&w)
		args(&w)
		if _, err := c.Write(append(binary.BigEndian.AppendUint32(nil, 1<<31|uint32(len(w.Body))), w.Body...)); err != nil {
			t.Fatal(err)
		}
		var mark [4]byte
		if _, err := io.ReadFull(c, mark[:]); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, binary.BigEndian.Uint32(mark[:])&^(1<<31))
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		return rpc.ParseReply(rpc.Msg{Body: b})
	}
	port := func(prog, vers uint32) uint32 {
		t.Helper()
		r, err := call(ports[1], nfs.ProgramPortmap, 2, 3, func(w *rpc.Writer) { w.U32(prog, vers, 6, 0) })
		if err != nil {
			t.Fatal(err)
		}
		return r.U32()
	}
	const nlm, nsm = 100021, 100024
	for _, c := range []struct{ prog, vers, want uint32 }{
		{nfs.ProgramMount, 3, uint32(ports[0])}, {nfs.ProgramNFS, 3, uint32(ports[2])}, {nlm, 4, 0}, {nsm, 1, 0},
	} {
		if got := port(c.prog, c.vers); got != c.want {
			t.Errorf("program %d is at port %d, not %d", c.prog, got, c.want)
		}
	}
	r, err := call(ports[0], nfs.ProgramMount, 3, 1, func(w *rpc.Writer) { w.String("/") })
	if err != nil || r.U32() != 0 {
		t.Fatal("MOUNT over TCP:", err)
	}
	fh := r.Opaque(64)
	if r, err := call(ports[2], nfs.ProgramNFS, 3, 1, func(w *rpc.Writer) { w.Opaque(fh) }); err != nil || r.U32() != 0 || r.U32() != 2 {
		t.Error("GETATTR of the root over TCP:", err)
	}
	if _, err := call(ports[2], nlm, 4, 0, func(*rpc.Writer) {}); !errors.Is(err, rpc.ProgUnavail) {
		t.Error("NLM:", err)
	}
	// The source address of a datagram may be forged: no reply is much longer than its call.
	u, err := net.Dial("udp", net.JoinHostPort("127.0.0.9", strconv.Itoa(ports[1])))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	_ = u.SetDeadline(time.Now().Add(time.Minute))
	for vers := uint32(2); vers <= 4; vers++ {
		for proc := range uint32(16) {
			var w rpc.Writer
			(&rpc.Call{XID: 7, Prog: nfs.ProgramPortmap, Vers: vers, Proc: proc}).Start(&w)
			if _, err := u.Write(w.Body); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 1<<16)
			if n, err := u.Read(b); err != nil || n > 2*len(w.Body) {
				t.Errorf("version %d, procedure %d: the reply to %d bytes over UDP has %d: %v", vers, proc, len(w.Body), n, err)
			}
		}
	}
}

// TestExportWaits checks that an export whose daemon is gone says so once, however often it tries.
func TestExportWaits(t *testing.T) {
	testenv.RequireRoot(t)
	s := nfs.NewTestServer(t, nfs.Config{Dir: t.TempDir(), KeyFile: filepath.Join(t.TempDir(), "nfs.key")})
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var lines []string
	opened := 0
	x := &nfs.Export{
		Server: s, Listen: net.JoinHostPort(a.Addr().String(), "20049"), Config: rpcrdma.DefaultConfig(true), Retry: time.Millisecond,
		Open: func(context.Context) (*iwarp.Device, error) {
			switch opened++; opened {
			case 1:
				return a.Device(), nil
			case 5:
				cancel()
			}
			return nil, errors.New("no daemon")
		},
		Tell: func(format string, args ...any) {
			if lines = append(lines, fmt.Sprintf(format, args...)); len(lines) == 1 {
				go a.Close()
			}
		},
	}
	if err := x.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if want := []string{"iwarp: closed; trying again", "no daemon; trying again"}; len(lines) == 0 || !slices.Equal(lines[1:], want) {
		t.Errorf("it said %q", lines)
	}
}

// TestExportRefuses checks that an export says which client it has refused, and why, and not for each attempt.
func TestExportRefuses(t *testing.T) {
	testenv.RequireRoot(t)
	s := nfs.NewTestServer(t, nfs.Config{Dir: t.TempDir(), KeyFile: filepath.Join(t.TempDir(), "nfs.key")})
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lines := make(chan string, 9)
	x := &nfs.Export{
		Server: s, Listen: net.JoinHostPort(a.Addr().String(), "20049"), Config: rpcrdma.DefaultConfig(true),
		Open: func(context.Context) (*iwarp.Device, error) { return a.Device(), nil },
		Tell: func(format string, args ...any) { lines <- fmt.Errorf(format, args...).Error() },
	}
	x.Config.MaxConns = 1
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx) }()
	<-lines // it serves
	c, err := b.Device().Dial(ctx, x.Listen, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 {
		if c, err := b.Device().Dial(ctx, x.Listen, nil); err == nil {
			c.Close()
			t.Fatal("a second client was not refused")
		}
	}
	select {
	case line := <-lines:
		if !strings.HasPrefix(line, b.Addr().String()+":") || !strings.HasSuffix(line, "refused: rpcrdma: too many connections") {
			t.Errorf("it said %q", line)
		}
	case <-ctx.Done():
		t.Error("it said nothing")
	}
	cancel()
	<-done
	if len(lines) > 0 {
		t.Errorf("it also said %q", <-lines)
	}
}
