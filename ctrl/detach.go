package ctrl

import (
	"time"

	"go.uber.org/zap"
)

// Program is the XDP program on the interface.
type Program interface {
	Attached() (bool, error)
	Attach() error // attaches it again
}

// DetachPolicy is the reaction to the XDP program being detached. After that the kernel
// receives the frames of iwarpd's connections, and resets them.
type DetachPolicy uint8

// Detach policies.
const (
	// DetachEnd ends all connections with this reason, and refuses new ones. It is the default:
	// the usual tools (ip link, bpftool net) cannot remove the program, so detaching its
	// bpf_link is a deliberate act.
	DetachEnd DetachPolicy = iota
	// DetachAttach attaches the program again. Connections continue, except those reset in the
	// meantime.
	DetachAttach
)

// programPeriod is the polling interval. The kernel sends no notification when a bpf_link is
// detached.
const programPeriod = 500 * time.Millisecond

// watchProgram checks the program of d until the server is closed.
func (s *Server) watchProgram(d *device) {
	t := time.NewTicker(programPeriod)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.checkProgram(d)
		case <-s.done:
			return
		}
	}
}

// checkProgram applies the policy if the program of d is not attached.
func (s *Server) checkProgram(d *device) {
	if ok, err := d.Program.Attached(); ok || err != nil { // the interface has been removed, or there is no memory
		return
	}
	s.mu.Lock()
	removed, policy := d.removed(), s.cfg.Detached
	s.mu.Unlock()
	if removed {
		return
	}
	var err error
	if policy == DetachAttach {
		err = d.Program.Attach()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.removed() { // in the meantime
		return
	}
	first := d.down == nil
	if first {
		s.counters.detached.Add(1)
		s.log.Error("the XDP program was detached from the interface by another program", zap.String("interface", d.Name))
	}
	if policy == DetachAttach && err == nil {
		d.down, d.detached = nil, false
		s.log.Warn("the XDP program is attached again", zap.String("interface", d.Name))
		return
	}
	if !first {
		return
	}
	d.down, d.detached = errorf(unreachable, "ctrl: the XDP program was detached from the interface %s by another program (bpftool): restart iwarpd, or see xdp-detached in its configuration", d.Name), true
	conns := s.connsOf(d)
	for _, c := range conns {
		s.end(c, d.down)
	}
	s.log.Error("connections were ended: no frame reaches them", zap.String("interface", d.Name), zap.Int("connections", len(conns)), zap.NamedError("reattach", err))
}
