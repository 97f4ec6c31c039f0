package ctrl

import (
	"errors"
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

// farStuck ends a client whose far memory does not respond.
func (c *session) farStuck() {
	c.cutOff(errorf(invalid, "ctrl: the client makes the daemon wait for its far memory"))
}

// attachMemory accepts a descriptor of memory that will contain regions.
func (c *session) attachMemory(r *ctrlpb.AttachMemory, fds []int) error {
	switch {
	case len(fds) != 1:
		return errorf(invalid, "ctrl: AttachMemory needs one descriptor, not %d", len(fds))
	case r.Near && c.near != nil, !r.Near && c.memory != nil:
		return errorf(badState, "ctrl: the memory of the client is attached already")
	}
	fd, err := seqpacket.Dup(fds[0])
	if err != nil {
		return errorf(internal, "ctrl: memory of the client: %w", shm.Limit(err))
	}
	if !r.Near {
		return c.attachFar(fd)
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
	c.near = near
	return nil
}

// detachNear ends the use of near memory, which has no regions any more.
func (c *session) detachNear() {
	if c.near == nil {
		return
	}
	_ = c.near.Close()
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	c.srv.maps.extra -= shm.ObjectMaps
}

// attachFar accepts fd, the client's /proc/self/mem.
func (c *session) attachFar(fd int) error {
	s := c.srv
	if err := s.takeMover(c); err != nil {
		c.closeFiles([]int{fd})
		return err
	}
	pid := int(c.cred.Pid)
	if c.contained {
		pid = 0
	}
	var mem *far.Memory
	var err error
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
	} else if err = c.mover.Start(); err != nil {
		_ = mem.Close()
	}
	if err != nil {
		s.mu.Lock()
		c.give(resRings, far.Limit)
		s.giveMover(c)
		s.mu.Unlock()
		return err
	}
	c.memory = mem
	return nil
}

// takeMover charges the memory and the thread of a client's Mover.
func (s *Server) takeMover(c *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.movers.room(c.cred.Uid, c.use.movers, 1); err != nil {
		return err
	}
	if err := c.take(resRings, far.Limit); err != nil {
		return err
	}
	c.moves = true
	c.use.movers++
	s.movers.extra++
	return nil
}

// giveMover returns the thread. Called with mu held.
func (s *Server) giveMover(c *session) {
	if c.moves {
		c.moves = false
		c.use.movers--
		s.movers.extra--
	}
}

// detachMemory ends the use of far memory, which no worker uses any more.
func (c *session) detachMemory() {
	if c.memory == nil {
		return
	}
	over := make(chan struct{})
	go func() { // it waits for the Mover, whose thread the client may block
		defer close(over)
		c.mover.Close()
		_ = c.memory.Close()
	}()
	c.await("closing its memory", over)
}

// fenceMemory returns when all data that workers have placed in far memory is there, unless the
// client is being ended.
func (c *session) fenceMemory() {
	if c.memory != nil && !c.dead && !c.cut.Load() {
		c.mover.Fence()
	}
}

// registerFar registers memory of the attached process.
func (c *session) registerFar(id verbs.PDID, r *ctrlpb.RegisterMR) (*verbs.Region, error) {
	const maxAddr = 1 << 57 // the address space with five-level page tables
	switch {
	case c.memory == nil:
		return nil, errors.New("far memory without AttachMemory")
	case r.Fast:
		return nil, errors.New("no fast registration of far memory")
	case r.Length > maxAddr || r.Offset > maxAddr-r.Length:
		return nil, verbs.ErrLength
	}
	return c.srv.table.RegisterFar(id, c.memory, r.Offset, r.Length, r.Base, verbs.Access(r.Access))
}
