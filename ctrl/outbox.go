package ctrl

import (
	"container/list"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/printable"
)

const (
	// maxQueued bounds the messages that a client has not read, in addition to perQP for each
	// queue pair and one for each connection: all may end at once.
	maxQueued, perQP = 1024, 4
	// maxQueuedFDs bounds the descriptors that a client has not read, here or in the socket,
	// while it is served. No quota covers them and their memory.
	maxQueuedFDs = 64
	// messageShare is the number of bytes of messages that each client may leave unread,
	// regardless of the other clients of its user.
	messageShare = 64 << 10
	// messageOverhead is the memory that a message takes in addition to its bytes.
	messageOverhead = 128
)

// outbox holds the messages for a client, which its writer sends. Any goroutine may call its methods.
type outbox struct {
	sess *session
	quit chan struct{} // closed when the session ends, which stops the writer

	late atomic.Bool   // something waits for room
	room atomic.Int64  // maximum number of queued messages
	more chan struct{} // signalled when a message is queued
	less chan struct{} // signalled when fds shrinks

	mu      sync.Mutex // acquired last; guards the rest
	queue   list.List  // of *outMessage: a slice would keep the memory of those that were sent
	size    uint64     // bytes charged for queue, and for a message that is being written
	writing bool       // a goroutine writes to the socket
	fds     int        // descriptors that the client has not read, as far as known
	flying  int        // those of fds that were written
	closed  bool       // fds is no longer counted
}

func (o *outbox) init(sess *session) {
	o.sess, o.quit = sess, make(chan struct{})
	o.more, o.less = make(chan struct{}, 1), make(chan struct{}, 1)
}

// outMessage is a queued message. Its descriptors are closed when it is sent or dropped.
type outMessage struct {
	b   []byte
	fds []int
}

// size returns the memory that m takes.
func (m *outMessage) size() uint64 { return uint64(len(m.b)) + messageOverhead }

// put queues m and takes ownership of its descriptors. An error means that the client does not read its messages.
func (o *outbox) put(m *outMessage) error {
	o.countFDs(len(m.fds), 0)
	size, limit := m.size(), o.limit()
	o.mu.Lock()
	n, left := o.queue.Len(), o.size
	all := o.sess.use.unread.Add(size)
	full := int64(n) >= o.room.Load() || left+size > messageShare && all > limit
	if full {
		o.sess.use.unread.Add(-size)
	} else {
		o.queue.PushBack(m)
		o.size += size
	}
	o.mu.Unlock()
	if full {
		o.countFDs(-len(m.fds), 0)
		seqpacket.CloseAll(m.fds)
		return fmt.Errorf("ctrl: the client left %s unread, %d bytes; all of its user %d bytes, whose limit is %d: read them, or raise max-messages",
			printable.Count(n, "message"), left, all-size, limit)
	}
	o.wake()
	return nil
}

// try writes a message from the caller's goroutine if nothing else is queued and the socket has room. Waking the
// writer would take longer. If it returns true, it has taken ownership of the descriptors.
func (o *outbox) try(b []byte, fds []int) bool {
	o.mu.Lock()
	direct := o.queue.Len() == 0 && !o.writing
	o.writing = o.writing || direct
	o.mu.Unlock()
	if !direct {
		return false
	}
	sent := o.sess.conn.TryWrite(b, fds)
	o.mu.Lock()
	o.writing = false
	waiting := o.queue.Len() > 0
	o.mu.Unlock()
	if !sent {
		return false
	}
	o.countFDs(len(fds), len(fds))
	seqpacket.CloseAll(fds)
	if waiting {
		o.wake()
	}
	return true
}

// wake wakes the writer.
func (o *outbox) wake() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

// limit bounds the bytes that all clients of the user leave unread.
func (o *outbox) limit() uint64 { return o.sess.policy().limits.Messages }

// behind reports whether half of what put takes is unread: so much that what peers cause must not add to it.
func (o *outbox) behind() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return 2*int64(o.queue.Len()) >= o.room.Load() || 2*o.size > messageShare && o.sess.use.unread.Load() > o.limit()/2
}

// writeLoop sends queued messages until the session ends.
func (o *outbox) writeLoop() {
	defer o.sess.srv.wg.Done()
	ok := true
	for last := false; !last; {
		select {
		case <-o.more:
		case <-o.quit:
			last = true
		}
		for m := o.next(); m != nil; m = o.next() {
			ok = ok && o.write(m)
			o.written(m, ok)
		}
	}
}

// write sends m. If that fails it ends the session and returns false.
func (o *outbox) write(m *outMessage) bool {
	switch err := o.sess.conn.Write(m.b, m.fds); {
	case err == nil:
		return true
	case hasEnded(err):
		o.sess.shutdown() // stops the reader too
	default: // the kernel lacks memory, for example
		o.sess.cutOff(errorf(internal, "ctrl: a message cannot be sent: %w", err))
	}
	return false
}

// next returns the message to be written next, or nil if there is none or another goroutine is writing.
func (o *outbox) next() *outMessage {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.queue.Len() == 0 || o.writing { // try wakes the writer when it returns
		return nil
	}
	o.writing = true
	return o.queue.Remove(o.queue.Front()).(*outMessage)
}

// written releases m, which was sent if ok is true, and dropped otherwise.
func (o *outbox) written(m *outMessage, ok bool) {
	size := m.size()
	o.sess.use.unread.Add(-size)
	seqpacket.CloseAll(m.fds)
	o.mu.Lock()
	o.writing = false
	o.size -= size
	o.mu.Unlock()
	if n := len(m.fds); ok {
		o.countFDs(0, n)
	} else {
		o.countFDs(-n, 0)
	}
	select {
	case o.less <- struct{}{}:
	default:
	}
	if o.late.Load() {
		o.sess.showLate()
	}
}

// unreadFDs returns the number of descriptors that the client has not read. Those in the socket
// count as in flight for the kernel too, which bounds them over all clients.
func (o *outbox) unreadFDs() int {
	o.mu.Lock()
	n, flying := o.fds, o.flying
	o.mu.Unlock()
	if n == 0 || flying == 0 || o.sess.conn.Unread() > 0 {
		return n
	}
	o.countFDs(-flying, -flying)
	return n - flying
}

// countFDs adds to the numbers of descriptors that the client has not read, and that are in the
// socket. Server.mu must not be held unless both arguments are 0.
func (o *outbox) countFDs(unread, flying int) {
	if unread == 0 && flying == 0 {
		return
	}
	o.sess.srv.mu.Lock()
	defer o.sess.srv.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closed {
		o.fds += unread
		o.flying += flying
		o.sess.srv.files.extra += uint64(unread) // unread may be negative; unsigned addition wraps
	}
}

// close stops counting the descriptors that the client has not read. Called with Server.mu held.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sess.srv.files.extra -= uint64(o.fds)
	o.closed = true
}
