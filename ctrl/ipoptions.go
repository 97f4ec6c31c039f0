package ctrl

import (
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
)

// ipOptions returns the fields of IP and VLAN headers that a client requests. def has the
// defaults.
func ipOptions(def dataplane.IPOptions, w *ctrlpb.Startup) (o dataplane.IPOptions, err error) {
	o = def
	if w == nil {
		return o, nil
	}
	for _, f := range []struct {
		name        string
		want        *uint32
		least, most uint32
		set         *uint8
	}{
		{"DSCP", w.Dscp, 0, 63, &o.DSCP},
		{"TTL", w.Ttl, 1, 255, &o.TTL},
		{"VLAN priority", w.Priority, 0, 7, &o.Priority},
	} {
		if f.want == nil {
			continue
		}
		if *f.want < f.least || *f.want > f.most {
			return o, errorf(invalid, "ctrl: a %s is %d to %d, not %d", f.name, f.least, f.most, *f.want)
		}
		*f.set = uint8(*f.want)
	}
	return o, nil
}

// setDSCP changes the DSCP of an established connection (RFC 9293 3.9.2, SHLD-21).
func setDSCP(c *session, r *ctrlpb.SetDSCP) error {
	o, err := ipOptions(dataplane.IPOptions{}, &ctrlpb.Startup{Dscp: &r.Dscp})
	if err != nil {
		return err
	}
	id, err := upConn(c, r.Qp)
	if err != nil {
		return err
	}
	if err := c.srv.engine.SetDSCP(id, o.DSCP); err != nil {
		return errorf(badState, "ctrl: the DSCP of queue pair %d: %w", r.Qp, err)
	}
	return nil
}

// upConn returns the established connection of a queue pair.
func upConn(c *session, qp uint32) (dataplane.ConnID, error) {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	q, err := c.qpOf(qp)
	if err != nil {
		return 0, err
	}
	if q.conn == nil || q.conn.state != connUp {
		return 0, errorf(badState, "ctrl: queue pair %d has no established connection: wait for the event", qp)
	}
	return q.conn.id, nil
}
