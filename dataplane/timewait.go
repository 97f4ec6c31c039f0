package dataplane

import "github.com/iwarpd/iwarpd/mpa"

// enterTimeWait makes c the youngest of the connections in TIME-WAIT, which are many on a busy host. c needs its buffers no more.
func (w *worker) enterTimeWait(c *tcpConn) {
	c.waiting = w.timeWait.PushBack(c)
	c.rx, c.pre = mpa.Receiver{}, byteStream{}
}

// evict removes the connection in TIME-WAIT whose peer has sent nothing for the longest time to make
// room for a new one, as other hosts do. It returns false if there is none.
func (w *worker) evict() bool {
	oldest := w.timeWait.Front()
	if oldest == nil {
		return false
	}
	w.timeWait.Remove(oldest).(*tcpConn).discard(w)
	w.stats.Evicted++
	return true
}

// makePlace reports whether there is room for another TCP connection. If the table is full, it evicts
// one in TIME-WAIT.
func (w *worker) makePlace() bool { return w.stats.Conns < uint64(w.e.cfg.MaxConns) || w.evict() }
