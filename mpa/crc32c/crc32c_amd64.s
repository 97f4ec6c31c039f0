#include "textflag.h"

// To fold x by d bits is to multiply it by x^d modulo the polynomial. The
// constants are x^(d+31) for the low quadword, which comes first, and x^(d-33)
// for the high one, modulo the polynomial and bit-reflected.

DATA fold2048<>+0(SB)/8, $0xdcb17aa4
DATA fold2048<>+8(SB)/8, $0xb9e02b86
GLOBL fold2048<>(SB), RODATA|NOPTR, $16

DATA fold512<>+0(SB)/8, $0x740eef02
DATA fold512<>+8(SB)/8, $0x9e4addf8
GLOBL fold512<>(SB), RODATA|NOPTR, $16

// By 384, 256 and 128 bits: what takes three lanes of a vector to the fourth.
DATA lanes<>+0(SB)/8, $0x1c291d04
DATA lanes<>+8(SB)/8, $0xddc0152b
DATA lanes<>+16(SB)/8, $0x3da6d0cb
DATA lanes<>+24(SB)/8, $0xba4fc28e
DATA lanes<>+32(SB)/8, $0xf20c0dfe
DATA lanes<>+40(SB)/8, $0x493c7d27
DATA lanes<>+48(SB)/8, $0
DATA lanes<>+56(SB)/8, $0
GLOBL lanes<>(SB), RODATA|NOPTR, $64

// func fold(crc uint32, p []byte) uint32
TEXT ·fold(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ p_base+8(FP), SI
	MOVQ p_len+16(FP), CX
	VBROADCASTI32X4 fold512<>(SB), Z9
	VMOVDQU64 (SI), Z0
	VMOVD AX, X4 // clears the rest of Z4
	VPXORQ Z4, Z0, Z0
	CMPQ CX, $256
	JB   one

	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VBROADCASTI32X4 fold2048<>(SB), Z8
	ADDQ $256, SI
	SUBQ $256, CX
	CMPQ CX, $256
	JB   four

loop:
	VPCLMULQDQ $0x00, Z8, Z0, Z4
	VPCLMULQDQ $0x11, Z8, Z0, Z0
	VPCLMULQDQ $0x00, Z8, Z1, Z5
	VPCLMULQDQ $0x11, Z8, Z1, Z1
	VPCLMULQDQ $0x00, Z8, Z2, Z6
	VPCLMULQDQ $0x11, Z8, Z2, Z2
	VPCLMULQDQ $0x00, Z8, Z3, Z7
	VPCLMULQDQ $0x11, Z8, Z3, Z3
	VPTERNLOGQ $0x96, (SI), Z4, Z0
	VPTERNLOGQ $0x96, 64(SI), Z5, Z1
	VPTERNLOGQ $0x96, 128(SI), Z6, Z2
	VPTERNLOGQ $0x96, 192(SI), Z7, Z3
	ADDQ $256, SI
	SUBQ $256, CX
	CMPQ CX, $256
	JAE  loop

four: // vectors to one
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPTERNLOGQ $0x96, Z0, Z4, Z1
	VPCLMULQDQ $0x00, Z9, Z1, Z4
	VPCLMULQDQ $0x11, Z9, Z1, Z1
	VPTERNLOGQ $0x96, Z1, Z4, Z2
	VPCLMULQDQ $0x00, Z9, Z2, Z4
	VPCLMULQDQ $0x11, Z9, Z2, Z2
	VPTERNLOGQ $0x96, Z2, Z4, Z3
	VMOVDQA64 Z3, Z0
	JMP  vectors

one:
	ADDQ $64, SI
	SUBQ $64, CX

vectors:
	CMPQ CX, $64
	JB   reduce
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPTERNLOGQ $0x96, (SI), Z4, Z0
	ADDQ $64, SI
	SUBQ $64, CX
	JMP  vectors

reduce: // four lanes to one
	VMOVDQU64 lanes<>(SB), Z8
	VPCLMULQDQ $0x00, Z8, Z0, Z4
	VPCLMULQDQ $0x11, Z8, Z0, Z5
	VPXORQ Z5, Z4, Z4
	VEXTRACTI32X4 $3, Z0, X0
	VEXTRACTI32X4 $1, Z4, X1
	VEXTRACTI32X4 $2, Z4, X2
	VPXOR X4, X0, X0
	VPXOR X2, X1, X1
	VPXOR X1, X0, X0
	VMOVDQU lanes<>+32(SB), X8

sixteen:
	CMPQ CX, $16
	JB   last
	VPCLMULQDQ $0x00, X8, X0, X1
	VPCLMULQDQ $0x11, X8, X0, X0
	VPXOR (SI), X1, X1
	VPXOR X1, X0, X0
	ADDQ $16, SI
	SUBQ $16, CX
	JMP  sixteen

last:
	VMOVQ X0, AX
	VPEXTRQ $1, X0, DX
	VZEROUPPER
	XORL BX, BX
	CRC32Q AX, BX
	CRC32Q DX, BX
	TESTQ $8, CX
	JZ   word
	CRC32Q (SI), BX
	ADDQ $8, SI

word:
	TESTQ $4, CX
	JZ   half
	CRC32L (SI), BX
	ADDQ $4, SI

half:
	TESTQ $2, CX
	JZ   octet
	CRC32W (SI), BX
	ADDQ $2, SI

octet:
	TESTQ $1, CX
	JZ   done
	CRC32B (SI), BX

done:
	MOVL BX, ret+32(FP)
	RET

// func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)
TEXT ·cpuid(SB), NOSPLIT, $0-24
	MOVL leaf+0(FP), AX
	MOVL sub+4(FP), CX
	CPUID
	MOVL AX, eax+8(FP)
	MOVL BX, ebx+12(FP)
	MOVL CX, ecx+16(FP)
	MOVL DX, edx+20(FP)
	RET

// func xgetbv() uint32
TEXT ·xgetbv(SB), NOSPLIT, $0-4
	XORL CX, CX
	XGETBV
	MOVL AX, ret+0(FP)
	RET
