package dataplane

// A frame may hold thousands of FPDUs, and a gap that closes makes thousands of frames deliverable. So a turn bounds the FPDUs that it
// processes: then it receives nothing more, and the next turn goes on where it stopped.

// fpduBudget is the number of FPDUs of a turn. A frame, at most 64 KiB, is processed as a whole.
const fpduBudget = 2048

// received counts the work of a turn's reception.
type received struct {
	segments int        // DDP segments processed
	late     []*tcpConn // that have more in order than the turn could process
}

// enough reports whether the turn has used its budget.
func (r *received) enough() bool { return r.segments >= fpduBudget }

// postpone leaves the rest of what c has received to the next turn, which begins with it: nothing else is received before.
func (r *received) postpone(c *tcpConn) {
	if !c.late {
		c.late = true
		r.late = append(r.late, c)
	}
}

// catchUp begins a turn with what the last one has postponed.
func (w *worker) catchUp() int {
	w.segments = 0
	n := len(w.late)
	for len(w.late) > 0 && !w.enough() {
		c := w.late[0]
		w.late[0], w.late = nil, w.late[1:]
		c.late = false
		w.mark(&c.lane) // first, since the code below may fault
		full := c.mode == modeFull
		if full {
			c.takeAhead(w)
		}
		c.drainHeld(w)
		if full && !c.late {
			c.tcp.SetBacklog(c.backlog) // a socket and a program of this host go on
		}
	}
	return n
}
