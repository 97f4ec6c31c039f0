package ctrl

import (
	"container/list"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// awayWait is the time that a system call which a client can delay may take.
const awayWait = time.Second

// userAway is the number of threads that one user can block in system calls. In the last quarter of all it is one.
const userAway = 16

// awayThreads runs functions that may block, each in a goroutine of its own, as many at a time as the limits allow. The others wait. Users take
// turns, those that run nothing first, however many functions each has waiting. It takes constant time, whatever waits.
type awayThreads struct {
	most    int        // limit of running
	mu      sync.Mutex // guards the rest
	running int
	users   map[uint32]*awayUser // that have something running or waiting
	// The users that have something waiting, in the order of their turns: those that run nothing, and those that run less than userAway.
	idle, busy list.List
}

type awayUser struct {
	uid     uint32
	running int
	calls   []*awayCall // waiting
	in      *list.List  // idle, busy or nil
	turn    *list.Element
}

// awayCall is a function that runs, or is to run.
type awayCall struct {
	f     func()
	began chan struct{} // closed when f is called
	over  chan struct{} // closed when f has returned
}

// do runs f for a user, at once or when it is its turn.
func (t *awayThreads) do(uid uint32, f func()) *awayCall {
	t.mu.Lock()
	defer t.mu.Unlock()
	u := t.users[uid]
	if u == nil {
		u = &awayUser{uid: uid}
		if t.users == nil {
			t.users = make(map[uint32]*awayUser)
		}
		t.users[uid] = u
	}
	call := &awayCall{f: f, began: make(chan struct{}), over: make(chan struct{})}
	u.calls = append(u.calls, call)
	t.place(u)
	t.next()
	return call
}

// next starts what the limits allow. Called with mu held.
func (t *awayThreads) next() {
	for t.running < t.most {
		in := &t.idle
		if in.Len() == 0 && t.running < t.most-t.most/4 {
			in = &t.busy
		}
		if in.Len() == 0 {
			return
		}
		u := in.Remove(in.Front()).(*awayUser)
		u.in = nil
		call := u.calls[0]
		u.calls = u.calls[1:]
		t.running++
		u.running++
		t.place(u)
		close(call.began)
		go t.run(u, call)
	}
}

// place puts u at the end of the list where it belongs, unless it is in that list. Called with mu held.
func (t *awayThreads) place(u *awayUser) {
	var in *list.List
	switch {
	case len(u.calls) == 0 || u.running == userAway:
	case u.running == 0:
		in = &t.idle
	default:
		in = &t.busy
	}
	if u.in == in {
		return
	}
	if u.in != nil {
		u.in.Remove(u.turn)
	}
	if u.in = in; in != nil {
		u.turn = in.PushBack(u)
	}
}

func (t *awayThreads) run(u *awayUser, call *awayCall) {
	call.f()
	close(call.over)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running--
	u.running--
	t.place(u)
	if u.running == 0 && len(u.calls) == 0 {
		delete(t.users, u.uid)
	}
	t.next()
}

// away runs f, a system call that a client can delay indefinitely, in a goroutine of its own. It returns true when f has returned. If the
// client delays it, the client is cut off, what it holds stays in its quotas until f returns, and the result is false: the caller must not
// release what f was to free. So it is if the server is closed before f begins. Only the session's own goroutine calls it, never with
// Server.mu held.
func (c *session) away(what string, f func()) bool {
	call := c.srv.threads.do(c.cred.Uid, f)
	select {
	case <-call.began:
	case <-c.srv.done:
		c.holdUntil(call.over)
		return false
	}
	return c.await(what, call.over)
}

// await waits until over is closed, at most awayWait. Then it cuts off the client, which delays the daemon in what, and returns false.
func (c *session) await(what string, over <-chan struct{}) bool {
	if closed(over, awayWait) {
		return true
	}
	c.holdUntil(over)
	c.cutOff(errorf(invalid, "ctrl: the client delays the daemon in %s", what))
	return false
}

// closed reports whether over is closed, or will be within limit.
func closed(over <-chan struct{}, limit time.Duration) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-over:
		return true
	case <-t.C:
	}
	select { // select chooses at random if the process was stopped, and both are ready
	case <-over:
		return true
	default:
		return false
	}
}

// holdUntil keeps the session charged until over is closed, even after the session has ended.
// Only the session's own goroutine calls it.
func (c *session) holdUntil(over <-chan struct{}) {
	c.stuck = append(slices.DeleteFunc(c.stuck, func(over <-chan struct{}) bool { return closed(over, 0) }), over)
}

// free returns the memory of rings to the kernel. It must be called without Server.mu: the kernel takes the lock of the memfd, which a
// client can hold by writing to its copy of the descriptor from a page that never arrives.
func (c *session) free(rings ...interface{ Free() error }) bool {
	return c.away("its rings", func() {
		for _, r := range rings {
			_ = r.Free()
		}
	})
}

// closeFiles closes descriptors that came from the client. Closing a FUSE file may wait for the client; closing a memfd does not, nor a socket
// that no longer has SO_LINGER.
func (c *session) closeFiles(fds []int) {
	var odd []int
	for _, fd := range fds {
		if shm.IsMemfd(fd) {
			unix.Close(fd)
		} else {
			odd = append(odd, fd)
		}
	}
	if len(odd) > 0 {
		c.away("a descriptor that it sent to close", func() {
			for _, fd := range odd {
				_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
			}
			seqpacket.CloseAll(odd)
		})
	}
}

// shutdown shuts down the connection to the client, which ends the session. Any goroutine may call
// it: the session closes the descriptors that are queued in the socket.
func (c *session) shutdown() {
	c.hangUp()
	c.conn.Shutdown()
}
