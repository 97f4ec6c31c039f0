package shm

import (
	"sync/atomic"
	"unsafe"
)

// word32 is the shared 32-bit word at mem[off:]. Mappings start at page
// boundaries and every offset of the layouts is a multiple of its size.
func word32(mem []byte, off int) *atomic.Uint32 {
	_ = mem[off : off+4 : off+4]
	return (*atomic.Uint32)(unsafe.Pointer(&mem[off]))
}

// words64 are the n shared 64-bit words at mem[off:].
func words64(mem []byte, off, n int) []atomic.Uint64 {
	_ = mem[off : off+8*n : off+8*n]
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&mem[off])), n)
}
