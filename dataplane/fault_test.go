package dataplane

import (
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/sctp"
)

// TestFaultKeepsAssociations: an association without a session goes on after a
// fault in the memory of another connection's client.
func TestFaultKeepsAssociations(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, b := s.open()
	s.listenSCTP()
	s.dialSCTP(40001, 0).as.dial = nil // it asks for no session
	w := s.hosts[1].w
	var as *assoc
	s.until("association up", func() bool {
		for _, as = range w.sctp.assocs {
		}
		return as != nil && as.a.State() == sctp.Established && !as.carrier.dirty
	})
	w.mark(&as.carrier) // as a packet of it does
	w.fault(b, "a fault")
	if !slices.Contains(w.dirty, &as.carrier) {
		t.Error("the association is forgotten")
	}
	s.until("pumped", func() bool { return !as.carrier.dirty })
}
