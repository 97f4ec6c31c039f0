package ctrl

import (
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/far"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// farWait is the time that an access to a client's far memory may take; it may take up to half as long
// again. Meanwhile only the connections of that client wait.
const farWait = 3 * time.Second

// memory is the memory of a client in which it registers regions. Only the session's goroutine uses it.
type memory struct {
	sess  *session
	mover *far.Mover
	far   *far.Memory // nil if none is attached
	near  *shm.Object // nil if none is attached
}

// stuck ends a client whose far memory does not respond.
func (m *memory) stuck() {
	m.sess.cutOff(errorf(invalid, "ctrl: the client makes the daemon wait for its far memory"))
}

// attach accepts a descriptor of memory that will contain regions.
func (m *memory) attach(r *ctrlpb.AttachMemory, fds []int) error {
	c := m.sess
	switch {
	case len(fds) != 1:
		return errorf(invalid, "ctrl: AttachMemory needs one descriptor, not %d", len(fds))
	case r.Near && m.near != nil, !r.Near && m.far != nil:
		return errorf(badState, "ctrl: the memory of the client is attached already")
	}
	fd, err := seqpacket.Dup(fds[0])
	if err != nil {
		return errorf(internal, "ctrl: memory of the client: %w", shm.Limit(err))
	}
	if !r.Near {
		return m.attachFar(fd)
	}
	near, err := shm.OpenObject(fd)
	if err != nil {
		c.closeFiles([]int{fd})
		return errorf(invalid, "ctrl: near memory: %w", err)
	}
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.maps.room(c.cred.Uid, s.maps.of(&c.use.account), shm.ObjectMaps); err != nil {
		_ = near.Close()
		return err
	}
	s.maps.extra += shm.ObjectMaps
	m.near = near
	return nil
}

// attachFar accepts fd, the client's /proc/self/mem.
func (m *memory) attachFar(fd int) error {
	c := m.sess
	c.srv.mu.Lock()
	err := c.takeMover()
	c.srv.mu.Unlock()
	if err != nil {
		c.closeFiles([]int{fd})
		return err
	}
	pid := int(c.cred.Pid)
	if c.contained {
		pid = 0
	}
	var mem *far.Memory
	ok := c.away("opening its memory", func() {
		if mem, err = far.Open(fd, pid); err != nil {
			unix.Close(fd)
		}
	})
	if !ok { // the quota stays charged
		over := c.stuck[len(c.stuck)-1]
		go func() {
			if <-over; mem != nil {
				_ = mem.Close()
			}
		}()
		return errorf(invalid, "ctrl: far memory: the descriptor makes the daemon wait")
	}
	if err != nil {
		err = errorf(invalid, "ctrl: far memory: %w: open /proc/self/mem in the process that connected", err)
	} else if err = m.mover.Start(); err != nil {
		_ = mem.Close()
	}
	if err != nil {
		c.srv.mu.Lock()
		c.give(resRings, far.Limit)
		c.giveMover()
		c.srv.mu.Unlock()
		return err
	}
	m.far = mem
	return nil
}

// detach ends the use of the attached memory, which no worker uses any more.
func (m *memory) detach() {
	c := m.sess
	if m.far != nil {
		over := make(chan struct{})
		go func() { // it waits for the Mover, whose thread the client may block
			defer close(over)
			m.mover.Close()
			_ = m.far.Close()
		}()
		c.await("closing its memory", over)
	}
	if m.near != nil {
		m.mapping(func() { _ = m.near.Close() })
		c.srv.mu.Lock()
		defer c.srv.mu.Unlock()
		c.srv.maps.extra -= shm.ObjectMaps
	}
}

// mapping runs f, which maps or unmaps memory of the client and may take the kernel seconds. A client without a thread
// of its own uses one of mappers, so that hundreds of clients do not start a thread each.
func (m *memory) mapping(f func()) {
	c := m.sess
	if c.conn.Blocks() {
		f()
		return
	}
	f = sync.OnceFunc(f)
	select {
	case <-c.srv.mappers.do(c.cred.Uid, f).over:
	case <-c.srv.done: // none may be free
		f()
	}
}

// fence returns when no worker accesses what was deregistered or denied before the call, and all that they have placed
// is in the memory, unless the client is being ended.
func (c *session) fence() {
	c.srv.engine.Fence()
	c.mem.fence()
}

// fence returns when all data that workers have placed in far memory is there, or when the client is being ended. The
// workers have finished with it.
func (m *memory) fence() {
	if m.sess.hungUp.Err() == nil && m.far != nil {
		m.mover.Fence(m.sess.hungUp.Done())
	}
}

// register registers a region in the protection domain id: of far memory, of near memory, or of the memfd in fds. mem
// is what the daemon has mapped of it, nil for far memory.
func (m *memory) register(id verbs.PDID, r *ctrlpb.RegisterMR, fds []int) (
	region *verbs.Region, mem *shm.Region, err error,
) {
	const writes = verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteAtomic
	access := verbs.Access(r.Access)
	switch {
	case r.Far:
		region, err = m.registerFar(id, r)
		return region, nil, err
	case !r.Near:
		m.mapping(func() { mem, err = shm.MapRegion(fds[0], r.Offset, r.Length, access&writes != 0) })
	case m.near == nil:
		err = errors.New("near memory without AttachMemory")
	default:
		m.mapping(func() { mem, err = m.near.Slice(r.Offset, r.Length) })
	}
	if err != nil {
		return nil, nil, err
	}
	m.sess.binding.Memory.Add(mem.Bytes())
	if table := m.sess.srv.table; r.Fast {
		region, err = table.RegisterFast(id, mem.Bytes(), access)
	} else {
		region, err = table.Register(id, mem.Bytes(), r.Base, access)
	}
	if err != nil {
		m.unmap(mem)
	}
	return region, mem, err
}

// registerFar registers memory of the attached process.
func (m *memory) registerFar(id verbs.PDID, r *ctrlpb.RegisterMR) (*verbs.Region, error) {
	const maxAddr = 1 << 57 // the address space with five-level page tables
	switch {
	case m.far == nil:
		return nil, errors.New("far memory without AttachMemory")
	case r.Fast:
		return nil, errors.New("no fast registration of far memory")
	case r.Length > maxAddr || r.Offset > maxAddr-r.Length:
		return nil, verbs.ErrLength
	}
	return m.sess.srv.table.RegisterFar(id, m.far, r.Offset, r.Length, r.Base, verbs.Access(r.Access))
}

// unmap ends the use of mem, which no worker accesses.
func (m *memory) unmap(mem *shm.Region) {
	m.sess.binding.Memory.Remove(mem.Bytes())
	m.mapping(func() { mem.Close() })
}
