package prefetch

//go:noescape
func octets(p *byte, n int)
