#include "textflag.h"

// func hasClflushopt() bool
TEXT ·hasClflushopt(SB), NOSPLIT, $0-1
	MOVL $0, AX
	CPUID
	CMPL AX, $7
	SETGE ret+0(FP)
	JLT  done
	MOVL $7, AX
	MOVL $0, CX
	CPUID
	BTL  $23, BX
	SETCS ret+0(FP)

done:
	RET

// func fetch(p *byte, n int)
TEXT ·fetch(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

next:
	PREFETCHT0 (SI)
	ADDQ $64, SI
	SUBQ $64, CX
	JG   next
	RET

// func fetchForWriting(p *byte, n int)
TEXT ·fetchForWriting(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

next:
	BYTE $0x0f; BYTE $0x0d; BYTE $0x0e // PREFETCHW (SI), which the assembler does not know
	ADDQ $64, SI
	SUBQ $64, CX
	JG   next
	RET

// func evict(p *byte, n int)
TEXT ·evict(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	ADDQ SI, CX  // the end
	ANDQ $~63, SI

next:
	CLFLUSHOPT (SI)
	ADDQ $64, SI
	CMPQ SI, CX
	JLT  next
	RET

// func touch(page *byte)
TEXT ·touch(SB), NOSPLIT, $0-8
	MOVQ page+0(FP), SI
	MOVB (SI), AX
	LFENCE
	RET

// Each load has the result of the one before, made 0, in its address.
#define LOAD(offset) \
	MOVBQZX offset(SI)(AX*1), AX \
	ANDQ    $0, AX

// func chase(page *byte)
TEXT ·chase(SB), NOSPLIT, $0-8
	MOVQ page+0(FP), SI
	MOVQ $0, AX
	LFENCE
	LOAD(0x9c0)
	LOAD(0x240)
	LOAD(0xe80)
	LOAD(0x580)
	LOAD(0xb00)
	LOAD(0x380)
	LOAD(0xd40)
	LOAD(0x100)
	LFENCE
	RET
