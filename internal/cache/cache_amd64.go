package cache

// canEvict is whether the processor has CLFLUSHOPT.
var canEvict = hasClflushopt()

func hasClflushopt() bool

//go:noescape
func fetch(p *byte, n int)

//go:noescape
func fetchForWriting(p *byte, n int)

//go:noescape
func evict(p *byte, n int)

// touch loads a page's entry of the page table into the TLB.
//
//go:noescape
func touch(page *byte)

// chase loads lines of a page in an order that the processor's prefetchers do not recognize.
//
//go:noescape
func chase(page *byte)
