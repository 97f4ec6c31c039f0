package verbs

// SRQ is a shared receive queue: receives that several QPs of one worker take
// from. It is for that worker's goroutine.
type SRQ struct {
	src   RecvSource
	taken uint64
}

// NewSRQ returns an SRQ that takes its receives from src.
func NewSRQ(src RecvSource) *SRQ { return &SRQ{src: src} }

// NextRecv implements RecvSource.
func (s *SRQ) NextRecv(wr *RecvWR) bool {
	if !s.src.NextRecv(wr) {
		return false
	}
	s.taken++
	return true
}

// Taken returns how many receives were taken.
func (s *SRQ) Taken() uint64 { return s.taken }
