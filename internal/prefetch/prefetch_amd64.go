package prefetch

//go:noescape
func fetch(p *byte, n int)

//go:noescape
func forWriting(p *byte, n int)
