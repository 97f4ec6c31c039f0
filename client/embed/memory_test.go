package embed_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/term"
)

// TestHole checks that a client that punches a hole into registered memory is disconnected when a peer accesses it,
// and that no page is allocated in its place.
func TestHole(t *testing.T) {
	const size = 1 << 20
	for _, tt := range []struct {
		name   string
		access func(ctx context.Context, c *iwarp.Conn, r iwarp.Remote)
	}{
		{"Write", func(ctx context.Context, c *iwarp.Conn, r iwarp.Remote) { _ = c.Write(ctx, r, make([]byte, size)) }}, // it may have been acknowledged before that
		{"Read", func(ctx context.Context, c *iwarp.Conn, r iwarp.Remote) { _ = c.Read(ctx, r, make([]byte, size)) }},
		{"FetchAdd", func(ctx context.Context, c *iwarp.Conn, r iwarp.Remote) { _, _ = c.FetchAdd(ctx, r, 1) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b, ctx := pair(t, embed.PairConfig{})
			ca, cb := connect(t, ctx, a, b, nil)
			fd, err := unix.MemfdCreate("own", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Ftruncate(fd, size); err != nil {
				t.Fatal(err)
			}
			mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Munmap(mem)
			mr, err := cb.PD().Register(ctx, fd, mem, 0, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteAtomic)
			if err != nil {
				t.Fatal(err)
			}
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size); err != nil {
				t.Fatal(err)
			}
			tt.access(ctx, ca, mr.RemoteAt(0, size))
			dev := b.Device()
			select {
			case <-dev.Done():
			case <-ctx.Done():
				t.Fatal("the client was not cut off")
			}
			if err := dev.Err(); !strings.Contains(err.Error(), "client's memory") {
				t.Errorf("cut off: %v", err)
			}
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil || st.Blocks != 0 {
				t.Errorf("%d bytes were allocated: %v", st.Blocks*512, err)
			}
		})
	}
}

// TestRegister registers memory of the caller's own memfd, by address and zero-based.
func TestRegister(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, nil)
	fd, err := unix.MemfdCreate("own", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 8192); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	const rw = iwarp.AccessLocalWrite | iwarp.AccessRemoteWrite
	mr, err := cb.PD().Register(ctx, fd, mem[4096:], 4096, rw|iwarp.AccessZeroBased)
	if err != nil {
		t.Fatal(err)
	}
	if mr.Base() != 0 {
		t.Errorf("base %#x", mr.Base())
	}
	if err := ca.Write(ctx, iwarp.Remote{Addr: 10, RKey: mr.RKey(), Len: 5}, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := ca.Send(ctx, nil); err != nil { // the Write is placed before the Send is received
		t.Fatal(err)
	}
	if _, err := cb.Recv(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if string(mem[4106:4111]) != "hello" {
		t.Errorf("%q", mem[4100:4120])
	}
	if err := unix.Ftruncate(fd, 0); err == nil {
		t.Error("registered memory could be taken away")
	}
	if err := mr.Close(); err != nil {
		t.Error(err)
	}
	if _, err := cb.PD().Register(ctx, fd, make([]byte, 16384), 0, rw); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("more than the memfd has: %v", err)
	}
	if _, err := cb.PD().Register(ctx, 1<<30, mem, 0, rw); !errors.Is(err, unix.EBADF) {
		t.Errorf("a descriptor that is none: %v", err)
	}
	if _, err := cb.PD().Alloc(ctx, 10, rw); err != nil {
		t.Errorf("the device after a bad descriptor: %v", err)
	}
}

func TestInvalidate(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	ca, cb := connect(t, ctx, a, b, nil)
	if err := ca.SendMsg(ctx, []byte("x"), iwarp.SendMode{Solicited: true}); err != nil {
		t.Fatal(err)
	}
	if n, info, err := cb.RecvMsg(ctx, make([]byte, 1)); err != nil || n != 1 || !info.Solicited {
		t.Errorf("%d, %+v, %v", n, info, err)
	}
	if err := ca.Send(ctx, []byte("longer")); err != nil {
		t.Fatal(err)
	}
	if _, err := cb.Recv(ctx, make([]byte, 3)); !errors.Is(err, iwarp.ErrMessage) {
		t.Errorf("short buffer: %v", err)
	}
	if n, err := cb.Recv(ctx, make([]byte, 6)); err != nil || n != 6 {
		t.Errorf("the message is gone: %d, %v", n, err)
	}
	// A peer cannot invalidate a region that was registered through the control plane.
	mr := alloc(t, ctx, cb, 64, iwarp.AccessLocalWrite)
	_ = ca.SendMsg(ctx, nil, iwarp.SendMode{Invalidate: mr.RKey()})
	if _, err := ca.Recv(ctx, nil); !errors.Is(err, term.ErrCannotInvalidate) && !errors.Is(err, term.ErrOpInvalidate) {
		t.Errorf("invalidate: %v", err)
	}
}

// TestWriteRefused checks that a Write to memory without remote-write access may succeed, since it has no response,
// and that the Read after it fails with the reason, as docs/programming.md says.
func TestWriteRefused(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	for range 20 {
		ca, cb := connect(t, ctx, a, b, nil)
		mr := alloc(t, ctx, cb, 4096, iwarp.AccessRemoteRead)
		buf := make([]byte, 100)
		var te *iwarp.TerminateError
		if err := ca.Write(ctx, mr.Remote(), buf); err != nil && !errors.As(err, &te) {
			t.Errorf("write: %v", err)
		}
		te = nil
		if err := ca.Read(ctx, mr.Remote(), buf[:1]); !errors.As(err, &te) || !te.Remote {
			t.Errorf("read after it: %v", err)
		}
		te = nil
		if _, err := cb.Recv(ctx, buf); !errors.As(err, &te) || te.Remote {
			t.Errorf("at the other side: %v", err)
		}
		ca.Close()
		cb.Close()
	}
}
