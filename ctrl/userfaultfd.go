package ctrl

import "golang.org/x/sys/unix"

// openUserfaultfd opens /dev/userfaultfd for the client, which uses it to make a userfaultfd
// for its own memory. The device acts on the calling process, so the descriptor gives no access
// to the daemon.
func (c *session) openUserfaultfd() ([]int, error) {
	c.srv.mu.Lock()
	allowed := c.srv.cfg.Userfaultfd
	c.srv.mu.Unlock()
	if !allowed {
		return nil, errorf(permission, "ctrl: userfaultfd: the configuration forbids it (key userfaultfd)")
	}
	const path = "/dev/userfaultfd"
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errorf(internal, "ctrl: userfaultfd: %s: %w: give the daemon access to the device", path, err)
	}
	return []int{fd}, nil
}
