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

// DetachPolicy is the reaction to the XDP program being detached. From then on the kernel receives
// the frames of iwarpd's connections, and resets them.
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

// watchProgram checks p at each tick until the server is closed.
func (s *Server) watchProgram(p Program, tick <-chan time.Time) {
	defer s.wg.Done()
	for {
		select {
		case <-tick:
			s.checkProgram(p)
		case <-s.done:
			return
		}
	}
}

// checkProgram applies the policy if p is not attached.
func (s *Server) checkProgram(p Program) {
	if ok, err := p.Attached(); ok || err != nil { // fails only if memory is short
		return
	}
	s.mu.Lock()
	first, policy := s.detached == nil, s.cfg.Detached
	s.mu.Unlock()
	var err error
	if policy == DetachAttach {
		err = p.Attach()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if first {
		s.counters.detached.Add(1)
		s.log.Error("the XDP program was detached from the interface by another program", zap.String("interface", s.cfg.Interface))
	}
	if policy == DetachAttach && err == nil {
		s.detached = nil
		s.log.Warn("the XDP program is attached again", zap.String("interface", s.cfg.Interface))
		return
	}
	if !first {
		return
	}
	s.detached = errorf(unreachable, "ctrl: the XDP program was detached from the interface %s by another program (bpftool): restart iwarpd, or see xdp-detached in its configuration", s.cfg.Interface)
	n := endConns(s, func(*conn) error { return s.detached })
	s.log.Error("connections were ended: no frame reaches them", zap.Int("connections", n), zap.NamedError("reattach", err))
}
