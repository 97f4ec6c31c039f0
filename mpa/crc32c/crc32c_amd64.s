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

// func pass(dst, src *byte, n int, crc, ptr uint32) (reg, even, odd uint32)
//
// SI, DI, CX: src, dst or zero, octets left. R9: ptr of the marker that is due,
// or zero. Z0 to Z3: what the CRC has come to;
// only Z0 outside of the loop. Z10 to Z13 and Z14 to Z17: sums, in each 32 bits,
// of the octets at even and at odd places of a vector.
TEXT ·pass(SB), NOSPLIT, $0-44
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVL crc+24(FP), AX
	MOVL ptr+28(FP), R9
	VBROADCASTI32X4 fold512<>(SB), Z9
	MOVL $0x00010001, DX
	VPBROADCASTD DX, Z18 // a one at every even place
	VPSLLD $8, Z18, Z19  // at every odd one
	VPXOR X0, X0, X0
	VPXOR X10, X10, X10
	VPXOR X11, X11, X11
	VPXOR X12, X12, X12
	VPXOR X13, X13, X13
	VPXOR X14, X14, X14
	VPXOR X15, X15, X15
	VPXORQ Z16, Z16, Z16
	VPXORQ Z17, Z17, Z17

	// The first CX%64 octets stand at the end of a vector of zeros, which do not
	// count where the register is not in front of them: it goes in behind them.
	MOVQ CX, BX
	ANDQ $63, BX
	JNZ  ragged
	TESTL R9, R9
	JZ   first

	// A marker, and the first 60 octets.
	MOVL $1, DX
	KMOVW DX, K2
	KNOTW K2, K3
	VMOVDQU64 (SI), Z20
	VPEXPANDD.Z Z20, K3, Z20
	MOVWLZX R9, R10
	BSWAPL R10
	VPBROADCASTD R10, K2, Z20
	SUBQ $4, SI
	MOVL $0, R12 // blocks since the last marker, modulo 2
	JMP  loaded

ragged:
	MOVL $64, R8
	SUBQ BX, R8
	MOVQ $-1, DX
	SHLXQ R8, DX, DX
	KMOVQ DX, K1
	VMOVDQU64 (SI), Z20
	TESTQ DI, DI
	JZ   head
	VMOVDQU64 Z20, (DI) // those behind the first CX%64 come again
	ADDQ BX, DI

head:
	VPEXPANDB.Z Z20, K1, Z0
	VPDPBUSD Z18, Z0, Z10
	VPDPBUSD Z19, Z0, Z14
	VMOVD AX, X4
	VPEXPANDB.Z Z4, K1, Z4
	VPXORQ Z4, Z0, Z0
	ADDQ BX, SI
	SUBQ BX, CX
	// What is left of the register when there were fewer than four.
	SHLL $3, BX
	SHRXQ BX, AX, AX
	CMPL BX, $32
	JB   first
	XORL AX, AX

first: // whole vector
	VMOVDQU64 (SI), Z20

loaded:
	TESTQ DI, DI
	JZ   second
	VMOVDQU64 Z20, (DI)
	ADDQ $64, DI

second:
	VPDPBUSD Z18, Z20, Z10
	VPDPBUSD Z19, Z20, Z14
	VMOVD AX, X4
	VPXORQ Z4, Z20, Z20
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPTERNLOGQ $0x96, Z20, Z4, Z0
	ADDQ $64, SI
	SUBQ $64, CX
	CMPQ CX, $256
	JB   vectors

	VMOVDQA64 Z0, Z3
	VPXOR X0, X0, X0
	VPXOR X1, X1, X1
	VPXOR X2, X2, X2
	VBROADCASTI32X4 fold2048<>(SB), Z8

loop:
	VMOVDQU64 (SI), Z20
	VMOVDQU64 64(SI), Z21
	VMOVDQU64 128(SI), Z22
	TESTL R9, R9
	JNZ  marked

fourth:
	VMOVDQU64 192(SI), Z23

store:
	TESTQ DI, DI
	JZ   read
	VMOVDQU64 Z20, (DI)
	VMOVDQU64 Z21, 64(DI)
	VMOVDQU64 Z22, 128(DI)
	VMOVDQU64 Z23, 192(DI)
	ADDQ $256, DI

read:
	VPCLMULQDQ $0x00, Z8, Z0, Z4
	VPCLMULQDQ $0x11, Z8, Z0, Z0
	VPCLMULQDQ $0x00, Z8, Z1, Z5
	VPCLMULQDQ $0x11, Z8, Z1, Z1
	VPCLMULQDQ $0x00, Z8, Z2, Z6
	VPCLMULQDQ $0x11, Z8, Z2, Z2
	VPCLMULQDQ $0x00, Z8, Z3, Z7
	VPCLMULQDQ $0x11, Z8, Z3, Z3
	VPDPBUSD Z18, Z20, Z10
	VPDPBUSD Z18, Z21, Z11
	VPDPBUSD Z18, Z22, Z12
	VPDPBUSD Z18, Z23, Z13
	VPDPBUSD Z19, Z20, Z14
	VPDPBUSD Z19, Z21, Z15
	VPDPBUSD Z19, Z22, Z16
	VPDPBUSD Z19, Z23, Z17
	VPTERNLOGQ $0x96, Z20, Z4, Z0
	VPTERNLOGQ $0x96, Z21, Z5, Z1
	VPTERNLOGQ $0x96, Z22, Z6, Z2
	VPTERNLOGQ $0x96, Z23, Z7, Z3
	ADDQ $256, SI
	SUBQ $256, CX
	CMPQ CX, $256
	JAE  loop

	// four vectors to one
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
	VPADDD Z11, Z10, Z10
	VPADDD Z13, Z12, Z12
	VPADDD Z15, Z14, Z14
	VPADDD Z17, Z16, Z16
	VPADDD Z12, Z10, Z10
	VPADDD Z16, Z14, Z14

vectors:
	CMPQ CX, $64
	JB   reduce
	VMOVDQU64 (SI), Z20
	TESTQ DI, DI
	JZ   one
	VMOVDQU64 Z20, (DI)
	ADDQ $64, DI

one:
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPDPBUSD Z18, Z20, Z10
	VPDPBUSD Z19, Z20, Z14
	VPTERNLOGQ $0x96, Z20, Z4, Z0
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

	// Sums of even and odd places, side by side.
	VPUNPCKLDQ Z14, Z10, Z4
	VPUNPCKHDQ Z14, Z10, Z5
	VPADDD Z5, Z4, Z4
	VEXTRACTI64X4 $1, Z4, Y5
	VPADDD Y5, Y4, Y4
	VEXTRACTI128 $1, Y4, X5
	VPADDD X5, X4, X4
	VPSRLDQ $8, X4, X5
	VPADDD X5, X4, X4
	VMOVQ X4, R8

	VMOVQ X0, AX
	VPEXTRQ $1, X0, DX
	VZEROUPPER
	XORL BX, BX
	CRC32Q AX, BX
	CRC32Q DX, BX
	MOVL BX, reg+32(FP)
	MOVL R8, even+36(FP)
	SHRQ $32, R8
	MOVL R8, odd+40(FP)
	RET

marked: // since one vector is ahead of the loop, in every second block the fourth begins with a marker
	XORL $1, R12
	JNZ  fourth
	SUBQ $4, SI
	VMOVDQU64 192(SI), Z23
	ADDL $512, R9
	MOVWLZX R9, R10
	BSWAPL R10
	VPBROADCASTD R10, K2, Z23
	JMP  store

// func join(dst, src *byte, n int)
TEXT ·join(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX

piece:
	VMOVDQU64 (SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VMOVDQU64 256(SI), Z4
	VMOVDQU64 320(SI), Z5
	VMOVDQU64 384(SI), Z6
	VMOVDQU64 444(SI), Z7 // 508 octets are four less than eight vectors
	VMOVDQU64 Z0, (DI)
	VMOVDQU64 Z1, 64(DI)
	VMOVDQU64 Z2, 128(DI)
	VMOVDQU64 Z3, 192(DI)
	VMOVDQU64 Z4, 256(DI)
	VMOVDQU64 Z5, 320(DI)
	VMOVDQU64 Z6, 384(DI)
	VMOVDQU64 Z7, 444(DI)
	ADDQ $512, SI
	ADDQ $508, DI
	DECQ CX
	JNZ  piece
	VZEROUPPER
	RET
