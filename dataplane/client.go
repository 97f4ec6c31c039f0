package dataplane

import (
	"math/bits"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/shm"
)

// client is the state of a ClientBinding in one worker.
type client struct {
	b       *ClientBinding
	bells   *shm.Doorbells
	streams []*stream           // by doorbell bit
	failed  bool                // its memory has faulted: see failing
	group   *sched.Group[*lane] // apart, since a lane has it until the end of TIME-WAIT
}

func (w *worker) bind(cb *ClientBinding) {
	w.clients = append(w.clients, &client{b: cb, bells: cb.Doorbells[w.id], group: new(sched.Group[*lane])})
	cb.Doorbells[w.id].SetSleeping(w.cmds.sleeping.Load())
}

func (w *worker) unbind(cb *ClientBinding) {
	for i, cl := range w.clients {
		if cl.b != cb {
			continue
		}
		for _, s := range cl.streams {
			if s != nil {
				s.detach(w)
			}
		}
		w.clients = slices.Delete(w.clients, i, i+1)
		w.flushes.drop(w, cb)
		return
	}
}

func (w *worker) client(cb *ClientBinding) *client {
	for _, cl := range w.clients {
		if cl.b == cb {
			return cl
		}
	}
	return nil
}

// pollBells marks the lanes whose clients rang. Bells of unknown streams are ignored.
func (w *worker) pollBells() int {
	n := 0
	for _, cl := range w.clients {
		for i := range (len(cl.streams) + 63) / 64 {
			for v := cl.bells.Take(i); v != 0; v &= v - 1 {
				bit := i*64 + bits.TrailingZeros64(v)
				n++
				if bit < len(cl.streams) && cl.streams[bit] != nil {
					w.mark(cl.streams[bit].lane)
				}
			}
		}
	}
	return n
}

// kickMovers starts what queue pairs have requested of far memory in this turn.
func (w *worker) kickMovers() {
	for _, cl := range w.clients {
		if m := cl.b.Mover; m != nil {
			m.Kick()
		}
	}
}
