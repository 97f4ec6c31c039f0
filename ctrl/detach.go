package ctrl

import (
	"time"

	"go.uber.org/zap"
)

// Program is the XDP program on the interface.
type Program interface {
	Attached() (bool, error)
	Attach() error // again, after it was detached
}

// DetachPolicy is what happens when somebody detaches the XDP program. From then on the
// kernel gets the frames of iwarpd's connections, and resets them.
type DetachPolicy uint8

// The policies.
const (
	// DetachEnd ends all connections with the reason, and refuses others. It is the
	// default: the kernel refuses to remove the program by the usual means (ip link,
	// bpftool net), so whoever detaches its bpf_link wants the interface free of it.
	DetachEnd DetachPolicy = iota
	// DetachAttach attaches the program again. Connections go on, but for those that
	// got a segment meanwhile.
	DetachAttach
)

// programPeriod is how often the program is looked for. The kernel notifies nobody of a
// bpf_link that is detached.
const programPeriod = 500 * time.Millisecond

// watchProgram looks at p at each tick until the server is closed.
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

// checkProgram acts where p is not attached.
func (s *Server) checkProgram(p Program) {
	if ok, err := p.Attached(); ok || err != nil { // cannot fail but for want of memory
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
	n := len(s.conns)
	for _, sess := range s.sessions {
		for _, c := range values(sess.conns) {
			s.end(c, s.detached)
		}
	}
	for _, c := range values(s.conns) { // those that no client knows of yet
		s.end(c, s.detached)
	}
	s.log.Error("connections were ended: no frame reaches them", zap.Int("connections", n), zap.NamedError("reattach", err))
}
