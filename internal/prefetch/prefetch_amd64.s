#include "textflag.h"

// func bytes(p *byte, n int)
TEXT ·fetch(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

next:
	PREFETCHT0 (SI)
	ADDQ $64, SI
	SUBQ $64, CX
	JG   next
	RET

// func forWriting(p *byte, n int)
TEXT ·forWriting(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

next:
	BYTE $0x0f; BYTE $0x0d; BYTE $0x0e // PREFETCHW (SI), which the assembler does not know
	ADDQ $64, SI
	SUBQ $64, CX
	JG   next
	RET
