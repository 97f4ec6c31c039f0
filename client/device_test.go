package iwarp

import (
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// late is a context whose end is seen late: first by a look, and only then by those that wait for it.
type late struct{ context.Context }

func (late) Err() error { return context.DeadlineExceeded }

// TestOpenWaitFull checks that OpenWait waits for a daemon to which more programs connect at once than its socket holds.
func TestOpenWaitFull(t *testing.T) {
	at := &unix.SockaddrUnix{Name: filepath.Join(t.TempDir(), "socket")}
	socket := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	daemon := socket()
	err := errors.Join(unix.Bind(daemon, at), unix.Listen(daemon, 0))
	for err == nil {
		err = unix.Connect(socket(), at)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	for _, ended := range []func(context.Context) context.Context{
		func(ctx context.Context) context.Context { return ctx },
		func(ctx context.Context) context.Context { return late{ctx} }, // during the first attempt
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := OpenWait(ended(ctx), at.Name); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it did not wait: %v", err)
		}
	}
}

// TestOpenWaitDenied checks that OpenWait makes a second attempt at a socket that it may not use, and gives up then.
func TestOpenWaitDenied(t *testing.T) {
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	if err := unix.Capset(&header, &none[0]); err != nil { // root may use any file
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "socket")
	daemon, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(daemon)
	if err := errors.Join(unix.Bind(daemon, &unix.SockaddrUnix{Name: path}), unix.Chmod(path, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenWait(t.Context(), path); !errors.Is(err, unix.EACCES) {
		t.Errorf("a socket that it may not use: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*reopenEvery/2)
	defer cancel()
	time.AfterFunc(reopenEvery/10, func() { _ = unix.Chmod(path, 0o600) })
	if _, err := OpenWait(ctx, path); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a socket that it may use a moment later: %v", err)
	}
}

// TestOldDaemon checks that the status of a daemon that knows only one interface has it in the list of interfaces.
func TestOldDaemon(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	daemon, err := seqpacket.FromFD(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer daemon.Close()
	go func() {
		only := &ctrlpb.DeviceAttr{Interface: "eth0", Link: "down"}
		for {
			b, _, err := daemon.Read(0)
			var req ctrlpb.Request
			if err != nil || proto.Unmarshal(b, &req) != nil {
				return
			}
			r := &ctrlpb.Reply{Id: req.Id, Body: &ctrlpb.Reply_Hello{Hello: &ctrlpb.HelloReply{Version: 1, Device: only}}}
			if req.GetQueryStatus() != nil {
				r.Body = &ctrlpb.Reply_Status{Status: &ctrlpb.StatusReply{Device: only}}
			}
			b, err = proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: r}})
			if err != nil || daemon.Write(b, nil) != nil {
				return
			}
		}
	}()
	d, err := OpenFD(t.Context(), fds[1], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s, err := d.Admin().Status(t.Context())
	if all := s.GetDevices(); err != nil || len(all) != 1 || all[0].Interface != "eth0" || d.Attr().Interface != "eth0" {
		t.Errorf("%v, %v", all, err)
	}
}

// TestUnreadable checks that a failure to read from the daemon is not taken for the end of the daemon alone.
func TestUnreadable(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	if _, err := unix.Write(fds[0], make([]byte, seqpacket.MaxPacket+1)); err != nil {
		t.Fatal(err)
	}
	_, err = OpenFD(t.Context(), fds[1], nil)
	if !errors.Is(err, ErrDaemonGone) || !errors.Is(err, seqpacket.ErrTooLong) {
		t.Errorf("the reason is lost: %v", err)
	}
}

// TestLackOfBuffers checks that a request waits for buffers of the kernel, but not forever and not longer than its
// context, and for nothing else.
func TestLackOfBuffers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		lacks int // attempts for which there are none
		err   error
		limit time.Duration // of the context
		want  error
		after time.Duration
	}{
		{"for a moment", 100, unix.ENOBUFS, time.Hour, nil, 100 * time.Millisecond},
		{"no memory", 100, unix.ENOMEM, time.Hour, nil, 100 * time.Millisecond},
		{"forever", 1 << 30, unix.ENOBUFS, time.Hour, unix.ENOBUFS, 5 * time.Second},
		{"longer than the context", 1 << 30, unix.ENOBUFS, 10500 * time.Microsecond, context.DeadlineExceeded, 11 * time.Millisecond},
		{"another error", 1, unix.EPIPE, time.Hour, unix.EPIPE, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), tt.limit)
			defer cancel()
			began, attempts := time.Now(), 0
			err := whenBuffers(ctx, func() error {
				if attempts++; attempts <= tt.lacks {
					return tt.err
				}
				return nil
			})
			if took := time.Since(began); !errors.Is(err, tt.want) || took != tt.after {
				t.Errorf("%s: %v after %v; want %v after %v", tt.name, err, took, tt.want, tt.after)
			}
		})
	}
}
