package verbs

// SRQ is a shared receive queue: receives that several QPs of one worker take
// from. It is for that worker's goroutine.
type SRQ struct {
	src   RecvSource
	taken uint64
	limit int
	fired bool
}

// posted is what a RecvSource may say of itself: how many receives wait in it.
type posted interface{ Posted() int }

// NewSRQ returns an SRQ that takes its receives from src. The limit event needs
// a src with a method Posted() int, as shm.RQ has.
func NewSRQ(src RecvSource) *SRQ { return &SRQ{src: src} }

// NextRecv implements RecvSource.
func (s *SRQ) NextRecv(wr *RecvWR) bool {
	if !s.src.NextRecv(wr) {
		return false
	}
	s.taken++
	if s.limit > 0 {
		if p, ok := s.src.(posted); ok && p.Posted() < s.limit {
			s.limit, s.fired = 0, true
		}
	}
	return true
}

// SetLimit arms the limit event (IBV_EVENT_SRQ_LIMIT_REACHED): it happens once
// when a message leaves fewer than n receives. 0 disarms it.
func (s *SRQ) SetLimit(n int) { s.limit = n }

// PollLimit reports once that the limit event has happened.
func (s *SRQ) PollLimit() bool {
	f := s.fired
	s.fired = false
	return f
}

// Taken returns how many receives were taken.
func (s *SRQ) Taken() uint64 { return s.taken }
