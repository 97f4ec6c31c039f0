package dataplane

import "slices"

// timeWait is the queue of connections in TIME-WAIT, oldest first, from at on. Some entries
// have ended.
type timeWait struct {
	q  []*tcpConn
	at int
}

// add appends c, which has entered TIME-WAIT.
func (tw *timeWait) add(c *tcpConn) {
	if len(tw.q) == cap(tw.q) {
		// Remove ended connections before growing. There is room for a quarter more then: few adds look at all.
		kept := slices.DeleteFunc(tw.q[tw.at:], func(c *tcpConn) bool { return c.gone })
		tw.q, tw.at = slices.Grow(kept, len(kept)/4+1), 0
	}
	tw.q = append(tw.q, c)
}

// evict removes the connection with the least time left in TIME-WAIT to make room for a new
// one, as other hosts do. It returns false if there is none.
func (w *worker) evict() bool {
	tw := &w.timeWait
	for tw.at < len(tw.q) {
		c := tw.q[tw.at]
		tw.q[tw.at] = nil
		tw.at++
		if !c.gone {
			c.discard(w)
			w.stats.Evicted++
			return true
		}
	}
	tw.q, tw.at = tw.q[:0], 0
	return false
}

// makePlace reports whether there is room for another TCP connection. If the table is full, it evicts
// one in TIME-WAIT.
func (w *worker) makePlace() bool { return w.stats.Conns < uint64(w.e.cfg.MaxConns) || w.evict() }
