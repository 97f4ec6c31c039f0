package ctrl

import (
	"context"
	"math"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// Drain refuses new connections and clients, announces to the clients that the daemon ends in
// timeout, and waits until no connection is left, nor the last data of one, or ctx is done. It
// returns the number of remaining connections. Close must follow.
func (s *Server) Drain(ctx context.Context, timeout time.Duration) int {
	s.mu.Lock()
	if s.drained != nil || s.closed {
		defer s.mu.Unlock()
		return len(s.conns)
	}
	drained := make(chan struct{})
	s.drained = drained
	s.closeSockets()
	listeners := values(s.listeners)
	for _, l := range listeners { // peers are refused; the clients keep their handles
		s.stopListening(l)
	}
	s.mu.Unlock()
	for _, l := range listeners {
		s.engine.Unlisten(l.id)
	}
	s.mu.Lock()
	ms := uint32(min(timeout.Milliseconds(), math.MaxUint32))
	for _, c := range s.sessions {
		if c.binding != nil {
			c.event(&ctrlpb.Event{Body: &ctrlpb.Event_Draining{Draining: &ctrlpb.Draining{TimeoutMs: ms}}})
		}
	}
	s.checkDrained()
	s.mu.Unlock()
	select {
	case <-drained:
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// checkDrained ends Drain's wait if no connection is left. Called with mu held.
func (s *Server) checkDrained() {
	if s.drained == nil || len(s.conns)+len(s.lingers) > 0 {
		return
	}
	select {
	case <-s.drained:
	default:
		close(s.drained)
	}
}

var errDraining = errorf(draining, "ctrl: the daemon is stopping: open the device again when it has restarted")

// unready returns why no connection can be made now over d or, if d is nil, over any device. It
// returns nil if one can.
func (s *Server) unready(d *device) error {
	if s.drained != nil {
		return errDraining
	}
	return s.devices.down(d)
}
