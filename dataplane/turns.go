package dataplane

import "math"

// turns is the verbs.Turns of a worker.
type turns struct{ w *worker }

// resting is the value of touched.began between turns.
const resting = math.MaxUint64

// Mark is called after an invalidation: a turn that begins later does not use the memory.
func (t turns) Mark() uint64 { return t.w.e.invalidations.Add(1) }

func (t turns) Passed(mark uint64) bool {
	for _, o := range t.w.e.workers {
		if o != t.w && o.began.Load() < mark {
			return false
		}
	}
	return true
}
