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

// touch makes the processor find out where a page is.
//
//go:noescape
func touch(page *byte)

// chase loads lines of a page in an order that the processor does not foresee.
//
//go:noescape
func chase(page *byte)
