package verbs

// SRQ is a shared receive queue, from which several QPs of one worker take receives. Only that
// worker's goroutine may use it.
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

// Taken returns the number of receives that were taken.
func (s *SRQ) Taken() uint64 { return s.taken }
