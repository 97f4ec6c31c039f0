package prefetch

//go:noescape
func octets(p *byte, n int)

//go:noescape
func forWriting(p *byte, n int)
